"""Attention within a band of positions, computed in tiles on one rank or on ranks that share a sequence.

A query at position ``i`` sees the keys at ``i - before`` to ``i + after``; ``None`` means no limit. Full attention has
neither limit, causal attention has ``after = 0``, and a sliding window has both limits. :func:`list_tiles` returns the
tiles of queries and keys that a band touches. The device's fused kernel needs no mask for tiles that are completely
visible or visible up to their diagonal. Only tiles that the border of a window crosses need a mask, of the tile's size.

Tiles of the same queries are combined by their logsumexp, which does not overflow (Milakov and Gimelshein 2018; Dao et
al. 2022): ``out = sum_t out_t * exp(lse_t - lse)``. In backward, the gradients are sums over tiles. The addend of each
tile is computed from the result and the logsumexp over all tiles (Liu et al. 2023, ring attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library
from partitioner.passes.ir.layouts import make_shard_layout, shard_slices
from partitioner.passes.ops.score_changes import (
    UNCHANGED,
    BlockScoring,
    ScoreChange,
    attend_block,
    attend_block_backward,
    choose_block_size,
)

aten = torch.ops.aten

_ROWS = 512  # most queries of a tile that the border of a window crosses


class Band(NamedTuple):
    """The range of key positions, relative to a query's own position, that the query sees in an attention.

    ``before``, ``after``: the number of visible positions before and after its own; ``None`` means no limit.
    """

    before: int | None = None
    after: int | None = None

    @property
    def is_full(self) -> bool:
        return self.before is None and self.after is None

    @property
    def is_causal(self) -> bool:
        """Return whether a query sees, in this range, all keys up to its own position and none after it."""
        return self.before is None and self.after == 0


class PositionRange(NamedTuple):
    """Consecutive positions of a sequence that one rank holds.

    ``start``: the index of the first position in the rank's local tensor. ``length``: the number of positions.
    ``place``: the index of the first position in the whole sequence. Indices count from 0.
    """

    start: int
    length: int
    place: int


class Tile(NamedTuple):
    """A rectangle of queries and keys that attention computes at once.

    ``rows`` and ``keys``: (start, stop) of the queries and of the keys in the local tensors. ``kind``: which keys of
    the tile are visible. "all": every query sees all keys of the tile. "diagonal": the tile is square, and its query
    ``i`` (from 0) sees its keys 0 to ``i``. "band": a query sees the keys whose distance from the query is within
    ``limits``. ``offset``: the position of the first query minus that of the first key. ``limits``: how many positions
    before and after its own a query sees in a tile of the kind "band"; ``None`` means the band of the whole attention.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["all", "diagonal", "band"]
    offset: int
    limits: Band | None = None


def split_positions(length: int, num_ranks: int, rank: int, zigzag: bool) -> tuple[PositionRange, ...]:
    """Return the ranges of positions that the rank ``rank`` holds of a sequence that is sharded evenly.

    ``length``: the number of positions per rank. ``num_ranks``: the number of ranks that share the sequence; ``rank``
    is an index among them, from 0. ``zigzag``: if true, each rank has one range counted from the start and one from the
    end of the sequence, which balances causal attention; if false, each rank has a single range.
    """
    slices = shard_slices(make_shard_layout(0, (), zigzag), length * num_ranks, num_ranks, rank)
    starts = accumulate((n for _, n in slices), initial=0)
    return tuple(PositionRange(start, n, place) for start, (place, n) in zip(starts, slices, strict=False))


def list_ring_tiles(
    queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band, rank: int, step: int
) -> tuple[Tile, ...]:
    """Return the tiles (rectangles of queries and keys) that ``rank`` computes in one step of ring attention.

    In step ``step``, a rank has received the keys of the rank ``step`` places before it in the ring. ``queries``,
    ``keys``: the number of queries and of keys per rank. ``zigzag``: whether each rank has one range of positions from
    each end of the sequence, instead of a single range. ``band``: how many positions before and after its own a query
    sees. ``rank``: an index, from 0, among the ``num_ranks`` ranks that share the sequence.
    """
    own = split_positions(queries, num_ranks, rank, zigzag)
    return list_tiles(own, split_positions(keys, num_ranks, (rank - step) % num_ranks, zigzag), band)


