"""The strategies of an operator on one mesh axis, and the operators that one rank runs, both derived from its factor
rule.

A strategy is a choice of layouts for the operands and results. Layouts are sharded (``S``), whole on every rank
(``R``), a partial sum (``P``), and whole with a partial gradient (``R'``, for tensors that a sharded operator reads). A
factor is a named loop dimension of the operator.

=============================  ==========================  ========================================
strategy                       operands                    results
=============================  ==========================  ========================================
whole                          ``R``                       ``R``
whole, partial gradient        ``R'``                      ``R'``
factor f sharded               with f ``S``, others        with f ``S``, others ``P``
                               ``R'``                      (or as the special lowering says)
linear in some operands        these ``P``, others ``R'``  ``P``
=============================  ==========================  ========================================

An operand or result that carries no gradient is ``R`` wherever the table says ``R'``.

``operator.getitem`` selects one result of an operator with several. Its operand and its result have the layout of the
selected result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor, fx

from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, make_shard_layout
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import (
    MAX_SECTIONS,
    LocalBuilder,
    OpFactors,
    Strategy,
    operands_of,
    replace_operands,
    results_of,
)
from partitioner.passes.rules.factors import get_meta_shape as shape_of

__all__ = [
    "OpFactors",
    "Strategy",
    "append_local_call",
    "enumerate_strategies",
    "factors_of",
    "needs_gradient",
    "operands_of",
    "results_of",
]

Sections = tuple[int, ...]

NO_SIZES = frozenset[int]()
Wanted = Mapping[int, Collection[Layout]]


def needs_gradient(node: fx.Node) -> bool:
    """Return whether the value of ``node`` gets a gradient in backward: ``node.meta["grad"]`` if it is set; otherwise,
    whether the value's dtype is floating-point or complex."""
    grad = node.meta.get("grad")
    return is_differentiable(node.meta["val"]) if grad is None else bool(grad)


def enumerate_strategies(
    node: fx.Node, num_ranks: int, preferred: Wanted | None = None, lengths: Collection[int] = NO_SIZES
) -> list[Strategy]:
    """Return all strategies to run the operator ``node`` on a mesh axis of ``num_ranks`` ranks, the unsharded one
    first. A strategy states the layouts of all operands and results: sharded, whole, or a partial sum.

    ``preferred``: layouts of neighbouring operators, to which strategies are added: a dict from ``i`` (operand ``i``)
    or ``~k`` (result ``k``) to layouts in which a dim is sharded in sections (parts that are each divided over all
    ranks); ``None`` for none. For every preferred layout that is possible here, the result has a strategy with it. If
    the operator itself cuts or joins a dim, as ``split`` and ``cat`` do, sections also end where its pieces end.
    ``lengths``: lengths, in positions, of the sequences that the axis shards. Dims of these sizes may also be sharded
    zigzag (a rank has one piece from each end), and an attention may be sharded along its sequence.

    Raise :class:`partitioner.passes.errors.RuleError` if a user's rule does not fit the operator's tensors.
    """
    nodes = operands_of(node)
    factors = factors_of(node)
    carries = needs_gradient(node)
    reads = tuple(READ_SHARDED if needs_gradient(o) else REPLICATED for o in nodes)
    makes = tuple(READ_SHARDED if carries and is_differentiable(r) else REPLICATED for r in results_of(node))
    found = [Strategy(None, (), (REPLICATED,) * len(nodes), (REPLICATED,) * len(makes))]
    if READ_SHARDED in reads:
        found.append(Strategy(None, (), reads, makes))
    if factors is None:
        return found
    wanted_sections = _find_preferred_sections(factors, preferred) if preferred else {}
    for factor, places in _map_factor_dims(factors).items():
        size = factors.sizes[factor]
        if factor in factors.whole or size < num_ranks or size % num_ranks:
            continue
        for sections in _choose_sections(factors, factor, wanted_sections.get(factor, ()), num_ranks):
            for zigzag in (
                (False, True) if _can_shard_zigzag(factors, factor, sections, lengths, num_ranks) else (False,)
            ):
                strategy = _shard_factor(factors, factor, sections, reads, places, zigzag)
                if strategy is not None:
                    found.append(strategy)
    if lengths:
        found += _list_multi_dim_strategies(factors, nodes, results_of(node), reads, num_ranks)
    for positions in factors.linear:
        if any(i >= len(nodes) for i in positions):
            continue  # one of these operands is a number
        if not all(is_differentiable(v) for v in (*(nodes[i].meta["val"] for i in positions), *results_of(node))):
            continue  # a boolean or integer cannot be divided by the number of ranks into partial sums
        operands = tuple(PARTIAL if i in positions else layout for i, layout in enumerate(reads))
        found.append(Strategy(None, (), operands, (PARTIAL,) * len(makes)))
    return found


