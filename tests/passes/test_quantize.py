"""Fake quantisation inside forward: torch's values and gradients, under every mesh; observers are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

from partitioner import Constraints, Topology, partition
from partitioner.passes.errors import PartitionError
from partitioner.passes.ops.fake_quantize import FORMULAS

WIDTH = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("without_baselines"),
]


class Model(nn.Module):
    """``quantizer`` stands between two layers, the first of which has a quantised weight, too."""

    def __init__(self, quantizer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.first.weight, 0.05, 0, -4, 3)
        return (self.then(self.quantizer(x @ weight)) ** 2).mean()


class Learned(nn.Module):
    def __init__(self, axis: int | None) -> None:
        super().__init__()
        count = 1 if axis is None else WIDTH
        self.axis, self.scale = axis, nn.Parameter(torch.linspace(0.05, 0.1, count))
        self.zero_point = nn.Parameter(torch.linspace(2.3, -1.2, count))

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return torch._fake_quantize_learnable_per_tensor_affine(x, self.scale, self.zero_point, -5, 6, 0.7)
        return torch._fake_quantize_learnable_per_channel_affine(x, self.scale, self.zero_point, self.axis, -5, 6, 0.7)


def calibrated(quantizer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    quantizer(torch.randn(4, 3, WIDTH))
    return quantizer.apply(quantization.disable_observer)


SCALES, PLACES = torch.linspace(0.05, 0.2, WIDTH), torch.arange(WIDTH, dtype=torch.int32) - 4
FLOATING = SCALES * 9
WAYS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "numbers": lambda: lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 3, quant_min=-5, quant_max=6),
    "tensors": lambda: lambda h: torch.fake_quantize_per_tensor_affine(h, SCALES[:1], PLACES[:1], -5, 6),
    "channels": lambda: lambda h: torch.fake_quantize_per_channel_affine(h, SCALES, PLACES, 2, -5, 6),
    "floating places": lambda: lambda h: torch.fake_quantize_per_channel_affine(h, SCALES, FLOATING, 2, -5, 6),
    "learned": lambda: Learned(None),
    "learned by channel": lambda: Learned(2),
    "module": lambda: calibrated(quantization.FakeQuantize()),
    "module by channel": lambda: calibrated(quantization.default_per_channel_weight_fake_quant()),
    "fused": lambda: calibrated(quantization.default_fused_act_fake_quant()),
    "fused by channel": lambda: calibrated(quantization.default_fused_per_channel_wt_fake_quant()),
    "off": lambda: calibrated(quantization.FakeQuantize()).apply(quantization.disable_fake_quant),
}
SLOW = pytest.mark.slow
MESHES: dict[str, dict[str, Any]] = {
    "dp, microbatches": {"pp": 1, "dp": 2, "tp": 1, "microbatch_size": 1},
    "tp": {"pp": 1, "dp": 1, "tp": 2},
    "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatch_size": 2},
}


@pytest.mark.parametrize("mesh", ["dp, microbatches", *(pytest.param(m, marks=SLOW) for m in ("tp", "pp"))])
@pytest.mark.parametrize("way", WAYS)
def test_plans_quantize_as_the_model_does(way: str, mesh: str):
    torch.manual_seed(0)
    model, inputs = Model(WAYS[way]()), (torch.randn(4, 3, WIDTH),)
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(**MESHES[mesh]))
    report = plan.verify(model, inputs)
    assert report.ok, str(report)


@pytest.mark.parametrize("way", ["numbers", "channels", "learned"])
def test_plans_in_float64(way: str):
    model, inputs = Model(WAYS[way]()), (torch.randn(4, 3, WIDTH),)
    assert partition(model, Topology.local(1), inputs, precision="fp64").verify(model, inputs).ok


CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "numbers": ("fake_quantize_per_tensor_affine", (0.1, 3, -5, 6)),
    "tensors": ("fake_quantize_per_tensor_affine", (SCALES[:1], PLACES[:1], -5, 6)),
    "channels": ("fake_quantize_per_channel_affine", (SCALES, PLACES, 1, -5, 6)),
    "floating places": ("fake_quantize_per_channel_affine", (SCALES, FLOATING, 1, -5, 6)),
    "learned": ("_fake_quantize_learnable_per_tensor_affine", (SCALES[:1], FLOATING[:1], -5, 6, 0.7)),
    "learned by channel": ("_fake_quantize_learnable_per_channel_affine", (SCALES, FLOATING, 1, -5, 6, 0.7)),
}


def run_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("way", CALLS)
def test_values_and_gradients_are_those_of_torch(way: str, ties: bool):
    name, given = CALLS[way]
    torch.manual_seed(0)
    x = torch.arange(-32, 32).reshape(8, WIDTH) / 2.0 if ties else torch.randn(64, WIDTH)
    given = tuple(torch.ones_like(a) if ties and isinstance(a, Tensor) and a.is_floating_point() else a for a in given)
    given = tuple(1.0 if ties and isinstance(a, float) and a < 0.5 else a for a in given)
    weight = torch.randn_like(x)
    found = []
    for function in (getattr(torch, name), functools.partial(FORMULAS[name], run_operator)):
        learns = "learnable" in name
        leaves = [a.clone().requires_grad_() if isinstance(a, Tensor) and learns else a for a in given]
        operands = [x.clone().requires_grad_(), *leaves]
        y = function(*operands)
        wanted = [o for o in operands if isinstance(o, Tensor) and o.requires_grad]
        found.append([y, *torch.autograd.grad((y * weight).sum(), wanted)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def estimating(quantizer: _LearnableFakeQuantize) -> nn.Module:
    quantizer.enable_static_estimate()
    return quantizer


OBSERVING: dict[str, Callable[[], nn.Module]] = {
    "moving average": quantization.FakeQuantize,
    "extremes": lambda: quantization.FakeQuantize(quantization.MinMaxObserver, quant_min=0, quant_max=255),
    "by channel": quantization.default_per_channel_weight_fake_quant,
    "fused": quantization.default_fused_act_fake_quant,
    "fused by channel": quantization.default_fused_per_channel_wt_fake_quant,
    "learned, static": lambda: estimating(_LearnableFakeQuantize(quantization.MinMaxObserver)),
}


@pytest.mark.parametrize("way", OBSERVING)
def test_observers_are_refused(way: str):
    with pytest.raises(PartitionError, match=r"(?s)test_quantize.py:\d+.*expected observers that are off"):
        partition(Model(OBSERVING[way]()), Topology.local(1), (torch.randn(4, 3, WIDTH),))
