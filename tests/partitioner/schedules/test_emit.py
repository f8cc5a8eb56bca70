"""Programs as they are emitted, and that all ways to emit a model compute the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.emit.program import ProgramSpec, emit
from partitioner.emit.routes import EmitError
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.prove import prove
from partitioner.schedules.registry import SCHEDULES, Schedule
from tests.helpers.pipeline_orders import two_chunks, zero_bubble
from tests.helpers.symbolic_results import result
from tests.helpers.tiny_programs import even_stages, listing, tiny_model, tiny_program


@pytest.fixture
def more_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "zero-bubble", Schedule(zero_bubble))
    monkeypatch.setitem(SCHEDULES, "two-chunks", Schedule(two_chunks, chunks=2))


def test_a_stage_reads_like_its_schedule():
    program = tiny_program(pp=2, num_microbatches=2)
    assert listing(program, 0) == (
        "0LOAD0 0F0 0FREE0 0SEND_F0 0FREE0 0LOAD1 0F1 0FREE1 0SEND_F1 0FREE1 "
        "0RECV_B0 0B0 0FREE0 0RECV_B1 0B1 0FREE1 0SYNC 0STEP"
    )
    assert listing(program, 1).startswith("1LOAD0 1TOTAL_F0 1FREE0 1LOAD1 1TOTAL_F1 1FREE1 1TOTAL 1LOAD0 1RECV_F0 1F0")
    assert listing(program, 1).endswith("1RECV_F1 1F1 1FREE 1FREE1 1B1 1FREE1 1SEND_B1 1FREE1 1SYNC 1STEP")


def test_a_long_edge_is_handed_on_and_its_gradient_back():
    program = tiny_program(pp=4, num_layers=4, num_microbatches=1)
    sends = [[i.values for i in s.instructions if i.op == "SEND_F"] for s in program.stages]
    assert sends == [[("h0", "h1")], [("h0", "h3")], [("y",)], []]
    backs = [[i.values for i in s.instructions if i.op == "SEND_B"] for s in program.stages]
    assert backs == [[], [("h0", "h1")], [("h0", "h3")], [("y",)]]


def test_shared_calls_run_wherever_they_are_read_and_totals_only_there():
    program = tiny_program(pp=4, num_layers=4)
    runs = [[c.path for c in s.calls if c.path in ("mask", "count")] for s in program.stages]
    assert runs == [["mask"], ["mask"], ["mask"], ["count", "mask"]]  # the mask is an output too: of the last stage


def test_the_last_backward_is_cut_so_that_reductions_start_behind_it():
    program = tiny_program(pp=1, dp=2, num_layers=2, num_microbatches=2, tied=False, bucket_bytes=300)
    tail = [i for i in program.stages[0].instructions if i.op in ("B", "REDUCE", "STEP")]
    shown = [f"B{i.microbatch}{list(i.calls)}" if i.calls else str(i) for i in tail]
    assert shown == ["B0[2, 7]", "B1[4, 7]", "0REDUCE:0", "B1[3, 4]", "0REDUCE:1", "B1[2, 3]", "0REDUCE:2", "0STEP"]
    assert program.stages[0].buckets[0].states == ("head.w", "layers.1.up", "layers.1.down")


def test_a_small_model_has_one_bucket_for_each_group():
    program = tiny_program(pp=1, dp=2, tp=2)
    assert sorted(b.axes for b in program.stages[0].buckets) == [("dp",), ("dp", "tp")]


def test_tied_gradients_are_added_over_stages_before_ranks():
    program = tiny_program(pp=2, dp=2)
    for stage in program.stages:
        tail = [str(i) for i in stage.instructions if i.op in ("SYNC", "REDUCE", "STEP")]
        tied = next(k for k, b in enumerate(stage.buckets) if "embed.w" in b.states)
        assert tail[-3:] == [f"{tail[-1][0]}SYNC", f"{tail[-1][0]}REDUCE:{tied}", f"{tail[-1][0]}STEP"]


def test_inference_has_forwards_only_and_frees_between_calls():
    program = tiny_program(pp=1, objective="infer", num_microbatches=1, num_layers=2)
    assert {i.op for i in program.stages[0].instructions} == {"LOAD", "TOTAL_F", "TOTAL", "F", "FREE"}
    assert "0F0 0FREE0 0F0" in listing(program, 0)
    assert not any(v.requires_grad for v in program.values.values())


def test_a_frozen_model_part_has_no_backward():
    model, layouts = tiny_model(2, tied=False)
    frozen = {n: s if n == "head.w" else type(s)(s.name, s.spec, s.kind, False) for n, s in model.states.items()}
    program = emit(
        model.with_(states=frozen),
        even_stages(model, 2),
        ProgramSpec(mesh={"pp": 2}, num_microbatches=1, layouts=layouts),
    )
    prove(program)
    assert not {"B", "RECV_B", "SEND_B"} & {i.op for i in program.stages[0].instructions}
    assert [n for n, v in program.values.items() if v.requires_grad] == ["y", "loss"]


def test_what_nobody_reads_is_kept_and_freed():
    model, layouts = tiny_model(2, num_pieces=2)
    state = model.states["layers.0.gain"]
    states = {**model.states, "unread": type(state)("unread", state.spec, "parameter", True)}
    program = emit(
        model.with_(states=states),
        even_stages(model, 2),
        ProgramSpec(mesh={"pp": 2}, num_microbatches=2, layouts=layouts),
    )
    assert program.states["unread"].stages == (0,)
    prove(program)


@settings(max_examples=25)
@given(
    pp=st.integers(1, 5),
    dp=st.integers(1, 2),
    m=st.integers(1, 5),
    layers=st.integers(1, 5),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    chunks=st.integers(1, 3),
    tied=st.booleans(),
    bucket_bytes=st.sampled_from([1, 200, 10**9]),
)
def test_every_pipeline_computes_what_one_stage_does(
    pp: int, dp: int, m: int, layers: int, schedule: str, chunks: int, tied: bool, bucket_bytes: int
):
    reference = result(tiny_program(1, dp, 1, m, layers, "gpipe", tied=tied))
    chunks = chunks if SCHEDULES[schedule].chunks is None else 1
    made = result(tiny_program(pp, dp, 1, m, layers, schedule, tied=tied, chunks=chunks, bucket_bytes=bucket_bytes))
    assert made == reference


@pytest.mark.usefixtures("more_schedules")
@pytest.mark.parametrize(("schedule", "chunks"), [("zero-bubble", 1), ("two-chunks", 2)])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_schedule_is_added_by_a_line(schedule: str, chunks: int, pp: int):
    program = tiny_program(pp, 2, 1, 3, 5, schedule, chunks=chunks, bucket_bytes=200)
    assert result(program) == result(tiny_program(1, 2, 1, 3, 5, "gpipe"))


def test_programs_are_read_back():
    program = tiny_program(pp=2, dp=2, tp=2)
    assert Program.model_validate_json(program.model_dump_json()) == program


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([0] * 3, "stage_of_call has 3 entries for 9 calls; give one for each"),
        ([0, 0, 0, 1, 0, 1, 1, 1, 1], "call 'layers.1' is on stage 0 but 'layers.0' before it is on stage 1"),
        ([0, 0, 0, 0, 0, 0, 0, 2, 2], "call 'head' is on stage 2; expected one of the stages 0 to 1"),
    ],
)
def test_stages_that_are_no_pipeline_are_refused(stages: list[int], message: str):
    model, layouts = tiny_model(4)
    with pytest.raises(EmitError, match=message):
        emit(model, stages, ProgramSpec(mesh={"pp": 2}, num_microbatches=2, layouts=layouts))


def test_training_without_a_loss_is_refused():
    model, layouts = tiny_model(1)
    with pytest.raises(EmitError, match="training needs a loss"):
        emit(model.with_(loss=None), even_stages(model, 1), ProgramSpec(mesh={}, num_microbatches=1, layouts=layouts))
