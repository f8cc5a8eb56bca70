"""Where a NaN comes from, and where two runs part: rank, instruction and graph node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from partitioner import Engine, LaunchError, LocalRanks, run_local, run_threads
from partitioner.cli.app import app
from partitioner.runtime.comm.storage import free_storage
from partitioner.runtime.debug import NonFiniteError, check_finite, compare_runs, record_hashes
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.state.loss import BACKOFF
from tests.helpers.net_runs import in_threads
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


def spoil(engine: Engine, node: str, change: Callable[[Tensor], Tensor], op: str = "F") -> int:
    """Change what ``node`` makes in the first ``op`` of every step; its instruction."""
    executor, instructions = engine._executor, engine.rank_program.instructions
    compiled = next(
        c for c in executor.binder.compiled if any(n.name == node for n in c.nodes.values())
        and ("backward" in c.name) == (op != "F")
    )  # fmt: skip
    line = next(k for k, n in compiled.nodes.items() if n.name == node)
    name = compiled.code.split("\n")[line - 1].split(" = ")[1].split("(")[0]
    scope: dict[str, Any] = compiled.function.__globals__
    place = next(k for k, (i, _) in enumerate(executor.actions) if i < len(instructions) and instructions[i].op == op)
    function, (index, action) = scope[name], executor.actions[place]
    armed = [False]

    def changed(*operands: Any, **named: Any) -> Any:
        result = function(*operands, **named)
        return change(result) if armed[0] else result

    def run() -> None:
        armed[0] = True
        action()
        armed[0] = False

    scope[name] = changed
    executor.actions[place] = index, run
    return index


def to_nan(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


@pytest.mark.parametrize("shape", [{"pp": 2, "num_microbatches": 2}, {"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(("node", "op"), [("gelu_default", "F"), ("gelu_backward", "B")])
def test_the_operator_that_made_the_nan_is_told_on_all_ranks(shape: dict[str, int], node: str, op: str):
    indices = {}

    def work(engine: Engine) -> NonFiniteError:
        if engine.communicator.rank == 1:
            found = node_like(engine, node, op)
            indices["index"], indices["node"] = spoil(engine, found, to_nan, op), found
        engine.step(net_inputs())
        with pytest.raises(NonFiniteError) as caught:
            check_finite(engine, net_inputs())
        assert engine.steps == 1
        return caught.value

    for error in in_threads(program_of_net(**shape), work):
        failure = error.failure
        assert (failure.rank, failure.index, failure.step) == (1, indices["index"], 1)
        assert failure.node.split(" ")[0] == indices["node"]


def node_like(engine: Engine, name: str, op: str) -> str:
    """A node of this rank's graphs whose name starts as ``name`` does."""
    stem = name.removesuffix("_default")
    return next(
        n.name for c in engine._executor.binder.compiled if ("backward" in c.name) == (op != "F")
        for n in c.nodes.values() if n.name.startswith(stem) and (op != "F" or "backward" not in n.name)
    )  # fmt: skip


def test_an_infinity_that_becomes_a_nan_is_told_where_it_was_made():
    engine = Engine(program_of_net(), Net())
    index = spoil(engine, node_like(engine, "gelu_default", "F"), lambda x: x * 1e30 * 1e30)
    engine.step(net_inputs())
    with pytest.raises(NonFiniteError, match="the first infinity") as caught:
        check_finite(engine, net_inputs())
    assert caught.value.failure.index == index
    assert caught.value.failure.node.startswith("gelu")


@pytest.mark.parametrize("compile", [False, "aot_eager", True])
def test_operators_of_compiled_steps_are_told_one_by_one(compile: bool | str):
    """A weight is so large that the first product overflows; a compiled function would hide that product."""
    model = Net()
    with torch.no_grad():
        model.layers[0].up.weight.fill_(torch.finfo(model.layers[0].up.weight.dtype).max / 2)
    engine = Engine(program_of_net(), model, compile=compile)
    engine.step(net_inputs())
    with pytest.raises(NonFiniteError, match=r"node mm \(aten\.mm\.default\).*the first infinity.*makes a NaN at gelu"):
        check_finite(engine, net_inputs())


def test_a_parameter_that_is_no_number_is_told_by_name():
    model = Net()
    engine = Engine(program_of_net(), model)
    with torch.no_grad():
        dict(engine.named_parameters())["layers.1.up.weight"][0, 0] = torch.nan
    engine.step(net_inputs())
    with pytest.raises(NonFiniteError, match=r"parameter layers\.1\.up\.weight holds a NaN before the step"):
        check_finite(engine, net_inputs())


