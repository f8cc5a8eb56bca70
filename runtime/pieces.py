"""Flat pieces: how ranks share a state under ZeRO.

What the cuts over ``ep`` and ``tp`` leave of a state is taken flat, row by row, and cut into as many pieces of
``ceil(numel / ranks)`` elements as there are ranks; the last ones may be shorter, or empty. Any shape is so shared
evenly by any number of ranks, and a piece depends on nothing but the state: whatever is gathered together, whichever
optimizer runs, it is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """One rank's elements ``[start, start + size)`` of ``numel``; with its padding a piece has ``length``."""

    numel: int
    ranks: int
    index: int

    @property
    def length(self) -> int:
        return -(-self.numel // self.ranks)

    @property
    def start(self) -> int:
        return min(self.numel, self.index * self.length)

    @property
    def size(self) -> int:
        return min(self.numel, self.start + self.length) - self.start


def take_piece(tensor: Tensor, ranks: int, index: int) -> Tensor:
    """The ``index``-th of ``ranks`` pieces of ``tensor``, of shape ``[size]``."""
    piece = Piece(tensor.numel(), ranks, index)
    return tensor.reshape(-1)[piece.start : piece.start + piece.size]


def padded_piece(piece: Tensor, numel: int, ranks: int) -> Tensor:
    """``piece``, of ``numel`` elements' ``ranks`` pieces, of shape ``[length]``: zeros behind it."""
    length = Piece(numel, ranks, 0).length
    result = piece.new_zeros(length)
    result[: piece.numel()] = piece
    return result


def join_pieces(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The tensor of ``shape`` of which ``pieces`` are all the pieces, in order, with or without their padding."""
    import torch  # where tensors are: what only reads a program does without

    return torch.cat([p.reshape(-1) for p in pieces])[: math.prod(shape)].reshape(torch.Size(shape))
