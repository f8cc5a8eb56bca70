"""Decoders whose attention keeps packed documents apart, in several notations, and packings of documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

HIDDEN, HEADS, KV_HEADS, VOCAB, WINDOW, CHUNK = 32, 8, 4, 40, 3, 4
LENGTHS = (5, 1, 7, 3, 9, 2, 4, 6, 8, 3)  # two rows of 24 positions
ROW = 24

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def list_distances(length: int) -> Tensor:
    """Return query position minus key position, ``[queries, keys]``."""
    place = torch.arange(length)
    return place[:, None] - place


def compare_documents(ids: Tensor) -> Tensor:
    """Return whether query and key are of one document, ``[batch, 1, queries, keys]``."""
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def boolean(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return attend_by_torch(q, k, v, compare_documents(ids) & (list_distances(q.shape[2]) >= 0))


def additive(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    apart = torch.zeros(1, dtype=q.dtype).masked_fill(~compare_documents(ids), torch.finfo(q.dtype).min)
    later = torch.full((q.shape[2],) * 2, -math.inf, dtype=q.dtype).triu(1)
    return attend_by_torch(q, k, v, apart + later)


def subtracted(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    shown = (compare_documents(ids) & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()).to(q.dtype)
    return attend_by_torch(q, k, v, (1.0 - shown) * -1e9)


def hidden(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Hides keys of another document, or behind the query."""
    other = ids.unsqueeze(2).ne(ids.unsqueeze(1)).unsqueeze(1) | (list_distances(q.shape[2]) < 0)
    return attend_by_torch(q, k, v, torch.zeros(other.shape, dtype=q.dtype).masked_fill(other, -math.inf))


