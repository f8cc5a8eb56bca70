"""Factor rules with a seeded fault, and a plain way to see that a rule is wrong: cut, run, join, compare.

The plain way shares nothing with ``passes/rules/verify.py`` but the definition of a layout, and looks at results alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partitioner.passes.ir.layouts import PARTIAL, REPLICATED, Layout, join_shards, take_shard
from partitioner.passes.rules import OpFactors, factors_of, registry
from partitioner.passes.rules.factors import Dims, Strategy
from partitioner.passes.rules.strategies import enumerate_strategies
from partitioner.passes.rules.verify import make_call_node
from tests.helpers.rule_cases import CASES, META, operator
from tests.helpers.rule_cases_more import MORE

NUM_RANKS = 2
_NEW = "new"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wrong:
    """A rule of one call, changed."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: Any
    kind: str
    rule: OpFactors


def draw(rng: random.Random) -> Wrong | None:
    """A call with one thing of its rule changed; ``None`` where that cannot be changed."""
    name, args, kwargs, grad = rng.choice(_ALL).values
    node, _ = make_call_node(operator(name), args, kwargs, grad)
    rule = factors_of(node)
    if rule is None or not rule.sizes:
        return None
    kind = rng.choice(list(CHANGES))
    changed = CHANGES[kind](rule, rng)
    return None if changed is None or changed == rule else Wrong(name, args, kwargs, grad, kind, changed)


def _is_coarse(argument: Any) -> bool:
    """Whether rounding alone would pass for a fault."""
    return isinstance(argument, Tensor) and argument.dtype == torch.bfloat16


# torch reads beyond operands that do not fit each other
_UNSAFE = {"_weight_norm", "_weight_norm_interface", "partition::band_attention"}
_ALL = [
    c
    for c in (*CASES, *(c for cases in MORE.values() for c in cases))
    if c.values[0] not in _UNSAFE and not any(_is_coarse(a) for a in c.values[1])
]


# --- what can be wrong ------------------------------------------------------------------------------------------------


