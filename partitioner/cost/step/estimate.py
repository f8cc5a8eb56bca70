"""Estimate of one training step: its time by part, its share of the devices' peak FLOP/s, and the peak memory of every
stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat

from partitioner.constraints import Constraints, pinned_calls
from partitioner.constraints import Recompute as Asked
from partitioner.cost.call.call_cost import CallCost, hide_neighbours
from partitioner.cost.call.collectives import collective_time, link_of_parts
from partitioner.cost.call.states import StateCost, StateCosts, sum_state_costs, update_time
from partitioner.cost.call.transient_bytes import NOTHING_MORE, NOTHING_SENT, Scattering, gathered_beside, passing_bytes
from partitioner.cost.step.gradient_reduction import (
    GradientReduction,
    by_owner,
    compute_gradient_reduction,
    last_levels,
    list_reduction_schemes,
    reducer_of,
)
from partitioner.cost.step.offload import add_offload_transfers, exchanged_seconds, update_seconds
from partitioner.cost.step.pipeline_tail import is_priced_by_rank_ends, tied_seconds
from partitioner.cost.step.placed_mesh import HERE, PlacedMesh
from partitioner.cost.step.relaxed_mesh import BestCaseMesh
from partitioner.cost.step.schedule_ends import RankEnds, seconds_added
from partitioner.cost.step.step_ends import gathered_seconds, reduction_delays, stage_buckets
from partitioner.emit.buckets import ReductionScheme
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Call, FoldedModel
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
    """Return one :class:`StageEstimate` for each stage of ``split``: its block calls (such as layers), its seconds in a
    step, and its peak memory in bytes by component. The components add up to the peak of one rank.

    ``names``: for each stage, the names of the parameters and buffers that it reads. ``held``: for each stage, the
    costs of its parameters and buffers; costs that differ only in bytes are summed to one. ``split``: the block calls
    and the recomputation of each stage. ``problem``: the block calls of the model with their costs, to be cut into
    pipeline stages.
    """
    m = problem.num_microbatches
    made = []
    for number, stage in enumerate(split.stages):
        slim = problem.slim or problem
        calls = [
            (slim if run.selective and place < run.stop - run.spared else problem).calls[place]
            for run in stage.runs
            for place in range(run.start, run.stop)
        ]
        coming = sum(problem.late_bytes.get(name, 0.0) for name in names[number]) if problem.late_bytes else 0.0
        made.append(
            StageEstimate(
                first=calls[0].path if calls else "",
                last=calls[-1].path if calls else "",
                num_calls=len(calls),
                recomputed=stage.recompute,
                selective=stage.selective,
                in_part=sum(
                    bool(call.cost.selective_bytes)
                    for run in stage.runs
                    for place, call in enumerate(problem.calls[run.start : run.stop], run.start)
                    if run.is_selective(place)
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
    """Return the bytes that a rank of the stage keeps in host memory: offloaded activations of all microbatches in
    flight, and offloaded parameters and optimizer states. ``stage``: the plan of the stage, with its number of
    microbatches in flight. ``calls``: the block calls (such as layers) of the stage. ``held``: the costs of its
    parameters and buffers."""
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
    """Return the peak memory of one rank of a stage: component such as ``"parameters"`` or ``"saved"`` -> bytes. The
    component ``"buffers"`` (communication buffers) has the bytes that no other component explains. Components of 0
    bytes are left out.

    ``stage``: the plan of the stage: its range of block calls (such as layers), and its recomputation. ``number``:
    index of the stage. ``calls``: its block calls. ``held``: the costs of its parameters and buffers. ``coming``: bytes
    of gradients that are not allocated before their first reduction. ``problem``: the block calls of the model with
    their costs, to be cut into pipeline stages.
    """
    parts = {kind: sum(cost.kept[kind] for cost in held) for kind in ("parameters", "gradients", "optimizer")}
    parts["residuals"] = sum(cost.lost for cost in held)
    again = problem.train and stage.recompute > 0
    first, last = (calls[0].at_ends, calls[-1].at_ends) if calls else (NOTHING_MORE, NOTHING_MORE)
    beside = problem.overhead.working_bytes
    working = max([last.last + first.lingering if first.lingering else 0.0, *(call.working_bytes for call in calls)])
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
                """Return the bytes of saved activations of all microbatches in flight on this rank. ``gone``: bytes
                that one of these microbatches has already freed."""
                return max(w * whole + h * half - min(w, 1) * gone for w, h in problem.held(number))

            moments = [(working, flying(0.0), 0.0), (first.closing, flying(whole), 0.0)]
            if again:
                made = max(calls, key=lambda c: c.working_bytes + c.cost.saved_bytes)
                moments.append((made.working_bytes, flying(0.0), made.cost.saved_bytes))
            fullest = max(moments, key=sum)
            parts |= {"working": fullest[0] + beside, "saved": fullest[1], "recomputed": fullest[2]}
    parts["gradients"] -= min(coming, max(0.0, sum(parts.values()) - stage.memory))  # not allocated when memory peaks
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
    """Return the problem of cutting the block calls (such as layers) of ``model`` into pipeline stages, with their
    costs, memory limits and links.

    - ``costs``: cost of a call by block name. ``states``: cost of each parameter and buffer by name. ``machine``: the
      topology with the mesh laid over it, which gives the devices, capacities and links of the stages.
    - ``costs_by_stage``: costs by block name on the devices of each stage; empty if they are ``costs`` on all stages.
    - ``num_microbatches``: number of microbatches of a step on a rank. ``microbatch_size``: number of samples of a
      microbatch. ``schedule``: name or table of the pipeline schedule. ``profile``: how the framework that runs the
      plan executes it. ``train``: whether calls have a backward.
    - ``ranks``: the pipeline rank of each virtual stage if ranks hold several virtual stages; each of these is then a
      stage of the problem. Empty: each rank holds one stage.
    - ``scattering``: bytes of gradient buckets that a rank holds temporarily under ZeRO-1 and ZeRO-2.
    - ``constraints``: the choices that the user fixed; ``None``: none.

    Cheap calls that all stages repeat run on every stage that reads their results; the problem charges their time and
    memory to every stage. The calls of the prologue run before the pipeline starts; the problem charges their memory to
    every stage, and their time to the last stage only.
    """
    constraints = constraints or Constraints()
    # with sequence parallelism values are sharded over tp in any case
    parts = profile.sends == "parts" and constraints.sequence_parallel is False
    placed = [(i, call) for i, call in enumerate(model.calls) if not call.shared and not call.prologue]
    offload = constraints.offload or ()
    often = Counter(call.block for _, call in placed)
    everywhere = [call for call in model.calls if call.shared or call.prologue]
    first = [call.block for call in everywhere if call.prologue]
    pp = machine.mesh.get("pp", 1)
    at = ranks or range(pp)
    in_turns = len(at) > pp  # a rank alternates between virtual stages
    once = train and num_microbatches == 1 and not in_turns  # no shards of gradients exist from an earlier backward
    by_stage = [costs_by_stage[rank] for rank in at] if costs_by_stage else []
    repeated = [call.block for call in everywhere if not (call.prologue and train and len(at) > 1)]
    of_states = StateCosts.of(states)
    bytes_of_all = _sum_call_costs([costs[call.block] for call in everywhere]).working_bytes
    overhead = replace(_sum_call_costs([costs[block] for block in repeated]), working_bytes=bytes_of_all)
    several = num_microbatches > 1 or in_turns
    passing = [
        passing_bytes(costs[call.block], call.states, of_states, scattering, call is placed[-1][1], several)
        for _, call in placed
    ]
    beside = gathered_beside([own for own, _ in passing], in_turns)
    read = [call.states for _, call in placed]
    hides = num_microbatches > 1 or bool(ranks)  # the gather or scatter of a call at an end of the step is hidden, too
    in_order = hide_neighbours([costs[call.block] for _, call in placed], read, repeated=hides)
    calls = tuple(
        StageCall(call.path, cost, call.inputs, call.outputs, call.states, i, gathered, at_ends)
        for (i, call), cost, gathered, (_, at_ends) in zip(placed, in_order, beside, passing, strict=True)
    )
    paces = _build_stage_paces(by_stage, [c for _, c in placed], repeated, hides)
    if ranks and overhead.forward_total_s:
        paces = _once_a_rank(paces or (Pace(tuple(call.cost for call in calls), overhead),) * len(at), ranks)
    if offload:
        hosts = [machine.host(rank) or BOUNDLESS for rank in at]  # earlier code checks that there are hosts
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
        overlap_steps=constraints.overlap_steps and is_split(schedule),
        total_bytes=sum(float(model.values[v].nbytes) for c in model.calls if c.prologue for v in c.outputs),
        prologue_s=sum((by_stage[-1] if by_stage else costs)[block].forward_total_s for block in first),
    )


def _in_part(asked: Asked | None) -> Recompute | None:
    """Return the kind of recomputation that the stages of the pipeline problem may use. ``asked``: the user's
    constraint. If it is ``None``, the choice is free, and ``None`` is returned.

    ``"scores"`` (attention scores) and ``"alternate"`` (also every second product) become ``"selective"``. The three
    kinds differ only in the operators that backward runs a second time, and the costs of the block calls (such as
    layers) already contain this difference.
    """
    return "selective" if asked == "scores" or asked == "alternate" else asked


def _find_stage_links(machine: PlacedMesh | BestCaseMesh, ranks: Sequence[int], parts: bool) -> tuple[Link, ...]:
    """Return the link from each stage of the problem to the next. ``machine``: the devices and links of the mesh.
    ``ranks``: the pipeline rank of each virtual stage; empty without virtual stages. ``parts``: whether each rank of
    ``tp`` sends only its part of a value, and the receiving ranks all-gather the parts. If so, the time of a message
    over the returned link includes this all-gather."""
    links = tuple(machine.link(*pair) for pair in pairwise(ranks)) if ranks else machine.links
    tp = machine.mesh.get("tp", 1)
    if not parts or tp == 1:
        return links
    gathering = machine.group("tp") if isinstance(machine, PlacedMesh) else None
    return tuple(link if link is HERE else link_of_parts(link, tp, gathering) for link in links)


def _build_stage_paces(
    by_stage: Sequence[Mapping[str, CallCost]], placed: Sequence[Call], everywhere: Sequence[str], several: bool
) -> tuple[Pace, ...]:
    """Return, for each stage, the costs of all block calls (such as layers) on its devices, and the summed cost of the
    calls that every stage runs. Stages with the same dict in ``by_stage`` share one result object.

    ``by_stage``: for each stage, a dict block name -> cost of a call on its devices. ``placed``: the calls that belong
    to one stage. ``everywhere``: the block names of the calls that every stage runs. ``several``: whether a stage runs
    several microbatches.
    """
    made: dict[SameObject[Mapping[str, CallCost]], Pace] = {}
    for costs in by_stage:
        if SameObject(costs) not in made:
            made[SameObject(costs)] = Pace(
                tuple(hide_neighbours([costs[c.block] for c in placed], [c.states for c in placed], repeated=several)),
                _sum_call_costs([costs[b] for b in everywhere]),
            )
    return tuple(made[SameObject(costs)] for costs in by_stage)


def _once_a_rank(paces: Sequence[Pace], ranks: Sequence[int]) -> tuple[Pace, ...]:
    """Return ``paces``, corrected for ranks that hold several virtual stages. Such a rank runs the calls that every
    stage needs only once, so their cost is set to zero in all its virtual stages but the first.

    ``paces``: for each virtual stage, the costs of block calls (such as layers) on its devices, and the summed cost of
    the calls that every stage runs. ``ranks``: the rank of each virtual stage.
    """
    without = {SameObject(pace): replace(pace, overhead=CallCost()) for pace in paces}
    first = {rank: k for k, rank in reversed([*enumerate(ranks)])}
    every = enumerate(zip(paces, ranks, strict=True))
    return tuple(pace if first[rank] == k else without[SameObject(pace)] for k, (pace, rank) in every)


def _sum_call_costs(costs: Sequence[CallCost]) -> CallCost:
    """Return ``costs``, the costs of block calls (such as layers) that every stage runs, summed to the cost of one
    call. The result has the sums of forward seconds and FLOPs. Its ``working_bytes`` are the sum of all bytes that the
    calls occupy (temporary, outputs, parameters and gathered parameters); its other fields for bytes are 0."""
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
    reduced_s: float,
    schedule: str | ScheduleTable = "1f1b",
    chunks: int | None = None,
) -> Estimate:
    """Return the estimate of one training step for the stages in ``split``.

    ``problem``: the block calls (such as layers) of the model with their costs. ``machine``: the devices and links that
    the mesh is laid over. ``states``: the cost of each parameter and buffer by name. ``model_flops``: FLOPs of the
    whole unsharded model for the global batch. ``reduced_s``: the seconds that gradient reductions add to the pipeline
    (:func:`how_reduced`). ``schedule``: name or table of the pipeline schedule. ``chunks``: number of virtual stages of
    each rank; ``None``: the number that the schedule fixes.

    ``Estimate.breakdown`` has the seconds of the step by kind, which add up to the step time:

    - ``compute``, ``recompute``, ``tp_communication``, ``pp_communication``: the work of the slowest stage. Only the
      part of ``pp_communication`` that computation does not hide is counted. It is 0 if a rank has several virtual
      stages, because the rank computes for one of them while another waits for values.
    - ``bubble``: the time in which the slowest stage waits for other stages.
    - ``contention``: additional time because more devices of a node compute at the same time than its cores allow.
    - ``reduction``: the part of the gradient reduction that computation does not hide.
    - ``optimizer``: the update after the reduction.
    - ``offload``: the part of the transfers of gradients and parameters between device and host that is not hidden.
    """
    m = problem.num_microbatches
    hidden = problem.chunks > 1  # a rank that waits for values of one virtual stage computes for another
    times = [plan.time_s - (plan.transfer_s if hidden else 0.0) for plan in split.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    stage = split.stages[slowest]
    names = [_list_stage_states(problem, plan, states) for plan in split.stages]
    held = [sum_state_costs(states[name] for name in of_stage) for of_stage in names]
    if not is_priced_by_rank_ends(problem, machine):
        reduced_s += sum(_sum_tied_seconds(problem, names, states, machine).values())
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
    step = split.pipeline_s + contention + reduced_s + updated + exchanged
    communicated = m * _sum_collective_seconds(problem, stage)
    # time in which the stage waits for others; sends may overlap with computation
    waited = split.pipeline_s - m * (stage.time_s - stage.transfer_s)
    sent = 0.0 if hidden else min(m * stage.transfer_s, max(0.0, waited))
    again = m * stage.recompute_s  # negative if recomputation replaces waiting for the host, which forward_s contains
    breakdown = {
        "compute": m * (stage.forward_s + stage.backward_s) - communicated + min(0.0, waited) + min(0.0, again),
        "recompute": max(0.0, again),
        "tp_communication": communicated,
        "pp_communication": sent,
        "bubble": max(0.0, waited - sent),
        "contention": contention,
        "reduction": reduced_s,
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
    """Return a copy of ``estimate``, the estimate of a training step, with the step time ``seconds``, which must not be
    less than the old step time. The difference is added to the bubble (the time spent waiting for other stages), and
    ``mfu`` is scaled accordingly."""
    more = seconds - estimate.step_time
    breakdown = {**estimate.breakdown, "bubble": estimate.breakdown.get("bubble", 0.0) + more}
    share = estimate.step_time / seconds if seconds else 1.0
    bubble = breakdown["bubble"] / seconds if seconds else 0.0
    return estimate.model_copy(
        update={"step_time": seconds, "mfu": estimate.mfu * share, "bubble": bubble, "breakdown": breakdown}
    )


def _find_contended_nodes(machine: PlacedMesh) -> NodeCores:
    """Return how the ranks share the processor cores of nodes: for each pipeline stage, how many of its ranks are on
    each node; and for nodes with few cores, how many devices of the node can compute at full speed at the same time.
    ``machine``: the devices and links that the mesh is laid over."""
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
    """Return the seconds of the pipeline plus the seconds of the optimizer's update, if the ranks of a node compete for
    its processor cores. Return 0 if every node has enough cores for all its devices to compute at the same time.
    Collectives are not slowed down further, because their measured times already contain the contention.

    ``problem``: the block calls (such as layers) of the model with their costs, to be cut into pipeline stages.
    ``split``: the block calls of each pipeline stage. ``updates``: for each stage, seconds of its update if each rank
    has a core of its own. ``machine``: the devices and links that the mesh is laid over. ``schedule``: name or table of
    the pipeline schedule. ``chunks``: number of virtual stages of each rank; ``None``: the number that the schedule
    fixes.
    """
    if not machine.topology.concurrent:
        return 0.0
    cores = _find_contended_nodes(machine)
    works = [_compute_virtual_stage_time(problem, k, plan) for k, plan in enumerate(split.virtual or split.stages)]
    m, p, train = problem.num_microbatches, len(split.stages), problem.train
    taken = seconds_in_turns(schedule, m, chunks, works, cores, train)
    if problem.overlap_steps:  # scale by the gain of overlapping steps with a core for each rank
        phases = [phases_of(problem, k, plan) for k, plan in enumerate(split.virtual or split.stages)]
        taken *= split.pipeline_s / pipeline_seconds(schedule, p, m, chunks, phases, train)
    if problem.train:
        every = range(len(updates))
        taken += max(update / speed for update, speed in zip(updates, cores.speeds(every), strict=True))
    return taken


def _compute_virtual_stage_time(problem: StageProblem, stage: int, plan: StagePlan) -> VirtualStageTime:
    """Return the seconds of one microbatch in a virtual stage, with computation and communication apart. ``stage``:
    index of the virtual stage in ``problem``, the block calls (such as layers) with their costs. ``plan``: the block
    calls of this stage."""
    phases, pace = phases_of(problem, stage, plan), problem.pace(stage)
    costs = [pace.costs[place] for place in plan.places]
    forward, inputs = phases.forward + phases.values_sent, phases.inputs + phases.gradients_sent
    ahead = sum(c.forward_comm_s for c in costs) + pace.overhead.forward_comm_s + plan.forward_wait_s
    back = sum(c.backward_comm_s for c in costs) + plan.transfer_s - plan.forward_wait_s if problem.train else 0.0
    waiting = Phases(min(ahead, forward), min(back, inputs))
    computing = Phases(forward - waiting.forward, inputs - waiting.inputs, phases.weights)
    return VirtualStageTime(computing, waiting)


def _sum_collective_seconds(problem: StageProblem, stage: StagePlan) -> float:
    """Return the seconds of collectives inside the block calls (such as layers) of ``stage`` for one microbatch,
    forward and backward. ``problem``: the block calls of the model with their costs, to be cut into pipeline stages.
    """
    pace = problem.pace(stage.number)
    costs = [pace.costs[place] for place in stage.places]
    seconds = sum(c.forward_comm_s + (c.backward_comm_s if problem.train else 0.0) for c in costs)
    return seconds + pace.overhead.forward_comm_s


def _list_stage_states(problem: StageProblem, stage: StagePlan, states: Mapping[str, StateCost]) -> list[str]:
    """Return the names of the parameters and buffers that the block calls (such as layers) of ``stage`` read, each
    once. ``states``: the cost of each parameter and buffer by name; names that are not in ``states`` are left out.
    ``problem``: the block calls of the model with their costs."""
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
    """Choose the reduction scheme for gradients that takes the least time (one collective or a hierarchical reduction,
    with or without compression). Return two values: the seconds that gradient reductions and gathers of updated
    parameters add to the pipeline time, and the scheme. If several schemes take equally long, the simplest is chosen.

    ``problem``: the block calls (such as layers) of the model with their costs, to be cut into pipeline stages.
    ``split``: the block calls of each stage. ``states``: the cost of each parameter and buffer by name. ``machine``:
    the devices and links that the mesh is laid over. ``constraints``: the choices that the user fixed. ``schedule``:
    name or table of the pipeline schedule. ``chunks``: number of virtual stages of each rank; ``None``: the number that
    the schedule fixes.
    """
    names = [_list_stage_states(problem, plan, states) for plan in split.stages]
    held = [sum_state_costs(states[name] for name in of_stage) for of_stage in names]
    owned = [_count_shared_states(of_stage, states) for of_stage in names] if machine.profile.gather == "owner" else []
    if is_priced_by_rank_ends(problem, machine):
        each = list_reduction_schemes(machine, constraints)
        ties = _find_tied_ranks(names), _sum_tied_seconds(problem, names, states, machine)
        order = schedule, chunks
        found = [(_compute_tail_seconds(problem, split, states, held, machine, how, order, ties), how) for how in each]
    else:
        found = [
            (_reduction_tail(problem, split, states, held, machine, how, owned), how)
            for how in list_reduction_schemes(machine, constraints)
        ]
    return min(found, key=lambda way: way[0])  # the first, and simplest, of equally fast ones


def _count_shared_states(names: Sequence[str], states: Mapping[str, StateCost]) -> Counter[tuple[str, ...]]:
    """Count a stage's parameters that ZeRO shards, by the mesh axes over which they are sharded: tuple of axes ->
    number of parameters. Parameters without a gradient are not counted. ``names``: the parameters and buffers of the
    stage. ``states``: the cost of each parameter and buffer by name.
    """
    return Counter(states[n].scatter_axes for n in names if states[n].gradient and states[n].scatter_axes)


def _compute_tail_seconds(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    held: Sequence[Sequence[StateCost]],
    machine: PlacedMesh,
    how: ReductionScheme,
    order: tuple[str | ScheduleTable, int | None],
    ties: tuple[Mapping[str, tuple[int, ...]], Mapping[tuple[int, ...], float]],
) -> float:
    """Return the seconds that gathers of updated parameters and gradient reductions add to the schedule. The schedule
    is simulated action by action (an action is a forward or backward of one microbatch on one virtual stage).

    ``order``: a pair: name or table of the schedule, and the number of virtual stages of each rank (``None``: the
    number that the schedule fixes). ``ties``: a pair of dicts: name of a parameter that several pipeline ranks have ->
    these ranks; and these ranks -> seconds of summing the gradients of all their common parameters. ``states``: the
    cost of each parameter and buffer by name. ``held``: for each stage, the costs of its parameters and buffers.
    ``how``: the reduction scheme (one collective or a hierarchical reduction, with or without compression).
    ``problem``: the block calls (such as layers) of the model with their costs, to be cut into pipeline stages.
    ``split``: the block calls of each pipeline stage. ``machine``: the devices and links that the mesh is laid over.
    """
    (schedule, chunks), (tied, sums) = order, ties
    phases = [phases_of(problem, k, plan) for k, plan in enumerate(split.virtual)]
    ranks = []
    for s, (stage, costs) in enumerate(zip(split.stages, held, strict=True)):
        levels = {axes: level for cost in costs for axes, level in last_levels(cost).items()}
        buckets = stage_buckets(problem, stage, states, reducer_of(machine, s, how), levels, tied)
        slowdown = max(device.overlap_slowdown for device in machine.devices_of(s))
        reads_totals = any(run.stop == len(problem.calls) for run in stage.runs)
        before_s = problem.num_microbatches * problem.prologue_s + _totals_seconds(problem, machine)
        first_s = before_s if reads_totals else 0.0
        every = machine.zero == 2 and problem.num_microbatches > 1
        ranks.append(RankEnds(problem, stage, buckets, slowdown, first_s, every))
    return seconds_added(schedule, problem.num_microbatches, chunks, phases, ranks, sums)


def _reduction_tail(
    problem: StageProblem,
    split: StageSplit,
    states: Mapping[str, StateCost],
    held: Sequence[Sequence[StateCost]],
    machine: PlacedMesh,
    how: ReductionScheme,
    owned: Sequence[Mapping[tuple[str, ...], int]] = (),
) -> float:
    """Return the seconds that data-parallel collectives add to the pipeline: gathers of updated parameters delay its
    start, and gradient reductions end after it.

    A stage reduces its gradients while the stages in front of it still run their last backwards, which hides a part of
    the reduction. If consecutive steps overlap, nothing is hidden, because the stage begins the next step in this time.

    ``problem``: the block calls (such as layers) of the model with their costs. ``split``: the block calls of each
    pipeline stage. ``states``: the cost of each parameter and buffer by name. ``held``: for each stage, the costs of
    its parameters and buffers. ``machine``: the devices and links that the mesh is laid over. ``how``: the reduction
    scheme (one collective or a hierarchical reduction, with or without compression). ``owned``: if ZeRO keeps each
    parameter whole on one owner rank, for each stage a dict: mesh axes over which parameters are distributed -> number
    of parameters; otherwise empty.
    """
    first_s = _added_up(problem, machine)
    if not problem.train:
        return first_s
    waits = not problem.overlap_steps
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
            if not split_backwards:  # messages of the stages behind are delayed by as much
                tail += delays.backward_s
        tail = max(tail, exposed - ahead)
        ahead += window * (waits and not split_backwards)  # split backwards end at about the same time on all stages
        filling += (last.forward_s + last.transfer_s / 2) * waits
    return delay + tail


def _added_up(problem: StageProblem, machine: PlacedMesh) -> float:
    """Return the seconds for which a step with one stage waits for collectives before its first forward and after its
    last backward. Before the first forward, the step all-reduces the sums over the global batch that this forward
    reads, such as the number of targets. Under ZeRO-3, it also gathers the weights of the first call, at the same time
    as these sums and the calls that every stage runs. At its end, a step with one microbatch reduce-scatters the
    gradients of the first call that has a backward.

    Return 0 if there are several stages: only the last stage reads the sums, and it waits for its first input at that
    time anyway. ``problem``: the block calls (such as layers) of the model with their costs. ``machine``: the devices
    and links that the mesh is laid over.
    """
    if problem.num_stages > 1:
        return 0.0
    costs, beside_s = problem.pace(0).costs, problem.pace(0).overhead.forward_total_s
    trained, once = next((cost for cost in costs if cost.backward_total_s), costs[0]), problem.num_microbatches == 1
    # a first call without backward is gathered anew for each forward, which its cost contains
    is_kept = once or costs[0].backward_total_s > 0
    gather_s = costs[0].hidden.gather_s if costs[0].hidden and is_kept else 0.0
    scatter_s = trained.hidden.scatter_s if trained.hidden and once else 0.0
    return max(_totals_seconds(problem, machine), gather_s - beside_s) + scatter_s


def _totals_seconds(problem: StageProblem, machine: PlacedMesh) -> float:
    """Return the seconds of the all-reduce, over ``dp`` and ``cp``, of the sums over the global batch that the model
    reads, such as the number of targets; 0 if the model reads no such sums. ``problem``: the block calls (such as
    layers) of the model with their costs, to be cut into pipeline stages. ``machine``: the devices and links that the
    mesh is laid over."""
    if not problem.total_bytes:
        return 0.0
    return collective_time("all_reduce", problem.total_bytes, select_slowest_group(machine.stage_groups("dp", "cp")))


def _find_tied_ranks(held: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return name of a tied parameter (one that several pipeline ranks read) -> these ranks. ``held``: for each rank,
    the names of its parameters and buffers."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return {name: tuple(among) for name, among in ranks.items() if len(among) > 1}


def _sum_tied_seconds(
    problem: StageProblem, held: Sequence[Sequence[str]], states: Mapping[str, StateCost], machine: PlacedMesh
) -> dict[tuple[int, ...], float]:
    """Return, for each set of pipeline ranks that read the same tied weights, the seconds of all-reducing the gradients
    of these weights over the ranks. Computation does not hide this time. ``held``: for each rank, the names of its
    parameters and buffers. ``states``: the cost of each parameter and buffer by name. ``problem``: the block calls
    (such as layers) of the model with their costs. ``machine``: the devices and links that the mesh is laid over."""
    found: dict[tuple[int, ...], float] = {}
    if problem.train:
        for name, among in _find_tied_ranks(held).items():
            found[among] = found.get(among, 0.0) + tied_seconds(states[name], len(among), machine)
    return {among: seconds for among, seconds in found.items() if seconds}
