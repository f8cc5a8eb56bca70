"""Small configurations for any architecture of transformers, from its default one and the kinds of its fields.

No architecture is known by name. A table says what a field is by how it is called: a count of layers, a width, a
vocabulary, a window. Widths keep their proportions, counts of heads their ratio, lists of stages their length; of
layers of several types each type stays. Where a model cannot be built so, fields are left as they are by default, those
that its error names and then single kinds of them, until it can.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

WIDTH, HEADS, HEAD_DIM, VOCAB, POSITIONS, WINDOW, IMAGE = 64, 4, 16, 128, 64, 4, 64
_MOST_LAYERS, _LEAST, _MOST = 8, 8, 256

Keep = frozenset[str]


@dataclasses.dataclass(frozen=True)
class Scale:
    """What the fields of one configuration are measured by: their default, and which layers are left."""

    hidden: int
    heads: int
    head_dim: int
    layers: int
    kept: tuple[int, ...]
    vocab: int
    others: frozenset[int] = frozenset()  # hidden sizes of the parts around, to which a width may be fitted


# --- what becomes of a number -----------------------------------------------------------------------------------------


def _floor(value: float) -> int:
    """The largest power of two that is not above ``value``."""
    power = 1
    while power * 2 <= value:
        power *= 2
    return power


def _proportional(value: int, new: int, old: int) -> int:
    """``value`` times new / old, in multiples of eight where that is exact, as a power of two otherwise."""
    if value <= _LEAST:
        return value
    scaled = value * new / old
    exact = scaled == int(scaled) and int(scaled) % _LEAST == 0
    return min(max(int(scaled) if exact else _floor(scaled), _LEAST), _MOST)


def _width(value: int, scale: Scale) -> int:
    if value in scale.others and value != scale.hidden:
        return WIDTH
    return _proportional(value, WIDTH, scale.hidden)


def _head_width(value: int, scale: Scale) -> int:
    scaled = value * HEAD_DIM / scale.head_dim
    return int(scaled) if scaled == int(scaled) and scaled >= 1 else max(_floor(scaled), 2)


def _heads(value: int, scale: Scale) -> int:
    if value <= HEADS:
        return _floor(value) if value else value
    return max(1, min(_floor(HEADS * value / scale.heads), 4 * HEADS)) if value < scale.heads else HEADS


def _kv_heads(value: int, scale: Scale) -> int:
    """Number of key heads with the default number of query heads for each."""
    return max(1, min(_floor(HEADS * value / scale.heads), HEADS)) if value else value


def _least(limit: int) -> Callable[[int, Scale], int]:
    return lambda value, scale: min(value, limit)


def _layers(value: int, scale: Scale) -> int:
    return len(scale.kept) if value == scale.layers else min(value, 2)


# kind -> the names of its fields, the first kind that fits; and what becomes of a number of that kind.
_KINDS: tuple[tuple[str, str, Callable[[int, Scale], int]], ...] = (
    ("token", r"token_(id|index)s?$|(^|_)(unk|mask|pad|bos|eos|lang)_(id|index)$", lambda v, s: v),
    ("vocab", r"vocab(_size)?(_base|_per_layer_input)?$|vocab_sizes?$|group_vocab$|num_codevectors_per_group$",
     _least(VOCAB)),
    ("keep", r"kernel|stride|padding|dilation|rate|ratio|factor|mult|expan|channels?_in|num_channels|seed|labels|bins$"
     r"|in_channels|codebooks|type_vocab|^group_size|beta|alpha|theta|steps|cycles|hop|audio_channels|input_channels"
     r"|n_langs|divis|_idx$|pool_size|pool_scales|reduction|cross_attn_k|feature_layer|ngram_size"
        r"|time_limit", lambda v, s: v),
    ("head_dim", r"head_?dims?$|d_head|headdim|d_kv$|dim_head|kv_channels|head_size|rotary_dim|attn_scalar|key_dim$"
     r"|head_hid_dim|d_rel$|ssm_dim$|mrope_section", _head_width),
    ("kv_heads", r"(kv|key_value)_?(n_)?heads|num_query_groups", _kv_heads),
    ("heads", r"heads?$|_nhead$|n_heads?_|heads_per_layer|num_attention_heads", _heads),
    ("offset", r"offset$", _least(1)),
    ("period", r"period$|interval$|sparse_step$|every_n_layers$|pattern$|layer_group_size", _least(2)),
    ("first", r"^(first|num|mlp|moe)_.*(dense|shared|start).*(layers?|replace|index)$|nextn", _least(1)),
    ("layers", r"layers?$|layers_per|depths?$|blocks?$|num_blocks|block_repeats|block_sizes$|num_.*_layers", _layers),
    ("window", r"window|chunk_size$|attention_span|mem_len|local_attention|local_radius|block_size$|index_topk"
     r"|chunk_length$|(left|right)_chunk|context_(left|right|size)|keep_window|topk_blocks|local_num_chunks"
     r"|segment_means|num_landmarks|buckets", _least(WINDOW)),
    ("experts", r"(num|n)_(local_|routed_)?experts$|experts$|expert_num$", _least(8)),
    ("chosen", r"per_tok(en)?$|top_?k$|moe_k$|topk_group$", _least(2)),
    ("groups", r"n_groups?$|expert_group$|ngroups$|num_groups$|groups$", _least(2)),
    ("image", r"image_size$|input_size$|crop_size$|train_size$", _least(IMAGE)),
    ("patch", r"patch_size", _least(16)),
    ("positions", r"position|n_ctx|max_.*length|seq_len|context_length|max_len|distance$|num_frames|num_latents"
     r"|segment_types|pos_emb$|max_.*tokens|rel_extent|capacity|axial_pos_shape|global_tokens", _least(POSITIONS)),
    ("state", r"d_state$|state_size$", _least(16)),
    ("width", r"size|dim|embd|channels?|rank|d_model|d_ff|n_inner|dff|width|d_inner|units|hidden|latents|feat", _width),
)  # fmt: skip
_PATTERNS = [(kind, re.compile(pattern), new) for kind, pattern, new in _KINDS]
KINDS = tuple(kind for kind, _, _ in _KINDS)


def _kind_of(name: str) -> tuple[str, Callable[[int, Scale], int]] | None:
    return next(((kind, new) for kind, pattern, new in _PATTERNS if pattern.search(name)), None)


# --- a configuration --------------------------------------------------------------------------------------------------


def tiny_config(model_type: str, keep: Keep = frozenset()) -> PreTrainedConfig:
    """The architecture's configuration with small dims.

    ``keep``: kinds and names of fields that are as by default, ``name=value`` for what fields are to be, and
    ``Class.name`` for what parts of a class are to have as the others do.

    Raises whatever the configuration raises where it does not accept them.
    """
    config = _tiny(_default(CONFIG_MAPPING[model_type], _asked(keep)), keep)
    parts = list(_parts(config))
    for kind, name in (entry.split(".") for entry in keep if "." in entry and "=" not in entry):
        known = next((value for part in parts if (value := _held(part, name)) is not None), None)
        for part in parts:
            if type(part).__name__ == kind and known is not None:
                setattr(part, name, known)
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and all within it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _held(config: PreTrainedConfig, name: str) -> Any:
    """What a configuration has by a name, itself or in a table."""
    tables = [vars(config), *(v for v in vars(config).values() if isinstance(v, dict))]
    return next((table[name] for table in tables if table.get(name) is not None), None)


def _asked(keep: Keep) -> dict[str, Any]:
    return {n: ast.literal_eval(v) for n, v in (entry.split("=") for entry in keep if "=" in entry)}


def _default(kind: Any, asked: dict[str, Any]) -> PreTrainedConfig:
    """The default configuration but for what is asked of it or of its parts."""
    given = {name: asked[name] for name in _fields(kind) if name in asked}
    for name, part in kind.sub_configs.items():
        if found := {n: asked[n] for n in _fields(part) if n in asked}:
            given[name] = part(**found)
    return kind(**given)


def repaired(keep: Keep, error: str) -> Keep:
    """``keep``, and the fields that an error names, asks to have a value, or does not find in a part."""
    asked = re.findall(r"\b(\w+)`? ?(?:must be|==?) ?`?(True|False|None|\d+)\b", error)
    named = set(re.findall(r"[a-z]+(?:_[a-z0-9]+)+", error))
    missing = {".".join(found) for found in re.findall(r"'(\w+Config)' object has no attribute '(\w+)'", error)}
    return keep | missing | {f"{name}={value}" for name, value in asked} | (named - {name for name, _ in asked})


def attempts() -> Iterator[Keep]:
    """What to keep, the smallest model first."""
    yield frozenset()
    yield frozenset(("match",))
    yield frozenset(("fill",))
    yield frozenset(("fill", "pad_token_id=1"))
    singles = [frozenset((kind,)) for kind in KINDS]
    yield from singles
    yield frozenset(("first", "period", "offset", "layers"))
    yield frozenset(("image", "patch", "window", "positions"))
    yield frozenset(("width", "heads", "kv_heads", "head_dim", "state", "groups"))
    yield frozenset(KINDS) - {"vocab", "layers", "experts", "chosen", "first"}


def _tiny(default: PreTrainedConfig, keep: Keep, around: frozenset[int] = frozenset()) -> PreTrainedConfig:
    """``around``: the hidden sizes of what the configuration is a part of, and of its other parts."""
    parts = [v for name in _fields(type(default)) if isinstance(v := _get(default, name), PreTrainedConfig)]
    inside = frozenset(_first(part, _HIDDEN, 0) for part in (default, *parts)) - {0}
    scale = _scale_of(default, keep, around | inside if "match" in keep else frozenset())
    given: dict[str, Any] = {}
    for name in _fields(type(default)):
        value = _get(default, name)
        if isinstance(value, PreTrainedConfig):
            given[name] = _tiny(value, keep, around | inside)
        elif (value is None or value == {}) and "fill" in keep and _filled(name, default, scale) is not None:
            given[name] = _filled(name, default, scale)
        elif value is not None and not isinstance(value, bool | str) and name not in keep:
            new = _small(name, value, scale, keep)
            if new is not value:
                given[name] = new
    given |= _tokens(default, keep) | _matched(default, given, scale, keep)
    given |= {name: value for name, value in _asked(keep).items() if name in _fields(type(default))}
    if "use_cache" in vars(default):
        given["use_cache"] = False
    return type(default)(**given)


def _get(config: PreTrainedConfig, name: str) -> Any:
    """A field's value; ``None`` where there is none, or one per layer and not one for all."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _matched(default: PreTrainedConfig, given: dict[str, Any], scale: Scale, keep: Keep) -> dict[str, Any]:
    """Widths of heads that times their number make a multiple of the hidden width by default, and so again."""
    found: dict[str, Any] = {}
    fields = [n for n in _fields(type(default)) if type(_get(default, n)) is int]
    kinds = {n: kind[0] for n in fields if (kind := _kind_of(n)) is not None}
    for heads in (n for n in fields if kinds.get(n) == "heads"):
        for dim in (n for n in fields if kinds.get(n) == "head_dim" and _topic(n) == _topic(heads)):
            product = _get(default, heads) * _get(default, dim)
            number = given.get(heads, _get(default, heads))
            alike = [given.get(n, product) for n in fields if kinds.get(n) == "width" and _get(default, n) == product]
            times = product // scale.hidden if product % scale.hidden == 0 else 0
            if (alike or 0 < times <= 4) and not {"width", "heads", "head_dim"} & keep:
                found[dim] = (alike[0] if alike else times * WIDTH) // number
    return found


