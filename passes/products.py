"""Which operators are products: their work is more than a few operations for each element of their operands."""

from __future__ import annotations

_PRODUCTS = (
    "mm",
    "bmm",
    "linear",
    "matmul",
    "einsum",
    "conv",
    "scaled_dot_product",
    "addmm",
    "bilinear",
    "grouped_mm",
    "band_attention",
)


def is_product_name(name: str) -> bool:
    """Whether the operator ``name``, without a namespace, is a product."""
    return any(product in name for product in _PRODUCTS)
