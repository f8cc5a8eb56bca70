"""Estimate of one training step: time and its parts, the share of peak FLOP/s, and the peak memory of every stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat

from partitioner.constraints import Constraints, pinned_calls
from partitioner.constraints import Recompute as Asked
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.collectives import collective_time, link_of_parts
from partitioner.cost.call.states import StateCost, StateCosts, sum_state_costs, update_time
from partitioner.cost.call.transient_bytes import NOTHING_SENT, Scattering, gathered_beside, passing_bytes
from partitioner.cost.step.gradient_reduction import (
    GradientReduction,
    by_owner,
    compute_gradient_reduction,
    last_levels,
    list_reduction_schemes,
    reducer_of,
)
from partitioner.cost.step.offload import add_offload_transfers, exchanged_seconds, update_seconds
from partitioner.cost.step.pipeline_tail import tied_seconds
from partitioner.cost.step.placed_mesh import HERE, PlacedMesh
from partitioner.cost.step.relaxed_mesh import BestCaseMesh
from partitioner.cost.step.schedule_ends import RankEnds, seconds_added
from partitioner.cost.step.step_ends import gathered_seconds, reduction_delays, stage_buckets
from partitioner.emit.buckets import ReductionScheme
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.ir.model import FoldedModel
from partitioner.plan import Estimate, StageEstimate
from partitioner.schedules.core_contention import NodeCores, VirtualStageTime, seconds_in_turns
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.formulas import is_split, pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.solve.stages.problem import Pace, Recompute, StageCall, StageProblem
from partitioner.solve.stages.split import StagePlan, StageSplit
from partitioner.solve.stages.virtual_stages import phases_of
from partitioner.topology.group import select_slowest_group
from partitioner.topology.groups import stage_ranks
from partitioner.topology.hardware import Link
from partitioner.topology.hosts import BOUNDLESS


def stage_estimates(
    problem: StageProblem, split: StageSplit, names: Sequence[Sequence[str]], held: Sequence[Sequence[StateCost]]
) -> tuple[StageEstimate, ...]:
    """Calls, seconds and peak memory by component of each stage; the components add up to the peak of one rank.

    ``names``: the states of each stage. ``held``: their costs.
    """
    m = problem.num_microbatches
    made = []
    for number, stage in enumerate(split.stages):
        slim = problem.slim if stage.selective and problem.slim is not None else problem
        calls = [slim.calls[place] for place in stage.places]
        coming = sum(problem.late_bytes.get(name, 0.0) for name in names[number]) if problem.late_bytes else 0.0
        made.append(
            StageEstimate(
                first=calls[0].path,
                last=calls[-1].path,
                num_calls=len(calls),
                recomputed=stage.recompute,
                selective=stage.selective,
                in_part=sum(
                    bool(call.cost.selective_bytes)
                    for run in stage.runs
                    if run.selective
                    for call in problem.calls[run.start + run.recompute : run.stop]
                ),
                host=round(_host_bytes(stage, calls, held[number])),
                disk=round(sum(cost.on_disk for cost in held[number])),
                forward_s=m * stage.forward_s,
                backward_s=m * (stage.backward_s + stage.recompute_s),
                memory=_estimate_peak_memory(problem, stage, number, calls, held[number], coming),
            )
        )
    return tuple(made)


def _host_bytes(stage: StagePlan, calls: Sequence[StageCall], held: Sequence[StateCost]) -> float:
    """Bytes of a rank in host memory: activations of all microbatches in flight, and states."""
    kept = sum(call.cost.host_bytes for call in calls)
    flying = max(run.in_flight for run in stage.runs)
    return flying * kept + sum(cost.in_host for cost in held)


def _estimate_peak_memory(
    problem: StageProblem,
    stage: StagePlan,
    number: int,
    calls: Sequence[StageCall],
    held: Sequence[StateCost],
    coming: float,
) -> dict[str, int]:
    """Peak memory in bytes by component, with the sums of ``StageTables.memory``; the remainder is communication
    buffers.

    ``coming``: bytes of gradients that are not allocated before their first reduction.
    """
    parts = {kind: sum(cost.kept[kind] for cost in held) for kind in ("parameters", "gradients", "optimizer")}
    parts["residuals"] = sum(cost.lost for cost in held)
    again = problem.train and stage.recompute > 0
    first, last, beside = calls[0].at_ends, calls[-1].at_ends, problem.overhead.working_bytes
    working = max(last.last + first.lingering if first.lingering else 0.0, *(call.working_bytes for call in calls))
    parts["working"] = working + beside
    if problem.train:
        inputs: dict[str, float] = {}
        for call in calls:
            kept = zip(call.inputs, call.cost.input_bytes, call.cost.saved_inputs, strict=True)
            inputs |= {name: size for name, size, saved in kept if saved or again}
        if stage.parts:  # the microbatches at the peak: the remainder of the memory
            parts["recomputed"] = max(call.cost.saved_bytes for call in calls) if again else 0.0
            parts["saved"] = max(0.0, stage.memory - sum(map(round, parts.values())))
        else:
            whole = sum(c.cost.saved_bytes for c in calls[stage.recompute :]) + sum(inputs.values())
            half = sum(c.cost.carried_bytes for c in calls) + sum(inputs.values())

            def flying(gone: float) -> float:
                """Saved bytes of all microbatches in flight, of which one has already freed ``gone`` bytes."""
                return max(w * whole + h * half - min(w, 1) * gone for w, h in problem.held(number))

            moments = [(working, flying(0.0), 0.0), (first.closing, flying(whole), 0.0)]
            if again:
                made = max(calls, key=lambda c: c.working_bytes + c.cost.saved_bytes)
                moments.append((made.working_bytes, flying(0.0), made.cost.saved_bytes))
            fullest = max(moments, key=sum)
            parts |= {"working": fullest[0] + beside, "saved": fullest[1], "recomputed": fullest[2]}
    parts["gradients"] -= min(coming, max(0.0, sum(parts.values()) - stage.memory))  # not there at the fullest moment
    sizes = {kind: round(size) for kind, size in parts.items()}
    sizes["buffers"] = max(0, stage.memory - sum(sizes.values()))
    return {kind: size for kind, size in sizes.items() if size}


def stage_problem(
    model: FoldedModel,
    costs: Mapping[str, CallCost],
    states: Mapping[str, StateCost],
    machine: PlacedMesh | BestCaseMesh,
    *,
    num_microbatches: int,
    microbatch_size: int = 1,
    schedule: str | ScheduleTable = "1f1b",
    ranks: Sequence[int] = (),
    constraints: Constraints | None = None,
    profile: ExecutionProfile = OURS,
    train: bool = True,
    costs_by_stage: Sequence[Mapping[str, CallCost]] = (),
    scattering: Scattering = NOTHING_SENT,
) -> StageProblem:
    """The calls of ``model`` as a problem of stages; ``costs`` by block, ``states`` by name.

    ``costs_by_stage``: what blocks take on each stage's devices; empty: the same on all.
    Calls that are shared or a prologue run on every stage that reads them, and are charged to all of them. ``ranks``:
    of each virtual stage, which are then the problem's stages; empty: the ranks are. ``scattering``: gradients on their
    way to their shards.
    """
    constraints = constraints or Constraints()
    parts = profile.sends == "parts" and constraints.sequence_parallel is False  # else values are sharded anyway
    placed = [(i, call) for i, call in enumerate(model.calls) if not call.shared and not call.prologue]
    offload = constraints.offload or ()
    often = Counter(call.block for _, call in placed)
    everywhere = [call for call in model.calls if call.shared or call.prologue]
    pp = machine.mesh.get("pp", 1)
    at = ranks or range(pp)
    once = train and num_microbatches == 1 and not ranks  # gradients' pieces are not there from a backward before
    by_stage = [costs_by_stage[rank] for rank in at] if costs_by_stage else []
    overhead, of_states = _sum_call_costs([costs[call.block] for call in everywhere]), StateCosts.of(states)
    several = num_microbatches > 1 or bool(ranks)
    passing = [
        passing_bytes(costs[call.block], call.states, of_states, scattering, call is placed[-1][1], several)
        for _, call in placed
    ]
    beside = gathered_beside([own for own, _ in passing], in_turns=bool(ranks))
    calls = tuple(
        StageCall(call.path, costs[call.block], call.inputs, call.outputs, call.states, i, gathered, at_ends)
        for (i, call), gathered, (_, at_ends) in zip(placed, beside, passing, strict=True)
    )
    paces = _build_stage_paces(by_stage, [c.block for _, c in placed], [c.block for c in everywhere])
    if ranks and overhead.forward_total_s:
        paces = _once_a_rank(paces or (Pace(tuple(call.cost for call in calls), overhead),) * len(at), ranks)
    if offload:
        hosts = [machine.host(rank) or BOUNDLESS for rank in at]  # whether there are hosts is asked before
        alike = (Pace(tuple(call.cost for call in calls), overhead),) * len(at)
        calls, paces = add_offload_transfers(calls, paces or alike, hosts, offload, states, train)
    return StageProblem(
        calls=calls,
        num_stages=len(at),
        num_microbatches=num_microbatches,
        capacity=tuple(machine.capacity[rank] for rank in at),
        links=_find_stage_links(machine, ranks, parts),
        state_bytes=of_states.totals,
        late_bytes=of_states.late if once else {},
        local=frozenset([i.value for i in model.inputs] + [v for call in everywhere for v in call.outputs]),
        schedule=schedule if isinstance(schedule, str) else schedule.name,
        chunks=len(at) // pp,
        bubble=(pp - 1) / max(1, len(at) - 1) if ranks else 1.0,
        repeated=tuple(often[call.block] > 1 for _, call in placed),
        recompute=_in_part(constraints.recompute),
        pinned=pinned_calls(constraints.stage_of, [call.path for _, call in placed], len(at)),
        overhead=replace(overhead, working_bytes=overhead.working_bytes + scattering.num_bytes),
        paces=paces,
        microbatch_size=microbatch_size,
        tp=machine.mesh.get("tp", 1),
        dp=machine.mesh.get("dp", 1),
        train=train,
        overlap_steps=constraints.overlap_steps,
        total_bytes=sum(float(model.values[v].nbytes) for c in model.calls if c.prologue for v in c.outputs),
    )


def _in_part(asked: Asked | None) -> Recompute | None:
    """For the stages what is made again in part is one and the same way: their costs say what."""
    return "selective" if asked == "scores" or asked == "alternate" else asked


def _find_stage_links(machine: PlacedMesh | BestCaseMesh, ranks: Sequence[int], parts: bool) -> tuple[Link, ...]:
    """From each of a problem's stages to the next; ``parts``: for what the ranks of ``tp`` send in parts."""
    links = tuple(machine.link(*pair) for pair in pairwise(ranks)) if ranks else machine.links
    tp = machine.mesh.get("tp", 1)
    if not parts or tp == 1:
        return links
    gathering = machine.group("tp") if isinstance(machine, PlacedMesh) else None
    return tuple(link if link is HERE else link_of_parts(link, tp, gathering) for link in links)


