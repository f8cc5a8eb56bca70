"""A figure that is told in several places is one and the same, and parts add up to their whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.advise.why_not import why_not
from partitioner.cli.show import rank_parts
from partitioner.explain.diff import in_words
from partitioner.explain.tables import fullest_bytes, sharing_text
from partitioner.plan import Candidate, StageEstimate
from partitioner.plans.figures import bubble_text, key_figures, waiting_shares
from partitioner.plans.outline import outline_program
from partitioner.plans.training_run import energy_of
from partitioner.units import bytes_text, format_plain_text
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.small_clusters import cluster


class Layers(nn.Module):
    """``depth`` layers of ``width`` x ``width`` weights, with activations that recomputation can leave out."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x)).tanh()
        return x.square().mean()


def planned(topology: Topology, batch: int = 512, **pins: Any) -> Plan:
    with torch.device("meta"):
        return partition(Layers(), topology, (torch.empty(batch, 512),), constraints=Constraints(**pins))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(cluster(64), pp=2, zero=1)


def test_memory_is_the_same_wherever_it_is_told(plan: Plan) -> None:
    """By the program, which takes less than the search's tables: in the summary, in explain with the sum of its parts,
    in the table of candidates, in answers to why_not and in comparisons."""
    most = fullest_bytes(plan)
    assert most is not None
    text = bytes_text(most)
    assert plan.chosen.memory == most == sum(plan.estimate.stages[0].memory.values())
    assert re.search(rf"memory +{text} of ", plan.summary())
    assert f"needs {text} of " in plan.explain()
    with torch.device("meta"):
        model, inputs = Layers(), (torch.empty(512, 512),)
    answer = why_not(plan, {"zero": 0}, model, inputs)
    other = planned(cluster(64), pp=2, zero=0)
    assert (
        f"Its fullest rank needs {bytes_text(fullest_bytes(other) or 0)}; that of the chosen plan needs {text}."
        in answer.lines
    )
    assert any(bytes_text(fullest_bytes(other) or 0) in line and text in line for line in in_words(plan, other))


def test_answers_from_tables_say_so(plan: Plan) -> None:
    solved = Candidate(
        mesh={"pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 1}, microbatch_size=1, schedule="1f1b", status="solved",
        step_time=2 * plan.estimate.step_time, bound=2 * plan.estimate.step_time, memory=2**20,
    )  # fmt: skip
    rows = (*plan.certificate.candidates, solved)
    known = plan.model_copy(update={"certificate": plan.certificate.model_copy(update={"candidates": rows})})
    (line,) = [text for text in known.why_not(dp=4, zero=0).lines if "fullest" in text]
    tables = "at most (the search's estimate, which a program does not exceed)"
    chosen = f"that of the chosen plan needs {bytes_text(fullest_bytes(plan) or 0)}."
    assert line == f"It fits in memory. Its fullest rank needs 1 MiB {tables}; {chosen}"


def test_a_bound_is_not_told_as_a_time(plan: Plan) -> None:
    """Of two candidates one has a bound of 1.1 times the step, the other takes 1.3 times as long: the best takes
    between these."""
    step = plan.estimate.step_time
    mesh = {"pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 1}
    one = dict(mesh=mesh, schedule="1f1b", microbatch_size=1)
    bounded = Candidate(**one, status="bounded", bound=1.1 * step)
    solved = Candidate(**one, status="solved", bound=1.3 * step, step_time=1.3 * step, zero=1)

    def answer(*rows: Candidate) -> str:
        certificate = plan.certificate.model_copy(update={"candidates": (*plan.certificate.candidates, *rows)})
        return str(plan.model_copy(update={"certificate": certificate}).why_not(dp=4))

    alone, both = answer(bounded), answer(bounded, solved)
    assert "That is a lower bound and not the time of a plan" in alone
    assert "The bound is that of dp 4, microbatches of 1, 1f1b, which was not tried." in both
    assert "The best of these that was tried (dp 4, zero 1, microbatches of 1, 1f1b) takes " in both


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_parts_of_a_step_are_shares_of_it(recompute: str) -> None:
    """Activations go to a host at 10 MB/s: what is recomputed spares more waiting than it takes."""
    topology = cluster(64, 2, host=4096)
    slow = topology.model_dump(exclude_unset=True)
    (nodes,) = topology.model_dump(include={"nodes"})["nodes"]
    slow["nodes"] = ({**nodes, "host": {"memory": 2**32, "bandwidth": 1e7}},)
    plan = planned(
        Topology(**slow), pp=2, tp=1, microbatch_size=64, offload="optimizer+activations", recompute=recompute
    )
    parts = plan.estimate.breakdown
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(plan.estimate.step_time)
    shares = [float(share) for share in re.findall(r" ([\d.]+)%  █", plan.explain())]
    assert shares and max(shares) <= 100


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_parameters_per_rank_of_calls_add_up_to_their_stage(zero: int) -> None:
    plan = planned(cluster(64), dp=4, zero=zero)
    (stage,) = outline_program(plan.program).stages
    assert sum(group.parameter_bytes for group in stage.groups) == stage.parameter_bytes
    numbers = 8 * (512 * 512 + 512)  # weights and biases, of 4 bytes
    assert stage.parameter_bytes == 4 * numbers // (4 if zero == 3 else 1)


def test_ranks_that_share_states_are_the_product_of_their_axes() -> None:
    """16 ranks of dp in 8 replicas and 8 ranks of cp: 2 x 8 ranks share, of 128."""
    plan = plan_of(llama(pp=1, dp=2, tp=1))
    chosen = plan.chosen.model_copy(update={"zero": 2, "dp_shard": 2, "mesh": {"pp": 1, "dp": 16, "cp": 8, "tp": 1}})
    certificate = plan.certificate.model_copy(update={"candidates": (chosen,)})
    wide = plan.model_copy(update={"certificate": certificate, "written": None})
    shared = "ZeRO 2: optimizer states and gradients over 16 ranks (2 of dp × 8 of cp), in 8 replicas"
    assert sharing_text(wide) == shared


def test_a_rank_has_the_room_that_the_summary_tells(plan: Plan) -> None:
    (room,) = re.findall(r"memory +[\d.]+ .iB of ([\d.]+ .iB usable) .*, rank 0", plan.summary())
    assert f"of {room}" in format_plain_text(rank_parts(plan, 0))


def with_stage_seconds(plan: Plan, seconds: Sequence[float], step: float, bubble: float) -> Plan:
    """``plan`` with stages that work so many ``seconds``, a third of it forward, in a step of ``step`` seconds of which
    the slowest rank waits the share ``bubble``."""
    stages = tuple(
        StageEstimate(first="a", last="b", num_calls=4, recomputed=0, forward_s=s / 3, backward_s=2 * s / 3, memory={})
        for s in seconds
    )
    update = {"stages": stages, "step_time": step, "bubble": bubble}
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update=update)})


