"""What every rank of ``faults.py`` runs: training with a watch and checkpoints, as a user's script does."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults_inject import AT_A_SAVE, Fault, disk_full, inject
from partitioner import Checkpoints, Engine, Watch
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.debug import check_finite
from partitioner.runtime.program.load import load_program

STEPS, EVERY = 8, 2
SLOW_STEPS = 40  # of a run with a slow rank, which has to be seen to change
BATCH, SEQ, VOCAB, WIDTH = 12, 6, 24, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Four blocks with dropout between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Data:
    """Batches drawn one after the other; its state is where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.position)
        self.position += 1
        tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def train(plan: str, weights: str, root: str, watch: str, fault: Fault | None, steps: int = STEPS) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint; the hash of this rank's weights and moments, and the losses."""
    program = load_program(plan)
    communicator = TorchCommunicator(program.world_size, torch.device("cpu"))
    engine = Engine(plan, weights, seed=7, communicator=communicator)
    with Watch(engine, watch, beat_s=0.1, slow_factor=None, leave=False):
        return run(engine, Path(root), Path(watch), fault, steps)


def run(engine: Engine, root: Path, watch: Path, fault: Fault | None, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    data = Data()
    checkpoints = Checkpoints(root, engine, optimizer, behind=False, extra={"data": data})
    resumed = checkpoints.restore() or 0
    mine = fault is not None and fault.rank == engine.communicator.rank
    if fault is not None and mine:
        struck = inject(engine, fault)
        (watch / "struck.json").write_text(json.dumps(asdict(struck)))
    losses = []
    while engine.steps < steps:
        batch = next(data)
        loss = engine.step(batch)
        assert loss is not None
        losses.append(loss.item())
        check_finite(engine, batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        if engine.steps % EVERY == 0:
            if fault is not None and mine and fault.kind in AT_A_SAVE and engine.steps > fault.step:
                disk_full(6 << 10)
            checkpoints.save()
    return {"hash": state_hash(engine, optimizer), "losses": losses, "resumed": resumed, "pid": os.getpid()}


def state_hash(engine: Engine, optimizer: torch.optim.Optimizer) -> str:
    """Hash of all bits that training continues from."""
    digest = hashlib.sha256()
    for name, parameter in engine.named_parameters():
        tensors = [
            parameter.detach(),
            *(v for _, v in sorted(optimizer.state[parameter].items()) if isinstance(v, Tensor)),
        ]
        digest.update(name.encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
