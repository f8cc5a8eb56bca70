"""What is known of a tensor of the graph if one size of the batch is padded.

Batches grow along one axis: samples, or positions. A dim of a tensor consists of parts, outermost first, as ``b`` and
``s`` of a reshaped ``(b s)``. A part that grows with the batch has real places, which come first, and padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """A part of a dim. ``grows``: whether its size is that of the batch, plus ``offset``. ``fill``: the number in all
    padded places; ``None`` if they have other or unknown numbers."""

    size: int
    grows: bool = False
    offset: int = 0
    fill: float | None = None

    def at(self, sizes: tuple[int, int]) -> int:
        """The size of this part where the batch has not ``sizes[0]`` but ``sizes[1]`` elements."""
        return self.size - sizes[0] + sizes[1] if self.grows else self.size

    @property
    def kind(self) -> tuple[int, bool, int]:
        """What has to be equal of parts that are the same loop of an operator."""
        return self.size, self.grows, self.offset


Parts = tuple[Part, ...]
Causal = tuple[int, int, float]  # dim of queries, dim of keys, number where the key is behind the query


@dataclass(frozen=True)
class PaddedValue:
    """A tensor, whose real places have the numbers of the batch that is not padded unless ``fault`` says why not.

    ``uniform``: the number that every element has. ``lowest``: a number that no element is below. ``counts``: the dim
    whose coordinate each element is (as ``arange`` makes it). ``causal``: two dims, and the number of every
    element whose coordinate on the second dim (key) exceeds that on the first (query). ``distance``: two such dims; an
    element is the coordinate of the key minus that of the query, times the number (1 or -1).
    """

    dims: tuple[Parts, ...]
    fault: str = ""
    uniform: float | None = None
    lowest: float | None = None
    counts: int | None = None
    causal: Causal | None = None
    distance: Causal | None = None

    @property
    def grows(self) -> bool:
        """Return whether any dim grows with the batch."""
        return any(part.grows for parts in self.dims for part in parts)

    def growing_part(self, dim: int) -> Part | None:
        """The part that grows, if it is all of the dim ``dim``."""
        parts = [p for p in self.dims[dim] if p.size > 1 or p.grows]
        return parts[0] if len(parts) == 1 and parts[0].grows else None

    def with_dim(self, dim: int, part: Part) -> PaddedValue:
        """This value with one part as the dim ``dim``, and nothing known of its elements beside."""
        dims = tuple((part,) if d == dim else parts for d, parts in enumerate(self.dims))
        return PaddedValue(dims, self.fault, self.uniform if part.fill == self.uniform else None)

    def with_fault(self, fault: str) -> PaddedValue:
        """This value, which differs for the reason ``fault``; the first reason stays."""
        return replace(self, fault=self.fault or fault)


def plain_value(shape: Sequence[int], fault: str = "") -> PaddedValue:
    """A tensor without a dim that grows."""
    return PaddedValue(tuple((Part(size),) for size in shape), fault)


def find_created_part(size: int, other: int, sizes: tuple[int, int]) -> Part | None:
    """The part of ``size`` elements that has ``other`` ones where the batch has ``sizes[1]`` instead of ``sizes[0]``;
    ``None`` for a size that follows from the batch in another way."""
    if size == other:
        return Part(size)
    if size - sizes[0] == other - sizes[1]:
        return Part(size, grows=True, offset=size - sizes[0])
    return None


def assign_parts(parts: Parts, sizes: Sequence[int]) -> list[Parts] | None:
    """Distribute the parts of a dim over factors of these ``sizes``; ``None`` if a part that grows would be cut."""
    left = [p for p in parts if p.size > 1 or p.grows]
    found: list[Parts] = []
    for size in sizes:
        taken: list[Part] = []
        while (had := math.prod(p.size for p in taken)) < size:
            if not left:
                return None
            first, wanted = left[0], size // had
            if size % had or (first.size > wanted and (first.grows or first.size % wanted)):
                return None
            if first.size > wanted:
                taken.append(Part(wanted))
                left[0] = Part(first.size // wanted)
            else:
                taken.append(left.pop(0))
        if had != size:
            return None
        found.append(tuple(taken))
    return None if any(p.grows for p in left) else found
