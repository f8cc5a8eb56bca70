"""Check the user's model and tensors before tracing, and remove wrapper modules.

Tensors that are not plain arrays (sparse, quantized, nested, distributed) have no strides or no storage, and would fail
deep inside a trace or on a rank. An error for such a tensor says what to convert it to.

``torch.compile``, ``DataParallel``, ``DistributedDataParallel`` and ``checkpoint_wrapper`` put a module around another
one, and a part such as ``_orig_mod.`` into the names of its weights. They say how to run a model, not what it computes.
:func:`unwrap_model` removes them and returns notes for the user, or raises an error. Requires: a module as the user
passes it. Provides: the module inside, with the same tensors, under the names of the model's own code.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial
from types import CellType, FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from partitioner.passes.errors import CaptureError, InputsError, PartitionError, UnsupportedError
from partitioner.passes.trace.autograd_functions import CHECKPOINT_NOTE, OFFLOAD_NOTE

_PLAIN_LEAF_TYPES = (NoneType, bool, int, float, str, nn.Module, torch.ScriptObject)

_MAX_LISTED_LEAVES = 8  # most leaves that a message lists


def check_model(model: nn.Module) -> None:
    """Raise :class:`InputsError` or :class:`UnsupportedError` if ``model`` or a module in it cannot be traced: if it
    has no ``forward``, packed quantized weights, uninitialised lazy parameters, or parameters or buffers that are
    sparse, nested, quantized, a DTensor or another subclass that holds tensors."""
    if not callable(getattr(model, "forward", None)):
        raise InputsError(f"{type(model).__name__} has no method forward; expected one, from which the plan is made")
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else "the model"
        packed = [key for key, value in vars(module).items() if isinstance(value, torch.ScriptObject)]
        if packed:
            raise UnsupportedError(
                f"{where} ({type(module).__name__}) holds packed weights ({packed[0]}), of torch.ao.quantization, "
                "which have neither gradients nor a layout; pass the model before quantization"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputsError(
                f"{name!r} has no shape yet (it belongs to a lazy module); expected an initialized model: call "
                "model(...) once on inputs of the right width"
            )
        check_tensor(tensor, f"{name!r} of the model", UnsupportedError)


def check_tensor(tensor: Tensor, what: str, error: type[PartitionError], *, numbers: bool = False) -> None:
    """Raise ``error`` if ``tensor`` is sparse, nested, quantized, a DTensor or another subclass that holds tensors.

    Args:
        what: name of the tensor for the message.
        error: the class of the exception.
        numbers: whether to raise also if the tensor has no values, because it is fake or on the meta device.
    """
    kind, instead = _describe_unsupported_kind(tensor, numbers)
    if kind:
        raise error(f"{what} is {kind}; expected a plain tensor: {instead}")


def _describe_unsupported_kind(tensor: Tensor, numbers: bool) -> tuple[str, str]:
    """Return (kind of ``tensor``, advice for the user), as texts for an error message, if ``tensor`` is nested, a
    DTensor, sparse, quantized or a subclass that holds other tensors. Return two empty texts for an ordinary tensor.

    ``numbers``: whether to return texts also for a fake tensor or a tensor on the meta device, which have no values.
    """
    if tensor.is_nested:
        return "a nested tensor", "pad it (torch.nested.to_padded_tensor) and mask what is padded"
    if hasattr(tensor, "full_tensor"):
        return "a DTensor", "pass tensor.full_tensor(), or the model before it was sharded"
    if tensor.layout not in (torch.strided, torch._mkldnn):  # type: ignore[attr-defined]
        return f"a sparse tensor ({str(tensor.layout).removeprefix('torch.')})", "convert it with to_dense()"
    if tensor.layout is not torch.strided:
        return "an MKL-DNN tensor", "convert it with to_dense()"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})", "convert it with dequantize()"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}, which holds other tensors", "convert it to the tensor that it stands for"
    if numbers and (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return "on the meta device and has no values", "pass real tensors to run a plan"
    return "", ""


def check_inputs(leaves: Sequence[tuple[str, Any]]) -> None:
    """Raise :class:`InputsError` if an argument of forward has a type that cannot be traced.

    ``leaves``: (path, leaf) of the arguments, such as ``("options.0", tensor)``.
    """
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            check_tensor(leaf, f"input {path!r}", InputsError)
        elif not isinstance(leaf, _PLAIN_LEAF_TYPES):
            raise InputsError(
                f"input {path!r} is a {type(leaf).__name__}; expected tensors, numbers, strings or None, in tuples, "
                f"lists, dicts or named tuples: {_suggest_replacement(leaf)}"
            )


def _suggest_replacement(leaf: Any) -> str:
    """Return advice, as text for messages, on what to pass in place of ``leaf``, an input of a type that cannot be
    traced."""
    if hasattr(leaf, "__array__"):
        return "make a tensor of it (torch.from_numpy, torch.tensor)"
    if isinstance(leaf, Set):
        return "pass a list"
    if isinstance(leaf, SimpleNamespace) or dataclasses.is_dataclass(leaf):
        return "pass its fields as a dict or a named tuple, or register its class (torch.export.register_dataclass)"
    return "convert it before forward, or keep it in the module"


def format_leaves(leaves: Sequence[tuple[str, Any]]) -> str:
    """Return a text such as ``x: (4, 8), scale: float`` with the shape or type of each leaf; a long list is shortened.

    ``leaves``: (path, leaf) of the arguments of forward.
    """
    shown = [
        f"{path}: {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
        for path, x in leaves[:_MAX_LISTED_LEAVES]
    ]
    return ", ".join(shown) + (
        f" and {len(leaves) - _MAX_LISTED_LEAVES} more" if len(leaves) > _MAX_LISTED_LEAVES else ""
    )


_Class = tuple[str, str]  # (name of a Python module, which need not be imported; name of a class in it)

_COMPILED: _Class = ("torch._dynamo.eval_frame", "OptimizedModule")

_REPLICATED: _Class = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_THREADS: _Class = ("torch.nn.parallel.data_parallel", "DataParallel")
_CHECKPOINTED: _Class = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper")
_OFFLOADED: _Class = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper")
# A wrapper's class -> the attribute in which it holds the module inside.
_WRAPPED_ATTRIBUTES: dict[_Class, str] = {
    _COMPILED: "_orig_mod",
    _REPLICATED: "module",
    _THREADS: "module",
    _CHECKPOINTED: "_checkpoint_wrapped_module",
    _OFFLOADED: "_checkpoint_wrapped_module",
}
_ROOT_PREFIX = "module."  # prefix of all names if a wrapper is around the whole model
_PARTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # parts of names that only wrappers add
_SHARDED: dict[_Class, str] = {
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "FullyShardedDataParallel",
    ("torch.distributed.fsdp", "FSDPModule"): "fully_shard",
    ("torch.distributed._composable.replicate", "DDP"): "replicate",
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"): "replicate",
}
_DTENSOR: _Class = ("torch.distributed.tensor", "DTensor")
_CHILDREN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

COMPILED_NOTE = (
    "torch.compile in the model ({where}) is left out: plans are compiled on GPUs, and with "
    'Constraints(execution="compiled") on CPUs, too'
)
_REPLICATED_NOTE = "{kind} ({where}) is left out: the plan itself divides the batch and adds up gradients"
_MAX_LISTED_PLACES = 3  # most module paths that a note lists


def unwrap_model(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return (``model`` without wrapper modules, such as ``DataParallel``; a tuple with a note for the user on each
    kind of wrapper that was removed). The returned model has the same tensors. A model without wrappers is returned
    itself. Raises :class:`UnsupportedError` if a wrapper has hooks, which would be lost."""
    named = [(_strip_wrapper_path(model, path), module) for path, module in model.named_modules()]
    wrappers = [(name, module) for name, module in named if _find_wrapped_module(module) is not None]
    compiled = [name for name, module in named if _is_compiled(module)]
    for path, wrapper in wrappers:
        _refuse_hooked(path, wrapper)
    notes = tuple(_iterate_wrapper_notes(wrappers, compiled))
    while (inner := _find_wrapped_module(model)) is not None:
        model = inner
    if not any(
        _find_wrapped_module(module) is not None or _has_compiled_attribute(module) for module in model.modules()
    ):
        return model, notes
    memo = make_sharing_memo(model)
    for module in reversed([*model.modules()]):  # inner modules before the modules around them
        if (inner := _find_wrapped_module(module)) is not None:
            memo[id(module)] = copy.deepcopy(inner, memo)
    return copy_model(model, memo), notes


