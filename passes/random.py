"""Counter-based random numbers: the same seed draws the same numbers under every plan.

An element's number is a hash of the step's seed, the operator's stream and the element's index in the whole tensor. The
index is computed from sums of ``arange``, which the factor rules shard like any other operator, so each rank draws just
the numbers of its own shard. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from passes.collectives import NAMESPACE, _library

SEED = "random.seed"  # the state that every random operator reads; the engine sets it before each step
_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STREAM_STRIDE = 1 << 40
_BITS = 24  # random bits per number: the significand of a float32


def stream_name(index: int) -> str:
    """Name of the constant that holds the stream number of the model's ``index``-th random operator."""
    return f"random.stream.{index}"


def is_stream(name: str) -> bool:
    return name.startswith("random.stream.")


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    # The finalizer maps zero to zero, so that the first element of the first stream counts from one.
    return _mixed((index + (stream * _STREAM_STRIDE + seed * _GOLDEN)).add_(1).mul_(_GOLDEN))


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shifted(x, 31))


def uniform(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform float32 numbers in [0, 1), one per element of ``index``.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-d int64 tensors.
    """
    return _shifted(_hash(index, seed, stream), 64 - _BITS).to(torch.float32).mul_(2.0**-_BITS)


def _between(bits: Tensor, count: int = _BITS) -> Tensor:
    """Map integers of ``count`` bits to float64 numbers in the open interval (0, 1)."""
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-count)


def normal(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw float32 numbers of the standard normal distribution (Box and Muller 1958); operands as :func:`uniform`."""
    x = _hash(index, seed, stream)
    radius = _between(_shifted(x, 64 - _BITS)).log_().mul_(-2.0).sqrt_()
    angle = _between(_shifted(x, 64 - 2 * _BITS).bitwise_and_((1 << _BITS) - 1)).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).to(torch.float32)


