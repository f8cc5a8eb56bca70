"""Memory that is a file's: tensors on a node's disk, whose pages are in memory only while they are used.

A file loses its name once it is mapped: its space is free again however its process ends, nothing is left for the next
run to find, and no two runs meet in one folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from runtime.errors import OffloadError

FOLDER = "PARTITION_OFFLOAD_FOLDER"  # in the environment: where an engine that is not told otherwise has its files
_PREFIX = ".partition-offload-"
_ALIGN = 64  # bytes: of tensors
_LEAST = 16 << 20  # bytes that a file is made for at least
_MS_SYNC = 4  # of <sys/mman.h>
_GIB = 2**30
_IN_MEMORY = ("tmpfs", "ramfs")


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a file on disk."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    return _PREFIX in (tensor.untyped_storage().filename or "")


def forget(tensor: Tensor) -> None:
    """Unmap the pages of a tensor, if it is one of a file's: they come back when they are read."""
    if is_mapped(tensor) and tensor.numel():
        _advise(*_span(tensor), mmap.MADV_DONTNEED)


def apart(tensor: Tensor) -> Tensor:
    """A tensor on disk as one whose storage holds nothing else, in the same memory; good while ``tensor`` is there."""
    content = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)


def trim() -> None:
    """Give back memory that is free, which the allocator keeps between what is not."""
    if hasattr(_libc(), "malloc_trim"):  # of glibc
        _libc().malloc_trim(0)


@dataclass
class _File:
    """``handle`` stays open; ``used``: bytes of it from the start."""

    handle: int
    storage: torch.UntypedStorage
    used: int = 0

    @property
    def start(self) -> int:
        return self.storage.data_ptr()

    @property
    def size(self) -> int:
        return self.storage.nbytes()


class Disk:
    """Files of one rank in ``folder``, in which there is room for ``reserved`` bytes from the start, and for more as it
    is asked for.

    Raises :class:`OffloadError` where there is no such folder, or no room.
    """

    def __init__(self, folder: str | Path, reserved: int = 0) -> None:
        self.folder = Path(folder)
        self._files: list[_File] = []
        self._behind: threading.Thread | None = None
        self._error: OSError | None = None
        if not hasattr(os, "posix_fadvise"):
            raise OffloadError("optimizer states on disk: expected Linux, which says what leaves memory; plan without")
        if not self.folder.is_dir():
            raise OffloadError(
                f"offload_folder: expected a folder on this node's disk, got {self.folder}, which is none; make it, or "
                "name another"
            )
        if reserved:
            self._grow(reserved)

    @property
    def nbytes(self) -> int:
        """What the files take."""
        return sum(file.size for file in self._files)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on disk. Raises :class:`OffloadError` where there is no room for it."""
        size = math.prod(shape)
        nbytes = -(-size * dtype.itemsize // _ALIGN) * _ALIGN
        if not self._files or self._files[-1].used + nbytes > self._files[-1].size:
            self._grow(max(nbytes, _LEAST))
        file = self._files[-1]
        flat = torch.empty(0, dtype=dtype).set_(file.storage, file.used // dtype.itemsize, (size,), (1,))
        file.used += nbytes
        return flat.view(torch.Size(shape))

    def check_worth(self) -> None:
        """Warn where the folder is no disk's."""
        if _file_system(self.folder) in _IN_MEMORY:
            warnings.warn(
                f"offload_folder: {self.folder} is in memory, which is to be spared: name one on a disk", stacklevel=4
            )

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        """Start to read what is to be used soon."""
        for start, size in _merged(tensors):
            with contextlib.suppress(OSError):  # else it is read when it is used
                _advise(start, size, mmap.MADV_WILLNEED)

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """Start to write what is not used any more, which then leaves memory; once the one before has.

        Raises ``OSError`` where the disk could not write the one before.
        """
        self.wait()
        spans = list(_merged(tensors))
        if spans:
            self._behind = threading.Thread(target=self._write, args=(spans,), name="offload", daemon=True)
            self._behind.start()

    def wait(self) -> None:
        """Wait until the write that :meth:`behind` started is complete. Raises ``OSError`` if the disk failed."""
        if self._behind is not None:
            self._behind.join()
            self._behind = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Unmap all pages."""
        for file in self._files:
            _advise(file.start, file.size, mmap.MADV_DONTNEED)

    def _write(self, spans: Sequence[tuple[int, int]]) -> None:
        try:
            for start, size in spans:
                _call("msync", start, size, _MS_SYNC)
                _advise(start, size, mmap.MADV_DONTNEED)
                for file in self._files:  # what is clean, and mapped nowhere, need not stay in the page cache
                    first, last = max(start, file.start), min(start + size, file.start + file.size)
                    if first < last:  # files may be neighbours in memory
                        os.posix_fadvise(file.handle, first - file.start, last - first, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._error = error

    def _grow(self, nbytes: int) -> None:
        """Make a file of so many bytes, all of which the disk has: one that is missing later would end the process."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise self._full(nbytes, f"which has {free / _GIB:.2f} GiB free")
        try:
            handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=self.folder)
        except OSError as error:
            raise OffloadError(f"offload_folder: {self.folder} cannot be written: {error}; name another") from error
        weakref.finalize(self, os.close, handle)
        try:
            os.ftruncate(handle, nbytes)
            storage = torch.UntypedStorage.from_file(path, True, nbytes)
        finally:
            os.unlink(path)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError as error:
            raise self._full(nbytes, f"which cannot give it: {error}") from error
        self._files.append(_File(handle, cast(torch.UntypedStorage, storage)))

    def _full(self, nbytes: int, why: str) -> OffloadError:
        return OffloadError(
            f"offload_folder: this rank needs {nbytes / _GIB:.2f} GiB more in {self.folder}, {why}; make room, name a "
            "folder on a larger disk, or plan without 'disk' in offload"
        )


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where that is not known."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    parents = {str(parent) for parent in (folder.resolve(), *folder.resolve().parents)}
    over = [(len(mount[1]), number, mount[2]) for number, mount in enumerate(mounts) if mount[1] in parents]
    return max(over, default=(0, 0, ""))[2]  # of those at one place the last hides the others


def _span(tensor: Tensor) -> tuple[int, int]:
    """The pages that a tensor is on: where they start, and their bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - first


def _merged(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """The pages of those that are on disk, runs of neighbours as one."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel() and is_mapped(tensor))
    begin = end = 0
    for start, size in spans:
        if start > end:
            if end > begin:
                yield begin, end - begin
            begin, end = start, start
        end = max(end, start + size)
    if end > begin:
        yield begin, end - begin


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, start: int, size: int, how: int) -> None:
    if getattr(_libc(), name)(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of what is offloaded to disk: {os.strerror(number)}")


def _advise(start: int, size: int, how: int) -> None:
    _call("madvise", start, size, how)
