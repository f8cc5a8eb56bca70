"""Rows that a mask selects, at a fixed size.

``x[mask]``, ``torch.where(mask)`` and ``mask.nonzero()`` have as many rows as ``mask`` has ones, ``x.split(counts)`` as
many as are counted, which no plan can know beforehand. Here every row is kept, with the mask beside it. What works on
each row by itself (which its factor rule says) goes on all of them; what adds rows up, counts them or puts them back
leaves out those that the mask does not select. The result is the same, for the work of all rows.

Requires: nodes of an exported program, in order. Provides: the same operators with static shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.infer import META, call
from passes.rules import factors_of
from passes.rules.algebra import operands_of

aten = torch.ops.aten

_SOURCES = {aten.index.Tensor, aten.where.default, aten.nonzero.default, aten.nonzero_numpy.default,
            aten.split_with_sizes.default, aten.split.sizes}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.matmul.default,
         aten.linear.default, aten.einsum.default}  # fmt: skip
_KEEPS_PLACES = {aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default,
                 aten.flatten.using_ints, aten.contiguous.default}  # fmt: skip
_STRIDE_FREE: dict[Any, Any] = {aten.view.default: aten.reshape.default}  # strides are not those of the fewer rows
_ITEMS = {aten.item.default, aten._local_scalar_dense.default}
_IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """Dim ``dim`` of a value has all rows; those of which ``mask`` (bool, one per row) is true are the model's."""

    mask: fx.Node
    dim: int


@dataclass(frozen=True)
class Size:
    """The number of rows that ``mask`` selects, where the model asks for a size."""

    mask: fx.Node

    def __int__(self) -> int:
        return int(self.mask.meta["val"].shape[0])


class Unselectable(Exception):
    """An operator that cannot work on rows with a mask beside them."""


