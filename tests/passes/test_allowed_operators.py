"""Which operators a plan file may name: those that compute tensors, and those of libraries that the user allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner import UntrustedOperatorError, allow_operators, rule
from partitioner.passes import allowed_operators
from partitioner.passes.allowed_operators import check_node_operators, check_operator
from partitioner.passes.ir.serialize import GraphFormatError, block_from_data, target_name
from partitioner.passes.rules import registry
from tests.helpers.mutations import HOSTILE_OPERATORS

pytestmark = pytest.mark.usefixtures("without_baselines")


@torch.library.custom_op("allowed_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("allowed_test::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x


@pytest.fixture(autouse=True)
def forget_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave nothing allowed that a test allows."""
    for name in ("_libraries", "_operators", "_met", "_checked"):
        monkeypatch.setattr(allowed_operators, name, set(getattr(allowed_operators, name)))
    rules = dict(registry._rules)
    yield
    registry._rules.clear()
    registry._rules.update(rules)
    registry._found.clear()


def nodes_with(target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> tuple[dict[str, Any], ...]:
    """Return a graph with one call, of ``target`` on the placeholder ``x``."""
    call = {"name": "call", "op": "call_function", "target": target, "args": args, "kwargs": kwargs or {}}
    return (
        {"name": "x", "op": "placeholder", "val": [[2], "float32"]},
        call,
        {"name": "output", "op": "output", "args": [{"node": "call"}]},
    )


@pytest.mark.parametrize("name", HOSTILE_OPERATORS)
def test_operators_with_effects_are_refused_by_name(name: str) -> None:
    with pytest.raises(UntrustedOperatorError, match="is refused"):
        check_operator(name)
    nodes = nodes_with(name, [{"node": "x"}])
    with pytest.raises(UntrustedOperatorError, match="block 'layer', node 'call'"):
        check_node_operators(nodes, "layer")
    with pytest.raises(UntrustedOperatorError, match="block 'layer', node 'call'"):
        block_from_data("layer", nodes, (), ("x",))


def test_no_operator_that_writes_or_returns_no_tensor_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all operators of aten that torch has, where this process has met no model."""
    for name in ("_operators", "_met", "_checked"):
        monkeypatch.setattr(allowed_operators, name, set())
    allowed = 0
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::"):
            continue
        try:
            check_operator(f"aten.{packet}.{overload or 'default'}")
        except UntrustedOperatorError:
            continue
        schema = torch._C._get_schema(f"aten::{packet}", overload)
        assert not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments), name
        assert any("Tensor" in str(result.type) for result in schema.returns), name
        assert not {"filename", "name"} & {a.name for a in schema.arguments if "str" in str(a.type)}, name
        allowed += 1
    assert allowed > 900


UNCHECKED_VIEWS = {"aten._reshape_alias.default"}  # reads past the end of its operand's memory if its sizes are wrong


def test_every_operator_with_a_rule_of_this_project_is_allowed() -> None:
    refused = []
    for name in registry._rules:
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if library != "aten":
            continue
        for each in [overload] if overload else getattr(torch.ops.aten, packet).overloads():
            operator = f"aten.{packet}.{each}"
            if operator in UNCHECKED_VIEWS:
                continue
            try:
                check_operator(operator)
            except UntrustedOperatorError as error:
                refused.append(str(error)[:100])
    effects = ("writes to", "does not compute", "neither a tensor")
    assert [text for text in refused if not any(effect in text for effect in effects)] == []


def test_a_library_is_allowed_by_its_name() -> None:
    with pytest.raises(UntrustedOperatorError, match=r"allow_operators\('allowed_test'\)"):
        check_operator("allowed_test.twice.default")
    allow_operators("allowed_test")
    block = block_from_data("layer", nodes_with("allowed_test.twice.default", [{"node": "x"}]), (), ("x",))
    assert "call" in str(block.graph)


def test_one_operator_is_allowed_by_its_name() -> None:
    allow_operators("allowed_test::twice")
    check_operator("allowed_test.twice.default")
    with pytest.raises(UntrustedOperatorError):
        check_operator("allowed_test.thrice.default")


def test_the_environment_allows_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITION_ALLOW_OPERATORS", "other, allowed_test::twice")
    allowed_operators._allow_from_environment.cache_clear()
    check_operator("allowed_test.twice.default")
    with pytest.raises(UntrustedOperatorError, match="PARTITION_ALLOW_OPERATORS=allowed_test"):
        check_operator("allowed_test.thrice.default")


def test_a_rule_or_a_model_allows_an_operator() -> None:
    rule(thrice, "a b -> a b")
    check_operator("allowed_test.thrice.default")
    assert target_name(torch.ops.allowed_test.twice.default) == "allowed_test.twice.default"
    check_operator("allowed_test.twice.default")


@pytest.mark.parametrize("name", ["aten", "prim", "c10d", "_c10d_functional", "", "a b", "a::", "x.y.z.w", 3])
def test_libraries_of_torch_are_not_allowed_as_a_whole(name: Any) -> None:
    with pytest.raises(UntrustedOperatorError):
        allow_operators(name)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.relu.default", [{"node": "x"}], {"x=print('run')#": 1}),
        ("aten.relu.default", [{"node": "x"}, 1], {}),
        ("aten.clone.default", [{"node": "x"}], {"memory_format": {"memory_format": "load"}}),
        ("aten.clone.default", [{"node": "x"}], {"memory_format": {"layout": "strided.__class__"}}),
        ("aten.to.dtype", [{"node": "x"}, {"dtype": "load"}], {}),
        ("getitem", [{"node": "x"}, "__class__"], {}),
        ("getitem", ["text", 0], {}),
        (["aten"], [], {}),
        (None, [], {}),
    ],
    ids=str,
)
def test_arguments_fit_the_schema(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Their names become the source of a function, and their values attributes of torch."""
    with pytest.raises(GraphFormatError, match="node 'call'"):
        block_from_data("layer", nodes_with(target, args, kwargs), (), ("x",))
