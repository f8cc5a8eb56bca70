"""Read all programs of a plan, in memory or in a plan's file.

A file holds once what its programs have in common: a further program is there as its difference from the one before it.
A difference is ``{"=": value}`` (another value), ``{"keys": {...}, "gone": [...]}`` for dicts, or ``{"items": {...}}``
for lists of one length, whose entries are differences again. ``{}`` is none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, ProgramFamily
from partitioner.runtime.program.load import program_of
from partitioner.runtime.program.program import Program

Delta = dict[str, Any]


def family_of(plan: Any) -> ProgramFamily:
    """All programs of ``plan``: a :class:`Program`, a plan, or the path of a plan file.

    Raises :class:`LaunchError` if there are none, or if the file cannot be read.
    """
    first = program_of(plan)
    if isinstance(plan, Program):
        return ProgramFamily(first, None, {})
    if not isinstance(plan, str | Path):
        return ProgramFamily(first, getattr(plan, "padding", None), getattr(plan, "further", {}))
    content = unfold_programs(json.loads(Path(plan).read_text()))
    try:
        further = {n: FurtherProgram.model_validate(data) for n, data in content.get("further", {}).items()}
        padding = content.get("padding")
        return ProgramFamily(first, None if padding is None else BatchPadding.model_validate(padding), further)
    except ValueError as error:
        raise LaunchError(f"{plan} does not hold programs of this version: {error}") from None


def fold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a plan file in which each further program is its difference from the one before it."""
    if not content.get("further"):
        return content
    before, folded = content["program"], {}
    for name, data in content["further"].items():
        folded[name] = {**data, "program": make_delta(before, data["program"])}
        before = data["program"]
    return {**content, "further": folded}


def unfold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a plan file in which each further program is whole again.

    Raises :class:`LaunchError` for differences from another program.
    """
    if not content.get("further"):
        return content
    before, whole = content["program"], {}
    try:
        for name, data in content["further"].items():
            before = apply_delta(before, data["program"])
            whole[name] = {**data, "program": before}
    except (KeyError, IndexError, TypeError) as error:
        raise LaunchError(f"the further programs of the plan do not follow from its first one ({error})") from None
    return {**content, "further": whole}


def make_delta(base: Any, other: Any) -> Delta:
    """The difference that :func:`apply_delta` adds to ``base`` to get ``other``."""
    if type(base) is type(other):
        if base == other and repr(base) == repr(other):  # 1, 1.0 and True are equal, but other JSON
            return {}
        if isinstance(base, dict):
            changed = {k: make_delta(base[k], v) if k in base else {"=": v} for k, v in other.items()}
            gone = [k for k in base if k not in other]
            delta: Delta = {"keys": {k: d for k, d in changed.items() if d}}
            return delta | ({"gone": gone} if gone else {})
        if isinstance(base, list) and len(base) == len(other):
            items = {str(i): d for i, pair in enumerate(zip(base, other, strict=True)) if (d := make_delta(*pair))}
            return {"items": items} if len(items) <= len(base) / 2 or _is_nested(other) else {"=": other}
    return {"=": other}


def _is_nested(value: list[Any]) -> bool:
    return any(isinstance(entry, dict | list) for entry in value)


def apply_delta(base: Any, delta: Delta) -> Any:
    """``base`` with a difference added.

    Raises ``KeyError``, ``IndexError`` or ``TypeError`` for a difference from another base.
    """
    if "=" in delta:
        return delta["="]
    if "keys" in delta:
        gone, changed = set(delta.get("gone", ())), delta["keys"]
        kept = {k: apply_delta(v, changed[k]) if k in changed else v for k, v in base.items() if k not in gone}
        return kept | {k: d["="] for k, d in changed.items() if k not in base}
    if "items" in delta:
        return [apply_delta(v, delta["items"].get(str(i), {})) for i, v in enumerate(base)]
    return base
