"""Read the configuration of a model: a folder with a ``config.json``, such a file, or a name on the Hugging Face hub.

Nothing in a configuration is executed. A configuration that names its own Python code is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from partitioner.passes.errors import PartitionError

CONFIG = "config.json"
_PREPROCESSOR = "preprocessor_config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Fields that choose kernels or wrappers. Some of them make transformers load code, and none changes what is computed.
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_REMOTE = ("auto_map", "trust_remote_code")
# Fields without which a model has the size that its type has by default.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
# Words in the name of a field -> its largest value: above it, building the model would take all memory.
_LIMITS = (
    (re.compile(r"(layers?|depths?|num_blocks|stages)$"), 10_000),
    (re.compile(r"experts$"), 100_000),
    (re.compile(r"size|dim|position|label|length|channel|head|width|token"), 10**8),
)


class PretrainedError(PartitionError):
    """Error: a configuration of a model cannot be read or built, or an option does not suit the model."""


class RemoteCodeError(PretrainedError):
    """Error: a configuration names Python code of its own, which is not executed."""


class HubError(PretrainedError):
    """Error: a model's name is not a folder, and the Hugging Face hub does not provide its configuration."""


@dataclass(frozen=True)
class Configuration:
    """The configuration of a Hugging Face transformers model, as it was read from a file or the hub.

    Attributes:
        config: the ``PreTrainedConfig`` of transformers.
        source: where it was read: a file, or a name on the hub.
        folder: the folder of the file; ``None`` for a name on the hub.
        architectures: the names of the model's classes in the file.
        preprocessor: the fields of ``preprocessor_config.json`` in the folder; empty if there is no such file.
        notes: sentences for the user about settings of the file that are ignored when the model is built.
    """

    config: Any
    source: str
    folder: Path | None
    architectures: tuple[str, ...]
    preprocessor: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def weights(self) -> Path | None:
        """Return the folder of the configuration file if it contains the model's weights as safetensors files; else
        ``None``."""
        if self.folder is None or not any(self.folder.glob("*.safetensors")):
            return None
        return self.folder


def import_transformers() -> Any:
    """Return the module ``transformers``. Raise :class:`PretrainedError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise PretrainedError(
            f"a configuration needs transformers, which cannot be imported ({error}); install it: "
            "pip install 'transformers>=5'"
        ) from None
    return transformers


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Return a context manager within which transformers prints neither warnings nor progress. Its exceptions are
    raised as usual."""
    logs = import_transformers().utils.logging
    before, bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(before)
        if bar:
            logs.enable_progress_bar()


