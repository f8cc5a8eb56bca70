"""A small decoder and the collectives of hand-written layouts, which the examples of this folder share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, HEADS = 24, 16, 4


class Attention(nn.Module):
    """Causal attention. ``kv_heads``: heads of keys and values; several query heads share one."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.q = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, kv_heads * self.head_dim)
        self.v = nn.Linear(DIM, kv_heads * self.head_dim)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = Attention(kv_heads)
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder. ``embed``, ``norm`` and ``head`` may be ``None`` in a pipeline stage."""

    def __init__(self, layers: int = 2, kv_heads: int = HEADS, tied: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Layer(kv_heads) for i in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(DIM)
        self.head: nn.Linear | None = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def make_batch(samples: int = 4, length: int = 8, ignored: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return token ids and targets (samples, length). ``ignored``: number of ignored targets of each sample."""
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(3))
    targets = torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(4))
    for row, count in enumerate(ignored):
        targets[row, :count] = -100
    return ids, targets


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def share_of(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return the part of ``tensor`` along ``dim`` that this rank works on."""
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def reduce_gradients(module: nn.Module, mean: bool) -> None:
    """Replace every gradient by the mean or the sum over the ranks."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            if mean:
                parameter.grad /= dist.get_world_size()


class Copy(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks. It stands before a column-parallel layer."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """The sum over the ranks; the gradient passes unchanged. It stands after a row-parallel layer."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Gather(torch.autograd.Function):
    """The concatenation of the ranks' parts along ``dim``; the gradient is this rank's part of the sum over the ranks,
    if ``total``, or of its own gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, total: bool) -> Tensor:
        ctx.dim, ctx.total = dim, total
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.total:
            grad = grad.contiguous()
            dist.all_reduce(grad)
        return share_of(grad, ctx.dim).contiguous(), None, None


def keep_rows(layer: nn.Linear, rows: Tensor) -> None:
    """Make ``layer`` column-parallel: it keeps the given rows of its weight and bias."""
    layer.weight = nn.Parameter(layer.weight.detach()[rows].clone())
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows].clone())


class RowParallel(nn.Module):
    """A linear layer that keeps the given columns of the weight, and adds up the results of all ranks."""

    def __init__(self, layer: nn.Linear, columns: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach()[:, columns].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(F.linear(x, self.weight)) + self.bias


class ColumnParallel(nn.Module):
    """A linear layer that keeps the given rows of the weight. ``reduce``: whether the input's gradient is summed."""

    def __init__(self, layer: nn.Linear, rows: Tensor, reduce: bool = True) -> None:
        super().__init__()
        self.reduce = reduce
        keep_rows(layer, rows)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x) if self.reduce else x, self.weight, self.bias)
