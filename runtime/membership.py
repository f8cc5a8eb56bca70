"""Which groups and links a rank is part of: what a communicator opens before a program runs."""

from __future__ import annotations

from runtime.groups import Link
from runtime.levels import rest_axes
from runtime.losses import loss_edges
from runtime.meshes import AXES, MESH_AXES
from runtime.program import Program, RankProgram

# The loss is summed over data; norms over stages and shards; checkpoints gather shards.
_ALWAYS = (("dp",), ("pp", "tp"), ("tp",))


def groups_of(rank: RankProgram) -> list[tuple[int, ...]]:
    """The groups of ``rank``, in an order that is the same on all ranks: overlapping groups must be opened so."""
    program = rank.program
    over_axes = [rank.group(*axes) for axes in sorted(_axes(program))]
    over_stages = [
        tuple(rank.peer(stage) for stage in stages) for stages in sorted(_shared(program)) if rank.stage_index in stages
    ]
    return list(dict.fromkeys(g for g in (*over_axes, *over_stages) if len(g) > 1))


def gathers_of(rank: RankProgram) -> list[tuple[int, ...]]:
    """The groups in which ``rank`` gathers parameters, in an order that is the same on all ranks."""
    axes = {state.zero_axes for state in rank.program.states.values()}
    return list(dict.fromkeys(g for g in (rank.group(*a) for a in sorted(axes)) if len(g) > 1))


def _axes(program: Program) -> set[tuple[str, ...]]:
    """The sets of axes over which some rank communicates."""
    axes: set[tuple[str, ...]] = set(_ALWAYS)
    if program.size("ep") > 1:  # norms of experts' gradients and checkpoints of their weights
        axes |= {AXES, ("ep",)}
    if program.zero:  # norms of pieces
        axes.add(AXES)
    axes.update(state.zero_axes for state in program.states.values())
    for stage in program.stages:
        axes.update(b.axes for b in stage.buckets)
        axes.update(rest_axes(program, b) for b in stage.buckets)
        axes.update(level for b in stage.buckets for level in b.levels)
        axes.update(i.axes for i in stage.instructions if i.axes)
    for block in program.blocks.values():
        for node in block.nodes:
            if str(node.get("target", "")).startswith("partition."):
                axes.update((a,) for a in node.get("args", ()) if isinstance(a, str) and a in MESH_AXES)
    return axes


def _shared(program: Program) -> set[tuple[int, ...]]:
    """The sets of stages that synchronise tied states, or update them together."""
    return {
        tuple(sorted(program.states[s].stages))
        for stage in program.stages
        for i in stage.instructions
        if i.op in ("SYNC", "UPDATE")
        for s in i.states
    }


def links_of(rank: RankProgram) -> list[Link]:
    """The pipeline links that start or end at ``rank``, in an order that is the same on all ranks."""
    edges = loss_edges(rank.program) | {
        (stage, i.peer, i.op[-1])
        for stage, held in enumerate(rank.program.stages)
        for i in held.instructions
        if i.op in ("SEND_F", "SEND_B") and i.peer is not None and i.peer != stage
    }
    return [Link(rank.peer(a), rank.peer(b), c) for a, b, c in sorted(edges) if rank.stage_index in (a, b)]
