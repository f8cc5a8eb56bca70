"""Compute lower bounds on the collectives of ZeRO and on the gradient reduction of a candidate.

``Gathers`` bounds the gathers of weights under ZeRO-3 and the scatters of gradients under ZeRO-2, for any sharding.
These times do not depend on the microbatch size, so they are not scaled from a larger microbatch to a smaller one.
``LeastReduced`` bounds the gradient reduction, for any placement of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.block_profile import StateRead, gradient_bytes_of
from partitioner.cost.call.call_cost import CallCost, mean_waits
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.roofline import memory_rate
from partitioner.cost.call.states import StateCost, gradient_bytes
from partitioner.cost.call.zero3_gathers import HiddenCollectives
from partitioner.cost.step.gradient_reduction import (
    Sizes,
    best_reducers,
    data_reducers,
    exposed_seconds,
    last_levels,
    reduced_sizes,
    reduction_of,
)
from partitioner.emit.zero import small_states
from partitioner.passes.ir.model import FoldedModel
from partitioner.solve.bounds.planned_job import PlannedJob
from partitioner.solve.placement.placement import Placements
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType
from partitioner.topology.topology import Topology

Seconds = Mapping[str, tuple[float, float]]  # by block, forward and backward

_TINY = 1e-12


@dataclass(frozen=True)
class BlockLowerBound:
    """Lower bounds on the seconds of each block (such as a decoder layer), on any placement (assignment of ranks to
    devices). ``seconds``: block name -> pair of forward and backward seconds of one microbatch, on the best devices.
    ``of_kind``: one such dict for each device type; empty if the topology has only one type.
    """

    seconds: Seconds
    of_kind: tuple[Seconds, ...] = ()

    def each(self, change: Callable[[Seconds], Seconds]) -> BlockLowerBound:
        """Return a copy of these lower bounds in which the function ``change`` has replaced every dict of seconds.
        ``change`` takes and returns a dict: name of a block, such as a layer -> pair of forward and backward seconds.
        """
        return BlockLowerBound(change(self.seconds), tuple(map(change, self.of_kind)))


@dataclass(frozen=True)
class _WeightReads:
    """Bytes of the weights that a call of a block (such as a layer) reads, and of their gradients. ``experts``: for the
    weights of experts, the pair (bytes of the weights, bytes of their gradients). ``others``: the same pair for all
    other weights.
    """

    experts: tuple[float, float]
    others: tuple[float, float]


class Gathers:
    """Computes lower bounds on the time of gathering weights and scattering gradients under ZeRO, for each block (such
    as a decoder layer) of a job. ``job``: the model, batch, cluster and constraints. ``placements``: finds the
    placements (assignments of ranks to devices) of a mesh. ``device``: the best device type of the topology.
    """

    def __init__(self, job: PlannedJob, placements: Placements, device: DeviceType) -> None:
        self.placements, self.train, self.slowdown = placements, job.train, device.overlap_slowdown
        self.overlap, short = job.profile.overlap, job.profile.short_gradients
        self._calls, self._behind = job.model.calls, _list_blocks_with_backward(job.model)
        self._once = job.profile.gather != "parameter"  # recomputation and backward share one gather of weights
        self._reads = {name: _read_block_weights(job.model, name, job.experts, short) for name in job.model.blocks}
        self._gradients = [0.0, 0.0]  # scattered bytes: (others, experts); shared states count once
        placed = (call for call in job.model.calls if not call.shared and not call.prologue)
        for name in {name for call in placed for name in call.states}:
            state = job.model.states[name]
            if state.requires_grad and state.kind == "parameter" and state.spec.shape:
                self._gradients[name in job.experts] += gradient_bytes(state.spec, short)
        self._copied = 0.0 if job.profile.gather == "parameter" else 2 / memory_rate("pointwise", device)  # s / byte
        self._floors: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}
        self._scatters: dict[tuple[object, ...], float] = {}

    def beside(self, floor: BlockLowerBound | None, candidate: MeshCandidate) -> BlockLowerBound | None:
        """Return lower bounds on the seconds of each block (such as a layer) of ``candidate`` that include the gathers
        of weights and scatters of gradients under ZeRO-3. If the candidate does not gather weights, the result is
        ``floor`` itself.

        ``floor``: lower bounds without these collectives, or ``None`` if none are known. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        gathers, copies = self.floor(candidate)
        if not gathers:
            return floor
        return (floor or BlockLowerBound(dict.fromkeys(gathers, (0.0, 0.0)))).each(
            lambda seconds: self._add_waits(seconds, gathers, copies)
        )

    def _add_waits(self, seconds: Seconds, gathers: Seconds, copies: Seconds) -> Seconds:
        """Return lower bounds on the seconds of each block (such as a layer), including its mean wait for ZeRO-3
        collectives over all calls of the block. The result and all arguments are dicts: block name -> (forward seconds,
        backward seconds). ``seconds``: the blocks alone; collectives of other kinds in them are treated as computation,
        which can hide ZeRO-3 collectives. ``gathers``: the collectives that gather weights and scatter gradients.
        ``copies``: copying gathered weights."""
        costs = {
            name: self._add_to_cost(CallCost(forward_s=ahead, backward_s=back), gathers[name], copies[name])
            for name, (ahead, back) in seconds.items()
        }
        means = mean_waits(costs, self._calls)
        return {name: (cost.forward_total_s, cost.backward_total_s) for name, cost in means.items()}

    def add_to_costs(self, costs: Mapping[str, CallCost], candidate: MeshCandidate) -> dict[str, CallCost]:
        """Return ``costs``, lower bounds on the costs of a call of each block (such as a layer), with the gathers of
        weights and scatters of gradients of ``candidate`` under ZeRO-3 added. ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage.

        If full recomputation and backward share one gather of the weights, recomputation can hide a part of this
        gather. It then adds fewer seconds than the forward takes with its gathers."""
        gathers, copies = self.floor(candidate)
        return {
            name: self._add_to_cost(cost, gathers[name], copies[name]) if name in gathers else cost
            for name, cost in costs.items()
        }

    def _add_to_cost(self, cost: CallCost, gathers: tuple[float, float], copies: tuple[float, float]) -> CallCost:
        """Return ``cost``, the cost of a call of a block (such as a layer), with the seconds of its ZeRO-3 collectives
        added. ``gathers``: (forward seconds, backward seconds) of the collectives. ``copies``: (forward seconds,
        backward seconds) of copying gathered weights."""
        how = self.slowdown, self.overlap, self._once
        hidden = HiddenCollectives(gathers[0], max(0.0, gathers[1] - gathers[0]), 0.0, 0.0, 0.0, *how)
        alone = cost.at_least(cost.forward_total_s + copies[0], cost.backward_total_s + copies[1])
        return replace(alone, forward_comm_s=0.0, backward_comm_s=0.0, hidden=hidden).hide(*gathers)

    def floor(self, candidate: MeshCandidate) -> tuple[Seconds, Seconds]:
        """Return two dicts with lower bounds: on the ZeRO-3 collectives, and on copying gathered weights. Both map the
        name of a block (such as a layer) to (forward seconds, backward seconds). Forward gathers the weights; backward
        gathers them again and scatters gradients. Both dicts are empty if the candidate does not shard weights.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if candidate.zero != 3 or candidate.sharers == candidate.expert_sharers == 1:
            return {}, {}
        key = *candidate.grid.values(), candidate.ep, candidate.expert_tp, candidate.dp_shard
        if key not in self._floors:
            self._floors[key] = (
                self._floor(*self._find_sharing_groups(candidate), candidate),
                self._bound_copy_seconds(candidate),
            )
        return self._floors[key]

    def _bound_copy_seconds(self, candidate: MeshCandidate) -> Seconds:
        """Return lower bounds on the seconds of copies that ZeRO-3 makes under ``candidate``: name of a block (such as
        a layer) -> (forward seconds, backward seconds). Gathered weights are copied out of the buffers of collectives,
        and gradients are copied into such buffers. Kernel launches are not included. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        floor = dict[str, tuple[float, float]]()
        for name, read in self._reads.items():
            ahead = back = 0.0
            for (weights, gradients), ways, sharers in (
                (read.others, candidate.tp, candidate.sharers),
                (read.experts, candidate.ep * candidate.expert_tp, candidate.expert_sharers),
            ):
                share = self._copied / ways if sharers > 1 else 0.0
                ahead, back = ahead + share * weights, back + share * gradients
            floor[name] = ahead, (ahead + back) * (self.train and name in self._behind)
        return floor

    def scattered(self, candidate: MeshCandidate, m: int, known_s: float, forward_s: float) -> float:
        """Return a lower bound in seconds on a step of ``candidate`` under ZeRO-2, where each of the ``m`` backwards of
        a stage except the last scatters gradients. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        ``m``: number of microbatches. ``known_s``: a lower bound on the step without the scatters. ``forward_s``:
        forward seconds of one microbatch through all stages.

        A scatter can be hidden at most for the duration of a backward, so a shorter step hides less. The bound is
        computed for a stage with the mean work of all stages. The slowest stage takes at least as long, because the
        exposed seconds are a convex function of the work, and no stage waits for the exposed seconds of an earlier one.
        """
        again, idle = self._bound_scatter_seconds(candidate) / candidate.pp, forward_s / candidate.pp
        hides, ahead = (2 - self.slowdown) * self.overlap * (m - 1), candidate.pp - 1
        # the minimum is at the first window, or where all scatters are hidden or no wait is left
        windows = [again, again * (m - 1) / max(hides + ahead, _TINY)]
        windows += [again * (m - 1) * (self.slowdown - 1) / ahead] if ahead else []

        def step(window: float) -> float:
            exposed = exposed_seconds((0.0, 0.0, 0.0, again, 0.0, 0.0), window, self.slowdown, 0.0, self.overlap, m)
            return m * (window + idle) + max(0.0, float(exposed) - ahead * window)

        first = max(0.0, known_s / m - idle)
        return max(known_s, min(step(window) for window in (first, *(w for w in windows if w > first))))

    def _bound_scatter_seconds(self, candidate: MeshCandidate) -> float:
        """Return a lower bound on the seconds of one reduce-scatter of all gradients of ``candidate``, over the fastest
        possible groups. The start-up time of each collective is not included. ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage.
        """
        key = *candidate.grid.values(), candidate.ep, candidate.expert_tp, candidate.dp_shard
        if key not in self._scatters:
            shards, experts = self._find_sharing_groups(candidate)
            parts = (
                (shards, self._gradients[0] / candidate.tp),
                (experts, self._gradients[1] / candidate.ep / candidate.expert_tp),
            )
            self._scatters[key] = sum(
                min(collective_time("reduce_scatter", n, g) - collective_time("reduce_scatter", 0.0, g) for g in groups)
                for groups, n in parts
            )
        return self._scatters[key]

    def _find_sharing_groups(self, candidate: MeshCandidate) -> tuple[Sequence[Group], Sequence[Group]]:
        """Return two lists of groups of ranks: the groups over which ZeRO-3 shards weights outside of experts, and the
        groups over which it shards weights of experts. The lists contain the groups of every placement (assignment of
        ranks to devices) of ``candidate``. If not all placements are known, each list has one imaginary group that is
        at least as fast as any real one. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if not self.placements.complete(candidate.grid):
            sizes, everywhere = (candidate.sharers, candidate.expert_sharers), candidate.pp == 1
            best = [self.placements.best_group(size, everywhere) for size in sizes]
            return best[:1], best[1:]
        plain = self.placements.candidates(candidate.grid)
        machines = [replace(m, ep=candidate.ep, etp=candidate.etp, zero=3, dp_shard=candidate.dp_shard) for m in plain]
        shards = [m.group("dp_shard" if m.hybrid else "dp", "cp") for m in machines]
        experts = [m.group("edp_shard" if m.hybrid else "experts") for m in machines]
        return list(dict.fromkeys(shards)), list(dict.fromkeys(experts))

    def _floor(self, shards: Sequence[Group], experts: Sequence[Group], candidate: MeshCandidate) -> Seconds:
        """Return lower bounds on the ZeRO-3 collectives of ``candidate`` over the fastest group: name of a block (such
        as a layer) -> (forward seconds, backward seconds). ``shards``: the groups over which weights outside of experts
        may be sharded. ``experts``: the groups over which weights of experts may be sharded. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""

        def least(op: str, nbytes: float, groups: Sequence[Group]) -> float:
            return min(collective_time(op, nbytes, group) for group in groups) if nbytes else 0.0

        floor, known = dict[str, tuple[float, float]](), dict[_WeightReads, tuple[float, float]]()
        for name, read in self._reads.items():
            if read not in known:
                ahead = back = 0.0
                parts = (read.others, shards, candidate.tp), (read.experts, experts, candidate.ep * candidate.expert_tp)
                for (weights, gradients), groups, ways in parts:
                    ahead += least("all_gather", weights / ways, groups)
                    back += least("reduce_scatter", gradients / ways, groups)
                known[read] = ahead, (ahead + back) * self.train
            floor[name] = known[read][0], known[read][1] * (name in self._behind)
        return floor


