"""What every report compares a plan with: plain and fully sharded data parallelism, and Megatron-LM's layout.

They are in the report whatever the user fixed, with what they cost or why they do not fit. Those that are no candidates
of the search are planned beside it; without host memory where they fit so, as they would be tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from partitioner.constraints import OF_POINT, Constraints
from partitioner.cost.bounds import ModelBounds
from partitioner.plan import Baseline, Candidate
from partitioner.solve.point import Point
from partitioner.solve.points import Space, baselines, least, points
from partitioner.solve.rows import Evaluated, candidate, refused
from partitioner.solve.unfit import uneven
from partitioner.units import divisors
from passes.errors import PartitionError

DATA_PARALLEL, FULLY_SHARDED, MEGATRON = "Plain data parallelism", "ZeRO-3 (fully sharded)", "Megatron's layout"
_EXCLUDED = "excluded by the constraints"
MOST_TRIED = 12  # points of one layout
_NONE: Mapping[str, Baseline] = {}


@dataclass(frozen=True)
class Standard:
    """A layout to compare with: the points that are tried, the best by its bound first, and why it is no candidate."""

    name: str
    points: tuple[Point, ...] = ()
    excluded: str = ""


def standards(space: Space, candidates: Sequence[Point], bounds: ModelBounds, free: ModelBounds) -> list[Standard]:
    """The layouts to compare with, among the candidates where one is. ``free``: the bounds of the job without pins."""
    wide = replace(space, constraints=unpinned(space.constraints))
    own = best = _textbook(space, candidates, bounds)
    known = own_points = frozenset(candidates)
    if wide.constraints != space.constraints:
        others = _points(wide)
        best = _textbook(wide, others, free)
        known = known.union(others)
    plain = own["data parallel"] or best["data parallel"]
    megatron = best["megatron"] or own["megatron"]
    found = [(DATA_PARALLEL, plain)]
    if space.train and space.world_size > 1:
        found.append((FULLY_SHARDED, _fully_sharded(space, free)))
    if megatron is None or megatron.tp > 1:
        found.append((MEGATRON, megatron))
    why = uneven(space, space.world_size)
    none = {DATA_PARALLEL: why, FULLY_SHARDED: why, MEGATRON: "no mesh has it"}
    return [
        Standard(name, (point, *_leaner(space, point, known)), "" if point in own_points else _EXCLUDED)
        if point is not None
        else Standard(name, excluded=none[name])
        for name, point in found
    ]


def _textbook(space: Space, candidates: Sequence[Point], bounds: ModelBounds) -> dict[str, Point | None]:
    """See :func:`partitioner.solve.points.baselines`; where experts are spread nothing is plain."""
    found = baselines(space, candidates, bounds.times, _fits(bounds))
    plain = [p for p in candidates if p.pp == p.tp == p.cp == p.ep == 1 and not p.zero]
    return {**found, "data parallel": least(plain, bounds.times, _fits(bounds))}


def _leaner(space: Space, point: Point, known: Collection[Point]) -> Iterator[Point]:
    """Points like ``point`` that take less memory: smaller microbatches, then (with ``tp``) more stages as well."""
    for pp in divisors(point.pp * point.dp):
        dp = point.pp * point.dp // pp
        if pp < point.pp or (pp > point.pp and point.tp == 1) or not space.splits(dp):
            continue
        for size in reversed(space.sizes(dp)):
            leaner = replace(point, pp=pp, dp=dp, microbatch_size=size)
            smaller = size < point.microbatch_size or (pp > point.pp and size <= point.microbatch_size)
            if smaller and (leaner in known or (point.zero and space.allows(leaner))):
                yield leaner


def is_known(standard: Standard, rows: Sequence[Candidate]) -> bool:
    """Whether the search says all of it."""
    if not standard.points:
        return True
    row = None if standard.excluded else _row(standard.points[0], rows)
    return row is not None and row.step_time is not None


def compared(
    found: Sequence[Standard],
    rows: Sequence[Candidate],
    evaluate: Callable[[Point], Evaluated],
    offload: tuple[str, ...] = (),
    unhosted: Mapping[str, Baseline] = _NONE,
) -> tuple[Baseline, ...]:
    """Each of ``found`` with what became of it: as it is without host memory (``unhosted``, by name) if it fits so, its
    row of the search, or planned now if it has none; with ``offload`` in host memory.

    Where it does not fit as its bound says, smaller microbatches and more stages are tried.
    """
    made = []
    for standard in found:
        plain = unhosted.get(standard.name)
        if plain is not None and plain.candidate is not None and plain.candidate.step_time is not None:
            made.append(plain)
            continue
        tried: list[Candidate] = []
        for point in standard.points[:MOST_TRIED]:
            row = None if standard.excluded else _row(point, rows)
            tried.append(row if row is not None and row.status != "bounded" else _planned(point, evaluate))
            if tried[-1].step_time is not None:
                break
        shortest = min(tried, key=lambda c: (c.step_time is None, c.missing or 0), default=None)
        hosted = offload if shortest is not None else ()
        made.append(Baseline(name=standard.name, candidate=shortest, excluded=standard.excluded, offload=hosted))
    return tuple(made)


def no_candidates(found: Sequence[Standard], names: Collection[str]) -> list[Standard]:
    """Those of ``names``, which the constraints exclude."""
    return [replace(standard, excluded=standard.excluded or _EXCLUDED) for standard in found if standard.name in names]


def _planned(point: Point, evaluate: Callable[[Point], Evaluated]) -> Candidate:
    try:
        return candidate(point, evaluate(point))
    except PartitionError as error:
        return refused(point, error)


def unpinned(constraints: Constraints) -> Constraints:
    """Without what fixes the mesh, microbatches, schedule or stages, unless it says what is computed."""
    free: dict[str, Any] = {
        **dict.fromkeys(OF_POINT),
        "microbatch_size": constraints.group_size,
        "data_shares": None,
        "ahead": False,
        "stage_of": {},
    }
    return constraints.model_copy(update=free)


def _points(space: Space) -> list[Point]:
    try:
        return points(space)
    except PartitionError:
        return []


def _fits(bounds: ModelBounds) -> Callable[[Point], bool]:
    @cache
    def fits(point: Point) -> bool:
        try:
            bounds.check_states(point)
            bounds.refine(point)
        except PartitionError:
            return False
        return True

    return fits


def _fully_sharded(space: Space, bounds: ModelBounds) -> Point | None:
    """All ranks data-parallel, with parameters, gradients and optimizer states sharded over them."""
    world = space.world_size
    if space.units % world:
        return None
    return least([Point(1, world, 1, size, zero=3) for size in space.sizes(world)], bounds.times, _fits(bounds))


def _row(point: Point, rows: Sequence[Candidate]) -> Candidate | None:
    own = candidate(point)
    keys = ("mesh", "microbatch_size", "schedule", "zero", "dp_shard", "virtual_stages", "etp")
    return next((r for r in rows if all(getattr(r, k) == getattr(own, k) for k in keys)), None)
