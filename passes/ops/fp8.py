"""Matrix products with weights in 8-bit floating point.

Requires: blocks with the operators of one rank, after the last :func:`partitioner.passes.shard.shard_block.fuse_bias`.
Provides: ``partition::linear_fp8`` in place of ``linear``, ``mm``, ``matmul`` and ``addmm`` with a two-dimensional
parameter, if the kernels support it (:func:`can_multiply_in_fp8`, which the planner's cost model uses, too).

With the scaling ``"tensor"``, operands are ``float8_e4m3fn`` and gradients ``float8_e5m2``, and each tensor is scaled
by its own largest magnitude, computed at every use (Micikevicius et al. 2022, FP8 formats for deep learning). With
``"row"`` and ``"block"``, operands and gradients are ``float8_e4m3fn`` with several scales per tensor. With
``"nvfp4"``, they are 4-bit numbers (``passes/ops/scaled_products.py``); the operators keep the name ``fp8``, which
saved plans contain. The result has the dtype of the unquantised operands. Non-finite operands give non-finite results.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import NAMESPACE, _library
from partitioner.passes.ir.model import Block
from partitioner.passes.ops import experts as _experts  # noqa: F401  # registers the products of experts
from partitioner.passes.ops.scaled_products import BLOCK, Operand, multiply_nvfp4, multiply_scaled

aten = torch.ops.aten

ALIGNED = 16  # the kernels need rows and columns that are multiples of this
_NUMBERS, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_OPERANDS: dict[torch.dtype, Operand] = {_NUMBERS: "numbers", _GRADIENTS: "gradient"}
_SHORT = (torch.bfloat16, torch.float16)
_CHOICES = (aten.topk.default, aten.argmax.default, aten.sort.default, aten.sort.stable)
_MIN_MAGNITUDE = 1e-30  # lower limit of a largest magnitude, so that a tensor of zeros has a scale


def _quantize_to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors: ``x`` divided by a scale and rounded to the 8-bit dtype ``dtype``, and this scale
    (0-dimensional, float32). The scale maps the largest magnitude in ``x`` to the largest number of ``dtype``."""
    largest = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
    scale = largest.clamp(min=_MIN_MAGNITUDE) / torch.finfo(dtype).max
    return (x * scale.reciprocal()).to(dtype), scale


def _multiply_in_fp8(
    left: Tensor,
    right: Tensor,
    kinds: tuple[torch.dtype, torch.dtype],
    *,
    exact: bool,
    bias: Tensor | None = None,
    scaling: str = "tensor",
    weight: bool = True,
) -> Tensor:
    """Return ``left @ right.T``, plus ``bias`` if it is not ``None``, in the dtype of ``left``, with operands rounded
    to 8 bits (4 bits if ``scaling`` is ``"nvfp4"``).

    ``left`` ``[m, k]``, ``right`` ``[n, k]``. ``kinds``: the 8-bit dtypes of the two operands with ``scaling``
    ``"tensor"``; with ``"nvfp4"``, ``float8_e5m2`` marks an operand that is a gradient. ``exact``: whether to
    accumulate in full float32, which gradients need. ``scaling``: ``"tensor"``, ``"row"``, ``"block"`` or ``"nvfp4"``.
    ``weight``: true if ``right`` is a weight; false if the product is the gradient of a weight.
    """
    if scaling == "nvfp4":
        of_left, of_right = (_OPERANDS[kind] for kind in kinds)
        short = multiply_nvfp4(left, right, (of_left, "weight" if weight else of_right), rotated=not weight)
        return short if bias is None else short + bias
    if scaling != "tensor":
        return multiply_scaled(left, right, scaling, bias, exact)
    a, of_a = _quantize_to_fp8(left, kinds[0])
    b, of_b = _quantize_to_fp8(right, kinds[1])
    product: Tensor = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), of_a, of_b, bias=bias, out_dtype=left.dtype, use_fast_accum=not exact
    )
    return product


