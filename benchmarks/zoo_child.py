"""What a process of the zoo runs; nothing of the project is loaded before."""

from __future__ import annotations

import os
import resource
import traceback
from multiprocessing.connection import Connection


def child(name: str, meshes: list[tuple[int, int, int]], connection: Connection, most_s: int) -> None:
    """Examine one architecture; what breaks the examination itself is its result.

    The process ends itself (SIGXCPU) after ``most_s`` processor seconds for one mesh.
    """
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    try:
        from benchmarks.zoo_worker import results

        _allow(most_s)
        for result in results(name, meshes):
            connection.send(result)
            _allow(most_s)
        connection.send(None)
    except BaseException:
        reason = traceback.format_exc().strip().splitlines()
        for mesh in meshes:
            connection.send(dict(name=name, mesh=list(mesh), seconds=0.0, status="crashed", reason=reason[-1][:300]))


def _allow(more_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + more_s, hard))
