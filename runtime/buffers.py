"""Convert tensors to the form that communication backends accept: dense, one part after the other, real numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def parts_of(x: Tensor, dim: int, size: int) -> Tensor:
    """Split ``x`` into ``size`` equal parts along ``dim``; returns a dense tensor ``[size, ...]`` of these parts."""
    split: Tensor = x.unflatten(dim, (size, x.shape[dim] // size))
    return split.movedim(dim, 0).contiguous()


def joined(parts: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`parts_of`: ``[size, ...]`` joined along ``dim``."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def total(parts: Tensor, dim: int) -> Tensor:
    return parts.sum(0, dtype=parts.dtype)


def resolved(x: Tensor) -> Tensor:
    """``x`` with pending conjugation and negation applied, so that its memory holds its values."""
    return x.resolve_conj().resolve_neg() if x.is_complex() else x


def as_real(x: Tensor) -> Tensor:
    """View a complex tensor as real numbers, in the same memory; backends do not support complex types."""
    return torch.view_as_real(x) if x.is_complex() else x


def share_memory(x: Tensor, other: Tensor) -> bool:
    """Whether both are in the same storage."""
    return bool(x.untyped_storage()._cdata == other.untyped_storage()._cdata)


def give_back(x: Tensor) -> None:
    """Free the memory of ``x`` now, even if other tensors refer to it; nobody may read it afterwards.

    Memory that NumPy shares (when a step is hashed) cannot be resized; torch frees it with the last reference.
    """
    storage = x.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
