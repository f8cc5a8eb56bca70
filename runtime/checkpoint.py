"""Checkpoints: whole tensors in safetensors files, written by all ranks in turn, so that any plan can read them.

A folder holds ``model.safetensors.index.json`` and its files, readable by every tool that knows sharded safetensors;
with an optimizer ``optimizer.safetensors.index.json`` and its files, too, and ``training.json``. It is written under
another name and renamed when it is complete. All ranks must see the same file system.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from passes.layouts import Layout, join_shards
from passes.serialize import dtype_of
from runtime.errors import WeightsError
from runtime.files import write_text
from runtime.groups import Communicator
from runtime.parts import by_model_names, stacked
from runtime.pieces import join_pieces, padded_piece
from runtime.program import Program, RankProgram, shard_shape
from runtime.state import check_weights, own_piece, read_shards
from runtime.weights import INDEX, FileWeights

OPTIMIZER_INDEX = "optimizer.safetensors.index.json"
TRAINING = "training.json"
FILE_BYTES = 2 << 30  # of a file, so that no rank holds more than this of other ranks' shards
_SEPARATOR = "::"  # parameter::exp_avg


@dataclass(frozen=True)
class Chunk:
    """The tensors of one file: states that the stage ``stage`` holds, written by one of its ranks."""

    stage: int
    number: int
    states: tuple[str, ...]

    def file(self, prefix: str, total: int) -> str:
        return f"{prefix}-{self.number + 1:05}-of-{total:05}.safetensors"


class OptimizerState:
    """The state that an optimizer holds for a rank's parameters, by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters

    def of(self, name: str) -> dict[str, Tensor]:
        """The tensors held for one parameter. Raises :class:`WeightsError` on one that is not sharded as it is."""
        parameter = self.parameters[name]
        held = {k: v if isinstance(v, Tensor) else torch.tensor(v) for k, v in self.optimizer.state[parameter].items()}
        for key, tensor in held.items():
            if tensor.dim() and tensor.shape != parameter.shape:
                raise WeightsError(
                    f"the optimizer's {key!r} of {name} has shape {list(tensor.shape)}, the parameter's shard "
                    f"{list(parameter.shape)}: only state of the parameter's shape, or numbers, can be saved"
                )
        return held

    def groups(self) -> list[dict[str, Any]]:
        """The hyperparameters, those that JSON can hold."""
        plain = (bool, int, float, str, type(None), list, tuple)
        return [
            {k: v for k, v in group.items() if k != "params" and isinstance(v, plain)}
            for group in self.optimizer.param_groups
        ]


def save(
    directory: Path,
    rank: RankProgram,
    shards: Mapping[str, Tensor],
    communicator: Communicator,
    optimizer: OptimizerState | None,
    steps: int,
) -> None:
    """Write a checkpoint; every rank takes part. ``directory`` is there complete afterwards, or as it was before."""
    directory = directory.absolute()
    partial = directory.with_name(f".{directory.name}.partial")
    if rank.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    communicator.barrier()
    chunks = chunks_of(rank.program)
    for chunk in chunks:
        mine = _mine(chunk, rank)
        if mine is not None:
            _write(partial / chunk.file("model", len(chunks)), chunk.states, shards, rank, communicator, mine)
            if optimizer is not None:
                held = {s: optimizer.of(s) for s in chunk.states if s in optimizer.parameters}
                states = {f"{s}{_SEPARATOR}{k}": t for s, kept in held.items() for k, t in kept.items()}
                file = partial / chunk.file("optimizer", len(chunks))
                _write(file, tuple(states), states, rank, communicator, mine)
    communicator.barrier()
    if rank.rank == 0:
        _index(partial, chunks, rank.program, optimizer, steps)
        _replace(partial, directory)
    communicator.barrier()


def load(
    directory: Path, rank: RankProgram, shards: Mapping[str, Tensor], optimizer: OptimizerState | None
) -> int | None:
    """Fill ``shards`` from a checkpoint of any plan, and ``optimizer``. Returns the number of steps done, if known."""
    files = FileWeights(directory)
    check_weights(rank.program, files)
    weights = stacked(rank.program, files)
    for name, shard in shards.items():
        found = next((n for n in (name, *rank.program.states[name].aliases) if weights.spec(n) is not None), None)
        if found is not None:
            with torch.no_grad():
                shard.copy_(own_piece(rank, name, read_shards(weights, found, rank.shards(name))))
    files.close()
    training = directory / TRAINING
    content = json.loads(training.read_text()) if training.exists() else {}
    if optimizer is not None:
        _load_optimizer(directory, rank, optimizer, content.get("groups", []))
    return content.get("steps")


def gather_all(rank: RankProgram, shards: Mapping[str, Tensor], communicator: Communicator) -> dict[str, Tensor]:
    """Every whole parameter and buffer on the CPU of the first process, under all of its names; nothing elsewhere."""
    everyone = communicator.group(rank.group("pp", "tp"))
    whole: dict[str, Tensor] = {}
    home = rank.program.coordinates(communicator.home)
    apart = any(rank.coordinates[axis] != home[axis] for axis in ("dp", "cp"))
    for name in saved_states(rank.program):
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


