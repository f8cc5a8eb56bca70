"""Replace attention with changed scores, or with a mask that shows prefixes, by ``partition::scored_attention``.

The operator computes scores block by block. It replaces attention with one or more of these features, however the model
computes them:

* soft-capping: ``cap * tanh(score / cap)``;
* ALiBi: a mask to which ``slopes * (key - query)`` is added, or ``slopes * key``, which gives the same weights;
* a prefix: keys that every query of their document sees, in addition to the keys that a causal condition or a window
  shows; a window may also limit both.

Such attention may be torch's operator with a mask, or eager, that is, written as a product, changes of the scores, a
softmax and a product. ``flex_attention`` with a score function is traced as eager attention. Eager attention without
these features, but restricted to documents, is replaced by ``partition::document_attention``; any other stays as it is.
Requires: a graph in normal form, in which :func:`drop_constant_masks` has replaced other masks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ir.interpret import insert_operator_node, refresh_graph_values
from partitioner.passes.ir.rewrite import aten, drop_unused, get_node_tensor, list_node_sizes
from partitioner.passes.normalize import constant_folding as folding
from partitioner.passes.normalize.attention_masks import (
    classify_mask,
    find_visibility_conditions,
    insert_like,
    is_plain_attention,
    replace_attention,
    replace_mask,
)
from partitioner.passes.normalize.constant_folding import LIMIT, MaskEvaluator, describe_integers, list_dim_indices
from partitioner.passes.normalize.document_masks import (
    DocumentIds,
    DocumentKey,
    DocumentMask,
    PairDims,
    insert_document_ids,
    is_arange_along,
)
from partitioner.passes.normalize.mask_values import MASKED, Comparison, Condition, ConditionalValue, align_rank
from partitioner.passes.ops.attention import Band, get_band_limits
from partitioner.passes.ops.documents import document_ops
from partitioner.passes.ops.scored_attention import scored_ops

_Move = Callable[[Tensor], Tensor]


# --- values of masks that are no masks of documents -------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ElementSource:
    """Describes a tensor each of whose elements is an element of another, usually smaller tensor of the graph, such as
    a vector with one flag for each key or one slope for each head.

    ``source``: the node of the other tensor. ``places``: for each dim of ``source``, an index tensor: the index of each
    element along this dim, with size 1 in every dim along which the index is constant.
    """

    source: fx.Node
    places: tuple[Tensor, ...]

    def map_tensors(self, move: _Move) -> ElementSource:
        """Return the description of ``move(x)``, where ``x`` is the tensor that this object describes. ``move``: a
        function that rearranges the dims of a tensor, such as a transpose; it is applied to the index tensors."""
        return ElementSource(self.source, tuple(move(p) for p in self.places))


@dataclass(frozen=True, eq=False)
class FlaggedCondition:
    """A condition of an attention mask: a query sees a key if all of ``terms`` hold, or if ``flags`` is true.
    ``terms``: conditions such as a causal mask. ``flags``: a boolean tensor that depends on data, such as one flag for
    each key, true for the keys of a prefix."""

    terms: tuple[Condition, ...]
    flags: ElementSource

    def map_tensors(self, move: _Move) -> FlaggedCondition:
        """Return this condition for the attention mask ``move(mask)``, where ``mask`` is the mask to which it belongs.
        ``move``: a function that rearranges the dims of a tensor, such as a transpose."""
        terms = tuple(folding.map_condition(t, move) for t in self.terms)
        return FlaggedCondition(terms, self.flags.map_tensors(move))

    def negated(self) -> Condition:
        raise TypeError("where this condition fails is no single condition")


@dataclass(frozen=True, eq=False)
class VectorSum:
    """A constant tensor, described as the sum of the tensors ``parts``, which broadcast to its shape. It is used if the
    sum itself would be too large to create."""

    parts: tuple[Tensor, ...]

    def map_tensors(self, move: _Move) -> VectorSum:
        """Return the description of ``move(x)``, where ``x`` is the constant tensor that this object describes.
        ``move``: a function that may be applied to each part instead of the sum: a rearrangement of dims, a cast, or a
        product with a number."""
        return VectorSum(tuple(move(p) for p in self.parts))


@dataclass(frozen=True, eq=False)
class HeadBias:
    """A bias of attention scores, such as ALiBi: ``factor * slopes * sum(parts)``. ``slopes``: a number for each head,
    taken from a tensor of the graph. ``parts``: constant tensors that broadcast, such as the positions of keys and the
    negative positions of queries."""

    slopes: ElementSource
    parts: tuple[Tensor, ...]
    factor: float = 1.0

    def map_tensors(self, move: _Move) -> HeadBias:
        """Return the description of ``move(bias)``, where ``bias`` is the bias of attention scores that this object
        describes. ``move``: a function that rearranges the dims of a tensor, such as a transpose.
        """
        return HeadBias(self.slopes.map_tensors(move), tuple(move(p) for p in self.parts), self.factor)

    def scale(self, number: float) -> HeadBias:
        """Return this bias of attention scores times ``number``."""
        return replace(self, factor=self.factor * number)


@dataclass(frozen=True, eq=False)
class BiasedMask:
    """An additive attention mask with a bias. Where the conditions of ``mask`` hold, it adds ``bias`` to the scores;
    elsewhere, it adds a large negative number, which hides the score."""

    bias: HeadBias
    mask: ConditionalValue

    def map_tensors(self, move: _Move) -> BiasedMask:
        """Return the description of ``move(mask)``, where ``mask`` is the additive attention mask with a bias that this
        object describes. ``move``: a function that rearranges the dims of a tensor, such as a transpose.
        """
        terms = tuple(folding.map_condition(t, move) for t in self.mask.terms)
        return BiasedMask(self.bias.map_tensors(move), replace(self.mask, terms=terms))


_DESCRIBED = (ElementSource, VectorSum, HeadBias, BiasedMask)
_NO_MASK = ConditionalValue((), torch.zeros(()), torch.tensor(-torch.inf))


class ScoreEvaluator(MaskEvaluator):
    """Computes the values of nodes from which masks and biases of attention scores are made. In addition to the forms
    of value of :class:`MaskEvaluator`, a value may be: an :class:`ElementSource` (a boolean or floating-point tensor
    that depends on data), a :class:`FlaggedCondition` (conditions that also hold where a flag is true), a
    :class:`VectorSum` (a large sum of constants), a :class:`HeadBias` (the product of a number for each head and
    positions), or a :class:`BiasedMask` (a mask with such a bias)."""

    def compute_value(self, node: fx.Node) -> Any:
        """Return the value of ``node``, computed from the values of its operands: one of the forms that
        :class:`ScoreEvaluator` lists, or ``None`` if none fits."""
        operands = [self.values[n] for n in node.all_input_nodes]
        value: Any = None
        rule = _SCORE_RULES.get(node.target)
        if rule is not None and all(v is not None for v in operands):
            known: Callable[[fx.Node], Any] = self.values.__getitem__
            args: Any = fx.node.map_arg(node.args, known)
            try:
                value = rule(node, *args, **node.kwargs)
            except (folding.UnknownValueError, RuntimeError, IndexError, TypeError):
                value = None
        if value is None and any(isinstance(v, _DESCRIBED) for v in operands):
            value = describe_integers(node)  # the other rules do not know these descriptions
        elif value is None:
            value = super().compute_value(node)
        return _describe_elements(node) if value is None else value


def _describe_elements(node: fx.Node) -> ElementSource | None:
    """Return an :class:`ElementSource` that describes ``node`` by its own elements. Return ``None`` unless ``node`` is
    a boolean or floating-point tensor of one to four dims of at most ``LIMIT`` (2**22) elements each."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor) or not 1 <= tensor.dim() <= 4 or max(tensor.shape) > LIMIT:
        return None
    if tensor.dtype is not torch.bool and not tensor.is_floating_point():
        return None
    return ElementSource(node, list_dim_indices(tensor.shape))


