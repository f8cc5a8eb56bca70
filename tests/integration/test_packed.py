"""Packed documents: every notation of the mask becomes one operator, and ranks compute what documents give alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Engine, InputsError, Plan, Shapes, Topology, partition
from partitioner.passes.ops.attention import Band
from partitioner.passes.ops.documents import count_document_pairs
from partitioner.plans.reference import keep_in_float64
from partitioner.plans.verify import TOLERANCE
from tests.helpers.attention.packed_models import (
    BY_ROWS,
    LENGTHS,
    NOTATIONS,
    ROW,
    VOCAB,
    WINDOW,
    PackedDecoder,
    RestartingDecoder,
    SequenceDecoder,
    list_packings,
    make_documents,
    pack,
    run_alone,
)
from tests.helpers.every_rank import on_every_rank

pytestmark = pytest.mark.usefixtures("without_baselines")

DOCUMENTS = make_documents()
PACKINGS = list_packings(LENGTHS, 12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def plan_of(model: nn.Module, **fixed: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, **fixed}
    size = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed["cp"]
    plan = partition(model, Topology.local(size), pack(DOCUMENTS, PACKINGS[0]), constraints=Constraints(**fixed))
    assert plan.planned_only == ()
    return plan


def targets_of(plan: Plan) -> set[str]:
    return {str(n.get("target")) for b in plan.program.blocks.values() for n in b.nodes}


def has_no_mask(plan: Plan) -> bool:
    """Whether no tensor of the plan has an element for each pair of positions."""
    shapes = [
        tuple(n["val"][0]) for b in plan.program.blocks.values() for n in b.nodes if isinstance(n.get("val"), list)
    ]
    return bool(shapes) and not any(s[-2:] == (ROW, ROW) for s in shapes)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / (1 + expected[n].abs().max())) for n in found)


def check_packing(run: Any, model: PackedDecoder | RestartingDecoder, order: list[int]) -> None:
    loss, logits, gradients = run_alone(model, DOCUMENTS, order)
    outputs = {"loss": loss, "logits": logits}
    assert worst({n: run.outputs[n].detach() for n in outputs}, outputs) <= TOLERANCE
    assert worst(run.grads, gradients) <= TOLERANCE


MESHES: list[dict[str, Any]] = [
    dict(tp=2),
    dict(pp=2, microbatch_size=1),
    dict(dp=2),
    dict(cp=2, context="ring"),
    dict(cp=2, context="all_gather"),
    dict(cp=2, context="ulysses"),
    dict(cp=2, tp=2, context="ring"),
    dict(cp=2, pp=2, context="all_gather", microbatch_size=1),
    dict(cp=1),
    dict(cp=4, context="all_gather"),
    dict(cp=4, context="ulysses"),
    dict(cp=4, context="ring"),
]


def _name(value: Any) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("fixed", MESHES, ids=_name)
@pytest.mark.parametrize("name", ["boolean", "restarted_window", "chunked_indexed"])
def test_ranks_give_what_documents_give_alone(name: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """One plan for all packings of the same documents, because documents are data."""
    model = PackedDecoder(name)
    plan = plan_of(model, **fixed)
    context = "context_" if fixed.get("context") in ("ring", "all_gather") else ""
    assert f"partition.{context}document_attention.default" in targets_of(plan)
    for order in PACKINGS if name == "boolean" else PACKINGS[:3]:
        run = partitioner.run_local(plan, model, pack(DOCUMENTS, order), ranks=ranks, timeout=120)
        check_packing(run, model, order)


@pytest.mark.parametrize("fixed", [MESHES[0], MESHES[1], MESHES[3]], ids=_name)
@pytest.mark.parametrize("name", ["assigned", "each_head", "joined_eager", "einsum", "einsum_groups", "chunked_added"])
def test_notations_on_ranks(name: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """Masks of each head, and attention in which heads are joined with rows or divided into groups."""
    model = PackedDecoder(name)
    plan = plan_of(model, **fixed)
    context = "context_" if "context" in fixed else ""
    assert f"partition.{context}document_attention.default" in targets_of(plan)
    for order in PACKINGS[:2]:
        run = partitioner.run_local(plan, model, pack(DOCUMENTS, order), ranks=ranks, timeout=120)
        check_packing(run, model, order)


def run_whole(model: PackedDecoder, batch: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the model itself."""
    model.zero_grad()
    outputs = model(*batch)
    outputs["loss"].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach() for n, t in outputs.items()}, gradients


