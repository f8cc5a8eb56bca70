"""Cost of one call of a block, such as a layer, on one rank: seconds and bytes, computed from the block's local graph
with its collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import fx

from partitioner.cost.call.block_profile import BlockProfile, Exchange, KernelTable, asked_by
from partitioner.cost.call.collectives import choose_pieces, collective_time, context_exchanges, price_exchanges
from partitioner.cost.call.expert_parallel import (
    NO_SPREAD,
    Spread,
    compute_exposed_seconds,
    expected_loads,
    expert_exchanges,
    expert_region,
    in_pieces,
    sorting_seconds,
)
from partitioner.cost.call.operators import RECOMPUTED_SCORES
from partitioner.cost.call.recomputation import find_recomputed_nodes
from partitioner.cost.call.roofline import kernel_times
from partitioner.cost.call.saved_activations import SavedBytes, carried_bytes, find_gathered_activations, kept_by
from partitioner.cost.call.zero3_gathers import (
    NONE_GATHERED,
    GatheredBytes,
    HiddenCollectives,
    copy_seconds,
    gather_seconds,
    gathered_bytes,
    read_bytes,
)
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Block, Call
from partitioner.passes.ops.scaled_products import Scaling
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.piece_counts import WHOLE, PieceCounts
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType

# Kernels of Megatron-Core's fused router and of what it prepares for the exchange, forward, by how rows travel
# (Megatron-LM, deepseek-v3-gb200-optimization, sections 2.1.4 and 2.2.1; recipes of Megatron-Bridge fuse it).
_ROUTING = {"rows": 31, "parts": 31, "once": 17}
_STREAMS = 4  # streams for kernels of single experts (Transformer Engine, util/multi_stream.cpp)

Again = Callable[[Block, Collection[fx.Node]], frozenset[fx.Node]]


def find_selectively_recomputed(block: Block, sent: Collection[fx.Node] = ()) -> frozenset[fx.Node]:
    """Return the nodes of ``block`` (such as a layer) that selective recomputation runs a second time, in backward.
    ``sent``: nodes whose values come from other ranks; these are never recomputed.
    """
    return find_recomputed_nodes(block, "selective", sent)


@dataclass(frozen=True)
class CallCost:
    """Cost of one microbatch through one call of a block (such as a layer) on one rank.

    - ``forward_s``, ``backward_s``: seconds without collectives. ``forward_comm_s``, ``backward_comm_s``: seconds of
      collectives. ``weights_s``: the part of ``backward_s`` that computes gradients of weights, which can run after the
      gradients of inputs are sent to the previous stage. ``flops``, ``backward_flops``: FLOPs of matrix products,
      forward and backward, without the scores that the backward of a fused attention computes a second time.
    - ``saved_bytes``: bytes kept from forward to backward, without inputs. ``saved_inputs``: for each input, whether it
      is also kept. ``carried_bytes``: bytes held between the backward for gradients of inputs and the backward for
      gradients of weights. ``working_bytes``: temporary bytes while the call runs. ``host_bytes``: bytes kept in host
      memory.
    - ``input_bytes``, ``output_bytes``: bytes of each input and output. ``output_grads``: for each output, whether it
      receives a gradient. ``state_bytes``: bytes of all parameters and buffers that the call reads. ``gathered_bytes``:
      bytes of parameters that ZeRO-3 gathers for it, and of their gradients.
    - ``selective_bytes``: the part of ``saved_bytes`` that selective recomputation does not keep. ``selective_inputs``:
      for each input, whether it is kept under selective recomputation. ``selective_s``: seconds that this recomputation
      takes in backward. ``slim``: the whole cost with selective recomputation, if it cannot be derived from these
      fields; otherwise ``None``.
    - ``pieces``: the numbers of pieces into which collectives are cut to overlap with matrix products. ``fp8``: whether
      products with weights are in fp8 because this is faster.
    - ``forward_only_s``: the part of the forward that full recomputation does not add to backward, because backward
      already contains it (selective recomputation, waits for gathered weights).
    - ``hidden``: the call's ZeRO-3 collectives, which run while neighbouring calls compute, and the seconds of this
      cost in which the call waits for collectives; ``None`` if it has none.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weights_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: float = 0.0
    saved_inputs: tuple[bool, ...] = ()
    carried_bytes: float = 0.0
    working_bytes: float = 0.0
    input_bytes: tuple[float, ...] = ()
    output_bytes: tuple[float, ...] = ()
    output_grads: tuple[bool, ...] = ()
    state_bytes: float = 0.0
    gathered_bytes: GatheredBytes = NONE_GATHERED
    selective_bytes: float = 0.0
    selective_inputs: tuple[bool, ...] = ()
    selective_s: float = 0.0
    forward_only_s: float = 0.0
    host_bytes: float = 0.0
    slim: CallCost | None = None
    pieces: PieceCounts = WHOLE
    fp8: bool = False
    hidden: HiddenCollectives | None = None

    def paced(self, factor: float) -> CallCost:
        """Return this cost of a block call (such as a layer) with all seconds multiplied by ``factor``; bytes and FLOPs
        stay.
        """
        if factor == 1:
            return self
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            weights_s=self.weights_s * factor,
            forward_comm_s=self.forward_comm_s * factor,
            backward_comm_s=self.backward_comm_s * factor,
            selective_s=self.selective_s * factor,
            forward_only_s=self.forward_only_s * factor,
            hidden=self.hidden and self.hidden.paced(factor),
            slim=self.slim and self.slim.paced(factor),
        )

    def at_least(self, forward_s: float, backward_s: float) -> CallCost:
        """Return this cost of a block call (such as a layer) with its seconds raised to known lower bounds:
        ``forward_s`` and ``backward_s`` are at least the arguments of these names. The part of the backward that
        computes gradients of inputs is at least half of the argument ``backward_s``."""
        back, inputs = max(self.backward_s, backward_s), max(self.backward_s - self.later_s, backward_s / 2)
        return replace(self, forward_s=max(self.forward_s, forward_s), backward_s=back, weights_s=back - inputs)

    def hide(self, ahead_s: float, back_s: float) -> CallCost:
        """Return this cost of a block call (such as a layer) with new waits for ZeRO-3 collectives. The waits are
        computed for collectives that take ``ahead_s`` seconds and run during the call's forward, and for collectives
        that take ``back_s`` seconds and run during its backward."""
        old = self.hidden
        if old is None:
            return self
        new = old.wait((self.forward_total_s - old.forward_s, self.backward_total_s - old.backward_s), ahead_s, back_s)
        ahead_comm_s = self.forward_comm_s + new.forward_s - old.forward_s
        back_comm_s = self.backward_comm_s + new.backward_s - old.backward_s
        return replace(
            self,
            forward_s=self.forward_s + min(0.0, ahead_comm_s),  # in a bound, these seconds contain the waits
            backward_s=self.backward_s + min(0.0, back_comm_s),
            forward_comm_s=max(0.0, ahead_comm_s),
            backward_comm_s=max(0.0, back_comm_s),
            forward_only_s=self.forward_only_s + new.once_s - old.once_s,
            hidden=new,
            slim=self.slim and self.slim.hide(ahead_s, back_s),
        )

    def selective(self) -> CallCost:
        """Return this cost of a block call (such as a layer) as it is under selective recomputation, in which backward
        recomputes the activations that are quick to compute.
        """
        return self.slim if self.slim is not None else self._selective_cost

    @cached_property
    def _selective_cost(self) -> CallCost:
        """Return this cost of a block call (such as a layer) with the saved bytes, working bytes and seconds that it
        has under selective recomputation.
        """
        return replace(
            self,
            saved_bytes=self.saved_bytes - self.selective_bytes,
            saved_inputs=self.selective_inputs or self.saved_inputs,
            selective_bytes=0.0,
            working_bytes=self.working_bytes + self.selective_bytes,
            backward_s=self.backward_s + self.selective_s,
            forward_only_s=self.forward_only_s + self.selective_s,
        )

    @cached_property
    def later_s(self) -> float:
        """Return the seconds of the backward that may run after the gradients of inputs are sent to the previous
        pipeline stage: the seconds of gradients of weights, but at most half of the whole backward.
        """
        return min(self.weights_s, self.backward_s / 2)

    @cached_property
    def forward_total_s(self) -> float:
        return self.forward_s + self.forward_comm_s

    @cached_property
    def recompute_s(self) -> float:
        """Return the seconds that full recomputation of the block (such as a layer) adds to the backward of one
        microbatch: the seconds of its forward, without work that backward does anyway. A call that has no backward,
        such as a frozen layer in front of all trained ones, does not run again.
        """
        return self.forward_total_s - self.forward_only_s if self.backward_total_s else 0.0

    @cached_property
    def backward_total_s(self) -> float:
        return self.backward_s + self.backward_comm_s


