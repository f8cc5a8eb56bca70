"""What must hold between the parts of a topology, and how complaints are told: what, where, what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from partitioner.topology.fabric import MOST_PLACES
from partitioner.topology.parts import NodeGroup, NodeOverride

if TYPE_CHECKING:
    from partitioner.topology.model import Topology


class MisplacedError(ValueError):
    """A complaint about what stands under the keys ``path``."""

    def __init__(self, message: str, *path: int | str) -> None:
        super().__init__(message)
        self.path = path


def check_parts(topology: Topology) -> None:
    """Raises :class:`MisplacedError` for names that are not described or given twice, and for what cannot be."""
    _check_types(topology)
    _check_names(topology)
    _check_levels(topology)
    for number, group in enumerate(topology.nodes):
        if group.pattern is not None:
            _check_pattern(topology, group, number)
    for node, override in topology.node_overrides.items():
        _check_node(topology, node, override)


def _check_types(topology: Topology) -> None:
    named = [(g.type, ("nodes", i, "type")) for i, g in enumerate(topology.nodes)]
    named += [(o.type, ("overrides", name, "type")) for name, o in topology.overrides.items() if o.type]
    for kind, path in named:
        if kind not in topology.types:
            known = ", ".join(sorted(topology.types)) or "none"
            raise MisplacedError(f"device type {kind!r} is not described; described are {known}", *path)


def _check_names(topology: Topology) -> None:
    duplicates = _duplicates(topology.names)
    if duplicates:
        twice = ", ".join(duplicates)
        raise MisplacedError(f"duplicate device names: {twice}; give every device a name of its own", "nodes")
    mentioned = [(name, ("overrides", name)) for name in topology.overrides]
    mentioned += [(name, ("links", i)) for i, link in enumerate(topology.links) for name in link.between]
    for name, path in mentioned:
        if name not in topology.index:
            few = ", ".join(topology.names[:4])
            raise MisplacedError(f"unknown device {name!r} in overrides or links; devices are named {few}, ...", *path)
    for i, link in enumerate(topology.links):
        if link.between[0] == link.between[1]:
            raise MisplacedError(f"a link joins {link.between[0]!r} to itself; name two devices", "links", i)


def _check_levels(topology: Topology) -> None:
    islands = list(dict.fromkeys(g.island_name for g in topology.nodes))
    for i, level in enumerate(topology.levels):
        for name in level.only:
            if name not in islands:
                raise MisplacedError(
                    f"level {level.name!r} is only of {name!r}, which no nodes are; nodes are of {', '.join(islands)} "
                    "(their island, else their type)",
                    *("levels", i, "only"),
                )


def _check_pattern(topology: Topology, group: NodeGroup, number: int) -> None:
    path = ("nodes", number, "pattern")
    if group.pattern not in topology.patterns:
        known = ", ".join(topology.patterns) or "none"
        raise MisplacedError(f"pattern {group.pattern!r} is not described; described are {known}", *path)
    if group.devices > MOST_PLACES:
        raise MisplacedError(
            f"a pattern for nodes of {group.devices} devices; at most {MOST_PLACES}: describe larger ones by levels",
            *path,
        )
    for k, link in enumerate(topology.patterns[group.pattern].links):
        for i, j in link.pairs if link.pairs != "all" else ():
            if i == j or not (0 <= i < group.devices and 0 <= j < group.devices):
                raise MisplacedError(
                    f"the pair [{i}, {j}] on nodes of {group.devices} devices; expected two different places from 0 to "
                    f"{group.devices - 1}",
                    *("patterns", group.pattern, "links", k, "pairs"),
                )


def _check_node(topology: Topology, node: int, override: NodeOverride) -> None:
    if not 0 <= node < topology.num_nodes:
        raise MisplacedError(
            f"there is no node {node}; nodes are numbered 0 to {topology.num_nodes - 1}", "node_overrides", node
        )
    first = 0
    for group in topology.nodes:
        first += group.count
        if node < first:
            break
    cards = group.nics or group.devices
    dead = override.dead(cards)
    if not all(0 <= card < cards for card in dead):
        raise MisplacedError(
            f"dead_nics of node {node} names or counts more than it has: {cards} cards, numbered from 0",
            *("node_overrides", node, "dead_nics"),
        )
    if len(dead) == cards:
        raise MisplacedError(
            f"all {cards} network cards of node {node} are dead; leave the node out, or give network: a small fraction",
            *("node_overrides", node, "dead_nics"),
        )


def _duplicates(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):
        return []
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def explain(
    error: ValidationError, what: str, line_of: Callable[[Sequence[int | str]], int | None] | None = None
) -> str:
    """The first of ``error``'s complaints as one sentence; ``line_of`` maps a path of keys to a line of a file."""
    first = error.errors()[0]
    place: Sequence[int | str] = getattr(first.get("ctx", {}).get("error"), "path", None) or first["loc"]
    path = ".".join(str(p) for p in place)
    message = first["msg"].removeprefix("Value error, ")
    line = line_of(place) if line_of is not None else None
    got = "" if first["type"] in ("value_error", "missing") else f" (got {first['input']!r})"
    where = f", line {line}" if line else ""
    return f"{what}{where}: {path + ': ' if path else ''}{message}{got}"
