"""Collectives and weight layouts of one block type (such as a decoder layer), read from its serialised graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from partitioner.passes.dtypes import get_dtype_itemsize, is_floating
from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.program.program import BlockGraph, CallData, StateData

# (operator, its option "grad") -> collective that runs forward, and backward (None: nothing is sent); see
# passes/ir/collectives.py
_TRANSPOSES: dict[tuple[str, str | None], tuple[str | None, str | None]] = {
    ("all_gather", "reduce"): ("all_gather", "reduce_scatter"),
    ("all_gather", "slice"): ("all_gather", None),
    ("shard_slice", None): (None, "all_gather"),
    ("copy", None): (None, "all_reduce"),
    ("reduce_scatter", None): ("reduce_scatter", "all_gather"),
    ("all_reduce", "copy"): ("all_reduce", None),
    ("all_reduce", "reduce"): ("all_reduce", "all_reduce"),
    ("all_reduce_max", None): ("all_reduce", None),
    ("all_to_all", None): ("all_to_all", "all_to_all"),
    ("route", None): ("all_to_all", None),
    ("dispatch", None): ("all_to_all", "all_to_all"),
    ("combine", None): ("all_to_all", "all_to_all"),
}

# (operator, index of the operand) -> for each dim, the field's word for an operand that is sharded on it
_PHRASES: dict[tuple[str, int], tuple[str, ...]] = {
    ("aten.linear.default", 1): ("column-parallel", "row-parallel"),
    ("partition.linear_fp8.default", 1): ("column-parallel", "row-parallel"),
    ("aten.mm.default", 1): ("row-parallel", "column-parallel"),
    ("aten.matmul.default", 1): ("row-parallel", "column-parallel"),
    ("aten.addmm.default", 2): ("row-parallel", "column-parallel"),
    ("aten.bmm.default", 1): ("expert-parallel", "row-parallel", "column-parallel"),
    ("partition.expert_mm.default", 1): ("expert-parallel", "row-parallel", "column-parallel"),
    ("aten._grouped_mm.default", 1): ("expert-parallel", "row-parallel", "column-parallel"),
    ("aten.embedding.default", 0): ("vocabulary-parallel", "hidden-parallel"),
    ("aten.conv1d.default", 1): ("output-channel-parallel", "input-channel-parallel"),
    ("aten.conv2d.default", 1): ("output-channel-parallel", "input-channel-parallel"),
    ("aten.convolution.default", 1): ("output-channel-parallel", "input-channel-parallel"),
}
_WHOLE = "whole on every rank"
_TRANSPARENT = {"aten._to_copy.default", "aten.to.dtype", "aten.alias.default"}
_FLIPS = {"aten.t.default", "aten.transpose.int", "aten.permute.default"}


@dataclass(frozen=True)
class BlockCollective:
    """A collective operation in one call of a block (a piece of the model, such as a decoder layer). ``op``: its kind,
    such as ``all_gather``. ``axis``: the mesh axis over which it runs. ``direction``: ``forward`` or ``backward``.
    ``num_bytes``: bytes of its operand or its result on one rank, whichever is larger. ``path``: path of the module to
    which it belongs.
    """

    op: str
    axis: str
    direction: Literal["forward", "backward"]
    num_bytes: int
    path: str


@dataclass(frozen=True)
class Weight:
    """A parameter that a call of a block (a piece of the model, such as a decoder layer) reads, for pictures and
    reports. ``name``: without the module path of the call. ``shape``: of the parameter before sharding. ``layout``: how
    it is divided over the ranks of ``tp`` (or ``ep``): ``R``: each holds all of it; ``S0``: each holds a part along dim
    0. ``how``: what this layout means for the operator, in words such as ``column-parallel``. ``trainable``: whether it
    gets a gradient."""

    name: str
    shape: tuple[int, ...]
    layout: str
    how: str
    trainable: bool


def block_collectives(block: BlockGraph, grads: Sequence[bool]) -> tuple[BlockCollective, ...]:
    """Return the collectives of one call of ``block``, the graph of a piece of the model such as a decoder layer: those
    of its forward, then those of its backward. ``grads``: for each placeholder (input of the graph), in order, whether
    it needs a gradient.
    """
    forward: list[BlockCollective] = []
    backward: list[BlockCollective] = []
    needs: dict[str, bool] = {}
    values: dict[str, Any] = {}
    for node in block.nodes:
        name = node["name"]
        values[name] = node.get("val")
        if node["op"] == "placeholder":
            needs[name] = grads[len(needs)] if len(needs) < len(grads) else False
        elif node["op"] == "call_function":
            operands = _list_operand_names(node)
            needs[name] = _is_floating_value(node.get("val")) and any(needs.get(o, False) for o in operands)
            target = str(node["target"])
            if target.startswith("partition.") and operands:
                source = operands[0]
                size = max(_count_value_bytes(values.get(source)), _count_value_bytes(node.get("val")))
                op = target.split(".")[1]
                ahead, back = _TRANSPOSES.get((op, _grad_option(op, node)), (None, None))
                if op in ("context_attention", "context_document_attention", "context_scored_attention"):
                    ahead = back = str(node["args"][-1])  # how keys and values of all ranks are brought together
                    size = sum(_count_value_bytes(values.get(o)) for o in operands[1:3]) * int(node["args"][-3])
                axis = next((a for a in node["args"] if isinstance(a, str)), "")
                path = str(node.get("path", ""))
                if ahead:
                    forward.append(BlockCollective(ahead, axis, "forward", size, path))
                if back and needs.get(source, False):
                    backward.append(BlockCollective(back, axis, "backward", size, path))
    return (*forward, *reversed(backward))


def block_weights(
    block: BlockGraph, call: CallData, states: Mapping[str, StateData], gathered: bool = False
) -> list[Weight]:
    """Return the parameters that ``call``, a call of ``block`` (a piece of the model, such as a decoder layer), reads,
    in order, each with its layout over tensor-parallel ranks. ``states``: all parameters and buffers of the program by
    name. ``gathered``: whether each data-parallel rank holds only a piece of a parameter and gathers all of it before
    use (ZeRO-3); the description of a sharded parameter then says so."""
    weights = []
    for placeholder, name in zip(block.states, call.states, strict=True):
        state = states[name]
        if state.kind == "parameter":
            prefix = call.path + "."
            short = name.removeprefix(prefix) if call.path else name
            layout = Layout.parse(state.layout)
            how = "sharded" if layout.is_shard and len(state.shape) == 1 else layout_phrase(block, placeholder, layout)
            how = "gathered whole for use" if gathered and how == _WHOLE else how
            shown = state.layout
            if Layout.parse(state.expert_layout).is_shard:
                how = "expert-parallel over ep" + (f", {how}" if layout.is_shard else "")
                shown = state.expert_layout + (f", {shown}" if layout.is_shard else "")
            weights.append(Weight(short, state.shape, shown, how, state.requires_grad))
    return weights


def layout_phrase(block: BlockGraph, placeholder: str, layout: Layout) -> str:
    """Return what ``layout``, a parameter's layout over tensor-parallel ranks, means for the operator that reads it, as
    text such as ``column-parallel``. ``block``: the graph of the block. ``placeholder``: name of the graph input that
    is the parameter."""
    if layout.kind == "R'":
        return "whole, gradient summed over tp"
    if not layout.is_shard:
        return _WHOLE
    dim, name = layout.dim, placeholder
    for node in block.nodes:
        if node["op"] != "call_function" or name not in _list_operand_names(node):
            continue
        target = str(node["target"])
        if target in _TRANSPARENT:
            name = node["name"]
        elif target in _FLIPS:
            name, dim = node["name"], _map_transposed_dim(node, dim)
        elif target == "partition.all_gather.default":
            return f"sharded on dim {layout.dim}, gathered for use"
        else:
            words = _PHRASES.get((target, _list_operand_names(node).index(name)), ())
            words = words[::-1] if target == "partition.linear_fp8.default" and node["args"][3:4] == [True] else words
            if dim < len(words):
                return words[dim]
            break
    return f"sharded on dim {layout.dim}"


def _map_transposed_dim(node: Mapping[str, Any], dim: int) -> int:
    """Return the dim of a transpose's or permute's result that holds the operand's dim ``dim``. ``node``: the graph
    node of this operator as it is stored in a plan: a dict with its ``target``, ``args`` and ``val`` (shape first).
    """
    rank = len((node.get("val") or [[0, 0]])[0])
    order = list(range(rank))
    if node["target"] == "aten.permute.default":
        order = [d % rank for d in node["args"][1]]
    else:
        a, b = (d % rank for d in node["args"][1:3]) if node["target"] == "aten.transpose.int" else (0, rank - 1)
        order[a], order[b] = order[b], order[a]
    return order.index(dim) if dim in order else dim


def _list_operand_names(node: Mapping[str, Any]) -> list[str]:
    """Return the names of the nodes that ``node`` reads: positional arguments before keyword arguments, one entry per
    occurrence."""
    found: list[str] = []
    stack: list[Any] = [[node.get("args", []), node.get("kwargs", {})]]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            if isinstance(item.get("node"), str):
                found.append(item["node"])
            else:
                stack.extend(reversed(list(item.values())))
    return found


def _grad_option(op: str, node: Mapping[str, Any]) -> str | None:
    return str(node["args"][-1]) if op in ("all_gather", "all_reduce") else None


def _is_floating_value(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_is_floating_value(v) for v in value["tuple"])
    return value is not None and is_floating(value[1])


def _count_value_bytes(value: Any) -> int:
    # [shape, dtype] or [shape, dtype, strides]
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[1], str):
        return math.prod(value[0]) * get_dtype_itemsize(value[1])
    return 0
