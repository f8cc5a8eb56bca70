"""``Shapes.of_lengths`` chooses the lengths that pad least."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from partitioner import Shapes
from partitioner.programs.requests import ShapeError


def pad_to(buckets: tuple[int, ...], lengths: list[int]) -> int:
    return sum(min(b for b in buckets if b >= length) for length in lengths)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_no_other_lengths_pad_less(seed: int, count: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 100) for _ in range(draw.randint(1, 12))]
    shapes = Shapes.of_lengths(lengths, count=count, multiple=8)
    multiples = sorted({-(-length // 8) * 8 for length in lengths})
    choices = itertools.chain.from_iterable(itertools.combinations(multiples, n) for n in range(1, count + 1))
    best = min(pad_to(c, lengths) for c in choices if c[-1] == multiples[-1])
    assert pad_to(shapes.length, lengths) == best
    assert len(shapes.length) <= count


def test_weights_are_the_shares_of_the_batches() -> None:
    shapes = Shapes.of_lengths([10, 10, 20, 64], count=2, batch=8, multiple=1)
    assert (shapes.batch, shapes.length) == ((8,), (20, 64))
    assert shapes.weights == {20: 0.75, 64: 0.25}


def test_distribution_is_a_mapping() -> None:
    assert Shapes.of_lengths({100: 3.0, 1000: 1.0}, count=5) == Shapes.of_lengths([100, 100, 100, 1000], count=5)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([], {}, "lengths is empty"),
        ([0], {}, "lengths has 0"),
        ([8, 2.5], {}, "lengths has 2.5"),
        ({8: -1.0}, {}, "frequency -1.0"),
        ([8], {"count": 0}, "count is 0"),
        ([8], {"multiple": True}, "multiple is True"),
    ],
)
def test_malformed_lengths(lengths: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        Shapes.of_lengths(lengths, **options)
