"""Describe the elements of attention masks without creating the masks and without knowing the data.

An attention mask is described by conditions that must all hold where a query sees a key. A condition compares
constants, or integers that depend on data. Such an integer is described as a copy of an element of a tensor of the
graph (:class:`GatheredValue`), or as the element of a table whose index depends on data (:class:`LookedUpValue`). A
:class:`DataSum` is a sum of such integers and of constants, such as the position in a document, ``key -
starts[documents[key]]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.rewrite import aten, list_node_sizes

_Move = Callable[[Tensor], Tensor]
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of two constant tensors, ``compare(a, b)`` with broadcasting, that is stored instead of its (large)
    boolean result.

    ``compare``: ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``. ``a``, ``b``: tensors of int64 or float64, with size
    1 in every dim along which they are constant.
    """

    compare: str
    a: Tensor
    b: Tensor

    def negated(self) -> Comparison:
        """Return the comparison of the same two tensors that holds exactly where this one fails, such as ``ge`` for
        ``lt``."""
        return Comparison(_OPPOSITE[self.compare], self.a, self.b)

    def map_tensors(self, move: _Move) -> Comparison:
        """Return a copy of this comparison of two tensors, in which each tensor is replaced by ``move(tensor)``.
        ``move``: a function that rearranges dims, such as a transpose."""
        return Comparison(self.compare, move(self.a), move(self.b))


@dataclass(frozen=True, eq=False)
class GatheredValue:
    """Describes where the elements of an integer tensor come from: each is a copy of an element of another tensor of
    the graph, plus a constant. The values of the integers depend on data and are not known.

    ``source``: the node of the other tensor. ``places``: for each dim of ``source``, an index tensor: the index of each
    element along this dim. It has size 1 in every dim along which the index is constant. ``offset``: the constant.
    ``sum``: the same integers as a sum of constants and of elements of other tensors, if this is known.
    """

    source: fx.Node
    places: tuple[Tensor, ...]
    offset: int = 0
    sum: DataSum | None = None

    def map_tensors(self, move: _Move) -> GatheredValue:
        """Return the description of ``move(x)``, where ``x`` is the integer tensor that this object describes by
        elements of another tensor. ``move``: a function that rearranges the dims of a tensor, such as a transpose; it
        is applied to the index tensors.
        """
        terms = None if self.sum is None else self.sum.map_tensors(move)
        return GatheredValue(self.source, tuple(move(p) for p in self.places), self.offset, terms)

    def shift(self, number: int) -> GatheredValue:
        """Return the description of ``x + number``, where ``x`` is the integer tensor that this object describes."""
        terms = None if self.sum is None else self.sum.add(number)
        return replace(self, offset=self.offset + number, sum=terms)

    def as_sum(self) -> DataSum:
        """Return the integers that this object describes as a sum of constants and of elements of other tensors."""
        if self.sum is not None:
            return self.sum
        return DataSum((torch.tensor(self.offset),), ((1, replace(self, offset=0)),))


@dataclass(frozen=True, eq=False)
class LookedUpValue:
    """Describes where the elements of an integer tensor come from: each is an element of a table of the graph at an
    index that depends on data. An example is the first position of the document of each query.

    ``table``: the node of the table. ``indices``: for each dim of ``table``, the index of each element along this dim,
    as an index tensor or as a description of integers that depend on data.
    """

    table: fx.Node
    indices: tuple[Tensor | GatheredValue, ...]

    def map_tensors(self, move: _Move) -> LookedUpValue:
        """Return the description of ``move(x)``, where ``x`` is the integer tensor that this object describes by
        elements of a table. ``move``: a function that rearranges the dims of a tensor, such as a transpose."""
        moved = (move(i) if isinstance(i, Tensor) else i.map_tensors(move) for i in self.indices)
        return LookedUpValue(self.table, tuple(moved))


_Part = tuple[int, GatheredValue | LookedUpValue]  # a sign and integers that depend on data


