"""Attention within documents: several documents are packed into one row, and a query sees keys of its document only.

``ids`` ``[b, s]`` has an integer for each position; positions with equal integers belong to one document. The ids are
an operand, and no mask of queries by keys is made from them. Within its document a query sees the keys in a band of
positions (``passes/ops/attention.py``): all keys, those up to its own position, or a window.

A row is cut into runs of equal ids. Attention is computed in the tiles that the band touches between runs of one
document. Tiles of other documents are skipped, so that work and memory grow with the sum of the squares of the
documents' lengths. A document may consist of several runs, as on a rank that has two ends of a sequence. On CUDA,
16-bit dtypes use torch's flash kernel for sequences of different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library
from partitioner.passes.ops.attention import (
    AttentionAccumulator,
    AttentionGradients,
    Band,
    PositionRange,
    Tile,
    copy_position_major,
    count_max_pairs,
    find_accumulation_dtype,
    has_flash,
    list_tiles,
    list_tiles_between,
    make_band,
    make_empty_gradients,
    make_empty_position_major,
    make_empty_results,
    split_positions,
)
from partitioner.passes.ops.score_changes import UNCHANGED, ScoreChange

aten = torch.ops.aten

EVERYWHERE = Band()  # all positions

Runs = dict[int, tuple[PositionRange, ...]]  # id of a document -> its runs of positions in one row
Tiles = tuple[Tile, ...]


def find_runs(ids: Tensor, parts: Sequence[PositionRange]) -> list[Runs]:
    """Return, for each row of ``ids`` ``[b, s]``, a dict: document id -> tuple of the document's runs. A run is a range
    of consecutive positions of the row that belong to one document and lie in one of ``parts``.

    ``ids``: the document id of each position. ``parts``: the ranges of positions that the rank holds; together they
    have ``s`` positions.
    """
    rows = ids.detach().cpu().numpy()
    return [_find_row_runs(row, parts) for row in rows]


def _find_row_runs(row: np.ndarray[Any, Any], parts: Sequence[PositionRange]) -> Runs:
    """Return a dict for one row of the batch: document id -> tuple of the document's runs. A run is a range of
    consecutive positions that belong to one document and lie in one of ``parts``. ``row``: the document id of each
    position. ``parts``: the ranges of positions that the rank holds."""
    found: dict[int, list[PositionRange]] = {}
    for part in parts:
        own = row[part.start : part.start + part.length]
        starts = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], part.length], strict=True):
            run = PositionRange(part.start + start, stop - start, part.place + start)
            found.setdefault(int(own[start]), []).append(run)
    return {document: tuple(runs) for document, runs in found.items()}


def find_prefix_runs(ids: Tensor, prefix: Tensor, parts: Sequence[PositionRange]) -> list[Runs]:
    """Return, for each row of ``ids`` ``[b, s]``, a dict: document id -> tuple of the runs of the document's prefix. A
    prefix has the keys that all queries of the document see. A run is a range of consecutive positions of the row that
    belong to one prefix and lie in one of ``parts``.

    ``ids``: the document id of each position. ``prefix`` ``[b, s]``: true at the keys of prefixes. ``parts``: the
    ranges of positions that the rank holds.
    """
    numbers, shown = ids.detach().cpu().numpy(), prefix.detach().cpu().numpy().astype(bool)
    found: list[Runs] = []
    for row, flags in zip(numbers, shown, strict=True):
        _, own = np.unique(row, return_inverse=True)
        runs = _find_row_runs(2 * own + flags, parts)
        found.append({int(row[r[0].start]): r for mark, r in runs.items() if mark % 2})
    return found


def list_document_tiles(
    queries: Iterable[Runs],
    keys: Iterable[Runs],
    band: Band,
    prefixes: Iterable[Runs] | None = None,
    in_order: bool = False,
    prefix_band: Band = EVERYWHERE,
) -> list[Tiles]:
    """Return, for each row of the batch, the tuple of tiles (rectangles of queries and keys) that attention within
    documents has to compute.

    ``queries`` and ``keys``: for each row, a dict: document id -> its runs (ranges of consecutive positions). ``band``:
    how many positions before and after its own a query sees. ``prefixes``: for each row, a dict: document id -> runs of
    the document's prefix, the keys that a query sees within ``prefix_band``; ``None`` if there are no prefixes.
    ``in_order``: whether the queries of a tile, and its keys, must be consecutive in the whole sequence.
    ``prefix_band``: how many positions before and after its own a query sees in a prefix; includes ``band``.
    """
    found = [
        tuple(tile for d, runs in own.items() if d in theirs for tile in list_tiles(runs, theirs[d], band, in_order))
        for own, theirs in zip(queries, keys, strict=True)
    ]
    if prefixes is None:
        return found
    return [
        (
            *tiles,
            *(
                tile
                for d, runs in own.items()
                if d in shown
                for tile in list_tiles_between(runs, shown[d], band, prefix_band)
            ),
        )
        for tiles, own, shown in zip(found, queries, prefixes, strict=True)
    ]


def group_rows(ids: Tensor) -> list[slice]:
    """Return the groups of batch rows that are computed together, as slices of the batch dim: a single slice if all
    rows have equal document ids, otherwise one slice for each row. ``ids``: the document id of each position, ``[b,
    s]``."""
    count = ids.shape[0]
    return [slice(0, count)] if bool((ids[1:] == ids[:1]).all()) else [slice(i, i + 1) for i in range(count)]


@dataclass
class DocumentAttention:
    """Accumulates an attention in which a query sees keys of its own document only, for the queries ``q`` ``[b, heads,
    queries, d]``, over tiles (rectangles of queries and keys), row by row.

    ``groups``: slices of the batch dim with the rows that are computed together, because their documents are equal.
    ``band``: how many positions before and after its own a query sees. ``scale``: the factor of the scores; ``None``
    means ``1 / sqrt(d)``. ``width``: the size of the last dim of the values. ``change``: how the scores are changed
    before the softmax. ``out`` and ``lse``: the attention over the tiles so far, and the logsumexp of its scores.
    """

    q: Tensor
    groups: Sequence[slice]
    band: Band
    scale: float | None
    width: int
    change: ScoreChange = UNCHANGED
    out: Tensor = field(init=False)
    lse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        q, wide = self.q, find_accumulation_dtype(self.q)
        self.out = torch.zeros_like(make_empty_position_major(q, self.width), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        masks: dict[tuple[int, int, int, Band], Tensor] = {}
        self._rows = [
            AttentionAccumulator(
                q[g], self.band, self.scale, self.width, self.out[g], self.lse[g], self.change, _masks=masks
            )
            for g in self.groups
        ]

    def add(self, tiles: Sequence[Tiles], k: Tensor, v: Tensor) -> None:
        """Add the attention within documents over ``tiles`` to the result so far. ``tiles``: for each row of the batch,
        a tuple of tiles (rectangles of queries and keys). ``k`` and ``v``: all local keys and values, ``[b, kv heads,
        keys, d]``."""
        for group, attention in zip(self.groups, self._rows, strict=True):
            for tile in tiles[group.start]:
                attention.add(tile, k[group], v[group])

    def result(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: the attention over all tiles (rectangles of queries and keys) that were added, ``[b,
        heads, queries, width]`` in the dtype of the queries, and the logsumexp of the scores of each query, ``[b,
        heads, queries]``."""
        return copy_position_major(self.out.to(self.q.dtype)), self.lse


