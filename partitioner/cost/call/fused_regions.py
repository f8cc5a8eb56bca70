"""Which operators of a block (such as a layer) a compiler merges to one kernel, and the memory traffic that is left.

Pointwise operators, norms, reductions of rows, softmaxes and copies are merged with the operators that compute their
operands. Products, fused attentions, look-ups, sorts, operators of libraries and collectives run by themselves, and end
a region (a set of merged operators). A reduction over rows, such as the sum of a batch, also ends a region, because the
operators that read its result need all of it. Two operators are merged only if no path between them leads through an
operator that ends a region. The same operators are merged in backward.

A region reads each tensor from outside once. It writes the tensors that are read outside of it or in backward:

- forward: operands from outside, results that other operators read, values saved for backward;
- backward: gradients of its results from outside, saved values, gradients of its operands from outside, and a second
  time the tensors that are summed over rows to a gradient of a weight.

A region never moves more bytes than its operators do one by one. The values that are saved for backward do not change:
the runtime saves the same values with and without compilation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from partitioner.cost.call.operators import CROSS_ENTROPY, VIEWS, is_product, is_view, kind_of, operator_name
from partitioner.cost.call.saved_activations import Value, find_needed_values, size_of
from partitioner.passes.ir.collectives import collective_name
from partitioner.passes.ir.model import Block
from partitioner.passes.rules.factors import get_node_argument, operands_of, results_of
from partitioner.passes.rules.strategies import needs_gradient

_KINDS = frozenset(("pointwise", "special", "reduction", "softmax", "norm"))
_COPIES = frozenset("_to_copy to clone cat stack constant_pad_nd full_like zeros_like ones_like".split())
_NOT_MERGED = frozenset("cumsum cumprod norm argmax argmin".split())
_LEARNED = ("batch_norm", "instance_norm", "group_norm")  # they reduce over rows, or over several dims


@dataclass(frozen=True)
class RegionTraffic:
    """Memory traffic of a region (set of operators that a compiler merges to one kernel) in bytes, for one execution of
    the block, such as a layer.

    ``forward``, ``backward``: bytes that are read and written. ``over_rows``: the number of weights whose gradients are
    sums over rows; each of these sums is a kernel of its own in backward.
    """

    forward: float
    backward: float
    over_rows: int = 0


class FusedRegions:
    """The regions of operators of ``block`` that a compiler merges to one kernel each. ``region``: operator -> number
    of its region. Operators that are not merged are left out, and so are views, which take no time.

    ``block``: the graph of a piece of the model (such as a layer) with the shapes of one rank. ``train``: whether the
    block has a backward.
    """

    def __init__(self, block: Block, train: bool) -> None:
        self.block, self.train = block, train
        self.states = set(block.states)
        self.outputs = {_find_source(node) for node in block.outputs}
        self.region = _find_regions(block.graph)

    def traffic(self) -> dict[int, RegionTraffic]:
        """Return number of a region -> memory traffic of the region: bytes read and written in forward and in backward.
        A region is a set of operators that a compiler merges to one kernel."""
        members: dict[int, list[fx.Node]] = {}
        for node, number in self.region.items():
            members.setdefault(number, []).append(node)
        needed = self._find_saved_values() if self.train else set[fx.Node]()
        return {
            number: RegionTraffic(self._sum_forward(nodes, needed), *self._sum_backward(nodes))
            for number, nodes in members.items()
        }

    def _find_saved_values(self) -> set[fx.Node]:
        """Return the operators of the block (such as a layer) whose results backward reads, so that forward has to
        write them to memory."""
        marked = (n for n in self.block.graph.nodes if n.op == "call_function" and needs_gradient(n))
        return {value[0] for node in marked for value in find_needed_values(node)}

    def _sum_forward(self, nodes: list[fx.Node], needed: set[fx.Node]) -> float:
        """Return the bytes that forward reads and writes for the region of the operators ``nodes``, which a compiler
        merges to one kernel. ``needed``: operators whose results are saved for backward."""
        here = set(nodes)
        read = {s: s.meta["val"] for n in nodes for s in map(_find_source, _tensors_of(n)) if s not in here}
        total = float(sum(_count_bytes(value) for value in read.values()))
        for node in nodes:
            if operator_name(node) in CROSS_ENTROPY:  # the logits are read twice: largest number, then exponentials
                total += _count_bytes(_tensors_of(node)[0].meta["val"])
            if node in needed or node in self.outputs or any(reader not in here for reader, _ in _list_readers(node)):
                total += _count_bytes(node.meta["val"])
        return total

    def _sum_backward(self, nodes: list[fx.Node]) -> tuple[float, int]:
        """Return two numbers: the bytes that backward reads and writes for the region of the operators ``nodes``, which
        a compiler merges to one kernel, and the number of weights whose gradients are sums over rows."""
        here, over_rows = set(nodes), 0
        total = 0.0
        saved: set[Value] = set()
        written: dict[fx.Node, float] = {}
        for node in nodes if self.train else ():
            if not needs_gradient(node):
                continue
            apart: dict[object, int] = {}
            for reader, size in _list_readers(node):
                if reader not in here and needs_gradient(reader):
                    key = self.region.get(reader, reader)  # operators of one region write one gradient
                    apart[key] = max(apart.get(key, 0), size)
            total += float(sum(apart.values())) + (_count_bytes(node.meta["val"]) if node in self.outputs else 0)
            needs = set(find_needed_values(node))
            saved |= needs
            for operand in _tensors_of(node):
                source = _find_source(operand)
                if source in here or not needs_gradient(operand):
                    continue
                passed = node if _passes_gradient(node, operand) else source
                nbytes = float(_count_bytes(operand.meta["val"]))
                written[passed] = max(written.get(passed, 0.0), nbytes)
                if source.op == "placeholder" and source.name in self.states and _is_summed_over_rows(operand, node):
                    others = sum(size_of(value) for value in needs if value[0] is not source)
                    total += _count_bytes(node.meta["val"]) + others
                    over_rows += 1
        return total + sum(size_of(value) for value in saved) + sum(written.values()), over_rows


def find_least_traffic(block: Block, train: bool) -> dict[fx.Node, tuple[float, float]]:
    """Return, for each operator of ``block`` that a compiler can merge with others, a lower bound on its memory traffic
    in bytes, as (forward, backward). The bound holds however operators are merged. ``block``: a piece of the model,
    such as a layer. ``train``: whether it has a backward.

    Values between operators that can be merged count nothing, unless they are saved for backward. Each other value is
    counted once, at its first operator. Parameters and buffers are left out.
    """
    states, outputs = set(block.states), {_find_source(node) for node in block.outputs}
    nodes = [n for n in block.graph.nodes if n.op == "call_function"]
    marked = [n for n in nodes if train and needs_gradient(n)]
    needed = {value[0] for node in marked for value in find_needed_values(node)}
    read, saved, written = set[fx.Node](), set[Value](), set[fx.Node]()
    found: dict[fx.Node, tuple[float, float]] = {}
    for node in filter(can_merge, nodes):
        forward = backward = 0.0
        sources = [s for s in map(_find_source, _tensors_of(node)) if s.name not in states and not can_merge(s)]
        apart = [reader for reader, _ in _list_readers(node) if not can_merge(reader)]
        forward += sum(_count_bytes(s.meta["val"]) for s in {*sources} - read)
        read.update(sources)
        if node in needed or node in outputs or apart:
            forward += _count_bytes(node.meta["val"])
        if train and needs_gradient(node):
            needs = {value for value in find_needed_values(node) if value[0].name not in states} - saved
            into = {s for s in sources if needs_gradient(s)} - written
            backward += sum(size_of(value) for value in needs)
            backward += sum(_count_bytes(s.meta["val"]) for s in into)
            backward += _count_bytes(node.meta["val"]) if any(map(needs_gradient, apart)) else 0
            saved |= needs
            written |= into
        found[node] = forward, backward
    return found


def _find_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Find the regions of ``graph``: sets of operators that a compiler merges to one kernel. Return operator -> number
    of its region; operators that are not merged are left out."""
    levels: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        levels[node] = max((levels.get(i, 0) + _reader_ends_region(i) for i in node.all_input_nodes), default=0)
        if not can_merge(node):
            continue
        parent[node] = node
        for source in map(_find_source, _tensors_of(node)):
            if source in parent and not _reader_ends_region(source) and levels[source] == levels[node]:
                parent[find(source)] = find(node)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(find(node), len(numbers)) for node in parent}


