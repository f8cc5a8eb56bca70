"""Capture: from an unmodified model to one flat functional graph.

Provides: placeholders for states (parameters, buffers, constants that are read), then for inputs; operators on meta
tensors with ``val``, ``path`` (the module that runs it), ``source`` (``file:line``) and ``stack`` (the module calls
around it, outermost first: ``layers.0@1`` is the second call of ``layers.0``); an output node that lists the leaves
that are tensors. Nothing else in the project looks at the model itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from passes.accepted import check_inputs, check_model
from passes.assemble import Captured, assemble
from passes.autocast import autocast_on
from passes.blocks import State, TensorSpec
from passes.caches import caches_matter, held_by
from passes.errors import CaptureError, InputsError, UnsupportedError
from passes.expand import Unrepeated, expand, in_order
from passes.export import Twin, cast, export, leaf_paths, make_twin, try_forward
from passes.functionalize import flatten_program
from passes.hits import Hits
from passes.hooks import hooks_refused, refuse_hooks
from passes.infer import propagate
from passes.inputs import (
    NO_BATCH,
    Bound,
    Inputs,
    bind_inputs,
    sample_batch,
    sample_dims_of,
    split_inputs,
    without_numbers,
)
from passes.likeness import Group
from passes.putaway import PutAway
from passes.repeats import Repeats
from passes.retype import retype

__all__ = ["PRECISIONS", "Captured", "capture"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# A value of a non-persistent buffer is in no checkpoint; small ones are kept with the plan.
_KEPT_BUFFER_NUMEL = 1 << 16
_FEW = 2  # samples of a batch, to see what forward does
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
) -> Captured:
    """Trace ``model`` on one whole global batch. The model is not changed and no weight is copied.

    Args:
        inputs: a tuple (positional) or a dict (keyword arguments); ``None``: the program's or model's own sample.
        loss: makes the scalar loss of the model's output; ``None``: the output is the loss or has it as ``loss``.
        global_batch: the inputs' batch is a sample of this many.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``: parameters, buffers and inputs as ``model.to`` would cast
            them; ``fp64`` also makes casts to other floating types inside the model casts to float64.
        device: ``cpu`` or ``cuda``, on which the model is to run: what ``torch.autocast`` in forward is about.

    Raises :class:`CaptureError`, :class:`InputsError`, :class:`UnsupportedError`.
    """
    if precision is not None and precision not in PRECISIONS:
        raise InputsError(f"precision must be one of {', '.join(PRECISIONS)} or None; got {precision!r}")
    if autocast_on() is not None:
        raise InputsError(
            "the call is inside a region of torch.autocast, which is no part of the model; expected outside: leave it, "
            "and give precision=, or put the region into the model's forward"
        )
    dtype = None if precision is None else PRECISIONS[precision]
    if isinstance(model, nn.Module):
        check_model(model)
    check_inputs([leaf for part in split_inputs(model, inputs) for leaf in leaf_paths(part)])
    if isinstance(model, ExportedProgram):
        program, notes = _fit_program(model, inputs, global_batch)
        if loss is not None:
            raise InputsError("loss= needs the module: an ExportedProgram must return its loss itself")
        canonical, kept = _canonical_names(program.state_dict.items()), {}
        captured = assemble(flatten_program(program), canonical, with_loss=False)
    else:
        if objective == "train":
            refuse_hooks(model)
        twin = make_twin(model, dtype, casts=device if dtype != torch.float64 else None)
        args, kwargs = bind_inputs(
            twin,
            model,
            inputs,
            global_batch=global_batch,
            dtype=dtype,
            with_labels=objective == "train" and loss is None,
        )
        canonical, kept = _canonical_names(_named_tensors(model)), _unsaved_buffers(model, dtype)
        with hooks_refused() if objective == "train" else nullcontext():
            train = objective == "train"
            twin, notes = _with_caches_settled(model, twin, (args, kwargs), dtype)
            captured, hits = _trace(model, twin, args, kwargs, dtype, loss, canonical, train)
            pairs = []
            for parity, empty in enumerate(captured.turns):
                twin = _as_new(twin, model, dtype, hits.leaving_out(parity))
                pairs += [empty, _trace(model, twin, args, kwargs, dtype, loss, canonical, train)[0]]
            captured = captured.with_(turns=tuple(pairs))
        notes += _decided(captured, {canonical[name] for name in twin.asked})
    captured = captured.with_(notes=notes + captured.notes, constants=captured.constants | kept)
    if precision == "fp64":
        captured = _cast(captured, torch.float64, ("parameter", "buffer", "constant"))
        retype(captured.graph, torch.float64)
    elif dtype is not None and isinstance(model, ExportedProgram):
        captured = _cast(captured, dtype, ("parameter", "buffer"))
        propagate(captured.graph)
    return captured


def given_samples(model: nn.Module | ExportedProgram, inputs: Inputs) -> tuple[int, dict[str, int | None]]:
    """How many samples the inputs of :func:`capture` have, and by path where.

    Raises :class:`InputsError` where they have none.
    """
    count, dims = sample_dims_of(split_inputs(model, inputs))
    if count is None:
        raise InputsError(NO_BATCH)
    return count, dims


def _trace(
    model: nn.Module,
    twin: Twin,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    loss: Callable[[Any], Tensor] | None,
    canonical: Mapping[str, str],
    train: bool,
) -> tuple[Captured, Hits]:
    """The twin's graph, and what was found on the way: of layers that are alike one is traced, or all where that
    fails."""
    if loss is not None:
        _append_loss(twin.module, loss)

    def made(twin: Twin, program: ExportedProgram, finish: Callable[[Captured], Captured]) -> tuple[Captured, Hits]:
        hits = twin.hits
        hits.check()

        def captured(parity: int | None) -> Captured:
            decided = hits.guards.decided if hits.guards is not None else ()
            return finish(assemble(program, canonical, loss is not None, empty_turns=parity, decided=decided))

        whole = captured(hits.leaves_out if hits.guards is not None else None)
        pairs = [captured(parity) for parity in range(2)] if hits.found and hits.leaves_out is None else []
        return whole.with_(turns=tuple(pairs)), hits

    own = {t.data_ptr(): name for name, t in _named_tensors(model) if not _without_numbers(t) and t.numel()}
    repeats, given_up = Repeats.of(twin.module).put_away(twin.module), list[Group]()
    while repeats.groups and twin.hits.guards is None:
        away = repeats.away
        try:
            with repeats.tracing():
                program = flatten_program(export(twin, args, kwargs, train=train, diagnose=False), own)
            if away is None:
                return made(twin, program, expand)
            return made(twin, program, functools.partial(_restored, _states_of(away, canonical), canonical))
        except Unrepeated as error:
            repeats.refuse(error.number)
        except Exception:  # the shortcut's or the model's own: the full trace will tell
            pass
        refused, given_up = repeats.refused, given_up + repeats.refused
        twin = _as_new(twin, model, dtype, twin.hits.leaving_out(twin.hits.leaves_out))
        if loss is not None:
            _append_loss(twin.module, loss)
        left = Repeats.of(twin.module).without(given_up)
        if refused:
            repeats = left.put_away(twin.module) if away is not None else left
        else:  # the weights that were put away may have been missed
            repeats = left if away is not None else Repeats([])
    try:
        program = export(twin, args, kwargs, train=train)
    except CaptureError as error:
        if not isinstance(error.__cause__, GuardOnDataDependentSymNode) or twin.hits.guards is not None:
            raise
        twin = _as_new(twin, model, dtype, twin.hits.guarded())
        if loss is not None:
            _append_loss(twin.module, loss)
        try:
            program = export(twin, args, kwargs, train=train, diagnose=False)
        except Exception:  # another decision stands in the way, which has been told
            raise error from error.__cause__
    return made(twin, flatten_program(program, own), lambda captured: captured)


def _as_new(twin: Twin, model: nn.Module, dtype: torch.dtype | None, hits: Hits) -> Twin:
    """Another twin, as if forward had not run."""
    return replace(make_twin(model, dtype, twin.mode, twin.casts, twin.kept), asked=twin.asked, hits=hits)


def _with_caches_settled(
    model: nn.Module, twin: Twin, arguments: Bound, dtype: torch.dtype | None
) -> tuple[Twin, tuple[str, ...]]:
    """The twin to trace, and what is to be said of its generation caches."""
    if not twin.caches:
        return twin, ()
    args, kwargs = (
        without_numbers(arguments, twin, _FEW, dtype) if sample_batch(pytree.tree_leaves(arguments)) else arguments
    )
    run = functools.partial(try_forward, twin, args, kwargs, constants=True)
    before = held_by(twin.module)
    matter = caches_matter(twin.module, twin.mode, twin.caches, run)
    if matter or held_by(twin.module) != before:
        twin = replace(make_twin(model, dtype, twin.mode, twin.casts, keep_caches=matter), asked=twin.asked)
    return twin, (_CACHES_KEPT if matter else _CACHES_OFF,)


def _restored(
    states: Mapping[int, Sequence[State | None]], canonical: Mapping[str, str], captured: Captured
) -> Captured:
    """With copies for the layers that are alike, and the states that the trace did not see."""
    return in_order(expand(captured, states), canonical.values())


def _decided(captured: Captured, asked: set[str]) -> tuple[str, ...]:
    """What a plan takes for granted of the numbers of buffers by which forward has decided."""
    changed = sorted(asked & set(captured.updates))
    if changed:
        raise UnsupportedError(
            f"forward decides what it computes by the numbers of {changed[0]!r}, a buffer that it changes: a plan is "
            "one way through forward; run the first step in one process, or decide outside of the model"
        )
    names = ", ".join(sorted(asked)[:3]) + (", ..." if len(asked) > 3 else "")
    return (f"forward decides by the numbers of {names}: the plan is for those that it has now",) if asked else ()


def _states_of(away: PutAway, canonical: Mapping[str, str]) -> dict[int, list[State | None]]:
    """The states of modules whose parameters the trace did not see, by number of the module."""
    names: dict[str, list[str]] = {}
    for alias, name in canonical.items():
        names.setdefault(name, []).append(alias)

    def state(alias: str) -> State:
        name, parameter = canonical[alias], away.parameters[alias]
        others = tuple(n for n in names[name] if n != name)
        return State(name, TensorSpec.of(parameter), "parameter", parameter.requires_grad, others)

    return {
        number: [state(name) if name is not None else None for name in of_module]
        for number, of_module in away.by_number().items()
    }


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
    if _without_numbers(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _without_numbers(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


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
    args, kwargs = split_inputs(program, inputs)
    module = program.module(check_guards=False)
    twin = make_twin(module, None)
    args, kwargs = without_numbers((args, kwargs), twin, global_batch, None)
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
    return (program if _is_static(program) else export(twin, args, kwargs)), ()


def _is_static(program: ExportedProgram) -> bool:
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    return all(isinstance(s, int) for v in values if isinstance(v, Tensor) for s in v.shape)


def _cast(captured: Captured, dtype: torch.dtype, kinds: tuple[str, ...]) -> Captured:
    """Inputs, and states of ``kinds``, in ``dtype``; the graph's operators are left as they are."""

    def recast(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=cast(spec.dtype, dtype))

    states = {k: replace(s, spec=recast(s.spec)) if s.kind in kinds else s for k, s in captured.states.items()}
    inputs = [replace(i, spec=recast(i.spec)) for i in captured.inputs]
    specs = {k: s.spec for k, s in states.items()} | {i.value: i.spec for i in inputs}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = specs[captured.placeholders[node.name]].meta()
    constants = {k: c.to(specs[k].dtype) for k, c in captured.constants.items()}
    return captured.with_(states=states, inputs=inputs, constants=constants)
