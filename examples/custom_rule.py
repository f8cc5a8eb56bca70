"""Your own operator: one line says how it may be sharded.

Without a rule the operator is still computed right, whole on every rank, and the summary says what that costs. With
one, the planner shards it like any other.

    python examples/custom_rule.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partitioner import Constraints, Topology, check_strategies, partition, rule


@torch.library.custom_op("example::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Stands for a fused kernel: ``silu(gate) * up``."""
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


swiglu.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(swiglu(self.gate(x), self.up(x)))


def main() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Layer(256, 1024) for _ in range(4))), (torch.randn(512, 256),)

    def plan_and_report(title: str) -> None:
        plan = partition(
            model, Topology.local(2), inputs, loss=lambda y: y.square().mean(), constraints=Constraints(tp=2)
        )
        print(f"--- {title}\n{plan.summary()}\n")

    plan_and_report("without a rule")

    rule("example::swiglu", "b f, b f -> b f")  # every factor may be sharded

    # Runs every way to shard the operator on simulated ranks, against the whole, gradients too.
    arguments = (torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64))
    assert check_strategies(torch.ops.example.swiglu.default, arguments) == []

    plan_and_report("with a rule")


if __name__ == "__main__":
    main()
