"""The input of ``check``: the plain model, how it is distributed, and one training step."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner.passes.errors import PartitionError
from partitioner.user_function import blame_user_code, find_user_function, import_user_module


class CheckSetupError(PartitionError):
    """Raised if a setup for :func:`partitioner.check_layout` is incomplete, or if its step returns something that
    cannot be compared.
    """


@dataclass(frozen=True)
class StepResult:
    """The results of one step on one rank.

    Attributes:
        loss: the loss of the global batch, or this rank's share of it: the mean or the sum over the ranks may be the
            loss of the plain model. ``None`` on ranks that do not compute it.
        outputs: the model's outputs: whole, as a ``DTensor``, or the slice of this rank; ``None``: outputs are not
            compared.
        gradients: name in the plain model -> whole gradient, for gradients that are not in ``.grad`` of the distributed
            parameters.
    """

    loss: Any = None
    outputs: Any = None
    gradients: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Setup:
    """A model, and the way in which it is distributed. The user writes a function without arguments that returns a
    ``Setup``; the function is called on every rank.

    Attributes:
        plain: the plain model. Its type becomes float64, and every element of its parameters gets a value of its own.
        inputs: one global batch: a tuple of positional or a dict of keyword arguments of the model.
        distribute: ``distribute(model)`` gets the plain model on every rank, inside the process group, and returns the
            module of this rank. A tuple, list or dict with modules and other objects, such as a pipeline schedule, is
            allowed. The parameters must keep the values of ``model``.
        step: ``step(distributed, inputs)`` gets the result of ``distribute`` and the global batch. It runs forward and
            backward of this rank, with every reduction of gradients, and returns the loss, ``(loss, outputs)`` or a
            :class:`StepResult`. ``None``: the module runs on the whole batch, and backward follows.
        loss: ``loss(output)`` returns the loss from the output of the plain model. ``None``: the output is the loss, or
            has the loss as its attribute ``loss``.
        clip_norm: largest L2 norm of all gradients of the plain model, if ``step`` clips gradients; else ``None``.
    """

    plain: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    distribute: Callable[[nn.Module], Any]
    step: Callable[[Any, Any], Any] | None = None
    loss: Callable[[Any], Tensor] | None = None
    clip_norm: float | None = None


def load_setup(target: str) -> tuple[Setup, str]:
    """Call the function ``target``, and return two values: the setup that it makes, converted to float64 and with a
    distinct value for each element of the weights; and a digest of weights and inputs before the values were made
    distinct. The random generators are seeded, and float64 is made the default type of this process.

    ``target``: ``FILE.py:FUNCTION`` or ``package.module:function``.

    Raise :class:`TargetError` if there is no such function or if it fails, and :class:`CheckSetupError` if it returns
    something other than a :class:`Setup` with weights.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise CheckSetupError(f"{target!r} names no function; expected FILE.py:FUNCTION, which returns a Setup")
    torch.set_default_dtype(torch.float64)
    seed_generators(0)
    function = find_user_function(import_user_module(where), where, name)
    with blame_user_code(target):
        setup = function()
    if not isinstance(setup, Setup):
        raise CheckSetupError(
            f"{target} returned {type(setup).__name__}; expected partitioner.Setup(plain=..., inputs=..., "
            "distribute=...)"
        )
    if not isinstance(setup.plain, nn.Module) or not isinstance(setup.inputs, tuple | Mapping):
        raise CheckSetupError(
            f"{target}: plain is {type(setup.plain).__name__} and inputs {type(setup.inputs).__name__}; expected an "
            "nn.Module, and a tuple or dict of arguments"
        )
    if not any(p.requires_grad for p in setup.plain.parameters()):
        raise CheckSetupError(
            f"{target}: the plain model has no parameters to train, so that no gradient can be compared"
        )
    bad = next((n for n, p in setup.plain.named_parameters() if p.is_meta or not p.is_floating_point()), None)
    if bad is not None:
        raise CheckSetupError(
            f"{target}: parameter {bad} is not a floating-point tensor in memory; expected floating-point weights"
        )
    setup.plain.double()
    inputs = pytree.tree_map(_to_float64, setup.inputs)
    digest = _hash_tensors([*setup.plain.state_dict().values(), *pytree.tree_leaves(inputs)])
    _make_elements_distinct(setup.plain)
    return Setup(setup.plain, inputs, setup.distribute, setup.step, setup.loss, setup.clip_norm), digest


def seed_generators(seed: int) -> None:
    """Set the seed of the random generators of torch, Python and, if it is imported, NumPy to ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def run_model(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Any:
    """Return the output of ``model`` for the arguments ``inputs``."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the loss of a model's ``output``. ``loss``: the user's function that computes it from the output;
    ``None``: the output is the loss, or has the loss as its attribute ``loss``.

    Raise :class:`CheckSetupError` if the result is not one number.
    """
    if loss is not None:
        found: Any = loss(output)
    else:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise CheckSetupError(
            "the output of the plain model has no loss; expected loss=..., a function that computes one number "
            "from the output"
        )
    return found


_SPREAD = 0.02  # standard deviation of the numbers that make weights distinct; initial weights are about as large


def _make_elements_distinct(model: nn.Module) -> None:
    """Add small random numbers, equal on all ranks, to every parameter of ``model`` in place. Each element can then be
    recognised by its value wherever a layout puts it; all ones (norms) or all zeros (biases) would not show it.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.device), alpha=_SPREAD)


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _hash_tensors(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()
