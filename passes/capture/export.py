"""Run ``torch.export`` on a fake copy of the user's model: a deep copy whose parameters and buffers are fake tensors.

A fake tensor has a shape and a dtype but no values. The user's model is therefore not changed, and no weight is copied.
Tied weights stay tied. Plain tensors that a module holds as attributes are constants of the model and keep their
values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import linecache
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.fx import proxy as fx_proxy
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree

from partitioner.passes.capture.buffers import trace_buffer_writes, trace_state_aliases
from partitioner.passes.capture.wrappers import copy_model, format_leaves
from partitioner.passes.errors import CaptureError, InputsError, PartitionError
from partitioner.passes.experts.traced_loops import TracedLoops, trace_expert_loops
from partitioner.passes.faults import FRAME, is_user_file, shorten_file_path
from partitioner.passes.ir.lifted_numbers import LiftedNumber, LiftScope, NotLiftable, is_lifted, trace_number_functions
from partitioner.passes.ir.model import leaf_paths
from partitioner.passes.normalize.attention_masks import trace_flex_attention
from partitioner.passes.ops.experts import trace_grouped_products
from partitioner.passes.ops.fake_quantize import OBSERVERS_OFF, trace_fused_quantizers
from partitioner.passes.ops.random import trace_random_draws
from partitioner.passes.ops.recurrent import trace_recurrent_networks
from partitioner.passes.select.traced_selections import trace_selections
from partitioner.passes.trace.autocast import trace_autocast
from partitioner.passes.trace.autograd_functions import trace_custom_functions
from partitioner.passes.trace.concrete_scalars import trace_concrete_scalars, trace_module_conversions
from partitioner.passes.trace.inner_gradients import trace_inner_gradients
from partitioner.passes.trace.kv_cache import switch_caches_off
from partitioner.passes.trace.layer_equality import is_simple
from partitioner.passes.trace.scans import trace_scans

with contextlib.suppress(ImportError):  # torch.export's tracer, otherwise imported at its first call
    importlib.import_module("torch.export._trace")

_CPU, _META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Counter:
    """A Python number that forward changes: the attribute ``name`` of the module with path ``path``.

    In the fake copy (the copy with fake tensors that is traced), a 0-dimensional buffer named ``buffer`` stands for the
    number. ``value``: the number before the first call.
    """

    path: str
    name: str
    buffer: str
    value: int | float

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if isinstance(self.value, float) else torch.int64


@dataclass(frozen=True)
class ParameterlessCopy:
    """A copy of a model for tracing (also called the fake copy), whose parameters and buffers are fake tensors, with
    options and records of the trace.

    ``module``: the copy. ``mode``: the mode of the fake tensors. ``caches``: configurations in which generation caches
    were on; they are switched off unless ``caches_kept`` is true. ``casts``: device type (``cpu`` or ``cuda``) whose
    ``torch.autocast`` regions take effect; ``None`` if none do. ``buffer_values``: the original model's buffers with
    values, by name. ``read_buffers``: names of the buffers on whose values forward branched. ``loops``: a record of the
    traced loops over the experts that have rows. ``numbers``: values of inputs that are Python numbers, by path;
    forward gets a tensor-like lifted number for each. ``scope``: records how forward used the lifted numbers.
    ``counters``: Python numbers that forward changes and that buffers stand for. ``attributes``: (module path,
    attribute name) -> value that is set before forward runs. ``warm_up``: called on each new fake copy before it is
    traced, to run forward once.
    """

    module: nn.Module
    mode: FakeTensorMode
    caches: tuple[Any, ...] = ()
    casts: str | None = None
    caches_kept: bool = False
    buffer_values: Mapping[str, Tensor] = field(default_factory=dict)
    read_buffers: set[str] = field(default_factory=set)
    loops: TracedLoops = field(default_factory=TracedLoops)
    numbers: Mapping[str, int | float] = field(default_factory=dict[str, int | float])
    counters: tuple[Counter, ...] = ()
    attributes: Mapping[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    warm_up: Callable[[ParameterlessCopy], None] | None = None
    scope: LiftScope = field(default_factory=lambda: LiftScope(_format_current_line))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=_CPU)


def make_fake_copy(
    model: nn.Module,
    dtype: torch.dtype | None,
    mode: FakeTensorMode | None = None,
    casts: str | None = None,
    keep_caches: bool = False,
) -> ParameterlessCopy:
    """Return a copy of ``model`` for tracing, whose parameters and buffers are fake tensors (shapes and dtypes without
    values).

    Raises :class:`CaptureError` if the model cannot be copied.

    Args:
        dtype: dtype of the copy's floating-point tensors; ``None`` keeps their dtypes.
        mode: fake tensor mode of the copy; ``None`` creates one.
        casts: device type (``cpu`` or ``cuda``) whose ``torch.autocast`` regions take effect; ``None`` if none do.
        keep_caches: whether generation caches that the model's configurations switch on stay on; if false, they are
            switched off.
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    memo: dict[int, Any] = {}

    def make_fake(tensor: Tensor) -> Tensor:
        empty = torch.empty(tensor.shape, dtype=cast_floating_dtype(tensor.dtype, dtype), device=_META)
        return FakeTensor(mode, empty, _CPU)  # ten times as fast as creating it in the fake tensor mode

    for parameter in model.parameters():
        made = memo[id(parameter)] = make_fake(parameter).requires_grad_(parameter.requires_grad)
        made._is_param = True  # what ``nn.Parameter`` sets, which would take another view first
    for buffer in model.buffers():
        memo[id(buffer)] = make_fake(buffer)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = make_fake(value) if value.is_meta else value.detach().to(_CPU)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fake_copy = copy_model(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "remove attributes that copy.deepcopy cannot copy (locks, handles, process groups) from the module, "
            "or pass an ExportedProgram"
        ) from error
    held = {n: b for n, b in model.named_buffers() if not b.is_meta and not isinstance(b, FakeTensor)}
    return ParameterlessCopy(
        fake_copy, mode, () if keep_caches else switch_caches_off(fake_copy), casts, keep_caches, held
    )


