"""Additional cost of a call under expert parallelism, state sharding and host offloading.

The local graph of a call is for all experts. Over ``ep`` ranks the experts' weights are divided, and tokens are sent to
them and back by all-to-all. Under ZeRO-3, a call's weights are gathered before it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from partitioner.cost.call.collectives import collective_time, dispatch_time
from partitioner.cost.call.operators import is_view, operator_name
from partitioner.cost.call.roofline import copied_s
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.experts.regions import find_regions
from partitioner.passes.ir.hashing import hashed_once
from partitioner.passes.ir.model import Block
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType

_REPEATS = frozenset(("index", "index_select", "expand", "reshape", "clone", "_to_copy"))  # of rows

EXPERT_PRODUCTS = frozenset(("_grouped_mm", "expert_mm"))
_ALONE = Group(1)


@hashed_once
@dataclass(frozen=True)
class Spread:
    """How a call is spread besides ``tp`` and ``cp``. ``experts``, ``shards``: the groups of ``ep`` and of the ranks
    that ZeRO-3 shards over. ``expert_tensor``: ranks of ``tp`` over those that share one expert (``etp``).
    ``num_experts``: in all, of the layer that has most. ``sharers``: the ranks that share one expert.

    ``divided``: the graph is what one rank runs already, with the exchanges of tokens in it and its experts alone.
    ``fp8``: products with weights are in fp8. ``whole_scatter``:
    what gradients are scattered by receives all parts of them. ``profile``: how what runs the plan executes it.
    """

    experts: Group = _ALONE
    shards: Group = _ALONE
    expert_shards: Group = _ALONE
    expert_tensor: float = 1.0
    tp: int = 1
    num_experts: int = 0
    fp8: bool = False
    whole_scatter: bool = False
    profile: ExecutionProfile = OURS
    sharers: Group = _ALONE
    divided: bool = False

    @property
    def ep(self) -> int:
        return self.experts.size

    @property
    def without_experts(self) -> Spread:
        """What of it concerns a call that has none."""
        return replace(
            self, experts=_ALONE, expert_shards=_ALONE, expert_tensor=1.0, num_experts=0, sharers=_ALONE, divided=False
        )

    @property
    def of_experts(self) -> float:
        """What part of the local graph's expert weights a rank holds."""
        return 1.0 if self.divided else self.expert_tensor / self.ep


NO_SPREAD = Spread()


