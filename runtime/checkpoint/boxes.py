"""Which boxes of the model's tensors a rank holds, and which of them it writes.

Whatever a rank holds of a tensor is a list of boxes: offsets and sizes in the whole tensor, as
``torch.distributed.checkpoint`` describes chunks. A checkpoint knows nothing else of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from passes.layouts import Shard, local_shape, shard_slices
from runtime.pieces import Piece as FlatPiece
from runtime.program import Program, RankProgram, StateData, shard_shape, shards_of

Range = tuple[int, int]  # start, length


class Box(NamedTuple):
    """A part of a tensor: ``offsets`` in the whole, ``sizes``, and ``local``, where it starts in the rank's shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


class Held(NamedTuple):
    """What a rank holds of a state: what cut upon cut leaves, and of that (flat) the elements of its ``piece``.

    ``first``: of those that have the pieces; which elements that are does not tell where there are none.
    """

    shards: tuple[Shard, ...]
    piece: tuple[int, int] | None = None  # the first element and how many; ``None``: all
    first: bool = True


def held_by(program: Program, state: str, rank: int) -> Held:
    """What ``rank`` holds of ``state``."""
    shards = shards_of(program, state, rank)
    if not program.states[state].zero_axes:
        return Held(shards)
    group = program.rank(rank).zero_group(state)
    piece = FlatPiece(math.prod(shard_shape(program, state)), len(group), group.index(rank))
    return Held(shards, (piece.start, piece.size), piece.index == 0)


@dataclass(frozen=True)
class Piece:
    """A box of the tensor ``key`` of global ``shape``; ``tensor`` is a view of what the rank holds of it."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def boxes(shape: Sequence[int], shards: Sequence[Shard], within: Box | None = None) -> list[Box]:
    """The boxes of a tensor of global ``shape`` that cut upon cut leaves to a rank, in the order of its shard.

    ``within``: only what is in this box of the shard.
    """
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for layout, num_ranks, index in shards:
        if layout.is_shard:
            held = ranges[layout.dim]
            pieces = shard_slices(layout, sum(length for _, length in held), num_ranks, index)
            ranges[layout.dim] = _merged(r for piece in pieces for r in _within(held, piece))
    if within is not None:
        ranges = [list(_within(held, part)) for held, part in zip(ranges, zip(*within[:2], strict=True), strict=True)]
    starts = [_starts(held) for held in ranges]
    return [
        Box(tuple(r[0] for r, _ in chosen), tuple(r[1] for r, _ in chosen), tuple(at for _, at in chosen))
        for chosen in product(*(zip(held, at, strict=True) for held, at in zip(ranges, starts, strict=True)))
    ]


def _within(held: Sequence[Range], piece: Range) -> Iterator[Range]:
    """The parts of the whole that ``piece`` of what is held stands for."""
    start, stop = piece[0], piece[0] + piece[1]
    for (first, length), at in zip(held, _starts(held), strict=True):
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            yield first + low - at, high - low


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, length in ranges:
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((start, length))
    return merged


def _starts(held: Sequence[Range]) -> list[int]:
    starts, at = [], 0
    for _, length in held:
        starts.append(at)
        at += length
    return starts


def runs(shape: Sequence[int], start: int, size: int) -> Iterator[Box]:
    """The boxes that ``size`` elements from ``start`` are of a tensor of ``shape``, taken row by row, in their order.

    ``local``: where a box's elements start among these.
    """
    if not shape:
        if size:
            yield Box((), (), (0,))
        return
    row, done = math.prod(shape[1:]), 0
    while done < size:
        at, inside = divmod(start + done, row)
        if inside or size - done < row:
            part = min(row - inside, size - done)
            for box in runs(shape[1:], inside, part):
                yield Box((at, *box.offsets), (1, *box.sizes), (done + box.local[0],))
        else:
            part = (size - done) // row * row
            yield Box((at, *(0 for _ in shape[1:])), (part // row, *shape[1:]), (done,))
        done += part


def _views(state: StateData, held: Held, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The boxes that a rank holds, and a view of what it holds of each."""
    if held.piece is None or not tensor.dim():
        yield from ((box, _part(tensor, box)) for box in boxes(state.shape, held.shards))
        return
    shape = state.shape
    for layout, num_ranks, _ in held.shards:
        shape = local_shape(layout, shape, num_ranks)
    if not math.prod(shape):  # of nothing the first one has all
        yield from ((box, tensor.view(box.sizes)) for box in boxes(state.shape, held.shards) if held.first)
        return
    for run in runs(shape, *held.piece):
        flat = tensor[run.local[0] : run.local[0] + math.prod(run.sizes)].view(run.sizes)
        for box in boxes(state.shape, held.shards, run):
            yield box, _part(flat, box)


