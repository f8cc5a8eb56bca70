"""Trace branches on whether any row (token) has chosen an expert, as if every expert had rows.

``if mask.any():`` and ``if rows.numel() == 0: continue`` skip experts without rows. The outcome of such conditions
depends on data, so a trace cannot know it. Inside :func:`trace_expert_branches`, every such condition is evaluated as
if there were rows. This is exact only if the traced branch has no effect for an expert without rows.
``passes/experts/traced_loops.py`` proves this afterwards, from traces in which every other expert has no rows. For
these proofs, the marker operator ``partition::hit`` marks the masks and numbers on which conditions depend.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import SymBool, SymInt, Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from partitioner.passes.experts.routing_masks import (
    ALIKE,
    CASTS,
    SHAPED,
    find_integer_source,
    get_num_choices,
    is_count,
    list_reduced_dims,
    match_any_equality,
    match_class_masks,
    match_equality,
    skip_operators,
)
from partitioner.passes.experts.trace_marks import HIT
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.rules.factors import get_node_argument
from partitioner.passes.trace.concrete_scalars import find_allocating_node, is_written

aten = torch.ops.aten

LISTING = frozenset({torch.where, torch.nonzero, Tensor.nonzero})
_TRUTH_FUNCTIONS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})
_COUNTING = frozenset({torch.bincount, Tensor.bincount})
_SAME = (*CASTS, *SHAPED)
_COUNTS = (aten.any.default, aten.sum.default, aten.count_nonzero.default)
SOME = (aten.gt.Scalar, aten.greater.Scalar, aten.ne.Scalar, aten.not_equal.Scalar)
_NONE = (aten.eq.Scalar, aten.le.Scalar, aten.less_equal.Scalar)
_MAX_ROWS = 1 << 20  # a number of rows that stands for any large one


@dataclass
class TracedBranches:
    """Record of the branches of forward, in one trace, on whether an expert has rows (tokens that chose it).

    A listing is an operator call of the trace that lists or counts the rows of an expert; listings are numbered from 1,
    and ``num_listings`` is their number. ``leaves_out``: if 0 or 1, branches are traced as if experts with even or odd
    numbers had no rows; if ``None``, as if all experts had rows. ``num_branches``: the number of branches. ``decided``:
    the listings on which a branch depended. ``changed``: whether a mask on which a branch depended was later written in
    place. ``marked``: pairs of a node and the marker operator through which the trace reads it. ``counted``: symbol of
    a number of rows -> (the number, its listing, its expert).
    """

    leaves_out: int | None = None
    num_branches: int = 0
    changed: bool = False  # whether a marked mask was written in place afterwards
    marked: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # (marked node, its marker)
    # symbol of a number of rows -> (the number, its listing, its expert)
    counted: dict[Any, tuple[SymInt, int, int]] = field(default_factory=dict)
    decided: set[int] = field(default_factory=set)  # listings on which a branch depended
    num_listings: int = 0

    def listing(self) -> int:
        self.num_listings += 1
        return self.num_listings

    def has_rows(self, number: int, listing: int) -> bool:
        """Return whether this trace assumes that some row (token) has chosen the expert ``number``, and record that a
        branch of forward depended on this. ``listing``: the number of the operator call, from 1, that listed the
        expert's rows."""
        self.num_branches += 1
        self.decided.add(listing)
        return number % 2 != self.leaves_out

    def register_count(self, rows: Any, listing: int, number: int) -> None:
        """Register ``rows``, a symbolic number of rows (tokens), so that branches of forward on whether it is zero can
        be traced.

        Args:
            rows: the symbolic size; other values are ignored.
            listing: number of the operator call of the trace, from 1, that listed the rows.
            number: number of the expert whose rows they are.
        """
        if isinstance(rows, SymInt):
            self.counted[rows.node.expr] = rows, listing, number

    def decide(self, question: Any) -> bool:
        """If the symbolic condition ``question`` only tests whether an expert has rows (tokens that chose it), fix its
        outcome according to :attr:`leaves_out`, and return ``True``. Return ``False`` for any other condition, or if
        the row count was not registered."""
        symbols = [s for s in question.free_symbols if s in self.counted]
        if len(symbols) != 1 or len(question.free_symbols) != 1:
            return False
        answers = [bool(question.subs(symbols[0], rows)) for rows in (0, 1, 2, 3, _MAX_ROWS)]
        if len(set(answers[1:])) != 1 or answers[0] == answers[1]:
            return False
        rows, listing, number = self.counted[symbols[0]]
        torch._check(rows > 0 if self.has_rows(number, listing) else rows == 0)
        return True

    def drop_overwritten_masks(self) -> None:
        """Set ``changed`` if a mask on which a branch depended was later written in place, and clear the record of
        these masks. Called at the end of a trace."""
        self.changed |= any(is_written(mark, {find_allocating_node(chosen), mark}) for chosen, mark in self.marked)
        self.marked = []


