"""Draw the pictures of the README: ``python docs/images/draw.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.hf_llama import example
from partitioner import Constraints, Topology, partition

HERE = Path(__file__).resolve().parent


def main() -> None:
    model, inputs = example()
    constraints = Constraints(pp=2, tp=2, microbatch_size=1, schedule="1f1b")
    plan = partition(model, Topology.local(4), inputs, constraints=constraints)
    plan.to_svg(HERE / "plan.svg")
    plan.to_svg(HERE / "timeline.svg", view="timeline")
    plan.to_svg(HERE / "memory.svg", view="memory")


if __name__ == "__main__":
    main()
