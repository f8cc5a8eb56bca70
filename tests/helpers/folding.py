"""What the tests of capture, normal form and folding share: a model's way to its folded form, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.interpret import run_folded
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.ir.verify import check_model
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.shard.fold import fold
from tests.helpers.models import Case, Inputs, float64, run

Loss = Callable[[Any], Tensor]


def folded(model: nn.Module, inputs: Any, **options: Any) -> FoldedModel:
    result = fold(normalize(capture(model, inputs, **options)))
    check_model(result)
    return result


def double(inputs: Any) -> Any:
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)


def paths(model: FoldedModel) -> list[str]:
    return [call.path for call in model.calls]


def targets(model: FoldedModel) -> set[str]:
    return {str(n.target) for b in model.blocks.values() for n in b.graph.nodes if n.op == "call_function"}


def assert_equal_to_model(model: nn.Module, inputs: Inputs, loss: Loss | None = None, **options: Any) -> FoldedModel:
    """Outputs, loss and gradients of the folded model are the unmodified model's, in float64."""
    model, inputs = model.double(), double(inputs)
    result = folded(model, inputs, loss=loss, precision="fp64", **options)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    states = {
        name: tensors[name].detach().clone().requires_grad_(state.requires_grad)
        for name, state in result.states.items()
        if name in tensors
    }
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    values = run_folded(result, states, {i.value: leaf for i, leaf in zip(result.inputs, leaves, strict=True)})
    with float64():
        output = run(Case("", lambda: model, lambda _: inputs), model, inputs)
    _assert_outputs(result, values, output)
    if result.loss is not None:
        values[result.loss].backward()
        model.zero_grad()
        expected = loss(output) if loss is not None else _loss_of(output)
        torch.testing.assert_close(values[result.loss], expected, rtol=1e-12, atol=1e-12)
        expected.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(states[name].grad, parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    return result


def _assert_outputs(result: FoldedModel, values: dict[str, Tensor], output: Any) -> None:
    for leaf, expected in zip(result.outputs, tree_leaves(output), strict=True):
        if leaf.value is None:
            assert leaf.constant == expected, leaf.path
        else:
            torch.testing.assert_close(values[leaf.value], expected, rtol=1e-12, atol=1e-12, msg=leaf.path)


def _loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss
