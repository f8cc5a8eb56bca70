"""Keep optimizer states on a node's disk, in tensors backed by a mapped file, and step the optimizer in windows.

The pages of a mapped file are in memory only while they are used. A file is unlinked once it is mapped. Its space is
thus released when its process ends in any way, no files are left for a later run, and runs cannot conflict in a folder.

The optimizer updates one window of parameters at a time, whose states are in memory. Its own ``step`` runs once per
window, on parameter groups that have only the window's parameters. The result is the same for optimizers that update
each parameter only from its value, its gradient and its state; others are refused, as far as they can be detected.
While one window is updated, the next one is read and the previous one is written.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partitioner.runtime.errors import OffloadError

FOLDER = "PARTITION_OFFLOAD_FOLDER"  # environment variable with the default folder of an engine's files

_PREFIX = ".partition-offload-"
_ALIGN = 64  # alignment of tensors in bytes
_MIN_FILE_BYTES = 16 << 20  # minimum size of a file
_MS_SYNC = 4  # of <sys/mman.h>
_GIB = 2**30
_IN_MEMORY = ("tmpfs", "ramfs")


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is a mapped file that :class:`Disk` created to keep tensors on disk."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    return _PREFIX in (tensor.untyped_storage().filename or "")


def release_pages(tensor: Tensor) -> None:
    """If ``tensor`` is a mapped file, remove its pages from memory; otherwise do nothing. The pages are read from the
    file when they are used again.
    """
    if is_mapped(tensor) and tensor.numel():
        _advise_kernel(*_compute_page_span(tensor), mmap.MADV_DONTNEED)


def view_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the memory of ``tensor`` and whose storage has exactly the bytes of ``tensor``, so
    that code that saves whole storages saves only these bytes. The result is valid only while ``tensor`` exists.
    """
    content = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)


def trim_allocator() -> None:
    """Return unused memory of the C allocator to the operating system, if the C library can."""
    if hasattr(_load_libc(), "malloc_trim"):  # only glibc has it
        _load_libc().malloc_trim(0)


@dataclass
class _File:
    """A file that is mapped into memory. ``handle``: its open descriptor. ``storage``: the mapped memory. ``used``:
    number of bytes in use, from the start.
    """

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
    """Allocates tensors in files in ``folder`` that are mapped into memory, for one rank. ``reserved``: bytes that are
    allocated when the object is created; further files are added when needed. Raise :class:`OffloadError` if the folder
    does not exist or has too little space, or if the system is not Linux.
    """

    def __init__(self, folder: str | Path, reserved: int = 0) -> None:
        self.folder = Path(folder)
        self._files: list[_File] = []
        self._behind: threading.Thread | None = None
        self._error: OSError | None = None
        if not hasattr(os, "posix_fadvise"):
            raise OffloadError("optimizer states on disk need Linux; plan without 'disk' in offload")
        if not self.folder.is_dir():
            raise OffloadError(
                f"offload_folder: expected a folder on this node's disk, got {self.folder}, which does not exist; "
                "create it, or name another"
            )
        if reserved:
            self._add_file(reserved)

    @property
    def nbytes(self) -> int:
        """Return the total size in bytes of the files in which this rank keeps tensors on disk."""
        return sum(file.size for file in self._files)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of ``shape`` and ``dtype`` in a file that is mapped into memory, with undefined contents.
        Raise :class:`OffloadError` if there is too little space.
        """
        size = math.prod(shape)
        nbytes = -(-size * dtype.itemsize // _ALIGN) * _ALIGN
        if not self._files or self._files[-1].used + nbytes > self._files[-1].size:
            self._add_file(max(nbytes, _MIN_FILE_BYTES))
        file = self._files[-1]
        flat = torch.empty(0, dtype=dtype).set_(file.storage, file.used // dtype.itemsize, (size,), (1,))
        file.used += nbytes
        return flat.view(torch.Size(shape))

    def warn_if_in_memory(self) -> None:
        """Warn if the file system of the folder is in memory (tmpfs), so that offloading does not save memory."""
        if _file_system(self.folder) in _IN_MEMORY:
            warnings.warn(
                f"offload_folder: {self.folder} is in memory, so offload saves no memory: name a folder on a disk",
                stacklevel=4,
            )

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """Start to read ``tensors`` from disk into memory, because they will be used soon."""
        for start, size in _merge_page_spans(tensors):
            with contextlib.suppress(OSError):  # without prefetching, pages are read when they are used
                _advise_kernel(start, size, mmap.MADV_WILLNEED)

    def write_back(self, tensors: Iterable[Tensor]) -> None:
        """Start to write ``tensors`` to disk and to remove their pages from memory, after the previous such write has
        ended. Raise ``OSError`` if the previous write failed.
        """
        self.wait()
        spans = list(_merge_page_spans(tensors))
        if spans:
            self._behind = threading.Thread(target=self._write_back, args=(spans,), name="offload", daemon=True)
            self._behind.start()

    def wait(self) -> None:
        """Wait until the last write of tensors to disk that was started in the background is complete. Raise
        ``OSError`` if it failed.
        """
        if self._behind is not None:
            self._behind.join()
            self._behind = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def evict(self) -> None:
        """Remove the pages of all files of this rank from memory; their contents remain on disk."""
        for file in self._files:
            _advise_kernel(file.start, file.size, mmap.MADV_DONTNEED)

    def _write_back(self, spans: Sequence[tuple[int, int]]) -> None:
        """Write memory ranges to disk and remove their pages from memory. This runs in a thread. An ``OSError`` is
        stored; :meth:`wait` raises it. ``spans``: pairs (start address, length in bytes).
        """
        try:
            for start, size in spans:
                _call_libc("msync", start, size, _MS_SYNC)
                _advise_kernel(start, size, mmap.MADV_DONTNEED)
                for file in self._files:  # also drop the written pages from the page cache
                    first, last = max(start, file.start), min(start + size, file.start + file.size)
                    if first < last:  # a span may cover several files that are adjacent in memory
                        os.posix_fadvise(file.handle, first - file.start, last - first, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._error = error

    def _add_file(self, nbytes: int) -> None:
        """Create a file of ``nbytes`` bytes and map it into memory, with all of its blocks allocated on the disk,
        because writing to a page without a block would kill the process. Raise :class:`OffloadError` if there is too
        little space.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise self._make_full_error(nbytes, f"which has {free / _GIB:.2f} GiB free")
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
            raise self._make_full_error(nbytes, f"which cannot give it: {error}") from error
        self._files.append(_File(handle, cast(torch.UntypedStorage, storage)))

    def _make_full_error(self, nbytes: int, reason: str) -> OffloadError:
        return OffloadError(
            f"offload_folder: this rank needs {nbytes / _GIB:.2f} GiB more in {self.folder}, {reason}; make room, "
            "name a "
            "folder on a larger disk, or plan without 'disk' in offload"
        )


def _file_system(folder: Path) -> str:
    """Return the type of the file system of ``folder``, such as "tmpfs"; an empty string if it is unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    parents = {str(parent) for parent in (folder.resolve(), *folder.resolve().parents)}
    over = [(len(mount[1]), number, mount[2]) for number, mount in enumerate(mounts) if mount[1] in parents]
    return max(over, default=(0, 0, ""))[2]  # the last of several mounts at one place hides the others


def _compute_page_span(tensor: Tensor) -> tuple[int, int]:
    """Return the start address and the length in bytes of the memory pages that ``tensor`` occupies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - first


def _merge_page_spans(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield start address and length in bytes of the memory pages of those of ``tensors`` that are on disk. Adjacent
    ranges are merged.
    """
    spans = sorted(_compute_page_span(tensor) for tensor in tensors if tensor.numel() and is_mapped(tensor))
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
def _load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call_libc(name: str, start: int, size: int, how: int) -> None:
    if getattr(_load_libc(), name)(ctypes.c_void_p(start), ctypes.c_size_t(size), how):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of what is offloaded to disk: {os.strerror(number)}")


def _advise_kernel(start: int, size: int, how: int) -> None:
    _call_libc("madvise", start, size, how)


WINDOW = 64 << 20  # bytes of parameters in a window; their states under Adam take twice as many

KEEPER = "_window_keeper"

_Part = tuple[int, list[nn.Parameter]]  # index of a parameter group, and some of its parameters

_Check = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


def find_disk_states(optimizer: torch.optim.Optimizer | None) -> DiskOptimizerStates | None:
    """Return the object that keeps the states of ``optimizer`` on disk; ``None`` if its states are in memory."""
    return getattr(optimizer, KEEPER, None)


def keep_on_disk(optimizer: torch.optim.Optimizer, disk: Disk, ready: Callable[[], None]) -> None:
    """Move the states of ``optimizer`` to ``disk``, and change its ``step`` so that it updates a few parameters at a
    time, with only the states of these few in memory. ``ready``: function that is called without arguments before every
    step. Raise :class:`OffloadError` if the optimizer cannot run in this way.
    """
    kind = type(optimizer)
    if find_disk_states(optimizer) is not None:
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _make_unsupported_error(optimizer, "reads all parameters at once")
    if "step" in vars(optimizer):
        raise OffloadError(
            f"the step of this {kind.__name__} has been replaced, as by a learning-rate scheduler: call "
            "engine.on_disk(optimizer) first, then create the scheduler"
        )
    disk.warn_if_in_memory()
    step = kind.step
    windows = DiskOptimizerStates(optimizer, step.__wrapped__ if getattr(step, "hooked", False) else step, disk, ready)  # type: ignore[attr-defined]

    def windowed(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        return windows.step(closure, more)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(windowed)  # hooks run once, not for every window
    hooked.hooked = True
    optimizer.__class__ = type(kind.__name__, (kind,), {"step": hooked, "__module__": kind.__module__})
    setattr(optimizer, KEEPER, windows)


def require_states_on_disk(engine: object, parameters: Iterable[nn.Parameter]) -> None:
    """Make the step of any optimizer of ``parameters`` raise :class:`OffloadError` if the optimizer keeps its states in
    memory instead of on disk. This applies as long as ``engine`` exists.
    """
    own = {id(parameter) for parameter in parameters}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise :class:`OffloadError` if ``optimizer`` steps a parameter of the engine, but keeps its
        states in memory.
        """
        if find_disk_states(optimizer) is None and any(
            id(p) in own for g in optimizer.param_groups for p in g["params"]
        ):
            raise OffloadError(
                f"the plan has optimizer states on disk, but those of this {type(optimizer).__name__} would be in "
                "memory: call engine.on_disk(optimizer) once, before its first step"
            )

    step_hook.add(engine, check)


class StepHook:
    """Functions that are called before every step of any torch optimizer, each as long as the engine that added it
    exists.

    One global torch hook calls all of them. The hook is never removed, because torch iterates over its hooks during a
    step, and an engine may be garbage-collected at that time.
    """

    def __init__(self) -> None:
        self._checks: weakref.WeakKeyDictionary[object, list[_Check]] = weakref.WeakKeyDictionary()
        self._changing = threading.Lock()  # ranks may be threads
        self._is_registered = False

    def add(self, engine: object, check: _Check) -> None:
        """Call ``check`` before every step of any optimizer, as long as ``engine`` exists. ``check`` is called with the
        optimizer, and with the positional and keyword arguments of its step. ``check`` must not refer to ``engine``.
        """
        with self._changing:
            self._checks.setdefault(engine, []).append(check)
            if not self._is_registered:
                register_optimizer_step_pre_hook(self._before_step)
                self._is_registered = True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._changing:
            checks = [check for of_engine in self._checks.values() for check in of_engine]
        for check in checks:
            check(optimizer, args, kwargs)


step_hook = StepHook()


class DiskOptimizerStates:
    """The states of one optimizer on disk, and its step, which updates one window (some parameters) at a time. ``raw``:
    the optimizer's own step without hooks. ``disk``: allocates the tensors. ``ready``: function that is called without
    arguments before every step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, raw: Callable[..., Any], disk: Disk, ready: Callable[[], None]
    ) -> None:
        self._optimizer, self._raw, self._disk, self._ready = optimizer, raw, disk, ready
        self._slots: dict[tuple[int, str], Tensor] = {}  # (id of parameter, state name) -> its tensor on disk
        for window in self._divide_into_windows():
            self._move_to_disk([p for _, parameters in window for p in parameters])
        self._disk.wait()

    def allocate(self, parameter: nn.Parameter, key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor on disk for the optimizer state ``key`` of ``parameter``. If there is none of this
        ``shape`` and ``dtype``, allocate it.
        """
        slot = self._slots.get((id(parameter), key))
        if slot is None or slot.shape != torch.Size(shape) or slot.dtype != dtype:
            slot = self._slots[id(parameter), key] = self._disk.empty(shape, dtype)
        return slot

    def step(self, closure: Callable[[], Any] | None, more: dict[str, Any]) -> Any:
        """Run the optimizer's step window by window (some parameters at a time), and return the loss. ``closure``:
        computes the loss and the gradients, and is called once before the windows; ``None``: there is no closure, and
        ``None`` is returned. ``more``: further keyword arguments of the step. Raise :class:`OffloadError` if the step
        does not update each parameter independently of the others, and ``OSError`` if the disk fails.
        """
        optimizer, loss = self._optimizer, None
        self._ready()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, windows = optimizer.param_groups, list(self._divide_into_windows())
        before = _read_number_attributes(optimizer)
        try:
            for k, window in enumerate(windows):
                for following in windows[: k + 2] if k == 0 else windows[k + 1 : k + 2]:
                    self._disk.prefetch(self._list_read_tensors(following))
                parts = [{**groups[index], "params": parameters} for index, parameters in window]
                optimizer.param_groups = parts
                self._raw(optimizer, **more)
                self._require_unchanged_shared_state(parts, [groups[index] for index, _ in window], before)
                self._move_to_disk([p for _, parameters in window for p in parameters])
        finally:
            optimizer.param_groups = groups
            self._disk.wait()
        return loss

    def _divide_into_windows(self) -> Iterator[list[_Part]]:
        """Yield windows: groups of about 64 MiB of parameters that are updated together. Each is a list of pairs (index
        of the parameter group, parameters of this group).
        """
        window: list[_Part] = []
        room = WINDOW
        for index, group in enumerate(self._optimizer.param_groups):
            part: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter.nbytes > room and room < WINDOW:
                    yield [*window, (index, part)] if part else window
                    window, part, room = [], [], WINDOW
                part.append(parameter)
                room -= parameter.nbytes
            if part:
                window.append((index, part))
        if window:
            yield window

    def _list_read_tensors(self, window: Sequence[_Part]) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer reads for one window (parameters that are updated together): parameters
        with gradients, and their states. ``window``: list of (index of the parameter group, parameters of this group).
        """
        for parameter in (p for _, parameters in window for p in parameters if p.grad is not None):
            yield parameter.data
            yield from (held[key] for held, key, _ in _list_disk_tensors(self._optimizer.state.get(parameter, {})))

    def _move_to_disk(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy the optimizer states of ``parameters`` to their tensors on disk, and start to write these tensors and to
        remove them from memory.
        """
        used: list[Tensor] = []
        moved = False
        for parameter in parameters:
            if is_mapped(parameter):
                used.append(parameter.data)
            for holder, key, name in _list_disk_tensors(self._optimizer.state.get(parameter, {})):
                slot = self.allocate(parameter, name, holder[key].shape, holder[key].dtype)
                if slot is not holder[key]:
                    with torch.no_grad():
                        slot.copy_(holder[key])
                    holder[key] = slot
                    moved = True
                used.append(slot)
        if moved:
            trim_allocator()
        self._disk.write_back(used)

    def _require_unchanged_shared_state(
        self, parts: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]], before: dict[str, Any]
    ) -> None:
        """Raise :class:`OffloadError` if a step of the optimizer with some of its parameters changed an object that
        does not belong to a single parameter, so that steps with the other parameters would see the change: an option
        of a group, a number attribute of the optimizer, or a state whose key is not a parameter.

        ``parts``: the parameter groups, reduced to some parameters, with which the step ran. ``groups``: the original
        groups. ``before``: number attributes before the step, name -> value.
        """
        for part, group in zip(parts, groups, strict=True):
            changed = [
                k
                for k in part
                if k != "params" and part[k] is not group.get(k) and _is_changed_option(part[k], group, k)
            ]
            if changed:
                raise _make_unsupported_error(self._optimizer, f"changes {changed[0]!r} of its groups in each step")
        now = _read_number_attributes(self._optimizer)
        changed = [name for name in now if name not in before or now[name] != before[name]]
        if changed:
            raise _make_unsupported_error(self._optimizer, f"changes its {changed[0]!r} in each step")
        if any(not isinstance(key, Tensor) for key in self._optimizer.state):
            raise _make_unsupported_error(self._optimizer, "has a state that belongs to no parameter")


