"""Hooks on gradients and on what is saved for them, which a trace does not see: refused, or left to the plan.

Requires: a module before it is traced. Provides: that nothing but its forward, and functions with gradients of their
own, says what its gradients are. What forward says of memory alone (activation checkpointing, activations moved to host
memory) is left to the plan, with a note.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint

from passes.errors import UnsupportedError
from passes.export import is_users, shorten
from passes.wrappers import CHECKPOINT_NOTE, OFFLOAD_NOTE

_ADVICE = (
    "which a plan would leave out; write what it does as a torch.autograd.Function in forward, or do it to the "
    "gradients after the step's backward, and remove the hook"
)

_ADVICE_SAVED = (
    "which a plan would leave out: it keeps what gradients read as it is; expected no torch.autograd.graph."
    'saved_tensors_hooks: Constraints(recompute=...) and Constraints(offload="activations") save memory'
)

_REENTRANT_NOTE = (
    "torch gives no gradients to what is checkpointed with use_reentrant=True and inputs that ask for none ({where}); "
    "the plan does, as torch does with use_reentrant=False"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raises :class:`UnsupportedError` where a parameter or module has hooks on gradients."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(f"the parameter {name!r} has a hook on its gradient, {_ADVICE}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(f"{f'the module {name!r}' if name else 'the model'} has a backward hook, {_ADVICE}")


@dataclass
class LeftToPlan:
    """What forward says of the memory that it takes, and a plan decides by itself: where it says so."""

    checkpointed: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)
    without_gradients: set[str] = field(default_factory=set)

    @property
    def notes(self) -> tuple[str, ...]:
        told = (
            (CHECKPOINT_NOTE, self.checkpointed),
            (OFFLOAD_NOTE, self.offloaded),
            (_REENTRANT_NOTE, self.without_gradients),
        )
        return tuple(note.format(where=", ".join(sorted(places))) for note, places in told if places)


@contextlib.contextmanager
def hooks_refused() -> Iterator[LeftToPlan]:
    """Inside, forward cannot give a tensor a hook on its gradient, nor change what is saved for gradients: that raises
    :class:`UnsupportedError`. Gives what it says of memory alone."""
    left = LeftToPlan()
    hold, run_later, run_twice = (
        saved_tensors_hooks.__enter__,
        checkpoint._checkpoint_without_reentrant_generator,
        checkpoint.CheckpointFunction.apply,
    )

    def refused(tensor: Tensor, hook: Any) -> Any:
        raise UnsupportedError(
            f"forward gives a tensor a hook on its gradient{_where(' at ', with_code=True)}, {_ADVICE}"
        )

    def held(hooks: saved_tensors_hooks) -> None:
        if isinstance(hooks, save_on_cpu):
            left.offloaded.add(_where())
        elif type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            where = _where(" at ", with_code=True)
            raise UnsupportedError(f"forward changes what is saved for gradients{where}, {_ADVICE_SAVED}")
        hold(hooks)

    def noted(run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        name = _class_of(function)
        left.checkpointed.add(f"{name}{_where(' at ')}" if name else _where())
        if (
            run is run_twice
            and torch.is_grad_enabled()
            and not any(isinstance(a, Tensor) and a.requires_grad for a in args)
        ):
            left.without_gradients.add(_where())
        return run(function, *args, **kwargs)

    with (
        mock.patch.object(Tensor, "register_hook", refused),
        mock.patch.object(saved_tensors_hooks, "__enter__", held),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", partial(noted, run_later)),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", partial(noted, run_twice)),
    ):
        yield left


def _where(before: str = "", *, with_code: bool = False) -> str:
    """``before`` and the line of the user's code that is run now."""
    frames = [f for f in traceback.extract_stack()[:-1] if is_users(f.filename)]
    if not frames:
        return ""
    code = f" ({frames[-1].line})" if with_code else ""
    return f"{before}{shorten(frames[-1].filename)}:{frames[-1].lineno}{code}"


def _class_of(function: Any) -> str:
    """The class of the module that a checkpointed function runs; empty where that is not known."""
    if isinstance(function, partial):
        return _class_of(function.func) or next((_class_of(a) for a in function.args if isinstance(a, nn.Module)), "")
    module = getattr(function, "__self__", function)
    return type(module).__name__ if isinstance(module, nn.Module) else ""
