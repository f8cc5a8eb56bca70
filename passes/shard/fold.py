"""Fold a flat graph of the model into blocks and calls.

A block is a piece of the model with one graph, such as a layer; a call is one run of a block with its own parameters
and inputs. Equal layers share a block. Requires: a captured graph in normal form. Provides: a :class:`FoldedModel`.
Values that depend only on inputs and constants (masks, rotary tables, shifted labels) are computed by ``shared`` calls
if several calls read them. If a single call reads such a value, this call computes it. Values that are only written to
a buffer are results of the call that changes the buffer.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from partitioner.passes.capture.buffers import list_ancestors_of, mark_changed_as_buffers, settle_updates
from partitioner.passes.ir.model import Block, Call, Captured, FoldedModel, ModelState, TensorSpec
from partitioner.passes.ir.rewrite import aten
from partitioner.passes.ir.value_numbering import GraphSignature, compute_signature
from partitioner.passes.ops.random import DRAWS
from partitioner.passes.shard.segment import OperatorGroup, is_product, segment_operators

_SHARED = "shared"


def fold(captured: Captured) -> FoldedModel:
    """Divide the graph of ``captured``, a model as one graph, into blocks and calls, and return them as a
    :class:`FoldedModel`. The graph is changed in place.

    A block is a piece of the model with a graph of its own, such as a layer; a call is one run of a block with its own
    parameters and inputs. Equal layers are calls of one block.
    """
    graph = captured.graph
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["state"] = captured.states.get(captured.placeholders[node.name])
    _join_results(graph)
    updates = settle_updates(captured)
    moved = _copy_returned_states(graph)
    free = _free_nodes(graph) - list_ancestors_of(graph, updates.values())
    moved |= _merge_equal_operators(graph, free)
    _mark_copied(graph)

    operators = [n for n in graph.nodes if n.op == "call_function"]
    units = segment_operators([n for n in operators if n not in free], captured.classes)
    shared, units = _assign_free_operators([n for n in operators if n in free], units)
    folder = _Folder(captured, shared, units)
    folder.make_calls()
    by_name = {n.name: n for n in graph.nodes}

    def get_value_name(name: str) -> str:
        return folder.value_of[by_name[moved.get(name, name)]]

    return FoldedModel(
        blocks=folder.named_blocks(),
        calls=folder.calls,
        states=mark_changed_as_buffers(captured.states, updates),
        inputs=list(captured.inputs),
        outputs=[replace(o, value=get_value_name(o.value)) if o.value is not None else o for o in captured.outputs],
        loss=get_value_name(captured.loss) if captured.loss is not None else None,
        values={i.value: i.spec for i in captured.inputs} | folder.specs,
        constants=dict(captured.constants),
        tree=captured.tree,
        notes=captured.notes,
        updates={state: folder.value_of[node] for state, node in updates.items()},
        keeps=dict(captured.keeps),
        signature=captured.signature,
    )


def _join_results(graph: fx.Graph) -> None:
    """Move each ``getitem`` of ``graph``, which selects one of an operator's results, directly behind the operator, in
    place, and give it the operator's module path, so that both end up in the same layer when the graph is cut."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            last.get(node.args[0], node.args[0]).append(node)
            last[node.args[0]] = node
            node.meta.update({k: node.args[0].meta[k] for k in ("path", "stack") if k in node.args[0].meta})


def _copy_returned_states(graph: fx.Graph) -> dict[str, str]:
    """Insert into ``graph``, in place, a copy of each parameter or buffer that the model returns unchanged, because
    only operators can compute results of a layer. Return a dict: name of the parameter's or buffer's node -> name of
    the copy."""
    output = graph.output_node()
    moved: dict[str, str] = {}
    for node in output.all_input_nodes:
        if node.op == "placeholder" and node.meta["state"] is not None:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            path = f"{node.meta['state'].name}.value"
            copy.meta = {"val": node.meta["val"], "path": path, "stack": (path,)}
            output.replace_input_with(node, copy)
            moved[node.name] = copy.name
    return moved


# --- values of inputs and constants alone -----------------------------------------------------------------------------
def _free_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the operators of ``graph`` that depend on no parameter and on no matrix product, such as masks and
    position indices. They do not belong to a single layer, because several layers may read them."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            state = node.meta["state"]
            if state is None or state.kind != "parameter":
                free.add(node)
        elif node.op == "call_function" and not is_product(node) and all(n in free for n in node.all_input_nodes):
            free.add(node)
    return {n for n in free if n.op == "call_function"}


