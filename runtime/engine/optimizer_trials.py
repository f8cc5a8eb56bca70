"""Trials of an optimizer: copies of it step small tensors, whole and in parts, and the updates are compared.

The copies have the optimizer's class, attributes and options of parameter groups, but no state. They do not hold
tensors of the optimizer, nor objects to which the optimizer only refers: a model, an engine, a process group. Random
generators are restored afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import random
import threading
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from partitioner.runtime.checkpoint.training_state import collect_random_state, set_random_state
from partitioner.runtime.state.disk_offload import KEEPER, find_disk_states
from partitioner.runtime.state.parameters import take_piece

NUM_STEPS = 12  # preconditioning optimizers do so at least every tenth step, most of them in the first or second

# Tolerances relative to the largest update, by bytes per element. They exceed the rounding errors by which vectorized
# and other kernels differ.
_TOLERANCES = {8: 1e-5, 4: 1e-3}
_LEAST_RATE = 1e-2  # a learning rate of zero, as in the first step of a warm-up, would hide all updates
_LARGE = 1e4  # factor of the last gradient, which then exceeds any norm to which an optimizer clips
_NUM_DRAWN = 5  # random tensors per sample: its start, its curvature, and three gradients
_MAX_COPIED_ELEMENTS = 1 << 16  # elements of a tensor that is an optimizer's attribute
_CAPS = {1: (384,), 2: (144, 136)}  # dims of a small tensor: above 128, where some optimizers begin to factor matrices
_HOOKS = frozenset(
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
_TRIAL_LOCK = threading.Lock()  # random generators belong to the process

Optimizer = torch.optim.Optimizer

Part = Callable[[Tensor], list[Tensor]]  # selects the parts of a small tensor that a copy steps


@dataclass(frozen=True)
class ParameterCut:
    """How a plan shards a parameter. ``dims``: indices of the dims along which it is sharded. ``flat``: whether each
    shard is then flattened and cut into one piece for each rank, as under ZeRO. ``stacked``: whether the parameter is a
    stack of parameters of the model along dim 0.
    """

    dims: tuple[int, ...] = ()
    flat: bool = False
    stacked: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.dims or self.flat or self.stacked)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Cut ``whole`` as the plan shards the parameter, and return the parts: halves along each sharded dim and,
        under ZeRO, thirds of each flattened part. Empty parts are left out. ``whole``: a small tensor on which an
        optimizer is tried in place of the parameter.
        """
        parts = [whole]
        for dim in self.dims:
            parts = [chunk for part in parts for chunk in part.chunk(2, dim)]
        if self.flat:
            parts = [take_piece(part, 3, index) for part in parts for index in range(3)]
        return [part for part in parts if part.numel()]

    def parameters(self, whole: Tensor) -> list[Tensor]:
        """Return the model's own parameters that ``whole`` consists of: its slices along dim 0 if it is a stack;
        otherwise ``whole`` itself.
        """
        return [*whole.unbind(0)] if self.stacked else [whole]

    def __str__(self) -> str:
        ways = ["stacked"] if self.stacked else []
        if self.dims:
            ways.append(f"cut along dim {' and '.join(map(str, self.dims))}")
        return ", ".join([*ways, *(["cut flat (ZeRO)"] if self.flat else [])])


