"""The plans of published runs beside free ones: ``python benchmarks/free_plans.py [--rows FILE] [--every N]``.

Each row's job is planned as published and with nothing pinned but what its software does (overlap, how states are
gathered), by the same public call and under the same model. The free plan must never be slower; which parts of the time
make the difference is said. The last line is one JSON object: ``rows``, ``jobs``, ``slower`` (the rows' names) and
``times`` (the median of published over free). The status is 1 where any is slower.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import ROWS, by_model, prepared_model
from published_rows import PublishedJob, Row, Unstated, published_job
from rich.console import Console
from rich.progress import Progress

from partitioner import Constraints, Plan, partition
from partitioner.explain.time_parts import time_changes
from partitioner.passes.errors import PartitionError
from partitioner.plans.figures import mesh_text

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Freed:
    """A published plan and the free plan of its job under the same model: step times in seconds, what the free one is,
    and which parts of its time make the difference."""

    id: str
    job: str
    pinned: float
    free: float
    chosen: str
    why: str
    explanation: str

    @property
    def is_slower(self) -> bool:
        return self.free > self.pinned * (1 + _ROUNDING)


def freed(row: Row) -> Freed | None:
    """The plan of ``row``'s job that nothing pins, beside the published one; ``None`` where that has no plan."""
    return next(of_rows([row]), None)


def of_rows(rows: Sequence[Row]) -> Iterator[Freed]:
    """The rows that have a plan, each beside the free plan of its job; each job is planned freely once."""
    plans: dict[str, Plan] = {}
    for row in rows:
        with suppress(Unstated, PartitionError):
            job = published_job(row)
            pinned = _plan(job, job.constraints)
            kept = Constraints(overlap_steps=job.constraints.overlap_steps)
            of_job = job.shape, job.length, job.precision, job.topology, job.global_batch, job.optimizer
            asked = *of_job, job.profile, kept
            name = repr(asked)
            if name not in plans:
                plans[name] = _plan(job, kept)
            plan = plans[name]
            changes = " ".join(time_changes(pinned.estimate.breakdown, plan.estimate.breakdown))
            times = pinned.estimate.step_time, plan.estimate.step_time
            yield Freed(row["id"], name, *times, mesh_text(plan.mesh), changes, plan.explain())


def _plan(job: PublishedJob, constraints: Constraints) -> Plan:
    model = prepared_model(job.shape, job.length, job.precision, job.global_batch)
    asked: dict[str, Any] = {"global_batch": job.global_batch, "optimizer": job.optimizer, "profile": job.profile}
    return partition(model, job.topology, constraints=constraints, estimate_only=True, **asked)


def _all_of(rows: list[Row]) -> tuple[int, list[Freed]]:
    return len(rows), list(of_rows(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=Path, default=ROWS, help="JSON lines; default: the published runs")
    parser.add_argument("--family", action="append", help="only this family; may be given again")
    parser.add_argument("--every", type=int, default=1, help="only every so many rows")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    rows: list[Row] = [json.loads(line) for line in options.rows.read_text().splitlines() if line.strip()]
    rows = [r for r in rows if "step_time_s" in r and (not options.family or r["family"] in options.family)]
    rows = rows[options.every - 1 :: options.every]
    found: list[Freed] = []
    pool = multiprocessing.get_context("spawn").Pool(options.processes, torch.set_num_threads, (1,))
    with Progress(console=Console(file=sys.stderr)) as progress, pool:
        task = progress.add_task("planning published jobs freely", total=len(rows))
        for count, freed_plans in pool.imap_unordered(_all_of, by_model(rows)):
            progress.advance(task, count)
            for each in freed_plans:
                found.append(each)
                slower = "SLOWER " if each.is_slower else ""
                times = f"published {each.pinned:.4g} s, free {each.free:.4g} s"
                print(f"{slower}{each.id}: {times}: {each.chosen}. {each.why}", flush=True)
    worse = sorted(each.id for each in found if each.is_slower)
    faster = statistics.median(each.pinned / each.free for each in found) if found else None
    print(json.dumps({"rows": len(found), "jobs": len({f.job for f in found}), "slower": worse, "times": faster}))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