def can_merge(node: fx.Node) -> bool:
    """Return whether a compiler can merge the operator of ``node`` with others: the operator computes each element or
    row independently, and is an operator of torch or one that the runtime decomposes."""
    target, name = node.target, operator_name(node)
    if name in CROSS_ENTROPY:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or is_product(node) or is_view(node):
        return False
    if name in _NOT_MERGED or any(word in name for word in _LEARNED):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or not _tensors_of(node):
        return False
    return kind_of(node, name) in _KINDS or name in _COPIES or name in VIEWS  # views that copy


def _reader_ends_region(node: fx.Node) -> bool:
    """Return whether a compiler must put the operators that read the result of ``node`` into another kernel than
    ``node``. This holds if ``node`` is neither a view nor an operator that can be merged, or if it reduces over rows.
    """
    if node.op != "call_function" or (collective_name(node.target) is None and _is_free(node)):
        return False
    return not can_merge(node) or _reduces_rows(node)


def _is_free(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def _reduces_rows(node: fx.Node) -> bool:
    """Return whether ``node`` is a reduction or softmax that combines rows: it reduces a dim other than the innermost
    ones, or all dims of a tensor that has several."""
    if kind_of(node, operator_name(node)) not in ("reduction", "softmax"):
        return False
    if operator_name(node) in CROSS_ENTROPY:
        return False
    shape = _tensors_of(node)[0].meta["val"].shape
    given = get_node_argument(node, "dim")
    listed = [given] if isinstance(given, int) else list(given) if isinstance(given, list | tuple) else []
    dims = sorted(dim % len(shape) for dim in listed) if shape else []
    return not dims or dims != list(range(len(shape) - len(dims), len(shape))) or (len(dims) == len(shape) > 1)


def _find_source(node: fx.Node) -> fx.Node:
    """Return the node that computed the tensor of ``node``: views and ``getitem`` are traced back to it."""
    while node.op == "call_function" and collective_name(node.target) is None and _is_free(node):
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _list_readers(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield the operators that read the result of ``node``, directly or through views, as pairs (operator, bytes that
    this operator reads)."""
    for user in node.users:
        if user.op == "call_function" and collective_name(user.target) is None and _is_free(user):
            yield from _list_readers(user)
        elif user.op == "call_function":
            yield user, _count_bytes(node.meta["val"])


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    return [o for o in operands_of(node) if isinstance(o.meta["val"], Tensor)]


def _count_bytes(value: object) -> int:
    """Return the bytes of ``value``, a tensor or a sequence of tensors and other values, which count 0."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(v.nbytes for v in value if isinstance(v, Tensor)) if isinstance(value, list | tuple) else 0


def _passes_gradient(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether the gradient of ``operand`` equals the gradient of the result of ``node``, as in an addition, so
    that nothing has to be computed."""
    one, other = operand.meta["val"], results_of(node)[0]
    return operator_name(node) == "add" and one.shape == other.shape and one.dtype == other.dtype


def _is_summed_over_rows(operand: fx.Node, node: fx.Node) -> bool:
    """Return whether the gradient of ``operand`` is a sum over rows of the gradient of ``node``, as for the weight of a
    norm or a bias.
    """
    return bool(operand.meta["val"].numel() < results_of(node)[0].numel())