def _flatten_to_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def linear_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False, scaling: str = "tensor"
) -> Tensor:
    """Return ``x @ weight.T``, plus ``bias`` if it is not ``None``, with ``x`` ``[..., in]`` and ``weight`` ``[out,
    in]`` rounded to 8 bits. ``bias``: ``[out]``.

    ``transposed``: if true, ``weight`` is ``[in, out]`` and the product is ``x @ weight``. ``scaling``: which numbers
    share a scale: all of a ``"tensor"``, a ``"row"``, a ``"block"`` of 32; ``"nvfp4"``: a block of 16 4-bit numbers.
    """
    rows, kinds = weight.t() if transposed else weight, (_NUMBERS, _NUMBERS)
    product = _multiply_in_fp8(_flatten_to_rows(x), rows, kinds, exact=False, bias=bias, scaling=scaling)
    return product.view(*x.shape[:-1], rows.shape[0])


def linear_fp8_input(grad: Tensor, weight: Tensor, transposed: bool = False, scaling: str = "tensor") -> Tensor:
    """Return the gradient of ``x`` in a linear layer ``x @ weight.T``, with both operands rounded to 8 bits.

    ``grad`` ``[..., out]``: the gradient of the layer's result. ``weight``: ``[out, in]``, or ``[in, out]`` if
    ``transposed``. ``scaling``: see :func:`linear_fp8`.
    """
    rows = weight if transposed else weight.t()
    kinds = _GRADIENTS, _NUMBERS
    product = _multiply_in_fp8(_flatten_to_rows(grad), rows, kinds, exact=True, scaling=scaling)
    return product.view(*grad.shape[:-1], rows.shape[0])


def linear_fp8_weight(grad: Tensor, x: Tensor, transposed: bool = False, scaling: str = "tensor") -> Tensor:
    """Return the gradient of ``weight`` in a linear layer ``x @ weight.T``, with both operands rounded to 8 bits.

    ``grad`` ``[..., out]``: the gradient of the layer's result. ``x`` ``[..., in]``: its input. ``transposed``: whether
    ``weight`` and its gradient are ``[in, out]`` instead of ``[out, in]``. ``scaling``: see :func:`linear_fp8`.
    """
    left, right = _flatten_to_rows(grad).t(), _flatten_to_rows(x).t()
    if transposed:
        return _multiply_in_fp8(right, left, (_NUMBERS, _GRADIENTS), exact=True, scaling=scaling, weight=False)
    return _multiply_in_fp8(left, right, (_GRADIENTS, _NUMBERS), exact=True, scaling=scaling, weight=False)


_HOW = 'bool transposed=False, str scaling="tensor"'
_library.define(f"linear_fp8(Tensor x, Tensor weight, Tensor? bias=None, {_HOW}) -> Tensor")
_library.define(f"linear_fp8_input(Tensor grad, Tensor weight, {_HOW}) -> Tensor")
_library.define(f"linear_fp8_weight(Tensor grad, Tensor x, {_HOW}) -> Tensor")
for _device in ("CPU", "CUDA"):
    for _function in (linear_fp8, linear_fp8_input, linear_fp8_weight):
        _library.impl(_function.__name__, _function, _device)
ops = torch.ops.partition


def _make_fake_output(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False, scaling: str = "tensor"
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 0])


def _make_empty_input(grad: Tensor, weight: Tensor, transposed: bool = False, scaling: str = "tensor") -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[0 if transposed else 1])


def _make_empty_weight(grad: Tensor, x: Tensor, transposed: bool = False, scaling: str = "tensor") -> Tensor:
    out, inner = grad.shape[-1], x.shape[-1]
    return grad.new_empty(inner, out) if transposed else grad.new_empty(out, inner)


for _name, _fake in (("", _make_fake_output), ("_input", _make_empty_input), ("_weight", _make_empty_weight)):
    torch.library.register_fake(f"{NAMESPACE}::linear_fp8{_name}", _fake, lib=_library)


def _save_linear_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, bool, str], output: Tensor) -> None:
    x, weight, _, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def _compute_linear_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return a gradient for each argument that :func:`linear_fp8` got (input, weight, bias, options), ``None`` where
    none is needed. ``ctx``: the autograd context that forward has filled. ``grad`` ``[..., out]``: the gradient of the
    layer's result."""
    (x, weight), needed = ctx.saved_tensors, ctx.needs_input_grad  # one entry per given argument; defaults have none
    of_x = ops.linear_fp8_input(grad, weight, *ctx.how) if needed[0] else None
    of_weight = ops.linear_fp8_weight(grad, x, *ctx.how) if needed[1] else None
    of_bias = _flatten_to_rows(grad).sum(0) if any(needed[2:]) else None
    return (of_x, of_weight, of_bias, None, None)[: len(needed)]


