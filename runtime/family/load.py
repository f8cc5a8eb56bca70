"""Read all programs of a plan, in memory or in a plan's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, ProgramFamily
from partitioner.runtime.family.delta import apply_delta, make_delta
from partitioner.runtime.program.load import program_of
from partitioner.runtime.program.program import Program

_FAMILY = ("further", "padding")


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
