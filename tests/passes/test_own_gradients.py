"""Functions that define their own gradient: plans have it, whatever the true one is, or refuse it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from partitioner import Constraints, Engine, Topology, partition, prepare
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.linearity import NotAffine
from partitioner.passes.trace import autograd_functions
from partitioner.passes.trace.transpose import transpose_backward
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.program.analysis import ProgramFacts
from tests.example_counts import examples

pytestmark = pytest.mark.usefixtures("without_baselines")


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
    with pytest.raises(UnsupportedError, match="contains a function"):
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
    with pytest.raises(
        UnsupportedError, match=r"Reversible\.backward raises an error: call model\.train\(\) first; the"
    ):
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


# --- a backward of one tensor, however it is written ------------------------------------------------------------------


def function(backward: Any, forward: Any = None) -> Any:
    """A function that saves its operand, with the given ``backward(operand, gradient)``."""

    def saved(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh() if forward is None else forward(x)

    def own(ctx: Any, grad: Tensor) -> Any:
        return backward(*ctx.saved_tensors, grad)

    methods = {"forward": staticmethod(saved), "backward": staticmethod(own)}
    return type("Own", (torch.autograd.Function,), methods).apply


def masked(x: Tensor, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[x < 0] = 0
    return grad


def swapped(x: Tensor, grad: Tensor) -> Tensor:
    made = torch.empty_like(grad)
    made[..., :4] = grad[..., 4:]
    made[..., 4:] = 2 * grad[..., :4]
    return made


def added_to_a_buffer(x: Tensor, grad: Tensor) -> Tensor:
    made = x.clone()
    made.zero_()
    return made.add_(grad).mul_(0.5)


def run_again(x: Tensor, grad: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = nn.functional.layer_norm(x, (8,))
    return torch.autograd.grad(y, x, grad)


def attention_run_again(x: Tensor, grad: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return torch.autograd.grad(y, x, grad)


def stacked(x: Tensor, grad: Tensor) -> Tensor:
    """Larger than the operand: autograd adds it up."""
    return torch.stack([grad, 2 * grad])


class Scale:
    number = 0.25
    tensor = torch.tensor(3.0)


LINEAR = {
    "mask assigned": masked,
    "masked fill": lambda x, g: g.masked_fill(x < 0, 0.0),
    "where": lambda x, g: torch.where(x > 0, g, 0.0),
    "times a mask": lambda x, g: g * (x.abs() < 0.5),
    "detach": lambda x, g: g.detach() * 0.5,
    "data": lambda x, g: g.data * 0.5,
    "copy in place": lambda x, g: g.clone().mul_(0.5).neg_(),
    "in place": lambda x, g: g.mul_(0.5),
    "into an empty tensor": swapped,
    "into zeros": lambda x, g: torch.zeros_like(g).index_add_(-1, torch.arange(7, -1, -1), g),
    "into a copy": added_to_a_buffer,
    "zeros": lambda x, g: torch.zeros_like(g),
    "none": lambda x, g: None,
    "einsum": lambda x, g: torch.einsum("bsi,ij->bsj", g, torch.eye(8, dtype=g.dtype).roll(1, 0)),
    "a cast": lambda x, g: (2 * g.float()).to(g.dtype),
    "transposed": lambda x, g: (g.transpose(-1, -2) * 2).transpose(-1, -2),
    "sums": lambda x, g: g.flip(-1).cumsum(-1) + g.sum(-1, keepdim=True),
    "complex": lambda x, g: torch.fft.ifft(torch.fft.fft(g) * torch.exp(1j * torch.arange(8))).real,
    "of its own": lambda x, g: torch.ops.aten._softmax_backward_data(g, x.softmax(-1), -1, g.dtype),
    "larger": stacked,
    "a layer run again": run_again,
    "attention run again": attention_run_again,
    "numbers of a class": lambda x, g: g * Scale.number * Scale.tensor,
}
AFFINE = {
    "sign": lambda x, g: g + 0.01 * x.sign(),
    "ones": lambda x, g: torch.ones_like(g),
    "nothing of the gradient": lambda x, g: 0.1 * x,
    "filled": lambda x, g: g.masked_fill(x < 0, 1.5),
    "assigned": lambda x, g: masked(x, g).index_fill_(-1, torch.tensor([1]), 0.5),
    "numbers of a class": lambda x, g: g * Scale.number + Scale.tensor * x,
}


class Branches(nn.Module):
    """Every function behind a layer of its own, so that each has gradients of its own."""

    def __init__(self, functions: dict[str, Any]) -> None:
        super().__init__()
        self.functions = functions
        self.before = nn.ModuleDict({name.replace(" ", "_"): nn.Linear(8, 8) for name in functions})
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.functions.items(), self.before.values(), strict=True)
        made = [f(layer(x), self.weight) if "weight" in name else f(layer(x)) for (name, f), layer in pairs]
        return (sum((i + 1) * y for i, y in enumerate(made)) ** 2).mean()


ONE = {"pp": 1, "dp": 1, "tp": 1}
MESHES = [
    {"pp": 1, "dp": 2, "tp": 1, "microbatch_size": 1},
    {"pp": 2, "dp": 1, "tp": 2, "microbatch_size": 2, "recompute": "full"},
]


def check(model: nn.Module, *, meshes: Any = (ONE,), loss: Any = None) -> None:
    """Plans for the model compute what the model does, its gradients included."""
    inputs = (torch.randn(4, 3, 8),)
    prepared = prepare(model, inputs, loss=loss)
    for mesh in meshes:
        ranks = mesh["pp"] * mesh["dp"] * mesh["tp"]
        plan = partition(prepared, Topology.local(ranks), constraints=Constraints(**mesh))
        report = plan.verify(model, inputs, loss=loss)
        wrong = {name: error for name, error in report.errors.items() if error > report.tolerance}
        assert report.ok, (mesh, wrong)


def some(backwards: dict[str, Any], parts: int, part: int) -> dict[str, Any]:
    """The part of that number, of as many equal parts of ``backwards``."""
    return dict([*backwards.items()][part::parts])


@pytest.mark.parametrize(
    ("backwards", "mesh"),
    [
        *(pytest.param(some(LINEAR, 4, part), MESHES[0], id=f"linear {part}") for part in range(4)),
        *(pytest.param(AFFINE, mesh, id=f"affine {number}") for number, mesh in enumerate(MESHES)),
        pytest.param(LINEAR, MESHES[1], id="linear, in stages", marks=pytest.mark.slow),
    ],
)
def test_a_backward_is_kept_however_it_is_written(backwards: dict[str, Any], mesh: dict[str, Any]):
    torch.manual_seed(0)
    check(Branches({name: function(backward) for name, backward in backwards.items()}), meshes=[mesh])


NONLINEAR = {
    "sign": lambda x, g: 0.01 * g.sign(),
    "round": lambda x, g: (g * 1024).round() / 1024,
    "floor": lambda x, g: g.floor(),
    "ceil": lambda x, g: g.ceil(),
    "trunc": lambda x, g: g.trunc(),
    "frac": lambda x, g: g.frac(),
    "fmod": lambda x, g: torch.fmod(g, 0.1),
    "remainder": lambda x, g: g % 0.1,
    "floor division": lambda x, g: g // 0.1,
    "rounded division": lambda x, g: torch.div(g, 0.1, rounding_mode="trunc"),
    "integers": lambda x, g: (g * 1000).int().to(g.dtype),
    "comparison": lambda x, g: (g > 0).to(g.dtype),
    "mask of itself": lambda x, g: g * (g > 0),
    "clamp": lambda x, g: g.clamp(-1e-3, 1e-3),
    "norm": lambda x, g: g / g.norm(),
    "largest": lambda x, g: g / g.abs().max(),
    "square": lambda x, g: g * g,
    "exponential": lambda x, g: g.exp(),
    "sort": lambda x, g: g.sort(-1).values,
    "top": lambda x, g: torch.zeros_like(g).scatter(-1, g.topk(2, -1).indices, 1.0),
    "copysign": lambda x, g: torch.copysign(x, g),
    "heaviside": lambda x, g: torch.heaviside(g, x),
    "not a number": lambda x, g: torch.nan_to_num(g),
    "bits": lambda x, g: (g.view(torch.int32) & -65536).view(torch.float32),
    "quantized": lambda x, g: torch.fake_quantize_per_tensor_affine(g, 0.01, 0, -128, 127),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_backward_that_is_not_linear_is_refused(name: str):
    with pytest.raises(UnsupportedError, match=r"Own\.backward is not linear in the gradient .* reads it\), so that"):
        partition(Model(function(NONLINEAR[name])), Topology.local(1), (torch.randn(4, 3, 8),))


def changes_what_is_saved(x: Tensor, grad: Tensor) -> Tensor:
    return grad * x.add_(1)


def sets_a_gradient(x: Tensor, grad: Tensor) -> Tensor:
    x.grad = grad
    return grad


REFUSED = {
    "decides by the norm": (lambda x, g: g if g.norm() < 1 else g / g.norm(), "branches on the values of tensors"),
    "asks for a number": (lambda x, g: g / max(1.0, g.abs().max().item()), "branches on the values of tensors"),
    "draws": (lambda x, g: g * (torch.rand_like(g) > 0.5), r"draws random numbers .*; draw them in forward"),
    "drops out": (lambda x, g: nn.functional.dropout(g), "draws random numbers"),
    "writes": (changes_what_is_saved, "changes a tensor in place that it did not create"),
    "sets a gradient": (sets_a_gradient, "sets the gradient of a tensor as a side effect"),
    "returns too much": (lambda x, g: (g, g), "raises an error: it returns 2 gradients for 1 arguments"),
    "of another shape": (lambda x, g: g.sum(), r"raises an error: it returns a gradient of shape \(\) for one of"),
    "fails": (lambda x, g: g.missing, r"cannot be traced \(.*no attribute 'missing'\)"),
    "leaves torch": (lambda x, g: torch.from_numpy(g.numpy()), r"cannot be traced \(.*numpy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_that_does_more_than_return_gradients_is_refused(name: str):
    backward, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        partition(Model(function(backward)), Topology.local(1), (torch.randn(4, 3, 8),))


# --- losses that are injected -----------------------------------------------------------------------------------------


class Injected(torch.autograd.Function):
    """Its result is the first argument; the second, an auxiliary loss, gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class InjectedScaled(Injected):
    scale = torch.tensor(0.7)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return grad, InjectedScaled.scale.to(loss.dtype) * torch.ones_like(loss)


