"""Rewrite losses as one term per target, a sum, and a division by a constant or by a count of targets.

The count depends on targets alone, so it can be computed over the whole global batch before anything else runs.

:func:`undo_target_shift` rewrites next-token losses. The last position has no target, so models drop it:
``cross_entropy(logits[:, :-1], tokens[:, 1:])``. The remaining length, one less than the sequence, cannot be divided
evenly among ranks, so the logits, the largest values of the model, would have to be gathered. The rewrite keeps the
last position, with an ignored target, which adds nothing to the sum, the count or a gradient.

:func:`fuse_gathered_log_softmax` rewrites ``gather(log_softmax(x), index)`` as ``-cross_entropy(x, index)`` if nothing
else reads the ``log_softmax``. Ranking, distillation and reward models compute the log-probability of a token in this
way; ``nll_loss`` of a ``log_softmax`` is rewritten, too. Requires: normal form.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from partitioner.passes.ir.rewrite import Builder, Rule, drop_unused, get_node_tensor, list_node_sizes
from partitioner.passes.normalize.shapes import to_dtype
from partitioner.passes.ops.cross_entropy import CROSS_ENTROPY, NARROW
from partitioner.passes.rules.factors import get_node_argument, normalize_dim

aten = torch.ops.aten

CASTS = (aten._to_copy.default, aten.to.dtype)

KEEPS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.clone.default)
_DEFAULTS: tuple[Any, ...] = (None, 0, None, None, 1)  # default arguments of a slice
SWAPS = (aten.transpose.int, aten.permute.default)
_PASSED: tuple[object, ...] = (*CASTS, *KEEPS, *SWAPS)


def undo_target_shift(build: Builder, logits: fx.Node, target: fx.Node, ignore_index: int) -> tuple[fx.Node, fx.Node]:
    """Rewrite the operands of a next-token loss so that the sequence keeps its full length, which can be sharded
    evenly. Models often drop the last position, which has no target, by a slice of the logits. Return two nodes: the
    logits without this slice, and the targets with ``ignore_index`` at the dropped positions. The loss is the same.

    ``build``: appends operators to the graph. ``logits``: ``[b * (s - n), classes]`` or ``[b, classes, s - n]``, made
    by a slice of ``[b, s, classes]`` along ``s`` that removes ``n`` positions. ``target``: the class for each of the
    ``s - n`` positions. ``ignore_index``: the class that the loss ignores. If the logits were not made in this way,
    return ``logits`` and ``target`` unchanged.
    """
    casts: list[fx.Node] = []
    swaps = 0
    node = logits
    while node.target in _PASSED:
        casts += [node] if node.target in CASTS else []
        swaps += node.target in SWAPS
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    if node.target != aten.slice.Tensor or len(list_node_sizes(node)) != 3 or swaps > 1:
        return logits, target
    given: list[Any] = [*node.args, *_DEFAULTS[len(node.args) :]]
    whole, dim, start, _, step = given
    assert isinstance(whole, fx.Node)
    batch, length, classes = list_node_sizes(whole)
    kept = list_node_sizes(node)[1]
    first = start or 0
    if dim != 1 or step != 1 or not isinstance(first, int):
        return logits, target
    first = first + length if first < 0 else first
    form = [batch, classes, kept] if swaps else [batch * kept, classes]
    if list_node_sizes(logits) != form or list_node_sizes(target) != ([batch, kept] if swaps else [batch * kept]):
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


NONE, MEAN, SUM = 0, 1, 2  # torch's reductions

_MOVES = (*KEEPS, *SWAPS, aten.slice.Tensor)


def _apply_reduction(build: Builder, terms: fx.Node, reduction: int) -> fx.Node:
    """Append the reduction of a loss to the graph and return the node of the result. ``build``: appends operators to
    the graph. ``terms``: the node of the loss of each element. ``reduction``: 0 for none (``terms`` is returned), 1 for
    the mean, 2 for the sum."""
    if reduction == NONE:
        return terms
    result = build(aten.sum.default, terms)
    return build(aten.mul.Tensor, result, 1 / math.prod(list_node_sizes(terms))) if reduction == MEAN else result


def rewrite_cross_entropy(
    build: Builder,
    logits: fx.Node,
    target: fx.Node,
    weight: fx.Node | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> fx.Node:
    """Rewrite ``aten.cross_entropy_loss`` as ``logsumexp(logits) - logits[target]`` for each target that is not
    ignored, and a reduction. Return the node of the loss.

    ``build``: appends operators to the graph. ``logits``: ``[N, C, ...]`` or ``[C]`` with ``C`` classes. ``target``:
    class indices, or class probabilities of the shape of ``logits``. ``weight``: ``[C]``, one weight per class, or
    ``None``. ``reduction``: 0 none, 1 mean (weighted by the class weights of the targets), 2 sum. ``ignore_index``: the
    class of targets that do not count. ``label_smoothing``: the probability that is divided evenly among all classes.
    """
    dim = min(1, len(list_node_sizes(logits)) - 1)
    if get_node_tensor(target).dtype.is_floating_point:
        return _append_probability_cross_entropy(build, logits, target, weight, reduction, label_smoothing, dim)
    if reduction != NONE:
        logits, target = undo_target_shift(build, logits, target, ignore_index)
    counts, index = _mask_ignored_targets(build, target, ignore_index, dim)
    weights = normalizer = None
    if label_smoothing:
        normalizer = build(aten.logsumexp.default, logits, [dim], True)
        terms = build(aten.sub.Tensor, normalizer, build(aten.gather.default, logits, dim, index))
    else:
        terms = append_target_cross_entropy(build, logits, index, dim)
    if weight is not None:
        weights = build(aten.index.Tensor, weight, [index])
        terms = build(aten.mul.Tensor, terms, weights)
    if normalizer is not None:
        smooth = _append_smoothing_terms(build, logits, normalizer, weight, dim)
        size = list_node_sizes(logits)[dim]
        terms = build(
            aten.add.Tensor,
            build(aten.mul.Tensor, terms, 1 - label_smoothing),
            build(aten.mul.Tensor, smooth, label_smoothing / size),
        )
    return _reduce_counted(build, terms, counts, weights, reduction, dim)


def append_target_cross_entropy(build: Builder, logits: fx.Node, index: fx.Node, dim: int) -> fx.Node:
    """Append the cross entropy of each row of ``logits`` with its target class to the graph, and return its node. The
    result has the shape of ``logits`` with size 1 along ``dim``, the dim of classes.

    If the logits were cast from a 16-bit type to float32, the new operator reads the 16-bit tensor and returns float32,
    so that the float32 logits are not stored. ``build``: appends operators to the graph. ``index``: the node of the
    class of each row, with size 1 along ``dim``.
    """
    narrow = _skip_earlier_cast(build, logits)
    if narrow is None:
        return build(CROSS_ENTROPY, logits, index, dim)
    return build(CROSS_ENTROPY, narrow, index, dim, get_node_tensor(logits).dtype)


def _skip_earlier_cast(build: Builder, node: fx.Node) -> fx.Node | None:
    """If ``node`` was computed by a cast from a 16-bit type to float32, followed only by reshapes, transposes, copies
    and slices, append these to the graph again without the cast and return the node of the 16-bit result. Otherwise
    return ``None``.

    ``build``: appends operators to the graph.
    """
    if node.target in CASTS and get_node_tensor(node).dtype == torch.float32:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and get_node_tensor(source).dtype in NARROW else None
    if node.target not in _MOVES or not isinstance(node.args[0], fx.Node):
        return None
    source = _skip_earlier_cast(build, node.args[0])
    return None if source is None else build(node.target, source, *node.args[1:], **node.kwargs)


def rewrite_nll_loss(
    build: Builder,
    logs: fx.Node,
    target: fx.Node,
    weight: fx.Node | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> fx.Node:
    """Rewrite ``nll_loss`` as ``-logs[target]`` times the class weight for each target that is not ignored, and a
    reduction. Return the node of the loss.

    ``build``: appends operators to the graph. ``logs``: log-probabilities ``[N, C, ...]`` or ``[C]`` of ``C`` classes.
    ``target``: class indices. ``weight``: ``[C]``, one weight per class, or ``None``. ``reduction``: 0 none, 1 mean
    (weighted by the class weights of the targets), 2 sum. ``ignore_index``: the class of targets that do not count.
    """
    dim = min(1, len(list_node_sizes(logs)) - 1)
    counts, index = _mask_ignored_targets(build, target, ignore_index, dim)
    terms = build(aten.neg.default, build(aten.gather.default, logs, dim, index))
    weights = None
    if weight is not None:
        weights = build(aten.index.Tensor, weight, [index])
        terms = build(aten.mul.Tensor, terms, weights)
    return _reduce_counted(build, terms, counts, weights, reduction, dim)


def _mask_ignored_targets(build: Builder, target: fx.Node, ignore_index: int, dim: int) -> tuple[fx.Node, fx.Node]:
    """Append operators to the graph and return two nodes: a mask that is true for targets that are not ignored; and the
    targets, with 0 in place of ignored ones. Both get a new dim of size 1 at index ``dim``, the dim of classes.
    ``build``: appends operators to the graph. ``target``: the class index of each sample. ``ignore_index``: the class
    of ignored targets."""
    target = build(aten.unsqueeze.default, target, dim)
    counts = build(aten.ne.Scalar, target, ignore_index)
    return counts, build(aten.where.ScalarOther, counts, target, 0)


def _reduce_counted(
    build: Builder, terms: fx.Node, counts: fx.Node, weights: fx.Node | None, reduction: int, dim: int
) -> fx.Node:
    """Append the reduction of a loss to the graph, in which ignored targets count as zero, and return the node of the
    result.

    ``build``: appends operators to the graph. ``terms``: the loss of each target. ``counts``: the mask of targets that
    are not ignored. ``weights``: the class weight of each target; ``None`` means 1. ``reduction``: 0 none, 1 mean
    (weighted by ``weights``), 2 sum. ``dim``: the dim of classes, of size 1, which is removed if there is no reduction.
    """
    terms = build(aten.where.ScalarOther, counts, terms, 0.0)
    if reduction == NONE:
        return build(aten.squeeze.dim, terms, dim)
    result = build(aten.sum.default, terms)
    if reduction == SUM:
        return result
    if weights is not None:
        counts = build(aten.where.ScalarOther, counts, weights, 0.0)
    number = to_dtype(build, build(aten.sum.default, counts), get_node_tensor(result).dtype)
    return build(aten.div.Tensor, result, number)


def _append_smoothing_terms(
    build: Builder, logits: fx.Node, normalizer: fx.Node, weight: fx.Node | None, dim: int
) -> fx.Node:
    """Append the label-smoothing term of each row of ``logits`` to the graph: the sum over classes of
    ``-log_softmax(logits)`` times the class weight. Return its node, with size 1 along ``dim``, the dim of classes.
    ``build``: appends operators to the graph. ``normalizer``: the node of ``logsumexp(logits)`` along ``dim``.
    ``weight``: one weight per class; ``None`` means 1."""
    if weight is None:
        whole = build(aten.mul.Tensor, normalizer, list_node_sizes(logits)[dim])
        return build(aten.sub.Tensor, whole, build(aten.sum.dim_IntList, logits, [dim], True))
    logs = build(aten.sub.Tensor, normalizer, logits)
    return build(
        aten.sum.dim_IntList,
        build(aten.mul.Tensor, logs, _reshape_class_weight(build, weight, logits, dim)),
        [dim],
        True,
    )


def _reshape_class_weight(build: Builder, weight: fx.Node, logits: fx.Node, dim: int) -> fx.Node:
    sizes = [s if d == dim else 1 for d, s in enumerate(list_node_sizes(logits))]
    return build(aten.reshape.default, weight, sizes)


def _append_probability_cross_entropy(
    build: Builder, logits: fx.Node, target: fx.Node, weight: fx.Node | None, reduction: int, smoothing: float, dim: int
) -> fx.Node:
    """Append the cross entropy of ``logits`` with targets that are class probabilities to the graph; return its node.

    ``build``: appends operators to the graph. ``target``: the probabilities, of the shape of ``logits``. ``weight``:
    one weight per class; ``None`` means 1. ``reduction``: 0 none, 1 mean, 2 sum. ``smoothing``: the probability that is
    divided evenly among all classes. ``dim``: the dim of classes.
    """
    size = list_node_sizes(logits)[dim]
    if smoothing:
        target = build(aten.add.Tensor, build(aten.mul.Tensor, target, 1 - smoothing), smoothing / size)
    logs = build(aten.log_softmax.int, logits, dim)
    if weight is not None:
        logs = build(aten.mul.Tensor, logs, _reshape_class_weight(build, weight, logits, dim))
    terms = build(aten.neg.default, build(aten.sum.dim_IntList, build(aten.mul.Tensor, logs, target), [dim]))
    return _apply_reduction(build, terms, reduction)


def rewrite_mse_loss(build: Builder, x: fx.Node, y: fx.Node, reduction: int = MEAN) -> fx.Node:
    distance = build(aten.sub.Tensor, x, y)
    return _apply_reduction(build, build(aten.mul.Tensor, distance, distance), reduction)


def rewrite_l1_loss(build: Builder, x: fx.Node, y: fx.Node, reduction: int = MEAN) -> fx.Node:
    return _apply_reduction(build, build(aten.abs.default, build(aten.sub.Tensor, x, y)), reduction)


def rewrite_multilabel_margin(build: Builder, x: fx.Node, target: fx.Node, reduction: int = MEAN) -> fx.Node:
    terms = build(aten.multilabel_margin_loss_forward.default, x, target, NONE)
    return _apply_reduction(build, build(operator.getitem, terms, 0), reduction)


def make_loss_rule(target: Any, position: int) -> Rule:
    """Return the function that rewrites the loss operator ``target`` as the loss of each element and a separate sum or
    mean.

    ``position``: the index of the argument ``reduction`` of the operator, from 0.
    """

    def rule(build: Builder, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a loss operator without reduction and then its sum or mean to the graph, and return the node of the
        result. ``build``: appends operators to the graph. ``args``, ``kwargs``: the arguments of the loss operator,
        ``reduction`` (0 none, 1 mean, 2 sum) among them."""
        given = list(args)
        reduction = kwargs.pop("reduction", MEAN)
        if len(given) > position:
            reduction, given[position] = given[position], NONE
        else:
            kwargs["reduction"] = NONE
        return _apply_reduction(build, build(target, *given, **kwargs), reduction)

    return rule


