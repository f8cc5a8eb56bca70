"""Graphs as straight Python: what is freed when, what runs behind communication, what an error tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner.runtime.execute.codegen import (
    FAST,
    AliasBinding,
    AsyncBinding,
    CompiledGraph,
    ConstantBinding,
    DirectBinding,
    compile_graph,
)
from partitioner.runtime.state.gradients import Sink, WideSink

aten = torch.ops.aten
CPU = torch.device("cpu")


class Late:
    """A collective that doubles its operand when it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self, x: Tensor) -> Late:
        self.log.append("start")
        self.x = x.clone()
        return self

    def scratch(self, x: Tensor) -> Late:
        self.log.append("start in place")
        self.x = x
        return self

    def wait(self) -> Tensor:
        self.log.append("wait")
        return self.x.mul_(2)


def graph_of(build: Any) -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name in ("a", "b"):
        nodes[name] = graph.placeholder(name)
    graph.output(build(graph, nodes))
    return graph, nodes


def ones() -> list[Tensor]:
    return [torch.ones(2, 2), torch.ones(2, 2)]


def body(compiled: CompiledGraph) -> list[str]:
    return [line.strip() for line in compiled.code.splitlines()[1:]]


def test_values_are_dropped_after_their_last_use():
    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        total = graph.call_function(aten.add.Tensor, (n["a"], n["b"]))
        return (graph.call_function(aten.mul.Tensor, (total, 3.0)),)

    graph, _ = graph_of(build)
    compiled = compile_graph(graph, "block", {}, CPU)
    assert [line.split(" = ")[0] for line in body(compiled)] == [
        "v0, v1,",
        "arguments.clear()",
        "v2",
        "del v0, v1",
        "v3",
        "del v2",
        "return (v3, )",
    ]
    arguments = ones()
    (result,) = compiled.function(arguments, ())
    assert arguments == []
    assert torch.equal(result, torch.full((2, 2), 6.0))


def test_independent_work_runs_behind_a_collective():
    log: list[str] = []

    def note(x: Tensor) -> Tensor:
        log.append("other")
        return x + 1

    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        n["late"] = graph.call_function(aten.neg.default, (n["a"],))
        read = graph.call_function(aten.exp.default, (n["late"],))
        n["other"] = graph.call_function(aten.abs.default, (n["b"],))
        return read, n["other"]

    graph, nodes = graph_of(build)
    late = Late(log)
    bindings = {nodes["late"]: AsyncBinding(late.start, late.scratch), nodes["other"]: DirectBinding(note)}
    compile_graph(graph, "block", bindings, CPU).function(ones(), ())
    assert log == ["start", "other", "wait"]


@pytest.mark.parametrize("kept", [False, True])
def test_an_operand_is_overwritten_only_where_nothing_else_reads_it(kept: bool):
    log: list[str] = []
    late = Late(log)

    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        made = graph.call_function(aten.add.Tensor, (n["a"], n["b"]))
        flat = graph.call_function(aten.view.default, (made, [4]))
        n["late"] = graph.call_function(aten.neg.default, (flat,))
        return (n["late"], made) if kept else (n["late"],)

    graph, nodes = graph_of(build)
    bindings = {nodes["late"]: AsyncBinding(late.start, late.scratch)}
    results = compile_graph(graph, "block", bindings, CPU).function(ones(), ())
    assert log == ["start" if kept else "start in place", "wait"]
    assert torch.equal(results[0], torch.full((4,), 4.0))
    if kept:
        assert torch.equal(results[1], torch.full((2, 2), 2.0))


def test_an_operand_is_not_overwritten_while_another_collective_reads_it():
    log: list[str] = []
    late, later = Late(log), Late(log)

    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        total = graph.call_function(aten.add.Tensor, (n["a"], n["b"]))
        for name in ("late", "later"):
            n[name] = graph.call_function(aten.neg.default, (total,))
        return (graph.call_function(aten.sub.Tensor, (n["late"], n["later"])),)

    graph, nodes = graph_of(build)
    bindings = {
        nodes["late"]: AsyncBinding(late.start, late.scratch),
        nodes["later"]: AsyncBinding(later.start, later.scratch),
    }
    (result,) = compile_graph(graph, "block", bindings, CPU).function(ones(), ())
    assert log == ["start", "start", "wait", "wait"]
    assert result.tolist() == [[0, 0], [0, 0]]


