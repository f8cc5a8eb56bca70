"""Runs of the small net of ``runtime_programs`` under torchrun, with restarts or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from partitioner.runtime.program.program import Program
from tests.helpers.paths import ROOT


def plan_file(folder: Path, program: Program) -> Path:
    """What the runtime reads of a plan's file."""
    path = folder / "plan.json"
    path.write_text(json.dumps({"program": json.loads(program.model_dump_json(exclude_defaults=True))}))
    return path


def torchrun(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "partitioner.runtime", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=ROOT,
    )


def supervised(
    *arguments: str, launcher: str = "partitioner.runtime.launch.torchrun"
) -> subprocess.CompletedProcess[str]:
    """The result of two ranks under a launcher whose last line is the cause of a failure."""
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import partitioner
from tests.helpers.runtime_programs import Net, net_inputs

partitioner.init_process_group("gloo")
engine = partitioner.Engine(sys.argv[1] + "/plan.json", weights=Net().state_dict())
optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with partitioner.Watch(engine, patience_s=8):
    checkpoints = partitioner.Checkpoints(sys.argv[1] + "/checkpoints", engine, optimizer, every=2, behind=False)
    done = checkpoints.restore()
    if dist.get_rank() == 1 and attempt == int(sys.argv[2]) - 1:
        places = [k for k, (i, _) in enumerate(engine._executor.actions) if i < len(engine.rank_program.instructions)]
        place = next(k for k in places if engine.rank_program.instructions[engine._executor.actions[k][0]].op == "B")
        index, action = engine._executor.actions[place]

        def strike():
            if engine.steps == 3:
                os.kill(os.getpid(), getattr(signal, sys.argv[3]))
            action()

        engine._executor.actions[place] = index, strike
    while engine.steps < 5:
        loss = engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()
    if dist.get_rank() == 0:
        print("resumed at", done, "loss", loss.item(), flush=True)
    engine.barrier()
os._exit(0)
"""
