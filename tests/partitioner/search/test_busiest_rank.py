"""The lower bound on the busiest rank of a pipeline, if every call of a block runs as a whole on one rank."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.solve.bounds.block_work import bound_busiest_rank


def bound(counts: list[int], seconds: list[float], ranks: int) -> float:
    return float(bound_busiest_rank(counts, np.array(seconds, dtype=np.float64)[:, None], np.array([float(ranks)]))[0])


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.0])), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_no_distribution_of_calls_has_a_less_busy_rank(blocks: list[tuple[int, float]], ranks: int):
    """Against all ways to give each call to one of the ranks, in any order."""
    calls = [seconds for count, seconds in blocks for _ in range(count)]
    best = min(
        max(sum(s for s, rank in zip(calls, given_to, strict=True) if rank == r) for r in range(ranks))
        for given_to in product(range(ranks), repeat=len(calls))
    )
    assert bound([count for count, _ in blocks], [seconds for _, seconds in blocks], ranks) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("counts", "seconds", "ranks", "expected"),
    [
        ([126], [1.0], 16, 8.0),  # 126 layers on 16 ranks: one has at least 8
        ([56, 1], [1.0, 0.4], 8, 7.4),  # seven layers each, and one rank has the head beside them
        ([55, 1], [1.0, 0.4], 8, 7.0),  # the head's rank has six
        ([14, 1], [1.0, 2.5], 4, 4.5),  # 4.125 on average: three ranks have four layers, one two and the head
        ([1, 1], [1.0, 3.0], 4, 3.0),  # the largest call
    ],
)
def test_whole_calls_make_a_rank_busier_than_an_even_share(
    counts: list[int], seconds: list[float], ranks: int, expected: float
):
    assert bound(counts, seconds, ranks) == pytest.approx(expected)