def refuse_sharded(model: nn.Module) -> None:
    """Raise :class:`UnsupportedError` if ``model`` is sharded already (such as by FSDP). Raise :class:`CaptureError` if
    it is TorchScript, which cannot be traced."""
    for path, module in model.named_modules():
        kind = next((said for wrapper_class, said in _SHARDED.items() if _is_instance_of(module, wrapper_class)), None)
        if kind is None and any(_is_instance_of(p, _DTENSOR) for p in module.parameters(recurse=False)):
            kind = "DTensors (parallelize_module or distribute_tensor)"
        if kind is not None:
            raise UnsupportedError(
                f"{f'the module {path!r}' if path else 'the model'} is already sharded by {kind}; expected the model "
                "before sharding: the plan shards it, for example by Constraints(zero=3, tp=N), and an engine loads "
                "weights from a full state dict"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{f'the module {path!r}' if path else 'the model'} is TorchScript, which cannot be traced; expected "
                "the module that it was made from, or an ExportedProgram"
            )


def _iterate_wrapper_notes(wrappers: Sequence[tuple[str, nn.Module]], compiled: Sequence[str]) -> Iterator[str]:
    """Yield a note for the user on each kind of wrapper that was removed.

    ``wrappers``: (module path, wrapper module). ``compiled``: the paths of modules that ``torch.compile`` wrapped.
    """
    if compiled:
        yield COMPILED_NOTE.format(where=_format_module_names(compiled))
    for wrapper_class, note in (
        (_REPLICATED, _REPLICATED_NOTE),
        (_THREADS, _REPLICATED_NOTE),
        (_CHECKPOINTED, CHECKPOINT_NOTE),
        (_OFFLOADED, OFFLOAD_NOTE),
    ):
        if places := [path for path, module in wrappers if _is_instance_of(module, wrapper_class)]:
            yield note.format(kind=wrapper_class[1], where=_format_module_names(places))