@lru_cache(maxsize=4096)
def list_ring_steps(queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band) -> tuple[int, ...]:
    """Return the numbers of the steps of ring attention in which at least one rank has visible keys. Step 0, in which
    each rank has its own keys, is always included and first.

    In step ``s``, a rank has received the keys of the rank ``s`` places before it in the ring. ``queries``, ``keys``:
    the number of queries and of keys per rank. ``num_ranks``: the number of ranks that share the sequence. ``zigzag``:
    whether each rank has one range of positions from each end of the sequence, instead of a single range. ``band``: how
    many positions before and after its own a query sees.
    """
    seen = [
        s for s in range(1, num_ranks)
        if any(list_ring_tiles(queries, keys, num_ranks, zigzag, band, r, s) for r in range(num_ranks))
    ]  # fmt: skip
    return 0, *seen


@lru_cache(maxsize=4096)
def count_max_pairs(queries: int, keys: int, num_ranks: int, zigzag: bool, band: Band) -> int:
    """Return the number of query-key pairs that the busiest rank computes in an attention over a sharded sequence.

    ``queries``, ``keys``: the number of queries and of keys per rank. ``num_ranks``: the number of ranks that share the
    sequence. ``zigzag``: whether each rank has one range of positions from each end of the sequence, instead of a
    single range. ``band``: how many positions before and after its own a query sees.
    """
    before, after = band
    most = 0
    for rank in range(num_ranks):
        pairs = 0
        for part in split_positions(queries, num_ranks, rank, zigzag):
            place = np.arange(part.place, part.place + part.length)
            last = keys * num_ranks - 1
            ends = np.full_like(place, last) if after is None else np.minimum(place + after, last)
            starts = np.zeros_like(place) if before is None else np.maximum(place - before, 0)
            pairs += int(np.maximum(ends - starts + 1, 0).sum())
        most = max(most, pairs)
    return most


@lru_cache(maxsize=4096)
def list_tiles(
    queries: tuple[PositionRange, ...], keys: tuple[PositionRange, ...], band: Band, in_order: bool = False
) -> tuple[Tile, ...]:
    """Return the tiles (rectangles of queries and keys) that attention must compute if each query sees the keys in
    ``band``.

    Every query of a tile sees at least one key of the tile. ``queries``, ``keys``: the ranges of positions of the local
    queries and keys. ``in_order``: if true, the queries of a tile, and its keys, are consecutive in the whole sequence,
    so that the tile's ``offset`` (position of the query minus that of the key) holds for all of the tile. If false, two
    fully visible tiles are also merged if they are adjacent only in the local tensors.
    """
    found: list[Tile] = []
    for q in queries:
        for k in keys:
            offset = q.place - k.place
            for rows, columns, kind in _generate_band_tiles(q.length, k.length, offset, band):
                tile = Tile(
                    (q.start + rows[0], q.start + rows[1]),
                    (k.start + columns[0], k.start + columns[1]),
                    kind,
                    offset + rows[0] - columns[0],
                )
                if not any(_merge_adjacent_tiles(found, i, tile, in_order) for i in range(len(found))):
                    found.append(tile)
    return tuple(found)


def _merge_adjacent_tiles(found: list[Tile], place: int, tile: Tile, in_order: bool) -> bool:
    """Replace ``found[place]`` by its union with ``tile`` if both tiles are completely visible and adjacent in the
    local tensors. Return whether the tiles were merged.

    A tile is a rectangle of queries and keys. ``found``: the tiles so far. ``place``: an index in this list.
    ``in_order``: if true, merge only tiles that are also adjacent in the whole sequence.
    """
    other = found[place]
    if tile.kind != "all" or other.kind != "all":
        return False
    if in_order and tile.offset - other.offset != tile.rows[0] - other.rows[0] - tile.keys[0] + other.keys[0]:
        return False
    for mine, theirs in ((tile.rows, other.rows), (tile.keys, other.keys)):
        if mine[0] == theirs[1] and (tile.rows == other.rows or tile.keys == other.keys):
            both = (theirs[0], mine[1])
            found[place] = other._replace(rows=both) if tile.keys == other.keys else other._replace(keys=both)
            return True
    return False


_BAND_OF_LATER_KEYS = Band(-1, None)  # all keys after the query's own position