def saved_states(program: Program) -> list[str]:
    """What a checkpoint holds: parameters and buffers, but not those whose values are part of the plan."""
    return [n for n, s in program.states.items() if s.kind != "constant" and n not in program.constants and s.stages]


def chunks_of(program: Program) -> list[Chunk]:
    """Which tensors go to which file: the same on all ranks."""
    chunks: list[Chunk] = []
    for stage in range(len(program.stages)):
        names: list[str] = []
        size = 0
        for name in saved_states(program):
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
            parts = _by_model_names(name, whole.detach().cpu(), rank.program)
            content |= {n: part.contiguous().clone() for n, part in parts.items()}
    if mine:
        save_file(content, file, metadata={"format": "pt"})


def _by_model_names(name: str, whole: Tensor, program: Program) -> dict[str, Tensor]:
    """One entry of a file: a state or what an optimizer holds for it; the parts of a stack each on its own."""
    state, _, key = name.partition(_SEPARATOR)
    parts = program.states[state].parts
    if not parts:
        return {name: whole}
    suffix = _SEPARATOR + key if key else ""
    each = whole.unbind(0) if whole.dim() else [whole] * len(parts)
    return {part + suffix: tensor for part, tensor in zip(parts, each, strict=True)}


def _gather(name: str, shard: Tensor, rank: RankProgram, communicator: Communicator) -> Tensor:
    """The whole of a shard over the ranks that share it, over ``tp`` and, of experts' weights, over ``ep``."""
    state = name.split(_SEPARATOR)[0]
    data = rank.program.states[state]
    if shard.dim() and data.zero_axes:
        shape, sharing = shard_shape(rank.program, state), communicator.group(rank.zero_group(state))
        piece = padded_piece(shard.detach(), math.prod(shape), sharing.size)
        shard = join_pieces([sharing.all_gather(piece, 0).wait()], shape)
    for axis, text in (("tp", data.layout), ("ep", data.expert_layout)):
        group, layout = communicator.group(rank.group(axis)), Layout.parse(text)
        if shard.dim() and layout.is_shard and group.size > 1:
            parts = group.all_gather(shard.detach().unsqueeze(0), 0).wait()
            shard = join_shards(list(parts.unbind(0)), layout)
    return shard


def _index(folder: Path, chunks: list[Chunk], program: Program, optimizer: OptimizerState | None, steps: int) -> None:
    held_in = {state: chunk.file("model", len(chunks)) for chunk in chunks for state in chunk.states}
    states = [program.states[s] for s in held_in]
    files = {name: file for s, file in held_in.items() for name in (program.states[s].parts or (s,))}
    size = sum(math.prod(s.shape) * dtype_of(s.dtype).itemsize for s in states)
    write_text(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2))
    content: dict[str, Any] = {"steps": steps}
    if optimizer is not None:
        held: dict[str, str] = {}
        for file in sorted(folder.glob("optimizer-*.safetensors")):
            held.update(dict.fromkeys(FileWeights(file).names(), file.name))
        write_text(folder / OPTIMIZER_INDEX, json.dumps({"metadata": {}, "weight_map": held}, indent=2))
        content["groups"] = optimizer.groups()
    write_text(folder / TRAINING, json.dumps(content))


def _replace(new: Path, directory: Path) -> None:
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(new, directory)
    shutil.rmtree(old, ignore_errors=True)


def _load_optimizer(
    directory: Path, rank: RankProgram, optimizer: OptimizerState, groups: list[dict[str, Any]]
) -> None:
    if not (directory / OPTIMIZER_INDEX).exists():
        raise WeightsError(f"{directory} holds no optimizer state; save it with save(directory, optimizer)")
    saved = FileWeights(directory, OPTIMIZER_INDEX)
    keys: dict[str, list[str]] = {}
    for entry in saved.names():
        owner, _, key = entry.rpartition(_SEPARATOR)
        keys.setdefault(owner, []).append(key)
    for name, parameter in optimizer.parameters.items():
        data = rank.program.states[name]
        found = next((n for n in (*data.parts[:1], name, *data.aliases) if n in keys), None)
        state = {}
        for key in keys[found] if found else ():
            spec = saved.spec(f"{found}{_SEPARATOR}{key}")
            assert spec is not None
            whole = bool(data.parts and spec[0])  # of a number, each part has the same
            source = stacked(rank.program, saved, _SEPARATOR + key) if whole else saved
            full = f"{name if whole else found}{_SEPARATOR}{key}"
            shard = read_shards(source, full, rank.shards(name) if spec[0] else ())
            shard = own_piece(rank, name, shard) if spec[0] else shard
            state[key] = shard.clone() if not spec[0] else shard.to(parameter.device, copy=True)
        if state:
            optimizer.optimizer.state[parameter] = state
    saved.close()
    if len(groups) == len(optimizer.optimizer.param_groups):
        for group, values in zip(optimizer.optimizer.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
