"""What the user fixed: which of it may be given up, at what cost, and how far that is from what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from partitioner.constraints import OF_POINT, Constraints
from partitioner.solve.point import Point

# What it takes to give up a constraint; a change of size costs half of its logarithm more.
_WEIGHTS = {"recompute": 0.6, "microbatch_size": 0.7, "schedule": 0.8, "virtual_stages": 0.8}
_FEW_PINS = 7


def pins_of(constraints: Constraints) -> list[str]:
    """What the user fixed: names of constraints, and ``stage_of:`` with a module for each entry."""
    *others, zero, dp_shard = OF_POINT
    fixed = [n for n in (*others, "recompute", zero, dp_shard) if getattr(constraints, n) is not None]
    fixed = [n for n in fixed if n != "microbatch_size" or constraints.group_size is None]  # else it is another loss
    return fixed + [f"stage_of:{m}" for m in constraints.stage_of]


def fixed_of(constraints: Constraints) -> list[str]:
    """All that the user fixed: :func:`pins_of`, and what of the rest says how, not what, is computed."""
    pins = pins_of(constraints)
    beside = {*OF_POINT, *pins, "stage_of", "couple", "ahead"}
    if constraints.memory_margin <= Constraints.model_fields["memory_margin"].default:
        beside.add("memory_margin")  # left free it would leave plans less memory
    defaults = ((name, field.default) for name, field in Constraints.model_fields.items() if name not in beside)
    return pins + [name for name, default in defaults if getattr(constraints, name) != default]


def subsets(pins: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What of ``pins`` may be given up together: anything of a few; of many up to two, all places, or all. Of many
    places none by itself."""
    places = tuple(p for p in pins if ":" in p)
    each = pins if len(places) <= _FEW_PINS else [p for p in pins if p not in places]
    few = len(each) if len(each) <= _FEW_PINS else 2
    for size in range(few + 1):
        yield from combinations(each, size)
    if few < len(pins):
        yield from {places, tuple(pins)} - {()}


def effort(pins: Sequence[str]) -> float:
    """What it takes to give up ``pins``, before by how much: places of modules are often wrong together."""
    places = sum(":" in pin for pin in pins)
    others = sum(_WEIGHTS.get(pin, 1.0) for pin in pins if ":" not in pin)
    return others + (0.8 + 0.2 * places if places else 0.0)


def without(constraints: Constraints, pins: Sequence[str]) -> Constraints:
    """``constraints`` with ``pins`` left free."""
    places = {m: s for m, s in constraints.stage_of.items() if f"stage_of:{m}" not in pins}
    freed: dict[str, Any] = {pin: Constraints.model_fields[pin].default for pin in pins if ":" not in pin}
    return constraints.model_copy(update={**freed, "stage_of": places})


def differs(constraints: Constraints, pin: str, point: Point) -> bool:
    """Whether ``point`` is otherwise than pinned; recomputation and places of modules are freed, not changed."""
    return not hasattr(point, pin) or getattr(point, pin) != getattr(constraints, pin)


def distance(constraints: Constraints, pin: str, point: Point) -> float:
    """How far ``point`` is from what is pinned: half of the logarithm of a change of size."""
    old, new = getattr(constraints, pin, None), getattr(point, pin, None)
    if not isinstance(old, int) or not isinstance(new, int):
        return 0.0
    return 0.5 * abs(math.log2(max(new, 0.5) / max(old, 0.5)))


def shown(constraints: Constraints, pin: str) -> str:
    """``pin`` as the user wrote it."""
    name, _, module = pin.partition(":")
    if module:
        return f"stage_of[{module!r}]={constraints.stage_of[module]}"
    given = getattr(constraints, name)
    return f"{name}={kinds_text(given)}" if name == "offload" else f"{name}={given}"


def kinds_text(kinds: Sequence[str]) -> str:
    """What is kept in host memory, as the user may write it."""
    return "+".join(kinds) or "none"


def instead(constraints: Constraints, pin: str, new: object) -> str:
    """What to say of ``new`` in the place of what is pinned; ``None``: it is left free."""
    name, _, module = pin.partition(":")
    if module:
        return f"no stage_of[{module!r}]"
    if new is None:
        return f"{name} left free instead of {getattr(constraints, name)}"
    return f"{name}={new} instead of {getattr(constraints, name)}"
