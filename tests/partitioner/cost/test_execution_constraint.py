"""The constraint ``execution``: it is stored, executed by default, and recorded steps are priced without the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partitioner import ConstraintError, Constraints, Engine, Plan, Topology, partition, prepare
from partitioner.execution_profile import OURS
from partitioner.runtime.engine.execution import ExecutionSetup, choose_execution
from partitioner.runtime.errors import LaunchError
from tests.helpers.models import CASES

pytestmark = pytest.mark.usefixtures("without_baselines")

AXES = dict(dp=1, tp=1, pp=1)


def planned(execution: str | None, topology: Topology) -> Plan:
    case = CASES["llama"]
    fixed = Constraints(**AXES, execution=execution)
    return partition(case.build(), topology, case.inputs(4), constraints=fixed)


@pytest.fixture(scope="module")
def gpu() -> Topology:
    whole = Topology.parse("dgx-h100")
    return whole.without(*whole.names[1:])


def test_recorded_steps_are_priced_without_the_time_of_the_host(gpu: Topology):
    """Of a model whose kernels are shorter than the time in which the host issues them."""
    eager, compiled, graph = (planned(how, gpu) for how in ("eager", "compiled", "graph"))
    assert graph.estimate.step_time < compiled.estimate.step_time < eager.estimate.step_time
    dispatch = gpu.types[gpu.devices[0].kind].dispatch
    assert eager.estimate.step_time - graph.estimate.step_time > 50 * dispatch
    for plan in (compiled, graph):
        assert plan.estimate.memory == eager.estimate.memory
        assert plan.program == eager.program
        assert not plan.profile.differences, "this project executes it"


def test_steps_are_compiled_on_gpus_if_nothing_else_is_said(gpu: Topology):
    """The estimate, the summary, the certificate and the engine say so. On CPUs, operators run one by one."""
    free, compiled, local = planned(None, gpu), planned("compiled", gpu), Topology.local(1)
    assert free.constraints.execution is None
    assert free.estimate == compiled.estimate
    assert "execution      compiled between collectives" in str(free.summary())
    assert 'execution="graph"' in free.certificate.beyond["execution"]
    assert "execution" not in compiled.certificate.beyond
    on_cpu = planned(None, local)
    assert on_cpu.estimate == planned("eager", local).estimate
    assert "\n  execution " not in str(on_cpu.summary())
    assert "execution" not in on_cpu.certificate.beyond
    assert choose_execution(None, None, torch.device("cuda")) == ExecutionSetup("compiled", True, None)
    assert choose_execution(None, None, torch.device("cpu")) == ExecutionSetup("eager", False, None)


def test_an_option_of_the_engine_overrides_the_plan():
    gpu = torch.device("cuda")
    assert choose_execution(None, False, gpu, "compiled") == ExecutionSetup("eager", False, None)
    assert choose_execution(None, "aot_eager", gpu, "eager") == ExecutionSetup("compiled", "aot_eager", None)
    assert choose_execution(None, None, gpu, "eager") == ExecutionSetup("eager", False, None)
    for execution, compile in (("compiled", False), ("eager", True)):
        with pytest.raises(LaunchError, match=f"execution is '{execution}' and compile is {compile}"):
            choose_execution(execution, compile, gpu)  # type: ignore[arg-type]


@pytest.mark.parametrize("execution", ["compiled", "graph"])
def test_no_pinned_layout_is_faster_than_the_bound_of_a_compiled_plan(execution: str):
    case, whole = CASES["llama"], Topology.parse("dgx-h100")
    four = whole.without(*whole.names[4:])
    prepared = prepare(case.build(), case.inputs(8))
    best = partition(prepared, four, constraints=Constraints(execution=execution), estimate_only=True)
    assert best.certificate is not None and 0 < best.certificate.bound <= best.estimate.step_time * (1 + 1e-9)
    for axes in (dict(dp=4, tp=1, pp=1), dict(dp=1, tp=4, pp=1), dict(dp=2, tp=1, pp=2), dict(dp=2, tp=2, pp=1)):
        fixed = Constraints(**axes, execution=execution)
        pinned = partition(prepared, four, constraints=fixed, estimate_only=True).estimate.step_time
        assert pinned >= best.certificate.bound * (1 - 1e-9), axes
        assert pinned >= best.estimate.step_time * (1 - 1e-9), axes


def test_a_framework_says_itself_what_it_records(gpu: Topology):
    case = CASES["llama"]
    made = [
        partition(
            case.build(), gpu, case.inputs(4), constraints=Constraints(**AXES, execution=how), profile="megatron-core"
        )
        for how in ("eager", "graph")
    ]
    assert made[0].estimate.step_time == made[1].estimate.step_time
    assert made[1].profile.graphs == "none"


def test_the_mode_is_independent_of_other_fields_of_our_profile():
    """A changed field does not turn compilation off, and a profile for one mode can be used for another one."""
    changed = OURS.model_copy(update={"dispatch": "once"})
    compiled, recorded = changed.executed(None, "cuda"), changed.executed("graph", "cuda")
    assert (compiled.fused_kernels, compiled.graphs, compiled.dispatch) == (True, "none", "once")
    assert (recorded.fused_kernels, recorded.graphs) == (True, "part")
    assert recorded.executed("compiled", "cuda") == compiled
    eager = compiled.executed("eager", "cuda")
    assert not eager.fused_kernels and eager == changed.executed("eager", "cuda")
    assert changed.executed(None, "cpu") == changed


@pytest.mark.parametrize(("execution", "verdict"), [("eager", "slower"), ("graph", "faster")])
def test_another_mode_is_asked_for_after_planning(execution: str, verdict: str, gpu: Topology):
    case = CASES["llama"]
    given = {"model": case.build(), "inputs": case.inputs(4)}
    assert planned(None, gpu).why_not(**given, execution=execution).verdict == verdict


def test_a_cpu_needs_its_host_for_all_operators():
    local = Topology.local(1)
    assert planned("graph", local).estimate == planned("eager", local).estimate


def test_the_engine_executes_as_the_plan_or_its_file_says(tmp_path: Path):
    plan = planned("graph", Topology.local(1))
    plan.save(tmp_path / "plan.json")
    case = CASES["llama"]
    for given in (plan, tmp_path / "plan.json", Plan.load(tmp_path / "plan.json")):
        engine = Engine(given, case.build())
        losses = [engine.step(case.inputs(4)) for _ in range(3)]
        assert engine.execution_report[""].replays == 1
        assert torch.equal(losses[0], losses[2])  # type: ignore[arg-type]
    assert Engine(plan, case.build(), execution="eager").execution_report == {}
    assert Engine(plan.program, case.build()).execution_report == {}


def test_the_summary_says_how_steps_are_executed():
    local = Topology.local(1)
    assert "execution      one step is recorded, and replayed afterwards" in str(planned("graph", local).summary())
    assert "\n  execution " not in str(planned("eager", local).summary())


def test_a_wrong_execution_is_refused():
    with pytest.raises(ConstraintError, match=r"execution.*eager.*compiled.*graph"):
        Constraints(execution="fast")  # type: ignore[arg-type]
    assert Constraints.parse("execution=graph").execution == "graph"
