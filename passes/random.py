"""Random numbers by place: the same seed draws the same numbers for every plan.

An element's number is a hash of the step's seed, of the operator's stream and of the element's index in the whole
tensor. The index is written as sums of ``arange``, which the factor rules shard like any other operator, so each rank
draws just the numbers of its part. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.collectives import NAMESPACE, _library
from passes.infer import META, call

aten = torch.ops.aten
SEED = "random.seed"  # the state that every random operator reads; the engine sets it anew each step
_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STREAM_STRIDE = 1 << 40


def stream_name(index: int) -> str:
    """The constant that holds the stream of the model's ``index``-th random operator."""
    return f"random.stream.{index}"


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniform(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Numbers in [0, 1) of float32, one for each of ``index`` (int64, any shape); ``seed`` and ``stream`` are 0-d."""
    x = index + (stream * _STREAM_STRIDE + seed * _GOLDEN)
    x = x.mul_(_GOLDEN)
    x.bitwise_xor_(_shifted(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_MIX2)
    x.bitwise_xor_(_shifted(x, 31))
    return _shifted(x, 40).to(torch.float32).mul_(2.0**-24)


_library.define("uniform(Tensor index, Tensor seed, Tensor stream) -> Tensor")
_library.impl("uniform", uniform, "CPU")
_library.impl("uniform", uniform, "CUDA")
torch.library.register_fake(
    f"{NAMESPACE}::uniform", lambda index, seed, stream: torch.empty_like(index, dtype=torch.float32), lib=_library
)


def element_index(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The index of every element of a whole tensor."""
    return torch.arange(torch.Size(shape).numel(), device=device).view(shape)


def append_index(graph: fx.Graph, shape: tuple[int, ...], like: fx.Node) -> fx.Node:
    """:func:`element_index` as operators that can be sharded on any dim."""
    total: fx.Node | None = None
    stride = 1
    for dim in reversed(range(len(shape))):
        place = call(graph, aten.arange.default, (shape[dim],), {"device": META}, like=like)
        if stride > 1:
            place = call(graph, aten.mul.Tensor, (place, stride), like=like)
        view = [shape[d] if d == dim else 1 for d in range(dim, len(shape))]
        if len(view) > 1:
            place = call(graph, aten.view.default, (place, view), like=like)
        total = place if total is None else call(graph, aten.add.Tensor, (place, total), like=like)
        stride *= shape[dim]
    assert total is not None, "a random operator on a 0-d tensor"
    return total


def append_dropout(graph: fx.Graph, x: fx.Node, p: float, seed: fx.Node, stream: fx.Node, like: fx.Node) -> fx.Node:
    """Dropout of ``x`` with probability ``p``, scaled by ``1 / (1 - p)``."""
    shape = tuple(x.meta["val"].shape)
    index = append_index(graph, shape, like)
    numbers = call(graph, torch.ops.partition.uniform.default, (index, seed, stream), like=like)
    kept = call(graph, aten.ge.Scalar, (numbers, p), like=like)
    scaled = call(graph, aten.mul.Tensor, (x, 1.0 / (1.0 - p)), like=like)
    zeros = call(graph, aten.zeros_like.default, (scaled,), {"device": META}, like=like)
    result = call(graph, aten.where.self, (kept, scaled, zeros), like=like)
    for node in graph.nodes:
        if node.meta["val"] is not None and node in (index, numbers, kept, zeros):
            node.meta["grad"] = False
    return result


def dropout(x: Tensor, p: float, seed: int, stream: int) -> Tensor:
    """What :func:`append_dropout` computes, on a whole tensor."""
    at = [torch.tensor(v, device=x.device) for v in (seed, stream)]
    kept = uniform(element_index(tuple(x.shape), x.device), *at) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p)), torch.zeros_like(x))
