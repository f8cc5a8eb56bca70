"""Let a forward that is being traced read tensors as Python numbers, and call conversions of modules.

Traced tensors have no values, so ``bool((mask == causal).all())`` would end a trace. Torch's own encoders compute this
on a mask that forward makes. Inside :func:`trace_concrete_scalars`, the number is computed: the operators that lead to
it are run again on the model's constants and buffers, including in-place writes. If the number depends on inputs,
parameters or random draws, it is not computed, and torch.export raises an error.

Inside :func:`trace_module_conversions`, a conversion of a module, such as ``self.router =
self.router.to(torch.float32)``, has no effect if the module has that dtype already. (Torch cannot replace the
parameters of a module during a trace, even by equal ones.) A conversion to another dtype would change the model's
weights at the first call, and raises an error.
"""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.faults import is_user_file, shorten_file_path
from partitioner.passes.trace.autocast import without_autocast

_NUMBER_READING_FUNCTIONS = frozenset(
    {
        Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist,
        Tensor.is_nonzero, Tensor.equal, Tensor.allclose, torch.is_nonzero, torch.equal, torch.allclose,
        Tensor.__format__,
    }
)  # fmt: skip
_FINITENESS = frozenset(("isfinite", "isinf", "isnan"))  # names of functions that check values
_REDUCTIONS = frozenset(("all", "any", "logical_not", "bitwise_not", "clone"))  # names of operators on their results
_MOST_NUMBERS = 1 << 28  # most elements of all tensors that are computed for one number


@contextmanager
def trace_concrete_scalars(
    model: nn.Module,
    buffer_values: Mapping[str, Tensor],
    read_buffers: set[str],
    random_operators: list[str] | None = None,
) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which forward may read tensors as numbers (``item``, ``bool``)
    if the numbers depend on no input, parameter or random draw. An example is a counter in a buffer.

    Args:
        model: the model.
        buffer_values: buffer name -> tensor with the buffer's real values.
        read_buffers: a set to which the names of buffers are added on which a number depends that forward read.
        random_operators: a list to which the names of random operators are added if forward tried to read a number that
            depends on them; ``None`` if the names are not needed.
    """
    known, forward = (
        _ConcreteScalarMode(buffer_values, read_buffers, [] if random_operators is None else random_operators),
        model.forward,
    )

    @functools.wraps(forward)
    def enter(*args: Any, **kwargs: Any) -> Any:
        known.enter(model)
        return forward(*args, **kwargs)

    with mock.patch.dict(model.__dict__, {"forward": enter}), known:
        yield


class _ConcreteScalarMode(TorchFunctionMode):
    """A torch function mode for a trace, in which functions that read tensors as numbers, such as ``Tensor.item``,
    return real numbers if the numbers follow from constants and buffers of the model.

    ``buffer_values``: buffer name -> tensor with the buffer's real values. ``read_buffers``: a set to which the names
    of buffers are added on which a number depends that forward read. ``random_operators``: a list to which the names of
    random operators are added if forward tried to read a number that depends on them.
    """

    def __init__(
        self, buffer_values: Mapping[str, Tensor], read_buffers: set[str], random_operators: list[str]
    ) -> None:
        super().__init__()
        self.held, self.asked, self.drawn = buffer_values, read_buffers, random_operators
        self.placeholders: dict[fx.Node, str] = {}  # placeholder of a buffer in the present trace -> the buffer's name

    def enter(self, model: nn.Module) -> None:
        """Find and store the placeholders of the buffers of ``model`` in the graph of the trace that begins, so that
        numbers that depend on buffers can be computed. It must be called at the start of the model's forward."""
        self.placeholders, mode = {}, get_proxy_mode()
        if mode is None:
            return
        for name, buffer in model.named_buffers():
            slot = get_proxy_slot(buffer, mode.tracer, None)
            if name in self.held and slot is not None:
                self.placeholders[slot.proxy.node] = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the torch function ``func`` with ``args`` and ``kwargs`` and return its result. If ``func`` reads traced
        tensors as numbers, and these can be computed, it runs on tensors with real values. ``types`` is not used."""
        kwargs = kwargs or {}
        mode = get_proxy_mode() if func in _NUMBER_READING_FUNCTIONS else None
        if mode is not None:
            tensors, tree = pytree.tree_flatten((args, kwargs))
            numbers = self._compute_tensor_numbers([t for t in tensors if isinstance(t, Tensor)], mode.tracer)
            if numbers is None and func is Tensor.__bool__ and _checks_finiteness(args[0], mode.tracer):
                raise UnsupportedError(_FINITENESS_TOLD.format(_format_user_line()))
            if numbers is not None:
                found = iter(numbers)
                leaves = [next(found) if isinstance(t, Tensor) else t for t in tensors]
                with _suspend_tracing():
                    args, kwargs = pytree.tree_unflatten(leaves, tree)
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _compute_tensor_numbers(self, tensors: list[Tensor], tracer: Any) -> list[Tensor] | None:
        """Return copies of the traced ``tensors`` with real values; ``None`` if the values depend on more than
        constants and buffers of the model. ``tracer``: torch's object that records the operators of the trace."""
        slots = [get_proxy_slot(t, tracer, None) for t in tensors]
        buffers, wanted = self.placeholders, [slot.proxy.node for slot in slots if slot is not None]
        if not wanted or len(wanted) < len(tensors):
            return None
        needed = _find_needed_nodes(wanted, set(buffers))
        if needed is None:
            self.drawn[:] = _find_random_sources(wanted)
            return None
        try:
            with _suspend_tracing(), torch.no_grad():
                values = _evaluate_nodes(needed, tracer.root, {n: self.held[name] for n, name in buffers.items()})
        except Exception:  # torch.export reports the error
            return None
        self.asked.update(buffers[node] for node in needed if node in buffers)
        return [values[node] for node in wanted]


