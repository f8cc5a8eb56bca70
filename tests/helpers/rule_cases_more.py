"""Calls of the operators whose rules are those of others: other overloads' names, copies of views, other dimensions."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.rule_cases import META, case, f, i, places, positive

_LIKE_ADD = ("subtract.Tensor", "multiply.Tensor")
_BATCH_NORM = (f(4, 6, 2), f(6), f(6), f(6), positive(6))


def _flags(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


POINTWISE = [
    *(case(name, f(4, 6), f(4, 1)) for name in _LIKE_ADD),
    *(case(name, f(4, 6), positive(4, 1)) for name in ("divide.Tensor", "true_divide.Tensor")),
    *(case(name, f(4, 6), 0.5, False) for name in ("native_dropout", "feature_dropout", "alpha_dropout")),
    case("feature_alpha_dropout", f(4, 6, 2), 0.5, False),
    case("_prelu_kernel", f(4, 6, 2), f(1, 6, 1)),
    case("partition::uniform", i(99, 4, 6), torch.tensor(3), torch.tensor(7), grad=False),
    case("partition::normal", i(99, 4, 6), torch.tensor(3), torch.tensor(7), grad=False),
    case("partition::exponential", i(99, 4, 6), torch.tensor(3), torch.tensor(7), grad=False),
    case("partition::bits", i(99, 4, 6), torch.tensor(3), torch.tensor(7), grad=False),
    case("partition::fraction", i(99, 4, 6), torch.tensor(3), torch.tensor(7), grad=False),
    case("partition::gamma", i(99, 4, 6), torch.tensor(3), torch.tensor(7), positive(4, 6), grad=False),
    case("partition::poisson", i(99, 4, 6), torch.tensor(3), torch.tensor(7), positive(4, 6), grad=False),
    case(
        "partition::binomial",
        *(i(99, 4, 6), torch.tensor(3), torch.tensor(7), i(40, 4, 6).double(), positive(6)),
        grad=False,
    ),
    case("partition::gamma_grad", positive(4, 6), positive(4, 6), grad=False),
    case("partition::dirichlet_grad", positive(4, 6), positive(4, 6), positive(4, 1) + 6, grad=False),
]
CONTRACTION = [case("addmv", f(4), f(4, 6), f(6))]
ATTENTION = [
    case("partition::cross_entropy", f(4, 6), i(6, 4, 1), 1),
    case("partition::cross_entropy", f(2, 4, 6, 8), i(6, 2, 4, 1, 8), -2),
    case("partition::cross_entropy", f(6), i(6, 1), 0),
    case(
        "partition::cross_entropy", torch.full((4, 6), -torch.inf).double().index_fill(1, i(1, 1), 0.5), i(1, 4, 1), 1
    ),
    case("partition::band_attention", *(f(2, 4, 6, 8) for _ in range(3)), -1, 0, 0.5),
    case("partition::band_attention", f(2, 4, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), 2, 0, 0.5),
    case("partition::combine_ids", i(3, 2, 6), i(2, 2, 6)),
    case("partition::document_attention", *(f(2, 4, 6, 8) for _ in range(3)), i(3, 2, 6), [], -1, 0, 0.5),
    case("partition::document_attention", f(2, 4, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), i(2, 2, 6), [6], 2, 1, None),
    case("partition::scored_attention", *(f(2, 4, 6, 8) for _ in range(3)), None, None, None, [], -1, -1, 0, None, 0.5),
    case(
        "partition::scored_attention",
        f(2, 4, 6, 8),
        f(2, 2, 6, 8),
        f(2, 2, 6, 8),
        i(2, 2, 6),
        i(2, 2, 6).bool(),
        f(4),
        [6],
        3,
        -1,
        0,
        0.5,
        2.0,
        grad=(0, 1, 2),
    ),
    case("partition::write_cache", f(2, 4, 8, 6), f(2, 4, 3, 6), torch.tensor(2), grad=False),
]
_GATES = f(20, 4), f(20, 5), f(20), f(20)  # of an LSTM with 4 features and 5 hidden ones
RECURRENT = [
    case("partition::lstm_layer", f(3, 6, 4), f(1, 6, 5), f(1, 6, 5), *_GATES, None, False),
    case("partition::lstm_layer", f(3, 6, 4), f(1, 6, 2), f(1, 6, 5), f(20, 4), f(20, 2), None, None, f(2, 5), True),
    case("partition::recurrent_layer", f(3, 6, 4), f(1, 6, 5), f(15, 4), f(15, 5), f(15), f(15), "gru", True),
    case("partition::recurrent_layer", f(3, 6, 4), f(1, 6, 5), f(5, 4), f(5, 5), None, None, "rnn_relu", False),
]
CONVOLUTION = [
    case("conv3d", f(4, 6, 3, 3, 3), f(8, 6, 2, 2, 2), f(8)),
    case("_convolution", f(4, 6, 5), f(8, 6, 3), None, [1], [0], [1], False, [0], 1, False, False, False, False),
    case("conv_transpose2d.input", f(4, 8, 3, 3), f(8, 6, 2, 2), f(6)),
    case("conv_transpose3d.input", f(4, 8, 2, 2, 2), f(8, 6, 2, 2, 2)),
    case("avg_pool1d", f(4, 6, 8), [2]),
    case("avg_pool3d", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case("max_pool1d", f(4, 6, 8), [2]),
    case("max_pool1d_with_indices", f(4, 6, 8), [2]),
    case("max_pool3d", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case("fractional_max_pool2d", f(2, 4, 6, 6), [2, 2], [3, 3], positive(2, 4, 2), grad=(0,)),
    case("fractional_max_pool2d", f(4, 6, 6), [2, 2], [3, 3], positive(1, 4, 2), grad=(0,)),
    case("fractional_max_pool3d", f(2, 4, 6, 6, 6), [2, 2, 2], [3, 3, 3], positive(2, 4, 3), grad=(0,)),
    case("max_pool3d_with_indices", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case("adaptive_avg_pool1d", f(4, 6, 8), [2]),
    case("_adaptive_avg_pool2d", f(4, 6, 8, 8), [2, 2]),
    case("adaptive_avg_pool3d", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case("_adaptive_avg_pool3d", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case("adaptive_max_pool1d", f(4, 6, 8), [2]),
    case("adaptive_max_pool2d", f(4, 6, 8, 8), [2, 2]),
    case("adaptive_max_pool3d", f(2, 4, 4, 4, 4), [2, 2, 2]),
    case(
        "max_unpool3d",
        f(2, 4, 2, 2, 2),
        places(64, 2, 2, 2).expand(2, 4, 2, 2, 2).contiguous(),
        [4, 4, 4],
        [2] * 3,
        [0] * 3,
    ),
    case("grid_sampler_2d", f(4, 6, 3, 3), f(4, 2, 5, 2).tanh(), 0, 0, False),
    case("grid_sampler_3d", f(4, 6, 3, 3, 3), f(4, 2, 2, 4, 3).tanh(), 0, 0, True),
    case("affine_grid_generator", f(4, 2, 3), [4, 3, 2, 5], False),
    case("upsample_nearest1d.vec", f(4, 6, 4), None, [2.0]),
    case("_upsample_nearest_exact1d.vec", f(4, 6, 4), None, [2.0]),
    case("upsample_linear1d.vec", f(4, 6, 4), [8], False, None),
    case("_upsample_nearest_exact2d.vec", f(4, 6, 4, 4), None, [2.0, 2.0]),
    case("upsample_bicubic2d.vec", f(4, 6, 4, 4), [8, 8], False, None),
    case("_upsample_bilinear2d_aa.vec", f(4, 6, 4, 4), [8, 8], False, None),
    case("_upsample_bicubic2d_aa.vec", f(4, 6, 4, 4), [8, 8], False, None),
    case("upsample_nearest3d.vec", f(2, 4, 2, 2, 2), None, [2.0] * 3),
    case("_upsample_nearest_exact3d.vec", f(2, 4, 2, 2, 2), None, [2.0] * 3),
    case("upsample_trilinear3d.vec", f(2, 4, 2, 2, 2), [4, 4, 4], False, None),
    case("grid_sampler_2d", f(4, 6, 4, 4), positive(4, 2, 2, 2), 0, 0, False),
    case("grid_sampler_3d", f(2, 4, 3, 3, 3), positive(2, 2, 2, 2, 3), 0, 0, False),
]
CREATION = [
    case("ones", [4, 6], device=META),
    case("scalar_tensor", 2.0, device=META),
    case("new_full", f(3), [4, 6], 2.0),
    case("new_ones", f(3), [4, 6]),
    case("zeros_like", f(4, 6)),
    case("eye", 4, device=META),
    case("hann_window", 8, device=META),
    case("linspace", 0.0, 1.0, 8, device=META),
    case("logspace", 0.0, 1.0, 8, device=META),
    case("triu_indices", 4, 4, device=META),
]
INDEXING = [
    case("_unsafe_index.Tensor", f(8, 6), [i(8, 4)]),
    case("_unsafe_index_put", f(8, 6), [places(8, 4)], f(4, 6)),
    case("index_reduce", f(4, 6), 0, places(4, 2), positive(2, 6), "amax"),
]
REDUCTION = [
    *(case("amin", i(9, 4, 6).to(kind), [1], grad=False) for kind in (torch.uint8, torch.int64, torch.bool)),
    *(case("logsumexp", i(3, 4, 6).to(kind), [1], grad=False) for kind in (torch.int64, torch.bool)),
    case("logsumexp", torch.complex(f(4, 6), f(4, 6)), [1]),
    *(
        case(name, f(4, 6), f(4, 6), -1, torch.float64)
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
    ),
    case("argmin", f(4, 6), -1),
    case("min.dim", f(4, 6), 1),
    case("min", f(4, 6)),
    case("mode", i(3, 4, 6).double(), 1),
    case("nanmedian.dim", f(4, 6), 1),
    case("std_mean.correction", f(4, 6), [1]),
    case("cummin", f(4, 6), 0),
    case("_fft_c2c", torch.complex(f(4, 6), f(4, 6)), [1], 0, True),
    case("_fft_r2c", f(4, 6), [1], 0, True),
    case("_fft_c2r", torch.complex(f(4, 6), f(4, 6)), [1], 0, 10),
    *(case(name, f(4, 6, 2)) for name in ("fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_ifftn")),
    case("fft_irfft", torch.complex(f(4, 6), f(4, 6))),
]
LOSS = [
    *(case("multi_margin_loss", f(4, 6), i(6, 4), 1, 1.0, None, reduction) for reduction in (0, 1, 2)),
    *(case("multilabel_margin_loss_forward", f(4, 6), i(6, 4, 6), reduction) for reduction in (0, 1, 2)),
    case("l1_loss", f(4, 6), f(4, 6)),
    case("huber_loss", f(4, 6), f(4, 6)),
    case("binary_cross_entropy", positive(4, 6), positive(4, 6), grad=[0]),
    case("soft_margin_loss", f(4, 6), _flags(4, 6), grad=[0]),
    case("poisson_nll_loss", f(4, 6), positive(4, 6), True, False, 1e-8, 1, grad=[0]),
    case("hinge_embedding_loss", positive(4, 6), _flags(4, 6), grad=[0]),
    case("nll_loss", f(4, 6), i(6, 4)),
    case("nll_loss_nd", f(4, 6, 2), i(6, 4, 2), None, 2),
    case("nll_loss2d", f(4, 6, 2, 2), i(6, 4, 2, 2), None, 2),
    case("nll_loss2d_forward", f(4, 6, 2, 2), i(6, 4, 2, 2), None, 2, -100),
]
NORMALISATION = [
    case("_fused_rms_norm", f(4, 6, 8), [8], f(8), 1e-6),
    case("native_batch_norm", *_BATCH_NORM, True, 0.1, 1e-5, grad=(0, 1, 2)),
    case("_native_batch_norm_legit", *_BATCH_NORM, True, 0.1, 1e-5, grad=(0, 1, 2)),
    case("_native_batch_norm_legit.no_stats", f(4, 6, 2), f(6), f(6), True, 0.1, 1e-5),
]
PIECES = [
    case("split_copy.Tensor", f(4, 12), 4, -1),
    case("split_with_sizes_copy", f(12, 4), [8, 2, 2]),
    case("unsafe_split.Tensor", f(4, 12), 4, -1),
    case("unsafe_chunk", f(4, 8), 2, 1),
    case("unsafe_split_with_sizes", f(12, 4), [8, 2, 2]),
    case("concat", [f(4, 6), f(2, 6), f(8, 6)]),
    case("concatenate", [f(4, 6), f(4, 2)], 1),
    case("slice_copy.Tensor", f(4, 12), 1, 4, 8),
    case("narrow_copy", f(12, 4), 0, 2, 6),
    case("select_copy.int", f(4, 6, 2), 1, -1),
    case("unbind_copy.int", f(4, 6, 3), -1),
    *(case(f"reflection_pad{n}d", f(2, 4, *[4] * n), [1] * 2 * n) for n in (1, 2, 3)),
    *(case(f"replication_pad{n}d", f(2, 4, *[4] * n), [1] * 2 * n) for n in (1, 2, 3)),
    case("fliplr", f(4, 6, 2)),
    case("flipud", f(4, 6, 2)),
    case("rot90", f(4, 6, 2), 1, [0, 1]),
    case("diagonal_copy", f(4, 6, 6), 0, 1, 2),
    case("unfold_copy", f(4, 8, 2), 1, 4, 2),
]
RESHAPE = [
    case("_reshape_alias", f(4, 6), [24], [1]),
    case("ravel", f(4, 6)),
    case("squeeze_copy.dim", f(4, 1, 6), 1),
    case("unsqueeze_copy", f(4, 6), 1),
    case("view_copy", f(4, 6, 8), [24, 2, -1]),
    case("view_as", f(4, 6), f(24)),
    *(case(f"atleast_{n}d", f(4, 6)) for n in (1, 2, 3)),
    case("view_as_real_copy", torch.complex(f(4, 6), f(4, 6))),
    case("view_as_complex_copy", f(4, 6, 2), grad=False),
    case("permute_copy", f(2, 4, 6), [2, 0, -2]),
    case("transpose_copy.int", f(2, 4, 6), -1, 1),
    case("swapaxes", f(2, 4, 6), 0, 1),
    case("swapdims", f(2, 4, 6), 0, 1),
    case("t_copy", f(4, 6)),
    case("mH", torch.complex(f(4, 6), f(4, 6))),
    case("adjoint", f(2, 4, 6)),
    case("matrix_H", f(4, 6)),
    case("moveaxis.int", f(2, 4, 6), 0, -1),
    case("expand_copy", f(4, 1, 6), [2, 4, 8, -1]),
    case("broadcast_to", f(4, 1), [4, 6]),
]


def _matrices(*outer: int) -> torch.Tensor:
    """Symmetric ones, positive definite."""
    x = f(*outer, 3, 3)
    return x @ x.transpose(-1, -2) + 3 * torch.eye(3, dtype=x.dtype)


LINALG = [
    *(case(name, _matrices(4, 2)) for name in ("_linalg_det", "_linalg_slogdet", "cholesky", "linalg_cholesky_ex",
                                               "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_matrix_exp",
                                               "linalg_qr")),
    case("_linalg_eigh", _matrices(4), "L", True),
    case("_linalg_svd", _matrices(4)),
    case("_linalg_solve_ex", _matrices(4, 2), f(4, 2, 3, 5)),
    case("_linalg_solve_ex", _matrices(4), f(4, 3)),
    case("linalg_solve_triangular", _matrices(4), f(4, 3, 5), upper=True),
    case("cholesky_inverse", torch.linalg.cholesky(_matrices(4))),
    case("cholesky_solve", f(4, 3, 5), torch.linalg.cholesky(_matrices(4))),
    case("linalg_lu_solve", *torch.linalg.lu_factor(_matrices(4)), f(4, 3, 5)),
]  # fmt: skip
# Nothing to shard, or dims that only look as if there were: tensors of no dims or elements, no dims to reduce.
DEGENERATE = [
    case("mm", f(0, 4), f(4, 8)),
    case("mm", f(4, 0), f(0, 8)),
    case("cdist", f(0, 4), f(6, 4)),
    case("bilinear", f(0, 4), f(0, 6), f(2, 4, 6)),
    case("softmax.int", f(), 0),
    case("log_softmax.int", f(), -1),
    case("topk", f(), 1),
    case("all.dims", i(2, 4, 6).bool(), [], grad=False),
    case("cosine_similarity", f(), f(), 0),
    case("prelu", f(), f(1)),
    case("transpose.int", f(), 0, -1),
    case("repeat", f(4, 6), [2, 0, 1]),
    case("repeat_interleave.self_int", f(4, 6), 0, 1),
    case("tensor_split.indices", f(4, 8), [6, 2], 1),
    # a cast that rounds is linear in nothing
    case("sum.dim_IntList", f(4, 6) * 3, [1], dtype=torch.int64, grad=False),
    case("cumsum", f(4, 6) * 3, 1, dtype=torch.int64, grad=False),
]


MORE: dict[str, list[Any]] = {
    "degenerate": DEGENERATE,
    "linalg": LINALG,
    "pointwise": POINTWISE,
    "contraction": CONTRACTION,
    "attention": ATTENTION,
    "recurrent": RECURRENT,
    "convolution": CONVOLUTION,
    "creation": CREATION,
    "indexing": INDEXING,
    "reduction": REDUCTION,
    "loss": LOSS,
    "normalisation": NORMALISATION,
    "pieces": PIECES,
    "reshape": RESHAPE,
}
