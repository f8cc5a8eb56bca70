"""Size a cluster or a job: the smallest cluster for a job, and the largest job for a cluster.

``size_cluster`` finds the smallest cluster that reaches a step time, or the cheapest in money or energy per step.
``largest_that_fits`` finds the largest microbatch, or the longest sequence, that fits in the memory of a cluster.
``check_fit`` says whether a job fits on a cluster, what the largest sizes are, and what a run of it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partitioner.api import partition
from partitioner.background import Future
from partitioner.constraints import Constraints
from partitioner.draw import DrawError
from partitioner.draw.scaling import ScalingPoint, draw_scaling
from partitioner.errors import CapacityError, ConstraintError, PlanError, TimeLimitError
from partitioner.explain.memory_texts import describe_tightness, fit_text
from partitioner.explain.tables import throughput_text
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.padding.resize import resize_folded
from partitioner.plan import Plan
from partitioner.plans.figures import candidate_text, fullest_rank, list_usable_bytes, memory_text
from partitioner.plans.training_run import TrainingRun, energy_of, is_positive, money_of
from partitioner.runtime.files import write_text
from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare
from partitioner.topology import Topology
from partitioner.units import bytes_text, count_text, format_digits, format_percent, format_plural, seconds_text
from partitioner.validate import check_seconds, torch_device

Minimise = Literal["nodes", "money", "energy", "time"]

_CHOICES = ("nodes", "money", "energy", "time")
_NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Size:
    """The result of planning a job (model, batch and constraints) on a cluster of one size.

    Attributes:
        nodes: number of nodes.
        plan: the best plan; ``None`` if there is none.
        money: US dollars per step; ``None`` if the hardware file gives no price.
        energy: joules per step; ``None`` if the hardware file gives no power.
        reason: why there is no plan.
        out_of_time: whether the time limit ended the search before a plan was found.
    """

    nodes: int
    plan: Plan | None = field(default=None, repr=False)  # not in ``repr``: megabytes of text
    money: float | None = None
    energy: float | None = None
    reason: str = ""
    out_of_time: bool = False

    @property
    def step_time(self) -> float:
        """Return the seconds of a step of the plan; infinite if there is no plan."""
        return math.inf if self.plan is None else self.plan.estimate.step_time

    def __str__(self) -> str:
        """Return one line: the number of nodes, and either the step time, money, energy and mesh of the plan, or why
        there is none."""
        nodes = format_plural(self.nodes, "node")
        if self.plan is None:
            return f"{nodes}: {'no time' if self.out_of_time else 'no plan'} ({self.reason})"
        money = f", {format_digits(self.money)} USD" if self.money is not None else ""
        energy = f", {format_digits(self.energy)} J" if self.energy is not None else ""
        rate = f"{throughput_text(self.plan)}, " if self.plan.global_batch else ""
        told = f"{rate}{format_percent(self.plan.estimate.mfu)} MFU, {candidate_text(self.plan.chosen)}"
        return f"{nodes}: {seconds_text(self.step_time)}{money}{energy} per step, {told}"


@dataclass(frozen=True)
class Sizing:
    """Result of :func:`size_cluster`. ``str()`` of it has a line for each size.

    Attributes:
        chosen: the result for the best cluster.
        tried: the results for all clusters that were tried, from the smallest to the largest.
    """

    chosen: Size
    tried: tuple[Size, ...]

    def __str__(self) -> str:
        return "\n".join(f"{size} (chosen)" if size is self.chosen else str(size) for size in self.tried)

    @property
    def plan(self) -> Plan:
        """Return the plan for the cluster size that was chosen as the best."""
        assert self.chosen.plan is not None, self.chosen
        return self.chosen.plan

    @typed_errors("Sizing.to_svg()")
    def to_svg(self, path: str | Path) -> Path:
        """Draw throughput and MFU over the number of ranks, one point for each tried cluster with a plan, to the SVG
        file ``path``. Return the path."""
        return write_text(Path(path), scaling_picture(self.tried, self.chosen))


class SizeError(PlanError):
    """Error: no cluster size satisfies the request. ``message``: the reason. ``tried``: the results of all sizes, which
    the text of the error lists one per line."""

    def __init__(self, message: str, tried: tuple[Size, ...]) -> None:
        super().__init__("\n".join([message, *map(str, tried)]))
        self.tried = tried


class SizeTimeError(SizeError, TimeLimitError):
    """Error: no cluster size satisfies the request, and for some sizes the time limit ended the search before a plan
    was found."""


def scaling_picture(tried: Sequence[Size], chosen: Size | None = None) -> str:
    """Return a picture of throughput and MFU over the number of ranks as SVG text. ``tried``: the results for clusters
    of several sizes. ``chosen``: the one to highlight. Raise :class:`DrawError` if no size has a plan."""
    points = []
    for size in tried:
        if (plan := size.plan) is not None and plan.estimate.step_time > 0:
            each = (plan.tokens_per_step or plan.global_batch or 1) / plan.estimate.step_time
            point = ScalingPoint(plan.world_size, each, plan.estimate.mfu, plan.estimate.step_time, size is chosen)
            points.append((point, plan))
    if not points:
        raise DrawError("no size has a plan, so there is nothing to draw; try more nodes, or remove a constraint")
    first = points[0][1]
    what = "tokens" if first.tokens_per_step else "samples" if first.global_batch else "steps"
    title = f"{first.model} on {first.topology.name.split(' x ')[-1]}, global batch {first.global_batch:,}"
    return draw_scaling(title, what, [point for point, _ in points])


def size_cluster(
    model: Any,
    machine: str | Callable[[int], Topology],
    inputs: Any = None,
    *,
    step_time: float | None = None,
    minimise: Minimise = "nodes",
    nodes: int | Sequence[int] = _NODES,
    every: bool = False,
    **more: Any,
) -> Sizing:
    """Find the best number of nodes for a job (model, batch and constraints). Return that number with its plan, and the
    results for all numbers that were tried.

    Args:
        model: a module that ``torch.export`` accepts, or an exported program. ``inputs``: one global batch, as a tuple
            or dict of arguments.
        machine: name of a preset, or a function from the number of nodes to a topology.
        step_time: greatest number of seconds of a step; ``None``: no limit.
        minimise: ``nodes``, ``money`` or ``energy`` per step, or ``time``.
        nodes: numbers of nodes to try.
        every: plan all numbers in ``nodes``. Otherwise, with ``minimise="nodes"``, the search ends at the fewest nodes
            that are fast enough.
        more: further arguments of :func:`partitioner.partition`.

    Raises :class:`ConstraintError` or :class:`InputsError` for invalid arguments. Raises :class:`SizeError` if no size
    has a plan that is fast enough. Raises :class:`SizeTimeError` if a size without a plan ran out of time.
    """
    if minimise not in _CHOICES:
        raise ConstraintError(f"minimise must be one of {', '.join(_CHOICES)}; got {minimise!r}")
    if not isinstance(machine, str) and not callable(machine):
        raise InputsError(f"machine must be a preset's name or a function of the number of nodes; got {machine!r}")
    nodes = (nodes,) if isinstance(nodes, int) else nodes
    if not nodes or not all(isinstance(n, Integral) and not isinstance(n, bool) and n > 0 for n in nodes):
        raise ConstraintError(f"nodes must be positive whole numbers of machines, like (1, 2, 4); got {tuple(nodes)}")
    check_seconds("step_time", step_time)
    check_seconds("time_limit_s", more.get("time_limit_s"))
    prepared = prepare(model, inputs, **{name: more.pop(name) for name in _OWN if name in more})
    tried: list[Size] = []
    for count in sorted(set(nodes)):
        topology = Topology.preset(machine, nodes=count) if isinstance(machine, str) else machine(count)
        tried.append(_plan_cluster_size(prepared, topology, count, more))
        if not every and minimise == "nodes" and tried[-1].plan is not None and _is_fast_enough(tried[-1], step_time):
            break
    fit = [size for size in tried if size.plan is not None and _is_fast_enough(size, step_time)]
    if not fit:
        raise _explain_no_size(tried, step_time)
    measure = {
        "nodes": lambda s: s.nodes,
        "time": lambda s: s.step_time,
        "money": _read_step_money,
        "energy": _read_step_energy,
    }[minimise]
    return Sizing(min(fit, key=lambda size: (measure(size), size.nodes)), tuple(tried))


def _plan_cluster_size(model: PreparedModel, topology: Topology, nodes: int, more: dict[str, Any]) -> Size:
    """Return the plan of ``model`` on ``topology`` with its money and energy per step; if there is no plan, return the
    reason instead. Errors in the inputs are raised. ``nodes``: number of nodes of ``topology``. ``more``: further
    keyword arguments of ``partition``."""
    try:
        plan = partition(model, topology, **more)
    except InputsError:  # wrong inputs are wrong for every number of nodes
        raise
    except PartitionError as error:
        return Size(nodes, reason=str(error), out_of_time=isinstance(error, TimeLimitError))
    return Size(nodes, plan, money_of(plan), energy_of(plan))


def _is_fast_enough(size: Size, step_time: float | None) -> bool:
    """Return whether a step of the plan in ``size`` takes at most ``step_time`` seconds; ``None``: no limit. ``size``:
    the result of planning a model on a cluster of one size.
    """
    return step_time is None or size.step_time <= step_time


def _read_step_money(size: Size) -> float:
    """Return the US dollars per step of the plan in ``size``. Raise :class:`ConstraintError` if the hardware file gives
    no price. ``size``: the result of planning a model on a cluster of one size.
    """
    return _require_known_value(size.money, "price", "dollars per device and hour")


def _read_step_energy(size: Size) -> float:
    """Return the joules per step of the plan in ``size``. Raise :class:`ConstraintError` if the hardware file gives no
    power. ``size``: the result of planning a model on a cluster of one size.
    """
    return _require_known_value(size.energy, "power_busy", "watts")


def _require_known_value(value: float | None, name: str, unit: str) -> float:
    """Return ``value``; raise :class:`ConstraintError` if it is ``None``. ``name``, ``unit``: for the message: the
    field of the hardware file from which ``value`` is computed, and the unit of this field."""
    if value is None:
        raise ConstraintError(
            f"a device type of the topology has no {name}; set {name} (in {unit}) for this type, under types: "
            "in the topology file"
        )
    return value


def _explain_no_size(tried: Sequence[Size], step_time: float | None) -> SizeError:
    """Return the error for the case that no cluster size satisfies the request. ``tried``: the results of all sizes.
    ``step_time``: the requested upper bound on the seconds of a step; ``None``: no bound."""
    best = min(tried, key=lambda size: size.step_time)
    fastest = f"{format_plural(best.nodes, 'node')} with {best.step_time:.3g} s"
    late = [str(size.nodes) for size in tried if size.out_of_time]
    if late:
        found = "" if best.plan is None else f"; the fastest found is {fastest}"
        message = (
            f"no plan was found in time with {', '.join(late)} nodes, although one may exist{found}; give a larger "
        )
        return SizeTimeError(f"{message}time_limit_s, or fewer nodes to try", tuple(tried))
    if best.plan is None:
        nodes = ", ".join(str(size.nodes) for size in tried)
        return SizeError(f"none of {nodes} nodes has a plan; with {best.nodes}: {best.reason}", tuple(tried))
    message = f"no size reaches a step of {step_time:g} s: the fastest is {fastest}; try more nodes or allow more time"
    return SizeError(message, tuple(tried))


Of = Literal["microbatch", "sequence"]

_WHAT = {"microbatch": "a microbatch of {:,} samples", "sequence": "a sequence of {:,} tokens"}
_DIM = 1  # index of the dim of the sequence in inputs, behind the batch
_MULTIPLE = 1024  # tokens: sequence lengths to try are multiples of it, or of fewer tokens for short sequences


@dataclass(frozen=True)
class Largest:
    """Result of :func:`largest_that_fits`. ``str()`` of it says what fits and what does not.

    Attributes:
        of: what was enlarged: ``microbatch`` or ``sequence``.
        size: the largest size that has a plan, in samples or tokens.
        plan: the plan of this size.
        too_large: the next size that was tried, which has no plan; ``None`` if nothing larger was tried.
        reason: why the next size has no plan.
    """

    of: Of
    size: int
    plan: Plan = field(repr=False)
    too_large: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        """Return one line: the largest size that fits with its memory, mesh and step time, and the size that does not
        fit."""
        fits = (
            f"{_WHAT[self.of].format(self.size)} fits: {memory_text(self.plan)}, {candidate_text(self.plan.chosen)}, "
            f"{seconds_text(self.plan.estimate.step_time)} for a step of "
            f"{format_plural(self.plan.global_batch, 'sample')}"
        )
        if self.too_large is None:
            return f"{fits}; nothing larger was tried"
        return f"{fits}; {_WHAT[self.of].format(self.too_large)} does not: {self.reason}"


@typed_errors("largest_that_fits()")
def largest_that_fits(
    model: Any,
    topology: Topology,
    inputs: Any,
    of: Of = "sequence",
    *,
    most: int = 2**24,
    multiple: int | None = None,
    tolerance: float = 0.0,
    constraints: Constraints | None = None,
    **more: Any,
) -> Largest:
    """Find the largest microbatch, or the longest sequence, that has a plan.

    The size starts at the length of the inputs' sequence, or at a microbatch of 1. It is doubled until there is no
    plan; bisection then finds the largest size in between. The plans are estimates without programs.

    Args:
        model: a module that ``torch.export`` accepts, or an exported program. ``topology``: the cluster.
        inputs: a sample of the batch, as a tuple or dict of arguments. Dim 0 is the batch. In inputs of two or three
            dims, dim 1 is the sequence; its content is repeated to make it longer.
        of: what is enlarged: ``sequence`` (tokens of a sample) or ``microbatch`` (samples that a rank processes at a
            time; the global batch is then one microbatch per device).
        most: largest size to try.
        multiple: only multiples of this number are tried; ``None``: 1 for microbatches; for sequences 1,024 tokens, or
            the length of the inputs if that is less.
        tolerance: the search ends when a size that has no plan is larger than the found one by at most this fraction.
        constraints: choices that the user fixes, such as ``Constraints(tp=8)``.
        more: further arguments of :func:`partitioner.partition`.

    Raises the errors of :func:`partitioner.partition` if the first size has no plan, and :class:`ConstraintError` or
    :class:`InputsError` for invalid arguments.
    """
    if of not in _WHAT:
        raise ConstraintError(f"of must be one of {', '.join(_WHAT)}; got {of!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConstraintError(f"most must be a whole number, 1 or more; got {most!r}")
    asked = constraints or Constraints()
    if of == "microbatch" and asked.microbatch_size is not None:
        raise ConstraintError(
            f"microbatch_size={asked.microbatch_size} is fixed, but of='microbatch' searches for the largest "
            "microbatch; expected no microbatch_size: leave it out"
        )
    plan_of = _of_microbatch if of == "microbatch" else _of_sequence
    plan = plan_of(model, topology, inputs, asked, more, most)
    first = 1 if of == "microbatch" else length_of(inputs)
    if first > most:
        raise ConstraintError(
            f"the inputs have sequences of {first:,} tokens, from which the search starts, but most={most:,} "
            "is less; expected inputs with shorter sequences, or a larger most"
        )
    step = multiple or (1 if of == "microbatch" else min(_MULTIPLE, first))
    good, found = first, plan(first)
    bad: int | None = None
    reason = ""
    while bad is None or bad - good > max(step, tolerance * good):
        size = min(2 * good, most // step * step) if bad is None else (good + bad) // 2 // step * step
        if size <= good:
            break
        try:
            good, found = size, plan(size)
        except PartitionError as error:
            bad, reason = size, getattr(error, "message", error.brief)
    return Largest(of, good, found, bad, reason)


_OWN = "loss", "objective", "precision", "documents"  # arguments of `prepare`; the others are of `partition`


@dataclass
class _SizedModels:
    """The model for inputs of several sizes. The model is captured for few sizes; its graphs for sizes in between are
    derived from the captured graphs.

    ``prepare``: returns the model with inputs of a size, and the global batch to plan it for (``None``: that of the
    inputs). ``device``: the device type to capture for. ``most``: the largest size.
    """

    prepare: Callable[[int], tuple[PreparedModel, int | None]]
    device: str
    most: int
    _captured: dict[int, FoldedModel] = field(default_factory=dict[int, FoldedModel])
    _has_end: bool = False

    def at(self, size: int) -> tuple[PreparedModel, int | None]:
        """Return two values: the model with inputs of ``size`` (tokens of a sample, or samples of a microbatch), whose
        graphs are captured or derived now, and the global batch to plan it for (``None``: that of the inputs). Raise
        the errors of a capture."""
        prepared, batch = self.prepare(size)
        folded = self._captured.get(size) or self._derive(size)
        if folded is None:
            self._captured[size] = prepared.at(batch, None, self.device)[0]
        else:
            prepared.captured_as(batch, folded)
        return prepared, batch

    def _derive(self, size: int) -> FoldedModel | None:
        """Return the graphs of the model for inputs of ``size`` (tokens of a sample, or samples of a microbatch). They
        are derived from the graphs for two other sizes: the next smaller and the next larger one for which the model
        was captured. ``None`` if that is not possible. The model is captured for the largest size once."""
        smaller = max((known for known in self._captured if known < size), default=None)
        if smaller is None:
            return None
        if not self._has_end and size < self.most:
            self._has_end = True
            with suppress(PartitionError):  # such as for a sequence with more positions than the model has
                prepared, batch = self.prepare(self.most)
                self._captured[self.most] = prepared.at(batch, None, self.device)[0]
        larger = min((known for known in self._captured if known > size), default=None)
        if larger is None:
            return None
        return resize_folded(self._captured[larger], self._captured[smaller], (larger, smaller, size))


def _of_microbatch(
    model: Any, topology: Topology, inputs: Any, asked: Constraints, more: dict[str, Any], most: int
) -> Callable[[int], Plan]:
    """Return a function of a microbatch size in samples, at most ``most``. That function returns the estimated plan of
    the model, without instructions for its ranks, for a global batch of one such microbatch per device. ``model``,
    ``topology``, ``inputs``: as given to ``partition``. ``asked``: choices that the user fixed. ``more``: further
    keyword arguments of ``partition``.
    """
    prepared = prepare(model, inputs, **{name: more[name] for name in _OWN if name in more})
    others = {name: value for name, value in more.items() if name not in (*_OWN, "global_batch")}
    devices = topology.num_devices
    models = _SizedModels(lambda size: (prepared, size * devices), torch_device(topology), most)

    def plan(size: int) -> Plan:
        """Return a plan with estimates, and without instructions for its ranks, for microbatches of ``size``
        samples."""
        pins = asked.model_copy(update={"microbatch_size": size})
        if asked.group_size is None:
            models.at(size)
        return partition(
            prepared, topology, global_batch=size * devices, constraints=pins, estimate_only=True, **others
        )

    return plan


def _of_sequence(
    model: Any, topology: Topology, inputs: Any, asked: Constraints, more: dict[str, Any], most: int
) -> Callable[[int], Plan]:
    """Return a function of a sequence length in tokens, at most ``most``. That function returns the estimated plan of
    the model, without instructions for its ranks, for sequences of this length. ``inputs``: one batch, whose sequences
    are lengthened. ``asked``: choices that the user fixed. ``more``: further keyword arguments of ``partition``.
    ``model``, ``topology``: as given to ``partition``.
    """
    own = {name: more[name] for name in _OWN if name in more}
    others = {name: value for name, value in more.items() if name not in _OWN}

    def prepare_length(size: int) -> tuple[PreparedModel, int | None]:
        """Return the model with sequences of ``size`` tokens, and the global batch that the user gave (``None``: that
        of the inputs)."""
        return prepare(model, lengthen_sequences(inputs, size), **own), others.get("global_batch")

    models = _SizedModels(prepare_length, torch_device(topology), most)

    def plan(size: int) -> Plan:
        """Return a plan with estimates, and without instructions for its ranks, for sequences of ``size`` tokens."""
        prepared, _ = models.at(size) if asked.group_size is None else prepare_length(size)
        return partition(prepared, topology, constraints=asked, estimate_only=True, **others)

    return plan


def length_of(inputs: Any) -> int:
    """Return the number of tokens of a sample: the size of dim 1 of the first tensor in ``inputs`` that has two or
    three dims; images and attention masks have four dims. Raise :class:`InputsError` if there is none."""
    lengths = [leaf.shape[_DIM] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() in (2, 3)]
    if not lengths:
        raise InputsError(
            "no input has a sequence dim: expected an input of shape [batch, sequence] or [batch, sequence, "
            "features], or of='microbatch'"
        )
    return int(lengths[0])


def lengthen_sequences(inputs: Any, size: int) -> Any:
    """Return ``inputs`` with sequences of ``size`` tokens: the tokens of each sample are repeated along dim 1. Tensors
    that have no sequence in dim 1 stay unchanged."""
    length = length_of(inputs)

    def stretched(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= _DIM or leaf.shape[_DIM] != length:
            return leaf
        return leaf.index_select(_DIM, torch.arange(size, device=leaf.device) % length)

    return tree_map(stretched, inputs)


_SHORT = 128  # tokens with which the search for the longest sequence starts where a job does not fit
_LONGEST = 2**20
_MOST_SAMPLES = 4096  # samples of the largest microbatch that is tried
_MOST_WAITED_S = 3600.0  # seconds to wait for the second process
_TOLERANCE = 1 / 16  # relative accuracy of the largest sizes: a memory estimate is hardly more exact


@dataclass(frozen=True)
class Fit:
    """Result of :func:`check_fit`. It says whether a job (training of a model with given batch and constraints) fits on
    a cluster. ``str()`` of it has a line for each answer.

    Attributes:
        plan: the job's best plan, as :func:`partitioner.partition` returns it; ``None``: the job does not fit.
        reason: why the job does not fit, and the changes with the least effort that make it fit; empty if it fits.
        length: tokens of a sample; 0 if the inputs are not sequences of tokens.
        microbatch: the largest microbatch that fits; ``None``: not even one sample per device fits.
        sequence: the longest sequence that fits; ``None``: no sequence fits, or the inputs are not sequences.
        run: time, money and energy of the training run; ``None``: no ``tokens`` were given, or the job does not fit.
    """

    plan: Plan | None = field(repr=False)
    reason: str = ""
    length: int = 0
    microbatch: Largest | None = None
    sequence: Largest | None = None
    run: TrainingRun | None = None

    @property
    def margin_bytes(self) -> int | None:
        """Return the bytes of memory that the plan leaves free on the rank with the fullest memory; ``None`` if the
        model does not fit.
        """
        if self.plan is None or not self.plan.estimate.memory:
            return None
        rank = fullest_rank(self.plan)
        return list_usable_bytes(self.plan)[rank] - self.plan.estimate.memory[rank]

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second that the whole cluster processes by the plan; ``None`` if the model does not fit
        or has no sequences."""
        if self.plan is None or not self.length or not self.plan.estimate.step_time:
            return None
        return self.plan.global_batch * self.length / self.plan.estimate.step_time

    def __str__(self) -> str:
        """Return the result as text, one line for each answer: whether the model fits, its mesh and step time, the
        largest sizes, and the training run."""
        lines = [f"fits: no; {self.reason}"]
        if self.plan is not None:
            left = f", {bytes_text(self.margin_bytes)} left" if self.margin_bytes is not None else ""
            rate = self.tokens_per_s
            speed = throughput_text(self.plan) if rate is None else f"{count_text(rate)} tokens/s"
            batch = format_plural(self.plan.global_batch, "sample")
            lines = [
                f"fits: yes, {fit_text(self.plan)}{left} on the fullest rank",
                f"layout: {candidate_text(self.plan.chosen)}",
                f"step: {seconds_text(self.plan.estimate.step_time)} for {batch}, {speed}",
                *filter(None, [describe_tightness(self.plan)]),
            ]
        largest = "not even one sample for each device fits" if self.microbatch is None else str(self.microbatch)
        lines.append(f"largest batch: {largest}")
        if self.length:
            lines.append(f"longest sequence: {'none fits' if self.sequence is None else self.sequence}")
        return "\n".join([*lines, *([f"run: {self.run}"] if self.run is not None else [])])


