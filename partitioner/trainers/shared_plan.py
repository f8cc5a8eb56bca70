"""Make a plan on the first rank and send it to the others, without an effect on random numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partitioner.plan import Plan
from partitioner.runtime.checkpoint.training_state import random_state, set_random_state
from partitioner.trainers.arguments import TrainerError


def share_plan(search: Callable[[], Plan], rank: int, world_size: int, extra: Callable[[], Any] = lambda: None) -> Any:
    """Return (plan, further data): ``search`` and then ``extra`` are called on the first rank, and their results sent
    to the others. All ranks call this.

    ``extra``: returns data that can be pickled. Raise the error of the first rank if there is none, on the other ranks
    as a :class:`TrainerError`.
    """
    told: list[Any] = [None]
    error: Exception | None = None
    with keep_generators(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        if rank == 0:
            try:
                told[0] = search().save(path).read_text(), extra(), ""
            except Exception as failed:  # the other ranks wait
                error, told[0] = failed, ("", None, f"{type(failed).__name__}: {failed}")
        if world_size > 1:
            dist.broadcast_object_list(told)
        text, further, fault = told[0]
        if error is not None:
            raise error
        if fault:
            raise TrainerError(f"planning failed on the first rank: {fault}")
        path.write_text(text)
        return Plan.load(path), further


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after the ``with`` block."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
