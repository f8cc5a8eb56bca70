"""Capture: from an unmodified model to one flat functional graph.

Provides: placeholders for states (parameters, buffers, constants that are read), then for inputs; operators on meta
tensors with ``val``, ``path`` (the module that runs it), ``source`` (``file:line``) and ``stack`` (the module calls
around it, outermost first: ``layers.0@1`` is the second call of ``layers.0``); an output node that lists the leaves that
are tensors. Nothing else in the project looks at the model itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from passes.blocks import ModelInput, ModelOutput, State, StateKind, TensorSpec
from passes.errors import InputsError, UnsupportedError
from passes.export import cast, export, leaf_paths, make_twin, source_of
from passes.functionalize import flatten_program
from passes.infer import META, propagate
from passes.inputs import Inputs, bind_inputs, without_numbers
from passes.retype import retype

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_KINDS: dict[InputKind, StateKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
# Strides differ between devices and layouts: what asks for particular ones becomes what does not.
_STRIDE_FREE: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
# A value of a non-persistent buffer is in no checkpoint; small ones are kept with the plan.
_KEPT_BUFFER_NUMEL = 1 << 16


@dataclass
class Captured:
    """A whole model as one graph; see the module's text. ``outputs`` and ``loss`` name nodes of the graph."""

    graph: fx.Graph
    states: dict[str, State]
    placeholders: dict[str, str]  # placeholder -> state or input value
    inputs: list[ModelInput]
    outputs: list[ModelOutput]
    loss: str | None
    constants: dict[str, Tensor] = field(default_factory=dict)
    tree: str | None = None
    notes: tuple[str, ...] = ()
    classes: dict[str, str] = field(default_factory=dict)  # module path -> class name

    def with_(self, **changes: Any) -> Captured:
        return replace(self, **changes)


def capture(
    model: nn.Module | ExportedProgram,
    inputs: Inputs,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    objective: str = "train",
) -> Captured:
    """Trace ``model`` on one whole global batch. The model is not changed and no weight is copied.

    Args:
        inputs: a tuple (positional) or a dict (keyword arguments); ``None``: the program's or model's own sample.
        loss: makes the scalar loss of the model's output; ``None``: the output is the loss or has it as ``loss``.
        global_batch: the inputs' batch is a sample of this many.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``: parameters, buffers and inputs as ``model.to`` would cast
            them; ``fp64`` also makes casts to other floating types inside the model casts to float64.

    Raises :class:`CaptureError`, :class:`InputsError`, :class:`UnsupportedError`.
    """
    if precision is not None and precision not in PRECISIONS:
        raise InputsError(f"precision must be one of {', '.join(PRECISIONS)} or None; got {precision!r}")
    dtype = None if precision is None else PRECISIONS[precision]
    if isinstance(model, ExportedProgram):
        program, notes = _fit_program(model, inputs, global_batch)
        if loss is not None:
            raise InputsError("loss= needs the module: an ExportedProgram must return its loss itself")
        canonical, kept = _canonical_names(program.state_dict.items()), {}
    else:
        twin = make_twin(model, dtype)
        args, kwargs = bind_inputs(
            twin, model, inputs, global_batch=global_batch, dtype=dtype, with_labels=objective == "train" and loss is None
        )
        if loss is not None:
            _append_loss(twin.module, loss)
        program, notes = export(twin, args, kwargs), twin.notes
        canonical, kept = _canonical_names(_named_tensors(model)), _unsaved_buffers(model, dtype)
    captured = _assemble(flatten_program(program), canonical, with_loss=loss is not None)
    captured = captured.with_(notes=notes, constants=captured.constants | kept)
    if dtype is not None and isinstance(model, ExportedProgram):
        captured = _cast(captured, dtype)
    if precision == "fp64":
        retype(captured.graph, torch.float64)
    return captured


# --- the parts of an exported program ---------------------------------------------------------------------------------