def expected_loads(tokens: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """Tokens of the fullest of ``ranks`` over the mean, if each of ``tokens`` goes to any of them.

    The expected maximum of a binomial, ``1 + sqrt(2 ln r (r - 1) / t)`` (Raab and Steger 1998)."""
    if ranks <= 1:
        return np.ones(len(tokens))
    unevenness = np.sqrt(2 * math.log(ranks) * (ranks - 1) / np.where(tokens > 0, tokens, np.inf))
    return np.minimum(float(ranks), 1.0 + unevenness)


@dataclass(frozen=True)
class ExpertProducts:
    """The expert products of a block: which values are sent to the experts and come back, and the weights. ``known``:
    they are of a form that can be spread over ranks."""

    entries: tuple[fx.Node, ...] = ()
    exits: tuple[fx.Node, ...] = ()
    products: frozenset[fx.Node] = frozenset()
    states: frozenset[str] = frozenset()
    known: bool = False

    def reads_entry(self, product: fx.Node) -> bool:
        """Whether a product reads rows as they come."""
        return any(
            _skip_views_and_casts(o) in self.entries
            for o in product.all_input_nodes
            if isinstance(o.meta["val"], Tensor)
        )

    @property
    def sorts(self) -> bool:
        """Whether its products want rows in the order of the experts."""
        return any(operator_name(node) in EXPERT_PRODUCTS for node in self.products)

    @property
    def copies(self) -> float:
        """How many of the rows that are sent are one and the same, as far as the graph shows it."""
        return max((_count_row_copies(node) for node in self.entries), default=1.0)


def expert_region(block: Block) -> ExpertProducts:
    """The experts of ``block``, from the graph: what flows into the first products and out of the last."""
    found = find_regions(block)
    if found:
        return ExpertProducts(
            tuple(dict.fromkeys(_skip_views_and_casts(n) for r in found for n in r.entries)),
            tuple(n for r in found for n in r.exits),
            frozenset(n for r in found for n in r.products),
            frozenset(name for r in found for name in r.states),
            known=True,
        )
    products = [n for n in block.graph.nodes if operator_name(n) in EXPERT_PRODUCTS]
    if not products:
        return ExpertProducts()
    after: set[fx.Node] = set()  # behind some product
    for node in block.graph.nodes:
        if any(o in after or o in products for o in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(list(block.graph.nodes)):
        if any(u in before or u in products for u in node.users):
            before.add(node)
    entries = {_skip_views_and_casts(n.args[0]): None for n in products if n not in after}
    exits = [n for n in products if n not in before]
    names = {_skip_views_and_casts(n.args[1]).name for n in products}
    return ExpertProducts(tuple(entries), tuple(exits), frozenset(products), frozenset(names & set(block.states)))


def _skip_views_and_casts(node: object) -> fx.Node:
    """What a view or a cast looks at."""
    assert isinstance(node, fx.Node), node
    while (
        node.op == "call_function"
        and len(node.all_input_nodes) == 1
        and (is_view(node) or operator_name(node) in ("_to_copy", "to", "clone"))
        and isinstance(node.all_input_nodes[0].meta["val"], Tensor)
    ):
        node = node.all_input_nodes[0]
    return node


def _count_row_copies(node: fx.Node) -> float:
    """How often ``node`` has each row of what it is picked or repeated from."""
    size, source = node.meta["val"].numel(), node
    while source.op == "call_function" and (is_view(source) or operator_name(source) in _REPEATS):
        source = source.all_input_nodes[0]
    found = source.meta["val"]
    return float(size / found.numel()) if isinstance(found, Tensor) and found.numel() else 1.0


def expert_exchanges(region: ExpertProducts, spread: Spread) -> float:
    """Seconds of sending tokens to their experts and back, one way each, per pass."""
    if spread.ep == 1 or spread.divided:
        return 0.0
    if spread.profile.dispatch == "rows":
        values = [n.meta["val"].nbytes for n in (*region.entries, *region.exits)]
        return sum(collective_time("all_to_all", nbytes * spread.ep, spread.experts) for nbytes in values)
    ahead, back = (sum(float(n.meta["val"].nbytes) for n in nodes) for nodes in (region.entries, region.exits))
    sharers = spread.sharers
    seconds = collective_time("all_gather", ahead, sharers) + collective_time("reduce_scatter", back, sharers)
    copies = region.copies if spread.profile.dispatch == "once" else 1.0
    for nbytes in (ahead, back):
        seconds += dispatch_time(nbytes * spread.ep / sharers.size, spread.experts, copies)
    return seconds


def sorting_seconds(region: ExpertProducts, held: int, spread: Spread, device: DeviceType) -> float:
    """Seconds in which rows that have come are put in the order of the rank's experts, and back, one pass.

    They come ordered by the rank that sent them (``passes/experts/sorted_rows.py``; Megatron-Core's
    ``sort_chunks_by_idxs``). What sends them ``once`` lays them out itself, and a rank's only expert has all of them.
    """
    if not region.sorts or held * spread.of_experts <= 1 or spread.profile.dispatch == "once":
        return 0.0
    moved = (sum(float(n.meta["val"].nbytes) for n in nodes) for nodes in (region.entries, region.exits))
    return sum(copied_s(num_bytes, device) for num_bytes in moved)


def compute_exposed_seconds(compute_s: float, comm_s: float, slowdown: float, overlap: bool = True) -> float:
    """Seconds that communication adds to computation: while both run each takes ``slowdown`` times as long."""
    if not overlap:
        return comm_s
    return max(0.0, comm_s - compute_s) + (slowdown - 1) * min(compute_s, comm_s)


def in_pieces(compute_s: float, comm_s: float, pieces: int, slowdown: float) -> float:
    """Seconds that gathers and scatters in ``pieces`` add to the products beside them: nothing hides the first piece
    (Wang et al. 2023, overlap by decomposition; Transformer Engine's user buffers)."""
    first = comm_s / max(1, pieces)
    return first + compute_exposed_seconds(compute_s, comm_s - first, slowdown)


__all__ = [
    "NO_SPREAD",
    "ExpertProducts",
    "Spread",
    "expected_loads",
    "expert_exchanges",
    "expert_region",
]
