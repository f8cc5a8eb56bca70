"""Follow padded tensors through the operators of a graph, to prove that elements of the original batch do not change.

The factor rules (which name the loop dimensions of an operator) say how the dims of operands and results correspond.
Along a loop dimension that grows with the batch, there are two allowed cases. An operator may compute each element by
itself, so that elements of the original batch depend on such elements alone. Or it may sum over the dimension, and
padded elements must then be zero. Operators that move elements along a dim (slices, pads, running sums, attention) have
functions of their own here. If neither case can be proved, the tensor gets a fault, a text with the reason, and so do
all tensors that are computed from it.
"""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partitioner.passes.ir.rewrite import format_node_location
from partitioner.passes.padding.compare import BANDED_ATTENTIONS, get_operator_name, list_result_shapes
from partitioner.passes.padding.fills import CASTS, NEGATIVE, VIEWS, apply_to_numbers, is_pointwise
from partitioner.passes.padding.places import find_lowest, fix_read_dims, propagate_argmax
from partitioner.passes.padding.values import (
    Causal,
    DimPart,
    PaddedValue,
    Parts,
    assign_parts,
    find_created_part,
    make_fixed_value,
)
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.attention import find_attention_band
from partitioner.passes.rules.factors import OpFactors, get_node_argument, normalize_dim, normalize_dims, operands_of

Values = tuple[PaddedValue, ...]  # what is known of each result of a node
Sizes = tuple[int, int]  # batch sizes: that of the plan, and that of the other graph
Rule = Callable[[fx.Node, Sequence[PaddedValue]], "PaddedValue | None"]

_READS_DOCUMENT_IDS = (
    "partition::document_attention",
    "partition::scored_attention",
)  # these read document ids and prefixes instead of a mask


