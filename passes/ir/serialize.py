"""Convert the graph of a block to JSON data and back.

A node is ``{"name", "op", "target", "args", "kwargs", "val", "path", "source"}``. Arguments are JSON values. A value
that JSON cannot represent becomes an object with one key: ``{"node": "add_1"}``, ``{"dtype": "float32"}``, ``{"device":
"rank"}``, ``{"float": "inf"}``, ``{"slice": [a, b, c]}``, ``{"layout": ...}``, ``{"memory_format": ...}``. ``val`` is
``[shape, dtype]``, followed by the strides if the tensor is not contiguous, because the strides decide whether a
reshape copies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.allowed_operators import check_operator, find_operator, note_operator_of_model
from partitioner.passes.errors import PartitionError, UntrustedOperatorError
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.model import Block, TensorSpec

_KEPT = ("path", "source")

_CALLABLES = {"getitem": operator.getitem}


class GraphFormatError(PartitionError):
    """Raised if data of a plan file is not a graph in the format that this version writes."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with the name ``name``, such as ``float32``. Raise :class:`GraphFormatError` if there is
    no such dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise GraphFormatError(f"{name!r} is not a tensor type; expected float32, bfloat16, int64, ...")
    return dtype


def block_to_data(block: Block) -> tuple[dict[str, Any], ...]:
    """Return a tuple with the nodes of the graph of ``block``, in order, as dicts of JSON values with keys such as
    ``name``, ``op``, ``target`` and ``args``."""
    return tuple(_node_to_data(node) for node in block.graph.nodes)


