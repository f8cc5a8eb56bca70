"""The outputs and gradients of a program, run on symbols."""

from __future__ import annotations

from typing import Any

from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.prove import prove
from tests.helpers.symbolic import Term, run_symbolic


def result(program: Program) -> tuple[dict[Any, Term], dict[str, Term]]:
    """Outputs by (value, data rank, microbatch) and gradients by state; all ranks that hold a gradient agree on it."""
    prove(program)
    lists = {r: program.rank(r).instructions for r in range(program.world_size)}
    ran = run_symbolic(program, lists)
    outputs = {
        (value, program.coordinates(rank)["dp"], microbatch): made
        for rank, made_there in ran["outputs"].items()
        for (value, microbatch), made in made_there.items()
    }
    gradients: dict[str, Term] = {}
    for there in ran["gradients"].values():
        for name, made in (there or {}).items():
            assert gradients.setdefault(name, made) == made, f"the ranks disagree on the gradient of {name}"
    return outputs, gradients
