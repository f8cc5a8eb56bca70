"""Functions that define their own gradient (``torch.autograd.Function``), traced with it.

A traced forward forgets what ``backward`` says: a straight-through rounding would have no gradient at all. For ``y =
f(x)`` and its own ``backward(g)``, linear in ``g``, the graph computes ``f(x) + T(x - detach(x))`` instead, where ``T``
is ``backward`` transposed. The second term is zero, and its gradient is ``backward`` exactly. All of it is ordinary
operators, so that it is sharded, cut and recomputed like any others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx, _is_setup_context_defined, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils.checkpoint import CheckpointFunction

from passes.autocast import without_autocast
from passes.errors import UnsupportedError
from passes.unused import drop_unused

_CHECKPOINT_ARGUMENTS = 2  # of CheckpointFunction.apply: the function and whether random states are kept


class _Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


@contextlib.contextmanager
def traced_with_own_gradients() -> Iterator[None]:
    """Inside, functions with a gradient of their own can be traced together with it.

    They raise :class:`UnsupportedError` where that gradient is not linear in the gradient of what they return.
    """

    def apply(cls: Any, *args: Any) -> Any:
        if cls is CheckpointFunction:  # see passes/recomputed.py
            return args[0](*args[_CHECKPOINT_ARGUMENTS:])
        needs = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        if _is_torchs(cls) or not any(needs) or not torch.is_grad_enabled():
            return super(_SingleLevelFunction, cls).apply(*args)
        return _apply(cls, args, needs)

    # Below Function.apply, which models keep: ``rounded = Rounding.apply``.
    with mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply)):
        yield


def _is_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torch"


def _apply(cls: Any, args: tuple[Any, ...], needs: tuple[bool, ...]) -> Any:
    ctx = _Context(needs)
    with torch.no_grad():
        if _is_setup_context_defined(cls.setup_context):
            made = cls.forward(*args)
            cls.setup_context(ctx, args, made)
        else:
            made = cls.forward(ctx, *args)
    outputs = list(made) if isinstance(made, tuple | list) else [made]
    fixed = {id(t) for t in ctx.non_differentiable}
    which = [k for k, y in enumerate(outputs) if isinstance(y, Tensor) and _differentiable(y) and id(y) not in fixed]
    if which:
        inputs = [a for a, need in zip(args, needs, strict=True) if need]
        with without_autocast():  # backward runs outside of any region
            added = _transposed(cls, ctx, inputs, outputs, which, needs)
        changes = [x - x.detach() for x in inputs]
        for k, change in zip(which, added(*changes), strict=True):
            outputs[k] = outputs[k].detach() + change
    return type(made)(outputs) if isinstance(made, tuple | list) else outputs[0]


def _transposed(
    cls: Any,
    ctx: _Context,
    inputs: Sequence[Tensor],
    outputs: Sequence[Any],
    which: Sequence[int],
    needs: Sequence[bool],
) -> fx.GraphModule:
    """Changes of the inputs -> changes of the outputs ``which``, of which ``backward`` is the transpose."""
    own = getattr(cls.backward, "__wrapped__", cls.backward)  # once_differentiable forbids what is done here

    def backward(*grads: Tensor) -> list[Tensor]:
        given: list[Any] = [torch.zeros_like(y) if isinstance(y, Tensor) else None for y in outputs]
        for k, grad in zip(which, grads, strict=True):
            given[k] = grad
        try:
            with mock.patch.object(torch.autograd, "backward", functools.partial(_refuse_backward, cls)):
                found = own(ctx, *given)
        except AssertionError as error:
            said = next(iter(str(error).splitlines()), "").rstrip(".") or "an assertion in it fails"
            raise UnsupportedError(
                f"{cls.__module__}.{cls.__qualname__}.backward does not run: {said}; "
                "the model cannot be trained as it is, with or without a plan"
            ) from error
        found = found if isinstance(found, tuple | list) else (found,)
        chosen = [g for g, need in zip(found, needs, strict=False) if need]
        pairs = zip(chosen, inputs, strict=True)
        return [torch.zeros_like(x) if g is None else g.expand_as(x) if g.shape != x.shape else g for g, x in pairs]

    empty = [torch.zeros_like(outputs[k]) for k in which]
    with disable_proxy_modes_tracing():
        seeds = [torch.empty(e.shape, dtype=e.dtype, device=e.device) for e in empty]
        moves = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        traced = make_fx(backward, tracing_mode="real")(*seeds)

        def transpose(grads: list[Tensor], changes: list[Tensor]) -> list[Tensor]:
            grads = [g.detach().requires_grad_() for g in grads]
            with torch.enable_grad():
                found = [(x, c) for x, c in zip(traced(*grads), changes, strict=True) if x.requires_grad]
            if not found:
                return [torch.zeros_like(g) for g in grads]
            moved = torch.autograd.grad([x for x, _ in found], grads, [c for _, c in found], allow_unused=True)
            return [torch.zeros_like(g) if m is None else m for g, m in zip(grads, moved, strict=True)]

        made = make_fx(transpose, tracing_mode="real")(seeds, moves)
    return _without_seeds(cls, made, len(seeds))


def _refuse_backward(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"{cls.__module__}.{cls.__qualname__}.backward runs layers again and calls backward() on them, so that "
        "gradients of weights come as a side effect, of which a plan cannot know; expected a backward that returns all "
        "gradients: call the layers in forward without it, and let the plan choose what is recomputed (recompute=)"
    )


def _without_seeds(cls: Any, made: fx.GraphModule, num_seeds: int) -> fx.GraphModule:
    """The transpose as a function of the changes alone; it is linear if the gradients' numbers are not read."""
    drop_unused(made.graph)
    seeds = [n for n in made.graph.nodes if n.op == "placeholder"][:num_seeds]
    for seed in seeds:
        if seed.users:
            raise UnsupportedError(
                f"{cls.__module__}.{cls.__qualname__}.backward is not linear in the gradient that it is given, which "
                "cannot be kept exact on parts of it; clip or change gradients after the step's backward instead"
            )
        made.graph.erase_node(seed)
    made.graph.set_codegen(fx.graph.CodeGen())
    made.recompile()
    return made


def _differentiable(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex
