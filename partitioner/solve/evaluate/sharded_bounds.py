"""Bound the costs of a candidate's blocks on any placement, from solved shardings, before the candidate itself is
solved.

Lower bounds for a small microbatch may come from the sharding of a larger one. A second process computes announced
bounds ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.call_cost import mean_waits
from partitioner.cost.call.states import StateCost
from partitioner.cost.step.rank_costs import Costs, combine_fastest_costs
from partitioner.cost.step.relaxed_mesh import no_slower
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.model import FoldedModel
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Seconds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator, FloorKey
from partitioner.solve.evaluate.prefetch import Reading
from partitioner.solve.sharding.local_model import LocalModel


class ShardedBounds:
    """Computes lower bounds on candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) from
    their shardings, on any placement (assignment of ranks to devices). ``evaluator``: the object that plans the
    candidates; both objects share shardings, costs and the bounds of blocks (such as layers)."""

    def __init__(self, evaluator: CandidateEvaluator) -> None:
        self._evaluator = evaluator
        self._model, self.locals, self._placements = evaluator.job.model, evaluator.locals, evaluator.placements
        self.floors = evaluator.floors

    def bound_blocks(self, candidate: MeshCandidate, size: int) -> BlockLowerBound | None:
        """Return a lower bound on the forward and backward seconds of each block (such as a decoder layer) for one
        microbatch of ``candidate``, on any placement (assignment of ranks to devices). ``None`` means that there is no
        bound. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. ``size``: the number of samples, a
        multiple of the candidate's microbatch size, for which costs are computed.

        The bound is scaled down from ``size`` samples to the candidate's microbatch. This is valid because a smaller
        microbatch takes at least as long per sample: each cost is a start-up time plus a term that grows at most
        linearly with the batch.
        """
        if size != candidate.microbatch_size and not self._is_at_best(candidate):
            return None
        key, asked = self._identify_bound(candidate, size)
        if key not in self.floors:
            ahead = self.locals.ahead.take_result(key)
            self.floors[key] = self._compute_block_bound(*asked) if ahead is None else ahead
        found, share = self.floors[key], candidate.microbatch_size / size
        return found and found.each(lambda seconds: {n: (a * share, b * share) for n, (a, b) in seconds.items()})

    def list_known_floors(self) -> dict[tuple[int, ...], list[tuple[float, Seconds]]]:
        """Return all lower bounds on blocks (such as layers) without ZeRO that were computed so far, as a dict:
        (``tp``, ``ep``, ``etp``) -> list of pairs (samples per rank, block name -> (forward seconds, backward
        seconds)). The samples per rank are the microbatch size divided by ``cp``, because ``cp`` ranks share a sample.
        If there are several bounds for the same key and samples per rank, the least seconds are returned."""
        found: dict[tuple[int, ...], dict[float, Seconds]] = defaultdict(dict)
        for (_, _, cp, tp, _, ep, etp, zero, dp_shard, size, _), bound in self.floors.items():
            if bound is not None and not zero and not dp_shard:
                of_kind, samples = found[tp, ep, etp], size / cp
                other = of_kind.get(samples, bound.seconds)
                of_kind[samples] = {
                    block: (min(pair[0], other[block][0]), min(pair[1], other[block][1]))
                    for block, pair in bound.seconds.items()
                }
        return {kind: sorted(of_kind.items()) for kind, of_kind in found.items()}

    def prefetch(
        self, floors: Iterable[tuple[MeshCandidate, int]], shardings: Iterable[tuple[MeshCandidate, int]]
    ) -> None:
        """Announce which results the search will request, so that a second process can compute them ahead. Both
        arguments have pairs of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage) and a microbatch size
        in samples, approximately in order of use. ``floors``: the pairs for which lower bounds on the seconds of blocks
        (such as layers) will be requested. ``shardings``: the pairs for which sharded graphs will be requested.
        """
        wanted = [self.locals.find_wanted(p, size, self.locals.is_whole(p, size)) for p, size in shardings]
        self.locals.ahead.expect(wanted, self._list_readings(floors))

    def prioritise(self, candidate: MeshCandidate, size: int) -> None:
        """Announce that the lower bound on the blocks (such as layers) of ``candidate`` will be needed soon, so that
        the second process, which computes announced results ahead, computes this one first. ``size``: samples of the
        microbatch for which the bound is computed. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        self.locals.ahead.prioritise(self.locals.find_wanted(candidate, size, self.locals.is_whole(candidate, size)))

    def _list_readings(self, floors: Iterable[tuple[MeshCandidate, int]]) -> Iterator[Reading]:
        """Yield a task for each lower bound on blocks (such as layers) that is not known yet and that a second process
        can compute ahead: (key of the bound, cache key of the sharded graphs from which it is computed, function that
        computes it). ``floors``: pairs of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage) and a
        microbatch size in samples.
        """
        for candidate, size in floors:
            if size == candidate.microbatch_size or self._is_at_best(candidate):
                key, asked = self._identify_bound(candidate, size)
                if key not in self.floors:
                    yield key, self.locals.find_wanted(*asked)[0], partial(self._compute_block_bound, *asked)

    def _identify_bound(self, candidate: MeshCandidate, size: int) -> tuple[FloorKey, tuple[MeshCandidate, int, bool]]:
        """Return two values: a cache key that is equal for candidates whose lower bounds on blocks (such as layers) are
        equal, and the arguments with which these bounds are computed: (candidate, microbatch size in samples, whether
        all samples of a rank are one microbatch). ``size``: samples of the microbatch for which the bounds are
        computed. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        whole = self.locals.is_whole(candidate, size)
        if candidate.zero < 3:  # candidates with these ZeRO stages take equally long, except for waits between ranks
            candidate = replace(
                candidate, zero=candidate.zero if self._has_mixed_speeds and candidate.zero == 2 else 0, dp_shard=0
            )
        pp, dp, cp, tp, one = candidate.grid.values()
        rest = candidate.ep, candidate.etp, candidate.zero, candidate.dp_shard, size, whole
        return (pp, dp, cp, tp, one, *rest), (candidate, size, whole)

    def bound_call_costs(self, candidate: MeshCandidate) -> tuple[FoldedModel, Costs, dict[str, StateCost]]:
        """Return the data for lower bounds on ``candidate`` on any placement (assignment of ranks to devices), as three
        values: the graphs of one rank; block name -> lower bound on the cost of a call of the block (such as a layer);
        and name of a parameter or buffer -> its cost on a rank. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage.

        Raises :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the model cannot be sharded
        in this way.
        """
        local, costs, states = self._evaluator.own(candidate)
        return local.model, combine_fastest_costs(self._evaluator.list_stage_costs(candidate, costs)), states

    def bound_family_costs(self, candidate: MeshCandidate) -> tuple[FoldedModel, Costs, dict[str, StateCost]] | None:
        """Return the data for lower bounds on ``candidate`` and on all candidates that differ from it only in their
        ZeRO stage and need at least as much memory. Return ``None`` if devices differ in speed, because the ZeRO stage
        then also decides how the batch may be divided. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.

        The data are three values: the graphs of one rank; block name -> lower bound on the cost of a call of the block
        (such as a layer) without ZeRO; and name of a parameter or buffer -> its cost.
        """
        if self._has_mixed_speeds:
            return None
        model, costs, _ = self.bound_call_costs(candidate.sharing(0))
        return model, costs, self._evaluator.own(candidate)[2]

    @property
    def _has_mixed_speeds(self) -> bool:
        """Return whether the devices of the topology have different speeds."""
        return len(self._placements.topology.paces[0]) > 1

    def _is_at_best(self, candidate: MeshCandidate) -> bool:
        """Return whether the sharding of ``candidate`` was optimized for the best kind of rank (device and groups) that
        any placement has. Lower bounds on block calls (such as layers) are for this kind of rank, where no other
        sharding then costs less. Only in this case can a bound for one microbatch size be scaled to another.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if self._placements.complete(candidate.grid):
            return True
        groups = dict(self.locals.reference_seat(candidate.tp, candidate.cp).groups).values()
        return not self._has_mixed_speeds and all(
            no_slower(group, self._placements.best_group(group.size)) for group in groups
        )

    def _compute_block_bound(self, candidate: MeshCandidate, size: int, whole: bool) -> BlockLowerBound | None:
        """Return lower bounds on the seconds of each block (such as a layer) of ``candidate`` for microbatches of
        ``size`` samples; ``None`` if the model cannot be sharded in this way. ``whole``: whether all samples of a rank
        are one microbatch. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        wanted = self.locals.find_wanted(candidate, size, whole)
        try:
            local, costs = self._evaluator.find_local_costs(*wanted)
        except UnsupportedError:  # samples that interact in one batch need not do so in a smaller one
            return None
        best = _bound_block_seconds(
            self._model, local, combine_fastest_costs(self._evaluator.list_stage_costs(candidate, costs))
        )
        kinds = self._evaluator.list_best_rank_costs(candidate, costs) if self._has_mixed_speeds else ()
        return BlockLowerBound(best, tuple(_bound_block_seconds(self._model, local, of_kind) for of_kind in kinds))

    def can_prune(self, candidate: MeshCandidate, cutoff_s: float) -> bool:
        """Return whether solving ``candidate`` is useless, because every placement (assignment of ranks to devices)
        that the evaluator would try is expected to take at least ``cutoff_s`` seconds per step. If the evaluator would
        try all possible placements, return ``False``, since other bounds are tight then. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.

        Raises :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the candidate has no plan.
        """
        if self._placements.complete(candidate.grid):
            return False  # the bounds are exact enough
        placement_evaluator = self._evaluator.build_placement_evaluator(candidate)
        return all(
            placement_evaluator.expected(machine, cutoff_s) >= cutoff_s
            for machine in self._placements.candidates(candidate.grid)
        )


def _bound_block_seconds(model: FoldedModel, local: LocalModel, costs: Costs) -> Seconds:
    """Return a lower bound on the seconds of one call of each block (such as a layer) of the unsharded ``model``: block
    name -> (forward seconds, backward seconds). ``local``: the graphs of one rank. ``costs``: the costs of the blocks
    of ``local``. Blocks of ``local`` may differ from those of ``model``, so calls of the two are matched by module
    path."""
    means = mean_waits(costs, local.model.calls)
    least = {name: (cost.forward_total_s, cost.backward_total_s) for name, cost in means.items()}
    of_path = {call.path: least[call.block] for call in local.model.calls if not call.prologue}
    found: dict[str, tuple[float, float]] = {}
    for call in model.calls:
        of_call = of_path.get(call.path, (0.0, 0.0))
        found[call.block] = min(found.get(call.block, of_call), of_call)
    return found
