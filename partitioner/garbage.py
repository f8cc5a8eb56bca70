"""Fewer passes of Python's cycle collector while a plan is made: graphs are many objects, nearly all of them needed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARELY = (1_000_000, 10, 10)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, the collector runs after many more allocations than usual; what the user set comes back, without the pass
    over everything that so many rounds of the young would ask for then."""
    before = gc.get_threshold()
    if gc.isenabled() and before[0]:
        gc.set_threshold(*(max(pair) for pair in zip(_RARELY, before, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
