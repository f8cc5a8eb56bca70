"""Draw the pictures of the README and of the page on reports: ``python docs/images/draw.py``. The picture of a report
needs Chromium; without it, the one that there is stays.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.hf_llama import example
from partitioner import Constraints, Topology, partition
from tests.helpers.browser import CHROMIUM, open_browser

HERE = Path(__file__).resolve().parent


def main() -> None:
    model, inputs = example()
    constraints = Constraints(pp=2, tp=2, microbatch_size=1, schedule="1f1b")
    plan = partition(model, Topology.local(4), inputs, constraints=constraints)
    plan.to_svg(HERE / "plan.svg")
    plan.to_svg(HERE / "timeline.svg", view="timeline")
    plan.to_svg(HERE / "memory.svg", view="memory")
    if CHROMIUM is not None:
        with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as page:
            page.show(plan.to_html(Path(folder) / "plan.html"), 1100, 820)
            page.evaluate("document.getElementById('graph').scrollIntoView({behavior: 'instant'})")
            page.save_screenshot(HERE / "report.png")


if __name__ == "__main__":
    main()
