"""Replace in-place operators by functional ones where this changes no other value.

Requires: a flat graph of one export. Provides: an equivalent graph without the in-place operators that write to a newly
allocated tensor, as a whole or through one view. All other in-place operators stay;
``ExportedProgram.run_decompositions`` replaces them by tracing the whole graph again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_ITEM = operator.getitem

# View -> operator that returns a copy of its operand in which the viewed elements have new values. Both take the same
# arguments after the first.
_FUNCTIONAL_OPERATORS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def remove_inplace(graph: fx.Graph) -> bool:
    """Replace in-place operators in ``graph`` by functional ones, in place, where no other value may share the written
    memory.

    Return true if no operator that writes to its arguments is left.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    clean = True
    for node in list(graph.nodes):
        if _is_mutating_node(node) and not _replace_inplace_operator(graph, node, order):
            clean = False
    if clean:
        _refresh_without_gradients(graph)
    return clean


def _refresh_without_gradients(graph: fx.Graph) -> None:
    """Run all operators of ``graph`` again on fake tensors (which have no values) with gradients off, and store the
    results in ``node.meta["val"]``.

    This is needed because the strides of results depend on the attention kernel that torch selects, which depends on
    gradients.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if any(isinstance(size, SymInt) for v in _iterate_tensors(node.meta.get("val")) for size in v.shape):
                continue  # a data-dependent number of rows: slow to infer again, and without fixed strides
            values: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            mode = next((v.fake_mode for v in _iterate_tensors(values) if isinstance(v, FakeTensor)), None)
            if mode is not None:
                with mode, torch.no_grad():
                    node.meta["val"] = node.target(*values[0], **values[1])
        elif node.target is _ITEM:
            source, index = node.args
            node.meta["val"] = source.meta["val"][index]


def _is_mutating_node(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _replace_inplace_operator(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Replace the in-place operator ``node`` of ``graph`` by a functional one. Return whether it was replaced.

    The operator stays if another value may share the written memory. ``order``: the position of each node in the graph;
    new nodes are added to it.
    """
    target, functional = node.args[0] if node.args else None, find_functional_operator(node.target)
    if functional is None or not isinstance(target, fx.Node):
        return False
    base, view = target, None
    if target.target in _FUNCTIONAL_OPERATORS and isinstance(target.args[0], fx.Node):
        base, view = target.args[0], target
    if not _allocates_result(base):
        return False
    if any(is_view(user) and user is not view and order[user] < order[node] for user in base.users):
        return False
    if view is not None and any(is_view(user) and order[user] < order[node] for user in view.users):
        return False
    with graph.inserting_before(node):
        added = [_build_written_value(graph, functional, node)]
        if view is not None:
            added.append(
                graph.call_function(
                    _FUNCTIONAL_OPERATORS[view.target], (base, added[0], *view.args[1:]), dict(view.kwargs)
                )
            )
            added.append(graph.create_node("call_function", view.target, (added[1], *view.args[1:]), dict(view.kwargs)))
    wanted = [target] if view is None else [target, base, view]
    pairs = zip(added, wanted, strict=True)
    if not all(
        _infer_matching_value(new_node, old, strides=new_node is not added[0] or view is None)
        for new_node, old in pairs
    ):
        for unwanted in reversed(added):
            graph.erase_node(unwanted)
        return False
    for made in added:
        made.meta = {**node.meta, "val": made.meta["val"]}
        order[made] = order[node]
    node.replace_all_uses_with(added[-1])
    _replace_later_reads(target, added[-1], order, order[node])
    if view is not None:
        _replace_later_reads(base, added[1], order, order[node])
    graph.erase_node(node)
    if not added[-1].users:
        graph.erase_node(added[-1])
    return True


