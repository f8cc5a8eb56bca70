"""Memory and cost of parameters, gradients and optimizer states: bytes on a rank, and seconds of the update.

Mixed precision with Adam takes 18 bytes per parameter: 2 for the parameter and 4 each for its gradient, two moments,
and the float32 copy that the optimizer updates (Megatron-LM's main gradients). Rajbhandari et al. 2020 (ZeRO) count 16,
with 16-bit gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from partitioner.cost.call.roofline import memory_rate
from partitioner.optimizers import moment_bytes, optimizer_bytes
from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ir.layouts import REPLICATED, Layout, local_shape
from partitioner.passes.ir.model import ModelState, TensorSpec
from partitioner.topology.hardware import DeviceType

# Names of the axes inside a part of dp, and between its parts, in a placed mesh.
INNER = {"dp": "dp_shard", "cp": "cp", "experts": "edp_shard"}
OUTER = {"dp": "dp_replicate", "experts": "edp_replicate"}


def gradient_bytes(spec: TensorSpec, short: bool) -> int:
    """Return the bytes of the gradient of a parameter with the shape and dtype ``spec``. ``short``: whether the
    gradient has the parameter's dtype. Otherwise it is accumulated in float32 if the parameter's dtype is shorter."""
    return spec.numel * (spec.dtype if short else accumulated_in(spec.dtype)).itemsize


@dataclass(frozen=True)
class StateCost:
    """Bytes of one parameter or buffer on one rank, with its gradient and optimizer states.

    - ``parameter``, ``gradient``, ``optimizer``: bytes of the parameter or buffer itself, of its gradient and of its
      optimizer states, before ZeRO shards them.
    - ``grad_axes``: the mesh axes over which its gradient is summed. ``expert``: whether it belongs to experts.
    - ``stage``: the ZeRO stage (0: none). ``replicas``: the number of ranks over which ZeRO shards it. ``hybrid``:
      whether these ranks are only a part of the data-parallel ranks, and the parts are replicas of each other.
    - ``hosted``: whether its optimizer states are in host memory, and the host runs the optimizer's step. ``disk``:
      whether they are on the node's disk instead and are read for each step. ``passing``: whether the parameter itself
      is in host memory and is copied to the device only while it is used.
    - ``master``: the part of ``optimizer`` that is the float32 copy of the parameter. ``lost``: bytes of the
      compression residual, the rounding error of its sent gradient that is kept for the next step.
    """

    parameter: float
    gradient: float = 0.0
    optimizer: float = 0.0
    grad_axes: tuple[str, ...] = ()
    stage: int = 0  # stage of ZeRO
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
        """Return the mesh axes over which the gradient of the parameter is reduce-scattered to shards; empty without
        ZeRO.
        """
        shared = tuple(a for a in self.grad_axes if a != "tp") if self.stage else ()
        return tuple(INNER[a] for a in shared) if self.hybrid else shared

    @cached_property
    def rest_axes(self) -> tuple[str, ...]:
        """Return the mesh axes over which the gradient of the parameter is all-reduced. Under ZeRO, the all-reduce
        follows the reduce-scatter, and only the rank's shard is reduced.
        """
        if not self.stage:
            return self.grad_axes
        outer = (OUTER[a] for a in self.grad_axes if self.hybrid and a in OUTER)
        return (*outer, *(a for a in self.grad_axes if a == "tp"))

    @cached_property
    def kind(self) -> Hashable:
        """Return a key that is equal for parameters and buffers that differ only in their bytes, so that their bytes
        can be added up.
        """
        flags = self.stage, self.replicas, self.expert, self.hybrid, self.hosted, self.passing, self.disk
        return self.grad_axes, flags, self.gradient > 0

    @cached_property
    def kept(self) -> dict[str, float]:
        """Return the bytes of this parameter or buffer that stay on the rank during the whole step, by kind of data:
        ``"parameters"``, ``"gradients"``, ``"optimizer"`` and, if gradients are compressed with feedback,
        ``"residuals"`` (their rounding errors). Under ZeRO-1 ``"gradients"`` counts both the whole gradient and its
        shard. Offloaded data count 0."""
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
        """Return the bytes of the rank's shard of this parameter's gradient under ZeRO-2 and ZeRO-3, otherwise 0. The
        shard is kept, but not allocated before the first reduce-scatter of a step."""
        return self.gradient_piece if self.stage >= 2 and self.replicas > 1 else 0.0

    @property
    def in_host(self) -> float:
        """Return the bytes of this parameter in host memory. If the optimizer runs on the host, they are its optimizer
        states (unless these are on disk), a copy of the parameter and its gradient. Otherwise they are the bytes of the
        parameter if it is offloaded, and 0 if not."""
        share = self.replicas if self.stage else 1
        if self.hosted and self.gradient:
            states = 0.0 if self.disk else self.optimizer
            return (states + self.gradient + self.parameter) / share
        return self.parameter / (self.replicas if self.stage == 3 else 1) if self.passing else 0.0

    @property
    def on_disk(self) -> float:
        """Return the bytes of this parameter on disk: its optimizer states, including the float32 copy of the parameter
        if there is one; 0 if they are not on disk.
        """
        return self.optimizer / (self.replicas if self.stage else 1) if self.disk and self.gradient else 0.0

    @property
    def disk_traffic(self) -> float:
        """Return the bytes that one optimizer step reads from and writes to the disk for this parameter. All optimizer
        states on disk are read and written, and the copy of the parameter that is sent to the device is read once more.
        """
        share = self.replicas if self.stage else 1
        return (2 * self.optimizer + self.master) / share if self.disk and self.gradient else 0.0

    @cached_property
    def total(self) -> float:
        """Return the bytes of the parameter or buffer that stay on the rank: the sum over the parameter itself, its
        gradient, its optimizer states and its compression residual (the rounding error of a sent gradient, kept for the
        next step)."""
        return sum(self.kept.values())

    @property
    def gradient_piece(self) -> float:
        """Return the bytes of the gradient that a rank has after the reduce-scatter; without ZeRO, the bytes of the
        whole gradient."""
        return self.gradient / self.replicas if self.stage else self.gradient

    @property
    def update(self) -> float:
        """Return the bytes that an optimizer step reads and writes for this parameter: the parameter and the optimizer
        states are read and written, the gradient is read.
        """
        whole = 2 * (self.parameter + self.optimizer) + self.gradient if self.gradient else 0.0
        return whole / self.replicas if self.stage else whole

    def scaled(self, share: float) -> StateCost:
        """Return this cost of a parameter or buffer with all bytes multiplied by ``share``, a factor."""
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
        """Return the cost of this parameter under ZeRO stage ``stage`` (0: none), sharded over ``replicas`` ranks.

        ``expert``: whether the parameter belongs to experts. ``by_rows``: whether the ranks of ``tp`` hold different
        experts. ``hybrid``: whether only a part of the data-parallel ranks shards it.
        """
        axes = tuple(a for a in self.grad_axes if a != "tp") if expert and by_rows else self.grad_axes
        axes = tuple("experts" if a in ("dp", "cp") else a for a in axes) if expert else axes
        axes = tuple(dict.fromkeys(axes))
        return replace(self, stage=stage, replicas=max(1, replicas), expert=expert, grad_axes=axes, hybrid=hybrid)


class StateCosts(dict[str, StateCost]):
    """Costs of parameters and buffers on a rank: a dict name -> cost. The dict must not be changed, because sums over
    it are cached."""

    @classmethod
    def of(cls, costs: Mapping[str, StateCost]) -> StateCosts:
        return costs if isinstance(costs, cls) else cls(costs)

    @cached_property
    def totals(self) -> dict[str, float]:
        return {name: cost.total for name, cost in self.items()}

    @cached_property
    def scattered(self) -> dict[str, StateCost]:
        """Return the costs of the parameters that ZeRO shards among several ranks, by name."""
        return {name: cost for name, cost in self.items() if cost.stage and cost.replicas > 1}

    @cached_property
    def gradient(self) -> float:
        """Return the bytes of the gradients of all parameters in this dict on one rank, before they are
        reduce-scattered."""
        return sum(cost.gradient for cost in self.values())

    @cached_property
    def late(self) -> dict[str, float]:
        """Return name of a parameter -> bytes of the rank's shard of its gradient under ZeRO-2 and ZeRO-3. The shard is
        not allocated until the gradient is first reduce-scattered in a step. Parameters without such a shard are left
        out."""
        return {name: cost.late for name, cost in self.items() if cost.late}


@dataclass(frozen=True)
class Sharded:
    """How parameters, gradients and optimizer states are sharded in addition to ``tp``.

    ``zero``: the ZeRO stage (0: none). ``replicas``: the number of ranks over which ZeRO shards parameters outside of
    experts. ``expert_replicas``: the number of ranks over which it shards parameters of experts. ``of_experts``: the
    fraction of the experts' weights that a rank holds. ``by_rows``: whether the ranks of ``tp`` hold different experts.
    ``hybrid``: whether only a part of the data-parallel ranks shards a parameter, and the parts are replicas of each
    other.
    """

    zero: int = 0
    replicas: int = 1
    of_experts: float = 1.0
    expert_replicas: int = 1
    by_rows: bool = False
    hybrid: bool = False


WHOLE = Sharded()


def sum_state_costs(costs: Iterable[StateCost]) -> list[StateCost]:
    """Return ``costs`` of single parameters and buffers in fewer entries: costs that differ only in bytes are added up
    to one entry."""
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
    """Parameters and buffers (states) in groups whose members cost the same.

    ``of_state``: name of a state -> index of its group in ``kinds``. ``kinds``: for each group, a tuple of five: one of
    its states; the layout of the states over ``tp``; whether they belong to experts; whether every rank of ``cp``
    computes their whole gradients; and whether ZeRO-3 leaves them unsharded.
    """

    of_state: dict[str, int]
    kinds: list[tuple[ModelState, Layout, bool, bool, bool]]


def kinds_of(
    states: Mapping[str, ModelState],
    layouts: Mapping[str, Layout],
    experts: Collection[str] = (),
    complete: Collection[str] = (),
    left_whole: Collection[str] = (),
) -> StateKinds:
    """Group parameters and buffers of equal cost, and return the groups. ``states``: name -> parameter or buffer.
    ``layouts``: name -> layout over ``tp``; replicated if absent. ``experts``: names of weights of experts.
    ``complete``: names of parameters whose whole gradient every rank of ``cp`` computes. ``left_whole``: names of
    parameters that ZeRO-3 does not shard.
    """
    numbers: dict[Hashable, int] = {}
    kinds: list[tuple[ModelState, Layout, bool, bool, bool]] = []
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
) -> StateCosts:
    """Return the cost of each state (parameter or buffer) on a rank that holds it, by name.

    The gradient of a parameter is summed over ``dp`` and ``cp``, and over ``tp`` if its layout says that each rank
    computes a partial sum (``R'``). If every rank of ``cp`` computes the whole gradient, ``cp`` is left out.

    ``kinds``: the states, grouped by equal cost. ``mesh``: mesh axis -> number of ranks. ``optimizer``: name of the
    optimizer. ``sharded``: how ZeRO and ``ep`` shard the states. ``offload``: the kinds of data in host memory
    (``"optimizer"``, ``"parameters"``) or on ``"disk"``. ``short_gradients``: whether a gradient has its parameter's
    dtype, even if that is shorter than float32. ``train``: whether parameters have gradients and optimizer states.
    """

    def find(state: ModelState, layout: Layout, expert: bool, complete: bool, small: bool) -> StateCost:
        """Return the cost of one group of parameters or buffers that cost the same. ``state``: one of them. ``layout``:
        its layout over ``tp``. ``expert``: whether it belongs to experts. ``complete``: whether every rank of ``cp``
        computes its whole gradient. ``small``: whether it is so small that ZeRO-3 does not shard it."""
        trained = train and state.requires_grad
        apart = complete and trained and not expert
        own = {**mesh, "cp": 1} if apart else mesh
        cost = _build_state_cost(state.spec, layout, mesh.get("tp", 1), own, optimizer, trained, short_gradients)
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

    costs = [find(*kind) for kind in kinds.kinds]  # equal states share one object
    return StateCosts((name, costs[number]) for name, number in kinds.of_state.items())


def with_lost(costs: Mapping[str, StateCost], lost: Callable[[StateCost], float] | None) -> Mapping[str, StateCost]:
    """Return ``costs`` of parameters with the bytes of compression residuals (rounding errors of sent gradients, kept
    for the next step) added. ``lost``: function from a parameter's cost to the bytes of its residual. If it is
    ``None``, there are no residuals, and ``costs`` is returned unchanged."""
    if lost is None:
        return costs
    alike = {id(cost): replace(cost, lost=lost(cost)) for cost in costs.values()}
    return StateCosts((name, alike[id(cost)]) for name, cost in costs.items())


def _build_state_cost(
    spec: TensorSpec,
    layout: Layout,
    ranks: int,
    mesh: Mapping[str, int],
    optimizer: str,
    trained: bool,
    short_gradients: bool,
) -> StateCost:
    """Return the cost of one parameter or buffer on a rank, without ZeRO.

    ``spec``: its whole shape and dtype. ``layout``: its layout over the ``ranks`` ranks of ``tp``. ``mesh``: mesh axis
    -> number of ranks. ``optimizer``: name of the optimizer. ``trained``: whether it has a gradient and optimizer
    states. ``short_gradients``: whether the gradient has the parameter's dtype, even if that is shorter than float32.
    """
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
    """Return the seconds of the optimizer's step on ``device``, which is bound by memory bandwidth. Parameters whose
    optimizer states are in host memory do not count. ``costs``: the costs of the parameters."""
    return sum(cost.update for cost in costs if not cost.hosted) / memory_rate("optimizer", device)
