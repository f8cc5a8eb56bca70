"""Defaults of a rank: its device, the process group, and the folder of its files on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.errors import LaunchError, OffloadError
from partitioner.runtime.program.load import load_disk_bytes
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.state.disk_offload import FOLDER, Disk
from partitioner.runtime.state.parameters import count_disk_bytes

_MAX_GAP_BYTES = 512  # maximum alignment padding per parameter on disk


def create_default_communicator(
    program: Program, device: torch.device | str | None, placement: tuple[int, ...]
) -> Communicator:
    """Return the communicator of torch's default process group; without a process group, one for a single rank.
    ``program``: the program of all ranks. ``device``: device of this rank; ``None``: chosen by the process group.
    ``placement``: for each rank, the index of its device in the plan's topology; empty: process ``i`` runs rank ``i``.
    Raise :class:`LaunchError` if the number of processes differs from the program's number of ranks.
    """
    if not dist.is_initialized():
        if program.world_size > 1:
            raise LaunchError(
                f"the program is for {program.world_size} ranks and there is no process group: start with torchrun "
                "and call torch.distributed.init_process_group first, or use partitioner.run_local"
            )
        from partitioner.runtime.comm.thread_backend import ThreadWorld

        return ThreadWorld(1, resolve_device(device or "cpu")).communicator(0)
    if dist.get_world_size() != program.world_size:
        raise LaunchError(
            f"the program is for {program.world_size} ranks {_format_mesh(program)}, the process group has "
            f"{dist.get_world_size()}: start {program.world_size} processes, or plan for {dist.get_world_size()}"
        )
    device = choose_default_device() if device is None else resolve_device(device)
    return TorchCommunicator(program.world_size, device, placement=placement)


def _format_mesh(program: Program) -> str:
    return "(" + ", ".join(f"{axis}={n}" for axis, n in program.mesh.items() if n > 1) + ")"


def choose_default_device() -> torch.device:
    """Return the GPU of this process if torch's default process group supports GPUs and one is available; otherwise the
    CPU.
    """
    if dist.is_initialized() and torch.cuda.is_available():
        group: Any = dist.group.WORLD
        if "cuda" in {torch.device(kind).type for kind in group._device_types}:
            return select_local_gpu()
    return torch.device("cpu")


def select_local_gpu() -> torch.device:
    """Return the GPU of this process, chosen by its local rank on the node, and make it the current device. Raise
    :class:`LaunchError` if the node has no GPU for this rank.
    """
    count = torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        rank = int(os.environ["LOCAL_RANK"])
    else:
        rank = dist.get_rank() % count if dist.is_initialized() else 0
    index = 0 if count == 1 else rank
    if index >= count:
        raise LaunchError(
            f"local rank {rank} has no GPU: torch sees {count} here; expected one for each rank of the node (or one in "
            "each process's CUDA_VISIBLE_DEVICES): start fewer ranks, or pass device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def resolve_device(device: torch.device | str) -> torch.device:
    """Return ``device`` as a ``torch.device``. A GPU without an index gets one, and becomes the current device of the
    process.
    """
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    return device


def make_one_step_folder() -> str:
    """Return the folder for disk files that are needed for only one step: the environment variable
    ``PARTITION_OFFLOAD_FOLDER`` or, if it is not set, the system's temporary folder.
    """
    return os.environ.get(FOLDER) or tempfile.gettempdir()


def create_disk(rank: RankProgram, plan: Any, folder: str | Path | None) -> Disk | None:
    """Return the disk storage for a rank's optimizer states, as large as ``plan`` estimates; ``None`` if the plan does
    not offload to disk. ``rank``: the program of this rank. ``plan``: a plan or the path of its file. ``folder``:
    folder of the storage's files; ``None``: the environment variable ``PARTITION_OFFLOAD_FOLDER``. Raise
    :class:`OffloadError` if no folder is given, or if the folder has too little space.
    """
    if "disk" not in rank.program.offload:
        return None
    folder = folder or os.environ.get(FOLDER)
    if not folder:
        raise OffloadError(
            "the plan has optimizer states on disk, but no folder is given: expected offload_folder= of the engine, "
            f"--offload-folder, or {FOLDER} in the environment, a folder on a local disk of each node"
        )
    return Disk(
        folder, max(load_disk_bytes(plan, rank.stage_index), count_disk_bytes(rank)) + _MAX_GAP_BYTES * len(rank.states)
    )
