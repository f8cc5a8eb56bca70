"""Factorisations and solutions: each matrix by itself, whole; what stands before a matrix's two dims passes through."""

from __future__ import annotations

from torch import fx

from passes.rules.algebra import NAMES, OpFactors, everything_whole, named, operands_of, results_of, shape
from passes.rules.registry import family

_MATRIX = 2  # dims


@family(
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky", "cholesky_inverse",
    "cholesky_solve", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular",
)  # fmt: skip
def by_matrix(node: fx.Node) -> OpFactors:
    """Operands and results that are all of the same matrices; otherwise whole."""
    operands = [shape(o) for o in operands_of(node)]
    results = [tuple(r.shape) for r in results_of(node)]
    first = max(operands, key=len)
    outer = first[:-_MATRIX]
    if any(tuple(s[: len(outer)]) != tuple(outer) for s in (*operands, *results)):
        return everything_whole(node)
    names = NAMES[: len(outer)]

    def pattern(sizes: tuple[int, ...]) -> list[str | None]:
        return [*names, *[None] * (len(sizes) - len(outer))]

    return named(node, [pattern(tuple(s)) for s in operands], [pattern(s) for s in results])
