"""Recognise boolean masks that are true where a router chose a certain expert number.

Loops over experts compute such masks as ``chosen == 3``, as a slice of ``one_hot(chosen)`` or as a slice of
``chosen[..., None] == arange(n)``. The functions work on graphs of exported operators and on graphs in normal form.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partitioner.passes.experts.trace_marks import MARKS
from partitioner.passes.rules.factors import get_node_argument

aten = torch.ops.aten

ALIKE = (
    aten._to_copy.default,
    aten.to.dtype,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
)  # operators that do not change numbers and masks
CASTS = (*ALIKE, *MARKS)
_RANKED: dict[Any, int] = {  # operator -> index of its result that has distinct positions along a dim
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
}
_BEST: dict[Any, int] = {aten.max.dim: 1, aten.min.dim: 1}
RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
SHAPED = (*RESHAPES, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default)
_ELEMENT_MOVING_OPERATORS = (
    *CASTS,
    *SHAPED,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
)
_REDUCTIONS = (aten.any.dim, aten.sum.dim_IntList)  # reductions over dims of masks, or of counts
_WIDE = (torch.int32, torch.int64)  # types that hold every position without wrapping around
_PLACES = (aten.argsort.default, aten.argsort.stable)


@dataclass(frozen=True)
class RoutingChoice:
    """A mask of the rows (tokens) that chose one expert: it is true where the integer tensor ``chosen`` equals
    ``number``.

    Dim ``j`` of the mask is dim ``dims[j]`` of ``chosen``.
    """

    chosen: fx.Node
    dims: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class _ClassMasks:
    """A stack of masks along the dim ``dim`` of a tensor: mask ``n`` (from 0) is true where the integer tensor
    ``chosen`` equals ``n``.

    ``dims[j]``: the dim of ``chosen`` that corresponds to the ``j``-th dim of a single mask.
    """

    chosen: fx.Node
    dim: int
    dims: tuple[int, ...]


def match_equality(node: Any) -> RoutingChoice | None:
    """If the mask ``node`` compares an integer tensor with a number, as in ``chosen == 3``, return the tensor and the
    number as a :class:`RoutingChoice`; otherwise return ``None``."""
    node = skip_inverse_squeezes(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: Any = node.args
    if node.target is aten.eq.Scalar and isinstance(args[1], int) and _can_represent(args[0], args[1]):
        return RoutingChoice(args[0], tuple(range(_get_node_rank(args[0]))), args[1])
    if _is_nonzero(node) or node.target in CASTS:
        return None if _get_node_rank(node) == 0 else match_equality(args[0])
    if node.target is aten.select.int:
        return _find_sliced_choice(args[0], args[1], args[2])
    if node.target is operator.getitem and args[0].target is aten.unbind.int:
        return _find_sliced_choice(args[0].args[0], get_node_argument(args[0], "dim", 0), args[1])
    return None


def match_any_equality(node: Any) -> tuple[fx.Node, int] | None:
    """If the mask ``node`` tests whether a number occurs along the last dim of an integer tensor, such as among the k
    experts that each token chose, return (tensor, number). Return ``None`` for any other node, or if a number may occur
    more than once along that dim."""
    while isinstance(node, fx.Node) and (_is_nonzero(node) or node.target in (*CASTS, *RESHAPES)):
        node = node.args[0]
    found, along = None, list[int]()
    if isinstance(node, fx.Node) and node.target in _REDUCTIONS:
        found, along = match_equality(node.args[0]), list_reduced_dims(node)
    elif isinstance(node, fx.Node) and node.target is aten.select.int:
        whole: Any = node.args[0]
        while whole.target in CASTS:  # casts do not change the counts, which are 0 or 1 here
            whole = whole.args[0]
        classes = match_class_masks(whole.args[0]) if whole.target in _REDUCTIONS else None
        if (
            classes is not None
            and len(list_reduced_dims(whole)) == 1
            and not get_node_argument(whole, "keepdim", False)
        ):
            dims, (_, dim, number), over = range(_get_node_rank(whole.args[0])), node.args, list_reduced_dims(whole)[0]
            left = [d for d in dims if d != over]
            if left[dim] == classes.dim and isinstance(number, int) and number >= 0:  # type: ignore[index]
                others = [d for d in dims if d != classes.dim]
                found, along = RoutingChoice(classes.chosen, classes.dims, number), [others.index(over)]
    if (
        found is None
        or along != [_get_node_rank(found.chosen) - 1]
        or found.dims != tuple(range(_get_node_rank(found.chosen)))
    ):
        return None
    return (found.chosen, found.number) if is_distinct_along(found.chosen, -1) else None


def skip_inverse_squeezes(node: Any) -> Any:
    """Return the node before all trailing pairs of ``unsqueeze`` and ``squeeze`` operators of ``node`` that cancel each
    other; ``node`` itself if there are none."""
    while isinstance(node, fx.Node) and node.target is aten.squeeze.dim and _is_unsqueezed(node.args[0], node.args[1]):
        node = node.args[0].args[0]  # type: ignore[union-attr]
    return node


def _is_unsqueezed(node: Any, dim: Any) -> bool:
    return node.target is aten.unsqueeze.default and (node.args[1] - dim) % _get_node_rank(node) == 0


def skip_operators(node: Any, targets: tuple[Any, ...]) -> Any:
    """Follow first operands from ``node`` while the operator is in ``targets``, and return the first node with another
    operator."""
    while node.target in targets:
        node = node.args[0]
    return node


def is_count(node: Any) -> bool:
    """Return whether all elements of ``node`` are known to be nonnegative (masks, one-hot codes, and their products). A
    sum of such elements is zero only if all of them are zero."""
    if node.meta["val"].dtype == torch.bool or node.target is aten.one_hot.default:
        return True
    if node.target in _ELEMENT_MOVING_OPERATORS:
        return is_count(node.args[0])
    return node.target is aten.mul.Tensor and all(isinstance(o, fx.Node) and is_count(o) for o in node.args)


def find_integer_source(node: fx.Node) -> fx.Node:
    """Return the node from which ``node`` got its integers, such as the expert numbers that a router chose: the node
    before all reshapes, casts to int32 or int64, and marker operators (which return their operand unchanged)."""
    while True:
        before = node
        node = skip_integer_casts(node)
        if node.target in SHAPED:
            node = node.args[0]  # type: ignore[assignment]
        if node is before:
            return node


def is_distinct_along(chosen: fx.Node, dim: int) -> bool:
    """Return whether the numbers of the tensor ``chosen`` along its dim ``dim`` are known to be distinct, because they
    are indices from a ``topk``, ``sort`` or ``argsort``."""
    node: Any = skip_integer_casts(chosen)
    while (
        node.target in RESHAPES and dim % _get_node_rank(chosen) == _get_node_rank(chosen) - 1 and _keeps_last_dim(node)
    ):
        chosen, dim, node = node.args[0], -1, skip_integer_casts(node.args[0])
    if node.target is operator.getitem and _RANKED.get(node.args[0].target) == node.args[1]:
        along = get_node_argument(node.args[0], "dim", -1)
    elif node.target in _PLACES:
        along = get_node_argument(node, "dim", -1)
    else:
        return False
    return bool((along - dim) % _get_node_rank(node) == 0)


def get_num_choices(chosen: fx.Node) -> int | None:
    """Return the number of elements among which the indices ``chosen`` were chosen: the size of the dim over which a
    ``topk``, ``sort``, ``max`` or ``argmax`` ran. For a router this is the number of experts.

    Return ``None`` if ``chosen`` is not a result of such an operator.
    """
    node: Any = skip_integer_casts(chosen)
    while node.target in (*RESHAPES, aten.permute.default):
        node = skip_integer_casts(node.args[0])
    if node.target is operator.getitem and {**_RANKED, **_BEST}.get(node.args[0].target) == node.args[1]:
        node = node.args[0]
    elif node.target not in (*_PLACES, aten.argmax.default, aten.argmin.default):
        return None
    dim = get_node_argument(node, "dim", -1)
    return None if dim is None else int(node.args[0].meta["val"].shape[dim])


def _find_sliced_choice(whole: fx.Node, dim: int, index: int) -> RoutingChoice | None:
    """If ``whole`` is a stack of masks ``chosen == 0``, ``chosen == 1``, .. along ``dim``, return the tensor ``chosen``
    and the number ``index`` of its slice as a :class:`RoutingChoice`; otherwise return ``None``."""
    classes = match_class_masks(whole)
    if classes is None or dim % _get_node_rank(whole) != classes.dim or not isinstance(index, int) or index < 0:
        return None
    return RoutingChoice(classes.chosen, classes.dims, index)


def match_class_masks(node: Any) -> _ClassMasks | None:
    """If ``node`` is a stack of masks that compare an integer tensor with 0, 1, .., such as ``one_hot(chosen)``, return
    its description: the tensor and how its dims correspond to those of the stack. Return ``None`` for any other node.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: Any = node.args
    rank = _get_node_rank(node)
    if node.target is aten.one_hot.default:
        return _ClassMasks(args[0], rank - 1, tuple(range(rank - 1)))
    if node.target is aten.eq.Tensor:
        for numbers, counted in (args, args[::-1]):
            source = _find_widened_operand(numbers)
            apart = source is not None and _get_node_rank(source) == rank - 1
            if source is not None and apart and _find_arange_size(counted) == node.meta["val"].shape[-1]:
                return _ClassMasks(source, rank - 1, tuple(range(rank - 1)))
        return None
    if _is_nonzero(node) or node.target in CASTS:
        return match_class_masks(args[0])
    if node.target in (aten.permute.default, aten.transpose.int):
        inner = match_class_masks(args[0])
        if inner is None:
            return None
        order = [d % rank for d in args[1]] if node.target is aten.permute.default else _swap_two_dims(rank, *args[1:])
        others = [d for d in range(rank) if d != inner.dim]
        return _ClassMasks(
            inner.chosen, order.index(inner.dim), tuple(inner.dims[others.index(d)] for d in order if d in others)
        )
    return None