def call_costs(
    block: Block,
    device: DeviceType,
    groups: Mapping[str, Group],
    *,
    train: bool = True,
    spread: Spread = NO_SPREAD,
) -> CallCost:
    """Return the cost of one call of ``block`` (such as a layer), a local graph (one rank's shapes, with its
    collectives), on ``device``. ``groups``: mesh axis -> the group of ranks over which collectives of that axis run;
    collectives over other axes cost nothing. ``train``: whether the call has a backward and saves activations for it.
    ``spread``: how expert parallelism and ZeRO-3 distribute the call over ranks.
    """
    return CallWork(block, train).cost(device, groups, spread)


def hide_neighbours(costs: Sequence[CallCost], states: Sequence[Sequence[str]], *, repeated: bool) -> list[CallCost]:
    """Return ``costs``, the costs of consecutive block calls (such as layers), with the waits for ZeRO-3 collectives
    that the calls have in this order. In forward, the weights of a call are gathered while the previous call computes.
    In backward, they are gathered while the next call computes. The gradients of a call are reduce-scattered while the
    previous call runs its backward.

    ``states``: for each call, the names of the parameters and buffers that it reads. If consecutive calls read the same
    states, the weights are gathered once, and the gradients are scattered after the backward of the first of these
    calls. ``repeated``: whether further microbatches follow. If so, the gradients of the first call that has a backward
    are scattered during the forward of the next microbatch. If that call is not the first of ``costs``, the weights of
    the first call are gathered anew for this forward.
    """
    if all(cost.hidden is None for cost in costs):
        return [*costs]
    kept = [tuple(own) == tuple(before) for before, own in pairwise(states)]  # [k]: call k + 1 reads what k reads
    gathers = [cost.hidden.gather_s if cost.hidden else 0.0 for cost in costs]
    scatters = [cost.hidden.scatter_s if cost.hidden else 0.0 for cost in costs]
    scatters = [0.0 if again else each for again, each in zip([False, *kept], scatters, strict=True)]
    first = next((place for place, cost in enumerate(costs) if cost.backward_total_s), None)
    ahead = [*(0.0 if keeps else each for keeps, each in zip(kept, gathers[1:], strict=True)), 0.0]
    again = [each if cost.backward_total_s else 0.0 for each, cost in zip(gathers, costs, strict=True)]
    behind = [0.0, *(0.0 if keeps else each for keeps, each in zip(kept, again, strict=False))]
    back = [before + scatter for before, scatter in zip(behind, [*scatters[1:], 0.0], strict=True)]
    if repeated and first is None:
        ahead[-1] += gathers[0]
    elif repeated and first is not None:
        ahead[0] += scatters[first]
        back[first] += gathers[0] if first else 0.0
    made: dict[tuple[SameObject[CallCost], float, float], CallCost] = {}
    keys = [(SameObject(cost), *pair) for cost, pair in zip(costs, zip(ahead, back, strict=True), strict=True)]
    for key in keys:
        if key not in made:
            made[key] = key[0].value.hide(key[1], key[2])
    return [made[key] for key in keys]