def _align(node: fx.Node, value: Any) -> Any:
    """Return ``value``, the value of an operand of ``node``, with dims of size 1 added in front, so that it has as many
    dims as the result of ``node``. A number and ``None`` are returned unchanged."""
    rank = get_node_tensor(node).dim()

    def move(x: Tensor) -> Tensor:
        return x.reshape([1] * (rank - x.dim()) + list(x.shape))

    return value if value is None or isinstance(value, int | float) else folding.map_value_parts(value, move)


def _list_wide_dims(x: Tensor) -> set[int]:
    """Return the set of the indices of the dims of ``x`` whose size is not 1."""
    return {d for d, size in enumerate(x.shape) if size != 1}


def _list_parts(value: Any) -> tuple[Tensor, ...]:
    """Return constant tensors whose sum is the tensor with the value ``value``: the parts of a :class:`VectorSum`, or
    ``value`` itself if it is a tensor. Return an empty tuple for any other value."""
    return value.parts if isinstance(value, VectorSum) else (value,) if isinstance(value, Tensor) else ()


def _evaluate_product(node: fx.Node, a: Any, b: Any) -> Any:
    """Return the value of the product ``node`` of two operands with the values ``a`` and ``b``:

    * a :class:`HeadBias` if one operand has a number for each head, and the other is a constant that does not vary
      along heads;
    * a :class:`HeadBias` or :class:`VectorSum`, multiplied by a number, if the operands are these two;
    * ``None`` otherwise.
    """
    for one, other in ((a, b), (b, a)):
        number = _get_number(other)
        if number is not None and isinstance(one, VectorSum):
            return VectorSum(tuple(p * number for p in _align(node, one).parts))
        if number is not None and isinstance(one, HeadBias):
            return _align(node, one).scale(number)
    if not get_node_tensor(node).is_floating_point():
        return None
    for (one, value), (other, factor) in (
        ((node.args[0], a), (node.args[1], b)),
        ((node.args[1], b), (node.args[0], a)),
    ):
        slopes = _find_slopes(node, one, value)
        parts = tuple(_align(node, x) for x in _list_parts(factor))
        if slopes is None or not parts or not isinstance(other, fx.Node):
            continue
        dims = set().union(*(_list_wide_dims(p) for p in slopes.places))
        places = set().union(*(_list_wide_dims(p) for p in parts))
        if len(dims) == 1 and places and max(dims) < min(places):  # heads come before positions
            return HeadBias(slopes, parts)
    return None


def _find_slopes(node: fx.Node, operand: Any, value: Any) -> ElementSource | None:
    """Return ``operand``, an operand of the product ``node``, as an :class:`ElementSource` with as many dims as the
    result of ``node``, such as a vector with one slope for each head. Return ``None`` unless ``operand`` is a
    floating-point node and ``value`` is a tensor or an :class:`ElementSource`.

    ``value``: the value of ``operand``.
    """
    if not isinstance(operand, fx.Node) or not get_node_tensor(operand).is_floating_point():
        return None
    found = (
        value
        if isinstance(value, ElementSource)
        else _describe_elements(operand)
        if isinstance(value, Tensor)
        else None
    )
    return None if found is None else _align(node, found)


