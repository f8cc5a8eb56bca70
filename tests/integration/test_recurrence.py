"""Buffers that forward changes, where samples meet in groups alone: changed group after group, on whichever rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Engine, Plan, Topology, partition
from partitioner.passes.errors import UnsupportedError
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.every_rank import on_every_rank
from tests.helpers.mutations import with_stage

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH, SAMPLES, SIZE = 8, 16, 4


class Layer(nn.Module):
    """Batch norm; and beside it an average, a counter, the last values, and a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        for name in ("average", "last"):
            self.register_buffer(name, torch.randn(WIDTH))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("marked", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x)).relu()
        with torch.no_grad():
            self.average = torch.lerp(self.average, x.mean(0), 0.25)
            self.last.copy_(x[-1])
            self.count += x.shape[0]
            self.marked.fill_(True)
        return x


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([Layer() for _ in range(depth)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x).square().mean()


def stack() -> tuple[Stack, tuple[Tensor]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(SAMPLES, WIDTH),)


def plan_of(model: nn.Module, inputs: Any, **constraints: Any) -> Plan:
    chosen = Constraints(**{"couple": "microbatch", "microbatch_size": SIZE, "pp": 1, "dp": 1, "tp": 1} | constraints)
    return partition(model, Topology.local(chosen.pp * chosen.dp * chosen.tp), inputs, constraints=chosen)


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "dp": 2},
        {"tp": 2, "dp": 2},
        {"pp": 2, "recompute": "full"},
        {"dp": 2, "microbatch_size": 2},
        {"microbatch_size": SAMPLES},
    ],
    ids=str,
)
def test_the_last_group_leaves_what_it_leaves_in_one_process(mesh: dict[str, Any]):
    model, inputs = stack()
    verification = plan_of(model, inputs, **mesh).verify(model, inputs)
    assert verification.ok, verification
    assert len([name for name in verification.errors if name.startswith("buffer")]) == 2 * 7


def test_steps_go_on_from_the_buffers_of_the_last():
    model, inputs = stack()
    plan = plan_of(model, inputs, dp=2)
    alone = copy.deepcopy(model)
    for group in [*inputs[0].split(SIZE)] * 2:
        alone(group)

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(plan, model, communicator=communicator)
        for _ in range(2):
            engine.step(inputs)
        return engine.state_dict(full=True)

    found = on_every_rank(plan.program, work)[0]
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(found[name], buffer, msg=lambda m, n=name: f"{n}: {m}")


class Changing(nn.Module):
    """``change``: what forward leaves in its buffer, and a factor that it computes with."""

    def __init__(self, change: Any, start: Tensor) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("kept", start)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        left, factor = self.change(self.kept, x.detach())
        self.kept.copy_(left)
        return (x * factor).square().mean()


REFUSED = {
    "read": (lambda old, x: (0.9 * old + x.mean(0), old), torch.ones(WIDTH), r"also reads it for .* \(.*\.py:\d+\)"),
    "square": (
        lambda old, x: (old * old + x.mean(0), 1.0),
        torch.ones(WIDTH),
        r"new value \(.*\) is not a constant times",
    ),
    "largest": (lambda old, x: (old.maximum(x.amax(0)), 1.0), torch.ones(WIDTH), "is not a constant times"),
    "by element": (lambda old, x: (old * x.mean(0), 1.0), torch.ones(WIDTH), "is not a constant times"),
    "mixed": (lambda old, x: (old.flip(0) + x.mean(0), 1.0), torch.ones(WIDTH), "is not a constant times"),
    "truth": (lambda old, x: (x.mean() > 0, 1.0), torch.tensor(False), r"of type torch.bool cannot be added up"),
    "whole": (lambda old, x: (2 * old + 1, 1.0), torch.tensor(1), r"of type torch.int64 cannot be added up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_added_up_is_refused(name: str):
    change, start, said = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"(?s)the buffer 'kept'.*{said}.*couple='batch'"):
        plan_of(Changing(change, start), (torch.randn(SAMPLES, WIDTH),), dp=2)


KEPT = {
    "other way round": (lambda old, x: (x.mean(0) - 0.5 * old, 1.0), torch.ones(WIDTH)),
    "twice": (lambda old, x: ((old + 0.1 * (x.mean(0) - old)) / 2, 1.0), torch.ones(WIDTH)),
    "nothing of it": (lambda old, x: (old * 0 + x.mean(0), 1.0), torch.ones(WIDTH)),
    "counts": (lambda old, x: (old - (x > 0).sum(), 1.0), torch.tensor(5)),
    "itself": (lambda old, x: (old, x.mean()), torch.ones(WIDTH)),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_ways_to_write_it_are_kept(name: str):
    model, inputs = Changing(*KEPT[name]), (torch.randn(SAMPLES, WIDTH),)
    verification = plan_of(model, inputs, dp=2).verify(model, inputs)
    assert verification.ok, verification


def test_a_sum_that_lacks_a_microbatch_is_refused():
    model, inputs = stack()
    program = plan_of(model, inputs, dp=2).program
    code = list(program.stages[0].instructions)
    update = next(i for i in code if i.op == "UPDATE")
    first = next(k for k, i in enumerate(code) if i.op == "F" and i.microbatch == 0)
    moved = [*code[: first + 1], update, *(i for i in code[first + 1 :] if i is not update)]
    with pytest.raises(ProofError, match=r"updates .* with a sum to which microbatch 1 has not added yet"):
        prove(with_stage(program, 0, instructions=tuple(moved)))
