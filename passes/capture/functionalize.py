"""Turn an exported program into one flat graph of functional operators, which write to none of their operands.

Requires: an ``ExportedProgram``. Provides: a program whose graph has no sub-graphs, no assertions and no in-place
operators. A value that enters a region without gradients passes through an explicit ``detach``. Buffers that the model
changes are its first outputs, in the order of torch.export's signature.

``StorageTracker`` finds which tensors share memory, which carry gradients, and which are written to without autograd's
knowledge. For example, ``with torch.no_grad(): y.clamp_()`` and ``y.detach().clamp_()`` change the values of ``y`` but
not its gradient. A graph of functional operators would differentiate the write and stop the gradient. A later read of
such a tensor therefore raises an error. So does ``w.data.mul_()`` if it changes an operand that an earlier operator
saves for its gradient, because torch would compute that gradient from the new values.
"""

from __future__ import annotations

import copy
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from partitioner.passes.capture.buffers import spell_out
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.faults import find_user_line
from partitioner.passes.ir.inplace import remove_inplace
from partitioner.passes.trace.concrete_scalars import list_written_operands

aten = torch.ops.aten

# Operators that return their operand itself if there is nothing to do -> condition for this. The operand then keeps its
# gradient even where gradients are off.
_NO_OP_CONDITIONS: dict[Any, Callable[..., bool]] = {
    aten.contiguous.default: lambda x, **options: not options and x.is_contiguous(),
    aten.flatten.using_ints: lambda x, *_: x.dim() == 1,
    aten.type_as.default: lambda x, other: x.dtype == other.dtype,
    **dict.fromkeys(
        (
            aten.dropout.default,
            aten.feature_dropout.default,
            aten.alpha_dropout.default,
            aten.feature_alpha_dropout.default,
        ),
        lambda x, p, train: p == 0 or not train,
    ),
    aten.positive.default: lambda x: True,
    aten.real.default: lambda x: not x.is_complex(),
    aten.conj.default: lambda x: not x.is_complex(),
    aten.resolve_conj.default: lambda x: not x.is_complex(),
    aten.resolve_neg.default: lambda x: not x.is_complex(),
    aten.atleast_1d.default: lambda x: x.dim() >= 1,
    aten.atleast_2d.default: lambda x: x.dim() >= 2,
    aten.atleast_3d.default: lambda x: x.dim() >= 3,
}


def is_no_op(node: fx.Node) -> bool:
    """Return whether the operator ``node`` returns its first operand itself, because its arguments ask for no change.
    An example is ``contiguous`` of a contiguous tensor."""
    condition = _NO_OP_CONDITIONS.get(node.target)
    if condition is None:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return isinstance(args[0], Tensor) and condition(*args, **kwargs)


# Operators whose gradients need no values of their operands or results, except indices and masks.
_SAVES_NO_OPERANDS = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.neg.default, aten.clone.default, aten.detach.default,
        aten.cat.default, aten.stack.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
        aten.add_.Tensor, aten.sub_.Tensor, aten.copy_.default, aten._to_copy.default, aten.to.dtype,
        aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, operator.getitem,
    }
)  # fmt: skip