@dataclass
class DocumentGradients:
    """Accumulates the gradients of an attention within documents over tiles (rectangles of queries and keys), row by
    row.

    ``grad``: the gradient of the result. ``q``: the queries. ``out`` and ``lse``: result, and logsumexp of the scores
    over all keys. ``groups``: slices of the batch dim with the rows that are computed together, because their documents
    are equal. ``band``: how many positions before and after its own a query sees. ``scale``: the factor of the scores;
    ``None`` means ``1 / sqrt(d)``. ``change``: how the scores are changed before the softmax. ``grad_q``: the gradient
    of the queries so far. ``grad_slopes``: the gradient so far of the slopes of ``change``, ``[heads]``; an empty
    tensor if the slopes are not trained.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    groups: Sequence[slice]
    band: Band
    scale: float | None
    change: ScoreChange = UNCHANGED
    grad_q: Tensor = field(init=False)
    grad_slopes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.grad_q = torch.zeros_like(self.q, dtype=find_accumulation_dtype(self.q))
        self.grad_slopes = self.q.new_zeros(self.q.shape[1] if self.change.trained else 0, dtype=self.grad_q.dtype)
        masks: dict[tuple[int, int, int, Band], Tensor] = {}
        self._rows = []
        for g in self.groups:
            found = AttentionGradients(
                self.grad[g], self.q[g], self.out[g], self.lse[g], self.band, self.scale, self.change, _masks=masks
            )
            found.grad_q, found.grad_slopes = self.grad_q[g], self.grad_slopes
            self._rows.append(found)

    def add(self, tiles: Sequence[Tiles], k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add the gradients through ``tiles`` of an attention within documents to three tensors in place:
        ``self.grad_q``, ``grad_k`` and ``grad_v``, the gradients of queries, keys and values.

        ``tiles``: for each row of the batch, a tuple of tiles (rectangles of queries and keys). ``k`` and ``v``: all
        local keys and values ``[b, kv heads, keys, d]``.
        """
        for group, found in zip(self.groups, self._rows, strict=True):
            for tile in tiles[group.start]:
                found.add(tile, k[group], v[group], grad_k[group], grad_v[group])


