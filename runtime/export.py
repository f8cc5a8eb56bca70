"""Weights for others: whole tensors in safetensors files, gathered and written by all ranks in turn.

A folder holds ``model.safetensors.index.json`` and its files, readable by every tool that knows sharded safetensors. It
takes its place as a checkpoint does (``runtime/checkpoint/folders.py``). All ranks must see the same file system.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from passes.layouts import Layout, join_shards
from passes.serialize import dtype_of
from runtime.checkpoint.saving import agreed_target, weight_states
from runtime.errors import CheckpointError
from runtime.files import write_text
from runtime.groups import Communicator
from runtime.parts import by_model_names
from runtime.pieces import join_pieces, padded_piece
from runtime.program import Program, RankProgram, shard_shape
from runtime.weights import INDEX, check_storable

OWN = r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json"  # what an export writes and replaces
_WEIGHTS = r".*\.(safetensors|bin)(\.index\.json)?"
FILE_BYTES = 2 << 30  # of a file, so that no rank holds more than this of other ranks' shards


@dataclass(frozen=True)
class Chunk:
    """The tensors of one file: states that the stage ``stage`` holds, written by one of its ranks."""

    stage: int
    number: int
    states: tuple[str, ...]

    def file(self, prefix: str, total: int) -> str:
        return f"{prefix}-{self.number + 1:05}-of-{total:05}.safetensors"


def export(directory: Path, rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator) -> None:
    """Write the weights; every rank takes part. ``directory`` is there complete afterwards, or as it was before.

    Raises, before anything is written, :class:`CheckpointError` where the first rank cannot make room for it, and
    :class:`WeightsError` for a type that safetensors does not have.
    """
    for name in weight_states(rank.program):
        check_storable(name, dtype_of(rank.program.states[name].dtype))
    place = directory.resolve()
    target = agreed_target(place, communicator, rank.program.world_size, lambda: _check_others(place), OWN)
    target.partial.mkdir(exist_ok=True)
    chunks = chunks_of(rank.program)
    for chunk in chunks:
        mine = _mine(chunk, rank)
        if mine is not None:
            _write(target.partial / chunk.file("model", len(chunks)), chunk.states, shards, rank, communicator, mine)
    communicator.barrier()
    if rank.rank == 0:
        _index(target.partial, chunks, rank.program)
        target.commit()
    communicator.barrier()


def _check_others(place: Path) -> None:
    """Raise :class:`CheckpointError` where weights are that would be read instead of those that are written."""
    names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    others = [name for name in names if re.fullmatch(_WEIGHTS, name) and not re.fullmatch(OWN, name)]
    if others:
        raise CheckpointError(
            f"{place} holds other weights, {', '.join(others[:3])}, which tools would read instead of these: export "
            "into another folder, or move them away"
        )


def gather_all(rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator) -> dict[str, Tensor]:
    """Every whole parameter and buffer on the CPU of the first process, under all of its names; nothing elsewhere."""
    everyone = communicator.group(rank.group("pp", "tp"))
    whole: dict[str, Tensor] = {}
    home = rank.program.coordinates(communicator.home)
    apart = any(rank.coordinates[axis] != home[axis] for axis in ("dp", "cp"))
    for name in weight_states(rank.program):
        data = rank.program.states[name]
        if apart:  # takes part where its experts, or its pieces, are asked for
            held = data.zero_axes or Layout.parse(data.expert_layout).is_shard
            if rank.stage_index == min(data.stages) and held:
                _gather(name, shards[name], rank, communicator)
            continue
        tensor = torch.zeros(data.shape, dtype=dtype_of(data.dtype), device=communicator.device)
        if rank.stage_index == min(data.stages):
            tensor = _gather(name, shards[name], rank, communicator)
            if rank.coordinates["tp"]:
                tensor = torch.zeros_like(tensor)
        if len(rank.program.stages) > 1:
            # Others add zeros, byte by byte: exact for every type.
            flat = tensor.contiguous().reshape(-1).clone().view(torch.uint8)
            tensor = everyone.all_reduce(flat).wait().view(tensor.dtype).view(data.shape)
        if rank.rank == communicator.home:
            whole.update(by_model_names(name, data, tensor.cpu()))
    return whole


def chunks_of(program: Program) -> list[Chunk]:
    """Which tensors go to which file: the same on all ranks."""
    chunks: list[Chunk] = []
    for stage in range(len(program.stages)):
        names: list[str] = []
        size = 0
        for name in weight_states(program):
            data = program.states[name]
            if min(data.stages) == stage:
                nbytes = math.prod(data.shape) * dtype_of(data.dtype).itemsize
                if names and size + nbytes > FILE_BYTES:
                    chunks.append(Chunk(stage, len(chunks), tuple(names)))
                    names, size = [], 0
                names.append(name)
                size += nbytes
        if names:
            chunks.append(Chunk(stage, len(chunks), tuple(names)))
    return chunks


def _mine(chunk: Chunk, rank: RankProgram) -> bool | None:
    """Whether this rank writes ``chunk``; ``None`` if it has no part in it. The ranks of the stage take turns."""
    dp, tp = rank.program.mesh.get("dp", 1), rank.program.mesh.get("tp", 1)
    if rank.program.size("ep") > 1 or rank.program.zero:  # the parts are on ranks of any dp and tp
        if rank.stage_index != chunk.stage:
            return None
        return rank.rank % rank.program.strides["pp"] == chunk.number % rank.program.strides["pp"]
    if rank.stage_index != chunk.stage or rank.coordinates["dp"] != chunk.number % dp or rank.coordinates["cp"]:
        return None
    return rank.coordinates["tp"] == chunk.number // dp % tp


def _write(
    file: Path,
    names: tuple[str, ...],
    shards: Mapping[str, Tensor],
    rank: RankProgram,
    communicator: Communicator,
    mine: bool,
) -> None:
    content: dict[str, Tensor] = {}
    for name in names:
        whole = _gather(name, shards[name], rank, communicator)
        if mine:
            data, whole = rank.program.states[name], whole.detach().cpu()
            parts = by_model_names(name, data, whole) if data.parts else {name: whole}
            content |= {n: part.contiguous().clone() for n, part in parts.items()}
    if mine:
        save_file(content, file, metadata={"format": "pt"})


def _gather(name: str, shard: Tensor, rank: RankProgram, communicator: Communicator) -> Tensor:
    """The whole of a shard over the ranks that share it, over ``tp`` and, of experts' weights, over ``ep``."""
    data = rank.program.states[name]
    if data.zero_axes:
        shape, sharing = shard_shape(rank.program, name), communicator.group(rank.zero_group(name))
        piece = padded_piece(shard.detach(), math.prod(shape), sharing.size)
        shard = join_pieces([sharing.all_gather(piece, 0).wait()], shape)
    for axis, text in (("tp", data.layout), ("ep", data.expert_layout)):
        group, layout = communicator.group(rank.group(axis)), Layout.parse(text)
        if shard.dim() and layout.is_shard and group.size > 1:
            parts = group.all_gather(shard.detach().unsqueeze(0), 0).wait()
            shard = join_shards(list(parts.unbind(0)), layout)
    return shard


def _index(folder: Path, chunks: list[Chunk], program: Program) -> None:
    held_in = {state: chunk.file("model", len(chunks)) for chunk in chunks for state in chunk.states}
    states = [program.states[s] for s in held_in]
    files = {name: file for s, file in held_in.items() for name in (program.states[s].parts or (s,))}
    size = sum(math.prod(s.shape) * dtype_of(s.dtype).itemsize for s in states)
    write_text(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2))
