"""Check the parts of a topology against each other, and format error messages.

A message states what is wrong, where it is in the file, the value that was given, and a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from partitioner.errors import TopologyError
from partitioner.topology.fabric import MOST_PLACES, compute_level_extent, largest_node
from partitioner.topology.hardware import NodeGroup, NodeOverride, Pattern

if TYPE_CHECKING:
    from partitioner.topology.topology import Topology

_WORDS = {  # kind of a pydantic error -> what was expected
    "tuple_type": "expected a list, like [a, b]",
    "dict_type": "expected a mapping, like {{name: value}}",
    "model_type": "expected a mapping, like {{name: value}}",
    "string_type": "expected text",
    "float_type": "expected a number, with a unit where it has one",
    "float_parsing": "expected a number, with a unit where it has one",
    "finite_number": "expected a finite number",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "missing": "missing; give it",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "greater_than": "expected greater than {gt:g}",
    "greater_than_equal": "expected greater than or equal to {ge:g}",
    "less_than_equal": "expected at most {le:g}",
}
_SAID = ("value_error", "missing", "extra_forbidden")  # kinds of errors whose message has the wrong value
_MARKS = ("[key]",)  # names that pydantic puts among the keys


def format_validation_error(
    error: ValidationError,
    model: type[BaseModel],
    what: str,
    line_of: Callable[[Sequence[int | str]], int | None] | None = None,
) -> str:
    """Return the most specific error in ``error``, the exception of a failed pydantic validation, as one sentence with
    the place, the mistake and the value.

    ``model``: the class that was validated. ``what``: the name of the validated object in the sentence, such as a file
    name. ``line_of``: function from a path of keys and list indices to the line of the file (``None`` if unknown).
    ``line_of=None``: the object is not from a file.
    """
    every = error.errors()
    # an error about an inner value says more than one about the whole, and a wrong value more than a missing one
    first = min(every, key=lambda each: (_has_inside(each["loc"], every), each["type"] == "missing"))
    context: Mapping[str, Any] = first.get("ctx", {})
    place: Sequence[int | str] = getattr(context.get("error"), "path", None) or first["loc"]
    place = [key for key in place if key not in _MARKS]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in _WORDS:
        message = _WORDS[first["type"]].format_map(context)
    if first["type"] == "extra_forbidden":
        message = _unknown_key(str(place[-1]), _list_allowed_keys(model, place[:-1]))
    line = line_of(place) if line_of is not None else None
    got = "" if first["type"] in _SAID else f" (got {first['input']!r})"
    path, where = ".".join(str(key) for key in place), f", line {line}" if line else ""
    return f"{what}{where}: {path + ': ' if path else ''}{message}{got}"


def _has_inside(place: Sequence[int | str], every: Iterable[ErrorDetails]) -> bool:
    """Return whether one of the pydantic errors ``every`` is about a value inside the value at ``place``. Such an error
    is more specific and is reported first. ``place``: the keys and list indices that lead to the value. If ``place`` is
    empty (the error is about the whole object), the result is false."""
    return any(len(each["loc"]) > len(place) > 0 and each["loc"][: len(place)] == place for each in every)


_MOST_VALUES = 1_000_000  # values of a YAML file, where each alias counts as what it stands for


def find_alias_problem(tree: Any) -> str:
    """Return, as text, why the aliases of a YAML file cannot be resolved: a value contains itself, or the aliases
    expand to too many values. Return an empty string if they can be resolved. ``tree``: the root node of the parsed
    YAML, or ``None``."""
    counts: dict[int, int] = {}
    stack = [(tree, False)] if tree is not None else []
    while stack:
        node, is_left = stack.pop()
        pairs = node.value if isinstance(node.value, list) else []
        inner = [part for entry in pairs for part in (entry if isinstance(entry, tuple) else (entry,))]
        if is_left:
            counts[id(node)] = min(_MOST_VALUES + 1, 1 + sum(counts[id(part)] for part in inner))
        elif id(node) not in counts:
            counts[id(node)] = 0  # open: an alias that leads here again is a cycle
            stack += [(node, True), *((part, False) for part in inner)]
        elif counts[id(node)] == 0:
            return f"line {node.start_mark.line + 1}: what stands here contains itself by its alias; write it out"
    if tree is not None and counts[id(tree)] > _MOST_VALUES:
        return f"line {tree.start_mark.line + 1}: its aliases stand for more than {_MOST_VALUES:,} values; write fewer"
    return ""


def format_suggestion(name: str, known: Sequence[str]) -> str:
    """Return ``"did you mean ...? "`` (with a space at the end) with the names in ``known`` that resemble ``name``;
    ``""`` if there are none."""
    name = name.lower()
    near = [each for each in known if name and name in each] or get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the text of an error about a key that is not allowed, ``key``. ``known``: the allowed keys; similar ones
    are suggested."""
    return (
        f"unknown key; {format_suggestion(key, known)}expected {', '.join(known)}"
        if known
        else "unknown key; leave it out"
    )


