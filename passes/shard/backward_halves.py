"""Partition the graph of forward and backward: saved values, recomputed operators, and the two halves of backward.

:func:`choose_saved_nodes` implements selective recomputation. Requires: the nodes of forward and backward in one
(joint) graph, and the forward nodes that should be recomputed. Provides: the nodes to save, and the nodes that backward
recomputes. Recomputed nodes read saved values, parameters, and views of both, which cost nothing; all their other
operands are saved.

:class:`JointHalves` cuts backward into gradients of inputs and gradients of weights. Requires: a joint graph's nodes,
its backward nodes, and its recomputed nodes. Provides: the operators of both halves, and the values that the first half
passes to the second. Where this reduces the bytes passed, the first half also computes small gradients of weights and
recomputes values that the second half reads.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import collective_name


def choose_saved_nodes(
    saved: Sequence[fx.Node],
    recomputed: set[fx.Node],
    nodes: Sequence[fx.Node],
    results: Collection[fx.Node | None] = (),
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Decide which forward results are saved for backward and which ones backward recomputes. Return a list of the
    forward nodes to save, in the order of ``nodes``, and the set of the forward nodes to recompute.

    ``saved``: the forward nodes whose results backward reads, which are saved unless they can be recomputed.
    ``recomputed``: forward nodes whose results should not be saved; views and copies of these results are not saved
    either. ``nodes``: the forward nodes in order. ``results``: forward nodes that must not be recomputed, such as the
    outputs.
    """
    recomputed = recomputed.difference(n for n in results if n is not None)
    for node in nodes:
        if node not in results and _is_copy(node) and node.all_input_nodes[0] in recomputed:
            recomputed.add(node)
    kept = {n for n in saved if not _can_recompute_node(n, recomputed)}
    recomputed_nodes: set[fx.Node] = set()
    stack = [n for n in saved if n not in kept]
    while stack:
        node = stack.pop()
        if node in recomputed_nodes:
            continue
        recomputed_nodes.add(node)
        for operand in node.all_input_nodes:
            if _can_recompute_node(operand, recomputed) or _is_view_of_saved(operand, kept):
                stack.append(operand)
            else:
                kept.add(operand)
    return [n for n in nodes if n in kept], recomputed_nodes


