"""The batch of a step: find its tensors by path, check them against the plan, and select the rows that a rank reads."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitioner.passes.capture.wrappers import check_tensor
from partitioner.passes.ir.lifted_numbers import Guard
from partitioner.passes.ir.model import leaf_paths
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.errors import BatchError
from partitioner.runtime.files import parse_json
from partitioner.runtime.program.program import InputData, PlainValue, Program, RankProgram


def count_tokens_and_samples(program: Program) -> tuple[int, int]:
    """Return the numbers of tokens and samples of one global batch of ``program``. Tokens are the elements of the first
    two-dimensional integer input. The number of samples is the size of the batch dim of the first input that is split
    over ranks or microbatches. A number is 0 if there is no such input.
    """
    tokens = next((i for i in program.inputs if len(i.shape) == 2 and not dtype_of(i.dtype).is_floating_point), None)
    split = next((i for i in program.inputs if i.batch_dim is not None), None)
    samples = split.shape[split.batch_dim] if split is not None and split.batch_dim is not None else 0
    return (tokens.shape[0] * tokens.shape[1] if tokens is not None else 0), samples


@dataclass(frozen=True)
class BatchShare:
    """The part of a global batch that a rank reads. ``paths``: the inputs that the rank reads. The rows (samples) of
    each input are divided into ``count`` equal parts, and the rank reads the parts with the indices ``parts``. Inputs
    without a batch dim are read whole. Ranks that differ only on ``tp`` or ``cp`` read the same rows.
    """

    paths: frozenset[str]
    parts: range
    count: int

    def rows(self, length: int) -> range:
        """Return the indices of the rows (samples) that this rank reads from a batch input with ``length`` rows, as a
        range; empty if the rank does not read inputs.
        """
        each = length // self.count
        return range(self.parts.start * each, self.parts.stop * each) if self.paths else range(0)


def get_share(rank: RankProgram) -> BatchShare:
    """Return the part of a global batch that ``rank`` reads: the inputs that its program loads, and their samples for
    the rank's coordinate on the axis ``dp``.
    """
    loaded = {name for i in rank.instructions if i.op == "LOAD" for name in i.values}
    paths = frozenset(i.path for i in rank.program.inputs if i.value in loaded)
    if not rank.program.data_shares:  # parts per dp rank: the batch need not be divisible by the microbatches here
        at = rank.coordinates["dp"]
        return BatchShare(paths, range(at, at + 1), rank.program.mesh.get("dp", 1))
    return BatchShare(paths, rank.share, rank.program.batch_microbatches)


def flatten_by_path(batch: Any) -> dict[str, Any]:
    """Return the entries of ``batch``, a batch of nested tuples, lists and dicts, as a dict: path -> value. Paths look
    like ``input_ids``, ``0`` or ``past.0.key``.
    """
    if isinstance(batch, Tensor):
        batch = (batch,)
    if isinstance(batch, Mapping):
        batch = dict(batch)
    return dict(leaf_paths(batch))


def convert_batch(program: Program, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of ``batch`` that ``program`` reads, converted to the planned dtypes, as a dict: name in the
    program -> tensor.

    Raise :class:`BatchError` if a tensor is missing, or has another shape or another class of dtype (floating-point,
    complex, integer or boolean) than planned. Also raise it if an entry of the batch that the program does not read,
    such as a flag, differs from its value when the plan was made.
    """
    entries = BatchEntries(program, batch)
    entries.check_fixed(whole=True)
    return {i.value: entries.check_entry(i) for i in program.inputs}


def check_batch(program: Program, batch: Any) -> dict[str, Any]:
    """Return the checked tensors of ``batch``, and the planned values of its entries that are not tensors, as a dict:
    path (such as ``input_ids``) -> value. The dict can itself be passed as a batch. ``program``: the program of all
    ranks. Raise :class:`BatchError` if the batch does not match the plan.
    """
    values = convert_batch(program, batch)
    fixed = {path: plain.value for path, plain in program.signature.fixed.items()}
    return fixed | {i.path: values[i.value] for i in program.inputs}


