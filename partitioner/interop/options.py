"""Typed access to the options of a configuration, which remembers the ones that were read."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from partitioner.interop.layout import LayoutError, OptionValueError, UnknownOptionError, UnusedOption
from partitioner.topology.validate import find_alias_problem, format_suggestion

NO_EFFECT = "has no effect on the time or memory of a planned step"
OF_MODEL = "describes the model, which is given by itself"
NOT_USED = "is not part of the prediction, and may change time or memory"
_SHOWN = 60  # characters of a value in an error message
_MOST_LISTED = 30  # unknown options in an error message
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
_LARGEST = 16 << 20  # bytes of a configuration file
_QUOTED = r'("(?:[^"\\\n]|\\.)*")'
_COMMENT = re.compile(_QUOTED + r"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_QUOTED + r"|,(?=\s*[}\]])")
_DEEPEST = 100  # levels of nested sections


@cache
def load_known_options() -> dict[str, dict[str, list[str]]]:
    """Return the names of all options of the supported frameworks: format -> section -> option names. For ``megatron``,
    which has no sections, the middle key is the kind of value that the options take, such as ``flag`` or ``list``.
    """
    text = resources.files("partitioner.interop").joinpath("data/options.yaml").read_text()
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(text)
    return found


def list_known_names(format_name: str) -> frozenset[str]:
    """Return the names of all options of the format ``format_name``, such as ``deepspeed``. Options in sections are
    written ``section.name``.
    """
    sections = load_known_options()[format_name]
    return frozenset(f"{section}.{name}" if section else name for section, names in sections.items() for name in names)


@cache
def _load_kinds() -> dict[str, frozenset[str]]:
    """Return the table that classifies options of other frameworks that this project does not read: kind of option ->
    words that occur in names of such options. The kinds are ``certain`` and ``harmless`` (no effect on time or memory;
    ``certain`` is tested first), ``performance``, and ``model`` (describes the model)."""
    text = resources.files("partitioner.interop").joinpath("data/option_kinds.yaml").read_text()
    found: dict[str, list[str]] = yaml.safe_load(text)
    return {kind: frozenset(words) for kind, words in found.items()}


def explain_unused(option: str) -> str:
    """Return a clause for the user that says why an option of another framework does not change the predicted time and
    memory. ``option``: name of an option that this project does not read, such as ``--lr`` or ``training.steps``.

    The words of the name decide (``data/option_kinds.yaml``). If the name has none of the listed words, the clause says
    that the option may change time or memory.
    """
    words = re.findall(r"[a-z0-9]+", option.lower())
    pairs = {f"{first}_{second}" for first, second in itertools.pairwise(words)}
    given = {*words, *pairs}
    kinds = _load_kinds()
    if given & kinds["certain"]:
        return NO_EFFECT
    if given & kinds["performance"]:
        return NOT_USED
    if given & kinds["model"]:
        return OF_MODEL
    return NO_EFFECT if given & kinds["harmless"] else NOT_USED


def read_text_file(path: Path) -> str:
    """Return the text of ``path``. Raise :class:`LayoutError` if it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise LayoutError(f"{path} is no regular file; expected a text file in UTF-8")
        if path.exists() and path.stat().st_size > _LARGEST:
            raise LayoutError(f"{path} has more than {_LARGEST >> 20} MiB; expected a configuration")
        return path.read_text(encoding="utf-8")
    except LayoutError:
        raise
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise LayoutError(f"cannot read {path}: {error}; expected a text file in UTF-8") from None


def parse_mapping(text: str, kind: str, where: str) -> dict[str, Any]:
    """Return the mapping that ``text`` describes. ``kind``: its syntax, ``json``, ``json with comments``, ``toml`` or
    ``yaml``. In ``json with comments``, comments are written as in Hjson, and commas may end a list. ``where``: the
    name of the source, for error messages.

    Raise :class:`LayoutError` for malformed text, or if its content is not a mapping.
    """
    try:
        if kind == "toml":
            found: Any = tomllib.loads(text)
        elif kind == "yaml":
            if problem := find_alias_problem(yaml.compose(text, Loader=yaml.SafeLoader)):
                raise LayoutError(f"{where}, {problem}")
            found = yaml.safe_load(text)
        else:
            text = _strip_comments(text) if kind == "json with comments" else text
            found = json.loads(text, object_pairs_hook=lambda pairs: _build_unique_mapping(pairs, where))
    except LayoutError:
        raise
    except (ValueError, yaml.YAMLError, RecursionError, TypeError, AttributeError) as error:
        first = " ".join(str(error).split())[:200]
        raise LayoutError(f"{where} is not {kind.upper()}: {first}; correct the file") from None
    if not isinstance(found, dict):
        raise LayoutError(f"{where} has {type(found).__name__}; expected a mapping of options to values")
    return found


