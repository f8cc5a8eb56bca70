"""What a search evaluates first: standard layouts that fit, experts spread, and their neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.step.gradient_reduction import best_reducers, compute_gradient_reduction
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.bounds.zero_and_reduction import LeastReduced
from partitioner.solve.search.baselines import StandardLayout, list_standard_layouts
from partitioner.solve.search.space import SearchSpace, build_search_space, list_candidates
from partitioner.solve.search.warm_start import _MOST_QUICK, WarmStart
from partitioner.topology import Topology
from tests.helpers.search_jobs import job


def known(name: str, nodes: int = 1, **pins: object) -> tuple[SearchSpace, list[MeshCandidate], ModelBounds]:
    work = job(name, Topology.preset("dgx-h100", nodes), batch=8 * nodes)
    work = replace(work, constraints=Constraints(**pins)) if pins else work
    bounds = ModelBounds(work)
    space = build_search_space(work)
    return space, list_candidates(space), bounds


def walked(early: WarmStart, found: Callable[[MeshCandidate], float | PartitionError]) -> list[MeshCandidate]:
    asked = []
    for candidate in early.list_first_candidates():
        asked.append(candidate)
        early.tell(candidate, found(candidate))
    return asked


def test_leaner_points_are_tried_until_one_fits():
    space, candidates, bounds = known("llama")
    standard = StandardLayout("long", tuple(p for p in candidates if (p.pp, p.tp, p.cp, p.zero) == (1, 4, 1, 0)))
    assert len(standard.candidates) > 2
    fits = standard.candidates[-1]
    early = WarmStart(space, frozenset(candidates), bounds, [standard], math.inf)
    lacks = CapacityError("too small", missing_bytes=1)
    assert walked(early, lambda candidate: 9.0 if candidate == fits else lacks) == list(standard.candidates)
    early = WarmStart(space, frozenset(candidates), bounds, [standard], math.inf)
    assert walked(early, lambda candidate: 9.0) == [standard.candidates[0]]


def test_a_plan_without_a_pipeline_comes_before_the_first_pipeline():
    """A few are tried, the least bounds first; none where a plan is known."""
    space, candidates, bounds = known("llama")
    pipeline = StandardLayout("deep", tuple(p for p in candidates if (p.pp, p.tp, p.cp, p.zero) == (2, 4, 1, 0)))
    lacks = CapacityError("too small", missing_bytes=1)
    early = WarmStart(space, frozenset(candidates), bounds, [pipeline], math.inf)
    *quick, last = walked(early, lambda candidate: 9.0 if candidate.pp > 1 else lacks)
    times = bounds.times(quick).tolist()
    assert last == pipeline.candidates[0] and {candidate.pp for candidate in quick} == {1} and len(quick) == _MOST_QUICK
    assert times == sorted(times) and times[0] == bounds.times([c for c in candidates if c.pp == 1]).min()
    early = WarmStart(space, frozenset(candidates), bounds, [pipeline], math.inf)
    assert [candidate.pp for candidate in walked(early, lambda _: 1e9)] == [1, 2]
    alone = StandardLayout("alone", tuple(p for p in candidates if (p.pp, p.tp, p.cp, p.zero) == (1, 4, 1, 0)))
    early = WarmStart(space, frozenset(candidates), bounds, [pipeline, alone], math.inf)
    assert walked(early, lambda _: 1e9) == [alone.candidates[0], pipeline.candidates[0]]


def test_what_is_excluded_is_not_walked():
    space, candidates, bounds = known("llama")
    standard = StandardLayout("none", tuple(candidates[:5]), "excluded")
    lacks = CapacityError("too small", missing_bytes=1)
    assert (
        walked(WarmStart(space, frozenset(candidates), bounds, [standard], math.inf), lambda _: lacks) == candidates[:1]
    )


def test_only_what_may_be_better_is_tried_besides():
    space, candidates, bounds = known("experts")
    always = list_standard_layouts(space, candidates, bounds)
    early = WarmStart(space, frozenset(candidates), bounds, always, math.inf)
    asked = walked(early, lambda _: 0.0)  # nothing is better
    assert set(asked) <= {standard.candidates[0] for standard in always if standard.candidates}


def test_experts_are_spread_and_neighbours_lead_to_a_better_plan():
    space, candidates, bounds = known("experts")
    always = list_standard_layouts(space, candidates, bounds)
    goal = next(p for p in candidates if (p.pp, p.cp, p.tp, p.ep, p.zero) == (2, 1, 2, 2, 1) and p.schedule == "1f1b")

    def seconds(candidate: MeshCandidate) -> float:
        """The farther from the goal the more."""
        pairs = [(getattr(candidate, n), getattr(goal, n)) for n in ("pp", "tp", "ep", "microbatch_size")]
        return 1e3 + sum(abs(math.log2(a / b)) for a, b in pairs) + abs(candidate.zero - goal.zero)

    asked = walked(WarmStart(space, frozenset(candidates), bounds, always, math.inf), seconds)
    assert len(asked) == len(set(asked)) < len(candidates) / 2
    assert set(asked) <= {*candidates, *(p for s in always for p in s.candidates)}
    assert min(map(seconds, asked)) <= 1e3 + 1 < seconds(asked[0])
    first = sum(bool(s.candidates) for s in always)
    assert asked[first].ep > 1 and asked[first].tp > 1  # the textbook, whatever the standards are


def test_steps_to_better_plans_end_in_time():
    space, candidates, bounds = known("experts")
    early = WarmStart(space, frozenset(candidates), bounds, [], time.monotonic() - 1)
    assert len(walked(early, lambda _: 1e3)) == 1


def test_a_microbatch_that_is_too_large_leads_to_one_that_fits():
    space, candidates, bounds = known("experts", tp=1, pp=1)
    early = WarmStart(space, frozenset(candidates), bounds, [], time.monotonic() - 1)
    room = bounds.capacity(candidates[0])

    def half(candidate: MeshCandidate) -> float | PartitionError:
        lacks = candidate.microbatch_size * room - room
        return CapacityError("too small", missing_bytes=lacks) if lacks else 1.0

    asked = walked(early, half)
    assert asked[-1].microbatch_size == 1 and len({p.ep for p in asked}) == 1


def test_bounds_of_one_point_are_those_among_many():
    for name in ("llama", "experts"):
        _, candidates, bounds = known(name, 2)
        alone = [float(bounds.times([candidate])[0]) for candidate in candidates[::37]]
        assert bounds.times(candidates)[::37].tolist() == alone


def test_states_that_are_alike_are_reduced_like_each_by_itself():
    _, candidates, bounds = known("llama", 2)
    asked = [p for p in candidates if p.replicas > 1 and p.zero < 3 and p.pp > 1][::23]
    assert asked
    for candidate in asked:
        states = bounds.share_of_states(candidate)
        (reducer,) = best_reducers(
            bounds.topology, bounds.placements.best_group(candidate.replicas), bounds.device, Constraints()
        )
        apart = [replace(cost, grad_axes=("dp",) if cost.grad_axes else ()) for cost in states.values()]
        assert len({id(cost) for cost in states.values()}) < len(states)
        least = LeastReduced(bounds.topology, bounds.constraints, bounds.placements, bounds.device)
        found = least.seconds(candidate, states.values)
        assert found == pytest.approx(compute_gradient_reduction(apart, reducer, True).total_s, rel=1e-12)
