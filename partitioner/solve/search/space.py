"""Define the search space: which combinations of mesh, microbatch size, schedule and ZeRO stage are candidates.

``why_none`` explains why a batch, a mesh or a schedule leaves no candidate. ``find_baseline_candidates`` chooses the
candidates that every report shows for comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partitioner.candidate import MeshCandidate
from partitioner.constraints import OF_ONE_STAGE, Constraints
from partitioner.errors import ConstraintError, PlanError
from partitioner.execution_profile import OURS
from partitioner.schedules.csv_table import ScheduleTable, table_of
from partitioner.schedules.registry import SCHEDULES, SEARCHED, chunks_of, schedule_name
from partitioner.topology.hosts import can_offload
from partitioner.topology.topology import Topology
from partitioner.units import format_plural, format_ranges, list_divisors

if TYPE_CHECKING:  # reports read plans without PyTorch
    import torch

    from partitioner.solve.evaluate.job import Job


def explain_uneven_batch(space: SearchSpace, dp: int) -> str:
    """Return a sentence for the user that says that the global batch of the search space ``space`` (cluster, batch,
    constraints and sizes of the model) does not split over ``dp`` ranks.
    """
    size = space.constraints.group_size
    if space.further_samples and space.splits_first(dp):
        uneven = format_ranges([samples for samples in space.further_samples if samples % dp])
        return f"the batch of {uneven} samples of a further program of the plan is not divisible by dp={dp}"
    groups = "" if size is None else f", in groups of {size} samples that interact (couple='microbatch'),"
    return f"the global batch of {space.global_batch}{groups} is not divisible by dp={dp}"


def why_none(space: SearchSpace) -> PlanError | ConstraintError:
    """Return the error to raise if the search space ``space`` (cluster, batch, constraints and sizes of the model) has
    no candidate. The error message lists the values that the user fixed, and the conditions that the sizes of the mesh
    have to satisfy."""
    asked = space.constraints
    if None not in (asked.pp, asked.dp, asked.tp) and math.prod(asked.pinned.values()) != space.world_size:
        return ConstraintError(asked.too_few(space.world_size))
    schedule = space.constraints.schedule
    size = space.constraints.group_size
    batch = f"global batch of {space.global_batch}" if size is None else f"{space.units} groups of {size} samples"
    fixed: dict[str, Any] = {
        "ep": space.constraints.ep,
        "etp": space.constraints.etp,
        "schedule": schedule and schedule_name(schedule),
        "v": space.constraints.virtual_stages,
        "dp_shard": space.constraints.dp_shard,
    }
    fixed = {**space.constraints.pinned, **{k: v for k, v in fixed.items() if v is not None}}
    pinned = ", ".join(f"{k}={v}" for k, v in fixed.items())
    return PlanError(
        f"no mesh of {format_plural(space.world_size, 'rank')}{' with ' + pinned if pinned else ''} fits: dp "
        f"must {_describe_batch_limit(space)} the {batch}{_describe_further_limits(space)}, "
        f"{_describe_pipeline_limit(space)} (the number of block calls, such as layers), tp must divide a dim "
        f"of a weight{_describe_tensor_limit(space)}"
        + (f", dp is {len(asked.data_shares)}, as many as data_shares" if asked.data_shares else "")
        + (", dp_shard must divide dp" if space.constraints.dp_shard else "")
        + (", ep x etp must divide dp x cp x tp" if space.constraints.ep or space.constraints.etp else "")
        + (_describe_allowed_rank_counts(schedule) if schedule else "")
    )


def _describe_batch_limit(space: SearchSpace) -> str:
    """Return the part of an error message that says which sizes of ``dp`` the global batch allows. ``space``: the
    search space (cluster, batch, constraints and sizes of the model).
    """
    return "divide" if space.even or space.experts else "be at most"


def _describe_further_limits(space: SearchSpace) -> str:
    """Return the part of an error message that says which sizes of ``dp`` and ``cp`` the further programs of the plan
    (such as an evaluation) allow; empty if there are none. ``space``: the search space (cluster, batch, constraints and
    sizes of the model).
    """
    samples, positions = format_ranges(space.further_samples), format_ranges(space.further_positions)
    said = f" and the batches of {samples} samples of further programs" if samples else ""
    shared = positions and space.length and space.constraints.cp is None
    return said + (f", 2 x cp must divide their {positions} positions unless cp is 1" if shared else "")


def _describe_pipeline_limit(space: SearchSpace) -> str:
    """Return the part of an error message that says which numbers of pipeline stages the search space ``space``
    (cluster, batch, constraints and sizes of the model) allows.
    """
    pinned = space.constraints
    if (pinned.virtual_stages or 1) > 1:
        return f"pp is more than 1 and pp x virtual_stages at most {space.num_calls}"
    if pinned.schedule not in (None, *OF_ONE_STAGE) and table_of(pinned.schedule) is None:
        return f"pp is more than 1, since {pinned.schedule} is for a pipeline, and at most {space.num_calls}"
    return f"pp is at most {space.num_calls}"


def _describe_tensor_limit(space: SearchSpace) -> str:
    """Return the part of an error message that says how many ranks ``tp`` may have in the search space ``space``
    (cluster, batch, constraints and sizes of the model); empty if every number is allowed.
    """
    forbids = space.constraints.tp is None and space.widest < space.world_size
    return f" and be at most {space.widest}" if forbids else ""


def _describe_allowed_rank_counts(schedule: str | ScheduleTable) -> str:
    """Return the part of an error message that says for which numbers of ranks, microbatches or virtual stages
    ``schedule`` is made; empty if it is not made for particular numbers."""
    table = table_of(schedule)
    if table is not None:
        return (
            f"; the schedule is written for pp={len(table.own.orders)}, {table.num_microbatches} microbatches and "
            f"{len(table.own.ranks)} virtual stages"
        )
    chunks = SCHEDULES[str(schedule)].chunks
    return f"; the schedule has {chunks} virtual stages on each rank" if chunks is not None else ""


Times = Callable[[Sequence["MeshCandidate"]], NDArray[np.float64]]  # lower bounds in seconds on many candidates

_LEAST_TOKENS = 8192  # of a sequence on a rank; shorter pieces are tried only where an estimate is better

_FEWEST_TOKENS = 2048  # least tokens there, and if the batch cannot be divided over all ranks
_CHOICES = {"zb-1p": (1, 2, 4)}  # numbers of virtual stages to try for schedules that allow any
_UNEVEN = 1.1  # the largest virtual stage may have this many times an even share of the layers
_MORE_CHUNKS = 1.8  # least ratio of two numbers of virtual stages that are tried
_MOST_CHUNKS = 16

_MOST_RUNS = 4e7  # most effort without a better plan, in runs of calls on virtual stages: about half a minute

_WIDEST = 8  # greatest tp that is searched if no node has more devices

_PART_GROWS = 4  # ratio of consecutive sizes of dp_shard that are tried

_BESIDE = {"zb-1p": (2,), "zb-v": (2,)}  # tried after the search, as is "interleaved"
_OVERLAPPING = {"zb-2p": (1,)}  # tried in addition if steps overlap: the next step fills its idle time


@dataclass(frozen=True)
class SearchSpace:
    """The data from which the candidates of a search are listed.

    - ``global_batch``: number of samples of a step. ``length``: tokens of a sample; 0 if the model has no sequence that
      ranks of ``cp`` can share. ``tokens``: tokens of a sample by which the throughput is computed; unlike ``length``,
      it is also known for models whose attention was not recognized; 0 if the model reads no token ids.
    - ``num_calls``: number of block calls that can be distributed over pipeline stages. ``repeated``: how many of these
      calls are of blocks that are called several times, such as decoder layers; 0 stands for all.
    - ``dims``: all dim sizes of the parameters. ``tp`` must divide one of them.
    - ``experts``: ``ep`` must divide this number; 0 for a model without experts. ``any_etp``: whether a single expert
      may be sharded over other numbers of ranks than 1 and ``tp``.
    - ``compiled``: whether steps are compiled by default and not by a constraint, so that the user could also choose
      replayed steps (CUDA graphs).
    - ``even``: whether all ranks of ``dp`` must have equally many microbatches.
    - ``further_samples``, ``further_positions``: for the further programs of the plan, such as an evaluation, the
      numbers of samples in a batch and of positions in a sample. ``dp`` must divide all of these numbers of samples,
      and ``2 * cp`` all of these numbers of positions.

    ``topology``: the cluster. ``constraints``: the choices that the user fixed. ``train``: whether plans are for
    training."""

    topology: Topology
    global_batch: int
    num_calls: int
    dims: frozenset[int]
    constraints: Constraints = field(default_factory=Constraints)
    train: bool = True
    experts: int = 0
    length: int = 0
    repeated: int = 0
    even: bool = False
    any_etp: bool = False
    further_samples: tuple[int, ...] = ()
    further_positions: tuple[int, ...] = ()
    tokens: int = 0
    compiled: bool = False

    @property
    def world_size(self) -> int:
        return self.topology.num_devices

    @property
    def units(self) -> int:
        """Return how many equal pieces of the batch can be distributed over ``dp``: the number of groups if samples
        interact within groups, otherwise the number of samples.
        """
        return self.global_batch // (self.constraints.group_size or 1)

    def splits(self, dp: int) -> bool:
        """Return whether the batches of all programs of the plan can be distributed over ``dp`` ranks. All batches must
        divide evenly, with one exception: if ranks may have different numbers of microbatches of the main program, such
        as training, it is enough that each rank gets at least one of its samples (or groups of interacting samples)."""
        return self.splits_first(dp) and all(samples % dp == 0 for samples in self.further_samples)

    def splits_evenly(self, dp: int) -> bool:
        """Return whether the batches of all programs can be distributed evenly over ``dp`` ranks."""
        return self.units % dp == 0 and self.splits(dp)

    def splits_first(self, dp: int) -> bool:
        """Return whether the batch of the main program of the plan (such as training) can be distributed over ``dp``
        ranks. If ranks may have different numbers of microbatches, it is enough that each rank gets at least one sample
        (or group of interacting samples). Otherwise the batch must divide evenly."""
        return self.units % dp == 0 or (not self.even and dp <= self.units)

    def splits_positions(self, cp: int) -> bool:
        """Return whether the samples of all programs of the plan can be cut into ``2 * cp`` pieces of equal length, two
        for each of ``cp`` ranks."""
        return cp == 1 or all(positions % (2 * cp) == 0 for positions in (self.length, *self.further_positions))

    @property
    def widest(self) -> int:
        """Return the greatest number of ranks along the axis ``tp`` that the search tries if the user does not
        fix it.
        """
        return widest_searched(self.topology, self.constraints)

    def sizes(self, dp: int) -> list[int]:
        """Return the possible microbatch sizes, in samples, with ``dp`` data-parallel ranks."""
        pinned = self.constraints
        if self.units % dp and pinned.microbatch_size is None:
            return [size for size in list_divisors(self.global_batch) if self.global_batch // size >= dp]
        sizes = list_divisors(self.global_batch // dp) if self.units % dp == 0 else []
        given = pinned.microbatch_size
        if given is None or given in sizes:
            return sizes if given is None else [given]
        shared = not self.even and self.global_batch % given == 0 and self.global_batch // given >= dp
        return [given] if shared else []

    def allows(self, candidate: MeshCandidate) -> bool:
        """Return whether the microbatches of ``candidate`` can be distributed over its ranks of ``dp``, evenly or in
        the numbers that the constraints fix. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        given = self.constraints.data_shares
        if given is not None and (len(given), sum(given)) != (candidate.dp, candidate.parts(self.global_batch)):
            return False
        even = (
            self.global_batch % (candidate.dp * candidate.microbatch_size) == 0
            if given is None
            else len(set(given)) == 1
        )
        return even or (not self.even and candidate.shares_out)