def _strip_comments(text: str) -> str:
    """Return the JSON ``text`` without comments (``#``, ``//`` and ``/* */``) and without commas before a closing
    bracket. Texts in quotes are kept.
    """
    for pattern in (_COMMENT, _LAST_COMMA):
        text = pattern.sub(lambda match: match[1] or " ", text)
    return text


def _build_unique_mapping(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise LayoutError(f"{where} gives {name!r} twice; expected it once")
        found[name] = value
    return found


def flatten_sections(
    nested: Mapping[Any, Any], sections: Iterable[str], prefix: str = "", depth: int = 0
) -> dict[str, Any]:
    """Return the options in ``nested``, a configuration whose sections are inner mappings, as ``section.name`` ->
    value. ``sections``: names of all sections; mappings under other names are values. ``prefix``, ``depth``: section
    names so far with a final dot, and level of nesting, for the recursion.
    """
    known = frozenset(sections)
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name in known and depth < _DEEPEST:
            found |= flatten_sections(value, known, f"{name}.", depth + 1)
        else:
            found[name] = value
    return found


class Options:
    """The options of a framework's training configuration, such as a DeepSpeed file: name -> value. The ``take``
    methods return a value in a required type and mark the option as read; options that were not read are listed as
    having no effect.

    ``given``: the options. ``where``: the file or framework that the configuration is from, for error messages.
    ``write``: a template for an option in messages, with ``{}`` for its name, such as ``--{}``. ``written``: name ->
    text in messages, for options that the template does not fit. ``ignore``: names of options, or of sections, that the
    training script itself defines; they are not reported as unknown. ``explain``: function of a wrong value that
    returns a text for messages: the value, why it is not known, and what to do; empty if the value is known.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        where: str,
        write: str = "{}",
        written: Mapping[str, str] | None = None,
        ignore: Collection[str] = (),
        explain: Callable[[str], str] = lambda value: "",
    ) -> None:
        self.given = dict(given)
        self._explain = explain
        self.where = where
        self.write = write
        self.written = written or {}
        self._taken: set[str] = set()
        self._notes: list[UnusedOption] = []
        self._ignore = frozenset(name.lstrip("-") for name in ignore)
        for option in self.given:
            if self._is_ignored(option):
                self.note(option, "belongs to the training script")

    def name(self, option: str) -> str:
        """Return the text by which messages name ``option``, such as ``--tensor-model-parallel-size``."""
        return self.written.get(option) or self.write.format(option)

    def has(self, option: str) -> bool:
        """Return whether the framework's configuration gives ``option`` a value other than ``None`` and ``auto``."""
        return self.given.get(option) not in (None, "auto")

    def take(self, option: str) -> Any:
        """Return the value that the framework's configuration gives ``option``, and mark the option as read. ``None``
        if it is not given or ``auto``."""
        if option in self.given:
            self._taken.add(option)
        value = self.given.get(option)
        if value == "auto":
            self.note(option, "is left to the launcher, which fills it in; its value is not known")
            return None
        return value

    def take_number(self, option: str, default: Any = None, least: int = 1) -> Any:
        """Return the value of ``option`` as a whole number, or ``default`` if it is not given. Mark the option as read.
        Raise :class:`OptionValueError` for anything but a whole number of at least ``least``.
        """
        value = self.take(option)
        if value is None:
            return default
        if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 19:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_value(option, f"a whole number of {least} or more")
        if value < least or value >= 2**63:
            raise self.wrong_value(option, f"a whole number of {least} or more")
        return value

    def take_share(self, option: str, default: float) -> float:
        """Return the value of ``option`` as a float, such as a fraction, or ``default`` if it is not given. Mark the
        option as read. Raise :class:`OptionValueError` for anything but a number.
        """
        value = self.take(option)
        if value is None:
            return default
        try:
            found = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong_value(option, "a number") from None
        if found != found:
            raise self.wrong_value(option, "a number")
        return found

    def take_flag(self, option: str, default: Any = False) -> Any:
        """Return whether the framework's configuration switches ``option`` on, or ``default`` if it is not given. Mark
        the option as read."""
        value = self.take(option)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str | int) and str(value).lower() in _TRUE + _FALSE:
            return str(value).lower() in _TRUE
        raise self.wrong_value(option, "true or false")

    def take_any_flag(self, *names: str) -> bool:
        """Return whether one of the options ``names`` is switched on. Mark all of them as read."""
        return any(list(map(self.take_flag, names)))

    def take_choice(self, option: str, choices: Mapping[str, Any], default: Any = None) -> Any:
        """Return the result that ``choices`` has for the value of ``option``, in upper or lower case; ``default`` if
        the option is not given. ``choices``: allowed value -> result. Raise :class:`OptionValueError` for a value that
        is not allowed.
        """
        value = self.take(option)
        if value is None:
            return default
        folded = {name.lower(): meaning for name, meaning in choices.items()}
        text = str(value).lower() if isinstance(value, str | int) else ""
        if text not in folded:
            meant = format_suggestion(text, [*choices]) if text else ""
            raise self.wrong_value(option, f"one of {', '.join(choices)}", meant)
        return folded[text]

    def take_text(self, option: str, default: Any = None) -> Any:
        """Return the value of ``option`` as text, or ``default`` if it is not given. Mark the option as read."""
        value = self.take(option)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_value(option, "text")
        return value

    def wrong_value(self, option: str, expected: str, meant: str = "") -> OptionValueError:
        """Return the error that says that ``option`` has a wrong value. ``expected``: a description of the right
        values. ``meant``: a question with a blank after it, such as "did you mean full? ".
        """
        value = self.given.get(option)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (reason := self._explain(text)):
                return OptionValueError(f"{self.where}: {self.name(option)}: expected {expected}, got {reason}")
        got = repr(value)
        got = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}..."
        return OptionValueError(
            f"{self.where}: {self.name(option)}: {meant}expected {expected}, got {got}; correct the value"
        )

    def note(self, option: str, reason: str) -> None:
        """Record that ``option`` has no effect or cannot be expressed in a plan, if the framework's configuration gives
        it. ``reason``: a clause that says why."""
        if option in self.given:
            self._taken.add(option)
            self._notes.append(self._unused(option, reason))

    def reject_unknown(self, known: Iterable[str]) -> None:
        """Raise :class:`UnknownOptionError` if the framework's configuration has options that are not in ``known``
        (names of options). The message names all of them."""
        names = frozenset(known)
        unknown = [option for option in self.given if option not in names and not self._is_ignored(option)]
        if unknown:
            meant = _suggest_option(str(unknown[0]), names)
            raise UnknownOptionError(
                f"{self.where}: unknown option {self.name(unknown[0])}; {meant}expected an option of the framework: "
                + describe_unknown(unknown, self.name)
            )

    def _is_ignored(self, option: str) -> bool:
        """Return whether the user listed ``option``, or its section, among the options that belong to the training
        script."""
        return option in self._ignore or option.split(".")[0] in self._ignore

    def list_unused(self) -> tuple[UnusedOption, ...]:
        """Return the options of the framework's configuration that have no effect on a plan: those that were recorded
        with a reason, and all others that were not read."""
        left = [self._unused(option, explain_unused(option)) for option in self.given if option not in self._taken]
        return (*self._notes, *left)

    def _unused(self, option: str, reason: str) -> UnusedOption:
        value = self.given[option]
        text = "" if value is True and self.write.startswith("-") else str(value)
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return UnusedOption(option=self.name(option), value=text, reason=reason)