def test_an_argument_is_never_overwritten():
    log: list[str] = []
    late = Late(log)

    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        same = graph.call_function(aten.detach.default, (n["a"],))
        n["late"] = graph.call_function(aten.neg.default, (same,))
        return (n["late"],)

    graph, nodes = graph_of(build)
    compile_graph(graph, "block", {nodes["late"]: AsyncBinding(late.start, late.scratch)}, CPU).function(ones(), ())
    assert log == ["start", "wait"]


def test_aliases_and_constants_cost_no_line():
    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        n["copy"] = graph.call_function(aten.neg.default, (n["a"],))
        n["index"] = graph.call_function(aten.exp.default, (n["b"],))
        return (graph.call_function(aten.add.Tensor, (n["copy"], n["index"])),)

    graph, nodes = graph_of(build)
    bindings = {nodes["copy"]: AliasBinding(), nodes["index"]: ConstantBinding(torch.tensor(5.0))}
    compiled = compile_graph(graph, "block", bindings, CPU)
    assert sum("= " in line for line in body(compiled)) == 2  # the arguments, the sum
    assert torch.equal(compiled.function(ones(), ())[0], torch.full((2, 2), 6.0))


def test_gradients_go_to_their_sinks_as_soon_as_they_are_known():
    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        product = graph.call_function(aten.mm.default, (n["a"], n["b"]))
        total = graph.call_function(aten.add.Tensor, (n["a"], n["b"]))
        return total, product, n["b"]

    graph, _ = graph_of(build)
    compiled = compile_graph(graph, "block", {}, CPU, num_sinks=2)
    sinks = [Sink(torch.full((2, 2), 7.0)), Sink(torch.full((2, 2), 7.0))]
    for _ in range(2):
        (total,) = compiled.function(ones(), sinks)
    assert torch.equal(total, torch.full((2, 2), 2.0))
    assert torch.equal(sinks[0].view, torch.full((2, 2), 4.0))
    assert torch.equal(sinks[1].view, torch.full((2, 2), 2.0))


def test_a_sum_that_only_a_sink_reads_is_summed_by_the_sink():
    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        n["a"].meta["val"] = torch.empty(2, 2, device="meta")
        kept = graph.call_function(aten.sum.dim_IntList, (n["a"], [0], True))
        flat = graph.call_function(aten.view.default, (kept, [2]))
        flat.meta["val"] = torch.empty(2, device="meta")
        return n["b"], flat

    graph, _ = graph_of(build)
    compiled = compile_graph(graph, "block", {}, CPU, num_sinks=1)
    assert "sink_0.add_sum(v0, [0])" in body(compiled)
    sink = Sink(torch.full((2,), 7.0))
    for _ in range(2):
        compiled.function(ones(), [sink])
    assert torch.equal(sink.view, torch.full((2,), 4.0))