def _build_stage_paces(
    by_stage: Sequence[Mapping[str, CallCost]], placed: Sequence[str], everywhere: Sequence[str]
) -> tuple[Pace, ...]:
    """A pace for each stage; stages of the same costs have one and the same."""
    made: dict[int, Pace] = {}
    for costs in by_stage:
        if id(costs) not in made:
            made[id(costs)] = Pace(tuple(costs[b] for b in placed), _sum_call_costs([costs[b] for b in everywhere]))
    return tuple(made[id(costs)] for costs in by_stage)


def _once_a_rank(paces: Sequence[Pace], ranks: Sequence[int]) -> tuple[Pace, ...]:
    """``paces`` by virtual stage where only the first one of each of ``ranks`` runs the calls that all stages read."""
    without = {id(pace): replace(pace, overhead=CallCost()) for pace in paces}
    first = {rank: k for k, rank in reversed([*enumerate(ranks)])}
    every = enumerate(zip(paces, ranks, strict=True))
    return tuple(pace if first[rank] == k else without[id(pace)] for k, (pace, rank) in every)


def _sum_call_costs(costs: Sequence[CallCost]) -> CallCost:
    """Small calls run one after the other."""
    return CallCost(
        forward_s=sum(c.forward_s for c in costs),
        forward_comm_s=sum(c.forward_comm_s for c in costs),
        flops=sum(c.flops for c in costs),
        working_bytes=sum(
            c.working_bytes + c.gathered_bytes.whole + c.gathered_bytes.sent + sum(c.output_bytes) + c.state_bytes
            for c in costs
        ),
    )


