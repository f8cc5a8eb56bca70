"""Prepare the inputs of a trace: find sample inputs, check them against ``forward``, and replace tensors by fake ones
of the size of the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from partitioner.passes.capture.export import (
    ParameterlessCopy,
    cast_floating_dtype,
    map_leaves,
    try_forward,
)
from partitioner.passes.errors import InputsError
from partitioner.passes.ir.model import Argument, leaf_paths

Inputs = tuple[Any, ...] | Mapping[str, Any] | None

Bound = tuple[tuple[Any, ...], dict[str, Any]]  # (positional arguments, keyword arguments)
NO_BATCH = "no input has a batch dim: every input is 0-dimensional; pass inputs whose first dim is the batch"


def bind_inputs(
    fake_copy: ParameterlessCopy,
    original: nn.Module,
    inputs: Inputs,
    *,
    global_batch: int | None,
    dtype: torch.dtype | None,
    with_labels: bool,
) -> Bound:
    """Return (positional arguments, keyword arguments) for the forward of a copy of the model, with fake tensors whose
    batch dim has ``global_batch`` elements. Raises :class:`InputsError` if there are no inputs or forward does not
    accept them.

    Args:
        fake_copy: copy of the model with fake parameters.
        original: the model itself.
        inputs: the user's inputs; ``None`` uses the model's own dummy inputs.
        global_batch: size of the batch dim; ``None`` keeps the size of the inputs.
        dtype: dtype of floating-point inputs; ``None`` keeps their dtypes.
        with_labels: whether labels are added to dummy inputs, if forward returns a loss when it gets labels.
    """
    args, kwargs = split_inputs(original, inputs)
    check_signature(type(original).__name__, original.forward, args, kwargs)
    (args, kwargs) = make_fake_arguments((args, kwargs), fake_copy, global_batch, dtype)
    if inputs is None and with_labels:
        kwargs = _add_labels(fake_copy, kwargs)
    return args, kwargs


def find_plain_numbers(arguments: Bound) -> dict[str, int | float]:
    """Return the arguments that are Python ints or floats, but not booleans, as a dict: path, such as ``0`` or
    ``options.scale`` -> number.

    ``arguments``: (positional arguments, keyword arguments).
    """
    leaves = [(path, leaf) for part in arguments for path, leaf in leaf_paths(part)]
    return {path: leaf for path, leaf in leaves if type(leaf) in (int, float)}


def lift_leaves(arguments: Bound, fake_copy: ParameterlessCopy) -> Bound:
    """Return ``arguments`` with a 0-dimensional fake tensor (float64 for a float, int64 for an int) in place of each
    Python number whose path, such as ``options.scale``, is in ``fake_copy.numbers``.

    Args:
        arguments: (positional arguments, keyword arguments).
        fake_copy: copy of the model with fake tensors.
    """

    def lift(path: str, leaf: Any) -> Any:
        if path not in fake_copy.numbers:
            return leaf
        return fake_copy.empty((), torch.float64 if isinstance(leaf, float) else torch.int64)

    args, kwargs = arguments
    return map_leaves(lift, args), map_leaves(lift, kwargs)


def list_forward_arguments(model: nn.Module) -> tuple[Argument, ...]:
    """Return a tuple with a record of each named parameter of the ``forward`` of ``model``, in order: its name, its
    default, and whether it is required. ``*args`` and ``**kwargs`` are left out."""
    found = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        plain = required or type(parameter.default) in (bool, int, float, str, type(None))
        found.append(Argument(name, parameter.default if plain and not required else None, required, plain))
    return tuple(found)


def split_inputs(model: nn.Module | ExportedProgram, inputs: Any) -> Bound:
    """Return ``inputs`` as (positional arguments, keyword arguments). If ``inputs`` is ``None``, return the sample
    inputs of ``model``, a module or an exported program.

    Raises :class:`InputsError` if ``inputs`` is ``None`` and there are no sample inputs, or if ``inputs`` is neither a
    tensor, a tuple, a list nor a mapping.
    """
    if any(isinstance(part, PackedSequence) for part in pytree.tree_leaves(inputs, is_leaf=_is_packed)):
        raise InputsError(
            "an input is a packed sequence; expected the padded one (torch.nn.utils.rnn.pad_packed_sequence), since "
            "the lengths of a packed sequence are not fixed in a plan: mask outputs and losses behind the end of each "
            "sample"
        )
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if inputs is None:
        return _read_example_inputs(model) if isinstance(model, ExportedProgram) else ((), _get_dummy_inputs(model))
    raise InputsError(
        "inputs must be a tuple (positional) or a dict (keyword arguments), one whole global batch; "
        f"got {type(inputs).__name__}"
    )


def _is_packed(tree: Any) -> bool:
    return isinstance(tree, PackedSequence)


def _read_example_inputs(program: ExportedProgram) -> Bound:
    """Return the (positional, keyword) arguments with which ``program`` was exported. Raise :class:`InputsError` if the
    program does not contain them."""
    if program.example_inputs is None:
        raise InputsError("the ExportedProgram carries no example inputs: pass inputs=")
    args, kwargs = program.example_inputs
    return args, kwargs


def _get_dummy_inputs(model: nn.Module) -> dict[str, Any]:
    """Return the sample inputs of ``model``, a Hugging Face model, as keyword arguments. Raises :class:`InputsError` if
    ``model`` has none."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    accepted = inspect.signature(model.forward).parameters
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and size is not None:
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {main: torch.empty(2, getattr(config, "num_channels", 3), height, width, device="meta")}
    sample = getattr(model, "dummy_inputs", None)
    if isinstance(sample, dict) and main in sample:
        return {k: v for k, v in sample.items() if k in accepted}
    takes = ", ".join(accepted)
    raise InputsError(
        f"{type(model).__name__} needs inputs: pass inputs=(...) for positional or inputs={{...}} for "
        f"keyword arguments, one whole global batch (meta tensors are fine); forward takes ({takes})"
    )


