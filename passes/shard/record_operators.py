"""Record the operators that a function runs, forward and backward, as a graph.

The recorder takes half of the time of torch's ``make_fx``, because it does not support symbolic sizes, operators that
write to their operands, and constants, which most blocks do not have. A function that has one of these is traced by
``make_fx``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Operators that read properties of a tensor; they are not recorded.
_QUERIES = frozenset(
    (
        torch.ops.prim.device.default,
        aten.size.default,
        aten.stride.default,
        aten.storage_offset.default,
        aten.sym_size.default,
        aten.sym_stride.default,
        aten.sym_storage_offset.default,
        aten.sym_numel.default,
        aten.is_contiguous.default,
    )
)


class _NotRecordedError(Exception):
    """Raised if the function runs something that the recorder does not support."""


class _OperatorRecorder(TorchDispatchMode):
    """While active, adds a node to ``graph`` for each operator that runs; ``node.meta["val"]`` is the result as a
    tensor without data. All operands must be results of such operators or registered by :meth:`track`."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self._nodes: dict[int, fx.Node] = {}  # id of a tensor -> node; tensors are kept so that ids are not reused
        self._kept: list[Tensor] = []

    def track(self, tensor: Tensor, node: fx.Node) -> None:
        """Register ``tensor`` as the value of ``node``."""
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        node.meta["val"] = tensor

    def find_node(self, tensor: Tensor) -> fx.Node:
        """Return the node whose value is ``tensor``. Raise :class:`_NotRecordedError` if there is none."""
        if id(tensor) not in self._nodes:
            raise _NotRecordedError(f"a constant of shape {tuple(tensor.shape)}")
        return self._nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks several times for each operator
        if func in _QUERIES:
            return func(*args, **kwargs)
        if func._schema.is_mutable or torch.Tag.data_dependent_output in func.tags:
            raise _NotRecordedError(str(func))
        if _is_decomposed(func, args):
            with self:
                return func.decompose(*args, **kwargs)
        operands, named = self._replace_by_nodes(args), self._replace_by_nodes(kwargs)
        name = self.graph._target_to_str(func.overloadpacket.__name__)
        node = self.graph.create_node("call_function", func, operands, named, name)
        where = fx.traceback.get_current_meta().get("custom")
        if where:
            node.meta["custom"] = dict(where)
        result = func(*args, **kwargs)
        self._track_result(result, node)
        return result

    def _replace_by_nodes(self, value: Any) -> Any:
        """Return ``value`` (arguments of an operator) with tensors replaced by their nodes."""
        if isinstance(value, Tensor):
            return self.find_node(value)
        if isinstance(value, tuple | list):
            return type(value)([self._replace_by_nodes(each) for each in value])
        if isinstance(value, dict):
            return {name: self._replace_by_nodes(each) for name, each in value.items()}
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise _NotRecordedError("a symbolic size")
        return value

    def _track_result(self, result: Any, node: fx.Node) -> None:
        """Register ``result``, a tensor or a tuple or list of tensors, as the value of ``node``."""
        if isinstance(result, FakeTensor):
            self.track(result, node)
        elif isinstance(result, tuple | list):
            node.meta["val"] = result
            for place, each in enumerate(result):
                part = self.graph.call_function(operator.getitem, (node, place))
                if "custom" in node.meta:
                    part.meta["custom"] = node.meta["custom"]
                if each is not None:
                    self._track_result(each, part)
        else:
            raise _NotRecordedError(f"a result of type {type(result).__name__}")


def _is_decomposed(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether autograd decomposes ``func`` into other operators: ``func`` has a composite implementation, and no
    kernel of its own for the device of the first tensor in ``args``."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return False
    device = next((value.device.type for value in args if isinstance(value, Tensor)), None)
    own = device and torch._C._dispatch_key_for_device(device)
    return not (own and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), own))


def trace_function(function: Callable[..., Any], *arguments: Any, symbolic: bool = False) -> fx.Graph:
    """Call ``function`` with ``arguments``, which are tensors without data or lists of them, and return the operators
    that it runs as a graph. The graph has one placeholder for each tensor, and returns all results in one list;
    ``node.meta["val"]`` is the result of each node. ``symbolic``: whether sizes may be symbolic."""
    if not symbolic:
        with suppress(_NotRecordedError):
            return _record_operators(function, arguments)
    traced = make_fx(function, tracing_mode="real", _error_on_data_dependent_ops=False)(*arguments)
    graph: fx.Graph = traced.graph
    return graph


def _record_operators(function: Callable[..., Any], arguments: Sequence[Any]) -> fx.Graph:
    """Do what :func:`trace_function` does, without ``make_fx``. Raise :class:`_NotRecordedError` if the function runs
    something that the recorder does not support."""
    graph = fx.Graph()
    recorder = _OperatorRecorder(graph)
    names = list(inspect.signature(function).parameters)
    if len(names) != len(arguments):  # the function takes any number of arguments
        names = [f"arg{number}" for number in range(len(arguments))]
    for name, argument in zip(names, arguments, strict=True):
        for number, tensor in enumerate(_list_tensors(argument), 1):
            recorder.track(tensor, graph.placeholder(f"{name}_{number}"))
    with recorder:
        results = function(*arguments)
    graph.output([None if result is None else recorder.find_node(result) for result in _list_tensors(results)])
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _copy_without_history(node.meta["val"])
    return graph


def _list_tensors(values: Any) -> Iterator[Any]:
    """Yield the tensors and ``None`` in ``values``, nested lists and tuples, in order."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from _list_tensors(value)
    else:
        yield values


def _copy_without_history(value: Any) -> Any:
    """Return a copy of ``value`` without autograd history. ``value``: a tensor without data, or a tuple or list of such
    tensors and ``None``."""
    if isinstance(value, tuple | list):
        return type(value)([_copy_without_history(each) for each in value])
    if not isinstance(value, FakeTensor):
        return value
    size, strides, offset = value.shape, value.stride(), value.storage_offset()
    with torch._C._DisableTorchDispatch():  # the copy shares the storage, so that views stay views
        like = torch.empty(0, dtype=value.dtype, device="meta").set_(value.untyped_storage(), offset, size, strides)
    return FakeTensor(value.fake_mode, like, value.fake_device)
