"""Calls of real operators, by family, on which the factor rules are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partitioner.passes.ops.experts
import partitioner.passes.ops.random  # noqa: F401

aten = torch.ops.aten
torch.manual_seed(2)  # the same numbers in every run


def operator(name: str) -> Any:
    """``mm`` is ``aten.mm.default``, ``sum.dim_IntList`` that overload."""
    name, _, overload = name.partition(".")
    packet = getattr(torch.ops.partition, name[11:]) if name.startswith("partition::") else getattr(aten, name)
    return getattr(packet, overload or "default")


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
    case("vdot", f(8), f(8)),
    case("cdist", f(2, 4, 6), f(2, 8, 6)),
    case("cdist", f(4, 6), f(8, 6), 1.0),
    case("bilinear", f(4, 6), f(4, 8), f(2, 6, 8)),
    case("bilinear", f(4, 6), f(4, 8), f(2, 6, 8), f(2)),
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
    case("fill.Scalar", f(4, 6), 2.0),
    case("fill.Tensor", f(4, 6), f()),
    case("bucketize.Tensor", f(4, 6), torch.arange(-2.0, 2.0).double()),
    case("isin.Tensor_Tensor", i(9, 4, 6), i(9, 2, 3)),
    case("searchsorted.Tensor", torch.arange(8.0).double(), f(4, 6)),
    case("searchsorted.Tensor", positive(4, 6).cumsum(-1), positive(4, 8)),
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
    case("copy", f(4, 6), f(6), grad=False),
    case("prelu", f(4, 6, 2), f(6)),
    case("prelu", f(4, 6, 2), f(1)),
    case("glu", f(4, 8), -1),
    case("bitwise_and.Tensor", i(9, 4, 6), i(9, 6)),
]
REDUCTION = [
    case("_safe_softmax", f(4, 6), -1),
    case("stft", f(4, 64), 16, 4, None, positive(16), False, None, True),
    case("stft", f(64), 16, 4, None, positive(16), False, None, True),
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
    case("fft_fftn", f(4, 6, 2), None, [1, 2]),
    case("fft_rfft", f(4, 6), 4),
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
    case("cat", [f(4, 6), f(4, 0), f(4, 2)], 1),
    case("cat", [f(0), f(4, 6)], -1),
    case("cat", [f(0), f(4, 6)], 0),
    case("split_with_sizes", f(4, 8), [4, 0, 4], 1),
    case("stack", [f(4, 6), f(4, 6)], -1),
    case("slice.Tensor", f(4, 12), 1, 4, 8),
    case("slice.Tensor", f(4, 12), 0, 0, 2**63 - 1),
    case("slice.Tensor", f(4, 12), 1, -4, 2**63 - 1),
    case("slice.Tensor", f(4, 12), 1, 1, 2**63 - 1, 2),
    case("slice.Tensor", f(4, 12), 1, 0, 7, 2),
    case("slice_scatter", f(4, 12), f(4, 4), 1, 4, 8),
    case("slice_scatter", f(4, 12), f(4, 6), 1, 0, 2**63 - 1, 2),
    case("select_scatter", f(4, 6, 2), f(4, 2), 1, -1),
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
    case("gather", f(8, 6), 1, i(6, 1, 4)),
    case("gather", f(8, 6, 2), 0, i(8, 4, 1, 2)),
    case("take_along_dim", f(8, 6), i(6, 8, 2), 1),
    case("take_along_dim", f(8, 6), i(6, 1, 2), 1),
    case("index_select", f(8, 6, 4), 1, i(6, 8)),
    case("index_select", f(8, 6), 1, i(6)),
    case("index_select", f(), 0, i(1, 1)),
    case("index.Tensor", f(8, 6), [i(8, 4)]),
    case("index.Tensor", f(8, 6, 4), [None, i(6, 2, 4) - 6]),
    case("index.Tensor", f(8, 6, 4), [i(8, 2, 1), None, i(4, 1, 6)]),
    case("index.Tensor", f(2, 8, 6), [None, i(8, 2), i(6, 4, 1)]),
    case("index_put", f(8, 6), [places(8, 4)], f(4, 6)),
    case("index_put", f(8, 6, 4), [None, i(6, 2)], f(8, 2, 4), True),
    case("index_put", f(8, 6), [places(8, 4)], f()),
    case("scatter.src", f(4, 6), 1, torch.stack([places(6, 2) for _ in range(4)]), f(4, 2)),
    case("scatter.src", f(4, 6), 1, places(6, 1, 2), f(1, 2)),
    case("scatter.value", f(4, 6), 1, i(6, 4, 2), 1.0),
    case("scatter.value", f(4, 6), 0, i(4, 2, 1), 1.0),
    case("scatter_add", f(4, 6), 1, i(6, 4, 2), f(4, 2)),
    case("scatter_add", f(4, 6), 1, i(6, 2, 2), f(4, 2), grad=[0]),
    case("scatter_add", f(4, 6), 1, i(6, 1, 2), f(1, 2)),
    case("scatter_reduce.two", f(4, 6), 1, i(6, 4, 2), f(4, 2), "amax"),
    case("scatter_reduce.two", f(4, 6), 1, i(6, 1, 2), f(1, 2), "sum"),
    case("index_add", f(4, 6), 0, i(4, 8), f(8, 6)),
    case("index_add", f(4, 6), 1, i(6), f(4, 1)),
    case("index_copy", f(4, 6), 0, places(4, 2), f(2, 6)),
    case("index_copy", f(4), 0, i(4), f()),
    case("index_fill.int_Scalar", f(4, 6), 0, places(4, 2), 1.0),
    case("index_fill.int_Scalar", f(4, 6), 0, i(4), 1.0),
    case("one_hot", i(6, 4, 2), 6),
]
ATTENTION = [
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), is_causal=True),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 10, 8), f(2, 4, 10, 12), f(2, 1, 6, 10)),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 4, 10, 8), f(2, 4, 10, 8), mask(6, 10), scale=0.5),
    case("scaled_dot_product_attention", f(2, 8, 6, 8), f(2, 2, 4, 8), f(2, 2, 4, 8), enable_gqa=True),
    case("scaled_dot_product_attention", f(2, 8, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), f(2, 8, 6, 6), enable_gqa=True),
    case("scaled_dot_product_attention", f(4, 6, 8), f(4, 6, 8), f(4, 6, 8)),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 1, 6, 8), f(2, 1, 6, 8)),
    case("scaled_dot_product_attention", f(2, 1, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8)),
    case("scaled_dot_product_attention", f(1, 4, 6, 8), f(2, 4, 6, 8), f(2, 1, 6, 8)),
    case("scaled_dot_product_attention", f(2, 4, 6, 8), f(2, 1, 6, 8), f(2, 4, 6, 8)),
    case("scaled_dot_product_attention", f(2, 8, 6, 8), f(2, 4, 6, 8), f(2, 2, 6, 8), enable_gqa=True),
    case("scaled_dot_product_attention", f(4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8)),
    case("_scaled_dot_product_flash_attention_for_cpu", *(f(2, 4, 6, 8) for _ in range(3)), 0.0, True),
]
NORMALISATION = [
    case("_weight_norm", f(4, 6, 2), f(1, 6, 1), 1),
    case("_weight_norm", f(4, 6), f(4, 1)),
    case("_weight_norm_interface", f(4, 6), f(4, 1)),
    case("layer_norm", f(4, 6, 8), [8], f(8), f(8)),
    case("layer_norm", f(4, 6, 8), [6, 8]),
    case("native_layer_norm", f(4, 6, 8), [8], f(8), f(8), 1e-5),
    case("rms_norm", f(4, 6, 8), [8], f(8), 1e-6),
    case("group_norm", f(4, 8, 3, 3), 4, f(8), f(8)),
    case("native_group_norm", f(4, 8, 6), f(8), f(8), 4, 8, 6, 4, 1e-5),
    case("batch_norm", f(4, 6, 2), f(6), f(6), f(6), positive(6), False, 0.1, 1e-5, False, grad=(0, 1, 2)),
    case("batch_norm", f(4, 6, 2), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    case(
        "_native_batch_norm_legit_functional", f(4, 6), f(6), f(6), f(6), positive(6), True, 0.1, 1e-5, grad=(0, 1, 2)
    ),
    case("instance_norm", f(4, 6, 8), f(6), f(6), None, None, True, 0.1, 1e-5, False),
]
CONVOLUTION = [
    case("max_unpool2d", f(2, 4, 3, 3), places(36, 3, 3).expand(2, 4, 3, 3).contiguous(), [6, 6]),
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
EXPERTS = [
    case("partition::expert_mm", f(8, 4), f(4, 4, 6), i(4, 8)),
    case("_grouped_mm", f(8, 32).bfloat16(), f(4, 32, 32).bfloat16(), torch.tensor([3, 3, 5, 8], dtype=torch.int32)),
    case("_grouped_mm", f(4, 8, 32).bfloat16(), f(4, 32, 32).bfloat16()),
    case("histc", positive(8, 6), 4, 0, 1, grad=False),
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
    case("arange.start_step", 2.1, -5.9, -1.0, dtype=torch.int64, device=META),
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
        "experts": EXPERTS,
        "creation": CREATION,
    }.items()
    for c in cases
]
