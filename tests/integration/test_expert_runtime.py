"""What a program does with experts over ranks besides computing: prove, train, save, run on processes, infer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partitioner
from partitioner import Constraints, Plan, PlanError, Topology, partition
from partitioner.errors import ConstraintError
from partitioner.plans.reference import run_reference
from partitioner.plans.verify import compare
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.program.mesh import expert_mesh
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.every_rank import on_every_rank
from tests.helpers.experts_zoo import PlainExperts, plain, plain_inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(ep=2, dp=2, tp=1, pp=1)),
    "replicas": (4, dict(ep=2, dp=4, tp=1, pp=1, microbatch_size=1)),
    "within": (4, dict(ep=2, dp=2, tp=2, pp=1)),
    "rows": (4, dict(ep=4, etp=1, dp=2, tp=2, pp=1)),
    "rows, replicas": (4, dict(ep=2, etp=1, dp=1, tp=4, pp=1)),
}


@cache
def planned(mesh: str, form: str = "gathered", aux: float = 0.0, **more: Any) -> Plan:
    ranks, pinned = MESHES[mesh]
    model = plain(form=form, aux=aux)
    return partition(model, Topology.local(ranks), plain_inputs(), constraints=Constraints(**(pinned | more)))


def targets(program: Program) -> set[str]:
    return {str(n.get("target")) for block in program.blocks.values() for n in block.nodes}


@pytest.mark.parametrize(
    ("mesh", "form"),
    [
        *((mesh, "gathered") for mesh in MESHES),
        *(pytest.param(m, "dense", marks=[pytest.mark.slow] * (m not in ("replicas", "rows"))) for m in MESHES),
    ],
)
def test_equal_to_the_model(mesh: str, form: str):
    plan = planned(mesh, form)
    report = plan.verify(plain(form=form), plain_inputs())
    assert report.ok, str(report)
    sent = "partition.dispatch.default" if form == "gathered" else "partition.all_to_all.default"
    assert sent in targets(plan.program)
    assert {n: s.expert_layout for n, s in plan.program.states.items() if s.expert_layout != "R"} == dict.fromkeys(
        ("up", "up_bias", "down", "down_bias"), "S0"
    )


@pytest.mark.parametrize("mesh", ["replicas", "within"])
def test_recomputed_experts_are_routed_again(mesh: str):
    plan = planned(mesh, recompute="full")
    assert any(stage.checkpoint_calls for stage in plan.program.stages)
    assert plan.verify(plain(), plain_inputs()).ok


def test_a_loss_of_balance_is_that_of_the_whole_batch():
    plan = planned("ep2", aux=0.5)
    assert plan.verify(plain(aux=0.5), plain_inputs()).ok
    with pytest.raises(PlanError, match="combines samples across the batch"):
        planned("ep2", aux=0.5, microbatch_size=2)


def test_inference_sends_rows_too():
    plan = partition(
        plain(), Topology.local(2), plain_inputs(), objective="infer", constraints=Constraints(**MESHES["ep2"][1])
    )
    assert plan.verify(plain(), plain_inputs()).ok


@pytest.mark.parametrize("mesh", ["ep2", "rows"])
def test_processes_over_gloo(mesh: str):
    """All rows to the first rank's experts: the others send everything and work on nothing."""
    model = plain()
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
    plan = planned(mesh)
    run = partitioner.run_local(plan, model, plain_inputs(), precision="fp64")
    errors = compare(run, run_reference(model, plain_inputs()), plan.program)
    assert max(errors.values()) < 1e-9, errors


def test_the_search_may_choose_it():
    """Experts that do not fit on one device, and tokens enough, leave little else."""
    plan = planned("ep2")
    assert plan.planned_only == () and plan.mesh["ep"] == 2
    free = partition(plain(), Topology.local(4), plain_inputs(), constraints=Constraints(pp=1))
    assert {c.mesh["ep"] for c in free.certificate.candidates} >= {1, 2, 4}
    assert free.verify(plain(), plain_inputs()).ok


# --- training ---------------------------------------------------------------------------------------------------------