def test_looking_for_a_nan_leaves_the_factor_of_the_loss_as_it_was(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(convert_precision(program_of_net(), "fp16"), Net(), loss_scale="dynamic")
    scale = engine._scale
    assert scale is not None
    engine.step(net_inputs())
    spoil(engine, node_like(engine, "gelu_default", "F"), to_nan)
    factors: list[float] = []
    real = engine._executor.scale_loss
    monkeypatch.setattr(engine._executor, "scale_loss", lambda factor: (factors.append(factor), real(factor)))
    engine.step(net_inputs())
    before = scale.state_dict(), engine.overflowed
    with pytest.raises(NonFiniteError, match="the first NaN"):
        check_finite(engine, net_inputs())
    assert (scale.state_dict(), engine.overflowed) == before
    assert factors[0] == factors[1], "the step is the same one"
    assert before[0]["value"] == factors[0] * BACKOFF


def test_finite_steps_pass():
    engine = Engine(program_of_net(), Net())
    engine.step(net_inputs())
    check_finite(engine, net_inputs())
    assert engine.steps == 1


@pytest.mark.parametrize("shape", [{"dp": 2, "tp": 2}, {"pp": 2, "num_microbatches": 4}], ids=str)
def test_two_runs_give_the_same_bits(shape: dict[str, int]):
    program = program_of_net(**shape)
    with LocalRanks(program.world_size) as ranks:
        one, two = (run_local(program, Net(), net_inputs(), ranks=ranks) for _ in range(2))
    three, four = (run_threads(program, Net(), net_inputs()) for _ in range(2))
    for a, b in ((one, two), (three, four)):
        assert torch.equal(a.loss, b.loss)
        assert a.grads.keys() == b.grads.keys()
        for name, grad in a.grads.items():
            assert torch.equal(grad, b.grads[name]), name


def test_memory_that_was_shown_to_numpy_is_kept_and_no_error():
    seen, unseen = torch.ones(4), torch.ones(4)
    seen.numpy()
    for x in (seen, unseen):
        free_storage(x)
    assert unseen.untyped_storage().nbytes() == 0
    assert seen.tolist() == [1.0] * 4


def test_debug_comes_with_runtime():
    code = "import partitioner; partitioner.debug.check_finite"  # as docs/runs.md writes it
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def hashed(folder: Path, shape: dict[str, int], change: Callable[[Engine], Any] = lambda engine: None) -> None:
    def work(engine: Engine) -> None:
        change(engine)
        with record_hashes(engine, folder):
            engine.step(net_inputs())

    in_threads(program_of_net(**shape), work)


@pytest.mark.parametrize("shape", [{"pp": 2, "num_microbatches": 2}, {"tp": 2}], ids=str)
def test_the_first_operator_that_differs_is_told(tmp_path: Path, shape: dict[str, int]):
    struck = {}

    def drawing(seed: int) -> Callable[[Engine], None]:
        """One operator on rank 0 gives what a generator draws: by its operands alone it is not determined."""
        generator = torch.Generator().manual_seed(seed)

        def change(engine: Engine) -> None:
            if engine.communicator.rank == 0:
                node = node_like(engine, "gelu_default", "F")
                draw = torch.ops.aten.rand.generator
                struck["index"] = spoil(engine, node, lambda x: draw(x.shape, generator=generator))
                struck["node"] = node

        return change

    hashed(tmp_path / "one", shape, drawing(0))
    hashed(tmp_path / "same", shape, drawing(0))
    hashed(tmp_path / "other", shape, drawing(1))
    assert compare_runs(tmp_path / "one", tmp_path / "same") is None
    found = compare_runs(tmp_path / "one", tmp_path / "other")
    assert found is not None
    assert (found.rank, found.index, found.own) == (0, struck["index"], True)
    assert found.node.split(" ")[0] == struck["node"]
    told = CliRunner().invoke(app, ["compare-runs", str(tmp_path / "one"), str(tmp_path / "other")])
    assert told.exit_code == 1
    assert "Different: rank 0, step 1, instruction" in " ".join(told.output.split())
    assert CliRunner().invoke(app, ["compare-runs", str(tmp_path / "one"), str(tmp_path / "same")]).exit_code == 0


def test_another_operator_is_a_difference(tmp_path: Path):
    hashed(tmp_path / "one", {})
    hashed(tmp_path / "other", {}, lambda engine: spoil(engine, node_like(engine, "gelu_default", "F"), torch.sin))
    found = compare_runs(tmp_path / "one", tmp_path / "other")
    assert found is not None
    assert found.node.startswith("gelu")
    assert "aten.sin.default is run instead of" in str(found)


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path):
    with pytest.raises(LaunchError, match="holds no hashes"):
        compare_runs(tmp_path, tmp_path)
    hashed(tmp_path / "one", {})
    hashed(tmp_path / "two", {"tp": 2})
    with pytest.raises(LaunchError, match="compare runs of one plan"):
        compare_runs(tmp_path / "one", tmp_path / "two")
