"""Replace every ``partition::layer`` operator in a captured graph by a copy of the operators of an equal layer.

``passes/trace/layer_reuse.py`` traces one of several equal layers, and appends one such operator for each call of the
others. Requires: a captured graph with ``partition::layer`` operators. Provides: the graph that a full trace would have
given. Raises :class:`NotRepeatable` if it cannot be shown that the calls are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx

from partitioner.passes.ir.model import Captured, ModelState
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.trace.layer_reuse import LAYER


class NotRepeatable(Exception):
    """Raised if calls of equal layers, of which only one was traced, cannot be shown to run the same operators.
    ``number``: the number of this group of equal calls."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class _Body:
    """The traced operators of one call of a layer. They are copied for the calls of equal layers that were not traced.

    ``nodes``: the operators, in order. ``operands``: the nodes that the call reads. ``results``: the nodes whose values
    the call returns. ``stack``: the paths of the modules whose calls enclose the operators, outermost first, with the
    layer itself last. ``key``: a hashable value that is equal for calls with the same operators.
    """

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: list[fx.Node]
    stack: tuple[str, ...]
    key: Any

    @property
    def path(self) -> str:
        return self.stack[-1]


def expand_layer_operators(
    captured: Captured, parked: Mapping[int, Sequence[ModelState | None]] | None = None
) -> Captured:
    """Replace each ``partition::layer`` operator in the graph of ``captured``, a model as one graph, by copies of the
    operators of an equal layer, in place. Such an operator stands for a call of a layer that was not traced. Return
    ``captured`` with the node names, states (parameters and buffers) and placeholders of the new graph. Raise
    :class:`NotRepeatable` if it cannot be shown that the calls are equal.

    ``parked``: number of each module whose parameters were removed during the trace -> its parameters and buffers in
    order, with ``None`` for those that were not removed, such as buffers.
    """
    graph = captured.graph
    restored = _PlaceholderRestorer(captured, parked or {})
    found = [n for n in graph.nodes if n.target is LAYER]
    if not found:
        return captured
    marked = {o for n in found for o in n.all_input_nodes if o.op == "placeholder"}
    only_marked = {o for o in marked if all(user.target is LAYER for user in o.users)}
    bodies: dict[int, _Body] = {}
    updated = set(captured.updates.values())
    changing = {n for n in graph.nodes if n.name in updated} if updated else set()
    classes = dict(captured.classes)
    moved: dict[str, str] = {}
    for node in found:
        operands, results, number, member = _parse_layer_call(node)
        stack = node.meta["stack"]
        if not stack or "@" in stack[-1]:
            raise NotRepeatable(number)
        if results:
            body = _collect_layer_body(node)
            if changing.intersection(body.nodes):
                raise NotRepeatable(number)  # each layer changes a buffer of its own
            if bodies.setdefault(number, body).key != body.key:
                raise NotRepeatable(number)
            made = body.results
        else:
            made = _copy_layer_body(graph, node, restored.list_operands(member, operands), bodies[number], classes)
        for user in list(node.users):
            assert user.target is operator.getitem, user
            result = made[_read_result_index(user)]
            user.replace_all_uses_with(result)
            moved[user.name] = result.name
            graph.erase_node(user)
        graph.erase_node(node)
    drop_unused(graph)
    placeholders, states = captured.placeholders | restored.placeholders, captured.states | restored.states
    for node in (*only_marked, *restored.nodes):
        if not node.users and placeholders[node.name] in states:
            del placeholders[node.name]
            graph.erase_node(node)

    def get_name(name: str | None) -> str | None:
        return moved.get(name, name) if name is not None else None

    return captured.with_(
        outputs=[replace(o, value=get_name(o.value)) for o in captured.outputs],
        loss=get_name(captured.loss),
        updates={state: moved.get(node, node) for state, node in captured.updates.items()},
        states=states,
        placeholders=placeholders,
        classes=classes,
    )


