"""What one call of a block costs one rank, from the block's local graph with its collectives. Once per block type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import kernels_time
from partitioner.cost.operators import Kernel, Operand, add_kernel, backward_kernels, forward_kernels, is_view
from partitioner.cost.saved import kept_by
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import Block
from passes.collectives import COMMUNICATING, collective_name
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
}
# Collectives whose operand is one rank's part, so that the whole is ``size`` times as large.
_FROM_PART = frozenset(("all_gather", "all_to_all"))


@dataclass(frozen=True)
class CallCost:
    """One microbatch through one call, on one rank. Seconds without (``_s``) and of (``_comm_s``) collectives.

    ``flops``: of matrix products forward, ``backward_flops`` backward. ``saved_bytes``: kept from forward to backward,
    besides the inputs that ``saved_inputs`` marks; ``working_bytes``: needed while it runs, on top. ``input_bytes``
    and ``output_bytes`` by place; ``output_grads`` marks the outputs whose gradient flows back. ``state_bytes``: of all
    states that the call reads.
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

    @property
    def forward_total_s(self) -> float:
        return self.forward_s + self.forward_comm_s

    @property
    def backward_total_s(self) -> float:
        return self.backward_s + self.backward_comm_s


def call_costs(block: Block, device: DeviceType, groups: Mapping[str, Group], *, train: bool = True) -> CallCost:
    """The cost of one call of ``block``, a local graph whose collectives run over ``groups`` by mesh axis.

    An axis that is not in ``groups`` costs nothing. Without ``train`` there is no backward and nothing is saved.
    """
    states = set(block.states)
    seconds = [0.0, 0.0]
    comm = [0.0, 0.0]
    flops = [0.0, 0.0]
    for node in block.graph.nodes:
        if node.op != "call_function":
            continue
        operands, results = node_operands(node, states)
        forward = forward_kernels(node, operands, results)
        seconds[0] += kernels_time(forward, device)
        flops[0] += sum(k.flops for k in forward)
        comm[0] += _collective(node, groups, device, backward=False)
        if train and needs_gradient(node):
            backward = backward_kernels(node, operands, results, operand_needs(node))
            flops[1] += sum(k.flops for k in backward)
            seconds[1] += kernels_time([*backward, *fan_out(node)], device)
            comm[1] += _collective(node, groups, device, backward=True)
    if train:
        seconds[1] += sum(kernels_time(_accumulation(n, states), device) for n in block.placeholders)
    kept = kept_by(block, train)
    placeholders = {n.name: n for n in block.placeholders}
    return CallCost(
        forward_s=seconds[0],
        backward_s=seconds[1],
        forward_comm_s=comm[0],
        backward_comm_s=comm[1],
        flops=flops[0],
        backward_flops=flops[1],
        saved_bytes=kept.inside,
        saved_inputs=kept.inputs,
        working_bytes=kept.working,
        input_bytes=tuple(placeholders[name].meta["val"].nbytes for name in block.inputs),
        output_bytes=tuple(n.meta["val"].nbytes for n in block.outputs),
        output_grads=tuple(train and needs_gradient(n) for n in block.outputs),
        state_bytes=sum(placeholders[name].meta["val"].nbytes for name in block.states),
    )


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
    return [add_kernel(Operand(tuple(value.shape), value.dtype))]


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
        return exchange_time(name, whole, group, device, strided) if name in COMMUNICATING else 0.0
    grad = str(node.args[-1]) if name in ("all_gather", "all_reduce") else ""
    back = _TRANSPOSED.get((name, grad))
    return exchange_time(back, whole, group, device, strided) if back else 0.0