@contextmanager
def trace_expert_branches(branches: TracedBranches) -> Iterator[None]:
    """Return a context in which branches of forward on whether an expert has rows (tokens that chose it) can be traced.
    ``branches``: determines the outcomes of the branches and records them."""
    plain: Callable[[SymBool], bool] = SymBool.__bool__

    def decide_condition(self: SymBool) -> bool:
        """Return the truth of a symbolic condition, as ``SymBool.__bool__``, which this function replaces. If the
        condition only tests whether an expert has rows (tokens), its outcome is fixed first."""
        try:
            return plain(self)
        except GuardOnDataDependentSymNode:
            if not branches.decide(self.node.expr):
                raise
            return plain(self)

    with mock.patch.object(SymBool, "__bool__", decide_condition), _BranchMode(branches):
        yield
    branches.drop_overwritten_masks()


class _BranchMode(TorchFunctionMode):
    """A torch function mode that lets a traced forward branch on the rows (tokens) that a mask selects. It intercepts
    torch functions that list these rows, count them, or test whether there are any. ``guards``: determines the outcomes
    of the branches and records them."""

    def __init__(self, branches: TracedBranches) -> None:
        super().__init__()
        self.guards = branches

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with ``args`` and ``kwargs`` and return its result. If ``func`` lists the
        rows (tokens) in which an expert's mask is true, it gets the mask through a marker operator, which shows the
        mask in the graph. If it tests whether an expert has rows, the result is a fixed Python boolean. ``types``:
        unused."""
        kwargs = kwargs or {}
        if get_proxy_mode() is None:
            return func(*args, **kwargs)
        if func in LISTING and len(args) == 1:
            return self._list_marked_rows(func, args[0], kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return self._list_marked_rows(lambda mask: func(args[0], mask), args[1], {})
        if func in _COUNTING:
            made = _count_with_fixed_size(*args, **kwargs)
            return func(*args, **kwargs) if made is None else made
        if func in _TRUTH_FUNCTIONS or (func is Tensor.item and args[0].dtype == torch.bool):
            query = _find_rows_query(get_fx_node(args[0]))
            if query is not None:
                return query.if_any == self.guards.has_rows(query.number, self._mark_queried_rows(query))
        made = func(*args, **kwargs)
        query = _find_rows_query(get_fx_node(args[0])) if func is Tensor.item and isinstance(made, SymInt) else None
        if query is not None and query.if_any:
            self.guards.register_count(made, self._mark_queried_rows(query), query.number)
        return made

    def _list_marked_rows(self, func: Callable[..., Any], mask: Tensor, kwargs: dict[str, Any]) -> Any:
        """Call ``func``, which lists the rows (tokens) where ``mask`` is true, and return its result. If ``mask``
        selects the rows of an expert, ``func`` gets it through a marker operator, which shows the mask in the graph,
        and the number of rows is registered for later branches.

        ``kwargs``: further arguments of ``func``.
        """
        number = _find_expert_number(get_fx_node(mask))
        if number is None:
            return func(mask, **kwargs)
        listing = self.guards.listing()
        made = func(HIT(mask, number, listing, False), **kwargs)
        self.guards.register_count((made[0] if isinstance(made, tuple) else made).shape[0], listing, number)
        return made

    def _mark_queried_rows(self, query: _ExpertRowsQuery) -> int:
        """Insert marker operators (which return their operand unchanged) after a mask and after chosen expert numbers,
        so that the rest of the trace reads them through the markers. Return the number, from 1, of this listing (an
        operator call of the trace that lists or counts rows).

        Args:
            query: what forward tests about the rows (tokens) of an expert, with the nodes of the mask and of the chosen
                numbers.
        """
        mode = get_proxy_mode()
        assert mode is not None
        tracker, listing = mode.tracer.tensor_tracker, self.guards.listing()
        for tensor, held in list(tracker.items()):
            node = held.proxy.node
            numbers = query.chosen is not None and _is_same_node(node, query.chosen)
            if numbers or node in query.masks:
                mark = get_proxy_slot(HIT(tensor, query.number, listing, numbers), mode.tracer)
                self.guards.marked.append((node, mark.proxy.node))
                tracker[tensor] = mark
        return listing


@dataclass(frozen=True)
class _ExpertRowsQuery:
    """What forward tests about the rows (tokens) that chose the expert ``number``: whether there are any, or how many.

    ``if_any``: whether a true (or non-zero) value means that there are rows; if false, it means that there are none.
    ``masks``: the nodes of one mask, in several dtypes, that is true in these rows; may be empty. ``chosen``: the node
    with the chosen numbers, or ``None``. At least one of ``masks`` and ``chosen`` is given.
    """

    number: int
    if_any: bool
    masks: tuple[fx.Node, ...]
    chosen: fx.Node | None


def get_fx_node(value: Any) -> Any:
    """Return the FX node of ``value`` in the current trace; ``None`` if there is none."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(value, mode.tracer, None) if mode is not None and isinstance(value, Tensor) else None
    return None if slot is None else slot.proxy.node