def chosen(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    shown = compare_documents(ids) & (list_distances(q.shape[2]) >= 0)
    zero, lowest = torch.zeros((), dtype=q.dtype), torch.full((), -math.inf, dtype=q.dtype)
    return attend_by_torch(q, k, v, torch.where(shown, zero, lowest))


def indexed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """By index, as mask functions of a query's and a key's index are evaluated."""
    place = torch.arange(q.shape[2])
    row = torch.arange(q.shape[0])[:, None, None, None]
    query, key = place[None, None, :, None], place[None, None, None, :]
    return attend_by_torch(q, k, v, (ids[row, query] == ids[row, key]) & (key <= query))


def triangular(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return attend_by_torch(q, k, v, (1 - compare_documents(ids).to(q.dtype).tril()) * torch.finfo(q.dtype).min)


def lower(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return attend_by_torch(q, k, v, compare_documents(ids).tril())


def window(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    distance = list_distances(q.shape[2])
    return attend_by_torch(q, k, v, compare_documents(ids) & (distance >= 0) & (distance < WINDOW))


def both_ways(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return attend_by_torch(q, k, v, compare_documents(ids))


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def eager(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """By elementary operators, as the eager attention of transformers."""
    shown = compare_documents(ids) & (list_distances(q.shape[2]) >= 0)
    mask = torch.zeros(1, dtype=q.dtype).masked_fill(~shown, torch.finfo(q.dtype).min)
    scores = q @ _repeated(k, q.shape[1]).transpose(2, 3) * q.shape[-1] ** -0.5 + mask
    return torch.softmax(scores, -1).to(q.dtype) @ _repeated(v, q.shape[1])


def eager_factor_last(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The mask is added before the scores are scaled, as in CodeGen."""
    apart = torch.zeros(1, dtype=q.dtype).masked_fill(~compare_documents(ids), torch.finfo(q.dtype).min)
    scores = (q @ _repeated(k, q.shape[1]).transpose(2, 3)).masked_fill(list_distances(q.shape[2]) < 0, -math.inf)
    return torch.softmax((scores + apart) / q.shape[-1] ** 0.5, -1) @ _repeated(v, q.shape[1])


def differing(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The difference of the ids is 0."""
    difference = ids[:, None, :, None] - ids[:, None, None, :]
    return attend_by_torch(q, k, v, (difference == 0) & (list_distances(q.shape[2]) >= 0))


def magnitude(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    difference = (ids[:, None, :, None] - ids[:, None, None, :]).abs()
    return attend_by_torch(q, k, v, (difference < 1) & (list_distances(q.shape[2]) >= 0))


def logarithm(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    shown = compare_documents(ids) & (list_distances(q.shape[2]) >= 0)
    return attend_by_torch(q, k, v, shown.to(q.dtype).log())


def product(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Ones and zeros are multiplied, and zeros are hidden."""
    shown = compare_documents(ids) * torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril()
    return attend_by_torch(q, k, v, torch.zeros_like(shown).masked_fill_(shown == 0, -math.inf))


def assigned(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    shown = compare_documents(ids) & (list_distances(q.shape[2]) >= 0)
    mask = torch.full(shown.shape, -math.inf, dtype=q.dtype)
    mask[shown] = 0.0
    return attend_by_torch(q, k, v, mask)


def least(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The smaller one of two additive masks."""
    later = torch.full((q.shape[2],) * 2, -math.inf, dtype=q.dtype).triu(1)
    return attend_by_torch(q, k, v, torch.minimum(torch.where(compare_documents(ids), 0.0, -1e30).to(q.dtype), later))


def chosen_from_mask(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """A causal mask where documents are the same."""
    later = torch.full((q.shape[2],) * 2, -math.inf, dtype=q.dtype).triu(1)
    return attend_by_torch(q, k, v, torch.where(compare_documents(ids), later, -math.inf))


def copied(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The ids of queries are repeated for each key, and transposed."""
    of_queries = ids[:, :, None].repeat(1, 1, ids.shape[1])
    return attend_by_torch(q, k, v, (of_queries == of_queries.mT)[:, None].tril())


def each_head(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """One mask for each row and head, as MultiheadAttention takes it."""
    shown = compare_documents(ids)[:, 0].tril().repeat_interleave(q.shape[1], 0)
    return attend_by_torch(q, k, v, shown.view(q.shape[0], q.shape[1], *shown.shape[1:]))


def joined(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Rows and heads are one dim."""
    shown = compare_documents(ids).tril().expand(-1, q.shape[1], -1, -1).flatten(0, 1)
    k, v = (_repeated(x, q.shape[1]).flatten(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.flatten(0, 1), k, v, shown).view(q.shape)


def joined_eager(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    shown = compare_documents(ids)[:, 0].tril()
    mask = torch.where(shown, 0.0, -1e30).to(q.dtype).repeat_interleave(q.shape[1], 0)
    k, v = (_repeated(x, q.shape[1]).flatten(0, 1) for x in (k, v))
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def einsum(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Positions come before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, _repeated(k, q.shape[1]), _repeated(v, q.shape[1])))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~compare_documents(ids).tril(), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def einsum_groups(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Queries that share a key have a dim of their own."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bkgqd,bksd->bkgqs", grouped, k) * q.shape[-1] ** -0.5
    scores = torch.where(compare_documents(ids)[:, :, None].tril(), scores, -math.inf)
    return torch.einsum("bkgqs,bksd->bkgqd", scores.softmax(-1), v).flatten(1, 2)


def broadcast_groups(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = grouped @ k[:, :, None].mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~compare_documents(ids)[:, :, None].tril(), -math.inf)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


def restarted(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Reads positions, which restart at each document."""
    changes = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    ordered = positions[:, None, :, None] >= positions[:, None, None, :]
    return attend_by_torch(q, k, v, compare_documents(changes.cumsum(-1)) & ordered)


def restarted_window(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    changes = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    query, key = positions[:, None, :, None], positions[:, None, None, :]
    return attend_by_torch(q, k, v, compare_documents(changes.cumsum(-1)) & (query >= key) & (key > query - WINDOW))


def chunked(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Chunks of positions, which restart in each document."""
    changes = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    shown = compare_documents(changes.cumsum(-1)) & compare_documents(positions // CHUNK)
    return attend_by_torch(q, k, v, shown.tril())


def chunked_indexed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Chunks of a query's and a key's position, as mask functions of transformers compute them."""
    ids = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, place = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[2])
    query, key = place[None, None, :, None], place[None, None, None, :]
    of_query, of_key = positions[row, query], positions[row, key]
    shown = (ids[row, query] == ids[row, key]) & (of_key // CHUNK == of_query // CHUNK) & (of_key <= of_query)
    return attend_by_torch(q, k, v, shown)


def chunked_added(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """A sum of additive masks of documents, chunks and earlier positions, in eager attention."""
    ids = (positions == 0).cumsum(-1)
    apart = [torch.where(compare_documents(x), 0.0, -1e30).to(q.dtype) for x in (ids, positions // CHUNK)]
    later = torch.full((q.shape[2],) * 2, -math.inf, dtype=q.dtype).triu(1)
    scores = q @ _repeated(k, q.shape[1]).mT * q.shape[-1] ** -0.5 + apart[0] + apart[1] + later
    return scores.softmax(-1) @ _repeated(v, q.shape[1])


def chunked_window(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The difference of the numbers of chunks is 0, and a window."""
    ids, chunks = (positions == 0).cumsum(-1), torch.div(positions, CHUNK, rounding_mode="floor")
    apart = chunks[:, None, :, None] - chunks[:, None, None, :] != 0
    distance = list_distances(q.shape[2])
    return attend_by_torch(q, k, v, compare_documents(ids) & ~apart & (distance >= 0) & (distance < WINDOW))


def row_chunked(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Chunks of positions in the row, of which the first and the last one are shorter, and documents."""
    place = torch.arange(q.shape[2])
    same = (place[:, None] + 2) // CHUNK == (place + 2) // CHUNK
    return attend_by_torch(q, k, v, compare_documents(ids).tril() & same)


def only_chunked(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Chunks of positions in the row; a row is one document."""
    place = torch.arange(q.shape[2])
    return attend_by_torch(q, k, v, (place[:, None] // CHUNK == place // CHUNK) & (place[:, None] >= place))


_BY_IDS = (
    boolean, additive, subtracted, hidden, chosen, indexed, triangular, lower, window, both_ways, eager,
    eager_factor_last, differing, magnitude, logarithm, product, assigned, least, chosen_from_mask, copied, each_head,
    joined, joined_eager, einsum, einsum_groups, broadcast_groups,
)  # fmt: skip
BY_IDS: dict[str, Attend] = {f.__name__: f for f in _BY_IDS}
_BY_POSITIONS = restarted, restarted_window, chunked, chunked_indexed, chunked_added, chunked_window
BY_POSITIONS: dict[str, Attend] = {f.__name__: f for f in _BY_POSITIONS}
NOTATIONS = BY_IDS | BY_POSITIONS
# What these attend to depends on where documents begin, so that documents have other results alone.
BY_ROWS: dict[str, Attend] = {f.__name__: f for f in (row_chunked, only_chunked)}


def attend_alone(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of one document alone, under the mask ``name`` without other documents."""
    distance, chunks = list_distances(q.shape[2]), torch.arange(q.shape[2]) // CHUNK
    if "window" in name or "chunked" in name:
        shown = (distance >= 0) & (distance < (WINDOW if "window" in name else q.shape[2]))
        return attend_by_torch(q, k, v, shown & (chunks[:, None] == chunks) if "chunked" in name else shown)
    return F.scaled_dot_product_attention(q, k, v, is_causal=name != "both_ways", enable_gqa=True)


class PackedLayer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, HIDDEN * KV_HEADS // HEADS) for _ in range(2))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, data: Tensor | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = attend_alone(self.name, q, k, v) if data is None else (NOTATIONS | BY_ROWS)[self.name](q, k, v, data)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class PackedDecoder(nn.Module):
    """In float64. Tokens, targets, positions in the document and document ids are ``[batch, positions]``."""

    def __init__(self, name: str, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.embedding, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(PackedLayer(name) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.double()

    def logits(self, tokens: Tensor, positions: Tensor, data: Tensor | None) -> Tensor:
        x = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, data)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, ids: Tensor) -> dict[str, Tensor]:
        logits = self.logits(tokens, positions, positions if self.name in BY_POSITIONS else ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


Document = tuple[Tensor, Tensor]  # tokens and targets


def make_documents(lengths: Sequence[int] = LENGTHS) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for n in lengths:
        tokens, targets = (torch.randint(0, VOCAB, (n,), generator=generator) for _ in range(2))
        found.append((tokens, targets.masked_fill(torch.rand(n, generator=generator) < 0.3, -100)))
    return found


def pack(documents: Sequence[Document], order: Sequence[int], row: int = ROW) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs of :class:`PackedDecoder`: ``documents`` in ``order``, in rows of ``row`` positions that they fill."""
    tokens, targets = (torch.cat([documents[d][i] for d in order]).view(-1, row) for i in range(2))
    sizes = [len(documents[d][0]) for d in order]
    positions = torch.cat([torch.arange(n) for n in sizes]).view(-1, row)
    ids = torch.cat([torch.full((n,), 7 * d + 3) for n, d in zip(sizes, order, strict=True)]).view(-1, row)
    return tokens, targets, positions, ids


def list_packings(lengths: Sequence[int], count: int, row: int = ROW) -> list[list[int]]:
    """Different orders of documents of ``lengths`` in which rows of ``row`` positions end with a document."""
    generator, found = torch.Generator().manual_seed(2), list[list[int]]()
    while len(found) < count:
        order = torch.randperm(len(lengths), generator=generator).tolist()
        ends = {sum(lengths[d] for d in order[: i + 1]) for i in range(len(order))}
        if all(e in ends for e in range(row, sum(lengths) + 1, row)) and order not in found:
            found.append(order)
    return found


def run_alone(
    model: PackedDecoder | RestartingDecoder, documents: Sequence[Document], order: Sequence[int], row: int = ROW
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, logits and gradients of the documents, each in a row of its own."""
    model.zero_grad()
    parts = [model.logits(documents[d][0][None], torch.arange(len(documents[d][0]))[None], None)[0] for d in order]
    logits, targets = torch.cat(parts), torch.cat([documents[d][1] for d in order])
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), logits.detach().view(-1, row, VOCAB), gradients


class RestartingLayer(nn.Module):
    """A causal convolution and a recurrence that restart at each document, and attention within documents.

    ``taps``: the factors of the convolution, ``[channels, positions]``; the last one is that of the own position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.decay = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.taps, self.out = nn.Parameter(torch.randn(HIDDEN, 4) / 2), nn.Linear(HIDDEN, HIDDEN)
        self.attention = PackedLayer("boolean")

    def forward(self, x: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        values, gate = self.into(self.norm(x)).chunk(2, -1)
        found = values * self.taps[:, -1]
        for by in range(1, self.taps.shape[1]):
            own = F.pad(ids, (by, 0), value=-1)[:, : ids.shape[1]] == ids
            earlier = F.pad(values, (0, 0, by, 0))[:, : ids.shape[1]]
            found = found + torch.where(own[..., None], earlier, 0.0) * self.taps[:, -1 - by]
        kept = torch.sigmoid(self.decay(found)) * (positions != 0)[..., None]
        state, states = torch.zeros_like(found[:, 0]), []
        for place in range(found.shape[1]):
            state = kept[:, place] * state + found[:, place]
            states.append(state)
        return self.attention(x + self.out(torch.stack(states, 1) * F.silu(gate)), ids)


class RestartingDecoder(nn.Module):
    """In float64. Its inputs are those of :class:`PackedDecoder`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(RestartingLayer() for _ in range(2))
        self.double()

    def logits(self, tokens: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, torch.zeros_like(positions) if ids is None else ids)
        return self.head(x)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, ids: Tensor) -> dict[str, Tensor]:
        logits = self.logits(tokens, positions, ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class SequenceDecoder(nn.Module):
    """In float64. Attends within sequences of different lengths by torch's ``varlen_attn``, which runs on GPUs alone.

    Tokens and targets are ``[1, positions]``, cumulated lengths ``[sequences + 1]``. Without cumulated lengths the row
    is one document, which runs anywhere.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.window = window
        self.embedding, self.qkv = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.double()

    def logits(self, tokens: Tensor, ends: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        parts = self.qkv(x[0]).split([HIDDEN, HIDDEN // 2, HIDDEN // 2], -1)
        q, k, v = (part.unflatten(-1, (-1, HIDDEN // HEADS)) for part in parts)
        if ends is None:
            name = "boolean" if self.window is None else "window"
            attended = attend_alone(name, *(a.transpose(0, 1)[None] for a in (q, k, v)))[0].transpose(0, 1)
        else:
            before = -1 if self.window is None else self.window - 1
            attended = varlen_attn(q, k, v, ends, ends, ROW, ROW, window_size=(before, 0), enable_gqa=True)
        return self.head(x + self.out(attended.flatten(1))[None])

    def forward(self, tokens: Tensor, targets: Tensor, ends: Tensor) -> dict[str, Tensor]:
        logits = self.logits(tokens, ends)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}
