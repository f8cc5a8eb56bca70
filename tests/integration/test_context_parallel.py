"""Context parallelism: the sequence over ranks, and nothing else changes: outputs, loss and every gradient."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import partitioner
import partitioner.passes.ops.attention
from partitioner import Constraints, Plan, PlanError, Topology, partition, run_reference
from partitioner.passes.ir.layouts import Layout, join_shards, make_shard_layout, shard_slices, take_shard
from partitioner.passes.ops.attention import Band, count_max_pairs, list_ring_steps
from partitioner.plans.verify import TOLERANCE, compare
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.execute.calls import BoundCall
from partitioner.runtime.execute.collective_ops import ContextAttention
from tests.helpers.context_models import BANDS, MASKS, SEQ, VOCAB, Decoder, Mixed, NextToken, inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

ALGORITHMS = ("all_gather", "ring", "ulysses")
LIMITS = st.one_of(st.none(), st.integers(0, 12))


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(8) as pool:
        yield pool


# --- where positions are ----------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans())
def test_shards_make_the_whole_again(num_ranks: int, sections: list[int], zigzag: bool):
    sizes = tuple(2 * num_ranks * s for s in sections)
    layout = make_shard_layout(1, sizes, zigzag)
    whole = torch.arange(2 * sum(sizes)).view(2, -1)
    parts = [take_shard(whole, layout, num_ranks, rank) for rank in range(num_ranks)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(join_shards(parts, layout), whole)
    assert Layout.parse(str(layout)) == layout


def test_zigzag_has_a_piece_from_either_end():
    assert [shard_slices(make_shard_layout(0, (), True), 16, 4, rank) for rank in (0, 3)] == [
        [(0, 2), (14, 2)],
        [(6, 2), (8, 2)],
    ]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_zigzag_makes_causal_attention_even(num_ranks: int):
    each = 64 // num_ranks
    causal, whole = Band(None, 0), 64 * 65 // 2
    assert count_max_pairs(each, each, num_ranks, True, causal) * num_ranks == whole
    assert count_max_pairs(each, each, num_ranks, False, causal) * num_ranks > 1.4 * whole


def test_a_ring_takes_the_steps_that_a_window_needs():
    assert list_ring_steps(16, 16, 4, False, Band(None, 0)) == (0, 1, 2, 3)
    assert list_ring_steps(16, 16, 4, False, Band(15, 0)) == (0, 1)
    assert list_ring_steps(16, 16, 4, False, Band(4, 4)) == (0, 1, 3)


# --- the operators ----------------------------------------------------------------------------------------------------


def _dense(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Tensor:
    """The same from a whole matrix of scores; zero for queries that see nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= distance <= (band.before if band.before is not None else k.shape[2] + q.shape[2])
    seen &= distance >= -(band.after if band.after is not None else k.shape[2] + q.shape[2])
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~seen, -1e300)
    return (scores.softmax(-1) * seen.any(1, keepdim=True)) @ v