def _list_blocks_with_backward(model: FoldedModel) -> frozenset[str]:
    """Return the names of the blocks (such as layers) that may have a backward. Calls in front of the first call that
    reads a trained parameter have no backward, so their blocks are left out. ``model``: the model as calls of blocks.
    """
    placed = [call for call in model.calls if not call.shared and not call.prologue]
    trained = [any(model.states[name].requires_grad for name in call.states) for call in placed]
    first = trained.index(True) if any(trained) else len(placed)
    return frozenset(call.block for call in placed) - {call.block for call in placed[:first]}


def _read_block_weights(model: FoldedModel, name: str, experts: Collection[str], short_gradients: bool) -> _WeightReads:
    """Return the bytes of the weights that the block (such as a layer) called ``name`` reads, and of their gradients,
    separately for experts and for other weights. Small weights, which ZeRO-3 does not shard, are left out. ``model``:
    the model as calls of blocks. ``experts``: names of the experts' parameters. ``short_gradients``: whether gradients
    have the dtype of their parameter instead of float32."""
    block = model.blocks[name]
    placeholders = {node.name: node for node in block.placeholders}
    names = next((call.states for call in model.calls if call.block == name), ())
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    small = small_states({own: placeholders[own].meta["val"].nbytes for own in block.states})  # a rank has no others
    for own, state in zip(block.states, names, strict=False):
        if own in small:
            continue
        node, expert = placeholders[own], state in experts
        sizes = StateRead(own, node.meta["val"].nbytes, gradient_bytes_of(node), expert).sizes(short_gradients)
        sums[expert] = [known + size for known, size in zip(sums[expert], sizes, strict=True)]
    return _WeightReads((sums[True][0], sums[True][1]), (sums[False][0], sums[False][1]))


