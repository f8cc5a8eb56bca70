"""Every factor rule against its operator: each strategy, run on all ranks, gives the operator's results and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.factors import factors_of, strategies
from passes.layouts import shard
from passes.rules import registry, rule
from passes.rules.pointwise import LINEAR, NONLINEAR
from passes.rules.verify import check_strategies, node_of

aten = torch.ops.aten


def operator(name: str) -> Any:
    """``mm`` is ``aten.mm.default``, ``sum.dim_IntList`` that overload."""
    name, _, overload = name.partition(".")
    return getattr(getattr(aten, name), overload or "default")


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


def places(high: int, *shape: int) -> torch.Tensor:
    """Indices that do not recur."""
    return torch.randperm(high)[: torch.Size(shape).numel()].view(shape)


def case(name: str, *args: Any, grad: Any = True, **kwargs: Any) -> Any:
    return pytest.param(name, args, kwargs, grad, id=name)


CONTRACTION = [
    case("linear", f(4, 6, 8), f(10, 8)),
    case("linear", f(4, 6, 8), f(10, 8), f(10)),
    case("linear", f(8), f(10, 8)),
    case("mm", f(4, 8), f(8, 6)),
    case("bmm", f(4, 6, 8), f(4, 8, 2)),
    case("mv", f(4, 8), f(8)),
    case("dot", f(8), f(8)),
    case("addmm", f(6), f(4, 8), f(8, 6), beta=2, alpha=3),
    case("addmm", f(4, 6), f(4, 8), f(8, 6)),
    case("baddbmm", f(4, 2, 6), f(4, 2, 8), f(4, 8, 6)),
    case("addbmm", f(2, 6), f(4, 2, 8), f(4, 8, 6)),
    case("matmul", f(2, 4, 6), f(6, 8)),
    case("matmul", f(6), f(6, 8)),
    case("matmul", f(4, 6), f(6)),
    case("matmul", f(2, 1, 6, 8), f(4, 8, 2)),
    case("outer", f(4), f(6)),
    case("einsum", "bhqd,bhkd->bhqk", [f(2, 4, 6, 8), f(2, 4, 2, 8)]),
    case("einsum", "b...i,oi->b...o", [f(2, 4, 8), f(6, 8)]),
    case("einsum", "ii->i", [f(4, 4)]),
]
POINTWISE = [
    case("add.Tensor", f(4, 6), f(1, 6), alpha=2),
    case("add.Tensor", f(4, 6), f(6)),
    case("add.Tensor", f(4, 6), 3.0),
    case("sub.Tensor", f(4, 6), f(4, 1)),
    case("rsub.Scalar", f(4, 6), 2.0),
    case("mul.Tensor", f(4, 6), f(6)),
    case("mul.Tensor", f(4, 6), f()),
    case("mul.Scalar", f(4, 6), 2.0),
    case("div.Tensor", f(4, 6), positive(4, 1)),
    case("div.Tensor_mode", f(4, 6), positive(4, 1), rounding_mode="floor"),
    case("div.Scalar", f(4, 6), 2.0),
    case("maximum", f(4, 6), f(4, 1)),
    case("max.other", f(4, 6), f(6)),
    case("pow.Tensor_Scalar", f(4, 6), 2),
    case("pow.Scalar", 2.0, f(4, 6)),
    case("pow.Tensor_Tensor", positive(4, 6), f(6)),
    case("clamp", f(4, 6), -0.5, 0.5),
    case("clip", f(4, 6), -0.5, 0.5),
    case("imag", torch.complex(f(4, 6), f(4, 6))),
    case("_conj", torch.complex(f(4, 6), f(4, 6))),
    case("clamp.Tensor", f(4, 6), f(6), None),
    case("where.self", mask(4, 1), f(4, 6), f(6)),
    case("where.ScalarOther", mask(4, 6), f(4, 6), 0.0),
    case("masked_fill.Scalar", f(4, 6), mask(4, 1), 0.0),
    case("masked_fill.Scalar", f(4, 6), mask(6), -1e9),
    case("masked_fill.Tensor", f(4, 6), mask(6), f()),
    case("eq.Tensor", i(3, 4, 6), i(3, 6)),
    case("logical_and", mask(4, 6), mask(6)),
    case("to.dtype", f(4, 6), torch.float32),
    case("to.dtype", f(4, 6), torch.int64),
    case("to.dtype", i(9, 4, 6), torch.float64),
    case("to.other", f(4, 6), f(2, 3, 4)),
    case("type_as", i(9, 4, 6), f(3)),
    case("_to_copy", f(4, 6), dtype=torch.float32),
    case("lerp.Tensor", f(4, 6), f(4, 6), f(6)),
    case("addcmul", f(4, 6), f(4, 6), f(6)),
    case("gelu", f(4, 6), approximate="tanh"),
    case("dropout", f(4, 6), 0.5, False),
    case("prelu", f(4, 6, 2), f(6)),
    case("prelu", f(4, 6, 2), f(1)),
    case("glu", f(4, 8), -1),
    case("bitwise_and.Tensor", i(9, 4, 6), i(9, 6)),
]
REDUCTION = [
    case("sum", f(4, 6)),
    case("sum.dim_IntList", f(4, 6, 2), [0, -1], True),
    case("sum.dim_IntList", f(4, 6, 2), [1]),
    case("sum.dim_IntList", f(4, 6), None),
    case("sum", mask(4, 6)),
    case("count_nonzero.dim_IntList", mask(4, 6), [1]),
    case("nansum", f(4, 6), [1]),
    case("mean", f(4, 6)),
    case("mean.dim", f(4, 6), [-1], True),
    case("amax", f(4, 6), [-1], True),
    case("amin", f(4, 6), [0, 1]),
    case("max.dim", f(4, 6), 1),
    case("max", f(4, 6)),
    case("argmax", f(4, 6), -1),
    case("argmax", f(4, 6)),
    case("any.dim", mask(4, 6), 1, True),
    case("all", mask(4, 6)),
    case("prod.dim_int", f(4, 6), 1),
    case("var.correction", f(4, 6), [1], correction=0, keepdim=True),
    case("var_mean.correction", f(4, 6), [1]),
    case("std.dim", f(4, 6), [0]),
    case("linalg_vector_norm", f(4, 6), 2, [-1], True),
    case("norm.ScalarOpt_dim", f(4, 6), 2, [-1]),
    case("aminmax", f(4, 6), dim=1),
    case("cumsum", f(4, 6), -1),
    case("cumprod", f(4, 6), 0),
    case("cummax", f(4, 6), 0),
    case("logcumsumexp", f(4, 6), 0),
    case("sort", f(4, 6), -1, True),
    case("sort.stable", f(4, 6), stable=True, dim=0),
    case("argsort", f(4, 6)),
    case("topk", f(4, 6), 2),
    case("kthvalue", f(4, 6), 2, 0),
    case("median.dim", f(4, 6), 1),
    case("softmax.int", f(4, 6), -1),
    case("softmax.int", f(4, 6), -1, torch.float32),
    case("_softmax", f(4, 6), -1, False),
    case("log_softmax.int", f(4, 6), 0),
    case("_log_softmax", f(4, 6), 0, False),
    case("logsumexp", f(4, 6), [-1]),
    case("logsumexp", f(4, 6, 8), [0, 2], True),
    case("logsumexp", torch.full((4, 6), -torch.inf, dtype=torch.float64), [1]),
]
RESHAPE = [
    case("view", f(4, 6, 8), [24, 2, -1]),
    case("view", f(8, 4), [2, 16]),
    case("view", f(6, 4), [8, 3]),
    case("reshape", f(4, 1, 8), [4, 8, 1]),
    case("flatten.using_ints", f(2, 4, 6), 1),
    case("unflatten.int", f(2, 24), 1, [4, 6]),
    case("unsqueeze", f(4, 6), 1),
    case("squeeze.dim", f(4, 1, 6), 1),
    case("squeeze", f(4, 1, 2)),
    case("squeeze.dim", f(4, 2), 1),
    case("_unsafe_view", f(4, 6), [24]),
    case("reshape_as", f(4, 6), f(24)),
    case("permute", f(2, 4, 6), [2, 0, -2]),
    case("transpose.int", f(2, 4, 6), -1, 1),
    case("t", f(4, 6)),
    case("numpy_T", f(4, 6, 2)),
    case("mT", f(4, 6, 2)),
    case("movedim.int", f(2, 4, 6), 0, -1),
    case("movedim.intlist", f(2, 4, 6), [0, 2], [1, 0]),
    case("expand", f(4, 1, 6), [2, 4, 8, -1]),
    case("expand_as", f(6), f(4, 6)),
    case("repeat", f(4, 6), [2, 1, 4]),
    case("tile", f(4, 6), [2]),
    case("repeat_interleave.self_int", f(4, 6), 2, 1),
    case("repeat_interleave.self_int", f(4, 6), 4),
    case("pixel_shuffle", f(2, 16, 4, 6), 2),
    case("pixel_unshuffle", f(2, 4, 8, 12), 2),
    case("view_as_complex", f(4, 6, 2)),
    case("view_as_real", torch.complex(f(4, 6), f(4, 6))),
    case("contiguous", f(4, 6)),
    case("clone", f(4, 6)),
    case("view.dtype", i(9, 4, 6), torch.float64),
]
PIECES = [
    case("split.Tensor", f(4, 12), 4, -1),
    case("split.Tensor", f(4, 10), 4, -1),
    case("split_with_sizes", f(12, 4), [8, 2, 2]),
    case("split_with_sizes", f(12, 4), [1, 11], 0),
    case("chunk", f(4, 8), 2, 1),
    case("tensor_split.sections", f(4, 8), 2, 1),
    case("unbind.int", f(4, 6, 3), -1),
    case("cat", [f(4, 6), f(2, 6), f(8, 6)]),
    case("cat", [f(4, 6), f(4, 1)], 1),
    case("stack", [f(4, 6), f(4, 6)], -1),
    case("slice.Tensor", f(4, 12), 1, 4, 8),
    case("slice.Tensor", f(4, 12), 0, 0, 2**63 - 1),
    case("slice.Tensor", f(4, 12), 1, -4, 2**63 - 1),
    case("slice.Tensor", f(4, 12), 1, 1, 2**63 - 1, 2),
    case("slice.Tensor", f(4, 12), 1, 0, 7, 2),
    case("narrow", f(12, 4), 0, 2, 6),
    case("select.int", f(4, 6, 2), 1, -1),
    case("constant_pad_nd", f(4, 6, 8), [1, 1]),
    case("constant_pad_nd", f(4, 6, 8), [0, 0, 1, 2], 3.0),
    case("pad", f(2, 4, 6, 8), [1, 1, 2, 1], "reflect"),
    case("flip", f(4, 6, 2), [1]),
    case("roll", f(4, 6, 2), [1], [0]),
    case("roll", f(4, 6), [1]),
    case("tril", f(4, 6, 6)),
    case("triu", f(6, 6), 1),
    case("diff", f(4, 6)),
    case("diagonal", f(4, 6, 6), 0, 1, 2),
    case("diag_embed", f(4, 6)),
    case("unfold", f(4, 8, 2), 1, 4, 2),
]
INDEXING = [
    case("embedding", f(8, 6), i(8, 4, 2)),
    case("embedding", f(8, 6), i(8, 40), 3),
    case("gather", f(8, 6), 1, i(6, 8, 1)),
    case("gather", f(8, 6, 2), -2, i(6, 8, 4, 2)),
    case("gather", f(8, 6), 0, i(8, 8, 4)),
    case("take_along_dim", f(8, 6), i(6, 8, 2), 1),
    case("index_select", f(8, 6, 4), 1, i(6, 8)),
    case("index.Tensor", f(8, 6), [i(8, 4)]),
    case("index.Tensor", f(8, 6, 4), [None, i(6, 2, 4) - 6]),
    case("index.Tensor", f(8, 6, 4), [i(8, 2, 1), None, i(4, 1, 6)]),
    case("index.Tensor", f(2, 8, 6), [None, i(8, 2), i(6, 4, 1)]),
    case("index_put", f(8, 6), [places(8, 4)], f(4, 6)),
    case("index_put", f(8, 6, 4), [None, i(6, 2)], f(8, 2, 4), True),
    case("index_put", f(8, 6), [places(8, 4)], f()),
    case("scatter.src", f(4, 6), 1, torch.stack([places(6, 2) for _ in range(4)]), f(4, 2)),
    case("scatter.value", f(4, 6), 1, i(6, 4, 2), 1.0),
    case("scatter_add", f(4, 6), 1, i(6, 4, 2), f(4, 2)),
    case("scatter_add", f(4, 6), 1, i(6, 2, 2), f(4, 2), grad=[0]),
    case("scatter_reduce.two", f(4, 6), 1, i(6, 4, 2), f(4, 2), "amax"),
    case("index_add", f(4, 6), 0, i(4, 8), f(8, 6)),
    case("index_copy", f(4, 6), 0, places(4, 2), f(2, 6)),
    case("index_fill.int_Scalar", f(4, 6), 0, places(4, 2), 1.0),
    case("one_hot", i(6, 4, 2), 6),
]
ATTENTION = [
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), is_causal=True),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 10, 8), f(2, 4, 10, 12), f(2, 1, 6, 10)),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 10, 8), f(2, 4, 10, 8), mask(6, 10), scale=0.5),
    case("scaled_dot_product_attention", f(2, 8, 6, 8), f(2, 2, 4, 8), f(2, 2, 4, 8), enable_gqa=True),
    case("scaled_dot_product_attention", f(2, 8, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), f(2, 8, 6, 6), enable_gqa=True),
    case("scaled_dot_product_attention", f(4, 6, 8), f(4, 6, 8), f(4, 6, 8)),
]
NORMALISATION = [
    case("layer_norm", f(4, 6, 8), [8], f(8), f(8)),
    case("layer_norm", f(4, 6, 8), [6, 8]),
    case("native_layer_norm", f(4, 6, 8), [8], f(8), f(8), 1e-5),
    case("rms_norm", f(4, 6, 8), [8], f(8), 1e-6),
    case("group_norm", f(4, 8, 3, 3), 4, f(8), f(8)),
    case("native_group_norm", f(4, 8, 6), f(8), f(8), 4, 8, 6, 4, 1e-5),
    case("batch_norm", f(4, 6, 2), f(6), f(6), f(6), positive(6), False, 0.1, 1e-5, False, grad=(0, 1, 2)),
    case("batch_norm", f(4, 6, 2), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    case("_native_batch_norm_legit_functional", f(4, 6), f(6), f(6), f(6), positive(6), True, 0.1, 1e-5, grad=(0, 1, 2)),
    case("instance_norm", f(4, 6, 8), f(6), f(6), None, None, True, 0.1, 1e-5, False),
]
CONVOLUTION = [
    case("conv1d", f(4, 6, 8), f(10, 6, 3), None, [1], [1]),
    case("conv2d", f(4, 6, 5, 5), f(8, 6, 3, 3), f(8)),
    case("conv2d", f(4, 8, 5, 5), f(12, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    case("conv2d", f(4, 8, 5, 5), f(8, 1, 3, 3), f(8), [1, 1], [0, 0], [1, 1], 8),
    case("conv2d.padding", f(4, 6, 5, 5), f(8, 6, 3, 3), None, [1, 1], "same"),
    case("conv2d", f(6, 5, 5), f(8, 6, 3, 3)),
    case("convolution", f(4, 6, 5), f(8, 6, 3), None, [1], [0], [1], False, [0], 1),
    case("convolution", f(4, 8, 5), f(8, 3, 3), f(6), [1], [0], [1], True, [0], 2),
    case("conv_transpose1d", f(4, 8, 5), f(8, 6, 3)),
    case("max_pool2d", f(4, 6, 8, 8), [2, 2]),
    case("max_pool2d_with_indices", f(4, 6, 8, 8), [2, 2]),
    case("avg_pool2d", f(4, 6, 8, 8), [2, 2]),
    case("adaptive_avg_pool2d", f(4, 6, 8, 8), [1, 1]),
    case("upsample_nearest2d.vec", f(4, 6, 4, 4), None, [2.0, 2.0]),
    case("upsample_bilinear2d.vec", f(4, 6, 4, 4), [8, 8], False, None),
    case("grid_sampler", f(4, 6, 4, 4), positive(4, 2, 2, 2), 0, 0, False),
    case("im2col", f(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    case("col2im", f(4, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
]
LOSS = [
    case("mse_loss", f(4, 6), f(4, 6)),
    case("mse_loss", f(4, 6), f(4, 6), 2),
    case("smooth_l1_loss", f(4, 6), f(4, 6), 0),
    case("binary_cross_entropy_with_logits", f(4, 6), positive(4, 6), None, f(6), grad=[0]),
    case("kl_div", f(4, 6), positive(4, 6)),
    case("cross_entropy_loss", f(4, 6), i(6, 4)),
    case("cross_entropy_loss", f(4, 6, 2), i(6, 4, 2), positive(6), 2, grad=[0]),
    case("cross_entropy_loss", f(4, 6), i(6, 4), None, 0),
    case("nll_loss_forward", f(4, 6), i(6, 4), None, 2, -100),
    case("cosine_similarity", f(4, 6), f(4, 6), 1),
]
META = torch.device("meta")
CREATION = [
    case("full", [4, 6], 2.0, device=META),
    case("zeros", [4, 6], dtype=torch.float64, device=META),
    case("ones_like", f(4, 6)),
    case("full_like", i(9, 4, 6), 3),
    case("new_zeros", f(3), [4, 6]),
    case("arange", 8, device=META),
    case("arange.start_step", 3, 27, 3, device=META),
    case("arange.start", 2, 10, dtype=torch.float64, device=META),
    case("tril_indices", 4, 4, device=META),
]
CASES = [
    pytest.param(*c.values, id=f"{family}-{c.id}")
    for family, cases in {
        "contraction": CONTRACTION,
        "pointwise": POINTWISE,
        "reduction": REDUCTION,
        "reshape": RESHAPE,
        "pieces": PIECES,
        "indexing": INDEXING,
        "attention": ATTENTION,
        "normalisation": NORMALISATION,
        "convolution": CONVOLUTION,
        "loss": LOSS,
        "creation": CREATION,
    }.items()
    for c in cases
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("name", "args", "kwargs", "grad"), CASES)
def test_strategies_compute_the_operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Any):
    assert check_strategies(operator(name), args, kwargs, grad=grad) == []


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_largest_over_ranks_where_no_gradient_is_needed(name: str):
    assert check_strategies(operator(name), (f(4, 6), [1]), grad=False) == []
    node, _ = node_of(operator(name), (f(4, 6), [1]), {}, grad=False)
    assert "d1: S1 -> R" in map(str, strategies(node, 2))


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


# Layouts in sections.


def described(name: str, *args: Any, num_ranks: int = 2, wanted: Any = None, **kwargs: Any) -> list[str]:
    """The strategies of a call, as text, after checking each of them."""
    assert check_strategies(operator(name), args, kwargs, num_ranks, wanted) == []
    return [str(s) for s in strategies(node_of(operator(name), args, kwargs)[0], num_ranks, wanted)]


def test_split_shards_a_fused_dim_piece_by_piece():
    assert "d1[8,2,2]: S1[8,2,2] -> S1, S1, S1" in described("split_with_sizes", f(4, 12), [8, 2, 2], 1)


def test_pieces_that_do_not_divide_keep_the_dim_whole():
    found = described("split_with_sizes", f(4, 12), [9, 3], 1)
    assert not [s for s in found if s.startswith("d1")]


def test_a_slice_takes_whole_sections():
    found = described("slice.Tensor", f(4, 24), 1, 8, 16, wanted={0: [shard(1, (8, 4, 4, 8))]})
    assert "d1[8,8,8]: S1[8,8,8] -> S1" in found
    assert "d1[8,4,4,8]: S1[8,4,4,8] -> S1[4,4]" in found


def test_sections_that_a_slice_would_cut_are_refined():
    found = described("slice.Tensor", f(4, 24), 1, 0, 8, wanted={0: [shard(1, (12, 12))]})
    assert "d1[8,4,12]: S1[8,4,12] -> S1" in found


def test_a_join_has_a_section_per_operand():
    found = described("cat", [f(4, 8), f(4, 2), f(4, 6)], 1, wanted={0: [shard(1, (4, 4))]})
    assert "d1[8,2,6]: S1, S1, S1 -> S1[8,2,6]" in found
    assert "d1[4,4,2,6]: S1[4,4], S1, S1 -> S1[4,4,2,6]" in found


def test_products_and_elementwise_operators_carry_sections():
    wanted = {~0: [shard(2, (4, 2, 2))]}
    assert "o[4,2,2]: R', S0[4,2,2] -> S2[4,2,2]" in described("linear", f(2, 4, 6), f(8, 6), wanted=wanted)
    assert "d2[4,2,2]: S2[4,2,2], S0[4,2,2] -> S2[4,2,2]" in described("add.Tensor", f(2, 4, 8), f(8), wanted=wanted)


def test_wishes_are_joined():
    wanted = {~0: [shard(0, (4, 12)), shard(0, (8, 8))]}
    assert "o[4,4,8]: R', S0[4,4,8] -> S0[4,4,8]" not in described("linear", f(4, 6), f(16, 6), wanted=wanted)
    wanted = {~0: [shard(1, (4, 12)), shard(1, (8, 8))]}
    assert "o[4,4,8]: R', S0[4,4,8] -> S1[4,4,8]" in described("linear", f(4, 6), f(16, 6), wanted=wanted)


def test_an_inner_factor_is_sharded_in_equal_sections():
    assert "d1: S1 -> S0[6,6,6,6]" in described("view", f(4, 6), [24])
    assert "d2: S1[6,6] -> S2" in described("view", f(4, 12), [4, 2, 6])
    found = described("view", f(4, 24), [4, 8, 3], wanted={0: [shard(1, (12, 12)), shard(1, (6, 18)), shard(1, (5, 19))]})
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
    assert "d1[2,6]: S1[2,6] -> R" in described("logsumexp", f(4, 8), [1], wanted={0: [shard(1, (2, 6))]})


def test_a_sequence_is_made_in_sections():
    assert "d0[2,6]: -> S0[2,6]" in [
        s.replace(":  ->", ": ->") for s in described("arange", 8, device=META, wanted={~0: [shard(0, (2, 6))]})
    ]


# Random shapes.

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
few = settings(max_examples=40, deadline=None)


@st.composite
def reshapes(draw: Any) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: the prime factors of one dealt out anew."""
    source = draw(st.lists(sizes, min_size=1, max_size=4))
    primes = [p for size in source for p in {4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}.get(size, [size])]
    cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
    order = draw(st.permutations(primes)) if draw(st.booleans()) else primes
    borders = [0, *cuts, len(primes)]
    target = [torch.Size(order[a:b]).numel() for a, b in zip(borders, borders[1:], strict=False)]
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
    ("slice.Tensor", (f(4, 6), 1, 0, 2**63 - 1), "a b -> b a", (), "operand"),
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


@pytest.mark.usefixtures("rules")
def test_a_wrong_gradient_is_caught():
    """Forward alone cannot tell a read by a sharded operator from any other."""
    right = registry._rules["aten::mul"]

    def wrong(node: Any) -> Any:
        found = right(node)
        node.all_input_nodes[1].meta["grad"] = False  # its gradient would not be summed up
        return found

    registry._rules["aten::mul"] = wrong
    registry._found.clear()
    node, _ = node_of(aten.mul.Tensor, (f(4, 6), f(6)), {})
    assert "d0: S0, R -> S0" in map(str, strategies(node, 2))


def test_unknown_operators_stay_whole():
    node, _ = node_of(aten.linalg_inv.default, (f(4, 4),), {})
    assert factors_of(node) is None
    assert [str(s) for s in strategies(node, 2)] == ["R -> R", "R' -> R'"]
    assert check_strategies(aten.linalg_inv.default, (f(4, 4),)) == []
