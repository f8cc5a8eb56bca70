"""Check parameters, buffers and constants: their layouts, their stages, and the buckets of their gradients."""

from __future__ import annotations

from passes.layouts import Layout, divides
from passes.serialize import dtype_of
from runtime.facts import ProgramFacts
from runtime.levels import level_problem
from runtime.meshes import ALL_AXES, AXES, EXPERT_AXES, HYBRID_AXES
from runtime.program import Program, StateData
from runtime.proof.errors import Refusal


def check_state(facts: ProgramFacts, name: str) -> None:
    """Raise :class:`Refusal` unless the state's layouts, stages and ZeRO axes are valid and its gradient is summed over
    the right axes."""
    problem = _state_problem(facts, name)
    if problem:
        stages = [s for s in facts.program.states[name].stages if 0 <= s < len(facts.program.stages)]
        raise Refusal("structure", f"the state {name!r} {problem}", stage=min(stages, default=0), state=name)


def _state_problem(facts: ProgramFacts, name: str) -> str:
    program, state = facts.program, facts.program.states[name]
    tp = program.mesh.get("tp", 1)
    try:
        layout, over_ep = Layout.parse(state.layout), Layout.parse(state.expert_layout)
        dtype_of(state.dtype)
    except ValueError as error:
        return f"is malformed: {error}"
    if layout.kind == "P" or not divides(layout, state.shape, tp):
        return f"of shape {state.shape} cannot be {layout} over tp={tp}"
    if over_ep.kind not in ("S", "R") or not divides(over_ep, state.shape, program.size("ep")):
        return f"of shape {state.shape} cannot be {over_ep} over ep={program.size('ep')}"
    if over_ep.is_shard and layout.is_shard and over_ep.dim == layout.dim:
        return f"is cut on dim {layout.dim} both over tp and over ep"
    if tuple(sorted(set(state.stages))) != state.stages or not set(range(len(program.stages))) >= set(state.stages):
        return f"is on the stages {state.stages}; expected some of 0 to {len(program.stages) - 1}, in order"
    readers = {s for s, stage in enumerate(program.stages) for c in stage.calls if name in c.states}
    readers |= {
        s for s, stage in enumerate(program.stages) for c in stage.calls if state.update and state.update in c.outputs
    }
    if not state.stages or (readers and readers != set(state.stages)):
        return f"is on the stages {state.stages} and read on {tuple(sorted(readers))}"
    known = (*AXES[1:], *EXPERT_AXES)
    if set(state.grad_axes) - set(known):
        return f"has a gradient to be added up over {state.grad_axes}; expected some of {', '.join(known)}"
    if name in facts.with_gradient and not _is_added_up(program, state, layout, over_ep):
        where = f"{layout} over tp" + (f" and {over_ep} over ep" if over_ep.is_shard else "")
        return f"is {where}, but its gradient is added up over {state.grad_axes or 'no axis'}"
    shared = _zero_problem(facts, name)
    if shared:
        return shared
    if state.kind == "constant" and nested_shape(program.constants.get(name)) != state.shape:
        return f"has shape {state.shape}, its data {nested_shape(program.constants.get(name))}"
    return ""


def _zero_problem(facts: ProgramFacts, name: str) -> str:
    """The fault in how ranks share a state under ZeRO; an empty text if there is none.

    Ranks that share a state must hold the same shard of it and sum its gradient over their axes.
    """
    program, state = facts.program, facts.program.states[name]
    if not state.zero_axes:
        return ""
    axes = split_axes(program, state.zero_axes)
    experts = bool(state.expert_layout != "R" and program.size("ep") > 1)
    known = {"edp", *HYBRID_AXES[2:]} if experts else {"dp", "cp", *HYBRID_AXES[:2]}
    if axes != state.zero_axes or set(axes) - known:
        return (
            f"is shared over {state.zero_axes}; expected axes with more than one rank among {', '.join(sorted(known))}"
        )
    if not program.zero:
        return f"is shared over {axes}, but the program shares no states (zero=0)"
    if state.kind != "parameter" or not state.shape:
        return f"is a {state.kind} of shape {state.shape} and shared over {axes}; expected a parameter with dims"
    if name not in facts.with_gradient:
        return "" if program.zero == 3 else f"takes no gradient, but is shared over {axes} under zero={program.zero}"
    added = {*state.grad_axes, *(p for a in state.grad_axes for p in (f"{a}_shard", f"{a}_replicate"))}
    if not set(axes) <= added:
        return f"is shared over {axes}, but its gradient is added up over {state.grad_axes}"
    return ""


