"""What a watch costs a step without a fault: processor seconds with and without one, in turns.

    python benchmarks/watch_overhead.py --json

One rank, so that nothing waits; a small step (hundreds of actions of microseconds) is the worst case. The last line is
one JSON object: the median of the ratios of neighbouring blocks, and microseconds per action.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.faults_worker import Data, Model
from partitioner import Constraints, Engine, Topology, Watch, partition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = next(Data())
    given = Constraints(pp=1, dp=1, tp=1, microbatch_size=1)
    engine = Engine(partition(Model(), Topology.local(1), batch, constraints=given))

    def block() -> float:
        start = time.process_time()
        for _ in range(options.steps):
            engine.step(batch)
        return (time.process_time() - start) / options.steps

    block()
    plain, watched = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            plain.append(block())
            with Watch(engine, Path(folder, str(turn)), leave=False):
                watched.append(block())
    ratio = statistics.median(w / p for w, p in zip(watched, plain, strict=True))
    actions = len(engine._executor.actions)
    extra = statistics.median(w - p for w, p in zip(watched, plain, strict=True))
    found = {
        "ratio": round(ratio, 4),
        "step_ms": round(statistics.median(plain) * 1e3, 3),
        "actions": actions,
        "us_per_action": round(extra / actions * 1e6, 3),
    }
    if not options.json:
        print(f"a step of {found['step_ms']} ms and {actions} actions takes {ratio:.4f} times as long when watched")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
