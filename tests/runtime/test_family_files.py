"""The compact form of several programs in one plan file: it gives back every program as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.load import apply_delta, fold_programs, make_delta, unfold_programs

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-1, 1), st.sampled_from(["a", "b"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.sampled_from("klm"), inner)),
    max_leaves=20,
)


@given(VALUES, VALUES)
def test_a_difference_gives_the_other_value(base: Any, other: Any) -> None:
    found = apply_delta(base, json.loads(json.dumps(make_delta(base, other))))
    assert json.dumps(found, sort_keys=True) == json.dumps(other, sort_keys=True)


def make_program(length: int, extra: int) -> dict[str, Any]:
    """A program as JSON data, whose block has ``extra`` nodes more than 30 in the middle."""
    nodes = [{"name": f"n{i}", "val": [[2, length], "bfloat16"]} for i in range(30)]
    nodes[10:10] = [{"name": f"more{i}", "val": [[length], "bool"]} for i in range(extra)]
    return {"blocks": {"layer": {"nodes": nodes}}, "length": length}


def test_programs_are_stored_as_differences_from_those_that_they_resemble() -> None:
    """The third has as many nodes as the first, and differs from it in one number; the second has two more nodes."""
    programs = {"b": make_program(256, 2), "c": make_program(128, 0)}
    content = {"program": make_program(512, 0), "further": {n: {"program": p} for n, p in programs.items()}}
    folded = fold_programs(copy.deepcopy(content))
    assert folded["further"]["c"]["program"] == {"base": 0, "numbers": {"512": 128}, "rest": {}}
    (splice,) = folded["further"]["b"]["program"]["rest"]["keys"]["blocks"]["keys"]["layer"]["keys"]["nodes"]["splices"]
    assert splice[:2] == [10, 10]
    assert unfold_programs(folded) == content


@pytest.mark.parametrize("splice", [[5, 4, []], [0, 99, []], [-1, 0, []], [0, 1], "x"])
def test_a_difference_from_other_data_is_refused(splice: Any) -> None:
    folded = {"base": 0, "numbers": {}, "rest": {"keys": {"blocks": {"keys": {"layer": {"keys": {
        "nodes": {"splices": [splice]}}}}}}}}  # fmt: skip
    with pytest.raises(LaunchError, match="do not follow from its first one"):
        unfold_programs({"program": make_program(512, 0), "further": {"b": {"program": folded}}})