def _list_disk_tensors(holder: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield the tensors in ``holder`` that are moved to disk, each as a tuple: the dict or list that contains the
    tensor, its key there, and its full name. ``holder``: a parameter's optimizer state, a dict or list, perhaps nested.
    Numbers, tensor subclasses and tensors outside of host memory are not moved. ``prefix``: start of the full name.
    """
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, dict | list):
            yield from _list_disk_tensors(value, f"{prefix}{key}.")
        elif type(value) is Tensor and value.device.type == "cpu" and value.dim() and value.numel():
            yield holder, key, f"{prefix}{key}"


def _is_changed_option(value: Any, group: dict[str, Any], key: str) -> bool:
    return key not in group or isinstance(value, Tensor) or bool(value != group[key])


def _read_number_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of ``optimizer`` that are int or float, such as step counters, as name -> value."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _make_unsupported_error(optimizer: torch.optim.Optimizer, reason: str) -> OffloadError:
    """Return the error for ``optimizer``, which cannot run with its states on disk. ``reason``: the property of the
    optimizer that prevents this, as part of a sentence after its name.
    """
    return OffloadError(
        f"{type(optimizer).__name__} {reason}: with states on disk, an optimizer steps some parameters at a "
        "time; expected an optimizer that updates each parameter from its own gradient and state, such as "
        "Adam: use such an optimizer, or plan without 'disk' in offload"
    )
