"""Cost of offloading to host memory and disk: transfer time, and bytes on the device and in the host.

Transfers run beside computation, independently in each direction. A transfer costs the time that computation does not
hide. The optimizer's step runs on the host's processors (Ren et al. 2021, ZeRO-Offload) and is bound by the host's
memory bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.states import StateCost
from partitioner.emit.buckets import bucket_limit
from partitioner.errors import CapacityError
from partitioner.passes.ir.hashing import SameObject
from partitioner.solve.stages.problem import Pace, StageCall
from partitioner.topology.hosts import HostShare
from partitioner.topology.topology import Topology
from partitioner.units import bytes_text

_AT_ONCE = 3  # calls whose activations are on the device: one runs, one is sent away, one is fetched


def add_offload_transfers(
    calls: tuple[StageCall, ...],
    paces: Sequence[Pace],
    hosts: Sequence[HostShare],
    offload: Sequence[str],
    states: Mapping[str, StateCost],
    train: bool,
) -> tuple[tuple[StageCall, ...], tuple[Pace, ...]]:
    """Return ``calls`` and ``paces`` with the time and bytes of transfers to and from host memory added. ``calls``:
    block calls, such as layers. ``paces``: for each stage, the costs of these calls on its devices.

    ``hosts``: for each stage, the share of a host's memory and bandwidth that one rank has. ``offload``: the kinds of
    data in host memory, such as ``"activations"``. ``states``: cost of each parameter and buffer by name. ``train``:
    whether there is a backward.
    """
    made: dict[object, Pace] = {}
    for pace, host in zip(paces, hosts, strict=True):
        if (host, SameObject(pace)) not in made:
            made[host, SameObject(pace)] = replace(
                pace, costs=tuple(_offload_call_costs(calls, pace.costs, host, offload, states, train))
            )
    first = _offload_call_costs(calls, [call.cost for call in calls], hosts[0], offload, states, train)
    moved = tuple(replace(call, cost=cost) for call, cost in zip(calls, first, strict=True))
    return moved, tuple(made[host, SameObject(pace)] for pace, host in zip(paces, hosts, strict=True))


def _offload_call_costs(
    calls: Sequence[StageCall],
    costs: Sequence[CallCost],
    host: HostShare,
    offload: Sequence[str],
    states: Mapping[str, StateCost],
    train: bool,
) -> list[CallCost]:
    """Return ``costs``, one for each of the block calls (such as layers) ``calls``, with the transfers to and from host
    memory added. ``host``: the share of a host that a rank has. ``offload``: the kinds of data in host memory.
    ``states``: cost of each parameter and buffer by name. ``train``: whether there is a backward."""
    reads = Counter(name for call in calls for name in set(call.inputs))
    made: dict[tuple[object, ...], CallCost] = {}  # equal calls share one object
    result: list[CallCost] = []
    sent = 0.0, 0.0
    for call, cost in zip(calls, costs, strict=True):
        once = tuple(reads[name] == 1 for name in call.inputs)
        held = [states[name] for name in call.states if name in states and states[name].passing]
        passing = sum(s.parameter / (s.replicas if s.stage == 3 else 1) for s in held)
        whole = sum(s.parameter for s in held if s.stage < 3)  # gathered parameters are counted with the gathers
        key = SameObject(cost), once, passing, whole, sent
        if key not in made:
            made[key] = _add_call_transfers(
                cost, host, once if train and "activations" in offload else None, passing, whole, sent
            )
        result.append(made[key])
        slim = made[key].slim or made[key]
        sent = made[key].host_bytes, slim.host_bytes
    return result


def _add_call_transfers(
    cost: CallCost,
    host: HostShare,
    once: tuple[bool, ...] | None,
    passing: float,
    whole: float,
    sent: tuple[float, float],
) -> CallCost:
    """Return ``cost``, the cost of a block call (such as a layer), with its transfers to and from host memory added.
    While this call runs forward, the activations of the previous call are sent to the host; while it runs backward,
    they are fetched.

    ``host``: the share of a host that a rank has. ``passing``: bytes of parameters that are copied from the host for
    each call. ``whole``: bytes that these parameters occupy on the device while the call runs. ``once``: for each input
    of the call, whether no other call reads it; such an input is offloaded like the saved activations if backward needs
    it. If ``once`` is ``None``, no activations are offloaded. ``sent``: bytes of offloaded activations of the previous
    call, without and with selective recomputation.
    """
    if once is None:
        kept, inputs = 0.0, cost.saved_inputs
    else:
        moves = [saved and alone for saved, alone in zip(cost.saved_inputs, once, strict=True)]
        kept = cost.saved_bytes + sum(b for b, m in zip(cost.input_bytes, moves, strict=True) if m)
        inputs = tuple(s and not m for s, m in zip(cost.saved_inputs, moves, strict=True))
    ahead = max(host.time(sent[0]), host.time(passing)) - cost.forward_total_s
    back = host.time(sent[0] + passing) - cost.backward_total_s
    slim = None
    if cost.selective_bytes:
        slim = _add_call_transfers(cost.selective(), host, once, passing, whole, (sent[1], sent[1]))
    return replace(
        cost,
        forward_s=cost.forward_s + max(0.0, ahead),
        backward_s=cost.backward_s + max(0.0, back),
        saved_bytes=0.0 if once is not None else cost.saved_bytes,
        saved_inputs=inputs,
        working_bytes=cost.working_bytes + _AT_ONCE * kept + 2 * whole,
        host_bytes=kept,
        slim=slim,
    )


def update_seconds(costs: Sequence[StateCost], host: HostShare) -> float:
    """Return the seconds of the optimizer's step on the host, over the parameters in ``costs`` whose optimizer states
    are in host memory. If the states are on disk, reading and writing them overlaps with the step, and the longer of
    both counts. ``host``: the share of a host's memory and bandwidth that a rank has."""
    stepped = sum(cost.update for cost in costs if cost.hosted) / host.update_bandwidth
    return max(stepped, disk_seconds(costs, host))


