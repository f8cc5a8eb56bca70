"""Loss scaling: gradients in float16 are kept from vanishing by a large factor, which is taken out in float32.

The factor halves when a gradient overflows on any rank, and doubles after many steps without (Micikevicius et al. 2018,
section 3.2; the constants are those of ``torch.amp.GradScaler``). A step that overflowed has no gradients, and torch's
optimizers leave parameters without one as they are: the training loop needs no case for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from passes.serialize import dtype_of
from runtime.errors import LaunchError
from runtime.groups import Group
from runtime.program import Program

FIRST = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

Scale = float | Literal["auto", "dynamic"] | None


class LossScale:
    """The factor of the loss of one rank; the same on all ranks. ``overflowed``: whether the last step did."""

    def __init__(self, value: float, dynamic: bool, limit: float) -> None:
        self.value = min(value, limit)
        self.dynamic = dynamic
        self.limit = limit
        self.good_steps = 0
        self.overflowed = False
        self.applied = self.value  # in the last step

    def unscale(self, gradients: Sequence[Tensor], everyone: Group, device: torch.device) -> None:
        """Take the factor out of ``gradients``, and see whether they are finite on all ranks, of ``everyone``."""
        self.applied = self.value
        where = gradients[0].device if gradients else device  # host memory, where the optimizer runs there
        found = torch.zeros(1, dtype=torch.float32, device=where)
        inverse = torch.full((1,), 1.0 / self.value, dtype=torch.float32, device=where)
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_([*gradients], found, inverse)
        self.overflowed = bool(everyone.all_reduce(found.to(device), maximum=True).wait().item())
        if self.dynamic:
            self._adapt()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Steps in the block are the last one again: with its factor, and of no effect on those to come."""
        before = self.value, self.good_steps, self.overflowed
        self.value = self.applied
        try:
            yield
        finally:
            self.value, self.good_steps, self.overflowed = before

    def _adapt(self) -> None:
        if self.overflowed:
            self.value, self.good_steps = self.value * BACKOFF, 0
            return
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.value, self.good_steps = min(self.value * GROWTH, self.limit), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.dynamic:
            self.value, self.good_steps = min(state["value"], self.limit), state["good_steps"]


def scale_of(program: Program, asked: Scale) -> LossScale | None:
    """The scaling of a program's loss. ``auto``: dynamic where a parameter in float16 is trained, else none.

    Raises :class:`LaunchError` for a factor that is none.
    """
    if program.objective != "train" or program.loss is None or asked is None:
        return None
    short = any(s.requires_grad and s.dtype == "float16" for s in program.states.values())
    if asked == "auto" and not short:
        return None
    limit = torch.finfo(dtype_of(program.values[program.loss].dtype)).max / 2
    if asked in ("auto", "dynamic"):
        return LossScale(FIRST, True, limit)
    if isinstance(asked, str) or not asked > 0:
        raise LaunchError(f"loss_scale is 'auto', 'dynamic', a positive number or None; got {asked!r}")
    return LossScale(float(asked), False, limit)
