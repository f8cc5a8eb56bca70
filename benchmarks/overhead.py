"""How long a planned step takes, against the same step written by hand or with torch's own tools.

Two Gloo ranks with one thread each run ours and the peers in turns, in one process pair per model and mesh; every
figure is a median of ratios of neighbouring repetitions. A step is forward, loss, backward and all gradient reductions,
without an optimizer; it gives every rank the whole batch's loss, which is checked against the unmodified model's.

    python benchmarks/overhead.py [--quick] [--only tp2/mlp64] [--json] [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import partitioner
from benchmarks import common, memory, peers
from partitioner import Constraints, Plan, Topology, partition

# A ratio above this is more overhead than we accept.
LIMITS = {
    "explicit": 1.05,
    "dtensor": 0.7,
    "ddp": 1.05,
    "fsdp": 1.0,
    "gpipe": 1.05,
    "1f1b": 1.05,
    "interleaved": 1.0,
    "zb-1p": 1.0,
    "zb-v": 1.0,
    "dualpipe-v": 1.0,
    "ring": 1.1,
    "all-to-all": 1.05,
}
_VIRTUAL = {"interleaved": 2, "zb-1p": 2, "zb-v": 2, "dualpipe-v": 2}  # stages on each rank

# Whole values between layers, as the peers have them: it is the overhead that is compared, not the layout.
_TENSOR_PARALLEL = dict(pp=1, dp=1, tp=2, sequence_parallel=False)

# All else equal: ours with everything whole, and with everything shared.
_DATA_PARALLEL = {"ours": dict(pp=1, dp=2, tp=1, zero=0), "zero3": dict(pp=1, dp=2, tp=1, zero=3)}


@dataclass(frozen=True)
class Job:
    """One pair of processes: a workload on a mesh, our plans by name, and for each peer the plan it is held against."""

    mesh: str
    workload: str
    plans: dict[str, dict[str, Any]]
    against: dict[str, str]

    @property
    def cases(self) -> dict[str, tuple[str, str]]:
        """Case name -> (our plan, the peer)."""
        return {f"{self.mesh}/{self.workload}/{peer}": (plan, peer) for peer, plan in self.against.items()}


def _jobs(only: str) -> list[Job]:
    def schedules(workload: str) -> dict[str, dict[str, Any]]:
        size = len(common.WORKLOADS[workload].batch()[0]) // peers.NUM_MICROBATCHES
        given = dict(pp=2, dp=1, tp=1, microbatch_size=size)
        names = ("gpipe", "1f1b", *_VIRTUAL)
        return {s: {**given, "schedule": s, "virtual_stages": _VIRTUAL.get(s, 1)} for s in names}

    jobs = []
    for name in common.WORKLOADS:
        if name == "long":  # a sequence to share
            ring = dict(pp=1, dp=1, tp=1, cp=2, context="ring", zero=0)
            jobs.append(Job("cp2", name, {"ours": ring}, {"ring": "ours"}))
            continue
        if name == "experts":
            shared = dict(pp=1, dp=2, tp=1, ep=2, zero=0)
            jobs.append(Job("ep2", name, {"ours": shared}, {"all-to-all": "ours"}))
            continue
        if name == "vocabulary":  # most of the work is in the head and its loss
            jobs.append(Job("dp2", name, _DATA_PARALLEL, {"ddp": "ours", "fsdp": "zero3"}))
            continue
        jobs += [
            Job("tp2", name, {"ours": _TENSOR_PARALLEL}, {"explicit": "ours", "dtensor": "ours"}),
            Job("dp2", name, _DATA_PARALLEL, {"ddp": "ours", "fsdp": "zero3"}),
            Job("pp2", name, schedules(name), {s: s for s in schedules(name)}),
        ]
    kept = []
    for job in jobs:
        against = {peer: plan for case, (plan, peer) in job.cases.items() if only in case}
        if against:
            plans = {name: c for name, c in job.plans.items() if name in against.values()}
            kept.append(Job(job.mesh, job.workload, plans, against))
    return sorted(kept, key=lambda job: ["tp2", "dp2", "pp2", "cp2", "ep2"].index(job.mesh))


@dataclass
class Outcome:
    times: dict[str, list[float]]  # contender -> seconds per step, by repetition
    losses: dict[str, float]
    peaks: dict[str, int] = field(default_factory=dict)  # contender -> bytes of tensors at the fullest of a step
    expected_loss: float = field(default=math.nan)


def _ours(work: common.Workload, path: str) -> common.Step:
    engine = partitioner.Engine(Plan.load(path), weights=work.whole())
    batch = work.batch()
    return lambda: engine.step(batch).item()


def _measure(
    workload: str, plans: dict[str, str], rivals: list[str], sharing: bool, repetitions: int, budget_s: float
) -> Outcome:
    """What each of the two ranks runs; ``sharing``: how much memory contenders take is measured, too."""
    work = common.WORKLOADS[workload]
    builds = {f"ours {name}": partial(_ours, work, path) for name, path in plans.items()}
    builds |= {rival: partial(peers.PEERS[rival], work) for rival in rivals}
    peaks = {name: memory.peak_bytes(build) for name, build in builds.items()} if sharing else {}
    steps = {name: build() for name, build in builds.items()}
    losses = {name: step() for name, step in steps.items()}
    times = common.interleaved(steps, repetitions=repetitions, block_s=0.1, budget_s=budget_s)
    expected = peers.single(work)() if dist.get_rank() == 0 else math.nan
    return Outcome(times, losses, peaks, expected)


def run(job: Job, repetitions: int, budget_s: float) -> Outcome:
    """Plan, then measure on two ranks.

    Raises:
        RuntimeError: a rank failed, or a contender's loss is not the model's.
    """
    work = common.WORKLOADS[job.workload]
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, given in job.plans.items():
            model = work.whole()
            plan = partition(model, Topology.local(2), work.batch(), constraints=Constraints(**given))
            paths[name] = str(Path(folder) / f"{name}.json")
            plan.save(paths[name])
        measured = job.workload, paths, list(job.against), job.mesh == "dp2", repetitions, budget_s
        ranks = common.run_ranks(2, _measure, *measured)
    for rank, outcome in enumerate(ranks):
        for name, loss in outcome.losses.items():
            if not math.isclose(loss, ranks[0].expected_loss, rel_tol=1e-5):
                expected = ranks[0].expected_loss
                raise RuntimeError(f"{name} has loss {loss} on rank {rank}, the model has {expected}")
    return replace(ranks[0], peaks={name: max(r.peaks[name] for r in ranks) for name in ranks[0].peaks})


def _row(case: str, ours: list[float], peer: list[float], ratio: float, limit: float) -> list[str]:
    colour = "green" if ratio <= limit else "red"
    quartiles = statistics.quantiles([a / b for a, b in zip(ours, peer, strict=True)], n=4)
    milliseconds = (f"{statistics.median(t) * 1e3:.2f}" for t in (ours, peer))
    spread = f"{quartiles[0]:.2f}-{quartiles[2]:.2f}"
    return [case, *milliseconds, f"[{colour}]{ratio:.3f}[/]", spread, f"{limit:.2f}"]


def _table() -> Table:
    table = Table(title="step time, two Gloo ranks with one thread each")
    table.add_column("case", no_wrap=True)
    for heading in ("ours (ms)", "peer (ms)", "ours / peer", "quartiles", "at most"):
        table.add_column(heading, justify="right")
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Step time against hand-written peers and torch's own tools.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions and of the time")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is above its limit")
    options = parser.parse_args(arguments)

    console = Console(width=None if sys.stdout.isatty() else 100)
    measure: Callable[[Job], Outcome] = partial(
        run, repetitions=12 if options.quick else 48, budget_s=10 if options.quick else 45
    )
    ratios: dict[str, float] = {}
    peaks: dict[str, float] = {}
    failures = 0
    table = _table()
    for job in _jobs(options.only):
        with console.status(f"{job.mesh} {job.workload}"):
            try:
                outcome = measure(job)
            except (RuntimeError, ValueError) as error:
                failures += 1
                console.print(f"[red]{job.mesh}/{job.workload}[/]", str(error), markup=True)
                continue
        for case, (plan, peer) in job.cases.items():
            ours, theirs = outcome.times[f"ours {plan}"], outcome.times[peer]
            ratios[case] = round(common.median_ratio(ours, theirs), 4)
            if peer in outcome.peaks:
                peaks[case] = round(outcome.peaks[f"ours {plan}"] / outcome.peaks[peer], 4)
            table.add_row(*_row(case, ours, theirs, ratios[case], LIMITS[peer]))
    console.print(table)
    for case, ratio in peaks.items():
        console.print(f"{case}: memory at the fullest of a step, ours / peer: {ratio:.3f}")
    if options.json:
        print(json.dumps({"ratios": ratios, "memory": peaks}))
    above = [case for case, ratio in ratios.items() if ratio > LIMITS[case.rsplit("/", 1)[1]]]
    return 1 if failures or (options.check and above) else 0


if __name__ == "__main__":
    sys.exit(main())
