"""Export a rank's parameters, as DTensors that share their memory, or as whole tensors in safetensors files.

A DTensor describes to torch's own tools the whole tensor of which a rank holds a part. It shares the storage of the
parameter that an optimizer updates. Its mesh has the axes of the plan over which this stage's ranks are spread, without
axes of one rank. A layout that a DTensor cannot express exactly is refused, never approximated.

All ranks take turns to gather and write the whole tensors. The folder has ``model.safetensors.index.json`` and its
files, readable by every tool that supports sharded safetensors. The folder is replaced atomically, like a checkpoint
(``runtime/checkpoint/atomic_folder.py``). All ranks must see the same file system.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from partitioner.passes.ir.layouts import Layout, join_shards, local_shape
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.checkpoint.save import agree_on_target, list_weight_states
from partitioner.runtime.checkpoint.training_state import OptimizerState
from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.errors import CheckpointError, DTensorError, LaunchError
from partitioner.runtime.files import write_text
from partitioner.runtime.program.program import Program, RankProgram, shard_shape
from partitioner.runtime.state.parameters import join_pieces, map_model_names, pad_piece
from partitioner.runtime.state.weights import INDEX, check_storable

_MAX_LISTED = 5  # maximum number of reasons named in an error


def require_dtensor_views(program: Program) -> None:
    """Raise :class:`DTensorError`, which names the first reasons, unless a DTensor can express every parameter of the
    model. The result is equal on all ranks, because the parameters of all pipeline stages are checked. ``program``: the
    program of all ranks.
    """
    named, reasons = find_placements(program)
    if not reasons:
        return
    shown = "\n  ".join(f"{name}: {why}" for name, why in [*reasons.items()][:_MAX_LISTED])
    more = f"\n  and {len(reasons) - _MAX_LISTED} more" if len(reasons) > _MAX_LISTED else ""
    raise DTensorError(
        f"{len(reasons)} of the model's {len(reasons) + len(named)} parameters have layouts that DTensors cannot "
        f"express:\n  {shown}{more}\nstrict=False leaves them out; engine.save, engine.clip_grad_norm_ and "
        "engine.state_dict(full=True) support all parameters"
    )


def find_placements(program: Program) -> tuple[dict[str, list[Placement]], dict[str, str]]:
    """Return two dicts by parameter name: the DTensor placements, and, for parameters that a DTensor cannot express,
    the reason as text. ``program``: the program of all ranks.
    """
    named, reasons = {}, {}
    for name, state in program.states.items():
        if state.kind == "parameter":
            try:
                named[name] = list_placements(program, name)
            except DTensorError as error:
                reasons[name] = str(error)
    return named, reasons


class DTensorViews:
    """Creates DTensors that share the memory of one rank's parameters. All ranks create this object together.
    ``processes``: process number of each rank. ``devices``: types of devices on which parameters may be, such as
    "cuda". Raise :class:`LaunchError` if no device mesh of all ranks can be created.
    """

    def __init__(self, rank: RankProgram, processes: Sequence[int], devices: Iterable[str]) -> None:
        self.rank = rank
        self.program = rank.program
        self._processes = processes
        self._meshes: dict[tuple[str, tuple[str, ...]], DeviceMesh] = {}
        named, _ = find_placements(self.program)
        self.placements = {name: how for name, how in named.items() if name in rank.states}
        _check_world(self.program)
        for device, axes in product(
            sorted(devices), sorted({list_device_mesh_axes(self.program, name) for name in named})
        ):
            self._meshes[device, axes] = self._build_device_mesh(device, axes)

    def view_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, DTensor]:
        """Return a dict: name -> DTensor, for each of ``parameters`` that a DTensor can express. The ``grad`` of each
        DTensor is a DTensor of the gradient.
        """
        found = {name: self.view_tensor(name, parameters[name]) for name in self.placements}
        for name, view in found.items():
            view.requires_grad_(parameters[name].requires_grad)
            grad = parameters[name].grad
            view.grad = None if grad is None else self.view_tensor(name, grad)
        return found

    def view_optimizer(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> dict[str, dict[str, Any]]:
        """Return the states of ``optimizer`` as parameter name -> state name -> DTensor. A state whose shape differs
        from the parameter's is returned unchanged. Parameters that a DTensor cannot express are left out. Raise
        :class:`CheckpointError` if the optimizer has other parameters than ``parameters``.
        """
        OptimizerState(optimizer, parameters)
        found: dict[str, dict[str, Any]] = {}
        for name in self.placements:
            shape = parameters[name].shape
            for key, held in optimizer.state.get(parameters[name], {}).items():
                alike = isinstance(held, Tensor) and held.dim() and held.shape == shape
                found.setdefault(name, {})[key] = self.view_tensor(name, held) if alike else held
        return found

    def view_tensor(self, name: str, tensor: Tensor) -> DTensor:
        """Return a DTensor that shares the memory of ``tensor``. ``name``: name of a parameter with the layout of
        ``tensor``.
        """
        shape = self.program.states[name].shape
        mesh = self._meshes[tensor.device.type, list_device_mesh_axes(self.program, name)]
        own = list(shard_shape(self.program, name))
        if self.program.states[name].zero_axes:
            own[0] //= len(self.rank.zero_group(name))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor.detach().view(own),
            mesh,
            self.placements[name],
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    def _build_device_mesh(self, device: str, axes: tuple[str, ...]) -> DeviceMesh:
        """Return the device mesh of this pipeline stage's ranks with the dims ``axes``. Ranks of all stages call this
        together. ``device``: type of device, such as "cuda". Raise :class:`LaunchError` if the processes along an axis
        are not in ascending order.
        """
        grid = self.program.grid(axes)
        names = ("pp", *axes) if grid.get("pp", 1) > 1 else axes
        processes = torch.tensor(self._processes).view([grid[axis] for axis in names])
        for dim, axis in enumerate(names):
            if not bool((processes.diff(dim=dim) > 0).all()):
                raise LaunchError(
                    f"the plan has ranks along {axis} on processes in another order, {[*self._processes]}; torch sorts "
                    "a group's processes, so that DTensors would take the shard of one rank for that of another; "
                    "make a "
                    "plan for a topology whose nodes are equal"
                )
        mesh = DeviceMesh(device, processes, mesh_dim_names=names)
        return mesh if names == axes else mesh[axes]


def list_device_mesh_axes(program: Program, name: str) -> tuple[str, ...]:
    """Return the mesh axes of the device mesh of the parameter called ``name``, outermost first: those with more than
    one rank, except ``pp``; if there are none, only the last axis. Raise :class:`DTensorError` if no mesh has all axes
    over which the parameter is sharded. ``program``: the program of all ranks.
    """
    axes = {axis for axis, _ in _list_cuts(program, name)} | {*program.states[name].zero_axes}
    try:
        grid = program.grid(axes)
    except StopIteration:
        raise DTensorError(f"{', '.join(sorted(axes))}, over which it is sharded, are not axes of one mesh") from None
    return tuple(a for a, n in grid.items() if n > 1 and a != "pp") or tuple(grid)[-1:]


def list_placements(program: Program, name: str) -> list[Placement]:
    """Return the DTensor placement of the parameter called ``name`` for each axis of its device mesh, in the order of
    the axes. Raise :class:`DTensorError` if placements cannot express the layout. ``program``: the program of all
    ranks.
    """
    state, axes = program.states[name], list_device_mesh_axes(program, name)
    found: dict[str, Placement] = {axis: Replicate() for axis in axes}
    first: list[str] = []  # the axes that cut dim 0
    shape = state.shape
    for axis, layout in _list_cuts(program, name):
        if layout.sections or layout.zigzag:
            what = f"of sections of {list(layout.sections)}" if layout.sections else "folded"
            raise DTensorError(
                f"dim {layout.dim} consists of {what}, and every rank of {axis} has a shard of each part"
            )
        found[axis] = Shard(layout.dim)
        first += [axis] if layout.dim == 0 else []
        shape = local_shape(layout, shape, program.size(axis))
    sharing = [axis for axis in axes if axis in state.zero_axes]
    ranks = math.prod(program.size(axis) for axis in sharing)
    if ranks > 1 and shape[0] % ranks:
        raise DTensorError(f"its {shape[0]} rows are not divisible by {ranks}, so that ZeRO cuts shards within a row")
    for axis in sharing:
        # torch cuts along the mesh's axes from the first to the last; here the last ones came first
        before = math.prod(program.size(a) for a in first if axes.index(a) > axes.index(axis))
        found[axis] = _StridedShard(0, split_factor=before) if before > 1 else Shard(0)
    return [found[axis] for axis in axes]


def _list_cuts(program: Program, name: str) -> list[tuple[str, Layout]]:
    """Return how the parameter called ``name`` is sharded, without ZeRO, as pairs (mesh axis, layout) in the order of
    the cuts. Raise :class:`DTensorError` if no device mesh of the program's ranks contains all of these mesh axes.
    ``program``: the program of all ranks.
    """
    state = program.states[name]
    experts, tensors = Layout.parse(state.expert_layout), Layout.parse(state.layout)
    tp = "tp"
    if experts.is_shard and tensors.is_shard and program.size("ep") > 1:
        tp = "etp"
        if program.size("etp") != program.size("tp"):
            raise DTensorError("it is sharded over ep and over tp, which are not axes of one mesh")
    return [(axis, cut) for axis, cut in (("ep", experts), (tp, tensors)) if cut.is_shard and program.size(axis) > 1]


def _check_world(program: Program) -> None:
    """Raise :class:`LaunchError` unless torch's default process group has as many ranks as ``program``."""
    if not dist.is_initialized() or dist.get_world_size() != program.world_size:
        there = f"one of {dist.get_world_size()}" if dist.is_initialized() else "none"
        raise LaunchError(
            f"DTensors need a process group of the plan's {program.world_size} ranks, there is {there}: start with "
            "torchrun, and call partitioner.init_process_group"
        )


