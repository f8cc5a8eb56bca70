"""The peers: the same training step written by hand, or with what torch offers.

* ``explicit``: Megatron's layout with hand-placed collectives, as few as it allows: one all-reduce per half layer in
  each direction, vocabulary-parallel head and cross-entropy (three small all-reduces), a whole embedding.
* ``dtensor``: ``parallelize_module`` with the same layout.
* ``ddp``: ``DistributedDataParallel`` with gradients as bucket views.
* ``fsdp``: FSDP2, ``fully_shard`` on every layer and on the rest: parameters, gradients and optimizer states shared.
* ``ring``: a ring attention by hand (``ring_peer.py``), with DDP.
* ``all-to-all``: experts over the ranks by hand (``experts_peer.py``), with DDP around everything else.
* ``gpipe``, ``1f1b``: ``torch.distributed.pipelining`` with half of the layers on each rank; ``interleaved``,
  ``zb-1p``, ``zb-v``, ``dualpipe-v``: its schedules of two virtual stages on each rank.

Each builds a :data:`benchmarks.common.Step` for one rank of a Gloo group of two. A step gives every rank the loss of
the whole batch, as ours does: DDP adds up its ranks' losses behind backward, pipelining hands on the last rank's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    Attention,
    FeedForward,
    Llama,
    MlpLayer,
    Step,
    WithLoss,
    Workload,
)
from benchmarks.experts_peer import all_to_all
from benchmarks.ring_peer import ring

NUM_MICROBATCHES = 4

# --- explicit collectives ---------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Identity on a value that is equal on all ranks; its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    """The sum of all ranks' values; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits ``[tokens, vocab / ranks]`` whose vocabulary is cut over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        start = dist.get_rank() * logits.shape[1]
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        exponents = (logits - top[:, None]).exp_()
        mine = (target >= start) & (target < start + logits.shape[1])
        index = (target - start).clamp_(0, logits.shape[1] - 1)[:, None]
        picked = torch.where(mine, logits.gather(1, index)[:, 0] - top, 0.0)
        sums = torch.stack((exponents.sum(1), picked))
        dist.all_reduce(sums)
        exponents.div_(sums[0][:, None])
        ctx.save_for_backward(exponents, index, mine)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, index, mine = ctx.saved_tensors
        softmax.scatter_add_(1, index, -mine[:, None].to(softmax.dtype))
        return softmax.mul_(grad / len(softmax)), None


def _cut(linear: nn.Linear, dim: int) -> nn.Linear:
    """This rank's part of a linear layer: rows of the weight (and the bias) for dim 0, columns for dim 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = linear.weight.detach().chunk(size, dim)[rank].clone()
    local = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None and dim == 0, device="meta")
    local.weight = nn.Parameter(weight)
    if linear.bias is not None and dim == 0:
        local.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].clone())
    return local


class _ExplicitMlpLayer(nn.Module):
    def __init__(self, layer: MlpLayer) -> None:
        super().__init__()
        self.up, self.down, self.bias = _cut(layer.up, 0), _cut(layer.down, 1), layer.down.bias

    def forward(self, x: Tensor) -> Tensor:
        inner = _Copy.apply(x) if x.requires_grad else x
        return x + (_Sum.apply(self.down(F.gelu(self.up(inner)))) + self.bias)


class _ExplicitAttention(Attention):
    def __init__(self, whole: Attention) -> None:
        nn.Module.__init__(self)
        self.head_dim = whole.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, _cut(getattr(whole, name), 0))
        self.o_proj = _cut(whole.o_proj, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _Sum.apply(super().forward(_Copy.apply(x), cos, sin))


class _ExplicitFeedForward(FeedForward):
    def __init__(self, whole: FeedForward) -> None:
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj = _cut(whole.gate_proj, 0), _cut(whole.up_proj, 0)
        self.down_proj = _cut(whole.down_proj, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(super().forward(_Copy.apply(x)))


class _ExplicitHead(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.linear = _cut(whole, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Copy.apply(x))


def _vocab_parallel_loss(logits: Tensor, target: Tensor) -> Tensor:
    return _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), target.flatten())


def _replace(module: nn.Module, kinds: dict[type[nn.Module], Callable[[Any], nn.Module]]) -> None:
    for name, child in module.named_children():
        if type(child) in kinds:
            setattr(module, name, kinds[type(child)](child))
        else:
            _replace(child, kinds)


def _train(model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(*batch)
        loss.backward()
        return loss.item()

    return step


def explicit_model(work: Workload) -> WithLoss:
    model = work.whole()
    kinds = {MlpLayer: _ExplicitMlpLayer, Attention: _ExplicitAttention, FeedForward: _ExplicitFeedForward}
    _replace(model, kinds)
    if isinstance(model.model, Llama):
        assert isinstance(model.model.head, nn.Linear)
        model.model.head = _ExplicitHead(model.model.head)
        model.loss = _vocab_parallel_loss
    return model


def explicit(work: Workload) -> Step:
    return _train(explicit_model(work), work.batch())


# --- what torch offers ------------------------------------------------------------------------------------------------

_DTENSOR = {
    "layers.*.up": ColwiseParallel,
    "layers.*.down": RowwiseParallel,
    **{f"layers.*.attention.{name}": ColwiseParallel for name in ("q_proj", "k_proj", "v_proj")},
    "layers.*.attention.o_proj": RowwiseParallel,
    **{f"layers.*.ffn.{name}": ColwiseParallel for name in ("gate_proj", "up_proj")},
    "layers.*.ffn.down_proj": RowwiseParallel,
}


def dtensor(work: Workload) -> Step:
    return _train(dtensor_model(work), work.batch())


def dtensor_model(work: Workload) -> WithLoss:
    model = work.whole()
    layout: dict[str, Any] = {
        name: style() for name, style in _DTENSOR.items() if isinstance(model.model, Llama) == (name.count(".") > 2)
    }
    if isinstance(model.model, Llama):
        from torch.distributed.tensor import Replicate

        layout["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model.model, init_device_mesh("cpu", (dist.get_world_size(),)), layout)
    return model


def ddp(work: Workload) -> Step:
    return _data_parallel(ddp_model(work), work)


def ddp_model(work: Workload) -> DistributedDataParallel:
    return DistributedDataParallel(work.whole(), gradient_as_bucket_view=True)


def fsdp(work: Workload) -> Step:
    return _data_parallel(fsdp_model(work.whole()), work)


def fsdp_model(model: WithLoss) -> WithLoss:
    """``model`` with its parameters sharded over all ranks, layer by layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert isinstance(model.model.layers, nn.ModuleList)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def own_batch(work: Workload) -> tuple[Tensor, ...]:
    """This rank's part of the batch."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in work.batch())


def _data_parallel(model: nn.Module, work: Workload) -> Step:
    """A step on this rank's part of the batch; the loss is added up behind backward."""
    batch, size = own_batch(work), dist.get_world_size()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(*batch)
        whole = loss.detach() / size
        shared = dist.all_reduce(whole, async_op=True)
        loss.backward()
        shared.wait()
        return whole.item()

    return step


