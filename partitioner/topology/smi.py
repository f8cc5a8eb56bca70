"""What ``nvidia-smi`` says of the links between a machine's devices, from its text."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the header of `topo -m` is underlined
_COLUMN = re.compile(r"\b(?:GPU\d+|NIC\d+|mlx\w+|bnxt\w+|hfi\w+)\b")
_SPEED = re.compile(r"Link \d+:\s*([\d.]+)\s*GB/s")
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.98e9, 4: 1.97e9, 5: 3.94e9, 6: 7.9e9}  # bytes/s per lane and direction
QUERY = ("--query-gpu=index,uuid,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")


@dataclass(frozen=True, eq=False)
class Wiring:
    """The devices of one machine, in the order of their names there.

    ``nvlinks``: how many NVLinks join each pair, shape ``[n, n]``; behind switches as many for every pair as a device
    has. ``speed``: bytes/s of one per direction, ``ports``: active ones of a device (``None``: not told). ``num_nics``:
    network cards. ``pcie``: bytes/s of the slowest slot (``None``: not told). ``uuids``: empty where not told.
    """

    nvlinks: NDArray[np.int64]
    num_nics: int = 0
    speed: float | None = None
    ports: int | None = None
    pcie: float | None = None
    uuids: tuple[str, ...] = ()


def wiring() -> Wiring | None:
    """This machine's; ``None`` without the tool, or where its answer makes no sense."""
    matrix = ask("topo", "-m")
    return read_wiring(matrix, ask("nvlink", "--status"), ask(*QUERY)) if matrix else None


def ask(*arguments: str) -> str:
    """What ``nvidia-smi`` answers; nothing where there is no such tool or it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_wiring(matrix: str, status: str = "", query: str = "") -> Wiring | None:
    """From the answers to ``topo -m``, ``nvlink --status`` and ``QUERY``; the latter two may be missing."""
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
    return int(cell[2:]) if cell.startswith("NV") and cell[2:].isdigit() else 0


def _read_status(text: str) -> tuple[list[float], list[int]]:
    """Speeds of all active links in bytes/s, and their number per device.

    Told is the signalling rate (25.781, 26.562, 53.125 GB/s); what carries data is the round figure below it.
    """
    parts = re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:]
    found = [[float(speed) for speed in _SPEED.findall(part)] for part in parts]
    return [5e9 * (speed // 5) for speeds in found for speed in speeds], [len(speeds) for speeds in found if speeds]
