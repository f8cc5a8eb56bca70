"""Stages: the exact split, its memory, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.constraints import pinned_calls
from partitioner.cost.call.call_cost import CallCost
from partitioner.errors import CapacityError, ConstraintError, PlanError
from partitioner.schedules.formulas import held_microbatches, pipeline_seconds
from partitioner.schedules.makespan import Phases
from partitioner.solve.stages.lower_bound import least_time
from partitioner.solve.stages.problem import Pace, StageCall, StageProblem
from partitioner.solve.stages.range_sums import segments_of
from partitioner.solve.stages.split import SLACK, StageSplit, solve_stages
from partitioner.topology.hardware import Link

WIRE = Link(name="wire", bandwidth=100.0, latency=0.01, level=0)


def call(
    k: int,
    forward: float = 1.0,
    saved: float = 0.0,
    *,
    size: float = 1.0,
    states: tuple[str, ...] = (),
    weights: float = 1.0,
    quick: float = 0.0,
    carried: float = 1.0,
) -> StageCall:
    """A call that reads the value before it and makes one of ``size`` bytes; backward takes twice as long, of which
    ``weights`` forwards for gradients of weights. ``quick``: of what is saved the share that a tenth of a forward makes
    again; ``carried``: as a share of it what is held between the halves of a backward."""
    cost = CallCost(
        forward_s=forward,
        backward_s=2 * forward,
        weights_s=weights * forward,
        saved_bytes=saved,
        carried_bytes=carried * saved,
        selective_bytes=quick * saved,
        selective_s=0.1 * forward * bool(quick * saved),
        saved_inputs=(True,),
        input_bytes=(size,),
        output_bytes=(size,),
        output_grads=(True,),
    )
    return StageCall(f"layers.{k}", cost, (f"x{k}",), (f"x{k + 1}",), states or (f"w{k}",), k)


def problem(
    calls: list[StageCall], stages: int, microbatches: int = 4, capacity: float = 1e9, **more: object
) -> StageProblem:
    sizes = {name: 1.0 for c in calls for name in c.states}
    fields: dict[str, object] = {"state_bytes": sizes, "local": frozenset(["x0"]), "links": (WIRE,) * (stages - 1)}
    return StageProblem(tuple(calls), stages, microbatches, (int(capacity),) * stages, **{**fields, **more})  # type: ignore[arg-type]


def by_hand(p: StageProblem, stage: int, start: int, stop: int) -> tuple[float, float]:
    """Seconds and bytes of a stage, counted call by call, recomputing as few of its first calls as fit, and of the
    others nothing or what is quickly made: what is faster."""
    return min(_by_hand(p, stage, start, stop, in_part) for in_part in (False, True))


def _by_hand(p: StageProblem, stage: int, start: int, stop: int, in_part: bool) -> tuple[float, float]:
    calls = p.calls[start:stop]
    costs = p.pace(stage).costs[start:stop]
    quick = [in_part * c.cost.selective_bytes for c in calls]
    read = {name: size for c in calls for name, size in zip(c.inputs, c.cost.input_bytes, strict=True)}
    states = sum(p.state_bytes[name] for name in {n for c in calls for n in c.states})

    def crossing(cut: int) -> float:
        made = {o: s for c in p.calls[:cut] for o, s in zip(c.outputs, c.cost.output_bytes, strict=True)}
        return sum(size for name, size in made.items() if any(name in c.inputs for c in p.calls[cut:]))

    def transfer(cut: int, link: int) -> float:
        return p.links[link].time(crossing(cut)) if 0 < cut < len(p.calls) and crossing(cut) else 0.0

    base = states + 2 * (crossing(start) * (start > 0) + crossing(stop))
    flying = p.in_flight(stage)
    for again in range(len(calls) + 1):
        kept = sum(c.cost.saved_bytes - q for c, q in zip(calls[again:], quick[again:], strict=True))
        memory = base + flying * (kept + sum(read.values()))
        memory += max(c.cost.saved_bytes for c in calls) if again else max(quick)
        if memory <= p.capacity[stage] or again == len(calls):
            break
    seconds = sum(c.forward_s + c.backward_s for c in costs) + sum(c.forward_s for c in costs[:again])
    seconds += in_part * sum(c.selective_s for c in costs[again:])
    seconds = seconds + transfer(start, stage - 1) + (transfer(stop, stage) if stop < len(p.calls) else 0.0)
    return (seconds if memory <= p.capacity[stage] else math.inf), memory


def brute_force(p: StageProblem) -> float:
    best = math.inf
    n = len(p.calls)
    for inner in itertools.combinations(range(1, n), p.num_stages - 1):
        cuts = (0, *inner, n)
        if any(not cuts[s] <= k < cuts[s + 1] for k, s in p.pinned.items()):
            continue
        times = [by_hand(p, s, cuts[s], cuts[s + 1])[0] for s in range(p.num_stages)]
        best = min(best, (p.num_microbatches - 1) * max(times) + sum(times))
    return best


def pace(calls: list[StageCall], rng: np.random.Generator) -> Pace:
    """Devices that take longer for some calls than for others."""
    scaled = [(c.cost, float(rng.choice([0.5, 1.0, 1.5]))) for c in calls]
    return Pace(tuple(c.paced(x) for c, x in scaled))


@st.composite
def problems(draw: st.DrawFn) -> StageProblem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(n, 4)))
    tied = draw(st.booleans())
    calls = [
        call(k, float(rng.integers(1, 9)), float(rng.integers(0, 9)), size=float(rng.integers(1, 40)),
             weights=float(rng.choice([0.2, 0.7, 1.0, 1.6])), quick=float(rng.choice([0.0, 0.5, 0.9])),
             carried=float(rng.choice([0.0, 0.3, 1.0, 1.5])),
             states=("tied",) if tied and k in (0, n - 1) else ())
        for k in range(n)
    ]  # fmt: skip
    if draw(st.booleans()) and n > 2:  # a value that skips ahead
        last = calls[-1]
        more = replace(last.cost, saved_inputs=(True, True), input_bytes=(0.0, 0.0))
        calls[-1] = replace(last, inputs=(f"x{n - 1}", "x1"), cost=more)
    # a value has one size, that of the call that makes it
    sizes = {o: c.cost.output_bytes[0] for c in calls for o in c.outputs} | {"x0": 1.0}
    calls = [replace(c, cost=replace(c.cost, input_bytes=tuple(sizes[i] for i in c.inputs))) for c in calls]
    return problem(
        calls,
        stages,
        draw(st.integers(1, 8)),
        capacity=draw(st.sampled_from([60, 150, 300, 10_000])),
        state_bytes={name: float(rng.integers(0, 20)) for c in calls for name in c.states},
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        pinned={0: 0, n - 1: stages - 1} if draw(st.booleans()) else {},
        paces=tuple(pace(calls, rng) for _ in range(stages)),
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_split_is_the_best_of_all(p: StageProblem):
    expected = brute_force(p)
    if math.isinf(expected):
        with pytest.raises(CapacityError):
            solve_stages(p)
        return
    split = solve_stages(p)
    assert split.least_s == pytest.approx(expected)
    assert split.least_s <= split.pipeline_s <= (1 + SLACK) * split.least_s + 1e-9
    quick = least_time(p)
    assert quick.pipeline_s(p.schedule, p.num_stages, p.num_microbatches) <= split.least_s * (1 + 1e-12)
    if p.num_stages == 1:
        assert quick.total_s * p.num_microbatches == pytest.approx(split.least_s)
        assert quick.backward_s == split.stages[0].backward_s + split.stages[0].recompute_s
    for s, stage in enumerate(split.stages):
        seconds, memory = by_hand(p, s, stage.start, stage.stop)
        assert stage.time_s == pytest.approx(seconds)
        assert stage.memory == pytest.approx(memory, abs=1)


def test_a_heavy_head_gets_fewer_layers():
    calls = [call(k) for k in range(8)] + [call(8, forward=4.0)]
    assert solve_stages(problem(calls, 3)).cuts == (4, 8)


def test_what_calls_share_counts_once():
    calls = [call(k, states=("tied",)) for k in range(3)]
    states = segments_of(calls).states_of({"tied": 7.0})
    assert states[0, 3] == 7.0
    assert states[1, 2] == 7.0


def test_only_as_many_calls_as_needed_are_recomputed():
    calls = [call(k, saved=10.0) for k in range(8)]
    roomy = solve_stages(problem(calls, 1, capacity=200))
    tight = solve_stages(problem(calls, 1, capacity=80))
    assert roomy.stages[0].recompute == 0
    assert tight.stages[0].recompute == 3  # 8 of states, 8 of inputs, 10 for one that is recomputed, 5 x 10 saved
    assert tight.stages[0].memory <= 80
    assert tight.stages[0].recompute_s == 3.0
    assert solve_stages(problem(calls, 1, capacity=200, recompute="full")).stages[0].recompute == 8


def test_earlier_stages_keep_more_microbatches():
    calls = [call(k, saved=1.0) for k in range(8)]
    memory = [stage.memory for stage in solve_stages(problem(calls, 4, 8)).stages]
    assert memory == sorted(memory, reverse=True)
    everything = solve_stages(problem(calls, 4, 8, schedule="gpipe")).stages[3]
    assert everything.memory > memory[3]


def test_pinned_calls_stay_where_they_are():
    calls = [call(k) for k in range(8)]
    split = solve_stages(problem(calls, 2, pinned={5: 0}))
    assert split.cuts[0] > 5


def test_what_is_lacking_is_said():
    calls = [call(k, saved=100.0, size=30.0) for k in range(4)]
    with pytest.raises(CapacityError) as caught:
        solve_stages(problem(calls, 2, capacity=200, microbatch_size=4, recompute="none"))
    error = caught.value
    assert (error.stage, error.missing_bytes) == (1, 253)
    assert error.shortage.startswith("stage 1 of 2 (layers.1 to layers.3) needs 453 B of the 200 B usable on a device")
    assert str(error).endswith(": 253 B too much")
    with pytest.raises(CapacityError, match=r"needs at least 453 B .*: at least 253 B too much"):
        least_time(problem(calls, 2, capacity=200, microbatch_size=4, recompute="none"))  # of a relaxed problem


def test_no_more_stages_than_calls():
    with pytest.raises(PlanError, match="5 pipeline stages for 4 calls"):
        solve_stages(problem([call(k) for k in range(4)], 5))


def test_pins_that_leave_a_stage_empty_are_refused():
    with pytest.raises(PlanError, match=r"no split into 3 stages has layers\.0 on stage 1"):
        solve_stages(problem([call(k) for k in range(4)], 3, pinned={0: 1}))


def test_stages_of_module_paths():
    paths = ["embed", "layers.0", "layers.1", "layers.10", "norm", "lm_head"]
    assert pinned_calls({"lm_head": -1, "layers.1": 0}, paths, 2) == {2: 0, 5: 1}
    assert pinned_calls({"layers": 0, "layers.10": 1}, paths, 2) == {1: 0, 2: 0, 3: 1}
    assert pinned_calls({"layers.0.mlp": 0}, paths, 2) == {1: 0}
    with pytest.raises(ConstraintError, match=r"\['head'\] names no module of the model; near it: .*lm_head"):
        pinned_calls({"head": 0}, paths, 2)
    with pytest.raises(ConstraintError, match="expected -2 to 1"):
        pinned_calls({"norm": 2}, paths, 2)
    with pytest.raises(ConstraintError, match=r"'layers\.0' on stage 1 and 'norm', which runs after it, on stage 0"):
        pinned_calls({"layers.0": 1, "norm": 0}, paths, 2)


def test_a_deep_model_over_many_stages_is_quick():
    calls = [call(0, 0.3), *(call(k, 1.0, 3.0) for k in range(1, 127)), call(127, 2.5, 8.0)]
    start = time.perf_counter()
    split: StageSplit = solve_stages(problem(calls, 16, 64, capacity=700))
    assert time.perf_counter() - start < 1.0
    assert len(split.stages) == 16
    assert max(s.time_s for s in split.stages) < 3 * 10


EVEN = Phases(1.0, 1.0, 1.0)


def bubble(schedule: str, p: int, m: int, v: int = 1, phases: Phases = EVEN) -> float:
    """Seconds beyond the work, where all virtual stages take as long."""
    return pipeline_seconds(schedule, p, m, v, [phases] * (p * v)) - m * v * phases.total


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "seconds"),
    [  # those of the papers, in phases of a virtual stage
        ("1f1b", 4, 12, 1, 3 * 3),
        ("gpipe", 4, 12, 1, 3 * 3),
        ("interleaved", 4, 12, 2, 3 * 3),  # half of 1F1B's, whose stages are twice as long
        ("interleaved", 4, 12, 4, 3 * 3),
        ("zb-1p", 4, 12, 1, 3 * 1),  # (p - 1)(F + I - W)
        ("zb-2p", 4, 12, 1, 3 * 1),  # the ranks start one after the other
        ("zb-v", 4, 12, 2, 3 * 1),
        ("dualpipe-v", 4, 12, 2, 3 * 1),
    ],
)
def test_bubbles_are_those_of_the_papers(schedule: str, p: int, m: int, v: int, seconds: float):
    assert bubble(schedule, p, m, v) == pytest.approx(seconds)


def test_what_many_microbatches_take_goes_on_as_what_few_do():
    uneven = [Phases(1.0 + k % 3, 1.5, 0.5 + k % 2) for k in range(4)]
    for schedule in ("interleaved", "zb-1p", "zb-v"):
        taken = [pipeline_seconds(schedule, 2, m, 2, uneven) for m in (4000, 8000, 12000)]
        assert taken[2] - taken[1] == pytest.approx(taken[1] - taken[0])


def test_stages_hold_as_many_microbatches_as_the_papers_say():
    def most(counts: Sequence[tuple[int, int]]) -> int:
        return sum(map(sum, counts))

    assert held_microbatches("zb-1p", 4, 12, 1).pairs[2] == ((2, 2), (1, 3))
    for schedule, number in (("zb-1p", 4), ("zb-2p", 7)):
        held = held_microbatches(schedule, 4, 12, 1)
        assert [max(map(sum, pairs)) for pairs in held.pairs] == [number] * 4
    held = held_microbatches("zb-v", 4, 12, 2)
    assert [max(map(most, counts)) for counts in held.together] == [8, 8, 8, 8]  # half a stage each: as 1F1B's first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_pieces_of_gradients_come_as_activations_go(sizes: list[tuple[int, int]]):
    """One microbatch: when a call runs backward, those behind it have brought pieces and given back what they saved."""
    calls = tuple(StageCall(f"c{k}", CallCost(saved_bytes=s), (), (), (f"w{k}",)) for k, (s, _) in enumerate(sizes))
    late = {f"w{k}": float(piece) for k, (_, piece) in enumerate(sizes)}
    states = {name: piece + 1.0 for name, piece in late.items()}
    problem = StageProblem(calls, 1, 1, (1000,), state_bytes=states, late_bytes=late, recompute="none")
    (stage,) = solve_stages(problem).stages
    n = len(sizes)
    moments = [n + sum(s for s, _ in sizes[: k + 1]) + sum(piece for _, piece in sizes[k + 1 :]) for k in range(n)]
    assert stage.memory == max(*moments, sum(states.values()))
