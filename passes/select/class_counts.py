"""Rewrite ``torch.bincount`` and ``F.one_hot`` without a given number of classes to static shapes.

In the model, the number of classes is one more than the largest class in the data, which a plan cannot know. It may be
known to be at most ``E``: the classes are indices of the largest of ``E`` scores, or of rows of a table with ``E``
rows, or a size of ``E`` is required. The result then has ``E`` entries, with a mask of the entries that the model has
(see ``passes/select/masked_rows.py``). If the model needs exactly ``E`` classes, because it multiplies the result by
``E`` other values, there is no mask.

Requires: nodes of an exported program. Provides: operators with static shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from partitioner.passes.experts.routing_masks import find_integer_source, get_num_choices
from partitioner.passes.ir.collectives import _library
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.rules.factors import get_node_argument
from partitioner.passes.select.masked_row_ops import MaskedRows, Unselectable

if TYPE_CHECKING:
    from partitioner.passes.select.masked_rows import SelectedRows

aten = torch.ops.aten


def _fake_one_hot(x: Tensor) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size(min=1)
    return x.new_empty([*x.shape, size], dtype=torch.int64)


_library.define("one_hot(Tensor x) -> Tensor")

torch.library.impl("partition::one_hot", "CompositeExplicitAutograd", F.one_hot, lib=_library)
torch.library.register_fake("partition::one_hot", _fake_one_hot, lib=_library)
ONE_HOT = torch.ops.partition.one_hot.default  # one_hot whose number of classes follows from the largest number
ASSERTS = {aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default}
COUNTING = (ONE_HOT, aten.bincount.default)

_STATIC_OPERATORS: dict[Any, str] = {
    ONE_HOT: "F.one_hot has as many classes as its largest number tells; expected a number that is known: pass "
    "num_classes=",
    aten.bincount.default: "torch.bincount has as many entries as its largest number tells; expected a number that is "
    "known: pass minlength=n and take the first n, as torch.bincount(x, minlength=n)[:n]",
}


def count_classes(build: SelectedRows, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Rewrite ``node``, a ``bincount`` or ``one_hot`` whose number of classes depends on the data, with a fixed number
    of classes, and return the new node. Raise :class:`Unselectable` if no upper bound of the class numbers is known.

    Args:
        build: the rewriter, which appends operators to the new graph.
        node: the call in the original graph.
        args: the positional arguments of the call, with nodes of the new graph.
        kwargs: the keyword arguments of the call, with nodes of the new graph.
    """
    if node.target is ONE_HOT:
        return _append_one_hot(build, node, *args)
    return _count_occurrences(build, node, *args, **kwargs)


def _append_one_hot(build: SelectedRows, node: fx.Node, numbers: fx.Node) -> fx.Node:
    """Append a ``one_hot`` of the class numbers ``numbers`` with a fixed number of classes to the new graph, and return
    its node. If the number of classes depends on the data in the original model, the result has a column for each
    possible class, and a mask of the columns that the model has is recorded in ``build``. Raise :class:`Unselectable`
    if no upper bound of the class numbers is known.

    ``build``: the rewriter, which appends operators to the new graph. ``node``: the call in the original graph.
    """
    size, bound = _get_fixed_size(node), find_upper_bound(node.args[0])
    if size is None and bound is None:
        raise Unselectable(_STATIC_OPERATORS[ONE_HOT])
    result: fx.Node = build.apply_operator(aten.one_hot.default, numbers, bound if size is None else size)
    return (
        result
        if size is not None
        else _record_class_mask(build, result, _append_present_class_mask(build, numbers, bound, 0))
    )


