"""Files that are complete or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Write ``content`` to ``path``; a reader sees the old file or the new one, never a part.

    ``durable``: also after the machine has lost power.
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
    """As :func:`write_bytes`, in UTF-8."""
    return write_bytes(path, content.encode(), durable=durable)


def sync_folder(path: Path) -> None:
    """Make the names in a folder last; a no-op where folders cannot be synced."""
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