def propagate_padding(
    node: fx.Node, operands: Sequence[PaddedValue], other_shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> Values:
    """Return a tuple with the :class:`PaddedValue` of each result of the operator ``node``: which dims grow if the
    batch is padded along one axis (samples or positions), and which value padded elements have.

    ``operands``: the :class:`PaddedValue` of each operand. ``other_shapes``: the shapes of the results in the model's
    graph for another batch size. ``sizes``: the batch sizes of the two graphs, in elements along the axis.
    """
    shapes = list_result_shapes(node)
    if not any(o.grows or o.fault or o.real_places for o in operands) and list(shapes) == list(other_shapes):
        return (_describe_plain(node, operands),) if len(shapes) == 1 else tuple(make_fixed_value(s) for s in shapes)
    operands = fix_read_dims(node, operands)
    single = SINGLE_RULES.get(get_operator_name(node)) if len(shapes) == 1 else None
    made = None if single is None else single(node, operands)
    values = (made,) if made is not None else _describe_results_by_factors(node, operands, other_shapes, sizes)
    if get_operator_name(node) in BANDED_ATTENTIONS:
        attended = _propagate_attention(node, operands)
        values = (attended, replace(attended, dims=attended.dims[:-1]))
    return tuple(
        value.with_fault(
            "" if _has_sizes(value, shape, other, sizes) else _format_reason(node, "has a size of its own")
        )
        for value, shape, other in zip(values, shapes, other_shapes, strict=True)
    )


def _format_reason(node: fx.Node, problem: str) -> str:
    """Return a message such as ``sum at layers.0 (model.py:12) adds up padded numbers``: the name and the location of
    the operator ``node``, followed by ``problem``, a text that says what it does."""
    return f"{get_operator_name(node)} at {format_node_location(node)} {problem}"


def _describe_plain(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue:
    """Return the :class:`PaddedValue` of the first result of the operator ``node``, none of whose operands and results
    depends on the batch size: no dim grows. If it follows from the operands that all elements have one value, the
    result has this value. ``operands``: the :class:`PaddedValue` of each operand."""
    value = make_fixed_value(list_result_shapes(node)[0])
    return replace(value, uniform=_find_uniform(node, operands))


def _has_sizes(value: PaddedValue, shape: Sequence[int], other: Sequence[int], sizes: Sizes) -> bool:
    """Return whether ``value`` is consistent with the shapes of a tensor at two batch sizes: for both sizes, the sizes
    of the parts of each dim must multiply to the dim's size. (A flattened dim has several parts, some of which may grow
    with the batch.) ``shape``, ``other``: the shapes of the tensor in the model's graphs for the batch sizes ``sizes``.
    """
    for parts, own, theirs in zip(value.dims, shape, other, strict=True):
        at = [1, 1]
        for part in parts:
            at[0] *= part.size
            at[1] *= part.resize(sizes)
        if at != [own, theirs]:
            return False
    return True


def _find_uniform(node: fx.Node, operands: Sequence[PaddedValue]) -> float | None:
    """Return the value that all elements of the result of the operator ``node`` have, padded or not; ``None`` if
    elements may differ or the value is not known. ``operands``: the :class:`PaddedValue` of each operand; its field
    ``uniform`` is the value of all its elements."""
    name = get_operator_name(node)
    if name in ("full", "new_full", "full_like"):
        number = get_node_argument(node, "fill_value")
        return float(number) if isinstance(number, bool | int | float) else None
    if name in ("zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like"):
        return float("ones" in name)
    if name in VIEWS and operands:
        return operands[0].uniform
    lowest = operands[0].lowest if operands else None
    number = node.args[1] if len(node.args) > 1 else None
    if lowest is not None and isinstance(number, int | float) and lowest >= number:
        if name == "lt":
            return 0.0
        if name == "ge":
            return 1.0
    return apply_to_numbers(node, [o.uniform for o in operands]) if is_pointwise(node) else None


# --- by the factor rule -----------------------------------------------------------------------------------------------


def _describe_results_by_factors(
    node: fx.Node, operands: Sequence[PaddedValue], others: Sequence[tuple[int, ...]], sizes: Sizes
) -> Values:
    """Return a tuple with the :class:`PaddedValue` of each result of the operator ``node``, derived from the operator's
    sharding rule, which names its loop dimensions (factors) and says over which of them each dim of its tensors runs. A
    result gets a fault (a reason why elements of the original batch may change) if the operator mixes padded elements
    with others.

    ``operands``: the :class:`PaddedValue` of each operand. ``others``: the shapes of the results in the graph for
    another batch size. ``sizes``: the two batch sizes, in elements along the padded axis.
    """
    shapes, fault = list_result_shapes(node), next((o.fault for o in operands if o.fault), "")
    rule = factors_of(node)
    if rule is None:
        return tuple(make_fixed_value(s, fault or _format_reason(node, "has no rule")) for s in shapes)
    operand_parts: list[dict[str, Parts]] = []
    for value, dims in zip(operands, rule.operands, strict=True):
        mapped = _map_factors(value, dims, rule.sizes)
        if mapped is None:
            fault = fault or _format_reason(node, "takes apart or combines what is padded")
        operand_parts.append(mapped or {})
    kinds: dict[str, list[tuple[int, bool, int]]] = {}
    for of in operand_parts:
        for factor, parts in of.items():
            grown = [p.kind for p in parts if p.grows]
            if kinds.setdefault(factor, grown) != grown:
                fault = fault or _format_reason(node, "brings together tensors of which one is padded")
    fault = fault or _check_entrywise(node, rule, operand_parts, operands)
    return tuple(
        _build_result(node, rule, k, operand_parts, operands, others[k], sizes).with_fault(fault)
        for k in range(len(shapes))
    )


def _map_factors(
    value: PaddedValue, dims: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> dict[str, Parts] | None:
    """Return the parts of which each factor of one operand consists, as a dict: name of a factor -> tuple of parts. A
    factor is a named loop dimension of an operator. A part has a size, and may grow with the batch. Return ``None`` if
    the parts of a dim, in order, do not give the sizes of its factors, or if a growing part would be divided between
    two factors.

    ``value``: the :class:`PaddedValue` of the operand, with the parts of each dim. ``dims``: for each dim of the
    operand, the names of its factors. ``sizes``: name of a factor -> its size.
    """
    found: dict[str, Parts] = {}
    for parts, factors in zip(value.dims, dims, strict=True):
        if not any(p.grows for p in parts):
            found |= {f: (DimPart(sizes[f]),) for f in factors}
            continue
        assigned = assign_parts(parts, [sizes[f] for f in factors])
        if assigned is None:
            return None
        found |= dict(zip(factors, assigned, strict=True))
    return found


def _has_no_later_keys(value: PaddedValue, rule: OpFactors, operand: int, factor: str) -> bool:
    """Return whether an operand, such as attention weights under a causal mask, is zero wherever the key index exceeds
    the query index. An operator that sums over keys then adds nothing from padded keys to a query of the original
    batch. ``value``: the :class:`PaddedValue` of the operand. ``rule``: the operator's sharding rule, which says over
    which loop dimensions dims run. ``operand``: the index of the operand, from 0. ``factor``: the name of the loop
    dimension over keys, over which the operator sums."""
    if value.causal is None or value.causal[2] != 0:
        return False
    (query, key), dims = value.causal[:2], rule.operands[operand]
    own, other = value.growing_part(key), value.growing_part(query)
    stays = any(dims[query] == result for result in rule.results[0])
    return dims[key] == (factor,) and stays and own is not None and other is not None and own.kind == other.kind


def _check_entrywise(
    node: fx.Node, rule: OpFactors, operand_parts: Sequence[Mapping[str, Parts]], operands: Sequence[PaddedValue]
) -> str:
    """Return a text that says why the operator ``node`` mixes padded elements with others. The text is empty if it does
    not: because it computes each element along the growing dims by itself, or because the padded elements that it sums
    are zero.

    ``rule``: the operator's sharding rule, by factors (named loop dimensions). ``operand_parts``: for each operand, a
    dict: name of a factor -> its parts (size, and whether it grows with the batch). ``operands``: the
    :class:`PaddedValue` of each operand.
    """
    made = {f for dims in rule.results for factors in dims for f in factors}
    coupled = {*rule.whole, *rule.lower} | ({rule.spans.factor} if rule.spans is not None else set())
    for factor in {f for of in operand_parts for f, parts in of.items() if any(p.grows for p in parts)}:
        if factor in made and factor not in coupled:
            continue
        adds = factor not in made and factor not in rule.whole and bool(rule.linear)
        zeros = [all(p.fill == 0 for p in of[factor] if p.grows) for of in operand_parts if factor in of]
        if adds and (any(zeros) or any(_has_no_later_keys(v, rule, i, factor) for i, v in enumerate(operands))):
            continue
        return _format_reason(node, "adds up padded numbers" if adds else "combines real places with padded ones")
    return ""


def _build_result(
    node: fx.Node,
    rule: OpFactors,
    index: int,
    operand_parts: Sequence[Mapping[str, Parts]],
    operands: Sequence[PaddedValue],
    other: Sequence[int],
    sizes: Sizes,
) -> PaddedValue:
    """Return the :class:`PaddedValue` of one result of the operator ``node``: which dims grow if the batch is padded,
    and which value padded elements have. ``index``: the index of the result, from 0.

    ``rule``: the operator's sharding rule, by factors (named loop dimensions). ``operand_parts``: for each operand, a
    dict: name of a factor -> its parts (size, and whether it grows with the batch). ``operands``: the
    :class:`PaddedValue` of each operand. ``other``: the shape of the result in the graph for another batch size.
    ``sizes``: the two batch sizes, in elements along the padded axis.
    """
    known: dict[str, Parts] = {}
    for of in operand_parts:
        known |= {f: parts for f, parts in of.items() if f not in known or any(p.grows for p in parts)}
    dims: list[Parts] = []
    shape = list_result_shapes(node)[index]
    for dim, factors in enumerate(rule.results[index]):
        parts: list[DimPart] = []
        left, left_other = shape[dim], other[dim]
        for factor in factors:
            for part in known.get(factor, ()):
                left, left_other = left // part.size, left_other // max(1, part.resize(sizes))
        for factor in factors or ("",):
            if factor in known:
                fills = [
                    _find_fill_value(node, factor, i, operand_parts, operands) if p.grows else None
                    for i, p in enumerate(known[factor])
                ]
                parts += [replace(p, fill=fill) for p, fill in zip(known[factor], fills, strict=True)]
                continue
            created = find_created_part(left, left_other, sizes)
            if created is not None and (created.size > 1 or created.grows):
                parts.append(replace(created, fill=_find_uniform(node, operands) if created.grows else None))
            left = left_other = 1
        dims.append(
            tuple(parts) if any(p.grows for p in parts) else (_find_first_places(node, shape[dim], other[dim], sizes),)
        )
    value = PaddedValue(tuple(dims), uniform=_find_uniform(node, operands))
    if index == 0 and len(rule.results) == 1:
        return _add_coordinates(node, value, rule, operands)
    return value


def _find_first_places(node: fx.Node, size: int, other: int, sizes: Sizes) -> DimPart:
    """Return how a dim of the result of ``node`` depends on the batch, if no operand grows with the batch along it. If
    ``node`` is a ``slice`` from index 0 that takes as many elements as the batch has, for example from a table of
    positions, the dim grows; otherwise it has a fixed size. ``size``, ``other``: the sizes of the dim in the graphs for
    the two batch sizes ``sizes``."""
    created = find_created_part(size, other, sizes)
    first = get_operator_name(node) == "slice" and not get_node_argument(node, "start")
    return created if first and created is not None else DimPart(size)


def _find_fill_value(
    node: fx.Node,
    factor: str,
    index: int,
    operand_parts: Sequence[Mapping[str, Parts]],
    operands: Sequence[PaddedValue],
) -> float | None:
    """Return the value of the padded elements of a result of the operator ``node`` along one part of one dim (a
    flattened dim has several parts); ``None`` if it is not known or the elements differ.

    ``factor``: the loop dimension of the operator over which the dim runs. ``index``: the index of the part, from 0.
    ``operand_parts``: for each operand, a dict: name of a factor -> its parts. ``operands``: the :class:`PaddedValue`
    of each operand.
    """
    name = get_operator_name(node)
    numbers = [
        of[factor][index].fill if index < len(of.get(factor, ())) else value.uniform
        for of, value in zip(operand_parts, operands, strict=True)
    ]
    if name in VIEWS:
        return numbers[0]
    if name in ("cat", "stack", "select", "slice"):  # the part is along another dim than the joined or cut one
        return numbers[0] if len({*numbers}) == 1 else None
    return apply_to_numbers(node, numbers) if is_pointwise(node) else None


def _add_coordinates(
    node: fx.Node, value: PaddedValue, rule: OpFactors, operands: Sequence[PaddedValue]
) -> PaddedValue:
    """Return ``value``, the :class:`PaddedValue` of the result of the operator ``node``, with the fields added that
    describe elements as functions of their indices. For example, each element of an ``arange`` is its own index, and a
    comparison of two such tensors gives a causal mask.

    ``rule``: the operator's sharding rule, which says which dims of operands and results run over the same loop.
    ``operands``: the :class:`PaddedValue` of each operand.
    """
    name = get_operator_name(node)
    if name == "arange" and get_node_argument(node, "step", 1) == 1 and isinstance(start := _get_start(node), int):
        return replace(value, lowest=float(start), counts=0 if start == 0 else None)
    if not operands:
        return value
    homes = [_map_dims(rule, i) for i in range(len(operands))]
    first, to = operands[0], homes[0]
    if name in VIEWS or name in CASTS:
        keeps = name in VIEWS or not _is_inexact_for_integers(node)
        return replace(
            value,
            lowest=first.lowest if keeps else None,
            counts=to.get(first.counts) if keeps and first.counts is not None else None,
            distance=_move_pair(first.distance, to) if keeps else None,
            causal=_move_pair(first.causal, to) if name in VIEWS else _combine_causal(node, operands, homes),
            real_places=first.real_places and keeps,
        )
    if name == "sub" and len(operands) == 2 and get_node_argument(node, "alpha", 1) == 1:
        a, b = (_move_dim(o.counts, home) for o, home in zip(operands, homes, strict=True))
        if a is not None and b is not None and a != b:
            return replace(value, distance=(min(a, b), max(a, b), 1.0 if a > b else -1.0))
    if name in ORDERS and len(operands) == 1 and first.distance is not None and len(node.args) > 1:
        pair, known = _move_pair(first.distance, to), _compare_distance(name, first.distance[2], node.args[1])
        return value if pair is None or known is None else replace(value, causal=(*pair[:2], known))
    if name in ORDERS and len(operands) == 2:
        a, b = (_move_dim(o.counts, home) for o, home in zip(operands, homes, strict=True))
        if a is None or b is None or a == b:
            return value
        # The later dim is that of keys, as in all attention masks. If the key comes after the query, the comparison is
        # known.
        query, key = min(a, b), max(a, b)
        return replace(value, causal=(query, key, float(ORDERS[name](1, 0) if a == key else ORDERS[name](0, 1))))
    if not is_pointwise(node):
        return value
    return replace(value, causal=_combine_causal(node, operands, homes), lowest=find_lowest(node, operands))


def _compare_distance(name: str, sign: float, number: Any) -> float | None:
    """Return the result (1 for true, 0 for false) of comparing the distance between a key and a query with ``number``,
    if it is the same for all keys after the query; otherwise return ``None``.

    ``name``: the comparison: ``lt``, ``le``, ``gt`` or ``ge``. ``sign``: 1 if the distance is key index minus query
    index (1 or more for such keys), -1 if it is query index minus key index (-1 or less).
    """
    if not isinstance(number, int | float):
        return None
    if sign < 0:  # compare the negative distance instead
        name, number = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[name], -number
    if name in ("gt", "le") and number < 1:
        return float(name == "gt")
    return float(name == "ge") if name in ("ge", "lt") and number <= 1 else None


ORDERS: dict[str, Callable[[int, int], bool]] = {"le": op.le, "lt": op.lt, "ge": op.ge, "gt": op.gt}


def _combine_causal(
    node: fx.Node, operands: Sequence[PaddedValue], homes: Sequence[Mapping[int, int]]
) -> Causal | None:
    """If the result of the pointwise operator ``node`` has the same known value at every element whose key index
    exceeds its query index, as a causal mask has, return (dim of queries, dim of keys, value). Otherwise return
    ``None``.

    ``operands``: the :class:`PaddedValue` of each operand. ``homes``: for each operand, a dict: dim of the operand ->
    dim of the result.
    """
    moved = [_move_pair(o.causal, home) for o, home in zip(operands, homes, strict=True)]
    for pair in moved:
        if pair is not None:
            known = [
                m[2] if m is not None and m[:2] == pair[:2] else o.uniform for m, o in zip(moved, operands, strict=True)
            ]
            number = apply_to_numbers(node, known)
            return None if number is None else (*pair[:2], number)
    return None


def _is_inexact_for_integers(node: fx.Node) -> bool:
    """Return whether the cast ``node`` gives a dtype, such as bfloat16, in which large integers are not exact, so that
    its elements cannot be used as indices any more."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype in (torch.bool, torch.uint8, torch.int8, torch.float16, torch.bfloat16)


def _get_start(node: fx.Node) -> Any:
    return get_node_argument(node, "start", 0)


def _map_dims(rule: OpFactors, operand: int) -> dict[int, int]:
    """Return a dict: dim of an operand -> dim of the first result that runs over the same loop of the operator. Dims
    without such a dim are left out.

    ``rule``: the operator's sharding rule, which says over which loop dimensions dims run. ``operand``: the index of
    the operand, from 0.
    """
    homes = {factors: d for d, factors in enumerate(rule.results[0]) if factors}
    return {d: homes[factors] for d, factors in enumerate(rule.operands[operand]) if factors in homes}


def _move_dim(dim: int | None, to: Mapping[int, int]) -> int | None:
    return None if dim is None else to.get(dim)


def _move_pair(pair: Causal | None, to: Mapping[int, int]) -> Causal | None:
    """Return ``pair`` with the dims of an operand replaced by those of the operator's result; ``None`` if ``pair`` is
    ``None`` or the result lacks one of the dims. ``pair``: (dim of queries, dim of keys, number). ``to``: dim of the
    operand -> dim of the result."""
    if pair is None or pair[0] not in to or pair[1] not in to:
        return None
    return to[pair[0]], to[pair[1]], pair[2]


# --- operators with a function of their own; ``None``: the factor rule holds ------------------------------------------


def _propagate_slice(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``slice`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. If the sliced dim does not grow, return ``None``: the caller then uses
    the operator's sharding rule. The result has a fault (a reason why elements of the original batch may change) if the
    slice has a step or a tensor as bound, or cuts a flattened dim.

    ``operands``: the :class:`PaddedValue` of each operand.
    """
    (x,) = operands[:1]
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(x.dims))
    part = x.growing_part(dim)
    if part is None:
        return (
            None if not any(p.grows for p in x.dims[dim]) else x.with_fault(_format_reason(node, "cuts what is padded"))
        )
    size, length = part.size, list_result_shapes(node)[0][dim]
    start = get_node_argument(node, "start") or 0
    start = start + size if start < 0 else start
    if get_node_argument(node, "step", 1) != 1 or len(operands) > 1:
        return x.with_dim(dim, part).with_fault(_format_reason(node, "picks places of what is padded"))
    cut = size - start - length  # number of elements that are cut at the end
    if length == 1 and start == 0 and size > 1:  # only the first element, which belongs to the original batch
        return x.with_dim(dim, DimPart(1))
    return x.with_dim(dim, DimPart(length, True, part.offset - start - cut, part.fill if cut == 0 else None))


def _propagate_pad(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``constant_pad_nd`` node ``node``: which dims grow if the
    batch is padded, and which value padded elements have. ``operands``: the :class:`PaddedValue` of the operand, as a
    sequence of one.

    The result has a fault (a reason why elements of the original batch may change) in two cases: the node pads a
    flattened dim of which a part grows with the batch; or it adds elements at the end of a dim that grows, and their
    value is not known to be that of the dim's padded elements.
    """
    (x,) = operands
    amounts, value = get_node_argument(node, "pad"), x
    number = get_node_argument(node, "value", 0)
    for i in range(len(amounts) // 2):
        dim, (before, after) = len(x.dims) - 1 - i, amounts[2 * i : 2 * i + 2]
        part = x.growing_part(dim)
        if not (before or after):
            continue
        if part is None:
            if any(p.grows for p in x.dims[dim]):
                return x.with_fault(_format_reason(node, "pads what is padded"))
            value = replace(
                value,
                dims=tuple(
                    ((DimPart(sum(p.size for p in ps) + before + after),) if d == dim else ps)
                    for d, ps in enumerate(value.dims)
                ),
            )
            continue
        fits = after == 0 or (part.fill is not None and number is not None and part.fill == float(number))
        value = value.with_dim(dim, DimPart(part.size + before + after, True, part.offset + before + after, part.fill))
        if not fits:
            value = value.with_fault(_format_reason(node, "writes behind the last place of what is padded"))
    return replace(value, uniform=None)


def _propagate_cat(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``cat`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. If no operand grows along the joined dim, return ``None``: the caller
    then uses the operator's sharding rule. The result has a fault (a reason why elements of the original batch may
    change) if an operand before the last grows along this dim.

    ``operands``: the :class:`PaddedValue` of each operand.
    """
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(operands[0].dims))
    if not any(p.grows for o in operands for p in o.dims[dim]):
        return None
    part, *_ = (o.growing_part(dim) for o in operands[-1:])
    fault = next((o.fault for o in operands if o.fault), "")
    size = list_result_shapes(node)[0][dim]
    if part is None or any(p.grows for o in operands[:-1] for p in o.dims[dim]):
        return (
            operands[-1]
            .with_dim(dim, DimPart(size))
            .with_fault(fault or _format_reason(node, "joins behind what is padded"))
        )
    more = size - part.size
    return operands[-1].with_dim(dim, DimPart(size, True, part.offset + more, part.fill)).with_fault(fault)


def _propagate_select(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``select`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. If the dim of the selected index does not grow, return ``None``: the
    caller then uses the operator's sharding rule. The result has a fault (a reason why elements of the original batch
    may change) unless index 0 is selected, because another index may belong to a padded element.

    ``operands``: the :class:`PaddedValue` of each operand.
    """
    (x,) = operands[:1]
    dim, index = normalize_dim(get_node_argument(node, "dim", 0), len(x.dims)), get_node_argument(node, "index")
    if not any(p.grows for p in x.dims[dim]):
        return None
    left = PaddedValue(tuple(parts for d, parts in enumerate(x.dims) if d != dim), x.fault)
    first = x.growing_part(dim) is not None and index == 0
    return left if first else left.with_fault(_format_reason(node, "picks a place of what is padded"))


def _scatter_slice(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``slice_scatter`` node ``node``: which dims grow if the
    batch is padded, and which value padded elements have. If the written dim does not grow, return ``None``: the caller
    then uses the operator's sharding rule. The result has a fault (a reason why elements of the original batch may
    change) unless the written slice reaches the end of the dim.

    ``operands``: the :class:`PaddedValue` of each operand.
    """
    x, source = operands
    dim = normalize_dim(get_node_argument(node, "dim", 0), len(x.dims))
    part, given = x.growing_part(dim), source.growing_part(dim)
    if part is None and given is None:
        return None
    fault = x.fault or source.fault
    start = get_node_argument(node, "start") or 0
    whole = part is not None and given is not None and start >= 0 and start + given.size == part.size
    if not whole or get_node_argument(node, "step", 1) != 1:
        return x.with_fault(fault or _format_reason(node, "writes into a part of what is padded"))
    assert part is not None and given is not None
    return x.with_dim(dim, replace(part, fill=given.fill)).with_fault(fault)


def _propagate_select_scatter(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``select_scatter`` node ``node``: which dims grow if the
    batch is padded, and which value padded elements have. If the written dim does not grow, return ``None``: the caller
    then uses the operator's sharding rule. The result has a fault (a reason why elements of the original batch may
    change) unless index 0 is written, because another index may belong to a padded element.

    ``operands``: the :class:`PaddedValue` of each operand.
    """
    x, source = operands
    dim, index = normalize_dim(get_node_argument(node, "dim", 0), len(x.dims)), get_node_argument(node, "index")
    if not any(p.grows for p in x.dims[dim]):
        return None
    fault = (
        x.fault or source.fault or ("" if index == 0 else _format_reason(node, "writes at a place of what is padded"))
    )
    return replace(x, uniform=None, lowest=None, counts=None, causal=None).with_fault(fault)


def _propagate_cumsum(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``cumsum`` or ``diff`` node ``node``: which dims grow if the
    batch is padded. If the dim along which it is computed does not grow, return ``None``: the caller then uses the
    operator's sharding rule. Padded elements come last along this dim, so results for elements of the original batch do
    not depend on them. ``operands``: the :class:`PaddedValue` of each operand."""
    x = operands[0]
    dim = normalize_dim(get_node_argument(node, "dim", -1), len(x.dims))
    if not any(p.grows for p in x.dims[dim]):
        return None
    part, fault = x.growing_part(dim), next((o.fault for o in operands if o.fault), "")
    if part is None or (
        get_operator_name(node) == "diff" and (len(operands) != 2 or get_node_argument(node, "n", 1) != 1)
    ):
        return x.with_fault(fault or _format_reason(node, "combines places of what is padded"))
    return replace(x.with_dim(dim, replace(part, fill=None)), uniform=None).with_fault(fault)


def _propagate_combined_ids(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``partition::combine_ids`` node ``node``: which dims grow if
    the batch is padded. The operator replaces each pair of ids ``[batch, positions]`` by a number, the first position
    at which the pair occurs. If positions do not grow, return ``None``: the caller then uses the operator's sharding
    rule. Padded positions come last, so results for positions of the original batch do not depend on them.
    ``operands``: the :class:`PaddedValue` of each operand."""
    if not any(p.grows for o in operands for p in o.dims[1]):
        return None
    parts = [o.growing_part(1) for o in operands]
    fault = next((o.fault for o in operands if o.fault), "")
    if any(p is None or p.kind != parts[0].kind for p in parts if parts[0] is not None) or parts[0] is None:
        return operands[0].with_fault(fault or _format_reason(node, "brings together tensors of which one is padded"))
    return PaddedValue((operands[0].dims[0], (replace(parts[0], fill=None),)), fault)


def _propagate_gather(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``gather`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. ``operands``: the :class:`PaddedValue` of source and index.

    The result has a fault (a reason why elements of the original batch may change) in two cases: the dim along which
    the node reads grows, and elements may read another position than their own; or source and index grow differently
    along another dim.
    """
    x, index = operands
    dim, rank = normalize_dim(get_node_argument(node, "dim"), len(x.dims)), len(x.dims)
    fault, itself = x.fault or index.fault, False
    dims: list[Parts] = []
    for d in range(rank):
        own, asked = x.growing_part(d), index.growing_part(d)
        if d != dim:
            if own is not None and asked is not None and own.kind == asked.kind:
                dims.append((replace(asked, fill=None),))
            elif own is None and asked is None and not any(p.grows for v in (x, index) for p in v.dims[d]):
                dims.append(index.dims[d])
            else:
                return index.with_fault(fault or _format_reason(node, "brings together tensors of which one is padded"))
        elif own is None and not any(p.grows for p in x.dims[d]):
            dims.append(tuple(replace(p, fill=None) for p in index.dims[d]))
        elif own is not None and asked is not None and own.kind == asked.kind and index.counts == d:
            dims.append((own,))  # each element reads its own position
            itself = True
        else:
            return index.with_fault(fault or _format_reason(node, "reads places of what is padded"))
    return PaddedValue(tuple(dims), fault, counts=x.counts if itself else None, lowest=x.lowest)


def _choose_branch(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """If the condition of the ``where`` node ``node`` is known to be true everywhere or false everywhere, return the
    :class:`PaddedValue` of the operand that it selects: which dims grow if the batch is padded, and which value padded
    elements have. Otherwise return ``None``: the caller then uses the operator's sharding rule. ``operands``: the
    :class:`PaddedValue` of each operand."""
    if len(node.args) < 3 or operands[0].uniform is None or operands[0].fault:
        return None
    branch = node.args[1 if operands[0].uniform else 2]
    if not isinstance(branch, fx.Node) or list_result_shapes(branch) != list_result_shapes(node):
        return None
    return operands[operands_of(node).index(branch)]


def _propagate_softmax(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``softmax`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. If the dim of the softmax does not grow, return ``None``: the caller
    then uses the operator's sharding rule. The result has a fault (a reason why elements of the original batch may
    change) unless padded elements have scores of -1e30 or less, or are hidden by a causal mask.

    ``operands``: the :class:`PaddedValue` of the operand, as a sequence of one.
    """
    (x,) = operands[:1]
    (dim,) = normalize_dims(get_node_argument(node, "dim"), len(x.dims))
    part = x.growing_part(dim)
    if part is None:
        return None
    causal = x.causal is not None and x.causal[1] == dim and x.causal[2] <= NEGATIVE
    causal = causal and x.growing_part(x.causal[0] if x.causal else 0) is not None
    hidden = causal or (part.fill is not None and part.fill <= NEGATIVE)
    fault = "" if hidden else _format_reason(node, "gives weight to padded places")
    fill = 0.0 if part.fill is not None and part.fill <= NEGATIVE else None
    made = replace(x.with_dim(dim, replace(part, fill=fill)), uniform=None).with_fault(fault)
    return replace(made, causal=(*x.causal[:2], 0.0)) if causal and x.causal is not None else made


def _propagate_attention(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue:
    """Return the :class:`PaddedValue` of the result of the attention ``node``: which dims grow if the batch is padded.
    The result has a fault (a reason why elements of the original batch may change) unless padded keys get no weight:
    the mask hides them, or the attention is causal and they come after every query of the original batch.

    ``operands``: the :class:`PaddedValue` of queries, keys, values and, if there are any, mask, document ids, prefix
    and slopes.
    """
    query, key, value, *masks = operands
    rank = len(query.dims)
    fault = next((o.fault for o in operands if o.fault), "")
    described = dict(zip(operands_of(node), operands, strict=True))
    prefix, slopes = (described.get(get_node_argument(node, name)) for name in ("prefix", "slopes"))
    masks = [m for m in masks if m is not slopes]
    own, keys, values = (o.growing_part(len(o.dims) - 2) for o in (query, key, value))
    if any(p.grows for o in (query, key, value) for p in o.dims[-1]):
        return query.with_fault(fault or _format_reason(node, "adds up padded numbers"))
    made = _find_batch_dims(query, key, value)
    fits = _fits_rows if get_operator_name(node) in _READS_DOCUMENT_IDS else _fits_scores
    if slopes is not None and slopes.grows:
        made = None
    if made is None or not all(fits(mask, query, key) for mask in masks):
        return query.with_fault(fault or _format_reason(node, "brings together tensors of which one is padded"))
    if keys is not None or values is not None:
        band = find_attention_band(node)
        ordered = own is not None and keys is not None and own.kind == keys.kind
        causal = bool(get_node_argument(node, "is_causal")) or (
            band is not None and band.after is not None and band.after <= 0
        )
        part = None if prefix is None else prefix.growing_part(len(prefix.dims) - 1)
        causal = causal and (prefix is None or (part is not None and part.fill == 0))
        hidden = (
            keys is not None
            and values is not None
            and keys.kind == values.kind
            and ((ordered and causal) or any(_hides_keys(node, m, ordered) for m in masks if fits is _fits_scores))
        )
        fault = fault or ("" if hidden else _format_reason(node, "gives weight to padded positions"))
    dims = (*made, query.dims[rank - 2], value.dims[-1])
    return PaddedValue(tuple(tuple(replace(p, fill=None) for p in parts) for parts in dims), fault)


def _fits_rows(ids: PaddedValue, query: PaddedValue, key: PaddedValue) -> bool:
    """Return whether document ids ``[batch, positions]`` grow with the batch like the queries and keys of the attention
    that reads them: dim 0 like the batch dim of the queries, dim 1 like the positions of the keys. ``ids``, ``query``,
    ``key``: the :class:`PaddedValue` of each tensor."""
    pairs = zip(ids.dims, (query.dims[0], key.dims[-2]), strict=True)
    return all([p.kind for p in own if p.grows] == [p.kind for p in of if p.grows] for own, of in pairs)


def _fits_scores(mask: PaddedValue, query: PaddedValue, key: PaddedValue) -> bool:
    """Return whether the dims of an attention mask grow with the batch exactly where the dims of the attention scores
    do. ``mask``, ``query``, ``key``: the :class:`PaddedValue` of mask, queries and keys."""
    scores = (*query.dims[:-1], key.dims[-2])
    for own, of in zip(reversed(mask.dims), reversed(scores), strict=False):
        grown = [tuple(p.kind for p in parts if p.grows) for parts in (own, of)]
        if [p.size for p in own] != [1] and grown[0] != grown[1]:
            return False
    return True


def _find_batch_dims(*operands: PaddedValue) -> list[Parts] | None:
    """Return a list with, for each dim of an attention's result except the last two (such as batch and heads), the
    tuple of the parts of this dim: sizes, and whether they grow with the batch. Return ``None`` if such a dim grows
    differently in queries, keys and values. ``operands``: the :class:`PaddedValue` of queries, keys and values."""
    dims: list[Parts] = []
    for d, parts in enumerate(operands[0].dims[:-2]):
        kinds = {tuple(p.kind for p in o.dims[d] if p.grows) for o in operands}
        if len(kinds) > 1:
            return None
        dims.append(parts)
    return dims


def _hides_keys(node: fx.Node, mask: PaddedValue, ordered: bool) -> bool:
    """Return whether the mask of the attention ``node`` hides padded keys from every query of the original batch.
    ``mask``: the :class:`PaddedValue` of the mask. ``ordered``: whether queries and keys are padded equally, so that a
    causal mask hides padded keys."""
    rank, chooses = len(mask.dims), operands_of(node)[-1].meta["val"].dtype == torch.bool
    part = mask.growing_part(rank - 1)
    if part is None or mask.fault:
        return False
    by_number = part.fill is not None and (part.fill <= NEGATIVE or (chooses and part.fill == 0))
    if mask.causal is None or not ordered or mask.causal[:2] != (rank - 2, rank - 1):
        return by_number
    return by_number or mask.causal[2] <= NEGATIVE or (chooses and mask.causal[2] == 0)


def _reduce_truth(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``any`` or ``all`` node ``node``: which dims grow if the
    batch is padded. If no reduced dim grows, return ``None``: the caller then uses the operator's sharding rule. The
    result has a fault (a reason why elements of the original batch may change) unless padded elements are false (for
    ``any``) or true (for ``all``). ``operands``: the :class:`PaddedValue` of the operand, as a sequence of one."""
    (x,) = operands
    neutral = 0.0 if get_operator_name(node) == "any" else 1.0
    dims = normalize_dims(get_node_argument(node, "dim"), len(x.dims))
    if not any(p.grows for d in dims for p in x.dims[d]):
        return None
    fits = all(p.fill == neutral for d in dims for p in x.dims[d] if p.grows)
    keep = get_node_argument(node, "keepdim", False)
    left = [((DimPart(1),) if d in dims else parts) for d, parts in enumerate(x.dims) if keep or d not in dims]
    left = [tuple(replace(p, fill=None) for p in parts) for parts in left]
    return PaddedValue(tuple(left), x.fault).with_fault(
        "" if fits else _format_reason(node, "combines real places with padded ones")
    )


SINGLE_RULES: dict[str, Rule] = {
    "slice": _propagate_slice,
    "constant_pad_nd": _propagate_pad,
    "cat": _propagate_cat,
    "select": _propagate_select,
    "slice_scatter": _scatter_slice,
    "select_scatter": _propagate_select_scatter,
    "cumsum": _propagate_cumsum,
    "diff": _propagate_cumsum,
    "partition::combine_ids": _propagate_combined_ids,
    "gather": _propagate_gather,
    "where": _choose_branch,
    "softmax": _propagate_softmax,
    "_softmax": _propagate_softmax,
    "scaled_dot_product_attention": _propagate_attention,
    "argmax": propagate_argmax,
    "any": _reduce_truth,
    "all": _reduce_truth,
}
