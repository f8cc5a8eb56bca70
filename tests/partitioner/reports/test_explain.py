"""The texts: every figure that a reader looks for is there, in words, and numbers are readable."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from partitioner import Topology, partition
from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.cost import MEAN_ERRORS, MEMORY_ERRORS
from partitioner.explain.explain import format_explanation, format_summary
from partitioner.explain.kernel_costs import sum_exchange_seconds, with_kernel_seconds
from partitioner.explain.stage_layers import _merge_lines, _name_numbers, _StageLine
from partitioner.explain.tables import build_bar_chart, candidate_counts, describe_outcome, sharing_text
from partitioner.explain.time_parts import format_time_changes
from partitioner.passes.errors import InputsError
from partitioner.plan import Baseline, Candidate, Certificate, Plan, StageEstimate
from partitioner.plans import outline as outline_shared
from partitioner.plans.figures import list_usable_bytes
from partitioner.plans.outline import outline_program
from partitioner.report.page import build_report
from partitioner.runtime.program.program import Program
from partitioner.simulate.program_time import plan_timeline, stage_seconds
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.prepared_model import prepare
from partitioner.topology import loads
from partitioner.units import (
    bytes_text,
    count_text,
    format_digits,
    format_flops,
    format_percent,
    format_plural,
    format_ranges,
    seconds_text,
)
from tests.helpers.sample_programs import llama, plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(llama(pp=4, dp=2, tp=2, tied=True, recompute=True), notes=("dropout is off",))


def line_of(text: str, start: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(start))


def test_the_summary_has_the_figures(plan: Plan):
    text = format_summary(plan)
    words = " ".join(text.split())
    assert line_of(text, "mesh") == "mesh           pp 4 × dp 2 × tp 2 (16 ranks) on 2 x dgx-h100"
    assert line_of(text, "microbatches").endswith("8 of 1 sample, global batch 16")
    assert line_of(text, "step time").endswith("1.23 s")
    assert line_of(text, "memory").endswith("61 GiB of 72.4 GiB usable (84%), rank 0 is the fullest")
    assert "tp divides 99% of the FLOPs of matrix products; every rank computes the rest" in line_of(
        text, "work divided"
    )
    assert (
        "gap 2.8% under the cost model: this plan takes 1.23 s, a plan that the proof covers takes 1.2 s or more"
        in words
    )
    assert (
        "4 layouts: 1 chosen; 1 tried and slower; 1 ruled out by a lower bound on its time; 1 does not fit in memory"
        in words
    )
    assert "The proof covers the pipeline schedules 1F1B and ZB-1P. Wider tp was not tried." in words
    assert line_of(text, "bandwidth").endswith("nvlink4 450 GB/s, ib-ndr 50 GB/s per device and direction")
    assert line_of(text, "of which").endswith("computation 71%, exposed communication 18%, pipeline bubble 11%")
    assert line_of(text, "aten.sort.stable").endswith("0.4%")
    assert "- dropout is off" in text


def test_the_summary_has_a_row_for_every_stage(plan: Plan):
    row = line_of(format_summary(plan), "2   8–11").split()
    assert row[:4] == ["2", "8–11", "RotaryEmbedding,", "8"]
    assert " ".join(row).find("1.21 B 1.13 GiB 55 GiB (76%)") > 0


def test_texts_are_plain_and_fit_their_width(plan: Plan):
    for text in (format_summary(plan), format_explanation(plan)):
        assert "\x1b" not in text
        assert all(line == line.rstrip() and len(line) <= 110 for line in text.splitlines())


def test_the_explanation_answers_its_questions(plan: Plan):
    text = " ".join(format_explanation(plan).split())
    assert (
        "Yes: the fullest rank (0, on stage 0) needs 61 GiB of 72.4 GiB usable (84%); 11.4 GiB of these are left."
        in text
    )
    assert "One step takes 1.23 s on the slowest rank, at 43% of the devices' peak" in text
    assert "column-parallel (S0): self_attn.q_proj, mlp.up_proj" in text
    assert "row-parallel (S1): self_attn.o_proj, mlp.down_proj" in text
    assert "vocabulary-parallel (S0)" in text
    assert "8 × DecoderLayer (model.layers.8–15; all recomputed in backward)" in text
    assert "stages 0→1, 1→2, 2→3: 16 MiB of activations per microbatch" in text
    assert "of the tied weight model.embed_tokens.weight = lm_head.weight" in text


def test_the_links_of_each_axis_are_named(plan: Plan):
    links = "tp inside a node (nvlink4), dp inside a node (nvlink4), pp over nvlink4 and ib-ndr (2 nodes)"
    assert f"links: {links}" in format_explanation(plan)
    assert f"links {links}" in " ".join(format_summary(plan).split())
    one = plan_of(llama(pp=1, dp=1, tp=1, layers=1))
    assert "  links: " not in format_explanation(one)


def test_the_dearest_operators_are_named_where_little_of_the_peak_is_reached(plan: Plan):
    def text(mfu: float) -> str:
        estimate = plan.estimate.model_copy(update={"mfu": mfu})
        told = with_kernel_seconds(plan.model_copy(update={"estimate": estimate}))
        return " ".join(format_explanation(told).split())

    assert re.search(r"Most of a microbatch's computation is in matrix products \(\d+%\), ", text(0.1))
    assert "Most of a microbatch" not in text(0.5)


@pytest.mark.parametrize(
    ("machine", "precision", "told"),
    [("dgx-v100", "bf16", True), ("dgx-v100", "fp16", False), ("dgx-h100", "bf16", False)],
)
def test_a_much_faster_type_of_as_many_bits_is_told(machine: str, precision: str, told: bool):
    with torch.device("meta"):
        model, x = nn.Linear(64, 64), torch.empty(64, 64)
    pins, loss = Constraints(dp=8), lambda out: out.sum()
    plan = partition(model, Topology.preset(machine), (x,), loss=loss, precision=precision, constraints=pins)
    for text in (format_explanation(plan), format_summary(plan)):
        words = (
            'v100-32gb multiplies 8 times as fast in fp16 as in bf16: plan with precision="fp16", with losses scaled'
        )
        assert (words in " ".join(text.split())) == told


def test_transfers_of_every_microbatch_are_not_said_to_be_once_per_step():
    model, inputs = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(16, 64),)
    for size, words in ((2, "in 16 transfers of 4 buckets, in all per step"), (8, "bucket, once per step")):
        pins = Constraints(dp=2, zero=3 if size == 2 else 0, microbatch_size=size)
        plan = partition(model, Topology.local(2), inputs, loss=lambda out: out.sum(), constraints=pins)
        text = " ".join(format_explanation(plan).split())
        assert words in text
        assert ("once per step" in text) == (size == 8)


def test_distinct_transfers_of_buckets_are_read_once_each(monkeypatch: pytest.MonkeyPatch):
    """Under ZeRO-3 every microbatch repeats the same gathers and scatters. With 64 microbatches as few of them are
    looked at as with 8, a gather and a scatter for each bucket at most; the totals are the sums over the whole list."""
    seen, exchanged = [], outline_shared.describe_bucket_exchange
    monkeypatch.setattr(
        outline_shared, "describe_bucket_exchange", lambda *given: seen.append(given) or exchanged(*given)
    )
    for count in (8, 64):
        program = zero_program(count)
        seen.clear()
        stage = program.stages[0]
        totals = outline_shared.exchange_totals(program, stage)
        assert len(seen) <= 2 * len(stage.buckets)
        transfers, num_bytes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for i in (i for i in stage.instructions if i.op in outline_shared.BUCKET_OPS):
            kind, size = exchanged(program, stage.buckets[i.bucket or 0], i.op, i.axes)
            transfers[kind] += 1
            num_bytes[kind] += size
        assert totals.keys() == {("all_gather", "dp", "parameters"), ("reduce_scatter", "dp", "gradients")}
        assert {kind: total.transfers for kind, total in totals.items()} == transfers
        assert {kind: total.num_bytes for kind, total in totals.items()} == num_bytes
        assert min(transfers.values()) >= count
        assert {total.buckets for total in totals.values()} == {len(stage.buckets)}


def zero_program(num_microbatches: int) -> Program:
    """A model of four layers on two ranks that share its parameters."""
    model, size = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), 2 * num_microbatches
    pins = Constraints(dp=2, zero=3, microbatch_size=1)
    inputs = (torch.randn(size, 64),)
    return partition(model, Topology.local(2), inputs, loss=lambda out: out.sum(), constraints=pins).program


@pytest.mark.parametrize("width", [80, 110])
def test_bars_never_cut_values_off(width: int):
    name = "weights while they are gathered, gradients while they are scattered"
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(build_bar_chart([(name, 1.0, "28.9 GiB"), ("gradients", 0.0, "1,023 MiB")]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "28.9 GiB" in shown
    assert "1,023 MiB" in shown
    assert "…" not in shown
    assert all(word in shown for word in name.split())


def test_the_chosen_candidates_memory_is_the_plans(plan: Plan):
    peaks = tuple(peak + 2**20 for peak in plan.estimate.memory)
    told = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"memory": peaks})})
    (row,) = [line for line in format_explanation(told).splitlines() if line.rstrip().endswith("chosen")]
    assert bytes_text(max(peaks)) in row


def test_what_is_set_to_be_left_free_is_not_called_fixed(plan: Plan):
    free = plan.model_copy(update={"constraints": Constraints(pp=None)})
    assert "Constraints that you gave" not in free.explain()
    some = plan.model_copy(update={"constraints": Constraints(pp=None, tp=2)})
    assert "Constraints that you gave: tp=2." in some.explain()


def test_the_explanation_says_why_the_baselines_lost(plan: Plan):
    text = " ".join(format_explanation(plan).split())
    short = "does not fit in memory without offload to host memory (stage 0 lacks 43 GiB)"
    assert f"Plain data parallelism (dp 16, microbatch of 1 sample): {short}" in text
    fixed = " ".join(format_explanation(plan.model_copy(update={"constraints": Constraints(offload=())})).split())
    assert "(dp 16, microbatch of 1 sample): does not fit in memory (stage 0 lacks 43 GiB)" in fixed
    assert "(dp 2 × tp 8, microbatch of 1 sample): takes 1.5 s, 22% more; excluded by the constraints" in text


def test_a_plan_that_does_not_fit_says_by_how_much(plan: Plan):
    full = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"memory": (90 * 2**30,) * 16})})
    text = " ".join(format_explanation(full).split())
    assert "No: the fullest rank (0, on stage 0) needs 90 GiB of 72.4 GiB usable (124%): 17.6 GiB too much." in text


def test_all_reports_compare_with_the_usable_memory(plan: Plan):
    """Of 85,520,809,984 bytes of a device, 79.65 GiB, 1.5e9 are reserved (1.4 GiB), 3 × 690e6 are for the groups along
    tp, dp and pp (1.93 GiB), and 5 % of the 84,020,809,984 not reserved are the margin (3.91 GiB): 77,749,769,484
    bytes, 72.41 GiB, are usable. 61 GiB are 84 % of these, 55 GiB of stage 2 are 76 %."""
    told = "79.6 GiB of the device, less 1.4 GiB reserved, 1.93 GiB for communication groups and 3.91 GiB of margin"
    summary, why = (" ".join(text.split()) for text in (plan.summary(), plan.explain()))
    told += " (memory_margin 5%)"
    assert f"usable memory {told}" in summary
    assert f"Usable are {told}. The margin is for fragmentation and small errors of the estimate." in why
    assert "Memory does not limit the plan." in why
    assert "55 GiB (76%)" in summary
    assert list_usable_bytes(plan) == (77_749_769_484,) * 16
    whole = plan.model_copy(update={"constraints": Constraints(memory_margin=0)})
    told = "less 1.4 GiB reserved and 1.93 GiB for communication groups; no margin was asked for"
    assert told in " ".join(whole.summary().split())


def test_what_takes_a_part_of_the_margin_says_so(plan: Plan):
    """73 GiB are 604 MiB more than the usable 77,749,769,484 bytes (72.41 GiB), and the margin is 3.91 GiB. Without a
    margin 76.32 GiB are usable, 77 GiB are 694 MiB more."""
    estimate = plan.estimate.model_copy(update={"memory": (73 * 2**30,) * 16})
    text = " ".join(format_explanation(plan.model_copy(update={"estimate": estimate})).split())
    assert "Hardly: the fullest rank (0, on stage 0) needs 73 GiB of 72.4 GiB usable (101%): 604 MiB too much, " in text
    assert "which the margin of 3.91 GiB covers; nothing that needs less was found." in text
    above = plan.model_copy(update={"estimate": estimate})
    told = "does not fit, 604 MiB more than usable (101%), which the margin covers"
    assert above.summary().splitlines()[0].endswith(f": {told}")
    assert "does not fit" not in plan.summary().splitlines()[0]
    update = {
        "estimate": plan.estimate.model_copy(update={"memory": (77 * 2**30,) * 16}),
        "constraints": Constraints(memory_margin=0),
    }
    assert plan.model_copy(update=update).summary().splitlines()[0].endswith("694 MiB more than usable (101%)")
    text = " ".join(format_explanation(plan.model_copy(update=update)).split())
    assert "needs 77 GiB of 76.3 GiB usable (101%): 694 MiB too much; nothing that needs less was found." in text


@pytest.mark.parametrize(("cut_off", "ended"), [("time limit", "its time limit"), ("interruption", "an interruption")])
def test_what_a_search_left_when_it_was_cut_off_is_not_called_slower(plan: Plan, cut_off: str, ended: str):
    chosen, solved, bounded, short = plan.certificate.candidates
    rows = (chosen, solved, bounded, bounded.model_copy(update={"bound": 1.21}), short)
    update = {"candidates": rows, "cut_off": cut_off, "left": {"open": 2, "bounded": 3}}
    early = plan.model_copy(update={"certificate": plan.certificate.model_copy(update=update)})
    counts = (
        "10 layouts: 1 chosen; 1 tried and slower; 3 not tried, may be faster; 4 ruled out by lower bounds on their "
        "time; 1 does not fit in memory"
    )
    assert counts in " ".join(format_summary(early).split())
    assert line_of(format_summary(early), "search").endswith(f"cut off by {ended}")
    text = format_explanation(early)
    assert f"The search was cut off by {ended}: with more time it may find a better plan." in text
    words = [line.split()[-3:] for line in text.splitlines() if "gpipe" in line]
    assert words == [["may", "be", "faster"], ["by", "a", "bound"]]
    assert describe_outcome(rows[3], 1.234) == "was not tried; it takes 1.21 s or more, so it may be faster"
    answer = early.why_not(tp=8, dp=1)
    assert answer.verdict == "unknown"
    assert f"1 of these may be faster: the search was cut off by {ended}." in str(answer)


def test_what_may_be_faster_by_its_bound_is_not_called_slower_without_a_limit_either(plan: Plan):
    rows = (plan.chosen, plan.certificate.candidates[2].model_copy(update={"bound": 1.2}))
    gap = plan.model_copy(update={"certificate": plan.certificate.model_copy(update={"candidates": rows})})
    assert "search " not in format_summary(gap)
    text = " ".join(format_explanation(gap).split())
    assert "2 layouts: 1 chosen; 1 not tried, may be faster." in text
    assert "1 layout was not tried and may be faster, by 2.8% at most." in text


def test_a_proven_optimum_says_so(plan: Plan):
    certificate = plan.certificate.model_copy(update={"gap": 0.0, "bound": plan.certificate.objective})
    proven = plan.model_copy(update={"certificate": certificate})
    covered = "proven fastest of the plans that the proof covers (one stage on each rank: 1F1B, ZB-1P): none takes less"
    summary, why = (" ".join(text(proven).split()) for text in (format_summary, format_explanation))
    assert f"{covered} than 1.23 s under the cost model" in summary
    assert f"It is {covered} under the cost model." in why
    assert "Layouts with several stages on a rank may be faster. None was tried." in why
    assert "proven optimal" not in summary + why
    searched = proven.model_copy(update={"certificate": certificate.model_copy(update={"beyond": {}})})
    assert line_of(format_summary(searched), "certificate").endswith(
        "proven optimal, fastest of all plans: none takes less than 1.23 s under the cost model"
    )
    assert "not covered" not in format_summary(searched)


def test_one_rank_needs_no_words_on_stages():
    text = format_explanation(plan_of(llama(pp=1, dp=1, tp=1, layers=2)))
    assert "the one rank needs" in text
    assert "→" not in text


def test_stage_times_are_the_simulators(plan: Plan):
    timeline = plan_timeline(plan)
    for stage, seconds in zip(timeline.stages, stage_seconds(plan), strict=True):
        assert seconds.forward + seconds.backward == pytest.approx(stage.busy)


def test_parameters_are_counted_once_and_by_rank(plan: Plan):
    whole = outline_program(plan.program)
    first = whole.stages[0]
    assert first.num_parameters == 1_733_361_664
    assert first.parameter_bytes == pytest.approx(2 * first.num_parameters / 2, rel=1e-3)  # bf16, half on each rank
    tied = 128_256 * 4096
    assert whole.num_parameters == sum(s.num_parameters for s in whole.stages) - tied


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1023), "0.999 KiB"),
        (bytes_text(16 * 2**20), "16 MiB"),
        (bytes_text(1.5 * 2**40), "1.5 TiB"),
        (seconds_text(0.01234), "12.3 ms"),
        (seconds_text(0.9999), "1 s"),
        (seconds_text(3e-7), "300 ns"),
        (count_text(8_030_261_248), "8.03 B"),
        (count_text(4112), "4,112"),
        (format_flops(142e9), "142 G"),
        (format_percent(0.0276), "2.8%"),
        (format_percent(0.5), "50%"),
        (format_ranges([0, 1, 2, 5, 7, 8]), "0–2, 5, 7–8"),
        (format_plural(1, "rank"), "1 rank"),
        (format_plural(2, "microbatch", "microbatches"), "2 microbatches"),
    ],
)
def test_numbers_as_people_read_them(shown: str, expected: str):
    assert shown == expected


@given(st.floats(1e-6, 1e9))
def test_three_digits_are_close_enough(value: float):
    assert float(format_digits(value).replace(",", "")) == pytest.approx(value, rel=0.006)


def test_what_is_excluded_is_not_said_to_lack_memory():
    one: dict[str, Any] = {"mesh": {"dp": 4}, "microbatch_size": 1, "schedule": "1f1b", "status": "infeasible"}
    excluded = Candidate(**one, reason="excluded by the constraints")
    assert describe_outcome(excluded, 1.0) == "not possible (excluded by the constraints)"
    assert (
        describe_outcome(Candidate(**one, missing=1, reason="stage 0 lacks 1 B"), 1.0)
        == "does not fit in memory (stage 0 lacks 1 B)"
    )
    certificate = Certificate(objective=1.0, bound=1.0, gap=0.0, candidates=(excluded,), left={"infeasible": 2})
    assert candidate_counts(certificate) == "3 layouts: 2 do not fit in memory; 1 not possible"


def test_what_takes_as_long_is_not_called_slower():
    one: dict[str, Any] = {"mesh": {"dp": 4}, "microbatch_size": 1, "schedule": "1f1b"}
    rows = [Candidate(**one, zero=z, status=s, step_time=t) for z, s, t in ((1, "chosen", 1.0), (2, "solved", 1.0))]
    slower = Candidate(**one, status="solved", step_time=1.1)
    certificate = Certificate(objective=1.0, bound=1.0, gap=0.0, candidates=(*rows, slower))
    assert candidate_counts(certificate) == "3 layouts: 1 chosen; 1 as fast as the chosen one; 1 tried and slower"


def test_what_limits_the_step_is_told_with_the_largest_first(plan: Plan):
    parts = {"compute": 0.45, "bubble": 0.35, "reduction": 0.2}
    estimate = plan.estimate.model_copy(update={"breakdown": parts})
    text = " ".join(format_explanation(plan.model_copy(update={"estimate": estimate})).split())
    assert "(MFU). The largest part of it is computation: computation 450 ms 45%" in text


def test_a_precision_that_there_is_not_is_refused_before_anything_is_traced():
    with pytest.raises(InputsError, match=r"one of bf16, fp16, fp32, fp64, tf32, fp8, nvfp4 or None; got 'int8'"):
        prepare(nn.Linear(2, 2), (torch.ones(2, 2),), precision="int8")


class Mixture(nn.Module):
    """Four experts, of which every token goes to the best one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 16 * width))
        self.down = nn.Parameter(torch.randn(4, 16 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1)
        order = chosen.argsort()
        rows, expert = flat[order], chosen[order]
        made = torch.bmm(torch.bmm(rows[:, None], self.up[expert]).relu(), self.down[expert]).squeeze(1)
        return torch.zeros_like(flat).index_add(0, order, made).square().mean()


def explained(**pins: int) -> str:
    with torch.device("meta"):
        model, x = Mixture(), torch.empty(8, 16, 64)
    plan = partition(model, Topology.preset("dgx-h100"), (x,), constraints=Constraints(dp=8, **pins))
    return " ".join(format_explanation(plan).split())


def test_the_explanation_says_how_experts_are_spread():
    text = explained()
    held = re.search(
        r"How are the experts spread\? Each rank holds (\d) of 4 experts of a layer. Tokens are sent", text
    )
    assert held is not None
    ranks = 4 // int(held[1])
    assert f"{ranks} ranks on 1 node. All experts together have 2 MiB of parameters." in text
    assert "Without expert parallelism (ep 1) the best plan found is dp 8" in text
    assert re.search(r"With ep \d ", text)


def test_nothing_is_compared_where_experts_are_spread_as_asked_or_not_at_all():
    text = explained(ep=2)
    assert "Each rank holds 2 of 4 experts of a layer" in text
    assert "Without expert parallelism" not in text
    alone = explained(ep=1)
    assert "How are the experts spread?" not in alone
    assert ("all experts get equally many tokens" in text, "all experts get" in alone) == (True, False)


@pytest.mark.parametrize(
    ("pins", "said", "ranks"),  # of those that share the states of experts
    [
        ({"ep": 2}, "over 8 ranks of dp; those of experts over 4 ranks with the same experts", 4),
        ({"ep": 4}, "over 8 ranks of dp; those of experts over 2 ranks with the same experts", 2),
        (
            {"ep": 2, "dp_shard": 4},
            "over 4 ranks of dp, in 2 replicas; those of experts over 2 ranks with the same experts, in 2 replicas",
            2,
        ),
        ({"ep": 4, "dp_shard": 2}, "over 2 ranks of dp, in 4 replicas; those of experts are not sharded", 1),
        ({"ep": 1}, "over 8 ranks of dp", 8),
    ],
)
def test_the_states_of_experts_are_shared_by_fewer_ranks(pins: dict[str, int], said: str, ranks: int):
    """Of 8 ranks that are spread over ep, 8 / ep have the same experts, and only these can share their states. Of
    dp_shard neighbouring ranks dp_shard / ep have the same ones. The program shards over as many ranks."""
    with torch.device("meta"):
        model, x = Mixture(), torch.empty(8, 16, 64)
    plan = partition(model, Topology.preset("dgx-h100"), (x,), constraints=Constraints(dp=8, zero=1, **pins))
    assert sharing_text(plan) == f"ZeRO 1: optimizer states {said}"
    program = plan.program
    assert math.prod(program.size(axis) for axis in program.states["up"].zero_axes) == ranks


def test_experts_that_no_other_rank_has_are_not_sharded():
    """With as many ranks as experts, 4, each rank has one expert of its own."""
    with torch.device("meta"):
        model, x = Mixture(), torch.empty(8, 16, 64)
    plan = partition(model, Topology.local(4), (x,), constraints=Constraints(dp=4, ep=4, zero=1))
    words = "over 4 ranks of dp; those of experts are not sharded, as no other rank has the same experts"
    assert sharing_text(plan) == f"ZeRO 1: optimizer states {words}"


def test_an_interruption_leaves_the_plan_that_was_found(monkeypatch: pytest.MonkeyPatch):
    """While schedules of several virtual stages are tried, there is one already."""
    solve = CandidateEvaluator.solve

    def interrupted(self: CandidateEvaluator, point: MeshCandidate, *args: Any, **named: Any) -> Any:
        if point.virtual_stages > 1:
            raise KeyboardInterrupt
        return solve(self, point, *args, **named)

    monkeypatch.setattr(CandidateEvaluator, "solve", interrupted)
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.empty(8, 512)
    plan = partition(model, Topology.local(2), (x,), loss=lambda y: y.sum(), constraints=Constraints(pp=2))
    assert plan.certificate.cut_off == "interruption"
    assert plan.prove()


def test_the_parts_of_the_step_in_which_a_baseline_differs_are_named(plan: Plan):
    """The plan computes 870 ms, communicates 190 ms inside layers and 36 ms between stages, and waits 138 ms. The other
    layout computes 900 ms, recomputes 250 ms, communicates 350 ms inside layers and never waits: the three largest
    differences are 250, 160 and -138 ms. The rest is 30 - 36 ms: together they are 1.5 s less 1.234 s."""
    chosen, solved = plan.certificate.candidates[:2]
    parts = {"compute": 0.9, "recompute": 0.25, "tp_communication": 0.35}
    baseline = Baseline(name="Megatron's layout", candidate=solved.model_copy(update={"breakdown": parts}))
    own = Baseline(name="ZeRO-3", candidate=chosen.model_copy(update={"breakdown": parts}))
    certificate = plan.certificate.model_copy(update={"baselines": (baseline, own)})
    text = " ".join(format_explanation(plan.model_copy(update={"certificate": certificate})).split())
    differences = "recomputation +250 ms, communication inside layers +160 ms, pipeline bubble −138 ms, the rest −6 ms"
    assert f"Megatron's layout (dp 2 × tp 8, microbatch of 1 sample): takes 1.5 s, 22% more ({differences})" in text
    assert "ZeRO-3 (pp 4 × dp 2 × tp 2, microbatch of 1 sample): this is the plan" in text
    assert "Megatron's layout is the best layout found of the kind that users of Megatron-LM choose: tp inside" in text


def test_standard_layouts_outside_of_the_table_are_named(plan: Plan):
    """The table has the layout of one baseline. The other was tried in addition, as ZeRO-3 beside a plan that is
    ZeRO-3, too."""
    chosen, solved = plan.certificate.candidates[:2]
    outside = solved.model_copy(update={"zero": 3})
    baselines = (Baseline(name="Megatron's layout", candidate=solved), Baseline(name="ZeRO-3", candidate=outside))
    rows = (chosen.model_copy(update={"zero": 3}), solved)
    certificate = plan.certificate.model_copy(update={"baselines": baselines, "candidates": rows})
    text = " ".join(format_explanation(plan.model_copy(update={"certificate": certificate})).split())
    assert "Planned only for this comparison, not counted and not in the table: ZeRO-3." in text
    assert text.count("the plan is ZeRO-3, too, on another mesh") == 1


def test_the_slowest_stage_and_the_peak_rate_are_named(plan: Plan):
    """Stage 1 is busy for 3 s, stage 0 for 2.5 s. An H100 multiplies 989 TFLOP/s in bf16."""
    one = StageEstimate(
        first="a", last="b", num_calls=1, recomputed=0, forward_s=1.0, backward_s=1.5, memory={"saved": 2**30}
    )
    stages = (one, one.model_copy(update={"backward_s": 2.0}), one, one)
    told = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"stages": stages})})
    text = " ".join(format_explanation(told).split())
    assert "on the slowest rank (on stage 1), at" in text
    assert "The peak of rank 0 (stage 0) consists of:" in text
    assert "43% of the devices' peak of 989 TFLOP/s (MFU)." in text


