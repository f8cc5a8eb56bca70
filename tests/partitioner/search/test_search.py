"""The search: its candidates, best bound first, and what it reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Plan, partition, prepare
from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.step.gradient_reduction import GradientReduction
from partitioner.errors import CapacityError, ConstraintError, PlanError, TimeLimitError
from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.errors import InputsError
from partitioner.schedules.formulas import is_plain
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.bounds.schedule_memory import RecomputeCosts
from partitioner.solve.bounds.zero_and_reduction import BlockLowerBound, Gathers
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.search.best_first import BestFirstSearch, SearchProgress, SearchResult, ZeroInfeasibility
from partitioner.solve.search.bound_steps import BoundCascade
from partitioner.solve.search.outcomes import CandidateOutcome, EvaluatedCandidate
from partitioner.solve.search.outside_search import _MOST_PRUNED, list_promising_candidates
from partitioner.solve.search.search import search_for_plan
from partitioner.solve.search.space import (
    SearchSpace,
    beyond_the_bound,
    build_search_space,
    even_chunks,
    find_baseline_candidates,
    left_out,
    list_candidates,
    list_hybrid_candidates,
    list_short_context_candidates,
    several_stages,
)
from partitioner.topology import Topology
from tests.helpers.search_jobs import job, small_experts


class Table:
    """Bounds and times by hand: each candidate's bound is a share of its time."""

    def __init__(self, times: dict[MeshCandidate, float], share: float = 0.9) -> None:
        self.real, self.share = times, share
        self.evaluated: list[MeshCandidate] = []

    def times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        return np.array([self.real[p] * self.share / 2 for p in candidates])

    def refine(self, candidate: MeshCandidate, _: float) -> float:
        return self.real[candidate] * self.share

    family_bounds: Sequence[Callable[[Sequence[MeshCandidate], float], float]] = ()

    def family(self, candidate: MeshCandidate) -> MeshCandidate:
        return candidate

    def members(self, candidates: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        return candidates

    @property
    def candidate_bounds(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
        return (self.refine,)

    def shortage(self, candidate: MeshCandidate) -> CapacityError | None:
        return None

    def evaluate(self, candidate: MeshCandidate) -> EvaluatedCandidate:
        self.evaluated.append(candidate)
        return EvaluatedCandidate(self.real[candidate], 100, str(candidate))


def grid(count: int) -> list[MeshCandidate]:
    return [MeshCandidate(1, 1, k + 1, 1) for k in range(count)]


@dataclass
class Planner:
    """What the search asks of a candidate, from functions."""

    evaluate: Callable[[MeshCandidate], EvaluatedCandidate]
    announce: Callable[[Sequence[MeshCandidate]], None] = lambda candidates: None
    can_prune: Callable[[MeshCandidate, float], bool] = lambda candidate, upper_bound_s: False
    bound_tightly: Callable[[MeshCandidate, float], float] = lambda candidate, upper_bound_s: 0.0
    estimate_effort: Callable[[MeshCandidate], float] = lambda candidate: 0.0


OF_RUN = ("always", "left_out", "before")
OF_PLANNER = ("can_prune", "bound_tightly", "estimate_effort")


def run(
    table: Table,
    evaluate: Callable[[MeshCandidate], EvaluatedCandidate] | None = None,
    candidates: Sequence[MeshCandidate] | None = None,
    **more: Any,
) -> SearchResult:
    planner = Planner(evaluate or table.evaluate, **{name: more.pop(name) for name in OF_PLANNER if name in more})
    asked = {name: more.pop(name) for name in OF_RUN if name in more}
    return BestFirstSearch(table, planner, **more).run(candidates or list(table.real), **asked)


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.floats(0, 1))
def test_the_best_point_is_found_and_certified(times: list[float], share: float):
    table = Table(dict(zip(grid(len(times)), times, strict=True)), share)
    result = run(table)
    assert result.best.step_time == min(times)
    assert (result.certificate.bound, result.certificate.gap) == (min(times), 0.0)
    assert result.certificate.candidates[0].status == "chosen"
    assert len(result.certificate.candidates) == len(times)


def test_a_point_whose_bound_is_worse_is_never_evaluated():
    table = Table(dict(zip(grid(4), [4.0, 1.0, 1.05, 2.0], strict=True)))
    result = run(table)
    assert table.evaluated == [grid(4)[1], grid(4)[2]]
    assert [c.status for c in result.certificate.candidates] == ["chosen", "solved", "bounded", "bounded"]


def test_what_is_always_evaluated_is_in_the_report_with_its_time():
    table = Table(dict(zip(grid(3), [4.0, 1.0, 2.0], strict=True)))
    result = run(table, always=[grid(3)[0], None], left_out={MeshCandidate(9, 1, 1, 1): "excluded"})
    rows = {c.mesh["tp"]: c for c in result.certificate.candidates if c.mesh["pp"] == 1}
    assert (rows[1].status, rows[1].step_time) == ("solved", 4.0)
    assert result.certificate.candidates[-1].reason == "excluded"


def test_each_step_is_taken_only_for_what_the_steps_before_leave():
    first, second, third = grid(3)
    table = Table({first: 1.0, second: 4.0, third: 9.0})
    taken: list[tuple[str, MeshCandidate]] = []

    class Stepwise(Table):
        @property
        def candidate_bounds(self) -> Sequence[Callable[[MeshCandidate, float], float]]:
            return self.rough, self.refine

        def rough(self, candidate: MeshCandidate, _: float) -> float:
            taken.append(("rough", candidate))
            return self.real[candidate] / 3

        def refine(self, candidate: MeshCandidate, _: float) -> float:
            taken.append(("tight", candidate))
            return self.real[candidate]

    result = run(Stepwise(table.real, share=0.1))
    assert result.num_evaluated == 1
    assert taken == [("rough", first), ("rough", second), ("tight", first), ("rough", third)]


def test_a_point_alone_is_planned_without_bounds():
    class Unbounded(Table):
        def times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
            raise AssertionError(candidates)

        def refine(self, candidate: MeshCandidate, _: float) -> float:
            raise AssertionError(candidate)

    result = run(Unbounded({grid(1)[0]: 2.0}))
    assert (result.best.step_time, result.certificate.bound, result.certificate.gap) == (2.0, 2.0, 0.0)


def test_a_tolerance_stops_early_and_is_told():
    table = Table(dict(zip(grid(2), [1.0, 1.05], strict=True)))
    result = run(table, tolerance=0.2)
    assert result.num_evaluated == 1
    assert result.certificate.gap == pytest.approx(0.055)


def test_an_interruption_returns_the_best_so_far():
    table = Table(dict(zip(grid(3), [1.0, 0.9, 0.95], strict=True)), share=0.5)

    def evaluate(candidate: MeshCandidate) -> EvaluatedCandidate:
        if table.evaluated:
            raise KeyboardInterrupt
        return table.evaluate(candidate)

    result = run(table, evaluate)
    assert result.interrupted
    assert result.certificate.cut_off == "interruption"
    assert result.certificate.bound < result.certificate.objective
    with pytest.raises(KeyboardInterrupt):
        run(table, evaluate)
    late = run(table, time_limit_s=-1.0, always=grid(1))
    assert late.candidate == grid(1)[0]
    assert (late.certificate.cut_off, late.certificate.num_open) == ("time limit", 2)
    assert run(table).certificate.cut_off is None


def test_progress_is_told_before_each_evaluation():
    seen: list[SearchProgress] = []
    run(Table(dict(zip(grid(3), [3.0, 2.0, 1.9], strict=True))), progress=seen.append)
    assert list(dict.fromkeys((p.num_evaluated, p.best) for p in seen)) == [(0, None), (1, 1.9)]


def test_progress_is_told_while_points_are_only_bounded():
    class Slow(Table):
        def refine(self, candidate: MeshCandidate, _: float) -> float:
            time.sleep(0.15)
            return super().refine(candidate, _)

    seen: list[SearchProgress] = []
    run(Slow(dict(zip(grid(4), [3.0, 2.0, 1.9, 1.8], strict=True)), share=0.5), progress=seen.append)
    assert max(p.num_bounded for p in seen) == 4
    assert len({p.num_bounded for p in seen}) >= 3


def test_reasons_are_kept_and_the_smallest_shortage_is_raised():
    table = Table(dict(zip(grid(3), [1.0, 2.0, 3.0], strict=True)))
    lacking = {1: 30, 2: 10, 3: 20}

    def evaluate(candidate: MeshCandidate) -> EvaluatedCandidate:
        raise CapacityError(f"{lacking[candidate.tp]} B too much", missing_bytes=lacking[candidate.tp])

    with pytest.raises(CapacityError, match="10 B too much"):
        run(table, evaluate)

    def refuse(candidate: MeshCandidate) -> EvaluatedCandidate:
        if candidate.tp == 1:
            raise PlanError("no way")
        return table.evaluate(candidate)

    rows = run(table, refuse).certificate.candidates
    assert (rows[-1].status, rows[-1].reason) == ("infeasible", "no way")
    with pytest.raises(PlanError, match="none of the 1 candidates has a plan: no way"):
        run(Table({grid(1)[0]: 1.0}), refuse)


def test_the_smallest_shortage_is_found_out_where_only_its_least_is_known():
    lacks = dict(zip(grid(4), [(40, 45), (10, 30), (20, 25), (50, 51)], strict=True))
    asked: list[MeshCandidate] = []

    class Short(Table):
        def refine(self, candidate: MeshCandidate, _: float) -> float:
            raise CapacityError("much", missing_bytes=lacks[candidate][0], at_least=True)

        def shortage(self, candidate: MeshCandidate) -> CapacityError | None:
            asked.append(candidate)
            return CapacityError(f"{lacks[candidate][1]} B too much", missing_bytes=lacks[candidate][1])

    def evaluate(candidate: MeshCandidate) -> EvaluatedCandidate:
        raise CapacityError("60 B too much", missing_bytes=60)

    with pytest.raises(CapacityError, match="25 B too much") as error:
        run(Short(dict.fromkeys(grid(5), 1.0) | dict(zip(grid(4), (0.9, 0.8, 0.7, 0.6), strict=True))), evaluate)
    assert (error.value.missing_bytes, error.value.at_least) == (25, False)
    assert asked == [grid(4)[1], grid(4)[2]]


def space(world: str = "dgx-h100:8", batch: int = 512, calls: int = 34, **pinned: Any) -> SearchSpace:
    return SearchSpace(Topology.parse(world), batch, calls, frozenset([4096, 14336]), Constraints(**pinned))


def test_points_are_all_that_divide():
    found = list_candidates(space())
    assert all(p.pp * p.dp * p.tp == 64 and 512 % (p.dp * p.microbatch_size) == 0 for p in found)
    assert {p.tp for p in found} == {1, 2, 4, 8}
    assert max(p.pp for p in found) == 32  # calls for every stage
    assert {p.tp for p in list_candidates(space(tp=16))} == {16}
    pinned = dict(pp=2, dp=4, tp=8, microbatch_size=2)
    assert list_candidates(space(**pinned, schedule="gpipe", zero=0)) == [MeshCandidate(2, 4, 8, 2, "gpipe")]
    searched = [MeshCandidate(2, 4, 8, 2, schedule, zero=z) for schedule in ("1f1b", "zb-1p") for z in range(4)]
    assert list_candidates(space(**pinned)) == searched
    assert {p.zero for p in list_candidates(space(**pinned, offload="parameters"))} == {
        0,
        3,
    }  # the others keep them whole


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ({"pp": 3}, "a multiple of 3, but there are 64; expected a size that divides 64"),
        ({"pp": 2, "dp": 2, "tp": 2}, "pp=2 x dp=2 x tp=2 makes 8 ranks; expected 64"),
        (
            {"dp": 32, "microbatch_size": 32},
            "global batch of 512 samples is not divisible by dp=32 x microbatch_size=32 = 1024",
        ),
        ({"tp": 64, "dp": 2}, "sizes whose product divides 64"),
        ({"zero": True}, "constraint zero: input should be a whole number, got True"),
        ({"tp": 0}, "constraint tp: input should be greater than 0, got 0"),
        ({"schedule": "zigzag"}, "constraint schedule: input should be 'gpipe', '1f1b', 'interleaved', 'zb-1p'"),
        ({"tp": 2.5}, "constraint tp: input should be a whole number, got 2.5"),
        ({"pp": "two"}, "constraint pp: input should be a whole number, got 'two'"),
        ({"schedule": "zbv"}, r"or a file that ends in .csv, got 'zbv'; did you mean zb-v\?"),
        ({"schedule": 3}, "constraint schedule: input should be the name of a schedule, .* got 3"),
        ({"offload": "optimiser"}, r"got 'optimiser'; did you mean optimizer\?"),
        ({"hierarchical": "maybe"}, "constraint hierarchical: input should be true or false, got 'maybe'"),
        ({"data_shares": (1, 2.5)}, r"constraint data_shares\[1\]: input should be a whole number, got 2.5"),
        ({"stage_of": {"head": "x"}}, r"constraint stage_of\['head'\]: input should be a whole number, got 'x'"),
        ({"stages": 2}, "unknown constraint 'stages'; here it is pp=2; expected pp, dp"),
    ],
)
def test_constraints_that_cannot_hold(pinned: dict[str, Any], message: str):
    with pytest.raises(ConstraintError, match=message):
        list_candidates(space(**pinned))


