"""Read command lines of Megatron-LM, and shell scripts that start it. Nothing is executed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from partitioner.interop.layout import LayoutError, OptionValueError, UnknownOptionError
from partitioner.interop.options import describe_unknown, load_known_options
from partitioner.interop.shell_script import ShellScript, describe_output
from partitioner.topology.validate import format_suggestion

_SHORT = {"nproc_per_node": "per_node", "nnodes": "nodes", "num_processes": "all", "ntasks": "all"}
_VARIABLE = re.compile(r"\$\{(\w+)[^{}]*\}|\$(\w+)")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=][^{}]*\}")  # use of a variable that the environment may set
_PLACEHOLDER = re.compile(r"<([A-Za-z][\w .,/-]*)>")  # such as <path to the data>
_CALLERS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")  # options that the caller of a script adds
_OVERRIDE = re.compile(r"\+{0,2}(\w+)\.\w+=.*", re.DOTALL)
_LAUNCHER = re.compile(r"torch\.distributed\.|accelerate\.|deepspeed\.launcher|pip\b|-|\$")
_LIST = re.compile(r"\[\s*([A-Za-z_][\w\s]*)\]")
_ENDS = ("&&", "|", "||", ";", ">", "2>&1", "&", ">>")


@dataclass(frozen=True)
class CommandLine:
    """A Megatron-LM command. ``words``: its words. ``doubts``: assumption by uncertainty: the keys are conditions or
    files of the shell script whose value is unknown without running the script and on which the words depend; the
    values are what is assumed about them. ``text``: the script or command line from which the words are taken."""

    words: list[str]
    doubts: dict[str, str]
    text: str = ""

    def explain_value(self, value: str) -> str:
        """Return a text for an error message on ``value``, a word of the command: the word, the reason why its value is
        not known without running the script, and what to do. The text is empty if the value is known."""
        if told := describe_output(value, self.text):
            return told
        if found := _VARIABLE.fullmatch(value):
            return (
                f"{value!r}, which is not set in the script; set the variable {found[1] or found[2]} there, or write "
                "its value out"
            )
        if value.startswith("$(("):
            return f"{value!r}, in which a variable is not set in the script; set it there, or write its value out"
        return ""


def read_words(text: str) -> CommandLine:
    """Return the words of a Megatron-LM command. ``text``: the command line, or a shell script that contains it.

    In a script, the command is the last one that has options and starts a Python script or module. If there is no such
    command, the words of all commands with options are returned, or else the words of all variables and arrays with
    options. Raise :class:`LayoutError` for an unbalanced quote.
    """
    script = ShellScript(_PLACEHOLDER.sub(lambda found: found[0].replace(" ", "_"), text))
    with_options = [words for words in script.commands if any(word.startswith("--") for word in words)]
    started = [words for words in with_options if _find_arguments(words) is not None]
    words = started[-1] if started else [word for words in with_options for word in words]
    if not words:
        words = [word for value in script.variables.values() if "--" in value for word in script.split(value)]
    return CommandLine(words, script.doubts, text)


def parse_arguments(line: CommandLine, ignore: Collection[str] = ()) -> tuple[dict[str, Any], int | None]:
    """Return the options of a Megatron-LM command line as a dict (name -> value), and the number of devices that its
    launcher starts (``None`` if the command line does not say it). ``line``: the command line; words before the Python
    script belong to the launcher. ``ignore``: names of options that the training script itself defines; they are not
    reported as unknown.

    Raise :class:`UnknownOptionError` for an unknown option, and :class:`OptionValueError` for a missing value.
    """
    words = line.words
    start = _find_arguments(words)
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
            raise _describe_stray(word, line)
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
        raise _describe_stray(overrides[0], CommandLine(overrides, {}))
    if unknown:
        unknown = list(dict.fromkeys(unknown))
        meant = format_suggestion(unknown[0], sorted(kinds))
        raise UnknownOptionError(
            f"unknown option --{unknown[0]} of Megatron-LM; {meant}expected one of its arguments: "
            + describe_unknown(unknown, "--{}".format)
        )
    return given, _count_devices(words[:start])


def _find_arguments(words: list[str]) -> int | None:
    """Return the index of the first word after the Python script, or after the module (``-m tools.train``), that the
    command ``words`` starts; ``None`` if it starts none. Modules that are launchers do not count."""
    scripts = [i + 1 for i, word in enumerate(words) if word.endswith(".py")]
    modules = [i + 1 for i in range(1, len(words)) if words[i - 1] == "-m" and not _LAUNCHER.match(words[i])]
    return next(iter(scripts or modules), None)


def depends_on_environment(text: str) -> bool:
    """Return whether the environment can change the number of devices that the shell script ``text`` starts, while the
    options of the training script stay the same. That is so if the number of devices depends on a variable such as
    ``${SLURM_NNODES:-1}``, and no option depends on it.
    """
    words = read_words(_DEFAULT.sub(r"${\1}", text)).words
    start = _find_arguments(words) or 0
    if _count_devices(words[:start]) is not None:
        return False
    names = {match[1] or match[2] for word in words[:start] for match in _VARIABLE.finditer(word)}
    return not any(name in word for word in words[start:] for name in (*names, "$(("))


def _list_overrides(words: list[str]) -> list[str]:
    """Return the arguments in ``words`` that change a recipe of Megatron-Bridge, such as ``train.train_iters=10``."""
    sections = load_known_options()["megatron-bridge"]
    return [word for word in words if (found := _OVERRIDE.fullmatch(word)) and found[1] in sections]


def _describe_stray(word: str, line: CommandLine) -> LayoutError:
    """Return the error that says that ``word`` of the command line ``line`` does not belong to an option."""
    if overrides := _list_overrides(line.words):
        return OptionValueError(
            f"{overrides[0]!r} changes a recipe of Megatron-Bridge, whose other values are not in the script; expected "
            "the whole configuration: write it to a YAML file with ConfigContainer.to_yaml()"
        )
    if told := line.explain_value(word):
        return OptionValueError(f"expected options of Megatron-LM, got {told}")
    return OptionValueError(
        f"{word!r} follows no option that takes a value; expected --name value: correct the command line"
    )


def list_option_words(nested: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return two lists for ``nested``, the content of a YAML file: the command line that its options amount to, as
    words, and the names of all other entries.

    Options are keys that start with ``--``, such as ``--micro-batch-size``. They are at the top of the file, or in
    sections that contain nothing else. An option with the value ``true`` becomes a flag; one with ``false`` or no value
    is left out. The text ``[a b]`` is two words.
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
                words += [str(key), *(word for each in values if each is not True for word in _split_list(str(each)))]
    return words, others


def _split_list(text: str) -> list[str]:
    found = _LIST.fullmatch(text)
    return [text] if found is None else found[1].split()


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
