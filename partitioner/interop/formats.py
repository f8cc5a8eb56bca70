"""Read a configuration of any supported framework, or write a training layout as one. The table of formats is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partitioner.interop.accelerate import read_accelerate, write_accelerate
from partitioner.interop.deepspeed import read_deepspeed, write_deepspeed
from partitioner.interop.layout import LayoutError, TrainingLayout, UnusedOption
from partitioner.interop.megatron import read_megatron, read_megatron_bridge, write_megatron, write_megatron_bridge
from partitioner.interop.megatron_words import list_option_words
from partitioner.interop.options import load_known_options, parse_mapping, read_text_file
from partitioner.interop.torchtitan import read_torchtitan, write_torchtitan_module, write_torchtitan_toml
from partitioner.interop.transformers_arguments import read_transformers, write_transformers
from partitioner.passes.faults import typed_errors
from partitioner.runtime.files import write_text
from partitioner.topology.validate import format_suggestion

_YAML = (".yaml", ".yml")
_MOST_NAMED = 5  # fields of an unknown format in a message
Written = tuple[str, tuple[UnusedOption, ...]]


@dataclass(frozen=True)
class _Source:
    """A configuration of another framework as it is read. ``text``: its text. ``path``: its file; ``None`` if the text
    itself was given. ``function``: if the text is a Python module, the name of the function in it that builds the
    configuration; ``None`` if not given. ``ignore``: names of options that the training script itself defines; they are
    not reported as unknown.
    """

    text: str
    path: Path | None = None
    function: str | None = None
    ignore: tuple[str, ...] = ()

    @property
    def ending(self) -> str:
        return self.path.suffix.lower() if self.path is not None else ""

    @property
    def folder(self) -> Path | None:
        return self.path.parent if self.path is not None else None


def _read_torchtitan(source: _Source) -> TrainingLayout:
    kinds = {".py": "py", ".json": "json", ".toml": "toml"}
    plain = "flags" if source.text.lstrip().startswith("--") or "--parallelism." in source.text else "toml"
    return read_torchtitan(source.text, kinds.get(source.ending, plain), source.function, source.ignore)


def _read_megatron(source: _Source) -> TrainingLayout:
    if source.ending not in _YAML:
        return read_megatron(source.text, source.ignore)
    words, others = list_option_words(parse_mapping(source.text, "yaml", str(source.path)))
    if not words:
        return read_megatron_bridge(source.text)
    layout = read_megatron(words, source.ignore)
    reason = "is no option of Megatron-LM, but of the script that starts it"
    beside = (UnusedOption(option=name, value="...", reason=reason) for name in others)
    return layout.replace(unused=(*layout.unused, *beside))


def _write_torchtitan(layout: TrainingLayout, path: Path) -> Written:
    return write_torchtitan_toml(layout) if path.suffix == ".toml" else write_torchtitan_module(layout)


def _write_megatron(layout: TrainingLayout, path: Path) -> Written:
    return write_megatron_bridge(layout) if path.suffix in (".yaml", ".yml") else write_megatron(layout)


@dataclass(frozen=True)
class Format:
    """How one format of training configurations, such as that of DeepSpeed, is read and written. ``read``: function
    that returns the training layout of a configuration. ``write``: function that takes a layout and the path of the
    file to write, and returns the file's text and the fields of the layout that the format cannot express."""

    read: Callable[[_Source], TrainingLayout]
    write: Callable[[TrainingLayout, Path], Written]


FORMATS: dict[str, Format] = {
    "megatron": Format(_read_megatron, _write_megatron),
    "torchtitan": Format(_read_torchtitan, _write_torchtitan),
    "deepspeed": Format(
        lambda source: read_deepspeed(source.text, str(source.path or "the DeepSpeed configuration"), source.ignore),
        lambda layout, path: write_deepspeed(layout),
    ),
    "accelerate": Format(
        lambda source: read_accelerate(source.text, source.folder, source.ignore),
        lambda layout, path: write_accelerate(layout),
    ),
    "transformers": Format(
        lambda source: read_transformers(
            source.text, source.folder, source.ignore, "yaml" if source.ending in _YAML else "json"
        ),
        lambda layout, path: write_transformers(layout),
    ),
}


_SYNTAXES = frozenset((".py", ".toml", ".json", ".yaml", ".yml"))
_ENDINGS = {
    "megatron": (".sh", ".txt", ".yaml", ".yml"),
    "torchtitan": (".py", ".toml"),
    "deepspeed": (".json",),
    "accelerate": (".yaml", ".yml"),
    "transformers": (".json",),
}


@typed_errors("read_layout()")
def read_layout(
    source: str | os.PathLike[str], format: str | None = None, *, ignore: Iterable[str] = ()
) -> TrainingLayout:
    """Return the training layout that the configuration of another framework describes: mesh, batch, schedule and state
    sharding, an execution profile of the framework, and the options that have no effect or cannot be expressed.

    Args:
        source: the path of a configuration (``FILE.py:FUNCTION`` for a module of torchtitan), or the text of a
            Megatron-LM command line. Nothing in it is executed.
        format: ``megatron`` (command line, shell script, or YAML of Megatron-Bridge), ``torchtitan``, ``deepspeed``,
            ``accelerate`` or ``transformers``; ``None``: found by the content.
        ignore: names of options that the training script itself defines, and not the framework; they are not reported
            as unknown.

    Raise :class:`partitioner.LayoutError`, or a subclass of it, for an option that is unknown, has a wrong value, or
    contradicts another.
    """
    if not isinstance(source, str | os.PathLike):
        raise LayoutError(f"expected the path of a configuration or its text, got {type(source).__name__}")
    found = replace(_load_source(source), ignore=tuple(map(str, ignore)))
    name = format or _detect_format(found)
    return find_format(name).read(found)


