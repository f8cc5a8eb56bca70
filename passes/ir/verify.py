"""Check that a graph is well formed and that a model has the invariants of ``passes/ir/model.py``.

The result of every operator is inferred again on meta tensors and compared with the shape and dtype in
``node.meta["val"]``. The error names the first wrong node.

:func:`compare_across_ranks` computes whether a value is equal on all ranks of a mesh axis. A value with the layout
``R`` (whole on every rank) must be equal. This follows from the graph of one rank: shards and data differ between
ranks, gathered and reduced values are equal, and an operator's result differs if one of its operands differs. A missing
or repeated collective, or one over a wrong axis, is thus found without computing anything. JAX checks ``shard_map`` in
this way. The result ``unknown`` marks a value that is equal on all ranks but may stand for a shard or a partial sum: a
new or expanded tensor of a shard's size, or a whole value scaled by 1/n that will be summed.
:func:`find_misused_collective` reports collectives whose operands are not of the expected kind.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.collectives import COMMUNICATING, CONTEXT, collective_name
from partitioner.passes.ir.interpret import infer_meta_value, resolve_meta_values
from partitioner.passes.ir.model import Block, FoldedModel, TensorSpec

Shape = tuple[tuple[int, ...], torch.dtype]


class GraphError(PartitionError):
    """Raised for a block or model whose graph is not well formed.

    ``block`` and ``node``: the names of the block and the graph node with the fault; empty if unknown.
    """

    def __init__(self, message: str, block: str = "", node: str = "") -> None:
        where = [f"block {block!r}"] if block else []
        where += [f"node {node!r}"] if node else []
        super().__init__(": ".join([", ".join(where), message]) if where else message)
        self.block = block
        self.node = node


def check_block(block: Block, axes: Mapping[str, int] | None = None) -> None:
    """Raise :class:`GraphError` at the first node of the graph of ``block`` (a piece of the model) that is not well
    formed.

    Nodes must be in order, call functional operators, and have meta tensors with the shapes and dtypes that their
    operators return.

    Args:
        axes: mesh axis that a collective may name -> its number of ranks; ``None`` allows any axis.
    """
    placeholders: list[str] = []
    seen: set[fx.Node] = set()
    ended = False
    for node in block.graph.nodes:
        try:
            if ended:
                raise GraphError("stands after the output node")
            if any(n not in seen for n in node.all_input_nodes):
                raise GraphError("reads a node that is not defined before it")
            if node.op == "placeholder":
                if len(placeholders) < len(seen):
                    raise GraphError("a placeholder after the first operator")
                placeholders.append(node.name)
                _check_value(node)
            elif node.op == "call_function":
                _check_operator(node, axes)
            elif node.op == "output":
                ended = True
                _check_output(node)
            else:
                raise GraphError(f"a node of kind {node.op!r}; expected placeholder, call_function or output")
        except GraphError as error:
            raise GraphError(str(error), block.name, node.name) from None
        seen.add(node)
    if not ended:
        raise GraphError("has no output node", block.name)
    if placeholders != [*block.states, *block.inputs]:
        raise GraphError(f"has the placeholders {placeholders}, not {[*block.states, *block.inputs]}", block.name)


def _check_value(node: fx.Node) -> None:
    if describe_shape(node.meta.get("val")) is None:
        raise GraphError(f"carries no value: {node.meta.get('val')!r}; expected a tensor on meta, or a tuple of them")


def _check_output(node: fx.Node) -> None:
    """Raise :class:`GraphError` unless the output node ``node`` of a graph returns a tuple of nodes whose values are
    tensors."""
    if len(node.args) != 1 or not isinstance(node.args[0], tuple | list):
        raise GraphError("does not return a tuple")
    for result in node.args[0]:
        if not isinstance(result, fx.Node):
            raise GraphError(f"returns {result!r}, not a node")
        if not isinstance(result.meta.get("val"), Tensor):
            raise GraphError(f"returns {result.name!r}, which is no tensor")


def _check_operator(node: fx.Node, axes: Mapping[str, int] | None) -> None:
    """Raise :class:`GraphError` unless the operator ``node`` is functional and its result has the shape and dtype of
    ``node.meta["val"]``.

    ``axes``: mesh axis that a collective may name -> its number of ranks; ``None`` allows any axis.
    """
    target: Any = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload):
            raise GraphError(f"calls {target!r}, not a registered operator")
        if target._schema.is_mutable:
            raise GraphError(f"{target} changes its operand in place; expected functional operators only")
    _check_value(node)
    if axes is not None:
        _check_axis(node, axes)
    try:
        inferred = infer_meta_value(target, resolve_meta_values(node.args), resolve_meta_values(node.kwargs))
    except Exception as error:
        raise GraphError(f"{target} does not accept its operands: {error}") from error
    if describe_shape(inferred) != describe_shape(node.meta["val"]):
        raise GraphError(
            f"{target} gives {format_meta_value(inferred)}, the node carries {format_meta_value(node.meta['val'])}"
        )


def _check_axis(node: fx.Node, axes: Mapping[str, int]) -> None:
    """Raise :class:`GraphError` if the collective ``node`` names an unknown mesh axis or a wrong number of ranks, or
    divides a dim unevenly. ``axes``: name of each mesh axis -> its number of ranks."""
    named = get_collective_axis(node)
    if named is None:
        return
    axis, size = named
    if axis not in axes:
        raise GraphError(f"{node.target} on the axis {axis!r}; the mesh has {', '.join(axes)}")
    if size != axes[axis]:
        raise GraphError(f"{node.target} over {size} ranks; the axis {axis!r} has {axes[axis]}")
    values = [a.meta["val"] for a in node.all_input_nodes]
    name = collective_name(node.target)
    if name in _DIVIDES and values:
        dim = node.args[1]
        shape = tuple(values[0].shape)
        if not isinstance(dim, int) or not 0 <= dim < len(shape) or shape[dim] % size:
            raise GraphError(f"{node.target} cannot divide dim {dim} of shape {shape} over {size} ranks")


_DIVIDES = ("shard_slice", "shard_narrow", "reduce_scatter", "all_to_all")


def get_collective_axis(node: fx.Node) -> tuple[str, int] | None:
    """If ``node`` is a collective operator, return (name of the mesh axis, number of ranks) over which it communicates;
    otherwise return ``None``."""
    if node.op != "call_function" or collective_name(node.target) is None:
        return None
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    bound = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    axis, size = bound.get("axis"), bound.get("size")
    return (axis, size) if isinstance(axis, str) and isinstance(size, int) else None


def describe_shape(value: Any) -> Any:
    """Return (shape, dtype) of the tensor ``value``. For a tuple, return a tuple of such descriptions; for anything
    else, return ``None``."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return tuple(describe_shape(v) for v in value)
    return None


