"""Steps that are recorded and replayed: the numbers of a step that is executed, on every mesh, and reasons not to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Engine, Evaluate, LaunchError, LocalRanks, Plan, Topology, partition
from partitioner.runtime.comm.storage import free_storage, resize_storage
from partitioner.runtime.errors import InstructionError, ReplayError
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.replay.capture import OperatorCapture, Replay, copy_values
from partitioner.runtime.replay.tape import RecordedCommunicator, Tape
from partitioner.runtime.state.weights import write_weights
from tests.helpers import eager_attention, offload_plans
from tests.helpers.buffer_models import Around, inputs_of
from tests.helpers.every_rank import on_every_rank
from tests.helpers.expert_layers import limited
from tests.helpers.models import CASES, keep_layers
from tests.helpers.net_training import STEPS, Trained, check_equal, train_executed, train_process
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net
from tests.helpers.zero_training import MODELS
from tests.helpers.zero_training import planned as sharded_plan

pytestmark = pytest.mark.usefixtures("without_baselines")

REPLAYS = STEPS + STEPS // 2 - 2  # one step runs as usual, one is recorded


def on_threads(program: Any, model: nn.Module, batch: Any, execution: str) -> list[Trained]:
    return on_every_rank(program, lambda communicator: train_executed(program, model, batch, execution, communicator))


def check_replayed(program: Any, model: nn.Module, batch: Any, eager_calls: bool = False) -> list[Trained]:
    """Training is replayed, with the numbers of an execution operator by operator, twice."""
    program, model = convert_precision(program, "fp64"), model.double()
    expected = on_threads(program, model, batch, "eager")
    found = on_threads(program, model, batch, "graph")
    assert {run.states[""] for run in found} == {"replayed"}
    assert {run.replays for run in found} == {REPLAYS}
    assert any(run.eager_calls for run in found) == eager_calls
    check_equal(found, expected)
    check_equal(on_threads(program, model, batch, "graph"), found)
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"num_microbatches": 2},
        {"dp": 2},
        {"tp": 2, "checkpoint": True},
        {"pp": 2, "num_microbatches": 4, "halves": True},
        {"pp": 2, "tied": True},
        {"dp": 2, "tp": 2},
    ],
    ids=str,
)
def test_a_net_trains_the_same(mesh: dict[str, Any]):
    check_replayed(program_of_net(**mesh), Net(tied=mesh.get("tied", False)), net_inputs())


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("llama", dict(dp=1)),
        ("llama", dict(tp=2, microbatch_size=2)),
        ("llama", dict(pp=2, microbatch_size=2)),
        ("llama", dict(dp=2, recompute="selective")),
        pytest.param("t5", dict(pp=2, microbatch_size=2), marks=pytest.mark.slow),
        pytest.param("vit", dict(dp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_published_models_train_the_same(name: str, fixed: dict[str, Any]):
    case = CASES[name]
    model, batch = case.build(), case.inputs(4)
    if name == "llama":
        keep_layers(model, 2)
    ranks = fixed.get("dp", 1) * fixed.get("tp", 1) * fixed.get("pp", 1)
    axes = {"dp": 1, "tp": 1, "pp": 1} | fixed
    plan = partition(model, Topology.local(ranks), batch, loss=case.loss, constraints=Constraints(**axes))
    check_replayed(plan.program, model, batch)


@pytest.mark.parametrize(
    ("mesh", "sharding", "recompute"),
    [("dp2 tp2", "zero3", "full"), ("dp2 pp2", "zero2", "none"), ("dp4", "hybrid3", "none")],
)
def test_sharded_states_are_gathered_and_released_in_replays(mesh: str, sharding: str, recompute: str):
    """Their memory does not exist between its uses, and comes back at the same tensors."""
    model, batch = MODELS["tied"][0](), MODELS["tied"][1]()
    check_replayed(sharded_plan(mesh, sharding, recompute).program, model, batch)


def test_experts_with_a_capacity_are_recorded():
    model, batch = limited(3)
    fixed = Constraints(dp=2, ep=2, tp=1, pp=1)
    plan = partition(model, Topology.local(2), batch, constraints=fixed)
    (first, *_) = check_replayed(plan.program, model, batch)
    assert "all-to-all" in first.text or "all-reduce" in first.text


def test_experts_whose_rows_the_data_tells_run_between_the_recorded_parts():
    model, batch = MODELS["experts"][0](), MODELS["experts"][1]()
    found = check_replayed(sharded_plan("dp2 ep2", "zero0").program, model, batch, eager_calls=True)
    assert "depend on the data" in found[0].text


def test_random_masks_differ_from_step_to_step():
    """As without replay: they are drawn from the number of the step, which is a tensor."""
    model, batch = eager_attention.model(0.4), eager_attention.inputs()
    plan = partition(model, Topology.local(2), batch, constraints=Constraints(dp=2, tp=1, pp=1))
    check_replayed(plan.program, model, batch)


def test_buffers_that_forward_changes_change_in_replays():
    model = Around(nn.BatchNorm1d(8))
    batch = inputs_of(model)
    plan = partition(model, Topology.local(2), batch, constraints=Constraints(dp=2, tp=1, pp=1))
    check_replayed(plan.program, model, batch)


@pytest.mark.slow
def test_evaluations_between_steps_are_replayed_too():
    case = CASES["llama"]
    model, batch = case.build().double(), case.inputs(4)
    fixed = Constraints(dp=2, tp=1, pp=1)
    plan = partition(
        model, Topology.local(2), batch, programs={"eval": Evaluate()}, constraints=fixed, precision="fp64"
    )

    def runs(execution: str) -> list[Trained]:
        return on_every_rank(
            plan.program, lambda c: train_executed(plan, model, batch, execution, communicator=c, evaluates=True)
        )

    found = runs("graph")
    assert found[0].states == {"": "replayed", "eval": "replayed"}
    assert len(set(found[0].evaluations)) == STEPS
    check_equal(found, runs("eager"))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 2}], ids=str)
def test_processes_over_gloo_train_the_same(mesh: dict[str, Any], tmp_path: Path):
    program, model = convert_precision(program_of_net(**mesh), "fp64"), Net().double()
    (tmp_path / "program.json").write_text(program.model_dump_json())
    torch.save(net_inputs(), tmp_path / "batch.pt")
    write_weights(dict(model.state_dict()), tmp_path / "weights.safetensors")
    files = [str(tmp_path / name) for name in ("program.json", "weights.safetensors", "batch.pt")]
    with LocalRanks(program.world_size, debug=True) as ranks:
        found = ranks.call(train_process, *files, "graph", timeout=200)
        expected = ranks.call(train_process, *files, "eager", timeout=200)
    assert {run.replays for run in found} == {REPLAYS}
    check_equal(found, expected)


def test_states_in_host_memory_are_a_reason_not_to_replay(caplog: pytest.LogCaptureFixture):
    plan = offload_plans.planned("dp4", "optimizer")
    model, batch = MODELS["tied"][0](), MODELS["tied"][1]()
    with caplog.at_level(logging.WARNING):
        found = on_threads(convert_precision(plan.program, "fp64"), model.double(), batch, "graph")
    assert found[0].states == {"": "eager"}
    assert "keeps optimizer in host memory" in found[0].text
    assert caplog.text.count("rank 0 runs without replay: the plan keeps optimizer in host memory") == 1


def test_a_tool_that_follows_a_step_sees_it_operator_by_operator():
    engine = Engine(program_of_net(), Net(), execution="graph")
    for _ in range(3):
        engine.step(net_inputs())
    seen: list[int] = []
    executor = engine._executor
    own = list(executor.actions)

    def noted(index: int, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: (seen.append(index), action())[1]

    executor.actions[:] = [(index, noted(index, action)) for index, action in own]
    engine.step(net_inputs())
    assert len(seen) == len(own)
    executor.actions[:] = own
    engine.step(net_inputs())
    assert engine.execution_report[""].replays == 2


def test_a_step_that_fails_while_it_is_recorded_is_recorded_again():
    engine = Engine(program_of_net(), Net(), execution="graph")
    first = engine.step(net_inputs())
    call = engine._executor.calls[-1]
    plain = call.bound.run_forward  # type: ignore[union-attr]

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no memory left")

    call.bound.run_forward = broken  # type: ignore[union-attr]
    with pytest.raises(InstructionError, match="no memory left"):
        engine.step(net_inputs())
    call.bound.run_forward = plain  # type: ignore[union-attr]
    losses = [engine.step(net_inputs()) for _ in range(3)]
    assert losses == [first] * 3
    assert engine.execution_report[""].replays == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(execution="fast"), "execution must be one of eager, compiled, graph; got 'fast'"),
        (dict(execution="eager", compile=True), "execution is 'eager' and compile is True"),
        (dict(execution="graph", compile="aot_eager"), "compiled parts are recorded on GPUs alone"),
    ],
)
def test_executions_that_contradict_other_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(LaunchError, match=message):
        Engine(program_of_net(), Net(), **options)


# --- recordings -------------------------------------------------------------------------------------------------------


def test_operators_are_repeated_on_the_same_memory():
    capture, x, total = OperatorCapture(), torch.arange(4.0), torch.zeros(4)
    capture.begin()
    doubled = x * 2
    view = doubled[1:].view(3, 1)
    total[1:].add_(view.squeeze(1))
    expanded = x.new_ones(1).expand(3) * 2
    replay = capture.end()
    assert replay is not None
    assert total.tolist() == [0, 2, 4, 6]
    x.copy_(torch.tensor([0.0, 10.0, 20.0, 30.0]))
    doubled.zero_()
    expanded.zero_()
    replay()
    assert view.flatten().tolist() == [20, 40, 60]
    assert total.tolist() == [0, 22, 44, 66]
    assert expanded.tolist() == [2, 2, 2]


def test_a_number_that_the_host_reads_cannot_be_recorded():
    capture = OperatorCapture()
    capture.begin()
    with pytest.raises(ReplayError, match=r"reads a value from the device in aten._local_scalar_dense"):
        torch.ones(()).item()
    capture.abort()
    assert capture.end() is None
    with capture.watch() as found:
        torch.ones(3).nonzero()
    assert found == ["aten.nonzero.default"]


def test_memory_that_is_released_while_recording_is_there_in_replays():
    capture = OperatorCapture()
    storage = torch.empty(8).untyped_storage()
    resize_storage(storage, 0)
    capture.begin()
    resize_storage(storage, 32)
    operand = torch.ones(8) * 3
    result = operand + 1
    free_storage(operand)
    resize_storage(storage, 0)
    replay = capture.end()
    assert replay is not None
    assert storage.nbytes() == 0
    result.zero_()
    replay()
    assert result.tolist() == [4.0] * 8
    assert storage.nbytes() == 0
    free_storage(operand)  # after the recording it is released
    assert operand.untyped_storage().nbytes() == 0


def test_copies_keep_expanded_dims():
    target, source = torch.zeros(3, 1).expand(3, 4), torch.arange(3.0).view(3, 1).expand(3, 4)
    copy_values(target, source)
    assert torch.equal(target, source)


class Notes:
    """A capture that notes where segments begin and end, and lets them contain collectives."""

    kind, collectives = "notes", True

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self) -> None:
        self.events.append("begin")

    def end(self) -> Replay | None:
        self.events.append("end")
        return lambda: self.events.append("replay")

    def abort(self) -> None:
        self.events.append("abort")

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        yield []

    def pause_watch(self) -> nullcontext[None]:
        return nullcontext()


class LateSum:
    """A group of two ranks whose collectives note when they are started and waited for."""

    size, index = 2, 0

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        self.events.append("start")
        return self

    def wait(self) -> Tensor:
        self.events.append("wait")
        return torch.ones(1)

    def release(self) -> None:
        self.events.append("release")


class Pair:
    rank, home, device = 0, 0, torch.device("cpu")

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def group(self, ranks: tuple[int, ...], gathering: bool = False) -> Any:
        return LateSum(self.events)


def test_collectives_of_the_device_end_in_the_segment_in_which_they_start():
    """A CUDA graph must not leave work behind: what is in flight when the host is needed is waited for before."""
    notes = Notes()
    tape = Tape(notes)
    group = RecordedCommunicator(tape, Pair(notes.events)).group((0, 1))  # type: ignore[arg-type]
    tape.start()
    pending = group.all_reduce(torch.ones(1))
    tape.run_on_host(lambda: notes.events.append("host"))
    pending.wait()
    pending.release()
    tape.finish()
    assert notes.events == ["begin", "start", "wait", "end", "host", "begin", "release", "end"]
    for _, entry in tape.entries:
        entry()
    assert notes.events[-3:] == ["replay", "host", "replay"]


def test_a_plan_file_is_enough(tmp_path: Path):
    case = CASES["llama"]
    plan = partition(case.build(), Topology.local(1), case.inputs(4), constraints=Constraints(dp=1))
    plan.save(tmp_path / "plan.json")
    engine = Engine(Plan.load(tmp_path / "plan.json"), case.build(), execution="graph")
    losses = [float(engine.step(case.inputs(4))) for _ in range(4)]  # type: ignore[arg-type]
    assert len(set(losses)) == 1
    assert engine.execution_report[""].replays == 2
