"""Emit the program of all ranks: from stages and a schedule to instruction lists.

Requires: a local model (graphs with their collectives and one rank's shapes), a stage for each call, the chosen
layouts. Provides: a :class:`Program` in which

- every stage runs the calls that stages share, and computes totals (sums over the global batch) once, before its
  pipeline starts;
- a value is sent from stage to stage up to its last reader, and its gradient is sent back;
- gradients are reduced in buckets as soon as the last backward has computed them, while the backward continues;
- every value and gradient is freed after its last use.

Sends and receives never deadlock if each (sender, receiver, direction) has a first-in, first-out channel of its own. A
transfer then waits only for its receive and for earlier transfers. See
:class:`partitioner.runtime.program.instructions.Instruction`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from partitioner.emit.buckets import (
    AT_ONCE,
    Gradient,
    ReductionScheme,
    bucket_limit,
    follow_buckets,
    plan_buckets,
    with_levels,
)
from partitioner.emit.channels import plan_fetches
from partitioner.emit.offload import select_offloads
from partitioner.emit.routes import EmitError, Routes, StageCalls, make_routes
from partitioner.emit.stage import StageFlow, StageJob, stage_instructions, updates_of
from partitioner.emit.zero import zero_axes
from partitioner.passes.ir.gradient_flow import GradientFlow, accumulated_in, compute_gradient_flow, find_gradient_paths
from partitioner.passes.ir.layouts import REPLICATED, Layout, can_shard_evenly, local_shape
from partitioner.passes.ir.model import CallSignature, FoldedModel, TensorSpec
from partitioner.passes.ir.serialize import block_to_data, dtype_name, dtype_of
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction, Instructions, Listing
from partitioner.runtime.program.mesh import ALL_AXES, MESH_AXES, expert_mesh, hybrid_mesh
from partitioner.runtime.program.program import (
    ArgumentData,
    BlockGraph,
    CallData,
    GuardData,
    InputData,
    Offload,
    OutputData,
    PlainValue,
    Program,
    SignatureData,
    Stage,
    StateData,
    Value,
    hash_weights,
)
from partitioner.runtime.program.state_bytes import is_in_host_memory
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.registry import build_timetable, ranks_of, schedule_name
from partitioner.schedules.steady_state import SteadyState, find_steady_state, parts_of


@dataclass(frozen=True)
class Layouts:
    """Layouts of the model's tensors over the device mesh, by name. A layout says whether and on which dimension a
    tensor is sharded over one mesh axis.

    - ``states``, ``values``: layout of parameters and buffers, and of values, over the mesh axis ``tp``; a missing name
      is replicated. ``context``: layout of values over ``cp``. ``experts``: layout of parameters and buffers over
      ``ep``.
    - ``grad_axes``: the mesh axes over which a parameter's gradient is a partial sum after the last backward; none for
      a missing name.
    - ``batch_dims``: the dimension of each model input that is split over microbatches and ``dp``. An input is not
      split if its name is missing or its dimension is ``None``.
    - ``batch``: how the microbatches' results of a model output are combined: concatenated on a dimension (``S<dim>``),
      summed (``P``), or equal (``R``, the default).
    """

    states: Mapping[str, Layout] = field(default_factory=dict)
    values: Mapping[str, Layout] = field(default_factory=dict)
    grad_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    batch: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, Layout] = field(default_factory=dict)
    context: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """The choices for which a program is built: the mesh, the schedule, the layouts and the techniques.

    - ``mesh``: number of ranks by mesh axis (1 if missing). ``schedule``: name or table of the pipeline schedule.
      ``virtual_stages``: number of virtual stages on each rank; ``None``: the number that the schedule fixes.
      ``objective``: ``train`` or ``infer`` (no backward). ``layouts``: how tensors are sharded over the mesh.
    - ``num_microbatches``: number of microbatches of a step on each data-parallel rank. ``data_shares``: the number of
      microbatches of each data-parallel rank, if the numbers differ; otherwise empty.
    - ``recompute``: indices of the model's block calls (such as layers) whose activations are recomputed in full in
      backward. ``selective``: indices of the calls in which only some nodes are recomputed. ``again``: block -> names
      of these nodes.
    - ``zero``: the ZeRO stage. ``dp_shard``: number of ``dp`` ranks that shard a parameter (0: all). ``left_whole``:
      names of the parameters that ZeRO-3 does not shard.
    - ``layout_of``: another program on the same weights, whose sharding of parameters and whose buckets this program
      takes over. ``None``: both are chosen.
    - ``bucket_bytes``: bytes of gradients that are reduced together; ``None``: a default. ``reducing``: the scheme of
      gradient reductions.
    - ``etp``: number of ranks over which one expert is sharded (0: ``tp``). ``fused_attention``: whether attention
      kernels save no scores for backward. ``whole_scatter``: whether a reduce-scatter needs a receive buffer for the
      whole tensor. ``offload``: the kinds of data in host memory or on disk, such as ``"optimizer"``.
    """

    mesh: Mapping[str, int]
    num_microbatches: int
    data_shares: Sequence[int] = ()
    schedule: str | ScheduleTable = "1f1b"
    virtual_stages: int | None = None
    objective: Literal["train", "infer"] = "train"
    layouts: Layouts = field(default_factory=Layouts)
    etp: int = 0
    recompute: Collection[int] = ()
    selective: Collection[int] = ()
    again: Mapping[str, Collection[str]] = field(default_factory=dict)
    bucket_bytes: int | None = None
    zero: Literal[0, 1, 2, 3] = 0
    dp_shard: int = 0
    fused_attention: bool = True
    whole_scatter: bool = False
    offload: Sequence[Offload] = ()
    reducing: ReductionScheme = AT_ONCE
    left_whole: Collection[str] = ()
    layout_of: Program | None = None


def emit(model: FoldedModel, stage_of_call: Sequence[int], spec: ProgramSpec) -> Program:
    """Return the program that all ranks run: instructions, blocks, values and states (parameters and buffers).

    ``model``: blocks and ``values`` have one rank's shapes for one microbatch; ``states`` and ``inputs`` have their
    global shapes. ``stage_of_call``: the virtual stage, from 0, of each of ``model.calls`` (block calls, such as
    layers); the stages must not decrease. Entries are ignored for calls that all stages share, or that run before the
    pipeline starts, because such a call runs on every rank that reads its results. ``spec``: the mesh, the schedule and
    the techniques.

    Raises :class:`EmitError` if the stages do not form a pipeline, and ``ScheduleError`` if the schedule cannot run.
    """
    mesh, layouts, schedule, zero, dp_shard = spec.mesh, spec.layouts, spec.schedule, spec.zero, spec.dp_shard
    sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    _check_mesh(mesh, spec.objective, model, dp_shard)
    part = dp_shard if zero else spec.reducing.inside
    sizes_of_axes = {**sizes, **expert_mesh(sizes, spec.etp), **hybrid_mesh(sizes, spec.etp, part)}
    num_stages = sizes["pp"]
    train = spec.objective == "train"
    trainable = {n for n, s in model.states.items() if train and s.kind == "parameter" and s.requires_grad}
    paths = {name: find_gradient_paths(block) for name, block in model.blocks.items()}
    flow = compute_gradient_flow(model.calls, paths, trainable, model.loss)
    ranks = ranks_of(schedule, num_stages, spec.virtual_stages)
    routes = make_routes(model, stage_of_call, num_stages, ranks, flow)

    with_gradient = {s for added in flow.states for s in added}

    def shared(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the mesh axes over which ZeRO shards a parameter; empty if it is not sharded. Scalars are never
        sharded. ``name``: name of the parameter. ``axes``: the mesh axes over which its gradient is summed."""
        state, base = model.states[name], spec.layout_of
        if base is not None:
            return base.states[name].zero_axes if name in base.states and state.kind == "parameter" else ()
        if state.kind != "parameter" or not state.spec.shape or (zero < 3 and not train):
            return ()
        if zero == 3 and name in spec.left_whole:
            return ()
        found = zero_axes(
            axes, name in with_gradient, zero=zero, expert=name in layouts.experts, hybrid=0 < dp_shard < sizes["dp"]
        )
        return _select_split_axes(found, sizes_of_axes)

    states = _build_state_data(model, routes, layouts, sizes_of_axes, shared)
    if spec.layout_of is not None:
        read = {s for call in model.calls for s in call.states} | model.updates.keys()
        states = _with_layout_of(states, read, spec.layout_of)
    tied: dict[tuple[int, ...], list[str]] = {}
    for name, state in states.items():
        if name in with_gradient and len(state.stages) > 1:
            tied.setdefault(state.stages, []).append(name)

    def limit(axes: tuple[str, ...]) -> int:
        """Return the bytes that fill a bucket (gradients that are reduced together) if it is reduced over the mesh axes
        ``axes``."""
        return spec.bucket_bytes or bucket_limit(math.prod(sizes_of_axes[axis] for axis in axes))

    calls = [tuple(_build_call_data(model, i) for i in here.calls) for here in routes.stages]
    kept = select_offloads(spec.offload, train)

    def lists(num_microbatches: int) -> list[tuple[tuple[Bucket, ...], tuple[Instruction, ...]]]:
        """Return, for each pipeline stage, two values for a step of ``num_microbatches`` microbatches: its buckets
        (parameters whose gradients are reduced together), and its instructions.
        """
        orders = build_timetable(schedule, num_stages, num_microbatches, spec.virtual_stages).orders
        fetched = plan_fetches(orders, routes, train)
        result = []
        for s, here in enumerate(routes.stages):
            gradients = [
                _build_gradient(
                    n, d, n in with_gradient, sizes_of_axes, _find_reader_positions(calls[s], n) if zero == 3 else ()
                )
                for n, d in states.items()
                if (n in with_gradient or d.zero_axes) and s in d.stages
            ]
            added = _find_gradient_additions(here, flow)
            if spec.layout_of is None:
                planned = plan_buckets(here, orders[s], gradients, added, limit, zero)
            else:
                kept_buckets = _list_buckets_to_share(spec.layout_of, s, train)
                planned = follow_buckets(here, orders[s], gradients, added, kept_buckets, zero)
            buckets = [with_levels(b, states[b.states[0]].zero_axes, sizes_of_axes, spec.reducing) for b in planned]
            job = StageJob(
                stage=s,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                train=train,
                routes=routes,
                calls=calls[s],
                flow=_stage_flow(model, here, flow),
                order=orders[s],
                fetches=fetched[s],
                buckets=buckets,
                syncs=[tuple(names) for among, names in sorted(tied.items()) if s in among],
                updates=updates_of(states, s),
                new_values={n: v for n, v in model.updates.items() if routes.home[v] == s and n not in model.keeps},
                total_axes=_select_split_axes(("dp",), sizes),
                zero=zero,
                offload=kept,
                hosted=frozenset(n for n, d in states.items() if s in d.stages and is_in_host_memory(d, kept, train)),
                trained=tuple(n for n, d in states.items() if s in d.stages and n in with_gradient),
            )
            reduced = tuple(
                Bucket(states=b.states, axes=b.axes, levels=b.levels, compression=b.compression) for b in buckets
            )
            result.append((reduced, stage_instructions(job)))
        return result

    def chosen(s: int, calls: set[int]) -> tuple[int, ...]:
        """Return the positions, on the pipeline stage with index ``s``, of the block calls (such as layers) that are in
        ``calls`` and have a backward. ``calls``: indices of block calls in the model, such as those that are
        recomputed."""
        return tuple(p for p, i in enumerate(routes.stages[s].calls) if i in calls and flow.has_backward(i))

    whole, slim = set(spec.recompute), set(spec.selective) - set(spec.recompute)
    slimmed = {model.calls[i].block for i in slim}
    stages = [
        Stage(
            calls=calls[s],
            instructions=instructions,
            buckets=buckets,
            checkpoint_calls=chosen(s, whole),
            selective_calls=chosen(s, slim),
        )
        for s, (buckets, instructions) in enumerate(
            _derive_instruction_lists(
                lists,
                find_steady_state(schedule, num_stages, spec.num_microbatches, spec.virtual_stages),
                spec.num_microbatches,
            )
        )
    ]
    used = {c.block for stage in stages for c in stage.calls}
    return Program(
        mesh=sizes,
        objective=spec.objective,
        num_microbatches=spec.num_microbatches,
        data_shares=tuple(spec.data_shares),
        schedule=schedule_name(schedule),
        blocks={
            name: BlockGraph(
                nodes=block_to_data(block),
                states=block.states,
                inputs=block.inputs,
                again=tuple(sorted(spec.again.get(name, ()))) if name in slimmed else (),
            )
            for name, block in model.blocks.items()
            if name in used
        },
        states=states,
        values=_build_value_data(model, flow, layouts),
        inputs=tuple(
            InputData(
                value=i.value,
                path=i.path,
                shape=i.spec.shape,
                dtype=dtype_name(i.spec.dtype),
                batch_dim=layouts.batch_dims.get(i.value),
                number=i.number,
            )
            for i in model.inputs
        ),
        outputs=tuple(_build_output_data(model, routes, layouts)),
        loss=model.loss,
        stages=tuple(stages),
        fingerprint=hash_weights(states),
        constants={n: model.constants[n].tolist() for n in states if n in model.constants},
        initial={n: model.initial[n] for n in states if n in model.initial},
        tree=model.tree,
        signature=_build_signature_data(model.signature),
        etp=spec.etp,
        zero=zero if any(state.zero_axes for state in states.values()) else 0,
        dp_shard=part,
        fused_attention=spec.fused_attention,
        whole_scatter=spec.whole_scatter,
        offload=kept,
    )


