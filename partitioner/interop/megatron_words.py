"""Read command lines of Megatron-LM, and shell scripts that start it. Nothing is executed."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from partitioner.interop.layout import LayoutError, OptionValueError, UnknownOptionError
from partitioner.interop.options import describe_unknown, load_known_options
from partitioner.topology.validate import format_suggestion

_SHORT = {"nproc_per_node": "per_node", "nnodes": "nodes", "num_processes": "all", "ntasks": "all"}
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_DEFAULT = re.compile(r"\$\{(\w+):?-[^{}]*\}")  # use of a variable that the environment may set
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_COMPARISON = re.compile(r"\[+\s*[\"']?([^\"'\s]*)[\"']?\s*(==?|!=)\s*[\"']?([^\"'\s]*)[\"']?\s*\]+")
_EMPTINESS = re.compile(r"\[+\s*-([zn])\s+[\"']?([^\"'\]]*)[\"']?\s*\]+")
_PLACEHOLDER = re.compile(r"<([A-Za-z][\w .,/-]*)>")  # such as <path to the data>
_CALLERS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")  # options that the caller of a script adds
_OVERRIDE = re.compile(r"\+{0,2}(\w+)\.\w+=.*", re.DOTALL)
_MOST_DIGITS = 18
_MOST_PARTS = 41  # numbers and operators of a product
_LONGEST = 200_000  # characters of a script
_ENDS = ("&&", "|", "||", ";", ">", "2>&1", "&", ">>")


def read_words(text: str) -> list[str]:
    """Return the words of a Megatron-LM command. ``text``: the command line, or a shell script that contains it.

    In a script, the command is the line that has options and starts a Python script; variables and arrays are replaced
    by their values. If there is no such line, the words of all lines with options are returned, or else those of all
    arrays with options. Commands and assignments in a branch of a condition count if the condition holds or cannot be
    evaluated. Raise :class:`LayoutError` for an unbalanced quote.
    """
    if len(text) > _LONGEST:
        raise LayoutError(
            f"the text has {len(text)} characters, which is too long; expected a command line or a shell script"
        )
    text = _PLACEHOLDER.sub(lambda found: found[0].replace(" ", "_"), text)
    variables: dict[str, str] = {}
    started: list[str] = []
    options: list[str] = []
    branches: list[list[bool]] = []  # for each open condition: whether its current branch is taken, and whether one was
    for line in _join_lines(text):
        if _follow_condition(line, variables, branches) or not all(taken for taken, _ in branches):
            continue
        found = _ASSIGNMENT.fullmatch(line)
        if found and not re.match(r"[^\s'\"(]*\s+\S", found[3]):
            _assign(found, variables)
            continue
        words = _split(line, variables)
        if any(word.startswith("--") for word in words):
            options += words
            started = words if any(word.endswith(".py") for word in words) else started
    if started or options:
        return started or options
    return [word for value in variables.values() if "--" in value for word in _split(value, variables)]


def _assign(found: re.Match[str], variables: dict[str, str]) -> None:
    """Store the value of a shell assignment in ``variables`` (name -> value). ``found``: a match of the assignment: its
    name, whether it appends, and its value. The words of an array keep their quotes.
    """
    text = found[3].strip()
    if text.startswith("("):
        value = _replace_variables(text.removeprefix("(").removesuffix(")"), variables)
    else:
        value = " ".join(_split(text, variables))
    before = variables.get(found[1], "") if found[2] else ""
    variables[found[1]] = f"{before} {value}".strip()[:_LONGEST]


def _follow_condition(line: str, variables: dict[str, str], branches: list[list[bool]]) -> bool:
    """Update ``branches`` by ``line``, a line of a shell script, and return whether the line itself should be skipped,
    because it is a keyword of a condition (from ``if`` to ``fi``) or only prints or exits.

    ``variables``: name -> value of the shell variables. ``branches``: for each open condition, the innermost last, two
    flags: whether its current branch is taken, and whether one of its branches has been taken.
    """
    word = line.split(None, 1)[0].rstrip(";")
    if word == "if":
        holds = _holds(line, variables)
        branches.append([holds, holds])
    elif word == "elif" and branches:
        holds = not branches[-1][1] and _holds(line, variables)
        branches[-1] = [holds, holds or branches[-1][1]]
    elif word == "else" and branches:
        branches[-1] = [not branches[-1][1], True]
    elif word == "fi" and branches:
        branches.pop()
    return word in ("if", "elif", "else", "fi", "then", "echo", "exit")


def _holds(line: str, variables: dict[str, str]) -> bool:
    """Return whether the shell condition in ``line`` holds. A test that a file or folder exists is taken as false, any
    other condition that cannot be evaluated as true. ``variables``: variable name -> value.
    """
    text = _replace_variables(line, variables)
    if found := _COMPARISON.search(text):
        return (found[1] == found[3]) != (found[2] == "!=")
    if found := _EMPTINESS.search(text):
        return (not found[2].strip()) == (found[1] == "z")
    return " -f " not in text and " -d " not in text


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines of the shell script ``text`` without comments; lines that a backslash or an open parenthesis
    continues are joined.
    """
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    open_line = ""
    for line in text.splitlines():
        joined = f"{open_line} {line.strip()}" if open_line else line.strip()
        if re.match(r"(?:export\s+)?\w+\+?=\(", joined) and joined.count("(") > joined.count(")"):
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