class InjectedAsOne(torch.autograd.Function):
    """Its gradient for a scalar has a dim of one; what it keeps are no tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones(1, dtype=ctx.dtype, device=grad.device) if ctx.required else None


class Decayed(torch.autograd.Function):
    """A product whose weight decays by its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.einsum("bsi,bsj->ij", grad, x) + 0.01 * weight


class Gate(nn.Module):
    def __init__(self, inject: Any, of: Any = lambda scores: scores.square().mean()) -> None:
        super().__init__()
        self.layer, self.gate, self.inject, self.of = nn.Linear(8, 8), nn.Linear(8, 4), inject, of

    def forward(self, x: Tensor) -> Tensor:
        return self.inject(self.layer(x), self.of(self.gate(x)))


class Gates(nn.Module):
    """All ways to inject, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scaled = Gate(Injected.apply), Gate(InjectedScaled.apply)
        self.one = Gate(InjectedAsOne.apply, lambda scores: scores.logsumexp(-1).mean())
        self.tokens = Gate(Injected.apply, lambda scores: scores.sigmoid())  # of every token, and not summed
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(self.one(self.scaled(self.mean(x))))
        x = Injected.apply(Decayed.apply(x, self.weight), self.weight.abs().sum())
        return x.square().mean()


@pytest.mark.parametrize("mesh", [{"pp": 1, "dp": 2, "tp": 2}, *MESHES], ids=["dp tp", "dp", "pp tp"])
def test_an_injected_loss_counts_once_on_any_mesh(mesh: dict[str, Any]):
    torch.manual_seed(0)
    check(Gates(), meshes=[mesh])


class Stopped(torch.autograd.Function):
    """Has no gradient, and autograd goes on through it all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


