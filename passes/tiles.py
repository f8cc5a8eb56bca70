"""Which keys the queries of a band see: tiles of both, on one rank or on ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from passes.layouts import shard, shard_slices

_ROWS = 512  # queries of a tile that an end of a window crosses


class Band(NamedTuple):
    """How far a query sees back and ahead; ``None``: as far as there are keys."""

    before: int | None = None
    after: int | None = None

    @property
    def is_full(self) -> bool:
        return self.before is None and self.after is None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to its own, and none behind."""
        return self.before is None and self.after == 0


class Part(NamedTuple):
    """Consecutive positions: where they start in the tensor at hand, how many, and where they start in the sequence."""

    start: int
    length: int
    place: int


class Tile(NamedTuple):
    """Queries and keys, from and to, by their places in the tensors at hand: ``all`` is seen, or up to the
    ``diagonal``, or what is within the ``band``. ``offset``: places from the first key to the first query."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["all", "diagonal", "band"]
    offset: int


def parts_of(length: int, num_ranks: int, rank: int, zigzag: bool) -> tuple[Part, ...]:
    """The positions that ``rank`` has of a sequence of which each rank has ``length``."""
    slices = shard_slices(shard(0, (), zigzag), length * num_ranks, num_ranks, rank)
    starts = accumulate((n for _, n in slices), initial=0)
    return tuple(Part(start, n, place) for start, (place, n) in zip(starts, slices, strict=False))


def ring_tiles(
    queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band, rank: int, step: int
) -> tuple[Tile, ...]:
    """What ``rank`` sees of the keys that come from ``step`` ranks before it. ``queries``, ``keys``: of each rank."""
    own = parts_of(queries, num_ranks, rank, zigzag)
    return tiles_of(own, parts_of(keys, num_ranks, (rank - step) % num_ranks, zigzag), band)


@lru_cache(maxsize=4096)
def ring_steps(queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band) -> tuple[int, ...]:
    """From how many ranks before it some rank sees keys, its own first."""
    seen = [
        s for s in range(1, num_ranks)
        if any(ring_tiles(queries, keys, num_ranks, zigzag, band, r, s) for r in range(num_ranks))
    ]  # fmt: skip
    return 0, *seen


@lru_cache(maxsize=4096)
def most_pairs(queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band) -> int:
    """Pairs of a query and a key that it sees, on the rank that has most; ``queries``, ``keys``: of each rank."""
    before, after = band
    most = 0
    for rank in range(num_ranks):
        pairs = 0
        for part in parts_of(queries, num_ranks, rank, zigzag):
            place = np.arange(part.place, part.place + part.length)
            last = keys * num_ranks - 1
            ends = np.full_like(place, last) if after is None else np.minimum(place + after, last)
            starts = np.zeros_like(place) if before is None else np.maximum(place - before, 0)
            pairs += int(np.maximum(ends - starts + 1, 0).sum())
        most = max(most, pairs)
    return most


@lru_cache(maxsize=4096)
def tiles_of(queries: tuple[Part, ...], keys: tuple[Part, ...], band: Band) -> tuple[Tile, ...]:
    """The tiles that have something to see. Every query of a tile sees some key of it."""
    found: list[Tile] = []
    for q in queries:
        for k in keys:
            offset = q.place - k.place
            for rows, columns, kind in _tiles(q.length, k.length, offset, band):
                tile = Tile(
                    (q.start + rows[0], q.start + rows[1]),
                    (k.start + columns[0], k.start + columns[1]),
                    kind,
                    offset + rows[0] - columns[0],
                )
                if not any(_joined(found, i, tile) for i in range(len(found))):
                    found.append(tile)
    return tuple(found)


def _joined(found: list[Tile], place: int, tile: Tile) -> bool:
    """Make one of two tiles that are seen whole and lie side by side, if they do."""
    other = found[place]
    if tile.kind != "all" or other.kind != "all":
        return False
    for mine, theirs in ((tile.rows, other.rows), (tile.keys, other.keys)):
        if mine[0] == theirs[1] and (tile.rows == other.rows or tile.keys == other.keys):
            both = (theirs[0], mine[1])
            found[place] = other._replace(rows=both) if tile.keys == other.keys else other._replace(keys=both)
            return True
    return False


_Tile = tuple[tuple[int, int], tuple[int, int], Literal["all", "diagonal", "band"]]


def _tiles(num_queries: int, num_keys: int, offset: int, band: Band) -> Iterator[_Tile]:
    """The tiles where query 0 stands ``offset`` places after key 0."""
    before, after = band
    first = 0 if after is None else max(0, -offset - after)
    last = num_queries if before is None else min(num_queries, num_keys + before - offset)
    if first >= last:
        return
    if after is None and before is None:
        yield (0, num_queries), (0, num_keys), "all"
    elif before is None:
        assert after is not None
        yield from _causal(first, last, num_keys, first + offset + after)
    else:
        yield from _window(first, last, num_keys, offset, before, after)


def _causal(first: int, last: int, num_keys: int, shared: int) -> Iterator[_Tile]:
    """Queries ``first`` to ``last``, of which the first sees the keys up to place ``shared``, the next one more."""
    shared = min(shared, num_keys)
    if shared > 0:
        yield (first, last), (0, shared), "all"
    square = min(last - first, num_keys - shared)
    if square > 0:
        yield (first, first + square), (shared, shared + square), "diagonal"
        if first + square < last:
            yield (first + square, last), (shared, num_keys), "all"


def _window(first: int, last: int, num_keys: int, offset: int, before: int, after: int | None) -> Iterator[_Tile]:
    for start in range(first, last, _ROWS):
        stop = min(start + _ROWS, last)
        lowest = max(0, start + offset - before)
        highest = num_keys if after is None else min(num_keys, stop + offset + after)
        from_all = stop - 1 + offset - before <= lowest
        to_all = after is None or start + offset + after >= highest - 1
        yield (start, stop), (lowest, highest), "all" if from_all and to_all else "band"
