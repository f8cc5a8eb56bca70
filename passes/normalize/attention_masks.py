"""Replace attention masks by an ``is_causal`` flag, a band or the documents of positions, so that no mask is computed.

A band means that each query sees only the keys within a fixed distance before and after it. If a mask depends on
constants only, it is recognised by its values, however the model computes it. A causal mask becomes ``is_causal``. A
mask that hides nothing is removed. A sliding window becomes ``partition::band_attention``; a window limit of the
sequence's length or more counts as no limit. A mask "within a band and within the same document", where documents are
data, becomes ``partition::document_attention``, with the document of each position as an operand. A mask of constant
chunks of positions becomes this operator, too, with the number of a position's chunk as its document. Requires: a graph
in normal form.

A mask function of ``flex_attention`` is evaluated on the indices of all queries and keys while the model is traced, see
:func:`trace_flex_attention`. The result is a mask like any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import flex_attention

from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.rewrite import aten, drop_unused, list_node_sizes
from partitioner.passes.normalize.constant_folding import LIMIT, MaskEvaluator
from partitioner.passes.normalize.document_masks import (
    Chunks,
    DocumentKey,
    DocumentMask,
    find_document_mask,
    insert_document_ids,
)
from partitioner.passes.normalize.mask_values import (
    MASKED,
    Comparison,
    Condition,
    ConditionalValue,
    DataComparison,
    SumComparison,
    Value,
)
from partitioner.passes.ops.attention import Band, get_band_limits
from partitioner.passes.ops.documents import document_ops


def drop_constant_masks(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Replace attention masks in ``graph``, in place, by arguments of the attention operator. A mask is replaced if
    each query sees the keys in a fixed range of positions around its own: either all keys in this range, or only those
    in the query's own document (several documents may be packed in one sequence). The document of a position may depend
    on data. Attention with any other mask is left unchanged.

    ``constants``: placeholder name -> value, for the constants that the graph reads.
    """
    evaluator = MaskEvaluator(constants)
    kinds: dict[tuple[fx.Node, int], Band | DocumentMask | None] = {}
    ids: dict[DocumentKey, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        queries = list_node_sizes(node.args[0])[-2]
        if (mask, queries) not in kinds:
            kinds[mask, queries] = classify_mask(evaluator.find_value(mask), queries, list_node_sizes(mask)[-1])
        kind = kinds[mask, queries]
        if kind is not None:
            replace_mask(graph, node, kind, ids)
    if any(band is not None for band in kinds.values()):
        drop_unused(graph)


def replace_mask(graph: fx.Graph, node: fx.Node, mask: Band | DocumentMask, ids: dict[DocumentKey, fx.Node]) -> bool:
    """Remove the mask of the attention ``node`` of ``graph``, in place, by giving the attention other arguments or by
    replacing it by an operator that computes the same without a mask. Return whether this was possible; if not,
    ``node`` is unchanged.

    ``mask``: the meaning of the mask: a query sees the keys in a range of positions around its own (a :class:`Band`),
    or the keys of its own document in such a range (a :class:`DocumentMask`). ``ids``: a cache: key of a document mask
    -> node ``[batch, positions]`` of document ids; a new node is added to it.
    """
    if isinstance(mask, DocumentMask):
        return _replace_mask_by_documents(graph, node, mask, ids)
    return _replace_mask_by_band(graph, node, mask)


def _replace_mask_by_band(graph: fx.Graph, node: fx.Node, band: Band) -> bool:
    """Rewrite the attention ``node`` of ``graph`` in place so that it uses ``band`` instead of its mask, and return
    whether that was done. ``band``: how many positions before and after its own a query sees.

    If all keys are visible or all keys up to the query, only arguments of ``node`` change. For a sliding window,
    ``node`` is replaced by the operator ``partition::band_attention``. This needs operands ``[batch, heads, positions,
    width]`` of equal batch sizes and, without ``enable_gqa``, equal numbers of heads, and a result that is not an
    output of the model; otherwise ``node`` stays unchanged.
    """
    if band.is_full or band.is_causal:
        node.args = (*node.args[:3], None, 0.0, band.is_causal)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
        return True
    return replace_by_band_attention(graph, node, band)


def _replace_mask_by_documents(
    graph: fx.Graph, node: fx.Node, mask: DocumentMask, ids: dict[DocumentKey, fx.Node]
) -> bool:
    """Replace the attention ``node`` of ``graph``, whose mask is ``mask``, by the operator
    ``partition::document_attention``, in place, and return whether that was done. The attention stays unchanged if its
    operands are not ``[batch, heads, positions, width]``, if it has different numbers of queries and keys, or if its
    result is an output of the model.

    ``mask``: says that a query sees only keys of its own document. ``ids``: a cache: key of a document mask -> node
    ``[batch, positions]`` of document ids; a new node is added to it.
    """
    query, key = (list_node_sizes(n) for n in node.args[:2])  # type: ignore[arg-type]
    if not is_plain_attention(node) or query[-2] != key[-2]:
        return False
    where = mask.key(query[0])
    if where not in ids:
        ids[where] = insert_document_ids(graph, mask, query[0])
    arguments = (*node.args[:3], ids[where], [], *get_band_limits(mask.band), node.kwargs.get("scale"))
    replace_attention(graph, node, document_ops.document_attention.default, arguments)
    return True


def replace_by_band_attention(graph: fx.Graph, node: fx.Node, band: Band) -> bool:
    """Replace the scaled dot-product attention ``node`` of ``graph``, in place, by ``partition::band_attention``, and
    return ``True``. If the operands do not have four dims (batch, heads, positions, width) and equal batch sizes,
    change nothing and return ``False``. ``band``: how many positions before and after its own a query sees."""
    if not is_plain_attention(node):
        return False
    arguments = (*node.args[:3], *get_band_limits(band), node.kwargs.get("scale"))
    replace_attention(graph, node, torch.ops.partition.band_attention.default, arguments)
    return True


def insert_like(
    like: fx.Node, graph: fx.Graph, target: Callable[..., object], arguments: tuple[object, ...]
) -> fx.Node:
    """Insert the operator ``target`` with ``arguments`` at the insertion point of ``graph``, and return the new node.
    The node gets all metadata of ``like`` except the tensor, such as the modules in which it is called."""
    made = insert_operator_node(graph, target, arguments)
    made.meta.update({key: value for key, value in like.meta.items() if key != "val"})
    return made


def replace_attention(
    graph: fx.Graph, node: fx.Node, target: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Replace the attention ``node`` of ``graph``, in place, by the first result of the operator ``target``.
    ``arguments``: the arguments of ``target``."""
    with graph.inserting_before(node):
        made = insert_like(node, graph, target, arguments)
        out = insert_like(node, graph, operator.getitem, (made, 0))
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def is_plain_attention(node: fx.Node) -> bool:
    """Return whether the operator ``partition::band_attention`` (attention within a sliding window) can replace the
    attention ``node``.

    The operands must have four dims (batch, heads, positions, width) and equal batch sizes, and equal numbers of heads
    unless ``enable_gqa`` is set. The result must not be an output of the model.
    """
    query, key, value = (list_node_sizes(n) for n in node.args[:3])  # type: ignore[arg-type]
    if any(user.op == "output" for user in node.users) or not len(query) == len(key) == len(value) == 4:
        return False
    heads = node.kwargs.get("enable_gqa") or query[1] == key[1] == value[1]
    return query[0] == key[0] == value[0] and bool(heads)


def classify_mask(value: Value | None, queries: int, keys: int) -> Band | DocumentMask | None:
    """Return which keys a query sees under an attention mask ``[..., queries, keys]``. The result is a :class:`Band` if
    a query sees the keys in a range of positions around its own (without limits: all keys). It is a
    :class:`DocumentMask` if a query sees the keys of its own document in such a range. It is ``None`` for any other
    mask.

    ``value``: the mask, as a tensor, as a tuple of conditions that must all hold where a key is shown, or as a
    :class:`ConditionalValue` (one number where such conditions hold, another elsewhere); ``None`` if the mask is
    unknown. ``queries``, ``keys``: the numbers of queries and of keys.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _classify_conditions((value,), queries, keys)
    terms = find_visibility_conditions(value) if isinstance(value, ConditionalValue) else value
    if not isinstance(terms, tuple):
        return None
    if not any(isinstance(t, DataComparison | SumComparison) for t in terms):
        return _classify_conditions(terms, queries, keys)
    found = find_document_mask(terms, queries)
    if found is None or queries != keys:
        return None
    shown = _classify_conditions(found.terms, queries, keys)
    if isinstance(shown, DocumentMask):
        return shown._replace(ids=found.ids)
    return None if shown is None else DocumentMask(found.ids, shown)


def _classify_conditions(conditions: Sequence[Condition], queries: int, keys: int) -> Band | DocumentMask | None:
    """Return which keys a query sees if it sees exactly the keys for which all ``conditions`` hold. The result is a
    :class:`Band` if these keys are a range of positions around the query's. It is a :class:`DocumentMask` if these keys
    are the ones in such a range that are in the query's chunk of positions. It is ``None`` for other conditions.

    ``conditions``: boolean masks, additive masks, and comparisons of two constant tensors. ``queries``, ``keys``: the
    numbers of queries and of keys.
    """
    ordered = [c for c in conditions if isinstance(c, Comparison) and c.compare not in ("eq", "ne")]
    bands = [_classify_terms(ordered, queries, keys)] if ordered or not conditions else []
    numbers: list[Tensor] = []
    for condition in conditions:
        if isinstance(condition, Tensor):
            band = _classify_tensor(condition, queries, keys)
            found = _split_chunks(condition, queries, keys) if band is None else (None, band)
        elif isinstance(condition, Comparison) and condition.compare in ("eq", "ne"):
            found = _find_equal_sides(condition, queries, keys)
        else:
            continue
        bands.append(None if found is None else found[1])
        numbers += [] if found is None or found[0] is None else [found[0]]
    band = bands[0] if len(bands) == 1 else _intersect_bands(bands, queries, keys)
    if band is None or not numbers:
        return band
    chunks = _find_chunks(numbers)
    return None if chunks is None else DocumentMask((), band, chunks)


def _find_equal_sides(term: Comparison, queries: int, keys: int) -> tuple[Tensor, Band] | None:
    """If, by the comparison ``term``, a query sees a key exactly if the positions of both have the same number, return
    (these numbers ``[positions]``, a :class:`Band` without limits). Otherwise return ``None``. ``queries``, ``keys``:
    the numbers of queries and of keys."""
    a, b = (_align_pair_dims(x) for x in (term.a, term.b))
    if a is None or b is None or term.compare != "eq" or queries != keys:
        return None
    by_query, by_key = (a, b) if b.shape[0] == 1 else (b, a)
    if by_query.shape != (queries, 1) or by_key.shape != (1, keys) or not torch.equal(by_query, by_key.mT):
        return None
    return by_key[0], Band()


def _align_pair_dims(x: Tensor) -> Tensor | None:
    """Return ``x``, one side of a comparison in an attention mask, reshaped to its last two dims ``[queries, keys]``.
    Return ``None`` if an earlier dim has a size other than 1."""
    while x.dim() < 2:
        x = x.unsqueeze(0)
    return x.reshape(x.shape[-2:]) if x.numel() == x.shape[-1] * x.shape[-2] else None


def _split_chunks(mask: Tensor, queries: int, keys: int) -> tuple[Tensor, Band] | None:
    """If, under ``mask``, a query sees exactly the keys in its own chunk and in a fixed range of positions around its
    own, return (the chunk number of each position ``[positions]``, this range as a :class:`Band`). Otherwise return
    ``None``. A chunk is a run of consecutive positions. ``mask``: boolean (true: shown) or additive (0: shown).
    ``queries``, ``keys``: the numbers of queries and of keys."""
    found = _align_pair_dims(mask)
    if found is None or queries != keys or found.shape != (queries, keys):
        return None
    shown = found if found.dtype is torch.bool else found == 0
    if found.dtype is not torch.bool and not bool((shown | (found <= MASKED)).all()):
        return None
    joined = shown.diagonal(1) | shown.diagonal(-1)
    numbers = torch.cat([torch.zeros(1, dtype=torch.int64), (~joined).cumsum(0)])
    distance = torch.arange(queries).unsqueeze(1) - torch.arange(keys)
    if not bool(shown.diagonal().all()):
        return None
    before, after = int(distance[shown].max()), int(-distance[shown].min())
    expected = (numbers.unsqueeze(1) == numbers) & (distance <= before) & (distance >= -after)
    if not torch.equal(shown, expected):
        return None
    longest = int(numbers.bincount().max())
    return numbers, Band(None if before >= longest - 1 else before, None if after >= longest - 1 else after)


def _find_chunks(numbers: Sequence[Tensor]) -> Chunks | None:
    """Return the chunks into which the tensors ``numbers`` divide the positions of a row: two positions are in one
    chunk exactly if they have equal numbers in each tensor. Return ``None`` unless all chunks have the same size, apart
    from the first and the last. ``numbers``: integer tensors ``[positions]``."""
    joined = torch.stack(list(numbers))
    length = joined.shape[1]
    ends = torch.cat([(joined[:, 1:] != joined[:, :-1]).any(0).nonzero()[:, 0] + 1, torch.tensor([length])])
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    size = int(sizes[1:-1].max()) if len(sizes) > 2 else int(sizes.max())
    offset = size - int(sizes[0])
    found = (torch.arange(length) + offset) // size
    if offset < 0 or len(torch.unique(joined, dim=1)[0]) != int(found[-1]) + 1:
        return None
    if not torch.equal(found.diff() != 0, (joined[:, 1:] != joined[:, :-1]).any(0)):
        return None
    return Chunks(size, offset, length)


def _classify_terms(terms: Sequence[Comparison], queries: int, keys: int) -> Band | None:
    """Return the range of key positions, relative to its own, that a query sees if it sees exactly the keys for which
    all ``terms`` hold. Return ``None`` if these keys do not form one range. ``terms``: comparisons (``<``, ``<=``,
    ``>``, ``>=``) of two constant tensors. ``queries``, ``keys``: the numbers of queries and of keys."""
    sides = [_split_term_sides(t, queries, keys) for t in terms]
    known = [s for s in sides if s is not None]
    if len(known) < len(sides):
        return None
    if all(_sees_every_key(*s) for s in known):
        return Band()
    if queries == keys and all(_sees_earlier_keys(*s) for s in known) and any(_hides_later_keys(*s) for s in known):
        return Band(None, 0)
    return _intersect_bands([_term_to_band(*s) for s in known], queries, keys)


def _term_to_band(strict: bool, by_key: Tensor, by_query: Tensor) -> Band | None:
    """Return the range of key positions, relative to its own, that a query sees. Query ``i`` sees key ``j`` if
    ``by_key[j] <= by_query[i]``, or, if ``strict`` is true, if ``by_key[j] < by_query[i]``.

    ``by_key`` ``[keys]``, ``by_query`` ``[queries]``: one number for each key and for each query. Return ``None``
    unless both vectors count up by ones, or both count down by ones.
    """
    if by_key.numel() < 2 or by_query.numel() < 2:
        return None
    step = int(by_key[1] - by_key[0])
    if step not in (1, -1) or any(bool((x.diff() != step).any()) for x in (by_key, by_query)):
        return None
    # a query sees a key if step * (key - query) is at most, or less than, this
    between = float(by_query[0] - by_key[0])
    limit = math.ceil(between) - 1 if strict else math.floor(between)
    return Band(None, limit) if step == 1 else Band(limit, None)


def _intersect_bands(bands: Sequence[Band | None], queries: int, keys: int) -> Band | None:
    """Return the intersection of ``bands``. Each band is a range of key positions that a query sees, relative to the
    query's own position.

    Return ``None`` if one of ``bands`` is ``None``, if ``queries`` and ``keys`` (the numbers of queries and of keys)
    differ, or if a limit is negative, so that a query would not see its own position. A limit that reaches the end of
    the sequence becomes ``None`` (no limit).
    """
    known = [b for b in bands if b is not None]
    if len(known) < len(bands) or queries != keys:
        return None
    before = min((b.before for b in known if b.before is not None), default=queries)
    after = min((b.after for b in known if b.after is not None), default=keys)
    if before < 0 or after < 0:
        return None
    return Band(None if before >= queries - 1 else before, None if after >= keys - 1 else after)


def find_visibility_conditions(choice: ConditionalValue) -> tuple[Condition, ...] | None:
    """Return conditions of which all hold exactly where the additive attention mask ``choice`` shows a score. Return
    ``None`` if ``choice`` is not an additive mask (0 at shown scores, -6e4 or less at hidden ones), or if its
    conditions would have to be negated and cannot be.

    ``choice``: the mask as one number where its conditions hold and another elsewhere.
    """
    if choice.shown == 0 and choice.hidden <= MASKED:
        return choice.terms
    if choice.hidden == 0 and choice.shown <= MASKED and len(choice.terms) == 1:
        only = choice.terms[0]
        return (~only if isinstance(only, Tensor) else only.negated(),)
    return None


def _classify_tensor(value: Tensor, queries: int, keys: int) -> Band | None:
    """Return the range of positions around its own that a query sees under the mask ``value``; return ``None`` if the
    visible keys do not form one range that is the same for all queries.

    ``value``: a mask ``[..., queries, keys]``, boolean (true: shown) or additive (0: shown), with size 1 in dims along
    which it is constant. ``queries``, ``keys``: the numbers of queries and of keys.
    """
    while value.dim() < 2:
        value = value.unsqueeze(0)
    if value.numel() != value.shape[-2] * value.shape[-1]:
        return None
    value = value.reshape(value.shape[-2:])
    shown = value if value.dtype is torch.bool else value == 0
    if bool(shown.all()):
        return Band()
    if queries != keys or queries * keys > LIMIT:
        return None
    hidden = ~value if value.dtype is torch.bool else value <= MASKED
    shown = shown.expand(queries, keys)
    if not bool((shown | hidden).all()) or not bool(shown.any()):
        return None
    distance = torch.arange(queries).unsqueeze(1) - torch.arange(keys)
    before, after = int(distance[shown].max()), int(-distance[shown].min())
    if before < 0 or after < 0 or not torch.equal(shown, (distance <= before) & (distance >= -after)):
        return None
    return Band(None if before == queries - 1 else before, None if after == keys - 1 else after)


def _split_term_sides(term: Comparison, queries: int, keys: int) -> tuple[bool, Tensor, Tensor] | None:
    """Rewrite the comparison ``term``, a condition under which a query sees a key, as ``by_key[j] < by_query[i]`` or
    ``by_key[j] <= by_query[i]`` for query ``i`` and key ``j``. Return three values: whether the comparison is strict
    (``<``), ``by_key`` ``[keys]``, and ``by_query`` ``[queries]``.

    Return ``None`` if the comparison cannot be written in this way. ``queries``, ``keys``: the numbers of queries and
    of keys.
    """
    a, b = term.a, term.b
    if term.compare in ("gt", "ge"):
        a, b = b, a
    strict = term.compare in ("lt", "gt")
    if any(x.numel() != x.shape[-1] * x.shape[-2] for x in (a, b)):
        return None
    a, b = (x.reshape(x.shape[-2:]) for x in (a, b))
    if a.shape[0] > 1 or b.shape[1] > 1:  # queries <= keys: -keys <= -queries
        a, b = -b, -a
    if a.shape[0] > 1 or b.shape[1] > 1:
        return None
    return strict, a[0].expand(keys), b[:, 0].expand(queries)


def _select_comparison(strict: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return operator.lt if strict else operator.le


def _sees_every_key(strict: bool, by_key: Tensor, by_query: Tensor) -> bool:
    """Return whether every query sees every key. Query ``i`` sees key ``j`` if ``by_key[j] <= by_query[i]``, or
    if ``by_key[j] < by_query[i]`` where ``strict`` is true.
    """
    return bool(_select_comparison(strict)(by_key.max(), by_query.min()))


def _sees_earlier_keys(strict: bool, by_key: Tensor, by_query: Tensor) -> bool:
    """Return whether every query sees all keys up to its own position.

    Query ``i`` sees key ``j`` if ``by_key[j] <= by_query[i]``, or if ``by_key[j] < by_query[i]`` where
    ``strict`` is true.
    """
    return bool(_select_comparison(strict)(by_key.cummax(0).values, by_query).all())


def _hides_later_keys(strict: bool, by_key: Tensor, by_query: Tensor) -> bool:
    """Return whether no query sees a key after its own position.

    Query ``i`` sees key ``j`` if ``by_key[j] <= by_query[i]``, or if ``by_key[j] < by_query[i]`` where
    ``strict`` is true.
    """
    smallest_after = by_key.flip(0).cummin(0).values.flip(0)[1:]
    return not bool(_select_comparison(strict)(smallest_after, by_query[:-1]).any())


# --- flex_attention, while the model is traced ------------------------------------------------------------------------


@contextmanager
def trace_flex_attention() -> Iterator[None]:
    """Return a context in which ``flex_attention`` is traced as scaled dot-product attention with a mask. The mask
    function is called once, with index tensors of all batch rows, heads, queries and keys. A score function, if there
    is one, is called once, with all scores; attention is then traced as a product, a softmax and a product. Outside of
    this context, torch would trace one operator that contains functions of single elements, and would raise an error
    for gradients on CPU."""
    replaced = {
        "_validate_device": lambda *_: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "flex_attention_hop": _attend_flexibly,
    }
    with ExitStack() as stack:
        if all(hasattr(flex_attention, name) for name in replaced):  # other versions of torch lack these functions
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(flex_attention, name, value))
        yield


def _attend_flexibly(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Any], block_mask: Any, scale: float, options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flex_attention`` with operators on whole tensors. Return three tensors: the result ``[batch, heads,
    positions, width]``; for each query, log2 of the sum of the exponentials of its scores; and, for each query, its
    largest score divided by ln 2. The last two have the dims ``[batch, heads, positions]`` and are empty unless
    ``options`` requests them.

    ``q``, ``k``, ``v``: queries, keys and values ``[batch, heads, positions, width]``. ``score_mod``: returns the
    changed scores, given the scores and the indices of batch row, head, query and key. ``block_mask``: a tuple whose
    last element is the mask function of these indices. ``scale``: the factor of the scores. ``options``: kernel
    options. Base 2 is used because ``torch.nn.attention.flex_attention`` multiplies both results by ln 2.
    """
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    sizes = batch, heads, queries, keys
    index = [
        torch.arange(n, device=q.device).reshape([n if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)
    ]
    shown: Tensor = block_mask[-1](*index)
    shown = shown.reshape([1] * (4 - shown.dim()) + list(shown.shape))
    repeated = [x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v)]
    scores = (q @ repeated[0].transpose(-2, -1)) * scale
    changed = score_mod(scores, *index)
    none = q.new_empty(0)
    asked = [bool(options.get(name)) for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")]
    if any(asked):
        kind = torch.float64 if changed.dtype == torch.float64 else torch.float32
        masked = changed.to(kind).masked_fill(~shown, -math.inf)
        total = masked.logsumexp(-1) / math.log(2.0) if asked[0] else none
        largest = masked.amax(-1) / math.log(2.0) if asked[1] else none
        return masked.softmax(-1).to(v.dtype) @ repeated[1], total, largest
    if changed is scores:
        grouped = k.shape[1] != heads
        return F.scaled_dot_product_attention(q, k, v, shown, scale=scale, enable_gqa=grouped), none, none
    weights = changed.masked_fill(~shown, -math.inf).softmax(-1)
    return weights.to(v.dtype) @ repeated[1], none, none
