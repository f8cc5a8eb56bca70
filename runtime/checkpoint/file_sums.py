"""Checksums of the files of a checkpoint. Importing this does not import torch's checkpoints, which takes long."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

METADATA = ".metadata"  # the file in which torch lists the chunks of each tensor

_READ = 1 << 20


@dataclass(frozen=True)
class FileSum:
    """The length of a file in bytes, ``nbytes``, and its SHA-256 as hexadecimal digits, ``sha256``."""

    nbytes: int
    sha256: str


def compute_file_sum(path: Path) -> FileSum:
    """Read the file ``path``, and return its length and SHA-256. Raise ``OSError`` if it cannot be read."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ):
            digest.update(block)
            nbytes += len(block)
    return FileSum(nbytes, digest.hexdigest())
