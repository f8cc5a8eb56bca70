"""A rank of a training run that saves without end: to be killed. ``python -m tests.killed FOLDER RANK WORLD PORT``"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from runtime import Checkpoints, Engine
from tests.runtime_programs import Net, net_inputs, program_of_net


def main() -> None:
    folder, rank, world, store = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    engine = Engine(program_of_net(tp=world), Net())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder, engine, optimizer, every=1, keep_last=2)
    checkpoints.restore()
    print("ready", engine.steps, flush=True)
    while True:
        engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()


if __name__ == "__main__":
    main()
