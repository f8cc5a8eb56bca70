"""Write files atomically: under a temporary name first, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Write ``content`` to the file ``path``, and return ``path``. Other processes see the old or the new file, never a
    part.

    ``durable``: flush the file to disk, so that this also holds after a loss of power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # its folder may be what has gone
        raise
    return path


def write_text(path: Path, content: str, *, durable: bool = True) -> Path:
    """Write ``content`` in UTF-8 to the file ``path``, and return ``path``. Other processes see the old or the new
    file, never a part.

    ``durable``: flush the file to disk, so that this also holds after a loss of power.
    """
    return write_bytes(path, content.encode(), durable=durable)


def sync_folder(path: Path) -> None:
    """Flush the list of files of the folder ``path`` to disk. Do nothing if the system cannot flush folders."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