def _assemble(program: ExportedProgram, canonical: Mapping[str, str], with_loss: bool) -> Captured:
    """The program as one graph; ``canonical``: for every name of a state the one that it goes by."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    states = _states(program, canonical)
    nodes = list(program.graph.nodes)
    sources = dict(zip([n for n in nodes if n.op == "placeholder"], program.graph_signature.input_specs, strict=True))
    placeholders: dict[str, str] = {}
    made: dict[str, fx.Node] = {}
    for node, spec in sources.items():
        if spec.kind in _KINDS and node.users:
            name = canonical.get(str(spec.target), str(spec.target))
            if name not in made:
                made[name] = _placeholder(graph, node, states[name].spec)
                placeholders[made[name].name] = name
            env[node] = made[name]
    inputs = []
    paths = _input_paths(program)
    for node, spec in sources.items():
        if spec.kind is InputKind.USER_INPUT:
            path = next(paths)
            if isinstance(node.meta.get("val"), Tensor):
                inputs.append(ModelInput(path, path, _spec(node)))
                env[node] = _placeholder(graph, node, inputs[-1].spec)
                placeholders[env[node].name] = path
        elif spec.kind not in _KINDS:
            raise UnsupportedError(f"the model holds {spec.target!r}, which is not a tensor ({spec.kind.name}): pass it as an argument")
    classes: dict[str, str] = {}
    for node in nodes:
        if node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].target = _STRIDE_FREE.get(node.target, node.target)
            env[node].meta = _clean_meta(node, classes)
            env[node].args = fx.node.map_aggregate(env[node].args, _on_meta)
            env[node].kwargs = fx.node.map_aggregate(env[node].kwargs, _on_meta)
    outputs, loss, tree = _outputs(program, env, with_loss)
    results = dict.fromkeys([o.value for o in outputs if o.value is not None] + ([loss] if loss else []))
    by_name = {n.name: n for n in graph.nodes}
    graph.output(tuple(by_name[name] for name in results))
    graph.eliminate_dead_code()
    constants = _constants(program, set(placeholders.values()))
    states = {name: s for name, s in states.items() if s.kind != "constant" or name in constants}
    return Captured(graph, states, placeholders, inputs, outputs, loss, constants, tree, classes=classes)


def _placeholder(graph: fx.Graph, node: fx.Node, spec: TensorSpec) -> fx.Node:
    made = graph.create_node("placeholder", node.name, name=node.name)
    made.meta["val"] = spec.meta()
    return made


def _on_meta(argument: Any) -> Any:
    return META if isinstance(argument, torch.device) else argument


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    _check_static(node, value)
    return TensorSpec(tuple(value.shape), value.dtype)


def _check_static(node: fx.Node, value: Any) -> None:
    if isinstance(value, Tensor) and not all(isinstance(s, int) for s in value.shape):
        stack = node.meta.get("nn_module_stack") or {"": ("the model", "")}
        where = f"{next(reversed(stack.values()))[0]}, {source_of(node.meta.get('stack_trace'))}"
        raise UnsupportedError(
            f"{node.target} ({where}) has a shape that depends on tensors' numbers: "
            f"{tuple(value.shape)}; write it with a fixed size (torch.where, a mask) instead"
        )


def _clean_meta(node: fx.Node, classes: dict[str, str]) -> dict[str, Any]:
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        count = key.rpartition("@")[2] if "@" in key else ""
        calls.append(f"{path}@{count}" if count.isdigit() else path)
        classes[path] = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return {
        "val": pytree.tree_map(lambda v: _meta_value(node, v), node.meta.get("val")),
        "path": next(reversed(stack.values()))[0] if stack else "",
        "source": source_of(node.meta.get("stack_trace")),
        "stack": tuple(c for c in calls if c),
    }


def _meta_value(node: fx.Node, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    _check_static(node, value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _states(program: ExportedProgram, canonical: Mapping[str, str]) -> dict[str, State]:
    names: dict[str, list[str]] = {}
    for alias, name in canonical.items():
        names.setdefault(name, []).append(alias)
    states: dict[str, State] = {}
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
        states.setdefault(name, State(name, TensorSpec.of(tensor), kind, trains, others))
    return states


def _constants(program: ExportedProgram, read: set[str]) -> dict[str, Tensor]:
    """The values of the constants that the graph reads."""
    constants = {}
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR and name in read:
            value = program.constants[name]
            if value.is_meta or isinstance(value, FakeTensor):
                raise UnsupportedError(
                    f"the tensor {name!r} that the model holds has no numbers: build the model on a real device, "
                    "or register it as a buffer"
                )
            constants[name] = value.detach().cpu()
    return constants


def _input_paths(program: ExportedProgram) -> Iterator[str]:
    """The paths of all leaves of the arguments: ``0`` for a positional one, ``input_ids`` for a keyword."""
    spec = program.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    for path, _ in [*leaf_paths(args), *leaf_paths(kwargs)]:
        yield path


def _outputs(
    program: ExportedProgram, env: Mapping[fx.Node, fx.Node], with_loss: bool
) -> tuple[list[ModelOutput], str | None, str | None]:
    """The leaves of the result, the loss, the result's tree."""
    (results,) = next(n for n in program.graph.nodes if n.op == "output").args
    leaves = []
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):  # type: ignore[arg-type]
        if spec.kind is OutputKind.USER_OUTPUT:
            leaves.append(env[result] if isinstance(result, fx.Node) else result)
        else:
            raise UnsupportedError(_CHANGED.get(spec.kind, _CHANGED[None]).format(target=spec.target))
    tree = program.call_spec.out_spec
    assert tree is not None
    loss = None
    if with_loss:
        loss = leaves.pop()
        if not isinstance(loss, fx.Node) or not _is_scalar(loss):
            raise InputsError(f"loss(output) must be a floating scalar; it is {_describe(loss)}")
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
    except (NotImplementedError, ValueError, TypeError):  # a class that does not say how it is written
        written = None
    return outputs, loss.name if loss is not None else None, written