def insert_recomputed_nodes(
    body: Sequence[fx.Node], recomputed_nodes: set[fx.Node], order: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the operators ``body`` of backward, in order, with recomputed forward nodes inserted: each one comes right
    before the first operator that reads it, so that its result is in memory only briefly.

    ``recomputed_nodes``: all forward nodes that backward recomputes. ``order``: all nodes of the joint graph of forward
    and backward, in order.
    """
    place = {n: i for i, n in enumerate(order)}
    result: list[fx.Node] = []
    there: set[fx.Node] = set()
    for node in body:
        missing = find_recomputed_ancestors([node], recomputed_nodes - there)
        result += sorted(missing, key=place.__getitem__)
        result.append(node)
        there |= missing
    return result


def find_recomputed_ancestors(readers: Iterable[fx.Node], recomputed_nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the forward nodes that must be recomputed before the nodes ``readers`` can run: the nodes in
    ``recomputed_nodes`` that ``readers`` depend on, directly or through other nodes in ``recomputed_nodes``.
    ``recomputed_nodes``: all forward nodes that backward recomputes."""
    found: set[fx.Node] = set()
    stack = [o for n in readers for o in n.all_input_nodes if o in recomputed_nodes]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(o for o in node.all_input_nodes if o in recomputed_nodes)
    return found


def _can_recompute_node(node: fx.Node, recomputed: set[fx.Node]) -> bool:
    """Return whether backward may recompute the forward node ``node`` instead of reading its saved result: the node
    must be in ``recomputed``, and its result must be a tensor. ``recomputed``: the forward nodes whose results should
    not be saved.

    For a ``getitem``, which selects one of an operator's results, the operator must be in ``recomputed``, too.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return node in recomputed and isinstance(source, fx.Node) and source in recomputed
    return node in recomputed and isinstance(node.meta.get("val"), torch.Tensor)


def _is_view_of_saved(node: fx.Node, saved: set[fx.Node]) -> bool:
    """Return whether ``node`` is a view of a saved value or of a placeholder, so that backward can recreate it at no
    cost. Return false if ``node`` itself is saved or a placeholder. ``saved``: the nodes whose results are saved."""
    if node in saved or node.op == "placeholder":
        return False
    while node not in saved and node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node in saved or node.op == "placeholder"


def _is_copy(node: fx.Node) -> bool:
    """Return whether the result of the operator ``node`` equals its only operand: for a clone, a view, or the
    collective ``copy``, which communicates only in backward (it all-reduces the gradient)."""
    if node.op != "call_function":
        return False
    return node.target == torch.ops.aten.clone.default or collective_name(node.target) == "copy" or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    """Return whether the operator ``node`` returns a view of its only operand."""
    if node.target == torch.ops.aten._unsafe_view.default:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
        return False
    returns = node.target._schema.returns
    info = returns[0].alias_info if len(returns) == 1 else None
    return info is not None and not info.is_write


_SUMMING = frozenset("sum mul neg add div _to_copy clone view _unsafe_view expand squeeze unsqueeze permute".split())

_SMALL = 4  # the first half computes weight gradients that are this many times smaller than their operands

Half = list[fx.Node]


@dataclass(frozen=True)
class JointHalves:
    """Forward and backward of one piece of the model, such as a layer, in one graph. :meth:`cut` divides backward into
    a half for gradients of inputs and a half for gradients of parameters.

    ``nodes``: all nodes, in order. ``forward``, ``backward``: the nodes of forward and of backward.
    ``recomputed_nodes``: forward nodes that backward recomputes. ``start``: the inputs of backward: the saved forward
    nodes and the gradients of the outputs.
    """

    nodes: Sequence[fx.Node]
    forward: Collection[fx.Node]
    backward: Sequence[fx.Node]
    recomputed_nodes: set[fx.Node]
    start: Sequence[fx.Node]

    def cut(
        self, input_gradients: Sequence[fx.Node | None], state_gradients: Sequence[fx.Node | None]
    ) -> tuple[Half, Half, list[fx.Node]]:
        """Cut backward into a half that computes the gradients of inputs and a half that computes the gradients of
        parameters. Return three lists: the operators of the first half, the operators of the second half, and the nodes
        whose values the first half passes to the second.

        ``input_gradients``, ``state_gradients``: the nodes of the gradients of inputs and of parameters; ``None`` is a
        zero gradient.
        """
        gradients = [g for g in state_gradients if g is not None]
        through = collect_ancestor_nodes(g for g in input_gradients if g is not None) - set(self.forward)
        if through:
            through |= _find_weight_gradient_sums(gradients, {*self.forward, *through})
        first = insert_recomputed_nodes(
            [n for n in self.nodes if n in through and n.op == "call_function"], self.recomputed_nodes, self.nodes
        )
        last, left = [n for n in self.backward if n not in through], self.recomputed_nodes - {*first}
        place = {n: k for k, n in enumerate(self.nodes)}
        early = sorted(find_recomputed_ancestors(last, left), key=place.__getitem__) if through else []
        found = []
        for ahead in ([], early):
            later = insert_recomputed_nodes(last, left.difference(ahead), self.nodes)
            known = {*self.start, *through, *first, *ahead}
            picked = [n for n in later if n.target is operator.getitem and n.args[0] in known]  # one of several results
            later, known = [n for n in later if n not in picked], known.union(picked)
            read = {o for n in later for o in n.all_input_nodes} | set(gradients)
            found.append(([*first, *ahead, *picked], later, [n for n in self.nodes if n in known and n in read]))
        return min(found, key=lambda half: _sum_storage_bytes(half[2]))


def is_in_first_half(size: int, summed: int) -> bool:
    """Return whether a weight gradient that is a sum of tensors should be computed in the first half of backward, which
    computes the gradients of inputs, instead of in the second half. The answer is true if the gradient has at most a
    quarter of the size of these tensors, which would otherwise stay in memory until the second half runs.

    ``size``: the size of the gradient. ``summed``: the total size of the summed tensors, in the same unit (bytes or
    elements).
    """
    return _SMALL * size <= summed


def _find_weight_gradient_sums(gradients: Sequence[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """Return weight gradients that the first half of backward (for gradients of inputs) should compute because they are
    sums of much larger tensors (at least four times as large in total), which need not be kept for the second half
    then. The nodes on which only these gradients depend are included.

    ``gradients``: the nodes of all weight gradients. ``known``: nodes that forward or the first half computes anyway;
    they are not included.
    """
    found: set[fx.Node] = set()
    for gradient in gradients:
        made = collect_ancestor_nodes([gradient], known)
        read = {o for n in made for o in n.all_input_nodes} & set(known)
        sums = all(isinstance(n.target, torch._ops.OpOverload) and n.target._opname in _SUMMING for n in made)
        if sums and is_in_first_half(_sum_storage_bytes([gradient]), _sum_storage_bytes(read)):
            found |= made
    return found


def _sum_storage_bytes(nodes: Iterable[fx.Node]) -> int:
    """Return the number of bytes of memory that the results of ``nodes`` occupy; shared memory counts once."""
    values = [n.meta.get("val") for n in nodes if n.op == "call_function"]
    storages = [v.untyped_storage() for v in values if isinstance(v, Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def collect_ancestor_nodes(nodes: Iterable[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return ``nodes`` and all nodes on which they depend, directly or indirectly. The search stops at nodes in
    ``known``, which are not included."""
    seen: set[fx.Node] = set()
    stack = [n for n in nodes if n is not None]
    while stack:
        node = stack.pop()
        if node not in seen and node not in known:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
