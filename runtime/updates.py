"""Buffers that forward changes take their new values, at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.gradients import sharing
from runtime.groups import Communicator
from runtime.program import Program, RankProgram


def updated_states(program: Program) -> list[str]:
    """The buffers that a step changes."""
    return [name for name, state in program.states.items() if state.update is not None]


class Updates:
    """A rank's buffers that a step changes; ``states`` are what it holds."""

    def __init__(self, rank: RankProgram, states: Mapping[str, Tensor], communicator: Communicator) -> None:
        self.rank, self.communicator = rank, communicator
        self._held = {name: states[name] for name in updated_states(rank.program) if name in rank.states}

    def write(self, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Write the new values of ``names``, which are among ``values`` where this stage makes them."""
        for ranks, shared in sharing(self.rank, names).items():
            if len(ranks) == 1:
                for name in shared:
                    self._held[name].copy_(values[self._value(name)])
            else:
                self._together(ranks, shared, values)

    def _together(self, ranks: tuple[int, ...], names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """All of ``ranks`` take what one of them has: the others add nothing to it."""
        group = self.communicator.group(ranks)
        sums = []
        for name in names:
            held, value = self._held[name], values.get(self._value(name))
            made = torch.zeros_like(held) if value is None else value.clone()
            # byte by byte: exact for every type
            sums.append(group.all_reduce(made.contiguous().reshape(-1).view(torch.uint8)))
        for name, pending in zip(names, sums, strict=True):
            held = self._held[name]
            held.copy_(pending.wait().view(held.dtype).view(held.shape))

    def _value(self, name: str) -> str:
        value = self.rank.program.states[name].update
        assert value is not None, name
        return value
