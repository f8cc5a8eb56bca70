"""Trace loops over the experts that some row (token) has chosen as loops over all experts, and prove that this is
exact.

``for i in mask.sum((1, 2)).nonzero():`` has one iteration for each expert with rows, which a trace cannot know. Inside
:func:`trace_expert_loops` the loop has one iteration for every expert, and the marker operator ``partition::hits``
marks the masks from which forward finds experts with rows. An iteration of an expert without rows runs operators that
the model would not run.

:func:`check_turns` proves that these iterations have no effect. Branches that ``passes/experts/traced_branches.py``
traced are proven in the same way. Two further graphs are compared: the trace with empty masks for every other expert,
and a trace without the iterations of these experts. Both are in normal form (rewritten to a small set of operators).
Values that an empty mask fills, selects or adds up are removed, and then both graphs must be equal. Requires: meta
tensors (``node.meta["val"]``) on every node, and normal form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.experts.loop_patterns import LINEAR, RESHAPES
from partitioner.passes.experts.routing_masks import ALIKE, SHAPED, is_count, list_reduced_dims, skip_operators
from partitioner.passes.experts.trace_marks import HITS
from partitioner.passes.experts.traced_branches import LISTING, SOME, TracedBranches, get_fx_node, trace_expert_branches
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.rewrite import drop_unused, list_node_sizes
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.rules.factors import get_node_argument
from partitioner.passes.trace.concrete_scalars import find_allocating_node, is_written

aten = torch.ops.aten

_REDUCTIONS = (aten.sum.dim_IntList, aten.any.dim, aten.any.dims)


@dataclass
class TracedLoops:
    """Record of the loops of forward, in one trace, over the experts that some row (token) chose.

    ``leaves_out``: 0 or 1 if the trace skips the iterations of experts with even or odd numbers; ``None`` if it skips
    none. ``num_loops``: the number of loops. ``left_early``: whether forward left a loop by ``break`` or an exception.
    ``changed``: whether masks that determine the experts with rows were later written in place. ``iterations``: ``id``
    of a tensor that forward got as a loop index -> (the tensor, its expert number). ``branches``: record of branches on
    whether an expert has rows; ``None`` if these are not traced.
    """

    leaves_out: int | None = None
    num_loops: int = 0
    left_early: bool = False
    changed: bool = False  # whether a mask was written in place after it determined iterations
    # id of a loop index -> (the tensor, its expert number)
    iterations: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    branches: TracedBranches | None = None  # None if branches are not traced

    @property
    def found(self) -> bool:
        """Return whether the trace has a loop over the experts with rows (tokens), or a branch on whether an expert has
        rows. The graph must then be proven equal to the model.
        """
        return self.num_loops > 0 or (self.branches is not None and self.branches.num_branches > 0)

    def with_branches(self) -> TracedLoops:
        """Return an empty record for another trace of loops over experts, in which forward may also branch on whether
        an expert has rows (tokens). The record's :class:`TracedBranches` records these branches."""
        return TracedLoops(self.leaves_out, branches=TracedBranches(self.leaves_out))

    def without_parity(self, parity: int | None) -> TracedLoops:
        """Return an empty record for another trace of loops over experts, which skips the iterations of experts with
        even (``parity`` 0) or odd (1) numbers, or no iterations (``None``)."""
        return TracedLoops(parity, branches=self.branches and TracedBranches(parity))

    def get_loop_index(self, number: int, *, listed: bool = False) -> Tensor:
        """Return the tensor that forward gets as loop index in the iteration for the expert ``number``, and record the
        tensor.

        Args:
            listed: whether the tensor has the shape ``[1]``, as in a loop over the rows of ``nonzero()``; otherwise it
                has no dims.
        """
        made = torch.tensor([number] if listed else number)
        self.iterations[id(made)] = made, number
        return made

    def check_complete(self) -> None:
        """Raise :class:`UnsupportedError` if forward left a traced loop over experts before its end, or if the masks
        that determine which experts have rows (tokens) were written in place after the loop read them."""
        if self.changed or (self.branches is not None and self.branches.changed):
            raise UnsupportedError(
                "the masks of the chosen experts are changed in place after they were read: change a copy of them, "
                "or loop over all experts (for i in range(num_experts))"
            )
        if self.left_early:
            raise UnsupportedError(
                "a loop over the chosen experts ends early, so that its iterations depend on data; loop over all "
                "experts without break (for i in range(num_experts))"
            )


