"""Check that values and gradients that are declared whole (replicated) are equal on all ranks.

If a collective is missing, or runs over another axis, a value or gradient differs between ranks, and the program
computes different results on them. An additional collective counts a value several times.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from partitioner.passes.ir.layouts import Layout
from partitioner.passes.ir.verify import Sameness, compare_across_ranks, find_difference_origin, find_misused_collective
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.program import CallData, Program, StateData
from partitioner.runtime.prove.errors import FaultLocation, Refusal
from partitioner.runtime.prove.host_memory import check_equal_updates
from partitioner.runtime.prove.structure import DATA_AXES

AXES = ("tp", "cp")  # the axes over which blocks are sharded


def check_wholeness(facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` at the first value, gradient or output that is declared equal on several ranks, or in all
    microbatches, but is not. This is derived from the graphs, without tensors: along ``tp`` and ``cp``, over which
    blocks are sharded, and over the microbatches and ``dp`` ranks. ``facts``: the program of all ranks, with the
    gradients, collectives and memory of its block calls (such as layers).
    """
    for axis in AXES:
        _check_axis(axis, facts)
    _check_batch_sameness(facts)


def _check_axis(axis: str, facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` if a value or gradient that is declared replicated along the mesh axis ``axis`` differs
    between ranks. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls
    (such as layers).
    """
    if facts.program.mesh.get(axis, 1) == 1:
        return
    checked: set[object] = set()
    for stage, position in facts.order:
        call = facts.call((stage, position))
        key = _make_cache_key(facts, call)
        if key in checked:
            continue
        checked.add(key)
        try:
            _check_forward(axis, facts, call)
            if any(v in facts.flow.values for v in call.outputs):
                _check_backward(axis, facts, call)
        except Refusal as refusal:
            refusal.location = replace(refusal.location, stage=stage, call=position)
            raise


def _make_cache_key(facts: ProgramFacts, call: CallData) -> object:
    """Return a hashable key of everything on which the check of ``call`` (an execution of a block) depends. Calls with
    equal keys are checked once. ``facts``: the program of all ranks, with the gradients, collectives and memory of its
    block calls.
    """
    program = facts.program
    kept = [program.states[n] for n in call.states]
    states = tuple((s.layout, s.expert_layout, s.grad_axes) for s in kept)
    values = tuple((program.values[n].layout, program.values[n].context) for n in (*call.inputs, *call.outputs))
    return call.block, facts.needs(call), states, values


_VALUES: dict[str, Sameness] = {"S": "different", "R": "alike", "R'": "alike", "P": "different"}

_GRADIENTS: dict[str, Sameness] = {"S": "different", "R": "alike", "R'": "different", "P": "alike"}


def _find_layout_kind(axis: str, program: Program, value: str) -> str:
    return Layout.parse(program.values[value].layout if axis == "tp" else program.values[value].context).kind


def _get_layout_kind(axis: str, state: StateData) -> str:
    """Return the kind of the layout of ``state``, a parameter or buffer, over the mesh axis ``axis``: S (sharded), R or
    R' (replicated), or P (partial sum). With R', the gradient of the replicated tensor is a partial sum. Over ``cp``
    every rank has the whole tensor.
    """
    if axis == "tp":
        return Layout.parse(state.layout).kind
    return "R'" if axis in state.grad_axes else "R"


def _list_given_sameness(axis: str, facts: ProgramFacts, call: CallData) -> list[Sameness]:
    """Return, for each parameter, buffer and input of ``call`` (an execution of a block), ``"alike"`` if ranks along
    the mesh axis ``axis`` hold equal tensors according to the declared layout; otherwise ``"different"``. The list has
    the order of the graph's placeholders. ``facts``: the program of all ranks, with the gradients, collectives and
    memory of its block calls.
    """
    program = facts.program
    states: list[Sameness] = [
        "different" if _has_different_experts(axis, program, n) else _VALUES[_get_layout_kind(axis, program.states[n])]
        for n in call.states
    ]
    return states + [_VALUES[_find_layout_kind(axis, program, n)] for n in call.inputs]


def _has_different_experts(axis: str, program: Program, state: str) -> bool:
    """Return whether ranks along the mesh axis ``axis`` hold the weights of different experts in the parameter named
    ``state``. ``program``: the program of all ranks.
    """
    spread = program.experts_span_tp if axis == "tp" else program.mesh.get("ep", 1) > 1
    return spread and Layout.parse(program.states[state].expert_layout).is_shard


def _check_forward(axis: str, facts: ProgramFacts, call: CallData) -> None:
    """Raise :class:`Refusal` if an output of ``call`` (an execution of a block) that is declared replicated along the
    mesh axis ``axis`` differs between ranks. ``facts``: the program of all ranks, with the gradients, collectives and
    memory of its block calls.
    """
    program, block = facts.program, facts.blocks[call.block]
    given = dict(zip((*block.states, *block.inputs), _list_given_sameness(axis, facts, call), strict=True))
    known = compare_across_ranks(block.graph, given, axis, program.mesh[axis])
    _refuse_misuse(axis, call, block.graph, known)
    for value, node in zip(call.outputs, block.outputs, strict=True):
        if _VALUES[_find_layout_kind(axis, program, value)] == "alike" and known[node.name] == "different":
            message = (
                f"{call.path!r}: the value {value!r} is said to be whole over {axis}, but differs from rank to rank"
            )
            raise Refusal("structure", message, FaultLocation(node=find_difference_origin(node, known).name))


def _check_backward(axis: str, facts: ProgramFacts, call: CallData) -> None:
    """Raise :class:`Refusal` if a gradient in the backward of ``call`` (an execution of a block) that should be equal
    along the mesh axis ``axis`` differs between ranks. The gradients of the outputs are assumed to have their declared
    layouts. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls.
    """
    program, pieces = facts.program, facts.differentiated(call)
    size = program.mesh[axis]
    forward = compare_across_ranks(
        pieces.forward.graph,
        dict(zip(pieces.forward.inputs, _list_given_sameness(axis, facts, call), strict=True)),
        axis,
        size,
    )
    saved = _list_graph_results(pieces.forward.graph)[pieces.num_outputs :]
    given = {name: forward[node.name] for name, node in zip(pieces.saved, saved, strict=True) if node is not None}
    seeds = pieces.backward.inputs[len(pieces.saved) :]
    for name, k in zip(seeds, pieces.grad_outputs, strict=True):
        given[name] = _GRADIENTS[_find_layout_kind(axis, program, call.outputs[k])]
    known = compare_across_ranks(pieces.backward.graph, given, axis, size)
    _refuse_misuse(axis, call, pieces.backward.graph, known)
    whole = [(call.inputs[i], _GRADIENTS[_find_layout_kind(axis, program, call.inputs[i])]) for i in pieces.grad_inputs]
    for i in pieces.grad_states:
        state = program.states[call.states[i]]
        apart = bool({axis, "etp"} & set(state.grad_axes)) or _has_different_experts(axis, program, call.states[i])
        whole.append((call.states[i], "different" if apart else _GRADIENTS[_get_layout_kind(axis, state)]))
    for (name, wanted), node in zip(whole, _list_graph_results(pieces.backward.graph), strict=True):
        if wanted == "alike" and node is not None and known[node.name] == "different":
            message = (
                f"{call.path!r}: the gradient of {name!r} should be whole over {axis}, but differs from rank to rank"
            )
            raise Refusal("structure", message, FaultLocation(node=find_difference_origin(node, known).name))


def _list_graph_results(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    return results  # type: ignore[return-value]


def _refuse_misuse(axis: str, call: CallData, graph: fx.Graph, known: dict[str, Sameness]) -> None:
    """Raise :class:`Refusal` if a collective of ``graph``, the graph of a block (such as a layer) that ``call`` runs,
    gets operands of the wrong kind: equal operands on all ranks where it needs a different part on each, or different
    operands where it needs equal ones. ``known``: name of a node -> whether ranks along the mesh axis ``axis`` compute
    equal values for it: ``"alike"``, ``"different"`` or ``"unknown"``.
    """
    found = find_misused_collective(graph, known, axis)
    if found is not None:
        raise Refusal("structure", f"{call.path!r}: {found[1]}", FaultLocation(node=found[0].name))


def _check_batch_sameness(facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` if an output of the model that is declared equal in every microbatch differs between
    microbatches, or if the new value of a buffer depends on the microbatch. If there is one microbatch per rank, the
    ``dp`` ranks are compared instead of microbatches. ``facts``: the program of all ranks, with the gradients,
    collectives and memory of its block calls (such as layers).
    """
    program = facts.program
    axis = "data" if program.num_microbatches > 1 else DATA_AXES[0]
    size = program.batch_microbatches
    if size == 1:
        return
    known: dict[str, Sameness] = {i.value: "alike" if i.batch_dim is None else "different" for i in program.inputs}
    for place in facts.order:
        call = facts.call(place)
        block = facts.blocks[call.block]
        given = {n: known[v] for n, v in zip(block.inputs, call.inputs, strict=True)}
        inside = compare_across_ranks(block.graph, given, axis, size)
        for value, node in zip(call.outputs, block.outputs, strict=True):
            known[value] = "alike" if call.prologue else inside[node.name]
    for output in program.outputs:
        if output.value is not None and output.batch == "R" and known.get(output.value) == "different":
            message = f"the output {output.path!r} is said to be the same in every microbatch, but is not"
            raise Refusal("structure", message, FaultLocation(stage=output.stage or 0))
    check_equal_updates(program, known)
