"""Pictures of a plan as SVG: one file for light and dark viewers, with details under the pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from partitioner.passes.errors import PartitionError

if TYPE_CHECKING:
    from partitioner.plan import Plan


class DrawError(PartitionError):
    """There is no such picture."""


def draw(plan: Plan, view: str = "graph") -> str:
    """The picture ``view`` of ``plan`` as SVG text. Raises :class:`DrawError` for a view that does not exist."""
    if view not in VIEWS:
        raise DrawError(f"there is no view {view!r}; expected one of {', '.join(VIEWS)}")
    return VIEWS[view](plan)


def _draw_graph(plan: Plan) -> str:
    from partitioner.draw.graph import draw_graph

    return draw_graph(plan)


def _draw_timeline(plan: Plan) -> str:
    from partitioner.draw.timeline import draw_plan_timeline

    return draw_plan_timeline(plan)


def _draw_topology(plan: Plan) -> str:
    from partitioner.draw.topology import draw_plan_topology

    return draw_plan_topology(plan)


def _draw_memory(plan: Plan) -> str:
    from partitioner.draw.memory import draw_plan_memory

    return draw_plan_memory(plan)


VIEWS: dict[str, Callable[[Plan], str]] = {
    "graph": _draw_graph,
    "timeline": _draw_timeline,
    "topology": _draw_topology,
    "memory": _draw_memory,
}
