"""Attention within documents with changed scores, or with a prefix of each document that all of its queries see.

``partition::scored_attention`` is ``partition::document_attention`` (``passes/ops/documents.py``) with three further
optional arguments:

* ``cap``: soft-capping of the scores; ``slopes`` ``[heads]``: ALiBi (``passes/ops/score_changes.py``);
* ``prefix`` ``[b, s]``: true at the keys of a document's prefix. A query sees these keys within ``reach``, a wider
  range of positions than the band of other keys; by default, ``reach`` has no limits. With a causal band, this is the
  mask of a prefix language model (Raffel et al. 2020).

Without ``ids`` every row of the batch is one document. Scores exist for one block of queries and keys at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library, create_scored_gradients
from partitioner.passes.ops.attention import (
    Band,
    PositionRange,
    copy_position_major,
    make_band,
    make_empty_results,
)
from partitioner.passes.ops.documents import (
    EVERYWHERE,
    DocumentAttention,
    DocumentGradients,
    Tiles,
    find_prefix_runs,
    find_runs,
    group_rows,
    list_document_tiles,
)
from partitioner.passes.ops.score_changes import ScoreChange


class RowMarks(NamedTuple):
    """The document of each position of a batch, and the keys that all queries of their document see.

    ``ids`` ``[b, s]``: integers; positions with equal integers belong to one document. ``prefix`` ``[b, s]``: true at
    the keys that all queries of their document see; ``None`` if there are none.
    """

    ids: Tensor
    prefix: Tensor | None

    def group_rows(self) -> list[slice]:
        """Return the groups of batch rows that are computed together, as slices of the batch dim: a single slice if all
        rows have equal document ids and prefixes, otherwise one slice for each row."""
        return group_rows(self.ids if self.prefix is None else torch.cat([self.ids, self.prefix.to(self.ids)], 1))


def mark_rows(q: Tensor, ids: Tensor | None, prefix: Tensor | None) -> RowMarks:
    """Return the documents and prefixes of the positions of ``q`` ``[b, heads, s, d]``. ``ids`` ``[b, s]``: the
    document of each position; ``None`` if every row is one document. ``prefix`` ``[b, s]``: true at the keys that all
    queries of their document see; ``None`` if there are none."""
    if ids is None:
        ids = torch.zeros(q.shape[0], q.shape[-2], dtype=torch.int64, device=q.device)
    return RowMarks(ids, prefix)


def list_marked_tiles(
    queries: RowMarks,
    keys: RowMarks,
    query_ranges: Sequence[PositionRange],
    key_ranges: Sequence[PositionRange],
    band: Band,
    prefix_band: Band,
) -> list[Tiles]:
    """Return, for each row of the batch, the tuple of tiles (rectangles of queries and keys) that attention has to
    compute.

    ``queries``, ``keys``: the documents and prefixes (keys that all queries of their document see) of the local queries
    and keys. ``query_ranges``, ``key_ranges``: the ranges of positions of the local queries and keys in the whole
    sequence. ``band``: how many positions before and after its own a query sees. ``prefix_band``: how many positions
    before and after its own a query sees in a prefix; includes ``band``.
    """
    shown = None if keys.prefix is None else find_prefix_runs(keys.ids, keys.prefix, key_ranges)
    return list_document_tiles(
        find_runs(queries.ids, query_ranges),
        find_runs(keys.ids, key_ranges),
        band,
        shown,
        in_order=True,
        prefix_band=prefix_band,
    )


def get_prefix_band(limits: Sequence[int] = ()) -> Band:
    """Return the range of positions, relative to a query's own, within which the query sees keys of its document's
    prefix. ``limits``: (before, after), how many positions before and after its own; -1 means no limit. Empty
    ``limits`` mean no limit in both directions."""
    return make_band(*limits) if limits else EVERYWHERE


def scored_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, prefix: Tensor | None, slopes: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention in which a query sees keys of its own document only, with changed scores or prefixes: ``q``
    ``[b, h, s, d]``, ``k`` and ``v`` ``[b, kv, s, d]``. Return the result and the logsumexp of the changed scores ``[b,
    h, s]``.

    ``ids`` ``[b, s]``: the document of each position, ``None`` for one document per row. ``prefix`` ``[b, s]``: true at
    the keys that all queries of their document see; ``None`` for none. ``slopes`` ``[h]``: ``slope * (key position -
    query position)`` is added to a score; ``None`` for none. ``options``: the further arguments of the operator, in
    order: typical lengths of documents, and the mean number per row of query-key pairs that are visible only because of
    a prefix (both for the cost model alone); ``before`` and ``after``, how many positions a query sees before and after
    its own (-1: no limit); the factor of the scores (``None``: ``1 / sqrt(d)``); the cap of the scores (``None``: no
    cap); and optionally (before, after) for the keys of a prefix (absent: no limit).
    """
    _, _, before, after, scale, cap, *prefix_band = options
    band, marks, parts = make_band(before, after), mark_rows(q, ids, prefix), (PositionRange(0, q.shape[-2], 0),)
    attention = DocumentAttention(q, marks.group_rows(), band, scale, v.shape[-1], ScoreChange(cap, slopes))
    attention.add(list_marked_tiles(marks, marks, parts, parts, band, get_prefix_band(*prefix_band)), k, v)
    return attention.result()


