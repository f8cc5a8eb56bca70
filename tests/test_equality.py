"""The unmodified model is the judge: outputs, loss and every gradient, in float64, on threads and on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import runtime
from partitioner import Constraints, Plan, Reference, Topology, partition, run_reference
from partitioner.verify import TOLERANCE, compare
from tests.models import CASES

MESHES = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2)]
SCHEDULES = ["gpipe", "1f1b"]
EVERY = list(product(sorted(CASES), MESHES, SCHEDULES))
# Each model on two meshes, each mesh and schedule several times.
SAMPLE = [
    (name, MESHES[(5 * i + 4 * j) % len(MESHES)], SCHEDULES[(i + j) % 2])
    for i, name in enumerate(sorted(CASES))
    for j in (0, 1)
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[runtime.LocalRanks]:
    """Processes that stay for all tests of this file."""
    with runtime.LocalRanks(8) as pool:
        yield pool


def check(name: str, mesh: tuple[int, int, int], schedule: str, ranks: runtime.LocalRanks) -> None:
    case = CASES[name]
    model, inputs = case.build(), case.inputs(8)
    pp, dp, tp = mesh
    constraints = Constraints(pp=pp, dp=dp, tp=tp, schedule=schedule, microbatch_size=2 if dp * pp < 4 else 1)
    plan = partition(model, Topology.local(pp * dp * tp), inputs, loss=case.loss, constraints=constraints)
    assert {a: n for a, n in plan.mesh.items() if n > 1} == {
        a: n for a, n in zip(("pp", "dp", "tp"), mesh, strict=True) if n > 1
    }
    reference = run_reference(model, inputs, case.loss)
    threads = runtime.run_threads(plan, model, inputs, precision="fp64")
    close(plan, threads, reference)
    processes = runtime.run_local(plan, model, inputs, precision="fp64", ranks=ranks, timeout=120)
    close(plan, processes, reference)
    if tp > 1:
        assert plan.shares.matmul_sharded >= 0.95


def close(plan: Plan, run: runtime.Run, reference: Reference) -> None:
    errors = compare(run, reference, plan.program)
    assert {f"grad {n}" for n in reference.grads} < errors.keys()
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("name", "mesh", "schedule"), SAMPLE, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v
)
def test_programs_compute_what_the_model_computes(
    name: str, mesh: tuple[int, int, int], schedule: str, ranks: runtime.LocalRanks
) -> None:
    check(name, mesh, schedule, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    [c for c in EVERY if c not in SAMPLE],
    ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v,
)
def test_every_model_mesh_and_schedule(
    name: str, mesh: tuple[int, int, int], schedule: str, ranks: runtime.LocalRanks
) -> None:
    check(name, mesh, schedule, ranks)
