"""The batch that a step runs on: found by path, checked against the plan, and which part of it a rank reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.accepted import check_tensor
from passes.serialize import dtype_of
from runtime.errors import BatchError
from runtime.program import InputData, Program, RankProgram


@dataclass(frozen=True)
class Share:
    """What a rank reads of a global batch: the inputs at ``paths``, and of their rows these ``parts`` of ``count``.

    Inputs without a batch dim are read whole. Ranks that differ only on ``tp`` or ``cp`` have the same share.
    """

    paths: frozenset[str]
    parts: range
    count: int

    def rows(self, length: int) -> range:
        """Its rows of ``length``, one run; none where it reads no inputs."""
        each = length // self.count
        return range(self.parts.start * each, self.parts.stop * each) if self.paths else range(0)


def share_of(rank: RankProgram) -> Share:
    """The inputs that a rank's program loads, and its rows of them: those of its place on ``dp``."""
    loaded = {name for i in rank.instructions if i.op == "LOAD" for name in i.values}
    paths = frozenset(i.path for i in rank.program.inputs if i.value in loaded)
    if not rank.program.data_shares:  # a batch need not split into microbatches here, as long as it does into these
        at = rank.coordinates["dp"]
        return Share(paths, range(at, at + 1), rank.program.mesh.get("dp", 1))
    return Share(paths, rank.share, rank.program.batch_microbatches)


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


def own_values(program: Program, share: Share, batch: Any, local: bool = False) -> dict[str, Tensor]:
    """What a rank reads of ``batch``, by value name, in the planned types: its rows of a global batch.

    ``local``: ``batch`` has these rows alone, and need not have what the rank does not read. Raises
    :class:`BatchError`, as :func:`batch_values` does.
    """
    read = [i for i in program.inputs if i.path in share.paths]
    if local:
        leaves = leaves_by_path(batch) if read else {}
        return {i.value: _checked(i, leaves, share) for i in read}
    values = batch_values(program, batch)
    return {i.value: _rows(i, values[i.value], share) for i in read}


def _rows(data: InputData, whole: Tensor, share: Share) -> Tensor:
    if data.batch_dim is None:
        return whole
    rows = share.rows(data.shape[data.batch_dim])
    return whole.narrow(data.batch_dim, rows.start, len(rows))


def _checked(data: InputData, leaves: Mapping[str, Any], share: Share | None = None) -> Tensor:
    """An input of the planned shape; of a ``share`` alone where one is given."""
    expected, dim = data.shape, data.batch_dim
    if share is not None and dim is not None:
        expected = (*expected[:dim], expected[dim] // share.count * len(share.parts), *expected[dim + 1 :])
    tensor = leaves.get(data.path)
    if not isinstance(tensor, Tensor):
        have = ", ".join(k for k, v in leaves.items() if isinstance(v, Tensor)) or "no tensors"
        raise BatchError(
            f"input {data.path!r} is missing: expected a {data.dtype} tensor of shape {list(expected)}, "
            f"the batch has {have}"
        )
    check_tensor(tensor, f"input {data.path!r}", BatchError, numbers=True)
    shape = tuple(tensor.shape)
    if shape != expected:
        advice = _advice(data, shape) if share is None else _local_advice(data, shape, share)
        raise BatchError(f"input {data.path!r}: expected shape {list(expected)}, got {list(shape)}: {advice}")
    dtype = dtype_of(data.dtype)
    if tensor.dtype != dtype:
        if _kind(tensor.dtype) != _kind(dtype):
            got = str(tensor.dtype).removeprefix("torch.")
            raise BatchError(f"input {data.path!r}: expected type {data.dtype}, got {got}; convert it")
        tensor = tensor.to(dtype)
    return tensor.resolve_conj().resolve_neg()


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


def _local_advice(data: InputData, shape: tuple[int, ...], share: Share) -> str:
    if data.batch_dim is None:
        return "the program reads this input whole, with local=True too: pass all of it on every rank that reads it"
    if shape == data.shape:
        rows = share.rows(shape[data.batch_dim])
        return (
            f"this is the whole global batch; pass samples {rows.start} to {rows.stop - 1} of it, which are this "
            "rank's, or leave out local=True"
        )
    rows = share.rows(data.shape[data.batch_dim])
    return (
        "with local=True every rank passes its own part of the planned global batch, here its "
        f"{len(rows)} samples from {rows.start} on"
    )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"
