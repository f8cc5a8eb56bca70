"""What a process of the zoo runs; nothing of the project is loaded before."""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection


def child(name: str, meshes: list[tuple[int, int, int]], connection: Connection) -> None:
    """Examine one architecture; what breaks the examination itself is its result."""
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    try:
        from benchmarks.zoo_worker import examine

        examine(name, meshes, connection)
    except BaseException:
        reason = traceback.format_exc().strip().splitlines()
        for mesh in meshes:
            connection.send(dict(name=name, mesh=list(mesh), seconds=0.0, status="crashed", reason=reason[-1][:300]))
