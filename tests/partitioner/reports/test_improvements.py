"""What would make a step faster: found plans and upper limits, the largest gain first."""

from __future__ import annotations

import pytest

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.explain.explain import format_explanation
from partitioner.explain.improvements import list_improvements
from partitioner.plan import Baseline, Plan, StageEstimate
from partitioner.solve.search.outcomes import build_candidate_report
from tests.helpers.sample_programs import llama, plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of 1.23 s, of which 0.1 s are recomputation and 0.13 s waits; its gap is 2.8 %."""
    plan = plan_of(llama(pp=4, dp=2, tp=2, tied=True, recompute=True))
    breakdown = {"compute": 0.8, "tp_communication": 0.2, "recompute": 0.1, "bubble": 0.13}
    estimate = plan.estimate.model_copy(update={"step_time": 1.23, "breakdown": breakdown})
    return plan.model_copy(update={"estimate": estimate, "constraints": Constraints(pp=4)})


def with_baselines(plan: Plan, *baselines: Baseline) -> Plan:
    certificate = plan.certificate.model_copy(update={"objective": 1.23, "gap": 0.028, "baselines": baselines})
    return plan.model_copy(update={"certificate": certificate})


def baseline(name: str, seconds: float, **more: object) -> Baseline:
    row = build_candidate_report(MeshCandidate(1, 16, 1, 1, zero=3))
    row = row.model_copy(update={"status": "solved", "step_time": seconds})
    return Baseline.model_validate({"name": name, "candidate": row, **more})


def test_gains_are_in_order_and_small_ones_are_left_out(plan: Plan):
    """tp communication is 0.2 of 1.23 s (16 %), waits 0.13 (11 %), recomputation 0.1 (8.1 %), the gap 2.8 %. Without
    constraints a step takes 0.6 s (51 % less); offload saves half a per cent, which is not worth a line."""
    excluded = baseline("ZeRO-3", 0.6, excluded="excluded by the constraints")
    hosted = baseline("Offload of the optimizer", 1.224, offload=("optimizer",))
    found = list_improvements(with_baselines(plan, excluded, hosted))
    assert found[0] == "Without your constraints: ZeRO-3 (dp 16, zero 3) takes 600 ms, 51% less."
    rest = [text for text in found if "precision" not in text][1:]
    assert [text.rsplit("at most ")[1].split()[0] for text in rest] == ["16%", "11%", "8.1%", "2.8%"]
    assert "fewer ranks of tp" in rest[0]
    assert "more memory for each rank" in rest[2]
    assert not any("offload=" in text for text in found)


def test_offload_fewer_devices_and_another_batch_are_told_with_their_gains(plan: Plan):
    """Twice the samples in 1.5 times the time: a quarter less time per sample."""
    asked = plan.model_copy(update={"global_batch": 16})
    hosted = baseline("Offload of the optimizer", 1.107, offload=("optimizer",))
    fewer = baseline("Without the 2 devices of node 1", 1.1685)
    batch = baseline("A global batch of 32", 1.845, global_batch=32)
    found = list_improvements(with_baselines(asked, hosted, fewer, batch))
    told = [text for text in found if "at most" not in text]
    assert told == [
        "With a global batch of 32: a step takes 1.84 s, 25% less per sample.",
        'With offload="optimizer": Offload of the optimizer (dp 16, zero 3) takes 1.11 s, 10% less.',
        "Without the 2 devices of node 1 (dp 16, zero 3) takes 1.17 s, 5.0% less.",
    ]


def test_the_next_precision_is_told_only_where_devices_have_it(plan: Plan):
    """Computation is 0.8 and recomputation 0.1 of 1.23 s; in fp8 the peak of an H100 is twice that of bf16: at most
    37 % less. An A100 has no fp8."""
    bf16 = with_baselines(plan.model_copy(update={"precision": "bf16"}))
    told = [text for text in list_improvements(bf16) if "precision" in text]
    assert [text.split(",")[0] for text in told] == ['With precision="fp8": at most 37% less']
    (kind,) = {plan.topology.devices[device].kind for device in plan.devices}
    older = plan.topology.types[kind].model_copy(update={"peak": {"bf16": 312e12, "fp32": 19.5e12}})
    topology = plan.topology.model_copy(update={"types": {**plan.topology.types, kind: older}})
    assert not [t for t in list_improvements(bf16.model_copy(update={"topology": topology})) if "precision" in t]


def test_offload_is_not_advised_where_a_search_with_it_found_nothing(plan: Plan):
    def advice(*baselines: Baseline) -> str:
        return next(text for text in list_improvements(with_baselines(plan, *baselines)) if "recomputation" in text)

    assert "(more devices)" in advice(), "optimizer states are a small part of memory"
    of_stage = {"first": "a", "last": "b", "num_calls": 2, "recomputed": 2, "forward_s": 0.1, "backward_s": 0.2}
    stage = StageEstimate.model_validate({**of_stage, "memory": {"optimizer": 3, "saved": 97}})
    plan = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"stages": (stage,)})})
    assert "(more devices or optimizer states in host memory)" in advice()
    nothing = Baseline(name="Offload of the optimizer", excluded="no plan found", offload=("optimizer",))
    assert "(more devices)" in advice(nothing)
    asked = plan.model_copy(update={"constraints": plan.constraints.model_copy(update={"recompute": "full"})})
    told = [text for text in list_improvements(with_baselines(asked)) if "recomputation" in text]
    assert "without recompute=full" in told[0]


def test_the_explanation_has_them(plan: Plan):
    text = format_explanation(with_baselines(plan))
    assert "What would make it faster?" in text
    assert text.index("What limits it?") < text.index("What would make it faster?") < text.index("How is the work")


def test_stages_that_recompute_while_others_take_longer_cost_no_time(plan: Plan):
    """Stage 0 recomputes, but no share of the step is recomputation, because another stage is the slowest."""
    free = {
        "first": "a",
        "last": "b",
        "num_calls": 2,
        "recomputed": 0,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "memory": {},
    }
    stages = [StageEstimate.model_validate({**free, "recomputed": 2 * (k == 0)}) for k in range(4)]
    breakdown = {"compute": 1.0, "bubble": 0.23}
    estimate = plan.estimate.model_copy(update={"stages": tuple(stages), "breakdown": breakdown})
    words = " ".join(format_explanation(plan.model_copy(update={"estimate": estimate})).split())
    assert "Memory costs no time" in words
    assert "stage 0 recomputes to fit, but other stages take longer." in words
    assert "Memory does not limit" not in words
