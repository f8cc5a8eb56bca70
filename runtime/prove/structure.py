"""Static checks of a program: names, shapes, dtypes and graphs are consistent, and inputs and outputs fit the global
batch. Every fault is reported at the first instruction that it affects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from partitioner.passes.ir.layouts import Layout, can_shard_evenly, local_shape
from partitioner.passes.ir.model import TensorSpec
from partitioner.passes.ir.serialize import dtype_of
from partitioner.passes.ir.verify import format_meta_value
from partitioner.runtime.program.analysis import ProgramFacts, find_graph_fault
from partitioner.runtime.program.mesh import MESH_AXES
from partitioner.runtime.program.program import (
    CallData,
    InputData,
    OutputData,
    Program,
    Value,
    hash_weights,
    shard_shape,
)
from partitioner.runtime.prove.errors import FaultLocation, Refusal
from partitioner.runtime.prove.host_memory import check_updates
from partitioner.runtime.prove.states import check_buckets, check_state

DATA_AXES = ("dp",)  # the mesh axes along which the batch is split, besides the microbatches


def check_inputs(program: Program) -> None:
    """Raise :class:`Refusal` unless each input of the batch fits the program's tensor (the value) that it fills: the
    value must have the shape and dtype of the part of the input that one rank reads for one microbatch. ``program``:
    the program of all ranks.
    """
    for given in program.inputs:
        problem = _find_input_problem(program, given)
        if problem:
            reads = [s for s, stage in enumerate(program.stages) for c in stage.calls if given.value in c.inputs]
            raise Refusal(
                "structure", f"the input {given.path!r} {problem}", FaultLocation(stage=min(reads, default=0))
            )


def _find_input_problem(program: Program, given: InputData) -> str:
    """Return why ``given``, an input of the batch, does not fit the program's tensor (the value) that it fills, as the
    end of an error message; empty if it fits. ``program``: the program of all ranks.
    """
    if given.value not in program.values:
        return f"is the value {given.value!r}, which does not exist"
    pieces = program.batch_microbatches
    value, shape = program.values[given.value], list(given.shape)
    if given.batch_dim is not None:
        if not 0 <= given.batch_dim < len(shape) or shape[given.batch_dim] % pieces:
            return f"of shape {given.shape} cannot be split into {pieces} microbatches on dim {given.batch_dim}"
        shape[given.batch_dim] //= pieces
    part = tuple(shape)
    for axis, layout in (("cp", Layout.parse(value.context)), ("tp", Layout.parse(value.layout))):
        size = program.mesh.get(axis, 1)
        if layout.kind == "P" or not can_shard_evenly(layout, part, size):
            return f"of shape {part} for one microbatch cannot be {layout} over {axis}={size}"
        part = local_shape(layout, part, size)
    if (part, given.dtype) != (value.shape, value.dtype):
        return f"is {given.dtype}{list(part)} for one microbatch, its value {value.dtype}{list(value.shape)}"
    return ""


def check_outputs(program: Program) -> None:
    """Raise :class:`Refusal` unless each output of the model is an existing value with the declared layout, and the
    loss is one number that is equal on all ranks of ``tp`` and ``cp``. ``program``: the program of all ranks.
    """
    for output in program.outputs:
        problem = "" if output.value is None else _find_output_problem(program, output, output.value)
        if problem:
            stage = output.stage if output.stage in range(len(program.stages)) else 0
            raise Refusal("structure", f"the output {output.path!r} {problem}", FaultLocation(stage=stage or 0))
    problem = _find_loss_problem(program)
    if problem:
        raise Refusal("structure", problem, FaultLocation(stage=len(program.stages) - 1))


def _find_output_problem(program: Program, output: OutputData, name: str) -> str:
    """Return why ``output``, an output of the model, cannot be the program's tensor (value) called ``name``, as the end
    of an error message; empty if it can.
    """
    if name not in program.values:
        return f"is the value {name!r}, which does not exist"
    if output.stage not in range(len(program.stages)):
        return f"is on stage {output.stage}; expected a stage below {len(program.stages)}"
    value = program.values[name]
    if output.layout != value.layout:
        return f"is {output.layout} over tp, but its value is {value.layout}"
    if output.context != value.context:
        return f"is {output.context} over cp, but its value is {value.context}"
    if output.batch not in ("P", "R", *(f"S{d}" for d in range(len(value.shape)))):
        return f"is {output.batch!r} over the batch; expected P, R or S<dim> of {len(value.shape)} dims"
    if name == program.loss and output.batch != "P":
        return f"is the loss, of which each microbatch has a part, but is {output.batch!r} over the batch"
    return ""


def _find_loss_problem(program: Program) -> str:
    """Return why the loss of ``program`` is not valid, as an error message; empty if it is valid."""
    if program.loss is None:
        return "a program for training has no loss" if program.objective == "train" else ""
    if program.loss not in program.values:
        return f"the loss is the value {program.loss!r}, which does not exist"
    value = program.values[program.loss]
    if math.prod(value.shape) != 1 or value.layout != "R" or value.context != "R":
        where = value.layout if value.context == "R" else f"{value.context} over cp"
        return f"the loss {program.loss!r} is {where} of shape {value.shape}; expected one whole number"
    return ""


DATA = "data"  # name in graphs of the axis along which the batch is split: ranks of ``dp`` times microbatches


def check_structure(facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` at the first contradiction in the data of a program: names, shapes, dtypes, layouts,
    graphs, or gradient buckets. ``facts``: the program of all ranks, with the gradients, collectives and memory of its
    block calls (such as layers).
    """
    program = facts.program
    _check_mesh(program)
    _check_blocks(program)
    for s in range(len(program.stages)):
        _check_calls(facts, s)
    _check_call_order(facts)
    _check_value_sources(program)
    for name in program.states:
        check_state(facts, name)
    if program.fingerprint != hash_weights(program.states):
        raise Refusal(
            "structure", "the fingerprint is not the hash of the states' names, shapes and types: write the plan again"
        )
    check_inputs(program)
    check_outputs(program)
    check_updates(program)
    for name, value in program.values.items():
        if value.requires_grad != (name in facts.flow.values):
            flows = "flows" if name in facts.flow.values else "does not flow"
            problem = f"requires_grad is {value.requires_grad}, but a gradient {flows} through the value {name!r}"
            at, position = _find_first_call(program, partial(_is_value_of_call, name))
            raise Refusal("structure", problem, FaultLocation(stage=at, call=position))
    for s in range(len(program.stages)):
        check_buckets(facts, s)


