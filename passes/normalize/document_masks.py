"""Recognise attention masks that keep packed documents apart, from the conditions by which they show keys to queries.

Such a mask shows a key to a query if both are in the same document, ``ids[query] == ids[key]``, and if constant
conditions on their positions hold, such as ``key <= query``. The ids are integers that depend on data: an input, a
running sum of the places where positions restart, or the result of a search in cumulated lengths. By definition,
positions with equal integers are one document. If a mask compares several kinds of integers, such as documents and
chunks of positions, positions that are equal in all of them are one document: ``partition::combine_ids`` computes one
id from several.

Positions may themselves be data that restart at each document. ``positions[key] <= positions[query]`` says the same as
``key <= query`` within a document if the ids are proven to change wherever positions do not count up by one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.model import Captured
from partitioner.passes.ir.rewrite import aten, list_node_sizes
from partitioner.passes.normalize.constant_folding import LIMIT, ConstantEvaluator, preserves_integers
from partitioner.passes.normalize.mask_values import (
    Comparison,
    Condition,
    DataComparison,
    GatheredValue,
    LookedUpValue,
    SumComparison,
    is_same_value,
)
from partitioner.passes.ops.attention import Band
from partitioner.passes.ops.documents import document_ops
from partitioner.passes.ops.scored_attention import scored_ops


class PairDims(NamedTuple):
    """The dims by which a mask condition such as ``ids[query] == ids[key]`` reads a tensor. The condition compares the
    element at a query's position with the element at a key's position.

    ``position``: the index of the tensor's dim of positions. ``batch``: the index of its dim of batch rows; ``None`` if
    all rows read the same elements. ``span``: (first position that is read, position after the last); ``None`` for all
    positions.
    """

    position: int
    batch: int | None
    span: tuple[int, int] | None = None


class DocumentIds(NamedTuple):
    """Document ids: one integer for each position of a row; positions with equal integers belong to one document.

    ``source``: the node of a tensor that contains the integers. ``dims``: which dims of ``source`` index positions and
    batch rows, and which positions are read.
    """

    source: fx.Node
    dims: PairDims


class Chunks(NamedTuple):
    """Consecutive chunks of ``size`` positions each, into which a row of ``length`` positions is cut: position ``i``
    (from 0) is in chunk ``(i + offset) // size``."""

    size: int
    offset: int
    length: int


class DocumentMask(NamedTuple):
    """An attention mask by which a query sees the keys that are in its own document and in a range of positions around
    it. Several documents may be packed in one sequence.

    ``ids``: one or more tensors of integers; two positions are in one document if they have equal integers in each.
    ``band``: how many positions before and after its own a query sees. ``chunks``: chunks of positions at whose ends
    documents end, too; ``None`` for no chunks.
    """

    ids: tuple[DocumentIds, ...]
    band: Band
    chunks: Chunks | None = None

    def key(self, rows: int) -> DocumentKey:
        """Return the cache key of the document ids ``[rows, positions]`` of this mask: a hashable tuple of everything
        on which the ids depend. ``rows``: the batch size."""
        return self.ids, self.chunks, rows


DocumentKey = tuple[tuple[DocumentIds, ...], Chunks | None, int]


class DocumentTerms(NamedTuple):
    """An attention mask by which a query sees the keys that are in its own document and satisfy further conditions.
    Several documents may be packed in one sequence.

    ``ids``: one or more tensors of integers; two positions are in one document if they have equal integers in each.
    ``terms``: the further conditions, which depend on positions alone.
    """

    ids: tuple[DocumentIds, ...]
    terms: tuple[Condition, ...]


