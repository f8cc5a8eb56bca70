"""The strategies of operators as text; sections; rules that users write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from partitioner.passes.errors import RuleError
from partitioner.passes.ir.layouts import make_shard_layout
from partitioner.passes.rules import factors_of, registry, rule
from partitioner.passes.rules.reshape import find_shared_factors
from partitioner.passes.rules.strategies import enumerate_strategies
from partitioner.passes.rules.verify import check_strategies, make_call_node
from tests.helpers.rule_cases import META, aten, f, i, operator


def text_of(name: str, *args: Any, **kwargs: Any) -> str:
    return str(factors_of(make_call_node(operator(name), args, kwargs)[0]))


def test_rules_read_as_einsums():
    assert text_of("linear", f(4, 6, 8), f(10, 8)) == "d0 d1 i, o i -> d0 d1 o"
    assert text_of("softmax.int", f(4, 6), -1) == "d0 d1 -> d0 d1"
    assert text_of("layer_norm", f(4, 6), [6], f(6), f(6)) == "d0 d1!, d1!, d1! -> d0 d1!"
    assert text_of("add.Tensor", f(4, 6, 8), f(6, 1)) == "d0 d1 d2, d1 _ -> d0 d1 d2"
    assert text_of("view", f(2, 12), [2, 3, 4]) == "d0 (d1 d2) -> d0 d1 d2"
    assert text_of("embedding", f(10, 8), i(10, 4, 6)) == "v h, d0 d1 -> d0 d1 h"
    query, key = f(2, 8, 6, 4), f(2, 2, 6, 4)
    assert text_of("scaled_dot_product_attention", query, key, key, is_causal=True, enable_gqa=True) == (
        "d0 (d1 rep) q! d!, d0 d1 k! d!, d0 d1 k! v! -> d0 (d1 rep) q! v!"
    )
    assert text_of("conv2d", f(4, 6, 5, 5), f(8, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], 2) == (
        "b (g i) _ _, (g o) i _ _ -> b (g o) _ _"
    )


def test_strategies_of_a_linear_layer():
    node, _ = make_call_node(aten.linear.default, (f(4, 6, 8), f(10, 8)), {})
    assert [str(s) for s in enumerate_strategies(node, 2)] == [
        "R, R -> R",
        "R', R' -> R'",
        "d0: S0, R' -> S0",
        "d1: S1, R' -> S1",
        "i: S2, S1 -> P",
        "o: R', S0 -> S2",
        "P, R' -> P",
        "R', P -> P",
    ]


def test_what_carries_no_gradient_is_read_whole():
    node, _ = make_call_node(aten.mul.Tensor, (f(4, 6), f(6)), {}, grad=False)
    assert [str(s) for s in enumerate_strategies(node, 2)] == [
        "R, R -> R",
        "d0: S0, R -> S0",
        "d1: S1, S0 -> S1",
        "P, R -> P",
        "R, P -> P",
    ]
    node, _ = make_call_node(aten.embedding.default, (f(8, 6), i(8, 4)), {})
    assert "R', R -> R'" in map(str, enumerate_strategies(node, 2))


def test_factors_that_do_not_divide_are_not_sharded():
    node, _ = make_call_node(aten.mm.default, (f(4, 6), f(6, 8)), {})
    assert [s.factor for s in enumerate_strategies(node, 4)] == [None, None, "m", "n", None, None]


def test_an_added_number_is_not_linear():
    node, _ = make_call_node(aten.add.Tensor, (f(4, 6), 1.0), {})
    assert "P -> P" not in map(str, enumerate_strategies(node, 2))
    node, _ = make_call_node(aten.add.Tensor, (f(4, 6), f(4, 6)), {})
    assert "P, P -> P" in map(str, enumerate_strategies(node, 2))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((8, 4), (2, 16), "(d0 d1) d2 -> d0 (d1 d2)"),
        ((4, 6, 8), (24, 8), "d0 d1 d2 -> (d0 d1) d2"),
        ((1, 4, 1), (2, 2), "_ (d0 d1) _ -> d0 d1"),
        ((6, 4), (8, 3), "(d0 d1!) d3! -> (d0 d2!) d4!"),
        ((5, 2, 3), (2, 5, 3), "d0! d3! d4 -> d1! d2! d4"),
    ],
)
def test_reshapes_are_walked_by_running_products(source: tuple[int, ...], target: tuple[int, ...], expected: str):
    sizes, before, after, whole = find_shared_factors(source, target)
    sides = (
        " ".join(
            f"({' '.join(n)})" if len(n) > 1 else "".join(n) or "_"
            for n in ([f + "!" * (f in whole) for f in dim] for dim in dims)
        )
        for dims in (before, after)
    )
    assert " -> ".join(sides) == expected
    for shape, dims in ((source, before), (target, after)):
        assert [torch.Size(sizes[f] for f in names).numel() for names in dims] == list(shape)


# Layouts in sections.


def described(name: str, *args: Any, num_ranks: int = 2, wanted: Any = None, **kwargs: Any) -> list[str]:
    """The strategies of a call, as text, after checking each of them."""
    assert check_strategies(operator(name), args, kwargs, num_ranks, wanted) == []
    return [str(s) for s in enumerate_strategies(make_call_node(operator(name), args, kwargs)[0], num_ranks, wanted)]


def test_split_shards_a_fused_dim_piece_by_piece():
    assert "d1[8,2,2]: S1[8,2,2] -> S1, S1, S1" in described("split_with_sizes", f(4, 12), [8, 2, 2], 1)


def test_pieces_that_do_not_divide_keep_the_dim_whole():
    found = described("split_with_sizes", f(4, 12), [9, 3], 1)
    assert not [s for s in found if s.startswith("d1")]


def test_a_slice_takes_whole_sections():
    found = described("slice.Tensor", f(4, 24), 1, 8, 16, wanted={0: [make_shard_layout(1, (8, 4, 4, 8))]})
    assert "d1[8,8,8]: S1[8,8,8] -> S1" in found
    assert "d1[8,4,4,8]: S1[8,4,4,8] -> S1[4,4]" in found


def test_sections_that_a_slice_would_cut_are_refined():
    found = described("slice.Tensor", f(4, 24), 1, 0, 8, wanted={0: [make_shard_layout(1, (12, 12))]})
    assert "d1[8,4,12]: S1[8,4,12] -> S1" in found


def test_a_join_has_a_section_per_operand():
    found = described("cat", [f(4, 8), f(4, 2), f(4, 6)], 1, wanted={0: [make_shard_layout(1, (4, 4))]})
    assert "d1[8,2,6]: S1, S1, S1 -> S1[8,2,6]" in found
    assert "d1[4,4,2,6]: S1[4,4], S1, S1 -> S1[4,4,2,6]" in found


def test_products_and_elementwise_operators_carry_sections():
    wanted = {~0: [make_shard_layout(2, (4, 2, 2))]}
    assert "o[4,2,2]: R', S0[4,2,2] -> S2[4,2,2]" in described("linear", f(2, 4, 6), f(8, 6), wanted=wanted)
    assert "d2[4,2,2]: S2[4,2,2], S0[4,2,2] -> S2[4,2,2]" in described("add.Tensor", f(2, 4, 8), f(8), wanted=wanted)


def test_wishes_are_joined():
    wanted = {~0: [make_shard_layout(0, (4, 12)), make_shard_layout(0, (8, 8))]}
    assert "o[4,4,8]: R', S0[4,4,8] -> S0[4,4,8]" not in described("linear", f(4, 6), f(16, 6), wanted=wanted)
    wanted = {~0: [make_shard_layout(1, (4, 12)), make_shard_layout(1, (8, 8))]}
    assert "o[4,4,8]: R', S0[4,4,8] -> S1[4,4,8]" in described("linear", f(4, 6), f(16, 6), wanted=wanted)


def test_an_inner_factor_is_sharded_in_equal_sections():
    assert "d1: S1 -> S0[6,6,6,6]" in described("view", f(4, 6), [24])
    assert "d2: S1[6,6] -> S2" in described("view", f(4, 12), [4, 2, 6])
    found = described(
        "view",
        f(4, 24),
        [4, 8, 3],
        wanted={0: [make_shard_layout(1, (12, 12)), make_shard_layout(1, (6, 18)), make_shard_layout(1, (5, 19))]},
    )
    assert [s for s in found if s.startswith("d1")] == [
        "d1: S1 -> S1",
        "d1[4,4]: S1[12,12] -> S1[4,4]",
        "d1[2,6]: S1[6,18] -> S1[2,6]",
        "d1[2,2,4]: S1[6,6,12] -> S1[2,2,4]",
    ]


def test_too_many_sections_are_not_offered():
    assert "d1: S1 -> S0[2,2]" in described("view", f(2, 2), [4])
    assert not [s for s in described("view", f(65, 2), [130]) if s.startswith("d1")]


def test_logsumexp_does_not_care_for_order():
    assert "d1[2,6]: S1[2,6] -> R" in described("logsumexp", f(4, 8), [1], wanted={0: [make_shard_layout(1, (2, 6))]})


def test_a_sequence_is_made_in_sections():
    assert "d0[2,6]: -> S0[2,6]" in [
        s.replace(":  ->", ": ->")
        for s in described("arange", 8, device=META, wanted={~0: [make_shard_layout(0, (2, 6))]})
    ]


# Rules that users write.


@pytest.fixture
def rules() -> Iterator[None]:
    """Rules made in a test are forgotten after it."""
    before = dict(registry._rules)
    yield
    registry._rules.clear()
    registry._rules.update(before)
    registry._found.clear()


@torch.library.custom_op("test_factors::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * value


@swiglu.register_fake
def _(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


TARGETS = [
    "test_factors::swiglu",
    "test_factors.swiglu",
    "test_factors::swiglu.default",
    torch.ops.test_factors.swiglu,
    torch.ops.test_factors.swiglu.default,
    swiglu,
]


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: type(t).__name__)
def test_a_user_adds_a_rule_in_one_line(target: Any):
    op = torch.ops.test_factors.swiglu.default
    args = (f(4, 6), f(4, 6))
    assert len(enumerate_strategies(make_call_node(op, args, {}, grad=False)[0], 2)) == 1
    rule(target, "... f, ... f -> ... f")
    assert check_strategies(op, args, grad=False) == []
    assert [str(s) for s in enumerate_strategies(make_call_node(op, args, {}, grad=False)[0], 2)] == [
        "R, R -> R",
        "...1: S0, S0 -> S0",
        "f: S1, S1 -> S1",
    ]


@pytest.mark.usefixtures("rules")
def test_groups_marks_and_broadcasts_in_text():
    rule(swiglu, "b 1 (k r) d!, b s (k r) d! -> b s (k r) d!")
    node, _ = make_call_node(torch.ops.test_factors.swiglu.default, (f(4, 1, 8, 6), f(4, 6, 8, 6)), {}, grad=False)
    with pytest.raises(RuleError, match=r"sizes of \(k r\) do not follow from its product 8"):
        enumerate_strategies(node, 2)
    rule(aten.repeat_interleave.self_int, "b k d -> b (k r!) d")
    node, _ = make_call_node(aten.repeat_interleave.self_int, (f(4, 2, 6), 4, 1), {}, grad=False)
    assert str(factors_of(node)) == "b k d -> b (k r!) d"
    assert "k: S1 -> S1" in map(str, enumerate_strategies(node, 2))


@pytest.mark.usefixtures("rules")
def test_one_text_for_each_number_of_operands():
    rule(aten.layer_norm.default, "... h! -> ... h!", "... h!, h! -> ... h!")
    assert check_strategies(aten.layer_norm.default, (f(4, 6), [6])) == []
    assert check_strategies(aten.layer_norm.default, (f(4, 6), [6], f(6))) == []
    with pytest.raises(RuleError, match="3 tensor operands, the rule is for 1 or 2"):
        check_strategies(aten.layer_norm.default, (f(4, 6), [6], f(6), f(6)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("b s", "expected one '->', got 0"),
        ("b s -> b s -> b s", "expected one '->', got 2"),
        ("b s, b s -> b t", "no operand has t: mark it with '!'"),
        ("b (s (d)), b -> b", "a group within a group"),
        ("b (s d, b -> b", "'(' without ')'"),
        ("b s), b -> b", "')' without '('"),
        ("b (), b -> b", "an empty group"),
        ("b b, b -> b", "'b' occurs twice in one tensor"),
        ("b ..., b -> b", "'...' stands for the leading dims"),
        ("b ! s, b -> b", "'!' must directly follow the name of a factor"),
        ("! b, b -> b", "'!' must directly follow the name of a factor"),
        ("b @ s, b -> b", "cannot read '@ s'"),
        ("b (1 s), b -> b", "'1' is a dim by itself"),
    ],
)
def test_malformed_text_is_refused(text: str, complaint: str):
    with pytest.raises(RuleError) as error:
        rule(swiglu, text)
    assert complaint in str(error.value)
    assert f"rule for test_factors::swiglu, {text!r}: " in str(error.value)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("test_factors::missing", "there is no such operator; expected 'namespace::name'"),
        ("swiglu", "there is no such operator"),
        ("aten::add.Missing", "the overloads of aten.add are"),
        (torch.relu, "expected an operator"),
        (3, "got int"),
    ],
)
def test_unknown_operators_are_refused(target: Any, complaint: str):
    with pytest.raises(RuleError) as error:
        rule(target, "a -> a")
    assert complaint in str(error.value)


def test_a_rule_is_texts_or_a_function():
    with pytest.raises(RuleError, match="one or more texts, or a function; got neither"):
        rule(swiglu)
    with pytest.raises(RuleError, match=r"linear=\[2\] names operands that are not among the 2"):
        rule(swiglu, "a, a -> a", linear=[[2]])


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("b s d, b s d -> b s d", "operand 0 has 3 dims in the rule and 2, [4, 6], in the call"),
        ("b s -> b s", "2 tensor operands, the rule is for 1"),
        ("b s, b s -> b s, b", "it has 2 results, the call has 1"),
        ("b b2, b2 b -> b b2", "cannot be both"),
        ("b 1, b s -> b s", "must be of size 1"),
    ],
)
def test_text_that_does_not_fit_the_shapes_is_refused(text: str, complaint: str):
    rule(swiglu, text)
    node, _ = make_call_node(torch.ops.test_factors.swiglu.default, (f(4, 6), f(4, 6)), {}, grad=False)
    with pytest.raises(RuleError) as error:
        enumerate_strategies(node, 2)
    assert complaint in str(error.value)
    assert "swiglu" in str(error.value)
