"""What a rank of several virtual stages makes again, where it is known which calls each of them has.

Calls are made again one after the other, those first that free most bytes for each second, until what the virtual
stages hold together fits: the same call frees the more, the more microbatches its virtual stage has on their way.
Or what is quickly made is, of one virtual stage after the other, and then whole calls besides. The quickest way is
taken, for each rank by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from partitioner.solve.stages import StagePlan, stage_plan
from partitioner.solve.tables import StageTables

Taken = Callable[[Sequence[StagePlan]], float]


def fitted(tables: StageTables, plans: Sequence[StagePlan], taken: Taken, capacity: float) -> list[StagePlan] | None:
    """A rank's virtual stages, cut as ``plans`` are, that take no more than ``capacity`` bytes together by what
    ``taken`` says; ``None`` where too much is left, whatever is made again."""
    every = _by_calls(tables, plans), _in_part(tables, plans), _by_calls(tables, plans, in_part=True)
    found = [ways for ways in map(list, every) if ways]
    fits = [best for ways in found if (best := _shortest(ways, taken, capacity)) is not None]
    return min(fits, key=lambda plans: sum(plan.time_s for plan in plans), default=None)


def _shortest(ways: Sequence[list[StagePlan]], taken: Taken, capacity: float) -> list[StagePlan] | None:
    """The first of ``ways``, each of which makes more again than the one before it, that fits."""
    low, high = 0, len(ways) - 1
    if taken(ways[high]) > capacity:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(ways[middle]) <= capacity else (middle + 1, high)
    return ways[high]


def _by_calls(tables: StageTables, plans: Sequence[StagePlan], *, in_part: bool = False) -> Iterator[list[StagePlan]]:
    """``plans`` with no call made again whole, then with one more each time, the others all ``in_part`` or not at all;
    none where there is no choice."""
    most = [int(tables.most_recomputed[plan.start, plan.stop]) for plan in plans]
    if tables.problem.recompute == "full" or not any(most) or (in_part and tables.slim is None):
        return
    problem = tables.slim.problem if in_part and tables.slim is not None else tables.problem

    def worth(chunk: int, place: int) -> tuple[float, int, int]:
        cost, stage = problem.calls[place].cost, plans[chunk].number
        of_stage = problem.pace(stage).costs[place]
        seconds = of_stage.forward_total_s - of_stage.remade_s
        return -problem.not_begun(stage) * cost.saved_bytes / max(seconds, 1e-15), chunk, place

    now = [stage_plan(tables, plan.number, plan.start, plan.stop, 0, in_part=in_part) for plan in plans]
    yield list(now)
    heap = [worth(chunk, plan.start) for chunk, plan in enumerate(plans) if most[chunk]]
    heapq.heapify(heap)
    while heap:
        _, chunk, place = heapq.heappop(heap)
        plan, count = plans[chunk], place + 1 - plans[chunk].start
        now[chunk] = stage_plan(tables, plan.number, plan.start, plan.stop, count, in_part=in_part)
        yield list(now)
        if count < most[chunk]:
            heapq.heappush(heap, worth(chunk, place + 1))


def _in_part(tables: StageTables, plans: Sequence[StagePlan]) -> Iterator[list[StagePlan]]:
    """``plans`` with nothing made again, then with one more made again in part each time, the longest kept first; none
    where there is no choice."""
    if tables.slim is None or tables.problem.recompute == "selective":
        return
    now = [stage_plan(tables, plan.number, plan.start, plan.stop, 0) for plan in plans]
    yield list(now)
    order = sorted(range(len(plans)), key=lambda chunk: -tables.problem.not_begun(plans[chunk].number))
    for chunk in order:
        plan = plans[chunk]
        now[chunk] = stage_plan(tables, plan.number, plan.start, plan.stop, 0, in_part=True)
        yield list(now)
