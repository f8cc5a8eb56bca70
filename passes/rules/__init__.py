"""Factor rules, which say which dims of an operator's tensors may be sharded, and what the results then are.

Each module has the rules of related operators. Users add their own rules with :func:`register_rule`, and declare
operators that multiply rows by their expert's matrix with :func:`register_row_product` and
:func:`register_grouped_product`."""

from __future__ import annotations

from partitioner.passes.ops.experts import register_grouped_product, register_row_product
from partitioner.passes.rules import attention, indexing, loss, pointwise, products, reduction, reshape, slicing
from partitioner.passes.rules.factors import LocalBuilder, Lowering, OpFactors, Spans
from partitioner.passes.rules.registry import factors_of, has_rule, register_rule

__all__ = [
    "LocalBuilder",
    "Lowering",
    "OpFactors",
    "Spans",
    "factors_of",
    "has_rule",
    "register_grouped_product",
    "register_row_product",
    "register_rule",
]

FAMILIES = (attention, products, pointwise, indexing, loss, reduction, slicing, reshape)
