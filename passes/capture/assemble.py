"""Build a captured model from a flat exported program: one graph, and the names of its states, inputs, outputs and
loss.

Requires: a program from ``passes/capture/functionalize.py``. Provides: a :class:`Captured`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from partitioner.passes.errors import InputsError, UnsupportedError
from partitioner.passes.experts.loops import SELECTS
from partitioner.passes.experts.trace_marks import MARKS
from partitioner.passes.experts.traced_branches import find_empty_expert_masks
from partitioner.passes.experts.traced_loops import append_empty_mask, is_iteration_of_parity
from partitioner.passes.faults import find_user_line
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.model import (
    CallSignature,
    Captured,
    ModelInput,
    ModelOutput,
    ModelState,
    Plain,
    StateKind,
    TensorSpec,
    leaf_paths,
)
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.select.masked_row_ops import Unselectable
from partitioner.passes.select.masked_rows import SelectedRows

_KINDS: dict[InputKind, StateKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
# Strides differ between devices and layouts, so operators that ask for particular strides are replaced by ones that do
# not.
_STRIDE_FREE: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def assemble_program_graph(
    program: ExportedProgram,
    canonical: Mapping[str, str],
    with_loss: bool,
    *,
    parity: int | None = None,
    decided: Collection[int] = (),
    numbers: Mapping[str, int | float] | None = None,
) -> Captured:
    """Return an exported program as a :class:`Captured`: one FX graph, with the names of the model's states
    (parameters, buffers, constants), inputs, outputs and loss.

    Args:
        program: a program whose graph has no sub-graphs and no operators that write in place.
        canonical: name of a state -> the one name that is used for this state; tied weights have several names.
        with_loss: whether the last result of the program is the loss.
        parity: 0 or 1 to build the graph as if no row (token) had chosen an expert with an even (0) or odd (1)
            number: the masks of the rows that chose such an expert become masks of zeros. This is done for masks that a
            loop over experts reads, and at the places ``decided``. ``None`` keeps all masks.
        decided: places in the trace, numbered from 1, where forward computed the indices of an expert's rows and
            branched on whether there are any.
        numbers: path -> value, for the inputs that are Python numbers and that the graph reads as 0-dimensional
            tensors; ``None`` if there are none.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    states = _collect_model_states(program, canonical)
    nodes = list(program.graph.nodes)
    sources = dict(zip([n for n in nodes if n.op == "placeholder"], program.graph_signature.input_specs, strict=True))
    placeholders: dict[str, str] = {}
    made: dict[str, fx.Node] = {}
    for node, spec in sources.items():
        if spec.kind in _KINDS and node.users:
            name = canonical.get(str(spec.target), str(spec.target))
            if name not in made:
                made[name] = _make_placeholder(graph, node, states[name].spec)
                placeholders[made[name].name] = name
            env[node] = made[name]
    inputs = []
    fixed: dict[str, Plain] = {}
    paths = _iterate_input_paths(program)
    for node, spec in sources.items():
        if spec.kind is InputKind.USER_INPUT:
            path = next(paths)
            if isinstance(node.meta.get("val"), Tensor):
                inputs.append(ModelInput(path, path, _build_tensor_spec(node), _get_kind((numbers or {}).get(path))))
                env[node] = _make_placeholder(graph, node, inputs[-1].spec)
                placeholders[env[node].name] = path
            else:
                fixed[path] = getattr(spec.arg, "value", None)
        elif spec.kind not in _KINDS:
            raise UnsupportedError(
                f"the model holds {spec.target!r}, which is not a tensor ({spec.kind.name}): pass it as an argument"
            )
    classes: dict[str, str] = {}
    selected = SelectedRows(graph, nodes)
    empty = find_empty_expert_masks(nodes, parity, decided) if parity is not None else ()
    for node in nodes:
        if parity is not None and (is_iteration_of_parity(node, parity) or node in empty):
            env[node] = append_empty_mask(graph, node, _find_model_location(node, classes))
        elif node.target in MARKS:
            env[node] = env[node.args[0]]
        elif node.op == "call_function" and selected.concerns_node(node, env):
            env[node] = _copy_selected_rows(selected, node, env, classes)
        elif node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].target = _STRIDE_FREE.get(node.target, node.target)
            env[node].meta = _clean_meta(node, classes)
            env[node].args = fx.node.map_aggregate(env[node].args, _to_meta)
            env[node].kwargs = fx.node.map_aggregate(env[node].kwargs, _to_meta)
    outputs, loss, tree, updates = _collect_model_outputs(program, env, with_loss, canonical)
    results = dict.fromkeys([o.value for o in outputs if o.value is not None] + ([loss] if loss else []))
    results |= dict.fromkeys(updates.values())
    by_name = {n.name: n for n in graph.nodes}
    graph.output(tuple(by_name[name] for name in results))
    drop_unused(graph)
    constants = _collect_read_constants(program, set(placeholders.values()) | updates.keys())
    states = {name: s for name, s in states.items() if s.kind != "constant" or name in constants}
    notes = (SELECTS,) if selected.rows else ()
    found = Captured(graph, states, placeholders, inputs, outputs, loss, constants, tree, notes, classes, updates)
    return found.with_(signature=CallSignature(fixed=fixed))


