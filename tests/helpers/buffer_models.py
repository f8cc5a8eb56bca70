"""Modules whose forward changes their buffers, each in its own way, and the model around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

DIM, BATCH = 8, 8


class Around(nn.Module):
    """A layer before and one after the module ``t``, which may work on images."""

    def __init__(self, module: nn.Module, images: bool = False) -> None:
        super().__init__()
        self.images = images
        self.a = nn.Conv2d(3, DIM, 3, padding=1) if images else nn.Linear(6, DIM)
        self.t = module
        self.b = nn.Linear(DIM, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.t(self.a(x))
        return F.cross_entropy(self.b(x.mean((2, 3)) if self.images else x), y)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[0] = True
        return x


class Average(nn.Module):
    """An average of activations, written by ``how``; read after that."""

    def __init__(self, how: Callable[[Average, Tensor], None]) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("m", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.how(self, x.mean(0))
        return x * self.m.clone()


def _set(module: Average, seen: Tensor) -> None:
    module.m = 0.9 * module.m + 0.1 * seen


def _some(module: Average, seen: Tensor) -> None:
    module.m[1:3] = seen[1:3]
    module.m[torch.tensor([0, 5])] += seen[:2]


WAYS: dict[str, Callable[[Average, Tensor], None]] = {
    "copy_": lambda a, seen: a.m.copy_(0.9 * a.m + 0.1 * seen),  # type: ignore[func-returns-value,return-value]
    "mul_ add_": lambda a, seen: a.m.mul_(0.9).add_(seen, alpha=0.1),  # type: ignore[func-returns-value,return-value]
    "lerp_": lambda a, seen: a.m.lerp_(seen, 0.1),  # type: ignore[func-returns-value,return-value]
    "index": _some,
    "attribute": _set,
}


class Through(nn.Module):
    """The gradient flows through the new value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.m = 0.9 * self.m.detach() + 0.1 * x.mean(0)
        return x * self.m


class Twice(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.t, self.l = module, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.t(self.l(torch.relu(self.t(x))))


class Tied(nn.Module):
    """Two modules with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.l = Average(WAYS["lerp_"]), Average(WAYS["mul_ add_"]), nn.Linear(DIM, DIM)
        self.b.m = self.a.m

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.l(self.a(x)))


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(5, DIM))
        self.register_buffer("size", torch.ones(5))
        self.register_buffer("total", torch.randn(5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = torch.cdist(x, self.book).argmin(-1)
            hot = F.one_hot(nearest, 5).to(x.dtype)
            self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(hot.T @ x, alpha=0.1)
            self.book.copy_(self.total / self.size[:, None])
        found = self.book[nearest]
        return x + (found - x).detach() + 0.1 * x * found


class Swap(nn.Module):
    """Each buffer takes what the other had."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("p", torch.ones(DIM))
        self.register_buffer("q", 2 * torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        p = self.p.clone()
        self.p.copy_(self.q)
        self.q.copy_(p)
        return x * self.p.clone() + self.q


class Previous(nn.Module):
    """Buffers that hold weights, as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.w = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))
        self.register_buffer("w_before", torch.zeros(DIM))
        self.register_buffer("l_before", torch.zeros(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w_before.copy_(self.w)
            self.l_before.copy_(self.l.weight.t())
        return self.l(x) * self.w


class Queue(nn.Module):
    """The samples before, in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(DIM, 2 * BATCH))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.rows.clone()
        place = (self.next + torch.arange(len(x))) % (2 * BATCH)
        self.rows[:, place] = x.detach().T
        self.next[0] = (self.next[0] + len(x)) % (2 * BATCH)
        return x + out[:, :DIM]


class Steps(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return x * self.n.clone()


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.m.copy_(torch.maximum(self.m, x.detach().abs().max()))
        return x / self.m


class FunctionalNorm(nn.Module):
    """Nothing but the norm says that statistics are changed, and its schema does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("var", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True, momentum=0.3)


# What of the samples no buffer depends on: right with any number of microbatches.
ALONE: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: Around(parametrizations.spectral_norm(nn.Linear(DIM, DIM))),
    "spectral norm, legacy": lambda: Around(nn.utils.spectral_norm(nn.Linear(DIM, DIM))),
    "spectral norm, images": lambda: Around(parametrizations.spectral_norm(nn.Conv2d(DIM, DIM, 3)), True),
    "counter": lambda: Around(Counter()),
    "counted twice": lambda: Around(Twice(Steps())),
    "not saved": lambda: Around(Steps()),
    "swap": lambda: Around(Swap()),
    "weights before": lambda: Around(Previous()),
}
TOGETHER: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Around(nn.BatchNorm1d(DIM)),
    "batch norm, images": lambda: Around(nn.BatchNorm2d(DIM, affine=False), True),
    "batch norm over all batches": lambda: Around(nn.BatchNorm1d(DIM, momentum=None)),
    "instance norm": lambda: Around(nn.InstanceNorm2d(DIM, track_running_stats=True, affine=True), True),
    "instance norm, no momentum": lambda: Around(nn.InstanceNorm2d(DIM, momentum=None, track_running_stats=True), True),
    "norm as a function": lambda: Around(FunctionalNorm()),
    "norm twice": lambda: Around(Twice(nn.BatchNorm1d(DIM))),
    "average twice": lambda: Around(Twice(Average(WAYS["lerp_"]))),
    "tied": lambda: Around(Tied()),
    "through": lambda: Around(Through()),
    "codebook": lambda: Around(Codebook()),
    "queue": lambda: Around(Queue()),
    "largest": lambda: Around(Largest()),
    **{f"average by {way}": (lambda how=how: Around(Average(how))) for way, how in WAYS.items()},  # type: ignore[misc]
}


class Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(DIM, DIM), norm, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Deep(nn.Module):
    """Layers that are alike."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(DIM), layers: int = 4) -> None:
        super().__init__()
        self.inside = nn.Linear(6, DIM)
        self.layers = nn.ModuleList(Layer(norm()) for _ in range(layers))
        self.out = nn.Linear(DIM, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.out(x), y)


class Across(nn.Module):
    """Buffers that the first layers read, and the last changes; or the other way round."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.register_buffer("scale", -torch.zeros(DIM) + 1)
        self.register_buffer("flags", torch.zeros(DIM, dtype=torch.bool))
        self.inside, self.out = nn.Linear(6, DIM), nn.Linear(DIM, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = self.scale.clone()
        if not self.last:
            self.scale.mul_(0.9)
            self.flags.logical_not_()
        x = self.inside(x) * (1 + self.flags)
        for layer in self.layers:
            x = x + layer(x) * scale
        if self.last:
            self.scale.mul_(0.9)
            self.flags.logical_not_()
        return F.cross_entropy(self.out(x * self.scale.clone()), y)


class ResNet(nn.Module):
    """Convolutions with norms between them, and skips over these."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, DIM, 3, padding=1, bias=False), nn.BatchNorm2d(DIM), nn.ReLU())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(DIM, DIM, 3, padding=1, bias=False), nn.BatchNorm2d(DIM), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def inputs_of(model: nn.Module, seed: int = 0, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = isinstance(model, ResNet) or getattr(model, "images", False)
    x = torch.randn(batch, *((3, 6, 6) if images else (6,)), generator=generator)
    return x, torch.randint(4, (batch,), generator=generator)
