"""Capture a model for generation: its forward for a few new tokens, with the key/value caches as inputs.

transformers' models receive an object that keeps keys and values, and call its ``update`` in each attention. Here this
object has tensors that are inputs of the traced forward, and ``update`` writes to them by the operator
``partition::write_cache``. The caches are thus tensors of the program, with a batch dim, heads that ``tp`` shards, and
the pipeline stage of their layer. The same forward serves the prompt (``prefill``: many positions) and each further
token (``decode``: one position).

A model with an encoder and a decoder has two kinds of caches. The decoder's own attention (self-attention) writes to
the first kind at each token. Its attention to the encoder (cross-attention) has keys and values that depend on the
prompt alone. ``prefill`` runs the encoder, writes these keys and values once, and reads the first token of the decoder.
``decode`` reads them from the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.errors import PlanError
from partitioner.passes.capture.export import make_fake_copy, try_forward
from partitioner.passes.ops.caches import write_cache
from partitioner.passes.shard.repeated_heads import read_heads_once
from partitioner.pretrained.configuration import import_transformers
from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare


class GenerationError(PlanError):
    """Error: a plan cannot generate tokens with a model, or the request is malformed."""


CACHES, CROSS_CACHES, START = "caches", "cross_caches", "start"  # names of arguments of the traced forward
HEADS_DIM = 1  # the dim of heads of a cache [batch, heads, length, d]

CachePairs = list[tuple[Tensor, Tensor]]  # keys and values of each layer


@dataclass(frozen=True)
class CacheShapes:
    """The shapes and types of the cached keys and values of each attention layer of a model, in the order of its
    layers.

    ``layers``: for each layer ``(heads, d)`` of the keys and ``(heads, d)`` of the values; ``d`` is the size of a head.
    ``dtypes``: the type of each layer's keys and values. ``cross``: the shapes in the attention of a decoder to an
    encoder; empty without an encoder. ``hidden``: size of the encoder's results, 0 without one.
    """

    layers: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    dtypes: tuple[torch.dtype, ...]
    cross: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    hidden: int = 0

    def allocate(self, batch: int, length: int, cross: bool = False) -> CachePairs:
        """Return a pair of meta tensors (keys, values) for each attention layer: empty caches of shape ``[batch, heads,
        length, d]``. ``batch``: number of samples. ``length``: largest number of tokens of a sample. ``cross``: whether
        the caches are for cross-attention (to an encoder) instead of self-attention."""

        def make(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
            return torch.empty(batch, shape[0], length, shape[1], dtype=dtype, device="meta")

        pairs = zip(self.cross if cross else self.layers, self.dtypes, strict=True)
        return [(make(keys, dtype), make(values, dtype)) for (keys, values), dtype in pairs]

    def can_shard_heads(self, ranks: int) -> bool:
        """Return whether the heads of every cache can be divided among ``ranks`` ranks."""
        return all(heads % ranks == 0 for pair in (*self.layers, *self.cross) for heads, _ in pair)


def find_generated_module(name: str, model: nn.Module, path: str) -> nn.Module:
    """Return the submodule of ``model`` at ``path`` that generates tokens; ``model`` itself for an empty path.

    ``name``: name that the user gave to the generation, for errors. Raise :class:`GenerationError` if there is no such
    submodule.
    """
    try:
        return model.get_submodule(path)
    except AttributeError:
        known = ", ".join(repr(child) for child, _ in model.named_children())
        raise GenerationError(
            f"programs[{name!r}] has model={path!r}, but {type(model).__name__} has no such submodule; "
            f"expected the path of a submodule, such as {known or 'none: it has no submodules'}: correct it, "
            "or leave it out"
        ) from None


def find_cache_shapes(name: str, model: nn.Module, dtype: torch.dtype | None) -> CacheShapes:
    """Return the shapes and types of the key/value caches of the attention layers of ``model``, a causal model of
    transformers. ``name``: name that the user gave to the generation, for errors. ``dtype``: the type to which
    floating-point parameters are cast; ``None`` keeps their types.

    The forward of a copy without values is run on two tokens. Raise :class:`GenerationError` if it does not write keys
    and values by ``past_key_values``.
    """
    parameters = inspect.signature(model.forward).parameters
    encodes = has_encoder(model)
    asked = ("input_ids", "past_key_values", *(("decoder_input_ids", "encoder_outputs") if encodes else ()))
    missing = [p for p in asked if p not in parameters]
    if missing:
        raise GenerationError(
            f"programs[{name!r}]: the forward of {type(model).__name__} has no argument {' and no '.join(missing)}, so "
            "it cannot generate tokens; expected a model of transformers that reads tokens and writes tokens: leave "
            "the program out"
        )
    found: dict[int, tuple[Tensor, Tensor]] = {}
    crossing: dict[int, tuple[Tensor, Tensor]] = {}
    twin = make_fake_copy(model, dtype)
    tokens = twin.mode.from_tensor(torch.zeros(1, 2, dtype=torch.int64))
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
    cache = _make_cache(None, None, 0, found)
    if encodes:
        given["decoder_input_ids"] = tokens
        cache = _join_caches(cache, _make_cache(None, None, 0, crossing))
    output = try_forward(twin, (), given | {"past_key_values": cache})
    layers = [*range(len(found))]
    whole = sorted(found) == layers and (not encodes or sorted(crossing) == layers)
    if isinstance(output, Exception) or not found or not whole:
        why = (
            f"{type(output).__name__}: {output}"
            if isinstance(output, Exception)
            else f"it writes layers {sorted(found)}" + (f" and, for the encoder, {sorted(crossing)}" if encodes else "")
        )
        raise GenerationError(
            f"programs[{name!r}]: {type(model).__name__} cannot generate tokens in a plan: expected a forward that "
            "writes the "
            f"keys and values of every layer to past_key_values, and nothing else ({why}); leave the program out"
        )
    return CacheShapes(
        tuple((_heads_of(found[i][0]), _heads_of(found[i][1])) for i in layers),
        tuple(found[i][0].dtype for i in layers),
        tuple((_heads_of(crossing[i][0]), _heads_of(crossing[i][1])) for i in layers) if encodes else (),
        int(output.encoder_last_hidden_state.shape[-1]) if encodes else 0,
    )


def has_encoder(model: nn.Module) -> bool:
    """Return whether ``model`` has an encoder, which reads the prompt, and a decoder, which generates."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def find_first_token(name: str, model: nn.Module) -> int | None:
    """Return the token with which the decoder of ``model`` begins; ``None`` for a model without an encoder, which
    begins with the prompt. ``name``: name that the user gave to the generation, for errors.

    Raise :class:`GenerationError` if the configuration does not name this token.
    """
    if not has_encoder(model):
        return None
    for key in ("decoder_start_token_id", "bos_token_id"):
        for config in (getattr(model, "generation_config", None), model.config):
            token = getattr(config, key, None)
            if isinstance(token, int):
                return token
    raise GenerationError(
        f"programs[{name!r}]: the configuration of {type(model).__name__} has no start token of the decoder; expected "
        "an integer: set model.config.decoder_start_token_id"
    )


