"""Products with weights in 8 bits: operands in ``float8_e4m3fn``, gradients in ``float8_e5m2``.

Requires: blocks whose products are ``aten.linear`` of a state. Provides: ``partition::linear_fp8`` in their place where
kernels take it. Each tensor is scaled by its own largest number, found anew every time (Micikevicius et al. 2022, FP8
formats for deep learning), and what comes out is in the type that it had. What is not finite stays so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.blocks import Block
from passes.collectives import NAMESPACE, _library

aten = torch.ops.aten
ALIGNED = 16  # rows and columns of both operands of a product, of which the kernels take multiples
_NUMBERS, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_SHORT = (torch.bfloat16, torch.float16)
_LEAST = 1e-30  # of a largest number: tensors of zeros have a scale too


def _scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in 8 bits, and the number that it was divided by."""
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=_LEAST) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def _product(left: Tensor, right: Tensor, kinds: tuple[torch.dtype, torch.dtype], *, exact: bool) -> Tensor:
    """``left @ right.T``, both in rows of what is added up. ``exact``: sums in full float32, as gradients want them."""
    a, of_a = _scaled(left, kinds[0])
    b, of_b = _scaled(right, kinds[1])
    product: Tensor = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), of_a, of_b, out_dtype=left.dtype, use_fast_accum=not exact
    )
    return product


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def linear_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, with both rounded to 8 bits; ``x[..., in]``, ``weight[out, in]``."""
    product = _product(_rows(x), weight, (_NUMBERS, _NUMBERS), exact=False)
    return product.view(*x.shape[:-1], weight.shape[0])


def linear_fp8_input(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ``x``."""
    product = _product(_rows(grad), weight.t(), (_GRADIENTS, _NUMBERS), exact=True)
    return product.view(*grad.shape[:-1], weight.shape[1])


def linear_fp8_weight(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``weight``."""
    return _product(_rows(grad).t(), _rows(x).t(), (_GRADIENTS, _NUMBERS), exact=True)


_library.define("linear_fp8(Tensor x, Tensor weight) -> Tensor")
_library.define("linear_fp8_input(Tensor grad, Tensor weight) -> Tensor")
_library.define("linear_fp8_weight(Tensor grad, Tensor x) -> Tensor")
for _device in ("CPU", "CUDA"):
    for _function in (linear_fp8, linear_fp8_input, linear_fp8_weight):
        _library.impl(_function.__name__, _function, _device)
ops = torch.ops.partition


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _empty_input(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _empty_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[-1], x.shape[-1])


for _name, _fake in (("", _empty), ("_input", _empty_input), ("_weight", _empty_weight)):
    torch.library.register_fake(f"{NAMESPACE}::linear_fp8{_name}", _fake, lib=_library)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x = ops.linear_fp8_input(grad, weight) if ctx.needs_input_grad[0] else None
    of_weight = ops.linear_fp8_weight(grad, x) if ctx.needs_input_grad[1] else None
    return of_x, of_weight


torch.library.register_autograd(f"{NAMESPACE}::linear_fp8", _backward, setup_context=_setup, lib=_library)


def in_eight_bits(block: Block) -> int:
    """Put ``linear_fp8`` where ``block`` multiplies by a state, in place; how many products that are."""
    states = set(block.placeholders[: len(block.states)])
    found = [node for node in block.graph.nodes if node.target is aten.linear.default and _fits(node, states)]
    for node in found:
        node.target = ops.linear_fp8.default
    return len(found)


def as_it_was(block: Block) -> None:
    """The products of :func:`in_eight_bits` as they were, in place."""
    for node in block.graph.nodes:
        if node.target is ops.linear_fp8.default:
            node.target = aten.linear.default


def _fits(node: fx.Node, states: set[fx.Node]) -> bool:
    if len(node.args) != 2 or node.args[1] not in states:
        return False
    x, weight = (o.meta["val"] for o in node.args if isinstance(o, fx.Node))
    sizes = x.numel() // max(1, x.shape[-1]), *weight.shape
    return x.dtype in _SHORT and weight.dtype == x.dtype and all(size and size % ALIGNED == 0 for size in sizes)


__all__ = ["ALIGNED", "as_it_was", "in_eight_bits", "linear_fp8", "linear_fp8_input", "linear_fp8_weight"]