def describe_unknown(unknown: Sequence[Any], write: Callable[[str], str]) -> str:
    """Return the end of an error message on the options ``unknown``: what the user can do, and the names of all these
    options but the first, which the beginning of the message names. ``write``: returns the text of an option, such as
    ``--lr``."""
    listed = ",".join(str(option) for option in unknown[:_MOST_LISTED])
    more = len(unknown) - _MOST_LISTED
    whose = "it belongs" if len(unknown) == 1 else "they belong"
    text = f"correct the name, leave it out, or give ignore={listed} if {whose} to the training script"
    others = ", ".join(write(str(option)) for option in unknown[1:_MOST_LISTED])
    return f"{text} (also unknown: {others}{f' and {more} more' if more > 0 else ''})" if others else text


def _suggest_option(option: str, names: Collection[str]) -> str:
    """Return a question such as "did you mean training.seq_len? ", with a blank after it, for ``option``, which is not
    in ``names``: an option or section that is written like it, or the same option in another section. Return an empty
    text if there is none.
    """
    last = option.rpartition(".")[2]
    elsewhere = sorted(name for name in names if name.rpartition(".")[2] == last)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}? "
    sections = {name.rpartition(".")[0] for name in names} - {""}
    alike = [] if "." in option else sorted({section.split(".")[0] for section in sections})
    section = option.rpartition(".")[0]
    if section and section not in sections:
        return format_suggestion(section, sorted(sections))
    return format_suggestion(last, [*_shorten(names, option), *alike])


def _shorten(names: Iterable[str], like: str) -> list[str]:
    """Return the options in ``names`` (each ``section.name``) that are in the section of the option ``like``, without
    the section. Return all of ``names`` if the section has none.
    """
    section = like.rpartition(".")[0]
    inside = sorted(name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section)
    return inside or sorted(names)
