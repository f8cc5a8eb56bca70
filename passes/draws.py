"""What torch's operators draw, by place (``passes/random.py``): one table, for plans and for the reference.

Requires and provides nothing: a formula is computed by whatever runs operators, on tensors or on a graph's nodes. What
it gives has no gradient, unless torch's operator has one that a rule of the normal form adds.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.distributions import Gamma
from torch.overrides import TorchFunctionMode

from passes.errors import UnsupportedError
from passes.random import MOST_BITS, ops

aten = torch.ops.aten
Run = Callable[..., Any]  # (operator, *its arguments) -> its result
# (operator of ``DRAWS``, sizes, *parameters of the distribution) -> numbers, of a stream of their own
Numbers = Callable[..., Any]
_MOST_WHOLE = 1 << 40  # of more whole numbers that are no power of two the first would be drawn more often


@dataclass(frozen=True)
class Sampler:
    """What a formula has at hand: ``given`` are the operator's arguments by name, ``made`` the meta or real tensor that
    torch's operator makes (the first of them)."""

    run: Run
    numbers: Numbers
    given: Mapping[str, Any]
    made: Tensor

    @property
    def sizes(self) -> list[int]:
        return list(self.made.shape)

    def parameter(self, name: str, otherwise: Any = None) -> Any:
        """An argument, without gradient if it is a tensor."""
        value = self.given.get(name, otherwise)
        return self.run(aten.detach.default, value) if isinstance(value, Tensor | fx.Node) else value

    def typed(self, value: Any) -> Any:
        return self.run(aten.to.dtype, value, self.made.dtype)

    def placed(self, numbers: Any, shift: Any, scale: Any) -> Any:
        """``numbers`` times ``scale`` plus ``shift``, in the result's type."""
        numbers = self.typed(numbers)
        if _is_tensor(scale) or scale != 1:
            numbers = self.run(aten.mul.Tensor, numbers, scale)
        return self.run(aten.add.Tensor, numbers, shift) if _is_tensor(shift) or shift != 0 else numbers


Formula = Callable[[Sampler], Any]


def formula_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Formula | None:
    """How an operator of torch draws, in place or not; ``None`` where it draws nothing, or nothing of the table."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    formula = _FORMULAS.get(_name(target))
    given = arguments_of(target, args, kwargs) if formula is not None else {}
    if given.get("generator") is not None or (formula is _whole and _whole_range(given) is None):
        return None
    return formula


def arguments_of(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults among them."""
    arguments = target._schema.arguments
    given = {a.name: a.default_value for a in arguments}
    return given | dict(zip([a.name for a in arguments], args, strict=False)) | dict(kwargs)


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2].removesuffix("_").removesuffix("_functional")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | fx.Node)


def sizes_of(value: Tensor | fx.Node) -> list[int]:
    return list((value.meta["val"] if isinstance(value, fx.Node) else value).shape)


# --- numbers scaled, and compared -------------------------------------------------------------------------------------


def _uniform(s: Sampler) -> Any:
    low, high = s.given.get("from", 0.0), s.given.get("to", 1.0)
    return s.placed(s.numbers(ops.uniform.default, s.sizes), low, high - low)


def _normal(s: Sampler) -> Any:
    mean, std = s.parameter("mean", 0.0), s.parameter("std", 1.0)
    return s.placed(s.numbers(ops.normal.default, s.sizes), mean, std)


def _log_normal(s: Sampler) -> Any:
    return s.run(aten.exp.default, _normal(s))


def _exponential(s: Sampler) -> Any:
    return s.placed(s.numbers(ops.exponential.default, s.sizes), 0.0, 1.0 / s.given["lambd"])


def _cauchy(s: Sampler) -> Any:
    angle = s.run(aten.sub.Tensor, s.numbers(ops.fraction.default, s.sizes), 0.5)
    return s.placed(
        s.run(aten.tan.default, s.run(aten.mul.Tensor, angle, math.pi)), s.given["median"], s.given["sigma"]
    )


