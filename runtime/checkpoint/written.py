"""What a rank has written of a checkpoint, and the sums that prove its files.

Apart from ``storage``, for which torch imports for a second what few runs need.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

METADATA = ".metadata"
_READ = 1 << 20


@dataclass(frozen=True)
class FileSum:
    """A file's length and SHA-256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Written:
    """What one rank wrote: the chunks, where they are, and its files by name."""

    items: list[WriteItem] = field(default_factory=list)
    results: list[WriteResult] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)


def sum_of(path: Path) -> FileSum:
    """A file's checksum, read from the disk. Raises ``OSError``."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ):
            digest.update(block)
            nbytes += len(block)
    return FileSum(nbytes, digest.hexdigest())
