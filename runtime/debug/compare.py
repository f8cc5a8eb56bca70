"""Two runs, operator by operator: the first that gave other bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from runtime.errors import LaunchError


@dataclass(frozen=True)
class Difference:
    """Where two runs part. ``own``: the operator was given the same bits and made others; otherwise it was given others
    already, by a collective, a transfer, or from outside of the step."""

    rank: int
    step: int
    index: int
    instruction: str
    operator: str
    call: str
    node: str
    path: str
    source: str
    own: bool
    instead: str = ""  # of which operator it runs this one, in the other run

    def __str__(self) -> str:
        where = [f"rank {self.rank}", f"step {self.step}", f"instruction {self.index}: {self.instruction}"]
        where += [f"call {self.call}"] * bool(self.call) + [f"node {self.node}"] * bool(self.node)
        where += [f"module {self.path}"] * bool(self.path and self.path != self.call)
        where += [self.source] * bool(self.source)
        how = "gives other bits for the same operands" if self.own else "is given other bits"
        if self.instead:
            how = f"is run instead of {self.instead}"
        return f"{', '.join(where)}: {self.operator} {how}"


def compare_runs(one: str | Path, other: str | Path) -> Difference | None:
    """The first difference between the runs that wrote the folders ``one`` and ``other``; ``None`` where all bits are
    the same. Of several ranks, the one that made its difference itself comes first, then the earliest.

    Raises :class:`LaunchError` where a folder holds no hashes, or the runs are of other plans.
    """
    files = [{p.name: p for p in Path(folder).glob("rank-*.hashes")} for folder in (one, other)]
    for folder, found in zip((one, other), files, strict=True):
        if not found:
            raise LaunchError(f"{folder} holds no hashes; write them with runtime.debug.record_hashes(engine, folder)")
    if files[0].keys() != files[1].keys():
        raise LaunchError(f"{one} has {len(files[0])} ranks, {other} has {len(files[1])}: compare runs of one plan")
    found_ = [_first(int(n.split("-")[1].split(".")[0]), p, files[1][n]) for n, p in sorted(files[0].items())]
    differences = [d for d in found_ if d is not None]
    return min(differences, key=lambda d: (d.step, not d.own, d.index, d.rank), default=None)


def _first(rank: int, one: Path, other: Path) -> Difference | None:
    with one.open() as first, other.open() as second:
        for a, b in zip_longest(first, second):
            if a == b:
                continue
            if a is None or b is None:
                raise LaunchError(f"{one if a is None else other} ends early: compare runs of as many steps")
            mine, yours = json.loads(a), json.loads(b)
            return _difference(rank, mine, yours)
    return None


def _difference(rank: int, mine: dict[str, Any], yours: dict[str, Any]) -> Difference:
    names = ("step", "index", "instruction", "operator", "call", "node", "path", "source")
    same = all(mine[n] == yours[n] for n in ("step", "index", "operator"))
    own = not same or mine["in"] == yours["in"]
    instead = "" if same else mine["operator"]
    return Difference(rank=rank, own=own, instead=instead, **{n: yours[n] for n in names})
