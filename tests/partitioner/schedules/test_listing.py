"""Lists in few words: they read like those written out, and are proven like them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.emit import program as emitting
from partitioner.runtime.program.instructions import Listing, count_repetitions
from partitioner.runtime.program.program import Program, Stage
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from partitioner.schedules.registry import SCHEDULES, Schedule
from partitioner.schedules.steady_state import find_growth, find_steady_state, grow_items
from tests.helpers.mutations import with_stage
from tests.helpers.pipeline_orders import two_chunks, zero_bubble
from tests.helpers.tiny_programs import tiny_program


def written_out(program: Program) -> Program:
    stages = tuple(s.model_copy(update={"instructions": tuple(s.instructions)}) for s in program.stages)
    return program.model_copy(update={"stages": stages})


@pytest.fixture
def more_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "zero-bubble", Schedule(zero_bubble))
    monkeypatch.setitem(SCHEDULES, "two-chunks", Schedule(two_chunks, chunks=2))


@pytest.mark.usefixtures("more_schedules")
@settings(max_examples=40)
@given(
    pp=st.integers(1, 4),
    m=st.integers(9, 30),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble", "two-chunks"]),
    train=st.booleans(),
    bucket_bytes=st.sampled_from([1, 10**9]),
)
def test_a_listing_is_the_list_that_the_schedule_gives(pp: int, m: int, schedule: str, train: bool, bucket_bytes: int):
    options = dict(
        schedule=schedule,
        chunks=SCHEDULES[schedule].chunks,
        bucket_bytes=bucket_bytes,
        objective="train" if train else "infer",
    )
    short = tiny_program(pp, 2, 1, m, 5, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitting, "find_steady_state", lambda *_: None)
        long = tiny_program(pp, 2, 1, m, 5, **options)
    assert not any(isinstance(s.instructions, Listing) for s in long.stages)
    assert written_out(short) == long
    assert all(len(a.instructions) == len(b.instructions) for a, b in zip(short.stages, long.stages, strict=True))
    assert Program.model_validate_json(short.model_dump_json()) == short
    quick, full = prove(short), prove(long)
    assert (quick.instructions, quick.collectives, quick.transfers) == (
        full.instructions,
        full.collectives,
        full.transfers,
    )


def test_many_microbatches_take_no_more_room():
    few, many = tiny_program(2, num_microbatches=20), tiny_program(2, num_microbatches=2000)
    assert all(isinstance(s.instructions, Listing) for s in many.stages)
    assert len(many.model_dump_json()) < 1.05 * len(few.model_dump_json())


@pytest.mark.parametrize("change", ["times", "more", "moved", "dropped"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_listing_that_goes_wrong_later_is_refused(change: str, stage: int):
    program = tiny_program(2, num_microbatches=20)
    listing = program.stages[stage].instructions
    assert isinstance(listing, Listing)
    refused = 0
    for number, part in enumerate(listing.parts):
        if change == "dropped":
            new = part.model_copy(update={"body": part.body[:-1]})
        else:
            new = part.model_copy(update={change: getattr(part, change) + 1})
        parts = (*listing.parts[:number], new, *listing.parts[number + 1 :])
        changed = Listing(steps=listing.steps, unit=1, parts=parts)
        if tuple(changed) == tuple(listing):
            continue  # a part without microbatches does not move
        with pytest.raises(ProofError) as error:
            prove(with_stage(program, stage, instructions=changed))
        assert error.value.rank in range(program.world_size)
        refused += 1
    assert refused


def test_stages_that_have_not_grown_alike_are_refused():
    program = tiny_program(2, num_microbatches=20)
    listing = program.stages[1].instructions
    assert isinstance(listing, Listing)
    with pytest.raises(ProofError):
        prove(with_stage(program, 1, instructions=listing.extend(listing.steps + 1)))


def test_no_steady_state_is_seen_in_what_has_none():
    assert find_growth([("a", 0), ("b", 1)], [("a", 0), ("c", 1), ("b", 1)], 1) is None
    assert find_steady_state("1f1b", 4, 5) is None  # too few to be worth it


def test_a_part_repeats_and_what_follows_moves():
    few = [("f", 0), ("f", 1), ("f", 2), ("b", 2), ("end", None)]
    many = [("f", 0), ("f", 1), ("f", 2), ("f", 3), ("b", 3), ("end", None)]
    parts = find_growth(few, many, 1)
    assert parts is not None
    assert list(grow_items(few, parts, 4)) == [*(("f", i) for i in range(7)), ("b", 6), ("end", None)]


def test_repetitions_count_every_instruction_of_the_list():
    """With 30 microbatches a stage runs 30 forwards: the counts of equal operations add up to the list's length."""
    for schedule in ("1f1b", "gpipe"):
        for stage in tiny_program(2, num_microbatches=30, schedule=schedule).stages:
            assert isinstance(stage.instructions, Listing)
            counts = Counter[str]()
            for instruction, times in count_repetitions(stage.instructions):
                counts[instruction.op] += times
            assert counts["F"] == 30
            assert counts == Counter(instruction.op for instruction in stage.instructions)
            assert [*count_repetitions(tuple(stage.instructions))] == [(i, 1) for i in stage.instructions]


def test_a_listing_is_a_field_like_a_tuple():
    stage = tiny_program(1, num_microbatches=30).stages[0]
    assert isinstance(stage.instructions, Listing)
    assert stage.instructions[0] == next(iter(stage.instructions))
    assert stage.instructions[-2:] == tuple(stage.instructions)[-2:]
    assert Stage.model_validate_json(stage.model_dump_json()) == stage
