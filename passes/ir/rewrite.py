"""Rewrite a graph operator by operator from a table of functions; erase unused operators; change floating-point dtypes.

A rule of the table takes a :class:`Builder`, followed by the arguments of the operator that it replaces, with graph
nodes in place of tensors. It returns the node (or tuple of nodes) that replaces the operator's result, or ``KEEP`` to
leave the operator unchanged.

:func:`cast_graph_dtype` changes all floating-point dtypes of a graph to one dtype. This includes the norms and losses
that a model computes in float32 whatever the dtype of its parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from partitioner.passes.ir.interpret import infer_meta_value, refresh_graph_values, resolve_meta_values

aten = torch.ops.aten


def drop_unused(graph: fx.Graph) -> None:
    """Erase the operators of ``graph`` whose results are not read and that have no side effect, in place.

    This is faster than ``fx.Graph.eliminate_dead_code``, which also checks the graph.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


KEEP: Final = object()
Rule = Callable[..., Any]
_INHERITED = ("path", "source", "stack")


class Builder:
    """Appends operators to ``graph`` and infers their meta tensors.

    New nodes get the metadata ``path``, ``source`` and ``stack`` of ``node``, the operator that is being replaced.
    ``constants``: the values of the constants that were added, by name.
    """

    def __init__(self, graph: fx.Graph | None = None, node: fx.Node | None = None) -> None:
        self.graph = graph if graph is not None else fx.Graph()
        self.node = node
        self.constants: dict[str, Tensor] = {}
        self._placeholders: dict[str, fx.Node] = {}

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """Return the placeholder of the constant ``name``. If it does not exist, create it with the value ``value``."""
        if name not in self.constants:
            self.constants[name] = value
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                result = self.graph.placeholder(get_placeholder_name(name))
            result.meta["val"] = value.to("meta")
            self._placeholders[name] = result
        return self._placeholders[name]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append the operator ``target`` with the arguments ``args`` and ``kwargs`` to the graph, infer its meta
        tensor, and return the new node."""
        result = self.graph.call_function(target, args, kwargs)
        if self.node is not None:
            result.meta = {k: self.node.meta[k] for k in _INHERITED if k in self.node.meta}
        result.meta["val"] = infer_meta_value(target, resolve_meta_values(args), resolve_meta_values(kwargs))
        return result

    @property
    def location(self) -> str:
        """Return the module path and source line of the operator that is being replaced, such as ``layers.0
        (model.py:12)``, for error messages."""
        return format_node_location(self.node)


def collect_ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ``nodes`` and all nodes on which they depend, directly or indirectly."""
    return _collect_linked(nodes, lambda node: node.all_input_nodes)


