"""What the examples of models print: how each is laid out, and that its plan computes the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from partitioner import Constraints, Topology, partition


def show(model: nn.Module, inputs: dict[str, Any], *asked: Constraints) -> None:
    """Plan ``model`` for four local ranks, freely and as ``asked``; verify each plan in float64."""
    for constraints in (Constraints(), *asked):
        plan = partition(model, Topology.local(4), inputs, constraints=constraints)
        print(plan.summary())
        report = plan.verify(model, inputs)
        print(f"verified in float64 against the model: largest relative error {report.max_error:.1e}\n")
        assert report.ok, report.errors
