"""Save and restore state other than the weights: optimizer state, random state, and residuals of compressed gradients.

``pack_plain_data`` and ``unpack_plain_data`` convert plain data to bytes and back; reading the bytes does not run code.

Residuals are the rounding errors of compressed gradients, which a rank adds to its gradients in the next step. They
belong to messages between two ranks and not to a tensor, so they are restored only for a program that reduces gradients
in the same way. Under any other plan all ranks start from zero, which loses the rounding errors of one step.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from partitioner.runtime.checkpoint.shards import ShardPiece, find_rank_shard, list_shard_pieces, make_whole_piece
from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.state.disk_offload import find_disk_states

STATE = "optimizer.state."


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save, such as a data loader or a learning-rate scheduler.

    A state that is equal on all ranks is stored once, and may be restored on any number of ranks. If the states of
    ranks differ, each rank gets its own state back, and the mesh must be the same.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None


def list_optimizers(optimizers: Optimizers) -> tuple[torch.optim.Optimizer | None, ...]:
    """Return the optimizers in ``optimizers`` (one, a list, or ``None``) as a tuple, which is empty for ``None``. Raise
    :class:`CheckpointError` for other objects.
    """
    if optimizers is None:
        return ()
    found = (
        (optimizers,)
        if hasattr(optimizers, "param_groups") or not isinstance(optimizers, Sequence)
        else tuple(optimizers)
    )
    for optimizer in found:
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise CheckpointError(
                f"expected an optimizer of torch.optim, or a list of optimizers, got {type(optimizer).__name__}"
            )
    return found  # type: ignore[return-value]


def _list_parameters(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def _get_optimizer_kind(optimizer: torch.optim.Optimizer | None) -> str:
    return type(optimizer).__name__


class OptimizerState:
    """The state that optimizers hold for a rank's parameters, by parameter name.

    ``optimizers``: one optimizer or a list; an item is ``None`` if this rank has none of the parameters of that
    optimizer. ``parameters``: name -> parameter. Raise :class:`CheckpointError` if an optimizer has a parameter that is
    not in ``parameters``, if two optimizers have the same parameter, or if there are several optimizers and a trained
    parameter is in none of them.
    """

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizers = list_optimizers(optimizers)
        self.parameters = parameters
        own = {id(p): name for name, p in parameters.items()}
        owners: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            held = _list_parameters(optimizer)
            # an engine yields a parameter without elements on a rank without trainable parameters
            other = [p for p in held if id(p) not in own and p.numel()]
            if other:
                raise CheckpointError(
                    f"{len(other)} of the optimizer's {len(held)} parameters are not this engine's, the first of "
                    f"shape {list(other[0].shape)}: create the optimizer from engine.parameters(), not from the "
                    "model's; other trained parameters need their own optimizer"
                )
            for name in (own[id(p)] for p in held if id(p) in own):
                before = owners.setdefault(id(parameters[name]), number)
                if before != number:
                    raise CheckpointError(
                        f"{name} is a parameter of two optimizers, {before} "
                        f"({_get_optimizer_kind(self.optimizers[before])}) and "
                        f"{number} ({_get_optimizer_kind(optimizer)}), and would be stepped twice: give "
                        f"each parameter to one"
                    )
        self._owners = owners
        missing = [n for n, p in parameters.items() if p.requires_grad and id(p) not in owners]
        if len(self.optimizers) > 1 and missing:
            raise CheckpointError(
                f"{len(missing)} trained parameters are in none of the {len(self.optimizers)} optimizers, the first "
                f"{missing[0]}: add each to one of them, or call requires_grad_(False) on parameters that are not "
                "trained"
            )

    def updates_parameter(self, name: str) -> bool:
        """Return whether one of the optimizers updates the parameter called ``name`` in its step."""
        return id(self.parameters.get(name)) in self._owners

    def owner(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer that holds the state of the parameter called ``name``; ``None`` if none does. If there
        is only one optimizer, it is returned for every parameter, even one that it does not update.
        """
        if len(self.optimizers) == 1:
            return self.optimizers[0]
        number = self._owners.get(id(self.parameters[name]))
        return None if number is None else self.optimizers[number]

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state tensors for the parameter called ``name``, as a dict: key (such as ``exp_avg``)
        -> tensor.
        """
        optimizer = self.owner(name)
        held = {} if optimizer is None else optimizer.state.get(self.parameters[name], {})
        return {k: v if isinstance(v, Tensor) else torch.tensor(v) for k, v in held.items() if v is not None}

    def pieces(self, rank: RankProgram, name: str) -> list[ShardPiece]:
        """Return this rank's part of the optimizer state for the parameter called ``name``, as named rectangular parts
        for a checkpoint. ``rank``: the program of this rank.

        A state may be a number, or have the parameter's shape and be sharded like it. For a state of another shape,
        such as the row and column factors of Adafactor, raise :class:`CheckpointError` unless this rank holds the whole
        parameter.
        """
        data, held = rank.program.states[name], find_rank_shard(rank.program, name, rank.rank)
        found: list[ShardPiece] = []
        for key, tensor in self.get_tensors(name).items():
            if self.has_other_shape(name, tensor):
                check_whole(rank, name, key, tensor)
                found.append(make_whole_piece(STATE, name, tensor, f".{key}"))
            else:
                found += list_shard_pieces(STATE, name, data, held, tensor, f".{key}")
        return found

    def allocate(
        self, name: str, key: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return an uninitialised tensor of ``shape`` and ``dtype`` for the optimizer state ``key``, such as
        ``exp_avg``, of the parameter called ``name``. If the optimizer keeps its states on disk and the tensor has
        dims, it is on disk; otherwise on ``device``.
        """
        keeper = find_disk_states(self.owner(name))
        if keeper is not None and len(shape):
            return keeper.allocate(self.parameters[name], key, shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def has_other_shape(self, name: str, tensor: Tensor) -> bool:
        """Return whether ``tensor``, an optimizer state of the parameter called ``name``, has dims and another shape
        than this rank's part of the parameter, so that it cannot be sharded like the parameter.
        """
        return bool(tensor.dim()) and tensor.shape != self.parameters[name].shape

    def replace(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Replace the optimizer state of the parameter called ``name`` by ``state``, a dict: key -> tensor. If
        ``state`` is empty, the optimizer state is removed. 0-dimensional tensors stay on the CPU unless the optimizer
        is fused or capturable.
        """
        parameter, optimizer = self.parameters[name], self.owner(name)
        if optimizer is None:
            return
        if not state:
            optimizer.state.pop(parameter, None)
            return
        on_device = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
        optimizer.state[parameter] = {
            k: t.to(parameter.device) if t.dim() or on_device else t for k, t in state.items()
        }


def check_whole(rank: RankProgram, name: str, key: str, tensor: Tensor) -> None:
    """Raise :class:`CheckpointError` if this rank does not hold the whole parameter called ``name``, because the
    optimizer state ``tensor`` with the key ``key`` has another shape than the parameter and thus cannot be resharded.
    ``rank``: the program of this rank.
    """
    data = rank.program.states[name]
    if data.parts or data.zero_axes or any(shard.layout.is_shard for shard in rank.shards(name)):
        raise CheckpointError(
            f"the optimizer's state {key!r} of {name} has shape {list(tensor.shape)}, but this rank has only "
            f"a shard or a stack of the parameter, of shape {list(data.shape)}: then only numbers and states "
            "of the parameter's shape can be saved; use this optimizer with a plan that shards nothing"
        )


def collect_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy (if imported), torch on the CPU, and the CUDA
    ``device``, as a dict with the keys ``python``, ``numpy``, ``torch`` and ``cuda``, as far as they exist.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def find_wrong_state(training: Any) -> str:
    """Return why ``training``, the saved data of a training run other than tensors, cannot be restored, as text; empty
    if it can. It must be a dict with the keys ``steps``, ``seed``, ``scale``, ``extra``, and ``random`` (states of
    random generators).
    """
    if not isinstance(training, dict):
        return f"expected a dict, got {type(training).__name__}"
    kinds = {"steps": int, "seed": int, "extra": dict, "random": dict}
    for name, kind in kinds.items():
        if type(training.get(name)) is not kind:
            return f"expected {kind.__name__} under {name!r}, got {type(training.get(name)).__name__}"
    if type(training.get("optimizer_steps", 0)) is not int or not isinstance(training.get("scale"), dict | None):
        return "expected a number under 'optimizer_steps', and a dict or nothing under 'scale'"
    of, states = training["random"].get("of"), training["random"].get("states")
    if not (isinstance(of, list) and of and isinstance(states, list) and states):
        return "expected lists under 'of' and 'states' of 'random'"
    if not all(type(index) is int and 0 <= index < len(states) for index in of):
        return "expected under 'of' of 'random' indices of its 'states'"
    for state in states:
        try:
            version, internal, gauss = state["python"]
            random.Random().setstate((version, tuple(internal), gauss))
            torch.Generator().set_state(state["torch"])
            if "numpy" in state and "numpy" in sys.modules:
                name, keys, *rest = state["numpy"]
                sys.modules["numpy"].random.RandomState().set_state((name, keys.numpy().astype("uint32"), *rest))
        except (TypeError, ValueError, KeyError, RuntimeError, OverflowError, AttributeError) as error:
            return f"expected states of random generators under 'random' ({error})"
    return ""


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the random generators of Python, NumPy, torch on the CPU and the CUDA ``device`` to ``state``, a dict with
    the keys ``python`` and ``torch``, and perhaps ``numpy`` and ``cuda``. Generators without a key are not changed.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), Tensor, torch.dtype, torch.device, torch.Size)


def pack_plain_data(content: Mapping[str, Any], names: str) -> bytes:
    """Return the dict ``content`` serialised to bytes. ``names`` describes it in error messages. Raise
    :class:`CheckpointError` for values other than numbers, strings, tensors, lists, tuples and dicts.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(content), file)
        unpack_plain_data(file.getvalue())
    except Exception as error:
        told = _find_unsupported_value(content) or str(error).split("\n")[0]
        raise CheckpointError(
            f"the state of {names} cannot be saved ({told}): it may contain numbers, strings, tensors, lists, "
            "tuples and "
            "dicts; change its state_dict() so that it returns only these"
        ) from error
    return file.getvalue()


def unpack_plain_data(content: bytes) -> dict[str, Any]:
    """Return the dict in the bytes ``content``, which :func:`pack_plain_data` wrote, with tensors on the CPU. No code
    from ``content`` is run. If the bytes are damaged, raise the exception of ``torch.load``.
    """
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")  # type: ignore[no-any-return]


def is_equal_data(one: Any, other: Any) -> bool:
    """Return whether ``one`` and ``other``, two pieces of plain data (numbers, strings, tensors, lists, tuples, dicts),
    are equal. Tensors must have the same dtype and elements. Two NaN numbers count as equal.
    """
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal_data(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal_data, one, other))
    return bool(one == other) or (one != one and other != other)  # NaN equals NaN