@dataclass(frozen=True, eq=False)
class DataSum:
    """A sum of constants and of integers that depend on data; all summands broadcast.

    ``constants``: integer tensors. ``parts``: for each other summand, its sign (1 or -1) and where its elements come
    from. ``is_magnitude``: whether the described tensor is the absolute value of the sum.
    """

    constants: tuple[Tensor, ...]
    parts: tuple[_Part, ...]
    is_magnitude: bool = False

    def map_tensors(self, move: _Move) -> DataSum:
        """Return the description of ``move(x)``, where ``x`` is the integer tensor that this object describes as a sum.
        ``move``: a function that rearranges the dims of a tensor, such as a transpose; it is applied to the summands.
        """
        parts = tuple((sign, part.map_tensors(move)) for sign, part in self.parts)
        return DataSum(tuple(move(c) for c in self.constants), parts, self.is_magnitude)

    def add(self, other: DataSum | Tensor | int) -> DataSum | None:
        """Return this sum plus ``other``; ``None`` if one of them is an absolute value."""
        if not isinstance(other, DataSum):
            other = DataSum((torch.as_tensor(other),), ())
        if self.is_magnitude or other.is_magnitude:
            return None
        return DataSum(self.constants + other.constants, self.parts + other.parts)

    def negate(self) -> DataSum | None:
        """Return this sum with all signs changed; ``None`` if it is an absolute value."""
        if self.is_magnitude:
            return None
        return DataSum(tuple(-c for c in self.constants), tuple((-sign, part) for sign, part in self.parts))


@dataclass(frozen=True, eq=False)
class DataComparison:
    """A comparison of elements of a tensor that depends on data with other elements of the same tensor: ``compare(a,
    b)`` with broadcasting.

    ``compare``: ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``. ``a``, ``b``: which elements are compared; both have
    the same source tensor.
    """

    compare: str
    a: GatheredValue
    b: GatheredValue

    def negated(self) -> DataComparison:
        return DataComparison(_OPPOSITE[self.compare], self.a, self.b)

    def map_tensors(self, move: _Move) -> DataComparison:
        """Return the description of ``move(x)``, where ``x`` is the boolean result of this comparison. ``move``: a
        function that rearranges the dims of a tensor, such as a transpose; it is applied to the index tensors that say
        which elements are compared.
        """
        return DataComparison(self.compare, self.a.map_tensors(move), self.b.map_tensors(move))


@dataclass(frozen=True, eq=False)
class SumComparison:
    """A condition of an attention mask that compares a sum of integers with 0: ``compare(total, 0)``. Some of the
    integers depend on data.

    ``compare``: ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``. ``total``: the sum.
    """

    compare: str
    total: DataSum

    def negated(self) -> SumComparison:
        return SumComparison(_OPPOSITE[self.compare], self.total)

    def map_tensors(self, move: _Move) -> SumComparison:
        """Return the description of ``move(x)``, where ``x`` is the boolean result of this comparison. ``move``: a
        function that rearranges the dims of a tensor, such as a transpose."""
        return SumComparison(self.compare, self.total.map_tensors(move))


# A condition may also be a boolean tensor, true where the condition holds.
Condition = Comparison | DataComparison | SumComparison | Tensor


@dataclass(frozen=True)
class ConditionalValue:
    """Describes a tensor, such as an attention mask, that has the number ``shown`` where all conditions in ``terms``
    hold, and the number ``hidden`` elsewhere. Both numbers are 0-dimensional tensors. A condition is a boolean tensor
    or a comparison.

    ``is_bound``: if true, the tensor may have several numbers where not all conditions hold, as a sum of two attention
    masks has, and ``hidden`` is an upper bound on them.
    """

    terms: tuple[Condition, ...]
    shown: Tensor
    hidden: Tensor
    is_bound: bool = False


# What is known of a tensor: its elements, with size 1 in constant dims; conditions that must all hold; one number where
# conditions hold and another elsewhere; or from which elements of a data-dependent tensor its elements are copied.
Value = Tensor | tuple[Condition, ...] | ConditionalValue | GatheredValue