def append_local_call(
    node: fx.Node, strategy: Strategy, axis: str, num_ranks: int, operands: Sequence[fx.Node], graph: fx.Graph
) -> fx.Node:
    """Append to ``graph``, the graph of one rank, the operators that replace ``node``, and return the node of the
    result.

    ``strategy``: the layouts of the operands and results of ``node``. ``axis``, ``num_ranks``: the mesh axis over which
    they are sharded, and its size. ``operands``: the nodes in ``graph`` that replace the operands of ``node``, in the
    layouts ``strategy.operands``. ``meta["val"]`` of operands and new nodes has the shapes on one rank.
    """
    if strategy.factor is not None:
        factors = factors_of(node)
        assert factors is not None, node
        if strategy.form:
            return factors.forms[strategy.form].build(
                LocalBuilder(node, factors, strategy, axis, num_ranks, operands, graph)
            )
        local = LocalBuilder(node, factors, strategy, axis, num_ranks, operands, graph)
        if strategy.factor in factors.lower:
            return factors.lower[strategy.factor].build(local)
        if factors.local is not None:
            return factors.local(local)
    args, kwargs = replace_operands(node, operands)
    assert callable(node.target), node
    return insert_operator_node(graph, node.target, args, kwargs, like=node)


Place = tuple[int, int, tuple[str, ...]]  # operand i or result ~k; dim; the factors of that dim


def _map_factor_dims(factors: OpFactors) -> dict[str, list[Place]]:
    """Return a dict: factor (named loop dimension) of the sharding rule ``factors`` -> list of the tensor dims that it
    is part of. A dim is given as (``i`` for operand ``i`` or ``~k`` for result ``k``, index of the dim, names of all
    factors of the dim)."""
    found: dict[str, list[Place]] = {}
    for i, dims in enumerate(factors.operands):
        for dim, names in enumerate(dims):
            for name in names:
                found.setdefault(name, []).append((i, dim, names))
    for k, dims in enumerate(factors.results):
        for dim, names in enumerate(dims):
            for name in names:
                found.setdefault(name, []).append((~k, dim, names))
    return found


def _can_shard_zigzag(
    factors: OpFactors, factor: str, sections: Sections, lengths: Collection[int], num_ranks: int
) -> bool:
    """Return whether ``factor``, a named loop dimension of an operator, may be sharded zigzag: each rank has one piece
    from each end of the dim.

    The size of the factor must be in ``lengths``, the lengths of sequences, and be divisible by ``2 * num_ranks``. If
    the factor is cut into ``sections``, each section must instead be a multiple of a length and divisible by ``2 *
    num_ranks``. If special operators replace the operator on one rank, they must support a shard of several parts.
    ``factors``: the operator's sharding rule. ``sections``: sizes of the parts of the factor that are each divided over
    all ranks; empty if it is divided as a whole.
    """
    size, lowering = factors.sizes[factor], factors.lower.get(factor)
    is_sequence = all(any(s % n == 0 for n in lengths) for s in sections) if sections else size in lengths
    if not is_sequence or (lowering is not None and not lowering.sections):
        return False
    return all(s % (2 * num_ranks) == 0 for s in sections or (size,))


