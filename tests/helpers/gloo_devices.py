"""The fields of the device type of ``Topology.local``, for other topologies of hosts that run Gloo."""

from __future__ import annotations

from partitioner import Topology

GLOO = next(iter(Topology.local(1).types.values())).model_dump(exclude_unset=True)
