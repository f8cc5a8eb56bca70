"""Attention with soft-capped scores, ALiBi or prefixes, in several notations, and a decoder that uses one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

from tests.helpers.attention.packed_models import attend_by_torch, compare_documents, list_distances

HIDDEN, HEADS, KV_HEADS, VOCAB = 32, 4, 2, 40
CAP = 0.5


class Marks(NamedTuple):
    """What a notation reads besides queries, keys and values.

    ``ids`` ``[batch, positions]``: the document of each position. ``starts`` ``[batch]``: the number of first keys that
    all queries see. ``flags`` ``[batch, positions]``: true at keys that all queries of their document see. ``slopes``
    ``[heads]``: what is added to a score for each position by which its key is after the query.
    """

    ids: Tensor
    starts: Tensor
    flags: Tensor
    slopes: Tensor


Attend = Callable[[Tensor, Tensor, Tensor, Marks], Tensor]


def _later(x: Tensor) -> Tensor:
    """An additive causal mask."""
    return torch.full((x.shape[2],) * 2, -math.inf, dtype=x.dtype).triu(1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    batch, kv, length, width = x.shape
    return x[:, :, None].expand(batch, kv, heads // kv, length, width).reshape(batch, heads, length, width)


def _products(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, _repeated(k, q.shape[1]).transpose(2, 3)) * q.shape[-1] ** -0.5


def _weigh(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1).to(v.dtype) @ _repeated(v, scores.shape[1])


def _bias(slopes: Tensor, length: int) -> Tensor:
    place = torch.arange(length)
    return slopes[:, None, None] * (place - place[:, None])


def capped(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    scores = torch.tanh(_products(q, k) / CAP) * CAP
    return _weigh(scores + _later(q), v)


def capped_documents(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    scores = CAP * torch.tanh(_products(q, k) / CAP)
    shown = compare_documents(m.ids) & (list_distances(q.shape[2]) >= 0)
    return _weigh(scores.masked_fill(~shown, torch.finfo(q.dtype).min), v)


def capped_window(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    distance = list_distances(q.shape[2])
    scores = CAP * torch.tanh(_products(q, k) / CAP)
    return _weigh(torch.where((distance >= 0) & (distance < 3), scores, -math.inf), v)


def capped_both_ways(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    return _weigh(CAP * torch.tanh(_products(q, k) / CAP), v)


def sloped(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    return attend_by_torch(q, k, v, _bias(m.slopes, q.shape[2]) + _later(q))


def sloped_by_keys(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    length = q.shape[2]
    bias = torch.arange(1 - length, 1).view(1, 1, length) * m.slopes.view(-1, 1, 1)
    return _weigh((_products(q, k) + bias).masked_fill(list_distances(length) < 0, -math.inf), v)


def sloped_before_factor(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    """The factor is for the sum of products, bias and mask."""
    products = torch.matmul(q, _repeated(k, q.shape[1]).transpose(2, 3))
    apart = torch.zeros(1, dtype=q.dtype).masked_fill(~compare_documents(m.ids), torch.finfo(q.dtype).min)
    return _weigh((products + _bias(m.slopes, q.shape[2]) + apart + _later(q)) / q.shape[-1] ** 0.5, v)


def sloped_by_distance(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    """The distance is subtracted, however it is signed: keys behind the query are hidden."""
    bias = -m.slopes[None, :, None, None] * list_distances(q.shape[2]).abs()
    return attend_by_torch(q, k, v, bias.masked_fill(list_distances(q.shape[2]) < 0, -math.inf))


def sloped_documents(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    shown = compare_documents(m.ids) & (list_distances(q.shape[2]) >= 0)
    mask = torch.zeros(1, dtype=q.dtype).masked_fill(~shown, torch.finfo(q.dtype).min)
    return attend_by_torch(q, k, v, _bias(m.slopes, q.shape[2])[None] + mask)


def sloped_both_ways(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    return attend_by_torch(q, k, v, _bias(m.slopes, q.shape[2]).expand(q.shape[0], -1, -1, -1))


def prefix(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    place = torch.arange(q.shape[2])
    first = place[None, None, :] < m.starts[:, None, None]
    return attend_by_torch(q, k, v, ((list_distances(q.shape[2]) >= 0) | first)[:, None])


def prefix_added(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    place = torch.arange(q.shape[2])
    shown = (place[None, None, None, :] < m.starts[:, None, None, None]) | (list_distances(q.shape[2]) >= 0)
    return attend_by_torch(q, k, v, torch.zeros(1, dtype=q.dtype).masked_fill(~shown, -math.inf))


def prefix_of_constant_length(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    return attend_by_torch(q, k, v, (torch.arange(q.shape[2]) < 5) | (list_distances(q.shape[2]) >= 0))


def prefix_beside_window(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    """The window hides no key of the prefix."""
    distance = list_distances(q.shape[2])
    window = (distance >= 0) & (distance < 3)
    return attend_by_torch(q, k, v, compare_documents(m.ids) & (m.flags[:, None, None, :] | window))


def prefix_in_window(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    """The window hides keys of the prefix, too."""
    distance = list_distances(q.shape[2])
    shown = (m.flags[:, None, None, :] | (distance >= 0)) & (distance < 3) & (distance > -5)
    scores = torch.tanh(_products(q, k) / CAP) * CAP
    return _weigh(scores.masked_fill(~shown, -math.inf), v)


def prefix_of_documents(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    return attend_by_torch(
        q, k, v, compare_documents(m.ids) & (m.flags[:, None, None, :] | (list_distances(q.shape[2]) >= 0))
    )


def prefix_capped_sloped(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    scores = torch.tanh(_products(q, k) / CAP) * CAP + _bias(m.slopes, q.shape[2])
    shown = compare_documents(m.ids) & (m.flags[:, None, None, :] | (list_distances(q.shape[2]) >= 0))
    return _weigh(scores.masked_fill(~shown, -math.inf), v)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, shown: Callable[..., Tensor], change: Callable[..., Tensor] | None
) -> Tensor:
    mask = create_block_mask(shown, q.shape[0], None, q.shape[2], q.shape[2], device=q.device)
    return flex_attention(q, k, v, score_mod=change, block_mask=mask, enable_gqa=True)


def flex_everything(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return m.ids[row, query] == m.ids[row, key]

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def first(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return m.flags[row, key]

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return CAP * torch.tanh(score / CAP) + m.slopes[head] * (key - query)

    return _flex(q, k, v, and_masks(same, or_masks(first, causal)), change)


def flex_prefix_window(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return m.ids[row, query] == m.ids[row, key]

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < 3

    def first(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return m.flags[row, key]

    return _flex(q, k, v, and_masks(same, or_masks(first, and_masks(causal, near))), None)


def flex_prefix(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def first(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < m.starts[row]

    return _flex(q, k, v, or_masks(causal, first), None)


def flex_sloped(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - m.slopes[head] * (query - key)

    return _flex(q, k, v, causal, change)


_ALL = (
    capped, capped_documents, capped_window, capped_both_ways, sloped, sloped_by_keys, sloped_before_factor,
    sloped_by_distance,
    sloped_documents, sloped_both_ways, prefix, prefix_added, prefix_of_constant_length, prefix_of_documents,
    prefix_capped_sloped, prefix_beside_window, prefix_in_window, flex_everything, flex_prefix, flex_prefix_window,
    flex_sloped,
)  # fmt: skip
NOTATIONS: dict[str, Attend] = {f.__name__: f for f in _ALL}


class ScoredLayer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, HIDDEN * KV_HEADS // HEADS) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, marks: Marks) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(NOTATIONS[self.name](q, k, v, marks).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class ScoredDecoder(nn.Module):
    """In float64. Tokens, targets, document ids and flags are ``[batch, positions]``, starts ``[batch]``. The slopes
    are a buffer or, if they are trained, a parameter."""

    def __init__(self, name: str, layers: int = 2, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(ScoredLayer(name) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        slopes = 0.7 ** torch.arange(1, HEADS + 1)
        if trained:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor, ids: Tensor, starts: Tensor, flags: Tensor) -> dict[str, Tensor]:
        x, marks = self.embedding(tokens), Marks(ids, starts, flags, self.slopes)
        for layer in self.layers:
            x = layer(x, marks)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


def make_batch(rows: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """Random inputs of a :class:`ScoredDecoder`: tokens, targets, document ids, starts and flags."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCAB, (rows, length), generator=generator) for _ in range(2))
    ids = torch.randint(0, 4, (rows, length), generator=generator).sort(1).values
    starts = torch.randint(0, length + 1, (rows,), generator=generator)
    flags = torch.rand(rows, length, generator=generator) < 0.3
    return tokens, targets, ids, starts, flags