def convert_rank_batch(program: Program, share: BatchShare, batch: Any, local: bool = False) -> dict[str, Tensor]:
    """Return the tensors that a rank reads from a batch, converted to the planned dtypes, as a dict: name in the
    program -> tensor.

    ``program``: the program of all ranks. ``share``: the part of the global batch that the rank reads. ``local``: if
    true, ``batch`` has only the samples of this rank, and may lack inputs that the rank does not read; otherwise it is
    the global batch. Raise :class:`BatchError` if the batch does not match the plan.
    """
    read = [i for i in program.inputs if i.path in share.paths]
    if local:
        if not read and not batch:
            return {}
        entries = BatchEntries(program, batch)
        entries.check_fixed(whole=False)
        return {i.value: entries.check_entry(i, share) for i in read}
    values = convert_batch(program, batch)
    return {i.value: _select_rank_rows(i, values[i.value], share) for i in read}


def _select_rank_rows(data: InputData, whole: Tensor, share: BatchShare) -> Tensor:
    """Return the rows (samples) of ``whole`` in ``share``, the part of a global batch that a rank reads. ``whole``: the
    tensor of the input ``data`` for the global batch; it is returned unchanged if the input has no batch dim.
    """
    if data.batch_dim is None:
        return whole
    rows = share.rows(data.shape[data.batch_dim])
    return whole.narrow(data.batch_dim, rows.start, len(rows))


