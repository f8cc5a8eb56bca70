"""Breakdown of each stage's peak memory."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.cost.states import StateCost
from partitioner.plan import StageEstimate
from partitioner.solve.stage_problem import StageCall, StageProblem
from partitioner.solve.stages import StagePlan, StageSplit


def stage_estimates(
    problem: StageProblem, split: StageSplit, names: Sequence[Sequence[str]], held: Sequence[Sequence[StateCost]]
) -> tuple[StageEstimate, ...]:
    """Calls, seconds and peak memory by component of each stage; the components add up to the peak of one rank.

    ``names``: the states of each stage. ``held``: their costs.
    """
    m = problem.num_microbatches
    made = []
    for number, stage in enumerate(split.stages):
        slim = problem.slim if stage.selective and problem.slim is not None else problem
        calls = [slim.calls[place] for place in stage.places]
        coming = sum(problem.late_bytes.get(name, 0.0) for name in names[number]) if problem.late_bytes else 0.0
        made.append(
            StageEstimate(
                first=calls[0].path,
                last=calls[-1].path,
                num_calls=len(calls),
                recomputed=stage.recompute,
                selective=stage.selective,
                host=round(_host_bytes(stage, calls, held[number])),
                disk=round(sum(cost.on_disk for cost in held[number])),
                forward_s=m * stage.forward_s,
                backward_s=m * (stage.backward_s + stage.recompute_s),
                memory=_peak(problem, stage, number, calls, held[number], coming),
            )
        )
    return tuple(made)


def _host_bytes(stage: StagePlan, calls: Sequence[StageCall], held: Sequence[StateCost]) -> float:
    """Bytes of a rank in host memory: activations of all microbatches in flight, and states."""
    kept = sum(call.cost.host_bytes for call in calls)
    flying = max(run.in_flight for run in stage.runs)
    return flying * kept + sum(cost.in_host for cost in held)


def _peak(
    problem: StageProblem,
    stage: StagePlan,
    number: int,
    calls: Sequence[StageCall],
    held: Sequence[StateCost],
    coming: float,
) -> dict[str, int]:
    """Peak memory in bytes by component, with the sums of ``StageTables.memory``; the remainder is communication
    buffers.

    ``coming``: bytes of gradients that are not allocated before their first reduction.
    """
    parts = {kind: sum(cost.kept[kind] for cost in held) for kind in ("parameters", "gradients", "optimizer")}
    parts["residuals"] = sum(cost.lost for cost in held)
    again = problem.train and stage.recompute > 0
    first, last, beside = calls[0].at_ends, calls[-1].at_ends, problem.overhead.working_bytes
    working = max(last.last + first.lingering if first.lingering else 0.0, *(call.working_bytes for call in calls))
    parts["working"] = working + beside
    if problem.train:
        inputs: dict[str, float] = {}
        for call in calls:
            kept = zip(call.inputs, call.cost.input_bytes, call.cost.saved_inputs, strict=True)
            inputs |= {name: size for name, size, saved in kept if saved or again}
        if stage.parts:  # the microbatches at the peak: the remainder of the memory
            parts["recomputed"] = max(call.cost.saved_bytes for call in calls) if again else 0.0
            parts["saved"] = max(0.0, stage.memory - sum(map(round, parts.values())))
        else:
            whole = sum(c.cost.saved_bytes for c in calls[stage.recompute :]) + sum(inputs.values())
            half = sum(c.cost.carried_bytes for c in calls) + sum(inputs.values())

            def flying(gone: float) -> float:
                """Saved bytes of all microbatches in flight, of which one has already freed ``gone`` bytes."""
                return max(w * whole + h * half - min(w, 1) * gone for w, h in problem.held(number))

            moments = [(working, flying(0.0), 0.0), (first.closing, flying(whole), 0.0)]
            if again:
                made = max(calls, key=lambda c: c.working_bytes + c.cost.saved_bytes)
                moments.append((made.working_bytes, flying(0.0), made.cost.saved_bytes))
            fullest = max(moments, key=sum)
            parts |= {"working": fullest[0] + beside, "saved": fullest[1], "recomputed": fullest[2]}
    parts["gradients"] -= min(coming, max(0.0, sum(parts.values()) - stage.memory))  # not there at the fullest moment
    sizes = {kind: round(size) for kind, size in parts.items()}
    sizes["buffers"] = max(0, stage.memory - sum(sizes.values()))
    return {kind: size for kind, size in sizes.items() if size}
