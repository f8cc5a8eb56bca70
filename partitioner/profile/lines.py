"""Robust fits of few parameters to noisy times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_line(sizes: Sequence[float], seconds: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """``(start, per)`` of ``seconds = start + per * size`` with the least sum of relative errors; ``start`` is not
    negative and ``per`` at ``least`` what is said.

    An optimum of least absolute errors passes through two of the points, or through one where a bound holds, so that
    trying all of them is exact; up to a good third of the points may be far off without moving it.

    >>> fit_line([1, 2, 3, 4], [3.0, 5.0, 7.0, 90.0])
    (1.0, 2.0)
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert len(x) == len(y) > 0, (x, y)
    assert (y > 0).all(), y
    found = [(max(0.0, float(b - least * a)), least) for a, b in zip(x, y, strict=True)]
    found += [(0.0, float(b / a)) for a, b in zip(x, y, strict=True) if a > 0 and b / a >= least]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            per = (y[j] - y[i]) / (x[j] - x[i])
            start = y[i] - per * x[i]
            if per >= least and start >= 0:
                found.append((float(start), float(per)))
    return min(found, key=lambda line: float(np.abs((line[0] + line[1] * x) / y - 1).sum()))


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The median of ``|predicted / measured - 1|``; 0 for nothing."""
    return statistics.median([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)] or [0.0])
