"""What the step would take with each algorithm of attention over ``cp``."""

from __future__ import annotations

from dataclasses import replace

from partitioner.context import ALGORITHMS, algorithms_of
from partitioner.evaluate import Evaluator, Solved
from partitioner.job import Job
from partitioner.plan import ContextWay
from passes.errors import PartitionError


def context_ways(job: Job, chosen: Solved) -> tuple[ContextWay, ...]:
    """One by one; nothing without such an axis."""
    if chosen.local.context is None or not chosen.context_model:
        return ()
    calls = algorithms_of(chosen.context_model, chosen.local.context)
    ways = []
    for name in ALGORITHMS:
        if calls == {name: sum(calls.values())}:
            ways.append(ContextWay(algorithm=name, calls=calls[name], step_time=chosen.estimate.step_time))
            continue
        pinned = job.constraints.model_copy(update={"context": name})
        try:
            found = Evaluator(replace(job, constraints=pinned)).solve(chosen.point)
            way = ContextWay(algorithm=name, step_time=found.estimate.step_time)
        except PartitionError as error:
            way = ContextWay(algorithm=name, reason=getattr(error, "message", str(error)))
        ways.append(way.model_copy(update={"calls": calls.get(name, 0)}))
    return tuple(ways)


__all__ = ["context_ways"]