def _find_widened_operand(node: Any) -> fx.Node | None:
    """If ``node`` appends a dim of size 1 to an integer operand, return this operand; otherwise return ``None``."""
    if not isinstance(node, fx.Node) or node.target not in (
        aten.unsqueeze.default,
        aten.reshape.default,
        aten.view.default,
    ):
        return None
    source: Any = node.args[0]
    fits = tuple(node.meta["val"].shape) == (*source.meta["val"].shape, 1)
    return source if fits and not _is_floating_point(source) else None


def _find_arange_size(node: Any) -> int | None:
    """If ``node`` is ``arange(n)``, possibly with leading dims of size 1, return ``n``; otherwise return ``None``."""
    node = skip_integer_casts(node) if isinstance(node, fx.Node) else node
    while isinstance(node, fx.Node) and node.target in (
        aten.reshape.default,
        aten.view.default,
        aten.unsqueeze.default,
    ):
        if node.meta["val"].shape[-1] != node.meta["val"].numel():
            return None
        node = node.args[0]
    if not isinstance(node, fx.Node) or "aten.arange" not in str(node.target) or node.meta["val"].dtype not in _WIDE:
        return None
    plain = get_node_argument(node, "start", 0) == 0 and get_node_argument(node, "step", 1) == 1
    return int(node.meta["val"].shape[0]) if plain else None