def _get_kind(value: int | float | None) -> Literal["int", "float"] | None:
    """Return the name of the Python type of ``value``, an input of the model that is a number: ``"int"`` or
    ``"float"``. Return ``None`` if ``value`` is ``None``, that is, if the input is a tensor."""
    if value is None:
        return None
    return "float" if isinstance(value, float) else "int"


def _copy_selected_rows(
    selected: SelectedRows, node: fx.Node, env: Mapping[fx.Node, Any], classes: dict[str, str]
) -> Any:
    """Copy ``node``, an operator whose operands have only the rows that a boolean mask selects (``x[mask]``), to the
    new graph, and return the copy.

    The number of selected rows depends on the data, so the copy computes all rows, selected or not. Raise
    :class:`UnsupportedError` if this is not possible for the operator.

    ``selected``: the rewriter that makes the copy and stores the mask of its rows. ``env``: node of the program -> node
    of the new graph. ``classes``: a dict, module path -> class name, to which the node's modules are added.
    """
    try:
        return selected.copy_node(node, env, _find_model_location(node, classes))
    except Unselectable as error:
        if str(error):
            raise UnsupportedError(f"{node.target} ({_format_node_location(node)}): {error}") from None
        if not selected.reads_rows(node, env):
            raise UnsupportedError(
                f"the item() that {node.target} reads ({_format_node_location(node)}) converts a tensor to a Python "
                "number, which is not known when the plan is made; keep it as a 0-d tensor (no item(), float() or "
                "int()), or pass it as an input"
            ) from None
        _check_static(node, node.meta.get("val"))
        raise UnsupportedError(
            f"{node.target} ({_format_node_location(node)}) reads rows that a mask selects, whose number depends on "
            "data; write it with a fixed size (torch.where, a mask) instead"
        ) from None


def _make_placeholder(graph: fx.Graph, node: fx.Node, spec: TensorSpec) -> fx.Node:
    """Append a placeholder to ``graph`` with the name of ``node`` and a meta tensor of the shape and dtype ``spec``,
    and return the placeholder."""
    made = graph.create_node("placeholder", node.name, name=node.name)
    made.meta["val"] = spec.meta()
    return made


def _to_meta(argument: Any) -> Any:
    return META if isinstance(argument, torch.device) else argument


def _build_tensor_spec(node: fx.Node) -> TensorSpec:
    """Return the shape and dtype of the result of ``node``. Raise :class:`UnsupportedError` if the shape is not
    constant."""
    value = node.meta["val"]
    _check_static(node, value)
    return TensorSpec(tuple(value.shape), value.dtype)


