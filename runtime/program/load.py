"""Read the program of a plan, either from a plan in memory or from a plan's JSON file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from partitioner.passes.allowed_operators import check_node_operators
from partitioner.passes.errors import UntrustedOperatorError
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.files import parse_json
from partitioner.runtime.program.program import Program


def load_program(plan: Any) -> Program:
    """Return the program (what each rank executes) of ``plan``: a :class:`Program` itself, an object with an attribute
    ``program``, or the path of a plan file. Raise :class:`LaunchError` if there is no such program or the file cannot
    be read.
    """
    if isinstance(plan, Program):
        return plan
    if isinstance(getattr(plan, "program", None), Program):
        return plan.program  # type: ignore[no-any-return]
    if isinstance(plan, str | Path):
        return _read_program(Path(plan))
    raise LaunchError(f"expected a plan, a Program or the path of a plan file, got {type(plan).__name__}")


def load_placement(plan: Any) -> tuple[int, ...]:
    """Return, for each rank, the index of the topology's device on which it runs, as recorded in ``plan`` (a plan or
    the path of a plan file). An empty tuple means that rank i runs on device i. Raise :class:`LaunchError` if the file
    cannot be read or its entry is malformed.
    """
    if isinstance(plan, str | Path):
        devices = read_plan_content(Path(plan)).get("devices", [])
        if not isinstance(devices, list) or not all(type(device) is int for device in devices):
            raise LaunchError(f"{plan} has invalid 'devices': expected the index of a device for each rank; plan again")
        return tuple(devices)
    return tuple(getattr(plan, "devices", ()))


def load_execution_mode(plan: Any) -> str | None:
    """Return how ranks execute instructions (``"eager"``, ``"compiled"`` or ``"graph"``), as given in the constraints
    of ``plan`` (a plan or the path of a plan file). Return ``None`` if they do not say it, or if ``plan`` is a program,
    which has no constraints.
    """
    if isinstance(plan, str | Path):
        constraints = read_plan_content(Path(plan)).get("constraints")
        found = constraints.get("execution") if isinstance(constraints, dict) else None
    else:
        found = getattr(getattr(plan, "constraints", None), "execution", None)
    return found if isinstance(found, str) else None


def load_disk_bytes(plan: Any, stage: int) -> int:
    """Return the planner's estimate of the bytes that each rank of a pipeline stage has on disk; 0 without an estimate.
    ``plan``: a plan or the path of a plan file. ``stage``: the stage's index. Raise :class:`LaunchError` if the file
    cannot be read or its estimate is malformed.
    """
    if isinstance(plan, str | Path):
        content = read_plan_content(Path(plan))
        try:
            stages = content.get("estimate", {}).get("stages", ())
            return int(stages[stage].get("disk", 0)) if stages else 0
        except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise LaunchError(f"{plan} has an invalid estimate of stage {stage} ({error}); plan again") from None
    stages = getattr(getattr(plan, "estimate", None), "stages", ())
    return int(stages[stage].disk) if stages else 0


def check_program(program: Program, source: object) -> None:
    """Raise :class:`UntrustedOperatorError` if ``program`` calls an operator that plan files may not name. ``source``:
    the file that the program was read from, for the message.

    Nothing is checked in a process that has not loaded PyTorch, such as one that only reports on a plan: it runs no
    operator, and has no operator schemas. Code that runs a program checks the operators again when it reads the graphs.
    """
    if "torch" not in sys.modules:
        return
    for name, block in program.blocks.items():
        try:
            check_node_operators(block.nodes, name)
        except UntrustedOperatorError as error:
            raise UntrustedOperatorError(f"{source}: {error}") from None


def _read_program(path: Path) -> Program:
    """Return the program in the plan file ``path``. Raise :class:`LaunchError` if the file has no program that this
    version can read, and :class:`UntrustedOperatorError` if the program calls an operator that plan files may not name.
    """
    content = read_plan_content(path)
    try:
        program = Program.model_validate(content["program"])
    except (ValueError, RecursionError, OverflowError) as error:
        raise LaunchError(f"{path} does not contain a program that this version can read: {error}") from None
    check_program(program, path)
    return program


def read_plan_content(path: Path) -> dict[str, Any]:
    """Return the JSON data of the plan file ``path``. Raise :class:`LaunchError` if it cannot be read or has no
    program.
    """
    try:
        content = parse_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the plan {path}: {error}") from None
    except ValueError as error:
        raise LaunchError(f"{path} is not complete JSON ({error}); make the plan again") from None
    if isinstance(content, dict) and content.get("planned_only"):
        what = ", ".join(map(str, content["planned_only"]))
        raise LaunchError(f"{path} has no program: {what} is planned but not executed here; plan without it to run")
    if not isinstance(content, dict) or "program" not in content:
        raise LaunchError(f"{path} is not a plan: it has no 'program'; save one with plan.save(path)")
    return content
