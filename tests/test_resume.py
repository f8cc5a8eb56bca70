"""A run that was cut short goes on where it was: weights, optimizer, data, random states, from the newest whole one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime import Engine, WeightsError
from runtime.resume import complete
from tests.runtime_programs import Net, net_inputs, program_of_net
from tests.test_runtime_execute import in_threads


class Counter:
    """Data that knows where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __next__(self) -> dict[str, Tensor]:
        self.position += 1
        return {k: v * (1 + self.position / 10) if k == "x" else v for k, v in net_inputs().items()}


def train(engine: Engine, root: Path, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = Counter()
    engine.resume(root, optimizer, schedule=schedule, data=data)
    losses = []
    while engine.steps < steps:
        losses.append(engine.step(next(data)).item())
        optimizer.step()
        schedule.step()
        if engine.steps % 2 == 0:
            engine.checkpoint(root, optimizer, schedule=schedule, data=data)
    return losses


@pytest.mark.parametrize("shape", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_resumed_run_equals_one_that_was_not_cut_short(tmp_path: Path, shape: dict[str, int]):
    program = program_of_net(**shape)
    whole = in_threads(program, lambda engine: train(engine, tmp_path / "whole", 6))[0]
    first = in_threads(program, lambda engine: train(engine, tmp_path / "parts", 5))[0]  # the fifth is lost
    second = in_threads(program, lambda engine: train(engine, tmp_path / "parts", 6))[0]
    assert first == whole[:5]
    assert second == whole[4:]


def test_without_a_checkpoint_it_starts_at_the_beginning(tmp_path: Path):
    assert Engine(program_of_net(), Net()).resume(tmp_path / "nothing") == 0


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path):
    engine = Engine(program_of_net(), Net())
    for _ in range(3):
        engine.step(net_inputs())
        engine.checkpoint(tmp_path)
    assert [p.name for p in complete(tmp_path)] == ["step-00000003", "step-00000002", "step-00000001"]
    file = next((tmp_path / "step-00000003").glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    (tmp_path / "step-00000002" / "training.json").unlink()
    assert [p.name for p in complete(tmp_path)] == ["step-00000001"]
    assert Engine(program_of_net(), Net()).resume(tmp_path) == 1


def test_random_generators_go_on(tmp_path: Path):
    def draws() -> list[float]:
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    engine = Engine(program_of_net(), Net())
    engine.checkpoint(tmp_path)
    expected = draws()
    Engine(program_of_net(), Net()).resume(tmp_path)
    assert draws() == expected


def test_another_plan_may_go_on(tmp_path: Path):
    whole = in_threads(program_of_net(pp=2), lambda engine: train(engine, tmp_path, 4))[0]
    losses = in_threads(program_of_net(), lambda engine: train(engine, tmp_path, 6))[0]
    assert len(whole) == 4
    assert len(losses) == 2


def test_what_was_not_saved_is_missed(tmp_path: Path):
    Engine(program_of_net(), Net()).checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="no state of data"):
        Engine(program_of_net(), Net()).resume(tmp_path, data=Counter())


def test_a_full_disk_leaves_the_last_good_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(program_of_net(), Net())
    engine.step(net_inputs())
    engine.checkpoint(tmp_path)

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.checkpoint.save_file", full)
    engine.step(net_inputs())
    with pytest.raises(OSError, match="No space left"):
        engine.checkpoint(tmp_path)
    assert [p.name for p in complete(tmp_path)] == ["step-00000001"]
    assert Engine(program_of_net(), Net()).resume(tmp_path) == 1
