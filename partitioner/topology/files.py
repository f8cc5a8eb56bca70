"""Topologies from files: the catalogue of devices, links, patterns, hosts and machines, and the user's own YAML.

A file gives either a known machine::

    machine: dgx-h100
    nodes: 4

or all of it; types, levels, patterns and hosts may start from the catalogue with ``like`` (``docs/topology.md``)::

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
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from partitioner.errors import TopologyError
from partitioner.topology.checks import explain
from partitioner.topology.model import Topology

_ALL = ("name", "types", "nodes", "levels", "overrides", "node_overrides", "links", "patterns")


@cache
def catalogue(kind: str) -> dict[str, dict[str, Any]]:
    """The entries of a data file (devices, links, patterns, hosts, machines), with ``like`` resolved."""
    text = resources.files("partitioner.topology").joinpath("data", f"{kind}.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {name: _resolve(entry, entries, f"{kind}.yaml") for name, entry in entries.items()}


def known_presets() -> tuple[str, ...]:
    return tuple(catalogue("machines"))


def preset(name: str, nodes: int = 1) -> Topology:
    """``nodes`` machines called ``name``. Raises :class:`TopologyError` for an unknown one or no nodes."""
    machines = catalogue("machines")
    if name not in machines:
        raise TopologyError(f"unknown preset {name!r}; known are {', '.join(machines)}, and local:<ranks>")
    if nodes < 1:
        raise TopologyError(f"preset {name!r} with {nodes} nodes; expected at least 1")
    return topology_of({"name": name if nodes == 1 else f"{nodes} x {name}", **machine_fields(name, nodes)}, name)


def topology_of(data: dict[str, Any], source: str) -> Topology:
    """The topology that ``data``, as a YAML file has it, describes; ``source`` names it in errors."""
    return Topology(**_expand(data, source))


def machine_fields(name: str, nodes: int, devices: int | None = None) -> dict[str, Any]:
    """Nodes and levels of ``nodes`` machines ``name``, with ``devices`` in each in place of what it has."""
    machine = dict(catalogue("machines")[name])
    levels = machine.pop("levels")
    group = {**machine, "count": nodes}
    if devices is not None:
        group["devices"] = devices
    if nodes == 1 and "pattern" in group:  # which joins them
        levels = [level for level in levels if level.get("nodes") == 1]
    return {"nodes": [group], "levels": needed_levels(levels, nodes, group["devices"])}


def needed_levels(levels: Sequence[Mapping[str, Any]], nodes: int, devices: int) -> list[Mapping[str, Any]]:
    """Of ``levels`` those that join some of ``nodes`` times ``devices``, up to the first that joins all."""
    needed = []
    for level in levels:
        extent = min(level.get("nodes", nodes), nodes)
        if extent * devices > 1:
            needed.append(level)
        if extent == nodes:
            break
    return needed


def load(path: str | os.PathLike[str]) -> Topology:
    """Read a YAML file. Raises :class:`TopologyError`: file and line of what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"cannot read the topology {os.fspath(path)!r}: {error.strerror}; give YAML") from error
    return loads(text, os.fspath(path))


def loads(text: str, source: str = "topology") -> Topology:
    """Read YAML text; ``source`` names it in errors."""
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(tree, source)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TopologyError(f"{source}{line}: not valid YAML: {error.problem or error}") from error
    if not isinstance(data, dict):
        raise TopologyError(f"{source}: expected a mapping with 'machine' or 'nodes', got {type(data).__name__}")
    if "machine" in data:
        data = _expand_machine(data, source)
    fields = _expand(data, source)
    try:
        return Topology(**fields)
    except TopologyError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError):
            raise TopologyError(explain(cause, source, lambda path: _line(tree, path))) from error
        raise


