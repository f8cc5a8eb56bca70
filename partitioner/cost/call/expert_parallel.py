"""Additional cost of a call under expert parallelism, and how expert parallelism and ZeRO-3 distribute a call over
ranks.

The local graph of a call contains all experts. Over ``ep`` ranks the experts' weights are divided, and tokens are sent
to them and back by all-to-all. Under ZeRO-3, a call's weights are gathered before it runs.
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
from partitioner.passes.experts.regions import find_expert_regions
from partitioner.passes.ir.hashing import hashed_once
from partitioner.passes.ir.model import Block
from partitioner.passes.ops.scaled_products import Scaling
from partitioner.topology.group import Group
from partitioner.topology.hardware import DeviceType

# operators that select or repeat rows
_REPEATS = frozenset(("index", "index_select", "expand", "reshape", "clone", "_to_copy"))

EXPERT_PRODUCTS = frozenset(("_grouped_mm", "expert_mm"))
_ALONE = Group(1)


@hashed_once
@dataclass(frozen=True)
class Spread:
    """How a call of a block (such as a layer) is distributed over ranks by expert parallelism and ZeRO-3, besides
    ``tp`` and ``cp``.

    - ``tp``: number of ranks of the axis ``tp``. ``experts``: the group over which experts are distributed (``ep``).
      ``sharers``: the group of ranks over which one expert is sharded; its size is called ``etp``. ``expert_tensor``:
      ``tp`` divided by ``etp``. ``num_experts``: the largest number of experts in a layer.
    - ``shards``: the group over which ZeRO-3 shards the weights outside of experts. ``expert_shards``: the group over
      which it shards the weights of experts.
    - ``divided``: whether the graph already contains only one rank's experts and the token exchanges. ``fp8``: the
      scaling granularity if products with weights are in fp8 (``"tensor"``, ``"row"`` or ``"block"``), ``"nvfp4"`` if
      they are in NVFP4, otherwise ``None``. ``whole_scatter``: whether a reduce-scatter needs a receive buffer for the
      whole tensor. ``profile``: how the training framework executes the plan.
    """

    experts: Group = _ALONE
    shards: Group = _ALONE
    expert_shards: Group = _ALONE
    expert_tensor: float = 1.0
    tp: int = 1
    num_experts: int = 0
    fp8: Scaling | None = None
    whole_scatter: bool = False
    profile: ExecutionProfile = OURS
    sharers: Group = _ALONE
    divided: bool = False

    @property
    def ep(self) -> int:
        return self.experts.size

    @property
    def without_experts(self) -> Spread:
        """Return a copy in which all fields for experts have their defaults. It describes a block (such as a layer)
        without experts."""
        return replace(
            self, experts=_ALONE, expert_shards=_ALONE, expert_tensor=1.0, num_experts=0, sharers=_ALONE, divided=False
        )

    @property
    def of_experts(self) -> float:
        """Return the fraction, from 0 to 1, of the experts' weights in the graph of a block (such as a layer) that one
        rank holds.
        """
        return 1.0 if self.divided else self.expert_tensor / self.ep


NO_SPREAD = Spread()


def expected_loads(tokens: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """Return, for each number of tokens in ``tokens``, the expected imbalance of random routing: the load of the
    fullest of ``ranks`` ranks divided by the mean load, if each token goes to a random rank. For ``t`` tokens and ``r``
    ranks this is ``1 + sqrt(2 ln r (r - 1) / t)``, at most ``r`` (the maximum of a binomial, Raab and Steger 1998)."""
    if ranks <= 1:
        return np.ones(len(tokens))
    unevenness = np.sqrt(2 * math.log(ranks) * (ranks - 1) / np.where(tokens > 0, tokens, np.inf))
    return np.minimum(float(ranks), 1.0 + unevenness)


@dataclass(frozen=True)
class ExpertProducts:
    """The matrix products of the experts of one block (such as a layer).

    ``products``: the nodes of these products. ``entries``: the nodes whose values are sent to the experts. ``exits``:
    the nodes whose values come back from them. ``states``: the names of the experts' weights. ``known``: whether the
    products have a form that the planner can distribute over ranks.
    """

    entries: tuple[fx.Node, ...] = ()
    exits: tuple[fx.Node, ...] = ()
    products: frozenset[fx.Node] = frozenset()
    states: frozenset[str] = frozenset()
    known: bool = False

    def reads_entry(self, product: fx.Node) -> bool:
        """Return whether ``product``, a matrix product of experts, reads a value that is sent to the experts, directly
        or through views and casts alone.
        """
        return any(
            _skip_views_and_casts(o) in self.entries
            for o in product.all_input_nodes
            if isinstance(o.meta["val"], Tensor)
        )

    @property
    def sorts(self) -> bool:
        """Return whether the rows (tokens) must be sorted by expert before the experts' matrix products."""
        return any(operator_name(node) in EXPERT_PRODUCTS for node in self.products)

    @property
    def copies(self) -> float:
        """Return the number of experts to which each row (token) is sent, such as the ``k`` of top-k routing; 1 if the
        graph does not show it."""
        return max((_count_row_copies(node) for node in self.entries), default=1.0)


