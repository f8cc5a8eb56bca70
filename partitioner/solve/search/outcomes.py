"""Define the outcomes of the candidates of a search, and build the certificate that reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partitioner.candidate import MeshCandidate
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.plan import OPEN, Candidate, Certificate
from partitioner.schedules.registry import schedule_name
from partitioner.solve.evaluate.evaluator import SolvedCandidate

CutOff = Literal["time limit", "interruption"]

_MOST_ROWS = 1000  # greatest number of rows in a certificate, unless more candidates were solved

_ROUNDING = 1e-12  # relative gap that counts as none


@dataclass(frozen=True)
class EvaluatedCandidate:
    """The best plan of a candidate (mesh sizes, microbatch size, schedule and ZeRO stage). ``step_time``: seconds of a
    step. ``memory``: bytes on the fullest rank. ``payload``: data of the caller, such as the plan. ``breakdown``: kind
    of work, such as ``"compute"`` -> seconds of a step; ``None``: not known.

    ``least``: lower bound in seconds on the step times of the candidate's plans (``None``: equal to ``step_time``).
    ``partly``: whether this bound covers only the placements (assignments of ranks to devices) that were tried.
    ``unsure``: whether some plans of the candidate were not tried, so that the search may still tighten this bound by
    other means."""

    step_time: float
    memory: int
    payload: Any = None
    least: float | None = None
    breakdown: Mapping[str, float] | None = None
    partly: bool = False
    unsure: bool = False

    @property
    def lower_bound_s(self) -> float:
        """Return the lower bound in seconds on the step times of the candidate's plans; if ``partly`` is true, it
        covers only the placements (assignments of ranks to devices) that were tried."""
        return self.step_time if self.least is None else self.least


def solved_to_evaluated(solved: SolvedCandidate) -> EvaluatedCandidate:
    """Return the record that the search keeps of a solved candidate: step time, memory, lower bound and parts of the
    step. ``solved``: the plan of the candidate."""
    estimate = solved.estimate
    return EvaluatedCandidate(
        estimate.step_time, max(estimate.memory), solved, solved.lower_bound_s, estimate.breakdown
    )


@dataclass
class CandidateOutcome:
    """The result of the search for one candidate (mesh sizes, microbatch size, schedule and ZeRO stage).

    ``status``: ``"chosen"``, ``"solved"``, ``"bounded"`` (not solved) or ``"infeasible"``. ``bound``: lower bound in
    seconds on the step time of the candidate. ``evaluated``: its best plan, or ``None``. ``loose``: whether a tighter
    ``bound`` can still be computed. ``pruned_s``: if the candidate was skipped because no better plan was expected, the
    least step time in seconds that was expected of its plans; otherwise 0. ``reason``: a text that says why the
    candidate has no plan; empty if it has a plan or was not solved. ``error``: the exception with this reason, or
    ``None``."""

    candidate: MeshCandidate
    bound: float
    status: str = "bounded"
    evaluated: EvaluatedCandidate | None = None
    reason: str = ""
    error: PartitionError | None = None
    loose: bool = False
    pruned_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether the search has not decided about this candidate yet: it was neither evaluated nor found to
        have no plan.
        """
        return self.evaluated is None and self.error is None

    @property
    def lower_bound_s(self) -> float:
        """Return a lower bound in seconds on the step time of this candidate, for use in a later search. If the
        candidate has no plan, the bound is infinite. If it was evaluated, the bound is the step time of its best plan.
        If it was skipped because no better plan was expected, the bound is the least step time that was expected of its
        plans. Otherwise it is the proven bound."""
        if self.error is not None:
            return float("inf")
        return self.evaluated.step_time if self.evaluated is not None else max(self.bound, self.pruned_s)

    @property
    def says(self) -> bool:
        """Return whether the lower bound of this candidate is one of those whose minimum is the lower bound of the
        whole search: the candidate was not evaluated, or its evaluation gave a lower bound."""
        return self.status == "bounded" or (self.evaluated is not None and self.evaluated.least is not None)


def list_solved_candidates(rows: Mapping[MeshCandidate, CandidateOutcome]) -> dict[MeshCandidate, EvaluatedCandidate]:
    """Return candidate -> its best plan, for the candidates that have one, in increasing order of step time. ``rows``:
    candidate (mesh sizes, microbatch size, schedule and ZeRO stage) -> outcome of the search for it.
    """
    known = {candidate: row.evaluated for candidate, row in rows.items() if row.evaluated is not None}
    return dict(sorted(known.items(), key=lambda item: item[1].step_time))


