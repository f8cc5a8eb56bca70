"""When nothing fits: what lacks how much on which stage, and the nearest change that would fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partitioner.cost.calls import CallCost
from partitioner.errors import CapacityError, PlanError
from partitioner.solve.tables import StageProblem, StageTables, min_max
from partitioner.topology.parts import Link
from partitioner.units import bytes_text


def _shortage(tables: StageTables) -> tuple[float, int, list[int]]:
    """Over all splits, the least that any rank can lack (bytes, negative: to spare), on which stage, and the cuts."""
    excess = [m - c for m, c in zip(tables.least_memory, tables.problem.capacity, strict=True)]
    worst, cuts = min_max(excess)
    lacking = [float(excess[s][cuts[s], cuts[s + 1]]) for s in range(len(excess))]
    return worst, int(np.argmax(lacking)), cuts


def capacity_error(tables: StageTables) -> PlanError:
    """Why no split of a problem is possible: what lacks least, where, and (looked for when asked) what would fit."""
    problem = tables.problem
    missing, stage, cuts = _shortage(tables)
    if not np.isfinite(missing):
        pins = ", ".join(f"{problem.calls[i].path} on stage {s}" for i, s in sorted(problem.pinned.items()))
        return PlanError(f"no split into {problem.num_stages} stages has {pins}; leave every stage at least one call")
    capacity = problem.capacity[stage]
    first, last = problem.calls[cuts[stage]].path, problem.calls[cuts[stage + 1] - 1].path
    where = f"{first} to {last}" if first != last else first
    how = "without recomputation" if problem.recompute == "none" else "even with everything recomputed"
    return CapacityError(
        f"stage {stage} of {problem.num_stages} ({where}) needs {bytes_text(capacity + missing)} of the "
        f"{bytes_text(capacity)} of a device {how}: {bytes_text(missing)} too much",
        stage=stage,
        missing_bytes=round(missing),
        advise=lambda: nearest_change(problem),
    )


def nearest_change(problem: StageProblem) -> str:
    """The first that fits, by estimate, of: recomputing, smaller microbatches, more tp, more pp, and all of these."""
    m, size = problem.num_microbatches, problem.microbatch_size
    free = replace(problem, recompute=None)
    changes: list[tuple[str, StageProblem]] = []
    if problem.recompute == "none":
        changes.append(("recompute='full'", free))
    while size > 1 and size % 2 == 0:
        size, m = size // 2, m * 2
        smaller = _scaled(free, size / problem.microbatch_size, 1.0)
        changes.append((f"microbatch_size={size}", replace(smaller, num_microbatches=m, microbatch_size=size)))
    smallest = changes[-1][1] if changes else free
    with_size = f", microbatch_size={size}" if size != problem.microbatch_size else ""
    for factor in (2, 4, 8, 16):
        tp, pp = problem.tp * factor, problem.num_stages * factor
        narrow = _scaled(smallest, 1 / factor, 1 / factor)
        changes.append((f"tp={tp}{with_size} {_room(problem, factor)}", narrow))
        if pp <= len(problem.calls) and not problem.pinned:
            changes.append((f"pp={pp}{with_size} {_room(problem, factor)}", _deeper(smallest, factor)))
            both = f"tp={tp}, pp={pp}{with_size} {_room(problem, factor**2)}"
            changes.append((both, _deeper(narrow, factor)))
    for text, changed in changes:
        if _shortage(StageTables(changed))[0] <= 0:
            return text
    return ""


def _room(problem: StageProblem, factor: int) -> str:
    """Where ``factor`` times as many ranks per replica come from."""
    if problem.dp % factor == 0:
        return f"(dp={problem.dp // factor})"
    return f"(on {factor} times as many devices)"


def _deeper(problem: StageProblem, factor: int) -> StageProblem:
    """``factor`` times as many stages, on devices like the smallest."""
    stages = problem.num_stages * factor
    link = problem.links[0] if problem.links else Link(name="", bandwidth=np.inf, latency=0.0, level=-1)
    return replace(
        problem,
        num_stages=stages,
        capacity=(min(problem.capacity),) * stages,
        links=(link,) * (stages - 1),
        paces=(),
    )


def _scaled(problem: StageProblem, activations: float, states: float) -> StageProblem:
    """The same problem with all tensors that depend on the batch, and all states, this much as large."""

    def cost(c: CallCost) -> CallCost:
        return replace(
            c,
            saved_bytes=c.saved_bytes * activations,
            working_bytes=c.working_bytes * activations,
            input_bytes=tuple(b * activations for b in c.input_bytes),
            output_bytes=tuple(b * activations for b in c.output_bytes),
        )

    shrunk = {id(call.cost): cost(call.cost) for call in problem.calls}
    return replace(
        problem,
        calls=tuple(replace(call, cost=shrunk[id(call.cost)]) for call in problem.calls),
        state_bytes={name: size * states for name, size in problem.state_bytes.items()},
        overhead=cost(problem.overhead),
    )