class StorageTracker:
    """Tracks which nodes of a graph share memory, which require a gradient, and which are written to. It finds in-place
    writes that a functional graph could not represent exactly.

    Call :meth:`record_node` for each node that is appended to the graph, in order.
    """

    def __init__(self) -> None:
        self._memory: dict[fx.Node, fx.Node] = {}  # node -> the first node with the same memory
        self._history: dict[fx.Node, fx.Node] = {}  # the same, except that a ``detach`` starts a new history
        self._grad: dict[fx.Node, set[fx.Node]] = {}  # memory (its first node) -> its histories that have a gradient
        # ``detach`` that replaces a node where gradients are off -> that node
        self._without: dict[fx.Node, fx.Node] = {}
        # memory -> the operator that wrote to it without autograd's knowledge
        self._hidden: dict[fx.Node, fx.Node] = {}
        self._kept: dict[fx.Node, fx.Node] = {}  # memory -> the first operator whose gradient may need its values
        # (operator that overwrites such values, operator whose gradient needs them)
        self._spoilt: list[tuple[fx.Node, fx.Node]] = []

    def requires_grad(self, node: fx.Node) -> bool:
        """Return whether ``node`` requires a gradient at this point of the graph. A write to ``node`` or to one of its
        views may have changed this."""
        return self._history.get(node, node) in self._grad.get(self._memory.get(node, node), ())

    def mark_requires_grad(self, node: fx.Node) -> None:
        """Record that ``node`` and all nodes that are views of it require a gradient from now on."""
        self._grad.setdefault(self._memory.get(node, node), set()).add(self._history.get(node, node))

    def record_detached(self, detached: fx.Node, node: fx.Node) -> None:
        """Record that the ``detach`` node ``detached`` replaces ``node`` as an operand in parts of forward in which
        gradients are off (``torch.no_grad``). Both share memory, so a write to one of them is a write to the other."""
        self._without[detached] = node
        self.record_node(detached)

    def record_node(self, node: fx.Node) -> None:
        """Update the record of shared memory, gradients and writes for ``node``, which was just appended to the graph.
        Raises :class:`UnsupportedError` if ``node`` reads a tensor that requires a gradient and was written to without
        autograd's knowledge, as inside ``torch.no_grad()``."""
        target, source = node.target, node.args[0] if node.args else None
        detaches = target in (aten.detach.default, aten.detach_.default)
        for operand in () if detaches else node.all_input_nodes:
            self.check_read(operand)
        brings = not detaches and any(self.requires_grad(n) for n in node.all_input_nodes)
        pieces = target is operator.getitem and source in self._memory
        if isinstance(source, fx.Node) and (pieces or _is_alias(node, source)):
            self._memory[node] = self._memory.get(source, source)
            if _is_in_place(target):
                source = self._without.get(source, source)  # an in-place operator returns its operand itself
            if not detaches:
                self._history[node] = self._history.get(source, source)
        for written in _find_written_nodes(node):
            self._record_detached_write(node, written)
            if brings and _is_in_place(target):
                self.mark_requires_grad(written)
            memory = self._memory.get(written, written)
            if not self.requires_grad(written) and self._grad.get(memory):
                self._hidden.setdefault(memory, node)
        if brings:
            self.mark_requires_grad(node)
            alias = isinstance(source, fx.Node) and _is_alias(node, source) and not _is_in_place(target)
            for kept in () if alias or target in _SAVES_NO_OPERANDS else (*node.all_input_nodes, node):
                self._kept.setdefault(self._memory.get(kept, kept), node)

    def _record_detached_write(self, node: fx.Node, written: fx.Node) -> None:
        """If ``node`` writes, by ``.data`` or ``detach()``, to values that the gradient of an earlier operator needs,
        record an error. :meth:`check_overwritten` raises the error when the whole graph has been read.

        Args:
            written: the operand whose memory ``node`` writes to.
        """
        memory = self._memory.get(written, written)
        apart = written not in self._without and self._history.get(written, written) is not memory
        # a change of a trained parameter is refused in any case
        trained = memory.op == "placeholder" and self.requires_grad(memory)
        if apart and memory in self._kept and memory is not written and not trained:
            self._spoilt.append((node, self._kept[memory]))

    def check_overwritten(self) -> None:
        """Raise :class:`UnsupportedError` if the gradient of an operator would be computed from values that a later
        operator overwrites."""
        for writer, reader in self._spoilt:
            raise UnsupportedError(
                f"forward changes a tensor in place by .data or detach() ({_format_operator_line(writer)}) after an "
                f"operator has read it ({_format_operator_line(reader)}), whose gradient torch would compute from the "
                "new values; change it before it is read, or assign a new tensor (x.data = ...)"
            )

    def check_read(self, node: fx.Node) -> None:
        """Raise :class:`UnsupportedError` if ``node`` requires a gradient and its memory was written to without
        autograd's knowledge, as inside ``torch.no_grad()``.

        Call it for each node that an operator or the output reads.
        """
        writer = self._hidden.get(self._memory.get(node, node))
        if writer is not None and self.requires_grad(node):
            raise UnsupportedError(
                f"forward changes a tensor in place without autograd's knowledge "
                f"({_format_operator_line(writer)}) and reads it afterwards; change a copy, or write explicitly: y "
                "= y + (changed - y).detach() for new values with the old gradient"
                ", y = changed without torch.no_grad() for the gradient of the change"
            )