def _topic(name: str) -> frozenset[str]:
    """What a field's name is about: ``mamba`` for ``mamba_n_heads`` and ``mamba_d_head``."""
    parts = re.sub(r"headdim", "head_dim", name).split("_")
    return frozenset(parts) - {"num", "n", "heads", "head", "d", "dim", "attention", "size"}


def _fields(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind) if f.init]
    else:
        names = [p for p in inspect.signature(kind).parameters if p not in ("self", "kwargs")]
    return [n for n in names if n not in ("id2label", "label2id", "transformers_version", "architectures", "dtype")]


# What a field that is ``None`` by default may need, by kind.
_FILL = {
    "chosen": 2,
    "experts": 8,
    "head_dim": HEAD_DIM,
    "kv_heads": 2,
    "groups": 1,
    "first": 1,
    "width": WIDTH,
    "vocab": VOCAB,
}


def _filled(name: str, default: PreTrainedConfig, scale: Scale) -> Any:
    """A value for a field that has none; ``None`` where there is nothing to guess."""
    if name.startswith("default_"):  # one of those that another field lists
        listed = _get(default, f"{name.removeprefix('default_')}s")
        return listed[0] if isinstance(listed, list | tuple) and listed else None
    if name.startswith("clip"):
        return 8.0
    if name == "rope_parameters" and _get(default, "layer_types"):
        return {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _get(default, "layer_types")}
    if name == "layer_types":
        return ["full_attention"] * len(scale.kept)
    found = _kind_of(name)
    return _FILL.get(found[0]) if found is not None else None


