"""Find the number format that most of a program's weights have."""

from __future__ import annotations

import math
from collections import Counter

from partitioner.runtime.program.program import Program

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def common_precision(program: Program) -> str:
    """Return the number format of most weight elements of ``program``: ``"bf16"``, ``"fp16"``, ``"fp32"`` or
    ``"fp64"``; ``"fp32"`` if there are no weights."""
    weights: Counter[str] = Counter()
    for state in program.states.values():
        if state.kind == "parameter":
            weights[_PRECISIONS.get(state.dtype, "fp32")] += math.prod(state.shape)
    return weights.most_common(1)[0][0] if weights else "fp32"
