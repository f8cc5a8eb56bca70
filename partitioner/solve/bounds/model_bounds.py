"""Compute lower bounds on the time and memory of every plan of a candidate, from the graphs of the whole model.

The bounds assume that ``tp`` divides every operator's work and every tensor evenly and without collectives, and that
matrix products reach the efficiency of their whole shapes. This relaxed problem is called the relaxation. In it, the
time of a block is linear:

``launches + (work that grows with the batch) b / (B tp) + (traffic of weights) / tp``, for ``b`` samples of a batch of
``B``.

All candidates are therefore bounded at once, and figures that several candidates share are computed once.
:meth:`ModelBounds.refine` tightens the bound of one candidate: it also takes account of memory, of the cut into stages,
and of transfers between stages. Devices, links and groups are the best that any placement could have
(``partitioner/cost/step/relaxed_mesh.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property
from operator import attrgetter
from operator import mul as multiply
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.fp8 import find_scaling
from partitioner.cost.call.recomputation import allowed_recompute_mode
from partitioner.cost.call.states import StateCost, StateCosts, kinds_of, state_costs, sum_state_costs, update_time
from partitioner.cost.step.device_speeds import GroupSpeeds, least_forward_share, pool_of, work_and_speeds
from partitioner.cost.step.estimate import stage_problem
from partitioner.cost.step.offload import update_seconds
from partitioner.cost.step.relaxed_mesh import BestCaseMesh, best_type, build_best_case_mesh
from partitioner.passes.ir.model import FoldedModel
from partitioner.schedules.formulas import is_formula, is_plain, least_alone, least_fill
from partitioner.solve.bounds.block_work import BlockWork, DeviceKinds, Works, bound_busiest_rank
from partitioner.solve.bounds.planned_job import PlannedJob
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Gathers, LeastReduced, Seconds
from partitioner.solve.placement.placement import Placements
from partitioner.solve.stages.lower_bound import LeastTime, least_time
from partitioner.solve.stages.problem import StageProblem
from partitioner.solve.stages.split import check_room
from partitioner.topology.groups import num_communicators, stage_capacity
from partitioner.topology.hosts import BOUNDLESS
from partitioner.units import bytes_text

Key = Callable[[MeshCandidate], Hashable]

_WORK = "pp", "dp", "tp", "microbatch_size", "schedule", "cp", "ep", "virtual_stages"

_STATES = "pp", "dp", "tp", "cp", "ep", "etp", "zero", "dp_shard"
BY_WORK: Key = attrgetter(*_WORK)  # equal for candidates with the same computation and pipeline
BY_SHARDED_WORK: Key = attrgetter(*_WORK, "etp")  # equal for candidates that also have the same collectives
BY_BLOCKS: Key = attrgetter("tp", "cp", "ep", "etp", "microbatch_size")  # equal for candidates with the same graphs
BY_STATES: Key = attrgetter(*_STATES)  # equal for candidates that shard parameters and gradients in the same way
BY_SIZE: Key = attrgetter("dp", "microbatch_size")  # equal for candidates with equally many microbatches on a rank
BY_SHARES: Key = attrgetter("microbatch_size", *_STATES)  # as BY_SIZE, if faster ranks may compute more microbatches


def by_all(candidate: MeshCandidate) -> MeshCandidate:
    """Return ``candidate`` itself as a cache key, for results that no two candidates share. ``candidate``: mesh sizes,
    microbatch size, schedule and ZeRO stage."""
    return candidate


def map_by_candidate_key(
    candidates: Sequence[MeshCandidate], key: Key, find: Callable[[MeshCandidate], float]
) -> NDArray[np.float64]:
    """Return ``find(candidate)`` for each of ``candidates``, shape ``[candidates]``. The function is called only once
    for each distinct ``key(candidate)``, so its result must depend on the key only. ``candidates``: combinations of
    mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    keys = list(map(key, candidates))
    known = {which: find(candidate) for which, candidate in dict(zip(keys, candidates, strict=True)).items()}
    return np.array([known[which] for which in keys], dtype=np.float64)


