"""Handle buffers and frozen parameters that forward changes: trace the writes, make them graph values, initialise them.

Requires: a module before it is traced, or its captured graph. Provides, in this order:

* :func:`trace_buffer_writes` traces writes that torch.export loses or cannot trace. If forward assigns a new tensor to
  a buffer or frozen parameter, the value is copied into the old tensor at the end of forward. ``x.data`` is traced as
  ``x.detach()``. If a tensor is assigned to ``x.data``, it is read instead of ``x`` from then on, and copied into ``x``
  at the end, so that views of the old memory keep their values. A batch norm with a cumulative average
  (``momentum=None``) counts its batches by a tensor; torch would need the count as a Python number.
* :func:`trace_state_aliases` traces parameters and buffers that are also stored outside of modules, as in a list.
* :func:`spell_out` decomposes norms that write to running statistics, although their schema does not say so, if
  torch's own functionalisation does not handle them.
* :func:`settle_updates` takes a captured graph in normal form. For every state (parameter or buffer) that forward
  changes, it adds an operator whose result becomes the state's value at the end of a step. The result has the state's
  dtype, no gradient, and memory of its own.
* :func:`collect_initial_values` describes the buffers' values before the first step, if a few numbers suffice. A run
  that has no weights starts from them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.inplace import is_view
from partitioner.passes.ir.interpret import infer_meta_value
from partitioner.passes.ir.model import Captured, FoldedModel, ModelState
from partitioner.passes.trace.concrete_scalars import find_allocating_node, list_written_operands

aten = torch.ops.aten

_NORMS = (
    aten.batch_norm.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten.instance_norm.default,
)
# positions of the running mean and variance, and of the flag that has them updated
_STATISTICS, _FROM_BATCH = (3, 4), 5


def spell_out(graph: fx.Graph) -> bool:
    """Decompose instance norms that update running statistics in ``graph``, in place, into batch norms.

    Return whether the graph has any norm (batch or instance norm) that updates running statistics.
    """
    found = [n for n in graph.nodes if n.target in _NORMS and n.args[_FROM_BATCH] and _list_changed_statistics(n)]
    for node in found:
        if node.target is aten.instance_norm.default:
            _replace_by_batch_norm(graph, node)
    return bool(found)


def _list_changed_statistics(node: fx.Node) -> list[fx.Node]:
    """Return a list of the nodes of the running mean and the running variance that ``node``, a batch or instance norm,
    updates. A statistic that the norm does not have is left out."""
    return [a for a in (node.args[place] for place in _STATISTICS) if isinstance(a, fx.Node)]


def _replace_by_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``node`` in ``graph``, an instance norm that updates running statistics, by a batch norm with reshapes
    around it, in place. The results do not change. The samples become channels of the batch norm, so each sample is
    normalised by itself and updates its own copy of the running statistics. The mean of these copies is written to the
    module's running statistics."""
    x, weight, bias, *statistics, _, momentum, eps, cudnn = node.args
    assert isinstance(x, fx.Node), node
    samples, channels, *rest = x.meta["val"].shape

    def append(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = dict(node.meta)
        return made

    def repeat(operand: Any) -> Any:
        return append(aten.repeat.default, operand, [samples]) if isinstance(operand, fx.Node) else operand

    with graph.inserting_before(node):
        of_samples = [repeat(s) for s in statistics]
        each = append(aten.reshape.default, x, [1, samples * channels, *rest])
        normed = append(
            aten.batch_norm.default, each, repeat(weight), repeat(bias), *of_samples, True, momentum, eps, cudnn
        )
        for snapshot, moved in zip(statistics, of_samples, strict=True):
            if isinstance(snapshot, fx.Node):
                seen = append(aten.mean.dim, append(aten.reshape.default, moved, [samples, channels]), [0])
                append(aten.copy_.default, snapshot, seen)
        node.replace_all_uses_with(append(aten.reshape.default, normed, [samples, channels, *rest]))
    graph.erase_node(node)


_TABLES = {"_buffers": "buffer", "_parameters": "parameter"}

_DATA_GET, _DATA_SET = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]

_MOST_OBJECTS = 100_000  # most objects that are searched for parameters and buffers


