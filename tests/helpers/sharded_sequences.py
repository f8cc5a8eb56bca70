"""Clusters on which plans with ``tp`` shard values between layers, so that they gather before products and scatter
after them."""

from __future__ import annotations

from partitioner import Topology


def quick_links(num_ranks: int) -> Topology:
    """``num_ranks`` processes of this machine with links that cost next to nothing and slow memory."""
    topology = Topology.local(num_ranks)
    slow = {"launch": 1e-12, "dispatch": 0.0, "memory_bandwidth": 1e8}
    types = {name: kind.model_copy(update=slow) for name, kind in topology.types.items()}
    levels = tuple(level.model_copy(update={"latency": 1e-12, "bandwidth": 1e12}) for level in topology.levels)
    return Topology(name="quick", nodes=topology.nodes, types=types, levels=levels)