# Losses with one term per element or sample -> the position of the argument ``reduction``.
REDUCTION_AT = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.multilabel_margin_loss_forward.default: 2,
    aten.hinge_embedding_loss.default: 3,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.poisson_nll_loss.default: 5,
    aten.multi_margin_loss.default: 5,
}

# Operators with two results, which have no rule here.
_OF_TWO = {aten.multilabel_margin_loss_forward.default}

LOSSES: dict[Any, Rule] = {
    aten.cross_entropy_loss.default: rewrite_cross_entropy,
    aten.nll_loss.default: rewrite_nll_loss,
    aten.nll_loss_nd.default: rewrite_nll_loss,
    aten.nll_loss2d.default: rewrite_nll_loss,
    **{t: make_loss_rule(t, at) for t, at in REDUCTION_AT.items() if t not in _OF_TWO},
    aten.mse_loss.default: rewrite_mse_loss,
    aten.l1_loss.default: rewrite_l1_loss,
    aten.multilabel_margin_loss.default: rewrite_multilabel_margin,
}

_LOGS = (aten.log_softmax.int, aten._log_softmax.default)


def fuse_gathered_log_softmax(graph: fx.Graph) -> None:
    """Replace ``gather(log_softmax(x), index)`` in ``graph`` by the negative of the cross entropy of ``x`` with the
    target classes ``index``, in place. The result of ``log_softmax``, which is as large as ``x``, is then not stored.

    A ``gather`` is replaced only if nothing else reads the ``log_softmax`` and it takes one element of each row.
    """
    changed = False
    for node in list(graph.nodes):
        if node.target is aten.gather.default:
            with graph.inserting_before(node):
                changed |= _rewrite_gathered_logs(node, Builder(graph, node))
    if changed:
        drop_unused(graph)