def _count_occurrences(
    build: SelectedRows, node: fx.Node, numbers: fx.Node, weights: fx.Node | None = None, minlength: int = 0
) -> fx.Node:
    """Append operators to the new graph that count how often each class occurs in ``numbers``, as ``bincount`` does,
    and return the node of the counts. If the number of classes depends on the data in the original model, the result
    has a count for each possible class, and a mask of the counts that the model has is recorded in ``build``.

    ``build``: the rewriter, which appends operators to the new graph. ``node``: the call in the original graph.
    ``numbers``: the class number of each element. ``weights``: the amount that each element adds to the count of its
    class; ``None`` means 1. ``minlength``: the smallest number of counts that ``bincount`` returns. Raise
    :class:`Unselectable` if no upper bound of the class numbers is known.
    """
    minimum = minlength if isinstance(minlength, int) else 0
    size, bound = _get_fixed_size(node), find_upper_bound(node.args[0])
    if size is None and bound is not None and bound <= minimum:
        size = minimum
    if size is None and minimum and all(_reads_first_counts(user, minimum) for user in node.users):
        size = minimum
    if size is None and bound is None:
        raise Unselectable(_STATIC_OPERATORS[aten.bincount.default])
    counted = bound if size is None else size
    every = build.insert_call(aten.arange.default, counted, dtype=torch.int64, device=META)
    hits = build.apply_operator(aten.eq.Tensor, build.apply_operator(aten.unsqueeze.default, numbers, -1), every)
    if weights is not None:
        narrow = weights.meta["val"].dtype == torch.float32
        weights = build.apply_operator(aten.detach.default, weights)
        weights = build.apply_operator(aten.to.dtype, weights, torch.float32 if narrow else torch.float64)
        hits = build.apply_operator(aten.mul.Tensor, build.apply_operator(aten.unsqueeze.default, weights, -1), hits)
    result: fx.Node = build.apply_operator(aten.sum.dim_IntList, hits, [0])
    return (
        result
        if size is not None
        else _record_class_mask(build, result, _append_present_class_mask(build, numbers, bound, minimum))
    )


def _append_present_class_mask(build: SelectedRows, numbers: fx.Node, bound: int | None, minimum: int) -> fx.Node:
    """Append a boolean mask ``[bound]`` to the new graph and return its node. The mask is true for the classes that
    ``bincount`` or ``one_hot`` returns in the original model: the classes from 0 to the largest class in its input, and
    at least the first ``minimum`` ones.

    Args:
        build: the rewriter, which appends operators to the new graph.
        numbers: the node with the class number of each element.
        bound: an integer that is greater than all class numbers; never ``None``, because the caller has checked that
            one is known.
        minimum: the smallest number of classes that the operator returns.
    """
    every = build.insert_call(aten.arange.default, bound, dtype=torch.int64, device=META)
    largest = build.apply_operator(aten.max.default, numbers)
    if minimum:
        largest = build.insert_call(aten.clamp_min.default, largest, minimum - 1)
    return build.insert_call(aten.le.Tensor, every, largest)


def _record_class_mask(build: SelectedRows, node: fx.Node, mask: fx.Node) -> fx.Node:
    """Record in ``build.rows`` that, of the classes along the last dim of ``node``, the original model has only those
    for which ``mask`` is true. Return ``node``. Raise :class:`Unselectable` if another mask is already recorded for
    ``node``.

    ``build``: the rewriter. ``node``: the node of counts or of one-hot vectors of all possible classes. ``mask``: a
    boolean node with an element for each of these classes.
    """
    if node in build.rows:  # another mask selects rows of this tensor already
        raise Unselectable
    build.rows[node] = MaskedRows(mask, node.meta["val"].dim() - 1)
    return node


def _get_fixed_size(node: fx.Node) -> int | None:
    """Return the size of the last dim of the result of ``node`` if it is fixed; ``None`` if it depends on the data."""
    size = node.meta["val"].shape[-1]
    if isinstance(size, int):
        return size
    known: int | None = size.node.maybe_as_int()
    return known


def _reads_first_counts(user: fx.Node, maximum: int) -> bool:
    """Return whether the operator ``user``, which reads the counts of a ``bincount``, needs at most the first
    ``maximum`` counts: it slices at most these, or it only serves to assert how many counts there are."""
    if user.target is not aten.slice.Tensor:
        return _is_only_for_assertions(user)
    end = get_node_argument(user, "end")
    plain = (
        get_node_argument(user, "dim", 0) in (0, -1)
        and get_node_argument(user, "start") in (0, None)
        and get_node_argument(user, "step") == 1
    )
    return plain and isinstance(end, int) and 0 <= end <= maximum


def _is_only_for_assertions(node: fx.Node) -> bool:
    """Return whether ``node`` is an assertion, or computes a Python number that only assertions read."""
    if isinstance(node.meta.get("val"), Tensor):
        return False
    return node.target in ASSERTS or all(_is_only_for_assertions(user) for user in node.users)


# -- upper bounds of integers ------------------------------------------------------------------------------------------

