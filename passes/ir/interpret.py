"""Run graphs: on meta tensors to infer shapes and dtypes, and on real tensors to compute results.

``node.meta["val"]`` is a tensor on ``meta`` (a tuple of them for operators with several results). Operators that create
tensors have the argument ``device=meta``, which stands for the device of the rank that runs the operators. Results on
real tensors are the reference with which later forms of the model are compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partitioner.passes.errors import PartitionError, UnsupportedError
from partitioner.passes.ir.model import FoldedModel

META = torch.device("meta")

# Cache: (operator, arguments) -> result. Layers repeat, and so do the candidates of a search.
_known: dict[Any, Any] = {}
_MAX_CACHED_RESULTS = 1 << 14
_elementwise: dict[Any, torch.dtype] = {}  # (elementwise operator, dtypes and constants) -> dtype of the result


def infer_meta_value(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of the operator ``target`` on meta tensors, which have shapes and dtypes but no elements. The
    result is cached and may be shared, so it must not be changed.

    ``args``, ``kwargs``: the operator's arguments, with meta tensors.
    """
    if target is operator.getitem and isinstance(args[0], tuple | list):
        return args[0][args[1]]  # avoids a key of the other items, which may be hundreds
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return _run_on_meta(target, args, kwargs)  # an active mode may change the result
    try:
        key = (target, torch.get_default_dtype(), build_argument_key(args), build_argument_key(tuple(kwargs.items())))
        known = _known.get(key, _known)
    except TypeError:  # an argument is not hashable
        return _run_on_meta(target, args, kwargs)
    if known is _known:
        if len(_known) >= _MAX_CACHED_RESULTS:
            _known.clear()
            _elementwise.clear()
        known = _infer_elementwise(target, args, kwargs)
        if known is None:
            known = _run_on_meta(target, args, kwargs)
        _known[key] = known
    return known


