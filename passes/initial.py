"""What a model's buffers hold before its first step, as far as few numbers say it.

Weights that a run starts from say it too; a run without any starts from this. Requires: a folded model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from passes.blocks import FoldedModel

_LISTED = 256  # elements of a buffer whose values are listed; of larger ones only one value that all have is kept
_LOOKED_AT = 1 << 20  # elements


def initial_values(model: nn.Module | ExportedProgram, folded: FoldedModel) -> dict[str, Any]:
    """By name of a buffer of ``folded`` that is no constant: the number that all of its elements are, or its values as
    nested lists. Large ones, and those that have no values (on ``meta``), are left out."""
    every: dict[str, Any] = (
        {} if isinstance(model, ExportedProgram) else {"remove_duplicate": False}
    )  # which that does not take
    named = dict(model.named_buffers(**every))
    found = {}
    for name, state in folded.states.items():
        value = next((named[n] for n in (name, *state.aliases) if n in named), None)
        if state.kind == "buffer" and name not in folded.constants and value is not None:
            written = _written(value)
            if written is not None:
                found[name] = written
    return found


def _written(value: Tensor) -> Any | None:
    known = not (value.is_meta or isinstance(value, FakeTensor) or value.is_complex() or value.is_quantized)
    if not known or value.layout != torch.strided or not 0 < value.numel() <= _LOOKED_AT:
        return None
    first = value.detach().flatten()[0]
    if bool((value == first).all()):
        return first.item()
    return value.detach().cpu().tolist() if value.numel() <= _LISTED else None