def _find_unsupported_value(value: Any, path: str = "") -> str:
    """Return path and type, as text, of the first part of ``value`` that is not plain data; empty if there is none.
    ``path``: path of ``value`` in the whole data, as keys joined by dots.
    """
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
        parts = dict(enumerate(value)).items()
    else:
        plain = type(value) in _PLAIN_TYPES or isinstance(value, Tensor)
        return "" if plain else f"{path} is of type {type(value).__module__}.{type(value).__qualname__}"
    return next((told for k, v in parts if (told := _find_unsupported_value(v, f"{path}.{k}" if path else str(k)))), "")


RESIDUAL = "residual."


def hash_reduction(program: Program) -> str:
    """Return a hash of the properties of ``program`` that determine how it reduces gradients: its mesh, ZeRO, layouts,
    and buckets; an empty string if the program does not compress gradients. Stored rounding errors of compressed
    gradients can be restored under another plan only if the hashes are equal.
    """
    if not any(bucket.compression for stage in program.stages for bucket in stage.buckets):
        return ""
    buckets = [[b.model_dump() for b in stage.buckets] for stage in program.stages]
    shapes = {n: (s.shape, s.layout, s.expert_layout, s.zero_axes) for n, s in program.states.items()}
    way = [program.mesh, program.etp, program.zero, program.dp_shard, buckets, sorted(shapes.items())]
    return hashlib.sha256(json.dumps(way).encode()).hexdigest()[:32]