@pytest.mark.parametrize(
    ("pins", "purposes", "within"),
    [
        ({"dp": 4, "tp": 2, "ep": 1}, {"tensor parallelism (tp"}, 0.02),
        ({"dp": 4, "tp": 2, "ep": 4}, {"tensor parallelism (tp", "expert parallelism (ep"}, 0.1),
    ],
)
def test_communication_inside_layers_is_split_by_axis(pins: dict[str, int], purposes: set[str], within: float):
    """Nothing is hidden here, so the parts add up to what the step communicates inside layers. The search prices the
    exchange of tokens before the program is written, so that the sums differ a little over ep."""
    with torch.device("meta"):
        model, x = Mixture(), torch.empty(8, 16, 64)
    plan = partition(model, Topology.preset("dgx-h100"), (x,), constraints=Constraints(**pins))
    seconds = sum_exchange_seconds(plan)
    assert {purpose.rstrip(")") for purpose in seconds} == purposes
    assert sum(seconds.values()) == pytest.approx(plan.estimate.breakdown["tp_communication"], rel=within)
    text, parts = " ".join(plan.explain().split()), plan.estimate.breakdown
    much = parts["tp_communication"] > 0.1 * sum(parts.values())
    assert plan.estimate.exchanges == (seconds if much else {})
    assert ("Communication inside layers: " in text) == much


