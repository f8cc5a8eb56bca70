"""Products of rows with the matrix of their expert, as one operator on rows in any order.

Models sort the rows by expert, multiply group by group and sort back. Sorted rows of a whole batch cannot be sharded,
rows in their own order can: that is the form that the rules see, and the sorting is within the operator.
``passes/unsort.py`` rewrites the one into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from passes.collectives import NAMESPACE, _library
from passes.grouped import grouped_mm, grouped_mm_weight, sort_experts, sort_rows, unsort_rows


def expert_mm(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """``x[i] @ weight[expert[i]]``: x ``[t, k]``, weight ``[e, k, n]``, expert ``[t]``; result ``[t, n]``.

    The result is zero for rows whose expert is none of the e.
    """
    order, ends = sort_experts(expert, weight.shape[0])
    return unsort_rows(grouped_mm(sort_rows(x, order), weight, ends), order)


def expert_mm_weight(x: Tensor, grad: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    """The gradient of ``weight``: for each expert, the sum of ``outer(x[i], grad[i])`` over its rows, ``[e, k, n]``."""
    order, ends = sort_experts(expert, num_experts)
    return grouped_mm_weight(sort_rows(x, order), sort_rows(grad, order), ends)


_PRODUCTS_BY_GROUP = (torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", None))  # the latter since 2.10


class _Grouped(TorchFunctionMode):
    """Grouped products as products by expert: of the former, torch traces those of bfloat16 alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = _of_rows(*args, **kwargs) if func in _PRODUCTS_BY_GROUP else None
        return func(*args, **kwargs) if made is None else made


def _of_rows(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor | None:
    """``torch.nn.functional.grouped_mm`` of sorted rows, or of matrices one by one; ``None``: another of its forms."""
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
def grouped_traced() -> Iterator[None]:
    """Inside, torch's grouped products of any floating type can be traced."""
    with _Grouped():
        yield


@dataclass(frozen=True)
class Grouped:
    """A product of rows, sorted by expert, with their groups: whether these are told by their ends or their sizes, and
    whether a weight is ``[e, n, k]`` instead of ``[e, k, n]``. Its operands are rows, weight and groups."""

    groups: Literal["ends", "sizes"] = "ends"
    transposed: bool = False


_grouped: dict[str, Grouped] = {"aten::_grouped_mm": Grouped(), "transformers::grouped_mm_fallback": Grouped()}


def by_group(name: str, groups: Literal["ends", "sizes"] = "ends", transposed: bool = False) -> None:
    """Say that the operator ``name`` (``namespace::name``) multiplies rows, sorted by expert, with their experts'
    matrices: ``(rows [t, k], weight [e, k, n], groups [e]) -> [t, n]``. See :class:`Grouped`.

    Where the sorting is seen in the graph it is undone, and ``partition::expert_mm`` takes the operator's place.
    """
    _grouped[name] = Grouped(groups, transposed)


def grouped(target: Any) -> Grouped | None:
    """What is known of an operator as a product by group."""
    return _grouped.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None


def by_expert(target: torch._ops.OpOverload, rows: int = 0, weight: int = 1, expert: int = 2) -> None:
    """Say that an operator works on each row with what its expert has, and where among its arguments the rows
    ``[t, ...]``, the experts' weights ``[e, ...]`` and the expert ``[t]`` of each row are: experts may then be spread
    over ranks. How it may be sharded otherwise, :func:`passes.rules.rule` says.
    """
    _products[target] = lambda node: (node.args[rows], node.args[weight], node.args[expert])  # type: ignore


def row_products() -> Mapping[Any, Callable[[fx.Node], tuple[fx.Node, fx.Node, fx.Node]]]:
    """The operators that multiply rows with the matrix of their expert, with their rows, weight and experts."""
    return _products


_library.define("expert_mm(Tensor x, Tensor weight, Tensor expert) -> Tensor")
_library.define("expert_mm_weight(Tensor x, Tensor grad, Tensor expert, int num_experts) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("expert_mm", expert_mm, _device)
    _library.impl("expert_mm_weight", expert_mm_weight, _device)
ops = torch.ops.partition
_products: dict[Any, Callable[[fx.Node], tuple[fx.Node, fx.Node, fx.Node]]] = {
    ops.expert_mm.default: lambda node: node.args[:3]  # type: ignore[dict-item,return-value]
}


def _fake(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _fake_weight(x: Tensor, grad: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    return x.new_empty(num_experts, x.shape[1], grad.shape[1])


torch.library.register_fake(f"{NAMESPACE}::expert_mm", _fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::expert_mm_weight", _fake_weight, lib=_library)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, expert = ctx.saved_tensors
    of_x = ops.expert_mm(grad, weight.transpose(1, 2), expert) if ctx.needs_input_grad[0] else None
    of_weight = ops.expert_mm_weight(x, grad, expert, weight.shape[0]) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None


torch.library.register_autograd(f"{NAMESPACE}::expert_mm", _backward, setup_context=_setup, lib=_library)