@lru_cache(maxsize=1024)
def count_document_pairs(lengths: tuple[int, ...], queries: int, num_ranks: int, zigzag: bool, band: Band) -> float:
    """Return the number of query-key pairs that the busiest rank computes per row of the batch (the mean if rows
    differ), for the cost model of attention within documents.

    ``lengths``: the numbers of positions of typical documents, in order. If these documents, joined, fill a whole
    number of rows and none crosses a row's end, the pairs of each rank are counted exactly. Otherwise each position is
    assumed to have the documents' mean number of pairs, and each rank an equal share. ``queries``: the number of
    queries of each of the ``num_ranks`` ranks that share the sequence. ``zigzag``: whether each rank has one range of
    positions from each end of the sequence, instead of a single range. ``band``: how many positions before and after
    its own a query sees.
    """
    total, row = sum(lengths), queries * num_ranks
    starts = np.cumsum([0, *lengths[:-1]])
    if total % row == 0 and {i * row for i in range(total // row)} <= set(starts.tolist()):
        ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths).reshape(-1, row))
        most = 0
        for rank in range(num_ranks):
            places = np.concatenate(
                [np.arange(p.place, p.place + p.length) for p in split_positions(queries, num_ranks, rank, zigzag)]
            )
            most = max(most, sum(_count_row_pairs(r, places, starts, lengths, row, band) for r in ids.numpy()))
        return most / (total // row)
    pairs = sum(_count_band_pairs(np.arange(n), n, band) for n in lengths)
    return min(pairs / total * queries, float(count_max_pairs(queries, queries, num_ranks, zigzag, band)))


def _count_row_pairs(
    ids: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    lengths: tuple[int, ...],
    row: int,
    band: Band,
) -> int:
    """Return the number of query-key pairs that attention within documents computes for the queries at ``places`` in
    one row of packed documents.

    ``places``: the positions of the queries in the row. ``ids``: for each position of the row, the index of its
    document. ``starts``: the start of each document in the concatenation of all rows. ``lengths``: the number of
    positions of each document. ``row``: the number of positions of a row. ``band``: how many positions before and after
    its own a query sees.
    """
    mine = ids[places]
    return _count_band_pairs(places - starts[mine] % row, np.asarray(lengths)[mine], band)


def _count_band_pairs(places: np.ndarray[Any, Any], lengths: Any, band: Band) -> int:
    """Return the total number of keys that some queries see, if each query sees the keys of its own document within
    ``band``. ``places``: the position of each query in its document, from 0. ``lengths``: the length of each query's
    document in positions; a single number if all are equal."""
    last = lengths - 1
    ends = np.broadcast_to(last, places.shape) if band.after is None else np.minimum(places + band.after, last)
    begins = np.zeros_like(places) if band.before is None else np.maximum(places - band.before, 0)
    return int((ends - begins + 1).sum())


# The operator for one device that has all queries, keys and values.
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    lengths: Sequence[int],
    before: int,
    after: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention in which a query sees keys of its own document only: ``q`` ``[b, h, s, d]``, ``k`` and ``v``
    ``[b, kv, s, d]``.

    Return the result and the logsumexp ``[b, h, s]`` of the scores. ``ids`` ``[b, s]``: the document of each position.
    ``lengths``: typical lengths of documents, for the cost model only; they do not change the result. ``before`` and
    ``after``: how many positions a query sees before and after its own; -1 means no limit. ``scale``: the factor of the
    scores; ``None`` means ``1 / sqrt(d)``.
    """
    band = make_band(before, after)
    runs = find_runs(ids, (PositionRange(0, q.shape[-2], 0),))
    if has_flash(q, v, None) and _is_contiguous(runs):
        return _flash_forward(q, k, v, _cumulate_lengths(runs, q.device), band, scale)
    attention = DocumentAttention(q, group_rows(ids), band, scale, v.shape[-1])
    attention.add(list_document_tiles(runs, runs, band), k, v)
    return attention.result()


def document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    out: Tensor,
    lse: Tensor,
    limits: Sequence[int],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of an attention within documents, in the shapes of ``q``, ``k``
    and ``v``.

    ``grad``: the gradient of the attention's result. ``q``, ``k``, ``v``: queries ``[b, h, s, d]``, keys and values
    ``[b, kv, s, d]``. ``ids`` ``[b, s]``: the document of each position. ``out``, ``lse``: the attention's result, and
    the logsumexp ``[b, h, s]`` of its scores. ``limits``: (before, after), how many positions a query sees before and
    after its own; -1 means no limit. ``scale``: the factor of the scores; ``None`` means ``1 / sqrt(d)``.
    """
    band = make_band(*limits)
    runs = find_runs(ids, (PositionRange(0, q.shape[-2], 0),))
    if has_flash(q, v, None) and _is_contiguous(runs):
        return _flash_backward(grad, (q, k, v), (out, lse), _cumulate_lengths(runs, q.device), band, scale)
    found = DocumentGradients(grad, q, out, lse, group_rows(ids), band, scale)
    grad_k, grad_v = (torch.zeros_like(x, dtype=found.grad_q.dtype) for x in (k, v))
    found.add(list_document_tiles(runs, runs, band), k, v, grad_k, grad_v)
    return (
        copy_position_major(found.grad_q.to(q.dtype)),
        copy_position_major(grad_k.to(k.dtype)),
        copy_position_major(grad_v.to(v.dtype)),
    )


# --- CUDA: documents as sequences of different lengths ----------------------------------------------------------------
def _is_contiguous(rows: Sequence[Runs]) -> bool:
    """Return whether every document of every row is one range of consecutive positions. ``rows``: for each row, a dict:
    document id -> the document's ranges of positions."""
    return all(len(runs) == 1 for row in rows for runs in row.values())


def _cumulate_lengths(rows: Sequence[Runs], device: torch.device) -> tuple[Tensor, int]:
    """Return two values: an int32 tensor on ``device`` with the start of each document in the concatenated rows of the
    batch, followed by the end of the last document; and the length of the longest document. Both count positions.

    ``rows``: for each row, a dict: document id -> the document's ranges of positions, exactly one per document.
    """
    lengths = [runs[0].length for row in rows for runs in row.values()]
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return starts.to(device, non_blocking=True), max(lengths)


def _join_rows(x: Tensor) -> Tensor:
    """Return ``x`` ``[b, h, s, d]`` reshaped to ``[b * s, h, d]``, as the flash kernel for sequences of different
    lengths expects."""
    rows: Tensor = x.transpose(1, 2).flatten(0, 1)
    return rows


def _split_rows(x: Tensor, batch: int) -> Tensor:
    """Return ``x`` ``[b * s, h, d]`` as ``[b, h, s, d]``. ``batch``: the size ``b``."""
    rows: Tensor = x.unflatten(0, (batch, -1))
    return rows.transpose(1, 2)


def _describe_window(band: Band, longest: int) -> dict[str, int]:
    """Return the keyword arguments of torch's flash kernel for a sliding window: ``window_size_left`` and
    ``window_size_right``, in positions. Return an empty dict if a query sees all keys, or all keys up to its own
    position: the kernel has another argument for this.

    ``band``: how many positions before and after its own a query sees. ``longest``: the length of the longest document,
    used as the window's size on a side without a limit.
    """
    if band.is_full or band.is_causal:
        return {}
    before, after = (longest if limit is None else limit for limit in band)
    return {"window_size_left": before, "window_size_right": after}


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor, int], band: Band, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention within documents by torch's flash kernel. Return two tensors: the result ``[b, h, s, d]``, and
    the logsumexp of the scores ``[b, h, s]``.

    ``q``, ``k``, ``v``: queries, keys and values. ``documents``: (tensor of the documents' starts in the concatenated
    rows, followed by the end of the last one; length of the longest document). ``band``: how many positions before and
    after its own a query sees. ``scale``: the factor of the scores; ``None`` means ``1 / sqrt(d)``.
    """
    starts, longest = documents
    rows = [_join_rows(x) for x in (q, k, v)]
    window = _describe_window(band, longest)
    out, lse, *_ = aten._flash_attention_forward(
        *rows, starts, starts, longest, longest, 0.0, band.is_causal, False, scale=scale, **window
    )
    batch, heads, length, _ = q.shape
    return _split_rows(out, batch), lse.view(heads, batch, length).transpose(0, 1).contiguous()


def _flash_backward(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    documents: tuple[Tensor, int],
    band: Band,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of an attention within documents, computed by torch's flash
    kernel.

    ``grad``: the gradient of the result. ``operands``: (queries, keys, values). ``results``: (result, logsumexp of the
    scores). ``documents``: (tensor of the documents' starts in the concatenated rows, followed by the end of the last
    one; length of the longest document). ``band``: how many positions before and after its own a query sees. ``scale``:
    the factor of the scores; ``None`` means ``1 / sqrt(d)``.
    """
    starts, longest = documents
    batch = grad.shape[0]
    lse = results[1].transpose(0, 1).flatten(1).contiguous()
    state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    found = aten._flash_attention_backward(
        _join_rows(grad), *(_join_rows(x) for x in operands), _join_rows(results[0]), lse, starts, starts, longest,
        longest, 0.0, band.is_causal, state, state[:0], scale=scale, **_describe_window(band, longest),
    )  # fmt: skip
    return tuple(_split_rows(x, batch) for x in found)  # type: ignore[return-value]


