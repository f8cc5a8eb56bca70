"""Hooks on gradients: a plan would leave them out, so they are refused, each by its name or line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Topology, partition
from passes.errors import UnsupportedError


class Model(nn.Module):
    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.hooked = hooked
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.hooked:
                x.register_hook(lambda grad: 2 * grad)
        return x.square().mean()


def of_a_parameter() -> nn.Module:
    model = Model(False)
    model.layers[0].weight.register_hook(lambda grad: grad * 0)
    return model


def after_a_parameter() -> nn.Module:
    model = Model(False)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def of_a_module() -> nn.Module:
    model = Model(False)
    model.layers[1].register_full_backward_hook(lambda module, given, taken: given)
    return model


WAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "in forward": (lambda: Model(True), r"at .*test_hooks.py:\d+ \(x.register_hook\(lambda"),
    "of a parameter": (of_a_parameter, "the parameter 'layers.0.weight' has a hook"),
    "after a parameter": (after_a_parameter, "the parameter 'layers.0.weight' has a hook"),
    "of a module": (of_a_module, "the module 'layers.1' has a backward hook"),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_gradients_are_refused(way: str):
    make, message = WAYS[way]
    inputs: Any = (torch.randn(4, 4),)
    with pytest.raises(UnsupportedError, match=message):
        partition(make(), Topology.local(2), inputs)


def test_without_training_hooks_do_nothing():
    model, inputs = of_a_parameter(), (torch.randn(4, 4),)
    assert partition(model, Topology.local(1), inputs, objective="infer").verify(model, inputs).ok