_FINITENESS_TOLD = (
    "forward branches on whether values are finite{}, which depends on data, and a plan contains only one branch; "
    "remove the check, or write torch.where(torch.isfinite(x), x, limit) without a branch. Models of "
    "transformers check only in training mode: call model.eval() before planning if the model has no dropout and no "
    "batch norm"
)


def _checks_finiteness(tensor: Tensor, tracer: Any) -> bool:
    """Return whether the traced ``tensor`` is the result of a check for finite values, such as
    ``torch.isfinite(x).all()``. ``tracer``: torch's object that records the operators of the trace."""
    slot = get_proxy_slot(tensor, tracer, None)
    node = None if slot is None else slot.proxy.node
    while node is not None and _name_operator(node) in _REDUCTIONS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is not None and _name_operator(node) in _FINITENESS


def _name_operator(node: fx.Node) -> str:
    """Return the name of the operator that ``node`` calls, without namespace and overload; an empty text if ``node``
    does not call an operator."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).rpartition("::")[2]


def _format_user_line() -> str:
    """Return `` (file:line)``, for messages, of the innermost line of the user's code that is running; an empty text if
    there is none."""
    frames = [f for f in traceback.extract_stack() if is_user_file(f.filename)]
    return f" ({shorten_file_path(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


@contextmanager
def _suspend_tracing() -> Iterator[None]:
    """Return a context in which no operator is traced and autocast is off."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), without_autocast():
        yield


def _find_needed_nodes(wanted: list[fx.Node], given: set[fx.Node]) -> list[fx.Node] | None:
    """Return the nodes that must run to compute the values of the nodes ``wanted``, in graph order, including operators
    that write in place to memory of such a node. Return ``None`` if the values depend on an input, a parameter or a
    random operator that is not in ``given``, or if they are too large.

    ``given``: nodes whose values are known.
    """
    order = {node: place for place, node in enumerate(wanted[0].graph.nodes)}
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        for target in list_written_operands(node):
            writers.setdefault(find_allocating_node(target), []).append(node)
    needed, left, count = set[fx.Node](), list(wanted), 0
    while left:
        node = left.pop()
        if node in needed:
            continue
        if not _is_fixed(node) and node not in given:
            return None
        value = node.meta.get("val")
        count += value.numel() if isinstance(value, Tensor) else 0
        if count > _MOST_NUMBERS:
            return None
        needed.add(node)
        left += [*node.all_input_nodes, *writers.get(find_allocating_node(node), [])]
    return sorted(needed, key=order.__getitem__)


