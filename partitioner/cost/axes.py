"""The costs that decide a sharding over ranks that communicate, in seconds per microbatch.

They are those of ``solve/sharding.py``'s protocol: of operators under a strategy, of reshards, of states and of what
passes between calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor, fx

from partitioner.cost.asked import operand_needs
from partitioner.cost.calls import exchange_time
from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import kernels_time, memory_rate
from partitioner.cost.context import exchange_seconds
from partitioner.cost.operators import Operand, backward_kernels, form_kernels, forward_kernels, is_view
from partitioner.cost.spread import hidden
from partitioner.cost.states import gradient_bytes
from partitioner.solve.share import matmul_flops
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import TensorSpec
from passes.factors import Strategy, factors_of, needs_gradient, operands_of, results_of
from passes.layouts import Layout, local_shape
from passes.rules import Lowering
from passes.rules.attention import band
from passes.shard import RESHARDS
from passes.tiles import Band


@dataclass
class TensorCosts:
    """Seconds per microbatch of what is sharded over ``group``.

    ``num_microbatches``: what happens once per step is divided by it. ``sequence_parallel``: ``False`` forbids values
    between calls that are sharded. ``update_bytes``: traffic of the optimizer per byte of parameter; a state that is
    held whole is updated whole by every rank. ``state_price``: further seconds per byte of state that a rank holds, to
    be raised until the states fit. ``undivided``: further seconds for each FLOP of a matrix product that every rank
    repeats, ``repeated`` for each byte that every rank makes.
    ``short_gradients``: those of parameters are of their type, rather than in float32.
    """

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
    _nodes: dict[tuple[fx.Node, Strategy], float] = field(default_factory=dict, repr=False)

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        """One call of an operator, forward and backward, with the collectives of its special lowering."""
        key = (node, strategy)
        if key not in self._nodes:
            lowering = _lowering(node, strategy)
            seconds = operator_time(node, strategy, num_ranks, self.device, self.train)
            if lowering is not None and lowering.divides_work:
                seconds = self._divided(node, strategy, num_ranks, seconds)
            if strategy.factor is None and self.undivided and num_ranks > 1:
                seconds += self.undivided * matmul_flops(node)
            if strategy.factor is None and self.repeated and num_ranks > 1:
                seconds += self.repeated * made_bytes(node)
            seconds += self._of_form(node, strategy, seconds, num_ranks) if strategy.form else 0.0
            self._nodes[key] = seconds + self._sent(node, lowering)
        return self._nodes[key]

    def _divided(self, node: fx.Node, strategy: Strategy, num_ranks: int, seconds: float) -> float:
        """Seconds where each rank works on its own rows only; the operands that are sharded are read whole."""
        read = sum(
            o.meta["val"].nbytes / num_ranks
            for o, layout in zip(operands_of(node), strategy.operands, strict=True)
            if layout.is_shard
        )
        passes = 3 if self.train and needs_gradient(node) else 1
        rest: float = (1 - 1 / num_ranks) * passes * read / memory_rate("matmul", self.device)
        return seconds / num_ranks + rest

    def _of_form(self, node: fx.Node, strategy: Strategy, seconds: float, num_ranks: int) -> float:
        """Seconds that what an attention sends adds to its computation."""
        query, key, value = local_operands(node, strategy, num_ranks)[:3]
        zigzag, seen = strategy.operands[0].zigzag, band(node) or Band()
        sent = exchange_seconds(query, key, value, seen, strategy.form, zigzag, self.group)
        passes = 2 if self.train and needs_gradient(node) else 1
        beside = strategy.form == "ring"
        return sum(hidden(seconds / passes, s, self.device.overlap_slowdown, beside) for s in sent[:passes])

    def _sent(self, node: fx.Node, lowering: Lowering | None) -> float:
        if lowering is None:
            return 0.0
        itemsize = results_of(node)[0].dtype.itemsize
        return sum(collective_time(name, numel * itemsize, self.group) for name, numel in lowering.collectives)

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        """One change of layout, forward and, where ``differentiable``, backward; ``math.inf`` where there is none."""
        if source == target or (source.kind == target.kind and not source.is_shard):
            return 0.0
        change = RESHARDS.get((source.kind, target.kind))
        if change is None:
            return math.inf
        sharded = target if target.is_shard else source
        strided = sharded.is_shard and math.prod(spec.shape[: sharded.dim]) > 1
        seconds = self.device.launch  # also for what is free of communication: the simpler of equals wins
        for op in (change.forward, change.backward if differentiable and self.train else None):
            if op is not None:
                seconds += exchange_time(op, spec.nbytes, self.group, self.device, strided)
        if source.is_shard and target.is_shard and source.dim == target.dim:  # other sections: gathered, then cut
            seconds += exchange_time("all_gather", spec.nbytes, self.group, self.device, strided)
        return seconds

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        """The update of a rank's part, and under ``R'`` the reduction of the gradient; both once per step."""
        local = math.prod(local_shape(layout, spec.shape, num_ranks)) * spec.dtype.itemsize
        if not self.train or not spec.dtype.is_floating_point:
            return local * self.state_price
        seconds = local * self.update_bytes / self.device.memory_bandwidth
        if layout.kind == "R'":
            seconds += collective_time("all_reduce", gradient_bytes(spec, self.short_gradients), self.group)
        return seconds / self.num_microbatches + local * self.state_price

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        """A value that is kept until backward: written once and read once, by every rank that holds it."""
        if layout.is_shard and self.sequence_parallel is False:
            return math.inf
        local = math.prod(local_shape(layout, spec.shape, self.group.size)) * spec.dtype.itemsize
        return 2.0 * local / self.device.memory_bandwidth


def _lowering(node: fx.Node, strategy: Strategy) -> Lowering | None:
    """The special lowering by which ``strategy`` runs, if any."""
    factors = factors_of(node) if strategy.factor is not None else None
    return None if factors is None or strategy.factor is None else factors.lower.get(strategy.factor)


def made_bytes(node: fx.Node) -> int:
    """Bytes of a node's results; a view makes none."""
    return 0 if is_view(node) else sum(r.nbytes for r in results_of(node) if isinstance(r, Tensor))


def local_operands(node: fx.Node, strategy: Strategy, num_ranks: int) -> list[Operand]:
    """One rank's operands under ``strategy``."""
    return [
        Operand(local_shape(layout, tuple(o.meta["val"].shape), num_ranks), o.meta["val"].dtype)
        for o, layout in zip(operands_of(node), strategy.operands, strict=True)
        if isinstance(o.meta["val"], Tensor)
    ]


def operator_time(node: fx.Node, strategy: Strategy, num_ranks: int, device: DeviceType, train: bool) -> float:
    """Seconds of one operator's local form, forward and, where it has a gradient, backward."""
    operands = local_operands(node, strategy, num_ranks)
    results = [
        Operand(local_shape(layout, tuple(r.shape), num_ranks), r.dtype)
        for r, layout in zip(results_of(node), strategy.results, strict=True)
    ]
    if strategy.form:
        ways = (False, True) if train and needs_gradient(node) else (False,)
        zigzag = strategy.operands[0].zigzag
        return sum(
            kernels_time(form_kernels(node, operands, results, num_ranks, zigzag, back), device) for back in ways
        )
    seconds = kernels_time(forward_kernels(node, operands, results), device)
    if train and needs_gradient(node):
        seconds += kernels_time(backward_kernels(node, operands, results, operand_needs(node)), device)
    return seconds
