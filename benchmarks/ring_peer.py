"""The peer of context parallelism: a hand-written ring attention over two or more ranks, zigzag, with DDP around it.

What people write by hand (after zhuzilin/ring-flash-attention): keys and values are sent on while the present ones are
attended to by torch's fused kernel, results are merged by the logarithms of their sums, gradients of keys and values
travel behind. Of a causal sequence in zigzag order a rank sees all of its own half pairs, then the first half of the
keys of the ranks before it, and with its second half all keys of the ranks after it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Attention, Llama, Step, Workload, _rotate

aten = torch.ops.aten


def _start(parts: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(p) for p in parts]
    transfers = [dist.P2POp(dist.isend, p, (rank + 1) % size) for p in parts]
    transfers += [dist.P2POp(dist.irecv, p, (rank - 1) % size) for p in received]
    return dist.batch_isend_irecv(transfers), received


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _seen(q: Tensor, k: Tensor, step: int) -> tuple[slice, slice]:
    """Which of a rank's queries see which of the keys that come in ``step``."""
    half, rank = q.shape[2] // 2, dist.get_rank()
    if step == 0:
        return slice(None), slice(None)
    return (slice(None), slice(0, half)) if step <= rank else (slice(half, None), slice(None))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = dist.get_world_size()
        k, v = k.contiguous(), v.contiguous()
        ctx.own = k, v
        out = lse = None
        for step in range(size):
            works, following = _start([k, v]) if step + 1 < size else ([], [])
            rows, keys = _seen(q, k, step)
            groups = q.shape[1] // k.shape[1]
            wide = (x[:, :, keys].repeat_interleave(groups, 1) for x in (k, v))
            o, s = aten._scaled_dot_product_flash_attention_for_cpu(q[:, :, rows], *wide, 0.0, step == 0)
            if out is None:
                out, lse = o, s
            else:
                before = lse[:, :, rows]
                both = torch.logaddexp(before, s)
                out[:, :, rows] = out[:, :, rows] * (before - both).exp()[..., None] + o * (s - both).exp()[..., None]
                lse[:, :, rows] = both
            _wait(works)
            k, v = following or (k, v)
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse = ctx.saved_tensors
        k, v = ctx.own
        size, groups = dist.get_world_size(), q.shape[1] // k.shape[1]
        of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        behind: tuple[list[Any], list[Tensor]] = ([], [])
        for step in range(size):
            works, following = _start([k, v]) if step + 1 < size else ([], [])
            rows, keys = _seen(q, k, step)
            wide = (x[:, :, keys].repeat_interleave(groups, 1) for x in (k, v))
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, rows], q[:, :, rows], *wide, out[:, :, rows], lse[:, :, rows], 0.0, step == 0
            )
            if step:
                _wait(behind[0])
                of_k, of_v = behind[1]
            of_q[:, :, rows] += found[0]
            of_k[:, :, keys] += found[1].unflatten(1, (-1, groups)).sum(2)
            of_v[:, :, keys] += found[2].unflatten(1, (-1, groups)).sum(2)
            behind = _start([of_k, of_v])
            _wait(works)
            k, v = following or (k, v)
        _wait(behind[0])
        return of_q, *behind[1]


class _RingAttention(Attention):
    def __init__(self, whole: Attention) -> None:
        nn.Module.__init__(self)
        self.head_dim = whole.head_dim
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(whole, name))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = _Ring.apply(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))


def _own(x: Tensor, dim: int) -> Tensor:
    """This rank's piece from either end."""
    rank, pieces = dist.get_rank(), x.chunk(2 * dist.get_world_size(), dim)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim)


def ring(work: Workload) -> Step:
    whole = work.whole()
    model = whole.model
    assert isinstance(model, Llama)
    for layer in model.layers:
        layer.attention = _RingAttention(layer.attention)
    for name in ("cos", "sin"):  # no buffers any more: DDP would make them alike
        own = _own(getattr(model, name), 0)
        delattr(model, name)
        setattr(model, name, own)
    parallel = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    tokens, target = (_own(t, 1) for t in work.batch())

    def step() -> float:
        parallel.zero_grad(set_to_none=True)
        loss = parallel(tokens, target)
        shared = loss.detach() / dist.get_world_size()
        under_way = dist.all_reduce(shared, async_op=True)
        loss.backward()
        under_way.wait()
        return shared.item()

    return step
