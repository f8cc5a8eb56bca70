"""What compressing gradients lost, in checkpoints: of each rank by itself, for a program that reduces in the same way.

It belongs to no tensor of the model, but to what one rank sends to others. Under any other plan it starts anew, from
zero, on all ranks: what is lost then is the rounding of one step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.checkpoint.boxes import Piece
from runtime.program import Program, RankProgram

RESIDUAL = "residual."


def way_of(program: Program) -> str:
    """What has to be the same for a rank to have the same residuals; nothing where there are none."""
    if not any(bucket.compression for stage in program.stages for bucket in stage.buckets):
        return ""
    buckets = [[b.model_dump() for b in stage.buckets] for stage in program.stages]
    shapes = {n: (s.shape, s.layout, s.expert_layout, s.zero_axes) for n, s in program.states.items()}
    way = [program.mesh, program.etp, program.zero, program.dp_shard, buckets, sorted(shapes.items())]
    return hashlib.sha256(json.dumps(way).encode()).hexdigest()[:32]


def residual_pieces(rank: RankProgram, residuals: Mapping[str, Tensor]) -> list[Piece]:
    """What this rank writes."""
    return [
        Piece(f"{RESIDUAL}{rank.rank}.{place}", tuple(tensor.shape), (0,), tensor)
        for place, tensor in residuals.items()
    ]


def load_residuals(
    folder: Path, rank: RankProgram, residuals: Mapping[str, Tensor], training: Mapping[str, Any]
) -> None:
    """Fill ``residuals`` with what ``folder`` has for this rank; with zeros, where that was under another plan."""
    if not residuals:
        return
    if training.get("residuals") == way_of(rank.program):
        from runtime.checkpoint.storage import ShardReader

        ShardReader(folder).read(residual_pieces(rank, residuals))
        return
    for tensor in residuals.values():
        tensor.zero_()