def _get_number(value: Any) -> float | None:
    """Return ``value`` as a Python number if it is an int, a float or a tensor of a single element. Return ``None`` for
    any other value, and for a Python boolean."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.numel() != 1):
        return None
    return value.item() if isinstance(value, Tensor) else value if isinstance(value, int | float) else None


def _evaluate_quotient(node: fx.Node, a: Any, b: Any) -> Any:
    number = _get_number(b)
    return None if not number or not isinstance(a, VectorSum | HeadBias) else _evaluate_product(node, a, 1.0 / number)


def _evaluate_negation(node: fx.Node, x: Any) -> Any:
    return _evaluate_product(node, x, -1) if isinstance(x, VectorSum | HeadBias) else None


def _evaluate_cast(node: fx.Node, x: Any, dtype: torch.dtype, *_: Any) -> Any:
    if isinstance(x, VectorSum):
        return x.map_tensors(lambda t: t.to(dtype))
    return (
        x
        if isinstance(x, HeadBias | BiasedMask | ElementSource) and get_node_tensor(node).is_floating_point()
        else None
    )


def _evaluate_sum(node: fx.Node, a: Any, b: Any, alpha: int = 1) -> Any:
    """Return the value of ``node``, the sum of two operands with the values ``a`` and ``b``:

    * a :class:`VectorSum` if both are constants and their sum is too large to create;
    * a :class:`BiasedMask` if one operand is a bias, or a mask with a bias, and the other is an additive mask;
    * ``None`` otherwise, or if ``alpha``, the factor of the second operand, is not 1.
    """
    if alpha != 1:
        return None
    for one, other in ((a, b), (b, a)):
        if isinstance(one, HeadBias):
            return BiasedMask(_align(node, one), folding.require_additive(node, other))
        if isinstance(one, BiasedMask):
            moved, mask = _align(node, one), folding.require_additive(node, other)
            hidden = torch.maximum(moved.mask.hidden, mask.hidden)
            return BiasedMask(moved.bias, ConditionalValue(moved.mask.terms + mask.terms, mask.shown, hidden, True))
    parts = [_list_parts(torch.as_tensor(x) if isinstance(x, int | float) else x) for x in (a, b)]
    if all(parts) and torch.broadcast_shapes(*(p.shape for of in parts for p in of)).numel() > LIMIT:
        return VectorSum(tuple(_align(node, p) for of in parts for p in of))
    return None


def _evaluate_difference(node: fx.Node, a: Any, b: Any, alpha: int = 1) -> Any:
    constant = isinstance(b, int | float) or (isinstance(b, Tensor) and b.dtype is not torch.bool)
    negative = -b if constant else _evaluate_negation(node, b)
    return None if negative is None else _evaluate_sum(node, a, negative, alpha)


def _evaluate_comparison(node: fx.Node, a: Any, b: Any) -> Any:
    """Return the value of the comparison ``node`` of two constants with the values ``a`` and ``b``, at least one of
    which is a :class:`VectorSum` (a sum too large to create). The result is a tuple with one :class:`Comparison`, whose
    left side has everything that varies along the last dim only, and whose right side has the rest. Return ``None`` for
    other operands."""
    if not isinstance(a, VectorSum) and not isinstance(b, VectorSum):
        return None
    given = [_list_parts(torch.as_tensor(x) if isinstance(x, int | float) else x) for x in (a, b)]
    if not all(given):
        return None
    signed = [
        (sign, folding.widen_number_type(_align(node, p))) for sign, of in zip((1, -1), given, strict=True) for p in of
    ]
    last = get_node_tensor(node).dim() - 1
    sides = [[sign * p for sign, p in signed if (_list_wide_dims(p) == {last}) is along] for along in (True, False)]
    name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
    over_keys, rest = (sum(side, torch.zeros([1] * (last + 1), dtype=torch.int64)) for side in sides)
    return (Comparison(name, over_keys, -rest),)


def _evaluate_or(node: fx.Node, a: Any, b: Any) -> Any:
    """Return the value of ``node``, the logical ``or`` of two operands with the values ``a`` and ``b``. If one operand
    consists of conditions, or is a constant that varies along two or more dims, and the other is a vector of flags,
    such as one for each key, the result is a tuple with a :class:`FlaggedCondition`. If one operand is false
    everywhere, the result is the value of the other. Otherwise return ``None``."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor) and one.numel() == 1 and not one and isinstance(other, tuple | ElementSource):
            return _align(node, other)
    given = ((a, b), node.args[1]), ((b, a), node.args[0])
    for (one, other), operand in given:
        conditions = isinstance(one, tuple) or (isinstance(one, Tensor) and len(_list_wide_dims(one)) > 1)
        vector = isinstance(other, Tensor) and len(_list_wide_dims(other)) == 1
        if conditions and (vector or isinstance(other, ElementSource)) and isinstance(operand, fx.Node):
            flags = other if isinstance(other, ElementSource) else _describe_elements(operand)
            terms = one if isinstance(one, tuple) else (one,)
            if flags is not None:
                return (FlaggedCondition(_align(node, terms), _align(node, flags)),)
    return None


def _evaluate_not(node: fx.Node, x: Any) -> Any:
    flagged = isinstance(x, tuple) and any(isinstance(t, FlaggedCondition) for t in x)
    return ConditionalValue(x, torch.tensor(False), torch.tensor(True)) if flagged else None


def _evaluate_fill(node: fx.Node, x: Any, mask: Any, value: Any) -> Any:
    return _evaluate_where(node, mask, value, x)


def _evaluate_where(node: fx.Node, condition: Any, a: Any, b: Any) -> Any:
    """Return the value of ``node``, a ``where`` of operands with the values ``condition``, ``a`` and ``b``. If one of
    ``a`` and ``b`` is a bias of scores, or a mask with a bias, and the other is a large negative number, which hides a
    score, the result is a :class:`BiasedMask`. Otherwise return ``None``."""
    for place, (one, other) in enumerate(((a, b), (b, a))):
        number = _get_number(other)
        if number is None or number > MASKED or not isinstance(one, HeadBias | BiasedMask):
            continue
        chosen = folding.evaluate_where(node, condition, *((0.0, number) if place == 0 else (number, 0.0)))
        mask = folding.require_additive(node, chosen)
        moved = _align(node, one)
        if isinstance(moved, HeadBias):
            return BiasedMask(moved, mask)
        return BiasedMask(moved.bias, replace(mask, terms=moved.mask.terms + mask.terms))
    return None


def _move_dims(node: fx.Node, x: Any, *args: Any) -> Any:
    """Return the value of ``node``, an operator that rearranges the dims of its operand, such as a transpose. Return
    ``None`` if ``x`` is a tensor or a form of :class:`MaskEvaluator`, because other rules handle these.

    ``x``: the value of the operand. ``args``: the further arguments of the operator.
    """
    if not isinstance(x, _DESCRIBED):
        return None
    if node.target in (aten.squeeze.dim, aten.squeeze.dims):
        return folding.RULES[aten.reshape.default](node, x, list(list_node_sizes(node)))
    return folding.RULES[node.target](node, x, *args)


_SCORE_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _evaluate_product),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _evaluate_quotient),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _evaluate_sum),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _evaluate_difference),
    **dict.fromkeys([*folding.COMPARISONS, *folding.EQUALITIES], _evaluate_comparison),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _evaluate_or),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _evaluate_not),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _evaluate_fill),
    **dict.fromkeys((aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther), _evaluate_where),
    aten.neg.default: _evaluate_negation,
    aten.to.dtype: _evaluate_cast,
    **dict.fromkeys(
        (
            aten.unsqueeze.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.reshape.default,
            aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        _move_dims,
    ),
}  # fmt: skip