@contextmanager
def trace_buffer_writes(model: nn.Module, *, in_float64: bool) -> Iterator[None]:
    """Return a context for a trace of ``model``, in which forward may assign to buffers, to frozen parameters and to
    ``.data``. The assigned values are copied into the model's own tensors at the end of forward.

    The context raises :class:`UnsupportedError` for changes that a plan cannot keep: another shape or dtype, a
    parameter or buffer that is added or removed, and parameters or buffers that share memory because of an assignment,
    if one of them is trained or changed in place.

    Args:
        in_float64: whether the model is traced in float64. If so, an assigned floating-point tensor may differ in dtype
            from the tensor that it replaces.
    """
    averaging = [m for m in model.modules() if isinstance(m, _BatchNorm) and _has_cumulative_average(m)]
    for module in averaging:
        module.__dict__["forward"] = functools.partial(_forward_with_cumulative_average, module)
    own = model.__dict__.get("forward")
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def forward_with_writes(*args: Any, **kwargs: Any) -> Any:
        """Call the model's forward with the given arguments, copy the values that it assigned to parameters and buffers
        into the model's own tensors, and return its output.
        """
        snapshot = _StateSnapshot.take(model)  # the traced tensors, which torch.export has put into the model
        with _hide_assignments_from_export(), _DataAssignmentMode(snapshot, (args, kwargs), in_float64) as data:
            output = data.replace_in_output(forward(*args, **kwargs))
        _write_all([*data.iterate_writes(), *snapshot.restore_replaced(data)], snapshot, in_float64)
        return output

    model.__dict__["forward"] = forward_with_writes
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.__dict__["forward"] = own
        for module in averaging:
            module.__dict__.pop("forward", None)


@contextmanager
def trace_state_aliases(model: nn.Module) -> Iterator[None]:
    """Return a context for a trace of ``model``, in which every list, dict or object that also holds a parameter or
    buffer, such as a generation cache, holds the traced tensor. torch.export replaces only the tensors in modules; the
    others would keep the tensor from before the trace."""
    aliases = find_state_aliases(model)
    forward, own = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def forward_with_aliases(*args: Any, **kwargs: Any) -> Any:
        """Call the model's forward and return its output. Meanwhile all places outside of modules that hold a parameter
        or buffer, such as a list, hold the traced tensor instead."""
        before = [alias.holder[alias.key] for alias in aliases]
        try:
            for alias in aliases:
                alias.update()
            return forward(*args, **kwargs)
        finally:
            for alias, tensor in zip(aliases, before, strict=True):
                alias.holder[alias.key] = tensor

    if aliases:
        model.__dict__["forward"] = forward_with_aliases
    try:
        yield
    finally:
        if aliases:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.__dict__["forward"] = own


@dataclass(frozen=True)
class StateAlias:
    """A place outside of the modules' tables of parameters and buffers that holds the same tensor as such a table, such
    as an entry of a list.

    ``holder``: the list or dict (or an object's ``__dict__``). ``key``: the index or key in ``holder``. ``states``: the
    module's own table of parameters or buffers. ``name``: the key of the same tensor in ``states``.
    """

    holder: Any
    key: Any
    states: dict[str, Any]
    name: str

    def update(self) -> None:
        """Store the tensor that the module's own table now has at the place that this alias describes, such as an entry
        of a list."""
        self.holder[self.key] = self.states[self.name]


def find_state_aliases(model: nn.Module) -> list[StateAlias]:
    """Return the places that hold a parameter or buffer of ``model`` outside of the modules' own tables of them.

    Lists, dicts and objects that can be reached from attributes of the modules are searched, up to a maximum number.
    """
    found = []
    owners = {
        id(tensor): (states, name)
        for module in model.modules()
        for states in (module._parameters, module._buffers)
        for name, tensor in states.items()
        if tensor is not None
    }
    modules = [vars(module) for module in model.modules()]
    seen = {id(own[table]) for own in modules for table in ("_parameters", "_buffers", "_modules")}
    waiting: list[Any] = [*modules]
    while waiting and len(seen) < _MOST_OBJECTS:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(value, Tensor):
                if id(value) in owners and isinstance(holder, dict | list):
                    found.append(StateAlias(holder, key, *owners[id(value)]))
            elif isinstance(value, dict | list | tuple):
                waiting.append(value)
            elif not isinstance(value, nn.Module | type) and isinstance(getattr(value, "__dict__", None), dict):
                waiting.append(vars(value))
    return found


