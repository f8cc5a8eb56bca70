"""Every factor rule against its operator: each strategy, run on all ranks, gives its results and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.passes.ir.layouts import PARTIAL, REPLICATED, Layout
from partitioner.passes.rules import factors_of, registry, rule
from partitioner.passes.rules.pointwise import LINEAR, NONLINEAR
from partitioner.passes.rules.strategies import enumerate_strategies
from partitioner.passes.rules.verify import OperatorReference, check_strategies, make_call_node
from tests.helpers.rule_cases import CASES, aten, f, i, operator, positive
from tests.helpers.rule_cases_more import MORE


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


FURTHER = [pytest.param(*c.values, id=f"{family}-{c.id}") for family, cases in MORE.items() for c in cases]


@pytest.mark.parametrize(("name", "args", "kwargs", "grad"), [*CASES, *FURTHER])
def test_strategies_compute_the_operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Any):
    assert check_strategies(operator(name), args, kwargs, grad=grad) == []


@pytest.mark.parametrize("ends", [[3, 3, 5, 8], [0, 0, 8, 8], [8, 8, 8, 8], [2, 4, 6, 8]])
def test_experts_on_ranks(ends: list[int]):
    pytest.importorskip("transformers.integrations.moe")
    op = torch.ops.transformers.grouped_mm_fallback.default
    assert check_strategies(op, (f(8, 4), f(4, 4, 6), torch.tensor(ends, dtype=torch.int32))) == []


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_largest_over_ranks_where_no_gradient_is_needed(name: str):
    assert check_strategies(operator(name), (f(4, 6), [1]), grad=False) == []
    node, _ = make_call_node(operator(name), (f(4, 6), [1]), {}, grad=False)
    assert "d1: S1 -> R" in map(str, enumerate_strategies(node, 2))


# Every elementwise operator of the tables, on operands that its schema asks for.


def elementwise_arguments(op: Any, whole_numbers: bool) -> list[Any] | None:
    args: list[Any] = []
    for parameter in op._schema.arguments:
        kind = str(parameter.type)
        if kind == "Tensor":
            size = (6,) if args else (4, 6)
            args.append(i(3, *size) if whole_numbers else positive(*size))
        elif parameter.has_default_value():
            break
        elif kind in ("number", "float", "int"):
            args.append(2 if kind != "float" else 0.5)
        else:
            return None
    return args if any(isinstance(a, torch.Tensor) for a in args) else None


WITHOUT_GRADIENT = {"floor_divide", "heaviside", "remainder"}
ELSEWHERE = {"clamp", "clip", "imag", "_conj"}  # they need optional arguments, or complex numbers


@pytest.mark.parametrize("name", [*NONLINEAR, *LINEAR])
def test_elementwise_operators(name: str):
    packet = getattr(aten, name.split(".")[0])
    overloads = [name.split(".")[1]] if "." in name else packet.overloads()
    checked = 0
    for overload in overloads:
        op = getattr(packet, overload)
        if op._schema.is_mutable or "out" in overload:
            continue
        for whole_numbers in (False, True):
            args = elementwise_arguments(op, whole_numbers)
            if args is None:
                continue
            try:
                op(*args)
            except (RuntimeError, NotImplementedError):
                continue  # not for this type
            assert check_strategies(op, args, grad=name not in WITHOUT_GRADIENT) == [], f"{op} on {args}"
            checked += 1
    assert checked or name in ELSEWHERE


# Random shapes.

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
few = settings(max_examples=40)


@st.composite
def reshapes(draw: Any) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: the prime factors of one dealt out anew."""
    source = draw(st.lists(sizes, min_size=1, max_size=4))
    primes = [p for size in source for p in {4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}.get(size, [size])]
    cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
    order = draw(st.permutations(primes)) if draw(st.booleans()) else primes
    borders = [0, *cuts, len(primes)]
    target = [torch.Size(order[a:b]).numel() for a, b in pairwise(borders)]
    return source, target


@few
@given(reshapes())
def test_any_reshape(shapes: tuple[list[int], list[int]]):
    source, target = shapes
    assert check_strategies(aten.reshape.default, (f(*source), target)) == []


@few
@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_any_broadcast(shape: list[int], data: st.DataObject):
    kept = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    other = [s if keep else 1 for s, keep in zip(shape, kept, strict=True)][data.draw(st.integers(0, len(shape))) :]
    assert check_strategies(aten.mul.Tensor, (f(*shape), f(*other))) == []
    assert check_strategies(aten.expand.default, (f(*other), shape)) == []