def certificate_of(every: Collection[CandidateOutcome], objective: float, cut_off: CutOff | None = None) -> Certificate:
    """Return the certificate of a search, which says how near the best plan is to the optimum. It has rows for the
    candidates, best first, and the least lower bound. If there are very many candidates, the last ones have no rows and
    are only counted. ``every``: the outcomes of all candidates. ``objective``: step time of the best plan in seconds.
    ``cut_off``: why the search ended early (``"time limit"`` or ``"interruption"``); ``None`` if the search was
    completed."""
    order = {"chosen": 0, "solved": 1, "bounded": 2, "infeasible": 3}
    bound, gap = bound_and_gap(objective, (row.bound for row in every if row.says))
    rows = sorted(every, key=lambda r: (r.evaluated is None, order[r.status], _outcome_seconds(r)))
    shown = max(_MOST_ROWS, sum(row.evaluated is not None for row in rows))
    made = Certificate(
        objective=objective,
        bound=bound,
        gap=gap,
        candidates=tuple(_outcome_to_report(row) for row in rows[:shown]),
        cut_off=cut_off,
    )
    left = Counter(OPEN if made.is_open(_outcome_to_report(row)) else row.status for row in rows[shown:])
    return made.model_copy(update={"left": dict(left)})


def bound_and_gap(objective: float, bounds: Iterable[float]) -> tuple[float, float]:
    """Return two numbers: a lower bound in seconds, which is the least of ``objective`` and ``bounds``, and the gap
    between ``objective`` and this bound as a fraction of ``objective``. A gap within rounding is 0. ``objective``: step
    time of the best plan in seconds. ``bounds``: lower bounds in seconds on the step times of all candidates.
    """
    bound = min([objective, *bounds])
    if objective - bound <= _ROUNDING * objective:
        return objective, 0.0
    return bound, (objective - bound) / objective


def _outcome_seconds(row: CandidateOutcome) -> float:
    return row.evaluated.step_time if row.evaluated is not None else row.bound


def _outcome_to_report(row: CandidateOutcome) -> Candidate:
    found = build_candidate_report(row.candidate, row.evaluated, row.reason)
    missing = row.error.missing_bytes if isinstance(row.error, CapacityError) else None
    return found.model_copy(update={"status": row.status, "bound": row.bound, "missing": missing})


def build_candidate_report(
    candidate: MeshCandidate, evaluated: EvaluatedCandidate | None = None, reason: str = ""
) -> Candidate:
    """Return the row of the report on ``candidate`` (mesh sizes, microbatch size, schedule and ZeRO stage): step time
    and memory of its best plan, ``evaluated``. If ``evaluated`` is ``None``, the row has instead the text ``reason``,
    which says why the candidate has no plan."""
    breakdown = evaluated.breakdown if evaluated is not None else None
    return Candidate(
        mesh=candidate.mesh,
        microbatch_size=candidate.microbatch_size,
        schedule=schedule_name(candidate.schedule),
        status="solved" if evaluated is not None else "infeasible",
        step_time=evaluated.step_time if evaluated is not None else None,
        memory=evaluated.memory if evaluated is not None else None,
        reason=reason,
        zero=candidate.zero,
        dp_shard=candidate.dp_shard,
        virtual_stages=candidate.virtual_stages,
        etp=candidate.expert_tp,
        breakdown=dict(breakdown) if breakdown is not None else None,
    )


def build_refused_report(candidate: MeshCandidate, error: PartitionError) -> Candidate:
    """Return the row of the report on ``candidate``, which has no plan: the reason and the missing bytes of memory,
    taken from ``error``. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
    """
    missing = error.missing_bytes if isinstance(error, CapacityError) else None
    return build_candidate_report(candidate, reason=getattr(error, "message", str(error))).model_copy(
        update={"missing": missing}
    )


__all__ = [
    "CandidateOutcome",
    "CutOff",
    "EvaluatedCandidate",
    "bound_and_gap",
    "build_candidate_report",
    "build_refused_report",
    "certificate_of",
    "list_solved_candidates",
]
