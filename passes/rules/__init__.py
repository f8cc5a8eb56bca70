"""Factor rules: how each operator may be sharded. One file per family; users add theirs with :func:`rule`, and tell of
operators that work by expert with :func:`by_expert` and :func:`by_group`."""

from __future__ import annotations

from passes.ops.experts import by_expert, by_group
from passes.rules import attention, indexing, loss, pointwise, products, reduction, reshape, slicing
from passes.rules import attention as collective
from passes.rules import attention as experts
from passes.rules import pointwise as creation
from passes.rules import products as convolution
from passes.rules import products as linalg
from passes.rules import reduction as normalisation
from passes.rules.factors import Local, Lowering, OpFactors, Spans
from passes.rules.registry import factors_of, has_rule, rule

__all__ = ["Local", "Lowering", "OpFactors", "Spans", "by_expert", "by_group", "factors_of", "has_rule", "rule"]

FAMILIES = (
    attention, collective, products, convolution, creation, experts, indexing, linalg, loss, normalisation, slicing,
    pointwise, reduction, reshape,
)  # fmt: skip
