"""Compute the values of graph nodes that depend on constants only, without creating large tensors.

A tensor is kept with size 1 in every dim along which it is constant. A comparison of a value that varies along one dim
with a value that varies along another, such as ``column <= row`` of a causal mask, is kept as the two vectors. The cost
of a mask thus grows with the length of the sequence, not with its square.

:class:`MaskEvaluator` also follows integers that depend on data, such as the document of each position. It knows which
element of which tensor of the graph each of them is, not the number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.rewrite import aten, get_node_tensor, list_node_sizes

LIMIT = 1 << 22  # most elements of a tensor that is created in full


@dataclass(frozen=True)
class Comparison:
    """A comparison of two constant tensors, ``compare(a, b)`` with broadcasting, that is stored instead of its (large)
    boolean result.

    ``compare``: ``lt``, ``le``, ``gt`` or ``ge``. ``a``, ``b``: tensors of int64 or float64, with size 1 in every dim
    along which they are constant.
    """

    compare: str
    a: Tensor
    b: Tensor

    def negated(self) -> Comparison:
        """Return the comparison of the same two tensors that holds exactly where this one fails, such as ``ge`` for
        ``lt``."""
        return Comparison(_OPPOSITE[self.compare], self.a, self.b)

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> Comparison:
        """Return a copy of this comparison of two tensors, in which each tensor is replaced by ``move(tensor)``.
        ``move``: a function that rearranges dims, such as a transpose."""
        return Comparison(self.compare, move(self.a), move(self.b))


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True, eq=False)
class GatheredValue:
    """Says where the elements of an integer tensor come from: each is an element of another tensor of the graph, plus a
    constant. The numbers themselves depend on data and are not known.

    ``source``: the node of the other tensor. ``places``: for each dim of ``source``, an index tensor: the index of each
    element along this dim. It has size 1 in every dim along which the index is constant. ``offset``: the constant.
    """

    source: fx.Node
    places: tuple[Tensor, ...]
    offset: int = 0

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> GatheredValue:
        """Return the description of ``move(x)``, where ``x`` is the integer tensor that this object describes by
        elements of another tensor. ``move``: a function that rearranges the dims of a tensor, such as a transpose; it
        is applied to the index tensors.
        """
        return GatheredValue(self.source, tuple(move(p) for p in self.places), self.offset)


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

    def map_tensors(self, move: Callable[[Tensor], Tensor]) -> DataComparison:
        """Return the description of ``move(x)``, where ``x`` is the boolean result of this comparison. ``move``: a
        function that rearranges the dims of a tensor, such as a transpose; it is applied to the index tensors that say
        which elements are compared.
        """
        return DataComparison(self.compare, self.a.map_tensors(move), self.b.map_tensors(move))


# A condition may also be a boolean tensor, all of whose elements count.
Condition = Comparison | DataComparison | Tensor


@dataclass(frozen=True)
class ConditionalValue:
    """A tensor that is known by conditions: its elements are ``shown`` where all conditions in ``terms`` hold, and
    ``hidden`` elsewhere. ``shown`` and ``hidden`` are 0-dimensional tensors. A condition is a boolean tensor or a
    comparison. If the tensor is a sum of two attention masks, it may have several values where the conditions do not
    hold; ``hidden`` is then an upper bound on them."""

    terms: tuple[Condition, ...]
    shown: Tensor
    hidden: Tensor


# What is known of a tensor: its elements, with size 1 in constant dims; conditions that must all hold; a choice between
# two numbers by conditions; or from which elements of a data-dependent tensor its elements are copied.
Value = Tensor | tuple[Condition, ...] | ConditionalValue | GatheredValue

MASKED = -6e4  # hiding a score adds at most this, usually the type's lowest number or -inf


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

        The value has one of four forms: a tensor with size 1 in every dim along which it is constant; a tuple of
        conditions, for a boolean tensor that is true where all of them hold; a :class:`ConditionalValue`, which has one
        number where conditions hold and another elsewhere; or, in a :class:`MaskEvaluator`, a :class:`GatheredValue`,
        which says from which elements of a data-dependent tensor the elements are copied."""
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
        :meth:`find_value`, such as a tensor. Return ``None`` if it depends on more than constants or would be too
        large."""
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
        if random or not isinstance(get_node_tensor(node), Tensor) or get_node_tensor(node).numel() > LIMIT:
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
    """Computes the values of nodes from which attention masks are made. Besides constants, it follows integers that
    depend on data, such as the document of each position, as a :class:`GatheredValue`: it knows of which tensor and
    which element each integer is a copy, but not the number. If no rule follows an integer tensor, such as a running
    sum over data, its :class:`GatheredValue` refers to the tensor's own elements."""

    def compute_value(self, node: fx.Node) -> Value | None:
        """Return the value of ``node``, such as a tensor or a tuple of conditions, if it follows from constants or from
        rules for integers that depend on data. Otherwise, if ``node`` is an integer tensor, return a
        :class:`GatheredValue` (a description of a tensor by elements of another one) that refers to the elements of
        ``node`` itself. Return ``None`` in any other case, or if the tensor has more than four dims or a dim larger
        than ``LIMIT`` (2**22)."""
        value = super().compute_value(node)
        return describe_integers(node) if value is None else value


