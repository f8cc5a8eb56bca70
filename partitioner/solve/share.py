"""How much of the matrix-multiply work a sharding divides over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from passes.factors import factors_of, operands_of, results_of

Shape = tuple[int, ...]


def _contraction(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[0][-1]


def _with_addend(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[1][-1]


def _batches_added(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[1][0] * operands[1][-1]


def _attention(operands: list[Shape], result: Shape) -> float:
    query, key = operands[0], operands[1]
    return 2.0 * key[-2] * (math.prod(query) + math.prod(result))


def _convolution(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * math.prod(operands[1][1:])


# Floating-point operations of one call, from the shapes of its operands and of its first result.
FLOPS: dict[str, Callable[[list[Shape], Shape], float]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "matmul"), _contraction),
    **dict.fromkeys(("_grouped_mm", "partition::expert_mm"), _contraction),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _with_addend),
    "addbmm": _batches_added,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("partition::band_attention", "partition::context_attention"), _attention),
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
}


def matmul_flops(node: fx.Node) -> float:
    """Multiplications and additions of one call of a matrix product; 0 for any other operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    name = node.target._schema.name.removeprefix("aten::")
    if name == "einsum":
        factors = factors_of(node)
        return 0.0 if factors is None else 2.0 * math.prod(factors.sizes.values())
    if name not in FLOPS:
        return 0.0
    operands = [_shape(o.meta["val"]) for o in operands_of(node)]
    return FLOPS[name](operands, _shape(results_of(node)[0]))


def _shape(value: Tensor) -> Shape:
    return tuple(value.shape)