@contextmanager
def trace_expert_loops(loops: TracedLoops) -> Iterator[None]:
    """Return a context in which loops of forward over the experts that have rows (tokens that chose them) are traced as
    loops over all experts. ``loops`` records these loops."""
    plain: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__

    def iterate_experts(self: Tensor) -> Iterator[Any]:
        found = _find_listed_masks(self)
        return plain(self) if found is None else _iterate_marked_experts(loops, self.dim(), *found)

    guarded = nullcontext() if loops.branches is None else trace_expert_branches(loops.branches)
    with mock.patch.object(Tensor, "__iter__", iterate_experts), _LoopIndexMode(loops), guarded:
        yield


def _iterate_marked_experts(
    loops: TracedLoops, rank: int, masks: list[Tensor], dim: int, first: fx.Node
) -> Iterator[Tensor]:
    """Yield the loop index for each expert, in a loop over the experts that have rows (tokens). Meanwhile the trace
    reads the masks through marker operators, which return their operand unchanged and show in the graph which operators
    are in the loop.

    ``loops``: the record of loops. ``rank``: the number of dims of the tensor over which forward loops, 1 or 2; a loop
    index has one dim fewer. ``masks``: the masks from which forward finds experts with rows, one for each dtype.
    ``dim``: their dim of experts. ``first``: the first node that reduces the masks; a later write in place to a mask is
    recorded in ``loops``.
    """
    mode = get_proxy_mode()
    assert mode is not None
    tracker = mode.tracer.tensor_tracker
    slots = {tensor: tracker[tensor] for tensor in masks}
    for mask in masks:  # from here on, the trace reads the mask through a marker
        tracker[mask] = get_proxy_slot(HITS(mask, dim), mode.tracer)
    marks = [tracker[mask] for mask in masks]
    loops.num_loops += 1
    done = False
    try:
        for number in range(masks[0].shape[dim]):
            if number % 2 == loops.leaves_out:
                continue
            yield loops.get_loop_index(number, listed=rank == 2)
        done = True
    finally:
        loops.left_early |= not done
    held = [slot.proxy.node for slot in (*slots.values(), *marks)]
    loops.changed |= is_written(first, {find_allocating_node(node) for node in held})
    for mask, slot in slots.items():
        tracker[mask] = slot


class _LoopIndexMode(TorchFunctionMode):
    """A torch function mode for loops over experts: where forward indexes a tensor by the loop index, which is itself a
    tensor, the index is replaced by the expert's number as a Python int. ``hits``: the record of loops, which has the
    number of each index tensor."""

    def __init__(self, loops: TracedLoops) -> None:
        super().__init__()
        self.hits = loops

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with ``args`` and ``kwargs`` and return its result. An index by the loop
        index, a tensor, is replaced by an index by the expert's number. ``types``: unused."""
        if func is Tensor.__getitem__ and self.hits.iterations:
            of, index = args
            turn, number = self._find_expert_number(of), self._find_expert_number(index)
            if turn is not None and of.dim() == 1 and isinstance(index, int) and index in (0, -1):
                return self.hits.get_loop_index(turn)
            if number is not None:
                found = of.select(0, number)
                return found.unsqueeze(0) if index.dim() else found
            if isinstance(index, tuple):
                numbers = [
                    self._find_expert_number(i) if isinstance(i, Tensor) and not i.dim() else None for i in index
                ]
                args = of, tuple(i if n is None else n for i, n in zip(index, numbers, strict=True))
        made = func(*args, **kwargs or {})
        if func in LISTING and self.hits.iterations and len(args) == 1 and _is_iteration_mask(args[0]):
            rows = (made[0] if isinstance(made, tuple) else made).shape[0]
            torch._check(rows != 0)  # the iteration is for an expert that some row has chosen
        return made

    def _find_expert_number(self, value: Any) -> int | None:
        """Return the number of the expert whose loop index is ``value``; ``None`` if ``value`` is not a loop index."""
        held = self.hits.iterations.get(id(value)) if isinstance(value, Tensor) else None
        return None if held is None else held[1]