def _count_with_fixed_size(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """Return how often each of the numbers 0, 1, .., ``minlength`` - 1 occurs in ``numbers``, like ``bincount`` but
    with the fixed shape ``[minlength]``. Return ``None`` if larger numbers may occur, or if ``weights`` are given."""
    node = get_fx_node(numbers)
    places = None if node is None else get_num_choices(find_integer_source(node))
    if weights is not None or places is None or places > minlength:
        return None
    every = torch.arange(minlength, device=numbers.device, dtype=numbers.dtype)
    return (numbers.unsqueeze(-1) == every).sum(0)


def _find_rows_query(node: Any) -> _ExpertRowsQuery | None:
    """If the value of ``node`` tells whether any rows (tokens) chose an expert, or how many, return this test as an
    :class:`_ExpertRowsQuery`; otherwise return ``None``."""
    if_any = True
    while isinstance(node, fx.Node):
        args: Any = node.args
        if node.target in _COUNTS:
            masks = [args[0]]
            while masks[-1].target in ALIKE:
                masks.append(masks[-1].args[0])
            number, chosen = _find_expert_number(masks[-1]), _find_mask_choice(masks[-1])
            return (
                None
                if number is None
                else _ExpertRowsQuery(number, if_any, tuple(masks), chosen and find_integer_source(chosen[0]))
            )
        if node.target is aten.select.int:
            return _match_table_entry(args[0], args[1], args[2], if_any)
        if node.target is operator.getitem and args[0].target is aten.unbind.int:
            return _match_table_entry(args[0].args[0], get_node_argument(args[0], "dim", 0), args[1], if_any)
        if node.target is aten.logical_not.default or (node.target in _NONE and args[1] == 0):
            if_any = not if_any
        elif node.target not in _SAME and not (node.target in SOME and args[1] == 0):
            return None
        node = args[0]
    return None


def _match_table_entry(node: Any, dim: int, index: Any, if_any: bool) -> _ExpertRowsQuery | None:
    """If ``node`` has the row (token) counts of all experts, computed as a sum of masks, return the test whether the
    expert ``index`` has rows, which the element ``index`` of ``node`` along ``dim`` answers. Otherwise, or if ``index``
    is not an integer, return ``None``.

    Args:
        if_any: whether a non-zero element means that the expert has rows; if false, it means that there are none.
    """
    node = skip_operators(node, CASTS)
    if (
        node.target is not aten.sum.dim_IntList
        or get_node_argument(node, "keepdim", False)
        or not isinstance(index, int)
    ):
        return None
    table = skip_operators(node.args[0], ALIKE)
    classes, over = match_class_masks(table), list_reduced_dims(node)
    left = [d for d in range(table.meta["val"].dim()) if d not in over]
    if classes is None or left != [classes.dim] or dim % len(left) or index < 0:
        return None
    return _ExpertRowsQuery(index, if_any, (), find_integer_source(classes.chosen))


def _find_expert_number(node: Any) -> int | None:
    """If ``node`` is the mask of the rows (tokens) that chose one expert, return the number of the expert; otherwise
    return ``None``."""
    found = _find_mask_choice(node)
    if found is not None:
        return found[1]
    while isinstance(node, fx.Node) and node.target in _SAME:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.select.int or not is_count(node):
        return None
    whole, dim, index = node.args
    return index % whole.meta["val"].shape[dim] if isinstance(index, int) else None  # type: ignore[union-attr]


def _find_mask_choice(node: Any) -> tuple[fx.Node, int] | None:
    """If the mask ``node`` compares chosen numbers with an expert number, return (node with the chosen numbers, expert
    number); otherwise return ``None``."""
    choice = match_equality(node)
    return match_any_equality(node) if choice is None else (choice.chosen, choice.number)


def _is_same_node(node: fx.Node, chosen: fx.Node) -> bool:
    """Return whether ``node`` is the node ``chosen`` or a marker operator of it, which has the same value."""
    return skip_operators(node, (HIT,)) is chosen


def find_empty_expert_masks(nodes: Sequence[fx.Node], parity: int, decided: Collection[int]) -> frozenset[fx.Node]:
    """Return the masks among ``nodes``, operators of an exported graph, that select the rows (tokens) of experts with
    even or odd numbers. The caller replaces these masks by zeros, as if no row had chosen these experts. A mask that is
    computed from another such mask is left out.

    Args:
        parity: 0 for experts with even numbers, 1 for odd numbers.
        decided: numbers, from 1, of the operator calls of the trace that list an expert's rows and on which a branch of
            forward depended. Masks of experts whose rows none of these calls lists are left out.
    """
    marks: list[Any] = [n for n in nodes if n.target is HIT and n.args[2] in decided]
    if not marks:
        return frozenset()
    same = ValueNumbers()

    def key(chosen: fx.Node, number: int) -> tuple[int, int]:
        return same(find_integer_source(chosen)), number

    found = [(mark.args[0], mark.args[1]) if mark.args[3] else _find_mask_choice(mark.args[0]) for mark in marks]
    query = {key(*pair) for pair in found if pair is not None}
    masks = {mark for mark in marks if not mark.args[3] and mark.args[1] % 2 == parity}
    tell, first = set[Any](), set[fx.Node]()
    for node in nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            pair = _find_mask_choice(node)
            if node in masks if pair is None else pair[1] % 2 == parity and key(*pair) in query:
                tell.add(node)
                first |= {node} if node.args[0] not in tell else set()  # otherwise computed from a mask in ``tell``
    return frozenset(first)