def _unlocked(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """A factor that must be whole may be sharded."""
    if not rule.whole:
        return None
    return replace(rule, whole=rule.whole - {rng.choice(sorted(rule.whole))})


def _swapped(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """Two dims of a tensor have each other's factors."""

    def swap(dims: Dims) -> Dims | None:
        if len(dims) < 2:
            return None
        a, b = rng.sample(range(len(dims)), 2)
        changed = list(dims)
        changed[a], changed[b] = dims[b], dims[a]
        return tuple(changed)

    return _with_dims(rule, rng, swap)


def _unlinked(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """A dim has nothing to do with those that it goes with."""

    def unlink(dims: Dims) -> Dims | None:
        return _with_factor(dims, rng, lambda factor: _NEW)

    found = _with_dims(rule, rng, unlink)
    if found is None:
        return None
    [factor] = _lost(rule, found)
    return replace(found, sizes={**found.sizes, _NEW: rule.sizes[factor]})


def _lost(before: OpFactors, after: OpFactors) -> list[str]:
    old = [f for side in (before.operands, before.results) for dims in side for d in dims for f in d]
    new = [f for side in (after.operands, after.results) for dims in side for d in dims for f in d]
    return [a for a, b in zip(old, new, strict=True) if a != b]


def _linked(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """A dim goes with another one of its size."""

    def link(dims: Dims) -> Dims | None:
        def other(factor: str) -> str | None:
            alike = [f for f in rule.sizes if f != factor and rule.sizes[f] == rule.sizes[factor]]
            return rng.choice(alike) if alike else None

        return _with_factor(dims, rng, other)

    return _with_dims(rule, rng, link)


def _forgotten(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """A dim of a result has no factor, as if it were summed over."""

    def forget(dims: Dims) -> Dims | None:
        held = [d for d, names in enumerate(dims) if names]
        if not held:
            return None
        at = rng.choice(held)
        return tuple(() if d == at else names for d, names in enumerate(dims))

    i = rng.randrange(len(rule.results)) if rule.results else -1
    changed = forget(rule.results[i]) if i >= 0 else None
    return None if changed is None else replace(rule, results=_put(rule.results, i, changed))


def _turned(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """The factors of a dim stand in another order."""

    def turn(dims: Dims) -> Dims | None:
        composed = [d for d, names in enumerate(dims) if len(names) > 1]
        if not composed:
            return None
        at = rng.choice(composed)
        return tuple(names[::-1] if d == at else names for d, names in enumerate(dims))

    return _with_dims(rule, rng, turn)


def _linear(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """Partial sums go through."""
    count = len(rule.operands)
    if not count:
        return None
    size = rng.randint(1, min(2, count))
    added = frozenset(rng.sample(range(count), size))
    return None if added in rule.linear else replace(rule, linear=(*rule.linear, added))


def _lowered(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """A special lowering gives another layout than it says, or is left out."""
    if not rule.lower:
        return None
    factor = rng.choice(sorted(rule.lower))
    rest = {f: way for f, way in rule.lower.items() if f != factor}
    if rng.random() < 0.5:
        return replace(rule, lower=rest)
    way = rule.lower[factor]
    other = REPLICATED if way.result == PARTIAL else PARTIAL
    return replace(rule, lower={**rest, factor: replace(way, result=other)})


def _as_it_is(rule: OpFactors, rng: random.Random) -> OpFactors | None:
    """The operator is run with its own arguments on shards that they do not fit."""
    return None if rule.local is None else replace(rule, local=None)


CHANGES: dict[str, Callable[[OpFactors, random.Random], OpFactors | None]] = {
    "unlocked": _unlocked,
    "swapped": _swapped,
    "unlinked": _unlinked,
    "linked": _linked,
    "forgotten": _forgotten,
    "turned": _turned,
    "linear": _linear,
    "lowered": _lowered,
    "as it is": _as_it_is,
}


def _with_dims(rule: OpFactors, rng: random.Random, change: Callable[[Dims], Dims | None]) -> OpFactors | None:
    """``change`` on the dims of one tensor."""
    sides = [("operands", i) for i in range(len(rule.operands))] + [("results", i) for i in range(len(rule.results))]
    side, i = rng.choice(sides)
    tensors: tuple[Dims, ...] = getattr(rule, side)
    changed = change(tensors[i])
    return None if changed is None else replace(rule, **{side: _put(tensors, i, changed)})  # type: ignore[arg-type]


def _with_factor(dims: Dims, rng: random.Random, other: Callable[[str], str | None]) -> Dims | None:
    places = [(d, n) for d, names in enumerate(dims) for n in range(len(names))]
    if not places:
        return None
    at, place = rng.choice(places)
    new = other(dims[at][place])
    if new is None:
        return None
    names = tuple(new if n == place else name for n, name in enumerate(dims[at]))
    return _put(dims, at, names)


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


# --- that it is wrong -------------------------------------------------------------------------------------------------


def is_wrong(wrong: Wrong) -> bool:
    """Whether a strategy that the rule allows, run plainly, gives other results than the operator."""
    node, tensors = make_call_node(operator(wrong.name), wrong.args, wrong.kwargs, wrong.grad)
    with installed(wrong):
        allowed = enumerate_strategies(node, NUM_RANKS)
    return any(_plain(s, wrong.rule) and not _agrees(node, tensors, wrong, s) for s in allowed)


def _plain(strategy: Strategy, rule: OpFactors) -> bool:
    """Whether the strategy runs the operator itself, as far as its rule says."""
    lowered = strategy.factor in rule.lower
    return rule.local is None and rule.spans is None and not strategy.form and not lowered and not strategy.sections


def _agrees(node: fx.Node, tensors: Sequence[Tensor], wrong: Wrong, strategy: Strategy) -> bool:
    expected = _results(_run(wrong, tensors))
    try:
        parts = [_cut(t, layout) for t, layout in zip(tensors, strategy.operands, strict=True)]
        made = [_results(_run(wrong, [p[r] for p in parts])) for r in range(NUM_RANKS)]
        joined = [_join([m[i] for m in made], layout) for i, layout in enumerate(strategy.results)]
    except (RuntimeError, IndexError, ValueError):
        return False
    for whole, options in zip(expected, joined, strict=True):
        for found in options:
            if found.shape != whole.shape or not torch.allclose(
                found.to(whole.dtype), whole, rtol=1e-3, atol=1e-3, equal_nan=True
            ):
                return False
    return True


def _run(wrong: Wrong, local: Sequence[Tensor]) -> Any:
    rest = iter(local)

    def here(argument: Any) -> Any:
        return next(rest) if isinstance(argument, Tensor) else _CPU if argument == META else argument

    args, kwargs = pytree.tree_map(here, (wrong.args, wrong.kwargs))
    return operator(wrong.name)(*args, **kwargs)


def _results(made: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]


def _cut(tensor: Tensor, layout: Layout) -> list[Tensor]:
    if layout.kind != "P":
        return [take_shard(tensor, layout, NUM_RANKS, r) for r in range(NUM_RANKS)]
    first = torch.full_like(tensor, 3)
    return [first, tensor - first]


def _join(ranks: list[Tensor], layout: Layout) -> list[Tensor]:
    if layout.is_shard:
        return [join_shards(ranks, layout)]
    return [torch.stack(ranks).sum(0)] if layout.kind == "P" else ranks


class installed:
    """Inside, the operator has the wrong rule."""

    def __init__(self, wrong: Wrong) -> None:
        self.target, self.rule = operator(wrong.name), wrong.rule

    def __enter__(self) -> None:
        self.before = registry._found.get(self.target)
        registry._found[self.target] = lambda node: self.rule

    def __exit__(self, *error: object) -> None:
        registry._found[self.target] = self.before
        if self.before is None:
            del registry._found[self.target]


def wrong_rules(seed: int, count: int) -> Iterator[Wrong]:
    """``count`` rules that are shown to be wrong."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    found = 0
    while found < count:
        wrong = draw(rng)
        if wrong is not None and is_wrong(wrong):
            found += 1
            yield wrong