def find_document_mask(terms: Sequence[Condition], length: int) -> DocumentTerms | None:
    """Return the document ids and the further conditions of an attention mask that shows a query only keys of its own
    document. Return ``None`` if the mask depends on data in another way, or not at all.

    ``terms``: the conditions of the mask; a key is shown where all of them hold. ``length``: the number of queries,
    equal to the number of keys.
    """
    data = [t for t in terms if isinstance(t, DataComparison | SumComparison)]
    same = [t for t in data if isinstance(t, DataComparison) and t.compare == "eq" and t.a.offset == t.b.offset]
    ids: list[DocumentIds] = []
    for term in same:
        dims = _find_pair_dims(term.a, term.b, length)
        if dims is None:
            return None
        new = DocumentIds(term.a.source, dims)
        if not any(_is_function_of(new, each) for each in ids):
            ids = [*(each for each in ids if not _is_function_of(each, new)), new]
    rest: list[Condition] = [t for t in terms if not isinstance(t, DataComparison | SumComparison)]
    for other in (t for t in data if t not in same):
        ways = (_compare_within(other, each.source, each.dims, length) for each in ids)
        found = next((way for way in ways if way is not None), None)
        if found is None:
            return None
        rest.append(found)
    return DocumentTerms(tuple(ids), tuple(rest)) if ids else None


def _is_function_of(one: DocumentIds, other: DocumentIds) -> bool:
    """Return whether it is proven that positions with equal document ids in ``other`` also have equal ids in ``one``.
    ``one``, ``other``: two tensors of document ids, each with one integer for each position."""
    return one.dims == other.dims and _depends_on_ids(one.source, other.source, other.dims.position)


def _compare_within(
    term: DataComparison | SumComparison, ids: fx.Node, dims: PairDims, length: int
) -> Comparison | None:
    """Return a comparison of constants that can replace the mask condition ``term``, which compares integers that
    depend on data. For every query and key of one document, the comparison is true exactly if ``term`` is true. Return
    ``None`` if there is none.

    ``ids``: the node of the document ids. ``dims``: the dims of ``ids`` that the mask reads. ``length``: the number of
    queries, equal to the number of keys.
    """
    if isinstance(term, DataComparison):
        of = _find_pair_dims(term.a, term.b, length)
        if of is not None and _positions_increase_within(term.a.source, of.position, ids, dims.position):
            if of.span != dims.span:
                return None
            sides = (side.places[of.position] + side.offset for side in (term.a, term.b))
            return Comparison(term.compare, *sides)
        negative = term.b.as_sum().negate()
        total = None if negative is None else term.a.as_sum().add(negative)
    else:
        total = term.total
    if total is None or term.compare in ("eq", "ne"):
        return None
    left, constants = list(total.parts), list(total.constants)
    while left:
        sign, part = left.pop()
        for other in left:
            number = None if other[0] == sign else _subtract_within(part, other[1], ids, dims, length)
            if number is not None:
                left.remove(other)
                constants.append(sign * number)
                break
        else:
            return None
    return _compare_constants(term.compare, constants)


def _compare_constants(compare: str, constants: Sequence[Tensor]) -> Comparison:
    """Return ``compare(sum of constants, 0)`` as a comparison of two tensors: the left side has all terms that vary
    along keys alone, the right side all other terms with opposite sign. ``compare``: the comparison, such as ``le``.
    ``constants``: integer tensors ``[..., queries, keys]``."""
    rank = max(2, *(c.dim() for c in constants)) if constants else 2
    by_key, rest = torch.zeros([1] * rank, dtype=torch.int64), torch.zeros([1] * rank, dtype=torch.int64)
    for constant in (c.reshape([1] * (rank - c.dim()) + list(c.shape)).long() for c in constants):
        own = constant - constant[..., :1]
        if bool((own == own[..., :1, :]).all()):
            by_key, constant = by_key + own[..., :1, :], constant[..., :1]
        rest = rest - constant
    return Comparison(compare, by_key, rest)


