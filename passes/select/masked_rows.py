"""Rewrite operators on rows that a mask selects so that shapes are static: all rows are kept, together with the mask.

``x[mask]``, ``torch.where(mask)`` and ``mask.nonzero()`` have as many rows as ``mask`` has true elements, and the parts
of ``x.split(counts)`` have sizes that are computed from data. A plan cannot know these numbers. The rewrite keeps every
row, and records the mask. Operators that compute each row by itself (according to their factor rules in
``passes/rules``) run on all rows. Operators that add rows up, count them or write them back skip the rows that the mask
does not select. The result is equal, at the cost of computing all rows.

Requires: nodes of an exported program, in order. Provides: equivalent operators with static shapes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.experts.routing_masks import RESHAPES, skip_inverse_squeezes
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.value_numbering import ValueNumbers
from partitioner.passes.normalize.decompose import trace_decomposition
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import operands_of
from partitioner.passes.select.class_counts import ASSERTS, COUNTING, count_classes
from partitioner.passes.select.masked_row_ops import (
    ALL_ROWS,
    INSTEAD,
    MaskCoordinate,
    MaskedRowCount,
    MaskedRows,
    Unselectable,
    add_rows,
    rewrite_index_copy,
    rewrite_index_put,
    rewrite_index_select,
    rewrite_mask_indices,
    take_rows,
    take_where,
)
from partitioner.passes.select.selected_numbers import (
    ITEMS,
    ComputedSize,
    append_with_tensors,
    compute_number,
    is_number,
)
from partitioner.passes.select.selected_statistics import STATISTICS

aten = torch.ops.aten


def _scatter_add(build: SelectedRows, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    """Rewrite ``scatter_add(x, dim, index, source)`` with static shapes. ``index`` and ``source`` keep all rows,
    although the original model selects some of them by one mask, recorded for both in ``build.rows``. Rows that the
    mask does not select add zero at index 0. Return the new node. Raise :class:`Unselectable` if ``index`` and
    ``source`` have no common mask along ``dim``.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    if x in build.rows or build.find_common_rows(index, source).dim != dim % x.meta["val"].dim():
        raise Unselectable
    return build.insert_call(
        aten.scatter_add.default, x, dim, build.fill_unselected_with(index, 0), build.zero_unselected(source)
    )


def _rewrite_masked_scatter(build: SelectedRows, x: fx.Node, mask: fx.Node, source: fx.Node) -> Any:
    """Rewrite ``masked_scatter(x, mask, source)`` with static shapes, and return the new node. ``source`` keeps all
    rows, although the original model selects some of them by another mask, ``build.rows[source]``. The operator takes
    rows of ``source`` in order, so the selected rows are sorted to the front. Raise :class:`Unselectable` if no mask
    along dim 0 is recorded for ``source``, or if one is recorded for ``x`` or ``mask``.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    rows = build.find_common_rows(source)
    if x in build.rows or mask in build.rows or rows.dim != 0:
        raise Unselectable
    left_out = build.insert_call(aten.to.dtype, build.insert_call(aten.logical_not.default, rows.mask), torch.int64)
    ordered = build.insert_call(aten.sort.stable, left_out, stable=True, dim=0)
    order = build.insert_call(operator.getitem, ordered, 1)
    return build.insert_call(
        aten.masked_scatter.default, x, mask, build.insert_call(aten.index_select.default, source, 0, order)
    )


def _split_by_counts(build: SelectedRows, x: fx.Node, sizes: Any, dim: int = 0) -> Any:
    """Rewrite a split of ``x`` along ``dim`` into pieces of data-dependent sizes with static shapes. Return a tuple
    with a node for each piece. Each node keeps all rows of ``x``. The mask of the rows of its piece is computed from
    the running sum of the sizes, and recorded in ``build.rows``.

    ``build``: the rewriter, which appends operators to the new graph. ``sizes``: the sizes of the pieces, as nodes of
    ``item()``. Raise :class:`Unselectable` for other sizes.
    """
    counts = [size.args[0] for size in sizes if isinstance(size, fx.Node) and size.target in ITEMS]
    if x in build.rows or len(counts) != len(sizes):
        raise Unselectable
    dim %= x.meta["val"].dim()
    number = int(x.meta["val"].shape[dim])
    every = build.insert_call(aten.arange.default, number, dtype=torch.int64, device=META)
    end, masks = None, list[fx.Node]()
    before: fx.Node | None = None
    for count in counts:
        scalar = build.insert_call(aten.reshape.default, count, [1])
        end = scalar if end is None else build.insert_call(aten.add.Tensor, end, scalar)
        below = build.insert_call(aten.lt.Tensor, every, end)
        inside = below if before is None else build.insert_call(aten.logical_and.default, below, before)
        before = build.insert_call(aten.logical_not.default, below)
        masks.append(inside)
    found = []
    for i, mask in enumerate(masks):
        build.pieces[mask] = x, i, len(masks)
        piece = build.insert_call(aten.alias.default, x)
        build.rows[piece] = MaskedRows(mask, dim)
        found.append(piece)
    return tuple(found)


def _concatenate_parts(build: SelectedRows, parts: Any, dim: int = 0) -> Any:
    """Rewrite a ``cat`` of ``parts`` along ``dim`` with static shapes, if the original model selects rows of some parts
    along ``dim`` by masks. Such a part keeps all rows, with its mask in ``build.rows``; so does the result. Return the
    new node. If the plain operator can be used, return ``None``.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    rows, dim = [build.rows.get(part) for part in parts], dim % parts[0].meta["val"].dim()
    if all(r is not None and r.dim != dim for r in rows) or any(r is not None and r.dim != dim for r in rows):
        return None
    joined = _join_pieces(build, parts, rows)
    return _concatenate_rows(build, parts, dim) if joined is None else joined