def test_a_schedule_with_other_virtual_stages_is_named_first():
    with pytest.raises(
        ConstraintError, match=r"^schedule=zb-v with virtual_stages=3: this schedule has 2 per rank; expect"
    ):
        Constraints(schedule="zb-v", virtual_stages=3).check_idle()
    Constraints(schedule="zb-v", virtual_stages=2).check_idle()
    Constraints(schedule="interleaved", virtual_stages=3).check_idle()


def test_a_tensor_axis_must_divide_something():
    with pytest.raises(ConstraintError, match=r"tp=8 divides no dimension of any weight \(sizes 12, 20\)"):
        list_candidates(SearchSpace(Topology.local(8), 8, 4, frozenset([12, 20]), Constraints(tp=8)))


def test_an_expert_is_divided_as_the_profile_allows():
    """Over one rank or all ranks of ``tp``; over any divisor of ``tp`` under a profile that allows it and ``ahead``."""

    def divisions(tp: int | None = None, etp: int | None = None, ahead: bool = False, any_etp: bool = False):
        pins = Constraints(pp=1, tp=tp, ep=2, etp=etp, ahead=ahead)
        dims = frozenset([4096])
        found = SearchSpace(Topology.preset("dgx-h100"), 64, 8, dims, pins, experts=8, any_etp=any_etp)
        return {(candidate.tp, candidate.etp or candidate.tp) for candidate in list_candidates(found)}

    assert divisions(tp=4) == divisions(tp=4, ahead=True) == divisions(tp=4, any_etp=True) == {(4, 1), (4, 4)}
    assert divisions(tp=4, ahead=True, any_etp=True) == {(4, 1), (4, 2), (4, 4)}
    assert divisions(etp=2) == {(2, 2)}
    assert divisions(tp=4, etp=2, any_etp=True) == {(4, 2)}
    with pytest.raises(PlanError, match="no mesh of 8 ranks with pp=1, tp=4, ep=2, etp=2 fits"):
        divisions(tp=4, etp=2)


