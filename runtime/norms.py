"""The norm of the whole model's gradient, from shards: every element counted once."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from passes.serialize import dtype_of
from runtime.errors import LaunchError
from runtime.gradients import Gradients
from runtime.groups import Communicator
from runtime.meshes import AXES
from runtime.program import RankProgram

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_(rank: RankProgram, gradients: Gradients, communicator: Communicator, max_norm: float) -> Tensor:
    """Scale ``gradients`` in place so that the whole norm is at most ``max_norm``. Returns the norm before.

    Raises :class:`LaunchError` for a negative norm, which would turn the gradients round, and for what is no number.
    """
    if not isinstance(max_norm, Real | Tensor):
        raise LaunchError(f"the largest norm must be a number, got {type(max_norm).__name__}")
    if not max_norm >= 0:
        raise LaunchError(f"the largest norm must be 0 or more, got {max_norm}; leave clipping out to have none")
    norm = total_norm(rank, gradients, communicator)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for view in gradients.owned.values():
        view.mul_(scale.to(view.device, view.dtype))
    return norm


def total_norm(rank: RankProgram, gradients: Gradients, communicator: Communicator) -> Tensor:
    """The 2-norm of all gradients of all ranks; the same on all ranks."""
    device = communicator.device
    owned = [view for name, view in gradients.owned.items() if _counts(rank, name)]
    # whatever this rank has of it: all return the same number in the same type
    double = any(s.requires_grad and dtype_of(s.dtype) == torch.float64 for s in rank.program.states.values())
    squares = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
    for norm in torch._foreach_norm([v.to(squares.dtype) for v in owned]) if owned else ():
        squares += (norm * norm).to(device)
    # All ranks add up the same numbers in the same order.
    total = squares.to(torch.float64)
    return communicator.group(rank.group(*_axes(rank))).all_reduce(total).wait().sqrt().to(squares.dtype)


def _axes(rank: RankProgram) -> tuple[str, ...]:
    """Where gradients differ: over ``dp`` and ``cp`` only those of experts do, and pieces."""
    return AXES if rank.program.size("ep") > 1 or rank.program.zero else ("pp", "tp")


def _counts(rank: RankProgram, state: str) -> bool:
    """Whether this rank's shard is the one that counts: replicas over tp, and tied stages, count once."""
    data = rank.program.states[state]
    first_stage = not data.stages or rank.stage_index == min(data.stages)
    if "dp" in _axes(rank):
        return first_stage and rank.is_first_holder(state)
    return first_stage and (rank.states[state].is_shard or rank.coordinates["tp"] == 0)
