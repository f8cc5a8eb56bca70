"""Fewer passes of Python's cycle collector while plans are made: graphs are many objects, which live until the plan is
made, and most of them no longer.

A pass over all of them would come right then, and take longer than what is left to do. They are counted among the old
instead, and a pass over the old comes before a later plan, when several have left theirs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARELY = (2_000_000, 10, 10)  # as many objects as no usual plan leaves
_MANY = 50_000  # young objects, over which a pass takes time that is felt
_TOO_MANY = 1_500_000  # objects put off: some 200 MB

_put_off = 0


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, the collector runs after many more allocations than usual; then what the user set comes back, without the
    pass over everything that so many objects would ask for."""
    global _put_off
    before = gc.get_threshold()
    rarely = gc.isenabled() and before[0] > 0
    if rarely:
        if _put_off > _TOO_MANY:
            gc.collect()
            _put_off = 0
        gc.set_threshold(*(max(pair) for pair in zip(_RARELY, before, strict=True)))
    try:
        yield
    finally:
        young = gc.get_count()[0]
        if rarely and young > _MANY and not gc.get_freeze_count():  # what the user has frozen stays so
            _put_off += young
            gc.freeze()
            gc.unfreeze()  # which leaves them among the old
        gc.set_threshold(*before)
