"""Truth values that say of each place whether a certain number was chosen there.

``chosen == 3``, a slice of ``one_hot(chosen)``, a slice of ``chosen[..., None] == arange(n)``: what loops over experts
ask. Read off the graph, of exported operators and of those in normal form.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.marks import MARKS
from passes.rules.algebra import argument

aten = torch.ops.aten
ALIKE = (
    aten._to_copy.default,
    aten.to.dtype,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
)  # the same numbers, or truth values
CASTS = (*ALIKE, *MARKS)
_RANKED: dict[Any, int] = {  # which of their results are places along a dim, each once
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
}
_BEST: dict[Any, int] = {aten.max.dim: 1, aten.min.dim: 1}
RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
SHAPED = (*RESHAPES, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default)
_MOVED = (*CASTS, *SHAPED, aten.permute.default, aten.transpose.int, aten.select.int, aten.slice.Tensor)
_OVER = (aten.any.dim, aten.sum.dim_IntList)  # dims of truth values, or of counts
_WIDE = (torch.int32, torch.int64)  # in which numbers of places stay what they are
_PLACES = (aten.argsort.default, aten.argsort.stable)


@dataclass(frozen=True)
class Choice:
    """Of the whole numbers ``of``: where they are ``number``. Dim ``j`` of the truth values is dim ``dims[j]``."""

    of: fx.Node
    dims: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class _Classes:
    """The same for every number, which ``dim`` counts; ``dims``: of the other dims."""

    of: fx.Node
    dim: int
    dims: tuple[int, ...]


def choice_of(node: Any) -> Choice | None:
    """What ``node`` says of numbers; ``None``: it is something else."""
    node = undone(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: Any = node.args
    if node.target is aten.eq.Scalar and isinstance(args[1], int) and _has(args[0], args[1]):
        return Choice(args[0], tuple(range(_rank(args[0]))), args[1])
    if _is_nonzero(node) or node.target in CASTS:
        return None if _rank(node) == 0 else choice_of(args[0])
    if node.target is aten.select.int:
        return _slice(args[0], args[1], args[2])
    if node.target is operator.getitem and args[0].target is aten.unbind.int:
        return _slice(args[0].args[0], argument(args[0], "dim", 0), args[1])
    return None


def chosen_by_any(node: Any) -> tuple[fx.Node, int] | None:
    """Numbers and one of them: ``node`` is true where it is among those of a place, which are all different and lie in
    their last dim. ``None``: it is something else."""
    while isinstance(node, fx.Node) and (_is_nonzero(node) or node.target in (*CASTS, *RESHAPES)):
        node = node.args[0]
    found, along = None, list[int]()
    if isinstance(node, fx.Node) and node.target in _OVER:
        found, along = choice_of(node.args[0]), dims_over(node)
    elif isinstance(node, fx.Node) and node.target is aten.select.int:
        whole: Any = node.args[0]
        while whole.target in CASTS:  # of counts that are 0 or 1, if they are of what this looks for
            whole = whole.args[0]
        classes = classes_of(whole.args[0]) if whole.target in _OVER else None
        if classes is not None and len(dims_over(whole)) == 1 and not argument(whole, "keepdim", False):
            dims, (_, dim, number), over = range(_rank(whole.args[0])), node.args, dims_over(whole)[0]
            left = [d for d in dims if d != over]
            if left[dim] == classes.dim and isinstance(number, int) and number >= 0:  # type: ignore[index]
                others = [d for d in dims if d != classes.dim]
                found, along = Choice(classes.of, classes.dims, number), [others.index(over)]
    if found is None or along != [_rank(found.of) - 1] or found.dims != tuple(range(_rank(found.of))):
        return None
    return (found.of, found.number) if is_distinct(found.of, -1) else None


def undone(node: Any) -> Any:
    """``node`` before a dim was put in and taken out again."""
    while isinstance(node, fx.Node) and node.target is aten.squeeze.dim and _is_widened(node.args[0], node.args[1]):
        node = node.args[0].args[0]  # type: ignore[union-attr]
    return node


def _is_widened(node: Any, dim: Any) -> bool:
    return node.target is aten.unsqueeze.default and (node.args[1] - dim) % _rank(node) == 0


def before(node: Any, targets: tuple[Any, ...]) -> Any:
    """What ``node`` was before operators of ``targets``."""
    while node.target in targets:
        node = node.args[0]
    return node


def is_count(node: Any) -> bool:
    """Whether no number is below zero."""
    if node.meta["val"].dtype == torch.bool or node.target is aten.one_hot.default:
        return True
    if node.target in _MOVED:
        return is_count(node.args[0])
    return node.target is aten.mul.Tensor and all(isinstance(o, fx.Node) and is_count(o) for o in node.args)


def numbers_of(node: fx.Node) -> fx.Node:
    """Whole numbers before they were marked and given other shapes and types."""
    while True:
        before = node
        node = uncast(node)
        if node.target in SHAPED:
            node = node.args[0]  # type: ignore[assignment]
        if node is before:
            return node


def is_distinct(of: fx.Node, dim: int) -> bool:
    """Whether the numbers along ``dim`` are all different: places in the order of what stood there."""
    node: Any = uncast(of)
    while node.target in RESHAPES and dim % _rank(of) == _rank(of) - 1 and _keeps_last(node):
        of, dim, node = node.args[0], -1, uncast(node.args[0])
    if node.target is operator.getitem and _RANKED.get(node.args[0].target) == node.args[1]:
        along = argument(node.args[0], "dim", -1)
    elif node.target in _PLACES:
        along = argument(node, "dim", -1)
    else:
        return False
    return bool((along - dim) % _rank(node) == 0)


def num_choices(of: fx.Node) -> int | None:
    """How many places there were to choose from; ``None``: this is not a choice of places."""
    node: Any = uncast(of)
    while node.target in (*RESHAPES, aten.permute.default):
        node = uncast(node.args[0])
    if node.target is operator.getitem and {**_RANKED, **_BEST}.get(node.args[0].target) == node.args[1]:
        node = node.args[0]
    elif node.target not in (*_PLACES, aten.argmax.default, aten.argmin.default):
        return None
    dim = argument(node, "dim", -1)
    return None if dim is None else int(node.args[0].meta["val"].shape[dim])


def _slice(whole: fx.Node, dim: int, index: int) -> Choice | None:
    classes = classes_of(whole)
    if classes is None or dim % _rank(whole) != classes.dim or not isinstance(index, int) or index < 0:
        return None
    return Choice(classes.of, classes.dims, index)


def classes_of(node: Any) -> _Classes | None:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: Any = node.args
    rank = _rank(node)
    if node.target is aten.one_hot.default:
        return _Classes(args[0], rank - 1, tuple(range(rank - 1)))
    if node.target is aten.eq.Tensor:
        for numbers, counted in (args, args[::-1]):
            source = _widened(numbers)
            apart = source is not None and _rank(source) == rank - 1
            if source is not None and apart and _counts(counted) == node.meta["val"].shape[-1]:
                return _Classes(source, rank - 1, tuple(range(rank - 1)))
        return None
    if _is_nonzero(node) or node.target in CASTS:
        return classes_of(args[0])
    if node.target in (aten.permute.default, aten.transpose.int):
        inner = classes_of(args[0])
        if inner is None:
            return None
        order = [d % rank for d in args[1]] if node.target is aten.permute.default else _swapped(rank, *args[1:])
        others = [d for d in range(rank) if d != inner.dim]
        return _Classes(
            inner.of, order.index(inner.dim), tuple(inner.dims[others.index(d)] for d in order if d in others)
        )
    return None


def _widened(node: Any) -> fx.Node | None:
    """What ``node`` has one dim more than, the last, of size 1."""
    if not isinstance(node, fx.Node) or node.target not in (
        aten.unsqueeze.default,
        aten.reshape.default,
        aten.view.default,
    ):
        return None
    source: Any = node.args[0]
    fits = tuple(node.meta["val"].shape) == (*source.meta["val"].shape, 1)
    return source if fits and not _floats(source) else None


def _counts(node: Any) -> int | None:
    """How many numbers 0, 1, .. ``node`` has, if it has these and no other dim that matters."""
    node = uncast(node) if isinstance(node, fx.Node) else node
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
    plain = argument(node, "start", 0) == 0 and argument(node, "step", 1) == 1
    return int(node.meta["val"].shape[0]) if plain else None


def _is_nonzero(node: fx.Node) -> bool:
    compared = node.target in (aten.ne.Scalar, aten.gt.Scalar)
    return bool(compared and node.args[1] in (0, False) and not _floats(node.args[0]))


def uncast(node: fx.Node) -> fx.Node:
    """The same numbers, of another type at most: not truth values of them, nor what wraps around."""
    while node.target in CASTS and node.meta["val"].dtype in _WIDE:
        node = node.args[0]  # type: ignore[assignment]
    return node


def dims_over(node: Any) -> list[int]:
    """The dims over which ``node`` sums or looks."""
    dims: Any = node.args[1]
    rank = _rank(node.args[0])
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _keeps_last(node: Any) -> bool:
    sizes = [n.meta["val"].shape for n in (node, node.args[0])]
    return bool(len(sizes[0]) and len(sizes[1]) and sizes[0][-1] == sizes[1][-1])


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _has(node: Any, number: int) -> bool:
    """Whether ``number`` is one that whole numbers of the type of ``node`` can be."""
    dtype = node.meta["val"].dtype
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return bool(low <= number <= high)
    return False


def _floats(node: Any) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _rank(node: Any) -> int:
    return int(node.meta["val"].dim())