class LeastReduced:
    """Computes lower bounds in seconds on the gradient reduction of mesh candidates (combinations of mesh sizes,
    schedule and ZeRO stage), and caches them. ``topology``: the cluster. ``constraints``: the choices that the user
    fixed. ``placements``: finds the placements (assignments of ranks to devices) of a mesh. ``device``: the best device
    type of the topology."""

    def __init__(
        self, topology: Topology, constraints: Constraints, placements: Placements, device: DeviceType
    ) -> None:
        self._topology, self._constraints, self._placements, self._device = topology, constraints, placements, device
        self._known: dict[tuple[int, ...], float] = {}

    def seconds(self, candidate: MeshCandidate, states: Callable[[], Iterable[StateCost]]) -> float:
        """Return a lower bound in seconds on reducing the gradients of all stages, one stage after the other. The bound
        is 0 with one replica, under ZeRO-3 (which scatters gradients block by block) and under hybrid sharding (where a
        reduction inside nodes may take next to no time).

        ``candidate``: the mesh sizes, the schedule and the ZeRO stage. ``states``: a function that returns lower bounds
        on the bytes of the parameters on a rank."""
        if (
            candidate.replicas == 1 or candidate.zero == 3 or candidate.dp_shard
        ):  # a reduction within nodes may take next to no time
            return 0.0
        single = candidate.pp == 1
        key = (candidate.dp, candidate.cp, candidate.tp, min(candidate.zero, 1), candidate.ep > 1, single)
        if key not in self._known:
            grid, constraints = {"dp": candidate.dp, "cp": candidate.cp, "tp": candidate.tp}, self._constraints
            if single and self._placements.complete(grid):
                reducers = data_reducers(self._placements.candidates(grid), candidate.zero, constraints)
            else:
                group = self._placements.best_group(candidate.replicas, everywhere=single)
                reducers = best_reducers(self._topology, group, self._device, constraints)
            sizes, last_level = _over_data(states())
            totals = (reduction_of(sizes, last_level, r, overlap=False).total_s for r in reducers)
            self._known[key] = min(totals, default=0.0)  # with one bucket the start-up is paid once
        return self._known[key]


def _over_data(states: Iterable[StateCost]) -> tuple[Sizes, dict[tuple[str, ...], bool]]:
    """Return the bytes of gradients that each collective of a step reduces, and which reductions are the last of their
    gradients, as two dicts. All ranks with equal weights are treated as one mesh axis ``dp``.

    The first dict is: (name of the collective, mesh axes, ZeRO stage, axes of an earlier reduce-scatter) -> bytes. The
    second is: mesh axes of a reduce-scatter -> whether it is the last reduction of its gradients. ``states``: costs of
    parameters, one entry for each parameter; equal parameters share one object.
    """
    costs = list(states)
    often = Counter(map(id, costs))
    sizes: Sizes = {}
    last_level: dict[tuple[str, ...], bool] = {}
    for cost in {id(cost): cost for cost in costs}.values():
        plain = replace(cost, grad_axes=("dp",) if cost.grad_axes else ())
        for key, size in reduced_sizes(plain).items():
            sizes[key] = sizes.get(key, 0.0) + often[id(cost)] * size
        last_level |= last_levels(plain)
    return sizes, last_level
