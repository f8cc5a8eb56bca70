"""What nobody expected leaves the public interface as a typed error that says where, and what to report."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from partitioner import (
    Constraints,
    Engine,
    Plan,
    RankError,
    Topology,
    UnsupportedError,
    partition,
    prepare,
    run_threads,
)
from partitioner.cli.app import app
from partitioner.passes.errors import InternalError, PartitionError, ResourceError, UserCodeError
from partitioner.passes.faults import PHASES, typed_errors
from partitioner.passes.shard import differentiate, fold, shard_block
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.state import parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def batch() -> tuple[Tensor, ...]:
    return (torch.randn(4, 4),)


def make_plan(**options: Any) -> Plan:
    return partition(Net(), Topology.local(2), batch(), constraints=Constraints(tp=2), **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


def engine_of(plan: Any) -> Engine:
    return Engine(plan, Net(), communicator=ThreadWorld(1).communicator(0))


def broken(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception) -> None:
    """Let a function of a module fail in its own first line, as a fault in it would."""
    plain = getattr(module, name)
    file = inspect.getsourcefile(plain)
    assert file is not None

    namespace: dict[str, Any] = {"error": error}
    source = f"def {plain.__name__}(*args, **kwargs):\n    node = next((a for a in args if hasattr(a, 'op')), None)\n"
    exec(compile(source + "    raise error\n", file, "exec"), namespace)
    monkeypatch.setattr(module, name, namespace[plain.__name__])


def test_an_internal_error_names_phase_operator_and_line(monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch, shard_block._Rewriter, "add_operator", KeyError("x"))
    with pytest.raises(InternalError) as caught:
        make_plan()
    error = caught.value
    assert isinstance(error, ValueError) and isinstance(error.__cause__, KeyError)
    assert error.phase == "sharding a block"
    text = str(error)
    for part in (
        r"internal error of the partitioner in partition(), sharding a block at the operator",
        "aten.linear.default", "test_faults.py:", "KeyError: 'x'", "passes/shard/shard_block.py:",
        "fault of the partitioner",
        "Try other constraints", "Please report it", f"torch {torch.__version__}", "Python 3.",
    ):  # fmt: skip
        assert part in text


INSIDE: dict[str, tuple[Any, str, Callable[[Plan], Any]]] = {
    "folding layers into blocks": (fold, "_join_results", lambda plan: make_plan()),
    "differentiating a block": (differentiate, "_simplify_views", lambda plan: plan.verify(Net(), batch())),
    "checking the weights": (parameters, "_find_differences", lambda plan: run_threads(plan, Net(), batch())),
}


@pytest.mark.parametrize("phase", INSIDE)
def test_every_entry_point_gives_a_typed_error(phase: str, plan: Plan, monkeypatch: pytest.MonkeyPatch):
    module, name, action = INSIDE[phase]
    broken(monkeypatch, module, name, ZeroDivisionError("no reason"))
    with pytest.raises(PartitionError, match="ZeroDivisionError: no reason"):
        action(plan)


class Looking(nn.Module):
    """An index that is out of range fails on a rank alone: the plan does not know the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x)).square().mean()


def test_a_failing_instruction_names_the_models_line():
    plan = partition(Looking(), Topology.local(1), (torch.ones(4, 4, dtype=torch.int64),))
    with pytest.raises(RankError, match=r"instruction \d+: 0F0.*call table, node embedding.*test_faults.py:\d+: Index"):
        run_threads(plan, Looking(), (torch.full((4, 4), 9),))


def test_an_engine_gives_typed_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plan = partition(Net(), Topology.local(1), batch())
    engine = engine_of(plan)
    broken(
        monkeypatch,
        importlib.import_module("partitioner.runtime.engine.engine"),
        "collect_content",
        LookupError("lost"),
    )
    with pytest.raises(PartitionError, match="lost"):
        engine.save(tmp_path / "checkpoint")
    broken(
        monkeypatch,
        importlib.import_module("partitioner.runtime.engine.engine"),
        "convert_rank_batch",
        LookupError("lost"),
    )
    with pytest.raises(InternalError, match=r"in Engine.step\(\).*LookupError: lost"):
        engine.step(batch())


def test_errors_of_the_users_code_are_told_as_such(tmp_path: Path):
    class Watched(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(
        UserCodeError, match=r"called state_dict \(.*test_faults.py:\d+\), which raised RuntimeError: not"
    ):
        partition(Watched(), Topology.local(1), batch())


def test_what_reports_progress_may_end_the_search():
    class Enough(Exception):
        pass

    def progress(_: Any) -> None:
        raise Enough

    with pytest.raises(Enough):
        make_plan(progress=progress)


def test_a_call_that_does_not_match_the_signature_is_pythons_error(plan: Plan):
    for call in (lambda: partition(nn.Linear(2, 2)), lambda: partition(nn.Linear(2, 2), of=1), lambda: plan.verify()):
        with pytest.raises(TypeError, match=r"missing [12] required|unexpected keyword argument 'of'") as caught:
            call()
        assert type(caught.value) is TypeError


def test_interruptions_pass():
    with pytest.raises(KeyboardInterrupt), typed_errors("here"):
        raise KeyboardInterrupt


def test_typed_errors_pass_as_they_are():
    error = UnsupportedError("known")
    with pytest.raises(UnsupportedError) as caught, typed_errors("here"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(28, "No space left on device"), RuntimeError("out of memory")]
)
def test_a_machine_without_room_is_not_a_fault(error: Exception, plan: Plan, monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch, importlib.import_module("partitioner.plans.files"), "_wrap_plan_content", error)
    with pytest.raises(ResourceError, match=r"Plan.save\(\) failed( for want of memory)?: "):
        plan.save("plan.json")


def test_phases_are_functions_that_exist():
    for file, function in PHASES:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert hasattr(module, function) or any(hasattr(c, function) for c in vars(module).values()), (file, function)


def test_the_command_line_says_that_it_is_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch, importlib.import_module("partitioner.plans.files"), "_unwrap_plan_file", KeyError("inside"))
    result = CliRunner().invoke(app, ["show", str(tmp_path / "plan.json")])
    assert result.exit_code == 3
    assert "Internal error" in result.output + result.stderr


def test_prepared_models_give_typed_errors(monkeypatch: pytest.MonkeyPatch):
    prepared = prepare(Net(), batch())
    broken(monkeypatch, fold, "_free_nodes", IndexError("gone"))
    with pytest.raises(InternalError, match="folding layers into blocks: IndexError: gone"):
        partition(prepared, Topology.local(1))
