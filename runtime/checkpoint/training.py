"""What a checkpoint holds besides tensors: steps, hyperparameters, random state, where the data are."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runtime.checkpoint.boxes import Piece, held_by, pieces
from runtime.errors import CheckpointError
from runtime.program import RankProgram

STATE = "optimizer.state."


@runtime_checkable
class Stateful(Protocol):
    """A data loader, a learning-rate scheduler: anything that tells its state and takes it back.

    The state is the same on all ranks: the first one's is kept, and given to all, however many they are.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class OptimizerState:
    """The state that an optimizer holds for a rank's parameters, by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self._stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def steps(self, name: str) -> bool:
        """Whether this optimizer's step is what changes a parameter."""
        return id(self.parameters.get(name)) in self._stepped

    def of(self, name: str) -> dict[str, Tensor]:
        """The tensors held for one parameter. Raises :class:`CheckpointError` on one that is not sharded as it is."""
        parameter = self.parameters[name]
        held = {
            k: v if isinstance(v, Tensor) else torch.tensor(v)
            for k, v in self.optimizer.state.get(parameter, {}).items()
            if v is not None
        }
        for key, tensor in held.items():
            if tensor.dim() and tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer's {key!r} of {name} has shape {list(tensor.shape)}, the parameter's shard "
                    f"{list(parameter.shape)}: only state of the parameter's shape, or numbers, can be saved"
                )
        return held

    def pieces(self, rank: RankProgram, name: str) -> list[Piece]:
        """What this rank holds for one parameter."""
        data, held = rank.program.states[name], held_by(rank.program, name, rank.rank)
        return [p for key, t in self.of(name).items() for p in pieces(STATE, name, data, held, t, f".{key}")]

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Set what is held for one parameter. Numbers stay on the CPU where the optimizer has them there."""
        parameter = self.parameters[name]
        on_device = any(g.get("capturable") or g.get("fused") for g in self.optimizer.param_groups)
        self.optimizer.state[parameter] = {
            k: t.to(parameter.device) if t.dim() or on_device else t for k, t in state.items()
        }

    def groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group."""
        plain = (bool, int, float, str, type(None), list, tuple, Tensor)
        return [
            {k: v for k, v in group.items() if k != "params" and isinstance(v, plain)}
            for group in self.optimizer.param_groups
        ]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Raises :class:`CheckpointError` where the optimizer has another number of groups."""
        have = len(self.optimizer.param_groups)
        if len(groups) != have:
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has {have}: make it as the "
                "one that was saved, with its groups in the same order"
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators that a training script draws from: Python's, NumPy's, torch's, the device's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def packed(content: Mapping[str, Any], names: str) -> bytes:
    """``content`` as bytes that :func:`unpacked` reads. Raises :class:`CheckpointError` for what is no plain data."""
    file = io.BytesIO()
    try:
        torch.save(dict(content), file)
        unpacked(file.getvalue())
    except Exception as error:
        raise CheckpointError(
            f"the state of {names} cannot be saved ({error}): it may hold numbers, strings, tensors, lists, tuples and "
            "dicts; let its state_dict() return only such"
        ) from error
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """Raises what ``torch.load`` raises."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")  # type: ignore[no-any-return]
