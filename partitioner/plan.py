"""The plan: the program of all ranks, why it was chosen, and what it is expected to cost."""

from __future__ import annotations

from typing import Any, Literal

from runtime.program import Data, Program, RankProgram

PLAN_FORMAT = "partitioner-plan"
PLAN_VERSION = 1


class Estimate(Data):
    """What the cost model expects of one step. ``memory``: peak bytes, one per rank; ``breakdown``: seconds by kind."""

    step_time: float
    mfu: float
    bubble: float
    memory: tuple[int, ...]
    breakdown: dict[str, float]


class Candidate(Data):
    """One point of the search and what became of it."""

    mesh: dict[str, int]
    microbatch_size: int
    schedule: str
    status: Literal["chosen", "solved", "bounded", "infeasible"]
    bound: float = 0.0  # no plan of this candidate can take fewer seconds
    step_time: float | None = None
    memory: int | None = None  # bytes on the fullest rank
    reason: str = ""


class Certificate(Data):
    """``objective`` is the plan's cost in seconds under the model, ``bound`` what no plan can go below."""

    objective: float
    bound: float
    gap: float
    candidates: tuple[Candidate, ...] = ()


class OperatorShare(Data):
    """How much of the model's matrix-multiply work is sharded, and which operators have no rule (name -> share)."""

    matmul_sharded: float
    without_rule: dict[str, float]
