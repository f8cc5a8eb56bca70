"""A process that has torch loaded and no threads, and forks ranks in milliseconds.

The fork server of ``multiprocessing`` would import the user's main script again in every rank. This one receives a
socket for communication with each rank, and kills all of its ranks when it ends.

The environment variable ``PARTITIONER_PRELOAD`` names further modules, separated by commas, that the server imports
before it forks, so that the ranks need not import them. Importing them must not start threads or use autograd; modules
that are not installed are left out.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from partitioner import runtime

_ROOT = Path(runtime.__path__[0]).absolute().parent.parent  # folder that contains `partitioner`

_PRELOAD = "PARTITIONER_PRELOAD"
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
# Ctrl-C is for the client, which then closes the socket; also while the server imports.
_SERVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from partitioner.runtime.launch.forkserver import serve
serve(int(sys.argv[1]))
"""


class Child(NamedTuple):
    """A forked process that runs a rank. ``pid``: its process ID. ``connection``: the client's side of the connection
    to it.
    """

    pid: int
    connection: Connection

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class ForkServer:
    """The client of a process that has torch loaded and forks ranks in milliseconds. Creating the client starts the
    process.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A library that starts threads when it is imported would leave its locks behind in the fork; and if CUDA itself
        # were used to look for GPUs, as fake tensors do, forks could not use the GPUs.
        quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        quiet["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **quiet, "PYTHONPATH": path},
            )
        self._lock = threading.Lock()
        self._serves = False  # until the first answer the server imports modules, and does not notice a closed socket
        atexit.register(self.close)

    def fork(self, arguments: Mapping[str, Any]) -> Child:
        """Fork a process that calls ``process_pool.serve_rank_requests(connection, **arguments)``. Return its PID and
        this side of the connection. ``arguments``: keyword arguments of that function.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            answer = self._send_request({"op": "fork", "arguments": dict(arguments)}, theirs.fileno())
            return Child(int(answer["pid"]), Connection(ours.detach()))

    def status(self, pid: int) -> int | None:
        """Return the exit status of the forked process ``pid``, negative for a signal; ``None`` while it runs."""
        status: int | None = self._send_request({"op": "status", "pid": pid})["status"]
        return status

    def _send_request(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        """Send ``request`` to the fork server and return its answer, both as JSON data. ``fds``: file descriptors to
        pass to the server. Raise ``RuntimeError`` if the server has ended.
        """
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
            answer = self._socket.recv(1 << 16)
        if not answer:
            raise RuntimeError(f"the fork server has ended (exit status {self.process.poll()})")
        self._serves = True
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End the fork server's process, and thus all processes that it has forked."""
        atexit.unregister(self.close)
        self._socket.close()
        if not self._serves:
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_server: ForkServer | None = None

_server_lock = threading.Lock()


def fork_server() -> ForkServer:
    """Return the client of the single fork server of this process; start the server if it does not run."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive():
            _server = ForkServer()
        return _server


def serve(fd: int) -> None:
    """Run the main loop of the fork server: read requests from the socket ``fd`` (a file descriptor) until the client
    closes its side.
    """
    from partitioner.runtime.launch import process_pool

    process_pool.preload_imports()
    for name in filter(None, os.environ.get(_PRELOAD, "").split(",")):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    requests = socket.socket(fileno=fd)
    statuses: dict[int, int] = {}
    running: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not message:
            break
        request = json.loads(message)
        _reap_children(running, statuses)
        if request["op"] == "status":
            answer: dict[str, Any] = {"status": statuses.get(request["pid"])}
        else:
            pid = os.fork()
            if pid == 0:
                requests.close()
                ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                try:
                    process_pool.serve_rank_requests(Connection(fds[0]), **request["arguments"])
                finally:
                    os._exit(1)
            os.close(fds[0])
            running.add(pid)
            answer = {"pid": pid}
        with contextlib.suppress(BrokenPipeError):  # the client was interrupted; the next read ends the loop
            requests.send(json.dumps(answer).encode())
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _reap_children(running: set[int], statuses: dict[int, int]) -> None:
    """Move the processes that have ended from ``running`` (PIDs) to ``statuses`` (PID -> exit status)."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            statuses[pid] = os.waitstatus_to_exitcode(status)