_CHANGED: dict[OutputKind | None, str] = {
    OutputKind.BUFFER_MUTATION: (
        "forward changes the buffer {target!r}: such a model couples the samples of a batch; "
        "call model.eval(), or replace batch norm by a norm over each sample (GroupNorm, LayerNorm)"
    ),
    OutputKind.USER_INPUT_MUTATION: "forward changes its argument {target!r} in place: make it change a copy",
    None: "forward changes {target!r} in place, which a plan cannot keep",
}


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def _describe(value: Any) -> str:
    if isinstance(value, fx.Node):
        tensor = value.meta["val"]
        return f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"
    return repr(value)


# --- the model --------------------------------------------------------------------------------------------------------


def _append_loss(twin: nn.Module, loss: Callable[[Any], Tensor]) -> None:
    """Make the twin return (output, loss of output)."""
    forward = twin.forward

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        output = forward(*args, **kwargs)
        return output, loss(output)

    twin.forward = with_loss


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _canonical_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """For every name the first name of the same tensor."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_identity(tensor), name) for name, tensor in named}


def _identity(tensor: Tensor) -> Any:
    if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _unsaved_buffers(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The values of small buffers that no checkpoint holds."""
    saved = set(model.state_dict(keep_vars=True))
    return {
        name: buffer.detach().to("cpu", cast(buffer.dtype, dtype))
        for name, buffer in model.named_buffers()
        if name not in saved and not buffer.is_meta and buffer.numel() <= _KEPT_BUFFER_NUMEL
    }


# --- an exported program ----------------------------------------------------------------------------------------------


def _fit_program(
    program: ExportedProgram, inputs: Inputs, global_batch: int | None
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The program for these inputs: itself where its shapes are fixed, exported anew where they are not."""
    if inputs is None and global_batch is None and _is_static(program):
        return program, ()
    if inputs is None:
        if program.example_inputs is None:
            raise InputsError("the ExportedProgram carries no example inputs: pass inputs=")
        args, kwargs = program.example_inputs
    else:
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    module = program.module(check_guards=False)
    twin = make_twin(module, None)
    args, kwargs = without_numbers((args, kwargs), twin, global_batch, None)
    fixed = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in program.graph_signature.user_inputs]
    leaves = pytree.tree_leaves((args, kwargs))
    if len(leaves) != len(fixed):
        raise InputsError(f"the ExportedProgram takes {len(fixed)} inputs; got {len(leaves)}")
    for node, leaf in zip(fixed, leaves, strict=True):
        want = node.meta["val"]
        if isinstance(want, Tensor) and any(isinstance(a, int) and a != b for a, b in zip(want.shape, leaf.shape, strict=False)):
            raise InputsError(
                f"the ExportedProgram was made for {node.name} of shape {tuple(want.shape)}; got {tuple(leaf.shape)}: "
                "export it with a dynamic batch dim, or pass the module"
            )
    return (program if _is_static(program) else export(twin, args, kwargs)), twin.notes


def _is_static(program: ExportedProgram) -> bool:
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    return all(isinstance(s, int) for v in values if isinstance(v, Tensor) for s in v.shape)


def _cast(captured: Captured, dtype: torch.dtype) -> Captured:
    """Parameters, buffers and inputs in ``dtype``, and what follows from them."""
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = node.meta["val"].to(cast(node.meta["val"].dtype, dtype))
    propagate(captured.graph)
    states = {k: replace(s, spec=replace(s.spec, dtype=cast(s.spec.dtype, dtype))) for k, s in captured.states.items()}
    inputs = [replace(i, spec=replace(i.spec, dtype=cast(i.spec.dtype, dtype))) for i in captured.inputs]
    constants = {k: c.to(cast(c.dtype, dtype)) for k, c in captured.constants.items()}
    return captured.with_(states=states, inputs=inputs, constants=constants)
