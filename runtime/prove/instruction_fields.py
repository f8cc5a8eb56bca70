"""Check that each instruction has the fields that its operation requires, with valid values, and no other fields."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.runtime.program.instructions import Forms, Instruction
from partitioner.runtime.program.mesh import ALL_AXES
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import FaultLocation, Refusal

FIELDS: dict[str, frozenset[str]] = {
    "LOAD": frozenset({"microbatch", "values"}),
    "TOTAL_F": frozenset({"microbatch", "values"}),
    "TOTAL": frozenset({"values"}),
    "RECV_F": frozenset({"microbatch", "values", "peer"}),
    "F": frozenset({"microbatch", "calls"}),
    "SEND_F": frozenset({"microbatch", "values", "peer"}),
    "RECV_B": frozenset({"microbatch", "values", "peer"}),
    "B": frozenset({"microbatch", "calls"}),
    "I": frozenset({"microbatch", "calls"}),
    "W": frozenset({"microbatch", "calls"}),
    "SEND_B": frozenset({"microbatch", "values", "peer"}),
    "GATHER": frozenset({"bucket"}),
    "SCATTER": frozenset({"bucket"}),
    "REDUCE": frozenset({"bucket"}),
    "SYNC": frozenset({"states"}),
    "UPDATE": frozenset({"states", "microbatch"}),
    "OFFLOAD": frozenset(),
    "FETCH": frozenset(),
    "FREE": frozenset(),
    "STEP": frozenset(),
}
OPTIONAL: dict[str, frozenset[str]] = {
    "GATHER": frozenset({"axes", "gradients"}),
    "SCATTER": frozenset({"axes"}),
    "TOTAL": frozenset({"axes"}),
    "OFFLOAD": frozenset({"microbatch", "calls", "states"}),
    "FETCH": frozenset({"microbatch", "calls", "states"}),
    "FREE": frozenset({"values", "microbatch", "gradients", "bucket", "states"}),
}
TRAIN_ONLY = frozenset({"RECV_B", "B", "I", "W", "SEND_B", "SCATTER", "REDUCE", "SYNC", "OFFLOAD", "STEP"})
_EMPTY: dict[str, object] = {
    "microbatch": None,
    "calls": None,
    "values": (),
    "peer": None,
    "axes": (),
    "bucket": None,
    "states": (),
    "gradients": False,
}


def check_fields(program: Program, stage: int, instructions: Sequence[Instruction], forms: Forms) -> None:
    """Raise :class:`Refusal` at the first of ``instructions`` that lacks a field, has one that its operation does not
    use, or has an invalid value. ``stage``: index of the pipeline stage that runs ``instructions``. ``forms``: the
    distinct instructions, up to the microbatch number. ``program``: the program of all ranks.
    """
    problems = [_find_field_problem(program, stage, first) for first in forms.firsts]
    stop = program.num_microbatches
    for index, (instruction, form) in enumerate(zip(instructions, forms.numbers, strict=True)):
        microbatch = instruction.microbatch
        if problems[form]:
            raise Refusal("fields", problems[form], FaultLocation(index=index))
        if microbatch is not None and not 0 <= microbatch < stop:
            raise Refusal("fields", f"microbatch {microbatch} of {stop}", FaultLocation(index=index))


def _find_field_problem(program: Program, stage: int, instruction: Instruction) -> str:
    """Return why the fields of ``instruction``, in the list of the pipeline stage ``stage`` (an index), are not valid,
    as text for an error message; empty if they are valid. ``program``: the program of all ranks.
    """
    op = instruction.op
    if instruction.stage != stage:
        return f"is of stage {instruction.stage}; this rank is on stage {stage}"
    if program.objective == "infer" and op in TRAIN_ONLY:
        return f"a program for inference has no {op}"
    wanted, optional = FIELDS[op], OPTIONAL.get(op, frozenset())
    for name, empty in _EMPTY.items():
        given = getattr(instruction, name) != empty
        if name in wanted and not given:
            return f"{op} needs {name}"
        if given and name not in wanted | optional:
            return f"{op} has no {name}; got {getattr(instruction, name)!r}"
    if op == "FREE":
        given = [bool(instruction.values), instruction.bucket is not None, bool(instruction.states)]
        if sum(given) != 1:
            return "FREE has values, a bucket or states, not several" if any(given) else "FREE needs values"
        if not given[0] and (instruction.gradients or instruction.microbatch is not None):
            return "FREE of a bucket or of states has no microbatch and no gradients"
    if op == "GATHER" and instruction.gradients != bool(instruction.axes):
        return "GATHER of gradients needs axes, that of parameters has none"
    if op == "GATHER" and instruction.gradients and program.objective == "infer":
        return "a program for inference has no GATHER of gradients"
    if op in ("OFFLOAD", "FETCH") and (instruction.calls is None) != bool(instruction.states):
        return f"{op} needs calls or states, and not both"
    if op in ("OFFLOAD", "FETCH") and (instruction.calls is None) != (instruction.microbatch is None):
        return f"{op} of calls is for a microbatch, that of states is not"
    peer, bucket, calls = instruction.peer, instruction.bucket, instruction.calls
    if peer is not None and (not 0 <= peer < len(program.stages) or peer == stage):
        return f"the peer is stage {peer}; expected another of the stages 0 to {len(program.stages) - 1}"
    here = program.stages[stage]
    if bucket is not None and not 0 <= bucket < len(here.buckets):
        return f"bucket {bucket}; the stage has {len(here.buckets)}"
    if calls is not None and not 0 <= calls[0] < calls[1] <= len(here.calls):
        return f"calls {calls[0]} to {calls[1]}; the stage has {len(here.calls)}"
    if calls is not None and any(c.prologue for c in here.calls[slice(*calls)]):
        return f"calls {calls[0]} to {calls[1]} have a prologue call among them, which only TOTAL_F runs"
    for kind, names, known in (
        ("value", instruction.values, program.values),
        ("state", instruction.states, program.states),
        ("axis", instruction.axes, program.mesh if op == "TOTAL" else ALL_AXES),
    ):
        if len(set(names)) < len(names):
            return f"names a {kind} twice: {', '.join(names)}"
        for name in names:
            if name not in known:
                return f"the {kind} {name!r} does not exist"
    return ""
