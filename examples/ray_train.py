"""Ray Train starts, places and restarts the workers; each is one rank of a plan that the driver has made.

    pip install "ray[train]"
    python examples/ray_train.py --workers 4 --steps 20
    python examples/ray_train.py --workers 2 --steps 40                     # another plan, on from the last checkpoint
    python examples/ray_train.py --topology cluster.yaml --gpus --folder /shared/run

Ray finds the machines, starts a process for each worker and makes their process group, gathers what they report, and
starts all of them again when one has failed. The engine takes that process group as it is, and does the rest: the
model's layout, its collectives, gradients, clipping, and the checkpoints that a restarted run goes on from. So neither
``prepare_model`` nor ``prepare_data_loader`` is called, and Ray's own checkpoints are not used.

**Ranks.** Ray numbers workers node by node, and on a node in the order of its GPUs; worker ``i`` is process ``i`` and
drives the topology's ``i``-th device. Which node comes first is for Ray to say. So the topology's nodes have to be
alike, and each full: where Ray has put a worker on another node than the plan, all refuse to start. If nodes differ, in
devices or links, start with ``partitioner launch`` instead. ``--folder`` has to be seen by all nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

from partitioner import Constraints, PartitionedLoop, Topology, partition

BATCH, DIM, CLASSES = 32, 64, 8
LEARNING_RATE, CLIP = 3e-3, 1.0


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(DIM) for _ in range(4))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), label)


def build() -> nn.Module:
    """The model, with equal weights in every process."""
    torch.manual_seed(0)
    return Classifier()


class Points:
    """Points in space, and which of some directions each is nearest to: a map-style dataset."""

    def __init__(self, count: int = 2048) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, DIM, generator=generator)
        self.label = (self.x @ torch.randn(DIM, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


class Printed(ray.train.UserCallback):
    """Prints what the first worker has reported; in the process of Ray's controller."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        first = metrics[0]
        print(f"step {first['step']}  loss {first['loss']:.6f}  {first['seconds'] * 1e3:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="all on this machine; see --topology")
    parser.add_argument("--topology", type=Path, help="a description of the cluster: a worker for each of its devices")
    parser.add_argument("--mesh", default="", metavar="NAME=VALUE,...", help="constraints on the plan, pp=2,dp=2")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker, and NCCL")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs that Ray sets aside for each worker")
    parser.add_argument("--steps", type=int, default=20, help="in all, those before the last checkpoint too")
    parser.add_argument("--folder", type=Path, default=Path("out/ray_train"), help="seen by all nodes")
    parser.add_argument("--report-every", type=int, default=5, help="steps between reports to Ray")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a rank that hangs is ended")
    parser.add_argument("--max-failures", type=int, default=3, help="how often Ray starts the workers again")
    parser.add_argument("--precision", choices=["fp64", "fp32", "bf16"], default="fp32")
    options = parser.parse_args()

    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    topology = Topology.load(options.topology) if options.topology else Topology.local(options.workers)
    inputs = {"x": torch.zeros(BATCH, DIM), "label": torch.zeros(BATCH, dtype=torch.long)}
    constraints = Constraints.parse(options.mesh or "")
    plan = partition(build(), topology, inputs, precision=options.precision, constraints=constraints)
    plan.save(folder / "plan.json")
    print(plan.summary(), flush=True)

    trainer = TorchTrainer(
        PartitionedLoop(
            build,
            Points,
            make_optimizer,
            folder,
            batch_size=BATCH,
            steps=options.steps,
            plan=folder / "plan.json",
            max_norm=CLIP,
            report_every=options.report_every,
            save_every=options.save_every,
            patience_s=options.patience,
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=plan.program.world_size,
            use_gpu=options.gpus,
            resources_per_worker={"CPU": options.cpus} | ({"GPU": 1} if options.gpus else {}),
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
            callbacks=[Printed()],
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