def read_configuration(source: str | Path) -> Configuration:
    """Return the configuration at ``source``: a folder with a ``config.json``, the path of a ``config.json``, or a name
    on the Hugging Face hub.

    Raise :class:`PretrainedError` if it is missing, is not JSON or is not a configuration of transformers,
    :class:`RemoteCodeError` if it names code of its own, and :class:`HubError` if the hub does not have it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        file = path / CONFIG
        if not file.is_file():
            raise PretrainedError(f"{path} has no {CONFIG}; expected a folder that a model was saved to")
        data, where = _read_json(file), str(file)
    elif path.is_file():
        data, where = _read_json(path), str(path)
    elif _is_hub_name(str(source)):
        data, where = _read_from_hub(str(source)), str(source)
    else:
        raise PretrainedError(f"there is no file {path}; expected a folder with a {CONFIG}, or such a file")
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    other = folder / _PREPROCESSOR if folder is not None else None
    preprocessor = _read_json(other) if other is not None and other.is_file() else {}
    return _parse_configuration(data, where, folder, preprocessor)


def _is_hub_name(text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None and not text.endswith((".json", ".py"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path`` as a dict. Raise :class:`PretrainedError` if it cannot be read, is
    not JSON, or is not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror}; give another file or folder") from None
    except (ValueError, RecursionError) as error:
        raise PretrainedError(
            f"{path} is not JSON: {error}; expected the config.json that transformers saved with the model"
        ) from None
    if not isinstance(data, dict):
        raise PretrainedError(f"{path} has a {type(data).__name__}; expected a JSON object with the model's fields")
    return data


def _read_from_hub(name: str) -> dict[str, Any]:
    """Return the content of ``config.json`` of the model ``name`` on the Hugging Face hub as a dict. Raise
    :class:`HubError` if the hub does not have it or cannot be reached.
    """
    try:
        with quiet_transformers():
            data, _ = import_transformers().PreTrainedConfig.get_config_dict(name)
    except PartitionError:
        raise
    except Exception as error:
        said = _read_first_sentence(str(error))
        raise HubError(
            f"there is no folder {name}, and its configuration cannot be read from the Hugging Face hub "
            f"({said}); "
            "download the model's folder, or only its config.json, and give the path"
        ) from None
    if not isinstance(data, dict) or not data:
        raise HubError(f"the hub has no {CONFIG} for {name}; give the name of a model of transformers")
    return data


def _read_first_sentence(text: str) -> str:
    """Return the first sentence of ``text``, an error message, on one line and without its full stop; the words after
    the first 300 characters are left out."""
    sentence = re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0].rstrip(".")
    return textwrap.shorten(sentence, 300, placeholder=" ...")


def _parse_configuration(
    data: dict[str, Any], source: str, folder: Path | None, preprocessor: Mapping[str, Any]
) -> Configuration:
    """Return the configuration that ``data``, the content of a ``config.json``, describes. ``source``: the name or path
    from which ``data`` was read, for messages. ``folder``: the folder of the file; ``None`` for the hub.
    ``preprocessor``: the content of ``preprocessor_config.json``; empty if there is none.

    Raise :class:`PretrainedError` if transformers does not know the architecture or refuses the fields, and
    :class:`RemoteCodeError` if ``data`` names its own Python code.
    """
    transformers = import_transformers()
    kind = data.get("model_type")
    _refuse_remote_code(data, source)
    if not isinstance(kind, str):
        raise PretrainedError(f"{source} has no model_type; expected the name of an architecture of transformers")
    if kind not in transformers.CONFIG_MAPPING:
        close = get_close_matches(kind, list(transformers.CONFIG_MAPPING.keys()), 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise PretrainedError(
            f"{source}: transformers {transformers.__version__} has no model_type {kind!r}; {meant}Expected one that "
            "this version knows: a newer one may have it"
        )
    _check_counts(data, source)
    notes = []
    if data.get("quantization_config") is not None:
        notes.append("The quantisation in the configuration is ignored: the model is planned without it.")
    data = _decode_floats(_leave_out(data, (*_IMPLEMENTATIONS, "quantization_config")))
    try:
        with quiet_transformers():
            config = transformers.CONFIG_MAPPING[kind].from_dict(data)
            for part in list_parts(config):
                _complete(part)
    except Exception as error:
        raise build_error(error, f"{source}: transformers does not accept the configuration of a {kind}") from None
    notes += _note_defaults(data, config)
    return Configuration(config, source, folder, _read_architectures(data, source), preprocessor, tuple(notes))


def _note_defaults(data: Mapping[str, Any], config: Any) -> list[str]:
    """Return sentences for the user on sizes that a configuration file does not give, so that the defaults of the model
    type apply, and on fields that look misspelt. ``data``: the content of the file. ``config``: the configuration that
    was made of it.
    """
    notes = []
    inner = import_transformers().PreTrainedConfig
    parts = [(config, data)]
    sections = {name: value for name, value in vars(config).items() if isinstance(value, inner)}
    for name, value in sections.items():
        if isinstance(given := data.get(name), Mapping):
            parts.append((value, given))
    if left_out := [name for name in sections if not data.get(name)]:
        notes.append(f"The configuration has no {', '.join(left_out)}: its sizes are the defaults of this model type.")
    for part, given in parts:
        kind, other = part.model_type, dict(part.attribute_map or {})
        missing = [
            f"{other.get(name, name)}={value:,}"
            for name in (_SIZES if part is not config or not sections else ())  # those beside sections have no effect
            if isinstance(value := vars(part).get(other.get(name, name)), int)
            and not {name, other.get(name, name)} & given.keys()
        ]
        if missing:
            notes.append(
                f"The configuration does not give all sizes of the {kind} model; the defaults of this model "
                f"type are used: {', '.join(missing)}."
            )
        fields = getattr(type(part), "__dataclass_fields__", {}).keys() | {*other} | {*other.values()}
        absent = sorted(field for field in fields - given.keys() if not field.startswith("_"))
        for name in sorted(given.keys() - fields - {*dir(type(part))}):
            close = [] if name.endswith("token_id") else get_close_matches(name, absent, 1, 0.85)
            if close:
                notes.append(
                    f"The configuration has a field {name}, which the model type {kind} does not have and "
                    f"which is ignored; did you mean {close[0]}?"
                )
    return notes


def _read_architectures(data: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return the class names in the field ``architectures`` of ``data``, the content of a configuration file; empty if
    it has none. ``source``: its path or name, for the message. Raise :class:`PretrainedError` if the field is not a
    list of names."""
    named = data.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise PretrainedError(
            f"{source}: architectures is {str(named)[:80]!r}; expected a list of class names of transformers, such as "
            '["LlamaForCausalLM"]'
        )
    return tuple(named)


