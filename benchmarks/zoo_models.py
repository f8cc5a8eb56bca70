"""Any architecture of transformers as a tiny model with random weights, one batch of inputs, and a loss.

What a model takes is read off its ``forward``: tokens, pixels, a waveform or a spectrogram, in the shapes that are
usual; the first that the model accepts is used. Every model is in eval mode, and the same at every call.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from benchmarks.zoo_configs import IMAGE, VOCAB, attempts, repaired, tiny_config

BATCH, SEQ, IGNORED = 4, 8, -100
_MOST_PARAMETERS = 40_000_000
_MOST_TRIALS = 24
_MOST_REPAIRS = 4

# kind of task -> what transformers calls its mapping, the labels to try, whether its tokens are padded
KINDS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "causal": ("CAUSAL_LM", ("tokens",), False),
    "masked": ("MASKED_LM", ("tokens",), True),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", ("tokens",), True),
    "image": ("IMAGE_CLASSIFICATION", ("class",), False),
    "audio": ("AUDIO_CLASSIFICATION", ("class",), False),
    "ctc": ("CTC", ("few",), False),
    "speech": ("SPEECH_SEQ_2_SEQ", ("tokens",), False),
}


class ZooError(ValueError):
    """An architecture of which no small model could be made: ``step`` says where that ended."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Sample:
    """A model, one whole batch of keyword arguments, and the loss (``None``: the output has it)."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def architectures() -> dict[str, str]:
    """``kind:model_type`` -> the name of the model's class."""
    found: dict[str, str] = {}
    for kind, (mapping, _, _) in KINDS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, name in sorted(names.items()):
            found[f"{kind}:{model_type}"] = name if isinstance(name, str) else name[0]
    return found


def build(name: str) -> Sample:
    """The tiny model of ``kind:model_type``. Raises :class:`ZooError`."""
    kind, model_type = name.split(":", 1)
    cls = getattr(transformers, architectures()[name], None)
    if cls is None:
        raise ZooError("build", f"transformers has no {architectures()[name]} to import here")
    first: ZooError | None = None
    for attempt in attempts():
        keep = attempt
        for _ in range(_MOST_REPAIRS):
            try:
                return _build(cls, model_type, kind, keep)
            except ZooError as error:
                first = first or error
                before, keep = keep, repaired(keep, str(error))
            if keep == before:
                break
        if "requires the" in str(first) or "not installed" in str(first).lower():
            break
    assert first is not None
    raise first


