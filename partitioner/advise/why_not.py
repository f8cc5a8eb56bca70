"""``why_not``: compare the chosen plan with the best plan under other constraints.

If the outcomes in the plan's certificate suffice, they give the answer. If the certificate has only bounds, or the
search did not consider such plans, the job is planned again, which needs the model. Without the model, ``why_unseen``
explains why the search did not consider such plans, as far as the plan shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from partitioner.candidate import MeshCandidate
from partitioner.constraints import OF_POINT, Constraints
from partitioner.errors import ConstraintError, InfeasibleError
from partitioner.explain.diff import compare_seconds
from partitioner.explain.memory_texts import describe_tried_offload, disk_text, host_text
from partitioner.explain.tables import cut_off, fullest_bytes
from partitioner.explain.time_parts import time_changes
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.plan import OPEN, WITHOUT, Candidate, Limits, Plan
from partitioner.plans.figures import candidate_text
from partitioner.schedules.registry import SEARCHED, schedule_name
from partitioner.solve.search.space import SearchSpace, list_candidates, widest_searched
from partitioner.units import bytes_text, format_plural
from partitioner.validate import check_request

_REPORTED = {"v": "virtual_stages", "microbatch": "microbatch_size"}  # name in reports -> name of the constraint
_ROUNDING = 1e-9  # fraction of a step: less is a rounding error
_CLOSE = 1e-3  # relative: a plan this near to its lower bound is the best

if TYPE_CHECKING:
    from torch import nn

    from partitioner.errors import Change


def format_asked_constraints(asked: Mapping[str, Any]) -> str:
    """Return the constraints ``asked`` as text, such as ``tp=8, offload=optimizer+disk``. ``asked``: name of a
    constraint -> value.
    """
    return ", ".join(
        f"{name}={'+'.join(value) or 'none' if name == 'offload' and isinstance(value, tuple) else value}"
        for name, value in asked.items()
    )


def check_asked(plan: Plan, merged: Constraints) -> None:
    """Raise the error that ``partition`` would raise if no layout that the planner searches can satisfy the constraints
    ``merged`` for the job (model, cluster and batch) of ``plan``. ``merged``: the plan's constraints, some of them
    replaced."""
    train = plan.objective == "train"
    check_request(plan.topology, merged, plan.optimizer, train, plan.profile)
    merged.check(plan.world_size, plan.global_batch or None)
    limits = plan.certificate.limits
    calls = limits.calls if limits is not None else sum(stage.num_calls for stage in plan.estimate.stages)
    if calls and (merged.pp or 1) > calls:
        raise ConstraintError(
            f"the model has {calls} block calls (such as layers), and each pipeline stage needs at least one"
        )
    if limits is not None and plan.global_batch:
        list_candidates(_rebuild_search_space(plan, limits, merged))


def without_row(plan: Plan, asked: Mapping[str, Any]) -> bool:
    """Return whether the search that found ``plan`` considered layouts with the constraints ``asked`` that the table in
    the plan's certificate does not show. If there are many layouts, the table lists only the best ones, and the
    certificate has the number of the others. ``asked``: name of a constraint -> value.
    """
    pinned = {name: value for name, value in asked.items() if name in OF_POINT}
    if not plan.certificate.left or pinned != asked:
        return False
    return any(
        all(_read_candidate_field(candidate, name) == value for name, value in pinned.items())
        for candidate in _list_searched_candidates(plan)
    )


def _read_candidate_field(candidate: MeshCandidate, name: str) -> Any:
    if name == "schedule":
        return schedule_name(candidate.schedule)
    return candidate.expert_tp if name == "etp" else getattr(candidate, name)


def _list_searched_candidates(plan: Plan) -> list[MeshCandidate]:
    """Return all mesh candidates (mesh sizes, microbatch size, schedule and ZeRO stage) that the search of ``plan``
    considered, before lower bounds ruled some of them out; empty if the plan does not contain enough data to list them.
    """
    limits = plan.certificate.limits
    if limits is None or not plan.global_batch:
        return []
    try:
        return list_candidates(_rebuild_search_space(plan, limits, plan.constraints))
    except PartitionError:
        return []


def _rebuild_search_space(plan: Plan, limits: Limits, constraints: Constraints) -> SearchSpace:
    """Return the search space of the job (model, cluster and batch) of ``plan`` under ``constraints``: an object from
    which all mesh candidates can be listed. ``limits``: properties of the model from the plan's certificate, such as
    the sequence length and the number of block calls (such as layers) that stages can divide.
    """
    return SearchSpace(
        plan.topology,
        plan.global_batch,
        limits.calls,
        frozenset(limits.dims),
        constraints,
        plan.objective == "train",
        limits.experts,
        limits.length,
        limits.repeated,
        limits.even,
        plan.profile.expert_tensor == "any",
        limits.further_samples,
        limits.further_positions,
    )


def why_unseen(plan: Plan, asked: Mapping[str, Any]) -> str:
    """Return the reason why the search that found ``plan`` considered no layout with the constraints ``asked``, as a
    clause without a full stop. ``asked``: name of a constraint -> value.
    """
    fixed = {n: v for n, v in plan.constraints.given.items() if n != "ahead"}
    against = {n: v for n, v in fixed.items() if n in asked and v != asked[n]}
    if against:
        return f"you fixed {format_asked_constraints(against)}"
    if (alone := _only_where_fixed(plan, asked)) is not None:
        return alone
    if "schedule" in asked and plan.constraints.schedule is None and not plan.constraints.ahead:
        if plan.objective != "train":
            return "for inference, which has no backward, it tries 1f1b alone, and others where they are fixed"
        searched = " and ".join(SEARCHED)
        return f"of the schedules with one stage on each rank it tries {searched}, and others where they are fixed"
    beside = {n: v for n, v in asked.items() if n not in OF_POINT}
    if told := [plan.certificate.beyond[name] for name in beside if name in plan.certificate.beyond]:
        return "; ".join(text[:1].lower() + text[1:].removesuffix(".") for text in told)
    if beside:
        return f"it does not vary {', '.join(beside)}: every layout has the best choice, or the one that you fixed"
    return (
        f"with {format_asked_constraints(fixed)} fixed, no layout has it"
        if fixed
        else "it tries that only where it is fixed"
    )


def _only_where_fixed(plan: Plan, asked: Mapping[str, Any]) -> str | None:
    """Return a clause that says why the search that found ``plan`` did not try the constraints ``asked``: one of their
    values is tried only if the user fixes it. Return ``None`` if there is no such value. ``asked``: name of a
    constraint -> value.
    """
    pinned, limits = plan.constraints, plan.certificate.limits
    widest = widest_searched(plan.topology, pinned)
    if pinned.tp is None and asked.get("tp", 1) > widest:
        return f"tp of more than {widest} ranks is tried only where it is fixed"
    if (
        limits is not None
        and pinned.cp is None
        and asked.get("cp", 1) not in {p.cp for p in _list_searched_candidates(plan)}
    ):
        if not limits.length:
            return "cp shares sequences, and no attention was found in the model's graph"
        return f"for sequences of {limits.length:,} tokens cp={asked['cp']} is tried only where it is fixed"
    if pinned.leaves_schedule and (asked.get("virtual_stages") or 1) > 1:
        return "several virtual stages on a rank are tried for the best meshes alone, where that may be faster"
    if pinned.dp_shard is None and asked.get("dp_shard"):
        return "states are shared by all ranks of dp, or by as many as fill nodes; others only where dp_shard is fixed"
    return None


_SHOWN = 3  # parameters that a message lists

Verdict = Literal["chosen", "slower", "faster", "bounded", "infeasible", "unknown"]


@dataclass(frozen=True)
class WhyNot:
    """The answer to the question why a plan does not have other constraints, such as ``tp=8``. ``str()`` returns it as
    text.

    - ``asked``: the constraints in question, name -> value. ``lines``: the answer's lines. ``changes``: changes that
      make an infeasible request possible. ``with_model``: what an answer with the model would add; empty: nothing.
    - ``verdict``: ``chosen``: the plan has these constraints. ``slower``, ``faster``: the best layout that has them is
      slower or faster than the plan. ``bounded``: every plan that has them takes at least ``bound`` seconds, which is
      no less than the chosen plan takes. ``infeasible``: no plan has them. ``unknown``: an answer needs the model.
    - ``candidate``: the best layout with these constraints, or ``None``. ``bound``: a lower bound in seconds on the
      step time of plans with these constraints; ``None`` if unknown.
    - ``uncovered``: a sentence on plans with these constraints for which ``bound`` and ``verdict`` do not hold, such as
      those with several stages on a rank; empty if they hold for all.
    """

    asked: Mapping[str, Any]
    verdict: Verdict
    lines: tuple[str, ...]
    candidate: Candidate | None = None
    bound: float | None = None
    changes: tuple[Change, ...] = field(default=())
    with_model: str = ""
    uncovered: str = ""

    def __str__(self) -> str:
        return self.told("why_not(model=..., ...)")

    def told(self, how: str) -> str:
        """Return the answer as text. ``how``: the call or command by which the user passes the model, such as
        ``why_not(model=..., ...)``; it is added if the model would improve the answer.
        """
        more = f"{self.with_model}: {how}." if self.with_model else ""
        return "\n".join([*self.lines, *filter(None, [self.uncovered, more])])


def why_not(
    plan: Plan,
    asked: Mapping[str, Any],
    model: nn.Module | None = None,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``.

    If the plan's certificate (the outcomes of its search) cannot answer, a plan with these constraints is searched for,
    with ``model``, ``inputs`` and ``loss`` as they were given to ``partition``. If ``model`` is ``None``, the answer
    says only what the plan shows.

    ``asked``: name of a constraint -> value. Raise :class:`ConstraintError` for unknown constraints or if ``asked`` is
    empty, and :class:`InputsError` if the model is not the plan's.
    """
    asked = _translate_names(asked)
    if not asked:
        raise ConstraintError("no constraint is given; expected at least one, like tp=8 or pp=2, schedule='gpipe'")
    Constraints(**asked)
    answer = _from_rows(plan, asked)
    if answer is not None and (model is None or answer.verdict == "chosen"):
        return answer
    if answer is not None and not answer.with_model and not _is_beside(plan, asked):
        return answer
    if model is not None:
        return _answer_by_planning(plan, asked, model, inputs, loss)
    return _explain_unsearched(plan, asked)


