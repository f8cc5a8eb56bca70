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
    "ring": "keys and values pass around a ring of ranks, behind the computation",
    "all_gather": "every rank gathers all keys and values",
    "ulysses": "an all-to-all gives each rank all positions of a part of the heads",
}


def sequence(plan: Plan) -> Iterator[RenderableType]:
    """Why there is a ``cp`` axis, and why attention runs as it does."""
    cp, chosen = plan.mesh.get("cp", 1), plan.certificate.objective
    if cp == 1:
        return
    held = sorted({value.context for value in plan.written.values.values()}) if plan.written is not None else []
    zigzag = any(layout.endswith("z") for layout in held)
    order = ", a piece from either end to balance causal attention" if zigzag else ", consecutive positions"
    yield line(f"Each rank has 1/{cp} of every sequence{order if held else ''}, and 1/{cp} of its activations.")
    for way in plan.context:
        words = _ALGORITHMS.get(way.algorithm)
        what = f"{way.algorithm} ({words})" if words else way.algorithm
        if way.calls:
            more = f"; a step takes {seconds_text(way.step_time)}" if way.step_time is not None else ""
            yield line(f"- {plural(way.calls, 'attention call')} by {what}{more}")
        elif way.step_time is not None:
            against = _against(way.step_time, chosen)
            yield line(f"- by {what} a step would take {seconds_text(way.step_time)}, {against}")
        else:
            yield line(f"- {what} is not possible: {way.reason}")
    if plan.constraints.cp is not None:
        return
    yield from _without(plan, "cp", "Without context parallelism (cp 1)")


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
            f"Each rank holds {of_layer} experts of a layer. Tokens are sent to the ranks that hold their experts, and "
            f"back, among {ep} ranks on {plural(len(nodes), 'node')}. All experts together have {bytes_text(size)} of "
            "parameters."
        )
    if plan.constraints.ep is not None:
        return
    yield from _without(plan, "ep", "Without expert parallelism (ep 1)")
    of_size: dict[int, list[Candidate]] = {}
    for candidate in plan.certificate.candidates:
        of_size.setdefault(candidate.mesh.get("ep", 1), []).append(candidate)
    others = {size: of for size, of in sorted(of_size.items()) if size not in (1, ep)}
    bounded = {size: of for size, of in others.items() if all(c.status == "bounded" for c in of)}
    for size in (size for size in others if size not in bounded):
        yield from _without(plan, "ep", f"With ep {size}", size)
    if bounded:
        sizes, least = ", ".join(map(str, bounded)), min(c.bound for of in bounded.values() for c in of)
        yield line(f"With ep {sizes} every plan takes {seconds_text(least)} or more, so none was worked out.")


def _without(plan: Plan, axis: str, words: str, size: int = 1) -> Iterator[RenderableType]:
    """What the candidates would do whose ``axis`` is of another ``size``."""
    others = [c for c in plan.certificate.candidates if c.mesh.get(axis, 1) == size]
    chosen = plan.certificate.objective
    solved = [c for c in others if c.step_time is not None]
    if solved:
        best = min(solved, key=lambda c: c.step_time or 0.0)
        yield line(f"{words} the best plan found is {candidate_text(best)}: it {fate(best, chosen)}.")
    elif others and all(c.status == "infeasible" for c in others):
        short = min(others, key=lambda c: c.missing or 0)
        yield line(f"{words} no plan fits: {candidate_text(short)} {fate(short, chosen, unhosted(plan))}.")
    elif others:
        least = min(c.bound for c in others if c.status != "infeasible")
        yield line(f"{words} every plan takes {seconds_text(least)} or more, so none was worked out.")


def _against(seconds: float, chosen: float) -> str:
    change = seconds / chosen - 1 if chosen else 0.0
    return f"{percent(abs(change))} {'more' if change >= 0 else 'less'}"
