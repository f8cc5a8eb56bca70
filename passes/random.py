"""Random numbers by place: the same seed draws the same numbers for every plan.

An element's number is a hash of the step's seed, of the operator's stream and of the element's index in the whole
tensor. The index is written as sums of ``arange``, which the factor rules shard like any other operator, so each rank
draws just the numbers of its part. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from passes.collectives import NAMESPACE, _library

SEED = "random.seed"  # the state that every random operator reads; the engine sets it anew each step
_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STREAM_STRIDE = 1 << 40


def stream_name(index: int) -> str:
    """The constant that holds the stream of the model's ``index``-th random operator."""
    return f"random.stream.{index}"


def is_stream(name: str) -> bool:
    return name.startswith("random.stream.")


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


def dropout(x: Tensor, p: float, seed: int, stream: int) -> Tensor:
    """Dropout of a whole tensor, scaled by ``1 / (1 - p)``."""
    at = [torch.tensor(v, device=x.device) for v in (seed, stream)]
    kept = uniform(element_index(tuple(x.shape), x.device), *at) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p)), torch.zeros_like(x))
