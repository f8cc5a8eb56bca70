"""Describe the present machine as a topology.

The links between GPUs are read from the output of ``nvidia-smi topo``.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.errors import TopologyError
from partitioner.topology.fabric import pattern_matrix
from partitioner.topology.files import catalogue, machine_fields, topology_of
from partitioner.topology.hardware import Pattern
from partitioner.topology.quantities import parse_quantity
from partitioner.topology.topology import Topology

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # escape sequences: the header of ``nvidia-smi topo -m`` is underlined

_COLUMN = re.compile(r"\b(?:GPU\d+|NIC\d+|mlx\w+|bnxt\w+|hfi\w+)\b")
_SPEED = re.compile(r"Link \d+:\s*([\d.]+)\s*GB/s")
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.98e9, 4: 1.97e9, 5: 3.94e9, 6: 7.9e9}  # bytes/s per lane and direction
QUERY = ("--query-gpu=index,uuid,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")


@dataclass(frozen=True, eq=False)
class Wiring:
    """The links of the GPUs of one machine, in the order of the machine's GPU indices.

    ``nvlinks``: number of NVLinks between each pair of GPUs, shape ``[n, n]``. With NVLink switches, which connect
    every pair by all links of a GPU, all entries are ``ports``. ``num_nics``: number of network cards. ``speed``:
    bytes/s of one NVLink per direction. ``ports``: active NVLinks of one GPU. ``pcie``: bytes/s of the slowest PCIe
    slot per direction. ``uuids``: the unique ids of the GPUs. ``None`` and empty mean that ``nvidia-smi`` does not
    report the value.
    """

    nvlinks: NDArray[np.int64]
    num_nics: int = 0
    speed: float | None = None
    ports: int | None = None
    pcie: float | None = None
    uuids: tuple[str, ...] = ()


def detect_wiring() -> Wiring | None:
    """Return the links between this machine's GPUs; ``None`` if ``nvidia-smi`` is missing or its output cannot be
    parsed."""
    matrix = run_nvidia_smi("topo", "-m")
    return read_wiring(matrix, run_nvidia_smi("nvlink", "--status"), run_nvidia_smi(*QUERY)) if matrix else None


def run_nvidia_smi(*arguments: str) -> str:
    """Return the standard output of ``nvidia-smi`` with the command-line arguments ``arguments``; ``""`` if the tool is
    missing, fails or takes over 30 s."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_wiring(matrix: str, status: str = "", query: str = "") -> Wiring | None:
    """Return the links between GPUs that three outputs of ``nvidia-smi`` describe; ``None`` if ``matrix`` cannot be
    parsed. ``matrix``: the output of ``nvidia-smi topo -m``. ``status``: the output of ``nvidia-smi nvlink --status``.
    ``query``: the output of ``nvidia-smi`` with the arguments :data:`QUERY`, which print the PCIe slots of the GPUs.
    ``status`` and ``query`` may be empty.
    """
    lines = [_ESCAPES.sub("", text) for text in matrix.splitlines()]
    header = next((text for text in lines if text.split()[:1] == ["GPU0"] and "X" not in text.split()), "")
    columns = _COLUMN.findall(header)
    devices = [name for name in columns if name.startswith("GPU")]
    rows = {cells[0]: cells[1 : 1 + len(columns)] for text in lines if (cells := text.split()) and "X" in cells}
    if not devices or not all(len(rows.get(name, ())) == len(columns) for name in devices):
        return None
    nvlinks = np.array([[_num_nvlinks(cell) for cell in rows[name][: len(devices)]] for name in devices])
    speeds, ports = _read_status(status)
    cards = [line.split(", ") for line in query.splitlines() if line.count(", ") == 3]
    slots = [
        _PCIE_LANE.get(int(gen), 0.0) * int(width) for _, _, gen, width in cards if gen.isdigit() and width.isdigit()
    ]
    return Wiring(
        nvlinks=nvlinks,
        num_nics=len(columns) - len(devices),
        speed=min(speeds, default=None),
        ports=max(ports, default=None),
        pcie=min((s for s in slots if s), default=None),
        uuids=tuple(card[1].removeprefix("GPU-") for card in cards),
    )


