"""Capture a model: turn an unmodified module or an ``ExportedProgram`` into one flat, functional FX graph.

The graph has placeholders for the states that it reads (parameters, buffers, constant tensors), then for the inputs.
Its operators run on meta tensors and carry the metadata ``val`` (the result), ``path`` (the module that runs the
operator), ``source`` (``file:line``) and ``stack`` (the calls of modules around it, outermost first; ``layers.0@1`` is
the second call of ``layers.0``). The output node lists the leaves of the model's result that are tensors. Nothing else
in the project looks at the model itself.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from partitioner.passes.capture.assemble import assemble_program_graph
from partitioner.passes.capture.export import (
    ParameterlessCopy,
    cast_floating_dtype,
    export_parameterless_copy,
    make_fake_copy,
    try_forward,
)
from partitioner.passes.capture.functionalize import flatten_program
from partitioner.passes.capture.inputs import (
    NO_BATCH,
    Bound,
    Inputs,
    bind_inputs,
    infer_batch_dims,
    make_fake_arguments,
    sample_batch,
    split_inputs,
)
from partitioner.passes.capture.tracing import Tracer, list_fixed_input_notes, make_hookless_copy
from partitioner.passes.capture.wrappers import check_inputs, check_model
from partitioner.passes.errors import InputsError, UnrolledLoopWarning, UnsupportedError
from partitioner.passes.ir.interpret import refresh_graph_values
from partitioner.passes.ir.model import Captured, TensorSpec, leaf_paths
from partitioner.passes.ir.rewrite import cast_graph_dtype
from partitioner.passes.trace.autocast import get_autocast_region
from partitioner.passes.trace.autograd_functions import (
    check_hooks,
    disable_observing_global_hooks,
    list_forward_hooks,
    refuse_gradient_hooks,
    undo_hook_changes,
)
from partitioner.passes.trace.kv_cache import do_caches_matter

__all__ = ["PRECISIONS", "Captured", "capture"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# No checkpoint contains the non-persistent buffers; those of at most this many elements are stored in the plan.
_KEPT_BUFFER_NUMEL = 1 << 16
_MANY_OPERATORS = 1000  # from this many equal operators of one source line on, a warning says that a loop is unrolled
_SMALL_BATCH = 2  # batch size with which forward is run to see whether caches matter
_CACHES_OFF = "generation caches are left out: use_cache is off in the plan"
_CACHES_KEPT = (
    "forward computes something else where it makes generation caches: the plan makes them, and returns none; "
    "switch use_cache off in the model's configuration to plan it without"
)


def capture(
    model: nn.Module | ExportedProgram,
    inputs: Inputs,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    objective: str = "train",
    device: str = "cpu",
    lift_numbers: bool = True,
) -> Captured:
    """Trace ``model`` on one global batch and return the captured model: one FX graph with the names of its states
    (parameters, buffers, constants), inputs, outputs and loss. The model is not changed and no weight is copied.

    Raises :class:`CaptureError`, :class:`InputsError` or :class:`UnsupportedError`.

    Args:
        inputs: a tuple of positional or a dict of keyword arguments; ``None`` uses the sample inputs that the program
            or model has itself.
        loss: computes the scalar loss from the model's output. If ``None``, the output is the loss or has the loss in
            its field ``loss``.
        global_batch: number of samples of the global batch, to which the batch dim of ``inputs`` is enlarged; ``None``
            keeps the size of ``inputs``.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``; parameters, buffers and inputs are cast to it as by
            ``model.to``. ``fp64`` also turns casts to other floating-point types inside the model into casts to
            float64. ``None`` casts nothing.
        objective: ``train`` captures the loss and what gradients need; any other value captures only the forward.
        device: ``cpu`` or ``cuda``, the type of device that the model will run on. The device decides which
            ``torch.autocast`` regions of forward take effect.
        lift_numbers: whether to read Python numbers of the inputs as 0-dimensional tensors if forward allows it;
            otherwise their values are fixed in the graph.
    """
    if precision is not None and precision not in PRECISIONS:
        raise InputsError(f"precision must be one of {', '.join(PRECISIONS)} or None; got {precision!r}")
    if get_autocast_region() is not None:
        raise InputsError(
            "the call is inside a region of torch.autocast, which is not part of the model; call it outside of the "
            "region, and give precision="
            ", or put the region into the model's forward"
        )
    dtype = None if precision is None else PRECISIONS[precision]
    if isinstance(model, nn.Module):
        check_model(model)
    check_inputs([leaf for part in split_inputs(model, inputs) for leaf in leaf_paths(part)])
    if isinstance(model, ExportedProgram):
        program, notes = _keep_shapes_fixed(model, inputs, global_batch)
        if loss is not None:
            raise InputsError("loss= needs the module: an ExportedProgram must return its loss itself")
        canonical, kept = _map_canonical_names(program.state_dict.items()), {}
        captured = assemble_program_graph(flatten_program(program), canonical, with_loss=False)
    else:
        train = objective == "train"
        of_hooks = list(check_hooks(model, train=train))
        fake_copy = make_hookless_copy(model, dtype, casts=device if dtype != torch.float64 else None)
        arguments = bind_inputs(
            fake_copy, model, inputs, global_batch=global_batch, dtype=dtype, with_labels=train and loss is None
        )
        canonical, kept = _map_canonical_names(_list_named_tensors(model)), _collect_nonpersistent_buffers(model, dtype)
        with (
            refuse_gradient_hooks(of_hooks) if train else nullcontext(),
            disable_observing_global_hooks(),
            undo_hook_changes(model, of_hooks),
        ):
            tracer = Tracer(model, dtype, loss, canonical, train, tuple(list_forward_hooks(model)))
            before = tracer.take_snapshot(fake_copy.module)
            fake_copy, notes = _choose_cache_use(model, fake_copy, arguments, dtype)
            trace = tracer.capture(fake_copy, arguments, lift_numbers, before)
        captured = trace.captured
        notes += (*dict.fromkeys(of_hooks), *_note_ignored_loss(captured, loss))
        notes += _note_unread_parameters(captured) if train else ()
        notes += _list_decision_notes(captured, {canonical[name] for name in fake_copy.read_buffers})
        notes += tuple(list_fixed_input_notes(captured.signature, trace.uses))
    _warn_of_unrolled_loops(captured)
    captured = captured.with_(notes=notes + captured.notes, constants=captured.constants | kept)
    if precision == "fp64":
        captured = _cast_inputs_and_states(captured, torch.float64, ("parameter", "buffer", "constant"))
        cast_graph_dtype(captured.graph, torch.float64)
    elif dtype is not None and isinstance(model, ExportedProgram):
        captured = _cast_inputs_and_states(captured, dtype, ("parameter", "buffer"))
        refresh_graph_values(captured.graph)
    return captured


def _warn_of_unrolled_loops(captured: Captured) -> None:
    """Issue :class:`UnrolledLoopWarning` if very many equal operators of ``captured``, the traced model, come from one
    source line of one module. Such a line is in a Python loop, for example over time steps."""
    nodes = (n for n in captured.graph.nodes if n.op == "call_function" and n.meta.get("source"))
    found = Counter((n.meta["source"], n.meta.get("path", ""), str(n.target)) for n in nodes)
    if not found or (most := max(found.values())) < _MANY_OPERATORS:
        return
    (source, path, target), _ = found.most_common(1)[0]
    warnings.warn(
        f"a Python loop of forward is unrolled: {source}{f' ({path})' if path else ''} becomes {most:,} "
        f"operators {target}, and planning time grows with their number. For a loop over time steps use "
        "nn.LSTM, nn.GRU, nn.RNN, torch.associative_scan or products over chunks of steps, or plan for fewer "
        "steps",
        UnrolledLoopWarning,
        stacklevel=2,
    )


def find_batch_dims(model: nn.Module | ExportedProgram, inputs: Inputs) -> tuple[int, dict[str, int | None]]:
    """Return (number of samples in ``inputs``, dict: path of an input tensor -> index of its batch dim). The index is
    ``None`` for a tensor without a batch dim.

    Raises :class:`InputsError` if no input has a batch dim. ``model``: gives the sample inputs if ``inputs`` is
    ``None``.
    """
    count, dims = infer_batch_dims(split_inputs(model, inputs))
    if count is None:
        raise InputsError(NO_BATCH)
    return count, dims


def _choose_cache_use(
    model: nn.Module, fake_copy: ParameterlessCopy, arguments: Bound, dtype: torch.dtype | None
) -> tuple[ParameterlessCopy, tuple[str, ...]]:
    """Decide whether ``model`` is traced with its generation (key/value) caches. Return (copy of the model with fake
    parameters that is to be traced, tuple of notes for the user).

    Caches stay on only if the result of forward depends on them. To find this out, forward is run without a trace.

    Args:
        fake_copy: a copy of the model with fake parameters and with the caches off. If the model has no caches, this
          copy
            is returned.
        arguments: (positional arguments, keyword arguments) of forward.
        dtype: the dtype to which floating-point tensors are cast; ``None`` keeps their dtypes.
    """
    if not fake_copy.caches:
        return fake_copy, ()
    args, kwargs = (
        make_fake_arguments(arguments, fake_copy, _SMALL_BATCH, dtype)
        if sample_batch(pytree.tree_leaves(arguments))
        else arguments
    )
    run = functools.partial(try_forward, fake_copy, args, kwargs, constants=True)
    matter = do_caches_matter(fake_copy.module, fake_copy.mode, fake_copy.caches, run)
    fake_copy = replace(
        make_hookless_copy(model, dtype, fake_copy.mode, fake_copy.casts, keep_caches=matter),
        read_buffers=fake_copy.read_buffers,
    )
    return fake_copy, (_CACHES_KEPT if matter else _CACHES_OFF,)


def _list_decision_notes(captured: Captured, read_buffers: set[str]) -> tuple[str, ...]:
    """Return a tuple with one note for the user that names the buffers on whose values forward branched (as by ``if``)
    while it was traced; an empty tuple if there are none. The branch that was taken is fixed in the plan. Raises
    :class:`UnsupportedError` if forward also changes such a buffer.

    Args:
        captured: the captured model, which has the names of the buffers that forward changes.
        read_buffers: names of the buffers on whose values forward branched.
    """
    changed = sorted(read_buffers & set(captured.updates))
    if changed:
        raise UnsupportedError(
            f"forward branches on the values of {changed[0]!r}, a buffer that it changes, but a plan contains only "
            "one branch; run the first step in one process, or branch outside of the model"
        )
    names = ", ".join(sorted(read_buffers)[:3]) + (", ..." if len(read_buffers) > 3 else "")
    return (
        (f"forward decides by the numbers of {names}: the plan is for those that it has now",) if read_buffers else ()
    )


def _note_unread_parameters(captured: Captured) -> tuple[str, ...]:
    """Return a tuple with one note for the user that names the parameters of the model ``captured`` that are to be
    trained and that its graph does not read; an empty tuple if there are none."""
    read = {captured.placeholders.get(node.name) for node in captured.graph.nodes if node.op == "placeholder"}
    unread = [n for n, s in captured.states.items() if s.kind == "parameter" and s.requires_grad and n not in read]
    if not unread:
        return ()
    names = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
    return (f"forward does not read {len(unread)} of the trained parameters, which get no gradient: {names}",)


def _note_ignored_loss(captured: Captured, loss: Callable[[Any], Tensor] | None) -> tuple[str, ...]:
    """Return a tuple with one note for the user if the output of the model ``captured`` has a loss of its own, which
    the function ``loss`` replaces. Return an empty tuple if the output has no loss, or if ``loss`` is ``None``."""
    returned = [output.value for output in captured.outputs if output.path == "loss"]
    if loss is None or not set(returned) - {None, captured.loss}:
        return ()
    return (
        "the model is trained on the loss that loss= computes from the output; the loss that the model itself "
        "returns is ignored",
    )


# --- the model --------------------------------------------------------------------------------------------------------
def _list_named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _map_canonical_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return a dict: name of a tensor -> first of all names of the same tensor. Tied weights have several names.
    ``named``: pairs of name and tensor."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_build_tensor_key(tensor), name) for name, tensor in named}


def _build_tensor_key(tensor: Tensor) -> Any:
    """Return a hashable key of ``tensor``. Keys are equal for two tensors with the same memory, dtype, shape and
    strides.

    For a tensor without values or elements, the key is its ``id``.
    """
    if _has_no_values(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _has_no_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has no values: it is fake or on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _collect_nonpersistent_buffers(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the values of the non-persistent buffers of ``model``, which no checkpoint contains: name -> tensor on the
    CPU. Buffers without values (on ``meta``) and those of more than ``_KEPT_BUFFER_NUMEL`` (2**16) elements are left
    out. ``dtype``: the dtype to which floating-point values are cast; ``None`` keeps their dtypes.
    """
    saved = set(model.state_dict(keep_vars=True))
    return {
        name: buffer.detach().to("cpu", cast_floating_dtype(buffer.dtype, dtype))
        for name, buffer in model.named_buffers()
        if name not in saved and not buffer.is_meta and buffer.numel() <= _KEPT_BUFFER_NUMEL
    }