def test_the_rest_of_a_difference_is_smaller_than_what_is_named():
    """Three kinds are named, and a fourth, because the rest of 80 + 70 ms would be more than the 90 ms of the third."""
    old = {"compute": 1.0, "recompute": 0.0, "bubble": 0.0, "reduction": 0.0, "optimizer": 0.0}
    new = {"compute": 1.3, "recompute": 0.1, "bubble": 0.09, "reduction": 0.08, "optimizer": 0.07}
    assert format_time_changes(old, new) == (
        "computation +300 ms, recomputation +100 ms, pipeline bubble +90 ms, exposed gradient reduction +80 ms, "
        "the rest +70 ms"
    )


def test_equal_parts_of_the_step_are_no_difference():
    """A thousandth of a step of 2 s is 2 ms: 1 ms is not told, 3 ms are, and then what is left of the difference."""
    old = {"compute": 1.5, "bubble": 0.5}
    assert format_time_changes(old, {"compute": 1.501, "bubble": 0.499}) == ""
    assert format_time_changes(old, {"compute": 1.503, "bubble": 0.499}) == "computation +3 ms, the rest −1 ms"


def test_what_is_proven_of_a_schedule_that_the_proof_does_not_cover(plan: Plan):
    """A plan of 1.234 s under ZB-V. Its own layout takes 1.2 s or more: 1 - 1.2 / 1.234 = 2.8 % less. Plans under
    covered schedules take 1.3 s or more, so none of these is faster; at 1.22 s one may be by 1.1 %."""
    zb_v = plan.chosen.model_copy(update={"schedule": "zb-v", "virtual_stages": 2})
    assert plan.written is not None
    written = plan.written.model_copy(update={"schedule": "zb-v"})

    def texts(covered_bound: float) -> list[str]:
        rows = (zb_v, *plan.certificate.candidates[1:])
        certificate = plan.certificate.model_copy(update={"covered_bound": covered_bound, "candidates": rows})
        told = plan.model_copy(update={"certificate": certificate, "written": written})
        return [" ".join(text(told).split()) for text in (format_summary, format_explanation)]

    summary, why = texts(1.3)
    assert (
        "certificate not proven optimal: the proof does not cover its schedule (zb-v, 2 virtual stages on each rank). "
        "Under the cost model this plan takes 1.23 s; lower bounds are 1.2 s for its own layout (gap 2.8%) and 1.3 s "
        "for all plans that the proof covers"
    ) in summary
    covered = "Bound for all plans that the proof covers:"
    assert "the proof does not cover its schedule (zb-v, 2 virtual stages on each rank)." in why
    assert f"{covered} 1.3 s, so no covered plan is faster." in why
    own = "Bound for this plan's own layout (pp 4 × dp 2 × tp 2, v 2, zb-v): 1.2 s, so no plan of it is faster"
    assert f"{own} by more than 2.8%." in why
    assert "Other layouts with several stages on a rank may be faster." in why
    assert f"{covered} 1.22 s, so no covered plan is faster by more than 1.1%." in texts(1.22)[1]