def steps(engine: Engine, count: int = 2, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(engine.parameters(), lr=0.01)
    for _ in range(count):
        engine.step(plain_inputs())
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("saved", "loaded"), [("within", "replicas"), ("rows, replicas", "ep2"), ("ep2", "rows")])
def test_any_plan_may_load_what_another_one_saved(tmp_path: Path, saved: str, loaded: str):
    """Two steps under one plan and two under another end where four steps of plain torch do."""
    weights, first, second = plain(), planned(saved).program, planned(loaded).program  # made by one thread

    def save(communicator: Any) -> None:
        engine = Engine(first, weights, communicator=communicator)
        engine.save(tmp_path / "out", steps(engine))

    def load(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(second, None, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1.0)
        engine.load(tmp_path / "out", optimizer)
        steps(engine, optimizer=optimizer)
        return engine.state_dict(full=True)

    on_every_rank(first, save)
    got = on_every_rank(second, load)[0]
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(**plain_inputs()).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(got[name], expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm_counts_every_expert_once(mesh: str):
    weights, program = plain(), planned(mesh).program  # made by one thread

    def norm(communicator: Any) -> Tensor:
        engine = Engine(program, weights, communicator=communicator)
        engine.step(plain_inputs())
        return engine.clip_grad_norm_(1.0)

    model = plain()
    model(**plain_inputs()).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for found in on_every_rank(program, norm):
        torch.testing.assert_close(found, expected)


# --- proof ------------------------------------------------------------------------------------------------------------


def changed(program: Program, state: str, **changes: Any) -> Program:
    states = {**program.states, state: program.states[state].model_copy(update=changes)}
    return program.model_copy(update={"states": states})


def refusal(program: Program) -> str:
    with pytest.raises(ProofError) as caught:
        prove(Program.model_validate_json(program.model_dump_json()))
    return str(caught.value)


def test_experts_gradients_are_added_up_over_their_replicas():
    program = planned("replicas").program
    assert program.states["up"].grad_axes == ("edp",)
    assert program.group(0, ("edp",)) == (0, 2) and program.group(3, ("ep",)) == (2, 3)
    assert "is R over tp and S0 over ep, but its gradient is added up over no axis" in refusal(
        changed(program, "up", grad_axes=())
    )
    assert "but its gradient is added up over ('dp',)" in refusal(changed(program, "up", grad_axes=("dp",)))
    assert "but its gradient is added up over ('edp',)" in refusal(changed(program, "head.weight", grad_axes=("edp",)))


def test_experts_that_are_not_where_the_graph_has_them_are_refused():
    program = planned("ep2").program
    assert "'up' is float32[4, 32, 48], but float32[2, 32, 48] in the graph" in refusal(
        changed(program, "up", expert_layout="R")
    )
    assert "cannot be S1 over ep=2" in refusal(changed(program, "router.bias", expert_layout="S1"))


def test_ranks_must_suffice_for_the_experts_mesh():
    program = planned("ep2").program
    message = refusal(program.model_copy(update={"mesh": {**program.mesh, "ep": 4}}))
    assert "experts over ep=4 x etp=1 of the 2 ranks of a stage" in message


def test_a_collective_among_ranks_whose_rows_differ_in_number_is_refused():
    """A reduction over tp between dispatch and combine is for ranks along tp that route alike."""
    program = planned("rows").program
    name, block = next((n, b) for n, b in program.blocks.items() if "partition.dispatch.default" in str(b.nodes))
    nodes = [dict(n) for n in block.nodes]
    at = next(i for i, n in enumerate(nodes) if n.get("target") == "partition.expert_mm.default")
    product = nodes[at]
    reduced = {
        "name": "reduced",
        "op": "call_function",
        "target": "partition.all_reduce.default",
        "args": [{"node": product["name"]}, "tp", 2, "copy"],
        "val": product["val"],
    }
    for node in nodes[at + 1 :]:
        node["args"] = _renamed(node.get("args"), product["name"], "reduced")
    nodes.insert(at + 1, reduced)
    changed_block = block.model_copy(update={"nodes": tuple(nodes)})
    program = program.model_copy(update={"blocks": {**program.blocks, name: changed_block}})
    assert "rows that are routed apart: their number differs from rank to rank" in refusal(program)


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, list):
        return [_renamed(v, old, new) for v in value]
    return {"node": new} if value == {"node": old} else value


def test_groups_of_experts_fold_over_data_and_tensor_ranks():
    assert expert_mesh({"pp": 2, "dp": 2, "tp": 2, "ep": 4}, 1) == {"pp": 2, "edp": 1, "ep": 4, "etp": 1}
    assert expert_mesh({"dp": 4, "tp": 2, "ep": 2}) == {"pp": 1, "edp": 2, "ep": 2, "etp": 2}
    program = planned("within").program
    assert [program.group(r, ("ep",)) for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_what_does_not_divide_is_refused_before():
    def ask(model: Any, **pinned: int) -> Plan:
        return partition(model, Topology.local(4), plain_inputs(), constraints=Constraints(**pinned))

    with pytest.raises(ConstraintError, match="ep=4 does not divide the model's 6 experts; expected a divisor of 6"):
        ask(plain(num_experts=6), ep=4)

    class Dense(PlainExperts):
        def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return torch.relu(x @ self.up[0]) @ self.down[0]

    with pytest.raises(ConstraintError, match="ep=2, but no experts were recognised in the model; expected ep=1"):
        ask(Dense(), ep=2)
