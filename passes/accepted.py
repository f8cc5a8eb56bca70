"""What a model may be made of, and which tensors: everything else is refused before it is traced or run.

torch knows tensors that are no plain arrays: sparse, quantized, nested, distributed. They have no strides or no
storage, and fail deep inside of a trace or of a rank. The texts here say what to convert them to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from passes.errors import InputsError, PartitionError, UnsupportedError

_LEAVES = (NoneType, bool, int, float, str, nn.Module, torch.ScriptObject)
_SHOWN = 8  # leaves that a message lists


def check_model(model: nn.Module) -> None:
    """Raise :class:`InputsError` or :class:`UnsupportedError` for a module that no trace can follow."""
    if not callable(getattr(model, "forward", None)):
        raise InputsError(
            f"{type(model).__name__} has no method forward; expected one: a plan is made of what it computes"
        )
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else "the model"
        packed = [key for key, value in vars(module).items() if isinstance(value, torch.ScriptObject)]
        if packed:
            raise UnsupportedError(
                f"{where} ({type(module).__name__}) holds packed weights ({packed[0]}), as torch.ao.quantization makes "
                "them, which no gradient or layout is known for; pass the model as it was before it was quantized"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputsError(
                f"{name!r} has no shape yet (it is of a lazy module); expected an initialized model: call it once, "
                "model(...), on inputs of the right width"
            )
        check_tensor(tensor, f"{name!r} of the model", UnsupportedError)


def check_tensor(tensor: Tensor, what: str, error: type[PartitionError], *, numbers: bool = False) -> None:
    """Raise ``error`` unless ``tensor``, called ``what``, is a plain array; ``numbers``: one that has numbers."""
    kind, instead = _kind_of(tensor, numbers)
    if kind:
        raise error(f"{what} is {kind}; expected a plain tensor: {instead}")


def _kind_of(tensor: Tensor, numbers: bool) -> tuple[str, str]:
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
        return "on the meta device and has no numbers", "pass real tensors to run a plan"
    return "", ""


def check_inputs(leaves: Sequence[tuple[str, Any]]) -> None:
    """Raise :class:`InputsError` for a leaf of the arguments, by path, that no trace takes."""
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            check_tensor(leaf, f"input {path!r}", InputsError)
        elif not isinstance(leaf, _LEAVES):
            raise InputsError(
                f"input {path!r} is a {type(leaf).__name__}; expected tensors, numbers, strings or None, in tuples, "
                f"lists, dicts or named tuples: {_instead_of(leaf)}"
            )


def _instead_of(leaf: Any) -> str:
    if hasattr(leaf, "__array__"):
        return "make a tensor of it (torch.from_numpy, torch.tensor)"
    if isinstance(leaf, Set):
        return "pass a list"
    if isinstance(leaf, SimpleNamespace) or dataclasses.is_dataclass(leaf):
        return "pass its fields as a dict or a named tuple, or register its class (torch.export.register_dataclass)"
    return "convert it before forward, or keep it in the module"


def leaves_text(leaves: Sequence[tuple[str, Any]]) -> str:
    """``x: (4, 8), scale: float`` for the leaves of arguments, a few of many."""
    shown = [f"{path}: {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}" for path, x in leaves[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else "")
