"""Meshes: the axes by which ranks are numbered, and how experts and sharers of states see the same ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

AXES = ("pp", "dp", "cp", "tp")  # outermost first: neighbouring ranks differ in the last axes

MESH_AXES = (*AXES, "ep")  # what a mesh names: ep is folded over dp x cp x tp, its size multiplies with no other
EXPERT_AXES = ("edp", "ep", "etp")  # the ranks of a stage as experts see them, outermost first
HYBRID_AXES = ("dp_replicate", "dp_shard", "edp_replicate", "edp_shard")  # dp and edp in two, outermost first
ALL_AXES = (*AXES, *HYBRID_AXES, *EXPERT_AXES)


def num_ranks(mesh: Mapping[str, int]) -> int:
    """The ranks of a mesh."""
    return math.prod(mesh.get(axis, 1) for axis in AXES)


def expert_mesh(mesh: Mapping[str, int], etp: int = 0) -> dict[str, int]:
    """The ranks of ``mesh`` as experts see them: replicas of an expert, then ``ep``, then ranks that share one."""
    ep, shared = mesh.get("ep", 1), etp or mesh.get("tp", 1)
    room = num_ranks(mesh) // mesh.get("pp", 1)
    return {"pp": mesh.get("pp", 1), "edp": room // (ep * shared), "ep": ep, "etp": shared}


def hybrid_mesh(mesh: Mapping[str, int], etp: int = 0, dp_shard: int = 0) -> dict[str, int]:
    """How ``dp`` falls into ``dp_replicate`` x ``dp_shard`` (0: all of it), and the experts' ``edp`` likewise.

    Replicas of an expert that are among the ranks which share other states share it; where an expert is spread over
    more than these, there are none.
    """
    dp, edp = mesh.get("dp", 1), expert_mesh(mesh, etp)["edp"]
    shard = dp_shard or dp
    each = num_ranks(mesh) // mesh.get("pp", 1) // edp  # ranks over which all experts are spread once
    inner = edp if shard == dp else math.gcd(edp, max(1, shard * mesh.get("cp", 1) * mesh.get("tp", 1) // each))
    return {"dp_replicate": dp // shard, "dp_shard": shard, "edp_replicate": edp // inner, "edp_shard": inner}


def axes_beside(axes: Iterable[str], shared: Collection[str]) -> tuple[str, ...]:
    """What ``axes`` have besides the axes that are ``shared``: of one that is shared in part, its replicas."""
    return tuple(f"{a}_replicate" if f"{a}_shard" in shared else a for a in axes if a not in shared)
