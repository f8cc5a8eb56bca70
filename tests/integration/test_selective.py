"""Selective recomputation: attention scores are made again in backward, and everything else stays what it was."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition, run_local
from partitioner.cost.call.recomputation import find_recomputed_nodes
from partitioner.cost.call.saved_activations import kept_by
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.serialize import block_from_data
from partitioner.plans.verify import relative_error
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.memory import peak_bytes
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.eager_attention import HEADS, LENGTH, WIDTH, inputs, model
from tests.helpers.small_clusters import cluster

pytestmark = pytest.mark.usefixtures("without_baselines")


class Fused(nn.Module):
    """Attention in one operator, which keeps no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


@cache
def planned(recompute: str | None = "selective", dropout: float = 0.0, **pinned: Any) -> Plan:
    ranks = math.prod(pinned.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    fixed = Constraints(**{"pp": 1, "dp": 1, "tp": 1, "microbatch_size": 2, "recompute": recompute} | pinned)
    return partition(model(dropout), Topology.local(ranks), inputs(), constraints=fixed)


CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": dict(tp=2),
    "cp2": dict(cp=2),
    "pp2 1f1b": dict(pp=2),
    "pp2 zero bubble": dict(pp=2, schedule="zb-1p"),
    "pp2 interleaved": dict(pp=2, schedule="interleaved", virtual_stages=2, microbatch_size=1),
    "dp2 zero3": dict(dp=2, zero=3),
    "dp2 tp2 zero2": dict(dp=2, tp=2, zero=2),
}


@pytest.mark.parametrize(
    ("case", "dropout"),
    [
        *((case, 0.3) for case in CASES),
        *(pytest.param(case, 0.0, marks=() if case == "tp2" else pytest.mark.slow) for case in CASES),
    ],
)
def test_it_computes_what_the_model_does(case: str, dropout: float):
    plan = planned(dropout=dropout, **CASES[case])
    assert plan.planned_only == ()
    assert all(stage.selective_calls and not stage.checkpoint_calls for stage in plan.program.stages)
    found = plan.verify(model(dropout), inputs())
    assert found.ok and found.max_error < 1e-9, found.errors


def test_processes_over_gloo():
    weights = model(0.3).double()
    batch = {n: x.double() if x.is_floating_point() else x for n, x in inputs().items()}
    whole, slim = (
        run_local(planned(way, 0.3, pp=2, schedule="zb-1p"), weights, batch) for way in ("none", "selective")
    )
    assert relative_error(slim.loss, whole.loss) < 1e-12
    assert slim.grads.keys() == whole.grads.keys() == dict(weights.named_parameters()).keys()
    assert max(relative_error(slim.grads[n], whole.grads[n]) for n in whole.grads) < 1e-9


def layers(program: Program) -> list[Any]:
    return [c for c in ProgramFacts(program).stages[0] if c.data.path.startswith("layers")]


def kept(program: Program) -> float:
    """Bytes that a layer keeps for its backward, besides its inputs."""
    return sum(call.kept_bytes for call in layers(program)) / 4


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_kept_falls_as_predicted(tp: int, dropout: float):
    slim, whole = (planned(way, dropout, tp=tp).program for way in ("selective", "none"))
    data = slim.blocks[layers(slim)[0].data.block]
    block = block_from_data("layer", data.nodes, data.states, data.inputs)
    mark_block(block, {*(n for n in block.states if "seed" not in n), *block.inputs})
    assert {n.name for n in find_recomputed_nodes(block, "selective")} == set(data.again)
    saved = kept_by(block).inside - kept_by(block, without=find_recomputed_nodes(block, "selective")).inside
    scores = 2 * HEADS // tp * LENGTH * LENGTH * 4  # of two samples, float32
    assert saved >= scores
    # What an operator keeps besides is of its device: the product of kept weights and values, say, or a copy of them;
    # views of queries and keys keep the product that values are in, too.
    values = 2 * LENGTH * WIDTH // tp * 4
    assert saved - values <= kept(whole) - kept(slim) <= saved + scores
    assert (
        peak_bytes(ProgramFacts(slim), 0, slim.stages[0].instructions)[0]
        < (peak_bytes(ProgramFacts(whole), 0, whole.stages[0].instructions)[0])
    )


def test_what_is_computed_again_is_there_for_a_moment():
    call, whole = layers(planned().program)[0], layers(planned("none").program)[0]
    assert call.recomputed_bytes == whole.kept_bytes - call.kept_bytes > 0