@dataclass(frozen=True)
class Sample:
    """Describes a small tensor on which an optimizer is tried in place of the parameter called ``name``. ``shape``: the
    parameter's global shape. ``group``: index of its parameter group in the optimizer. ``cut``: how the plan shards the
    parameter. ``dtype``, ``device``: of the parameter.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    cut: ParameterCut
    dtype: torch.dtype
    device: torch.device

    @property
    def small_shape(self) -> tuple[int, ...]:
        """Return the shape of the small tensor: the parameter's shape, with the size of each dim limited. Sharded dims
        have even sizes.
        """
        num_dims = len(self.shape)
        caps = _CAPS.get(num_dims, (4,) * (num_dims - 2) + (24, 20))
        sizes = [min(size, cap) for size, cap in zip(self.shape, caps, strict=False)]
        return tuple(max(2, size // 2 * 2) if dim in self.cut.dims else size for dim, size in enumerate(sizes))

    def values(self, seed: int, wide: bool) -> Tensor:
        """Return random values for the small tensor. They are normally distributed, with a magnitude that grows or
        shrinks along each dim. ``seed``: determines the values. ``wide``: if true, the values are in float64 or
        complex128, otherwise in the parameter's dtype, but at least in float32.
        """
        generator = torch.Generator().manual_seed(seed)
        result = torch.randn(self.small_shape, generator=generator, dtype=torch.float64)
        for dim, size in enumerate(self.small_shape):
            slopes = torch.linspace(0.2, 2.0, size, dtype=torch.float64) if size > 1 else torch.ones(size)
            slopes = slopes.flip(0) if (seed >> dim) % 2 else slopes
            result *= slopes.reshape([-1 if d == dim else 1 for d in range(len(self.small_shape))])
        dtype = self.dtype if self.dtype.itemsize >= 4 else torch.float32
        if wide:
            dtype = torch.complex128 if dtype.is_complex else torch.float64
        return result.to(self.device, dtype)


@dataclass(frozen=True)
class TrialFinding:
    """The problem that a trial has found with an optimizer. A trial steps small tensors, whole and in parts, and
    compares the updates.

    ``kind``: the optimizer's updates of a part differ from those of the whole (``differs``); the optimizer raises an
    error on parts (``fails``); or it could not be tried (``untried``). ``unit``: whether the trial stepped parts of
    parameters (``parts``) or only some of the parameters, as on one pipeline stage (``stages``). ``sample``: the small
    tensor with which the problem occurred, and the parameter that it represents. ``why``: an explanation.
    """

    kind: Literal["differs", "fails", "untried"]
    unit: Literal["parts", "stages"]
    sample: Sample
    why: str


@dataclass(frozen=True)
class StepCall:
    """How a script calls an optimizer's ``step``. ``args``, ``kwargs``: its positional and keyword arguments other than
    the closure. ``closure``: whether the script passes a closure; ``None`` if this is unknown.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    closure: bool | None = None


class NotCopied(Exception):
    """Raised if a trial cannot copy an optimizer, or if the copy uses an object that was not copied, such as a model or
    process group.
    """


def try_on_parts(optimizer: Optimizer, samples: Sequence[Sample], stages: bool, call: StepCall) -> TrialFinding | None:
    """Try copies of ``optimizer`` on small tensors with random values, which represent its parameters. Compare the
    updates of the whole tensors with those of parts of them, cut as the plan shards the parameters. Return the problem
    that is found; ``None`` if there is none. The optimizer, its parameters and all random generators are unchanged
    afterwards.

    ``samples``: descriptions of the small tensors. ``stages``: whether to compare also with steps on only some of the
    tensors, as on one pipeline stage. ``call``: how the script calls ``step``.
    """
    device = samples[0].device
    if stages and len(samples) == 1:
        samples = [samples[0], samples[0]]
    with _TRIAL_LOCK:
        before = collect_random_state(device)
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                return _try_copies(optimizer, samples, stages, call)
        finally:
            if _has_state_changed(
                before, collect_random_state(device)
            ):  # if nothing was drawn, leave the generators alone: other threads may be drawing
                set_random_state(before, device)


