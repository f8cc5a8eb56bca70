"""Architectures of transformers, drawn from all that it maps to a task: none is known by name, all are equal."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import partitioner
from benchmarks import zoo
from benchmarks.zoo_attention import FusedCalls, fused, masks_left, masks_of
from benchmarks.zoo_configs import attempts, repaired, tiny_config
from benchmarks.zoo_models import ZooError, architectures, build, without_labels
from benchmarks.zoo_report import summary, write_docs
from partitioner import Constraints, Topology, partition, run_reference
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import CaptureError
from partitioner.passes.normalize.pipeline import normalize
from partitioner.plans.verify import TOLERANCE, compare

pytestmark = pytest.mark.usefixtures("without_baselines")

# Bias by distance and fused qkv; disentangled attention; windows of pixels; convolutions over sound, weight norm.
SAMPLE = ["causal:bloom", "masked:deberta-v2", "image:swin", "ctc:wav2vec2", "speech:whisper"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def check(name: str, mesh: zoo.Mesh, ranks: partitioner.LocalRanks) -> None:
    """Planned, and run by processes in float64; skipped where transformers or torch.export refuse the model."""
    try:
        sample = build(name)
    except ZooError as error:
        pytest.skip(f"no small model: {error}")
    pp, dp, tp = mesh
    options = dict(constraints=Constraints(pp=pp, dp=dp, tp=tp))
    topology = Topology.local(pp * dp * tp)
    try:
        plan = partition(sample.model, topology, sample.inputs, loss=sample.loss, **options)
    except CaptureError:
        sample = without_labels(sample)
        try:
            plan = partition(sample.model, topology, sample.inputs, loss=sample.loss, **options)
        except CaptureError as error:
            pytest.skip(f"torch.export refuses it: {error}")
    run = partitioner.run_local(plan, sample.model, sample.inputs, precision="fp64", ranks=ranks, timeout=240)
    errors = compare(run, run_reference(sample.model, sample.inputs, sample.loss), plan.program)
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}
    if tp > 1:
        assert plan.shares.matmul_sharded >= 0.95


@pytest.mark.parametrize("name", SAMPLE[:2])
def test_two_architectures(name: str, ranks: partitioner.LocalRanks):
    check(name, (1, 1, 2), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE[2:])
def test_architectures_of_other_kinds(name: str, ranks: partitioner.LocalRanks):
    check(name, (1, 1, 2), ranks)


def drawn(seed: str, number: int) -> list[tuple[str, zoo.Mesh]]:
    names = random.Random(f"zoo {seed}").sample(sorted(architectures()), number)
    return [(name, zoo.MESHES[i % len(zoo.MESHES)]) for i, name in enumerate(names)]


# Others every day, and the same for all processes of a run; ZOO_SEED=2026-11-21 draws those of that day again.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), drawn(os.environ.get("ZOO_SEED") or f"{datetime.now(UTC):%Y-%m-%d}", 20))
def test_architectures_drawn_by_chance(name: str, mesh: zoo.Mesh, ranks: partitioner.LocalRanks):
    check(name, mesh, ranks)


# --- small configurations ---------------------------------------------------------------------------------------------


def test_proportions_are_kept():
    config = tiny_config("gemma2")
    assert config.hidden_size == 64 and config.vocab_size == 128
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_each_type_of_layer_stays():
    config = tiny_config("qwen3_next")
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) < 8


def test_what_is_kept_is_as_by_default():
    assert tiny_config("llama", frozenset(("vocab",))).vocab_size == 32000


def test_what_an_error_names_is_as_by_default_and_what_it_asks_for_is_given():
    keep = repaired(frozenset(), "Make sure that `is_decoder=True`; hidden_size (64) must be a multiple of num_heads")
    assert keep == {"is_decoder=True", "hidden_size", "num_heads"}
    config = tiny_config("bert", keep)
    assert config.is_decoder and config.hidden_size == 768 and config.intermediate_size < 3072


def test_what_a_part_does_not_have_it_has_as_the_others_do():
    keep = repaired(frozenset(), "'DbrxAttentionConfig' object has no attribute 'rope_theta'")
    config = tiny_config("dbrx", keep)
    assert config.attn_config.rope_theta == config.rope_parameters["rope_theta"]


def test_rotations_of_each_type_of_layer_are_filled_in_where_there_are_none():
    config = tiny_config("cohere_compass_text", frozenset(("fill",)))
    assert set(config.rope_parameters) == set(config.layer_types)


@pytest.mark.parametrize("name", ["image:perceiver", "ctc:granite_speech5_ctc", "causal:dbrx"])
def test_models_that_take_images_among_others_stacked_frames_or_a_bound_are_built(name: str):
    assert build(name).model.num_parameters() > 0


def test_widths_that_fit_another_part_fit_it_again():
    config = tiny_config("dia", frozenset(("match",)))
    assert config.decoder_config.cross_hidden_size == config.encoder_config.hidden_size == 64
    assert tiny_config("dia").decoder_config.cross_hidden_size == 32


def test_a_default_is_one_of_those_that_are_listed():
    assert tiny_config("xmod", frozenset(("fill",))).default_language == "en_XX"


def test_the_smallest_is_tried_first():
    assert next(iter(attempts())) == frozenset()


def test_models_are_the_same_at_every_call():
    one, other = build("causal:gpt2"), build("causal:gpt2")
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(one.inputs[k], other.inputs[k]) for k in one.inputs)


# --- attention --------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """Attention under a causal mask: of a buffer, of numbers that are made here, or of what is padded as well."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.project = kind, torch.nn.Linear(8, 24)
        self.register_buffer("causal", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(6)
        made = places[:, None] >= places
        mask = {"buffer": self.causal, "made": made, "padded": made & padding[:, None, None]}[self.kind]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("made", {"is causal": 1}, {"causal": 1}),
        ("buffer", {"is causal, a buffer": 1}, {"is causal, a buffer": 1}),
        ("padded", {"computed": 1}, {"computed": 1}),
    ],
)
def test_a_causal_mask_that_is_made_is_seen(kind: str, before: dict[str, int], after: dict[str, int]):
    model = Attention(kind)
    inputs = {"x": torch.randn(2, 6, 8), "padding": torch.ones(2, 6, dtype=torch.bool)}
    captured = capture(model, inputs)
    buffers = dict(model.named_buffers())
    found = masks_of(captured, buffers)
    assert found == before
    assert masks_left(found) == (kind != "padded")
    assert masks_of(normalize(captured), buffers) == after


