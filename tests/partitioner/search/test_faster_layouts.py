"""A well-known layout that is faster than the plan of the search becomes the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partitioner import Topology
from partitioner.candidate import MeshCandidate
from partitioner.plan import Baseline, Certificate
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.fit_memory import _plan_faster_layout, plan_to_fit
from partitioner.solve.search.outcomes import bound_and_gap, build_candidate_report, solved_to_evaluated
from partitioner.solve.search.search import PlanSearchResult, search_for_plan
from tests.helpers.search_jobs import job

SLOW = MeshCandidate(pp=4, dp=1, tp=1, microbatch_size=2)


def search_that_missed_the_best(work: Job) -> tuple[PlanSearchResult, PlanSearchResult]:
    """The result of the search for ``work``, and one in which the search took a slower plan."""
    best = search_for_plan(work)
    assert best.evaluator is not None
    slow = best.evaluator.solve(SLOW)
    seconds = slow.estimate.step_time
    assert seconds > 1.05 * best.certificate.objective
    bound, gap = bound_and_gap(seconds, [best.certificate.objective])
    rows = [row for row in best.certificate.candidates if row.status != "chosen"]
    rows.append(build_candidate_report(SLOW, solved_to_evaluated(slow)).model_copy(update={"status": "chosen"}))
    told = {"objective": seconds, "bound": bound, "gap": gap, "candidates": tuple(rows), "baselines": ()}
    missed = replace(best, chosen=slow, certificate=best.certificate.model_copy(update=told))
    return best, missed


def with_layout(result: PlanSearchResult, other: PlanSearchResult, **changes: object) -> Certificate:
    """The certificate of ``result`` with the plan of ``other`` among the layouts for comparison."""
    row = build_candidate_report(other.chosen.candidate, solved_to_evaluated(other.chosen))
    layout = Baseline(name="Megatron's layout", candidate=row).model_copy(update=changes)
    return result.certificate.model_copy(update={"baselines": (layout,)})


@pytest.mark.usefixtures("without_baselines")
def test_a_faster_layout_is_taken():
    work = job("llama", Topology.local(4))
    best, missed = search_that_missed_the_best(work)
    found = _plan_faster_layout(work, missed, with_layout(missed, best))
    assert found is not None
    assert found.chosen.candidate == best.chosen.candidate
    seconds = found.chosen.estimate.step_time
    assert seconds == pytest.approx(best.certificate.objective, rel=1e-9)
    told = found.certificate
    assert (told.objective, told.gap) == (seconds, (seconds - told.bound) / seconds)
    assert told.bound <= seconds
    (chosen,) = (row for row in told.candidates if row.status == "chosen")
    assert chosen.mesh == best.chosen.candidate.mesh
    assert [layout.candidate for layout in told.baselines] == [chosen]


@pytest.mark.usefixtures("without_baselines")
def test_a_layout_that_may_not_be_taken_is_not():
    work = job("llama", Topology.local(4))
    best, missed = search_that_missed_the_best(work)
    for changes in ({"excluded": "by the constraints"}, {"global_batch": 16}, {"offload": ("optimizer",)}):
        assert _plan_faster_layout(work, missed, with_layout(missed, best, **changes)) is None
    assert _plan_faster_layout(work, best, with_layout(best, missed)) is None  # it is slower
    pinned = replace(work, constraints=work.constraints.model_copy(update={"pp": 4}))
    assert _plan_faster_layout(pinned, missed, with_layout(missed, best)) is None


def test_the_plan_is_no_slower_than_a_layout(monkeypatch: pytest.MonkeyPatch):
    work = job("llama", Topology.local(4))
    best, missed = search_that_missed_the_best(work)
    certificate = with_layout(missed, best)
    monkeypatch.setattr(PlanSearchResult, "compared", lambda result, least_s: certificate)
    found = plan_to_fit(work, lambda job, left, *, before: missed, estimate_only=False)
    assert found.chosen.candidate == best.chosen.candidate
    assert found.certificate.objective == found.estimate.step_time == pytest.approx(best.certificate.objective)
