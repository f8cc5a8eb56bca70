"""Compute the values of graph nodes that depend on constants only, without creating large tensors.

A tensor is kept with size 1 in every dim along which it is constant. A comparison of a value that varies along one dim
with a value that varies along another, such as ``column <= row`` of a causal mask, is kept as the two vectors. The cost
of a mask thus grows with the length of the sequence, not with its square.

:class:`MaskEvaluator` also follows integers that depend on data, such as the document of each position. It describes
each of them as a copy of a certain element of a tensor of the graph; the number itself is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.rewrite import aten, get_node_tensor, list_node_sizes
from partitioner.passes.normalize.mask_values import (
    MASKED,
    Comparison,
    Condition,
    ConditionalValue,
    DataComparison,
    DataSum,
    GatheredValue,
    LookedUpValue,
    Value,
    align_rank,
    compare_sums,
    exchange_last_dims,
    is_exchanged_value,
    is_pointwise,
    is_same_value,
)

LIMIT = 1 << 22  # most elements of a tensor that is created in full


class UnknownValueError(Exception):
    """Raised if the value of a node cannot be computed from constants, or only with a tensor of more than ``LIMIT``
    (2**22) elements."""


class ConstantEvaluator:
    """Computes the values of graph nodes that depend on constants only, and caches them.

    ``constants``: placeholder name -> value, of the placeholders that are constants.
    """

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self.constants = constants
        self.values: dict[fx.Node, Value | None] = {}

    def find_value(self, node: fx.Node) -> Value | None:
        """Return the value of ``node``, cached; ``None`` if it depends on more than constants or cannot be computed
        without a tensor of more than ``LIMIT`` (2**22) elements.

        The value has one of four forms:

        * a tensor, with size 1 in every dim along which it is constant;
        * a tuple of conditions, for a boolean tensor that is true where all of them hold;
        * a :class:`ConditionalValue`, for a tensor with one number where all conditions hold and another elsewhere;
        * only in a :class:`MaskEvaluator`: a :class:`GatheredValue`, for a tensor whose elements are copies of
          elements, at known indices, of a tensor that depends on data.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in self.values]
            if waiting and top not in self.values:
                stack += waiting
            else:
                stack.pop()
                if top not in self.values:
                    self.values[top] = self.compute_value(top)
        return self.values[node]

    def compute_value(self, node: fx.Node) -> Value | None:
        """Compute the value of ``node`` from the cached values of its operands, and return it in one of the forms of
        :meth:`find_value`, such as a tensor. Return ``None`` if the value depends on more than constants or would be
        too large."""
        if node.op == "placeholder":
            constant = self.constants.get(node.name)
            return None if constant is None or constant.numel() > LIMIT else _squeeze_constant_dims(constant)
        operands = [self.values[n] for n in node.all_input_nodes]
        if node.op != "call_function" or any(v is None for v in operands):
            return None
        try:
            known: Callable[[fx.Node], Any] = self.values.__getitem__
            args: Any = fx.node.map_arg(node.args, known)
            kwargs: Any = fx.node.map_arg(node.kwargs, known)
            rule = RULES.get(node.target)
            if rule is None and is_pointwise(node.target):
                rule = _evaluate_pointwise
            result = self.evaluate_expanded(node) if rule is None else rule(node, *args, **kwargs)
            if isinstance(result, GatheredValue):
                return result.map_tensors(_squeeze_constant_dims)
            return _squeeze_constant_dims(result) if isinstance(result, Tensor) else result
        except (UnknownValueError, RuntimeError, IndexError, TypeError):
            return None

    def evaluate_expanded(self, node: fx.Node) -> Tensor:
        """Execute the operator of ``node`` on the known values of its operands, expanded to full size, and return the
        result. Raise :class:`UnknownValueError` if it draws random numbers, or if its result or an operand has more
        than ``LIMIT`` (2**22) elements."""
        target: Any = node.target
        random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        tensor = node.meta.get("val")
        if random or not isinstance(tensor, Tensor) or tensor.numel() > LIMIT:
            raise UnknownValueError
        args: Any
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: _expand_to_sizes(self.values[n], list(list_node_sizes(n)))
        )
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result: Tensor = target(*args, **kwargs)
        return result


_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
_MOST_DIMS = 4  # most dims of a data-dependent tensor that is followed


class MaskEvaluator(ConstantEvaluator):
    """Computes descriptions of the elements of nodes from which attention masks are made. Besides constants, it
    describes integers that depend on data, such as the document of each position. Their numbers are unknown, but a
    :class:`GatheredValue` says of which element of which tensor each of them is a copy.

    For an integer tensor that no rule covers, such as a running sum over data, the :class:`GatheredValue` refers to the
    tensor's own elements. If an earlier node computes the same tensor with its last two dims exchanged, the
    :class:`GatheredValue` refers to the elements of that node instead.
    """

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        super().__init__(constants)
        self._described: dict[tuple[Any, tuple[int, ...]], list[fx.Node]] = {}  # by operator and shape

    def compute_value(self, node: fx.Node) -> Value | None:
        """Return the value of ``node``, such as a tensor or a tuple of conditions, if it follows from constants or from
        rules for integers that depend on data. Otherwise, if ``node`` is an integer tensor of one to four dims of at
        most ``LIMIT`` (2**22) elements each, return a :class:`GatheredValue` that refers to elements of ``node``
        itself. Otherwise return ``None``."""
        value = super().compute_value(node)
        return self.describe_data(node) if value is None else value

    def describe_data(self, node: fx.Node) -> GatheredValue | None:
        """Return a :class:`GatheredValue` (a description of an integer tensor by elements of a tensor of the graph) for
        ``node``. Return ``None`` unless ``node`` is an integer tensor of one to four dims of at most ``LIMIT`` (2**22)
        elements each.

        The elements are those of ``node`` itself, or of an equal tensor with the last two dims exchanged. If ``node``
        is a sum or difference of integers, or reads a table at indices that depend on data, the result's field ``sum``
        describes this, if possible.
        """
        described = describe_integers(node)
        rule = _SUMS.get(node.target)
        if described is None:
            return None
        described = self._find_exchanged(node) or described
        if rule is None:
            return described
        known: Callable[[fx.Node], Any] = self.values.__getitem__
        try:
            args: Any = fx.node.map_arg(node.args, known)
            found = None if node.kwargs else rule(node, *args)
        except (UnknownValueError, RuntimeError, IndexError, TypeError):
            found = None
        return replace(described, sum=found)

    def _find_exchanged(self, node: fx.Node) -> GatheredValue | None:
        """Return a :class:`GatheredValue` that describes ``node`` by the elements of an earlier node, if that node has
        the same elements with its last two dims exchanged; return ``None`` if there is no such node. For example, a
        model may compute ``position // chunk`` once for keys and once for queries."""
        sizes = _align_sizes(list_node_sizes(node))
        for other in self._described.get((node.target, sizes[:-2] + sizes[:-3:-1]), ()):
            if is_exchanged_value(node, other, self.values):
                return exchange_last_dims(
                    GatheredValue(other, list_dim_indices(list_node_sizes(other))), get_node_tensor(node).dim()
                )
        self._described.setdefault((node.target, sizes), []).append(node)
        return None