def _check_static(node: fx.Node, value: Any) -> None:
    """Raise :class:`UnsupportedError` if ``value``, the result of ``node``, is a tensor whose shape depends on values
    of tensors.
    """
    if isinstance(value, Tensor) and not all(isinstance(s, int) for s in value.shape):
        advice = _FIXED_SIZES.get(str(node.target), "write it with a fixed size (torch.where, a mask) instead")
        raise UnsupportedError(
            f"{node.target} ({_format_node_location(node)}) has a shape that depends on data: "
            f"{tuple(value.shape)}; {advice}"
        )


_OUTPUT_SIZE = "pass the size of its result, such as the number of positions, as output_size"
# Operator whose size depends on data -> how to write it with a fixed size.
_FIXED_SIZES = {f"aten.repeat_interleave.{kind}": _OUTPUT_SIZE for kind in ("Tensor", "self_Tensor")}


def _format_node_location(node: fx.Node) -> str:
    """Return the path of the module that runs ``node`` and its source line, such as ``layers.0, model.py:12``, for
    messages.
    """
    stack = node.meta.get("nn_module_stack") or {"": ("the model", "")}
    return f"{next(reversed(stack.values()))[0] or 'the model'}, {find_user_line(node.meta.get('stack_trace'))}"


def _clean_meta(node: fx.Node, classes: dict[str, str]) -> dict[str, Any]:
    """Return the metadata of a copy of ``node``: its result as meta tensors (``val``), its module, its source line and
    the module calls that enclose it.

    ``classes``: a dict, module path -> class name, to which these modules are added.
    """
    value = pytree.tree_map(lambda v: _make_meta_value(node, v), node.meta.get("val"))
    return {"val": value, **_find_model_location(node, classes)}


def _find_model_location(node: fx.Node, classes: dict[str, str]) -> dict[str, Any]:
    """Return a dict with the place of ``node`` in the model: ``path`` (its module), ``source`` (``file:line``) and
    ``stack`` (the enclosing module calls, outermost first; ``layers.0@1`` is the second call of ``layers.0``).

    ``classes``: a dict, module path -> class name, to which these modules are added.
    """
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        count = key.rpartition("@")[2] if "@" in key else ""
        calls.append(f"{path}@{count}" if count.isdigit() else path)
        classes[path] = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return {
        "path": next(reversed(stack.values()))[0] if stack else "",
        "source": find_user_line(node.meta.get("stack_trace")),
        "stack": tuple(c for c in calls if c),
    }


