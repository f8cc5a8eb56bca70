"""Load a rank's shards of the states from weights, cut ZeRO pieces, and keep the copies that the optimizer updates.

Weights are checked against the plan before they are loaded. If a state stacks several parameters of the model, it is
one tensor inside the runtime, and is read and written under the model's names.

Under ZeRO, the rank's shard of a state over ``ep`` and ``tp`` is flattened row by row. It is cut into as many pieces of
``ceil(numel / ranks)`` elements as there are ranks; the last pieces may be shorter, or empty. Every shape can thus be
divided over any number of ranks. A piece depends only on the state, not on the bucket in which it is gathered or on the
optimizer.

:class:`MasterParameters` holds copies of parameters for the optimizer. A parameter that is computed in a shorter dtype
has a float32 copy (mixed precision: small updates would be lost in the short dtype, Micikevicius et al. 2018). If the
program offloads its optimizer, all trained parameters have copies in host memory, whatever their dtype, and the
optimizer runs there (ZeRO-Offload, Ren et al. 2021). If optimizer states are on disk, the float32 copies of shorter
parameters are on disk, too. The optimizer updates the copies, and the parameters are set from them before they are
read. Checkpoints contain the copies.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ir.layouts import REPLICATED, Layout, Shard, make_shard_layout, shard_slices, take_shards
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.errors import WeightsError
from partitioner.runtime.program.program import Program, RankProgram, StateData, shard_shape
from partitioner.runtime.program.sharded_buckets import FlatShard
from partitioner.runtime.program.state_bytes import list_host_states, state_sizes
from partitioner.runtime.state.disk_offload import Disk, release_pages
from partitioner.runtime.state.host_offload import HostCopier
from partitioner.runtime.state.weights import FileWeights, Weights


def map_model_names(name: str, state: StateData, whole: Tensor) -> dict[str, Tensor]:
    """Return a dict: each name that the model has for the parameter or buffer called ``name`` -> tensor. ``state``: its
    description. ``whole``: its whole tensor. If it stacks several parameters of the model, the dict has their names and
    tensors.
    """
    if state.parts:
        return dict(zip(state.parts, whole.unbind(0), strict=True))
    return dict.fromkeys((name, *state.aliases), whole)


def list_model_names(name: str, state: StateData) -> tuple[str, ...]:
    """Return the names that the model has for the parameter or buffer called ``name``: its own name and aliases or, if
    it stacks several parameters, their names. ``state``: its description.
    """
    return state.parts or (name, *state.aliases)


def list_names_read(program: Program) -> set[str]:
    """Return all names that the model has for the parameters and buffers of ``program``."""
    return {known for name, state in program.states.items() for known in list_model_names(name, state)}


class StackedWeights:
    """Weights in which several parameters of the model, such as those of experts, are stacked to one tensor, as a
    plan's program reads them. Reading a shard of a stacked tensor reads only the parameters that are needed.
    ``weights``: the weights with the model's own parameters. ``stacks``: name of the stacked tensor -> names of the
    parameters that it consists of, along dim 0.
    """

    def __init__(self, weights: Weights, stacks: dict[str, tuple[str, ...]]) -> None:
        self.weights = weights
        self.stacks = stacks
        self.origin = weights.origin
        self._parts = {part for parts in stacks.values() for part in parts}

    def names(self) -> list[str]:
        return [*(n for n in self.weights.names() if n not in self._parts), *self.stacks]

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the pair (shape, dtype) of the tensor called ``name``; ``None`` if it does not exist, or if it is a
        stack of parameters that differ in shape or dtype.
        """
        if name not in self.stacks:
            return self.weights.spec(name)
        specs = {self.weights.spec(part) for part in self.stacks[name]}
        found = specs.pop()
        return None if specs or found is None else ((len(self.stacks[name]), *found[0]), found[1])

    def read(self, name: str, layout: Layout, num_ranks: int, index: int) -> Tensor:
        """Return the shard of the tensor called ``name``, which may be a stacked one, that the rank ``index`` of
        ``num_ranks`` ranks has. ``layout``: how the tensor is cut among these ranks, such as along which dim.
        """
        if name not in self.stacks:
            return self.weights.read(name, layout, num_ranks, index)
        parts, inner = self.stacks[name], layout
        if layout.is_shard and layout.dim == 0:
            pieces = shard_slices(layout, len(parts), num_ranks, index)
            parts, inner = tuple(p for start, length in pieces for p in parts[start : start + length]), Layout("R")
        elif layout.is_shard:
            inner = make_shard_layout(layout.dim - 1, layout.sections)
        return torch.stack([self.weights.read(part, inner, num_ranks, index) for part in parts])

    def identity(self, name: str) -> Hashable:
        return None if name in self.stacks else self.weights.identity(name)


