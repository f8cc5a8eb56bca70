"""Cache local models (the sharded graphs that one rank runs for one microbatch) and their costs, so that candidates of
a search share them."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from partitioner.candidate import MeshCandidate, split_of
from partitioner.cost.call.call_cost import CallWork
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.recomputation import find_recomputed_nodes, recompute_mode
from partitioner.cost.call.states import StateCost, StateCosts, StateKinds, kinds_of, state_costs
from partitioner.cost.step.placed_mesh import PlacedMesh, RankProfile
from partitioner.cost.step.rank_costs import CallCostCache
from partitioner.errors import PlanError
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Block, FoldedModel
from partitioner.passes.shard.split_batch import has_sample_collectives, split_batch
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.prefetch import LocalKey, PrefetchQueue, ProblemKey, Solutions, Wanted
from partitioner.solve.placement.placement import Placements
from partitioner.solve.sharding.choices import FREE_LAYOUTS
from partitioner.solve.sharding.context_parallel import ContextModel, shard_context
from partitioner.solve.sharding.costs import PricedOperators, TensorCosts, divided_costs
from partitioner.solve.sharding.expert_parallel import allowed_strategies
from partitioner.solve.sharding.joint import CompanionModel, JointShardingProblem
from partitioner.solve.sharding.local_model import LocalModel, build_local_model
from partitioner.solve.sharding.sharding import ShardingProblem, ShardingSolution, sharding_problem, whole_sharding
from partitioner.topology.group import Group
from partitioner.topology.groups import reference_type
from partitioner.topology.hardware import COLLECTIVES
from partitioner.units import list_divisors

_SENT = (0.0, 1e5, 1e8)  # message sizes in bytes at which groups are compared

_LEAST_ROUNDS = 2


@dataclass
class LocalModels:
    """The local models of a job: the sharded graphs that one rank runs for one microbatch. Each is computed when it is
    first needed. If sharding takes long, a forked process computes models that were announced in the queue
    :attr:`ahead` in advance. ``job``: the model, batch, cluster and constraints. ``placements``: finds the placements
    (assignments of ranks to devices) of a mesh."""

    job: Job
    placements: Placements
    _splits: dict[tuple[int, bool, bool], FoldedModel] = field(default_factory=dict)
    _contexts: dict[ProblemKey, ContextModel] = field(default_factory=dict)
    _blocks: dict[Hashable, Block] = field(default_factory=dict)
    _problems: dict[ProblemKey, ShardingProblem] = field(default_factory=dict)
    _locals: dict[LocalKey, LocalModel] = field(default_factory=dict)
    _none: dict[LocalKey, PartitionError] = field(default_factory=dict)  # why there is no local model
    _seats: dict[tuple[int, int], RankProfile] = field(default_factory=dict)
    _operators: PricedOperators = field(default_factory=PricedOperators)
    _companions: dict[int, LocalModels] = field(default_factory=dict)  # by index among the job's companions

    def key(self, candidate: MeshCandidate, parts: int, whole: bool) -> LocalKey:
        """Return the cache key of a candidate's local model (the sharded graphs of one rank); candidates with equal
        keys share it. ``parts``: the number of microbatches in the global batch. ``whole``: whether each rank has a
        single microbatch. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        apart = candidate.ep > 1 and self.job.expert_batch is not self.job.batch
        split = split_of(candidate.tp, candidate.ep, candidate.etp)
        return candidate.tp, candidate.cp, parts, whole and (apart or self.coupled), apart, split

    def is_whole(self, candidate: MeshCandidate, size: int) -> bool:
        """Return whether the graphs of ``candidate`` for microbatches of ``size`` samples may be valid only for ranks
        with a single microbatch. This is the case if samples of the batch interact and each rank has one microbatch of
        this size. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        whole = size == candidate.microbatch_size and candidate.num_microbatches(self.job.global_batch) == 1
        return whole and self.coupled

    def find_wanted(self, candidate: MeshCandidate, size: int, whole: bool) -> Wanted:
        """Return two values: the cache key of the sharded graphs of one rank of ``candidate`` for microbatches of
        ``size`` samples, and the number of such microbatches of a rank. Lower bounds on blocks (such as layers) are
        computed from these graphs. ``whole``: whether all samples of a rank are one microbatch. ``candidate``: mesh
        sizes, microbatch size, schedule and ZeRO stage."""
        parts = self.job.global_batch // size
        dp = candidate.dp if whole or (parts % candidate.dp == 0 and parts > candidate.dp) else 1
        return self.key(candidate, parts, whole or parts == 1), parts // dp

    def at(self, key: LocalKey, num_microbatches: int) -> LocalModel:
        """Return the local model (the sharded graphs of one rank) with the cache key ``key``. ``num_microbatches``: the
        number of microbatches of a rank.

        Raises :class:`PlanError` or :class:`partitioner.passes.errors.UnsupportedError` if the model cannot be sharded
        in this way.
        """
        if key in self._none:
            raise self._none[key].with_traceback(None)
        if key not in self._locals:
            try:
                self._locals[key] = self._build_local_model(key, num_microbatches)
            except PartitionError as error:
                self._none[key] = error
                raise
        return self._locals[key]

    def split(self, candidate: MeshCandidate, parts: int, whole: bool) -> FoldedModel:
        """Return the model of ``candidate`` for one microbatch, before the sequence is sharded over ``cp``. It is
        stored when the sharded graphs of the candidate are computed, so these must have been requested before.
        ``parts``: the number of microbatches in the global batch. ``whole``: whether each rank has a single microbatch.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        return self._splits[self.key(candidate, parts, whole)[2:5]]

    @cached_property
    def coupled(self) -> bool:
        """Return whether samples of the batch interact, so that the graphs depend on whether all samples of a rank are
        one microbatch. Return ``False`` if a microbatch is one group of interacting samples."""
        if self.job.constraints.group_size is not None:
            return False  # a microbatch is one group, however many the rank has
        batch, samples = self.job.batch, self.job.global_batch
        return has_sample_collectives(split_batch(self.job.model, batch.blocks, batch.values, samples, 1))

    def reference_seat(self, tp: int, cp: int = 1) -> RankProfile:
        """Return the profile of a rank (device type, speed and groups) that shardings are optimized for: the most
        common device type, with the best groups of ``tp`` and ``cp`` ranks over all candidate placements (assignments
        of ranks to devices). ``tp``, ``cp``: number of ranks along these mesh axes.
        """
        if (tp, cp) not in self._seats:
            others = {"dp": self.job.topology.num_devices // (tp * cp)}
            grid = {**others, "cp": cp, "tp": tp} if cp > 1 else {**others, "tp": tp}
            machines = self.placements.candidates(grid)
            axes = ("tp", "cp") if cp > 1 else ("tp",)
            best = min(machines, key=lambda machine: [_rank_group_slowness(machine.group(axis)) for axis in axes])
            groups = tuple((axis, best.group(axis)) for axis in axes)
            self._seats[tp, cp] = RankProfile(reference_type(self.job.topology), 1.0, groups)
        return self._seats[tp, cp]

    def _build_local_model(self, key: LocalKey, num_microbatches: int) -> LocalModel:
        start = time.process_time()
        model, context, solution = self._solve_local_sharding(key, num_microbatches, self.ahead.take_solutions(key))
        self.ahead.spent_s += time.process_time() - start
        return build_local_model(model, solution, context, self._blocks)

    @cached_property
    def ahead(self) -> PrefetchQueue:
        """Return the queue of announced shardings and results, which a second process may compute ahead."""
        return PrefetchQueue(lambda *wanted: self._solve_local_sharding(*wanted)[1:], self._locals)

    def _solve_local_sharding(
        self, key: LocalKey, num_microbatches: int, known: Solutions | None = None
    ) -> tuple[FoldedModel, ShardingSolution | None, ShardingSolution]:
        """Return three values: the model of one microbatch with the shapes of one rank of ``cp``, its sharding over
        ``cp`` (``None`` if ``cp`` is 1), and its sharding over ``tp``. ``key``: the cache key of the local model
        (sharded graphs of one rank). ``num_microbatches``: the number of microbatches of a rank. ``known``: the two
        shardings, if they were found before; ``None``: the sharding problems are solved."""
        tp, *_, experts = key
        model, context = self.find_model(key, num_microbatches, known and known[0])
        if known is not None:
            solution = known[1]
        elif tp == 1:
            solution = whole_sharding(model, "tp", self._build_tensor_costs(model, "tp", key))
        else:
            problem = self._find_sharding_problem(model, key, key[2] // num_microbatches)
            solution = problem.solve(allowed_strategies(problem.model, experts))
        return model, context, solution

    def _select_batch_sharding(self, key: LocalKey) -> ShardingSolution:
        return self.job.expert_batch if key[4] else self.job.batch

    def _find_sharding_problem(self, model: FoldedModel, key: LocalKey, dp: int) -> ShardingProblem:
        """Return the problem of sharding ``model`` over ``tp`` at the least cost. A solution assigns a strategy to
        every operator: the layouts of its operands and results. Candidates that differ only in how experts are
        distributed share one problem, because they only allow different strategies.

        ``key``: the cache key of the local model (the sharded graphs of one rank). ``dp``: number of ranks over which
        the batch is distributed."""
        if key[:5] not in self._problems:
            costs = self._build_tensor_costs(model, "tp", key)
            problem: ShardingProblem
            if self.job.companions:
                problem = JointShardingProblem(model, self._list_companion_models(key, dp), "tp", key[0], costs)
            else:
                rules = FREE_LAYOUTS if self.job.layout is None else self.job.layout.rules(model, self.job.train)
                problem = sharding_problem(model, "tp", key[0], costs, rules)
            if not self.job.experts:
                return problem
            self._problems[key[:5]] = problem
        return self._problems[key[:5]]

    def _list_companion_models(self, key: LocalKey, dp: int) -> list[CompanionModel]:
        """Return the models of the companions for one microbatch. Companions are further programs of the plan, such as
        an evaluation, that are sharded together with the main program's model. The microbatch of a companion is at most
        as large as that of the main program. ``key``: the cache key of the main program's local model (the sharded
        graphs of one rank). ``dp``: number of ranks over which the batch is distributed.

        Raises :class:`PartitionError` if the samples of a companion, or its sequence, cannot be divided."""
        found, most = [], self.job.global_batch // key[2]
        for number, companion in enumerate(self.job.companions):
            if number not in self._companions:
                self._companions[number] = LocalModels(companion.job, self.placements)
            models, samples = self._companions[number], companion.job.global_batch
            sizes = [s for s in list_divisors(samples) if s <= most and samples // s % dp == 0]
            if not sizes:
                raise PlanError(
                    f"the batch of {samples} samples of a further program cannot be divided by dp={dp}; expected a "
                    "multiple of dp"
                )
            parts = samples // sizes[-1]
            apart = key[4] and companion.job.expert_batch is not companion.job.batch
            whole = parts == dp and (apart or models.coupled)
            model, _ = models.find_model((*key[:2], parts, whole, apart, key[5]), parts // dp)
            found.append(CompanionModel(model, companion.weight, companion.inputs))
        return found

    def find_model(
        self, key: LocalKey, num_microbatches: int, known: ShardingSolution | None = None
    ) -> tuple[FoldedModel, ShardingSolution | None]:
        """Return two values: the model of one microbatch with the shapes of one rank of ``cp``, before it is sharded
        over ``tp``, and its sharding over ``cp`` (``None`` if ``cp`` is 1). ``key``: the cache key of the local model
        (the sharded graphs of one rank). ``num_microbatches``: the number of microbatches of a rank. ``known``: the
        sharding over ``cp`` if it was found before; ``None``: it is computed."""
        batch = self._select_batch_sharding(key)
        if key[2:5] not in self._splits:
            grouped = self.job.constraints.group_size is not None
            cut = (1, 1) if grouped else (key[2], num_microbatches)  # the model is of one group, a microbatch
            self._splits[key[2:5]] = split_batch(self.job.model, batch.blocks, batch.values, *cut)
        if key[1] == 1:
            return self._splits[key[2:5]], None
        found = self._find_context_model(self._splits[key[2:5]], key, known)
        return found.model, found.sharding

    def _find_context_model(self, model: FoldedModel, key: LocalKey, known: ShardingSolution | None) -> ContextModel:
        """Return ``model`` with its sequence sharded over the ranks of ``cp``. ``key``: the cache key of the local
        model (the sharded graphs of one rank). ``known``: the sharding over ``cp`` if it was found before; ``None``: it
        is computed.
        """
        tp, cp, *_ = key
        if key[:5] not in self._contexts:
            self._contexts[key[:5]] = shard_context(
                model,
                self._select_batch_sharding(key),
                cp,
                replace(self._build_tensor_costs(model, "cp", key), state_price=0.0, complete=True, tp=tp),
                tp=tp,
                algorithm=self.job.constraints.context,
                allowed=allowed_strategies(model, "rows", in_order=False) if self.job.experts else None,
                known=known,
            )
        return self._contexts[key[:5]]

    def _rounds(self, key: LocalKey) -> int:
        """Return by how many microbatches the costs that occur once per step are divided when shardings are compared.
        The number is the least that a rank of any candidate with the cache key ``key`` may have, so that the sharding
        does not depend on which of these candidates is solved first.

        The number is at least two, even if a rank may have one microbatch. With one microbatch, a gradient reduction
        inside the graph would seem as cheap as a reduction at the end of a step. But the latter is cheaper, because it
        can be merged with other reductions in a bucket."""
        tp, cp, parts, *_ = key
        return max(_LEAST_ROUNDS, parts * tp * cp // self.job.topology.num_devices)

    def _build_tensor_costs(self, model: FoldedModel, axis: str, key: LocalKey) -> TensorCosts:
        """Return the costs (seconds per microbatch) by which shardings of ``model`` over ``axis`` (``"tp"`` or
        ``"cp"``) are compared. ``key``: the cache key of the local model (the sharded graphs of one rank).
        """
        tp, cp, *_ = key
        job, seat = self.job, self.reference_seat(tp, cp)
        device, group, pinned = job.topology.types[seat.kind], dict(seat.groups)[axis], job.constraints
        return replace(
            divided_costs(model, axis, device, group, job.precision),
            train=job.train,
            num_microbatches=self._rounds(key),
            sequence_parallel=pinned.sequence_parallel if axis == "tp" else None,
            short_gradients=job.profile.short_gradients,
            operators=self._operators,
        )


def _rank_group_slowness(group: Group) -> tuple[float, ...]:
    """Return a sort key of ``group``, a group of ranks, that is greater for slower groups. It is a tuple of the
    negative bandwidth, the start-up time of an all-reduce, and the seconds of all collectives and of messages between
    the ranks."""
    times = [collective_time(op, num_bytes, group) for op in COLLECTIVES for num_bytes in _SENT]
    hops = [
        max(each.hops[k].time(num_bytes) for each in group.every) for k in range(len(group.hops)) for num_bytes in _SENT
    ]
    return (-group.bus_bandwidth, group.all_reduce_start, *times, *hops)


@dataclass
class LocalCosts:
    """Costs of local models (the sharded graphs of one rank), each computed when it is first needed. All methods take
    the job (the model, batch, cluster and constraints); jobs that share this object differ only in constraints on which
    these costs do not depend.
    """

    _calls: dict[LocalKey, CallCostCache] = field(default_factory=dict)
    _works: dict[SameObject[Block], CallWork] = field(default_factory=dict)
    _kinds: dict[LocalKey, StateKinds] = field(default_factory=dict)
    _states: dict[tuple[Any, ...], StateCosts] = field(default_factory=dict)

    def cache_call_costs(self, job: Job, key: LocalKey, local: LocalModel) -> CallCostCache:
        """Return the cache from which costs of calls of ``local``, the graphs of one rank, are taken. It stores costs
        for each kind of rank (device, speed and groups). ``job``: the model, batch, cluster and constraints. ``key``:
        the cache key of ``local``; calls with equal keys return the same cache."""
        if key not in self._calls:
            how = recompute_mode(job.constraints.recompute)
            self._calls[key] = CallCostCache(
                local.model.blocks,
                job.topology,
                job.train,
                lambda block, sent: find_recomputed_nodes(block, how, sent),
                self._works,
            )
        return self._calls[key]

    def compute_state_costs(
        self, job: Job, candidate: MeshCandidate, key: LocalKey, local: LocalModel
    ) -> dict[str, StateCost]:
        """Return the costs of parameters and buffers on one rank of ``candidate``: name -> cost. These costs do not
        depend on the placement (assignment of ranks to devices). ``job``: the model, batch, cluster and constraints.
        ``key``: the cache key of ``local``, the graphs of one rank. ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage."""
        held = (
            job.constraints.offload,
            candidate.dp > 1,
            candidate.kind,
            candidate.zero and (candidate.zero, candidate.sharers, candidate.expert_sharers),
            key,
        )
        if held not in self._states:
            if key not in self._kinds:
                layouts = local.sharding.states
                self._kinds[key] = kinds_of(local.model.states, layouts, job.experts, local.complete, local.left_whole)
            self._states[held] = state_costs(
                self._kinds[key],
                candidate.grid,
                optimizer=job.optimizer,
                train=job.train,
                sharded=job.dressed(PlacedMesh(job.topology, candidate.grid), candidate).sharded,
                short_gradients=job.profile.short_gradients,
                offload=job.constraints.offload or (),
            )
        return self._states[held]
