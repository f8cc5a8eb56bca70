"""Expert parallelism: requirements on the sharding over ``tp``, and blocks with experts distributed over ``ep``.

The ``ep`` ranks that share the experts are ranks of dp x cp x tp. No two of them may send the same rows to experts. If
ranks along ``tp`` have different experts (``etp`` is 1), rows are therefore sharded over ``tp``, and the weights of
experts are not. If ranks along ``tp`` share each expert (``etp`` equals ``tp``), the weights are sharded, and rows are
not."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from torch import fx

from partitioner.candidate import Split, split_of
from partitioner.errors import PlanError
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.experts.dispatch import distribute_experts
from partitioner.passes.experts.regions import ExpertRegion, find_expert_regions
from partitioner.passes.ir.layouts import READ_SHARDED, REPLICATED, Layout, make_shard_layout
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.rules.factors import Strategy, operands_of
from partitioner.solve.sharding.batch import shard_batch
from partitioner.solve.sharding.choices import ShardingError
from partitioner.solve.sharding.sharding import Allowed, ShardingSolution


def regions_of(model: FoldedModel, apart: Collection[str] = ()) -> dict[str, list[ExpertRegion]]:
    """Return the expert regions of the blocks of ``model``: block name -> regions. A region is a part of the block's
    graph in which the experts of a mixture compute rows (tokens). Blocks of ``model`` without such parts are left out.
    ``apart``: mesh axes along which ranks will hold different experts; an operator that communicates over one of them
    ends a region. ``model``: the model as calls of blocks; equal layers share one block.
    """
    found = {name: find_expert_regions(block, apart) for name, block in model.blocks.items()}
    return {name: regions for name, regions in found.items() if regions}


def expert_states(model: FoldedModel, regions: Mapping[str, list[ExpertRegion]]) -> dict[str, tuple[int, int]]:
    """Return the parameters and buffers of experts in ``model``: name -> (the dim that indexes experts, the number of
    experts). ``regions``: block name -> the parts of its graph in which experts compute. ``model``: the model as calls
    of blocks; equal layers share one block.
    """
    found: dict[str, tuple[int, int]] = {}
    for call in model.calls:
        bound = dict(zip(model.blocks[call.block].states, call.states, strict=True))
        for region in regions.get(call.block, ()):
            found |= {bound[name]: (dim, region.num_experts) for name, dim in region.states.items()}
    return found


def allowed_strategies(model: FoldedModel, split: Split, *, in_order: bool = True) -> Allowed | None:
    """Return a function of an operator and a strategy (layouts of operands and results) that says whether the solver
    may run the operator by the strategy. It allows the strategies under which the ranks of ``tp`` divide the experts'
    work as ``split`` says: ``"rows"`` (each rank computes other rows, that is, tokens) or ``"within"`` (the matrices of
    each expert are sharded). If ``split`` is empty, return ``None``, which allows everything.

    ``in_order``: whether, for ``"rows"``, each rank must have consecutive rows. ``model``: the model with the experts.
    """
    if not split:
        return None
    rows, tables = _find_expert_row_dims(model)
    products = {node for regions in regions_of(model).values() for region in regions for node in region.products}

    def within(node: fx.Node, strategy: Strategy) -> bool:
        """Return whether ``strategy`` (layouts of operands and results) shards the matrices of each expert if it runs
        the operator ``node``. The result is true for operators without experts, and false if the strategy gives ranks
        different experts or different rows (tokens)."""
        if node in tables:
            return strategy.results[0] != make_shard_layout(tables[node])
        if node not in rows:
            return True
        read = [(to, tables[o]) for o, to in zip(operands_of(node), strategy.operands, strict=True) if o in tables]
        apart = all(not to.is_shard or to.dim != dim for to, dim in read)
        divided = node not in products or all(to.is_shard for to, _ in read)
        return apart and divided and strategy.results[0] != make_shard_layout(rows[node])

    return _by_rows(rows, tables, in_order) if split == "rows" else within


def _find_expert_row_dims(model: FoldedModel) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Return two dicts about the graphs of the blocks (such as layers) of ``model``, from which the caller decides how
    experts' work may be divided. The first is: operator of experts that works row by row (a row is a token) -> dim of
    its results that indexes rows. The second is: node that is computed from experts' parameters alone -> dim that
    indexes experts."""
    rows: dict[fx.Node, int] = {}
    tables: dict[fx.Node, int] = {}
    for regions in regions_of(model).values():
        for region in regions:
            rows |= {node: places[0].rows for node, places in region.nodes.items()}
            tables |= region.tables
    return rows, tables