def _heads_of(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.shape[1]), int(tensor.shape[3])


def build_inputs(
    model: nn.Module, shapes: CacheShapes, batch: int, prompt: int, length: int, *, prefill: bool
) -> dict[str, Any]:
    """Return the inputs of the forward of ``model`` that :func:`generating` traces, as meta tensors by argument name:
    ``batch`` samples, and key/value caches for ``length`` tokens. With ``prefill``, the inputs are for the program that
    reads the whole prompt at once; otherwise for the program that reads one token. In a model with an encoder, the
    encoder reads the prompt, and the decoder reads one token in both programs.

    ``shapes``: shapes of the cached keys and values. ``prompt``: number of tokens of each sample.
    """

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    caches: dict[str, Any] = {START: integers(), CACHES: shapes.allocate(batch, length)}
    if shapes.cross:
        encoded = {"input_ids": integers(batch, prompt)} if prefill else {}
        caches[CROSS_CACHES] = shapes.allocate(batch, prompt, cross=True)
        return encoded | {
            "attention_mask": integers(batch, prompt),
            "decoder_input_ids": integers(batch, 1),
            **caches,
        }
    positions = prompt if prefill else 1
    inputs = {"input_ids": integers(batch, positions), "attention_mask": integers(batch, length)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = integers(batch, positions)
    return inputs | caches


def prepare_forward(model: nn.Module, inputs: Any, precision: str | None, grouped: bool) -> PreparedModel:
    """Return ``model`` prepared to be planned for ``inputs``, the inputs of a step of generation. It must be called
    inside the context of :func:`generating`, where the forward of ``model`` reads and writes key/value caches.

    ``precision``: the number format to compute in, such as ``bf16``; ``None``: the model's own type. ``grouped``:
    whether the attention kernels can read the caches as they are if several query heads read one key head
    (grouped-query attention), as on CPUs. Otherwise attention reads a copy of the caches with one key head per query
    head.
    """
    prepared = prepare(model, inputs, objective="infer", precision=precision)
    if grouped:
        folded = prepared.at(None)[0]
        for block in folded.blocks.values():
            read_heads_once(block)
        prepared.captured_as(None, folded)
    return prepared


@contextmanager
def generating(model: nn.Module, path: str = "", hidden: int = 0) -> Iterator[None]:
    """Return a context manager within which ``model`` has another forward: it takes new tokens and the caches, writes
    to the caches, and returns the logits of the last position, ``[batch, vocabulary]``.

    ``path``: the submodule that reads the tokens; empty: the model itself. ``hidden``: size of its encoder's results, 0
    without an encoder. The class of the model is replaced by a subclass, so that copies of the model have this forward,
    too, and all parameters keep their names.
    """
    kind, generated = type(model), model.get_submodule(path)
    accepted = inspect.signature(generated.forward).parameters

    def call(module: nn.Module, **given: Any) -> Tensor:
        """Run the forward of ``module``, or of its submodule that reads the tokens, on those of the arguments ``given``
        that it accepts. Return the logits of the last position.
        """
        given = {key: value for key, value in given.items() if key in accepted and value is not None}
        output = module.get_submodule(path)(**given) if path else kind.forward(module, **given)
        logits: Tensor = output.logits
        return logits[:, -1]

    def forward(
        self: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        start: Tensor,
        caches: CachePairs,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the model on the new tokens ``input_ids`` ``[batch, positions]``, write their keys and values to
        ``caches``, and return the logits of the last token.

        ``attention_mask`` ``[batch, length]``: 1 at the positions of the caches that hold a token of the sample.
        ``start``: position in the caches of the first new token, 0-dimensional. ``caches``: cached keys and values of
        each layer. ``position_ids`` ``[batch, positions]``: positions of the new tokens; ``None`` if the model takes
        none.
        """
        cache = _make_cache(caches, start, caches[0][0].shape[2], {})
        read = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return call(self, **read, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def forward_decoder(
        self: nn.Module,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        start: Tensor,
        caches: CachePairs,
        cross_caches: CachePairs,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the last of the new tokens ``decoder_input_ids`` ``[batch, positions]``.

        ``input_ids`` ``[batch, prompt]``: the tokens of the encoder; ``None``: ``cross_caches`` already have the keys
        and values of the encoder's results. ``attention_mask`` ``[batch, prompt]``: 1 at tokens of the sample.
        ``start``: position in ``caches`` of the first new token, 0-dimensional.
        """
        batch, _, length, _ = caches[0][0].shape
        cross = _make_cross_cache(cross_caches, known=input_ids is None)
        cache = _join_caches(_make_cache(caches, start, length, {}), cross)
        given: dict[str, Any] = {"input_ids": input_ids}
        if input_ids is None:  # the decoder only reads its shape
            given["encoder_outputs"] = (caches[0][0].new_zeros(batch, attention_mask.shape[1], hidden),)
        read = {"attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
        past = attention_mask.new_ones(batch, length)  # later places are masked as not yet read
        return call(
            self, **given, **read, decoder_attention_mask=past, past_key_values=cache, use_cache=True, logits_to_keep=1
        )

    configs = _configs_with_cache(model)
    traced = forward_decoder if has_encoder(generated) else forward
    try:
        model.__class__ = type(kind.__name__, (kind,), {"forward": traced, "__module__": kind.__module__})
        for config in configs:
            config.use_cache = False  # the caches are inputs
        yield
    finally:
        model.__class__ = kind
        for config in configs:
            config.use_cache = True


def _configs_with_cache(model: nn.Module) -> list[Any]:
    """Return the transformers configurations of the modules of ``model`` in which ``use_cache`` is on, that is, whose
    modules create a key/value cache of their own. Each configuration is returned once.
    """
    found = {id(c): c for m in model.modules() if getattr(c := getattr(m, "config", None), "use_cache", False) is True}
    return [*found.values()]


def _make_cache(
    caches: CachePairs | None,
    start: Tensor | None,
    length: int,
    found: dict[int, tuple[Tensor, Tensor]],
) -> Any:
    """Return a key/value cache that transformers' models accept as ``past_key_values``.

    ``caches``: keys and values of each attention layer as ``[batch, heads, length, d]``. ``start``: the position in
    ``caches`` from which new keys and values are written. If both are ``None``, nothing is stored, and the model
    attends to the new keys and values only. ``length``: number of positions of ``caches``. ``found``: a dict to which
    each write of the model adds: index of the layer -> new keys and values.
    """
    import_transformers()  # raises an error of this project if transformers is missing
    from transformers.cache_utils import Cache, StaticLayer

    class ProgramCacheLayer(StaticLayer):  # type: ignore[no-untyped-call]
        """The key/value cache of one attention layer, with the interface that transformers requires. Its tensors are
        passed to the model's forward as inputs, so that a program keeps them between calls.
        """

        is_sliding = False

        def __init__(self, index: int) -> None:
            super().__init__(length)
            self.index = index
            self.is_initialized = True
            self.cumulative_length = 0 if start is None else start  # type: ignore[assignment]

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing. Transformers calls this before the first write to allocate the tensors of the layer; here
            they exist already. The arguments are not used."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Write the keys and values of new tokens to the cache of this layer, and return the keys and values of all
            positions. Without caches, return the new ones unchanged. The other arguments are not used. ``key_states``,
            ``value_states``: the new keys and values, ``[batch, heads, new tokens, d]``."""
            found[self.index] = key_states, value_states
            if caches is None:
                return key_states, value_states
            self.keys, self.values = caches[self.index]
            self.keys = write_cache(self.keys, key_states, start)
            self.values = write_cache(self.values, value_states, start)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Return two numbers for the attention mask: how many keys it covers (all positions of the cache, or
            ``query_length`` without caches), and the position of the first one, 0. ``query_length``: number of new
            tokens.
            """
            return (query_length if caches is None else length), 0

    class ProgramCache(Cache):
        """The key/value caches of all attention layers of a model, with the interface that transformers requires.
        Layers are added when the model first writes to them.
        """

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Write the keys and values of new tokens to the cache of one layer, and return the keys and values of all
            positions. The other arguments are not used. ``key_states``, ``value_states``: the new keys and values,
            ``[batch, heads, new tokens, d]``. ``layer_idx``: index of the layer."""
            layers: list[Any] = self.layers
            while len(layers) <= layer_idx:
                layers.append(ProgramCacheLayer(len(layers)))
            written: tuple[Tensor, Tensor] = layers[layer_idx].update(key_states, value_states)
            return written

    return ProgramCache(layers=[ProgramCacheLayer(i) for i in range(len(caches or ()) or 1)])


def _make_cross_cache(caches: CachePairs, known: bool) -> Any:
    """Return an object for the keys and values of an encoder's results in cross-attention, to which each layer of a
    decoder writes once. ``caches``: keys and values of each layer. ``known``: whether they have been written already.
    """
    length = caches[0][0].shape[2]
    cache = _make_cache(caches, caches[0][0].new_zeros((), dtype=torch.int64), length, {})
    for layer, (keys, values) in zip(cache.layers, caches, strict=True):
        layer.cumulative_length = length if known else 0
        layer.keys, layer.values = keys, values
    return cache


def _join_caches(own: Any, cross: Any) -> Any:
    """Return the object that transformers' decoders accept as ``past_key_values``: the cache ``own`` of self-attention,
    and the cache ``cross`` of the attention to an encoder.
    """
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(own, cross)


def is_cache(path: str) -> bool:
    """Return whether the input with the path ``path`` of the traced forward is a key/value cache, such as
    ``caches.0.1``."""
    return path.startswith((f"{CACHES}.", f"{CROSS_CACHES}."))