def _geometric(s: Sampler) -> Any:
    """How many trials until the first success: the inverse of the distribution function."""
    failing = math.log1p(-s.given["p"]) if s.given["p"] < 1 else -1e300
    logs = s.run(aten.log.default, s.numbers(ops.fraction.default, s.sizes))
    trials = s.run(aten.ceil.default, s.run(aten.div.Tensor, logs, failing))
    return s.typed(s.run(aten.clamp_min.default, trials, 1))


def bernoulli(s: Sampler) -> Any:
    likely = s.parameter("p") if "p" in s.given else s.parameter("self", s.given.get("input"))
    if isinstance(likely, fx.Node | Tensor):
        return s.typed(s.run(aten.lt.Tensor, s.numbers(ops.uniform.default, s.sizes), likely))
    return s.typed(s.run(aten.lt.Scalar, s.numbers(ops.uniform.default, s.sizes), likely))


def _whole_range(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first of some whole numbers and how many there are; ``None`` where that is not known, or too many.

    ``random_`` of no arguments draws all that its type of whole numbers holds.
    """
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if high is None and "self" in given and "from" not in given:
        bits = _EXACT_BITS.get(_dtype(given["self"]))
        high = None if bits is None else 1 << bits
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    count = high - low
    exact = 0 < count <= MOST_BITS and count & (count - 1) == 0
    return (low, count) if exact or 0 < count <= _MOST_WHOLE else None


_EXACT_BITS = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63}


def _dtype(value: Tensor | fx.Node) -> torch.dtype:
    tensor: Tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return tensor.dtype


def _whole(s: Sampler) -> Any:
    found = _whole_range(s.given)
    assert found is not None
    low, count = found
    numbers = s.numbers(ops.bits.default, s.sizes)
    if count < MOST_BITS:
        numbers = s.run(aten.remainder.Scalar, numbers, count)
    return s.typed(s.run(aten.add.Tensor, numbers, low) if low else numbers)


# --- distributions with parameters ------------------------------------------------------------------------------------


def _poisson(s: Sampler) -> Any:
    return s.numbers(ops.poisson.default, s.sizes, s.parameter("self"))


def _binomial(s: Sampler) -> Any:
    return s.numbers(ops.binomial.default, s.sizes, s.parameter("count"), s.parameter("prob"))


def sample_gamma(s: Sampler) -> Any:
    return s.numbers(ops.gamma.default, s.sizes, s.parameter("self"))


def dirichlet(s: Sampler) -> Any:
    parts = sample_gamma(s)
    return s.run(aten.div.Tensor, parts, s.run(aten.sum.dim_IntList, parts, [-1], True))


# --- choices ----------------------------------------------------------------------------------------------------------


def _permutation(s: Sampler) -> Any:
    """The order of numbers."""
    order = s.run(aten.sort.stable, s.numbers(ops.bits.default, s.sizes), stable=True, dim=0, descending=False)
    return s.typed(s.run(operator.getitem, order, 1))


def _multinomial(s: Sampler) -> Any:
    """With replacement: the inverse of each row's distribution function. Without: a race of exponential numbers whose
    rates are the weights; whoever comes in first is first."""
    weights = s.run(aten.to.dtype, s.parameter("self"), torch.float64)
    count = s.given["num_samples"]
    if not s.given.get("replacement"):
        times = s.run(aten.log.default, s.numbers(ops.fraction.default, sizes_of(weights)))
        fastest = s.run(aten.topk.default, s.run(aten.div.Tensor, weights, s.run(aten.neg.default, times)), count, -1)
        return s.run(operator.getitem, fastest, 1)
    sums = s.run(aten.cumsum.default, weights, -1)
    total = s.run(aten.slice.Tensor, sums, -1, sizes_of(weights)[-1] - 1, sizes_of(weights)[-1])
    wanted = s.run(aten.mul.Tensor, s.numbers(ops.fraction.default, s.sizes), total)
    return s.run(aten.searchsorted.Tensor, sums, wanted, right=True)


# --- what is drawn for activations ------------------------------------------------------------------------------------


def native_dropout(s: Sampler) -> Any:
    """Dropout, and what was kept."""
    x, p = s.given["input"], s.given["p"]
    if s.given["train"] is False or p == 0:
        return x, s.run(aten.ones_like.default, x, dtype=torch.bool)
    kept = s.run(aten.ge.Scalar, s.numbers(ops.uniform.default, s.sizes), p)
    scaled = s.run(aten.mul.Tensor, x, 1.0 / (1.0 - p) if p < 1 else 0.0)
    return s.run(aten.where.self, kept, scaled, s.run(aten.zeros_like.default, scaled)), kept


def rrelu(s: Sampler) -> Any:
    """Negative elements times a slope that is drawn, and all slopes."""
    x, low, high = s.given["self"], s.given["lower"], s.given["upper"]
    if not s.given["training"]:
        return s.run(aten.leaky_relu.default, x, (low + high) / 2), None
    drawn = s.placed(s.numbers(ops.uniform.default, s.sizes), low, high - low)
    negative = s.run(aten.le.Scalar, x, 0)
    slopes = s.run(aten.where.ScalarOther, negative, drawn, 1.0)
    return s.run(aten.mul.Tensor, x, slopes), slopes


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _whole),
    "exponential": _exponential,
    "log_normal": _log_normal,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "bernoulli": bernoulli,
    "poisson": _poisson,
    "binomial": _binomial,
    "_standard_gamma": sample_gamma,
    "_sample_dirichlet": dirichlet,
    "randperm": _permutation,
    "multinomial": _multinomial,
    "native_dropout": native_dropout,
    "rrelu_with_noise": rrelu,
}


def drawing() -> list[torch._ops.OpOverload]:
    """The operators of the table that write to nothing."""
    names = [*_FORMULAS, "normal_functional", "rrelu_with_noise_functional"]
    found = (getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads())
    return [target for target in found if not target._schema.is_mutable]


# --- while a model is traced ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def draws_traced(line_now: Callable[[], str]) -> Iterator[None]:
    """Inside, forward may draw from torch's default generator as it finds it. ``line_now``: where it is.

    Raises :class:`UnsupportedError` where forward draws from a generator of its own, or sets the state of torch's.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(
                f"forward sets the state of torch's random generator (torch.{name}){line_now()}; expected a forward "
                "that draws from it as it is: a plan draws each element by its place, from the seed of the step. Make "
                "numbers that stay the same in __init__ and keep them in a buffer, or pass them as an input"
            )

        return refuse

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            for name in ("manual_seed", "seed", "set_rng_state"):
                stack.enter_context(mock.patch.object(module, name, refused(name)))
        stack.enter_context(mock.patch.object(Gamma, "rsample", _gamma_rsample))
        stack.enter_context(_Generators(line_now))
        yield


