"""Describe how a tensor is distributed over the ranks of one mesh axis.

A tensor has one :class:`Layout` for each mesh axis. There are four kinds:

======  =====================================================  =========================
kind    the tensor                                             its gradient
======  =====================================================  =========================
``S``   sharded on one dim                                     sharded in the same way
``R``   whole on every rank                                    whole on every rank
``P``   a partial sum: the sum over the ranks is the tensor    whole on every rank
``R'``  whole on every rank, read by a sharded operator        a partial sum
======  =====================================================  =========================

A result has the layout ``S``, ``R`` or ``P``. An operator reads operands with the layout ``S``, ``R`` or ``R'``; if it
is linear, it can also read ``P`` and return ``P``.

All shards have the same size. ``sections`` are the sizes of parts of the dim, each of which is sharded separately. For
example, a fused ``[q; k; v]`` projection of sizes 64, 16, 16 over two ranks puts ``q[:32], k[:8], v[:8]`` on rank 0.
``()`` means that the dim is sharded as one part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from partitioner.passes.ir.hashing import hashed_once

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["S", "R", "P", "R'"]
# name suffixes of the block that computes sums over the batch, and of the block that reads them
TOTALS, REST = ".totals", ".rest"


@hashed_once
@dataclass(frozen=True, order=True)
class Layout:
    """How a tensor is distributed over the ranks of one mesh axis: sharded, whole on every rank, or a partial sum.

    ``kind``: ``S`` (sharded on ``dim``), ``R`` (whole on every rank), ``P`` (a partial sum) or ``R'`` (whole on every
    rank, with a partial sum as gradient). The other fields apply to ``S`` only. ``sections``: sizes of parts of the dim
    that are sharded separately; empty if the dim is sharded as one part. ``zigzag``: whether the dim is cut into twice
    as many pieces as ranks, so that each rank has two pieces, one counted from the start and one from the end of the
    dim, which balances causal attention.
    """

    kind: Kind
    dim: int = -1
    sections: tuple[int, ...] = ()
    zigzag: bool = False

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        sections = f"[{','.join(map(str, self.sections))}]" if self.sections else ""
        return f"S{self.dim}{sections}{'z' * self.zigzag}"

    @staticmethod
    def parse(text: str) -> Layout:
        """Return the layout that ``text`` describes, such as ``R``, ``P``, ``S0`` (sharded on dim 0) or ``S1[8,4]z``.

        ``[8,4]`` are the sizes of separately sharded parts of the dim; ``z`` is for zigzag (each rank has two pieces of
        the dim, one counted from each end). Raises ``ValueError`` for any other text.
        """
        match = re.fullmatch(r"(R'|R|P)|S(\d+)(?:\[(\d+(?:,\d+)+)\])?(z?)", text)
        if match is None:
            raise ValueError(f"not a layout: {text!r}; expected R, R', P, S<dim> or S<dim>[a,b,...], with z for zigzag")
        kind, dim, sections, zigzag = match.groups()
        if kind is not None:
            return Layout(kind)  # type: ignore[arg-type]
        return make_shard_layout(int(dim), tuple(map(int, sections.split(","))) if sections else (), bool(zigzag))

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_whole(self) -> bool:
        """Return whether this layout gives every rank the whole value (``R`` or ``R'``)."""
        return self.kind in ("R", "R'")


REPLICATED = Layout("R")

PARTIAL = Layout("P")
READ_SHARDED = Layout("R'")


def make_shard_layout(dim: int, sections: tuple[int, ...] = (), zigzag: bool = False) -> Layout:
    """Return the layout of a tensor that is sharded on ``dim`` (not negative).

    Args:
        sections: sizes of parts of the dim that are sharded separately; a single section is stored as ``()``.
        zigzag: whether the dim is cut into twice as many pieces as ranks, of which each rank has two, one counted from
            the start and one from the end.
    """
    assert dim >= 0, dim
    return Layout("S", dim, sections if len(sections) > 1 else (), zigzag)


def list_sections(layout: Layout, size: int) -> tuple[int, ...]:
    """Return a tuple with the sizes, in elements, of the parts of a sharded dim that ``layout`` shards separately, such
    as the q, k and v parts of a fused projection; ``(size,)`` if the dim is sharded as one part. ``size``: number of
    elements of the dim."""
    return layout.sections or (size,)


def can_shard_evenly(layout: Layout, shape: tuple[int, ...], num_ranks: int) -> bool:
    """Return whether ``layout`` gives all ``num_ranks`` ranks of a mesh axis shards of equal size for a tensor of
    ``shape``; true if ``layout`` is not sharded."""
    if not layout.is_shard:
        return True
    if layout.dim >= len(shape):
        return False
    sections, pieces = list_sections(layout, shape[layout.dim]), num_ranks * (1 + layout.zigzag)
    return sum(sections) == shape[layout.dim] and all(s > 0 and s % pieces == 0 for s in sections)


def list_rank_pieces(layout: Layout, num_ranks: int) -> list[list[int]]:
    """Return a list with, for each of ``num_ranks`` ranks, the indices (from 0) of its pieces of the sharded dim under
    ``layout``, in the order in which the rank stores them. The dim is divided into equal pieces.

    A plain shard has one piece per rank. A zigzag shard has two: for rank ``r``, piece ``r`` from the start and piece
    ``r`` from the end. If the dim has several separately sharded parts, each part is divided in this way.
    """
    if layout.zigzag:
        return [[r, 2 * num_ranks - 1 - r] for r in range(num_ranks)]
    return [[r] for r in range(num_ranks)]


def local_shape(layout: Layout, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Return the shape of one rank's part of a tensor with the global shape ``shape`` that is distributed over
    ``num_ranks`` ranks by ``layout``."""
    if not layout.is_shard:
        return shape
    return tuple(s // num_ranks if d == layout.dim else s for d, s in enumerate(shape))


def shard_slices(layout: Layout, size: int, num_ranks: int, index: int) -> list[tuple[int, int]]:
    """Return a list of (start, length), in elements: the slices of the sharded dim that rank ``index`` of ``num_ranks``
    holds under ``layout``, in order. ``size``: the number of elements of the dim in the whole tensor."""
    pieces, start = [], 0
    mine = list_rank_pieces(layout, num_ranks)[index]
    for section in list_sections(layout, size):
        length = section // (num_ranks * len(mine))
        pieces += [(start + piece * length, length) for piece in mine]
        start += section
    return pieces


def take_shard(tensor: Tensor, layout: Layout, num_ranks: int, index: int) -> Tensor:
    """Return the part of the whole ``tensor`` that rank ``index`` of ``num_ranks`` holds under ``layout``; the tensor
    itself if ``layout`` is not sharded."""
    import torch  # imported here, because code that only reads plans must not import torch

    if not layout.is_shard or num_ranks == 1:
        return tensor
    pieces = [
        tensor.narrow(layout.dim, start, length)
        for start, length in shard_slices(layout, tensor.shape[layout.dim], num_ranks, index)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)


class Shard(NamedTuple):
    """The part of a tensor that rank ``rank`` of the ``num_ranks`` ranks of a mesh axis holds under ``layout``."""

    layout: Layout
    num_ranks: int
    rank: int


def take_shards(tensor: Tensor, shards: Sequence[Shard]) -> Tensor:
    """Return one rank's part of the whole ``tensor``, which is distributed over several mesh axes. ``shards``: one
    entry for each axis. The first entry is applied to the whole tensor, each further one to the previous entry's part.
    """
    for layout, num_ranks, rank in shards:
        tensor = take_shard(tensor, layout, num_ranks, rank)
    return tensor


def join_shards(parts: list[Tensor], layout: Layout) -> Tensor:
    """Return the whole tensor of which ``parts`` are the parts of all ranks of a mesh axis, in order of rank, under
    ``layout``. Shards are concatenated and partial sums are added. If every rank has the whole tensor, the first is
    returned."""
    import torch

    if layout.kind == "P":
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
    if not layout.is_shard or len(parts) == 1:
        return parts[0]
    num_ranks = len(parts)
    size = parts[0].shape[layout.dim] * num_ranks
    placed = [
        (start, part)
        for rank, whole in enumerate(parts)
        for (start, _), part in zip(*_split_shard_slices(whole, layout, size, num_ranks, rank), strict=True)
    ]
    return torch.cat([part for _, part in sorted(placed, key=lambda p: p[0])], layout.dim)


def _split_shard_slices(
    part: Tensor, layout: Layout, size: int, num_ranks: int, rank: int
) -> tuple[list[tuple[int, int]], tuple[Tensor, ...]]:
    """Return two lists for the part of a tensor that one rank holds under ``layout``: the (start, length) of each slice
    in the sharded dim of the whole tensor, and the slices of ``part``. ``part``: the shard of rank ``rank`` of
    ``num_ranks``. ``size``: the number of elements in the dim of the whole tensor."""
    slices = shard_slices(layout, size, num_ranks, rank)
    return slices, part.split([length for _, length in slices], layout.dim)
