"""Write a folder from many ranks over a shared file system so that it is either complete or absent.

Every rank writes its files into ``.name.TOKEN.partial``, and then a record of what it wrote. Rank 0 waits for the
records of all ranks, writes the manifest, and renames the folder to ``name``. A rank that fails writes the reason to
``.name.TOKEN.failed``. The ranks do not communicate during this time, so training can continue. If the folder existed
before, the files of its old checkpoint are replaced; other files in it are kept.

Each rank also writes the identity of its process, so that other processes on its host can check whether it still runs.
"""

from __future__ import annotations

import contextlib
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
from partitioner.runtime.files import parse_json, sync_folder, write_text

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_STARTED = 19  # number of the start time among the fields after the name in /proc/PID/stat


def identify_process() -> str:
    """Return a text that identifies this process among all processes of all hosts; empty if the system does not allow
    it. The text has the boot ID of the host, the PID namespace, and the process ID and start time.
    """
    try:
        return f"{_identify_host()} {os.getpid()} {_read_start_ticks(os.getpid())}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Return whether ``process``, a text from :func:`identify_process`, names a process of this host that has certainly
    ended. Return ``False`` if the process still runs, if it is on another host, or if its state cannot be determined.
    """
    try:
        host, pid, started = process.rsplit(" ", 2)
        if host != _identify_host():
            return False
        return _read_start_ticks(int(pid)) != int(started)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def is_on_this_host(process: str) -> bool:
    """Return whether ``process``, a text from :func:`identify_process`, names a process of this host, so that
    :func:`has_ended` can detect its end.
    """
    try:
        return process.rsplit(" ", 2)[0] == _identify_host()
    except OSError:
        return False


def _identify_host() -> str:
    """Return a text that identifies the current boot of this host and the PID namespace of this process. Equal PIDs
    under different texts are different processes.
    """
    return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _read_start_ticks(pid: int) -> int:
    """Return the start time of process ``pid`` in clock ticks since the host booted. Return -1 if the process has ended
    and its parent has not yet collected its exit status (a zombie).
    """
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if state in "ZX" else int(rest[_STARTED - 1])


MANIFEST = "manifest.json"

OWN = r"manifest\.json|training\.pt|\.metadata|__\d+_\d+\.distcp"  # the files of a checkpoint
_LEFTOVER_NAMES = re.compile(
    r"[0-9a-f]{15}\.(partial|failed)|old|(.*\.)?deleted"
)  # what follows ``.name.``; does not match ``.name.v2.old``
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.25
_SILENCE_S = 10.0  # without a change for this time, a folder of an unknown process counts as abandoned
_POLL_S = 2.0  # between two checks whether the writing processes still run


@dataclass(frozen=True)
class CheckpointTarget:
    """The paths of a checkpoint that is being written, and the operations by which ranks write and complete it.

    Args:
        final: the path of the complete checkpoint.
        token: text in the names of all temporary files of this save, equal on all ranks. It distinguishes them from
            files of an earlier, interrupted save.
        own: a regular expression of the file names that belong to a checkpoint. If an existing checkpoint is replaced,
            its other files are moved to the new one.
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
        """Return the path to which an existing checkpoint at ``final`` is renamed while the new one takes its place."""
        return self.final.with_name(f".{self.final.name}.old")

    @property
    def is_complete(self) -> bool:
        return read_manifest(self.final).get("token") == self.token

    def get_record_path(self, rank: int) -> Path:
        return self.partial / f".record-{rank}"

    def get_writer_path(self, rank: int) -> Path:
        return self.partial / f".writer-{rank}"

    def begin(self, rank: int) -> None:
        """Create the folder for the unfinished files of this checkpoint, and record in it that this process writes the
        part of ``rank``.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        self.get_writer_path(rank).write_text(identify_process())  # not flushed: useless if the host fails

    def fail(self, rank: int, error: BaseException) -> None:
        """Write ``error``, with which ``rank`` has failed, to the file :attr:`failed`, which the other ranks look for.
        If the file cannot be written, for example on a full disk, the other ranks notice only when their wait times
        out.
        """
        with contextlib.suppress(OSError):
            write_text(self.failed, f"rank {rank}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise :class:`CheckpointError` if any rank has reported a failure in the file :attr:`failed`."""
        if self.failed.exists():
            with contextlib.suppress(OSError):
                told = self.failed.read_text()
                raise CheckpointError.from_other_rank(f"the checkpoint {self.final} was not written: {told}")

    def wait_for_records(self, world_size: int, timeout: float) -> list[Path]:
        """Wait until all ranks have written their parts of the checkpoint. Return the paths of the files in which they
        confirm this, in rank order. Raise :class:`CheckpointError` if a rank reports a failure, if the process of a
        rank on this host ends before it has written its part, or after ``timeout`` seconds. ``world_size``: number of
        ranks.
        """
        records = [self.get_record_path(rank) for rank in range(world_size)]
        missing, next_look = list(records), time.monotonic() + _POLL_S
        for _ in _poll_with_backoff(timeout):
            self.check()
            gone = list[Path]()
            if (
                time.monotonic() >= next_look
            ):  # less often than the records are checked: there may be thousands of processes
                gone = [r for r in missing if self._is_gone(r)]
                next_look = time.monotonic() + _POLL_S
            missing = [r for r in missing if not r.exists()]
            if not missing:
                return records
            for record in set(gone) & set(missing):  # the process did not end after writing its record
                raise CheckpointError(
                    f"the checkpoint {self.final} was not written: the process of rank "
                    f"{record.name.removeprefix('.record-')} ended while it wrote its part"
                )
        late = ", ".join(r.name.removeprefix(".record-") for r in missing[:8])
        raise CheckpointError(
            f"the checkpoint {self.final} was not written: rank {late} did not write its part within {timeout:g} s; "
            "check that this rank runs, and that all ranks use the same file system"
        )

    def _is_gone(self, record: Path) -> bool:
        """Return whether the process that has to write the file ``record`` has certainly ended. A rank writes this file
        to confirm that its part of the checkpoint is complete.
        """
        with contextlib.suppress(OSError):
            return has_ended(self.get_writer_path(int(record.name.removeprefix(".record-"))).read_text())
        return False

    def wait_until_complete(self, timeout: float) -> None:
        """Wait until rank 0 has renamed the folder of unfinished files to the final name of the checkpoint. Raise
        :class:`CheckpointError` if a rank reports a failure, or after ``timeout`` seconds. If the main thread of this
        process has ended, return without waiting: this rank has written its part, and rank 0 may never complete the
        checkpoint.
        """
        for _ in _poll_with_backoff(timeout):
            if self.is_complete or not threading.main_thread().is_alive():
                return
            self.check()
        raise CheckpointError(f"the checkpoint {self.final} was not completed by the first rank within {timeout:g} s")

    def commit(self) -> None:
        """Rename the folder of unfinished files to ``final``, and flush the change to disk. An existing checkpoint is
        replaced.
        """
        sync_folder(self.partial)
        if self.final.exists():
            remove_path_atomically(self.old)
            os.rename(self.final, self.old)
        os.rename(self.partial, self.final)
        self._move_foreign_files()
        sync_folder(self.final.parent)
        remove_path_atomically(self.old)

    def _move_foreign_files(self) -> None:
        """Move files that do not belong to a checkpoint, such as the user's notes, from the folder of the replaced
        checkpoint into the new one. A file whose name exists in the new folder is not moved.
        """
        if self.old.is_dir() and self.final.is_dir():
            for path in self.old.iterdir():
                if not re.fullmatch(self.own, path.name) and not (self.final / path.name).exists():
                    os.rename(path, self.final / path.name)

    def check_place(self) -> None:
        """Raise :class:`CheckpointError` if ``final`` cannot be replaced: it is a file, a mount point, or contains the
        current folder.
        """
        if self.final.exists() and not self.final.is_dir():
            raise CheckpointError(f"{self.final} is a file: name a folder")
        if Path.cwd().is_relative_to(self.final) or os.path.ismount(self.final):
            what = "a mount point" if os.path.ismount(self.final) else "the current folder, or holds it"
            raise CheckpointError(f"{self.final} is {what}, which cannot be replaced: name a folder in it")

    def clean(self) -> None:
        """Prepare the save of a checkpoint to ``final``: remove the unfinished folders and error files beside it that
        interrupted saves left. If such a save had renamed a complete checkpoint away from ``final``, rename it back.
        One rank calls this before any rank writes. Raise :class:`CheckpointError` if ``final`` cannot be replaced.
        """
        self.check_place()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        restore_replaced_checkpoint(self.final)
        self._move_foreign_files()
        prefix = f".{self.final.name}."
        for path in self.final.parent.glob(f"{prefix}*"):
            if _LEFTOVER_NAMES.fullmatch(path.name.removeprefix(prefix)) and self.token not in path.name:
                remove_path_atomically(path)