def _list_multi_dim_strategies(
    factors: OpFactors,
    nodes: Sequence[fx.Node],
    results: Sequence[Tensor],
    reads: tuple[Layout, ...],
    num_ranks: int,
) -> list[Strategy]:
    """Return the strategies of an operator that shard several dims at once, such as attention with sharded queries and
    keys. Each has a version with contiguous shards and one with zigzag shards (one piece from each end), if the sizes
    are divisible.

    ``factors``: the operator's sharding rule, whose ``forms`` state these strategies. ``nodes``: its operands.
    ``results``: its result tensors. ``reads``: for each operand, the layout if the strategy does not shard it.
    ``num_ranks``: the number of ranks.
    """
    found = []
    for name, form in factors.forms.items():
        sizes = [shape_of(n)[d] for n, d in zip(nodes, form.operands, strict=True) if d is not None]
        for zigzag in (False, True):
            if any(size % (num_ranks * (1 + zigzag)) for size in sizes):
                continue
            operands = tuple(
                read if d is None else make_shard_layout(d, (), zigzag)
                for read, d in zip(reads, form.operands, strict=True)
            )
            made = tuple(
                REPLICATED if d is None else make_shard_layout(d, (), zigzag) for d in form.results[: len(results)]
            )
            found.append(Strategy(form.factor, (), operands, made, name))
    return found


def _shard_factor(
    factors: OpFactors,
    factor: str,
    sections: Sections,
    reads: tuple[Layout, ...],
    places: Sequence[Place],
    zigzag: bool = False,
) -> Strategy | None:
    """Return the strategy (the layouts of all operands and results of an operator) that shards all dims of ``factor``,
    a named loop dimension of the operator. Return ``None`` if a tensor cannot be sharded in this way.

    ``factors``: the operator's sharding rule. ``sections``: sizes of the parts of the factor that are each divided over
    all ranks; empty if it is divided as a whole. ``reads``: for each operand, the layout if it has no dim of the
    factor. ``places``: the dims of the factor, each as (``i`` for operand ``i`` or ``~k`` for result ``k``, index of
    the dim, names of all factors of the dim). ``zigzag``: whether each rank has one piece from each end.
    """
    spans = factors.spans if factors.spans is not None and factors.spans.factor == factor else None
    lowering = factors.lower.get(factor)
    operands = list(reads)
    results = [PARTIAL if lowering is None else lowering.result] * len(factors.results)
    if len({position for position, _, _ in places}) < len(places):
        return None  # a diagonal: two dims of one tensor
    for position, dim, names in places:
        parts = sections
        if len(names) > 1:
            outer, inner = _count_outer_and_inner(names, factor, factors.sizes)
            if outer > MAX_SECTIONS:
                return None
            parts = tuple(s * inner for s in sections or (factors.sizes[factor],)) * outer
        elif spans is not None:
            span = spans.operands[position] if position >= 0 else spans.results[~position]
            parts = sections if span is None else select_sections_within(sections, span)
        side, index = (operands, position) if position >= 0 else (results, ~position)
        side[index] = make_shard_layout(dim, parts, zigzag)
    return Strategy(factor, sections, tuple(operands), tuple(results))