def combine_ids(ids: Tensor, other: Tensor) -> Tensor:
    """Return integers ``[b, s]`` that identify pairs of ids: two positions of a row get equal integers exactly if both
    their ``ids`` and their ``other`` are equal. ``ids``, ``other``: any integers ``[b, s]``. The integer of a pair is
    the first position of the row that has this pair, so it does not depend on later positions."""
    numbers = _find_first_positions(ids) * ids.shape[1] + _find_first_positions(other)
    return _find_first_positions(numbers)


def _find_first_positions(ids: Tensor) -> Tensor:
    """Return, for each element of ``ids`` ``[b, s]``, the first position of its row that has the same integer."""
    ordered, order = ids.sort(dim=1, stable=True)
    starts = torch.ones_like(order)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(order)
    first = order.gather(1, (places * starts).cummax(1).values)
    return torch.empty_like(first).scatter_(1, order, first)


_library.define("combine_ids(Tensor ids, Tensor other) -> Tensor")
_library.define(
    "document_attention(Tensor q, Tensor k, Tensor v, Tensor ids, int[] lengths, int before, int after, float? scale) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "document_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor ids, Tensor out, Tensor lse, "
    "int[] limits, float? scale) -> (Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("combine_ids", combine_ids, _device)
    _library.impl("document_attention", document_attention, _device)
    _library.impl("document_attention_backward", document_attention_backward, _device)
torch.library.register_fake(
    f"{NAMESPACE}::combine_ids", lambda ids, other: torch.empty_like(ids, dtype=torch.int64), lib=_library
)
torch.library.register_fake(f"{NAMESPACE}::document_attention", make_empty_results, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::document_attention_backward", make_empty_gradients, lib=_library)
document_ops = torch.ops.partition


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[5:7], inputs[7]


def _compute_gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    return *torch.ops.partition.document_attention_backward(grad, *ctx.saved_tensors, *ctx.kept), *(None,) * 5


torch.library.register_autograd(
    f"{NAMESPACE}::document_attention", _compute_gradients, setup_context=_save_operands, lib=_library
)
