"""Load a model from its configuration, with a batch that suits it, and plan it.

The class of the model follows from the task. transformers lists the classes of each task by the type of the
configuration; no model is known by name here.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.passes.errors import PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.plan import Plan
from partitioner.pretrained.adapters import Lora, add_adapters, list_bypassed_adapters
from partitioner.pretrained.batch import (
    BatchRequest,
    Labels,
    choose_batch,
    find_dtype,
    list_left_out,
    longest_sample,
    make_batch,
)
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

Task = Literal["causal", "seq2seq", "masked", "image", "audio", "contrastive", "text"]

# Task -> the tables of transformers that have its classes, each with the kind of labels that the classes take.
_TASKS: dict[str, tuple[tuple[str, Labels], ...]] = {
    "causal": (("CAUSAL_LM", "tokens"), ("IMAGE_TEXT_TO_TEXT", "tokens")),
    "seq2seq": (("SEQ_TO_SEQ_CAUSAL_LM", "tokens"),),
    "masked": (("MASKED_LM", "tokens"),),
    "image": (("IMAGE_CLASSIFICATION", "class"), ("VIDEO_CLASSIFICATION", "class")),
    "audio": (("AUDIO_CLASSIFICATION", "class"), ("SPEECH_SEQ_2_SEQ", "text"), ("CTC", "few")),
    "contrastive": (("ZERO_SHOT_IMAGE_CLASSIFICATION", "pairs"),),
    "text": (("SEQUENCE_CLASSIFICATION", "class"), ("TOKEN_CLASSIFICATION", "classes")),
}
_HEADS = "text"  # task of text classifiers; it needs a type without another task, or a configuration that names one
_SAMPLES = 8  # samples for each device if no number is given
_MOST_MODULES = 1_000_000
_MOST_SECONDS = 300.0  # seconds for building a model without memory


@dataclass(frozen=True)
class PretrainedModel:
    """A model that was built from its configuration.

    Attributes:
        model: the model, in training mode, or in evaluation mode if it is for inference; on the meta device, without
            values, unless ``load_pretrained`` was called with ``values=True``.
        inputs: one batch that the model accepts, by argument name.
        task: what the model is trained for: ``causal``, ``seq2seq``, ``masked``, ``image``, ``audio``, ``contrastive``
            or ``text``; ``inference`` for a class that is planned without a loss because none of these is its task.
        weights: the folder with all of the model's weights as safetensors; ``None`` if there are none, or if the model
            has adapters, whose weights are in no folder.
        longest: the longest sample in tokens, from the number of positions of the model; ``None`` if it has no limit,
            or if samples are no sequences of tokens.
        notes: sentences for the user about what was left out or chosen.
        why: why the model has this class and task: a clause for the user.
    """

    model: nn.Module = field(repr=False)
    inputs: dict[str, Any] = field(repr=False)
    task: str
    weights: Path | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()
    why: str = ""

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
    """Return the transformers model that a Hugging Face configuration describes, with a batch that suits it. No code in
    the configuration is executed.

    Args:
        source: a folder with a ``config.json``, the path of a ``config.json``, or a name on the Hugging Face hub.
        seq: tokens of a sample; for audio, samples of a waveform or frames of a spectrogram. ``None``: 2,048, or as
            many as the model has positions.
        batch: samples of the batch.
        task: what the model is trained for, such as ``causal``. ``None``: the task of the class in the configuration's
            ``architectures``, or else the task that follows from the model type and from ``is_encoder_decoder`` and
            ``is_decoder``.
        lora: train low-rank adapters only, as ``"r=16,alpha=32,targets=q_proj+v_proj"``; ``None``: train all weights.
        objective: ``train``: the batch has labels; ``infer``: it has none, and the model is in evaluation mode.
        values: give the model real weights, from the safetensors files beside ``config.json`` if there are any, else
            random. If false, the model is on the meta device and needs no memory.

    Raises :class:`PretrainedError`, or one of its subclasses, for a configuration or option that cannot be used, and if
    neither ``task`` nor the configuration says which of several tasks the model is for.
    """
    for name, number in (("seq", seq), ("batch", batch)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise PretrainedError(f"{name} must be a whole number, 1 or more; got {number!r}")
    adapters = None if lora is None else Lora.parse(lora)
    found = read_configuration(source)
    choice = _choose_class(found, task, objective)
    name, labels, notes = choice.name, choice.labels, choice.notes
    trains = objective == "train"
    model = _build_model(found, name).train(trains)
    if trains:
        _check_layer_drop(found, name)
    if adapters is not None:
        add_adapters(model, adapters)
    if labels == "few" and trains:
        raise PretrainedError(
            f"{found.source}: {name} has a CTC loss, whose shapes depend on the lengths of the transcripts, and a plan "
            "has fixed shapes; plan it for inference (--objective infer), give another --task, or give "
            "FILE.py:FUNCTION with a loss of plain operators"
        )
    request = BatchRequest(labels, batch, seq, trains)
    bypassed: list[str] = []
    with quiet_transformers():
        specs = choose_batch(model, found, request)
        if seq is not None and not any(seq in spec.shape[1:] for spec in specs.values()):
            sizes = ", ".join(f"{path} {list(spec.shape)}" for path, spec in specs.items())
            notes = (*notes, f"seq={seq} is not used: the inputs of {name} have other sizes ({sizes}).")
        if adapters is not None:
            bypassed = list_bypassed_adapters(model, make_batch(specs, "meta", dtype=find_dtype(model)))
    if bypassed:
        notes = (*notes, _note_bypassed(bypassed, adapters))
    if values or bypassed:
        model = _build_model(found, name, device="cpu" if values else "meta").train(trains)
        if adapters is not None:
            add_adapters(model, adapters, without=bypassed)
    inputs = make_batch(specs, "cpu" if values else "meta", dtype=find_dtype(model))
    if left_out := list_left_out(model, specs):
        notes = (
            *notes,
            f"The batch has no {' and no '.join(left_out)}, which the model can read together with text, "
            "because the configuration does not give their shapes. For a plan with all inputs, give "
            "FILE.py:FUNCTION.",
        )
    longest = longest_sample(found.config) if labels == "tokens" or choice.task == _HEADS else None
    weights = found.weights if adapters is None else None
    if adapters is not None and found.weights is not None:
        notes = (
            *notes,
            f"{found.weights} has no weights of the adapters; pass the weights of the loaded model to the ranks.",
        )
    return PretrainedModel(model, inputs, choice.task, weights, longest, (*found.notes, *notes), choice.why)


def _check_layer_drop(found: Configuration, name: str) -> None:
    """Raise :class:`PretrainedError` if the configuration ``found`` enables LayerDrop, which skips whole layers at
    random in training. A plan cannot do this, because its programs run the same operators in every step. ``name``: the
    model's class, for the message."""
    for part in list_parts(found.config):
        for field_name, value in part.to_dict().items():
            if field_name.endswith("layerdrop") and isinstance(value, float) and value > 0:
                raise PretrainedError(
                    f"{found.source}: {field_name}={value:g} skips whole layers of {name} at random in "
                    f"training, but a plan executes the same layers in every step; expected {field_name}=0: "
                    "write it into the configuration, or plan for inference (--objective infer)"
                )


