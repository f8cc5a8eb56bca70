"""Cross entropy without copies of the logits, which are the largest tensors of a language model.

``partition::cross_entropy(logits, index, dim)`` is ``logsumexp(logits) - logits[index]`` for each row. Rows are
processed in pieces, so that temporary tensors (exponentials, in float32 for 16-bit dtypes) stay small. Backward
recomputes them from the logits and each row's logsumexp. If the classes are sharded, each rank computes
``target_and_logsumexp`` of its own classes (two numbers per row), and the numbers of all ranks are combined (Shoeybi et
al. 2019, Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library
from partitioner.passes.ir.gradient_flow import accumulated_in

MOST_PIECES = 16

_PIECE = 1 << 24  # elements processed at a time; enough to make kernel launches negligible
_PIECE_CPU = 1 << 17  # per thread; a piece stays in its cache, which is 2 to 5 times as fast (measured)
NARROW = frozenset({torch.float16, torch.bfloat16})


def _yield_matching_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut ``logits`` ``[..., classes]`` and the tensors ``others`` ``[..., 1]`` or ``[..., classes]`` into pieces of
    rows, and yield for each piece a tuple of tensors with the same rows. Temporary tensors of the size of a piece need
    little memory. A piece of ``logits`` has about 2**24 elements, or a sixteenth of all if that is more; on CPU, it has
    2**17 for each thread. Logits with fewer elements than a piece are yielded whole."""
    sizes, numel = logits.shape[:-1], logits.numel()
    on_cpu = logits.device.type == "cpu"
    most = _PIECE_CPU * torch.get_num_threads() if on_cpu else max(_PIECE, -(-numel // MOST_PIECES))
    if numel <= most or not sizes:
        yield logits, *others
        return
    dim = max(range(len(sizes)), key=sizes.__getitem__)
    length = max(1, most * sizes[dim] // numel)
    yield from zip(*(x.split(length, dim) for x in (logits, *others)), strict=True)


def target_and_logsumexp(logits: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return two tensors for the rows of ``logits`` along ``dim``: the logit of each row's target and the logsumexp of
    each row, both with size 1 along ``dim``. Both have the dtype of ``logits``, or float32 if ``logits`` has a 16-bit
    dtype.

    ``index``: the target class of each row, with size 1 along ``dim``.
    """
    dtype = accumulated_in(logits.dtype)
    rows = logits.movedim(dim, -1)
    largest, of_largest = (rows.new_empty((*rows.shape[:-1], 1), dtype=dtype) for _ in range(2))
    for scores, most, of_most in _yield_matching_pieces(rows, largest, of_largest):
        most.copy_(scores.amax(-1, keepdim=True))
        of_most.copy_(torch.log_softmax(scores, -1, dtype=dtype).amax(-1, keepdim=True))
    # a row of -inf has the logsumexp -inf
    logsumexp = torch.where(largest.isinf(), largest, largest - of_largest)
    return logits.gather(dim, index).to(dtype), logsumexp.movedim(-1, dim).contiguous()


def decompose_target_and_logsumexp(logits: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return two tensors for the rows of ``logits`` along ``dim``: the logit of each row's target and the logsumexp of
    each row, both with size 1 along ``dim``. ``index``: the target class of each row, with size 1 along ``dim``.

    Equivalent to :func:`target_and_logsumexp`, but written with operators that a compiler fuses to one pass over
    ``logits``.
    """
    wide = logits.to(accumulated_in(logits.dtype))
    largest = wide.amax(dim, keepdim=True)
    shift = torch.where(largest.isinf(), 0.0, largest)
    logsumexp = (wide - shift).exp().sum(dim, keepdim=True).log() + shift
    return logits.gather(dim, index).to(wide.dtype), logsumexp


def decompose_backward(
    of_target: Tensor, of_logsumexp: Tensor, logits: Tensor, index: Tensor, logsumexp: Tensor, dim: int
) -> Tensor:
    """Return the gradient of ``logits`` through a cross entropy: the softmax times ``of_logsumexp``, plus ``of_target``
    at the index of the target. ``of_target``, ``of_logsumexp``: the gradients of each row's target logit and logsumexp
    along ``dim``. ``index``: the target class of each row. ``logsumexp``: each row's logsumexp, from forward.

    Equivalent to :func:`target_and_logsumexp_backward`, but written with operators that a compiler fuses to one pass
    over ``logits``.
    """
    sums = torch.where(logsumexp.isinf(), 0.0, logsumexp)
    shape = [1] * logits.dim()
    shape[dim] = logits.shape[dim]
    classes = torch.arange(logits.shape[dim], device=logits.device).view(shape)
    softmax = (logits.to(sums.dtype) - sums).exp() * of_logsumexp.to(sums.dtype)
    return (softmax + torch.where(classes == index, of_target.to(sums.dtype), 0.0)).to(logits.dtype)


def target_and_logsumexp_backward(
    of_target: Tensor, of_logsumexp: Tensor, logits: Tensor, index: Tensor, logsumexp: Tensor, dim: int
) -> Tensor:
    """Return the gradient of ``logits`` through :func:`target_and_logsumexp`: the softmax times ``of_logsumexp``, plus
    ``of_target`` at the index of the target.

    ``of_target``, ``of_logsumexp``: the gradients of each row's target logit and logsumexp along ``dim``. ``index``:
    the target class of each row. ``logsumexp``: each row's logsumexp, from forward. These four have size 1 along
    ``dim``.
    """
    found = torch.empty_like(logits)
    sums = logsumexp.masked_fill(logsumexp.isinf(), 0.0)  # exp(-inf - 0) is 0, exp(-inf + inf) nan
    given = (logits, found, index, sums, of_target.to(sums.dtype), of_logsumexp.to(sums.dtype))
    for scores, out, at, total, of_at, of_total in _yield_matching_pieces(*(x.movedim(dim, -1) for x in given)):
        exponents = torch.sub(scores, total).exp_()
        of_chosen = exponents.gather(-1, at).mul_(of_total).add_(of_at)
        torch.mul(exponents, of_total, out=out)
        out.scatter_(-1, at, of_chosen.to(out.dtype))
    return found


def cross_entropy(logits: Tensor, index: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the cross entropy of each row of ``logits`` along ``dim``, ``logsumexp(logits) - logits[index]``, with
    size 1 along ``dim``.

    ``index``: the target class of each row, with size 1 along ``dim``. ``dtype``: the dtype of the result; ``None``
    means that of ``logits``.
    """
    target, logsumexp = ops.target_and_logsumexp(logits, index, dim)
    terms: Tensor = logsumexp - target
    return terms.to(dtype or logits.dtype)


def _make_fake_results(logits: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    target, logsumexp = (logits.new_empty(index.shape, dtype=accumulated_in(logits.dtype)) for _ in range(2))
    return target, logsumexp


def _make_fake_gradient(of_target: Tensor, of_logsumexp: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


_library.define("target_and_logsumexp(Tensor logits, Tensor index, int dim) -> (Tensor, Tensor)")

_library.define(
    "target_and_logsumexp_backward(Tensor of_target, Tensor of_logsumexp, Tensor logits, Tensor index, "
    "Tensor logsumexp, int dim) -> Tensor"
)
_library.define("cross_entropy(Tensor logits, Tensor index, int dim, ScalarType? dtype=None) -> Tensor")
_library.impl("target_and_logsumexp", target_and_logsumexp, "CompositeExplicitAutograd")
_library.impl("target_and_logsumexp_backward", target_and_logsumexp_backward, "CompositeExplicitAutograd")
_library.impl("cross_entropy", cross_entropy, "CompositeImplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::target_and_logsumexp", _make_fake_results, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::target_and_logsumexp_backward", _make_fake_gradient, lib=_library)
ops = torch.ops.partition
CROSS_ENTROPY = ops.cross_entropy.default


def _save_logits_and_index(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    logits, index, ctx.dim = inputs
    ctx.save_for_backward(logits, index, output[1])


def _compute_logits_gradient(ctx: Any, of_target: Tensor, of_logsumexp: Tensor) -> tuple[Tensor, None, None]:
    gradient = ops.target_and_logsumexp_backward(of_target, of_logsumexp, *ctx.saved_tensors, ctx.dim)
    return gradient, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::target_and_logsumexp", _compute_logits_gradient, setup_context=_save_logits_and_index, lib=_library
)