class SelectedRows:
    """Appends operators on selected rows to ``graph``."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.rows: dict[fx.Node, Rows] = {}
        self.places: dict[fx.Node, tuple[fx.Node, int]] = {}  # coordinate number i of a mask's ones -> (mask, i)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}  # of the masks before they were flattened
        self.pieces: dict[fx.Node, tuple[fx.Node, int, int]] = {}  # a piece's mask -> (of what, which, of how many)
        self._masks: dict[Any, fx.Node] = {}
        self._keys: dict[fx.Node, Any] = {}
        self._where: dict[str, Any] = {}

    def concerns(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
        """Whether ``node`` selects rows, reads some, or comes of what did."""
        given = [env.get(n) for n in node.all_input_nodes]
        return _is_open(node.meta.get("val")) or any(isinstance(g, Size | tuple | int) or g in self.rows for g in given)

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
        if not isinstance(node.target, torch._ops.OpOverload):  # sizes are compared, and the result is only asserted
            return node.target(*(int(a) if isinstance(a, Size) else a for a in args))  # type: ignore[operator]
        special = _SPECIAL.get(node.target)
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
        key = self._key(condition)
        if key not in self._masks:
            value = condition.meta["val"]
            flat = condition if value.dtype == torch.bool else self.call(aten.ne.Scalar, condition, 0)
            flat = flat if value.dim() == 1 else self.call(aten.reshape.default, flat, [value.numel()])
            self._masks[key] = flat
            self.shapes[flat] = tuple(value.shape)
        return self._masks[key]

    def _key(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return node.name
        if node not in self._keys:
            args = fx.node.map_arg((node.args, node.kwargs), self._key)
            self._keys[node] = (str(node.target), str(args))
        return self._keys[node]

    def harmless(self, value: fx.Node) -> fx.Node:
        """``value`` with ones (zeros, of whole numbers) in the rows that are not selected: what they hold may be what
        the model selects rows to avoid (a division by zero, an index of -100)."""
        dtype = value.meta["val"].dtype
        if dtype == torch.bool:
            return value
        filled = self.call(aten.masked_fill.Scalar, value, self.unselected(value), int(dtype.is_floating_point))
        self.rows[filled] = self.rows[value]
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


# --- operators that select, put back, count or ignore rows ------------------------------------------------------------


def _nonzero(build: SelectedRows, condition: fx.Node, as_tuple: bool = True) -> Any:
    if condition in build.rows:
        raise Unselectable
    mask = build.mask_of(condition)
    shape, number = build.shapes[mask], int(mask.meta["val"].shape[0])
    every = build.call(aten.arange.default, number, dtype=torch.int64, device=META)
    found, inner = [], number
    for i, size in enumerate(shape):
        inner //= size
        place = every if inner == 1 else build.call(aten.div.Tensor_mode, every, inner, rounding_mode="floor")
        place = place if i == 0 else build.call(aten.remainder.Scalar, place, size)
        found.append(place if place is not every else build.call(aten.clone.default, every))
        build.places[found[-1]] = mask, i
    if as_tuple:
        build.rows.update(dict.fromkeys(found, Rows(mask, 0)))
        return tuple(found)
    table = build.call(aten.stack.default, found, -1)
    build.rows[table] = Rows(mask, 0)
    if len(found) == 1:
        build.places[table] = mask, 0
    return table


def _index(build: SelectedRows, x: fx.Node, indices: Any) -> Any:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    first, index = given[0]
    if index.meta["val"].dtype == torch.bool and index not in build.rows:
        if len(given) != 1 or x in build.rows:
            raise Unselectable
        mask = build.mask_of(index)
        shape = list(x.meta["val"].shape)
        covered = index.meta["val"].dim()
        flat = [*shape[:first], int(mask.meta["val"].shape[0]), *shape[first + covered :]]
        made = build.call(aten.reshape.default, x, flat)
        build.rows[made] = Rows(mask, first)
        return build.harmless(made)
    if x not in build.rows and not any(i in build.rows for _, i in given):
        return None
    if x in build.rows or [d for d, _ in given] != list(range(first, first + len(given))):
        raise Unselectable
    rows = build.same(*(i for _, i in given))
    if rows.dim != 0 or any(i.meta["val"].dim() != 1 for _, i in given):
        raise Unselectable
    made = build.call(aten.index.Tensor, x, list(indices))
    build.rows[made] = Rows(rows.mask, first)
    return build.harmless(made)


def _index_put(build: SelectedRows, x: fx.Node, indices: Any, values: fx.Node, accumulate: bool = False) -> Any:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    rows = build.rows.get(values)
    if rows is None or x in build.rows:
        raise Unselectable
    first, index = given[0]
    if index.meta["val"].dtype == torch.bool:
        mask, whole = build.mask_of(index), True
    else:
        mask = build.same(*(i for _, i in given)).mask
        places = [build.places.get(i) for _, i in given]
        whole = places == [(mask, k) for k in range(len(build.shapes[mask]))] and first == 0
    if rows.mask is not mask or rows.dim != first:
        raise Unselectable
    shape = list(x.meta["val"].shape)
    if accumulate and not whole:
        return build.call(aten.index_put.default, x, list(indices), build.zeroed(values), True)
    covered = build.shapes[mask]
    if not whole or tuple(shape[first : first + len(covered)]) != covered:
        raise Unselectable
    put = build.zeroed(values) if accumulate else values
    rest = [*shape[:first], int(mask.meta["val"].shape[0]), *shape[first + len(covered) :]]
    put = build.call(aten.reshape.default, build.call(aten.expand.default, put, rest), shape)
    if accumulate:
        return build.call(aten.add.Tensor, x, put)
    chosen = build.call(
        aten.reshape.default, mask, [1] * first + list(covered) + [1] * (len(shape) - first - len(covered))
    )
    return build.call(aten.where.self, chosen, put, x)


def _index_add(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, **kwargs: Any) -> Any:
    if x in build.rows or build.same(index).mask is not build.same(source).mask:
        raise Unselectable
    if build.same(source).dim != dim % x.meta["val"].dim():
        raise Unselectable
    return build.call(aten.index_add.default, x, dim, index, build.zeroed(source), **kwargs)


def _scatter_add(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    if x in build.rows or build.same(index, source).dim != dim % x.meta["val"].dim():
        raise Unselectable
    return build.call(aten.scatter_add.default, x, dim, index, build.zeroed(source))


def _masked_scatter(build: SelectedRows, x: fx.Node, mask: fx.Node, source: fx.Node) -> Any:
    """The source's rows are taken in order: those that are selected come first."""
    rows = build.same(source)
    if x in build.rows or mask in build.rows or rows.dim != 0:
        raise Unselectable
    left_out = build.call(aten.to.dtype, build.call(aten.logical_not.default, rows.mask), torch.int64)
    ordered = build.call(aten.sort.stable, left_out, stable=True, dim=0)
    order = build.call(operator.getitem, ordered, 1)
    return build.call(aten.masked_scatter.default, x, mask, build.call(aten.index_select.default, source, 0, order))


