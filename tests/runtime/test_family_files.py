"""The compact form of several programs in one plan file: it gives back every program as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.differences import apply_delta, make_delta
from partitioner.runtime.family.load import fold_programs, unfold_programs

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
    """A program as JSON data, whose block has ``extra`` nodes more than 30 in the middle. Nodes are numbered in the
    order of the graph, and each reads the one before."""
    operators = ["mul"] * 10 + ["all_gather"] * extra + ["add"] * 20
    nodes = [
        {"name": f"node_{i}", "target": f"aten.{op}.Tensor", "args": [{"node": f"node_{i - 1}"}], "val": [[2, length]]}
        for i, op in enumerate(operators, start=1)
    ]
    states = {f"layer.{i}.weight": {"shape": [512, 16]} for i in range(20)}
    return {"blocks": {"layer": {"nodes": nodes}}, "states": states, "length": length}


def fold_and_check(programs: dict[str, Any]) -> dict[str, Any]:
    """Return the compact programs after the first one, and check that they unfold to what they were."""
    first, *others = programs
    content = {"program": programs[first], "further": {n: {"program": programs[n]} for n in others}}
    folded = json.loads(json.dumps(fold_programs(copy.deepcopy(content))))
    assert unfold_programs(folded) == content
    return {name: data["program"] for name, data in folded["further"].items()}


def test_programs_are_stored_as_differences_from_those_that_they_resemble() -> None:
    """The third has as many nodes as the first, and differs from it in one number, which the states keep."""
    folded = fold_and_check({"a": make_program(512, 0), "b": make_program(256, 2), "c": make_program(128, 0)})
    assert folded["c"] == {"base": 0, "numbers": {"512": 128}, "rest": {}, "constant": ["states"]}


def test_nodes_that_are_added_to_a_graph_are_all_that_is_stored_of_it() -> None:
    """The nodes after the added ones have other numbers in their names, and other lengths."""
    folded = fold_and_check({"a": make_program(512, 0), "b": make_program(256, 2)})
    block = folded["b"]["blocks"]["layer"]
    assert block["names"]["node_11"] == "node_13"
    kinds = [list(piece) for piece in block["rest"]["keys"]["nodes"]["pieces"]]
    assert kinds.count(["="]) == 2
    assert sum(kind[1] - kind[0] for kind in kinds if kind[0] not in ("=", "of")) >= 28


def test_a_graph_is_a_difference_from_the_program_that_has_a_similar_one() -> None:
    """The last program resembles the one before it in all but one graph, which is sharded as in the first program."""
    programs = {"a": make_program(512, 40), "b": make_program(256, 0), "c": make_program(128, 0)}
    for name, program in programs.items():
        program["blocks"]["head"] = make_program(64, 0 if name == "a" else 30)["blocks"]["layer"]
        program["blocks"]["tail"] = make_program(32, 0 if name == "a" else 20)["blocks"]["layer"]
    programs["c"]["blocks"]["layer"] = make_program(128, 40)["blocks"]["layer"]
    folded = fold_and_check(programs)["c"]
    assert folded["base"] == 1
    assert folded["blocks"] == {"layer": {"base": 0, "numbers": {"512": 128}, "names": {}, "rest": {}}}


def refold(delta: Any, **others: Any) -> dict[str, Any]:
    """A file's content whose second program is made by ``delta`` of the nodes of the first one."""
    rest = {"keys": {"blocks": {"keys": {"layer": {"keys": {"nodes": delta}}}}}}
    return {
        "program": make_program(512, 0),
        "further": {"b": {"program": {"base": 0, "numbers": {}, "rest": rest} | others}},
    }


def test_splices_of_earlier_files_are_read() -> None:
    made = unfold_programs(refold({"splices": [[2, 4, ["x"]], [10, 10, ["y"]]]}))
    nodes = make_program(512, 0)["blocks"]["layer"]["nodes"]
    assert made["further"]["b"]["program"]["blocks"]["layer"]["nodes"] == [
        *nodes[:2],
        "x",
        *nodes[4:10],
        "y",
        *nodes[10:],
    ]


BAD_DELTAS: list[Any] = [
    *({"splices": [splice]} for splice in ([5, 4, []], [0, 99, []], [-1, 0, []], [0, 1], "x")),
    *({"pieces": [piece]} for piece in ([5, 4], [0, 99], [-1, 0], [0], 3, {}, {"of": 99}, {"of": "0"}, "of")),
    {"pieces": [[0, 20], [0, 20]]},  # entries taken twice: data would double at each program
    {"pieces": 7},
]


@pytest.mark.parametrize("delta", BAD_DELTAS)
def test_a_difference_from_other_data_is_refused(delta: Any) -> None:
    with pytest.raises(LaunchError, match="do not follow from its first one"):
        unfold_programs(refold(delta))


@pytest.mark.parametrize(
    "others",
    [
        {"numbers": {"512": [512, 512]}},
        {"names": {"node_1": ["node_1", "node_1"]}},
        {"names": 3},
        {"constant": ["nothing"]},
        {"blocks": {"layer": {"base": 7, "numbers": {}, "rest": {}}}},
        {"blocks": {"other": {"base": 0, "numbers": {}, "rest": {}}}},
        {"base": 1},
    ],
)
def test_replacements_that_do_not_fit_are_refused(others: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="do not follow from its first one"):
        unfold_programs(refold({}, **others))