def block_from_data(
    name: str, nodes: tuple[dict[str, Any], ...], states: tuple[str, ...], inputs: tuple[str, ...]
) -> Block:
    """Convert ``nodes``, one dict of JSON values for each node in order, to a block and return it.

    ``name``: the block's name. ``states``: names of the placeholders of parameters, buffers and constants. ``inputs``:
    names of the placeholders of other values. Raises :class:`GraphFormatError` with the name of the node if a node
    cannot be read, and :class:`UntrustedOperatorError` if a node calls an operator that a plan file may not use.
    """
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for data in nodes:
        try:
            node = _node_from_data(graph, data, made)
        except (GraphFormatError, UntrustedOperatorError) as error:
            raise type(error)(f"block {name!r}, node {data.get('name')!r}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise GraphFormatError(f"block {name!r}, node {data.get('name')!r} cannot be read ({reason})") from error
        made[data["name"]] = node
    if not nodes or nodes[-1].get("op") != "output":
        raise GraphFormatError(f"block {name!r} does not end in an output node")
    return Block(name, graph, states, inputs)


def _node_to_data(node: fx.Node) -> dict[str, Any]:
    """Return the graph node ``node`` as a dict of JSON values: ``name``, ``op``, ``target``, ``args``, ``kwargs``,
    ``val``, ``path``, ``source``.

    Empty values are left out.
    """
    data: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op == "call_function":
        data["target"] = target_name(node.target)
        data["args"] = _to_json(node.args)
        if node.kwargs:
            data["kwargs"] = {k: _to_json(v) for k, v in node.kwargs.items()}
    elif node.op == "output":
        data["args"] = _to_json(node.args[0])
    if "val" in node.meta:
        data["val"] = _val_to_json(node.meta["val"])
    data.update({k: node.meta[k] for k in _KEPT if node.meta.get(k)})
    return data


def _node_from_data(graph: fx.Graph, data: dict[str, Any], nodes: dict[str, fx.Node]) -> fx.Node:
    """Convert ``data``, a dict of JSON values, to a node, append the node to ``graph``, and return it.

    ``nodes``: the earlier nodes of the graph, by name. Raise :class:`GraphFormatError` if the node cannot be read.
    """
    op = data["op"]
    node: fx.Node
    if op == "placeholder":
        node = graph.create_node("placeholder", data["name"], name=data["name"])
    elif op == "output":
        node = graph.output(tuple(_from_json(data["args"], nodes)))
        return node
    elif op == "call_function":
        args = tuple(_from_json(data["args"], nodes))
        kwargs = {k: _from_json(v, nodes) for k, v in data.get("kwargs", {}).items()}
        target = _CALLABLES.get(data["target"]) or _find_allowed(data["target"])
        _check_call(target, args, kwargs)
        node = graph.create_node("call_function", target, args, kwargs, name=data["name"])
    else:
        raise GraphFormatError(f"unknown kind of node {op!r}")
    if node.name != data["name"]:
        raise GraphFormatError("two nodes have this name")
    if "val" in data:
        node.meta["val"] = _val_from_json(data["val"])
    node.meta.update({k: data[k] for k in _KEPT if k in data})
    return node


def _find_allowed(name: Any) -> Any:
    """Return the torch operator with the name ``name``. Raise :class:`UntrustedOperatorError` if plan files may not use
    it, and :class:`GraphFormatError` if it is not registered."""
    if not isinstance(name, str):
        raise GraphFormatError(f"{name!r} is no name of an operator")
    check_operator(name)
    return target_of(name)


def target_name(target: Any) -> str:
    """Return the name of ``target``, the target of a node: ``aten.add.Tensor`` for an operator, ``getitem`` for
    ``operator.getitem``."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        note_operator_of_model(target)
        return str(target)
    raise AssertionError(f"{target} cannot be in a block's graph")


def target_of(name: str) -> Any:
    """Return the torch operator with the name ``name``, such as ``aten.add.Tensor``.

    Raises :class:`GraphFormatError` if it is not registered in torch.
    """
    if name in _CALLABLES:
        return _CALLABLES[name]
    target = find_operator(name)
    if target is None:
        raise GraphFormatError(f"operator {name!r} is not registered: import the library that defines it first")
    return target


def _to_json(value: Any) -> Any:
    """Return ``value``, an argument of a graph node, as a JSON value. A value without a JSON form becomes an object
    with one key, such as ``{"node": "add_1"}`` or ``{"dtype": "float32"}``.
    """
    match value:
        case fx.Node():
            return {"node": value.name}
        case tuple() | list():
            return [_to_json(v) for v in value]
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [_to_json(value.real), _to_json(value.imag)]}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": "rank"}
        case torch.layout():
            return {"layout": str(value).removeprefix("torch.")}
        case torch.memory_format():
            return {"memory_format": str(value).removeprefix("torch.")}
        case slice():
            return {"slice": [_to_json(value.start), _to_json(value.stop), _to_json(value.step)]}
    raise AssertionError(f"a graph's argument of type {type(value).__name__} cannot be written: {value!r}")


def _from_json(value: Any, nodes: dict[str, fx.Node]) -> Any:
    """Convert the JSON value ``value``, such as ``{"node": "add_1"}``, to an argument of a graph node, and return it.

    ``nodes``: the earlier nodes of the graph, by name. Raise :class:`GraphFormatError` if the value cannot be read.
    """
    if isinstance(value, list):
        return [_from_json(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "node":
            if content not in nodes:
                raise GraphFormatError(f"reads {content!r}, which is not defined before it")
            return nodes[content]
        case "dtype":
            return dtype_of(content)
        case "device":
            return META
        case "float":
            return float(content)
        case "complex":
            return complex(*(_from_json(part, nodes) for part in content))
        case "layout" | "memory_format":
            return _find_torch_constant(kind, content)
        case "slice":
            return slice(*(_from_json(v, nodes) for v in content))
    raise GraphFormatError(f"unknown argument {value!r}")


def _find_torch_constant(kind: str, name: Any) -> Any:
    """Return torch's object with the name ``name``, such as ``strided``. Raise :class:`GraphFormatError` if it is not
    of the type ``kind``, which is ``layout`` or ``memory_format``."""
    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, {"layout": torch.layout, "memory_format": torch.memory_format}[kind]):
        raise GraphFormatError(f"{name!r} is no {kind} of torch")
    return value


def _check_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`GraphFormatError` unless the numbers and names of ``args`` and ``kwargs`` match the parameters of
    the operator ``target``. For ``getitem``, which takes an item of a tuple, the index must be an integer."""
    if target is operator.getitem:
        if len(args) != 2 or kwargs or not isinstance(args[0], fx.Node) or type(args[1]) is not int:
            raise GraphFormatError(f"getitem takes a value and an index, got {args!r}")
        return
    parameters = target._schema.arguments
    odd = [name for name in kwargs if name not in {p.name for p in parameters}]
    if odd or len(args) > sum(not p.kwarg_only for p in parameters):
        raise GraphFormatError(f"{target} has no parameter {odd[0]!r}" if odd else f"too many arguments for {target}")


def _val_to_json(value: Any) -> Any:
    """Return ``value`` as JSON: a meta tensor as ``[shape, dtype]``, or ``[shape, dtype, strides]`` if it is not
    contiguous; a tuple as ``{"tuple": [...]}``.

    Return ``None`` for any other value.
    """
    if isinstance(value, Tensor):
        what = [list(value.shape), dtype_name(value.dtype)]
        return what if value.is_contiguous() else [*what, list(value.stride())]
    if isinstance(value, tuple | list):
        return {"tuple": [_val_to_json(v) for v in value]}
    return None


def _val_from_json(value: Any) -> Any:
    """Convert the JSON value ``value`` to the meta value of a node and return it: a meta tensor for ``[shape, dtype]``
    or ``[shape, dtype, strides]``; a tuple of meta tensors for ``{"tuple": [...]}``; ``None`` for ``None``."""
    if value is None:
        return None
    if isinstance(value, dict):
        return tuple(_val_from_json(v) for v in value["tuple"])
    shape, dtype, *strides = value
    if strides:
        return torch.empty_strided(shape, strides[0], dtype=dtype_of(dtype), device="meta")
    return TensorSpec(tuple(shape), dtype_of(dtype)).meta()