def _format_operator_line(node: fx.Node) -> str:
    """Return the name and source line of the operator ``node`` as text, for messages."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return f"{name}, {find_user_line(node.meta.get('stack_trace')) or 'under torch.no_grad() or after detach()'}"


def _is_alias(node: fx.Node, source: fx.Node) -> bool:
    """Return whether the result of ``node`` shares memory with ``source``, its first argument, according to the
    operator's schema.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return False
    return _get_node_dtype(node) is None or _get_node_dtype(node) == _get_node_dtype(
        source
    )  # a ``to`` with another dtype copies


def _get_node_dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _find_written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes to whose memory the operator ``node`` writes. The list is empty for an operator that changes
    only a tensor's shape in place."""
    shapes_alone = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags
    return [] if shapes_alone else list_written_operands(node)


def _is_in_place(target: Any) -> bool:
    """Return whether ``target``, the operator that a graph node calls, is one of torch's in-place operators, such as
    ``add_``: its name ends in ``_``. Such an operator returns its first operand, and autograd follows the write. A
    batch norm, which writes to its running statistics, is not an in-place operator in this sense."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.endswith("_")


_CHECKS = ("_assert", "sym_constrain", "_check", "_functional_assert")
_CONSTANT_CHANGED = re.compile(r"Constant (\S+) is mutated")
_NO_FUNCTION = re.compile(r"Found a custom .* has alias annotations: (\w+)::(\w+)")
_CAUSE = re.compile(r"\n.*", re.DOTALL)
_CALLS_FUNCTION = "_call_custom_autograd_function_in_pre_dispatch"
_TRANSFORMS = "torch._functorch.predispatch"
_TO = {aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout}
# In-place operators that are applied to tensors made for the purpose -> the functional operator in their place.
_PURE: dict[Any, Any] = {aten.detach_.default: aten.detach.default}


def flatten_program(program: ExportedProgram, tensor_names: Mapping[int, str] | None = None) -> ExportedProgram:
    """Return the exported program ``program`` as one flat graph of operators that write to none of their operands.
    ``program`` itself is not changed.

    Raise :class:`UnsupportedError` for a sub-graph or an operator that cannot be converted exactly, or if the program
    reads a tensor of ``tensor_names``.

    Args:
        tensor_names: data address of each tensor of the original model -> its name. The program was exported from a
          copy
            of that model, so it should read none of these tensors. Forward can reach them only outside of the copy, as
            through a global variable. ``None`` skips this check.
    """
    _check_traced_constants(program, tensor_names or {})
    inliner = _RegionInliner(_find_trainable_placeholders(program))
    graph = inliner.inline_program(program)
    functional = not spell_out(graph) and inliner.transforms is None and not inliner.closed
    functional = functional and (not inliner.mutates or remove_inplace(graph))
    flat = copy.copy(program)
    flat._graph_module = fx.GraphModule({}, graph)
    flat._graph_module.meta.update(program.graph_module.meta)
    if functional:
        return flat
    _untie_buffers(flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        depth = get_dynamic_layer_stack_depth()
        try:
            decomposed: ExportedProgram = flat.run_decompositions({})
        except Exception as error:
            # leave the transforms, such as vmap, that the failed trace had entered
            pop_dynamic_layer_stack_and_undo_to_depth(depth)
            changed = _CONSTANT_CHANGED.match(str(error))
            if changed:
                raise UnsupportedError(
                    f"forward changes {changed[1]!r}, a tensor that is no buffer; register it (register_buffer)"
                ) from error
            writer = _NO_FUNCTION.match(str(error))
            if writer:
                raise UnsupportedError(
                    f"forward writes in place by {writer[1]}::{writer[2]}, which has no functional form in torch; "
                    f"call the function that returns a new tensor ({writer[2].removesuffix('_')}) instead"
                ) from error
            if inliner.transforms is None and "functionalization" in str(error):
                raise UnsupportedError(
                    "an in-place operation of forward cannot be made functional: "
                    f"{_CAUSE.sub('', str(error)).strip()}; "
                    "change a copy (clone()) instead"
                ) from error
            if inliner.transforms is None:
                raise
            raise UnsupportedError(
                f"the torch.func transform {inliner.transforms.name}{_format_node_line(inliner.transforms, [])} "
                "cannot be "
                f"traced ({type(error).__name__}): write its computation with plain operators on tensors"
            ) from error
    return decomposed


def _check_traced_constants(program: ExportedProgram, tensor_names: Mapping[int, str]) -> None:
    """Raise :class:`UnsupportedError` if ``program`` contains, as a constant, a tensor that torch.export should have
    traced: a constant tensor without values, which forward has computed in a way that torch.export does not follow, or
    a tensor of the original model.

    Args:
        tensor_names: data address of each tensor of the original model -> its name. The program was exported from a
          copy
            of that model, so it should read none of these tensors.
    """
    used = {n.name for n in program.graph.nodes if n.op == "placeholder" and n.users}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.CONSTANT_TENSOR or spec.arg.name not in used:
            continue
        name = str(spec.target)
        constant = program.constants[name]
        if isinstance(constant, FakeTensor) and name.rpartition(".")[2].startswith("lifted_tensor"):
            raise UnsupportedError(
                "forward computes a tensor in a way that torch.export does not support, for example by backward() "
                "inside forward"
                "; write it with operators on tensors, or pass it as an input"
            )
        held = None if isinstance(constant, FakeTensor) or constant.is_meta else tensor_names.get(constant.data_ptr())
        if held is not None:
            raise UnsupportedError(
                f"forward reads {held!r} through a closure, a global, or a forward that was compiled or wrapped, "
                "so that a "
                "copy of the model would still read the original; read it as an attribute of the module (instead of "
                "torch.compile(model.forward), pass the model before it was compiled)"
            )


def _untie_buffers(program: ExportedProgram) -> None:
    """Merge the placeholders of each buffer that has several names into one placeholder, in place, because later passes
    treat each placeholder as a separate tensor. ``program``: the exported model."""
    by_tensor: dict[int, fx.Node] = {}
    held: dict[str, Any] = {**program.constants, **program.state_dict}
    untied: dict[str, Tensor] = {}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or str(spec.target) not in held:
            continue
        node, tensor = nodes[spec.arg.name], held[str(spec.target)]
        first = by_tensor.setdefault(id(tensor), node)
        if first is not node:
            node.replace_all_uses_with(first)
            untied[str(spec.target)], node.meta["val"] = (
                _allocate_tensor_like(tensor),
                _allocate_tensor_like(node.meta["val"]),
            )
    program._state_dict = {n: untied.get(n, t) for n, t in program.state_dict.items()}
    program._constants = {n: untied.get(n, t) for n, t in program.constants.items()}


def _allocate_tensor_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor with the shape and dtype of ``tensor``, in separate memory."""
    with tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext():
        return torch.empty_like(tensor)


