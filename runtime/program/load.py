"""The program of a plan: of one in memory, or of a plan's JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.program.program import Program


def program_of(plan: Any) -> Program:
    """The program of a plan, of itself, or of a plan file. Raises :class:`LaunchError`."""
    if isinstance(plan, Program):
        return plan
    if isinstance(getattr(plan, "program", None), Program):
        return plan.program  # type: ignore[no-any-return]
    if isinstance(plan, str | Path):
        return _read_program(Path(plan))
    raise LaunchError(f"expected a plan, a Program or the path of a plan file, got {type(plan).__name__}")


def placement_of(plan: Any) -> tuple[int, ...]:
    """The device of each rank that a plan or a plan file gives; empty where ranks are on their namesakes."""
    if isinstance(plan, str | Path):
        return tuple(_read_plan_content(Path(plan)).get("devices", ()))
    return tuple(getattr(plan, "devices", ()))


def disk_of(plan: Any, stage: int) -> int:
    """The bytes on disk of a rank of ``stage`` that a plan or a plan file gives; 0 where it gives none."""
    if isinstance(plan, str | Path):
        stages = _read_plan_content(Path(plan)).get("estimate", {}).get("stages", ())
        return int(stages[stage].get("disk", 0)) if stages else 0
    stages = getattr(getattr(plan, "estimate", None), "stages", ())
    return int(stages[stage].disk) if stages else 0


def _read_program(path: Path) -> Program:
    content = _read_plan_content(path)
    try:
        return Program.model_validate(content["program"])
    except ValueError as error:
        raise LaunchError(f"{path} does not hold a program of this version: {error}") from None


def _read_plan_content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise LaunchError(f"{path} is not complete JSON ({error}); make the plan again") from None
    if isinstance(content, dict) and content.get("planned_only"):
        what = ", ".join(content["planned_only"])
        raise LaunchError(f"{path} has no program: {what} is planned but not executed here; plan without it to run")
    if not isinstance(content, dict) or "program" not in content:
        raise LaunchError(f"{path} is not a plan: it has no 'program'; save one with plan.save(path)")
    return content
