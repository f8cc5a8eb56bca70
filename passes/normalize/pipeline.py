"""Rewrite a captured graph to normal form: one way to write each computation, so that few rules cover many models.

Requires: a captured graph. Provides a graph in which

* composite operators without a factor rule are decomposed;
* aliases and copies are removed, and casts and reshapes that change nothing;
* a product with a bias is a product and an addition;
* a mean is a sum times a constant, so that the mean of a sharded tensor is a partial sum;
* a loss is one cross entropy per target and a sum, divided by a count that depends on targets alone;
* constant attention masks are replaced by flags or bands.

Every rewrite is exact up to the order of sums. :func:`refuse_unsupported_nodes` raises an error, with the line of the
model, for what a plan cannot execute: numbers read out of tensors, sparse tensors, operators that are not torch's, and
products of operands of different types.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from partitioner.passes.errors import InputsError, UnsupportedError
from partitioner.passes.experts.loops import route_loops
from partitioner.passes.experts.sorted_rows import remove_row_sorts
from partitioner.passes.experts.stacked_modules import replace_gathered_products, stack_experts
from partitioner.passes.experts.traced_loops import check_turns
from partitioner.passes.ir.model import Captured, ModelState, TensorSpec
from partitioner.passes.ir.rewrite import format_node_location, get_placeholder_name, rewrite_by_rules
from partitioner.passes.normalize.algebra import ALGEBRA
from partitioner.passes.normalize.attention_masks import drop_constant_masks
from partitioner.passes.normalize.decompose import RECURRENT, decompose_operators
from partitioner.passes.normalize.document_masks import replace_packed_sequences
from partitioner.passes.normalize.indexing import BAGS, INDICES, PLACES
from partitioner.passes.normalize.losses import LOSSES, fuse_gathered_log_softmax
from partitioner.passes.normalize.random import RANDOM, refuse_torch_random_operators
from partitioner.passes.normalize.score_functions import replace_score_functions
from partitioner.passes.normalize.shapes import SHAPES, STRIDES
from partitioner.passes.normalize.unflatten import unflatten_dims
from partitioner.passes.ops.fake_quantize import QUANTIZED

STRIDED = torch.strided

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Operators whose first operands must have one type, with the number of these operands. Torch checks this only when it
# computes with real numbers.
_ONE_TYPE: dict[Any, int] = {
    torch.ops.aten.linear: 2,
    torch.ops.aten.matmul: 2,
    torch.ops.aten.mm: 2,
    torch.ops.aten.bmm: 2,
    torch.ops.aten.convolution: 2,
    torch.ops.aten.scaled_dot_product_attention: 3,
}


def refuse_unsupported_nodes(graph: fx.Graph) -> None:
    """Raise an error for the first operator of ``graph`` that a plan cannot execute: :class:`UnsupportedError` if it
    reads a number out of a tensor, makes a sparse tensor, or is not a torch operator; :class:`InputsError` if it is a
    product whose operands have different dtypes."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.meta.get("val"), _NUMBERS):
            raise UnsupportedError(
                f"{_format_target(node)} at {format_node_location(node)} converts a tensor to a Python number, which "
                "is not known when the plan is made; keep it as a 0-d tensor (no item(), float() or int()), or pass "
                "it as an input"
            )
        sparse = [v for v in pytree.tree_leaves(node.meta.get("val")) if getattr(v, "layout", STRIDED) is not STRIDED]
        if sparse:
            raise UnsupportedError(
                f"{_format_target(node)} at {format_node_location(node)} makes a tensor of layout {sparse[0].layout}; "
                f"expected dense ones: "
                "write a product with a sparse matrix as index_add of rows that its columns select, times its values"
            )
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise UnsupportedError(
                f"{_format_target(node)} at {format_node_location(node)} is not an operator of torch and cannot be "
                "partitioned; write this line with operators on tensors"
            )
        _check_types(node)


def _check_types(node: fx.Node) -> None:
    """Raise :class:`InputsError` if ``node`` is a matrix product, a convolution or an attention whose operands have
    different dtypes. Torch does not raise this error while tracing, but only when it executes the operator."""
    count = _ONE_TYPE.get(getattr(node.target, "overloadpacket", None), 0)
    found = [a.meta["val"].dtype for a in node.args[:count] if isinstance(a, fx.Node)]
    if len(set(found)) > 1:
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
        raise InputsError(
            f"{_format_target(node)} at {format_node_location(node)} has operands of {types}; expected one dtype: "
            "convert the inputs or the parameters, or give precision= for both"
        )


def _format_target(node: fx.Node) -> str:
    named = not isinstance(node.target, torch._ops.OpOverload)
    return str(getattr(node.target, "__name__", node.target) if named else node.target)


RULES = {**SHAPES, **STRIDES, **ALGEBRA, **BAGS, **INDICES, **LOSSES, **RANDOM, **QUANTIZED}


