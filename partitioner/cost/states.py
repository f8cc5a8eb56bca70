"""Parameters, gradients and optimizer states: bytes on a rank, the reduction of gradients and the update.

Mixed precision with Adam takes 16 to 18 bytes per parameter (Rajbhandari et al. 2020, ZeRO): the parameter, its
gradient in the same precision, two fp32 moments, and an fp32 copy where the parameter is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import memory_rate
from partitioner.emit_buckets import BUCKET_BYTES
from partitioner.errors import ConstraintError
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import State, TensorSpec
from passes.layouts import REPLICATED, Layout, local_shape


@dataclass(frozen=True)
class Optimizer:
    """``moment_bytes`` per parameter; ``master``: whether a short parameter has an fp32 copy."""

    moment_bytes: int
    master: bool


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(8, True),
    "adam": Optimizer(8, True),
    "sgd_momentum": Optimizer(4, True),
    "sgd": Optimizer(0, False),
    "none": Optimizer(0, False),
}


def optimizer_bytes(numel: int, itemsize: int, optimizer: str) -> int:
    """Bytes of an optimizer's states for ``numel`` parameters. Raises :class:`ConstraintError` for an unknown one."""
    if optimizer not in OPTIMIZERS:
        raise ConstraintError(f"unknown optimizer {optimizer!r}; expected one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[optimizer]
    return numel * (kind.moment_bytes + (4 if kind.master and itemsize < 4 else 0))


@dataclass(frozen=True)
class StateCost:
    """One state on one rank, in bytes. ``grad_axes``: the mesh axes over which its gradient is added up."""

    parameter: float
    gradient: float = 0.0
    optimizer: float = 0.0
    grad_axes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer

    @property
    def update(self) -> float:
        """Bytes that an optimizer step reads and writes: parameter and states both ways, the gradient once."""
        return 2 * (self.parameter + self.optimizer) + self.gradient if self.gradient else 0.0

    def divided(self, parts: int) -> StateCost:
        """An even share of it."""
        return StateCost(self.parameter / parts, self.gradient / parts, self.optimizer / parts, self.grad_axes)


def state_costs(
    states: Mapping[str, State],
    layouts: Mapping[str, Layout],
    mesh: Mapping[str, int],
    *,
    optimizer: str = "adamw",
    train: bool = True,
) -> dict[str, StateCost]:
    """What each state costs a rank that holds it, under its layout over ``tp`` (absent: whole).

    The gradient of a parameter is added up over ``dp``, and over ``tp`` where it is read as a partial sum (``R'``).
    """
    ranks = mesh.get("tp", 1)
    return {
        name: _cost(state.spec, layouts.get(name, REPLICATED), ranks, mesh, optimizer, train and state.requires_grad)
        for name, state in states.items()
    }


def _cost(
    spec: TensorSpec, layout: Layout, ranks: int, mesh: Mapping[str, int], optimizer: str, trained: bool
) -> StateCost:
    numel = math.prod(local_shape(layout, spec.shape, ranks))
    size = numel * spec.dtype.itemsize
    if not trained:
        return StateCost(size)
    axes = [axis for axis in ("dp", "cp") if mesh.get(axis, 1) > 1]
    if layout.kind == "R'" and ranks > 1:
        axes.append("tp")
    return StateCost(size, size, optimizer_bytes(numel, spec.dtype.itemsize, optimizer), tuple(axes))


@dataclass(frozen=True)
class Reduction:
    """The reduction of a stage's gradients: seconds in all, and of the last bucket, which nothing hides."""

    total_s: float = 0.0
    last_s: float = 0.0
    by_axes: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def exposed(self, window_s: float, slowdown: float) -> float:
        """Seconds that it adds to a backward of ``window_s`` that it overlaps with.

        While both run each takes ``slowdown`` times as long; what does not fit and the last bucket come after.
        """
        hidden = max(0.0, self.total_s - self.last_s)
        return (slowdown - 1) * min(hidden, window_s) + max(0.0, hidden - window_s) + self.last_s


def reduction(costs: Collection[StateCost], groups: Mapping[tuple[str, ...], Group]) -> Reduction:
    """The reduction of the gradients of ``costs``, in buckets by axes; ``groups`` by the axes that are added over."""
    sizes: dict[tuple[str, ...], float] = {}
    for cost in costs:
        if cost.grad_axes and cost.gradient:
            sizes[cost.grad_axes] = sizes.get(cost.grad_axes, 0.0) + cost.gradient
    by_axes, last = {}, 0.0
    for axes, size in sizes.items():
        count = math.ceil(size / BUCKET_BYTES)
        bucket = collective_time("all_reduce", size / count, groups[axes])
        by_axes[axes] = count * bucket
        last = max(last, bucket)
    return Reduction(sum(by_axes.values()), last, by_axes)


def update_time(costs: Collection[StateCost], device: DeviceType) -> float:
    """Seconds of the optimizer's step over ``costs``: bound by memory."""
    return sum(cost.update for cost in costs) / memory_rate("optimizer", device)
