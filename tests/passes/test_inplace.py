"""In-place operators become functional ones, and whatever the aliases are, the graph computes what the model does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.passes.capture.functionalize import flatten_program
from partitioner.passes.ir.inplace import remove_inplace


def divided(x: Tensor) -> Tensor:
    y = x + 2
    y /= y.sum(-1, keepdim=True)
    return y * x


def of_topk(x: Tensor) -> Tensor:
    values, places = x.topk(2, dim=-1)
    values /= values.sum(-1, keepdim=True)
    return torch.zeros_like(x).scatter_(1, places, values)


def into_a_slice(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :2] = x[:, :2] * 3
    y[:, 2:] = x[:, 2:].exp()
    return y.sin()


def into_a_row(x: Tensor) -> Tensor:
    y = x * 2
    y[1] = x[0]
    y[2].add_(x[1])
    return y


def put(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[torch.tensor([2, 0, 1, 3])] = x.cos()
    return y


def read_before(x: Tensor) -> Tensor:
    y = x * 2
    z = y + 1
    y.mul_(3)
    return y + z


def twice(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).neg_()
    y.mul_(x)
    return y


def a_view_taken_before(x: Tensor) -> Tensor:
    y = x * 2
    t = y.t()
    y.mul_(3)
    return t.exp()  # sees the change


def a_view_of_the_view(x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    part = row[1:]
    row.add_(1)
    return part.sin() + y.sum()


def through_two_views(x: Tensor) -> Tensor:
    y = x * 2
    y[0][1:].mul_(5)
    return y.exp()


def an_argument_itself(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x + 2, training=False)  # may be its argument
    z = y + 1
    y.mul_(2)
    return y + z


def of_another_type(x: Tensor) -> Tensor:
    y = (x > 0).to(torch.int64)  # may be its argument
    y.add_(2)
    return y * x


SAFE = [divided, of_topk, into_a_slice, into_a_row, put, read_before, twice]
SHARED = [of_another_type, a_view_taken_before, a_view_of_the_view, through_two_views, an_argument_itself]


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale).sum()


def written(program: torch.export.ExportedProgram) -> list[str]:
    calls = [n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [str(t) for t in calls if t._schema.is_mutable]


@pytest.mark.parametrize("function", [*SAFE, *SHARED], ids=lambda f: f.__name__)
def test_the_functional_graph_computes_the_same(function: Callable[[Tensor], Tensor]):
    model = Model(function)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(model, (x,), strict=False)
    assert written(program), "the case has an in-place operator"
    flat = flatten_program(program)
    assert not written(flat)
    results = []
    for run in (model, flat.module(check_guards=False)):
        loss = run(x)
        parameter = dict(run.named_parameters())["scale"]
        (gradient,) = torch.autograd.grad(loss, parameter)
        results.append((loss.detach(), gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", SAFE, ids=lambda f: f.__name__)
def test_what_is_made_for_the_purpose_needs_no_second_trace(function: Callable[[Tensor], Tensor]):
    program = torch.export.export(Model(function), (torch.randn(4, 4, dtype=torch.float64),), strict=False)
    assert remove_inplace(program.graph)
    program.graph.lint()


@pytest.mark.parametrize("function", SHARED, ids=lambda f: f.__name__)
def test_what_others_may_see_is_left_alone(function: Callable[[Tensor], Tensor]):
    program = torch.export.export(Model(function), (torch.randn(4, 4, dtype=torch.float64),), strict=False)
    assert not remove_inplace(program.graph)


def test_dropout_in_place_is_dropout():
    model = Model(lambda x: nn.functional.dropout(x + 1, 0.5, True, inplace=True))
    program = torch.export.export(model, (torch.randn(4, 4, dtype=torch.float64),), strict=False)
    assert remove_inplace(program.graph)
    assert "aten.dropout.default" in {str(n.target) for n in program.graph.nodes}


def test_buffers_and_inputs_are_left_alone():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return x * self.seen

    program = torch.export.export(Counting(), (torch.randn(2),), strict=False)
    before = len(written(program))
    if before:
        assert not remove_inplace(program.graph)
    assert len(written(program)) == before
