"""Copy the status files of ranks (progress and failures) between hosts, and find the ranks at network addresses.

The status files of each host are copied to the other hosts through the key-value store of the rendezvous. One rank of
every host does this in a thread, because a rank that has lost the host of the store blocks until TCP times out.

:func:`find_named_ranks` finds the ranks at the other end of a connection, because errors of Gloo contain only an
address and a port.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from partitioner.runtime.files import write_bytes

_KINDS = ("times", "json", "place", "failure", "addresses")

_CAUSE = "cause"
_INTERVAL_S = 1.0


class KeyValueStore(Protocol):
    """Interface of a ``torch.distributed.Store`` for copying files between hosts."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Mirror:
    """Exchanges the status files of ranks (progress and failures) between hosts: sends the files of this host's ranks
    to all other hosts, and writes the files of other hosts' ranks to ``folder``, which also has the files of this host.

    Args:
        store: a store client that nothing else uses, because a client that waits for a key is blocked.
        host: index of this host among ``num_hosts``.
        ranks: the ranks on this host.
    """

    def __init__(self, folder: Path, store: KeyValueStore, host: int, num_hosts: int, ranks: frozenset[int]) -> None:
        self.folder = folder
        self.store = store
        self.host = host
        self.others = [h for h in range(num_hosts) if h != host]
        self.ranks = ranks

        self._wanted = threading.Event()
        self._done = threading.Condition()
        self._begun = self._ended = 0  # numbers of exchanges
        self._closed = False
        self._thread: threading.Thread | None = None

    def exchange(self, within_s: float = _INTERVAL_S) -> None:
        """Send the status files (progress and failures) of this host's ranks to the other hosts, and receive those of
        the other hosts' ranks; wait for at most ``within_s`` seconds. The first call starts a thread that repeats the
        exchange every second.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_exchange_loop, name="mirror", daemon=True)
            self._thread.start()
        with self._done:
            next_one = self._begun + 1
            self._wanted.set()
            self._done.wait_for(lambda: self._ended >= next_one, within_s)

    def close(self) -> None:
        """Stop exchanging the status files of ranks (progress and failures) with other hosts."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(_INTERVAL_S)

    def _run_exchange_loop(self) -> None:
        """Exchange the status files of ranks (progress and failures) with other hosts every second, or at once on
        request, until the mirror is closed. This runs in a thread.
        """
        while not self._closed:
            with self._done:
                self._begun += 1
            self._exchange_files()
            with self._done:
                self._ended = self._begun
                self._done.notify_all()
            self._wanted.wait(_INTERVAL_S)
            self._wanted.clear()

    def _exchange_files(self) -> None:
        """Write the status files (progress and failures) of this host's ranks to the key-value store that all hosts
        share, and copy those of the other hosts from the store to this host's folder. Errors are ignored.
        """
        with contextlib.suppress(RuntimeError, OSError):  # the host of the store may have failed
            own_addresses = {
                name: base64.b64encode(content).decode() for name, content in self._read_own_files().items()
            }
            self.store.set(_format_host_key(self.host), json.dumps(own_addresses))
            for other in self.others:
                if self.store.check([_format_host_key(other)]):
                    self._write_received_files(json.loads(self.store.get(_format_host_key(other))))

    def _read_own_files(self) -> dict[str, bytes]:
        """Return the status files of this host's ranks (progress, failures, and the cause why training has ended), as a
        dict: file name -> contents. Files that do not exist are left out.
        """
        names = [f"rank-{rank}.{kind}" for rank in self.ranks for kind in _KINDS]
        found = {}
        for name in [*names, _CAUSE]:
            with contextlib.suppress(FileNotFoundError):
                found[name] = (self.folder / name).read_bytes()
        return found

    def _write_received_files(self, files: dict[str, str]) -> None:
        """Write the status files (progress and failures) of another host's ranks to this host's folder of status files.
        ``files``: file name -> contents in base64.
        """
        for name in sorted(files, key=lambda n: n.endswith(".times")):  # last, because readers look for this file
            if name == _CAUSE and (self.folder / name).exists():
                continue
            write_bytes(self.folder / name, base64.b64decode(files[name]), durable=False)


def _format_host_key(host: int) -> str:
    return f"watch {host}"


_ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\]:(\d+)")


def list_own_addresses() -> list[str]:
    """Return the local addresses of this process's TCP connections, such as ``127.0.0.1:4000``, sorted; empty if they
    are unknown.
    """
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                        found.append(_format_address(*end.getsockname()[:2]))
    return sorted(set(found))


def find_named_ranks(
    error: str, addresses: Mapping[int, Sequence[str]], own_addresses: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the ranks that the error text ``error`` names by a network address. If the text has none of the known
    addresses, return all ranks whose host it names, except the ranks on this rank's host, because ``addresses`` lacks
    connections that were opened later.

    ``addresses``: rank -> its addresses, such as ``10.0.0.1:4000``. ``own_addresses``: the addresses of this rank; if
    empty, only exact addresses are searched.
    """
    found = [(host, int(port)) for host, port in _ADDRESS.findall(error)]
    # Gloo prints ports in network byte order (torch 2.13).
    named = {_format_address(host, p) for host, port in found for p in (port, (port & 0xFF) << 8 | port >> 8)}
    exactly = tuple(rank for rank, ends in addresses.items() if named.intersection(ends))
    if exactly or not own_addresses:
        return exactly
    hosts = {_parse_host(end) for end in named} - {
        _parse_host(end) for end in own_addresses
    }  # connections that were opened later are not in ``addresses``
    return tuple(rank for rank, ends in addresses.items() if hosts.intersection(map(_parse_host, ends)))


def _parse_host(end: str) -> str:
    return end.rpartition(":")[0]


def _format_address(host: str, port: int | str) -> str:
    return f"{host.removeprefix('::ffff:')}:{port}"
