"""Operators that multiply each row by the matrix of its expert, for mixtures of experts.

Models sort the rows (tokens) by expert, multiply each expert's group of rows, and undo the sort. Sorted rows of a whole
batch cannot be sharded; rows in their original order can. The sharding rules therefore see ``expert_mm``, which takes
unsorted rows and sorts them inside. ``passes/experts/sorted_rows.py`` rewrites sorted products to ``expert_mm``.

``sort_experts`` computes the order, ``sort_rows`` and ``unsort_rows`` apply and undo it (each is the gradient of the
other), ``grouped_mm`` multiplies each expert's rows by its matrix. The gradients of ``grouped_mm`` are ``grouped_mm``
itself (for the rows) and ``grouped_mm_weight`` (for the weight).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from partitioner.passes.ir.collectives import NAMESPACE, _library
from partitioner.passes.ops.cpu_products import is_onednn_faster, multiply_into
from partitioner.passes.ops.scaled_products import multiply_grouped_rows

_ALIGNED_BYTES = 16  # torch._grouped_mm requires strides that are multiples of this

_KERNELS = {
    "cpu": frozenset((torch.float32, torch.bfloat16, torch.float16)),
    "cuda": frozenset((torch.bfloat16,)),
}


def sort_experts(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort rows (tokens) by expert, stably. ``expert`` ``[t]`` has the expert number of each row.

    Return two tensors: the order ``[t]`` (int64 row indices), and the end of each expert's rows in this order,
    ``[num_experts]`` (int32). Rows whose number is outside ``[0, num_experts)`` come last.
    """
    others = (expert < 0) | (expert >= num_experts)
    experts, order = expert.masked_fill(others, num_experts).sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=expert.device, dtype=experts.dtype), right=True)
    return order, ends.to(torch.int32)


def sort_rows(x: Tensor, order: Tensor) -> Tensor:
    """Return ``x[order]`` for rows ``x`` ``[t, ...]`` and a permutation ``order`` ``[t]``."""
    return x.index_select(0, order)


def unsort_rows(x: Tensor, order: Tensor) -> Tensor:
    """Move sorted rows (tokens) ``x`` ``[t, ...]`` back to their original positions, and return them: row ``i`` goes to
    ``order[i]``.

    ``order`` ``[t]``: the permutation by which they were sorted.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format).index_copy_(0, order, x)


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, scaling: str = "") -> Tensor:
    """Multiply the rows (tokens) of each expert ``i``, ``rows[ends[i - 1]:ends[i]]``, by its matrix ``weight[i]``, and
    return the products.

    ``rows`` ``[t, k]`` are sorted by expert; ``weight`` ``[e, k, n]``; ``ends`` ``[e]`` has the end of each expert's
    rows. The result is ``[t, n]``, with zeros in rows after the last end. ``scaling``: if ``"row"``, the operands are
    rounded to 8 bits (``passes/ops/scaled_products.py``); if empty, they are not rounded.
    """
    if scaling:
        made = multiply_grouped_rows(rows, weight, ends)
        if made.is_cuda:
            return made.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(1), 0)
    elif _has_kernel(rows, weight) and not _is_float32_on_cpu(rows, weight):
        made = torch._grouped_mm(rows.contiguous(), weight, offs=ends)
        if made.is_cuda:
            return made.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(1), 0)
    else:
        made = rows.new_empty(len(rows), weight.shape[2])
        for e, (start, end) in enumerate(_list_group_borders(ends)):
            multiply_into(made[start:end], rows[start:end], weight[e], True)
    made[int(ends[-1]) :].zero_()
    return made


def grouped_mm_weight(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient ``[e, k, n]`` of the experts' matrices in the grouped product of :func:`grouped_mm`. For each
    expert, it is the sum of ``outer(rows[i], grads[i])`` over the expert's rows (tokens) ``i``.

    ``rows`` ``[t, k]`` and ``grads`` ``[t, n]`` (the gradient of the products) are sorted by expert; ``ends`` ``[e]``
    has the end of each expert's rows.
    """
    if _has_kernel(rows, grads) and not _is_float32_on_cpu(rows, grads):
        return torch._grouped_mm(rows.contiguous().t(), grads.contiguous(), offs=ends)
    made = rows.new_empty(len(ends), rows.shape[1], grads.shape[1])
    for e, (start, end) in enumerate(_list_group_borders(ends)):
        multiply_into(made[e], rows[start:end].t(), grads[start:end], True)
    return made