def _build_signature_data(signature: CallSignature) -> SignatureData:
    """Return ``signature``, the description of the model's forward, in the form that a program file stores: argument
    names and defaults, fixed values by path, and guards (conditions on the inputs) with their expressions as JSON."""
    arguments = None
    if signature.arguments is not None:
        arguments = tuple(
            ArgumentData(
                name=a.name,
                required=a.required,
                default=PlainValue.of(a.default) if a.plain and not a.required else None,
            )
            for a in signature.arguments
        )
    return SignatureData(
        arguments=arguments,
        fixed={path: PlainValue.of(value) for path, value in signature.fixed.items()},
        guards=tuple(
            GuardData(expression=json.dumps(g.expression), outcome=g.outcome, where=g.where) for g in signature.guards
        ),
    )


Lists = Sequence[tuple[tuple[Bucket, ...], Instructions]]  # by stage


def _derive_instruction_lists(lists: Callable[[int], Lists], found: SteadyState | None, num_microbatches: int) -> Lists:
    """Return, for each pipeline stage, its buckets (parameters whose gradients are reduced together) and its
    instructions, for a step of ``num_microbatches`` microbatches.

    ``lists``: function from a number of microbatches to the buckets and full instructions of each stage. ``found``: the
    repeating part of the schedule; the instructions are then stored in compressed form: those of a step with few
    microbatches, and how often groups of them are repeated. ``None``: the instructions are stored in full.
    """
    if found is None:
        return lists(num_microbatches)
    result: list[tuple[tuple[Bucket, ...], Instructions]] = []
    for few, many in zip(lists(found.least), lists(found.least + found.unit), strict=True):
        parts = parts_of(few[1], many[1], found.unit) if few[0] == many[0] else None
        if parts is None:
            return lists(num_microbatches)
        result.append((few[0], Listing(steps=found.steps, unit=found.unit, parts=parts)))
    return result


