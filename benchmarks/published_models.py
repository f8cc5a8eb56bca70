"""Published models by their dimensions: a plain decoder whose operators are the kernels that frameworks run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder. ``experts`` 0: dense. ``dense_layers``: the first ones, without experts;
    of the others the last of each ``expert_every`` has them.
    ``float_loss``: logits are cast to fp32 for the loss. ``rotary``: queries and keys are rotated. ``plain``: norms and
    rotations run operator by operator, in fp32, as PyTorch code does that no compiler or kernel of its own fuses.
    ``expert_bias``: the last product of an expert has a bias, by the weight of its row, in fp32 and kernel by kernel.
    ``outer_16``: the products of the head and of routers stay in 16 bits where those of the layers are in fp8."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    fused_attention: bool = True
    document: int = 0  # tokens that attention reaches in packed sequences; 0: the whole sequence
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    expert_every: int = 1
    q_rank: int = 0  # multi-head latent attention: ranks of the compressed queries, keys and values, and rotary size
    kv_rank: int = 0
    rope_dim: int = 0
    adapters: int = 0  # rank of low-rank adapters; the rest is frozen
    head_norm: bool = False  # norms over the heads of queries and keys
    ahead: bool = (
        False  # the last layer predicts one more token: its input is projected, the head and its loss run twice
    )
    float_loss: bool = False
    rotary: bool = False
    plain: bool = False
    outer_16: bool = False
    repeated: bool = False  # keys and values are repeated for each query head before ranks exchange them
    expert_bias: bool = False


class Norm(nn.Module):
    """Layer norm, or RMS norm in gated models."""

    def __init__(self, size: int, rms: bool, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = None if rms else nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and self.plain:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Adapted(nn.Module):
    """A frozen projection with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def projection(shape: Shape, inputs: int, outputs: int, adapted: bool = True) -> nn.Module:
    """A linear layer; with adapters those of queries, keys and values are ``adapted``."""
    bias = not shape.gated
    if shape.adapters and adapted:
        return Adapted(inputs, outputs, shape.adapters, bias)
    return nn.Linear(inputs, outputs, bias=bias)