def _join_pieces(build: SelectedRows, parts: Any, rows: list[MaskedRows | None]) -> fx.Node | None:
    """If ``parts`` are all pieces of one data-dependent split, in order, return a node of their concatenation;
    otherwise return ``None``. Each piece keeps all rows of the split tensor, with a mask of the piece's rows. The
    concatenation takes each row from the piece to which it belongs, by one ``where`` for each piece.

    ``build``: the rewriter, which appends operators to the new graph. ``rows``: the mask of each part; ``None`` for a
    part without one.
    """
    cut = [build.pieces.get(r.mask) for r in rows if r is not None]
    if not cut or len(cut) != len(parts) or cut[0] is None:
        return None
    if cut != [(cut[0][0], i, len(parts)) for i in range(len(cut))]:
        return None
    whole: fx.Node = parts[-1]
    for part in reversed(parts[:-1]):
        whole = build.insert_call(aten.where.self, build.mask_unselected(part), whole, part)
    return whole


def _concatenate_rows(build: SelectedRows, parts: Any, dim: int) -> fx.Node:
    """Concatenate the tensors ``parts`` along ``dim``, their dim of rows, and their masks. Return the new node, for
    which the joined mask is recorded in ``build.rows``. Each part keeps all rows, although the original model selects
    only those for which its mask is true; a part without a mask is selected as a whole.

    If all parts have the same size, their rows are interleaved, so that the rows of one sample of the batch stay
    together.

    ``build``: the rewriter, which appends operators to the new graph.
    """
    sizes = [int(part.meta["val"].shape[dim]) for part in parts]
    masks = [_get_row_mask(build, part, size) for part, size in zip(parts, sizes, strict=True)]
    in_turn = len(set(sizes)) == 1
    first, *others = masks

    def joined() -> fx.Node:
        if not in_turn:
            return build.insert_call(aten.cat.default, masks)
        return build.insert_call(aten.reshape.default, build.insert_call(aten.stack.default, masks, 1), [sum(sizes)])

    mask = build.get_or_make(first, ("cat", *others), joined)
    if in_turn or build.unordered.intersection(masks):
        build.unordered.add(mask)
    if in_turn:
        result = build.insert_call(aten.stack.default, parts, dim + 1)
        shape = list(parts[0].meta["val"].shape)
        result = build.insert_call(aten.reshape.default, result, [*shape[:dim], sum(sizes), *shape[dim + 1 :]])
    else:
        result = build.insert_call(aten.cat.default, parts, dim)
    build.rows[result] = MaskedRows(mask, dim)
    return result


def _get_row_mask(build: SelectedRows, part: fx.Node, size: int) -> fx.Node:
    """Return the node of the mask of the rows of ``part`` that the original model selects, shape ``[size]``. If no mask
    is recorded for ``part``, return one that is true everywhere.

    ``build``: the rewriter, which appends operators to the new graph and records masks.
    """
    if part in build.rows:
        return build.rows[part].mask
    if size not in build.all_of:
        build.all_of[size] = build.insert_call(aten.full.default, [size], True, dtype=torch.bool, device=META)
    return build.all_of[size]