def _part(tensor: Tensor, box: Box) -> Tensor:
    if tensor.dim():
        for dim, (at, size) in enumerate(zip(box.local, box.sizes, strict=True)):
            tensor = tensor.narrow(dim, at, size)
    return tensor


def pieces(prefix: str, name: str, state: StateData, held: Held, tensor: Tensor, suffix: str = "") -> list[Piece]:
    """What a rank holds of a state, or of the optimizer's for it, by the model's names: a stack is its parts.

    A number (a 0-d ``tensor``, of a state that is none) belongs to the box at the tensor's origin.
    """
    found = []
    if state.shape and not tensor.dim() and not held.first:
        return []  # of those that share a state the first one has its numbers
    for box, view in _views(state, held, tensor):
        if not state.parts:
            named = [(name, box.offsets)]
        else:
            named = [(part, box.offsets[1:]) for part in state.parts[box.offsets[0] : box.offsets[0] + box.sizes[0]]]
        if state.shape and not tensor.dim():
            found += [Piece(f"{prefix}{n}{suffix}", (), (), tensor) for n, at in named if not any(at)]
            continue
        views, shape = (view.unbind(0), state.shape[1:]) if state.parts else ((view,), state.shape)
        found += [Piece(f"{prefix}{n}{suffix}", shape, at, v) for (n, at), v in zip(named, views, strict=True)]
    return found


def whole_piece(prefix: str, name: str, tensor: Tensor, suffix: str) -> Piece:
    """All of a tensor that has a shape of its own."""
    return Piece(f"{prefix}{name}{suffix}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def number(prefix: str, name: str, state: StateData, tensor: Tensor, suffix: str = "") -> Piece:
    """Where every rank reads a number from: the parts of a stack have the same."""
    return Piece(f"{prefix}{(state.parts or (name,))[0]}{suffix}", (), (), tensor)


def written_by(rank: RankProgram, states: Iterable[str]) -> set[str]:
    """Those of ``states`` of which this rank writes its part.

    Every part is written once, on the first stage that reads it; ranks that hold the same parts share them out by size.
    All ranks find the same without a word to each other.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in states:
        data = rank.program.states[name]
        if rank.stage_index == min(data.stages):
            # of states that are shared alike, pieces of the same index are on the same ranks
            index = rank.zero_group(name).index(rank.rank)
            cut = data.layout, data.expert_layout, rank.shards(name), data.zero_axes, index
            alike.setdefault(cut, []).append(name)
    everyone = rank.group("dp", "cp", "tp")
    mine: set[str] = set()
    for names in alike.values():
        own = held_by(rank.program, names[0], rank.rank)
        index = rank.zero_group(names[0]).index(rank.rank)
        holders = [
            r
            for r in everyone
            if shards_of(rank.program, names[0], r) == own.shards
            and rank.program.rank(r).zero_group(names[0]).index(r) == index
        ]
        mine |= {n for n, place in _shared_out(names, len(holders), rank).items() if holders[place] == rank.rank}
    return mine


def _shared_out(names: Sequence[str], num_holders: int, rank: RankProgram) -> Mapping[str, int]:
    """The largest first, each to the holder with the least so far."""
    sizes = {name: math.prod(rank.program.states[name].shape) for name in names}
    loads = [0] * num_holders
    places = {}
    for name in sorted(names, key=lambda n: (-sizes[n], n)):
        places[name] = loads.index(min(loads))
        loads[places[name]] += max(1, sizes[name])
    return places
