"""Products of matrices in 8-bit and 4-bit floating point with several scales per matrix.

With ``"row"``, every row of both operands (along the summed dim) has a scale in float32, so that its largest magnitude
becomes the largest number of the dtype. With ``"block"``, every 32 numbers along the summed dim have a scale that is a
power of two, stored as ``float8_e8m0fnu``: the format MXFP8 (Open Compute Project, Microscaling formats specification
1.0). The scale is rounded up, so that no number is cut off.

With ``"nvfp4"``, there are two levels of scales. A number is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign (E2M1).
Each block of 16 numbers has a scale in ``float8_e4m3fn``, and each tensor has a scale in float32. The recipe is
NVIDIA's for training (arXiv 2509.25149):

- Blocks are 16 numbers along the summed dim. Blocks of a weight are 16 x 16 numbers, so that forward and backward
  multiply by the same rounded weight.
- Gradients are rounded up or down at random, with the distance to the two neighbours as probability, so that the
  rounded gradient is right on average. Everything else is rounded to the nearest number.
- For the gradient of a weight, both operands are multiplied by an orthogonal matrix along the summed dim, a Hadamard
  matrix of 16 x 16 with fixed random signs. It spreads large numbers over their block, and cancels in the product.

The random numbers are a function of the gradient's position and of the sum of all its bits: equal gradients are rounded
equally, and no state is needed.

GPUs have kernels for all of these formats (``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm``). On other
devices, operands are widened to float32 and multiplied. Products of two 8-bit numbers and their scale are exact in
float32, and only sums are rounded; in NVFP4 the product of scales is rounded, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton

Scaling = Literal["tensor", "row", "block", "nvfp4"]  # "nvfp4": 4-bit numbers
BLOCK = 32  # numbers that share a scale in MXFP8

_TYPE = torch.float8_e4m3fn
_MIN_MAGNITUDE = 1e-30  # lower limit of a largest magnitude, so that zeros have a scale
_MIN_EXPONENT, _MAX_EXPONENT = -127, 127  # smallest and largest exponent of float8_e8m0fnu

NUMBERS = 16  # numbers in a row of an NVFP4 block
BITS = 4.5  # bits per NVFP4 number, including its share of the block's scale

Operand = Literal["numbers", "weight", "gradient"]

_LARGEST = 6.0  # largest number of E2M1
_LARGEST_SCALE = 448.0  # largest number of float8_e4m3fn
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = 0b1011001110100101  # signs of the rows of the Hadamard matrix: a set bit is a minus
_MIX = (-1640531535, -2048144789, -1028477379)  # odd factors that mix the bits of an integer (as in MurmurHash3)


def quantize_rows(x: Tensor, dtype: torch.dtype = _TYPE) -> tuple[Tensor, Tensor]:
    """Return two tensors: ``x`` ``[m, k]`` with each row divided by a scale and rounded to the 8-bit dtype ``dtype``;
    and the scales ``[m, 1]`` in float32."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=_MIN_MAGNITUDE) / torch.finfo(dtype).max
    return (wide / scale).to(dtype), scale


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors: ``x`` ``[m, k]`` with every 32 numbers of a row divided by a power of two (the scale) and
    rounded to ``float8_e4m3fn``; and the scales ``[m, k / 32]`` as ``float8_e8m0fnu``. The scale of a block with a
    non-finite number is NaN."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2)
    fraction, exponent = torch.frexp(largest.clamp(min=_MIN_MAGNITUDE) / torch.finfo(_TYPE).max)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # rounded up: 0.5 * 2^e is the power 2^(e - 1) itself
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(_MIN_EXPONENT, _MAX_EXPONENT))
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (blocks / scale.unsqueeze(2)).to(_TYPE).flatten(1), scale.to(torch.float8_e8m0fnu)