def _make_reshape_rule(target: Any) -> Callable[..., Any]:
    """Return a function that rewrites the reshape operator ``target`` of a tensor that keeps all rows, although the
    original model selects some of them by a mask. If the reshape merges the dim of rows with other dims, or splits it,
    the function also reshapes the mask."""

    def rule(build: SelectedRows, x: fx.Node, *args: Any) -> Any:
        """Append a reshape of ``x`` to the new graph and return its node. Before that, record the mask and the dim of
        rows of the result in ``build.rows``. Raise :class:`Unselectable` if no dim of the result is a dim of rows.

        ``build``: the rewriter. ``x``: a tensor that keeps all rows, although the original model selects some of them
        by the mask ``build.rows[x]``. ``args``: the further arguments of the reshape.
        """
        try:
            return build.apply_by_sharding_rule(target, (x, *args), {})
        except Unselectable:
            result = build.apply_by_sharding_rule(
                target, (build.insert_call(aten.alias.default, x), *args), {}, plain=True
            )
        rows, before, after = build.rows[x], tuple(x.meta["val"].shape), tuple(result.meta["val"].shape)
        apart = build.flattened.get(rows.mask)
        for dim in range(len(after)):
            ahead = math.prod(after[:dim])
            if apart is not None and ahead == math.prod(before[: rows.dim]):
                mask, sizes, at = apart
                if after[dim : dim + len(sizes)] == sizes:
                    build.rows[result] = MaskedRows(mask, dim + at)
                    return result
            for start in range(rows.dim + 1):
                for end in range(rows.dim + 1, len(before) + 1):
                    sizes = before[start:end]
                    if math.prod(before[:start]) == ahead and math.prod(sizes) == after[dim] and len(sizes) > 1:
                        build.rows[result] = MaskedRows(build.expand_row_mask(rows.mask, sizes, rows.dim - start), dim)
                        return result
        raise Unselectable

    return rule


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.split_with_sizes.default: _split_by_counts,
    aten.split.sizes: _split_by_counts,
    aten.cat.default: _concatenate_parts,
    aten.where.default: rewrite_mask_indices,
    aten.nonzero_numpy.default: rewrite_mask_indices,
    aten.nonzero.default: lambda build, condition: rewrite_mask_indices(build, condition, as_tuple=False),
    aten.index.Tensor: take_rows,
    aten.index_put.default: rewrite_index_put,
    aten.index_add.default: add_rows,
    aten.scatter_add.default: _scatter_add,
    aten.masked_scatter.default: _rewrite_masked_scatter,
    aten.masked_select.default: take_where,
    aten.index_select.default: rewrite_index_select,
    aten.index_copy.default: rewrite_index_copy,
    aten.index_fill.int_Scalar: rewrite_index_copy,
    aten.index_fill.int_Tensor: rewrite_index_copy,
    **{target: _make_reshape_rule(target) for target in (*RESHAPES, aten._unsafe_view.default)},
    **STATISTICS,
}

_SOURCES = {aten.index.Tensor, aten.masked_select.default, aten.where.default, aten.nonzero.default,
            aten.nonzero_numpy.default, aten.split_with_sizes.default, aten.split.sizes}  # fmt: skip
_ORDER_DEPENDENT = {aten.split_with_sizes.default, aten.split.sizes, aten.masked_scatter.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.count_nonzero.default,
         aten.count_nonzero.dim_IntList, aten.mm.default, aten.bmm.default, aten.matmul.default,
         aten.linear.default, aten.einsum.default}  # fmt: skip
_PRESERVES_POSITIONS = {aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default,
                 aten.flatten.using_ints, aten.contiguous.default}  # fmt: skip
