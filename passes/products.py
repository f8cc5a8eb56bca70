"""Names of product operators: matrix products, convolutions and attention.

A product does more than a few operations per element of its operands, so it dominates the cost of a graph.
"""

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
    "document_attention",
    "scored_attention",
)


def is_product_name(name: str) -> bool:
    """Return whether ``name`` is the name of a matrix product, a convolution or an attention.

    ``name``: an operator name without its namespace, such as ``addmm``.
    """
    return any(product in name for product in _PRODUCTS)