def mean_waits(costs: Mapping[str, CallCost], calls: Sequence[Call]) -> dict[str, CallCost]:
    """Return ``costs``, block name -> cost of a call of the block (such as a layer), with the mean waits for ZeRO-3
    collectives over all calls of the block. ``calls``: all calls of the model; calls without a cost, and calls that
    every pipeline stage runs, are left out. ``hidden`` of the returned costs is ``None``."""
    changed = dict(costs)
    waits: dict[str, list[CallCost]] = {}
    if any(cost.hidden is not None for cost in costs.values()):
        placed = [call for call in calls if not call.shared and not call.prologue and call.block in costs]
        own = [costs[call.block] for call in placed]
        for call, cost in zip(
            placed, hide_neighbours(own, [call.states for call in placed], repeated=False), strict=True
        ):
            waits.setdefault(call.block, []).append(cost)
    for name, each in waits.items():
        seconds = ("forward_s", "forward_comm_s", "backward_s", "backward_comm_s", "forward_only_s")
        means = {field: sum(getattr(cost, field) for cost in each) / len(each) for field in seconds}
        changed[name] = replace(each[0], hidden=None, **means)
    return changed


@dataclass(frozen=True)
class _Computed:
    """Seconds and FLOPs of the kernels of one block call (such as a layer) on one device type. Pairs are (forward,
    backward).

    ``seconds``: seconds of all kernels. ``weights``: seconds of backward kernels that compute gradients of weights.
    ``products``: seconds of matrix products. ``rings``: seconds of each attention over a sharded sequence. ``again``:
    seconds of the kernels that selective recomputation runs a second time. ``flops``: FLOPs of matrix products.
    ``experts_s``: seconds of the experts' matrix products in forward.
    """

    seconds: tuple[float, float]
    weights: float
    products: tuple[float, float]
    rings: tuple[tuple[float, float], ...]
    again: float
    flops: tuple[float, float]
    experts_s: float = 0.0


