"""Small decoders whose attention differs in its mask, for context parallelism: plain modules, every dim divisible."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ, HIDDEN, VOCAB, HEADS, WINDOW = 48, 32, 40, 8, 10


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _distance(q: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    return place[:, None] - place


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    seen = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - WINDOW)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_distance(q).abs() <= WINDOW // 2, enable_gqa=True)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.arange(1, HEADS + 1, dtype=q.dtype)[:, None, None] / HEADS
    bias = (-slopes * _distance(q).abs()).masked_fill(_distance(q) < 0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), enable_gqa=True)


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Everyone sees the first positions, and what is before themselves."""
    seen = (_distance(q) >= 0) | (torch.arange(q.shape[-2]) < WINDOW)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = 5.0 * torch.tanh(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) / 5.0)
    return scores.masked_fill(_distance(q) < 0, -math.inf).softmax(-1) @ v


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (full, causal, window, both_sides, alibi, prefix, soft_cap)
}


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """As Hugging Face's models write it."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A window, of heads that are repeated where positions come first."""
    k, v = (x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[1], 2).transpose(1, 2) for x in (k, v))
    distance = _distance(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))


def dilated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every second of the positions before."""
    seen = (_distance(q) >= 0) & (_distance(q) % 2 == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of positions that do not add up to one, so that no fused kernel computes them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).sigmoid()
    return scores.masked_fill(_distance(q) < 0, 0.0) @ v


IRREGULAR = {"dilated": dilated, "without_softmax": without_softmax}  # no band of positions, and no attention
REPEATED = {"expanded": expanded, "interleaved": interleaved}  # key heads, one for each query head
BANDS = ("full", "causal", "window", "both_sides")


class Layer(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], kv_heads: int) -> None:
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, HIDDEN * kv_heads // HEADS) for _ in range(2))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (a * cos + torch.cat([-a[..., 2:], a[..., :2]], -1) * sin for a in (q, k))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """In float64. Tokens and targets ``[batch, SEQ]``; rotary positions, masked targets are ignored."""

    def __init__(self, masks: tuple[str, ...] = ("causal", "causal"), kv_heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer((MASKS | REPEATED | IRREGULAR)[m], kv_heads) for m in masks)
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        angle = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        angle = torch.cat([angle, angle], -1)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class NextToken(nn.Module):
    """The loss of next tokens as it is often written: the last position has none."""

    def __init__(self, by_position: bool) -> None:
        super().__init__()
        self.decoder, self.by_position = Decoder(), by_position

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits, following = self.decoder(tokens, targets)["logits"][:, :-1], targets[:, 1:]
        if self.by_position:
            return F.cross_entropy(logits.transpose(1, 2), following)
        return F.cross_entropy(logits.reshape(-1, VOCAB), following.reshape(-1), reduction="sum")


class Mixed(nn.Module):
    """What is mixed along the sequence is no attention: a convolution, or a running sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4, padding=3, groups=HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        if self.kind == "convolution":
            mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        else:
            mixed = x.cumsum(1)
        logits = self.head(x + self.down(F.gelu(self.up(mixed))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


def inputs(batch: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCAB, (batch, SEQ), generator=generator) for _ in range(2))
    return tokens, targets.masked_fill(torch.rand((batch, SEQ), generator=generator) < 0.3, -100)