@lru_cache(maxsize=4096)
def list_tiles_between(
    queries: tuple[PositionRange, ...], keys: tuple[PositionRange, ...], inner: Band, outer: Band
) -> tuple[Tile, ...]:
    """Return the tiles (rectangles of queries and keys) that cover the pairs whose distance is within ``outer`` but not
    within ``inner``. An attention with a prefix needs these tiles: a query sees the keys of the prefix within
    ``outer``, but all other keys only within ``inner``.

    ``queries``, ``keys``: ranges of positions in one sequence. ``inner``, ``outer``: numbers of positions before and
    after a query's own; ``inner`` lies inside ``outer``.
    """
    found: list[Tile] = []
    if inner.after not in (None, outer.after):
        later = Band(-inner.after - 1, outer.after)
        every = later == _BAND_OF_LATER_KEYS  # keys of all later positions
        tiles = list_tiles_after(queries, keys) if every else list_tiles(queries, keys, later, in_order=True)
        found += (t._replace(limits=later) if t.kind == "band" else t for t in tiles)
    if inner.before not in (None, outer.before):
        earlier = Band(outer.before, -inner.before - 1)
        tiles = list_tiles(queries, keys, earlier, in_order=True)
        found += (t._replace(limits=earlier) if t.kind == "band" else t for t in tiles)
    return tuple(found)


def list_tiles_after(queries: tuple[PositionRange, ...], keys: tuple[PositionRange, ...]) -> tuple[Tile, ...]:
    """Return the tiles (rectangles of queries and keys) that cover all pairs whose key comes after the query. Causal
    attention with a prefix (keys that every query sees) computes these tiles for the keys of the prefix, in addition to
    those of the causal mask. A tile that needs a mask has at most 512 queries and 512 keys.

    ``queries``, ``keys``: ranges of positions in one sequence.
    """
    found: list[Tile] = []
    for q in queries:
        for k in keys:
            offset = q.place - k.place
            before = min(q.length, max(0, -offset))  # number of queries that are before all keys
            last = min(q.length, k.length - 1 - offset)  # from this query on, no key is later than the query
            if before > 0:
                found.append(Tile((q.start, q.start + before), (k.start, k.start + k.length), "all", offset))
            for start in range(before, last, _ROWS):
                stop = min(start + _ROWS, last)
                first, end = start + offset + 1, min(k.length, stop + offset)  # keys first to end - 1 need a mask
                rows = q.start + start, q.start + stop
                if first < end:
                    masked = rows[0], q.start + min(stop, end - 1 - offset)
                    found.append(
                        Tile(
                            masked,
                            (k.start + first, k.start + end),
                            "band",
                            offset + start - first,
                            _BAND_OF_LATER_KEYS,
                        )
                    )
                if end < k.length:
                    found.append(Tile(rows, (k.start + end, k.start + k.length), "all", offset + start - end))
    return tuple(found)


def cut_tile(tile: Tile, band: Band, size: int) -> Iterator[Tile]:
    """Cut ``tile``, a rectangle of queries and keys, into parts of at most ``size`` queries and ``size`` keys, and
    yield each part in which some query sees a key. Some queries of a part may see none of its keys. ``band``: how many
    positions before and after its own a query sees, in a tile of the kind "band" whose ``limits`` is ``None``."""
    limits = {"all": Band(), "diagonal": Band(None, 0), "band": tile.limits or band}[tile.kind]
    # position of query 0 minus that of key 0, relative to which the limits count
    shift = 0 if tile.kind == "diagonal" else tile.offset
    before, after = limits
    for i in range(0, tile.rows[1] - tile.rows[0], size):
        for j in range(0, tile.keys[1] - tile.keys[0], size):
            rows = tile.rows[0] + i, min(tile.rows[0] + i + size, tile.rows[1])
            keys = tile.keys[0] + j, min(tile.keys[0] + j + size, tile.keys[1])
            nearest, farthest = shift + i - j - (keys[1] - keys[0] - 1), shift + i - j + rows[1] - rows[0] - 1
            if (before is not None and nearest > before) or (after is not None and farthest < -after):
                continue
            whole = (before is None or farthest <= before) and (after is None or nearest >= -after)
            yield Tile(rows, keys, "all" if whole else tile.kind, tile.offset + i - j, tile.limits)


_Tile = tuple[tuple[int, int], tuple[int, int], Literal["all", "diagonal", "band"]]


def _generate_band_tiles(num_queries: int, num_keys: int, offset: int, band: Band) -> Iterator[_Tile]:
    """Yield the tiles (rectangles of queries and keys) in which some query sees a key, as (rows, keys, kind). Query 0
    is ``offset`` positions after key 0.

    ``rows``, ``keys``: (start, stop) indices. ``kind``: which keys of the tile are visible. "all": every query sees all
    keys of the tile. "diagonal": the tile is square, and its query ``i`` (from 0) sees its keys 0 to ``i``. "band": a
    query sees the keys of the tile that are within ``band``. ``num_queries``, ``num_keys``: the numbers of queries and
    keys. ``band``: how many positions before and after its own a query sees.
    """
    before, after = band
    first = 0 if after is None else max(0, -offset - after)
    last = num_queries if before is None else min(num_queries, num_keys + before - offset)
    if first >= last:
        return
    if after is None and before is None:
        yield (0, num_queries), (0, num_keys), "all"
    elif before is None:
        assert after is not None
        yield from _generate_causal_tiles(first, last, num_keys, first + offset + after)
    else:
        yield from _generate_window_tiles(first, last, num_keys, offset, before, after)


