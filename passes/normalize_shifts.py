"""Losses of next tokens: the last position has no target, so models drop it. Here it stays, with one that is ignored.

``cross_entropy(logits[:, :-1], tokens[:, 1:])`` is of one position less than the sequence has, which no number of ranks
divides: the logits, of all values the largest, would be brought together. A position whose target is ignored adds
nothing to the sum, to the count or to a gradient.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.rewrite import Builder, aten, shape

CASTS = (aten._to_copy.default, aten.to.dtype)
KEEPS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.clone.default)
_DEFAULTS: tuple[Any, ...] = (None, 0, None, None, 1)  # of a slice
SWAPS = (aten.transpose.int, aten.permute.default)
_PASSED: tuple[object, ...] = (*CASTS, *KEEPS, *SWAPS)


def unshifted(build: Builder, logits: fx.Node, target: fx.Node, ignore_index: int) -> tuple[fx.Node, fx.Node]:
    """Logits of all positions, and targets that are ignored where there was none; as they are in any other form.

    Logits ``[b * (s - n), classes]`` or ``[b, classes, s - n]`` of a slice of ``[b, s, classes]`` along its positions.
    """
    casts: list[fx.Node] = []
    swaps = 0
    node = logits
    while node.target in _PASSED:
        casts += [node] if node.target in CASTS else []
        swaps += node.target in SWAPS
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    if node.target != aten.slice.Tensor or len(shape(node)) != 3 or swaps > 1:
        return logits, target
    given: list[Any] = [*node.args, *_DEFAULTS[len(node.args) :]]
    whole, dim, start, _, step = given
    assert isinstance(whole, fx.Node)
    batch, length, classes = shape(whole)
    kept = shape(node)[1]
    first = start or 0
    if dim != 1 or step != 1 or not isinstance(first, int):
        return logits, target
    first = first + length if first < 0 else first
    form = [batch, classes, kept] if swaps else [batch * kept, classes]
    if shape(logits) != form or shape(target) != ([batch, kept] if swaps else [batch * kept]):
        return logits, target
    for cast in reversed(casts):
        whole = build(cast.target, whole, *cast.args[1:], **cast.kwargs)
    target = build(aten.reshape.default, target, [batch, kept])
    target = build(aten.constant_pad_nd.default, target, [first, length - first - kept], ignore_index)
    if swaps:
        return build(aten.transpose.int, whole, 1, 2), target
    return build(aten.reshape.default, whole, [batch * length, classes]), build(
        aten.reshape.default, target, [batch * length]
    )


__all__ = ["CASTS", "KEEPS", "SWAPS", "unshifted"]
