"""The zoo: tiny models with random weights, one per family, and the inputs that every equality test gives them.

All dims are divisible by 8, so each model can be cut over 2 or 4 ranks; decoders have four layers and encoder-decoders
two and two, so each can be cut into four stages. Targets that are ignored (``-100``) are spread unevenly over the
batch, one sample has none but ignored ones. Every model is in eval mode with dropout 0, and the same at every call.

Hugging Face models cast to float32 in their norms and losses whatever their parameters are. :func:`float64` is the
context in which they, too, compute in float64 throughout: trace and run both the plan and the reference inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH, SEQ, HIDDEN, VOCAB, LAYERS = 8, 16, 64, 128, 4
IGNORED = -100

Inputs = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, the inputs for a batch of any size, and the loss (``None``: the model's output has it)."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor] | None = None


class _Float64(TorchFunctionMode):
    """Reads every ``float32`` in the code that it surrounds as ``float64``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def keep_layers(model: nn.Module, count: int) -> nn.Module:
    """Keep the first ``count`` of the layers of a decoder or an encoder of transformers, and return the model."""
    (layers,) = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    del layers[count:]
    model.config.num_hidden_layers = count  # type: ignore[union-attr]
    return model


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """The context in which new floating tensors and explicit casts to float32 are float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(default)


def whole_loss(case: Case, output: Any) -> Tensor:
    """The scalar loss of a case's output."""
    if case.loss is not None:
        return case.loss(output)
    return output["loss"] if isinstance(output, dict) else output.loss


