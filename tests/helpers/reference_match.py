"""The results of a run against those of the unmodified model."""

from __future__ import annotations

import partitioner
from partitioner import Plan, Reference
from partitioner.plans.verify import TOLERANCE, compare


def close(plan: Plan, run: partitioner.Run, reference: Reference) -> None:
    errors = compare(run, reference, plan.program)
    assert {f"grad {n}" for n in reference.grads} < errors.keys()
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}
