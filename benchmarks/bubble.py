"""The bubble of each schedule, measured on two Gloo ranks, against the simulator's for the same durations.

Each rank times its computations, its messages and what it takes to start these; the simulator is given the same for
every step and says what share of it the ranks would compute nothing. What is compared is thus who waits for whom, and
that nothing else is waited for. With fewer free cores than ranks the operating system makes ranks wait, too.

    python benchmarks/bubble.py [--model mlp256] [--steps 40] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import partitioner
from benchmarks import common, peers
from partitioner import Constraints, Plan, Topology, partition
from partitioner.runtime.execute.transfers import SENDING
from partitioner.runtime.observe.measured_bubble import MeasuredTimes, StepTimes, timed
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.simulate import Part, simulate
from partitioner.simulate.program_time import PlanDurations

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-1p": 1, "zb-2p": 1, "zb-v": 2, "dualpipe-v": 2}
ALLOWED = 0.1  # of the simulator's
MEETING_S = 1e-3  # more than a reduction of one number takes
WAITED_S = 50e-6  # less is what it takes to look
Transfers = dict[tuple[int, int], deque[float]]  # by source and target, in order


class MeasuredDurations:
    """What the simulator asks for in one step, as two ranks measured it in that step."""

    def __init__(self, plan: Plan, facts: ProgramFacts, ranks: Sequence[StepTimes], transfers: Transfers) -> None:
        self.expected = PlanDurations(plan)
        self.transfers = transfers
        self.parts: list[dict[tuple[str, int], deque[float]]] = []
        self.posts: list[dict[str, deque[float]]] = []
        for stage, times in enumerate(ranks):
            parts: dict[tuple[str, int], deque[float]] = defaultdict(deque)
            posts: dict[str, deque[float]] = defaultdict(deque)
            instructions, calls = plan.program.stages[stage].instructions, facts.stages[stage]
            for index, seconds in times.work:
                i = instructions[index]
                if i.calls is None:
                    run = [place for place, call in enumerate(calls) if call.data.prologue]
                else:
                    run = [place for place in range(*i.calls) if i.op == "F" or calls[place].has_backward]
                for place in run:
                    parts["F" if i.op == "TOTAL_F" else i.op, place].append(seconds / len(run))
            for index, i in enumerate(instructions):
                posts[i.op].append(times.posting.get(index, 0.0))
            self.parts.append(parts)
            self.posts.append(posts)

    def call(self, stage: int, call: int, part: Part) -> float:
        return self.parts[stage][part, call].popleft()

    def posting(self, stage: int, op: str) -> float:
        return self.posts[stage][op].popleft()

    def slowdown(self, stage: int) -> float:
        return 1.0  # it is in what was measured

    def update(self, stage: int) -> float:
        return 0.0  # which is not part of the measured step

    def transfer(self, source: int, target: int, nbytes: int) -> float:
        return self.transfers[source, target].popleft()

    def host(self, stage: int, nbytes: int) -> float:
        return self.expected.host(stage, nbytes)

    def share(
        self, op: Literal["all_gather", "reduce_scatter"], axes: tuple[str, ...], nbytes: int, stage: int
    ) -> float:
        return self.expected.share(op, axes, nbytes, stage)

    def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
        return self.expected.all_reduce(axes, nbytes, stages)


def _arrivals(ranks: Sequence[StepTimes]) -> Iterator[tuple[int, int, str, int, float, float, bool]]:
    """Every message of a step: source, target, channel, its number, the seconds from the start of its send to when its
    receiver began to wait and to when it had it, and whether that was what it waited for."""
    for source, target in ((0, 1), (1, 0)):
        for channel in "FB":
            starts = ranks[source].sent.get((target, channel), ())
            waits = ranks[target].received.get((source, channel), ())
            for number, (start, (begun, done)) in enumerate(zip(starts, waits, strict=True)):
                yield source, target, channel, number, begun - start, done - start, done - begun > WAITED_S


def _transfers(plan: Plan, steps: Sequence[Sequence[StepTimes]]) -> list[Transfers]:
    """By step, how long each message took; of those that nobody waited for it is known that they did not take longer
    than until they were read: the mean of the others at most."""
    every = [list(_arrivals(ranks)) for ranks in steps]
    awaited = [done for messages in every for *_, done, waited in messages if waited]
    usual = statistics.mean(awaited) if awaited else 0.0
    found = []
    for messages in every:
        taken = {
            (source, target, channel, number): done if waited else max(0.0, min(usual, begun))
            for source, target, channel, number, begun, done, waited in messages
        }
        transfers: Transfers = defaultdict(deque)
        for source, stage in enumerate(plan.program.stages):
            sent: Counter[tuple[int, str]] = Counter()
            for i in stage.instructions:
                if i.op in SENDING and i.peer is not None:
                    transfers[source, i.peer].append(taken[source, i.peer, i.op[-1], sent[i.peer, i.op[-1]]])
                    sent[i.peer, i.op[-1]] += 1
        found.append(transfers)
    return found


def _meet() -> None:
    """Return on all ranks at the same moment: the simulator's begin a step at once."""
    moment = torch.tensor(time.perf_counter() + MEETING_S, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    while time.perf_counter() < moment.item():
        pass


def _measure(workload: str, paths: dict[str, str], steps: int) -> dict[str, MeasuredTimes]:
    """What each of the two ranks runs."""
    work = common.WORKLOADS[workload]
    batch, found = work.batch(), {}
    for name, path in paths.items():
        engine = partitioner.Engine(Plan.load(path), weights=work.whole())
        for _ in range(3):
            engine.step(batch)
        with timed(engine) as times:
            for _ in range(steps):
                _meet()
                engine.step(batch)
        found[name] = times
    return found


def _bubble(ranks: Sequence[StepTimes]) -> float:
    """The share of a step, from its first begin to its last end, in which a rank computes nothing."""
    whole = max(step.started + step.whole for step in ranks) - min(step.started for step in ranks)
    return 1 - statistics.mean(step.computing for step in ranks) / whole


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
        facts, bubbles = ProgramFacts(plan.program), []
        of_steps = list(zip(*(rank.steps for rank in times), strict=True))
        for of_step, transfers in zip(of_steps, _transfers(plan, of_steps), strict=True):
            expected = simulate(plan.program, MeasuredDurations(plan, facts, of_step, transfers), facts=facts)
            bubbles.append((_bubble(of_step), expected.bubble))
        measured, simulated = (statistics.median(shares) for shares in zip(*bubbles, strict=True))
        found[name] = measured, simulated
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
