"""A weight that two stages read, one of them without a gradient: that one adds zeros, however states are shared."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Plan, Topology, partition
from partitioner.plans.reference import run_reference
from partitioner.plans.verify import compare, relative_error
from partitioner.runtime.checkpoint.dcp_files import ShardReader
from partitioner.runtime.checkpoint.shards import ShardPiece
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.memory import memory_steps, state_bytes
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.every_rank import on_every_rank

pytestmark = pytest.mark.usefixtures("without_baselines")

STEPS = 3
NAMES = ("embed.weight", "middle.weight", "middle.bias", "last.weight", "last.bias")


class Tied(nn.Module):
    """``detached``: the loss reads the weight, but not to train it; otherwise what it makes is only looked at."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.embed, self.middle, self.last = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, t: Tensor) -> dict[str, Tensor]:
        x = self.last(torch.tanh(self.middle(self.embed(t))))
        if self.detached:
            return {"loss": nn.functional.cross_entropy(nn.functional.linear(x, self.embed.weight.detach()), t)}
        return {"loss": x.square().mean(), "logits": nn.functional.linear(x, self.embed.weight)}


def tied(detached: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Tied(detached)


def inputs(step: int = 0) -> dict[str, Tensor]:
    return {"t": torch.randint(8, (8,), generator=torch.Generator().manual_seed(step))}


@cache
def planned(zero: int, detached: bool = True, dp: int = 2, **more: Any) -> Plan:
    fixed = dict(pp=2, dp=dp, tp=1, microbatch_size=2, zero=zero, stage_of={"embed": 0, "middle": 0, "last": 1}) | more
    plan = partition(tied(detached), Topology.local(2 * dp), inputs(), constraints=Constraints(**fixed))
    assert plan.program.states["embed.weight"].stages == (0, 1) and plan.program.zero == zero
    return plan


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_equal_to_the_model(zero: int, detached: bool):
    report = planned(zero, detached).verify(tied(detached), inputs())
    assert report.ok, str(report)


@pytest.mark.parametrize("more", [dict(dp=4, dp_shard=2, microbatch_size=1), dict(offload="optimizer")])
@pytest.mark.parametrize("zero", [2, 3])
def test_with_replicas_or_the_optimizer_in_host_memory(zero: int, more: dict[str, Any]):
    report = planned(zero, **more).verify(tied(), inputs())
    assert report.ok, str(report)


@pytest.mark.parametrize("zero", [1, 3])
def test_several_steps_are_those_of_one_process(zero: int, tmp_path: Path):
    """The sum of one step is not in that of the next."""
    program, weights = convert_precision(planned(zero).program, "fp64"), tied().double()

    def work(communicator: Any) -> None:
        engine = Engine(program, weights, communicator=communicator)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step in range(STEPS):
            engine.step(inputs(step))
            optimizer.step()
        engine.save(tmp_path / "out")

    on_every_rank(program, work)
    alone = tied().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        alone(**inputs(step))["loss"].backward()
        optimizer.step()
    reader = ShardReader(tmp_path / "out")
    found = {key: torch.empty(list(t.size), dtype=t.properties.dtype) for key, t in reader.tensors.items()}
    reader.read([ShardPiece(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in found.items()])
    held = dict(alone.named_parameters())
    errors = {n: relative_error(found[f"model.{n}"], held[n].detach()) for n in NAMES}
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("zero", [2, 3])
def test_processes_over_gloo(zero: int):
    run = partitioner.run_local(planned(zero), tied(), inputs(), precision="fp64")
    found = compare(run, run_reference(tied(), inputs()), planned(zero).program)
    assert max(found.values()) < 1e-9, found


def test_what_is_made_for_the_sum_is_counted():
    """After a step there is a piece of every gradient, that of the tied weight among them."""
    program = planned(2).program
    facts = ProgramFacts(program)
    *_, (_, left) = memory_steps(facts, 1, program.stages[1].instructions)
    trained = ("embed.weight", "last.weight", "last.bias")
    assert left - state_bytes(facts, 1) == sum(map(facts.gradient_piece_bytes, trained))


@pytest.mark.parametrize(
    ("op", "words"), [("SCATTER", "to which nothing was added"), ("REDUCE", "no backward of this stage adds to it")]
)
def test_there_is_nothing_to_scatter_or_reduce(op: Any, words: str):
    program = planned(2, dp=4, dp_shard=2, microbatch_size=1).program
    stage = program.stages[1]
    number = next(n for n, b in enumerate(stage.buckets) if "embed.weight" in b.states)
    assert not any(i.bucket == number and i.op in ("SCATTER", "REDUCE") for i in stage.instructions)
    at = next(k for k, i in enumerate(stage.instructions) if i.op == "SYNC")
    listed = [*stage.instructions]
    listed.insert(at, Instruction(op=op, stage=1, bucket=number))
    changed = stage.model_copy(update={"instructions": tuple(listed)})
    with pytest.raises(ProofError, match=words):
        prove(program.model_copy(update={"stages": (program.stages[0], changed)}))
