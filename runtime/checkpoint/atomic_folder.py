"""A folder that many ranks write over a shared file system, and that is either complete or absent.

Every rank writes into ``.name.TOKEN.partial``, and then a record of what it wrote. The first rank waits for all
records, writes the manifest, and renames the folder. A rank that fails leaves ``.name.TOKEN.failed``, with the reason.
The ranks do not communicate meanwhile, so training may. If the folder existed, the files of its checkpoint are
replaced; other files in it stay.

Records name the process that writes, so that other processes on its host can see whether it still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.files import sync_folder, write_text

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_STARTED = 19  # of the fields behind the name in a process's stat


def this_process() -> str:
    """What tells this process from all others, on this host and on others; empty where the system does not say."""
    try:
        return f"{_identify_host()} {os.getpid()} {_read_start_ticks(os.getpid())}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether ``process``, as :func:`this_process` told it, is known to be no more: one of this host that is gone."""
    try:
        host, pid, started = process.rsplit(" ", 2)
        if host != _identify_host():
            return False
        return _read_start_ticks(int(pid)) != int(started)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def is_here(process: str) -> bool:
    """Whether ``process``, as :func:`this_process` told it, is one of this host, of which its end would be known."""
    try:
        return process.rsplit(" ", 2)[0] == _identify_host()
    except OSError:
        return False


def _identify_host() -> str:
    """This boot of this host, and what its processes are numbered in."""
    return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _read_start_ticks(pid: int) -> int:
    """When a process began, in ticks since the host did; -1: it has ended, and nobody has asked for its status yet."""
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(rest[_STARTED - 1])


MANIFEST = "manifest.json"

OWN = r"manifest\.json|training\.pt|\.metadata|__\d+_\d+\.distcp"  # the files of a checkpoint
_LEFT = re.compile(r"[0-9a-f]{15}\.(partial|failed)|old|(.*\.)?deleted")  # behind ``.name.``: not ``.name.v2.old``
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.25
_QUIET_S = 10.0  # after which nobody writes on, of whom nothing else is known
_LOOK_S = 2.0  # between two looks at who writes