@typed_errors("check_fit()")
def check_fit(
    model: Any,
    topology: Topology,
    inputs: Any,
    *,
    tokens: float | None = None,
    price: float | None = None,
    longest: int | None = None,
    constraints: Constraints | None = None,
    **more: Any,
) -> Fit:
    """Return whether a job (model, batch and constraints) fits in the memory of ``topology``, the largest microbatch
    and the longest sequence that fit, and the time, money and energy of a training run.

    Args:
        model: a module that ``torch.export`` accepts, or an exported program. ``topology``: the cluster.
        inputs: one global batch, as a tuple or dict of arguments.
        tokens: tokens of the training run; ``None``: no run is computed.
        price: US dollars for one device and hour; ``None``: the price in the hardware file.
        longest: the longest sequence that the model takes, which is tried first; ``None``: 1,048,576 tokens.
        constraints: choices that the user fixes, such as ``Constraints(tp=8)``.
        more: further arguments of :func:`partitioner.partition`.

    Raises the errors of :func:`partitioner.partition` except :class:`CapacityError`, and the errors of
    ``Plan.training_run``.
    """
    if price is not None and tokens is None:
        raise ConstraintError(
            f"price={price!r} without tokens: the price is used for the cost of a training run; expected "
            "tokens=..., the length of the run, or no price"
        )
    for name, value in (("tokens", tokens), ("price", price)):
        if value is not None and not is_positive(value):
            raise InputsError(f"{name} must be a positive number; got {value!r}")
    length = _token_length(inputs)
    plan, reason = None, ""
    try:
        plan = partition(model, topology, inputs, constraints=constraints, **more)
    except CapacityError as error:
        error.suggest()
        reason = str(error)
    run = None
    if plan is not None and tokens is not None:
        samples = None if plan.tokens_per_step or not length else tokens / length
        run = plan.training_run(tokens=tokens if samples is None else None, samples=samples, price=price)
    free = (constraints or Constraints()).model_copy(update={"microbatch_size": None})

    def find_microbatch() -> Largest | None:
        """Return the largest microbatch that fits on the cluster, with its plan; ``None`` if not even one sample for
        each device fits."""
        return _try_largest(model, topology, inputs, of="microbatch", most=_MOST_SAMPLES, constraints=free, **more)

    if not length:
        return Fit(plan, reason, 0, find_microbatch(), None, run)
    most = max(longest or _LONGEST, length)
    starts = (*((most,) if longest else ()), length if plan is not None else min(length, _SHORT))
    found = (
        _try_largest(model, topology, lengthen_sequences(inputs, start), most=most, constraints=constraints, **more)
        for start in starts  # often the longest sequence of the model fits
    )
    with Future(find_microbatch, most_s=_MOST_WAITED_S) as microbatch:  # meanwhile, in a second process
        sequence = next(filter(None, found), None)
        return Fit(plan, reason, length, microbatch.result(), sequence, run)


def _try_largest(model: Any, topology: Topology, inputs: Any, **more: Any) -> Largest | None:
    """Return the largest microbatch or sequence of ``model`` that :func:`largest_that_fits` finds on ``topology``;
    ``None`` if not even the first size that it tries fits in memory. ``inputs``: one global batch. ``more``: further
    keyword arguments of that function.
    """
    try:
        return largest_that_fits(model, topology, inputs, tolerance=_TOLERANCE, **more)
    except CapacityError:
        return None


def _token_length(inputs: Any) -> int:
    """Return the number of tokens of a sample if ``inputs`` are sequences of tokens: tensors of integers with two dims,
    all with the same size of dim 1. Otherwise return 0."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > _DIM]
    lengths = {leaf.shape[_DIM] if leaf.dim() == 2 and not leaf.is_floating_point() else 0 for leaf in leaves}
    return int(lengths.pop()) if len(lengths) == 1 else 0