def find_distinct_candidates(
    candidates: Sequence[MeshCandidate], key: Key
) -> tuple[list[MeshCandidate], NDArray[np.int64]]:
    """Return two values: a list with one candidate for each distinct value of ``key(candidate)``; and an integer array
    of shape ``[candidates]`` which gives, for each of ``candidates``, the index in that list of the candidate with an
    equal key. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    keys = list(map(key, candidates))
    one = dict(zip(keys, candidates, strict=True))
    places = dict(zip(one, range(len(one)), strict=True))
    return list(one.values()), np.array([places[which] for which in keys], dtype=np.int64)


Vector = NDArray[np.float64]


class BoundOptions(TypedDict, total=False):
    """Options for computing lower bounds on stage times. ``cutoff_s``: the computation may stop when the bound reaches
    this many seconds. ``quick``: whether to save time by examining only cuts whose stages are not much longer than an
    even share of the work; all other cuts then get a separate bound, which is less tight."""

    cutoff_s: float
    quick: bool


_ROUNDING = 1 - 1e-9


def _shard_state_cost(cost: StateCost, expert: bool, candidate: MeshCandidate) -> StateCost:
    """Return the bytes of a parameter or buffer on one rank under ``candidate`` if it is divided evenly over all ranks
    that may shard it. This is a lower bound on the mean over the ranks. ``cost``: the bytes of the whole parameter or
    buffer. ``expert``: whether it belongs to an expert, so that it may also be divided over ``ep``. ``candidate``: mesh
    sizes, microbatch size, schedule and ZeRO stage.
    """
    parts, sharers = (
        (candidate.expert_tp * candidate.ep, candidate.expert_sharers) if expert else (candidate.tp, candidate.sharers)
    )
    return cost.scaled(1 / parts).zero(candidate.zero, sharers)


class ModelBounds:
    """Computes lower bounds on the time and memory of mesh candidates for one model on one topology. The bounds are
    valid for every sharding, placement (assignment of ranks to devices) and cut into stages. ``job``: the model, batch,
    cluster and constraints. ``placements``: finds the placements of a mesh; ``None``: a new object is made for the
    job's topology. The attribute ``samples``: the number of samples in the model's graphs."""

    def __init__(self, job: PlannedJob, placements: Placements | None = None) -> None:
        self.model, self.topology, self.constraints, self.profile = (
            job.model,
            job.topology,
            job.constraints,
            job.profile,
        )
        self.global_batch, self.samples, self.train, self.experts = (
            job.global_batch,
            job.samples,
            job.train,
            job.experts,
        )
        self.placements = placements or Placements(job.topology, job.precision)
        paces, of_device = job.topology.paces
        types = [job.topology.paced_type(kind, speed) for kind, speed in paces]
        if job.profile.graphs != "none":  # recorded graphs need no dispatch
            types = [kind.model_copy(update={"dispatch": 0.0}) for kind in types]
        self.device = best_type(types)
        again = allowed_recompute_mode(job.constraints.recompute)
        how = (
            job.train,
            find_scaling(job.precision, job.profile),
            job.profile.fused_casts,
            again,
            job.profile.fused_kernels,
        )
        works = Works(job.model.blocks, self.device, types if len(types) > 1 else [], *how)
        self._kinds = DeviceKinds(
            works, self._calls_by_block, job.samples, np.bincount(of_device, minlength=len(paces))
        )
        self._by_rounds = BY_SHARES if self._kinds.differ else BY_SIZE
        self.states = state_costs(
            kinds_of(job.model.states, {}),
            {"dp": 2},
            optimizer=job.optimizer,
            train=job.train,
            short_gradients=job.profile.short_gradients,
            offload=job.constraints.offload or (),
        )
        self._calls: dict[tuple[int, ...], dict[str, CallCost]] = {}
        self._layer_bytes: dict[tuple[int, ...], float] = {}
        self._reduced = LeastReduced(job.topology, job.constraints, self.placements, self.device)
        self._shares: dict[tuple[Any, ...], StateCosts] = {}
        self._state_bytes: dict[tuple[Any, ...], float] = {}
        self._ends: dict[Hashable, tuple[float, float]] = {}  # of a step: update and gradient reduction
        self._machines: dict[tuple[int, ...], BestCaseMesh] = {}  # by grid
        self._capacities: dict[tuple[int, int], tuple[int, ...]] = {}  # by stages and number of communication groups

    def with_constraints(self, constraints: Constraints) -> ModelBounds:
        """Return a copy of these bounds for a job that differs only in its ``constraints``. The work of blocks (such as
        layers) is not computed again."""
        other = copy(self)
        other.constraints = constraints
        return other

    @property
    def blocks(self) -> dict[str, BlockWork]:
        """Return block name -> work (seconds and bytes) of one call of the block on the best device type. A block is a
        part of the model that may be called several times, such as a decoder layer."""
        return self._kinds.works.best

    @cached_property
    def _cuttable_blocks(self) -> list[str]:
        """Return, for each block call (such as a layer) that can be distributed over pipeline stages, the name of its
        block, in the order of the calls. Calls that run before the pipeline starts, and calls that every stage runs
        itself, are left out.
        """
        return [c.block for c in self.model.calls if not c.shared and not c.prologue]

    @cached_property
    def _calls_by_block(self) -> Counter[str]:
        """Return block name -> number of calls of the block (such as a layer) that can be distributed over pipeline
        stages. Two kinds of calls are not counted: those that run on all microbatches before the pipeline starts,
        because later calls need sums over the whole batch; and cheap calls, such as those for masks, that each stage
        runs itself."""
        return Counter(self._cuttable_blocks)

    def times(
        self,
        candidates: Sequence[MeshCandidate],
        *,
        shared: bool = False,
        known: Mapping[Hashable, Seconds] | None = None,
    ) -> Vector:
        """Return a lower bound in seconds on the step time of each of ``candidates``, shape ``[candidates]``.
        ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.

        It is the sum of three terms: the pipeline; the part of the gradient reduction that the backward cannot hide
        (with a single stage); and the optimizer's update. The busiest rank of the pipeline takes at least an even share
        of the work, and it runs whole calls of blocks (such as layers), which may take longer. ``shared``: whether to
        bound the busiest rank by the even share alone; the result is then lower, but a caller may add to it times that
        can fall on any rank. ``known``: lower bounds on the seconds of blocks for one microbatch, such as those of a
        sharding, as a dict: (``tp``, ``cp``, ``ep``, ``etp``, microbatch size) -> block name -> (forward seconds,
        backward seconds)."""
        # if devices differ, the ZeRO stage decides whether microbatches may be divided unevenly
        key = by_all if self._kinds.differ else BY_WORK if known is None else BY_SHARDED_WORK
        alike, places = find_distinct_candidates(candidates, key)
        often, fastest = list(self._calls_by_block.values()), self._kinds.fastest(alike)
        forward, backward = (seconds / fastest for seconds in self._kinds.seconds(self.blocks, alike))
        if known is not None:
            least = self._stack_block_seconds(alike, known)
            forward, backward = np.maximum(forward, least[0]), np.maximum(backward, least[1] * self.train)
        # summed in order, so that the last digit does not depend on the other candidates
        ahead, back = (sum(map(multiply, often, seconds), np.zeros(len(alike))) for seconds in (forward, backward))
        ranks = np.array([candidate.pp for candidate in alike], dtype=np.float64)
        busiest = np.zeros(len(alike)) if shared else bound_busiest_rank(often, forward + backward, ranks)
        pipelines, ahead, back = (
            s[places] for s in (self._bound_pipeline_seconds(alike, ahead, back, busiest), ahead, back)
        )
        bound = pipelines + self._bound_seconds_after_pipeline(candidates, back)
        if self._kinds.differ:
            hides = self._kinds.longest_backward(candidates)
            shared_out = self._shared_out(candidates, *self._kinds.of_each(candidates))
            bound = np.maximum(bound, shared_out + self._bound_seconds_after_pipeline(candidates, hides))
        found: Vector = np.maximum(bound, self._bound_drain_seconds(candidates, ahead, back)) * _ROUNDING
        return found

    def _stack_block_seconds(
        self, candidates: Sequence[MeshCandidate], known: Mapping[Hashable, Seconds]
    ) -> NDArray[np.float64]:
        """Return known lower bounds on the seconds of each block (such as a layer) in each of ``candidates``, for one
        microbatch, as an array of shape ``[2, blocks, candidates]``; 0 if no bound is known. The first dim is forward
        and backward; blocks are in the order in which the model first calls them. ``known``: (``tp``, ``cp``, ``ep``,
        ``etp``, microbatch size) -> block name -> (forward seconds, backward seconds). ``candidates``: combinations of
        mesh sizes, microbatch size, schedule and ZeRO stage."""
        distinct, places = find_distinct_candidates(candidates, BY_BLOCKS)
        every = [known.get(BY_BLOCKS(candidate), {}) for candidate in distinct]
        columns = [[seconds.get(block, (0.0, 0.0)) for block in self._calls_by_block] for seconds in every]
        table = np.array(columns, dtype=np.float64).reshape(len(distinct), len(self._calls_by_block), 2)
        found: NDArray[np.float64] = table[places].transpose(2, 1, 0)
        return found

    def _bound_pipeline_seconds(
        self, candidates: Sequence[MeshCandidate], ahead: Vector, back: Vector, busiest: Vector
    ) -> Vector:
        """Return a lower bound in seconds on the pipeline in a step of each candidate, shape ``[candidates]``, without
        gradient reduction and update. The busiest rank takes at least an even share of the forward and backward
        seconds.

        ``ahead``, ``back``: forward and backward seconds of one microbatch through all block calls (such as layers),
        shape ``[candidates]``. ``busiest``: another lower bound on the seconds of one microbatch on the busiest rank,
        shape ``[candidates]``. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        m = map_by_candidate_key(candidates, self._by_rounds, self.rounds)
        pp = np.array([p.pp for p in candidates], dtype=np.float64)
        formula = np.array([is_formula(p.schedule, p.pp, self.train) for p in candidates])
        fill = np.array([self._bound_fill_and_drain(p) for p in candidates])
        whole = ahead + back
        slowest = np.maximum(whole / pp, busiest)
        filled = m * whole / pp + (1 - 1 / pp) * (fill[:, 0] * ahead + fill[:, 1] * back)
        alone = ahead + back * np.array([least_alone(p.schedule) for p in candidates])
        return np.where(formula, (m - 1) * slowest + whole, np.maximum.reduce([filled, m * slowest, alone]))

    def _shared_out(
        self, candidates: Sequence[MeshCandidate], forward: NDArray[np.float64], backward: NDArray[np.float64]
    ) -> Vector:
        """Return a lower bound in seconds on the pipelines in a step of each candidate, shape ``[candidates]``, for
        devices that differ in speed. It holds for any division of the work among the devices. Gradient reduction and
        update are not included. ``forward``, ``backward``: the seconds of each block (such as a layer) for one
        microbatch on each device type, shape ``[kinds, blocks, candidates]``. ``candidates``: combinations of mesh
        sizes, microbatch size, schedule and ZeRO stage."""
        found, often = np.zeros(len(candidates)), list(self._calls_by_block.values())
        for place, candidate in enumerate(candidates):
            ahead, both = forward[..., place], forward[..., place] + backward[..., place]
            work, speeds = work_and_speeds(both, often)
            pool = self._group_device_speeds(candidate, speeds)
            of_all, plain = (
                self.rounds(candidate) * pool.pipelines,
                is_formula(candidate.schedule, candidate.pp, self.train),
            )
            found[place] = pool.least(work, of_all, plain=plain)
            in_order = is_plain(candidate.schedule, candidate.virtual_stages) and not self.constraints.overlap_steps
            if in_order and not plain:
                share, less = least_forward_share(ahead, both, often)
                found[place] = max(found[place], pool.least(work, of_all, plain=False, ahead=share) - less)
        return found

    def _group_device_speeds(self, candidate: MeshCandidate, speeds: Vector) -> GroupSpeeds:
        """Return upper bounds on the speeds with which groups of ranks do the work of ``candidate``: the distinct
        speeds, fastest first, the number of groups of each, and the number of pipelines that all groups form. A group
        consists of the ranks that wait for each other in every microbatch: the ranks of ``tp`` and ``cp``, or all ranks
        of a stage. ``speeds``: speed of each device type relative to the best one. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage."""
        apart = self.may_differ(candidate)
        size = candidate.tp * candidate.cp if apart else self.topology.num_devices // candidate.pp
        return pool_of(speeds, self._kinds.counts, size, candidate.dp if apart else 1)

    def may_differ(self, candidate: MeshCandidate) -> bool:
        """Return whether ``candidate`` may give the ranks of ``dp`` different numbers of microbatches, more to faster
        devices. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        return self._kinds.differ and candidate.replicas_run_independently(self.model.updates)

    def rounds(self, candidate: MeshCandidate) -> float:
        """Return the number of microbatches that one rank of ``candidate`` computes in a step. If faster ranks may
        compute more than slower ones, return the mean over the ranks of ``dp``, which is at most the greatest number.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        of_all = candidate.parts(self.global_batch) / candidate.dp
        return of_all if self.may_differ(candidate) else candidate.num_microbatches(self.global_batch)

    def _bound_fill_and_drain(self, candidate: MeshCandidate) -> tuple[float, float]:
        """Return a lower bound on the time in which the pipeline of ``candidate`` fills and drains, as two factors
        ``(a, b)``: the bound is ``a`` times the forward seconds of one microbatch through the whole model, plus ``b``
        times the backward seconds. If ranks may have different numbers of microbatches and the step time has no
        formula, both factors are 0. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if self.may_differ(candidate) and not is_formula(candidate.schedule, candidate.pp, self.train):
            return 0.0, 0.0
        m = candidate.num_microbatches(self.global_batch)
        return least_fill(candidate.schedule, candidate.pp, m, candidate.virtual_stages, self.constraints.overlap_steps)

    def _bound_seconds_after_pipeline(self, candidates: Sequence[MeshCandidate], backward: Vector) -> Vector:
        """Return a lower bound in seconds on the time after the pipeline, shape ``[candidates]``: the optimizer's
        update and, with a single stage, the part of the gradient reduction that the last backward cannot hide.
        ``backward``: for each candidate, the backward seconds that can hide the reduction. ``candidates``: combinations
        of mesh sizes, microbatch size, schedule and ZeRO stage."""
        if not self.train:
            return np.zeros(len(candidates))
        ends = np.array([self._bound_end_seconds(p) for p in candidates], dtype=np.float64)
        exposed = np.maximum(0.0, ends[:, 1] - backward)
        return ends[:, 0] + np.where([p.pp == 1 for p in candidates], exposed, 0.0)

    def _bound_end_seconds(self, candidate: MeshCandidate) -> tuple[float, float]:
        """Return two lower bounds in seconds for ``candidate``: on the optimizer's update, and on the gradient
        reduction of all stages, one after the other. With several stages, the second is 0 if all placements
        (assignments of ranks to devices) are known, because other bounds are tighter there. Results are cached.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        key = BY_STATES(candidate)
        if key not in self._ends:
            sharers = candidate.sharers if candidate.zero else 1
            update_s = self._update_lower_bound_s / (candidate.pp * candidate.tp * candidate.ep * sharers)
            is_known = candidate.pp > 1 and self.placements.complete(candidate.grid)
            self._ends[key] = update_s, 0.0 if is_known else self._bound_reduction_seconds(candidate)
        return self._ends[key]

    def _bound_drain_seconds(self, candidates: Sequence[MeshCandidate], ahead: Vector, back: Vector) -> Vector:
        """Return a lower bound in seconds on the step of each candidate, shape ``[candidates]``: the mean over the
        stages of their computation, plus the part of their gradient reduction that the last backward cannot hide. A
        stage can begin to reduce its gradients at the start of its last backward. The gradient reduction is taken as 0
        with a single stage, with several virtual stages on a rank, or if all placements (assignments of ranks to
        devices) are known; other bounds are tighter there.

        ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage. ``ahead``, ``back``:
        forward and backward seconds of one microbatch through all block calls (such as layers), shape ``[candidates]``.
        """
        is_reduced = [self.train and p.pp > 1 and p.virtual_stages == 1 for p in candidates]
        reduced = np.array(
            [self._bound_end_seconds(p)[1] if asked else 0.0 for p, asked in zip(candidates, is_reduced, strict=True)]
        )
        exposed = np.maximum(0.0, reduced - back)
        busy: Vector = map_by_candidate_key(candidates, self._by_rounds, self.rounds) * (ahead + back) + exposed
        return busy / np.array([p.pp for p in candidates], dtype=np.float64)

    @cached_property
    def _update_lower_bound_s(self) -> float:
        """Return a lower bound in seconds on the optimizer's update of all parameters of the model by a single device,
        with the fastest host of the topology. Callers divide it by the number of ranks that share the update.
        """
        states = sum_state_costs(self.states.values())
        hosts = (share or BOUNDLESS for share in self.topology.different_host_shares)
        return update_time(states, self.device) + min(update_seconds(states, host) for host in hosts)

    def _bound_reduction_seconds(self, candidate: MeshCandidate) -> float:
        """Return a lower bound in seconds on reducing the gradients of all stages of ``candidate``, one stage after the
        other. If ``ep`` > 1, gradients of experts are left out. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage."""
        experts = self.experts if candidate.ep > 1 else ()
        states = self.share_of_states
        return self._reduced.seconds(candidate, lambda: (c for n, c in states(candidate).items() if n not in experts))

    def share_of_states(self, candidate: MeshCandidate) -> StateCosts:
        """Return lower bounds on the bytes of parameters and buffers on one rank of ``candidate``: name -> cost.
        Parameters and buffers are assumed to be sharded evenly. ``candidate``: mesh sizes, microbatch size, schedule
        and ZeRO stage.
        """
        key = candidate.states_kind
        if key not in self._shares:
            experts = self.experts
            alike = {(id(cost), name in experts): (cost, name in experts) for name, cost in self.states.items()}
            shares = {which: _shard_state_cost(*state, candidate) for which, state in alike.items()}
            self._shares[key] = StateCosts((n, shares[id(cost), n in experts]) for n, cost in self.states.items())
        return self._shares[key]

    @cached_property
    def _placed_states(self) -> list[tuple[StateCost, bool]]:
        """Return the bytes of all parameters and buffers that are read by block calls (such as layers) which can be
        distributed over stages, as pairs (cost, whether it belongs to experts). Costs that differ only in their bytes
        are added up to one, so that there are few pairs."""
        names = dict.fromkeys(name for c in self.model.calls if not c.shared and not c.prologue for name in c.states)
        return [
            (cost, expert)
            for expert in (False, True)
            for cost in sum_state_costs(self.states[name] for name in names if (name in self.experts) == expert)
        ]

    def state_bytes(self, candidate: MeshCandidate) -> float:
        """Return the bytes of parameters, gradients and optimizer states on a rank of ``candidate`` if all stages have
        equally many. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key = candidate.states_kind
        if key not in self._state_bytes:
            self._state_bytes[key] = sum(_shard_state_cost(*state, candidate).total for state in self._placed_states)
        return self._state_bytes[key] / candidate.pp

    def check_states(self, candidate: MeshCandidate) -> None:
        """Raise :class:`CapacityError` if the parameters, gradients and optimizer states of ``candidate`` alone exceed
        the memory of all ranks together. The check is quick. The error states the mean shortage of a rank; a single
        stage may lack more bytes. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        needed, room = self.state_bytes(candidate), sum(self._find_capacity(candidate)) / candidate.pp
        check_room(f"parameters, gradients and optimizer states take {bytes_text(needed)} on average", needed, room)

    def capacity(self, candidate: MeshCandidate) -> int:
        """Return the usable bytes of the largest device that a rank of ``candidate`` has on any placement (assignment
        of ranks to devices). ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        return max(self._find_capacity(candidate))

    def _find_capacity(self, candidate: MeshCandidate) -> tuple[int, ...]:
        """Return, for each pipeline stage of ``candidate``, the usable bytes of the largest device that a rank of the
        stage has on any placement (assignment of ranks to devices). If all devices are equal, no placement is
        enumerated. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        if not self._equal_rooms:
            return self._find_best_case_mesh(candidate).capacity
        grid = candidate.grid
        key = grid["pp"], num_communicators(grid)
        if key not in self._capacities:
            self._capacities[key] = stage_capacity(self.topology, grid)
        return self._capacities[key]

    @cached_property
    def _equal_rooms(self) -> bool:
        """Return whether the usable memory in bytes is equal on all devices of the topology."""
        kinds = {self.topology.types[kind].communicator for kind, _ in self.topology.paces[0]}
        return len(kinds) == 1 and bool(self.topology.usable.min() == self.topology.usable.max())

    def speeds(self, candidate: MeshCandidate) -> tuple[float, float]:
        """Return two numbers: upper bounds on the speed of the fastest pipeline stage of ``candidate``, and on the
        summed speed of all its stages. A stage on devices of the best type has speed 1. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        if not self._kinds.differ:
            return 1.0, float(candidate.pp)
        pool = self._group_device_speeds(candidate, self._kinds.speeds([candidate])[:, 0])
        return pool.fastest, pool.together / pool.pipelines

    def _find_best_case_mesh(self, candidate: MeshCandidate) -> BestCaseMesh:
        """Return a mesh with the sizes of ``candidate`` and, for each stage and group of ranks, the largest memory and
        the fastest links of any placement (assignment of ranks to devices). It serves lower bounds and is cached by
        mesh sizes. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key = tuple(candidate.grid.values())
        if key not in self._machines:
            known = self.placements.complete(candidate.grid)
            candidates = self.placements.candidates(candidate.grid) if known else None
            self._machines[key] = build_best_case_mesh(self.topology, candidate.grid, candidates)
        return self._machines[key]

    def refine(self, candidate: MeshCandidate, floor: BlockLowerBound | None = None) -> float:
        """Return a lower bound in seconds on the step time of ``candidate``. Unlike the quicker bound of :meth:`times`,
        it considers memory and how block calls (such as layers) can be cut into stages, so it is at least as tight.
        ``floor``: known lower bounds on the seconds of each block, such as those of an actual sharding; ``None``: the
        bounds of the unsharded blocks are used. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.

        Raises :class:`CapacityError` or :class:`PlanError` if no plan can exist."""
        bound = float(self.times([candidate])[0])
        if not is_plain(candidate.schedule, candidate.virtual_stages):  # a rank's calls are not consecutive
            return bound
        return max(bound, self.staged([candidate], self.relaxed(candidate, floor)))

    def relaxed(
        self,
        candidate: MeshCandidate,
        floor: BlockLowerBound | None = None,
        speed: float | None = None,
        gathers: Gathers | None = None,
        **how: Unpack[BoundOptions],
    ) -> LeastTime:
        """Return lower bounds on the seconds that one microbatch takes on the stages of ``candidate``. The bounds
        assume that ``tp`` divides all work and tensors evenly and without collectives, so they are valid for every
        sharding.

        ``floor``: known lower bounds on the seconds of each block (such as a layer); ``None``: only the bounds of the
        unsharded blocks are known. ``speed``: the speed of the fastest stage relative to the best device type;
        ``None``: it is computed for the candidate. ``gathers``: gives the seconds of the candidate's ZeRO-3
        collectives; ``None``: they are ignored. ``how``: the options ``cutoff_s`` (stop when the bound reaches this
        many seconds) and ``quick`` (skip cuts with very long stages). ``candidate``: mesh sizes, microbatch size,
        schedule and ZeRO stage. Raises :class:`CapacityError` or :class:`PlanError` if no plan can exist."""
        fastest = self.speeds(candidate)[0] if speed is None else speed
        calls = {name: cost.paced(1 / fastest) for name, cost in self.calls(candidate).items()}
        if floor:
            calls |= {n: calls[n].at_least(*floor.seconds[n]) for n in calls.keys() & floor.seconds.keys()}
        if gathers is not None:
            calls = gathers.add_to_costs(calls, candidate)
        return self.least(candidate, self.model, calls, self.share_of_states(candidate), **how)

    def calls(self, candidate: MeshCandidate) -> dict[str, CallCost]:
        """Return lower bounds on the costs of calls with one microbatch of ``candidate``, on the best device type,
        without collectives: block name -> cost of one call of the block. A block is a repeated piece of the model, such
        as a decoder layer. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        key = (candidate.microbatch_size, candidate.tp, candidate.cp, candidate.ep)
        if key not in self._calls:
            share, several = candidate.microbatch_size / self.samples / candidate.cp, candidate.microbatch_size > 1
            rest = share, candidate.tp, several, candidate.ep, candidate.cp
            self._calls[key] = {n: block.at(*rest) for n, block in self.blocks.items()}
        return self._calls[key]

    def check_microbatch(self, candidate: MeshCandidate) -> None:
        """Raise :class:`CapacityError` if one block call (such as a layer) with one microbatch of ``candidate`` needs
        more memory than any device has. The check is quick. ``candidate``: mesh sizes, microbatch size, schedule and
        ZeRO stage.
        """
        needed = self.layer_bytes(candidate)
        check_room(f"one layer of one microbatch takes {bytes_text(needed)}", needed, self.capacity(candidate))

    def layer_bytes(self, candidate: MeshCandidate) -> float:
        """Return a lower bound on the bytes that a rank of ``candidate`` needs while one microbatch runs through the
        block call (such as a layer) that needs most. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.
        """
        kept = "activations" not in (self.constraints.offload or ())
        key = (kept, candidate.microbatch_size, candidate.tp, candidate.cp, candidate.ep)
        if key not in self._layer_bytes:
            calls = [self.calls(candidate)[name] for name in dict.fromkeys(self._cuttable_blocks)]
            self._layer_bytes[key] = max((c.working_bytes + kept * c.saved_bytes for c in calls), default=0.0)
        return self._layer_bytes[key]

    def least(
        self,
        candidate: MeshCandidate,
        model: FoldedModel,
        calls: Mapping[str, CallCost],
        states: Mapping[str, StateCost],
        **how: Unpack[BoundOptions],
    ) -> LeastTime:
        """Return lower bounds on the seconds that one microbatch takes on the stages of ``candidate``, over all cuts of
        the block calls (such as layers) into stages. Every stage is given the greatest memory that it has on any
        placement (assignment of ranks to devices).

        ``model``: the graphs of one rank. ``calls``: block name -> cost of a call. ``states``: name -> bytes of a
        parameter or buffer on a rank. ``how``: the options ``cutoff_s`` (stop when the bound reaches this many seconds)
        and ``quick`` (skip cuts with very long stages). ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage. Raises :class:`CapacityError` or :class:`PlanError` if no plan can exist."""
        return least_time(self.problem(candidate, model, calls, states), **how)

    def problem(
        self,
        candidate: MeshCandidate,
        model: FoldedModel,
        calls: Mapping[str, CallCost],
        states: Mapping[str, StateCost],
        ranks: Sequence[int] = (),
    ) -> StageProblem:
        """Return the problem of cutting the block calls of ``model`` into the candidate's stages, if every stage has
        the greatest memory of any placement (assignment of ranks to devices). ``candidate``: mesh sizes, microbatch
        size, schedule and ZeRO stage. ``model``: the model as calls of blocks; equal layers share one block. ``calls``:
        block name -> cost of a call. ``states``: name -> bytes of a parameter or buffer on a rank. ``ranks``: the rank
        of each virtual stage if ranks have several stages; otherwise empty."""
        return stage_problem(
            model,
            calls,
            states,
            self._find_best_case_mesh(candidate),
            num_microbatches=candidate.num_microbatches(self.global_batch),
            microbatch_size=candidate.microbatch_size,
            schedule=candidate.schedule,
            ranks=ranks,
            constraints=self.constraints,
            profile=self.profile,
            train=self.train,
        )

    def staged(self, candidates: Sequence[MeshCandidate], least: LeastTime) -> float:
        """Return a lower bound in seconds on the step of every one of ``candidates``, which differ only in their ZeRO
        stage and therefore share one bound on their stage times. The result adds up lower bounds on the pipeline, which
        follows from ``least``, on the gradient reduction and on the optimizer's update.

        ``least``: lower bounds on the stage times, in seconds per microbatch. ``candidates``: combinations of mesh
        sizes, microbatch size, schedule and ZeRO stage.
        """
        candidate, m = candidates[0], candidates[0].num_microbatches(self.global_batch)
        pipeline = least.pipeline_s(candidate.schedule, candidate.pp, m, self.constraints.overlap_steps, self.train)
        hides = least.backward_s if least.is_seen else math.inf
        return (
            pipeline + float(self._bound_seconds_after_pipeline(candidates, np.full(len(candidates), hides)).min())
        ) * _ROUNDING

    def followed(self, candidate: MeshCandidate, pipeline_s: float) -> float:
        """Return a lower bound in seconds on a step of ``candidate``, given that its pipeline takes at least
        ``pipeline_s`` seconds. The bound adds the optimizer's update and the part of the gradient reduction that can
        only follow the pipeline. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        return (
            pipeline_s + float(self._bound_seconds_after_pipeline([candidate], np.array([math.inf]))[0])
        ) * _ROUNDING

    def forward_s(self, candidate: MeshCandidate, floor: BlockLowerBound | None) -> float:
        """Return a lower bound in seconds on the forward of one microbatch of ``candidate`` through all stages, on the
        fastest devices. ``floor``: known lower bounds on the seconds of each block (such as a layer); for each block,
        the tighter of this bound and the bound of the unsharded block is used. ``None``: no bounds are known.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        fastest, calls, known = self.speeds(candidate)[0], self.calls(candidate), floor.seconds if floor else {}
        return sum(
            n * max(calls[b].forward_s / fastest, known.get(b, (0.0,))[0]) for b, n in self._calls_by_block.items()
        )

    def with_floor(self, candidates: Sequence[MeshCandidate], floor: BlockLowerBound, *, shared: bool = False) -> float:
        """Return a lower bound in seconds on the step of every one of ``candidates``, which differ only in their ZeRO
        stage. ``floor``: lower bounds on the seconds of each block (such as a layer) of the candidates. ``candidates``:
        combinations of mesh sizes, microbatch size, schedule and ZeRO stage.

        ``shared``: whether to bound the busiest rank by an even share of the work alone, and to ignore that each block
        call runs as a whole on one rank. The result is then lower, but a caller may add to it times that can fall on
        any rank."""
        often = self._calls_by_block
        ahead = sum(n * floor.seconds[block][0] for block, n in often.items())
        back = sum(n * floor.seconds[block][1] for block, n in often.items()) if self.train else 0.0
        busiest = 0.0
        # under ZeRO-3, the seconds of a block are the mean of its calls, which wait for different collectives
        if often and not shared and candidates[0].zero < 3:
            each = np.array([[sum(floor.seconds[block][: 1 + self.train])] for block in often])
            busiest = float(bound_busiest_rank(list(often.values()), each, np.array([float(candidates[0].pp)]))[0])
        # assume that the whole backward hides reductions
        after = float(self._bound_seconds_after_pipeline(candidates, np.full(len(candidates), ahead + back)).min())
        of_point = [np.array([seconds]) for seconds in (ahead, back, busiest)]
        least = min(candidates, key=self.rounds)
        bound = after + float(self._bound_pipeline_seconds([least], *of_point)[0])
        if floor.of_kind:  # the slowest device type may hide most of the reduction
            each = np.array([[of[block] for block in often] for of in floor.of_kind]).transpose(2, 0, 1)
            each[1] *= self.train
            apart = list({self.may_differ(candidate): candidate for candidate in candidates}.values())
            hides = float((each.sum(axis=0) @ np.array(list(often.values()))).max())
            after = float(self._bound_seconds_after_pipeline(candidates, np.full(len(candidates), hides)).min())
            bound = max(bound, after + min(self._shared_out(apart, *np.stack([each] * len(apart), axis=-1))))
        return max(bound, float(self._bound_drain_seconds(candidates, *of_point[:2]).min())) * _ROUNDING