def _find_random_sources(wanted: list[fx.Node]) -> list[str]:
    """Return the names of the random operators on which the values of the nodes ``wanted`` depend."""
    seen, left, found = set[fx.Node](), list(wanted), list[str]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                found.append(str(node.target))
    return found


def _is_fixed(node: fx.Node) -> bool:
    """Return whether ``node`` is a constant of the graph or a deterministic operator of torch, whose result depends
    only on its operands."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload) or overload.namespace not in ("aten", "prims"):
        return False
    return torch.Tag.nondeterministic_seeded not in overload.tags


def list_written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands to which the operator ``node`` writes in place; an empty list if it writes to none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    writes = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in writes if isinstance(value, fx.Node)]


def find_allocating_node(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of ``node``: ``node`` itself, or the tensor to which a chain of views
    and in-place operators leads back from ``node``."""
    while node.all_input_nodes:
        schema = getattr(node.target, "_schema", None)
        aliases = node.target is operator.getitem or (
            schema is not None and any(r.alias_info is not None for r in schema.returns)
        )
        if not aliases:
            break
        node = node.all_input_nodes[0]
    return node


def is_written(first: fx.Node, memory: set[fx.Node]) -> bool:
    """Return whether ``first`` or a later operator of the same graph writes in place to memory that a node in
    ``memory`` allocated."""
    nodes = list(first.graph.nodes)
    return any(
        find_allocating_node(to) in memory for node in nodes[nodes.index(first) :] for to in list_written_operands(node)
    )


def _evaluate_nodes(nodes: list[fx.Node], root: nn.Module, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """Run the operators ``nodes``, which are in graph order, and return their values: node -> value. ``root``: the
    module that holds the constants of the graph. ``given``: node -> value, for nodes that are not run because their
    values are known."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if node in given:
            values[node] = given[node].detach().to("cpu", node.meta["val"].dtype, copy=True)
        elif node.op == "get_attr":
            attribute = operator.attrgetter(str(node.target))(root)
            if isinstance(attribute, FakeTensor):
                raise ValueError(f"{node.target} has no numbers")
            values[node] = attribute.detach().clone()
        else:
            assert callable(node.target)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


@contextmanager
def trace_module_conversions(model: nn.Module, *, in_float64: bool) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which forward can call ``module.to``, ``module.float`` and
    similar methods if they change neither dtype nor device. A call that would change the dtype or device of a parameter
    or buffer raises :class:`UnsupportedError`.

    Args:
        model: the model.
        in_float64: whether the model was converted to float64 for the trace, so that a conversion to another
            floating-point dtype is ignored.
    """

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Return ``module`` unchanged. This replaces ``nn.Module._apply``. Raise :class:`UnsupportedError` if
        ``function``, which converts a tensor, would change the dtype or device of a parameter or buffer of the module
        or its submodules. ``recurse`` is not used."""
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), _disable_current_modes():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                result = function(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
                if (result.dtype, result.device) == (tensor.dtype, tensor.device) or (
                    in_float64 and _is_float_conversion(result, tensor)
                ):
                    continue
                path = next((path for path, part in model.named_modules() if part is module), type(module).__name__)
                before, after = (f"{t.dtype} on {t.device}".replace("torch.", "") for t in (tensor, result))
                raise UnsupportedError(
                    f"forward converts the module {path!r} ({name}: {before}, to {after}), which changes the model's "
                    "own weights at its first call; expected a module that already has this dtype: convert it before "
                    "planning (module.to(...)) and leave precision= out, or convert the inputs of the module instead"
                )
        return module

    with mock.patch.object(nn.Module, "_apply", convert):
        yield


def _is_float_conversion(result: Any, tensor: Tensor) -> bool:
    """Return whether, in a model in float64, a conversion of ``tensor`` to ``result`` may be ignored: ``tensor`` is in
    float64, and ``result`` is floating-point and on the same device."""
    return bool(result.dtype.is_floating_point and tensor.dtype == torch.float64 and result.device == tensor.device)
