"""Parameters, gradients and optimizer states: bytes on a rank, the reduction of gradients and the update.

Mixed precision with Adam takes 18 bytes per parameter (Megatron-LM's main gradients; Rajbhandari et al. 2020, ZeRO,
count 16 with short gradients): the parameter, its gradient, two moments, and a copy that the optimizer steps; all but
the parameter in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from partitioner.cost.compute import memory_rate
from partitioner.cost.reducer import INNER, OUTER
from partitioner.optimizers import moment_bytes, optimizer_bytes
from partitioner.topology.parts import DeviceType
from passes.blocks import State, TensorSpec
from passes.gradients import accumulated_in
from passes.layouts import REPLICATED, Layout, local_shape


def gradient_bytes(spec: TensorSpec, short: bool) -> int:
    """Of a parameter's gradient: in float32 where the parameter is shorter, unless gradients may be ``short``, too."""
    return spec.numel * (spec.dtype if short else accumulated_in(spec.dtype)).itemsize


@dataclass(frozen=True)
class StateCost:
    """One state on one rank, in bytes. ``grad_axes``: the mesh axes over which its gradient is added up.

    ``hosted``: its optimizer states are in host memory, where it is stepped, or with ``disk`` on the node's disk, from
    where they come to be stepped; ``passing``: so is the parameter itself. ``master``: what of ``optimizer`` is the
    parameter in float32.
    ``lost``: what is kept of what sending its gradient loses.
    """

    parameter: float
    gradient: float = 0.0
    optimizer: float = 0.0
    grad_axes: tuple[str, ...] = ()
    stage: int = 0  # of ZeRO
    replicas: int = 1
    expert: bool = False
    hybrid: bool = False
    hosted: bool = False
    passing: bool = False
    lost: float = 0.0
    disk: bool = False
    master: float = 0.0

    @cached_property
    def scatter_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are scattered to their shards; none without ZeRO."""
        shared = tuple(a for a in self.grad_axes if a != "tp") if self.stage else ()
        return tuple(INNER[a] for a in shared) if self.hybrid else shared

    @cached_property
    def rest_axes(self) -> tuple[str, ...]:
        """The axes over which the gradients, or the shards that are left of them, are added up."""
        if not self.stage:
            return self.grad_axes
        outer = (OUTER[a] for a in self.grad_axes if self.hybrid and a in OUTER)
        return (*outer, *(a for a in self.grad_axes if a == "tp"))

    @cached_property
    def kind(self) -> Hashable:
        """All but bytes; and whether there is a gradient."""
        flags = self.stage, self.replicas, self.expert, self.hybrid, self.hosted, self.passing, self.disk
        return self.grad_axes, flags, self.gradient > 0

    @cached_property
    def kept(self) -> dict[str, float]:
        """What stays on the rank, by kind. The first stage keeps whole gradients, and the shards that it makes."""
        sizes = {"parameters": (self.parameter, 3), "gradients": (self.gradient, 2), "optimizer": (self.optimizer, 1)}
        kept = {kind: size / self.replicas if self.stage >= at else size for kind, (size, at) in sizes.items()}
        if self.stage == 1 and self.replicas > 1:
            kept["gradients"] += self.gradient / self.replicas
        if self.lost:
            kept["residuals"] = self.lost
        if self.hosted:
            kept["optimizer"] = 0.0
        if self.passing:
            kept["parameters"] = 0.0
        return kept

    @property
    def late(self) -> float:
        """What of :attr:`total` the first SCATTER brings: a shard of the gradient, under ZeRO 2 and 3."""
        return self.gradient_piece if self.stage >= 2 and self.replicas > 1 else 0.0

    @property
    def in_host(self) -> float:
        """Bytes in host memory: optimizer states, the parameter that they belong to, and its gradient."""
        share = self.replicas if self.stage else 1
        if self.hosted and self.gradient:
            states = 0.0 if self.disk else self.optimizer
            return (states + self.gradient + self.parameter) / share  # as it is stepped, or as it is sent
        return self.parameter / (self.replicas if self.stage == 3 else 1) if self.passing else 0.0

    @property
    def on_disk(self) -> float:
        """Bytes on disk: optimizer states, and the parameter that they belong to if it is another than that in use."""
        return self.optimizer / (self.replicas if self.stage else 1) if self.disk and self.gradient else 0.0

    @property
    def disk_traffic(self) -> float:
        """Bytes of a step from and to the disk: all that is there is read and written, and what is sent to the device
        read once more."""
        share = self.replicas if self.stage else 1
        return (2 * self.optimizer + self.master) / share if self.disk and self.gradient else 0.0

    @cached_property
    def total(self) -> float:
        """What stays on the rank."""
        return sum(self.kept.values())

    @property
    def gradient_piece(self) -> float:
        """What scattering leaves of the gradient; all of it without ZeRO."""
        return self.gradient / self.replicas if self.stage else self.gradient

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
            lost=self.lost * share,
            master=self.master * share,
        )

    def zero(
        self, stage: int, replicas: int, expert: bool = False, by_rows: bool = False, hybrid: bool = False
    ) -> StateCost:
        """It under stage ``stage`` of ZeRO over ``replicas`` ranks; ``by_rows``, ``hybrid``: see :class:`Sharded`."""
        axes = tuple(a for a in self.grad_axes if a != "tp") if expert and by_rows else self.grad_axes
        axes = tuple("experts" if a in ("dp", "cp") else a for a in axes) if expert else axes
        axes = tuple(dict.fromkeys(axes))
        return replace(self, stage=stage, replicas=max(1, replicas), expert=expert, grad_axes=axes, hybrid=hybrid)


class States(dict[str, StateCost]):
    """What states cost a rank, by name. They stay as they are: what is read off all of them is read once."""

    @classmethod
    def of(cls, costs: Mapping[str, StateCost]) -> States:
        return costs if isinstance(costs, cls) else cls(costs)

    @cached_property
    def totals(self) -> dict[str, float]:
        return {name: cost.total for name, cost in self.items()}

    @cached_property
    def scattered(self) -> dict[str, StateCost]:
        """Those whose gradients, or more, are shared among ranks."""
        return {name: cost for name, cost in self.items() if cost.stage and cost.replicas > 1}

    @cached_property
    def gradient(self) -> float:
        """Bytes of all gradients before they are scattered."""
        return sum(cost.gradient for cost in self.values())

    @cached_property
    def late(self) -> dict[str, float]:
        """Of those that come late, see :attr:`StateCost.late`."""
        return {name: cost.late for name, cost in self.items() if cost.late}


@dataclass(frozen=True)
class Sharded:
    """How states are sharded besides ``tp``: ``zero``, its stage, over ``replicas`` ranks; of experts' weights a rank
    holds ``of_experts``, alike on ``expert_replicas`` ranks. ``by_rows``: ranks along ``tp`` have different experts.
    ``hybrid``: others of the ranks with the same states have replicas."""

    zero: int = 0
    replicas: int = 1
    of_experts: float = 1.0
    expert_replicas: int = 1
    by_rows: bool = False
    hybrid: bool = False


WHOLE = Sharded()


def summed(costs: Iterable[StateCost]) -> list[StateCost]:
    """``costs`` added up, one for each kind: those that differ in bytes alone."""
    kinds: dict[Hashable, tuple[StateCost, list[float]]] = {}
    for cost in costs:
        sums = kinds.setdefault(cost.kind, (cost, [0.0, 0.0, 0.0, 0.0, 0.0]))[1]
        sums[0] += cost.parameter
        sums[1] += cost.gradient
        sums[2] += cost.optimizer
        sums[3] += cost.lost
        sums[4] += cost.master
    return [
        replace(first, parameter=parameter, gradient=gradient, optimizer=optimizer, lost=lost, master=master)
        for first, (parameter, gradient, optimizer, lost, master) in kinds.values()
    ]


class StateKinds(NamedTuple):
    """Which states cost the same: the number of each state's kind, and for each kind one of them, its layout over
    ``tp``, whether it is experts', whether all ranks of ``cp`` have its gradient whole, and whether ZeRO-3 leaves it
    whole."""

    of_state: dict[str, int]
    kinds: list[tuple[State, Layout, bool, bool, bool]]


def kinds_of(
    states: Mapping[str, State],
    layouts: Mapping[str, Layout],
    experts: Collection[str] = (),
    complete: Collection[str] = (),
    left_whole: Collection[str] = (),
) -> StateKinds:
    numbers: dict[Hashable, int] = {}
    kinds: list[tuple[State, Layout, bool, bool, bool]] = []
    of_state: dict[str, int] = {}
    for name, state in states.items():
        layout, expert, whole = layouts.get(name, REPLICATED), name in experts, name in complete
        small = name in left_whole
        key = state.spec, state.kind, state.requires_grad, layout, expert, whole, small
        if key not in numbers:
            numbers[key] = len(kinds)
            kinds.append((state, layout, expert, whole, small))
        of_state[name] = numbers[key]
    return StateKinds(of_state, kinds)


def state_costs(
    kinds: StateKinds,
    mesh: Mapping[str, int],
    *,
    optimizer: str = "adamw",
    train: bool = True,
    sharded: Sharded = WHOLE,
    short_gradients: bool = False,
    offload: Collection[str] = (),
) -> States:
    """What each state costs a rank that holds it, under its layout over ``tp`` (absent: whole).

    The gradient of a parameter is added up over ``dp``, and over ``tp`` where it is read as a partial sum (``R'``);
    those that all ranks of ``cp`` have whole are not shared by these.
    ZeRO (Rajbhandari et al. 2020) divides optimizer states (1), gradients too (2), and parameters too (3).
    ``offload``: what is kept in host memory.
    ``short_gradients``: they are of their parameter's type, even where that is shorter than float32.
    """

    def find(state: State, layout: Layout, expert: bool, complete: bool, small: bool) -> StateCost:
        trained = train and state.requires_grad
        apart = complete and trained and not expert
        own = {**mesh, "cp": 1} if apart else mesh
        cost = _cost(state.spec, layout, mesh.get("tp", 1), own, optimizer, trained, short_gradients)
        cost = cost.scaled(sharded.of_experts) if expert else cost
        replicas = sharded.expert_replicas if expert else sharded.replicas
        replicas = replicas // mesh.get("cp", 1) if apart else replicas
        stage = sharded.zero if state.kind == "parameter" and state.spec.shape else 0
        stage = 0 if small and stage == 3 else stage
        return replace(
            cost.zero(stage, replicas, expert, sharded.by_rows, sharded.hybrid),
            hosted="optimizer" in offload and trained,
            passing="parameters" in offload and state.kind == "parameter",
            disk="disk" in offload and trained,
        )

    costs = [find(*kind) for kind in kinds.kinds]  # states that are alike have one and the same object
    return States((name, costs[number]) for name, number in kinds.of_state.items())


def with_lost(costs: Mapping[str, StateCost], lost: Callable[[StateCost], float] | None) -> Mapping[str, StateCost]:
    """``costs`` with what each has kept of what sending its gradient loses; ``None``: nothing."""
    if lost is None:
        return costs
    alike = {id(cost): replace(cost, lost=lost(cost)) for cost in costs.values()}
    return States((name, alike[id(cost)]) for name, cost in costs.items())


def _cost(
    spec: TensorSpec,
    layout: Layout,
    ranks: int,
    mesh: Mapping[str, int],
    optimizer: str,
    trained: bool,
    short_gradients: bool,
) -> StateCost:
    local = TensorSpec(local_shape(layout, spec.shape, ranks), spec.dtype)
    if not trained:
        return StateCost(local.nbytes)
    axes = [axis for axis in ("dp", "cp") if mesh.get(axis, 1) > 1]
    if layout.kind == "R'" and ranks > 1:
        axes.append("tp")
    states = optimizer_bytes(local.numel, spec.dtype.itemsize, optimizer)
    master = states - moment_bytes(local.numel, spec.dtype.itemsize, optimizer)
    return StateCost(local.nbytes, gradient_bytes(local, short_gradients), states, tuple(axes), master=master)


def update_time(costs: Collection[StateCost], device: DeviceType) -> float:
    """Seconds of the optimizer's step on the device over ``costs``: bound by memory."""
    return sum(cost.update for cost in costs if not cost.hosted) / memory_rate("optimizer", device)