def exponential(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw float32 numbers of the exponential distribution with rate 1; operands as for :func:`uniform`."""
    return _between(_shifted(_hash(index, seed, stream), 64 - _BITS)).log_().neg_().to(torch.float32)


def _like_index(index: Tensor, seed: Tensor, stream: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(index, dtype=dtype)


def bits(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform integers (int64) in [0, ``MOST_BITS``); operands as for :func:`uniform`."""
    return _shifted(_hash(index, seed, stream), 1)


def fraction(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform float64 numbers of 52 bits in the open interval (0, 1), for inverse distribution functions."""
    return _fraction(_hash(index, seed, stream))


def _fraction(hashed: Tensor) -> Tensor:
    return _between(_shifted(hashed, 64 - _FINE_BITS), _FINE_BITS)


class _Sequence:
    """A splitmix64 generator per element, seeded by the element's hash, for samplers that need several numbers."""

    def __init__(self, index: Tensor, seed: Tensor, stream: Tensor) -> None:
        self.state = _hash(index, seed, stream)
        self.step = 0

    def fraction(self) -> Tensor:
        self.step += 1
        step = self.step * _GOLDEN & ((1 << 64) - 1)
        return _fraction(_mixed(self.state + (step - (1 << 64) if step >> 63 else step)))

    def normal(self) -> Tensor:
        return self.fraction().log_().mul_(-2.0).sqrt_().mul_(self.fraction().mul_(2 * math.pi).cos_())


def _all_done(left: Tensor) -> bool:
    """Whether no element of ``left`` is true, so that further rounds can be skipped; always ``False`` on accelerators.

    Skipping changes no result. Reading the answer would make an accelerator synchronise with the host.
    """
    return left.device.type == "cpu" and not bool(left.any())


def gamma(index: Tensor, seed: Tensor, stream: Tensor, concentration: Tensor) -> Tensor:
    """Draw numbers of the gamma distribution with rate 1, in the type of ``concentration``.

    Uses the rejection method of Marsaglia and Tsang (2000) in float64 with ``ROUNDS`` rounds; each element takes its
    first accepted candidate. A round accepts at least 95 of 100 candidates, so an element is left without one with a
    probability below 1e-40; it is then ``concentration - 1/3``. For a concentration below 1, the number is drawn for
    ``concentration + 1`` and multiplied by ``u ** (1 / concentration)`` with a uniform ``u``.
    """
    own = _Sequence(index, seed, stream)
    alpha = concentration.to(torch.float64)
    small = alpha < 1
    d = torch.where(small, alpha + 1, alpha) - 1 / 3
    found, left = d.expand(index.shape), torch.ones_like(index, dtype=torch.bool)
    for _ in range(ROUNDS):
        x, u = own.normal(), own.fraction()
        v = (1 + x / (9 * d).sqrt()) ** 3
        accepted = left & (v > 0) & (u.log() < 0.5 * x * x + d * (1 - v + v.log()))
        found, left = torch.where(accepted, d * v, found), left & ~accepted
        if _all_done(left):
            break
    # Use a number that no round draws, so that skipped rounds do not change it.
    own.step = 3 * ROUNDS
    found = torch.where(small, found * own.fraction() ** (1 / alpha), found)
    return found.to(concentration.dtype).clamp_(min=torch.finfo(concentration.dtype).tiny)


def poisson(index: Tensor, seed: Tensor, stream: Tensor, rate: Tensor) -> Tensor:
    """Draw numbers of the Poisson distribution, in the type of ``rate``.

    Inverts the distribution function, a regularised upper incomplete gamma function, by bisection in float64.
    """
    u, mean = fraction(index, seed, stream), rate.to(torch.float64)
    # The probability outside of the interval is below 2**-53 (Chernoff's bound).
    low = (mean - 9 * mean.sqrt()).floor().sub_(1).clamp_(min=-1).expand(u.shape)
    high = (mean + 12 * mean.sqrt() + 40).ceil().expand(u.shape)
    for _ in range(_BISECTIONS):
        middle = ((low + high) / 2).floor()
        reached = torch.special.gammaincc(middle + 1, mean.expand(u.shape)) >= u
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        if _all_done(high - low > 1):
            break
    return high.to(rate.dtype)


def binomial(index: Tensor, seed: Tensor, stream: Tensor, count: Tensor, prob: Tensor) -> Tensor:
    """Draw numbers of the binomial distribution, in the type of ``count``; computed in float64.

    If fewer than 10 successes are expected, inverts the distribution function term by term. Otherwise uses BTRS
    (Hormann 1993) with ``ROUNDS`` rounds; each element takes its first accepted candidate. A round accepts at least 3
    of 4 candidates, so an element is left without one with a probability below 1e-19; it is then the mode.
    """
    own = _Sequence(index, seed, stream)
    n, p = count.to(torch.float64).expand(index.shape), prob.to(torch.float64).expand(index.shape)
    flipped = p > 0.5
    p = torch.where(flipped, 1 - p, p)
    few = _few_successes(own.fraction(), n, p)
    odds, spread = (p / (1 - p)).log(), (n * p * (1 - p)).sqrt()
    mode = ((n + 1) * p).floor()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    top = (mode + 1).lgamma() + (n - mode + 1).lgamma()
    many, left = mode, n * p >= _FEW
    for _ in range(ROUNDS):
        if _all_done(left):
            break
        u, v = own.fraction() - 0.5, own.fraction()
        us = 0.5 - u.abs()
        k = ((2 * a / us + b) * u + n * p + 0.5).floor()
        bound = (v * (2.83 + 5.1 / b) * spread / (a / (us * us) + b)).log()
        below = bound <= top - (k + 1).lgamma() - (n - k + 1).lgamma() + (k - mode) * odds
        accepted = left & (k >= 0) & (k <= n) & (((us >= 0.07) & (v <= 0.92 - 4.2 / b)) | below)
        many, left = torch.where(accepted, k, many), left & ~accepted
    found = torch.where(n * p >= _FEW, many, few)
    return torch.where(flipped, n - found, found).to(count.dtype)


def _few_successes(u: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Invert the binomial distribution function at ``u`` for ``n`` trials with success probability ``p``.

    Valid if fewer than ``_FEW`` successes are expected: at most ``_MOST_SUCCESSES`` terms are summed.
    """
    term = (n * torch.log1p(-p)).exp()
    total, k, ratio = term, torch.zeros_like(u), p / (1 - p)
    for step in range(_MOST_SUCCESSES):
        more = (total < u) & (k == step) & (n > step)
        k = k + more
        if _all_done(more):
            break
        term = term * ratio * (n - step) / (step + 1)
        total = total + term
    return k


def gamma_grad(concentration: Tensor, sample: Tensor) -> Tensor:
    """Derivative of a gamma sample with respect to its concentration, by torch's implicit differentiation."""
    return torch._standard_gamma_grad(concentration, sample)


def dirichlet_grad(sample: Tensor, concentration: Tensor, total: Tensor) -> Tensor:
    """Derivative of a Dirichlet sample with respect to its concentration; ``total``: sum of all concentrations."""
    return torch._dirichlet_grad(sample, concentration, total.expand_as(sample))


def _like_parameter(index: Tensor, seed: Tensor, stream: Tensor, *parameters: Tensor) -> Tensor:
    return torch.empty_like(index, dtype=parameters[0].dtype)


def _like_sample(*operands: Tensor) -> Tensor:
    return torch.empty_like(operands[0])


MOST_BITS = 1 << 63
ROUNDS = 32  # rounds of a rejection method
_FINE_BITS = 52
_BISECTIONS = 40  # for means up to 1e15, beyond which a float64 has no whole numbers
_FEW, _MOST_SUCCESSES = 10, 96  # with fewer than 10 expected, more than 96 have a probability below 2**-53
_NUMBERS = {
    uniform: torch.float32,
    normal: torch.float32,
    exponential: torch.float32,
    bits: torch.int64,
    fraction: torch.float64,
}
_OPERATORS: tuple[tuple[Callable[..., Tensor], str, Callable[..., Tensor]], ...] = (
    *((f, "Tensor index, Tensor seed, Tensor stream", partial(_like_index, dtype=d)) for f, d in _NUMBERS.items()),
    (gamma, "Tensor index, Tensor seed, Tensor stream, Tensor concentration", _like_parameter),
    (poisson, "Tensor index, Tensor seed, Tensor stream, Tensor rate", _like_parameter),
    (binomial, "Tensor index, Tensor seed, Tensor stream, Tensor count, Tensor prob", _like_parameter),
    (gamma_grad, "Tensor concentration, Tensor sample", _like_sample),
    (dirichlet_grad, "Tensor sample, Tensor concentration, Tensor total", _like_sample),
)
for _function, _arguments, _fake in _OPERATORS:
    _name = _function.__name__
    _library.define(f"{_name}({_arguments}) -> Tensor")
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)

ops = torch.ops.partition
# The operators that draw numbers; their first operand is the index of each element.
DRAWS = frozenset(
    getattr(ops, name).default for name in (*(f.__name__ for f in _NUMBERS), "gamma", "poisson", "binomial")
)


def element_index(shape: tuple[int, ...], device: torch.device, group: int = 0) -> Tensor:
    """The int64 index of every element of a whole tensor of ``shape``, counted on from all earlier groups' elements."""
    count = torch.Size(shape).numel()
    return torch.arange(group * count, (group + 1) * count, device=device).view(shape)


def drawn(
    distribution: torch._ops.OpOverload,
    shape: tuple[int, ...],
    device: torch.device,
    at: list[int],
    group: int = 0,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Draw the numbers of a whole tensor of ``shape`` by ``distribution``, one of ``DRAWS``.

    ``at``: seed and stream. ``group``: number of the group of samples. ``parameters``: the distribution's own operands.
    """
    places = (torch.tensor(v, device=device) for v in at)
    numbers: Tensor = distribution(element_index(shape, device, group), *places, *parameters)
    return numbers


def dropout(x: Tensor, p: float, seed: int, stream: int, group: int = 0) -> Tensor:
    """Apply dropout to a whole tensor; elements that are kept are scaled by ``1 / (1 - p)``."""
    kept = drawn(ops.uniform.default, tuple(x.shape), x.device, [seed, stream], group) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p) if p < 1 else 0.0), torch.zeros_like(x))
