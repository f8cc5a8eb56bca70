"""Parameters, gradients and optimizer states: bytes on a rank, the reduction of gradients and the update.

Mixed precision with Adam takes 18 bytes per parameter (Megatron-LM's main gradients; Rajbhandari et al. 2020, ZeRO,
count 16 with short gradients): the parameter, its gradient, two moments, and a copy that the optimizer steps; all but
the parameter in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.cost.collectives import collective_time
from partitioner.cost.compute import memory_rate
from partitioner.emit_buckets import bucket_limit
from partitioner.errors import ConstraintError
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import State, TensorSpec
from passes.gradients import accumulated_in
from passes.layouts import REPLICATED, Layout, local_shape


@dataclass(frozen=True)
class Optimizer:
    """``moment_bytes`` per parameter; ``master``: whether a short parameter has an fp32 copy, which it steps."""

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
    stage: int = 0  # of ZeRO
    replicas: int = 1
    expert: bool = False

    @property
    def kept(self) -> dict[str, float]:
        """What stays on the rank, by kind."""
        sizes = {"parameters": (self.parameter, 3), "gradients": (self.gradient, 2), "optimizer": (self.optimizer, 1)}
        return {kind: size / self.replicas if self.stage >= at else size for kind, (size, at) in sizes.items()}

    @cached_property
    def total(self) -> float:
        """What stays on the rank."""
        return sum(self.kept.values())

    @property
    def update(self) -> float:
        """Bytes that an optimizer step reads and writes: parameter and states both ways, the gradient once."""
        whole = 2 * (self.parameter + self.optimizer) + self.gradient if self.gradient else 0.0
        return whole / self.replicas if self.stage else whole

    def scaled(self, share: float) -> StateCost:
        """``share`` of it."""
        return replace(
            self,
            parameter=self.parameter * share,
            gradient=self.gradient * share,
            optimizer=self.optimizer * share,
        )

    def zero(self, stage: int, replicas: int, expert: bool = False, by_rows: bool = False) -> StateCost:
        """It under stage ``stage`` of ZeRO over ``replicas`` ranks; ``by_rows``: see :class:`Sharded`."""
        axes = tuple(a for a in self.grad_axes if a != "tp") if expert and by_rows else self.grad_axes
        axes = tuple("experts" if a in ("dp", "cp") else a for a in axes) if expert else axes
        axes = tuple(dict.fromkeys(axes))
        return replace(self, stage=stage, replicas=max(1, replicas), expert=expert, grad_axes=axes)


@dataclass(frozen=True)
class Sharded:
    """How states are sharded besides ``tp``: ``zero``, its stage, over ``replicas`` ranks; ``experts``: the states that
    are experts' weights, of which a rank holds ``of_experts``, alike on ``expert_replicas`` ranks. ``by_rows``: ranks
    along ``tp`` have different experts."""

    zero: int = 0
    replicas: int = 1
    experts: frozenset[str] = frozenset()
    of_experts: float = 1.0
    expert_replicas: int = 1
    by_rows: bool = False


WHOLE = Sharded()


def state_costs(
    states: Mapping[str, State],
    layouts: Mapping[str, Layout],
    mesh: Mapping[str, int],
    *,
    optimizer: str = "adamw",
    train: bool = True,
    sharded: Sharded = WHOLE,
) -> dict[str, StateCost]:
    """What each state costs a rank that holds it, under its layout over ``tp`` (absent: whole).

    The gradient of a parameter is added up over ``dp``, and over ``tp`` where it is read as a partial sum (``R'``).
    ZeRO (Rajbhandari et al. 2020) divides optimizer states (1), gradients too (2), and parameters too (3).
    """
    ranks = mesh.get("tp", 1)
    costs = {}
    for name, state in states.items():
        trained = train and state.requires_grad
        cost = _cost(state.spec, layouts.get(name, REPLICATED), ranks, mesh, optimizer, trained)
        expert = name in sharded.experts
        cost = cost.scaled(sharded.of_experts) if expert else cost
        replicas = sharded.expert_replicas if expert else sharded.replicas
        costs[name] = cost.zero(sharded.zero, replicas, expert, sharded.by_rows)
    return costs


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
    gradient = numel * accumulated_in(spec.dtype).itemsize
    return StateCost(size, gradient, optimizer_bytes(numel, spec.dtype.itemsize, optimizer), tuple(axes))


@dataclass(frozen=True)
class Reduction:
    """The reduction of a stage's gradients: seconds in all, and of the last bucket, which nothing hides.

    ``gather_s``: of gathering the updated parameters under ZeRO 1 and 2, behind the forward that follows.
    """

    total_s: float = 0.0
    last_s: float = 0.0
    gather_s: float = 0.0
    by_axes: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def exposed(self, window_s: float, slowdown: float, forward_s: float = 0.0, overlap: bool = True) -> float:
        """Seconds that it adds to a backward of ``window_s`` that it overlaps with, and to a forward of ``forward_s``.

        While both run each takes ``slowdown`` times as long; what does not fit and the last bucket come after.
        """
        if not overlap:
            return self.total_s + self.gather_s
        gathered = (slowdown - 1) * min(self.gather_s, forward_s) + max(0.0, self.gather_s - forward_s)
        return gathered + self._behind(window_s, slowdown)

    def _behind(self, window_s: float, slowdown: float) -> float:
        hidden = max(0.0, self.total_s - self.last_s)
        return (slowdown - 1) * min(hidden, window_s) + max(0.0, hidden - window_s) + self.last_s


def reduction(costs: Collection[StateCost], groups: Mapping[tuple[str, ...], Group]) -> Reduction:
    """The reduction of the gradients of ``costs``, in buckets by axes; ``groups`` by the axes that are added over.

    Under ZeRO 1 and 2 it is a reduce-scatter and, after the update, an all-gather; under 3 both are the calls' own.
    """
    sizes: dict[tuple[tuple[str, ...], int], float] = {}
    for cost in costs:
        if cost.grad_axes and cost.gradient and cost.stage < 3:
            key = cost.grad_axes, min(cost.stage, 1)
            sizes[key] = sizes.get(key, 0.0) + cost.gradient
    by_axes: dict[tuple[str, ...], float] = {}
    last = gathered = 0.0
    for (axes, stage), size in sizes.items():
        count = math.ceil(size / bucket_limit(groups[axes].size))
        bucket = collective_time("reduce_scatter" if stage else "all_reduce", size / count, groups[axes])
        by_axes[axes] = by_axes.get(axes, 0.0) + count * bucket
        last = max(last, bucket)
        gathered += count * collective_time("all_gather", size / count, groups[axes]) if stage else 0.0
    return Reduction(sum(by_axes.values()), last, gathered, by_axes)


def update_time(costs: Collection[StateCost], device: DeviceType) -> float:
    """Seconds of the optimizer's step over ``costs``: bound by memory."""
    return sum(cost.update for cost in costs) / memory_rate("optimizer", device)
