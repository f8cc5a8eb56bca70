"""What a copy of the state in memory costs beside a checkpoint on the disk: how long training stands still for each.

    python benchmarks/copies.py --megabytes 256 --repeat 7 --folder /tmp/run

Two processes over Gloo, dp=2, each on a node of its own as far as copies go: each has ``--megabytes`` of float32
weights with AdamW's moments, three times that in a copy. The stall of a copy is what ``save`` takes; ``until complete``
also has the sending to the other node. ``load`` and ``restore`` go on from the disk and from the copy. The first of
each kind is not counted. Prints medians, in seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.checkpoints import WIDTH, Layers
from partitioner import Checkpoints, Constraints, Engine, Topology, partition

WORLD = 2


def rank(number: int, store: str, memory: list[str], options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=number, world_size=WORLD)
    model = Layers(max(1, options.megabytes * 2**20 // (4 * WIDTH * WIDTH)))
    batch = (torch.randn(options.rows, WIDTH),)
    plan = partition(model, Topology.local(WORLD), batch, constraints=Constraints(dp=WORLD, tp=1, pp=1, zero=0))
    engine = Engine(plan.program, model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-5)
    checkpoints = Checkpoints(options.folder, engine, optimizer, behind=False, copies_every=1, copies_in=memory[number])
    copies = checkpoints.copies
    assert copies is not None
    names = ("step", "copy", "until complete", "checkpoint", "load", "restore")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeat + 1):
        engine.barrier()
        start = time.perf_counter()
        engine.step(batch)
        optimizer.step()
        engine.barrier()
        found["step"].append(time.perf_counter() - start)
        start = time.perf_counter()
        copies.save(optimizer, {})
        found["copy"].append(time.perf_counter() - start)
        copies.wait()
        found["until complete"].append(time.perf_counter() - start)
        start = time.perf_counter()
        checkpoints.save()
        found["checkpoint"].append(time.perf_counter() - start)
    size = copies.nbytes // 4  # two copies of two ranks
    for _ in range(options.repeat + 1):
        engine.barrier()
        start = time.perf_counter()
        engine.load(options.folder, optimizer)
        found["load"].append(time.perf_counter() - start)
        start = time.perf_counter()
        assert copies.restore(optimizer, {}) == engine.steps
        found["restore"].append(time.perf_counter() - start)
    medians = {name: round(statistics.median(times[1:]), 4) for name, times in found.items()}
    results.put({"bytes of a rank": size, **medians})
    engine.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="of weights")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("out/copies"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.folder = Path(tempfile.mkdtemp(dir=options.folder))
    memory = [tempfile.mkdtemp(dir="/dev/shm") for _ in range(WORLD)]
    try:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank, (tempfile.mktemp(), memory, options, results), nprocs=WORLD)
        print(json.dumps(results.get()))
    finally:
        for folder in (*memory, options.folder):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