def _stage_module(work: Workload, stage: int, size: int) -> nn.Module:
    """One of ``size`` stages' layers, with the embedding on the first stage and the head on the last."""
    model = work.model()
    each = len(model.layers) // size
    model.layers = model.layers[stage * each : (stage + 1) * each]
    if isinstance(model, Llama):
        if stage > 0:
            model.embedding = None
        if stage < size - 1:
            model.norm = model.head = None
    return model


def pipelined(
    schedule_type: type[ScheduleGPipe] | type[Schedule1F1B],
    work: Workload,
    change: Callable[[Any], Any] = lambda module: module,
) -> tuple[nn.Module, Step]:
    """This rank's stage, and a step without an optimizer. ``change``: what is done to the stage first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _stage_module(work, rank, size)
    stage = PipelineStage(change(model), rank, size, torch.device("cpu"))
    schedule = schedule_type(stage, NUM_MICROBATCHES, loss_fn=work.loss)
    x, target = work.batch()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=target, losses=losses)
        whole = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(whole)
        return whole.item()

    return model, step


def _virtual(schedule_type: type[PipelineScheduleMulti], v_shaped: bool, work: Workload) -> Step:
    """Two stages on each rank: one after the other around the ranks, or there and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * size
    numbers = [rank, count - 1 - rank if v_shaped else size + rank]
    models = [_stage_module(work, number, count) for number in numbers]
    pairs = zip(models, numbers, strict=True)
    stages = [PipelineStage(model, number, count, torch.device("cpu")) for model, number in pairs]
    schedule = schedule_type(stages, NUM_MICROBATCHES, loss_fn=work.loss)
    x, target = work.batch()

    def step() -> float:
        for model in models:
            model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (x,) if 0 in numbers else ()
        if count - 1 in numbers:
            schedule.step(*inputs, target=target, losses=losses)
        else:
            schedule.step(*inputs)
        whole = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(whole)
        return whole.item()

    return step


def gpipe(work: Workload) -> Step:
    return pipelined(ScheduleGPipe, work)[1]


def one_f_one_b(work: Workload) -> Step:
    return pipelined(Schedule1F1B, work)[1]


def single(work: Workload) -> Step:
    """The unmodified model in this process: what every loss is compared with."""
    return _train(copy.deepcopy(work.whole()), work.batch())


PEERS: dict[str, Callable[[Workload], Step]] = {
    "explicit": explicit,
    "dtensor": dtensor,
    "ddp": ddp,
    "fsdp": fsdp,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": partial(_virtual, ScheduleInterleaved1F1B, False),
    "zb-1p": partial(_virtual, ScheduleInterleavedZeroBubble, False),
    "zb-v": partial(_virtual, ScheduleZBVZeroBubble, True),
    "dualpipe-v": partial(_virtual, ScheduleDualPipeV, True),
    "ring": ring,
    "all-to-all": all_to_all,
}
