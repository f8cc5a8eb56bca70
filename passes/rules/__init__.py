"""Factor rules: how each operator may be sharded. One file per family; users add theirs with :func:`rule`, and tell of
operators that work by expert with :func:`by_expert` and :func:`by_group`."""

from passes.experts import by_expert, by_group
from passes.rules import (
    attention,
    collective,
    contraction,
    convolution,
    creation,
    experts,
    indexing,
    linalg,
    loss,
    normalisation,
    pieces,
    pointwise,
    reduction,
    reshape,
)
from passes.rules.algebra import Local, Lowering, OpFactors, Spans
from passes.rules.registry import factors_of, has_rule, rule

__all__ = ["Local", "Lowering", "OpFactors", "Spans", "by_expert", "by_group", "factors_of", "has_rule", "rule"]

FAMILIES = (
    attention, collective, contraction, convolution, creation, experts, indexing, linalg, loss, normalisation, pieces,
    pointwise, reduction, reshape,
)  # fmt: skip
