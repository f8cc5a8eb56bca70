"""Loops over the experts that some row has chosen, traced as loops over all of them.

``for i in mask.sum((1, 2)).nonzero():`` has as many turns as experts have rows, which no trace can know. Inside
:func:`hits_traced` it has one for each expert. A turn of an expert without rows then does what the model would not do.
That this comes to nothing is shown afterwards (``passes/likewise.py``), from traces without the even turns and without
the odd ones: for that the masks that decide are marked by ``partition::hits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from passes.choices import dims_over
from passes.collectives import _library
from passes.errors import UnsupportedError
from passes.infer import META, call
from passes.known import memory_of, written_by
from passes.rules.algebra import argument

aten = torch.ops.aten
_library.define("hits(Tensor mask, int dim) -> Tensor")
torch.library.impl("partition::hits", "CompositeExplicitAutograd", lambda mask, dim: mask.clone(), lib=_library)
torch.library.register_fake("partition::hits", lambda mask, dim: torch.empty_like(mask), lib=_library)
HITS = torch.ops.partition.hits.default
_SHAPED = (aten.squeeze.default, aten.squeeze.dim, aten.flatten.using_ints, aten.view.default, aten.reshape.default,
           aten.alias.default)  # fmt: skip
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.alias.default, aten.clone.default, aten.detach.default)
_MOVED = (*_CASTS, *_SHAPED, aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.select.int)
_LISTING = {torch.where, torch.nonzero, Tensor.nonzero}
_ABOVE = (aten.gt.Scalar, aten.greater.Scalar, aten.ne.Scalar, aten.not_equal.Scalar)
_OVER = (aten.sum.dim_IntList, aten.any.dim, aten.any.dims)


@dataclass
class Hits:
    """What a trace found of such loops. ``leaves_out``: the turns that it does not take, even ones (0) or odd (1)."""

    leaves_out: int | None = None
    seen: int = 0
    left_early: bool = False
    changed: bool = False  # masks, since it was asked which of them are true anywhere
    turns: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # by identity

    def turn(self, number: int, *, listed: bool = False) -> Tensor:
        """What forward has for the turn of an expert; ``listed``: with a dim of size 1."""
        made = torch.tensor([number] if listed else number)
        self.turns[id(made)] = made, number
        return made

    def check(self) -> None:
        """Raise :class:`UnsupportedError` where a loop was left before its last turn, or its masks were changed."""
        if self.changed:
            raise UnsupportedError(
                "a loop goes through the experts that some row had chosen before the masks were changed in place: "
                "change a copy of them, or write it as one that goes through all (for i in range(num_experts))"
            )
        if self.left_early:
            raise UnsupportedError(
                "a loop through the experts that some row has chosen is left before its end: which turns it has "
                "depends on tensors' numbers; write it as one that goes through all (for i in range(num_experts))"
            )


@contextmanager
def hits_traced(hits: Hits) -> Iterator[None]:
    """Inside, such loops can be traced; ``hits`` takes what was found."""
    plain: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__

    def turns(self: Tensor) -> Iterator[Any]:
        found = _table(self)
        return plain(self) if found is None else _turns(hits, self.dim(), *found)

    with mock.patch.object(Tensor, "__iter__", turns), _Indexed(hits):
        yield


def _turns(hits: Hits, rank: int, masks: list[Tensor], dim: int, first: fx.Node) -> Iterator[Tensor]:
    mode = get_proxy_mode()
    assert mode is not None
    tracker = mode.tracer.tensor_tracker
    before = {tensor: tracker[tensor] for tensor in masks}
    for mask in masks:  # from here on the trace reads it by way of a mark
        tracker[mask] = get_proxy_slot(HITS(mask, dim), mode.tracer)
    marks = [tracker[mask] for mask in masks]
    hits.seen += 1
    done = False
    try:
        for number in range(masks[0].shape[dim]):
            if number % 2 == hits.leaves_out:
                continue
            yield hits.turn(number, listed=rank == 2)
        done = True
    finally:
        hits.left_early |= not done
    held = [slot.proxy.node for slot in (*before.values(), *marks)]
    hits.changed |= _is_written(first, {memory_of(node) for node in held})
    for mask, slot in before.items():
        tracker[mask] = slot


def _is_written(first: fx.Node, memory: set[fx.Node]) -> bool:
    """Whether an operator from ``first`` on writes to one of these."""
    nodes = list(first.graph.nodes)
    return any(memory_of(to) in memory for node in nodes[nodes.index(first) :] for to in written_by(node))


class _Indexed(TorchFunctionMode):
    """What is picked by a turn is picked by its number."""

    def __init__(self, hits: Hits) -> None:
        super().__init__()
        self.hits = hits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and self.hits.turns:
            of, index = args
            turn, number = self._number(of), self._number(index)
            if turn is not None and of.dim() == 1 and isinstance(index, int) and index in (0, -1):
                return self.hits.turn(turn)
            if number is not None:
                found = of.select(0, number)
                return found.unsqueeze(0) if index.dim() else found
            if isinstance(index, tuple):
                numbers = [self._number(i) if isinstance(i, Tensor) and not i.dim() else None for i in index]
                args = of, tuple(i if n is None else n for i, n in zip(index, numbers, strict=True))
        made = func(*args, **kwargs or {})
        if func in _LISTING and self.hits.turns and len(args) == 1 and _is_turns(args[0]):
            rows = (made[0] if isinstance(made, tuple) else made).shape[0]
            torch._check(rows != 0)  # the turn is of an expert that some row has chosen
        return made

    def _number(self, value: Any) -> int | None:
        held = self.hits.turns.get(id(value)) if isinstance(value, Tensor) else None
        return None if held is None else held[1]


def _is_turns(mask: Any) -> bool:
    """Whether ``mask`` is that of one turn."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(mask, mode.tracer, None) if mode is not None and isinstance(mask, Tensor) else None
    node = None if slot is None else _before(slot.proxy.node, (*_CASTS, *_SHAPED, aten.unsqueeze.default))
    return node is not None and node.target is aten.select.int and node.args[0].target is HITS