def _note_bypassed(bypassed: Sequence[str], lora: Lora | None) -> str:
    """Return a sentence for the user on the layers that get no adapters because the model reads their weights without
    calling them. ``bypassed``: the paths of these layers. Raise :class:`PretrainedError` if ``lora`` names one of them
    as a target."""
    names = list(dict.fromkeys(path.rpartition(".")[2] for path in bypassed))
    asked = [name for name in names if lora is not None and name in lora.targets]
    if asked:
        raise PretrainedError(
            f"lora: adapters of {asked[0]} would have no effect, because the model reads the weight of {bypassed[0]} "
            f"without calling the layer; leave {asked[0]} out of targets"
        )
    return f"{', '.join(names)} get no adapters: the model reads their weights without calling the layers."


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
    """Plan the transformers model that a Hugging Face configuration describes on ``topology``, without its weights.
    Return the plan; ``plan.weights`` is the path of the folder of ``config.json`` if it has the weights as safetensors
    files and no adapters are trained, else empty.

    Args:
        source: a folder with a ``config.json``, the path of a ``config.json``, or a name on the Hugging Face hub.
        constraints: choices that the user fixes, such as ``Constraints(tp=8)``.
        seq: tokens of a sample; for audio, samples of a waveform or frames of a spectrogram. ``None``: 2,048, or as
            many as the model has positions.
        batch: samples of a step; ``None``: eight for each device.
        task: ``causal``, ``seq2seq``, ``masked``, ``image``, ``audio``, ``contrastive`` or ``text``; ``None``: the
            task of the class that the configuration names, or the usual task of its model type.
        lora: train low-rank adapters only, as ``"r=16,alpha=32,targets=q_proj+v_proj"``; ``None``: train all weights.
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


@dataclass(frozen=True)
class ModelChoice:
    """The transformers class that was chosen for a configuration.

    Attributes:
        name: name of the class in transformers.
        labels: kind of its labels, such as ``tokens``.
        task: what the class is trained for, such as ``causal``.
        why: why the class was chosen: a clause for the user.
        notes: sentences for the user about a choice that the configuration leaves open.
    """

    name: str
    labels: Labels
    task: str
    why: str
    notes: tuple[str, ...] = ()


def _choose_class(found: Configuration, asked: str | None, objective: str = "train") -> ModelChoice:
    """Return the class of the model for the transformers configuration ``found``. ``asked``: the task that the user
    chose, such as ``causal``. If it is ``None``, the configuration's own class is returned or, if the configuration
    names no class, the class that follows from the type of the model. ``objective``: ``infer`` for a model without a
    loss; such a model may have any class that the configuration names.

    Raise :class:`PretrainedError` if there is no class for the task, or if no task was chosen and several are possible.
    """
    if asked is not None and asked not in _TASKS:
        raise PretrainedError(f"there is no task {asked!r}; expected one of {', '.join(_TASKS)}")
    every = _list_classes(found.config)
    stated = found.architectures[0] if found.architectures else None
    named = [each for each in every if each[0] in found.architectures and asked in (None, each[2])]
    if named:
        name, labels, task = named[0]
        others = [each[2] for each in named[1:] if each[2] != task]
        if others and asked is None:
            task = _follow_type(found, named)[0][2]
            labels = next(each[1] for each in named if each[2] == task)
        return ModelChoice(name, labels, task, "as architectures says", _note_attention(found, name, task, every))
    other = stated if stated is not None and _is_model_class(stated) else None
    if other is not None and asked is None and objective == "infer":
        return ModelChoice(other, _find_labels(other), "inference", "as architectures says")
    usual = [each for each in every if each[2] != _HEADS] or ([] if other else every)
    of_task = [each for each in every if each[2] == asked] if asked is not None else usual
    if not of_task:
        kind, base = found.config.model_type, _find_base_class(found.config)
        if base is not None and asked is None and objective == "infer":
            why = f"{base} is the class of the type {kind}, which has none for a task that is known here"
            about = "" if stated else "The configuration has no architectures. "
            return ModelChoice(base, _find_labels(base), "inference", why, (f"{about}The plan is for {base}: {why}.",))
        have = ", ".join(dict.fromkeys(task for _, _, task in every))
        what = f"for the task {asked}" if asked else "for a task that is known here"
        untrained = None if objective == "infer" else other or base
        ways = [f"give --task {' or --task '.join(dict.fromkeys(task for _, _, task in every))}"] if every else []
        ways += [f"plan {untrained} for inference (--objective infer)"] if untrained else []
        if not ways and not stated:
            ways = ["name the class in the field architectures"]
        raise PretrainedError(
            f"{found.source}: transformers has no {kind} model {what} (it has: {have or 'none'}); "
            + ", or ".join([*ways, "give FILE.py:FUNCTION" + ("" if objective == "infer" else " with a loss")])
        )
    if asked is not None:
        name, labels, task = of_task[0]
        notes = (*_note_other_classes(of_task), *_note_attention(found, name, task, every))
        return ModelChoice(name, labels, task, "as the task says", notes)
    (name, labels, task), why = _follow_type(found, of_task)
    if stated:
        why = f"architectures names {stated}, whose task is not known here; {why}"
    about = "" if stated else "The configuration has no architectures. "
    note = f"{about}The plan is for {name} (task {task}): {why}."
    same = [each for each in of_task if each[2] == task]
    return ModelChoice(name, labels, task, why, (note, *_note_other_classes(same)))


def _follow_type(found: Configuration, every: list[tuple[str, Labels, str]]) -> tuple[tuple[str, Labels, str], str]:
    """Choose a model class by the type of the model. Return two values: the class, as one of ``every``, and the reason
    as a clause. ``every``: the possible classes, each as (name, kind of labels, task). ``found``: the model's
    transformers configuration. Raise :class:`PretrainedError`, with the tasks to choose from, if the type does not
    decide."""
    from transformers.models.auto import modeling_auto

    config, kind = found.config, found.config.model_type
    tasks = list(dict.fromkeys(task for _, _, task in every))
    if len(tasks) == 1:
        return every[0], f"{tasks[0]} is the only task that is known here for the type {kind}"
    if getattr(config, "is_encoder_decoder", False):
        whole = [each for each in every if each[2] == "seq2seq" or each[1] == "text"]
        if len({each[0] for each in whole}) == 1:
            return whole[0], "is_encoder_decoder is true"
    elif {*tasks} == {"masked", "causal"}:
        decodes = bool(getattr(config, "is_decoder", False))
        task = "causal" if decodes else "masked"
        return next(each for each in every if each[2] == task), f"is_decoder is {'' if decodes else 'not '}true"
    if len({name for name, _, _ in every}) == 1:
        return every[0], f"{every[0][0]} is the only class of the type {kind}"
    whole = [each for each in every if each[1] != "class"]  # all others put a classifier on a part of the model
    base = modeling_auto.MODEL_MAPPING_NAMES.get(kind)
    if len(whole) == 1 and whole[0][0] == base:
        return whole[0], f"{base} is the class of the type {kind}, and the others are classifiers on a part of it"
    choices = ", ".join(f"{task} ({', '.join(dict.fromkeys(n for n, _, t in every if t == task))})" for task in tasks)
    raise PretrainedError(
        f"{found.source} does not say what the {kind} model is trained for: transformers has classes for {choices}; "
        f"give --task {' or --task '.join(tasks)} (task= in Python), or name the class in the field architectures"
    )


def _note_other_classes(same: Sequence[tuple[str, Labels, str]]) -> tuple[str, ...]:
    """Return a sentence for the user on the classes of one task that were not chosen, as a tuple of one; empty if there
    is only one class. ``same``: all classes of the task, the chosen one first, each as (name, kind of labels, task).
    """
    others = [name for name in dict.fromkeys(name for name, _, _ in same) if name != same[0][0]]
    if not others:
        return ()
    return (
        f"For the task {same[0][2]}, transformers has {', '.join(others)}, too: to plan for such a class, name it in "
        "the field architectures of the configuration.",
    )


def _note_attention(
    found: Configuration, name: str, task: str, every: Sequence[tuple[str, Labels, str]]
) -> tuple[str, ...]:
    """Return a warning, as a tuple of one sentence, if the class ``name`` is trained to predict the next token although
    its attention sees later tokens; otherwise empty. ``found``: the model's transformers configuration. ``task``: the
    task of the class. ``every``: all classes of the model type, each as (name, kind of labels, task)."""
    config = found.config
    encodes = "masked" in {each[2] for each in every} and not getattr(config, "is_encoder_decoder", False)
    if task != "causal" or not encodes or getattr(config, "is_decoder", None) is not False:
        return ()
    return (
        f"is_decoder is false in the configuration: {name} attends to later tokens, too. To train it for the next "
        "token, set is_decoder to true.",
    )


def _is_model_class(name: str) -> bool:
    """Return whether transformers has a model class that is called ``name``."""
    transformers = import_transformers()
    cls = getattr(transformers, name, None)
    return isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)


def _find_base_class(config: Any) -> str | None:
    """Return the name of the class without a task that transformers has for the ``PreTrainedConfig`` ``config``;
    ``None`` if it has none."""
    from transformers.models.auto import modeling_auto

    found = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    names = [found] if isinstance(found, str) else found or ()
    return next((name for name in names if _is_model_class(name)), None)


def _find_labels(name: str) -> Labels:
    """Return the kind of labels that a model of the transformers class ``name`` would have: one for each token of a
    text, or one for each sample of anything else."""
    cls: Any = getattr(import_transformers(), name)
    return "tokens" if "input_ids" in inspect.signature(cls.forward).parameters else "class"


def _list_classes(config: Any) -> list[tuple[str, Labels, str]]:
    """Return the model classes that transformers has for the ``PreTrainedConfig`` ``config``, the usual class first.
    Each is a tuple: name of the class, kind of its labels (such as ``tokens``), name of its task (such as
    ``causal``)."""
    from transformers.models.auto import modeling_auto

    decodes = bool(getattr(config, "is_decoder", False))
    whole = bool(getattr(config, "is_encoder_decoder", False))
    order = ["seq2seq", "audio"] if whole else ["causal", "masked"] if decodes else ["masked", "causal"]
    found: list[tuple[str, Labels, str]] = []
    for task in dict.fromkeys((*order, *_TASKS)):
        for table, labels in _TASKS[task]:
            names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type, ())
            found += [(name, labels, task) for name in ([names] if isinstance(names, str) else names)]
    # classifiers come last for an encoder-decoder model, which is not made for them
    return sorted(found, key=lambda each: whole and each[1] == "class")


# --- building ---------------------------------------------------------------------------------------------------------


def _build_model(found: Configuration, name: str, device: str = "meta") -> nn.Module:
    """Return a model of transformers. ``found``: its configuration, with the place from which it was
    read. ``name``: the name of the model's class in transformers. ``device``: ``meta``, where the weights have no
    values, or ``cpu``.

    On ``cpu`` the weights are loaded from the safetensors files in the folder of the configuration if it has some, else
    they are random. Raise :class:`PretrainedError` if transformers cannot build the model.
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
    return model


def _part_for(cls: Any, config: Any) -> Any:
    """Return the ``PreTrainedConfig`` to pass to the model class ``cls`` of transformers. If ``config`` has another
    type than ``cls`` expects, it may contain a configuration of the expected type, such as the configuration of its
    text model. This inner configuration is then returned, otherwise ``config`` itself."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in list_parts(config) if isinstance(part, wanted)), config)


@contextlib.contextmanager
def _limit_building(what: str) -> Iterator[None]:
    """Return a context manager within which a model with a very large number of modules raises :class:`PretrainedError`
    while it is built, so that building does not continue for hours. ``what``: name of the model, for the message."""
    count, end = 0, time.monotonic() + _MOST_SECONDS

    def count_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES or time.monotonic() > end:
            raise PretrainedError(
                f"{what}: the model would have more than {format_plural(count, 'module')}; correct the fields of "
                "the configuration"
            )

    handle = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        handle.remove()