def _is_added_up(program: Program, state: StateData, layout: Layout, over_ep: Layout) -> bool:
    """Whether a gradient is summed over ``tp`` exactly if it is a partial sum there.

    The gradient of an expert must be summed over its replicas, ``edp``, and over ``etp`` if it is a partial sum there,
    and over no other axis.
    """
    axes = split_axes(program, state.grad_axes)
    partial = layout.kind == "R'"
    if over_ep.is_shard and program.size("ep") > 1:
        return axes == split_axes(program, ("edp", "etp") if partial else ("edp",))
    return not set(axes) & set(EXPERT_AXES) and ("tp" in axes) == (partial and program.size("tp") > 1)


def nested_shape(data: object) -> tuple[int, ...] | None:
    """The shape of nested lists, judged by their first elements; ``None`` if ``data`` is ``None``."""
    shape: list[int] = []
    while isinstance(data, list | tuple):
        shape.append(len(data))
        data = data[0] if data else 0
    return None if data is None else tuple(shape)


def check_buckets(facts: ProgramFacts, stage: int) -> None:
    """Check the gradient buckets and the recomputed calls of a stage. Raises :class:`Refusal` if one is wrong.

    Each gradient that is a partial sum over mesh axes must be in exactly one bucket, with those axes. Each parameter
    that ranks share must be in exactly one bucket, together with states that are shared over the same axes.
    """
    program, here = facts.program, facts.program.stages[stage]
    wanted: dict[str, tuple[str, ...]] = {}
    for name, state in program.states.items():
        axes = split_axes(program, state.grad_axes) if name in facts.with_gradient else ()
        if stage in state.stages and (axes or state.zero_axes):
            wanted[name] = axes
    found: set[str] = set()
    for number, bucket in enumerate(here.buckets):
        problem = ""
        for name in bucket.states:
            if name not in wanted:
                problem = f"has {name!r}, which has no gradient to add up on this stage"
            elif name in found:
                problem = f"has {name!r} a second time"
            elif set(bucket.axes) - {*AXES, *EXPERT_AXES} or split_axes(program, bucket.axes) != wanted[name]:
                problem = f"is added up over {bucket.axes}, but the gradient of {name!r} is a sum over {wanted[name]}"
            elif program.states[name].dtype != program.states[bucket.states[0]].dtype:
                problem = "has gradients of several types"
            elif program.states[name].zero_axes != program.states[bucket.states[0]].zero_axes:
                problem = "has states that different ranks share"
            found.add(name)
        if not problem:
            problem = level_problem(program, bucket) if bucket.states else "has no gradients"
        if problem:
            raise Refusal("structure", f"bucket {number} {problem}", stage=stage, bucket=number)
    for name, axes in wanted.items():
        if name not in found:
            shared = program.states[name].zero_axes
            what = f"which is shared over {shared}" if shared else f"whose gradient is a sum over {axes}"
            problem = f"no bucket has {name!r}, {what}"
            raise Refusal("structure", problem, stage=stage, state=name)
    for position in here.checkpoint_calls:
        if not 0 <= position < len(here.calls):
            problem = f"call {position} is to be recomputed; the stage has {len(here.calls)} calls"
            raise Refusal("structure", problem, stage=stage)
    for position in here.selective_calls:
        problem = ""
        if not 0 <= position < len(here.calls):
            problem = f"call {position} is to be recomputed in part; the stage has {len(here.calls)} calls"
        elif position in here.checkpoint_calls:
            problem = f"call {position} is to be recomputed whole, and in part"
        elif unknown := set(program.blocks[here.calls[position].block].again) - _nodes(program, stage, position):
            problem = f"call {position} is to recompute {min(unknown)!r}, which its block does not have"
        if problem:
            raise Refusal("structure", problem, stage=stage)


def _nodes(program: Program, stage: int, position: int) -> set[str]:
    """The names of the nodes of a call's block."""
    return {node["name"] for node in program.blocks[program.stages[stage].calls[position].block].nodes}


def split_axes(program: Program, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes among ``axes`` with more than one rank, in the order of the mesh, as they name a group."""
    return tuple(a for a in ALL_AXES if a in axes and program.size(a) > 1)
