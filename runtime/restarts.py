"""Joining the other ranks, also where torchrun has started them anew."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

DEFAULT_TIMEOUT = timedelta(minutes=30)
SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # of torchrun: one for each attempt


def init_process_group(backend: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """``torch.distributed.init_process_group`` for a worker of torchrun that may be restarted.

    torchrun gives all attempts the same store, in which new ranks would find the addresses of those that have died
    (pytorch/pytorch#135712, torch 2.13); here each attempt has names of its own. Attempts are counted by host: with
    several hosts set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun, as ``python -m runtime.torchrun`` does.
    """
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
    """How long a rank waits for another one in the default process group, which serves ``device``."""
    backend: Any = c10d._get_default_group()._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", DEFAULT_TIMEOUT)
    return timeout
