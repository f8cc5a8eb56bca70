"""Costs of a sharding over ranks that communicate (``tp`` or ``cp``), in seconds per microbatch.

:class:`TensorCosts` implements the protocol ``ShardingCosts`` of ``partitioner/solve/sharding/sharding.py``: it prices
operators under a strategy, changes of layout, states, and values between calls.

``divided_costs`` adds a penalty for work that the axis does not divide. Without it, the best use of any axis would be
to split the batch, which data parallelism does already.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, fx

from partitioner.cost.call.block_profile import operand_needs, tensors_of
from partitioner.cost.call.call_cost import exchange_time
from partitioner.cost.call.collectives import collective_time, exchange_seconds, moved_share
from partitioner.cost.call.expert_parallel import compute_exposed_seconds
from partitioner.cost.call.operators import (
    VIEWS,
    Operand,
    Shape,
    backward_kernels,
    form_kernels,
    forward_kernels,
    is_attention,
    is_view,
    operator_name,
    repeats_of,
)
from partitioner.cost.call.roofline import copied_s, kernels_time, memory_rate
from partitioner.cost.call.states import gradient_bytes
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.layouts import Layout, local_shape
from partitioner.passes.ir.model import FoldedModel, TensorSpec
from partitioner.passes.ops.attention import Band
from partitioner.passes.rules import Lowering, build_call_key, factors_of
from partitioner.passes.rules.attention import find_exchanged_band
from partitioner.passes.rules.factors import Strategy, operands_of, results_of
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.repeated_heads import count_exchanged_copies, count_head_repetitions
from partitioner.passes.shard.shard_block import RESHARDS, Reshard
from partitioner.solve.sharding.choices import matmul_flops
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType


@dataclass
class TensorCosts:
    """Prices in seconds per microbatch, by which shardings over the ranks of ``group`` are compared: of operators,
    changes of layout, states (parameters and buffers), and tensors that are kept between blocks (such as layers).

    - ``num_microbatches``: costs that occur once per step are divided by this number. ``sequence_parallel``: ``False``
      forbids tensors between blocks to be sharded over positions; ``True`` and ``None`` (the search chooses) allow it.
      ``update_bytes``: memory traffic of the optimizer per byte of parameter that a rank holds. ``tp``: number of
      tensor-parallel ranks over which attention heads are divided in addition to ``group``.
    - Three penalties favour shardings that divide memory and work. ``state_price``: seconds per byte of state that a
      rank holds. ``undivided``: seconds per matrix-product FLOP that every rank repeats. ``repeated``: seconds per byte
      of results that every rank computes.
    - ``short_gradients``: whether gradients have the dtype of their parameter instead of float32. ``complete``: whether
      a gradient that every rank computes in full costs as much as one that must be all-reduced. This is the case if
      ZeRO shards only states whose gradient must be reduced: each rank then keeps and updates all other states whole.

    ``device``: the device type. ``train``: whether costs include the backward. ``operators``: a cache of data that do
    not depend on the group and the penalties; the prices of several shardings on one device type may share it."""

    device: DeviceType
    group: Group
    train: bool = True
    num_microbatches: int = 1
    sequence_parallel: bool | None = None
    update_bytes: float = 8.0
    state_price: float = 0.0
    undivided: float = 0.0
    repeated: float = 0.0
    short_gradients: bool = False
    complete: bool = False
    tp: int = 1
    operators: PricedOperators = field(default_factory=lambda: PricedOperators(), repr=False)
    _nodes: dict[tuple[_Operator, Strategy], float] = field(default_factory=dict, init=False, repr=False)
    _found: dict[fx.Node, _Operator] = field(default_factory=dict, init=False, repr=False)
    _changes: dict[tuple[Hashable, ...], float] = field(default_factory=dict, init=False, repr=False)

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        """Return the seconds of one call of the operator ``node``, forward and backward, if it is run by ``strategy``
        (layouts of its operands and results). The collectives of the strategy are included. ``num_ranks``: number of
        ranks over which the tensors are sharded, the size of the mesh axis.
        """
        operator = self._found.get(node)
        if operator is None:
            operator = self._found[node] = self.operators.find(node, self.train, self.tp, self.device)
        key = (operator, strategy)
        found = self._nodes.get(key)
        if found is None:
            lowering = operator.lowering(strategy)
            seconds = operator.seconds(strategy, num_ranks)
            if lowering is not None and lowering.divides_work:
                seconds = self._divide_compute_seconds(node, strategy, num_ranks, seconds)
            if strategy.factor is None and self.undivided and num_ranks > 1:
                seconds += self.undivided * operator.matmul_flops
            if strategy.factor is None and self.repeated and num_ranks > 1:
                seconds += self.repeated * operator.made_bytes
            seconds += self._of_form(operator, strategy, seconds, num_ranks) if strategy.form else 0.0
            found = self._nodes[key] = seconds + self._sum_collective_seconds(node, lowering)
        return found

    def _divide_compute_seconds(self, node: fx.Node, strategy: Strategy, num_ranks: int, seconds: float) -> float:
        """Return the seconds of the operator ``node`` on one rank if each of ``num_ranks`` ranks computes an equal part
        of the result. The computation takes ``seconds / num_ranks``. Operands that ``strategy`` (layouts of its
        operands and results) shards are gathered, so that every rank reads them whole; the time for this is added.
        ``seconds``: time of the whole operator on one rank."""
        read = sum(
            o.meta["val"].nbytes / num_ranks
            for o, layout in zip(operands_of(node), strategy.operands, strict=True)
            if layout.is_shard
        )
        passes = 3 if self.train and needs_gradient(node) else 1
        rest: float = (1 - 1 / num_ranks) * passes * read / memory_rate("matmul", self.device)
        return seconds / num_ranks + rest

    def _of_form(self, operator: _Operator, strategy: Strategy, seconds: float, num_ranks: int) -> float:
        """Return the seconds of communication that computation does not hide, in an attention whose sequence is sharded
        over ranks. ``operator``: the attention. ``strategy``: layouts of its operands and results, and the algorithm
        (``strategy.form``, such as ``"ring"``). ``seconds``: time of the computation, which can hide the messages of a
        ring. ``num_ranks``: size of the mesh axis over which the sequence is sharded."""
        query, key, value = operator.operands(strategy, num_ranks)[:3]
        zigzag, seen = strategy.operands[0].zigzag, find_exchanged_band(operator.node) or Band()
        sent = exchange_seconds(query, key, value, seen, strategy.form, zigzag, self.group)
        passes = 2 if operator.backward else 1
        beside = strategy.form == "ring"
        return sum(
            compute_exposed_seconds(seconds / passes, s, self.device.overlap_slowdown, beside) for s in sent[:passes]
        )

    def _sum_collective_seconds(self, node: fx.Node, lowering: Lowering | None) -> float:
        if lowering is None:
            return 0.0
        itemsize = results_of(node)[0].dtype.itemsize
        return sum(collective_time(name, numel * itemsize, self.group) for name, numel in lowering.collectives)

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        """Return the seconds of one change from layout ``source`` to ``target``, forward and, if ``differentiable``,
        backward. If no collective makes this change, return ``math.inf``. ``spec``: whole shape and dtype of the
        tensor."""
        if source == target or (source.kind == target.kind and not source.is_shard):
            return 0.0
        change = RESHARDS.get((source.kind, target.kind))
        if change is None:
            return math.inf
        sharded = target if target.is_shard else source
        strided = sharded.is_shard and math.prod(spec.shape[: sharded.dim]) > 1
        resliced = source.is_shard and target.is_shard and source.dim == target.dim
        key = (spec.nbytes, source.kind, target.kind, differentiable, strided, resliced)
        if key not in self._changes:
            self._changes[key] = self._price_change(spec.nbytes, change, target, differentiable, strided, resliced)
        return self._changes[key]

    def _price_change(
        self, num_bytes: int, change: Reshard, target: Layout, differentiable: bool, strided: bool, resliced: bool
    ) -> float:
        """Return the seconds of ``change``, the collectives that change the layout of a tensor to ``target``.
        ``num_bytes``: bytes of the whole tensor. ``differentiable``: whether the backward changes the layout of the
        tensor's gradient. ``strided``: whether the sharded dim is not the outermost in memory. ``resliced``: whether
        the same dim is sharded before and after, in other sections."""
        seconds = self.device.launch  # also without communication, so that the simpler of equal shardings wins
        for op in (change.forward, change.backward if differentiable and self.train else None):
            if op is not None:
                seconds += exchange_time(op, num_bytes, self.group, self.device, strided)
        if change.forward is None and target.is_shard and strided:  # a rank's part is copied
            seconds += copied_s(num_bytes / self.group.size, self.device) - self.device.launch
        if resliced:  # other sections: the shards are gathered, then cut again
            seconds += exchange_time("all_gather", num_bytes, self.group, self.device, strided)
        return seconds

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        """Return the seconds per microbatch that it costs to keep a parameter or buffer in ``layout``: the optimizer's
        update of a rank's part and, if every rank computes a partial sum of the gradient (``R'``; also ``R`` if
        ``self.complete``), the gradient's all-reduce. Both occur once per step, so their seconds are divided by the
        number of microbatches. The penalty for the bytes that a rank holds (``self.state_price``) is added. ``spec``:
        whole shape and dtype of the parameter or buffer. ``num_ranks``: size of the mesh axis over which the model is
        sharded."""
        local = math.prod(local_shape(layout, spec.shape, num_ranks)) * spec.dtype.itemsize
        if not self.train or not spec.dtype.is_floating_point:
            return local * self.state_price
        seconds = local * self.update_bytes / self.device.memory_bandwidth
        if layout.kind == "R'" or (self.complete and layout.kind == "R"):
            seconds += collective_time("all_reduce", gradient_bytes(spec, self.short_gradients), self.group)
        return seconds / self.num_microbatches + local * self.state_price

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        """Return the seconds that it costs to keep a tensor between blocks (such as layers) in ``layout`` until the
        backward: a rank writes its part to memory once and reads it once. Return ``math.inf`` for a shard if sequence
        parallelism is forbidden. ``spec``: whole shape and dtype of the tensor.
        """
        if layout.is_shard and self.sequence_parallel is False:
            return math.inf
        local = math.prod(local_shape(layout, spec.shape, self.group.size)) * spec.dtype.itemsize
        return 2.0 * local / self.device.memory_bandwidth


class PricedOperators:
    """A cache of operators that were priced. Operators with equal prices, such as those of equal parts of different
    layers, share one entry, which has their compute seconds by the shapes of one rank."""

    def __init__(self) -> None:
        self._keys: dict[fx.Node, Hashable] = {}
        self._repeated: dict[fx.Node, tuple[int, float]] = {}
        self._kinds: dict[Hashable, _Operator] = {}
        self._found: dict[tuple[fx.Node, bool, int, SameObject[DeviceType]], _Operator] = {}

    def find(self, node: fx.Node, train: bool, tp: int, device: DeviceType) -> _Operator:
        """Return the cache entry of all operators that have the same price as ``node``. ``train``: whether their
        seconds include the backward. ``tp``: number of ranks over which attention heads are sharded in addition to the
        mesh axis that is being solved. ``device``: the device type."""
        key = (node, train, tp, SameObject(device))
        operator = self._found.get(key)
        if operator is None:
            repeated = tuple([self._find_repeated_dim(o) for o in tensors_of(node)])
            kind = (self._find_key(node), repeated, *key[1:])
            if kind not in self._kinds:
                self._kinds[kind] = _Operator(node, train, tp, device, repeated)
            operator = self._found[key] = self._kinds[kind]
        return operator

    def _find_key(self, node: fx.Node) -> Hashable:
        """Return a key of ``node``. Operators with equal keys have equal prices. Each attention has a key of its own,
        because its price depends on how the model computes its keys."""
        if node not in self._keys:
            self._keys[node] = node if is_attention(node) else build_call_key(node)
        return self._keys[node]

    def _find_repeated_dim(self, node: fx.Node) -> tuple[int, float]:
        if node not in self._repeated:
            self._repeated[node] = _find_repeated_dim(node)
        return self._repeated[node]


class _Operator:
    """An operator (``node``) with the data that are equal for all of its strategies (layouts of operands and results),
    and a cache of its compute seconds on ``device`` by the shapes of one rank. ``train``: whether the seconds include
    the backward. ``tp``: number of ranks over which attention heads are sharded in addition to the mesh axis that is
    being solved; 1 if there are none. ``repeated``: for each tensor operand, the dim along which it repeats each
    element of a smaller tensor, and the number of repetitions."""

    def __init__(
        self, node: fx.Node, train: bool, tp: int, device: DeviceType, repeated: Sequence[tuple[int, float]]
    ) -> None:
        self.node, self._tp, self._device, self._repeated = node, tp, device, repeated
        self._places = [place for place, o in enumerate(operands_of(node)) if isinstance(o.meta["val"], Tensor)]
        self._operands = [(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in tensors_of(node)]
        self._results = [(tuple(r.shape), r.dtype) for r in results_of(node)]
        self._needs = operand_needs(node)
        self.backward = train and needs_gradient(node)
        factors = factors_of(node)
        self._lower = {} if factors is None else factors.lower
        self._seconds: dict[tuple[tuple[tuple[Shape, float], ...], tuple[Shape, ...]], float] = {}

    @cached_property
    def matmul_flops(self) -> float:
        return matmul_flops(self.node)

    @cached_property
    def made_bytes(self) -> int:
        return made_bytes(self.node)

    def lowering(self, strategy: Strategy) -> Lowering | None:
        """Return the special operators that one rank runs in place of this operator under ``strategy`` (layouts of
        operands and results); ``None`` if each rank runs the operator itself on its shards."""
        return None if strategy.factor is None else self._lower.get(strategy.factor)

    def operands(self, strategy: Strategy, num_ranks: int) -> list[Operand]:
        """Return the operands of one rank, with shapes and dtypes, under ``strategy`` (layouts of operands and
        results). ``num_ranks``: size of the mesh axis over which the model is sharded.

        If ``strategy`` shards the sequence of an attention, key heads that the model copies for groups of query heads
        are counted without the copies, because ranks exchange and read only the originals."""
        found = []
        for place, (shape, dtype), (dim, group) in zip(self._places, self._operands, self._repeated, strict=True):
            layout = strategy.operands[place]
            local = local_shape(layout, shape, num_ranks)
            # consecutive heads of one group are one head of keys, which a view repeats; other parts are copied first
            alike = layout.is_shard and layout.dim == dim and not layout.sections and local[dim] <= group
            found.append(Operand(local, dtype, repeats=local[dim] if alike else 1.0))
        if not strategy.form or self._key_head_reduction == 1:
            return found
        fewer = [
            o._replace(shape=(o.shape[0], o.shape[1] // self._key_head_reduction, *o.shape[2:])) for o in found[1:3]
        ]
        return [found[0], *fewer, *found[3:]]

    @cached_property
    def _key_head_reduction(self) -> int:
        """Return the number of key heads of this attention, divided by the number of key heads that ranks exchange; 1
        if the model makes no copies of key heads. The model may copy key heads for groups of query heads, but ranks
        exchange only as few copies as they need."""
        times = count_head_repetitions(self.node)
        return times // count_exchanged_copies(self._operands[1][0][1], times, self._tp) if times > 1 else 1

    def seconds(self, strategy: Strategy, num_ranks: int) -> float:
        """Return the compute seconds of this operator on one rank, forward and, if the operator has a gradient,
        backward. ``strategy``: the layouts of its operands and results. ``num_ranks``: size of the mesh axis over which
        the model is sharded."""
        operands = self.operands(strategy, num_ranks)
        results = [
            Operand(local_shape(layout, shape, num_ranks), dtype)
            for layout, (shape, dtype) in zip(strategy.results, self._results, strict=True)
        ]
        if strategy.form:
            ways = (False, True) if self.backward else (False,)
            zigzag = strategy.operands[0].zigzag
            return sum(
                kernels_time(form_kernels(self.node, operands, results, num_ranks, zigzag, back), self._device)
                for back in ways
            )
        key = tuple((o.shape, o.repeats) for o in operands), tuple(r.shape for r in results)
        if key not in self._seconds:
            seconds = kernels_time(forward_kernels(self.node, operands, results), self._device)
            if self.backward:
                seconds += kernels_time(backward_kernels(self.node, operands, results, self._needs), self._device)
            self._seconds[key] = seconds
        return self._seconds[key]


def _find_repeated_dim(node: fx.Node) -> tuple[int, float]:
    """Return the dim along which the view ``node`` repeats each element of a smaller tensor, and the number of
    repetitions. An example is keys whose heads are shared by groups of query heads. Return ``(-1, 1.0)`` if there is no
    such dim.
    """
    group, source = repeats_of(node, copied=True), node
    if group == 1:
        return -1, 1.0
    while source.op == "call_function" and operator_name(source) in VIEWS:
        source = source.all_input_nodes[0]
    shape, smaller = node.meta["val"].shape, source.meta["val"].shape
    grown = [dim for dim, (size, of) in enumerate(zip(shape, smaller, strict=False)) if size == of * group]
    return (grown[0], group) if len(shape) == len(smaller) and len(grown) == 1 else (-1, 1.0)


def made_bytes(node: fx.Node) -> int:
    """Return the bytes of the results of the operator ``node``; 0 for a view, which uses no memory of its own."""
    return 0 if is_view(node) else sum(r.nbytes for r in results_of(node) if isinstance(r, Tensor))


# What tp leaves whole of the matrix products and of the weights costs, if that is all of them, this many times the time
# of all products and the start of this many all-reduces, or of this many for each product; and this many all-reduces of
# the results of all products, so that how much is divided does not depend on how fast the links are.
_UNDIVIDED = 10.0
_UNDIVIDED_EXCHANGES = 1000.0
_UNDIVIDED_OF_EACH = 3.0
_UNDIVIDED_RESULTS = 4.0


def divided_costs(model: FoldedModel, axis: str, device: DeviceType, group: Group, precision: str) -> TensorCosts:
    """Return prices (seconds) for sharding ``model`` over the mesh axis ``axis``, with a large penalty for matrix
    products and weights that are not divided over the ranks. On ``cp`` the penalty also applies to all other results,
    because that axis exists to divide their memory.

    ``group``: the group of ranks along the axis, with the links between them. ``device``: the device type.
    ``precision``: number format of most products, such as ``"bf16"``. ``model``: the model as calls of blocks; equal
    layers share one block.
    """
    products = [(often, node) for often, node in _list_weighted_operators(model) if matmul_flops(node)]
    flops = sum(often * matmul_flops(node) for often, node in products)
    results = sum(often * made_bytes(node) for often, node in products)
    made = sum(often * made_bytes(node) for often, node in _list_weighted_operators(model)) if axis == "cp" else 0
    trained = sum(s.spec.nbytes for s in model.states.values() if s.requires_grad)
    starts = max(_UNDIVIDED_EXCHANGES, _UNDIVIDED_OF_EACH * sum(often for often, _ in products))
    moved_s = moved_share("all_reduce", group.size) * results / group.all_reduce_bandwidth
    exchanges = starts * max(group.all_reduce_start, device.launch) + _UNDIVIDED_RESULTS * moved_s
    dear = _UNDIVIDED * 3 * flops / device.peak_of(precision) + exchanges
    return TensorCosts(
        device,
        group,
        undivided=dear / flops if flops else 0.0,
        repeated=exchanges / made if made else 0.0,
        state_price=dear / trained if trained else 0.0,
    )


def _list_weighted_operators(model: FoldedModel) -> Iterator[tuple[int, fx.Node]]:
    """Yield (count, operator) for every operator in the blocks of ``model``. The count is how many calls of the model
    execute the operator's block. ``model``: the model as calls of blocks; equal layers share one block."""
    for name, block in model.blocks.items():
        often = model.num_calls(name)
        yield from ((often, node) for node in block.graph.nodes if node.op == "call_function")