def test_the_bubble_is_told_of_the_slowest_and_of_the_mean_rank() -> None:
    """Stages work 9, 7, 6 and 6 s in a step of 10 s, of which the slowest waits 0.5 s. The others wait 2, 3 and 3 s
    more: 0.5 + (0 + 2 + 3 + 3) / 4 = 2.5 s on the mean rank."""
    plan = with_stage_seconds(plan_of(llama(pp=4, dp=2, tp=2)), [9.0, 7.0, 6.0, 6.0], step=10.0, bubble=0.05)
    shares = waiting_shares(plan)
    assert (shares.slowest, shares.mean) == (0.05, pytest.approx(0.25))
    text = "5.0% on the slowest rank, 25% on average over the ranks"
    assert bubble_text(plan) == text
    assert dict(key_figures(plan))["bubble, slowest rank and average"] == "5.0%, 25%"
    said = " ".join(plan.summary().split())
    assert f"bubble {text}: the share of the step in which a rank waits for other ranks" in said
    why = " ".join(plan.explain().split())
    assert "A rank waits for other ranks during 25% of the step on average" in why


def test_replicas_with_fewer_microbatches_wait_for_the_others() -> None:
    """Two replicas of one stage have 4 and 2 microbatches. The first works 8 s of a step of 10 s, the other 4 s, so it
    waits 4 s: 2 s on the mean rank."""
    plan = with_stage_seconds(plan_of(llama(pp=1, dp=2, tp=1)), [8.0], step=10.0, bubble=0.0)
    assert plan.written is not None
    assert bubble_text(plan) == ""
    assert "on the slowest rank" not in plan.summary()
    uneven = plan.model_copy(update={"written": plan.written.model_copy(update={"data_shares": (4, 2)})})
    assert waiting_shares(uneven).mean == pytest.approx(0.2)
    assert bubble_text(uneven) == "0% on the slowest rank, 20% on average over the ranks"


def test_energy_is_that_of_the_mean_rank() -> None:
    """16 devices of 700 W busy and 75 W idle. In a step of 10 s the mean rank waits 25 %: 7.5 s of 700 W and 2.5 s of
    75 W are 5,437.5 J on each."""
    plan = with_stage_seconds(plan_of(llama(pp=4, dp=2, tp=2)), [9.0, 7.0, 6.0, 6.0], step=10.0, bubble=0.05)
    assert energy_of(plan) == pytest.approx(16 * 5437.5)