@few
@given(st.integers(2, 16), st.integers(-18, 18), st.integers(-18, 18), st.integers(1, 4))
def test_any_slice(size: int, start: int, end: int, step: int):
    assert check_strategies(aten.slice.Tensor, (f(2, size), 1, start, end, step)) == []


@few
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(2, 3))
def test_any_split_and_join(parts: list[int], num_ranks: int):
    assert check_strategies(aten.split_with_sizes.default, (f(sum(parts), 3), parts), num_ranks=num_ranks) == []
    assert check_strategies(aten.cat.default, ([f(3, p) for p in parts], -1), num_ranks=num_ranks) == []


# A wrong rule is found out.


@pytest.fixture
def rules() -> Iterator[None]:
    """Rules made in a test are forgotten after it."""
    before = dict(registry._rules)
    yield
    registry._rules.clear()
    registry._rules.update(before)
    registry._found.clear()


WRONG = [
    ("mm", (f(4, 4), f(4, 4)), "m k, k n -> n m", (), "result 0"),
    ("mm", (f(4, 6), f(6, 8)), "m k, k n -> m n!", [(0, 1)], "P, P -> P: result 0"),
    ("softmax.int", (f(4, 6), 1), "a b -> a b", (), "b: S1 -> S1: result 0"),
    ("relu", (f(4, 6),), "a b -> a b", [(0,)], "P -> P: result 0"),
    ("amax", (f(4, 6), [1]), "a b -> a", (), "b: S1 -> P: result 0"),
    ("cumsum", (f(4, 6), 1), "a b -> a b", (), "b: S1 -> S1: result 0"),
    ("expand", (f(1, 6), [4, 6]), "1 b -> a! b!", (), None),
    ("layer_norm", (f(4, 6), [6], f(6), f(6)), "b h, h, h -> b h", (), "h: S1, S0, S0 -> S1: fails"),
    ("view", (f(4, 6), [24]), "a b -> (b a)", (), "a: S0 -> S0"),
    ("slice.Tensor", (f(4, 6), 1, 0, 2**63 - 1), "a b -> b a", (), "does not fit"),
    ("repeat", (f(4, 6), [2, 1]), "a b -> (a r!) b", (), "S0 -> S0: result 0"),
]


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(("name", "args", "text", "linear", "found"), WRONG)
def test_a_wrong_rule_is_caught(name: str, args: tuple[Any, ...], text: str, linear: Any, found: str | None):
    rule(operator(name), text, linear=linear)
    try:
        violations = check_strategies(operator(name), args)
    except ValueError as error:
        violations = [str(error)]
    assert (violations == []) == (found is None), violations
    assert found is None or any(found in v for v in violations), violations


@pytest.mark.parametrize(
    ("layout", "position", "found"),
    [
        (REPLICATED, 1, ["gradient of operand 1 is off"]),  # R for R': its gradient would not be added up
        (PARTIAL, ~0, ["result 0 has shape"]),
    ],
)
def test_a_wrong_layout_is_caught(layout: Layout, position: int, found: list[str]):
    node, tensors = make_call_node(aten.mul.Tensor, (f(4, 6), f(6)), {})
    (strategy,) = (s for s in enumerate_strategies(node, 2) if s.factor == "d0")
    operands, results = list(strategy.operands), list(strategy.results)
    (operands if position >= 0 else results)[position if position >= 0 else ~position] = layout
    judge = OperatorReference(node, tensors)
    assert judge.check(strategy, 2) == []
    wrong = judge.check(replace(strategy, operands=tuple(operands), results=tuple(results)), 2)
    assert [any(w.startswith(f) for w in wrong) for f in found] == [True] * len(found), wrong


def test_a_read_by_a_sharded_operator_is_not_a_whole_one():
    """In the strategy that keeps everything whole, ``R`` and ``R'`` differ in gradients alone."""
    node, tensors = make_call_node(aten.mul.Tensor, (f(4, 6), f(6)), {})
    strategy = enumerate_strategies(node, 2)[1]
    assert str(strategy) == "R', R' -> R'"
    wrong = replace(strategy, operands=(REPLICATED, REPLICATED))
    assert OperatorReference(node, tensors).check(wrong, 2) != []


def test_unknown_operators_stay_whole():
    node, _ = make_call_node(aten.linalg_inv.default, (f(4, 4),), {})
    assert factors_of(node) is None
    assert [str(s) for s in enumerate_strategies(node, 2)] == ["R -> R", "R' -> R'"]
    assert check_strategies(aten.linalg_inv.default, (f(4, 4),)) == []
