"""Read topologies from files: the catalogue of devices, links, patterns, hosts and machines, and the user's own YAML.

A file either names a machine of the catalogue::

    machine: dgx-h100
    nodes: 4

or describes everything. Types, levels, patterns and hosts can start from an entry of the catalogue with ``like``
(``docs/topology.md``)::

    name: lab
    types:
      big: {like: h100-sxm, memory: 94 GB}
    nodes:
      - {type: big, devices: 8, count: 2}
      - {type: a100-80gb, devices: 2, names: [left, right]}
    levels:
      - {name: nvlink, like: nvlink4, nodes: 1}
      - {name: network, bandwidth: 25 GB/s, latency: 19 us}
    overrides: {left: {memory: 40 GB}}
    links: [{between: [left, right], bandwidth: 300 GB/s, latency: 8 us}]

``with_nodes``, ``with_devices`` and ``with_memory`` return a larger or smaller copy of a topology.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from partitioner.errors import TopologyError
from partitioner.topology.fabric import fitting_levels
from partitioner.topology.hardware import TopologyPart, margin_bytes
from partitioner.topology.topology import Topology
from partitioner.topology.validate import MisplacedError, find_alias_problem, format_suggestion, format_validation_error

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_ODD_NUMBER = re.compile(r":|^[-+]?0[0-9_]+$")
_ALL = ("name", "types", "nodes", "levels", "overrides", "node_overrides", "links", "patterns")


class _Decimal(yaml.SafeLoader):
    """A YAML loader that keeps unusual numbers as text. YAML 1.1 would read ``4:1`` as minutes and seconds (241), and
    ``010`` as 8."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool] | bool) -> str:
        """Return the YAML tag (type) of a node: text for numbers with a colon or a leading zero, and PyYAML's result
        for all others. PyYAML passes the arguments: ``kind``, the class of the node; ``value``, its text or ``None``;
        ``implicit``, which kinds of implicit tags it may have."""
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        is_odd = tag in _NUMBERS and value is not None and _ODD_NUMBER.search(value)
        return "tag:yaml.org,2002:str" if is_odd else tag


