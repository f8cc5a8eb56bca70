"""The judge of a plan whose samples meet within a microbatch alone: the model run group by group, and the mean.

What the groups are does not depend on the mesh: as many samples as a microbatch has, one group behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner.reference import Reference, run_reference
from passes.export import leaf_paths
from passes.layouts import Layout
from runtime.program import Program

Inputs = tuple[Any, ...] | Mapping[str, Any]


def run_groups(
    model: nn.Module,
    inputs: Inputs,
    loss: Callable[[Any], Tensor] | None,
    program: Program,
    size: int,
    counters: Collection[str] = (),
    precision: str | None = None,
) -> Reference:
    """``model`` in float64 on each group of ``size`` samples of ``inputs``, the whole batch of ``program``.

    The loss, the gradients and results without samples are the mean over the groups, other results are joined. Each
    group reads the buffers that the one before has left, and the Python numbers that are named in ``counters``.
    """
    dims = {i.path: i.batch_dim for i in program.inputs}
    batch = next(i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None)
    train = program.objective == "train"
    outputs: dict[str, list[Any]] = {}
    losses: list[Tensor] = []
    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    changed, parameters = frozenset[str](), frozenset[str]()
    for group in range(batch // size):
        found = run_reference(
            model,
            _cut(inputs, dims, group * size, size),
            loss,
            train=train,
            group=group,
            buffers=buffers,
            counters=counters,
            precision=precision,
        )
        buffers, changed, parameters = found.buffers, changed | found.changed, found.parameters
        losses += [] if found.loss is None else [found.loss]
        for path, output in found.outputs.items():
            outputs.setdefault(path, []).append(output)
        for name, gradient in found.grads.items():  # of which there is one set at a time
            share = gradient * (size / batch)
            grads[name] = grads[name] + share if group else share
    ways = {o.path: o.batch for o in program.outputs}
    wholes = {path: _whole(parts, ways.get(path, "R")) for path, parts in outputs.items()}
    return Reference(wholes, _mean(losses) if losses else None, grads, buffers, changed, parameters)


def _cut(inputs: Inputs, dims: Mapping[str, int | None], start: int, count: int) -> Any:
    """``count`` samples of the inputs that have some; ``dims``: where, by path."""
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    leaves, tree = pytree.tree_flatten(inputs)
    paths = [path for path, _ in leaf_paths(inputs)]
    cut = [_samples(leaf, dims.get(path), start, count) for path, leaf in zip(paths, leaves, strict=True)]
    return pytree.tree_unflatten(cut, tree)


def _samples(leaf: Any, dim: int | None, start: int, count: int) -> Any:
    return leaf if dim is None or not isinstance(leaf, Tensor) else leaf.narrow(dim, start, count)


def _whole(parts: Sequence[Any], way: str) -> Any:
    """The groups' results of one path as the plan says that they make the whole."""
    if way == "R" or not all(isinstance(part, Tensor) for part in parts):
        return parts[0]
    layout = Layout.parse(way)
    return torch.cat([*parts], layout.dim) if layout.is_shard else _mean(parts)


def _mean(parts: Sequence[Any]) -> Tensor:
    return torch.stack([*parts]).mean(0)