def _complete(config: Any) -> None:
    """Set fields of ``config``, a transformers configuration, so that a training step is defined: switch off the cache
    of keys and values, and set the token with which a decoder starts, by default the padding token.
    """
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def _refuse_remote_code(data: Mapping[str, Any], source: str) -> None:
    """Raise :class:`RemoteCodeError` if ``data`` or a part of it names code that transformers would load. ``data``: the
    content of a configuration file. ``source``: its path or name, for the message.
    """
    for found in _list_objects(data):
        for name in _REMOTE:
            if found.get(name):
                raise RemoteCodeError(
                    f"{source} needs Python code that comes with the model ({name}: {str(found[name])[:120]}), as with "
                    "trust_remote_code=True; such code is not executed. If transformers itself has the model, "
                    "remove the "
                    "field; otherwise give FILE.py:FUNCTION, your own function that returns the model"
                )


def _list_objects(data: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all JSON objects (mappings) in ``data``, parsed JSON; ``data`` itself is included if it is one."""
    todo = [data]
    while todo:
        each = todo.pop()
        if isinstance(each, Mapping):
            yield each
            todo += each.values()
        elif isinstance(each, list):
            todo += each


def _check_counts(data: Mapping[str, Any], source: str) -> None:
    for found in _list_objects(data):
        for name, value in found.items():
            numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]
            limit = next((most for words, most in _LIMITS if words.search(name)), None)
            if limit is not None and max(numbers, default=0) > limit:
                raise PretrainedError(f"{source}: {name} is {max(numbers)}; expected at most {limit}")


def _leave_out(data: Any, names: tuple[str, ...]) -> Any:
    """Return a copy of ``data``, parsed JSON, without the fields ``names``, also in nested objects."""
    if isinstance(data, dict):
        return {key: _leave_out(value, names) for key, value in data.items() if key not in names}
    return [_leave_out(value, names) for value in data] if isinstance(data, list) else data


def _decode_floats(data: Any) -> Any:
    """Return a copy of ``data``, parsed JSON, in which objects such as ``{"__float__": "Infinity"}`` are replaced by
    the number. transformers writes numbers that JSON does not have, such as infinity, in this form."""
    if isinstance(data, dict):
        if {*data} == {"__float__"} and (value := _FLOATS.get(str(data["__float__"]))) is not None:
            return value
        return {key: _decode_floats(value) for key, value in data.items()}
    return [_decode_floats(value) for value in data] if isinstance(data, list) else data


def list_parts(config: Any) -> Iterator[Any]:
    """Yield ``config``, a ``PreTrainedConfig``, and all configurations inside it, such as the configuration of a text
    model.
    """
    yield config
    for value in vars(config).values():
        if isinstance(value, import_transformers().PreTrainedConfig):
            yield from list_parts(value)


def read_number(config: Any, *names: str) -> int | None:
    """Return the first positive integer that a field of ``config``, a transformers configuration, or of a configuration
    inside it has. ``names``: the names of the fields, the preferred one first. If a field is a list, its first number
    counts. ``None`` if there is none.
    """
    for name in names:
        for part in list_parts(config):
            try:
                value = getattr(part, name, None)
            except Exception:  # some configurations refuse to give one number for all layers
                continue
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def build_error(error: Exception, what: str, remedy: str = "correct its fields") -> PretrainedError:
    """Return a :class:`PretrainedError` for ``error``, an exception that transformers raised. ``what``: a clause that
    says what failed. ``remedy``: what the user can do; it is replaced by the advice to install a package if that
    package is missing."""
    said = " ".join(str(error).split())[:300].rstrip(".")
    remedy = "install this package, or give FILE.py:FUNCTION" if isinstance(error, ImportError) else remedy
    return PretrainedError(f"{what}: {type(error).__name__}: {said}; {remedy}")