def find_format(name: str, others: Iterable[str] = ()) -> Format:
    """Return the reader and writer of the configuration format ``name``, such as ``megatron``. Raise
    :class:`LayoutError` for an unknown name. ``others``: further names that the caller accepts, which the message lists
    with the formats.
    """
    if name not in FORMATS:
        known = [*FORMATS, *others]
        raise LayoutError(
            f"unknown format {name!r}; {format_suggestion(str(name), known)}expected one of {', '.join(known)}"
        )
    return FORMATS[name]


def _check_ending(format_name: str, path: Path) -> None:
    """Raise :class:`LayoutError` if the ending of ``path`` does not belong to the syntax of the format ``format_name``,
    such as ``.json`` for a format in YAML. Unknown endings are accepted, and so is a path without one.
    """
    own = _ENDINGS[format_name]
    if path.suffix.lower() in _SYNTAXES - {*own}:
        raise LayoutError(
            f"{path}: a configuration of {format_name} is not written as {path.suffix}; expected a file whose name "
            f"ends in {' or '.join(own)}"
        )


def _load_source(source: str | os.PathLike[str]) -> _Source:
    """Return the text of a configuration with its origin. ``source``: a path, ``FILE.py:FUNCTION``, or a command line.
    Raise :class:`LayoutError` if a file cannot be read.
    """
    text = os.fspath(source)
    if not isinstance(text, str):
        raise LayoutError("expected the path of a configuration as text, got bytes")
    if not text.strip():
        raise LayoutError("the configuration is empty; expected the path of a file, or options such as --bf16")
    place, colon, function = text.rpartition(":")
    if colon and place.endswith(".py") and function.isidentifier():
        return _Source(read_text_file(Path(place)), Path(place), function)
    if "\n" in text or text.lstrip().startswith("--") or " --" in text:
        return _Source(text)
    return _Source(read_text_file(Path(text)), Path(text))


def _detect_format(source: _Source) -> str:
    """Return the name of the format of the configuration ``source``, such as ``deepspeed``, from the ending of its file
    and its options.
    """
    if source.ending in (".py", ".toml") or "--parallelism." in source.text:
        return "torchtitan"
    if source.ending == ".json":
        nested = parse_mapping(source.text, "json with comments", str(source.path))
        if {"parallelism", "training"} <= {*nested}:
            return "torchtitan"
        for name, what in (("model_type", "the configuration of a model"), ("program", "a plan of this project")):
            if name in nested and not {"fsdp", "tp_size"} & {*nested}:
                raise LayoutError(f"{source.path} is {what}; expected a configuration of a training framework")
        keys = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
        return "deepspeed" if keys & {*nested} else "transformers"
    if source.ending in _YAML:
        return _detect_yaml_format(parse_mapping(source.text, "yaml", str(source.path)), str(source.path))
    if "--" in source.text:
        return "megatron"
    raise LayoutError(
        f"the format of {source.path or 'the text'} is not known; expected format=..., one of {', '.join(FORMATS)}"
    )


def _detect_yaml_format(nested: Mapping[str, Any], where: str) -> str:
    """Return the name of the format of a configuration in YAML, such as ``accelerate``: the format that knows most of
    its fields. ``nested``: its content. ``where``: the name of its file.

    A file with a single field counts as a file of Megatron-Bridge. Raise :class:`LayoutError` if each format knows less
    than half of the fields.
    """
    if "distributed_type" in nested or "compute_environment" in nested:
        return "accelerate"
    if list_option_words(nested)[0]:
        return "megatron"
    sections = load_known_options()["megatron-bridge"]
    fields = {"_target_", *sections, *(name for names in sections.values() for name in names)}
    sectioned = any(isinstance(nested.get(name), Mapping) for name in sections)
    arguments = load_known_options()["transformers"]
    known = {"megatron": fields, "transformers": {*arguments[""], *arguments}}
    counts = {name: sum(str(field) in names for field in nested) for name, names in known.items()}
    best = max(counts, key=lambda name: counts[name])
    if sectioned or len(nested) < 2:
        return "megatron"
    if 2 * counts[best] < len(nested):
        beyond = [str(field) for field in nested if not any(str(field) in names for names in known.values())]
        raise LayoutError(
            f"{where} has fields of no format that is known, such as {', '.join(beyond[:_MOST_NAMED])}; expected a "
            f"configuration of {', '.join(FORMATS)}, or format=... and ignore=... for fields of the training script"
        )
    return best


def write_layout(layout: TrainingLayout, format: str, path: str | os.PathLike[str]) -> tuple[UnusedOption, ...]:
    """Write ``layout`` to the file ``path`` as a configuration of another framework. The file appears only when it is
    complete. Return the fields of the layout that the format cannot express. ``format``: such as ``megatron`` or
    ``deepspeed``.

    The ending of the file decides between several forms of a format: torchtitan ``.toml`` (up to version 0.2) or a
    Python module; Megatron ``.yaml`` (Megatron-Bridge) or a command line. Raise :class:`LayoutError` for an unknown
    format, and for the ending of another syntax, such as ``.json`` for YAML.
    """
    target, writer = Path(path), find_format(format)
    _check_ending(format, target)
    text, missing = writer.write(layout, target)
    write_text(target, text)
    return missing
