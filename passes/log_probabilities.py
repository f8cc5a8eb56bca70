"""The logarithm of a token's probability as its cross entropy, where the others of its row are not read.

Requires: normal form. Provides: ``-cross_entropy(x, index)`` for ``gather(log_softmax(x), index)``, which is how models
that rank, distil or learn from rewards write it, and what ``nll_loss`` is of the same.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.normalize_losses import target_terms
from passes.normalize_shifts import KEEPS
from passes.rewrite import Builder, shape
from passes.rules.algebra import argument, as_dim
from passes.unused import drop_unused

aten = torch.ops.aten
_LOGS = (aten.log_softmax.int, aten._log_softmax.default)


def pick_before_softmax(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    changed = False
    for node in list(graph.nodes):
        if node.target is aten.gather.default:
            with graph.inserting_before(node):
                changed |= _rewrite(node, Builder(graph, node))
    if changed:
        drop_unused(graph)


def _rewrite(node: fx.Node, build: Builder) -> bool:
    logs, dim, index = node.args[:3]
    assert isinstance(logs, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node), node
    sizes = shape(logs)
    dim = as_dim(dim, len(sizes))
    if shape(index) != [1 if d == dim else size for d, size in enumerate(sizes)]:
        return False
    scores = _scores(build, logs, dim)
    if scores is None:
        return False
    terms = target_terms(build, scores, index, dim)
    for user in list(node.users):
        if user.target is aten.neg.default:
            user.replace_all_uses_with(terms)
            user.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(build(aten.neg.default, terms))
    return True


def _scores(build: Builder, logs: fx.Node, dim: int) -> fx.Node | None:
    """What ``logs``, which nothing else reads, are the logarithms of the softmax of, as it would lie in their place."""
    if len(logs.users) > 1:
        return None
    if logs.target in _LOGS:
        source = logs.args[0]
        assert isinstance(source, fx.Node), logs
        if as_dim(argument(logs, "dim"), len(shape(logs))) != dim:
            return None
        dtype = logs.meta["val"].dtype
        return source if source.meta["val"].dtype == dtype else build(aten.to.dtype, source, dtype)
    last = len(shape(logs)) - 1
    if dim != last or not isinstance(logs.args[0], fx.Node):
        return None
    inner = logs.args[0]
    if logs.target in KEEPS and shape(inner) and shape(inner)[-1] == shape(logs)[-1]:
        pass
    elif logs.target is not aten.slice.Tensor or as_dim(argument(logs, "dim"), last + 1) == last:
        return None
    scores = _scores(build, inner, len(shape(inner)) - 1)
    return None if scores is None else build(logs.target, scores, *logs.args[1:], **logs.kwargs)
