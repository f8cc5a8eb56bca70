"""Device meshes: the axes that number the ranks, and the derived meshes for experts and for ZeRO sharding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

AXES = ("pp", "dp", "cp", "tp")  # outermost first: neighbouring ranks differ in the last axes

MESH_AXES = (*AXES, "ep")  # keys of a mesh; ep reuses the ranks of dp x cp x tp, so it does not add ranks
EXPERT_AXES = ("edp", "ep", "etp")  # the ranks of a stage as experts see them, outermost first
HYBRID_AXES = ("dp_replicate", "dp_shard", "edp_replicate", "edp_shard")  # dp and edp split in two, outermost first
ALL_AXES = (*AXES, *HYBRID_AXES, *EXPERT_AXES)


def num_ranks(mesh: Mapping[str, int]) -> int:
    """Return the number of ranks of ``mesh``, a dict: axis -> size. The axis ``ep`` does not count, because it reuses
    the ranks of ``dp``, ``cp`` and ``tp``.
    """
    return math.prod(mesh.get(axis, 1) for axis in AXES)


def expert_mesh(mesh: Mapping[str, int], etp: int = 0) -> dict[str, int]:
    """Return the mesh of the ranks as mixture-of-experts layers use it, as a dict: axis -> size. Its axes are ``pp``;
    ``edp``, the replicas of an expert; ``ep``, the groups of ranks with different experts; and ``etp``, the ranks over
    which one expert is sharded. ``mesh``: axis -> size. ``etp``: number of ranks over which one expert is sharded; 0
    means the size of ``tp``.
    """
    ep, shared = mesh.get("ep", 1), etp or mesh.get("tp", 1)
    room = num_ranks(mesh) // mesh.get("pp", 1)
    return {"pp": mesh.get("pp", 1), "edp": room // (ep * shared), "ep": ep, "etp": shared}


def hybrid_mesh(mesh: Mapping[str, int], etp: int = 0, dp_shard: int = 0) -> dict[str, int]:
    """Return the sizes of the axes into which hybrid sharding splits ``dp`` and the experts' ``edp``, as a dict: axis
    -> size. ZeRO shards states over the ranks of ``dp_shard`` and ``edp_shard``. The ranks of ``dp_replicate`` and
    ``edp_replicate`` hold replicas of these shards.

    Args:
        mesh: axis -> size.
        etp: number of ranks over which one expert is sharded; 0 means the size of ``tp``.
        dp_shard: number of ``dp`` ranks over which ZeRO shards a state; 0 means all of them. ``edp_shard`` follows from
            it: the number of an expert's replicas inside one group of ``dp_shard`` ranks, or 1 if one copy of all
            experts spans more ranks than such a group.
    """
    dp, edp = mesh.get("dp", 1), expert_mesh(mesh, etp)["edp"]
    shard = dp_shard or dp
    each = num_ranks(mesh) // mesh.get("pp", 1) // edp  # ranks over which all experts are spread once
    inner = edp if shard == dp else math.gcd(edp, max(1, shard * mesh.get("cp", 1) * mesh.get("tp", 1) // each))
    return {"dp_replicate": dp // shard, "dp_shard": shard, "edp_replicate": edp // inner, "edp_shard": inner}


def subtract_axes(axes: Iterable[str], shared: Collection[str]) -> tuple[str, ...]:
    """Return the mesh axes of ``axes`` that are not in ``shared``, in the same order. If ``shared`` contains one half
    of an axis that hybrid sharding splits, such as ``dp_shard``, the axis (``dp``) is replaced by its other half
    (``dp_replicate``).
    """
    return tuple(f"{a}_replicate" if f"{a}_shard" in shared else a for a in axes if a not in shared)
