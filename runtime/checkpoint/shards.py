"""Compute which boxes of the model's tensors a rank holds, and which of them it writes to a checkpoint.

A rank's part of a tensor is a list of boxes. A box is given by its offsets and sizes in the whole tensor, which is how
``torch.distributed.checkpoint`` describes chunks. A checkpoint stores nothing else about the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from partitioner.passes.ir.layouts import Shard, local_shape, shard_slices
from partitioner.runtime.program.program import Program, RankProgram, StateData, list_shards, shard_shape
from partitioner.runtime.program.sharded_buckets import FlatShard as FlatPiece

Range = tuple[int, int]  # start, length


class ShardBox(NamedTuple):
    """A rectangular part of a tensor that a rank holds. ``offsets`` and ``sizes``: position and size in the whole
    tensor, per dim. ``local``: position in the rank's shard, per dim; for a part of a flattened tensor, a tuple of one
    number, the position in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


class RankShard(NamedTuple):
    """The part of a parameter or buffer that a rank holds: its shard or, under ZeRO, a piece of the flattened shard.

    Args:
        shards: how the tensor is sharded, one entry for each mesh axis: the layout (which dim is cut), the number of
            ranks, and the index of this rank among them. Each entry is applied to the result of the one before.
        piece: first element and number of elements of the ZeRO piece; ``None``: the rank holds the whole shard.
        first: whether the rank is the first of the ranks that divide the shard. If all pieces are empty, the first rank
            writes.
    """

    shards: tuple[Shard, ...]
    piece: tuple[int, int] | None = None  # first element and number of elements; ``None``: all
    first: bool = True


def find_rank_shard(program: Program, state: str, rank: int) -> RankShard:
    """Return the part of the parameter or buffer named ``state`` of ``program`` that the global rank ``rank`` holds."""
    shards = list_shards(program, state, rank)
    if not program.states[state].zero_axes:
        return RankShard(shards)
    group = program.rank(rank).zero_group(state)
    piece = FlatPiece(math.prod(shard_shape(program, state)), len(group), group.index(rank))
    return RankShard(shards, (piece.start, piece.size), piece.index == 0)


@dataclass(frozen=True)
class ShardPiece:
    """A rectangular part of a tensor in a checkpoint, with its data. ``key``: the tensor's name in the checkpoint.
    ``shape``: the tensor's global shape. ``offsets``: position of the part. ``tensor``: a view of the rank's data with
    the shape of the part.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def compute_shard_boxes(
    shape: Sequence[int], shards: Sequence[Shard], limits: ShardBox | None = None
) -> list[ShardBox]:
    """Return the rectangular parts of a tensor of global ``shape`` that make up a rank's shard, in the shard's order.
    ``shards``: how the tensor is sharded, one entry for each mesh axis: the layout (which dim is cut), the number of
    ranks, and the index of this rank among them. The entries are applied one after the other. ``limits``: return only
    the parts inside this box of the shard; ``None``: all parts.
    """
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for layout, num_ranks, index in shards:
        if layout.is_shard:
            rank_shard = ranges[layout.dim]
            pieces = shard_slices(layout, sum(length for _, length in rank_shard), num_ranks, index)
            ranges[layout.dim] = _merge_ranges(r for piece in pieces for r in _map_local_range(rank_shard, piece))
    if limits is not None:
        ranges = [
            list(_map_local_range(held, part)) for held, part in zip(ranges, zip(*limits[:2], strict=True), strict=True)
        ]
    starts = [_compute_starts(held) for held in ranges]
    return [
        ShardBox(tuple(r[0] for r, _ in chosen), tuple(r[1] for r, _ in chosen), tuple(at for _, at in chosen))
        for chosen in product(*(zip(held, at, strict=True) for held, at in zip(ranges, starts, strict=True)))
    ]


def _map_local_range(ranges: Sequence[Range], piece: Range) -> Iterator[Range]:
    """Yield the ranges of a whole dim that correspond to ``piece``, a range of a rank's shard of this dim. Ranges are
    pairs (start, length). ``ranges``: the ranges of the whole dim whose concatenation is the rank's shard.
    """
    start, stop = piece[0], piece[0] + piece[1]
    for (first, length), at in zip(ranges, _compute_starts(ranges), strict=True):
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            yield first + low - at, high - low


def _merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return ``ranges``, pairs (start, length), with adjacent ranges joined: a range that begins where the previous
    range ends becomes part of the previous range.
    """
    merged: list[Range] = []
    for start, length in ranges:
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((start, length))
    return merged