def _generate_causal_tiles(first: int, last: int, num_keys: int, shared: int) -> Iterator[_Tile]:
    """Yield the tiles (rectangles of queries and keys) of the queries ``first`` to ``last - 1`` under a causal mask,
    each as (rows, keys, kind).

    ``rows``, ``keys``: (start, stop) indices. ``kind``: "all" if the queries see all keys of the tile; "diagonal" if
    the tile is square and its query ``i`` (from 0) sees its keys 0 to ``i``. ``num_keys``: the number of keys.
    ``shared``: the number of keys, from key 0 on, that every query sees. Query ``first`` sees one key more, and each
    further query one more than the query before it.
    """
    shared = min(shared, num_keys)
    if shared > 0:
        yield (first, last), (0, shared), "all"
    square = min(last - first, num_keys - shared)
    if square > 0:
        yield (first, first + square), (shared, shared + square), "diagonal"
        if first + square < last:
            yield (first + square, last), (shared, num_keys), "all"


def _generate_window_tiles(
    first: int, last: int, num_keys: int, offset: int, before: int, after: int | None
) -> Iterator[_Tile]:
    """Yield the tiles (rectangles of queries and keys) of the queries ``first`` to ``last - 1`` under a sliding window,
    each as (rows, keys, kind).

    ``rows``, ``keys``: (start, stop) indices. ``kind``: "all" if every query sees all keys of the tile, otherwise
    "band". ``offset``: the position of query 0 minus that of key 0. ``num_keys``: the number of keys. ``before``,
    ``after``: how many positions a query sees before and after its own; ``None`` means no limit.
    """
    for start in range(first, last, _ROWS):
        stop = min(start + _ROWS, last)
        lowest = max(0, start + offset - before)
        highest = num_keys if after is None else min(num_keys, stop + offset + after)
        from_all = stop - 1 + offset - before <= lowest
        to_all = after is None or start + offset + after >= highest - 1
        yield (start, stop), (lowest, highest), "all" if from_all and to_all else "band"


_NARROW = frozenset({torch.float16, torch.bfloat16})


def _list_parts(tile: Tile, band: Band, q: Tensor, change: ScoreChange) -> Iterable[Tile]:
    """Return the parts of ``tile``, a rectangle of queries and keys, that are computed one after the other. If
    ``change`` changes the scores, for example by a cap, the parts are blocks whose scores fit in memory. Otherwise the
    only part is the tile itself.

    ``q`` ``[..., s, d]``: the queries of all samples and heads. ``band``: how many positions before and after its own a
    query sees.
    """
    if change.is_none:
        return (tile,)
    return cut_tile(tile, band, choose_block_size(math.prod(q.shape[:-2]), q.device.type == "cpu"))


_Masks = dict[tuple[int, int, int, Band], Tensor]


