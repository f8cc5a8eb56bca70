"""Describe a tensor of the graph if the batch is padded: which of its dims grow with the batch, and which values it
has.

Batches are padded along one axis: samples, or positions. A dim of a tensor consists of parts, outermost first, such as
``b`` and ``s`` of a dim ``(b s)`` that a reshape has merged. In a part that grows with the batch, the elements of the
original batch come first, and padded ones follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DimPart:
    """A part of a tensor's dim, which may grow with the batch. A dim that joins several dims, such as ``(batch
    positions)``, has several parts; any other dim has one.

    ``size``: number of elements. ``grows``: whether the part grows with the batch; if so, the elements of the original
    batch come first, and padded ones follow. ``offset``: for a part that grows, by how many elements ``size`` exceeds
    the batch size. ``fill``: the value of all padded elements; ``None`` if they differ or the value is not known.
    """

    size: int
    grows: bool = False
    offset: int = 0
    fill: float | None = None

    def resize(self, sizes: tuple[int, int]) -> int:
        """Return the number of elements of this part of a dim for another batch size. ``sizes``: two batch sizes, in
        elements along the padded axis: the one that this description is for, and the other one."""
        return self.size - sizes[0] + sizes[1] if self.grows else self.size

    @property
    def kind(self) -> tuple[int, bool, int]:
        """Return (``size``, ``grows``, ``offset``) of this part of a dim: its number of elements, whether this number
        grows with the batch, and by how much it exceeds the batch size. Parts that an operator combines element by
        element must be equal in these three."""
        return self.size, self.grows, self.offset


Parts = tuple[DimPart, ...]
Causal = tuple[int, int, float]  # (dim of queries, dim of keys, number where the key comes after the query)


@dataclass(frozen=True)
class PaddedValue:
    """What is known of a tensor of the graph if the batch is padded along one axis (samples or positions).

    ``dims``: for each dim, the parts of which it consists, outermost first. ``fault``: why elements of the original
    batch may differ from those without padding; empty if they do not. ``uniform``: the value that all elements have.
    ``lowest``: a lower bound of all elements. ``counts``: the dim along which each element is its own index (as in an
    ``arange``). ``causal``: (dim of queries, dim of keys, the value of every element whose key index exceeds its query
    index). ``distance``: (dim of queries, dim of keys, sign): each element is the key index minus the query index,
    times the sign (1 or -1). The last five are ``None`` if they are not known. ``real_places``: whether all elements of
    the original batch are indices of elements of the original batch, never of padded ones.
    """

    dims: tuple[Parts, ...]
    fault: str = ""
    uniform: float | None = None
    lowest: float | None = None
    counts: int | None = None
    causal: Causal | None = None
    distance: Causal | None = None
    real_places: bool = False

    @property
    def grows(self) -> bool:
        """Return whether any dim of the described tensor grows with the batch."""
        return any(part.grows for parts in self.dims for part in parts)

    def growing_part(self, dim: int) -> DimPart | None:
        """If the dim ``dim`` of the described tensor has a single part and grows with the batch, return this part;
        otherwise return ``None``."""
        parts = [p for p in self.dims[dim] if p.size > 1 or p.grows]
        return parts[0] if len(parts) == 1 and parts[0].grows else None

    def with_dim(self, dim: int, part: DimPart) -> PaddedValue:
        """Return a copy of this description of a tensor, in which the dim ``dim`` consists of ``part`` alone. The
        fields that describe elements by their indices are dropped. A value that all elements have is kept if the padded
        elements of ``part`` have it, too."""
        dims = tuple((part,) if d == dim else parts for d, parts in enumerate(self.dims))
        return PaddedValue(dims, self.fault, self.uniform if part.fill == self.uniform else None)

    def with_fault(self, fault: str) -> PaddedValue:
        """Return a copy of this description of a tensor with the fault ``fault``, a text that says why padding may
        change elements of the original batch. If the description already has a fault, the old one is kept."""
        return replace(self, fault=self.fault or fault)


def make_fixed_value(shape: Sequence[int], fault: str = "") -> PaddedValue:
    """Return a description of a tensor of the shape ``shape`` that does not grow if the batch is padded. ``fault``: why
    padding may change its elements; empty if it does not."""
    return PaddedValue(tuple((DimPart(size),) for size in shape), fault)


def find_created_part(size: int, other: int, sizes: tuple[int, int]) -> DimPart | None:
    """Return the description of a dim that has ``size`` elements if the batch has ``sizes[0]`` elements along the
    padded axis, and ``other`` elements if the batch has ``sizes[1]``.

    If both sizes are equal, the dim is fixed. If its size exceeds the batch size by the same number in both cases, the
    dim grows with the batch. Return ``None`` if the size depends on the batch in another way.
    """
    if size == other:
        return DimPart(size)
    if size - sizes[0] == other - sizes[1]:
        return DimPart(size, grows=True, offset=size - sizes[0])
    return None


def assign_parts(parts: Parts, sizes: Sequence[int]) -> list[Parts] | None:
    """Distribute the parts of a dim, such as batch and positions of a flattened dim, over the dims into which a reshape
    splits it. Return a list with the tuple of parts of each new dim. A part that does not grow may be divided between
    two new dims. Return ``None`` if the parts, in order, do not give the new sizes, or if a part that grows would be
    divided or left over.

    ``parts``: the parts, outermost first; each has a size and may grow with the batch. ``sizes``: the sizes of the new
    dims.
    """
    left = [p for p in parts if p.size > 1 or p.grows]
    found: list[Parts] = []
    for size in sizes:
        taken: list[DimPart] = []
        while (had := math.prod(p.size for p in taken)) < size:
            if not left:
                return None
            first, wanted = left[0], size // had
            if size % had or (first.size > wanted and (first.grows or first.size % wanted)):
                return None
            if first.size > wanted:
                taken.append(DimPart(wanted))
                left[0] = DimPart(first.size // wanted)
            else:
                taken.append(left.pop(0))
        if had != size:
            return None
        found.append(tuple(taken))
    return None if any(p.grows for p in left) else found
