"""Timelines: step time, bubble and memory of the programs themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.runtime.program.analysis import ProgramFacts, value_bytes
from partitioner.runtime.program.memory import state_bytes
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.simulate import Part, Timeline, simulate, simulate_step_time
from partitioner.runtime.prove.prove import prove
from tests.helpers.tiny_programs import tiny_program

STAGE_F, STAGE_B = 1.0, 2.0


@dataclass
class Even:
    """Every stage takes ``STAGE_F`` forward and ``STAGE_B`` backward; what is sent and reduced takes as given."""

    program: Program
    hop: float = 0.0
    reduction: float = 0.0
    post: float = 0.0
    slow: float = 1.0
    step: float = 0.0
    scatter: float = 0.0

    def call(self, stage: int, call: int, part: Part) -> float:
        calls = self.program.stages[stage].calls
        own = [k for k, c in enumerate(calls) if c.path not in ("mask", "count")]
        if call not in own:
            return 0.0
        return (STAGE_F if part == "F" else STAGE_B if part == "B" else STAGE_B / 2) / len(own)

    def transfer(self, source: int, target: int, nbytes: int) -> float:
        assert abs(source - target) == 1
        return self.hop

    def share(self, op: str, axes: tuple[str, ...], nbytes: int, stage: int) -> float:
        return self.scatter if op == "reduce_scatter" else 0.0

    def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
        assert len(stages) == 1 if axes else len(stages) > 1
        return self.reduction

    def posting(self, stage: int, op: str) -> float:
        return self.post if op[:4] in ("SEND", "RECV") else 0.0

    def slowdown(self, stage: int) -> float:
        return self.slow

    def update(self, stage: int) -> float:
        return self.step


def times(program: Program, **options: float) -> Timeline:
    """The timeline, whose step time is also found without one: then instructions are counted once for all
    microbatches."""
    timeline = simulate(program, Even(program, **options))
    assert simulate_step_time(ProgramFacts(program), Even(program, **options)) == timeline.step_time
    return timeline


@settings(max_examples=20)
@given(p=st.integers(1, 4), m=st.integers(1, 6), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_is_that_of_the_formula(p: int, m: int, schedule: str):
    """``(m + p - 1) (f + b)`` for both: Narayanan et al. 2021, section 2.2.1."""
    timeline = times(tiny_program(p, 1, 1, m, 6, schedule))
    assert timeline.step_time == pytest.approx((m + p - 1) * (STAGE_F + STAGE_B))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert all(s.busy == pytest.approx(m * (STAGE_F + STAGE_B)) for s in timeline.stages)


def test_spans_cover_the_program_without_overlap():
    program = tiny_program(3, 2, 1, 4)
    for stage, timeline in zip(program.stages, times(program, hop=0.1, reduction=0.5).stages, strict=True):
        assert [s.instruction for s in timeline.spans] == list(stage.instructions)
        assert all(a.end == b.start for a, b in zip(timeline.spans, timeline.spans[1:], strict=False))
        assert all(s.start <= s.end - s.work + 1e-9 for s in timeline.spans)


def test_transfers_delay_those_who_wait_for_them():
    program = tiny_program(2, num_microbatches=1)
    assert times(program, hop=0.25).step_time == pytest.approx(2 * (STAGE_F + STAGE_B) + 2 * 0.25)
    sent = [b for b in times(program, hop=0.25).stages[0].background if b.instruction.op == "SEND_F"]
    assert [(b.start, b.end) for b in sent] == [(1.0, 1.25)]
    assert sent[0].nbytes == 2 * value_bytes(program.values["h0"])


def test_a_rank_computes_nothing_while_it_starts_a_transfer():
    """A transfer starts with its post; that of a receive is over before what it waits for comes."""
    program = tiny_program(2, num_microbatches=1)
    timeline = times(program, hop=0.25, post=0.125)
    assert timeline.step_time == pytest.approx(2 * (STAGE_F + STAGE_B) + 2 * 0.25)
    (sent,) = [s for s in timeline.stages[0].spans if s.instruction.op == "SEND_F"]
    assert (sent.start, sent.end) == (1.0, 1.125)
    late = times(program, hop=0.25, post=3.0)  # the first stage: forward, a send and a receive, backward
    assert late.step_time == pytest.approx(STAGE_F + 3.0 + 3.0 + STAGE_B)
    assert all(stage.busy == pytest.approx(STAGE_F + STAGE_B) for stage in late.stages)


def test_reductions_hide_behind_the_last_backward():
    program = tiny_program(1, dp=2, num_microbatches=2, tied=False, bucket_bytes=150)
    timeline = times(program, reduction=0.01)
    reduced = [b for b in timeline.stages[0].background if b.instruction.op == "REDUCE"]
    assert len(reduced) == len(program.stages[0].buckets) > 3
    assert reduced[0].start < timeline.step_time - STAGE_B / 2
    assert timeline.step_time == pytest.approx(2 * (STAGE_F + STAGE_B) + 0.01 + 0.01)  # the total, the last bucket


def test_what_runs_beside_a_reduction_takes_longer():
    """Each reduction of 0.01 s beside a computation takes 1.5 x 0.01 s, in which 0.01 s of work is done: the last
    backward ends 0.005 s later for each. The last one is beside nothing."""
    program = tiny_program(1, dp=2, num_microbatches=2, tied=False, bucket_bytes=150)
    plain, slowed = (times(program, reduction=0.01, slow=slow) for slow in (1.0, 1.5))
    reduced = [b.end - b.start for b in slowed.stages[0].background if b.instruction.op == "REDUCE"]
    assert reduced == pytest.approx([0.015] * (len(reduced) - 1) + [0.01])
    assert slowed.step_time == pytest.approx(plain.step_time + 0.005 * (len(reduced) - 1))


def test_a_step_ends_with_the_update():
    program = tiny_program(2, num_microbatches=2)
    plain, updated = times(program), times(program, step=0.75)
    assert updated.step_time == pytest.approx(plain.step_time + 0.75)
    assert updated.gradients_s == pytest.approx(plain.step_time)
    assert [stage.update_s for stage in updated.stages] == [0.75, 0.75]


def test_steps_that_overlap_take_what_a_rank_works():
    """Two stages and four microbatches: alone a step takes (4 + 1) x 3 s. The first rank begins the next step when its
    own backwards have ended, when the second one ended a forward and a backward before: 4 x 3 s and what the first
    backward of a step waits for the second rank, 3 s less what the first one computes meanwhile."""
    program = tiny_program(2, num_microbatches=4, tied=False)
    alone, following = (simulate(program, Even(program), overlap_steps=overlap) for overlap in (False, True))
    assert alone.step_time == pytest.approx(5 * (STAGE_F + STAGE_B))
    assert 4 * (STAGE_F + STAGE_B) <= following.step_time <= alone.step_time
    assert following.stages == alone.stages


def test_a_slow_reduction_is_waited_for():
    program = tiny_program(1, dp=2, num_microbatches=1)
    (step,) = [s for s in times(program, reduction=7.0).stages[0].spans if s.instruction.op == "STEP"]
    assert step.end - step.start == pytest.approx(7.0)


def test_tied_states_meet_when_the_last_stage_has_come():
    timeline = times(tiny_program(2, num_microbatches=2), reduction=0.5)
    ends = [s.end for stage in timeline.stages for s in stage.spans if s.instruction.op == "SYNC"]
    assert ends == pytest.approx([3 * (STAGE_F + STAGE_B) + 0.5] * 2)


def test_pieces_of_tied_states_are_summed_over_stages_when_they_are_reduced():
    """ZeRO-1 over two ranks: SYNC sums the pieces of the tied weight's gradient, which its reduce-scatter makes. That
    takes 3 s on the first stage, behind the last backward and other reduce-scatters, and then SYNC takes 2 s."""
    program = tiny_program(2, dp=2, num_microbatches=2, zero=1)
    (sync,) = {i.states for i in program.stages[0].instructions if i.op == "SYNC"}
    (number,) = [n for n, bucket in enumerate(program.stages[0].buckets) if not set(sync).isdisjoint(bucket.states)]
    first, last = times(program, reduction=2.0, scatter=3.0).stages
    (scattered,) = [b for b in first.background if b.instruction.op == "SCATTER" and b.instruction.bucket == number]
    spans = [span for stage in (first, last) for span in stage.spans if span.instruction.op == "SYNC"]
    assert scattered.end - scattered.start == pytest.approx(3.0)
    assert scattered.end >= 3 * (STAGE_F + STAGE_B) + 3.0
    assert [span.end for span in spans] == pytest.approx([scattered.end + 2.0] * 2)
    assert spans[0].start < scattered.end  # the instruction waits


def test_recomputed_calls_run_forward_again():
    plain, again = (times(tiny_program(1, num_microbatches=1, recompute=r)) for r in ([], range(2, 9)))
    assert again.step_time == pytest.approx(plain.step_time + STAGE_F)


def test_1f1b_holds_what_is_in_flight_and_gpipe_everything():
    """Stage ``s`` of ``p`` keeps ``min(p - s, m)`` microbatches; its memory is linear in that number."""
    p, m = 4, 6
    gpipe, one = (times(tiny_program(p, 1, 1, m, 6, name, tied=False)) for name in ("gpipe", "1f1b"))
    shortest = times(tiny_program(p, 1, 1, 1, 6, "gpipe", tied=False))
    two = times(tiny_program(p, 1, 1, 2, 6, "gpipe", tied=False))
    for s in range(p):
        each = two.stages[s].peak_bytes - shortest.stages[s].peak_bytes
        assert each > 0
        assert gpipe.stages[s].peak_bytes == shortest.stages[s].peak_bytes + (m - 1) * each
        assert one.stages[s].peak_bytes == shortest.stages[s].peak_bytes + (min(p - s, m) - 1) * each


def test_memory_begins_and_ends_with_the_states():
    program = tiny_program(2, dp=2, tp=2)
    facts = ProgramFacts(program)
    for s, stage in enumerate(times(program).stages):
        assert stage.memory[-1][1] == state_bytes(facts, s)
        assert stage.peak_bytes == max(held for _, held in stage.memory) > state_bytes(facts, s)
        assert [t for t, _ in stage.memory] == sorted(t for t, _ in stage.memory)


def test_recomputation_keeps_less():
    plain, again = (tiny_program(1, num_microbatches=4, schedule="gpipe", recompute=r) for r in ([], range(2, 9)))
    assert times(again).stages[0].peak_bytes < times(plain).stages[0].peak_bytes


def test_extra_bytes_are_added_and_the_prover_agrees_on_the_peak():
    program = tiny_program(3)
    timeline = simulate(program, Even(program), extra_bytes=[5, 6, 7])
    peaks = prove(program, memory_limits=10**9, extra_bytes=[5, 6, 7]).peak_bytes
    assert tuple(s.peak_bytes for s in timeline.stages) == peaks
