"""Find attention in which padding changes the result of a query from which a mask hides all keys.

If a mask of finite scores, such as -3e38, hides all keys from a query, the softmax gives equal weight to all of them,
so that the query also reads padded keys. With scores of minus infinity, it does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from partitioner.passes.ir.model import Captured
from partitioner.passes.padding.compare import get_operator_name, list_result_shapes
from partitioner.passes.padding.fills import NEGATIVE, VIEWS, is_pointwise
from partitioner.passes.padding.values import PaddedValue
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import get_meta_tensor, get_node_argument, normalize_dims, operands_of

Values = Mapping[fx.Node, tuple[PaddedValue, ...]]  # node -> what is known of each result if the batch is padded
Unseen = Literal["all", "first", "gap"]  # at which hidden positions a query sees no key


@dataclass(frozen=True)
class UnmaskedScores:
    """Attention scores, or a mask that is added to them, in which the score of a padded key is very negative (-1e30 or
    less) but finite. If all keys are hidden from a query, the softmax then gives padded keys the same weight as the
    others.

    ``node``: the node that computes the scores or the mask. ``key``: the index of the dim of keys. ``queries``: the
    indices of the other dims that grow with the batch, such as that of queries. ``causal``: whether keys after a query
    are known to be hidden from it.
    """

    node: fx.Node
    key: int
    queries: frozenset[int]
    causal: bool

    def hides_padding(self, values: Values) -> bool:
        """Return whether padded keys have a score of -1e30 or less for every query. ``values``: node -> the
        :class:`PaddedValue` of each of its results."""
        part = values[self.node][0].growing_part(self.key)
        return part is not None and part.fill is not None and part.fill <= NEGATIVE


def find_unmasked_scores(node: fx.Node, operands: Sequence[PaddedValue]) -> UnmaskedScores | None:
    """If the operator ``node`` is a softmax over keys or an attention with a mask, and padded keys have a finite score
    of -1e30 or less, return the scores or the mask that it reads; otherwise return ``None``. ``operands``: the
    :class:`PaddedValue` of each operand."""
    name = get_operator_name(node)
    if name in ("softmax", "_softmax"):
        scores = operands_of(node)[0]
        (key,) = normalize_dims(get_node_argument(node, "dim"), len(operands[0].dims))
        dtype = get_meta_tensor(node).dtype
    elif name == "scaled_dot_product_attention" and isinstance(mask := get_node_argument(node, "attn_mask"), fx.Node):
        scores, dtype = mask, get_meta_tensor(mask).dtype
        key = len(list_result_shapes(mask)[0]) - 1
    else:
        return None
    value = operands[operands_of(node).index(scores)]
    part = value.growing_part(key)
    if part is None or not dtype.is_floating_point:
        return None
    causal = value.causal is not None and value.causal[1] == key
    numbers = [part.fill] if part.fill is not None else []
    if causal and value.causal is not None:
        numbers.append(value.causal[2])
    kept = [float(torch.tensor(number, dtype=dtype)) for number in numbers if number <= NEGATIVE]
    if not kept or -torch.inf in kept:
        return None
    queries = frozenset(d for d, parts in enumerate(value.dims) if d != key and any(p.grows for p in parts))
    return UnmaskedScores(scores, key, queries, causal)


def list_mask_nodes(main: Captured, scores: Collection[UnmaskedScores]) -> list[fx.Node]:
    """Return the nodes of the model ``main`` that compute masks of the attention scores ``scores``, in the order of the
    graph: the nodes on which the scores depend and that depend on no parameter, and the pointwise operators and views
    that join a mask with the scores."""
    trained: set[fx.Node] = set()
    for node in main.graph.nodes:
        state = main.states.get(main.placeholders[node.name]) if node.op == "placeholder" else None
        if (state is not None and state.kind == "parameter") or any(n in trained for n in node.all_input_nodes):
            trained.add(node)
    found: set[fx.Node] = set()
    left = [each.node for each in scores]
    while left:
        node = left.pop()
        joins = node.op == "call_function" and (is_pointwise(node) or get_operator_name(node) in VIEWS)
        if node not in found and (node not in trained or joins):
            found.add(node)
            left += node.all_input_nodes
    return [node for node in main.graph.nodes if node in found]


def find_varying_dims(nodes: Sequence[fx.Node], values: Values) -> dict[fx.Node, frozenset[int]]:
    """Return the dims along which elements of each node in ``nodes`` may differ: node -> dims. Values that depend only
    on the distance of key and query count as equal, because a query always sees its own key under a mask of such
    values.

    ``nodes``: nodes that compute attention masks, in the order of the graph; operands that are not among them count as
    constant. ``values``: node -> the :class:`PaddedValue` of each of its results.
    """
    found: dict[fx.Node, frozenset[int]] = {}
    for node in nodes:
        every = frozenset(d for d, size in enumerate(list_result_shapes(node)[0]) if size > 1)
        name = get_operator_name(node) if node.op == "call_function" else ""
        apart = name == "abs" and values[operands_of(node)[0]][0].distance is not None
        if apart or values[node][0].uniform is not None:
            every = frozenset()
        elif name and (is_pointwise(node) or name in VIEWS):
            every = _join_varying_dims(node, found, every)
        found[node] = every
    return found


def classify_unseen(
    scores: Sequence[UnmaskedScores], varying: Mapping[fx.Node, frozenset[int]], values: Values
) -> Unseen:
    """Return which keys of an attention must be hidden so that some query sees no key at all. ``"all"``: all keys of
    its sample. ``"first"``: the first keys are enough, as under a causal mask. ``"gap"``: the keys between visible ones
    may be enough, too, as under a causal sliding window and other masks of queries and keys.

    ``scores``: the attention scores whose keys an input hides. ``varying``: each node that computes masks -> the dims
    along which its elements may differ. ``values``: node -> the :class:`PaddedValue` of each of its results.
    """
    if not any(each.causal or varying[each.node] & each.queries for each in scores):
        return "all"
    pairs = {n for n, dims in varying.items() if sum(any(p.grows for p in values[n][0].dims[d]) for d in dims) > 1}
    made = [n for n in pairs if values[n][0].distance is None and not any(o in pairs for o in _list_masks(n, values))]
    return "first" if all(_compares_order(node, values) for node in made) else "gap"


def _list_masks(node: fx.Node, values: Values) -> list[fx.Node]:
    """Return the operands of ``node`` except tensors whose elements are the distance of a key from a query. ``values``:
    node -> the :class:`PaddedValue` of each of its results."""
    return [o for o in node.all_input_nodes if values[o][0].distance is None]


def _compares_order(node: fx.Node, values: Values) -> bool:
    """Return whether ``node`` compares the index of each key with that of each query, as a causal mask does, so that a
    query sees either all keys before it or none. ``values``: node -> the :class:`PaddedValue` of each of its results.
    """
    if node.op != "call_function" or values[node][0].causal is None:
        return False
    return len(operands_of(node)) == 2 or node.args[1:2] == (0,)


def _join_varying_dims(node: fx.Node, found: Mapping[fx.Node, frozenset[int]], every: frozenset[int]) -> frozenset[int]:
    """Return the dims along which elements of the result of ``node``, a pointwise operator or a view, may differ.
    ``found``: node -> the dims along which its elements may differ; an operand that is not in ``found`` counts as
    constant. ``every``: all dims of the result with several elements; they are returned if the operator's sharding rule
    does not show more."""
    rule, dims = factors_of(node), set[int]()
    if rule is None:
        return every
    homes = {factors: d for d, factors in enumerate(rule.results[0]) if factors}
    for operand, factors in zip(operands_of(node), rule.operands, strict=True):
        for dim in found.get(operand, ()):
            if factors[dim] not in homes:
                return every
            dims.add(homes[factors[dim]])
    return frozenset(dims)
