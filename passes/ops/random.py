"""Counter-based random numbers: a seed draws the same numbers under every plan.

An element's random number is a hash of the step's seed, the operator's stream number and the element's index in the
whole (unsharded) tensor. Each random operator of the model has its own stream number. The index is computed from sums
of ``arange``, which are sharded like any other operator, so each rank draws only the numbers of its own shard. The hash
is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

One table has a formula for each of torch's random operators. Plans and the reference (the unmodified model on one
process) use the same formulas, which run on tensors or on graph nodes. The result of a formula has no gradient; if
torch's operator has one, a rule of the normal form adds it.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.distributions import Gamma
from torch.overrides import TorchFunctionMode

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.collectives import NAMESPACE, _library

aten = torch.ops.aten

SEED = "random.seed"  # the state that every random operator reads; the engine sets it before each step

_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STREAM_STRIDE = 1 << 40
_BITS = 24  # random bits per number: the significand of a float32


def format_stream_name(index: int) -> str:
    """Return the name of the constant that holds the stream number of the model's ``index``-th random operator, counted
    from 0. A stream number is hashed together with the seed, so that operators draw different numbers from one seed."""
    return f"random.stream.{index}"


def is_stream_name(name: str) -> bool:
    return name.startswith("random.stream.")


def _shift_right_unsigned(x: Tensor, bits: int) -> Tensor:
    """Return ``x`` (int64) shifted right by ``bits``, with zeros in the upper bits."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash_element_index(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Return 64 random bits (int64) for each element of ``index``: a hash of this index, the seed and the stream
    number. ``index``: the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64 tensors;
    random operators with different stream numbers draw different numbers."""
    # The finalizer maps zero to zero, so one is added first.
    return _finalize_hash_bits((index + (stream * _STREAM_STRIDE + seed * _GOLDEN)).add_(1).mul_(_GOLDEN))


def _finalize_hash_bits(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to the int64 tensor ``x``, in place, and return ``x``."""
    x.bitwise_xor_(_shift_right_unsigned(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shift_right_unsigned(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shift_right_unsigned(x, 31))


def uniform(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform float32 numbers in [0, 1), one per element of ``index``, each from a hash of its index, seed and
    stream.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64
    tensors; operators with different stream numbers draw different numbers.
    """
    return (
        _shift_right_unsigned(_hash_element_index(index, seed, stream), 64 - _BITS).to(torch.float32).mul_(2.0**-_BITS)
    )


def _bits_to_open_interval(bits: Tensor, count: int = _BITS) -> Tensor:
    """Return float64 numbers in the open interval (0, 1) for ``bits``, integers of ``count`` random bits each."""
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-count)


def normal(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw float32 numbers of the standard normal distribution (Box and Muller 1958), one per element of ``index``.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64
    tensors; operators with different stream numbers draw different numbers.
    """
    x = _hash_element_index(index, seed, stream)
    radius = _bits_to_open_interval(_shift_right_unsigned(x, 64 - _BITS)).log_().mul_(-2.0).sqrt_()
    angle = _bits_to_open_interval(_shift_right_unsigned(x, 64 - 2 * _BITS).bitwise_and_((1 << _BITS) - 1)).mul_(
        2 * math.pi
    )
    return radius.mul_(angle.cos_()).to(torch.float32)


def exponential(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw float32 numbers of the exponential distribution with rate 1, one per element of ``index``.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64
    tensors; operators with different stream numbers draw different numbers.
    """
    return (
        _bits_to_open_interval(_shift_right_unsigned(_hash_element_index(index, seed, stream), 64 - _BITS))
        .log_()
        .neg_()
        .to(torch.float32)
    )


def _make_fake_like_index(index: Tensor, seed: Tensor, stream: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(index, dtype=dtype)


def bits(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform integers (int64) in [0, 2**63), one per element of ``index``.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64
    tensors; operators with different stream numbers draw different numbers.
    """
    return _shift_right_unsigned(_hash_element_index(index, seed, stream), 1)


def fraction(index: Tensor, seed: Tensor, stream: Tensor) -> Tensor:
    """Draw uniform float64 numbers with 52 random bits in the open interval (0, 1), for inverse distribution functions.

    ``index`` (int64, any shape): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64
    tensors; operators with different stream numbers draw different numbers.
    """
    return _hash_to_fraction(_hash_element_index(index, seed, stream))


def _hash_to_fraction(hashed: Tensor) -> Tensor:
    """Return float64 numbers in the open interval (0, 1) from the upper 52 bits of the int64 numbers ``hashed``."""
    return _bits_to_open_interval(_shift_right_unsigned(hashed, 64 - _FINE_BITS), _FINE_BITS)


class _ElementGenerators:
    """A splitmix64 generator for each element of a tensor, seeded by a hash of the element's index; for samplers that
    need several random numbers per element. ``index``: the elements' indices in the whole tensor. ``seed``, ``stream``:
    0-dimensional int64 tensors; operators with different stream numbers draw different numbers."""

    def __init__(self, index: Tensor, seed: Tensor, stream: Tensor) -> None:
        self.state = _hash_element_index(index, seed, stream)
        self.step = 0

    def fraction(self) -> Tensor:
        """Return the next uniform float64 number in the open interval (0, 1) of each element's own generator."""
        self.step += 1
        step = self.step * _GOLDEN & ((1 << 64) - 1)
        return _hash_to_fraction(_finalize_hash_bits(self.state + (step - (1 << 64) if step >> 63 else step)))

    def normal(self) -> Tensor:
        """Return the next float64 number of the standard normal distribution of each element's own generator."""
        return self.fraction().log_().mul_(-2.0).sqrt_().mul_(self.fraction().mul_(2 * math.pi).cos_())


def _are_all_done(left: Tensor) -> bool:
    """Return whether further rounds of a sampler can be skipped, because no element of the boolean tensor ``left`` is
    true. The answer is always false on accelerators, where reading the tensor would synchronise the device with the
    host. Skipping changes no result."""
    return left.device.type == "cpu" and not bool(left.any())


def gamma(index: Tensor, seed: Tensor, stream: Tensor, concentration: Tensor) -> Tensor:
    """Draw numbers of the gamma distribution with rate 1, one per element of ``index``, in the dtype of
    ``concentration``. Uses the rejection method of Marsaglia and Tsang (2000) in float64 with ``ROUNDS`` (32) rounds;
    each element takes its first accepted candidate. A round accepts at least 95 of 100 candidates, so the probability
    that an element has none is below 1e-40; its result is then ``concentration - 1/3``. For a concentration below 1,
    the result is drawn for ``concentration + 1`` and multiplied by ``u ** (1 / concentration)`` with a uniform ``u``.

    ``index`` (int64): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64 tensors;
    operators with different stream numbers draw different numbers. ``concentration``: the shape parameter for each
    element.
    """
    own = _ElementGenerators(index, seed, stream)
    alpha = concentration.to(torch.float64)
    small = alpha < 1
    d = torch.where(small, alpha + 1, alpha) - 1 / 3
    found, left = d.expand(index.shape), torch.ones_like(index, dtype=torch.bool)
    for _ in range(ROUNDS):
        x, u = own.normal(), own.fraction()
        v = (1 + x / (9 * d).sqrt()) ** 3
        accepted = left & (v > 0) & (u.log() < 0.5 * x * x + d * (1 - v + v.log()))
        found, left = torch.where(accepted, d * v, found), left & ~accepted
        if _are_all_done(left):
            break
    # Use a number that no round draws, so that skipped rounds do not change it.
    own.step = 3 * ROUNDS
    found = torch.where(small, found * own.fraction() ** (1 / alpha), found)
    return found.to(concentration.dtype).clamp_(min=torch.finfo(concentration.dtype).tiny)


def poisson(index: Tensor, seed: Tensor, stream: Tensor, rate: Tensor) -> Tensor:
    """Draw numbers of the Poisson distribution with mean ``rate``, one per element of ``index``, in the dtype of
    ``rate``. Inverts the distribution function, a regularized upper incomplete gamma function, by bisection in float64.

    ``index`` (int64): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64 tensors;
    operators with different stream numbers draw different numbers.
    """
    u, mean = fraction(index, seed, stream), rate.to(torch.float64)
    # The probability outside of the interval is below 2**-53 (Chernoff's bound).
    low = (mean - 9 * mean.sqrt()).floor().sub_(1).clamp_(min=-1).expand(u.shape)
    high = (mean + 12 * mean.sqrt() + 40).ceil().expand(u.shape)
    for _ in range(_BISECTIONS):
        middle = ((low + high) / 2).floor()
        reached = torch.special.gammaincc(middle + 1, mean.expand(u.shape)) >= u
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        if _are_all_done(high - low > 1):
            break
    return high.to(rate.dtype)


def binomial(index: Tensor, seed: Tensor, stream: Tensor, count: Tensor, prob: Tensor) -> Tensor:
    """Draw numbers of the binomial distribution, one per element of ``index``, in the dtype of ``count``; computed in
    float64.

    ``index`` (int64): the elements' indices in the whole tensor. ``seed``, ``stream``: 0-dimensional int64 tensors;
    operators with different stream numbers draw different numbers. ``count``: the number of trials. ``prob``: the
    probability of success. If fewer than 10 successes are expected, inverts the distribution function term by term.
    Otherwise uses BTRS (Hormann 1993) with ``ROUNDS`` (32) rounds; each element takes its first accepted candidate. A
    round accepts at least 3 of 4 candidates, so the probability that an element has none is below 1e-19; its result is
    then the mode.
    """
    own = _ElementGenerators(index, seed, stream)
    n, p = count.to(torch.float64).expand(index.shape), prob.to(torch.float64).expand(index.shape)
    flipped = p > 0.5
    p = torch.where(flipped, 1 - p, p)
    few = _draw_few_successes(own.fraction(), n, p)
    odds, spread = (p / (1 - p)).log(), (n * p * (1 - p)).sqrt()
    mode = ((n + 1) * p).floor()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    top = (mode + 1).lgamma() + (n - mode + 1).lgamma()
    many, left = mode, n * p >= _FEW
    for _ in range(ROUNDS):
        if _are_all_done(left):
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


def _draw_few_successes(u: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """Return, for each element, the quantile ``u`` (in (0, 1)) of the binomial distribution with ``n`` trials and
    success probability ``p``. Valid if fewer than 10 successes are expected: at most 96 terms are summed."""
    term = (n * torch.log1p(-p)).exp()
    total, k, ratio = term, torch.zeros_like(u), p / (1 - p)
    for step in range(_MOST_SUCCESSES):
        more = (total < u) & (k == step) & (n > step)
        k = k + more
        if _are_all_done(more):
            break
        term = term * ratio * (n - step) / (step + 1)
        total = total + term
    return k


def gamma_grad(concentration: Tensor, sample: Tensor) -> Tensor:
    """Return the derivative of each gamma distributed number in ``sample`` with respect to the ``concentration`` from
    which it was drawn, by torch's implicit differentiation. Both tensors and the result have the same shape."""
    return torch._standard_gamma_grad(concentration, sample)


def dirichlet_grad(sample: Tensor, concentration: Tensor, total: Tensor) -> Tensor:
    """Return the derivative of the Dirichlet distributed vectors ``sample`` with respect to ``concentration``, the
    parameters of their distributions, by torch's implicit differentiation. ``total``: the sum of the concentrations of
    each distribution."""
    return torch._dirichlet_grad(sample, concentration, total.expand_as(sample))


def _make_fake_like_parameter(index: Tensor, seed: Tensor, stream: Tensor, *parameters: Tensor) -> Tensor:
    return torch.empty_like(index, dtype=parameters[0].dtype)


def _make_fake_like_sample(*operands: Tensor) -> Tensor:
    return torch.empty_like(operands[0])


MOST_BITS = 1 << 63

ROUNDS = 32  # rounds of a rejection method
_FINE_BITS = 52
_BISECTIONS = 40  # enough for means up to 1e15, beyond which a float64 cannot represent all integers
_FEW, _MOST_SUCCESSES = 10, 96  # with fewer than 10 expected, more than 96 have a probability below 2**-53
_NUMBERS = {
    uniform: torch.float32,
    normal: torch.float32,
    exponential: torch.float32,
    bits: torch.int64,
    fraction: torch.float64,
}
_OPERATORS: tuple[tuple[Callable[..., Tensor], str, Callable[..., Tensor]], ...] = (
    *(
        (f, "Tensor index, Tensor seed, Tensor stream", partial(_make_fake_like_index, dtype=d))
        for f, d in _NUMBERS.items()
    ),
    (gamma, "Tensor index, Tensor seed, Tensor stream, Tensor concentration", _make_fake_like_parameter),
    (poisson, "Tensor index, Tensor seed, Tensor stream, Tensor rate", _make_fake_like_parameter),
    (binomial, "Tensor index, Tensor seed, Tensor stream, Tensor count, Tensor prob", _make_fake_like_parameter),
    (gamma_grad, "Tensor concentration, Tensor sample", _make_fake_like_sample),
    (dirichlet_grad, "Tensor sample, Tensor concentration, Tensor total", _make_fake_like_sample),
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


def make_element_index(shape: tuple[int, ...], device: torch.device, group: int = 0) -> Tensor:
    """Return an int64 tensor of ``shape`` on ``device`` that has the row-major index of every element. Random numbers
    are hashes of these indices.

    ``group``: the index, from 0, of the group of samples that the tensor belongs to, such as a microbatch. Indices
    start after the elements of all earlier groups, whose tensors have the same shape, so that no index occurs in two
    groups.
    """
    count = torch.Size(shape).numel()
    return torch.arange(group * count, (group + 1) * count, device=device).view(shape)


def draw_whole_tensor(
    distribution: torch._ops.OpOverload,
    shape: tuple[int, ...],
    device: torch.device,
    at: list[int],
    group: int = 0,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Return a tensor of ``shape`` on ``device`` with the random numbers that the ranks of a plan, each for its own
    shard, draw for the whole tensor.

    ``distribution``: an operator that draws a number for each element index, such as ``partition::uniform``. ``at``:
    [seed, stream number of the random operator]. ``group``: the index, from 0, of the group of samples, such as a
    microbatch, that the tensor belongs to; each group has other numbers. ``parameters``: the parameters of the
    distribution, such as a rate.
    """
    places = (torch.tensor(v, device=device) for v in at)
    numbers: Tensor = distribution(make_element_index(shape, device, group), *places, *parameters)
    return numbers


def apply_dropout(x: Tensor, p: float, seed: int, stream: int, group: int = 0) -> Tensor:
    """Return a whole tensor ``x`` after dropout with probability ``p``; kept elements are scaled by ``1 / (1 - p)``.

    ``seed``: the seed of the step. ``stream``: the stream number of the dropout operator; operators with different
    stream numbers have different masks. ``group``: the index, from 0, of the group of samples, such as a microbatch,
    that ``x`` belongs to; each group has another mask.
    """
    kept = draw_whole_tensor(ops.uniform.default, tuple(x.shape), x.device, [seed, stream], group) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p) if p < 1 else 0.0), torch.zeros_like(x))


Run = Callable[..., Any]  # (operator, *its arguments) -> its result
# (operator of ``DRAWS``, sizes, *parameters of the distribution) -> numbers in a new stream
Numbers = Callable[..., Any]
_MOST_WHOLE = 1 << 40  # in a larger range that is not a power of two, low integers would be noticeably more frequent


@dataclass(frozen=True)
class Sampler:
    """The inputs of a function that imitates one of torch's random operators, on tensors or on graph nodes.

    ``run(operator, *arguments)``: executes an operator on tensors or appends it to a graph, and returns its result or
    node. ``numbers(distribution, sizes, *parameters)``: draws random numbers; each call draws different ones.
    ``given``: the arguments of torch's operator by name. ``result``: the first tensor that torch's operator returns
    (meta or real), which gives sizes and dtype.
    """

    run: Run
    numbers: Numbers
    given: Mapping[str, Any]
    result: Tensor

    @property
    def sizes(self) -> list[int]:
        return list(self.result.shape)

    def parameter(self, name: str, default: Any = None) -> Any:
        """Return the random operator's argument ``name``, detached if it is a tensor; ``default`` if the operator has
        no such argument."""
        value = self.given.get(name, default)
        return self.run(aten.detach.default, value) if isinstance(value, Tensor | fx.Node) else value

    def cast_to_result(self, value: Any) -> Any:
        return self.run(aten.to.dtype, value, self.result.dtype)

    def shift_and_scale(self, numbers: Any, shift: Any, scale: Any) -> Any:
        """Return ``numbers * scale + shift`` in the dtype of the random operator's result. ``numbers``: random numbers
        of a standard distribution, a tensor or node. ``shift``, ``scale``: numbers, tensors or nodes."""
        numbers = self.cast_to_result(numbers)
        if _is_tensor(scale) or scale != 1:
            numbers = self.run(aten.mul.Tensor, numbers, scale)
        return self.run(aten.add.Tensor, numbers, shift) if _is_tensor(shift) or shift != 0 else numbers


Formula = Callable[[Sampler], Any]


def find_sampling_function(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Formula | None:
    """Return the function that imitates torch's random operator ``target``. It takes a :class:`Sampler`, which has the
    operator's arguments and draws numbers.

    Return ``None`` if ``target`` draws no random numbers or is not supported, or if the call has a generator. Also
    return ``None`` if the operator draws integers from an unknown range, or from a range whose size exceeds 2**40 and
    is not a power of two. ``args``, ``kwargs``: the arguments of the call.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    formula = _FORMULAS.get(_get_operator_name(target))
    given = bind_arguments(target, args, kwargs) if formula is not None else {}
    if given.get("generator") is not None or (formula is _sample_integers and _get_integer_range(given) is None):
        return None
    return formula


def bind_arguments(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments ``args``, ``kwargs`` of a call of ``target``, including defaults, as a dict by name."""
    arguments = target._schema.arguments
    given = {a.name: a.default_value for a in arguments}
    return given | dict(zip([a.name for a in arguments], args, strict=False)) | dict(kwargs)


def _get_operator_name(target: torch._ops.OpOverload) -> str:
    """Return the name of ``target`` without namespace, overload, final ``_`` and ``_functional``, such as
    ``normal``."""
    return target._schema.name.partition("::")[2].removesuffix("_").removesuffix("_functional")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | fx.Node)


def parse_sizes(value: Tensor | fx.Node) -> list[int]:
    return list((value.meta["val"] if isinstance(value, fx.Node) else value).shape)


# --- numbers scaled, and compared -------------------------------------------------------------------------------------
def _sample_uniform(s: Sampler) -> Any:
    """Return uniform numbers between the arguments ``from`` and ``to`` (default 0 and 1) of a random operator of torch.
    ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph node."""
    low, high = s.given.get("from", 0.0), s.given.get("to", 1.0)
    return s.shift_and_scale(s.numbers(ops.uniform.default, s.sizes), low, high - low)


def _sample_normal(s: Sampler) -> Any:
    """Return normally distributed numbers with the arguments ``mean`` and ``std`` (default 0 and 1) of a random
    operator of torch. ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph node.
    """
    mean, std = s.parameter("mean", 0.0), s.parameter("std", 1.0)
    return s.shift_and_scale(s.numbers(ops.normal.default, s.sizes), mean, std)


def _log_normal(s: Sampler) -> Any:
    return s.run(aten.exp.default, _sample_normal(s))


def _sample_exponential(s: Sampler) -> Any:
    return s.shift_and_scale(s.numbers(ops.exponential.default, s.sizes), 0.0, 1.0 / s.given["lambd"])


def _sample_cauchy(s: Sampler) -> Any:
    """Return Cauchy distributed numbers with the ``median`` and scale ``sigma`` of torch's operator ``cauchy``. ``s``
    has the operator's arguments and draws the numbers. The result is a tensor or a graph node."""
    angle = s.run(aten.sub.Tensor, s.numbers(ops.fraction.default, s.sizes), 0.5)
    return s.shift_and_scale(
        s.run(aten.tan.default, s.run(aten.mul.Tensor, angle, math.pi)), s.given["median"], s.given["sigma"]
    )


def _sample_geometric(s: Sampler) -> Any:
    """Return, for each element, the number of trials until the first success, at the probability ``p`` of torch's
    ``geometric``. ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph node."""
    failing = math.log1p(-s.given["p"]) if s.given["p"] < 1 else -1e300
    logs = s.run(aten.log.default, s.numbers(ops.fraction.default, s.sizes))
    trials = s.run(aten.ceil.default, s.run(aten.div.Tensor, logs, failing))
    return s.cast_to_result(s.run(aten.clamp_min.default, trials, 1))


def sample_bernoulli(s: Sampler) -> Any:
    """Return, for each element, 1 with the probability that is an argument of torch's ``bernoulli`` (a number or a
    tensor), otherwise 0. ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph
    node."""
    likely = s.parameter("p") if "p" in s.given else s.parameter("self", s.given.get("input"))
    if isinstance(likely, fx.Node | Tensor):
        return s.cast_to_result(s.run(aten.lt.Tensor, s.numbers(ops.uniform.default, s.sizes), likely))
    return s.cast_to_result(s.run(aten.lt.Scalar, s.numbers(ops.uniform.default, s.sizes), likely))


def _get_integer_range(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (lowest integer, number of integers) of the range from which a call of a random integer operator draws.

    Return ``None`` if the bounds are not known, or if the number of integers is greater than 2**40 and not a power of
    two: low integers would then be noticeably more frequent. ``given``: the call's arguments by name. ``random_``
    without bounds draws all non-negative integers of its dtype.
    """
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if high is None and "self" in given and "from" not in given:
        bits = _EXACT_BITS.get(_get_tensor_dtype(given["self"]))
        high = None if bits is None else 1 << bits
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    count = high - low
    exact = 0 < count <= MOST_BITS and count & (count - 1) == 0
    return (low, count) if exact or 0 < count <= _MOST_WHOLE else None


_EXACT_BITS = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63}


def _get_tensor_dtype(value: Tensor | fx.Node) -> torch.dtype:
    tensor: Tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return tensor.dtype


def _sample_integers(s: Sampler) -> Any:
    """Return uniform integers from the lower bound (included) to the upper bound (excluded) of a random operator such
    as ``randint``. ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph node."""
    found = _get_integer_range(s.given)
    assert found is not None
    low, count = found
    numbers = s.numbers(ops.bits.default, s.sizes)
    if count < MOST_BITS:
        numbers = s.run(aten.remainder.Scalar, numbers, count)
    return s.cast_to_result(s.run(aten.add.Tensor, numbers, low) if low else numbers)


# --- distributions with parameters ------------------------------------------------------------------------------------
def _sample_poisson(s: Sampler) -> Any:
    return s.numbers(ops.poisson.default, s.sizes, s.parameter("self"))


def _sample_binomial(s: Sampler) -> Any:
    return s.numbers(ops.binomial.default, s.sizes, s.parameter("count"), s.parameter("prob"))


def sample_gamma(s: Sampler) -> Any:
    return s.numbers(ops.gamma.default, s.sizes, s.parameter("self"))


def sample_dirichlet(s: Sampler) -> Any:
    """Return Dirichlet distributed vectors along the last dim, for the concentrations of torch's ``_sample_dirichlet``:
    gamma distributed numbers, divided by their sum. ``s`` has the operator's arguments and draws the numbers. The
    result is a tensor or a graph node."""
    parts = sample_gamma(s)
    return s.run(aten.div.Tensor, parts, s.run(aten.sum.dim_IntList, parts, [-1], True))


# --- choices ----------------------------------------------------------------------------------------------------------
def _sample_permutation(s: Sampler) -> Any:
    """Return a random permutation of 0, 1, ..., as torch's ``randperm`` does: the order that sorts random numbers.
    ``s`` has the size of the result and draws the numbers. The result is a tensor or a graph node."""
    order = s.run(aten.sort.stable, s.numbers(ops.bits.default, s.sizes), stable=True, dim=0, descending=False)
    return s.cast_to_result(s.run(operator.getitem, order, 1))


def _sample_multinomial(s: Sampler) -> Any:
    """Return indices for each row of weights, with probabilities proportional to the weights, as torch's
    ``multinomial`` does. ``s`` has the operator's arguments and draws the numbers. The result is a tensor or a graph
    node.

    With replacement, the distribution function of each row is inverted. Without, each index gets an exponential random
    time whose rate is its weight, and the indices with the earliest times are taken.
    """
    weights = s.run(aten.to.dtype, s.parameter("self"), torch.float64)
    count = s.given["num_samples"]
    if not s.given.get("replacement"):
        times = s.run(aten.log.default, s.numbers(ops.fraction.default, parse_sizes(weights)))
        fastest = s.run(aten.topk.default, s.run(aten.div.Tensor, weights, s.run(aten.neg.default, times)), count, -1)
        return s.run(operator.getitem, fastest, 1)
    sums = s.run(aten.cumsum.default, weights, -1)
    total = s.run(aten.slice.Tensor, sums, -1, parse_sizes(weights)[-1] - 1, parse_sizes(weights)[-1])
    wanted = s.run(aten.mul.Tensor, s.numbers(ops.fraction.default, s.sizes), total)
    return s.run(aten.searchsorted.Tensor, sums, wanted, right=True)


# --- what is drawn for activations ------------------------------------------------------------------------------------
def native_dropout(s: Sampler) -> Any:
    """Return the result of dropout and the mask of kept elements, as tensors or graph nodes. ``s`` draws the numbers;
    ``s.given`` has the input, the probability and whether the model is trained."""
    x, p = s.given["input"], s.given["p"]
    if s.given["train"] is False or p == 0:
        return x, s.run(aten.ones_like.default, x, dtype=torch.bool)
    kept = s.run(aten.ge.Scalar, s.numbers(ops.uniform.default, s.sizes), p)
    scaled = s.run(aten.mul.Tensor, x, 1.0 / (1.0 - p) if p < 1 else 0.0)
    return s.run(aten.where.self, kept, scaled, s.run(aten.zeros_like.default, scaled)), kept


def apply_random_relu(s: Sampler) -> Any:
    """Return two results of torch's randomized leaky ReLU (``rrelu_with_noise``), as tensors or graph nodes: the input
    with negative elements multiplied by random slopes, and the slopes (1 for other elements). Outside of training, the
    slope is the mean of its bounds, and the second result is ``None``. ``s`` draws the numbers; ``s.given`` has the
    input, the bounds and whether the model is trained.
    """
    x, low, high = s.given["self"], s.given["lower"], s.given["upper"]
    if not s.given["training"]:
        return s.run(aten.leaky_relu.default, x, (low + high) / 2), None
    drawn = s.shift_and_scale(s.numbers(ops.uniform.default, s.sizes), low, high - low)
    negative = s.run(aten.le.Scalar, x, 0)
    slopes = s.run(aten.where.ScalarOther, negative, drawn, 1.0)
    return s.run(aten.mul.Tensor, x, slopes), slopes


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _sample_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _sample_normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _sample_integers),
    "exponential": _sample_exponential,
    "log_normal": _log_normal,
    "cauchy": _sample_cauchy,
    "geometric": _sample_geometric,
    "bernoulli": sample_bernoulli,
    "poisson": _sample_poisson,
    "binomial": _sample_binomial,
    "_standard_gamma": sample_gamma,
    "_sample_dirichlet": sample_dirichlet,
    "randperm": _sample_permutation,
    "multinomial": _sample_multinomial,
    "native_dropout": native_dropout,
    "rrelu_with_noise": apply_random_relu,
}


def list_drawing_operators() -> list[torch._ops.OpOverload]:
    """Return torch's random operators that have a formula here, except those that write to their arguments."""
    names = [*_FORMULAS, "normal_functional", "rrelu_with_noise_functional"]
    found = (getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads())
    return [target for target in found if not target._schema.is_mutable]


# --- while a model is traced ------------------------------------------------------------------------------------------
_COMPILER = "/torch/_dynamo/"  # part of the paths of torch's compiler, which traces the functions of torch.cond


@contextlib.contextmanager
def trace_random_draws(line_now: Callable[[], str]) -> Iterator[None]:
    """Return a context for tracing a model, in which forward may draw random numbers from torch's default generator
    only.

    :class:`UnsupportedError` is raised if forward uses its own generator or sets the state of the default one.
    ``line_now`` returns the current source line of the model, for error messages.
    """

    def refused(module: ModuleType, name: str) -> Callable[..., Any]:
        """Return a function that raises :class:`UnsupportedError`. It replaces the function ``name`` of torch's
        ``module`` that sets the state of torch's generator, such as ``manual_seed``."""
        plain = getattr(module, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            # the compiler restores the state, which forward did not set
            if _COMPILER in sys._getframe(1).f_code.co_filename:
                return plain(*args, **kwargs)
            raise UnsupportedError(
                f"forward sets the state of torch's random generator (torch.{name}){line_now()}; expected a forward "
                "that does not change it: a plan draws each random number from the seed of the step and the index "
                "of the "
                "element. Draw numbers that must stay the same in __init__ and store them in a buffer, or pass "
                "them as an "
                "input"
            )

        return refuse

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            for name in ("manual_seed", "seed", "set_rng_state"):
                stack.enter_context(mock.patch.object(module, name, refused(module, name)))
        stack.enter_context(mock.patch.object(Gamma, "rsample", _sample_gamma))
        stack.enter_context(_RefuseGeneratorsMode(line_now))
        yield


class _RefuseGeneratorsMode(TorchFunctionMode):
    """Torch function mode for a trace of the model's forward that raises :class:`UnsupportedError` if an operator draws
    from an explicitly given ``torch.Generator``. It also replaces ``tensor.random_(low, high)``, which torch.export
    cannot trace, by ``random_(high - low)`` plus ``low``. ``line_now`` returns the current source line of the model,
    for error messages."""

    def __init__(self, line_now: Callable[[], str]) -> None:
        super().__init__()
        self.line_now = line_now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the torch function ``func`` and return its result. Raise :class:`UnsupportedError` if one of its
        arguments is a random generator. ``tensor.random_(low, high)`` becomes ``tensor.random_(high - low)`` plus
        ``low``. ``types``: unused.
        """
        kwargs = kwargs or {}
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            name = getattr(func, "__name__", str(func))
            raise UnsupportedError(
                f"forward draws from a torch.Generator ({name}, generator=){self.line_now()}; expected the default "
                "generator: a plan draws each random number from the seed of the step and the index of the element. "
                "Leave generator= out, or draw the numbers outside of the model and pass them as an input"
            )
        bounds = [*args[1:], *(kwargs[name] for name in ("from", "to") if name in kwargs)]
        if func is Tensor.random_ and len(bounds) == 2:  # torch.export cannot write an overload named 'from'
            return args[0].random_(bounds[1] - bounds[0]).add_(bounds[0])
        return func(*args, **kwargs)


def _sample_gamma(distribution: Gamma, sample_shape: Sequence[int] = ()) -> Tensor:
    """Return a sample of the gamma ``distribution``. It replaces ``Gamma.rsample`` during a trace, because torch's
    method clamps the sample in place; here, the difference between the clamped and the drawn sample is added, which
    gives the same value and gradient. ``sample_shape``: the dims of the result in front of the distribution's own
    shape."""
    shape = distribution._extended_shape(torch.Size(sample_shape))
    value = torch._standard_gamma(distribution.concentration.expand(shape)) / distribution.rate.expand(shape)
    clamped = value.detach().clamp(min=torch.finfo(value.dtype).tiny)
    return value + (clamped - value).detach()
