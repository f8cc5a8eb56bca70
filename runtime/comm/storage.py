"""Release and allocate the memory of tensors that stay referenced, in a way that a recording of a step can repeat.

A step that is recorded operator by operator (``runtime/replay``) runs later on the same storages. A storage that was
released during the recording must have its memory again when the recorded operators write to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class _ThreadLog(threading.local):
    """Records changes of storage sizes in this thread, so that a recorded step can repeat them. ``append``: function
    that stores a function without arguments, which repeats one change; ``None``: changes are not recorded.
    """

    append: Callable[[Callable[[], object]], None] | None = None


_log = _ThreadLog()


def record_storages(append: Callable[[Callable[[], object]], None] | None) -> None:
    """Record, from now on, changes of the sizes of storages (allocated or released memory) in this thread, because a
    step is recorded and will be replayed. ``append``: called for each change with a function without arguments that
    repeats the change. ``None`` ends the recording.
    """
    _log.append = append


def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Allocate ``num_bytes`` bytes for ``storage``, with undefined contents; if ``num_bytes`` is 0, release
    its memory.
    """
    storage.resize_(num_bytes)
    if _log.append is not None:
        _log.append(partial(storage.resize_, num_bytes))


def share_memory(x: Tensor, other: Tensor) -> bool:
    """Return whether the tensors ``x`` and ``other`` have the same storage."""
    return bool(x.untyped_storage()._cdata == other.untyped_storage()._cdata)


def free_storage(x: Tensor) -> None:
    """Free the memory of ``x`` now, even if other tensors refer to it; nothing may read it afterwards. Memory that is
    shared with NumPy cannot be freed in this way; torch frees it with the last reference. While a step is recorded, the
    memory is kept, because a recorded operator writes to it again.
    """
    storage = x.untyped_storage()
    if storage.resizable() and _log.append is None:
        storage.resize_(0)
