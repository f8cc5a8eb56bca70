"""Which rank is at the other end of a connection: Gloo's errors give an address and a port."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Mapping, Sequence

_ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\]:(\d+)")


def own_addresses() -> list[str]:
    """This process's ends of its TCP connections, as ``127.0.0.1:4000``; nothing where the system does not tell."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                        found.append(_text(*end.getsockname()[:2]))
    return sorted(set(found))


def ranks_named(error: str, addresses: Mapping[int, Sequence[str]], own: Sequence[str] = ()) -> tuple[int, ...]:
    """The ranks whose addresses are in ``error``; of another host than ``own`` is on, whose ports nobody knows, all."""
    found = [(host, int(port)) for host, port in _ADDRESS.findall(error)]
    # Gloo prints ports in network byte order (torch 2.13).
    named = {_text(host, p) for host, port in found for p in (port, (port & 0xFF) << 8 | port >> 8)}
    exactly = tuple(rank for rank, ends in addresses.items() if named.intersection(ends))
    if exactly or not own:
        return exactly
    hosts = {_host(end) for end in named} - {_host(end) for end in own}  # what was connected later is not noted
    return tuple(rank for rank, ends in addresses.items() if hosts.intersection(map(_host, ends)))


def _host(end: str) -> str:
    return end.rpartition(":")[0]


def _text(host: str, port: int | str) -> str:
    return f"{host.removeprefix('::ffff:')}:{port}"
