"""Small jobs on clusters whose devices, nodes or links may differ, and the step times of all their placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Topology
from partitioner.candidate import MeshCandidate
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.shard.fold import fold
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.placement.placement import BestPlacement, Placements, identify_equal_cost
from partitioner.solve.sharding.batch import shard_batch
from partitioner.topology import loads


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers that are all alike, and a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def stack(width: int = 4096, layers: int = 8) -> nn.Module:
    with torch.device("meta"):
        return Stack(width, layers).to(torch.bfloat16)


def tokens(batch: int, length: int, width: int = 4096) -> tuple[Tensor, ...]:
    return (torch.empty(batch, length, width, dtype=torch.bfloat16, device="meta"),)


@cache
def small_model(batch: int = 8, length: int = 512) -> tuple[FoldedModel, Any]:
    model = fold(normalize(capture(stack(1024, 6), tokens(batch, length, 1024))))
    mark_gradients(model)
    return model, shard_batch(model, batch)


def job(topology: Topology, batch: int = 8, length: int = 512, **pinned: int) -> Job:
    model, by_sample = small_model(batch, length)
    return Job(model, by_sample, batch, topology, Constraints(**pinned), True, "adamw", "bf16")


class Fixed(Placements):
    """One placement and no other."""

    def best(
        self, mesh: Mapping[str, int], placement_evaluator: Callable[[PlacedMesh], tuple[float, Any]], *_: object
    ) -> BestPlacement[Any]:
        machine = PlacedMesh(self.topology, mesh, self.precision, self.fixed)
        return BestPlacement(machine, *placement_evaluator(machine))

    fixed: np.ndarray[Any, np.dtype[np.int64]]


def times_of_all(work: Job, candidate: MeshCandidate) -> list[float]:
    """The step times of all placements, each kind once."""
    evaluator = CandidateEvaluator(work)
    placements = Fixed(work.topology, "bf16")
    evaluator.placements = placements
    seen, times = set(), []
    for order in permutations(range(work.topology.num_devices)):
        placements.fixed = np.array(order)
        mark = identify_equal_cost(PlacedMesh(work.topology, candidate.grid, "bf16", placements.fixed))
        if mark not in seen:
            seen.add(mark)
            with suppress(PartitionError):
                times.append(evaluator.solve(candidate).estimate.step_time)
    return times


def grid(nodes: int, devices: int, nics: int | None = None) -> str:
    """Nodes whose hosts take no time: a model as small as the tests' would be bound by nothing else."""
    return f"""
types: {{a100-80gb: {{like: a100-80gb, dispatch: 0, communicator: 0}}}}
nodes: [{{type: a100-80gb, devices: {devices}, count: {nodes}, nics: {nics or devices}}}]
levels: [{{name: nvlink, like: nvlink3, nodes: 1}}, {{name: network, bandwidth: 5 GB/s, latency: 19 us}}]
"""


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Four devices on one to four nodes, some of which differ."""
    per_node = draw(st.sampled_from([1, 2, 4]))
    kinds = st.sampled_from(["a100-80gb", "h100-sxm"])
    shares = st.sampled_from([0.1, 0.5, 1.0])
    return {
        "kinds": [draw(kinds) for _ in range(4 // per_node)],
        "per_node": per_node,
        "memory": [draw(st.sampled_from([4, 40, 80])) for _ in range(4)],
        "speed": [draw(st.sampled_from([0.5, 1.0])) for _ in range(4)],
        "network": [draw(shares) for _ in range(4 // per_node)],
        "bandwidth": draw(st.sampled_from([1.0, 10.0])),
    }


MESHES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
SCHEDULES = [("1f1b", 1), ("zb-1p", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2)]


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Job, MeshCandidate]:
    """A job on a cluster of four devices, and a candidate that takes all of them."""
    pp, dp, tp = draw(st.sampled_from(MESHES))
    name, virtual = draw(st.sampled_from(SCHEDULES)) if pp > 1 else ("1f1b", 1)
    zero, size = draw(st.integers(0, 3)) if dp > 1 else 0, draw(st.sampled_from([1, 2]))
    candidate = MeshCandidate(pp, dp, tp, size, schedule=name, zero=zero, virtual_stages=virtual)
    # with long sequences, collectives of activations take most of the step, else those of gradients
    return job(described(draw(clusters())), length=draw(st.sampled_from([512, 8192]))), candidate


def described(cluster: dict[str, Any], order: Sequence[int] | None = None) -> Topology:
    """The cluster with its nodes in this order."""
    order = range(len(cluster["kinds"])) if order is None else order
    per_node = cluster["per_node"]
    devices = [node * per_node + k for node in order for k in range(per_node)]
    overrides = {
        f"d{i}": {"memory": f"{cluster['memory'][i]} GB", "speed": cluster["speed"][i]} for i in sorted(devices)
    }
    return loads(
        yaml.safe_dump(
            {
                "nodes": [
                    {
                        "type": cluster["kinds"][node],
                        "devices": per_node,
                        "names": [f"d{node * per_node + k}" for k in range(per_node)],
                    }
                    for node in order
                ],
                "levels": [
                    {"name": "nvlink", "like": "nvlink3", "nodes": 1},
                    {"name": "network", "bandwidth": f"{cluster['bandwidth']} GB/s", "latency": "20 us"},
                ],
                "overrides": overrides,
                "node_overrides": {place: {"network": cluster["network"][n]} for place, n in enumerate(order)},
            }
        )
    )