def _find_first_call(program: Program, wanted: Callable[[CallData], bool]) -> tuple[int, int | None]:
    """Return the stage index and the position of the first block call (such as a layer) for which ``wanted`` returns
    true; ``(0, None)`` if there is none. ``program``: the program of all ranks.
    """
    for s, stage in enumerate(program.stages):
        for position, call in enumerate(stage.calls):
            if wanted(call):
                return s, position
    return 0, None


def _is_of(block: str, call: CallData) -> bool:
    return call.block == block


def _is_value_of_call(value: str, call: CallData) -> bool:
    return value in (*call.inputs, *call.outputs)


def _check_mesh(program: Program) -> None:
    """Raise :class:`Refusal` unless the sizes of the mesh axes fit the number of pipeline stages, the groups of ranks
    for experts and the division of the batch, and the offloaded kinds of data can be offloaded together; for example,
    parameters only together with the optimizer that updates them. ``program``: the program of all ranks.
    """
    if set(program.mesh) - set(MESH_AXES) or any(size < 1 for size in program.mesh.values()):
        raise Refusal("structure", f"the mesh {program.mesh} has axes other than {', '.join(MESH_AXES)}, or empty ones")
    room = program.world_size // program.mesh.get("pp", 1)
    if program.etp < 0 or room % (program.size("ep") * program.size("etp")):
        problem = f"experts over ep={program.size('ep')} x etp={program.size('etp')} of the {room} ranks of a stage"
        raise Refusal("structure", f"{problem}: expected sizes whose product divides them")
    if program.dp_shard < 0 or (program.dp_shard and program.size("dp") % program.dp_shard):
        raise Refusal(
            "structure",
            f"states are sharded over dp_shard={program.dp_shard} ranks, which does not divide dp={program.size('dp')}",
        )
    if not program.stages or len(program.stages) != program.mesh.get("pp", 1):
        raise Refusal(
            "structure", f"the program has {len(program.stages)} stages; expected pp={program.mesh.get('pp', 1)}"
        )
    if "parameters" in program.offload and program.zero in (1, 2):
        raise Refusal("structure", f"parameters are in host memory with zero={program.zero}; expected zero=0 or zero=3")
    if "parameters" in program.offload and program.objective == "train" and "optimizer" not in program.offload:
        raise Refusal(
            "structure", "parameters are in host memory and the optimizer is not; expected the optimizer there, too"
        )
    if "disk" in program.offload and "optimizer" not in program.offload:
        raise Refusal(
            "structure", "optimizer states are on disk and the optimizer is not in host memory; expected it there"
        )
    if program.num_microbatches < 1:
        raise Refusal("structure", f"the program has {program.num_microbatches} microbatches; expected at least one")
    shares = program.data_shares
    if shares and (len(shares) != program.size("dp") or min(shares) < 1 or max(shares) != program.num_microbatches):
        raise Refusal(
            "structure",
            f"the shares {shares} of the microbatches; expected one for each of the {program.size('dp')} ranks of dp, "
            f"of at least one microbatch and at most {program.num_microbatches}, which one of them has",
        )