def _by_rows(rows: Mapping[fx.Node, int], tables: Mapping[fx.Node, int], in_order: bool = True) -> Allowed:
    """Return a function of an operator and a strategy (layouts of operands and results) that says whether the operator
    may be run by the strategy. It allows only strategies under which every rank has its own rows (tokens) of the
    experts' work. Other operators may use any strategy.

    ``rows``: operator that works row by row -> dim of its results that indexes rows, on which the result must be
    sharded. ``tables``: nodes that are computed from experts' parameters alone, which must be whole on every rank; only
    the keys of the dict are used. ``in_order``: whether each rank must have consecutive rows."""

    def allowed(node: fx.Node, strategy: Strategy) -> bool:
        made = strategy.results[0]
        if node in rows:
            return made == make_shard_layout(rows[node]) if in_order else made.is_shard and made.dim == rows[node]
        return node not in tables or made.is_whole

    return allowed


def _all_rows(rows: Mapping[fx.Node, int], tables: Mapping[fx.Node, int]) -> Allowed:
    """Return a function of an operator and a strategy (layouts of operands and results) that says whether the operator
    may be run by the strategy. It allows only strategies under which every rank has all rows (tokens) of the experts'
    work, and the gradient of a row is a partial sum over the ranks. So the gradient of a row is counted only once, even
    if several ranks later send this row to its expert. Operators outside of the experts' work may use any strategy.

    ``rows``: operators that work row by row; their results must have the layout just described, or be replicated if no
    gradient flows through them. ``tables``: nodes that are computed from experts' parameters alone; they must be whole
    on every rank. Both are dicts, but only their keys are used."""

    def allowed(node: fx.Node, strategy: Strategy) -> bool:
        made = strategy.results[0]
        if node in rows:
            return made == READ_SHARDED or (made == REPLICATED and not node.meta.get("grad"))
        return node not in tables or made.is_whole

    return allowed


def spread_batch(model: FoldedModel, batch: ShardingSolution, samples: int) -> ShardingSolution:
    """Return a sharding of the batch over ranks that allows ranks with different samples to hold different experts. If
    the given sharding ``batch`` allows it, the result is ``batch``. Otherwise it is a sharding with the experts' rows
    (tokens) divided over the ranks, or with all rows on each rank. If there is none, return ``batch``. ``samples``:
    number of samples of the batch. ``model``: the model on the whole batch, as calls of blocks (such as layers)."""
    if can_spread_experts(model, batch):
        return batch
    for way in (_by_rows, _all_rows):
        with contextlib.suppress(ShardingError):
            return shard_batch(model, samples, way(*_find_expert_row_dims(model)))
    return batch


def can_spread_experts(model: FoldedModel, batch: ShardingSolution) -> bool:
    """Return whether ranks that get different rows of the batch of ``model`` (along ``dp`` or ``cp``) may hold
    different experts. This is the case if the sharding ``batch`` divides the experts' work only by rows (tokens), or if
    every rank has all rows. ``model``: the model as calls of blocks; equal layers share one block."""
    ways = [way(*_find_expert_row_dims(model)) for way in (_by_rows, _all_rows)]
    for name, regions in regions_of(model).items():
        chosen = batch.blocks[name].strategies
        for region in regions:
            inside = [(n, chosen[n.name]) for n in (*region.nodes, *region.tables) if n.name in chosen]
            if not any(all(way(node, strategy) for node, strategy in inside) for way in ways):
                return False
    return True


def spread_over_ranks(model: FoldedModel, tp: int, ep: int, etp: int) -> tuple[FoldedModel, dict[str, Layout]]:
    """Return two values: ``model`` with its experts distributed over ``ep`` ranks, and name -> layout over ``ep`` of
    the parameters and buffers that are distributed. ``model``: the model as calls of blocks (equal layers share one
    block), already sharded over ``tp`` ranks. ``etp``: number of ranks that share each expert (0: ``tp``). Raises
    :class:`PlanError` if the graph of a block does not allow ranks to hold different experts."""
    merged = "tp" if split_of(tp, ep, etp) == "rows" else None
    apart = ("dp", "cp") if merged is None else ("dp", "cp", merged)
    regions = regions_of(model, apart)
    try:
        made = {n: distribute_experts(model.blocks[n], found, "ep", ep, merged, apart) for n, found in regions.items()}
    except UnsupportedError as error:
        raise PlanError(f"ep={ep}: {error}") from error
    layouts: dict[str, Layout] = {}
    for call in model.calls:
        bound = zip(model.blocks[call.block].states, call.states, strict=True)
        spread = made[call.block][1] if call.block in made else {}
        for placeholder, state in bound:
            layout = spread.get(placeholder, Layout("R"))
            if layouts.setdefault(state, layout) != layout:
                raise PlanError(
                    f"ep={ep}: {state} is used as a weight of experts in one call, but not in another; use ep=1"
                )
    blocks = {**model.blocks, **{name: block for name, (block, _) in made.items()}}
    return model.with_(blocks=blocks), {name: layout for name, layout in layouts.items() if layout.is_shard}