def add_weight_gradient(total: Tensor, rows: Tensor, grads: Tensor, ends: Tensor, fresh: bool) -> None:
    """Add the gradient of the experts' matrices to ``total`` ``[e, k, n]`` in place, without a temporary tensor.

    ``rows`` ``[t, k]`` and ``grads`` ``[t, n]`` (the gradient of the products) are sorted by expert; ``ends`` ``[e]``
    has the end of each expert's rows (tokens). ``fresh``: overwrite ``total`` instead of adding.
    """
    for e, (start, end) in enumerate(_list_group_borders(ends)):
        multiply_into(total[e], rows[start:end].t(), grads[start:end], fresh)


def _is_float32_on_cpu(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b``, the operands of a grouped matrix product (one matrix per expert), are float32 CPU
    tensors for which a loop over experts is faster than torch's grouped product."""
    return a.is_cpu and a.dtype == b.dtype == torch.float32 and is_onednn_faster()


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Return whether torch has a grouped matrix product (one matrix per group of rows) for the operands ``a`` and
    ``b``, tensors of at least one dim. This depends on dtype and device, and the last dim of both must be a multiple of
    16 bytes."""
    sizes = (a.shape[-1], b.shape[-1])
    known = a.dtype == b.dtype and a.dtype in _KERNELS.get(a.device.type, ())
    return known and all(s * a.itemsize % _ALIGNED_BYTES == 0 for s in sizes)


def _list_group_borders(ends: Tensor) -> list[tuple[int, int]]:
    """Return a list of (start, end), the range of each expert's rows (tokens) among all rows sorted by expert.
    ``ends``: the end of each expert's rows."""
    borders = [0, *ends.tolist()]
    return list(pairwise(borders))


# --- operators --------------------------------------------------------------------------------------------------------
ops = torch.ops.partition


def _fake_order(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(expert, dtype=torch.int64), expert.new_empty(num_experts, dtype=torch.int32)


def _fake_moved(x: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_product(rows: Tensor, weight: Tensor, ends: Tensor, scaling: str = "") -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _fake_grouped_weight(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grads.shape[1])


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sort_experts(Tensor expert, int num_experts) -> (Tensor, Tensor)": (sort_experts, _fake_order),
    "sort_rows(Tensor x, Tensor order) -> Tensor": (sort_rows, _fake_moved),
    "unsort_rows(Tensor x, Tensor order) -> Tensor": (unsort_rows, _fake_moved),
    'grouped_mm(Tensor rows, Tensor weight, Tensor ends, str scaling="") -> Tensor': (grouped_mm, _fake_product),
    "grouped_mm_weight(Tensor rows, Tensor grads, Tensor ends) -> Tensor": (grouped_mm_weight, _fake_grouped_weight),
}
for _schema, (_kernel, _fake) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)


def _save_order(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _unsort_row_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return ops.unsort_rows(grad, *ctx.saved_tensors), None


def _sort_row_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return ops.sort_rows(grad, *ctx.saved_tensors), None


def _save_grouped_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    *operands, ctx.scaling = inputs
    ctx.save_for_backward(*operands)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = ops.grouped_mm(grad, weight.transpose(1, 2), ends, ctx.scaling) if ctx.needs_input_grad[0] else None
    of_weight = ops.grouped_mm_weight(rows, grad, ends) if ctx.needs_input_grad[1] else None  # not rounded to 8 bits
    return of_rows, of_weight, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::sort_rows", _unsort_row_gradient, setup_context=_save_order, lib=_library
)

torch.library.register_autograd(
    f"{NAMESPACE}::unsort_rows", _sort_row_gradient, setup_context=_save_order, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::grouped_mm", _product_backward, setup_context=_save_grouped_operands, lib=_library
)


def expert_mm(x: Tensor, weight: Tensor, expert: Tensor, scaling: str = "") -> Tensor:
    """Multiply each row by the matrix of its expert: return ``[t, n]`` with ``x[i] @ weight[expert[i]]`` for each row
    (token) ``i``.

    ``x`` ``[t, k]``, ``weight`` ``[e, k, n]``, ``expert`` ``[t]``. Rows whose expert number is outside ``[0, e)`` give
    zeros. ``scaling``: if ``"row"``, the operands are rounded to 8 bits; if empty, they are not rounded.
    """
    order, ends = sort_experts(expert, weight.shape[0])
    return unsort_rows(grouped_mm(sort_rows(x, order), weight, ends, scaling), order)


def expert_mm_weight(x: Tensor, grad: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    """Return the gradient ``[num_experts, k, n]`` of the experts' matrices: the sum of ``outer(x[i], grad[i])`` over
    each expert's rows (tokens).

    ``x`` ``[t, k]``: the rows. ``expert`` ``[t]``: the expert number of each row. ``grad`` ``[t, n]``: the gradient of
    the rows' products with the matrices of their experts.
    """
    order, ends = sort_experts(expert, num_experts)
    return grouped_mm_weight(sort_rows(x, order), sort_rows(grad, order), ends)


_PRODUCTS_BY_GROUP = (torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", None))  # second: since 2.10


class _GroupedProductMode(TorchFunctionMode):
    """Replaces torch's grouped matrix products by ``partition::expert_mm`` while it is active.

    Torch's own operator can be traced for bfloat16 only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` and return its result. A grouped matrix product is replaced by traceable
        operators where :func:`_multiply_grouped_rows` covers the call. ``types``: unused."""
        kwargs = kwargs or {}
        made = _multiply_grouped_rows(*args, **kwargs) if func in _PRODUCTS_BY_GROUP else None
        return func(*args, **kwargs) if made is None else made


def _multiply_grouped_rows(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return the result of ``torch.nn.functional.grouped_mm(mat_a, mat_b, offs)``, computed by operators that can be
    traced for any floating-point dtype; ``None`` if these operators do not cover the call.

    ``mat_a``: rows sorted by group, or a batch of matrices. ``mat_b``: one matrix for each group. ``offs``: the end of
    each group's rows; ``None`` for batches. ``options``: the other arguments of the call.
    """
    if mat_a.dtype != mat_b.dtype or any(options.get(name) is not None for name in ("bias", "out_dtype")):
        return None
    if mat_a.dim() == mat_b.dim() == 3 and offs is None:
        return torch.bmm(mat_a, mat_b)
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None:
        return None
    rows = torch.arange(mat_a.shape[0], device=offs.device)
    made: Tensor = ops.expert_mm(mat_a, mat_b, torch.searchsorted(offs, rows, right=True))
    return made


@contextmanager
def trace_grouped_products() -> Iterator[None]:
    """Return a context in which torch's grouped matrix products can be traced for all floating-point dtypes."""
    with _GroupedProductMode():
        yield


@dataclass(frozen=True)
class GroupedProduct:
    """The argument conventions of an operator that multiplies rows (tokens), sorted by expert, by the matrices of their
    experts. The operator's arguments are rows, weight and groups.

    ``groups``: ``"ends"`` if the third argument has the end of each expert's rows (exclusive), ``"sizes"`` if it has
    each expert's number of rows. ``transposed``: whether the weight is ``[e, n, k]`` instead of ``[e, k, n]``.
    """

    groups: Literal["ends", "sizes"] = "ends"
    transposed: bool = False


_grouped: dict[str, GroupedProduct] = {
    "aten::_grouped_mm": GroupedProduct(),
    "transformers::grouped_mm_fallback": GroupedProduct(),
}


def by_group(name: str, groups: Literal["ends", "sizes"] = "ends", transposed: bool = False) -> None:
    """Declare that an operator multiplies rows, sorted by expert, with the matrices of their experts.

    Its arguments are ``(rows [t, k], weight [e, k, n], groups [e])``, its result is ``[t, n]``. If the graph also has
    the sort of the rows, the sort is removed, and ``partition::expert_mm``, which works on unsorted rows, replaces the
    operator.

    Args:
        name: name of the operator, as ``namespace::name``.
        groups: ``"ends"`` if the argument ``groups`` has the end of each expert's rows, ``"sizes"`` if it has the
            number of rows of each expert.
        transposed: whether the weight is ``[e, n, k]`` instead of ``[e, k, n]``.
    """
    _grouped[name] = GroupedProduct(groups, transposed)


def find_grouped_product(target: Any) -> GroupedProduct | None:
    """Return the argument conventions of the node target ``target`` if it multiplies rows (tokens), sorted by expert,
    by the matrices of their experts; ``None`` for any other target. Known operators are torch's and those that the user
    has declared with :func:`by_group`."""
    return _grouped.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None


def by_expert(target: torch._ops.OpOverload, rows: int = 0, weight: int = 1, expert: int = 2) -> None:
    """Declare that an operator multiplies each row by the matrix of its expert, so that experts can be distributed over
    ranks.

    Other shardings of the operator are declared by :func:`partitioner.passes.rules.rule`.

    Args:
        target: the operator.
        rows: index of the rows ``[t, ...]`` among its arguments, from 0.
        weight: index of the experts' weights ``[e, ...]`` among its arguments.
        expert: index of the expert numbers ``[t]`` of the rows among its arguments.
    """
    _products[target] = lambda node: (node.args[rows], node.args[weight], node.args[expert])  # type: ignore


def list_row_products() -> Mapping[Any, Callable[[fx.Node], tuple[fx.Node, fx.Node, fx.Node]]]:
    """Return a dict: operator that multiplies each row (token) by the matrix of its expert -> function. The function
    takes a node of the operator and returns its three operand nodes: rows, weight and expert numbers."""
    return _products


_library.define('expert_mm(Tensor x, Tensor weight, Tensor expert, str scaling="") -> Tensor')

_library.define("expert_mm_weight(Tensor x, Tensor grad, Tensor expert, int num_experts) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("expert_mm", expert_mm, _device)
    _library.impl("expert_mm_weight", expert_mm_weight, _device)
_products: dict[Any, Callable[[fx.Node], tuple[fx.Node, fx.Node, fx.Node]]] = {
    ops.expert_mm.default: lambda node: node.args[:3]  # type: ignore[dict-item,return-value]
}


def _fake_expert_mm(x: Tensor, weight: Tensor, expert: Tensor, scaling: str = "") -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _fake_weight(x: Tensor, grad: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    return x.new_empty(num_experts, x.shape[1], grad.shape[1])


torch.library.register_fake(f"{NAMESPACE}::expert_mm", _fake_expert_mm, lib=_library)

torch.library.register_fake(f"{NAMESPACE}::expert_mm_weight", _fake_weight, lib=_library)


def _save_expert_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    *operands, ctx.scaling = inputs
    ctx.save_for_backward(*operands)


def _compute_expert_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, expert = ctx.saved_tensors
    of_x = ops.expert_mm(grad, weight.transpose(1, 2), expert, ctx.scaling) if ctx.needs_input_grad[0] else None
    of_weight = ops.expert_mm_weight(x, grad, expert, weight.shape[0]) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::expert_mm", _compute_expert_gradients, setup_context=_save_expert_operands, lib=_library
)