# --- an exported program ----------------------------------------------------------------------------------------------
def _keep_shapes_fixed(
    program: ExportedProgram, inputs: Inputs, global_batch: int | None
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Return two values: an exported program with fixed shapes for ``inputs``, and an empty tuple of notes for the
    user.

    If ``program`` has fixed shapes, it is returned unchanged. If it has dynamic shapes, it is exported again on the
    inputs, with a batch dim of ``global_batch`` samples (``None``: of the size in ``inputs``). Raises
    :class:`InputsError` if the inputs do not fit the program.
    """
    if inputs is None and global_batch is None and _is_static(program):
        return program, ()
    args, kwargs = split_inputs(program, inputs)
    module = program.module(check_guards=False)
    fake_copy = make_fake_copy(module, None)
    args, kwargs = make_fake_arguments((args, kwargs), fake_copy, global_batch, None)
    fixed = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in program.graph_signature.user_inputs]
    leaves = pytree.tree_leaves((args, kwargs))
    if len(leaves) != len(fixed):
        raise InputsError(f"the ExportedProgram takes {len(fixed)} inputs; got {len(leaves)}")
    for node, leaf in zip(fixed, leaves, strict=True):
        want = node.meta["val"]
        if isinstance(want, Tensor) and any(
            isinstance(a, int) and a != b for a, b in zip(want.shape, leaf.shape, strict=False)
        ):
            raise InputsError(
                f"the ExportedProgram was made for {node.name} of shape {tuple(want.shape)}; got {tuple(leaf.shape)}: "
                "export it with a dynamic batch dim, or pass the module"
            )
    return (program if _is_static(program) else export_parameterless_copy(fake_copy, args, kwargs)), ()


def _is_static(program: ExportedProgram) -> bool:
    """Return whether the shapes of all inputs, parameters and buffers of the exported program ``program`` are fixed."""
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    return all(isinstance(s, int) for v in values if isinstance(v, Tensor) for s in v.shape)


def _cast_inputs_and_states(captured: Captured, dtype: torch.dtype, kinds: tuple[str, ...]) -> Captured:
    """Return the captured model ``captured`` with its floating-point inputs and states in ``dtype``. The operators of
    the graph are not changed.

    ``kinds``: the kinds of states that are cast, of ``parameter``, ``buffer`` and ``constant``.
    """

    def cast_spec(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=cast_floating_dtype(spec.dtype, dtype))

    states = {k: replace(s, spec=cast_spec(s.spec)) if s.kind in kinds else s for k, s in captured.states.items()}
    inputs = [replace(i, spec=cast_spec(i.spec)) for i in captured.inputs]
    specs = {k: s.spec for k, s in states.items()} | {i.value: i.spec for i in inputs}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = specs[captured.placeholders[node.name]].meta()
    constants = {k: c.to(specs[k].dtype) for k, c in captured.constants.items()}
    return captured.with_(states=states, inputs=inputs, constants=constants)
