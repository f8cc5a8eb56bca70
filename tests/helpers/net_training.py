"""Training of the small net of ``runtime_programs`` and of other models: steps, checkpoints, a script's position in its
data, and the same training under another execution."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner import Checkpoints, Engine, Program
from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.comm.torch_backend import TorchCommunicator
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


# --- the same training under another execution ---

STEPS = 6
EVALUATION = "eval"


@dataclass
class Trained:
    """What a rank has after training: losses of steps and evaluations, its shards of weights, and how steps ran."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    replays: int = 0
    eager_calls: int = 0
    text: str = ""


def another_batch(batch: Any, step: int) -> Any:
    """A batch of the same shapes: floats are noise of their own in each step, integers are rotated."""
    generator = torch.Generator().manual_seed(step)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x.roll(step, 0) if x.dim() else x

    return pytree.tree_map(change, batch)


def train_executed(
    plan: Any,
    weights: nn.Module | dict[str, Tensor] | str,
    batch: Any,
    execution: str,
    communicator: Communicator | None = None,
    evaluates: bool = False,
) -> Trained:
    """Train ``STEPS`` steps; every other step accumulates a second batch. ``evaluates``: the plan has an evaluation,
    which runs after each step."""
    engine = Engine(plan, weights, execution=execution, communicator=communicator, keep_outputs=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    found, losses = Trained(), []
    for step in range(STEPS):
        losses.append(engine.step(another_batch(batch, step)))
        if step % 2:
            losses.append(engine.step(another_batch(batch, step + STEPS), accumulate=True, weight=0.5))
        found.outputs += [x for parts in engine.outputs.values() for x in parts.values()]
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        if evaluates:
            loss = engine.run(EVALUATION, another_batch(batch, 2 * STEPS + step))
            found.evaluations.append(float(loss))  # type: ignore[arg-type]
    found.losses = [float(x) for x in losses if x is not None]  # read at the end: they keep their values
    found.weights = {n: t.detach().clone() for n, t in engine.state_dict().items()}
    reports = engine.execution_report
    found.states = {name: report.state for name, report in reports.items()}
    if "" in reports:
        report = reports[""]
        found.replays, found.eager_calls, found.text = report.replays, len(report.eager_calls), str(report)
    return found


def train_process(program: str, weights: str, batch: str, execution: str) -> Trained:
    """What a process over Gloo runs. ``program``, ``weights``, ``batch``: paths of files."""
    read = Program.model_validate_json(Path(program).read_text())
    communicator = TorchCommunicator(dist.get_world_size(), torch.device("cpu"))
    return train_executed(read, weights, torch.load(batch, weights_only=True), execution, communicator)


def check_equal(got: list[Trained], expected: list[Trained]) -> None:
    """Both have the same numbers, bit for bit, on all ranks."""
    for here, there in zip(got, expected, strict=True):
        assert here.losses == there.losses
        assert here.evaluations == there.evaluations
        assert here.weights.keys() == there.weights.keys()
        for name, weight in here.weights.items():
            assert torch.equal(weight, there.weights[name]), name
        assert len(here.outputs) == len(there.outputs)
        for one, other in zip(here.outputs, there.outputs, strict=True):
            assert torch.equal(one, other)
