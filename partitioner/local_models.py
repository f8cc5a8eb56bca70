"""The models of one microbatch on one rank that the points of a search need, each sharded once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.context import ContextModel, shard_context
from partitioner.cost.axes import TensorCosts
from partitioner.cost.divided import divided_costs
from partitioner.cost.machine import Seat
from partitioner.experts import Split, allowed_strategies, split_of
from partitioner.job import Job
from partitioner.localize import LocalModel, localized
from partitioner.solve.placement import Placements
from partitioner.solve.points import Point
from partitioner.solve.sharding import ShardingProblem, ShardingSolution, sharding_problem, whole_sharding
from partitioner.topology.groups import reference_type
from passes.blocks import Block, FoldedModel
from passes.microbatch import couples_samples, split_batch

_LEAST_ROUNDS = 2

# tp, cp, parts of the batch, whether one microbatch is all, whether experts are spread, and what of them is over tp
LocalKey = tuple[int, int, int, bool, bool, Split]


@dataclass
class LocalModels:
    """The local models of a job, found when first asked for."""

    job: Job
    placements: Placements
    _splits: dict[tuple[int, bool, bool], FoldedModel] = field(default_factory=dict)
    _contexts: dict[tuple[int, int, int, bool, bool], ContextModel] = field(default_factory=dict)
    _blocks: dict[Hashable, Block] = field(default_factory=dict)
    _problems: dict[tuple[int, int, int, bool, bool], ShardingProblem] = field(default_factory=dict)
    _locals: dict[LocalKey, LocalModel] = field(default_factory=dict)
    _seats: dict[tuple[int, int], Seat] = field(default_factory=dict)

    def key(self, point: Point, parts: int, whole: bool) -> LocalKey:
        """What decides the local model of a point whose batch is split into ``parts``; ``whole``: on one rank all of
        its samples are one microbatch."""
        apart = self.job.batch_of(point.ep) is not self.job.batch
        split = split_of(point.tp, point.ep, point.etp)
        return point.tp, point.cp, parts, whole and (apart or self.coupled), apart, split

    def at(self, key: LocalKey, num_microbatches: int, dp: int) -> LocalModel:
        """The local model of ``key``, whose parts are of ``num_microbatches`` on each of ``dp`` ranks.

        Raises :class:`PlanError` or :class:`passes.errors.UnsupportedError` where there is none.
        """
        if key not in self._locals:
            self._locals[key] = self._find(key, num_microbatches, dp)
        return self._locals[key]

    def split(self, point: Point, parts: int, whole: bool) -> FoldedModel:
        """One microbatch of a batch that was split, before its sequence is shared over ``cp``."""
        return self._splits[self.key(point, parts, whole)[2:5]]

    @cached_property
    def coupled(self) -> bool:
        """Whether it matters if all samples of a rank are one microbatch: whether samples meet."""
        batch, samples = self.job.batch, self.job.global_batch
        return couples_samples(split_batch(self.job.model, batch.blocks, batch.values, 1, samples))

    def reference_seat(self, tp: int, cp: int = 1) -> Seat:
        """What decides a sharding: the commonest kind of device, over the best groups that all can have."""
        if (tp, cp) not in self._seats:
            others = {"dp": self.job.topology.num_devices // (tp * cp)}
            grid = {**others, "cp": cp, "tp": tp} if cp > 1 else {**others, "tp": tp}
            machines = self.placements.candidates(grid)
            axes = ("tp", "cp") if cp > 1 else ("tp",)
            best = max(machines, key=lambda m: [(m.group(a).bus_bandwidth, -m.group(a).all_reduce_start) for a in axes])
            groups = tuple((axis, best.group(axis)) for axis in axes)
            self._seats[tp, cp] = Seat(reference_type(self.job.topology), 1.0, groups)
        return self._seats[tp, cp]

    def _find(self, key: LocalKey, num_microbatches: int, dp: int) -> LocalModel:
        tp, cp, _, _, _, experts = key
        batch = self._batch(key)
        if key[2:5] not in self._splits:
            self._splits[key[2:5]] = split_batch(self.job.model, batch.blocks, batch.values, num_microbatches, dp)
        model = self._splits[key[2:5]]
        context = self._context(model, key) if cp > 1 else None
        model = model if context is None else context.model
        if tp == 1:
            solution = whole_sharding(model, "tp", self._costs(model, "tp", key))
        else:
            problem = self._problem(model, key)
            solution = problem.solve(allowed_strategies(model, experts))
        return localized(model, solution, None if context is None else context.sharding, self._blocks)

    def _batch(self, key: LocalKey) -> ShardingSolution:
        return self.job.expert_batch if key[4] else self.job.batch

    def _problem(self, model: FoldedModel, key: LocalKey) -> ShardingProblem:
        """One for all ways of spreading experts, which differ in the strategies that they allow."""
        if key[:5] not in self._problems:
            problem = sharding_problem(model, "tp", key[0], self._costs(model, "tp", key))
            if not self.job.experts:
                return problem
            self._problems[key[:5]] = problem
        return self._problems[key[:5]]

    def _context(self, model: FoldedModel, key: LocalKey) -> ContextModel:
        """``model`` with its sequence shared over ``cp``."""
        tp, cp, *_ = key
        if key[:5] not in self._contexts:
            self._contexts[key[:5]] = shard_context(
                model,
                self._batch(key),
                cp,
                replace(self._costs(model, "cp", key), state_price=0.0, complete=True),
                tp=tp,
                algorithm=self.job.constraints.context,
                allowed=allowed_strategies(model, "rows", in_order=False) if self.job.experts else None,
            )
        return self._contexts[key[:5]]

    def _rounds(self, key: LocalKey) -> int:
        """The microbatches of a step over which a sharding's price spreads what happens once in it.

        The fewest that a point of ``key`` may have, so that it does not depend on which of them asks first. Two at
        least: a gradient that is reduced once a step may go in a bucket and to shards, one inside a graph may not.
        """
        tp, cp, parts, *_ = key
        return max(_LEAST_ROUNDS, parts * tp * cp // self.job.topology.num_devices)

    def _costs(self, model: FoldedModel, axis: str, key: LocalKey) -> TensorCosts:
        tp, cp, *_ = key
        job, seat = self.job, self.reference_seat(tp, cp)
        device, group, pinned = job.topology.types[seat.kind], dict(seat.groups)[axis], job.constraints
        return replace(
            divided_costs(model, axis, device, group, job.precision),
            train=job.train,
            num_microbatches=self._rounds(key),
            sequence_parallel=pinned.sequence_parallel if axis == "tp" else None,
            short_gradients=bool(pinned.short_gradients),
        )
