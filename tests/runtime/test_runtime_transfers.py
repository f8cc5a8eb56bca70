"""When transfers start and end: early enough to run behind computation, and no longer held than needed."""

from __future__ import annotations

from partitioner.runtime.execute.transfers import find_proven_arrivals, place_early_receives
from partitioner.runtime.program.program import RankProgram
from tests.helpers.instruction_words import line
from tests.helpers.runtime_programs import program_of_net


def test_a_receive_starts_one_computation_early():
    assert place_early_receives(line("F0", "FREE0", "F1", "FREE1", "RECV_F2<1", "F2")) == {2: [4]}


def test_receives_of_a_channel_keep_their_order():
    assert place_early_receives(line("F0", "RECV_F1<1", "RECV_F2<1", "F1", "RECV_F3<1")) == {0: [1, 2], 3: [4]}


def test_channels_do_not_hold_each_other_up():
    assert place_early_receives(line("F0", "RECV_F1<1", "F1", "RECV_B0<1", "B0")) == {0: [1], 2: [3]}


def told(rank: RankProgram) -> dict[str, list[tuple[tuple[int, str], int]]]:
    return {str(rank.instructions[i]): sends for i, sends in find_proven_arrivals(rank).items()}


def test_an_answer_shows_that_what_it_answers_has_arrived():
    """The last stage sends the gradient of a microbatch when it has read all of them, last microbatch first."""
    program = program_of_net(pp=2, num_microbatches=3)
    assert told(program.rank(0)) == {f"0RECV_B{m}": [((1, "F"), 3)] for m in range(3)}
    assert told(program.rank(1)) == {}  # the first stage sends nothing after it has read a gradient
