"""Texts on the proof that a plan is optimal: what the proof shows, what it leaves open, and which plans it does not
cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.constraints import OF_POINT
from partitioner.plan import Candidate, Certificate, Plan
from partitioner.plans.figures import candidate_text, schedule_text
from partitioner.schedules.registry import SEARCHED
from partitioner.units import format_percent, format_plural, list_distinct_seconds_texts, seconds_text

_MAIN_GAPS = ("schedule", "virtual_stages", "offload")  # constraints not covered by a proof that change step times most
_LAST_GAPS = ("execution",)  # those that are told last
_TOLD_GAPS = 2  # sentences in the summary on what a proof leaves out
_MOST_FIXED = 6  # constraints that a phrase names
_ROUNDING = 1e-9
_PROVEN = 1e-6  # relative: a smaller gap is none
_UNCOVERED_KINDS = {"schedule": "several stages on a rank", "cp": "more ranks for a sequence (cp)"}


def is_covered(candidate: Candidate, certificate: Certificate) -> bool:
    """Return whether the proof of optimality in ``certificate``, a lower bound on the step time, holds for plans of
    ``candidate``, a layout (mesh, microbatch size, schedule, ZeRO stage) that the search for a plan examined.

    It does not hold for candidates that were tried after the search. It holds for other candidates with the schedules
    1F1B, ZB-1P and GPipe (which takes as long as 1F1B), and for other schedules if the search tried them on all meshes.
    """
    return not candidate.beside and _is_schedule_covered(candidate, certificate)


def _is_schedule_covered(candidate: Candidate, certificate: Certificate) -> bool:
    """Return whether the proof of optimality in ``certificate`` holds for the schedule of ``candidate``. It holds for
    1F1B, ZB-1P and GPipe, and for other schedules if the search tried them on all meshes. ``candidate``: a layout
    (mesh, microbatch size, schedule, ZeRO stage) that the search examined.
    """
    one_stage = candidate.virtual_stages == 1 and candidate.schedule in (*SEARCHED, "gpipe")
    return one_stage or "schedule" not in certificate.beyond


def _describe_uncovered(plan: Plan) -> str:
    """Return a phrase that names the choices of ``plan`` for which the proof of optimality does not hold, such as ``its
    schedule (zb-v, 2 virtual stages on each rank) and its context parallelism (cp 2)``.
    """
    certificate, chosen = plan.certificate, plan.chosen
    covered = any(row.mesh == chosen.mesh for row in certificate.candidates if not row.beside)
    reasons = [f"its schedule ({schedule_text(plan)})"] * (not _is_schedule_covered(chosen, certificate))
    reasons += [f"its context parallelism (cp {chosen.mesh.get('cp', 1)})"] * (not covered)
    return " and ".join(reasons) or "its layout"


def certificate_text(plan: Plan) -> str:
    """Return a text on what is proven of the step time of ``plan``: that no plan is faster, or by which fraction a plan
    can be faster at most. The proof may not cover some schedules. If the lower bound of a layout that it does not cover
    is below the other bounds of the text, a last sentence gives the lowest of these bounds.
    """
    c, covered = (
        plan.certificate,
        f"that the proof covers{_name_fixed_schedules(plan)} " * bool(list_uncovered_choices(plan)),
    )
    given, open_bound = constraints_clause(plan), describe_lowest_open_bound(c)
    told = f". {open_bound}" if open_bound else ""
    if c.covered_bound is not None:
        own = plan.chosen.bound
        gap = format_percent(max(0.0, 1 - own / c.objective)) if c.objective else "0%"
        step, least, whole = list_distinct_seconds_texts(c.objective, own, c.covered_bound)
        return (
            f"not proven optimal: the proof does not cover {_describe_uncovered(plan)}. Under the cost model this plan "
            f"takes {step}; lower bounds are {least} for its own layout (gap {gap}) and {whole} for all "
            f"plans{given} that the proof covers{_compare_with_covered(c)}{told}"
        )
    if c.gap <= _PROVEN:
        return f"{_describe_proven(plan)}: none takes less than {seconds_text(c.bound)} under the cost model{told}"
    step, least = list_distinct_seconds_texts(c.objective, c.bound)
    return (
        f"gap {format_percent(c.gap)} under the cost model: this plan takes {step}, a plan{given} {covered}takes "
        f"{least} or more{told}"
    )


def find_lowest_open_bound(certificate: Certificate) -> Candidate | None:
    """Return the layout with the lowest lower bound among those that were tried and that the proof of optimality in
    ``certificate`` does not cover, if this bound is below the step time of the plan, the bound of its own layout and
    the bound for all covered plans; otherwise ``None``."""
    chosen = next((row for row in certificate.candidates if row.status == "chosen"), None)
    known = [certificate.objective * (1 - _ROUNDING), certificate.covered_bound or certificate.bound]
    known += [chosen.bound] if chosen is not None and chosen.bound else []
    tried = [row for row in certificate.candidates if row.status == "solved" and not is_covered(row, certificate)]
    lowest = min((row for row in tried if row.bound), key=lambda row: row.bound, default=None)
    return lowest if lowest is not None and lowest.bound < min(known) * (1 - _ROUNDING) else None


def describe_lowest_open_bound(certificate: Certificate) -> str:
    """Return a sentence without a full stop on the lowest lower bound of all layouts that were tried, if the proof of
    optimality does not cover its layout and it is below all other bounds of the proof; otherwise an empty text.
    ``certificate``: the results of the search."""
    row = find_lowest_open_bound(certificate)
    if row is None:
        return ""
    least, found = list_distinct_seconds_texts(row.bound, _get_seconds(row))
    less = format_percent(1 - row.bound / certificate.objective)
    return (
        f"Of all layouts that were tried, the lowest bound is {least}, {less} less than this plan takes: "
        f"{candidate_text(row)} ({row.schedule}), which the proof does not cover; the best plan found for it takes "
        f"{found}"
    )


def _compare_with_covered(certificate: Certificate) -> str:
    """Return a clause that says that the chosen plan is faster than every plan that the proof of optimality covers, if
    its step time is below the lower bound for these plans; otherwise an empty text. ``certificate``: the results of the
    search.
    """
    faster = certificate.covered_bound is not None and certificate.objective < certificate.covered_bound
    return ", so it is faster than each of them" if faster else ""


def _describe_proven(plan: Plan) -> str:
    """Return a phrase that says among which plans ``plan`` is proven to be the fastest: among all plans, or among those
    that the proof of optimality covers.
    """
    given = constraints_clause(plan)
    if not list_uncovered_choices(plan):
        return f"proven optimal, fastest of all plans{given}"
    schedules = ", ".join(SEARCHED).upper()
    uncovered = "schedule" in plan.certificate.beyond
    which = f" (one stage on each rank: {schedules})" if uncovered else _name_fixed_schedules(plan)
    return f"proven fastest of the plans{given} that the proof covers{which}"


def _name_fixed_schedules(plan: Plan) -> str:
    """Return a clause that names the schedules that the proof of optimality covers, such as `` (schedules interleaved
    and zb-1p, 8 virtual stages on each rank)``, if the user fixed the schedule or the number of virtual stages;
    otherwise an empty text."""
    given, certificate = plan.constraints.given, plan.certificate
    if "schedule" in certificate.beyond or not given.keys() & {"schedule", "virtual_stages"}:
        return ""
    rows = [row for row in certificate.candidates if not row.beside and row.mesh.get("pp", 1) > 1]
    names = sorted({row.schedule for row in rows})
    stages = sorted({row.virtual_stages for row in rows})
    if not names:
        return ""
    word = "schedule" if len(names) == 1 else "schedules"
    each = f", {stages[0]} virtual stages on each rank" if len(stages) == 1 and stages[0] > 1 else ""
    return f" ({word} {' and '.join(names)}{each})"


def constraints_clause(plan: Plan) -> str:
    """Return a phrase with the constraints of the user that restrict layouts, such as `` with pp=2, tp=8``; empty if
    there are none. A proof of optimality holds for plans with these constraints only.
    """
    given = plan.constraints.given
    fixed = [f"{name}={given[name]}" for name in (*OF_POINT, "recompute") if given.get(name) is not None]
    if len(fixed) > _MOST_FIXED:
        return f" with your {len(fixed)} constraints"
    return f" with {', '.join(fixed)}" if fixed else ""


def explain_proof(plan: Plan) -> Iterator[str]:
    """Yield sentences that say what is proven of the step time of ``plan`` compared with all other plans, and what is
    not proven.
    """
    c, covered = (
        plan.certificate,
        f"that the proof covers{_name_fixed_schedules(plan)} " * bool(list_uncovered_choices(plan)),
    )
    if c.covered_bound is not None:
        yield f"It is not proven optimal: the proof does not cover {_describe_uncovered(plan)}."
        least = _compare_bound(c.covered_bound, c.objective, "covered plan")
        yield f"Bound for all plans{constraints_clause(plan)} that the proof covers: {least}"
        own = _compare_bound(plan.chosen.bound, c.objective, "plan of it")
        yield f"Bound for this plan's own layout ({candidate_text(plan.chosen)}, {plan.schedule}): {own}"
    elif c.gap <= _PROVEN:
        yield f"It is {_describe_proven(plan)}: none takes less under the cost model."
    else:
        bound, _ = list_distinct_seconds_texts(c.bound, c.objective)
        least = f"the lower bound for plans{constraints_clause(plan)} {covered}is {bound}"
        yield f"It is not proven optimal: {least}, {format_percent(c.gap)} less than this plan takes."
    if open_bound := describe_lowest_open_bound(c):
        yield f"{open_bound}."
    if c.beyond.keys() & _UNCOVERED_KINDS.keys():
        yield from _explain_uncovered_layouts(c)


def _describe_kinds(certificate: Certificate, rows: Sequence[Candidate]) -> str:
    """Return a phrase that says why the proof of optimality does not cover the layouts ``rows``: a property of these
    layouts that covered layouts do not have, such as ``several stages on a rank``. ``certificate``: the results of the
    search."""
    own = {"cp" if _is_schedule_covered(row, certificate) else "schedule" for row in rows}
    return " or ".join(words for kind, words in _UNCOVERED_KINDS.items() if kind in own)


def _explain_uncovered_layouts(certificate: Certificate) -> Iterator[str]:
    """Yield sentences on the layouts that the proof of optimality does not cover: for how many of them the search
    computed a step time, the fastest of them, and the fastest that may still be faster than the chosen plan.
    ``certificate``: the results of the search.
    """
    found = [row for row in certificate.candidates if row.step_time is not None and not is_covered(row, certificate)]
    if not found:
        kinds = " or ".join(words for kind, words in _UNCOVERED_KINDS.items() if kind in certificate.beyond)
        yield f"Layouts with {kinds} may be faster. None was tried."
        return
    meshes = len({tuple(sorted(row.mesh.items())) for row in found})
    other = "other " if any(row.status == "chosen" for row in found) else ""
    yield (
        f"{'Other layouts' if other else 'Layouts'} with {_describe_kinds(certificate, found)} may be faster. "
        f"{format_plural(len(found), 'such layout')} on "
        f"{format_plural(meshes, 'mesh', 'meshes')} {'was' if len(found) == 1 else 'were'} tried."
    )
    others = [row for row in found if row.status != "chosen"]
    best = min(others, key=_get_seconds, default=None)
    if best is not None and best is not find_lowest_open_bound(certificate):
        yield (
            f"The best {other}one found is {candidate_text(best)} ({best.schedule}). It takes "
            f"{_format_rival_times(best)}."
        )
        rival = _find_uncovered_rival(certificate)
        if rival is not None and rival is not best and certificate.covered_bound is None:
            yield (
                f"The best one whose bound is below the time of the chosen plan is {candidate_text(rival)} "
                f"({rival.schedule}). It takes {_format_rival_times(rival)}."
            )


def _find_uncovered_rival(certificate: Certificate) -> Candidate | None:
    """Return a layout that may be faster than the chosen plan, although this plan is proven optimal: the proof does not
    cover the layout, for example because of its schedule, and the lower bound on its step time is below the plan's step
    time. If there are several, return the one with the least computed step time; ``None`` if there is none.
    ``certificate``: the results of the search.
    """
    below_s = certificate.objective * (1 - _ROUNDING)
    rivals = [
        row
        for row in certificate.candidates
        if row.status == "solved" and not is_covered(row, certificate) and row.bound < below_s
    ]
    return min(rivals, key=_get_seconds, default=None)


def _get_seconds(candidate: Candidate) -> float:
    """Return the step time in seconds of ``candidate``, a layout (mesh, microbatch size, schedule, ZeRO stage) that the
    search for a plan examined; 0 if the search did not compute it.
    """
    return candidate.step_time or 0.0


def _format_rival_times(rival: Candidate) -> str:
    """Return the step time and the lower bound of ``rival`` as text, such as ``7.41 s, and the bound for its layout is
    5.45 s``. ``rival``: a layout (mesh, schedule, ZeRO stage) that may be faster than the chosen plan.
    """
    seconds, least = list_distinct_seconds_texts(_get_seconds(rival), rival.bound)
    return seconds + (f", and the bound for its layout is {least}" if rival.bound else "")


def _compare_bound(bound: float, objective: float, what: str) -> str:
    """Return a sentence on how much faster other plans can be, such as ``3.55 s, so no covered plan is faster by more
    than 3.4%.`` ``bound``: a lower bound on the step time of these plans, in seconds. ``objective``: the step time of
    the chosen plan, in seconds. ``what``: a name for one of these plans, such as ``covered plan``.
    """
    faster = 1 - bound / objective if objective else 0.0
    most = f" by more than {format_percent(faster)}" if faster > _PROVEN else ""
    return f"{list_distinct_seconds_texts(bound, objective)[0]}, so no {what} is faster{most}."


def list_uncovered_choices(plan: Plan) -> list[str]:
    """Return a sentence for each choice that the proof of optimality of ``plan`` does not cover, so that a plan with
    another choice may be faster. Attention algorithms over the mesh axis ``cp`` that are estimated to be faster than
    those of the plan come first. Constraints such as the schedule follow, with the sentences that the search has
    written into the plan's certificate, the most important first.
    """
    found = []
    for way in plan.context:
        if not way.calls and way.step_time is not None and way.step_time < plan.certificate.objective * (1 - _ROUNDING):
            found.append(
                f"The proof does not cover attention by {way.algorithm}, estimated at {seconds_text(way.step_time)}."
            )
    beyond = plan.certificate.beyond
    others = [name for name in beyond if name not in _MAIN_GAPS and name not in _LAST_GAPS]
    names = [name for name in (*_MAIN_GAPS, *others, *_LAST_GAPS) if name in beyond]
    return list(dict.fromkeys([*found, *(beyond[name] for name in names)]))


def list_assumptions(plan: Plan) -> list[str]:
    """Return a sentence for each assumption on the data of a step under which the times and the memory of ``plan``, and
    the proof that it is optimal, hold."""
    limits = plan.certificate.limits
    if limits is None or not limits.experts:
        return []
    return [
        "Experts are assumed to get equally many tokens: if some get more, a step takes more time and memory, and "
        "another plan may be the fastest."
    ]


def list_main_uncovered_choices(plan: Plan) -> list[str]:
    """Return the two most important sentences on choices (such as schedules) for which the proof that ``plan`` is
    optimal does not hold, after the assumptions of its costs. If there are more choices, a last sentence has their
    number.
    """
    told = list_uncovered_choices(plan)
    more = len(told) - _TOLD_GAPS
    return [*list_assumptions(plan), *told[:_TOLD_GAPS], *([f"explain() names {more} more."] if more > 0 else [])]
