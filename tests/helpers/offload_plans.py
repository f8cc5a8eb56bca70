"""Plans that offload states of a wide model to host memory or to disk."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from tests.helpers.zero_training import MESHES, MODELS, SHARDINGS

ALL = "optimizer+activations+parameters"


@cache
def planned(mesh: str, offload: str | None = None, sharding: str = "zero0", **more: Any) -> Plan:
    name, axes = MESHES[mesh]
    model, inputs = MODELS[name]
    pins: dict[str, Any] = dict(microbatch_size=2) | axes | SHARDINGS[sharding] | dict(offload=offload) | more
    ranks = axes["dp"] * axes["tp"] * axes["pp"]
    return partition(model(), Topology.local(ranks), inputs(), constraints=Constraints(**pins))


def with_host(topology: Topology, memory: str = "1 GB") -> Topology:
    (nodes,) = topology.model_dump(include={"nodes"})["nodes"]
    host = {"memory": memory, "bandwidth": "10 GB/s"}
    fields = topology.model_dump(exclude_unset=True) | {"nodes": ({**nodes, "host": host},)}
    return Topology(**fields)


class Wide(nn.Module):
    def __init__(self, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()