MASKED = -6e4  # a mask hides a score by adding at most this; usually it adds the dtype's lowest number or -inf


_DEPTH = 12  # most operators in a row that are compared


def is_same_value(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Return whether ``one`` and ``other``, two nodes or other arguments of operators, are proven to have the same
    value: the same operators compute them from the same nodes. Two different nodes that draw random numbers never count
    as equal.

    ``depth``: the largest number of operators in a row that are compared; beyond it, a node is equal only to itself.
    """
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        if one is other:
            return True
        equal = depth > 0 and one.op == other.op == "call_function" and one.target is other.target
        random = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
        return equal and not random and is_same_value([one.args, one.kwargs], [other.args, other.kwargs], depth - 1)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(is_same_value(*pair, depth) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_value(v, other[k], depth) for k, v in one.items())
    return type(one) is type(other) and not isinstance(one, fx.Node) and bool(one == other)


# Operators of elements that read a table, too, with the position of the table among their arguments.
_TABLES = {aten.index.Tensor: 0, aten.bucketize.Tensor: 1, aten.searchsorted.Tensor: 0}
_BY_ELEMENT = frozenset({aten.floor_divide.default, aten.floor_divide.Scalar, aten.to.dtype})  # torch has no tag there


def is_pointwise(target: Any) -> bool:
    """Return whether the operator ``target`` computes each element from the elements at the same position of its
    operands, and draws no random numbers."""
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def is_exchanged_value(one: fx.Node, other: fx.Node, values: Mapping[fx.Node, Any], depth: int = _DEPTH) -> bool:
    """Return whether it is proven that the tensor ``one`` is ``other`` with its last two dims exchanged. An example is
    a number that a mask computes in the same way for each query (dim -2) and for each key (dim -1).

    The proof follows both tensors back, through equal pointwise operators and look-ups in equal tables, to tensors
    whose elements are known to be exchanged. ``values``: node -> description of its elements, such as a constant
    tensor. ``depth``: the largest number of operators in a row that are compared.
    """
    known, found = values.get(one), values.get(other)
    if isinstance(known, Tensor) or isinstance(found, Tensor):
        return isinstance(known, Tensor) and isinstance(found, Tensor) and _are_exchanged(known, found)
    if (
        isinstance(known, GatheredValue)
        and isinstance(found, GatheredValue)
        and known.source is not one
        and known.offset == found.offset
        and is_same_value(known.source, found.source)
    ):
        return all(_are_exchanged(a, b) for a, b in zip(known.places, found.places, strict=True))
    types = [getattr(n.meta.get("val"), "dtype", None) for n in (one, other)]
    if depth == 0 or one.op != "call_function" or other.op != "call_function" or types[0] != types[1]:
        return False
    if one.target is not other.target:
        return False
    place = _TABLES.get(one.target)  # type: ignore[call-overload]
    if place is None and not is_pointwise(one.target) and one.target not in _BY_ELEMENT:
        return False
    arguments: list[tuple[Any, Any]] = list(zip(one.args, other.args, strict=False))
    if place is not None:
        table, same = arguments.pop(place)
        indices: Any = one.args[1] if one.target is aten.index.Tensor else [table]
        if not is_same_value(table, same) or None in indices or len(indices) != len(list_node_sizes(table)):
            return False
    exchanged = all(_are_exchanged_arguments(a, b, values, depth - 1) for a, b in arguments)
    return exchanged and len(one.args) == len(other.args) and is_same_value(one.kwargs, other.kwargs)


def _are_exchanged_arguments(one: Any, other: Any, values: Mapping[fx.Node, Any], depth: int) -> bool:
    """Return whether ``one`` and ``other``, corresponding arguments of two operators, are equal except that the last
    two dims of the tensors are exchanged. Nodes, also in lists, are compared by :func:`is_exchanged_value`; all other
    arguments must be equal.

    ``values``: node -> description of its elements, such as a constant tensor. ``depth``: the largest number of
    operators in a row that are compared.
    """
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        return is_exchanged_value(one, other, values, depth)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_exchanged_arguments(a, b, values, depth) for a, b in pairs)
    return not isinstance(one, fx.Node) and not isinstance(other, fx.Node) and is_same_value(one, other)


def align_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return ``tensor`` with dims of size 1 added in front, so that it has ``rank`` dims in total."""
    return tensor.reshape([1] * (rank - tensor.dim()) + list(tensor.shape))


def _are_exchanged(one: Tensor, other: Tensor) -> bool:
    """Return whether the tensor ``one`` equals ``other`` with its last two dims exchanged. The tensor with fewer dims
    is first given dims of size 1 in front."""
    rank = max(2, one.dim(), other.dim())
    one, other = (align_rank(x, rank) for x in (one, other))
    return one.dtype == other.dtype and torch.equal(one, other.mT)


def exchange_last_dims(value: GatheredValue, rank: int) -> GatheredValue:
    """Return the description of a tensor that is ``x`` with its last two dims exchanged. ``value``: the description of
    ``x`` by elements of another tensor. ``rank``: the number of dims of the result; if ``x`` has fewer dims, it first
    gets dims of size 1 in front."""

    def move(place: Tensor) -> Tensor:
        most = max(2, place.dim(), rank)
        moved = align_rank(place, most).mT
        return moved.reshape(moved.shape[most - rank :])

    return value.map_tensors(move)


def compare_sums(compare: str, a: DataSum, b: DataSum) -> tuple[Condition, ...] | None:
    """Return conditions of which all hold exactly where ``compare(a, b)`` is true; ``None`` if there are none. ``a``,
    ``b``: sums of integers that may depend on data. ``compare``: ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``.

    In ``a - b``, the integers that depend on data must be half added and half subtracted, and there must be some, as in
    a comparison of a query's position with a key's. If ``a`` or ``b`` is an absolute value, the other one must be a
    number.
    """
    if a.is_magnitude or b.is_magnitude:
        return _compare_magnitude(compare, a, b)
    negative = b.negate()
    total = None if negative is None else a.add(negative)
    signs = [] if total is None else [sign for sign, _ in total.parts]
    if total is None or not signs or sum(signs) != 0:
        return None
    if len(total.parts) == 2 and all(c.numel() == 1 for c in total.constants):
        one, other = (part for _, part in sorted(total.parts, key=lambda part: -part[0]))
        number = sum([int(c) for c in total.constants])
        if (
            isinstance(one, GatheredValue)
            and isinstance(other, GatheredValue)
            and is_same_value(one.source, other.source)
        ):
            return (DataComparison(compare, one.shift(number), replace(other, source=one.source)),)
    return (SumComparison(compare, total),)


def _compare_magnitude(compare: str, a: DataSum, b: DataSum) -> tuple[Condition, ...] | None:
    """Return conditions of which all hold exactly where ``compare(a, b)`` is true. One of ``a`` and ``b`` must be the
    absolute value of a sum of integers, the other a number. Return ``None`` for other operands, or if the comparison is
    not a conjunction of conditions, such as ``abs(x) > 2``."""
    if not a.is_magnitude:
        a, b, compare = b, a, {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(compare, compare)
    if b.is_magnitude or b.parts or any(c.numel() != 1 for c in b.constants):
        return None
    size, number = replace(a, is_magnitude=False), sum([int(c) for c in b.constants])
    zero = DataSum((torch.tensor(0),), ())
    if (compare, number) in (("lt", 1), ("le", 0), ("eq", 0)):
        return compare_sums("eq", size, zero)
    if (compare, number) in (("ge", 1), ("gt", 0), ("ne", 0)):
        return compare_sums("ne", size, zero)
    if compare not in ("lt", "le"):
        return None
    limits = [DataSum((torch.tensor(n),), ()) for n in (number, -number)]
    found = compare_sums(compare, size, limits[0]), compare_sums("gt" if compare == "lt" else "ge", size, limits[1])
    return None if found[0] is None or found[1] is None else found[0] + found[1]
