"""Costs of calls of a block, such as a layer, on each kind of rank. A kind is a device type, a speed factor and the
communication groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from partitioner.cost.call.call_cost import Again, CallCost, CallWork, find_selectively_recomputed
from partitioner.cost.call.expert_parallel import NO_SPREAD, Spread
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.passes.ir.collectives import collective_name
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Block
from partitioner.passes.shard.piece_counts import PieceCounts
from partitioner.topology.hardware import DeviceType
from partitioner.topology.topology import Topology

Costs = dict[str, CallCost]  # cost of one call by block name


@dataclass
class CallCostCache:
    """Cache of the costs of one call of each block, such as a layer, on each kind of rank (device type, speed and
    groups).

    ``blocks``: block name -> its graph for one rank. ``topology``: the cluster. ``train``: whether calls have a
    backward. ``again``: function that selects the nodes which selective recomputation runs a second time. ``works``:
    for each block object, the object that computes its costs; several caches may share this dict. ``pieces``: block
    name -> the numbers of pieces into which its collectives are cut to overlap with matrix products; ``None``: the
    numbers that the training framework uses according to its execution profile.
    """

    blocks: Mapping[str, Block]
    topology: Topology
    train: bool = True
    again: Again = find_selectively_recomputed
    works: dict[SameObject[Block], CallWork] = field(default_factory=dict)
    pieces: Mapping[str, PieceCounts] | None = None
    _devices: dict[tuple[str, float], DeviceType] = field(default_factory=dict)
    _of_seat: dict[tuple[RankProfile, Spread], Costs] = field(default_factory=dict)
    _of_stage: dict[tuple[tuple[RankProfile, ...], Spread], Costs] = field(default_factory=dict)

    @cached_property
    def _communication_axes(self) -> frozenset[str]:
        """Return the mesh axes over which some block (such as a layer) has a collective."""
        nodes = [
            n for block in self.blocks.values() for n in block.graph.nodes if collective_name(n.target) is not None
        ]
        return frozenset(a for node in nodes for a in node.args if isinstance(a, str))

    @cached_property
    def _call_works(self) -> dict[str, CallWork]:
        """Return block name -> the object that computes the costs of calls of this block (such as a layer) on any
        device.
        """
        for name, block in self.blocks.items():
            key = SameObject(block)
            if key not in self.works:
                pieces = None if self.pieces is None else self.pieces[name]
                self.works[key] = CallWork(block, self.train, self.again, pieces)
        return {name: self.works[SameObject(block)] for name, block in self.blocks.items()}

    def _get_paced_device(self, kind: str, speed: float) -> DeviceType:
        """Return the device type ``kind`` with its rates scaled by ``speed``. Equal arguments return the same object,
        because kernel times are cached by identity of the device type."""
        if (kind, speed) not in self._devices:
            self._devices[kind, speed] = self.topology.paced_type(kind, speed)
        return self._devices[kind, speed]

    def at(self, seat: RankProfile, spread: Spread = NO_SPREAD) -> Costs:
        """Return the costs of one call of each block (such as a layer), by block name, on a rank with the profile
        ``seat`` (device type, speed, groups). ``spread``: how expert parallelism and ZeRO-3 distribute the calls over
        ranks.
        """
        seat = replace(
            seat, groups=tuple((axis, group) for axis, group in seat.groups if axis in self._communication_axes)
        )
        if (seat, spread) not in self._of_seat:
            device = self._get_paced_device(seat.kind, seat.speed)
            groups, plain = dict(seat.groups), spread.without_experts
            others = self.at(seat, plain) if plain != spread else {}
            self._of_seat[seat, spread] = {
                name: work.cost(device, groups, spread) if work.has_experts or name not in others else others[name]
                for name, work in self._call_works.items()
            }
        return self._of_seat[seat, spread]

    def of_stage(self, seats: tuple[RankProfile, ...], spread: Spread = NO_SPREAD) -> Costs:
        """Return the costs of one call of each block (such as a layer), by block name, on a stage whose ranks have the
        profiles ``seats`` (device type, speed, groups). The slowest rank counts, since ranks wait for each other in
        collectives. ``spread``: how expert parallelism and ZeRO-3 distribute the calls over ranks. Equal arguments
        return the same dict object."""
        key = seats, spread
        if key not in self._of_stage:
            costs = [self.at(seat, spread) for seat in seats]
            self._of_stage[key] = combine_slowest_costs(costs)
        return self._of_stage[key]

    def by_stage(self, machine: PlacedMesh) -> tuple[Costs, ...]:
        """Return, for each pipeline stage of ``machine`` (a topology with the mesh laid over it), block name -> cost of
        one call of the block (such as a layer). The slowest rank of a stage counts.
        """
        spread = machine.spread
        different = {id(seats): seats for seats in machine.seats}
        found = {key: self.of_stage(seats, spread) for key, seats in different.items()}
        return tuple(found[id(seats)] for seats in machine.seats)

    def by_pipeline(self, machine: PlacedMesh) -> tuple[Costs, ...]:
        """Return one dict, block name -> cost of one call of the block (such as a layer), for each stage of each
        distinct ``dp`` replica of ``machine`` (a topology with the mesh laid over it). The dicts are in one flat tuple:
        replica after replica, and in each the stages in order. Ranks of different replicas do not wait for each other.
        """
        spread, stages = machine.spread, [seats for replica in machine.distinct_pipelines for seats in replica]
        found = {key: self.of_stage(seats, spread) for key, seats in {id(seats): seats for seats in stages}.items()}
        return tuple(found[id(seats)] for seats in stages)


def combine_fastest_costs(costs: Sequence[Costs]) -> Costs:
    """Return a lower bound on the cost of one call of each block (such as a layer), by block name, on any kind of rank:
    the least seconds in any of ``costs``. Each of ``costs`` maps a block name to the cost of a call on one kind of
    rank. In the result, the seconds of collectives are included in those of computation, and the seconds that full
    recomputation adds are also the least of any kind."""
    return {
        name: _combine_hidden(
            replace(
                cost,
                forward_s=min(c.forward_total_s for c in each),
                forward_only_s=min(c.forward_total_s for c in each) - min(c.recompute_s for c in each),
                backward_s=min(c.backward_total_s for c in each),
                weights_s=_least_weights(each),
                forward_comm_s=0.0,
                backward_comm_s=0.0,
                selective_s=min(c.selective_s for c in each),
            ),
            each,
            min,
        )
        for name, cost in costs[0].items()
        for each in [[of[name].hide(0.0, 0.0) for of in costs]]
    }


def combine_slowest_costs(costs: Sequence[Costs]) -> Costs:
    """Return the cost of one call of each block (such as a layer), by block name, on a stage whose ranks wait for each
    other in each collective. Each field of seconds is the largest in ``costs``, and so are the seconds that full
    recomputation adds. Each of ``costs`` maps a block name to the cost of a call on one kind of rank."""
    if len(costs) == 1:
        return costs[0]
    found: Costs = {}
    for name in costs[0]:
        each = [of[name].hide(0.0, 0.0) for of in costs]
        names = ("forward_s", "backward_s", "weights_s", "forward_comm_s", "backward_comm_s", "selective_s")
        most = {field: max(getattr(cost, field) for cost in each) for field in names}
        again_s = max(cost.recompute_s for cost in each)
        slowest = replace(each[0], forward_only_s=most["forward_s"] + most["forward_comm_s"] - again_s, **most)
        found[name] = _combine_hidden(slowest, each, max)
    return found


def combine_longest_costs(costs: Sequence[Costs]) -> Costs:
    """Return the cost of one call of each block (such as a layer), by block name, on a stage whose ranks do not wait
    for each other. The forward is taken from the rank with the longest forward, and the backward from the rank with the
    longest backward, each with its own seconds of computation and of collectives. Each of ``costs`` maps a block name
    to the cost of a call on one kind of rank.
    """
    if len(costs) == 1:
        return costs[0]
    found: Costs = {}
    for name in costs[0]:
        each = [of[name].hide(0.0, 0.0) for of in costs]
        ahead, back = (max(each, key=attrgetter(total)) for total in ("forward_total_s", "backward_total_s"))
        longest = replace(
            each[0],
            forward_s=ahead.forward_s,
            forward_comm_s=ahead.forward_comm_s,
            forward_only_s=ahead.forward_only_s,
            backward_s=back.backward_s,
            backward_comm_s=back.backward_comm_s,
            weights_s=back.weights_s,
            selective_s=max(cost.selective_s for cost in each),
        )
        found[name] = _combine_hidden(longest, each, max)
    return found


def _combine_hidden(
    combined: CallCost, costs: Sequence[CallCost], select: Callable[[Iterable[float]], float]
) -> CallCost:
    """Return ``combined`` with ZeRO-3 collectives and the waits for them. ``combined``: the cost of a block call (such
    as a layer), combined from ``costs`` on several kinds of ranks, without such waits. The seconds of the collectives
    are those of ``costs``, combined by ``select``, which is ``min`` or ``max``. The waits are computed as if the call
    hid its own collectives."""
    each = [cost.hidden for cost in costs if cost.hidden is not None]
    if len(each) < len(costs):
        return combined
    gather_s, scatter_s = select(h.gather_s for h in each), select(h.scatter_s for h in each)
    hidden = each[0]._replace(gather_s=gather_s, scatter_s=scatter_s)
    return replace(combined, hidden=hidden).hide(gather_s, gather_s + scatter_s)


def _least_weights(costs: Sequence[CallCost]) -> float:
    """Return the seconds of gradients of weights for a lower bound on the cost of a block call (such as a layer).
    ``costs``: the cost of the call on each kind of rank. The result is the least seconds of a whole backward in
    ``costs``, minus the least seconds of the part of a backward for gradients of inputs."""
    return min(c.backward_total_s for c in costs) - min(c.backward_total_s - c.later_s for c in costs)
