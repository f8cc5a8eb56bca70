"""Which boxes of the model's tensors a rank holds, and which of them it writes.

Whatever a rank holds of a tensor is a list of boxes: offsets and sizes in the whole tensor, as
``torch.distributed.checkpoint`` describes chunks. A checkpoint knows nothing else of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor

from passes.layouts import Shard, shard_slices
from runtime.program import RankProgram, StateData, shards_of

Range = tuple[int, int]  # start, length


class Box(NamedTuple):
    """A part of a tensor: ``offsets`` in the whole, ``sizes``, and ``local``, where it starts in the rank's shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of the tensor ``key`` of global ``shape``; ``tensor`` is a view of what the rank holds of it."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def boxes(shape: Sequence[int], shards: Sequence[Shard]) -> list[Box]:
    """The boxes of a tensor of global ``shape`` that cut upon cut leaves to a rank, in the order of its shard."""
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for layout, num_ranks, index in shards:
        if layout.is_shard:
            held = ranges[layout.dim]
            pieces = shard_slices(layout, sum(length for _, length in held), num_ranks, index)
            ranges[layout.dim] = _merged(r for piece in pieces for r in _within(held, piece))
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


def pieces(
    prefix: str, name: str, state: StateData, shards: Sequence[Shard], tensor: Tensor, suffix: str = ""
) -> list[Piece]:
    """What a rank holds of a state, or of the optimizer's for it, by the model's names: a stack is its parts.

    A number (a 0-d ``tensor``, of a state that is none) belongs to the box at the tensor's origin.
    """
    found = []
    for box in boxes(state.shape, shards):
        if not state.parts:
            named = [(name, box.offsets)]
        else:
            named = [(part, box.offsets[1:]) for part in state.parts[box.offsets[0] : box.offsets[0] + box.sizes[0]]]
        if state.shape and not tensor.dim():
            found += [Piece(f"{prefix}{n}{suffix}", (), (), tensor) for n, at in named if not any(at)]
            continue
        view = tensor
        for dim, (at, size) in enumerate(zip(box.local, box.sizes, strict=True)):
            view = view.narrow(dim, at, size)
        views, shape = (view.unbind(0), state.shape[1:]) if state.parts else ((view,), state.shape)
        found += [Piece(f"{prefix}{n}{suffix}", shape, at, v) for (n, at), v in zip(named, views, strict=True)]
    return found


def number(prefix: str, name: str, state: StateData, tensor: Tensor, suffix: str = "") -> Piece:
    """Where every rank reads a number from: the parts of a stack have the same."""
    return Piece(f"{prefix}{(state.parts or (name,))[0]}{suffix}", (), (), tensor)


def written_by(rank: RankProgram, states: Iterable[str]) -> set[str]:
    """Those of ``states`` of which this rank writes its part.

    Every part is written once, on the first stage that reads it; ranks that hold the same parts share them out by size.
    All ranks find the same without a word to each other.
    """
    alike: dict[tuple[str, str, tuple[Shard, ...]], list[str]] = {}
    for name in states:
        data = rank.program.states[name]
        if rank.stage_index == min(data.stages):
            alike.setdefault((data.layout, data.expert_layout, rank.shards(name)), []).append(name)
    everyone = rank.group("dp", "cp", "tp")
    mine: set[str] = set()
    for (*_, shards), names in alike.items():
        holders = [r for r in everyone if shards_of(rank.program, names[0], r) == shards]
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