def _is_iteration_mask(mask: Any) -> bool:
    """Return whether ``mask`` is the mask of a single expert's rows (tokens), selected inside a traced loop over the
    experts that have rows. Such a mask is true for at least one row, so the trace may assume that it lists at least one
    row."""
    node = get_fx_node(mask)
    node = None if node is None else skip_operators(node, (*ALIKE, *SHAPED))
    return node is not None and node.target is aten.select.int and node.args[0].target is HITS


def _find_listed_masks(value: Tensor) -> tuple[list[Tensor], int, fx.Node] | None:
    """If ``value`` lists the experts that some row (token) chose, as ``nonzero`` of a sum of masks does, return (list
    of mask tensors, their dim of experts, first node that reduces the masks). The list has one tensor for each dtype to
    which the mask was cast. Otherwise, return ``None``."""
    mode, node = get_proxy_mode(), get_fx_node(value)
    if mode is None or node is None:
        return None
    node = skip_operators(node, (*SHAPED, aten.alias.default))
    if node.target is not aten.nonzero.default or node.args[0].meta["val"].dim() != 1:
        return None
    node, dim, adds = skip_operators(node.args[0], ALIKE), 0, False
    if node.target in SOME and node.args[1] == 0:
        node = skip_operators(node.args[0], ALIKE)
    if node.target not in _REDUCTIONS:
        return None
    first = node
    while node.target in _REDUCTIONS:
        if get_node_argument(node, "keepdim", False):
            return None
        first, over, adds = node, list_reduced_dims(node), adds or node.target is aten.sum.dim_IntList
        dim = [d for d in range(node.args[0].meta["val"].dim()) if d not in over][dim]
        node = node.args[0]
        if skip_operators(node, ALIKE).target in _REDUCTIONS:
            node = skip_operators(node, ALIKE)
    if adds and not is_count(node):
        return None
    alike = {node}
    while node.target in ALIKE:
        node = node.args[0]
        alike.add(node)
    masks = [tensor for tensor, held in mode.tracer.tensor_tracker.items() if held.proxy.node in alike]
    return (masks, dim, first) if masks else None


def is_iteration_of_parity(node: fx.Node, parity: int) -> bool:
    """Return whether ``node`` is the mask of the rows (tokens) that chose one expert, selected in a traced loop over
    experts, and the expert's number is even (if ``parity`` is 0) or odd (if 1)."""
    args: Any = node.args
    if node.target is not aten.select.int or args[0].target is not HITS:
        return False
    mask, dim = args[0].args
    return bool(args[1] % mask.meta["val"].dim() == dim and args[2] % 2 == parity)


def append_empty_mask(graph: fx.Graph, node: fx.Node, where: dict[str, Any]) -> fx.Node:
    """Append to ``graph`` a mask of zeros that replaces ``node``, the mask of the rows (tokens) that chose one expert,
    as if no row had chosen it. Return the new node. ``where``: entries of the new node's ``meta``, such as its module
    path (``path``) and source line (``source``)."""
    value: Tensor = node.meta["val"]
    made = insert_operator_node(
        graph, aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": META}
    )
    made.meta.update(where)
    return made