def expert_region(block: Block) -> ExpertProducts:
    """Return the matrix products of the experts in ``block`` (such as a layer), with the values that are sent to the
    experts and the values that come back from them. The result is empty if the block has no experts."""
    found = find_expert_regions(block)
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
    after: set[fx.Node] = set()  # nodes after some product
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
    """Return the node from which ``node`` is derived by views, casts and clones alone."""
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
    """Return how many copies of each row were made before ``node``: the number of elements of ``node`` divided by the
    number of elements at the start of the chain of views, selections and repetitions that leads to it. The result is
    ``k`` if each row was repeated ``k`` times, and 1 if the number is unknown."""
    size, source = node.meta["val"].numel(), node
    while source.op == "call_function" and (is_view(source) or operator_name(source) in _REPEATS):
        source = source.all_input_nodes[0]
    found = source.meta["val"]
    return float(size / found.numel()) if isinstance(found, Tensor) and found.numel() else 1.0


def expert_exchanges(region: ExpertProducts, spread: Spread) -> float:
    """Return the seconds of sending tokens to their experts and back, for one pass (forward or backward) of a block
    (such as a layer). ``region``: the products of the block's experts. ``spread``: how the experts are distributed over
    ranks. 0 if each rank has all experts, or if the graph contains these collectives already.
    """
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
    """Return the seconds in which ``device`` copies received rows (tokens) into the order of the experts, and copies
    the results back, for one pass (forward or backward). ``region``: the products of experts. ``held``: number of
    experts in the graph. ``spread``: how experts are distributed over ranks, and how the framework exchanges rows.

    Rows arrive in the order of the sending ranks (``passes/experts/sorted_rows.py``; Megatron-Core's
    ``sort_chunks_by_idxs``). The result is 0 if a rank has only one expert, or if the framework's exchange already
    writes rows in the order of the experts.
    """
    if not region.sorts or held * spread.of_experts <= 1 or spread.profile.dispatch == "once":
        return 0.0
    moved = (sum(float(n.meta["val"].nbytes) for n in nodes) for nodes in (region.entries, region.exits))
    return sum(copied_s(num_bytes, device) for num_bytes in moved)


def compute_exposed_seconds(compute_s: float, comm_s: float, slowdown: float, overlap: bool = True) -> float:
    """Return the seconds that communication of ``comm_s`` seconds adds to computation of ``compute_s`` seconds. If
    ``overlap`` is false, that is ``comm_s``. Otherwise both run at the same time, and each takes ``slowdown`` times as
    long while both run."""
    if not overlap:
        return comm_s
    return max(0.0, comm_s - compute_s) + (slowdown - 1) * min(compute_s, comm_s)


def in_pieces(compute_s: float, comm_s: float, pieces: int, slowdown: float) -> float:
    """Return the seconds that collectives (all-gathers and reduce-scatters) add to the matrix products with which they
    overlap, if each collective is split into ``pieces``. The first piece overlaps with nothing (Wang et al. 2023;
    Transformer Engine's user buffers). ``compute_s``: seconds of the products. ``comm_s``: seconds of the collectives.
    ``slowdown``: factor on the time of computation and of a collective while both run."""
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
