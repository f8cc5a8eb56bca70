"""The bubble of each schedule, measured on two Gloo ranks, against the simulator's for the same durations.

Each rank times what it computes in its steps; the medians are the durations of the simulator, which says what share of
a step the ranks would compute nothing. With fewer free cores than ranks the operating system makes ranks wait, too.

    python benchmarks/bubble.py [--model mlp256] [--steps 40] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

import runtime
from benchmarks import common, peers
from partitioner import Constraints, Plan, Topology, partition
from partitioner.timing import PlanDurations
from runtime.bubble import Times, timed
from runtime.simulate import Part, simulate

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-1p": 1, "zb-2p": 1, "zb-v": 2, "dualpipe-v": 2}
ALLOWED = 0.1  # of the simulator's


class MeasuredDurations:
    """What the simulator asks for, from what two ranks measured; transfers as the plan expects them."""

    def __init__(self, plan: Plan, ranks: list[Times]) -> None:
        self.expected = PlanDurations(plan)
        self.parts: list[dict[tuple[str, int], float]] = []
        for times in ranks:
            found: dict[tuple[str, int], float] = {}
            # the longest runs of calls last: those of the last microbatch are cut where gradients are complete
            for (op, calls), seconds in sorted(times.work.items(), key=lambda item: item[0][1][1] - item[0][1][0]):
                for place in range(*calls):
                    found[op, place] = statistics.median(seconds) / (calls[1] - calls[0])
            self.parts.append(found)

    def call(self, stage: int, call: int, part: Part) -> float:
        return self.parts[stage].get((part, call), 0.0)

    def transfer(self, source: int, target: int, nbytes: int) -> float:
        return self.expected.transfer(source, target, nbytes)

    def share(
        self, op: Literal["all_gather", "reduce_scatter"], axes: tuple[str, ...], nbytes: int, stage: int
    ) -> float:
        return self.expected.share(op, axes, nbytes, stage)

    def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
        return self.expected.all_reduce(axes, nbytes, stages)


def _measure(workload: str, paths: dict[str, str], steps: int) -> dict[str, Times]:
    """What each of the two ranks runs."""
    work = common.WORKLOADS[workload]
    batch, found = work.batch(), {}
    for name, path in paths.items():
        engine = runtime.Engine(Plan.load(path), weights=work.whole())
        for _ in range(3):
            engine.step(batch)
        with timed(engine) as times:
            for _ in range(steps):
                engine.step(batch)
        found[name] = times
    return found


def run(workload: str, steps: int) -> dict[str, tuple[float, float]]:
    """For each schedule the bubble that was measured and that of the simulator."""
    work = common.WORKLOADS[workload]
    size = len(work.batch()[0]) // peers.NUM_MICROBATCHES
    plans: dict[str, Plan] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, chunks in SCHEDULES.items():
            given: dict[str, Any] = dict(pp=2, dp=1, tp=1, microbatch_size=size, virtual_stages=chunks)
            constraints = Constraints(schedule=name, **given)
            plans[name] = partition(work.whole(), Topology.local(2), work.batch(), constraints=constraints)
            paths[name] = str(plans[name].save(Path(folder) / f"{name}.json"))
        ranks = common.run_ranks(2, _measure, workload, paths, steps)
    found = {}
    for name, plan in plans.items():
        times = [rank[name] for rank in ranks]
        expected = simulate(plan.program, MeasuredDurations(plan, times)).bubble
        found[name] = statistics.mean(statistics.median(t.bubbles) for t in times), expected
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The bubbles of schedules, measured and simulated.")
    parser.add_argument("--model", default="mlp256", choices=[n for n in common.WORKLOADS if n != "long"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--check", action="store_true", help="exit with 1 if one is off by more than a tenth")
    options = parser.parse_args(arguments)
    table = Table(title=f"{options.model}: share of a step in which a rank computes nothing, two Gloo ranks")
    table.add_column("schedule")
    for heading in ("measured", "simulated", "measured / simulated"):
        table.add_column(heading, justify="right")
    off = 0
    for name, (measured, simulated) in run(options.model, options.steps).items():
        ratio = measured / simulated if simulated else float("inf")
        off += abs(ratio - 1) > ALLOWED
        table.add_row(name, f"{measured:.3f}", f"{simulated:.3f}", f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 1 if options.check and off else 0


if __name__ == "__main__":
    sys.exit(main())