def test_the_error_of_the_cost_model_is_that_of_the_docs(plan: Plan):
    """The two tables of docs/accuracy.md end with a row of means: known runs first, then unseen ones."""
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text()
    rows = re.findall(r"\*\*mean over families\*\* \| ([\d,]+) of [\d,]+ \| \*\*([\d.]+) %\*\*", page)
    means = [(float(error), int(runs.replace(",", ""))) for runs, error in rows]
    assert means == [(pytest.approx(100 * error), runs) for error, runs in MEAN_ERRORS.values()]
    text = " ".join(format_explanation(plan).split())
    assert f"off by {rows[0][1]}% on average in {rows[0][0]} measured runs" in text


def test_the_error_of_the_memory_is_that_of_the_docs(plan: Plan):
    """The last columns of both tables are the errors of memory; the text around them has the numbers of rows."""
    text = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| **mean over families**")]
    means, page = [float(re.findall(r"([\d.]+) %", row)[-1]) for row in rows], " ".join(text.split())
    known, unseen = MEMORY_ERRORS["known"], MEMORY_ERRORS["unseen"]
    assert means == [pytest.approx(100 * known[0]), pytest.approx(100 * unseen[0])]
    assert f"over the {known[1]} rows that report memory" in page
    assert f"({unseen[1]} of the predicted rows report it)" in page
    why = " ".join(format_explanation(plan).split())
    assert f"off by 7.5% on average in {known[1]} published runs of other frameworks" in why