def _has_state_changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether ``one`` and ``other`` differ: two states of random generators, each a dict: generator (``python``,
    ``numpy``, ``torch``, ``cuda``) -> state.
    """
    return any(
        not torch.equal(one[k], other[k]) if isinstance(one[k], Tensor) else one[k] != other[k]
        for k in one
        if k != "numpy"
    ) or ("numpy" in one and not torch.equal(one["numpy"][1], other["numpy"][1]))


def _try_copies(optimizer: Optimizer, samples: Sequence[Sample], stages: bool, call: StepCall) -> TrialFinding | None:
    """Try copies of ``optimizer`` on small tensors that represent its parameters: compare the updates of whole tensors
    and of parts, cut as the plan shards the parameters. Return the problem that is found; ``None`` if there is none.

    There are several ways to copy an optimizer and to call its ``step``. The first way in which a copy can step whole
    tensors and changes them decides. If there is no such way, the result says that the optimizer cannot be tried.
    ``samples``: descriptions of the small tensors. ``stages``: whether to compare also with steps on only some of them,
    as on one pipeline stage. ``call``: how the script calls ``step``.
    """
    why = ""
    closures = (False, True) if call.closure is None else (call.closure,)
    for make, closure, wide in itertools.product((mirror_optimizer, rebuild_optimizer), closures, (True, False)):
        trial = _Trial(optimizer, samples, replace(call, closure=closure), make, wide)
        try:
            found = trial.compare_copies(stages)
        except _WholeStepFailed as error:
            why = why or str(error)
            continue
        if found is not None or trial.moved:
            return found
        why = f"{NUM_STEPS} steps of a copy changed nothing"
    return _report_untried(samples, why)


def _report_untried(samples: Sequence[Sample], reason: str) -> TrialFinding:
    cut = next((s for s in samples if not s.cut.is_whole), None)
    return TrialFinding("untried", "stages" if cut is None else "parts", samples[0] if cut is None else cut, reason)


class _WholeStepFailed(Exception):
    """Raised in the trial of an optimizer if a copy of the optimizer cannot step whole tensors, so that updates of
    parts cannot be compared with anything.
    """


@dataclass
class _SteppedCopy:
    """A copy of an optimizer in a trial, with the tensors that it steps: small tensors that represent the optimizer's
    parameters, or parts of them.

    ``tensors``: index of a small tensor -> the parts of it that are stepped. ``parts``: index of a small tensor ->
    function that selects these parts. ``unit``: "parts", or "stages" if only some of the small tensors are stepped, as
    on one pipeline stage. ``rows``: for each stepped part, the numbers that define its loss. ``before``: index of a
    small tensor -> values of its parts before the last step.
    """

    optimizer: Any
    tensors: dict[int, list[nn.Parameter]]
    parts: dict[int, Part]
    unit: Literal["parts", "stages"]
    rows: list[_TrialRow]
    before: dict[int, list[Tensor]] = field(default_factory=dict)  # the last step

    def list_updates(self, index: int) -> list[Tensor]:
        """Return the changes that the last step of this copy of an optimizer made to the small tensor with the given
        ``index``: one tensor for each of its stepped parts.
        """
        return [t.detach() - b for t, b in zip(self.tensors[index], self.before[index], strict=True)]


@dataclass(frozen=True)
class _TrialRow:
    """A small tensor on which an optimizer is tried, with the numbers that define its loss.

    The loss is the sum of ``gradient * x + curvature * x * x / 2``, where ``x`` is the tensor minus ``start``, its
    value before the first step. ``gradient`` is one of ``gradients``: each step takes the next one.
    """

    tensor: nn.Parameter
    start: Tensor
    curvature: Tensor
    gradients: list[Tensor]

    def set_gradient(self, number: int) -> Tensor:
        moved, gradient = self.tensor.detach() - self.start, self._select_gradient(number)
        self.tensor.grad = gradient + self.curvature * moved
        return moved

    def compute_loss(self, number: int) -> float:
        moved = self.set_gradient(number)
        return float((self._select_gradient(number) * moved + self.curvature * moved * moved / 2).sum().real)

    def _select_gradient(self, number: int) -> Tensor:
        gradient = self.gradients[number % len(self.gradients)]
        return gradient * _LARGE if number == NUM_STEPS - 1 else gradient


class _Trial:
    """A trial of ``optimizer`` with one way to copy it: copies step small tensors, which represent its parameters,
    whole and in parts, and the updates are compared. ``samples``: descriptions of the small tensors. ``make``: function
    that creates a copy from the optimizer and, for each parameter group, the tensors to step. ``call``: how the
    optimizer's ``step`` is called. ``wide``: whether the tensors are in float64 (or complex128).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        samples: Sequence[Sample],
        call: StepCall,
        make: Callable[[Optimizer, Sequence[Sequence[Tensor]]], Any],
        wide: bool,
    ) -> None:
        self.optimizer = optimizer
        self.samples = samples
        self.call = call
        self.make = make
        self.moved = False
        self.draws = False
        numbers = [[s.values(_NUM_DRAWN * i + k, wide) for k in range(_NUM_DRAWN)] for i, s in enumerate(samples)]
        self._starts = [start for start, *_ in numbers]
        self._curvatures = [0.05 + 0.45 * curvature.abs().clamp(max=1.0) for _, curvature, *_ in numbers]
        self._gradients = [gradients for _, _, *gradients in numbers]

    def compare_copies(self, stages: bool) -> TrialFinding | None:
        """Let copies of the optimizer step small tensors, which represent its parameters, whole and in parts. Return
        the first difference between the updates of the whole tensors and of their parts; ``None`` if there is none.
        ``stages``: whether to compare also with steps on only some of the small tensors, as on one pipeline stage.
        Raise :class:`_WholeStepFailed` if a copy cannot step whole tensors.
        """
        try:
            whole = self._copy_parts({i: s.cut.parameters for i, s in enumerate(self.samples)}, "parts")
        except Exception as error:
            raise _WholeStepFailed(_format_error(error)) from error
        others: list[_SteppedCopy] = []
        for parts, unit in self._iterate_variants(stages):
            try:
                others.append(self._copy_parts(parts, unit))
            except Exception as error:
                return self._report_failed(unit, error)
        for number in range(NUM_STEPS):
            try:
                self._step_copy(whole, number)
            except Exception as error:
                raise _WholeStepFailed(_format_error(error)) from error
            for other in others:
                try:
                    self._step_copy(other, number)
                except Exception as error:
                    return self._report_failed(other.unit, error)
                found = self._compare_updates(whole, other)
                if found is not None:
                    return found
        return None

    def _iterate_variants(self, stages: bool) -> Iterator[tuple[dict[int, Part], Literal["parts", "stages"]]]:
        """Yield the ways in which a copy of the optimizer steps only parts of the small tensors, which represent its
        parameters. Each way is a pair: a dict (index of a small tensor -> function that selects the parts to step), and
        "parts", or "stages" if only every other small tensor is stepped, as on one of two pipeline stages. ``stages``:
        whether to yield the ways with "stages", too.
        """
        if any(not s.cut.is_whole for s in self.samples):
            for place in (0, -1):  # of the first rank, and of the last
                yield {i: _select_part(s.cut, place) for i, s in enumerate(self.samples)}, "parts"
        if stages:
            for first in (0, 1):  # every other sample, and those between them
                chosen = list(enumerate(self.samples))[first::2]
                yield {i: s.cut.parameters for i, s in chosen}, "stages"

    def _copy_parts(self, parts: Mapping[int, Part], unit: Literal["parts", "stages"]) -> _SteppedCopy:
        """Return a copy of the optimizer that steps parts of the small tensors, which represent its parameters.
        ``parts``: index of a small tensor -> function that selects its parts. ``unit``: "parts", or "stages" if only
        some of the small tensors are stepped, as on one pipeline stage.
        """
        groups: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        tensors: dict[int, list[nn.Parameter]] = {}
        rows: list[_TrialRow] = []
        for i, part in parts.items():
            starts, curvatures = part(self._starts[i]), part(self._curvatures[i])
            gradients = zip(*(part(gradient) for gradient in self._gradients[i]), strict=True)
            tensors[i] = [nn.Parameter(start.clone()) for start in starts]
            given = zip(tensors[i], starts, curvatures, gradients, strict=True)
            rows += [_TrialRow(tensor, start, curvature, [*drawn]) for tensor, start, curvature, drawn in given]
            groups[self.samples[i].group] += tensors[i]
        _seed_generators(0, self.samples[0].device)
        return _SteppedCopy(self.make(self.optimizer, groups), tensors, dict(parts), unit, rows)

    def _step_copy(self, copied: _SteppedCopy, number: int) -> None:
        """Let the copy ``copied`` of the optimizer do step number ``number`` (from 0), and store the values that its
        tensors had before the step.
        """

        def closure() -> Tensor:
            return torch.tensor(sum(row.compute_loss(number) for row in copied.rows), dtype=torch.float64)

        for row in copied.rows:
            row.set_gradient(number)
        copied.before = {i: [t.detach().clone() for t in tensors] for i, tensors in copied.tensors.items()}
        device = self.samples[0].device
        _seed_generators(number, device)
        before = collect_random_state(device) if number == 0 else None
        _call_step(copied.optimizer, closure, self.call)
        self.draws |= before is not None and _has_state_changed(before, collect_random_state(device))

    def _compare_updates(self, whole: _SteppedCopy, other: _SteppedCopy) -> TrialFinding | None:
        """Compare the last updates of whole small tensors, which represent the optimizer's parameters, with those of
        their parts. Return the first difference that is larger than rounding; ``None`` if there is none. ``whole``,
        ``other``: the copies of the optimizer that stepped the whole tensors and the parts.
        """
        for i, part in other.parts.items():
            sample, updates = self.samples[i], whole.list_updates(i)
            update = torch.stack(updates) if sample.cut.stacked else updates[0]
            largest = float(update.abs().nan_to_num(posinf=0.0).max())
            self.moved |= largest > 0
            slack = 4 * torch.finfo(update.dtype).eps * max(float(t.detach().abs().max()) for t in whole.tensors[i])
            allowed = _TOLERANCES[update.real.dtype.itemsize] * largest + (0.0 if math.isnan(slack) else slack)
            for expected, got in zip(part(update), other.list_updates(i), strict=True):
                same = (expected == got) | (expected.isnan() & got.isnan())
                apart = float(torch.where(same, 0.0, (expected - got).abs()).nan_to_num(nan=math.inf).max())
                if apart > allowed:
                    share = apart / largest if largest else math.inf
                    return TrialFinding("differs", other.unit, sample, self._format_difference(share))
        return None

    def _format_difference(self, share: float) -> str:
        told = "by more than the largest update" if share > 1 else f"by up to {share:.2g} of the largest update"
        return f"{told}; it draws random numbers, which are others on each rank" if self.draws else told

    def _report_failed(self, unit: Literal["parts", "stages"], error: Exception) -> TrialFinding:
        if unit == "stages":
            return _report_untried(self.samples, _format_error(error))
        return TrialFinding("fails", unit, next(s for s in self.samples if not s.cut.is_whole), _format_error(error))


