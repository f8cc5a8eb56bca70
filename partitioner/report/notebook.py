"""The HTML that a notebook displays for a plan."""

from __future__ import annotations

import base64

from partitioner.draw import draw
from partitioner.passes.errors import PartitionError
from partitioner.plan import Plan
from partitioner.plans.figures import key_figures, picture_title
from partitioner.units import bytes_text, format_html_figures

MOST_PICTURE_BYTES = 400_000  # a notebook stores the picture in its file


def format_plan_html(plan: Plan) -> str:
    """Return what a notebook displays for ``plan`` as HTML text: its main numbers, such as the step time, and the
    picture of its graph. The picture is embedded as an image, so that its style sheet does not change the notebook's
    page.
    """
    return format_html_figures(picture_title(plan), key_figures(plan), _format_graph(plan))


def _format_graph(plan: Plan) -> str:
    """Return the picture of the graph of ``plan`` as an HTML image. Return a paragraph that says how to write the
    picture to a file if it is longer than 400,000 bytes, and an empty text if the plan has no program (instructions of
    its ranks) to draw."""
    try:
        picture = draw(plan, "graph").encode(errors="replace")
    except PartitionError:  # a plan without a program
        return ""
    if len(picture) > MOST_PICTURE_BYTES:
        return f"<p>The graph takes {bytes_text(len(picture))}: plan.to_svg(&quot;graph.svg&quot;) writes it.</p>"
    source = base64.b64encode(picture).decode()
    return f'<img alt="graph of the plan" style="max-width:100%" src="data:image/svg+xml;base64,{source}">'