def collect_descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ``nodes`` and all nodes that depend on them, directly or indirectly."""
    return _collect_linked(nodes, lambda node: node.users)


def _collect_linked(nodes: Iterable[fx.Node], linked: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(linked(node))
    return seen


def format_node_location(node: fx.Node | None) -> str:
    """Return the module path and source line of the operator ``node`` as text for error messages, such as ``layers.0
    (model.py:12)``. If ``node`` is ``None``, return ``the model (unknown line)``."""
    meta = node.meta if node is not None else {}
    return f"{meta.get('path') or 'the model'} ({meta.get('source') or 'unknown line'})"


def get_placeholder_name(constant: str) -> str:
    return "c_" + constant.replace(".", "_")


def get_node_tensor(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor), node
    return value


def list_node_sizes(node: fx.Node) -> list[int]:
    return list(get_node_tensor(node).shape)


def rewrite_by_rules(graph: fx.Graph, rules: Mapping[Any, Rule]) -> tuple[fx.Graph, dict[str, str], dict[str, Tensor]]:
    """Return three values: a new graph, which is ``graph`` with operators replaced by ``rules``; a dict: old node name
    -> new node name; and a dict: name of an added constant -> its value.

    Every operator must have a meta tensor in ``node.meta["val"]``, and every new operator gets one. Unused operators
    are removed; placeholders stay.

    Args:
        rules: operator to replace -> a function ``rule(build, *args, **kwargs)``. The function appends operators by
            ``build`` and returns the node that replaces the operator, or the constant ``KEEP`` to leave the operator
            unchanged.
    """
    build = Builder()
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        build.node = node
        if node.op == "output":
            build.graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif node.target is operator.getitem and isinstance(env[node.args[0]], tuple):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = _apply_rewrite_rule(build, node, env, rules.get(node.target))
    drop_unused(build.graph)
    moved = {old.name: new.name for old, new in env.items() if isinstance(new, fx.Node)}
    return build.graph, moved, build.constants


def _apply_rewrite_rule(build: Builder, node: fx.Node, env: dict[fx.Node, Any], rule: Rule | None) -> Any:
    """Return the node (or tuple of nodes) that replaces ``node`` in the new graph: the result of ``rule``, or a copy of
    the node if ``rule`` is ``None`` or returns the constant ``KEEP``.

    ``build``: appends operators to the new graph. ``env``: old node -> new node.
    """
    if rule is not None:
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        result = rule(build, *args, **kwargs)
        if result is not KEEP and not _is_result_missing(result, node):
            return result
    copied = build.graph.node_copy(node, env.__getitem__)
    copied.meta = dict(node.meta)
    return copied


def _is_result_missing(result: Any, node: fx.Node) -> bool:
    """Return whether a rewrite rule returned ``None`` for a result of ``node`` that some operator reads. ``result``:
    what the rule returned."""
    read = [u.args[1] for u in node.users if u.target is operator.getitem] if isinstance(result, tuple) else []
    return any(result[i] is None for i in read)


_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def replace_floating_dtype(given: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that replaces ``given`` if all floating-point dtypes of a graph become ``dtype``.

    A complex dtype becomes the complex dtype with parts of ``dtype``, if there is one. Other dtypes are unchanged.
    """
    if given.is_complex:
        return _WITH_PARTS.get(dtype, given)
    return dtype if given.is_floating_point else given


_WITH_PARTS = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def cast_graph_dtype(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Change every floating-point placeholder and dtype argument of ``graph`` to ``dtype``, in place.

    Arguments that are 8-bit floating-point dtypes are not changed. The meta tensors of all operators are recomputed.
    """

    def retyped(argument: Any) -> Any:
        return (
            replace_floating_dtype(argument, dtype)
            if isinstance(argument, torch.dtype) and argument not in _SMALL
            else argument
        )

    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                node.meta["val"] = value.to(replace_floating_dtype(value.dtype, dtype))
        elif node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, retyped)
            node.kwargs = fx.node.map_aggregate(node.kwargs, retyped)
            if _uses_default_dtype(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
            elif dtype == torch.float64 and _is_integer_promotion(node):
                _cast_node_operands(graph, node, dtype)
    refresh_graph_values(graph)


def _uses_default_dtype(node: fx.Node) -> bool:
    """Return whether ``node``, an operator without tensor operands, creates a tensor of torch's default dtype because
    it has no argument ``dtype``."""
    value = node.meta.get("val")
    if node.all_input_nodes or not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return False
    schema = getattr(node.target, "_schema", None)
    named = schema is not None and any(a.name == "dtype" for a in schema.arguments)
    return named and node.kwargs.get("dtype") is None


def _is_integer_promotion(node: fx.Node) -> bool:
    """Return whether ``node`` is an elementwise operator on integers whose result has torch's default floating-point
    dtype, such as a division. Its operands must be cast first if the result is to be float64.
    """
    value, operands = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
    if not isinstance(value, Tensor) or not (value.dtype.is_floating_point or value.dtype.is_complex) or not operands:
        return False
    whole = all(isinstance(x, Tensor) and not x.dtype.is_floating_point and not x.dtype.is_complex for x in operands)
    name = str(getattr(node.target, "_schema", None) and node.target._schema.name)  # type: ignore[union-attr]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return whole and pointwise and name not in _OF_GIVEN_TYPE


_OF_GIVEN_TYPE = ("aten::where", "aten::to", "aten::_to_copy", "aten::type_as")


def _cast_node_operands(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    """Insert a cast to ``dtype`` before each operand of ``node`` into ``graph``, in place."""
    for operand in node.all_input_nodes:
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten._to_copy.default, (operand,), {"dtype": dtype})
        wide.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
        node.replace_input_with(operand, wide)