@dataclass
class AttentionAccumulator:
    """Accumulates the attention of the queries ``q`` ``[..., heads, queries, d]`` over tiles (rectangles of queries and
    keys), which are added one after another.

    ``band``: how many positions before and after its own a query sees. ``scale``: the factor of the scores; ``None``
    means ``1 / sqrt(d)``. ``width``: the size of the last dim of the values. ``change``: how the scores are changed
    before the softmax, for example by a cap. ``out`` and ``lse``: the attention over the tiles so far and the logsumexp
    of its scores, in float32 for 16-bit dtypes; ``None`` before the first tile.
    """

    q: Tensor
    band: Band
    scale: float | None
    width: int  # size of the last dim of the values
    out: Tensor | None = None
    lse: Tensor | None = None
    change: ScoreChange = UNCHANGED
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _masks: _Masks = field(default_factory=dict)

    def add(self, tile: Tile, k: Tensor, v: Tensor) -> None:
        """Add the attention over the rectangle ``tile`` of queries and keys to the result so far. ``k`` ``[..., kv
        heads, keys, d]`` and ``v`` ``[..., kv heads, keys, width]``: all local keys and values, of which the tile is a
        part.
        """
        for part in _list_parts(tile, self.band, self.q, self.change):
            rows, keys = slice(*part.rows), slice(*part.keys)
            mask = _make_tile_mask(part, self.band, self.q, self._masks)
            scoring = TileScoring(part.kind == "diagonal", mask, self.scale, self.change, part.offset)
            out, lse = compute_tile_attention(self.q[..., rows, :], k[..., keys, :], v[..., keys, :], scoring)
            self._merge_tile_result(rows, out, lse)

    def _merge_tile_result(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention over one tile (a rectangle of queries and keys) into the result so far. ``rows``: the
        range of the tile's queries. ``out``, ``lse``: the tile's result and the logsumexp of each query's scores."""
        wide = find_accumulation_dtype(self.q)
        if self.out is None and (rows.start, rows.stop) == (0, self.q.shape[-2]):
            self.out, self.lse = out.to(wide), lse.to(wide)
        else:
            self._accumulate_tile_rows(rows, out, lse, *self._ensure_result_tensors())
        self._seen.append((rows.start, rows.stop))

    def _ensure_result_tensors(self) -> tuple[Tensor, Tensor]:
        """Return the attention over all tiles (rectangles of queries and keys) so far, as two tensors: the result, and
        the logsumexp of each query's scores. If no tile was added yet, create them with zeros and minus infinity."""
        if self.out is None or self.lse is None:
            batch, heads, length, _ = self.q.shape
            self.out = self.q.new_zeros(
                (batch, length, heads, self.width), dtype=find_accumulation_dtype(self.q)
            ).transpose(1, 2)
            self.lse = self.q.new_full(self.q.shape[:-1], -math.inf, dtype=find_accumulation_dtype(self.q))
        return self.out, self.lse

    def _accumulate_tile_rows(self, rows: slice, out: Tensor, lse: Tensor, all_out: Tensor, all_lse: Tensor) -> None:
        """Merge the attention over one tile (a rectangle of queries and keys) into the attention over all tiles so far,
        in place. For queries of earlier tiles, the two results are averaged, weighted by the sums of exponentials of
        their scores; for others, the tile's result is stored.

        ``rows``: the range of the tile's queries. ``out``, ``lse``: the tile's result, and the logsumexp of its scores.
        ``all_out``, ``all_lse``: result and logsumexp over all tiles so far, for all queries.
        """
        if any(start < rows.stop and rows.start < stop for start, stop in self._seen):
            before = all_lse[..., rows]
            both = torch.logaddexp(before, lse)
            # For a query that has seen no key so far, both logsumexps are minus infinity.
            safe = both if self.change.is_none else both.masked_fill(both == -math.inf, 0.0)
            kept = all_out[..., rows, :].mul_((before - safe).exp_().unsqueeze(-1))
            kept.add_(out * (lse - safe).exp_().unsqueeze(-1))
            all_lse[..., rows] = both
        else:
            all_out[..., rows, :] = out
            all_lse[..., rows] = lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: the attention over all tiles (rectangles of queries and keys) that were added, ``[...,
        heads, queries, width]`` in the dtype of the queries, and the logsumexp of the scores of each query, ``[...,
        heads, queries]``."""
        out, lse = self._ensure_result_tensors()
        return copy_position_major(out.to(self.q.dtype)), lse


@dataclass
class AttentionGradients:
    """Accumulates the gradients of an attention over tiles (rectangles of queries and keys), which are added one after
    another.

    ``grad``: the gradient of the result. ``q``: the queries ``[..., heads, queries, d]``. ``out`` and ``lse``: the
    result, and the logsumexp ``[..., heads, queries]`` of the scores over all keys. ``grad_q``: the gradient of the
    queries so far. ``band``: how many positions before and after its own a query sees. ``scale``: the factor of the
    scores; ``None`` means ``1 / sqrt(d)``. ``change``: how the scores are changed before the softmax. ``grad_slopes``:
    the gradient so far of the slopes of ``change``, ``[heads]``; an empty tensor if the slopes are not trained.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    band: Band
    scale: float | None
    change: ScoreChange = UNCHANGED
    grad_q: Tensor = field(init=False)
    grad_slopes: Tensor = field(init=False)
    _masks: _Masks = field(default_factory=dict)

    def __post_init__(self) -> None:
        wide = find_accumulation_dtype(self.q)
        self.grad_q = torch.zeros_like(self.q, dtype=wide)
        self.grad_slopes = self.q.new_zeros(self.q.shape[-3] if self.change.trained else 0, dtype=wide)

    def add(self, tile: Tile, k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add the gradients through one tile of an attention to three tensors in place: ``self.grad_q``, ``grad_k`` and
        ``grad_v``, the gradients of all local queries, keys and values.

        ``tile``: the rectangle of queries and keys to process. ``k`` and ``v`` ``[..., kv heads, keys, d]``: all local
        keys and values, of which the tile is a part.
        """
        for part in _list_parts(tile, self.band, self.q, self.change):
            rows, keys = slice(*part.rows), slice(*part.keys)
            mask = _make_tile_mask(part, self.band, self.q, self._masks)
            found = attend_backward(
                self.grad[..., rows, :],
                self.q[..., rows, :],
                k[..., keys, :],
                v[..., keys, :],
                self.out[..., rows, :],
                self.lse[..., rows],
                TileScoring(part.kind == "diagonal", mask, self.scale, self.change, part.offset),
            )
            self.grad_q[..., rows, :] += found[0]
            grad_k[..., keys, :] += found[1]
            grad_v[..., keys, :] += found[2]
            if found[3] is not None:
                self.grad_slopes += found[3]


def _make_tile_mask(tile: Tile, band: Band, q: Tensor, cache: _Masks) -> Tensor | None:
    """Return the mask ``[queries, keys]`` to add to the scores of ``tile``, a rectangle of queries and keys: 0 where a
    query sees a key, minus infinity elsewhere. Return ``None`` for a tile of the kind "all" or "diagonal", which needs
    no mask.

    ``q``: a tensor with the dtype and device of the mask. ``cache``: a dict that is read and filled: (number of
    queries, number of keys, position of the first query minus that of the first key, visible band) -> mask. ``band``:
    how many positions before and after its own a query sees, in a tile of the kind "band" whose ``limits`` is ``None``.
    """
    if tile.kind in ("all", "diagonal"):
        return None
    limits = tile.limits or band
    sizes = (tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0], tile.offset)
    if (*sizes, limits) not in cache:
        cache[*sizes, limits] = make_band_mask(*sizes, limits, q)
    return cache[*sizes, limits]


def find_accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which tensors like ``x`` are summed: float32 if ``x`` has a 16-bit dtype, otherwise the dtype
    of ``x``."""
    return torch.float32 if x.dtype in _NARROW else x.dtype


def make_band_mask(num_queries: int, num_keys: int, offset: int, band: Band, like: Tensor) -> Tensor:
    """Return the mask ``[num_queries, num_keys]`` to add to the scores of a tile (a rectangle of queries and keys): 0
    where a query sees a key, minus infinity elsewhere.

    ``offset``: the position of the first query minus that of the first key. ``band``: how many positions before and
    after its own a query sees. ``like``: a tensor with the dtype and device of the mask.
    """
    distance = torch.arange(num_queries, device=like.device).unsqueeze(1) + offset
    distance = distance - torch.arange(num_keys, device=like.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.before is not None:
        hidden |= distance > band.before
    if band.after is not None:
        hidden |= distance < -band.after
    return like.new_zeros(()).masked_fill(hidden, -math.inf)


# One tile on one device. Tensors are [batch, heads, positions, d]. If there are fewer key heads than query heads,
# several query heads share a key head.
class TileScoring(NamedTuple):
    """How the attention scores of a tile (a rectangle of queries and keys) are scaled, changed and masked.

    ``diagonal``: whether query ``i`` of the tile (from 0) sees only its keys 0 to ``i``. ``mask``: a tensor that is
    added to the scores, or ``None``. ``scale``: the factor of the scores; ``None`` means ``1 / sqrt(d)``, where ``d``
    is the width of a head. ``change``: how the scaled scores are changed. ``offset``: the position of the first query
    minus that of the first key.
    """

    diagonal: bool
    mask: Tensor | None
    scale: float | None
    change: ScoreChange = UNCHANGED
    offset: int = 0

    def for_block(self, q: Tensor, k: Tensor) -> BlockScoring:
        """Return this scoring as a :class:`BlockScoring`, which has a boolean mask of hidden keys and a numeric factor.
        The functions that compute attention with changed scores (caps, slopes) need this type. ``q``, ``k``: the tile's
        queries and keys, ``[..., heads, positions, d]``."""
        hidden = None if self.mask is None else self.mask == -math.inf
        if self.diagonal:
            hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        factor = 1.0 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return BlockScoring(hidden, self.offset, factor, self.change)


def compute_tile_attention(q: Tensor, k: Tensor, v: Tensor, scoring: TileScoring) -> tuple[Tensor, Tensor]:
    """Return two tensors for one tile (a rectangle of queries and keys): the attention of its queries over its keys,
    and the logsumexp of the scores of each query.

    ``q``, ``k``, ``v``: the tile's queries, keys and values ``[batch, heads, positions, d]``. ``scoring``: how the
    scores are scaled, changed and masked.
    """
    if not scoring.change.is_none:
        return attend_block(q, k, v, scoring.for_block(q, k), find_accumulation_dtype(q))
    diagonal, mask, scale, *_ = scoring
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal, attn_mask=mask, scale=scale)
        return out, lse
    if has_flash(q, v, mask):
        k, v = _prepare_for_flash(k, q), _prepare_for_flash(v, q)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, diagonal, False, scale=scale)
        return out, lse[..., : q.shape[-2]]
    scores = _compute_masked_scores(q, _repeat_key_heads(k, q), scoring)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp_().to(v.dtype) @ _repeat_key_heads(v, q), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: TileScoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return four gradients through one tile (a rectangle of queries and keys): those of the queries, keys and values,
    in their shapes, and that of the slopes that change scores, ``[heads]``. The fourth is ``None`` if no slopes are
    trained.

    ``grad``: the gradient of the attention's result for the tile's queries. ``q``, ``k``, ``v``: the tile's queries,
    keys and values ``[batch, heads, positions, d]``. ``out`` and ``lse``: result and logsumexp of the tile's queries
    over the keys of all tiles. ``scoring``: how the scores are scaled, changed and masked.
    """
    if not scoring.change.is_none:
        return attend_block_backward(grad, q, k, v, (out, lse), scoring.for_block(q, k))
    diagonal, mask, scale, *_ = scoring
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, diagonal, attn_mask=mask, scale=scale
        )
    elif has_flash(q, v, mask):
        keys, values = _prepare_for_flash(k, q), _prepare_for_flash(v, q)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
            grad, q, keys, values, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, diagonal, state,
            state[:0], scale=scale,
        )  # fmt: skip
    else:
        keys, values = _repeat_key_heads(k, q), _repeat_key_heads(v, q)
        factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        weights = (_compute_masked_scores(q, keys, scoring) - lse.unsqueeze(-1)).exp_()
        grad_v = weights.transpose(-2, -1).to(grad.dtype) @ grad
        inner = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
        of_scores = (weights * (grad @ values.transpose(-2, -1) - inner) * factor).to(q.dtype)
        grad_q, grad_k = of_scores @ keys, of_scores.transpose(-2, -1) @ q
    return grad_q, _sum_repeated_heads(grad_k, k), _sum_repeated_heads(grad_v, v), None


def has_flash(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's flash attention kernel can compute an attention. It needs a CUDA device of compute
    capability 8.0 or more, a 16-bit dtype, no mask, and equal head widths of queries and values: a multiple of 8, at
    most 256. ``q``, ``v``: queries and values ``[..., positions, d]``. ``mask``: the mask that is added to the scores,
    or ``None``."""
    width = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in _NARROW
        and mask is None
        and width == v.shape[-1]
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)  # torch's kernel is for Ampere and later
    )