def _split(build: SelectedRows, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Pieces of as many rows as is counted: the piece of each row is told by the running sum of the counts."""
    counts = [size.args[0] for size in sizes if isinstance(size, fx.Node) and size.target in _ITEMS]
    if x in build.rows or len(counts) != len(sizes):
        raise Unselectable
    dim %= x.meta["val"].dim()
    number = int(x.meta["val"].shape[dim])
    every = build.call(aten.arange.default, number, dtype=torch.int64, device=META)
    end, masks = None, list[fx.Node]()
    before: fx.Node | None = None
    for count in counts:
        scalar = build.call(aten.reshape.default, count, [1])
        end = scalar if end is None else build.call(aten.add.Tensor, end, scalar)
        below = build.call(aten.lt.Tensor, every, end)
        inside = below if before is None else build.call(aten.logical_and.default, below, before)
        before = build.call(aten.logical_not.default, below)
        masks.append(inside)
    found = []
    for i, mask in enumerate(masks):
        build.pieces[mask] = x, i, len(masks)
        build.shapes[mask] = (number,)
        piece = build.call(aten.alias.default, x)
        build.rows[piece] = Rows(mask, dim)
        found.append(piece)
    return tuple(found)


def _cat(build: SelectedRows, parts: Any, dim: int = 0) -> Any:
    """Pieces that are put together in the order in which they were cut."""
    rows = [build.rows.get(part) for part in parts]
    cut = [build.pieces.get(r.mask) for r in rows if r is not None]
    if (
        not cut
        or len(cut) != len(parts)
        or cut[0] is None
        or cut != [(cut[0][0], i, len(parts)) for i in range(len(cut))]
    ):
        raise Unselectable
    if any(r is None or r.dim != dim % parts[0].meta["val"].dim() for r in rows):
        raise Unselectable
    whole = parts[-1]
    for part in reversed(parts[:-1]):
        whole = build.call(aten.where.self, build.unselected(part), whole, part)
    return whole


def _mean(build: SelectedRows, x: fx.Node, *, dtype: Any = None) -> Any:
    return _mean_over(build, x, list(range(x.meta["val"].dim())), dtype=dtype)


def _mean_over(build: SelectedRows, x: fx.Node, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    rows, value = build.same(x), x.meta["val"]
    dims = [d % value.dim() for d in (dims if dims else range(value.dim()))]
    if rows.dim not in dims:
        return None
    total = build.call(aten.sum.dim_IntList, build.zeroed(x), dims, keepdim, dtype=dtype)
    others = 1
    for d in dims:
        others *= value.shape[d] if d != rows.dim else 1
    number = build.call(aten.mul.Tensor, build.call(aten.sum.default, rows.mask), others)
    return build.call(aten.div.Tensor, total, number)


def _cross_entropy(
    build: SelectedRows,
    x: fx.Node,
    target: fx.Node,
    weight: Any = None,
    reduction: int = 1,
    ignored: int = _IGNORED,
    *more: Any,
) -> Any:
    """What is not selected has a target that is ignored."""
    value: Tensor = target.meta["val"]
    rows = build.same(target)
    if value.is_floating_point() or (x in build.rows and build.rows[x] != rows) or reduction == 0:
        raise Unselectable
    kept = build.call(aten.masked_fill.Scalar, target, build.unselected(target), ignored)
    return build.call(aten.cross_entropy_loss.default, x, kept, weight, reduction, ignored, *more)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.split_with_sizes.default: _split,
    aten.split.sizes: _split,
    aten.cat.default: _cat,
    aten.where.default: _nonzero,
    aten.nonzero_numpy.default: _nonzero,
    aten.nonzero.default: lambda build, condition: _nonzero(build, condition, as_tuple=False),
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.scatter_add.default: _scatter_add,
    aten.masked_scatter.default: _masked_scatter,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_over,
    aten.cross_entropy_loss.default: _cross_entropy,
}


def _is_open(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and not all(isinstance(s, int) for s in v.shape) for v in values)


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _on_meta(argument: Any) -> Any:
    return META if isinstance(argument, torch.device) else argument


def _replaced(args: Any, old: tuple[fx.Node, ...], new: list[fx.Node]) -> Any:
    instead = dict(zip(old, new, strict=True))
    return fx.node.map_arg(args, lambda n: instead.get(n, n))
