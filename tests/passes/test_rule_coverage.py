"""Every rule there is has been checked against its operator, or says here why it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.layouts import can_shard_evenly, local_shape
from partitioner.passes.rules import factors_of, registry
from partitioner.passes.rules.factors import Strategy
from partitioner.passes.rules.pointwise import LINEAR, NONLINEAR
from partitioner.passes.rules.strategies import append_local_call, enumerate_strategies
from partitioner.passes.rules.verify import (
    AXIS,
    Ranks,
    compute_gradients,
    describe_differences,
    make_call_node,
    run_ranks,
    split_among_ranks,
)
from tests.helpers.rule_cases import CASES, META, case, f, operator
from tests.helpers.rule_cases_more import MORE

OTHER, SIZE = "other", 2  # an axis that collectives are over, while AXIS shards
x = f(4, 6)
MOVES = [
    (collective.copy.default, (8, 12), (OTHER, SIZE)),
    (collective.all_reduce.default, (8, 12), (OTHER, SIZE, "reduce")),
    (collective.all_reduce.default, (8, 12), (OTHER, SIZE, "")),
    (collective.all_reduce_max.default, (8, 12), (OTHER, SIZE)),
    (collective.all_gather.default, (8, 12), (0, OTHER, SIZE, "reduce")),
    (collective.all_gather.default, (8, 12), (1, OTHER, SIZE, "")),
    (collective.shard_pad.default, (8, 12), (0, OTHER, SIZE)),
    (collective.shard_slice.default, (8, 12), (1, OTHER, SIZE)),
    (collective.shard_narrow.default, (8, 12), (0, OTHER, SIZE)),
    (collective.reduce_scatter.default, (8, 12), (0, OTHER, SIZE)),
    (collective.all_to_all.default, (8, 12), (0, 1, OTHER, SIZE)),
]
# What must be the same on every rank has no result to compare: that nothing of it is sharded is all there is to say.
RANDOM = [
    case("bernoulli", torch.rand(4, 6)),
    case("multinomial", torch.rand(4, 6), 2),
    case("normal.Tensor_float", x),
    case("poisson", torch.rand(4, 6)),
    case("rand", [4, 6], device=META),
    case("rand_like", x),
    case("randint", 9, [4, 6], device=META),
    case("randint_like", x, 9),
    case("randn", [4, 6], device=META),
    case("randn_like", x),
    case("randperm", 8, device=META),
    case("exponential", x),
    case("uniform", x),
    case("rrelu", x, 0.1, 0.3, True),
    case("rrelu_with_noise", x, torch.zeros(4, 6), 0.1, 0.3, True),
]
# Memory that is not written has a shape alone.
EMPTY = [case("empty.memory_format", [4, 6], device=META), case("new_empty", x, [4, 6]), case("empty_like", x)]
UNRUN = {
    "aten::_scaled_dot_product_efficient_attention": "runs on GPUs only; its rule is that of the kernel for CPUs",
    "aten::cudnn_batch_norm": "runs on GPUs only; its rule is that of native_batch_norm",
    "aten::_batch_norm_with_update_functional": "its reserved space differs from device to device",
    "aten::_native_batch_norm_legit_no_training": "gives empty statistics where its meta value has whole ones",
    "partition::context_attention": "its ranks exchange keys in a loop: test_context_parallel.py runs it over tp too",
    "partition::context_document_attention": "as context_attention: test_packed.py runs it over tp too",
    "partition::context_scored_attention": "as context_attention: test_scored_attention.py runs it over tp too",
    "partition::axis_index": "has no operand",
    "transformers::grouped_mm_fallback": "test_rules.py, where transformers is installed",
}


def _key(op: Any) -> str:
    name = op._schema.name
    overload = f"{name}.{op._overloadname}"
    return overload if overload in registry._rules else name


def test_every_rule_is_checked():
    checked = [*CASES, *(c for cases in MORE.values() for c in cases), *RANDOM, *EMPTY]
    known = {_key(operator(c.values[0])) for c in checked} | {_key(op) for op, *_ in MOVES}
    known |= {f"aten::{name}" for name in (*NONLINEAR, *LINEAR)}  # test_rules.py makes their calls of their schemas
    ours = {name for name in registry._rules if name.startswith(("aten::", "partition::", "transformers::"))}
    assert ours - known - UNRUN.keys() == set()
    assert UNRUN.keys() & known == set()


def test_every_rule_is_of_an_operator():
    """A name that torch does not have is a rule that is never found."""
    for name in registry._rules:
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        if namespace in ("aten", "partition"):
            packet = getattr(getattr(torch.ops, namespace), packet_name)
            assert not overload or overload in packet.overloads(), name


@pytest.mark.parametrize(("name", "args", "kwargs", "grad"), RANDOM)
def test_what_is_random_is_whole(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Any):
    node, _ = make_call_node(operator(name), args, kwargs, False)
    assert factors_of(node) is not None
    assert not any(layout.is_shard for s in enumerate_strategies(node, 2) for layout in (*s.operands, *s.results))


@pytest.mark.parametrize(("name", "args", "kwargs", "grad"), EMPTY)
def test_unwritten_memory_has_the_local_shape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Any):
    node, tensors = make_call_node(operator(name), args, kwargs, False)
    sharded = [s for s in enumerate_strategies(node, 2) if s.results[0].is_shard]
    assert sharded
    for strategy in sharded:
        graph, operands = _operands(node, tensors, strategy)
        made = append_local_call(node, strategy, AXIS, 2, operands, graph)
        assert tuple(made.meta["val"].shape) == local_shape(strategy.results[0], (4, 6), 2), strategy


def _operands(node: fx.Node, tensors: list[Tensor], strategy: Strategy) -> tuple[fx.Graph, list[fx.Node]]:
    graph, operands = fx.Graph(), []
    for i, (tensor, layout) in enumerate(zip(tensors, strategy.operands, strict=True)):
        made = graph.placeholder(f"x{i}")
        made.meta["val"] = torch.empty(local_shape(layout, tuple(tensor.shape), 2), dtype=tensor.dtype, device="meta")
        made.meta["grad"] = True
        operands.append(made)
    return graph, operands


@pytest.mark.parametrize(("op", "shape", "args"), MOVES, ids=lambda v: getattr(v, "__name__", None))
def test_collectives_of_one_axis_on_shards_of_another(op: Any, shape: tuple[int, ...], args: tuple[Any, ...]):
    """Each rank of the other axis has a tensor of its own; over ``AXIS`` it is sharded as the strategy says."""
    torch.manual_seed(0)
    tensors = [f(*shape) for _ in range(SIZE)]
    node, _ = make_call_node(op, (tensors[0], *args), {}, True)
    graph = _graph(op, shape, args)
    leaves = [t.clone().requires_grad_() for t in tensors]
    whole = [made[0] for made in run_ranks(graph, [leaves], {OTHER: SIZE})]
    trained = op is not collective.all_reduce_max.default
    grads_out = [torch.randn_like(t) if trained else None for t in whole]
    grads = compute_gradients(whole, leaves, grads_out)
    checked = 0
    for strategy in enumerate_strategies(node, 2):
        (before,), (after,) = strategy.operands, strategy.results
        if not can_shard_evenly(before, shape, 2) or (before.kind == "P" and not trained):
            continue
        local_graph, (operand,) = _operands(node, tensors[:1], strategy)
        made = append_local_call(node, strategy, AXIS, 2, [operand], local_graph)
        local_graph.output((made,))
        parts: Ranks = [p.clone().requires_grad_() for t in tensors for p in split_among_ranks(t, before, 2)]
        outputs = [o[0] for o in run_ranks(local_graph, [parts], {OTHER: SIZE, AXIS: 2})]
        turned = {"R": "R", "P": "R", "R'": "P"}
        pieces: list[Tensor | None] = []
        for place, (expected, grad) in enumerate(zip(whole, grads_out, strict=True)):
            here = [o.detach() for o in outputs[2 * place : 2 * place + 2]]
            assert describe_differences(here, expected.detach(), after, 1e-9) == [], strategy
            layout = after if after.is_shard else type(after)(turned[after.kind])
            pieces += [None, None] if grad is None else split_among_ranks(grad, layout, 2)
        found = compute_gradients(outputs, parts, pieces)
        layout = before if before.is_shard else type(before)(turned[before.kind])
        for place, grad_in in enumerate(grads):
            assert describe_differences(found[2 * place : 2 * place + 2], grad_in, layout, 1e-9) == [], strategy
        checked += 1
    assert checked >= 3


def _graph(op: Any, shape: tuple[int, ...], args: tuple[Any, ...]) -> fx.Graph:
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = torch.empty(shape, dtype=torch.float64, device="meta")
    operand.meta["grad"] = True
    graph.output((insert_operator_node(graph, op, (operand, *args)),))
    return graph
