"""What optimizer states on disk cost, and what of them is in memory meanwhile.

    python benchmarks/disk.py --megabytes 1024 --folder /local/nvme

One rank, a model of ``--megabytes`` of float32 weights that is trained in bfloat16 with AdamW: of states and copies
three times that. The same steps with them in host memory and on disk, each in a process of its own. Prints the median
update in seconds, and in MiB by how much what is resident grew at most, and how much of the files was in the page cache
at most while parameters were stepped, and after it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partitioner import Constraints, Engine, Topology, partition
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.state.disk_offload import Disk, trim_allocator

WIDTH = 2048
_MIB = 2**20
_libc = ctypes.CDLL(None)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).sum()


def resident() -> float:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss"))
    return sum(int(line[1]) for line in lines) / 1024


def cached(disk: Disk | None) -> float:
    """What of the files is in memory, mapped or not."""
    pages = 0
    for file in disk._files if disk is not None else ():
        found = (ctypes.c_ubyte * (file.size // mmap.PAGESIZE))()
        _libc.mincore(ctypes.c_void_p(file.start), ctypes.c_size_t(file.size), found)
        pages += sum(page & 1 for page in found)
    return pages * mmap.PAGESIZE / _MIB


def measured(options: argparse.Namespace) -> dict[str, float]:
    with torch.device("meta"):
        model = Layers(max(1, options.megabytes * _MIB // (4 * WIDTH * WIDTH)))
    batch = (torch.randn(8, WIDTH),)
    fixed = Constraints(offload="optimizer")
    program = partition(model, Topology.local(1), batch, precision="bf16", constraints=fixed).program
    if options.where == "disk":
        program = program.model_copy(update={"offload": ("optimizer", "disk")})
    engine = Engine(program, communicator=ThreadWorld(1).communicator(0), offload_folder=options.folder)
    most = {"resident": 0.0, "cached": 0.0}

    class Looking(torch.optim.AdamW):
        look = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.look:
                most["resident"] = max(most["resident"], resident())
                most["cached"] = max(most["cached"], cached(engine._disk))

    batch = (batch[0].bfloat16(),)
    engine.step(batch)
    trim_allocator()
    before = resident()
    optimizer = engine.on_disk(Looking(engine.parameters(), lr=1e-5))
    times = []
    for number in range(options.repeat + 2):
        engine.step(batch)
        optimizer.look = number in (0, options.repeat + 1)  # which takes a while
        start = time.perf_counter()
        optimizer.step()
        times += [] if optimizer.look else [time.perf_counter() - start]
    return {
        "update": round(statistics.median(times), 3),
        "resident": round(most["resident"] - before, 1),
        "cached": round(most["cached"], 1),
        "cached after": round(cached(engine._disk), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512, help="of weights")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out"))
    parser.add_argument("--where", choices=("memory", "disk"), help="measure this one, in this process")
    options = parser.parse_args()
    if options.where is not None:
        print(json.dumps(measured(options)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for where in ("memory", "disk"):
        command = [sys.executable, __file__, *sys.argv[1:], "--where", where]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(json.dumps({"states": where, **json.loads(done.stdout)}))


if __name__ == "__main__":
    main()
