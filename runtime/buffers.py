"""Tensors as backends take them: dense, part by part, of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def parts_of(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` as ``[size, ...]``, dense, part by part along ``dim``."""
    split: Tensor = x.unflatten(dim, (size, x.shape[dim] // size))
    return split.movedim(dim, 0).contiguous()


def joined(parts: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`parts_of`: ``[size, ...]`` joined along ``dim``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def total(parts: Tensor, dim: int) -> Tensor:
    return parts.sum(0, dtype=parts.dtype)


def resolved(x: Tensor) -> Tensor:
    """``x`` with its numbers as they are in memory, not to be conjugated when they are read."""
    return x.resolve_conj().resolve_neg() if x.is_complex() else x


def as_real(x: Tensor) -> Tensor:
    """The same memory as real numbers: backends know no complex ones."""
    return torch.view_as_real(x) if x.is_complex() else x


def share_memory(x: Tensor, other: Tensor) -> bool:
    """Whether both are in the same storage."""
    return bool(x.untyped_storage()._cdata == other.untyped_storage()._cdata)


def give_back(x: Tensor) -> None:
    """Let go of the memory of ``x`` now, whoever still refers to it: nobody reads it any more. What NumPy was shown, as
    hashes of a step are, torch keeps until the last reference goes."""
    storage = x.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
