"""What is told of a run while it goes: a line per step, files, spikes, slow ranks; and its step beside the plan's."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from partitioner import (
    Constraints,
    Engine,
    LaunchError,
    LocalRanks,
    LossSpikes,
    Plan,
    StepLog,
    Topology,
    Watch,
    partition,
)
from partitioner.cli.app import app
from partitioner.errors import PlanError
from partitioner.explain.measured import compare_steps
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.engine.batches import count_tokens_and_samples
from partitioner.runtime.execute.flight_recorder import InstructionSpot, RecorderHeader
from partitioner.runtime.observe.metrics import StepMetrics
from partitioner.runtime.observe.trace_events import read_spans
from partitioner.runtime.program.load import load_program
from partitioner.runtime.watch.stragglers import slow_ranks
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")


def test_a_step_is_a_line_and_an_entry(tmp_path: Path):
    engine = Engine(program_of_net(num_microbatches=2), Net())
    with StepLog(engine, folder=tmp_path) as log:
        for _ in range(2):
            found = log.step(engine.step(net_inputs()), norm=0.5)
    assert str(found).startswith(f"step 2  loss {found.loss:.6f}  ")
    assert found.samples_per_s == pytest.approx(8 / found.seconds)
    assert found.mfu is None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["norm"] == 0.5
    assert lines[1]["memory"] > 0


def test_steps_that_are_done_again_have_one_line(tmp_path: Path):
    """After a restart, which may have cut a line short, and on going back in a run."""
    engine, file = Engine(program_of_net(), Net()), tmp_path / "metrics.jsonl"

    def steps(log: StepLog, first: int, last: int, loss: float) -> None:
        for engine.steps in range(first, last + 1):
            log.step(loss)

    def told() -> list[tuple[int, float]]:
        return [(entry["step"], entry["loss"]) for entry in map(json.loads, file.read_text().splitlines())]

    with StepLog(engine, folder=tmp_path) as log:
        steps(log, 1, 5, 1.0)
    with file.open("a") as broken:
        broken.write('{"step": 6, "lo')
    with StepLog(engine, folder=tmp_path) as log:
        engine.steps = 3  # as after restore()
        steps(log, 4, 6, 2.0)
        assert told() == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
        steps(log, 6, 7, 3.0)
    assert told() == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0), (7, 3.0)]
    with StepLog(engine, folder=tmp_path) as log:
        pass
    assert len(told()) == 7, "nothing is lost before a step is there again"


def test_a_line_says_what_is_known():
    known = StepMetrics(12, 0.64, 3.12, 51200.0, 25.0, 0.412, 61 * 2**30, 0.081)
    line = "step 12  loss 3.120000  51,200 tokens/s  MFU 41.2%  memory 61.00 GiB  bubble 8.1%  640.0 ms"
    assert str(known) == line
    assert str(StepMetrics(1, 0.5, samples_per_s=8.0)) == "step 1  8.0 samples/s  500.0 ms"


def test_the_mfu_is_the_estimates_in_proportion(tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"estimate": {"step_time": 2.0, "mfu": 0.5}}))
    engine = Engine(program_of_net(), Net())
    log = StepLog(engine, plan)
    engine.step(net_inputs())
    found = log.step(1.0)
    assert found.mfu == pytest.approx(1.0 / found.seconds)


@pytest.mark.parametrize("batches", [[1, 1], [4, 4], [1, 2, 4, 1], [3, 0, 2]])
def test_figures_are_of_all_batches_since_the_last_call(batches: list[int], tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"estimate": {"step_time": 2.0, "mfu": 0.5}}))
    engine = Engine(program_of_net(), Net())
    log = StepLog(engine, plan)
    for number in batches:
        for k in range(number):
            engine.step(net_inputs(), accumulate=k > 0)
        found = log.step()
        assert found.tokens_per_s is None  # the inputs are not tokens
        assert (found.samples_per_s or 0.0) * found.seconds == pytest.approx(8 * number)
        assert (found.mfu or 0.0) * found.seconds == pytest.approx(1.0 * number)
    engine.steps = 1  # gone back to an earlier checkpoint
    engine.step(net_inputs())
    found = log.step()
    assert found.step == 2
    assert found.samples_per_s is not None and found.samples_per_s * found.seconds == pytest.approx(8)


def test_tokens_are_counted_where_there_are_some():
    assert count_tokens_and_samples(program_of_net()) == (0, 8)


def test_a_spike_is_told_and_does_not_become_usual():
    spikes = LossSpikes()
    for step in range(30):
        assert spikes.see(step, 2.0 + 0.05 * math.sin(step)) is None
    found = spikes.see(30, 4.0)
    assert found is not None
    assert found.step == 30
    assert found.usual == pytest.approx(2.0, abs=0.05)
    assert spikes.see(31, 2.0) is None
    assert spikes.see(32, 4.0) is not None
    assert spikes.see(33, math.nan) is not None


def test_a_loss_that_stays_up_is_the_new_usual():
    spikes = LossSpikes(window=32)
    for step in range(40):
        spikes.see(step, 1.0 + 0.01 * (step % 3))
    told = [spikes.see(40 + k, 3.0 + 0.01 * (k % 3)) is not None for k in range(60)]
    assert told[0]
    assert not any(told[-20:])


def about(rank: int, stage: int) -> RecorderHeader:
    spots = tuple(
        InstructionSpot(text=f"{stage}F{i}", op="F", calls=f"layers.{i}", source="net.py:3") for i in range(3)
    )
    return RecorderHeader(rank, 4, stage, 1, "host", (0, 1, 2), spots, 0.0)


STEP = {0: 0.010, 1: 0.020, 2: 0.010}


def test_a_rank_is_compared_with_its_peers():
    ranks = {r: about(r, 0) for r in range(4)}
    samples = {r: [dict(STEP) for _ in range(12)] for r in ranks}
    assert slow_ranks(samples, ranks, 1.5) == []
    samples[2] = [{**STEP, 1: 0.060} for _ in range(12)]
    (found,) = slow_ranks(samples, ranks, 1.5)
    assert (found.rank, found.index, found.expected) == (2, 1, pytest.approx(0.04))
    assert "rank 2 is slow: 80.0 ms of work in a step, its peers take 40.0 ms" in str(found)
    assert "instruction 1: 0F1, layers.1, net.py:3" in str(found)
    samples[0] = samples[2]
    assert {s.rank for s in slow_ranks({r: samples[r] for r in range(4)}, ranks, 1.3)} == {0, 2}


def test_a_rank_alone_on_its_stage_is_compared_with_its_past():
    ranks = {r: about(r, r) for r in range(2)}
    twice = {i: 2 * s for i, s in STEP.items()}
    samples = {0: [STEP] * 8 + [twice] * 10, 1: [STEP] * 8 + [twice] * 10}
    assert slow_ranks(samples, ranks, 1.5) == []  # the machine is slower, not a rank
    samples[0] = [STEP] * 24
    for slow_steps in (10, 16):
        samples[1] = [STEP] * (24 - slow_steps) + [{**STEP, 0: 0.110}] * slow_steps
        assert [(s.rank, s.index) for s in slow_ranks(samples, ranks, 1.5)] == [(1, 0)]


def test_who_has_more_microbatches_is_not_slow():
    short, long = (0, 2), (0, 1, 2)  # what of their stage's list they run
    ranks = {r: replace(about(r, 0), places=long if r < 2 else short) for r in range(5)}
    samples = {r: [STEP] * 12 for r in ranks} | {r: [{**STEP, 1: 0.100}] * 12 for r in range(2)}
    assert slow_ranks(samples, ranks, 1.5) == []
    samples[4] = [{**STEP, 1: 0.100}] * 12
    assert [s.rank for s in slow_ranks(samples, ranks, 1.5)] == [4]


def test_one_disturbed_step_is_nothing():
    ranks = {r: about(r, 0) for r in range(3)}
    samples = {r: [STEP] * 12 for r in ranks}
    samples[1] = [STEP] * 10 + [{**STEP, 0: 5.0}] + [STEP]
    assert slow_ranks(samples, ranks, 1.5) == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_slow_rank_is_told_apart_on_a_machine_that_others_use(alone: bool):
    """Half of all instructions are interrupted, for as long as ten of them take in the mean."""
    ranks, generator = {r: about(r, r if alone else 0) for r in range(4)}, random.Random(0)
    told, wrongly = 0, 0
    for run in range(20):
        samples: dict[int, list[dict[int, float]]] = {r: [] for r in ranks}
        found = set()
        for step in range(40):
            for rank, steps in samples.items():
                work = {i: 0.004 + generator.choice([0, generator.expovariate(25)]) for i in range(3)}
                if run % 2 and rank == 1 and step >= 20:
                    work[1] += 0.2
                steps.append(work)
            found |= {(s.rank, s.index) for s in slow_ranks(samples, ranks, 2.0)}
        told += (1, 1) in found
        wrongly += bool(found - ({(1, 1)} if run % 2 else set()))
    assert told >= 9
    assert wrongly <= 1


@pytest.fixture(scope="module")
def plan() -> Plan:
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    return partition(
        model,
        Topology.local(2),
        (torch.ones(8, 8),),
        loss=lambda y: y.square().mean(),
        constraints=Constraints(pp=2, dp=1, tp=1, microbatch_size=2),
    )


def test_a_measured_step_stands_beside_the_predicted_one(tmp_path: Path, plan: Plan):
    path = plan.save(tmp_path / "plan.json")
    (data,) = plan.program.inputs
    assert data.path == "0"
    with LocalRanks(2) as ranks:
        ranks.call(steps_of, str(path), str(tmp_path / "watch"), timeout=120)
    trace = tmp_path / "trace.json"
    written = CliRunner().invoke(app, ["trace", str(path), str(tmp_path / "watch"), "-o", str(trace)])
    assert written.exit_code == 0, written.output
    events = json.loads(trace.read_text())["traceEvents"]
    for kind in ("measured", "predicted"):
        assert any(e.get("args", {}).get("kind") == kind for e in events)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    transfers = sum(i.op.startswith("SEND") for stage in plan.program.stages for i in stage.instructions)
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * transfers  # measured and predicted
    assert all(starts[k]["ts"] <= ends[k]["ts"] and starts[k]["pid"] != ends[k]["pid"] for k in starts)
    spans = read_spans(trace)
    for rank in (0, 1):
        indices = {s.index for s in spans if s.rank == rank}
        assert indices == set(range(len(plan.program.stages[rank].instructions) + 1))
    attempts = tmp_path / "attempts"  # as PARTITION_WATCH has them: the last one is what is meant
    (attempts / "attempt-9").mkdir(parents=True)
    (tmp_path / "watch").rename(attempts / "attempt-10")
    again = CliRunner().invoke(app, ["trace", str(path), str(attempts), "-o", str(tmp_path / "again.json")])
    assert again.exit_code == 0, again.output
    assert read_spans(tmp_path / "again.json") == spans
    told = CliRunner().invoke(app, ["compare", str(path), str(trace)])
    assert told.exit_code == 0, told.output
    assert "was predicted to take" in told.output
    other = plan.model_copy(update={"written": program_of_net(pp=2, num_microbatches=3)})
    with pytest.raises(PlanError, match="not of this plan"):
        compare_steps(other, spans)
    with pytest.raises(PlanError, match="it has 1 ranks, the plan 2"):
        compare_steps(plan, [s for s in spans if s.rank == 0])


def steps_of(plan: str, folder: str) -> None:
    program = load_program(plan)
    engine = Engine(program, communicator=TorchCommunicator(program.world_size, torch.device("cpu")))
    with Watch(engine, folder, leave=False):
        for _ in range(3):
            engine.step((torch.ones(8, 8),))


def test_a_trace_without_a_measured_step_is_refused(tmp_path: Path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(LaunchError, match="holds no measured step"):
        read_spans(tmp_path / "trace.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(LaunchError, match="is not a trace"):
        read_spans(tmp_path / "other.json")
