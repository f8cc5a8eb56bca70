"""Matrix products in float32 on a CPU by the faster of torch's two libraries, MKL and oneDNN.

``torch.mm`` calls MKL, which uses AVX-512 on Intel's processors only; on other processors, MKL uses AVX2. oneDNN uses
the widest instructions of any processor. On a Zen 5 core, oneDNN takes 0.45 times as long as MKL for 256 x 256 x 256
and larger products, whether operands are transposed or not, and as long as MKL for 64 x 64 x 256 (measured with torch
2.13). The choice depends on the processor and the sizes alone, so that runs are reproducible bit by bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library

_MIN_MULTIPLICATIONS = 1 << 21  # multiplications from which oneDNN is faster; below, its setup costs more than it saves
PRODUCTS = frozenset(
    (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
)  # operators that choose_product() looks at
_CPU_INFO = Path("/proc/cpuinfo")


def _read_vendor() -> str:
    """Return the vendor of the processor, such as ``AuthenticAMD``; an empty string if it is unknown."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def is_onednn_faster() -> bool:
    """Return whether oneDNN multiplies large float32 matrices faster than ``torch.mm`` does on this machine's
    processor."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _read_vendor() not in ("", "GenuineIntel")
    )


def should_use_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether :func:`multiply`, which uses oneDNN, is faster than ``torch.mm`` for the matrices ``a`` ``[m, k]``
    and ``b`` ``[k, n]``. The result is false if one of them is not float32."""
    return (
        a.dtype == torch.float32 == b.dtype
        and is_onednn_faster()
        and a.shape[0] * a.shape[1] * b.shape[1] >= _MIN_MULTIPLICATIONS
        and min(a.shape) > 1 < b.shape[1]
    )


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of the CPU matrices ``a`` ``[m, k]`` and ``b`` ``[k, n]``, computed by oneDNN, plus ``bias``
    ``[n]`` if it is not ``None``. The operands may have any strides."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return made


def multiply_add(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``bias`` ``[n]`` plus the product of the matrices ``a`` ``[m, k]`` and ``b`` ``[k, n]``, by oneDNN."""
    return multiply(a, b, bias)


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T``, computed by oneDNN, plus ``bias`` ``[n]`` if it is not ``None``. ``x``: ``[..., k]``.
    ``weight``: ``[n, k]``."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return made


def multiply_into(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Add the product of the matrices ``a`` ``[m, k]`` and ``b`` ``[k, n]`` to ``total`` ``[m, n]``, in place: by
    oneDNN if this is faster (only on a CPU), otherwise by torch. ``fresh``: overwrite ``total`` instead of adding to
    it.
    """
    if total.is_cpu and should_use_onednn(a, b):
        made = multiply(a, b)
        if fresh:
            total.copy_(made)
        else:
            total.add_(made)
    elif fresh:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def choose_product(target: Any, operands: tuple[Any, ...]) -> Any:
    """Return a function that computes the ATen operator ``target`` on a CPU faster than torch does, from the same
    arguments; ``None`` if there is none for these operands.

    ``operands``: the operator's tensors: ``(a, b)`` for ``mm``, ``(bias, a, b)`` for ``addmm``, ``(x, weight)`` or
    ``(x, weight, bias)`` for ``linear``. Only their shapes and dtypes are read.
    """
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    if target is torch.ops.aten.mm.default and len(operands) == 2:
        return multiply if should_use_onednn(*operands) else None
    if target is torch.ops.aten.addmm.default and len(operands) == 3 and operands[0].dim() == 1:
        return multiply_add if should_use_onednn(*operands[1:]) else None
    if target is torch.ops.aten.linear.default and operands[1].dim() == 2 and operands[0].numel():
        x, weight = operands[0].flatten(0, -2) if operands[0].dim() > 1 else operands[0][None], operands[1]
        return apply_linear if should_use_onednn(x, weight.t()) else None
    return None


def _fake_multiply(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


# For graphs that are compiled: no other operator of torch calls oneDNN for operands with any strides.
_library.define("multiply(Tensor a, Tensor b) -> Tensor")
_library.impl("multiply", multiply, "CPU")
torch.library.register_fake(f"{NAMESPACE}::multiply", _fake_multiply, lib=_library)