OWN = r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json"  # files that an export writes and replaces

_WEIGHTS = r".*\.(safetensors|bin)(\.index\.json)?"
FILE_BYTES = 2 << 30  # maximum bytes of a file, which bounds the memory for other ranks' shards


@dataclass(frozen=True)
class ExportFile:
    """One safetensors file of an export of weights. ``states``: names of the parameters and buffers in it. ``stage``:
    index of the pipeline stage that has all of these. ``number``: number of the file, from 0.
    """

    stage: int
    number: int
    states: tuple[str, ...]

    def format_file_name(self, prefix: str, total: int) -> str:
        return f"{prefix}-{self.number + 1:05}-of-{total:05}.safetensors"


def export_weight_files(
    directory: Path, rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator
) -> None:
    """Write the whole weights as safetensors files to the folder ``directory``. All ranks call this. The folder is
    complete afterwards or, if the export fails, unchanged. ``rank``: the program of this rank. ``shards``: name -> this
    rank's shard. ``communicator``: connects this rank with the others. Raise, before anything is written,
    :class:`CheckpointError` if rank 0 cannot write the folder or the folder has other weights, and
    :class:`WeightsError` for a dtype that safetensors does not support.
    """
    for name in list_weight_states(rank.program):
        check_storable(name, dtype_of(rank.program.states[name].dtype))
    folder = directory.resolve()
    target = agree_on_target(folder, communicator, rank.program.world_size, lambda: _check_foreign_weights(folder), OWN)
    target.partial.mkdir(exist_ok=True)
    chunks = assign_export_files(rank.program)
    for chunk in chunks:
        is_writer = _is_chunk_writer(chunk, rank)
        if is_writer is not None:
            _write_chunk(
                target.partial / chunk.format_file_name("model", len(chunks)),
                chunk.states,
                shards,
                rank,
                communicator,
                is_writer,
            )
    communicator.barrier()
    if rank.rank == 0:
        _write_index(target.partial, chunks, rank.program)
        target.commit()
    communicator.barrier()


