"""Check lower bounds against plans at scale: ``python -m benchmarks.check_bounds [--only NAME ...] [--num N]``.

For each job of ``benchmarks/planning.py``, candidates are drawn at random, with preference for those whose first bound
is low, and planned. No lower bound that the search may use for a candidate may exceed the step time of its plan, and
none may refuse a candidate that has a plan. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.planning import JOBS, make_job_model, make_job_topology


class _Checked(Exception):
    """Ends the planning of a job once its bounds are checked."""


def check_job(name: str, num: int, seed: int) -> tuple[int, list[str]]:
    """Return how many plans of the job called ``name`` were compared with their bounds, and a line for each bound that
    is wrong. ``num``: number of candidates to draw."""
    import partitioner.solve.search.search as search
    from partitioner import partition

    job = JOBS[name]
    model, topology = make_job_model(job), make_job_topology(job)
    result: list[tuple[int, list[str]]] = []

    def check(planned: Any, evaluator: Any, *_: Any, **__: Any) -> Any:
        result.append(_check_candidates(planned, evaluator, num, seed))
        raise _Checked

    search._search_candidates = check
    ids = torch.empty((1, job.seq), dtype=torch.int64, device="meta")
    with suppress(_Checked):
        partition(model, topology, {"input_ids": ids, "labels": ids}, global_batch=job.global_batch, precision="bf16")
    return result[0]


def _check_candidates(job: Any, evaluator: Any, num: int, seed: int) -> tuple[int, list[str]]:
    from partitioner.passes.errors import PartitionError
    from partitioner.solve.bounds.model_bounds import ModelBounds
    from partitioner.solve.search.bound_steps import BoundCascade
    from partitioner.solve.search.space import build_search_space, list_candidates

    bounds = ModelBounds(job, evaluator.placements)
    space = build_search_space(job)
    candidates = list_candidates(space)
    cascade = BoundCascade(bounds, evaluator, candidates, space)
    every = list(dict.fromkeys(member for c in candidates for member in cascade.members([c])))
    first = bounds.times(every)
    order = sorted(range(len(every)), key=lambda k: float(first[k]))
    rng = random.Random(seed)
    compared, wrong = 0, []
    for _ in range(num):
        candidate = every[order[int(len(order) * rng.random() ** 3)]]
        try:
            solved = evaluator.solve(candidate)
        except PartitionError:
            continue
        compared += 1
        step = solved.estimate.step_time * (1 + 1e-9)
        if (quick := float(bounds.times([candidate])[0])) > step:
            wrong.append(f"{candidate}: times {quick} > {step}")
        members = cascade.members([candidate])
        steps = {f"family bound {k}": partial(bound, members) for k, bound in enumerate(cascade.family_bounds)}
        steps |= {f"bound {k}": partial(bound, candidate) for k, bound in enumerate(cascade.candidate_bounds)}
        for what, bound in steps.items():
            for cutoff_s in (math.inf, step):
                try:
                    found = bound(cutoff_s)
                except PartitionError as error:
                    wrong.append(f"{candidate}: {what} refuses a plan of {step}: {error}")
                    continue
                if found > step:
                    wrong.append(f"{candidate}: {what} {found} > {step} (cutoff {cutoff_s})")
        if (tight := cascade.bound_tightly(candidate)) > step:
            wrong.append(f"{candidate}: bound_tightly {tight} > {step}")
    return compared, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, help="these jobs")
    parser.add_argument("--num", type=int, default=60, help="candidates to draw for each job")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    options = parser.parse_args()
    total = 0
    for name in options.only or JOBS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            compared, wrong = pool.apply(check_job, (name, options.num, options.seed))
        total += len(wrong)
        print(f"{name:24} {compared:4d} plans compared, {len(wrong)} bounds wrong", flush=True)
        for line in wrong:
            print(f"  {line}", flush=True)
    sys.exit(bool(total))


if __name__ == "__main__":
    main()