# Operators whose result has all or some of the numbers of their operand, in another order or shape.
_PASSING = (
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default, aten.clone.default,
    aten.detach.default, aten.alias.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default,
    aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, aten.to.device, aten.lift_fresh_copy.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default, aten.ravel.default,
)  # fmt: skip
_TAKING = (
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.slice.Tensor, aten.select.int,
    aten.masked_select.default, aten.flip.default, aten.roll.default, aten.repeat.default, aten.max.default,
    aten.min.default, aten.amax.default, aten.amin.default,
)  # fmt: skip


def find_upper_bound(node: Any) -> int | None:
    """Return an integer that is greater than all elements of ``node``, which is an integer tensor of the graph or a
    number. Return ``None`` if no such bound is known."""
    found = [b for b in (_bound_by_origin(node), _bound_by_use(node)) if b is not None]
    return min(found) if found else None


def _bound_by_origin(node: Any) -> int | None:
    """Return an integer that is greater than all elements of ``node`` (an integer tensor of the graph, or a number), as
    follows from the operators that compute ``node``. Return ``None`` if no such bound is known."""
    if not isinstance(node, fx.Node):
        return node + 1 if isinstance(node, int) and not isinstance(node, bool) else None
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype.is_complex:
        return 2 if isinstance(value, Tensor) and value.dtype == torch.bool else None
    if value.dtype == torch.bool:
        return 2
    if not value.dtype.is_floating_point:
        chosen = get_num_choices(find_integer_source(node))
        if chosen is not None:
            return chosen
    args: Any = node.args
    if node.target in (*_PASSING, *_TAKING):
        return _bound_by_origin(args[0]) if isinstance(args[0], fx.Node) else None
    rule = _BOUNDS.get(node.target)
    return None if rule is None else rule(node)


def _find_common_bound(*given: Any) -> int | None:
    """Return an integer that is greater than all elements of all nodes and numbers in ``given``. Return ``None`` if no
    such bound is known for one of them."""
    found = [_bound_by_origin(g) for g in given]
    return None if any(b is None for b in found) else max(b for b in found if b is not None)


def _bound_by_smaller_operand(node: fx.Node) -> int | None:
    """Return an integer that is greater than all elements of ``node``, an operator such as ``minimum`` whose result
    exceeds neither of its first two operands. It is the smaller one of the operands' known bounds; ``None`` if neither
    is known."""
    found = [b for b in map(_bound_by_origin, node.args[:2]) if b is not None]
    return min(found) if found else None


def _bound_clamped_numbers(node: fx.Node) -> int | None:
    """Return an integer that is greater than all elements of the clamp ``node``; ``None`` if no such bound is known."""
    maximum, inner = get_node_argument(node, "max"), _bound_by_origin(node.args[0])
    own = maximum + 1 if isinstance(maximum, int) else None
    found = [b for b in (own, inner) if b is not None]
    minimum = get_node_argument(node, "min")
    bound = min(found) if found else None
    return (
        bound if bound is None or minimum is None else (max(bound, minimum + 1) if isinstance(minimum, int) else None)
    )


def _bound_remainders(node: fx.Node) -> int | None:
    """Return the divisor of the remainder ``node``, which is greater than all elements of the result, if the divisor is
    a positive integer. Otherwise return ``None``."""
    divisor = node.args[1]
    return divisor if isinstance(divisor, int) and divisor > 0 else None


def _find_sum_bound(node: fx.Node) -> int | None:
    """Return an integer greater than all elements of the addition ``node``; ``None`` if no such bound is known."""
    first, second = map(_bound_by_origin, node.args[:2])
    plain = not node.kwargs and len(node.args) == 2
    return first + second - 1 if plain and first is not None and second is not None else None


def _compute_arange_bound(node: fx.Node) -> int | None:
    """Return an integer that is greater than all elements of the ``arange`` ``node``; ``None`` if its end is not a
    fixed integer or its step is not 1.
    """
    end, step = get_node_argument(node, "end"), get_node_argument(node, "step", 1)
    return max(end, 1) if isinstance(end, int) and step == 1 else None


def _bound_bucket_indices(node: fx.Node) -> int | None:
    """Return the number of buckets of the ``bucketize`` or ``searchsorted`` ``node``, which is greater than all
    elements of its result; ``None`` if the number depends on the data."""
    edges: Any = node.args[1] if node.target is aten.bucketize.Tensor else node.args[0]
    size = edges.meta["val"].shape[-1]
    return size + 1 if isinstance(size, int) else None


