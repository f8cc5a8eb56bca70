"""Codecs that compress gradients for the transfer: bfloat16, and int8 with a scale per chunk."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from partitioner.runtime.program.buckets import Compression

_LEVELS = 127  # of int8, on either side of zero

_SCALE = torch.float32
_TINY = torch.finfo(_SCALE).tiny  # scales below are rounded too coarsely


class Codec(Protocol):
    """Interface of a codec that compresses rows of numbers to rows of bytes and back. ``chunk``: the length of a row
    must be a multiple of this. ``feedback``: whether the rounding errors of a transfer are stored and added to the data
    of the next transfer.
    """

    chunk: int
    feedback: bool

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of a compressed row of ``numel`` numbers."""

    def encode(self, rows: Tensor) -> Tensor:
        """Compress ``rows``, of shape ``[rows, numel]``, to bytes, and return them as ``uint8[rows, nbytes]``."""

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Decompress ``wire`` (``uint8[rows, nbytes]``), and return the numbers as a tensor of dtype ``dtype`` and
        shape ``[rows, numel]``.
        """


class Bfloat16:
    """Codec that rounds each number to bfloat16. The relative rounding error is at most 1/256."""

    chunk = 1
    feedback = False

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        numbers: Tensor = wire.view(torch.bfloat16)
        return numbers.to(dtype)


class Int8:
    """Codec that rounds each number to 1/127 of the largest magnitude in its chunk of 256 numbers.

    The compressed row has the int8 numbers, followed by one float32 scale per chunk.
    """

    chunk = 256
    feedback = True

    def nbytes(self, numel: int) -> int:
        return numel + numel // self.chunk * _SCALE.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Compress ``rows``, of shape ``[rows, numel]``, and return ``uint8[rows, nbytes]``: int8 numbers, then float32
        scales. A chunk with a non-finite number is decompressed to NaNs.
        """
        chunks = rows.unflatten(1, (-1, self.chunk))
        most = chunks.abs().amax(2, keepdim=True)
        scales = (most / _LEVELS).to(_SCALE).clamp(min=_TINY)
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        levels = (chunks / scales.to(rows.dtype)).round_().nan_to_num_(0.0).clamp_(-_LEVELS, _LEVELS)
        return torch.cat([levels.to(torch.int8).flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Decompress ``wire`` (``uint8[rows, nbytes]``: int8 numbers, then float32 scales), and return the numbers as a
        tensor of dtype ``dtype`` and shape ``[rows, numel]``.
        """
        numel = wire.shape[1] * self.chunk // (self.chunk + _SCALE.itemsize)
        levels: Tensor = wire[:, :numel].view(torch.int8).to(dtype).unflatten(1, (-1, self.chunk))
        scales = wire[:, numel:].contiguous().view(_SCALE).to(dtype).unsqueeze(2)
        levels.mul_(scales)
        return levels.flatten(1)


CODECS: dict[Compression, Codec] = {"bf16": Bfloat16(), "int8": Int8()}


def wire_share(compression: Compression, itemsize: int) -> float:
    """Return the compression ratio: compressed bytes per original byte. ``compression``: the compressed format.
    ``itemsize``: bytes of one original number.
    """
    codec = CODECS[compression]
    return codec.nbytes(codec.chunk) / (codec.chunk * itemsize)
