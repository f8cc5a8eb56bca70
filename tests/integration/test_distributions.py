"""Distributions with parameters, choices and permutations inside forward: every plan draws what the reference draws,
of the right distribution, and with torch's gradient; what cannot be drawn by place is refused by its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as dist
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Plan, PlanError, Topology, partition
from partitioner.passes.errors import CaptureError, UnsupportedError
from partitioner.passes.ops.random import draw_whole_tensor, ops
from partitioner.plans.reference import run_reference

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH, SLOW = 8, pytest.mark.slow
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"pp": 1, "dp": 1, "tp": 1}),
    "tp": (2, {"pp": 1, "dp": 1, "tp": 2}),
    "dp, microbatches": (2, {"pp": 1, "dp": 2, "tp": 1, "microbatch_size": 1}),
    "pp": (2, {"pp": 2, "dp": 1, "tp": 1, "microbatch_size": 2}),
}


class Model(nn.Module):
    """``function`` stands between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.then(self.function(self.first(x))) ** 2).mean()


def planned(function: Callable[[Tensor], Tensor], mesh: str) -> tuple[Plan, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(4, 3, WIDTH)
    ranks, constraints = MESHES[mesh]
    return partition(model, Topology.local(ranks), (x,), constraints=Constraints(**constraints)), model, (x,)


def positive(h: Tensor) -> Tensor:
    return F.softplus(h) + 0.3


def permuted(h: Tensor) -> Tensor:
    h = h[:, torch.randperm(3)] + h[..., torch.randperm(WIDTH, dtype=torch.int32).long()]
    return h.index_select(1, torch.randperm(3))


def chosen(h: Tensor) -> Tensor:
    some = torch.multinomial(h[:, 0].softmax(-1), 5, replacement=True).to(h.dtype).mean(-1)
    others = torch.multinomial(h[:, 1].softmax(-1), 3).to(h.dtype)[:, :, None]
    whole = torch.multinomial(torch.ones(WIDTH), WIDTH).to(h.dtype)
    return h * some[:, None, None] + others * whole


def categorical(h: Tensor) -> Tensor:
    policy, other = dist.Categorical(logits=h), dist.Categorical(probs=h.softmax(-1))
    action = policy.sample()
    score = policy.log_prob(action) + other.log_prob(other.sample((2,))).sum(0) + policy.entropy()
    return h * score[..., None]


def counted(h: Tensor) -> Tensor:
    one = dist.OneHotCategoricalStraightThrough(logits=h).rsample() + dist.OneHotCategorical(logits=h).sample()
    return h * (one + dist.Multinomial(5, logits=h).sample() + dist.Binomial(5, logits=h).sample())


def gammas(h: Tensor) -> Tensor:
    a, b = positive(h), positive(-h)
    x = dist.Gamma(a, b).rsample() + dist.Chi2(a).rsample() + dist.Beta(a, b).rsample()
    return h * (x + dist.Dirichlet(a).rsample() + dist.StudentT(2 + a, h, b).rsample().tanh())


def ratios(h: Tensor) -> Tensor:
    a, b = positive(h), positive(-h)
    return h + dist.FisherSnedecor(a, b).rsample().tanh() + dist.InverseGamma(a, b).rsample().tanh()


def whole_numbers(h: Tensor) -> Tensor:
    x = dist.Poisson(positive(h)).sample() + torch.poisson(positive(h)) + dist.Geometric(logits=h).sample()
    x = x + torch.binomial(torch.full_like(h, 30.0), h.detach().sigmoid())
    return h * x + dist.NegativeBinomial(5.0, logits=h).sample()


def located(h: Tensor) -> Tensor:
    s = positive(h)
    x = dist.Laplace(h, s).rsample() + dist.Gumbel(h, s).rsample() + dist.LogNormal(h, 0.3 * s).rsample()
    return x + dist.Cauchy(h, s).rsample().tanh() + dist.HalfCauchy(s).rsample().tanh()


def relaxed(h: Tensor) -> Tensor:
    half = torch.tensor(0.5)
    x = dist.RelaxedBernoulli(half, logits=h).rsample() + dist.RelaxedOneHotCategorical(half, logits=h).rsample()
    return x + h * F.gumbel_softmax(h) + F.gumbel_softmax(h, hard=True)


def in_place(h: Tensor) -> Tensor:
    x = torch.empty_like(h).log_normal_(0.1, 0.5) + torch.empty_like(h).cauchy_(0.1, 0.5).tanh()
    x = x + torch.empty_like(h).geometric_(0.3) + torch.empty_like(h).random_(2, 5)
    x = x + torch.empty(h.shape, dtype=torch.int16).random_() / 30000
    return h * x + torch.randint_like(h, 1, 5) + torch.normal(h, positive(h))


def rectified(h: Tensor) -> Tensor:
    x = F.rrelu(h, 0.1, 0.4, training=True) + nn.RReLU()(h) + F.rrelu(h, 0.1, 0.4)
    return x + F.rrelu(h + 1, training=True, inplace=True) + torch.native_dropout(h, 0.3, True)[0]


def dropped(h: Tensor) -> Tensor:
    x = torch.dropout_(h.clone(), 0.4, True) + F.dropout(h.clone(), 0.3, inplace=True) + F.dropout(h, 1.0)
    return x + F.feature_alpha_dropout(h, 0.3, training=True) + torch.alpha_dropout_(h.clone(), 0.2, True)


def pooled(h: Tensor) -> Tensor:
    images = torch.stack([h, h.tanh()], 1)
    flat = F.fractional_max_pool2d(images, 2, output_size=(2, 4)).mean((1, 2, 3))
    deep = F.fractional_max_pool3d(torch.stack([images] * 4, 2), 2, output_size=(2, 1, 4))
    return h * (flat + deep.mean((1, 2, 3, 4)))[:, None, None]


def layer_dropped(h: Tensor) -> Tensor:
    h = torch.where(torch.rand([]) < 0.5, h.tanh(), h) + torch.where(torch.rand(()) < 0.5, h.sin(), h)
    return h * torch.bernoulli(torch.tensor(0.5)) + h * torch.where(torch.rand(1) < 0.5, 1.0, 2.0)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        permuted, chosen, categorical, counted, gammas, ratios, whole_numbers, located, relaxed, in_place, rectified,
        dropped, pooled, layer_dropped,
    )
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["dp, microbatches", *(pytest.param(m, marks=SLOW) for m in ("one", "tp", "pp"))])
@pytest.mark.parametrize("way", WAYS)
def test_plans_draw_what_the_reference_draws(way: str, mesh: str):
    plan, model, inputs = planned(WAYS[way], mesh)
    report = plan.verify(model, inputs)
    assert report.ok, str(report)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_limits_are_those_of_the_precision(precision: str):
    """Of the type that a plan is traced in, which ``torch.finfo`` tells forward."""
    torch.manual_seed(0)
    model, inputs = Model(located), (torch.randn(4, 3, WIDTH),)
    report = partition(model, Topology.local(1), inputs, precision=precision).verify(model, inputs)
    assert report.ok, str(report)


