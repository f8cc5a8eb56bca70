"""Fewer passes of Python's cycle collector while a plan is made: graphs are many objects, nearly all of them needed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARELY = (100_000, 20, 100)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, the collector runs after many more allocations than usual; what the user set comes back."""
    before = gc.get_threshold()
    if gc.isenabled() and before[0]:
        gc.set_threshold(*(max(pair) for pair in zip(_RARELY, before, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