def _format_module_names(paths: Sequence[str]) -> str:
    """Return the module paths ``paths`` as one text for messages, with ``the whole model`` for the empty path. A long
    list is shortened."""
    names = list(dict.fromkeys(path or "the whole model" for path in paths))
    more = f" and {len(names) - _MAX_LISTED_PLACES} more" if len(names) > _MAX_LISTED_PLACES else ""
    return ", ".join(names[:_MAX_LISTED_PLACES]) + more


def _strip_wrapper_path(model: nn.Module, path: str) -> str:
    """Return the module path ``path`` in ``model`` without the parts that wrapper modules added, such as
    ``_orig_mod``.
    """
    names, module = [], model
    for part in filter(None, path.split(".")):
        if _find_wrapped_module(module) is None:
            names.append(part)
        module = module.get_submodule(part)
    return ".".join(names)


def _find_wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside of the wrapper ``module``; ``None`` if ``module`` is not a wrapper."""
    attribute = next(
        (name for wrapper_class, name in _WRAPPED_ATTRIBUTES.items() if _is_instance_of(module, wrapper_class)), None
    )
    return None if attribute is None else module._modules[attribute]


def _is_instance_of(value: Any, wrapper_class: _Class) -> bool:
    """Return whether ``value`` is an instance of the class ``wrapper_class``. If the class's module is not imported,
    return false.

    Args:
        wrapper_class: (name of the Python module, name of the class).
    """
    kind = getattr(sys.modules.get(wrapper_class[0]), wrapper_class[1], None)
    return kind is not None and isinstance(value, kind)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to ``module``, its class's forward or one of its attributes."""
    own = getattr(module, "_compiled_call_impl", None) is not None  # set by module.compile()
    decorated = getattr(type(module).forward, "_torchdynamo_orig_callable", None) is not None
    return _is_instance_of(module, _COMPILED) or own or decorated or _has_compiled_attribute(module)


def _has_compiled_attribute(module: nn.Module) -> bool:
    """Return whether an attribute of ``module``, such as a ``forward`` set on the instance, was made by
    ``torch.compile``."""
    return any(_find_uncompiled_function(value) is not None for value in vars(module).values())


def _find_uncompiled_function(value: Any) -> Any:
    """Return the function from which ``torch.compile`` made ``value``; ``None`` if ``value`` is not compiled."""
    return getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None


def _refuse_hooked(path: str, wrapper: nn.Module) -> None:
    """Raise :class:`UnsupportedError` if the module ``wrapper`` has hooks, which would be lost if the wrapper is
    removed. ``path``: its module path; empty for the whole model."""
    where = f"the {type(wrapper).__name__} around {repr(path) if path else 'the model'}"
    if any(getattr(wrapper, name, None) for name in _HOOKS):
        raise UnsupportedError(
            f"{where} has hooks, which would be removed together with it; register them on the module inside"
        )
    if getattr(wrapper, "_comm_hooks", None):
        raise UnsupportedError(
            f"{where} has a communication hook, which changes gradients and which a plan would leave out; expected "
            'none: Constraints(grad_compression="bf16") sends gradients so'
        )