def stack_weights(program: Program, weights: Weights, suffix: str = "") -> Weights:
    """Return ``weights`` with one stacked tensor in place of several parameters of the model, for each stack that
    ``program`` reads. ``suffix``: text that is appended to every name of a parameter or stacked tensor.
    """
    stacks = {
        name + suffix: tuple(part + suffix for part in state.parts)
        for name, state in program.states.items()
        if state.parts
    }
    return StackedWeights(weights, stacks) if stacks else weights


def take_piece(tensor: Tensor, ranks: int, index: int) -> Tensor:
    """Return piece ``index`` (from 0) of the ``ranks`` pieces into which ZeRO cuts the flattened ``tensor``, as a view
    of shape ``[size]``.
    """
    piece = FlatShard(tensor.numel(), ranks, index)
    return tensor.reshape(-1)[piece.start : piece.start + piece.size]


def pad_piece(piece: Tensor, numel: int, ranks: int) -> Tensor:
    """Return ``piece`` padded with zeros to the common length of all pieces, ``ceil(numel / ranks)``. ``piece`` is one
    of the ``ranks`` pieces into which ZeRO cuts a flattened tensor of ``numel`` elements.
    """
    length = FlatShard(numel, ranks, 0).length
    result = piece.new_zeros(length)
    result[: piece.numel()] = piece
    return result


