"""Gradients of a rank's parameters in flat buffers: backward adds to parts of a buffer, and collectives reduce a buffer
as a whole.

Gradients of parameters in a dtype shorter than float32 are accumulated and reduced in float32. A :class:`Sink` is the
part of a buffer that accumulates the gradient of one parameter. Under ZeRO (:class:`ScatteredBucket`), backward
accumulates whole gradients, which are then reduce-scattered, so that each rank keeps one piece.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ir.serialize import dtype_of
from partitioner.passes.ops.cpu_products import multiply_into
from partitioner.passes.ops.experts import add_weight_gradient, grouped_mm_weight
from partitioner.runtime.comm.compression import ErrorFeedbackEncoder, LevelwiseReduction, start_compressed_reduction
from partitioner.runtime.comm.group import Communicator, Pending, RankGroup
from partitioner.runtime.comm.storage import free_storage
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.codecs import CODECS
from partitioner.runtime.program.program import RankProgram, shard_shape
from partitioner.runtime.program.sharded_buckets import (
    GATHERING,
    ScatterQueue,
    count_gradient_shards,
    find_flat_shards,
    list_all_reduce_axes,
    zero_axes,
)
from partitioner.runtime.state.host_offload import Arrival, HostCopier
from partitioner.runtime.state.sharded_parameters import FlatBuffer, GatherBuffer


class Sink:
    """Accumulates the gradient of one parameter in the tensor ``view``. The first addition of a step overwrites the
    gradient of the previous step; ``fresh`` is true until then.
    """

    __slots__ = ("fresh", "view")

    def __init__(self, view: Tensor) -> None:
        self.view = view
        self.fresh = True

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient`` to the accumulated gradient of one parameter. The first addition of a step overwrites the
        gradient of the last step."""
        if self.fresh:
            self.view.copy_(gradient)
            self.fresh = False
        else:
            self.view.add_(gradient)

    def addmm(self, a: Tensor, b: Tensor) -> None:
        """Add the matrix product of ``a`` and ``b`` to the accumulated gradient of one parameter. The first addition of
        a step overwrites the gradient of the last step.
        """
        multiply_into(self.view, a, b, self.fresh)
        self.fresh = False

    def add_sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        """Add the sum of ``x`` over ``dims`` to the accumulated gradient of one parameter. The first addition of a step
        overwrites the gradient of the last step.
        """
        if self.fresh:
            torch.sum(x, dims, out=self.view)
            self.fresh = False
        else:
            self.view.add_(torch.sum(x, dims))

    def add_grouped_product(self, rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> None:
        """Compute the gradient of the stacked weight matrices of experts, one matrix per expert, and add it to the
        accumulated gradient of one parameter. ``rows`` and ``grads``: inputs and output gradients of all experts,
        sorted by expert. ``ends``: for each expert, the index after its last row. ``transposed``: whether to swap the
        last two dims of the result first.
        """
        if rows.device.type == "cpu":
            total = self.view.transpose(1, 2) if transposed else self.view
            add_weight_gradient(total, rows, grads, ends, self.fresh)
            self.fresh = False
        else:  # the host does not know the values of ends
            self.add(_compute_grouped_gradient(rows, grads, ends, transposed))

    def zero_if_unused(self) -> None:
        """Set the accumulated gradient of one parameter to zero if nothing was added to it in this step."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False


class WideSink(Sink):
    """Accumulates in float32 the gradient of a parameter with a shorter dtype."""

    __slots__ = ()

    def addmm(self, a: Tensor, b: Tensor) -> None:
        self.add(torch.mm(a, b))

    def add_sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        self.add(torch.sum(x, dims, dtype=self.view.dtype))

    def add_grouped_product(self, rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> None:
        self.add(_compute_grouped_gradient(rows, grads, ends, transposed))


def _compute_grouped_gradient(rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    made = grouped_mm_weight(rows, grads, ends)
    return made.transpose(1, 2) if transposed else made


def create_sink(shard: Tensor, view: Tensor) -> Sink:
    """Return an object that accumulates the gradient of the parameter ``shard`` in the tensor ``view``, which may have
    a wider dtype.
    """
    return Sink(view) if view.dtype == shard.dtype else WideSink(view)


class TransientSink(Sink):
    """Accumulates the gradient of one parameter in memory that is allocated at the first addition and released after
    the gradient was reduce-scattered.
    """

    __slots__ = ("room",)

    def __init__(self, buffer: GatherBuffer) -> None:
        self.room = buffer
        self.fresh = True

    @property
    def view(self) -> Tensor:  # type: ignore[override]  # nobody sets it
        self.room.allocate()
        return self.room.tensor


class WideTransientSink(TransientSink):
    """Accumulates in float32 the gradient of a parameter with a shorter dtype, in memory that is allocated at the first
    addition and released after the gradient was reduce-scattered.
    """

    __slots__ = ()

    addmm = WideSink.addmm
    add_sum = WideSink.add_sum
    add_grouped_product = WideSink.add_grouped_product


class ScatteredBucket:
    """The gradients of one bucket (parameters that are reduced together) under ZeRO.

    ``sinks`` accumulate whole gradients in backward; ``pieces`` are this rank's pieces of the sums, which an optimizer
    reads. ``keep``: if true (ZeRO 1), the whole gradients keep their memory until the next step. Otherwise they are
    released after each reduce-scatter, and the pieces have memory only from the first reduce-scatter of a step on.
    Pieces start at multiples of ``grain`` elements, and the length of their buffer is a multiple of ``whole`` elements.
    ``number``: the bucket's index. ``group``: ranks that divide the parameters. ``all_reduce_group``: ranks with the
    same pieces.
    """

    def __init__(
        self,
        rank: RankProgram,
        number: int,
        group: RankGroup,
        all_reduce_group: RankGroup,
        device: torch.device,
        grain: int = 1,
        whole: int = 1,
    ) -> None:
        bucket = rank.stage.buckets[number]
        states = bucket.states
        program, short = rank.program, dtype_of(rank.program.states[states[0]].dtype)
        dtype = accumulated_in(short)
        sink = TransientSink if dtype == short else WideTransientSink
        self.group, self.rest, self.keep = group, all_reduce_group, program.zero < 2
        self.flat = FlatBuffer(find_flat_shards(program, states, group.size, group.index), dtype, device, grain, whole)
        shapes = [shard_shape(program, s) for s in states]
        self.rooms = [GatherBuffer(p, shape, dtype, device) for p, shape in zip(self.flat.pieces, shapes, strict=True)]
        self.pieces = {s: self.flat.piece(i) for i, s in enumerate(states)}
        self.sinks: dict[str, Sink] = {s: sink(buffer) for s, buffer in zip(states, self.rooms, strict=True)}
        self.fresh = True  # no gradient of this step was added to the pieces yet
        self.fixed = False  # the pieces keep their memory between steps
        self._sent: deque[tuple[Tensor, Pending]] = deque()  # reduce-scatters in progress, oldest first
        self.sender: ErrorFeedbackEncoder | None = None  # if transfers over this group are compressed
        if bucket.compression and not bucket.levels:
            self.sender = ErrorFeedbackEncoder(CODECS[bucket.compression], group.size * self.flat.length, dtype, device)
        if not self.keep:
            self.release_memory()

    def begin(self) -> None:
        """Prepare the gradients of the bucket for a new training step: additions start from zero, and reduce-scatters
        of a failed step are dropped.
        """
        self.fresh = True
        self._sent.clear()  # reduce-scatters of a failed step
        for sink in self.sinks.values():
            sink.fresh = True
        if not self.keep and not self.fixed:
            self.flat.release()

    def fix_address(self) -> None:
        """Keep the memory of this rank's ZeRO pieces of the gradients from now on, also between steps, so that a step
        that is recorded and replayed finds them at the same address.
        """
        self.fixed = True
        self.restore()

    def restore(self) -> None:
        """If a failed step has released this rank's ZeRO pieces of the gradients of the bucket, allocate them, filled
        with zeros.
        """
        if self.flat.is_released:
            self.flat.allocate()
            self.flat.buffer.zero_()

    def release_memory(self) -> None:
        for buffer in self.rooms:
            buffer.release()

    def start(self) -> None:
        """Start to reduce-scatter the gradients of the bucket that backward has accumulated since the last
        reduce-scatter.
        """
        make = self.flat.buffer.new_empty if self.flat.is_dense else self.flat.buffer.new_zeros
        whole = make(self.group.size * self.flat.length)
        for i, (sink, buffer) in enumerate(zip(self.sinks.values(), self.rooms, strict=True)):
            sink.zero_if_unused()
            self.flat.rows(whole, i).copy_(buffer.rows)
            sink.fresh = True
        if not self.keep:
            self.release_memory()
        if self.sender is None:
            pending = self.group.reduce_scatter(whole, 0)
        else:
            pending = start_compressed_reduction(self.sender, whole.view(self.group.size, -1), self.group)
        self._sent.append((whole, pending))

    def collect(self) -> None:
        """Wait for the oldest reduce-scatter in progress, and add its result to this rank's ZeRO pieces of the
        gradients.
        """
        whole, pending = self._sent.popleft()
        arrived = pending.wait()
        if self.fresh:
            self.flat.allocate()
            self.flat.buffer.copy_(arrived)
            self.fresh = False
        else:
            self.flat.buffer.add_(arrived)
        pending.release()
        free_storage(whole)

    def zero_if_unused(self) -> None:
        """Set this rank's ZeRO pieces of the gradients to zero if no reduce-scatter has added to them in this step."""
        if self.fresh:
            self.flat.allocate()
            self.flat.buffer.zero_()
            self.fresh = False

    def reduce(self) -> Pending:
        """Start to all-reduce this rank's ZeRO pieces of the gradients over the ranks that hold the same pieces, and
        return the collective.
        """
        return self.rest.all_reduce(self.flat.buffer)


_ALIGNMENT = 64  # bytes: good for vector loads and NCCL's chunks


class RankGradients:
    """The gradients of a rank's parameters, by parameter name.

    Args:
        shards: parameter name -> the shard that this rank holds.
        copier: copies gradients to host memory, if the program offloads the optimizer.

    ``sinks`` accumulate gradients in backward. ``owned`` has the gradients that an optimizer reads after a step: the
    accumulated gradients or, under ZeRO, this rank's pieces of them. If the optimizer is offloaded, these are copies in
    host memory.
    """

    def __init__(
        self,
        rank: RankProgram,
        shards: Mapping[str, Tensor],
        communicator: Communicator,
        copier: HostCopier | None = None,
    ) -> None:
        self.rank = rank
        self.communicator = communicator
        states = rank.program.states
        train = rank.program.objective == "train"
        trained = [s for s in rank.states if train and states[s].requires_grad]
        self._sums: dict[str, Sink] = {}  # sinks of parameters that ZeRO does not shard
        self.buffers: dict[int, Tensor] = {}
        self._gaps: list[Tensor] = []  # unused elements in compressed chunks that also have gradients
        self.scattered: dict[int, ScatteredBucket] = {}
        for number, bucket in enumerate(rank.stage.buckets):
            if not bucket.axes:  # parameters without a gradient
                continue
            if zero_axes(rank.program, bucket.states):
                self.scattered[number] = self._scattered_bucket(number)
                continue
            self.buffers[number], views = _allocate_flat_buffer(
                [shards[s] for s in bucket.states], *_compute_alignments(rank, bucket)
            )
            if bucket.compression:
                self._gaps += _find_gaps(self.buffers[number], views)
            self._sums.update((s, create_sink(shards[s], v)) for s, v in zip(bucket.states, views, strict=True))
        sharded = {s: sink for b in self.scattered.values() for s, sink in b.sinks.items()}
        for state in trained:
            if state not in self._sums and state not in sharded:
                shard = shards[state]
                wide = accumulated_in(shard.dtype)
                self._sums[state] = create_sink(shard, torch.zeros(shard.shape, dtype=wide, device=shard.device))
        self.sinks = self._sums | sharded
        self.owned = {s: sink.view for s, sink in self._sums.items()}
        self.owned |= {s: piece for b in self.scattered.values() for s, piece in b.pieces.items()}
        self._here = self.owned  # gradients on the device
        self.copier = copier = copier or HostCopier(communicator.device)
        self._leaving: list[Arrival] = []
        if "optimizer" in rank.program.offload:
            self.owned = {s: copier.empty(view.shape, view.dtype).zero_() for s, view in self._here.items()}
        self._groups = {n: communicator.group(rank.group(*rank.stage.buckets[n].axes)) for n in self.buffers}
        self._levelled = {
            n: self._make_levelwise_reduction(n) for n, bucket in enumerate(rank.stage.buckets) if bucket.levels
        }
        self._under_way: dict[int, Pending] = {}
        self._scattering = ScatterQueue[int]()  # buckets
        self._gathering: deque[int] = deque()  # buckets whose sums are being gathered

    def _scattered_bucket(self, number: int) -> ScatteredBucket:
        rank, bucket = self.rank, self.rank.stage.buckets[number]
        group = self.communicator.group(rank.zero_group(bucket.states[0]))
        all_reduce_group = self.communicator.group(rank.group(*list_all_reduce_axes(rank.program, bucket)))
        return ScatteredBucket(
            rank, number, group, all_reduce_group, self.communicator.device, *_compute_alignments(rank, bucket)
        )

    def _make_levelwise_reduction(self, number: int) -> LevelwiseReduction:
        """Return the object that runs the hierarchical reduction of the gradients of the bucket ``number`` (index of a
        set of parameters that are reduced together), with its process groups.
        """
        rank, bucket = self.rank, self.rank.stage.buckets[number]
        groups = [self.communicator.group(rank.group(*level)) for level in bucket.levels]
        all_reduce_group = self.communicator.group(rank.group(*list_all_reduce_axes(rank.program, bucket)))
        buffer = self.scattered[number].flat.buffer if number in self.scattered else self.buffers[number]
        return LevelwiseReduction(
            buffer, groups, all_reduce_group, CODECS[bucket.compression] if bucket.compression else None
        )

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Return the rounding errors of compressed gradients that are added in the next step, as a dict: name of the
        transfer -> flat tensor. The name is the index of the bucket (parameters that are reduced together). In a
        hierarchical reduction, it is followed by ``.0`` for the gradients that the rank sends, or ``.1`` for the sums.
        The values are multiplied by the loss scale of the last step.
        """
        found = {f"{n}.{k}": s for n, levels in self._levelled.items() for k, s in enumerate(levels.senders)}
        found |= {str(n): b.sender for n, b in self.scattered.items() if b.sender is not None}
        return {place: sender.residual for place, sender in found.items() if sender.residual.numel()}

    def rescale(self, factor: float) -> None:
        """Multiply the stored rounding errors of compressed gradients by ``factor``, because the loss scale has
        changed. A ``factor`` of 0 removes them.
        """
        for residual in self.residuals.values():
            residual.mul_(factor)

    def begin(self) -> None:
        """Prepare the gradients of this rank for a new training step: the next addition to each gradient
        overwrites it.
        """
        self._scattering.clear()  # collectives that are left are of a failed step
        self._gathering.clear()
        self._under_way.clear()
        for levels in self._levelled.values():
            levels.begin()
        if self._gaps:  # a chunk with a non-finite gradient has set them to NaN
            torch._foreach_zero_(self._gaps)
        for sink in self._sums.values():
            sink.fresh = True
        for bucket in self.scattered.values():
            bucket.begin()

    @property
    def transient_names(self) -> Iterator[str]:
        """Return the names of the parameters whose gradients have no memory from the start of a step until their first
        reduce-scatter, because ZeRO 2 or 3 divides them.
        """
        return (s for bucket in self.scattered.values() if not bucket.keep for s in bucket.pieces)

    def fix_addresses(self) -> None:
        """Keep the memory of all gradients that an optimizer reads from now on, so that a step that is recorded and
        replayed finds them at the same address. Otherwise ZeRO 2 and 3 release it at the start of each step.
        """
        for bucket in self.scattered.values():
            bucket.fix_address()

    def restore(self) -> None:
        """If a failed step has left ZeRO pieces of gradients without memory, allocate them, filled with zeros, because
        an optimizer may read them.
        """
        for bucket in self.scattered.values():
            bucket.restore()

    def scatter(self, bucket: int, level: bool = False) -> None:
        """Start to reduce-scatter the gradients of the bucket (parameters that are reduced together) with index
        ``bucket``. If ``level`` is true, this is the next level of a hierarchical reduction, and the collective runs
        over the ranks of this level, such as those of one node; otherwise it runs over the mesh axes of ZeRO.
        """
        if level:
            self._complete_bucket(bucket)
            self._levelled[bucket].scatter()
            return
        for _ in self._scattering.list_blocking():
            self._collect_first_scatter()
        self.scattered[bucket].start()
        self._scattering.begin(bucket)

    def computed(self) -> None:
        """Record that a backward instruction has run. The next reduce-scatter then starts only after all in progress
        have ended.
        """
        self._scattering.computed()

    def _collect_first_scatter(self) -> None:
        self.scattered[self._scattering.end_first()].collect()

    def _await_scatters(self, bucket: int) -> None:
        """Wait for the reduce-scatters of the gradients of bucket ``bucket`` (index of a set of parameters that are
        reduced together), and for all that were started earlier.
        """
        while bucket in self._scattering:
            self._collect_first_scatter()

    def reduce(self, bucket: int) -> None:
        """Start to all-reduce the gradients of the bucket (parameters that are reduced together) with index ``bucket``.
        Without a reduce-scatter, the whole gradients are all-reduced over all ranks of the bucket's reduction. After a
        reduce-scatter, this rank's shard is all-reduced over the ranks that have the same shard.
        """
        self._complete_bucket(bucket)
        if bucket in self._levelled:
            self._levelled[bucket].reduce()
        elif bucket in self.scattered:
            self._under_way[bucket] = self.scattered[bucket].reduce()
        else:
            self._under_way[bucket] = self._groups[bucket].all_reduce(self.buffers[bucket])

    def gather(self, bucket: int, last: bool) -> None:
        """Start the next all-gather of the hierarchical reduction of bucket ``bucket`` (index of a set of parameters
        that are reduced together). The all-gathers run over the ranks of the reduce-scatters, in reverse order.
        ``last``: whether this is the last all-gather of the reduction.
        """
        while last and len(self._gathering) >= GATHERING:
            self._levelled[self._gathering.popleft()].finish()
        self._levelled[bucket].gather()
        if last:
            self._gathering.append(bucket)

    def _complete_bucket(self, bucket: int) -> None:
        """Complete the gradients of bucket ``bucket`` (index of a set of parameters that are reduced together) before
        they are reduced: wait for their reduce-scatters or, without ZeRO, set gradients to which nothing was added to
        zero.
        """
        if bucket in self.scattered:
            self._await_scatters(bucket)
            return
        for state in self.rank.stage.buckets[bucket].states:
            self.sinks[state].zero_if_unused()

    def _await_reduction(self, bucket: int) -> None:
        """Wait until the reductions in progress of the gradients of bucket ``bucket`` (index of a set of parameters
        that are reduced together) have ended.
        """
        if bucket in self.scattered:
            self._await_scatters(bucket)
        if bucket in self._under_way:
            self._under_way.pop(bucket).wait()
        if bucket in self._levelled:
            self._levelled[bucket].finish()

    def sync(self, states: Sequence[str]) -> None:
        """Sum the gradients of the tied parameters ``states`` (names) over the pipeline stages that share them, and
        wait for the sums.
        """
        for number, bucket in self.scattered.items():
            if not bucket.pieces.keys().isdisjoint(states):
                self._await_reduction(number)
                bucket.zero_if_unused()  # only other stages may have added to the gradient
        for ranks, tied in group_states_by_ranks(self.rank, states).items():
            group = self.communicator.group(ranks)
            for state in tied:
                if state in self._sums:
                    self._sums[state].zero_if_unused()
            views = [self._here[s] for s in tied if self._here[s].numel()]
            for work in [group.all_reduce(view) for view in views]:
                work.wait()

    def finish(self) -> None:
        """Wait until all reductions of gradients and their copies to host memory have ended, so that every gradient is
        complete.
        """
        while self._scattering:
            self._collect_first_scatter()
        for pending in self._under_way.values():
            pending.wait()
        self._under_way.clear()
        for levels in self._levelled.values():
            levels.finish()
        for sink in self._sums.values():
            sink.zero_if_unused()
        for arrival in self._leaving:
            arrival.finish()  # block, because the host reads them next
        self._leaving.clear()

    def offload(self, states: Sequence[str]) -> None:
        """Start to copy the gradients of the parameters ``states`` (names) to host memory, after their reductions have
        ended.
        """
        read = set(states)
        for number, bucket in enumerate(self.rank.stage.buckets):
            if not read.isdisjoint(bucket.states):
                self._await_reduction(number)
        for state in states:
            if state in self._sums:
                self._sums[state].zero_if_unused()
        self._leaving.append(self.copier.start([(self._here[s], self.owned[s]) for s in states]))


def group_states_by_ranks(rank: RankProgram, states: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
    """Return a dict: the ranks that share a parameter or buffer -> names of those of ``states`` that these ranks share.
    The ranks of a tensor are one for each pipeline stage that has the tensor, in order of the stages: this rank, and
    the ranks whose other mesh coordinates equal this rank's. ``rank``: the program of this rank.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for state in states:
        ranks = tuple(rank.peer(stage) for stage in sorted(rank.program.states[state].stages))
        groups.setdefault(ranks, []).append(state)
    return groups


def _compute_alignments(rank: RankProgram, bucket: Bucket) -> tuple[int, int]:
    """Return two alignments, in elements, for the flat gradient buffer of ``bucket`` on this rank: the start of each
    parameter in the buffer is a multiple of the first, and the buffer's length a multiple of the second. ``rank``: the
    program of this rank. ``bucket``: the parameters whose gradients are reduced together.

    Compression scales chunks of gradients. A chunk must not contain elements of two parameters: ranks along ``tp`` may
    hold the same shard of one and different shards of the other, and would round the first one differently.
    """
    chunk = CODECS[bucket.compression].chunk if bucket.compression else 1
    return chunk, chunk * count_gradient_shards(rank.program, bucket, len(bucket.levels))


def _allocate_flat_buffer(shards: Sequence[Tensor], grain: int, whole: int) -> tuple[Tensor, list[Tensor]]:
    """Return a flat buffer of zeros for the gradients of ``shards``, and for each shard a view of the buffer with its
    shape. Each view starts at a multiple of ``grain`` elements, and the buffer's length is a multiple of ``whole``
    elements.
    """
    dtype = accumulated_in(shards[0].dtype)
    step = math.lcm(max(1, _ALIGNMENT // dtype.itemsize), grain)
    starts, total = [], 0
    for shard in shards:
        starts.append(total)
        total += -(-shard.numel() // step) * step
    buffer = torch.zeros(-(-total // whole) * whole, dtype=dtype, device=shards[0].device)
    views = [buffer[s : s + x.numel()].view(x.shape) for s, x in zip(starts, shards, strict=True)]
    return buffer, views


def _find_gaps(buffer: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of the flat ``buffer`` between ``views`` and after the last one, as views; empty parts are left
    out. ``views``: views of the buffer, in the order of their position.
    """
    starts = [view.storage_offset() for view in views]
    ends = [start + view.numel() for start, view in zip(starts, views, strict=True)]
    gaps = (buffer[a:b] for a, b in zip(ends, [*starts[1:], buffer.numel()], strict=True))
    return [gap for gap in gaps if gap.numel()]