def dump(topology: Topology) -> str:
    """Self-contained YAML of ``topology``."""
    data = topology.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def parse(text: str) -> Topology:
    """``local:4``, ``detect``, a preset with or without ``:<nodes>``, or a path."""
    head, _, tail = text.partition(":")
    if head in known_presets() or head in ("local", "detect"):
        if tail and not tail.isdigit():
            raise TopologyError(f"{text!r}: expected a number after the colon, got {tail!r}")
        if head == "detect":
            return Topology.detect()
        return Topology.local(int(tail or 1)) if head == "local" else preset(head, int(tail or 1))
    if Path(text).exists() or text.endswith((".yaml", ".yml")):
        return load(text)
    known = ", ".join(known_presets())
    raise TopologyError(f"{text!r} is neither a file nor a known topology; known are local:<ranks>, {known} (:<nodes>)")


def _resolve(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], source: str) -> dict[str, Any]:
    """``entry`` over the entry that it is ``like``."""
    if "like" not in entry:
        return dict(entry)
    base = entry["like"]
    if base not in entries:
        raise TopologyError(f"{source}: like: {base!r} is unknown; known are {', '.join(entries)}")
    return {**_resolve(entries[base], entries, source), **{k: v for k, v in entry.items() if k != "like"}}


def _expand_machine(data: dict[str, Any], source: str) -> dict[str, Any]:
    nodes = data.get("nodes", 1)
    if not isinstance(nodes, int):
        raise TopologyError(f"{source}: with 'machine', 'nodes' is their number; got {type(nodes).__name__}")
    base = preset(str(data["machine"]), nodes).model_dump(exclude_defaults=True)
    return {**base, **{k: v for k, v in data.items() if k not in ("machine", "nodes")}}


def _expand(data: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of a topology: what is ``like`` the catalogue and what the catalogue describes is filled in."""
    unknown = sorted(set(data) - set(_ALL))
    if unknown:
        raise TopologyError(f"{source}: unknown key {unknown[0]!r}; expected machine, {', '.join(_ALL)}")
    devices = catalogue("devices")
    types = _resolve_all(data.get("types"), "devices", source)
    groups = [_expand_group(g, source) if isinstance(g, dict) else g for g in data.get("nodes") or ()]
    patterns = _resolve_all(data.get("patterns"), "patterns", source)
    named = [g.get("type") for g in groups if isinstance(g, dict)]
    named += [o.get("type") for o in (data.get("overrides") or {}).values() if isinstance(o, dict)]
    for kind in named:
        if kind in devices and kind not in types:
            types[kind] = devices[kind]
    for name in (g.get("pattern") for g in groups if isinstance(g, dict)):
        if name in catalogue("patterns") and name not in patterns:
            patterns[name] = catalogue("patterns")[name]
    levels = [_expand_level(v, source) if isinstance(v, dict) else v for v in data.get("levels") or ()]
    made = {"types": types, "nodes": groups, "levels": levels, "patterns": patterns}
    given = {k: v for k, v in data.items() if v is not None}
    return {"name": source, **given, **{k: v for k, v in made.items() if v or k in given}, "types": types}


def _resolve_all(own: Any, kind: str, source: str) -> dict[str, Any]:
    return {n: _resolve(e, catalogue(kind), source) if isinstance(e, dict) else e for n, e in (own or {}).items()}


def _expand_level(level: dict[str, Any], source: str) -> dict[str, Any]:
    """A level that is ``like`` a link of the catalogue has its name, where it has none of its own."""
    named = {"name": level["like"]} if "like" in level else {}
    return {**named, **_resolve(level, catalogue("links"), source)}


def _expand_group(group: dict[str, Any], source: str) -> dict[str, Any]:
    host = group.get("host")
    if host is None:
        return group
    host = {"like": host} if isinstance(host, str) else host
    return {**group, "host": _resolve(host, catalogue("hosts"), source) if isinstance(host, dict) else host}


def _refuse_duplicates(node: Any, source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise TopologyError(f"{source}, line {line}: duplicate name {key.value!r}; each may be given once")
            seen.add(key.value)
            _refuse_duplicates(value, source)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, source)


def _line(node: Any, path: Sequence[int | str]) -> int | None:
    """The line in the file of the value at ``path``, or of the nearest that encloses it."""
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
