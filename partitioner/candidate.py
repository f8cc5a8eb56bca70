"""A candidate of the search: mesh, microbatch size, schedule, and ZeRO stage."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal

from partitioner.passes.ir.hashing import hashed_once
from partitioner.runtime.program.mesh import hybrid_mesh
from partitioner.schedules.csv_table import ScheduleTable
from partitioner.schedules.registry import schedule_name

Split = Literal["", "rows", "within"]  # how tp divides the experts' work: "": as is cheapest


def split_of(tp: int, ep: int, etp: int) -> Split:
    """Return a word for the way in which the ranks of the mesh axis ``tp`` divide the matrix products of experts.
    ``"rows"``: each rank has all weights of its experts, and processes a part of the tokens. ``"within"``: each expert
    is sharded over the ranks. ``""``: one of the axes has a single rank, or ``etp`` is neither 1 nor ``tp``, which the
    runtime cannot execute.

    ``tp``, ``ep``: numbers of ranks of tensor and expert parallelism. ``etp``: ranks over which one expert is sharded;
    0 means ``tp``.
    """
    if ep == 1 or tp == 1:
        return ""
    return "within" if etp in (0, tp) else "rows" if etp == 1 else ""


@hashed_once
@dataclass(frozen=True, order=True)
class MeshCandidate:
    """One combination of mesh axes, microbatch size, schedule and ZeRO stage that the search for a plan considers.

    ``pp``, ``dp``, ``cp``, ``tp``: numbers of ranks of pipeline, data, context and tensor parallelism. ``ep`` of the dp
    x cp x tp ranks divide the experts among each other, and each expert is sharded over ``etp`` ranks (0: ``tp``).
    ``microbatch_size``: in samples. ``zero``: the ZeRO stage, 0 to 3. Parameters, gradients or optimizer states are
    sharded over ``dp_shard`` of the ``dp`` ranks (0: all) and over ``cp``. ``virtual_stages``: stages per pipeline
    rank. Recomputation is chosen later, for each pipeline stage.
    """

    pp: int
    dp: int
    tp: int
    microbatch_size: int
    schedule: str | ScheduleTable = "1f1b"
    cp: int = 1
    ep: int = 1
    etp: int = 0
    zero: int = 0
    virtual_stages: int = 1
    dp_shard: int = 0

    def sharing(self, zero: int, dp_shard: int = 0) -> MeshCandidate:
        """Return a copy of this candidate with another ZeRO stage. ``zero``: the stage, 0 to 3. ``dp_shard``: number of
        ranks of ``dp`` over which optimizer states, gradients or parameters are sharded; 0: all."""
        axes = self.pp, self.dp, self.tp, self.microbatch_size, self.schedule, self.cp, self.ep, self.etp
        return MeshCandidate(*axes, zero, self.virtual_stages, dp_shard)

    @property
    def mesh(self) -> dict[str, int]:
        """Return the number of ranks by mesh axis: ``pp``, ``dp``, ``cp``, ``tp`` and ``ep``."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}

    @property
    def grid(self) -> dict[str, int]:
        """Return the number of ranks by mesh axis, with ``ep`` set to 1, so that the product is the number of all
        ranks: expert groups reuse the ranks of the other axes.
        """
        return {**self.mesh, "ep": 1}

    @property
    def axes(self) -> tuple[int, ...]:
        """Return six numbers of ranks as a tuple: those of the mesh axes ``pp``, ``dp``, ``cp``, ``tp`` and ``ep``, and
        ``etp`` (ranks over which one expert is sharded; 0: ``tp``)."""
        return (*self.mesh.values(), self.etp)

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks over which one expert is sharded."""
        return self.etp or self.tp

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that hold the same part of the same experts. These ranks are data-parallel
        replicas of that part."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold equal parts of the weights that do not belong to experts: dp x cp."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Return the number of ranks over which ZeRO shards the parameters that do not belong to experts, with their
        gradients and optimizer states.
        """
        return (self.dp_shard or self.dp) * self.cp

    @property
    def expert_sharers(self) -> int:
        """Return the number of ranks over which ZeRO shards the parameters of an expert, with their gradients and
        optimizer states.
        """
        return hybrid_mesh(self.mesh, self.etp, self.dp_shard)["edp_shard"]

    def parts(self, global_batch: int) -> int:
        """Return the number of microbatches into which the whole batch is divided, over all ranks of ``dp`` together.
        ``global_batch``: samples of the batch."""
        return global_batch // self.microbatch_size

    @property
    def shares_out(self) -> bool:
        """Return whether data-parallel ranks may have different numbers of microbatches. The numbers must be equal if
        these ranks exchange tokens for experts, because all of them take part in each exchange. They must also be equal
        if the schedule is a user-defined table, which is valid for one number of microbatches only."""
        inside = self.cp * self.tp % (self.ep * self.expert_tp) == 0
        return inside and isinstance(self.schedule, str)

    def replicas_run_independently(self, updates: Collection[str]) -> bool:
        """Return whether the ranks of ``dp`` wait for each other only at the end of a step, so that faster ranks may
        compute more microbatches than slower ones. Under ZeRO-2 and ZeRO-3 they wait for each other in each microbatch.
        ``updates``: the buffers that the model's forward changes; if there are any, all ranks wait for each other."""
        return not updates and self.dp > 1 and self.zero < 2 and self.shares_out

    def num_microbatches(self, global_batch: int) -> int:
        """Return the number of microbatches on the rank of ``dp`` that has the most, if they are divided as evenly as
        possible. ``global_batch``: samples of the whole batch."""
        return -(-self.parts(global_batch) // self.dp)

    def data_shares(self, global_batch: int) -> tuple[int, ...]:
        """Return the number of microbatches of each rank of ``dp`` if they are divided as evenly as possible; empty if
        all are equal. ``global_batch``: samples of the whole batch."""
        each, more = divmod(self.parts(global_batch), self.dp)
        return (each + 1,) * more + (each,) * (self.dp - more) if more else ()

    def __str__(self) -> str:
        """Return a short text, such as ``pp=2 dp=4 tp=1 zero=1 microbatch=2 1f1b``. Axes and options at their default
        are left out, except ``pp``, ``dp`` and ``tp``."""
        more = [f"{n}={v}" for n, v, one in self._optional_axes if v != one]
        mesh = f"pp={self.pp} dp={self.dp} tp={self.tp}"
        return " ".join([mesh, *more, f"microbatch={self.microbatch_size}", schedule_name(self.schedule)])

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Return a cache key. It is equal for two candidates if a rank computes the same graphs of blocks (such as
        decoder layers) in both; they may differ in the number of microbatches, the schedule and the pipeline stages."""
        return self.tp, self.cp, self.ep, self.etp, (self.dp, self.dp_shard) if self.zero == 3 else 1

    @property
    def states_kind(self) -> tuple[Hashable, ...]:
        """Return a cache key that is equal for candidates which shard parameters, gradients and optimizer states over
        ranks in the same way."""
        return self.tp, self.ep, self.expert_tp, self.zero, self.zero and (self.sharers, self.expert_sharers)

    @property
    def _optional_axes(self) -> list[tuple[str, int, int]]:
        """Return, as tuples (name, value, default), the mesh axes and options that the text of a candidate mentions
        only if they are not at their default."""
        shard = ("dp_shard", self.dp_shard, 0)
        return [("cp", self.cp, 1), ("ep", self.ep, 1), ("zero", self.zero, 0), shard, ("v", self.virtual_stages, 1)]


# A sort key of candidates. Comparing two candidates directly would build two tuples each time.
in_order = attrgetter(*(f.name for f in fields(MeshCandidate)))
