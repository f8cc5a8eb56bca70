"""Functions that define their own gradient (``torch.autograd.Function``), traced with it.

A traced forward forgets what ``backward`` says: a straight-through rounding would have no gradient at all. For ``y =
f(x)`` with ``backward(g) = B g + c``, the graph computes ``f(x) + T(x - detach(x))`` instead, where ``T`` is ``B``
transposed. The second term is zero, and its gradient is ``B g`` exactly. The part ``c`` that does not depend on the
gradient of ``y`` is the gradient of ``c (x - detach(x))``, a term that is added to the loss
(``passes/own_terms.py``). All of it is ordinary operators, so that it is sharded, cut and recomputed like any others.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.autograd.function import (
    Function,
    FunctionCtx,
    _is_setup_context_defined,
    _SingleLevelFunction,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from passes.autocast import without_autocast
from passes.collectives import _library
from passes.errors import PartitionError, UnsupportedError
from passes.journal import aside
from passes.transpose import ASKS_NUMBERS, NotAffine, Transposed, transpose

_library.define("own(Tensor x, Tensor[] terms, Tensor[] inputs) -> Tensor")
torch.library.impl("partition::own", "CompositeExplicitAutograd", lambda x, *_: x.clone(), lib=_library)
torch.library.register_fake("partition::own", lambda x, *_: torch.empty_like(x), lib=_library)


def _keep_counts(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: Tensor) -> None:
    ctx.counts = len(inputs[1]), len(inputs[2])


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], list[None]]:
    terms, inputs = ctx.counts
    return grad, [None] * terms, [None] * inputs


torch.library.register_autograd("partition::own", _pass_gradient, setup_context=_keep_counts, lib=_library)
# A result of a function that was applied to ``inputs``: where it takes part in the loss, ``terms`` belong to the loss.
OWN = torch.ops.partition.own.default

_CHECKPOINT_ARGUMENTS = 2  # of CheckpointFunction.apply: the function and whether random states are kept


class _Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


@contextlib.contextmanager
def traced_with_own_gradients() -> Iterator[None]:
    """Inside, functions with a gradient of their own can be traced together with it.

    They raise :class:`UnsupportedError` where that gradient is neither linear in the gradient of what they return, nor
    that and a part which does not depend on it.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # see passes/hooks.py
            return args[0](*args[_CHECKPOINT_ARGUMENTS:])
        takes_grad = any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values()))
        if _is_torchs(cls) or not takes_grad or not torch.is_grad_enabled():
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        return _apply(cls, _positional(cls, args, kwargs))

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_torchs(cls):
            raise UnsupportedError(
                f"{_named(cls)}.apply is called inside a transform of torch.func (vmap, grad, jvp), through which a "
                "plan cannot follow its gradient; expected a call outside of it, on the whole batch"
            )
        return custom_function_call(cls, *args, **kwargs)

    # Below Function.apply, which models keep: ``rounded = Rounding.apply``.
    with (
        mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply)),
        mock.patch.object(torch.autograd.function, "custom_function_call", transformed),
    ):
        yield


def _is_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torch"