def _align_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape ``sizes`` without leading dims of size 1, but with at least two dims."""
    found = [1, 1, *sizes]
    while len(found) > 2 and found[0] == 1:
        found = found[1:]
    return tuple(found)


def describe_integers(node: fx.Node) -> GatheredValue | None:
    """Return a :class:`GatheredValue` for ``node`` that refers to the elements of ``node`` itself. Rearrangements of
    ``node`` can then be described by its elements, and compared. Return ``None`` unless ``node`` is an integer tensor
    of one to four dims of at most ``LIMIT`` (2**22) elements each."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        return None
    if not 1 <= tensor.dim() <= _MOST_DIMS or max(tensor.shape) > LIMIT:
        return None
    return GatheredValue(node, list_dim_indices(tensor.shape))


def list_dim_indices(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return one int64 index tensor for each dim of a tensor of the shape ``shape``: ``arange(size)`` along this dim,
    with size 1 in all other dims."""
    rank = len(shape)
    return tuple(torch.arange(n).reshape([n if i == d else 1 for i in range(rank)]) for d, n in enumerate(shape))


def _squeeze_constant_dims(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with every dim along which its elements are equal reduced to size 1."""
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor


def _expand_to_sizes(tensor: Any, sizes: list[int]) -> Tensor:
    if not isinstance(tensor, Tensor) or torch.Size(sizes).numel() > LIMIT:
        raise UnknownValueError
    return tensor.expand(sizes)


def _expand_along_dim(tensor: Any, dim: int, size: int) -> Tensor:
    """Return ``tensor`` expanded from size 1 to ``size`` along ``dim``; other dims keep their sizes. Raise
    :class:`UnknownValueError` if ``tensor`` is not a tensor, or if the result would have more than ``LIMIT`` (2**22)
    elements.
    """
    if not isinstance(tensor, Tensor):
        raise UnknownValueError
    sizes = list(tensor.shape)
    sizes[dim] = size
    return _expand_to_sizes(tensor, sizes)


# --- operators --------------------------------------------------------------------------------------------------------
def _evaluate_full(node: fx.Node, sizes: list[int], value: Any, **_: Any) -> Tensor:
    return torch.full([1] * len(sizes), value, dtype=get_node_tensor(node).dtype)


def _evaluate_arange(node: fx.Node, start: Any, end: Any, step: Any, **_: Any) -> Tensor:
    if list_node_sizes(node)[0] > LIMIT:
        raise UnknownValueError
    return torch.arange(start, end, step, dtype=get_node_tensor(node).dtype)


def _evaluate_pointwise(node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """Return the value of the pointwise operator ``node``. ``args``, ``kwargs``: the values of its operands. The form
    of the result depends on the operands: a mask (a tuple of conditions or a :class:`ConditionalValue`) if one of them
    is a mask; otherwise a :class:`GatheredValue` if one of them is a :class:`GatheredValue`; otherwise a tensor. Raise
    :class:`UnknownValueError` if the result does not have this form, or has more than ``LIMIT`` (2**22) elements."""
    if any(isinstance(a, tuple | ConditionalValue) for a in args):
        return _evaluate_choice(node, args, kwargs)
    if any(isinstance(a, GatheredValue) for a in args):
        return _shift_gathered(node, *args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.broadcast_shapes(*(t.shape for t in tensors)).numel() > LIMIT:
        raise UnknownValueError
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return align_rank(result, get_node_tensor(node).dim())


def _shift_gathered(node: fx.Node, a: Any, b: Any, *rest: Any) -> GatheredValue:
    """Return the value of the operator ``node``, which adds an integer to a :class:`GatheredValue`, subtracts an
    integer from it, or casts it to another integer type without loss. ``a``, ``b``, ``rest``: the values of the
    operands. Raise :class:`UnknownValueError` for any other operator."""
    if isinstance(a, GatheredValue) and node.target is aten.to.dtype and preserves_integers(node):
        return a
    add, subtract = (getattr(aten, name) for name in ("add", "sub"))
    kind, exact = getattr(node.target, "overloadpacket", None), get_node_tensor(node).dtype in _INTEGERS
    one, other = (a, b) if isinstance(a, GatheredValue) else (b, a)
    if isinstance(other, Tensor) and other.numel() == 1 and other.dtype in _INTEGERS:
        other = int(other)
    whole = isinstance(one, GatheredValue) and isinstance(other, int) and not isinstance(other, bool)
    if not whole or not exact or rest or node.kwargs or kind not in (add, subtract) or (kind is subtract and one is b):
        raise UnknownValueError
    rank = get_node_tensor(node).dim()
    moved: GatheredValue = one.map_tensors(lambda t: align_rank(t, rank))
    return moved.shift(other if kind is add else -other)


def preserves_integers(cast: fx.Node) -> bool:
    """Return whether the node ``cast`` converts a signed integer type to one of at least as many bytes, so that all
    values are preserved."""
    before, after = get_node_tensor(cast.args[0]).dtype, get_node_tensor(cast).dtype  # type: ignore[arg-type]
    return before in _INTEGERS and after in _INTEGERS and before.itemsize <= after.itemsize


def _evaluate_choice(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Return the value of the pointwise operator ``node`` if an operand is a mask: a tuple of conditions that must all
    hold, or a :class:`ConditionalValue`, which has one number where conditions hold and another elsewhere. The result
    is a mask, too; if all its elements are equal, it is a tensor with this number.

    ``args``, ``kwargs``: the values of the operands. An operand that is not a mask must be a single number, or a
    constant that can be written as a mask. Raise :class:`UnknownValueError` if the result is not a mask.
    """
    dtype = get_node_tensor(node).dtype
    wide = [i for i, a in enumerate(args) if not _is_number(a)]
    if len(wide) > _MOST_CHOICES:
        raise UnknownValueError
    masks = [_as_choice(args[i]) for i in wide]
    if any(m.is_bound for m in masks) and (kwargs or not _keeps_bounds(node, args, masks)):
        raise UnknownValueError

    def compute(numbers: Sequence[Tensor]) -> Tensor:
        given = [a.reshape(()) if isinstance(a, Tensor) and a.numel() == 1 else a for a in args]
        for place, number in zip(wide, numbers, strict=True):
            given[place] = number
        return torch.as_tensor(node.target(*given, **kwargs)).to(dtype)  # type: ignore[operator]

    return _combine_choices(masks, compute, get_node_tensor(node).dim())


_MOST_CHOICES = 3  # most masks that one operator combines; where() of three masks


def _is_number(value: Any) -> bool:
    """Return whether ``value``, the value of an operand, is a number or a tensor of a single element, and not a larger
    tensor, a mask or a description of integers that depend on data."""
    return not isinstance(value, Tensor | tuple | ConditionalValue | GatheredValue) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _as_choice(value: Any) -> ConditionalValue:
    """Return ``value``, a mask or a constant tensor, as a :class:`ConditionalValue`, which has one number where
    conditions hold and another elsewhere. A constant must be boolean, have exactly two different numbers, or be an
    additive attention mask (0 where a score is shown, -6e4 or less elsewhere). Raise :class:`UnknownValueError` for any
    other value."""
    if isinstance(value, tuple):
        return ConditionalValue(value, _TRUE, _FALSE)
    if isinstance(value, ConditionalValue):
        return value
    if not isinstance(value, Tensor) or value.isnan().any():
        raise UnknownValueError
    if value.dtype is torch.bool:
        return ConditionalValue((value,), _TRUE, _FALSE)
    numbers = value.unique()
    if numbers.numel() == 2:
        return ConditionalValue((value == numbers[1],), numbers[1], numbers[0])
    hidden = numbers[numbers != 0]
    if hidden.numel() + 1 != numbers.numel() or not hidden.numel() or not bool((hidden <= MASKED).all()):
        raise UnknownValueError
    return ConditionalValue((value == 0,), numbers.new_zeros(()), hidden.max(), True)


_BOUNDED = frozenset(
    getattr(aten, name)
    for name in ("add", "mul", "div", "to", "maximum", "minimum", "clamp", "clamp_min", "where", "masked_fill")
)
_ORDERS = frozenset(getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def _keeps_bounds(node: fx.Node, args: tuple[Any, ...], masks: Sequence[ConditionalValue]) -> bool:
    """Return whether the operator ``node`` may be applied to masks whose field ``hidden`` is only an upper bound on the
    numbers that hide scores. If ``node`` compares a mask with a larger number, the result is exact. Otherwise, the
    result is an upper bound, too.

    ``args``: the values of the operands. ``masks``: the operands that are masks.
    """
    kind = getattr(node.target, "overloadpacket", None)
    numbers = [float(a) for a in args if isinstance(a, bool | int | float | Tensor) and _is_number(a)]
    if kind in _ORDERS:
        return len(masks) == len(numbers) == 1 and numbers[0] > float(masks[0].hidden)
    if kind in (aten.mul, aten.div):
        return len(masks) == len(numbers) == 1 and numbers[0] > 0
    return kind in _BOUNDED and get_node_tensor(node).is_floating_point()


def _combine_choices(
    masks: Sequence[ConditionalValue], compute: Callable[[Sequence[Tensor]], Tensor], rank: int
) -> Value:
    """Return the result of an operator on ``masks``, simplified as by :func:`_simplify_choice`. The result has one
    number where the conditions of all masks hold, and another elsewhere. Raise :class:`UnknownValueError` if the result
    does not have this form.

    Wherever not all conditions hold, the operator must give a single number, or numbers that hide a score (-6e4 or
    less). A mask with a single condition may be replaced by its equivalent form with the negated condition and
    exchanged numbers. ``compute``: returns the operator's result, given one number for each mask. ``rank``: the number
    of dims of the result.
    """
    bound = any(m.is_bound for m in masks)
    for given in itertools.product(*(_list_readings(m) for m in masks)):
        shown = compute([m.shown for m in given])
        rest = [
            compute([(m.shown, m.hidden)[h] for m, h in zip(given, hides, strict=True)])
            for hides in itertools.product(*((0, 1) if m.terms else (0,) for m in given))
            if any(hides)
        ]
        if not rest:
            return shown
        equal = all(bool(r == rest[0]) for r in rest)
        hiding = shown.is_floating_point() and bool(shown == 0) and all(bool(r <= MASKED) for r in rest)
        if not (equal or hiding):
            continue
        terms = tuple(map_condition(t, lambda x: align_rank(x, rank)) for m in given for t in m.terms)
        hidden = rest[0] if equal else torch.stack(rest).max()
        inexact = not equal or (bound and shown.dtype is not torch.bool)
        return _simplify_choice(ConditionalValue(terms, shown, hidden, inexact))
    raise UnknownValueError


def _list_readings(mask: ConditionalValue) -> list[ConditionalValue]:
    """Return a list of equivalent forms of ``mask``: ``mask`` itself and, if it has a single condition that can be
    negated, the form with the negated condition and with ``shown`` and ``hidden`` exchanged."""
    if len(mask.terms) != 1 or mask.is_bound:
        return [mask]
    try:
        opposite = _negate_condition(mask.terms[0])
    except TypeError:  # the condition has no single opposite
        return [mask]
    return [mask, ConditionalValue((opposite,), mask.hidden, mask.shown)]


_TRUE, _FALSE = torch.tensor(True), torch.tensor(False)


def _simplify_choice(choice: ConditionalValue) -> Value:
    """Return the simplest form of ``choice``: a tensor with the number itself if ``shown`` and ``hidden`` are equal;
    the tuple of the conditions if ``shown`` is true and ``hidden`` is false; otherwise ``choice`` unchanged."""
    if not choice.is_bound and bool(choice.shown == choice.hidden):
        return choice.shown
    return choice.terms if choice.shown.dtype is torch.bool and choice.shown and not choice.hidden else choice


def _negate_condition(condition: Condition) -> Condition:
    return ~condition if isinstance(condition, Tensor) else condition.negated()


def require_additive(node: fx.Node, value: Any) -> ConditionalValue:
    """Return ``value`` as an additive attention mask, which is 0 where all of its conditions hold (shown scores) and
    ``MASKED`` (-6e4) or less elsewhere (hidden scores). Raise :class:`UnknownValueError` if ``value`` is not such a
    mask. ``node``: the node whose value is computed; the tensors in the conditions get as many dims as ``node`` has."""
    if isinstance(value, Tensor) and value.is_floating_point():
        hidden = value[value != 0]
        most = hidden.max() if hidden.numel() else value.new_tensor(-torch.inf)
        value = ConditionalValue((value == 0,), value.new_zeros(()), most, hidden.unique().numel() > 1)
    if isinstance(value, ConditionalValue) and value.hidden == 0 and len(value.terms) == 1:
        value = ConditionalValue((_negate_condition(value.terms[0]),), value.hidden, value.shown)
    if not isinstance(value, ConditionalValue) or value.shown != 0 or not value.hidden <= MASKED:
        raise UnknownValueError
    rank = get_node_tensor(node).dim()
    terms = tuple(map_condition(t, lambda x: align_rank(x, rank)) for t in value.terms)
    return replace(value, terms=terms)


def _evaluate_comparison(node: fx.Node, a: Any, b: Any) -> Value:
    """Return the value of the comparison ``node`` of two operands with the values ``a`` and ``b``. Raise
    :class:`UnknownValueError` if it has none of these forms:

    * if an operand is a mask (a tuple of conditions or a :class:`ConditionalValue`), the result is a mask;
    * if an operand is a :class:`GatheredValue`, the result is a tuple of conditions on integers that depend on data;
    * if both operands are constants, the result is a boolean tensor, or, if this would have more than ``LIMIT``
      elements, a tuple with one :class:`Comparison`.
    """
    if isinstance(a, tuple | ConditionalValue) or isinstance(b, tuple | ConditionalValue):
        return _evaluate_choice(node, (a, b), {})
    if isinstance(a, GatheredValue) or isinstance(b, GatheredValue):
        sums = [_as_sum(x) for x in (a, b)]
        name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
        both = isinstance(a, GatheredValue) and isinstance(b, GatheredValue)
        if both and is_same_value(a.source, b.source):
            terms: tuple[Condition, ...] | None = (DataComparison(name, a, replace(b, source=a.source)),)
        else:
            terms = None if sums[0] is None or sums[1] is None else compare_sums(name, sums[0], sums[1])
        if terms is None:
            raise UnknownValueError
        width = get_node_tensor(node).dim()
        return tuple(map_condition(t, lambda x: align_rank(x, width)) for t in terms)
    given = a, b
    a, b = (torch.as_tensor(x) for x in given)
    if torch.broadcast_shapes(a.shape, b.shape).numel() <= LIMIT:
        return _evaluate_pointwise(node, *given)
    name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
    rank, kind = get_node_tensor(node).dim(), torch.result_type(a, b)
    a, b = (align_rank(widen_number_type(x.to(kind)), rank) for x in (a, b))
    return (Comparison(name, a, b),)


def _as_sum(value: Any) -> DataSum | None:
    """Return ``value`` as a :class:`DataSum` if it is an integer, a constant integer tensor, or a
    :class:`GatheredValue`; otherwise return ``None``."""
    if isinstance(value, GatheredValue):
        return value.as_sum()
    if isinstance(value, int) and not isinstance(value, bool):
        return DataSum((torch.tensor(value),), ())
    return DataSum((value.long(),), ()) if isinstance(value, Tensor) and value.dtype in _INTEGERS else None


def _add_integers(node: fx.Node, a: Any, b: Any) -> DataSum | None:
    """Return the integer sum or difference ``node`` as a :class:`DataSum`. ``a``, ``b``: the values of its operands, at
    least one of which depends on data. Return ``None`` if an operand cannot be written as a :class:`DataSum` or is an
    absolute value, or if the sum has more than four terms that depend on data."""
    one, other = (_as_sum(x) for x in (a, b))
    if other is not None and getattr(node.target, "overloadpacket", None) is aten.sub:
        other = other.negate()
    found = None if one is None or other is None else one.add(other)
    rank = get_node_tensor(node).dim()
    many = found is None or len(found.parts) > _MOST_PARTS
    return None if found is None or many else found.map_tensors(lambda t: align_rank(t, rank))


_MOST_PARTS = 4  # most integers that depend on data in a sum; a distance within documents has four


def _negate_integers(node: fx.Node, x: Any) -> DataSum | None:
    found = _as_sum(x)
    return None if found is None else found.negate()


def _take_magnitude(node: fx.Node, x: Any) -> DataSum | None:
    found = _as_sum(x)
    return None if found is None else replace(found, is_magnitude=True)


def _look_up(node: fx.Node, table: Any, indices: list[Any]) -> DataSum | None:
    """Return the result of ``node``, which reads a table (its first operand) at ``indices``, as a :class:`DataSum` with
    one term. Return ``None`` unless all indices are known values and at least one of them depends on data.

    ``indices``: for each dim of the table, the value of its index. ``table`` is not used.
    """
    source: Any = node.args[0]
    rank, known = get_node_tensor(node).dim(), [i for i in indices if isinstance(i, Tensor | GatheredValue)]
    if len(known) != len(list_node_sizes(source)) or not any(isinstance(i, GatheredValue) for i in known):
        return None
    return DataSum((), ((1, LookedUpValue(source, tuple(known)).map_tensors(lambda t: align_rank(t, rank))),))


def _look_up_along(node: fx.Node, table: Any, dim: int, index: Any) -> DataSum | None:
    """Return the result of ``node``, a ``gather`` or ``index_select`` from a table (its first operand) along ``dim``,
    as a :class:`DataSum` with one term. Return ``None`` if the index does not depend on data, or if the result and the
    table have different sizes in another dim. ``index``: the value of the index. ``table`` is not used."""
    sizes, found = list_node_sizes(node.args[0]), list_node_sizes(node)  # type: ignore[arg-type]
    along = dim % len(sizes)
    if any(a != b for d, (a, b) in enumerate(zip(sizes, found, strict=True)) if d != along):
        return None
    indices: list[Any] = list(list_dim_indices(found))
    if len(list_node_sizes(node.args[2])) != len(found) and len(found) != 1:  # type: ignore[arg-type]
        return None
    indices[along] = index
    return _look_up(node, table, indices)


_SUMS: dict[Any, Callable[..., DataSum | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), _add_integers),
    aten.neg.default: _negate_integers,
    aten.abs.default: _take_magnitude,
    aten.index.Tensor: _look_up,
    aten.gather.default: _look_up_along,
    aten.index_select.default: _look_up_along,
}


def widen_number_type(x: Tensor) -> Tensor:
    """Return ``x`` as int64, or as float64 if it is a floating-point tensor, so that its negation is exact."""
    return x.double() if x.is_floating_point() else x.long()


def _list_conditions(value: Any) -> tuple[Condition, ...]:
    """Return a tuple of conditions of which all hold exactly where the boolean mask ``value`` is true. ``value``: a
    boolean tensor, a tuple of conditions that must all hold, or a :class:`ConditionalValue`. Raise
    :class:`UnknownValueError` if there are no such conditions."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Tensor):
        return (value,)
    single = isinstance(value, ConditionalValue) and len(value.terms) == 1
    if single and not value.shown and value.hidden and value.shown.dtype is torch.bool:
        return (_negate_condition(value.terms[0]),)
    raise UnknownValueError


def _evaluate_and(node: fx.Node, a: Any, b: Any) -> Value:
    """Return the value of ``node``, a logical ``and`` of two operands with the values ``a`` and ``b``: a boolean
    tensor, or a tuple of the conditions of both operands, which must all hold. If one operand is a single true element,
    the result is the value of the other operand. Raise :class:`UnknownValueError` if an operand cannot be written as
    conditions.
    """
    a, b = (torch.tensor(x) if isinstance(x, bool) else x for x in (a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _evaluate_pointwise(node, a, b)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor) and one.numel() == 1 and bool(one):
            return map_value_parts(other, lambda t: align_rank(t, get_node_tensor(node).dim()))
    terms = _list_conditions(a) + _list_conditions(b)
    return tuple(map_condition(t, lambda x: align_rank(x, get_node_tensor(node).dim())) for t in terms)


def evaluate_where(node: fx.Node, condition: Any, a: Any, b: Any) -> Value:
    """Return the value of ``node``, a ``where`` of operands with the values ``condition``, ``a`` and ``b``. If all
    three are constant and the result is not too large, it is a tensor. Otherwise it is a :class:`ConditionalValue` (one
    number where conditions hold, another elsewhere) or a tuple of conditions that must all hold. Raise
    :class:`UnknownValueError` if the result has none of these forms."""
    if any(isinstance(x, GatheredValue) for x in (condition, a, b)):
        raise UnknownValueError
    dtype, rank = get_node_tensor(node).dtype, get_node_tensor(node).dim()
    masks = [x for x in (condition, a, b) if isinstance(x, tuple | ConditionalValue)]
    if not masks:
        one, other = (torch.as_tensor(x, dtype=dtype) for x in (a, b))
        if torch.broadcast_shapes(condition.shape, one.shape, other.shape).numel() > LIMIT:
            raise UnknownValueError
        result: Tensor = torch.where(condition, one, other)
        return align_rank(result, rank)
    values = [condition, *(torch.as_tensor(x, dtype=dtype) if isinstance(x, int | float) else x for x in (a, b))]
    given = [_as_number(x) if _is_number(x) else _as_choice(x) for x in values]
    if given[0].is_bound:
        raise UnknownValueError

    def compute(numbers: Sequence[Tensor]) -> Tensor:
        return torch.where(numbers[0].bool(), numbers[1].to(dtype), numbers[2].to(dtype))

    return _combine_choices(given, compute, rank)


def _as_number(value: Any) -> ConditionalValue:
    """Return ``value``, a number or a constant tensor of a single element, as a :class:`ConditionalValue` without
    conditions, which has this number everywhere."""
    number = torch.as_tensor(value).reshape(())
    return ConditionalValue((), number, number)


def _evaluate_not(node: fx.Node, x: Any) -> Value:
    """Return the value of ``node``, the logical negation of an operand with the value ``x``: a tensor if ``x`` is a
    tensor; the negated condition if ``x`` is a single condition; otherwise a :class:`ConditionalValue` that is false
    where all conditions of ``x`` hold and true elsewhere."""
    if isinstance(x, Tensor):
        return _evaluate_pointwise(node, x)
    if isinstance(x, ConditionalValue):
        return _evaluate_choice(node, (x,), {})
    terms = _list_conditions(x)
    return (_negate_condition(terms[0]),) if len(terms) == 1 else ConditionalValue(terms, _FALSE, _TRUE)


def _masked_fill(node: fx.Node, x: Any, mask: Any, value: Any) -> Value:
    return evaluate_where(node, mask, value, x)


def _evaluate_index_put(node: fx.Node, x: Any, indices: list[Any], value: Any, accumulate: bool = False) -> Value:
    """Return the value of ``node``, which sets the elements of its operand to one number, ``value``, where a boolean
    mask of the same shape is true. ``x``: the value of the operand. ``indices``: a list with the value of the mask.
    Raise :class:`UnknownValueError` for an index that is not such a mask, for several numbers, or if ``accumulate`` is
    true."""
    given: Any = node.args[1]
    mask = given[0]
    single = isinstance(value, Tensor) and value.numel() == 1
    if accumulate or len(given) != 1 or not isinstance(mask, fx.Node) or not single:
        raise UnknownValueError
    if get_node_tensor(mask).dtype is not torch.bool or list_node_sizes(mask) != list_node_sizes(node):
        raise UnknownValueError
    return evaluate_where(node, indices[0], value.reshape(()), x)


def _make_structural_rule(operation: Callable[..., Tensor]) -> Callable[..., Value]:
    """Return a function ``rule(node, value, *args)`` that computes the value of a node that only rearranges dims, such
    as a transpose. ``value``: the value of its operand. ``args``: its further arguments.

    The function applies ``operation(tensor, *args)`` to all tensors of which ``value`` consists, as
    :func:`map_value_parts` does.
    """

    def rule(node: fx.Node, value: Value, *args: Any) -> Value:
        return map_value_parts(value, lambda t: operation(t, *args))

    return rule


def map_value_parts(value: Value, move: Callable[[Tensor], Tensor]) -> Value:
    """Return the value of a node that rearranges the dims of an operand with the value ``value``. ``move``: the
    function that rearranges the dims of one tensor.

    A tensor ``value`` is rearranged itself. If ``value`` is a tuple of conditions or a :class:`ConditionalValue`, both
    sides of each comparison are rearranged. If ``value`` describes the operand by elements of another tensor, the index
    tensors are rearranged.
    """
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, ConditionalValue):
        return replace(value, terms=tuple(map_condition(t, move) for t in value.terms))
    return tuple(map_condition(t, move) for t in value) if isinstance(value, tuple) else value.map_tensors(move)


def map_condition(condition: Condition, move: Callable[[Tensor], Tensor]) -> Condition:
    return move(condition) if isinstance(condition, Tensor) else condition.map_tensors(move)


def _evaluate_expand(node: fx.Node, value: Value, _: Any) -> Value:
    rank = get_node_tensor(node).dim()
    return map_value_parts(value, lambda t: align_rank(t, rank))


def _evaluate_reshape(node: fx.Node, value: Value, sizes: list[int]) -> Value:
    """Return the value of ``node``, a reshape to the shape ``sizes`` of an operand with the value ``value``. Raise
    :class:`UnknownValueError` if a tensor in ``value`` varies along dims that are joined or split and would become too
    large."""
    return reshape_value(value, list_node_sizes(node.args[0]), list_node_sizes(node))  # type: ignore[arg-type]


def reshape_value(value: Value, old: Sequence[int], new: Sequence[int]) -> Value:
    """Return the value of a tensor after its reshape from the shape ``old`` to the shape ``new``. ``value``: the value
    before, such as a tensor with size 1 in constant dims, or a tuple of conditions; the result has the same form. Raise
    :class:`UnknownValueError` if a tensor in ``value`` varies along dims that are joined or split and would become too
    large."""
    groups = _group_dims(old, new)

    def move(t: Tensor) -> Tensor:
        t = align_rank(t, len(old))
        before: list[int] = []
        after: list[int] = []
        for dims, sizes in groups:
            varies = any(t.shape[d] != 1 for d in dims)
            before += [old[d] if varies else 1 for d in dims]
            after += sizes if varies else [1] * len(sizes)
        return _squeeze_constant_dims(_expand_to_sizes(t, before).reshape(after))

    return map_value_parts(value, move)


def _group_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of consecutive dims that a reshape from the shape ``old`` to the shape ``new`` maps to
    each other, as pairs (dims of ``old``, sizes in ``new``). A dim of size 1 is a group of its own."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and old[i] == 1:
            groups.append(([i], []))
            i += 1
        elif j < len(new) and new[j] == 1:
            groups.append(([], [1]))
            j += 1
        else:
            if i == len(old) or j == len(new) or 0 in (old[i], new[j]):
                raise UnknownValueError
            dims, sizes, one, other = [i], [new[j]], old[i], new[j]
            i, j = i + 1, j + 1
            while one != other:
                if one < other:
                    one, i = one * old[i], i + 1
                    dims.append(i - 1)
                else:
                    other, j = other * new[j], j + 1
                    sizes.append(new[j - 1])
            groups.append((dims, sizes))
    return groups


def _evaluate_repeat(node: fx.Node, value: Value, times: list[int]) -> Value:
    """Return the value of ``node``, which repeats its operand ``times[d]`` times along dim ``d`` of the result.
    ``value``: the value of the operand; the result has the same form."""
    sizes = list_node_sizes(node)

    def move(t: Tensor) -> Tensor:
        t = align_rank(t, len(sizes))
        return t.repeat([1 if size == 1 else count for size, count in zip(t.shape, times, strict=True)])

    return map_value_parts(value, move)


def _evaluate_repeat_interleave(node: fx.Node, value: Value, times: int, dim: int) -> Value:
    """Return the value of ``node``, which repeats each element of its operand ``times`` times along ``dim``. ``value``:
    the value of the operand; the result has the same form."""
    return map_value_parts(value, lambda t: t if t.shape[dim] == 1 else t.repeat_interleave(times, dim))


def _evaluate_slice(node: fx.Node, value: Value, dim: int, start: int, end: int, step: int) -> Value:
    if list_node_sizes(node)[dim] == 0:
        raise UnknownValueError
    return map_value_parts(value, lambda t: t if t.shape[dim] == 1 else aten.slice.Tensor(t, dim, start, end, step))


def _evaluate_select(node: fx.Node, value: Value, dim: int, index: int) -> Value:
    return map_value_parts(value, lambda t: t.select(dim, 0 if t.shape[dim] == 1 else index))


def _evaluate_index(node: fx.Node, source: Any, indices: list[Any]) -> Any:
    """Return the value of ``node``, which computes ``source[indices]``. ``source``: the value of the operand, a tensor
    or a :class:`GatheredValue`; the result has the same form. ``indices``: the values of the index tensors. An index
    into a dim along which ``source`` is constant (size 1) is ignored. Raise :class:`UnknownValueError` unless there is
    a constant index tensor for every dim of ``source``."""
    if isinstance(source, GatheredValue):
        return source.map_tensors(lambda place: _evaluate_index(node, place, indices))
    if (
        not isinstance(source, Tensor)
        or len(indices) != source.dim()
        or any(not isinstance(i, Tensor) for i in indices)
    ):
        raise UnknownValueError
    zero = torch.zeros((), dtype=torch.int64)
    used = [zero if size == 1 else i for size, i in zip(source.shape, indices, strict=True)]
    if torch.broadcast_shapes(*(i.shape for i in used)).numel() > LIMIT:
        raise UnknownValueError
    result = source[tuple(used)]
    return align_rank(result, get_node_tensor(node).dim())


def _evaluate_gather(node: fx.Node, source: Any, dim: int, index: Any) -> Value:
    """Return the value of ``node``, which computes ``gather(source, dim, index)``. ``source``: the value of the
    operand, a tensor or a :class:`GatheredValue`; the result has the same form. ``index``: the value of the index
    tensor. Raise :class:`UnknownValueError` if ``index`` is not constant, or if the result cannot be described."""
    if isinstance(source, Tensor) and isinstance(index, Tensor):
        whole = _expand_to_sizes(source, list(list_node_sizes(node.args[0])))  # type: ignore[arg-type]
        return whole.gather(dim, _expand_to_sizes(index, list(list_node_sizes(node))))
    if not isinstance(source, GatheredValue) or not isinstance(index, Tensor):
        raise UnknownValueError
    old, new = list_node_sizes(node.args[0]), list_node_sizes(node)  # type: ignore[arg-type]
    dim %= len(old)
    if any(a != b for d, (a, b) in enumerate(zip(old, new, strict=True)) if d != dim):
        raise UnknownValueError

    def move(place: Tensor) -> Tensor:
        if place.shape[dim] == 1:
            return place
        if place.numel() != place.shape[dim]:
            raise UnknownValueError
        return place.reshape(-1)[index]

    return source.map_tensors(move)


def _evaluate_index_select(node: fx.Node, source: Any, dim: int, index: Any) -> Value:
    """Return the value of ``node``, which computes ``index_select(source, dim, index)``. ``source``: the value of the
    operand; the result has the same form. ``index``: the value of the index tensor. Raise :class:`UnknownValueError` if
    ``index`` is not constant."""
    if not isinstance(index, Tensor):
        raise UnknownValueError
    where = index.expand(list_node_sizes(node)[dim])
    return map_value_parts(source, lambda t: t if t.shape[dim] == 1 else t.index_select(dim, where))


def _evaluate_cumsum(node: fx.Node, x: Any, dim: int, **kwargs: Any) -> Tensor:
    return torch.cumsum(_expand_along_dim(x, dim, list_node_sizes(node)[dim]), dim, **kwargs)


def _evaluate_diff(node: fx.Node, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Return the value of ``node``, a ``torch.diff`` of a constant tensor ``x``: the ``n``-th difference of neighbours
    along ``dim``. ``prepend``, ``append``: values of tensors that are joined to ``x`` along ``dim`` first; ``None`` for
    none."""

    def whole(position: int, value: Any) -> Tensor | None:
        given = node.args[position] if len(node.args) > position else None
        return _expand_along_dim(value, dim, list_node_sizes(given)[dim]) if isinstance(given, fx.Node) else None

    parts = [p for p in (whole(3, prepend), whole(0, x), whole(4, append)) if p is not None]
    sizes = torch.broadcast_shapes(*([*p.shape[:dim], 1, *p.shape[dim % p.dim() + 1 :]] for p in parts))
    parts = [p.expand([p.shape[d] if d == dim % p.dim() else s for d, s in enumerate(sizes)]) for p in parts]
    return torch.diff(torch.cat(parts, dim), n, dim)


def _evaluate_triangle(node: fx.Node, x: Any, diagonal: int = 0) -> Value:
    """Return the value of ``node``, a ``tril`` or ``triu`` of an operand with the value ``x``.

    If ``x`` is a tensor and the result is small enough, the result is a tensor. If ``x`` is a mask (a tuple of
    conditions or a :class:`ConditionalValue`), or a large tensor with one value everywhere, the result is a mask that
    also has a comparison of column and row numbers as a condition. Raise :class:`UnknownValueError` in any other case.
    ``diagonal``: the diagonal at which the triangle ends; 0 is the main one, positive numbers are above.
    """
    lower = node.target is aten.tril.default
    rows, columns = list_node_sizes(node)[-2:]
    if isinstance(x, Tensor) and x[..., :1, :1].numel() * rows * columns <= LIMIT:
        whole = x.expand([*x.shape[:-2], rows, columns])
        return whole.tril(diagonal) if lower else whole.triu(diagonal)
    if isinstance(x, GatheredValue) or (isinstance(x, Tensor) and x.numel() != 1):
        raise UnknownValueError
    rank = get_node_tensor(node).dim()
    row = torch.arange(rows).reshape([1] * (rank - 2) + [rows, 1])
    column = torch.arange(columns).reshape([1] * (rank - 1) + [columns])
    terms = (Comparison("le" if lower else "ge", column, row + diagonal),)
    if isinstance(x, tuple | ConditionalValue):  # a mask: outside of the triangle everything is hidden
        return _mask_triangle(x, terms)
    if get_node_tensor(node).dtype is torch.bool and bool(x):
        return terms
    return ConditionalValue(terms, x.reshape(()), torch.zeros((), dtype=x.dtype))


def _mask_triangle(mask: tuple[Condition, ...] | ConditionalValue, terms: tuple[Comparison, ...]) -> Value:
    """Return the value of ``tril`` or ``triu`` of ``mask``: ``mask`` itself inside the triangle, 0 (false) outside.
    ``mask``: a tuple of conditions that must all hold, or a :class:`ConditionalValue`; the result has the same form.
    ``terms``: comparisons of which all hold exactly inside the triangle. Raise :class:`UnknownValueError` if
    ``mask.hidden``, the number where the conditions fail, is not 0."""
    if isinstance(mask, tuple):
        return mask + terms
    if mask.hidden != 0:
        raise UnknownValueError
    return ConditionalValue(mask.terms + terms, mask.shown, mask.hidden)


_ANDS = [
    *(getattr(getattr(aten, name), kind) for name in ("bitwise_and", "__and__") for kind in ("Tensor", "Scalar")),
    aten.logical_and.default,
]
EQUALITIES = [getattr(getattr(aten, name), kind) for name in ("eq", "ne") for kind in ("Tensor", "Scalar")]
COMPARISONS = [getattr(getattr(aten, name), kind) for name in ("lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")]
_POINTWISE = [
    getattr(getattr(aten, name), kind)
    for name, kinds in {
        "add": ("Tensor", "Scalar"),
        "sub": ("Tensor", "Scalar"),
        "rsub": ("Tensor", "Scalar"),
        "mul": ("Tensor", "Scalar"),
        "div": ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"),
        "floor_divide": ("default", "Scalar"),
        "remainder": ("Tensor", "Scalar"),
        "maximum": ("default",),
        "minimum": ("default",),
        "clamp": ("default",),
        "abs": ("default",),
        "neg": ("default",),
        "bitwise_or": ("Tensor", "Scalar"),
        "bitwise_xor": ("Tensor", "Scalar"),
        "__or__": ("Tensor", "Scalar"),
        "__xor__": ("Tensor", "Scalar"),
        "logical_or": ("default",),
        "to": ("dtype",),
    }.items()
    for kind in kinds
]

RULES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys(_POINTWISE, _evaluate_pointwise),
    **dict.fromkeys([*COMPARISONS, *EQUALITIES], _evaluate_comparison),
    **dict.fromkeys(_ANDS, _evaluate_and),
    aten.bitwise_not.default: _evaluate_not,
    aten.logical_not.default: _evaluate_not,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.index_put.default: _evaluate_index_put,
    aten.where.self: evaluate_where,
    aten.where.ScalarSelf: evaluate_where,
    aten.where.ScalarOther: evaluate_where,
    aten.where.Scalar: evaluate_where,
    aten.full.default: _evaluate_full,
    aten.arange.start_step: _evaluate_arange,
    aten.unsqueeze.default: _make_structural_rule(torch.unsqueeze),
    aten.transpose.int: _make_structural_rule(torch.transpose),
    aten.permute.default: _make_structural_rule(torch.permute),
    aten.t.default: _make_structural_rule(torch.t),
    aten.mT.default: _make_structural_rule(lambda t: t.mT),
    aten.flip.default: _make_structural_rule(torch.flip),
    aten.repeat.default: _evaluate_repeat,
    aten.repeat_interleave.self_int: _evaluate_repeat_interleave,
    aten.expand.default: _evaluate_expand,
    aten.reshape.default: _evaluate_reshape,
    aten.slice.Tensor: _evaluate_slice,
    aten.select.int: _evaluate_select,
    aten.index.Tensor: _evaluate_index,
    aten.gather.default: _evaluate_gather,
    aten.index_select.default: _evaluate_index_select,
    aten.cumsum.default: _evaluate_cumsum,
    aten.diff.default: _evaluate_diff,
    aten.tril.default: _evaluate_triangle,
    aten.triu.default: _evaluate_triangle,
}