def _translate_names(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraints ``asked`` with the names of :class:`Constraints` in place of the short ones that reports
    print, such as ``virtual_stages`` for ``v``. Raise :class:`ConstraintError` if both names of a constraint are
    given."""
    if twice := [short for short, name in _REPORTED.items() if short in asked and name in asked]:
        raise ConstraintError(f"{twice[0]} and {_REPORTED[twice[0]]} are the same constraint; expected one of them")
    return {_REPORTED.get(name, name): value for name, value in asked.items()}


def _from_rows(plan: Plan, asked: Mapping[str, Any]) -> WhyNot | None:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``, as far as it follows from
    the table of layouts in the plan's certificate (the outcomes of its search); ``None`` if the table has no layout
    with these constraints. ``asked``: name of a constraint -> value.
    """
    if not set(asked) <= set(OF_POINT):
        return None
    rows = [c for c in (*plan.certificate.candidates, *_list_allowed_baselines(plan)) if _matches_asked(c, asked)]
    rows = [c for c in rows if c.status != "infeasible" or not c.reason.startswith("excluded")]
    if not rows:
        return None
    if any(c.status == "chosen" for c in rows):
        return WhyNot(asked, "chosen", (f"The plan has {format_asked_constraints(asked)}.",), plan.chosen)
    solved = min((c for c in rows if c.step_time is not None), key=lambda c: c.step_time or 0.0, default=None)
    least = min((c.bound for c in rows if c.status == "bounded"), default=None)
    if solved is not None and (least is None or least >= (solved.step_time or 0.0)):
        return _explain_slower(plan, asked, solved, least_s=_find_least_bound(plan, rows))
    if solved is not None or least is not None:
        return _explain_bounded(plan, asked, rows, solved)
    return _no_plan(plan, asked, rows)


def _list_allowed_baselines(plan: Plan) -> list[Candidate]:
    """Return the standard layouts (baselines) in the certificate of ``plan`` (the outcomes of its search) that have a
    computed step time and can fairly be compared with the plan: they are for the same model, batch, devices and
    offload, and the plan's constraints allow them.
    """
    return [
        baseline.candidate
        for baseline in plan.certificate.baselines
        if baseline.candidate is not None
        and baseline.candidate.status == "solved"
        and not (baseline.excluded or baseline.global_batch or baseline.name.startswith(WITHOUT))
        and baseline.offload == plan.offload
    ]


def _find_least_bound(plan: Plan, rows: list[Candidate]) -> float:
    """Return a lower bound in seconds on the step time of all plans of the layouts ``rows``: the least bound of the
    layouts that ``plan``'s search examined. (A plan of a layout may be slower than other placements or cuts of that
    layout, but its bound holds for all.) If no row was examined, all are standard layouts, and the least of their step
    times is returned."""
    searched = [c.bound for c in rows if c.status in ("bounded", "solved") and c in plan.certificate.candidates]
    return min(searched, default=min((c.step_time for c in rows if c.step_time is not None), default=0.0))


def _matches_asked(candidate: Candidate, asked: Mapping[str, Any]) -> bool:
    return all(_has_asked_value(candidate, name, value) for name, value in asked.items())


def _has_asked_value(candidate: Candidate, name: str, value: Any) -> bool:
    """Return whether ``candidate`` has ``value`` for the constraint ``name``.

    Two constraints count as satisfied where they have no effect: ``zero`` (any value), if ``dp`` and ``cp`` have one
    rank, so that ZeRO has nothing to shard; and ``etp`` of 1 or ``None``, without expert parallelism.
    """
    mesh = candidate.mesh
    alone = {"zero": mesh.get("dp", 1) * mesh.get("cp", 1) == 1, "etp": mesh.get("ep", 1) == 1 and value in (1, None)}
    return alone.get(name, False) or (mesh[name] if name in mesh else getattr(candidate, name)) == value


def _is_beside(plan: Plan, asked: Mapping[str, Any]) -> bool:
    """Return whether the search that found ``plan`` tried layouts with the constraints ``asked`` only where an estimate
    promised a faster step. That is so for schedules other than 1F1B and ZB-1P and for virtual stages, if the user left
    the schedule free. ``asked``: name of a constraint -> value.
    """
    several = asked.get("schedule", "1f1b") not in SEARCHED or (asked.get("virtual_stages") or 1) > 1
    return several and plan.constraints.leaves_schedule


def _explain_slower(
    plan: Plan,
    asked: Mapping[str, Any],
    best: Candidate,
    marks: tuple[str, ...] = (),
    other: Plan | None = None,
    least_s: float | None = None,
) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``: a comparison of the plan
    with ``best``, the best candidate that has them. ``asked``: name of a constraint -> value. ``marks``: further
    sentences for the answer. ``other``: the plan of ``best``, if a plan was made with these constraints; otherwise
    ``None``. ``least_s``: a lower bound in seconds on the step of all plans with these constraints; ``None``: the bound
    of ``best``."""
    assert best.step_time is not None
    least_s = best.bound if least_s is None else least_s
    chosen = plan.estimate
    slower = best.step_time >= chosen.step_time
    is_open = least_s < best.step_time * (1 - _CLOSE)
    which = "plan found" if is_open or (other is None and _is_beside(plan, asked)) else "plan"
    lines = [
        f"The best {which} with {format_asked_constraints(asked)} ({candidate_text(best)}, microbatches of "
        f"{best.microbatch_size}, "
        f"{best.schedule}) takes {compare_seconds(best.step_time, chosen.step_time)}."
    ]
    if best.breakdown:
        changes = list(time_changes(chosen.breakdown, best.breakdown))
        lines += ["The parts of the step time that differ most:", *(f"  {line}" for line in changes)] if changes else []
    its = fullest_bytes(other) if other is not None else best.memory
    the_plans = fullest_bytes(plan)
    if its is not None and the_plans is not None:
        most = "" if other is not None else " at most (the search's estimate, which a program does not exceed)"
        lines.append(
            f"{'It fits in memory. ' if other is None else ''}Its fullest rank needs {bytes_text(its)}{most}; that of "
            f"the chosen plan needs {bytes_text(the_plans)}."
        )
    if is_open:
        bound = compare_seconds(least_s, chosen.step_time)
        lines.append(f"A faster one is not ruled out: the lower bound of these plans is {bound}.")
    lines += marks
    if not slower:
        fixed = format_asked_constraints(plan.constraints.given)
        lines.append(f"It was not chosen because you fixed {fixed}." if fixed else "The search did not try it.")
    return WhyNot(asked, "slower" if slower else "faster", tuple(lines), best, least_s)


def _explain_bounded(plan: Plan, asked: Mapping[str, Any], rows: list[Candidate], solved: Candidate | None) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``. The function is used if
    the search has bounds for all layouts with these constraints, but not step times for all. ``asked``: name of a
    constraint -> value.

    ``rows``: all candidate layouts with these constraints. ``solved``: the candidate among them with the shortest
    computed step time, or ``None``.
    """
    chosen, certificate = plan.estimate.step_time, plan.certificate
    bounded = f"{_count_layouts_text(sum(c.status == 'bounded' for c in rows))} given a lower bound and not tried"
    outside = _describe_uncovered_schedules(plan, asked)
    bound = _find_least_bound(plan, [c for c in rows if not (outside and c.beside)])
    lines = [
        f"Every plan with {format_asked_constraints(asked)}{' that the proof covers' if outside else ''} takes "
        f"{compare_seconds(bound, chosen, lower=True)}: {bounded}."
    ]
    if solved is None:
        lines.append("That is a lower bound and not the time of a plan: the best of these plans may take longer.")
    still_open = sum(map(certificate.is_open, rows))
    if still_open:
        ended = f"the search was {cut_off(certificate)}" if certificate.cut_off else "no faster plan of them was found"
        lines.append(f"{still_open} of these may be faster: {ended}.")
    if solved is not None and solved.step_time is not None:
        layout = f"{candidate_text(solved)}, microbatches of {solved.microbatch_size}, {solved.schedule}"
        lines += _explain_bound_and_best(rows, bound, solved)
        lines.append(f"The best of these that was tried ({layout}) takes {compare_seconds(solved.step_time, chosen)}:")
        lines += [f"  {line}" for line in time_changes(plan.estimate.breakdown, solved.breakdown or {})]
    more = "To work out the best of these plans, give the model"
    lines += _describe_unproven(rows, chosen)
    verdict: Verdict = "bounded"
    if still_open:
        verdict = "unknown"
    elif (
        bound < chosen * (1 - _ROUNDING) and solved is not None
    ):  # other plans of a layout that was tried may be faster
        verdict = "slower" if (solved.step_time or 0.0) >= chosen else "faster"
    return WhyNot(asked, verdict, tuple(lines), solved, bound, with_model=more, uncovered=outside)


def _describe_unproven(rows: list[Candidate], chosen: float) -> list[str]:
    """Return a list with a sentence on the layout among ``rows`` with the lowest bound of those that were tried, if
    this bound is below ``chosen``, the step time of the plan in seconds: a faster plan of the layout is not ruled out.
    Empty if there is none."""
    tried = [row for row in rows if row.status == "solved" and row.bound and row.bound < chosen * (1 - _ROUNDING)]
    if not tried:
        return []
    lowest = min(tried, key=lambda row: row.bound)
    layout = f"{candidate_text(lowest)}, microbatches of {lowest.microbatch_size}, {lowest.schedule}"
    bound = compare_seconds(lowest.bound, chosen)
    return [f"A faster one of those that were tried is not ruled out: the lowest bound ({layout}) is {bound}."]


def _explain_bound_and_best(rows: list[Candidate], bound: float, solved: Candidate) -> list[str]:
    """Return a list with a sentence that names the layout among ``rows`` to which the lower bound ``bound`` (in
    seconds) belongs, if it is not the layout ``solved``, the best one that was tried; otherwise an empty list."""
    owner = next((row for row in rows if row.bound == bound and row.status == "bounded"), None)
    if owner is None or owner is solved:
        return []
    layout = f"{candidate_text(owner)}, microbatches of {owner.microbatch_size}, {owner.schedule}"
    return [f"The bound is that of {layout}, which was not tried."]


def _describe_uncovered_schedules(plan: Plan, asked: Mapping[str, Any]) -> str:
    """Return the sentence of ``plan``'s certificate on schedules for which its lower bounds do not hold. It is empty if
    there is no such sentence, or if the constraints ``asked`` exclude these schedules. ``asked``: name of a constraint
    -> value.
    """
    sentence = plan.certificate.beyond.get("schedule")
    fixed = asked.get("pp") == 1 or "schedule" in asked or asked.get("virtual_stages") == 1
    return "" if sentence is None or fixed else sentence


def _count_layouts_text(count: int) -> str:
    return f"{format_plural(count, 'layout')} {'was' if count == 1 else 'were'}"


def _no_plan(plan: Plan, asked: Mapping[str, Any], rows: list[Candidate]) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``, if the search found no
    plan for any candidate that has them. The answer describes the candidate that lacks the least memory or, if no
    candidate lacks memory, gives the reasons of all candidates. ``asked``: name of a constraint -> value. ``rows``: all
    candidates with these constraints."""
    ranked = sorted(rows, key=lambda c: c.missing or 0)
    nearest = next((c for c in ranked if c.missing), ranked[0])
    limit = describe_tried_offload(plan) if nearest.missing else ""
    # With a fixed mesh, offload is only tried if the user asks for it.
    asks = bool(limit) and _merge_asked_constraints(plan, asked).fixes_mesh(plan.world_size)
    lines = [
        f"No plan with {format_asked_constraints(asked)} fits {limit}."
        if limit
        else f"There is no plan with {format_asked_constraints(asked)}."
    ]
    if nearest.missing:
        lines.append(
            f"The nearest ({candidate_text(nearest)}, microbatches of {nearest.microbatch_size}) lacks "
            f"{bytes_text(nearest.missing)}: {nearest.reason}."
        )
    else:
        lines += list(dict.fromkeys(c.reason for c in ranked if c.reason))[:3]
    more = "To plan it with more offload, give the model" if limit else ""
    if asks:
        more = "With this mesh fixed, offload is used only where it is asked for. To see what offload would give, "
        more += "give the model"
    verdict: Verdict = "unknown" if limit and not asks else "infeasible"
    return WhyNot(asked, verdict, tuple(lines), nearest, with_model=more)


def _merge_asked_constraints(plan: Plan, asked: Mapping[str, Any]) -> Constraints:
    """Return the constraints of ``plan`` together with ``asked``. If both have a value for a constraint, the value in
    ``asked`` counts. ``asked``: name of a constraint -> value.
    """
    given = plan.constraints.given
    places = {**given.get("stage_of", {}), **asked.get("stage_of", {})}
    return Constraints(**{**given, **asked, **({"stage_of": places} if places else {})})


def _answer_by_planning(
    plan: Plan, asked: Mapping[str, Any], model: nn.Module, inputs: Any, loss: Callable[..., Any] | None
) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``, after planning the model
    again with them. ``asked``: name of a constraint -> value. ``model``, ``inputs``, ``loss``: the arguments that
    ``partition`` got. Raise :class:`InputsError` if the model's parameters are not the plan's.
    """
    from partitioner.api import partition

    try:
        other = partition(
            model,
            plan.topology,
            inputs,
            global_batch=plan.global_batch or None,
            loss=loss,
            objective=plan.objective,
            constraints=_merge_asked_constraints(plan, asked),
            profile=plan.profile,
            precision=plan.precision,
            optimizer=plan.optimizer,
        )
    except InfeasibleError as error:
        lines = (f"There is no plan with {format_asked_constraints(asked)}: {error}.",)
        return WhyNot(asked, "infeasible", lines, changes=error.changes)
    except PartitionError as error:
        return WhyNot(asked, "infeasible", (f"There is no plan with {format_asked_constraints(asked)}: {error}.",))
    if differing := _list_different_parameters(plan, other):
        raise InputsError(
            f"the model is not the one that the plan was made for: {', '.join(differing[:_SHOWN])} differ; expected "
            "the same model, or compare two plans with diff"
        )
    only = ", ".join(other.planned_only)
    marks: tuple[str, ...] = (f"This version plans {only}, but does not execute it.",) if only else ()
    hosted = {"In host memory": host_text(other), "On disk": disk_text(other)}
    if other.offload != plan.offload:
        marks += tuple(f"{where}: {what}." for where, what in hosted.items() if what)
    if other.constraints.group_size != plan.constraints.group_size:
        marks += ("Its step has other results: samples interact within other groups (couple, microbatch_size).",)
    best = other.chosen.model_copy(update={"breakdown": other.estimate.breakdown})
    return _explain_slower(plan, asked, best, marks, other)


def _list_different_parameters(plan: Plan, other: Plan) -> list[str]:
    """Return the sorted names of parameters that only one of the plans ``plan`` and ``other`` has, or whose shapes
    differ; empty if a plan has no program (instructions of its ranks), only estimates.
    """
    if plan.written is None or other.written is None:
        return []
    mine, theirs = (
        {name: state.shape for name, state in program.states.items() if state.kind == "parameter"}
        for program in (plan.written, other.written)
    )
    return sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))


