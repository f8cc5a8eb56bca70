"""Pad a batch to the shape of a program, and remove the padding from the outputs.

The plan contains the numbers with which new samples and positions are filled (:class:`BatchPadding`). The planner has
proved (``passes/padding/find.py``) that padding with them changes neither the loss, nor a gradient, nor an output at
samples and positions that the batch had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ir.layouts import Layout, take_shard
from partitioner.runtime.engine.batches import BatchEntries
from partitioner.runtime.errors import BatchError
from partitioner.runtime.family.data import BatchPadding, ProgramFamily
from partitioner.runtime.program.program import OutputData, Program, RankProgram


class BatchShape(NamedTuple):
    """The shape of a batch. ``batch``: number of samples. ``length``: number of positions of each sample, such as
    tokens; 0 if the inputs have no dim of positions. ``targets``: number of positions of each target, if targets may
    have another length than the inputs; otherwise 0.
    """

    batch: int
    length: int
    targets: int = 0

    @staticmethod
    def of(padding: BatchPadding) -> BatchShape:
        """Return the shape to which ``padding`` pads batches."""
        return BatchShape(padding.batch, padding.length, padding.targets)

    def fits(self, padding: BatchPadding) -> bool:
        """Return whether a batch of this shape is not larger than the shape to which ``padding`` pads batches."""
        return self.batch <= padding.batch and self.length <= padding.length and self.targets <= padding.targets

    def __str__(self) -> str:
        text = f"{self.batch} samples" + (f" of {self.length} positions" if self.length else "")
        return text + (f" with targets of {self.targets}" if self.targets else "")


class ChosenProgram(NamedTuple):
    """The program that runs a batch, and the batch in the program's shape. ``name``: the program's name; empty for the
    first program of the plan. ``batch``: the batch, padded if necessary. ``real``: the batch's shape before padding;
    ``None`` if it was not padded.
    """

    name: str
    batch: Any
    real: BatchShape | None


def choose_program(family: ProgramFamily, batch: Any) -> ChosenProgram:
    """Return the program for a training step on ``batch``, and the batch padded to the program's shape. The program is
    the one with the least estimated time among those whose shape is large enough. ``family``: all programs of the plan.
    Raise :class:`BatchError` if the batch is too large for all programs, or may not be padded.
    """
    if family.padding is None:
        return ChosenProgram("", batch, None)
    real = find_shape(family.first, family.padding, batch)
    offered = [("", family.padding, float("inf"))]
    offered += [(n, f.padding, f.seconds) for n, f in family.further.items() if f.purpose == "step" and f.padding]
    unseen: dict[tuple[bool, bool], str] = {}  # by whether positions, and target positions, are added
    refusals = {}
    for name, padding, _ in offered:
        added = real.length < padding.length, real.targets < padding.targets
        if added not in unseen:
            unseen[added] = explain_unseen(family.first, padding, batch, real)
        refusals[name] = explain_misfit(padding, real, unseen[added])
    fitting = [each for each in offered if not refusals[each[0]]]
    if not fitting:
        shapes = "; ".join(str(BatchShape.of(p)) for _, p, _ in offered)
        why = next((refusals[n] for n, p, _ in offered if real.fits(p)), "")
        raise BatchError(
            f"the batch has {real}: expected one of the plan's shapes ({shapes}), or fewer"
            f"{f', but {why}' if why else ''}; pass such a batch, or plan again with its shape among "
            "partition(..., shapes=Shapes(...))"
        )
    name, padding, _ = min(fitting, key=lambda each: (each[2], each[1].batch * max(1, each[1].length)))
    return ChosenProgram(name, *fit_batch(family.further[name].program if name else family.first, padding, batch))


def explain_misfit(padding: BatchPadding, real: BatchShape, unseen: str = "") -> str:
    """Return, as text, why a batch of the shape ``real`` cannot be padded to the shape that ``padding`` describes;
    empty if it can. ``unseen``: the result of :func:`explain_unseen`: why adding positions would change the results;
    empty if it would not.
    """
    if not real.fits(padding):
        return f"it is larger than {BatchShape.of(padding)}"
    if real.batch < padding.batch and padding.fewer:
        return f"fewer samples cannot be padded exactly: {padding.fewer}"
    if real.length < padding.length and padding.shorter:
        return f"fewer positions cannot be padded exactly: {padding.shorter}"
    if real.targets < padding.targets and padding.shorter_targets:
        return f"fewer target positions cannot be padded exactly: {padding.shorter_targets}"
    return unseen


_HIDDEN = {
    "all": "all positions",
    "first": "the first position",
    "gap": "the first position or a gap between visible ones",
}


def explain_unseen(program: Program, padding: BatchPadding, batch: Any, real: BatchShape) -> str:
    """Return, as text for the user, why adding positions to ``batch`` would change the results; empty if it would not.
    Results change if an input, such as an attention mask for padding on the left, hides all positions from some query:
    the query then attends to all positions with equal weight, also to added ones. ``program``: the program of all
    ranks. ``padding``: has, for each input, the number that hides a position. ``real``: the shape of the batch.
    """
    entries = BatchEntries(program, batch)
    for path, how in padding.inputs.items():
        leaf = entries.leaves.get(entries.resolve_argument_path(path)) if how.hides is not None else None
        grows = ((how.length_dim, real.length < padding.length), (how.target_dim, real.targets < padding.targets))
        dim = next((d for d, padded in grows if padded and d is not None), None)
        if not isinstance(leaf, Tensor) or dim is None or how.hides is None:
            continue
        hidden = leaf.eq(how.hides).movedim(dim, -1)
        rows = hidden.all(-1) if how.unseen == "all" else hidden[..., 0]
        if how.unseen == "gap":
            rows = rows | (hidden[..., :-1] & ~hidden[..., 1:]).any(-1)
        if rows.any():
            sample = f" of sample {int(rows.nonzero()[0, 0])}" if how.batch_dim == 0 else ""
            return (
                f"positions cannot be added: {path} hides {_HIDDEN[how.unseen]}{sample}, and a query that sees no "
                "position gives equal weight to all, also to added ones, which changes the loss; pad on the right, or "
                'use attention with boolean masks (attn_implementation="sdpa" in transformers)'
            )
    return ""


def fit_batch(program: Program, padding: BatchPadding | None, batch: Any) -> tuple[Any, BatchShape | None]:
    """Return ``batch`` padded to the shape for which ``program`` was planned, and the shape of the batch before padding
    (``None`` if the batch was not padded). ``padding``: how the program's inputs are padded; ``None``: not at all.
    Raise :class:`BatchError` if the batch may not be padded.
    """
    if padding is None:
        return batch, None
    real = find_shape(program, padding, batch)
    if real == BatchShape.of(padding):
        return batch, None
    unseen = explain_unseen(program, padding, batch, real)
    why = explain_misfit(padding, real, unseen)
    if why:
        raise BatchError(
            f"the batch has {real}, the program is for {BatchShape.of(padding)}, and {why}; pass a "
            "batch of that shape, or plan again for this one"
        )
    entries = BatchEntries(program, batch)
    leaves = dict(entries.leaves)
    for path, how in padding.inputs.items():
        place = entries.resolve_argument_path(path)
        leaf = leaves.get(place)
        if not isinstance(leaf, Tensor):
            continue
        if how.length_dim is not None:
            leaf = _pad_dim(leaf, how.length_dim, padding.length, how.length_fill)
        if how.target_dim is not None:
            leaf = _pad_dim(leaf, how.target_dim, padding.targets, how.target_fill)
        if how.batch_dim is not None:
            leaf = _pad_dim(leaf, how.batch_dim, padding.batch, how.batch_fill)
        leaves[place] = leaf
    return leaves, real


def find_shape(program: Program, padding: BatchPadding, batch: Any) -> BatchShape:
    """Return the shape of ``batch``: the number of samples, and the numbers of positions of each sample and of each
    target. ``padding``: has the dims of each input that count samples and positions. Raise :class:`BatchError` if
    inputs have different numbers, or if a number is 0. ``program``: the program of all ranks.
    """
    entries = BatchEntries(program, batch)
    found: dict[str, dict[str, int]] = {"samples": {}, "positions": {}, "target positions": {}}
    for path, how in padding.inputs.items():
        leaf = entries.leaves.get(entries.resolve_argument_path(path))
        for what, dim in zip(found, (how.batch_dim, how.length_dim, how.target_dim), strict=True):
            if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
                found[what][path] = int(leaf.shape[dim])
    for what, sizes in found.items():
        if len({*sizes.values()}) > 1 or 0 in sizes.values():
            told = ", ".join(f"{path} has {size}" for path, size in sizes.items())
            other = what == "positions" and 0 not in sizes.values()
            advice = "; if targets vary by themselves, plan with inputs in which they have another length than the rest"
            raise BatchError(
                f"the inputs differ in their {what}: {told}; expected one number, of 1 or more, in all"
                f"{advice if other else ''}"
            )
    batch_size, length, targets = (next(iter(sizes.values()), 0) for sizes in found.values())
    return BatchShape(batch_size or padding.batch, length or padding.length, targets or padding.targets)


def _pad_dim(leaf: Tensor, dim: int, size: int, fill: float | None) -> Tensor:
    """Return ``leaf``, an input of the batch, extended to ``size`` along ``dim``. The new elements have the value
    ``fill``; if ``fill`` is ``None``, they are copies of the last slice of ``leaf``.
    """
    missing = size - leaf.shape[dim]
    if missing <= 0:
        return leaf
    last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
    sizes = list(leaf.shape)
    sizes[dim] = missing
    new = last.expand(sizes) if fill is None else last.new_full(sizes, fill)
    return torch.cat([leaf, new], dim)


def trim_outputs(
    rank: RankProgram, padding: BatchPadding, real: BatchShape, outputs: Mapping[str, Mapping[int, Tensor]]
) -> dict[str, dict[int, Tensor]]:
    """Return ``outputs`` without padded samples and positions, as a nested dict: value name -> microbatch -> this
    rank's tensor. The tensor of a microbatch that has only padding becomes empty. ``rank``: the program of this rank.
    ``padding``: has the dims of each output that count samples and positions. ``real``: the shape of the batch before
    padding. ``outputs``: value name -> microbatch -> this rank's tensor.
    """
    trimmed: dict[str, dict[int, Tensor]] = {value: dict(parts) for value, parts in outputs.items()}
    for output in rank.program.outputs:
        dims, target = padding.outputs.get(output.path, (None, None)), padding.target_outputs.get(output.path)
        if (dims == (None, None) and target is None) or output.value not in trimmed:
            continue
        length = real.length + padding.trimmed.get(output.path, 0)
        for microbatch, part in trimmed[output.value].items():
            if dims[1] is not None and real.length < padding.length:
                whole = padding.length + padding.trimmed.get(output.path, 0)
                part = _keep_places(rank, output, part, dims[1], torch.arange(whole) < length)
            if target is not None and real.targets < padding.targets:
                kept = torch.arange(padding.targets + target[1]) < real.targets + target[1]
                part = _keep_places(rank, output, part, target[0], kept)
            if dims[0] is not None and real.batch < padding.batch:
                count = padding.batch // rank.program.batch_microbatches
                rows = torch.arange(count) + rank.share[microbatch] * count
                part = _keep_places(rank, output, part, dims[0], rows < real.batch)
            trimmed[output.value][microbatch] = part
    return trimmed


def _keep_places(rank: RankProgram, output: OutputData, part: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Return ``part``, a rank's part of an output of the model, without the slices along ``dim`` that are padding.
    ``kept``: a bool for each position of the whole dim, over all ranks: whether its slice is kept. ``output``:
    describes how the output is sharded, and thus which positions this rank has. ``rank``: the program of this rank.
    """
    mesh, at = rank.program.mesh, rank.coordinates
    for text, axis in ((output.context, "cp"), (output.layout, "tp")):
        layout = Layout.parse(text)
        if layout.is_shard and layout.dim == dim:
            kept = take_shard(
                kept.view([-1 if d == dim else 1 for d in range(dim + 1)]), layout, mesh.get(axis, 1), at[axis]
            )
            kept = kept.reshape(-1)
    return part.index_select(dim, kept.nonzero().flatten().to(part.device))
