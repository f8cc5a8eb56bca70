"""Compressed gradient communication (bfloat16, or int8 with a scale per chunk), and hierarchical reductions.

Numbers are rounded only for the transfer; the receiver sums them in the original dtype. The rounding error of int8 is
stored and added to the values sent in the next step (error feedback, Seide et al. 2014), so that the sums over many
steps equal the sums of the gradients up to one step's rounding. Non-finite values are preserved: an int8 chunk that
contains an infinity or NaN arrives as NaN.

:class:`LevelwiseReduction` reduces a rank's flat gradients in a hierarchical reduction, level by level
(``runtime/program/sharded_buckets.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Pending, RankGroup
from partitioner.runtime.program.codecs import Codec


class ErrorFeedbackEncoder:
    """Compresses the data that one rank sends in one collective, step after step. ``residual``: the rounding error of
    the last step, which is added to the data of the next step. ``codec``: converts rows of numbers to compressed bytes
    and back. ``numel``: number of elements that the rank sends in one step, over all receivers. ``dtype`` and
    ``device``: of the data.
    """

    def __init__(self, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.codec = codec
        self.residual = torch.zeros(numel if codec.feedback else 0, dtype=dtype, device=device)

    def encode(self, rows: Tensor) -> Tensor:
        """Compress ``rows``, of shape ``[rows, n]`` with as many elements as the rank sends in one step, and return
        bytes, ``uint8[rows, bytes of a row]``. The rounding error of the last step is first added to ``rows`` in place,
        and the new rounding error is stored for the next step.
        """
        if not self.codec.feedback:
            return self.codec.encode(rows)
        residual = self.residual.view_as(rows)
        wire = self.codec.encode(rows.add_(residual))
        torch.sub(rows, self.codec.decode(wire, rows.dtype), out=residual)
        residual.nan_to_num_(0.0, 0.0, 0.0)  # non-finite values have no rounding error
        return wire


class PendingDecode:
    """A collective in progress that transfers compressed data. :meth:`wait` returns the decompressed result.
    ``pending``: the collective. ``decode``: function that decompresses the transferred data.
    """

    def __init__(self, pending: Pending, decode: Callable[[Tensor], Tensor]) -> None:
        self.pending, self.decode = pending, decode

    def wait(self) -> Tensor:
        return self.decode(self.pending.wait())

    def release(self) -> None:
        self.pending.release()


class LevelwiseReduction:
    """The hierarchical reduction of one rank's flat gradients ``buffer``, which finally contains the sum. Gradients are
    reduce-scattered level by level (such as within nodes, then between nodes), all-reduced, and all-gathered in reverse
    order.

    Args:
        groups: for each level, the group of ranks over which gradients are scattered and later gathered.
        all_reduce_group: the group of the all-reduce between scattering and gathering.
        codec: compression of the transfers of the last level; ``None``: uncompressed.

    The length of the buffer must be divisible by the number of shards (the product of the sizes of ``groups``), and the
    length of a shard by ``codec.chunk``.
    """

    def __init__(
        self, buffer: Tensor, groups: Sequence[RankGroup], all_reduce_group: RankGroup, codec: Codec | None
    ) -> None:
        self.buffer, self.groups, self.rest, self.codec = buffer, groups, all_reduce_group, codec
        self.senders: list[ErrorFeedbackEncoder] = []  # for the reduce-scatter and for the all-gather of the last level
        if codec is not None:
            numel = buffer.numel()
            for group in groups[:-1]:
                numel //= group.size
            sizes = numel, numel // groups[-1].size
            self.senders = [ErrorFeedbackEncoder(codec, n, buffer.dtype, buffer.device) for n in sizes]
        self._arriving: Pending | None = None
        self._level = 0  # number of levels that have been scattered and not gathered

    def begin(self) -> None:
        """Prepare the hierarchical reduction of the gradients for a new training step. Collectives in progress of an
        earlier step that failed are dropped.
        """
        self._arriving, self._level = None, 0

    def scatter(self) -> None:
        """Start the next reduce-scatter of the hierarchical reduction. The first level (such as within a node) scatters
        the whole gradients; each further level (such as between nodes) scatters this rank's shard of the previous
        level.
        """
        have, group = self._await_buffer(), self.groups[self._level]
        self._level += 1
        if self.codec is None or self._level < len(self.groups):
            self._arriving = group.reduce_scatter(have, 0)
        else:
            self._arriving = start_compressed_reduction(self.senders[0], have.view(group.size, -1), group)

    def reduce(self) -> None:
        """Start to all-reduce this rank's shard of the gradients after the reduce-scatters of all levels, over the
        ranks that hold the same shard.
        """
        self._arriving = self.rest.all_reduce(self._await_buffer())

    def gather(self) -> None:
        """Start the next all-gather of the hierarchical reduction: gather the summed gradients over the ranks of one
        level (such as a node), the last level first.
        """
        have, compressed = self._await_buffer(), self.codec is not None and self._level == len(self.groups)
        self._level -= 1
        group = self.groups[self._level]
        if not compressed:
            self._arriving = group.all_gather(have, 0)
            return
        sender, dtype = self.senders[1], have.dtype
        pending = group.all_gather(sender.encode(have.view(1, -1)), 0)
        # this rank's own part is decoded, too, so that all ranks have equal values
        self._arriving = PendingDecode(pending, lambda wire: sender.codec.decode(wire, dtype).view(-1))

    def finish(self) -> None:
        """Wait for the last collective of the hierarchical reduction, and copy the sums over all ranks into the
        gradient buffer. Do nothing if a level that was reduce-scattered is not all-gathered yet, or if no collective is
        in progress.
        """
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
    """Start to reduce-scatter ``rows`` in compressed form, and return the collective; its result is this rank's sum, a
    flat tensor. ``rows`` has one row for each rank of ``group``. Each rank receives its row from all ranks and sums the
    received rows. ``sender``: compresses the rows and stores their rounding errors.
    """
    dtype = rows.dtype
    wire = group.all_to_all(sender.encode(rows), 0, 0)
    return PendingDecode(wire, lambda arrived: sender.codec.decode(arrived, dtype).sum(0))
