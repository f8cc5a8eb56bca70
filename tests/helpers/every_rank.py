"""A function run on every rank of a program, each rank a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from partitioner.runtime.comm.thread_backend import ThreadCommunicator, ThreadWorld
from partitioner.runtime.program.program import Program


def on_every_rank(program: Program, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """The results of ``work(communicator)`` by rank. Raises the first error of a rank, which releases the others."""
    world = ThreadWorld(program.world_size, timeout=20)
    results: list[Any] = [None] * program.world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(world.communicator(rank))
        except BaseException as error:
            errors.append(error)
            world.abort(str(error))

    threads = [threading.Thread(target=run, args=(r,)) for r in range(program.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
