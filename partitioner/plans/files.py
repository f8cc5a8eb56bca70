"""Plans on disk: versioned JSON with a checksum, an exact round trip, and one file per rank on request."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.documented_model import strip_fields
from partitioner.passes.errors import PartitionError
from partitioner.plan import Plan
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.load import fold_programs, unfold_programs
from partitioner.runtime.files import parse_json, write_text
from partitioner.runtime.program.load import check_program
from partitioner.runtime.program.program import Program

FORMAT = "partitioner-plan"

RANK_FORMAT = "partitioner-rank"
VERSION = 2
_OLDEST = 1  # oldest version that can be read: its constraints have fields that are now in the execution profile
_MOVED = frozenset(ExecutionProfile.model_fields) - {"name", "expert_tensor"}


class PlanFileError(PartitionError):
    """Error: a file cannot be read as a plan, has an unknown version, or was changed after it was written."""


def save_plan(plan: Plan, path: Path) -> Path:
    """Write ``plan`` as JSON to the file ``path`` and return the path. The file is replaced atomically."""
    content = fold_programs(plan.model_dump(mode="json", exclude_defaults=True, by_alias=True))
    return write_text(path, _wrap_plan_content(FORMAT, content))


def load_plan(path: Path) -> Plan:
    """Return the plan in the file ``path``. Raise :class:`PlanFileError` if the file cannot be read, is incomplete or
    not a plan, has an unknown version, or was changed by hand, and :class:`UntrustedOperatorError` if it names an
    operator that plan files may not name.
    """
    content = _unwrap_plan_file(path, FORMAT)
    try:
        plan = Plan.model_validate(unfold_programs(content))
    except LaunchError as error:
        raise PlanFileError(f"{path}: {error}; make the plan again") from None
    except ValidationError as error:
        raise PlanFileError(
            f"{path} does not describe a plan: {_format_first_error(error)}; make the plan again"
        ) from None
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError, OverflowError) as error:
        raise PlanFileError(f"{path} does not describe a plan: {error}; make the plan again") from None
    for program in (plan.written, *(one.program for one in plan.further.values())):
        if program is not None:
            check_program(program, path)
    return plan


def export_ranks(plan: Plan, folder: Path) -> list[Path]:
    """Write one file for each rank of ``plan`` into ``folder`` (``rank_00000.json`` and so on), and return their paths
    in order of ranks. Each file holds the rank's stage, graphs, shards, groups and instructions.
    """
    width = max(5, len(str(plan.program.world_size - 1)))
    paths = []
    for rank in range(plan.program.world_size):
        content = _rank_content(plan.program, rank)
        paths.append(write_text(folder / f"rank_{rank:0{width}}.json", _wrap_plan_content(RANK_FORMAT, content)))
    return paths


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of a plan file, as a dict of JSON data."""
    made = Plan.model_json_schema()
    for part in made["$defs"].values():
        if "description" in part:
            part["description"] = strip_fields(part["description"])  # fields have descriptions of their own
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Plan file",
        "type": "object",
        "required": ["format", "version", "checksum"],
        "properties": {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "checksum": {"type": "string", "description": "SHA-256 of the other keys as canonical JSON"},
            **made["properties"],
        },
        "$defs": made["$defs"],
    }


def _rank_content(program: Program, rank: int) -> dict[str, Any]:
    """Return the content of the file of ``rank``: its coordinates in the mesh; its groups, as a dict mesh axis ->
    ranks; and the part of ``program`` that the rank uses: graphs of blocks (such as layers), parameters and buffers,
    values, and instructions.
    """
    mine = program.rank(rank)
    index = mine.stage_index
    used = {call.block for call in mine.stage.calls}
    states = {name: s for name, s in program.states.items() if index in s.stages}
    read = {v for c in mine.stage.calls for v in (*c.inputs, *c.outputs)}
    stages = tuple(
        stage.model_copy(
            update={"instructions": mine.instructions}
            if i == index
            else {"calls": (), "instructions": (), "buckets": ()}
        )
        for i, stage in enumerate(program.stages)
    )
    own = program.model_copy(
        update={
            "blocks": {k: b for k, b in program.blocks.items() if k in used},
            "states": states,
            "stages": stages,
            "values": {k: v for k, v in program.values.items() if k in read},
        }
    )
    axes = [a for a, n in program.mesh.items() if n > 1]
    return {
        "rank": rank,
        "coordinates": mine.coordinates,
        "groups": {axis: list(mine.group(axis)) for axis in axes},
        "program": own.model_dump(mode="json", exclude_defaults=True),
    }


def _wrap_plan_content(kind: str, content: dict[str, Any]) -> str:
    return json.dumps(
        {"format": kind, "version": VERSION, "checksum": _compute_checksum(content), **content}, indent=None
    )


def _compute_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unwrap_plan_file(path: Path, kind: str) -> dict[str, Any]:
    """Return the content of the JSON file ``path`` without its format, version and checksum, in the form of the current
    version. ``kind``: the format that the file must have. Raise :class:`PlanFileError` if it cannot be read, has
    another format or version, or does not match its checksum.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanFileError(
            f"cannot read the plan {path}: {reason}; expected a file of `partitioner plan -o`"
        ) from None
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{path} is not complete JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "it may be truncated: make the plan again"
        ) from None
    except ValueError as error:
        raise PlanFileError(f"{path} is not JSON that can be read: {error}; make the plan again") from None
    if not isinstance(content, dict) or content.get("format") != kind:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PlanFileError(
            f"{path} is not a plan file: expected format {kind!r}, got {found!r}; give a file of `partitioner plan -o`"
        )
    if content.get("version") not in range(_OLDEST, VERSION + 1):
        age = "older" if str(content.get("version")) < str(VERSION) else "newer"
        raise PlanFileError(
            f"{path} was written by {age} software: expected version {VERSION}, got {content.get('version')!r}; "
            "make the plan again"
        )
    body = {k: v for k, v in content.items() if k not in ("format", "version", "checksum")}
    if content.get("checksum") != _compute_checksum(body):
        raise PlanFileError(
            f"{path} was changed after it was written (its checksum does not match); make the plan again, "
            "or change its constraints and plan anew"
        )
    return _upgrade_first_version(body) if kind == FORMAT and content["version"] == _OLDEST else body


def _upgrade_first_version(body: dict[str, Any]) -> dict[str, Any]:
    """Convert ``body``, the content of a plan file of version 1, to version 2, and return it. Entries of
    ``body["constraints"]`` that describe the framework that executes the plan (such as its kernels) move to the new
    dict ``body["profile"]``."""
    given = body.get("constraints")
    if not isinstance(given, dict):
        return body
    facts = {name: value for name, value in given.items() if name in _MOVED and value is not None}
    if any(str(what).startswith("etp=") for what in body.get("planned_only", ())):
        facts["expert_tensor"] = "any"
    kept = {name: value for name, value in given.items() if name not in _MOVED}
    profile = {"profile": {"name": "of the constraints", **facts}} if facts else {}
    return {**body, "constraints": kept, **profile}


def _format_first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
