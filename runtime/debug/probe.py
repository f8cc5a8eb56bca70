"""Every operator that a step runs, as it runs: which instruction and graph node it belongs to, what goes in and out.

Works from outside: a dispatch mode sees the operators, the stack says whose they are. A step without a probe is as it
was. Collectives work below the dispatcher: their results are first seen where they are read. What communication does
with its buffers, which start with whatever was in memory, is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import backends, threads, transfers
from runtime.engine import Engine
from runtime.execute import Executor
from runtime.failures import instruction_text
from runtime.watch.place import Place, place_of, stack


@dataclass(frozen=True)
class Operation:
    """One operator. ``inputs`` and ``outputs`` are its tensors; ``scalars`` what else it was given."""

    rank: int
    step: int
    index: int  # of the instruction
    instruction: str
    operator: str
    place: Callable[[], Place]  # looked up where it is asked for, while the operator runs
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    scalars: Sequence[Any]


_BUFFERS = tuple(module.__file__ for module in (backends, threads, transfers))
_PYTORCH = os.path.dirname(torch.__file__)


class _Probe(TorchDispatchMode):
    def __init__(self, engine: Engine, see: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executor: Executor = engine._executor
        self.engine = engine
        self.see = see
        self.index = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        frame = sys._getframe(1)
        if _is_buffer(frame, func):
            return result
        given = pytree.tree_leaves((args, kwargs))
        operation = Operation(
            rank=self.engine.communicator.rank,
            step=self.engine.steps + 1,
            index=self.index,
            instruction=instruction_text(self.executor.rank, self.index),
            operator=str(func),
            place=lambda: place_of(stack(frame), self.executor),
            inputs=[x for x in given if isinstance(x, Tensor)],
            outputs=[x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)],
            scalars=[x for x in given if not isinstance(x, Tensor)],
        )
        self.see(operation)
        return result


def _is_buffer(frame: FrameType | None, func: Any) -> bool:
    """Whether an operator works on memory that is yet to be filled."""
    if "empty" in str(func):
        return True
    while frame is not None and frame.f_code.co_filename.startswith(_PYTORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _BUFFERS


@contextmanager
def probed(engine: Engine, see: Callable[[Operation], None]) -> Iterator[None]:
    """Tell ``see`` of every operator of the steps of ``engine`` in the block."""
    executor = engine._executor
    plain = list(executor.actions)
    probe = _Probe(engine, see)

    def within(index: int, action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            probe.index = index
            with probe:
                action()

        return run

    executor.actions[:] = [(index, within(index, action)) for index, action in plain]
    try:
        yield
    finally:
        executor.actions[:] = plain
