"""Decompose operators that torch defines by other operators (composite operators) and that have no factor rule.

Requires: a captured graph. Provides: a graph without composite operators, except those that a factor rule or a rewrite
of the normal form handles. Gradients are those of the parts, by torch's own definition.

Recurrent networks become one operator for each layer and direction here. Torch's own decomposition has operators for
each time step, and leaves the dropout between layers out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from partitioner.passes.ir.inplace import remove_inplace
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import KEEP, Builder, Rule, aten, rewrite_by_rules
from partitioner.passes.ops.recurrent import RecurrentLayers, call_recurrent_layers
from partitioner.passes.rules import has_rule

_MOST_PARTS = 4096

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose_operators(graph: fx.Graph, known: Collection[Any]) -> tuple[fx.Graph, dict[str, str]]:
    """Return a copy of ``graph`` without composite operators, and a dict: node name in ``graph`` -> name in the copy.
    If ``graph`` has no composite operator to replace, ``graph`` itself is returned.

    A composite operator is one that torch defines by simpler operators. These replace it, unless it has a sharding rule
    of its own or is in ``known``. ``known``: further operators that stay, because a later rewrite handles them.
    """
    targets = {n.target for n in graph.nodes if n.op == "call_function"}
    apart = {t for t in targets if _is_composite(t) and t not in known and not has_rule(t)}
    if not apart:
        return graph, {n.name: n.name for n in graph.nodes}
    made, moved, _ = rewrite_by_rules(graph, dict.fromkeys(apart, _inline_operators))
    return made, moved


def trace_decomposition(node: fx.Node) -> tuple[fx.Graph, list[fx.Node]] | None:
    """Return (a graph of the simpler operators by which torch defines the operator ``node``, a list of the operand
    nodes for which the placeholders of this graph stand, in order). Return ``None`` if torch has no such definition of
    the operator, or if the definition reads numbers out of tensors (``item()``), writes to its operands or has more
    than 4096 nodes."""
    if not _is_composite(node.target):
        return None
    operands, run = _make_decomposition_function(node, node.args, node.kwargs)
    values = [n.meta.get("val") for n in operands]
    if not all(isinstance(v, Tensor) for v in values):
        return None
    try:
        traced = make_fx(torch.func.functionalize(run))(*values)
    except Exception:  # it reads numbers out of tensors
        return None
    pure = remove_inplace(traced.graph) and _is_valid_replacement(traced.graph)
    return (traced.graph, operands) if pure and all(n.target is not node.target for n in traced.graph.nodes) else None


def _is_composite(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.has_kernel_for_dispatch_key(_COMPOSITE)


def _is_mutating(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _make_decomposition_function(node: fx.Node, args: Any, kwargs: Any) -> tuple[list[fx.Node], Callable[..., Any]]:
    """Return two values: a list of the operand nodes of ``node``, and a function that takes a tensor for each of them
    and executes torch's decomposition of the operator of ``node``.

    ``args``, ``kwargs``: the arguments of ``node``, with nodes in place of tensors.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        given, named = pytree.tree_unflatten([next(rest) if isinstance(x, fx.Node) else x for x in leaves], tree)
        return node.target.decompose(*given, **named)  # type: ignore[union-attr]

    return operands, run


def _trace_operators(run: Callable[..., Any], values: list[Any]) -> fx.Graph | None:
    """Return the graph of the operators that the function ``run`` executes on the tensors ``values``. Return ``None``
    if the graph has more than 4096 nodes, or if one of its operators writes to its operands or reads a constant tensor.
    """
    traced = make_fx(torch.func.functionalize(run))(*values)
    if any(
        _is_mutating(n.target) for n in traced.graph.nodes
    ):  # the first pass missed operators that torch composes itself
        traced = make_fx(torch.func.functionalize(traced))(*values)
    return traced.graph if _is_valid_replacement(traced.graph) else None


def _is_valid_replacement(graph: fx.Graph) -> bool:
    """Return whether ``graph``, obtained by tracing the definition of an operator by simpler ones, can replace the
    operator: it has at most 4096 nodes, and no node writes to its operands or reads an attribute of a module."""
    parts = list(graph.nodes)
    return len(parts) <= _MOST_PARTS and not any(n.op == "get_attr" or _is_mutating(n.target) for n in parts)


def _inline_operators(build: Builder, *args: Any, **kwargs: Any) -> Any:
    """Append the operators by which torch defines the operator ``build.node`` to the rewritten copy of its graph, and
    return the node of the result, or a tuple of nodes. Return ``KEEP`` (the operator stays) if the definition reads
    numbers out of tensors, has no meta kernel, has more than 4096 nodes or writes to its operands.

    ``build``: appends operators to the copy. ``args``, ``kwargs``: the operator's arguments, with nodes in place of
    tensors.
    """
    node = build.node
    assert node is not None
    operands, run = _make_decomposition_function(node, args, kwargs)
    try:
        with META:
            graph = _trace_operators(run, [o.meta["val"] for o in operands])
    except Exception:  # it reads numbers out of tensors, or has no meta kernel
        return KEEP
    if graph is None:
        return KEEP
    env: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
    for part in graph.nodes:
        if part.op == "output":
            made = fx.node.map_arg(part.args[0], env.__getitem__)
            return tuple(made) if isinstance(made, list) else made
        if part.op == "call_function":
            given, named = fx.node.map_arg((part.args, part.kwargs), env.__getitem__)
            several = part.target is operator.getitem and isinstance(given[0], tuple)
            env[part] = given[0][given[1]] if several else build(part.target, *given, **named)
    raise AssertionError("a graph ends in an output node")


def rewrite_recurrent_network(build: Builder, x: fx.Node, state: Any, weights: list[fx.Node], *layers: Any) -> Any:
    """Rewrite a recurrent network as one operator for each layer and direction (``passes/ops/recurrent.py``), with
    dropout operators between the layers. Return a tuple of nodes: the output of the last layer and the final state of
    all layers (for an LSTM, two nodes).

    ``build``: appends operators to the graph. ``x``: the input. ``state``: the initial state of all layers; for an
    LSTM, a list of two. ``weights``: the weights and biases of all layers, in order. ``layers``: the six values of
    :class:`RecurrentLayers`.
    """
    assert build.node is not None
    kind = build.node.target._schema.name.split("::")[-1]  # type: ignore[union-attr]
    stack = RecurrentLayers(*layers)
    steps = x.meta["val"].shape[1 if stack.batch_first else 0]
    return call_recurrent_layers(build, kind, x, state, weights, stack, steps)


RECURRENT: dict[Any, Rule] = dict.fromkeys(
    (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), rewrite_recurrent_network
)