def test_a_rival_that_the_proof_does_not_cover_is_named(plan: Plan):
    """The plan is the fastest of the covered ones. A layout under an interleaved schedule takes 1.25 s; its bound of
    0.9 s is below the plan's 1.234 s. One with a bound above that is no rival."""
    rival = plan.certificate.candidates[1].model_copy(
        update={"schedule": "interleaved", "virtual_stages": 4, "bound": 0.9, "step_time": 1.25}
    )

    def texts(rows: tuple[Candidate, ...]) -> list[str]:
        certificate = plan.certificate.model_copy(update={"gap": 0.0, "bound": 1.234, "candidates": rows})
        told = plan.model_copy(update={"certificate": certificate})
        return [" ".join(text(told).split()) for text in (format_summary, format_explanation)]

    summary, why = texts((plan.chosen, rival))
    lowest = (
        "Of all layouts that were tried, the lowest bound is 900 ms, 27% less than this plan takes: dp 2 × tp 8, v 4 "
        "(interleaved), which the proof does not cover; the best plan found for it takes 1.25 s"
    )
    assert lowest in summary and lowest in why
    assert (
        "- Another plan of the layout dp 2 × tp 8, v 4 (interleaved), which the proof does not cover: at most 27%"
        in why
    )
    assert "1 such layout on 1 mesh was tried." in why
    higher = rival.model_copy(update={"virtual_stages": 2, "bound": 0.95, "step_time": 1.24})
    best = (
        "The best one found is dp 2 × tp 8, v 2 (interleaved). It takes 1.24 s, and the bound for its layout is 950 ms."
    )
    assert best in texts((plan.chosen, rival, higher))[1]
    assert "tried: slower *" in why
    assert "chosen *" not in why
    assert "the lowest bound is" not in texts((plan.chosen, rival.model_copy(update={"bound": 1.24})))[0]


