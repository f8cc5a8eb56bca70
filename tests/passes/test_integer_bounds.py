"""Upper bounds of integers in a graph, and of the positions that an operator chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partitioner.passes.experts.stacked_modules import _is_below
from partitioner.passes.select.class_counts import find_upper_bound


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.Node:
    graph = make_fx(function, tracing_mode="fake")(x).graph
    (result,) = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    return result


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda x: x.clamp(max=2), 3),
        (lambda x: x.clamp(max=2).flip(0), 3),
        (lambda x: x.clamp(max=-4).relu(), 1),
        (lambda x: x.clamp(max=2).abs(), None),  # of -7 it is 7
        (lambda x: x.clamp(max=2).abs().clamp(max=5), 6),
    ],
)
def test_no_element_reaches_the_upper_bound(function: Callable[[Tensor], Tensor], bound: int | None):
    x = torch.arange(-7, 7)
    assert find_upper_bound(traced(function, x)) == bound
    assert bound is None or int(function(x).max()) < bound


@pytest.mark.parametrize(
    ("function", "is_below"),
    [
        (lambda x: x.argmax(-1), True),
        (lambda x: x.argmax(0), False),
        (lambda x: x.argmax().view(1), False),  # among all 12 elements
        (lambda x: x.argsort(-1), True),
        (lambda x: x.topk(2)[1], True),
    ],
)
def test_a_position_is_less_than_the_number_of_scores(function: Callable[[Tensor], Tensor], is_below: bool):
    assert _is_below(traced(function, torch.randn(4, 3)), 3) is is_below
