"""Rewrite computations with data-dependent numbers: the number of rows that a mask selects, and ``tensor.item()``.

``x[mask].shape[0]`` is a Python number in the model and a 0-dimensional tensor in the rewritten graph. Python operators
on the number become torch operators, and an operator that takes the number takes the tensor.

Requires: nodes of an exported program. Provides: operators with static shapes, as ``passes/select/masked_rows.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.interpret import META
from partitioner.passes.select.masked_row_ops import MaskedRowCount, MaskedRows, Unselectable

if TYPE_CHECKING:
    from partitioner.passes.select.masked_rows import SelectedRows

aten = torch.ops.aten

ITEMS = {aten.item.default, aten._local_scalar_dense.default}
_WHOLE, _REAL = torch.int64, torch.float64  # dtypes of Python's int and float


@dataclass(frozen=True, eq=False)
class ComputedSize:
    """A number that the original model computes from the data, such as the number of rows that a mask selects.

    ``node``: the 0-dimensional node of the rewritten graph with this number; ``None`` if only assertions may read it.
    ``all_rows``: what the number would be if the mask selected every row, for static shapes; ``None`` if this is not
    known.
    """

    node: fx.Node | None
    all_rows: Any = None


_OPERATORS: dict[Any, tuple[Any, bool]] = {  # Python operator -> (torch operator, whether the result is a float)
    operator.add: (aten.add.Tensor, False),
    operator.sub: (aten.sub.Tensor, False),
    operator.mul: (aten.mul.Tensor, False),
    operator.truediv: (aten.div.Tensor, True),
    operator.floordiv: (aten.floor_divide.default, False),
    operator.mod: (aten.remainder.Tensor, False),
    operator.pow: (aten.pow.Tensor_Tensor, False),
    operator.neg: (aten.neg.default, False),
    torch.sym_max: (aten.maximum.default, False),
    torch.sym_min: (aten.minimum.default, False),
    torch.sym_float: (aten.positive.default, True),
    math.sqrt: (aten.sqrt.default, True),
    getattr(torch, "_sym_sqrt", None): (aten.sqrt.default, True),
    getattr(torch, "_sym_log2", None): (aten.log2.default, True),
}
# Operator of a tensor and a Python number -> the form in which the number is a tensor.
_OF_TENSORS: dict[Any, Any] = {
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
    aten.where.Scalar: aten.where.self,
    **{getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge", "add",
       "sub", "mul", "div", "remainder", "fmod")},
}  # fmt: skip
_SAME_TYPE = {
    aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.clamp.default,
    aten.clamp_min.default, aten.clamp_max.default,
}  # fmt: skip
# Operator that creates a tensor filled with one number -> position of the number; the size comes before it.
_FILL_VALUE_POSITIONS = {
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.new_full.default: 2,
    aten.full_like.default: 1,
}


def make_computed_size(build: SelectedRows, given: Any) -> ComputedSize:
    """Return ``given``, a number that depends on the data, as a :class:`ComputedSize`, whose field ``node`` has the
    number. ``given``: the number of rows that a mask selects, a node of ``item()``, or a :class:`ComputedSize`. Raise
    :class:`Unselectable` for other values.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    if isinstance(given, MaskedRowCount):
        return ComputedSize(build.count_selected(given.mask), int(given))
    if isinstance(given, fx.Node) and given.target in ITEMS:
        return ComputedSize(build.insert_call(aten.detach.default, given.args[0]))
    if isinstance(given, ComputedSize):
        return given
    raise Unselectable


def is_number(given: Any) -> bool:
    """Return whether ``given`` is a number that the original model computes from the data: the number of rows that a
    mask selects, a result of arithmetic with such a number, or a node of ``item()``."""
    return isinstance(given, MaskedRowCount | ComputedSize) or (isinstance(given, fx.Node) and given.target in ITEMS)


