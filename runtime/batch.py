"""The global batch that a step runs on: found by path, checked against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.serialize import dtype_of
from runtime.errors import BatchError
from runtime.program import InputData, Program


def leaves_by_path(batch: Any) -> dict[str, Any]:
    """The leaves of a batch by their place in it: ``input_ids``, ``0``, ``past.0.key``."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return {".".join(str(_key(k)) for k in path): leaf for path, leaf in leaves}


def _key(key: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def batch_values(program: Program, batch: Any) -> dict[str, Tensor]:
    """The tensors of ``batch`` by value name, in the planned types.

    Raises :class:`BatchError`: a tensor is missing, or has another shape or kind of type than the plan was made for.
    """
    leaves = leaves_by_path(batch)
    return {i.value: _checked(i, leaves) for i in program.inputs}


def _checked(data: InputData, leaves: Mapping[str, Any]) -> Tensor:
    tensor = leaves.get(data.path)
    if not isinstance(tensor, Tensor):
        have = ", ".join(k for k, v in leaves.items() if isinstance(v, Tensor)) or "no tensors"
        raise BatchError(
            f"input {data.path!r} is missing: expected a {data.dtype} tensor of shape {list(data.shape)}, "
            f"the batch has {have}"
        )
    shape = tuple(tensor.shape)
    if shape != data.shape:
        raise BatchError(
            f"input {data.path!r}: expected shape {list(data.shape)}, got {list(shape)}: {_advice(data, shape)}"
        )
    dtype = dtype_of(data.dtype)
    if tensor.dtype != dtype:
        if _kind(tensor.dtype) != _kind(dtype):
            got = str(tensor.dtype).removeprefix("torch.")
            raise BatchError(f"input {data.path!r}: expected type {data.dtype}, got {got}; convert it")
        tensor = tensor.to(dtype)
    return tensor


def _advice(data: InputData, shape: tuple[int, ...]) -> str:
    dim = data.batch_dim
    if dim is not None and len(shape) == len(data.shape):
        others = [d for d in range(len(shape)) if d != dim]
        if all(shape[d] == data.shape[d] for d in others):
            return (
                f"another batch size than planned ({data.shape[dim]}); pass the whole global batch of "
                f"{data.shape[dim]} samples, or plan again with global_batch={shape[dim]}"
            )
    return "the plan was made for inputs of the expected shape; pass such, or plan again for these"


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"
