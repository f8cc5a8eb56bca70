"""The peer of expert parallelism: a mixture of experts over two or more ranks by hand, with DDP around everything else.

What people write by hand (Megatron's and torchtitan's token dispatchers): rows sorted by expert, the counts exchanged
first, then the rows, in all-to-alls with uneven splits; the rows that came are sorted by expert once more for a grouped
product, and all the way back. Experts' gradients are whole on their rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Experts, Llama, Step, Workload


def _exchange(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent)
    return out


class _AllToAll(torch.autograd.Function):
    """Rows ``[sum(sent), dim]`` to their ranks; gradients come back by the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        return _exchange(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return _exchange(grad, received, sent), None, None


class _SharedExperts(Experts):
    """``num_experts / ranks`` experts on each rank, in order."""

    def __init__(self, whole: Experts) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.num_chosen = whole.num_experts, whole.num_chosen
        self.router = whole.router
        size, rank = dist.get_world_size(), dist.get_rank()
        for name in ("gate_up", "down"):
            # The mean over ranks that DDP takes of all other gradients.
            own = nn.Parameter(getattr(whole, name).detach().chunk(size)[rank].clone())
            own.register_hook(lambda grad: grad / dist.get_world_size())
            setattr(self, name, own)

    def forward(self, x: Tensor) -> Tensor:
        size = dist.get_world_size()
        rows = x.flatten(0, 1)
        shares, experts = self.choose(rows)
        order = experts.flatten().argsort()
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        counts, theirs = counts.view(size, -1), theirs.view(size, -1)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()

        came = _AllToAll.apply(rows[order // self.num_chosen], sent, received)
        local = torch.arange(theirs.shape[1]).repeat(size).repeat_interleave(theirs.flatten())
        sorting = local.argsort(stable=True)
        made = self.by_expert(came[sorting], theirs.sum(0).cumsum(0).int())
        made = torch.empty_like(made).index_copy(0, sorting, made)
        y = _AllToAll.apply(made, received, sent)

        y = torch.empty_like(y).index_copy(0, order, y).view(len(rows), self.num_chosen, -1)
        return (y * shares[..., None]).sum(1).view_as(x)


def experts_model(work: Workload) -> DistributedDataParallel:
    """The model with its experts over the ranks, and with DDP around everything else."""
    whole = work.whole()
    model = whole.model
    assert isinstance(model, Llama)
    for layer in model.layers:
        layer.ffn = _SharedExperts(layer.ffn)
    experts = [n for n, _ in whole.named_parameters() if n.endswith((".gate_up", ".down"))]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, experts)
    return DistributedDataParallel(whole, gradient_as_bucket_view=True)


def all_to_all(work: Workload) -> Step:
    """Build the step: each rank has its part of the batch and its experts."""
    parallel = experts_model(work)
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, target = (t.chunk(size)[rank] for t in work.batch())

    def step() -> float:
        parallel.zero_grad(set_to_none=True)
        loss = parallel(tokens, target)
        shared = loss.detach() / size
        under_way = dist.all_reduce(shared, async_op=True)
        loss.backward()
        under_way.wait()
        return shared.item()

    return step