def check_signature(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise :class:`InputsError` if ``forward`` does not accept the arguments ``args`` and ``kwargs``.

    Args:
        name: class name of the model, for the message.
    """
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        got = [f"{len(args)} positional"] if args else []
        got += list(kwargs)
        raise InputsError(
            f"the inputs do not fit {name}.forward: {error}; it takes {signature}, the inputs are ({', '.join(got)})"
        ) from None


def make_fake_arguments(
    tree: Any, fake_copy: ParameterlessCopy, global_batch: int | None, dtype: torch.dtype | None
) -> Any:
    """Return ``tree``, a pytree of arguments of forward, with each tensor replaced by a fake tensor, which has a shape
    but no values.

    ``global_batch``: the number of samples to which the batch dim of each tensor is enlarged; ``None`` keeps its size.
    ``dtype``: the dtype to which floating-point tensors are cast; ``None`` keeps their dtypes. ``fake_copy``: the copy
    of the model whose fake tensor mode is used. Raises :class:`InputsError` if ``global_batch`` is given and no tensor
    has a dim.
    """
    leaves, spec = pytree.tree_flatten(tree)
    sample = sample_batch(leaves)
    if global_batch is not None and sample is None:
        raise InputsError(f"global_batch is given, but {NO_BATCH}")
    made = [
        fake_copy.empty(enlarge_batch_shape(leaf, sample, global_batch), cast_floating_dtype(leaf.dtype, dtype))
        if isinstance(leaf, Tensor)
        else unwrap_numpy_number(leaf)
        for leaf in leaves
    ]
    return pytree.tree_unflatten(made, spec)


def unwrap_numpy_number(value: Any) -> Any:
    """Return a NumPy number or boolean ``value`` as a Python number or boolean, and any other value unchanged."""
    return value.item() if isinstance(value, np.number | np.bool_) else value


def sample_batch(leaves: list[Any]) -> int | None:
    """Return the number of samples in a batch: the size of the first dim of the first tensor that has a dim. Return
    ``None`` if there is no such tensor. ``leaves``: the values in the arguments of forward, in order."""
    return next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)


def infer_batch_dims(arguments: Bound) -> tuple[int | None, dict[str, int | None]]:
    """Return (number of samples in the batch, dict: path of a tensor -> index of its batch dim). The index is ``None``
    for a tensor without a batch dim.

    The number of samples is the size of the first dim of the first tensor (``None`` if no tensor has a dim). A tensor's
    batch dim is its first dim with that many elements. ``arguments``: (positional arguments, keyword arguments).
    """
    leaves = [(path, leaf) for part in arguments for path, leaf in leaf_paths(part) if isinstance(leaf, Tensor)]
    sample = sample_batch([leaf for _, leaf in leaves])
    return sample, {p: next((d for d, size in enumerate(x.shape) if size == sample), None) for p, x in leaves}


def enlarge_batch_shape(tensor: Tensor, sample: int | None, global_batch: int | None) -> tuple[int, ...]:
    """Return the shape of ``tensor`` for a batch of ``global_batch`` samples: its first dim of size ``sample`` is
    enlarged to ``global_batch``. The shape is unchanged if ``global_batch`` is ``None`` or no dim has the size
    ``sample``.

    ``sample``: number of samples in the given inputs.
    """
    shape = list(tensor.shape)
    if global_batch is not None and sample in shape:
        shape[shape.index(sample)] = global_batch
    return tuple(shape)


def _add_labels(fake_copy: ParameterlessCopy, kwargs: dict[str, Any]) -> dict[str, Any]:
    """If forward returns a loss when it gets ``labels``, return ``kwargs`` with fake ``labels``; otherwise return
    ``kwargs`` unchanged. One label for each token is tried first, then one for each sample.

    ``kwargs``: keyword arguments of forward. ``fake_copy``: a copy of the model with fake parameters.
    """
    if "labels" not in inspect.signature(fake_copy.module.forward).parameters or "labels" in kwargs:
        return kwargs
    main = next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    if main is None:
        return kwargs
    per_token = kwargs.get("decoder_input_ids", main)
    shapes = ([tuple(per_token.shape)] if not per_token.is_floating_point() else []) + [tuple(main.shape[:1])]
    for shape in shapes:
        labelled = {**kwargs, "labels": fake_copy.empty(shape, torch.int64)}
        if isinstance(getattr(try_forward(fake_copy, (), labelled), "loss", None), Tensor):
            return labelled
    return kwargs