def _rewrite_gathered_logs(node: fx.Node, build: Builder) -> bool:
    """Replace ``node``, a ``gather``, by the negative of a cross entropy, in place, if it reads one element of each row
    of a ``log_softmax`` that nothing else reads. Return whether it was replaced.

    ``build``: appends operators to the graph.
    """
    logs, dim, index = node.args[:3]
    assert isinstance(logs, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node), node
    sizes = list_node_sizes(logs)
    dim = normalize_dim(dim, len(sizes))
    if list_node_sizes(index) != [1 if d == dim else size for d, size in enumerate(sizes)]:
        return False
    scores = _find_softmax_scores(build, logs, dim)
    if scores is None:
        return False
    terms = append_target_cross_entropy(build, scores, index, dim)
    for user in list(node.users):
        if user.target is aten.neg.default:
            user.replace_all_uses_with(terms)
            user.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(build(aten.neg.default, terms))
    return True


def _find_softmax_scores(build: Builder, logs: fx.Node, dim: int) -> fx.Node | None:
    """If ``logs`` is a ``log_softmax`` along ``dim``, return a node with its operand, the scores, in the shape and
    dtype of ``logs``. Reshapes and slices between the ``log_softmax`` and ``logs`` that leave ``dim`` whole are applied
    to the scores. Return ``None`` if ``logs`` was not computed in this way, or if more than one operator reads it.

    ``build``: appends operators to the graph.
    """
    if len(logs.users) > 1:
        return None
    if logs.target in _LOGS:
        source = logs.args[0]
        assert isinstance(source, fx.Node), logs
        if normalize_dim(get_node_argument(logs, "dim"), len(list_node_sizes(logs))) != dim:
            return None
        dtype = logs.meta["val"].dtype
        return source if source.meta["val"].dtype == dtype else build(aten.to.dtype, source, dtype)
    last = len(list_node_sizes(logs)) - 1
    if dim != last or not isinstance(logs.args[0], fx.Node):
        return None
    inner = logs.args[0]
    if logs.target in KEEPS and list_node_sizes(inner) and list_node_sizes(inner)[-1] == list_node_sizes(logs)[-1]:
        pass
    elif logs.target is not aten.slice.Tensor or normalize_dim(get_node_argument(logs, "dim"), last + 1) == last:
        return None
    scores = _find_softmax_scores(build, inner, len(list_node_sizes(inner)) - 1)
    return None if scores is None else build(logs.target, scores, *logs.args[1:], **logs.kwargs)
