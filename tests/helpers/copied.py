"""Attempts of one training run that copies its state into memory. ``python -m tests.helpers.copied ATTEMPTS.json``

Ranks are forked from this process, which has all imported. An attempt ends well, or with one rank killed by SIGKILL at
a named moment and the others following it. Prints a line of JSON for each: the step that each rank went on from.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partitioner import Checkpoints, Engine
from partitioner.runtime.checkpoint.memory_copies import SlotState
from partitioner.runtime.checkpoint.ranks import Peers
from partitioner.runtime.checkpoint.run_state import list_rank_tensors
from partitioner.runtime.launch.process_pool import preload_imports
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

PATIENCE_S = 60.0


class Data:
    """Batches by place, with noise of torch's own generator: what a run has to go on with."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def batch(self) -> dict[str, torch.Tensor]:
        self.place += 1
        inputs = net_inputs()
        return inputs | {"x": inputs["x"] + self.place + torch.randn(inputs["x"].shape)}


def strike() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(engine: Engine, where: str, step: int) -> None:
    """Let this rank be killed at ``where``, when ``engine`` has done ``step`` steps."""
    write, receive = SlotState.write, Peers.receive

    def half(content: torch.Tensor) -> None:
        if engine.steps == step:
            content[: len(content) // 2].fill_(7)
            strike()

    if where == "write":
        SlotState.write = lambda self, to: half(to) or write(self, to)  # type: ignore[assignment]
    elif where == "receive":
        Peers.receive = lambda self, content, source: half(content) or receive(self, content, source)  # type: ignore


def rank(attempt: dict[str, Any], store: Path, number: int, told: int) -> None:
    world = len(attempt["memory"])
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=number, world_size=world)
    torch.manual_seed(5)
    engine = Engine(program_of_net(**attempt["plan"]), Net())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    data = Data()
    checkpoints = Checkpoints(
        attempt["checkpoints"],
        engine,
        optimizer,
        every=attempt.get("every", 0),
        behind=False,
        extra={"data": data},
        copies_every=attempt.get("copies_every", 1),
        copies_in=attempt["memory"][number],
    )
    os.write(told, f"{number} {checkpoints.restore()}\n".encode())
    killed, step, where = attempt.get("kill") or (-1, -1, "")
    if killed == number:
        arm(engine, where, step)
    while engine.steps < attempt["steps"]:
        batch = data.batch()
        if where == "step" and engine.steps == step:
            if checkpoints.copies is not None:
                checkpoints.copies.wait()
            if killed == number:
                strike()
        engine.step(batch)
        optimizer.step()
        checkpoints.after_step()
    if "out" in attempt:
        whole = list_rank_tensors(engine, optimizer) | {"place": torch.tensor(data.place), "next": torch.randn(4)}
        torch.save({n: t.clone() for n, t in whole.items()}, f"{attempt['out']}-{number}.pt")
        checkpoints.close()
    engine.barrier()


def run(attempt: dict[str, Any], store: Path) -> dict[str, Any]:
    for lost in attempt.get("lost", []):
        shutil.rmtree(lost)
        Path(lost).mkdir()
    reader, writer = os.pipe()
    pids = []
    for number in range(len(attempt["memory"])):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                rank(attempt, store, number, writer)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    os.close(writer)
    statuses = [ended(pid) for pid in pids]
    with os.fdopen(reader) as lines:
        steps = dict(line.split() for line in lines)
    return {"from": [json.loads(steps[str(n)].replace("None", "null")) for n in range(len(pids))], "ended": statuses}


def ended(pid: int) -> int:
    """The exit status of a process, which is killed where it does not end."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1000


def main() -> None:
    path = Path(sys.argv[1])
    preload_imports()
    torch.set_num_threads(1)
    for number, attempt in enumerate(json.loads(path.read_text())):
        print(json.dumps(run(attempt, path.with_name(f"store-{number}"))), flush=True)


if __name__ == "__main__":
    main()
