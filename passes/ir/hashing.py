"""Cache keys: cached hashes for frozen dataclasses, and keys that are compared by identity."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")

_HASH_ATTRIBUTE = "_found_hash"


def hashed_once(of: type[T]) -> type[T]:
    """Class decorator that makes the frozen dataclass ``of`` compute the hash of each instance only once and cache it.

    The cached hash is not pickled, because hashes of strings differ between processes.
    """
    find = of.__hash__

    def kept(self: T) -> int:
        known = self.__dict__
        if _HASH_ATTRIBUTE not in known:
            known[_HASH_ATTRIBUTE] = find(self)
        found: int = known[_HASH_ATTRIBUTE]
        return found

    def state(self: T) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _HASH_ATTRIBUTE}

    of.__hash__ = kept  # type: ignore[method-assign, assignment]
    of.__getstate__ = state  # type: ignore[method-assign, assignment]
    return of


class SameObject(Generic[T]):
    """A cache key that equals another key only if both have the same object ``value``, compared by identity.

    It is for values that are not hashable or slow to compare. The key keeps the object alive, so a later object cannot
    match it by accident, as with a key ``id(value)``.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value


__all__ = ["SameObject", "hashed_once"]