def join_pieces(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the tensor of ``shape`` whose flattened elements are in ``pieces``, the ZeRO pieces of all ranks, in
    order. The last pieces may have padding.
    """
    import torch  # imported here, because code that only reads a program does not need torch

    return torch.cat([p.reshape(-1) for p in pieces])[: math.prod(shape)].reshape(torch.Size(shape))


_MAX_LISTED = 5  # maximum number of differences named in an error


def check_weights(program: Program, weights: Weights) -> None:
    """Raise :class:`WeightsError`, which names the first differences, if ``weights`` do not match the parameters and
    buffers of ``program``. Names, shapes and ties (several names for one tensor) must be the same. Dtypes may differ,
    but both must be floating-point, complex, or neither.
    """
    differences = list(_find_differences(program, stack_weights(program, weights)))
    if differences:
        shown = "\n  ".join(differences[:_MAX_LISTED])
        more = f"\n  and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        raise WeightsError(
            f"{weights.origin} does not have the weights for which the plan was made (fingerprint "
            f"{program.fingerprint}):\n  {shown}{more}\nPass the weights of the same model, or plan again for this one."
        )


def _find_differences(program: Program, weights: Weights) -> Iterator[str]:
    """Yield, as lines of text, how ``weights`` differ from the parameters and buffers of ``program``."""
    owners: dict[Hashable, str] = {}  # identity of each tensor that requires a gradient -> name of its state
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
            yield (
                f"{name}: expected a tensor of its own, but it is the same tensor as {owners[tensor]} (tied), "
                "which the plan does not expect"
            )


def load_states(
    rank: RankProgram,
    weights: Weights | None,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype] | None = None,
    placed: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> dict[str, Tensor]:
    """Load the parameters and buffers of ``rank`` to ``device``. Return a dict: name -> this rank's shard or, if ZeRO
    divides the shard, this rank's piece of it.

    Args:
        weights: source of the values; ``None``: small random values, equal on all ranks that hold the same shard.
        dtypes: name -> dtype, if it is not the program's.
        placed: function that is called with the name and tensor of each, one at a time, and returns the tensor to use
            instead, such as a copy in host memory.

    Raise :class:`WeightsError` before anything is read if ``weights`` are not the weights of the program.
    """
    if weights is not None:
        check_weights(rank.program, weights)
        weights = stack_weights(rank.program, weights)
    return {
        name: placed(
            name, make_rank_piece(rank, name, _initialize_shard(rank, name, weights, device, (dtypes or {}).get(name)))
        )
        for name in rank.states
    }


def load_constants(rank: RankProgram, device: torch.device) -> dict[str, Tensor]:
    """Return this rank's shards of the constants of the model (tensors in its graph that are neither parameters nor
    buffers) on ``device``, by name. ``rank``: the program of this rank, which has their values.
    """
    states = rank.program.states
    return {n: _initialize_shard(rank, n, None, device, None) for n in rank.states if states[n].kind == "constant"}


def make_rank_piece(rank: RankProgram, name: str, shard: Tensor) -> Tensor:
    """Return the tensor that this rank stores for the parameter or buffer called ``name``: ``shard``, its shard over
    ``ep`` and ``tp``, or, if ZeRO divides the shard, a flat copy of this rank's piece. ``rank``: the program of this
    rank.
    """
    if not rank.program.states[name].zero_axes:
        return shard
    group = rank.zero_group(name)
    return take_piece(shard, len(group), group.index(rank.rank)).clone()


def load_weights(rank: RankProgram, path: Path, shards: Mapping[str, Tensor]) -> None:
    """Fill the tensors in ``shards`` in place from the safetensors file or folder ``path``. ``rank``: the program of
    this rank. ``shards``: name -> this rank's shard or ZeRO piece. Raise :class:`WeightsError` if the files do not have
    the weights of the program.
    """
    files = FileWeights(path).for_names(list_names_read(rank.program))
    check_weights(rank.program, files)
    weights = stack_weights(rank.program, files)
    for name, own in shards.items():
        found = next((n for n in (name, *rank.program.states[name].aliases) if weights.spec(n) is not None), None)
        if found is not None:
            with torch.no_grad():
                own.copy_(make_rank_piece(rank, name, read_shards(weights, found, rank.shards(name))))
    files.close()


def _initialize_shard(
    rank: RankProgram, name: str, weights: Weights | None, device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    """Return this rank's shard of the parameter, buffer or constant called ``name``, on ``device``. Its values come
    from ``weights``, from the program, or are random. ``rank``: the program of this rank. ``dtype``: its dtype;
    ``None``: the program's.
    """
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
    return _draw_random_values(name, state, shard_shape(program, name), number, dtype).to(device)


def read_shards(weights: Weights, name: str, shards: Sequence[Shard]) -> Tensor:
    """Return a rank's shard of the tensor called ``name`` in ``weights``. ``shards``: how the tensor is sharded, one
    entry for each mesh axis: the layout (which dim is cut), the number of ranks, and the index of this rank among them.
    The entries are applied one after the other. Only the part that remains after the first cut is read from the source.
    """
    first, *rest = shards or (Shard(REPLICATED, 1, 0),)
    return take_shards(weights.read(name, *first), rest)


def _draw_random_values(name: str, state: StateData, shape: tuple[int, ...], part: int, dtype: torch.dtype) -> Tensor:
    """Return random values for one shard of the parameter or buffer called ``name``: normally distributed with standard
    deviation 1/sqrt(columns) for a matrix, ones for a vector, and zeros for buffers and integer parameters. With such
    weights, activations neither vanish nor explode. ``state``: the description of the parameter. ``shape``, ``dtype``:
    of the shard. ``part``: number of the shard, which is part of the random seed.
    """
    if state.kind != "parameter" or not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}:{part}".encode()))
    return (torch.randn(shape, generator=generator) / math.sqrt(state.shape[-1])).to(dtype)


def make_parameters(rank: RankProgram, shards: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return this rank's parameters as ``nn.Parameter``, by name. They share memory with ``shards``: name -> parameter
    or buffer. ``rank``: the program of this rank, which distinguishes parameters and buffers.
    """
    states = rank.program.states
    return {
        name: nn.Parameter(
            shard, requires_grad=states[name].requires_grad and (shard.is_floating_point() or shard.is_complex())
        )
        for name, shard in shards.items()
        if states[name].kind == "parameter"
    }


