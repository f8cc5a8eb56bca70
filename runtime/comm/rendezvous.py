"""Joining the other ranks, also where torchrun has started them anew; and telling torchrun why a script ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.distributed.rendezvous import rendezvous

from partitioner.runtime.errors import Failure, InstructionError

DEFAULT_TIMEOUT = timedelta(minutes=30)

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun reads why a worker has ended
SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # of torchrun: one for each attempt

_PATIENCE_S = 3.0  # for torchrun to learn of the rank that was first, and to end the others


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """``torch.distributed.init_process_group`` for a worker of torchrun that may be restarted.

    torchrun gives all attempts the same store, in which new ranks would find the addresses of those that have died
    (pytorch/pytorch#135712, torch 2.13); here each attempt has names of its own. Attempts are counted by host: with
    several hosts set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun, as ``python -m
    partitioner.runtime.launch.torchrun`` does.

    From here on an error that ends the script, of whatever it does, is told to torchrun, whose log ends with it.
    """
    _tell_torchrun()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if attempt == "0" or not one_host:
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    own = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def timeout_of_all(device: torch.device) -> timedelta:
    """How long a rank waits for another one in the default process group: in the part of it that serves ``device``, or,
    where none does (the CPU under NCCL), in another one."""
    group: Any = c10d._get_default_group()
    kinds = [torch.device(kind) for kind in group._device_types]
    served = next((kind for kind in kinds if kind.type == device.type), kinds[0] if kinds else device)
    backend: Any = group._get_backend(served)
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", DEFAULT_TIMEOUT)
    return timeout


def _tell_torchrun() -> None:
    """Have torchrun told of what ends this script; what only follows from another rank's failure, after that one."""
    if ERROR_FILE not in os.environ or getattr(sys.excepthook, "tells_torchrun", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Exception):
            _report_failure(error)

    hook.tells_torchrun = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _report_failure(error: Exception) -> None:
    from partitioner.runtime.comm.failure_origin import is_secondary, users_line  # which import what imports this

    if isinstance(error, InstructionError):
        failure = error.failure
    else:
        failure = Failure(int(os.environ.get("RANK", "0")), str(error), type(error).__name__, source=users_line(error))
    if failure.secondary or is_secondary(error):
        time.sleep(_PATIENCE_S)
    try:
        raise InstructionError(failure) from error
    except InstructionError as told:  # with the traceback that is being handled
        tell_torchrun(told)


def tell_torchrun(error: InstructionError) -> None:
    """Write why this process ends to where torchrun reads it, whole or not at all.

    torchrun reads the file of a process that it has itself ended, at any moment, and fails where it finds a part of it.
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    with contextlib.suppress(Exception):
        handler = _ErrorFile(f"{path}.{os.getpid()}")
        handler.record_exception(error)
        os.replace(handler.path, path)


class _ErrorFile(ErrorHandler):
    """Writes what torchrun reads to ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _get_error_file_path(self) -> str:
        return self.path