def _tensors(queries: int, keys: int, heads: tuple[int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads[0], queries, 4), (2, heads[1], keys, 4), (2, heads[1], keys, 4), (2, heads[0], queries, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _results(band: Band, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = _dense(*leaves, band)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), LIMITS, LIMITS, st.sampled_from([(4, 4), (4, 2), (2, 1)]))
def test_attention_in_tiles_is_attention(queries: int, keys: int, before: Any, after: Any, heads: tuple[int, int]):
    q, k, v, grad = _tensors(queries, keys, heads)
    band = Band(before, after)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    limits = [-1 if limit is None else limit for limit in band]
    out, _ = torch.ops.partition.band_attention(*leaves, *limits, None)
    mine = [out, *torch.autograd.grad(out, leaves, grad)]
    for found, expected in zip(mine, _results(band, q, k, v, grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=40)
@given(
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from(["ring", "all_gather"]),
    LIMITS,
    LIMITS,
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_ranks_together_do_what_one_does(
    num_ranks: int, zigzag: bool, algorithm: str, before: Any, after: Any, queries: int, keys: int
):
    band, layout = Band(before, after), make_shard_layout(2, (), zigzag)
    whole = _tensors(2 * num_ranks * queries, 2 * num_ranks * keys, (4, 2))
    world, found = ThreadWorld(num_ranks), dict[int, tuple[Tensor, ...]]()

    def work(rank: int) -> None:
        try:
            group = world.communicator(rank).group(tuple(range(num_ranks)))
            attention = ContextAttention(group, band, None, zigzag, algorithm)
            q, k, v, grad = (take_shard(x, layout, num_ranks, rank) for x in whole)
            out, lse = attention.forward(q, k, v)
            found[rank] = (out, *attention.backward(grad, q, k, v, out, lse))
        except Exception as error:
            world.abort(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine = [join_shards([found[r][i] for r in range(num_ranks)], layout) for i in range(4)]
    for joined, expected in zip(mine, _results(band, *whole), strict=True):
        torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-10)


def test_scores_of_any_size_do_not_overflow():
    q, k, v, _ = _tensors(64, 64, (2, 2))
    out, lse = torch.ops.partition.band_attention(1e3 * q, 1e3 * k, v, 20, 0, None)
    assert bool(out.isfinite().all()) and float(lse.max()) > 1e5


# --- whole models -----------------------------------------------------------------------------------------------------


def plan_of(model: nn.Module, **fixed: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, **fixed}
    size = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed["cp"]
    return partition(model, Topology.local(size), inputs(), constraints=Constraints(**fixed))


def operators(plan: Plan) -> set[str]:
    """What runs over ``cp``; of attention its algorithm, and ``z`` for zigzag."""
    found = set()
    for block in plan.program.blocks.values():
        for node in block.nodes:
            if "cp" in node.get("args", ()):
                name = str(node["target"]).split(".")[1]
                if name == "context_attention":
                    name += f" {node['args'][-1]}" + " z" * node["args"][-2]
                found.add(name)
    return found


def check(model: nn.Module, ranks: partitioner.LocalRanks | None = None, **fixed: Any) -> Plan:
    plan = plan_of(model, **fixed)
    assert plan.planned_only == () and plan.mesh["cp"] == fixed["cp"]
    report = plan.verify(model, inputs())
    assert report.ok, str(report)
    if ranks is not None:
        run = partitioner.run_local(plan, model, inputs(), ranks=ranks, timeout=120)
        errors = compare(run, run_reference(model, inputs()), plan.program)
        assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}
    return plan


SAMPLE: list[tuple[str, dict[str, Any]]] = [
    ("causal", dict(cp=2, context="ring")),
    ("window", dict(cp=4, context="ring", microbatch_size=2)),
    ("full", dict(cp=2, context="all_gather", pp=2, microbatch_size=1)),
    ("causal", dict(cp=2, tp=2, context="ulysses")),
    ("both_sides", dict(cp=2, dp=2, context="all_gather")),
    ("causal", dict(cp=2, tp=2, pp=2, context="ring", microbatch_size=1)),
    ("alibi", dict(cp=2)),
    ("soft_cap", dict(cp=2)),
    ("soft_cap", dict(cp=2, context="ring")),
]
MESHES = [dict(cp=2), dict(cp=4), dict(cp=2, tp=2), dict(cp=2, pp=2), dict(cp=2, dp=2), dict(cp=2, tp=2, pp=2)]


def _name(value: Any) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("mask", "fixed"), SAMPLE, ids=_name)
def test_equal_to_the_model(mask: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    plan = check(Decoder((mask, mask)), ranks, **fixed)
    if mask in BANDS and fixed["context"] != "ulysses":
        zigzag = " z" if mask == "causal" else ""
        assert f"context_attention {fixed['context']}{zigzag}" in operators(plan)
    if fixed.get("context") == "ulysses":
        assert "all_to_all" in operators(plan) and "context_attention ring" not in operators(plan)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=_name)
@pytest.mark.parametrize(("mask", "algorithm"), list(product(BANDS, ALGORITHMS)))
def test_every_algorithm_on_every_mesh(mask: str, algorithm: str, mesh: dict[str, Any], ranks: partitioner.LocalRanks):
    heads = 8 if mesh.get("tp", 1) * mesh["cp"] > 4 else 4
    check(Decoder((mask, mask), heads), ranks, context=algorithm, microbatch_size=1 if "pp" in mesh else 2, **mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=_name)
@pytest.mark.parametrize("mask", [m for m in MASKS if m not in BANDS])
def test_masks_that_are_no_band_on_every_mesh(mask: str, mesh: dict[str, Any], ranks: partitioner.LocalRanks):
    check(Decoder((mask, mask)), ranks, **mesh)


def test_layers_that_differ_share_one_order_of_positions(ranks: partitioner.LocalRanks):
    plan = check(Decoder(("causal", "window", "full")), ranks, cp=2, context="ring")
    assert {o for o in operators(plan) if o.startswith("context")} == {"context_attention ring z"}


@pytest.mark.parametrize("by_position", [False, True])
def test_the_loss_of_next_tokens_is_shared(by_position: bool):
    """Logits stay where they are: what is gathered has one number for each position at most."""
    plan = check(NextToken(by_position).double(), cp=2, context="ring")
    gathered = [
        node["val"]
        for block in plan.program.blocks.values()
        for node in block.nodes
        if str(node.get("target")).startswith("partition.all_gather") and "cp" in node["args"]
    ]
    assert all(math.prod(shape) <= 4 * SEQ for shape, *_ in gathered)


@pytest.mark.parametrize("kind", ["convolution", "sum"])
def test_what_else_mixes_positions_is_computed_from_all_of_them(kind: str):
    model = Mixed(kind).double()
    plan = check(model, cp=2)
    assert "all_gather" in operators(plan) or "all_to_all" in operators(plan)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", BANDS)
def test_no_mask_is_stored(mask: str):
    """Nothing of the program is as large as a matrix of scores for one head."""
    program = plan_of(Decoder((mask, mask), 8), cp=2).program
    shapes = [tuple(n["val"][0]) for b in program.blocks.values() for n in b.nodes if isinstance(n.get("val"), list)]
    assert shapes and not any(SEQ in s[-1:] and s[-2:-1] in ((SEQ,), (SEQ // 2,)) for s in shapes)


# --- what cannot be ---------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, VOCAB))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


@pytest.mark.parametrize(
    ("model", "fixed", "message"),
    [
        (Decoder(("causal",), 2), dict(cp=4, context="ulysses"), "2 key/value heads, which is not divisible by cp=4"),
        (Decoder(("causal",), 2), dict(cp=2, tp=2, context="ulysses"), "is not divisible by cp=2 x tp=2"),
        (
            Decoder(("dilated",)),
            dict(cp=2, context="ring"),
            "a mask that is not a band around the diagonal.*'all_gather'",
        ),
        (Decoder(("without_softmax",)), dict(cp=2, context="ring"), "no fused attention was found"),
        (Decoder(("causal",)), dict(cp=5, context="ring"), "48 queries and 48 keys, which are not divisible by 5"),
        (Decoder(("causal",)), dict(cp=5), "no input has a dim besides the batch dim that is divisible by 5"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(model: nn.Module, fixed: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        plan_of(model, **fixed)


def test_without_a_sequence_there_is_nothing_to_share():
    batch = (torch.zeros(8, 32), torch.zeros(8, dtype=torch.long))
    with pytest.raises(PlanError, match="would shard only 0% of the model's matrix products"):
        partition(Perceptron(), Topology.local(2), batch, constraints=Constraints(pp=1, dp=1, tp=1, cp=2))


# --- memory -----------------------------------------------------------------------------------------------------------


def _saved_bytes(plan: Plan, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a rank keeps from forward for backward, at its fullest, as it runs."""
    most, backward = [0], BoundCall.backward

    def measured(call: BoundCall, microbatch: int) -> None:
        held = [t for tensors in call.env.saved.values() for t in tensors if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        most.append(sum(storages.values()))
        backward(call, microbatch)

    monkeypatch.setattr(BoundCall, "backward", measured)
    partitioner.run_threads(plan, model, inputs())
    return max(most)


@pytest.mark.parametrize("algorithm", [pytest.param("all_gather", marks=pytest.mark.slow), "ring"])
def test_activations_fall_with_the_ranks(algorithm: str, monkeypatch: pytest.MonkeyPatch):
    model = Decoder(("causal",) * 3)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    planned, measured = dict[int, float](), dict[int, float]()
    for cp in (1, 2, 4):
        plan = plan_of(model, cp=cp, context=algorithm if cp > 1 else None, microbatch_size=4)
        planned[cp] = plan.estimate.stages[0].memory["saved"]
        measured[cp] = _saved_bytes(plan, model, monkeypatch) - weights
    for cp in (2, 4):
        assert planned[cp] == pytest.approx(planned[1] / cp, rel=0.1)
        assert measured[cp] == pytest.approx(measured[1] / cp, rel=0.1)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_explanation_says_how_the_sequence_is_shared():
    plan = plan_of(Decoder(("causal",), 2), cp=4)
    text = " ".join(plan.explain().split())
    assert "How is the sequence shared? Each rank has 1/4 of every sequence, a piece from either end" in text
    assert {way.algorithm: way.calls > 0 for way in plan.context}.keys() == set(ALGORITHMS)
    (chosen,) = (way for way in plan.context if way.calls)
    assert f"1 attention call by {chosen.algorithm} (" in text
    assert "is not possible: context='ulysses' with cp=4" in text


@pytest.mark.slow
def test_a_long_sequence_is_shared_by_the_search_itself():
    """Llama-3.1-8B with 131,072 tokens on 64 H100."""
    transformers = pytest.importorskip("transformers")
    length = 131_072
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    plan = partition(model, Topology.preset("dgx-h100", nodes=8), batch, global_batch=8, precision="bf16")
    assert plan.mesh["cp"] > 1 and plan.planned_only == ()
    text = " ".join(plan.explain().split())
    assert f"Each rank has 1/{plan.mesh['cp']} of every sequence" in text
    assert "Without context parallelism (cp 1)" in text