def normalize(captured: Captured) -> Captured:
    """Return ``captured`` (one graph of the whole model) with its graph rewritten to normal form, in which each kind of
    computation has one form, for which later passes have rules. Composite operators are decomposed, and losses, indices
    and views are rewritten.

    Loops over the experts of a mixture of experts become one product in which each row is multiplied by the matrix of
    its expert, and separate modules of equal experts become stacked weights. Raise :class:`UnsupportedError` or
    :class:`InputsError` if no plan can execute the model.
    """
    try:
        for empty, left_out in zip(captured.turns[::2], captured.turns[1::2], strict=True):
            check_turns(_normalize_graph(empty).graph, _normalize_graph(left_out).graph)
        normal = stack_experts(_unflatten_captured(route_loops(_normalize_graph(captured))))
    except GuardOnDataDependentSymNode:  # a rule read a number that depends on data
        refuse_unsupported_nodes(captured.graph)
        raise
    refuse_unsupported_nodes(normal.graph)
    return normal


def _normalize_graph(captured: Captured) -> Captured:
    """Return ``captured``, a model as one graph, with composite operators decomposed, all rewrite rules applied, and
    constant attention masks replaced by arguments of the attention."""
    graph, layers = captured.graph, {n.name: n.name for n in captured.graph.nodes}
    if any(node.target in RECURRENT for node in graph.nodes):
        graph, layers, _ = rewrite_by_rules(graph, RECURRENT)
    graph, parts = decompose_operators(graph, RULES)
    first = {old: parts[new] for old, new in layers.items() if new in parts}
    graph, then, drawn = rewrite_by_rules(graph, RULES)
    refuse_torch_random_operators(graph)
    moved = {old: then[new] for old, new in first.items() if new in then}
    captured = _add_constants(captured, drawn)
    constants = {p: captured.constants[s] for p, s in captured.placeholders.items() if _is_constant(captured, s)}
    results = _list_result_names(graph)
    drop_constant_masks(graph, constants)
    replace_score_functions(graph, constants)
    replace_packed_sequences(graph)
    fuse_gathered_log_softmax(graph)
    remove_row_sorts(graph)
    replace_gathered_products(graph)
    became = _deduplicate_results(graph, results)
    return _replace_graph(captured, graph, {old: became.get(new, new) for old, new in moved.items()})


def _unflatten_captured(captured: Captured) -> Captured:
    """Return ``captured``, a model as one graph, with two rewrites wherever a rule covers them: dims that are flattened
    into one, such as ``batch * positions``, become separate dims again, and reads and writes by index become operators
    that can be sharded, such as ``where`` and ``gather``.

    Call it after the rewrites of mixtures of experts, which recognise the original reads and writes by index.
    """
    graph, results = captured.graph, _list_result_names(captured.graph)
    unflatten_dims(graph)
    moved = _deduplicate_results(graph, results)
    if any(node.target in PLACES for node in graph.nodes):  # indices that no earlier rule has rewritten
        graph, last, _ = rewrite_by_rules(graph, PLACES)
        moved = {old: last[new] for old, new in moved.items()}
    return _replace_graph(captured, graph, moved)


def _list_result_names(graph: fx.Graph) -> list[str]:
    nodes: Any = graph.output_node().args[0]
    return [node.name for node in nodes]


def _deduplicate_results(graph: fx.Graph, results: list[str]) -> dict[str, str]:
    """Remove repeated nodes from the output node of ``graph``, in place, so that each result is returned once. Return a
    dict: name in ``results`` -> name of the node that has this result now.

    ``results``: the names of the output nodes of ``graph`` before a pass changed it, in the order of the outputs.
    """
    output: Any = graph.output_node()
    found = dict(zip(results, _list_result_names(graph), strict=True))
    output.args = (tuple(dict.fromkeys(output.args[0])),)
    return found


def _replace_graph(captured: Captured, graph: fx.Graph, moved: Mapping[str, str]) -> Captured:
    """Return ``captured``, a model as one graph, with ``graph`` instead of its own graph.

    ``moved``: for each node name in the old graph, the name of the node in ``graph`` that replaces it.
    """
    outputs = [replace(o, value=moved[o.value]) if o.value is not None else o for o in captured.outputs]
    loss = moved[captured.loss] if captured.loss is not None else None
    updates = {state: moved[node] for state, node in captured.updates.items()}
    placeholders = {n.name: captured.placeholders[n.name] for n in graph.nodes if n.op == "placeholder"}
    return captured.with_(graph=graph, outputs=outputs, loss=loss, updates=updates, placeholders=placeholders)


def _add_constants(captured: Captured, added: dict[str, Tensor]) -> Captured:
    """Return ``captured``, a model as one graph, with further constants and a placeholder for each. ``added``: value by
    name of the constant."""
    states = {name: ModelState(name, TensorSpec.from_tensor(value), "constant") for name, value in added.items()}
    return captured.with_(
        states={**captured.states, **states},
        constants={**captured.constants, **added},
        placeholders={**captured.placeholders, **{get_placeholder_name(name): name for name in added}},
    )


def _is_constant(captured: Captured, name: str) -> bool:
    return name in captured.states and captured.states[name].kind == "constant"