def _table(value: Tensor) -> tuple[list[Tensor], int, fx.Node] | None:
    """The masks of which ``value`` lists those that are true anywhere, in whatever types there are of them, and the dim
    that counts them, and the operator that first looks at them; ``None``: it does not."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    if mode is None or slot is None:
        return None
    node = _before(slot.proxy.node, _SHAPED)
    if node.target is not aten.nonzero.default or node.args[0].meta["val"].dim() != 1:
        return None
    node, dim, adds = _before(node.args[0], _CASTS), 0, False
    if node.target in _ABOVE and node.args[1] == 0:
        node = _before(node.args[0], _CASTS)
    if node.target not in _OVER:
        return None
    first = node
    while node.target in _OVER:
        if argument(node, "keepdim", False):
            return None
        first, over, adds = node, dims_over(node), adds or node.target is aten.sum.dim_IntList
        dim = [d for d in range(node.args[0].meta["val"].dim()) if d not in over][dim]
        node = node.args[0]
        if _before(node, _CASTS).target in _OVER:
            node = _before(node, _CASTS)
    if adds and not _is_count(node):
        return None
    alike = {node}
    while node.target in _CASTS:
        node = node.args[0]
        alike.add(node)
    masks = [tensor for tensor, held in mode.tracer.tensor_tracker.items() if held.proxy.node in alike]
    return (masks, dim, first) if masks else None


def _is_count(node: Any) -> bool:
    """Whether no number is below zero."""
    if node.meta["val"].dtype == torch.bool or node.target is aten.one_hot.default:
        return True
    if node.target in (*_MOVED, HITS):
        return _is_count(node.args[0])
    return node.target is aten.mul.Tensor and all(isinstance(o, fx.Node) and _is_count(o) for o in node.args)


def _before(node: Any, targets: tuple[Any, ...]) -> Any:
    while node.target in targets:
        node = node.args[0]
    return node


def is_turn(node: fx.Node, parity: int) -> bool:
    """Whether ``node`` is the mask of a turn with an even number (``parity`` 0), or an odd one (1)."""
    args: Any = node.args
    if node.target is not aten.select.int or args[0].target is not HITS:
        return False
    mask, dim = args[0].args
    return bool(args[1] % mask.meta["val"].dim() == dim and args[2] % 2 == parity)


def empty_mask(graph: fx.Graph, node: fx.Node, where: dict[str, Any]) -> fx.Node:
    """What stands for the mask ``node`` where no row has chosen its expert."""
    value: Tensor = node.meta["val"]
    made = call(graph, aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": META})
    made.meta.update(where)
    return made
