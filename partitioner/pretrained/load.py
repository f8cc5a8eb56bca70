"""Load a model from its configuration, with a batch that suits it, and plan it.

The class of the model follows from the task. transformers lists the classes of each task by the type of the
configuration; no model is known by name here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.passes.errors import PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.plan import Plan
from partitioner.pretrained.adapters import Lora, add_adapters
from partitioner.pretrained.batch import BatchRequest, Labels, choose_batch, longest_sample, make_batch, reads_images
from partitioner.pretrained.configuration import (
    Configuration,
    PretrainedError,
    build_error,
    import_transformers,
    list_parts,
    quiet_transformers,
    read_configuration,
)
from partitioner.topology import Topology
from partitioner.units import format_plural

Task = Literal["causal", "seq2seq", "masked", "image", "audio", "contrastive"]

# Task -> the tables of transformers that have its classes, and the labels that these take.
_TASKS: dict[str, tuple[tuple[str, Labels], ...]] = {
    "causal": (("CAUSAL_LM", "tokens"), ("IMAGE_TEXT_TO_TEXT", "tokens")),
    "seq2seq": (("SEQ_TO_SEQ_CAUSAL_LM", "tokens"),),
    "masked": (("MASKED_LM", "tokens"),),
    "image": (("IMAGE_CLASSIFICATION", "class"),),
    "audio": (("AUDIO_CLASSIFICATION", "class"), ("SPEECH_SEQ_2_SEQ", "text"), ("CTC", "few")),
    "contrastive": (("ZERO_SHOT_IMAGE_CLASSIFICATION", "pairs"),),
}
_SAMPLES = 8  # per device, if no number is asked for
_MOST_MODULES = 1_000_000
_MOST_SECONDS = 300.0  # for building a model without memory


@dataclass(frozen=True)
class PretrainedModel:
    """A model that was built from its configuration.

    Attributes:
        model: the model, in training mode; on the meta device, without values, unless ``load_pretrained`` was called
            with ``values=True``.
        inputs: one batch that the model accepts, by argument name.
        task: what it is trained for: ``causal``, ``seq2seq``, ``masked``, ``image``, ``audio`` or
            ``contrastive``.
        weights: the folder with all of the model's weights as safetensors; ``None`` if there are none, or if the model
            has adapters, whose weights are in no folder.
        longest: the longest sample in tokens, from the number of positions of the model; ``None`` if it has no limit,
            or if samples are no sequences of tokens.
        notes: sentences for the user about what was left out or chosen.
    """

    model: nn.Module = field(repr=False)
    inputs: dict[str, Any] = field(repr=False)
    task: str
    weights: Path | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()

    def describe(self, plan: Plan) -> Plan:
        """Return a copy of ``plan``, a plan of this model, with the model's notes added, and with the path of
        :attr:`weights` as its field ``weights`` (empty if there is no such folder)."""
        weights = "" if self.weights is None else str(self.weights.resolve())
        return plan.model_copy(update={"notes": (*self.notes, *plan.notes), "weights": weights})


@typed_errors("load_pretrained()")
def load_pretrained(
    source: str | Path,
    *,
    seq: int | None = None,
    batch: int = 64,
    task: Task | None = None,
    lora: Lora | Mapping[str, Any] | str | None = None,
    objective: Literal["train", "infer"] = "train",
    values: bool = False,
) -> PretrainedModel:
    """Return the model of a configuration, with a batch that suits it. No code in the configuration is executed.

    Args:
        source: a folder with a ``config.json``, such a file, or a name on the Hugging Face hub.
        seq: tokens of a sample; for audio, samples of a waveform or frames of a spectrogram. ``None``: 2,048, or as
            many as the model has positions.
        batch: samples of the batch.
        task: what the model is trained for; ``None``: as the configuration's ``architectures`` say, else as its type is
            usually trained.
        lora: train low-rank adapters only, as ``"r=16,alpha=32,targets=q_proj+v_proj"``; ``None``: train all weights.
        objective: ``train``: the batch has labels; ``infer``: it has none.
        values: give the model real weights: those of the safetensors files beside ``config.json`` if there are any,
            else random ones. Without, the model is on the meta device and needs no memory.

    Raises :class:`PretrainedError`, or one of its subclasses, for a configuration or option that cannot be used.
    """
    for name, number in (("seq", seq), ("batch", batch)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise PretrainedError(f"{name} must be a whole number, 1 or more; got {number!r}")
    adapters = None if lora is None else Lora.parse(lora)
    found = read_configuration(source)
    name, labels, chosen, notes = _choose_class(found, task)
    model = _build_model(found, name)
    if adapters is not None:
        add_adapters(model, adapters)
    if labels == "few" and objective == "train":
        raise PretrainedError(
            f"{found.source}: {name} has a CTC loss, whose shapes depend on the lengths of the transcripts, and a plan "
            "has fixed shapes; plan it for inference (--objective infer), give another --task, or give "
            "FILE.py:FUNCTION with a loss of plain operators"
        )
    request = BatchRequest(labels, batch, seq, objective == "train")
    with quiet_transformers():
        specs = choose_batch(model, found, request)
    if values:
        model = _build_model(found, name, device="cpu")
        if adapters is not None:
            add_adapters(model, adapters)
    inputs = make_batch(specs, "cpu" if values else "meta")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs.items()}
    if labels == "tokens" and reads_images(model) and "pixel_values" not in specs:
        notes = (*notes, "The plan is for text alone: images of this model have no fixed shape. Give FILE.py:FUNCTION.")
    longest = longest_sample(found.config) if labels == "tokens" else None
    weights = found.weights if adapters is None else None
    if adapters is not None and found.weights is not None:
        notes = (*notes, f"{found.weights} has no weights of the adapters: give the ranks those of a loaded model.")
    return PretrainedModel(model, inputs, chosen, weights, longest, (*found.notes, *notes))


def partition_pretrained(
    source: str | Path,
    topology: Topology,
    *,
    constraints: Constraints | None = None,
    seq: int | None = None,
    batch: int | None = None,
    task: Task | None = None,
    lora: Lora | Mapping[str, Any] | str | None = None,
    **more: Any,
) -> Plan:
    """Plan the model of a configuration on ``topology``, without its weights. Return the plan; ``plan.weights`` is the
    path of the folder of ``config.json`` if it has the weights as safetensors files and no adapters are trained, else
    empty.

    Args:
        source: a folder with a ``config.json``, such a file, or a name on the Hugging Face hub.
        constraints: as for :func:`partitioner.partition`.
        seq: tokens of a sample; for audio, samples of a waveform or frames of a spectrogram. ``None``: 2,048, or as
            many as the model has positions.
        batch: samples of a step; ``None``: eight for each device.
        task: ``causal``, ``seq2seq``, ``masked``, ``image``, ``audio`` or ``contrastive``; ``None``: as the
            configuration says.
        lora: train low-rank adapters only, as ``"r=16,alpha=32,targets=q_proj+v_proj"``.
        more: further arguments of :func:`partitioner.partition`.

    Raises :class:`PretrainedError` for a configuration or option that cannot be used, and the errors of
    :func:`partitioner.partition`.
    """
    samples = choose_samples(topology.num_devices) if batch is None else batch
    objective = more.get("objective", "train")
    found = load_pretrained(source, seq=seq, batch=samples, task=task, lora=lora, objective=objective)
    return found.describe(partition(found.model, topology, found.inputs, constraints=constraints, **more))


def choose_samples(devices: int) -> int:
    """Return the default number of samples of a step: eight for each of ``devices``, the number of devices."""
    return _SAMPLES * devices


# --- the class of the model -------------------------------------------------------------------------------------------


def _choose_class(found: Configuration, asked: str | None) -> tuple[str, Labels, str, tuple[str, ...]]:
    """Return four values: the name of the model's class in transformers, the kind of its labels (such as ``tokens``),
    its task (such as ``causal``), and sentences for the user about the choice. ``found``: the model's configuration,
    with the class names that its file has. ``asked``: the task that the user chose; ``None``: that of the class which
    the configuration names, or else the usual one."""
    if asked is not None and asked not in _TASKS:
        raise PretrainedError(f"there is no task {asked!r}; expected one of {', '.join(_TASKS)}")
    every = _list_classes(found.config)
    named = [each for each in every if each[0] in found.architectures and asked in (None, each[2])]
    if named:
        return *named[0], ()
    of_task = [each for each in every if each[2] == (asked or each[2])]
    if not of_task:
        have = ", ".join(dict.fromkeys(task for _, _, task in every)) or "none"
        what = f"for the task {asked}" if asked else "for a task that is known here"
        raise PretrainedError(
            f"{found.source}: transformers has no {found.config.model_type} model {what} (it has: {have}); give "
            "another --task, or FILE.py:FUNCTION"
        )
    chosen = of_task[0]
    notes: tuple[str, ...] = ()
    if asked is None and found.architectures:
        notes = (
            f"The configuration names {found.architectures[0]}, whose task is not known here: the plan is for "
            f"{chosen[0]} (task {chosen[2]}).",
        )
    return *chosen, notes


def _list_classes(config: Any) -> list[tuple[str, Labels, str]]:
    """Return a tuple for each model class that transformers has for the configuration ``config``, the usual class
    first: the name of the class, the kind of its labels (such as ``tokens``) and the name of its task (such as
    ``causal``).
    """
    from transformers.models.auto import modeling_auto

    decodes = bool(getattr(config, "is_decoder", False))
    whole = bool(getattr(config, "is_encoder_decoder", False))
    order = ["seq2seq", "audio"] if whole else ["causal", "masked"] if decodes else ["masked", "causal"]
    found: list[tuple[str, Labels, str]] = []
    for task in dict.fromkeys((*order, *_TASKS)):
        for table, labels in _TASKS[task]:
            names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type, ())
            found += [(name, labels, task) for name in ([names] if isinstance(names, str) else names)]
    return sorted(found, key=lambda each: whole and each[1] == "class")  # an encoder alone is not what it is made for


# --- building ---------------------------------------------------------------------------------------------------------


def _build_model(found: Configuration, name: str, device: str = "meta") -> nn.Module:
    """Return a model of transformers in training mode. ``found``: its configuration, with the place from which it was
    read. ``name``: the name of the model's class in transformers. ``device``: ``meta``, where the weights have no
    values, or ``cpu``.

    On ``cpu`` the weights are those of the safetensors files in the folder of the configuration if it has some, else
    random. Raise :class:`PretrainedError` if transformers cannot build the model.
    """
    what = f"{found.source}: transformers cannot build {name} from this configuration"
    try:
        with quiet_transformers(), _limit_building(what):
            cls: Any = getattr(import_transformers(), name)
            config = _part_for(cls, found.config)
            if device == "cpu" and found.weights is not None:
                model = cls.from_pretrained(found.weights, config=config, dtype=config.dtype or torch.float32)
            else:
                with torch.random.fork_rng(devices=()), torch.device(device):
                    torch.manual_seed(0)
                    model = cls._from_config(config)
    except PartitionError:
        raise
    except Exception as error:
        raise build_error(error, what) from None
    assert isinstance(model, nn.Module)
    return model.train()


def _part_for(cls: Any, config: Any) -> Any:
    """Return the configuration to pass to the model class ``cls`` of transformers: ``config`` itself, or that
    configuration inside it (such as the one of its text model) whose type is the one that ``cls`` expects; ``config``
    if there is none."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in list_parts(config) if isinstance(part, wanted)), config)


@contextlib.contextmanager
def _limit_building(what: str) -> Iterator[None]:
    """Return a context in which a model with a very large number of modules raises :class:`PretrainedError` while it is
    built, so that building does not continue for hours. ``what``: name of the model, for the message.
    """
    count, end = 0, time.monotonic() + _MOST_SECONDS

    def count_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES or time.monotonic() > end:
            raise PretrainedError(f"{what}: it has more than {format_plural(count, 'module')}; correct its fields")

    handle = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        handle.remove()
