"""Seconds of collectives and messages: latency plus size over bandwidth (alpha-beta model), by the network levels of a
group.

``num_bytes`` is always the size of the whole tensor: the result of an all-gather, the operand of a reduce-scatter, or
the tensors of all ranks of an all-to-all together. A ring all-reduce moves ``2 (n - 1) / n`` of the tensor through each
rank. An all-gather or a reduce-scatter moves half as much (Thakur et al. 2005; nccl-tests, PERFORMANCE.md).

All-gathers before matrix products, and reduce-scatters after them, may run in ``N`` pieces. One piece is communicated
while another is multiplied. For seconds ``t`` of communication and ``p`` of products per piece, ``n`` ranks, and ``own
= N / n`` pieces that a rank has already (0 if a piece has shards of several ranks):

- An all-gather takes ``max(N t + p, N p + max(0, t - own p))``: a rank begins with its own pieces, and the last piece
  is multiplied after all are communicated.
- A reduce-scatter takes ``max(N p + t, p + N t)``.

Computation and communication slow each other down while both run. The products of a piece have fewer rows, so they are
less efficient and read the whole weight for every piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import fx

from partitioner.cost.call.operators import Operand
from partitioner.cost.call.roofline import copied_s, kernel_times
from partitioner.passes.ir.collectives import CONTEXT, collective_name
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ops.attention import Band, list_ring_steps
from partitioner.passes.rules.attention import find_exchanged_band
from partitioner.passes.rules.factors import get_node_argument
from partitioner.passes.shard.overlap_products import fit_pieces
from partitioner.passes.shard.piece_counts import WHOLE, PieceCounts
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType, Link

if TYPE_CHECKING:
    from partitioner.cost.call.block_profile import BlockProfile, Exchange, ProductExchange

# How often (n - 1) / n of the whole tensor passes through each rank's links.
_ROUNDS = {"all_reduce": 2, "all_reduce_max": 2, "all_gather": 1, "reduce_scatter": 1}

_MOST_PARTS = 4  # into which a rank's shard is cut


def collective_time(op: str, num_bytes: float, group: Group) -> float:
    """Return the seconds of the collective ``op`` over ``group``; 0 for a group of one rank. ``op``: its name, such as
    ``"all_gather"``. ``num_bytes``: bytes of the whole tensor, not of one rank's part. Raises ``KeyError`` for an
    unknown collective."""
    if group.size == 1:
        return 0.0
    if group.others:
        return max(collective_time(op, num_bytes, each) for each in group.every)
    measured = None if op in ("all_reduce", "all_reduce_max") else group.measured(op)
    if measured is not None:
        return measured[0] + moved_share(op, group.size) * num_bytes / measured[1]
    if op == "all_to_all":
        return group.exchange_start + num_bytes * group.exchange_slope
    share = moved_share(op, group.size)
    if _ROUNDS[op] == 2:
        return group.all_reduce_start + share * num_bytes / group.all_reduce_bandwidth
    return group.one_way_start + share * num_bytes / group.bus_bandwidth


def moved_share(op: str, size: int) -> float:
    """Return the fraction of the whole tensor that passes through each rank's links, such as ``2 (n - 1) / n`` for an
    all-reduce over ``n`` ranks. Bus bandwidth is measured by this convention. ``op``: name of a collective, such as
    ``"all_gather"``. ``size``: number of ranks."""
    return _ROUNDS.get(op, 1 / size) * (size - 1) / size


def dispatch_time(num_bytes: float, group: Group, copies: float) -> float:
    """Return the seconds of an all-to-all over ``group`` that sends each row (token) to ``copies`` ranks, as in DeepEP:
    a row is sent once to each node that needs it, and is copied to further ranks inside the node. With one copy it
    takes as long as a plain all-to-all. ``num_bytes``: bytes of all copies on all ranks together.
    """
    if group.size == 1:
        return 0.0
    if copies <= 1:
        return collective_time("all_to_all", num_bytes, group)
    if group.others:
        return max(dispatch_time(num_bytes, each, copies) for each in group.every)
    own = num_bytes / group.size / copies
    seconds, reached = 0.0, 1
    for tier in group.tiers:
        parts = group.size / reached
        hit = parts * (1 - (1 - 1 / parts) ** copies)  # expected number of parts of this level that a row reaches
        rate = min(group.cap, tier.level.bandwidth * tier.level.efficiency)
        seconds = max(seconds, own * hit * (1 - 1 / tier.ways) / rate)
        reached *= tier.ways
    return group.exchange_start + seconds


def message_time(num_bytes: float, link: Link) -> float:
    """Return the seconds of one message of ``num_bytes`` bytes between pipeline stages over ``link``; 0 if there are no
    bytes to send.
    """
    return link.time(num_bytes) if num_bytes else 0.0


def link_of_parts(link: Link, size: int, gathering: Group | None) -> Link:
    """Return an imaginary link whose message time is the time of sending a tensor between two pipeline stages in parts.
    Each of ``size`` ranks sends its part over ``link`` to its peer in the next stage, and the peers then all-gather the
    parts (Narayanan et al. 2021, section 4.1). ``gathering``: the group of the peers; ``None``: the all-gather takes no
    time."""
    latency, per_byte = link.latency, 1 / (size * link.bandwidth)
    if gathering is not None:
        latency += max(group.one_way_start for group in gathering.every)
        per_byte += moved_share("all_gather", size) / gathering.bus_bandwidth
    return link.model_copy(update={"bandwidth": 1 / per_byte, "latency": latency})


Seconds = tuple[float, float]  # forward and backward

_WIDE_BYTES = 4  # gradients of narrow types travel in float32


def exchange_seconds(
    query: Operand, key: Operand, value: Operand, seen: Band, algorithm: str, zigzag: bool, group: Group
) -> Seconds:
    """Return the seconds of communication, as (forward, backward), of one attention whose sequence is sharded over the
    ranks of ``group``.

    ``query``, ``key``, ``value``: the operands with their shapes on one rank. ``seen``: the range of positions,
    relative to its own, that a query attends to. ``algorithm``: ``"ring"``: keys and values pass around a ring step by
    step, and each step takes as long as its slowest pair of ranks; any other name: keys and values are all-gathered.
    ``zigzag``: whether each rank has two distant parts of the sequence, which balances a causal mask.
    """
    if group.others:
        each = (exchange_seconds(query, key, value, seen, algorithm, zigzag, one) for one in group.every)
        forward, backward = zip(*each, strict=True)
        return max(forward), max(backward)
    here = float(key.nbytes + value.nbytes)
    if algorithm != "ring":
        gather = collective_time("all_gather", group.size * here, group)
        return gather, gather + collective_time("reduce_scatter", group.size * here, group)
    steps = list_ring_steps(query.shape[-2], key.shape[-2], group.size, zigzag, seen)
    wide = here * max(1.0, _WIDE_BYTES / key.dtype.itemsize)
    counts = Counter(after - before for before, after in pairwise(steps))
    forward_s = sum(count * group.hop(places).time(here) for places, count in counts.items())
    # gradients of keys and values, backward
    behind = sum(count * group.hop(places).time(wide) for places, count in counts.items())
    home = group.hop(-steps[-1]).time(wide)  # their way back to the rank that owns the keys and values
    return forward_s, forward_s + behind + home


def context_exchanges(node: fx.Node, groups: Mapping[str, Group]) -> tuple[Seconds, bool]:
    """Return two values for the operator ``node``. If it is an attention over a sharded sequence, the first is the
    seconds of its communication, as (forward, backward); otherwise it is (0, 0). The second is whether this
    communication overlaps with the node's computation. ``groups``: mesh axis -> communication group."""
    group = groups.get(get_node_argument(node, "axis", "")) if collective_name(node.target) in CONTEXT else None
    if group is None or group.size == 1:
        return (0.0, 0.0), False
    query, key, value = (Operand(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in node.all_input_nodes[:3])
    algorithm, zigzag = get_node_argument(node, "algorithm"), get_node_argument(node, "zigzag")
    seconds = exchange_seconds(query, key, value, find_exchanged_band(node) or Band(), algorithm, zigzag, group)
    return seconds, algorithm == "ring"


def select_exchanges(asked: BlockProfile, place: int) -> list[ProductExchange]:
    """Return the collectives of one kind in a block (such as a layer) that can run in pieces at the same time as matrix
    products. ``place``: the kind: 0 all-gathers in forward, 1 reduce-scatters in forward, 2 all-gathers in backward, 3
    reduce-scatters in backward. ``asked``: the kernels and collectives of the block."""
    op, way = ("all_gather", "reduce_scatter")[place % 2], place // 2
    return [b for b in asked.beside if (asked.exchanges[b.place].op, asked.exchanges[b.place].way) == (op, way)]


def choose_pieces(
    asked: BlockProfile, whole_s: Mapping[int, float], groups: Mapping[str, Group], device: DeviceType, forced: bool
) -> PieceCounts:
    """Return the numbers of pieces into which to cut the collectives of a block (such as a layer) that overlap with
    matrix products, so that the block takes the least time on ``device``. There is one number for each kind of
    collective (all-gather or reduce-scatter, in forward or backward). It is 0 if collectives of the kind are faster in
    one piece.

    ``asked``: the kernels and collectives of the block. ``whole_s``: index of a collective -> its seconds in one piece.
    ``groups``: mesh axis -> group of ranks. ``forced``: whether to cut all collectives that can be cut, even if they
    are faster in one piece.
    """
    counts = []
    for place in range(len(WHOLE)):
        found = [b for b in select_exchanges(asked, place) if _find_group(asked.exchanges[b.place], groups) is not None]
        if not found:
            counts.append(0)
            continue
        possible = _list_possible_pieces(groups[asked.exchanges[found[0].place].axis].size)
        tried = {n: sum(price_pieces(asked, b, n, groups, device)[0] for b in found) for n in possible}
        best = min(possible, key=tried.__getitem__)
        counts.append(best if forced or tried[best] < sum(whole_s[b.place] for b in found) else 0)
    return PieceCounts(*counts)


def _list_possible_pieces(ranks: int) -> list[int]:
    """Return the numbers of pieces into which a collective over ``ranks`` ranks may be cut to overlap with matrix
    products: the divisors of ``ranks`` from 2 on, and 2 and 4 times ``ranks``."""
    return [n for n in range(2, ranks + 1) if ranks % n == 0] + [ranks * 2, ranks * _MOST_PARTS]


def price_pieces(
    asked: BlockProfile, beside: ProductExchange, pieces: int, groups: Mapping[str, Group], device: DeviceType
) -> tuple[float, int]:
    """Return two numbers for the collective ``beside`` if it is cut into ``pieces`` pieces, each of which is
    communicated while another piece is multiplied. The first is the seconds that the collective adds to the time of the
    uncut matrix products. The second is the number of additional operators that the host launches.

    ``asked``: the kernels and collectives of the block (such as a layer). ``groups``: mesh axis -> group of ranks.
    ``device``: the device type of the rank.
    """
    exchange = asked.exchanges[beside.place]
    group = _find_group(exchange, groups)
    if group is None:
        return 0.0, 0
    pieces, whole = fit_pieces(pieces, group.size, beside.length), exchange.nbytes
    whole *= group.size if exchange.from_part else 1
    sent_s = collective_time(exchange.op, whole / pieces / moved_share(exchange.op, group.size), group)
    product_s = _time_piece(SameObject(asked), SameObject(device), beside, pieces)
    if exchange.op == "all_gather":
        seconds = max(
            pieces * sent_s + product_s, pieces * product_s + max(0.0, sent_s - pieces // group.size * product_s)
        )
    else:
        seconds = max(pieces * product_s + sent_s, product_s + pieces * sent_s)
    seconds += (device.overlap_slowdown - 1) * pieces * min(sent_s, product_s)
    if exchange.strided:
        seconds += copied_s(whole, device) + copied_s(beside.copied_bytes, device)
    at_once_s = _time_piece(SameObject(asked), SameObject(device), beside, 1)
    return seconds - at_once_s, max(pieces, group.size) - 1 + (pieces - 1) * len(beside.products)


def _find_group(exchange: Exchange, groups: Mapping[str, Group]) -> Group | None:
    """Return the group of ranks over which the collective ``exchange`` runs; ``None`` if its mesh axis is not in
    ``groups`` or has one rank. ``groups``: mesh axis -> group of ranks."""
    group = groups.get(exchange.axis)
    return None if group is None or group.size == 1 else group


@lru_cache(maxsize=2048)
def _time_piece(
    asked: SameObject[BlockProfile], device: SameObject[DeviceType], beside: ProductExchange, pieces: int
) -> float:
    """Return the seconds of one of ``pieces`` equal parts of the matrix products that overlap with the collective
    ``beside``. ``asked``: the kernels and collectives of the block (such as a layer). ``device``: the device that runs
    them. Both are compared by identity, for the cache."""
    kernels = asked.value.kernels.cut_rows(beside.products, beside.rows, pieces)
    return float(kernel_times(kernels, device.value).sum())


def price_exchanges(
    asked: BlockProfile,
    whole_s: Sequence[float],
    pieces: PieceCounts,
    groups: Mapping[str, Group],
    device: DeviceType,
) -> tuple[list[float], list[int]]:
    """Return two lists: the seconds that each collective of a block (such as a layer) adds to its computation, and the
    numbers of additional operators that the host launches in forward and in backward, because collectives are cut into
    pieces.

    ``asked``: the kernels and collectives of the block. ``whole_s``: seconds of each collective in one piece.
    ``pieces``: the number of pieces of each kind of collective. ``groups``: mesh axis -> group of ranks. ``device``:
    the device type of the rank.
    """
    seconds, issued = [*whole_s], [0, 0]
    for place, count in enumerate(pieces):
        for beside in select_exchanges(asked, place) if count else ():
            seconds[beside.place], more = price_pieces(asked, beside, count, groups, device)
            issued[place // 2] += more
    return seconds, issued
