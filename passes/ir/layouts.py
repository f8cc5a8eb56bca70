"""Where a tensor lives along one mesh axis.

A tensor has one :class:`Layout` per mesh axis. Four kinds exist:

======  =====================================================  =========================
kind    the tensor                                             its gradient
======  =====================================================  =========================
``S``   sharded on one dim                                     sharded likewise
``R``   whole on every rank                                    whole on every rank
``P``   a partial sum: the ranks' tensors add up to it         whole on every rank
``R'``  whole on every rank, read by a sharded operator        a partial sum
======  =====================================================  =========================

A producer gives ``S``, ``R`` or ``P``; a consumer asks for ``S``, ``R`` or ``R'``
(or passes ``P`` on, where it is linear).

A shard is even. ``sections`` says that the dim is a concatenation of parts, each of them sharded on
its own: a fused ``[q; k; v]`` projection of sizes 64, 16, 16 over two ranks puts ``q[:32], k[:8], v[:8]``
on rank 0. ``()`` is one section.
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


@hashed_once
@dataclass(frozen=True, order=True)
class Layout:
    """The layout of a tensor along one mesh axis; see the module's table."""

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
        """The layout that ``str`` wrote. Raises ``ValueError`` on anything else."""
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
        """Whether every rank holds the whole value (``R`` or ``R'``)."""
        return self.kind in ("R", "R'")


REPLICATED = Layout("R")

PARTIAL = Layout("P")
READ_SHARDED = Layout("R'")


def make_shard_layout(dim: int, sections: tuple[int, ...] = (), zigzag: bool = False) -> Layout:
    """Sharded on ``dim`` (not negative), each of ``sections`` on its own; one section is written ``()``."""
    assert dim >= 0, dim
    return Layout("S", dim, sections if len(sections) > 1 else (), zigzag)


def sections_of(layout: Layout, size: int) -> tuple[int, ...]:
    """The section sizes of a sharded dim of ``size`` elements (always at least one)."""
    return layout.sections or (size,)


def can_shard_evenly(layout: Layout, shape: tuple[int, ...], num_ranks: int) -> bool:
    """Whether ``layout`` shards a tensor of ``shape`` evenly over ``num_ranks``."""
    if not layout.is_shard:
        return True
    if layout.dim >= len(shape):
        return False
    sections, pieces = sections_of(layout, shape[layout.dim]), num_ranks * (1 + layout.zigzag)
    return sum(sections) == shape[layout.dim] and all(s > 0 and s % pieces == 0 for s in sections)


def piece_order(layout: Layout, num_ranks: int) -> list[list[int]]:
    """For each rank, which of a section's equal pieces it has, in order: one, or the two of a zigzag shard."""
    if layout.zigzag:
        return [[r, 2 * num_ranks - 1 - r] for r in range(num_ranks)]
    return [[r] for r in range(num_ranks)]


def local_shape(layout: Layout, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """One rank's shape of a tensor of global ``shape``."""
    if not layout.is_shard:
        return shape
    return tuple(s // num_ranks if d == layout.dim else s for d, s in enumerate(shape))


def shard_slices(layout: Layout, size: int, num_ranks: int, index: int) -> list[tuple[int, int]]:
    """The (start, length) pieces of a dim of ``size`` that rank ``index`` of ``num_ranks`` holds, in order."""
    pieces, start = [], 0
    mine = piece_order(layout, num_ranks)[index]
    for section in sections_of(layout, size):
        length = section // (num_ranks * len(mine))
        pieces += [(start + piece * length, length) for piece in mine]
        start += section
    return pieces


def take_shard(tensor: Tensor, layout: Layout, num_ranks: int, index: int) -> Tensor:
    """Rank ``index``'s part of a whole ``tensor``; the tensor itself where it is not sharded."""
    import torch  # where tensors are: what only reads a program does without

    if not layout.is_shard or num_ranks == 1:
        return tensor
    pieces = [
        tensor.narrow(layout.dim, start, length)
        for start, length in shard_slices(layout, tensor.shape[layout.dim], num_ranks, index)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)


class Shard(NamedTuple):
    """One cut of a tensor: the ``rank``-th of ``num_ranks`` has its part of ``layout``."""

    layout: Layout
    num_ranks: int
    rank: int


def take_shards(tensor: Tensor, shards: Sequence[Shard]) -> Tensor:
    """The part of a whole ``tensor`` that is left after cut upon cut."""
    for layout, num_ranks, rank in shards:
        tensor = take_shard(tensor, layout, num_ranks, rank)
    return tensor


def join_shards(parts: list[Tensor], layout: Layout) -> Tensor:
    """The whole tensor of which ``parts`` are the ranks' parts; partial sums are added, replicas are one."""
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
    slices = shard_slices(layout, size, num_ranks, rank)
    return slices, part.split([length for _, length in slices], layout.dim)
