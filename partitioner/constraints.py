"""What the user fixes; everything else is the search's to choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from partitioner.errors import ConstraintError, PlanError
from runtime.program import AXES

Recompute = Literal["none", "full"]
Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")

# Field -> the largest value that this version executes, and what to do instead.
_LIMITS: dict[str, tuple[int, str]] = {
    "cp": (1, "sequences are sharded over tp instead (sequence_parallel)"),
    "ep": (1, "experts are sharded over tp instead"),
    "zero": (0, "parameters and optimizer states are whole on every data-parallel rank; raise tp or pp to divide them"),
    "virtual_stages": (1, "every pipeline rank holds one run of consecutive blocks"),
}


class Constraints(BaseModel):
    """What is given is fixed; ``None`` leaves the choice to the search.

    ``pp``, ``dp``, ``cp``, ``tp``, ``ep``: ranks on each mesh axis. ``microbatch_size``: samples per data-parallel
    rank and microbatch. ``stage_of``: module path prefix -> pipeline stage, negative from the end.
    ``sequence_parallel``: ``False`` keeps values between blocks whole over ``tp``; else they are sharded where that is
    cheaper. ``zero``: the stage of state sharding over ``dp``.

    Raises :class:`ConstraintError` for a malformed value and :class:`PlanError` for one that this version cannot
    execute.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    tp: PositiveInt | None = None
    ep: PositiveInt | None = None
    microbatch_size: PositiveInt | None = None
    schedule: Schedule | None = None
    virtual_stages: PositiveInt | None = None
    recompute: Recompute | None = None
    zero: int | None = Field(default=None, ge=0, le=3)
    sequence_parallel: bool | None = None
    stage_of: dict[str, int] = Field(default_factory=dict)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConstraintError(_explain(error)) from error
        for name, (limit, instead) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and value > limit:
                raise PlanError(f"{name}={value} cannot be executed in this version (at most {limit}): {instead}")

    @property
    def pinned(self) -> dict[str, int]:
        """The mesh axes that are fixed."""
        return {axis: value for axis in AXES if (value := getattr(self, axis)) is not None}

    def check_world(self, world_size: int) -> None:
        """Raise :class:`ConstraintError` unless the pinned axes fit ``world_size`` ranks."""
        pinned = self.pinned
        product = math.prod(pinned.values())
        shown = " x ".join(f"{axis}={value}" for axis, value in pinned.items())
        if all(axis in pinned for axis in ("pp", "dp", "tp")):
            if product != world_size:
                raise ConstraintError(
                    f"{shown} makes {product} ranks; expected {world_size}, one per device: change an axis or free one"
                )
        elif world_size % product:
            raise ConstraintError(
                f"{shown} makes {product}, which does not divide the {world_size} devices; "
                f"expected a divisor of {world_size}"
            )

    def check_batch(self, global_batch: int) -> None:
        """Raise :class:`ConstraintError` unless ``global_batch`` samples split evenly as pinned."""
        dp, size = self.dp or 1, self.microbatch_size or 1
        if global_batch % (dp * size):
            what = " x ".join(f"{n}={v}" for n, v in (("dp", self.dp), ("microbatch_size", self.microbatch_size)) if v)
            raise ConstraintError(
                f"the global batch of {global_batch} does not split by {what} = {dp * size}; "
                f"expected a divisor of {global_batch}"
            )

    def check_tensor_axis(self, dims: Iterable[int]) -> None:
        """Raise :class:`ConstraintError` if ``tp`` divides none of ``dims``, the sizes of the weights' dims."""
        sizes = sorted(set(dims))
        if self.tp is not None and self.tp > 1 and not any(size % self.tp == 0 for size in sizes):
            shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
            raise ConstraintError(
                f"tp={self.tp} divides no dimension of any weight (sizes {shown or 'none'}); expected a divisor of one"
            )

    def check(self, world_size: int, global_batch: int | None = None, dims: Iterable[int] | None = None) -> None:
        """All of the checks above that the arguments allow."""
        self.check_world(world_size)
        if global_batch is not None:
            self.check_batch(global_batch)
        if dims is not None:
            self.check_tensor_axis(dims)


def pinned_calls(stage_of: Mapping[str, int], paths: Sequence[str], num_stages: int) -> dict[int, int]:
    """Call index -> stage, for calls at module ``paths`` that lie under a prefix of ``stage_of`` or contain it.

    The longest prefix wins. Raises :class:`ConstraintError` for a prefix that names no module, a stage that is not
    there, or stages that run against the order of the calls.
    """
    pinned: dict[int, int] = {}
    for prefix, stage in sorted(stage_of.items(), key=lambda item: len(item[0])):
        if not -num_stages <= stage < num_stages:
            raise ConstraintError(
                f"stage_of[{prefix!r}] = {stage} with {num_stages} stages; expected {-num_stages} to {num_stages - 1}"
            )
        inside = [i for i, path in enumerate(paths) if _under(path, prefix)]
        inside = inside or [i for i, path in enumerate(paths) if path and _under(prefix, path)]
        if not inside:
            near = get_close_matches(prefix, sorted(set(paths)), n=3, cutoff=0.3) or sorted(set(paths))[:3]
            raise ConstraintError(f"stage_of[{prefix!r}] names no module of the model; near it: {', '.join(near)}")
        pinned |= dict.fromkeys(inside, stage % num_stages)
    ordered = sorted(pinned)
    for a, b in pairwise(ordered):
        if pinned[a] > pinned[b]:
            raise ConstraintError(
                f"stage_of puts {paths[a]!r} on stage {pinned[a]} and {paths[b]!r}, which runs after it, on stage "
                f"{pinned[b]}; expected stages that do not fall in the order of execution"
            )
    return pinned


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(p) for p in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown constraint {name!r}; expected {', '.join(Constraints.model_fields)}"
    return f"constraint {name}: {first['msg'].lower()}, got {first['input']!r}"