def _check_foreign_weights(folder: Path) -> None:
    """Raise :class:`CheckpointError` if ``folder`` has weights that tools would read instead of the exported ones."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if re.fullmatch(_WEIGHTS, name) and not re.fullmatch(OWN, name)]
    if others:
        raise CheckpointError(
            f"{folder} holds other weights, {', '.join(others[:3])}, which tools would read instead of these: export "
            "into another folder, or move them away"
        )


def gather_all(rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator) -> dict[str, Tensor]:
    """Return all whole parameters and buffers of the program, by name, on the CPU of the first process; other processes
    get an empty dict. All ranks call this. ``rank``: the program of this rank. ``shards``: name -> this rank's shard.
    ``communicator``: connects this rank with the others.
    """
    everyone = communicator.group(rank.group("pp", "tp"))
    whole: dict[str, Tensor] = {}
    home = rank.program.coordinates(communicator.home)
    apart = any(rank.coordinates[axis] != home[axis] for axis in ("dp", "cp"))
    for name in list_weight_states(rank.program):
        data = rank.program.states[name]
        if apart:  # this rank contributes only its experts or its ZeRO pieces
            held = data.zero_axes or Layout.parse(data.expert_layout).is_shard
            if rank.stage_index == min(data.stages) and held:
                _gather_weight(name, shards[name], rank, communicator)
            continue
        tensor = torch.zeros(data.shape, dtype=dtype_of(data.dtype), device=communicator.device)
        if rank.stage_index == min(data.stages):
            tensor = _gather_weight(name, shards[name], rank, communicator)
            if rank.coordinates["tp"]:
                tensor = torch.zeros_like(tensor)
        if len(rank.program.stages) > 1:
            # Others add zeros, byte by byte: exact for every type.
            flat = tensor.contiguous().reshape(-1).clone().view(torch.uint8)
            tensor = everyone.all_reduce(flat).wait().view(tensor.dtype).view(data.shape)
        if rank.rank == communicator.home:
            whole.update(map_model_names(name, data, tensor.cpu()))
    return whole


def assign_export_files(program: Program) -> list[ExportFile]:
    """Return the safetensors files of an export, each with the names of its parameters and buffers. The result is equal
    on all ranks. ``program``: the program of all ranks.
    """
    chunks: list[ExportFile] = []
    for stage in range(len(program.stages)):
        names: list[str] = []
        size = 0
        for name in list_weight_states(program):
            data = program.states[name]
            if min(data.stages) == stage:
                nbytes = math.prod(data.shape) * dtype_of(data.dtype).itemsize
                if names and size + nbytes > FILE_BYTES:
                    chunks.append(ExportFile(stage, len(chunks), tuple(names)))
                    names, size = [], 0
                names.append(name)
                size += nbytes
        if names:
            chunks.append(ExportFile(stage, len(chunks), tuple(names)))
    return chunks


def _is_chunk_writer(chunk: ExportFile, rank: RankProgram) -> bool | None:
    """Return ``True`` if this rank writes the file ``chunk``, ``False`` if it only takes part in gathering the file's
    tensors, and ``None`` if it does neither. The ranks of a pipeline stage write the files in turn. ``rank``: the
    program of this rank.
    """
    dp, tp = rank.program.mesh.get("dp", 1), rank.program.mesh.get("tp", 1)
    if rank.program.size("ep") > 1 or rank.program.zero:  # the parts are on ranks of any dp and tp
        if rank.stage_index != chunk.stage:
            return None
        return rank.rank % rank.program.strides["pp"] == chunk.number % rank.program.strides["pp"]
    if rank.stage_index != chunk.stage or rank.coordinates["dp"] != chunk.number % dp or rank.coordinates["cp"]:
        return None
    return rank.coordinates["tp"] == chunk.number // dp % tp


def _write_chunk(
    file: Path,
    names: tuple[str, ...],
    shards: Mapping[str, Tensor],
    rank: RankProgram,
    communicator: Communicator,
    is_writer: bool,
) -> None:
    """Gather the tensors ``names`` from the ranks that hold parts of them; if ``is_writer`` is true on this rank, write
    them to ``file``. ``shards``: name -> this rank's shard. ``rank``: the program of this rank. ``communicator``:
    connects this rank with the others.
    """
    content: dict[str, Tensor] = {}
    for name in names:
        whole = _gather_weight(name, shards[name], rank, communicator)
        if is_writer:
            data, whole = rank.program.states[name], whole.detach().cpu()
            parts = map_model_names(name, data, whole) if data.parts else {name: whole}
            content |= {n: part.contiguous().clone() for n, part in parts.items()}
    if is_writer:
        save_file(content, file, metadata={"format": "pt"})


def _gather_weight(name: str, shard: Tensor, rank: RankProgram, communicator: Communicator) -> Tensor:
    """Return the whole tensor of the parameter or buffer called ``name``, gathered from the ranks that hold parts of
    it. ``shard``: this rank's part: a shard over ``tp`` and ``ep``, or a ZeRO piece of this shard. ``rank``: the
    program of this rank. ``communicator``: connects this rank with the others.
    """
    data = rank.program.states[name]
    if data.zero_axes:
        shape, sharing = shard_shape(rank.program, name), communicator.group(rank.zero_group(name))
        piece = pad_piece(shard.detach(), math.prod(shape), sharing.size)
        shard = join_pieces([sharing.all_gather(piece, 0).wait()], shape)
    for axis, text in (("tp", data.layout), ("ep", data.expert_layout)):
        group, layout = communicator.group(rank.group(axis)), Layout.parse(text)
        if shard.dim() and layout.is_shard and group.size > 1:
            parts = group.all_gather(shard.detach().unsqueeze(0), 0).wait()
            shard = join_shards(list(parts.unbind(0)), layout)
    return shard


def _write_index(folder: Path, chunks: list[ExportFile], program: Program) -> None:
    """Write the index file of an export of weights into ``folder``. The file says in which safetensors file each weight
    is. ``chunks``: the files of the export. ``program``: the program of all ranks.
    """
    held_in = {state: chunk.format_file_name("model", len(chunks)) for chunk in chunks for state in chunk.states}
    states = [program.states[s] for s in held_in]
    files = {name: file for s, file in held_in.items() for name in (program.states[s].parts or (s,))}
    size = sum(math.prod(s.shape) * dtype_of(s.dtype).itemsize for s in states)
    write_text(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2))