def test_more_is_searched_when_asked_for():
    assert all((p.cp, p.ep, p.virtual_stages) == (1, 1, 1) for p in list_candidates(space()))
    assert {p.schedule for p in list_candidates(space())} == {"1f1b", "zb-1p"}
    work = space(ahead=True)
    ahead = list_candidates(SearchSpace(work.topology, 512, 32, work.dims, work.constraints, experts=8, length=8192))
    assert all(math.prod(p.grid.values()) == 64 for p in ahead)
    assert {p.zero for p in ahead} == {0, 1, 2, 3}
    assert {p.ep for p in ahead} == {1, 2, 4, 8}
    assert {"zb-1p", "interleaved", "1f1b"} <= {p.schedule for p in ahead}
    pinned = list_candidates(space(cp=2, zero=3))
    assert {(p.cp, p.zero) for p in pinned} == {(2, 3)}


@pytest.mark.parametrize("schedule", ["zb-1p", "zb-v", "interleaved"])
def test_a_schedule_of_a_pipeline_is_no_plan_of_one_stage(schedule: str):
    space = SearchSpace(Topology.preset("dgx-h100"), 64, 20, frozenset({1024}), Constraints(schedule=schedule))
    assert {(p.pp > 1, p.schedule) for p in list_candidates(space)} == {(True, schedule)}
    with pytest.raises(PlanError, match=f"pp is more than 1, since {schedule} is for a pipeline"):
        list_candidates(replace(space, topology=Topology.local(1)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_schedules_are_those_of_one_stage_as_well(schedule: str):
    space = SearchSpace(Topology.preset("dgx-h100"), 64, 20, frozenset({1024}), Constraints(schedule=schedule))
    assert {p.schedule for p in list_candidates(space) if p.pp == 1} == {schedule}


def test_a_free_axis_makes_up_for_the_ranks_of_the_others():
    """Where there are sequences, ``cp``; else the others have to make as many as there are."""
    pinned = dict(pp=2, dp=4, tp=2)
    assert {p.cp for p in list_candidates(replace(space(**pinned), length=512))} == {4}
    for length in (0, 36):  # which four do not share evenly
        with pytest.raises(ConstraintError, match="makes 16 ranks; expected 64, one per device"):
            list_candidates(replace(space(**pinned), length=length))


def test_virtual_stages_are_even():
    """As many as let stages have about as many layers each, ever more of them."""
    deep = replace(space(calls=128), repeated=126)
    assert even_chunks(deep, 9) == [2, 7, 14]
    assert even_chunks(deep, 8) == [2, 4, 8, 16]  # within a tenth
    assert even_chunks(replace(deep, repeated=96), 8) == [2, 4, 12]
    assert even_chunks(replace(deep, num_calls=9, repeated=7), 4) == [2]  # no number is even
    found = several_stages(deep, MeshCandidate(9, 4, 1, 1))
    assert {(p.schedule, p.virtual_stages) for p in found if p.schedule == "interleaved"} == {
        ("interleaved", v) for v in (2, 7, 14)
    }
    assert all(p.virtual_stages * p.pp <= deep.num_calls for p in found)


class Told:
    """Bounds that are told: by number of pipeline stages and virtual stages, the quick bound, that of a sharding, and
    the recomputation; a string says why there is no plan."""

    def __init__(self, seconds: dict[tuple[int, int], tuple[float, float, float | str]]) -> None:
        self.seconds = seconds
        self.family_bounds: list[Callable[[Sequence[MeshCandidate], float], float]] = [
            lambda candidates, cutoff_s: self._of(candidates[0])[1]
        ]
        self.candidate_bounds: list[Callable[[MeshCandidate, float], float]] = []

    def _of(self, candidate: MeshCandidate) -> tuple[float, float, float | str]:
        is_told = candidate.schedule == "interleaved" and candidate.zero == 1
        return self.seconds.get((candidate.pp, candidate.virtual_stages), (99.0, 99.0, 0.0)) if is_told else (99.0,) * 3

    def times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        return np.array([self._of(candidate)[0] for candidate in candidates])

    def estimate_times(self, candidates: Sequence[MeshCandidate]) -> NDArray[np.float64]:
        return self.times(candidates)

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        pass

    def again_s(self, candidate: MeshCandidate, *, quick: bool = False) -> float:
        found = 0.0 if quick else self._of(candidate)[2]
        if isinstance(found, str):
            raise CapacityError(found)
        return found


@dataclass
class Best:
    """The best plan so far, and the step time of the last candidate; infinite if a bound pruned it."""

    candidate: MeshCandidate
    seconds: float
    last_s: float = math.inf

    def announce(self, candidates: Sequence[MeshCandidate]) -> None:
        """Two processes may plan them."""

    @property
    def is_pruned(self) -> bool:
        return self.last_s == math.inf


def test_candidates_with_several_virtual_stages_are_tried_in_the_order_of_what_they_are_expected_to_take():
    """Of 32 layers on 64 devices, where the best plan has one stage and takes ten seconds: what is expected to take
    longer is not tried."""
    plain = MeshCandidate(1, 64, 1, 1)
    small = replace(space(batch=64, calls=34), repeated=32)
    rows = {p: CandidateOutcome(p, 12.0) for p in list_candidates(small)}
    solved = {plain: EvaluatedCandidate(10.0, 1)}
    told = Told(
        {
            (2, 2): (5.0, 8.0, 1.0),
            (2, 4): (5.0, 8.0, 0.5),
            (2, 16): (10.0, 0.0, 0.0),  # too long by the quick bound
            (4, 2): (6.0, 10.0, 0.0),  # by its sharding
            (4, 4): (6.0, 6.0, 4.0),  # by recomputation
            (4, 8): (2.0, 2.0, "too large"),
            (8, 4): (7.0, 7.0, 0.0),
        }
    )

    def tried(fruit: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
        best, found = Best(plain, 10.0), list[tuple[int, int]]()
        for candidate in list_promising_candidates(small, cast(Any, best), solved, rows, cast(Any, told)):
            if not found or found[-1] != (candidate.pp, candidate.virtual_stages):
                found.append((candidate.pp, candidate.virtual_stages))
            best.last_s = fruit.get(found[-1], 10.0)
            best.seconds = min(best.seconds, best.last_s)
        return found

    assert tried({}) == [(8, 4)], "all sizes of microbatches are told the same: after four that are no better it ends"
    assert tried({(8, 4): math.inf}) == [(8, 4), (2, 4)], "those that a bound prunes do not count"
    endless = Best(plain, 10.0)
    every = list_promising_candidates(small, cast(Any, endless), solved, rows, cast(Any, told))
    assert len(list(every)) == _MOST_PRUNED, "but many of them in a row end it"
    told.seconds[8, 4] = (7.0, 7.0, "too large")
    assert tried({}) == [(2, 4)]
    told.seconds[2, 4] = (5.0, 8.0, "too large")
    assert tried({(2, 2): 9.0}) == [(2, 2)]  # 9 s, as estimated: nothing else is expected to be faster


def test_recomputation_is_estimated_from_what_ranks_hold():
    """Eight calls of a layer on four ranks, two on each; a call saves 10 bytes, 4 of them selectively, and reads 1.

    Under 1F1B the first rank holds four microbatches of two calls: 4 x 2 x 11 = 88 bytes.
    """
    layer = CallCost(
        forward_s=3.0,
        backward_s=6.0,
        saved_bytes=10.0,
        selective_bytes=4.0,
        selective_s=0.5,
        input_bytes=(1.0,),
        saved_inputs=(True,),
    )

    def seconds(free: float, schedule: str = "1f1b", cost: CallCost = layer) -> float:
        costs = RecomputeCosts.of([(cost, 8)])
        return costs.estimate_seconds(free, schedule, 4, 8, 2 if schedule == "zb-v" else 1)

    assert seconds(88.0) == 0.0
    assert seconds(87.0) == seconds(72.0) == 0.5  # one call selectively: 88 - 4 x 4 = 72 bytes
    assert seconds(71.0) == seconds(56.0) == 1.0  # both
    assert seconds(48.0) == 3.0  # one call in full frees 40 bytes
    assert seconds(47.0) == 1.0 + 3.0  # both selectively, and one of them in full
    assert seconds(31.0) == 6.0 and seconds(8.0) == 6.0
    assert seconds(7.0) == math.inf  # inputs take 4 x 2 x 1 bytes
    # the last rank of zb-v holds seven half done microbatches, whose bytes recomputation does not free
    assert seconds(76.0, "zb-v", replace(layer, carried_bytes=10.0)) == math.inf
    assert seconds(88.0, "zb-v", replace(layer, carried_bytes=10.0)) == 0.0


def test_a_sequence_is_shared_where_the_batch_has_too_few_parts():
    """288 nodes, of which 16 x 9 x 8 take 2,016 samples: ``dp`` of 32 does not divide 1,008, 16 does. Shares of the
    batch may differ, though."""
    wide = replace(space("dgx-h100:288", batch=1008, calls=128, pp=9, tp=8), length=8192)
    assert {(p.dp, p.cp) for p in list_candidates(wide)} == {(16, 2), (32, 1)}
    assert {p.cp for p in list_candidates(replace(wide, global_batch=1024))} == {1}
    with pytest.raises(PlanError, match="dp must divide the global batch"):
        list_candidates(replace(wide, length=2048, even=True))  # too few tokens for each


def test_points_of_several_stages_that_are_in_vain_are_left_with_their_bounds():
    """The search gives up on them, not on others, and says how far it is from proven."""
    several = [MeshCandidate(2, 1, 1, size, "interleaved", virtual_stages=2) for size in (1, 2, 3, 4, 5)]
    plain = MeshCandidate(2, 1, 1, 8)
    table = Table({plain: 3.0, **dict.fromkeys(several, 4.0)}, share=0.5)
    found = run(table, patience=2)
    assert (found.candidate, table.evaluated) == (plain, [plain, *several[:2]])
    assert found.certificate.bound == 2.0
    assert run(Table(table.real, share=0.5)).certificate.gap == 0.0


def test_a_certificate_keeps_the_best_bound_of_a_point():
    """What an evaluation says of its candidate may be less than what was known before."""
    table = Table(dict(zip(grid(2), [6.0, 9.0], strict=True)), share=0.9)
    found = run(table, lambda p: replace(table.evaluate(p), least=1.0))
    assert found.certificate.bound == pytest.approx(0.9 * 6.0)


def test_no_point_is_explained():
    with pytest.raises(
        PlanError, match="no mesh of 7 ranks fits: dp must be at most the global batch of 4, pp is at most 4"
    ):
        list_candidates(SearchSpace(Topology.local(7), 4, 4, frozenset([12]), Constraints()))


def test_only_what_is_fixed_is_multiplied():
    with pytest.raises(ConstraintError, match="batch of 8 is not divisible by microbatch_size=3; expected"):
        Constraints(microbatch_size=3).check_batch(8)


def test_axes_of_experts_that_fit_nowhere_are_named():
    space = SearchSpace(Topology.local(6), 8, 4, frozenset([12]), Constraints(tp=2, etp=3), experts=6, any_etp=True)
    with pytest.raises(PlanError, match=r"with tp=2, etp=3 fits: .* ep x etp must divide dp x cp x tp"):
        list_candidates(space)


def test_the_baselines_are_data_parallelism_and_the_textbook():
    candidates = list_candidates(space())
    table = Table({p: float(p.microbatch_size) for p in candidates})
    found = find_baseline_candidates(
        space(), candidates, lambda some: np.array([table.real[p] for p in some]), lambda p: p.pp >= 4 or p.tp == 1
    )
    assert found == {"data parallel": MeshCandidate(1, 64, 1, 1), "megatron": MeshCandidate(4, 2, 8, 1)}
    assert left_out(space(), candidates) == {}
    pinned = space(tp=8)
    assert left_out(pinned, list_candidates(pinned)) == {MeshCandidate(1, 64, 1, 1): "excluded by the constraints"}
    odd = space(batch=48)
    assert list(left_out(odd, list_candidates(odd)).values()) == ["the global batch of 48 is not divisible by dp=64"]


@pytest.mark.parametrize(
    ("world", "pins", "widest"),
    [("dgx-h100:16", {}, 8), ("dgx-h100:16", {"tp": 128}, 128), ("cpu:16", {}, 8), ("gb200-nvl72:4", {}, 32)],
)
def test_tensor_groups_are_not_kept_inside_nodes(world: str, pins: dict[str, Any], widest: int):
    """Nodes may hold one device, or numbers of them that nothing divides; groups of more than 8 are for who asks."""
    assert max(p.tp for p in list_candidates(space(world, batch=4608, **pins))) == widest


def test_tensor_groups_beyond_a_node_are_chosen_where_they_are_faster():
    """Nodes of one device: half of a layer of 64 MiB each, or gradients of as much in every step."""
    topology = Topology(
        name="singles",
        nodes=({"type": "gpu", "count": 4},),
        types={"gpu": {"memory": "16 GB", "peak": {"fp32": "50 TFLOP/s"}, "memory_bandwidth": "1 TB/s"}},
        levels=[{"name": "net", "bandwidth": "1 GB/s", "latency": "1 us"}],
    )
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)), torch.empty(4, 4096)
    work = prepare(model, (inputs,), loss=lambda out: out.square().mean())
    pinned = partition(work, topology, constraints=Constraints(tp=4), estimate_only=True)
    free = partition(work, topology, estimate_only=True)
    apart = partition(work, topology, constraints=Constraints(tp=1), estimate_only=True)
    assert free.estimate.step_time <= pinned.estimate.step_time < apart.estimate.step_time


def test_states_are_shared_by_parts_of_dp_on_several_nodes():
    wide = SearchSpace(Topology.preset("dgx-h100", nodes=64), 512, 32, frozenset([4096]))
    assert {p.dp_shard for p in list_hybrid_candidates(wide, MeshCandidate(1, 512, 1, 1))} == {8, 32, 128}
    assert {p.dp_shard for p in list_hybrid_candidates(wide, MeshCandidate(1, 64, 8, 1))} == {4, 16}
    assert {p.dp_shard for p in list_hybrid_candidates(wide, MeshCandidate(1, 48, 1, 1))} == {8, 24}  # divisors
    assert {p.zero for p in list_hybrid_candidates(wide, MeshCandidate(1, 512, 1, 1))} == {1, 2, 3}
    one_node = replace(wide, topology=Topology.preset("dgx-h100"))
    fixed = [replace(wide, constraints=Constraints(**pins)) for pins in ({"zero": 3}, {"zero": 1, "dp_shard": 8})]
    for other in (one_node, *fixed, replace(wide, train=False)):
        assert list_hybrid_candidates(other, MeshCandidate(1, 8, 1, 1)) == []


def test_a_family_is_refuted_at_once_and_its_points_only_where_it_is_not():
    """A candidate that the first estimate does not know is found, and reported."""
    lean, full = MeshCandidate(1, 4, 1, 1, zero=3), MeshCandidate(1, 4, 1, 1)
    part = MeshCandidate(1, 4, 1, 1, zero=3, dp_shard=2)
    slow = [MeshCandidate(1, 2, 2, 1), MeshCandidate(1, 2, 2, 1, zero=3)]
    real = {full: 4.0, lean: 3.0, slow[0]: 9.0, slow[1]: 9.0}
    taken: list[MeshCandidate] = []

    class Families(Table):
        def family(self, candidate: MeshCandidate) -> MeshCandidate:
            return replace(candidate, zero=0, dp_shard=0)

        def members(self, candidates: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
            return [*candidates, part] if full in candidates else candidates

        @property
        def family_bounds(self) -> Sequence[Callable[[Sequence[MeshCandidate], float], float]]:
            return (lambda candidates, _: min(self.real[p] for p in candidates) * 0.8,)

        def refine(self, candidate: MeshCandidate, _: float) -> float:
            taken.append(candidate)
            return super().refine(candidate, _)

    table = Families({**real, part: 2.0})
    result = run(table, candidates=[*real])
    assert (result.candidate, result.best.step_time) == (part, 2.0)
    assert table.evaluated == [part]
    assert set(taken) == {full, lean, part}
    rows = {(c.mesh["tp"], c.zero, c.dp_shard): c for c in result.certificate.candidates}
    assert rows[1, 3, 2].status == "chosen"
    assert rows[2, 0, 0].bound == rows[2, 3, 0].bound == pytest.approx(0.45 * 9.0)
    assert result.certificate.gap == 0


def test_what_one_of_a_family_takes_bounds_no_other():
    """The slow one is evaluated whatever its bound, the best one is not among the first."""
    slow, part, other = (MeshCandidate(1, 4, 1, 1, zero=3, dp_shard=shard) for shard in (0, 2, 1))
    other = replace(other, dp=2, tp=2)

    class Families(Table):
        def family(self, candidate: MeshCandidate) -> MeshCandidate:
            return replace(candidate, dp_shard=0)

        def members(self, candidates: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
            return [slow, part] if slow in candidates else candidates

    table = Families({slow: 9.0, part: 2.0, other: 3.0})
    result = run(table, candidates=[slow, other], always=[slow])
    assert (result.candidate, table.evaluated) == (part, [slow, part])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 2)), min_size=1, max_size=12), st.floats(0, 1))