def build_search_space(job: Job) -> SearchSpace:
    """Return the search space of ``job`` (model, batch, cluster and constraints), from which its candidates
    (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) are listed.
    """
    from partitioner.cost.call.operators import is_attention  # imports PyTorch, which a reader of plans does not need

    model = job.model
    attends = any(is_attention(node) for block in model.blocks.values() for node in block.graph.nodes)
    # an image has channels where a text has tokens
    lengths = [i.spec.shape[1] for i in model.inputs if 1 < len(i.spec.shape) < 4]
    ids = [i.spec.shape[1] for i in model.inputs if len(i.spec.shape) == 2 and _is_integer(i.spec.dtype)]
    length = max(lengths, default=0) if attends else 0  # without attention there is no sequence to spread
    often = Counter(call.block for call in model.calls if not call.shared and not call.prologue)
    return SearchSpace(
        job.topology,
        job.global_batch,
        often.total(),
        frozenset(dim for s in model.states.values() if s.kind == "parameter" for dim in s.spec.shape),
        job.constraints,
        job.train,
        experts=math.gcd(*job.experts.values()),
        length=length,
        repeated=sum(times for times in often.values() if times > 1),
        even=bool(model.updates or job.further_samples),
        any_etp=job.profile.expert_tensor == "any",
        compiled=job.constraints.execution is None and job.profile.name == OURS.name and job.profile.fused_kernels,
        further_samples=job.further_samples,
        further_positions=job.further_positions,
        tokens=length or max(ids, default=0),
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or str(dtype) == "torch.bool")


