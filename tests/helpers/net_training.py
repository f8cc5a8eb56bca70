"""Training of the small net of ``runtime_programs``: steps, checkpoints, and the position of a script in its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from partitioner import Checkpoints, Engine
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


def one_rank(folder: Path, **options: Any) -> tuple[Engine, torch.optim.Optimizer, Checkpoints]:
    engine = Engine(program_of_net(), Net())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    return engine, optimizer, Checkpoints(folder, engine, optimizer, **options)


def run(engine: Engine, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints, steps: int) -> None:
    for _ in range(steps):
        engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()


class Loader:
    """Where in its data a training script is."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def train(engine: Engine, steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(engine.parameters(), lr=0.01)
    for _ in range(steps):
        engine.step(net_inputs())
        optimizer.step()
    return optimizer