def test_a_search_goes_on_where_one_that_left_more_to_plans_has_been(times: list[tuple[float, float]], share: float):
    candidates = grid(len(times))
    more = Table({p: first for p, (first, _) in zip(candidates, times, strict=True)}, share)
    less = Table({p: first * grows for p, (first, grows) in zip(candidates, times, strict=True)}, share)
    known = run(more)
    result = run(less, before=known.rows, always=[known.candidate])
    assert result.best.step_time == min(less.real.values())
    assert result.certificate.gap == 0.0
    best_before = less.real[known.candidate]
    assert all(known.rows[p].lower_bound_s < best_before for p in less.evaluated if p != known.candidate)
    assert len(result.certificate.candidates) == len(times)


def test_what_was_left_out_stays_so_where_a_search_goes_on():
    first, second, out = grid(3)
    table = Table({first: 1.0, second: 2.0})
    known = run(table, left_out={out: "asked otherwise"})
    result = run(table, before=known.rows, left_out={out: "asked otherwise"})
    assert result.candidate == first
    assert [c.reason for c in result.certificate.candidates if c.status == "infeasible"] == ["asked otherwise"]


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_least_bound_is_tightened_at_the_end(evaluated: bool):
    """Of what was evaluated in part, or not at all since that would be in vain, as long as it is the least of all."""
    best, low, high = grid(3)
    table = Table({best: 10.0, low: 20.0, high: 30.0}, share=0.3)
    tightest, asked = {best: 9.0, low: 8.0, high: 25.0}, list[MeshCandidate]()

    def evaluate(candidate: MeshCandidate) -> EvaluatedCandidate:
        return replace(table.evaluate(candidate), least=table.real[candidate], partly=True)

    def last(candidate: MeshCandidate, cutoff_s: float) -> float:
        asked.append(candidate)
        return min(tightest[candidate], cutoff_s)

    result = run(
        table, evaluate, bound_tightly=last, can_prune=lambda candidate, _: not evaluated and candidate != best
    )
    assert table.evaluated == [best, low, high][: 3 if evaluated else 1]
    assert asked == [best, low]  # high may take 9 s, for all that is known
    assert result.certificate.bound == 8.0