# --- which scores an attention changes, and which keys it shows -------------------------------------------------------
class ScoreForm(NamedTuple):
    """How an attention changes its scores, and which keys a query sees.

    ``band``: how many positions before and after its own a query sees. ``documents``: the document ids, if a query sees
    only keys of its own document; ``None`` if a row is one document. ``prefix``: the prefix, that is, keys that the
    queries of their document see in a wider range of positions; ``None`` for no prefix. It is a :class:`DocumentMask`
    with the node of the prefix's flags in place of document ids, and with the wider range as its ``band``. ``slopes``:
    for ALiBi, (node of a number for each head, factor), where the slope of a head is the product of the two; ``None``
    for no ALiBi.
    """

    band: Band
    documents: DocumentMask | None
    prefix: DocumentMask | None
    slopes: tuple[fx.Node, float] | None

    def list_reach(self) -> list[list[int]]:
        """Return ``[[before, after]]``: how many positions before and after its own a query sees keys of the prefix
        (-1: no limit). Return an empty list if there is no prefix, or if a query sees keys of the prefix at all
        positions. The caller appends the elements of the result to the arguments of ``partition::scored_attention``."""
        return [] if self.prefix is None or self.prefix.band.is_full else [list(get_band_limits(self.prefix.band))]


def classify_scores(values: Sequence[Any], heads: int, length: int) -> ScoreForm | None:
    """Return how masks and biases that are added to the scores of an attention change the scores, and which keys a
    query sees. Return ``None`` if :class:`ScoreForm` cannot express this.

    ``values``: the masks and biases, each with four dims, as a boolean tensor, an additive mask, a tuple of conditions,
    a :class:`HeadBias` or a :class:`BiasedMask`. ``heads``: the number of heads of the queries. ``length``: the number
    of queries, equal to the number of keys.
    """
    terms: tuple[Any, ...] = ()
    biases = []
    for value in values:
        if isinstance(value, HeadBias | BiasedMask):
            biases.append(value if isinstance(value, HeadBias) else value.bias)
            value = value.mask.terms if isinstance(value, BiasedMask) else ()
        elif isinstance(value, ConditionalValue):
            value = find_visibility_conditions(value)
        elif isinstance(value, Tensor):
            hidden = value == 0 if value.dtype is torch.bool else value <= MASKED
            value = (~hidden,) if value.dtype is torch.bool or bool((hidden | (value == 0)).all()) else None
        if not isinstance(value, tuple):
            return None
        terms += value
    flagged = [t for t in terms if isinstance(t, FlaggedCondition)]
    rest = tuple(t for t in terms if not isinstance(t, FlaggedCondition))
    seen = classify_mask(rest + flagged[0].terms if flagged else rest, length, length)
    if seen is None or len(flagged) > 1 or len(biases) > 1:
        return None
    band = seen.band if isinstance(seen, DocumentMask) else seen
    prefix = slopes = None
    if flagged:
        without, prefix = classify_mask(rest, length, length), _find_row_flags(flagged[0].flags, length)
        if without is None or prefix is None:
            return None
        documents = [each._replace(band=Band()) if isinstance(each, DocumentMask) else None for each in (without, seen)]
        if documents[0] != documents[1]:
            return None
        prefix = prefix._replace(band=without.band if isinstance(without, DocumentMask) else without)
    if biases:
        slopes = _find_head_slopes(biases[0], heads, length, band.after == 0 and not flagged)
        if slopes is None:
            return None
    return ScoreForm(band, seen if isinstance(seen, DocumentMask) else None, prefix, slopes)


def _find_row_flags(flags: ElementSource, length: int) -> DocumentMask | None:
    """Return a :class:`DocumentMask` whose ids are the tensor from which ``flags`` takes one element for each key, or
    for each batch row and key. Return ``None`` if the flags depend on heads or queries.

    ``flags``: booleans that are added to an attention mask, with the dims ``[batch, heads, queries, keys]``.
    ``length``: the number of keys.
    """
    position = batch = None
    for dim, (size, place) in enumerate(zip(list_node_sizes(flags.source), flags.places, strict=True)):
        if size == 1:
            continue
        if size == length and position is None and is_arange_along(place, -1, size):
            position = dim
        elif batch is None and is_arange_along(place, -4, size):
            batch = dim
        else:
            return None
    if position is None:
        return None
    return DocumentMask((DocumentIds(flags.source, PairDims(position, batch)),), Band())


def _find_head_slopes(bias: HeadBias, heads: int, length: int, causal: bool) -> tuple[fx.Node, float] | None:
    """If adding ``bias`` to attention scores has the same effect on the softmax as adding ``factor * number * (key
    position - query position)``, as in ALiBi, return (node of a tensor with one ``number`` for each head, ``factor``).
    Otherwise return ``None``.

    ``bias``: a bias with the dims ``[batch, heads, queries, keys]``. ``heads``: the number of heads. ``length``: the
    number of queries, equal to the number of keys. ``causal``: whether a query sees only keys up to its own position,
    so that the bias of later keys does not matter.
    """
    source, places = bias.slopes.source, bias.slopes.places
    wide = [d for d, size in enumerate(list_node_sizes(source)) if size != 1]
    if len(wide) != 1 or list_node_sizes(source)[wide[0]] != heads or not is_arange_along(places[wide[0]], -3, heads):
        return None
    if length < 2:
        return None
    factor = 0.0
    for part in bias.parts:
        if part.dim() != 4 or _list_wide_dims(part) - {2, 3}:
            return None
        steps = part[0, 0].double().diff(dim=-1)
        if not steps.numel():  # a number for each query, which a softmax does not see
            continue
        if causal and steps.shape[0] == length:  # query i sees the keys 0 to i
            steps = steps[torch.ones_like(steps, dtype=torch.bool).tril(-1)]
        if bool((steps != steps.reshape(-1)[0]).any()):
            return None
        factor += bias.factor * float(steps.reshape(-1)[0])
    return (source, factor) if factor else None


# --- eager attention --------------------------------------------------------------------------------------------------
class _Contraction(NamedTuple):
    """A product of two tensors that sums over one dim, written as in an einsum, with a letter for each dim.

    ``operands``: the two nodes. ``labels``: for each operand, a string with the letter of each dim; ``-`` stands for a
    dim of size 1 that is broadcast. ``made``: the letters of the result.
    """

    operands: tuple[fx.Node, fx.Node]
    labels: tuple[str, str]
    made: str


