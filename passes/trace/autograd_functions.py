"""Trace the gradients of ``torch.autograd.Function`` classes in the model's code, and check the model's hooks.

A traced forward does not contain ``backward``, so a straight-through rounding would have no gradient at all. For ``y =
f(x)`` with ``backward(g) = B g + c``, :func:`trace_custom_functions` computes ``f(x) + T(x - detach(x))``, where ``T``
is ``B`` transposed. The second term is zero, and its gradient is exactly ``B g``. The added operators are ordinary
ones, so they are sharded, cut and recomputed like any others.

The part ``c`` does not depend on the gradient of ``y``; a function may use such a part to inject an auxiliary loss.
Autograd runs ``backward`` only if a result of the function contributes to the loss. In that case,
:func:`add_loss_terms` adds the term ``sum(c (x - detach(x)))`` to the loss. The term is zero and has the gradient
``c``. Loss scales, microbatches and shards treat it like all other terms of the loss.

:func:`check_hooks` handles hooks, which a trace does not record or must not call. Hooks that only observe are left out,
with a note to the user. Hooks on gradients that do more raise an error. Hooks on forward that do more are traced
together with forward. :func:`undo_hook_changes` restores objects outside of the model that a hook has changed, so that
no fake tensor stays in them.

Requires: for hooks, a module before it is traced; for loss terms, a captured graph with the marker ``partition::own``
on the results of such functions. Provides: a graph without markers whose loss contains the terms, and a module whose
gradients are defined by its forward and its ``Function`` classes alone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import operator
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from typing import Any, NoReturn, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import graph
from torch.autograd.function import Function, FunctionCtx, _is_setup_context_defined, _SingleLevelFunction
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from partitioner.passes.errors import PartitionError, UnsupportedError
from partitioner.passes.faults import is_user_file, shorten_file_path
from partitioner.passes.ir.collectives import _library
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.linearity import NotAffine
from partitioner.passes.ir.model import Captured
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.trace.autocast import without_autocast
from partitioner.passes.trace.hook_sources import GIVEN, MODEL, HookValue, describe_hook_effect, find_code
from partitioner.passes.trace.layer_reuse import pause_trace_and_journal
from partitioner.passes.trace.transpose import ASKS_NUMBERS, TransposedBackward, transpose_backward

aten = torch.ops.aten
CHECKPOINT_NOTE = (
    "activation checkpointing in the model ({where}) is left to the plan, which chooses what is recomputed: "
    'Constraints(recompute="full") recomputes all layers, "selective" what is quick'
)
OFFLOAD_NOTE = (
    "activations that the model moves to host memory ({where}) are left to the plan: "
    'Constraints(offload="activations") moves them'
)

_library.define("own(Tensor x, Tensor[] terms, Tensor[] inputs) -> Tensor")

torch.library.impl("partition::own", "CompositeExplicitAutograd", lambda x, *_: x.clone(), lib=_library)
torch.library.register_fake("partition::own", lambda x, *_: torch.empty_like(x), lib=_library)


def _save_counts(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: Tensor) -> None:
    """Store in ``ctx``, for the backward of the operator ``partition::own(tensor, loss terms, inputs)``, the lengths of
    the two lists with which the operator was called. ``inputs``: the arguments of this call. ``output``: its result,
    which is not used.

    During a trace, the operator marks ``tensor``, the result of a user's ``torch.autograd.Function``, and the inputs of
    this function. The loss terms are zeros with a gradient; they are added to the loss if the loss depends on the
    result.
    """
    ctx.counts = len(inputs[1]), len(inputs[2])


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], list[None]]:
    """Compute the backward of the operator ``partition::own(tensor, loss terms, inputs)``, which returns ``tensor``
    unchanged. Return ``grad``, the gradient of the result, as the gradient of ``tensor``, and a list of ``None`` for
    each of the two lists. ``ctx``: has the lengths of these lists.

    During a trace, the operator only marks the result of a user's ``torch.autograd.Function``.
    """
    terms, inputs = ctx.counts
    return grad, [None] * terms, [None] * inputs


torch.library.register_autograd("partition::own", _pass_gradient, setup_context=_save_counts, lib=_library)
# ``own(result, terms, inputs)`` marks a result of a function that was applied to ``inputs``. If the loss depends on the
# result, ``terms`` are added to the loss.
OWN = torch.ops.partition.own.default

_CHECKPOINT_ARGUMENTS = 2  # arguments of CheckpointFunction.apply before those of the function


class _Context(FunctionCtx):
    """Replacement, during a trace, of the ``ctx`` object through which ``forward`` of a ``torch.autograd.Function``
    passes tensors and flags to ``backward``. It stores what torch's own object stores."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        """Start with nothing saved. ``needs_input_grad``: for each argument of forward, whether it needs a gradient."""
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


