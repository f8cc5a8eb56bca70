"""How fast rings run over links that single pairs of devices have, as NCCL lays several rings over them at once.

A ring passes through every device of a group. Each link carries its bandwidth in both directions, so that a ring runs
both ways round; the best set of rings is a fractional packing of Hamiltonian cycles under the links' capacities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt

MAX_DEVICES = 8  # a complete graph of 8 has 2520 rings; of 10 it has 181,440

Floats = NDArray[np.float64]


def ring_rate(bandwidth: Floats) -> float:
    """Bytes/s at which all rings together move data through each device; 0 where no ring closes.

    ``bandwidth``: of the links, bytes/s per direction, symmetric, shape ``[n, n]``, 0 where there is none.
    """
    n = len(bandwidth)
    if n < 2 or n > MAX_DEVICES:
        return 0.0
    return _rate(n, np.ascontiguousarray(bandwidth, dtype=np.float64).tobytes())


@lru_cache(maxsize=4096)
def _rate(n: int, data: bytes) -> float:
    bandwidth = np.frombuffer(data).reshape(n, n)
    if n == 2:
        return float(bandwidth[0, 1])
    rings = list(_rings(bandwidth > 0))
    if not rings:
        return 0.0
    scale = float(bandwidth.max())
    model = mathopt.Model()
    share = [model.add_variable(lb=0.0) for _ in rings]
    crossing: dict[tuple[int, int], list[mathopt.Variable]] = {}
    for variable, ring in zip(share, rings, strict=True):
        for pair in edges(ring):
            crossing.setdefault(pair, []).append(variable)
    for (i, j), variables in crossing.items():
        model.add_linear_constraint(mathopt.fast_sum(variables) <= float(bandwidth[i, j]) / scale)
    model.maximize(mathopt.fast_sum(share))
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    return 2.0 * scale * float(result.objective_value())


def widest_ring(bandwidth: Floats) -> list[tuple[int, int]]:
    """The pairs, smaller first, of the ring whose slowest link is fastest; of large groups the ring in their order."""
    n = len(bandwidth)
    if n > MAX_DEVICES:
        return edges(list(range(n)))
    return list(_widest(n, np.ascontiguousarray(bandwidth, dtype=np.float64).tobytes()))


@lru_cache(maxsize=4096)
def _widest(n: int, data: bytes) -> tuple[tuple[int, int], ...]:
    bandwidth = np.frombuffer(data).reshape(n, n)
    if n <= 3:
        return tuple(edges(list(range(n))))
    upper = np.triu_indices(n, 1)
    for limit in sorted(set(bandwidth[upper].tolist()), reverse=True):
        ring = next(_rings(bandwidth >= limit), None)
        if ring is not None:
            return tuple(edges(ring))
    raise AssertionError("a complete graph has a ring")


def edges(ring: list[int]) -> list[tuple[int, int]]:
    """The pairs of neighbours on a ring, smaller first."""
    if len(ring) == 2:
        return [(min(ring), max(ring))]
    return [(min(a, b), max(a, b)) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


def _rings(joined: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Every Hamiltonian cycle once, from 0 on, in one of its two directions."""
    n = len(joined)
    near = [[j for j in range(n) if joined[i, j] and j != i] for i in range(n)]

    def extend(path: list[int], seen: int) -> Iterator[list[int]]:
        if len(path) == n:
            if path[1] < path[-1] and 0 in near[path[-1]]:
                yield list(path)
            return
        for j in near[path[-1]]:
            if not seen >> j & 1:
                path.append(j)
                yield from extend(path, seen | 1 << j)
                path.pop()

    return extend([0], 1)
