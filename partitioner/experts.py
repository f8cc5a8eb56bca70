"""Experts over ranks: what a mesh asks of the sharding over ``tp``, and the blocks with experts spread over ``ep``.

The ``ep`` ranks that share the experts are ranks of dp x cp x tp. Rows that go to experts must not be alike on two of
them. So where ranks along ``tp`` have different experts (``etp`` of 1), rows are sharded over ``tp`` and experts'
weights are not; where they share each expert (``etp`` as large as ``tp``), it is the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import fx

from partitioner.errors import PlanError
from partitioner.solve.sharding import Allowed
from passes.blocks import FoldedModel
from passes.dispatch import spread_experts
from passes.errors import UnsupportedError
from passes.factors import Strategy, operands_of
from passes.layouts import Layout, shard
from passes.regions import ExpertRegion, find_regions

Split = Literal["", "rows", "within"]  # what of the experts' work is sharded over tp: as is cheapest, rows, each expert


def split_of(tp: int, ep: int, etp: int) -> Split:
    """What is sharded over ``tp``; ``etp`` of 0 is ``tp``. ``""`` where it does not matter, or is not executed."""
    if ep == 1 or tp == 1:
        return ""
    return "within" if etp in (0, tp) else "rows" if etp == 1 else ""


def regions_of(model: FoldedModel) -> dict[str, list[ExpertRegion]]:
    """The regions of each block that has some."""
    found = {name: find_regions(block) for name, block in model.blocks.items()}
    return {name: regions for name, regions in found.items() if regions}


def expert_states(model: FoldedModel, regions: Mapping[str, list[ExpertRegion]]) -> dict[str, tuple[int, int]]:
    """The experts' states, with the dim that counts experts and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for call in model.calls:
        bound = dict(zip(model.blocks[call.block].states, call.states, strict=True))
        for region in regions.get(call.block, ()):
            found |= {bound[name]: (dim, region.num_experts) for name, dim in region.states.items()}
    return found


def allowed_strategies(model: FoldedModel, split: Split, *, in_order: bool = True) -> Allowed | None:
    """Which strategies leave the experts' work as ``split`` says; ``in_order``: rows are cut into consecutive parts."""
    if not split:
        return None
    rows: dict[fx.Node, int] = {}
    tables: dict[fx.Node, int] = {}
    products: set[fx.Node] = set()
    for regions in regions_of(model).values():
        for region in regions:
            rows |= {node: places[0].rows for node, places in region.nodes.items()}
            tables |= region.tables
            products |= set(region.products)

    def by_rows(node: fx.Node, strategy: Strategy) -> bool:
        if node in rows:
            made = strategy.results[0]
            return made == shard(rows[node]) if in_order else made.is_shard and made.dim == rows[node]
        return node not in tables or not strategy.results[0].is_shard

    def within(node: fx.Node, strategy: Strategy) -> bool:
        if node in tables:
            return strategy.results[0] != shard(tables[node])
        if node not in rows:
            return True
        read = [(to, tables[o]) for o, to in zip(operands_of(node), strategy.operands, strict=True) if o in tables]
        apart = all(not to.is_shard or to.dim != dim for to, dim in read)
        divided = node not in products or all(to.is_shard for to, _ in read)
        return apart and divided and strategy.results[0] != shard(rows[node])

    return by_rows if split == "rows" else within


def spread_over_ranks(model: FoldedModel, tp: int, ep: int, etp: int) -> tuple[FoldedModel, dict[str, Layout]]:
    """``model``, local over ``tp``, with its experts spread over ``ep`` ranks, and the layouts of their states.

    Raises :class:`PlanError` where the graph does not allow it.
    """
    regions = regions_of(model)
    merged = "tp" if split_of(tp, ep, etp) == "rows" else None
    try:
        made = {n: spread_experts(model.blocks[n], found, "ep", ep, merged) for n, found in regions.items()}
    except UnsupportedError as error:
        raise PlanError(f"ep={ep}: {error}") from error
    layouts: dict[str, Layout] = {}
    for call in model.calls:
        bound = zip(model.blocks[call.block].states, call.states, strict=True)
        spread = made[call.block][1] if call.block in made else {}
        for placeholder, state in bound:
            layout = spread.get(placeholder, Layout("R"))
            if layouts.setdefault(state, layout) != layout:
                raise PlanError(f"ep={ep}: {state} is experts' weights in one call and not in another")
    blocks = {**model.blocks, **{name: block for name, (block, _) in made.items()}}
    return model.with_(blocks=blocks), {name: layout for name, layout in layouts.items() if layout.is_shard}


def common_experts(states: Mapping[str, tuple[int, int]]) -> int:
    """The most ranks that all layers' experts can be spread over evenly; 0 without experts."""
    return math.gcd(*(count for _, count in states.values()))