_CASTS = {aten.to.dtype, aten._to_copy.default, aten.clone.default}
_KEEP_TRUE = {*RESHAPES, *_CASTS}
_KEEP_FALSE = {*_KEEP_TRUE, aten.ne.Scalar, aten.gt.Scalar, aten.any.default, aten.any.dim, aten.any.dims,
               aten.sum.default, aten.sum.dim_IntList}  # fmt: skip
_KEEP_ZERO = (LINEAR | _CASTS) - {aten.mul.Tensor}
# operator -> position of the addends
_ADDING = {aten.index_add.default: 3, aten.scatter_add.default: 3, aten.index_put.default: 2}


def check_turns(empty: fx.Graph, left_out: fx.Graph) -> None:
    """Raise :class:`UnsupportedError` unless the graphs of two traces of a model are equal after simplification. Both
    graphs are changed.

    Equality proves that an iteration of a loop over experts has no effect if the expert has no rows (tokens), so that a
    loop over all experts computes the same result.

    Args:
        empty: graph of a trace in which the row masks of some experts are zeros.
        left_out: graph of a trace without the iterations of these experts.
    """
    alike: dict[tuple[str, str, str], int] = {}
    outputs = []
    for graph in (empty, left_out):
        _remove_no_effects(graph)
        (last,) = graph.find_nodes(op="output")
        outputs.append(list(map(ValueNumbers(alike), last.args[0])))
    if outputs[0] != outputs[1]:
        raise UnsupportedError(
            "forward skips the experts that no row has chosen, and an iteration does more than add to its rows, so "
            "that a loop over all experts, which a plan needs, gives other results; loop over all experts (for i in "
            "range(num_experts)), and compute values that depend on the choice from the masks"
        )


def _remove_no_effects(graph: fx.Graph) -> None:
    """Simplify ``graph`` in place: remove additions, selections and fills that have no effect because the mask that
    they read is known to be false everywhere.
    """
    false, true, zero = set[Any](), set[Any](), set[Any]()
    for node in list(graph.nodes):
        args: Any = node.args
        if node.target is aten.full.default and args[1] in (0, False):
            (zero if node.meta["val"].is_floating_point() else false).add(node)
        elif node.target is aten.masked_fill.Scalar:
            if args[1] in true and args[2] == 0:
                zero.add(node)
            elif args[1] in false:
                node.replace_all_uses_with(args[0])
        elif node.target is aten.where.self and args[0] in false:
            _replace_if_same_spec(node, args[2])
        elif node.target is aten.logical_not.default:
            true |= {node} if args[0] in false else set()
        elif node.target is aten.add.Tensor and len(args) == 2 and not node.kwargs:
            for kept, added in (args, args[::-1]):
                if _is_in(added, zero) and isinstance(kept, fx.Node):
                    _replace_if_same_spec(node, kept)
                    break
        elif node.target in _ADDING:
            accumulates = node.target is not aten.index_put.default or args[3:4] == (True,)
            if accumulates and args[_ADDING[node.target]] in zero:
                _replace_if_same_spec(node, args[0])
        elif node.target is aten.mul.Tensor:
            zero |= {node} if any(_is_in(a, zero) for a in args) else set()
        else:
            for kind, keeping in ((false, _KEEP_FALSE), (true, _KEEP_TRUE), (zero, _KEEP_ZERO)):
                if node.target in keeping and _is_in(args[0], kind):
                    kind.add(node)
    drop_unused(graph)


def _is_in(value: Any, nodes: set[fx.Node]) -> bool:
    return isinstance(value, fx.Node) and value in nodes


def _replace_if_same_spec(node: fx.Node, other: Any) -> None:
    """Make all readers of ``node`` read ``other`` instead, if ``other`` is a node with the same shape and dtype;
    otherwise do nothing."""
    if list_node_sizes(other) == list_node_sizes(node) and other.meta["val"].dtype == node.meta["val"].dtype:
        node.replace_all_uses_with(other)