def cast_floating_dtype(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """Return ``to`` if ``dtype`` is a floating-point type and ``to`` is not ``None``; otherwise return ``dtype``."""
    return to if to is not None and dtype.is_floating_point else dtype


def export_parameterless_copy(
    fake_copy: ParameterlessCopy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool = True,
    diagnose: bool = True,
) -> ExportedProgram:
    """Trace ``fake_copy``, a copy of the model with fake tensors, with ``torch.export``, and return the exported
    program.

    Raises :class:`InputsError` if forward fails on these inputs even without a trace. Raises :class:`CaptureError`,
    with the model's source line and torch.export's reason, if forward cannot be traced.

    Args:
        args: positional arguments of forward.
        kwargs: keyword arguments of forward.
        train: whether the ``backward`` of user-defined ``torch.autograd.Function`` classes is traced, too.
        diagnose: whether failures are explained by these errors; if false, the original exception is raised.
    """
    random_operators: list[str] = []
    try:
        own = trace_custom_functions() if train else contextlib.nullcontext()
        casts = trace_autocast(fake_copy.casts, _format_current_line)
        known = trace_concrete_scalars(
            fake_copy.module, fake_copy.buffer_values, fake_copy.read_buffers, random_operators
        )
        contained, written = (
            _return_results_in_containers(fake_copy.module, bare=fake_copy.caches_kept),
            trace_buffer_writes(fake_copy.module, in_float64=fake_copy.casts is None),
        )
        aliases = trace_state_aliases(fake_copy.module)
        with (
            _silence_torch(),
            _record_user_lines(),
            own,
            casts,
            contained,
            written,
            aliases,
            _trace_inference_mode(),
            trace_inner_gradients(_format_current_line),
            _trace_conversions(fake_copy),
            known,
            trace_selections(is_user_file),
            _trace_special_functions(fake_copy.module),
            trace_expert_loops(fake_copy.loops),
            _lift_numbers(fake_copy),
        ):
            program = torch.export.export(fake_copy.module, args, kwargs, strict=False)
        if fake_copy.scope.problem:
            raise NotLiftable(fake_copy.scope.problem)
        return program
    except (PartitionError, NotLiftable):
        raise
    except Exception as error:
        if not diagnose:
            raise
        failure = _forward_failure(fake_copy, args, kwargs)
        if failure is not None:
            raise InputsError(_explain_failure(fake_copy.module, failure, args, kwargs)) from error
        raise CaptureError(_explain_trace_failure(fake_copy.module, error, random_operators)) from error


@contextlib.contextmanager
def _silence_torch() -> Iterator[None]:
    """Return a context for a trace in which torch issues no warnings and logs, uses no fused kernels for transformer
    encoders, and does not check the arguments of ``torch.distributions``.

    The fused kernels would hide the encoder's operators from the trace, and the checks would read values of tensors,
    which a trace does not have.
    """
    fused, disabled = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    looks = Distribution._validate_args
    torch.backends.mha.set_fastpath_enabled(False)
    Distribution.set_default_validate_args(False)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        Distribution.set_default_validate_args(looks)
        logging.disable(disabled)


@contextlib.contextmanager
def _trace_inference_mode() -> Iterator[None]:
    """Return a context in which ``torch.inference_mode`` only switches gradients off, like ``torch.no_grad``, so that
    it can be traced.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self._inference_mode_context)

    with (
        mock.patch.object(torch.inference_mode, "__enter__", enter),
        mock.patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


@contextlib.contextmanager
def _return_results_in_containers(model: nn.Module, bare: bool) -> Iterator[None]:
    """Return a context in which the forward of ``model`` returns its results in containers that pytree knows, such as
    dicts for dataclasses.

    Args:
        bare: whether results that are neither tensors nor plain values, such as cache objects, are replaced by
          ``None``.
    """
    forward = model.forward

    @functools.wraps(forward)
    def forward_to_containers(*args: Any, **kwargs: Any) -> Any:
        output = convert_to_containers(forward(*args, **kwargs))
        return pytree.tree_map(lambda leaf: leaf if _is_tensor_or_simple(leaf) else None, output) if bare else output

    with mock.patch.dict(model.__dict__, {"forward": forward_to_containers}):
        yield


@contextlib.contextmanager
def _lift_numbers(fake_copy: ParameterlessCopy) -> Iterator[None]:
    """Return a context in which the forward of ``fake_copy``, a copy of the model with fake tensors, computes with
    :class:`LiftedNumber` objects in place of Python numbers. Operations on a lifted number are traced as operators on a
    0-dimensional tensor.

    The replaced numbers are the inputs in ``fake_copy.numbers`` and the attributes of modules in
    ``fake_copy.counters``. When forward ends, the value of each of these attributes is written to the buffer that
    stands for it.
    """
    if not fake_copy.numbers and not fake_copy.counters:
        yield
        return
    forward = fake_copy.module.forward

    def lift(path: str, leaf: Any) -> Any:
        if path not in fake_copy.numbers or not isinstance(leaf, Tensor):
            return leaf
        return LiftedNumber(leaf, fake_copy.numbers[path], ("given", path), fake_copy.scope)

    @functools.wraps(forward)
    def forward_with_lifted_numbers(*args: Any, **kwargs: Any) -> Any:
        """Call forward with lifted numbers, whose operations are traced, in place of Python numbers. Write the numbers
        that forward changed to the buffers that stand for them, and return the output."""
        fake_copy.scope.start()
        holders = [(vars(fake_copy.module.get_submodule(c.path)), c) for c in fake_copy.counters]
        for held, counter in holders:
            buffer = fake_copy.module.get_buffer(counter.buffer)
            # forward computes with a copy, because the buffer is overwritten at the end
            value = buffer.detach().clone()
            held[counter.name] = LiftedNumber(value, counter.value, ("state", counter.full_name), fake_copy.scope)
        output = forward(*map_leaves(lift, args), **map_leaves(lift, kwargs))
        for held, counter in holders:
            _write_counter(fake_copy.module.get_buffer(counter.buffer), held[counter.name], counter, fake_copy.scope)
        return output

    with mock.patch.dict(fake_copy.module.__dict__, {"forward": forward_with_lifted_numbers}), trace_number_functions():
        yield


def _write_counter(buffer: Tensor, value: Any, counter: Counter, scope: LiftScope) -> None:
    """Write ``value``, a Python number that forward left in an attribute, to the 0-dimensional ``buffer`` that stands
    for the number in the trace.

    Raise :class:`NotLiftable` if ``value`` is not a number, or if it is a float and the number before forward was an
    int.

    ``counter``: the attribute, with its name and its value before forward. ``scope``: records how forward uses such
    numbers; a use that raises an error is recorded first.
    """
    with torch.no_grad():
        if is_lifted(value):
            buffer.copy_(value.tensor)
        elif type(value) in (int, float):
            buffer.fill_(value)
        else:
            raise scope.refuse(f"{counter.full_name} = a {type(value).__name__}")
        if isinstance(value, float) and not isinstance(counter.value, float):
            raise scope.refuse(f"{counter.full_name}, a whole number, as a fraction")


def _is_tensor_or_simple(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or is_simple(leaf)


@contextlib.contextmanager
def _trace_special_functions(model: nn.Module) -> Iterator[None]:
    """Return a context for tracing ``model``, in which equivalent functions replace those functions of torch that
    torch.export cannot trace, or only as very many operators."""
    with contextlib.ExitStack() as stack:
        for context in (
            trace_grouped_products(),
            trace_random_draws(_format_current_line),
            trace_flex_attention(),
            trace_scans(model),
            trace_recurrent_networks(_format_current_line),
            trace_fused_quantizers(_format_current_line),
        ):
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def _record_user_lines() -> Iterator[None]:
    """Return a context in which each traced operator records only the source line of the user's function that called
    it. Outside of this context, torch.export records the line of a ``forward`` and collects the text of every stack
    frame."""
    known = hasattr(TracerBase, "_filter_traceback_frames") and hasattr(fx_proxy, "CapturedTraceback")
    if not known:  # this version of torch has no such functions
        yield
        return
    unchanged = mock.patch.object(TracerBase, "_filter_traceback_frames", lambda tracer, line: line)
    with unchanged, mock.patch.object(fx_proxy, "CapturedTraceback", _UserLine):
        yield


class _UserLine(tuple[str, ...]):
    """Replacement of fx's traceback class: a tuple with the innermost stack frame of the user's code inside a forward,
    as text. It is empty if no user code or no forward is on the stack."""

    @classmethod
    def extract(cls) -> _UserLine:
        """Return a tuple with the innermost frame of the user's code on the present stack, if a forward has called it;
        otherwise an empty tuple."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        within = frame
        while within is not None and within.f_code.co_name not in _ENTRIES:
            within = within.f_back
        if frame is None or within is None:
            return cls()
        return cls([f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'])

    def summary(self) -> _UserLine:
        return self

    def format(self) -> _UserLine:
        return self


_ENTRIES = ("forward", "with_loss")  # the functions by which a trace enters a model; the latter also calls the loss


def try_forward(
    fake_copy: ParameterlessCopy, args: tuple[Any, ...], kwargs: dict[str, Any], *, constants: bool = False
) -> Any:
    """Call the forward of ``fake_copy``, a copy of the model with fake tensors, with the arguments ``args`` and
    ``kwargs``, without a trace. Return the output, or the exception that forward raises.

    Args:
        constants: whether tensors that forward creates from neither inputs nor weights have values; if false, they are
            fake, too.
    """
    try:
        mode = contextlib.nullcontext() if constants else fake_copy.mode
        with (
            _silence_torch(),
            mode,
            torch.no_grad(),
            trace_grouped_products(),
            trace_scans(fake_copy.module),
            trace_recurrent_networks(_format_current_line),
            _trace_conversions(fake_copy),
            _lift_numbers(fake_copy),
        ):
            return fake_copy.module(*args, **kwargs)
    except Exception as error:
        return error


def _trace_conversions(fake_copy: ParameterlessCopy) -> contextlib.AbstractContextManager[None]:
    return trace_module_conversions(fake_copy.module, in_float64=fake_copy.casts is None)


def _forward_failure(fake_copy: ParameterlessCopy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return the exception that a model's forward raises with the arguments ``args`` and ``kwargs`` without a trace.
    Return ``None`` if forward raises none, or only because fake tensors have no values. ``fake_copy``: a copy of the
    model with fake tensors."""
    failure = try_forward(fake_copy, args, kwargs)
    torchs = type(failure).__module__.partition(".")[0] == "torch" or isinstance(failure, RecursionError)
    wanting = torchs or any(word in str(failure).lower() for word in _WITHOUT_VALUES)
    return failure if isinstance(failure, Exception) and not wanting else None


# Parts of the messages of exceptions that are raised only because fake tensors have no values.
_WITHOUT_VALUES = ("fake", "meta", "does not require grad", ".numpy() is not supported for tensor subclasses")


def _explain_failure(model: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the error message for ``error``, which the forward of ``model`` raised with the arguments ``args`` and
    ``kwargs``: source line, reason and input shapes."""
    return (
        f"{type(model).__name__}.forward fails on these inputs{locate_error(error)}: "
        f"{type(error).__name__}: {_read_first_line(error)}; correct the inputs, or the model's sizes (if the batch "
        "was chosen for a configuration, give FILE.py:FUNCTION, your own function that returns model and batch)\n"
        f"The inputs are {format_leaves([*leaf_paths(args), *leaf_paths(kwargs)])}."
    )


_NUMBERS = (
    "shapes and control flow must not depend on tensors' numbers; change that line (torch.where instead of if, "
    "torch.maximum and clamp instead of max and min), or pass an ExportedProgram "
    "(a loop that passes over experts without rows can go through all of them: no rows add nothing)"
)
_DRAWN = (
    "a random number ({}) decides here what forward computes, and a plan is one way through forward for all steps: "
    "compute both and let the number choose, as in x = torch.where(torch.rand(()) < p, layer(x), x), which draws one "
    "number for the whole batch; or decide outside of the model"
)
_LEN_CALL = re.compile(r"\blen\(")
_LEN = (
    "how many rows a mask selects only the data tell, and len() makes a number of it: ask for rows.shape[0], or for "
    "rows.numel()"
)
# Function of torch that reads numbers out of tensors -> what the user should write instead.
_ADVICE_BY_FUNCTION = {
    "_detect_is_causal_mask": "torch looks whether a mask that is an input is causal: say so (is_causal=, of "
    "nn.Transformer tgt_is_causal=), or make the mask in forward or in a buffer",
    "ctc_loss": "the lengths of F.ctc_loss decide shapes: compute it outside of the model, or with plain operators",
    "_calculate_qparams": f"an observer of fake quantisation {OBSERVERS_OFF}",
    "flex_attention": "what flex_attention is given is no operator that can be sharded: use "
    "scaled_dot_product_attention with a mask",
}

# Part of a message of torch.export -> what the user should do.
_ADVICE = {
    "RecursionError": "modules or calls are nested deeper than Python's limit: raise it (sys.setrecursionlimit), "
    "unless forward calls itself without end",
    ".numpy()": "functions of NumPy are not part of a graph: compute it by functions of torch, or outside of the model",
    "not a known type": "forward must return tensors, in tuples, lists, dicts, named tuples or dataclasses: a plan has "
    "to know each of them",
}


def _explain_trace_failure(model: nn.Module, error: Exception, random_operators: list[str]) -> str:
    """Return the error message that says why ``model`` cannot be traced, with its source line and advice.

    Args:
        error: the exception that torch.export raised.
        random_operators: if forward tried to read a tensor as a Python number and random operators compute this tensor,
            the names of these operators; otherwise empty. The advice in the message depends on it.
    """
    called = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    where, said = locate_error(error), f"{type(error).__name__}: {error}"
    by_draw = [_DRAWN.format(", ".join(dict.fromkeys(random_operators)))]
    by_function = (_ADVICE_BY_FUNCTION[name] for name in reversed(called) if name in _ADVICE_BY_FUNCTION)
    by_text = (advice for text, advice in _ADVICE.items() if text in said)
    asks_len = _LEN_CALL.search(where) and "integer" in str(error)
    is_drawn = random_operators and isinstance(error, GuardOnDataDependentSymNode)
    instead = [*(by_draw if is_drawn else ()), *by_function, *by_text, *((_LEN,) if asks_len else ()), _NUMBERS][0]
    return (
        f"{type(model).__name__} cannot be traced{where}.\n"
        f"torch.export says: {type(error).__name__}: {_read_first_line(error)}\n{instead[0].upper()}{instead[1:]}."
    )


def _read_first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def locate_error(error: Exception, *, excluded_file: str = "") -> str:
    """Return the location of ``error`` as text `` at file:line (code)`` for messages: the innermost frame in its
    traceback that is in the user's code. Return an empty text if there is none.

    Args:
        excluded_file: path of a file whose frames are skipped.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if is_user_file(f.filename) and f.filename != excluded_file]
    if user:
        return f" at {shorten_file_path(user[-1].filename)}:{user[-1].lineno} ({user[-1].line})"
    named = [f for f in FRAME.findall(str(error)) if is_user_file(f[0])]
    return f" at {shorten_file_path(named[-1][0])}:{named[-1][1]}" if named else ""


def _format_current_line() -> str:
    """Return `` (file:line)``, for messages, of the innermost line of the user's code on the present call stack; an
    empty text if there is none."""
    frames = [f for f in traceback.extract_stack() if is_user_file(f.filename)]
    return f" ({shorten_file_path(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def format_frame_line(frame: FrameType) -> str:
    """Return `` at file:line (code)`` for the line that the stack frame ``frame`` executes. If the code cannot be read,
    `` (code)`` is left out."""
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f" at {shorten_file_path(frame.f_code.co_filename)}:{frame.f_lineno}" + (f" ({code})" if code else "")


def convert_to_containers(tree: Any) -> Any:
    """Return ``tree``, an output of forward, with dicts in place of objects that pytree does not know: dataclasses,
    namespaces and other mappings."""
    if isinstance(tree, Mapping):
        fields: Any = tree
    elif isinstance(tree, SimpleNamespace):
        fields = vars(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    else:
        fields = None
    if fields is not None and pytree.tree_is_leaf(tree):
        return {name: convert_to_containers(value) for name, value in fields.items()}
    return tree if pytree.tree_is_leaf(tree) else pytree.tree_map(convert_to_containers, tree)


def map_leaves(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return the pytree ``tree`` with each leaf replaced by ``change(path, leaf)``, where the path is a text such as
    ``past.0.key``."""
    leaves, spec = pytree.tree_flatten(tree)
    paths = [path for path, _ in leaf_paths(tree)]
    return pytree.tree_unflatten([change(p, leaf) for p, leaf in zip(paths, leaves, strict=True)], spec)
