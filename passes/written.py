"""Buffers that forward changes in ways that torch.export loses or cannot follow, as it is traced.

Inside :func:`writes_traced` a buffer that forward sets as an attribute is written to in the end, which torch.export
itself sees to for those of the outermost module alone; and a batch norm that averages over all batches so far
(``momentum=None``) counts them by a tensor, where torch asks what number that holds. Inside :func:`aliases_traced`
parameters and buffers are followed also where plain objects hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from passes.errors import UnsupportedError

_MOST_OBJECTS = 100_000  # that are searched for tensors


@contextmanager
def writes_traced(model: nn.Module) -> Iterator[None]:
    """Inside, what forward of ``model`` leaves in buffers can be traced."""
    averaging = [m for m in model.modules() if isinstance(m, _BatchNorm) and _averages(m)]
    for module in averaging:
        module.__dict__["forward"] = functools.partial(_averaging_forward, module)
    held = [(m, path, name) for path, m in model.named_modules() for name in m._buffers]
    own = model.__dict__.get("forward")
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def writing(*args: Any, **kwargs: Any) -> Any:
        before = [module._buffers[name] for module, _, name in held]  # those of this trace
        output = forward(*args, **kwargs)
        for (module, path, name), buffer in zip(held, before, strict=True):
            value = module._buffers.get(name)
            if value is not buffer:
                _write(f"{path}.{name}" if path else name, buffer, value)
                module._buffers[name] = buffer
        return output

    if held:
        model.__dict__["forward"] = writing
    try:
        yield
    finally:
        if held:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.__dict__["forward"] = own
        for module in averaging:
            module.__dict__.pop("forward", None)


@contextmanager
def aliases_traced(model: nn.Module) -> Iterator[None]:
    """Inside, forward of ``model`` reads and writes its parameters and buffers also where plain objects hold them.

    torch.export sets the tensors of a trace in modules alone: a list, a dict or another object that holds a parameter
    or buffer of a module, as a generation cache does, would keep the one of before.
    """
    aliases = aliases_of(model)
    forward, own = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def following(*args: Any, **kwargs: Any) -> Any:
        before = [alias.holder[alias.key] for alias in aliases]
        try:
            for alias in aliases:
                alias.follow()
            return forward(*args, **kwargs)
        finally:
            for alias, tensor in zip(aliases, before, strict=True):
                alias.holder[alias.key] = tensor

    if aliases:
        model.__dict__["forward"] = following
    try:
        yield
    finally:
        if aliases:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.__dict__["forward"] = own


@dataclass(frozen=True)
class Alias:
    """``holder[key]`` is the tensor that a module holds as ``states[name]``."""

    holder: Any
    key: Any
    states: dict[str, Any]
    name: str

    def follow(self) -> None:
        """Hold what the module holds now."""
        self.holder[self.key] = self.states[self.name]


def aliases_of(model: nn.Module) -> list[Alias]:
    """Places outside of modules' own tables that hold parameters or buffers."""
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
                    found.append(Alias(holder, key, *owners[id(value)]))
            elif isinstance(value, dict | list | tuple):
                waiting.append(value)
            elif not isinstance(value, nn.Module | type) and isinstance(getattr(value, "__dict__", None), dict):
                waiting.append(vars(value))
    return found


def _write(name: str, buffer: Tensor | None, value: Tensor | None) -> None:
    if buffer is None or value is None or buffer.shape != value.shape:
        raise UnsupportedError(
            f"forward sets the buffer {name!r}, {_shown(buffer)}, to {_shown(value)}; expected the same shape: a plan "
            "holds buffers of fixed shapes"
        )
    with torch.no_grad():
        buffer.copy_(value)


def _shown(value: Tensor | None) -> str:
    return "None" if value is None else f"of shape {tuple(value.shape)}"


def _averages(module: _BatchNorm) -> bool:
    """Whether a module asks how many batches it has seen."""
    plain = type(module).forward is _BatchNorm.forward
    return plain and module.momentum is None and module.training and module.num_batches_tracked is not None


def _averaging_forward(self: _BatchNorm, input: Tensor) -> Tensor:
    self._check_input_dim(input)
    assert self.running_mean is not None
    assert self.running_var is not None
    assert self.num_batches_tracked is not None
    self.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    for held, seen in ((self.running_mean, mean), (self.running_var, variance)):
        held.add_((seen - held) / self.num_batches_tracked)
    return result
