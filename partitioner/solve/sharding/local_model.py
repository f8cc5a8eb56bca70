"""Derive the model that one rank runs from the model of one microbatch, and collect the layouts of its tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.candidate import split_of
from partitioner.emit.program import Layouts
from partitioner.emit.zero import states_left_whole
from partitioner.passes.ir.gradient_flow import stops_gradient
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.layouts import REPLICATED, Layout, local_shape
from partitioner.passes.ir.model import Block, FoldedModel, TensorSpec
from partitioner.passes.shard.shard_block import fuse_bias, shard_block
from partitioner.solve.sharding.expert_parallel import spread_over_ranks
from partitioner.solve.sharding.sharding import ShardingSolution


@dataclass(frozen=True)
class LocalModel:
    """The blocks (such as layers) that one rank runs for one microbatch, and the layouts of its tensors over ``tp``,
    ``cp`` and ``ep``.

    ``model``: the blocks with the shapes of one rank; parameters, buffers and inputs have their global shapes.
    ``sharding``: layouts over ``tp``. ``context``: layouts over ``cp``; ``None`` if ``cp`` is 1. ``experts``: name of a
    parameter or buffer of experts -> layout over ``ep``. ``by_rows``: whether the ranks of ``tp`` hold different
    experts and compute different rows (tokens).
    """

    model: FoldedModel  # blocks and values as one rank has them; states and inputs with their global specs
    sharding: ShardingSolution
    context: ShardingSolution | None = None  # over cp
    experts: dict[str, Layout] = field(default_factory=dict)  # experts' states over ep
    by_rows: bool = False  # whether ranks along tp have rows of their own for the experts, and other experts

    @property
    def complete(self) -> frozenset[str]:
        """Return the names of the parameters and buffers whose gradient needs no reduction over ``cp``, because it is
        not a partial sum on the ranks of ``cp``.
        """
        if self.context is None:
            return frozenset()
        return frozenset(name for name, layout in self.context.states.items() if layout.kind != "R'")

    @cached_property
    def left_whole(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that ZeRO-3 does not shard, because they are small."""
        return states_left_whole(self.model)

    def spread(self, tp: int, ep: int, etp: int) -> LocalModel:
        """Return the model with its experts distributed over ``ep`` ranks, each expert sharded over ``etp`` ranks (0:
        as many as ``tp``). Raises ``PlanError`` if this is not possible."""
        if ep == 1:
            return self
        model, experts = spread_over_ranks(self.model, tp, ep, etp)
        return replace(self, model=model, experts=experts, by_rows=split_of(tp, ep, etp) == "rows")


def build_local_model(
    split: FoldedModel,
    solution: ShardingSolution,
    context: ShardingSolution | None,
    known: dict[Hashable, Block],
) -> LocalModel:
    """Return the model of one rank: ``split`` sharded over ``tp`` by ``solution``.

    ``split``: the model of one microbatch, already sharded over ``cp`` by ``context`` if that is not ``None``.
    ``known``: a cache of sharded blocks (such as layers), to which this function adds; solutions with equal layouts
    share blocks.
    """
    tp = solution.num_ranks
    blocks: dict[str, Block] = {}
    for name, block in split.blocks.items():
        key = SameObject(block), tp, solution.blocks[name].key
        if key not in known:
            known[key] = unmark_stopped(fuse_bias(shard_block(block, solution.blocks[name], "tp", tp)))
        blocks[name] = known[key]
    values = {
        name: TensorSpec(local_shape(solution.values.get(name, REPLICATED), spec.shape, tp), spec.dtype)
        for name, spec in split.values.items()
    }
    return LocalModel(split.with_(blocks=blocks, values=values), solution, context)


def unmark_stopped(block: Block) -> Block:
    """Set ``node.meta["grad"]`` (whether a gradient flows through the node) to ``False`` for the nodes of ``block`` (a
    piece of the model, such as a layer) that depend on detached values alone, and return ``block``. This is needed
    after sharding, which copies the mark of an operator to all nodes that replace it, even to those that no gradient
    reaches."""
    for node in block.graph.nodes:
        if node.op == "call_function" and node.meta.get("grad"):
            node.meta["grad"] = not stops_gradient(node) and any(n.meta.get("grad", True) for n in node.all_input_nodes)
    return block


def layouts_of(local: LocalModel, batch: ShardingSolution) -> Layouts:
    """Return all layouts of the model of one rank, ``local``, in the form in which they are written into the program of
    a plan: the layouts of all tensors over ``tp``, ``ep`` and ``cp``; for each parameter, the mesh axes over which its
    gradient is a partial sum; and the batch dims of inputs. ``batch``: the sharding of the batch over microbatches and
    ``dp``."""
    tensor = local.sharding
    axes: dict[str, tuple[str, ...]] = {}
    for name, state in local.model.states.items():
        if state.requires_grad:
            partial = {
                "dp": batch.states[name].kind == "R'",
                "cp": local.context is not None and local.context.states[name].kind == "R'",
                "tp": tensor.states.get(name, REPLICATED).kind == "R'",
            }
            axes[name] = tuple(axis for axis, is_partial in partial.items() if is_partial)
            if name in local.experts:  # this rank has computed rows of all ranks that have other experts
                axes[name] = ("edp", "etp") if partial["tp"] and not local.by_rows else ("edp",)
    dims = {i.value: _batch_dim(batch.values[i.value]) for i in local.model.inputs}
    leaving = [o.value for o in local.model.outputs if o.value is not None]
    leaving += [local.model.loss] if local.model.loss is not None else []
    apart = dict.fromkeys(local.experts, REPLICATED) if local.by_rows else {}
    return Layouts(
        states={**tensor.states, **apart},
        experts=local.experts,
        values=tensor.values,
        grad_axes=axes,
        batch_dims=dims,
        batch={
            name: "P" if name == local.model.loss else _describe_layout_join(batch.values[name]) for name in leaving
        },
        context=local.context.values if local.context is not None else {},
    )


def _batch_dim(layout: Layout) -> int | None:
    return layout.dim if layout.is_shard else None


def _describe_layout_join(layout: Layout) -> str:
    """Return how the parts of a model output on the ranks are combined into the whole: ``"R"`` if all parts are equal,
    otherwise ``layout`` as text, such as ``"S0"`` (joined along dim 0) or ``"P"`` (summed)."""
    return "R" if layout.is_whole else str(layout)