@pytest.mark.parametrize(
    ("name", "ahead", "nodes", "every"),
    [("llama", False, 1, 8), ("llama", True, 1, 60), ("experts", True, 1, 120), ("experts", False, 2, 100)],
)
def test_no_plan_is_below_its_bounds(name: str, ahead: bool, nodes: int, every: int):
    """The certificate rests on this: every candidate's bounds hold for what the evaluator makes of it."""
    work = job(name, Topology.preset("dgx-h100", nodes), batch=8 * nodes, ahead=ahead)
    bounds = ModelBounds(work)
    space = build_search_space(work)
    candidates = list_candidates(space)
    evaluator = CandidateEvaluator(work)
    floors = BoundCascade(bounds, evaluator, candidates, space)
    families = {floors.family(candidate): floors.members([candidate]) for candidate in candidates}
    every_point = list(dict.fromkeys([*candidates, *(p for members in families.values() for p in members)]))
    assert any(candidate.dp_shard for candidate in every_point) == (nodes > 1)
    first = floors.times(every_point)
    for candidate, quick in list(zip(every_point, first.tolist(), strict=True))[::every]:
        solved = evaluator.solve(candidate)
        split, step = solved.stages, solved.estimate.step_time
        least = step - (split.pipeline_s - split.lower_bound_s)
        assert quick <= bounds.refine(candidate) <= least, candidate
        assert all(bound(floors.members([candidate]), np.inf) <= least for bound in floors.family_bounds), candidate
        assert all(bound(candidate, np.inf) <= least for bound in floors.candidate_bounds), candidate
        assert sum(solved.estimate.breakdown.values()) == pytest.approx(step)
        assert min(solved.estimate.breakdown.values()) >= 0.0