def test_distributions_in_float64():
    torch.manual_seed(0)
    model, inputs = Model(lambda h: gammas(whole_numbers(h))), (torch.randn(4, 3, WIDTH),)
    assert partition(model, Topology.local(1), inputs, precision="fp64").verify(model, inputs).ok


def shuffled(h: Tensor) -> Tensor:
    return h * h[torch.randperm(h.shape[0])].tanh()


def test_samples_are_shuffled_within_one_microbatch():
    torch.manual_seed(0)
    model, inputs = Model(shuffled), (torch.randn(4, 3, WIDTH),)
    constraints = Constraints(pp=1, dp=2, tp=1, microbatch_size=2)
    report = partition(model, Topology.local(2), inputs, constraints=constraints).verify(model, inputs)
    assert report.ok, str(report)
    with pytest.raises(PlanError, match="combines samples across the batch"):
        planned(shuffled, "dp, microbatches")


def test_groups_of_samples_draw_apart():
    """Where samples meet within a microbatch alone, each group has numbers of its own, of every distribution."""
    torch.manual_seed(0)
    model, inputs = Model(lambda h: gammas(shuffled(h)) + whole_numbers(h)), (torch.randn(4, 3, WIDTH),)
    constraints = Constraints(pp=1, dp=2, tp=1, microbatch_size=1, couple="microbatch")
    plan = partition(model, Topology.local(2), inputs, constraints=constraints)
    report = plan.verify(model, inputs)
    assert report.ok, str(report)


# --- what is drawn is of its distribution -----------------------------------------------------------------------------

COUNT = 1 << 16


def numbers(distribution: Any, *parameters: float) -> Tensor:
    given = [torch.tensor(p, dtype=torch.float64) for p in parameters]
    return draw_whole_tensor(distribution, (COUNT,), torch.device("cpu"), [7, 3], 0, given).double()


