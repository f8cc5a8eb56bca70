"""Topologies from files: the catalogue of devices, links and machines, and the user's own YAML.

A file gives either a known machine::

    machine: dgx-h100
    nodes: 4

or all of it; device types and links may start from the catalogue with ``like``::

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
from partitioner.topology.model import Topology, explain

_ALL = ("name", "types", "nodes", "levels", "overrides", "links")


@cache
def catalogue(kind: str) -> dict[str, dict[str, Any]]:
    """The entries of a data file (``devices``, ``links``, ``machines``), with ``like`` resolved."""
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
    machine = machines[name]
    levels = []
    if machine["devices"] > 1:
        levels.append({"name": machine["inside"], "nodes": 1, **catalogue("links")[machine["inside"]]})
    if nodes > 1:
        levels.append({"name": machine["between"], **catalogue("links")[machine["between"]]})
    kind = machine["type"]
    return Topology(
        name=name if nodes == 1 else f"{nodes} x {name}",
        nodes=({"type": kind, "devices": machine["devices"], "count": nodes},),
        types={kind: catalogue("devices")[kind]},
        levels=levels,
    )


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
    base = preset(str(data["machine"]), nodes).model_dump(mode="json", exclude_defaults=True)
    return {**base, **{k: v for k, v in data.items() if k not in ("machine", "nodes")}}


def _expand(data: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of a topology: what is ``like`` the catalogue and what the catalogue describes is filled in."""
    unknown = sorted(set(data) - set(_ALL))
    if unknown:
        raise TopologyError(f"{source}: unknown key {unknown[0]!r}; expected machine, {', '.join(_ALL)}")
    devices, links = catalogue("devices"), catalogue("links")
    own = data.get("types") or {}
    types = {n: _resolve(t, devices, source) if isinstance(t, dict) else t for n, t in own.items()}
    named = [g.get("type") for g in data.get("nodes") or () if isinstance(g, dict)]
    named += [o.get("type") for o in (data.get("overrides") or {}).values() if isinstance(o, dict)]
    for kind in named:
        if kind in devices and kind not in types:
            types[kind] = devices[kind]
    levels = [_resolve(v, links, source) if isinstance(v, dict) else v for v in data.get("levels") or ()]
    return {"name": source, **{k: v for k, v in data.items() if v is not None}, "types": types, "levels": levels}


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
            inner = next((v for k, v in node.value if k.value == key), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            inner = node.value[key]
        if inner is None:
            break
        node = inner
    return node.start_mark.line + 1 if node is not None and path else None
