"""Folding: repeated modules are one block type, and the calls compute what the model computes."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.passes.ir.model import FoldedModel
from tests.helpers.folding import assert_equal_to_model, folded, paths, targets
from tests.helpers.models import CASES

FAMILIES = [name for name in CASES if not name.endswith("tied")] + ["gpt2-untied", "llama-tied"]

# model -> (block types, calls): embeddings, decoder layers, norm and head, and what they share
SHAPES = {
    "gpt2": (5, 8),
    "llama": (5, 8),
    "mistral": (5, 8),
    "qwen3": (5, 8),
    "bert": (4, 7),
    "vit": (4, 7),
    "transformer-encoder": (3, 6),
    "skip-mlp": (3, 10),
    "bart": (9, 12),
    "t5": (10, 10),
}


def linear(width: int = 8, out: int = 8) -> nn.Linear:
    return nn.Linear(width, out)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def calls_of(model: FoldedModel, block: str) -> list[str]:
    return [c.path for c in model.calls if c.block == block]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_exact(name: str):
    case = CASES[name]
    model = assert_equal_to_model(case.build(), case.inputs(4), case.loss)
    if name in SHAPES:
        assert (len(model.blocks), len(model.calls)) == SHAPES[name]
    assert not {t for t in targets(model) if "dropout" in t or "cross_entropy_loss" in t}


def test_layers_of_a_decoder_are_one_type():
    model = folded(CASES["llama"].build(), CASES["llama"].inputs(2))
    assert calls_of(model, "model.layers.*") == [f"model.layers.{i}" for i in range(4)]
    block = model.blocks["model.layers.*"]
    assert "self_attn_q_proj_weight" in block.states
    assert model.calls[2].states[0].startswith("model.layers.0.")
    assert model.calls[3].inputs[0] == "model.layers.0:0"


def test_rotary_tables_are_shared_and_causal_masks_are_gone():
    model = folded(CASES["llama"].build(), CASES["llama"].inputs(2))
    shared = [c for c in model.calls if c.shared]
    assert [(c.path, len(c.outputs), c.states) for c in shared] == [("shared", 2, ("model.rotary_emb.inv_freq",))]
    nodes = model.blocks["model.layers.*"].graph.nodes
    (attention,) = [n for n in nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert attention.args[3:] == (None, 0.0, True)


def test_masks_of_the_batch_are_shared():
    model = folded(CASES["bert"].build(), CASES["bert"].inputs(2))
    (mask,) = [c for c in model.calls if c.shared]
    assert mask.inputs == ("attention_mask",)
    assert all("shared:0" in c.inputs for c in model.calls if c.block == "bert.encoder.layer.*")


def test_the_encoder_is_a_long_edge():
    model = folded(CASES["bart"].build(), CASES["bart"].inputs(2))
    layers = [c for c in model.calls if c.block == "model.decoder.layers.*"]
    assert len(layers) == 2
    assert all("model.encoder.layers.1:0" in c.inputs for c in layers)


def test_loss_is_with_the_head():
    model = folded(CASES["llama"].build(), CASES["llama"].inputs(2))
    assert model.loss == "lm_head:1"
    assert [(o.path, o.value) for o in model.outputs] == [("loss", "lm_head:1"), ("logits", "lm_head:0")]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = linear(8, 16), linear(16, 16), linear(16, 16), linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = x = F.relu(self.first(x))
        x = F.relu(self.second(x), inplace=True)
        return self.last(F.relu(self.third(x) + skip))


def test_plain_layers_are_calls_with_what_follows_them():
    model = assert_equal_to_model(MLP(), (numbers(4, 8),), square)
    assert paths(model) == ["first", "second", "third", "last"]
    assert model.calls[2].inputs == ("second:0", "first:0")


def test_nested_containers():
    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3)))

    model = assert_equal_to_model(nn.Sequential(linear(4), layers(), layers(), linear(8, 2)), (numbers(4, 4),), square)
    assert paths(model) == ["0", "1.0", "1.1", "1.2", "2.0", "2.1", "2.2", "3"]
    assert len(model.blocks) == 3


class Convolutions(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(3, 8), Convolutions(8, 16)])
        self.middle = Convolutions(16, 32)
        self.widen = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([Convolutions(32, 16), Convolutions(16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), skips.pop()], 1))
        return self.out(x)


def test_skips_of_a_u_net():
    model = assert_equal_to_model(UNet().eval(), (numbers(2, 3, 8, 8),), square)
    assert len(model.calls) > 6
    assert not {t for t in targets(model) if "batch_norm" in t}


class Repeating(nn.Module):
    """One module called three times, and the same weights under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, 8), linear()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.middle(x).tanh()
        return self.head(x), tokens, self.embedding.weight


def test_modules_called_again_and_values_passed_through():
    model = assert_equal_to_model(Repeating(), (torch.arange(6).view(2, 3),), lambda o: o[0].pow(2).sum())
    assert calls_of(model, "middle") == ["middle", "middle@1", "middle@2"]
    assert [o.value for o in model.outputs] == ["head:0", "0", "embedding.weight.value:0"]


class Written(nn.Module):
    """Layers written out in one forward: no module tells them apart."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for weight in self.weights:
            x = x + torch.tanh(F.layer_norm(x, [8]) @ weight)
        return x.pow(2).mean()


def test_repetition_without_modules():
    model = assert_equal_to_model(Written(5), (numbers(4, 8),))
    counts = sorted(model.num_calls(b) for b in model.blocks)
    assert max(counts) >= 4


@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_transformers(batch_first: bool):
    build = partial(nn.Transformer, 16, 2, 2, 2, 32, dropout=0.0, batch_first=batch_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = build()
    model = assert_equal_to_model(transformer, (numbers(2, 5, 16), numbers(2, 5, 16)), square)
    assert len(calls_of(model, "encoder.layers.*")) == len(calls_of(model, "decoder.layers.*")) == 2


def test_no_two_large_random_layers_differ():
    """Dropout draws by place from constants: layers with it stay one type, and their places are not carried between."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    model = folded(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), (numbers(2, 5, 16),), precision="fp32")
    assert len(calls_of(model, "layers.*")) == 4
    assert all(len(c.inputs) == 1 for c in model.calls)


def test_a_model_without_parameters():
    model = assert_equal_to_model(nn.Tanh(), (numbers(2, 2),))
    assert len(model.calls) == 1


def test_constants_are_made_where_they_are_read():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linear() for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers:
                x = layer(x) * torch.arange(8)
            return x.sum(), torch.ones(3)

    model = assert_equal_to_model(Model(), (numbers(2, 8),), lambda o: o[0])
    assert all(len(c.inputs) == 1 for c in model.calls if not c.shared)
    assert len(calls_of(model, "layers.*")) == 2  # the last has the sum, too


def test_an_output_in_the_middle_and_several_outputs():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))

        def forward(self, x: Tensor) -> dict[str, object]:
            states = [x]
            for layer in self.layers:
                states.append(x := layer(x))
            return {"loss": x.sum(), "states": states, "parts": x.split(4, 1)}

    model = assert_equal_to_model(Model(), (numbers(2, 8),))
    assert [o.path for o in model.outputs] == ["loss", *(f"states.{i}" for i in range(4)), "parts.0", "parts.1"]
    assert model.num_calls("layers.*") == 3