def _find_duplicate_constants(program: ExportedProgram) -> dict[fx.Node, fx.Node]:
    """Return the constants in ``program`` that are the same tensor as a parameter or buffer, as a dict: placeholder of
    the constant -> placeholder of the parameter or buffer. Such a constant occurs if an object that is not a module,
    such as a list, also holds the parameter or buffer."""
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    held: dict[str, Any] = {**program.constants, **program.state_dict}
    specs = [(spec, held.get(str(spec.target)), nodes[spec.arg.name]) for spec in program.graph_signature.input_specs]
    states = {
        id(tensor): node
        for spec, tensor, node in specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and tensor is not None
    }
    return {
        node: states[id(tensor)]
        for spec, tensor, node in specs
        if spec.kind is InputKind.CONSTANT_TENSOR and id(tensor) in states
    }


def _find_trainable_placeholders(program: ExportedProgram) -> set[str]:
    """Return the names of the placeholders, in the graph of ``program``, of parameters that require a gradient."""
    return {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and program.state_dict[str(spec.target)].requires_grad
    }


class _RegionInliner:
    """Copies a graph and its sub-graphs into one new graph, and tracks which values require a gradient.

    A sub-graph is a region of forward in which gradients or autocast are switched on or off. ``trainable``: the names
    of the placeholders that require a gradient.
    """

    def __init__(self, trainable: set[str]) -> None:
        self.graph = fx.Graph()
        self.trainable = trainable
        self.memory = StorageTracker()
        self.detached: dict[fx.Node, fx.Node] = {}
        self.mutates = False
        self.closed = False  # whether the graph calls functions that are traced when operators are decomposed
        self.transforms: fx.Node | None = None  # the first node of a transform such as torch.vmap; a new trace has none

    def inline_program(self, program: ExportedProgram) -> fx.Graph:
        """Copy the graph of ``program`` and all its sub-graphs into one graph and return this graph. Raise
        :class:`UnsupportedError` if a result or an operator reads a tensor that requires a gradient and was written to
        without autograd's knowledge."""
        env: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = self.graph.node_copy(node)
                if node.name in self.trainable:
                    self.memory.mark_requires_grad(env[node])
        for constant, state in _find_duplicate_constants(program).items():
            env[constant] = env[state]
        results = self.inline_body(program.graph_module, env, grad=True)
        fx.node.map_arg(results, self.memory.check_read)
        self.memory.check_overwritten()
        self.graph.output(results)
        return self.graph

    def inline_body(self, owner: fx.GraphModule, env: dict[fx.Node, Any], grad: bool) -> Any:
        """Copy the operators of the graph of ``owner`` to the end of the new graph, and return the copies of its
        outputs.

        Args:
            env: original node -> its copy.
            grad: whether gradients are on in this part of forward.
        """
        for node in owner.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            if node.op == "get_attr":
                env[node] = getattr(owner, str(node.target))
            elif node.op == "call_function":
                env[node] = self.inline_operator(node, env, grad)
        raise AssertionError("a graph ends in an output node")

    def inline_operator(self, node: fx.Node, env: dict[fx.Node, Any], grad: bool) -> Any:
        """Copy the operator ``node`` into the new graph, and return the node or value that replaces it. An assertion is
        left out, and ``None`` is returned.

        Args:
            env: original node -> its copy.
            grad: whether gradients are on where the operator is.
        """
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.inline_region(node, env, grad)
        if node.target is operator.getitem and not isinstance(env[node.args[0]], fx.Node):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        if not isinstance(node.target, torch._ops.OpOverload):
            if self.transforms is None and getattr(node.target, "__module__", "") == _TRANSFORMS:
                self.transforms = node
            return self.copy_node(node, env, grad)
        if node.target._schema.name.split("::")[1].startswith(_CHECKS):
            return None
        if _is_identity_cast(node) or (not grad and is_no_op(node)):
            return env[node.args[0]]  # type: ignore[index]
        self.mutates |= node.target._schema.is_mutable and node.target not in _PURE
        return self.copy_node(node, env, grad)

    def inline_region(self, node: fx.Node, env: dict[fx.Node, Any], grad: bool) -> Any:
        """Copy the sub-graph of ``node``, which switches gradients or autocast on or off, into the new graph. Return
        the copies of the sub-graph's outputs.

        Args:
            env: original node -> its copy.
            grad: whether gradients are on around the region.
        """
        args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
        name = node.target.name()  # type: ignore[union-attr]
        if name == "wrap_with_set_grad_enabled":
            enabled, owner, *operands = args
            grad = bool(enabled)
        elif name == "wrap_with_autocast" and args[2] is False:
            owner, *operands = args[4:]
        elif name == "wrap_with_autocast":
            raise UnsupportedError(
                f"the torch.autocast region{_format_node_line(node, args)} of an exported program cannot be kept "
                "exact: "
                "pass the module, or remove the region and give the precision by partition(precision=...)"
            )
        elif (
            name == "flat_apply"
            and (function := _find_custom_function(args)) is not None
            and not self._requires_grad(args)
        ):
            return self.insert_function_call(node, function, *pytree.tree_unflatten(args[2:], args[1]))
        else:
            raise UnsupportedError(
                f"the operator {name}{_format_node_line(node, args)} contains a function, which cannot be "
                "partitioned: write "
                "it without torch.cond, while_loop and similar operators"
            )
        inner = [n for n in owner.graph.nodes if n.op == "placeholder"]
        return self.inline_body(owner, dict(zip(inner, operands, strict=True)), grad)

    def _requires_grad(self, args: list[Any]) -> bool:
        return any(isinstance(a, fx.Node) and self.memory.requires_grad(a) for a in args)

    def insert_function_call(self, node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        """Append and return a call of a ``torch.autograd.Function`` that torch.export did not trace into. The function
        is traced later, when operators are decomposed. None of its operands requires a gradient, so its backward is not
        needed.

        Args:
            node: the original node of the call, whose metadata is copied.
            function: applies the ``torch.autograd.Function`` to ``args`` and ``kwargs``.
        """
        new_node = self.graph.call_function(function, args, kwargs)
        new_node.meta = dict(node.meta)
        self.memory.record_node(new_node)
        self.closed = True
        return new_node

    def copy_node(self, node: fx.Node, env: dict[fx.Node, Any], grad: bool) -> fx.Node:
        """Copy ``node`` to the end of the new graph and return the copy. Where gradients are off, the operands of the
        copy are detached.

        Args:
            env: original node -> its copy.
            grad: whether gradients are on where the operator is.
        """

        def operand(n: fx.Node) -> Any:
            value = env[n]
            return self.detach_value(value, node) if not grad and self.memory.requires_grad(value) else value

        new_node = self.graph.node_copy(node, operand)
        new_node.target = _PURE.get(node.target, node.target)
        self.memory.record_node(new_node)
        return new_node

    def detach_value(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a node that has the value of ``value`` but requires no gradient: a ``detach`` of ``value``, or
        ``value`` itself if it is not a floating-point tensor. Later calls with the same ``value`` return the same
        ``detach``.

        ``reader``: the original node that reads ``value``, from which metadata is copied.
        """
        if not _is_floating_node(value):
            return value
        if value not in self.detached:
            self.detached[value] = self.graph.call_function(aten.detach.default, (value,))
            self.detached[value].meta = {**reader.meta, "val": value.meta["val"]}
            self.memory.record_detached(self.detached[value], value)
        return self.detached[value]


def _format_node_line(node: fx.Node, args: list[Any]) -> str:
    """Return `` (file:line)`` of the operator ``node``, or, if it has no line, of the first operator in its sub-graphs
    that has one; an empty text if none has.

    ``args``: the arguments of the node, which contain the sub-graphs.
    """
    inner = [n for a in args if isinstance(a, fx.GraphModule) for n in a.graph.nodes]
    lines = [find_user_line(n.meta.get("stack_trace")) for n in (node, *inner)]
    return next((f" ({line})" for line in lines if line), "")


def _find_custom_function(args: list[Any]) -> Callable[..., Any] | None:
    """If a graph node calls a Python function that applies a ``torch.autograd.Function`` and whose operators are not in
    the graph, return this function; otherwise return ``None``. torch.export leaves such calls in its graphs.

    Args:
        args: the arguments of the node; the first is a pytree spec that contains the function.
    """
    function = getattr(pytree.tree_unflatten([], args[0]), "func", None) if isinstance(args[0], TreeSpec) else None
    return function if getattr(function, "__name__", "") == _CALLS_FUNCTION else None


def _is_identity_cast(node: fx.Node) -> bool:
    """Return whether ``node`` is a ``to`` operator that changes neither dtype, device nor layout, so that it returns
    its operand itself.
    """
    if node.target not in _TO or not isinstance(node.args[0], fx.Node):
        return False
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)) | node.kwargs
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if (
        given.get("copy")
        or given.get("memory_format")
        or not (isinstance(before, Tensor) and isinstance(after, Tensor))
    ):
        return False
    return (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)


def _is_floating_node(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
