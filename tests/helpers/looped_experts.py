"""Mixtures of experts whose forward is a loop over experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.model import Captured

H, N, E, K = 8, 12, 4, 2
Loop = Callable[["Mixture", Tensor], Tensor]


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, N, bias=bias), nn.Linear(H, N, bias=bias)
        self.down = nn.Linear(N, H, bias=bias)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * self.scale


class Mixture(nn.Module):
    def __init__(self, loop: Loop, bias: bool = False, classes: int = E) -> None:
        super().__init__()
        self.router = nn.Linear(H, classes, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(E))
        self.loop = loop

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = self.router(x).softmax(-1).topk(K)
        return shares, chosen

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, x.reshape(-1, H)).reshape_as(x)


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def built(loop: Loop, **options: bool | int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Mixture(loop, **options).double(), torch.randn(2, 5, H, dtype=torch.float64)


def check_equal(captured: Captured, model: nn.Module, x: Tensor) -> None:
    """The graph makes what the model makes, and so are all gradients."""
    known: dict[str, Tensor] = dict(model.named_parameters())
    for state in captured.states.values():
        if state.parts:
            known[state.name] = torch.stack([known[part] for part in state.parts])
    known |= {**captured.constants, "0": x.requires_grad_()}
    (made,) = run_graph(
        captured.graph, [known[captured.placeholders[n.name]] for n in captured.graph.nodes if n.op == "placeholder"]
    )
    expected = model(x)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, *model.parameters()]
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(made, leaves, grad, allow_unused=True),
        torch.autograd.grad(expected, leaves, grad, allow_unused=True),
        strict=True,
    ):
        none = [g is None or not g.any() for g in (ours, theirs)]
        assert none[0] == none[1]
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
