"""What an optimizer steps where that is not what a rank computes with: copies in float32, copies in host memory.

Of parameters that a rank computes with in a shorter type it keeps float32 copies (mixed precision: small updates are
not lost in the short type, Micikevicius et al. 2018). Where the program offloads its optimizer, copies of all trained
parameters are in host memory, whatever their type, and the optimizer runs there (ZeRO-Offload, Ren et al. 2021). Where
it keeps optimizer states on disk, the float32 copies of shorter parameters are there with them. The optimizer steps the
copies, of which the parameters are made anew before they are read. Checkpoints hold the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from passes.gradients import accumulated_in
from passes.serialize import dtype_of
from runtime.disk import Disk, forget
from runtime.offload import Copier, host_states
from runtime.program import RankProgram
from runtime.state import load_states
from runtime.state_bytes import state_sizes
from runtime.weights import Weights


class Masters:
    """What a rank computes with, ``shards``, and what it keeps, ``held``: the same, but for copies.

    ``hosted``: the copies that are in host memory, whose parameters the program's FETCHes make anew.
    """

    def __init__(
        self,
        rank: RankProgram,
        weights: Weights | None,
        device: torch.device,
        copier: Copier,
        disk: Disk | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        wide = master_types(rank)
        hosted = host_states(rank.program, rank.stage_index)
        first = torch.device("cpu") if hosted else device

        def placed(name: str, tensor: Tensor) -> Tensor:
            if name not in hosted:
                return tensor.to(device)
            if disk is None or name not in wide:
                return copier.empty(tensor.shape, tensor.dtype).copy_(tensor)
            on_disk = disk.empty(tensor.shape, tensor.dtype).copy_(tensor)
            disk.behind([on_disk])
            return on_disk

        self.held = load_states(rank, weights, first, wide, placed)
        self.hosted = {name: tensor for name, tensor in self.held.items() if name in hosted}
        self._gone = frozenset(hosted) if "parameters" in rank.program.offload else frozenset[str]()
        self._names = frozenset(name for name in self.held if name in wide or name in hosted)
        self._refreshed = [name for name in wide if name not in hosted]
        self.shards = {name: self._shard(name) for name in self.held}

    def _shard(self, name: str) -> Tensor:
        state = self._rank.program.states[name]
        if name in self._gone and not state.zero_axes:  # of its shape, without its memory
            nothing = torch.empty((), dtype=dtype_of(state.dtype), device=self._device)
            return nothing.expand(self.held[name].shape)
        return self._short(name) if name in self._names else self.held[name]

    def _short(self, name: str) -> Tensor:
        """The parameter as the rank computes with it."""
        dtype = dtype_of(self._rank.program.states[name].dtype)
        return self.held[name].to(self._device, dtype, copy=name in self.hosted)

    def take(self, pieces: Mapping[str, Tensor]) -> None:
        """Parameters that ranks share are these now: the same numbers, where they are gathered from."""
        self.shards.update(pieces)
        self.held.update({name: piece for name, piece in pieces.items() if name not in self._names})

    def refresh(self) -> None:
        """Make anew the parameters that no FETCH does."""
        names = self._refreshed
        if names:
            with torch.no_grad():
                torch._foreach_copy_([self.shards[n] for n in names], [self.held[n] for n in names])

    def current(self) -> Mapping[str, Tensor]:
        """All shards as the rank computes with them, after what the optimizer has done."""
        self.refresh()
        with torch.no_grad():
            for name in self.hosted.keys() - self._gone:
                self.shards[name].copy_(self.held[name])
                forget(self.held[name])
        return _Current(self)


class _Current(Mapping[str, Tensor]):
    """Parameters that are in host memory between their uses come when they are asked for."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> Tensor:
        masters = self._masters
        return masters._short(name) if name in masters._gone else masters.shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters.held)

    def __len__(self) -> int:
        return len(self._masters.held)


def disk_bytes(rank: RankProgram) -> int:
    """The bytes of what a rank keeps on disk from the start: the copies in float32, or its pieces of them."""
    return sum(state_sizes(rank.program, name).gradient_piece for name in master_types(rank))


def master_types(rank: RankProgram) -> Mapping[str, torch.dtype]:
    """The parameters of ``rank`` that have a wider copy, and its type: those that are trained in less than float32."""
    program = rank.program
    trained = [n for n in rank.states if program.objective == "train" and program.states[n].requires_grad]
    types = {name: dtype_of(program.states[name].dtype) for name in trained}
    return {name: accumulated_in(dtype) for name, dtype in types.items() if accumulated_in(dtype) != dtype}
