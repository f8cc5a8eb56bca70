"""Ends of a step of several virtual stages on each rank: what messages, gathers and reductions add to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.step.gradient_reduction import CommunicationTime
from partitioner.cost.step.schedule_ends import RankEnds, seconds_added
from partitioner.cost.step.step_ends import GradientBucket
from partitioner.schedules.formulas import pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.solve.stages.problem import StageCall, StageProblem
from partitioner.solve.stages.split import StagePlan

FORWARD, BACKWARD = 1.0, 2.0
PHASES = [Phases(FORWARD, BACKWARD / 2, BACKWARD / 2)] * 4


def added(*buckets: list[GradientBucket], every_backward: bool = False, m: int = 2) -> float:
    """Interleaved, two ranks with calls 0 and 2, and 1 and 3: one call is a virtual stage. Each rank has a list of
    ``buckets``."""
    cost = CallCost(forward_s=FORWARD, backward_s=BACKWARD)
    calls = tuple(StageCall(str(k), cost) for k in range(4))
    problem = StageProblem(calls, 4, m, (1 << 40,) * 4, schedule="interleaved", chunks=2)
    stage = StagePlan(0, 1, 0, FORWARD, BACKWARD, 0.0, 0.0, 0)
    ranks = []
    for rank, of_rank in enumerate(buckets):
        parts = tuple(replace(stage, start=k, stop=k + 1, number=k) for k in (rank, rank + 2))
        plan = replace(stage, start=rank, stop=rank + 3, number=rank, parts=parts)
        ranks.append(RankEnds(problem, plan, of_rank, 1.0, 0.0, every_backward))
    return seconds_added("interleaved", m, 2, PHASES, ranks)


def test_a_rank_computes_for_one_stage_while_another_ones_values_come():
    """Forwards alone, 1 s each, messages 0.5 s, two microbatches. Rank 0 runs virtual stage 0 from 0 and 1 s on, rank 1
    stage 1 from 1.5 and 2.5 s on: the second message comes while it computes. Rank 0 runs stage 2 from 3 and 4 s on,
    rank 1 stage 3 from 4.5 and 5.5 s on: it ends at 6.5 s. If messages took the receiving rank's time it would be 7."""
    phases = [Phases(1.0, values_sent=0.5 if k else 0.0) for k in range(4)]
    assert pipeline_seconds("interleaved", 2, 2, 2, phases, train=False) == pytest.approx(6.5)
    occupied = [Phases(1.5 if k else 1.0) for k in range(4)]
    assert pipeline_seconds("interleaved", 2, 2, 2, occupied, train=False) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ([GradientBucket(0, CommunicationTime(0.5))], [], 0.5),  # behind the last backward of all
        ([GradientBucket(2, CommunicationTime(1.0))], [], 0.0),  # beside those of the rank's first virtual stage
        ([], [GradientBucket(1, CommunicationTime(1.5))], 0.0),  # rank 0 has one more backward, of 2 s
        ([], [GradientBucket(1, CommunicationTime(3.0))], 1.0),
        (
            [GradientBucket(0, CommunicationTime(0.5), CommunicationTime(0.25))],
            [],
            0.75,
        ),  # what is left is added up behind the scatter
        ([GradientBucket(0, gather_s=0.25)], [], 0.25),  # ahead of the first forward of all
        ([], [GradientBucket(1, gather_s=0.75)], 0.0),  # rank 1 waits 1 s for values anyway
        ([], [GradientBucket(1, gather_s=1.5)], 0.5),
        ([GradientBucket(0, gather_s=0.25)], [GradientBucket(1, gather_s=1.5)], 0.5),  # one hides the other
    ],
)
def test_what_a_rank_waits_for_anyway_hides_gathers_and_reductions(
    first: list[GradientBucket], second: list[GradientBucket], seconds: float
):
    assert added(first, second) == pytest.approx(seconds)


def test_a_scatter_behind_every_backward_waits_for_the_one_before():
    """A scatter of 3 s behind backwards of 2 s that follow one another: the last microbatch's begins 1 s late, and ends
    3 s behind its backward. Without those of the microbatches before it is 3 s."""
    buckets = [GradientBucket(0, CommunicationTime(3.0))]
    assert added(buckets, []) == pytest.approx(3.0)
    assert added(buckets, [], every_backward=True) == pytest.approx(4.0)
