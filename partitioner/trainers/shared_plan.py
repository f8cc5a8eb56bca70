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
from partitioner.runtime.checkpoint.training_state import collect_random_state, set_random_state
from partitioner.trainers.arguments import TrainerError


def share_plan(search: Callable[[], Plan], rank: int, world_size: int, extra: Callable[[], Any] = lambda: None) -> Any:
    """Return a pair (plan, further data), equal on all ranks. The first rank calls ``search``, which returns a plan,
    and then ``extra``, which returns data that can be pickled; their results are sent to the other ranks. All ranks
    must call this. ``rank``: number of this rank. ``world_size``: number of ranks.

    If ``search`` or ``extra`` fails, the first rank raises its error, and the others raise :class:`TrainerError` with
    the text of this error.
    """
    told: list[Any] = [None]
    error: Exception | None = None
    with keep_generators(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        if rank == 0:
            try:
                told[0] = search().save(path).read_text(), extra(), ""
            except Exception as failed:  # the other ranks wait for a message
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
    """Return a context manager at whose end the random generators of Python, NumPy and torch get back the states that
    they had at its start."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    before = collect_random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
