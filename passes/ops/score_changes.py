"""Attention whose scores are changed before the softmax, for one block of queries and keys: soft-capping and ALiBi.

The score of query ``i`` and key ``j`` is ``s = scale * q_i . k_j``. With a cap it becomes ``cap * tanh(s / cap)``, as
in Gemma 2 (Gemma Team 2024). With slopes, ``slope * (place_j - place_i)`` is added, where a place is a position in the
whole sequence and each head has its own slope (ALiBi, Press et al. 2022). Adding ``slope * place_j`` alone gives the
same result, because a softmax does not change if the same number is added for all keys.

No fused kernel of torch computes such scores. The functions here hold the scores of one block at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ON_CPU = 256  # most queries (and most keys) of a block on a CPU, so that its caches hold the scores
_ELSEWHERE = 1024  # most queries (and most keys) on other devices, where each block costs kernel launches
_MOST_SCORES = 1 << 24  # most scores of a block, counted over all heads and samples


@dataclass(frozen=True, eq=False)
class ScoreChange:
    """How the scores of an attention are changed before the softmax.

    ``cap``: a score ``s`` becomes ``cap * tanh(s / cap)``; ``None`` for no cap. ``slopes`` ``[heads]``: one slope per
    query head; ``slope * (key position - query position)`` is added to a score; ``None`` for no slopes. The slopes are
    added after the cap. ``trained``: whether the slopes need a gradient.
    """

    cap: float | None = None
    slopes: Tensor | None = None
    trained: bool = False

    @property
    def is_none(self) -> bool:
        """Return whether the attention scores stay unchanged, because there is neither a cap nor slopes."""
        return self.cap is None and self.slopes is None


UNCHANGED = ScoreChange()


class BlockScoring(NamedTuple):
    """How the attention scores of one block of queries and keys are computed.

    ``hidden`` ``[queries, keys]``: true where the query does not see the key; ``None`` if all keys are visible.
    ``offset``: the position of the first query minus that of the first key. ``factor``: multiplies the scores.
    ``change``: how the scaled scores are changed before the softmax, for example by a cap.
    """

    hidden: Tensor | None
    offset: int
    factor: float
    change: ScoreChange


def choose_block_size(heads: int, on_cpu: bool) -> int:
    """Return the largest number of queries, and of keys, of a block of attention scores. ``heads``: the number of heads
    of all samples, whose scores exist at the same time. ``on_cpu``: whether the scores are computed on a CPU."""
    size = _ON_CPU if on_cpu else _ELSEWHERE
    while size > _ON_CPU and heads * size**2 > _MOST_SCORES:
        size //= 2
    return size


def estimate_num_blocks(scores: float, heads: int) -> int:
    """Return the approximate number of blocks of attention scores that a device other than a CPU computes one after
    another. ``scores``: number of scores of a head. ``heads``: number of heads of all samples.

    Unlike in :func:`choose_block_size`, the sides of a block are not rounded down to a power of two. The number of
    blocks then grows at most in proportion to the number of heads, on which the planner's lower bounds rely.
    """
    at_once = min(max(_MOST_SCORES / max(1, heads), _ON_CPU**2), _ELSEWHERE**2)
    return max(1, math.ceil(scores / at_once))


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, scoring: BlockScoring, wide_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return two tensors of dtype ``wide_dtype``: the attention of queries over the keys of one block, and the
    logsumexp of the scores of each query. For a query that sees no key of the block, they are 0 and minus infinity.

    ``q`` ``[..., heads, queries, d]``; ``k`` and ``v`` ``[..., kv heads, keys, d]``; several query heads may share a
    head of the keys. ``scoring``: how scores are computed.
    """
    scores, _ = _compute_scores(q, k, scoring, wide_dtype)
    largest = scores.amax(-1, keepdim=True)
    if scoring.hidden is not None:
        largest.masked_fill_(largest == -math.inf, 0.0)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log()).squeeze(-1)
    out = _multiply_by_key_heads(weights.to(v.dtype), v).to(wide_dtype)
    return out.div_(total.masked_fill_(total == 0.0, 1.0)), lse


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, results: tuple[Tensor, Tensor], scoring: BlockScoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return four gradients through one block of queries and keys: those of the queries, keys and values, in the shapes
    of ``q``, ``k`` and ``v``, and that of the slopes, ``[heads]``. The fourth is ``None`` if slopes are not trained.
    All have the dtype of the logsumexp.

    ``grad`` ``[..., heads, queries, d]``: the gradient of the attention's result. ``q``, ``k``, ``v``: the block's
    queries, keys and values. ``results``: the attention's result and the logsumexp ``[..., heads, queries]`` of the
    scores, over the keys of all blocks. ``scoring``: how scores are computed.
    """
    out, lse = results
    wide_dtype = lse.dtype
    scores, bent = _compute_scores(q, k, scoring, wide_dtype)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    inner = (grad.to(wide_dtype) * out).sum(-1, keepdim=True)
    grad = grad.to(q.dtype)
    grad_v = _sum_over_queries(weights.to(q.dtype), grad, v).to(wide_dtype)
    of_scores = weights.mul_(_multiply_by_key_heads(grad, v.transpose(-2, -1)).to(wide_dtype).sub_(inner))
    grad_slopes = None
    if scoring.change.trained:
        grad_slopes = (of_scores * _list_distances(q, k, scoring.offset, wide_dtype)).sum((-2, -1))
        grad_slopes = grad_slopes.reshape(-1, grad_slopes.shape[-1]).sum(0)
    if bent is not None:
        of_scores = torch.ops.aten.tanh_backward.default(of_scores, bent)
    of_scores = of_scores.to(q.dtype)
    grad_q, grad_k = _multiply_by_key_heads(of_scores, k), _sum_over_queries(of_scores, q, k)
    return grad_q.to(wide_dtype).mul_(scoring.factor), grad_k.to(wide_dtype).mul_(scoring.factor), grad_v, grad_slopes


def _compute_scores(
    q: Tensor, k: Tensor, scoring: BlockScoring, wide_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return two tensors of dtype ``wide_dtype``, ``[..., heads, queries, keys]``: the scores after all changes, with
    minus infinity where a key is hidden; and ``tanh(s / cap)`` of the scaled scores ``s``, or ``None`` if there is no
    cap.

    ``q`` ``[..., heads, queries, d]``, ``k`` ``[..., kv heads, keys, d]``. ``scoring``: how scores are computed.
    """
    hidden, offset, factor, change = scoring
    # the queries are scaled, because they are fewer numbers than the scores
    scaled = q * (factor if change.cap is None else factor / change.cap)
    scores = _multiply_by_key_heads(scaled, k.transpose(-2, -1)).to(wide_dtype)
    bent = None
    if change.cap is not None:
        bent = scores.tanh_()
        scores = bent * change.cap
    if change.slopes is not None:
        scores += change.slopes.to(wide_dtype).view(-1, 1, 1) * _list_distances(q, k, offset, wide_dtype)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return scores, bent