@dataclass(frozen=True)
class CheckpointTarget:
    """Where a checkpoint goes; ``token`` is its own, so that nothing that an earlier attempt left is taken for it.

    ``own``: the names of what is written and replaced, as a regular expression.
    """

    final: Path
    token: str
    own: str = OWN

    @property
    def partial(self) -> Path:
        return self.final.with_name(f".{self.final.name}.{self.token}.partial")

    @property
    def failed(self) -> Path:
        return self.final.with_name(f".{self.final.name}.{self.token}.failed")

    @property
    def old(self) -> Path:
        """Where what ``final`` replaces is, for the moment between two renames."""
        return self.final.with_name(f".{self.final.name}.old")

    @property
    def is_complete(self) -> bool:
        return read_manifest(self.final).get("token") == self.token

    def record(self, rank: int) -> Path:
        return self.partial / f".record-{rank}"

    def writer(self, rank: int) -> Path:
        return self.partial / f".writer-{rank}"

    def begin(self, rank: int) -> None:
        """Say who writes the part of ``rank``."""
        self.partial.mkdir(parents=True, exist_ok=True)
        self.writer(rank).write_text(this_process())  # lost with the host, and of no use then

    def fail(self, rank: int, error: BaseException) -> None:
        """Tell the others. On a full disk this may be impossible; then they wait in vain, and say so."""
        with contextlib.suppress(OSError):
            write_text(self.failed, f"rank {rank}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise :class:`CheckpointError` if a rank has failed."""
        if self.failed.exists():
            with contextlib.suppress(OSError):
                told = self.failed.read_text()
                raise CheckpointError.of_another(f"the checkpoint {self.final} was not written: {told}")

    def wait_for_records(self, world_size: int, timeout: float) -> list[Path]:
        """The records of all ranks. Raises :class:`CheckpointError` where one failed or did not come in time."""
        records = [self.record(rank) for rank in range(world_size)]
        missing, next_look = list(records), time.monotonic() + _LOOK_S
        for _ in _poll_with_backoff(timeout):
            self.check()
            gone = list[Path]()
            if time.monotonic() >= next_look:  # less often than at the records: there may be thousands
                gone = [r for r in missing if self._is_gone(r)]
                next_look = time.monotonic() + _LOOK_S
            missing = [r for r in missing if not r.exists()]
            if not missing:
                return records
            for record in set(gone) & set(missing):  # which was not the last thing that it did
                raise CheckpointError(
                    f"the checkpoint {self.final} was not written: the process of rank "
                    f"{record.name.removeprefix('.record-')} ended while it wrote its part"
                )
        late = ", ".join(r.name.removeprefix(".record-") for r in missing[:8])
        raise CheckpointError(
            f"the checkpoint {self.final} was not written: rank {late} did not write its part within {timeout:g} s; "
            "all ranks must see the same file system"
        )

    def _is_gone(self, record: Path) -> bool:
        """Whether who is to leave ``record`` has ended, as far as can be known."""
        with contextlib.suppress(OSError):
            return has_ended(self.writer(int(record.name.removeprefix(".record-"))).read_text())
        return False

    def wait_until_complete(self, timeout: float) -> None:
        """Raises :class:`CheckpointError` where a rank failed, or the first one did not finish in time.

        A script that has ended waits no more: its part is written, and the first rank may be one that was killed.
        """
        for _ in _poll_with_backoff(timeout):
            if self.is_complete or not threading.main_thread().is_alive():
                return
            self.check()
        raise CheckpointError(f"the checkpoint {self.final} was not completed by the first rank within {timeout:g} s")

    def commit(self) -> None:
        """Put the folder in its place, down to the disk; what was there is replaced."""
        sync_folder(self.partial)
        if self.final.exists():
            remove_path_atomically(self.old)
            os.rename(self.final, self.old)
        os.rename(self.partial, self.final)
        self._keep_others()
        sync_folder(self.final.parent)
        remove_path_atomically(self.old)

    def _keep_others(self) -> None:
        """Move what somebody else has put into the folder that was replaced to the one in its place."""
        if self.old.is_dir() and self.final.is_dir():
            for path in self.old.iterdir():
                if not re.fullmatch(self.own, path.name) and not (self.final / path.name).exists():
                    os.rename(path, self.final / path.name)

    def check_place(self) -> None:
        """Raise :class:`CheckpointError` where no folder can take this place."""
        if self.final.exists() and not self.final.is_dir():
            raise CheckpointError(f"{self.final} is a file: name a folder")
        if Path.cwd().is_relative_to(self.final) or os.path.ismount(self.final):
            what = "a mount point" if os.path.ismount(self.final) else "the current folder, or holds it"
            raise CheckpointError(f"{self.final} is {what}, which cannot be replaced: name a folder in it")

    def clean(self) -> None:
        """Remove what attempts that were cut short left beside ``final``; called by one rank before any writes."""
        self.check_place()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        restore_replaced_checkpoint(self.final)
        self._keep_others()
        prefix = f".{self.final.name}."
        for path in self.final.parent.glob(f"{prefix}*"):
            if _LEFT.fullmatch(path.name.removeprefix(prefix)) and self.token not in path.name:
                remove_path_atomically(path)


def restore_replaced_checkpoint(final: Path) -> None:
    """Restore the checkpoint that an interrupted save had moved aside to replace it. All ranks may call it."""
    if not final.exists():
        with contextlib.suppress(FileNotFoundError):  # there is nothing to put back, or another rank has done it
            os.rename(CheckpointTarget(final, "").old, final)


def wait_for_writers(directory: Path, timeout: float) -> None:
    """Wait until no process writes the checkpoint ``directory``, or a checkpoint inside it.

    Partial folders of processes that have ended are ignored. For a writer on another host, whose process cannot be
    checked, a partial folder is ignored once it has not changed for a while. Raises :class:`CheckpointError` after
    ``timeout`` seconds.
    """
    changed: dict[Path, tuple[int, float]] = {}  # folder -> (hash of its contents, time of the last change)
    writing: list[Path] = []
    for _ in _poll_with_backoff(timeout):
        found = [*directory.parent.glob(f".{directory.name}.*.partial"), *directory.glob(".*.partial")]
        writing = [folder for folder in found if _is_written(folder, changed)]
        if not writing:
            return
    raise CheckpointError(f"{directory} cannot be loaded: {writing[0]} has been written there for {timeout:g} s")


def _is_written(folder: Path, changed: dict[Path, tuple[int, float]]) -> bool:
    """Whether the first rank, which completes it, writes a folder, as far as can be known."""
    if folder.with_suffix(".failed").exists():
        return False
    try:
        looks = hash(tuple(sorted((p.name, p.stat().st_size) for p in folder.iterdir())))
        first = folder / ".writer-0"
        writer = first.read_text() if first.exists() else ""
    except OSError:  # it is complete, or removed
        return folder.exists()
    if has_ended(writer):
        return False
    now = time.monotonic()
    seen, since = changed.get(folder, (None, now))
    changed[folder] = looks, since if seen == looks else now
    return is_here(writer) or now - changed[folder][1] < _QUIET_S


def remove_path_atomically(path: Path) -> None:
    """Remove a file, or a folder so that no part of it is ever taken for a whole one."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    away = path.with_name(f".{path.name.lstrip('.')}.deleted")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(path, away)
    shutil.rmtree(away, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest; empty where there is none that can be read."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _poll_with_backoff(timeout: float) -> Iterator[None]:
    """Moments to look at the disk, ever further apart, until ``timeout`` seconds are over."""
    end, pause = time.monotonic() + timeout, _FIRST_WAIT_S
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(_LONGEST_WAIT_S, pause * 1.5)
