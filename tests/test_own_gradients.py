"""Functions that define their own gradient: plans have it, whatever the true one is, or refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from partitioner import Constraints, Topology, partition
from passes.errors import UnsupportedError
from runtime.facts import ProgramFacts


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """The identity, its gradient reversed and scaled; in the newer style."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


class Product(torch.autograd.Function):
    """A matrix product and the sum of its rows, with gradients that are not theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y = x @ weight
        largest = y.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return y, y.sum(-1), largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor, _: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = torch.tanh(x @ weight) * (grad + grad_sum[..., None])
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2) / 3


class Recomputed(torch.autograd.Function):
    """Its backward runs forward again, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            return torch.autograd.grad(torch.sin(again), again, 2 * grad)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


def product(x: Tensor) -> Tensor:
    y, total, largest = Product.apply(x, torch.linspace(-1, 1, 64, dtype=x.dtype).reshape(8, 8) + 0 * x.mean())
    return y + total[..., None] * (largest > 3)[..., None]


FUNCTIONS = {
    "straight through": lambda x: StraightThrough.apply(3 * x),
    "reversed": lambda x: Reversed.apply(x, 0.5),
    "product": product,
    "recomputed": Recomputed.apply,
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "checkpoint without reentry": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.after(self.function(self.before(x))) ** 2).mean()


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_that_the_function_defines(name: str, mesh: tuple[int, int, int]):
    torch.manual_seed(0)
    model, x = Model(FUNCTIONS[name]), torch.randn(4, 3, 8)
    pp, dp, tp = mesh
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(pp=pp, dp=dp, tp=tp))
    report = plan.verify(model, (x,))
    assert report.ok, str(report)


def test_a_function_of_the_model_is_left_as_it_was():
    apply = StraightThrough.apply
    torch.manual_seed(0)
    partition(Model(FUNCTIONS["straight through"]), Topology.local(2), (torch.randn(4, 8),))
    assert StraightThrough.apply == apply


def test_a_gradient_that_is_not_linear_is_refused():
    with pytest.raises(UnsupportedError, match=r"Clipped\.backward is not linear"):
        partition(Model(Clipped.apply), Topology.local(2), (torch.randn(4, 8),))


class Picking(nn.Module):
    """Picks by an index inside of ``torch.vmap``, which torch does by a function with a gradient of its own."""

    def __init__(self, table: Tensor | None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4)) if table is None else table

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        with TransformGetItemToIndex():
            picked = torch.vmap(lambda place: table[place])(torch.arange(3, -1, -1))
        return (self.net(x) * picked).square().mean()


def test_a_function_of_torchs_own_is_opened_where_no_gradient_goes_through_it():
    model, inputs = Picking(torch.arange(4.0)), (torch.randn(4, 4),)
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
    assert plan.verify(model, inputs).ok
    with pytest.raises(UnsupportedError, match="runs a function of its own"):
        partition(Picking(None), Topology.local(2), inputs)


class Reversible(torch.autograd.Function):
    """Keeps what it returns alone: backward runs the layer again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.no_grad():
            y = x + layer(x.flip(-1))
        ctx.save_for_backward(x)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.layer.training, "call model.train() first"
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x.flip(-1)).backward(grad)
        return grad + x.grad, None


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(self.first(x), self.layer).square().mean()


def test_a_backward_that_gives_weights_gradients_as_a_side_effect_is_refused():
    with pytest.raises(UnsupportedError, match=r"Reversible\.backward runs layers again and calls backward\(\)"):
        partition(Reversing(), Topology.local(2), (torch.randn(4, 8),))
    with pytest.raises(UnsupportedError, match=r"Reversible\.backward does not run: call model\.train\(\) first; the"):
        partition(Reversing().eval(), Topology.local(2), (torch.randn(4, 8),))


class Gelu(torch.autograd.Function):
    """An activation that keeps its operand alone, as Bloom's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1 + 0.045 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.8 * x * (1 + 0.045 * x * x))
        return (0.5 * x * ((1 - tanh * tanh) * (0.8 + 0.108 * x * x)) + 0.5 * (1 + tanh)) * grad


def test_forward_computes_nothing_for_the_gradient_and_keeps_what_the_function_kept():
    """What carries a gradient is zero: it is taken out where forward and backward are graphs of their own."""
    torch.manual_seed(0)
    model, x = Model(Gelu.apply), torch.randn(4, 3, 8)
    plan = partition(model, Topology.local(1), (x,), constraints=Constraints(recompute="none"))
    calls = [call for stage in ProgramFacts(plan.program).stages for call in stage]
    blocks = {call.data.block: ProgramFacts(plan.program).differentiated(call.data) for call in calls}
    forward = [node for d in blocks.values() for node in d.forward.graph.nodes if node.op == "call_function"]
    backward = [node for d in blocks.values() for node in d.backward.graph.nodes if node.op == "call_function"]
    tanh = [torch.ops.aten.tanh.default]
    assert [n.target for n in forward if n.target in tanh] == tanh == [n.target for n in backward if n.target in tanh]
    assert not [n for n in forward if n.target == torch.ops.aten.sub.Tensor]
    hidden = 4 * 3 * 8 * 4
    assert sum(call.kept_bytes for call in calls) <= 2 * hidden + 64  # the operand, and what the last layer reads
    assert plan.verify(model, (x,)).ok
