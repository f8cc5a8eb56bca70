"""Weights of modules that need no trace, kept from the tracer: it is as fast as the model has weights.

A module whose call will stand in the graph as one operator (``passes/repeats.py``) has its parameters put away while
the model is traced. Whoever looks for them meanwhile finds that the trace cannot do without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from passes.likeness import Unlike


class Missing(Unlike):
    """A weight that was put away is looked for."""


class _Away(dict[str, Any]):
    """In place of a module's ``_parameters``: empty, and closed while the model runs."""

    def __init__(self, names: Sequence[str], running: Callable[[], bool]) -> None:
        super().__init__()
        self._names, self._running = frozenset(names), running

    def __contains__(self, name: object) -> bool:
        if name in self._names and self._running():
            raise Missing(f"the weight {name!r} is read outside of its layer's call")
        return False

    def _all(self) -> dict[str, Any]:
        if self._running():
            raise Missing("a layer's weights are listed outside of its call")
        return {}

    def items(self) -> Any:
        return self._all().items()

    def keys(self) -> Any:
        return self._all().keys()

    def values(self) -> Any:
        return self._all().values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclass
class PutAway:
    """The modules whose parameters are put away. ``names``: of the parameters by their place among all parameters and
    buffers of the module, in the order of its parts; ``None`` for buffers and what is not put away."""

    model: nn.Module
    names: dict[int, tuple[str | None, ...]] = field(default_factory=dict)  # by identity of the module
    numbers: dict[int, int] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _held: dict[int, list[tuple[nn.Module, nn.Module, Any]]] = field(default_factory=dict)
    _running: bool = False

    def put(self, module: nn.Module, name: str, like: nn.Module) -> None:
        """Put away the parameters of ``module``, the model's ``name``, whose parts are those of ``like``; nothing where
        another module has some of them too."""
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        if any(self._uses[p] != count for p, count in inside.items()):
            return
        names: list[str | None] = []
        for path, part in module.named_modules():
            prefix = ".".join(p for p in (name, path) if p)
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    names.append(f"{prefix}.{key}")
                    self.parameters[f"{prefix}.{key}"] = parameter
            names += [None for b in part._buffers.values() if b is not None]
        self.names[id(module)] = tuple(names)
        self.numbers[id(module)] = len(self.numbers)
        parts = zip(module.modules(), like.modules(), strict=True)
        self._held[id(module)] = [(part, twin, part._parameters) for part, twin in parts]

    def __post_init__(self) -> None:
        self._uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))

    def by_number(self) -> dict[int, tuple[str | None, ...]]:
        return {self.numbers[module]: names for module, names in self.names.items()}

    def close(self) -> None:
        """From here on the parameters are away."""
        for held in self._held.values():
            for part, _, own in held:
                names = [n for n, p in own.items() if p is not None]
                part.__dict__["_parameters"] = _Away(names, lambda: self._running)

    def open(self) -> None:
        """Everything is where it was."""
        for held in self._held.values():
            for part, _, own in held:
                part.__dict__["_parameters"] = own

    def lend(self, module: nn.Module) -> list[tuple[nn.Module, Any]]:
        """Give ``module`` the parameters of the one that it is like; what to give to :meth:`take_back`."""
        lent = []
        for part, twin, _ in self._held[id(module)]:
            lent.append((part, part.__dict__["_parameters"]))
            part.__dict__["_parameters"] = twin._parameters
        return lent

    def take_back(self, lent: list[tuple[nn.Module, Any]]) -> None:
        for part, away in lent:
            part.__dict__["_parameters"] = away

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` of the model, during which nobody may look for what is away."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._running = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._running = False

        return run