PARTS = {
    "of the loss": lambda y, x: y,
    "through a sign": lambda y, x: x * y.sign(),
    "through a function without a gradient": lambda y, x: x + Stopped.apply(y),
    "through two of them": lambda y, x: x + Stopped.apply(Stopped.apply(y)),
    "by itself": lambda y, x: Injected.apply(y, y.mean()),
    "detached": lambda y, x: x + y.detach(),
    "its shape": lambda y, x: x + torch.zeros_like(y),
    "its type": lambda y, x: x.type_as(y) + x.expand_as(y),
    "compared": lambda y, x: x * (y > 0),
    "left out": lambda y, x: x,
}


@pytest.mark.parametrize("name", PARTS)
def test_an_injected_loss_counts_where_the_result_takes_part_in_the_loss(name: str):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gated = nn.Linear(8, 8), Gate(Injected.apply)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return PARTS[name](self.gated(x), x).square().mean()

    torch.manual_seed(0)
    check(Part())


def test_a_loss_can_itself_be_injected_into_and_returned_besides():
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            loss = Injected.apply(self.layer(x).square().mean(), self.gate(x).square().mean())
            return {"loss": loss, "twice": 2 * loss}

    torch.manual_seed(0)
    check(Returning(), meshes=MESHES[:1])
    check(Gate(Injected.apply), loss=lambda y: Injected.apply(y.square().mean(), y.mean()), meshes=MESHES[:1])


