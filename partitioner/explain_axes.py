"""Why the axes over sequences and over experts are as wide as they are, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType

from partitioner.draw.figures import candidate_text
from partitioner.explain_tables import fate, line, unhosted
from partitioner.plan import Candidate, Plan
from partitioner.units import bytes_text, percent, plural, seconds_text
from passes.dtypes import itemsize
from passes.layouts import Layout

_ALGORITHMS = {
    "ring": "keys and values travelling around a ring behind the computation",
    "all_gather": "gathering keys and values",
    "ulysses": "exchanging positions for heads (Ulysses)",
}


def sequence(plan: Plan) -> Iterator[RenderableType]:
    """Why there is a ``cp`` axis, and why attention runs as it does."""
    cp, chosen = plan.mesh.get("cp", 1), plan.certificate.objective
    if cp == 1:
        return
    held = sorted({value.context for value in plan.written.values.values()}) if plan.written is not None else []
    order = ", a piece from either end" if any(layout.endswith("z") for layout in held) else ", in order"
    yield line(f"Each rank has 1/{cp} of every sequence{order if held else ''}, and keeps as much of the activations.")
    for way in plan.context:
        what = f"attention by {_ALGORITHMS.get(way.algorithm, way.algorithm)} ({way.algorithm})"
        if way.calls:
            more = f": the step takes {seconds_text(way.step_time)}" if way.step_time is not None else ""
            yield line(f"- {plural(way.calls, 'call')} of {what}{more}")
        elif way.step_time is not None:
            yield line(f"- {what} would take {seconds_text(way.step_time)}, {_against(way.step_time, chosen)}")
        else:
            yield line(f"- {what} cannot be: {way.reason}")
    if plan.constraints.cp is not None:
        return
    yield from _without(plan, "cp", "Without sharing it")


def experts(plan: Plan) -> Iterator[RenderableType]:
    """Why there is an ``ep`` axis, and how wide."""
    ep, program = plan.mesh.get("ep", 1), plan.written
    if ep == 1:
        return
    spread = [s for s in program.states.values() if Layout.parse(s.expert_layout).is_shard] if program else []
    if program is not None and spread:
        numbers = sorted({s.shape[Layout.parse(s.expert_layout).dim] for s in spread})
        of_layer = " or ".join(f"{n // ep} of {n}" for n in numbers)
        nodes = {int(plan.topology.node_of[plan.devices[rank]]) for rank in program.group(0, ("ep",))}
        size = sum(math.prod(s.shape) * itemsize(s.dtype) for s in spread)
        yield line(
            f"Each rank has {of_layer} experts of a layer, and sends the rows of the others to their ranks and back: "
            f"{ep} ranks on {plural(len(nodes), 'node')}. All experts are {bytes_text(size)} of parameters."
        )
    if plan.constraints.ep is not None:
        return
    yield from _without(plan, "ep", "Without spreading them")
    of_size: dict[int, list[Candidate]] = {}
    for candidate in plan.certificate.candidates:
        of_size.setdefault(candidate.mesh.get("ep", 1), []).append(candidate)
    others = {size: of for size, of in sorted(of_size.items()) if size not in (1, ep)}
    bounded = {size: of for size, of in others.items() if all(c.status == "bounded" for c in of)}
    for size in (size for size in others if size not in bounded):
        yield from _without(plan, "ep", f"Over {size} ranks", size)
    if bounded:
        sizes, least = ", ".join(map(str, bounded)), min(c.bound for of in bounded.values() for c in of)
        yield line(f"Over {sizes} ranks no candidate can take less than {seconds_text(least)}.")


def _without(plan: Plan, axis: str, words: str, size: int = 1) -> Iterator[RenderableType]:
    """What the candidates would do whose ``axis`` is of another ``size``."""
    others = [c for c in plan.certificate.candidates if c.mesh.get(axis, 1) == size]
    chosen = plan.certificate.objective
    solved = [c for c in others if c.step_time is not None]
    if solved:
        best = min(solved, key=lambda c: c.step_time or 0.0)
        yield line(f"{words}, the best that was solved is {candidate_text(best)}: it {fate(best, chosen)}.")
    elif others and all(c.status == "infeasible" for c in others):
        short = min(others, key=lambda c: c.missing or 0)
        yield line(f"{words}, no candidate fits: {candidate_text(short)} {fate(short, chosen, unhosted(plan))}.")
    elif others:
        least = min(c.bound for c in others if c.status != "infeasible")
        yield line(f"{words}, no candidate can take less than {seconds_text(least)}.")


def _against(seconds: float, chosen: float) -> str:
    change = seconds / chosen - 1 if chosen else 0.0
    return f"{percent(abs(change))} {'more' if change >= 0 else 'less'}"
