"""The bytes of optimizers' states."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.errors import ConstraintError
from partitioner.topology.validate import format_suggestion


@dataclass(frozen=True)
class Optimizer:
    """``moment_bytes`` per parameter, in fp32 or shorter (of fp64: twice); ``master``: whether a short parameter has an
    fp32 copy, which it steps."""

    moment_bytes: int
    master: bool


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(8, True),
    "adam": Optimizer(8, True),
    "sgd_momentum": Optimizer(4, True),
    "sgd": Optimizer(0, True),
    "none": Optimizer(0, False),
}


def optimizer_bytes(numel: int, itemsize: int, optimizer: str) -> int:
    """Bytes of an optimizer's states for ``numel`` parameters. Raises :class:`ConstraintError` for an unknown one."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
        raise ConstraintError(
            f"unknown optimizer {name!r}; {format_suggestion(name, [*OPTIMIZERS])}expected one of "
            f"{', '.join(OPTIMIZERS)}: the "
            "name of one whose states take as many bytes"
        )
    master = 4 if OPTIMIZERS[optimizer].master and itemsize < 4 else 0
    return moment_bytes(numel, itemsize, optimizer) + numel * master


def moment_bytes(numel: int, itemsize: int, optimizer: str) -> int:
    """Bytes of an optimizer's states for ``numel`` parameters, without the copies of them in float32."""
    return numel * (OPTIMIZERS[optimizer].moment_bytes * max(4, itemsize) // 4)
