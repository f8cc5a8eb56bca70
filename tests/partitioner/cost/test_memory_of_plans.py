"""The memory that the search counts with is the program's; and a plan whose program needs more is no plan."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import CapacityError, Constraints, Plan, Topology, api, partition, prepare
from partitioner.cost.call.saved_activations import kept_by
from partitioner.passes.ir.gradient_flow import mark_block
from partitioner.passes.ir.serialize import block_from_data
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.solve.search import fit_memory
from partitioner.topology.files import with_margin
from tests.helpers.infeasible_jobs import Infeasible, Tower
from tests.helpers.small_clusters import MARGIN, cluster

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH, LAYERS = 256, 4


class Normed(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.float().sum()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_accelerators_keep_their_operand_alone(norm: type[nn.Module]) -> None:
    """Fused kernels keep it and a number or two for each row; taken apart they keep several tensors of its size."""
    with torch.device("meta"):
        model, x = Normed(norm).to(torch.bfloat16), torch.empty(8, 512, WIDTH, dtype=torch.bfloat16)
    pinned = Constraints(dp=8, zero=0, recompute="none")
    plan = partition(model, Topology.preset("dgx-h100"), (x,), constraints=pinned)
    size = 512 * WIDTH * 2
    saved = plan.estimate.stages[0].memory["saved"]
    assert 2 * LAYERS * size <= saved <= (2 * LAYERS + 0.5) * size


class Heads(nn.Module):
    """Scores of heads, whose dims are in another order in queries and keys than products of matrices have them. Queries
    and keys are read a second time, so that backward needs them and their copies."""

    def __init__(self, notation: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.notation = notation

    def forward(self, x: Tensor) -> Tensor:
        query, key = (layer(x).tanh().unflatten(-1, (4, 8)) for layer in (self.query, self.key))
        if self.notation == "einsum":
            scores = torch.einsum("bihd,bjhd->bhij", query, key)
        else:
            scores = query.permute(0, 2, 1, 3) @ key.permute(0, 2, 3, 1)
        return scores.square().mean() + (query * key).square().mean()


@pytest.mark.parametrize("notation", ["einsum", "matmul"])
def test_copies_that_products_make_of_their_operands_are_counted(notation: str) -> None:
    plan = partition(Heads(notation), Topology.local(1), (torch.randn(4, 64, 32),), constraints=Constraints(pp=1))
    kept = counted = 0
    for call in ProgramFacts(plan.program).stages[0]:
        data = plan.program.blocks[call.data.block]
        block = block_from_data("block", data.nodes, data.states, data.inputs)
        mark_block(block, {*block.states, *block.inputs})
        kept, counted = kept + call.kept_bytes, counted + kept_by(block).inside
    copies = 2 * 4 * 64 * 32 * 4
    assert kept > 2 * copies  # queries and keys, and copies of them
    assert abs(counted - kept) < copies / 4


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=16384, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(1, 512, dtype=torch.int64)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("zero", [1, 3])
def test_states_are_shared_over_the_ranks_of_a_sequence(zero: int) -> None:
    """With one microbatch, too, where adding up gradients at once, in the graph, would cost no more."""
    model, inputs = _llama()
    pinned = Constraints(cp=8, zero=zero)
    tables, whole = (
        partition(model, Topology.preset("dgx-h100"), inputs, constraints=pinned, estimate_only=only)
        for only in (True, False)
    )
    assert whole.program is not None
    trained = [s for s in whole.program.states.values() if s.kind == "parameter" and s.requires_grad]
    assert all("cp" in state.grad_axes for state in trained)
    assert whole.estimate.stages[0].memory["optimizer"] == pytest.approx(
        tables.estimate.stages[0].memory["optimizer"], rel=1e-3
    )


def test_what_is_pinned_to_what_was_chosen_costs_what_that_did() -> None:
    """Whoever asks for a sharding first: nothing that is searched besides changes it."""
    model, inputs = _llama()
    prepared = prepare(model, inputs)
    ask: dict[str, Any] = dict(global_batch=12, estimate_only=True)
    free = partition(prepared, Topology.parse("dgx-h100"), constraints=Constraints(dp=4, tp=2), **ask)
    chosen = free.chosen
    pins = dict(dp=4, tp=2, microbatch_size=chosen.microbatch_size, zero=chosen.zero)
    pinned = partition(prepared, Topology.parse("dgx-h100"), constraints=Constraints(**pins), **ask)
    assert pinned.estimate.step_time == free.estimate.step_time
    assert pinned.certificate.bound == pytest.approx(free.certificate.bound)


@pytest.mark.parametrize("pins", [{"pp": 2}, {"dp": 4}, {"tp": 4}, {"pp": 4, "microbatch_size": 1}])
def test_what_inference_puts_out_is_counted_once(pins: dict[str, int]) -> None:
    """Of a model whose outputs, a number for each word, are most of what there is."""
    model, inputs = _llama()
    prepared = prepare(model, {"input_ids": inputs["input_ids"]}, objective="infer")
    pinned = {"dp": 1, "pp": 1, "tp": 1} | pins
    topology = Topology.local(4) if pins != {"pp": 2} else Topology.local(2)
    tables, whole = (
        partition(prepared, topology, constraints=Constraints(**pinned), global_batch=4, estimate_only=only)
        for only in (True, False)
    )
    assert max(whole.estimate.memory) == pytest.approx(max(tables.estimate.memory), rel=0.1)


def test_inference_that_does_not_fit_has_nothing_to_recompute() -> None:
    model, inputs = _llama()
    prepared = prepare(model, {"input_ids": inputs["input_ids"]}, objective="infer")
    with pytest.raises(CapacityError, match=r"usable on a device: .* too much") as raised:
        partition(prepared, cluster(1), constraints=Constraints(tp=1))
    assert "recomputed" not in str(raised.value)


def _planned_with(
    extra: int, monkeypatch: pytest.MonkeyPatch, memory: float, pins: dict[str, Any] | None = None, **options: Any
) -> Plan:
    """As if every program took ``extra`` bytes more than the tables know of."""
    followed = fit_memory.replace_estimated_memory

    def more(*arguments: Any) -> Any:
        estimate = followed(*arguments)
        return estimate.model_copy(update={"memory": tuple(m + extra for m in estimate.memory)})

    monkeypatch.setattr(fit_memory, "replace_estimated_memory", more)
    model, x = Tower(256, 8), torch.zeros(64, 256)
    return partition(model, cluster(memory), (x,), constraints=Constraints(dp=4, **(pins or {})), **options)


def test_a_program_that_takes_more_than_the_tables_say_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = max(_planned_with(0, monkeypatch, 64, {"zero": 1}).estimate.memory)  # others take less, and longer
    room = tight / 2**20 + 0.2
    plan = _planned_with(2**19, monkeypatch, room)
    assert max(plan.estimate.memory) <= room * 2**20


def test_what_is_kept_a_little_above_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = dict(microbatch_size=16, recompute="none", zero=0)  # there is no other
    least = max(_planned_with(0, monkeypatch, 64, pins).estimate.memory)
    room = (least + 2**26) / 2**20 / 1.02
    plan = _planned_with(2**26, monkeypatch, room, pins)
    assert re.search(
        r"Hardly: .* usable \(102%\): .* too much, which the margin of .* covers; nothing that needs less was found\.",
        " ".join(plan.explain().split()),
    )
    assert re.search(r"memory +.* usable \(102%\)", plan.summary())
    plan = _planned_with(0, monkeypatch, room * (1 - MARGIN), pins | {"memory_margin": 0})  # still as much more
    assert "Hardly: the fullest rank" in str(plan.explain())


def test_a_margin_of_each_device_stays_free() -> None:
    """Four layers of 256 x 256 weights and 256 biases in float32, with gradients and Adam's two moments, are
    4 x 65792 x 16 bytes = 4210688; with an input, activations and gradients of 64 KiB each a rank takes a little more.
    Of a device that has just that (and 4 KiB), 5 % less is usable by default."""
    job, pins = Infeasible(CapacityError, "", cluster(64, 1)), dict(microbatch_size=64, recompute="none")
    small = cluster(1, 1)
    with pytest.raises(CapacityError) as short:
        job.plan(small, Constraints(**pins, memory_margin=0))
    peak = small.devices[0].usable + short.value.missing_bytes
    assert 4210688 < peak < 1.2 * 4210688
    room = peak + 4096
    exact = cluster(math.floor(room * (1 - MARGIN)) / 2**20, 1)
    assert 0 <= exact.devices[0].usable - room < 3  # bytes, by rounding
    plan = job.plan(exact, Constraints(**pins, memory_margin=0))
    assert max(plan.estimate.memory) > 0.9 * exact.devices[0].usable
    assert "no margin was asked for" in " ".join(plan.summary().split())
    with pytest.raises(CapacityError) as raised:
        job.plan(exact, Constraints(**pins))
    assert raised.value.message.endswith("(5% of a device's memory is kept free: memory_margin)")
    assert raised.value.missing_bytes == pytest.approx(0.05 * room - 4096, abs=4)
    assert raised.value.changes[0].text == "memory_margin=0 instead of 0.05"
    wider = job.plan(cluster(peak / 2**20, 1), Constraints(**pins))
    assert max(wider.estimate.memory) <= 0.95 * wider.topology.devices[0].usable
    assert "(memory_margin 5%). The margin is for fragmentation and small errors of the estimate." in " ".join(
        wider.explain().split()
    )


def test_a_margin_is_of_what_each_device_has() -> None:
    """Of 100 and 80 bytes, of which 10 are reserved, a tenth of 90 and of 70 is left out."""
    topology = Topology(
        name="two", nodes=({"type": "one", "devices": 2, "count": 2},),
        types={"one": {"memory": 100, "reserved": 10, "peak": {"fp32": 1e12}, "memory_bandwidth": 1e11}},
        levels=({"name": "all", "bandwidth": 1e9, "latency": 1e-6},),
        overrides={"node0/1": {"memory": 80}}, node_overrides={1: {"memory": 60}},
    )  # fmt: skip
    smaller = with_margin(topology, 0.1)
    assert [d.usable for d in topology.devices] == [90, 70, 50, 50]
    assert [d.usable for d in smaller.devices] == [81, 63, 45, 45]
    assert with_margin(topology, 0.0) is topology


def test_a_program_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CapacityError, match=r"the program of stage 0 needs .* at its peak, but only .* usable on a device: .* too much"
    ):
        _planned_with(2**27, monkeypatch, 64)


def test_the_time_limit_is_for_all_tries_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is found anew has what the first one left; where that is nothing, it is refused."""
    asked: list[float] = []
    explore = api.search_for_plan

    def slow(job: Any, left: float, **options: Any) -> Any:
        asked.append(left)
        found = explore(job, left, **options)
        monkeypatch.setattr(fit_memory.time, "monotonic", lambda: start + 90.0 * len(asked))
        return found

    start = fit_memory.time.monotonic()
    monkeypatch.setattr(api, "search_for_plan", slow)
    with pytest.raises(CapacityError, match="the program of stage 0 needs"):
        _planned_with(2**27, monkeypatch, 64, time_limit_s=120.0)
    assert len(asked) == 2
    assert 110.0 < asked[0] <= 120.0 and 20.0 < asked[1] < 40.0