class CallWork:
    """The work of one call of ``block`` (such as a layer), from which :meth:`cost` computes seconds and bytes for any
    device type and groups of ranks. Kernel times are cached by device and by how experts are distributed over ranks.

    ``train``: whether the call has a backward. ``again``: function that chooses the nodes that selective recomputation
    runs a second time, in backward. Its arguments are the block and the nodes whose values come from other ranks.
    ``pieces``: the numbers of pieces into which collectives are cut to overlap with matrix products; ``None``: the
    numbers that the training framework uses according to its execution profile.
    """

    def __init__(
        self,
        block: Block,
        train: bool = True,
        again: Again = find_selectively_recomputed,
        pieces: PieceCounts | None = None,
    ) -> None:
        self.block, self.train, self._again, self.pieces = block, train, again, pieces
        self._asked: dict[tuple[object, ...], BlockProfile] = {}
        self._kept: dict[tuple[bool, bool, bool], SavedBytes] = {}
        self._computed: dict[tuple[object, ...], _Computed] = {}

    def asked(self, fp8: Scaling | None, profile: ExecutionProfile = OURS) -> BlockProfile:
        """Return the kernels and collectives of the block (such as a layer); the result is cached. ``fp8``: the scaling
        granularity of products with weights in fp8 (``"tensor"``, ``"row"`` or ``"block"``); ``"nvfp4"``: they run in
        NVFP4; ``None``: they run in neither format. ``profile``: how the training framework runs casts and experts."""
        how = profile.fused_casts, profile.expert_kernels, profile.current_scaling, profile.fused_kernels
        if (fp8, *how) not in self._asked:
            self._asked[fp8, *how] = asked_by(self.block, self.train, fp8, self.again, *how)
        return self._asked[fp8, *how]

    @cached_property
    def again(self) -> frozenset[fx.Node]:
        """Return the graph nodes of the block (such as a layer) that selective recomputation runs a second time, in
        backward, if every rank holds all experts. The set is empty without training."""
        return self._again(self.block, ()) if self.train else frozenset()

    @cached_property
    def _again_apart(self) -> frozenset[fx.Node]:
        """Return the graph nodes of the block (such as a layer) that selective recomputation runs a second time, in
        backward, if experts are distributed over several ranks. Nodes whose values come from other ranks are left out.
        The set is empty without training."""
        entries = self.asked(None).region.entries
        return self._again(self.block, entries) if entries and self.train else self.again

    @cached_property
    def _carried_bytes(self) -> float:
        return float(carried_bytes(self.block)) if self.train else 0.0

    @cached_property
    def has_experts(self) -> bool:
        """Return whether the block (such as a layer) contains experts, so that its cost depends on their distribution
        over ranks.
        """
        found = expert_region(self.block)  # the full `asked` may never be needed, and takes long to compute
        return bool(found.entries or found.exits or found.products or found.states & set(self.block.states))

    def cost(self, device: DeviceType, groups: Mapping[str, Group], spread: Spread = NO_SPREAD) -> CallCost:
        """Return the cost of one call of the block (such as a layer) on a rank with device type ``device``. ``groups``:
        mesh axis -> the group of ranks over which collectives of that axis run. ``spread``: how expert parallelism and
        ZeRO-3 distribute the call over ranks, and how the training framework runs the plan (execution profile).

        If the framework uses fp8 only in blocks that become faster by it, the block is priced with products in fp8 and
        in 16 bits, and the lower of the two costs is returned.
        """
        cost = self._price_call(device, groups, spread)
        if not spread.fp8 or spread.profile.fp8_products == "all":
            return cost
        other = self._price_call(device, groups, replace(spread, fp8=None))
        faster = cost.forward_total_s + cost.backward_total_s < other.forward_total_s + other.backward_total_s
        return replace(cost, fp8=True) if faster else other

    def _price_call(self, device: DeviceType, groups: Mapping[str, Group], spread: Spread) -> CallCost:
        """Return the cost of one call of the block (such as a layer) on a rank with device type ``device``. ``groups``:
        mesh axis -> the group of ranks over which collectives of that axis run. ``spread``: how expert parallelism and
        ZeRO-3 distribute the call over ranks, and whether products with weights are in fp8.
        """
        profile, train = spread.profile, self.train
        asked = self.asked(spread.fp8, profile)
        slowdown = device.overlap_slowdown
        computed = self._get_kernel_prices(device, asked, spread)
        seconds, comm, pieces = list(computed.seconds), [0.0, 0.0], [0.0, 0.0]
        for (node, back), of_ring in zip(asked.rings, computed.rings, strict=True):
            sent, beside = context_exchanges(node, groups)
            for way in range(1 + back):
                comm[way] += compute_exposed_seconds(of_ring[way], sent[way], slowdown, beside)
        counts, exchanges_s, more_issued = self._price_exchanges(asked, computed, groups, device, spread)
        for exchange, took in zip(asked.exchanges, exchanges_s, strict=True):
            apart = profile.overlap_tensor and exchange.in_pieces
            (pieces if apart else comm)[exchange.way] += took
            if exchange.anew and profile.regather:  # overlaps with the products of the backward
                pieces[1] += took
        exchanged = expert_exchanges(asked.region, spread)
        put_in_order = sorting_seconds(asked.region, asked.held, spread, device)
        for way in range(1 + train):
            seconds[way] += put_in_order
            comm[way] += in_pieces(computed.products[way], pieces[way], spread.tp, slowdown)
            behind = profile.overlap_experts  # overlaps with another microbatch, which computes as long
            comm[way] += compute_exposed_seconds(seconds[way], exchanged, slowdown, behind)
        halves = [seconds[0], seconds[1] - computed.weights, computed.weights]
        sent_s = 0.0 if profile.overlap_experts else exchanged / 2  # to the experts, without the way back
        late_s = _issued_late(asked, computed.experts_s + sent_s, spread, device)
        for half, others in enumerate((comm[0], comm[1], 0.0)):  # in each part, host or device may be the slower one
            issued_s = (_count_issued_operators(asked, half, spread) + (*more_issued, 0)[half]) * device.dispatch
            waited_s = late_s if half == 0 else 0.0
            halves[half] = max(halves[half] + waited_s, issued_s - others)
        runs_back = halves[1] + halves[2] > 0  # nothing in front of all trained parameters has a backward
        for half, took in enumerate(copy_seconds(asked.states, spread, device)):
            halves[half] += took if half == 0 or runs_back else 0.0
        seconds = [halves[0], halves[1] + halves[2]]
        cost = replace(self._build_call_cost(asked, spread, computed, halves, comm), pieces=counts)
        if spread.shards.size == 1:
            return cost
        ahead_s, back_s = gather_seconds(asked.states, spread)
        # while weights are gathered parameter by parameter, recomputation gathers them, and backward gathers them again
        how = slowdown, profile.overlap, profile.gather != "parameter"
        hidden = HiddenCollectives(ahead_s, (back_s - ahead_s) * train, 0.0, 0.0, 0.0, *how)
        return replace(cost, hidden=hidden).hide(ahead_s, back_s)

    def _price_exchanges(
        self,
        asked: BlockProfile,
        computed: _Computed,
        groups: Mapping[str, Group],
        device: DeviceType,
        spread: Spread,
    ) -> tuple[PieceCounts, list[float], list[float]]:
        """Return three values for the collectives of a call of the block (such as a layer): the numbers of pieces into
        which they are cut to overlap with matrix products; the seconds that each collective adds to the computation;
        and the numbers of operators that the host launches in addition, in forward and in backward.

        ``asked``: the kernels and collectives of the block. ``computed``: seconds of the kernels. ``groups``: mesh axis
        -> group of ranks. ``device``: the device type of the rank. ``spread``: how experts are distributed over ranks,
        and how the training framework runs the plan (execution profile).
        """
        whole_s = [compute_exchange_seconds(exchange, groups, device) for exchange in asked.exchanges]
        mode = spread.profile.tensor_pieces
        if not asked.beside or (self.pieces is None and mode == "none") or self.pieces == WHOLE:
            return WHOLE, whole_s, [0, 0]
        if self.pieces is not None:
            return self.pieces, *self._price_pieces(asked, whole_s, self.pieces, groups, device, spread)
        counts = choose_pieces(asked, dict(enumerate(whole_s)), groups, device, mode == "all")
        if mode == "faster":
            counts = self._leave_host_bound(asked, computed, whole_s, counts, groups, device, spread)
        return counts, *self._price_pieces(asked, whole_s, counts, groups, device, spread)

    @staticmethod
    def _price_pieces(
        asked: BlockProfile,
        whole_s: list[float],
        counts: PieceCounts,
        groups: Mapping[str, Group],
        device: DeviceType,
        spread: Spread,
    ) -> tuple[list[float], list[float]]:
        """Return two lists for collectives of the block (such as a layer) that are cut into ``counts`` pieces to
        overlap with matrix products: the seconds that each collective adds to the computation, and the numbers of
        operators that the host launches in addition in forward and in backward (0 if operators are recorded in CUDA
        graphs).

        ``asked``: the kernels and collectives of the block. ``whole_s``: seconds of each collective in one piece.
        ``groups``: mesh axis -> group of ranks. ``device``: the device type of the rank. ``spread``: how experts are
        distributed over ranks, and how the training framework runs the plan (execution profile).
        """
        seconds, issued = price_exchanges(asked, whole_s, counts, groups, device)
        return seconds, [n if spread.profile.graphs == "none" else 0 for n in issued]

    def _leave_host_bound(
        self,
        asked: BlockProfile,
        computed: _Computed,
        whole_s: list[float],
        counts: PieceCounts,
        groups: Mapping[str, Group],
        device: DeviceType,
        spread: Spread,
    ) -> PieceCounts:
        """Decide, for forward and for backward separately, whether splitting collectives into ``counts`` pieces saves
        time although the host has to launch more operators. Return ``counts`` with 0 (not split) as the numbers for
        forward, or for backward, if splitting saves no time there.

        ``asked``: the kernels and collectives of the block (such as a layer). ``computed``: seconds of the kernels.
        ``whole_s``: seconds of each collective in one piece. ``groups``: mesh axis -> group of ranks. ``device``: the
        device type of the rank, with the time in which the host launches an operator. ``spread``: how experts are
        distributed over ranks, and how the training framework runs the plan (execution profile).
        """
        kept: list[int] = []
        for way in (0, 1):
            own = PieceCounts(*(n if place // 2 == way else 0 for place, n in enumerate(counts)))
            ends = []
            for tried in (WHOLE, own):
                seconds, issued = self._price_pieces(asked, whole_s, tried, groups, device, spread)
                sent_s = sum(s for s, e in zip(seconds, asked.exchanges, strict=True) if e.way == way)
                operators = _count_issued_operators(asked, way, spread) + issued[way]
                device_s = computed.seconds[way] - (computed.weights if way else 0.0)
                ends.append(max(device_s + sent_s, operators * device.dispatch))
            kept += own[2 * way : 2 * way + 2] if ends[1] < ends[0] else [0, 0]
        return PieceCounts(*kept)

    def _get_kernel_prices(self, device: DeviceType, asked: BlockProfile, spread: Spread) -> _Computed:
        """Return the seconds and FLOPs of the kernels of the block (such as a layer) on ``device``, from the cache if
        they are there. ``asked``: the block's kernels and collectives. ``spread``: how experts are distributed over
        ranks.
        """
        even = spread.profile.even_experts
        experts = spread.ep, spread.of_experts, spread.num_experts, spread.divided, even
        key = SameObject(device), SameObject(asked), *experts
        if key not in self._computed:
            self._computed[key] = _price_kernels(asked, device, spread)
        return self._computed[key]

    def _build_call_cost(
        self,
        asked: BlockProfile,
        spread: Spread,
        computed: _Computed,
        halves: list[float],
        comm: list[float],
    ) -> CallCost:
        """Return the cost of a call of the block (such as a layer) without its ZeRO-3 collectives.

        ``asked``: its kernels and collectives. ``spread``: how expert parallelism and ZeRO-3 distribute the call over
        ranks. ``computed``: seconds and FLOPs of the kernels. ``halves``: seconds without collectives of three parts:
        forward, backward for gradients of inputs, backward for gradients of weights. ``comm``: seconds of collectives,
        forward and backward.
        """
        regather = self.train and spread.profile.regather
        apart = spread.ep > 1
        kept, slim = self._find_saved_bytes(regather, False, apart), self._find_saved_bytes(regather, True, apart)
        sizes = [read_bytes(s, spread) for s in asked.states]
        shared = [size for size, state in zip(sizes, asked.states, strict=True) if not state.small]
        return CallCost(
            forward_s=halves[0],
            backward_s=halves[1] + halves[2],
            weights_s=halves[2],
            forward_comm_s=comm[0],
            backward_comm_s=comm[1],
            flops=computed.flops[0],
            backward_flops=computed.flops[1],
            saved_bytes=kept.inside,
            saved_inputs=kept.inputs,
            carried_bytes=self._carried_bytes,
            working_bytes=kept.working,
            input_bytes=self._input_output_bytes[0],
            output_bytes=self._input_output_bytes[1],
            output_grads=self._output_grads,
            state_bytes=sum(size for size, _ in sizes),
            gathered_bytes=gathered_bytes(shared, spread, kept.inside),
            selective_bytes=kept.inside - slim.inside,
            selective_inputs=slim.inputs,
            selective_s=computed.again,
        )

    @cached_property
    def _input_output_bytes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return two tuples: the bytes of each input of the block (such as a layer), and the bytes of each output."""
        placeholders = {n.name: n for n in self.block.placeholders}
        ahead = [placeholders[name] for name in self.block.inputs]
        of_inputs, of_outputs = ([float(n.meta["val"].nbytes) for n in nodes] for nodes in (ahead, self.block.outputs))
        return tuple(of_inputs), tuple(of_outputs)

    @cached_property
    def _output_grads(self) -> tuple[bool, ...]:
        return tuple(self.train and needs_gradient(n) for n in self.block.outputs)

    def _find_saved_bytes(self, regather: bool, selective: bool, apart: bool) -> SavedBytes:
        """Return the bytes and inputs that one call of the block (such as a layer) keeps from forward to backward.

        ``regather``: whether activations that were all-gathered over ``tp`` are gathered a second time in backward
        instead of kept. ``selective``: whether results that selective recomputation computes in backward are left out.
        ``apart``: whether experts are distributed over several ranks.
        """
        again = (self._again_apart if apart else self.again) if selective else frozenset()
        if not again:
            selective = apart = False
        if (regather, selective, apart) not in self._kept:
            gathers = find_gathered_activations(self.block) if regather else frozenset()
            self._kept[regather, selective, apart] = kept_by(self.block, self.train, again | gathers)
        return self._kept[regather, selective, apart]


def _count_issued_operators(asked: BlockProfile, half: int, spread: Spread) -> float:
    """Return the number of operators that the host launches in one part of a block call, such as of a layer. The number
    is a fraction if a rank holds a fraction of an expert. Operators in recorded CUDA graphs do not count.

    ``half``: the part: 0 forward, 1 backward for gradients of inputs, 2 backward for gradients of weights. ``asked``:
    kernels and operators of the block. ``spread``: how experts are distributed over ranks, and how the training
    framework runs the plan.
    """
    of_experts, others = _issued_each(asked, half, spread), float(asked.issued[half])
    if half == 0 and spread.profile.expert_kernels == "each" and asked.held:
        others += max(0, _ROUTING[spread.profile.dispatch] - asked.routing)
    return {"none": others + of_experts, "part": of_experts, "all": 0.0}[spread.profile.graphs]


def _issued_each(asked: BlockProfile, half: int, spread: Spread) -> float:
    """Return the number of operators that the host launches once per expert in one part of a block call (such as a
    layer), summed over the experts of a rank.

    ``half``: the part: 0 forward, 1 backward for gradients of inputs, 2 backward for gradients of weights. ``asked``:
    kernels and operators of the block. ``spread``: how experts are distributed over ranks.
    """
    return asked.issued_each[half] * max(1.0, asked.held * spread.of_experts)


def _issued_late(asked: BlockProfile, device_s: float, spread: Spread, device: DeviceType) -> float:
    """Return by how many seconds the host delays the experts' kernels in a forward: the time to launch them minus
    ``device_s``, at least 0. The host cannot launch them ahead, because it needs the number of rows of each expert,
    which the device computes (Megatron-LM, deepseek-v3-gb200-optimization, section 3.1). The delay is 0 if one kernel
    serves all experts, if CUDA graphs contain the kernels, or if each expert's rows are padded to a fixed number.

    ``asked``: kernels and operators of the block (such as a layer). ``device_s``: seconds that the device takes for the
    experts' kernels. ``spread``: how experts are distributed over ranks. ``device``: the device type, which states how
    long the host takes to launch an operator.
    """
    profile = spread.profile
    if profile.expert_kernels != "each" or profile.graphs == "all" or profile.even_experts == "padded":
        return 0.0
    return max(0.0, _issued_each(asked, 0, spread) * device.dispatch - device_s)


def _price_kernels(asked: BlockProfile, device: DeviceType, spread: Spread) -> _Computed:
    """Return the seconds and FLOPs of the kernels in ``asked``, the profile of a block (such as a layer), on
    ``device``, as one rank runs them. ``spread``: how experts are distributed over ranks.
    """
    columns = _spread_columns(asked.kernels, spread)
    seconds = kernel_times(columns, device)
    ahead = columns.way == 0
    ways = ahead, ~ahead

    def total(
        values: np.ndarray[tuple[int], np.dtype[np.float64]], *masks: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> float:
        return float(values[np.logical_and.reduce(masks)].sum())

    return _Computed(
        (total(seconds, ways[0]), total(seconds, ways[1])),
        total(seconds, ways[1], columns.learned),
        (total(seconds, ways[0], columns.product), total(seconds, ways[1], columns.product)),
        tuple(
            (total(seconds, ways[0], columns.ring == r), total(seconds, ways[1], columns.ring == r))
            for r in range(len(asked.rings))
        ),
        total(seconds, columns.again),
        (total(columns.flops, ways[0]), total(_leave_out_recomputed_scores(columns), ways[1])),
        total(seconds, ways[0], columns.expert),
    )


def _leave_out_recomputed_scores(columns: KernelTable) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the model FLOPs of each kernel in the table ``columns``, shape ``[kernels]``. The FLOPs by which the
    backward of a fused attention computes scores a second time are subtracted, as in the usual definition of model
    FLOPs utilisation."""
    again = np.array([kind == "attention" for kind in columns.kinds], dtype=np.bool_)[columns.kind]
    return np.where(again & (columns.way > 0), columns.flops * (1 - RECOMPUTED_SCORES), columns.flops)


def _spread_columns(columns: KernelTable, spread: Spread) -> KernelTable:
    """Return ``columns``, the table of the kernels of a block (such as a layer), with the work of one rank under expert
    parallelism. A rank of ``ep`` holds some of the experts, and these receive rows (tokens) from all ranks of ``ep``.
    The expected imbalance of load between experts is included.

    ``spread``: how the experts are distributed. If ``spread.divided``, the graph of the block already contains only one
    rank's experts, and weights and rows are not divided again.
    """
    ep, experts = spread.ep, columns.expert
    if ep == spread.of_experts == 1 and not experts.any():
        return columns
    num_experts = spread.num_experts / (ep if spread.divided else 1)
    held = (columns.held > 0) & (columns.held < num_experts)  # tp may have divided the experts
    uneven = expected_loads(columns.rows * ep, ep if spread.profile.even_experts == "none" else 1)
    load = uneven * np.where(held, columns.held / max(1, num_experts), 1.0)
    load = np.where(experts, load, 1.0)
    batch = (columns.num_bytes - columns.state_bytes) * load
    weights = columns.state_bytes * np.where(experts, spread.of_experts, 1.0)
    rows = load if spread.divided else load * ep
    smallest = np.where(experts, np.minimum(columns.smallest * rows, columns.widest), columns.smallest)
    at_a_time = np.ceil(np.maximum(1.0, columns.held * spread.of_experts) / _STREAMS)
    return replace(
        columns,
        num_bytes=batch + weights,
        state_bytes=weights,
        flops=columns.flops * load,
        smallest=smallest,
        launches=columns.launches * np.where(columns.each, at_a_time, 1.0),
    )


def exchange_time(op: str, whole_bytes: float, group: Group, device: DeviceType, strided: bool) -> float:
    """Return the seconds of the collective ``op`` (a name such as ``"all_gather"``) over ``group``. ``whole_bytes``:
    the bytes of the whole tensor. ``strided``: whether the collective joins or splits a dim that is not outermost in
    memory; if so, the seconds include the copy on ``device`` that this needs."""
    seconds = collective_time(op, whole_bytes, group)
    if strided and op not in ("all_reduce", "all_reduce_max"):
        seconds += device.launch + 2 * whole_bytes / device.memory_bandwidth
    return seconds


def compute_exchange_seconds(exchange: Exchange, groups: Mapping[str, Group], device: DeviceType) -> float:
    """Return the seconds of ``exchange``, one collective of a block (such as a layer), on ``device``; 0 if its mesh
    axis is not in ``groups`` or has one rank. ``groups``: mesh axis -> group of ranks.
    """
    group = groups.get(exchange.axis)
    if group is None or group.size == 1:
        return 0.0
    whole = exchange.nbytes * (group.size if exchange.from_part else 1)
    return exchange_time(exchange.op, whole, group, device, exchange.strided)