def list_residual_pieces(rank: RankProgram, residuals: Mapping[str, Tensor]) -> list[ShardPiece]:
    """Return this rank's rounding errors of compressed gradients as named parts for a checkpoint. ``rank``: the program
    of this rank. ``residuals``: name of the compressed transfer (a collective of the program) -> flat tensor of its
    rounding errors.
    """
    return [
        ShardPiece(f"{RESIDUAL}{rank.rank}.{place}", tuple(tensor.shape), (0,), tensor)
        for place, tensor in residuals.items()
    ]


def load_residuals(
    folder: Path, rank: RankProgram, residuals: Mapping[str, Tensor], training: Mapping[str, Any]
) -> None:
    """Fill ``residuals``, this rank's rounding errors of compressed gradients, from the checkpoint ``folder``. Set them
    to zero if the checkpoint's plan reduced gradients differently. ``rank``: the program of this rank. ``residuals``:
    name of the compressed transfer -> flat tensor. ``training``: the checkpoint's data other than tensors; its entry
    ``residuals`` is a hash of how the plan reduced gradients.
    """
    if not residuals:
        return
    if training.get("residuals") == hash_reduction(rank.program):
        from partitioner.runtime.checkpoint.dcp_files import ShardReader

        ShardReader(folder).read(list_residual_pieces(rank, residuals))
        return
    for tensor in residuals.values():
        tensor.zero_()
