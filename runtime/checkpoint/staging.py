"""Copies in host memory of what a rank saves, made while training goes on.

Parameters and the optimizer's state change in the optimizer's step, and not before: they are copied behind the forward
and backward that come first, and a step that comes too early waits. Everything else is copied at once. What is on disk
is not copied, which would bring all of it to memory: it is written as it is, and a step waits until it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.boxes import Piece
from runtime.disk import is_mapped
from runtime.errors import CheckpointError


class Staging:
    """Copies for one save at a time; the buffers of the save before are used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied = threading.Event()
        self.copied.set()
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._later: list[tuple[Piece, Tensor, int]] = []
        self._as_it_is: list[tuple[Piece, int]] = []
        self._ready: torch.cuda.Event | None = None
        self._hooks: list[Any] = []

    def begin(
        self, moving: Sequence[Piece], still: Sequence[Piece], optimizers: Sequence[torch.optim.Optimizer | None]
    ) -> list[Piece]:
        """The copies: those of ``moving`` are made now, those of ``still`` by :meth:`finish`, before which
        ``optimizers`` do not step. Called when the save before is over."""
        self._release()
        everything = [*moving, *still]
        self._as_it_is = [(p, p.tensor._version) for p in everything if is_mapped(p.tensor)]
        moving, still = ([p for p in given if not is_mapped(p.tensor)] for given in (moving, still))
        used: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for piece in (*moving, *still):
            key = piece.key, piece.offsets
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
            used[key] = buffer
        self._buffers = used
        for piece in moving:
            used[piece.key, piece.offsets].copy_(piece.tensor)
        self._later = [(p, used[p.key, p.offsets], p.tensor._version) for p in still]
        self.copied.clear()
        if self.device.type == "cuda":
            self._ready = torch.cuda.current_stream(self.device).record_event()
        self._hooks = [o.register_step_pre_hook(self._wait) for o in optimizers if o is not None]
        return [
            p if is_mapped(p.tensor) else Piece(p.key, p.shape, p.offsets, used[p.key, p.offsets]) for p in everything
        ]

    def finish(self) -> None:
        """Make the copies that are left; in the thread that writes. Raises :class:`CheckpointError` where something
        changed meanwhile but by the optimizer's step."""
        try:
            with torch.no_grad():
                self._copy()
            changed = [p.key for p, _, version in self._later if p.tensor._version != version]
        finally:
            self._later = []
            if not self._as_it_is:
                self.copied.set()
        self._check(changed)

    def written(self) -> None:
        """What :meth:`begin` gave is written, or will not be. Raises as :meth:`finish` does."""
        changed = [p.key for p, version in self._as_it_is if p.tensor._version != version]
        self._as_it_is = []
        self.copied.set()
        self._check(changed)

    def _check(self, changed: Sequence[str]) -> None:
        if changed:
            raise CheckpointError(
                f"{changed[0]} was changed while it was copied: change parameters by the step of the optimizer that "
                "was given to save(), or call wait_until_copied() on what save() returns before"
            )

    def _copy(self) -> None:
        if self._ready is None:
            for piece, buffer, _ in self._later:
                buffer.copy_(piece.tensor)
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            for piece, buffer, _ in self._later:
                buffer.copy_(piece.tensor, non_blocking=True)
        stream.synchronize()

    def _wait(self, *_: Any) -> None:
        self.copied.wait()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
