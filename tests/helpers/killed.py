"""Training runs that save without end, killed again and again. ``python -m tests.helpers.killed FOLDER TIMES WORLD``

The ranks are forked from this process, which has all imported, so that a run costs no more than what it does. Prints,
for each run, the step that it went on from and the step of the checkpoint that its end left, as ``from step``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from partitioner import Checkpoints, Engine
from partitioner.runtime.launch.process_pool import preload_imports
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


def rank(folder: Path, store: Path, number: int, world: int, started: int) -> None:
    """Go on from the last checkpoint, and save after every step."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=number, world_size=world)
    engine = Engine(program_of_net(tp=world), Net())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder, engine, optimizer, every=1, keep_last=2)
    checkpoints.restore()
    if number == 0:
        os.write(started, str(engine.steps).encode())
    while True:
        engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()


def killed(folder: Path, store: Path, world: int, seconds: float) -> int:
    """A run whose ranks are all killed, so long after its first save; the step that it went on from."""
    reader, writer = os.pipe()
    pids = []
    for number in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                rank(folder, store, number, world, writer)
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(writer)
    first = int(os.read(reader, 32) or -1)
    os.close(reader)
    before = latest(folder)
    while first >= 0 and latest(folder) == before and os.waitpid(-1, os.WNOHANG)[0] == 0:
        time.sleep(0.002)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return first


def latest(folder: Path) -> str:
    return (folder / "latest").read_text() if (folder / "latest").exists() else ""


def main() -> None:
    folder, times, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    preload_imports()
    generator = random.Random(times)
    for number in range(times):
        first = killed(folder, folder.with_name(f"store-{number}"), world, generator.uniform(0.0, 0.2))
        engine = Engine(program_of_net(), Net())
        checkpoints = Checkpoints(folder, engine, torch.optim.AdamW(engine.parameters()))
        print(first, checkpoints.restore(), latest(folder), len([*folder.glob(".*.partial")]), flush=True)


if __name__ == "__main__":
    main()