def _split(line: str, variables: dict[str, str]) -> list[str]:
    """Return the words of ``line``, a shell command, with variables replaced by their values. A variable that is not in
    ``variables`` (name -> value) and has no default stays as it is.
    """
    line = _replace_variables(line, variables)
    try:
        parts = shlex.split(line)
        return [
            word
            for part in parts
            for word in (shlex.split(part) if " --" in part or (part.startswith("--") and " " in part) else [part])
        ]
    except ValueError as error:
        raise LayoutError(f"the command is malformed ({error}): {line[:80]!r}; expected balanced quotes") from None


def _replace_variables(line: str, variables: dict[str, str]) -> str:
    """Return ``line`` with variables and products of numbers replaced by their values. ``variables``: variable name ->
    value. Once the values exceed the greatest length of a script, further variables are left as they are.
    """
    room = _LONGEST

    def fill_in(match: re.Match[str]) -> str:
        nonlocal room
        value = _replace(match, variables)
        room -= len(value)
        return value if room >= 0 else match[0]

    for _ in range(3):  # a value may name another variable
        replaced = _VARIABLE.sub(fill_in, line)
        if replaced == line or room < 0:
            break
        line = replaced

    def compute(match: re.Match[str]) -> str:
        text = _NAME.sub(lambda name: variables.get(name[0], name[0]), match[1])  # names need no $ in arithmetic
        return _compute(text) or match[0]

    return _ARITHMETIC.sub(compute, line)


def _replace(match: re.Match[str], variables: dict[str, str]) -> str:
    name = match[1] or match[3]
    if name in variables:
        return variables[name]
    return match[2] if match[2] is not None else match[0]


def _compute(text: str) -> str:
    """Return the value of ``text``, a product or quotient of whole numbers such as ``8 * 4``, as text; an empty text
    for anything else.
    """
    parts = re.findall(r"\d+|[*/]", text)
    if "".join(parts) != re.sub(r"\s", "", text) or not parts or not parts[0].isdigit() or len(parts) > _MOST_PARTS:
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


def parse_arguments(words: list[str], ignore: Collection[str] = ()) -> tuple[dict[str, Any], int | None]:
    """Return the options of a Megatron-LM command line (name -> value), and the number of devices that its launcher
    starts; ``None`` if it does not say it. ``words``: the command line's words; those before the Python script belong
    to the launcher. ``ignore``: names of options that the training script itself defines; they are not reported as
    unknown.

    Raise :class:`UnknownOptionError` for an unknown option, and :class:`OptionValueError` for a missing value.
    """
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), None)
    if start is None:  # words of a launcher or of a shell come before the first option
        start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    rest = words[start:]
    end = next((i for i, word in enumerate(rest) if word in _ENDS), len(rest))
    kinds = {name: kind for kind, names in load_known_options()["megatron"].items() for name in names}
    kinds |= {name.lstrip("-").replace("_", "-"): "list" for name in ignore}
    given: dict[str, Any] = {}
    unknown: list[str] = []
    index = 0
    while index < end:
        word = rest[index]
        index += 1
        if _CALLERS.fullmatch(word):
            given[word] = True
            continue
        if not word.startswith("--"):
            raise _describe_stray(word, words)
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in kinds:
            unknown.append(name)
        last = next((i for i in range(index, end) if rest[i].startswith("--")), end)
        values = [value] if equals else rest[index:last]
        kind = kinds.get(name, "unknown")
        taken = _count_values(kind, values)
        given[name] = _read_value(name, kind, values[:taken])
        index += 0 if equals else taken
    if unknown and (overrides := _list_overrides(rest)):
        raise _describe_stray(overrides[0], overrides)
    if unknown:
        unknown = list(dict.fromkeys(unknown))
        meant = format_suggestion(unknown[0], sorted(kinds))
        raise UnknownOptionError(
            f"unknown option --{unknown[0]} of Megatron-LM; {meant}expected one of its arguments: "
            + describe_unknown(unknown, "--{}".format)
        )
    return given, _count_devices(words[:start])


