"""What one call of a block costs one rank, from the block's local graph with its collectives. Once per block type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import kernels_time
from partitioner.cost.operators import Kernel, Operand, add_kernel, backward_kernels, forward_kernels, is_view
from partitioner.cost.saved import expanded, gathered, kept_by
from partitioner.cost.spread import (
    NO_SPREAD,
    Spread,
    context_exchanges,
    expected_load,
    expert_exchanges,
    expert_region,
    hidden,
    in_fp8,
    in_pieces,
    spread_kernel,
)
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import Block
from passes.collectives import COMMUNICATING, ROUTED, collective_name
from passes.factors import needs_gradient, operands_of, results_of
from passes.gradients import differentiable

# The collective that a collective's gradient takes; see the table in passes/collectives.py.
_TRANSPOSED = {
    ("all_gather", "reduce"): "reduce_scatter",
    ("shard_slice", ""): "all_gather",
    ("copy", ""): "all_reduce",
    ("reduce_scatter", ""): "all_gather",
    ("all_reduce", "reduce"): "all_reduce",
    ("all_to_all", ""): "all_to_all",
    ("dispatch", ""): "all_to_all",
    ("combine", ""): "all_to_all",
}
# Collectives whose operand is one rank's part, so that the whole is ``size`` times as large.
_FROM_PART = frozenset(("all_gather", "all_to_all")) | ROUTED


@dataclass(frozen=True)
class CallCost:
    """One microbatch through one call, on one rank. Seconds without (``_s``) and of (``_comm_s``) collectives.

    ``flops``: of matrix products forward, ``backward_flops`` backward. ``saved_bytes``: kept from forward to backward,
    besides the inputs that ``saved_inputs`` marks; ``working_bytes``: needed while it runs, on top. ``input_bytes``
    and ``output_bytes`` by place; ``output_grads`` marks the outputs whose gradient flows back. ``state_bytes``: of all
    states that the call reads. ``selective_bytes`` of what is saved are attention scores, which take ``selective_s`` to
    make again.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: float = 0.0
    saved_inputs: tuple[bool, ...] = ()
    working_bytes: float = 0.0
    input_bytes: tuple[float, ...] = ()
    output_bytes: tuple[float, ...] = ()
    output_grads: tuple[bool, ...] = ()
    state_bytes: float = 0.0
    selective_bytes: float = 0.0
    selective_s: float = 0.0

    def selective(self) -> CallCost:
        """The same call, if attention scores are made again for their backward."""
        return replace(
            self,
            saved_bytes=self.saved_bytes - self.selective_bytes,
            working_bytes=self.working_bytes + self.selective_bytes,
            backward_s=self.backward_s + self.selective_s,
        )

    @property
    def forward_total_s(self) -> float:
        return self.forward_s + self.forward_comm_s

    @property
    def backward_total_s(self) -> float:
        return self.backward_s + self.backward_comm_s


def call_costs(
    block: Block,
    device: DeviceType,
    groups: Mapping[str, Group],
    *,
    train: bool = True,
    spread: Spread = NO_SPREAD,
) -> CallCost:
    """The cost of one call of ``block``, a local graph whose collectives run over ``groups`` by mesh axis.

    An axis that is not in ``groups`` costs nothing. Without ``train`` there is no backward and nothing is saved.
    """
    work = _Work(block, device, groups, train, spread)
    for node in block.graph.nodes:
        if node.op == "call_function":
            work.add(node)
    return work.cost()