class BatchEntries:
    """The entries of ``batch``, one batch for ``program``, by their path in the call of the model. Positional and
    keyword arguments have the same path: the first argument of ``forward(x, mask=None)`` is ``x`` in a tuple and in a
    dict.
    """

    def __init__(self, program: Program, batch: Any) -> None:
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise BatchError(
                f"the batch is a {type(batch).__name__}; expected a tuple of positional arguments, or a dict (any "
                "Mapping) of keyword arguments"
            )
        self.signature = program.signature
        self.names = [a.name for a in self.signature.arguments or ()]
        self.inputs = {self.resolve_argument_path(i.path): i for i in program.inputs}
        self.fixed = {self.resolve_argument_path(path): value for path, value in self.signature.fixed.items()}
        self.leaves: dict[str, Any] = {}
        for path, leaf in flatten_by_path(batch).items():
            self.leaves[self.resolve_argument_path(path)] = (
                leaf.item() if isinstance(leaf, np.number | np.bool_) else leaf
            )

    def resolve_argument_path(self, path: str) -> str:
        """Return ``path`` with the index of a positional argument replaced by the argument's name: ``0.key`` becomes
        ``x.key``.
        """
        first, dot, rest = path.partition(".")
        known = first.isdigit() and int(first) < len(self.names)
        return f"{self.names[int(first)]}{dot}{rest}" if known else path

    # -- entries that the program does not read

    def check_fixed(self, whole: bool) -> None:
        """Raise :class:`BatchError` if an entry of the batch that the plan's program does not read, such as a flag,
        differs from its value when the plan was made, or if numbers of the batch would lead the model's ``forward`` to
        another branch than the planned one. ``whole``: if true, also check the entries that the batch leaves out, whose
        value is the default in ``forward``.
        """
        for path, leaf in self.leaves.items():
            if path not in self.inputs:
                self._check_entry(path, leaf)
        for path, planned in self.fixed.items():
            if whole and path not in self.leaves and self.signature.arguments is not None:
                self._check_absent(path, planned)
        self._check_guards()

    def _check_entry(self, path: str, leaf: Any) -> None:
        """Raise :class:`BatchError` if ``leaf``, the entry at ``path``, which the plan's program does not read, is not
        the planned value.
        """
        planned = self.fixed.get(path) or self._find_argument_default(path)
        if planned is None:
            raise BatchError(self._explain_unknown_input(path, leaf))
        if not _is_plain(leaf) or PlainValue.of(leaf) != planned:
            raise BatchError(
                f"input {path!r} is {_describe_value(leaf)}, but the plan was made for {path}={planned}, a "
                f"constant in its programs; expected {planned}, or plan again with the new value of {path!r}"
            )

    def _check_absent(self, path: str, planned: PlainValue) -> None:
        """Raise :class:`BatchError` if ``planned``, the planned value of the argument at ``path``, which the batch
        leaves out, is not the argument's default.
        """
        default = self._find_argument_default(path)
        if default != planned:
            instead = "a required argument" if default is None else f"{default} where it is left out"
            raise BatchError(
                f"input {path!r} is missing: the plan was made for {path}={planned}, and forward has {instead}; "
                f"pass {path}={planned}"
            )

    def _find_argument_default(self, path: str) -> PlainValue | None:
        """Return the default of the argument at ``path``; ``None`` if the argument has no default, or one that is not a
        bool, number, string or ``None``.
        """
        return next((a.default for a in self.signature.arguments or () if a.name == path), None)

    def _explain_unknown_input(self, path: str, leaf: Any) -> str:
        """Return the error text for the entry ``leaf`` at ``path``, which the plan's program does not read."""
        first = path.partition(".")[0]
        if first in self.fixed or self._find_argument_default(first) is not None:
            planned = self.fixed.get(first) or self._find_argument_default(first)
            return (
                f"input {first!r} is {_describe_value(leaf)}: the plan was made for {first}={planned} and "
                f"its programs do "
                f"not read it; leave it out, or plan again with {first!r} in the inputs"
            )
        known = [*self.inputs, *self.fixed, *self.names]
        nested = first in known  # the argument is known, but not this entry of it
        close = difflib.get_close_matches(path if nested else first, list(self.inputs) if nested else known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        takes = f"; forward takes ({', '.join(self.names)})" if self.names and first not in self.names else ""
        return (
            f"input {path!r} ({_describe_value(leaf)}) is not read by the plan, which was made for inputs "
            f"{', '.join([*self.inputs, *self.fixed])}{takes}{meant}; leave it out, or plan again with it in the inputs"
        )

    def _check_guards(self) -> None:
        """Raise :class:`BatchError` if the numbers of the batch lead ``forward`` to another branch than the planned
        one.
        """
        if not self.signature.guards:
            return
        given = {place: i for place, i in self.inputs.items() if i.number is not None and place in self.leaves}
        numbers = {i.path: self.check_entry(i).item() for i in given.values()}
        for data in self.signature.guards:
            guard = Guard(parse_json(data.expression), data.outcome, data.where)
            if not guard.holds(numbers):
                values = ", ".join(f"{path}={value}" for path, value in numbers.items())
                raise BatchError(
                    f"the batch has {values}, but the plan was made for {guard}, a condition on which forward "
                    f"branches ({guard.where}); expected numbers that satisfy this condition, or plan again "
                    "with these numbers"
                )

    # -- entries that the program reads

    def check_entry(self, data: InputData, share: BatchShare | None = None) -> Tensor:
        """Return the tensor of the batch for the input ``data``, checked and converted to the planned dtype. ``share``:
        if given, the tensor must have only the rows (samples) of this part of the global batch; ``None``: it must have
        all rows. Raise :class:`BatchError` if the input is missing, or has another shape or another class of dtype
        (floating-point, complex, integer or boolean) than planned.
        """
        expected, dim = data.shape, data.batch_dim
        if share is not None and dim is not None:
            expected = (*expected[:dim], expected[dim] // share.count * len(share.parts), *expected[dim + 1 :])
        place = self.resolve_argument_path(data.path)
        tensor = self.leaves.get(place, self._get_default(place, data))
        if data.number is not None and (place in self.leaves or tensor is not None):
            tensor = _number_tensor(data, tensor)
        if not isinstance(tensor, Tensor):
            have = ", ".join(k for k, v in self.leaves.items() if isinstance(v, Tensor)) or "no tensors"
            got = f"is {_describe_value(tensor)}" if place in self.leaves else "is missing"
            wanted = _describe_tensor(data.dtype, expected) if data.number is None else _A_NUMBER[data.number]
            raise BatchError(f"input {data.path!r} {got}: expected {wanted}, the batch has {have}")
        check_tensor(tensor, f"input {data.path!r}", BatchError, numbers=True)
        shape = tuple(tensor.shape)
        if shape != expected:
            advice = _suggest_shape_fix(data, shape) if share is None else _suggest_local_fix(data, shape, share)
            raise BatchError(f"input {data.path!r}: expected shape {list(expected)}, got {list(shape)}: {advice}")
        dtype = dtype_of(data.dtype)
        if tensor.dtype != dtype:
            if _classify_dtype(tensor.dtype) != _classify_dtype(dtype):
                got = str(tensor.dtype).removeprefix("torch.")
                raise BatchError(f"input {data.path!r}: expected type {data.dtype}, got {got}; convert it")
            tensor = tensor.to(dtype)
        return tensor.resolve_conj().resolve_neg()

    def _get_default(self, place: str, data: InputData) -> Any:
        """Return the default in ``forward`` of the input ``data``, if the input is a Python number with a default;
        otherwise ``None``. ``place``: the input's path in the batch.
        """
        default = self._find_argument_default(place)
        return None if data.number is None or default is None else default.value


def _number_tensor(data: InputData, value: Any) -> Any:
    """Return ``value``, a Python number or a 0-dimensional tensor, as the 0-dimensional tensor that the plan's program
    reads for the input ``data``. Raise :class:`BatchError` if ``value`` is neither, or is a float where the plan has an
    integer.
    """
    whole, real = type(value) is int, type(value) is float
    if isinstance(value, Tensor) and value.dim() == 0:
        whole, real = _classify_dtype(value.dtype) == "integer", value.is_floating_point()
    if not (whole or (real and data.number == "float")):
        raise BatchError(
            f"input {data.path!r} is {_describe_value(value)}; expected "
            f"{_A_NUMBER[data.number or 'float']}, as the plan was "
            "made with"
        )
    if isinstance(value, Tensor):
        return value.detach().to(dtype_of(data.dtype))
    if data.number == "float":
        return torch.tensor(float(value), dtype=dtype_of(data.dtype))
    if not -(1 << 63) <= value < 1 << 63:
        raise BatchError(f"input {data.path!r} is {value}; expected a whole number of 64 bits")
    return torch.tensor(value, dtype=dtype_of(data.dtype))


_A_NUMBER = {"float": "a number, or a tensor of no dims", "int": "a whole number, or such a tensor of no dims"}


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, type(None))


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return _describe_tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return repr(value) if _is_plain(value) else f"a {type(value).__name__}"


def _describe_tensor(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{'an' if dtype[0] == 'i' else 'a'} {dtype} tensor of shape {list(shape)}"


def _suggest_shape_fix(data: InputData, shape: tuple[int, ...]) -> str:
    """Return advice for an error message: what the user can do if the input ``data`` of a global batch has ``shape``
    instead of the planned shape.
    """
    dim = data.batch_dim
    if dim is not None and len(shape) == len(data.shape):
        others = [d for d in range(len(shape)) if d != dim]
        if all(shape[d] == data.shape[d] for d in others):
            if not shape[dim]:
                return "the batch has no samples; leave it out, on all ranks"
            return (
                f"another batch size than planned ({data.shape[dim]}); pass the whole global batch of "
                f"{data.shape[dim]} samples, or plan again with global_batch={shape[dim]}"
            )
    return (
        "the plan was made for inputs of the expected shape; pass inputs of this shape, or plan again for the new one"
    )


def _suggest_local_fix(data: InputData, shape: tuple[int, ...], share: BatchShare) -> str:
    """Return advice for an error message: what the user can do if this rank's part of the input ``data`` has ``shape``
    instead of the expected shape. ``share``: the part of a batch that the rank reads.
    """
    if data.batch_dim is None:
        return "this input is not split over ranks, also with local=True: pass all of it on every rank that reads it"
    if shape == data.shape:
        rows = share.rows(shape[data.batch_dim])
        return (
            "this is the whole global batch, but local=True expects the rank's own part: pass samples "
            f"{rows.start} to {rows.stop - 1} of it, or leave out local=True"
        )
    rows = share.rows(data.shape[data.batch_dim])
    return (
        f"with local=True every rank passes its own part of the planned global batch: here {len(rows)} "
        f"samples, from sample {rows.start} on"
    )


def _classify_dtype(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"
