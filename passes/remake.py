"""Selective recomputation: choose which values of a joint graph are saved, and which backward recomputes.

Requires: a joint graph's nodes in order, and the forward nodes that should be recomputed. Provides: the saved nodes,
and the nodes that backward runs again. Recomputed nodes read saved values, parameters, and views of these, which cost
nothing; every other operand of theirs is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from passes.collectives import collective_name


def slimmed(
    saved: Sequence[fx.Node], again: set[fx.Node], nodes: Sequence[fx.Node], results: Collection[fx.Node | None] = ()
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Choose the nodes to save instead of ``saved``, in the order of ``nodes``, and the nodes to recompute.

    ``again``: nodes that should be recomputed rather than saved; their views and copies, which matrix products make of
    their operands, are not saved either. ``results``: outputs of the forward, never recomputed.
    """
    again = again.difference(n for n in results if n is not None)
    for node in nodes:
        if node not in results and _is_copy(node) and node.all_input_nodes[0] in again:
            again.add(node)
    kept = {n for n in saved if not _remakable(n, again)}
    remade: set[fx.Node] = set()
    stack = [n for n in saved if n not in kept]
    while stack:
        node = stack.pop()
        if node in remade:
            continue
        remade.add(node)
        for operand in node.all_input_nodes:
            if _remakable(operand, again) or _views_kept(operand, kept):
                stack.append(operand)
            else:
                kept.add(operand)
    return [n for n in nodes if n in kept], remade


def woven(body: Sequence[fx.Node], remade: set[fx.Node], order: Sequence[fx.Node]) -> list[fx.Node]:
    """``body`` with the recomputed nodes that it reads, each right before its first reader, so that it is short-lived.

    ``remade``: all recomputed nodes. ``order``: the nodes of the joint graph.
    """
    place = {n: i for i, n in enumerate(order)}
    result: list[fx.Node] = []
    there: set[fx.Node] = set()
    for node in body:
        missing = needed([node], remade - there)
        result += sorted(missing, key=place.__getitem__)
        result.append(node)
        there |= missing
    return result


def needed(readers: Iterable[fx.Node], remade: set[fx.Node]) -> set[fx.Node]:
    """The recomputed nodes (in ``remade``) that ``readers`` depend on through recomputed nodes alone."""
    found: set[fx.Node] = set()
    stack = [o for n in readers for o in n.all_input_nodes if o in remade]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(o for o in node.all_input_nodes if o in remade)
    return found


def _remakable(node: fx.Node, again: set[fx.Node]) -> bool:
    """Whether ``node`` may be recomputed; one of several results only if its operator is recomputed as well."""
    if node.target is operator.getitem:
        source = node.args[0]
        return node in again and isinstance(source, fx.Node) and source in again
    return node in again and isinstance(node.meta.get("val"), torch.Tensor)


def _views_kept(node: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether ``node``, which is not saved, is a view of a saved value or of a placeholder."""
    if node in kept or node.op == "placeholder":
        return False
    while node not in kept and node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node in kept or node.op == "placeholder"


def _is_copy(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target == torch.ops.aten.clone.default or collective_name(node.target) == "copy" or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    if node.target == torch.ops.aten._unsafe_view.default:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
        return False
    returns = node.target._schema.returns
    info = returns[0].alias_info if len(returns) == 1 else None
    return info is not None and not info.is_write