def list_candidates(space: SearchSpace) -> list[MeshCandidate]:
    """Return all mesh candidates that the constraints allow, combinations of mesh sizes, microbatch size, schedule and
    ZeRO stage. ``space``: the devices, the batch, the constraints and the sizes of the model.

    ``tp`` divides a dim of some weight. Unless it is fixed, it is at most 8, or the number of devices of the largest
    node if that is more. If the user requests a larger search by the constraint ``ahead``, the devices of two nodes
    count. The microbatch size divides the batch, and every rank of ``dp`` has at least one microbatch. Every stage has
    at least one block call (such as a layer). Features that can be estimated but not executed are included only if the
    constraints ask for them. Raises :class:`ConstraintError` for constraints that cannot hold and :class:`PlanError` if
    no candidate is left.
    """
    pinned = space.constraints
    pinned.check(space.world_size, space.global_batch, space.dims)
    pinned.check_experts(space.experts)
    pinned.check_sharding()
    table = None if pinned.schedule is None else table_of(pinned.schedule)
    found = [
        candidate
        for pp, dp, tp, cp in list_mesh_shapes(space)
        for ep, etp in _expert_axes(space, dp * cp * tp, tp)
        for schedule, virtual in _list_schedules(space, pp)
        for zero, shard in _list_zero_options(space, dp, cp)
        for size in space.sizes(dp)
        if space.allows(candidate := MeshCandidate(pp, dp, tp, size, schedule, cp, ep, etp, zero, virtual, shard))
        and _is_for(table, pp, candidate.num_microbatches(space.global_batch))
    ]
    if not found:
        raise why_none(space)
    return found


