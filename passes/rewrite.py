"""Rewrite a graph operator by operator from a table of small functions.

A rule has the signature of the operator that it replaces, after the :class:`Builder`: it gets the operator's arguments
with graph nodes for tensors, and returns the node (or tuple of nodes) that stands for the result, or ``KEEP``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from passes.infer import infer, value_of
from passes.unused import drop_unused

aten = torch.ops.aten
KEEP: Final = object()
Rule = Callable[..., Any]
_INHERITED = ("path", "source", "stack")


class Builder:
    """Appends operators to ``graph``; they inherit ``path``, ``source`` and ``stack`` from the operator at hand."""

    def __init__(self, graph: fx.Graph | None = None, node: fx.Node | None = None) -> None:
        self.graph = graph if graph is not None else fx.Graph()
        self.node = node
        self.constants: dict[str, Tensor] = {}
        self._placeholders: dict[str, fx.Node] = {}

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """A placeholder for the constant ``name``, made when it is first asked for."""
        if name not in self.constants:
            self.constants[name] = value
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                made = self.graph.placeholder(placeholder_name(name))
            made.meta["val"] = value.to("meta")
            self._placeholders[name] = made
        return self._placeholders[name]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        if self.node is not None:
            made.meta = {k: self.node.meta[k] for k in _INHERITED if k in self.node.meta}
        made.meta["val"] = infer(target, value_of(args), value_of(kwargs))
        return made

    @property
    def where(self) -> str:
        """The module path and source line of the operator at hand, for messages."""
        return where(self.node)


def where(node: fx.Node | None) -> str:
    """The module path and source line of an operator, for messages."""
    meta = node.meta if node is not None else {}
    return f"{meta.get('path') or 'the model'} ({meta.get('source') or 'unknown line'})"


def placeholder_name(constant: str) -> str:
    return "c_" + constant.replace(".", "_")


def val(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor), node
    return value


def shape(node: fx.Node) -> list[int]:
    return list(val(node).shape)


def rewrite(graph: fx.Graph, rules: Mapping[Any, Rule]) -> tuple[fx.Graph, dict[str, str], dict[str, Tensor]]:
    """A new graph in which every operator in ``rules`` is replaced; where each old node's value went, by name; and the
    constants that the rules added.

    Requires and provides: ``val`` on every operator. What becomes unused is removed, placeholders stay.
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
            env[node] = _replace(build, node, env, rules.get(node.target))
    drop_unused(build.graph)
    moved = {old.name: new.name for old, new in env.items() if isinstance(new, fx.Node)}
    return build.graph, moved, build.constants


def _replace(build: Builder, node: fx.Node, env: dict[fx.Node, Any], rule: Rule | None) -> Any:
    if rule is not None:
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        made = rule(build, *args, **kwargs)
        if made is not KEEP and not _lacks(made, node):
            return made
    copied = build.graph.node_copy(node, env.__getitem__)
    copied.meta = dict(node.meta)
    return copied


def _lacks(made: Any, node: fx.Node) -> bool:
    """Whether a rule has left out a result that is read."""
    read = [u.args[1] for u in node.users if u.target is operator.getitem] if isinstance(made, tuple) else []
    return any(made[i] is None for i in read)