def test_shardings_of_the_search_bound_candidates_with_more_ranks_for_a_sequence():
    """Collectives over two ranks of tp are known from one sharding, and only from there: twice as many ranks for a
    sequence, of twice as many samples, take at least as long."""
    work = job("llama", Topology.preset("dgx-h100"), batch=64, ahead=True)
    bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
    space = build_search_space(work)
    plain = MeshCandidate(1, 4, 2, 4)
    shared = replace(plain, dp=2, cp=2, microbatch_size=8)
    others = [replace(shared, microbatch_size=16), replace(plain, dp=2, tp=4), replace(plain, dp=8, tp=1)]
    every = [plain, shared, *others]
    floors = BoundCascade(bounds, evaluator, list_candidates(space), space)
    quick = floors.times(every).tolist()
    assert floors.estimate_times(every).tolist() == quick
    of_plain = floors.sharded.bound_blocks(plain, plain.microbatch_size)
    assert of_plain is not None
    estimated = floors.estimate_times(every).tolist()
    assert quick[0] < estimated[0] <= bounds.with_floor([plain], of_plain) * (1 + 1e-9)
    assert quick[1] < estimated[1]
    assert estimated[2:] == quick[2:], "more samples take less time each, and another tp has other collectives"
    of_shared = floors.sharded.bound_blocks(shared, shared.microbatch_size)
    assert of_shared is not None and estimated[1] <= bounds.with_floor([shared], of_shared)


@pytest.mark.parametrize("name", ["llama", pytest.param("experts", marks=pytest.mark.slow)])
def test_what_memory_demands_is_no_more_than_any_plan_takes(name: str):
    """Of schedules that are followed: what has a plan is not refused, and its time is not below the bounds, also where
    these take for granted that it is good enough."""
    topology = Topology.preset("dgx-h100")
    refused = solved_too = 0
    for memory in (200_000, 700_000, 1_500_000):
        kinds = {
            kind: device.model_copy(update={"memory": memory, "reserved": 0, "communicator": 0})
            for kind, device in topology.types.items()
        }
        small = Topology(name="small", nodes=topology.nodes, types=kinds, levels=topology.levels)
        work = job(name, small, batch=32, ahead=True)
        bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
        space = build_search_space(work)
        candidates = list_candidates(space)
        floors = BoundCascade(bounds, evaluator, candidates, space)
        for candidate in [p for p in candidates if not is_plain(p.schedule, p.virtual_stages)][::29]:
            try:
                solved = evaluator.solve(candidate)
            except CapacityError:
                solved = None
            bound: list[float] | None = []
            least = math.inf
            if solved is not None:
                least = solved.estimate.step_time - (solved.stages.pipeline_s - solved.stages.lower_bound_s)
            try:
                of_family = [
                    step([candidate], limit) for step in floors.family_bounds for limit in (math.inf, 1.3 * least)
                ]
                bound = [
                    *of_family,
                    *(step(candidate, limit) for step in floors.candidate_bounds for limit in (math.inf, least)),
                ]
            except CapacityError:
                bound = None
            assert bound is not None or solved is None, candidate
            assert bound is None or max(bound) <= least, candidate
            refused += bound is None
            solved_too += solved is not None
    assert refused >= 3 <= solved_too


@pytest.mark.parametrize("overlap", [True, False])
def test_gathering_weights_takes_as_long_for_a_small_microbatch(overlap: bool):
    """A share of a larger one's time does not say so, and would let small microbatches under ZeRO-3 be tried."""
    work = job("experts", Topology.preset("dgx-h100"), profile=ExecutionProfile(overlap=overlap))
    bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
    gathers = Gathers(work, evaluator.placements, bounds.device)
    large, small = MeshCandidate(1, 8, 1, 8, ep=2, zero=3), MeshCandidate(1, 8, 1, 1, ep=2, zero=3)
    assert gathers.floor(small) == gathers.floor(large)
    assert gathers.floor(replace(small, zero=2)) == ({}, {})
    plain = dict.fromkeys(work.model.blocks, (1e-09, 2e-09))
    both = gathers.beside(BlockLowerBound(plain, (plain,)), small)
    assert both is not None and both.of_kind == (both.seconds,)
    sent, copied = gathers.floor(small)
    placed = [call.block for call in work.model.calls if not call.shared and not call.prologue]
    for block in placed:
        for alone, copy in zip(sent[block], copied[block], strict=True):
            assert alone > 1e-6  # a collective's start-up at least
            assert 0 < copy < alone
    # the first call is gathered before the forward, the last one before the backward; the gradients of the first are
    # scattered after the backward
    ahead, back = ([sent[block][way] for block in placed] for way in (0, 1))
    scatters = [both - gather for both, gather in zip(back, ahead, strict=True)]
    for way, collectives in enumerate((sum(ahead[1:]), sum(ahead[:-1]) + sum(scatters[1:]))):
        computed = sum(plain[block][way] + copied[block][way] for block in placed)
        expected = collectives + (0.0 if overlap else computed)
        found = sum(both.seconds[block][way] for block in placed)
        assert found == pytest.approx(expected, rel=0.2 if overlap else 1e-3)
    step = evaluator.solve(small).estimate.step_time
    assert bounds.with_floor([small], both) <= step


@pytest.mark.parametrize(
    ("gather", "again"),
    [("call", 1.0), ("parameter", 3.0)],
)
def test_recomputation_waits_for_no_gathers_in_a_bound(gather: Literal["call", "parameter"], again: float):
    """A call takes 2 s forward and 4 s backward; its weights are gathered in 3 s and in 5 s. Forward waits 1 s, so it
    takes 3 s; backward waits 1 s and takes 5 s. If the call is recomputed in full, its 2 s hide the second wait, too:
    2 + 2 + 4 s and the 1 s of forward are 9 s, 1 s more than without. If weights are gathered for recomputation and
    again for backward, recomputation takes the 3 s of forward."""
    work = job("experts", Topology.preset("dgx-h100"), profile=ExecutionProfile(gather=gather))
    gathers = Gathers(work, CandidateEvaluator(work).placements, ModelBounds(work).device)
    gathers.slowdown = 1.0
    found = gathers._add_to_cost(CallCost(forward_s=2.0, backward_s=4.0), (3.0, 5.0), (0.0, 0.0))
    assert (found.forward_total_s, found.backward_total_s, found.recompute_s) == (3.0, 5.0, again)


