"""One rank's whole state as a file in a node's memory: mapped, overwritten in place, complete under its own name.

``IDENTITY.RANK.STEP`` is complete; ``.IDENTITY.RANK.NUMBER.partial`` is being written, or was when its writer ended.
Pages are asked for once and used again, so that a copy costs what moving its bytes costs.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from passes.serialize import dtype_of
from runtime.checkpoint.plain import packed, unpacked

_NAME = re.compile(r"([0-9a-f]{16})\.(\d+)\.(\d+)")
_PARTIAL = re.compile(r"\.([0-9a-f]{16})\.(\d+)\.\d+\.partial")
_ALIGN = 64  # of tensors
_PAGES = 1 << 16  # the head grows by so much, so that it seldom changes the file's length
_LENGTH = 8  # bytes in front, which say how long the head is


class Name(NamedTuple):
    """Whose state, and of which step. ``identity``: of the run and its plan. ``step`` is ``None`` of a partial one."""

    identity: str
    rank: int
    step: int | None

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """``None`` for a file that is no slot."""
        if found := _NAME.fullmatch(path.name):
            return cls(found[1], int(found[2]), int(found[3]))
        found = _PARTIAL.fullmatch(path.name)
        return cls(found[1], int(found[2]), None) if found else None


def slots_in(folder: Path) -> Iterator[tuple[Name, Path]]:
    """What is in a folder, in the order of names."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if name := Name.of(path):
            yield name, path


class State(NamedTuple):
    """What a slot holds: tensors by name, and of the run all else; ``head`` is both but for the tensors' elements."""

    head: bytes
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> Self:
        """Raises :class:`CheckpointError` where ``run`` is no plain data."""
        table = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
        return cls(packed({"tensors": table, "run": dict(run)}, "the run"), tensors)

    @property
    def nbytes(self) -> int:
        return _start(self.head) + sum(_aligned(t.nbytes) for t in self.tensors.values())

    def write(self, to: Tensor) -> None:
        """Fill the bytes ``to``, of which there are :attr:`nbytes`."""
        with torch.no_grad():
            front = len(self.head).to_bytes(_LENGTH, "little") + self.head
            to[: len(front)].copy_(torch.frombuffer(bytearray(front), dtype=torch.uint8))
            table = ((n, t.dtype, t.shape) for n, t in self.tensors.items())
            for name, view in _views(to, _start(self.head), table):
                view.copy_(self.tensors[name])


def read(content: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, views of ``content``, and what else :meth:`State.write` wrote. Raises as unpickling does."""
    length = int.from_bytes(bytes(content[:_LENGTH].tolist()), "little")
    head = content[_LENGTH : _LENGTH + length].numpy().tobytes()
    found = unpacked(head)
    table = ((name, dtype_of(dtype), torch.Size(shape)) for name, dtype, shape in found["tensors"])
    return dict(_views(content, _start(head), table)), found["run"]


class Slot:
    """A file that one process writes. ``name``: what is complete in it. Raises ``OSError`` as the file system does."""

    def __init__(self, path: Path, name: Name) -> None:
        self.path = path
        self.name = name
        self.bytes = torch.empty(0, dtype=torch.uint8)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._map(handle)
        finally:
            os.close(handle)

    @property
    def size(self) -> int:
        return self.bytes.numel()

    def resize(self, size: int) -> None:
        """Ask for the memory now: a page that is missing later would end the process."""
        handle = os.open(self.path, os.O_RDWR)
        try:
            os.ftruncate(handle, size)
            os.posix_fallocate(handle, 0, size)
            self._map(handle)
        finally:
            os.close(handle)

    def begin(self, number: int) -> None:
        """What is in it is complete no more."""
        self._rename(self.name._replace(step=None), f".{self.name.identity}.{self.name.rank}.{number}.partial")

    def commit(self, step: int) -> None:
        self._rename(self.name._replace(step=step), f"{self.name.identity}.{self.name.rank}.{step}")

    def _rename(self, name: Name, to: str) -> None:
        path = self.path.with_name(to)
        os.rename(self.path, path)
        self.path, self.name = path, name

    def _map(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        if size:
            self.bytes = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def content_of(path: Path) -> Tensor:
    """A slot's bytes, to be read."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _start(head: bytes) -> int:
    return math.ceil((_LENGTH + len(head)) / _PAGES) * _PAGES


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


def _views(
    content: Tensor, at: int, table: Iterable[tuple[str, torch.dtype, torch.Size]]
) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape in table:
        size = shape.numel() * dtype.itemsize
        yield name, content[at : at + size].view(dtype).view(shape)
        at += _aligned(size)
