"""The points of the search: mesh shape, microbatch and schedule; and those that the report always has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from partitioner.constraints import Constraints
from partitioner.errors import PlanError
from partitioner.topology.model import Topology


@dataclass(frozen=True, order=True)
class Point:
    """One combination. ``recompute`` is left to the stages unless it is pinned."""

    pp: int
    dp: int
    tp: int
    microbatch_size: int
    schedule: str = "1f1b"

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "cp": 1, "tp": self.tp, "ep": 1}

    def num_microbatches(self, global_batch: int) -> int:
        return global_batch // (self.dp * self.microbatch_size)

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} tp={self.tp} microbatch={self.microbatch_size} {self.schedule}"


@dataclass(frozen=True)
class Space:
    """What the points are drawn from. ``num_calls``: calls that stages can be cut between; ``dims``: the sizes of the
    weights' dims; ``global_batch``: samples."""

    topology: Topology
    global_batch: int
    num_calls: int
    dims: frozenset[int]
    constraints: Constraints = field(default_factory=Constraints)
    train: bool = True

    @property
    def world_size(self) -> int:
        return self.topology.num_devices


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def points(space: Space) -> list[Point]:
    """All points that the constraints allow.

    ``tp`` divides some dim of a weight and stays within a node unless it is pinned; ``dp`` and the microbatch divide
    the batch; there are calls for every stage. Of the schedules only 1F1B is tried unless GPipe is pinned: under this
    cost model GPipe takes as long and never less memory.

    Raises :class:`ConstraintError` for constraints that cannot hold and :class:`PlanError` if no point is left.
    """
    pinned = space.constraints
    pinned.check(space.world_size, space.global_batch, space.dims)
    schedule = pinned.schedule or "1f1b"
    found = [
        Point(pp, dp, tp, size, schedule)
        for pp, dp, tp in meshes(space)
        for size in divisors(space.global_batch // dp)
        if pinned.microbatch_size in (None, size)
    ]
    if not found:
        raise PlanError(_why_none(space))
    return found


def meshes(space: Space) -> list[tuple[int, int, int]]:
    """The (pp, dp, tp) that the constraints allow."""
    pinned, world = space.constraints, space.world_size
    found = []
    for tp in divisors(world):
        if not (pinned.tp in (None, tp) and _tensor_axis_fits(space, tp)):
            continue
        for pp in divisors(world // tp):
            dp = world // tp // pp
            if pinned.pp not in (None, pp) or pinned.dp not in (None, dp):
                continue
            if pp <= space.num_calls and space.global_batch % dp == 0:
                found.append((pp, dp, tp))
    return found


def _tensor_axis_fits(space: Space, tp: int) -> bool:
    if tp == 1 or space.constraints.tp == tp:
        return True
    inside = space.topology.devices_per_node if space.topology.num_nodes > 1 else space.world_size
    return tp <= inside and inside % tp == 0 and any(size % tp == 0 for size in space.dims)


def _why_none(space: Space) -> str:
    pinned = ", ".join(f"{k}={v}" for k, v in space.constraints.pinned.items())
    return (
        f"no mesh of {space.world_size} ranks{' with ' + pinned if pinned else ''} fits: dp must divide the global "
        f"batch of {space.global_batch}, pp is at most {space.num_calls} (the calls that can be placed), tp must "
        "divide a dim of a weight and stay within a node; change the batch, the constraints or the number of devices"
    )


def baselines(
    space: Space, candidates: Sequence[Point], bound: Callable[[Point], float], fits: Callable[[Point], bool]
) -> dict[str, Point | None]:
    """The points that every report has: plain data parallelism, and the textbook layout of Megatron-LM.

    The latter has ``tp`` as wide as a node, as few stages as fit in memory, data parallelism over the rest (Narayanan
    et al. 2021, section 3), and the microbatch of the least bound. ``None``: not among ``candidates``.
    """
    plain = [p for p in candidates if p.pp == p.tp == 1]
    widest = max((p.tp for p in candidates), default=1)
    megatron = [p for p in candidates if p.tp == widest]
    depths = sorted({p.pp for p in megatron})
    for pp in depths:
        of_depth = [p for p in megatron if p.pp == pp]
        if any(fits(p) for p in of_depth) or pp == depths[-1]:
            megatron = of_depth
            break
    return {"data parallel": _least(plain, bound, fits), "megatron": _least(megatron, bound, fits)}


def left_out(space: Space, candidates: Sequence[Point]) -> dict[Point, str]:
    """Plain data parallelism with the reason why it is no candidate, if it is none."""
    if any(p.pp == p.tp == 1 for p in candidates):
        return {}
    point = Point(1, space.world_size, 1, 1, space.constraints.schedule or "1f1b")
    if space.global_batch % space.world_size:
        return {point: f"the global batch of {space.global_batch} does not split over dp={space.world_size}"}
    return {point: "excluded by the constraints"}


def _least(choices: Iterable[Point], bound: Callable[[Point], float], fits: Callable[[Point], bool]) -> Point | None:
    return min(choices, key=lambda p: (not fits(p), bound(p)), default=None)
