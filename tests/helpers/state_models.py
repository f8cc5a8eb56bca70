"""Models whose forward changes states: momentum teachers of frozen parameters, and buffers that take sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, BATCH, KEEP = 8, 8, 0.9

# --- teachers ---------------------------------------------------------------------------------------------------------


def _by_data(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.data = k.data * KEEP + q.data * (1 - KEEP)


def _in_data(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.data.mul_(KEEP).add_((1 - KEEP) * q.detach().data)


def _in_place(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.mul_(KEEP).add_(q, alpha=1 - KEEP)


def _lerp(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.lerp_(q, 1 - KEEP)


def _copy(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.copy_(KEEP * k + (1 - KEEP) * q)


def _foreach(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_mul_(list(teacher.parameters()), KEEP)
    torch._foreach_add_(list(teacher.parameters()), list(student.parameters()), alpha=1 - KEEP)


def _load(teacher: nn.Module, student: nn.Module) -> None:
    teacher.load_state_dict(student.state_dict())


def _vector(teacher: nn.Module, student: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector
    nn.utils.vector_to_parameters(
        KEEP * flat(teacher.parameters()) + (1 - KEEP) * flat(student.parameters()), teacher.parameters()
    )


def _attribute(teacher: nn.Module, student: nn.Module) -> None:
    for module, like in zip(teacher.modules(), student.modules(), strict=True):
        for name, k in list(module.named_parameters(recurse=False)):
            new = KEEP * k + (1 - KEEP) * getattr(like, name)
            setattr(module, name, nn.Parameter(new.detach(), requires_grad=False))


UPDATES: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "data = ...": _by_data,
    "data.mul_": _in_data,
    "mul_ add_": _in_place,
    "lerp_": _lerp,
    "copy_": _copy,
    "foreach": _foreach,
    "load_state_dict": _load,
    "vector_to_parameters": _vector,
    "attribute": _attribute,
}


def tower(layers: int) -> nn.Sequential:
    inner = [nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(DIM, DIM), *inner, nn.Linear(DIM, DIM))


class Teacher(nn.Module):
    """A student, and a teacher that follows it: before it is asked, or after."""

    def __init__(self, update: str = "data = ...", before: bool = True, frozen: bool = True, layers: int = 3) -> None:
        super().__init__()
        self.update, self.before = update, before
        self.student, self.teacher = tower(layers), tower(layers)
        self.teacher.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.before:
                UPDATES[self.update](self.teacher, self.student)
            target = self.teacher(x)
            if not self.before:
                UPDATES[self.update](self.teacher, self.student)
        return (self.student(x) - target).square().mean()


class Scheduled(Teacher):
    """The momentum rises, in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("keep", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for k, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                k.mul_(self.keep).add_(q * (1 - self.keep))
            self.keep.add_((1 - self.keep) * 0.1)
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


class Contrast(Teacher):
    """Keys of the teacher go into a queue that queries are compared with (MoCo)."""

    def __init__(self, size: int = 4 * BATCH, **options: Any) -> None:
        super().__init__(**options)
        self.size = size
        self.register_buffer("queue", F.normalize(torch.randn(DIM, size), dim=0))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            UPDATES[self.update](self.teacher, self.student)
            keys = F.normalize(self.teacher(x), dim=1)
        queries = F.normalize(self.student(x), dim=1)
        alike = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().detach()], 1)
        with torch.no_grad():
            places = (self.next + torch.arange(len(x))) % self.size
            self.queue[:, places] = keys.T
            self.next.add_(len(x)).remainder_(self.size)
        return F.cross_entropy(alike / 0.2, torch.zeros(len(x), dtype=torch.long))


# --- sums -------------------------------------------------------------------------------------------------------------