def _check_blocks(program: Program) -> None:
    """Raise :class:`Refusal` unless the graph of every block (a piece of the model) is well-formed, and its stored
    shapes and dtypes equal those inferred from the graph. ``program``: the program of all ranks.
    """
    axes = {axis: program.mesh.get(axis, 1) for axis in MESH_AXES if axis != "pp"}
    axes[DATA] = program.batch_microbatches
    for name in program.blocks:
        fault = find_graph_fault(program, name, axes)
        if fault is not None:
            stage, position = _find_first_call(program, partial(_is_of, name))
            raise Refusal("structure", fault[0], FaultLocation(stage=stage, call=position, node=fault[1]))


def _check_calls(facts: ProgramFacts, stage: int) -> None:
    """Raise :class:`Refusal` unless the block calls of the pipeline stage ``stage`` (an index) name existing tensors of
    the right shapes, and compute each value once. ``facts``: the program of all ranks, with the gradients, collectives
    and memory of its block calls (such as layers).
    """
    made: dict[str, int] = {}
    for position, call in enumerate(facts.program.stages[stage].calls):
        _check_call_names(facts.program, stage, position, call)
        _check_call_specs(facts, stage, position, call)
        for name in call.outputs:
            if name in made:
                problem = f"the value {name!r} is computed by call {made[name]}, too; expected one call"
                raise Refusal("structure", problem, FaultLocation(stage=stage, call=position))
            made[name] = position


def _check_call_names(program: Program, stage: int, position: int, call: CallData) -> None:
    """Raise :class:`Refusal` unless the block (the graph of a layer, for example), parameters, buffers and values that
    the block call ``call`` names exist, and the parameters and buffers are on the pipeline stage ``stage`` (an index).
    ``position``: the call's position on the stage. ``program``: the program of all ranks.
    """
    problem = ""
    if call.block not in program.blocks:
        problem = f"the block {call.block!r} does not exist"
    for name in call.states:
        if name not in program.states:
            problem = f"the state {name!r} does not exist"
        elif stage not in program.states[name].stages:
            problem = f"reads the state {name!r}, which is on the stages {program.states[name].stages}"
    for name in (*call.inputs, *call.outputs):
        if name not in program.values:
            problem = f"the value {name!r} does not exist"
    if problem:
        raise Refusal("structure", problem, FaultLocation(stage=stage, call=position))