def _check_mesh(mesh: Mapping[str, int], objective: str, model: FoldedModel, dp_shard: int) -> None:
    """Raise ``EmitError`` if ``mesh`` has an unknown axis or a size below 1, if ``dp_shard`` does not divide the size
    of ``dp``, or if ``objective`` is ``train`` and ``model`` has no loss. ``mesh``: axis name -> number of ranks.
    ``dp_shard``: number of ``dp`` ranks that shard a parameter; 0: all."""
    unknown = set(mesh) - set(MESH_AXES)
    if unknown or any(size < 1 for size in mesh.values()):
        raise EmitError(f"mesh {dict(mesh)}: its axes are {', '.join(MESH_AXES)}, each of at least one rank")
    if dp_shard and mesh.get("dp", 1) % dp_shard:
        raise EmitError(f"states sharded over {dp_shard} of dp={mesh.get('dp', 1)} ranks; expected a divisor")
    if objective == "train" and model.loss is None:
        raise EmitError("training needs a loss and the model has none; give loss=... or objective='infer'")


def _select_split_axes(axes: Collection[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes in ``axes`` that have more than one rank, in the order of the mesh. ``sizes``: number of
    ranks by axis.
    """
    return tuple(a for a in ALL_AXES if a in axes and sizes[a] > 1)


def _build_call_data(model: FoldedModel, index: int) -> CallData:
    """Return one block call (such as a layer) of ``model`` in the form that a program stores. ``index``: its index in
    ``model.calls``."""
    c = model.calls[index]
    return CallData(
        block=c.block, path=c.path, states=c.states, inputs=c.inputs, outputs=c.outputs, prologue=c.prologue
    )


def _build_state_data(
    model: FoldedModel,
    routes: Routes,
    layouts: Layouts,
    sizes: Mapping[str, int],
    shared: Callable[[str, tuple[str, ...]], tuple[str, ...]],
) -> dict[str, StateData]:
    """Return the description of each parameter and buffer of ``model`` by name, with the pipeline stages that read it.
    A parameter or buffer that no block (such as a layer) reads is on stage 0; constants that no block reads are left
    out. Raise :class:`EmitError` if a layout does not divide a shape.

    ``routes``: the block calls of each stage. ``layouts``: layouts of the tensors over the mesh. ``sizes``: number of
    ranks by mesh axis. ``shared``: function that returns the mesh axes over which ZeRO shards a parameter, given its
    name and the axes over which its gradient is summed.
    """
    read: dict[str, set[int]] = {name: set() for name in model.states}
    for s, here in enumerate(routes.stages):
        for i in here.calls:
            for name in model.calls[i].states:
                read[name].add(s)
    for name, value in model.updates.items():
        read[name].add(routes.home[value])
    result = {}
    for name, state in model.states.items():
        if state.kind == "constant" and not read[name]:
            continue
        layout = layouts.states.get(name, REPLICATED)
        if not can_shard_evenly(layout, state.spec.shape, sizes["tp"]):
            raise EmitError(f"state {name!r} of shape {state.spec.shape} cannot be {layout} over tp={sizes['tp']}")
        by_expert = layouts.experts.get(name, REPLICATED)
        if name in model.updates and by_expert.is_shard:
            raise EmitError(
                f"forward changes the experts' buffer {name!r}, which would be distributed over ep; use ep=1"
            )
        if not can_shard_evenly(by_expert, state.spec.shape, sizes["ep"]):
            raise EmitError(f"state {name!r} of shape {state.spec.shape} cannot be {by_expert} over ep={sizes['ep']}")
        grad_axes = _select_split_axes(layouts.grad_axes.get(name, ()), sizes)
        result[name] = StateData(
            shape=state.spec.shape,
            dtype=dtype_name(state.spec.dtype),
            kind=state.kind,
            requires_grad=state.requires_grad,
            aliases=state.aliases,
            parts=state.parts,
            layout=str(layout),
            expert_layout=str(by_expert),
            stages=tuple(sorted(read[name] or {0})),
            grad_axes=grad_axes,
            zero_axes=shared(name, grad_axes) if read[name] else (),
            update=model.updates.get(name),
            keeps=model.keeps.get(name),
        )
    return result


def _with_layout_of(states: Mapping[str, StateData], read: Collection[str], base: Program) -> dict[str, StateData]:
    """Return ``states``, the parameters and buffers of a program by name, adapted to the program ``base`` on the same
    weights. Parameters and buffers that only ``base`` has are added. Those that this program does not read get their
    placement in ``base``.

    ``read``: names of the parameters and buffers that this program's calls or updates use. These keep their layout, and
    are also placed on stages where only ``base`` reads them. If their layout in ``base`` is different, a later check of
    the program raises an error.
    """
    found = dict(states)
    for name, held in base.states.items():
        if held.kind == "constant":
            continue
        if name not in states:
            found[name] = held.model_copy(update={"update": None, "keeps": None, "grad_axes": ()})
        elif name not in read:
            kept = {field: getattr(held, field) for field in ("stages", "layout", "expert_layout", "zero_axes")}
            found[name] = states[name].model_copy(update=kept)
        elif set(states[name].stages) < set(held.stages):
            found[name] = states[name].model_copy(update={"stages": held.stages})
    return found


def _list_buckets_to_share(base: Program, stage: int, train: bool) -> list[tuple[str, ...]]:
    """Return the buckets (parameters whose gradients are reduced together) of the program ``base`` on one pipeline
    stage, each as the names of its parameters, for a further program on the same weights.

    ``stage``: index of the stage. ``train``: whether the further program trains. If not, only buckets of parameters
    that ZeRO shards are returned, since it has to gather these.
    """
    buckets = [b.states for b in base.stages[stage].buckets]
    return [states for states in buckets if train or base.states[states[0]].zero_axes]


def _build_gradient(
    name: str, state: StateData, trained: bool, sizes: Mapping[str, int], readers: tuple[int, ...]
) -> Gradient:
    """Return the description of the gradient of the parameter ``name`` on one rank. ``state``: shape, dtype and layout
    of the parameter. ``trained``: whether the parameter has a gradient. ``sizes``: number of ranks by mesh axis.
    ``readers``: positions of the stage's block calls (such as layers) that read the parameter; they are ignored unless
    ZeRO shards it."""
    shape = local_shape(Layout.parse(state.expert_layout), state.shape, sizes["ep"])
    shape = local_shape(Layout.parse(state.layout), shape, sizes["tp"])
    tied = state.stages if len(state.stages) > 1 else ()
    return Gradient(
        name,
        state.dtype,
        TensorSpec(shape, accumulated_in(dtype_of(state.dtype))).nbytes,
        state.grad_axes if trained else (),
        tied if trained else (),
        state.zero_axes,
        readers if state.zero_axes else (),
    )


def _find_reader_positions(calls: Sequence[CallData], state: str) -> tuple[int, ...]:
    """Return the positions of the block calls (such as layers) that read the parameter ``state`` in ``calls``, the
    calls of a pipeline stage."""
    return tuple(position for position, call in enumerate(calls) if state in call.states)


def _find_gradient_additions(here: StageCalls, flow: GradientFlow) -> dict[str, list[int]]:
    """Return name of a parameter -> positions, in increasing order, of the block calls (such as layers) on a pipeline
    rank whose backward adds to its gradient. ``here``: the calls of the rank. ``flow``: which gradients calls compute.
    """
    adds: dict[str, list[int]] = {}
    for position, i in enumerate(here.calls):
        for name in flow.states[i]:
            adds.setdefault(name, []).append(position)
    return adds


def _stage_flow(model: FoldedModel, here: StageCalls, flow: GradientFlow) -> StageFlow:
    """Return, for each block call (such as a layer) of a pipeline rank: the names of the values whose gradients its
    backward reads, the names of the values whose gradients its backward computes, and whether it has a backward.
    ``here``: the calls of the rank. ``flow``: which calls of ``model`` compute and read which gradients."""
    return StageFlow(
        takes=tuple(tuple(v for v in model.calls[i].outputs if v in flow.values) for i in here.calls),
        gives=tuple(flow.inputs[i] for i in here.calls),
        runs=tuple(flow.has_backward(i) for i in here.calls),
    )


def _build_value_data(model: FoldedModel, flow: GradientFlow, layouts: Layouts) -> dict[str, Value]:
    """Return name of a value -> its shape, dtype, layouts, and whether a gradient flows to it, for each input of
    ``model`` and each output of its block calls (such as layers). ``layouts``: layouts of the values over the mesh.
    ``flow``: which values have gradients."""
    names = [i.value for i in model.inputs] + [v for c in model.calls for v in c.outputs]
    return {
        name: Value(
            shape=model.values[name].shape,
            dtype=dtype_name(model.values[name].dtype),
            requires_grad=name in flow.values,
            layout=str(layouts.values.get(name, REPLICATED)),
            context=str(layouts.context.get(name, REPLICATED)),
        )
        for name in names
    }


def _build_output_data(model: FoldedModel, routes: Routes, layouts: Layouts) -> list[OutputData]:
    """Return a description of each output of ``model``, in order: a constant, or a value with its layouts and the
    pipeline stage that holds it. ``routes``: the pipeline rank that holds each output. ``layouts``: layouts of the
    values over the mesh.
    """
    result = []
    for o in model.outputs:
        if o.value is None:
            result.append(OutputData(path=o.path, constant=o.constant))
            continue
        result.append(
            OutputData(
                path=o.path,
                value=o.value,
                batch=layouts.batch.get(o.value, "R"),
                layout=str(layouts.values.get(o.value, REPLICATED)),
                context=str(layouts.context.get(o.value, REPLICATED)),
                stage=routes.home[o.value],
            )
        )
    return result
