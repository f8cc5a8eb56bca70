"""Who writes a part of a checkpoint: a process that others on its host can look for."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STARTED = 19  # of the fields behind the name in a process's stat


def this_process() -> str:
    """What tells this process from all others, on this host and on others; empty where the system does not say."""
    try:
        return f"{_host()} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether ``process``, as :func:`this_process` told it, is known to be no more: one of this host that is gone."""
    try:
        host, pid, started = process.rsplit(" ", 2)
        if host != _host():
            return False
        return _started(int(pid)) != int(started)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def is_here(process: str) -> bool:
    """Whether ``process``, as :func:`this_process` told it, is one of this host, of which its end would be known."""
    try:
        return process.rsplit(" ", 2)[0] == _host()
    except OSError:
        return False


def _host() -> str:
    """This boot of this host, and what its processes are numbered in."""
    return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """When a process began, in ticks since the host did; -1: it has ended, and nobody has asked for its status yet."""
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(rest[_STARTED - 1])
