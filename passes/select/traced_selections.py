"""Trace selections of rows by a mask so that equal masks select equal symbolic numbers of rows.

``x[t > 0]`` and ``y[t > 0]`` have equally many rows. torch.export does not know this: each computed mask gets its own
symbolic number of rows, and a loss of the two raises an error. Inside :func:`trace_selections`, masks that are computed
by the same operators on the same inputs share one number.

Torch functions that read values to check them, such as :func:`torch.nn.functional.gaussian_nll_loss`, are traced
without the check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioner.passes.experts.traced_branches import get_fx_node
from partitioner.passes.ir.rewrite import collect_ancestors
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.select.class_counts import ONE_HOT
from partitioner.passes.trace.concrete_scalars import find_allocating_node, list_written_operands

_BY_MASK = frozenset(
    {
        Tensor.__getitem__, Tensor.__setitem__, Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere,
        torch.where, Tensor.index_put, Tensor.index_put_, torch.index_put,
    }
)  # fmt: skip
_COUNTING = frozenset({torch.bincount, Tensor.bincount, F.one_hot})
# Functions that forward enters when it calls a function of torch under a function mode, or a module.
_ENTRIES = frozenset({"__torch_function__", "_wrapped_call_impl"})
_BY_WHERE = frozenset({Tensor.masked_select, torch.masked_select})
_ANY_TYPE = frozenset({Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, torch.where})


@contextmanager
def trace_selections(is_user_file: Callable[[str], bool]) -> Iterator[None]:
    """Return a context for tracing a model, in which masks that are computed by the same operators on the same inputs
    select the same symbolic number of rows. Torch can then compare the sizes of tensors that they select.

    If one of torch's own functions requires that a data-dependent number of classes equals an integer, this is assumed
    to hold. ``is_user_file``: returns whether the source file with a given name is the user's, not torch's or this
    package's.
    """
    selections = _SelectionMode(is_user_file)
    plain = ShapeEnv.evaluate_expr

    def evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the truth of ``expr``, a symbolic condition on sizes, as torch's own method does. If the truth cannot
        be decided, and one of torch's own functions asks whether a number of classes equals an integer, assume that it
        does. ``env``: torch's record of symbolic sizes. ``args``, ``kwargs``: passed on to torch's method."""
        try:
            return plain(env, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if not selections.may_assume(expr):
                raise
            env.guard_or_defer_runtime_assert(expr, "the number of classes")
            return sympy.true

    with mock.patch.object(ShapeEnv, "evaluate_expr", evaluate), selections:
        yield


class _SelectionMode(TorchFunctionMode):
    """A torch function mode for tracing a model, in which masks that are computed in the same way select the same
    symbolic number of rows. Functions of torch that read values only for a check, such as ``gaussian_nll_loss``, run
    without the check, because a trace has no values.

    ``is_user_file``: returns whether the source file with a given name is the user's, not torch's or this package's.
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        """Start without known masks. ``is_user_file``: returns whether the source file with a given name is the user's,
        not torch's or this package's."""
        super().__init__()
        self.is_user_file = is_user_file
        self.graph: fx.Graph | None = None  # graph of the present trace
        self.key = ValueNumbers()
        # key of a mask -> (symbolic number of rows that it selects, mask)
        self.counts: dict[int, tuple[Any, fx.Node]] = {}
        self.classes: set[Any] = set()  # symbols of data-dependent numbers of classes

    def may_assume(self, expr: Any) -> bool:
        """Return whether ``expr``, a symbolic condition on sizes, may be assumed to hold: it says that a data-dependent
        number of classes equals an integer, and one of torch's own functions asks for this, not the user's code."""
        sides = expr.args if isinstance(expr, sympy.Eq) else ()
        if not any(s in self.classes for s in sides) or not any(s.is_Integer for s in sides):
            return False
        frame: FrameType | None = sys._getframe(1)
        called = frame
        while frame is not None and not self.is_user_file(frame.f_code.co_filename):
            called, frame = frame, frame.f_back
        entered = called.f_code if called is not None else None
        return entered is not None and (entered.co_name in _ENTRIES or entered.co_filename == F.__file__)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the torch function ``func`` with ``args`` and ``kwargs`` and return its result. If ``func`` selects rows
        by a mask, and an equal mask was used before, the result has the symbolic number of rows of the earlier
        selection. If ``func`` reads values only to check them, a form without the check runs instead. ``types`` is not
        used."""
        kwargs = kwargs or {}
        if func in _BY_WHERE:
            return self._select_rows_by_where(*args, **kwargs)
        if func in _BY_MASK:
            return self._select_by_mask(func, args, kwargs)
        rule = _VALUE_READING_FUNCTIONS.get(func)
        made = func(*args, **kwargs) if rule is None else rule(func, *args, **kwargs)
        if func in _COUNTING and isinstance(made, Tensor) and isinstance(made.shape[-1], torch.SymInt):
            self.classes.add(made.shape[-1].node.expr)
        return made

    def _select_rows_by_where(self, input: Tensor, mask: Tensor) -> Any:
        """Return ``masked_select(input, mask)`` during a trace, computed as ``input[mask]`` after broadcasting both
        to one shape, so that equal masks select the same symbolic number of elements."""
        if input.shape != mask.shape:
            shape = torch.broadcast_shapes(input.shape, mask.shape)
            input, mask = (v if v.shape == shape else v.expand(shape) for v in (input, mask))
        return self._select_by_mask(Tensor.__getitem__, (input, mask), {})

    def _select_by_mask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the torch function ``func``, which selects rows by a boolean mask among its arguments ``args`` and
        ``kwargs``, during a trace, and return its result. If an equal mask was used before, the result has the symbolic
        number of rows that was created for that mask; otherwise the new number is recorded for later masks."""
        masks = []
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, FakeTensor) and (tensor.dtype == torch.bool or func in _ANY_TYPE):
                node = get_fx_node(tensor)
                if node is not None:
                    masks.append((tensor, node, self._compute_key(node)))
        for mask, node, key in masks:
            count, other = self.counts.get(key, (None, node))
            if count is not None and mask.nonzero_memo is None and _are_unwritten(node, other):
                mask.nonzero_memo = count
        made = func(*args, **kwargs)
        for mask, node, key in masks:
            if mask.nonzero_memo is not None:
                self.counts.setdefault(key, (mask.nonzero_memo, node))
        return made

    def _compute_key(self, node: fx.Node) -> int:
        """Return an integer for ``node``, equal for nodes of the current trace that compute the same value. If ``node``
        belongs to another trace than in the last call, all records of the last trace are dropped first."""
        if node.graph is not self.graph:
            self.graph, self.key, self.counts = node.graph, ValueNumbers(), {}
        return self.key(node)


def _are_unwritten(*nodes: fx.Node) -> bool:
    """Return whether no operator of the graph writes in place to one of ``nodes`` or to a value from which they are
    computed."""
    written = {find_allocating_node(to) for other in nodes[0].graph.nodes for to in list_written_operands(other)}
    return not any(written.intersection(map(find_allocating_node, collect_ancestors([node]))) for node in nodes)


# -- functions of torch that read values of tensors --------------------------------------------------------------------
def _call_cross_entropy(
    func: Callable[..., Tensor], input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Return the cross entropy ``func(input, target, *args, **kwargs)``. ``func``: torch's own function.

    If the targets are probabilities, their number of rows depends on the data and the reduction is a mean, call
    ``func`` without reduction and return the mean of its losses. The mean in ``func`` would check whether there are any
    rows, which a trace cannot know.
    """
    plain = (
        not _has_dynamic_size(target) or not target.dtype.is_floating_point or kwargs.get("reduction", "mean") != "mean"
    )
    if plain or len(args) > 1:
        return func(input, target, *args, **kwargs)
    return func(input, target, *args, **{**kwargs, "reduction": "none"}).mean()


def _call_one_hot(func: Callable[..., Tensor], input: Tensor, num_classes: int = -1) -> Tensor:
    """Return ``one_hot`` of the class numbers ``input`` with ``num_classes`` classes. If the number is -1, so that
    torch would read it from the data, use an operator that can be traced. ``func``: torch's own function."""
    if num_classes != -1 or not isinstance(input, FakeTensor):
        return func(input, num_classes)
    made: Tensor = ONE_HOT(input.to(torch.int64))
    return made


def _compute_logsumexp(
    func: Callable[..., Tensor], input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """Return ``logsumexp`` of ``input`` over ``dim``. If the number of rows depends on the data, compute it without
    torch's check whether there are any rows. ``func``: torch's own function. ``keepdim``: whether ``dim`` stays with
    size 1. ``kwargs``: the further arguments of ``func``."""
    if not _has_dynamic_size(input) or kwargs:
        return func(input, dim, keepdim=keepdim, **kwargs)
    largest = input.detach().amax(dim, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    total = (input - largest).exp().sum(dim, keepdim=keepdim).log()
    return total + (largest if keepdim else largest.squeeze(dim))


def _call_gaussian_nll(func: Callable[..., Tensor], input: Tensor, target: Tensor, var: Any, **kwargs: Any) -> Tensor:
    """Return ``gaussian_nll_loss`` of ``input``, ``target`` and the variances ``var``, without torch's check for
    negative variances; these give a loss of NaN. ``func``: torch's own function. ``kwargs``: the further arguments of
    ``func``."""
    if isinstance(var, Tensor):
        var = torch.where(var < 0, torch.nan, var)
    with mock.patch.object(torch, "any", return_value=False):
        return func(input, target, var, **kwargs)


def _has_dynamic_size(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has a size that depends on the data."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


_VALUE_READING_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _call_cross_entropy,
    F.gaussian_nll_loss: _call_gaussian_nll,
    F.one_hot: _call_one_hot,
    torch.logsumexp: _compute_logsumexp,
    Tensor.logsumexp: _compute_logsumexp,
}