@contextlib.contextmanager
def trace_custom_functions() -> Iterator[None]:
    """Return a context for tracing a model's forward, in which user-defined ``torch.autograd.Function`` classes are
    traced so that the gradient of the trace is the one that their ``backward`` returns.

    A call of such a function raises :class:`UnsupportedError` if its ``backward`` is not affine. Affine means a linear
    function of the incoming gradient plus a part that does not depend on it.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the ``torch.autograd.Function`` ``cls`` with ``args`` and ``kwargs`` during a trace, and return its
        result. This replaces ``Function.apply``. A user-defined function is traced so that its gradient is the one that
        its ``backward`` returns. Torch's own functions, and calls without a gradient, run as usual. For torch's
        activation checkpointing, the checkpointed function is called directly."""
        if cls is CheckpointFunction:  # the plan decides on recomputation, see ``IgnoredMemorySavers``
            return args[0](*args[_CHECKPOINT_ARGUMENTS:])
        takes_grad = any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values()))
        if _is_torch_class(cls) or not takes_grad or not torch.is_grad_enabled():
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        return _apply_custom_function(cls, _bind_positional_arguments(cls, args, kwargs))

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the ``torch.autograd.Function`` ``cls`` inside of a transform of ``torch.func``, and return its result.
        This replaces torch's function for such calls. Raise :class:`UnsupportedError` if ``cls`` is user-defined."""
        if not _is_torch_class(cls):
            raise UnsupportedError(
                f"{_format_class_name(cls)}.apply is called inside a transform of torch.func (vmap, grad, jvp), and a "
                "plan cannot compute its gradient through that; expected a call outside of the transform, on the "
                "whole batch"
            )
        return custom_function_call(cls, *args, **kwargs)

    # Patch what Function.apply calls, because models keep references to it: ``rounded = Rounding.apply``.
    with (
        mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply)),
        mock.patch.object(torch.autograd.function, "custom_function_call", transformed),
    ):
        yield


def _is_torch_class(cls: type) -> bool:
    """Return whether the class ``cls`` is defined in the package ``torch``, not by a user."""
    return cls.__module__.split(".")[0] == "torch"


