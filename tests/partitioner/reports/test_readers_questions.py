"""Questions of a reader to whom the words of a report must give one answer: does it fit, which time is longer, what
does the proof cover, and which advice applies."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from partitioner import Topology, partition
from partitioner.constraints import Constraints
from partitioner.cost import MEMORY_ERRORS
from partitioner.draw import draw
from partitioner.draw.timeline import Bar, draw_timeline
from partitioner.errors import ConstraintError
from partitioner.explain.diff import compare_seconds
from partitioner.explain.explain import format_explanation, format_summary
from partitioner.explain.improvements import list_improvements
from partitioner.explain.memory_texts import is_tight
from partitioner.explain.proof import certificate_text
from partitioner.explain.tables import sharing_text
from partitioner.plan import Baseline, Candidate, Limits, Plan
from partitioner.plans.figures import device_memory
from partitioner.plans.outline import CollectiveTotal
from partitioner.pretrained.configuration import _read_first_sentence
from partitioner.report.page import build_report
from partitioner.runtime.program.instructions import Instruction
from partitioner.units import list_distinct_seconds_texts, seconds_text
from tests.helpers.sample_programs import llama, plan_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llama(pp=4, dp=2, tp=2))


def with_candidates(plan: Plan, *rows: Candidate, **more: Any) -> Plan:
    certificate = plan.certificate.model_copy(update={"candidates": (plan.chosen, *rows), **more})
    return plan.model_copy(update={"certificate": certificate})


def with_memory(plan: Plan, peak: float, **chosen: Any) -> Plan:
    memory = (int(peak), *plan.estimate.memory[1:])
    rows = (plan.chosen.model_copy(update=chosen), *plan.certificate.candidates[1:])
    certificate = plan.certificate.model_copy(update={"candidates": rows})
    estimate = plan.estimate.model_copy(update={"memory": memory})
    return plan.model_copy(update={"estimate": estimate, "certificate": certificate})


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_is_tight_if_the_mean_error_exceeds_the_device(plan: Plan):
    parts = device_memory(plan, 0)
    most = (parts.usable + parts.margin) / (1 + MEMORY_ERRORS["known"][0])
    roomy, tight = with_memory(plan, most * 0.999), with_memory(plan, most * 1.001)
    assert (is_tight(roomy), is_tight(tight)) == (False, True)
    assert not is_tight(with_memory(plan, parts.usable + 1)), "it does not fit, which is told otherwise"
    assert "tight" not in words_of(format_summary(roomy)) + words_of(format_explanation(roomy))
    assert re.search(r"memory .* usable \(\d+%\), tight, rank 0 is the fullest", words_of(format_summary(tight)))
    why = words_of(format_explanation(tight))
    assert "Yes, but tight: the fullest rank (0, on stage 0) needs " in why
    assert "memory_margin=0.07 or more makes the search leave enough room for the mean error" in why


def test_only_what_can_free_memory_is_advised(plan: Plan):
    peak = device_memory(plan, 0).usable
    assert "a higher ZeRO stage (zero)" in words_of(format_explanation(with_memory(plan, peak, zero=1)))
    assert "a higher ZeRO stage" not in words_of(format_explanation(with_memory(plan, peak, zero=3)))
    assert "a smaller microbatch_size" not in words_of(format_explanation(with_memory(plan, peak)))
    assert "a smaller microbatch_size" in words_of(format_explanation(with_memory(plan, peak, microbatch_size=2)))


def test_sharding_is_neither_told_nor_advised_where_no_ranks_have_the_same_states(plan: Plan):
    def advice(plan: Plan) -> str:
        parts = {"compute": 1.0, "optimizer": 0.234}
        told = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"breakdown": parts})})
        return next(text for text in list_improvements(told) if "optimizer update" in text)

    alone = plan_of(llama(pp=4, dp=1, tp=2))
    assert sharing_text(alone) == ""
    assert "sharded over more ranks" not in advice(alone) and "by more devices" in advice(alone)
    assert sharing_text(plan).startswith("ZeRO 0: states are not sharded")
    assert "sharded over more ranks (zero=1): at most 19% less" in advice(plan)


@given(st.floats(1e-9, 1e5), st.floats(1 + 2e-5, 1.1))
def test_different_times_have_different_texts(seconds: float, ratio: float):
    one, other = list_distinct_seconds_texts(seconds, ratio * seconds)
    assert one != other


@given(st.floats(1e-9, 1e5))
def test_equal_times_have_three_digits(seconds: float):
    assert list_distinct_seconds_texts(seconds, seconds) == [seconds_text(seconds)] * 2


def test_a_comparison_has_the_digits_that_it_takes():
    assert compare_seconds(12.744, 12.742) == "12.744 s, <0.1% more than the chosen plan's 12.742 s"
    assert compare_seconds(12.742, 12.742) == "12.7 s, the same as the chosen plan's 12.7 s"
    assert compare_seconds(19.8, 12.742, lower=True) == "19.8 s or more, 55% more than the chosen plan's 12.7 s"


def test_one_mesh_with_two_times_says_why(plan: Plan):
    row = plan.certificate.candidates[1]
    other = Baseline(name="ZeRO-3", candidate=row.model_copy(update={"microbatch_size": 4, "step_time": 1.4}))
    text = words_of(format_explanation(with_candidates(plan, row, baselines=(other,))))
    assert "; the row of this mesh in the table has microbatches of 1 sample and takes 1.5 s" in text
    same = Baseline(name="ZeRO-3", candidate=row)
    assert "the row of this mesh" not in format_explanation(with_candidates(plan, row, baselines=(same,)))


def test_a_reason_with_another_usable_memory_is_explained(plan: Plan):
    short = plan.certificate.candidates[3].model_copy(update={"reason": "only 73.7 GiB are usable on a device"})
    words = "each mesh axis with several ranks adds communication groups"
    assert words in words_of(format_explanation(with_candidates(plan, short)))
    assert words not in words_of(format_explanation(with_candidates(plan)))


def test_transfers_and_buckets_are_told_apart():
    one = CollectiveTotal("reduce_scatter", "dp", "backward", count=64, num_bytes=1, what="gradients", buckets=4)
    assert one.transfers == "64 transfers of 4 buckets"
    often = CollectiveTotal("reduce_scatter", "dp", "backward", count=4, num_bytes=1, what="gradients", buckets=4)
    assert often.transfers == "4 buckets"


def test_the_proof_of_fixed_virtual_stages_names_their_schedules(plan: Plan):
    rows = [
        plan.chosen.model_copy(update={"status": "solved", "schedule": name, "virtual_stages": 8, "step_time": 1.3})
        for name in ("interleaved", "zb-1p")
    ]
    beyond = {"offload": "Offload was not tried."}
    certificate = plan.certificate.model_copy(
        update={"candidates": (rows[0].model_copy(update={"status": "chosen"}), *rows), "beyond": beyond}
    )
    told = plan.model_copy(update={"certificate": certificate, "constraints": Constraints(pp=4, virtual_stages=8)})
    scope = "that the proof covers (schedules interleaved and zb-1p, 8 virtual stages on each rank) takes"
    assert f"with pp=4, virtual_stages=8 {scope}" in certificate_text(told)
    assert "one stage on each rank" not in certificate_text(told)


def test_the_assumption_on_experts_is_told_with_what_the_proof_leaves_out(plan: Plan):
    words = "Experts are assumed to get equally many tokens"
    limits = Limits(calls=8, dims=(), experts=8)
    spread = plan.model_copy(update={"certificate": plan.certificate.model_copy(update={"limits": limits})})
    for text in (format_summary, format_explanation):
        assert words in words_of(text(spread))
        assert words not in words_of(text(plan))


def test_the_table_of_answers_says_once_what_its_bounds_do_not_cover(plan: Plan):
    mesh = plan.chosen.mesh
    rows = [
        plan.certificate.candidates[2].model_copy(update={"mesh": {**mesh, "pp": 2, "tp": tp}, "bound": 1.9 + tp})
        for tp in (1, 4, 8)
    ]
    page = build_report(with_candidates(plan, *rows))
    section = page[page.index('id="why-not"') :]
    section = section[: section.index("</section>")]
    assert section.count("The proof covers the pipeline schedules 1F1B and ZB-1P.") == 1
    assert section.count("covered plans cannot be faster *") >= 3
    unmarked = re.findall(r">([\w=]+)</th><td>cannot be faster<", section)
    assert unmarked == ["schedule=gpipe"], "a question that excludes the schedules that the proof does not cover"


def test_a_bound_below_the_plan_does_not_say_that_nothing_can_be_faster(plan: Plan):
    """One layout of the schedule has a bound above the plan's 1.234 s. Another was tried and takes 1.3 s; its bound of
    1.1 s does not rule out a faster plan. The bound of the schedule is that of both."""
    bounded = plan.certificate.candidates[2].model_copy(update={"schedule": "zb-1p", "bound": 1.25})
    tried = bounded.model_copy(update={"status": "solved", "step_time": 1.3, "bound": 1.1, "virtual_stages": 2})
    answer = with_candidates(plan, bounded, tried.model_copy(update={"beside": True})).why_not(schedule="zb-1p")
    assert (answer.verdict, answer.bound) == ("slower", 1.1)
    assert "A faster one of those that were tried is not ruled out: the lowest bound (" in str(answer)
    proven = with_candidates(plan, bounded, tried.model_copy(update={"bound": 1.3})).why_not(schedule="zb-1p")
    assert proven.verdict == "bounded"
    assert "not ruled out" not in str(proven)


def test_names_that_reports_print_can_be_asked_for(plan: Plan):
    row = plan.chosen.model_copy(
        update={"status": "solved", "schedule": "interleaved", "virtual_stages": 8, "step_time": 1.3, "bound": 1.2}
    )
    told = with_candidates(plan, row)
    assert told.why_not(v=8) == told.why_not(virtual_stages=8)
    assert told.why_not(microbatch=1) == told.why_not(microbatch_size=1)
    with pytest.raises(ConstraintError, match="v and virtual_stages are the same constraint"):
        told.why_not(v=8, virtual_stages=4)


def test_a_message_of_a_library_is_not_cut_inside_a_word():
    first = "We couldn't connect to 'https://huggingface.co' to load the files"
    assert _read_first_sentence(f"{first}.\nCheck your connection at\n'https://huggingface.co/docs'.") == first
    assert _read_first_sentence("word " * 100).endswith("word ...")


def test_virtual_stages_are_drawn_in_rows_that_a_page_can_show():
    """Each rank has eight virtual stages of two layers: at most four of their cards are side by side."""
    model, inputs = nn.Sequential(*(nn.Linear(8, 8) for _ in range(32))), (torch.randn(8, 8),)
    pins = Constraints(pp=2, schedule="interleaved", virtual_stages=8, microbatch_size=2)
    plan = partition(model, Topology.local(2), inputs, loss=lambda out: out.sum(), constraints=pins)
    cards = [e for e in ET.fromstring(draw(plan, "graph")).iter(f"{SVG}rect") if "f-card" in (e.get("class") or "")]
    assert len(cards) >= 16
    assert max(Counter(e.get("y") for e in cards).values()) <= 5  # one more for a card that is level by chance


def test_a_cut_axis_says_how_much_wider_the_update_is_drawn():
    """100 forwards of a second are drawn once, so that the update of 50 s takes nearly all of the width."""
    program = llama(pp=1, dp=1, tp=1)
    bars = [Bar(0, n, n + 1, Instruction(op="F", stage=0, microbatch=n, calls=(0, 4))) for n in range(100)]
    update = Bar(0, 100, 150, Instruction(op="STEP", stage=0))
    said = " ".join(ET.fromstring(draw_timeline("a", program, [*bars, update])).itertext())
    assert re.search(r"So the optimizer's update, 33% of the step, takes 9\d% of the width\.", " ".join(said.split()))
    short = " ".join(
        ET.fromstring(draw_timeline("a", program, [*bars[:4], replace(update, start=4, end=5)])).itertext()
    )
    assert "of the width" not in short
