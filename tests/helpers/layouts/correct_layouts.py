"""Correct layouts of many kinds, as a user would write them for ``partitioner check``. Each function makes a Setup."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from partitioner import Setup, StepResult
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "examples" / "gallery"))

from small_decoder import (
    DIM,
    VOCABULARY,
    ColumnParallel,
    Copy,
    Decoder,
    Gather,
    RowParallel,
    Sum,
    make_batch,
    mean_loss,
    reduce_gradients,
    share_of,
)
from small_experts import Experts, ShardedExperts
from small_pipeline import cut_stage, make_stage, run_schedule


def _on_own_samples(targets: Tensor, mean: bool | None = None) -> Callable[[Any, Any], Any]:
    """Return a step on this rank's samples. ``mean``: how gradients are reduced; ``None``: by the module itself."""

    def step(model: Any, inputs: Any) -> Any:
        logits = model(share_of(inputs[0]))
        loss = mean_loss(logits, share_of(targets))
        loss.backward()
        if mean is not None:
            reduce_gradients(model, mean)
        return loss, logits

    return step


def _decoder(distribute: Any, step: Any = None, batch: Any = None, **options: Any) -> Setup:
    ids, targets = batch or make_batch()
    model = Decoder(**options)
    return Setup(model, (ids,), distribute, step, loss=lambda logits: mean_loss(logits, targets))


def _fully_shard(model: Any, **options: Any) -> Any:
    for layer in model.layers.values():
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp() -> Setup:
    return _decoder(_fully_shard, _on_own_samples(make_batch()[1]))


def fsdp_keeps_parameters() -> Setup:
    return _decoder(lambda m: _fully_shard(m, reshard_after_forward=False), _on_own_samples(make_batch()[1]))


def fsdp_uneven_shards() -> Setup:
    """Three ranks share dims of 16 and 24; the samples are as many as six."""
    batch = make_batch(samples=6)
    return _decoder(_fully_shard, _on_own_samples(batch[1]), batch)


def fsdp_checkpointed() -> Setup:
    class Checkpointed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    def distribute(model: Any) -> Any:
        for name in model.layers:
            model.layers[name] = Checkpointed(model.layers[name])
        return _fully_shard(model)

    return _decoder(distribute, _on_own_samples(make_batch()[1]))


def fsdp_accumulation() -> Setup:
    targets = make_batch()[1]

    def step(model: Any, inputs: Any) -> Any:
        rows, parts = share_of(inputs[0]), share_of(targets)
        losses = []
        for i, (row, part) in enumerate(zip(rows, parts, strict=True)):
            model.set_requires_gradient_sync(i == len(rows) - 1)
            loss = mean_loss(model(row[None]), part[None]) / len(rows)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return _decoder(_fully_shard, step)


def fsdp_tied() -> Setup:
    return _decoder(_fully_shard, _on_own_samples(make_batch()[1]), tied=True)


