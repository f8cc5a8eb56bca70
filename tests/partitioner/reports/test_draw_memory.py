"""The memory view: what it adds up is what the simulator counts, and the picture shows it."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Plan, Topology, partition
from partitioner.draw import draw
from partitioner.draw.memory import KINDS, byte_step, stage_levels
from partitioner.draw.svg import PALETTE
from partitioner.explain.memory_texts import host_text
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.memory import (
    MemoryMoment,
    find_fullest_moment,
    memory_moments,
    memory_steps,
    state_bytes,
)
from partitioner.runtime.program.simulate import simulate
from partitioner.simulate.program_memory import fixed_sizes
from partitioner.simulate.program_time import PlanDurations
from partitioner.units import bytes_text, seconds_text
from tests.helpers.linear_towers import Tower
from tests.helpers.sample_programs import llama, plan_of

pytestmark = pytest.mark.usefixtures("without_baselines")

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


def test_levels_fill_the_time_of_sums_over_the_batch():
    """The number of labels of the batch is counted before the pipeline starts; states are held meanwhile."""
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64, use_cache=False
    )
    ids, pins = torch.zeros(4, 8, dtype=torch.int64), Constraints(pp=2, microbatch_size=1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    told = partition(model, Topology.local(2), {"input_ids": ids, "labels": ids}, constraints=pins)
    durations, facts = PlanDurations(told), ProgramFacts(told.program)
    timeline = simulate(told.program, durations, facts=facts)
    assert any(span.instruction.op == "TOTAL_F" and span.work for lane in timeline.stages for span in lane.spans)
    for levels in stage_levels(told, timeline, durations, facts):
        assert levels[0].start == 0.0
        assert all(two.start == pytest.approx(one.end) for one, two in pairwise(levels))


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
    told = host_text(plan)
    total = sum(stage.host for stage in plan.estimate.stages)  # one rank on each stage, both on one host
    assert told.endswith(f", {bytes_text(total)} of {bytes_text(plan.topology.host(0).memory)} in all on the host")
    assert f"not drawn: {told}." in " ".join(" ".join(ET.fromstring(draw(plan, "memory")).itertext()).split())


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
    assert "usable memory: without reserve, communication groups and margin" in near
    far = draw(planned(pp=2), "memory")
    assert "far beyond the scale" in far
    assert "usable memory: without reserve, communication groups and margin" not in far


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE Lab of a colour as a reader sees it. The matrices are those of Machado et al. (2009), of full severity."""
    matrices = {
        "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "without red": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "without green": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881),
        ),
        "without blue": (
            (1.255528, -0.076749, -0.178779),
            (-0.078411, 0.930809, 0.147602),
            (0.004733, 0.691367, 0.303900),
        ),
    }
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    seen = [min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrices[sight]]
    to_xyz = ((0.4125, 0.3576, 0.1804), (0.2127, 0.7152, 0.0722), (0.0193, 0.1192, 0.9503))
    white = (0.9505, 1.0, 1.0888)
    xyz = [sum(m * c for m, c in zip(row, seen, strict=True)) / w for row, w in zip(to_xyz, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", ["usual", "without red", "without green", "without blue"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_kinds_of_memory_are_told_apart_by_every_reader(sight: str, dark: bool):
    """Two colours that differ by 25 in CIE Lab are told apart at a glance; 2.3 is the least that is noticed. Areas that
    lie on one another differ in lightness as well, as a grey print has to show them."""
    colours = [PALETTE[colour] for colour, _ in KINDS.values()]
    seen = [lab(c.dark if dark else c.light, sight) for c in colours]
    assert min(math.dist(a, b) for a, b in combinations(seen, 2)) >= 25
    if sight == "usual":
        assert min(abs(a[0] - b[0]) for a, b in pairwise(seen)) >= 20


def test_high_areas_have_their_names_and_the_axis_ends_with_the_step(plan: Plan):
    shown = [t.text or "" for t in ET.fromstring(draw(plan, "memory")).iter(f"{SVG}text")]
    assert {"parameters", "optimizer", "gradients", "activations"} & set(shown)
    end = seconds_text(plan.estimate.step_time)
    assert shown.count(end) == 2  # among the figures, and at the end of the axis


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


@pytest.mark.parametrize(
    "pins",
    [
        dict(pp=2, schedule="1f1b"),
        dict(pp=2, schedule="zb-1p", zero=1),
        dict(pp=2, schedule="interleaved", virtual_stages=2, recompute="full"),
        dict(pp=2, schedule="zb-v", recompute="selective"),
        dict(pp=2, dp=2, schedule="gpipe", zero=2),
        dict(pp=2, dp=2, schedule="zb-1p", zero=3),
        dict(pp=1, dp=4, zero=2),
        dict(pp=2, schedule="1f1b", offload=("activations",)),
    ],
    ids=str,
)
def test_the_fullest_moment_is_the_greatest_of_all_moments(pins: dict[str, object]):
    """Working memory counts, which differs from call to call. The loss is a mean over tokens of the whole batch, so the
    program sums totals."""
    mesh = {"dp": 4 // int(str(pins["pp"])), "tp": 1, "microbatch_size": 1}
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(config), torch.zeros(16, 8, dtype=torch.long)
    constraints = Constraints(**{**mesh, **pins})
    plan = partition(model, Topology.local(4), {"input_ids": tokens, "labels": tokens}, constraints=constraints)
    facts, totals = ProgramFacts(plan.program), set()
    for number, stage in enumerate(plan.program.stages):
        working = [1000 * (place % 3) for place, _ in enumerate(stage.calls)]

        def count(moment: MemoryMoment, working: list[int] = working) -> int:
            needed = 0 if moment.call is None else working[moment.call]
            return moment.saved + moment.gradients + moment.recomputed + moment.gathered + needed

        walked = memory_moments(facts, number, tuple(stage.instructions))
        expected = max((moment for moments, after in walked for moment in (*moments, after)), key=count)
        found, needed = find_fullest_moment(facts, number, tuple(stage.instructions), working)
        assert found == expected
        assert needed == (0 if found.call is None else working[found.call])
        totals.add(count(found))
    assert min(totals) > 0


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