class MasterParameters:
    """The parameters with which a rank computes, ``shards``, and the tensors that an optimizer updates, ``held``, by
    name. Both are the same tensors, except for parameters that have a copy in a wider dtype, in host memory or on disk.

    ``hosted``: the copies in host memory, from which the program's instructions set the parameters. ``weights``: source
    of the values. ``copier``: copies between the device and host memory. ``disk``: storage of float32 copies, if the
    program offloads to disk.
    """

    def __init__(
        self,
        rank: RankProgram,
        weights: Weights | None,
        device: torch.device,
        copier: HostCopier,
        disk: Disk | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        wide = list_master_types(rank)
        host_parameters = list_host_states(rank.program, rank.stage_index)
        first = torch.device("cpu") if host_parameters else device

        def placed(name: str, tensor: Tensor) -> Tensor:
            """Return a tensor with the values of ``tensor``, the parameter or buffer called ``name``, where the program
            keeps it: on the device, in host memory or on disk.
            """
            if name not in host_parameters:
                return tensor.to(device)
            if disk is None or name not in wide:
                return copier.empty(tensor.shape, tensor.dtype).copy_(tensor)
            on_disk = disk.empty(tensor.shape, tensor.dtype).copy_(tensor)
            disk.write_back([on_disk])
            return on_disk

        self.held = load_states(rank, weights, first, wide, placed)
        self.hosted = {name: tensor for name, tensor in self.held.items() if name in host_parameters}
        self._gone = frozenset(host_parameters) if "parameters" in rank.program.offload else frozenset[str]()
        self._names = frozenset(name for name in self.held if name in wide or name in host_parameters)
        self._refreshed = [name for name in wide if name not in host_parameters]
        self.shards = {name: self._get_shard(name) for name in self.held}

    def _get_shard(self, name: str) -> Tensor:
        """Return the tensor on the device with which the rank computes, for the parameter or buffer called ``name``. If
        a parameter is on the device only for a part of the step, return a placeholder with the shape of this rank's
        shard and the memory of one element.
        """
        state = self._rank.program.states[name]
        if name in self._gone and not state.zero_axes:  # a placeholder with the shape, but without the memory
            nothing = torch.empty((), dtype=dtype_of(state.dtype), device=self._device)
            return nothing.expand(self.held[name].shape)
        return self._cast_to_compute_dtype(name) if name in self._names else self.held[name]

    def _cast_to_compute_dtype(self, name: str) -> Tensor:
        """Return the values of the parameter called ``name`` that the optimizer updates, on the device and in the dtype
        in which the rank computes. A parameter in host memory is always copied; another one only if device or dtype
        differ.
        """
        dtype = dtype_of(self._rank.program.states[name].dtype)
        return self.held[name].to(self._device, dtype, copy=name in self.hosted)

    def replace_pieces(self, pieces: Mapping[str, Tensor]) -> None:
        """Replace the tensors that hold this rank's ZeRO pieces of parameters by ``pieces``: name -> tensor. The new
        tensors have the same values, but lie in the buffers from which the parameters are all-gathered.
        """
        self.shards.update(pieces)
        self.held.update({name: piece for name, piece in pieces.items() if name not in self._names})

    def refresh(self) -> None:
        """Copy the tensors that the optimizer updates to the parameters with which the rank computes. Parameters whose
        copies are in host memory are left out, because the program's instructions copy them.
        """
        names = self._refreshed
        if names:
            with torch.no_grad():
                torch._foreach_copy_([self.shards[n] for n in names], [self.held[n] for n in names])

    def current(self) -> Mapping[str, Tensor]:
        """Return all shards by name, with the values after the last optimizer step, in the dtypes in which the rank
        computes.
        """
        self.refresh()
        with torch.no_grad():
            for name in self.hosted.keys() - self._gone:
                self.shards[name].copy_(self.held[name])
                release_pages(self.held[name])
        return _FetchedParameters(self)


class _FetchedParameters(Mapping[str, Tensor]):
    """A mapping from name to this rank's shard, with the values after the last optimizer step. Parameters that are on
    the device only for part of a step are copied to the device when they are read.
    """

    def __init__(self, masters: MasterParameters) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> Tensor:
        masters = self._masters
        return masters._cast_to_compute_dtype(name) if name in masters._gone else masters.shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters.held)

    def __len__(self) -> int:
        return len(self._masters.held)


def count_disk_bytes(rank: RankProgram) -> int:
    """Return the bytes on disk that the float32 copies of the parameters of ``rank`` take; under ZeRO, of the rank's
    pieces.
    """
    return sum(state_sizes(rank.program, name).gradient_piece for name in list_master_types(rank))


def list_master_types(rank: RankProgram) -> Mapping[str, torch.dtype]:
    """Return the trained parameters of ``rank`` with a dtype shorter than float32, which the optimizer updates in a
    wider copy, as a dict: name -> dtype of the copy.
    """
    program = rank.program
    trained = [n for n in rank.states if program.objective == "train" and program.states[n].requires_grad]
    types = {name: dtype_of(program.states[name].dtype) for name in trained}
    return {name: accumulated_in(dtype) for name, dtype in types.items() if accumulated_in(dtype) != dtype}