def _compute_masked_scores(q: Tensor, k: Tensor, scoring: TileScoring) -> Tensor:
    """Return the scaled scores ``[..., queries, keys]`` of queries ``q`` and keys ``k``, with minus infinity where a
    key is hidden. ``scoring``: how the scores are masked and scaled."""
    diagonal, mask, scale, *_ = scoring
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-2, -1)).to(find_accumulation_dtype(q)) * factor
    if diagonal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill_(hidden, -math.inf)
    return scores if mask is None else scores + mask


def _repeat_key_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values ``x`` ``[..., kv heads, positions, d]`` with each head repeated until there are as many as
    query heads in ``q``."""
    if x.dim() < 3 or x.shape[-3] == q.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _prepare_for_flash(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values ``x`` ``[..., kv heads, positions, d]`` in the form that the flash kernel needs: on CUDA
    unchanged; on ROCm with each head repeated until there are as many as query heads in ``q``."""
    return x if torch.version.hip is None else _repeat_key_heads(x, q)


def _sum_repeated_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Return ``gradient`` ``[..., query heads, positions, d]`` summed over the query heads that share a key head. The
    result has the shape of the keys or values ``x`` ``[..., kv heads, positions, d]``."""
    if gradient.shape == x.shape:
        return gradient
    heads = x.shape[-3]
    summed: Tensor = gradient.unflatten(-3, (heads, gradient.shape[-3] // heads)).sum(-3)
    return summed


# The operator for one device that has all queries, keys and values. -1 means no limit.
def band_attention(
    q: Tensor, k: Tensor, v: Tensor, before: int, after: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention in which a query sees a limited range of positions: ``q`` ``[b, h, s, d]``, ``k`` and ``v``
    ``[b, kv, t, d]``.

    Return the result ``[b, h, s, d]`` and the logsumexp of the scores ``[b, h, s]``. ``before`` and ``after``: how many
    positions a query sees before and after its own; -1 means no limit. ``scale``: the factor of the scores; ``None``
    means ``1 / sqrt(d)``.
    """
    attention = AttentionAccumulator(q, make_band(before, after), scale, v.shape[-1])
    for tile in list_tiles((PositionRange(0, q.shape[-2], 0),), (PositionRange(0, k.shape[-2], 0),), attention.band):
        attention.add(tile, k, v)
    return attention.result()


