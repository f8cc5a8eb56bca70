"""A script for Ray Train: it trains a small model by ``PartitionedLoop`` on two workers.

    python ray_script.py '{"folder": "out", "constraints": {"tp": 2}, "workers": 2, "steps": 10}'

The argument is a JSON dict; entries other than ``constraints``, ``workers`` and ``config`` are fields of the loop.
``config``: ``train_loop_config``. The last line of the output is a JSON dict: ``metrics``, of the last report, or
``error``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, RATE = 16, 4, 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), label)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


class Rows:
    """Points with classes: a map-style dataset."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)
        self.label = torch.randint(CLASSES, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def main() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from partitioner import Constraints, PartitionedLoop

    given: dict[str, Any] = json.loads(sys.argv[1])
    constraints, workers = Constraints(**given.pop("constraints", {})), given.pop("workers", 2)
    config = given.pop("config", {})
    loop = PartitionedLoop(
        build, Rows, make_optimizer, batch_size=8, schedule=make_schedule, constraints=constraints, **given
    )
    ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=100_000_000)
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=str(os.getpid()), storage_path=str(Path(given["folder"]) / "ray")),
    )
    try:
        found: dict[str, Any] = {"metrics": trainer.fit().metrics}
    except Exception as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
