"""Sharding rules: which dims of an operator's tensors may be sharded, and the layouts of the results.

Each module has the rules of related operators. Users add their own rules with :func:`rule`, and declare operators that
multiply rows by their expert's matrix with :func:`by_expert` and :func:`by_group`.
"""

from __future__ import annotations

from partitioner.passes.ops.experts import by_expert, by_group
from partitioner.passes.rules import attention, indexing, loss, pointwise, products, reduction, reshape, slicing
from partitioner.passes.rules.factors import LocalBuilder, Lowering, OpFactors, Spans
from partitioner.passes.rules.registry import build_call_key, factors_of, has_rule, rule

__all__ = [
    "LocalBuilder",
    "Lowering",
    "OpFactors",
    "Spans",
    "build_call_key",
    "by_expert",
    "by_group",
    "factors_of",
    "has_rule",
    "rule",
]

FAMILIES = (attention, products, pointwise, indexing, loss, reduction, slicing, reshape)
