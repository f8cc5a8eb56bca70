"""Find which values of a graph are affine in some of its inputs: a linear function of the inputs plus a constant.

Requires: a functional graph of ATen operators with meta tensors in ``node.meta["val"]``. Every operator that reads a
value which depends on these inputs must be listed here, with the operands in which it is linear. Derivatives cannot
prove linearity, because they are zero for ``sign``, ``round`` and comparisons.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Positions = frozenset[int]

_ADVICE = "clip or change gradients after the step's backward instead"

NOT_LINEAR = "is not linear in the gradient that it is given ({} reads it)"


class NotAffine(Exception):
    """Raised if a function is not affine in its inputs (linear plus a constant), or is not known to be affine.

    ``what``: the reason, a phrase that follows the name of the function. ``instead``: advice to the user on what to
    write instead.
    """

    def __init__(self, what: str, instead: str = _ADVICE) -> None:
        super().__init__(what)
        self.what, self.instead = what, instead


@dataclass(frozen=True)
class AffinePart:
    """How a value in the graph of an affine function (linear plus a constant) depends on the function's inputs.

    ``depends``: whether the value depends on the inputs. ``zero``: whether the value is known to be zero if all inputs
    are zero (no constant part).
    """

    depends: bool
    zero: bool


def find_affine_parts(
    graph: fx.Graph, inputs: Collection[fx.Node], zeros: Collection[fx.Node]
) -> dict[fx.Node, AffinePart]:
    """Return a dict: placeholder or operator of ``graph`` -> :class:`AffinePart`, which says whether the node's value
    depends on ``inputs`` and whether it is zero if all of them are zero.

    Raises :class:`NotAffine` if an operator reads a value that depends on ``inputs`` and is not linear in it.

    Args:
        inputs: the placeholders in which values should be affine (linear plus a constant).
        zeros: placeholders that are known to be zero.
    """
    found: dict[fx.Node, AffinePart] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = AffinePart(node in inputs, node in inputs or node in zeros)
        elif node.op == "call_function":
            found[node] = _find_affine_part(node, found)
    return found


def replace_shape_reads(graph: fx.Graph) -> None:
    """Replace operators of ``graph`` that read only the shape and dtype of an operand, such as ``zeros_like``, by
    operators that create the same tensor without this operand, in place. The tensors then no longer count as depending
    on the operand."""
    for node in list(graph.nodes):
        name = _read_operator_name(node.target)
        if node.op != "call_function" or name not in _SHAPE_ALONE:
            continue
        value, options = node.meta["val"], {}
        if name != "copy":
            options = {"dtype": value.dtype, "device": value.device}
        with graph.inserting_before(node):
            made = _rebuild_filled_tensor(graph, node, name, list(value.shape), options)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _rebuild_filled_tensor(
    graph: fx.Graph, node: fx.Node, name: str, shape: list[int], options: dict[str, Any]
) -> fx.Node:
    """Add an operator to ``graph`` that creates the result of ``node``, such as ``zeros_like``, without reading its
    first operand. Return the new node.

    ``name``: the operator's name without namespace. ``shape``: the shape of the result. ``options``: dtype and device
    of the result, as keyword arguments.
    """
    if name in ("full_like", "fill", "new_full"):
        number = node.args[-1]
        if isinstance(number, fx.Node):
            return _cast_and_expand(graph, number, node)
        return graph.call_function(aten.full.default, (shape, number), options)
    if name == "copy":
        assert isinstance(node.args[1], fx.Node), node
        return _cast_and_expand(graph, node.args[1], node)
    ones = name in ("ones_like", "new_ones")
    return graph.call_function((aten.ones if ones else aten.zeros).default, (shape,), options)


def _cast_and_expand(graph: fx.Graph, source: fx.Node, node: fx.Node) -> fx.Node:
    """Append operators to ``graph`` that cast ``source`` to the dtype of ``node`` and expand it to the shape of
    ``node``. Return the last new node."""
    value, given = node.meta["val"], source.meta["val"]
    if given.dtype != value.dtype:
        source = graph.call_function(aten._to_copy.default, (source,), {"dtype": value.dtype})
        source.meta = {**node.meta, "val": given.to(value.dtype)}
    return graph.call_function(aten.expand.default, (source, list(value.shape)))


def _find_affine_part(node: fx.Node, found: Mapping[fx.Node, AffinePart]) -> AffinePart:
    """Return whether the result of the operator ``node`` depends on the chosen inputs of its graph, and whether it is
    zero if all chosen inputs are zero. Results should be affine (linear plus a constant) in the chosen inputs.

    Raise :class:`NotAffine` if the operator is not linear in the operands that depend on the chosen inputs. ``found``:
    earlier node -> the same two facts about its value.
    """
    if node.target is operator.getitem:
        return found[node.args[0]]  # type: ignore[index]
    choices = _list_linear_operands(node)
    zero = any(_has_zero_operands(node.args, positions, found) for positions in choices)
    if not any(found[n].depends for n in node.all_input_nodes):
        return AffinePart(False, zero or _is_zero_by_itself(node))
    dependent = {i for i, a in enumerate(node.args) if any(found[n].depends for n in _iterate_nodes(a))}
    fits = any(dependent <= positions for positions in choices)
    if not fits or any(found[n].depends for n in _iterate_nodes(list(node.kwargs.values()))):
        raise NotAffine(NOT_LINEAR.format(_format_operator(node.target)))
    if not all(_is_floating_tensor(v) for v in _iterate_values(node.meta.get("val"))):
        raise NotAffine(NOT_LINEAR.format(_format_operator(node.target)))
    return AffinePart(True, zero)


def _has_zero_operands(operands: tuple[Any, ...], positions: Positions, found: Mapping[fx.Node, AffinePart]) -> bool:
    """Return whether all operands at ``positions`` are known to be zero if the chosen inputs of the graph are zero.

    Args:
        operands: the operands of an operator of the graph.
        positions: indices in ``operands``, from 0.
        found: node -> whether its value depends on the chosen inputs, and whether it is zero if they are.
    """
    return all(_is_zero(operands[i], found) for i in positions if i < len(operands))


def _is_zero(operand: Any, found: Mapping[fx.Node, AffinePart]) -> bool:
    """Return whether ``operand`` (a node, a number, ``None``, or a list of them) is known to be zero if the chosen
    inputs of the graph are zero. ``None`` counts as zero. ``found``: node -> whether its value depends on the chosen
    inputs, and whether it is zero if they are."""
    if isinstance(operand, fx.Node):
        return found[operand].zero
    if isinstance(operand, tuple | list):
        return all(_is_zero(o, found) for o in operand)
    return operand is None or (isinstance(operand, int | float | complex) and bool(operand == 0))


def _is_zero_by_itself(node: fx.Node) -> bool:
    """Return whether the operator ``node`` creates a tensor of zeros for any operands, as ``zeros`` does."""
    name = _read_operator_name(node.target)
    if name in ("full", "fill", "full_like", "new_full"):
        return _is_zero(node.args[-1], {}) if not isinstance(node.args[-1], fx.Node) else False
    return name in ("zeros", "zeros_like", "new_zeros", "zero")


def _list_linear_operands(node: fx.Node) -> tuple[Positions, ...]:
    """Return a tuple of sets of operand positions (from 0). The operator ``node`` is linear in the operands of each set
    together, while all other operands are fixed. A product of two operands has ``{0}`` and ``{1}``; a sum has ``{0,
    1}``."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ()
    name = _read_operator_name(target)
    if name in _LINEAR_IF and not _LINEAR_IF[name](node):
        return ()
    if name in _LINEAR:
        return _LINEAR[name]
    if name.endswith(("_backward", "_backward_data", "_backward_impl")):
        given = [a.name for a in target._schema.arguments]
        return (frozenset(i for i, a in enumerate(given) if a.startswith("grad")),)
    return ()


