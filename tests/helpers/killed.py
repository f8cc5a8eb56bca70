"""Training runs that save without end, killed again and again. ``python -m tests.helpers.killed FOLDER TIMES WORLD``

Under torchrun, with FOLDER PHASE SIGNAL: a run that the signal reaches on rank 1 after the third step, while it writes
a checkpoint (``write``), in an evaluation (``evaluate``) or a generation (``generate``); with another phase it goes on
to its end. Prints ``from STEP`` and ``step STEP``. With the phase ``outlast`` nothing is saved before a signal comes
from outside, and the evaluation after the third step goes on for two minutes; prints ``evaluating`` at its start.

The ranks are forked from this process, which has all imported, so that a run costs no more than what it does. Prints,
for each run, the step that it went on from and the step of the checkpoint that its end left, as ``from step``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import partitioner
from partitioner import Checkpoints, Constraints, Engine, Evaluate, Generate, Plan, Topology, partition
from partitioner.runtime.launch.process_pool import preload_imports
from tests.helpers.models import CASES
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

AT, STEPS = 3, 6


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


def make_plan() -> Plan:
    case = CASES["llama"]
    return partition(
        case.build(),
        Topology.local(2),
        case.inputs(4),
        constraints=Constraints(pp=1, tp=2, dp=1),
        programs={"generate": Generate(batch=2, prompt=8, length=24), "eval": Evaluate(inputs=case.inputs(4))},
    )


def train_struck() -> None:
    """A rank under torchrun, which a signal reaches in a chosen phase."""
    folder, phase, number = Path(sys.argv[1]), sys.argv[2], getattr(signal, sys.argv[3], 0)
    partitioner.init_process_group("gloo")
    rank, case, flush, flushed = dist.get_rank(), CASES["llama"], os.fsync, 0
    engine = partitioner.Engine(str(folder / "plan.json"), case.build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    signals = (signal.SIGTERM, signal.SIGINT)
    every = 0 if phase == "outlast" else 1
    checkpoints = partitioner.Checkpoints(folder / "run", engine, optimizer, every=every, behind=False, signals=signals)

    def strike() -> None:
        os.kill(os.getpid(), number)

    def fsync(handle: Any) -> None:
        nonlocal flushed
        flushed += engine.steps == AT
        if flushed == 2:
            strike()
        flush(handle)

    if phase == "write" and rank == 1:
        os.fsync = fsync
    first = checkpoints.restore()
    if rank == 0:
        print(f"from {first}", flush=True)
    with partitioner.Watch(engine, patience_s=20):
        while engine.steps < STEPS and not checkpoints.interrupted:
            engine.step(case.inputs(4))
            optimizer.step()
            checkpoints.after_step()
            if rank == 0:
                print(f"step {engine.steps}", flush=True)
            if phase in ("evaluate", "generate") and rank == 1 and engine.steps == AT:
                threading.Timer(0.02, strike).start()
            if phase == "outlast" and engine.steps == AT:
                print("evaluating", flush=True)
                for _ in range(240):
                    engine.run("eval", case.inputs(4))
                    time.sleep(0.5)
            if phase == "evaluate":
                for _ in range(5):
                    engine.run("eval", case.inputs(4))
            elif phase == "generate":
                engine.generate(torch.full((2, 4), 5), max_new_tokens=16)
        checkpoints.close()


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train_struck()
        return
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
