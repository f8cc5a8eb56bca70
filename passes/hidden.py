"""Which tensors of a flat graph share memory, which carry gradients, and what is written behind a gradient's back.

``with torch.no_grad(): y.clamp_()`` and ``y.detach().clamp_()`` change the numbers of ``y`` and leave its gradient as
it was. A graph of pure operators says what is computed and differentiates that: it would stop the gradient. Such a
tensor may be written to, but not be read afterwards. Neither may ``w.data.mul_()`` change what an operator before it
keeps for its gradient: torch would compute that of the new numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import UnsupportedError
from passes.faults import source_of
from passes.known import written_by

aten = torch.ops.aten


# Operators that return the very tensor that they are given where there is nothing to do, and when that is so: it keeps
# its gradient even where gradients are off.
_NOTHING: dict[Any, Callable[..., bool]] = {
    aten.contiguous.default: lambda x, **options: not options and x.is_contiguous(),
    aten.flatten.using_ints: lambda x, *_: x.dim() == 1,
    aten.type_as.default: lambda x, other: x.dtype == other.dtype,
    **dict.fromkeys(
        (
            aten.dropout.default,
            aten.feature_dropout.default,
            aten.alpha_dropout.default,
            aten.feature_alpha_dropout.default,
        ),
        lambda x, p, train: p == 0 or not train,
    ),
    aten.positive.default: lambda x: True,
    aten.real.default: lambda x: not x.is_complex(),
    aten.conj.default: lambda x: not x.is_complex(),
    aten.resolve_conj.default: lambda x: not x.is_complex(),
    aten.resolve_neg.default: lambda x: not x.is_complex(),
    aten.atleast_1d.default: lambda x: x.dim() >= 1,
    aten.atleast_2d.default: lambda x: x.dim() >= 2,
    aten.atleast_3d.default: lambda x: x.dim() >= 3,
}


def does_nothing(node: fx.Node) -> bool:
    """Whether an operator returns its operand itself."""
    condition = _NOTHING.get(node.target)
    if condition is None:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return isinstance(args[0], Tensor) and condition(*args, **kwargs)


# Operators whose gradients are computed from no value of their operands or results, but for indices and masks.
_KEEPS_NOTHING = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.neg.default, aten.clone.default, aten.detach.default,
        aten.cat.default, aten.stack.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
        aten.add_.Tensor, aten.sub_.Tensor, aten.copy_.default, aten._to_copy.default, aten.to.dtype,
        aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, operator.getitem,
    }
)  # fmt: skip


class Memory:
    """Follows nodes in their order; the keys of all tables are nodes."""

    def __init__(self) -> None:
        self._memory: dict[fx.Node, fx.Node] = {}  # the first node of the same memory
        self._history: dict[fx.Node, fx.Node] = {}  # the same, but what is detached begins anew
        self._grad: dict[fx.Node, set[fx.Node]] = {}  # memory -> its histories with a gradient
        self._without: dict[fx.Node, fx.Node] = {}  # what stands for a node where gradients are off -> that node
        self._hidden: dict[fx.Node, fx.Node] = {}  # memory -> what wrote to it behind a gradient's back
        self._kept: dict[fx.Node, fx.Node] = {}  # memory -> the first operator whose gradient may need its numbers
        self._spoilt: list[tuple[fx.Node, fx.Node]] = []  # what writes to such memory, and that operator

    def needs_grad(self, node: fx.Node) -> bool:
        """Whether ``node`` has a gradient by now; a write to a view of it may have brought one."""
        return self._history.get(node, node) in self._grad.get(self._memory.get(node, node), ())

    def marks(self, node: fx.Node) -> None:
        """``node`` has a gradient from now on, and so have its views."""
        self._grad.setdefault(self._memory.get(node, node), set()).add(self._history.get(node, node))

    def stands_for(self, detached: fx.Node, node: fx.Node) -> None:
        """``detached`` was appended, to be ``node`` to operators where gradients are off."""
        self._without[detached] = node
        self.follows(detached)

    def follows(self, made: fx.Node) -> None:
        """``made`` was appended.

        Raises :class:`UnsupportedError` where it reads what was written behind its gradient's back.
        """
        target, source = made.target, made.args[0] if made.args else None
        detaches = target in (aten.detach.default, aten.detach_.default)
        for operand in () if detaches else made.all_input_nodes:
            self.reads(operand)
        brings = not detaches and any(self.needs_grad(n) for n in made.all_input_nodes)
        pieces = target is operator.getitem and source in self._memory
        if isinstance(source, fx.Node) and (pieces or _is_alias(made, source)):
            self._memory[made] = self._memory.get(source, source)
            if _is_in_place(target):
                source = self._without.get(source, source)  # it returns the very tensor
            if not detaches:
                self._history[made] = self._history.get(source, source)
        for written in _written(made):
            self._writes(made, written)
            if brings and _is_in_place(target):
                self.marks(written)
            memory = self._memory.get(written, written)
            if not self.needs_grad(written) and self._grad.get(memory):
                self._hidden.setdefault(memory, made)
        if brings:
            self.marks(made)
            alias = isinstance(source, fx.Node) and _is_alias(made, source) and not _is_in_place(target)
            for kept in () if alias or target in _KEEPS_NOTHING else (*made.all_input_nodes, made):
                self._kept.setdefault(self._memory.get(kept, kept), made)

    def _writes(self, made: fx.Node, written: fx.Node) -> None:
        """Note where ``made`` writes, by ``.data`` or ``detach()``, to what is kept."""
        memory = self._memory.get(written, written)
        apart = written not in self._without and self._history.get(written, written) is not memory
        trained = memory.op == "placeholder" and self.needs_grad(memory)  # which may not be changed at all
        if apart and memory in self._kept and memory is not written and not trained:
            self._spoilt.append((made, self._kept[memory]))

    def finish(self) -> None:
        """Raises :class:`UnsupportedError` if some operator's gradient would be computed from numbers written later."""
        for writer, reader in self._spoilt:
            raise UnsupportedError(
                f"forward changes a tensor in place by .data or detach() ({_text(writer)}) after an operator has read "
                f"it ({_text(reader)}), whose gradient torch would compute from the new numbers; change it before it "
                "is read, or set new ones (x.data = ...)"
            )

    def reads(self, node: fx.Node) -> None:
        """Raises :class:`UnsupportedError` if ``node`` was written behind its gradient's back."""
        writer = self._hidden.get(self._memory.get(node, node))
        if writer is not None and self.needs_grad(node):
            raise UnsupportedError(
                f"forward changes a tensor in place behind the back of its gradient ({_text(writer)}) and reads it "
                "afterwards; change a copy, or write what is meant: y = y + (changed - y).detach() for other numbers "
                "under the old gradient, y = changed without torch.no_grad() for the gradient of the change"
            )


def _text(node: fx.Node) -> str:
    """An operator's name and line."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return f"{name}, {source_of(node.meta.get('stack_trace')) or 'under torch.no_grad() or after detach()'}"


def _is_alias(made: fx.Node, source: fx.Node) -> bool:
    """Whether ``made`` has the memory of ``source``, its first argument, as far as the operator's schema tells."""
    schema = getattr(made.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return False
    return _dtype(made) is None or _dtype(made) == _dtype(source)  # ``to`` another type copies


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _written(node: fx.Node) -> list[fx.Node]:
    """What an operator writes to; where it changes shapes alone, nothing."""
    shapes_alone = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags
    return [] if shapes_alone else written_by(node)


def _is_in_place(target: Any) -> bool:
    """Whether what is written has the operator's gradient; the statistics that a norm keeps have none."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.endswith("_")