class _Work:
    """Adds up a block's operators."""

    def __init__(
        self, block: Block, device: DeviceType, groups: Mapping[str, Group], train: bool, spread: Spread
    ) -> None:
        self.block, self.device, self.groups, self.train, self.spread = block, device, groups, train, spread
        self.states = set(block.states)
        self.region = expert_region(block)
        self.seconds, self.comm, self.flops, self.issued = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0, 0]
        self.again = 0.0  # seconds of what selective recomputation runs anew
        self.expanded = expanded(block)
        self.gathered = gathered(block) if train and spread.software.regather else frozenset()
        self.pieces, self.products = [0.0, 0.0], [0.0, 0.0]  # seconds of what runs behind products, and of those

    def add(self, node: fx.Node) -> None:
        operands, results = node_operands(node, self.states)
        kernels = forward_kernels(node, operands, results)
        kernels = in_fp8(kernels, operands, results, False) if self.spread.fp8 else kernels
        seconds = self._run(0, node, kernels, operands)
        self.again += seconds if node in self.expanded else 0.0
        ring = context_exchanges(node, self.spread)
        self.comm[0] += hidden(seconds, ring[0], self.device.overlap_slowdown)
        self._send(0, node)
        name = collective_name(node.target)
        self.issued[0] += name != "copy"  # which does nothing on its way forward
        if self.train and needs_gradient(node):
            kernels = [*backward_kernels(node, operands, results, operand_needs(node)), *fan_out(node)]
            kernels = in_fp8(kernels, operands, results, True) if self.spread.fp8 else kernels
            seconds = self._run(1, node, kernels, operands)
            self.comm[1] += hidden(seconds, ring[1], self.device.overlap_slowdown)
            self._send(1, node)
            self.issued[1] += max(1, len(kernels)) if name is None else len(kernels) + (_transposed(node) is not None)

    def _send(self, way: int, node: fx.Node) -> None:
        """A collective of the graph; a gather that is not kept is done again, behind the products of the backward."""
        share = self._share(node)
        seconds = _collective(node, self.groups, self.device, backward=way == 1) / share
        apart = self.spread.software.overlap_tensor and collective_name(node.target) in ("all_gather", "reduce_scatter")
        (self.pieces if apart else self.comm)[way] += seconds
        if way == 1 and node in self.gathered:
            self.pieces[1] += _collective(node, self.groups, self.device, backward=False) / share

    def _share(self, node: fx.Node) -> int:
        """Collectives on what grows with the batch carry a ``cp``-th of it."""
        return 1 if any(_is_state(o, self.states) for o in node.all_input_nodes) else self.spread.cp

    def _run(self, way: int, node: fx.Node, kernels: list[Kernel], operands: list[Operand]) -> float:
        spread = self.spread
        expert = node in self.region.products
        if spread is not NO_SPREAD:
            widest = min((min(o.shape[1:]) for o in operands if o.state and len(o.shape) == 3), default=math.inf)
            rows = operands[0].shape[0] if expert and len(operands[0].shape) == 2 else 0  # else all rows go to all
            load = expected_load(rows * spread.ep / spread.cp, spread.ep) if expert else 1.0
            load *= self._local_experts(operands) if expert else 1.0
            kernels = [spread_kernel(k, spread, expert, widest, load) for k in kernels]
        seconds = kernels_time(kernels, self.device)
        self.seconds[way] += seconds
        self.flops[way] += sum(k.flops for k in kernels)
        self.products[way] += seconds if any(k.flops for k in kernels) else 0.0
        return seconds

    def _local_experts(self, operands: list[Operand]) -> float:
        """The share of rows whose expert is in the graph: ``tp`` may have divided the experts."""
        held = next((o.shape[0] for o in operands if o.state and len(o.shape) == 3), 0)
        return held / self.spread.num_experts if 0 < held < self.spread.num_experts else 1.0

    def cost(self) -> CallCost:
        block, spread, train = self.block, self.spread, self.train
        seconds, comm = self.seconds, self.comm
        if train:
            for n in block.placeholders:
                kernels = [
                    spread_kernel(k, spread, n.name in self.region.states) for k in _accumulation(n, self.states)
                ]
                seconds[1] += kernels_time(kernels, self.device)
                self.issued[1] += len(kernels)
        for way in range(1 + train):
            comm[way] += in_pieces(self.products[way], self.pieces[way], spread.tp, self.device.overlap_slowdown)
        exchanged = expert_exchanges(self.region, spread)
        comm[0] += exchanged
        comm[1] += exchanged if train else 0.0
        for way in range(1 + train):
            issuing = self.issued[way] * self.device.dispatch
            seconds[way] += max(0.0, issuing - seconds[way] - comm[way])
        gathers = self._gathers()
        for way in range(1 + train):
            comm[way] += hidden(seconds[way], gathers[way], self.device.overlap_slowdown, spread.overlap)
        kept = kept_by(block, train, self.gathered)
        slim = kept_by(block, train, self.expanded | self.gathered) if self.expanded else kept
        placeholders = {n.name: n for n in block.placeholders}
        part = 1 / spread.cp
        states = {n: placeholders[n].meta["val"].nbytes * self._part_of(n) for n in block.states}
        return CallCost(
            forward_s=seconds[0],
            backward_s=seconds[1],
            forward_comm_s=comm[0],
            backward_comm_s=comm[1],
            flops=self.flops[0],
            backward_flops=self.flops[1],
            saved_bytes=kept.inside * part,
            saved_inputs=kept.inputs,
            working_bytes=kept.working * part + self._gathered_bytes(list(states.values())),
            input_bytes=tuple(placeholders[name].meta["val"].nbytes * part for name in block.inputs),
            output_bytes=tuple(n.meta["val"].nbytes * part for n in block.outputs),
            output_grads=tuple(train and needs_gradient(n) for n in block.outputs),
            state_bytes=sum(states.values()),
            selective_bytes=(kept.inside - slim.inside) * part,
            selective_s=self.again,
        )

    def _part_of(self, state: str) -> float:
        return self.spread.of_experts if state in self.region.states else 1.0

    def _gathered_bytes(self, sizes: list[float]) -> float:
        """Bytes of weights that are gathered, and of their gradients, at a time."""
        if self.spread.shards.size == 1:
            return 0.0
        return 2 * (max(sizes, default=0.0) if self.spread.software.by_parameter else sum(sizes))

    def _gathers(self) -> tuple[float, float]:
        """Seconds of gathering this call's weights forward, and of gathering them and scattering gradients backward."""
        spread = self.spread
        if spread.shards.size == 1:
            return 0.0, 0.0
        placeholders = {n.name: n for n in self.block.placeholders}
        sizes: dict[tuple[bool, str], list[float]] = {}  # of experts' weights, and of the others: all, and trained
        for name in self.block.states:
            nbytes, expert = placeholders[name].meta["val"].nbytes * self._part_of(name), name in self.region.states
            key = expert, name if spread.software.by_parameter else ""
            known = sizes.setdefault(key, [0.0, 0.0])
            known[0] += nbytes
            known[1] += nbytes if needs_gradient(placeholders[name]) else 0.0
        ahead = back = 0.0
        for (expert, _), (size, grads) in sizes.items():
            group = spread.expert_shards if expert else spread.shards
            ahead += collective_time("all_gather", size, group) if size else 0.0
            back += collective_time("reduce_scatter", grads, group) if grads else 0.0
        return ahead, ahead + back


