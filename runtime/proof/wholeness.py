"""Is what is said to be whole the same on every rank? Values forward, gradients backward.

A collective that is missing, or that runs over another axis, leaves a value or a gradient different from rank to rank:
the program would compute something else, and not even alike on all ranks.
"""

from __future__ import annotations

from passes.layouts import Layout
from passes.variance import Axes, culprit, varying_axes
from runtime.facts import ProgramFacts
from runtime.program import CallData
from runtime.proof.batch import DATA_AXES
from runtime.proof.errors import Refusal

TP = "tp"


def check_wholeness(facts: ProgramFacts) -> None:
    """Raise :class:`Refusal` at the first value, gradient or output that differs where it must not."""
    program = facts.program
    batch: Axes = frozenset({"data", *DATA_AXES})
    varying: dict[str, Axes] = {}
    for given in program.inputs:
        varying[given.value] = batch if given.batch_dim is not None else frozenset()
    checked: set[object] = set()
    for stage, position in facts.order:
        call = facts.call((stage, position))
        try:
            for value, axes in _forward(facts, call, varying).items():
                varying[value] = frozenset() if call.prologue else axes & batch
            if _key(facts, call) not in checked:
                checked.add(_key(facts, call))
                _backward(facts, call)
        except Refusal as refusal:
            refusal.stage, refusal.call = stage, position
            raise
    # One microbatch, and the ranks of dp: a sum over dp inside a graph makes a value whole.
    parts = frozenset({"data"}) if program.num_microbatches > 1 else frozenset(DATA_AXES)
    if program.num_microbatches * max(program.mesh.get(a, 1) for a in DATA_AXES) > 1:
        for output in program.outputs:
            if output.value is not None and output.batch == "R" and varying.get(output.value, frozenset()) & parts:
                message = f"the output {output.path!r} is said to be the same in every microbatch, but is not"
                raise Refusal("structure", message, stage=output.stage or 0)


def _key(facts: ProgramFacts, call: CallData) -> object:
    program = facts.program
    states = [(program.states[n].layout, TP in program.states[n].grad_axes) for n in call.states]
    values = [program.values[n].layout for n in (*call.inputs, *call.outputs)]
    return call.block, facts.needs(call), tuple(states), tuple(values)


def _given(facts: ProgramFacts, call: CallData, varying: dict[str, Axes]) -> dict[str, Axes]:
    """The axes on which a call's states and inputs differ, by the name of the placeholder."""
    program, block = facts.program, facts.program.blocks[call.block]
    given: dict[str, Axes] = {}
    for node, name in zip(block.states, call.states, strict=True):
        given[node] = _shards(program.states[name].layout)
    for node, name in zip(block.inputs, call.inputs, strict=True):
        given[node] = _shards(program.values[name].layout) | varying[name]
    return given


def _shards(layout: str) -> Axes:
    return frozenset({TP} if Layout.parse(layout).is_shard else ())


def _forward(facts: ProgramFacts, call: CallData, varying: dict[str, Axes]) -> dict[str, Axes]:
    block = facts.blocks[call.block]
    axes = varying_axes(block.graph, _given(facts, call, varying))
    for value, node in zip(call.outputs, block.outputs, strict=True):
        whole = not _shards(facts.program.values[value].layout)
        if whole and TP in axes[node.name] and facts.program.mesh.get(TP, 1) > 1:
            at = culprit(block.graph, node, TP, axes)
            message = f"{call.path!r}: the value {value!r} is said to be whole over tp, but differs from rank to rank"
            raise Refusal("structure", message, node=at.name)
    return {v: axes[n.name] for v, n in zip(call.outputs, block.outputs, strict=True)}


def _backward(facts: ProgramFacts, call: CallData) -> None:
    """The gradient of what is whole (``R``) is whole, given that those of the outputs are as their layouts say."""
    program = facts.program
    if program.mesh.get(TP, 1) == 1 or not any(v in facts.flow.values for v in call.outputs):
        return
    pieces = facts.differentiated(call)
    known = _given(facts, call, {v: frozenset() for v in call.inputs})
    block = program.blocks[call.block]
    primals = zip(pieces.forward.inputs, (*block.states, *block.inputs), strict=True)
    forward = varying_axes(pieces.forward.graph, {primal: known[name] for primal, name in primals})
    results = pieces.forward.graph.output_node().args[0]
    assert isinstance(results, tuple)
    given = {name: forward[node.name] for name, node in zip(pieces.saved, results[pieces.num_outputs :], strict=True)}
    seeds = pieces.backward.inputs[len(pieces.saved) :]
    for name, k in zip(seeds, pieces.grad_outputs, strict=True):
        given[name] = _shards(program.values[call.outputs[k]].layout)
    axes = varying_axes(pieces.backward.graph, given)
    gradients = pieces.backward.graph.output_node().args[0]
    assert isinstance(gradients, tuple)
    whole = [(call.inputs[i], program.values[call.inputs[i]].layout == "R") for i in pieces.grad_inputs]
    for i in pieces.grad_states:
        state = program.states[call.states[i]]
        whole.append((call.states[i], state.layout == "R" and TP not in state.grad_axes))
    for (name, must), node in zip(whole, gradients, strict=True):
        if must and node is not None and TP in axes[node.name]:
            message = f"{call.path!r}: the gradient of {name!r} should be whole over tp, but differs from rank to rank"
            raise Refusal("structure", message, node=culprit(pieces.backward.graph, node, TP, axes).name)
