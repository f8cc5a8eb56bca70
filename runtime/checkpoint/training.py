"""What a checkpoint holds besides tensors: steps, hyperparameters, random state, where the data are."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runtime.checkpoint.boxes import Piece, held_by, pieces, whole_piece
from runtime.errors import CheckpointError
from runtime.program import RankProgram

STATE = "optimizer.state."


@runtime_checkable
class Stateful(Protocol):
    """A data loader, a learning-rate scheduler: anything that tells its state and takes it back.

    A state that is the same on all ranks is kept once and given to all, however many they are. Of others each rank gets
    its own back, under the same mesh.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class OptimizerState:
    """The state that an optimizer holds for a rank's parameters, by name.

    Raises :class:`CheckpointError` where it has other parameters: they would not be saved, and if they are the model's
    own, an engine's are not trained.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._stepped = {id(p) for p in stepped}
        other = [p for p in stepped if id(p) not in {id(own) for own in parameters.values()}]
        if other:
            raise CheckpointError(
                f"{len(other)} of the optimizer's {len(stepped)} parameters are not this engine's, the first of shape "
                f"{list(other[0].shape)}: make the optimizer of engine.parameters(), not of the model's; what is "
                "trained besides needs an optimizer of its own"
            )

    def steps(self, name: str) -> bool:
        """Whether this optimizer's step is what changes a parameter."""
        return id(self.parameters.get(name)) in self._stepped

    def of(self, name: str) -> dict[str, Tensor]:
        """The tensors held for one parameter."""
        return {
            k: v if isinstance(v, Tensor) else torch.tensor(v)
            for k, v in self.optimizer.state.get(self.parameters[name], {}).items()
            if v is not None
        }

    def pieces(self, rank: RankProgram, name: str) -> list[Piece]:
        """What this rank holds for one parameter: numbers, what is cut as the parameter is, and of a parameter that is
        whole here tensors of any shape (factors of a matrix, as Adafactor's).

        Raises :class:`CheckpointError` on others.
        """
        data, held = rank.program.states[name], held_by(rank.program, name, rank.rank)
        found: list[Piece] = []
        for key, tensor in self.of(name).items():
            if self.of_own_shape(name, tensor):
                check_whole(rank, name, key, tensor)
                found.append(whole_piece(STATE, name, tensor, f".{key}"))
            else:
                found += pieces(STATE, name, data, held, tensor, f".{key}")
        return found

    def of_own_shape(self, name: str, tensor: Tensor) -> bool:
        """Whether what is held for a parameter is neither a number nor of the parameter's shape."""
        return bool(tensor.dim()) and tensor.shape != self.parameters[name].shape

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Set what is held for one parameter. Numbers stay on the CPU where the optimizer has them there."""
        parameter = self.parameters[name]
        if not state:
            self.optimizer.state.pop(parameter, None)
            return
        on_device = any(g.get("capturable") or g.get("fused") for g in self.optimizer.param_groups)
        self.optimizer.state[parameter] = {
            k: t.to(parameter.device) if t.dim() or on_device else t for k, t in state.items()
        }


def check_whole(rank: RankProgram, name: str, key: str, tensor: Tensor) -> None:
    """Raise :class:`CheckpointError` where a state of its own shape belongs to a part of a parameter."""
    data = rank.program.states[name]
    if data.parts or data.zero_axes or any(shard.layout.is_shard for shard in rank.shards(name)):
        raise CheckpointError(
            f"the optimizer's {key!r} of {name} has shape {list(tensor.shape)}, and of the parameter, of shape "
            f"{list(data.shape)}, this rank has a part or a stack: only numbers and what has the parameter's shape can "
            "be kept then; use such an optimizer with a plan that shards nothing"
        )


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