def _count_outer_and_inner(names: tuple[str, ...], factor: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return two integers for a dim whose size is a product of factors: the product of the sizes of the factors before
    ``factor``, and the product of the sizes of the factors after it.

    ``names``: the factors of the dim, outermost first. ``sizes``: name of a factor -> its size.
    """
    outer = inner = 1
    at = names.index(factor)
    for name in names[:at]:
        outer *= sizes[name]
    for name in names[at + 1 :]:
        inner *= sizes[name]
    return outer, inner


# Sections. Below, a factor's sections are always a tuple of positive sizes that add up to it, or () for one section.
def select_sections_within(sections: Sections, span: tuple[int, int]) -> Sections:
    """Return the sizes of those sections that lie in ``span``. ``sections``: the sizes, in elements, of consecutive
    sections of a dim. ``span``: a part of the dim, as (start, length) in elements, that starts and ends at borders of
    sections."""
    start, length = span
    ends = accumulate(sections)
    return tuple(s for s, end in zip(sections, ends, strict=True) if start < end <= start + length)


def refine_sections(first: Sections, second: Sections) -> Sections:
    """Return the coarsest division of a dim into consecutive pieces that includes all borders of the divisions
    ``first`` and ``second``. A division is a tuple with the sizes of the pieces, in elements; ``()`` means one piece.
    """
    if not first or not second:
        return first or second
    borders = sorted({*accumulate(first), *accumulate(second)})
    return tuple(b - a for a, b in zip([0, *borders[:-1]], borders, strict=True))


def _choose_sections(factors: OpFactors, factor: str, preferred: Iterable[Sections], num_ranks: int) -> list[Sections]:
    """Return a list of divisions of ``factor``, a named loop dimension of an operator, into sections that are each
    divided over all ranks. A division is a tuple of section sizes; ``()`` stands for one section.

    The first division cuts only where the operator itself cuts or joins the dim. Further ones also cut at the borders
    of one element of ``preferred``, the divisions of neighbouring operators; the last one cuts at the borders of all
    elements. Divisions with a section not divisible by ``num_ranks`` or with more than ``MAX_SECTIONS`` sections are
    left out. If the operator cannot run on sections, the result is ``[()]``. ``factors``: the operator's sharding rule.
    """
    spans = factors.spans
    if not preferred and spans is None:
        return [()]
    base: Sections = spans.sections if spans is not None and spans.factor == factor else ()
    lowering = factors.lower.get(factor)
    if lowering is not None and not lowering.sections:
        return [()]
    choices = [base]
    together = base
    for sections in preferred:
        together = refine_sections(together, sections)
        choices.append(refine_sections(base, sections))
    choices.append(together)
    unique = dict.fromkeys(c if len(c) > 1 else () for c in choices)
    return [c for c in unique if len(c) <= MAX_SECTIONS and all(s % num_ranks == 0 for s in c)]


def _find_preferred_sections(factors: OpFactors, preferred: Wanted) -> dict[str, list[Sections]]:
    """Convert layouts that neighbouring operators prefer for this operator's tensors to divisions of its factors (named
    loop dimensions). Return a dict: factor -> list of divisions, one for each layout. A division is a tuple of the
    sizes of sections that are each divided over all ranks. Layouts without sections, and layouts that no division of a
    factor gives, are left out.

    ``factors``: the operator's sharding rule. ``preferred``: the preferred layouts; key ``i`` is operand ``i``, ``~k``
    is result ``k``.
    """
    found: dict[str, list[Sections]] = {}
    for position, layouts in preferred.items():
        dims = factors.operands[position] if position >= 0 else factors.results[~position]
        for layout in layouts:
            if not layout.sections or layout.dim >= len(dims):
                continue
            span = None
            names = dims[layout.dim]
            spans = factors.spans
            if spans is not None and spans.factor in names:
                span = spans.operands[position] if position >= 0 else spans.results[~position]
            for name in names:
                sections = _derive_factor_sections(names, name, factors.sizes, layout.sections)
                if span is not None:
                    start, length = span
                    rest = factors.sizes[name] - start - length
                    sections = tuple(s for s in (start, *sections, rest) if s)
                if len(sections) > 1 and sum(sections) == factors.sizes[name]:
                    found.setdefault(name, []).append(sections)
    return found


def _derive_factor_sections(
    names: tuple[str, ...], factor: str, sizes: Mapping[str, int], sections: Sections
) -> Sections:
    """Return the division of ``factor``, a named loop dimension of an operator, that divides a tensor dim into
    ``sections``; ``()`` if there is none. The size of the dim is the product of ``factor`` and other factors. A
    division is a tuple of the sizes, in elements, of consecutive sections that are each divided over all ranks.

    ``names``: the factors of the dim, outermost first. ``sizes``: name of a factor -> its size.
    """
    if len(names) == 1:
        return sections
    outer, inner = _count_outer_and_inner(names, factor, sizes)
    count = len(sections) // outer
    if len(sections) % outer or count < 2 or sections != sections[:count] * outer:
        return ()
    if any(s % inner for s in sections[:count]):
        return ()
    return tuple(s // inner for s in sections[:count])
