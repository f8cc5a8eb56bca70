"""Derivatives that ranks share: one traces, the others read the same functions."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import fx

from partitioner import LocalRanks, run_local
from partitioner.passes.ir.model import TensorSpec
from partitioner.passes.shard.differentiate import BlockDerivatives, differentiate
from partitioner.runtime.execute import bind
from partitioner.runtime.execute.bind import BlockLibrary, SharedDerivatives, find_gradient_needs
from partitioner.runtime.program.program import Program
from tests.helpers.mlp_graph import CPU, mlp
from tests.helpers.net_runs import check, reference
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


def never() -> BlockDerivatives:
    raise AssertionError("it is there")


def lines(graph: fx.Graph) -> list[tuple[object, ...]]:
    """All that is read of a graph's nodes."""
    found: list[tuple[object, ...]] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        spec = TensorSpec.from_tensor(value) if isinstance(value, torch.Tensor) else None
        place = node.meta.get("path"), node.meta.get("source")
        found.append((node.op, node.name, node.target, str(node.args), str(node.kwargs), spec, *place))
    return found


def test_what_is_read_is_what_was_made(tmp_path: Path) -> None:
    made = SharedDerivatives(tmp_path).get(
        ("mlp",), lambda: differentiate(mlp(), CPU, [True], [True, True], [True, False])
    )
    read = SharedDerivatives(tmp_path).get(("mlp",), never)
    for name in ("forward", "backward", "backward_input", "backward_weight"):
        one, other = getattr(made, name), getattr(read, name)
        assert lines(one.graph) == lines(other.graph)
        assert (one.inputs, one.outputs) == (other.inputs, other.outputs)
        given = [
            torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in one.graph.find_nodes(op="placeholder")
        ]
        for mine, theirs in zip(one.module(*given), other.module(*given), strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    for name in ("num_outputs", "saved", "grad_outputs", "grad_inputs", "grad_states"):
        assert getattr(made, name) == getattr(read, name)


def test_another_key_is_another_derivative(tmp_path: Path) -> None:
    shared = SharedDerivatives(tmp_path)
    whole = shared.get(("mlp", True), lambda: differentiate(mlp(), CPU, [True], [True, True], [True, False]))
    part = shared.get(("mlp", False), lambda: differentiate(mlp(), CPU, [False], [True, True], [True, False]))
    assert (whole.grad_inputs, part.grad_inputs) == ((0,), ())


def test_who_comes_meanwhile_waits_and_a_failure_leaves_its_turn(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    makers: list[str] = []

    def fails() -> BlockDerivatives:
        begun.set()
        assert go_on.wait(60)
        makers.append("fails")
        raise ValueError("no derivative")

    def works() -> BlockDerivatives:
        makers.append("works")
        return differentiate(mlp(), CPU, [True], [True, True], [True, False])

    def first() -> None:
        with pytest.raises(ValueError, match="no derivative"):
            SharedDerivatives(tmp_path).get(("mlp",), fails)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert begun.wait(60)
    threads += [threading.Thread(target=SharedDerivatives(tmp_path).get, args=(("mlp",), works)) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    assert makers == []
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert makers == ["fails", "works"]


_traced: list[str] = []


def derive(program: Program, folder: Path) -> list[str]:
    """The blocks that this rank traces of its stage's."""
    _traced.clear()
    original = bind.differentiate_for_cpu

    def told(program, name, *needs, selective):  # type: ignore[no-untyped-def]
        _traced.append(name)
        return original(program, name, *needs, selective=selective)

    bind.differentiate_for_cpu = told
    library = BlockLibrary(program, CPU, shared=folder)
    for stage in program.stages:
        for call in stage.calls:
            if (needs := find_gradient_needs(program, call)) is not None:
                library.differentiated(call.block, needs)
    bind.differentiate_for_cpu = original
    return _traced.copy()


def test_ranks_trace_each_block_once(tmp_path: Path) -> None:
    program = program_of_net(tp=2)
    alone = derive(program, tmp_path / "alone")
    assert alone
    with LocalRanks(2) as ranks:
        told = ranks.call(derive, program, tmp_path / "shared")
        assert sorted(name for of_rank in told for name in of_rank) == sorted(alone)
        model, output = reference()
        check(run_local(program, Net(), net_inputs(), ranks=ranks), model, output)