def _compute_starts(ranges: Sequence[Range]) -> list[int]:
    """Return, for each of ``ranges``, pairs (start, length), the position at which it begins in their concatenation."""
    starts, at = [], 0
    for _, length in ranges:
        starts.append(at)
        at += length
    return starts


def split_range_into_boxes(shape: Sequence[int], start: int, size: int) -> Iterator[ShardBox]:
    """Yield, in order, rectangular boxes that together are the elements ``[start, start + size)`` of a row-major tensor
    of ``shape``. ``start`` and ``size`` count elements of the flattened tensor. ``local`` of each box is a tuple of one
    number: the offset of the box's first element from ``start``.
    """
    if not shape:
        if size:
            yield ShardBox((), (), (0,))
        return
    row, done = math.prod(shape[1:]), 0
    while done < size:
        at, inside = divmod(start + done, row)
        if inside or size - done < row:
            part = min(row - inside, size - done)
            for box in split_range_into_boxes(shape[1:], inside, part):
                yield ShardBox((at, *box.offsets), (1, *box.sizes), (done + box.local[0],))
        else:
            part = (size - done) // row * row
            yield ShardBox((at, *(0 for _ in shape[1:])), (part // row, *shape[1:]), (done,))
        done += part


def _view_boxes(state: StateData, rank_shard: RankShard, tensor: Tensor) -> Iterator[tuple[ShardBox, Tensor]]:
    """Yield the rectangular parts of the parameter or buffer ``state`` that a rank holds, each with a view of its data.
    ``tensor``: the rank's shard or, under ZeRO, its piece of the flattened shard. ``rank_shard``: describes the part
    that the rank holds.
    """
    if rank_shard.piece is None or not tensor.dim():
        yield from ((box, _slice_box(tensor, box)) for box in compute_shard_boxes(state.shape, rank_shard.shards))
        return
    shape = state.shape
    for layout, num_ranks, _ in rank_shard.shards:
        shape = local_shape(layout, shape, num_ranks)
    if not math.prod(shape):  # an empty shard has no pieces: the first rank of the group holds its boxes
        yield from (
            (box, tensor.view(box.sizes))
            for box in compute_shard_boxes(state.shape, rank_shard.shards)
            if rank_shard.first
        )
        return
    for run in split_range_into_boxes(shape, *rank_shard.piece):
        flat = tensor[run.local[0] : run.local[0] + math.prod(run.sizes)].view(run.sizes)
        for box in compute_shard_boxes(state.shape, rank_shard.shards, run):
            yield box, _slice_box(flat, box)


def _slice_box(tensor: Tensor, box: ShardBox) -> Tensor:
    """Return the view of ``tensor``, a rank's shard, that has the elements of ``box``; a 0-dimensional tensor is
    returned unchanged.
    """
    if tensor.dim():
        for dim, (at, size) in enumerate(zip(box.local, box.sizes, strict=True)):
            tensor = tensor.narrow(dim, at, size)
    return tensor


def list_shard_pieces(
    prefix: str, name: str, state: StateData, rank_shard: RankShard, tensor: Tensor, suffix: str = ""
) -> list[ShardPiece]:
    """Return a rank's part of a parameter or buffer, or of an optimizer state for it, as named rectangular parts for a
    checkpoint.

    The keys consist of ``prefix``, the model's ``name`` of the parameter, and ``suffix``. ``state``: the description of
    the parameter. If it is a stack of several parameters of the model, each of these gets its own keys and parts.
    ``rank_shard``: describes the part of the parameter that the rank holds. ``tensor``: the rank's data. A number (a
    0-dimensional ``tensor`` for a parameter with dims) is written only by the rank that holds the first element.
    """
    found = []
    if state.shape and not tensor.dim() and not rank_shard.first:
        return []  # the first rank of the group that shares a state writes its numbers
    for box, view in _view_boxes(state, rank_shard, tensor):
        if not state.parts:
            named = [(name, box.offsets)]
        else:
            named = [(part, box.offsets[1:]) for part in state.parts[box.offsets[0] : box.offsets[0] + box.sizes[0]]]
        if state.shape and not tensor.dim():
            found += [ShardPiece(f"{prefix}{n}{suffix}", (), (), tensor) for n, at in named if not any(at)]
            continue
        views, shape = (view.unbind(0), state.shape[1:]) if state.parts else ((view,), state.shape)
        found += [ShardPiece(f"{prefix}{n}{suffix}", shape, at, v) for (n, at), v in zip(named, views, strict=True)]
    return found


def make_whole_piece(prefix: str, name: str, tensor: Tensor, suffix: str) -> ShardPiece:
    """Return all of ``tensor`` as one named part for a checkpoint. Its key consists of ``prefix``, ``name`` and
    ``suffix``. This is for optimizer states whose shape differs from their parameter's.
    """
    return ShardPiece(f"{prefix}{name}{suffix}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def make_scalar_piece(prefix: str, name: str, state: StateData, tensor: Tensor, suffix: str = "") -> ShardPiece:
    """Return the part of a checkpoint from which a 0-dimensional optimizer state is read into ``tensor``. Its key
    consists of ``prefix``, the parameter's ``name`` and ``suffix``. ``state``: the description of the parameter. If it
    is a stack of several parameters of the model, the optimizer state was saved for each of them, with the same value;
    the state of the first is read.
    """
    return ShardPiece(f"{prefix}{(state.parts or (name,))[0]}{suffix}", (), (), tensor)


def list_written_states(rank: RankProgram, states: Iterable[str]) -> set[str]:
    """Return the names of the parameters and buffers in ``states`` whose part on this rank is written to a checkpoint
    by this rank. ``rank``: the program of this rank.

    Every part is written once, by a rank of the first pipeline stage that reads the tensor. Ranks with equal parts
    divide the tensors among themselves so that the bytes are balanced. All ranks compute the same division without
    communication.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in states:
        data = rank.program.states[name]
        if rank.stage_index == min(data.stages):
            # if states are sharded the same way, the same ranks hold their pieces of the same index
            index = rank.zero_group(name).index(rank.rank)
            cut = data.layout, data.expert_layout, rank.shards(name), data.zero_axes, index
            alike.setdefault(cut, []).append(name)
    everyone = rank.group("dp", "cp", "tp")
    mine: set[str] = set()
    for names in alike.values():
        own = find_rank_shard(rank.program, names[0], rank.rank)
        index = rank.zero_group(names[0]).index(rank.rank)
        holders = [
            r
            for r in everyone
            if list_shards(rank.program, names[0], r) == own.shards
            and rank.program.rank(r).zero_group(names[0]).index(r) == index
        ]
        mine |= {n for n, place in _assign_writers(names, len(holders), rank).items() if holders[place] == rank.rank}
    return mine


def _assign_writers(names: Sequence[str], num_holders: int, rank: RankProgram) -> Mapping[str, int]:
    """Return which of several ranks writes each of the parameters and buffers ``names`` to a checkpoint, as a dict:
    name -> index of the rank among the ``num_holders`` ranks that have equal parts. The assignment is greedy: the
    largest tensor first, each to the rank with the fewest elements so far. ``rank``: the program of this rank, which
    has the shapes of the tensors.
    """
    sizes = {name: math.prod(rank.program.states[name].shape) for name in names}
    loads = [0] * num_holders
    places = {}
    for name in sorted(names, key=lambda n: (-sizes[n], n)):
        places[name] = loads.index(min(loads))
        loads[places[name]] += max(1, sizes[name])
    return places