def _subtract_within(
    one: GatheredValue | LookedUpValue, other: GatheredValue | LookedUpValue, ids: fx.Node, dims: PairDims, length: int
) -> Tensor | None:
    """Return ``one - other`` as a constant tensor. Both are integers that depend on data, but their difference may be
    known for each query and key of one document: if both are the same function of the document id, or if they are
    positions that increase by one within a document. Return ``None`` if the difference is not known.

    ``ids``: the node of the document ids. ``dims``: the dims of ``ids`` that the mask reads. ``length``: the number of
    queries, equal to the number of keys.
    """
    if isinstance(one, GatheredValue) and isinstance(other, GatheredValue) and is_same_value(one.source, other.source):
        of = _find_pair_dims(one, other, length)
        if of is None or of.span != dims.span:
            return None
        if of == dims and _depends_on_ids(one.source, ids, dims.position):
            return torch.tensor(one.offset - other.offset)
        if _positions_increase_within(one.source, of.position, ids, dims.position):
            return one.places[of.position] + one.offset - other.places[of.position] - other.offset
        return None
    if (
        not isinstance(one, LookedUpValue)
        or not isinstance(other, LookedUpValue)
        or not is_same_value(one.table, other.table)
    ):
        return None
    for a, b in zip(one.indices, other.indices, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.numel() != (a.shape[-4] if a.dim() == 4 else 1) or not torch.equal(a, b):
                return None
        elif isinstance(a, Tensor) or isinstance(b, Tensor):
            return None
        else:
            equal = a.offset == b.offset and is_same_value(a.source, b.source) and _find_pair_dims(a, b, length) == dims
            if not equal or not _depends_on_ids(a.source, ids, dims.position):
                return None
    return torch.tensor(0)


_BY_ELEMENT = frozenset(getattr(aten, name) for name in ("add", "sub", "mul", "neg", "rsub"))
_LOOK_UPS = {aten.index.Tensor: 1, aten.gather.default: 2, aten.index_select.default: 2}


def _depends_on_ids(node: fx.Node, ids: fx.Node, dim: int) -> bool:
    """Return whether it is proven that, within a row of the batch, positions with equal document ids have equal
    elements in the tensor ``node``. ``ids``: the node of the document ids. ``dim``: the dim of both tensors that
    indexes positions."""
    node, ids = _skip_expands_and_casts(node), _skip_expands_and_casts(ids)
    if is_same_value(node, ids):
        return True
    if node.op != "call_function" or list_node_sizes(node) != list_node_sizes(ids):
        return False
    place = _LOOK_UPS.get(node.target)  # type: ignore[call-overload]
    if place is None:
        operands = node.all_input_nodes
        of_elements = getattr(node.target, "overloadpacket", None) in _BY_ELEMENT
        return of_elements and len(operands) == 1 and _depends_on_ids(operands[0], ids, dim)
    index: Any = node.args[place]
    if node.target is aten.index.Tensor:
        if len(index) != 1 or len(list_node_sizes(node.args[0])) != 1:  # type: ignore[arg-type]
            return False
        (index,) = index
    elif int(node.args[1]) % len(list_node_sizes(node)) != dim:  # type: ignore[arg-type]
        return False
    return isinstance(index, fx.Node) and _depends_on_ids(index, ids, dim)


def _find_pair_dims(one: GatheredValue, other: GatheredValue, length: int) -> PairDims | None:
    """Return which dims of a tensor are read by a comparison of two of its elements, such as ``ids[query] ==
    ids[key]``. One element must be at the query's position, the other at the key's position, in the same batch row.
    Return ``None`` for any other comparison.

    ``one``, ``other``: the compared elements, described by index tensors with the dims ``[batch, heads, queries,
    keys]``. ``length``: the number of queries, equal to the number of keys.
    """
    position, batch, span = None, None, None
    for dim, size in enumerate(list_node_sizes(one.source)):
        sides = one.places[dim], other.places[dim]
        first = int(sides[0].reshape(-1)[0])
        if size == 1:
            continue
        pairs = (sides, sides[::-1])
        if any(is_arange_along(a, -2, length, first) and is_arange_along(b, -1, length, first) for a, b in pairs):
            if position is not None or length == 1:
                return None
            position, span = dim, None if size == length else (first, first + length)
        elif batch is None and all(is_arange_along(side, -4, size) for side in sides):
            batch = dim
        else:
            return None
    return None if position is None else PairDims(position, batch, span)


def is_arange_along(side: Tensor, dim: int, size: int, first: int = 0) -> bool:
    """Return whether the index tensor ``side`` is ``first``, ``first`` + 1, ..., ``first`` + ``size`` - 1 along ``dim``
    (a negative number), and has size 1 in all other dims."""
    if side.dim() < -dim or side.numel() != size or side.shape[dim] != size:
        return False
    return bool(torch.equal(side.reshape(-1), torch.arange(first, first + size)))


def _skip_expands_and_casts(node: fx.Node) -> fx.Node:
    """Return the node from which ``node`` was made only by ``expand`` operators and by casts that preserve integers;
    return ``node`` itself if it was made by another operator."""
    while node.target is aten.expand.default or (node.target is aten.to.dtype and preserves_integers(node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _positions_increase_within(positions: fx.Node, position_dim: int, ids: fx.Node, ids_dim: int) -> bool:
    """Return whether it is proven that the integers ``positions`` increase by one from each position to the next within
    a document. This is the case if ``ids``, the document ids, are the running sum of ``diff(positions) != 1``, so that
    a new document starts wherever ``positions`` does not increase by one. ``position_dim``, ``ids_dim``: the dims of
    ``positions`` and ``ids`` that index positions."""
    total = _skip_expands_and_casts(ids)
    if total.target is not aten.cumsum.default:
        return False
    changes = _skip_expands_and_casts(total.args[0])  # type: ignore[arg-type]
    if changes.target is not aten.ne.Scalar or changes.args[1] != 1:
        return False
    steps = changes.args[0]
    if not isinstance(steps, fx.Node) or steps.target is not aten.diff.default:
        return False
    given: list[Any] = list(steps.args)
    operand, order, dim, first, *more = given + [1, -1, None][len(given) - 1 :]
    if order != 1 or any(m is not None for m in more) or not isinstance(first, fx.Node):
        return False
    rank = len(list_node_sizes(steps))
    along = {int(total.args[1]) % rank, int(dim) % rank}  # type: ignore[arg-type]
    if along != {ids_dim % rank} or list_node_sizes(first)[ids_dim] != 1:
        return False
    return _skip_expands_and_casts(operand) is _skip_expands_and_casts(positions) and position_dim == ids_dim


def insert_document_ids(graph: fx.Graph, mask: DocumentMask, rows: int) -> fx.Node:
    """Insert operators into ``graph`` that compute document ids ``[rows, positions]``, which are equal for positions of
    one document of ``mask``, and return the node of the result. ``mask``: the attention mask, by which a query sees
    only keys of its own document. ``rows``: the batch size."""
    found = [_insert_rows(graph, ids, rows) for ids in mask.ids]
    if mask.chunks is not None:
        found.append(_insert_chunk_numbers(graph, mask.chunks, rows))
    made = found[0]
    for other in found[1:]:
        last = _find_last_placeholder(graph, max(made, other))
        with graph.inserting_after(last):
            both = insert_operator_node(graph, document_ops.combine_ids.default, (made, other))
        both.meta.update({k: v for k, v in max(made, other).meta.items() if k != "val"})
        made = both
    return made


def _find_last_placeholder(graph: fx.Graph, node: fx.Node | None) -> fx.Node:
    """Return the node of ``graph`` after which operators that read ``node`` can be inserted: ``node`` itself, or, if
    ``node`` is a placeholder or ``None``, the last placeholder."""
    if node is not None and node.op != "placeholder":
        return node
    placeholders: list[fx.Node] = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[-1]


def _insert_chunk_numbers(graph: fx.Graph, chunks: Chunks, rows: int) -> fx.Node:
    """Insert operators into ``graph`` that compute the number of the chunk of each position, ``[rows, positions]``, and
    return the node of the result. ``chunks``: how a row of positions is cut into chunks. ``rows``: the batch size."""
    last = _find_last_placeholder(graph, None)
    stop = chunks.offset + chunks.length
    with graph.inserting_after(last):
        made = graph.call_function(
            aten.arange.start_step, (chunks.offset, stop, 1), {"device": META, "dtype": torch.int64}
        )
    made.meta["val"] = torch.empty(chunks.length, dtype=torch.int64, device=META)
    for target, argument in (
        (aten.floor_divide.default, chunks.size),
        (aten.reshape.default, [1, chunks.length]),
        *([(aten.expand.default, [rows, chunks.length])] if rows > 1 else []),
    ):
        with graph.inserting_after(made):
            made = insert_operator_node(graph, target, (made, argument))
    return made


def _insert_rows(graph: fx.Graph, ids: DocumentIds, rows: int) -> fx.Node:
    """Insert operators into ``graph`` that bring the document ids ``ids`` to the shape ``[rows, positions]``, and
    return the node of the result. ``rows``: the batch size."""
    source: fx.Node = ids.source
    position, batch, span = ids.dims
    if span is not None:
        source = _insert_span(graph, source, position, span)
    kept = [d for d in (batch, position) if d is not None]
    sizes = list(list_node_sizes(source))
    if sizes == [rows, sizes[-1]] and position == 1:
        return source
    steps: list[tuple[Any, list[int]]] = []
    if kept != sorted(kept):
        order = [*kept, *(d for d in range(len(sizes)) if d not in kept)]
        steps.append((aten.permute.default, order))
    wanted = [sizes[d] for d in kept]
    if len(sizes) != len(kept) or len(kept) == 1:
        steps.append((aten.reshape.default, [1] * (2 - len(kept)) + wanted))
    if wanted[0] != rows or len(kept) == 1:
        steps.append((aten.expand.default, [rows, wanted[-1]]))
    made: fx.Node = source
    last = _find_last_placeholder(graph, source)
    for target, argument in steps:
        with graph.inserting_after(last):
            made = last = insert_operator_node(graph, target, (made, argument))
        made.meta.update({k: v for k, v in source.meta.items() if k != "val"})
    return made


def _insert_span(graph: fx.Graph, source: fx.Node, dim: int, span: tuple[int, int]) -> fx.Node:
    """Insert the slice ``span[0]:span[1]`` of ``source`` along ``dim`` into ``graph``, and return its node."""
    with graph.inserting_after(_find_last_placeholder(graph, source)):
        found = insert_operator_node(graph, aten.slice.Tensor, (source, dim, *span, 1))
    found.meta.update({k: v for k, v in source.meta.items() if k != "val"})
    return found


# --- attention of sequences of different lengths ----------------------------------------------------------------------
_VARLEN = "torch_attn::_varlen_attn"  # torch registers it when a model imports torch.nn.attention.varlen


def replace_packed_sequences(graph: fx.Graph) -> None:
    """Replace calls of ``torch.nn.attention.varlen.varlen_attn`` in ``graph``, in place, by
    ``partition::document_attention``, the project's operator for attention within documents that are packed in one
    sequence.

    The queries, keys and values are ``[positions, heads, width]``. The cumulative lengths ``[sequences + 1]`` of
    queries and of keys must be the same tensor, which starts at 0 and ends at the number of positions. A call is left
    unchanged if the lengths of keys are another tensor, if it reads keys from a paged cache, or if more than its first
    result is read.
    """
    ids: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name != _VARLEN:
            continue
        given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        ends, others = given["cu_seq_q"], given.get("cu_seq_k")
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        other_keys = given.get("seqused_k") is not None or given.get("block_table") is not None
        if others not in (None, ends) or other_keys or used - {0} or len(used) != len(node.users):
            continue
        length = list_node_sizes(given["query"])[0]
        if ends not in ids:
            ids[ends] = _insert_sequence_numbers(graph, ends, length)
        limits = (-1, 0) if given.get("is_causal") else tuple(given.get("window_size") or (-1, -1))
        with graph.inserting_before(node):
            rows = [_insert_operator_chain(graph, given[n], _TO_ROWS, node) for n in ("query", "key", "value")]
            arguments = (*rows, ids[ends], [], *limits, given.get("scale"))
            made = insert_operator_node(graph, document_ops.document_attention.default, arguments)
            first = insert_operator_node(graph, operator.getitem, (made, 0))
            out = _insert_operator_chain(graph, first, _FROM_ROWS, node)
        for new in (made, first):
            new.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        for user in list(node.users):
            user.replace_all_uses_with(out)
            graph.erase_node(user)
        graph.erase_node(node)


_Step = tuple[Any, tuple[int, ...]]  # an operator and its arguments after the operand
_TO_ROWS: tuple[_Step, ...] = ((aten.unsqueeze.default, (0,)), (aten.transpose.int, (1, 2)))
_FROM_ROWS: tuple[_Step, ...] = ((aten.transpose.int, (1, 2)), (aten.select.int, (0, 0)))


def _insert_operator_chain(graph: fx.Graph, value: fx.Node, steps: Sequence[_Step], like: fx.Node) -> fx.Node:
    """Insert a chain of operators at the insertion point of ``graph``: the first reads ``value``, each other one reads
    the result of the one before. Return the last node. ``steps``: for each operator of the chain, the operator and its
    arguments after the operand. ``like``: a node whose metadata (except the value) the new nodes get."""
    for target, arguments in steps:
        value = insert_operator_node(graph, target, (value, *arguments))
        value.meta.update({k: v for k, v in like.meta.items() if k != "val"})
    return value


def _insert_sequence_numbers(graph: fx.Graph, ends: fx.Node, length: int) -> fx.Node:
    """Insert operators into ``graph`` that compute, for each of ``length`` positions, the number of the packed sequence
    to which the position belongs. Return their node ``[1, length]``. ``ends``: the node of the cumulative lengths of
    the sequences, in positions, ``[sequences + 1]``; the operators are inserted after it."""
    with graph.inserting_after(_find_last_placeholder(graph, ends)):
        places = graph.call_function(aten.arange.start_step, (0, length, 1), {"device": META, "dtype": torch.int64})
    places.meta["val"] = torch.empty(length, dtype=torch.int64, device=META)
    with graph.inserting_after(places):
        found = graph.call_function(aten.searchsorted.Tensor, (ends, places), {"right": True})
    found.meta["val"] = torch.empty(length, dtype=torch.int64, device=META)
    with graph.inserting_after(found):
        rows = insert_operator_node(graph, aten.unsqueeze.default, (found, 0))
    for new in (places, found, rows):
        new.meta.update({k: v for k, v in ends.meta.items() if k != "val"})
    return rows


# --- typical lengths, for the cost model ------------------------------------------------------------------------------
_MOST_DOCUMENTS = 256  # most lengths that are stored; a plan has them with each attention


def list_document_attentions(graph: fx.Graph) -> list[fx.Node]:
    """Return the attention nodes of ``graph`` that are restricted to packed documents, in order: those of
    ``partition::document_attention``, and those of ``partition::scored_attention`` that have document ids."""
    targets = document_ops.document_attention.default, scored_ops.scored_attention.default
    return [n for n in graph.nodes if n.target in targets and n.args[3] is not None]


def list_prefix_attentions(graph: fx.Graph) -> list[fx.Node]:
    """Return the ``partition::scored_attention`` nodes in ``graph`` that have a prefix (marked keys that every query of
    their document sees, also queries before them), in order."""
    return [n for n in graph.nodes if n.target is scored_ops.scored_attention.default and n.args[4] is not None]


def list_chunked_attentions(captured: Captured) -> list[fx.Node]:
    """Return the attention nodes in the graph of ``captured`` (a model as one graph) whose documents are constant
    chunks of positions, independent of inputs."""
    constants = ConstantEvaluator(_list_known_values(captured, {}))
    nodes = list_document_attentions(captured.graph)
    return [n for n in nodes if isinstance(constants.find_value(n.args[3]), Tensor)]  # type: ignore[arg-type]


def set_document_lengths(captured: Captured, lengths: Sequence[int], inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Store the typical lengths of documents in the attention operators of ``captured`` (a model as one graph) that are
    restricted to packed documents, in place, and return these lengths. Only the cost model reads them.

    ``lengths``: the numbers of positions of typical documents. If it is empty, lengths are counted in ``inputs``: path
    of a model input, such as ``input_ids`` -> tensor. Where documents are divided into chunks of positions, the lengths
    of the chunks are stored. The result is empty if there is no such operator, if the inputs are meta tensors, or if
    the document ids depend on more than inputs and constants. If operators have different counted lengths, those of the
    first operator whose documents depend on data are returned.

    An attention may have a prefix: marked keys that all queries of their document see, although the attention is
    otherwise causal or in a window. For such an operator, also store the mean number, per row, of pairs of a query and
    a key that are visible because of the prefix alone, counted in ``inputs``; -1 if it is unknown.
    """
    nodes = list_document_attentions(captured.graph)
    evaluator = ConstantEvaluator(_list_known_values(captured, inputs))
    chunked = list_chunked_attentions(captured)
    for node in nodes:
        place = _get_argument_position(node, "lengths")
        ids: Any = node.args[3]
        found = () if lengths and node not in chunked else _count_documents(evaluator, ids)
        found = found or _cut_documents(evaluator, ids, lengths)
        node.args = (*node.args[:place], list(found), *node.args[place + 1 :])
    for node in list_prefix_attentions(captured.graph):
        place = _get_argument_position(node, "ahead")
        ahead = _count_prefix_pairs(evaluator, node)
        node.args = (*node.args[:place], ahead, *node.args[place + 1 :])
    if lengths and len(chunked) < len(nodes):
        return tuple(lengths)
    first = next((n for n in nodes if n not in chunked), nodes[0] if nodes else None)
    return () if first is None else tuple(first.args[_get_argument_position(first, "lengths")])  # type: ignore[arg-type]


def _get_argument_position(node: fx.Node, name: str) -> int:
    """Return the position, from 0, of the argument ``name`` in the schema of the operator ``node``."""
    return [a.name for a in node.target._schema.arguments].index(name)  # type: ignore[union-attr]


def _list_known_values(captured: Captured, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the known values of placeholders of ``captured`` (a model as one graph), as a dict placeholder name ->
    value: all constants, and the inputs for which ``inputs`` has a sample. A sample is repeated to the shape that the
    input has in the graph. ``inputs``: path of a model input, such as ``input_ids`` -> sample."""
    specs = {i.value: i for i in captured.inputs}
    values = {}
    for placeholder, name in captured.placeholders.items():
        if name in captured.constants:
            values[placeholder] = captured.constants[name]
        elif name in specs and specs[name].path in inputs:
            spec, value = specs[name].spec, inputs[specs[name].path]
            rows = _repeat_rows(value, tuple(spec.shape))
            if rows is not None:
                values[placeholder] = rows
    return values


def _count_prefix_pairs(evaluator: ConstantEvaluator, node: fx.Node) -> int:
    """Return the mean number, per row of the batch, of query-key pairs that the attention ``node`` computes only
    because of its prefix; -1 if it is unknown. A prefix is a set of keys that the queries of their document see in a
    wider range of positions than other keys. ``evaluator``: computes the value of a node from constants and given
    inputs."""
    ids, prefix = node.args[3:5]
    assert isinstance(prefix, fx.Node)
    flags = evaluator.find_value(prefix)
    documents = evaluator.find_value(ids) if isinstance(ids, fx.Node) else torch.zeros(1, 1)
    if not isinstance(flags, Tensor) or not isinstance(documents, Tensor):
        return -1
    rows, length = list_node_sizes(prefix)
    own, place = documents.expand(rows, length), torch.arange(length).expand(rows, length)
    changes = own[:, 1:] != own[:, :-1]
    border = torch.ones(rows, 1, dtype=torch.bool)
    starts, ends = torch.cat([border, changes], 1), torch.cat([changes, border], 1)
    earlier = place - place.masked_fill(~starts, 0).cummax(1).values  # positions of the document before and after
    later = place.masked_fill(~ends, length).flip(1).cummin(1).values.flip(1) - place
    inner: Any = node.args[8:10]
    outer: Any = node.args[_get_argument_position(node, "reach") :]
    outer = outer[0] if outer else (-1, -1)
    pairs = torch.zeros_like(place)
    # Queries after the key see it before their own position.
    for there, *limits in zip((later, earlier), outer, inner, strict=True):
        seen = [there if limit < 0 else there.clamp(max=limit) for limit in limits]
        pairs = pairs + seen[0] - seen[1]
    return round(int((pairs * flags.expand(rows, length)).sum()) / rows)


def _repeat_rows(value: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tensor ``value``, a sample of a model input, repeated along its dims until it has the shape ``shape``,
    which the input has in the graph. Return ``None`` if ``value`` is not on the CPU (and so may have no values), if
    ``shape`` has more than ``LIMIT`` (2**22) elements, or if a size of ``shape`` is not a multiple of the sample's."""
    if value.device.type != "cpu" or value.dim() != len(shape) or not 0 < value.numel() <= math.prod(shape) <= LIMIT:
        return None
    times = [a // b for a, b in zip(shape, value.shape, strict=True)]
    if any(t * b != a for t, a, b in zip(times, shape, value.shape, strict=True)):
        return None
    return value.repeat(times) if any(t != 1 for t in times) else value


def _cut_documents(evaluator: ConstantEvaluator, ids: fx.Node, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of documents, in positions, after each document is cut at the ends of chunks of positions.
    Chunks of positions that depend on data start anew in each document. The result is empty if ``lengths`` is empty and
    there are no chunks.

    ``lengths``: the lengths before the cut; if it is empty, each row is one document. ``ids``: the node ``[batch,
    positions]`` of the document ids, which may contain numbers of chunks. ``evaluator``: computes the value of a node
    from constants and given inputs.
    """
    found, row, pieces = list(lengths), list_node_sizes(ids)[1], list[int]()
    for size, numbers in sorted(_list_chunk_sizes(evaluator, ids), key=lambda each: each[1] is not None):
        start, pieces = 0, []
        for length in found or [row]:
            place = 0 if numbers is None else numbers[start % row]
            start += length
            ends = [*range(size - place % size, length, size), length]
            pieces += [end - begin for begin, end in itertools.pairwise([0, *ends])]
        found = pieces
    return tuple(found)


def _list_chunk_sizes(evaluator: ConstantEvaluator, ids: fx.Node) -> list[tuple[int, list[int] | None]]:
    """Return a pair for each floor division ``numbers // size`` by which the document ids ``ids`` divide a row into
    chunks: (``size``, in positions; ``numbers`` of one row as a list, or ``None`` if they depend on data).
    ``evaluator``: computes the value of a node from constants and given inputs."""
    while ids.target in (aten.reshape.default, aten.expand.default, aten.permute.default, aten.to.dtype):
        ids = ids.args[0]  # type: ignore[assignment]
    if ids.target is document_ops.combine_ids.default:
        return [found for part in ids.all_input_nodes for found in _list_chunk_sizes(evaluator, part)]
    floor = ids.target in (aten.floor_divide.default, aten.floor_divide.Scalar) or (
        ids.target in (aten.div.Tensor_mode, aten.div.Scalar_mode) and ids.kwargs.get("rounding_mode") == "floor"
    )
    if not floor or not isinstance(ids.args[1], int) or ids.args[1] < 1:
        return []
    value = evaluator.find_value(ids.args[0])  # type: ignore[arg-type]
    known = isinstance(value, Tensor) and value.numel() == ids.meta["val"].numel() == value.shape[-1]
    return [(ids.args[1], value.flatten().tolist() if known and isinstance(value, Tensor) else None)]


def _count_documents(evaluator: ConstantEvaluator, ids: fx.Node) -> tuple[int, ...]:
    """Return the lengths of documents, in positions. A document is a run of equal integers in ``ids``, the node
    ``[batch, positions]`` of the document ids. Rows of the batch are read until at least 256 documents are found.
    Return an empty tuple if the integers are unknown. ``evaluator``: computes the value of a node from constants and
    given inputs."""
    found = evaluator.find_value(ids)
    if not isinstance(found, Tensor):
        return ()
    lengths: list[int] = []
    for row in found.expand(list_node_sizes(ids)):
        lengths += torch.unique_consecutive(row, return_counts=True)[1].tolist()
        if len(lengths) >= _MOST_DOCUMENTS:
            break
    return tuple(lengths)
