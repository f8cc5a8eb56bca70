"""Cache the hashes of frozen dataclasses that are often used as keys."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

_FOUND = "_found_hash"


def hashed_once(of: type[T]) -> type[T]:
    """Class decorator: let instances of the frozen dataclass ``of`` compute their hash once and cache it.

    The cached hash is not pickled, because hashes of strings differ between processes.
    """
    find = of.__hash__

    def kept(self: T) -> int:
        known = self.__dict__
        if _FOUND not in known:
            known[_FOUND] = find(self)
        found: int = known[_FOUND]
        return found

    def state(self: T) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _FOUND}

    of.__hash__ = kept  # type: ignore[method-assign, assignment]
    of.__getstate__ = state  # type: ignore[method-assign, assignment]
    return of


__all__ = ["hashed_once"]