def node_operands(node: fx.Node, states: set[str]) -> tuple[list[Operand], list[Operand]]:
    """The tensors that ``node`` reads and makes."""
    read = [(o.meta["val"], _is_state(o, states)) for o in tensors_of(node)]
    operands = [Operand(tuple(value.shape), value.dtype, state) for value, state in read]
    results = [Operand(tuple(r.shape), r.dtype) for r in results_of(node) if isinstance(r, Tensor)]
    return operands, results


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The operands of ``node`` that are single tensors."""
    return [o for o in operands_of(node) if isinstance(o.meta["val"], Tensor)]


def operand_needs(node: fx.Node) -> list[bool]:
    """Which of :func:`tensors_of` need a gradient."""
    return [needs_gradient(o) for o in tensors_of(node)]


def fan_out(node: fx.Node) -> list[Kernel]:
    """The additions that bring together the gradients of a value with several readers."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not differentiable(value):
        return []
    readers = sum(needs_gradient(user) for user in node.users if user.op == "call_function")
    return [add_kernel(Operand(tuple(value.shape), value.dtype))] * max(0, readers - 1)


def _is_state(node: fx.Node, states: set[str]) -> bool:
    """A state, or a view of one."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.name in states


def _accumulation(placeholder: fx.Node, states: set[str]) -> list[Kernel]:
    """A state's gradient is added to that of the microbatches before."""
    if placeholder.name not in states or not needs_gradient(placeholder):
        return []
    value = placeholder.meta["val"]
    return [add_kernel(Operand(tuple(value.shape), value.dtype, state=True))]


def exchange_time(op: str, whole_bytes: float, group: Group, device: DeviceType, strided: bool) -> float:
    """A collective, and the copy that joins or parts a dim that is not outermost in memory."""
    seconds = collective_time(op, whole_bytes, group)
    if strided and op not in ("all_reduce", "all_reduce_max"):
        seconds += device.launch + 2 * whole_bytes / device.memory_bandwidth
    return seconds


def _collective(node: fx.Node, groups: Mapping[str, Group], device: DeviceType, backward: bool) -> float:
    name = collective_name(node.target)
    if name is None:
        return 0.0
    axis = next(a for a in node.args if isinstance(a, str))
    group = groups.get(axis)
    if group is None or group.size == 1:
        return 0.0
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return 0.0
    operand: Tensor = source.meta["val"]
    whole = operand.nbytes * (group.size if name in _FROM_PART else 1)
    dim = node.args[1] if isinstance(node.args[1], int) else 0
    strided = any(size != 1 for size in operand.shape[:dim])
    if not backward:
        op = "all_to_all" if name in ROUTED else name
        return exchange_time(op, whole, group, device, strided) if name in COMMUNICATING else 0.0
    back = _transposed(node)
    return exchange_time(back, whole, group, device, strided) if back else 0.0


def _transposed(node: fx.Node) -> str | None:
    """The collective of a collective's gradient; ``None`` where that is passed on as it is."""
    name = collective_name(node.target) or ""
    return _TRANSPOSED.get((name, str(node.args[-1]) if name in ("all_gather", "all_reduce") else ""))
