"""Build a batch for a model of transformers from the arguments of its ``forward`` and the fields of its configuration.

A model's main input is tokens, pixels, a waveform or a spectrogram. Where the configuration leaves the shape open (the
order of the dims of a spectrogram, the size of an image), the shapes that are usual are tried on the meta device, and
the first that the model accepts is taken. A model that reads text with images gets one image for each sample, and as
many placeholders in the text as the image has features.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partitioner.pretrained.configuration import Configuration, PretrainedError, build_error, read_number

Labels = Literal["tokens", "class", "classes", "text", "few", "pairs"]

_LENGTH = 2048  # tokens of a sample, if the model has as many positions
_MULTIPLE = 64  # a chosen length is a multiple of it: it then divides well
_SECONDS, _RATE = 10, 16_000  # seconds of a waveform, and samples per second
_IMAGE = 224  # pixels of a side, if neither the configuration nor a preprocessor says how many
_VOCABULARY = 32_000
_TEXT = 64  # tokens of a transcript that is scored position by position
_MOST_TRIALS = 40
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_MELS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim")
_KINDS = {"images": ("pixel_values",), "audio": ("input_features", "input_values", "audio_values", "input_audio")}
_FRAMES = ("max_source_positions", "max_length")


@dataclass(frozen=True)
class BatchRequest:
    """The kind and the size of a batch to build for a model.

    Attributes:
        labels: kind of the targets: ``tokens``: one for each token of the sample; ``class``: one for each sample;
            ``classes``: a class for each token; ``text``: a transcript; ``few``: a transcript that is shorter than the
            sample; ``pairs``: none, since each image belongs to the text of its own sample.
        samples: number of samples.
        length: length of a sample: tokens, samples of a waveform, or frames of a spectrogram. ``None``: the default of
            the model.
        trains: whether the batch has labels.
    """

    labels: Labels
    samples: int
    length: int | None = None
    trains: bool = True


@dataclass(frozen=True)
class InputSpec:
    """Shape and content of one input of a model. The input consists of random integers from ``low`` to below ``high``,
    or of normally distributed numbers if ``high`` is 0.

    ``shape``: shape of the tensor. ``placeholder``: for token ids: the id that stands for a feature of an image.
    ``places``: how many of these ids follow the first token of each sample. ``fixed``: if it is not ``None``, the input
    is this Python value instead of a tensor. ``unit``: whether numbers are uniform from 0 to below 1 instead of
    normally distributed, because the model rounds some of them down to an index.
    """

    shape: tuple[int, ...]
    low: int = 0
    high: int = 0
    placeholder: int = 0
    places: int = 0
    fixed: bool | None = None
    unit: bool = False

    def make(self, device: str, generator: torch.Generator) -> Any:
        """Return a tensor with the shape of this spec: on the CPU, filled with random numbers of ``generator``, or, if
        ``device`` is ``"meta"``, on the meta device without values. If :attr:`fixed` is set, return it instead."""
        if self.fixed is not None:
            return self.fixed
        if device == "meta":
            return torch.empty(self.shape, dtype=torch.int64 if self.high else torch.float32, device="meta")
        if not self.high:
            return (torch.rand if self.unit else torch.randn)(self.shape, generator=generator)
        made = torch.randint(self.low, self.high, self.shape, generator=generator)
        if self.places:
            made[:, 1 : 1 + self.places] = self.placeholder
        return made


def choose_batch(model: nn.Module, found: Configuration, request: BatchRequest) -> dict[str, InputSpec]:
    """Return a batch that ``model``, which is on the meta device, accepts, as a dict: argument name -> shape and
    content of the input. ``found``: the model's configuration. ``request``: kind and size of the batch.

    Several batches are tried with the model on the meta device; the first that it accepts is returned. Raise
    :class:`PretrainedError` if it accepts none, or if labels are requested and the model takes none.
    """
    _check_length(found.config, request)
    every = list(islice(_list_batches(model, found, request), _MOST_TRIALS))
    if len(every) == 1:
        return every[0]
    first: Exception | None = None
    unsure: dict[str, InputSpec] | None = None
    training = model.training
    model.eval()
    for inputs in every:
        try:
            with torch.no_grad():
                model(**make_batch(inputs, "meta", dtype=find_dtype(model)))
        except Exception as error:
            if _wants_numbers(error):
                unsure = unsure or inputs
            else:
                first = first or error
        else:
            break
    else:
        if unsure is None:
            assert first is not None
            shapes = ", ".join(f"{name} {list(spec.shape)}" for name, spec in every[0].items())
            raise build_error(
                first,
                f"{type(model).__name__} accepts none of the batches that were tried, the first with {shapes}",
                "correct the fields of the configuration, or give FILE.py:FUNCTION, your own function that returns the "
                "model and a batch",
            )
        inputs = unsure
    model.train(training)
    return inputs


def _wants_numbers(error: Exception) -> bool:
    """Return whether ``error`` was raised because a model that ran on meta tensors tried to read the values of tensors,
    which meta tensors do not have. The shapes of the inputs may be right in this case.
    """
    return isinstance(error, NotImplementedError) or "on meta tensors" in str(error)


def find_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the floating-point parameters of ``model``. Its inputs have this dtype, too, unless they are
    integers.
    """
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def make_batch(
    specs: Mapping[str, InputSpec], device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return a batch, as a dict: argument name -> a tensor or a fixed value. ``specs``: argument name -> shape and
    content of the input. ``device``: ``"meta"``: tensors without values; otherwise tensors are on the CPU, with random
    values from ``seed``. ``dtype``: the dtype of floating-point tensors."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: spec.make(device, generator) for name, spec in specs.items()}
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in made.items()
    }