def test_a_search_says_what_it_proves_of_its_schedule():
    """Here two virtual stages win. The covered bound is that of plans with one stage on each rank, of which none takes
    less. The bound is the least of it and of the chosen layout's own."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.empty(8, 512)
    pins = Constraints(pp=2)
    plan = partition(model, Topology.local(2), (x,), loss=lambda y: y.sum(), constraints=pins)
    certificate = plan.certificate
    assert plan.chosen.virtual_stages > 1
    assert certificate.covered_bound is not None
    assert certificate.bound == pytest.approx(min(certificate.covered_bound, plan.chosen.bound))
    single = [c.step_time for c in certificate.candidates if c.virtual_stages == 1 and c.step_time is not None]
    assert certificate.covered_bound <= min(single)
    fixed = partition(model, Topology.local(2), (x,), loss=lambda y: y.sum(), constraints=Constraints(pp=1))
    assert fixed.certificate.covered_bound is None


def test_bounds_of_layouts_say_what_they_do_not_cover(plan: Plan):
    """A layout that was only bounded may have several stages on a rank, which its bound does not cover."""
    words = "The proof covers the pipeline schedules 1F1B and ZB-1P."
    row = plan.certificate.candidates[2].model_copy(update={"mesh": {"pp": 2, "dp": 1, "cp": 1, "tp": 8, "ep": 1}})
    certificate = plan.certificate.model_copy(update={"candidates": (plan.chosen, row)})
    told = plan.model_copy(update={"certificate": certificate})
    answer = told.why_not(pp=2)
    assert answer.lines[0].startswith("Every plan with pp=2 that the proof covers takes 1.9 s or more")
    assert answer.uncovered == words and words in str(answer)
    assert words not in str(told.why_not(pp=2, schedule="gpipe"))


def test_a_layout_that_was_tried_counts_with_its_bound(plan: Plan):
    """One layout with pp=2 was tried and takes 1.8 s, but other placements of it only take 1.1 s or more. Another one
    takes 1.5 s or more. So 1.1 s is the bound of both, and neither answer may say more."""
    mesh = {"pp": 2, "dp": 1, "cp": 1, "tp": 8, "ep": 1}
    row = plan.certificate.candidates[2].model_copy(update={"mesh": mesh})
    tried = row.model_copy(update={"status": "solved", "step_time": 1.8, "bound": 1.1, "microbatch_size": 2})

    def ask(*rows: Candidate) -> list[str]:
        certificate = plan.certificate.model_copy(update={"candidates": (plan.chosen, *rows), "baselines": ()})
        return list(plan.model_copy(update={"certificate": certificate}).why_not(pp=2).lines)

    assert ask(row.model_copy(update={"bound": 1.5}), tried)[0].startswith(
        "Every plan with pp=2 that the proof covers takes 1.1 s or more"
    )
    alone = ask(tried)
    assert alone[0].startswith("The best plan found with pp=2")
    assert any(
        line.startswith("A faster one is not ruled out: the lower bound of these plans is 1.1 s") for line in alone
    )
    proven = ask(tried.model_copy(update={"bound": 1.8}))
    assert proven[0].startswith("The best plan with pp=2")
    assert not any("not ruled out" in line for line in proven)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"pp": 2, "dp": 2}, "stage 0 on h100-sxm; stage 1 on a100-80gb"),
        ({"pp": 1, "dp": 4}, "ranks 0–1 on h100-sxm; ranks 2–3 on a100-80gb"),
    ],
)
def test_different_devices_are_named_with_their_stages(pins: dict[str, int], words: str):
    nodes = [{"type": kind, "devices": 2, "count": 1} for kind in ("h100-sxm", "a100-80gb")]
    levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
    topology = loads(json.dumps({"nodes": nodes, "levels": levels}))
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.empty(8, 64)
    fixed = Constraints(**pins, placement="in_order")
    plan = partition(model, topology, (x,), loss=lambda y: y.sum(), constraints=fixed)
    assert f"devices {words}" in " ".join(format_summary(plan).split())
    assert f"devices: {words}" in " ".join(format_explanation(plan).split())


def test_answers_know_the_baselines_that_were_tried(plan: Plan):
    """The best of ZeRO-3 is a baseline of 1.4 s, and its row only a bound of 1.3 s: the answer is from both."""
    row = plan.certificate.candidates[1].model_copy(
        update={"zero": 3, "status": "bounded", "step_time": None, "bound": 1.3}
    )
    solved = row.model_copy(update={"status": "solved", "step_time": 1.4, "dp_shard": 1})
    certificate = plan.certificate.model_copy(
        update={"candidates": (plan.chosen, row), "baselines": (Baseline(name="ZeRO-3", candidate=solved),)}
    )
    lines = plan.model_copy(update={"certificate": certificate}).why_not(zero=3).lines
    tried = "The best of these that was tried (dp 2 × tp 8, zero 3, dp_shard 1, microbatches of 1, 1f1b) takes 1.4 s"
    assert any(line.startswith(tried) for line in lines)


def test_equal_blocks_of_several_virtual_stages_are_counted_together():
    """Each rank has four of the eight layers, in two virtual stages: one entry ``4 × ...``, not one for each stage."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)))
    pins = Constraints(pp=2, schedule="interleaved", virtual_stages=2, microbatch_size=2)
    plan = partition(model, Topology.local(2), (torch.zeros(8, 8),), constraints=pins, loss=lambda y: y.square().mean())
    words = " ".join(format_summary(plan).split())
    assert words.count("4 ×") == 2, words
    why = " ".join(format_explanation(plan).split())
    assert (
        "the layers are cut into 4 consecutive parts, 2 for each stage: in order on stages 0 to 1, then again 0 to 1"
        in why
    )
    assert len(re.findall(r"stage \d: 4 × \* \(modules [\d–]+, [\d–]+\)", why)) == 2, why