def close(x: Tensor, mean: float, variance: float) -> None:
    assert x.isfinite().all()
    assert abs(float(x.mean()) - mean) < 5 * math.sqrt(variance / COUNT)
    assert abs(float(x.var()) / variance - 1) < 0.1


def fits(x: Tensor, logs: Tensor) -> None:
    """The frequencies of whole numbers against the logarithms of their probabilities (chi squared)."""
    expected = logs.exp() * x.numel()
    often = expected > 20
    observed = torch.bincount(x.long(), minlength=len(logs))[: len(logs)]
    squares = ((observed - expected) ** 2 / expected)[often]
    degrees = max(1, len(squares) - 1)
    assert float(squares.sum()) < degrees + 5 * math.sqrt(2 * degrees) + 5


@pytest.mark.parametrize("concentration", [0.05, 0.7, 1.0, 3.0, 80.0])
def test_gamma(concentration: float):
    x = numbers(ops.gamma.default, concentration)
    close(x, concentration, concentration)
    ranks = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    distance = torch.special.gammainc(torch.full_like(x, concentration), x).sort().values - ranks
    assert float(distance.abs().max()) < 2.0 / math.sqrt(COUNT)  # Kolmogorov and Smirnov, 1 in 1500


@pytest.mark.parametrize("rate", [0.05, 1.0, 7.0, 60.0, 1e8])
def test_poisson(rate: float):
    x = numbers(ops.poisson.default, rate)
    close(x, rate, rate)
    if rate < 1000:
        fits(x, dist.Poisson(torch.tensor(rate, dtype=torch.float64)).log_prob(torch.arange(300.0)))


@pytest.mark.parametrize(("count", "prob"), [(1, 0.3), (12, 0.5), (40, 0.9), (40, 0.4), (5000, 0.7), (10**9, 0.01)])
def test_binomial(count: int, prob: float):
    x = numbers(ops.binomial.default, count, prob)
    close(x, count * prob, count * prob * (1 - prob))
    assert float(x.min()) >= 0 and float(x.max()) <= count
    if count < 1000:
        known = dist.Binomial(count, torch.tensor(prob, dtype=torch.float64))
        fits(x, known.log_prob(torch.arange(count + 1, dtype=torch.float64)))


@pytest.mark.parametrize(("count", "prob", "always"), [(0, 0.5, 0), (9, 0.0, 0), (9, 1.0, 9), (900, 1.0, 900)])
def test_binomial_without_chance(count: int, prob: float, always: int):
    assert (numbers(ops.binomial.default, count, prob) == always).all()


class Drawn(nn.Module):
    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self) -> Tensor:
        return self.draw()


def in_reference(draw: Callable[[], Tensor], seed: int = 7) -> Tensor:
    return run_reference(Drawn(draw), (), train=False, seed=seed).outputs[""]  # type: ignore[no-any-return]


def test_choices_have_their_weights():
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.5])
    found = in_reference(lambda: torch.multinomial(weights, COUNT, replacement=True))
    fits(found, (weights.double() / 5).log())
    assert int((found == 1).sum()) == 0
    rows = weights.expand(COUNT, 5)
    found = in_reference(lambda: torch.multinomial(rows, 4))
    assert sorted(set(found[0].tolist())) == [0, 2, 3, 4]
    assert (found.sort(-1).values == torch.tensor([0, 2, 3, 4])).all()
    fits(found[:, 0], (weights.double() / 5).log())
    second = found[found[:, 0] == 2][:, 1]
    fits(second, torch.tensor([0.5, 0.0, 0.0, 1.0, 1.5]).double().div(3).log())


def test_permutations_are_equally_likely():
    found = [in_reference(lambda: torch.randperm(4), seed) for seed in range(720)]
    assert all(sorted(order.tolist()) == [0, 1, 2, 3] and order.dtype == torch.int64 for order in found)
    codes = torch.stack(found) @ torch.tensor([64, 16, 4, 1])
    _, counts = codes.unique(return_counts=True)
    assert len(counts) == 24 and int(counts.min()) > 8 and int(counts.max()) < 60


MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "geometric": (lambda: torch.empty(COUNT).geometric_(0.3), 1 / 0.3, 0.7 / 0.09),
    "log normal": (lambda: torch.empty(COUNT).log_normal_(0, 0.5), math.exp(1 / 8), math.e**0.5 - math.e**0.25),
    "cauchy": (lambda: torch.empty(COUNT).cauchy_(1.0, 2.0).sub(1).div(2).atan(), 0.0, math.pi**2 / 12),
    "dirichlet": (lambda: dist.Dirichlet(torch.tensor([2.0, 1.0, 1.0])).sample((COUNT,))[:, 0], 0.5, 0.05),
    "beta": (lambda: dist.Beta(torch.tensor(0.5), torch.tensor(0.5)).sample((COUNT,)), 0.5, 0.125),
    "laplace": (lambda: dist.Laplace(torch.tensor(1.0), torch.tensor(2.0)).sample((COUNT,)), 1.0, 8.0),
    "gumbel": (lambda: dist.Gumbel(torch.tensor(0.0), torch.tensor(1.0)).sample((COUNT,)), 0.5772157, math.pi**2 / 6),
    "slopes": (lambda: F.rrelu(-torch.ones(COUNT), 0.1, 0.4, training=True), -0.25, 0.09 / 12),
    "bytes": (lambda: torch.empty(COUNT, dtype=torch.uint8).random_().double(), 127.5, (256**2 - 1) / 12),
    "wide": (lambda: torch.randint(-(1 << 39), 1 << 39, (COUNT,)).double() / (1 << 39), 0.0, 1 / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str):
    draw, mean, variance = MOMENTS[name]
    close(in_reference(draw).double(), mean, variance)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_number_is_drawn_too(seed: int):
    assert float(in_reference(lambda: torch.rand(1), seed)) > 0.0


# --- what is refused --------------------------------------------------------------------------------------------------

HERE = r"test_distributions.py:\d+"
GENERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda h: h * torch.rand(WIDTH, generator=torch.Generator()),
    "randn": lambda h: h * torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)),
    "the default one": lambda h: h * torch.rand(WIDTH, generator=torch.default_generator),
    "in place": lambda h: h * torch.empty(WIDTH).bernoulli_(0.5, generator=torch.Generator()),
    "randperm": lambda h: h[..., torch.randperm(WIDTH, generator=torch.Generator())],
    "multinomial": lambda h: h[..., torch.multinomial(torch.ones(WIDTH), 8, generator=torch.Generator())],
    "initialised": lambda h: h * nn.init.normal_(torch.empty(WIDTH), generator=torch.Generator()),
}


@pytest.mark.parametrize("way", GENERATORS)
def test_generators_of_its_own_are_refused(way: str):
    with pytest.raises(UnsupportedError, match=rf"draws from a torch.Generator \(\w+, generator=\) \(.*{HERE}\)"):
        planned(GENERATORS[way], "one")


def seeded(h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand(WIDTH)


def forked(h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return h * torch.rand(WIDTH)


def restored(h: Tensor) -> Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return h * torch.rand(WIDTH)


@pytest.mark.parametrize("function", [seeded, forked, restored])
def test_generators_that_forward_sets_are_refused(function: Callable[[Tensor], Tensor]):
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=rf"sets the state of torch's random generator .*{HERE}"):
        partition(Model(function), Topology.local(1), (torch.randn(4, 3, WIDTH),))
    torch.set_rng_state(before)


DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "if": lambda h: h.tanh() if torch.rand(1) < 0.5 else h,
    "item": lambda h: h.tanh() if torch.rand(()).item() < 0.5 else h,
    "bernoulli": lambda h: h.tanh() if torch.bernoulli(torch.tensor(0.5)) else h,
    "a length": lambda h: h[:, : int(torch.randint(1, 3, ()))],
    "of a uniform": lambda h: h.tanh() if torch.empty(1).uniform_() < 0.5 else h,
}


@pytest.mark.parametrize("way", DECIDING)
def test_draws_that_decide_what_forward_computes_are_refused(way: str):
    with pytest.raises(
        CaptureError, match=rf"(?s){HERE}.*A random number \(aten\.\w+.*torch\.where\(torch\.rand\(\(\)\)"
    ):
        planned(DECIDING[way], "one")


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a float without bounds": lambda h: h * torch.empty_like(h).random_(),
    "too many": lambda h: h * torch.randint(0, (1 << 41) + 1, h.shape),
}


@pytest.mark.parametrize("way", OTHERS)
def test_other_draws_are_refused_by_line(way: str):
    with pytest.raises(UnsupportedError, match=rf"aten\.\w+\.\w+ at .*{HERE}.*bounds that are at most"):
        planned(OTHERS[way], "one")


def test_numbers_of_construction_stay():
    class Noisy(Model):
        def __init__(self) -> None:
            super().__init__(lambda h: h * self.noise)
            self.register_buffer("noise", torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)))
            self.noise: Tensor

    model, inputs = Noisy(), (torch.randn(4, 3, WIDTH),)
    assert partition(model, Topology.local(1), inputs).verify(model, inputs).ok