def format_meta_value(value: Any) -> str:
    """Return the dtype and shape of the meta tensor ``value`` (or of each in a tuple) as text, such as ``float32[4,
    8]``."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(format_meta_value(v) for v in value)})"
    return repr(value)


def check_model(model: FoldedModel, axes: Mapping[str, int] | None = None) -> None:
    """Raise :class:`GraphError` at the first block or call of ``model`` that is not well formed. A block is the graph
    of a piece of the model, such as a layer; a call is one execution of it. Each call must execute an existing block on
    existing values of the right shapes and dtypes, and every value must be computed once.

    Args:
        axes: mesh axis that a collective may name -> its number of ranks; ``None`` allows any axis.
    """
    for name, block in model.blocks.items():
        if block.name != name:
            raise GraphError(f"is filed under {name!r}", block.name)
        check_block(block, axes)
    made = {i.value for i in model.inputs}
    for number, call in enumerate(model.calls):
        where = f"call {number} ({call.path!r})"
        if call.block not in model.blocks:
            raise GraphError(f"{where} is of the block {call.block!r}, which does not exist")
        block = model.blocks[call.block]
        nodes = block.placeholders
        if len(call.states) != len(block.states) or len(call.inputs) != len(block.inputs):
            raise GraphError(f"{where} passes {len(call.states)} states and {len(call.inputs)} inputs", call.block)
        if len(call.outputs) != len(block.outputs):
            raise GraphError(
                f"{where} has names for {len(call.outputs)} of {len(block.outputs)} outputs; expected one for each",
                call.block,
            )
        for name in call.states:
            if name not in model.states:
                raise GraphError(f"{where} reads the state {name!r}, which does not exist")
        for name, node in zip(call.inputs, nodes[len(call.states) :], strict=True):
            if name not in made:
                raise GraphError(
                    f"{where} reads {name!r}, which is neither an input of the model nor an output of an earlier call"
                )
            _check_spec(where, model.values[name], node, name)
        for name, node in zip(call.outputs, block.outputs, strict=True):
            if name in made:
                raise GraphError(f"{where} makes {name!r}, which exists already")
            made.add(name)
            _check_spec(where, model.values[name], node, name)
    leaving = [o.value for o in model.outputs if o.value is not None] + ([model.loss] if model.loss else [])
    for name in leaving:
        if name not in made:
            raise GraphError(f"the model returns {name!r}, which no call makes")
    for state, name in model.updates.items():
        if state not in model.states or name not in made:
            raise GraphError(f"the buffer {state!r} is to take the value {name!r}: there is no such buffer or value")


def _check_spec(where: str, spec: TensorSpec, node: fx.Node, value: str) -> None:
    """Raise :class:`GraphError` unless ``spec`` equals the shape and dtype of ``node``.

    ``spec``: the shape and dtype that the model states for a value that a call of a block (the graph of a piece of the
    model) reads or returns. ``value``: the value's name. ``node``: the placeholder or output of the block's graph for
    the value. ``where``: a description of the call for the error message.
    """
    if spec != TensorSpec.from_tensor(node.meta["val"]):
        have = format_meta_value(spec.meta())
        raise GraphError(
            f"{where} has {value!r} as {format_meta_value(node.meta['val'])}, the model as {have}", node=node.name
        )


Sameness = Literal["alike", "different", "unknown"]

_EQUALIZING_COLLECTIVES = frozenset({"all_gather", "all_reduce", "all_reduce_max"})

_DISTRIBUTING_COLLECTIVES = (
    frozenset({"reduce_scatter", "shard_slice", "shard_narrow", "shard_pad", "all_to_all", "axis_index"}) | CONTEXT
)
# Collectives that combine different tensors of the ranks: an operand that every rank has whole is a fault.
_COLLECTIVES_OF_PARTS = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})
# Operators whose result may stand for one rank's shard although its elements are copies of those of the operand.
_EXPANDS = ("aten.expand.", "aten.repeat.", "aten.repeat_interleave.")
_COLLECTIVES_OF_EQUAL_TENSORS = frozenset({"copy", "shard_slice", "shard_narrow"})


def compare_across_ranks(graph: fx.Graph, given: Mapping[str, Sameness], axis: str, size: int) -> dict[str, Sameness]:
    """Compare the value of each node of ``graph`` (the graph of one rank) between the ``size`` ranks of the mesh axis
    ``axis``. Return a dict: node name -> "alike" if the value is equal and whole on every rank; "different" if it may
    differ; "unknown" if it is equal on all ranks, but may be meant as one rank's shard or as an addend of a sum (such
    as zeros in the shape of a shard).

    Args:
        given: placeholder name -> "alike", "different" or "unknown"; missing ones count as "alike".
    """
    result: dict[str, Sameness] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            result[node.name] = given.get(node.name, "alike")
        elif node.op == "call_function":
            result[node.name] = _infer_sameness(node, result, axis, size)
    return result


def _infer_sameness(node: fx.Node, known: Mapping[str, Sameness], axis: str, size: int) -> Sameness:
    """Compare the result of the operator ``node`` between the ``size`` ranks of the mesh axis ``axis``. Return "alike"
    if it is equal and whole on every rank; "different" if it may differ; "unknown" if it is equal on all ranks, but may
    be meant as one rank's shard or as an addend of a sum (such as zeros in the shape of a shard).

    ``known``: name of an earlier node -> "alike", "different" or "unknown".
    """
    named = get_collective_axis(node)
    if named is not None and named[0] == axis:
        kind = collective_name(node.target)
        if kind in _EQUALIZING_COLLECTIVES:
            return "alike"
        if kind in _DISTRIBUTING_COLLECTIVES:
            return "different"
    operands = {known[n.name] for n in node.all_input_nodes}
    if "different" in operands:
        return "different"
    if "unknown" in operands or _may_create_elements(node) or _divides_by_ranks(node, size):
        return "unknown"
    return "alike"


def _may_create_elements(node: fx.Node) -> bool:
    """Return whether the operator ``node`` may create elements that none of its operands has, as ``arange`` or padding
    does, so that the size of its result comes from a constant argument. It is then unknown whether the result is a
    whole tensor or has the size of one rank's shard."""
    if node.target is operator.getitem:
        return False
    sizes = [v.numel() for n in node.all_input_nodes for v in _list_tensors(n.meta["val"])]
    name = str(node.target)
    if not sizes or ".new_" in name or "_like" in name or name.startswith(_EXPANDS):
        return True
    constants = any(isinstance(a, int) for a in pytree.tree_leaves((node.args, node.kwargs)))
    return constants and max((v.numel() for v in _list_tensors(node.meta["val"])), default=0) > max(sizes)


