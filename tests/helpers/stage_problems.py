"""Problems of cutting calls into pipeline stages, and the seconds and bytes of a stage by hand arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from partitioner.cost.call.call_cost import CallCost
from partitioner.solve.stages.problem import Pace, StageCall, StageProblem
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
    others nothing or what is quickly made: what is faster. If all calls fit without full recomputation, as many of the
    last calls as fit keep what is quickly made."""
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
    spared = 0
    if in_part and not again and p.recompute is None:
        room = p.capacity[stage] - memory - 1e-6
        spared = max(n for n in range(len(calls) + 1) if flying * sum(quick[len(calls) - n :]) <= max(0.0, room))
        memory += flying * sum(quick[len(calls) - spared :])
    seconds += in_part * sum(c.selective_s for c in costs[again : len(calls) - spared])
    seconds = seconds + transfer(start, stage - 1) + (transfer(stop, stage) if stop < len(p.calls) else 0.0)
    return (seconds if memory <= p.capacity[stage] else math.inf), memory


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