def sort_states(captured: Captured, names: Iterable[str]) -> Captured:
    """Return ``captured``, a model as one graph, with its states (parameters, buffers, constants) and their
    placeholders in the order of ``names``; states that are not in ``names`` come last. The graph is changed in place.
    """
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    last = len(place)
    nodes = [n for n in captured.graph.nodes if n.op == "placeholder"]
    nodes.sort(key=lambda n: place.get(captured.placeholders[n.name], last))
    for node in reversed(nodes):
        first = next(iter(captured.graph.nodes))
        if first is not node:
            first.prepend(node)
    states = dict(sorted(captured.states.items(), key=lambda item: place.get(item[0], last)))
    return captured.with_(states=states, placeholders={n.name: captured.placeholders[n.name] for n in nodes})


class _PlaceholderRestorer:
    """Creates placeholders in a traced graph for the parameters of modules that were removed during the trace.

    ``away``: number of each such module -> its parameters and buffers in order, with ``None`` for those that were not
    removed, such as buffers. ``states``: the removed parameters by name. ``placeholders``: name of each new placeholder
    -> name of its parameter. ``nodes``: the new placeholders.
    """

    def __init__(self, captured: Captured, parked: Mapping[int, Sequence[ModelState | None]]) -> None:
        """Start without placeholders. ``captured``: the model to whose graph they are added. ``parked``: number of each
        module whose parameters were removed during the trace -> its parameters and buffers in order, with ``None`` for
        those that were not removed, such as buffers."""
        self.graph, self.away = captured.graph, parked
        self.states = {state.name: state for of_module in parked.values() for state in of_module if state is not None}
        self.placeholders: dict[str, str] = {}
        self.nodes: list[fx.Node] = []
        self._nodes: dict[str, fx.Node] = {}
        self._first = next(iter(captured.graph.nodes))

    def list_operands(self, member: int, seen: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes of all operands of a layer's call in order: those that the trace recorded, and placeholders
        of the parameters that were removed.

        ``member``: the number of the module whose parameters were removed; -1 if none were removed. ``seen``: the
        operands that the trace recorded, in order.
        """
        left = iter(seen)
        states = self.away[member] if member >= 0 else ()
        return [*(next(left) if state is None else self._ensure_state_placeholder(state) for state in states), *left]

    def _ensure_state_placeholder(self, state: ModelState) -> fx.Node:
        """Return the placeholder node of the parameter ``state``. If it does not exist, create it in front of all other
        nodes of the graph."""
        if state.name not in self._nodes:
            with self.graph.inserting_before(self._first):
                name = "p_" + state.name.replace(".", "_").lower()
                made = self.graph.create_node("placeholder", name, name=name)
            made.meta["val"] = state.spec.meta()
            made.target = made.name
            self._nodes[state.name] = made
            self.placeholders[made.name] = state.name
            self.nodes.append(made)
        return self._nodes[state.name]


def _parse_layer_call(call: fx.Node) -> tuple[list[fx.Node], list[fx.Node], int, int]:
    """Return the four arguments of ``call``, a ``partition::layer`` node that stands for a call of a layer:

    * the nodes of the operands of the call;
    * the nodes of its results; empty if the call was not traced;
    * the number of the group of equal calls;
    * the number of the module if its parameters were removed during the trace, otherwise -1.
    """
    operands, results, number, member = cast(Any, call.args)
    return list(operands), list(results), int(number), int(member)


def _read_result_index(item: fx.Node) -> int:
    """Return the index that the ``getitem`` node ``item`` reads."""
    return int(cast(Any, item.args[1]))


def _collect_layer_body(call: fx.Node) -> _Body:
    """Return the operators between the operands and the results of a layer call that was traced. ``call``: the
    ``partition::layer`` node that marks this call. Raise :class:`NotRepeatable` if one of the operators belongs to a
    module outside of the layer."""
    operands, results, number, _ = _parse_layer_call(call)
    stack = call.meta["stack"]
    ends = set(operands)
    inside: set[fx.Node] = set()
    waiting = [n for n in results if n not in ends]
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        own = node.meta.get("stack", ())[: len(stack)] == stack or node.target is operator.getitem
        if node.op != "call_function" or not own:
            raise NotRepeatable(number)
        inside.add(node)
        waiting += [n for n in node.all_input_nodes if n not in ends]
    nodes = sorted(inside)
    key = _build_body_key(nodes, operands, results, stack)
    if key is None:
        raise NotRepeatable(number)
    return _Body(nodes, operands, results, stack, key)


def _build_body_key(
    nodes: Sequence[fx.Node], operands: Sequence[fx.Node], results: Sequence[fx.Node], stack: Any
) -> Any:
    """Return a hashable key that is equal for two calls of layers that run the same operators on corresponding
    operands; return ``None`` if an operator belongs to a module outside of the layer.

    ``nodes``: the operators of the call in order. ``operands``: the nodes that it reads. ``results``: the nodes that it
    returns. ``stack``: paths of the modules whose calls enclose the operators, with the layer itself last.
    """
    place: dict[fx.Node, Any] = {}
    for i, node in enumerate(operands):
        place.setdefault(node, ("operand", i))
    for i, node in enumerate(nodes):
        place[node] = ("node", i)

    def encode(argument: Any) -> Any:
        """Return a hashable key of ``argument``, an argument of an operator in a layer's call. A node is described by
        its position among the call's operands or operators."""
        if isinstance(argument, fx.Node):
            return place[argument]
        if isinstance(argument, tuple | list):
            return tuple([encode(a) for a in argument])
        if isinstance(argument, slice):
            return "slice", encode(argument.start), encode(argument.stop), encode(argument.step)
        return type(argument), repr(argument)

    rows = []
    for node in nodes:
        inner = _rename_path_and_stack(node.meta, stack, ("",))
        if inner is None:
            return None
        kwargs = tuple([(k, encode(v)) for k, v in node.kwargs.items()])
        rows.append(
            (node.target, encode(node.args), kwargs, _build_value_spec(node.meta["val"]), *inner, node.meta["source"])
        )
    return tuple(rows), tuple([place[n] for n in results]), len(operands)


def _rename_path_and_stack(
    meta: dict[str, Any], old: tuple[str, ...], new: tuple[str, ...]
) -> tuple[str, tuple[str, ...]] | None:
    """Return (module path, stack) for a node of one layer that is copied for another layer, equal to the first: the
    node's module path, and the paths of the modules whose calls enclose it, with the other layer's paths in place of
    the first layer's. Return ``None`` if the node belongs to a module outside of the first layer.

    ``meta``: metadata of the node, with its module path under ``path`` and the paths of the enclosing modules under
    ``stack``. ``old``: the paths of the modules whose calls enclose the first layer, with this layer itself last.
    ``new``: the paths for the other layer.
    """
    before, after = old[-1], new[-1]
    inner = meta.get("stack", ())[len(old) :]
    named = [meta["path"], *inner] if meta.get("stack") else []
    if any(name != before and not name.startswith(before + ".") for name in named):
        return None
    path = after + meta["path"][len(before) :] if named else meta.get("path", "")
    return path, (*new, *(after + name[len(before) :] for name in inner)) if named else ()


def _build_value_spec(value: Any) -> Any:
    """Return a hashable key of ``value``, the meta value of a node: shape, strides and dtype of a tensor, or a tuple of
    such keys."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple([_build_value_spec(v) for v in value]) if isinstance(value, tuple | list) else repr(value)


def _copy_layer_body(
    graph: fx.Graph, call: fx.Node, operands: Sequence[fx.Node], body: _Body, classes: dict[str, str]
) -> list[fx.Node]:
    """Insert copies of the operators of a traced layer into ``graph``, before ``call``, and return the nodes of the
    copied results, in order. ``call``: the ``partition::layer`` node of an equal layer's call that was not traced.

    ``operands``: the nodes that the copies read. ``body``: the operators. ``classes``: module path -> class name;
    entries for the submodules of the equal layer are added.
    """
    env: dict[fx.Node, fx.Node] = dict(zip(body.operands, operands, strict=True))
    stack = call.meta["stack"]
    with graph.inserting_before(call):
        for node in body.nodes:
            made = graph.node_copy(node, env.__getitem__)
            renamed = _rename_path_and_stack(node.meta, body.stack, stack)
            assert renamed is not None, node
            made.meta = {**node.meta, "path": renamed[0], "stack": renamed[1]}
            for old, new in zip(node.meta["stack"][len(stack) :], renamed[1][len(stack) :], strict=True):
                classes[new.partition("@")[0]] = classes[old.partition("@")[0]]
            env[node] = made
    return [env[n] for n in body.results]