def describe_integers(node: fx.Node) -> GatheredValue | None:
    """Return a :class:`GatheredValue` (a description of an integer tensor by elements of another tensor) for ``node``
    that refers to the elements of ``node`` itself; comparisons of rearrangements of ``node`` can then be followed.
    Return ``None`` unless ``node`` is an integer tensor of one to four dims of at most ``LIMIT`` (2**22) elements
    each."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        return None
    if not 1 <= tensor.dim() <= _MOST_DIMS or max(tensor.shape) > LIMIT:
        return None
    return GatheredValue(node, list_dim_indices(tensor.shape))


def list_dim_indices(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return, for each dim of a tensor of the shape ``shape``, the index of each of its elements along this dim, as a
    tensor with size 1 in all other dims."""
    rank = len(shape)
    return tuple(torch.arange(n).reshape([n if i == d else 1 for i in range(rank)]) for d, n in enumerate(shape))


def _squeeze_constant_dims(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with every dim along which it is constant cut to its first element, that is, to size 1."""
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
    """Return the value of the pointwise operator ``node``. ``args``, ``kwargs``: the values of its operands. If they
    are constant tensors or numbers, the result is a tensor. If one of them is a mask (conditions that must all hold, or
    a choice between two numbers by conditions), the result is a mask. If one of them is known as elements, at known
    indices, of a tensor that depends on data, so is the result. Raise :class:`UnknownValueError` if the result cannot
    be expressed in these forms, or has more than ``LIMIT`` (2**22) elements."""
    if any(isinstance(a, tuple | ConditionalValue) for a in args):
        return _evaluate_choice(node, args, kwargs)
    if any(isinstance(a, GatheredValue) for a in args):
        return _shift_gathered(node, *args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.broadcast_shapes(*(t.shape for t in tensors)).numel() > LIMIT:
        raise UnknownValueError
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result.reshape([1] * (get_node_tensor(node).dim() - result.dim()) + list(result.shape))


def _shift_gathered(node: fx.Node, a: Any, b: Any, *rest: Any) -> GatheredValue:
    """Return the value of the operator ``node`` with an operand that is known as elements, at known indices, of a
    tensor that depends on data (a :class:`GatheredValue`). The operator may add an integer, subtract an integer, or
    cast to another integer type without loss. ``a``, ``b``, ``rest``: the values of the operands. Raise
    :class:`UnknownValueError` for any other operator."""
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
    moved: GatheredValue = one.map_tensors(lambda t: _align_rank(t, rank))
    return GatheredValue(moved.source, moved.places, moved.offset + (other if kind is add else -other))


def preserves_integers(cast: fx.Node) -> bool:
    """Return whether the node ``cast`` converts signed integers to an integer type of at least as many bytes, so that
    no number changes."""
    before, after = get_node_tensor(cast.args[0]).dtype, get_node_tensor(cast).dtype  # type: ignore[arg-type]
    return before in _INTEGERS and after in _INTEGERS and before.itemsize <= after.itemsize


def _align_rank(tensor: Tensor, rank: int) -> Tensor:
    """Return ``tensor`` with dims of size 1 added in front, so that it has ``rank`` dims in total."""
    return tensor.reshape([1] * (rank - tensor.dim()) + list(tensor.shape))


def _evaluate_choice(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Return the value of the pointwise operator ``node`` if an operand is a mask: a tuple of conditions that must all
    hold, or a :class:`ConditionalValue`, which has one number where conditions hold and another elsewhere. The result
    is a mask, too.

    ``args``, ``kwargs``: the values of the operands; those that are not masks must be single numbers. A sum of two
    additive attention masks hides the scores that either of them hides. Raise :class:`UnknownValueError` if the result
    is not such a mask.
    """
    if node.target in (aten.bitwise_or.Tensor, aten.logical_or.default):
        return ConditionalValue(_negate(node, args[0]) + _negate(node, args[1]), _FALSE, _TRUE)
    if node.target is aten.add.Tensor and not kwargs and not any(isinstance(a, int | float) for a in args):
        masks = [require_additive(node, a) for a in args]
        return ConditionalValue(
            masks[0].terms + masks[1].terms, masks[0].shown, torch.maximum(masks[0].hidden, masks[1].hidden)
        )
    choices = [a for a in args if isinstance(a, tuple | ConditionalValue)]
    others = [a for a in args if isinstance(a, Tensor) and a.numel() != 1]
    if len(choices) != 1 or others:
        raise UnknownValueError
    mask = choices[0] if isinstance(choices[0], ConditionalValue) else ConditionalValue(choices[0], _TRUE, _FALSE)
    rank = get_node_tensor(node).dim()
    values = []
    for number in (mask.shown, mask.hidden):
        given = [number if a is choices[0] else a.reshape(()) if isinstance(a, Tensor) else a for a in args]
        values.append(torch.as_tensor(node.target(*given, **kwargs)).to(get_node_tensor(node).dtype))  # type: ignore[operator]
    terms = tuple(map_condition(t, lambda x: _align_rank(x, rank)) for t in mask.terms)
    return _simplify_choice(ConditionalValue(terms, values[0], values[1]))


_TRUE, _FALSE = torch.tensor(True), torch.tensor(False)


def _simplify_choice(choice: ConditionalValue) -> Value:
    """Return the tuple of the conditions of ``choice``, a tensor that has one value where they hold and another
    elsewhere, if these values are true and false. Otherwise return ``choice`` unchanged."""
    return choice.terms if choice.shown.dtype is torch.bool and choice.shown and not choice.hidden else choice


def _negate(node: fx.Node, value: Any) -> tuple[Condition, ...]:
    """Return conditions that all hold exactly where the boolean mask ``value`` is false. ``value``: a tensor, a tuple
    of conditions that must all hold, or a choice between two values by conditions. ``node``: the node whose value is
    computed; the tensors in the conditions get as many dims as its result. Raise :class:`UnknownValueError` if there
    are no such conditions."""
    if isinstance(value, Tensor):
        found: tuple[Condition, ...] = (~value,)
    elif isinstance(value, ConditionalValue) and not value.shown and value.hidden and value.shown.dtype is torch.bool:
        found = value.terms
    elif isinstance(value, tuple) and len(value) == 1:
        found = (_negate_condition(value[0]),)
    else:
        raise UnknownValueError
    rank = get_node_tensor(node).dim()
    return tuple(map_condition(t, lambda x: _align_rank(x, rank)) for t in found)


def _negate_condition(condition: Condition) -> Condition:
    return ~condition if isinstance(condition, Tensor) else condition.negated()


def require_additive(node: fx.Node, value: Any) -> ConditionalValue:
    """Return ``value`` as an additive attention mask: 0 where all of its conditions hold (shown scores), and ``MASKED``
    (-6e4) or less elsewhere (hidden scores). ``node``: the node whose value is computed; the tensors in the conditions
    get as many dims as its result. Raise :class:`UnknownValueError` if ``value`` is not such a mask."""
    if isinstance(value, Tensor) and value.is_floating_point():
        hidden = value[value != 0]
        most = hidden.max() if hidden.numel() else value.new_tensor(-torch.inf)
        value = ConditionalValue((value == 0,), value.new_zeros(()), most)
    if isinstance(value, ConditionalValue) and value.hidden == 0 and len(value.terms) == 1:
        value = ConditionalValue((_negate_condition(value.terms[0]),), value.hidden, value.shown)
    if not isinstance(value, ConditionalValue) or value.shown != 0 or not value.hidden <= MASKED:
        raise UnknownValueError
    rank = get_node_tensor(node).dim()
    terms = tuple(map_condition(t, lambda x: _align_rank(x, rank)) for t in value.terms)
    return ConditionalValue(terms, value.shown, value.hidden)


def _evaluate_comparison(node: fx.Node, a: Any, b: Any) -> Value:
    """Return the value of the comparison ``node`` of two operands with the values ``a`` and ``b``. It is a boolean
    tensor if that is small enough. It is a tuple with the comparison itself as a condition if the tensor would be too
    large, or if ``a`` and ``b`` are elements of one tensor that depends on data. It is a mask if an operand is a mask
    (conditions that must all hold, or a choice between two numbers by conditions). Raise :class:`UnknownValueError` if
    no form is possible."""
    if isinstance(a, tuple | ConditionalValue) or isinstance(b, tuple | ConditionalValue):
        return _evaluate_choice(node, (a, b), {})
    if isinstance(a, GatheredValue) or isinstance(b, GatheredValue):
        if not isinstance(a, GatheredValue) or not isinstance(b, GatheredValue) or a.source is not b.source:
            raise UnknownValueError
        width = get_node_tensor(node).dim()
        name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
        return (DataComparison(name, a, b).map_tensors(lambda t: _align_rank(t, width)),)
    if node.target in _EQUALITIES:
        return _evaluate_pointwise(node, a, b)
    given = a, b
    a, b = (torch.as_tensor(x) for x in given)
    if torch.broadcast_shapes(a.shape, b.shape).numel() <= LIMIT:
        return _evaluate_pointwise(node, *given)
    name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
    rank, kind = get_node_tensor(node).dim(), torch.result_type(a, b)
    a, b = (widen_number_type(x.to(kind)).reshape([1] * (rank - x.dim()) + list(x.shape)) for x in (a, b))
    return (Comparison(name, a, b),)


def widen_number_type(x: Tensor) -> Tensor:
    """Return ``x`` as int64, or as float64 if it is a floating-point tensor, so that its negation is exact."""
    return x.double() if x.is_floating_point() else x.long()


def _list_conditions(value: Any) -> tuple[Condition, ...]:
    """Return a tuple of conditions that all hold exactly where the boolean mask ``value`` is true. ``value``: a tensor,
    a tuple of conditions that must all hold, or a choice between two values by conditions. Raise
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
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _evaluate_pointwise(node, a, b)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor) and one.numel() == 1 and bool(one):
            return map_value_parts(other, lambda t: _align_rank(t, get_node_tensor(node).dim()))
    terms = _list_conditions(a) + _list_conditions(b)
    return tuple(map_condition(t, lambda x: _align_rank(x, get_node_tensor(node).dim())) for t in terms)


def evaluate_where(node: fx.Node, condition: Any, a: Any, b: Any) -> Value:
    """Return the value of ``node``, a ``where`` of operands with the values ``condition``, ``a`` and ``b``. It is a
    tensor if ``condition`` is a tensor. If ``condition`` is a tuple of conditions and ``a`` and ``b`` are single
    numbers, it is a choice between these numbers by the conditions. Raise :class:`UnknownValueError` in any other
    case."""
    if isinstance(a, tuple | ConditionalValue) or isinstance(b, tuple | ConditionalValue):
        raise UnknownValueError
    if isinstance(a, GatheredValue) or isinstance(b, GatheredValue) or isinstance(condition, GatheredValue):
        raise UnknownValueError
    a, b = (torch.as_tensor(x, dtype=get_node_tensor(node).dtype) for x in (a, b))
    if isinstance(condition, ConditionalValue) and not condition.shown and condition.hidden:
        condition, a, b = condition.terms, b, a  # a boolean that is false where its conditions hold
    if isinstance(condition, Tensor):
        if torch.broadcast_shapes(condition.shape, a.shape, b.shape).numel() > LIMIT:
            raise UnknownValueError
        result = torch.where(condition, a, b)
        return result.reshape([1] * (get_node_tensor(node).dim() - result.dim()) + list(result.shape))
    if a.numel() == b.numel() == 1:
        return ConditionalValue(_list_conditions(condition), a.reshape(()), b.reshape(()))
    raise UnknownValueError


def _evaluate_not(node: fx.Node, x: Any) -> Value:
    """Return the value of ``node``, the logical negation of an operand with the value ``x``. It is a tensor if ``x`` is
    a tensor; the opposite condition if ``x`` is a single condition; or a choice that is false where all conditions of
    ``x`` hold and true elsewhere."""
    if isinstance(x, Tensor):
        return _evaluate_pointwise(node, x)
    if isinstance(x, ConditionalValue):
        return _evaluate_choice(node, (x,), {})
    terms = _list_conditions(x)
    return (_negate_condition(terms[0]),) if len(terms) == 1 else ConditionalValue(terms, _FALSE, _TRUE)


def _masked_fill(node: fx.Node, x: Any, mask: Any, value: Any) -> Value:
    return evaluate_where(node, mask, value, x)


def _make_structural_rule(operation: Callable[..., Tensor]) -> Callable[..., Value]:
    """Return a function ``rule(node, value, *args)`` that computes the value of a node which only rearranges dims,
    such as a transpose. ``value``: the value of its operand; ``args``: its further arguments. The function applies
    ``operation(tensor, *args)`` to ``value`` if it is a tensor, to both sides of the comparisons of a mask, or to
    the index tensors of a :class:`GatheredValue`, which describes the operand as elements of a tensor that depends on
    data."""

    def rule(node: fx.Node, value: Value, *args: Any) -> Value:
        return map_value_parts(value, lambda t: operation(t, *args))

    return rule


def map_value_parts(value: Value, move: Callable[[Tensor], Tensor]) -> Value:
    """Return the value of a node that rearranges the dims of an operand with the value ``value``. ``move``: the
    function that rearranges the dims of one tensor. It is applied to ``value`` if it is a tensor, to both sides of
    each comparison if ``value`` is a mask made of conditions, and to the index tensors if ``value`` is known as
    elements, at known indices, of a tensor that depends on data."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, ConditionalValue):
        return ConditionalValue(tuple(map_condition(t, move) for t in value.terms), value.shown, value.hidden)
    return tuple(map_condition(t, move) for t in value) if isinstance(value, tuple) else value.map_tensors(move)


def map_condition(condition: Condition, move: Callable[[Tensor], Tensor]) -> Condition:
    return move(condition) if isinstance(condition, Tensor) else condition.map_tensors(move)


def _evaluate_expand(node: fx.Node, value: Value, _: Any) -> Value:
    rank = get_node_tensor(node).dim()
    return map_value_parts(value, lambda t: t.reshape([1] * (rank - t.dim()) + list(t.shape)))


def _evaluate_reshape(node: fx.Node, value: Value, sizes: list[int]) -> Value:
    """Return the value of ``node``, a reshape to the shape ``sizes`` of an operand with the value ``value``. If the
    reshape only adds or removes dims of size 1, ``value`` may have any form (a tensor, conditions, a choice between
    two numbers, or elements of a tensor that depends on data), and the result has the same form. Otherwise ``value``
    must be a tensor. Raise :class:`UnknownValueError` if it is not, or if the tensor is too large."""
    old = list_node_sizes(node.args[0])  # type: ignore[arg-type]
    if [s for s in old if s != 1] != [s for s in sizes if s != 1]:
        return _expand_to_sizes(value, old).reshape(sizes)
    wide = [d for d, s in enumerate(old) if s != 1]

    def move(t: Tensor) -> Tensor:
        held = iter([t.shape[d] for d in wide])
        return t.reshape([1 if s == 1 else next(held) for s in sizes])

    return map_value_parts(value, move)


def _evaluate_slice(node: fx.Node, value: Value, dim: int, start: int, end: int, step: int) -> Value:
    if list_node_sizes(node)[dim] == 0:
        raise UnknownValueError
    return map_value_parts(value, lambda t: t if t.shape[dim] == 1 else aten.slice.Tensor(t, dim, start, end, step))


def _evaluate_select(node: fx.Node, value: Value, dim: int, index: int) -> Value:
    return map_value_parts(value, lambda t: t.select(dim, 0 if t.shape[dim] == 1 else index))


def _evaluate_index(node: fx.Node, source: Any, indices: list[Any]) -> Any:
    """Return the value of ``node``, which computes ``source[indices]``. ``source``: the value of the operand: a
    constant tensor, or a description of it as elements, at known indices, of a tensor that depends on data; the result
    has the same form. ``source`` has size 1 in dims along which it is constant; indices into these dims are ignored.
    ``indices``: the values of the index tensors. Raise :class:`UnknownValueError` unless there is a constant index
    tensor for every dim of ``source``."""
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
    return result.reshape([1] * (get_node_tensor(node).dim() - result.dim()) + list(result.shape))


def _evaluate_gather(node: fx.Node, source: Any, dim: int, index: Any) -> Value:
    """Return the value of ``node``, which computes ``gather(source, dim, index)``. ``source``: the value of the
    operand: a constant tensor, or a description of it as elements, at known indices, of a tensor that depends on
    data; the result has the same form. ``index``: the value of the index tensor. Raise :class:`UnknownValueError` if
    ``index`` is not constant, or if the result cannot be described."""
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
    """Return the value of ``node``, which computes ``index_select(source, dim, index)``. ``source``: the value of
    the operand: a tensor, conditions that must all hold, a choice between two numbers by conditions, or a
    description of it as elements, at known indices, of a tensor that depends on data; the result has the same form.
    ``index``: the value of the index tensor. Raise :class:`UnknownValueError` if it is not constant."""
    if not isinstance(index, Tensor):
        raise UnknownValueError
    where = index.expand(list_node_sizes(node)[dim])
    return map_value_parts(source, lambda t: t if t.shape[dim] == 1 else t.index_select(dim, where))


def _evaluate_cumsum(node: fx.Node, x: Any, dim: int, **kwargs: Any) -> Tensor:
    return torch.cumsum(_expand_along_dim(x, dim, list_node_sizes(node)[dim]), dim, **kwargs)


def _evaluate_diff(node: fx.Node, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Return the value of ``node``, a ``torch.diff`` of ``x``: the ``n``-th difference of neighbours along ``dim``.
    ``x``: the value of the operand. ``prepend``, ``append``: values of tensors that are joined to ``x`` along ``dim``
    first; ``None`` for none."""

    def whole(position: int, value: Any) -> Tensor | None:
        given = node.args[position] if len(node.args) > position else None
        return _expand_along_dim(value, dim, list_node_sizes(given)[dim]) if isinstance(given, fx.Node) else None

    parts = [p for p in (whole(3, prepend), whole(0, x), whole(4, append)) if p is not None]
    sizes = torch.broadcast_shapes(*([*p.shape[:dim], 1, *p.shape[dim % p.dim() + 1 :]] for p in parts))
    parts = [p.expand([p.shape[d] if d == dim % p.dim() else s for d, s in enumerate(sizes)]) for p in parts]
    return torch.diff(torch.cat(parts, dim), n, dim)


def _evaluate_triangle(node: fx.Node, x: Any, diagonal: int = 0) -> Value:
    """Return the value of ``node``, a ``tril`` or ``triu`` of an operand with the value ``x``: a tensor, conditions
    that must all hold, or a choice between two numbers by conditions.

    If the result is too large to be created, ``x`` must be a mask (one of the last two forms) or have the same value
    everywhere. The result is then a mask, with a comparison of row and column numbers as a condition. ``diagonal``: the
    diagonal at which the triangle ends; 0 is the main one, positive numbers are above. Raise :class:`UnknownValueError`
    in any other case.
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
    """Return the value of ``tril`` or ``triu`` of ``mask``: the mask itself inside the triangle, and 0 (false) outside.
    ``mask``: a tuple of conditions that must all hold, or a choice between two numbers by conditions; the result has
    the same form. ``terms``: comparisons that all hold exactly inside the triangle. Raise :class:`UnknownValueError` if
    the mask's number where its conditions fail is not 0."""
    if isinstance(mask, tuple):
        return mask + terms
    if mask.hidden != 0:
        raise UnknownValueError
    return ConditionalValue(mask.terms + terms, mask.shown, mask.hidden)


_EQUALITIES = [getattr(getattr(aten, name), kind) for name in ("eq", "ne") for kind in ("Tensor", "Scalar")]
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
        "bitwise_or": ("Tensor",),
        "bitwise_xor": ("Tensor",),
        "logical_or": ("default",),
        "to": ("dtype",),
    }.items()
    for kind in kinds
]

RULES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys(_POINTWISE, _evaluate_pointwise),
    **dict.fromkeys([*COMPARISONS, *_EQUALITIES], _evaluate_comparison),
    aten.bitwise_and.Tensor: _evaluate_and,
    aten.logical_and.default: _evaluate_and,
    aten.bitwise_not.default: _evaluate_not,
    aten.logical_not.default: _evaluate_not,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
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