def _check_call_specs(facts: ProgramFacts, stage: int, position: int, call: CallData) -> None:
    """Raise :class:`Refusal` unless the tensors that ``call`` (an execution of a block) reads and computes have the
    shapes and dtypes of its graph. ``position``: the call's position on the pipeline stage ``stage`` (an index).
    ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls.
    """
    program, block = facts.program, facts.blocks[call.block]
    for kind, have, want in (
        ("states", call.states, block.states),
        ("inputs", call.inputs, block.inputs),
        ("outputs", call.outputs, block.outputs),
    ):
        if len(have) != len(want):
            problem = f"{call.path!r} names {len(have)} {kind}; expected {len(want)}, as in its graph"
            raise Refusal("structure", problem, FaultLocation(stage=stage, call=position))
    specs = [_get_state_spec(program, n) for n in call.states]
    specs += [_get_value_spec(program.values[n]) for n in (*call.inputs, *call.outputs)]
    names = (*call.states, *call.inputs, *call.outputs)
    for name, spec, node in zip(names, specs, (*block.placeholders, *block.outputs), strict=True):
        have_text = "of an unknown type or layout" if spec is None else format_meta_value(spec.meta())
        if spec != TensorSpec.from_tensor(node.meta["val"]):
            problem = f"{name!r} is {have_text}, but {format_meta_value(node.meta['val'])} in the graph"
            raise Refusal("structure", problem, FaultLocation(stage=stage, call=position, node=node.name))


def _get_value_spec(value: Value) -> TensorSpec | None:
    """Return the shape and dtype of ``value``, a tensor that passes between block calls (such as layers), on one rank
    for one microbatch; ``None`` if its dtype or a layout is malformed.
    """
    try:
        Layout.parse(value.layout)
        Layout.parse(value.context)
        return TensorSpec(value.shape, dtype_of(value.dtype))
    except ValueError:
        return None


def _get_state_spec(program: Program, name: str) -> TensorSpec | None:
    """Return the shape and dtype of one rank's shard of the parameter or buffer called ``name``; ``None`` if its dtype
    or a layout is malformed. ``program``: the program of all ranks.
    """
    state = program.states[name]
    try:
        return TensorSpec(shard_shape(program, name), dtype_of(state.dtype))
    except ValueError:
        return None


def _check_call_order(facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` if a tensor that a block call (such as a layer) reads is never computed, or if calls
    depend on each other in a cycle. ``facts``: the program of all ranks, with the gradients, collectives and memory of
    its block calls.
    """
    placed = set(facts.order)
    for s, stage in enumerate(facts.program.stages):
        for position, call in enumerate(stage.calls):
            if (s, position) not in placed:
                problem = f"{call.path!r} reads {', '.join(call.inputs)}; expected values that earlier calls compute"
                raise Refusal("structure", problem, FaultLocation(stage=s, call=position))


def _check_value_sources(program: Program) -> None:
    """Raise :class:`Refusal` if different block calls (such as layers) compute the same value. Several pipeline stages
    may run an equal call if its value needs no gradient. ``program``: the program of all ranks.
    """
    batch = CallData(block="", path="the batch")
    source: dict[str, tuple[int, CallData]] = {i.value: (-1, batch) for i in program.inputs}
    for s, stage in enumerate(program.stages):
        for position, call in enumerate(stage.calls):
            for value in call.outputs:
                there, other = source.setdefault(value, (s, call))
                if there != s and (other != call or program.values[value].requires_grad):
                    problem = f"the value {value!r} is made by {other.path!r} too"
                    raise Refusal("structure", problem, FaultLocation(stage=s, call=position))