def _list_distances(q: Tensor, k: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return ``[queries, keys]`` in ``dtype``: the position of each key minus that of each query. ``q``, ``k``: the
    queries ``[..., queries, d]`` and keys ``[..., keys, d]`` of a block. ``offset``: the position of the first query
    minus that of the first key."""
    places = [torch.arange(x.shape[-2], device=q.device, dtype=dtype) for x in (q, k)]
    return places[1] - places[0].unsqueeze(1) - offset


def _multiply_by_key_heads(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix product ``[..., heads, m, p]`` of ``x`` ``[..., heads, m, n]`` and ``y`` ``[..., kv heads, n,
    p]``. ``heads`` is a multiple of ``kv heads``: each head of ``y`` is multiplied with ``heads / kv heads``
    consecutive heads of ``x``."""
    heads, groups = x.shape[-3], y.shape[-3]
    if heads == groups:
        return x @ y
    rows = x.unflatten(-3, (groups, heads // groups)).flatten(-3, -2)
    product: Tensor = (rows @ y).unflatten(-2, (heads // groups, x.shape[-2])).flatten(-4, -3)
    return product


def _sum_over_queries(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Return ``x.mT @ y`` summed over the query heads that share a key head: a gradient of the keys or values ``like``
    ``[..., kv heads, n, p]``, in their shape. ``x``: ``[..., heads, m, n]``. ``y``: ``[..., heads, m, p]``."""
    heads, groups = x.shape[-3], like.shape[-3]
    if heads != groups:
        x, y = (a.unflatten(-3, (groups, heads // groups)).flatten(-3, -2) for a in (x, y))
    return x.transpose(-2, -1) @ y