@pytest.mark.parametrize("sink", [Sink, WideSink])
@pytest.mark.parametrize("read", ["by the sink", "by others", "by two sinks"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_of_experts_is_added_up_in_place(turned: bool, read: str, sink: type[Sink]):
    """Copies and views in between are not made; one of three experts has no rows."""
    graph = fx.Graph()
    rows, grads, ends = (graph.placeholder(name) for name in ("rows", "grads", "ends"))
    made = graph.call_function(torch.ops.partition.grouped_mm_weight.default, (rows, grads, ends))
    made.meta["val"] = torch.empty(3, 2, 4, device="meta")
    result = made
    if turned:
        result = graph.call_function(aten.transpose.int, (made, -2, -1))
        result.meta["val"] = torch.empty(3, 4, 2, device="meta")
    result = graph.call_function(aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
    graph.output((made if read == "by others" else rows, result, *[result] * (read == "by two sinks")))
    num_sinks = 1 + (read == "by two sinks")
    compiled = compile_graph(graph, "block", {}, CPU, num_sinks)
    assert ("sink_0.add_grouped_product(" in compiled.code) == (read == "by the sink")
    assert ("clone" in compiled.code) == (read != "by the sink")
    sinks = [sink(torch.full((3, 4, 2) if turned else (3, 2, 4), 7.0)) for _ in range(num_sinks)]
    arguments = torch.rand(6, 2), torch.rand(6, 4), torch.tensor([2, 2, 5], dtype=torch.int32)
    for _ in range(2):
        compiled.function(list(arguments), sinks)
    expected = 2 * torch.stack([arguments[0][a:b].T @ arguments[1][a:b] for a, b in ((0, 2), (2, 2), (2, 5))])
    for s in sinks:
        torch.testing.assert_close(s.view, expected.transpose(1, 2) if turned else expected)


def test_an_error_knows_its_node():
    def build(graph: fx.Graph, n: dict[str, fx.Node]) -> Any:
        fine = graph.call_function(aten.neg.default, (n["a"],))
        n["bad"] = graph.call_function(aten.mm.default, (fine, n["b"]))
        return (n["bad"],)

    graph, nodes = graph_of(build)
    compiled = compile_graph(graph, "block", {}, CPU)
    with pytest.raises(RuntimeError) as caught:
        compiled.function([torch.ones(2, 3), torch.ones(2, 2)], ())
    assert compiled.node_at(caught.tb) is nodes["bad"]


EXAMPLES: dict[str, tuple[Any, ...]] = {
    "aten.view.default": (torch.ones(2, 3), [3, 2]),
    "aten._unsafe_view.default": (torch.ones(2, 3), [3, 2]),
    "aten.reshape.default": (torch.ones(2, 3), [3, 2]),
    "aten.transpose.int": (torch.ones(2, 3), 0, 1),
    "aten.permute.default": (torch.ones(2, 3), [1, 0]),
    "aten.expand.default": (torch.ones(2, 1), [2, 3]),
    "aten.unsqueeze.default": (torch.ones(2), 0),
    "aten.squeeze.dim": (torch.ones(2, 1), 1),
    "aten.squeeze.dims": (torch.ones(2, 1, 1), [1, 2]),
    "aten.select.int": (torch.ones(2, 3), 1, 2),
    "aten.cat.default": ([torch.ones(2), torch.ones(3)], 0),
    "aten.stack.default": ([torch.ones(2), torch.ones(2)], 1),
    "aten.split.Tensor": (torch.ones(4), 2),
    "aten.split_with_sizes.default": (torch.ones(4), [1, 3], 0),
    "aten.bmm.default": (torch.ones(2, 2, 2), torch.ones(2, 2, 2)),
    "aten.addmm.default": (torch.ones(2), torch.ones(2, 2), torch.ones(2, 2)),
    "aten.baddbmm.default": (torch.ones(2, 2, 2), torch.ones(2, 2, 2), torch.ones(2, 2, 2)),
    "aten.embedding.default": (torch.ones(4, 2), torch.tensor([1, 2])),
    "aten.add.Scalar": (torch.ones(2), 2),
    "aten.sub.Scalar": (torch.ones(2), 2),
    "aten.mul.Scalar": (torch.ones(2), 2),
    "aten.div.Scalar": (torch.ones(2), 2),
    "aten.pow.Tensor_Scalar": (torch.full((2,), 3.0), 2),
    "aten.where.self": (torch.tensor([True, False]), torch.ones(2), torch.zeros(2)),
    "aten.sum.dim_IntList": (torch.ones(2, 3), [0], True),
    "aten.mean.dim": (torch.ones(2, 3), [1], True),
    "aten.amax.default": (torch.ones(2, 3), [1], True),
    "aten.eq.Scalar": (torch.ones(2), 1),
    "aten.ne.Scalar": (torch.ones(2), 1),
    "aten.gather.default": (torch.ones(2, 3), 1, torch.tensor([[0], [2]])),
    "aten.index_select.default": (torch.ones(2, 3), 1, torch.tensor([0, 2])),
    "aten.logsumexp.default": (torch.ones(2, 3), [1], True),
    "aten._softmax.default": (torch.ones(2, 3), 1, False),
    "partition.target_and_logsumexp.default": (torch.rand(2, 3), torch.tensor([[0], [2]]), 1),
    "partition.target_and_logsumexp_backward.default": (
        torch.rand(2, 1),
        torch.rand(2, 1),
        torch.rand(2, 3),
        torch.tensor([[0], [2]]),
        torch.rand(2, 1),
        1,
    ),
}
_ONE = {"t", "clone", "sum", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid"}


@pytest.mark.parametrize("target", FAST, ids=str)
def test_a_fast_path_computes_what_its_operator_does(target: Any):
    single = target._schema.name.split("::")[1] in _ONE | {"relu", "silu"}
    square = torch.rand(2, 2) + 0.5
    arguments = EXAMPLES.get(str(target), (square,) if single else (square, square + 1))
    expected, got = target(*arguments), FAST[target](*arguments)
    assert _same(expected, got)


def _same(expected: Any, got: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(expected, got) and expected.dtype == got.dtype
    return len(expected) == len(got) and all(map(torch.equal, expected, got))
