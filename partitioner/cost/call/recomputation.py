"""Selective recomputation (activation checkpointing by operator): choose the operators of a block that backward runs
again.

- ``scores`` recomputes attention scores only (Korthikanti et al. 2022).
- ``selective`` also recomputes all other results whose bytes are worth the time. Results of products, fused attention,
  communication, sorting, look-ups and random draws are kept if backward, or a recomputed operator, reads them. Norms,
  activations and similar operators are recomputed from these results in a pass over memory. The values to keep are a
  minimum cut between the values that must be kept and the values that backward reads. In this cut a value costs its
  bytes, and a recomputed operator costs its memory traffic.
- ``alternate`` also recomputes every second product. This halves the bytes kept for products and adds half of the time
  of a forward (as in torchtitan).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

import torch
from ortools.graph.python.max_flow import SimpleMaxFlow
from torch import Tensor, fx

from partitioner.cost.call.block_profile import node_operands
from partitioner.cost.call.operators import forward_kernels, is_attention, is_product, is_view, kind_of, operator_name
from partitioner.cost.call.saved_activations import find_needed_values, find_score_nodes, size_of, value_of
from partitioner.passes.ir.collectives import collective_name
from partitioner.passes.ir.model import Block
from partitioner.passes.rules.strategies import needs_gradient

Remade = Literal["scores", "selective", "alternate"]

_WORTH = 16  # bytes of traffic per byte not kept: activations need two or three, counter-based random numbers 284

_BYTES_PER_FLOP = 1 / 300  # typical ratio of bandwidth to FLOP/s of devices
_ANY = 1 << 50  # more than all bytes of a block
_KINDS = frozenset(("pointwise", "special", "norm", "softmax", "reduction"))
_COPIES = frozenset(
    """to _to_copy copy clone contiguous reshape flatten cat stack constant_pad_nd roll flip repeat full_like zeros_like
    ones_like""".split()
)


def recompute_mode(pinned: str | None) -> Remade:
    """Return which operators selective recomputation runs again in the backward: ``"scores"`` (attention scores only),
    ``"selective"`` (also other large results that take little time) or ``"alternate"`` (also every second matrix
    product). ``pinned``: the value of the constraint ``recompute``; if it is none of these three, ``"selective"`` is
    returned."""
    return "scores" if pinned == "scores" else "alternate" if pinned == "alternate" else "selective"


def allowed_recompute_mode(pinned: str | None) -> Remade | None:
    """Return which operators selective recomputation may run again in the backward: ``"scores"`` (attention scores
    only), ``"selective"`` (also other large results that take little time) or ``"alternate"`` (also every second matrix
    product). Return ``None`` if the constraint ``recompute``, whose value is ``pinned``, excludes selective
    recomputation."""
    return None if pinned in ("none", "full") else recompute_mode(pinned)


def find_recomputed_nodes(block: Block, how: Remade, sent: Collection[fx.Node] = ()) -> frozenset[fx.Node]:
    """Return the operators of ``block`` (such as a layer) that backward runs a second time, so that their results are
    not kept. The graph must mark which nodes need gradients.

    ``how``: ``"scores"`` (attention scores only), ``"selective"`` (also other results that take many bytes and little
    time) or ``"alternate"`` (also every second matrix product). ``sent``: values that come from other ranks when the
    block is executed; they are never recomputed.
    """
    scores = find_score_nodes(block)
    if how == "scores":
        return scores
    second = _second_products(block) if how == "alternate" else frozenset[fx.Node]()
    return scores | _RecomputeCut(block, scores, sent, second).again()


def _second_products(block: Block) -> frozenset[fx.Node]:
    products = [node for node in block.graph.nodes if is_product(node) and not is_attention(node)]
    return frozenset(products[1::2])


class _RecomputeCut:
    """Minimum cut that decides which operators of ``block`` (such as a layer) backward runs a second time, and which
    values are kept.

    Each operator and each input has two vertices. The first is on the side of backward if the operator is run a second
    time. The second is on the side of backward if the operator's result is needed there. A result that is needed and
    not recomputed is kept, at the cost of its bytes. ``scores``: the operators of attention scores, whose recomputation
    costs nothing. ``sent``: nodes whose values come from other ranks; these are never recomputed. ``products``: the
    matrix products that may be recomputed.
    """

    def __init__(
        self, block: Block, scores: frozenset[fx.Node], sent: Collection[fx.Node], products: frozenset[fx.Node]
    ) -> None:
        self.block, self.scores, self.sent = block, scores, {value_of(node)[0] for node in sent}
        self.products = products  # products that are run again in any case
        self.states = set(block.states)
        self.flow = SimpleMaxFlow()
        self.places: dict[fx.Node, int] = {}
        self.read: dict[fx.Node, set[int]] = {}  # for each operator, the indices of the results that are needed

    def again(self) -> frozenset[fx.Node]:
        """Solve the minimum cut, and return the operators that backward runs a second time; empty if backward reads no
        values."""
        wanted = [
            v
            for n in self.block.graph.nodes
            if n.op == "call_function" and needs_gradient(n)
            for v in find_needed_values(n)
        ]
        wanted = [v for v in wanted if v[0].name not in self.states]
        again = [n for n in self.block.graph.nodes if self._is_quick(n)]
        reads = {n: list(self._find_read_values(n)) for n in again}
        for node, result in (*wanted, *(value for values in reads.values() for value in values)):
            self.read.setdefault(node, set()).add(result)
        backward, forward = 0, 1
        for node in (*self.read, *(n for n in again if n not in self.read)):
            self.places[node] = 2 * len(self.places) + 2
        for node, place in self.places.items():
            quick = node in reads
            self._add_flow_edge(place, place + 1, _ANY if node in self.scores else self._sum_result_bytes(node))
            self._add_flow_edge(forward, place, self._price_recomputation(node) if quick else _ANY)
            for operand, _ in reads.get(node, ()):
                self._add_flow_edge(self.places[operand] + 1, place, _ANY)
        for node, _ in dict.fromkeys(wanted):
            self._add_flow_edge(self.places[node] + 1, backward, _ANY)
        if not wanted or self.flow.solve(forward, backward) != SimpleMaxFlow.OPTIMAL:
            return frozenset()
        side = set(self.flow.get_sink_side_min_cut())
        return frozenset(n for n in again if self.places[n] in side)

    def _add_flow_edge(self, start: int, end: int, capacity: int) -> None:
        self.flow.add_arc_with_capacity(start, end, capacity)

    def _is_quick(self, node: fx.Node) -> bool:
        """Return whether recomputation may run ``node`` a second time. It may run attention scores, the matrix products
        that ``"alternate"`` recomputation selected, and deterministic operators that cost about one pass over memory
        (pointwise, norms, reductions, copies).
        """
        if node in self.scores:
            return True
        if node.op != "call_function" or node in self.sent or collective_name(node.target) is not None:
            return False
        if node in self.products:
            return True
        if is_product(node) or is_view(node):
            return False
        target, name = node.target, operator_name(node)
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or "batch_norm" in name:
            return False
        if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(node.meta["val"], Tensor | tuple):
            return False
        return kind_of(node, name) in _KINDS or name in _COPIES

    def _find_read_values(self, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """Yield the values that ``node`` reads when backward runs it a second time, except parameters and buffers. A
        value is a pair (node that computed it, index of the result).
        """
        for value in dict.fromkeys(map(value_of, node.all_input_nodes)):
            if value[0].name not in self.states:
                yield value

    def _sum_result_bytes(self, node: fx.Node) -> int:
        return sum(size_of((node, result)) for result in self.read.get(node, ()))

    def _price_recomputation(self, node: fx.Node) -> int:
        """Return the cost of running the operator of ``node`` a second time, expressed as the number of saved bytes
        that would cost as much. The cost is at least 1, so that no operator is run needlessly, except that attention
        scores cost 0."""
        kernels = forward_kernels(node, *node_operands(node, self.states, ()))
        traffic = sum(k.num_bytes + k.flops * _BYTES_PER_FLOP for k in kernels)
        if node in self.products:
            return 1
        return 0 if node in self.scores else 1 + int(traffic / _WORTH)
