"""A rank's shards of the parameters, buffers and constants, and whether the weights given are those of the plan."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from passes.layouts import REPLICATED, Shard, take_shards
from passes.serialize import dtype_of
from runtime.errors import WeightsError
from runtime.parts import names_read, stacked
from runtime.pieces import take_piece
from runtime.program import Program, RankProgram, StateData, shard_shape
from runtime.weights import FileWeights, Weights

_SHOWN = 5  # differences named in an error


def check_weights(program: Program, weights: Weights) -> None:
    """Raise :class:`WeightsError`, naming the first differences, if ``weights`` are not those of ``program``."""
    differences = list(_differences(program, stacked(program, weights)))
    if differences:
        shown = "\n  ".join(differences[:_SHOWN])
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise WeightsError(
            f"{weights.origin} does not hold the weights that the plan was made for (fingerprint "
            f"{program.fingerprint}):\n  {shown}{more}\nPass the weights of the same model, or plan again for this one."
        )


def _differences(program: Program, weights: Weights) -> Iterator[str]:
    owners: dict[Hashable, str] = {}  # of each tensor that takes a gradient: the state that it is
    for name, state in program.states.items():
        present = [n for n in (name, *state.aliases) if weights.spec(n) is not None]
        if not present:
            if name not in program.constants and state.kind != "constant":
                yield f"{name}: expected {state.kind} {list(state.shape)}, got nothing"
            continue
        shape, dtype = weights.spec(present[0]) or ((), torch.float32)
        expected = dtype_of(state.dtype)
        if shape != state.shape:
            yield f"{present[0]}: expected shape {list(state.shape)}, got {list(shape)}"
        elif dtype.is_floating_point != expected.is_floating_point or dtype.is_complex != expected.is_complex:
            yield f"{present[0]}: expected {state.dtype}, got {str(dtype).removeprefix('torch.')}"
        tensor = weights.identity(present[0])
        for other in present[1:]:
            if weights.identity(other) != tensor:
                yield f"{other}: expected the same tensor as {present[0]} (tied), got another one"
        if tensor is not None and state.requires_grad:
            if tensor in owners:
                yield f"{name}: expected a tensor of its own, got the same as {owners[tensor]} (tied)"
            owners[tensor] = name
    known = {n for name, state in program.states.items() for n in (name, *state.aliases)}
    for name in weights.names():
        if name not in known and (tensor := weights.identity(name)) in owners:
            yield f"{name}: is the same tensor as {owners[tensor]}, a tie that the plan does not know of"


def load_states(
    rank: RankProgram,
    weights: Weights | None,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype] | None = None,
    placed: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> dict[str, Tensor]:
    """The shards of ``rank`` on ``device``, in the program's types or in those that ``dtypes`` gives by name; of what
    ranks share, its piece. Without ``weights``: small random values, the same on all ranks that hold the same shard.
    ``placed``: called for each by itself, with its name, gives what is kept of it.

    Raises :class:`WeightsError` before anything is read if ``weights`` are not the program's.
    """
    if weights is not None:
        check_weights(rank.program, weights)
        weights = stacked(rank.program, weights)
    return {
        name: placed(name, own_piece(rank, name, _shard(rank, name, weights, device, (dtypes or {}).get(name))))
        for name in rank.states
    }


def own_piece(rank: RankProgram, name: str, shard: Tensor) -> Tensor:
    """What ``rank`` keeps of ``shard``, its part of a state by ``ep`` and ``tp``: all, or its piece, flat."""
    if not rank.program.states[name].zero_axes:
        return shard
    group = rank.zero_group(name)
    return take_piece(shard, len(group), group.index(rank.rank)).clone()


def load_weights(rank: RankProgram, path: Path, shards: Mapping[str, Tensor]) -> None:
    """Fill ``shards`` in place from safetensors. Raises :class:`WeightsError` if they are not the program's."""
    files = FileWeights(path).for_names(names_read(rank.program))
    check_weights(rank.program, files)
    weights = stacked(rank.program, files)
    for name, own in shards.items():
        found = next((n for n in (name, *rank.program.states[name].aliases) if weights.spec(n) is not None), None)
        if found is not None:
            with torch.no_grad():
                own.copy_(own_piece(rank, name, read_shards(weights, found, rank.shards(name))))
    files.close()


def _shard(
    rank: RankProgram, name: str, weights: Weights | None, device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    program, state = rank.program, rank.program.states[name]
    shards = rank.shards(name)
    dtype = dtype or dtype_of(state.dtype)
    if weights is not None:
        for candidate in (name, *state.aliases):
            if weights.spec(candidate) is not None:
                part = read_shards(weights, candidate, shards)
                return torch.empty(part.shape, dtype=dtype, device=device).copy_(part)
    if name in program.constants or name in program.initial:
        whole = torch.tensor(program.constants.get(name, program.initial.get(name)), dtype=dtype)
        whole = whole.expand(state.shape) if whole.dim() == 0 else whole.reshape(state.shape)
        return take_shards(whole, shards).contiguous().to(device)
    number = 0
    for cut in shards:
        number = number * cut.num_ranks + cut.rank
    return _random(name, state, shard_shape(program, name), number, dtype).to(device)


def read_shards(weights: Weights, name: str, shards: Sequence[Shard]) -> Tensor:
    """A rank's part of a tensor; what the first cut leaves is all that is read."""
    first, *rest = shards or (Shard(REPLICATED, 1, 0),)
    return take_shards(weights.read(name, *first), rest)


def _random(name: str, state: StateData, shape: tuple[int, ...], part: int, dtype: torch.dtype) -> Tensor:
    """Values of standard deviation 1/sqrt(fan-in), ones for vectors: a network of these neither dies nor explodes.
    Zeros for buffers of which nothing is known."""
    if state.kind != "parameter" or not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}:{part}".encode()))
    return (torch.randn(shape, generator=generator) / math.sqrt(state.shape[-1])).to(dtype)


def parameters_of(rank: RankProgram, shards: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """The rank's parameters, sharing memory with ``shards``."""
    states = rank.program.states
    return {
        name: nn.Parameter(
            shard, requires_grad=states[name].requires_grad and (shard.is_floating_point() or shard.is_complex())
        )
        for name, shard in shards.items()
        if states[name].kind == "parameter"
    }
