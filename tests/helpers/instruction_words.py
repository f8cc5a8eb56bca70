"""Instructions from words such as ``F0``."""

from __future__ import annotations

from typing import Any

from partitioner.runtime.program.instructions import Instruction


def line(*words: str) -> list[Instruction]:
    """Instructions from ``RECV_F0<1`` (microbatch 0 from stage 1), ``F0``."""
    made = []
    for word in words:
        text, _, peer = word.partition("<")
        op: Any = text[:-1]
        values = ("x",) if op.startswith("RECV") else ()
        made.append(
            Instruction(op=op, stage=0, microbatch=int(text[-1]), values=values, peer=int(peer) if peer else None)
        )
    return made