def test_tables_of_stages_say_that_seconds_are_of_a_step(plan: Plan):
    shown = format_summary(plan).splitlines()
    line = next(number for number, text in enumerate(shown) if "peak (of usable)" in text)
    head = [text.split() for text in shown[line - 1 : line + 2]]
    assert sum(words.count("forward") for words in head) == sum(words.count("backward") for words in head) == 1
    assert " ".join(word for words in head for word in words).count("per step") == 2
    page = build_report(plan)
    assert re.search(r"forward\s+per step", page) and re.search(r"backward\s+per step", page)


def test_what_constraints_exclude_is_named_with_its_microbatch_size(plan: Plan):
    faster = plan.certificate.candidates[1].model_copy(update={"step_time": 0.5, "microbatch_size": 4})
    baseline = Baseline(name="Megatron's layout", candidate=faster, excluded="excluded by the constraints")
    certificate = plan.certificate.model_copy(update={"baselines": (baseline,)})
    told = " ".join(format_summary(plan.model_copy(update={"certificate": certificate})).split())
    assert "Megatron's layout (dp 2 × tp 8, microbatch of 4 samples), which they exclude" in told


def test_stages_of_a_long_pipeline_share_lines():
    """The first and the last of 16 stages have other blocks; the 14 others have two layers each."""
    why = format_explanation(plan_of(llama(pp=16, dp=1, tp=1, layers=32)))
    lines = " ".join(why[why.index("How is the work divided?") : why.index("How are the parameters")].split())
    assert re.findall(r"stages? ([\d–]+)(?:, each)?: ", lines) == ["0", "1–14", "15"], lines
    assert re.search(r"stages 1–14, each: .*2 × DecoderLayer(?! \()", lines)
    assert "stages 0→1, 1→2, ..., 14→15: " in " ".join(why.split())


