"""Update buffers that forward changes, with new values at the end of a step or with sums over its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.program.program import RankProgram, list_updated_states
from partitioner.runtime.state.gradients import group_states_by_ranks

_SHORT = (torch.float16, torch.bfloat16)


class BufferUpdates:
    """The buffers of a rank that a training step changes, such as running statistics. ``states``: name -> parameter or
    buffer that this rank holds. ``communicator``: connects this rank with the others. If ``keep`` is set, the values
    before each update are stored, so that the step can be repeated.
    """

    def __init__(self, rank: RankProgram, states: Mapping[str, Tensor], communicator: Communicator) -> None:
        self.rank, self.communicator = rank, communicator
        self.keep = False
        self._held = {name: states[name] for name in list_updated_states(rank.program) if name in rank.states}
        self._before: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        kept = {name for name in self._held if rank.program.states[name].keeps is not None}
        self.added = {self._find_update_value(name) for name in kept}  # values that are summed over microbatches

    def begin(self) -> None:
        self._sums = {}

    def add(self, microbatch: int, value: str, part: Tensor) -> None:
        """Add ``part``, the value of one microbatch of the program's tensor named ``value``, to the sum over
        microbatches from which a buffer is updated at the end of the step. Dtypes shorter than float32 are summed in
        float32. ``microbatch`` is not used.
        """
        part = part.float() if part.dtype in _SHORT else part
        self._sums[value] = self._sums[value] + part if value in self._sums else part.clone()

    def write(self, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Set the buffers ``names`` to their new values at the end of a step. ``values``: the new values that this
        pipeline stage computed, by the name of the value in the program. If several stages share a buffer, one of them
        computes the new value, and all ranks of these stages receive it.
        """
        if self.keep:
            self._before |= {name: self._held[name].clone() for name in names}
        values = {**values, **self._sum_updates(names)}
        for ranks, shared in group_states_by_ranks(self.rank, names).items():
            if len(ranks) == 1:
                held = [self._held[name] for name in shared]
                torch._foreach_copy_(held, [values[self._find_update_value(name)] for name in shared])
            else:
                self._update_tied_buffers(ranks, shared, values)

    def _sum_updates(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the new values of those buffers in ``names`` that this rank updates from a sum, as a dict: name of the
        new value in the program -> tensor. A new value is the sum over microbatches and ``dp`` ranks, plus the old
        value of the buffer times a factor from the program.
        """
        here = [name for name in names if self._find_update_value(name) in self._sums]
        if not here:
            return {}
        group = self.communicator.group(self.rank.group("dp"))
        sums = [group.all_reduce(self._sums.pop(self._find_update_value(name)).contiguous()) for name in here]
        made = {}
        for name, pending in zip(here, sums, strict=True):
            held, keeps, added = self._held[name], self.rank.program.states[name].keeps, pending.wait()
            if keeps:  # 0 times a NaN or infinity would be NaN
                added = added + (held if keeps == 1.0 else keeps * held)
            made[self._find_update_value(name)] = added.to(held.dtype)
        return made

    def _update_tied_buffers(self, ranks: tuple[int, ...], names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Set the buffers ``names``, which several pipeline stages share, on all ``ranks`` to the value that one of
        these ranks has computed. ``values``: name of the new value in the program -> tensor, on the rank that computed
        it; empty on other ranks.
        """
        group = self.communicator.group(ranks)
        sums = []
        for name in names:
            held, value = self._held[name], values.get(self._find_update_value(name))
            made = torch.zeros_like(held) if value is None else value.clone()
            # byte by byte: exact for every type
            sums.append(group.all_reduce(made.contiguous().reshape(-1).view(torch.uint8)))
        for name, pending in zip(names, sums, strict=True):
            held = self._held[name]
            held.copy_(pending.wait().view(held.dtype).view(held.shape))

    @contextmanager
    def repeat_last(self) -> Iterator[None]:
        """Return a context manager in which the last step can be repeated: inside, the buffers that a step changes have
        the values from before the last step, which must have been stored (``keep``). On exit the current values are
        restored.
        """
        after = {name: held.clone() for name, held in self._held.items()}
        before, keep, self.keep = self._before, self.keep, False
        self._copy_into_buffers(before)
        try:
            yield
        finally:
            self.keep = keep
            self._copy_into_buffers(after)

    def _copy_into_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._held[name].copy_(value)

    def _find_update_value(self, name: str) -> str:
        value = self.rank.program.states[name].update
        assert value is not None, name
        return value