def choose_length(config: Any) -> int:
    """Return the number of tokens of a sample if the user does not choose one, for the transformers configuration
    ``config``: 2,048, or as many as the model has positions, rounded down to a multiple of 64.
    """
    return min(longest_sample(config) or _LENGTH, _LENGTH)


def longest_sample(config: Any) -> int | None:
    """Return the largest number of tokens of a sample for a model with the transformers configuration ``config``: its
    number of positions, rounded down to a multiple of 64 (if it is at least 64), since some models reserve a few
    positions. ``None`` if the configuration has no limit."""
    most = read_number(config, *_POSITIONS)
    return None if most is None else most // _MULTIPLE * _MULTIPLE or most


def _check_length(config: Any, request: BatchRequest) -> None:
    most = read_number(config, *_POSITIONS)
    if (
        request.length is not None
        and most is not None
        and request.labels in ("tokens", "classes")
        and request.length > most
    ):
        raise PretrainedError(
            f"a sample of {request.length:,} tokens is longer than the {most:,} positions of the model; give a "
            "smaller --seq, or increase max_position_embeddings in the configuration"
        )


def _list_batches(model: nn.Module, found: Configuration, request: BatchRequest) -> Iterator[dict[str, InputSpec]]:
    """Yield the batches to try with ``model``, the most usual first, each as a dict: argument name -> shape and content
    of the input. ``found``: the model's configuration. ``request``: kind and size of the batch. Raise
    :class:`PretrainedError` if labels are requested and the model takes none."""
    if type(model).forward is nn.Module.forward:
        raise PretrainedError(
            f"{type(model).__name__} has no forward, since its parts run one after another; give FILE.py:FUNCTION with "
            "one of them, or name the class of a part in the field architectures"
        )
    parameters = inspect.signature(model.forward).parameters
    needed = _list_needed(parameters)
    sizes = next((n for n in parameters if n == "spatial_shapes" or (n in needed and n.endswith("grid_thw"))), None)
    text_only = reads_images(model) and request.labels == "tokens" and sizes not in needed
    if sizes is not None and not text_only:
        raise PretrainedError(
            f"{type(model).__name__} reads the sizes of images from the values of {sizes}, on which the shapes in its "
            "forward depend, and a plan has fixed shapes; give FILE.py:FUNCTION, your own function that returns a "
            "model for images of one size"
        )
    if request.labels == "pairs":
        yield from _list_pairs(model, found, request)
        return
    if reads_images(model) and request.labels == "tokens":
        yield from _list_image_texts(model, found, request)
    main = str(getattr(model, "main_input_name", "input_ids"))
    if request.labels == "class" and "pixel_values" in parameters and not main.endswith("_ids"):
        main = "pixel_values"  # of a model that takes inputs of several kinds
    if main not in parameters:
        main = next(iter(parameters))
    label: dict[str, InputSpec] = {}
    if request.trains:
        if "labels" not in parameters:
            raise PretrainedError(
                f"{type(model).__name__} takes no labels, so it has no loss; plan it for inference (--objective "
                "infer), or give FILE.py:FUNCTION with a loss"
            )
        label = {"labels": _label_spec(found.config, request)}
    elif "decoder_input_ids" in parameters:
        label = {"decoder_input_ids": _token_spec(found.config, request.samples, _text_length(found.config, request))}
    mains = [main, "input_ids"] if reads_images(model) and request.labels == "tokens" else [main]
    for first in dict.fromkeys(mains):  # a text without images is tried last
        names = [n for n in dict.fromkeys((first, *needed)) if n != "labels"]
        makers = [[(n, spec) for spec in _list_specs(n, found, request)] for n in names]
        for given in product(*(maker for maker in makers if maker)):
            yield dict(given) | label
    if len(mains) > 1:
        yield from _list_image_texts(model, found, request, lists=True)


