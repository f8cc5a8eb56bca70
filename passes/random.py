"""Random numbers by place: the same seed draws the same numbers for every plan.

An element's number is a hash of the step's seed, of the operator's stream and of the element's index in the whole
tensor. The index is written as sums of ``arange``, which the factor rules shard like any other operator, so each rank
draws just the numbers of its part. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from passes.collectives import NAMESPACE, _library

SEED = "random.seed"  # the state that every random operator reads; the engine sets it anew each step
_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STREAM_STRIDE = 1 << 40
_BITS = 24  # of a number, as many as a float32 holds


def stream_name(index: int) -> str:
    """The constant that holds the stream of the model's ``index``-th random operator."""
    return f"random.stream.{index}"


def is_stream(name: str) -> bool:
    return name.startswith("random.stream.")


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    x = index + (stream * _STREAM_STRIDE + seed * _GOLDEN)
    x = x.mul_(_GOLDEN)
    x.bitwise_xor_(_shifted(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shifted(x, 31))


def uniform(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Numbers in [0, 1) of float32, one for each of ``index`` (int64, any shape); ``seed`` and ``stream`` are 0-d."""
    return _shifted(_hash(index, seed, stream), 64 - _BITS).to(torch.float32).mul_(2.0**-_BITS)


def _between(bits: Tensor) -> Tensor:
    """Numbers in (0, 1), neither end among them, of float64."""
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-_BITS)


def normal(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """As :func:`uniform`, of the standard normal distribution (Box and Muller 1958)."""
    x = _hash(index, seed, stream)
    radius = _between(_shifted(x, 64 - _BITS)).log_().mul_(-2.0).sqrt_()
    angle = _between(_shifted(x, 64 - 2 * _BITS).bitwise_and_((1 << _BITS) - 1)).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).to(torch.float32)


def exponential(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """As :func:`uniform`, of the exponential distribution with rate 1."""
    return _between(_shifted(_hash(index, seed, stream), 64 - _BITS)).log_().neg_().to(torch.float32)


def _like_index(index: Tensor, seed: Tensor, stream: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(index, dtype=dtype)


def bits(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """As :func:`uniform`, whole numbers (int64) in [0, ``MOST_BITS``)."""
    return _shifted(_hash(index, seed, stream), 64 - 40)


MOST_BITS = 1 << 40
for _function in (uniform, normal, exponential, bits):
    _name = _function.__name__
    _library.define(f"{_name}(Tensor index, Tensor seed, Tensor stream) -> Tensor")
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(
        f"{NAMESPACE}::{_name}",
        partial(_like_index, dtype=torch.int64 if _function is bits else torch.float32),
        lib=_library,
    )

ops = torch.ops.partition
DRAWS = frozenset({ops.uniform.default, ops.normal.default, ops.exponential.default, ops.bits.default})


def element_index(shape: tuple[int, ...], device: torch.device, group: int = 0) -> Tensor:
    """The index of every element of a whole tensor; of one ``group``, behind those of the groups before it."""
    count = torch.Size(shape).numel()
    return torch.arange(group * count, (group + 1) * count, device=device).view(shape)


def drawn(
    distribution: torch._ops.OpOverload, shape: tuple[int, ...], device: torch.device, at: list[int], group: int = 0
) -> Tensor:
    """The numbers of a whole tensor from one of ``DRAWS``; ``at``: seed and stream; ``group``: of samples."""
    places = (torch.tensor(v, device=device) for v in at)
    numbers: Tensor = distribution(element_index(shape, device, group), *places)
    return numbers


def dropout(x: Tensor, p: float, seed: int, stream: int, group: int = 0) -> Tensor:
    """Dropout of a whole tensor, scaled by ``1 / (1 - p)``."""
    kept = drawn(ops.uniform.default, tuple(x.shape), x.device, [seed, stream], group) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p)), torch.zeros_like(x))