def scored_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four gradients of an attention with changed scores or prefixes: those of the queries, keys and values, in
    the shapes of ``q``, ``k`` and ``v``, and that of the slopes, ``[h]``. The fourth is an empty tensor if slopes are
    not trained.

    ``grad``: the gradient of the attention's result. ``q``, ``k``, ``v``: queries ``[b, h, s, d]``, keys and values
    ``[b, kv, s, d]``. ``options``: the further arguments of the operator, in order: the document of each position ``[b,
    s]``, the mask of the prefix's keys ``[b, s]`` and the slopes ``[h]``, each of which may be ``None``; the
    attention's result and the logsumexp of its scores; ``before`` and ``after``, how many positions a query sees before
    and after its own (-1: no limit); the factor and the cap of the scores; optionally (before, after) for the keys of a
    prefix (absent: no limit); and optionally whether the slopes are trained (absent: false).
    """
    ids, prefix, slopes, out, lse, before, after, scale, cap, *rest = options
    prefix_band, trained = rest[0] if rest else (), len(rest) > 1 and rest[1]
    band, marks, parts = make_band(before, after), mark_rows(q, ids, prefix), (PositionRange(0, q.shape[-2], 0),)
    found = DocumentGradients(grad, q, out, lse, marks.group_rows(), band, scale, ScoreChange(cap, slopes, trained))
    grad_k, grad_v = (torch.zeros_like(x, dtype=found.grad_q.dtype) for x in (k, v))
    found.add(list_marked_tiles(marks, marks, parts, parts, band, get_prefix_band(prefix_band)), k, v, grad_k, grad_v)
    gradients = found.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
    return *(copy_position_major(x) for x in gradients), round_slopes(found.grad_slopes, slopes)  # type: ignore[return-value]


def round_slopes(gradient: Tensor, slopes: Tensor | None) -> Tensor:
    """Return ``gradient``, the gradient of an attention's ALiBi slopes, in the dtype of ``slopes``; unchanged if
    ``slopes`` is ``None``."""
    return gradient if slopes is None else gradient.to(slopes.dtype)


_library.define(
    "scored_attention(Tensor q, Tensor k, Tensor v, Tensor? ids, Tensor? prefix, Tensor? slopes, int[] lengths, "
    "int ahead, int before, int after, float? scale, float? cap, int[] reach=[]) -> (Tensor, Tensor)"
)
_library.define(
    "scored_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? ids, Tensor? prefix, Tensor? slopes, "
    "Tensor out, Tensor lse, int before, int after, float? scale, float? cap, int[] reach=[], "
    "bool trained=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("scored_attention", scored_attention, _device)
    _library.impl("scored_attention_backward", scored_attention_backward, _device)
torch.library.register_fake(f"{NAMESPACE}::scored_attention", make_empty_results, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::scored_attention_backward", create_scored_gradients, lib=_library)
scored_ops = torch.ops.partition


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[8:]


def _compute_gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * (8 + len(ctx.kept))
    trained = ctx.needs_input_grad[5]
    found = torch.ops.partition.scored_attention_backward(grad, *ctx.saved_tensors, *ctx.kept, trained)
    return *found[:3], None, None, found[3] if trained else None, *(None,) * (2 + len(ctx.kept))


torch.library.register_autograd(
    f"{NAMESPACE}::scored_attention", _compute_gradients, setup_context=_save_operands, lib=_library
)