@pytest.mark.parametrize("fixed", MESHES[:6], ids=_name)
@pytest.mark.parametrize("name", BY_ROWS)
def test_chunks_of_rows(name: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """Chunks of positions in the row, with and without documents."""
    model = PackedDecoder(name)
    plan = plan_of(model, **fixed)
    context = "context_" if fixed.get("context") in ("ring", "all_gather") else ""
    assert f"partition.{context}document_attention.default" in targets_of(plan)
    assert has_no_mask(plan)
    for order in PACKINGS[:2]:
        batch = pack(DOCUMENTS, order)
        run = partitioner.run_local(plan, model, batch, ranks=ranks, timeout=120)
        outputs, gradients = run_whole(model, batch)
        assert worst({n: run.outputs[n].detach() for n in outputs}, outputs) <= TOLERANCE
        assert worst(run.grads, gradients) <= TOLERANCE


@pytest.mark.parametrize("name", NOTATIONS)
def test_no_notation_leaves_a_mask(name: str):
    model = PackedDecoder(name)
    plan = plan_of(model)
    assert "partition.document_attention.default" in targets_of(plan)
    assert has_no_mask(plan)
    for order in PACKINGS[:2]:
        check_packing(partitioner.run_threads(plan, model, pack(DOCUMENTS, order)), model, order)


def test_the_plan_is_verified_beside_the_model():
    model = PackedDecoder("boolean")
    report = plan_of(model, tp=2).verify(model, pack(DOCUMENTS, PACKINGS[1]))
    assert report.ok, str(report)


@pytest.mark.parametrize("fixed", [MESHES[0], MESHES[1], MESHES[2], MESHES[3], MESHES[4]], ids=_name)
def test_recurrences_and_convolutions_restart(fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    model = RestartingDecoder()
    plan = plan_of(model, **fixed)
    for order in PACKINGS[:2]:
        run = partitioner.run_local(plan, model, pack(DOCUMENTS, order), ranks=ranks, timeout=120)
        check_packing(run, model, order)


# --- Hugging Face models: positions that restart ----------------------------------------------------------------------


def _hub_model(kind: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation=attention, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=3))
    more = dict(intermediate_size_mlp=40, num_local_experts=2, head_dim=8, attention_chunk_size=4)
    layers = dict(no_rope_layers=[1, 0], interleave_moe_layer_step=2)  # chunks in the first layer, experts in the other
    config = transformers.Llama4TextConfig(**sizes, **more, **layers, pad_token_id=0)
    return transformers.Llama4ForCausalLM(config)


def _labels(tokens: Tensor) -> Tensor:
    """The first token of a document is predicted by none."""
    return tokens.clone().index_fill(0, torch.tensor(0), -100)


def _hub_batch(order: list[int]) -> dict[str, Tensor]:
    rows = [DOCUMENTS[d][0] for d in order]
    joined = [
        torch.cat(x).view(-1, ROW) for x in (rows, list(map(_labels, rows)), [torch.arange(len(r)) for r in rows])
    ]
    return dict(zip(("input_ids", "labels", "position_ids"), joined, strict=True))


def _hub_alone(model: nn.Module, order: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model.zero_grad()
    logits, losses = [], []
    for d in order:
        tokens = DOCUMENTS[d][0]
        out = model(input_ids=tokens[None], use_cache=False).logits[0]
        logits.append(out)
        losses.append(nn.functional.cross_entropy(out[:-1], tokens[1:], reduction="sum"))
    loss = torch.stack(losses).sum() / sum(len(DOCUMENTS[d][0]) - 1 for d in order)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": torch.cat(logits).detach().view(-1, ROW, VOCAB)}, gradients


HUB: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", dict(tp=2, pp=2, microbatch_size=1)),
    ("llama", "sdpa", dict(cp=2, context="ring")),
    ("mistral", "sdpa", dict(tp=2)),
    ("mistral", "sdpa", dict(cp=2, dp=2, context="all_gather")),
    ("llama", "flex_attention", dict(dp=2)),
    ("llama4", "sdpa", dict(tp=2)),
    ("llama4", "sdpa", dict(pp=2, microbatch_size=1)),
    ("llama4", "eager", dict(cp=2, context="all_gather")),
    ("llama4", "flex_attention", dict(dp=2)),
]


@pytest.mark.parametrize(("kind", "attention", "fixed"), HUB, ids=_name)
def test_models_that_read_restarting_positions(
    kind: str, attention: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks
):
    model, alone = _hub_model(kind, attention), _hub_model(kind, "sdpa").double()
    fixed = {"pp": 1, "dp": 1, "tp": 1, "cp": 1, **fixed}
    size = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed["cp"]
    plan = partition(model, Topology.local(size), _hub_batch(PACKINGS[0]), constraints=Constraints(**fixed))
    assert {t for t in targets_of(plan) if "attention" in t} <= {
        "partition.document_attention.default",
        "partition.context_document_attention.default",
    }
    assert has_no_mask(plan)
    for order in PACKINGS[:3]:
        run = partitioner.run_local(plan, model, _hub_batch(order), precision="fp64", ranks=ranks, timeout=120)
        with keep_in_float64():
            outputs, gradients = _hub_alone(alone, order)
        assert worst({n: run.outputs[n].detach() for n in outputs}, outputs) <= TOLERANCE
        assert worst(run.grads, gradients) <= TOLERANCE


# --- smaller batches, prices and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["boolean", "restarted", "chunked"])
def test_smaller_packed_batches_are_padded_exactly(name: str):
    """Three rows of 20 positions run in a program of four rows of 24; each rank is a thread."""
    model, order = PackedDecoder(name), list(range(12))
    plan = partition(
        model,
        Topology.local(2),
        pack(DOCUMENTS, PACKINGS[0]),
        constraints=Constraints(pp=1, dp=2, tp=1, cp=1),
        shapes=Shapes(batch=(2, 4), length=(16, 24)),
        documents=(5, 5, 6),
    )
    few = make_documents((5, 1, 7, 3, 4, 9, 2, 6, 3, 8, 8, 4))

    def step(communicator: Any) -> tuple[float, dict[str, Tensor]]:
        engine = Engine(plan, model, communicator=communicator)
        loss = float(engine.step(pack(few, order, 20)))  # type: ignore[arg-type]
        before = {n: t.clone() for n, t in engine.state_dict(full=True).items()}
        torch.optim.SGD(engine.parameters(), lr=1.0).step()
        after = engine.state_dict(full=True)
        return loss, {n: t - after[n] for n, t in before.items()}

    loss, _, gradients = run_alone(model, few, order, 20)
    found = on_every_rank(plan.program, step)
    assert [rank_loss for rank_loss, _ in found] == pytest.approx([float(loss)] * 2, rel=1e-12)
    assert worst(found[0][1], gradients) <= TOLERANCE  # rank 0 has the whole state


def test_the_step_is_priced_by_the_lengths_of_documents():
    """Real ids are counted; lengths that are given count instead; without numbers a row is one document."""
    config = dict(dtype=torch.long, device="meta")
    batch = tuple(x.repeat(4, 40) for x in pack(DOCUMENTS, PACKINGS[0]))
    with torch.device("meta"):
        unknown = tuple(torch.zeros_like(x, **config) for x in batch)
    model = PackedDecoder("boolean")
    fixed = Constraints(pp=1, dp=1, tp=1, cp=1)
    times = {
        name: partition(model, Topology.local(1), given, constraints=fixed, documents=lengths).estimate.step_time
        for name, given, lengths in (
            ("real", batch, ()),
            ("given", unknown, (5,) * 10),
            ("one", unknown, ()),
        )
    }
    assert times["real"] < 0.8 * times["one"] and times["given"] < 0.8 * times["one"]


@pytest.mark.parametrize(
    ("name", "documents", "message"),
    [
        ("boolean", (5, 0), "documents must be the lengths of typical documents"),
        ("none", (5, 6), "no attention of the model is restricted to packed documents.*position_ids that restart"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(name: str, documents: tuple[int, ...], message: str):
    batch = pack(DOCUMENTS, PACKINGS[0])
    model: nn.Module = PackedDecoder("boolean") if name == "boolean" else Unpacked()
    with pytest.raises(InputsError, match=message):
        partition(model, Topology.local(1), batch, documents=documents)


class Unpacked(nn.Module):
    """The decoder with rows that are one document each."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = PackedDecoder("boolean")

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        logits = self.decoder.logits(tokens, positions, None)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_long_packed_rows_are_planned_without_a_mask():
    """Llama-3.1-8B with rows of 131,072 tokens on 64 H100, from meta tensors."""
    transformers = pytest.importorskip("transformers")
    length = 131_072
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": tokens}
    times = []
    for documents in ((), (8192,) * 16):
        topology = Topology.preset("dgx-h100", nodes=8)
        plan = partition(model, topology, batch, global_batch=8, precision="bf16", documents=documents)
        shapes = [n["val"][0] for b in plan.program.blocks.values() for n in b.nodes if isinstance(n.get("val"), list)]
        positions = {length, length // plan.mesh["cp"]}
        assert shapes and not any(len(shape) > 1 and positions >= set(shape[-2:]) for shape in shapes)
        times.append(plan.estimate.step_time)
    assert times[1] < 0.5 * times[0]


@pytest.mark.parametrize(("documents", "zigzag"), [((768, 256), False), ((1024,), True), ((256, 768), True)])
def test_ranks_share_rows_in_the_order_that_balances_documents(documents: tuple[int, ...], zigzag: bool):
    """Positions in order, or a piece from either end: the slowest rank has fewer pairs."""
    pairs = {z: count_document_pairs(documents, 512, 2, z, Band(None, 0)) for z in (False, True)}
    assert pairs[zigzag] < pairs[not zigzag]
    batch = tuple(torch.zeros(1, 1024, dtype=torch.long, device="meta") for _ in range(4))
    pinned = Constraints(pp=1, dp=1, tp=1, cp=2, context="ring")
    plan = partition(PackedDecoder("boolean"), Topology.local(2), batch, constraints=pinned, documents=documents)
    orders = {
        n["args"][-2] for b in plan.program.blocks.values() for n in b.nodes if "context_doc" in str(n.get("target"))
    }
    assert orders == {zigzag}


@pytest.mark.parametrize("fixed", [dict(tp=2), dict(cp=2, context="ring")], ids=_name)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_sequences_by_cumulated_lengths(window: int | None, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """Torch's attention of sequences of different lengths, whose kernel is for GPUs, runs here by documents."""
    model, documents = SequenceDecoder(window), make_documents((5, 1, 7, 3, 8))
    pinned = Constraints(**{"pp": 1, "dp": 1, "tp": 1, "cp": 1, **fixed})

    def batch_of(order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets = (torch.cat([documents[d][i] for d in order])[None] for i in range(2))
        ends = torch.tensor([0, *(len(documents[d][0]) for d in order)]).cumsum(0).int()
        return tokens, targets, ends

    plan = partition(model, Topology.local(2), batch_of([0, 1, 2, 3, 4]), constraints=pinned)
    for order in ([0, 1, 2, 3, 4], [3, 4, 0, 2, 1]):
        model.zero_grad()
        logits = torch.cat([model.logits(documents[d][0][None], None) for d in order], 1)
        loss = nn.functional.cross_entropy(logits[0], torch.cat([documents[d][1] for d in order]))
        loss.backward()
        run = partitioner.run_local(plan, model, batch_of(order), ranks=ranks, timeout=120)
        outputs = {"loss": loss.detach(), "logits": logits.detach()}
        assert worst({n: run.outputs[n].detach() for n in outputs}, outputs) <= TOLERANCE
        assert worst(run.grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) <= TOLERANCE