torch.library.register_autograd(
    f"{NAMESPACE}::linear_fp8", _compute_linear_gradients, setup_context=_save_linear_operands, lib=_library
)


@dataclass(frozen=True)
class WeightProduct:
    """The operands of a matrix product of activations ``x`` with ``weight``, a two-dimensional parameter or buffer, or
    a view of one.

    ``bias``: the vector that is added to the product, or ``None``. ``transposed``: true for ``x @ weight``, false for
    ``x @ weight.T``.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return (number of rows of ``x``, size of the summed dim, size of the output dim) of this matrix product."""
        x, weight = self.x.meta["val"], self.weight.meta["val"]
        inner, out = weight.shape if self.transposed else reversed(weight.shape)
        return x.numel() // max(1, x.shape[-1]), inner, out


# The positions of activations, weight and bias among the arguments, and whether the weight is [in, out].
_PLACES: dict[Any, tuple[int, int, int, bool]] = {
    aten.linear.default: (0, 1, 2, False),
    aten.mm.default: (0, 1, 2, True),
    aten.matmul.default: (0, 1, 2, True),
    aten.addmm.default: (1, 2, 0, True),
}


def match_weight_product(node: fx.Node, states: Collection[str]) -> WeightProduct | None:
    """Return the operands of ``node`` if it is a matrix product with a parameter or buffer that may be computed in 8
    bits; ``None`` if it is not. Dtypes and the divisibility of sizes are not checked here.

    ``states``: the names of the placeholders of parameters and buffers.
    """
    if node.target not in _PLACES or node.kwargs:  # addmm may have alpha and beta
        return None
    *places, transposed = _PLACES[node.target]
    x, weight, bias = (node.args[place] if place < len(node.args) else None for place in places)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not _is_state(weight, states):
        return None
    if x.meta["val"].dim() < 2 or weight.meta["val"].dim() != 2:
        return None
    if isinstance(bias, fx.Node) and bias.meta["val"].shape != node.meta["val"].shape[-1:]:
        return None
    return WeightProduct(x, weight, bias if isinstance(bias, fx.Node) else None, transposed)


def _is_state(node: fx.Node, states: Collection[str]) -> bool:
    """Return whether ``node`` is a parameter or buffer (a placeholder whose name is in ``states``) or a view of one."""
    while isinstance(node.target, torch._ops.OpOverload) and len(node.all_input_nodes) == 1:
        if all(result.alias_info is None for result in node.target._schema.returns):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.name in states


def alignment(scaling: str) -> int:
    """Return the number of which all sizes of a low-precision matrix product must be multiples. ``scaling``:
    ``"tensor"``, ``"row"``, ``"block"`` or ``"nvfp4"``."""
    return BLOCK if scaling in ("block", "nvfp4") else ALIGNED


def can_multiply_in_fp8(product: WeightProduct, scaling: str = "tensor") -> bool:
    """Return whether the 8-bit kernels (4-bit for ``"nvfp4"``) support the dtypes and sizes of the matrix product
    ``product``.

    All operands must have the same 16-bit dtype. All sizes must be multiples of ``ALIGNED`` (16), or of 32 with the
    ``scaling`` ``"block"`` or ``"nvfp4"``: each size is the summed dim of one of the three products of forward and
    backward, and rows of 4-bit numbers must be multiples of 16 bytes.
    """
    aligned = alignment(scaling)
    operands = [o.meta["val"] for o in (product.x, product.weight, product.bias) if o is not None]
    alike = operands[0].dtype in _SHORT and all(o.dtype == operands[0].dtype for o in operands)
    return alike and all(size and size % aligned == 0 for size in product.sizes)


def find_weight_products(block: Block, scaling: str = "tensor") -> dict[fx.Node, WeightProduct]:
    """Return the matrix products in the graph of ``block`` (a piece of the model) that can be computed in 8 bits (4
    bits for ``"nvfp4"``), as a dict: node of the product -> its operands. ``scaling``: which numbers share a scale: all
    of a ``"tensor"``, a ``"row"``, a ``"block"`` of 32; ``"nvfp4"``: a block of 16 4-bit numbers. With ``"nvfp4"``, the
    products of :func:`find_deciding_products` (heads and routers) are left out."""
    states = frozenset(block.states)
    known = {node: match_weight_product(node, states) for node in block.graph.nodes}
    left = find_deciding_products(block) if scaling == "nvfp4" else frozenset[fx.Node]()
    return {
        node: product
        for node, product in known.items()
        if product is not None and node not in left and can_multiply_in_fp8(product, scaling)
    }