_MATMULS = (aten.matmul.default, aten.bmm.default)


def _read_contraction(node: fx.Node) -> _Contraction | None:
    """Return the matrix product or einsum ``node`` as operands with a letter for each dim. Return ``None`` for another
    operator, for an einsum with a repeated letter or ``...``, or if the number of dims that are summed over is not one.
    """
    given: Any = node.args
    if node.target is aten.einsum.default and len(given[1]) == 2:
        terms, arrow, made = given[0].replace(" ", "").partition("->")
        labels = tuple(terms.split(","))
        if not arrow or "." in given[0] or any(len(set(t)) != len(t) for t in (*labels, made)):
            return None
        operands = tuple(given[1])
    elif node.target in _MATMULS:
        rank, operands = get_node_tensor(node).dim(), given[:2]
        if rank < 3 or any(get_node_tensor(x).dim() != rank for x in operands):
            return None
        outer = "abcdefg"[: rank - 2]
        labels, made = (outer + "xy", outer + "yz"), outer + "xz"
    else:
        return None
    kept = []
    for operand, letters in zip(operands, labels, strict=True):
        sizes = dict(zip(letters, list_node_sizes(operand), strict=True))
        wide = dict(zip(made, list_node_sizes(node), strict=True))
        kept.append("".join(c if sizes[c] == wide.get(c, sizes[c]) else "-" for c in letters))
    summed = (set(kept[0]) | set(kept[1])) - set(made) - {"-"}
    if len(summed) != 1 or not summed <= set(kept[0]) & set(kept[1]):
        return None
    return _Contraction(operands, (kept[0], kept[1]), made)


@dataclass
class _EagerAttention:
    """An attention that the model writes as elementary operators: a product of queries and keys, changes of the scores,
    a softmax, and a product with the values. The scores may be multiplied by numbers, before and after a ``tanh``.

    ``scores``: the product of queries and keys. ``weighted``: the product of the softmax with the values. ``masks``:
    the value of each mask or bias that is added to the scores, such as a tensor or a :class:`HeadBias`. ``factor``: the
    product of the numbers after the ``tanh``; of all numbers if there is no ``tanh``. ``inner``: the product of the
    numbers before the ``tanh``; ``None`` if there is no ``tanh``.
    """

    scores: _Contraction | None = None
    weighted: _Contraction | None = None
    masks: list[Any] = field(default_factory=list)
    factor: float = 1.0
    inner: float | None = None

    @property
    def cap_and_scale(self) -> tuple[float | None, float]:
        """Return (``cap``, ``scale``). The scores of the attention are ``cap * tanh(scale * s / cap)``, or ``scale *
        s`` if ``cap`` is ``None``, where ``s`` is the product of queries and keys."""
        return (None, self.factor) if self.inner is None else (self.factor, self.factor * self.inner)


class _Operand(NamedTuple):
    """An operand (queries, keys or values) of an eager attention, and the changes that give it the shape ``[batch,
    heads, positions, width]``.

    ``node``: the node of the operand. ``labels``: a letter for each dim of ``node``; ``-`` is a dim of size 1, which is
    removed. ``order``: the letters in the order to which the dims are then permuted. ``sizes``: the shape to which the
    permuted operand is then reshaped.
    """

    node: fx.Node
    labels: str
    order: str
    sizes: list[int]


class _AttentionDims(NamedTuple):
    """The changes of dims by which an attention operator on four-dimensional tensors can replace an eager attention.

    ``operands``: queries, keys and values, with the changes that they need. ``sizes``: the shape to which the
    operator's result is reshaped. ``order``: a letter for each dim of ``sizes``. ``made``: the letters in the order to
    which the reshaped result is then permuted.
    """

    operands: tuple[_Operand, _Operand, _Operand]
    order: str
    sizes: list[int]
    made: str