def list_hybrid_candidates(space: SearchSpace, candidate: MeshCandidate) -> list[MeshCandidate]:
    """Return variants of ``candidate`` under hybrid sharding, in which parameters, gradients and optimizer states are
    sharded over only ``dp_shard`` of the ``dp`` ranks. The list is empty on a single node, or if the constraints fix
    ZeRO or ``dp_shard``.

    ``dp_shard`` is about the number of ranks that a node holds, or four times that, and so on. With a small number,
    weights are gathered over few nodes, which has a shorter latency; with a large one, less memory is needed.
    ``space``: the search space (cluster, batch, constraints and sizes of the model). ``candidate``: mesh sizes,
    microbatch size, schedule and ZeRO stage.
    """
    pinned = space.constraints
    several = space.topology.num_nodes > 1
    if pinned.hierarchical or not (space.train and several and pinned.zero is None and pinned.dp_shard is None):
        return []
    size, parts = max(1, space.topology.devices_per_node // (candidate.tp * candidate.cp)), dict[int, None]()
    even = list_divisors(candidate.dp)
    while size < candidate.dp:
        parts[max(d for d in even if d <= size)] = None
        size *= _PART_GROWS
    whole = pinned.model_copy(
        update={"grad_compression": None}
    )  # compression may be possible with dp_shard though not without
    stages = [
        stage for stage, _ in _list_zero_options(replace(space, constraints=whole), candidate.dp, candidate.cp) if stage
    ]
    return [candidate.sharing(stage, part) for stage in stages for part in parts if part > 1]


def list_mesh_shapes(space: SearchSpace) -> list[tuple[int, int, int, int]]:
    """Return all tuples of sizes (pp, dp, tp, cp) of the mesh axes that the constraints in ``space`` allow for the
    devices of its cluster. ``space``: cluster, batch, the user's constraints and sizes of the model.
    """
    pinned, world = space.constraints, space.world_size
    found = []
    for tp in list_divisors(world):
        if not (pinned.tp in (None, tp) and _tensor_axis_fits(space, tp)):
            continue
        for pp in list_divisors(world // tp):
            if pinned.pp not in (None, pp) or pp > space.num_calls:
                continue
            for cp in _context_axes(space, world // tp // pp):
                dp = world // tp // pp // cp
                if pinned.dp in (None, dp) and space.splits(dp):
                    found.append((pp, dp, tp, cp))
    return found


def _context_axes(space: SearchSpace, room: int) -> list[int]:
    """Return the sizes of ``cp`` to try if ``room`` ranks are left for ``dp`` and ``cp`` together, so that each size
    divides ``room``.

    Each rank gets two pieces of the sequence, one from each end, so that all ranks do equal work in causal attention.
    Normally a rank has at least 8192 tokens; fewer are allowed if the batch would not divide evenly otherwise.
    ``space``: the search space (cluster, batch, constraints and sizes of the model).
    """
    pinned, length = space.constraints, space.length
    if pinned.cp is not None:
        return [pinned.cp] if room % pinned.cp == 0 else []
    if None not in (pinned.pp, pinned.dp, pinned.tp):  # the other axes determine cp
        left = room // (pinned.dp or 1)
        return [left] if left == 1 or (length and space.splits_positions(left)) else []
    even = [cp for cp in list_divisors(room) if space.splits_positions(cp)]
    usual = [cp for cp in even if cp == 1 or length >= _LEAST_TOKENS * cp]
    if any(space.splits_evenly(room // cp) for cp in usual):
        return usual
    fewer = [cp for cp in even if length >= _FEWEST_TOKENS * cp and space.splits_evenly(room // cp)][:1]
    return list(dict.fromkeys((*(cp for cp in usual if space.splits(room // cp)), *fewer)))


def _expert_axes(space: SearchSpace, room: int, tp: int) -> list[tuple[int, int]]:
    """Return the pairs (ep, etp) to try. ``ep`` is the number of ranks over which the experts are distributed, ``etp``
    the number of ranks over which each single expert is sharded (0: as many as ``tp``). ``room``: the number of ranks
    of ``dp``, ``cp`` and ``tp`` together. ``tp``: number of ranks of tensor parallelism. ``space``: the search space
    (cluster, batch, constraints and sizes of the model)."""
    pinned = space.constraints
    if pinned.etp not in (None, 1, tp) and not space.any_etp:
        return []
    shards = [pinned.etp if pinned.etp not in (None, tp) else 0]
    if pinned.etp is None and space.experts and tp > 1:
        shards = [*(list_divisors(tp)[:-1] if pinned.ahead and space.any_etp else [1]), 0]
    if pinned.ep is not None:
        sizes = [pinned.ep]
    else:
        sizes = [ep for ep in list_divisors(space.experts) if ep <= room] if space.experts else [1]
    pairs = [(ep, etp) for ep in sizes for etp in shards if ep > 1 or etp == shards[-1]]
    return [(ep, etp) for ep, etp in pairs if room % (ep * (etp or tp)) == 0]


def _list_schedules(space: SearchSpace, pp: int) -> list[tuple[str | ScheduleTable, int]]:
    """Return pairs (schedule, number of virtual stages on a rank) to try with ``pp`` pipeline ranks. GPipe takes as
    long as 1F1B and at least as much memory, so it is included only if it is fixed. ``space``: the search space
    (cluster, batch, constraints and sizes of the model).
    """
    pinned = space.constraints
    table = None if pinned.schedule is None else table_of(pinned.schedule)
    if table is not None:
        return [(table, chunks_of(table) or 1)] if len(table.own.ranks) <= space.num_calls else []
    if pp == 1:
        if (pinned.virtual_stages or 1) > 1 or pinned.schedule not in (None, *OF_ONE_STAGE):
            return []  # virtual stages on one rank would be one stage, and other schedules need several ranks
        return [(str(pinned.schedule or "1f1b"), 1)]
    names = [str(pinned.schedule)] if pinned.schedule else _list_searched_schedules(space)
    found: list[tuple[str | ScheduleTable, int]] = []
    for name in names:
        chunks = SCHEDULES[name].chunks
        if chunks is not None:
            choices = [chunks]
        elif pinned.virtual_stages is not None:
            choices = [pinned.virtual_stages]
        else:
            choices = _chunk_choices(space, pp, name)
        found += [(name, v) for v in choices if v * pp <= space.num_calls and pinned.virtual_stages in (None, v)]
    return found


def _list_searched_schedules(space: SearchSpace) -> list[str]:
    """Return the names of the schedules to try if the user's constraints fix no schedule. ``space``: the search space
    (cluster, batch, constraints and sizes of the model)."""
    pinned = space.constraints
    if not space.train:
        return ["interleaved" if (pinned.virtual_stages or 1) > 1 else "1f1b"]
    if (pinned.virtual_stages or 1) > 1 and not pinned.ahead:
        return [name for name, schedule in SCHEDULES.items() if schedule.chunks in (None, pinned.virtual_stages)]
    return [name for name in SCHEDULES if name != "gpipe"] if pinned.ahead else list(SEARCHED)


def _chunk_choices(space: SearchSpace, pp: int, schedule: str) -> list[int]:
    """Return the numbers of virtual stages on a rank to try in the search space ``space`` (cluster, batch, constraints
    and sizes of the model) for ``schedule``, a schedule that allows any number. ``pp``: number of pipeline ranks.
    """
    if schedule == "interleaved":
        return even_chunks(space, pp)
    pinned = space.constraints
    return list((_CHOICES if pinned.schedule or pinned.ahead else SEARCHED)[schedule])


def even_chunks(space: SearchSpace, pp: int) -> list[int]:
    """Return the numbers of virtual stages on a rank to try, ascending: numbers with which all stages have equally many
    layers, and numbers with which the stages have nearly equally many. If several of these numbers are close to each
    other, only one of them is returned. If there are no such numbers, return ``[2]``. ``pp``: number of pipeline ranks.
    ``space``: the search space (cluster, batch, constraints and sizes of the model)."""
    layers, found = space.repeated or space.num_calls, list[int]()
    several = range(2, min(_MOST_CHUNKS, space.num_calls // pp) + 1)
    largest = {chunks: -(-layers // (chunks * pp)) * chunks * pp for chunks in several}
    for most in (layers, _UNEVEN * layers):
        for chunks in several:
            apart = (max(chunks, other) >= _MORE_CHUNKS * min(chunks, other) for other in found)
            if largest[chunks] <= most and all(apart):
                found.append(chunks)
    return sorted(found) or [2]


def several_stages(space: SearchSpace, candidate: MeshCandidate) -> list[MeshCandidate]:
    """Return variants of ``candidate`` under schedules with several virtual stages on a rank. Schedules that are only
    as fast as another schedule but need more memory are left out. If consecutive steps may overlap, a schedule whose
    idle time the next step fills is included too. ``space``: the search space (cluster, batch, constraints and sizes of
    the model). ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
    choices = {"interleaved": even_chunks(space, candidate.pp), **_BESIDE}
    choices |= _OVERLAPPING if space.constraints.overlap_steps else {}
    found = [(name, v) for name, several in choices.items() for v in several if v * candidate.pp <= space.num_calls]
    return [replace(candidate, schedule=name, virtual_stages=v) for name, v in found]


def estimate_interleaved_effort(space: SearchSpace, candidate: MeshCandidate) -> float:
    """Return the effort of cutting the model into the virtual stages of ``candidate``, as a fraction of the effort that
    the search may spend on such candidates in total without finding a better plan. ``space``: the search space
    (cluster, batch, constraints and sizes of the model). ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
    stage."""
    return candidate.pp * candidate.virtual_stages * space.num_calls**2 / _MOST_RUNS


def list_short_context_candidates(space: SearchSpace, sharing: Collection[tuple[int, int]]) -> list[MeshCandidate]:
    """Return 1F1B candidates in which more ranks share a sequence than in the candidates of the search: each rank has
    fewer than 8,192 of its tokens, but at least 2,048. Sizes that the user fixed stay. ``sharing``: the ways to shard
    optimizer states, gradients and parameters to include if the constraints allow them, as pairs (ZeRO stage, number of
    ``dp`` ranks; 0: all). ``space``: the search space (cluster, batch, constraints and sizes of the model)."""
    pinned = space.constraints
    if pinned.cp is not None or space.length < 2 * _FEWEST_TOKENS:
        return []
    known = set(list_mesh_shapes(space))
    sizes = [cp for cp in list_divisors(space.length // _FEWEST_TOKENS) if cp > 1 and space.splits_positions(cp)]
    found = []
    for cp in sizes:
        finer = replace(space, constraints=pinned.model_copy(update={"cp": cp}))
        for pp, dp, tp, _ in list_mesh_shapes(finer):
            if (pp, dp, tp, cp) in known:
                continue
            options = [way for way in _list_zero_options(space, dp, cp) if way in sharing]
            found += [
                candidate
                for ep, etp in _expert_axes(space, dp * cp * tp, tp)
                for zero, shard in options
                for size in space.sizes(dp)
                if space.allows(candidate := MeshCandidate(pp, dp, tp, size, "1f1b", cp, ep, etp, zero, 1, shard))
            ]
    return found


def _is_for(table: ScheduleTable | None, pp: int, num_microbatches: int) -> bool:
    """Return whether ``table``, a schedule that the user wrote, is for ``pp`` pipeline ranks and ``num_microbatches``
    microbatches. Return ``True`` if ``table`` is ``None``."""
    return table is None or (len(table.own.orders), table.num_microbatches) == (pp, num_microbatches)


def _list_zero_options(space: SearchSpace, dp: int, cp: int) -> list[tuple[int, int]]:
    """Return the ways of ZeRO sharding to try, as pairs: the ZeRO stage (0: no ZeRO), and the number of ``dp`` ranks
    over which parameters, gradients or optimizer states are sharded (0: all of them). The list is empty if the
    constraints allow no way. ``dp``, ``cp``: sizes of these mesh axes. ``space``: the search space (cluster, batch,
    constraints and sizes of the model)."""
    pinned = space.constraints
    if pinned.dp_shard is not None and dp % pinned.dp_shard:
        return []
    if pinned.zero is not None:
        stages = [pinned.zero]
    elif pinned.dp_shard is not None:
        stages = [1, 2, 3] if space.train else [3]
    else:
        stages = [0, 1, 2, 3] if space.train and dp * cp > 1 else [0]
        if "parameters" in (pinned.offload or ()):
            stages = [stage for stage in stages if stage in (0, 3)]  # the other stages keep parameters whole
    if pinned.hierarchical:
        stages = [0]
    part = pinned.dp_shard if pinned.dp_shard not in (None, dp) else 0
    found = [(stage, part or 0 if stage else 0) for stage in stages]
    return [pair for pair in found if pinned.sends_compressed(*pair)]


def beyond_the_bound(space: SearchSpace) -> dict[str, str]:
    """Return the constraints that the lower bound of the plan's certificate does not cover completely: name of the
    constraint -> sentence that says which of its values were not tried. If the user fixes the constraint to such a
    value, the plan may be faster than the plan that the search returned.

    ``space``: the search space (cluster, batch, constraints and sizes of the model).
    """
    pinned, topology = space.constraints, space.topology
    several, found = topology.num_nodes > 1, dict[str, str]()
    is_fixed = math.prod(pinned.pinned.values()) == space.world_size  # no ranks are left for another axis
    has_replicas = any(dp > 1 for _, dp, *_ in list_mesh_shapes(space)) or space.experts > 0
    if pinned.offload is None and can_offload(topology):
        found["offload"] = "Offload to host memory was not tried, because plans without it fit."
    if space.compiled:
        found["execution"] = (
            'CUDA graphs (execution="graph") were not tried; they save the time in which the host launches operators.'
        )
    if space.world_size == 1:
        return found
    if space.train and pinned.schedule is None and pinned.virtual_stages is None and pinned.pp != 1:
        covered = " and ".join(map(str.upper, SEARCHED))
        schedules = (
            f"The proof covers the pipeline schedules {covered} with one stage on each rank. "
            f"Schedules with several stages on a rank ({', '.join(['interleaved', *_BESIDE])} with 2 or more) were "
            "tried only where an estimate promised a faster step."
        )
        found |= {"schedule": schedules, "virtual_stages": schedules}
    if space.length and pinned.cp is None and not is_fixed:
        found["cp"] = _describe_tried_context(space)
    if pinned.tp is None and space.widest < space.world_size and not is_fixed:
        found["tp"] = f"Tensor parallelism over more than {space.widest} ranks was not tried."
    may_shard = pinned.tp is not None or not is_fixed
    if space.train and pinned.sequence_parallel is None and pinned.recompute != "none" and pinned.tp != 1 and may_shard:
        found["sequence_parallel"] = (
            "Each layer has the sharding over tp that takes the least time if nothing is recomputed. Where activations "
            "are recomputed, another one may be faster. If the plan recomputes, sequence_parallel=True and False were "
            "tried for its layout; for other layouts they were not."
        )
    if several and has_replicas and space.train and pinned.zero != 0 and pinned.dp_shard is None:
        found["dp_shard"] = _describe_tried_parts(space)
    if len(topology.paces[0]) > 1 and pinned.data_shares is None:
        found["data_shares"] = (
            "Unequal numbers of microbatches (data_shares) were tried only near the ratio of the ranks' speeds."
        )
    if several and has_replicas and space.train and pinned.hierarchical is None and not topology.single_ring:
        found["hierarchical"] = "Hierarchical gradient reduction (hierarchical=True) was not tried."
    if space.experts and pinned.etp is None and space.any_etp and not pinned.ahead:
        found["etp"] = "Sharding an expert over other numbers of ranks than 1 or tp was not tried."
    return found


def _describe_tried_context(space: SearchSpace) -> str:
    """Return a sentence that says which sizes of ``cp`` are tried in the search space ``space`` (cluster, batch,
    constraints and sizes of the model), and why not others.
    """
    tried = sorted({cp for *_, cp in list_mesh_shapes(space) if cp > 1})
    usual = [cp for cp in tried if space.length >= _LEAST_TOKENS * cp]
    rare = [cp for cp in tried if cp not in usual]
    sizes = (
        f"over {format_ranges(usual)} ranks" if usual else "",
        f"over {format_ranges(rare)} ranks where the batch cannot be divided over the ranks without context parallelism"
        if rare
        else "",
    )
    least = f"a rank would have fewer than {_LEAST_TOKENS:,} tokens of a sample"
    if tried:
        others = "Elsewhere" if rare else "Over other numbers of ranks"
        uneven = " or not two equal pieces" if usual else ""
        return (
            f"Context parallelism was tried {' and '.join(filter(None, sizes))}. {others} it was tried only where an "
            f"estimate promised a faster step, because {least}{uneven}."
        )
    if space.length < 2 * _FEWEST_TOKENS or space.length % 4:
        return (
            "Context parallelism was not tried, because ranks would have too few tokens of a sample, or unequal "
            "numbers of them."
        )
    return f"Context parallelism was tried only where an estimate promised a faster step, because {least}."


def _describe_tried_parts(space: SearchSpace) -> str:
    """Return a sentence for the certificate of a plan that says which values of ``dp_shard`` are tried in the search
    space ``space``: the numbers of ``dp`` ranks over which parameters, gradients and optimizer states are sharded."""
    what = "Sharding states over a part of the data-parallel ranks"
    if space.constraints.zero is not None:
        return f"{what} was not tried, because you fixed the ZeRO stage."
    if space.constraints.hierarchical:
        return f"{what} was not tried, because you fixed hierarchical=True."
    return (
        f"{what} was tried over about as many ranks as a node has, and over {_PART_GROWS} times, "
        f"{_PART_GROWS**2} times and so on as many; other sizes were not tried."
    )


def _tensor_axis_fits(space: SearchSpace, tp: int) -> bool:
    if tp == 1 or space.constraints.tp == tp:
        return True
    return tp <= space.widest and any(size % tp == 0 for size in space.dims)


def widest_searched(topology: Topology, pinned: Constraints) -> int:
    """Return the greatest size of the axis ``tp`` that is searched if the user does not fix it: 8 or the number of
    devices of the largest node of ``topology``, whichever is more. If the user requests a larger search (the constraint
    ``ahead`` in ``pinned``), the devices of two nodes are counted instead of one."""
    return max(_WIDEST, max(group.devices for group in topology.nodes) * (2 if pinned.ahead else 1))


def find_baseline_candidates(
    space: SearchSpace, candidates: Sequence[MeshCandidate], times: Times, fits: Callable[[MeshCandidate], bool]
) -> dict[str, MeshCandidate | None]:
    """Return the candidates that every report shows, by name: ``"data parallel"`` (plain data parallelism) and
    ``"megatron"`` (the textbook layout of Megatron-LM). A value is ``None`` if ``candidates`` has no such layout.

    The layout of Megatron-LM has ``tp`` as wide as a node, as few stages as fit in memory, and data parallelism over
    the other ranks (Narayanan et al. 2021, section 3). The microbatch size is the one with the least bound. ``times``:
    function that returns lower bounds in seconds on candidates. ``fits``: whether a candidate fits in memory.
    ``space``: the search space (cluster, batch, constraints and sizes of the model). ``candidates``: combinations of
    mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    plain = [p for p in candidates if p.pp == p.tp == p.cp == 1 and not p.zero]
    inside = space.topology.devices_per_node if space.topology.num_nodes > 1 else space.world_size
    widths = {p.tp for p in candidates}
    widest = max([tp for tp in widths if inside % tp == 0] or [*widths, 1])
    plainest = min((p.zero for p in candidates), default=0)
    megatron = [p for p in candidates if (p.tp, p.zero) == (widest, plainest)]
    depths = sorted({p.pp for p in megatron})
    for pp in depths:
        of_depth = [p for p in megatron if p.pp == pp]
        if any(fits(p) for p in of_depth) or pp == depths[-1]:
            megatron = of_depth
            break
    return {
        "data parallel": find_least_bound_candidate(plain, times, fits),
        "megatron": find_least_bound_candidate(megatron, times, fits),
    }


def left_out(space: SearchSpace, candidates: Sequence[MeshCandidate]) -> dict[MeshCandidate, str]:
    """Return a dict with one entry for the report: the candidate of plain data parallelism over all ranks -> reason why
    the search does not consider it. The dict is empty if this candidate is among ``candidates``, the candidates of the
    search. ``space``: the search space (cluster, batch, constraints and sizes of the model)."""
    if any(p.pp == p.tp == p.cp == 1 and not p.zero for p in candidates):
        return {}
    size = space.constraints.group_size or 1
    candidate = MeshCandidate(1, space.world_size, 1, size, space.constraints.schedule or "1f1b")
    if not space.splits(space.world_size):
        return {candidate: explain_uneven_batch(space, space.world_size)}
    return {candidate: "excluded by the constraints"}


def find_least_bound_candidate(
    choices: Sequence[MeshCandidate], times: Times, fits: Callable[[MeshCandidate], bool]
) -> MeshCandidate | None:
    """Return the candidate of ``choices`` with the least lower bound on its step time among those that fit in memory,
    or among all if none fits. Return ``None`` if ``choices`` is empty. ``times``: function that returns lower bounds in
    seconds on candidates. ``fits``: whether a candidate fits in memory. ``choices``: combinations of mesh sizes,
    microbatch size, schedule and ZeRO stage.
    """
    if not choices:
        return None
    ranked = [choices[int(i)] for i in np.argsort(times(choices), kind="stable")]
    return next(filter(fits, ranked), ranked[0])
