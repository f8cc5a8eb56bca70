"""Draw a plan as SVG. Each picture is one file that adapts to light and dark viewers and shows details as tooltips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from partitioner.passes.errors import PartitionError

if TYPE_CHECKING:
    from partitioner.plan import Plan


class DrawError(PartitionError):
    """Raised if a kind of picture is requested that does not exist. The kinds are ``graph``, ``timeline``, ``topology``
    and ``memory``.
    """


def draw(plan: Plan, view: str = "graph") -> str:
    """Return a picture of ``plan`` as SVG text. ``view``: the kind of picture, ``graph``, ``timeline``, ``topology`` or
    ``memory``. Raise :class:`DrawError` for other names.
    """
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