def _small(name: str, value: Any, scale: Scale, keep: Keep) -> Any:
    if isinstance(value, dict):
        return {k: _small(k, v, scale, keep) for k, v in value.items()}
    if isinstance(value, float) or value is None:
        return 0.0 if re.search(r"drop|mask_\w*prob", name) and value else value
    found = _kind_of(name)
    if isinstance(value, list | tuple):
        return _small_list(name, value, scale, keep)
    if found is None or found[0] in keep or isinstance(value, bool | str) or value < 0:
        return value
    return found[1](value, scale) if isinstance(value, int) else value


def _small_list(name: str, value: Any, scale: Scale, keep: Keep) -> Any:
    """One entry per layer that is left, layers' numbers among those that are left, entries per stage in proportion."""
    if all(isinstance(v, list | tuple) and len(v) == 2 and isinstance(v[0], list) for v in value) and value:
        return [[v[0], 1] for v in value]  # types of layers, and how often they recur
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    rising = numbers and list(value) == sorted({*value}) and max(value, default=-1) < scale.layers
    indices = rising and bool(re.search(r"layers$|idxs$|ids$|indices$|indexes$", name))
    if "layers" not in keep:
        if len(value) == scale.layers and not indices:
            return type(value)(value[i] for i in scale.kept)
        if indices:
            left = type(value)(i for i, old in enumerate(scale.kept) if old in value)
            return left if left or not value else type(value)((len(scale.kept) - 1,))
    found = _kind_of(name)
    if not numbers or found is None or found[0] in keep:
        return value
    kind, new = found
    if kind == "layers":
        return type(value)(min(v, 2 if len(value) < 3 else 1) for v in value)
    if kind == "width":  # stages' channels
        largest = max(value, default=1)
        return type(value)(_proportional(v, 2 * WIDTH, _floor(largest)) for v in value)
    if kind in ("heads", "kv_heads"):
        return type(value)(_floor(v) if v else v for v in value)
    return type(value)(new(v, scale) for v in value)