def disk_seconds(costs: Sequence[StateCost], host: HostShare) -> float:
    """Return the seconds of reading and writing the optimizer states in ``costs`` that are on disk, for one optimizer
    step. ``host``: the share of a host that a rank has."""
    return sum(cost.disk_traffic for cost in costs) / host.disk_bandwidth


def exchanged_seconds(costs: Sequence[StateCost], host: HostShare, forward_s: float, backward_s: float) -> float:
    """Return the seconds that the transfers of gradients to the host and of updated parameters back add to a step.
    Transfers that computation hides do not count: the backward of one microbatch hides the transfer of all gradients
    but the last bucket (gradients that are sent together), and the forward hides the transfer of parameters.

    ``costs``: the costs of the parameters of a rank. ``host``: the share of a host's memory and bandwidth that the rank
    has. ``forward_s``, ``backward_s``: seconds of the forward and of the backward of one microbatch.
    """
    hosted = [cost for cost in costs if cost.hosted and cost.gradient]
    num_bytes = sum(c.gradient / (c.replicas if c.stage else 1) for c in hosted)
    last = host.time(min(num_bytes, float(bucket_limit(max((c.replicas for c in hosted), default=1)))))
    gradients = last + max(0.0, host.time(num_bytes) - last - backward_s)
    parameters = host.time(sum(c.parameter / (c.replicas if c.stage else 1) for c in hosted if not c.passing))
    return gradients + max(0.0, parameters - forward_s)


def check_hosts(topology: Topology, devices: Sequence[int], per_rank: Sequence[float]) -> None:
    """Raise :class:`CapacityError` if the memory of a host is too small for the offloaded data of its ranks.
    ``devices``: for each rank, the index of its device in ``topology``. ``per_rank``: bytes that each rank keeps in
    host memory.
    """
    for node, sizes in _on_nodes(topology, devices, per_rank).items():
        host = topology.host(node)
        if host is not None:
            _check_room(f"the host of node {node} has {bytes_text(host.memory)} of memory", host.memory, sizes)


def check_disks(topology: Topology, devices: Sequence[int], per_rank: Sequence[float]) -> None:
    """Raise :class:`CapacityError` if the disk of a node is too small for the offloaded data of its ranks. ``devices``:
    for each rank, the index of its device in ``topology``. ``per_rank``: bytes that each rank keeps on disk.
    """
    for node, sizes in _on_nodes(topology, devices, per_rank).items():
        disk = getattr(topology.host(node), "disk", 0)
        _check_room(f"the disk of node {node} has {bytes_text(disk)}", disk, sizes)


def _on_nodes(topology: Topology, devices: Sequence[int], per_rank: Sequence[float]) -> dict[int, list[float]]:
    """Group ``per_rank``, a number of bytes for each rank, by node. Return index of the node -> the numbers of bytes of
    its ranks. ``devices``: for each rank, the index of its device in ``topology``."""
    sizes: dict[int, list[float]] = {}
    for device, size in zip(devices, per_rank, strict=True):
        sizes.setdefault(topology.devices[device].node, []).append(size)
    return sizes


def _check_room(has: str, room: float, sizes: Sequence[float]) -> None:
    """Raise :class:`CapacityError` if the sum of ``sizes`` exceeds ``room``. ``sizes``: bytes of offloaded data of each
    rank of a host. ``room``: bytes of the host's memory or disk. ``has``: start of the error message, which names the
    memory or disk and its size."""
    if (size := sum(sizes)) > room:
        raise CapacityError(
            f"{has}, but {bytes_text(size)} are offloaded to it: {bytes_text(size - room)} too much",
            missing_bytes=math.ceil((size - room) / len(sizes)),
        )