def _list_allowed_keys(model: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys that are allowed in a mapping inside the pydantic class ``model``. The result is empty if there
    is no mapping with known keys. ``place``: the keys and list indices that lead to the mapping."""
    for key in place:
        known = model.model_fields if _is_model(model) else {}
        if known and key not in known:
            return []
        inner = known[str(key)].annotation if known else (get_args(model) or [None])
        model = inner if known else [part for part in inner if part is not ...][-1]
        options = [part for part in get_args(model) if part is not NoneType]
        model = options[0] if NoneType in get_args(model) and options else model
    return list(model.model_fields) if _is_model(model) else []


def _is_model(kind: Any) -> bool:
    """Return whether ``kind`` is a pydantic model class."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


MOST_DEVICES = 1 << 20  # with more, the data of all devices would take gigabytes


class MisplacedError(ValueError):
    """Error in a part of a topology, which knows where the part is in the file. ``path``: the keys and list indices
    that lead to it."""

    def __init__(self, message: str, *path: int | str) -> None:
        """Create the error with the text ``message`` and the ``path`` of keys and list indices that lead to the wrong
        part."""
        super().__init__(message)
        self.path = path


def require_type(name: str, value: object, kind: Any) -> None:
    """Raise :class:`TopologyError` unless ``value`` is an instance of ``kind``, a class or a union of classes; a
    boolean is an error even if ``kind`` is ``int``. ``name``: the name of the argument in the error message."""
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(k.__name__ for k in getattr(kind, "__args__", (kind,)))
        raise TopologyError(f"{name} must be {wanted}; got {value!r}")


def check_parts(topology: Topology) -> None:
    """Raise :class:`MisplacedError` if ``topology`` refers to names that it does not describe or gives a name twice, if
    its values contradict each other, or if it has too many devices."""
    if topology.num_devices > MOST_DEVICES:  # before all devices are named
        raise MisplacedError(
            f"{topology.num_devices:,} devices; expected at most {MOST_DEVICES:,}: lower count or devices", "nodes"
        )
    _check_types(topology)
    _check_names(topology)
    _check_levels(topology)
    for number, group in enumerate(topology.nodes):
        if group.pattern is not None:
            _check_pattern(topology, group, number)
    for node, override in topology.node_overrides.items():
        _check_node(topology, node, override)
    if topology.overrides or topology.node_overrides:
        _check_memory(topology)


def _check_types(topology: Topology) -> None:
    """Raise :class:`MisplacedError` if a node or an override names a device type that is not in ``topology``."""
    named: list[tuple[str, tuple[int | str, ...]]] = [
        (g.type, ("nodes", i, "type")) for i, g in enumerate(topology.nodes)
    ]
    named += [(o.type, ("overrides", name, "type")) for name, o in topology.overrides.items() if o.type]
    for kind, path in named:
        if kind not in topology.types:
            known = ", ".join(sorted(topology.types)) or "none"
            raise MisplacedError(f"device type {kind!r} is not described; described are {known}", *path)


def _check_names(topology: Topology) -> None:
    """Raise :class:`MisplacedError` if two devices of ``topology`` have the same name, if an override or a link names
    an unknown device, if a link connects a device to itself, or if two links connect the same pair."""
    duplicates = _find_duplicates(topology.names)
    if duplicates:
        twice = ", ".join(duplicates)
        raise MisplacedError(f"duplicate device names: {twice}; give every device a name of its own", "nodes")
    mentioned: list[tuple[str, tuple[int | str, ...]]] = [(name, ("overrides", name)) for name in topology.overrides]
    mentioned += [(name, ("links", i)) for i, link in enumerate(topology.links) for name in link.between]
    for name, path in mentioned:
        if name not in topology.index:
            few = ", ".join(topology.names[:4])
            raise MisplacedError(f"unknown device {name!r} in overrides or links; devices are named {few}, ...", *path)
    for i, link in enumerate(topology.links):
        if link.between[0] == link.between[1]:
            raise MisplacedError(f"a link joins {link.between[0]!r} to itself; name two devices", "links", i)
    joined: set[frozenset[str]] = set()
    for i, link in enumerate(topology.links):
        if frozenset(link.between) in joined:
            raise MisplacedError(
                f"a second link between {' and '.join(map(repr, link.between))}; give one for each pair, as fast as "
                "all together (it is for both directions)",
                *("links", i),
            )
        joined.add(frozenset(link.between))


def _check_levels(topology: Topology) -> None:
    """Raise :class:`MisplacedError` if a level of links in ``topology`` names unknown islands (sets of nodes), connects
    more devices than a node has, or connects only devices that earlier levels already connect."""
    islands = list(dict.fromkeys(g.island_name for g in topology.nodes))
    for i, level in enumerate(topology.levels):
        for name in level.only:
            if name not in islands:
                raise MisplacedError(
                    f"level {level.name!r} has only: {name!r}, but there are no such nodes; there are nodes of "
                    f"{', '.join(islands)} "
                    "(their island, else their type)",
                    *("levels", i, "only"),
                )
        if level.devices is not None and level.devices > (most := largest_node(topology.nodes, level)):
            raise MisplacedError(
                f"level {level.name!r} joins every {level.devices} devices of a node, but the largest node has "
                f"{most}; expected at most {most}, or nodes: 2 for a level that joins the devices of every two nodes",
                *("levels", i, "devices"),
            )
        for outer in topology.levels[:i]:
            if compute_level_extent(outer) >= compute_level_extent(level) and set(level.only or islands) <= set(
                outer.only or islands
            ):
                raise MisplacedError(
                    f"level {level.name!r} is never used: {outer.name!r}, listed before it, already joins the same "
                    "devices; list levels from the inside out, each with how far it reaches (nodes: 1 is inside each "
                    "node)",
                    *("levels", i),
                )


def _check_pattern(topology: Topology, group: NodeGroup, number: int) -> None:
    """Raise :class:`MisplacedError` if the nodes of ``group`` cannot have their pattern of direct links: it is not
    described, the nodes have too many devices, or it lists impossible or repeated pairs. ``number``: index of the group
    in ``topology``, for the error message."""
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
    _check_pairs(group.pattern, topology.patterns[group.pattern])


def _check_pairs(name: str, pattern: Pattern) -> None:
    """Raise :class:`MisplacedError` if ``pattern``, the direct links inside a node, lists a pair of devices twice, or
    lists ``all`` pairs after single pairs. ``all`` has to come first; single pairs after it override it. ``name``: name
    of the pattern, for the error message.
    """
    listed: set[frozenset[int]] = set()
    for k, link in enumerate(pattern.links):
        if link.pairs == "all":
            if listed:
                raise MisplacedError(
                    "all comes after single pairs; list all first, then the pairs that differ",
                    *("patterns", name, "links", k, "pairs"),
                )
            continue
        for pair in link.pairs:
            if frozenset(pair) in listed:
                raise MisplacedError(
                    f"the pair {list(pair)} twice; give it once, as fast as all of its links together (it is for both "
                    "directions)",
                    *("patterns", name, "links", k, "pairs"),
                )
            listed.add(frozenset(pair))


def _check_node(topology: Topology, node: int, override: NodeOverride) -> None:
    """Raise :class:`MisplacedError` if ``override`` changes a node that ``topology`` does not have, names network cards
    that the node does not have, or leaves it without a working card. ``node``: number of the node, from 0."""
    if not 0 <= node < topology.num_nodes:
        raise MisplacedError(
            f"there is no node {node}; nodes are numbered 0 to {topology.num_nodes - 1}", "node_overrides", node
        )
    first = 0
    for group in topology.nodes:
        first += group.count
        if node < first:
            break
    cards = group.num_cards
    dead = override.dead(cards)
    if not all(0 <= card < cards for card in dead):
        raise MisplacedError(
            f"dead_nics of node {node} lists more cards than the node has; expected at most {cards} cards, "
            "numbered from 0",
            *("node_overrides", node, "dead_nics"),
        )
    if len(dead) == cards:
        raise MisplacedError(
            f"all {cards} network cards of node {node} are broken; leave the node out, or give a small fraction as "
            "network:",
            *("node_overrides", node, "dead_nics"),
        )


def _check_memory(topology: Topology) -> None:
    """Raise :class:`MisplacedError` if an override in ``topology`` gives a device so little memory that all of it is
    reserved."""
    kinds = [g.type for g in topology.nodes for _ in range(g.count)]
    given: list[tuple[str, int | None, tuple[int | str, ...]]] = [
        (kinds[n], o.memory, ("node_overrides", n, "memory")) for n, o in topology.node_overrides.items()
    ]
    for name, override in topology.overrides.items():
        kind = override.type or kinds[topology.node_of[topology.index[name]]]
        given.append((kind, override.memory, ("overrides", name, "memory")))
    for kind, memory, path in given:
        reserved = topology.types[kind].reserved
        if memory is not None and memory <= reserved:
            raise MisplacedError(
                f"{kind!r} has {memory} bytes of memory, of which {reserved} are reserved, nothing is left; give more "
                "memory, or reserve less",
                *path,
            )


def _find_duplicates(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once in ``names``, sorted."""
    if len(set(names)) == len(names):
        return []
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