def widen(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values`` ``[m, k]``, quantised to 8 bits, multiplied by their scales, in float32. ``scale``: ``[m, n]``,
    the scales of the ``n`` equal parts of each row."""
    parts = values.float().unflatten(1, (scale.shape[1], -1))
    found: Tensor = (parts * scale.float().unsqueeze(2)).flatten(1)
    return found


def multiply_scaled(left: Tensor, right: Tensor, scaling: str, bias: Tensor | None, exact: bool) -> Tensor:
    """Return ``left @ right.T``, plus ``bias`` if it is not ``None``, in the dtype of ``left``, with operands rounded
    to 8 bits.

    ``left`` ``[m, k]``, ``right`` ``[n, k]``. ``scaling``: ``"row"`` or ``"block"``. ``exact``: whether to accumulate
    in full float32, which gradients need.
    """
    quantize = quantize_rows if scaling == "row" else quantize_blocks
    (a, of_a), (b, of_b) = quantize(left.contiguous()), quantize(right.contiguous())
    if not a.is_cuda:
        product = (widen(a, of_a) @ widen(b, of_b).t()).to(left.dtype)
    elif scaling == "row":  # this kernel returns only bfloat16
        product = torch._scaled_mm(a, b.t(), of_a, of_b.t(), out_dtype=torch.bfloat16, use_fast_accum=not exact)
    else:
        product = _multiply_blocks(a, b, of_a, of_b)
    product = product.to(left.dtype)
    return product if bias is None else product + bias


def multiply_grouped_rows(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows (tokens) of each expert ``i``, ``rows[ends[i - 1]:ends[i]]``, by its matrix ``weight[i]``, and
    return the products ``[t, n]``. Both operands are rounded to 8 bits, with a scale for each row along the summed dim.

    ``rows`` ``[t, k]`` are sorted by expert; ``weight`` ``[e, k, n]``; ``ends`` ``[e]``, int32: the end of each
    expert's rows. Rows of the result after the last end are undefined.
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
    """Return ``a @ b.T`` in bfloat16, computed by the GPU's MXFP8 kernel. ``a`` ``[m, k]``, ``b`` ``[n, k]``: quantised
    to 8 bits. ``of_a``, ``of_b``: the scales of their blocks, ``[m, k / 32]`` and ``[n, k / 32]``."""
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
    """Return ``scale`` ``[m, n]``, the 8-bit scales of a matrix's blocks, as a vector in the order in which the GPU's
    kernel reads them.

    The scales are padded to multiples of 128 rows and 4 columns, and cut into tiles of this size. In a tile, row ``r``
    is at ``16 * (r % 32) + 4 * (r // 32)`` (cuBLAS documentation, layout of 1D block scaling factors).
    """
    rows, columns = scale.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(tall * 128, wide * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)  # [row tiles, column tiles, 32, 4, 4]
    return tiles.reshape(-1).view(scale.dtype)


class Nvfp4Matrix(NamedTuple):
    """A matrix ``[m, k]`` in NVFP4. ``values`` ``[m, k / 2]``, uint8: two numbers in a byte, the first in the lower
    half. ``scales`` ``[m, k / 16]``, ``float8_e4m3fn``: the scale of each block. ``scale``, float32: the scale of the
    whole tensor."""

    values: Tensor
    scales: Tensor
    scale: Tensor


class _Tables(NamedTuple):
    """Constants of NVFP4 on a device. ``levels``: the 15 numbers of E2M1, sorted. ``gaps``: the distance from each
    level to the next. ``limits``: for each level but the first, the smallest number that is rounded to it. ``codes``:
    the bits of each level. ``numbers`` ``[16]``: the number of each code. ``hadamard`` ``[16, 16]``: the orthogonal
    matrix."""

    levels: Tensor
    gaps: Tensor
    limits: Tensor
    codes: Tensor
    numbers: Tensor
    hadamard: Tensor


@cache
def _tables(device: str) -> _Tables:
    positive = torch.tensor(_LEVELS)
    levels = torch.cat([-positive.flip(0)[:-1], positive])
    middles = (levels[1:] + levels[:-1]) / 2
    # Codes of magnitudes alternate between even and odd. A tie goes to the even one: downwards if the lower is even.
    last = len(_LEVELS) - 1
    lower_is_even = (torch.arange(len(middles)) - last) % 2 == 0
    limits = torch.where(lower_is_even, torch.nextafter(middles, torch.tensor(torch.inf)), middles)
    codes = torch.cat([torch.arange(last, 0, -1) + len(_LEVELS), torch.arange(len(_LEVELS))]).to(torch.uint8)
    matrix = torch.ones(1, 1)
    while len(matrix) < NUMBERS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([-1.0 if _SIGNS >> row & 1 else 1.0 for row in range(NUMBERS)])
    found = _Tables(
        levels,
        torch.cat([levels[1:] - levels[:-1], torch.ones(1)]),
        limits,
        codes,
        torch.cat([positive, -positive]),
        signs[:, None] * matrix / NUMBERS**0.5,
    )
    return _Tables(*(table.to(device) for table in found))


def rotate(x: Tensor) -> Tensor:
    """Return ``x`` ``[m, k]`` in float32 with every 16 numbers of a row multiplied by the Hadamard matrix with random
    signs. The matrix is orthogonal, so ``rotate(a) @ rotate(b).T`` equals ``a @ b.T``."""
    rotated: Tensor = (x.float().view(-1, NUMBERS) @ _tables(str(x.device)).hadamard).view(x.shape)
    return rotated


def round_to_nvfp4(x: Tensor, operand: Operand) -> Nvfp4Matrix:
    """Return ``x`` ``[m, k]`` in NVFP4, with blocks along ``k``. ``operand``: the role of ``x``. A ``"weight"`` has
    blocks of 16 x 16; a ``"gradient"`` is rounded up or down at random; ``"numbers"``, any other operand, are rounded
    to the nearest.

    ``k`` must be a multiple of 16, and for a weight also ``m``. On GPUs the function is compiled.
    """
    tall = NUMBERS if operand == "weight" else 1
    run = _compiled_rounding() if x.is_cuda and has_triton() else _round_blocks
    return Nvfp4Matrix(*run(x, _tables(str(x.device)), tall, operand == "gradient"))


@cache
def _compiled_rounding() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_round_blocks, dynamic=True)


def _round_blocks(x: Tensor, tables: _Tables, tall: int, at_random: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, block scales and tensor scale of ``x`` ``[m, k]`` in NVFP4 (see :class:`Nvfp4Matrix`).
    ``tables``: the constants on the device of ``x``. ``tall``: the number of rows of a block. ``at_random``: if true,
    round up or down at random; if false, to the nearest."""
    rows, columns = x.shape
    blocks = x.view(rows // tall, tall, columns // NUMBERS, NUMBERS)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3), dtype=torch.float32)
    scale = largest.amax().clamp(min=_MIN_MAGNITUDE) / (_LARGEST * _LARGEST_SCALE)
    scales = (largest / (_LARGEST * scale)).to(torch.float8_e4m3fn)
    wide = scales.float() * scale
    factor = torch.where(wide == 0, 0.0, wide.reciprocal())  # a block far smaller than the tensor's largest is zero
    made = blocks * factor[:, None, :, None]
    if at_random:
        made = made.clamp(-_LARGEST, _LARGEST)
        level = torch.bucketize(made, tables.levels[1:], out_int32=True, right=True)
        chance = _draw_by_bits(x).view_as(made) * tables.gaps[level]
        level = level + (chance < made - tables.levels[level])
    else:
        level = torch.bucketize(made, tables.limits, out_int32=True, right=True)
    codes = tables.codes[level].view(rows, columns)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.repeat_interleave(tall, 0) if tall > 1 else scales, scale


def _draw_by_bits(x: Tensor) -> Tensor:
    """Return a float32 random number in [0, 1) for each number of ``x``: a function of its position and of the bits of
    all numbers of ``x``."""
    seed = x.view(torch.int32 if x.element_size() == 4 else torch.int16).sum(dtype=torch.int64)
    state = torch.arange(x.numel(), dtype=torch.int32, device=x.device) + seed.to(torch.int32)
    state = state * _MIX[0]
    for factor in _MIX[1:]:
        state = (state ^ (state >> 15 & 0x1FFFF)) * factor
    return (state >> 8 & 0xFFFFFF).float() * 2.0**-24


def widen_nvfp4(rounded: Nvfp4Matrix) -> Tensor:
    """Return the matrix ``rounded`` converted to float32, ``[m, k]``."""
    values, numbers = rounded.values, _tables(str(rounded.values.device)).numbers
    codes = torch.stack([values & 15, values >> 4], 2).view(len(values), -1, NUMBERS)
    wide: Tensor = (numbers[codes.int()] * (rounded.scales.float() * rounded.scale)[:, :, None]).flatten(1)
    return wide


def multiply_nvfp4(left: Tensor, right: Tensor, operands: tuple[Operand, Operand], rotated: bool) -> Tensor:
    """Return ``left @ right.T`` in the dtype of ``left``, computed with operands rounded to NVFP4. ``left`` ``[m, k]``,
    ``right`` ``[n, k]``. ``operands``: the roles of the two: ``"weight"``, ``"gradient"`` or ``"numbers"``.
    ``rotated``: whether to multiply both by the Hadamard matrix first."""
    given = (rotate(x.contiguous()) if rotated else x.contiguous() for x in (left, right))
    a, b = (round_to_nvfp4(x, operand) for x, operand in zip(given, operands, strict=True))
    product = _multiply_on_gpu(a, b) if left.is_cuda else widen_nvfp4(a) @ widen_nvfp4(b).t()
    return product.to(left.dtype)


def _multiply_on_gpu(a: Nvfp4Matrix, b: Nvfp4Matrix) -> Tensor:
    """Return ``a @ b.T`` in bfloat16 by the GPU's NVFP4 kernel. ``a`` ``[m, k]``, ``b`` ``[n, k]``."""
    functional: Any = torch.nn.functional
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    order = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    left, right = (each.values.view(torch.float4_e2m1fn_x2) for each in (a, b))
    of_left, of_right = ([swizzle_scales(each.scales), each.scale] for each in (a, b))
    found: Tensor = functional.scaled_mm(
        left, right.t(), of_left, recipe, of_right, recipe, order, order, output_dtype=torch.bfloat16
    )
    return found


__all__ = [
    "BITS",
    "BLOCK",
    "NUMBERS",
    "Nvfp4Matrix",
    "Operand",
    "Scaling",
    "multiply_grouped_rows",
    "multiply_nvfp4",
    "multiply_scaled",
    "quantize_blocks",
    "quantize_rows",
    "rotate",
    "round_to_nvfp4",
    "swizzle_scales",
    "widen",
    "widen_nvfp4",
]