def _infer_elementwise(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the meta tensor that an elementwise operator returns, if its operands are contiguous meta tensors and one
    of them has the shape of the result. The operator is not run if the result's dtype is known from an earlier call
    with the same dtypes. Return ``None`` for any other operator or operands."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags or kwargs:
        return None
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not all(t.device == META and t.stride() == _contiguous_stride(t.shape) for t in tensors) or not tensors:
        return None
    shape = max((t.shape for t in tensors), key=lambda of: (len(of), of.numel()))
    if any(torch.broadcast_shapes(shape, t.shape) != shape for t in tensors if t.shape != shape):
        return None
    plain = tuple([(a.dtype, a.dim() == 0) if isinstance(a, Tensor) else build_argument_key(a) for a in args])
    key = target, torch.get_default_dtype(), plain
    dtype = _elementwise.get(key)
    if dtype is None:
        found = _run_on_meta(target, args, kwargs)
        if type(found) is Tensor and found.shape == shape and found.stride() == _contiguous_stride(found.shape):
            _elementwise[key] = found.dtype
        return found  # type: ignore[no-any-return]
    return torch.empty(shape, dtype=dtype, device=META)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor of this shape, including those of dims of size 1 (which
    ``is_contiguous`` ignores)."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps)) if shape else ()


def build_argument_key(argument: Any) -> Any:
    """Return a hashable key of the operator argument ``argument``. Equal constants have equal keys, and so do tensors
    of equal shape, strides, dtype and device. Raises ``TypeError`` for a tensor subclass."""
    if isinstance(argument, Tensor):
        if type(argument) is not Tensor:
            raise TypeError("a tensor of another kind")
        return "tensor", tuple(argument.shape), argument.stride(), argument.dtype, argument.device
    if isinstance(argument, tuple | list):
        return type(argument), tuple([build_argument_key(a) for a in argument])
    if isinstance(argument, slice):
        return (
            "slice",
            build_argument_key(argument.start),
            build_argument_key(argument.stop),
            build_argument_key(argument.step),
        )
    return type(argument), repr(argument) if isinstance(argument, float) else argument


# Operators without a meta kernel in torch, which the normal form replaces. Their result has the spec of the first
# operand, broadcast.
_SAME_SPEC_AS_FIRST = frozenset(
    {
        torch.ops.aten._sample_dirichlet.default,
        torch.ops.aten.binomial.default,
        torch.ops.aten.fake_quantize_per_tensor_affine.default,
        torch.ops.aten.fake_quantize_per_tensor_affine.tensor_qparams,
        torch.ops.aten.fake_quantize_per_channel_affine.default,
        torch.ops.aten._fake_quantize_learnable_per_tensor_affine.default,
        torch.ops.aten._fake_quantize_learnable_per_channel_affine.default,
    }
)


def _run_on_meta(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of the operator ``target`` with the arguments ``args`` and ``kwargs``, which have meta tensors.
    No cache is used. A list of results becomes a tuple.
    """
    if target in _SAME_SPEC_AS_FIRST:
        other = args[1].shape if target is torch.ops.aten.binomial.default else ()
        return args[0].new_empty(torch.broadcast_shapes(args[0].shape, other), device=META)
    with torch.no_grad(), META:
        result = target(*args, **kwargs)
    return tuple(result) if isinstance(result, list) else result


def resolve_meta_values(argument: Any) -> Any:
    """Return ``argument`` (an operator argument, or a nested container of them) with every graph node replaced by its
    meta tensor, ``node.meta["val"]``."""
    return fx.node.map_arg(argument, lambda node: node.meta["val"])


def refresh_node_value(node: fx.Node) -> None:
    """Recompute ``node.meta["val"]``, the meta tensor of the node's result, from the meta tensors of its operands.

    Raises :class:`UnsupportedError` if the operator has no kernel for meta tensors.
    """
    assert callable(node.target), node
    try:
        node.meta["val"] = infer_meta_value(
            node.target, resolve_meta_values(node.args), resolve_meta_values(node.kwargs)
        )
    except PartitionError:
        raise
    except NotImplementedError as error:
        where = f"{node.meta.get('path') or 'the model'} ({node.meta.get('source') or 'source unknown'})"
        raise UnsupportedError(
            f"{node.target} at {where} cannot be run on the meta device ({str(error).split(': ')[0]} has no meta "
            "kernel): "
            "write it with other operators, or register one (torch.library.register_fake)"
        ) from error
    except Exception as error:
        shapes = [tuple(v.shape) for v in pytree.tree_leaves(resolve_meta_values(node.args)) if isinstance(v, Tensor)]
        where = node.meta.get("source") or node.meta.get("path") or node.name
        raise AssertionError(f"{node.format_node()} on operand shapes {shapes} ({where}): {error}") from error


def refresh_graph_values(graph: fx.Graph) -> None:
    """Recompute the meta tensors (``node.meta["val"]``) of all operators of ``graph``, in order."""
    for node in graph.nodes:
        if node.op == "call_function":
            refresh_node_value(node)


def insert_operator_node(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """Insert an operator at the current insertion point of ``graph``, compute its meta tensor and return the new node.

    Args:
        target: the operator.
        args: the operator's positional arguments, with nodes in place of tensors.
        kwargs: the operator's keyword arguments; ``None`` for none.
        like: a node from which the metadata ``path``, ``source`` and ``grad`` are copied; ``None`` for none.
    """
    node = graph.call_function(target, args, dict(kwargs or {}))
    if like is not None:
        node.meta.update({k: like.meta[k] for k in ("path", "source", "grad") if k in like.meta})
    refresh_node_value(node)
    return node


def run_graph(graph: fx.Graph, arguments: Sequence[Tensor], device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Execute ``graph`` on real tensors and return its outputs.

    Args:
        arguments: one tensor for each placeholder, in order.
        device: the device on which operators with the argument ``device=meta`` create their tensors.
    """
    env: dict[fx.Node, Any] = {}
    rest = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(rest)
        elif node.op == "output":
            return tuple(env[n] for n in node.args[0])
        else:
            args = fx.node.map_arg(node.args, env.__getitem__)
            kwargs = {
                k: torch.device(device) if v == META else v
                for k, v in fx.node.map_arg(node.kwargs, env.__getitem__).items()
            }
            result = node.target(*args, **kwargs)
            env[node] = result
    raise AssertionError("a graph ends in an output node")


def run_folded(
    model: FoldedModel,
    states: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Execute ``model``, a sequence of calls of graphs, on real tensors, and return all its values by name: the model's
    inputs and the outputs of all calls.

    Args:
        states: parameters and buffers by name; constants are taken from the model.
        inputs: the model's inputs by value name.
        device: the device on which operators create new tensors.
    """
    values = dict(inputs)
    known = {**model.constants, **states}
    for call in model.calls:
        arguments = [known[s] for s in call.states] + [values[i] for i in call.inputs]
        values.update(zip(call.outputs, run_graph(model.blocks[call.block].graph, arguments, device), strict=True))
    return values