def _build(cls: Any, model_type: str, kind: str, keep: frozenset[str]) -> Sample:
    try:
        config = _part_for(cls, tiny_config(model_type, keep))
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size = sum(p.numel() for p in cls(config).parameters())
        if size > _MOST_PARAMETERS:
            raise ZooError("build", f"the smallest has {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = cls(config).eval()
    except ZooError:
        raise
    except Exception as error:
        raise ZooError("build", _said(error)) from error
    _draw(model)
    return _with_inputs(model, config, kind)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _part_for(cls: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that the class takes: this one, or the part of it that it is made for."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((v for v in vars(config).values() if isinstance(v, wanted)), config)


def _draw(model: nn.Module) -> None:
    """Numbers for parameters that start as a constant, so that a wrong order or a missing sum of them shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel() > 1
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        for module in model.modules():
            if isinstance(getattr(module, "running_var", None), Tensor):
                module.running_mean.add_(torch.randn(module.running_mean.shape, generator=generator) * 0.1)  # type: ignore[union-attr]


# --- inputs -----------------------------------------------------------------------------------------------------------


def _with_inputs(model: nn.Module, config: PreTrainedConfig, kind: str, more: tuple[str, ...] = ()) -> Sample:
    """The first inputs that the model accepts; ``more``: parameters that it asks for by its errors."""
    failure: Exception | None = None
    without: Sample | None = None
    for inputs in islice(_candidates(model, config, kind, more), _MOST_TRIALS):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = model(**inputs)
        except Exception as error:
            failure = failure or error
            continue
        found = getattr(output, "loss", None)
        if isinstance(found, Tensor) and found.dim() == 0 and bool(found.isfinite()):
            return Sample(model, inputs, None)
        if without is None and "labels" not in inputs and _leaves(output):
            without = Sample(model, inputs, mean_square)
    if without is not None:
        return without
    if failure is None:
        raise ZooError("forward", "no finite loss")
    parameters = inspect.signature(model.forward).parameters
    asked = [n for n in re.findall(r"\w+", str(failure)) if n in parameters and n not in ("labels", "self")]
    if asked and not more:
        return _with_inputs(model, config, kind, (asked[0],))
    raise ZooError("forward", _said(failure))


def _leaves(output: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def without_labels(sample: Sample) -> Sample:
    """The model without its own loss; a decoder is then given its tokens."""
    inputs = {k: v for k, v in sample.inputs.items() if k != "labels"}
    names = inspect.signature(sample.model.forward).parameters
    if "decoder_input_ids" in names and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = sample.inputs["labels"].clamp(min=0)
    return Sample(sample.model, inputs, mean_square)


def mean_square(output: Any) -> Tensor:
    """The loss of a model that has none: the mean square of what it gives first."""
    return (_leaves(output)[0] ** 2).mean()


def _candidates(
    model: nn.Module, config: PreTrainedConfig, kind: str, more: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Arguments to try, those with labels first."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if kind == "image" and not main.endswith("_ids") and "pixel_values" in parameters:  # it takes inputs of many kinds
        main = "pixel_values"
    if main not in parameters:
        main = next(iter(parameters))
    _, labels, padded = KINDS[kind]
    required = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and n != main
    ]
    required += [n for n in more if n not in (main, *required)]
    makers = [[(n, value) for value in _values(n, config, padded)] for n in (main, *required) if n != "labels"]
    if padded and "attention_mask" in parameters and "attention_mask" not in required and main == "input_ids":
        makers.append([("attention_mask", _padding())])
    for label in (*labels, ""):
        if label and "labels" not in parameters:
            continue
        for given in product(*makers):
            inputs = dict(given)
            if label:
                yield inputs | {"labels": _labels(label, config)}
            else:
                yield inputs
                if "decoder_input_ids" in parameters:
                    yield inputs | {"decoder_input_ids": _tokens(config, 2)}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _vocabulary(config: Any) -> int:
    sizes = [getattr(c, "vocab_size", None) for c in (config, *vars(config).values())]
    return min((s for s in sizes if isinstance(s, int) and s > 0), default=VOCAB)


def _tokens(config: PreTrainedConfig, seed: int = 1) -> Tensor:
    """``[batch, length]`` tokens from the middle of the vocabulary, where no special ones are."""
    most = _vocabulary(config)
    return torch.randint(min(5, most // 4), max(most - 28, most // 2), (BATCH, SEQ), generator=_generator(seed))


def _labels(kind: str, config: PreTrainedConfig) -> Tensor:
    if kind == "class":
        return torch.arange(BATCH) % max(1, min(int(getattr(config, "num_labels", 2)), 8))
    if kind == "few":
        return _tokens(config, 2)[:, :3]
    share = torch.linspace(0, 0.8, BATCH)[:, None]
    ignored = torch.rand((BATCH, SEQ), generator=_generator(3)) < share
    return _tokens(config, 2).masked_fill(ignored, IGNORED)


def _padding() -> Tensor:
    """``[batch, length]`` of ones and zeros: sample ``i`` has ``i % 3`` padded positions at its end."""
    return (torch.arange(SEQ) < (SEQ - torch.arange(BATCH) % 3)[:, None]).long()


_FEATURES = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")


def _values(name: str, config: PreTrainedConfig, padded: bool) -> Iterator[Any]:
    """What a parameter of this name may be given."""
    if name == "attention_mask":
        yield _padding() if padded else torch.ones(BATCH, SEQ, dtype=torch.long)
    elif name.endswith("input_ids"):
        yield _tokens(config, 1 if name == "input_ids" else 2)
    elif name.startswith("pixel_values"):
        channels = _number(config, ("num_channels", "in_channels"), 3)
        sizes = dict.fromkeys((_number(config, ("image_size",), IMAGE), IMAGE, 32, 128, 224))
        for size, shape in product(sizes, ((BATCH,), (BATCH, _number(config, ("num_frames",), 2)))):
            yield torch.randn(*shape, channels, size, size, generator=_generator(4))
    elif name.startswith(("input_values", "input_features", "audio_values", "features")):
        mels = _number(config, _FEATURES, 80)
        frames = _number(config, ("max_source_positions", "max_length"), 64)
        raw = [torch.randn(BATCH, n, generator=_generator(5)) for n in (2000, 8000)]
        spectra = [
            torch.randn(BATCH, *shape, generator=_generator(5))
            for n in dict.fromkeys((2 * frames, frames, 64, 128))
            for shape in ((mels, n), (n, mels))
        ]
        spectra += [torch.randn(BATCH, 64, n * mels, generator=_generator(5)) for n in (2, 4)]  # several frames as one
        yield from (*raw, *spectra) if name == "input_values" else (*spectra, *raw)
    else:
        yield _tokens(config, 1)
        yield torch.ones(BATCH, SEQ, dtype=torch.long)


def _number(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    for part in (config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))):
        for name in names:
            try:
                value = getattr(part, name, None)
            except RuntimeError:  # one per layer, and not one for all
                continue
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
    return otherwise