def _is_nonzero(node: fx.Node) -> bool:
    compared = node.target in (aten.ne.Scalar, aten.gt.Scalar)
    return bool(compared and node.args[1] in (0, False) and not _is_floating_point(node.args[0]))


def skip_integer_casts(node: fx.Node) -> fx.Node:
    """Return the node before all casts of ``node`` to int32 or int64 and marker operators (which return their operand
    unchanged). It has the same integers."""
    while node.target in CASTS and node.meta["val"].dtype in _WIDE:
        node = node.args[0]  # type: ignore[assignment]
    return node


def list_reduced_dims(node: Any) -> list[int]:
    """Return the dims that ``node`` (a sum, or ``any``) reduces, as non-negative indices."""
    dims: Any = node.args[1]
    rank = _get_node_rank(node.args[0])
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _keeps_last_dim(node: Any) -> bool:
    sizes = [n.meta["val"].shape for n in (node, node.args[0])]
    return bool(len(sizes[0]) and len(sizes[1]) and sizes[0][-1] == sizes[1][-1])


def _swap_two_dims(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _can_represent(node: Any, number: int) -> bool:
    """Return whether ``node`` has an integer or boolean dtype whose range includes ``number``."""
    dtype = node.meta["val"].dtype
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return bool(low <= number <= high)
    return False


def _is_floating_point(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _get_node_rank(node: Any) -> int:
    return int(node.meta["val"].dim())