def test_fused_attention_that_is_taken_apart_is_seen():
    model = Attention("made")
    inputs = {"x": torch.randn(2, 6, 8), "padding": torch.ones(2, 6, dtype=torch.bool)}
    with FusedCalls() as calls:
        model(**inputs)
    graph = capture(model, inputs)
    assert calls.number == fused(graph) == fused(normalize(graph)) == 1
    for node in graph.graph.nodes:
        if "attention" in str(node.target):
            node.target = torch.ops.aten.matmul.default
    assert fused(graph) == 0


# --- results ----------------------------------------------------------------------------------------------------------


def result(name: str, status: str, **more: object) -> dict[str, object]:
    return dict(name=name, mesh=[1, 1, 2], seconds=1.0, status=status, reason="", **more)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    equal = dict(
        errors={"loss": 1e-15}, share=0.97, without_rule={"aten.frobnicate.default": 0.5}, masks={"is causal": 2}
    )
    equal |= dict(masks={"is causal": 2}, fused=1, fused_by_model=2)
    path = tmp_path / "zoo.jsonl"
    lines = result("causal:one", "crashed"), result("causal:one", "equal", **equal), result("image:one", "unbuilt")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"name": "causal:two", "mesh": [1, ')
    return path


def test_the_last_result_counts_and_a_cut_line_does_not(results: Path):
    known = zoo.load(results)
    assert {key: r["status"] for key, r in known.items()} == {
        ("causal:one", (1, 1, 2)): "equal",
        ("image:one", (1, 1, 2)): "unbuilt",
    }


def test_summary_and_page(results: Path, tmp_path: Path):
    counts = summary(zoo.load(results))["1,1,2"]
    assert counts["statuses"] == {"equal": 1, "unbuilt": 1}
    assert counts["exported"] == 1 and counts["model types"] == 1
    assert counts["shares"] == {"all": 1, ">= 99%": 0, ">= 95%": 1, ">= 80%": 1, ">= 50%": 1}
    text = write_docs(zoo.load(results), tmp_path / "zoo.md").read_text()
    assert "| `aten.frobnicate.default` | 1 | 50.0% |" in text
    assert "materialised: causal:one. Fused attention taken apart: causal:one, of 1 compared." in " ".join(text.split())
    assert "| causal:one | 1,1,2 | equal | 1e-15 | 97% | aten.frobnicate.default 50% |  |" in text
