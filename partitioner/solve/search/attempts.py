"""Plan single candidates for a search, and for the candidates that are tried after it.

Plans that are slower than the best one so far are not pursued. A candidate is skipped if it cannot fit in memory,
because another one that differs only in ZeRO and needs no more memory did not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.best_first import ZeroInfeasibility
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.outcomes import EvaluatedCandidate, solved_to_evaluated
from partitioner.solve.search.space import SearchSpace, estimate_interleaved_effort
from partitioner.solve.search.warm_start import WarmStart


def mesh_of(candidate: MeshCandidate) -> MeshCandidate:
    """Return a key that is equal for candidates with the same mesh and microbatch size: a copy of ``candidate`` in
    which schedule, virtual stages and ZeRO have fixed values."""
    return replace(candidate, schedule="", virtual_stages=1, zero=0, dp_shard=0)


def meshes_around(candidate: MeshCandidate) -> Iterator[MeshCandidate]:
    """Yield the meshes whose known placement (assignment of ranks to devices) can also be used for ``candidate``: its
    own mesh, then meshes with half of its ``cp`` and twice its ``tp`` or ``dp``. A mesh is given as a candidate with
    the same microbatch size; schedule, virtual stages and ZeRO have fixed values. ``candidate``: mesh sizes, microbatch
    size, schedule and ZeRO stage."""
    yield mesh_of(candidate)
    if candidate.cp % 2 == 0:
        for axis in ("tp", "dp"):
            yield mesh_of(replace(candidate, cp=candidate.cp // 2, **{axis: 2 * getattr(candidate, axis)}))


@dataclass
class CandidateAttempts:
    """Plans and bounds the candidates (combinations of mesh sizes, microbatch size, schedule and ZeRO stage) of one
    search.

    ``evaluator``: plans single candidates. ``space``: the search space. ``bounds``: lower bounds on candidates.
    ``early``: chooses the first candidates; each outcome is reported to it. ``siblings``: skips candidates that cannot
    fit because another candidate, which differs only in ZeRO, did not fit. ``best_s``: step time in seconds of the best
    plan so far, or the cutoff if there is none; slower plans are of no interest. ``devices``: key of a mesh -> the
    device index of each rank, for meshes whose placement is known.
    """

    evaluator: CandidateEvaluator
    space: SearchSpace
    bounds: BoundCascade
    early: WarmStart
    siblings: ZeroInfeasibility
    best_s: float
    devices: dict[MeshCandidate, tuple[int, ...]] = field(default_factory=dict)

    def evaluate(
        self, candidate: MeshCandidate, *, proven: bool = True, devices: tuple[int, ...] | None = None
    ) -> EvaluatedCandidate:
        """Return the best plan of ``candidate``. ``proven``: whether to compute a tight lower bound on its plans.
        ``devices``: the device index of each rank; if ``None``, the placement (assignment of ranks to devices) is
        searched. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage. Raises :class:`PartitionError` if
        there is no plan.
        """
        is_complete = self.evaluator.placements.complete(candidate.grid)
        solve = partial(self.evaluator.solve, devices=devices, proven=proven and is_complete, cutoff_s=self.best_s)
        try:
            found = solved_to_evaluated(self.siblings.tried(candidate, solve))
        except PartitionError as error:
            self.early.tell(candidate, error)
            raise
        self.early.tell(candidate, found.step_time)
        self.best_s = min(self.best_s, found.step_time)
        return replace(found, partly=not is_complete, unsure=not self.evaluator.tries_all(candidate))

    def remember_devices(self, solved: Iterable[EvaluatedCandidate]) -> None:
        """Store the placement (device of each rank) of the fastest plan of each mesh, so that other candidates with
        similar meshes can be planned on the same devices. ``solved``: plans of candidates."""
        for each in sorted(solved, key=lambda found: -found.step_time):
            self.devices[mesh_of(each.payload.candidate)] = each.payload.devices

    def evaluate_on_known_devices(self, candidate: MeshCandidate) -> EvaluatedCandidate:
        """Plan ``candidate`` without a lower bound. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO
        stage.

        The placement (assignment of ranks to devices) of a known plan is reused instead of a new search if the cluster
        is one on which the search finds the best placement of every mesh. The known plan has the same mesh, or half as
        many ranks along ``cp`` and twice as many along ``tp`` or ``dp``.
        """
        key = next((key for key in meshes_around(candidate) if key in self.devices), None)
        is_complete = self.evaluator.placements.complete(candidate.grid)
        same = self.devices[key] if key is not None and is_complete else None
        found = self.evaluate(candidate, proven=False, devices=same)
        self.devices.setdefault(mesh_of(candidate), found.payload.devices)
        return found if same is None else replace(found, least=0.0)

    def can_prune(self, candidate: MeshCandidate, upper_bound_s: float) -> bool:
        return self.bounds.sharded.can_prune(candidate, upper_bound_s)

    def bound_tightly(self, candidate: MeshCandidate, upper_bound_s: float) -> float:
        return self.bounds.bound_tightly(candidate, upper_bound_s)

    def estimate_effort(self, candidate: MeshCandidate) -> float:
        return estimate_interleaved_effort(self.space, candidate)