def _read_operator_name(target: Any) -> str:
    """Return the name of the operator ``target`` without namespace and overload, such as ``add`` for
    ``aten.add.Tensor``."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    name = target._schema.name
    return name.removeprefix("aten::")


def _format_operator(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _iterate_nodes(argument: Any) -> Iterator[fx.Node]:
    """Yield the graph nodes in ``argument``, which may be nested in tuples and lists."""
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, tuple | list):
        for a in argument:
            yield from _iterate_nodes(a)


def _iterate_values(value: Any) -> Iterator[Any]:
    """Yield the values in ``value``, which may be nested in tuples and lists, without ``None``."""
    if isinstance(value, tuple | list):
        for v in value:
            yield from _iterate_values(v)
    elif value is not None:
        yield value


def _is_floating_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


# Operators that read only the shape and dtype of their first operand.
_SHAPE_ALONE = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided zero fill copy"
    .split()
)  # fmt: skip


def _build_position_table(*rows: tuple[str, tuple[tuple[int, ...], ...]]) -> dict[str, tuple[Positions, ...]]:
    return {name: tuple(map(frozenset, choices)) for names, choices in rows for name in names.split()}


_LINEAR = _build_position_table(
    (  # views, copies, moves, selections and sums; maps with fixed numbers
        "alias as_strided clone contiguous detach diagonal expand lift lift_fresh lift_fresh_copy narrow_copy permute "
        "_reshape_alias _reshape_copy reshape select slice slice_inverse split split_with_sizes squeeze t transpose "
        "unbind unfold unsqueeze _unsafe_view unsafe_split unsafe_split_with_sizes view view_as_complex view_as_real "
        "alias_copy as_strided_copy detach_copy diagonal_copy expand_copy permute_copy select_copy slice_copy "
        "split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy "
        "view_copy view_as_complex_copy view_as_real_copy "
        "conj _conj _conj_physical conj_physical imag neg _neg_view positive real resolve_conj resolve_neg _to_copy "
        "channel_shuffle diag_embed flip pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d "
        "reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d roll rot90 trace tril triu "
        "embedding gather index index_select masked_select max_unpool2d max_unpool3d take _unsafe_index "
        "cat cumsum mean stack sum _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d avg_pool3d "
        "affine_grid_generator col2im im2col _fft_c2c _fft_c2r _fft_r2c upsample_bicubic2d _upsample_bicubic2d_aa "
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_linear1d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "upsample_trilinear3d div true_divide",
        ((0,),),
    ),
    (
        "add sub rsub addcdiv complex as_strided_scatter diagonal_scatter select_scatter slice_scatter lerp",
        ((0, 1),),
    ),
    ("where", ((1, 2),)),
    ("constant_pad_nd masked_fill masked_scatter index_put _unsafe_index_put put", ((0, 2),)),
    ("scatter scatter_add scatter_reduce index_add index_copy index_fill", ((0, 3),)),
    # products are linear in one factor while the other is fixed
    ("mul mm bmm mv dot vdot", ((0,), (1,))),
    ("addmm baddbmm addbmm addmv addr addcmul", ((0, 1), (0, 2))),
    ("convolution", ((0, 2), (1, 2))),
    ("_trilinear", ((0,), (1,), (2,))),
)

# Operators of which only some calls are linear -> function that returns whether a call is.
_LINEAR_IF: dict[str, Callable[[fx.Node], bool]] = {
    "view": lambda node: node.target is not aten.view.dtype,
    "div": lambda node: node.kwargs.get("rounding_mode") is None,
    "scatter": lambda node: "reduce" not in node.kwargs,
    "scatter_reduce": lambda node: node.args[4] in ("sum", "mean"),
}
