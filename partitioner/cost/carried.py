"""What a microbatch holds between the two halves of its backward, once that for inputs has run.

The half for weights reads what products with weights were of, and the gradients of their results; of what depends on
no input of the block it is all of the backward. One operator that makes both gradients (norms, convolutions) belongs to
the first half, and so do gradients that are sums over much larger tensors (of a norm's weight, written out).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from partitioner.cost.operators import is_product, is_view, operator_name
from partitioner.cost.saved import NEEDS, Value, needed, size_of, value_of
from passes.blocks import Block
from passes.collectives import collective_name
from passes.factors import needs_gradient, operands_of
from passes.gradients import differentiable
from passes.halves import is_early

_AT_ONCE = frozenset("convolution conv1d conv2d conv3d".split())


def carried_bytes(block: Block) -> int:
    """Bytes of one call of ``block``, a graph in which gradients are marked, besides its inputs and states."""
    through = _depends_on_inputs(block)
    read: set[Value] = set()
    gradients: set[fx.Node] = set()
    for node in block.graph.nodes:
        if node.op != "call_function" or not needs_gradient(node):
            continue
        if node not in through:
            read.update(needed(node))
            continue
        later = [o for o in operands_of(node) if needs_gradient(o) and o not in through and not _is_sum(node, o)]
        if later and not _makes_all_at_once(node):
            read.update(value for operand in later for value in _needed_for(node, operand))
            gradients.add(_same_gradient(node, block.outputs))
    gradients.update(node for node in block.outputs if needs_gradient(node) and node not in through)
    return sum(map(size_of, {v for v in read if v[0].op != "placeholder"})) + sum(
        map(size_of, map(value_of, gradients))
    )


def _depends_on_inputs(block: Block) -> set[fx.Node]:
    """The nodes whose gradient goes on to an input of the block."""
    inputs = set(block.inputs)
    through = {node for node in block.placeholders if node.name in inputs and needs_gradient(node)}
    for node in block.graph.nodes:
        if node.op == "call_function" and needs_gradient(node) and not through.isdisjoint(node.all_input_nodes):
            through.add(node)
    return through


def _is_sum(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the gradient of ``operand`` is a sum over a much larger tensor: then the first half makes it."""
    return not is_product(node) and is_early(size_of(value_of(operand)), size_of(value_of(node)))


def _makes_all_at_once(node: fx.Node) -> bool:
    """Whether one operator makes the gradients of all operands."""
    name = operator_name(node)
    return NEEDS.get(name) in ("norm", "attention") or name in _AT_ONCE


def _needed_for(node: fx.Node, operand: fx.Node) -> Iterator[Value]:
    """The values that the gradient of one operand reads."""
    operands, need = operands_of(node), NEEDS.get(operator_name(node), "operands")
    if is_view(node) or need == "nothing":
        return
    if need in ("others", "quotient"):
        yield from (value_of(o) for o in operands if o is not operand)
    elif need == "indices":
        yield from (value_of(o) for o in operands if not differentiable(o.meta["val"]))
    elif need in ("operands", "both"):
        yield from map(value_of, operands)
    if need in ("result", "both"):
        yield node, 0


def _same_gradient(node: fx.Node, outputs: Collection[fx.Node]) -> fx.Node:
    """The last node whose gradient is that of ``node``: sums, over ranks too, and views pass it on as it is."""
    while node not in outputs:
        users = [user for user in node.users if user.op == "call_function" and needs_gradient(user)]
        if len(users) != 1 or not _passes_gradient(users[0]):
            break
        if size_of(value_of(users[0])) != size_of(value_of(node)):
            break
        node = users[0]
    return node


def _passes_gradient(node: fx.Node) -> bool:
    return is_view(node) or operator_name(node) == "add" or collective_name(node.target) == "all_reduce"