def find_deciding_products(block: Block) -> frozenset[fx.Node]:
    """Return the last matrix products with weights, in the graph of ``block`` (a piece of the model), before a
    floating-point scalar output (such as a loss) or a discrete choice (top-k, argmax, sort): the head of a language
    model, and the routers to experts. They keep 16 bits in NVFP4, as in NVIDIA's recipe."""
    states, found = frozenset(block.states), set[fx.Node]()
    ahead = [node for node in block.outputs if not node.meta["val"].dim() and node.meta["val"].is_floating_point()]
    ahead += [node for node in block.graph.nodes if node.target in _CHOICES]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.op == "call_function" and match_weight_product(node, states) is not None:
            found.add(node)
            continue
        ahead += (more := [n for n in node.all_input_nodes if n not in seen])
        seen.update(more)
    return frozenset(found)


def find_expert_products(block: Block, scaling: str) -> set[fx.Node]:
    """Return the nodes in the graph of ``block`` (a piece of the model) that multiply rows by the matrices of their
    experts and can be computed in 8 bits: bfloat16 products with both dims of a matrix multiples of 16. The gradients
    of the matrices are not computed in 8 bits.

    ``scaling``: which numbers share a scale. Only ``"row"`` is supported; the result is empty for any other value.
    """
    states, found = frozenset(block.states), set[fx.Node]()
    for node in block.graph.nodes if scaling == "row" else ():
        if node.target is ops.expert_mm.default and not node.args[3:]:
            x, weight, _ = node.args
            assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
            short = x.meta["val"].dtype == weight.meta["val"].dtype == torch.bfloat16
            if short and _is_state(weight, states) and all(n % ALIGNED == 0 for n in weight.meta["val"].shape[1:]):
                found.add(node)
    return found


def convert_products_to_fp8(block: Block, scaling: str = "tensor") -> int:
    """Convert, in place, the matrix products in the graph of ``block`` (a piece of the model) that can be computed in 8
    bits (4 bits for ``"nvfp4"``). Products with parameters become ``linear_fp8``, and products of rows with the
    matrices of their experts get the argument ``scaling``.

    Return the number of converted products. ``scaling``: which numbers share a scale: all of a ``"tensor"``, a
    ``"row"``, a ``"block"`` of 32; ``"nvfp4"``: a block of 16 4-bit numbers.
    """
    found = find_weight_products(block, scaling)
    for node, product in found.items():
        node.target = ops.linear_fp8.default
        others = (product.bias, True) if product.transposed else (product.bias,) * (product.bias is not None)
        how = others if scaling == "tensor" else (product.bias, product.transposed, scaling)
        node.args = (product.x, product.weight, *how)
    experts = find_expert_products(block, scaling)
    for node in experts:
        node.args = (*node.args, scaling)
    return len(found) + len(experts)


def restore_products(block: Block) -> None:
    """Undo :func:`convert_products_to_fp8` in place: replace the low-precision products in the graph of ``block`` (a
    piece of the model) by ordinary products."""
    for node in block.graph.nodes:
        if node.target is ops.expert_mm.default:
            node.args = node.args[:3]
        if node.target is not ops.linear_fp8.default:
            continue
        x, weight, bias, transposed = (*node.args, None, False)[:4]
        if not transposed:
            node.target, node.args = aten.linear.default, (x, weight, *((bias,) if bias is not None else ()))
        elif bias is not None:
            node.target, node.args = aten.addmm.default, (bias, x, weight)
        else:
            node.target, node.args = aten.matmul.default, (x, weight)


__all__ = [
    "ALIGNED",
    "WeightProduct",
    "alignment",
    "can_multiply_in_fp8",
    "convert_products_to_fp8",
    "find_deciding_products",
    "find_expert_products",
    "find_weight_products",
    "linear_fp8",
    "linear_fp8_input",
    "linear_fp8_weight",
    "match_weight_product",
    "restore_products",
]