@pytest.mark.slow
def test_bounds_hold_where_recomputation_hides_gathers():
    """ZeRO-3 with little memory and a slow network."""
    fast = Topology.preset("dgx-h100")
    level = fast.levels[0].model_copy(update={"bandwidth": 2e7, "all_reduce": ()})
    hidden = 0
    for memory in (400_000, 600_000):
        little = {"memory": memory, "reserved": 0, "communicator": 0}
        kinds = {kind: device.model_copy(update=little) for kind, device in fast.types.items()}
        topology = Topology(name="slow", nodes=fast.nodes, types=kinds, levels=(level,))
        work = job("experts", topology, batch=64, ahead=True)
        bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
        space = build_search_space(work)
        candidates = list_candidates(space)
        floors = BoundCascade(bounds, evaluator, candidates, space)
        plain = [c for c in candidates if is_plain(c.schedule, c.virtual_stages) and c.pp <= 2]
        for candidate in [p for c in plain for p in floors.members([c]) if p.zero == 3][::2]:
            try:
                solved = evaluator.solve(candidate)
            except CapacityError:
                continue
            step = solved.estimate.step_time
            least = step - (solved.stages.pipeline_s - solved.stages.lower_bound_s)
            assert all(bound(floors.members([candidate]), np.inf) <= least for bound in floors.family_bounds), candidate
            assert all(bound(candidate, np.inf) <= least for bound in floors.candidate_bounds), candidate
            hidden += solved.estimate.breakdown["recompute"] > 0.02 * step
    assert hidden > 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "one layer", "experts"])
def test_scattering_gradients_behind_every_backward_bounds_a_step(name: str, overlap: bool):
    """Under ZeRO-2, where the network is what takes longest: no plan takes less, and some not much more."""
    fast = Topology.preset("dgx-h100")
    slow = fast.levels[0].model_copy(update={"bandwidth": 2e5, "all_reduce": ()})
    topology = Topology(name="slow", nodes=fast.nodes, types=fast.types, levels=(slow,))
    work = job(name, topology, batch=32, profile=ExecutionProfile(overlap=overlap))
    bounds, evaluator = ModelBounds(work), CandidateEvaluator(work)
    space = build_search_space(work)
    candidates = [
        candidate for candidate in list_candidates(space) if candidate.zero == 2 and candidate.num_microbatches(32) > 1
    ]
    floors = BoundCascade(bounds, evaluator, candidates, space)
    near = 0
    for candidate in candidates[:: 1 + len(candidates) // 12]:
        found, step = floors._bound_zero2_scatters(candidate), evaluator.solve(candidate).estimate.step_time
        assert found <= step, candidate
        near += found > max(0.25 * step, 3 * bounds.times([candidate])[0])
    assert near > 2


def stages() -> st.SearchStrategy[list[tuple[float, float, float]]]:
    """For each stage the seconds of a microbatch's forward, of its backward, and of scattering its gradients."""
    seconds = st.floats(0.0, 4.0)
    return st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6)


@settings(max_examples=300)
@given(stages(), st.integers(2, 40), st.floats(1.0, 1.9), st.booleans(), st.floats(0.0, 1.0))
def test_scattering_takes_no_more_than_that_bound(
    of_stages: list[tuple[float, float, float]], m: int, slowdown: float, overlap: bool, share: float
):
    """However gradients and work are divided among stages."""
    gathers = Gathers.__new__(Gathers)
    gathers.slowdown, gathers.overlap = slowdown, overlap
    gathers._bound_scatter_seconds = lambda candidate: sum(again for *_, again in of_stages)  # type: ignore[method-assign]
    each = [ahead + back for ahead, back, _ in of_stages]
    pipeline, tail, waited = (m - 1) * max(each) + sum(each), 0.0, 0.0
    for _, back, again in of_stages:
        exposed = GradientReduction(again_s=again).exposed(back, slowdown, 0.0, overlap, m)
        tail, waited = max(tail, exposed - waited), waited + back
    candidate = MeshCandidate(len(of_stages), 2, 1, 1, zero=2)
    forward = sum(ahead for ahead, *_ in of_stages)
    assert gathers.scattered(candidate, m, share * pipeline, forward) <= (pipeline + tail) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("name", "share", "hosted"), [("llama", 0.2, False), ("experts", 0.2, False), ("llama", 0.3, True)]
)
def test_states_alone_are_too_large_where_no_stages_hold_them(name: str, share: float, hosted: bool):
    """The quick check refuses no more than the relaxed stages do; they only say more."""
    topology = Topology.preset("dgx-h100")
    offload = ("optimizer",) if hosted else None
    roomy = job(name, topology, ahead=True, offload=offload)
    size = sum(cost.total for cost in ModelBounds(roomy).states.values())
    memory = {"memory": round(share * size), "reserved": 0, "communicator": 0}
    kinds = {kind: device.model_copy(update=memory) for kind, device in topology.types.items()}
    small = Topology(name="small", nodes=topology.nodes, types=kinds, levels=topology.levels)
    work = job(name, small, ahead=True, offload=offload)
    bounds = ModelBounds(work)
    space = build_search_space(work)
    tried = [candidate for candidate in list_candidates(space)[::3] if candidate.schedule == "1f1b"]
    refused = {candidate: error for candidate in tried if (error := refusal(bounds, candidate))}
    for candidate, least in refused.items():
        assert least.at_least, candidate
        with pytest.raises(CapacityError) as error:
            bounds.refine(candidate)
        assert (error.value.at_least, least.missing_bytes <= error.value.missing_bytes + 1) == (False, True)
    assert 0 < len(refused) < len(tried)


def refusal(bounds: ModelBounds, candidate: MeshCandidate) -> CapacityError | None:
    try:
        bounds.check_states(candidate)
    except CapacityError as error:
        return error
    return None


def test_a_model_is_searched_to_the_end():
    explored = search_for_plan(job("llama", Topology.local(4)))
    certificate = explored.compared()
    assert certificate.gap < 0.02
    assert explored.chosen.estimate.step_time == pytest.approx(certificate.objective)
    rows = {(c.mesh["pp"], c.mesh["tp"]) for c in certificate.candidates if c.status in ("chosen", "solved")}
    assert (1, 1) in rows  # plain data parallelism
    assert (1, 4) in rows  # tensor parallelism as wide as the machine


def test_points_of_one_kind_may_reduce_their_gradients_over_other_axes():
    """The states of a candidate are found once for all like it; with or without ``dp`` their gradients differ."""
    work = job("llama", Topology.preset("dgx-h100"), ahead=True)
    together, alone = CandidateEvaluator(work), CandidateEvaluator(work)
    first = MeshCandidate(pp=4, dp=1, tp=1, microbatch_size=2, cp=2)
    second = MeshCandidate(pp=2, dp=2, tp=1, microbatch_size=2, cp=2)
    together.solve(first)
    assert together.solve(second).estimate == alone.solve(second).estimate