def _positional(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of forward's parameters, as autograd counts them."""
    if not kwargs:
        return args
    before = () if _is_setup_context_defined(cls.setup_context) else (None,)
    bound = inspect.signature(cls.forward).bind(*before, *args, **kwargs)
    if bound.kwargs:
        raise UnsupportedError(
            f"{_named(cls)}.apply is called with {', '.join(bound.kwargs)} by keyword; expected positional arguments"
        )
    return bound.args[len(before) :]


def _apply(cls: Any, args: tuple[Any, ...]) -> Any:
    needs = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    ctx = _Context(needs)
    inputs = _needing(args, needs)
    changes = [x - x.detach() for x in inputs]  # before forward, which may write to its arguments
    given = tuple(_copied(a) for a in args) if _marks_dirty(cls) else args
    with torch.no_grad():
        if _is_setup_context_defined(cls.setup_context):
            made = cls.forward(*given)
            cls.setup_context(ctx, given, made)
        else:
            made = cls.forward(ctx, *given)
    if ctx.dirty_tensors and given is args:
        raise UnsupportedError(
            f"{_named(cls)}.forward changes its arguments in place and says so through another function; expected "
            "ctx.mark_dirty(...) in forward or setup_context itself"
        )
    outputs = list(made) if isinstance(made, tuple) else [made]
    fixed = {id(t) for t in ctx.non_differentiable}
    which = [k for k, y in enumerate(outputs) if isinstance(y, Tensor) and _differentiable(y) and id(y) not in fixed]
    written = {id(copy): a for copy, a in zip(given, args, strict=True) if any(copy is d for d in ctx.dirty_tensors)}
    back = {k: written[id(y)] for k, y in enumerate(outputs) if id(y) in written}
    if which:
        with without_autocast():  # backward runs outside of any region
            transposed = _transposed(cls, ctx, given, needs, outputs, which)
        added, constants = transposed(changes)
        terms = [_term(constant.detach(), changes[place]) for place, constant in constants.items()]
        for k, change in zip(which, added, strict=True):
            outputs[k] = outputs[k].detach() + change
            if not transposed.complete:
                outputs[k] = OWN(outputs[k], terms, inputs)
    outputs = [y.detach() if isinstance(y, Tensor) and k not in which else y for k, y in enumerate(outputs)]
    for k, argument in back.items():
        outputs[k] = argument.copy_(outputs[k])
    return tuple(outputs) if isinstance(made, tuple) else outputs[0]


def _term(constant: Tensor, change: Tensor) -> Tensor:
    """The scalar, zero where ``change`` is, that has ``constant`` as its gradient for ``change``."""
    if change.is_complex():
        return (constant.conj() * change).real.sum()
    return (constant * change).sum()


def _needing(args: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
    return [a for a, need in zip(args, needs, strict=True) if need]


def _marks_dirty(cls: Any) -> bool:
    functions = (inspect.unwrap(function) for function in (cls.forward, cls.setup_context))
    return any("mark_dirty" in f.__code__.co_names for f in functions if hasattr(f, "__code__"))


def _copied(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)


def _transposed(
    cls: Any,
    ctx: _Context,
    args: Sequence[Any],
    needs: Sequence[bool],
    outputs: Sequence[Any],
    which: Sequence[int],
) -> Transposed:
    """``backward`` the other way round: from the arguments that need a gradient to the outputs ``which``."""

    own = cls.backward if cls.vjp is Function.vjp else cls.vjp

    def backward(*grads: Tensor | None) -> list[Tensor | None]:
        zeros = [torch.zeros_like(y) if isinstance(y, Tensor) and ctx.materialize_grads else None for y in outputs]
        given = dict(enumerate(zeros)) | dict(zip(which, grads, strict=True))
        with torch.no_grad(), _side_effects_refused(cls):
            try:
                found = own(ctx, *given.values())
            except (PartitionError, *ASKS_NUMBERS):
                raise
            except AssertionError as error:
                raise _Wrong(_said(error)) from error
            except Exception as error:
                raise _Untraced(f"cannot be traced ({_said(error)})") from error
            return _as_inputs(found if isinstance(found, tuple | list) else (found,), args, needs)

    some = not ctx.materialize_grads and len(which) > 1
    try:
        with aside():
            made = transpose(backward, [outputs[k] for k in which], _needing(args, needs), some=some)
    except _Wrong as error:
        raise UnsupportedError(
            f"{_named(cls)}.backward does not run: {error}; the model cannot be trained as it is, with or without a "
            "plan"
        ) from error
    except _Untraced as error:
        raise UnsupportedError(
            f"{_named(cls)}.backward {error}; expected operators on tensors alone, without looking at their numbers"
        ) from error
    except NotAffine as error:
        raise UnsupportedError(
            f"{_named(cls)}.backward {error.what}, so that its gradient cannot be kept exact on parts of the batch; "
            f"{error.instead}"
        ) from error
    return made


def _as_inputs(found: Sequence[Any], args: Sequence[Any], needs: Sequence[bool]) -> list[Tensor | None]:
    """What autograd makes of the gradients that ``backward`` returns, for the arguments that need one."""
    if len(found) < len(args) or any(g is not None for g in found[len(args) :]):
        raise _Wrong(f"it returns {len(found)} gradients for {len(args)} arguments")
    pairs = list(zip(found, args, needs, strict=False))
    for place, (g, x, _) in enumerate(pairs):
        if g is not None and not (isinstance(g, Tensor) and isinstance(x, Tensor)):
            raise _Wrong(f"it returns a {type(g).__name__} for argument {place}, a {type(x).__name__}")
    return [None if g is None else _as_input(g, x) for g, x, need in pairs if need]


def _as_input(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient in the shape and type of what it is for."""
    if grad.shape != x.shape:
        behind = grad.shape[max(grad.dim() - x.dim(), 0) :]
        if len(behind) < x.dim() or any(have not in (size, 1) for have, size in zip(x.shape, behind, strict=True)):
            raise _Wrong(f"it returns a gradient of shape {tuple(grad.shape)} for one of {tuple(x.shape)}")
        grad = grad.sum_to_size(x.shape)
    if grad.is_complex() and not x.is_complex():
        grad = grad.real
    return grad.to(x.dtype)


class _Wrong(Exception):
    """Backward fails by itself, or autograd refuses what it returns."""


class _Untraced(Exception):
    """Backward fails on tensors without numbers."""


def _said(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".") or f"{type(error).__name__} is raised"


@contextlib.contextmanager
def _side_effects_refused(cls: Any) -> Iterator[None]:
    """Inside, gradients of weights cannot be set but by what backward returns."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{_named(cls)}.backward runs layers again and calls backward() on them, so that "
            "gradients of weights come as a side effect, of which a plan cannot know; expected a backward that returns "
            "all gradients: call the layers in forward without it, and let the plan choose what is recomputed "
            "(recompute=)"
        )

    with mock.patch.object(torch.autograd, "backward", refuse), _SettingGrad(cls):
        yield


class _SettingGrad(TorchFunctionMode):
    """Refuses ``weight.grad = ...``."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is Tensor.grad:
            raise UnsupportedError(
                f"{_named(self.cls)}.backward sets the gradient of a tensor as a side effect, of which a plan cannot "
                "know; expected a backward that returns all gradients: pass the tensor to apply()"
            )
        return func(*args, **(kwargs or {}))


def _named(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _differentiable(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex
