"""What goes into a program and what comes out of it, against the global batch."""

from __future__ import annotations

import math

from passes.layouts import Layout, divides, local_shape
from runtime.program import InputData, OutputData, Program
from runtime.proof.errors import Refusal

DATA_AXES = ("dp",)  # the mesh axes along which the batch is split, besides the microbatches


def check_inputs(program: Program) -> None:
    """Each input's value is one microbatch's part of it. Raises :class:`Refusal`."""
    for given in program.inputs:
        problem = _input_problem(program, given)
        if problem:
            reads = [s for s, stage in enumerate(program.stages) for c in stage.calls if given.value in c.inputs]
            raise Refusal("structure", f"the input {given.path!r} {problem}", stage=min(reads, default=0))


def _input_problem(program: Program, given: InputData) -> str:
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
        if layout.kind == "P" or not divides(layout, part, size):
            return f"of shape {part} for one microbatch cannot be {layout} over {axis}={size}"
        part = local_shape(layout, part, size)
    if (part, given.dtype) != (value.shape, value.dtype):
        return f"is {given.dtype}{list(part)} for one microbatch, its value {value.dtype}{list(value.shape)}"
    return ""


def check_outputs(program: Program) -> None:
    """Each output's value exists and is described as what it is. Raises :class:`Refusal`."""
    for output in program.outputs:
        problem = "" if output.value is None else _output_problem(program, output, output.value)
        if problem:
            stage = output.stage if output.stage in range(len(program.stages)) else 0
            raise Refusal("structure", f"the output {output.path!r} {problem}", stage=stage or 0)
    problem = _loss_problem(program)
    if problem:
        raise Refusal("structure", problem, stage=len(program.stages) - 1)


def _output_problem(program: Program, output: OutputData, name: str) -> str:
    if name not in program.values:
        return f"is the value {name!r}, which does not exist"
    if output.stage not in range(len(program.stages)):
        return f"is on stage {output.stage}; the pipeline has {len(program.stages)}"
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


def _loss_problem(program: Program) -> str:
    if program.loss is None:
        return "a program for training has no loss" if program.objective == "train" else ""
    if program.loss not in program.values:
        return f"the loss is the value {program.loss!r}, which does not exist"
    value = program.values[program.loss]
    if math.prod(value.shape) != 1 or value.layout != "R" or value.context != "R":
        where = value.layout if value.context == "R" else f"{value.context} over cp"
        return f"the loss {program.loss!r} is {where} of shape {value.shape}; expected one whole number"
    return ""