def _bind_positional_arguments(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return ``args`` and ``kwargs``, the arguments of a call of the ``torch.autograd.Function`` ``cls``, as one tuple
    in the order of the parameters of its ``forward``, which is also the order of the gradients that its ``backward``
    returns. Raise :class:`UnsupportedError` if an argument can be passed only by keyword."""
    if not kwargs:
        return args
    before = () if _is_setup_context_defined(cls.setup_context) else (None,)
    bound = inspect.signature(cls.forward).bind(*before, *args, **kwargs)
    if bound.kwargs:
        raise UnsupportedError(
            f"{_format_class_name(cls)}.apply is called with {', '.join(bound.kwargs)} by keyword; "
            "expected positional arguments only"
        )
    return bound.args[len(before) :]


def _apply_custom_function(cls: Any, args: tuple[Any, ...]) -> Any:
    """Call the user's ``torch.autograd.Function`` ``cls`` with ``args`` during a trace, and return its results, with a
    traced gradient that equals what the function's ``backward`` returns.

    A traced term is added to each result of ``forward``. Its value is zero, and its gradient is the one of
    ``backward``. Raise :class:`UnsupportedError` if the gradient cannot be traced.
    """
    needs = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    ctx = _Context(needs)
    inputs = _select_needing_gradient(args, needs)
    changes = [x - x.detach() for x in inputs]  # before forward, which may write to its arguments
    given = tuple(_copy_tensor_argument(a) for a in args) if _marks_dirty(cls) else args
    with torch.no_grad():
        if _is_setup_context_defined(cls.setup_context):
            made = cls.forward(*given)
            cls.setup_context(ctx, given, made)
        else:
            made = cls.forward(ctx, *given)
    if ctx.dirty_tensors and given is args:
        raise UnsupportedError(
            f"{_format_class_name(cls)}.forward changes its arguments in place and calls ctx.mark_dirty in another "
            "function; expected ctx.mark_dirty(...) in forward or in setup_context"
        )
    outputs = list(made) if isinstance(made, tuple) else [made]
    fixed = {id(t) for t in ctx.non_differentiable}
    which = [k for k, y in enumerate(outputs) if isinstance(y, Tensor) and _is_differentiable(y) and id(y) not in fixed]
    written = {id(copy): a for copy, a in zip(given, args, strict=True) if any(copy is d for d in ctx.dirty_tensors)}
    back = {k: written[id(y)] for k, y in enumerate(outputs) if id(y) in written}
    if which:
        with without_autocast():  # autograd runs backward outside of autocast regions
            transposed = _transpose_custom_backward(cls, ctx, given, needs, outputs, which)
        added, constants = transposed(changes)
        terms = [_build_gradient_term(constant.detach(), changes[place]) for place, constant in constants.items()]
        for k, change in zip(which, added, strict=True):
            outputs[k] = outputs[k].detach() + change
            if not transposed.complete:
                outputs[k] = OWN(outputs[k], terms, inputs)
    outputs = [y.detach() if isinstance(y, Tensor) and k not in which else y for k, y in enumerate(outputs)]
    for k, argument in back.items():
        outputs[k] = argument.copy_(outputs[k])
    return tuple(outputs) if isinstance(made, tuple) else outputs[0]


def _build_gradient_term(constant: Tensor, change: Tensor) -> Tensor:
    """Return the 0-dimensional tensor ``sum(constant * change)``. ``change`` must be zero everywhere, so that the
    result is zero; the gradient of the result with respect to ``change`` is ``constant``. If the result is added to a
    loss, it adds ``constant`` to the gradient of ``change`` and has no other effect."""
    if change.is_complex():
        return (constant.conj() * change).real.sum()
    return (constant * change).sum()


def _select_needing_gradient(args: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
    """Return a list of the arguments in ``args`` for which the boolean in ``needs`` at the same position is true, that
    is, which need a gradient."""
    return [a for a, need in zip(args, needs, strict=True) if need]


def _marks_dirty(cls: Any) -> bool:
    """Return whether the code of the ``torch.autograd.Function`` ``cls`` calls ``ctx.mark_dirty``, by which a function
    declares that it writes to its arguments in place."""
    functions = (inspect.unwrap(function) for function in (cls.forward, cls.setup_context))
    return any("mark_dirty" in f.__code__.co_names for f in functions if hasattr(f, "__code__"))


def _copy_tensor_argument(argument: Any) -> Any:
    """Return a detached copy of the tensor ``argument`` that requires a gradient if ``argument`` does. Return a value
    that is not a tensor unchanged."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)


def _transpose_custom_backward(
    cls: Any,
    ctx: _Context,
    args: Sequence[Any],
    needs: Sequence[bool],
    outputs: Sequence[Any],
    which: Sequence[int],
) -> TransposedBackward:
    """Return the transpose of the ``backward`` of ``cls``, a user's ``torch.autograd.Function``: a linear map from
    changes (tangents) of the function's inputs to changes of its outputs. The traced gradient of this map is what
    ``backward`` returns.

    ``ctx``: the context object that ``forward`` has filled. ``args``: the arguments of ``forward``. ``needs``: for each
    argument, whether it needs a gradient. ``outputs``: the results of ``forward``. ``which``: the indices of the
    results that can have a gradient. Raise :class:`UnsupportedError` if ``backward`` fails, cannot be traced or is not
    affine in the gradients.
    """

    own = cls.backward if cls.vjp is Function.vjp else cls.vjp

    def backward(*grads: Tensor | None) -> list[Tensor | None]:
        """Run ``backward`` of a user's ``torch.autograd.Function``. Return the gradients of those arguments that need
        one, in order. ``grads``: the gradients of those results that can have one. In both, ``None`` stands for a
        gradient of zero."""
        zeros = [torch.zeros_like(y) if isinstance(y, Tensor) and ctx.materialize_grads else None for y in outputs]
        given = dict(enumerate(zeros)) | dict(zip(which, grads, strict=True))
        with torch.no_grad(), _refuse_side_effects(cls):
            try:
                found = own(ctx, *given.values())
            except (PartitionError, *ASKS_NUMBERS):
                raise
            except AssertionError as error:
                raise _InvalidBackward(_format_error_reason(error)) from error
            except Exception as error:
                raise _UntraceableBackward(f"cannot be traced ({_format_error_reason(error)})") from error
            return _match_gradients_to_inputs(found if isinstance(found, tuple | list) else (found,), args, needs)

    some = not ctx.materialize_grads and len(which) > 1
    try:
        with pause_trace_and_journal():
            made = transpose_backward(
                backward, [outputs[k] for k in which], _select_needing_gradient(args, needs), some=some
            )
    except _InvalidBackward as error:
        raise UnsupportedError(
            f"{_format_class_name(cls)}.backward raises an error: {error}; the model cannot be trained, with or "
            "without a plan: correct its backward"
        ) from error
    except _UntraceableBackward as error:
        raise UnsupportedError(
            f"{_format_class_name(cls)}.backward {error}; expected operators on tensors only, which do not depend on "
            "the values of the gradient in Python"
        ) from error
    except NotAffine as error:
        raise UnsupportedError(
            f"{_format_class_name(cls)}.backward {error.what}, so that its gradient would not be exact on parts of "
            "the batch"
            f"; "
            f"{error.instead}"
        ) from error
    return made


def _match_gradients_to_inputs(found: Sequence[Any], args: Sequence[Any], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of those arguments of a user's ``torch.autograd.Function`` that need one, in order. As in
    autograd, broadcast dims are summed and dtypes are cast. ``None`` is a gradient of zero.

    ``found``: what the function's ``backward`` returned. ``args``: the arguments of ``forward``. ``needs``: for each
    argument, whether it needs a gradient. Raise :class:`_InvalidBackward` if number, types or shapes of the gradients
    do not match the arguments.
    """
    if len(found) < len(args) or any(g is not None for g in found[len(args) :]):
        raise _InvalidBackward(f"it returns {len(found)} gradients for {len(args)} arguments")
    pairs = list(zip(found, args, needs, strict=False))
    for place, (g, x, _) in enumerate(pairs):
        if g is not None and not (isinstance(g, Tensor) and isinstance(x, Tensor)):
            raise _InvalidBackward(f"it returns a {type(g).__name__} for argument {place}, a {type(x).__name__}")
    return [None if g is None else _fit_gradient_to_input(g, x) for g, x, need in pairs if need]


def _fit_gradient_to_input(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``grad``, the gradient of the tensor ``x``, summed to the shape and cast to the dtype of ``x``. Raise
    :class:`_InvalidBackward` if the shape of ``grad`` cannot be summed to the one of ``x``."""
    if grad.shape != x.shape:
        behind = grad.shape[max(grad.dim() - x.dim(), 0) :]
        if len(behind) < x.dim() or any(have not in (size, 1) for have, size in zip(x.shape, behind, strict=True)):
            raise _InvalidBackward(f"it returns a gradient of shape {tuple(grad.shape)} for one of {tuple(x.shape)}")
        grad = grad.sum_to_size(x.shape)
    if grad.is_complex() and not x.is_complex():
        grad = grad.real
    return grad.to(x.dtype)


class _InvalidBackward(Exception):
    """Raised if the ``backward`` of a user's ``torch.autograd.Function`` has an error of its own, or returns gradients
    for which autograd would raise an error."""


class _UntraceableBackward(Exception):
    """Raised if the ``backward`` of a user's ``torch.autograd.Function`` cannot run on fake tensors, for example
    because it reads their values."""


def _format_error_reason(error: Exception) -> str:
    """Return the first line of the message of ``error``; if there is no message, a text with the type of ``error``."""
    return next(iter(str(error).splitlines()), "").rstrip(".") or f"{type(error).__name__} is raised"


@contextlib.contextmanager
def _refuse_side_effects(cls: Any) -> Iterator[None]:
    """Return a context for running the ``backward`` of ``cls``, a user's ``torch.autograd.Function``. In it,
    :class:`UnsupportedError` is raised if ``backward`` calls ``torch.autograd.backward`` or assigns ``tensor.grad``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`UnsupportedError`. This replaces ``torch.autograd.backward``, which would store gradients as a
        side effect. The arguments are not used."""
        raise UnsupportedError(
            f"{_format_class_name(cls)}.backward runs layers again and calls backward() on them, so that gradients of "
            "weights are a side effect, which a plan cannot reproduce; expected a backward that returns all "
            "gradients: call the layers in forward without it, and let the plan choose what is recomputed "
            "(recompute=)"
        )

    with mock.patch.object(torch.autograd, "backward", refuse), _RefuseGradAssignmentMode(cls):
        yield


class _RefuseGradAssignmentMode(TorchFunctionMode):
    """Torch function mode that raises :class:`UnsupportedError` on an assignment ``tensor.grad = ...``. ``cls``: the
    ``torch.autograd.Function`` whose ``backward`` runs, for the message.
    """

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the torch function ``func`` with ``args`` and ``kwargs`` and return its result. Raise
        :class:`UnsupportedError` if it assigns ``tensor.grad``. ``types`` is not used."""
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is Tensor.grad:
            raise UnsupportedError(
                f"{_format_class_name(self.cls)}.backward sets the gradient of a tensor as a side effect, which a plan "
                "cannot reproduce; expected a backward that returns all gradients: pass the tensor to apply()"
            )
        return func(*args, **(kwargs or {}))


def _format_class_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_differentiable(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


_ADVICE = (
    "which a plan would leave out; expected hooks that only observe (return nothing and change nothing): "
    "implement the change as a torch.autograd.Function in forward, or apply it to the gradients after the "
    "step, and remove the hook"
)
_BACKWARD = {"_backward_hooks": (MODEL, GIVEN, GIVEN), "_backward_pre_hooks": (MODEL, GIVEN)}
_FORWARD = {"_forward_hooks": (MODEL, GIVEN, GIVEN), "_forward_pre_hooks": (MODEL, GIVEN)}
_WITH_KWARGS = (MODEL, GIVEN, GIVEN, GIVEN)
_GLOBAL_BACKWARD = {"_global_backward_hooks": (MODEL, GIVEN, GIVEN), "_global_backward_pre_hooks": (MODEL, GIVEN)}
_GLOBAL_FORWARD = {"_global_forward_hooks": (MODEL, GIVEN, GIVEN), "_global_forward_pre_hooks": (MODEL, GIVEN)}


def check_hooks(model: nn.Module, *, train: bool) -> tuple[str, ...]:
    """Check the hooks that are registered on ``model``, its parameters, or all modules. Return a tuple of texts for the
    user, one for each hook that a plan will not call because it only observes: it returns ``None`` and changes nothing.

    Raise :class:`UnsupportedError` if a hook on gradients, or a forward hook on all modules, may do more than observe.
    Forward hooks of single modules that do more are allowed, because they are traced with the model's forward.

    Args:
        model: the model.
        train: whether gradients are computed; if not, hooks on gradients are not checked.
    """
    notes = []
    for name, parameter in model.named_parameters() if train else ():
        for table in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            for hook in (table or {}).values():
                _check_hook_effects(hook, (GIVEN,), f"the parameter {name!r} has a hook on its gradient")
                notes.append(_format_hook_note(hook, f"of the parameter {name!r}", "gradients"))
    for name, module in model.named_modules():
        of = f"of the module {name!r}" if name else "of the model"
        for hook, given in _list_hooks(module, _BACKWARD) if train else ():
            _check_hook_effects(hook, given, f"{f'the module {name!r}' if name else 'the model'} has a backward hook")
            notes.append(_format_hook_note(hook, of, "gradients"))
        for hook, given in _forward_hooks(module).values():
            if describe_hook_effect(hook, given) is None:
                notes.append(_format_hook_note(hook, of, "the results of forward"))
    for hook, given in _list_hooks(modules, _GLOBAL_BACKWARD) if train else ():
        _check_hook_effects(hook, given, "a backward hook of all modules (register_module_full_backward_hook) is set")
        notes.append(_format_hook_note(hook, "of all modules", "gradients"))
    for hook, given in _list_hooks(modules, _GLOBAL_FORWARD):
        _check_hook_effects(hook, given, "a forward hook of all modules (register_module_forward_hook) is set")
        notes.append(_format_hook_note(hook, "of all modules", "the results of forward"))
    return tuple(dict.fromkeys(notes))


def _list_hooks(owner: Any, tables: dict[str, tuple[HookValue, ...]]) -> list[tuple[Any, tuple[HookValue, ...]]]:
    """Return all hooks of ``owner`` that are stored in the attributes ``tables``, as a list of (hook, kinds of its
    arguments). ``owner``: a module, or ``torch.nn.modules.module`` for hooks on all modules. ``tables``: attribute name
    -> kinds of the arguments with which the hooks in this attribute are called; a kind says whether an argument is a
    module or a value."""
    return [(hook, given) for table, given in tables.items() for hook in getattr(owner, table).values()]


def _forward_hooks(module: nn.Module) -> dict[tuple[str, int], tuple[Any, tuple[HookValue, ...]]]:
    """Return the forward hooks and forward pre-hooks of ``module`` as a dict: (name of the attribute that stores the
    hook, key in it) -> (hook, kinds of its arguments). A kind says whether an argument is a module or a value."""
    found = {}
    for table, given in _FORWARD.items():
        for key, hook in getattr(module, table).items():
            named = key in getattr(module, f"{table}_with_kwargs")
            found[table, key] = hook, _WITH_KWARGS[: len(given) + 1] if named else given
    return found


def list_forward_hooks(model: nn.Module) -> list[Any]:
    """Return a list of all forward hooks and forward pre-hooks of ``model`` and its submodules."""
    return [hook for module in model.modules() for hook, _ in _forward_hooks(module).values()]


def _check_hook_effects(hook: Any, given: Sequence[HookValue], registration: str) -> None:
    """Raise :class:`UnsupportedError` if ``hook`` may do more than observe its arguments. ``given``: the kind of each
    argument, that is, whether it is a module or a value. ``registration``: the start of the error message."""
    reason = describe_hook_effect(hook, given)
    if reason is not None:
        raise UnsupportedError(f"{registration}, {_ADVICE}. The hook is {_format_hook_location(hook)}; it {reason}")


def _format_hook_note(hook: Any, of: str, at: str) -> str:
    """Return a text for the user that says that a plan does not call ``hook``, because it only observes. ``of``: what
    the hook is registered on, such as "of the model". ``at``: what it observes, such as "gradients"."""
    return f"the hook {_format_hook_location(hook)} {of} only observes {at}: the plan does not call it"


def _format_hook_location(hook: Any) -> str:
    """Return a text with the name of ``hook`` and, if it is a Python function, its file and line."""
    name, code = find_code(hook)
    return f"{name} ({shorten_file_path(code.co_filename)}:{code.co_firstlineno})" if code is not None else name


def drop_looking_hooks(model: nn.Module) -> None:
    """Remove from ``model``, in place, the hooks that only observe: they return ``None`` and change nothing. ``model``
    should be a copy of the user's.
    """
    for module in model.modules():
        for table, given in _BACKWARD.items():
            for key, hook in list(getattr(module, table).items()):
                if describe_hook_effect(hook, given) is None:
                    del getattr(module, table)[key]
        for (table, key), (hook, given) in _forward_hooks(module).items():
            if describe_hook_effect(hook, given) is None:
                del getattr(module, table)[key]


@contextlib.contextmanager
def disable_observing_global_hooks() -> Iterator[None]:
    """Return a context in which hooks on all modules (``register_module_*_hook``) that only observe, that is, return
    ``None`` and change nothing, are not called. Other hooks stay."""
    with contextlib.ExitStack() as stack:
        for table, given in (*_GLOBAL_BACKWARD.items(), *_GLOBAL_FORWARD.items()):
            hooks = getattr(modules, table)
            acting = {key: hook for key, hook in hooks.items() if describe_hook_effect(hook, given) is not None}
            stack.enter_context(mock.patch.dict(hooks, acting, clear=True))
        yield


@contextlib.contextmanager
def refuse_gradient_hooks(notes: list[str]) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which forward cannot register hooks on gradients. A hook that
    only observes (returns ``None`` and changes nothing) is ignored; any other raises :class:`UnsupportedError`.

    ``notes``: a list to which a text for the user is added for each ignored hook, and for activation checkpointing and
    ``save_on_cpu`` in forward.
    """

    def check_hook(given: Sequence[HookValue], registration: str) -> Callable[..., RemovableHandle]:
        """Return a replacement for a torch function that registers a hook. The replacement ignores a hook that only
        observes, and raises :class:`UnsupportedError` for any other. ``given``: for each argument of the hook, whether
        it is a module or a value. ``registration``: what the hook is registered on, such as "tensor", for messages."""

        def register(owner: Any, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
            """Ignore the hook ``hook``, which a model's forward wants to register on ``owner``, if it only observes
            (returns ``None`` and changes nothing); otherwise raise :class:`UnsupportedError`. For an ignored hook, add
            a text for the user to the list ``notes`` of the enclosing function and return an empty handle."""
            reason = describe_hook_effect(hook, given)
            if reason is not None:
                raise UnsupportedError(
                    f"forward gives a {registration} a hook on its gradient{_format_user_location()}, {_ADVICE}. The "
                    "hook is "
                    f"{_format_hook_location(hook)}; it {reason}"
                )
            notes.append(_format_hook_note(hook, f"that forward gives a {registration}", "gradients"))
            return RemovableHandle(collections.OrderedDict())

        return register

    def make_refusal(registration: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(f"forward gives {registration} a hook{_format_user_location()}, {_ADVICE}")

        return refuse

    class WatchedNode:
        """Wrapper of an autograd node (``tensor.grad_fn``) that user code gets during a trace. Registering a hook on it
        raises :class:`UnsupportedError`; all other attributes are passed on from the node."""

        register_hook, register_prehook = make_refusal("grad_fn"), make_refusal("grad_fn")

        def __init__(self, node: Any) -> None:
            self._node = node

        def __getattr__(self, name: str) -> Any:
            return getattr(self._node, name)

    native = getattr_static(Tensor, "grad_fn")

    def grad_fn(tensor: Tensor) -> Any:
        node = native.__get__(tensor)
        caller = traceback.extract_stack(limit=2)[0].filename
        return WatchedNode(node) if node is not None and is_user_file(caller) else node

    with contextlib.ExitStack() as stack:
        for owner, name, given, what in (
            (Tensor, "register_hook", (GIVEN,), "tensor"),
            (Tensor, "register_post_accumulate_grad_hook", (GIVEN,), "tensor"),
            (nn.Module, "register_full_backward_hook", (MODEL, GIVEN, GIVEN), "module"),
            (nn.Module, "register_backward_hook", (MODEL, GIVEN, GIVEN), "module"),
            (nn.Module, "register_full_backward_pre_hook", (MODEL, GIVEN), "module"),
            (graph, "register_multi_grad_hook", (GIVEN,), "list of tensors"),
        ):
            stack.enter_context(mock.patch.object(owner, name, check_hook(given, what)))
        stack.enter_context(mock.patch.object(Tensor, "grad_fn", property(grad_fn), create=True))
        stack.enter_context(_ignore_memory_savers(notes))
        yield


@contextlib.contextmanager
def skip_observing_hooks() -> Iterator[None]:
    """Return a context in which hooks on gradients that only observe, that is, return ``None`` and change nothing, are
    not called. ``Tensor.register_hook`` does not register such hooks in the context, and those on all modules are
    removed."""
    native = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        looks = describe_hook_effect(hook, (GIVEN,)) is None
        return RemovableHandle(collections.OrderedDict()) if looks else native(tensor, hook)  # type: ignore[no-untyped-call]

    with disable_observing_global_hooks(), mock.patch.object(Tensor, "register_hook", register):
        yield


_REENTRANT_NOTE = (
    "torch gives no gradients to what is checkpointed with use_reentrant=True and inputs that ask for none ({where}); "
    "the plan does, as torch does with use_reentrant=False"
)


@dataclass
class IgnoredMemorySavers:
    """The lines of a model's forward that save memory themselves, such as by activation checkpointing. A plan ignores
    this and decides itself what is recomputed or offloaded.

    Each field is a set of texts with file and line. ``checkpointed``: lines that use activation checkpointing.
    ``offloaded``: lines that offload activations to host memory. ``without_gradients``: lines with checkpointed calls
    to which torch would give no gradient.
    """

    checkpointed: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)
    without_gradients: set[str] = field(default_factory=set)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return texts for the user about the lines of the model's forward that save memory themselves and that a plan
        ignores, one for each kind that occurs: checkpointing, offloading, and checkpointed calls without a gradient."""
        told = (
            (CHECKPOINT_NOTE, self.checkpointed),
            (OFFLOAD_NOTE, self.offloaded),
            (_REENTRANT_NOTE, self.without_gradients),
        )
        return tuple(note.format(where=", ".join(sorted(places))) for note, places in told if places)


@contextlib.contextmanager
def _ignore_memory_savers(notes: list[str]) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which ``save_on_cpu`` has no effect, because a plan decides
    itself what to keep in memory. Each line of forward that uses activation checkpointing or ``save_on_cpu`` adds a
    text for the user to ``notes``. Other hooks on tensors that are saved for backward raise :class:`UnsupportedError`.
    """
    left = IgnoredMemorySavers()
    enter, leave = graph.saved_tensors_hooks.__enter__, graph.saved_tensors_hooks.__exit__
    run_later, run_twice = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply

    def enter_hooks(hooks: Any) -> Any:
        """Enter ``hooks``, a context that changes how tensors are saved for backward. This replaces
        ``saved_tensors_hooks.__enter__``. For ``save_on_cpu``, only record the line of the model's forward. For hooks
        of the user, raise :class:`UnsupportedError`. For torch's other contexts, return what they return."""
        if isinstance(hooks, graph.save_on_cpu):
            left.offloaded.add(_format_user_line())
            return None
        if not type(hooks).__module__.startswith("torch.") or type(hooks) is graph.saved_tensors_hooks:
            raise UnsupportedError(
                f"forward changes tensors that are saved for backward (saved_tensors_hooks){_format_user_location()}, "
                "which a plan does not support; expected forward without it: let the plan choose what is recomputed "
                "(recompute=) or offloaded, or write a change of gradients as a torch.autograd.Function"
            )
        return enter(hooks)

    def exit_hooks(hooks: Any, *error: Any) -> None:
        if not isinstance(hooks, graph.save_on_cpu):
            leave(hooks, *error)

    def note_checkpoint(run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the line of the model's forward that checkpoints ``function``, and whether torch would give this call
        no gradient. Then call ``run``, torch's checkpointing, with ``function``, ``args`` and ``kwargs``, and return
        its result."""
        name = _get_caller_class_name(function)
        left.checkpointed.add(f"{name} at {_format_user_line()}" if name else _format_user_line())
        takes_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if run is run_twice and torch.is_grad_enabled() and not takes_gradient:
            left.without_gradients.add(_format_user_line())
        return run(function, *args, **kwargs)

    with (
        mock.patch.object(graph.saved_tensors_hooks, "__enter__", enter_hooks),
        mock.patch.object(graph.saved_tensors_hooks, "__exit__", exit_hooks),
        mock.patch.object(
            checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(note_checkpoint, run_later)
        ),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", functools.partial(note_checkpoint, run_twice)),
    ):
        try:
            yield
        finally:
            notes += left.notes


def _get_caller_class_name(function: Any) -> str:
    """Return the class name of the module that ``function``, the function passed to activation checkpointing, calls; an
    empty text if this module is not known."""
    if isinstance(function, functools.partial):
        return _get_caller_class_name(function.func) or next(
            (_get_caller_class_name(a) for a in function.args if isinstance(a, nn.Module)), ""
        )
    module = getattr(function, "__self__", function)
    return type(module).__name__ if isinstance(module, nn.Module) else ""


def _format_user_line() -> str:
    """Return ``file:line`` of the line of the user's code that is running; if it is not known, a text that says so."""
    frames = [f for f in traceback.extract_stack()[:-1] if is_user_file(f.filename)]
    return f"{shorten_file_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else "a line that is not known"


def _format_user_location() -> str:
    """Return a text such as ``" at model.py:12 (x = self.layer(x))"`` for the line of the user's code that is running;
    an empty text if it is not known."""
    frames = [f for f in traceback.extract_stack()[:-1] if is_user_file(f.filename)]
    return f" at {shorten_file_path(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


# --- what hooks on forward collect ------------------------------------------------------------------------------------
_CONTAINERS = (list, dict, set, collections.deque)

_NO_OWNERS = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger)


@contextlib.contextmanager
def undo_hook_changes(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Return a context that, when it ends, undoes what the forward hooks of ``model`` have changed outside of the
    model, such as a list to which they append. ``notes``: a list to which a text for the user is added for each hook
    that had changed something."""
    before = [
        (hook, name, _HookState.take(hook))
        for name, module in model.named_modules()
        for hook, _ in _forward_hooks(module).values()
    ]
    try:
        yield
    finally:
        for hook, name, held in before:
            if held.restore():
                of = f"of the module {name!r}" if name else "of the model"
                notes.append(
                    f"the hook {_format_hook_location(hook)} {of} stores values outside of the model: the "
                    "plan does not do this"
                )


class _HookState:
    """Snapshot of the closure variables and containers (lists, dicts, sets, deques) that a hook function can reach. It
    is taken before a trace, so that what the hook stores during the trace can be undone.

    ``cells``: pairs of a closure variable and its value. ``containers``: pairs of a container and a list of its items.
    """

    def __init__(self, cells: Sequence[Any], containers: Sequence[Any]) -> None:
        self.cells = [(cell, cell.cell_contents) for cell in cells]
        self.containers = [(c, list(c.items()) if isinstance(c, dict) else list(c)) for c in containers]

    @staticmethod
    def take(hook: Any) -> _HookState:
        """Return a snapshot of the objects that the hook function ``hook`` can reach and change: closure variables,
        default arguments, globals that it names, attributes of these objects, and containers inside of these, one level
        deep."""
        function = getattr(hook, "func", hook)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        cells = [c for c in getattr(function, "__closure__", None) or () if _is_cell_set(c)]
        reached = [c.cell_contents for c in cells] + list(getattr(function, "__defaults__", None) or ())
        if code is not None:
            reached += [function.__globals__[n] for n in code.co_names if n in function.__globals__]
        owners = [vars(r) for r in reached if hasattr(r, "__dict__") and not isinstance(r, _NO_OWNERS)]
        containers = [*owners, *(r for r in reached if isinstance(r, _CONTAINERS))]
        inner = [
            i for c in containers for i in (c.values() if isinstance(c, dict) else c) if isinstance(i, _CONTAINERS)
        ]
        return _HookState(cells, [*containers, *inner])

    def restore(self) -> bool:
        """Restore the variables and containers that a hook can reach to their state in this snapshot. Return whether
        anything had changed."""
        changed = False
        for cell, held in self.cells:
            if cell.cell_contents is not held:
                cell.cell_contents, changed = held, True
        for container, items in self.containers:
            now = list(container.items()) if isinstance(container, dict) else list(container)
            if len(now) != len(items) or any(not _is_same_object(a, b) for a, b in zip(now, items, strict=True)):
                changed = True
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(items)
        return changed


def _is_same_object(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b`` are the same object, or two pairs, such as (key, value), whose entries are the
    same objects."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _is_cell_set(cell: Any) -> bool:
    """Return whether a value has been assigned to the closure variable ``cell``."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def add_loss_terms(captured: Captured) -> Captured:
    """Remove the ``partition::own`` operators from the graph of ``captured``, a model as one graph, in place. Return
    ``captured`` with the new node names of outputs, loss and updated buffers.

    Such an operator marks the result of a user's ``torch.autograd.Function`` whose ``backward`` adds a part that does
    not depend on the incoming gradient. Its loss terms have the value zero and this part as gradient. They are added to
    the loss if autograd would reach the function from the loss, because only then would its ``backward`` run.
    """
    graph = captured.graph
    marks = [n for n in graph.nodes if n.target is OWN]
    if not marks:
        return captured
    loss = next((n for n in graph.nodes if n.name == captured.loss), None)
    joined = set() if loss is None else _find_joined_nodes(graph, loss, marks)
    terms: Any = dict.fromkeys(t for mark in marks if mark in joined for t in mark.args[1])
    became: dict[fx.Node, fx.Node] = {}
    for mark in marks:
        became[mark] = mark.args[0]
        mark.replace_all_uses_with(became[mark])
    if loss is not None:
        total = _add_terms_to_loss(graph, became.get(loss, loss), terms)
        if terms:
            became[loss] = total
    names = {old.name: new.name for old, new in became.items()}
    by_name = {n.name: n for n in graph.nodes}
    captured = captured.with_(
        outputs=[replace(o, value=names.get(o.value, o.value)) if o.value else o for o in captured.outputs],
        loss=names.get(captured.loss, captured.loss) if captured.loss is not None else None,
        updates={state: names.get(node, node) for state, node in captured.updates.items()},
    )
    results = [*(o.value for o in captured.outputs), captured.loss, *captured.updates.values()]
    graph.output_node().args = (tuple(by_name[name] for name in dict.fromkeys(results) if name is not None),)
    drop_unused(graph)
    return captured


def _add_terms_to_loss(graph: fx.Graph, loss: fx.Node, terms: Iterable[fx.Node]) -> fx.Node:
    """Append the sum of ``loss`` and all ``terms``, which are nodes of 0-dimensional tensors, to ``graph`` and return
    the node of the sum. Each term is first cast to the dtype of ``loss``."""
    with graph.inserting_before(graph.output_node()):
        for term in terms:
            added = _insert_call_like(graph, aten._to_copy.default, (term,), {"dtype": loss.meta["val"].dtype}, loss)
            loss = _insert_call_like(graph, aten.add.Tensor, (loss, added), {}, loss)
    return loss


def _insert_call_like(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node
) -> fx.Node:
    """Insert the operator ``target`` with the arguments ``args`` and ``kwargs`` at the insertion point of ``graph``,
    infer its meta value, and return its node. ``like``: the node whose module path, source line and stack of modules
    the new node gets."""
    node = insert_operator_node(graph, target, args, kwargs, like=like)
    node.meta["stack"] = like.meta.get("stack", ())
    return node


def _find_joined_nodes(graph: fx.Graph, loss: fx.Node, marks: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes of ``graph`` that are in ``marks`` or depend on a node in ``marks``, and to which gradients
    (also of value zero) flow from ``loss`` in backward. ``loss`` is always in the returned set. ``marks``: nodes that
    mark results of users' ``torch.autograd.Function`` classes."""
    behind = set(marks)
    for node in graph.nodes:
        if node not in behind and node.op == "call_function" and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    joined = {loss}
    for node in reversed(graph.nodes):
        if node in joined and node.op == "call_function":
            joined.update(n for n in node.all_input_nodes if n in behind and _has_edge(node, n))
    return joined


def _has_edge(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether autograd would connect the result of the operator ``node`` with ``operand``, one of its operands,
    so that a gradient flows from ``node`` to ``operand``."""
    if not is_differentiable(operand.meta["val"]) or not is_differentiable(node.meta["val"]):
        return False
    if node.target is OWN:
        result, _, inputs = cast(Any, node.args)
        return operand is result or operand in inputs
    if node.target is operator.getitem:
        return True

    def value(n: fx.Node) -> Any:
        return n.meta["val"].detach().requires_grad_() if n is operand else n.meta["val"]

    if not isinstance(operand.meta["val"], Tensor):
        return True
    with torch.enable_grad(), META:
        assert callable(node.target), node
        made = node.target(*fx.node.map_arg(node.args, value), **fx.node.map_arg(node.kwargs, value))
    return any(isinstance(v, Tensor) and v.requires_grad for v in pytree.tree_leaves(made))
