"""A collective may overwrite or give back its operand only where no view of it is read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import Constraints, Topology, partition, run_threads
from partitioner.runtime.execute.overlap import can_alias_operand

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
VIEWS: dict[Any, tuple[Any, ...]] = {  # operators that give a view, and what they take besides a tensor
    aten.view.default: ([16],),
    aten.reshape.default: ([16],),
    aten._unsafe_view.default: ([16],),
    aten.unsafe_split.Tensor: (2,),
    aten.unsafe_split_with_sizes.default: ([1, 3],),
    aten.unsafe_chunk.default: (2,),
    aten.lift.default: (),
    aten.lift_fresh.default: (),
    aten.split.Tensor: (2,),
    aten.unbind.int: (),
    aten.expand.default: ([2, 4, 4],),
    aten.contiguous.default: (),
    aten.to.dtype: (torch.float32,),
    aten.type_as.default: (torch.zeros(()),),
    aten.detach.default: (),
    aten.real.default: (),
    aten.squeeze.default: (),
}
COPIES: dict[Any, tuple[Any, ...]] = {
    aten.clone.default: (),
    aten._reshape_copy.default: ([16],),
    aten.add.Tensor: (1,),
    aten.mm.default: (torch.eye(4),),
}


def node_of(target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *arguments))


def shares_memory(target: Any, arguments: tuple[Any, ...]) -> bool:
    x = torch.ones(4, 4)
    made = target(x, *arguments)
    first: Tensor = made if isinstance(made, Tensor) else made[0]
    return first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("target", VIEWS, ids=str)
def test_what_gives_a_view_is_known_to(target: Any):
    assert shares_memory(target, VIEWS[target])
    assert can_alias_operand(node_of(target, VIEWS[target]))


@pytest.mark.parametrize("target", COPIES, ids=str)
def test_what_gives_a_copy_is_not_taken_for_a_view(target: Any):
    assert not shares_memory(target, COPIES[target])
    assert not can_alias_operand(node_of(target, COPIES[target]))


class Recording(nn.Module):
    """Two layers over a sequence, and a buffer that is written in place, which has torch spell out the graph: a product
    without a bias becomes an ``_unsafe_view`` of a product of matrices."""

    def __init__(self, statistic: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.statistic = statistic
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.then(self.first(x).tanh())
        self.seen.copy_(torch.maximum(self.seen, self.statistic(h.detach())))
        return (h / (1 + self.seen.abs())).square().mean()


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "of all rows": lambda h: h.flatten(0, 1).amax(0),
    "sorted": lambda h: h.flatten(0, 1).sort(0).values[-1],
    "by sequence": lambda h: h.amax(1).mean(0),
}


@pytest.mark.parametrize("axis", ["dp", "cp", "tp"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_view_that_is_read_behind_a_collective_keeps_its_numbers(statistic: str, axis: str):
    torch.manual_seed(0)
    model, x = Recording(STATISTICS[statistic]).double(), torch.randn(8, 4, 6, dtype=torch.float64)
    constraints = Constraints(**{"pp": 1, "dp": 1, "cp": 1, "tp": 1, axis: 2})
    plan = partition(model, Topology.local(2), (x,), constraints=constraints)
    run = run_threads(plan, model, (x,))
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(run.loss, loss.detach(), rtol=1e-10, atol=0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.buffers["seen"], model.seen)
