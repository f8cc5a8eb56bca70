"""Complaints about constraints in plain words: which, what it may be, what came, what was meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from partitioner.topology.wording import nearest

_WORDS = {  # pydantic's kind of complaint -> what was expected
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of module paths to stages, like {{'lm_head': -1}}",
    "string_type": "text",
    "less_than_equal": "at most {le}",
    "model_type": "the name of a schedule, a file that ends in .csv, or a ScheduleTable",
}


def explain(error: ValidationError, known: Sequence[str]) -> str:
    """The first of ``error``'s complaints as one sentence; ``known``: the constraints that there are."""
    first = error.errors()[0]
    name, got = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        return f"unknown constraint {name!r}; {nearest(name, known)}expected {', '.join(known)}"
    if len({each["loc"] for each in error.errors() if each["loc"][0] == name}) > 1 and name == "schedule":
        return f"constraint {name}: input should be {_WORDS['model_type']}, got {got!r}"
    place = "".join(f"[{key!r}]" for key in first["loc"][1:] if key != "[key]")
    context = first.get("ctx", {})
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in _WORDS:
        message = f"input should be {_WORDS[first['type']].format_map(context)}"
    return f"constraint {name}{place}: {message}, got {got!r}{_meant(got, context)}"


def _meant(got: Any, context: dict[str, Any]) -> str:
    """What was meant, of the values that there are."""
    values = context.get("values") or str(context.get("expected", "")).replace(" or ", ", ").split(", ")
    meant = nearest(got, [str(value).strip("'") for value in values if value]) if isinstance(got, str) else ""
    return f"; {meant.rstrip()}" if meant else ""
