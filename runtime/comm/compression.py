"""Compressed gradient communication (bfloat16, or int8 with a scale per chunk), and reductions level by level.

Numbers are rounded for the transfer only; the receiver adds them up in the original type. The rounding error of int8 is
kept and added to the values sent in the next step (error feedback, Seide et al. 2014), so that the sums over many steps
equal the sums of the gradients up to one step's rounding. Values that are not finite stay so: a chunk of int8 with an
infinity or a NaN in it arrives as NaN.

``LevelwiseReduction`` holds a rank's flat gradients while they are reduced level by level
(``runtime/program/sharded_buckets.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Pending, RankGroup
from partitioner.runtime.program.codecs import Codec


class ErrorFeedbackEncoder:
    """Compresses what one rank sends in one place, step after step. ``residual``: what the last step lost there."""

    def __init__(self, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.codec = codec
        self.residual = torch.zeros(numel if codec.feedback else 0, dtype=dtype, device=device)

    def encode(self, rows: Tensor) -> Tensor:
        """``rows`` as bytes; with what was lost before, which is added to ``rows`` in place."""
        if not self.codec.feedback:
            return self.codec.encode(rows)
        residual = self.residual.view_as(rows)
        wire = self.codec.encode(rows.add_(residual))
        torch.sub(rows, self.codec.decode(wire, rows.dtype), out=residual)
        residual.nan_to_num_(0.0, 0.0, 0.0)  # of what is not finite nothing is to be made up for
        return wire


class PendingDecode:
    """What arrives in other bytes; see :class:`partitioner.runtime.comm.group.Pending`."""

    def __init__(self, pending: Pending, decode: Callable[[Tensor], Tensor]) -> None:
        self.pending, self.decode = pending, decode

    def wait(self) -> Tensor:
        return self.decode(self.pending.wait())

    def release(self) -> None:
        self.pending.release()


class LevelwiseReduction:
    """What of ``buffer`` this rank has at present; in the end the whole sum, in ``buffer`` again.

    ``groups``: of each level; ``rest``: that of REDUCE. ``codec``: for what is sent over the last level. The buffer
    divides by the parts, and these by the codec's chunks.
    """

    def __init__(self, buffer: Tensor, groups: Sequence[RankGroup], rest: RankGroup, codec: Codec | None) -> None:
        self.buffer, self.groups, self.rest, self.codec = buffer, groups, rest, codec
        self.senders: list[ErrorFeedbackEncoder] = []  # of the parts of the last level, and of this rank's sum of one
        if codec is not None:
            numel = buffer.numel()
            for group in groups[:-1]:
                numel //= group.size
            sizes = numel, numel // groups[-1].size
            self.senders = [ErrorFeedbackEncoder(codec, n, buffer.dtype, buffer.device) for n in sizes]
        self._arriving: Pending | None = None
        self._level = 0  # of those that have been scattered

    def begin(self) -> None:
        """A new step: what was under way is of one that failed."""
        self._arriving, self._level = None, 0

    def scatter(self) -> None:
        """Start to add up this rank's part over the next level."""
        have, group = self._await_buffer(), self.groups[self._level]
        self._level += 1
        if self.codec is None or self._level < len(self.groups):
            self._arriving = group.reduce_scatter(have, 0)
        else:
            self._arriving = start_compressed_reduction(self.senders[0], have.view(group.size, -1), group)

    def reduce(self) -> None:
        """Start to add up what this rank has over the axes that no level has."""
        self._arriving = self.rest.all_reduce(self._await_buffer())

    def gather(self) -> None:
        """Start to bring together what the ranks of the last level that was scattered have."""
        have, compressed = self._await_buffer(), self.codec is not None and self._level == len(self.groups)
        self._level -= 1
        group = self.groups[self._level]
        if not compressed:
            self._arriving = group.all_gather(have, 0)
            return
        sender, dtype = self.senders[1], have.dtype
        pending = group.all_gather(sender.encode(have.view(1, -1)), 0)
        # this rank's own part, too, is what the others have of it
        self._arriving = PendingDecode(pending, lambda wire: sender.codec.decode(wire, dtype).view(-1))

    def finish(self) -> None:
        """Wait until the sum is in the buffer, if it is on its way there."""
        if self._arriving is not None and not self._level:
            pending = self._arriving
            self.buffer.copy_(self._await_buffer())
            pending.release()

    def _await_buffer(self) -> Tensor:
        if self._arriving is None:
            return self.buffer
        arrived, self._arriving = self._arriving.wait(), None
        return arrived


def start_compressed_reduction(sender: ErrorFeedbackEncoder, rows: Tensor, group: RankGroup) -> Pending:
    """Start to send each of ``rows``, compressed, to the rank that adds these up; gives this rank's sum."""
    dtype = rows.dtype
    wire = group.all_to_all(sender.encode(rows), 0, 0)
    return PendingDecode(wire, lambda arrived: sender.codec.decode(arrived, dtype).sum(0))
