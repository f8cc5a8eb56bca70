"""Modules that forward converts while it is traced: to the type that they have, which is nothing, or refused.

``self.router = self.router.to(torch.float32)`` inside ``forward`` gives every parameter of the router anew, which torch
cannot do to tensors of a trace, even where they are of that type. A conversion to another type changes the model's own
weights at its first call, which no plan of it can say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from passes.errors import UnsupportedError


@contextmanager
def conversions_traced(model: nn.Module, *, double: bool) -> Iterator[None]:
    """Inside, modules can be converted by ``to``, ``float`` and their kin, if they are then as they were.

    ``double``: what is converted to another floating type stays in float64, as all of the model is.
    Raises :class:`UnsupportedError` where a parameter or buffer would be of another type or on another device.
    """

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), _disable_current_modes():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                made = function(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
                if (made.dtype, made.device) == (tensor.dtype, tensor.device) or (double and _both_float(made, tensor)):
                    continue
                path = next((path for path, part in model.named_modules() if part is module), type(module).__name__)
                before, after = (f"{t.dtype} on {t.device}".replace("torch.", "") for t in (tensor, made))
                raise UnsupportedError(
                    f"forward converts the module {path!r} ({name}: {before}, to {after}), which changes the model's "
                    "own weights at its first call; expected a module that is of that type already: convert it before "
                    "(module.to(...)) and leave precision= away, or convert what it is given instead"
                )
        return module

    with mock.patch.object(nn.Module, "_apply", convert):
        yield


def _both_float(made: Any, tensor: Tensor) -> bool:
    return bool(made.dtype.is_floating_point and tensor.dtype == torch.float64 and made.device == tensor.device)