@contextmanager
def _hide_assignments_from_export() -> Iterator[None]:
    """Return a context in which torch.export does not observe assignments to buffers of the outermost module.
    Otherwise, torch.export would copy the assigned values into the buffers one after the other, which would be wrong if
    the new value of one buffer is the old value of another."""
    hooks = nn_module._global_buffer_registration_hooks
    others = {
        number: hook for number, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("torch.")
    }
    with mock.patch.object(nn_module, "_global_buffer_registration_hooks", OrderedDict(others)):
        yield


@dataclass(frozen=True)
class _TensorWrite:
    """A write to be done at the end of forward: copy ``value`` into the model's tensor ``tensor``. ``description``:
    what forward did to the tensor, such as an assignment, as text for error messages."""

    tensor: Tensor
    value: Tensor
    description: str


@dataclass
class _StateSnapshot:
    """The parameters and buffers of ``model`` at the start of forward, to find out to which of them forward assigns.

    ``states``: the tensors, by (module, name of the module's table, key in the table); the tables are ``_parameters``
    and ``_buffers``. A value is ``None`` if the module has the name without a tensor. ``names``: the full name of each
    tensor, by the tensor's ``id``. ``plain``: tensors that are ordinary attributes of a module, by (module, attribute
    name).
    """

    model: nn.Module
    states: dict[tuple[nn.Module, str, str], Tensor | None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # id of a tensor -> its full name
    plain: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)

    @classmethod
    def take(cls, model: nn.Module) -> _StateSnapshot:
        """Return a snapshot of the present parameters, buffers and plain tensor attributes of ``model``."""
        snapshot = cls(model)
        for path, module in model.named_modules():
            for table in _TABLES:
                for key, tensor in module.__dict__[table].items():
                    snapshot.states[module, table, key] = tensor
                    if tensor is not None:
                        snapshot.names.setdefault(id(tensor), f"{path}.{key}" if path else key)
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    snapshot.plain[module, key] = value
        return snapshot

    def restore_replaced(self, data: _DataAssignmentMode) -> Iterator[_TensorWrite]:
        """Put the original tensors back where forward assigned new tensors to buffers and frozen parameters. For each,
        yield a write that copies the assigned value into the original tensor. The caller executes the writes at the end
        of forward.

        Raises :class:`UnsupportedError` for assignments that a plan cannot keep, such as another shape or a parameter
        that is trained.

        Args:
            data: has a record of forward's reads and assignments of ``x.data``.
        """
        for (module, key), plain in self.plain.items():
            if id(plain) in data.read and vars(module).get(key) is not plain:
                raise UnsupportedError(
                    f"forward reads {self._format_tensor_name(module, key)!r}, a tensor that is no buffer, and "
                    "assigns a new one: a plan would read the old one at each step; register it (register_buffer)"
                )
        for module in self.model.modules():
            for table, kind in _TABLES.items():
                for key in module.__dict__[table]:
                    if (module, table, key) not in self.states:
                        raise UnsupportedError(
                            f"forward registers the {kind} {self._format_tensor_name(module, key)!r}; expected it in "
                            "the model before planning, with its final shape, because a plan has the buffers and "
                            "parameters of the model at planning time"
                        )
        now = {place: place[0].__dict__[place[1]].get(place[2]) for place in self.states}
        for (module, table, key), before in self.states.items():
            value = now[module, table, key]
            if value is before:
                continue
            name, kind = self._format_tensor_name(module, key), _TABLES[table]
            if before is None or value is None:
                raise UnsupportedError(
                    f"forward sets the {kind} {name!r}, {_format_tensor_spec(before)}, to "
                    f"{_format_tensor_spec(value)}; expected the same shape, because the {kind}s of a plan have "
                    "fixed shapes"
                )
            if kind == "parameter" and (before.requires_grad or value.requires_grad):
                raise UnsupportedError(
                    f"forward sets the parameter {name!r} to another tensor, and one of the two requires a gradient, "
                    "which the optimizer would not get; expected a frozen parameter that is changed in place "
                    "(.copy_(...))"
                )
            if any(snapshot is before and now[place] is not value for place, snapshot in self.states.items()):
                raise UnsupportedError(
                    f"forward sets the {kind} {name!r}, which has several names in the model, under one of them only; "
                    "expected a change in place (.copy_(...)), which changes it under all names"
                )
            module.__dict__[table][key] = before
            yield _TensorWrite(before, data.get_assigned(value), f"sets the {kind} {name!r}")

    def _format_tensor_name(self, module: nn.Module, key: str) -> str:
        """Return the full name of the attribute ``key`` of ``module``, such as ``layers.0.running_mean``, for
        messages.
        """
        path = next((path for path, part in self.model.named_modules() if part is module), type(module).__name__)
        return f"{path}.{key}" if path else key


