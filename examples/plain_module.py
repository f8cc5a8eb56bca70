"""A plain module over four local ranks: plan it, read the plan, prove it, check it, run it.

python examples/plain_module.py
partitioner plan examples/plain_module.py:example --topology local:4 -o out/plain.json
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Topology, partition, run_local


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Gives its loss first: that is what training minimises."""

    def __init__(self, dim: int = 256, num_layers: int = 6, num_classes: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one global batch."""
    torch.manual_seed(0)
    return Classifier(), {"x": torch.randn(64, 256), "label": torch.randint(16, (64,))}


def main() -> None:
    model, inputs = example()
    plan = partition(model, Topology.local(4), inputs)
    print(plan.summary())
    plan.prove()

    report = plan.verify(model, inputs)
    print(f"verified in float64 against the model: largest relative error {report.max_error:.1e}")
    assert report.ok

    result = run_local(plan, model, inputs)  # four processes over Gloo
    expected = model(**inputs)["loss"].item()
    print(f"loss {result.loss:.6f} on {plan.program.world_size} processes, {expected:.6f} on one")


if __name__ == "__main__":
    main()