def _build_written_value(graph: fx.Graph, functional: Any, node: fx.Node) -> fx.Node:
    """Add operators to ``graph`` that compute the value which the in-place operator ``node`` writes to its first
    operand. Return the last new node.

    Args:
        functional: the functional operator with the same arguments, such as ``add`` for ``add_``.
    """
    if functional is not aten.copy.default:
        return graph.call_function(functional, node.args, dict(node.kwargs))
    target, source = (a.meta["val"] for a in node.args[:2])  # type: ignore[union-attr]
    new_node: Any = node.args[1]
    if source.dtype != target.dtype:
        new_node = graph.call_function(aten._to_copy.default, (new_node,), {"dtype": target.dtype})
        new_node.meta["val"] = source.to(target.dtype)
    if source.shape != target.shape:
        return graph.call_function(aten.expand.default, (new_node, list(target.shape)))
    return graph.call_function(aten.clone.default, (new_node,)) if new_node is node.args[1] else new_node


def find_functional_operator(target: Any) -> Any:
    """Return the functional operator for the in-place operator ``target``, such as ``add`` for ``add_``; ``None`` if
    there is none.

    The functional operator takes the same arguments and returns what ``target`` would write to its first argument.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.partition("::")[2]
    written = [a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments]
    packet = getattr(aten, name.removesuffix("_"), None)
    if target.namespace != "aten" or not name.endswith("_") or written != [True, *[False] * (len(written) - 1)]:
        return None
    functional = getattr(packet, target._overloadname, None)
    if functional is None or functional._schema.is_mutable:
        return None
    (_, first), *same = [(a.name, str(a.type)) for a in functional._schema.arguments]
    (_, wanted), *others = [(a.name, str(a.type)) for a in target._schema.arguments]
    return (
        functional if (first, same) == (wanted, others) else None
    )  # the name of the first argument may differ: ``input``, ``self``


def is_view(node: fx.Node) -> bool:
    """Return whether the result of ``node`` may share memory with one of its operands."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return node.op == "call_function"
    if any(r.alias_info is not None for r in node.target._schema.returns):
        return True
    # a composite operator may end in a view although its schema does not say so, as dropout does in evaluation
    return node.target._can_decompose() and node.target not in _ALLOCATING_OPERATORS


_ALLOCATING_OPERATORS = {aten.linear.default, aten.matmul.default, aten.softmax.int, aten.log_softmax.int}


def _allocates_result(node: fx.Node) -> bool:
    """Return whether the operator ``node`` allocates the memory of its result, so that no input, parameter or earlier
    value shares it.
    """
    if node.target is _ITEM and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        return isinstance(node.target, torch._ops.OpOverload) and not is_view(node)
    return node.op == "call_function" and not is_view(node) and node.target is not _ITEM


def _infer_matching_value(new_node: fx.Node, old: fx.Node, *, strides: bool) -> bool:
    """Compute the fake result of the new node ``new_node``, store it in ``new_node.meta["val"]``, and return whether
    its shape and dtype equal those of ``old``, the node to replace.

    Args:
        strides: whether the strides must be equal, too.
    """
    wanted = old.meta.get("val")
    values: Any = fx.node.map_arg((new_node.args, new_node.kwargs), lambda n: n.meta.get("val"))
    modes = [v.fake_mode for v in _iterate_tensors(values) if isinstance(v, FakeTensor)]
    if not modes or not isinstance(wanted, Tensor):
        return False
    with modes[0]:
        value = new_node.target(*values[0], **values[1])  # type: ignore[operator]
    new_node.meta["val"] = value
    same = (value.shape, value.dtype) == (wanted.shape, wanted.dtype)
    return same and (not strides or value.stride() == wanted.stride())


def _iterate_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``values``, which are nested in tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _iterate_tensors(value)
    elif isinstance(values, dict):
        yield from _iterate_tensors(list(values.values()))


def _replace_later_reads(old: fx.Node, new: fx.Node, order: dict[fx.Node, int], position: int) -> None:
    """Replace ``old`` by ``new`` as an operand of the later users of ``old``: those whose position in ``order`` is
    greater than ``position``.

    ``order``: the position of each node in the graph, from 0. ``position``: the position of the in-place operator after
    which ``old`` has the value ``new``.
    """
    for user in list(old.users):
        if order.get(user, -1) > position:
            user.replace_input_with(old, new)
