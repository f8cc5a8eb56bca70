"""Layered layout of boxes by Graphviz: DOT in, positions out. What is drawn there is the caller's.

Boxes come with their sizes and carry no text, so that the result is the same whatever fonts a machine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_POINTS = 72.0  # Graphviz takes sizes in inches and gives positions in points; here a point is a pixel

Point = tuple[float, float]


@dataclass(frozen=True)
class Placed:
    """Corners of the boxes (top left) and Bézier control points of the edges, y downwards, within width by height."""

    boxes: dict[str, Point]
    edges: dict[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]]) -> Placed:
    """Place boxes of ``sizes`` (width, height) top to bottom along ``edges``."""
    if not sizes:
        return Placed({}, {}, 0.0, 0.0)
    import pygraphviz  # where something is drawn: texts take what notes pictures have from beside it

    drawing = pygraphviz.AGraph(string=dot_source(sizes, edges))
    drawing.layout(prog="dot")
    left, bottom, right, top = (float(v) for v in drawing.graph_attr["bb"].split(","))
    boxes, curves = {}, {}
    for name, (width, height) in sizes.items():
        x, y = _point(drawing.get_node(name).attr["pos"])
        boxes[name] = (x - left - width / 2, top - y - height / 2)
    for source, target in edges:
        position = drawing.get_edge(source, target).attr["pos"]
        points = position.split()
        end = next((_point(p[2:]) for p in points if p.startswith("e,")), None)
        curve = [_point(p) for p in points if p[0] not in "es"] + ([end] if end else [])
        curves[source, target] = tuple((x - left, top - y) for x, y in curve)
    return Placed(boxes, curves, right - left, top - bottom)


def dot_source(sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]]) -> str:
    """The graph as DOT text."""
    import graphviz

    graph = graphviz.Digraph(
        graph_attr={"rankdir": "TB", "nodesep": "0.22", "ranksep": "0.32"},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
    )
    for name, (width, height) in sizes.items():
        graph.node(name, width=f"{width / _POINTS:.4f}", height=f"{height / _POINTS:.4f}")
    for source, target in edges:
        graph.edge(source, target)
    return str(graph.source)


def _point(text: str) -> Point:
    x, y = text.split(",")[:2]
    return float(x), float(y)
