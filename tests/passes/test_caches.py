"""Generation caches: left out where nothing else depends on them, and made as the model does where something does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from tests.helpers.models import CASES, keep_layers

pytestmark = pytest.mark.usefixtures("without_baselines")

DIM, LENGTH = 8, 6


class Cache:
    """What a layer is given last, behind what it was given before; no container that torch knows."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def update(self, x: Tensor, layer: int) -> Tensor:
        self.kept[layer] = torch.cat([self.kept.get(layer, torch.tensor([], dtype=x.dtype)), x], dim=-2)
        return self.kept[layer]


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.net = index, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        q = k = self.net(x)
        if cache is not None:
            k = cache.update(k, self.index)
        return x + nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


class Caching(nn.Module):
    """``depends``: what is masked only where there is no cache; nothing, padding, or no position at all."""

    def __init__(self, depends: str = "", layers: int = 4) -> None:
        super().__init__()
        self.config, self.depends = SimpleNamespace(use_cache=True), depends
        self.layers = nn.ModuleList(Layer(i) for i in range(layers))
        self.registered = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache, mask = Cache() if self.config.use_cache else None, None
        if cache is None and self.depends == "padding":
            mask = (x[..., 0] > -0.5)[:, None, :].expand(-1, LENGTH, -1)
        if cache is None and self.depends == "nothing":
            places = torch.arange(LENGTH)
            if bool((places[:, None] - places > LENGTH).any()):
                mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, cache, mask)
        return {"loss": (x * self.registered).square().mean(), "x": x, "cache": cache}


def samples(number: int = 4) -> Tensor:
    return torch.randn(number, LENGTH, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depends", ["", "padding", "nothing"])
def test_a_plan_is_equal_whether_anything_depends_on_caches_or_not(depends: str):
    model, inputs = Caching(depends), (samples(),)
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
    assert plan.verify(model, inputs).ok
    assert any("makes generation caches" in note for note in plan.notes) == (depends == "padding")
    assert any("caches are left out" in note for note in plan.notes) == (depends != "padding")
    assert model.config.use_cache


def test_packed_samples_are_told_apart_only_where_a_model_makes_no_caches():
    case = CASES["llama"]
    for cached in (False, True):
        model, inputs = keep_layers(case.build(), 1), dict(case.inputs(4))
        length = inputs["input_ids"].shape[1]
        inputs["position_ids"] = torch.arange(length // 2).repeat(2).expand(4, -1)
        model.config.use_cache = cached
        plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
        assert plan.verify(model, inputs).ok
        assert any("makes generation caches" in note for note in plan.notes) == cached


def test_caches_are_looked_at_with_few_samples_and_leave_nothing_in_the_graph():
    with torch.device("meta"):
        model = Caching("nothing")
    with_caches = capture(model, (samples().to("meta"),), global_batch=1 << 20)
    model.config.use_cache = False
    without = capture(model, (samples().to("meta"),), global_batch=1 << 20)
    assert [n.target for n in with_caches.graph.nodes] == [n.target for n in without.graph.nodes]
