"""Pictures: what they show, that they are valid, that they fit both schemes, and that they grow with stages only."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.draw import VIEWS, DrawError, draw
from partitioner.draw.graph_layout import PanelBox, Wire, WireLanes, lay_out
from partitioner.draw.svg import PALETTE, Header, create_picture, draw_header, text_width
from partitioner.draw.timeline import Bar, draw_timeline, idle_shares, join_call_bars, merge_narrow_bars, tick_step
from partitioner.draw.timeline_folds import Fold, Gap, TimeScale, find_folds, leave_out_middle
from partitioner.plan import Plan
from partitioner.plans.outline import chunk_starts, fold_runs, outline_program, path_range
from partitioner.report.pictures import embed_picture
from partitioner.runtime.program.instructions import Instruction
from partitioner.topology import loads
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.svg_texts import SVG, parsed, texts, tooltips

pytestmark = pytest.mark.usefixtures("without_baselines")


def assert_coloured(root: ET.Element) -> None:
    """By the rules that a viewer without media queries follows, no shape is black, which is what none gives."""
    style = next(root.iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition("@media")
    rules, of_dark = (dict(re.findall(r"\.([fs]-\w+)\{\w+:(#[0-9a-f]{6})\}", part)) for part in (light, dark))
    assert rules.keys() == of_dark.keys()
    for shape in (e for tag in ("rect", "path", "polygon", "circle", "text") for e in root.iter(SVG + tag)):
        fill, names = shape.get("fill", "black"), (shape.get("class") or "").split()
        found = [rules[name] for name in names if name.startswith("f-")]
        assert fill not in ("black", "#000000"), shape.attrib
        assert fill in ("none", "url(#pt-idle)") or found == [fill], shape.attrib


@pytest.fixture(scope="module")
def graph() -> str:
    return draw(plan_of(llama(pp=4, dp=2, tp=2, tied=True, skip=True)), "graph")


@pytest.fixture(scope="module")
def timeline() -> str:
    return draw(plan_of(llama(pp=4, dp=2, tp=2, tied=True)), "timeline")


def test_an_unknown_view_names_those_there_are():
    with pytest.raises(DrawError, match="no view 'topologie'; expected one of graph, timeline"):
        draw(plan_of(llama(pp=2, layers=4)), "topologie")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (8, 1, 8)])
def test_pictures_are_valid_and_fit_both_schemes(view: str, mesh: tuple[int, int, int]):
    pp, dp, tp = mesh
    svg = draw(plan_of(llama(pp=pp, dp=dp, tp=tp, layers=16)), view)
    root = parsed(svg)
    assert "prefers-color-scheme:dark" in svg
    assert "var(" not in svg, "what is no browser draws colours by variables in black"
    assert_coloured(root)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert 300 < width < 4300
    assert 200 < height < 4000
    for element in root.iter():
        for attribute in ("fill", "stroke"):
            colour = element.get(attribute, "none")
            known = colour in {c.light for c in PALETTE.values()} or colour in ("none", "url(#pt-idle)")
            assert known, f"{element.tag} has the colour {colour}, which has no dark form"
    for box in root.iter(f"{SVG}rect"):
        assert "f-canvas" not in box.get("class", ""), "a background would be white where the viewer is dark"


def test_colours_can_be_told_apart_by_name():
    lights = [c.light for c in PALETTE.values()]
    assert len(set(lights)) == len(lights)


def test_the_graph_shows_folded_calls_collectives_weights_and_memory(graph: str):
    shown = texts(graph)
    assert "DecoderLayer× 8" in shown
    assert "model.layers.8–15" in shown
    assert "16 × 32 MiB" in shown  # two all-gathers in each of eight layers
    assert "column-parallel: q_proj, up_proj" in shown
    assert "row-parallel: o_proj, down_proj" in shown
    assert any(re.fullmatch(r"Stage 3\s*ranks 12–15", t) for t in shown)
    assert any(t.startswith("all-reduce of gradients over dp: 3.23 GiB") for t in shown)  # of bfloat16, in float32
    assert any("61 GiB of" in t for t in shown)
    assert any("self_attn.q_proj.weight [4096×4096] S0: column-parallel" in t for t in tooltips(graph))


def test_the_graph_shows_hand_overs_long_edges_and_tied_weights(graph: str):
    shown = texts(graph)
    assert shown.count("32 MiB forward") == 2  # beside each other; the third is a lane between the rows
    assert any(t.startswith("Embedding → Head: 16 MiB forward, 16 MiB backward, 3 hops") for t in shown)
    assert any(t.startswith("tied: model.embed_tokens.weight = lm_head.weight") for t in shown)


def test_the_graph_grows_with_stages_not_with_ranks():
    small = parsed(draw(plan_of(llama(pp=4, dp=1, tp=2)), "graph"))
    large = parsed(draw(plan_of(llama(pp=4, dp=64, tp=2)), "graph"))
    assert abs(len(list(large.iter())) - len(list(small.iter()))) < 40  # a line on gradients for each stage


def test_equal_stages_are_drawn_once_when_there_are_many():
    shown = texts(draw(plan_of(llama(pp=16, dp=1, tp=8, layers=128)), "graph"))
    assert any(re.fullmatch(r"Stages 1–14\s*ranks 8–119", t) for t in shown)
    assert "14 equal stages, drawn once" in shown


def test_a_model_without_repeats_or_collectives_is_drawn():
    shown = texts(draw(plan_of(llama(pp=1, dp=1, tp=1, layers=1)), "graph"))
    assert "DecoderLayer" in shown
    assert not any("all-gather" in t for t in shown)


def test_the_timeline_numbers_every_microbatch_on_every_stage(timeline: str):
    shown = texts(timeline)
    for microbatch in range(8):
        assert shown.count(str(microbatch)) == 4 * 2  # forward and backward on four stages
    assert sum(t.endswith("% idle") for t in shown) == 4
    assert {"forward", "backward", "send", "reduction of gradients", "gradients of tied weights", "idle"} <= set(shown)
    assert any("forward of microbatch 3" in t and "ms" in t for t in tooltips(timeline))


def test_the_timeline_stays_inside_its_axis(timeline: str):
    root = parsed(timeline)
    axis = next(e for e in root.iter(f"{SVG}line") if e.get("class") == "s-line")
    left, right = float(axis.get("x1", 0)), float(axis.get("x2", 0))
    boxes = [r for g in root.iter(f"{SVG}g") if g.get("class") == "hit" for r in g.iter(f"{SVG}rect")]
    assert boxes
    for box in boxes:
        start = float(box.get("x", 0))
        assert left - 1 <= start
        assert start + float(box.get("width", 0)) <= right + 1


def seconds_of(words: str) -> float:
    """Of ``12.3 ms``."""
    value, unit = words.split()
    return float(value.replace(",", "")) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def ticks(svg: str) -> list[float]:
    """The times on the axis, from the left to the right."""
    middle = [
        t for t in parsed(svg).iter(f"{SVG}text") if t.get("text-anchor") == "middle" and t.get("font-size") == "11"
    ]
    bottom = max(float(t.get("y", 0)) for t in middle)
    return [seconds_of(t.text or "") for t in middle if float(t.get("y", 0)) == bottom]


def test_the_axis_ends_with_the_step_that_is_printed(timeline: str):
    """The step time of the plan is 1.23 s. Its simulation ends at another time, and the picture says so."""
    times = ticks(timeline)
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == 1.23
    assert re.search(r"The simulated step takes [\d.]+ m?s; it is drawn on the scale", " ".join(texts(timeline)))


def bar(start: float, end: float, op: str = "F", microbatch: int = 0, calls: tuple[int, int] = (0, 4)) -> Bar:
    return Bar(0, start, end, Instruction(op=op, stage=0, microbatch=microbatch, calls=calls))  # type: ignore[arg-type]


def test_kinds_of_backward_can_be_told_apart():
    def shade(name: str) -> list[int]:
        return [int(PALETTE[name].light[i : i + 2], 16) for i in (1, 3, 5)]

    kinds = ("forward", "backward", "backward_input", "backward_weight", "backward_1", "backward_input_1")
    for one, other in combinations(kinds, 2):  # the last two: on a rank's second virtual stage
        assert sum(abs(a - b) for a, b in zip(shade(one), shade(other), strict=True)) > 60, (one, other)


def test_a_second_virtual_stage_is_paler_opaque_and_in_the_legend():
    model, inputs = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), (torch.randn(8, 8),)
    pins = Constraints(pp=2, schedule="interleaved", virtual_stages=2, microbatch_size=2)
    plan = partition(model, Topology.local(2), inputs, loss=lambda out: out.sum(), constraints=pins)
    svg = draw(plan, "timeline")
    used = {name for e in parsed(svg).iter() for name in (e.get("class") or "").split()}
    assert {"f-forward", "f-forward_1", "f-backward", "f-backward_1"} <= used
    assert "fill-opacity" not in svg
    assert "fainter: a rank's second virtual stage" in texts(svg)
    assert "interleaved, 2 virtual stages on each rank" in texts(svg)


def test_pictures_say_what_bubble_and_idle_are():
    svg = draw(plan_of(llama(pp=2, layers=4)), "timeline")
    said = " ".join(texts(svg))
    assert "Idle is the time in which a stage computes nothing" in said
    assert "The summary counts exposed communication otherwise" in said
    assert "The bubble is the part of idle time in which a rank waits for other stages" in said


def test_one_stage_has_no_schedule():
    shown = texts(draw(plan_of(llama(pp=1, dp=1, tp=1, layers=1)), "timeline"))
    assert "one stage" in shown
    assert "1f1b" not in shown


def test_idle_is_what_is_not_computed():
    program = llama(pp=2, layers=4)
    bars = [bar(0, 1), bar(1, 4, "B"), Bar(1, 2, 3, Instruction(op="F", stage=1, microbatch=0, calls=(0, 4)))]
    assert idle_shares(program, bars) == [0.0, 0.75]


def test_pieces_of_a_microbatch_are_one_box():
    joined = join_call_bars([bar(0, 1, "B", calls=(3, 4)), bar(1, 2, "B", calls=(0, 3)), bar(2, 3, "B", 1, (3, 4))])
    assert [(b.start, b.end, b.instruction.calls) for b in joined] == [(0, 2, (0, 4)), (2, 3, (3, 4))]


def test_virtual_stages_have_boxes_of_their_own():
    pieces = [bar(0, 1, calls=(0, 2)), bar(1, 2, calls=(2, 4)), bar(2, 3, calls=(4, 6))]
    joined = join_call_bars(pieces, chunks=(0, 4))
    assert [(b.start, b.end, b.instruction.calls) for b in joined] == [(0, 2, (0, 4)), (2, 3, (4, 6))]


def test_hairlines_are_drawn_together():
    assert [b.merged for b in merge_narrow_bars([bar(i, i + 1, microbatch=i) for i in range(5)], narrow=2.0)] == [5]
    assert [b.merged for b in merge_narrow_bars([bar(i, i + 1, microbatch=i) for i in range(5)], narrow=0.5)] == [1] * 5


def steady_bars(count: int) -> list[Bar]:
    """Totals for 5 s, then for each microbatch 1 s forward and 2 s backward, then 4 s backward of the last."""
    bars = [Bar(0, 0.0, 5.0, Instruction(op="TOTAL_F", stage=0))]
    for m in range(count):
        start = 5.0 + 3 * m
        bars += [bar(start, start + 1, microbatch=m), bar(start + 1, start + 3, "B", m)]
    end = 5.0 + 3 * count
    return [*bars, bar(end, end + 4, "B", count)]


def test_a_steady_state_is_drawn_once_with_how_often_it_runs():
    """128 periods of 3 s from 5 s on; that of the last forward is not closed by another one and is drawn, so that the
    first of 127 is drawn and 126 x 3 = 378 s are left out: from 8 s to 386 s."""
    [fold] = find_folds(steady_bars(128), 1)
    assert (fold.start, fold.period, fold.times) == (5.0, pytest.approx(3.0), 127)
    assert fold.hidden == (8.0, pytest.approx(386.0))
    svg = draw_timeline("steady", llama(pp=1, layers=4), steady_bars(128), total=393.0)
    assert "× 127" in texts(svg)
    assert any("127 equal periods of 3 s from 5 s on" in t for t in tooltips(svg))
    shown = {t for t in texts(svg) if t.isdigit()}
    assert shown == {"0", "127", "128"}
    assert all(time <= 8.01 or time >= 385.9 for time in ticks(svg))
    assert ticks(svg)[-1] == 393.0
    few = draw_timeline("few", llama(pp=1, layers=4), steady_bars(8), total=33.0)
    assert not any(t.startswith("×") for t in texts(few))
    assert {str(m) for m in range(9)} <= set(texts(few))


def test_a_scale_leaves_out_what_is_folded():
    """Of 100 s, 10 to 90 s are left out: 20 s on 226 pixels, 26 of them the break, are 10 pixels a second."""
    scale = TimeScale(100.0, (Fold(5.0, 5.0, 17),), left=0.0, width=226.0)
    assert scale.segments == [(0.0, 10.0), (90.0, 100.0)]
    assert [scale.x(t) for t in (0, 10, 50, 90, 95, 100)] == pytest.approx([0, 100, 100, 126, 176, 226])
    assert scale.visible(8.0, 92.0) == [
        (pytest.approx(80), pytest.approx(100)),
        (pytest.approx(126), pytest.approx(146)),
    ]
    assert scale.visible(20.0, 80.0) == []


def test_what_differs_is_not_folded():
    bars = steady_bars(128)
    uneven = [Bar(0, b.start, b.end - 0.5 * (n % 7 == 0), b.instruction) for n, b in enumerate(bars)]
    assert all(fold.times < 8 for fold in find_folds(uneven, 1))


def make_uneven_bars(num_stages: int, count: int) -> list[Bar]:
    """``count`` microbatches on each of ``num_stages`` stages, whose times all differ, so that no period repeats."""
    draw_time = random.Random(0).uniform
    bars = []
    for stage in range(num_stages):
        time = float(stage)
        for m in range(count):
            for op in ("F", "B"):
                end = time + draw_time(1.0, 2.0)
                i = Instruction(op=op, stage=stage, microbatch=m, calls=(0, 4))  # type: ignore[arg-type]
                bars.append(Bar(stage, time, end, i))
                time = end
    return bars


@pytest.mark.parametrize(("num_stages", "count"), [(2, 4000), (32, 1000)])
def test_the_middle_of_a_long_irregular_step_is_left_out(num_stages: int, count: int):
    program, bars = llama(pp=num_stages, dp=1, tp=1, layers=num_stages), make_uneven_bars(num_stages, count)
    svg = draw_timeline("long", program, bars)
    assert len(svg) < 1_000_000
    assert sum(t.endswith(" s left out") for t in texts(svg)) == 1
    assert "too long to be drawn in full" in " ".join(texts(svg))
    tips = " ".join(tooltips(svg))
    for microbatch in (0, count - 1):
        assert f"forward of microbatch {microbatch}\n" in tips
    assert f"forward of microbatch {count // 2}\n" not in tips
    at_left, at_right = min(ticks(svg)), max(ticks(svg))
    assert at_left == 0.0 and at_right == pytest.approx(max(b.end for b in bars), rel=0.01)
    page = embed_picture("timeline", lambda: svg)
    assert page.drawing is not None and "of the timeline" in page.left_out
    assert page.notes.count("are left out") == 1 and "of the timeline" not in page.notes
    short = draw_timeline("short", program, make_uneven_bars(num_stages, 20))
    assert not any(t.endswith("left out") for t in texts(short))


def test_labels_of_ticks_differ_however_late_they_are():
    late = [Bar(0, b.start + 1000, b.end + 1000, b.instruction) for b in make_uneven_bars(1, 4000)]
    shown = ticks(draw_timeline("late", llama(pp=1, layers=4), late))
    assert len(set(shown)) == len(shown)


def test_a_gap_takes_in_the_repeated_parts_it_overlaps():
    """Of 400 computations of a second each, the gap leaves 3/8 of 80 at either end: 30 s. The part from 25 s on, of
    which the second period begins at 35 s, is within; the one whose periods begin at 375 s is not.
    """
    bars = [bar(i, i + 1, microbatch=i) for i in range(400)]
    within, beyond = Fold(25.0, 10.0, 4), Fold(375.0, 5.0, 4)
    first, last = leave_out_middle(bars, (within, beyond), 80, 80)
    assert (first, last) == (Gap(30.0, 355.0, 325), beyond)
    assert leave_out_middle(bars, (within, beyond), 400, 400) == (within, beyond)
    assert leave_out_middle(bars[:50], (), 80, 80) == ()


def test_sends_too_many_to_draw_are_said_to_be_left_out():
    program = llama(pp=2, layers=4)
    sends = [Bar(0, i, i + 1, Instruction(op="SEND_F", stage=0, microbatch=i, peer=1)) for i in range(5000)]
    svg = draw_timeline("many", program, [bar(0, 5000), *sends])
    assert "too many to draw" in " ".join(texts(svg))
    assert "send" not in texts(svg)


@given(st.floats(1e-9, 1e6), st.integers(2, 40))
def test_ticks_are_round_and_few(total: float, most: int):
    step = tick_step(total, most)
    assert total / step <= most * (1 + 1e-6)
    assert f"{step:.6e}"[0] in "125"


@given(st.lists(st.sampled_from("abc"), max_size=24))
def test_folded_runs_are_the_names_again(names: list[str]):
    runs = fold_runs(names)
    assert [n for start, period, times in runs for n in names[start : start + period] * times] == names
    assert all(start == sum(p * t for _, p, t in runs[:i]) for i, (start, _, _) in enumerate(runs))


def test_alternating_blocks_fold_into_pairs():
    assert fold_runs(list("abbbcdcd")) == [(0, 1, 1), (1, 1, 3), (4, 2, 2)]


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["h.3"], "h.3"),
        (["model.layers.0", "model.layers.7"], "model.layers.0–7"),
        (["h.0.attn", "h.5.attn"], "h.0–5.attn"),
        (["encoder.0", "decoder.1"], "encoder.0 – decoder.1"),
    ],
)
def test_path_ranges(paths: list[str], text: str):
    assert path_range(paths) == text


def test_inference_calls_of_their_own_are_one_chunk():
    stage = llama(pp=2, layers=4).stages[0]
    steps = tuple(Instruction(op="F", stage=0, microbatch=0, calls=(i, i + 1)) for i in range(len(stage.calls)))
    assert chunk_starts(stage.model_copy(update={"instructions": steps})) == [0]


def test_the_turning_stage_of_a_v_schedule_has_two_virtual_stages():
    """The last rank runs its second virtual stage right after its first, with no message between."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)))
    pins = Constraints(pp=2, schedule="zb-v", microbatch_size=2)
    plan = partition(model, Topology.local(2), (torch.zeros(8, 8),), constraints=pins, loss=lambda y: y.square().mean())
    assert [len(chunk_starts(stage)) for stage in plan.program.stages] == [2, 2]


