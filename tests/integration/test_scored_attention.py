"""Soft-capped scores, ALiBi and prefixes on real ranks: outputs, loss and every gradient are those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Engine, Plan, Topology, partition
from partitioner.plans.verify import TOLERANCE
from tests.helpers.attention.packed_models import LENGTHS, ROW, VOCAB, list_packings, make_documents
from tests.helpers.attention.score_models import ScoredDecoder, make_batch
from tests.helpers.models import float64

pytestmark = [
    pytest.mark.usefixtures("without_baselines"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

LENGTH = 24
# Flexible attention has no gradients on CPUs; the model is the same attention in another notation.
REFERENCES = {"flex_everything": "prefix_capped_sloped", "flex_prefix_window": "prefix_beside_window"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def plan_of(model: nn.Module, batch: Any, **fixed: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, **fixed}
    size = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed["cp"]
    plan = partition(model, Topology.local(size), batch, constraints=Constraints(**fixed))
    assert plan.planned_only == ()
    return plan


def attentions_of(plan: Plan) -> set[str]:
    targets = {str(n.get("target")) for b in plan.program.blocks.values() for n in b.nodes}
    return {t for t in targets if "attention" in t or "softmax" in t}


def check_results(run: Any, name: str, batch: tuple[Tensor, ...], trained: bool = False) -> None:
    model = ScoredDecoder(REFERENCES.get(name, name), trained=trained)
    expected = model(*batch)
    expected["loss"].backward()
    for output, value in expected.items():
        assert (run.outputs[output] - value).abs().max() <= TOLERANCE, output
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert run.grads.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert (run.grads[parameter] - gradient).abs().max() <= TOLERANCE, parameter


MESHES: list[dict[str, Any]] = [
    dict(tp=1),
    dict(tp=2),
    dict(cp=2, context="all_gather"),
    dict(cp=2, context="ulysses"),
    dict(dp=2),
    dict(pp=2, microbatch_size=1),
    dict(cp=2, tp=2, context="ring"),
    dict(cp=4, context="all_gather"),
    dict(cp=2, context="ring"),
]
NAMES = (
    "capped_documents", "capped_window", "sloped", "sloped_by_keys", "sloped_both_ways", "prefix",
    "prefix_of_constant_length", "prefix_capped_sloped", "prefix_in_window", "flex_prefix_window", "flex_everything",
)  # fmt: skip


def _name(value: Any) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("fixed", MESHES, ids=_name)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_what_the_model_gives(name: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """One plan for all documents, prefixes and slopes, which are data."""
    model = ScoredDecoder(name)
    plan = plan_of(model, make_batch(2, LENGTH, 0), **fixed)
    context = "context_" if fixed.get("context") in ("ring", "all_gather") else ""
    assert attentions_of(plan) == {f"partition.{context}scored_attention.default"}
    shapes = [n["val"][0] for b in plan.program.blocks.values() for n in b.nodes if isinstance(n.get("val"), list)]
    assert shapes and not any(tuple(shape[-2:]) == (LENGTH, LENGTH) for shape in shapes)
    for seed in (1, 2):
        batch = make_batch(2, LENGTH, seed)
        run = partitioner.run_local(plan, model, batch, ranks=ranks, timeout=120)
        check_results(run, name, batch)


@pytest.mark.parametrize("fixed", MESHES, ids=_name)
def test_trained_slopes_get_their_gradient(fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    name = "prefix_capped_sloped"
    model = ScoredDecoder(name, trained=True)
    plan = plan_of(model, make_batch(2, LENGTH, 0), **fixed)
    context = "context_" if fixed.get("context") in ("ring", "all_gather") else ""
    assert attentions_of(plan) == {f"partition.{context}scored_attention.default"}
    batch = make_batch(2, LENGTH, 1)
    check_results(partitioner.run_local(plan, model, batch, ranks=ranks, timeout=120), name, batch, trained=True)


def test_prefixes_are_priced_by_the_pairs_that_they_show():
    """Without values a prefix shows nothing; with values its pairs are added; all of a row is twice the causal half."""
    model, times = ScoredDecoder("prefix_of_documents", 1), []
    tokens, targets, ids, starts, _ = make_batch(1, 4096, 0)
    for flags in (torch.zeros(1, 4096), torch.ones(1, 4096)):
        batch = tokens, targets, torch.zeros_like(ids), starts, flags.bool()
        plan = plan_of(model, batch)
        (node,) = [n for b in plan.program.blocks.values() for n in b.nodes if "scored_att" in str(n.get("target"))]
        assert node["args"][7] == int(flags.sum()) * 4095 // 2
        times.append(plan.estimate.step_time)
    assert times[1] > 1.2 * times[0]


# --- Gemma 2: a cap in every layer, a window in every other one -------------------------------------------------------

DOCUMENTS = make_documents()
PACKINGS = list_packings(LENGTHS, 3)


def gemma(attention: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=3, attn_logit_softcapping=0.5, query_pre_attn_scalar=8,
        use_cache=False, attn_implementation=attention, max_position_embeddings=64,
    )  # fmt: skip
    with float64():
        torch.manual_seed(0)
        model: nn.Module = transformers.Gemma2ForCausalLM(config).double()
    for parameter in model.parameters():  # larger scores, which the cap bends
        nn.init.normal_(parameter, std=0.3)
    return model


def pack_texts(order: list[int]) -> dict[str, Tensor]:
    rows = [DOCUMENTS[d][0] for d in order]
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    places = [torch.arange(len(row)) for row in rows]
    joined = (torch.cat(parts).view(-1, ROW) for parts in (rows, labels, places))
    return dict(zip(("input_ids", "labels", "position_ids"), joined, strict=True))


def train_rank(plan: str, attention: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps, and the weights after them."""
    torch.manual_seed(0)
    engine = Engine(plan, gemma(attention))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    losses = []
    for order in PACKINGS:
        losses.append(float(engine.step(pack_texts(order))))  # type: ignore[arg-type]
        optimizer.step()
    return losses, {n: t.clone() for n, t in engine.state_dict(full=True).items()}


def train_alone() -> tuple[list[float], dict[str, Tensor]]:
    """Three steps in one process, which runs the documents one by one."""
    with float64():
        torch.manual_seed(0)
        model = gemma()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for order in PACKINGS:
            optimizer.zero_grad()
            found = []
            for tokens in (DOCUMENTS[d][0] for d in order):
                logits = model(input_ids=tokens[None], use_cache=False).logits[0]
                found.append(nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum"))
            loss = torch.stack(found).sum() / sum(len(DOCUMENTS[d][0]) - 1 for d in order)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_packed_documents_train_a_capped_model_as_one_by_one(attention: str, tmp_path: Path):
    fixed = Constraints(pp=1, dp=1, tp=2, cp=1)
    with float64():
        plan = partition(
            gemma(attention), Topology.local(2), pack_texts(PACKINGS[0]), constraints=fixed, precision="fp64"
        )
    assert attentions_of(plan) == {"partition.scored_attention.default"}
    plan.save(tmp_path / "plan.json")
    with partitioner.LocalRanks(2) as pair:
        losses, weights = pair.call(train_rank, str(tmp_path / "plan.json"), attention)[0]
    expected, trained = train_alone()
    assert losses == pytest.approx(expected, rel=1e-9)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    for name, weight in weights.items():
        assert (weight - trained[name]).abs().max() < 1e-9, name