_CREATION_OPERATORS = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}
# Operators that are not defined for all numbers, such as a division: (position of an operand -> a number that is valid
# there, the operators). Unselected rows get this number.
_GUARDS: tuple[tuple[dict[int, float], tuple[Any, ...]], ...] = (
    ({2: 0}, (aten.index_select.default, aten.gather.default)),
    ({1: 0}, (aten.embedding.default, aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)),
    ({0: 0}, (aten.one_hot.default, aten.exp.default, aten.exp2.default, aten.expm1.default, aten.sinh.default,
              aten.cosh.default, aten.log1p.default, aten.tan.default, aten.asin.default, aten.acos.default,
              aten.atanh.default, aten.erfinv.default)),
    ({0: 1}, (aten.reciprocal.default, aten.sqrt.default, aten.rsqrt.default, aten.log.default, aten.log2.default,
              aten.log10.default, aten.pow.Tensor_Scalar, aten.lgamma.default, aten.digamma.default)),
    ({1: 1}, (aten.div.Tensor, aten.div.Tensor_mode, aten.remainder.Tensor, aten.fmod.Tensor,
              aten.floor_divide.default, aten.kl_div.default)),
    ({0: 1, 1: 1}, (aten.pow.Tensor_Tensor, aten.xlogy.Tensor, aten.atan2.default, aten.poisson_nll_loss.default)),
    ({0: 0.5}, (aten.logit.default,)),
    ({0: 0.5, 1: 0.5}, (aten.binary_cross_entropy.default,)),
    ({0: 2}, (aten.acosh.default,)),
)  # fmt: skip
_GUARDED = {target: numbers for numbers, targets in _GUARDS for target in targets}
# all rows have other strides than selected rows, for which a view may be impossible
_STRIDE_FREE: dict[Any, Any] = {aten.view.default: aten.reshape.default}