def restore_replaced_checkpoint(final: Path) -> None:
    """Rename a checkpoint that an interrupted save had moved aside back to ``final``, unless ``final`` exists. Several
    ranks may call this at the same time.
    """
    if not final.exists():
        with contextlib.suppress(FileNotFoundError):  # there is nothing to put back, or another rank has done it
            os.rename(CheckpointTarget(final, "").old, final)


def wait_for_writers(directory: Path, timeout: float) -> None:
    """Wait until no process writes the checkpoint ``directory``, or a checkpoint inside it. Unfinished folders of
    processes that have ended are ignored. If the writer is on another host, where its process cannot be checked, an
    unfinished folder is ignored once it has not changed for 10 seconds. Raise :class:`CheckpointError` after
    ``timeout`` seconds.
    """
    changed: dict[Path, tuple[int, float]] = {}  # folder -> (hash of its contents, time of the last change)
    writing: list[Path] = []
    for _ in _poll_with_backoff(timeout):
        found = [*directory.parent.glob(f".{directory.name}.*.partial"), *directory.glob(".*.partial")]
        writing = [folder for folder in found if _is_being_written(folder, changed)]
        if not writing:
            return
    raise CheckpointError(f"{directory} cannot be loaded: {writing[0]} has been written there for {timeout:g} s")


def _is_being_written(folder: Path, changed: dict[Path, tuple[int, float]]) -> bool:
    """Return whether some process is still writing the unfinished checkpoint ``folder``. Rank 0 completes a checkpoint,
    so only its process is checked. If that process is on another host, the folder counts as being written until it has
    not changed for 10 seconds. ``changed``: folder -> (hash of its last seen contents, time of the last change in
    seconds); updated here.
    """
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
    return is_on_this_host(writer) or now - changed[folder][1] < _SILENCE_S


def remove_path_atomically(path: Path) -> None:
    """Remove the file or folder ``path``. A folder is renamed first, so that a half-removed folder is never taken for a
    complete one.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    away = path.with_name(f".{path.name.lstrip('.')}.deleted")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(path, away)
    shutil.rmtree(away, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of the file ``manifest.json`` in ``folder``; an empty dict if the file does not exist or is
    not valid JSON.
    """
    try:
        content = parse_json((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _poll_with_backoff(timeout: float) -> Iterator[None]:
    """Yield repeatedly for ``timeout`` seconds, with pauses that grow from 2 ms to 0.25 s. The caller checks a
    condition each time.
    """
    end, pause = time.monotonic() + timeout, _FIRST_WAIT_S
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(_LONGEST_WAIT_S, pause * 1.5)
