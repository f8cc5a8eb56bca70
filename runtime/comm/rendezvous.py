"""Join the process group, also in a restarted worker of torchrun, and report to torchrun why a script ends."""

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
SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # makes torchrun use a new store for each restart

_PATIENCE_S = 3.0  # time for torchrun to notice the first failed rank and to end the others


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Initialise ``torch.distributed`` in a worker of torchrun, also if the worker has been restarted.

    When torchrun restarts the ranks, it keeps its store, in which new ranks would find the addresses of ranks that have
    ended (pytorch/pytorch#135712, torch 2.13). If all ranks are on one host, this function gives the keys of each
    restart their own prefix. Hosts count restarts separately: with several hosts set
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun, which ``python -m partitioner.runtime.launch.torchrun`` does.

    After this call, any exception that ends the script is also reported to torchrun, which prints it at the end of its
    log. ``backend``: name of a torch backend, such as ``nccl``; ``None``: torch's default. ``timeout``: how long
    operations wait for other ranks.
    """
    _install_torchrun_hook()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if attempt == "0" or not one_host:
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    own = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def get_default_timeout(device: torch.device) -> timedelta:
    """Return how long a rank waits for others in torch's default process group: the timeout of the group's backend for
    ``device`` or, if there is none (the CPU under NCCL), of another backend.
    """
    group: Any = c10d._get_default_group()
    kinds = [torch.device(kind) for kind in group._device_types]
    served = next((kind for kind in kinds if kind.type == device.type), kinds[0] if kinds else device)
    backend: Any = group._get_backend(served)
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", DEFAULT_TIMEOUT)
    return timeout


def _install_torchrun_hook() -> None:
    """Install a hook that reports the exception that ends this script to torchrun. If another rank's failure caused the
    exception, it is reported some seconds later, so that torchrun records that failure as the first.
    """
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
    """Report the exception ``error``, which ends this script, to torchrun. If another rank's failure caused it, wait
    some seconds first, so that torchrun records the other failure as the first.
    """
    from partitioner.runtime.comm.failure_origin import find_user_line, is_secondary  # avoids a circular import

    if isinstance(error, InstructionError):
        failure = error.failure
    else:
        failure = Failure(
            int(os.environ.get("RANK", "0")), str(error), type(error).__name__, source=find_user_line(error)
        )
    if failure.secondary or is_secondary(error):
        time.sleep(_PATIENCE_S)
    try:
        raise InstructionError(failure) from error
    except InstructionError as told:  # with the traceback that is being handled
        report_to_torchrun(told)


def report_to_torchrun(error: InstructionError) -> None:
    """Write ``error``, which ends this process, to the file from which torchrun reads errors. Do nothing if torchrun
    did not start the process. The file is replaced atomically, because torchrun may read it at any moment and would
    fail if it were incomplete.
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    with contextlib.suppress(Exception):
        handler = _ErrorFile(f"{path}.{os.getpid()}")
        handler.record_exception(error)
        os.replace(handler.path, path)


class _ErrorFile(ErrorHandler):
    """Writes an error to ``path`` in the format that torchrun reads."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _get_error_file_path(self) -> str:
        return self.path
