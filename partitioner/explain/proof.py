"""What is proven of a plan, what is not, and what the proof does not cover."""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.plan import Plan
from partitioner.plans.figures import candidate_text, schedule_text
from partitioner.units import format_percent, seconds_text

_MAIN_GAPS = ("schedule", "virtual_stages", "offload")  # constraints outside of a proof that change step times most
_TOLD_GAPS = 2  # sentences on what a proof leaves out that the summary has
_ROUNDING = 1e-9
_PROVEN = 1e-6  # of a step: a smaller gap is none


def certificate_text(plan: Plan) -> str:
    """Return what is proven of the plan in one sentence: that it is optimal, or the lower bounds."""
    c, covered = plan.certificate, "that the proof covers " if list_uncovered_choices(plan) else ""
    takes = f"this plan takes {seconds_text(c.objective)}"
    if c.covered_bound is not None:
        own = plan.chosen.bound
        gap = format_percent(max(0.0, 1 - own / c.objective)) if c.objective else "0%"
        return (
            f"not proven optimal: its schedule ({schedule_text(plan)}) is not covered. Under the cost model {takes}, a "
            f"plan of its own layout {seconds_text(own)} or more (gap {gap}), "
            f"and a plan that the proof covers {seconds_text(c.covered_bound)} or more"
        )
    if c.gap <= _PROVEN:
        return f"proven optimal under the cost model: no plan {covered}takes less than {seconds_text(c.bound)}"
    least = f"a plan {covered}takes {seconds_text(c.bound)} or more"
    return f"gap {format_percent(c.gap)} under the cost model: {takes}, {least}"


def explain_proof(plan: Plan) -> Iterator[str]:
    """Yield sentences on what the certificate proves of the plan, and what it does not prove."""
    c, covered = plan.certificate, "that the proof covers " if list_uncovered_choices(plan) else ""
    if c.covered_bound is None:
        if c.gap <= _PROVEN:
            yield f"It is proven optimal under the cost model: no plan {covered}takes less."
        else:
            least = f"a plan {covered}takes {seconds_text(c.bound)} or more"
            yield f"It is not proven optimal: {least}, which is {format_percent(c.gap)} less than this plan takes."
        return
    yield f"It is not proven optimal: the proof does not cover its schedule ({schedule_text(plan)})."
    yield (
        "Proven under the cost model: a plan that the proof covers takes "
        f"{_compare_bound(c.covered_bound, c.objective)}."
    )
    yield (
        f"Proven under the cost model: a plan of this plan's own layout ({candidate_text(plan.chosen)}, "
        f"{plan.schedule}) takes {_compare_bound(plan.chosen.bound, c.objective)}."
    )
    yield "Not proven: that no other layout with several stages on a rank is faster."


def _compare_bound(bound: float, objective: float) -> str:
    """``3.55 s or more, so it may be faster than this plan by 3.4% at most``; ``bound`` and ``objective``: seconds."""
    faster = 1 - bound / objective if objective else 0.0
    if faster > _PROVEN:
        return f"{seconds_text(bound)} or more, so it may be faster than this plan by {format_percent(faster)} at most"
    return f"{seconds_text(bound)} or more, so it is not faster than this plan"


def list_uncovered_choices(plan: Plan) -> list[str]:
    """Return a sentence for each choice that the certificate's lower bound does not cover, the most important first.
    These are the choices in :attr:`Certificate.beyond` and each faster attention algorithm over ``cp``."""
    found = []
    for way in plan.context:
        if not way.calls and way.step_time is not None and way.step_time < plan.certificate.objective * (1 - _ROUNDING):
            found.append(
                f"The proof does not cover attention by {way.algorithm}, estimated at {seconds_text(way.step_time)}."
            )
    beyond = plan.certificate.beyond
    names = [name for name in _MAIN_GAPS if name in beyond] + [name for name in beyond if name not in _MAIN_GAPS]
    return list(dict.fromkeys([*found, *(beyond[name] for name in names)]))


def list_main_uncovered_choices(plan: Plan) -> list[str]:
    """Return the most important sentences of :func:`list_uncovered_choices`, and how many more there are."""
    told = list_uncovered_choices(plan)
    more = len(told) - _TOLD_GAPS
    return [*told[:_TOLD_GAPS], *([f"explain() names {more} more."] if more > 0 else [])]
