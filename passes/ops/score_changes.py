"""Attention whose scores are changed before the softmax, for one block of queries and keys: soft-capping and ALiBi.

The score of query ``i`` and key ``j`` is ``s = scale * q_i . k_j``. With a cap it becomes ``cap * tanh(s / cap)``, as
in Gemma 2 (Gemma Team 2024). With slopes, ``slope * (place_j - place_i)`` is added, where a place is a position in the
whole sequence and each head has its own slope (ALiBi, Press et al. 2022). A softmax does not change if a number that is
the same for all keys is added, so that ``slope * place_j`` alone gives the same result.

No fused kernel of torch computes this. The functions here hold the scores of one block at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # most queries and most keys of a block


@dataclass(frozen=True, eq=False)
class ScoreChange:
    """How the scores of an attention are changed before the softmax.

    ``cap``: a score ``s`` becomes ``cap * tanh(s / cap)``; ``None`` for no cap. ``slopes`` ``[heads]``: for each head
    of the queries, the number that is added to a score for each position by which the key is after the query (and
    subtracted for each position before it); ``None`` for none. The slopes are added after the cap.
    """

    cap: float | None = None
    slopes: Tensor | None = None

    @property
    def is_none(self) -> bool:
        """Return whether the scores stay unchanged."""
        return self.cap is None and self.slopes is None


UNCHANGED = ScoreChange()


class BlockScoring(NamedTuple):
    """How the attention scores of one block of queries and keys are computed.

    ``hidden`` ``[queries, keys]``: true where a query does not see a key; ``None`` if all keys are visible. ``offset``:
    the position of the first query minus that of the first key. ``factor``: the factor of the scores. ``change``: how
    the scaled scores are changed before the softmax, such as by a cap.
    """

    hidden: Tensor | None
    offset: int
    factor: float
    change: ScoreChange


def attend_block(q: Tensor, k: Tensor, v: Tensor, scoring: BlockScoring, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors of type ``wide``: the attention of queries over the keys of one block, and the logsumexp of
    the scores of each query. For a query that sees no key of the block they are 0 and minus infinity.

    ``q`` ``[..., heads, queries, d]``; ``k`` and ``v`` ``[..., kv heads, keys, d]``; several query heads may share a
    head of the keys. ``scoring``: how scores are computed.
    """
    scores, _ = _compute_scores(q, k, scoring, wide)
    lse = scores.logsumexp(-1)
    finite = lse if scoring.hidden is None else lse.masked_fill(lse == -math.inf, 0.0)
    weights = scores.sub_(finite.unsqueeze(-1)).exp_()
    return _multiply_by_key_heads(weights, v.to(wide)), lse


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, results: tuple[Tensor, Tensor], scoring: BlockScoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values through one block, in the shapes of ``q``, ``k`` and ``v`` and
    the type of the logsumexp.

    ``grad`` ``[..., heads, queries, d]``: the gradient of the attention's result. ``q``, ``k``, ``v``: the block's
    queries, keys and values. ``results``: the result and the logsumexp ``[..., heads, queries]`` of the scores, over
    the keys of all blocks. ``scoring``: how scores are computed.
    """
    out, lse = results
    wide = lse.dtype
    scores, bent = _compute_scores(q, k, scoring, wide)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    grad, q, k, v = (x.to(wide) for x in (grad, q, k, v))
    inner = (grad * out).sum(-1, keepdim=True)
    of_v = _sum_over_queries(weights, grad, v)
    of_scores = weights.mul_(_multiply_by_key_heads(grad, v.transpose(-2, -1)) - inner)
    if bent is not None:  # the derivative of cap * tanh(s / cap) is 1 - tanh(s / cap) ** 2
        of_scores -= of_scores * bent.square_()
    of_scores *= scoring.factor
    return _multiply_by_key_heads(of_scores, k), _sum_over_queries(of_scores, q, k), of_v


def _compute_scores(q: Tensor, k: Tensor, scoring: BlockScoring, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return two tensors of type ``wide``, ``[..., heads, queries, keys]``: the scores after all changes, minus
    infinity where a key is hidden; and ``tanh(s / cap)`` of the scores ``s``, or ``None`` without a cap.

    ``q`` ``[..., heads, queries, d]``, ``k`` ``[..., kv heads, keys, d]``. ``scoring``: how scores are computed.
    """
    hidden, offset, factor, change = scoring
    scores = _multiply_by_key_heads(q, k.transpose(-2, -1)).to(wide).mul_(factor)
    bent = None
    if change.cap is not None:
        bent = scores.div_(change.cap).tanh_()
        scores = bent * change.cap
    if change.slopes is not None:
        places = [torch.arange(x.shape[-2], device=q.device, dtype=wide) for x in (q, k)]
        distance = places[1] - places[0].unsqueeze(1) - offset
        scores += change.slopes.to(wide).view(-1, 1, 1) * distance
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return scores, bent


def _multiply_by_key_heads(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix product ``[..., heads, m, p]`` of ``x`` ``[..., heads, m, n]`` and ``y`` ``[..., kv heads, n,
    p]``, where each head of ``y`` serves as many consecutive heads of ``x`` as there are heads per kv head."""
    heads, groups = x.shape[-3], y.shape[-3]
    if heads == groups:
        return x @ y
    rows = x.unflatten(-3, (groups, heads // groups)).flatten(-3, -2)
    product: Tensor = (rows @ y).unflatten(-2, (heads // groups, x.shape[-2])).flatten(-4, -3)
    return product


def _sum_over_queries(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Return the matrix products of the transpose of ``x`` ``[..., heads, m, n]`` with ``y`` ``[..., heads, m, p]``,
    summed over the heads that share a head of ``like`` ``[..., kv heads, n, p]``, in the shape of ``like``."""
    heads, groups = x.shape[-3], like.shape[-3]
    if heads != groups:
        x, y = (a.unflatten(-3, (groups, heads // groups)).flatten(-3, -2) for a in (x, y))
    return x.transpose(-2, -1) @ y
