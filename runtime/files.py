"""Write files atomically: first under a temporary name, then renamed. Parse untrusted JSON. Check file names and access
to folders."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Write ``content`` to the file ``path``, and return ``path``. Other processes see the old or the new file, never a
    part. ``durable``: whether to flush the file to disk, so that this also holds after a power failure.
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
        Path(temporary).unlink(missing_ok=True)  # its folder may have been removed
        raise
    return path


def write_text(path: Path, content: str, *, durable: bool = True) -> Path:
    """Write ``content`` in UTF-8 to the file ``path``, and return ``path``. Other processes see the old or the new
    file, never a part. ``durable``: whether to flush the file to disk, so that this also holds after a power failure.
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


def parse_json(text: str) -> Any:
    """Return the data of the JSON text ``text``. Raise ``ValueError`` if it is malformed, nested too deeply, or has the
    same key twice in an object, because parsers treat such keys differently.
    """
    try:
        return json.loads(text, object_pairs_hook=_build_unique_dict)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return found


def is_file_name(name: Any) -> bool:
    """Return whether ``name`` is a plain file name, which cannot leave the folder with which it is joined: a non-empty
    text that is not ``.`` or ``..`` and contains no slash, backslash or null character.
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def find_foreign_access(folder: Path) -> str:
    """Return why other users of this machine may change files in ``folder``, as text; empty if they may not: the folder
    is not a link, belongs to this user, and only this user may write to it.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if found.st_uid != os.getuid():
        return f"it belongs to the user {found.st_uid}"
    return "other users may write to it" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
