"""Faulty layouts of a small model, one for each cause that ``partitioner check`` names. Each function makes a Setup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from partitioner import Setup, StepResult

DIM = 8


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4))


def _square(out: Tensor) -> Tensor:
    return out.square().mean()


def _rows(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _setup(distribute: Any = lambda model: model, step: Any = None, **options: Any) -> Setup:
    return Setup(_model(), (torch.randn(4, DIM),), distribute, step, _square, **options)


def _with_gradients(change: Callable[[nn.Module], None], share: bool = False) -> Setup:
    """Return a setup that runs the plain model, on this rank's samples if ``share``, and then changes gradients."""

    def step(model: Any, inputs: Any) -> Any:
        loss = _square(model(_rows(inputs[0]) if share else inputs[0]))
        loss.backward()
        change(model)
        return loss

    return _setup(step=step)


def _reduce(model: nn.Module, group: Any = None, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad *= factor


def unaveraged() -> Setup:
    return _with_gradients(lambda model: None, share=True)


def unsummed() -> Setup:
    def halve(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()

    return _with_gradients(halve, share=True)


def unsummed_scaled() -> Setup:
    def scale(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad *= 3.0

    return _with_gradients(scale, share=True)


def unaveraged_between_pairs() -> Setup:
    """Four ranks: the gradients of neighbours are averaged, those of the two pairs are not."""

    def reduce(model: Any) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        _reduce(model, pairs[dist.get_rank() // 2], 0.5)

    return _with_gradients(reduce, share=True)


def summed() -> Setup:
    return _with_gradients(_reduce, share=True)


def averaged() -> Setup:
    return _with_gradients(lambda model: _reduce(model, factor=dist.get_world_size() ** -2), share=True)


def factor() -> Setup:
    return _with_gradients(lambda model: _reduce(model, factor=0.35), share=True)


def factor_by_rank() -> Setup:
    def scale(model: Any) -> None:
        model[0].weight.grad *= 1.0 + dist.get_rank()

    return _with_gradients(scale)


def missing() -> Setup:
    def drop(model: Any) -> None:
        model[2].bias.grad = None

    return _with_gradients(drop)


def missing_zero() -> Setup:
    return _with_gradients(lambda model: model[0].weight.grad.zero_())


def dropped() -> Setup:
    """The last sample does not count."""

    def step(model: Any, inputs: Any) -> Any:
        loss = model(inputs[0][:3]).square().sum() / 16
        loss.backward()
        return loss

    return _setup(step=step)


def reweighted() -> Setup:
    """The first sample counts twice."""

    def step(model: Any, inputs: Any) -> Any:
        loss = model(inputs[0][[0, 0, 1, 2, 3]]).square().sum() / 16
        loss.backward()
        return loss

    return _setup(step=step)


def mean_of_means_of_ranks() -> Setup:
    """The loss is the mean over targets; ranks average the means over their own targets. The first rank has one target
    in its two samples, the second rank has two.
    """
    targets = torch.tensor([-100, 1, 2, 3])

    def step(model: Any, inputs: Any) -> Any:
        loss = nn.functional.cross_entropy(model(_rows(inputs[0])), _rows(targets))
        loss.backward()
        _reduce(model, factor=1 / dist.get_world_size())
        return loss

    return Setup(
        _model(),
        (torch.randn(4, DIM),),
        lambda model: model,
        step,
        lambda out: nn.functional.cross_entropy(out, targets),
    )


def trained() -> Setup:
    """The plain model freezes its first layer, the distributed model trains it."""
    setup = _setup(lambda model: model.requires_grad_())
    setup.plain[0].requires_grad_(False)
    return setup


class Positions(nn.Module):
    """Adds an embedding of positions, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(4, DIM)
        self.out = nn.Linear(DIM, 4)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        hidden: Tensor = self.out(torch.tanh(x + self.position(first + torch.arange(x.shape[1]))))
        return hidden


def same_positions() -> Setup:
    """Under context parallelism, the positions of each rank start at 0."""

    def step(model: Any, inputs: Any) -> Any:
        part = model(inputs[0].chunk(dist.get_world_size(), 1)[dist.get_rank()])
        loss = part.square().sum() / 32
        loss.backward()
        _reduce(model)
        return loss, part

    return Setup(Positions(), (torch.randn(2, 4, DIM),), lambda model: model, step, _square)


class _Part(nn.Module):
    """Some rows of a layer, whose results are gathered. The gradients are set by the test."""

    def __init__(self, layer: nn.Linear, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach()[rows].clone())
        self.bias = nn.Parameter(layer.bias.detach()[rows].clone())


def _parts(rows: Callable[[int], Tensor], grads: Callable[[int], Tensor]) -> Setup:
    """Return a setup whose ranks hold ``rows(rank)`` of a layer, and give the gradient of ``grads(rank)`` for them."""

    def distribute(model: Any) -> Any:
        return model, nn.ModuleList([_Part(model[0], rows(dist.get_rank())), model[2]])

    def step(distributed: Any, inputs: Any) -> Any:
        model, (part, _) = distributed
        loss = _square(model(inputs[0]))
        loss.backward()
        part.weight.grad = model[0].weight.grad[grads(dist.get_rank())].clone()
        part.bias.grad = model[0].bias.grad[grads(dist.get_rank())].clone()
        return loss

    def only_parts(model: Any) -> Any:
        whole, parts = distribute(model)
        return {"parts": parts, "whole": _Hidden(whole)}

    return _setup(only_parts, lambda d, inputs: step((d["whole"].module, d["parts"]), inputs))


class _Hidden:
    """A module that the check is not to see."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _half(rank: int) -> Tensor:
    return torch.arange(DIM).chunk(2)[rank]


def swapped() -> Setup:
    return _parts(_half, lambda rank: _half(1 - rank))


def permuted() -> Setup:
    """All rows are on both ranks; the gradient's blocks are in another order."""
    return _parts(lambda rank: torch.arange(DIM), lambda rank: torch.arange(DIM).view(4, 2)[[2, 0, 3, 1]].flatten())


def not_held() -> Setup:
    """Both ranks have the first half."""
    return _parts(lambda rank: _half(0), lambda rank: _half(0))


def permuted_shards() -> Setup:
    """No fault: the ranks hold interleaved rows, in an order of their own."""

    def rows(rank: int) -> Tensor:
        return torch.arange(DIM)[rank::2].flip(0)

    return _parts(rows, rows)


def other_weights() -> Setup:
    def distribute(model: Any) -> Any:
        torch.manual_seed(17 + dist.get_rank())
        model[0].reset_parameters()
        return model

    return _setup(distribute)


def different_seeds() -> Setup:
    if dist.get_world_size() > 1:
        torch.manual_seed(dist.get_rank())
    return _setup()


def padding() -> Setup:
    """Rows are added to the last layer, and get a gradient."""

    class Padded(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.body, self.last = model[:2], nn.Linear(DIM, 6)
            with torch.no_grad():
                self.last.weight[:4], self.last.bias[:4] = model[2].weight, model[2].bias

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x))

    return _setup(Padded)


def padding_of_most_rows() -> Setup:
    """The last layer's four rows are padded to 16, which the ranks share: the second of two has padding only."""

    class Padded(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.body = model[:2]
            weight = nn.functional.pad(model[2].weight.detach(), (0, 0, 0, 12))
            self.last = nn.Parameter(_rows(weight).clone())
            self.last_bias = model[2].bias

        def forward(self, x: Tensor) -> Tensor:
            rows = nn.functional.linear(self.body(x), self.last)
            sums = rows.new_zeros(len(x), 4)
            return sums + rows[:, :4] + rows[:, 4:] + self.last_bias

    return _setup(Padded)


def precision() -> Setup:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def step(model: Any, inputs: Any) -> Any:
        loss = _square(model(_rows(inputs[0])))
        loss.backward()
        return loss

    return _setup(lambda model: fully_shard(model, mp_policy=policy), step)


def local_clip() -> Setup:
    """Each rank clips the rows that it holds by their own norm."""
    setup = _parts(_half, _half)

    def step(distributed: Any, inputs: Any) -> Any:
        assert setup.step is not None
        loss = setup.step(distributed, inputs)
        nn.utils.clip_grad_norm_([*distributed["parts"].parameters()], 0.1)
        return loss

    return Setup(setup.plain, setup.inputs, setup.distribute, step, _square, clip_norm=0.1)


def unsummed_output() -> Setup:
    """A row-parallel layer without the sum over the ranks."""

    class Half(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.rank = dist.get_rank()
            self.weight = nn.Parameter(model[0].weight.detach().chunk(2, 1)[self.rank].clone())

        def forward(self, x: Tensor) -> Tensor:
            return x.chunk(2, -1)[self.rank] @ self.weight.T

    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    return Setup(model, (torch.randn(4, DIM),), Half, loss=_square)


def permuted_output() -> Setup:
    def step(model: Any, inputs: Any) -> Any:
        out = model(inputs[0])
        _square(out).backward()
        return StepResult(_square(out), out[[2, 3, 0, 1]])

    return _setup(step=step)


def raises() -> Setup:
    def step(model: Any, inputs: Any) -> Any:
        raise KeyError("no such layer")

    return _setup(step=step)


def hangs() -> Setup:
    """Rank 1 waits for a message that nobody sends."""

    def step(model: Any, inputs: Any) -> Any:
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(3), 0)
        return _square(model(inputs[0]))

    return _setup(step=step)


def mismatched() -> Setup:
    """The ranks call a collective with different shapes."""

    def step(model: Any, inputs: Any) -> Any:
        dist.all_reduce(torch.zeros(2 + dist.get_rank()))
        return _square(model(inputs[0]))

    return _setup(step=step)


def no_setup() -> Any:
    return _model()


def two_faults() -> Setup:
    """A gradient is doubled and another one is lost."""

    def change(model: Any) -> None:
        model[0].weight.grad *= 2.0
        model[2].bias.grad = None

    return _with_gradients(change)


def doubled_rows() -> Setup:
    """The gradient of an embedding whose second half no sample uses is doubled. Each rank has one half."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table = nn.Parameter(torch.tensor(2.0)), nn.Embedding(DIM, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) * self.scale

    class Half(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.whole = _Hidden(model)
            self.scale = model.scale
            self.rows = nn.Parameter(_rows(model.table.weight.detach()).clone())

    def step(model: Any, inputs: Any) -> Any:
        loss = _square(model.whole.module(*inputs))
        loss.backward()
        model.rows.grad = 2.0 * _rows(model.whole.module.table.weight.grad)
        return loss

    return Setup(Scaled(), (torch.tensor([0, 2, 3, 0]),), Half, step, _square)


def noise() -> Setup:
    """A gradient that has no relation to the right one."""

    def change(model: Any) -> None:
        model[0].weight.grad = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(5))

    return _with_gradients(change)


def reduced_in_bfloat16() -> Setup:
    def reduce(model: Any) -> None:
        for parameter in model.parameters():
            short = parameter.grad.bfloat16()
            dist.all_reduce(short)
            parameter.grad = short.double() / dist.get_world_size()

    return _with_gradients(reduce, share=True)


def targets_shifted_in_each_part() -> Setup:
    """Parts of a sequence, of which each loses its last target."""
    torch.manual_seed(0)
    x, numbers = torch.randn(2, 8, DIM), torch.randint(0, 4, (2, 8))
    targets = torch.cat([numbers[:, 1:], torch.full((2, 1), -100)], 1)

    def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")

    def step(model: Any, inputs: Any) -> Any:
        parts, rank = dist.get_world_size(), dist.get_rank()
        own = numbers.chunk(parts, 1)[rank]
        wanted = torch.cat([own[:, 1:], torch.full((2, 1), -100)], 1)
        logits = model(inputs[0].chunk(parts, 1)[rank])
        count = (wanted != -100).sum()
        dist.all_reduce(count)
        loss = loss_of(logits, wanted) / count
        loss.backward()
        _reduce(model)
        return loss, logits

    return Setup(_model(), (x,), lambda model: model, step, lambda out: loss_of(out, targets) / 14)


def targets_in_another_order() -> Setup:
    """Each rank has the first and the last of four chunks of a sequence, or those between them, and the targets of two
    chunks that follow each other.
    """
    torch.manual_seed(0)
    x, targets = torch.randn(2, 8, DIM), torch.randint(0, 4, (2, 8))

    def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / targets.numel()

    def step(model: Any, inputs: Any) -> Any:
        rank, chunks = dist.get_rank(), torch.arange(8).chunk(4)
        logits = model(inputs[0][:, torch.cat([chunks[rank], chunks[-1 - rank]])])
        loss = loss_of(logits, targets.chunk(2, 1)[rank])
        loss.backward()
        _reduce(model)
        return loss, logits

    return Setup(_model(), (x,), lambda model: model, step, lambda out: loss_of(out, targets))


def nothing_to_train() -> Setup:
    return Setup(nn.Tanh(), (torch.randn(4, DIM),), lambda model: model, loss=_square)


def no_loss() -> Setup:
    return Setup(_model(), (torch.randn(4, DIM),), lambda model: model)


def nan_loss() -> Setup:
    return Setup(_model(), (torch.full((4, DIM), torch.nan),), lambda model: model, loss=_square)


def no_parameters() -> Setup:
    return _setup(lambda model: None, lambda model, inputs: None)


def unknown_gradient() -> Setup:
    return _setup(step=lambda model, inputs: StepResult(None, gradients={"wrong.name": torch.zeros(3)}))


def three_results() -> Setup:
    return _setup(step=lambda model, inputs: (None, None, None))


CAUSES = {  # function -> kind of the first difference
    "reduced_in_bfloat16": "precision",
    "targets_shifted_in_each_part": "loss",
    "targets_in_another_order": "loss",
    "unaveraged": "unaveraged",
    "unsummed": "unsummed",
    "unsummed_scaled": "unsummed-scaled",
    "summed": "summed",
    "averaged": "averaged",
    "factor": "factor",
    "factor_by_rank": "factor-by-rank",
    "missing": "missing",
    "trained": "trained",
    "missing_zero": "missing",
    "dropped": "dropped",
    "reweighted": "reweighted",
    "mean_of_means_of_ranks": "mean-of-means",
    "swapped": "swapped",
    "permuted": "permuted",
    "not_held": "not-held",
    "other_weights": "other-weights",
    "different_seeds": "different-seeds",
    "same_positions": "wrong-module",
    "padding": "padding",
    "padding_of_most_rows": "padding",
    "precision": "precision",
    "local_clip": "local-clip",
    "unsummed_output": "unsummed",
    "permuted_output": "permuted",
}
ERRORS = {  # function -> type of the error, and a part of its message
    "raises": ("RankError", "no such layer"),
    "mismatched": ("RankError", "Detected mismatch"),
    "no_setup": ("CheckSetupError", r"expected partitioner\.Setup"),
    "nothing_to_train": ("CheckSetupError", "no parameters to train"),
    "no_loss": ("CheckSetupError", "has no loss"),
    "nan_loss": ("CheckSetupError", "expected a finite one"),
    "no_parameters": ("RankError", "expected a module"),
    "unknown_gradient": ("CheckSetupError", "wrong.name"),
    "three_results": ("RankError", "expected the loss"),
    "no_such_function": ("CheckSetupError", "no function 'no_such_function'"),
}
