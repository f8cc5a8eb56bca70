"""Products of matrices in 8-bit floating point with several scales per matrix.

With ``"row"``, every row of both operands (along the summed dim) has a scale in float32, so that its largest magnitude
becomes the largest number of the type. With ``"block"``, every 32 numbers along the summed dim have a scale that is a
power of two, stored as ``float8_e8m0fnu``: the format MXFP8 (Open Compute Project, Microscaling formats
specification 1.0). The scale is rounded up, so that no number is cut off.

GPUs have kernels for both (``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm``). Elsewhere operands are widened
to float32 and multiplied: every product of two 8-bit numbers and its scale is exact in float32, only sums are rounded.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Scaling = Literal["tensor", "row", "block", "nvfp4"]  # the last: 4-bit numbers, see ``passes/ops/nvfp4.py``
BLOCK = 32  # numbers with one scale

_TYPE = torch.float8_e4m3fn
_MIN_MAGNITUDE = 1e-30  # lower limit of a largest magnitude, so that zeros have a scale
_MIN_EXPONENT, _MAX_EXPONENT = -127, 127  # smallest and largest exponent of float8_e8m0fnu


def quantize_rows(x: Tensor, dtype: torch.dtype = _TYPE) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[m, k]`` with each row divided by a scale and rounded to the 8-bit type ``dtype``, and these
    scales ``[m, 1]`` in float32.
    """
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=_MIN_MAGNITUDE) / torch.finfo(dtype).max
    return (wide / scale).to(dtype), scale


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[m, k]`` with every 32 numbers of a row divided by a power of two and rounded to
    ``float8_e4m3fn``, and these powers ``[m, k / 32]`` as ``float8_e8m0fnu``. The scale of a block that is not finite
    is NaN.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2)
    fraction, exponent = torch.frexp(largest.clamp(min=_MIN_MAGNITUDE) / torch.finfo(_TYPE).max)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # rounded up: 0.5 * 2^e is the power 2^(e - 1) itself
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(_MIN_EXPONENT, _MAX_EXPONENT))
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (blocks / scale.unsqueeze(2)).to(_TYPE).flatten(1), scale.to(torch.float8_e8m0fnu)


def widen(values: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers in float32 that the 8-bit ``values`` ``[m, k]`` stand for. ``scale``: ``[m, n]``, the scales
    of the ``n`` equal parts of each row."""
    parts = values.float().unflatten(1, (scale.shape[1], -1))
    found: Tensor = (parts * scale.float().unsqueeze(2)).flatten(1)
    return found


def multiply_scaled(left: Tensor, right: Tensor, scaling: str, bias: Tensor | None, exact: bool) -> Tensor:
    """Return ``left @ right.T``, plus ``bias`` if given, in the type of ``left``, computed with operands that are
    rounded to 8 bits.

    ``left`` ``[m, k]``, ``right`` ``[n, k]``. ``scaling``: ``"row"`` or ``"block"``. ``exact``: accumulate in full
    float32, which gradients need.
    """
    quantize = quantize_rows if scaling == "row" else quantize_blocks
    (a, of_a), (b, of_b) = quantize(left.contiguous()), quantize(right.contiguous())
    if not a.is_cuda:
        product = (widen(a, of_a) @ widen(b, of_b).t()).to(left.dtype)
    elif scaling == "row":  # this kernel returns bfloat16 alone
        product = torch._scaled_mm(a, b.t(), of_a, of_b.t(), out_dtype=torch.bfloat16, use_fast_accum=not exact)
    else:
        product = _multiply_blocks(a, b, of_a, of_b)
    product = product.to(left.dtype)
    return product if bias is None else product + bias


def multiply_grouped_rows(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows (tokens) of each expert ``i``, ``rows[ends[i - 1]:ends[i]]``, by its matrix ``weight[i]``, and
    return the products ``[t, n]``. Both operands are rounded to 8 bits, with a scale for each row along the summed dim.

    ``rows`` ``[t, k]`` are sorted by expert; ``weight`` ``[e, k, n]``; ``ends`` ``[e]``, int32: the end of each
    expert's rows. Rows of the result behind the last end are undefined.
    """
    experts, inner, out = weight.shape
    a, of_a = quantize_rows(rows.contiguous())
    b, of_b = quantize_rows(weight.transpose(1, 2).reshape(experts * out, inner))
    if a.is_cuda:
        matrices, scales = b.view(experts, out, inner).transpose(1, 2), (of_a.squeeze(1), of_b.view(experts, out))
        return torch._scaled_grouped_mm(a, matrices, *scales, offs=ends, out_dtype=torch.bfloat16).to(rows.dtype)
    wide, of_experts = widen(a, of_a), widen(b, of_b).view(experts, out, inner)
    made = rows.new_empty(len(rows), out)
    start = 0
    for matrix, end in zip(of_experts, ends.tolist(), strict=True):
        made[start:end] = (wide[start:end] @ matrix.t()).to(rows.dtype)
        start = end
    return made


def _multiply_blocks(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """Return ``a @ b.T`` in bfloat16 by the GPU's MXFP8 kernel. ``a`` ``[m, k]``, ``b`` ``[n, k]``: 8-bit numbers.
    ``of_a``, ``of_b``: the scales of their blocks."""
    scales = swizzle_scales(of_a), swizzle_scales(of_b)
    functional: Any = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):  # before torch 2.10
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    found: Tensor = functional.scaled_mm(
        a, b.t(), scales[0], recipe, scales[1], recipe, order, order, output_dtype=torch.bfloat16
    )
    return found


def swizzle_scales(scale: Tensor) -> Tensor:
    """Return ``scale`` ``[m, n]``, the scales of a matrix's blocks in an 8-bit type, as a vector in the order in which
    the GPU's kernel reads them.

    The scales are padded to multiples of 128 rows and 4 columns, and cut into tiles of this size. In a tile, row ``r``
    is at ``16 * (r % 32) + 4 * (r // 32)`` (cuBLAS documentation, layout of 1D block scaling factors).
    """
    rows, columns = scale.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(tall * 128, wide * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)  # [row tiles, column tiles, 32, 4, 4]
    return tiles.reshape(-1).view(scale.dtype)


__all__ = [
    "BLOCK",
    "Scaling",
    "multiply_grouped_rows",
    "multiply_scaled",
    "quantize_blocks",
    "quantize_rows",
    "swizzle_scales",
    "widen",
]
