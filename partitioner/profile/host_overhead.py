"""Measure the time that a host takes to issue an operator.

The engine trains a small decoder whose kernels take less time than the host needs to issue them. The number of issued
operators comes from the cost model: it equals the estimated step time in seconds on an imaginary device that takes one
second to issue an operator and no time to run it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.profile.rank import open_device
from partitioner.profile.timer import host_seconds
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.engine.engine import Engine
from partitioner.topology import Topology

_HEADS, _SIZE, _TOKENS, _LAYERS = 2, 16, 16, 2

_MICROBATCHES = 16  # so many that work that is done once a step hardly counts
_STEPS = 3  # untimed steps before the first timed one


@dataclass(frozen=True)
class Issuing:
    """A plan for one rank whose training step is timed to find how long the host needs to issue one operator. ``path``:
    the plan's file. ``operators``: number of operators that the host issues in a step.
    """

    path: str
    operators: float


@contextmanager
def open_issuing_plan() -> Iterator[Issuing]:
    """Yield a plan of a small decoder for one rank, with the number of operators that the host issues in its training
    step. The plan's file is deleted when the context ends."""
    types = {"told": {"memory": 1 << 40, "peak": {"fp32": 1e24}, "memory_bandwidth": 1e18, "dispatch": 1.0}}
    topology = Topology(name="told", nodes=({"type": "told", "devices": 1},), types=types)
    with torch.random.fork_rng():
        constraints = Constraints(microbatch_size=1, recompute="none", execution="eager")
        plan = partition(_Decoder(), topology, (_build_batch(),), constraints=constraints)
    with tempfile.TemporaryDirectory() as folder:
        yield Issuing(str(plan.save(Path(folder, "plan.json"))), plan.estimate.step_time)


def time_issuing(plan: Issuing, kind: str, repeats: int) -> list[float]:
    """Return the seconds that the host needs to issue one operator to the device: one entry for each of ``repeats``
    training steps of ``plan``, a plan for one rank. Ranks other than rank 0 run nothing and return an empty list.
    ``kind``: the device, ``cuda`` or ``cpu``.
    """
    if dist.get_rank():
        return []
    device = open_device(kind)
    engine = Engine(plan.path, communicator=TorchCommunicator(1, device))
    batch = (_build_batch().to(device),)
    for _ in range(_STEPS):
        engine.step(batch)
    return [host_seconds(lambda: engine.step(batch), device) / plan.operators for _ in range(repeats)]


def _build_batch() -> Tensor:
    """Return a batch of zeros, shape ``[16 microbatches of one sequence, 16 tokens, 32 channels]``."""
    return torch.zeros(_MICROBATCHES, _TOKENS, _HEADS * _SIZE)


class _Layer(nn.Module):
    """A small decoder layer with random weights: attention with rotary embedding and a gated MLP, each after an RMS
    norm."""

    def __init__(self, width: int) -> None:
        """Create the weights of the layer. ``width``: number of channels."""
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(7))
        self.turn = nn.Buffer(torch.ones(2, _TOKENS, _SIZE))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer for ``x``; both have the shape ``[batch, tokens, channels]``."""
        first, second = self.norms
        q, k, v, out, gate, up, down = self.weights
        hidden = _apply_rms_norm(x, first)
        query, key = (self._apply_rotary_embedding(_split_heads(F.linear(hidden, w))) for w in (q, k))
        found = F.scaled_dot_product_attention(query, key, _split_heads(F.linear(hidden, v)), is_causal=True)
        x = x + F.linear(found.transpose(1, 2).flatten(2), out)
        hidden = _apply_rms_norm(x, second)
        return x + F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    def _apply_rotary_embedding(self, x: Tensor) -> Tensor:
        """Return ``x``, of shape ``[batch, heads, tokens, channels of a head]``, with a rotary embedding by constant
        angles."""
        left, right = x.chunk(2, -1)
        return x * self.turn[0] + torch.cat((-right, left), -1) * self.turn[1]


class _Decoder(nn.Module):
    """A decoder of two small layers, whose kernels take less time than the host needs to issue them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(_HEADS * _SIZE) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar loss for ``x`` of shape ``[batch, tokens, channels]``: the mean square of the last layer's
        output."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _apply_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` divided by the root mean square of its last dim and multiplied by ``weight``."""
    scaled: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled * weight


def _split_heads(x: Tensor) -> Tensor:
    """Return ``x``, of shape ``[batch, tokens, channels]``, as ``[batch, heads, tokens, channels of a head]``."""
    return x.view(len(x), _TOKENS, _HEADS, _SIZE).transpose(1, 2)