def _list_needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the arguments without default in ``parameters``, the arguments of a model's forward."""
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def reads_images(model: nn.Module) -> bool:
    """Return whether ``model`` reads text with images."""
    return {"input_ids", "pixel_values"} <= inspect.signature(model.forward).parameters.keys()


def list_left_out(model: nn.Module, inputs: Collection[str]) -> list[str]:
    """Return the kinds of input, ``images`` and ``audio``, that ``model`` can read besides text and that a batch does
    not have. ``inputs``: the names of the batch's inputs.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in inputs:
        return []
    read = {kind: [name for name in names if name.startswith(starts)] for kind, starts in _KINDS.items()}
    return [kind for kind, found in read.items() if found and not any(name in inputs for name in found)]


def _list_pairs(model: nn.Module, found: Configuration, request: BatchRequest) -> Iterator[dict[str, InputSpec]]:
    """Yield the batches to try with ``model``, whose loss compares all images of a batch with all texts. Each batch is
    a dict: argument name -> shape and content of the input. ``found``: the model's configuration. ``request``: kind and
    size of the batch. Raise :class:`PretrainedError` if the model has no such loss."""
    parameters = inspect.signature(model.forward).parameters
    images = next((n for n in ("pixel_values", "pixel_values_videos") if n in parameters), None)
    if images is None or "input_ids" not in parameters:
        raise PretrainedError(
            f"{type(model).__name__} does not read images with texts; give FILE.py:FUNCTION, your own function that "
            "returns a model and a batch"
        )
    if request.trains and "return_loss" not in parameters:
        raise PretrainedError(
            f"{type(model).__name__} has no loss that compares images with texts; plan it for inference (--objective "
            "infer), or give FILE.py:FUNCTION with a loss"
        )
    text = _token_spec(found.config, request.samples, request.length or choose_length(found.config))
    for pixels in _list_specs(images, found, request):
        loss = {"return_loss": InputSpec((), fixed=True)} if request.trains else {}
        yield {"input_ids": text, images: pixels} | loss


def _list_image_texts(
    model: nn.Module, found: Configuration, request: BatchRequest, *, lists: bool = False
) -> Iterator[dict[str, InputSpec]]:
    """Yield the batches to try with ``model``, which reads text with images. Each batch has one image per sample, and
    is a dict: argument name -> shape and content of the input. ``lists``: whether images have a further dim of size 1
    behind the batch, for the list of images of a sample.

    Nothing is yielded if labels are requested and the model takes none, or if the model joins images of different sizes
    to one list of patches, so that images have no fixed shape. ``found``: the model's configuration. ``request``: kind
    and size of the batch. Raise :class:`PretrainedError` if a sample is too short for the placeholders of an image.
    """
    parameters = inspect.signature(model.forward).parameters
    shaped = any(name.endswith("grid_thw") or name == "spatial_shapes" for name in parameters)
    if shaped or (request.trains and "labels" not in parameters):
        return
    length = request.length or choose_length(found.config)
    text = _token_spec(found.config, request.samples, length)
    placeholder = read_number(found.config, "image_token_id", "image_token_index")
    kinds = {"token_type_ids": replace(text, low=0, high=1)} if "token_type_ids" in parameters else {}
    needed = [n for n in _list_needed(parameters) if n not in ("input_ids", "pixel_values", "labels")]
    kinds |= {name: next(_list_specs(name, found, request)) for name in needed}
    for pixels in _list_specs("pixel_values", found, request):
        if lists:
            if len(pixels.shape) != 4:
                continue
            pixels = replace(pixels, shape=(pixels.shape[0], 1, *pixels.shape[1:]))
        places = 0 if placeholder is None else _count_image_features(model, pixels)
        if places >= length:
            raise PretrainedError(
                f"a sample of {length:,} tokens is too short for the {places:,} placeholders of an image; give a "
                f"--seq above {places:,}"
            )
        marked = replace(text, placeholder=placeholder or 0, places=places)
        batch = {"input_ids": marked, "pixel_values": pixels} | kinds
        if lists:  # says which of the images a token sees
            seen = InputSpec((*text.shape, pixels.shape[1]), low=1, high=2)
            batch |= {n: seen for n in parameters if n.startswith("image") and n.endswith("attention_mask")}
        yield batch | ({"labels": text} if request.trains else {})


def _count_image_features(model: nn.Module, pixels: InputSpec) -> int:
    """Return how many features ``model``, which is on the meta device, computes from one image; 0 if this cannot be
    found out. ``pixels``: shape and content of the images.
    """
    try:
        with torch.no_grad():
            images = make_batch({"pixel_values": pixels}, "meta", dtype=find_dtype(model))
            made: Any = model.get_image_features(**images)  # type: ignore[operator]
    except Exception:  # a model whose images need more inputs than pixels
        return 0
    made = getattr(made, "pooler_output", made)
    parts = [x for x in (made if isinstance(made, list | tuple) else [made]) if isinstance(x, Tensor) and x.dim() > 1]
    return sum(x.shape[:-1].numel() for x in parts) // pixels.shape[0]


def _label_spec(config: Any, request: BatchRequest) -> InputSpec:
    if request.labels in ("class", "classes"):
        classes = getattr(config, "num_labels", None)
        if classes == 1 and request.labels == "class":  # a regression
            return InputSpec((request.samples, 1))
        length = () if request.labels == "class" else (request.length or choose_length(config),)
        return InputSpec((request.samples, *length), high=classes if isinstance(classes, int) and classes > 1 else 2)
    return _token_spec(config, request.samples, _text_length(config, request))


def _text_length(config: Any, request: BatchRequest) -> int:
    """Return the number of tokens of one sample in the labels, and in the input of a decoder. It is a fixed small
    number, the model's number of positions or the requested length, depending on the kind of labels. ``config``: the
    model's transformers configuration. ``request``: the requested batch.
    """
    if request.labels == "few":
        return _TEXT
    if request.labels == "text":
        return read_number(config, "max_target_positions", *_POSITIONS) or choose_length(config)
    return request.length or choose_length(config)


def _token_spec(config: Any, samples: int, length: int) -> InputSpec:
    """Return the spec of an input of token ids ``[samples, length]`` from the middle of the vocabulary, where no
    special tokens are. ``config``: the model's transformers configuration, which has the size of the vocabulary.
    """
    try:
        text = getattr(config, "get_text_config", lambda: config)()
    except ValueError:  # of a model with several texts, such as a prompt and codes of sound
        text = config
    size = read_number(text, "vocab_size") or read_number(config, "vocab_size") or _VOCABULARY
    return InputSpec((samples, length), min(5, size // 4), max(size - size // 8, 1))


def _list_specs(name: str, found: Configuration, request: BatchRequest) -> Iterator[InputSpec]:
    """Yield the shapes and contents of tensors that may be passed for the model's argument ``name``, such as
    ``pixel_values``, the most usual first. ``found``: the model's configuration. ``request``: kind and size of the
    batch.
    """
    config, samples = found.config, request.samples
    if name.endswith("patches"):  # each with its row and column before the pixels
        channels, side = read_number(config, "num_channels") or 3, read_number(config, "patch_size") or 16
        count = request.length or read_number(config, "max_patches", "seq_len") or choose_length(config)
        pixels = read_number(config, "patch_embed_hidden_size") or channels * side**2
        yield InputSpec((samples, count, 2 + pixels), unit=True)
    elif name.startswith("pixel_values"):
        channels = read_number(config, "num_channels", "in_channels", "in_chans") or 3
        frames = read_number(config, "num_frames", "frames_per_clip")
        for height, width in _list_image_sizes(found):
            image = InputSpec((samples, channels, height, width))
            clip = () if frames is None else (InputSpec((samples, frames, channels, height, width)),)
            yield from (*clip, image) if name.endswith("_videos") else (image, *clip)
    elif name.startswith(("input_values", "input_features", "audio_values", "features")):
        waveforms, spectra = [*_list_waveforms(found, request)], [*_list_spectra(found, request)]
        yield from (*waveforms, *spectra) if name == "input_values" else (*spectra, *waveforms)
    elif name.endswith("_values"):
        yield from _list_series(found, request)
    elif name.endswith("_mask"):
        yield InputSpec((samples, request.length or choose_length(config)), low=1, high=2)
    else:
        yield _token_spec(config, samples, request.length or choose_length(config))


def _list_image_sizes(found: Configuration) -> Iterator[tuple[int, int]]:
    """Yield pairs (height, width) in pixels of images to try: the sizes in the model's configuration ``found``, or else
    in its preprocessor, or else a usual size."""
    for field in ("image_size", "input_size", "img_size"):
        size = _as_size(getattr(found.config, field, None))
        if size is not None:
            yield size
            return
    number = read_number(found.config, "image_size")
    if number is not None:
        yield number, number
        return
    for field in ("crop_size", "size"):
        size = _as_size(found.preprocessor.get(field))
        if size is not None:
            yield size
            return
    yield _IMAGE, _IMAGE


def _as_size(value: Any) -> tuple[int, int] | None:
    """Return the height and width, in pixels, in ``value``, a field of a configuration: a number (both), a pair, or an
    object with both; ``None`` for anything else."""
    if isinstance(value, Mapping):
        side = value.get("shortest_edge")
        value = (value.get("height", side), value.get("width", side))
    if isinstance(value, int):
        value = (value, value)
    whole = isinstance(value, list | tuple) and all(isinstance(n, int) and n > 0 for n in value)
    return (value[-2], value[-1]) if whole and len(value) >= 2 else None


def _list_waveforms(found: Configuration, request: BatchRequest) -> Iterator[InputSpec]:
    rate = found.preprocessor.get("sampling_rate")
    usual = _SECONDS * (rate if isinstance(rate, int) and rate > 0 else _RATE)
    length = request.length or usual
    yield InputSpec((request.samples, length))
    yield InputSpec((request.samples, 1, length))  # with a dim of channels


def _list_series(found: Configuration, request: BatchRequest) -> Iterator[InputSpec]:
    """Yield the shapes of time series to try as inputs of a model: one number at each time, and several. ``found``: the
    model's configuration. ``request``: kind and size of the batch."""
    length = request.length or read_number(found.config, "context_length") or choose_length(found.config)
    channels = read_number(found.config, "num_input_channels", "input_size")
    shape = (request.samples, length)
    yield from map(InputSpec, ((*shape, channels), shape) if channels else (shape,))


def _list_spectra(found: Configuration, request: BatchRequest) -> Iterator[InputSpec]:
    """Yield the shapes of spectrograms to try as inputs of a model: different numbers of frames, with frames before or
    after frequency bins, also with several frames joined to one. ``found``: the model's configuration. ``request``:
    kind and size of the batch. ``[samples, frames, bins]`` is tried before ``[samples, bins, frames]``: a model that
    expects the latter refuses the former, since its first convolution has as many input channels as there are bins."""
    config, samples = found.config, request.samples
    mels = read_number(config, *_MELS) or 80
    frames = read_number(config, *_FRAMES)
    asked = () if request.length is None else (request.length,)
    known = () if frames is None else (2 * frames, frames)
    lengths = dict.fromkeys(asked or (*known, 1024))
    for length, joined in product(lengths, (1, 2, 4)):
        yield InputSpec((samples, length, mels * joined))
        yield InputSpec((samples, mels * joined, length))
    if asked and frames is not None and not math.isclose(asked[0], frames):
        for length in known:  # a model with a fixed number of frames accepts no other
            yield InputSpec((samples, length, mels))
            yield InputSpec((samples, mels, length))
