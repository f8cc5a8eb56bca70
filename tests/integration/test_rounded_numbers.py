"""Numbers in a model's code are rounded to the type that their tensors have in the plan, and in the judge of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner import Topology, partition

pytestmark = pytest.mark.usefixtures("without_baselines")


def write_by_mask(h: Tensor) -> Tensor:
    h = h * 1.5
    h[h > 0.3] = 0.1
    return h


def write_by_index(h: Tensor) -> Tensor:
    h = h * 1.5
    h[..., 0] = -0.3
    return h


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "written by a mask": write_by_mask,
    "written by an index": write_by_index,
    "new_tensor": lambda h: h * h.new_tensor(0.1),
    "new_tensor of a list": lambda h: h * h.new_tensor([0.1, 0.2, 0.3, 0.4]),
    "tensor of the value's type": lambda h: h * torch.tensor(0.1, dtype=h.dtype),
    "as_tensor of the value's type": lambda h: h * torch.as_tensor([0.1, 0.2, 0.3, 0.4], dtype=h.dtype),
    "asarray of the value's type": lambda h: h * torch.asarray(0.1, dtype=h.dtype),
    "tensor of an array": lambda h: h * torch.tensor(np.array([0.1]), dtype=h.dtype),
    "tensor of torch's default type": lambda h: h * torch.tensor(0.1),
    "tensor of float32": lambda h: h * torch.tensor(0.1, dtype=torch.float32),
    "full_like": lambda h: h * torch.full_like(h, 0.1),
}
TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Model(nn.Module):
    """``function`` behind a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).square().mean()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_verify_rounds_numbers_as_the_plan_does(way: str, dtype: str):
    torch.manual_seed(0)
    model, x = Model(WAYS[way]).to(TYPES[dtype]), torch.randn(8, 4).to(TYPES[dtype])
    report = partition(model, Topology.local(1), (x,)).verify(model, (x,))
    assert report.ok, str(report)


@pytest.mark.parametrize("way", ["written by a mask", "new_tensor", "tensor of the value's type"])
def test_verify_rounds_numbers_to_the_precision_that_is_asked_for(way: str):
    torch.manual_seed(0)
    model, x = Model(WAYS[way]), torch.randn(8, 4)
    report = partition(model, Topology.local(1), (x,), precision="bf16").verify(model, (x,))
    assert report.ok, str(report)