def run(case: Case, model: nn.Module, inputs: Inputs) -> Any:
    """Call ``model`` the way its inputs ask for: a dict by keyword, a tuple by position."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(batch: int, length: int = SEQ, seed: int = 1) -> Tensor:
    """``[batch, length]`` tokens, none of them a padding or special one."""
    return torch.randint(4, VOCAB, (batch, length), generator=_generator(seed))


def _labels(batch: int, length: int = SEQ) -> Tensor:
    """``[batch, length]`` targets: sample ``i`` ignores a share of them that grows with ``i``, the last ignores all."""
    labels = _tokens(batch, length, seed=2)
    share = torch.linspace(0, 1, batch)[:, None] ** 2
    ignored = torch.rand((batch, length), generator=_generator(3), dtype=torch.float32) < share
    ignored[-1] = batch > 1
    return labels.masked_fill(ignored, IGNORED)


def _padding(batch: int, length: int = SEQ) -> Tensor:
    """``[batch, length]`` of ones and zeros: sample ``i`` has ``i % 5`` padded positions at its end."""
    kept = length - torch.arange(batch) % 5
    return (torch.arange(length) < kept[:, None]).long()


def _causal(batch: int) -> Inputs:
    return {"input_ids": _tokens(batch), "labels": _labels(batch)}


def _masked(batch: int) -> Inputs:
    return {"input_ids": _tokens(batch), "attention_mask": _padding(batch), "labels": _labels(batch)}


def _images(batch: int) -> Inputs:
    pixels = torch.randn((batch, 3, 16, 16), generator=_generator(4))
    return {"pixel_values": pixels, "labels": torch.arange(batch) % 8}


def _features(batch: int) -> Inputs:
    return (torch.randn((batch, HIDDEN), generator=_generator(5)), torch.randn((batch, 8), generator=_generator(6)))


def _sequences(batch: int) -> Inputs:
    return _tokens(batch), _labels(batch)


# --- Hugging Face -----------------------------------------------------------------------------------------------------

_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    max_position_embeddings=64,
    attention_dropout=0.0,
)
_ENCODER = _DECODER | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

# model type -> (auto class, its configuration, its inputs). What Hugging Face names differently is given by name.
_HUGGING_FACE: dict[str, tuple[str, dict[str, Any], Callable[[int], Inputs]]] = {
    "gpt2": (
        "AutoModelForCausalLM",
        dict(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=8, n_positions=64)
        | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
        _causal,
    ),
    "llama": ("AutoModelForCausalLM", _DECODER | _SPECIAL | dict(num_key_value_heads=4), _causal),
    "mistral": ("AutoModelForCausalLM", _DECODER | _SPECIAL | dict(num_key_value_heads=4, head_dim=8), _causal),
    "qwen3": ("AutoModelForCausalLM", _DECODER | _SPECIAL | dict(num_key_value_heads=4, head_dim=16), _causal),
    "gemma2": (
        "AutoModelForCausalLM",
        _DECODER | _SPECIAL | dict(num_key_value_heads=4, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
        _causal,
    ),
    "opt": (
        "AutoModelForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=2 * HIDDEN)
        | dict(num_hidden_layers=LAYERS, num_attention_heads=8, max_position_embeddings=64)
        | dict(dropout=0.0, attention_dropout=0.0, **_SPECIAL),
        _causal,
    ),
    "bloom": (
        "AutoModelForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=8)
        | dict(hidden_dropout=0.0, attention_dropout=0.0, **_SPECIAL),
        _causal,
    ),
    "bert": ("AutoModelForMaskedLM", _ENCODER | dict(pad_token_id=0), _masked),
    "roberta": ("AutoModelForMaskedLM", _ENCODER | dict(pad_token_id=1, bos_token_id=0, eos_token_id=2), _masked),
    "t5": (
        "AutoModelForSeq2SeqLM",
        dict(vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=2 * HIDDEN, num_layers=2, num_decoder_layers=2, num_heads=8)
        | dict(relative_attention_num_buckets=8, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0),
        _masked,
    ),
    "bart": (
        "AutoModelForSeq2SeqLM",
        dict(vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2, max_position_embeddings=64)
        | dict(encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2 * HIDDEN)
        | dict(decoder_ffn_dim=2 * HIDDEN, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
        | dict(decoder_start_token_id=2, forced_eos_token_id=2, **_SPECIAL),
        _masked,
    ),
    "vit": (
        "AutoModelForImageClassification",
        {k: v for k, v in _ENCODER.items() if k not in ("vocab_size", "max_position_embeddings", "attention_dropout")}
        | dict(image_size=16, patch_size=4, num_labels=8),
        _images,
    ),
}

# Families with an embedding and a head that may be one tensor, and whether they are by default.
_TIED = {
    "gpt2": True,
    "llama": False,
    "mistral": False,
    "qwen3": False,
    "gemma2": True,
    "opt": True,
    "bloom": True,
    "bert": True,
    "roberta": True,
    "t5": True,
    "bart": True,
}


def _hugging_face(family: str, tied: bool | None) -> nn.Module:
    import transformers

    auto, options, _ = _HUGGING_FACE[family]
    config = transformers.AutoConfig.for_model(family, use_cache=False, **options)
    if tied is not None:
        config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, auto).from_config(config)
    return model.eval()


# --- plain modules ----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head; gives the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 8, 2 * HIDDEN, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(self.embedding(tokens)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SkipMLP(nn.Module):
    """Eight layers; what the first makes is added before the last, over three stage borders when there are four."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Residual() for _ in range(8))
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        skip = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
        prediction = self.head(self.layers[-1](x + skip))
        return prediction, (prediction - target) ** 2


def _mean_error(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[1].mean()


def _plain(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


# --- the zoo ----------------------------------------------------------------------------------------------------------


def _cases() -> Iterator[Case]:
    for family, (_, _, inputs) in _HUGGING_FACE.items():
        tied = _TIED.get(family)
        yield Case(family, partial(_hugging_face, family, tied), inputs)
        if tied is not None:
            yield Case(f"{family}-{'untied' if tied else 'tied'}", partial(_hugging_face, family, not tied), inputs)
    yield Case("transformer-encoder", partial(_plain, Encoder), _sequences)
    yield Case("skip-mlp", partial(_plain, SkipMLP), _features, _mean_error)


CASES: dict[str, Case] = {case.name: case for case in _cases()}
