"""Complaints about a topology in plain words: what, where, what came, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_WORDS = {  # pydantic's kind of complaint -> what was expected
    "tuple_type": "expected a list, like [a, b]",
    "dict_type": "expected a mapping, like {{name: value}}",
    "model_type": "expected a mapping, like {{name: value}}",
    "string_type": "expected text",
    "float_type": "expected a number, with a unit where it has one",
    "float_parsing": "expected a number, with a unit where it has one",
    "finite_number": "expected a finite number",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "missing": "missing; give it",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "greater_than": "expected greater than {gt:g}",
    "greater_than_equal": "expected greater than or equal to {ge:g}",
    "less_than_equal": "expected at most {le:g}",
}
_SAID = ("value_error", "missing", "extra_forbidden")  # whose message says what came
_MARKS = ("[key]",)  # what pydantic puts among the keys


def explain(
    error: ValidationError,
    model: type[BaseModel],
    what: str,
    line_of: Callable[[Sequence[int | str]], int | None] | None = None,
) -> str:
    """The first of ``error``'s complaints about a ``model`` as one sentence; ``line_of`` maps a path of keys to a line
    of a file."""
    every = error.errors()
    # what is inside tells more than that nothing is left of the whole, what was given more than what was not
    first = min(every, key=lambda each: (_has_inside(each["loc"], every), each["type"] == "missing"))
    context: Mapping[str, Any] = first.get("ctx", {})
    place: Sequence[int | str] = getattr(context.get("error"), "path", None) or first["loc"]
    place = [key for key in place if key not in _MARKS]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in _WORDS:
        message = _WORDS[first["type"]].format_map(context)
    if first["type"] == "extra_forbidden":
        message = _unknown_key(str(place[-1]), _fields(model, place[:-1]))
    line = line_of(place) if line_of is not None else None
    got = "" if first["type"] in _SAID else f" (got {first['input']!r})"
    path, where = ".".join(str(key) for key in place), f", line {line}" if line else ""
    return f"{what}{where}: {path + ': ' if path else ''}{message}{got}"


def _has_inside(place: Sequence[int | str], every: Iterable[ErrorDetails]) -> bool:
    """Whether one of ``every`` complaint is about what is inside of ``place``."""
    return any(len(each["loc"]) > len(place) > 0 and each["loc"][: len(place)] == place for each in every)


def nearest(name: str, known: Sequence[str]) -> str:
    """``did you mean ..?``, where some of ``known`` is like ``name``; else nothing."""
    name = name.lower()
    near = [each for each in known if name and name in each] or get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _unknown_key(key: str, known: Sequence[str]) -> str:
    return f"unknown key; {nearest(key, known)}expected {', '.join(known)}" if known else "unknown key; leave it out"


def _fields(model: Any, place: Sequence[int | str]) -> list[str]:
    """The keys that what stands at ``place`` of a ``model`` may have; none where it is no mapping of known keys."""
    for key in place:
        known = model.model_fields if _is_model(model) else {}
        if known and key not in known:
            return []
        inner = known[str(key)].annotation if known else (get_args(model) or [None])
        model = inner if known else [part for part in inner if part is not ...][-1]
        options = [part for part in get_args(model) if part is not NoneType]
        model = options[0] if NoneType in get_args(model) and options else model
    return list(model.model_fields) if _is_model(model) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
