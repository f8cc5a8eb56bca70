"""Recognise constant attention masks: causal ones become ``is_causal``, all-true ones are dropped.

Requires: a graph in normal form. A mask counts where it depends on nothing but constants, however it is written; a
window that is as long as the sequence counts as causal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from passes.constants import LIMIT, Choice, Evaluator, Term, Value
from passes.rewrite import aten, shape

_MASKED = -6e4  # what is added to a score to hide it is at most this: the type's smallest number, or -inf


def drop_constant_masks(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Rewrite attention under constant masks in place; ``constants``: values of placeholders, by name."""
    evaluator = Evaluator(constants)
    kinds: dict[tuple[fx.Node, int], str | None] = {}
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        queries = shape(node.args[0])[-2]
        if (mask, queries) not in kinds:
            kinds[mask, queries] = _classify(evaluator.value(mask), queries, shape(mask)[-1])
        kind = kinds[mask, queries]
        if kind is not None:
            node.args = (*node.args[:3], None, 0.0, kind == "causal")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    if any(kind is not None for kind in kinds.values()):
        graph.eliminate_dead_code()


def _classify(value: Value | None, queries: int, keys: int) -> str | None:
    """``causal``, ``all`` or ``None`` of a mask ``[..., queries, keys]``."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _classify_tensor(value, queries, keys)
    terms = _shown(value) if isinstance(value, Choice) else value
    if terms is None:
        return None
    sides = [_sides(t, queries, keys) for t in terms]
    if any(s is None for s in sides):
        return None
    known = [s for s in sides if s is not None]
    if all(_holds_everywhere(*s) for s in known):
        return "all"
    if queries == keys and all(_holds_below(*s) for s in known) and any(_fails_above(*s) for s in known):
        return "causal"
    return None


def _shown(choice: Choice) -> tuple[Term, ...] | None:
    """The terms that must hold where a score is shown under an additive mask."""
    if choice.shown == 0 and choice.hidden <= _MASKED:
        return choice.terms
    if choice.hidden == 0 and choice.shown <= _MASKED and len(choice.terms) == 1:
        return (choice.terms[0].negated(),)
    return None


def _classify_tensor(value: Tensor, queries: int, keys: int) -> str | None:
    while value.dim() < 2:
        value = value.unsqueeze(0)
    if value.numel() != value.shape[-2] * value.shape[-1]:
        return None
    value = value.reshape(value.shape[-2:])
    shown = value if value.dtype is torch.bool else value == 0
    if bool(shown.all()):
        return "all"
    if queries != keys or queries * keys > LIMIT:
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    hidden = ~value if value.dtype is torch.bool else value <= _MASKED
    return "causal" if torch.equal(shown.expand(queries, keys), causal) and bool((shown | hidden).all()) else None


def _sides(term: Term, queries: int, keys: int) -> tuple[bool, Tensor, Tensor] | None:
    """(strict, vector over keys, vector over queries) of a term written as keys < or <= queries."""
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


def _less(strict: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return operator.lt if strict else operator.le


def _holds_everywhere(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    return bool(_less(strict)(over_keys.max(), over_queries.min()))


def _holds_below(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    """Whether every query sees all keys up to itself."""
    return bool(_less(strict)(over_keys.cummax(0).values, over_queries).all())


def _fails_above(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    """Whether no query sees a key after itself."""
    smallest_after = over_keys.flip(0).cummin(0).values.flip(0)[1:]
    return not bool(_less(strict)(smallest_after, over_queries[:-1]).any())