def _merge_equal_operators(graph: fx.Graph, free: set[fx.Node]) -> dict[str, str]:
    """Merge operators in ``free`` that compute the same value, in place. Return a dict: name of a removed node -> name
    of the node that replaces it.

    ``graph``: the graph. ``free``: the operators of the graph to merge, such as masks; removed operators are also
    removed from this set.
    """
    seen: dict[Any, fx.Node] = {}
    merged: dict[str, str] = {}
    for node in list(graph.nodes):
        if node not in free:
            continue
        key = (node.target, _freeze_argument(node.args), _freeze_argument(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            merged[node.name] = first.name
            free.discard(node)
            graph.erase_node(node)
    return merged


def _freeze_argument(argument: Any) -> Any:
    """Return a hashable key of the operator argument ``argument``. Keys are equal for equal arguments."""
    if isinstance(argument, tuple | list):
        return tuple([_freeze_argument(a) for a in argument])
    if isinstance(argument, slice):
        return "slice", argument.start, argument.stop, argument.step
    if isinstance(argument, bool | int | float):
        return type(argument).__name__, repr(argument)
    return argument


def _assign_free_operators(
    free: Sequence[fx.Node], units: list[OperatorGroup]
) -> tuple[list[list[fx.Node]], list[OperatorGroup]]:
    """Assign the operators ``free`` (such as masks and position indices) to the groups of operators ``units`` (such as
    layers), each of which becomes one call of the model.

    An operator of ``free`` that only one group reads is added to this group. Return two lists: the remaining operators
    of ``free`` as connected groups, each of which becomes a shared call; and ``units`` with the added operators.
    ``free`` is in the order of the graph.
    """
    if not units:
        return [], [OperatorGroup("", list(free))] if free else []
    homes: dict[fx.Node, set[int]] = {n: {i} for i, unit in enumerate(units) for n in unit.nodes}
    shared = -1
    for node in reversed(free):
        readers = set().union(*(homes.get(user, {shared}) for user in node.users))
        homes[node] = readers if len(readers) == 1 or _is_copied(node) else {shared}
    for node in free:
        if node.target is operator.getitem:
            homes[node] = homes[node.args[0]]  # type: ignore[index]
    order = {n: i for i, n in enumerate(free)}
    own: dict[int, list[fx.Node]] = {}
    for node in free:
        for home in homes[node]:
            own.setdefault(home, []).append(node)
    placed = [
        OperatorGroup(unit.path, _insert_before_use(unit.nodes, {n: order[n] for n in own.get(i, ())}))
        for i, unit in enumerate(units)
    ]
    return _find_connected_components(own.get(shared, []), order), placed


def _insert_before_use(nodes: Sequence[fx.Node], free: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the operators ``nodes`` with the operators of ``free`` that they depend on inserted, each before the first
    operator that reads it.

    ``free``: operator that may be inserted -> its position in the graph.
    """
    placed: dict[fx.Node, None] = {}
    for node in nodes:
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            new = [n for n in stack.pop().all_input_nodes if n in free and n not in placed and n not in needed]
            needed.update(new)
            stack += new
        placed.update(dict.fromkeys(sorted(needed, key=free.__getitem__)))
        placed[node] = None
    return list(placed)


def _mark_copied(graph: fx.Graph) -> None:
    """Set ``node.meta["copied"]`` of each node of ``graph``: whether the operator is repeated in each part of the model
    that reads its result, because this is cheaper than storing the result. It is true for operators without operands
    and for those that compute the element indices of random numbers."""
    for node in reversed(graph.nodes):
        places = bool(node.users) and all(u.target in DRAWS or _is_copied(u) for u in node.users)
        returned = any(u.op == "output" for u in node.users)
        node.meta["copied"] = node.op == "call_function" and not returned and (places or not node.all_input_nodes)


def _is_copied(node: fx.Node) -> bool:
    return bool(node.meta["copied"])


def _find_connected_components(nodes: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the connected components of ``nodes``, operators of a graph of which some read results of others. Within a
    component, nodes are in the order of ``nodes``. Components are ordered by the position of their first node.
    ``order``: node -> its position."""
    parent = {n: n for n in nodes}

    def find(n: fx.Node) -> fx.Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for node in nodes:
        for operand in node.all_input_nodes:
            if operand in parent:
                parent[find(operand)] = find(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(find(node), []).append(node)
    return sorted(groups.values(), key=lambda g: order[g[0]])


# --- blocks and calls -------------------------------------------------------------------------------------------------
class _Folder:
    """Creates the blocks (graphs that equal layers share) and calls (runs of a block, each with its own parameters) of
    a model, in execution order.

    ``captured``: the model as one graph. ``shared``: groups of operators that become shared calls, which every pipeline
    stage may repeat. ``units``: groups that become the other calls, such as one for each layer. ``calls``: the calls so
    far. ``blocks``: key -> block; equal computations have equal keys. ``keys``: the key of the block of each call.
    ``value_of``: node -> name, for every value that passes between calls. ``specs``: name of such a value -> shape and
    dtype. ``paths``: how many calls got each module path.
    """

    def __init__(self, captured: Captured, shared: list[list[fx.Node]], units: list[OperatorGroup]) -> None:
        """Start without blocks and calls. ``captured``: the model as one graph. ``shared``: groups of operators that
        become shared calls, which every pipeline stage may repeat. ``units``: groups that become the other calls, such
        as one for each layer."""
        self.captured = captured
        self.shared = shared
        self.units = units
        self.calls: list[Call] = []  # the block names in them are set at the end
        self.keys: list[tuple[Any, ...]] = []
        self.specs: dict[str, TensorSpec] = {}
        self.blocks: dict[tuple[Any, ...], Block] = {}
        self.paths: Counter[str] = Counter()
        self.value_of: dict[fx.Node, str] = {}
        for node in captured.graph.nodes:
            if node.op == "placeholder" and node.meta["state"] is None:
                self.value_of[node] = captured.placeholders[node.name]

    def make_calls(self) -> None:
        """Create one call for each group of operators, shared ones first. A call is one run of a graph with its own
        parameters and inputs; equal groups share a graph."""
        for group in self.shared:
            self.make_call(OperatorGroup(_SHARED, group), shared=True)
        for unit in self.units:
            self.make_call(unit)

    def make_call(self, unit: OperatorGroup, shared: bool = False) -> None:
        """Create the call for the group of operators ``unit``, and its graph unless an equal group already has one.
        ``shared``: whether every pipeline stage may repeat the call."""
        inside = set(unit.nodes)
        outputs = [n for n in unit.nodes if any(u not in inside for u in n.users)]
        outputs = [n for n in outputs if isinstance(n.meta["val"], Tensor) and not _is_copied(n)]
        sign = compute_signature(unit.nodes, outputs)
        if sign.key not in self.blocks:
            self.blocks[sign.key] = _make_block(unit, sign, outputs)
        path = self.make_unique_path(unit.path or "model")
        names = tuple(f"{path}:{i}" for i in range(len(outputs)))
        for node, name in zip(outputs, names, strict=True):
            self.value_of[node] = name
            self.specs[name] = TensorSpec.from_tensor(node.meta["val"])
        states = tuple(self.captured.placeholders[n.name] for n in sign.states)
        inputs = tuple(self.value_of[n] for n in sign.inputs)
        self.calls.append(Call("", path, states, inputs, names, shared))
        self.keys.append(sign.key)

    def make_unique_path(self, path: str) -> str:
        """Return ``path``, the module path of a new call, with ``#`` and a number appended if an earlier call has
        this path."""
        count = self.paths[path]
        self.paths[path] += 1
        return path if count == 0 else self.make_unique_path(f"{path}#{count}")

    def named_blocks(self) -> dict[str, Block]:
        """Name the blocks (graphs that equal layers share) after the modules that run them, store the names in the
        calls, and return a dict: name -> block."""
        paths: dict[Any, list[str]] = {}
        for key, call in zip(self.keys, self.calls, strict=True):
            paths.setdefault(key, []).append(call.path)
        taken: Counter[str] = Counter()
        blocks: dict[str, Block] = {}
        for key, block in self.blocks.items():
            name = _find_common_pattern(paths[key])
            taken[name] += 1
            block.name = name if taken[name] == 1 else f"{name}#{taken[name]}"
            blocks[block.name] = block
        self.calls = [replace(c, block=self.blocks[k].name) for k, c in zip(self.keys, self.calls, strict=True)]
        return blocks


def _find_common_pattern(paths: Sequence[str]) -> str:
    """Return a pattern that matches all module paths ``paths``, such as ``model.layers.*`` for ``model.layers.0`` and
    ``model.layers.1``. If there is none, return the first path."""
    if len(paths) == 1:
        return paths[0]
    patterns = {re.sub(r"(?<![^.])\d+(?![^.@#])|[@#]\d+", "*", p).replace("**", "*") for p in paths}
    return patterns.pop() if len(patterns) == 1 else paths[0]


def _make_block(unit: OperatorGroup, sign: GraphSignature, outputs: Sequence[fx.Node]) -> Block:
    """Return a block (a graph of its own) with copies of the operators of the group ``unit``, such as a layer.
    ``sign``: the parameters and other values that the operators read, which become placeholders. ``outputs``: the
    operators whose results the block returns."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    prefix = unit.path.partition("@")[0] + "."
    for node in sign.states:
        state: ModelState = node.meta["state"]
        env[node] = _make_placeholder(graph, node, _format_identifier(state.name.removeprefix(prefix)))
    for node in sign.inputs:
        env[node] = _make_placeholder(graph, node, node.name if node.op == "placeholder" else "x")
    for node in unit.nodes:
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        env[node] = graph.create_node("call_function", node.target, args, kwargs, name=_get_operator_name(node.target))
        env[node].meta = {k: v for k, v in node.meta.items() if k not in ("stack", "copied")}
    graph.output(tuple(env[n] for n in outputs))
    states = tuple(env[n].name for n in sign.states)
    return Block("", graph, states, tuple(env[n].name for n in sign.inputs))


def _make_placeholder(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    made = graph.create_node("placeholder", name, name=name)
    made.target = made.name
    made.meta["val"] = TensorSpec.from_tensor(node.meta["val"]).meta()
    return made


def _format_identifier(name: str) -> str:
    """Return ``name`` with ``_`` in place of characters that are not allowed in an identifier."""
    return re.sub(r"\W", "_", name)


def _get_operator_name(target: Any) -> str:
    """Return the name of the operator ``target`` without its namespace, such as ``linear``."""
    if target is operator.getitem:
        return "getitem"
    return str(target._schema.name).rpartition("::")[2]
