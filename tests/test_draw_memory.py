"""The memory view: what it adds up is what the simulator counts, and the picture shows it."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.draw import draw
from partitioner.draw.memory import KINDS, byte_step, stage_levels
from partitioner.explain_tables import host_text
from partitioner.held import fixed_sizes
from partitioner.timing import PlanDurations
from runtime.facts import ProgramFacts
from runtime.memory import memory_moments, memory_steps, state_bytes
from runtime.simulate import simulate
from tests.sample_programs import llama, plan_of
from tests.test_compare import Tower

SVG = "{http://www.w3.org/2000/svg}"


def planned(**pins: object) -> Plan:
    with torch.device("meta"):
        return partition(Tower(), Topology.local(2), (torch.empty(64, 256),), constraints=Constraints(**pins))


@pytest.fixture(scope="module", params=["none", "full"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(pp=2, microbatch_size=8, recompute=request.param)


def test_moments_are_the_simulators_steps(plan: Plan):
    facts = ProgramFacts(plan.program)
    for number, stage in enumerate(plan.program.stages):
        states = state_bytes(facts, number)
        steps = memory_steps(facts, number, stage.instructions)
        moments = memory_moments(facts, number, stage.instructions)
        for (most, after), (seen, left) in zip(steps, moments, strict=True):
            assert states + left.saved + left.gradients == after
            fullest = max((m.saved + m.gradients + m.recomputed for m in seen), default=0)
            assert states + max(fullest, left.saved + left.gradients) <= most


def test_levels_fill_the_step_and_add_up_to_its_peak(plan: Plan):
    durations, facts = PlanDurations(plan), ProgramFacts(plan.program)
    timeline = simulate(plan.program, durations, facts=facts)
    for stage, levels in enumerate(stage_levels(plan, timeline, durations, facts)):
        assert levels[0].start == 0.0
        assert levels[-1].end == pytest.approx(timeline.step_time)
        for one, two in pairwise(levels):
            assert two.start == pytest.approx(one.end)
        program = [{**level.sizes, "optimizer": 0, "working": 0} for level in levels]
        assert max(sum(sizes.values()) for sizes in program) == timeline.stages[stage].peak_bytes


def test_states_are_those_of_the_estimate(plan: Plan):
    facts = ProgramFacts(plan.program)
    for number, stage in enumerate(plan.estimate.stages):
        fixed = fixed_sizes(facts, number, plan.optimizer)
        assert fixed == {kind: stage.memory[kind] for kind in fixed}


def test_what_is_in_host_memory_is_not_on_the_device():
    plan = planned(pp=2, microbatch_size=8, offload="optimizer")
    facts = ProgramFacts(plan.program)
    for number, stage in enumerate(plan.estimate.stages):
        fixed = fixed_sizes(facts, number, plan.optimizer)
        assert fixed == {"optimizer": 0} | {kind: stage.memory[kind] for kind in ("parameters", "gradients")}
    assert f"not drawn: {host_text(plan)}." in draw(plan, "memory")


def test_recomputation_is_a_kind_of_its_own():
    for recompute in (True, False):
        svg = draw(plan_of(llama(pp=2, dp=1, tp=2, recompute=recompute)), "memory")
        assert (KINDS["recomputed"][1] in svg) == recompute


def test_the_picture_has_a_row_for_every_stage():
    svg = draw(plan_of(llama(pp=16, dp=2, tp=2, layers=16)), "memory")
    shown = ["".join(t.itertext()) for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert [t for t in shown if t.startswith("Stage")] == [f"Stage {k}" for k in range(16)]
    assert "ranks 60–63" in shown
    assert sum(t.startswith("peak ") for t in shown) == 16
    assert len(svg) < 1_000_000


def test_the_capacity_is_a_line_or_a_word():
    near = draw(plan_of(llama(pp=2, dp=1, tp=2)), "memory")
    assert "what a program may use of the device" in near
    far = draw(planned(pp=2), "memory")
    assert "far beyond the scale" in far
    assert "what a program may use of the device" not in far


def test_tooltips_say_what_is_held_when(plan: Plan):
    titles = [t.text or "" for t in ET.fromstring(draw(plan, "memory")).iter(f"{SVG}title")]
    assert any(t.startswith("optimizer states: at most ") for t in titles)
    assert any(" at " in t.splitlines()[0] and "parameters and buffers" in t for t in titles)


@given(st.floats(1, 1e15), st.integers(1, 6))
def test_lines_are_few_and_round(total: float, most: int):
    step = byte_step(total, most)
    assert total / step <= most
    assert total / step >= most / 6 or step == 1.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-1p"])
def test_a_plans_memory_is_its_programs_at_the_fullest(schedule: str):
    """Also of lists that repeat, of which two repetitions are followed."""
    plan = partition(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
        Topology.local(4),
        (torch.randn(64, 64),),
        loss=lambda y: y.square().mean(),
        constraints=Constraints(pp=2, dp=2, tp=1, zero=2, microbatch_size=1, schedule=schedule),
    )
    facts = ProgramFacts(plan.program)
    for number, (stage, expected) in enumerate(zip(plan.program.stages, plan.estimate.stages, strict=True)):
        kept = {kind: size for kind, size in expected.memory.items() if kind not in ("optimizer", "working")}
        peak = max(most for most, _ in memory_steps(facts, number, tuple(stage.instructions)))
        assert sum(kept.values()) <= peak <= sum(expected.memory.values()) - expected.memory["optimizer"]
        assert plan.estimate.memory[2 * number] == sum(expected.memory.values())
    picture = stage_levels(plan, simulate(plan.program, PlanDurations(plan), facts=facts), PlanDurations(plan), facts)
    for levels, expected in zip(picture, plan.estimate.stages, strict=True):
        assert max(level.total for level in levels) <= sum(expected.memory.values())


class Attention(nn.Module):
    """Heads whose values are of another width than their keys, as where keys and values come of a narrow state."""

    def __init__(self, masked: bool, groups: int) -> None:
        super().__init__()
        self.masked, self.groups = masked, groups
        self.read = nn.Linear(64, 4 * 24 + 4 // groups * (24 + 16), bias=False)
        self.give = nn.Linear(4 * 16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = 4 // self.groups
        q, k, v = (
            part.unflatten(-1, (-1, wide)).transpose(1, 2)
            for part, wide in zip(self.read(x).split([4 * 24, heads * 24, heads * 16], -1), (24, 24, 16), strict=True)
        )
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(-3) if self.masked else None
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=not self.masked, enable_gqa=self.groups > 1
        )
        return self.give(attended.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_kept_where_the_planned_devices_kernels_keep_them(masked: bool, groups: int):
    """Accelerators fuse attention over any widths of heads; CPUs where queries and values are as wide."""
    length = 1024
    scores = 4 * length**2 * 4
    saved = {}
    for name, ranks in (("cpu", 1), ("dgx-h100", 8)):
        one_row = Constraints(pp=1, dp=ranks, cp=1, tp=1, zero=0)
        with torch.device("meta"):
            model, topology = Attention(masked, groups), Topology.preset(name)
            plan = partition(model, topology, (torch.empty(ranks, length, 64),), constraints=one_row)
        saved[name] = plan.estimate.stages[0].memory["saved"]
    assert saved["cpu"] > scores > 2 * saved["dgx-h100"]


def test_an_inference_plan_saves_nothing_for_backward():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(8, 64)
    plan = partition(model, Topology.local(2), (x,), objective="infer")
    facts, durations = ProgramFacts(plan.program), PlanDurations(plan)
    (levels,) = stage_levels(plan, simulate(plan.program, durations, facts=facts), durations, facts)
    assert max(level.total for level in levels) == plan.estimate.memory[0]
    drawn = draw(plan, "memory")
    assert "outputs, kept to the end of the step" in drawn
    assert "for backward" not in drawn
