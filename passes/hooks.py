"""Hooks on gradients, which a trace does not see: refused rather than left out.

Requires: a module before it is traced. Provides: that nothing but its forward, and functions with gradients of their
own, says what its gradients are.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn

from passes.errors import UnsupportedError
from passes.faults import is_users, shorten

_ADVICE = (
    "which a plan would leave out; write what it does as a torch.autograd.Function in forward, or do it to the "
    "gradients after the step's backward, and remove the hook"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raises :class:`UnsupportedError` where a parameter or module has hooks on gradients."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(f"the parameter {name!r} has a hook on its gradient, {_ADVICE}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(f"{f'the module {name!r}' if name else 'the model'} has a backward hook, {_ADVICE}")


@contextlib.contextmanager
def hooks_refused() -> Iterator[None]:
    """Inside, forward cannot give a tensor a hook on its gradient: that raises :class:`UnsupportedError`."""

    def refused(tensor: Tensor, hook: Any) -> Any:
        frames = [f for f in traceback.extract_stack()[:-1] if is_users(f.filename)]
        where = f" at {shorten(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
        raise UnsupportedError(f"forward gives a tensor a hook on its gradient{where}, {_ADVICE}")

    with mock.patch.object(Tensor, "register_hook", refused):
        yield
