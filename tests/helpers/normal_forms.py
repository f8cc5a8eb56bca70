"""The normal form of a function, its operators, and its results against those of the function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.model import Captured
from partitioner.passes.normalize.pipeline import normalize


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def normal_form(function: Callable[..., object], *args: Tensor) -> Captured:
    return normalize(capture(Function(function), args))


def operators(captured: Captured) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in captured.graph.nodes if n.op == "call_function"]


def assert_same(function: Callable[..., object], *args: Tensor) -> list[str]:
    """The normal form gives the same numbers; its operators."""
    captured = normal_form(function, *args)
    names = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    constants = [captured.constants[captured.placeholders[n]] for n in names[: len(names) - len(args)]]
    results, expected = run_graph(captured.graph, [*constants, *args]), function(*args)
    expected = expected if isinstance(expected, tuple | list) else (expected,)
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-12, atol=1e-12)
    return operators(captured)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