def _explain_counted_candidates(plan: Plan, asked: Mapping[str, Any]) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``, if all layouts with these
    constraints are among the worst of the search. The plan's certificate has only the number of these worst layouts.
    ``asked``: name of a constraint -> value.
    """
    left = plan.certificate.left
    count = f"{sum(left.values()):,}"
    worst = f"Layouts with {format_asked_constraints(asked)} are among the {count} worst, which the report only counts"
    if left.get(OPEN):
        return WhyNot(asked, "unknown", (f"{worst}; {left[OPEN]:,} of these were not tried and may be faster.",))
    lines = (f"{worst}: each of these either cannot be faster than the plan or does not fit in memory.",)
    return WhyNot(asked, "bounded", lines, bound=plan.certificate.objective)


def _explain_unsearched(plan: Plan, asked: Mapping[str, Any]) -> WhyNot:
    """Return the answer to the question why ``plan`` does not have the constraints ``asked``, if no candidate in the
    plan's certificate has them. It says what follows without the model: that the constraints are impossible, or why the
    search did not try them. ``asked``: name of a constraint -> value.
    """
    merged = _merge_asked_constraints(plan, asked)
    try:
        check_asked(plan, merged)
    except PartitionError as error:
        return WhyNot(asked, "infeasible", (f"There is no plan with {format_asked_constraints(asked)}: {error}.",))
    if without_row(plan, asked):
        return _explain_counted_candidates(plan, asked)
    lines = [f"The search did not try {format_asked_constraints(asked)}: {why_unseen(plan, asked)}."]
    for baseline in plan.certificate.baselines:
        best = baseline.candidate
        if (
            best is not None
            and not baseline.global_batch
            and set(asked) <= set(OF_POINT)
            and _matches_asked(best, asked)
            and best.step_time is not None
        ):
            takes = compare_seconds(best.step_time, plan.estimate.step_time)
            lines.append(f"One such layout, {baseline.name} ({candidate_text(best)}), takes {takes}.")
    return WhyNot(asked, "unknown", tuple(lines), with_model="To plan it, give the model")