def test_fused_attention_keeps_no_scores():
    torch.manual_seed(0)
    x = torch.randn(4, LENGTH, WIDTH)
    plan = partition(Fused(), Topology.local(1), (x,), loss=torch.sum, constraints=Constraints(recompute="scores"))
    assert plan.planned_only == ()
    assert not any(stage.selective_calls for stage in plan.program.stages)


def test_nothing_is_sent_again():
    again = {name: [u.op for u in c.backward] for name, c in zip("sn", both_calls(), strict=True)}
    assert again["s"] == again["n"]


def both_calls() -> list[Any]:
    return [layers(planned(way, tp=2).program)[0] for way in ("selective", "none")]


def test_each_stage_recomputes_what_it_must():
    """The first stage has two microbatches in flight and lacks room for their scores; the last has one."""

    def plan(memory: int, recompute: str | None) -> Plan:
        pins = {f"layers.{i}": i // 2 for i in range(4)}
        fixed = dict(pp=2, dp=1, tp=1, microbatch_size=1, schedule="1f1b", stage_of=pins)
        return partition(
            model(0.0),
            cluster(memory / 2**20, devices=2),
            inputs(),
            constraints=Constraints(**fixed, recompute=recompute),
        )

    first, last = (sum(stage.memory.values()) for stage in plan(2**40, "none").estimate.stages)
    assert first > last
    slim = sum(plan(2**40, "selective").estimate.stages[0].memory.values())
    assert last < slim < first
    found = plan((first + slim) // 2, None)
    assert [stage.selective for stage in found.estimate.stages] == [True, False]
    assert [bool(stage.selective_calls) for stage in found.program.stages] == [True, False]
    assert not any(stage.checkpoint_calls for stage in found.program.stages)
    assert found.verify(model(0.0), inputs()).ok
    assert "recomputed in part" in " ".join(found.explain().split())


@pytest.mark.parametrize(
    "pins",
    [dict(), dict(pp=2, schedule="1f1b"), dict(pp=2, schedule="interleaved", virtual_stages=2), dict(dp=2, zero=3)],
    ids=["one rank", "1f1b", "interleaved", "zero3"],
)
def test_only_as_many_calls_recompute_as_memory_demands(pins: dict[str, Any]):
    """With memory between what is needed without recomputation and what is needed with all of it, some of the four
    layers recompute their scores and the others keep them."""
    fixed = {"pp": 1, "dp": 1, "tp": 1, "microbatch_size": 1} | pins
    devices = fixed["pp"] * fixed["dp"]

    def plan(memory: float, recompute: str | None, estimate_only: bool = False) -> Plan:
        asked, there = Constraints(**fixed, recompute=recompute), cluster(memory / 2**20, devices=devices)
        return partition(model(0.3), there, inputs(), constraints=asked, estimate_only=estimate_only)

    most, least = (max(plan(2**40, how, True).estimate.memory) for how in ("none", "selective"))
    room = least + 0.7 * (most - least)
    found, whole = plan(room, None), plan(2**40, "selective")
    count, every = (sum(len(stage.selective_calls) for stage in each.program.stages) for each in (found, whole))
    assert 0 < count < every == 4
    assert max(found.estimate.memory) <= room
    assert not any(stage.checkpoint_calls for stage in found.program.stages)
    assert found.estimate.breakdown["recompute"] <= whole.estimate.breakdown["recompute"]
    checked = found.verify(model(0.3), inputs())
    assert checked.ok and checked.max_error < 1e-9, checked.errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(selective_calls=(99,)), "call 99 is to be recomputed in part"),
        (dict(checkpoint_calls=tuple(range(4))), "recomputed whole, and in part"),
    ],
)
def test_a_stage_that_cannot_recompute_so_is_refused(change: dict[str, Any], words: str):
    program = planned().program
    stages = (program.stages[0].model_copy(update=change),)
    with pytest.raises(ProofError, match=words):
        prove(program.model_copy(update={"stages": stages}))


def test_scores_are_nodes_of_their_block():
    program = planned().program
    name = layers(program)[0].data.block
    blocks = {**program.blocks, name: program.blocks[name].model_copy(update={"again": ("nothing",)})}
    with pytest.raises(ProofError, match="is to recompute 'nothing', which its block does not have"):
        prove(program.model_copy(update={"blocks": blocks}))


def test_the_step_takes_what_the_scores_take():
    slim, whole = planned().estimate, planned("none").estimate
    assert slim.breakdown["recompute"] > whole.breakdown["recompute"] == 0.0
    assert slim.step_time == pytest.approx(whole.step_time + slim.breakdown["recompute"])
