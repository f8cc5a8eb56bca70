"""Store results in files that the processes of a machine and later runs share, such as compiled code.

Each file has a checksum. A file that is truncated or changed is noticed when it is read, and its content is created
again. If files cannot be written or locked, everything works without them, after one warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partitioner.runtime.files import find_foreign_access, write_bytes

_log = logging.getLogger(__name__)
_MARK = b"partitioner file 1\n"
_DIGEST = hashlib.sha256().digest_size
_warned: set[str] = set()


class FileCache:
    """A folder of files with checksums, in which the processes of this machine and later runs share data, such as
    compiled code. ``folder``: folder of the files; ``None``: nothing is stored, and nothing is locked.

    The folder is trusted, because data read from it are executed or unpickled. :func:`open_cache` checks who can write
    to it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        """Return the content that is stored under ``name``; ``None`` if there is none. A damaged file is removed with a
        warning, and ``None`` is returned.
        """
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"{path} cannot be read ({error}); its content is made again at each start")
            return None
        content = found[len(_MARK) + _DIGEST :]
        if found[: len(_MARK) + _DIGEST] == _MARK + hashlib.sha256(content).digest():
            return content
        self.discard(name, "it is cut off or was changed")
        return None

    def discard(self, name: str, reason: str) -> None:
        """Remove the content stored under ``name``, because it cannot be used. ``reason``: the reason, for
        the warning.
        """
        if self.folder is not None:
            _log.warning("%s is damaged (%s); its content is made again", self.folder / name, reason)
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                _warn_once(f"{self.folder / name} cannot be removed ({error}); its content is made at each start")

    def write(self, name: str, content: bytes) -> bool:
        """Store ``content`` under ``name``, and return whether this was possible. Other processes see either the whole
        file or no file.
        """
        if self.folder is None:
            return False
        try:
            write_bytes(self.folder / name, _MARK + hashlib.sha256(content).digest() + content, durable=False)
        except OSError as error:
            _warn_once(f"files cannot be kept in {self.folder} ({error}); their content is made again at each start")
            return False
        return True

    @contextmanager
    def hold_lock(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Return a context manager that holds the lock for creating the content of ``name``. Its value is whether this
        process holds the lock. The system releases the lock when the process ends, however it ends.

        ``wait``: whether to wait while another process holds the lock; otherwise the value is then ``False``. If there
        can be no lock, because the cache has no folder or the file system has no locks, the value is ``True``.
        """
        try:
            file = None if self.folder is None else (self.folder / f"{name}.lock").open("w")
        except OSError:  # a full or read-only disk; :meth:`write` will warn
            file = None
        if file is None:
            yield True
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks
                pass
            yield True


def open_cache(folder: Path) -> FileCache:
    """Return the cache in ``folder``, which is created if it is missing. If the folder cannot be created, or if another
    user of this machine can write to it, warn and return a cache that does not store anything.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = find_foreign_access(folder)
    except OSError as error:
        reason = str(error)
    if not reason:
        return FileCache(folder)
    _warn_once(f"{folder} is not used to keep files ({reason}); their content is made again at each start")
    return FileCache(None)


def _warn_once(text: str) -> None:
    """Log the warning ``text``, unless this process has already logged it."""
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)