def hsdp() -> Setup:
    """Four ranks: two replicas, each sharded over two."""

    def distribute(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return _fully_shard(model, mesh=mesh)

    return _decoder(distribute, _on_own_samples(make_batch()[1]))


def ddp() -> Setup:
    return _decoder(nn.parallel.DistributedDataParallel, _on_own_samples(make_batch()[1]))


def ddp_dropout() -> Setup:
    """Every rank draws its own numbers, as it should for its own samples."""
    x = torch.randn(4, DIM)
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def step(model: Any, inputs: Any) -> Any:
        torch.manual_seed(dist.get_rank())
        loss = model(share_of(inputs[0])).square().mean()
        loss.backward()
        return loss

    return Setup(model, (x,), nn.parallel.DistributedDataParallel, step, lambda out: out.square().mean())


def ddp_ignored_targets() -> Setup:
    """The loss of each rank is its sum over the number of all targets, and gradients are summed."""
    batch = make_batch(ignored=(6, 4, 1, 0))
    counted = (batch[1] != -100).sum()

    def step(model: Any, inputs: Any) -> Any:
        logits, targets = model(share_of(inputs[0])), share_of(batch[1])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / counted
        loss.backward()
        reduce_gradients(model, mean=False)
        return loss, logits

    return _decoder(lambda model: model, step, batch)


def sharded_gradients() -> Setup:
    """Gradients are reduced outside of the parameters, as a ZeRO optimizer does, and returned by name."""
    targets = make_batch()[1]

    def step(model: Any, inputs: Any) -> Any:
        loss = mean_loss(model(share_of(inputs[0])), share_of(targets))
        grads = torch.autograd.grad(loss, [*model.parameters()])
        found = {}
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            total = grad.contiguous()
            dist.all_reduce(total)
            found[name] = total / dist.get_world_size()
        return StepResult(loss, gradients=found)

    return _decoder(_Holder, step)


class _Holder:
    """A model that is no module, as some frameworks have."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def parameters(self) -> Any:
        return self.model.parameters()

    def named_parameters(self) -> Any:
        return self.model.named_parameters()


def _split_layers(model: Any, mesh: Any, sequence: bool) -> Any:
    """Apply DTensor tensor parallelism to the layers of ``model``. ``sequence``: shard the norms over the sequence."""
    for layer in model.layers.values():
        plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in ("q", "k", "v")}
        plan |= {"mlp.up": ColwiseParallel(), "attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        if sequence:
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.o": RowwiseParallel(output_layouts=Shard(1)),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(layer, mesh, plan)
    return model


def dtensor_tp() -> Setup:
    def distribute(model: Any) -> Any:
        return _split_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence=False)

    return _decoder(distribute)


def dtensor_sequence_parallel() -> Setup:
    def distribute(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        _split_layers(model, mesh, sequence=True)
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, ends)

    return _decoder(distribute)


def dtensor_loss_parallel() -> Setup:
    targets = make_batch()[1]

    def distribute(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"head": ColwiseParallel(use_local_output=False)})

    def step(model: Any, inputs: Any) -> Any:
        logits = model(inputs[0])
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        return loss, logits

    return _decoder(distribute, step)


def fsdp_and_tp() -> Setup:
    """Four ranks: tensor parallelism over two, state sharding over two."""
    targets = make_batch()[1]

    def distribute(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _split_layers(model, mesh["tp"], sequence=False)
        return _fully_shard(model, mesh=mesh["dp"])

    def step(model: Any, inputs: Any) -> Any:
        group = dist.get_rank() // 2
        logits = model(inputs[0].chunk(2)[group])
        loss = mean_loss(logits, targets.chunk(2)[group])
        loss.backward()
        return loss, logits

    return _decoder(distribute, step)


def _pipeline(make: Callable[[Any], Any], batch: Any = None) -> Setup:
    targets = (batch or make_batch())[1]

    def distribute(model: Any) -> Any:
        module = cut_stage(model)
        return make(make_stage(module)), module

    def step(distributed: Any, inputs: Any) -> Any:
        return run_schedule(distributed[0], inputs[0], targets)

    return _decoder(distribute, step, batch)


def pipeline_gpipe() -> Setup:
    return _pipeline(lambda stage: ScheduleGPipe(stage, n_microbatches=4, loss_fn=mean_loss))


def pipeline_1f1b() -> Setup:
    return _pipeline(lambda stage: Schedule1F1B(stage, n_microbatches=4, loss_fn=mean_loss))


def pipeline_interleaved() -> Setup:
    """Two ranks with two stages each, of one layer."""
    targets = make_batch()[1]

    def distribute(model: Any) -> Any:
        rank, stages, modules = dist.get_rank(), [], []
        for index in (rank, rank + 2):
            part = Decoder(layers=4)
            part.load_state_dict(model.state_dict())
            part.layers = nn.ModuleDict({str(index): part.layers[str(index)]})
            part.embed = part.embed if index == 0 else None
            part.norm, part.head = (part.norm, part.head) if index == 3 else (None, None)
            modules.append(part)
            stages.append(PipelineStage(part, index, 4, torch.device("cpu")))
        return ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=mean_loss), modules

    def step(distributed: Any, inputs: Any) -> Any:
        return run_schedule(distributed[0], inputs[0], targets)

    return _decoder(distribute, step, layers=4)


def pipeline_tied() -> Setup:
    """The first and the last stage have copies of a tied weight, whose gradients are added up."""
    targets = make_batch()[1]

    def distribute(model: Any) -> Any:
        module = cut_stage(model)
        return ScheduleGPipe(make_stage(module), n_microbatches=4, loss_fn=mean_loss), module

    def step(distributed: Any, inputs: Any) -> Any:
        schedule, module = distributed
        found = run_schedule(schedule, inputs[0], targets)
        dist.all_reduce((module.embed or module.head).weight.grad)
        return found

    return _decoder(distribute, step, tied=True)


def column_and_row_parallel() -> Setup:
    def distribute(model: Any) -> Any:
        for layer in model.layers.values():
            attention, mlp = layer.attention, layer.mlp
            heads, hidden = share_of(torch.arange(DIM)), share_of(torch.arange(2 * DIM))
            for name in ("q", "k", "v"):
                setattr(attention, name, ColumnParallel(getattr(attention, name), heads))
            attention.o = RowParallel(attention.o, heads)
            mlp.up, mlp.down = ColumnParallel(mlp.up, hidden), RowParallel(mlp.down, hidden)
        return model

    return _decoder(distribute)


class _VocabularyParallelLoss(torch.autograd.Function):
    """The mean cross entropy of logits whose columns, from ``start`` on, are on this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        powers = (logits - most[..., None]).exp()
        total = powers.sum(-1)
        dist.all_reduce(total)
        here = (targets >= start) & (targets < start + logits.shape[-1])
        local = torch.where(here, targets - start, 0)
        picked = torch.where(here, logits.gather(-1, local[..., None])[..., 0], 0.0)
        dist.all_reduce(picked)
        hot = F.one_hot(local, logits.shape[-1]) * here[..., None]
        ctx.save_for_backward((powers / total[..., None] - hot) / targets.numel())
        return (most + total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None, None


class _VocabularyParallelEmbedding(nn.Module):
    def __init__(self, weight: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(weight.detach()[rows].clone()), int(rows[0])

    def forward(self, ids: Tensor) -> Tensor:
        here = (ids >= self.start) & (ids < self.start + len(self.weight))
        found = F.embedding(torch.where(here, ids - self.start, 0), self.weight)
        return Sum.apply(found * here[..., None])


def vocabulary_parallel() -> Setup:
    targets = make_batch()[1]

    def distribute(model: Any) -> Any:
        rows = share_of(torch.arange(VOCABULARY))
        model.embed = _VocabularyParallelEmbedding(model.embed.weight, rows)
        model.head = ColumnParallel(model.head, rows)
        return model

    def step(model: Any, inputs: Any) -> Any:
        logits = model(inputs[0])
        start = model.embed.start
        loss = _VocabularyParallelLoss.apply(logits, targets, start)
        loss.backward()
        return loss, logits

    return _decoder(distribute, step)


def expert_parallel() -> Setup:
    x, targets = torch.randn(4, 6, DIM), torch.randn(4, 6, 3)
    return Setup(
        Experts(), (x,), lambda model: ShardedExperts(model, reduce=True), loss=lambda out: F.mse_loss(out, targets)
    )


def accumulation() -> Setup:
    targets = make_batch()[1]

    def step(model: Any, inputs: Any) -> Any:
        total = torch.zeros(())
        for row, part in zip(share_of(inputs[0]), share_of(targets), strict=True):
            loss = mean_loss(model(row[None]), part[None]) / len(share_of(targets))
            loss.backward()
            total = total + loss.detach()
        reduce_gradients(model, mean=True)
        return total

    return _decoder(lambda model: model, step)


def tied_data_parallel() -> Setup:
    return _decoder(lambda model: model, _on_own_samples(make_batch()[1], mean=True), tied=True)


def frozen_adapter() -> Setup:
    """Only a low-rank adapter is trained; its second factor starts at zero."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = (
                nn.Linear(DIM, DIM),
                nn.Linear(DIM, 2, bias=False),
                nn.Linear(2, DIM, bias=False),
            )
            self.base.requires_grad_(False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    def step(model: Any, inputs: Any) -> Any:
        loss = model(share_of(inputs[0])).square().mean()
        loss.backward()
        return loss

    return Setup(Adapted(), (torch.randn(4, DIM),), fully_shard, step, lambda out: out.square().mean())


def loss_inside_model() -> Setup:
    """The model takes its arguments by name and returns a dict with the loss."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Decoder(layers=1)

        def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
            logits = self.body(ids)
            return {"loss": mean_loss(logits, targets), "logits": logits}

    ids, targets = make_batch()

    def step(model: Any, inputs: Any) -> Any:
        out = model(**{name: share_of(value) for name, value in inputs.items()})
        out["loss"].backward()
        return out["loss"], {"logits": out["logits"]}

    return Setup(WithLoss(), {"ids": ids, "targets": targets}, fully_shard, step)


def two_dims_by_hand() -> Setup:
    """Four ranks: a weight is cut along both dims; its input along the ranks of one, its output along the other."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    class Tile(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.row, self.column = divmod(dist.get_rank(), 2)
            self.weight = nn.Parameter(weight.detach().chunk(2)[self.row].chunk(2, 1)[self.column].clone())

        def forward(self, x: Tensor) -> Tensor:
            part = x.chunk(2, -1)[self.column] @ self.weight.T
            return Sum.apply(F.pad(part, (self.row * DIM // 2, (1 - self.row) * DIM // 2)))

    def distribute(model: Any) -> Any:
        return Tile(model.layer.weight)

    return Setup(Square(), (torch.randn(4, DIM),), distribute, loss=lambda out: out.square().mean())


def dtensor_by_hand() -> Setup:
    """A parameter is replaced by a DTensor; the module computes with DTensors throughout."""

    def distribute(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer, dim in ((model[0], 0), (model[2], 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
        return model

    def step(model: Any, inputs: Any) -> Any:
        mesh = model[0].weight.device_mesh
        out = model(distribute_tensor(inputs[0], mesh, [Replicate()]))
        loss = out.square().mean()
        loss.backward()
        return loss.full_tensor(), out

    model = nn.Sequential(nn.Linear(DIM, 12), nn.Tanh(), nn.Linear(12, 5))
    return Setup(model, (torch.randn(4, DIM),), distribute, step, lambda out: out.square().mean())


def loaded_weights() -> Setup:
    """The distributed model is built anew and gets its weights from rank 0."""

    def distribute(model: Any) -> Any:
        with torch.device("meta"):
            other = Decoder()
        _fully_shard(other)
        other.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, model.state_dict() if dist.get_rank() == 0 else {}, options=options)
        return other

    return _decoder(distribute, _on_own_samples(make_batch()[1]))


def gathered_head() -> Setup:
    """A column-parallel layer whose result is gathered, and a loss on every rank."""

    def distribute(model: Any) -> Any:
        model.head = _GatheredHead(model.head)
        return model

    return _decoder(distribute)


class _GatheredHead(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(share_of(head.weight.detach()).clone())

    def forward(self, x: Tensor) -> Tensor:
        return Gather.apply(F.linear(Copy.apply(x), self.weight), -1, False)


def balanced_sequence() -> Setup:
    """Each rank has one chunk of the first and one of the second half of the sequence, so that ranks have equal work
    under a causal mask. Its outputs are no slice of the whole.
    """
    ids, targets = make_batch()

    def list_positions(rank: int) -> Tensor:
        chunks = torch.arange(ids.shape[1]).chunk(2 * dist.get_world_size())
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    class BalancedAttention(nn.Module):
        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o, self.head_dim = whole.q, whole.k, whole.v, whole.o, whole.head_dim

        def forward(self, x: Tensor) -> Tensor:
            order = torch.cat([list_positions(rank) for rank in range(dist.get_world_size())])
            k, v = Gather.apply(self.k(x), 1, True), Gather.apply(self.v(x), 1, True)
            q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), k, v))
            mask = list_positions(dist.get_rank())[:, None] >= order[None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.o(y.transpose(1, 2).flatten(2))

    def distribute(model: Any) -> Any:
        for layer in model.layers.values():
            layer.attention = BalancedAttention(layer.attention)
        return model

    def step(model: Any, inputs: Any) -> Any:
        mine = list_positions(dist.get_rank())
        logits = model(inputs[0][:, mine])
        loss = mean_loss(logits, targets[:, mine])
        loss.backward()
        reduce_gradients(model, mean=True)
        return loss, logits

    return _decoder(distribute, step)


ON_TWO = (
    "fsdp fsdp_keeps_parameters fsdp_checkpointed fsdp_accumulation fsdp_tied ddp ddp_dropout ddp_ignored_targets "
    "sharded_gradients dtensor_tp dtensor_sequence_parallel dtensor_loss_parallel pipeline_gpipe pipeline_1f1b "
    "pipeline_interleaved pipeline_tied column_and_row_parallel vocabulary_parallel expert_parallel accumulation "
    "tied_data_parallel frozen_adapter loss_inside_model dtensor_by_hand loaded_weights gathered_head "
    "balanced_sequence"
).split()
ON_MORE = {"hsdp": 4, "fsdp_and_tp": 4, "two_dims_by_hand": 4, "fsdp_uneven_shards": 3}
