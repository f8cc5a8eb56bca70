"""Decide whether an error is the origin of a failure or a consequence of another rank's failure, from the type, the
message and the traceback of the error.
"""

from __future__ import annotations

import re
import sysconfig
import traceback

import torch.distributed as dist

from partitioner import passes, runtime
from partitioner.runtime.errors import CheckpointError, CommunicationError, InstructionError

# Messages of errors on a rank that has lost the connection to another rank: a consequence, not a cause.
_LOST_CONNECTION = re.compile(r"connection (was )?(closed|reset|refused)|timed? ?out|broken pipe|abort", re.IGNORECASE)
_LIBRARY = re.compile(r"gloo|nccl|ProcessGroup|c10d|TCPStore", re.IGNORECASE)
_COMMUNICATING = tuple(folder for package in (runtime, passes, dist) for folder in package.__path__)


def is_secondary(error: BaseException) -> bool:
    """Return whether ``error`` is a consequence of another rank's failure, such as a closed connection."""
    if isinstance(error, CheckpointError):
        return error.elsewhere
    if isinstance(error, CommunicationError):
        return "mismatched" not in str(error)
    if isinstance(error, dist.DistError):
        return True
    if (
        not isinstance(error, RuntimeError)
        or "Detected mismatch" in str(error)
        or not _LOST_CONNECTION.search(str(error))
    ):
        return False
    return _is_communication_error(error)


def is_rank_error(error: BaseException) -> bool:
    """Return whether ``error`` is already an error about ranks: an instruction failed on some rank, or this rank has
    lost the connection to another one.
    """
    return isinstance(error, InstructionError | CommunicationError) or is_secondary(error)


def _is_communication_error(error: RuntimeError) -> bool:
    """Return whether ``error`` was raised by communication between ranks, and not by a training script or data
    loader.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or frames[-1].filename.startswith(_COMMUNICATING) or bool(_LIBRARY.search(str(error)))


def find_user_line(error: BaseException) -> str:
    """Return the innermost line of the traceback of ``error`` that is in the user's script, as ``file:line``; empty if
    there is none. Lines of this package, of installed libraries and of the standard library are skipped.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if is_user_file(f.filename)]
    return lines[-1] if lines else ""


def is_user_file(filename: str) -> bool:
    """Return whether ``filename``, the file of a stack frame, is a script of the user: not a file of this package, of
    an installed library or of the standard library.
    """
    others = (*runtime.__path__, sysconfig.get_path("stdlib"), "<")
    return "site-packages" not in filename and not filename.startswith(others)