def _select_part(cut: ParameterCut, place: int) -> Part:
    return lambda whole: [cut.parts(whole)[place]]


def _format_error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NotCopied) else f"{type(error).__name__}: {text[:300]}"


def _seed_generators(seed: int, device: torch.device) -> None:
    """Set the random generators of Python, NumPy, torch on the CPU and the GPU ``device`` to ``seed``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _call_step(optimizer: Any, closure: Callable[[], Tensor], call: StepCall) -> None:
    """Call the step of ``optimizer`` without the script's hooks, with the arguments in ``call``. ``closure`` is passed
    only if the script passes a closure, too.
    """
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step  # hooks are the script's
    if call.closure:
        step(optimizer, closure, *call.args, **call.kwargs)
    else:
        step(optimizer, *call.args, **call.kwargs)


# Copies
def mirror_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[Tensor]]) -> Any:
    """Return a copy of all attributes of ``optimizer``, without state. ``groups``: for each parameter group, the
    tensors that replace its parameters.
    """
    return _OptimizerMirror(optimizer, groups).copy_optimizer(optimizer)


def rebuild_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[Tensor]]) -> Any:
    """Return a new optimizer of the same class, created by its constructor. ``groups``: for each parameter group, its
    tensors.

    The arguments of the constructor are the options of the groups, and attributes of the optimizer that have the names
    of the constructor's parameters. Unlike a copy of all attributes, this works if attributes depend on the original
    parameters. Raise :class:`NotCopied` if the value of an argument cannot be found.
    """
    kind, mirror = find_optimizer_class(optimizer), _OptimizerMirror(optimizer, groups)
    defaults = getattr(optimizer, "defaults", {})
    known = {**defaults, **vars(optimizer)}
    given: list[Any] = []
    named: dict[str, Any] = {}
    takes_all = False
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        elif name == "params" or (not given and name not in known):
            given.append(mirror.copy_groups())
        elif name in known:
            named[name] = mirror.copy_value(known[name])
        elif parameter.default is inspect.Parameter.empty:
            raise NotCopied(f"its constructor's argument {name!r} is no attribute of it")
    if takes_all:
        named |= {name: mirror.copy_value(value) for name, value in defaults.items() if name not in named}
    try:
        made = kind(*given, **named)
    except TypeError:
        if not takes_all:
            raise
        made = kind(*given, **{name: value for name, value in named.items() if name not in defaults})
    plain = (bool, int, float, str, type(None))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if isinstance(value, plain)})
    return made


def find_optimizer_class(optimizer: Optimizer) -> type[Any]:
    """Return the class with which the script created ``optimizer``. If the optimizer's states are kept on disk,
    :func:`partitioner.runtime.state.disk_offload.keep_on_disk` has changed the class of the object to a subclass; the
    original class is returned.
    """
    kind = type(optimizer)
    return kind.__mro__[1] if find_disk_states(optimizer) is not None else kind


class _UncopiedPlaceholder:
    """Stands for an object that is not copied with an optimizer, such as a model to which the optimizer refers. Any use
    of the placeholder raises :class:`NotCopied`. ``unit``: name of the object's class, such as ``Linear``.
    """

    def __init__(self, unit: str) -> None:
        self.__dict__["_what"] = unit

    def __getattr__(self, name: str) -> NoReturn:
        raise NotCopied(f"it uses a {self.__dict__['_what']}, of which a trial has no copy")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.__getattr__("__call__")

    def __iter__(self) -> NoReturn:
        self.__getattr__("__iter__")

    def __getitem__(self, key: Any) -> NoReturn:
        self.__getattr__("__getitem__")

    def __len__(self) -> NoReturn:
        self.__getattr__("__len__")


class _OptimizerMirror:
    """Copies the objects that an optimizer holds, each object once, and replaces the optimizer's parameters by small
    tensors, which the copy of the optimizer steps. ``groups``: for each parameter group, the small tensors.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # copied objects, kept alive because their ids are keys of ``_made``
        self._own = optimizer
        some = next(t for given in groups for t in given)
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            for parameter in group["params"]:
                self._made[id(parameter)] = given[0] if given else some
            self._made[id(group["params"])] = [*given]
        self._groups = optimizer.param_groups

    def copy_groups(self) -> list[dict[str, Any]]:
        """Return copies of the optimizer's parameter groups, with small tensors in place of the parameters, and a
        learning rate of at least 0.01.
        """
        found = [self.copy_value(group) for group in self._groups]
        for group in found:
            _raise_rate(group)
        return found

    def copy_optimizer(self, original: Optimizer) -> Any:
        """Return a copy of the optimizer ``original`` without state and hooks, with small tensors in place of its
        parameters. Raise :class:`NotCopied` if it cannot be copied.
        """
        kind = find_optimizer_class(original)
        made = object.__new__(kind)
        self._made[id(original)] = made
        for name, value in vars(original).items():
            if name in _HOOKS:
                made.__dict__[name] = OrderedDict()
            elif name == "state":
                factory = value.default_factory if isinstance(value, defaultdict) else dict
                self._made[id(value)] = made.__dict__[name] = defaultdict(factory)
            elif name == "step":
                if not getattr(value, "_wrapped_by_lr_sched", False):
                    raise NotCopied("its step has been replaced by another function")
            elif name != KEEPER:
                made.__dict__[name] = self.copy_value(value)
        for group in made.param_groups:
            _raise_rate(group)
        return made

    def copy_value(self, value: Any) -> Any:
        """Return a copy of ``value``, an object that the optimizer holds; the same copy each time for the same object.
        Raise :class:`NotCopied` if the optimizer holds too many or too large objects.
        """
        if id(value) in self._made:
            return self._made[id(value)]
        if len(self._kept) > 20_000:
            raise NotCopied("it holds more objects than a trial copies")
        made = self._copy_value(value)
        self._made[id(value)] = made
        self._kept.append(value)
        return made

    def _copy_value(self, value: Any) -> Any:
        """Return a new copy of ``value``, depending on its type. Models and objects of this project are replaced by
        placeholders that raise an error if they are used.
        """
        if value is None or isinstance(value, _SHARED):
            return value
        if isinstance(value, Optimizer):
            return self.copy_optimizer(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, Tensor):
            if value.numel() > _MAX_COPIED_ELEMENTS:
                raise NotCopied(f"it holds a tensor of {value.numel()} elements besides its parameters and its state")
            return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
        if isinstance(value, types.FunctionType):
            return self._copy_function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy_value(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self.copy_value(given) for name, given in value.keywords.items()}
            return functools.partial(self.copy_value(value.func), *map(self.copy_value, value.args), **named)
        if isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] == "partitioner":
            return _UncopiedPlaceholder(type(value).__name__)
        if isinstance(value, dict):
            return self._copy_dict(value)
        if isinstance(value, list | deque | set):
            made = copy.copy(value)
            made.clear()
            self._made[id(value)] = made
            add = made.add if isinstance(made, set) else made.append
            for item in value:
                add(self.copy_value(item))
            return made
        if isinstance(value, tuple):
            items = [self.copy_value(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return self._copy_object(value)

    def _copy_function(self, value: types.FunctionType) -> types.FunctionType:
        """Return a copy of the function ``value`` with copies of its closure variables; ``value`` itself if it is not a
        closure.
        """
        if value.__closure__ is None:
            return value
        cells = tuple(types.CellType() for _ in value.__closure__)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        self._made[id(value)] = made
        for cell, original in zip(cells, value.__closure__, strict=True):
            with contextlib.suppress(ValueError):  # the cell is still empty
                cell.cell_contents = self.copy_value(original.cell_contents)
        return made

    def _copy_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        """Return a copy of the dict ``value`` with copies of its keys and values."""
        made = copy.copy(value)
        made.clear()
        self._made[id(value)] = made
        for key, item in value.items():
            made[self.copy_value(key)] = self.copy_value(item)
        return made

    def _copy_object(self, value: Any) -> Any:
        """Return a copy of ``value`` with copies of its attributes. Objects of torch, and objects whose class cannot
        create an empty instance, such as a ``weakref.proxy``, are replaced by placeholders that raise an error if they
        are used.
        """
        if type(value).__module__.startswith("torch") or not hasattr(value, "__dict__"):
            with contextlib.suppress(Exception):
                return (
                    copy.deepcopy(value)
                    if not hasattr(value, "__dict__")
                    else _UncopiedPlaceholder(type(value).__name__)
                )
            return _UncopiedPlaceholder(type(value).__name__)
        try:
            made = object.__new__(type(value))
        except TypeError:
            return _UncopiedPlaceholder(value.__class__.__name__)  # for a proxy: the class of the referenced object
        self._made[id(value)] = made
        for name, item in vars(value).items():
            made.__dict__[name] = self.copy_value(item)
        return made


_SHARED = (
    *(bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size),
    *(types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
)


def _raise_rate(group: dict[str, Any]) -> None:
    """Increase the learning rate of the parameter group ``group`` to 0.01 if it is smaller, so that updates are
    visible.
    """
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        group["lr"] = rate.detach().clone().clamp_(min=_LEAST_RATE) if rate.is_floating_point() else rate
    elif isinstance(rate, int | float) and 0 <= rate < _LEAST_RATE:
        group["lr"] = _LEAST_RATE