def estimate_step(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    machine: PlacedMesh,
    model_flops: float,
    constraints: Constraints | None = None,
    schedule: str | ScheduleTable = "1f1b",
    chunks: int | None = None,
) -> Estimate:
    """The estimate of one step. ``model_flops``: those of the whole unsharded model for the global batch;
    ``chunks``: the virtual stages of each rank, where the schedule takes different numbers of them.

    ``breakdown`` adds up to the step time: what the slowest stage does in it (``compute``, ``recompute``,
    ``tp_communication``, ``pp_communication`` that nothing hides), ``bubble``: what it waits for the others,
    ``contention``: by which more devices compute at a time than their node can, ``reduction``: of gradients, as far as
    nothing hides it, ``optimizer``: the update after it, and ``offload``: of gradients and parameters between device
    and host, as far as nothing hides it.
    """
    m = problem.num_microbatches
    hidden = problem.chunks > 1  # a rank that waits for one virtual stage's values computes for another
    times = [plan.time_s - (plan.transfer_s if hidden else 0.0) for plan in split.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    stage = split.stages[slowest]
    names = [_list_stage_states(problem, plan, states) for plan in split.stages]
    held = [sum_state_costs(states[name] for name in of_stage) for of_stage in names]
    reduced = how_reduced(problem, split, states, machine, constraints or Constraints(), schedule, chunks)[0]
    reduced += _compute_tied_seconds(problem, names, states, machine)
    updates = [
        max(update_time(held[s], device) for device in machine.devices_of(s))
        + update_seconds(held[s], machine.host(s) or BOUNDLESS)
        for s in range(len(held))
    ]
    updated = max(updates) if problem.train else 0.0
    exchanged = max(
        exchanged_seconds(held[s], machine.host(s) or BOUNDLESS, run.forward_s, run.backward_s)
        for s, plan in enumerate(split.stages)
        for run in plan.runs[:1]
    )
    shared = _compute_contended_seconds(problem, split, updates, machine, schedule, chunks)
    contention = max(0.0, shared - split.pipeline_s - updated)
    step = split.pipeline_s + contention + reduced + updated + exchanged
    communicated = m * _sum_collective_seconds(problem, stage)
    waited = split.pipeline_s - m * (stage.time_s - stage.transfer_s)  # for others; sends may run behind computation
    sent = min(m * stage.transfer_s, max(0.0, waited))
    again = m * stage.recompute_s  # below 0 where what is recomputed spares waiting for the host, which is in forward_s
    breakdown = {
        "compute": m * (stage.forward_s + stage.backward_s) - communicated + min(0.0, waited) + min(0.0, again),
        "recompute": max(0.0, again),
        "tp_communication": communicated,
        "pp_communication": sent,
        "bubble": max(0.0, waited - sent),
        "contention": contention,
        "reduction": reduced,
        "optimizer": updated,
        "offload": exchanged,
    }
    of_stages = zip(split.stages, stage_ranks(machine.mesh), strict=True)
    memory = tuple(chain.from_iterable(repeat(plan.memory, len(ranks)) for plan, ranks in of_stages))
    return Estimate(
        step_time=step,
        mfu=model_flops / (step * machine.peak) if step else 0.0,
        bubble=breakdown["bubble"] / step if step else 0.0,
        memory=memory,
        breakdown=breakdown,
        stages=stage_estimates(problem, split, names, held),
    )


def with_step_time(estimate: Estimate, seconds: float) -> Estimate:
    """``estimate`` of a step that takes ``seconds``, no fewer than it says: the rest is waited for."""
    more = seconds - estimate.step_time
    breakdown = {**estimate.breakdown, "bubble": estimate.breakdown.get("bubble", 0.0) + more}
    share = estimate.step_time / seconds if seconds else 1.0
    bubble = breakdown["bubble"] / seconds if seconds else 0.0
    return estimate.model_copy(
        update={"step_time": seconds, "mfu": estimate.mfu * share, "bubble": bubble, "breakdown": breakdown}
    )


def _find_contended_nodes(machine: PlacedMesh) -> NodeCores:
    """The nodes where not all devices can compute at a time."""
    devices = machine.topology.devices
    ranks = tuple(
        Counter(devices[d].node for d in machine.device_of_rank[of_stage.start : of_stage.stop])
        for of_stage in stage_ranks(machine.mesh)
    )
    return NodeCores(ranks, machine.topology.concurrent)


def _compute_contended_seconds(
    problem: StageProblem,
    split: StageSplit,
    updates: Sequence[float],
    machine: PlacedMesh,
    schedule: str | ScheduleTable,
    chunks: int | None,
) -> float:
    """Seconds of a pipeline and its updates where ranks compete; collectives were measured as they do. 0 where they do
    not."""
    if not machine.topology.concurrent:
        return 0.0
    cores = _find_contended_nodes(machine)
    works = [_compute_virtual_stage_time(problem, k, plan) for k, plan in enumerate(split.virtual or split.stages)]
    m, p, train = problem.num_microbatches, len(split.stages), problem.train
    taken = seconds_in_turns(schedule, m, chunks, works, cores, train)
    if problem.overlap_steps:  # the same share more than with cores for all
        phases = [phases_of(problem, k, plan) for k, plan in enumerate(split.virtual or split.stages)]
        taken *= split.pipeline_s / pipeline_seconds(schedule, p, m, chunks, phases, train)
    if problem.train:
        every = range(len(updates))
        taken += max(update / speed for update, speed in zip(updates, cores.speeds(every), strict=True))
    return taken


def _compute_virtual_stage_time(problem: StageProblem, stage: int, plan: StagePlan) -> VirtualStageTime:
    """What of a microbatch's time in a virtual stage its ranks compute, and what they wait."""
    phases, pace = phases_of(problem, stage, plan), problem.pace(stage)
    costs = [pace.costs[place] for place in plan.places]
    forward, inputs = phases.forward + phases.values_sent, phases.inputs + phases.gradients_sent
    ahead = sum(c.forward_comm_s for c in costs) + pace.overhead.forward_comm_s + plan.forward_wait_s
    back = sum(c.backward_comm_s for c in costs) + plan.transfer_s - plan.forward_wait_s if problem.train else 0.0
    waiting = Phases(min(ahead, forward), min(back, inputs))
    computing = Phases(forward - waiting.forward, inputs - waiting.inputs, phases.weights)
    return VirtualStageTime(computing, waiting)


def _sum_collective_seconds(problem: StageProblem, stage: StagePlan) -> float:
    """Seconds of collectives per microbatch on a stage, forward and backward."""
    pace = problem.pace(stage.number)
    costs = [pace.costs[place] for place in stage.places]
    seconds = sum(c.forward_comm_s + (c.backward_comm_s if problem.train else 0.0) for c in costs)
    return seconds + pace.overhead.forward_comm_s


def _list_stage_states(problem: StageProblem, stage: StagePlan, states: Mapping[str, StateCost]) -> list[str]:
    """The different states that a stage's calls read."""
    read = dict.fromkeys(name for place in stage.places for name in problem.calls[place].states)
    return [name for name in read if name in states]


def how_reduced(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    machine: PlacedMesh,
    constraints: Constraints,
    schedule: str | ScheduleTable = "1f1b",
    chunks: int | None = None,
) -> tuple[float, ReductionScheme]:
    """Seconds by which the reductions of gradients end after the pipeline does, in the best way, and that way."""
    names = [_list_stage_states(problem, plan, states) for plan in split.stages]
    held = [sum_state_costs(states[name] for name in of_stage) for of_stage in names]
    owned = [_count_shared_states(of_stage, states) for of_stage in names] if machine.profile.gather == "owner" else []
    if problem.chunks > 1 and problem.train and machine.profile.overlap and not owned and not problem.overlap_steps:
        each = list_reduction_schemes(machine, constraints)
        found = [(_followed_tail(problem, split, states, held, machine, how, schedule, chunks), how) for how in each]
    else:
        found = [
            (_reduction_tail(problem, split, states, held, machine, how, owned), how)
            for how in list_reduction_schemes(machine, constraints)
        ]
    return min(found, key=lambda way: way[0])  # of those that are as good, the plainest


def _count_shared_states(names: Sequence[str], states: Mapping[str, StateCost]) -> Counter[tuple[str, ...]]:
    """How many of a stage's states are shared over the same axes."""
    return Counter(states[n].scatter_axes for n in names if states[n].gradient and states[n].scatter_axes)


def _followed_tail(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    held: Sequence[Sequence[StateCost]],
    machine: PlacedMesh,
    how: ReductionScheme,
    schedule: str | ScheduleTable,
    chunks: int | None,
) -> float:
    """:func:`_reduction_tail` of several virtual stages on each rank, whose schedule is followed."""
    phases = [phases_of(problem, k, plan) for k, plan in enumerate(split.virtual)]
    ranks = []
    for s, (stage, costs) in enumerate(zip(split.stages, held, strict=True)):
        levels = {axes: level for cost in costs for axes, level in last_levels(cost).items()}
        buckets = stage_buckets(problem, stage, states, reducer_of(machine, s, how), levels)
        slowdown = max(device.overlap_slowdown for device in machine.devices_of(s))
        reads_totals = any(run.stop == len(problem.calls) for run in stage.runs)
        first_s = _totals_seconds(problem, machine) if reads_totals else 0.0
        every = machine.zero == 2 and problem.num_microbatches > 1
        ranks.append(RankEnds(problem, stage, buckets, slowdown, first_s, every))
    return seconds_added(schedule, problem.num_microbatches, chunks, phases, ranks)


def _reduction_tail(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    held: Sequence[Sequence[StateCost]],
    machine: PlacedMesh,
    how: ReductionScheme,
    owned: Sequence[Mapping[tuple[str, ...], int]] = (),
) -> float:
    """Seconds by which gathers of updated parameters delay the pipeline, and by which the reductions of gradients end
    after it. ``held``: each stage's states, ``owned``: how many of them by the axes that share them, where each is on
    one rank.

    Stage ``s`` reduces behind its last backward, which ends before those of the stages ahead of it; not where it begins
    the next step meanwhile.
    """
    first_s = _added_up(problem, machine)
    if not problem.train:
        return first_s
    waits = not (problem.overlap_steps and is_split(problem.schedule))
    split_backwards = is_split(problem.schedule)  # gradients of inputs are sent before those of weights are there
    tail = ahead = delay = filling = 0.0
    again, m = machine.zero == 2, problem.num_microbatches
    for s, (stage, costs) in enumerate(zip(split.stages, held, strict=True)):
        reducer = reducer_of(machine, s, how)
        slowdown = max(device.overlap_slowdown for device in machine.devices_of(s))
        last = stage.runs[0]  # the virtual stage whose backwards end last
        window = last.backward_s + last.recompute_s
        if owned or not machine.profile.overlap:
            work = compute_gradient_reduction(costs, reducer, machine.profile.overlap)
            work = by_owner(work, owned[s], reducer) if owned else work
            # owners send what they have updated before the next step begins (InternEvo, ``overlap_sync_param=False``)
            exposed = work.exposed(window, slowdown, 0.0 if owned else stage.forward_s, machine.profile.overlap, m)
            delay = first_s
        else:
            levels = {axes: level for cost in costs for axes, level in last_levels(cost).items()}
            buckets = stage_buckets(problem, stage, states, reducer, levels)
            delays = reduction_delays(problem, stage, buckets, slowdown, by_halves=split_backwards and s > 0)
            exposed = delays.whole_s
            delay = max(delay, gathered_seconds(problem, stage, buckets, slowdown, filling, first_s))
            if again and m > 1:
                sent = [bucket.scatter for bucket in buckets]
                again_s, coding_s = sum(each.seconds for each in sent), sum(each.coding_s for each in sent)
                exposed += GradientReduction(again_s=again_s, coding_again_s=coding_s).exposed(
                    window, slowdown, 0.0, True, m
                )
            if not split_backwards:  # what the stages behind send comes later by as much
                tail += delays.backward_s
        tail = max(tail, exposed - ahead)
        ahead += window * (waits and not split_backwards)  # which end at about the same time
        filling += (last.forward_s + last.transfer_s / 2) * waits
    return delay + tail


def _added_up(problem: StageProblem, machine: PlacedMesh) -> float:
    """Seconds of adding up what the first forward reads of the whole batch; the last of several stages has nothing else
    to do then."""
    return 0.0 if problem.num_stages > 1 else _totals_seconds(problem, machine)


def _totals_seconds(problem: StageProblem, machine: PlacedMesh) -> float:
    if not problem.total_bytes:
        return 0.0
    return collective_time("all_reduce", problem.total_bytes, select_slowest_group(machine.stage_groups("dp", "cp")))


def _compute_tied_seconds(
    problem: StageProblem, held: Sequence[Sequence[str]], states: Mapping[str, StateCost], machine: PlacedMesh
) -> float:
    """Seconds of adding up the gradients of tied weights over their stages, ahead of all else: nothing hides it."""
    often = Counter(name for names in held for name in names)
    return sum(tied_seconds(states[name], count, machine) for name, count in often.items() if problem.train)