def _num_nvlinks(cell: str) -> int:
    """Return the number of NVLinks that ``cell``, the text of a cell in the table of ``nvidia-smi topo -m``, stands
    for: 12 for ``NV12``; 0 for texts of another form."""
    return int(cell[2:]) if cell.startswith("NV") and cell[2:].isdigit() else 0


def _read_status(text: str) -> tuple[list[float], list[int]]:
    """Return two lists from ``text``, the output of ``nvidia-smi nvlink --status``: the data rate of each active NVLink
    in bytes/s, and the number of active NVLinks of each GPU that has any.

    ``nvidia-smi`` reports the signalling rate (25.781, 26.562 or 53.125 GB/s). The data rate is the next lower multiple
    of 5 GB/s.
    """
    parts = re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:]
    found = [[float(speed) for speed in _SPEED.findall(part)] for part in parts]
    return [5e9 * (speed // 5) for speeds in found for speed in speeds], [len(speeds) for speeds in found if speeds]


_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

_MOST_PORTS = 18  # most NVLinks of a device, in any generation so far


def build_local_topology(num_ranks: int) -> Topology:
    """Return a topology of ``num_ranks`` processes that share this machine's CPU cores and memory evenly. The compute
    rates and bandwidths per core are rough estimates.

    Raise :class:`TopologyError` unless ``num_ranks`` is positive.
    """
    if num_ranks < 1:
        raise TopologyError(f"local topology of {num_ranks} ranks; expected at least 1")
    core: dict[str, Any] = dict(catalogue("devices")["cpu-core"])
    share = num_cores() / num_ranks
    core["memory"] = physical_memory() // num_ranks
    core["memory_bandwidth"] = parse_quantity(core["memory_bandwidth"]) * share
    core["peak"] = {name: parse_quantity(value) * share for name, value in core["peak"].items()}
    for name in ("power_busy", "power_idle"):
        core[name] = parse_quantity(core[name]) * share
    del core["price"]  # the user's own machine has no price
    rate = parse_quantity(catalogue("devices")["cpu-core"]["memory_bandwidth"])
    host = {  # a copy reads and writes the same memory, so it has half of the bandwidth
        "memory": physical_memory(),
        "bandwidth": rate * share / 2,
        "memory_bandwidth": rate * num_cores(),
        "shared": True,
    }
    levels = [{"name": "loopback", **catalogue("links")["loopback"]}] if num_ranks > 1 else []
    return Topology(
        name=f"local:{num_ranks}",
        nodes=({"type": "cpu", "devices": num_ranks, "host": host},),
        types={"cpu": core},
        levels=levels,
    )


def detect_topology() -> Topology:
    """Return a topology of this machine's CUDA devices, repeated for each node of the launcher (torchrun). If there is
    no CUDA device, return a topology of this machine's CPU.

    The environment variables ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are read as torchrun sets them, and all nodes are
    assumed to equal this one. Links inside a node come from ``nvidia-smi`` or, if it is missing, from a machine with
    such devices in the built-in catalogue of hardware. The network between nodes cannot be detected and always comes
    from that machine.

    Raise :class:`TopologyError` if the catalogue does not know a device, if there are more ranks than devices, or if
    the launcher's variables are not numbers.
    """
    world = _from_launcher("WORLD_SIZE", 1)
    import torch  # imported late: it takes seconds, and a topology of local ranks does not need it

    if not torch.cuda.is_available():
        return build_local_topology(world)
    present = torch.cuda.device_count()
    devices = _from_launcher("LOCAL_WORLD_SIZE", present)
    if devices > present:
        raise TopologyError(
            f"{devices} ranks on this node, which has {present} CUDA devices; start at most one rank per device"
        )
    seen = [torch.cuda.get_device_properties(i) for i in range(devices)]
    kinds = [_find_device_kind(each.name) for each in seen]
    nodes = max(1, world // devices)
    return build_machine_topology(
        kinds, [each.total_memory for each in seen], nodes, _select_visible_wiring(detect_wiring(), seen)
    )


def _from_launcher(name: str, otherwise: int) -> int:
    """Return the positive integer in the environment variable ``name``, or ``otherwise`` if the variable is not set.
    Raise :class:`TopologyError` for any other value."""
    given = os.environ.get(name, str(otherwise)).strip()
    if not given.isdecimal() or int(given) < 1:
        raise TopologyError(
            f"the environment has {name}={given!r}; expected a number of ranks from 1 on, as torchrun sets it: "
            "correct or unset it"
        )
    return int(given)


def build_machine_topology(
    kinds: Sequence[str], memories: Sequence[int], nodes: int = 1, wires: Wiring | None = None
) -> Topology:
    """Return a topology of ``nodes`` equal machines. ``kinds``: the device type of each device of one machine, a name
    in the built-in catalogue of hardware. ``memories``: bytes of each of these devices. ``wires``: the links between
    them; ``None``: the links of a machine with such devices in the catalogue."""
    main = Counter(kinds).most_common(1)[0][0]
    fields = _build_machine_fields(main, nodes, len(kinds))
    (group,) = fields["nodes"]
    if wires is not None and len(kinds) > 1:
        fields |= _build_wired_levels(group, main, wires)
    if wires is not None and nodes > 1 and 0 < wires.num_nics < len(kinds):  # devices share network cards
        group["nics"] = wires.num_nics
    slot = wires.pcie if wires is not None and wires.pcie is not None else None
    host = {"bandwidth": "25 GB/s", **_get_host_fields(group.get("host")), "memory": physical_memory(), "disk": 0}
    group["host"] = {**host, "bandwidth": slot} if slot is not None else host
    first = {kind: memories[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
    fields["types"] = {kind: {"like": kind, "memory": memory} for kind, memory in first.items()}
    fields["overrides"] = {
        f"node{node}/{place}": {"type": kind} if kind != main else {"memory": memory}
        for node in range(nodes)
        for place, (kind, memory) in enumerate(zip(kinds, memories, strict=True))
        if kind != main or memory != first[kind]
    }
    names = " and ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())
    return topology_of({"name": f"detected {names}", **fields}, "the machine at hand")


def _build_machine_fields(kind: str, nodes: int, devices: int) -> dict[str, Any]:
    """Return the fields ``nodes`` and ``levels`` of a topology, in the form of a topology file, from the first machine
    in the catalogue that has devices of the type ``kind``. ``nodes``: number of nodes. ``devices``: number of devices
    of each node. If there is no such machine, PCIe inside nodes and Ethernet between nodes are assumed."""
    name = next((name for name, machine in catalogue("machines").items() if machine["type"] == kind), None)
    if name is None:
        levels: list[Any] = [{"like": "pcie4", "nodes": 1}] if devices > 1 else []
        levels += [{"like": "ethernet-10g"}] if nodes > 1 else []
        return {"nodes": [{"type": kind, "devices": devices, "count": nodes}], "levels": levels}
    fields = machine_fields(name, nodes, devices)
    (group,) = fields["nodes"]
    whole = catalogue("machines")[name]["devices"]
    if devices != whole:  # it is unknown which places of the machine the devices have
        if "nics" in group:
            group["nics"] = max(1, group["nics"] * devices // whole)
        pattern = group.get("pattern")
        if pattern and any(link["pairs"] != "all" for link in catalogue("patterns")[pattern]["links"]):
            del group["pattern"]
    return fields


def _build_wired_levels(group: dict[str, Any], kind: str, wires: Wiring) -> dict[str, Any]:
    """Return the fields of a topology that describe the links ``wires`` of its nodes: ``levels``, and ``patterns`` if
    there are direct links between pairs. ``kind``: the device type. ``group``: the fields of the nodes. The key
    ``pattern`` is removed from this dict or, if there are direct links between pairs, set to the name of their pattern.
    """
    fields = _build_machine_fields(kind, group["count"], group["devices"])
    known = next((level for level in fields["levels"] if level.get("nodes") == 1), None)
    beyond = [level for level in fields["levels"] if level.get("nodes") != 1]
    group.pop("pattern", None)
    slot = {} if wires.pcie is None else {"bandwidth": wires.pcie}
    pcie = known if known and known["like"].startswith("pcie") else {"like": "pcie4", "nodes": 1}
    apart = wires.nvlinks[~np.eye(len(wires.nvlinks), dtype=bool)]
    speed = wires.speed or 25e9
    if not apart.any():
        return {"levels": [{**pcie, **slot}, *beyond]}
    if _has_nvlink_switches(wires):
        bandwidth = float(apart[0]) * speed
        if known and abs(parse_quantity(catalogue("links")[known["like"]]["bandwidth"]) - bandwidth) < 0.05 * bandwidth:
            return {"levels": [known, *beyond]}
        base = known["like"] if known and known["like"].startswith("nvlink") else "nvlink3"
        level: dict[str, Any] = {"name": "nvlink", "like": base, "nodes": 1, "bandwidth": bandwidth, "all_reduce": []}
        return {"levels": [level, *beyond]}
    group["pattern"], patterns = _match_link_pattern(wires.nvlinks.astype(np.float64) * speed)
    return {"levels": [{**pcie, **slot}, *beyond], "patterns": patterns}


def _has_nvlink_switches(wires: Wiring) -> bool:
    """Return whether, in ``wires``, all NVLinks of a GPU lead to switches. ``nvidia-smi`` then reports, for each pair
    of GPUs, the number of all NVLinks of one GPU. For two GPUs the result is true, because switches and direct links
    cannot be distinguished and are equally fast.
    """
    apart = wires.nvlinks[~np.eye(len(wires.nvlinks), dtype=bool)]
    count = int(apart[0])
    if len(wires.nvlinks) == 2 or (apart != count).any():
        return len(wires.nvlinks) == 2  # for two devices it makes no difference
    return count == wires.ports if wires.ports is not None else count * (len(wires.nvlinks) - 1) > _MOST_PORTS


def _match_link_pattern(matrix: NDArray[np.float64]) -> tuple[str, dict[str, Any]]:
    """Return two values for a pattern that has the direct links ``matrix``: its name, and a dict name -> fields of the
    pattern. If the built-in catalogue of hardware has such a pattern, the name is the catalogue's and the dict is
    empty. ``matrix``: bytes/s of each pair of devices in a node, shape ``[devices, devices]``, 0 without a direct link.
    """
    for name, entry in catalogue("patterns").items():
        places = [k for link in entry["links"] if link["pairs"] != "all" for pair in link["pairs"] for k in pair]
        if places and max(places) < len(matrix):
            known = pattern_matrix(Pattern(**entry), len(matrix))
            if np.array_equal(known, matrix):
                return name, {}
    links = [
        {"bandwidth": float(rate), "pairs": np.argwhere(np.triu(matrix == rate)).tolist()}
        for rate in sorted(set(matrix[matrix > 0].tolist()), reverse=True)
    ]
    like = {key: value for key, value in catalogue("patterns")["hybrid-cube-mesh"].items() if key != "starts"}
    return "nvlink", {"nvlink": {**like, "links": links}}


def _select_visible_wiring(wires: Wiring | None, seen: Sequence[Any]) -> Wiring | None:
    """Return the part of ``wires`` that belongs to the GPUs that this process sees (``CUDA_VISIBLE_DEVICES``), in their
    order. Return ``None`` if ``wires`` is ``None``, or if it cannot be determined which of its GPUs are visible.
    ``seen``: the properties of these GPUs as PyTorch reports them."""
    if wires is None:
        return None
    uuids = [str(getattr(each, "uuid", "")).removeprefix("GPU-") for each in seen]
    if set(uuids) <= set(wires.uuids) and len(wires.uuids) == len(wires.nvlinks):
        chosen = [wires.uuids.index(uuid) for uuid in uuids]
    elif len(seen) == len(wires.nvlinks):
        chosen = list(range(len(seen)))
    else:
        return None  # it is unknown which of them are visible
    return Wiring(
        wires.nvlinks[np.ix_(chosen, chosen)], wires.num_nics, wires.speed, wires.ports, wires.pcie, tuple(uuids)
    )


def _get_host_fields(name: str | None) -> dict[str, Any]:
    """Return field -> value of the host ``name`` in the catalogue, without the bandwidth of its disks; an empty dict if
    ``name`` is ``None``."""
    return {k: v for k, v in catalogue("hosts")[name].items() if k != "disk_bandwidth"} if name else {}


def _find_device_kind(name: str) -> str:
    """Return the key in the device catalogue of the device that the driver calls ``name``. Raise ``TopologyError``
    if the catalogue has no such device.
    """
    for kind, entry in catalogue("devices").items():
        if name in entry.get("matches", ()):
            return kind
    raise TopologyError(
        f"unknown device {name!r}; describe it in a YAML file, under types: mine: {{like: h100-sxm, ...}}"
    )


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    """Return the bytes of this machine's memory, or the limit of its control group (cgroup) if that is smaller."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _CGROUP_LIMIT.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    return memory
