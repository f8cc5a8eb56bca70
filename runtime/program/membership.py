"""List the process groups and pipeline links of a rank, which a communicator opens before the program runs."""

from __future__ import annotations

from typing import NamedTuple

from partitioner.runtime.program.mesh import AXES, MESH_AXES
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.program.sharded_buckets import list_all_reduce_axes


class PipelineEdge(NamedTuple):
    """One direction of a link between two ranks of different pipeline stages. The rank ``target`` receives the messages
    of the rank ``source`` in the order in which they are sent. ``channel``: "F" for values, "B" for gradients, "L" for
    the loss.
    """

    source: int
    target: int
    channel: str


CHANNEL = "L"


def find_loss_stage(program: Program) -> int:
    """Return the index of the pipeline stage that computes the loss. ``program``: the program of all ranks."""
    return next(i for i, stage in enumerate(program.stages) if any(program.loss in c.outputs for c in stage.calls))


def find_neighbour_stages(stage: int, source: int, num_stages: int) -> tuple[int | None, list[int]]:
    """Return how the pipeline stage ``stage`` passes on a tensor, such as the loss, that the stage ``source`` sends to
    all stages from neighbour to neighbour. The result is a pair: the stage from which ``stage`` receives the tensor
    (``None`` if ``stage`` is ``source``), and the list of stages to which it sends the tensor. All stages are indices
    from 0. ``num_stages``: number of pipeline stages.
    """
    below = [stage - 1] if 0 < stage <= source else []
    above = [stage + 1] if source <= stage < num_stages - 1 else []
    if stage == source:
        return None, below + above
    return (stage + 1, below) if stage < source else (stage - 1, above)


def list_loss_edges(program: Program) -> set[tuple[int, int, str]]:
    """Return the links over which the loss is sent to all pipeline stages, as (sending stage, receiving stage, "L").
    Empty if there is no loss or only one stage. ``program``: the program of all ranks.
    """
    if program.loss is None or len(program.stages) == 1:
        return set()
    source, count = find_loss_stage(program), len(program.stages)
    return {
        (stage, target, CHANNEL) for stage in range(count) for target in find_neighbour_stages(stage, source, count)[1]
    }


# The loss is summed over dp, gradient norms over stages and shards; checkpoints gather shards over tp.
_DEFAULT_GROUP_AXES = (("dp",), ("pp", "tp"), ("tp",))


def list_groups(rank: RankProgram) -> list[tuple[int, ...]]:
    """Return the process groups that ``rank`` belongs to, as tuples of global ranks; groups of one rank are left out.
    All ranks list common groups in the same order, so creating overlapping groups does not deadlock.
    """
    program = rank.program
    over_axes = [rank.group(*axes) for axes in sorted(_list_group_axes(program))]
    over_stages = [
        tuple(rank.peer(stage) for stage in stages)
        for stages in sorted(_find_tied_stages(program))
        if rank.stage_index in stages
    ]
    return list(dict.fromkeys(g for g in (*over_axes, *over_stages) if len(g) > 1))


def list_gather_groups(rank: RankProgram) -> list[tuple[int, ...]]:
    """Return the process groups in which ``rank`` all-gathers parameters that ZeRO shards, as tuples of global ranks,
    in an order that is the same on all ranks. Groups of one rank are left out.
    """
    axes = {state.zero_axes for state in rank.program.states.values()}
    return list(dict.fromkeys(g for g in (rank.group(*a) for a in sorted(axes)) if len(g) > 1))


def _list_group_axes(program: Program) -> set[tuple[str, ...]]:
    """Return all combinations of mesh axes over which some rank of ``program`` communicates, in graphs, reductions or
    checkpoints.
    """
    axes: set[tuple[str, ...]] = set(_DEFAULT_GROUP_AXES)
    if program.size("ep") > 1:  # norms of experts' gradients and checkpoints of their weights
        axes |= {AXES, ("ep",)}
    if program.zero:  # norms of pieces
        axes.add(AXES)
    axes.update(state.zero_axes for state in program.states.values())
    for stage in program.stages:
        axes.update(b.axes for b in stage.buckets)
        axes.update(list_all_reduce_axes(program, b) for b in stage.buckets)
        axes.update(level for b in stage.buckets for level in b.levels)
        axes.update(i.axes for i in stage.instructions if i.axes)
    for block in program.blocks.values():
        for node in block.nodes:
            if str(node.get("target", "")).startswith("partition."):
                axes.update((a,) for a in node.get("args", ()) if isinstance(a, str) and a in MESH_AXES)
    return axes


def _find_tied_stages(program: Program) -> set[tuple[int, ...]]:
    """Return the sets of pipeline stages (ascending indices) that share a parameter or buffer and reduce or update it
    together. ``program``: the program of all ranks.
    """
    return {
        tuple(sorted(program.states[s].stages))
        for stage in program.stages
        for i in stage.instructions
        if i.op in ("SYNC", "UPDATE")
        for s in i.states
    }


def list_links(rank: RankProgram) -> list[PipelineEdge]:
    """Return the links between pipeline stages that start or end at ``rank``, in an order that is the same on all
    ranks.
    """
    edges = list_loss_edges(rank.program) | {
        (stage, i.peer, i.op[-1])
        for stage, held in enumerate(rank.program.stages)
        for i in held.instructions
        if i.op in ("SEND_F", "SEND_B") and i.peer is not None and i.peer != stage
    }
    return [PipelineEdge(rank.peer(a), rank.peer(b), c) for a, b, c in sorted(edges) if rank.stage_index in (a, b)]
