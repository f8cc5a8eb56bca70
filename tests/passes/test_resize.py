"""Graphs for a third batch size that are derived from those for two: they equal captured ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.padding.resize import resize_folded
from partitioner.solve.evaluate.prepared_model import prepare


class Reduced(nn.Module):
    """Two layers, and a loss that ``reduce`` makes of their result ``[batch, positions, 8]``."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.reduce = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), reduce

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.reduce(x)


def fold_at(reduce: Callable[[Tensor], Tensor], positions: int) -> FoldedModel:
    """Return the captured model for ``[4, positions, 8]`` numbers."""
    torch.manual_seed(0)
    return prepare(Reduced(reduce), (torch.zeros(4, positions, 8),)).at(None, None)[0]


def list_graph_texts(model: FoldedModel) -> list[str]:
    return [f"{name}: {node.format_node()}" for name, b in model.blocks.items() for node in b.graph.nodes]


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda y: y.square().mean(),
    "means one by one": lambda y: y.mean(1).square().mean(),
    "a sum by positions": lambda y: y.sum() / y.shape[1],
}


@pytest.mark.parametrize("case", REDUCED)
def test_factors_of_means_are_derived(case: str) -> None:
    main, other, wanted = (fold_at(REDUCED[case], positions) for positions in (24, 8, 12))
    found = resize_folded(main, other, (24, 8, 12))
    assert found is not None
    assert list_graph_texts(found) == list_graph_texts(wanted)


UNEVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "the root of positions": lambda y: y.sum() / y.shape[1] ** 0.5,
    "positions beside a constant": lambda y: y.sum() / (y.shape[1] + 0.5),
    "the square of positions": lambda y: y.sum() / float(y.shape[1]) ** 2,
}


@pytest.mark.parametrize("case", UNEVEN)
def test_other_factors_are_left_to_a_capture(case: str) -> None:
    assert resize_folded(fold_at(UNEVEN[case], 16), fold_at(UNEVEN[case], 4), (16, 4, 9)) is None
