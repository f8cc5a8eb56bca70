"""The memory of optimizer states, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.errors import ConstraintError
from partitioner.topology.validate import format_suggestion


@dataclass(frozen=True)
class Optimizer:
    """The memory that one kind of optimizer needs. ``moment_bytes``: bytes of its states per parameter element; for
    elements of more than 4 bytes (float64) twice as many. ``master``: whether it also keeps a float32 copy of each
    parameter of a shorter type, such as bf16.
    """

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
    """Return the bytes of an optimizer's states for ``numel`` parameter elements of ``itemsize`` bytes each, including
    the float32 copies of parameters of a shorter type, such as bf16. ``optimizer``: name, such as ``"adamw"``. Raise
    :class:`ConstraintError` for an unknown one."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
        raise ConstraintError(
            f"unknown optimizer {name!r}; {format_suggestion(name, [*OPTIMIZERS])}expected one of "
            f"{', '.join(OPTIMIZERS)}: for another optimizer, give one whose states take as many bytes"
        )
    master = 4 if OPTIMIZERS[optimizer].master and itemsize < 4 else 0
    return moment_bytes(numel, itemsize, optimizer) + numel * master


def moment_bytes(numel: int, itemsize: int, optimizer: str) -> int:
    """Return the bytes of an optimizer's states for ``numel`` parameter elements of ``itemsize`` bytes each, without
    the float32 copies of parameters of a shorter type. ``optimizer``: name, such as ``"adamw"``; it must be known."""
    return numel * (OPTIMIZERS[optimizer].moment_bytes * max(4, itemsize) // 4)