# --- copies -----------------------------------------------------------------------------------------------------------
def make_sharing_memo(model: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: ``id`` of a tensor -> the tensor itself. A copy of ``model`` that is made
    with this memo shares all its tensors with ``model``."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *held)}


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of ``model`` in which functions that refer to its modules, such as hooks, refer to the copies.
    ``copy.deepcopy`` does not copy functions, so a ``forward`` wrapped around another one would still call the original
    layers.

    Args:
        memo: the memo of ``copy.deepcopy``: ``id`` of an original object -> its copy.
    """
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for name, value in list(vars(module).items()):
            if name in _CHILDREN:
                continue
            if isinstance(value, dict):  # such as a table of hooks
                rebound = {key: _rebind_to_copies(entry, memo) for key, entry in value.items() if callable(entry)}
                # a dict without changes is not written to: it may be read-only
                if any(entry is not value[key] for key, entry in rebound.items()):
                    value.update(rebound)
            elif (changed := _rebind_to_copies(value, memo)) is not value:
                module.__dict__[name] = changed
                if name == "forward" and changed == MethodType(type(module).forward, module):
                    del module.__dict__[name]
    return made


def _rebind_to_copies(value: Any, memo: dict[int, Any]) -> Any:
    """Return ``value``, such as a hook, with the modules to which it refers replaced by their copies. If it refers to
    no copied module, ``value`` itself is returned.

    ``memo``: ``id`` of an original module -> its copy.
    """
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        owner = _rebind_to_copies(value.__self__, memo) if isinstance(value.__self__, nn.Module) else value.__self__
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        changed = [_rebind_to_copies(part, memo) for part in parts]
        if all(a is b for a, b in zip(parts, changed, strict=True)):
            return value
        function, *rest = changed
        arguments, named = rest[: len(value.args)], rest[len(value.args) :]
        return partial(function, *arguments, **dict(zip(value.keywords, named, strict=True)))
    if isinstance(value, FunctionType):
        return _rebind_function(value, memo)
    return value


def _rebind_function(function: FunctionType, memo: dict[int, Any]) -> Any:
    """Return a copy of ``function`` whose closure and defaults refer to copies of modules. If ``function`` refers to no
    copied module, it is returned itself. If ``torch.compile`` wraps ``function``, the function inside is used instead.

    ``memo``: ``id`` of an original object -> its copy.
    """
    if id(function) in memo:  # the function refers to itself
        return memo[id(function)]
    memo[id(function)] = function
    original = _find_uncompiled_function(function)
    if original is not None:
        return _rebind_to_copies(original, memo)
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    held = [*map(_read_cell_content, cells), *defaults]
    changed = [_rebind_to_copies(value, memo) for value in held]
    if all(a is b for a, b in zip(held, changed, strict=True)):
        return function
    closure = tuple(
        cell if a is b else CellType(b) for cell, a, b in zip(cells, held, changed[: len(cells)], strict=False)
    )
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, tuple(changed[len(cells) :]) or None, closure
    )
    made.__dict__.update(function.__dict__)
    made.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = made
    return made


def _read_cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the closure cell is empty
        return None


# --- hooks of the outermost module ------------------------------------------------------------------------------------
def take_hooks_into_forward(model: nn.Module) -> None:
    """Replace ``model.forward`` by a function that also calls the model's forward hooks, and clear the hook tables, so
    that a trace records the output that the hooks return."""
    before, behind = dict(model._forward_pre_hooks), dict(model._forward_hooks)
    if not before and not behind:
        return
    named = {*model._forward_pre_hooks_with_kwargs, *model._forward_hooks_with_kwargs}
    own: Callable[..., Any] = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Call the model's forward pre-hooks, its forward and its forward hooks with these arguments, in the order in
        which ``nn.Module.__call__`` calls them, and return the output."""
        for number, hook in before.items():
            found = hook(model, args, kwargs) if number in named else hook(model, args)
            if found is not None and number in named:
                args, kwargs = found
            elif found is not None:
                args = found if isinstance(found, tuple) else (found,)
        output = own(*args, **kwargs)
        for number, hook in behind.items():
            found = hook(model, args, kwargs, output) if number in named else hook(model, args, output)
            output = output if found is None else found
        return output

    forward.__wrapped__ = own  # type: ignore[attr-defined]  # whose signature it has
    model.__dict__["forward"] = forward
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()


# --- names ------------------------------------------------------------------------------------------------------------
def strip_wrapper_names(name: str) -> str:
    """Return ``name``, the name of a parameter, buffer or module, without the parts that wrapper modules add, such as
    ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def match_state_names(present: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Match names of a state dict to the names of a model if they differ only in parts that wrapper modules add. Return
    a dict: name in ``present`` -> name in ``wanted``, for each name in ``present`` that has a match and is not in
    ``wanted`` itself. A prefix ``module.`` that all names have is ignored."""
    held = set(present)
    prefix = _ROOT_PREFIX if held and all(strip_wrapper_names(name).startswith(_ROOT_PREFIX) for name in held) else ""
    meant = {strip_wrapper_names(name): name for name in wanted}
    found = {}
    for name in held - set(wanted):
        plain = strip_wrapper_names(name)
        target = meant.get(plain, meant.get(plain.removeprefix(prefix)))
        if target is not None and target not in held:
            found[name] = target
    return found