def test_what_does_not_fit_is_not_tried_with_more_states():
    """Of schedules that are followed; under ZeRO-3 there is more besides states."""
    tried: list[MeshCandidate] = []
    fewest = {0: 40.0, 1: 30.0, 2: 20.0, 3: 10.0}
    siblings = ZeroInfeasibility(lambda candidate: fewest[candidate.zero] - candidate.dp_shard)

    def solve(candidate: MeshCandidate) -> str:
        tried.append(candidate)
        if candidate.microbatch_size == 1:
            raise CapacityError("too much", missing_bytes=5)
        return "a plan"

    def outcome(candidate: MeshCandidate) -> str:
        try:
            return siblings.tried(candidate, solve)
        except CapacityError as error:
            return "refused without trying" if error.at_least else "refused"

    base = MeshCandidate(pp=2, dp=2, tp=1, microbatch_size=1, schedule="interleaved", virtual_stages=2, zero=2)
    assert outcome(base) == "refused"
    assert outcome(replace(base, zero=1)) == "refused without trying"
    assert outcome(replace(base, zero=2, dp_shard=2)) == "refused", "with fewer bytes"
    assert outcome(replace(base, zero=3)) == "refused", "which gathers besides"
    assert outcome(replace(base, zero=1, microbatch_size=2)) == "a plan"
    assert outcome(replace(base, zero=1, virtual_stages=1, schedule="1f1b")) == "refused"
    assert outcome(replace(base, zero=0, virtual_stages=1, schedule="1f1b")) == "refused", "quick as it is"
    assert len(tried) == 6


def test_a_time_limit_returns_the_best_so_far_with_its_gap():
    model, inputs = small_experts(8)
    topology = Topology.preset("dgx-h100")
    proven = partition(model, topology, inputs, global_batch=16, estimate_only=True)
    hurried = partition(model, topology, inputs, global_batch=16, time_limit_s=1e-9)
    assert proven.certificate.gap < 0.005  # bounds know little of reductions beside the backwards of other stages
    assert hurried.certificate.gap > 0
    assert hurried.certificate.bound <= proven.certificate.objective <= hurried.certificate.objective
    with pytest.raises(TimeLimitError) as late:  # with no layout to compare with, nothing is known yet
        partition(model, topology, inputs, global_batch=16, time_limit_s=1e-9, estimate_only=True)
    assert "the time limit passed" in str(late.value)
    assert late.value.advise is None


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "1", True])
def test_a_time_limit_is_a_length_of_time(seconds: Any):
    with pytest.raises(InputsError, match="time_limit_s must be a positive number of seconds, or None; got "):
        partition(small_experts(8)[0], Topology.local(2), time_limit_s=seconds)


@pytest.mark.parametrize(
    ("world", "batch", "length", "pins", "words"),
    [
        (8, 8, 2048, {}, "was not tried, because ranks would have too few tokens of a sample"),
        (
            8,
            8,
            8192,
            {},
            "was tried only where an estimate promised a faster step, because a rank would have fewer than 8,192",
        ),
        (8, 8, 32768, {}, "was tried over 2, 4 ranks. Over other numbers of ranks it was tried only where an"),
        (
            8,
            2,
            8192,
            {"pp": 1},
            "was tried over 2, 4 ranks where the batch cannot be divided over the ranks without context parallelism.",
        ),
        (
            8,
            8,
            32769,
            {},
            "was not tried, because ranks would have too few tokens of a sample, or unequal numbers of them.",
        ),
    ],
)
def test_what_is_said_of_context_parallelism_is_what_was_tried(
    world: int, batch: int, length: int, pins: dict[str, Any], words: str
):
    space = SearchSpace(
        Topology.local(world), batch, 4, frozenset([4096]), Constraints(**pins), length=length, even=True
    )
    tried = {candidate.cp for candidate in list_candidates(space)} - {1}
    said = beyond_the_bound(space)["cp"]
    assert f"Context parallelism {words}" in said
    assert tried == ({2, 4} if "was tried over" in words else set())


def test_short_pieces_of_a_sequence_are_candidates_beside_the_search():
    """Samples of 8,192 tokens over two ranks of 4,096 or four of 2,048; with cp=8 a rank would have 1,024."""
    space = SearchSpace(Topology.preset("dgx-h100", nodes=1), 64, 8, frozenset([4096]), length=8192)
    found = list_short_context_candidates(space, {(1, 0)})
    assert {(c.pp, c.dp, c.cp, c.tp) for c in found} == {
        (pp, 8 // (pp * cp * tp), cp, tp) for pp in (1, 2, 4) for cp in (2, 4) for tp in (1, 2, 4) if pp * cp * tp <= 8
    }
    assert {(c.schedule, c.virtual_stages, c.zero) for c in found} == {("1f1b", 1, 1)}
    assert not {*found} & {*list_candidates(space)}
    for pins, left in (({"cp": 1}, set()), ({"tp": 4}, {(1, 1, 2, 4)}), ({"dp": 4}, {(1, 4, 2, 1)})):
        pinned = replace(space, constraints=Constraints(**pins))
        assert {(c.pp, c.dp, c.cp, c.tp) for c in list_short_context_candidates(pinned, {(1, 0), (0, 0)})} == left


def test_context_parallelism_is_tried_beside_the_best_plan():
    """Wide layers with one sample for each node: half of tp and two ranks for each sequence send less than tp=8 does.

    The free plan is at least as fast as one with ``cp=1`` and one with ``cp=2``, though sequences of 8,192 tokens are
    not shared in the space that the bounds cover.
    """
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=8,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.empty((1, 8192), dtype=torch.int64)
    topology, inputs = Topology.preset("dgx-h100", nodes=16), {"input_ids": ids, "labels": ids}
    prepared = prepare(model, inputs, precision="bf16")

    def plan(**pins: Any) -> Plan:
        pinned = Constraints(**pins)
        return partition(prepared, topology, global_batch=16, constraints=pinned, estimate_only=True)

    free = plan()
    assert free.mesh["cp"] == 2
    assert free.certificate.objective < plan(cp=1).certificate.objective
    assert free.certificate.objective <= plan(cp=2).certificate.objective * (1 + 1e-9)
    assert "where an estimate promised a faster step" in free.certificate.beyond["cp"]


def test_what_is_said_of_parts_that_share_states_is_what_was_tried():
    topology = Topology.preset("dgx-h100", nodes=16)
    for pins, words in (({}, "was tried over about as many ranks as a node has"), ({"zero": 1}, "was not tried")):
        space = SearchSpace(topology, 512, 32, frozenset([4096]), Constraints(**pins))
        parts = list_hybrid_candidates(space, MeshCandidate(1, 64, 2, 1, "1f1b"))
        assert {part.dp_shard for part in parts} == ({4, 16} if not pins else set())
        assert words in beyond_the_bound(space)["dp_shard"]


def test_the_schedules_that_the_proof_covers_are_those_that_are_searched():
    said = beyond_the_bound(SearchSpace(Topology.local(8), 8, 4, frozenset([4096])))["schedule"]
    assert said.startswith("The proof covers the pipeline schedules 1F1B and ZB-1P with one stage on each rank.")