class SelectedRows:
    """Copies the nodes of an exported program to the new graph ``graph``, and rewrites operators on rows that a boolean
    mask selects, so that shapes are static: a copied tensor keeps all rows, and the mask of the rows that the original
    model selects is recorded.

    ``rows``: node of such a tensor in the new graph -> its mask and its dim of rows. ``places``: node of the new graph
    that replaces a result of ``torch.where(mask)`` -> the mask and the dim whose indices the node has. ``key``: a
    function that returns equal integers for nodes that compute the same value.
    """

    def __init__(self, graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
        """Start without any masks. ``graph``: the new graph, to which operators are appended. ``nodes``: the nodes that
        will be copied into it; if one of them depends on the order of selected rows, this order is kept."""
        self.graph = graph
        # whether an operator depends on the order of selected rows
        self.in_order = any(_reads_in_order(n) for n in nodes)
        self.rows: dict[fx.Node, MaskedRows] = {}
        self.places: dict[fx.Node, MaskCoordinate] = {}  # coordinates along one dim -> their mask and dim
        self.pairs: dict[int, list[fx.Node]] = {}  # key of a condition -> the coordinates that replace its results
        # rows -> (tensor that they were read from, indices)
        self.read: dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        # mask of a piece -> (tensor that was split, index, number of pieces)
        self.pieces: dict[fx.Node, tuple[fx.Node, int, int]] = {}
        self.numbered: dict[fx.Node, fx.Node] = {}  # node that numbers the selected rows 0, 1, .. -> their mask
        self.flattened: dict[fx.Node, tuple[fx.Node, tuple[int, ...], int]] = {}  # arguments of ``expand_row_mask``
        self.unordered: set[fx.Node] = set()  # masks of rows in another order than in the original model
        self.all_of: dict[int, fx.Node] = {}  # number of rows -> a mask that selects all of them
        self._made: dict[Any, fx.Node] = {}  # cache of ``get_or_make``
        self._masks: dict[Any, fx.Node] = {}
        self._filled: dict[fx.Node, float] = {}  # rows -> the number in the unselected ones
        self.key = ValueNumbers()  # equal integers for equal computations
        self._where: dict[str, Any] = {}

    def concerns_node(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
        """Return whether ``node`` must be rewritten: the size of its result depends on the data, as after a selection
        by a mask, or it reads rows that a mask selects, or it reads a number that the model computes from the data.

        ``env``: original node -> its copy in the new graph.
        """
        given = [env.get(n) for n in node.all_input_nodes]
        kinds = (MaskedRowCount, ComputedSize, tuple, int)
        return _has_dynamic_size(node.meta.get("val")) or any(
            isinstance(g, kinds) or g in self.rows or (isinstance(g, fx.Node) and g.target in ITEMS) for g in given
        )

    def reads_rows(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
        """Return whether ``node`` selects rows by a mask, reads rows that a mask selects, or reads the number of such
        rows. A number that the model takes out of a tensor by ``item()`` does not count.

        ``env``: original node -> its copy in the new graph.
        """
        given = [env.get(n) for n in node.all_input_nodes]
        return _has_dynamic_size(node.meta.get("val")) or any(
            isinstance(g, MaskedRowCount | tuple) or g in self.rows for g in given
        )

    def copy_node(self, node: fx.Node, env: Mapping[fx.Node, Any], where: dict[str, Any]) -> Any:
        """Append operators with static shapes to the new graph that compute what ``node`` computes, and return their
        result: a node, a tuple of nodes, or a data-dependent number. An assertion is left out, and ``None`` is
        returned. Raise :class:`Unselectable` if the operator has no form that keeps all rows.

        Args:
            node: a node of the original graph.
            env: original node -> the result that replaces its result in the new graph.
            where: metadata (module path, source line, module stack) of the new nodes.
        """
        self._where = where
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.target is operator.getitem:
            whole, index = args
            return whole[index] if isinstance(whole, tuple) else self.insert_call(operator.getitem, whole, index)
        if node.target is aten.sym_size.int:
            return self._get_dim_size(*args)
        if node.target in COUNTING:
            return count_classes(self, node, args, kwargs)
        if node.target is aten.sym_numel.default:
            sizes = [self._get_dim_size(args[0], d) for d in range(args[0].meta["val"].dim())]
            return functools.reduce(lambda a, b: compute_number(self, operator.mul, (a, b)), sizes)
        if node.target in ASSERTS:  # an assertion of torch.export on selected rows
            return None
        if not isinstance(node.target, torch._ops.OpOverload):
            return compute_number(self, node.target, args)  # type: ignore[arg-type]
        try:
            result = append_with_tensors(self, node, args, kwargs)
            return self.apply_operator(node.target, *args, **kwargs) if result is None else result
        except Unselectable as raised:
            parts = None if str(raised) else trace_decomposition(node)
            if parts is None:
                instead = INSTEAD.get(getattr(node.target, "overloadpacket", None))
                if instead is None or str(raised):
                    raise
                raise Unselectable(instead) from None
        graph, operands = parts
        return self._copy_parts(graph, [env[n] for n in operands], where)

    def apply_operator(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Append the operator ``target`` with ``args`` and ``kwargs`` to the new graph and return its result (a node or
        a tuple of nodes). Where the original model selects rows of an argument by a mask, the argument keeps all rows
        here. If there is a special rewrite for this operator with such arguments, it is used. Otherwise, according to
        its sharding rule, the operator must compute each row by itself, or sum over rows. Raise :class:`Unselectable`
        if neither is the case."""
        special = SPECIAL.get(target)
        if special is not None and (target in _SOURCES or any(n in self.rows for n in _collect_nodes((args, kwargs)))):
            result = special(self, *args, **kwargs)
            if result is not None:
                return result
        return self.apply_by_sharding_rule(target, args, kwargs)

    def _copy_parts(self, parts: fx.Graph, operands: list[Any], where: dict[str, Any]) -> Any:
        """Append the operators of ``parts``, the graph into which an operator decomposes, to the new graph, rewritten
        with static shapes. Return the result that replaces the operator's result: a node, a tuple of nodes, or a
        data-dependent number.

        ``operands``: the operator's operands in the new graph, one for each placeholder of ``parts``. ``where``:
        metadata (module path, source line, module stack) of the new nodes.
        """
        inner: dict[fx.Node, Any] = dict(zip(parts.find_nodes(op="placeholder"), operands, strict=True))
        for part in parts.nodes:
            if part.op == "output":
                result = fx.node.map_arg(part.args[0], inner.__getitem__)
                return tuple(result) if isinstance(result, list) else result
            if part.op == "call_function":
                inner[part] = self.copy_node(part, inner, where)
        raise AssertionError("a graph ends in an output node")

    def _get_dim_size(self, value: fx.Node, dim: int) -> MaskedRowCount | int:
        """Return the size of the dim ``dim`` of ``value`` in the original model. If ``value`` keeps all rows along this
        dim, although the model selects some of them by a mask, it is a :class:`MaskedRowCount`, which stands for the
        number of selected rows. Otherwise it is an integer."""
        rows, dim = self.rows.get(value), dim % value.meta["val"].dim()
        return MaskedRowCount(rows.mask) if rows is not None and dim == rows.dim else int(value.meta["val"].shape[dim])

    # -- operators that follow their sharding rule ---------------------------------------------------------------------

    def apply_by_sharding_rule(self, target: Any, args: Any, kwargs: Any, *, plain: bool = False) -> Any:
        """Append the operator ``target`` to the new graph, on tensors that keep all rows although the original model
        selects some of them by a mask. According to its sharding rule (see ``passes/rules``), the operator must compute
        each row by itself, or sum over rows. Return its result, a node or a tuple of nodes, after recording the mask of
        its rows. Raise :class:`Unselectable` if the operator combines rows in another way.

        ``args``, ``kwargs``: the operator's arguments in the new graph. ``plain``: if true, no mask is recorded for the
        result.
        """
        sized = [a for a in args if isinstance(a, list | tuple) for a in a if isinstance(a, MaskedRowCount)]
        if any(is_number(a) for a in (*args, *kwargs.values())):
            raise Unselectable  # an argument is a data-dependent number
        flat_args, flat_kwargs = fx.node.map_aggregate((args, kwargs), _replace_row_count)
        flat_args, flat_kwargs = fx.node.map_aggregate((flat_args, flat_kwargs), _to_meta)
        for at, number in _GUARDED.get(target, {}).items():
            if at < len(flat_args) and flat_args[at] in self.rows:
                flat_args = (*flat_args[:at], self.fill_unselected_with(flat_args[at], number), *flat_args[at + 1 :])
        try:
            result = self.insert_call(_STRIDE_FREE.get(target, target), *flat_args, **flat_kwargs)
        except Exception as error:  # the result depends on values of tensors
            raise Unselectable from error
        if plain:
            return result
        operands = operands_of(result)
        masks = {self.rows[o].mask for o in operands if o in self.rows} | {s.mask for s in sized}
        if not masks and not _has_dynamic_size(result.meta["val"]):
            return result  # the result has all rows again
        if len(masks) != 1:
            raise Unselectable
        (mask,) = masks
        if target in _CREATION_OPERATORS or not any(o in self.rows for o in operands):
            found = {
                s for a in args if isinstance(a, list | tuple) for s, x in enumerate(a) if isinstance(x, MaskedRowCount)
            }
            return self._mark_selected_rows(result, mask, found) if found else self._raise_unselectable()
        dims = self._find_row_dims(target, result, operands)
        if dims is None:
            zeroed = [self.zero_unselected(o) if o in self.rows else o for o in operands]
            return self.insert_call(result.target, *_replace_operands(flat_args, operands, zeroed), **flat_kwargs)
        if target in _PRESERVES_POSITIONS and operands[0] in self.places and result.meta["val"].dim() == 1:
            self.places[result] = self.places[operands[0]]
        return self._mark_selected_rows(result, mask, dims)

    def _find_row_dims(self, target: Any, result: fx.Node, operands: tuple[fx.Node, ...]) -> set[int] | None:
        """Return a set with one element, the dim of rows in the results of the operator ``target``. If the operator
        sums over the rows, return ``None``. Raise :class:`Unselectable` if it combines rows in another way.

        ``result``: a node of the operator on tensors that keep all rows, although a mask selects some of them in the
        original model. ``operands``: the operands of ``result``.
        """
        factors = factors_of(result)
        if factors is None:
            raise Unselectable
        names = set()
        for operand, dims in zip(operands, factors.operands, strict=True):
            if operand in self.rows:
                names.add(dims[self.rows[operand].dim])
        if len(names) != 1 or len(next(iter(names))) != 1:
            raise Unselectable
        ((name,),) = names
        if any(o not in self.rows and (name,) in dims for o, dims in zip(operands, factors.operands, strict=True)):
            raise Unselectable(ALL_ROWS)
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

    def _mark_selected_rows(self, result: fx.Node, mask: fx.Node, dims: set[int]) -> Any:
        """Record that the original model has only those rows of ``result``, along the dim in ``dims``, for which
        ``mask`` is true. Return ``result``; if it has several results, return a tuple of them. Raise
        :class:`Unselectable` unless ``dims`` has exactly one element."""
        if len(dims) != 1:
            raise Unselectable
        (dim,) = dims
        if isinstance(result.meta["val"], tuple):
            parts = tuple(self.insert_call(operator.getitem, result, i) for i in range(len(result.meta["val"])))
            self.rows.update(dict.fromkeys(parts, MaskedRows(mask, dim)))
            return parts
        self.rows[result] = MaskedRows(mask, dim)
        return result

    def _raise_unselectable(self) -> Any:
        """Raise :class:`Unselectable`. This is a method so that an expression can raise the error."""
        raise Unselectable

    # -- helpers ----------------------------------------------------------------------------------------------------

    def insert_call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append the operator ``target`` with ``args`` and ``kwargs`` to the new graph, infer its meta value, and
        return its node."""
        result = insert_operator_node(self.graph, target, args, kwargs)
        result.meta.update(self._where)
        return result

    def flatten_condition(self, condition: fx.Node) -> fx.Node:
        """Return a vector node with the elements of the boolean node ``condition``, flattened. For conditions that
        compute the same value, the same node is returned."""
        condition = skip_inverse_squeezes(condition)
        while condition.target in RESHAPES:
            condition = skip_inverse_squeezes(condition.args[0])
        key = self.key(condition)
        if key not in self._masks and (spread := _find_row_condition(condition)) is not None:
            self._masks[key] = self.expand_row_mask(
                self.flatten_condition(spread), (spread.meta["val"].numel(), *_list_row_sizes(condition)), 0
            )
        if key not in self._masks:
            value = condition.meta["val"]
            flat = condition if value.dtype == torch.bool else self.insert_call(aten.ne.Scalar, condition, 0)
            self._masks[key] = (
                flat if value.dim() == 1 else self.insert_call(aten.reshape.default, flat, [value.numel()])
            )
        return self._masks[key]

    def get_or_make(self, mask: fx.Node, kind: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """Return the node that ``make`` builds. If an earlier call had the same ``mask`` and ``kind``, return its node
        instead.

        ``kind``: a hashable key that says what is built from the mask, such as ``"count"``.
        """
        if (mask, kind) not in self._made:
            self._made[mask, kind] = make()
        return self._made[mask, kind]

    def count_selected(self, mask: fx.Node) -> fx.Node:
        """Return a 0-dimensional node with the number of true elements of ``mask``, that is, of the rows that it
        selects."""
        return self.get_or_make(mask, "count", lambda: self.insert_call(aten.sum.default, mask))

    def number_selected(self, mask: fx.Node) -> fx.Node:
        """Return a node ``[rows]`` with the running count, from 1, of the rows that ``mask`` ``[rows]`` selects. Raise
        :class:`Unselectable` if the rows are in another order than in the original model."""
        if mask in self.unordered:
            raise Unselectable
        return self.get_or_make(mask, "nth", lambda: self.insert_call(aten.cumsum.default, mask, 0))

    def narrow_mask(self, mask: fx.Node, condition: fx.Node) -> fx.Node:
        """Return the node of ``mask and condition``. Both are boolean masks with one element for each row."""
        found = self.get_or_make(
            mask, ("and", self.key(condition)), lambda: self.insert_call(aten.logical_and.default, mask, condition)
        )
        return self._record_order(found, mask)

    def expand_row_mask(self, mask: fx.Node, sizes: tuple[int, ...], at: int) -> fx.Node:
        """Return the node of a mask for the dim that results from flattening several dims, one of them the dim of rows,
        into one.

        ``mask``: the mask of the rows before the flattening. ``sizes``: the sizes of the dims that are flattened.
        ``at``: the index, in ``sizes``, of the dim of rows.
        """

        def spread() -> fx.Node:
            apart = [size if i == at else 1 for i, size in enumerate(sizes)]
            result = self.insert_call(
                aten.expand.default, self.insert_call(aten.reshape.default, mask, apart), list(sizes)
            )
            return self.insert_call(aten.reshape.default, result, [math.prod(sizes)])

        found = self.get_or_make(mask, ("flat", sizes, at), spread)
        self.flattened[found] = mask, sizes, at
        return self._record_order(found, mask)

    def _record_order(self, mask: fx.Node, other: fx.Node) -> fx.Node:
        """If the rows of the mask ``other`` are recorded to be in another order than in the original model, record this
        for ``mask``, too. Return ``mask`` unchanged. ``mask``: a mask of the same rows, computed from ``other``."""
        if other in self.unordered:
            self.unordered.add(mask)
        return mask

    def fill_unselected_with(self, value: fx.Node, number: float | None = None) -> fx.Node:
        """Return the node of ``value`` with the rows that its mask does not select set to ``number``, so that values
        that the original model does not have, such as a zero divisor or an index of -100, cause no error. If nothing
        must be changed, return ``value`` itself.

        ``value``: a node that keeps all rows although the original model selects some of them by a mask. ``number``: if
        it is ``None``, rows are set to 1 for floating-point dtypes and to 0 for integers.
        """
        dtype = value.meta["val"].dtype
        number = int(dtype.is_floating_point) if number is None else number
        if dtype == torch.bool or self._filled.get(value) == number or (number == 0 and value in self.places):
            return value
        return self.fill_unselected(value, number)

    def fill_unselected(self, value: fx.Node, number: float) -> fx.Node:
        """Return the node of ``value`` with the rows that its mask does not select set to ``number``. The same mask is
        recorded for the result. ``value``: a node that keeps all rows although the original model selects some of them
        by a mask."""
        filled = self.insert_call(aten.masked_fill.Scalar, value, self.mask_unselected(value), number)
        self.rows[filled], self._filled[filled] = self.rows[value], number
        return filled

    def mask_unselected(self, value: fx.Node) -> fx.Node:
        """Return the node of a mask that is true for the rows of ``value`` that the original model does not have,
        because the mask of ``value`` does not select them. The shape of the result broadcasts to that of ``value``."""
        rows = self.rows[value]
        shape = [1] * value.meta["val"].dim()
        shape[rows.dim] = rows.mask.meta["val"].shape[0]
        left_out = self.insert_call(aten.logical_not.default, rows.mask)
        return left_out if shape == [shape[0]] else self.insert_call(aten.reshape.default, left_out, shape)

    def zero_unselected(self, value: fx.Node) -> fx.Node:
        """Return the node of ``value`` with zeros in the rows that its mask does not select. No mask is recorded for
        the result, because rows of zeros may take part in a sum. ``value``: a node that keeps all rows although the
        original model selects some of them by a mask."""
        return self.insert_call(aten.masked_fill.Scalar, value, self.mask_unselected(value), 0)

    def find_common_rows(self, *values: Any) -> MaskedRows:
        """Return the common mask and dim of rows of all ``values``, which are nodes that keep all rows. Raise
        :class:`Unselectable` if their masks or dims differ, or if no mask is recorded for one of them."""
        found = {self.rows[v] for v in values if v in self.rows}
        if len(found) != 1 or any(v not in self.rows for v in values):
            raise Unselectable
        return next(iter(found))


_SPREADS = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)


def _find_row_condition(condition: fx.Node) -> fx.Node | None:
    """If ``condition`` was made by expanding a boolean node with one element for each row to all elements of the row,
    return this node; otherwise return ``None``."""
    source: Any = condition.args[0] if condition.target in _SPREADS else None
    if source is None or source.meta["val"].dtype != torch.bool:
        return None
    before, after = list(source.meta["val"].shape), list(condition.meta["val"].shape)
    before = [1] * (len(after) - len(before)) + before
    rows = max((d + 1 for d, size in enumerate(before) if size > 1), default=0)
    return source if 0 < rows < len(after) and before[:rows] == after[:rows] else None


def _list_row_sizes(condition: fx.Node) -> list[int]:
    """Return the sizes of the last dims of ``condition``, along which its elements only repeat. ``condition``: the
    result of an ``expand`` of a boolean node with one element for each row to all elements of the row."""
    source: Any = condition.args[0]
    before, after = source.meta["val"].shape, condition.meta["val"].shape
    return list(after[max(d + 1 for d, size in enumerate(before) if size > 1) + len(after) - len(before) :])


def _reads_in_order(node: fx.Node) -> bool:
    """Return whether the result of ``node`` depends on the order of rows whose number depends on the data, as after a
    selection of rows by a mask. An example is a split into pieces, if a size of its operands or results depends on the
    data."""
    given = [node, *node.all_input_nodes] if node.target in _ORDER_DEPENDENT else []
    return any(_has_dynamic_size(n.meta.get("val")) for n in given)


def _has_dynamic_size(value: Any) -> bool:
    """Return whether ``value``, a tensor or several tensors, has a size that depends on the data."""
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and not all(isinstance(s, int) for s in v.shape) for v in values)


def _collect_nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _replace_row_count(argument: Any) -> Any:
    """Return ``argument``, an argument of an operator. If it is a size that depends on how many rows a mask selects,
    return its value for a mask that selects all rows instead. Raise :class:`Unselectable` if this value is not known.
    """
    if isinstance(argument, ComputedSize):
        if not isinstance(argument.all_rows, int):
            raise Unselectable
        return argument.all_rows
    return int(argument) if isinstance(argument, MaskedRowCount) else argument


def _to_meta(argument: Any) -> Any:
    return META if isinstance(argument, torch.device) else argument


def _replace_operands(args: Any, old: tuple[fx.Node, ...], new: list[fx.Node]) -> Any:
    """Return ``args``, arguments of an operator, with each node of ``old`` replaced by the node at the same index in
    ``new``."""
    instead = dict(zip(old, new, strict=True))
    return fx.node.map_arg(args, lambda n: instead.get(n, n))