def depends_on_environment(text: str) -> bool:
    """Return whether the number of devices that the launcher in ``text``, a shell script, starts depends on a variable
    that the environment may set, such as ``${SLURM_NNODES:-1}``, and no option of the training script depends on it.
    """
    words = read_words(_DEFAULT.sub(r"${\1}", text))
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), 0)
    if _count_devices(words[:start]) is not None:
        return False
    names = {match[1] or match[3] for word in words[:start] for match in _VARIABLE.finditer(word)}
    return not any(name in word for word in words[start:] for name in (*names, "$(("))


def _list_overrides(words: list[str]) -> list[str]:
    """Return those of ``words`` that change a recipe of Megatron-Bridge, such as ``train.train_iters=10``."""
    sections = load_known_options()["megatron-bridge"]
    return [word for word in words if (found := _OVERRIDE.fullmatch(word)) and found[1] in sections]


def _describe_stray(word: str, words: list[str]) -> LayoutError:
    """Return the error that says that ``word``, one of ``words`` of a command line, belongs to no option."""
    if overrides := _list_overrides(words):
        return OptionValueError(
            f"{overrides[0]!r} changes a recipe of Megatron-Bridge, whose other values are not in the script; expected "
            "the whole configuration: write it to a YAML file with ConfigContainer.to_yaml()"
        )
    if _VARIABLE.fullmatch(word):
        return OptionValueError(
            f"{word!r} is not set in the script; expected its value: set the variable there, or write the options out"
        )
    return OptionValueError(
        f"{word!r} follows no option that takes a value; expected --name value: correct the command line"
    )


def list_option_words(nested: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of the command line that a YAML file writes as a mapping, with keys such as
    ``--micro-batch-size``, and the names of all other entries of the file. No words if there is no such key.

    ``nested``: the content of the file. Its options are at the top, or in sections that have nothing else. A value of
    ``true`` is a flag, and one of ``false`` or nothing leaves the option out.
    """
    words: list[str] = []
    others: list[str] = []
    for name, value in nested.items():
        section = value if isinstance(value, Mapping) else {name: value}
        if not section or not all(str(key).startswith("--") for key in section):
            others.append(str(name))
            continue
        for key, given in section.items():
            values = given if isinstance(given, list) else [given]
            if given is not None and given is not False:
                words += [str(key), *(str(each) for each in values if each is not True)]
    return words, others


def _count_values(kind: str, values: list[str]) -> int:
    """Return how many of ``values``, the words after an option, belong to the option. ``kind``: ``list`` for any
    number, ``flag`` for an optional ``true`` or ``false``, ``unknown`` for all words that follow, otherwise one value.
    """
    values = list(itertools.takewhile(lambda word: not _CALLERS.fullmatch(word), values))
    if kind in ("list", "unknown"):
        return len(values)
    if kind == "flag":
        return int(bool(values) and values[0].lower() in ("true", "false"))
    return min(1, len(values))


def _read_value(name: str, kind: str, values: list[str]) -> Any:
    if kind == "flag":
        return values[0].lower() == "true" if values else True
    if not values and kind not in ("list", "unknown"):
        raise OptionValueError(f"--{name} has no value; expected one after it: give it, or leave the option out")
    return values if kind in ("list", "unknown") else values[0]


def _count_devices(words: list[str]) -> int | None:
    """Return the number of processes that a launcher such as torchrun starts on all nodes; ``None`` if ``words``, its
    command line, does not say it.
    """
    found: dict[str, int] = {}
    for index, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        value = value if equals else (words[index + 1] if index + 1 < len(words) else "")
        key = _SHORT.get(name.replace("-", "_"))
        if not word.startswith("-") or not key:
            continue
        if not value.isdecimal() or len(value) >= 8 or not int(value):
            return None  # a variable of the environment, or "auto"
        found[key] = int(value)
    if "all" in found:
        return found["all"]
    return found["per_node"] * found.get("nodes", 1) if "per_node" in found else None