class _DataAssignmentMode(TorchFunctionMode):
    """Function mode that makes assignments to ``x.data`` traceable: after an assignment, functions that read ``x`` get
    the assigned tensor instead.

    ``values``: ``id`` of each tensor to whose ``.data`` forward assigned -> (this tensor, the assigned tensor).
    ``read``: the ids of plain tensor attributes of modules (neither parameters nor buffers) that forward read.
    ``snapshot``: the model's tensors at the start of forward. ``inputs``: tensors among forward's arguments.
    ``in_float64``: whether the model is traced in float64; if so, an assigned floating-point tensor may differ in dtype
    from the tensor that it replaces.
    """

    def __init__(self, snapshot: _StateSnapshot, inputs: Any, in_float64: bool) -> None:
        super().__init__()
        self.held, self.double = snapshot, in_float64
        self.inputs = {id(leaf) for leaf in pytree.tree_leaves(inputs)}
        self.values: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> (it, its replacement)
        self.read: set[int] = set()
        self._plain = {id(t) for t in snapshot.plain.values()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with ``args`` and ``kwargs`` and return its result. Each operand to whose
        ``.data`` forward assigned a tensor is replaced by the assigned tensor, and reads and writes of ``.data`` are
        recorded. ``types``: unused.
        """
        kwargs = kwargs or {}
        if self._plain:
            self.read |= {id(a) for a in pytree.tree_leaves((args, kwargs))} & self._plain
        if func == _DATA_SET and isinstance(args[1], Tensor):
            value = self.get_assigned(args[1])
            _check_same_spec(f"sets .data of {self._format_tensor_name(args[0])}", args[0], value, self.double)
            self.values[id(args[0])] = args[0], value
            return None
        if self.values:
            alone = func == _DATA_GET or func is Tensor.detach or not torch.is_grad_enabled()
            args, kwargs = pytree.tree_map(functools.partial(self.get_assigned, alone=alone), (args, kwargs))
        return args[0].detach() if func == _DATA_GET else func(*args, **kwargs)

    def get_assigned(self, value: Any, *, alone: bool = True) -> Any:
        """Return the tensor that forward assigned to ``value.data`` during the trace, and which therefore has the
        present value of the operand ``value``. Return ``value`` itself if forward assigned none.

        Args:
            alone: whether the operand is read without gradients, as in ``detach``. If false, raise
                :class:`UnsupportedError` if forward assigned to ``value.data`` and ``value`` requires a gradient,
                because the gradient would be wrong.
        """
        if not isinstance(value, Tensor) or id(value) not in self.values:
            return value
        if value.requires_grad and not alone:
            raise UnsupportedError(
                f"forward sets .data of {self._format_tensor_name(value)}, which requires a gradient, and reads it "
                "afterwards: its gradient would be computed for the old values. Change trained parameters after the "
                "optimizer's step, or freeze it (requires_grad_(False))"
            )
        return self.values[id(value)][1]

    def replace_in_output(self, output: Any) -> Any:
        """Return ``output``, the value that forward returns. Each tensor to whose ``.data`` forward assigned is
        replaced by the assigned tensor."""
        return pytree.tree_map(functools.partial(self.get_assigned, alone=False), output) if self.values else output

    def iterate_writes(self) -> Iterator[_TensorWrite]:
        """Yield a write for each parameter, buffer or input to whose ``.data`` forward assigned: it copies the assigned
        tensor into the parameter, buffer or input."""
        for tensor, value in self.values.values():
            if id(tensor) in self.held.names or id(tensor) in self.inputs:
                yield _TensorWrite(tensor, value, f"sets .data of {self._format_tensor_name(tensor)}")

    def _format_tensor_name(self, tensor: Tensor) -> str:
        """Return the quoted name of ``tensor``, a parameter or buffer of the model, for messages; the text ``a tensor``
        for any other tensor."""
        name = self.held.names.get(id(tensor))
        return "a tensor" if name is None else repr(name)


def _write_all(writes: Iterable[_TensorWrite], snapshot: _StateSnapshot, in_float64: bool) -> None:
    """Execute ``writes`` at the end of forward: copy values that forward assigned into the model's own tensors. Raise
    :class:`UnsupportedError` if shapes or dtypes differ, or if parameters or buffers would share memory afterwards
    although one of them is trained or changed in place.

    Args:
        writes: the tensors to change, with their new values.
        snapshot: the model's tensors at the start of forward.
        in_float64: whether the model is traced in float64. If so, an assigned floating-point tensor may differ in dtype
            from the tensor that receives it.
    """
    last = {id(w.tensor): w for w in writes}  # only one write to a tensor that has several names
    if not last:
        return
    for write in last.values():
        _check_same_spec(write.description, write.tensor, write.value, in_float64)
    _check_unshared(last, snapshot)
    values = [w.value.clone() if _is_state_or_input(w.value) else w.value for w in last.values()]
    with torch.no_grad():
        for write, value in zip(last.values(), values, strict=True):
            write.tensor.copy_(value)


def _check_unshared(writes: Mapping[int, _TensorWrite], snapshot: _StateSnapshot) -> None:
    """Raise :class:`UnsupportedError` if, because of assignments in forward, parameters or buffers share memory of
    which one is trained or changed in place.

    Args:
        writes: ``id`` of a tensor -> the write of the value that forward assigned to it.
        snapshot: the model's tensors at the start of forward.
    """
    before = {id(t): t for t in snapshot.states.values() if t is not None}
    after = {key: writes[key].value if key in writes else tensor for key, tensor in before.items()}
    memory = {key: _find_tensor_memory(tensor) for key, tensor in after.items()}
    changed = {
        find_allocating_node(to) for node in _find_graph_nodes(memory.values()) for to in list_written_operands(node)
    }
    for key, write in writes.items():
        sharing = [k for k in after if memory[k] is memory.get(key) and _can_share_elements(after[k], write.value)]
        moved = any(before[k].requires_grad or _find_tensor_memory(before[k]) in changed for k in sharing)
        if key in memory and memory[key] is not None and len(sharing) > 1 and moved:
            others = ", ".join(repr(snapshot.names[k]) for k in sharing if k != key)
            raise UnsupportedError(
                f"forward {write.description} to memory that it then shares with {others}, and one of these is "
                "changed in "
                "place; expected a copy"
                ": .copy_(...), or clone()"
            )


def _find_graph_nodes(nodes: Iterable[fx.Node | None]) -> Iterable[fx.Node]:
    """Return all nodes of the graph to which the nodes in ``nodes`` belong; an empty result if all entries are
    ``None``. ``nodes``: nodes of one graph, or ``None``."""
    return next((node.graph.nodes for node in nodes if node is not None), ())


def _can_share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether ``one`` and ``other``, two tensors in the same memory, may have elements in common, because their
    address ranges overlap."""
    (start, end), (first, last) = (
        (t.storage_offset(), t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (one, other)
    )
    return start <= last and first <= end


def _is_state_or_input(tensor: Tensor) -> bool:
    """Return whether the traced ``tensor`` is a parameter, buffer or input of the graph, or a view of one. If so,
    writes to the model's tensors may change it, and the caller copies it before such writes.
    """
    memory = _find_tensor_memory(tensor)
    return memory is not None and memory.op == "placeholder"


def _check_same_spec(description: str, tensor: Tensor, value: Tensor, in_float64: bool) -> None:
    """Raise :class:`UnsupportedError` unless ``value``, which forward assigns to ``tensor``, has the shape and dtype of
    ``tensor``.

    ``description``: what forward does, such as ``sets the buffer 'mean'``, as text for the message. ``in_float64``:
    whether the model is traced in float64, so that two floating-point dtypes may differ.
    """
    both_float = in_float64 and tensor.dtype.is_floating_point and value.dtype.is_floating_point
    if tensor.shape == value.shape and (tensor.dtype == value.dtype or both_float):
        return
    wanted = "shape" if tensor.shape != value.shape else "type"
    raise UnsupportedError(
        f"forward {description}, {_format_tensor_spec(tensor)}, to {_format_tensor_spec(value)}; expected the same "
        f"{wanted}: "
        "buffers and parameters of a plan have fixed shapes and dtypes"
    )


def _get_node(tensor: Tensor) -> fx.Node | None:
    """Return the node that computes ``tensor`` in the graph of the active trace; ``None`` if ``tensor`` is not traced,
    or if no trace is active."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    return slot.proxy.node if slot is not None else None


def _find_tensor_memory(tensor: Tensor) -> fx.Node | None:
    """Return the graph node that allocated the memory of ``tensor``; the memory of a view is that of its base. Return
    ``None`` if the tensor is not traced."""
    node = _get_node(tensor)
    return find_allocating_node(node) if node is not None else None


def _format_tensor_spec(value: Tensor | None) -> str:
    """Return dtype and shape of the tensor ``value`` as text, such as ``float32 of shape (4, 8)``; the text ``None`` if
    ``value`` is ``None``."""
    if value is None:
        return "None"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _has_cumulative_average(module: _BatchNorm) -> bool:
    """Return whether ``module`` is a batch norm that averages its statistics over all batches so far
    (``momentum=None``), so that their update depends on its batch counter."""
    plain = type(module).forward is _BatchNorm.forward
    return plain and module.momentum is None and module.training and module.num_batches_tracked is not None


def _forward_with_cumulative_average(self: _BatchNorm, input: Tensor) -> Tensor:
    """Return the batch norm of ``input`` with a cumulative average, and update the module's running statistics and
    batch counter. This function replaces the ``forward`` of torch's batch norm, which reads the counter as a Python
    number and so cannot be traced; this function reads the counter as a tensor."""
    self._check_input_dim(input)
    assert self.running_mean is not None
    assert self.running_var is not None
    assert self.num_batches_tracked is not None
    self.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    for snapshot, seen in ((self.running_mean, mean), (self.running_var, variance)):
        snapshot.add_((seen - snapshot) / self.num_batches_tracked)
    return result


_PLACE = ("path", "source", "stack")


def settle_updates(captured: Captured) -> dict[str, fx.Node]:
    """For each parameter or buffer that forward changes, append an operator to the graph of ``captured`` that returns
    the new value in the dtype of the tensor, without a gradient and in memory of its own. Return a dict: name of the
    parameter or buffer -> node of this operator. At the end of a step, the node's value is stored in the tensor.

    The graph outputs these nodes after its other results. Raises :class:`UnsupportedError` if forward changes a
    parameter that is trained.
    """
    if not captured.updates:
        return {}
    _check_frozen(captured)
    graph = captured.graph
    output = graph.output_node()
    by_name = {n.name: n for n in graph.nodes}
    made: dict[str, fx.Node] = {}
    for state, name in captured.updates.items():
        value = by_name[name]
        with graph.inserting_before(output if value.op == "placeholder" else value.next):
            made[state] = _fit_written_value(graph, value, captured.states[state])
    named = {captured.loss, *(o.value for o in captured.outputs)}
    returned: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    output.args = ((*(n for n in returned if n.name in named), *made.values()),)
    return made


def mark_changed_as_buffers(states: Mapping[str, ModelState], changed: Collection[str]) -> dict[str, ModelState]:
    """Return ``states`` (by name), with parameters whose names are in ``changed`` turned into states of the kind
    ``buffer``. No optimizer updates such a parameter, and each rank stores the value that forward computes, as for a
    buffer.

    ``changed``: names of the parameters and buffers that forward changes.
    """
    return {n: replace(s, kind="buffer") if n in changed and s.kind == "parameter" else s for n, s in states.items()}


def _check_frozen(captured: Captured) -> None:
    """Raise :class:`UnsupportedError` if the forward of the model ``captured`` changes a parameter that requires a
    gradient."""
    for name in captured.updates:
        state = captured.states[name]
        if state.kind == "parameter" and state.requires_grad:
            raise UnsupportedError(
                f"forward changes the parameter {name!r}, which is trained: the optimizer also changes it, with a "
                "gradient that was computed for the old values. Expected a frozen parameter (requires_grad_(False)) "
                "or a buffer; change trained parameters after the optimizer's step"
            )


def _fit_written_value(graph: fx.Graph, value: fx.Node, state: ModelState) -> fx.Node:
    """Append to ``graph`` operators that make ``value`` the new value of the parameter or buffer ``state``, and return
    the last of them. Its result has the dtype of the state, no gradient, and memory of its own."""
    place = {k: value.meta[k] for k in _PLACE if k in value.meta}
    place = place or {"path": state.name.rpartition(".")[0], "source": "", "stack": ()}

    def then(target: torch._ops.OpOverload, node: fx.Node, **how: Any) -> fx.Node:
        with graph.inserting_after(node) if node is not value else nullcontext():
            after = graph.call_function(target, (node,), how)
        after.meta = {**place, "val": infer_meta_value(target, (node.meta["val"],), how)}
        return after

    made = then(aten.detach.default, value)
    if made.meta["val"].dtype != state.spec.dtype:
        return then(aten._to_copy.default, made, dtype=state.spec.dtype)
    return then(aten.clone.default, made) if _may_share_memory(value) else made


def _may_share_memory(node: fx.Node) -> bool:
    """Return whether the value of ``node`` may share its memory with a parameter, a buffer or an input of the graph, so
    that it must be copied before it is stored.
    """
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def list_ancestors_of(graph: fx.Graph, ends: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes ``ends`` of ``graph`` and all operators whose results are used only to compute ``ends``."""
    found = set(ends)
    if not found:
        return found
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(user in found for user in node.users):
            found.add(node)
    return found


_LISTED = 256  # most elements of a buffer whose differing values are listed

_MAX_COMPARED_ELEMENTS = 1 << 20  # most elements of a buffer that are compared with each other


def collect_initial_values(model: nn.Module | ExportedProgram, folded: FoldedModel) -> dict[str, Any]:
    """Return the values of the model's buffers before the first step: name -> value. A value is one number if all
    elements are equal, otherwise nested lists. Left out are constants, buffers without values (on ``meta``), buffers of
    more than ``_LISTED`` (256) elements that are not all equal, and buffers of more than ``_MAX_COMPARED_ELEMENTS``
    (2**20) elements.

    ``model``: the original model, which has the values. ``folded``: the same model as captured graphs; it has the names
    of the buffers.
    """
    every: dict[str, Any] = (
        {} if isinstance(model, ExportedProgram) else {"remove_duplicate": False}
    )  # an exported program does not take the argument
    named = dict(model.named_buffers(**every))
    found = {}
    for name, state in folded.states.items():
        value = next((named[n] for n in (name, *state.aliases) if n in named), None)
        if state.kind == "buffer" and name not in folded.constants and value is not None:
            written = _read_written_numbers(value)
            if written is not None:
                found[name] = written
    return found


def _read_written_numbers(value: Tensor) -> Any | None:
    """Return ``value``, the tensor of a buffer, as one number if all elements are equal, otherwise as nested lists.

    Return ``None`` for a tensor without plain values (fake, meta, complex, sparse or quantized), without elements, with
    more than ``_LISTED`` (256) elements that are not all equal, or with more than ``_MAX_COMPARED_ELEMENTS`` (2**20)
    elements.
    """
    known = not (value.is_meta or isinstance(value, FakeTensor) or value.is_complex() or value.is_quantized)
    if not known or value.layout != torch.strided or not 0 < value.numel() <= _MAX_COMPARED_ELEMENTS:
        return None
    first = value.detach().flatten()[0]
    if bool((value == first).all()):
        return first.item()
    return value.detach().cpu().tolist() if value.numel() <= _LISTED else None
