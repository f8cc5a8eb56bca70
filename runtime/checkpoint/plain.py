"""Plain data: what a checkpoint may hold besides tensors of the model, and can be read again without running code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError

_LEAVES = (bool, int, float, complex, str, bytes, type(None), Tensor, torch.dtype, torch.device, torch.Size)


def packed(content: Mapping[str, Any], names: str) -> bytes:
    """``content`` as bytes that :func:`unpacked` reads. Raises :class:`CheckpointError` for what is no plain data."""
    file = io.BytesIO()
    try:
        torch.save(dict(content), file)
        unpacked(file.getvalue())
    except Exception as error:
        told = _odd(content) or str(error).split("\n")[0]
        raise CheckpointError(
            f"the state of {names} cannot be saved ({told}): it may hold numbers, strings, tensors, lists, tuples and "
            "dicts; let its state_dict() return only such"
        ) from error
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """Raises what ``torch.load`` raises."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")  # type: ignore[no-any-return]


def alike(one: Any, other: Any) -> bool:
    """Whether two pieces of plain data are the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other) or (one != one and other != other)  # NaN is as NaN


def _odd(value: Any, path: str = "") -> str:
    """The first part of ``value`` that is no plain data, and what it is; empty where there is none."""
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
        parts = dict(enumerate(value)).items()
    else:
        plain = type(value) in _LEAVES or isinstance(value, Tensor)
        return "" if plain else f"{path} is of type {type(value).__module__}.{type(value).__qualname__}"
    return next((told for k, v in parts if (told := _odd(v, f"{path}.{k}" if path else str(k)))), "")
