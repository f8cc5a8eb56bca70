"""Rows that a mask selects, at a fixed size.

``x[mask]``, ``torch.where(mask)`` and ``mask.nonzero()`` have as many rows as ``mask`` has ones, ``x.split(counts)`` as
many as are counted, which no plan can know beforehand. Here every row is kept, with the mask beside it. What works on
each row by itself (which its factor rule says) goes on all of them; what adds rows up, counts them or puts them back
leaves out those that the mask does not select. The result is the same, for the work of all rows.

Requires: nodes of an exported program, in order. Provides: the same operators with static shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from passes.choices import RESHAPES, undone
from passes.infer import META, call
from passes.numbers import Numbers
from passes.rules import factors_of
from passes.rules.algebra import operands_of
from passes.selected_places import Counted, Place, Rows, Size, Unselectable
from passes.selected_rules import SPECIAL

aten = torch.ops.aten

_SOURCES = {aten.index.Tensor, aten.where.default, aten.nonzero.default, aten.nonzero_numpy.default,
            aten.split_with_sizes.default, aten.split.sizes}  # fmt: skip
_IN_ORDER = {aten.split_with_sizes.default, aten.split.sizes, aten.masked_scatter.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.matmul.default,
         aten.linear.default, aten.einsum.default}  # fmt: skip
_KEEPS_PLACES = {aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default,
                 aten.flatten.using_ints, aten.contiguous.default}  # fmt: skip
_ASSERTS = {aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default}
_GUARDED: dict[Any, tuple[int, int]] = {  # an operand that not every number may be, and one that it may be
    **dict.fromkeys((aten.index_select.default, aten.gather.default), (2, 0)),
    aten.embedding.default: (1, 0),
    aten.one_hot.default: (0, 0),
    **dict.fromkeys((aten.div.Tensor, aten.div.Tensor_mode, aten.remainder.Tensor, aten.pow.Tensor_Tensor), (1, 1)),
    **dict.fromkeys((aten.reciprocal.default, aten.sqrt.default, aten.rsqrt.default, aten.log.default,
                     aten.log2.default, aten.log10.default, aten.pow.Tensor_Scalar), (0, 1)),
}  # fmt: skip
_STRIDE_FREE: dict[Any, Any] = {aten.view.default: aten.reshape.default}  # strides are not those of the fewer rows


class SelectedRows:
    """Appends operators on selected rows to ``graph``; those of ``nodes`` that are among them are to be copied."""

    def __init__(self, graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
        self.graph = graph
        self.in_order = any(_reads_in_order(n) for n in nodes)  # whether rows have to be in the condition's order
        self.rows: dict[fx.Node, Rows] = {}
        self.places: dict[fx.Node, Place] = {}  # coordinates of a mask's ones
        self.pairs: dict[int, list[fx.Node]] = {}  # the same of what chooses the places of a condition, by its key
        self.read: dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = {}  # rows -> (of what, by which indices)
        self.pieces: dict[fx.Node, tuple[fx.Node, int, int]] = {}  # a piece's mask -> (of what, which, of how many)
        self._masks: dict[Any, fx.Node] = {}
        self._filled: dict[fx.Node, int] = {}  # rows -> what those have that are not selected
        self.key = Numbers()  # conditions that are computed alike have the same
        self._where: dict[str, Any] = {}

    def concerns(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
        """Whether ``node`` selects rows, reads some, or comes of what did."""
        given = [env.get(n) for n in node.all_input_nodes]
        kinds = (Size, Counted, tuple, int)
        return _is_open(node.meta.get("val")) or any(isinstance(g, kinds) or g in self.rows for g in given)

    def copy(self, node: fx.Node, env: Mapping[fx.Node, Any], where: dict[str, Any]) -> Any:
        """What stands for ``node``: a node, a tuple of nodes, or a :class:`Size`.

        Raises :class:`Unselectable`.
        """
        self._where = where
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.target is operator.getitem:
            whole, index = args
            return whole[index] if isinstance(whole, tuple) else self.call(operator.getitem, whole, index)
        if node.target is aten.sym_size.int:
            rows = self.rows.get(args[0])
            if rows is not None and args[1] % args[0].meta["val"].dim() == rows.dim:
                return Size(rows.mask)
            return int(args[0].meta["val"].shape[args[1]])
        if node.target in _ASSERTS:  # what torch.export asserts of what the model selects
            return None
        if not isinstance(node.target, torch._ops.OpOverload):
            return Counted() if _counted(args, Size, Counted) else node.target(*args)  # type: ignore[operator]
        if _counted((args, kwargs), Counted):
            raise Unselectable
        special = SPECIAL.get(node.target)
        if special is not None and not (node.target in _SOURCES or any(n in self.rows for n in _nodes(args))):
            special = None
        made = special(self, *args, **kwargs) if special is not None else None
        return self._by_rule(node, args, kwargs) if made is None else made

    # -- what every operator does by its rule -----------------------------------------------------------------------

    def _by_rule(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        sized = [a for a in args if isinstance(a, list | tuple) for a in a if isinstance(a, Size)]
        flat_args, flat_kwargs = fx.node.map_aggregate((args, kwargs), lambda a: int(a) if isinstance(a, Size) else a)
        flat_args, flat_kwargs = fx.node.map_aggregate((flat_args, flat_kwargs), _on_meta)
        if any(isinstance(a, Size) for a in (*args, *kwargs.values())):
            raise Unselectable  # a number of rows that is computed with
        at, number = _GUARDED.get(node.target, (0, None))
        if number is not None and flat_args[at] in self.rows:
            flat_args = (*flat_args[:at], self.harmless(flat_args[at], number), *flat_args[at + 1 :])
        try:
            made = self.call(_STRIDE_FREE.get(node.target, node.target), *flat_args, **flat_kwargs)
        except Exception as error:  # what it makes depends on numbers
            raise Unselectable from error
        operands = operands_of(made)
        masks = {self.rows[o].mask for o in operands if o in self.rows} | {s.mask for s in sized}
        if not masks and not _is_open(made.meta["val"]):
            return made  # rows that were put together again
        if len(masks) != 1:
            raise Unselectable
        (mask,) = masks
        found = {s for a in args if isinstance(a, list | tuple) for s, x in enumerate(a) if isinstance(x, Size)}
        if not any(o in self.rows for o in operands) or node.target is aten.expand.default:
            return self._mark(made, mask, found) if found else self._refuse()
        dims = self._row_dims(node.target, made, operands)
        if dims is None:
            zeroed = [self.zeroed(o) if o in self.rows else o for o in operands]
            return self.call(made.target, *_replaced(flat_args, operands, zeroed), **flat_kwargs)
        if node.target in _KEEPS_PLACES and operands[0] in self.places and made.meta["val"].dim() == 1:
            self.places[made] = self.places[operands[0]]
        return self._mark(made, mask, dims)

    def _row_dims(self, target: Any, made: fx.Node, operands: tuple[fx.Node, ...]) -> set[int] | None:
        """The dim of each result that has the rows; ``None``: they are added up."""
        factors = factors_of(made)
        if factors is None:
            raise Unselectable
        names = set()
        for operand, dims in zip(operands, factors.operands, strict=True):
            if operand in self.rows:
                names.add(dims[self.rows[operand].dim])
        if len(names) != 1 or len(next(iter(names))) != 1:
            raise Unselectable
        ((name,),) = names
        coupled = name in factors.whole or name in factors.lower
        if coupled or (factors.spans is not None and factors.spans.factor == name):
            raise Unselectable
        spots = {d for dims in factors.results for d, held in enumerate(dims) if held == (name,)}
        inner = any(name in held and held != (name,) for dims in factors.results for held in dims)
        if len(spots) == 1 and not inner and all((name,) in dims for dims in factors.results):
            return spots
        if not spots and not inner and target in _SUMS:
            return None
        raise Unselectable

    def _mark(self, made: fx.Node, mask: fx.Node, dims: set[int]) -> Any:
        if len(dims) != 1:
            raise Unselectable
        (dim,) = dims
        if isinstance(made.meta["val"], tuple):
            parts = tuple(self.call(operator.getitem, made, i) for i in range(len(made.meta["val"])))
            self.rows.update(dict.fromkeys(parts, Rows(mask, dim)))
            return parts
        self.rows[made] = Rows(mask, dim)
        return made

    def _refuse(self) -> Any:
        raise Unselectable

    # -- helpers ----------------------------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = call(self.graph, target, args, kwargs)
        made.meta.update(self._where)
        return made

    def mask_of(self, condition: fx.Node) -> fx.Node:
        """The flat mask of a condition; one for all that are computed alike."""
        condition = undone(condition)
        while condition.target in RESHAPES:
            condition = undone(condition.args[0])
        key = self.key(condition)
        if key not in self._masks:
            value = condition.meta["val"]
            flat = condition if value.dtype == torch.bool else self.call(aten.ne.Scalar, condition, 0)
            self._masks[key] = flat if value.dim() == 1 else self.call(aten.reshape.default, flat, [value.numel()])
        return self._masks[key]

    def harmless(self, value: fx.Node, number: int | None = None) -> fx.Node:
        """``value`` with ``number`` in the rows that are not selected, or ones (zeros, of whole numbers): what these
        hold may be what the model selects rows to avoid (a division by zero, an index of -100)."""
        dtype = value.meta["val"].dtype
        number = int(dtype.is_floating_point) if number is None else number
        if dtype == torch.bool or self._filled.get(value) == number or (number == 0 and value in self.places):
            return value
        filled = self.call(aten.masked_fill.Scalar, value, self.unselected(value), number)
        self.rows[filled], self._filled[filled] = self.rows[value], number
        return filled

    def unselected(self, value: fx.Node) -> fx.Node:
        """``[.., rows, ..]`` truth values that broadcast to ``value``: which of its rows are not the model's."""
        rows = self.rows[value]
        shape = [1] * value.meta["val"].dim()
        shape[rows.dim] = rows.mask.meta["val"].shape[0]
        left_out = self.call(aten.logical_not.default, rows.mask)
        return left_out if shape == [shape[0]] else self.call(aten.reshape.default, left_out, shape)

    def zeroed(self, value: fx.Node) -> fx.Node:
        return self.call(aten.masked_fill.Scalar, value, self.unselected(value), 0)

    def same(self, *values: Any) -> Rows:
        """The rows that the values have in common."""
        found = {self.rows[v] for v in values if v in self.rows}
        if len(found) != 1 or any(v not in self.rows for v in values):
            raise Unselectable
        return next(iter(found))


def _reads_in_order(node: fx.Node) -> bool:
    """Whether ``node`` tells selected rows apart by their number."""
    given = [node, *node.all_input_nodes] if node.target in _IN_ORDER else []
    return any(_is_open(n.meta.get("val")) for n in given)


def _is_open(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and not all(isinstance(s, int) for s in v.shape) for v in values)


def _counted(args: Any, *kinds: type) -> bool:
    found = list[Any]()
    fx.node.map_aggregate(args, lambda a: found.append(a) or a)  # type: ignore[func-returns-value]
    return any(isinstance(a, kinds) for a in found)


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _on_meta(argument: Any) -> Any:
    return META if isinstance(argument, torch.device) else argument


def _replaced(args: Any, old: tuple[fx.Node, ...], new: list[fx.Node]) -> Any:
    instead = dict(zip(old, new, strict=True))
    return fx.node.map_arg(args, lambda n: instead.get(n, n))
