"""What torch's operators draw, by place (``passes/random.py``): one table, for plans and for their judge.

Requires and provides nothing: a formula is computed by whatever runs operators, on tensors or on a graph's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from passes.random import MOST_BITS, ops

aten = torch.ops.aten
Run = Callable[..., Any]  # (operator, *its arguments) -> its result


@dataclass(frozen=True)
class Draw:
    """Numbers of ``distribution``: times ``scale`` plus ``shift``; or whole ones, ``scale`` many from ``shift`` on; or
    whether they are less than ``scale``, as ones and zeros."""

    distribution: torch._ops.OpOverload
    shift: Any = 0.0
    scale: Any = 1.0
    form: Literal["scaled", "whole", "truth"] = "scaled"

    def of(self, run: Run, numbers: Any, dtype: torch.dtype) -> Any:
        """What torch's operator gives, of numbers of ``distribution``; nothing of it has a gradient."""
        shift, scale = (
            v if isinstance(v, int | float) else run(aten.detach.default, v) for v in (self.shift, self.scale)
        )
        if self.form == "truth":
            less = aten.lt.Scalar if isinstance(scale, int | float) else aten.lt.Tensor
            return run(aten.to.dtype, run(less, numbers, scale), dtype)
        if self.form == "whole":
            numbers = run(aten.add.Tensor, run(aten.remainder.Scalar, numbers, scale), shift)
            return run(aten.to.dtype, numbers, dtype)
        numbers = run(aten.to.dtype, numbers, dtype)
        if not isinstance(scale, int | float) or scale != 1:
            numbers = run(aten.mul.Tensor, numbers, scale)
        return numbers if isinstance(shift, int | float) and shift == 0 else run(aten.add.Tensor, numbers, shift)


def draw_of(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Draw | None:
    """What an operator of torch draws, in place or not; ``None`` where it draws nothing, or nothing of the table."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    formula = _FORMULAS.get(_name(target))
    if formula is None:
        return None
    arguments = target._schema.arguments
    given = {a.name: a.default_value for a in arguments}
    given |= dict(zip([a.name for a in arguments], args, strict=False)) | dict(kwargs)
    return formula(given) if given.get("generator") is None else None


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.partition("::")[2].removesuffix("_").removesuffix("_functional")


def _uniform(given: Mapping[str, Any]) -> Draw:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return Draw(ops.uniform.default, low, high - low)


def _normal(given: Mapping[str, Any]) -> Draw:
    return Draw(ops.normal.default, given.get("mean", 0.0), given.get("std", 1.0))


def _exponential(given: Mapping[str, Any]) -> Draw:
    return Draw(ops.exponential.default, 0.0, 1.0 / given["lambd"])


def _whole(given: Mapping[str, Any]) -> Draw | None:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= MOST_BITS:
        return None
    return Draw(ops.bits.default, low, high - low, "whole")


def _truth(given: Mapping[str, Any]) -> Draw:
    likely = given["p"] if "p" in given else given.get("self", given.get("input"))
    return Draw(ops.uniform.default, 0.0, likely, "truth")


_FORMULAS: dict[str, Callable[[Mapping[str, Any]], Draw | None]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal"), _normal),
    "exponential": _exponential,
    **dict.fromkeys(("randint", "randint_like", "random"), _whole),
    "bernoulli": _truth,
}


def drawing() -> list[torch._ops.OpOverload]:
    """The operators of the table that write to nothing."""
    names = [*_FORMULAS, "normal_functional"]
    found = (getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads())
    return [target for target in found if not target._schema.is_mutable]