def band_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, before: int, after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries ``q``, keys ``k`` and values ``v`` of an attention in which a query sees a
    limited range of positions.

    ``grad``: the gradient of its result. ``out``, ``lse``: its result and the logsumexp of its scores. ``before``,
    ``after``: how many positions a query sees before and after its own; -1 means no limit. ``scale``: the factor of the
    scores; ``None`` means ``1 / sqrt(d)``.
    """
    found = AttentionGradients(grad, q, out, lse, make_band(before, after), scale)
    grad_k, grad_v = (torch.zeros_like(x, dtype=found.grad_q.dtype) for x in (k, v))
    for tile in list_tiles((PositionRange(0, q.shape[-2], 0),), (PositionRange(0, k.shape[-2], 0),), found.band):
        found.add(tile, k, v, grad_k, grad_v)
    return (
        copy_position_major(found.grad_q.to(q.dtype)),
        copy_position_major(grad_k.to(k.dtype)),
        copy_position_major(grad_v.to(v.dtype)),
    )


def copy_position_major(x: Tensor) -> Tensor:
    """Return ``x`` ``[b, h, s, d]`` stored in memory as ``[b, s, h, d]``, so that heads can be joined without a
    copy.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def make_empty_position_major(like: Tensor, width: int) -> Tensor:
    """Return an empty tensor of the shape of ``like`` ``[b, h, s, d]`` with last dim ``width``, stored in memory as
    ``[b, s, h, width]``.
    """
    batch, heads, length, _ = like.shape
    return like.new_empty((batch, length, heads, width)).transpose(1, 2)


