"""Layouts: text form, shards and their joining."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partitioner.passes.ir.layouts import (
    PARTIAL,
    READ_SHARDED,
    REPLICATED,
    Layout,
    can_shard_evenly,
    join_shards,
    local_shape,
    make_shard_layout,
    take_shard,
)

sections = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.integers(0, 3), st.lists(st.integers(1, 99), min_size=2, max_size=4).map(tuple) | st.just(()))
def test_text_form_round_trips(dim: int, parts: tuple[int, ...]) -> None:
    for layout in (make_shard_layout(dim, parts), REPLICATED, PARTIAL, READ_SHARDED):
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "S", "S-1", "Q", "S0[3]", "R''", "S0[a]"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout.parse(text)


@given(sections, st.integers(1, 4), st.integers(0, 2))
def test_shards_join_to_the_whole(parts: list[int], num_ranks: int, dim: int) -> None:
    sizes = tuple(p * num_ranks for p in parts)
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    whole = torch.randn(shape)
    layout = make_shard_layout(dim, sizes)
    assert can_shard_evenly(layout, tuple(shape), num_ranks)
    shards = [take_shard(whole, layout, num_ranks, i) for i in range(num_ranks)]
    assert all(s.shape == local_shape(layout, tuple(shape), num_ranks) for s in shards)
    assert torch.equal(join_shards(shards, layout), whole)


def test_a_fused_projection_puts_a_part_of_each_section_on_each_rank() -> None:
    qkv = torch.arange(12)
    assert take_shard(qkv, make_shard_layout(0, (8, 2, 2)), 2, 1).tolist() == [4, 5, 6, 7, 9, 11]


def test_partial_sums_add_up() -> None:
    assert join_shards([torch.ones(2), torch.full((2,), 2.0)], PARTIAL).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (make_shard_layout(0), (3, 4)),
        (make_shard_layout(2), (4, 4)),
        (make_shard_layout(1, (2, 3)), (4, 5)),
        (make_shard_layout(1, (2, 2)), (4, 6)),
    ],
)
def test_uneven_shards_do_not_divide(layout: Layout, shape: tuple[int, ...]) -> None:
    assert not can_shard_evenly(layout, shape, 2)
