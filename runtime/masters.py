"""Mixed precision: float32 copies of the parameters that a rank computes with in a shorter type.

The optimizer steps the copies, of which the short parameters are made anew before every step; small updates are not
lost in the short type (Micikevicius et al. 2018). Checkpoints hold the copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from passes.gradients import accumulated_in
from passes.serialize import dtype_of
from runtime.program import RankProgram
from runtime.state import load_states
from runtime.weights import Weights


class Masters:
    """What a rank computes with, ``shards``, and what it keeps, ``held``: the same, but for the copies in float32."""

    def __init__(self, rank: RankProgram, weights: Weights | None, device: torch.device) -> None:
        wide = master_types(rank)
        self.held = load_states(rank, weights, device, wide)
        self.shards = {
            name: tensor.to(dtype_of(rank.program.states[name].dtype)) if name in wide else tensor
            for name, tensor in self.held.items()
        }
        self._names = list(wide)
        self._short = [self.shards[name] for name in wide]
        self._wide = [self.held[name] for name in wide]

    def take(self, pieces: Mapping[str, Tensor]) -> None:
        """Parameters that ranks share are these now: the same numbers, where they are gathered from."""
        self.shards.update(pieces)
        self.held.update({name: piece for name, piece in pieces.items() if name not in self._names})
        self._short = [self.shards[name] for name in self._names]

    def refresh(self) -> None:
        """Make the short parameters anew."""
        if self._wide:
            with torch.no_grad():
                torch._foreach_copy_(self._short, self._wide)


def master_types(rank: RankProgram) -> Mapping[str, torch.dtype]:
    """The parameters of ``rank`` that have a copy, and its type: those that are trained in less than float32."""
    program = rank.program
    trained = [n for n in rank.states if program.objective == "train" and program.states[n].requires_grad]
    types = {name: dtype_of(program.states[name].dtype) for name in trained}
    return {name: accumulated_in(dtype) for name, dtype in types.items() if accumulated_in(dtype) != dtype}