def test_many_different_stages_and_ranges_are_summarised():
    lines = [_StageLine(f"own {k}", f"kind {k}", 1 + k % 3) for k in range(64)]
    told = list(_merge_lines(lines, "× layers.*"))
    assert told[:2] == ["stage 0: own 0", "stage 1: own 1"]
    assert told[7:] == ["and 57 more stages with 1 to 3 × layers.* each"]
    assert _name_numbers("layers", range(0, 128, 8)) == "every 8th of layers 0–120"
    assert _name_numbers("layers", [0, 3, 4, 5]) == "layers 0, 3–5"
    assert _name_numbers("layers", [7]) == "layer 7"
    many = _name_numbers("layers", [k for k in range(128) if k % 4 < 2 or k == 127])
    assert many.endswith("40–41 and 22 more ranges up to 127")


def test_a_layout_that_was_tried_after_the_search_is_uncovered(plan: Plan):
    """The chosen layout has cp=2, and no layout that the proof covers has its mesh. Its schedule is covered."""
    mesh = {**plan.chosen.mesh, "dp": 1, "cp": 2}
    chosen = plan.chosen.model_copy(update={"mesh": mesh, "beside": True})
    other = plan.chosen.model_copy(update={"status": "solved"})
    certificate = plan.certificate.model_copy(
        update={"candidates": (other, chosen), "covered_bound": plan.certificate.objective * 1.1}
    )
    words = " ".join(format_summary(plan.model_copy(update={"certificate": certificate})).split())
    assert "the proof does not cover its context parallelism (cp 2)." in words
    assert "so it is faster than each of them" in words
    assert "its schedule (" not in words
