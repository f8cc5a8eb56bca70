"""Host memory: programs that train as one process does, and what device and host hold meanwhile."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from partitioner import Constraints, Plan, PlanError, Topology, partition
from partitioner.cost.call.states import kinds_of, state_costs
from partitioner.errors import CapacityError, ConstraintError
from partitioner.passes.ir.model import ModelState, TensorSpec
from partitioner.plans.verify import relative_error
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.memory import host_bytes, parameter_bytes, peak_bytes
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from partitioner.simulate.program_time import plan_timeline
from tests.helpers.eager_attention import inputs as eager_inputs
from tests.helpers.eager_attention import model as eager_model
from tests.helpers.infeasible_jobs import Infeasible
from tests.helpers.offload_plans import ALL, Wide, planned, with_host
from tests.helpers.small_clusters import cluster
from tests.helpers.zero_training import MESHES, errors, train

pytestmark = pytest.mark.usefixtures("without_baselines")


CASES = [
    ("dp4", "optimizer", "zero2", {}),
    ("dp2 tp2", ALL, "zero0", dict(recompute="none")),
    ("dp2 tp2", ALL, "zero3", {}),
    ("dp2 pp2", "optimizer+activations", "zero1", dict(microbatch_size=1, recompute="full")),
    ("dp2 pp2", ALL, "zero3", dict(microbatch_size=1, schedule="zb-1p")),
    ("dp4 ep2", ALL, "hybrid3", {}),
]
SLOW = [
    ("dp4", ALL, "zero3", {}),
    ("dp4", "optimizer", "hybrid2", {}),
    ("dp2 tp2", "optimizer", "zero1", {}),
    ("dp2 pp2", ALL, "zero0", dict(microbatch_size=1)),
    ("dp2 pp2", "activations", "zero0", dict(microbatch_size=1, schedule="interleaved", virtual_stages=2)),
    ("dp2 ep2", "optimizer+activations", "zero2", {}),
]


@pytest.mark.parametrize(
    ("mesh", "offload", "sharding", "more"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_five_steps_are_those_of_one_process(
    mesh: str, offload: str, sharding: str, more: dict[str, Any], tmp_path: Path
):
    name = MESHES[mesh][0]
    plan = planned(mesh, offload, sharding, **more)
    assert plan.planned_only == ()
    assert plan.program.offload == Constraints(offload=offload).offload
    train(plan.program, name, tmp_path / "out")
    found = errors(tmp_path / "out", name)
    assert max(found.values()) < 1e-9, {n: e for n, e in found.items() if e > 1e-9}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("dp4", "optimizer", "zero3"), ("dp2 pp2",)),
        (("dp2 pp2",), ("dp2 tp2", ALL)),
        pytest.param(("dp2 tp2", ALL, "zero3"), ("dp4", "optimizer", "hybrid3"), marks=pytest.mark.slow),
    ],
)
def test_any_plan_may_load_what_another_one_saved(saved: Any, loaded: Any, tmp_path: Path):
    train(planned(*saved).program, "tied", tmp_path / "out", last=2)
    train(planned(*loaded).program, "tied", tmp_path / "out", first=2, load=True)
    found = errors(tmp_path / "out", "tied")
    assert max(found.values()) < 1e-9, {n: e for n, e in found.items() if e > 1e-9}


EAGER: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pp2 tp2": dict(pp=2, tp=2, schedule="1f1b", microbatch_size=1),
    "pp2 zero bubble": dict(pp=2, schedule="zb-1p", recompute="selective", microbatch_size=1),
}


@cache
def eager(case: str = "one rank", offload: str | None = ALL, **more: Any) -> Plan:
    pins: dict[str, Any] = dict(pp=1, dp=1, tp=1, microbatch_size=2, recompute="none") | EAGER[case] | more
    topology = Topology.local(pins["pp"] * pins["tp"])
    return partition(eager_model(0.2), topology, eager_inputs(), constraints=Constraints(**pins, offload=offload))


@pytest.mark.parametrize("case", EAGER)
def test_it_computes_what_the_model_does(case: str):
    found = eager(case).verify(eager_model(0.2), eager_inputs())
    assert found.ok and found.max_error < 1e-9, found.errors


def test_processes_over_gloo():
    weights = eager_model(0.2).double()
    batch = {n: x.double() if x.is_floating_point() else x for n, x in eager_inputs().items()}
    plain, hosted = (partitioner.run_local(eager("pp2 tp2", offload), weights, batch) for offload in (None, ALL))
    assert relative_error(hosted.loss, plain.loss) < 1e-12
    assert hosted.grads.keys() == plain.grads.keys() == dict(weights.named_parameters()).keys()
    assert max(relative_error(hosted.grads[n], plain.grads[n]) for n in plain.grads) < 1e-9


# --- what is where ----------------------------------------------------------------------------------------------------


def alone(program: Program, weights: nn.Module | None = None) -> Engine:
    return Engine(program, weights, communicator=ThreadWorld(1, "cpu").communicator(0))


def test_an_ordinary_optimizer_steps_float32_in_host_memory():
    plans = [
        partition(
            eager_model(0.0),
            Topology.local(1),
            eager_inputs(),
            precision="bf16",
            constraints=Constraints(microbatch_size=4, offload=offload),
        )
        for offload in ((), "optimizer", ALL)
    ]
    held = []
    for plan in plans:
        engine = alone(plan.program, eager_model(0.0))
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        for _ in range(3):
            engine.step(eager_inputs())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        assert {p.dtype for p in engine.parameters()} == {torch.float32}
        short = engine.state_dict()
        assert all(torch.equal(short[n], p.detach().to(torch.bfloat16)) for n, p in engine.named_parameters())
        held.append({n: p.detach().clone() for n, p in engine.named_parameters()})
    for other in held[1:]:
        assert all(torch.equal(held[0][n], other[n]) for n in held[0])


def test_parameters_are_not_on_the_device_between_their_uses():
    engine = alone(eager().program, eager_model(0.2))
    rooms = [engine._shards[n].untyped_storage() for n, _ in engine.named_parameters()]
    assert {room.nbytes() for room in rooms} == {0}
    engine.step(eager_inputs())
    assert {room.nbytes() for room in rooms} == {0}
    assert all(parameter_bytes(ProgramFacts(engine.program), n) == 0 for n, _ in engine.named_parameters())


def test_what_a_call_keeps_is_in_host_memory_meanwhile():
    plan = eager(offload="activations")
    engine, facts = alone(plan.program, eager_model(0.2)), ProgramFacts(plan.program)
    sizes = {n: torch.Size(v.shape).numel() * 4 for n, v in plan.program.values.items()}
    seen, whole = [], sum(x.nbytes for x in eager_inputs().values())

    def watched(index: int, action: Any) -> tuple[int, Any]:
        def run() -> None:
            action()
            if index == len(plan.program.stages[0].instructions):  # the end of the step
                return
            i = plan.program.stages[0].instructions[index]
            if i.op == "OFFLOAD" and i.calls is not None:
                call = facts.stages[0][i.calls[0]]
                place = i.microbatch, i.calls[0]
                assert place not in engine._executor.env.saved
                moved = engine._executor.env.parked[place].num_bytes
                told = call.kept_bytes + sum(sizes[v] for v in call.moves)
                assert 0 < moved <= told + whole  # a view keeps, and moves, all of the memory that it looks at
                seen.append(place)

        return index, run

    engine._executor.actions[:] = [watched(*action) for action in engine._executor.actions]
    engine.step(eager_inputs())
    assert len(seen) == sum(i.op == "OFFLOAD" for i in plan.program.stages[0].instructions) > 4


def test_values_that_many_calls_read_stay():
    """The mask is made once for all layers."""
    facts = ProgramFacts(eager(offload="activations").program)
    layers = [c for c in facts.stages[0] if c.data.path.startswith("layers")]
    assert all(len(c.moves) < len(c.keeps) or len(c.keeps) == 1 for c in layers)
    assert set.intersection(*(set(c.data.inputs) for c in layers)).isdisjoint(v for c in layers for v in c.moves)


@pytest.mark.parametrize("case", ["one rank", "pp2 tp2"])
def test_the_device_keeps_less_and_the_host_more(case: str):
    plain, hosted = (eager(case, offload).program for offload in (None, "activations"))
    before, after = (peak_bytes(ProgramFacts(p), 0, p.stages[0].instructions)[0] for p in (plain, hosted))
    assert after < before
    facts = ProgramFacts(hosted)
    assert host_bytes(ProgramFacts(plain), 0, plain.stages[0].instructions) == 0
    in_host = host_bytes(facts, 0, hosted.stages[0].instructions)
    assert in_host >= max(c.kept_bytes for c in facts.stages[0])
    assert eager(case, "activations").estimate.stages[0].host >= in_host / 2


def test_the_plan_counts_optimizer_states_where_they_are():
    plain, hosted = planned("dp4"), planned("dp4", "optimizer")
    (before,), (after,) = plain.estimate.stages, hosted.estimate.stages
    assert before.memory["optimizer"] > 0 == after.memory.get("optimizer", 0)
    assert sum(before.memory.values()) - sum(after.memory.values()) == before.memory["optimizer"]
    # two moments, the float32 parameter and its gradient
    assert after.host == 2 * before.memory["optimizer"]
    assert before.host == 0


def test_states_in_host_memory():
    model = {"w": ModelState("w", TensorSpec((10,), torch.bfloat16), "parameter", True)}
    costs = {k: state_costs(kinds_of(model, {}), {}, offload=(k,))["w"] for k in ("optimizer", "activations")}
    assert costs["optimizer"].kept == {"parameters": 20, "gradients": 40, "optimizer": 0}
    # the float32 parameter, two moments, the gradient; and the parameter as it is sent
    assert costs["optimizer"].in_host == 10 * (4 + 8 + 4 + 2)
    assert costs["activations"].kept["optimizer"] == 120 and costs["activations"].in_host == 0


def test_the_timeline_has_transfers_and_the_pictures_have_them(tmp_path: Path):
    plan = eager("pp2 tp2")
    (first, _) = plan_timeline(plan).stages
    assert {b.instruction.op for b in first.background} >= {"OFFLOAD", "FETCH"}
    for view in ("timeline", "memory", "graph"):
        plan.to_svg(tmp_path / f"{view}.svg", view=view)
    assert "to host memory" in (tmp_path / "timeline.svg").read_text()
    assert "host memory" in plan.summary()


# --- the program ------------------------------------------------------------------------------------------------------


def text(program: Program, *ops: str) -> list[str]:
    def shown(i: Instruction) -> str:
        return f"{i.op}{'' if i.calls is None else i.calls[0]}{',' * bool(i.states)}{','.join(i.states)}"

    return [shown(i) for i in program.stages[0].instructions if i.op in ops]


def test_activations_leave_after_their_forward_and_come_one_computation_ahead():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.sum()

    fixed = Constraints(offload="activations", microbatch_size=4, recompute="none")
    program = partition(Chain(), Topology.local(1), (torch.zeros(4, 8),), constraints=fixed).program
    found = text(program, "F", "B", "OFFLOAD", "FETCH")
    assert found == "F0 OFFLOAD0 F1 OFFLOAD1 F2 FETCH1 B2 FETCH0 B1 B0".split()


def edited(program: Program, change: Any) -> ProofError:
    stage = program.stages[0]
    changed = stage.model_copy(update={"instructions": tuple(change([*stage.instructions]))})
    with pytest.raises(ProofError) as caught:
        prove(program.model_copy(update={"stages": (changed, *program.stages[1:])}))
    return caught.value


def without(op: str, field: str) -> Any:
    """The list without the first ``op`` that has ``field``."""

    def change(list_: list[Instruction]) -> list[Instruction]:
        place = next(k for k, i in enumerate(list_) if i.op == op and getattr(i, field))
        return [*list_[:place], *list_[place + 1 :]]

    return change


def twice(op: str, field: str) -> Any:
    def change(list_: list[Instruction]) -> list[Instruction]:
        place = next(k for k, i in enumerate(list_) if i.op == op and getattr(i, field))
        return [*list_[: place + 1], *list_[place:]]

    return change


def first(op: str, field: str) -> Any:
    """The list with the last ``op`` that has ``field`` in front."""

    def change(list_: list[Instruction]) -> list[Instruction]:
        place = next(k for k in reversed(range(len(list_))) if list_[k].op == op and getattr(list_[k], field))
        return [list_[place], *list_[:place], *list_[place + 1 :]]

    return change


@pytest.mark.parametrize(
    ("offload", "change", "words"),
    [
        ("activations", without("FETCH", "calls"), "went to host memory at instruction .* and were not fetched"),
        ("activations", without("OFFLOAD", "calls"), "are not in host memory"),
        ("activations", twice("OFFLOAD", "calls"), "were moved at instruction"),
        ("activations", twice("FETCH", "calls"), "came back at instruction"),
        ("activations", first("OFFLOAD", "calls"), "before its forward"),
        ("optimizer", without("FETCH", "states"), "is in host memory and was never fetched"),
        ("optimizer", twice("FETCH", "states"), "was fetched at instruction 0"),
        ("optimizer", without("OFFLOAD", "states"), "never reaches host memory"),
        ("optimizer", first("OFFLOAD", "states"), "lacks the backward"),
        ("optimizer", twice("OFFLOAD", "states"), "was copied to host memory at instruction"),
        (ALL, without("FREE", "states"), "was fetched at instruction|is fetched here and never freed"),
        (ALL, twice("FREE", "states"), "was freed at instruction"),
        (ALL, first("FREE", "states"), "was never fetched"),
    ],
)
def test_a_broken_program_is_refused(offload: str, change: Any, words: str):
    error = edited(eager(offload=offload).program, change)
    assert re.search(words, str(error)), str(error)


def test_a_program_says_what_it_offloads():
    with pytest.raises(ProofError, match="moves activations to host memory, but the program offloads none"):
        prove(eager(offload="activations").program.model_copy(update={"offload": ()}))


def test_inference_passes_parameters_through():
    plan = partition(
        eager_model(0.0).eval(),
        Topology.local(1),
        eager_inputs(),
        objective="infer",
        constraints=Constraints(offload="parameters", microbatch_size=4),
    )
    assert plan.program.offload == ("parameters",)
    assert plan.verify(eager_model(0.0).eval(), eager_inputs()).ok


def test_half_precision_scales_losses_as_without():
    plans = [
        partition(
            eager_model(0.0),
            Topology.local(1),
            eager_inputs(),
            precision="fp16",
            constraints=Constraints(offload=offload, microbatch_size=4),
        )
        for offload in ((), "optimizer")
    ]
    found = []
    for plan in plans:
        engine = alone(plan.program, eager_model(0.0))
        engine.step(eager_inputs())
        engine.step(eager_inputs(), accumulate=True)
        found.append({n: p.grad for n, p in engine.named_parameters()})
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


# --- what is planned --------------------------------------------------------------------------------------------------


def test_it_is_tried_where_nothing_fits_without():
    batch = (torch.zeros(4, 512),)
    with pytest.raises(CapacityError):
        partition(Wide(), cluster(16, devices=1), batch)
    plan = partition(Wide(), with_host(cluster(16, devices=1)), batch)
    assert plan.program.offload == ("optimizer",)  # 6 MiB of parameters, and 6 of gradients
    smaller = partition(Wide(), with_host(cluster(9.5, devices=1)), batch)
    assert smaller.program.offload == ("optimizer", "activations", "parameters")
    assert smaller.estimate.step_time > plan.estimate.step_time


def test_an_estimate_says_what_is_in_host_memory(tmp_path: Path):
    where = with_host(cluster(9.5, devices=1))
    plan = partition(Wide(), where, (torch.zeros(4, 512),), estimate_only=True)
    assert plan.offload == ("optimizer", "activations", "parameters")
    for text in (plan.summary(), plan.explain()):
        assert "optimizer states, activations and parameters: " in " ".join(text.split())
    assert Plan.load(plan.save(tmp_path / "plan.json")).offload == plan.offload


def test_a_host_that_is_too_small_is_said():
    with pytest.raises(PlanError, match=r"the host of node 0 has .* are offloaded to it: .* too much"):
        partition(
            Wide(),
            with_host(cluster(64, devices=1), "4 MB"),
            (torch.zeros(4, 512),),
            constraints=Constraints(offload="optimizer"),
        )


def test_hosts_must_be_known():
    with pytest.raises(ConstraintError, match="small does not describe the hosts of its nodes"):
        partition(Wide(), cluster(64), (torch.zeros(4, 512),), constraints=Constraints(offload="optimizer"))


def test_constraints():
    assert Constraints(offload="parameters").offload == ("optimizer", "parameters")
    assert Constraints(offload=["activations", "optimizer"]).offload == ("optimizer", "activations")
    assert Constraints(offload="none").offload == ()
    assert Constraints(offload="disk").offload == ("optimizer", "disk")
    with pytest.raises(ConstraintError, match="input should be of 'optimizer', 'activations', 'parameters', 'disk'"):
        Constraints(offload="tape")
    with pytest.raises(ConstraintError, match="offload of parameters with zero=2"):
        planned("dp4", ALL, "zero2")


def test_the_bound_knows_that_hosts_step():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(2)))
    inputs = (torch.empty(8, 8192, device="meta"),)
    pinned = Constraints(offload="optimizer", pp=1)
    plan = partition(model, Topology.preset("dgx-v100", nodes=1), inputs, loss=torch.sum, constraints=pinned)
    update = plan.estimate.breakdown["optimizer"]
    assert update > 0.1 * plan.estimate.step_time
    bounds = [c.bound for c in plan.certificate.candidates if c.status == "bounded"]
    assert bounds and all(update / 2 < bound for bound in bounds)
    assert plan.certificate.bound <= plan.certificate.objective


PINNED: list[dict[str, int]] = [{"dp": 4}, {"pp": 1, "tp": 1}, {"pp": 1, "dp": 4, "cp": 1}, {"tp": 1, "pp": 1, "dp": 4}]


@pytest.mark.parametrize("pins", PINNED)
def test_a_fixed_mesh_is_not_given_host_memory_unasked(pins: dict[str, int]) -> None:
    """Four layers of 1 MiB take 4 MiB with gradients and Adam's moments, of devices with 3 MiB: the error says by how
    much and on which stage, then that offload would fit and what a step takes so."""
    job = Infeasible(CapacityError, "", cluster(3, host=64), pins=pins | {"zero": 0})
    with pytest.raises(CapacityError) as raised:
        job.plan(job.topology, Constraints(**job.pins))
    error = raised.value
    assert error.message.startswith("stage 0 of 1 (layers.0 to layers.3) needs ")
    assert error.stage == 0
    assert 2**20 < error.missing_bytes < 1.2 * 2**20
    change = error.changes[0]
    assert change.constraints == Constraints(**job.pins, offload="optimizer")
    plan = job.plan(change.topology, change.constraints)
    told = re.fullmatch(r"offload=optimizer \(a step then takes (\d+) µs\)", change.text)
    assert told is not None, change.text
    assert int(told[1]) * 1e-6 == pytest.approx(plan.estimate.step_time, rel=0.02)  # which is its program's
    assert plan.offload == ("optimizer",)
    assert not plan.lacking  # it was asked for


@pytest.mark.parametrize(
    ("pins", "world_size", "fixed"),
    [
        ({}, 8, False),
        ({"tp": 8}, 8, True),  # of eight devices: nothing is left
        ({"tp": 8}, 64, False),
        ({"tp": 8, "pp": 4}, 64, True),  # dp follows, up to a share of cp
        ({"dp": 8, "pp": 4}, 64, False),  # tp or cp
        ({"dp": 8, "pp": 4, "cp": 1}, 64, True),
        ({"microbatch_size": 1, "zero": 1}, 64, False),
        ({"pp": 1, "tp": 1, "dp": 1}, 1, False),  # one device has no degrees
    ],
)
def test_which_constraints_fix_the_mesh(pins: dict[str, int], world_size: int, fixed: bool) -> None:
    assert Constraints(**pins).fixes_mesh(world_size) is fixed


def test_what_fits_only_with_host_memory_is_said_first() -> None:
    plan = partition(Wide(), with_host(cluster(16, devices=1)), (torch.zeros(4, 512),))
    first, second, *_ = plan.summary().splitlines()
    assert first.endswith("parameters: fits only with optimizer in host memory")
    assert second.split()[:7] == ["without", "host", "memory", "even", "the", "layout", "that"]
    assert re.search(r"stage 0 of 1 .* needs .*, but only 16 MiB are usable on a device", plan.lacking)
    lacks = "even the layout that lacks the fewest bytes of all does not fit: stage 0 of 1"
    assert f"Only with optimizer in host memory. Without it, {lacks}" in " ".join(plan.explain().split())
