"""Five lengths from 64 to 512 and a last smaller batch under one layout, for models of several kinds, over Gloo.

Losses, every gradient, evaluations and the weights after the steps are those of one process in float64. Experts
multiply by ``batched_mm``, because grouped products have no float64 on CPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from partitioner import Constraints, Evaluate, LocalRanks, Shapes, Topology, partition
from tests.helpers.models import float64
from tests.helpers.shape_training import MESHES, Trained, train_alone, train_rank

pytestmark = [pytest.mark.usefixtures("without_baselines"), pytest.mark.slow]

LENGTHS = (64, 128, 256, 384, 512)
# Samples and positions of the steps: each planned length, shorter texts, and the last smaller batch.
STEPS = ((4, 512), (4, 64), (4, 300), (4, 100), (3, 200))
VOCAB, IGNORED, CLOSE = 64, -100, 1e-9

_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    use_cache=False,
)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")
_ENCODER = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", _DECODER),
    "qwen3": ("AutoModelForCausalLM", _DECODER | dict(head_dim=8)),
    "mixtral": ("AutoModelForCausalLM", _DECODER | _EXPERTS),
    "bert": ("AutoModelForMaskedLM", _ENCODER | dict(vocab_size=VOCAB, max_position_embeddings=520)),
    "t5": (
        "AutoModelForSeq2SeqLM",
        dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
        | dict(dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, use_cache=False),
    ),
    "vit": ("AutoModelForImageClassification", _ENCODER | dict(image_size=16, patch_size=4, num_labels=8)),
}


def build(family: str) -> nn.Module:
    auto, options = FAMILIES[family]
    with float64():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **options)
        model: nn.Module = getattr(transformers, auto).from_config(config)
        return model.double()


def draw(family: str, samples: int, positions: int, seed: int) -> dict[str, Tensor]:
    """A batch of texts, some of whose labels are ignored; of images, which have one size, for a vision model."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        pixels = torch.randn((samples, 3, 16, 16), generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(8, (samples,), generator=generator)}
    tokens = torch.randint(4, VOCAB, (samples, positions), generator=generator)
    labels = tokens.masked_fill(torch.rand((samples, positions), generator=generator) < 0.2, IGNORED)
    mask = {"attention_mask": torch.ones_like(tokens)} if family in ("bert", "t5") else {}
    return {"input_ids": tokens, "labels": labels} | mask


def draw_all(family: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    return [draw(family, *shape, seed) for seed, shape in enumerate(STEPS)], draw(family, 3, 90, 9)


def train_over_gloo(plan: str, family: str) -> Trained:
    return train_rank(plan, build(family), *draw_all(family))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2 tp2", "cp2", "dp2 zero3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_train_as_in_one_process(family: str, mesh: str, tmp_path: Path):
    if family == "vit" and mesh == "cp2":
        pytest.skip("images have no sequence to divide")
    axes = MESHES[mesh]
    shapes = Shapes(batch=(2, 4)) if family == "vit" else Shapes(batch=4, length=LENGTHS)
    with float64():
        plan = partition(
            build(family),
            Topology.local(axes["dp"] * axes["tp"] * axes["pp"] * axes.get("cp", 1)),
            draw(family, 4, 512, 0),
            constraints=Constraints(**axes),  # type: ignore[arg-type]
            precision="fp64",
            shapes=shapes,
            programs={"eval": Evaluate()},
        )
    assert plan.padding is not None
    assert plan.padding.fewer == ""
    assert plan.padding.shorter == ("the inputs have no dim of positions" if family == "vit" else "")
    plan.prove()
    plan.save(tmp_path / "plan.json")
    with LocalRanks(plan.world_size) as ranks:
        first = ranks.call(train_over_gloo, str(tmp_path / "plan.json"), family)[0]
    given = draw_all(family)
    with float64():
        alone = train_alone(build(family), *given)
    assert first.losses == pytest.approx(alone.losses, rel=CLOSE)
    assert first.evaluations == pytest.approx(alone.evaluations, rel=CLOSE)
    assert alone.gradients
    for name, gradient in alone.gradients.items():
        assert (first.gradients[name] - gradient).abs().max() < CLOSE, name
    for name, weight in alone.weights.items():
        if name in first.weights:
            assert (first.weights[name] - weight).abs().max() < CLOSE, name