def make_band(before: int, after: int) -> Band:
    """Return the range of key positions, relative to a query's own, that the query sees. ``before``, ``after``: how
    many positions the query sees before and after its own; -1 means no limit."""
    return Band(None if before < 0 else before, None if after < 0 else after)


def get_band_limits(band: Band) -> tuple[int, int]:
    """Return the limits of ``band`` as (before, after), for integer arguments of an operator: how many positions a
    query sees before and after its own; -1 means no limit."""
    return -1 if band.before is None else band.before, -1 if band.after is None else band.after


def make_empty_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return two empty tensors with the shapes and dtypes of an attention's result and of the logsumexp of its scores,
    for shape inference. ``q``, ``k``, ``v``: queries, keys and values ``[b, heads, positions, d]``; further arguments
    are ignored."""
    return make_empty_position_major(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=find_accumulation_dtype(q))


def make_empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return three empty tensors with the shapes and dtypes of ``q``, ``k`` and ``v``, for shape inference of their
    gradients. ``q``, ``k``, ``v``: queries, keys and values ``[b, heads, positions, d]`` of an attention. All other
    arguments are ignored."""
    return tuple(make_empty_position_major(x, x.shape[-1]) for x in (q, k, v))  # type: ignore[return-value]


_library.define("band_attention(Tensor q, Tensor k, Tensor v, int before, int after, float? scale) -> (Tensor, Tensor)")

_library.define(
    "band_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int before, int after, "
    "float? scale) -> (Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("band_attention", band_attention, _device)
    _library.impl("band_attention_backward", band_attention_backward, _device)
torch.library.register_fake(f"{NAMESPACE}::band_attention", make_empty_results, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::band_attention_backward", make_empty_gradients, lib=_library)
ops = torch.ops.partition


def _save_attention_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[3:]


def _compute_attention_gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    return *ops.band_attention_backward(grad, *ctx.saved_tensors, *ctx.kept), None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::band_attention", _compute_attention_gradients, setup_context=_save_attention_operands, lib=_library
)