def _make_meta_value(node: fx.Node, value: Any) -> Any:
    """Return ``value``, a result of ``node``, as a meta tensor with the same shape, strides and dtype. A value that is
    not a tensor is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    _check_static(node, value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _collect_model_states(program: ExportedProgram, canonical: Mapping[str, str]) -> dict[str, ModelState]:
    """Return the parameters, buffers and constant tensors of the exported program ``program``: canonical name -> state.
    ``canonical``: name of a state -> the one name that is used for this state; tied weights have several names."""
    names: dict[str, list[str]] = {}
    for alias, name in canonical.items():
        names.setdefault(name, []).append(alias)
    states: dict[str, ModelState] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in _KINDS:
            continue
        name = canonical.get(str(spec.target), str(spec.target))
        tensor = program.state_dict.get(str(spec.target))
        if tensor is None:
            tensor = program.constants[str(spec.target)]
        kind = _KINDS[spec.kind]
        trains = kind == "parameter" and tensor.requires_grad
        others = tuple(n for n in names.get(name, ()) if n != name)
        states.setdefault(name, ModelState(name, TensorSpec.from_tensor(tensor), kind, trains, others))
    return states


def _collect_read_constants(program: ExportedProgram, read: set[str]) -> dict[str, Tensor]:
    """Return the values, on the CPU, of those constant tensors of ``program`` whose names are in ``read``: name ->
    tensor. Raise :class:`UnsupportedError` for a constant without values."""
    constants = {}
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR and name in read:
            value = program.constants[name]
            if value.is_meta or isinstance(value, FakeTensor):
                raise UnsupportedError(
                    f"the tensor {name!r} that the model refers to has no values: build the model on a real device, "
                    "or register the tensor as a buffer"
                )
            constants[name] = value.detach().cpu()
    return constants


def _iterate_input_paths(program: ExportedProgram) -> Iterator[str]:
    """Yield the path of each leaf of the arguments with which ``program`` is called, in order: ``0`` for the first
    positional argument, ``input_ids`` for a keyword argument, ``past.0.key`` for a nested one."""
    spec = program.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    for path, _ in [*leaf_paths(args), *leaf_paths(kwargs)]:
        yield path


def _collect_model_outputs(
    program: ExportedProgram, env: Mapping[fx.Node, fx.Node], with_loss: bool, canonical: Mapping[str, str]
) -> tuple[list[ModelOutput], str | None, str | None, dict[str, str]]:
    """Return four values that describe what the exported program ``program`` returns and changes: the leaves of the
    model's result; the name of the loss node (``None`` if there is no loss); the result's pytree as text (``None`` if
    it cannot be written as text); and a dict: buffer or parameter that forward changes -> name of the node with its new
    value.

    Args:
        env: node of the program -> node of the new graph.
        with_loss: whether the last result of the program is the loss.
        canonical: name of a parameter or buffer -> the one name that is used for it.
    """
    results: Any = next(n for n in program.graph.nodes if n.op == "output").args[0]
    leaves = []
    updates: dict[str, str] = {}
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            _check_static(result, result.meta.get("val"))
        if spec.kind is OutputKind.USER_OUTPUT:
            leaves.append(env[result] if isinstance(result, fx.Node) else result)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            updates[canonical.get(str(spec.target), str(spec.target))] = env[result].name
        else:
            raise UnsupportedError(_CHANGED.get(spec.kind, _CHANGED[None]).format(target=spec.target))
    tree = program.call_spec.out_spec
    assert tree is not None
    loss = None
    if with_loss:
        loss = leaves.pop()
        if not isinstance(loss, fx.Node) or not _is_scalar(loss):
            raise InputsError(f"loss(output) returned {_format_output_value(loss)}; expected a floating-point scalar")
        tree = tree.child(0)
    paths = leaf_paths(pytree.tree_unflatten([0] * tree.num_leaves, tree))
    outputs = [
        ModelOutput(path, leaf.name) if isinstance(leaf, fx.Node) else ModelOutput(path, None, leaf)
        for (path, _), leaf in zip(paths, leaves, strict=True)
    ]
    if loss is None:
        named = [leaf for (path, _), leaf in zip(paths, leaves, strict=True) if path == "loss" or len(leaves) == 1]
        loss = next((leaf for leaf in named if isinstance(leaf, fx.Node) and _is_scalar(leaf)), None)
    try:
        written = pytree.treespec_dumps(tree)
    except (NotImplementedError, ValueError, TypeError):  # pytree cannot write this class as text
        written = None
    return outputs, loss.name if loss is not None else None, written, updates


_CHANGED: dict[OutputKind | None, str] = {
    OutputKind.USER_INPUT_MUTATION: "forward changes its argument {target!r} in place: make it change a copy",
    None: "forward changes {target!r} in place, which a plan cannot keep",
}


def _is_scalar(node: fx.Node) -> bool:
    """Return whether the result of ``node`` is a floating-point tensor without dims."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def _format_output_value(value: Any) -> str:
    """Return ``value``, an output of a graph, as text for messages: shape and dtype if it is a node, otherwise its
    ``repr``."""
    if isinstance(value, fx.Node):
        tensor = value.meta["val"]
        return f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"
    return repr(value)
