"""Operators that communicate in pieces while they multiply: an all-gather before products, a reduce-scatter after them.

Pieces are broadcast from one or several ranks, and sums are reduced to one or several ranks. All pieces are started as
early as possible and run in the order in which they are started, on a GPU on the stream of the process group, so that
one piece is communicated while another is multiplied. Every rank starts them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.passes.ops.cpu_products import choose_product
from partitioner.runtime.comm.group import Pending, RankGroup

aten = torch.ops.aten


def _cut(ranks: int, pieces: int) -> tuple[int, int]:
    """Return two numbers for a tensor of which each of ``ranks`` ranks has a shard, and which is multiplied in
    ``pieces`` pieces: the number of shards that make one piece, and the number of pieces into which each shard is cut.
    At least one of them is 1. For 4 ranks the result is (2, 1) with 2 pieces, and (1, 2) with 8.
    """
    return max(1, ranks // pieces), max(1, pieces // ranks)


class GatheredProducts:
    """An all-gather in pieces with the matrix products of its result, in progress: all pieces are being sent.
    ``group``: the ranks. ``x``: this rank's shard. ``weights``: matrices ``[in, out]``, where ``in`` is the size of the
    last dim of ``x``. ``biases``: vectors that are added to the products, or ``None``. ``dim``: the dim along which the
    shards are joined. ``pieces``: the number of pieces: a multiple of the number of ranks, or a divisor of it.
    """

    def __init__(
        self,
        group: RankGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dim: int,
        pieces: int,
    ) -> None:
        self.group, self.weights, self.biases, self.dim = group, weights, biases, dim
        self.shape = [*x.shape]
        self.joined, self.parts = _cut(group.size, pieces)
        own = x.unflatten(dim, (self.parts, x.shape[dim] // self.parts)).movedim(dim, 0)
        self.buffer = x.new_empty((group.size, *own.shape))  # [ranks, parts, ...]
        self.buffer[group.index].copy_(own)
        starts = range(0, group.size, self.joined)
        self.places = [(rank, part) for rank in starts for part in range(self.parts)]
        self.sent = {
            (rank, part): group.broadcast(self.buffer[rank : rank + self.joined, part], rank)
            for rank, part in self.places
        }

    def wait(self) -> list[Tensor]:
        """Multiply every piece of the tensor that is being all-gathered as soon as it has arrived; the pieces of this
        rank's own shard come first. Return a list: the gathered tensor, then the product of its rows with each matrix.
        """
        rows = self.buffer.flatten(2, -2)
        products = [self.buffer.new_empty((*rows.shape[:3], w.shape[1])) for w in self.weights]
        has_all = self.joined == 1
        for place in sorted(self.places, key=lambda place: not (has_all and place[0] == self.group.index)):
            rank, part = place
            if not has_all or rank != self.group.index:
                self.sent.pop(place).wait()
            here = slice(rank, rank + self.joined)
            for weight, bias, product in zip(self.weights, self.biases, products, strict=True):
                _multiply_into(product[here, part].flatten(0, 1), rows[here, part].flatten(0, 1), weight, bias)
        for pending in self.sent.values():
            pending.wait()
        lead = self.shape[: self.dim]
        inner = [self.shape[self.dim] // self.parts, *self.shape[self.dim + 1 : -1]]
        whole = _join_pieces(self.buffer, self.dim)
        return [whole, *(_join_pieces(p.unflatten(2, (*lead, *inner)), self.dim).flatten(0, -2) for p in products)]

    def release(self) -> None:
        pass  # the caller owns the results


class ScatteredProducts:
    """A reduce-scatter in pieces of a sum of matrix products, in progress: all pieces are multiplied, and are being
    summed over the ranks. ``group``: the ranks. ``operands``: the rows of the products; all dims except the last are
    rows. ``weights``: for each operand, a matrix ``[in, out]``. ``shape``: shape of the sum before it is scattered.
    ``dim``: the dim along which the sum is cut. ``pieces``: the number of pieces: a multiple of the number of ranks, or
    a divisor of it.
    """

    def __init__(
        self,
        group: RankGroup,
        operands: Sequence[Tensor],
        weights: Sequence[Tensor],
        shape: Sequence[int],
        dim: int,
        pieces: int,
    ) -> None:
        self.dim, self.shape = dim, list(shape)
        self.shape[dim] //= group.size
        joined, parts = _cut(group.size, pieces)
        before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
        cut = group.size, parts, self.shape[dim] // parts * after
        rows = [x.reshape(before, *cut, x.shape[-1]).movedim(0, 2) for x in operands]  # [ranks, parts, ...]
        self.own: list[Pending] = []
        self.others: list[Pending] = []
        for rank in range(0, group.size, joined):
            here = slice(rank, rank + joined)
            for part in range(parts):
                total = operands[0].new_empty((joined, before * cut[2], shape[-1]))
                _multiply_sum(total.flatten(0, 1), [x[here, part].reshape(-1, x.shape[-1]) for x in rows], weights)
                own = rank <= group.index < rank + joined
                (self.own if own else self.others).append(group.reduce(total, rank))

    def wait(self) -> Tensor:
        """Wait until all pieces of the reduce-scatter are summed, and return this rank's part of the sum."""
        for pending in self.others:
            pending.wait()
        lead, length = self.shape[: self.dim], self.shape[self.dim] // len(self.own)
        found = [p.wait().view(*lead, length, *self.shape[self.dim + 1 :]) for p in self.own]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def release(self) -> None:
        pass  # the caller owns the result


def _join_pieces(pieces: Tensor, dim: int) -> Tensor:
    """Return the tensor that was cut along ``dim`` into ``pieces``, which are ``[ranks, parts, ...]``. If the dim is
    outermost, the result shares the memory of the pieces.
    """
    moved = pieces.movedim((0, 1), (dim, dim + 1))
    return moved.flatten(dim, dim + 2).contiguous()


def _multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write the matrix product of ``x`` and ``weight`` to ``out``. If ``bias`` is not ``None``, add it to
    the product.
    """
    operands = (x, weight) if bias is None else (bias, x, weight)
    target = aten.mm.default if bias is None else aten.addmm.default
    faster = choose_product(target, operands) if x.device.type == "cpu" else None
    if faster is not None:
        out.copy_(faster(*operands))
    elif bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _multiply_sum(out: Tensor, operands: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write the sum of the matrix products of ``operands`` and ``weights``, taken pairwise, to ``out``."""
    for place, (x, weight) in enumerate(zip(operands, weights, strict=True)):
        if place == 0:
            _multiply_into(out, x, weight, None)
        else:
            out.addmm_(x, weight)


__all__ = ["GatheredProducts", "ScatteredProducts"]
