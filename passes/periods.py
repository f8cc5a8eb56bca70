"""Repetition in a run of operators that no module structure shows: layers written out in one ``forward``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, fx

_CANDIDATES = 16  # periods that are tried
_SHARE = 0.5  # of the operators, at least, are in the repetition


def split_by_period(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """``nodes`` cut where a pattern of operators starts anew; in one piece where none repeats.

    Of the places where the pattern can be cut, one is taken that the fewest values cross.
    """
    tokens = _tokens(nodes)
    best = max((_longest(tokens, p) for p in _periods(tokens)), default=(0, 0, 0))
    length, start, period = best
    if length < 2 * period or length < _SHARE * len(nodes):
        return [list(nodes)]
    crossing = _crossing(nodes)
    shift = min(range(period), key=lambda s: (sum(crossing[start + s : start + length : period]), s))
    first = start + shift
    cuts = [first + i * period for i in range((start + length - first) // period + 1)]
    borders = sorted({0, *cuts, len(nodes)})
    return [list(nodes[a:b]) for a, b in itertools.pairwise(borders)]


def _tokens(nodes: Sequence[fx.Node]) -> np.ndarray[Any, Any]:
    """A number for each operator: equal for equal operators, constants and shapes."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_token(n), len(numbers)) for n in nodes])


def _token(node: fx.Node) -> Any:
    operands = tuple((n.op, _shape(n)) for n in node.all_input_nodes)
    constants = repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: None))
    return node.target, constants, operands, _shape(node)


def _shape(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return tuple(tuple(v.shape) for v in value if isinstance(v, Tensor))


def _periods(tokens: np.ndarray[Any, Any]) -> list[int]:
    """The distances at which equal tokens most often follow each other, rare tokens first."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position, token in enumerate(tokens.tolist()):
        if token in last:
            distances[position - last[token]] += 1
        last[token] = position
    return [d for d, _ in distances.most_common(_CANDIDATES)]


def _longest(tokens: np.ndarray[Any, Any], period: int) -> tuple[int, int, int]:
    """(length, start, -) of the longest stretch that repeats itself every ``period``; the period last."""
    equal = np.concatenate([[False], tokens[:-period] == tokens[period:], [False]])
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0, period
    widest = int(np.argmax(ends - starts))
    return int(ends[widest] - starts[widest]) + period, int(starts[widest]), period


def _crossing(nodes: Sequence[fx.Node]) -> list[int]:
    """For each place, how many values made before it are read at it or later."""
    place = {n: i for i, n in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        readers = [place.get(user, len(nodes)) for user in node.users]
        if readers:
            change[i + 1] += 1
            if max(readers) < len(nodes):
                change[max(readers) + 1] -= 1
    crossing, now = [], 0
    for delta in change:
        now += delta
        crossing.append(now)
    return crossing