def _divides_by_ranks(node: fx.Node, size: int) -> bool:
    """Return whether the operator ``node`` has the number ``1 / size`` as an argument. Its result may then be an addend
    of a sum over ``size`` ranks instead of a whole value."""
    return any(isinstance(a, float) and a == 1.0 / size for a in node.args)


def _list_tensors(value: Any) -> list[Tensor]:
    """Return a list of the tensors in ``value``, a tensor or a nested tuple or list of tensors."""
    if isinstance(value, tuple | list):
        return [t for v in value for t in _list_tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def find_misused_collective(graph: fx.Graph, known: Mapping[str, Sameness], axis: str) -> tuple[fx.Node, str] | None:
    """Return the first collective of ``graph`` over the mesh axis ``axis`` whose operand must not have its kind
    ("alike", "different", "unknown"), and the reason as text; ``None`` if there is none. An example is an all-reduce of
    a value that every rank already has whole.

    Args:
        known: name of a node -> how its value compares between the ranks of the axis: "alike" if it is equal and whole
            on every rank, "different" if it may differ, "unknown" if it is equal but may be meant as a shard or an
            addend.
    """
    for node in graph.nodes:
        named = get_collective_axis(node)
        if named is None or named[0] != axis or not node.all_input_nodes:
            continue
        kind, operand = collective_name(node.target), known[node.all_input_nodes[0].name]
        if kind in _COLLECTIVES_OF_PARTS and operand == "alike":
            return node, f"{kind} over {axis} of a value that is whole on every rank counts it {named[1]} times"
        if kind in _COLLECTIVES_OF_EQUAL_TENSORS and operand == "different":
            return node, f"{kind} over {axis} of a value that differs from rank to rank"
        if kind in COMMUNICATING and _has_rank_dependent_rows(node.all_input_nodes[0], known):
            return node, f"{kind} over {axis} of rows that are routed apart: their number differs from rank to rank"
    return None


def _has_rank_dependent_rows(node: fx.Node, known: Mapping[str, Sameness]) -> bool:
    """Return whether the number of rows (tokens) of ``node`` may differ between the ranks of a mesh axis, because each
    rank sent rows to experts by its own expert numbers.

    Args:
        known: name of a node -> how its value compares between the ranks of the axis: "alike" if it is equal and whole
            on every rank, "different" if it may differ, "unknown" if it is equal but may be meant as a shard or an
            addend.
    """
    rows = node.meta["val"].shape[:1]
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        same = isinstance(node.meta["val"], tuple) or node.meta["val"].shape[:1] == rows
        # only a traced graph marks nodes with a data-dependent number of rows
        if node in seen or not node.meta.get("open", same):
            continue
        seen.add(node)
        if collective_name(node.target) == "combine":
            continue
        kind = collective_name(node.target)
        experts = node if kind == "route" else node.args[3] if kind == "dispatch" else None
        if isinstance(experts, fx.Node) and known[experts.name] == "different":
            return True
        stack += node.all_input_nodes
    return False


def find_difference_origin(node: fx.Node, known: Mapping[str, Sameness]) -> fx.Node:
    """Follow operands that differ between ranks back from ``node``, and return the operator at which the difference
    begins.

    Args:
        known: name of a node -> how its value compares between the ranks of a mesh axis: "alike" if it is equal and
            whole on every rank, "different" if it may differ, "unknown" if it is equal but may be meant as a shard or
            an addend.
    """
    while True:
        before = [n for n in node.all_input_nodes if n.op == "call_function" and known[n.name] == "different"]
        if not before:
            return node
        node = before[0]