_BOUNDS: dict[Any, Callable[[fx.Node], int | None]] = {
    aten.clamp.default: _bound_clamped_numbers,
    aten.clamp_max.default: _bound_clamped_numbers,
    aten.clamp_min.default: _bound_clamped_numbers,
    aten.remainder.Scalar: _bound_remainders,
    aten.fmod.Scalar: _bound_remainders,
    aten.add.Tensor: _find_sum_bound,
    aten.minimum.default: _bound_by_smaller_operand,
    aten.maximum.default: lambda node: _find_common_bound(*node.args[:2]),
    aten.relu.default: lambda node: _find_common_bound(node.args[0], 0),
    aten.where.self: lambda node: _find_common_bound(*node.args[1:3]),
    aten.where.ScalarOther: lambda node: _find_common_bound(*node.args[1:3]),
    aten.where.ScalarSelf: lambda node: _find_common_bound(*node.args[1:3]),
    aten.where.Scalar: lambda node: _find_common_bound(*node.args[1:3]),
    aten.masked_fill.Scalar: lambda node: _find_common_bound(node.args[0], node.args[2]),
    aten.cat.default: lambda node: _find_common_bound(*node.args[0]),  # type: ignore[misc]
    aten.stack.default: lambda node: _find_common_bound(*node.args[0]),  # type: ignore[misc]
    aten.full.default: lambda node: _find_common_bound(node.args[1]),
    aten.zeros_like.default: lambda node: 1,
    aten.zeros.default: lambda node: 1,
    aten.ones_like.default: lambda node: 2,
    aten.ones.default: lambda node: 2,
    aten.one_hot.default: lambda node: 2,
    aten.arange.default: _compute_arange_bound,
    aten.arange.start: _compute_arange_bound,
    aten.bucketize.Tensor: _bound_bucket_indices,
    aten.searchsorted.Tensor: _bound_bucket_indices,
}


def _bound_by_use(node: Any) -> int | None:
    """Return an integer that is greater than all elements of ``node``, as follows from operators that use the same
    numbers as indices: torch raises an error for an index that is out of range, so the size of the indexed dim is a
    bound. Return ``None`` if there are no such operators."""
    if not isinstance(node, fx.Node):
        return None
    key = ValueNumbers()
    wanted, found = key(_find_number_source(node)), []
    for reader in node.graph.nodes:
        for numbers, maximum in _read_as_places(reader):
            if (
                isinstance(maximum, int)
                and isinstance(numbers, fx.Node)
                and key(_find_number_source(numbers)) == wanted
            ):
                found.append(maximum)
    return min(found) if found else None


def _find_number_source(node: fx.Node) -> fx.Node:
    """Return the node from which ``node`` is computed only by reshapes, permutations, copies and casts, so that both
    have the same numbers. Return ``node`` itself if it is computed in another way."""
    while node.target in _PASSING:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _read_as_places(reader: fx.Node) -> list[tuple[Any, Any]]:
    """Return a list of the operands that the operator ``reader`` uses as indices, each as (operand, size of the indexed
    dim). The size is an upper bound of the operand's numbers, because an index must be in range; it is ``None`` if it
    is not known. The class numbers of a classification loss count as indices of its scores."""
    args: Any = reader.args
    if reader.target in _CLASSIFYING:
        scores, classes = args[0].meta["val"], args[1]
        by_number = not classes.meta["val"].dtype.is_floating_point and get_node_argument(reader, "ignore_index") < 0
        return [(classes, scores.shape[min(1, scores.dim() - 1)])] if by_number else []
    if reader.target is aten.embedding.default:
        return [(args[1], args[0].meta["val"].shape[0])]
    if reader.target is aten.one_hot.default:
        return [(args[0], args[1] if len(args) > 1 and args[1] > 0 else None)]
    if reader.target in (aten.index_select.default, aten.gather.default):
        value = args[0].meta["val"]
        return [(args[2], value.shape[args[1]])] if value.dim() else []
    if reader.target is aten.index.Tensor:
        value = args[0].meta["val"]
        places = [(i, d) for d, i in enumerate(args[1]) if isinstance(i, fx.Node)]
        if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i, _ in places):
            return []
        return [(i, value.shape[d]) for i, d in places]
    return []


_CLASSIFYING = (
    aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default,
)  # fmt: skip
