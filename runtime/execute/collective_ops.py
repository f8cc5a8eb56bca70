"""Operators that compute and communicate: attention over a sharded sequence, and the exchange of rows with experts.

There are two algorithms for attention over a sequence of which each rank of a group has a part.
* Ring: keys and values travel from rank to rank. While a rank attends to the current ones, the next are in transfer. In
  backward they travel once more, followed by their gradients, to which each rank adds, until the gradients are back at
  the rank of their keys (Liu et al. 2023). With a sliding window, steps in which no rank sees a key are skipped.
* All-gather: every rank gathers all keys and values temporarily, forward and backward (used to train Llama 3, Dubey et
  al. 2024), and their gradients are reduce-scattered.

Both also compute attention within documents. Every rank gathers the document ids beforehand.

Rows (tokens) travel to their experts and back over a group of ranks that hold equal numbers of experts. The numbers of
rows are exchanged first, at a fixed size; all later exchanges, forward and backward, use them. Every rank takes part in
every exchange, even without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from partitioner.passes.ops.attention import (
    AttentionAccumulator,
    AttentionGradients,
    Band,
    PositionRange,
    Tile,
    copy_position_major,
    find_accumulation_dtype,
    list_ring_steps,
    list_ring_tiles,
    list_tiles,
    split_positions,
)
from partitioner.passes.ops.documents import (
    DocumentAttention,
    DocumentGradients,
    Runs,
    Tiles,
    find_runs,
    group_rows,
    list_document_tiles,
)
from partitioner.passes.ops.score_changes import ScoreChange
from partitioner.passes.ops.scored_attention import RowMarks, list_marked_tiles, mark_rows, round_slopes
from partitioner.runtime.comm.group import Pending, RankGroup

# Function of (step, keys, values) that attends to the keys and values that a rank has after a step of the ring. If the
# step is None, they are those of all ranks.
Attend = Callable[[int | None, Tensor, Tensor], None]
# Backward of Attend: its two further arguments are gradients of the keys and values, to which it adds.
AttendBackward = Callable[[int | None, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class KeyExchange:
    """The exchange of keys and values of an attention over a sequence that is sharded over ``group``. Queries are ``[b,
    h, s/n, d]``, keys and values ``[b, kv, t/n, d]`` for ``n`` ranks.

    ``band``: the keys that each query sees, as a range of positions relative to its own. ``scale``: the factor of the
    scores; ``None`` means ``1 / sqrt(d)``. ``zigzag``: if false, each rank has a consecutive part of the sequence; if
    true, two parts from opposite ends. ``algorithm``: with ``"ring"``, keys and values are passed on from rank to rank,
    step by step; with ``"all_gather"``, every rank gathers all of them at once.
    """

    group: RankGroup
    band: Band
    scale: float | None
    zigzag: bool
    algorithm: str

    def exchange_forward(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Call ``attend``, which accumulates the attention result, with the keys and values of all ranks: once with all
        of them after an all-gather, or ring step by ring step. ``q``, ``k``, ``v``: queries, keys and values of this
        rank.
        """
        if self.algorithm == "ring":
            self._ring_forward(attend, q, k, v)
        else:
            attend(None, *self._gather_keys_values(k, v))

    def exchange_backward(self, attend: AttendBackward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Call ``attend`` with the keys and values of all ranks, at once or ring step by ring step, to compute
        gradients. Return the gradients of this rank's keys and values, summed over the queries of all ranks. ``q``,
        ``k``, ``v``: queries, keys and values of this rank.
        """
        if self.algorithm == "ring":
            grad_k, grad_v = self._ring_backward(attend, q, k, v)
        else:
            keys, values = self._gather_keys_values(k, v)
            wide = find_accumulation_dtype(q)
            grad_keys, grad_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
            attend(None, keys, values, grad_keys, grad_values)
            grad_k, grad_v = self._reduce_scatter_gradients(grad_keys.to(k.dtype), grad_values.to(v.dtype), k, v)
        return copy_position_major(grad_k.to(k.dtype)), copy_position_major(grad_v.to(v.dtype))

    # All keys and values gathered at once.

    def _list_rank_parts(self, length: int, rank: int) -> tuple[PositionRange, ...]:
        return split_positions(length, self.group.size, rank, self.zigzag)

    def _gather_keys_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all ranks, gathered over the group, in the order of the sequence. ``k``,
        ``v``: the keys and values of this rank.
        """
        ranks = self.group.all_gather(_pack_keys_values(k, v).unsqueeze(0), 0).wait()
        by_rank = [_unpack_keys_values(row, k, v) for row in ranks.unbind(0)]
        order = self._order_parts(k.shape[-2])
        return tuple(  # type: ignore[return-value]
            torch.cat([by_rank[r][i].narrow(-2, p.start, p.length) for r, p in order], -2) for i in range(2)
        )

    def _order_parts(self, length: int) -> list[tuple[int, PositionRange]]:
        """Return the parts of the sequence that ranks hold, in the order of the sequence, as pairs (rank in the group,
        range of positions of the part). ``length``: number of positions that each rank holds.
        """
        parts = [(r, part) for r in range(self.group.size) for part in self._list_rank_parts(length, r)]
        return sorted(parts, key=lambda p: p[1].place)

    def _reduce_scatter_gradients(
        self, grad_keys: Tensor, grad_values: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum the gradients of all keys, ``grad_keys``, and of all values, ``grad_values``, over the ranks, and return
        this rank's part of both. ``k``, ``v``: this rank's keys and values, for their shapes.
        """
        rows = []
        for rank in range(self.group.size):
            parts = self._list_rank_parts(k.shape[-2], rank)
            mine = [torch.cat([x.narrow(-2, p.place, p.length) for p in parts], -2) for x in (grad_keys, grad_values)]
            rows.append(_pack_keys_values(*mine))
        total = self.group.reduce_scatter(torch.stack(rows), 0).wait()
        return _unpack_keys_values(total.flatten(), k, v)

    # Ring attention, step by step.

    def _compute_ring_steps(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        return list_ring_steps(q.shape[-2], k.shape[-2], self.group.size, self.zigzag, self.band)

    def _ring_forward(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Call ``attend`` once for each step of the ring, with the keys and values that this rank has in the step.
        While ``attend`` computes, the keys and values for the next step are transferred. ``q``, ``k``, ``v``: queries,
        keys and values of this rank.
        """
        steps = self._compute_ring_steps(q, k)
        travelling = _pack_keys_values(k, v) if len(steps) > 1 else k
        for step, hops in zip(steps, _compute_hops(steps), strict=True):
            under_way = self._shift_along_ring(travelling, hops) if hops else None
            attend(step, k, v)
            if under_way is not None:
                travelling = under_way.wait()
                k, v = _unpack_keys_values(travelling, k, v)

    def _ring_backward(self, attend: AttendBackward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Call ``attend`` once for each step of the ring to compute gradients, with the keys and values that this rank
        has in the step. Gradients of keys and values travel with these around the ring. Return the gradients of this
        rank's keys and values. ``q``, ``k``, ``v``: queries, keys and values of this rank.
        """
        steps = self._compute_ring_steps(q, k)
        travelling = _pack_keys_values(k, v) if len(steps) > 1 else k
        behind: Pending | None = None  # transfer of the gradients to which the previous rank has added
        wide = find_accumulation_dtype(q)
        total = torch.empty(0)
        for step, hops in zip(steps, _compute_hops(steps), strict=True):
            under_way = self._shift_along_ring(travelling, hops) if hops else None
            mine = torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device)
            attend(step, k, v, *_unpack_keys_values(mine, k, v))
            total = mine if behind is None else mine.add_(behind.wait())
            if under_way is not None:
                behind = self._shift_along_ring(total, hops)
                travelling = under_way.wait()
                k, v = _unpack_keys_values(travelling, k, v)
        if steps[-1]:
            total = self._shift_along_ring(total, -steps[-1]).wait()
        return _unpack_keys_values(total, k, v)

    def _shift_along_ring(self, x: Tensor, hops: int) -> Pending:
        """Start to send ``x`` to the rank ``hops`` further along the ring of ranks, and return the transfer. Its result
        is the tensor sent by the rank ``hops`` before this one.
        """
        size, index = self.group.size, self.group.index
        to, source = (index + hops) % size, (index - hops) % size
        sends, receives = [0] * size, [0] * size
        sends[to] = receives[source] = x.numel()
        return self.group.exchange_rows(x, sends, receives)


@dataclass(frozen=True)
class ContextAttention(KeyExchange):
    """Attention over a sequence that is sharded over ``group``, as one rank computes it. Each query sees the keys
    within ``band``, a range of positions relative to its own, such as all earlier positions.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention result for this rank's queries ``q``, and the logarithms of the softmax sums ``[b, h,
        s/n]``. ``k``, ``v``: this rank's keys and values; those of other ranks are received.
        """
        attention = AttentionAccumulator(q, self.band, self.scale, v.shape[-1])
        local = k

        def attend(step: int | None, k: Tensor, v: Tensor) -> None:
            for tile in self._list_tiles(q, local, step):
                attention.add(tile, k, v)

        self.exchange_forward(attend, q, k, v)
        return attention.result()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values ``q``, ``k``, ``v``. ``grad``: gradient of the
        attention result ``out``. ``lse``: logarithms of the softmax sums from forward, ``[b, h, s/n]``.
        """
        found = AttentionGradients(grad, q, out, lse, self.band, self.scale)
        local = k

        def attend(step: int | None, k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
            for tile in self._list_tiles(q, local, step):
                found.add(tile, k, v, grad_k, grad_v)

        of_k, of_v = self.exchange_backward(attend, q, k, v)
        return copy_position_major(found.grad_q.to(q.dtype)), of_k, of_v

    def _list_tiles(self, q: Tensor, k: Tensor, step: int | None) -> tuple[Tile, ...]:
        """Return the tiles (blocks of queries and keys, by position, between which attention is computed) of one step
        of the ring. ``q``, ``k``: this rank's queries and keys, for their lengths. ``step``: number of the step, from
        0; ``None``: the tiles of all keys, in the order of the sequence.
        """
        if step is None:
            whole = k.shape[-2] * self.group.size
            own = self._list_rank_parts(q.shape[-2], self.group.index)
            return list_tiles(own, (PositionRange(0, whole, 0),), self.band)
        how = self.group.size, self.zigzag, self.band, self.group.index
        return list_ring_tiles(q.shape[-2], k.shape[-2], *how, step)


@dataclass(frozen=True)
class ContextDocumentAttention(KeyExchange):
    """Attention over a sequence that is sharded over ``group``, as one rank computes it. Each query sees only keys of
    its own document, within ``band``, a range of positions relative to its own, such as all earlier positions. Every
    rank gathers the document ids of all positions, to know which keys its queries see.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention result for this rank's queries ``q``, and the logarithms of the softmax sums ``[b, h,
        s/n]``. ``k``, ``v``: this rank's keys and values; those of other ranks are received. ``ids``: the document of
        each position of this rank, ``[b, s/n]``.
        """
        ranks = self._gather_ids(ids)
        attention = DocumentAttention(q, group_rows(torch.cat(ranks, 1)), self.band, self.scale, v.shape[-1])

        def attend(step: int | None, k: Tensor, v: Tensor) -> None:
            attention.add(self._list_tiles(ranks, step), k, v)

        self.exchange_forward(attend, q, k, v)
        return attention.result()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of this rank's queries, keys and values ``q``, ``k``, ``v``. ``grad``: gradient of the
        attention result ``out``. ``ids``: the document of each position of this rank, ``[b, s/n]``. ``lse``: logarithms
        of the softmax sums from forward, ``[b, h, s/n]``.
        """
        ranks = self._gather_ids(ids)
        found = DocumentGradients(grad, q, out, lse, group_rows(torch.cat(ranks, 1)), self.band, self.scale)

        def attend(step: int | None, k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
            found.add(self._list_tiles(ranks, step), k, v, grad_k, grad_v)

        of_k, of_v = self.exchange_backward(attend, q, k, v)
        return copy_position_major(found.grad_q.to(q.dtype)), of_k, of_v

    def _gather_ids(self, ids: Tensor) -> list[Tensor]:
        """Return the document ids ``[b, s/n]`` of the positions of every rank, in rank order, on the CPU. ``ids``: the
        document ids of this rank.
        """
        return list(self.group.all_gather(ids.contiguous().unsqueeze(0), 0).wait().cpu().unbind(0))

    def _list_tiles(self, ranks: Sequence[Tensor], step: int | None) -> list[Tiles]:
        """Return, for each row of the batch, the tiles (blocks of queries and keys, by position, between which
        attention is computed) of one step of the ring. ``ranks``: the document ids ``[b, s/n]`` of every rank.
        ``step``: number of the step, from 0; ``None``: the tiles of all keys, in the order of the sequence.
        """
        index, size, length = self.group.index, self.group.size, ranks[0].shape[1]
        own = self._find_rank_runs(ranks, index)
        if step is not None:
            return list_document_tiles(own, self._find_rank_runs(ranks, (index - step) % size), self.band)
        whole = torch.cat([ranks[r].narrow(1, p.start, p.length) for r, p in self._order_parts(length)], 1)
        return list_document_tiles(own, find_runs(whole, (PositionRange(0, length * size, 0),)), self.band)

    def _find_rank_runs(self, ranks: Sequence[Tensor], rank: int) -> list[Runs]:
        return find_runs(ranks[rank], self._list_rank_parts(ranks[rank].shape[1], rank))


@dataclass(frozen=True)
class ContextScoredAttention(KeyExchange):
    """Attention over a sequence that is sharded over ``group``, as one rank computes it, with changed scores or
    prefixes. Each query sees the keys of its own document within ``band``, a range of positions relative to its own,
    and the keys of the document's prefix. Every rank gathers document ids and prefixes of all positions, to know which
    keys its queries see.

    ``cap``: a score ``s`` becomes ``cap * tanh(s / cap)``; ``None`` for no cap. ``given``: three flags: whether
    document ids, prefix and slopes follow the keys and values as operands. Without ids, every row is one document.
    ``prefix_band``: the range of positions, relative to its own, within which a query sees keys of the prefix.
    ``trained``: whether :meth:`backward` computes the gradient of the slopes.
    """

    cap: float | None
    given: tuple[bool, bool, bool]
    prefix_band: Band
    trained: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention result for this rank's queries ``q``, and the logarithms of the softmax sums ``[b, h,
        s/n]``. ``k``, ``v``: this rank's keys and values; those of other ranks are received. ``data``: the operands
        that are present according to ``given``: the document of each position ``[b, s/n]``, flags of the keys of
        prefixes ``[b, s/n]``, and a slope for each head. The slope, times the position of the key minus that of the
        query, is added to the score.
        """
        ids, prefix, slopes = self._name_operands(data)
        ranks = self._gather_marks(q, ids, prefix)
        groups, change = self._order_ranks(ranks).group_rows(), ScoreChange(self.cap, slopes)
        attention = DocumentAttention(q, groups, self.band, self.scale, v.shape[-1], change)

        def attend(step: int | None, k: Tensor, v: Tensor) -> None:
            attention.add(self._list_tiles(ranks, step), k, v)

        self.exchange_forward(attend, q, k, v)
        return attention.result()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of this rank's queries, keys and values ``q``, ``k``, ``v``, and the summand of the
        slopes' gradient from this rank's queries, which has no elements unless slopes are trained. ``grad``: gradient
        of the attention result. ``data``: the operands that are present according to ``given``, then the attention
        result and the logarithms of the softmax sums ``[b, h, s/n]``.
        """
        *rest, out, lse = data
        ids, prefix, slopes = self._name_operands(rest)
        ranks = self._gather_marks(q, ids, prefix)
        groups, change = self._order_ranks(ranks).group_rows(), ScoreChange(self.cap, slopes, self.trained)
        found = DocumentGradients(grad, q, out, lse, groups, self.band, self.scale, change)

        def attend(step: int | None, k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
            found.add(self._list_tiles(ranks, step), k, v, grad_k, grad_v)

        of_k, of_v = self.exchange_backward(attend, q, k, v)
        return copy_position_major(found.grad_q.to(q.dtype)), of_k, of_v, round_slopes(found.grad_slopes, slopes)

    def _compute_ring_steps(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        seen = self.prefix_band if self.given[1] else self.band
        return list_ring_steps(q.shape[-2], k.shape[-2], self.group.size, self.zigzag, seen)

    def _name_operands(self, data: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the document ids, the prefix and the slopes; each is ``None`` if the attention does not have it.
        ``data``: the operands that the attention has, in this order.
        """
        rest = iter(data)
        ids, prefix, slopes = (next(rest) if present else None for present in self.given)
        return ids, prefix, slopes

    def _gather_marks(self, q: Tensor, ids: Tensor | None, prefix: Tensor | None) -> list[RowMarks]:
        """Return the documents and prefixes of the positions of every rank, in rank order, on the CPU. ``q``: this
        rank's queries, for their shape. ``ids``, ``prefix``: the documents and prefixes of this rank, ``[b, s/n]``, or
        ``None``.
        """
        here = [x.to(torch.int64) for x in (ids, prefix) if x is not None]
        if not here:
            return [mark_rows(q[..., :0].cpu(), None, None)] * self.group.size
        found = []
        for both in self.group.all_gather(torch.stack(here).unsqueeze(0), 0).wait().cpu().unbind(0):
            row = list(both.unbind(0))
            own = row.pop(0) if ids is not None else None
            found.append(mark_rows(q[..., :0].cpu(), own, row.pop(0) if prefix is not None else None))
        return found

    def _order_ranks(self, ranks: Sequence[RowMarks]) -> RowMarks:
        """Return the document ids of all positions, and the flags of keys that belong to a prefix, in the order of the
        sequence. ``ranks``: for each rank, the document ids and flags of its positions.
        """
        order = self._order_parts(ranks[0].ids.shape[1])
        ids, prefix = (
            [x[r].narrow(1, p.start, p.length) for r, p in order if x[r] is not None] for x in zip(*ranks, strict=True)
        )
        return RowMarks(torch.cat(ids, 1), torch.cat(prefix, 1) if prefix else None)

    def _list_tiles(self, ranks: Sequence[RowMarks], step: int | None) -> list[Tiles]:
        """Return, for each row of the batch, the tiles (blocks of queries and keys, by position, between which
        attention is computed) of one step of the ring. ``ranks``: for each rank, the document ids of its positions, and
        the flags of keys that belong to a prefix. ``step``: number of the step, from 0; ``None``: the tiles of all
        keys, in the order of the sequence.
        """
        index, size, length = self.group.index, self.group.size, ranks[0].ids.shape[1]
        own = self._list_rank_parts(length, index)
        if step is None:
            whole = (PositionRange(0, length * size, 0),)
            return list_marked_tiles(ranks[index], self._order_ranks(ranks), own, whole, self.band, self.prefix_band)
        source = (index - step) % size
        others = self._list_rank_parts(length, source)
        return list_marked_tiles(ranks[index], ranks[source], own, others, self.band, self.prefix_band)


def _compute_hops(steps: Sequence[int]) -> list[int]:
    """Return the number of ranks by which keys move along the ring after each step; 0 after the last one. ``steps``:
    for each step, the number of ranks by which the keys have moved in total.
    """
    return [*(b - a for a, b in pairwise(steps)), 0]


def _pack_keys_values(k: Tensor, v: Tensor) -> Tensor:
    """Return the keys ``k`` and the values ``v`` concatenated into one 1-dimensional tensor, for a single transfer."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack_keys_values(row: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    grad_k, grad_v = row.split([k.numel(), v.numel()])
    return grad_k.view(k.shape), grad_v.view(v.shape)


def route_rows(group: RankGroup, num_experts: int, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange with all ranks of ``group`` to which expert each row (token) goes. Return three tensors: the order
    ``[n]`` of this rank's rows by expert; the numbers of rows sent to and received from each rank, ``[2, ranks]`` on
    the CPU; and the expert ``[m]`` of every received row, counted from this rank's first expert.

    ``experts`` ``[n]``: the expert of each of this rank's rows, counted over all ranks. ``num_experts``: number of
    experts on all ranks. Rows without a valid expert go to the first or the last rank, where their expert is invalid,
    too.
    """
    own = num_experts // group.size
    by_expert, order = experts.sort(stable=True)
    borders = torch.arange(own, num_experts, own, device=experts.device, dtype=experts.dtype)
    starts = torch.searchsorted(by_expert, borders)
    ends = torch.cat([starts, starts.new_full((1,), len(experts))])
    sends = ends.diff(prepend=ends.new_zeros(1))
    receives = group.all_to_all(sends, 0, 0).wait()
    counts = torch.stack([sends, receives]).cpu()
    mine = group.exchange_rows(by_expert, *counts.tolist()).wait()
    return order, counts, mine - group.index * own


def dispatch_rows(group: RankGroup, x: Tensor, order: Tensor, counts: Tensor, experts: Tensor) -> Pending:
    """Start to send the rows (tokens) of ``x`` to the ranks of their experts, and return the exchange, whose result has
    the received rows. ``group``: the ranks among which the experts are divided. ``order``: the indices of this rank's
    rows, sorted by expert, ``[n]``. ``counts``: numbers of rows sent to and received from each rank, ``[2, ranks]`` on
    the CPU. ``experts`` is not used.
    """
    sends, receives = counts.tolist()
    return group.exchange_rows(x.index_select(0, order), sends, receives)


def combine_rows(group: RankGroup, x: Tensor, order: Tensor, counts: Tensor, experts: Tensor) -> Pending:
    """Start to send the rows (tokens) of ``x``, the results of experts, back to the ranks and positions that the rows
    came from, and return the exchange. ``group``: the ranks among which the experts are divided. ``order``: the indices
    of this rank's rows, sorted by expert, ``[n]``. ``counts``: numbers of rows that this rank sent to, and received
    from, each rank when the rows went to their experts, ``[2, ranks]`` on the CPU. ``experts`` is not used.
    """
    sends, receives = counts.tolist()
    return _PendingReturn(group.exchange_rows(x, receives, sends), order)


class _PendingReturn:
    """The transfer of experts' results back to the ranks of the tokens. ``wait`` returns the rows (tokens) in the order
    in which this rank had sent them. ``order``: the indices of this rank's rows, sorted by expert.
    """

    __slots__ = ("order", "pending")

    def __init__(self, pending: Pending, order: Tensor) -> None:
        self.pending, self.order = pending, order

    def wait(self) -> Tensor:
        rows = self.pending.wait()
        found = torch.empty_like(rows).index_copy_(0, self.order, rows)
        self.pending.release()
        return found

    def release(self) -> None:
        pass  # the caller owns the result of ``wait``
