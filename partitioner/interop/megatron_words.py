"""Read command lines of Megatron-LM, and shell scripts that start it. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from partitioner.interop.layout import LayoutError, OptionValueError, UnknownOptionError
from partitioner.interop.options import load_known_options
from partitioner.topology.validate import format_suggestion

_SHORT = {"nproc_per_node": "per_node", "nnodes": "nodes", "num_processes": "all", "n": "all", "ntasks": "all"}
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_MOST_DIGITS = 18
_LONGEST = 200_000  # characters of a script


def read_words(text: str) -> list[str]:
    """Return the words of a command line. Of a shell script, return the words of all lines that give options, with its
    variables and arrays replaced.

    Raise :class:`LayoutError` for an unbalanced quote.
    """
    if len(text) > _LONGEST:
        raise LayoutError(f"the command has {len(text)} characters; expected a command line or a shell script")
    lines = [*_join_lines(text)]
    variables: dict[str, list[str]] = {}
    words: list[str] = []
    for line in lines:
        found = _ASSIGNMENT.fullmatch(line)
        if found and not re.match(r"[^\s'\"(]*\s+\S", found[3]):
            value = _split(found[3].strip().removeprefix("(").removesuffix(")"), variables)
            variables[found[1]] = [*variables.get(found[1], []), *value] if found[2] else value
        else:
            words += _split(line, variables)
    if not any(word.startswith("--") for word in words):  # the launching line is not there: options are in arrays
        words = [word for value in variables.values() if any(w.startswith("--") for w in value) for word in value]
    return words


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script without comments; lines that a backslash or an open parenthesis continues are
    joined.
    """
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    open_line = ""
    for line in text.splitlines():
        joined = f"{open_line} {line.strip()}" if open_line else line.strip()
        if re.match(r"(?:export\s+)?\w+\+?=\(", joined) and not joined.endswith(")"):
            open_line = joined
            continue
        if _has_open_quote(joined):
            open_line = joined
            continue
        open_line = ""
        if joined:
            yield joined
    if open_line:
        yield open_line


def _has_open_quote(line: str) -> bool:
    return line.count('"') % 2 == 1 or line.count("'") % 2 == 1


def _split(line: str, variables: dict[str, list[str]]) -> list[str]:
    """Return the words of a line, with variables replaced by their values. A variable of unknown value stays as it
    is.
    """
    for _ in range(3):  # a value may name another variable
        replaced = _VARIABLE.sub(lambda match: _replace(match, variables), line)
        if replaced == line or len(replaced) > _LONGEST:
            break
        line = replaced
    line = _ARITHMETIC.sub(lambda match: _compute(match[1]) or match[0], line)
    try:
        parts = shlex.split(line)
    except ValueError as error:
        raise LayoutError(f"the command is malformed ({error}): {line[:80]!r}; expected balanced quotes") from None
    return [word for part in parts for word in (part.split() if part.lstrip().startswith("--") else [part])]


def _replace(match: re.Match[str], variables: dict[str, list[str]]) -> str:
    name = match[1] or match[3]
    if name in variables:
        return " ".join(variables[name])
    return match[2] if match[2] is not None else match[0]


def _compute(text: str) -> str:
    """Return the value of products and quotients of whole numbers as text; ``""`` for anything else."""
    parts = re.findall(r"\d+|[*/]", text)
    if "".join(parts) != re.sub(r"\s", "", text) or not parts or not parts[0].isdigit():
        return ""
    value, operator = int(parts[0][:_MOST_DIGITS]), ""
    for part in parts[1:]:
        if part in "*/":
            operator = part
        elif operator == "*":
            value *= int(part[:_MOST_DIGITS])
        elif operator == "/" and int(part[:_MOST_DIGITS]):
            value //= int(part[:_MOST_DIGITS])
        else:
            return ""
    return str(value)


def parse_arguments(words: list[str]) -> tuple[dict[str, Any], int | None]:
    """Return the options of a Megatron-LM command line by name, and the number of devices if its launcher has it.

    Words before the script that is started belong to the launcher. Raise :class:`UnknownOptionError` for an unknown
    option, and :class:`OptionValueError` for a missing value.
    """
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), 0)
    devices = _count_devices(words[:start])
    kinds = {name: kind for kind, names in load_known_options()["megatron"].items() for name in names}
    given: dict[str, Any] = {}
    rest = words[start:]
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        if not word.startswith("--"):
            if word in ("&&", "|", "||", ";", ">", "2>&1", "&"):
                break
            if not start:  # words of a launcher or of a shell, before the first option
                continue
            raise OptionValueError(
                f"{word!r} follows no option that takes a value; expected --name value: correct the command line"
            )
        start = start or 1
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in kinds:
            meant = format_suggestion(name, sorted(kinds))
            raise UnknownOptionError(
                f"unknown option --{name} of Megatron-LM; {meant}expected one of its arguments: correct the name, or "
                "leave it out"
            )
        if equals:
            given[name] = value.split() if kinds[name] == "list" else value
            continue
        values: list[str] = []
        while index < len(rest) and not rest[index].startswith("--") and not _ends_command(rest[index]):
            values.append(rest[index])
            index += 1
            if kinds[name] not in ("list",):
                break
        given[name] = _read_value(name, kinds[name], values)
        if kinds[name] == "flag" and values:
            index -= len(values)
            if values[0].lower() in ("true", "false"):
                given[name] = values[0].lower() == "true"
                index += 1
    return given, devices


def _ends_command(word: str) -> bool:
    return word in ("&&", "|", "||", ";", ">", "2>&1", "&")


def _read_value(name: str, kind: str, values: list[str]) -> Any:
    if kind == "flag":
        return True
    if not values and kind != "list":
        raise OptionValueError(f"--{name} has no value; expected one after it: give it, or leave the option out")
    return values if kind == "list" else values[0]


def _count_devices(words: list[str]) -> int | None:
    """Return the number of processes that a launcher starts; ``None`` if its words do not say it."""
    found: dict[str, int] = {}
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        value = value if equals else (words[index + 1] if index + 1 < len(words) else "")
        key = _SHORT.get(name.replace("-", "_"))
        if word.startswith("-") and key and value.isdecimal() and len(value) < 8 and int(value):
            found[key] = int(value)
    if "all" in found:
        return found["all"]
    return found["per_node"] * found.get("nodes", 1) if "per_node" in found else None
