"""Find the instruction, call and graph node in which an exception was raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from partitioner.runtime.comm.failure_origin import is_secondary
from partitioner.runtime.errors import Failure
from partitioner.runtime.execute.calls import BoundCall
from partitioner.runtime.execute.codegen import CompiledGraph
from partitioner.runtime.program.program import RankProgram


def format_instruction_at(rank: RankProgram, index: int) -> str:
    """Return the printed form of the instruction of ``rank`` at ``index``, such as ``0F3``; "end of the step" if
    ``index`` is after the last instruction.
    """
    return str(rank.instructions[index]) if index < len(rank.instructions) else "end of the step"


def describe_failure(
    error: BaseException, rank: RankProgram, index: int, compiled: Iterable[CompiledGraph], step: int | None = None
) -> Failure:
    """Return a description of ``error``, raised by the program ``rank``: the instruction at ``index``, the module that
    ran, and the node of its graph, if the error passed through the code of a function in ``compiled``. ``compiled``:
    the functions compiled from graphs. ``step``: number of the step, from 1; ``None`` if unknown.
    """
    call = ""
    walk = error.__traceback__
    while walk is not None:
        owner = walk.tb_frame.f_locals.get("self")
        if isinstance(owner, BoundCall):
            call = owner.call.path or owner.call.block
        walk = walk.tb_next
    node = next((n for c in compiled if (n := c.node_at(error.__traceback__)) is not None), None)
    return Failure(
        rank=rank.rank,
        error=str(error),
        kind=type(error).__name__,
        instruction=format_instruction_at(rank, index),
        index=index,
        call=call,
        node="" if node is None else f"{node.name} ({node.target})",
        path="" if node is None else node.meta.get("path", ""),
        source="" if node is None else node.meta.get("source", ""),
        traceback="".join(traceback.format_exception(error)),
        secondary=is_secondary(error),
        step=step,
    )