@cache
def catalogue(kind: str) -> dict[str, dict[str, Any]]:
    """Return the entries of one data file of the catalogue, by name. If an entry names another one with its key
    ``like``, it is returned with the fields of both. ``kind``: the data file: ``devices``, ``links``, ``patterns``,
    ``hosts`` or ``machines``."""
    text = resources.files("partitioner.topology").joinpath("data", f"{kind}.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {name: _resolve_like(entry, entries, kind, name) for name, entry in entries.items()}


def known_presets() -> tuple[str, ...]:
    """Return the names of the machines in the catalogue."""
    return tuple(catalogue("machines"))


def build_preset_topology(name: str, nodes: int = 1) -> Topology:
    """Return the topology of ``nodes`` machines of the catalogue entry ``name``. Raise :class:`TopologyError` if the
    name is unknown or ``nodes`` is not a positive integer.
    """
    machines = catalogue("machines")
    machine, colon, count = name.partition(":") if isinstance(name, str) else ("", "", "")
    if colon and machine in machines:
        raise TopologyError(
            f"preset {name!r} names a number of nodes; expected {machine!r} here, and the number apart: nodes={count}, "
            f"or --nodes {count} (Topology.parse and most commands take {name})"
        )
    if name not in machines:
        raise TopologyError(
            f"unknown preset {name!r}; {format_suggestion(name, [*machines])}known are {', '.join(machines)}; "
            "Topology.parse and the command line also take local:<ranks>, detect and files"
        )
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise TopologyError(f"preset {name!r} with {nodes} nodes; expected at least 1, a whole number")
    return topology_of({"name": name if nodes == 1 else f"{nodes} x {name}", **machine_fields(name, nodes)}, name)


def topology_of(data: dict[str, Any], source: str) -> Topology:
    """Return the topology that ``data`` describes, the content of a topology file as nested dicts and lists.
    ``source``: name of the topology if ``data`` has no ``name``."""
    return Topology(**_expand_topology({"name": source, **data}))


def machine_fields(name: str, nodes: int, devices: int | None = None) -> dict[str, Any]:
    """Return the fields ``nodes`` and ``levels`` of a topology of ``nodes`` machines, in the form of a topology file.
    ``name``: the machine's name in the catalogue. ``devices``: number of devices in each machine; ``None``: the
    catalogue's number."""
    machine = dict(catalogue("machines")[name])
    levels = machine.pop("levels")
    group = {**machine, "count": nodes}
    if devices is not None:
        group["devices"] = devices
    if nodes == 1 and "pattern" in group:  # the direct links connect the devices
        levels = [level for level in levels if level.get("nodes") == 1]
    return {"nodes": [group], "levels": needed_levels(levels, nodes, group["devices"])}


def needed_levels(levels: Sequence[Mapping[str, Any]], nodes: int, devices: int) -> list[Mapping[str, Any]]:
    """Return the levels of links that a cluster needs: from the innermost to the first that connects all nodes.
    ``levels``: all levels of a topology file. ``nodes``: number of nodes. ``devices``: number of devices of each node.
    """
    needed = []
    for level in levels:
        extent = min(level.get("nodes", nodes), nodes)
        if extent * devices > 1:
            needed.append(level)
        if extent == nodes:
            break
    return needed


def load_topology(path: str | os.PathLike[str]) -> Topology:
    """Return the topology that the YAML file ``path`` describes. Raise :class:`TopologyError` with the file and line of
    the mistake if it is not valid or cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"cannot read the topology {os.fspath(path)!r}: {error.strerror}; give YAML") from error
    except UnicodeDecodeError as error:
        raise TopologyError(f"{os.fspath(path)}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return loads(text, os.fspath(path))


def loads(text: str, source: str = "topology") -> Topology:
    """Return the topology that the YAML text ``text`` describes. ``source``: name of the text in errors, and of the
    topology if the text gives none. Raise :class:`TopologyError` with the line of the mistake if it is not valid."""
    try:
        tree = yaml.compose(text, Loader=_Decimal)
        if problem := find_alias_problem(tree):
            raise TopologyError(f"{source}, {problem}")
        _refuse_duplicates(tree, source, set())
        data = yaml.load(text, Loader=_Decimal)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TopologyError(f"{source}{line}: not valid YAML: {error.problem or error}") from error
    except yaml.reader.ReaderError as error:
        what = f"the character {error.character!r} at place {error.position}"
        raise TopologyError(f"{source}: not valid YAML: {what}; give plain text") from error
    except RecursionError as error:
        raise TopologyError(f"{source}: nested too deeply; a topology takes five levels at most") from error
    except TopologyError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # text that looks like a date or a key and is none
        raise TopologyError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise TopologyError(f"{source}: expected a mapping with 'machine' or 'nodes', got {type(data).__name__}")
    try:
        return Topology(**_expand_topology({"name": source, **(_expand_machine(data) if "machine" in data else data)}))
    except MisplacedError as error:
        line_number = _find_line_number(tree, error.path)
        where = f"{source}, line {line_number}" if line_number else source
        raise TopologyError(f"{where}: {error}") from error
    except TopologyError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError):
            raise TopologyError(
                format_validation_error(cause, Topology, source, lambda path: _find_line_number(tree, path))
            ) from error
        raise


def dump_topology(topology: Topology) -> str:
    """Return ``topology`` as YAML text. The text describes all device types and links in full, without names of the
    catalogue."""
    data = topology.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def parse_topology(text: str) -> Topology:
    """Return the topology that ``text`` names: ``local:4`` (four processes of this machine), ``detect`` (this machine),
    a machine of the catalogue, such a machine with ``:<nodes>``, or the path of a YAML file.

    Any of these may end with devices to remove: ``dgx-h100:2 without node1/3, node1/7``. Raise :class:`TopologyError`
    for other text.
    """
    whole, fewer, names = text.partition(" without ")
    if fewer:
        return parse_topology(whole.strip()).without(*(name.strip() for name in names.split(",")))
    head, colon, tail = text.partition(":")
    if head in known_presets() or head in ("local", "detect"):
        if colon and not tail.isdecimal():
            got = repr(tail) if tail else "nothing"
            raise TopologyError(f"{text!r}: expected a number after the colon, got {got}; write it like {head}:2")
        if head == "detect":
            return Topology.detect()
        return Topology.local(int(tail or 1)) if head == "local" else build_preset_topology(head, int(tail or 1))
    if Path(text).exists() or text.endswith((".yaml", ".yml")):
        return load_topology(text)
    known = ", ".join(known_presets())
    meant = format_suggestion(head, ["local", "detect", *known_presets()])
    raise TopologyError(
        f"{text!r} is neither a file nor a known topology; {meant}known are local:<ranks>, {known} (:<nodes>)"
    )


def _resolve_like(entry: Any, entries: Mapping[str, Mapping[str, Any]], *path: int | str) -> Any:
    """Return ``entry`` with the key ``like`` replaced by the fields of the entry that this key names; the fields of
    ``entry`` itself take precedence. If ``entry`` has no key ``like``, return it unchanged. ``entries``: the entries
    that can be named, by name. ``path``: the keys that lead to ``entry`` in the file, for errors. Raise
    :class:`MisplacedError` for an unknown name."""
    if not isinstance(entry, Mapping) or "like" not in entry:
        return entry
    base = entry["like"]
    if not isinstance(base, str) or base not in entries:
        meant = format_suggestion(base, [*entries]) if isinstance(base, str) else ""
        raise MisplacedError(f"like: {base!r} is unknown; {meant}known are {', '.join(entries)}", *path, "like")
    return {**_resolve_like(entries[base], entries, *path), **{k: v for k, v in entry.items() if k != "like"}}


def _expand_machine(data: dict[str, Any]) -> dict[str, Any]:
    """Return the topology fields ``data`` with the keys ``machine`` and ``nodes`` (the number of machines) replaced by
    the fields of that machine in the catalogue. Other fields of ``data`` take precedence over these. Raise
    :class:`MisplacedError` for an unknown machine or a wrong number."""
    machine, nodes = data["machine"], data.get("nodes", 1)
    if not isinstance(nodes, int) or isinstance(nodes, bool):
        raise MisplacedError(f"with 'machine', 'nodes' is their number, like 4; got {nodes!r}", "nodes")
    try:
        base = build_preset_topology(str(machine), nodes).model_dump(exclude_defaults=True)
    except TopologyError as error:
        raise MisplacedError(str(error), "nodes" if machine in known_presets() else "machine") from error
    return {**base, **{k: v for k, v in data.items() if k not in ("machine", "nodes")}}


def _expand_topology(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a topology from ``data``, the content of a file. Keys ``like`` are replaced by the fields of
    the catalogue's entry that they name, and missing types and patterns are taken from the catalogue.

    Raise :class:`MisplacedError` for unknown keys and names. The types of values are not checked here, but by pydantic
    later.
    """
    unknown = sorted(str(key) for key in set(data) - set(_ALL))
    if unknown:
        meant = format_suggestion(unknown[0], ["machine", *_ALL])
        raise MisplacedError(f"unknown key {unknown[0]!r}; {meant}expected machine, {', '.join(_ALL)}", unknown[0])
    fields = {key: value for key, value in data.items() if value is not None}
    types = fields.setdefault("types", {})
    for key, kind in (("types", "devices"), ("patterns", "patterns")):
        if isinstance(own := fields.get(key), dict):
            fields[key] = {n: _resolve_like(entry, catalogue(kind), key, n) for n, entry in own.items()}
    if isinstance(fields.get("levels"), list):
        fields["levels"] = [_expand_level(level, i) for i, level in enumerate(fields["levels"])]
    if isinstance(fields.get("nodes"), list):
        fields["nodes"] = [_expand_group(nodes, i) for i, nodes in enumerate(fields["nodes"])]
    groups = [g for g in _list_entries(fields.get("nodes")) if isinstance(g, dict)]
    overrides = [o for o in _list_entries(fields.get("overrides")) if isinstance(o, dict)]
    if isinstance(types, dict):
        fields["types"] = _add_catalogue_entries(
            fields["types"], "devices", [each.get("type") for each in (*groups, *overrides)]
        )
        _check_kinds(fields)
    if isinstance(patterns := fields.get("patterns", {}), dict):
        patterns = _add_catalogue_entries(patterns, "patterns", [g.get("pattern") for g in groups])
        fields |= {"patterns": patterns} if patterns else {}
    return fields


def _check_kinds(fields: Mapping[str, Any]) -> None:
    """Raise :class:`MisplacedError` if the nodes or overrides in ``fields``, the content of a topology file, name a
    device type that neither the file nor the catalogue describes."""
    known = [*map(str, {**fields["types"], **catalogue("devices")})]
    for key in ("nodes", "overrides"):
        given = fields.get(key)
        entries = given.items() if isinstance(given, dict) else enumerate(_list_entries(given))
        for place, each in entries:
            name = each.get("type") if isinstance(each, dict) else None
            if isinstance(name, str) and name not in known:
                said = f"{key}.{place}.type: device type {name!r} is not described; {format_suggestion(name, known)}"
                said += f"describe it under types, or take one of {', '.join(known)}"
                raise MisplacedError(said, key, place, "type")


def _list_entries(value: Any) -> list[Any]:
    """Return the values of ``value`` if it is a mapping, its entries if it is a list or tuple, and an empty list for
    other objects."""
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []


def _add_catalogue_entries(own: dict[str, Any], kind: str, names: Sequence[Any]) -> dict[str, Any]:
    """Return ``own``, entries of a file by name, with the missing entries of ``names`` added from the catalogue. Names
    that the catalogue lacks, too, are skipped. ``kind``: the data file of the catalogue, such as ``devices``."""
    known = catalogue(kind)
    return own | {n: known[n] for n in names if isinstance(n, str) and n in known and n not in own}


def _expand_level(level: Any, number: int) -> Any:
    """Return ``level``, an entry of ``levels`` in a topology file, with its key ``like``, the name of a link in the
    catalogue, replaced by the fields of this link. A level without a name gets the name of the link. ``number``: index
    of the level, for errors."""
    resolved = _resolve_like(level, catalogue("links"), "levels", number)
    return resolved if resolved is level else {"name": level["like"], **resolved}


def _expand_group(group: Any, number: int) -> Any:
    """Return ``group``, an entry of ``nodes`` in a topology file, with its ``host`` replaced by the fields of the host
    in the catalogue that it names, directly or by ``like``. Entries without a host are returned unchanged. ``number``:
    index of the entry, for errors."""
    if not isinstance(group, dict) or group.get("host") is None:
        return group
    host = {"like": group["host"]} if isinstance(group["host"], str) else group["host"]
    return {**group, "host": _resolve_like(host, catalogue("hosts"), "nodes", number, "host")}


def _refuse_duplicates(node: Any, source: str, seen: set[int]) -> None:
    """Raise :class:`TopologyError` if a YAML mapping has a key twice. ``node``: a node of the parsed YAML, which is
    checked with all nodes inside it. ``source``: name of the file in errors. ``seen``: identities of the nodes that
    were already checked, because aliases lead to a node more than once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                line = key.start_mark.line + 1
                raise TopologyError(f"{source}, line {line}: duplicate name {key.value!r}; each may be given once")
            names.add(str(key.value))
            _refuse_duplicates(value, source, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, source, seen)


def _find_line_number(node: Any, path: Sequence[int | str]) -> int | None:
    """Return the line in the file, from 1, of the value at ``path``, or of the nearest value that encloses it. Return
    ``None`` if ``path`` is empty or ``node`` is ``None``. ``path``: the keys and list indices that lead from ``node``,
    the parsed YAML, to the value."""
    for key in path:
        inner = None
        if isinstance(node, yaml.MappingNode):
            inner = next((v for k, v in node.value if k.value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            inner = node.value[key]
        if inner is None:
            break
        node = inner
    return node.start_mark.line + 1 if node is not None and path else None


def with_nodes(topology: Topology, num_nodes: int) -> Topology | None:
    """Return a copy of ``topology`` with ``num_nodes`` nodes, made by changing the count of its largest group of equal
    nodes. Return ``None`` if that is impossible or changes nothing.

    A single machine of the catalogue gets the network that the catalogue gives it. Any other topology needs a level of
    links that connects all of its nodes. Overrides of single devices and links are kept.
    """
    more = num_nodes - topology.num_nodes
    largest = max(range(len(topology.nodes)), key=lambda k: topology.nodes[k].count)
    group = topology.nodes[largest]
    if group.names or group.count + more < 1 or not more:
        return None
    if topology == _build_local_topology(topology.num_devices):
        return _build_local_topology(num_nodes * topology.num_devices) if topology.num_nodes == 1 else None
    nodes = tuple(
        g.model_copy(update={"count": g.count + more}) if k == largest else g for k, g in enumerate(topology.nodes)
    )
    levels = list(topology.levels)
    if topology.num_nodes == 1 and topology.name in known_presets():
        levels += build_preset_topology(topology.name, 2).levels[-1:]
    return _try_change_topology(topology, nodes=nodes, levels=levels, name=_format_scaled_name(topology, num_nodes))


def with_devices(topology: Topology, num_devices: int) -> Topology | None:
    """Return a copy of ``topology``, which must have one node, with ``num_devices`` devices in the node. Return
    ``None`` if it has several nodes, if its devices have names of their own, or if the number is impossible."""
    group = topology.nodes[0]
    if topology.num_nodes > 1 or group.names or num_devices < 1:
        return None
    if topology == _build_local_topology(topology.num_devices):
        return _build_local_topology(num_devices)
    node = group.model_copy(update={"devices": num_devices})
    levels = tuple(fitting_levels(topology.levels, (node,)).values())
    return _try_change_topology(topology, nodes=(node,), levels=levels, name=f"{topology.name}, {num_devices} devices")


def with_memory(topology: Topology, times: float) -> Topology | None:
    """Return a copy of ``topology`` with the memory of every device multiplied by the factor ``times``; ``None`` if the
    result is not a valid topology. The bytes that no process can use (``reserved``) do not change."""

    def grown(part: TopologyPart) -> TopologyPart:
        """Return a copy of ``part``, a device type or an override of a device or node, with its bytes of memory
        multiplied by the factor ``times`` of the enclosing function; ``part`` itself if it gives no memory."""
        memory = getattr(part, "memory", None)
        return part if memory is None else part.model_copy(update={"memory": round(memory * times)})

    parts = ("types", "overrides", "node_overrides")
    changed = {name: {key: grown(part) for key, part in getattr(topology, name).items()} for name in parts}
    return _try_change_topology(topology, **changed, name=f"{topology.name}, {times:g} times the memory")


def with_margin(topology: Topology, margin: float) -> Topology:
    """Return a copy of ``topology`` in which each device has less memory: the fraction ``margin`` (0 to 1) of its
    usable memory is removed, so that plans leave it free."""
    if not margin:
        return topology

    def smaller(memory: int, kind: str) -> int:
        """Return ``memory``, the bytes of a device, minus the bytes that plans must leave free: the fraction ``margin``
        (argument of the enclosing function) of the bytes that programs can use. ``kind``: name of the device type,
        which gives the bytes that no process can use, such as those of the driver."""
        return memory - margin_bytes(memory - topology.types[kind].reserved, margin)

    types = {n: kind.model_copy(update={"memory": smaller(kind.memory, n)}) for n, kind in topology.types.items()}
    of_node = [group.type for group in topology.nodes for _ in range(group.count)]
    nodes = {
        node: own if own.memory is None else own.model_copy(update={"memory": smaller(own.memory, of_node[node])})
        for node, own in topology.node_overrides.items()
    }
    devices = {}
    for name, own in topology.overrides.items():
        kind = own.type or of_node[topology.node_of[topology.names.index(name)]]
        changed = {} if own.memory is None else {"memory": smaller(own.memory, kind)}
        devices[name] = own.model_copy(update=changed)
    return topology.changed(types=types, overrides=devices, node_overrides=nodes)


def _build_local_topology(num_devices: int) -> Topology:
    """Return a topology of ``num_devices`` processes that share this machine's CPU cores and memory evenly."""
    return Topology.local(num_devices)


def _format_scaled_name(topology: Topology, num_nodes: int) -> str:
    """Return the name of ``topology`` for ``num_nodes`` nodes, such as ``4 x dgx-h100``."""
    kind = topology.name.split(" x ")[-1]
    return f"{num_nodes} x {kind}"


def _try_change_topology(topology: Topology, **changed: object) -> Topology | None:
    """Return a copy of ``topology`` with the fields ``changed`` (name=value) replaced; ``None`` if the copy would be
    invalid."""
    try:
        return topology.changed(**changed)
    except TopologyError:
        return None