class GatedLayers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate(Injected.apply) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def test_layers_that_are_alike_each_inject_a_loss_and_are_traced_once(monkeypatch: pytest.MonkeyPatch):
    traced = []

    def counted(*args: Any, **options: Any) -> Any:
        traced.append(args)
        return transpose_backward(*args, **options)

    monkeypatch.setattr(autograd_functions, "transpose_backward", counted)
    torch.manual_seed(0)
    check(GatedLayers(6), meshes=MESHES)
    assert len(traced) < 6


def test_an_injected_loss_has_no_part_in_a_loss_scale_and_steps_accumulate():
    torch.manual_seed(0)
    model, inputs = Gates(), (torch.randn(4, 3, 8),)
    plan = partition(model, Topology.local(1), inputs, precision="fp16", constraints=Constraints(microbatch_size=2))
    engine = Engine(plan.program, model, communicator=ThreadWorld(1).communicator(0), loss_scale=64.0)
    engine.step(inputs)
    engine.step(inputs, accumulate=True)
    for _ in range(2):
        model(*inputs).backward()
    expected = dict(model.named_parameters())
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None and expected[name].grad is not None
        torch.testing.assert_close(parameter.grad.float(), expected[name].grad, atol=3e-3, rtol=2e-2)


# --- how functions are written ----------------------------------------------------------------------------------------


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Transformable(torch.autograd.Function):
    """In the newer style, with all that torch.func asks for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.scale + 0.1 * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, _: Any) -> Tensor:
        return change


class ByVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


def doubled(backward: Any) -> Any:
    @functools.wraps(backward)
    def twice(ctx: Any, *grads: Tensor) -> Any:
        return 2 * backward(ctx, *grads)

    return twice


class Decorated(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @custom_bwd(device_type="cpu")
    @once_differentiable
    @doubled
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Reversed.apply(3 * grad, 0.5)


class Weighted(torch.autograd.Function):
    """Returns what is asked for alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: int = 2) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x * weight * scale + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad
        of_x = ctx.scale * grad * weight if asked[0] else None
        of_weight = (2 * grad * x).sum((0, 1)) if asked[1] else None
        return of_x, of_weight, 3 * grad if asked[2] else None, None