def plan_stages(**pins: Any) -> Plan:
    """A plan for eight equal layers and a loss on four ranks."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)))
    return partition(
        model,
        Topology.local(4),
        (torch.zeros(16, 8),),
        constraints=Constraints(pp=4, microbatch_size=2, **pins),
        loss=lambda y: y.square().mean(),
    )


@pytest.mark.parametrize(
    ("pins", "labels", "of_stages"),
    [
        (
            {"schedule": "zb-v"},
            ["0 → 1", "1 → 2", "2 → 3", "4 → 5", "5 → 6", "6 → 7"],
            ["virtual stages 0, 7", "virtual stages 1, 6", "virtual stages 2, 5", "virtual stages 3–4"],
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 2},
            ["0 → 1, 4 → 5", "1 → 2, 5 → 6", "2 → 3, 6 → 7", "3 → 4"],
            ["virtual stages 0, 4", "virtual stages 1, 5", "virtual stages 2, 6", "virtual stages 3, 7"],
        ),
    ],
)
def test_connectors_name_the_virtual_stages_they_connect(pins: dict[str, Any], labels: list[str], of_stages: list[str]):
    shown = texts(draw(plan_stages(**pins), "graph"))
    named = [t for t in shown if t.startswith("virtual stage ") and "→" in t]
    assert sorted(t.removeprefix("virtual stage ").partition(":")[0] for t in named) == labels
    assert [t for t in shown if t in of_stages] == of_stages
    assert {f"virtual stage {n}" for n in range(8)} <= set(shown)  # on the cards of layers
    assert not any("virtual stage" in t for t in texts(draw(plan_stages(schedule="1f1b"), "graph")))


def test_virtual_stages_are_found_where_the_first_microbatch_runs_call_by_call():
    """Parameters are gathered before the first forward of each layer, but not before later microbatches."""
    stage = llama(pp=2, layers=8).stages[0]

    def forward(microbatch: int, *cuts: int) -> list[Instruction]:
        return [Instruction(op="F", stage=0, microbatch=microbatch, calls=span) for span in pairwise(cuts)]

    turning = (*forward(0, 0, 1, 2, 3, 4), *forward(1, 0, 2, 4))
    assert chunk_starts(stage.model_copy(update={"instructions": turning})) == [0, 2]
    with_head = (*forward(0, 0, 1, 2, 4), *forward(1, 0, 4))
    assert chunk_starts(stage.model_copy(update={"instructions": with_head})) == [0]


def test_equal_stages_on_other_devices_are_not_drawn_together():
    plan = plan_of(llama(pp=16, dp=1, tp=8, layers=128))
    kinds = "[{type: h100-sxm, devices: 8, count: 8}, {type: a100-80gb, devices: 8, count: 8}]"
    topology = loads(f"nodes: {kinds}\nlevels: [{{like: nvlink4, nodes: 1}}, {{like: ib-ndr}}]")
    shown = texts(draw(plan.model_copy(update={"topology": topology}), "graph"))
    assert {"7 equal stages, drawn once", "on h100-sxm", "on a100-80gb"} <= set(shown)
    assert [t for t in shown if t.startswith("Stages")] == ["Stages 1–7ranks 8–63", "Stages 8–14ranks 64–119"]


def test_names_of_divided_and_common_blocks_are_those_of_their_modules():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.position = nn.Embedding(16, 8), nn.Linear(1, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.register_buffer("scale", torch.ones(1))
            self.head = nn.Linear(8, 16)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            angle = torch.arange(ids.shape[1], dtype=torch.float32)[:, None].cos() * self.scale
            x = self.shared(ids)
            for layer in self.layers:
                x = x + layer(x) * angle
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    ids = torch.zeros(8, 4, dtype=torch.int64)
    plan = partition(Model(), Topology.local(2), (ids, ids), constraints=Constraints(pp=2, microbatch_size=2))
    whole = outline_program(plan.program)
    titles = {group.title for stage in whole.stages for group in stage.groups}
    assert titles == {"shared", "layer inputs", "layers.*", "sums over the batch for head", "head"}
    assert {"shared", "layer inputs", "head"} <= {group.paths for stage in whole.stages for group in stage.groups}
    told = plan.summary() + plan.explain()
    assert "sums over the batch for head" in told and "such as the number of targets" in told
    assert not re.search(r"shared#|head\.rest|head\.totals|sums of head", told)


def test_recomputed_layers_repeat_their_collectives_in_backward():
    def gathers(recompute: bool) -> int:
        group = outline_program(llama(recompute=recompute)).stages[1].groups[1]
        return next(m.count for m in group.collectives if (m.op, m.direction) == ("all_gather", "backward"))

    assert (gathers(False), gathers(True)) == (16, 32)


@settings(max_examples=20)
@given(st.integers(2, 8), st.data())
def test_placed_boxes_do_not_overlap(count: int, data: st.DataObject):
    size = st.tuples(st.floats(20, 300), st.floats(20, 200))
    sizes = {f"n{i}": data.draw(size) for i in range(count)}
    pairs = list(combinations(sizes, 2))
    edges = [pair for pair in pairs if data.draw(st.booleans())]
    placed = lay_out(sizes, edges)
    for a, b in pairs:
        (ax, ay), (bx, by) = placed.boxes[a], placed.boxes[b]
        (aw, ah), (bw, bh) = sizes[a], sizes[b]
        assert ax + aw <= bx + 1 or bx + bw <= ax + 1 or ay + ah <= by + 1 or by + bh <= ay + 1
    assert set(placed.edges) == set(edges)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda p: p[0] != p[1]), max_size=12))
def test_wires_in_one_lane_do_not_touch(pairs: list[tuple[int, int]]):
    boxes = [PanelBox(i // 3, 400.0 * (i % 3), 300.0, 100.0) for i in range(9)]
    lanes = WireLanes(boxes, [Wire(a, b, "send", f"{a} to {b}", "") for a, b in pairs], 1100.0)
    runs = [run for runs in lanes.runs.values() for run in runs]
    for a, b in combinations(runs, 2):
        if (a.row, a.lane) == (b.row, b.lane):
            assert max(a.start, a.end) <= min(b.start, b.end) or max(b.start, b.end) <= min(a.start, a.end)


def test_text_is_taken_to_be_at_least_as_wide_as_common_fonts_draw_it():
    assert text_width("1.21 B parameters, 1.13 GiB per rank", 12) > 12 * 0.5 * 36


def test_a_header_stays_within_its_picture():
    header = Header("t", "Bandwidths are per device and direction, when all talk at once. " * 3, [("mesh", "dp 4")], [])
    narrow, wide = (create_picture(width, 0, "") for width in (300, 4000))
    bottoms = [draw_header(root, header, width) for root, width in ((narrow, 300), (wide, 4000))]
    lines = [t for t in narrow.iter() if t.tag.endswith("text") and t.text and t.text not in ("t", "mesh", "dp 4")]
    assert " ".join(str(t.text) for t in lines) == header.subtitle.strip()
    assert all(text_width(str(t.text), 12) <= 300 - 40 for t in lines)
    assert bottoms[0] == bottoms[1] + 16 * (len(lines) - 1)


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_that_ranks_share_are_not_said_to_be_whole_on_each(zero: int):
    batch, pins = torch.randn(4, 6), Constraints(dp=2, zero=zero)
    plan = partition(nn.Linear(6, 4), Topology.local(2), (batch,), loss=lambda out: out.sum(), constraints=pins)
    text = draw(plan, "graph")
    assert ("gathered whole for use" in text) == (zero == 3)
    assert ("whole on every rank" in text) == (zero != 3)
