"""Compute lower bounds on the computation time of a model's blocks on each device type, without collectives.

It is assumed that the work of a whole block can be divided evenly. The seconds of a block are then linear in the share
of the batch and of the ranks: ``launches + (work that grows with the batch) b / (B tp) + (traffic of weights) / tp``,
for ``b`` samples of a batch of ``B``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import fx

from partitioner.candidate import MeshCandidate
from partitioner.cost.call.block_profile import fan_out, learned_nodes, node_operands, operand_needs
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.expert_parallel import expert_region
from partitioner.cost.call.fp8 import first_readers, least_in_fp8, products_in_fp8
from partitioner.cost.call.fused_regions import find_least_traffic
from partitioner.cost.call.operators import (
    VIEWS,
    Kernel,
    Operand,
    add_kernel,
    backward_kernels,
    forward_kernels,
    operator_name,
)
from partitioner.cost.call.recomputation import Remade, find_recomputed_nodes
from partitioner.cost.call.roofline import memory_rate, product_rate
from partitioner.cost.call.saved_activations import SavedBytes, carried_bytes, kept_by
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.scaled_products import Scaling
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.repeated_heads import read_heads_once
from partitioner.passes.shard.shard_block import fuse_bias
from partitioner.topology.hardware import DeviceType

Vector = NDArray[np.float64]

Number = TypeVar("Number", float, Vector)


@dataclass(frozen=True)
class BlockCallTime:
    """A lower bound on the seconds of one call of a block (such as a decoder layer) for the whole batch on one device,
    as a sum of parts. :meth:`at` computes the bound for a smaller part of the batch, or for several ranks.

    ``launches``: seconds of kernel launches. ``batch``: seconds that grow with the batch. ``weights``: seconds of
    reading and writing weights. ``flops``: FLOPs of matrix products. ``issued``: seconds in which the host launches the
    operators; the call takes at least as long. ``spared``: seconds of copies and sums, as a pair (kernel launches, part
    that grows with the batch). These are separate because a sharded graph, or a graph for a single sample, may have no
    copies and sums."""

    launches: float = 0.0
    batch: float = 0.0
    weights: float = 0.0
    flops: float = 0.0
    issued: float = 0.0  # seconds in which the host issues the operators that every graph of the block has
    spared: tuple[float, float] = (0.0, 0.0)  # launches, and the part that grows with the batch

    def at(self, share: Number, tp: Number, several: Number, ep: Number) -> Number:
        """Return a lower bound in seconds on one call of a block (such as a layer) on one rank, for the fraction
        ``share`` of the batch and with the work divided over ``tp`` ranks. All weights are counted as if they were
        divided over ``ep`` ranks as well as over ``tp``, because some may belong to experts. The seconds ``spared`` of
        copies and sums are included only if ``several`` is 1 and ``tp`` is 1, because other graphs may not need them.

        ``several``: 1 if the microbatch has more than one sample, otherwise 0. ``ep``: number of ranks that share the
        experts."""
        seconds: Number = self.launches + self.batch * share / tp + self.weights / tp / ep
        seconds += (tp == 1) * several * (self.spared[0] + self.spared[1] * share)
        least: Number = np.maximum(seconds, self.issued)
        return least


@dataclass(frozen=True)
class BlockWork:
    """The work of one call of a block (such as a decoder layer) for the whole batch on one device.

    ``forward``, ``backward``: seconds, divided into parts such as kernel launches. ``inputs``: the part of the backward
    that computes gradients of inputs. ``kept``: the least bytes that are saved for the backward. ``carried``: bytes
    held between the two halves of a split backward (gradients of inputs, then gradients of weights). ``input_bytes``,
    ``output_bytes``: bytes of each input and output. ``output_grads``: for each output, whether it receives a gradient.
    ``over_ranks``: the work under context parallelism (``cp`` > 1), where repeated key and value heads are read only
    once; ``None``: context parallelism does not change the work."""

    forward: BlockCallTime
    backward: BlockCallTime
    inputs: BlockCallTime
    kept: SavedBytes
    carried: float
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    output_grads: tuple[bool, ...]
    over_ranks: BlockWork | None = None

    def at(self, share: float, tp: int, several: bool = True, ep: int = 1, cp: int = 1) -> CallCost:
        """Return a lower bound on the cost of one call of a block (such as a layer) on one rank. ``tp``, ``ep``,
        ``cp``: number of ranks along these mesh axes. ``share``: the rank's fraction of the batch; if ``cp`` ranks
        share a sequence, ``share`` is already divided by ``cp``. ``several``: whether the microbatch has more than one
        sample."""
        if cp > 1 and self.over_ranks is not None:
            return self.over_ranks.at(share, tp, several, ep)
        scale = share / tp
        forward, backward, inputs = (
            work.at(share, float(tp), float(several), float(ep)) for work in (self.forward, self.backward, self.inputs)
        )
        return CallCost(
            forward_s=forward,
            backward_s=backward,
            weights_s=backward - inputs,
            saved_bytes=self.kept.inside * scale,
            saved_inputs=self.kept.inputs,
            carried_bytes=self.carried * scale,
            working_bytes=self.kept.working * share if tp == 1 else 0.0,
            input_bytes=tuple(b * scale for b in self.input_bytes),
            output_bytes=tuple(b * scale for b in self.output_bytes),
            output_grads=self.output_grads,
        )


@dataclass
class Works:
    """The work (lower bounds on seconds and bytes of one call) of all blocks of a model, on the best device type and on
    each device type of the topology. A block is a repeated piece, such as a decoder layer. The work is computed when
    first needed.

    ``blocks``: block name -> its graph for the whole batch. ``device``: the best device type. ``types``: all device
    types with their speed factors, or empty if there is only one. ``train``: whether calls have a backward. ``fp8``:
    whether products with weights are in fp8. ``fused_casts``: whether the kernel in front of a product writes the
    product's operand in fp8, so that no separate cast is needed. ``how``: the operators that selective recomputation
    may run again in the backward: ``"scores"`` (attention scores), ``"selective"`` (also other large results that take
    little time) or ``"alternate"`` (also every second matrix product); ``None``: no operators. ``fused_kernels``:
    whether a compiler merges operators. If so, for an operator that can be merged, only the memory traffic is counted
    that no merging avoids."""

    blocks: Mapping[str, Block]
    device: DeviceType
    types: Sequence[DeviceType]
    train: bool
    fp8: Scaling | None
    fused_casts: bool
    how: Remade | None
    fused_kernels: bool = False

    @cached_property
    def best(self) -> dict[str, BlockWork]:
        return self._bound_blocks_on_device(self.device)

    @cached_property
    def paced(self) -> list[dict[str, BlockWork]]:
        return [self._bound_blocks_on_device(device) for device in self.types]

    def _bound_blocks_on_device(self, device: DeviceType) -> dict[str, BlockWork]:
        """Return name of a block (such as a layer) -> lower bounds on the seconds and bytes of one call on
        ``device``."""
        how = self.fp8, self.how, self.fused_casts, self.fused_kernels
        return {name: block_work(block, device, self.train, *how) for name, block in self.blocks.items()}


_MERGED = "merged"  # kind of the kernels of merged operators, which have kernels of several kinds
_ROUNDED = 1e-9  # a ratio this near to a whole number is taken as the whole number


def block_work(
    block: Block,
    device: DeviceType,
    train: bool = True,
    fp8: Scaling | None = None,
    how: Remade | None = None,
    fused_casts: bool = False,
    fused_kernels: bool = False,
) -> BlockWork:
    """Return lower bounds on the seconds and bytes of one call of ``block`` (a piece of the model, such as a layer) on
    ``device``. The graph of ``block`` is for the whole batch. ``train``: whether the call has a backward. ``fp8``:
    whether products with weights are in fp8. ``fused_casts``: whether the kernel in front of a product writes the
    product's operand in fp8, so that no separate cast is needed. ``fused_kernels``: whether a compiler merges
    operators. If so, for an operator that can be merged, only the memory traffic is counted that no merging avoids.

    ``how``: the operators that selective recomputation may run again in the backward: ``"scores"`` (attention scores),
    ``"selective"`` (also other large results that take little time) or ``"alternate"`` (also every second matrix
    product); ``None``: no operators. For the lower bound, the results of these operators need no memory between forward
    and backward, and their recomputation takes no time."""
    options = device, train, fp8, how, fused_casts, fused_kernels
    found = _block_work(_copy_block_graph(block), *options)
    once = _copy_block_graph(block)
    if not read_heads_once(once):
        return found
    return replace(found, over_ranks=_block_work(once, *options))


def _block_work(
    block: Block,
    device: DeviceType,
    train: bool,
    fp8: Scaling | None,
    how: Remade | None,
    fused_casts: bool,
    fused_kernels: bool,
) -> BlockWork:
    """Return lower bounds on the seconds and bytes of one call of ``block`` (a piece of the model, such as a layer) on
    ``device``, without the separate work under context parallelism. ``train``: whether the call has a backward.
    ``fp8``: how operands of products with weights are scaled to fp8; ``None``: they are not in fp8. ``fused_casts``:
    whether the kernel in front of a product writes the product's operand in fp8. ``how``: the operators that selective
    recomputation may run again in the backward, such as ``"scores"`` (attention scores); ``None``: no operators.
    ``fused_kernels``: whether a compiler merges operators."""
    fused = fuse_bias(block)
    states, learned = set(block.states), learned_nodes(fused)
    short = products_in_fp8(fused, "tensor", expert_region(fused)) if fp8 else frozenset[fx.Node]()
    casting = first_readers(fused, short)
    ahead, back, spared_ahead, spared_back = (list[Kernel]() for _ in range(4))
    least = find_least_traffic(fused, train) if fused_kernels else {}
    for node in fused.graph.nodes:
        if node.op != "call_function":
            continue
        is_view = operator_name(node) in VIEWS
        if fused_kernels and is_view:
            continue
        operands, results = node_operands(node, states, learned, copied=True)  # a sharded graph may not need the copies
        kernels = forward_kernels(node, operands, results)
        if node in least:
            ahead += _take_bytes(kernels, least[node][0])
            if train and needs_gradient(node):
                kernels = backward_kernels(node, operands, results, operand_needs(node))
                back += _take_bytes([k for k in kernels if k.kind != "reduction"], least[node][1])
            continue
        if any(o.repeats > 1 for o in operands):
            spared_ahead += _subtract_least_traffic(
                forward_kernels(node, *node_operands(node, states, learned)), kernels
            )
        if node in short:
            kernels = least_in_fp8(kernels, operands, results, False, device, fused_casts, node in casting, fp8)
        (spared_ahead if is_view else ahead).extend(kernels)
        if train and needs_gradient(node):
            kernels = backward_kernels(node, operands, results, operand_needs(node))
            if any(o.repeats > 1 for o in operands):
                whole = backward_kernels(node, *node_operands(node, states, learned), operand_needs(node))
                spared_back += _subtract_least_traffic(whole, kernels)
            if node in short:
                kernels = least_in_fp8(kernels, operands, results, True, device, fused_casts, scaling=fp8)
            for kernel in kernels:
                (spared_back if is_view or kernel.kind == "reduction" else back).append(kernel)
            back += [] if fused_kernels else fan_out(node)
    inputs = {n.name: n.meta["val"] for n in block.placeholders}
    if train:
        for n in block.placeholders:
            if n.name in states and needs_gradient(n):
                back.append(add_kernel(Operand(tuple(n.meta["val"].shape), n.meta["val"].dtype, True, True)))
    return BlockWork(
        forward=_bound_kernel_seconds(ahead, spared_ahead, device),
        backward=_bound_kernel_seconds(back, spared_back, device),
        inputs=replace(_bound_kernel_seconds(_for_inputs(back), _for_inputs(spared_back), device), issued=0.0),
        kept=_least_kept(block, train, how),
        carried=float(carried_bytes(block)) if train else 0.0,
        input_bytes=tuple(inputs[name].nbytes for name in block.inputs),
        output_bytes=tuple(n.meta["val"].nbytes for n in block.outputs),
        output_grads=tuple(train and needs_gradient(n) for n in block.outputs),
    )


def _take_bytes(kernels: Sequence[Kernel], num_bytes: float) -> list[Kernel]:
    """Return a lower bound on the memory traffic of one operator that a compiler merges with others, as a list of at
    most one kernel. ``kernels``: the operator's kernels if it is not merged. ``num_bytes``: a lower bound on the bytes
    that the operator moves if it is merged.

    The returned kernel moves ``num_bytes``, or the bytes of ``kernels`` without weights if these are fewer, at the rate
    of the fastest kind of kernel. It has no launches, because merged operators share them. If no bytes are left, the
    list is empty."""
    moved = min(num_bytes, sum(k.num_bytes - k.state_bytes for k in kernels))
    return [Kernel(_MERGED, moved, launches=0, learned=all(k.learned for k in kernels))] if moved else []


def _subtract_least_traffic(kernels: Sequence[Kernel], least: Sequence[Kernel]) -> list[Kernel]:
    """Return the part of the memory traffic of ``kernels`` that is avoided if expanded tensors (which repeat the
    elements of smaller ones) are read without repetition, as one kernel without FLOPs and launches for each of
    ``kernels``. ``least``: for each of ``kernels``, the same kernel reading expanded tensors without repetition; its
    bytes are subtracted."""
    pairs = zip(kernels, least, strict=True)
    return [k._replace(num_bytes=k.num_bytes - o.num_bytes, flops=0.0, launches=0) for k, o in pairs]


def _least_kept(block: Block, train: bool, how: Remade | None) -> SavedBytes:
    """Return lower bounds on the memory that one call of ``block`` (a piece of the model, such as a layer) needs and
    keeps for the backward. They are valid with and without selective recomputation: each field has the smaller value of
    the two cases.

    ``how``: the operators that selective recomputation runs again in the backward: ``"scores"`` (attention scores),
    ``"selective"`` (also other large results that take little time) or ``"alternate"`` (also every second matrix
    product); ``None``: selective recomputation is excluded. ``train``: whether the call has a backward."""
    kept = kept_by(block, train, copies=False)
    if how is None or not train:
        return kept
    slim = kept_by(block, train, find_recomputed_nodes(block, how), copies=False)
    return SavedBytes(
        min(kept.inside, slim.inside),
        tuple(a and b for a, b in zip(kept.inputs, slim.inputs, strict=True)),
        min(kept.working, slim.working),
        min(kept.passing, slim.passing),
    )


def _copy_block_graph(block: Block) -> Block:
    graph = fx.Graph()
    graph.output(graph.graph_copy(block.graph, {}))
    return Block(block.name, graph, block.states, block.inputs)


def _for_inputs(kernels: Sequence[Kernel]) -> list[Kernel]:
    return [kernel for kernel in kernels if not kernel.learned]


def _bound_kernel_seconds(kernels: Sequence[Kernel], spared: Sequence[Kernel], device: DeviceType) -> BlockCallTime:
    """Return lower bounds on the seconds of ``kernels`` on ``device``, divided into parts: kernel launches, work that
    grows with the batch, and reading and writing of weights. ``spared``: further kernels, of copies and sums that a
    sharded graph may not need; their seconds form a part of their own."""
    batch = weights = 0.0
    best = device.memory_bandwidth * max(device.memory_efficiency.values(), default=1.0)
    for kernel in kernels:
        rate = best if kernel.kind == _MERGED else memory_rate(kernel.kind, device)
        weights += kernel.state_bytes / rate
        batch += (kernel.num_bytes - kernel.state_bytes) / rate
        batch += kernel.flops / product_rate(kernel, device) if kernel.flops else 0.0
        batch += kernel.launches * device.launch if kernel.by_size else 0.0
    launches = sum(k.launches for k in kernels if not k.by_size) * device.launch
    copies = (
        sum(k.launches for k in spared) * device.launch,
        sum(k.num_bytes / memory_rate(k.kind, device) for k in spared),
    )
    issued = sum(1 for k in kernels if k.launches) * device.dispatch
    return BlockCallTime(launches, batch, weights, sum(k.flops for k in kernels), issued, copies)


Matrix = NDArray[np.float64]
_TINY_S = 1e-15


@dataclass(frozen=True)
class DeviceKinds:
    """Computes lower bounds on the time of blocks (such as a decoder layer) on each device type of a topology, for many
    mesh candidates at once.

    ``works``: the work of each block on each device type. ``often``: block name -> number of calls in the model.
    ``samples``: the number of samples in the block graphs. ``counts``: the number of devices of each type.
    """

    works: Works
    often: Counter[str]
    samples: int
    counts: NDArray[np.int64]

    @property
    def differ(self) -> bool:
        """Return whether the topology has several device types, so that lower bounds on seconds differ by type."""
        return len(self.counts) > 1

    def seconds(self, blocks: Mapping[str, BlockWork], candidates: Sequence[MeshCandidate]) -> tuple[Matrix, Matrix]:
        """Return lower bounds on the forward and the backward seconds of one call of each block (such as a layer) with
        one microbatch: two arrays of shape ``[blocks, candidates]``. The blocks are in the order of the dict
        ``self.often``: block name -> number of its calls in the model. ``blocks``: block name -> its work on one device
        type. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        fields = ("cp", "tp", "ep", "microbatch_size")
        cp, tp, ep, size = (np.array([getattr(p, a) for p in candidates], dtype=np.float64) for a in fields)
        share, several = size / self.samples / cp, (size > 1).astype(np.float64)

        def both(work: BlockWork) -> Matrix:
            seconds = np.stack([each.at(share, tp, several, ep) for each in (work.forward, work.backward)])
            return np.where(cp > 1, both(work.over_ranks), seconds) if work.over_ranks is not None else seconds

        found = np.stack([both(blocks[name]) for name in self.often], axis=1)
        return found[0], found[1]

    def of_each(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        """Return lower bounds on the forward and the backward seconds of one call of each block (such as a layer) with
        one microbatch on every device type, shape ``[2, kinds, blocks, candidates]``. Device types are in the order of
        the topology, blocks in the order of the dict ``self.often``: block name -> number of its calls in the model.
        ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        return np.stack([self.seconds(paced, candidates) for paced in self.works.paced], axis=1)

    def longest_backward(self, candidates: Sequence[MeshCandidate]) -> Vector:
        """Return, for each of ``candidates``, the backward seconds of one microbatch through all block calls (such as
        layers) on the slowest device type, shape ``[candidates]``. A backward can hide a gradient reduction for at most
        this time. ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        calls = np.array([self.often[name] for name in self.often], dtype=np.float64)
        each = np.stack([calls @ self.seconds(paced, candidates)[1] for paced in self.works.paced])
        longest: Vector = each.max(axis=0)
        return longest

    def speeds(self, candidates: Sequence[MeshCandidate]) -> Matrix:
        """Return an upper bound on the relative speed of each device type for each of ``candidates``, shape ``[kinds,
        candidates]``; the best type has speed 1. A type may be faster in some blocks (such as layers) than in others;
        the result is its greatest speed over all blocks, forward and backward. ``candidates``: combinations of mesh
        sizes, microbatch size, schedule and ZeRO stage."""
        best = np.maximum(np.concatenate(self.seconds(self.works.best, candidates)), _TINY_S)
        own = [np.maximum(np.concatenate(self.seconds(paced, candidates)), _TINY_S) for paced in self.works.paced]
        return np.stack([(best / seconds).max(axis=0) for seconds in own])

    def fastest(self, candidates: Sequence[MeshCandidate]) -> Vector:
        """Return, for each of ``candidates``, the speed of the fastest device type of the topology, relative to the
        device for which the work was computed (speed 1), shape ``[candidates]``; 1 if there is only one device type.
        ``candidates``: combinations of mesh sizes, microbatch size, schedule and ZeRO stage."""
        return self.speeds(candidates).max(axis=0) if self.differ else np.ones(len(candidates))


def bound_busiest_rank(
    counts: Sequence[int], seconds: NDArray[np.float64], num_ranks: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return a lower bound on the seconds of the busiest pipeline rank, shape ``[candidates]``, if every call of a
    block runs as a whole on one rank. ``counts``: number of calls of each block (such as a decoder layer), shape
    ``[blocks]``. ``seconds``: seconds of one call of each block, shape ``[blocks, candidates]``. ``num_ranks``: number
    of pipeline ranks of each candidate, shape ``[candidates]``.

    The bound is at least the longest call. The bound also counts whole calls of the main block, the one with the most
    work. Let ``N`` be the number of calls of the main block, ``L`` the seconds of one of them, ``e`` the seconds of the
    longest call of another block, and ``p`` the number of ranks. If the busiest rank takes ``T`` seconds, all ranks
    have room for ``(p - 1) floor(T / L) + floor((T - e) / L)`` calls of the main block, which must be at least ``N``.
    This number changes only at ``T = k L`` and ``T = k L + e`` for whole ``k``, so the least ``T`` is one of these.
    """
    largest = seconds.max(axis=0)
    main = np.argmax(np.array(counts, dtype=np.float64)[:, None] * seconds, axis=0)
    columns = np.arange(seconds.shape[1])
    each, number = seconds[main, columns], np.array(counts, dtype=np.float64)[main]
    others = seconds.copy()
    others[main, columns] = 0.0
    beside = others.max(axis=0)
    ratio = np.divide(beside, each, out=np.zeros_like(each), where=each > 0)
    fewer, more = np.floor(ratio + _ROUNDED), np.ceil(ratio - _ROUNDED)  # main calls as long as `beside`
    multiples = np.maximum(more, np.ceil((number + more) / num_ranks)) * each
    behind = np.maximum(0.0, np.ceil((number - (num_ranks - 1) * fewer) / num_ranks)) * each + beside
    found: NDArray[np.float64] = np.maximum(largest, np.minimum(multiples, behind))
    return found