class Several(torch.autograd.Function):
    """Two results with a gradient, one without, and a number; gradients may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return 2 * x, x + z, largest, 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, largest: Any, number: Any) -> Any:
        assert largest is None and number is None
        of_x = None if first is None else 5 * first
        if second is not None:
            of_x = 0.5 * second if of_x is None else of_x + 0.5 * second
        return of_x, None if second is None else 2 * second


class ComplexNumbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return 2 * z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return (1 + 2j) * grad.conj() + 0.1 * z


def in_place(x: Tensor) -> Tensor:
    x = 1.0 * x
    y = InPlace.apply(x)
    InPlace.apply(x[..., :4])
    return x + y


def several(x: Tensor) -> Tensor:
    first, second, largest, number = Several.apply(x, x.flip(-1))
    only_first, only_second = Several.apply(x, x.exp())[0], Several.apply(x, x.cos())[1]
    return number * first + second * (largest > 3)[..., None] + only_first + only_second


WRITTEN = {
    "in place": in_place,
    "for transforms": lambda x: Transformable.apply(x) * Transformable.apply(x, scale=3.0),
    "vjp": ByVjp.apply,
    "decorated": Decorated.apply,
    "weight by keyword": lambda x, weight: Weighted.apply(x, weight, scale=3, bias=x),
    "weight alone": lambda x, weight: x * Weighted.apply(x.detach(), weight, torch.ones(8)),
    "several": several,
    "complex": lambda x: ComplexNumbers.apply(torch.complex(x, x.flip(-1))).abs(),
    "list": lambda x: x + function(lambda x, g: 5 * g, forward=lambda x: [2 * x])(x)[0],
}


@pytest.mark.parametrize("mesh", MESHES, ids=["in one stage", "in stages"])
def test_gradients_are_kept_however_the_function_is_written(mesh: dict[str, Any]):
    torch.manual_seed(0)
    check(Branches(WRITTEN), meshes=[mesh])


class NoneIsNotZero(Several):
    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, largest: Any, number: Any) -> Any:
        of_first = 0 if first is None else 5 * first
        return of_first + (0 if second is None else second), None if second is None else torch.ones_like(second)


def test_a_backward_that_does_something_else_for_none_than_for_zero_is_refused():
    model = Model(lambda x: NoneIsNotZero.apply(x, x)[0])
    with pytest.raises(UnsupportedError, match="treats gradients that are None differently from zero"):
        partition(model, Topology.local(1), (torch.randn(4, 3, 8),))


def test_a_function_inside_of_vmap_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Transformable\.apply is called inside a transform of torch\.func"):
        partition(Model(torch.vmap(Transformable.apply)), Topology.local(1), (torch.randn(4, 3, 8),))


# --- transposing without a model --------------------------------------------------------------------------------------

_X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
STEPS: dict[str, Any] = {
    "times": lambda g: g * _X,
    "matrix": lambda g: g @ (_X.T @ _X),
    "flip": lambda g: g.flip(0),
    "fft": lambda g: torch.fft.rfft(g, n=4).real[..., [0, 1, 2, 1]],
    "mask": lambda g: masked(_X, g),
    "pad": lambda g: nn.functional.pad(g, (1, 0))[:, :-1],
    "pool": lambda g: nn.functional.avg_pool1d(g, 3, 1, 1),
    "gather": lambda g: g.gather(1, (4 * _X.abs()).long().clamp(0, 3)),
    "scatter": lambda g: torch.zeros_like(g).scatter_add(1, torch.zeros(3, 4, dtype=torch.long), g),
    "lower": lambda g: g.tril() - g.mean(),
    "in place": lambda g: g.clone().sub_(g.sum(0)).t().contiguous().t(),
    "convolution": lambda g: nn.functional.conv1d(g[None], _X[:3, :3, None].expand(3, 3, 3), padding=1)[0],
    "plus": lambda g: g + 0.3 * _X,
    "minus from one": lambda g: 1 - g,
    "fill": lambda g: g.masked_fill(_X > 0.5, 2.0),
    "abs": lambda g: g.abs(),
    "round": lambda g: g.round(),
    "largest": lambda g: g - g.amax(1, keepdim=True),
    "squared": lambda g: g * g,
}
_NONLINEAR_STEPS = ("abs", "round", "largest", "squared")


@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_a_transpose_and_a_constant_make_up_any_affine_backward(names: list[str]):
    def backward(grad: Tensor) -> list[Tensor]:
        for name in names:
            grad = STEPS[name](grad)
        return [grad]

    like = [torch.empty(3, 4, dtype=torch.float64)]
    if any(name in _NONLINEAR_STEPS for name in names):
        with pytest.raises(NotAffine):
            transpose_backward(backward, like, like)
        return
    made = transpose_backward(backward, like, like)
    grad, change = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (moved,), constants = made([change])
    constant = constants.get(0, torch.zeros_like(grad))
    torch.testing.assert_close(constant, backward(torch.zeros_like(grad))[0])
    torch.testing.assert_close((moved * grad).sum(), (change * (backward(grad)[0] - constant)).sum())