def _arrange_dims(found: _EagerAttention, rows: int | None) -> _AttentionDims | None:
    """Return the changes of dims by which an attention operator on tensors ``[batch, heads, positions, width]`` can
    replace the eager attention ``found``. Return ``None`` if this is not possible.

    In front of queries and keys, the scores may have one, two or three dims. One dim is batch and heads in one, and
    ``rows`` is then the batch size. Two dims are batch and heads. Three dims are batch and two dims of heads; keys and
    values may then lack the last of them.
    """
    assert found.scores is not None and found.weighted is not None
    outer, query_label, key_label = found.scores.made[:-2], *found.scores.made[-2:]
    side = 0 if query_label in found.scores.labels[0] else 1
    nodes = found.scores.operands[side], found.scores.operands[1 - side], found.weighted.operands[1]
    letters = [found.scores.labels[side], found.scores.labels[1 - side], found.weighted.labels[1]]
    # the letters of the second product become those of the first
    names = dict(zip(found.weighted.labels[0], found.scores.made, strict=True))
    taken = set("".join(letters[:2])) | {"-"}
    width = next((c for c in letters[2] if c not in found.weighted.labels[0] and c != "-"), None)
    if width is None or "-" in found.weighted.labels[0] or not 1 <= len(outer) <= 3:
        return None
    names[width] = next(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in taken)
    names["-"] = "-"
    if not set(letters[2]) | set(found.weighted.made) <= set(names):
        return None
    letters[2] = "".join(names[c] for c in letters[2])
    made = "".join(names[c] for c in found.weighted.made)
    size = {
        c: n for x, labels in zip(nodes, letters, strict=True) for c, n in zip(labels, list_node_sizes(x), strict=True)
    }
    summed = next(c for c in letters[0] if c in letters[1] and c not in found.scores.made)
    operands: list[_Operand] = []
    for node, labels, last in zip(
        nodes, letters, (query_label + summed, key_label + summed, key_label + names[width]), strict=True
    ):
        inner = "".join(c for c in outer if c in labels)
        shared = bool(operands) and inner in (outer[:1], outer[:2])
        if set(labels) - {"-"} != set(inner + last) or not (inner == outer or shared):
            return None
        heads = [size[c] for c in inner]
        if len(outer) == 1:
            if inner != outer or rows is None or heads[0] % rows:
                return None
            front = [rows, heads[0] // rows]
        else:
            front = [heads[0], math.prod(heads[1:])]
        operands.append(_Operand(node, labels, inner + last, [*front, *(size[c] for c in last)]))
    if set(made) != set(outer + query_label + names[width]) or operands[1].sizes[1] != operands[2].sizes[1]:
        return None
    order = outer + query_label + names[width]
    return _AttentionDims((operands[0], operands[1], operands[2]), order, [size[c] for c in order], made)


def _match_eager(softmax: fx.Node, evaluator: ScoreEvaluator) -> tuple[_EagerAttention, fx.Node] | None:
    """Return (an attention that the model writes as elementary operators, the node of its result). Return ``None`` if
    the operators around ``softmax`` are not those of an attention. ``softmax``: the node of the attention's softmax.
    ``evaluator``: computes the values of masks."""
    rank = len(list_node_sizes(softmax))
    if softmax.target is not aten.softmax.int or not 3 <= rank <= 5 or softmax.args[1] not in (-1, rank - 1):
        return None
    last: fx.Node | None = softmax
    result = _get_only_user(softmax)
    while result is not None and result.target is aten.to.dtype:
        last, result = result, _get_only_user(result)
    found = _EagerAttention()
    found.weighted = None if result is None else _read_contraction(result)
    if result is None or found.weighted is None or found.weighted.operands[0] is not last:
        return None
    return (found, result) if _match_scores(softmax.args[0], found, evaluator) else None  # type: ignore[arg-type]


def _get_only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _match_scores(node: fx.Node, found: _EagerAttention, evaluator: ScoreEvaluator) -> bool:
    """Follow the operators from ``node``, the input of an attention's softmax, back to the product of queries and keys,
    and store in ``found`` how they change the scores. Return whether the operators have a form that can be replaced.

    This form is: the product, then factors and perhaps a cap by ``tanh``, then masks and biases; without a cap, factors
    may also follow masks. ``evaluator``: computes the values of masks.
    """
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        target, args = node.target, node.args
        found.scores = _read_contraction(node)
        if found.scores is not None:
            return True
        if target is aten.to.dtype and get_node_tensor(node).is_floating_point():
            node = args[0]  # type: ignore[assignment]
        elif target is aten.tanh.default and found.inner is None:
            found.inner, node = 1.0, args[0]  # type: ignore[assignment]
        elif target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            number = _get_number(evaluator.find_value(args[1]) if isinstance(args[1], fx.Node) else args[1])
            if not number:
                return False
            number = number if target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / number
            if found.inner is None:
                found.factor *= number
            else:
                found.inner *= number
            node = args[0]  # type: ignore[assignment]
        else:
            inner = None if found.inner is not None else _match_mask(node, found, evaluator)
            scaled = None if inner is None else _scale_mask(found.masks.pop(), found.factor)
            if inner is None or scaled is None:
                return False
            found.masks.append(scaled)
            node = inner
    return False


def _scale_mask(value: Any, factor: float) -> Any:
    """Return ``value``, a mask or bias of attention scores, times ``factor``, in the same form. Return ``None`` if
    ``factor`` is not positive, or if ``value`` is boolean or a tuple of conditions."""
    if factor == 1.0:
        return value
    if factor <= 0.0 or isinstance(value, tuple) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        return None
    if isinstance(value, ConditionalValue):
        return replace(value, shown=value.shown * factor, hidden=value.hidden * factor)
    if isinstance(value, BiasedMask):
        return BiasedMask(value.bias.scale(factor), _scale_mask(value.mask, factor))
    return value.scale(factor) if isinstance(value, HeadBias) else value * factor


def _match_mask(node: fx.Node, found: _EagerAttention, evaluator: ScoreEvaluator) -> fx.Node | None:
    """If ``node`` adds a mask or bias to attention scores, or hides scores by a mask, append the value of the mask or
    bias to ``found.masks`` and return the node of the scores before ``node``. Return ``None`` if ``node`` is another
    operator, or if the mask's value is unknown. ``evaluator``: computes the values of masks."""
    args = node.args
    if node.target is aten.add.Tensor and not node.kwargs:
        for scores, mask in (args, args[::-1]):
            value = evaluator.find_value(mask) if isinstance(mask, fx.Node) else None
            if isinstance(value, Tensor | tuple | ConditionalValue | HeadBias | BiasedMask):
                found.masks.append(_align(node, value))
                return scores  # type: ignore[return-value]
        return None
    if node.target is aten.sub.Tensor and not node.kwargs:
        value = evaluator.find_value(args[1]) if isinstance(args[1], fx.Node) else None
        negative = _align(node, value).scale(-1) if isinstance(value, HeadBias) else None
        if negative is None:
            return None
        found.masks.append(negative)
        return args[0]
    filled = node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
    if not filled and node.target not in (aten.where.self, aten.where.ScalarOther):
        return None
    scores, condition, number = args if filled else (args[1], args[0], args[2])
    if isinstance(number, fx.Node):
        number = evaluator.find_value(number)  # type: ignore[assignment]
    hides = _get_number(number)
    known = evaluator.find_value(condition) if isinstance(condition, fx.Node) else None
    if hides is None or hides > MASKED or not isinstance(known, Tensor | tuple | ConditionalValue):
        return None
    try:
        chosen = folding.evaluate_where(node, known, *((hides, 0.0) if filled else (0.0, hides)))
        found.masks.append(_align(node, folding.require_additive(node, chosen)))
    except (folding.UnknownValueError, RuntimeError, IndexError, TypeError):
        return None
    return scores  # type: ignore[return-value]


# --- the rewrite ------------------------------------------------------------------------------------------------------
def replace_score_functions(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Replace attentions in ``graph``, in place, by ``partition::scored_attention`` if their scores are capped by
    ``tanh`` or have an ALiBi bias, or if their mask has a prefix (keys that all queries of their document see, although
    the mask is otherwise causal). If a mask only restricts a query to a range of positions or to its document, the mask
    is removed and an operator with this restriction replaces the attention. Any other attention stays as it is.

    ``constants``: placeholder name -> value, for the constants that the graph reads.
    """
    evaluator = ScoreEvaluator(constants)
    writer = _OperandWriter(graph)
    changed = False
    for node in list(graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            changed |= _replace_masked(graph, node, evaluator, writer)
        elif node.target is aten.softmax.int:
            changed |= _replace_eager(graph, node, evaluator, writer)
    if changed:
        drop_unused(graph)
        refresh_graph_values(graph)  # the operator's result has other strides than a matrix product


def _replace_masked(graph: fx.Graph, node: fx.Node, evaluator: ScoreEvaluator, writer: _OperandWriter) -> bool:
    """Replace the scaled dot-product attention ``node`` of ``graph``, in place, by ``partition::scored_attention`` if
    its mask has an ALiBi bias or a prefix (keys that all queries of their document see). If the mask only restricts a
    query to its document or to a range of positions, remove the mask instead. Return whether anything was done.
    ``evaluator``: computes the value of the mask. ``writer``: inserts further operands, such as document ids."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if not isinstance(mask, fx.Node) or dropout:
        return False
    if len(list_node_sizes(node)) == 3:
        return _replace_joined(graph, node, evaluator, writer)
    if not is_plain_attention(node):
        return False
    query, key = (list_node_sizes(n) for n in node.args[:2])  # type: ignore[arg-type]
    value = evaluator.find_value(mask)
    if value is None or query[-2] != key[-2] or get_node_tensor(mask).dim() > 4:
        return False
    form = classify_scores([folding.map_value_parts(value, lambda x: align_rank(x, 4))], query[1], query[-2])
    if form is None:
        return False
    if form.prefix is None and form.slopes is None:  # drop_constant_masks finds such masks if constants are small
        return replace_mask(graph, node, form.documents or form.band, writer.ids)
    further = writer.write_operands(form, query[0], query[1])
    how = (node.kwargs.get("scale"), None, *form.list_reach())
    arguments = (*node.args[:3], *further, [], -1, *get_band_limits(form.band), *how)
    replace_attention(graph, node, scored_ops.scored_attention.default, arguments)
    return True


def _replace_joined(graph: fx.Graph, node: fx.Node, evaluator: ScoreEvaluator, writer: _OperandWriter) -> bool:
    """Replace the scaled dot-product attention ``node`` of ``graph``, in place, by ``partition::document_attention`` if
    its mask shows a query only keys of its own document. Return whether the attention was replaced. The queries, keys
    and values of ``node`` have batch and heads in one dim; in the new operands, these are two dims. ``evaluator``:
    computes the value of the mask. ``writer``: inserts the document ids."""
    given: Any = node.args
    mask: Any = given[3] if len(given) > 3 else node.kwargs.get("attn_mask")
    shapes = [list_node_sizes(x) for x in given[:3]]
    value = evaluator.find_value(mask)
    if value is None or len({s[0] for s in shapes}) > 1 or shapes[0][1] != shapes[1][1] or _is_output(node):
        return False
    size, length = shapes[0][:2]
    known = folding.map_value_parts(value, lambda x: align_rank(x, 3))
    rows = None if get_node_tensor(mask).dim() > 3 else _find_rows([known], size)
    if rows is None:
        return False
    heads = size // rows
    form = classify_scores(_split_heads([known], [size, length, length], [rows, heads, length, length]), heads, length)
    if form is None or form.documents is None or form.prefix is not None or form.slopes is not None:
        return False
    ids = writer.write_operands(form, rows, heads)[0]
    with graph.inserting_before(node):
        split = [_reshape(graph, x, [rows, heads, *s[1:]], node) for x, s in zip(given[:3], shapes, strict=True)]
    arguments = (*split, ids, [], *get_band_limits(form.band), node.kwargs.get("scale"))
    sizes = list_node_sizes(node)
    dims = _AttentionDims((), "abc", sizes, "abc")  # type: ignore[arg-type]
    _replace_arranged(graph, node, document_ops.document_attention.default, arguments, dims)
    return True


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _replace_eager(graph: fx.Graph, softmax: fx.Node, evaluator: ScoreEvaluator, writer: _OperandWriter) -> bool:
    """Replace an attention that the model writes as elementary operators, in place. If it caps its scores, has an ALiBi
    bias, or has a prefix (keys that all queries of their document see), ``partition::scored_attention`` replaces it.
    Otherwise, if a query sees only keys of its own document, ``partition::document_attention`` replaces it. Return
    whether it was replaced. ``softmax``: the node in ``graph`` of the attention's softmax. ``evaluator``: computes the
    values of masks. ``writer``: inserts further operands, such as document ids."""
    matched = _match_eager(softmax, evaluator)
    if matched is None:
        return False
    found, result = matched
    sizes = list_node_sizes(softmax)
    dims = _arrange_dims(found, _find_rows(found.masks, sizes[0]) if len(sizes) == 3 else None)
    if dims is None or any(user.op == "output" for user in result.users):
        return False
    rows, heads, queries, _ = dims.operands[0].sizes
    types = {get_node_tensor(x).dtype for x in (*(o.node for o in dims.operands), result)}
    plain = all(o.sizes[0] == rows and heads % o.sizes[1] == 0 for o in dims.operands)
    if len(types) > 1 or not plain or queries != dims.operands[1].sizes[2]:
        return False
    cap, scale = found.cap_and_scale
    form = classify_scores(_split_heads(found.masks, sizes, [rows, heads, queries, queries]), heads, queries)
    changed = form is not None and (cap is not None or form.prefix is not None or form.slopes is not None)
    if form is None or not (changed or form.documents):
        return False
    further = writer.write_operands(form, rows, heads)
    operands = [_insert_operand(graph, operand, result) for operand in dims.operands]
    target = document_ops.document_attention.default
    how: tuple[Any, ...] = ([], *get_band_limits(form.band), scale)
    if changed:
        target = scored_ops.scored_attention.default
        how = (*further[1:], [], -1, *get_band_limits(form.band), scale, cap, *form.list_reach())
    _replace_arranged(graph, result, target, (*operands, further[0], *how), dims)
    return True


def _find_rows(masks: Sequence[Any], size: int) -> int | None:
    """Return the batch size of an attention that has batch and heads in one dim of ``size`` elements, as far as its
    ``masks`` show it: the number of different rows that they read from a tensor along this dim, or 1 if no mask varies
    along it. Return ``None`` if masks read different numbers of rows, or a number that does not divide ``size``.
    ``masks``: the values of the masks."""
    counts: set[int] = set()
    for mask in masks:
        _collect_row_counts(mask, size, counts)
    return None if len(counts) > 1 or any(size % n for n in counts) else next(iter(counts), 1)


def _collect_row_counts(value: Any, size: int, counts: set[int]) -> None:
    """For each index tensor in ``value`` that varies along the first dim alone, add the number of different indices to
    ``counts``. ``value``: the value of a mask ``[batch and heads, queries, keys]``. ``size``: the size of the first
    dim."""

    def look(x: Tensor) -> Tensor:
        if x.dim() == 3 and x.shape[0] == size != 1 and x.numel() == size:
            counts.add(x.unique().numel())
        return x

    folding.map_value_parts(value, look)


def _split_heads(masks: Sequence[Any], old: Sequence[int], new: Sequence[int]) -> list[Any]:
    """Return the values of ``masks`` for scores that are reshaped from the shape ``old`` to the shape ``new``, which is
    ``[batch, heads, queries, keys]``. ``masks``: the values of masks that are added to the scores."""
    return list(masks) if list(old) == list(new) else [folding.reshape_value(mask, old, new) for mask in masks]


def _insert_operand(graph: fx.Graph, operand: _Operand, before: fx.Node) -> fx.Node:
    """Insert operators into ``graph``, before the node ``before``, that bring ``operand``, an operand of an eager
    attention, to the shape ``[batch, heads, positions, width]``, and return the node of the result."""
    node, labels = operand.node, operand.labels
    with graph.inserting_before(before):
        if "-" in labels:
            sizes = [n for n, c in zip(list_node_sizes(node), labels, strict=True) if c != "-"]
            node, labels = _reshape(graph, node, sizes, before), labels.replace("-", "")
        node = _permute(graph, node, [labels.index(c) for c in operand.order], before)
        return _reshape(graph, node, operand.sizes, before)


def _permute(graph: fx.Graph, node: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    """Insert a permutation of the dims of ``node`` to the order ``order`` at the insertion point of ``graph``, and
    return its node. If ``order`` changes nothing, ``node`` is returned. If ``node`` is the opposite transpose of
    another node, that node is returned. ``like``: the node whose metadata the new node gets."""
    rank = len(order)
    if order == list(range(rank)):
        return node
    moved = [i for i, source in enumerate(order) if source != i]
    if len(moved) == 2 and node.target is aten.transpose.int and sorted(d % rank for d in node.args[1:]) == moved:  # type: ignore[operator]
        return node.args[0]  # type: ignore[return-value]
    if len(moved) == 2:
        return insert_like(like, graph, aten.transpose.int, (node, *moved))
    return insert_like(like, graph, aten.permute.default, (node, order))


def _reshape(graph: fx.Graph, node: fx.Node, sizes: list[int], like: fx.Node) -> fx.Node:
    """Insert a reshape of ``node`` to the shape ``sizes`` at the insertion point of ``graph``, and return its node. If
    ``node`` was made by reshapes from a node of this shape, return that node instead. ``like``: the node whose metadata
    the new node gets."""
    source = node
    while source.target is aten.reshape.default and list_node_sizes(source) != sizes:
        source = source.args[0]  # type: ignore[assignment]
    if list_node_sizes(source) == sizes:
        return source
    return insert_like(like, graph, aten.reshape.default, (node, sizes))


def _replace_arranged(
    graph: fx.Graph, node: fx.Node, target: Callable[..., object], arguments: tuple[object, ...], dims: _AttentionDims
) -> None:
    """Replace ``node``, the result of an attention in ``graph``, in place, by the first result of the operator
    ``target``, reshaped and permuted. ``arguments``: the arguments of ``target``. ``dims``: the shape and the order of
    dims of the new result."""
    with graph.inserting_before(node):
        made = insert_like(node, graph, target, arguments)
        out = insert_like(node, graph, operator.getitem, (made, 0))
        moved = _reshape(graph, out, dims.sizes, node)
        moved = _permute(graph, moved, [dims.order.index(c) for c in dims.made], node)
    node.replace_all_uses_with(moved)
    graph.erase_node(node)
    for user in list(moved.users):  # the model may undo the reshape
        if moved.target is user.target is aten.reshape.default and list_node_sizes(user) == list_node_sizes(out):
            user.replace_all_uses_with(out)
            graph.erase_node(user)


class _OperandWriter:
    """Inserts into ``graph`` the operands of ``partition::scored_attention`` after queries, keys and values: document
    ids, flags of a prefix (keys that all queries of their document see), and slopes of heads. Each tensor is inserted
    only once.

    ``ids``: a cache of document ids for other attention operators: key of a document mask -> node of the ids.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.ids: dict[DocumentKey, fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}

    def write_operands(self, form: ScoreForm, rows: int, heads: int) -> tuple[fx.Node | None, ...]:
        """Return three nodes for an attention: document ids ``[rows, positions]``, flags of a prefix (keys that all
        queries of their document see) ``[rows, positions]``, and slopes ``[heads]``. A node is ``None`` if the
        attention has no such operand. ``form``: how the attention changes its scores. ``rows``: the batch size.
        ``heads``: the number of query heads."""
        marks = [None if m is None else self._write_rows(m, rows) for m in (form.documents, form.prefix)]
        return *marks, None if form.slopes is None else self._write_slopes(*form.slopes, heads)

    def _write_rows(self, mask: DocumentMask, rows: int) -> fx.Node:
        where = mask.key(rows)
        if where not in self._made:
            self._made[where] = insert_document_ids(self.graph, mask, rows)
        return self._made[where]

    def _write_slopes(self, source: fx.Node, factor: float, heads: int) -> fx.Node:
        """Insert operators into the graph that compute the slopes ``[heads]`` of an ALiBi bias, ``factor * source``,
        and return their node; the node is reused for equal arguments. ``source``: a node with one number for each of
        the ``heads`` heads."""
        where = source, factor
        if where not in self._made:
            made, last = source, source
            if source.op == "placeholder":
                last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            for target, argument in ((aten.reshape.default, [heads]), (aten.mul.Tensor, factor)):
                if (target is aten.mul.Tensor and factor == 1) or argument == list(list_node_sizes(made)):
                    continue
                with self.graph.inserting_after(last):
                    made = last = insert_operator_node(self.graph, target, (made, argument))
                made.meta.update({k: v for k, v in source.meta.items() if k != "val"})
            self._made[where] = made
        return self._made[where]
