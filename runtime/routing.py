"""Rows to their experts and back, over a group of ranks that have the experts in equal parts.

The numbers of rows are exchanged first, at a fixed size; everything that follows, forward and backward, knows them.
Every rank enters every exchange, be it with no row at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.groups import Group, Pending


def route(group: Group, num_experts: int, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``experts`` ``[n]``: of each row, counted over all ranks.

    Returns the order ``[n]`` of rows by expert; how many rows go to each rank and come from each, ``[2, ranks]`` on the
    CPU; and the expert ``[m]`` of every row that comes, counted from this rank's first. Rows of no expert go to the
    first or the last rank, where they are of no expert either.
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


def dispatch(group: Group, x: Tensor, order: Tensor, counts: Tensor, experts: Tensor) -> Pending:
    """Start to send the rows of ``x`` to the ranks of their experts."""
    sends, receives = counts.tolist()
    return group.exchange_rows(x.index_select(0, order), sends, receives)


def combine(group: Group, x: Tensor, order: Tensor, counts: Tensor, experts: Tensor) -> Pending:
    """Start to bring the rows of ``x`` back to where they came from."""
    sends, receives = counts.tolist()
    return _Returning(group.exchange_rows(x, receives, sends), order)


class _Returning:
    """Rows under way, and the places that they are to have."""

    __slots__ = ("order", "pending")

    def __init__(self, pending: Pending, order: Tensor) -> None:
        self.pending, self.order = pending, order

    def wait(self) -> Tensor:
        rows = self.pending.wait()
        found = torch.empty_like(rows).index_copy_(0, self.order, rows)
        self.pending.release()
        return found

    def release(self) -> None:
        pass  # what it gave is the caller's