class _Generators(TorchFunctionMode):
    def __init__(self, line_now: Callable[[], str]) -> None:
        super().__init__()
        self.line_now = line_now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            name = getattr(func, "__name__", str(func))
            raise UnsupportedError(
                f"forward draws from a torch.Generator ({name}, generator=){self.line_now()}; expected the default "
                "generator: a plan draws each element by its place, from the seed of the step. Leave generator= away, "
                "or draw the numbers outside of the model and pass them as an input"
            )
        bounds = [*args[1:], *(kwargs[name] for name in ("from", "to") if name in kwargs)]
        if func is Tensor.random_ and len(bounds) == 2:  # torch.export cannot write an overload named 'from'
            return args[0].random_(bounds[1] - bounds[0]).add_(bounds[0])
        return func(*args, **kwargs)


def _gamma_rsample(distribution: Gamma, sample_shape: Sequence[int] = ()) -> Tensor:
    """``Gamma.rsample``, whose clamp writes in place without a gradient, as a sum."""
    shape = distribution._extended_shape(torch.Size(sample_shape))
    value = torch._standard_gamma(distribution.concentration.expand(shape)) / distribution.rate.expand(shape)
    clamped = value.detach().clamp(min=torch.finfo(value.dtype).tiny)
    return value + (clamped - value).detach()