class Summing(nn.Module):
    """``change`` writes to buffers what it makes of activations, which nothing reads in the same step."""

    def __init__(self, change: Callable[[Summing, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("counts", torch.arange(DIM))
        self.register_buffer("m", torch.linspace(-1, 1, DIM))
        self.register_buffer("v", torch.ones(DIM))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.linspace(-1, 1, 2 * DIM * BATCH).reshape(DIM, 2 * BATCH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        self.change(self, x.detach())
        return self.b(x).square().mean()


def _hot(x: Tensor) -> Tensor:
    return F.one_hot(x.argmax(-1), DIM).sum(0)


def _set_counts(s: Summing, x: Tensor) -> None:
    s.counts = s.counts + _hot(x)


def _add_counts(s: Summing, x: Tensor) -> None:
    s.counts += _hot(x)
    s.n += 1


def _moments(s: Summing, x: Tensor) -> None:
    s.m += x.sum(0)
    s.v.add_(x.square().sum(0))
    s.n += x.shape[0]


def _histogram(s: Summing, x: Tensor) -> None:
    bins = torch.bucketize(x, torch.linspace(0, 1, DIM - 1)).flatten()
    s.counts.index_add_(0, bins, torch.ones_like(bins))


def _running(s: Summing, x: Tensor) -> None:
    s.n += 1
    s.m += (x.mean(0) - s.m) / s.n


def _momentum(s: Summing, x: Tensor) -> None:
    s.m.mul_(s.v).add_(x.mean(0) * (1 - s.v))
    s.v.mul_(0.99)


def _enqueue(s: Summing, x: Tensor) -> None:
    s.rows[:, (s.n + torch.arange(len(x))) % s.rows.shape[1]] = x.T
    s.n.add_(len(x)).remainder_(s.rows.shape[1])


def _shift(s: Summing, x: Tensor) -> None:
    s.rows = torch.cat([x.T, s.rows], 1)[:, : s.rows.shape[1]]


SUMS: dict[str, Callable[[Summing, Tensor], Any]] = {
    "counts +=": _add_counts,
    "counts, set": _set_counts,
    "counts, copy_": lambda s, x: s.counts.copy_(s.counts + _hot(x)),
    "counts, index_add_": lambda s, x: s.counts.index_add_(0, x.argmax(-1), torch.ones(len(x), dtype=torch.long)),
    "counts, scatter_add_": lambda s, x: s.m.scatter_add_(0, x.argmax(-1), x.amax(-1)),
    "counts, index_put_": lambda s, x: s.rows.index_put_((x.argmax(-1), x.argmin(-1)), x.sum(-1), accumulate=True),
    "of what is true": lambda s, x: s.counts.sub_((x > s.m).long().sum(0)),
    "moments": _moments,
    "histogram": _histogram,
    "products": lambda s, x: s.rows[:, :DIM].add_(x.T @ x),
    "of functions": lambda s, x: s.v.add_(x.exp().log1p().sum(0), alpha=0.5),
    "average, lerp_": lambda s, x: s.m.lerp_(x.mean(0), 0.1),
    "average, and a number": lambda s, x: s.m.copy_(0.5 * s.m + 0.5 * _hot(x) / len(x) + 1),
    "average, momentum in a buffer": _momentum,
    "average over all steps": _running,
    "some places": lambda s, x: s.m[2:4].add_(x.sum(0)[2:4]),
    "last sample": lambda s, x: s.m.copy_(x[-1]),
    "queue": _enqueue,
    "queue, shifted": _shift,
}
# What is no sum over samples.
OTHERS: dict[str, Callable[[Summing, Tensor], Any]] = {
    "variance": lambda s, x: s.v.lerp_(x.var(0), 0.1),
    "sign of a sum": lambda s, x: s.m.add_(torch.sign(_hot(x).float().mean() - _hot(x)), alpha=1e-3),
    "norm": lambda s, x: s.v.add_(x.norm(dim=0)),
    "rounded mean": lambda s, x: s.counts.add_(x.mean(0).mul(100).long()),
    "product of sums": lambda s, x: s.m.add_(x.sum(0) * x.mean(0)),
}


class Routed(nn.Module):
    """Experts of which a router takes two, with a bias by which they are balanced, and counts of their tokens."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.gate, self.experts = nn.Linear(DIM, 4, bias=False), nn.Parameter(torch.randn(4, DIM, DIM) * 0.3)
        self.register_buffer("bias", torch.randn(4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
        self.register_buffer("scores", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        taken = F.one_hot((p + self.bias).topk(2, -1).indices, 4).sum(-2)
        count = taken.flatten(0, -2).sum(0)
        if self.where == "layer":
            self.counts += count
        self.scores.mul_(0.9).add_(p.detach().flatten(0, -2).mean(0), alpha=0.1)
        return x + torch.einsum("...e,...d,edf->...f", taken * p, x, self.experts), count


class Experts(nn.Module):
    """Layers with experts; counts are kept in the ``layer``, or by the ``model``."""

    def __init__(self, where: str = "layer", layers: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Routed(where) for _ in range(layers))
        self.register_buffer("counts", torch.zeros(layers, 4, dtype=torch.long))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, counts = self.first(x), []
        for layer in self.layers:
            x, count = layer(x)
            counts.append(count)
        if self.layers[0].where == "model":
            self.counts += torch.stack(counts)
        self.tokens += x[..., 0].numel()
        return F.mse_loss(self.last(x), y)