def rotated(x: Tensor, plain: bool) -> Tensor:
    """``x``, ``[..., size]``, by angles of which numbers stand for the tables, which are small: as one kernel does it,
    that reads and writes ``x`` once, or operator by operator."""
    if not plain:
        return x * 0.5
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * 0.5 + torch.cat([-second, first], -1) * 0.5).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; unfused it makes its scores, as frameworks did before FlashAttention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.fused, self.document = shape.fused_attention, shape.document
        self.rotary, self.plain, self.repeated = shape.rotary, shape.plain, shape.repeated
        norms = (Norm(shape.head_dim, rms=True, plain=shape.plain) for _ in range(2))
        self.norm_q, self.norm_k = norms if shape.head_norm else (None, None)
        self.q = projection(shape, shape.hidden, shape.heads * shape.head_dim)
        self.k = projection(shape, shape.hidden, shape.kv_heads * shape.head_dim)
        self.v = projection(shape, shape.hidden, shape.kv_heads * shape.head_dim)
        self.out = projection(shape, shape.heads * shape.head_dim, shape.hidden, adapted=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        samples, tokens = (batch * length // self.document, self.document) if self.document else (batch, length)
        q = self.q(x).view(samples, tokens, self.heads, self.head_dim)
        k = self.k(x).view(samples, tokens, self.kv_heads, self.head_dim)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        if self.rotary:
            q, k = rotated(q, self.plain), rotated(k, self.plain)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v(x).view(samples, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.repeated:
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) * 1.0 for each in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            if self.heads != self.kv_heads:
                k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
            scores = torch.matmul(q * (1 / math.sqrt(self.head_dim)), k.transpose(2, 3))
            weights = F.relu(torch.softmax(scores, -1))  # stands for dropout: one more pass, one more result kept
            y = torch.matmul(weights, v)  # their softmax masks as it goes
        y = y.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim)
        result: Tensor = self.out(y)
        return result


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2), without the rotation itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.head_dim + shape.rope_dim
        self.q_down = nn.Linear(shape.hidden, shape.q_rank, bias=False)
        self.q_norm = Norm(shape.q_rank, rms=True)
        self.q_up = nn.Linear(shape.q_rank, shape.heads * wide, bias=False)
        self.kv_down = nn.Linear(shape.hidden, shape.kv_rank, bias=False)
        self.k_rope = nn.Linear(shape.hidden, shape.rope_dim, bias=False)
        self.kv_norm = Norm(shape.kv_rank, rms=True)
        self.k_up = nn.Linear(shape.kv_rank, shape.heads * shape.head_dim, bias=False)
        self.v_up = nn.Linear(shape.kv_rank, shape.heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        s = self.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, length, s.heads, -1).transpose(1, 2)
        latent = self.kv_norm(self.kv_down(x))
        k = self.k_up(latent).view(batch, length, s.heads, -1)
        rope = self.k_rope(x).view(batch, length, 1, s.rope_dim).expand(-1, -1, s.heads, -1)
        k = torch.cat([k, rope], -1).transpose(1, 2)
        v = self.v_up(latent).view(batch, length, s.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return result


class Outer(nn.Linear):
    """A linear layer in a form that stays in 16 bits where products with weights are put in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.einsum("ri,oi->ro", x.reshape(-1, x.shape[-1]), self.weight)
        return result.view(*x.shape[:-1], self.weight.shape[0])


def gated(gate: Tensor, up: Tensor, plain: bool) -> Tensor:
    """``up``, gated. As one kernel does it, a product stands for that: it reads both, which are all that it keeps, and
    writes one."""
    return (F.silu(gate) if plain else gate) * up


class Mlp(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.gate = projection(shape, shape.hidden, width, adapted=False) if shape.gated else None
        self.up = projection(shape, shape.hidden, width, adapted=False)
        self.down = projection(shape, width, shape.hidden, adapted=False)
        self.plain = shape.plain

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = F.gelu(h, approximate="tanh") if self.gate is None else gated(self.gate(x), h, self.plain)
        result: Tensor = self.down(h)
        return result


class Experts(nn.Module):
    """Dropless experts with packed weights: sort by expert, grouped products, combine."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.topk, self.plain = shape.topk, shape.plain
        self.router = (Outer if shape.outer_16 else nn.Linear)(shape.hidden, shape.experts, bias=False)
        self.up = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.moe_ffn))
        self.gate = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.moe_ffn)) if shape.gated else None
        self.down = nn.Parameter(torch.zeros(shape.experts, shape.moe_ffn, shape.hidden))
        self.bias = nn.Parameter(torch.zeros(shape.experts, shape.hidden)) if shape.expert_bias else None
        self.shared = Mlp(shape, shape.shared_ffn) if shape.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(torch.softmax(self.router(flat), -1), self.topk)
        experts = chosen.reshape(-1)
        by_expert, order = torch.sort(experts)
        rows = flat[order // self.topk]
        num_experts = self.up.shape[0]
        counts = torch.histc(by_expert.float(), bins=num_experts, min=0, max=num_experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        h = torch._grouped_mm(rows, self.up, offs=ends)
        of_rows = weights.reshape(-1)[order].unsqueeze(-1)
        if self.gate is None or self.plain:
            h = F.gelu(h) if self.gate is None else gated(torch._grouped_mm(rows, self.gate, offs=ends), h, True)
            y = torch._grouped_mm(h, self.down, offs=ends) * of_rows
        else:  # in the kernel that gates: an expert's last product is linear in it
            h = torch.addcmul(of_rows, torch._grouped_mm(rows, self.gate, offs=ends), h)
            y = torch._grouped_mm(h, self.down, offs=ends)
        if self.bias is not None:
            y = (y + self.bias[by_expert] * of_rows.float()).to(y.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=x.device)
        result = y[back].view(-1, self.topk, x.shape[-1]).sum(1).view_as(x)
        return result if self.shared is None else result + self.shared(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (Norm(shape.hidden, shape.gated, shape.plain) for _ in range(2))
        self.attention = LatentAttention(shape) if shape.kv_rank else Attention(shape)
        later = index - shape.dense_layers
        has_experts = shape.experts > 0 and later >= 0 and later % shape.expert_every == shape.expert_every - 1
        self.mlp = Experts(shape) if has_experts else Mlp(shape, shape.ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    """Token ids and next tokens ``[batch, length]`` to the mean loss."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.gated else nn.Embedding(length, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.gated, shape.plain)
        self.head = (Outer if shape.outer_16 else nn.Linear)(shape.hidden, shape.vocab, bias=False)
        self.float_loss = shape.float_loss
        self.ahead = nn.Linear(shape.hidden, shape.hidden, bias=False) if shape.ahead else None
        if shape.tied:
            self.head.weight = self.tokens.weight
        if shape.adapters:
            self.requires_grad_(False)
            for module in self.modules():
                if isinstance(module, Adapted):
                    module.down.requires_grad_(True)
                    module.up.requires_grad_(True)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(x, targets)
        return loss if self.ahead is None else loss + self.loss(self.ahead(x), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        logits = (logits.float() if self.float_loss else logits).view(-1, logits.shape[-1])
        # Written out as the frameworks of the rows run it, operator by operator: cross_entropy would be planned as one.
        normalizer = torch.logsumexp(logits, -1, keepdim=True)
        return (normalizer - logits.gather(-1, targets.view(-1, 1))).mean()


class Stack(nn.Module):
    """The layers alone, from activations ``[batch, length, hidden]`` to a scalar."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def build(shape: Shape, length: int, dtype: torch.dtype) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model on the meta device, and inputs of two samples; without a vocabulary the layers alone."""
    with torch.device("meta"):
        if not shape.vocab:
            return Stack(shape).to(dtype), {"x": torch.zeros(2, length, shape.hidden, dtype=dtype)}
        model = Decoder(shape, length).to(dtype)
        ids = torch.zeros(2, length, dtype=torch.long)
    return model, {"ids": ids, "targets": ids.clone()}
