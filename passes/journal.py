"""What a call asks of torch, one entry for each function, and calls that are looked at without being traced.

Two calls with the same journal run the same operators on the same operands: entries name tensors by where they come
from (the call's operands by their place, what was made by when), and anything else by what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from passes.autocast import autocast_on
from passes.likeness import told

_SYMBOLS = (SymInt, SymFloat, SymBool)


class Journal(TorchFunctionMode):
    """Inside, keeps ``entries``. ``needs_trace``: whether only a trace knows what is made: sizes that the data tell,
    casts in a region of autocast."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self.needs_trace = False
        self._places: dict[int, int] = {}
        self._held: list[Tensor] = []  # whose identities are not given to others
        for operand in operands:
            self._name(operand)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = self._entry(args), self._entry(kwargs)
        self.needs_trace |= autocast_on() is not None
        result = func(*args, **kwargs)
        self.entries.append((func, *asked, self._made(result)))
        return result

    def mark(self) -> tuple[int, int]:
        """How far it has come, for :meth:`sum_up`."""
        return len(self.entries), len(self._held)

    def sum_up(self, mark: tuple[int, int], number: int, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """All since ``mark`` was a call of what is known by ``number``, be it in full or not."""
        entries, held = mark
        del self.entries[entries:]
        for tensor in self._held[held:]:
            self._places.pop(id(tensor), None)
        del self._held[held:]
        asked = self._entry(list(operands))
        self.entries.append((number, asked, self._made(list(results))))

    def _name(self, tensor: Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self._held)
            self._held.append(tensor)
        return self._places[id(tensor)]

    def _made(self, result: Any) -> Any:
        """The places of the tensors in a result; the rest follows from what was asked, or is the tracer's own."""
        if isinstance(result, Tensor):
            with torch._C.DisableTorchFunction():
                self.needs_trace |= any(isinstance(size, SymInt) for size in result.shape)
            return self._name(result)
        if isinstance(result, tuple | list):
            return [self._made(item) for item in result]
        self.needs_trace |= isinstance(result, _SYMBOLS)
        return None

    def _entry(self, value: Any) -> Any:
        """What a value is, equal for what is alike in two calls. What cannot be told is alike to itself alone."""
        return told(value, self._tensor)

    def _tensor(self, tensor: Tensor) -> tuple[str, Any]:
        place = self._places.get(id(tensor))
        return ("tensor", place) if place is not None else ("other", self._kept(tensor))

    def _kept(self, tensor: Tensor) -> int:
        """The identity of a tensor that came from elsewhere."""
        self._held.append(tensor)
        return id(tensor)


@contextlib.contextmanager
def untraced(operands: Sequence[Tensor]) -> Iterator[None]:
    """Inside a trace, what is run leaves nothing in the graph; it is computed as far as shapes go, as outside of it."""
    with contextlib.ExitStack() as stack:
        for _ in torch.overrides._get_current_function_mode_stack():
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(disable_proxy_modes_tracing())
        fake = detect_fake_mode(list(operands))
        if fake is not None and fake.shape_env is not None:
            stack.enter_context(fake.shape_env.ignore_fresh_unbacked_symbols())
        yield


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside a trace, what is run is noted neither by it nor by a journal; modes of the model's own stay."""
    modes = torch.overrides._get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for _ in modes:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        for mode in modes:
            if not isinstance(mode, Journal) and type(mode).__module__.split(".")[0] != "torch":
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
        stack.enter_context(disable_proxy_modes_tracing())
        yield