_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embed_dims", "hidden_sizes")


def _scale_of(default: PreTrainedConfig, keep: Keep, others: frozenset[int]) -> Scale:
    hidden = _first(default, _HIDDEN, 768)
    heads = _first(default, ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"), 8)
    head_dim = _first(default, ("head_dim", "v_head_dim", "attention_head_size", "d_kv"), 0)
    layers = _first(default, ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2)
    if _stages(default):
        hidden = hidden * 4  # the first of several stages is the narrowest
        layers = 0  # lists have an entry per stage
    kept = range(layers) if "layers" in keep else _layers_left(default, layers)
    vocab = _first(default, ("vocab_size",), VOCAB)
    return Scale(hidden, heads, head_dim or max(hidden // heads, 1), layers, tuple(kept), vocab, others)


def _stages(default: PreTrainedConfig) -> bool:
    return isinstance(_get(default, "depths"), list | tuple)


def _first(default: PreTrainedConfig, names: Iterable[str], otherwise: int) -> int:
    for name in names:
        value = _get(default, name)
        if isinstance(value, list | tuple) and value and isinstance(value[0], int):
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    return otherwise


def _layers_left(default: PreTrainedConfig, layers: int) -> list[int]:
    """Two layers, or as many as it takes to have each combination of types."""
    columns = [
        v
        for name in _fields(type(default))
        if isinstance(v := _get(default, name), list | tuple)
        and len(v) == layers
        and all(isinstance(x, str) for x in v)
    ]
    seen: dict[tuple[Any, ...], int] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        seen.setdefault(row, i)
    left = sorted(seen.values())[:_MOST_LAYERS]
    more = (i for i in range(layers) if i not in left)
    while len(left) < min(2, layers):
        left.append(next(more))
    return sorted(left)


def _tokens(default: PreTrainedConfig, keep: Keep) -> dict[str, Any]:
    """Special tokens within the vocabulary: the first ones, each its own."""
    if "token" in keep:
        return {}
    names = [n for n in _fields(type(default)) if re.search(r"(^|_)(token_(id|index)|unk_index|mask_index)$", n)]
    found: dict[str, Any] = {}
    vocabulary = min(_first(default, ("vocab_size",), 0) or VOCAB, VOCAB)
    spare = vocabulary - 1
    for name in names:
        value = _get(default, name)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int) and value >= 4:
            value, spare = spare, spare - 1
        if value is not None:
            found[name] = value
    return found
