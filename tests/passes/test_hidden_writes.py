"""Writes behind a gradient's back: harmless ones are exact, gradients included; the others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.interpret import run_graph

Function = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight * 1.5) + x


def without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(max=0.5)
    return y


def some_of_it(y: Tensor) -> Tensor:
    view = y[1:]
    with torch.no_grad():
        y[:, 0] = 0
    return view.sum() + y.detach()


def one_after_the_other(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2).add_(1)
    return y.sin()


def detached(y: Tensor) -> Tensor:
    y.detach().clamp_(max=0.5)
    return y.sin()


def both(y: Tensor) -> Tensor:
    z = y.detach()
    z.mul_(2)
    return z * y


def filled_before(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, 0] = y[:, 1]
    with torch.no_grad():
        z.clamp_(max=0.2)
    return z * y


def a_copy(y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y.clone()
        z.mul_(2).clamp_(max=0.5)
        z[0].zero_()
    return y * z


def not_read_again(y: Tensor) -> Tensor:
    z = y * 2
    with torch.no_grad():
        z.mul_(2)
        total = z.sum()
    return y * total


def one_of_two(y: Tensor) -> Tensor:
    values, places = y.topk(2)
    with torch.no_grad():
        values.zero_()
    return y.gather(1, places).sum() * y


def of_another_type(y: Tensor) -> Tensor:
    y.detach().to(torch.float32).zero_()
    return y.sin()


def the_same_tensor(y: Tensor) -> Tensor:
    diagonal, rows = y.diagonal(), y * 2
    with torch.no_grad():
        same, too, also = diagonal.flatten(), +y, F.dropout(rows, 0.5, training=False)
        view, copy = y.squeeze(), y.t().contiguous()
    return same * too.sin() * also * view * copy


def read_without_gradients(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, 0] = y[:, 1]
    with torch.no_grad():
        twice = z * 2
    return twice * y


REFUSED = [without_gradients, some_of_it, one_after_the_other, detached, both, filled_before]


@pytest.mark.parametrize("function", REFUSED)
def test_what_is_read_after_a_hidden_write_is_refused(function: Function):
    with pytest.raises(UnsupportedError, match=r"without autograd's knowledge \(.*test_hidden_writes.py:\d+\)"):
        capture(Model(function), (torch.ones(4, 4, dtype=torch.float64),))


def test_what_overlaps_itself_is_refused():
    def summed(y: Tensor) -> Tensor:
        y.unfold(0, 2, 1).add_(1)
        return y

    with pytest.raises(UnsupportedError, match=r"cannot be made functional: .* internal overlap"):
        capture(Model(summed), (torch.ones(4, 4, dtype=torch.float64),))


@pytest.mark.parametrize(
    "function", [a_copy, not_read_again, one_of_two, of_another_type, the_same_tensor, read_without_gradients]
)
def test_what_is_not_read_again_is_exact(function: Function):
    model, x = Model(function), torch.ones(4, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    known = {**captured.constants, **dict(model.named_parameters()), "0": x}
    names = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    (made,) = run_graph(captured.graph, [known[captured.placeholders[name]] for name in names])
    expected, grad = model(x), torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(made, expected)
    (ours,) = torch.autograd.grad(made, [model.weight], grad)
    (theirs,) = torch.autograd.grad(expected, [model.weight], grad)
    torch.testing.assert_close(ours, theirs)