def compute_number(build: SelectedRows, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Apply the Python operator ``target``, such as ``operator.add``, to the numbers ``args``. If none of them depends
    on the data, return a Python number. Otherwise return a :class:`ComputedSize`, whose field ``node`` has the result
    as a 0-dimensional node of the new graph.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    numbers = [make_computed_size(build, a) if is_number(a) else a for a in args]
    if not any(isinstance(n, ComputedSize) for n in numbers):
        return target(*args)
    whole = [n.all_rows if isinstance(n, ComputedSize) else n for n in numbers]
    all_rows = None if any(n is None for n in whole) else _try_arithmetic(target, whole)
    known = _OPERATORS.get(target)
    if known is None or any(isinstance(n, ComputedSize) and n.node is None for n in numbers):
        return ComputedSize(None, all_rows)
    torchs, real = known
    given = [n.node if isinstance(n, ComputedSize) else n for n in numbers]
    real = real or any(isinstance(g, float) or (isinstance(g, fx.Node) and _is_floating_point(g)) for g in given)
    real = real or (target is operator.pow and isinstance(given[1], int) and given[1] < 0)
    return ComputedSize(
        build.insert_call(torchs, *(_make_tensor_node(build, g, _REAL if real else _WHOLE) for g in given)), all_rows
    )


def _try_arithmetic(target: Callable[..., Any], args: list[Any]) -> Any:
    """Return ``target(*args)``, where ``target`` is a Python operator such as ``operator.add``. If it raises an
    arithmetic error, such as a division by zero, return ``None``."""
    try:
        return target(*args)
    except ArithmeticError:
        return None


def append_with_tensors(build: SelectedRows, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Append the operator of ``node`` to the new graph, with 0-dimensional tensors in place of arguments that are
    data-dependent numbers, such as the number of rows that a mask selects. Return its node, or ``None`` if it has no
    such argument.

    ``build``: the rewriter, which appends operators to the new graph. ``node``: the call in the original graph.
    ``args``, ``kwargs``: its arguments in the new graph; numbers in lists, which are shapes, are not replaced. Raise
    :class:`Unselectable` if the operator has no form for tensors.
    """
    if not any(is_number(a) for a in (*args, *kwargs.values())):
        return None
    value, target = node.meta["val"], node.target
    if not isinstance(value, Tensor):
        raise Unselectable
    if target in _FILL_VALUE_POSITIONS:
        at = _FILL_VALUE_POSITIONS[target]
        made = _make_tensor_node(build, make_computed_size(build, args[at]).node, value.dtype)
        sizes = list(value.shape) if target is aten.full_like.default else args[at - 1]
        return made if target is aten.scalar_tensor.default else build.apply_operator(aten.expand.default, made, sizes)
    if target is aten.arange.default and len(args) == 1 and isinstance(args[0], MaskedRowCount):
        return number_selected_rows(build, args[0].mask, value.dtype)
    dtype = value.dtype if value.dtype.is_floating_point else None
    takes = _OF_TENSORS.get(target)
    if takes is None:  # the operator must accept a tensor in place of the number
        if getattr(target, "_overloadname", "") not in ("Tensor", "Tensor_mode"):
            raise Unselectable
        takes = target

    def tensor(given: Any, every: bool) -> Any:
        if is_number(given):
            return _make_tensor_node(build, make_computed_size(build, given).node, dtype)
        plain = every and isinstance(given, int | float) and not isinstance(given, bool)
        return _make_tensor_node(build, given, dtype or value.dtype) if plain else given

    apart = target in _SAME_TYPE or target is aten.pow.Scalar
    made = build.apply_operator(
        takes, *(tensor(a, apart) for a in args), **{k: tensor(a, apart) for k, a in kwargs.items()}
    )
    if not isinstance(made, fx.Node) or made.meta["val"].dtype != value.dtype:
        raise Unselectable
    return made


def number_selected_rows(build: SelectedRows, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Append a node ``[rows]`` to the new graph that numbers the rows that ``mask`` ``[rows]`` selects, 0, 1, ... in
    order, and return it. Rows that ``mask`` does not select have arbitrary numbers.

    ``build``: the rewriter, which appends operators to the new graph. ``dtype``: the dtype of the numbers.
    """
    made = build.insert_call(aten.sub.Tensor, build.number_selected(mask), 1)
    made = made if dtype == _WHOLE else build.insert_call(aten.to.dtype, made, dtype)
    build.rows[made], build.numbered[made] = MaskedRows(mask, 0), mask
    return made


def _is_floating_point(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _make_tensor_node(build: SelectedRows, given: Any, dtype: torch.dtype | None) -> fx.Node:
    """Return ``given`` (a node or a Python number) as a node of the dtype ``dtype``; if ``dtype`` is ``None``, a node
    keeps its dtype. Raise :class:`Unselectable` if ``given`` is ``None``.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    if given is None:
        raise Unselectable
    if not isinstance(given, fx.Node):
        return build.insert_call(aten.full.default, [], given, dtype=dtype, device=META)
    return given if dtype in (None, given.meta["val"].dtype) else build.insert_call(aten.to.dtype, given, dtype)
