"""What a checkpoint costs: how long training stands still while one is saved, at once and behind it, and loading.

    python benchmarks/checkpoints.py --megabytes 1024 --repeat 5

One rank, a model of ``--megabytes`` of float32 weights with AdamW's moments (three times that on the disk), and steps
of ``--rows``. Behind training, the stall is what ``save`` takes and what the optimizer's step then waits for. The first
save of each kind is not counted: the one behind training makes its buffers then. Prints medians, in seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from partitioner import Engine, Topology, partition
from partitioner.runtime.comm.thread_backend import ThreadWorld

WIDTH = 1024


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512, help="of weights")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoints"))
    options = parser.parse_args()

    model = Layers(max(1, options.megabytes * 2**20 // (4 * WIDTH * WIDTH)))
    batch = (torch.randn(options.rows, WIDTH),)
    plan = partition(model, Topology.local(1), batch)
    engine = Engine(plan.program, model, communicator=ThreadWorld(1).communicator(0))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-5)
    engine.step(batch)
    optimizer.step()

    found: dict[str, list[float]] = {"at once": [], "stall behind training": [], "until written": [], "load": []}
    for number in range(options.repeat + 1):
        for wait in (True, False):
            start = time.perf_counter()
            saving = engine.save(options.folder / "checkpoint", optimizer, wait=wait)
            stall = time.perf_counter() - start
            if not wait:
                engine.step(batch)
                waiting = time.perf_counter()
                saving.wait_until_copied()
                stall += time.perf_counter() - waiting
            saving.wait()
            if number:
                found["at once" if wait else "stall behind training"].append(stall)
                if not wait:
                    found["until written"].append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.load(options.folder / "checkpoint", optimizer)
        found["load"] += [time.perf_counter() - start] if number else []
    size = sum(p.stat().st_size for p in (options.folder / "checkpoint").iterdir())
    shutil.rmtree(options.folder)
    medians = {name: round(statistics.median(times), 4) for name, times in found.items()}
    share = medians["stall behind training"] / medians["at once"]
    print(json.dumps({"bytes": size, **medians, "stall": round(share, 4)}))


if __name__ == "__main__":
    main()
