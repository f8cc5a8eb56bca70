"""Parameters of modules that are alike as one state, whose first dim counts the modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from passes.assemble import Captured
from passes.blocks import State, TensorSpec
from passes.rewrite import placeholder_name


class Different(Exception):
    """Modules in a list do not do the same, or something that has no stacked form."""


class Packing:
    """The stacks that are made in a captured graph; ``captured`` has those that are in use."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.packed: dict[tuple[fx.Node, ...], fx.Node] = {}

    def check(self, nodes: tuple[fx.Node, ...]) -> None:
        """Raise :class:`Different` where ``nodes`` are not parameters that have one form and one name each."""
        states = [self.captured.states.get(self.captured.placeholders.get(n.name, "")) for n in nodes]
        kinds = {(s.kind, s.spec, s.requires_grad, s.aliases, s.parts) if s is not None else None for s in states}
        kind = kinds.pop()
        if kinds or kind is None or kind[0] != "parameter" or kind[3] or kind[4] or len(set(nodes)) != len(nodes):
            raise Different

    def pack(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """One placeholder for the parameters ``nodes`` of all modules."""
        if nodes in self.packed:
            return self.packed[nodes]
        names = tuple(self.captured.placeholders[n.name] for n in nodes)
        old = self.captured.states[names[0]]
        name = _common(names)
        if name in self.captured.states:
            name += f" of {names[0]}"
        spec = TensorSpec((len(names), *old.spec.shape), old.spec.dtype)
        state = State(name, spec, old.kind, old.requires_grad, parts=names)
        graph = self.captured.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(placeholder_name(name.replace("*", "all")))
        made.meta = {**nodes[0].meta, "val": spec.meta()}
        self.captured = self.captured.with_(
            states={**self.captured.states, name: state},
            placeholders={**self.captured.placeholders, made.name: name},
        )
        self.packed[nodes] = made
        return made

    def abandon(self) -> None:
        """Take back the placeholders that were made, which nothing reads."""
        for made in self.packed.values():
            self.captured.graph.erase_node(made)

    def settle(self) -> Captured:
        """``captured`` without the parameters that are packed, which nothing reads any more."""
        placeholders, states = dict(self.captured.placeholders), dict(self.captured.states)
        for node in (n for nodes in self.packed for n in nodes):
            states.pop(placeholders.pop(node.name))
            self.captured.graph.erase_node(node)
        self.captured = self.captured.with_(states=states, placeholders=placeholders)
        return self.captured


def _common(names: Sequence[str]) -> str:
    """The names as one: ``experts.*.up.weight``."""
    parts = [name.split(".") for name in names]
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=False))
