"""What the long run's benchmark says of a run, and that its script trains what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

from benchmarks.curves import Curves, Mark, draw_curves
from benchmarks.long_run import Resumption, Told, attempts_of, distance, repeats
from benchmarks.long_run_single import single
from examples.corpus import CLIP, SEQ, Corpus, build, optimizer_of
from partitioner import Constraints, Engine, Loader, Topology, partition
from partitioner.runtime.program.program import Program
from tests.helpers.command_line import execute
from tests.helpers.every_rank import on_every_rank
from tests.helpers.paths import ROOT

BATCH = 4


def steps(first: int, last: int, start: int, loss: float = 0.0) -> list[dict[str, float]]:
    return [{"step": k, "loss": 10.0 - k + loss, "norm": 1.0, "start": start} for k in range(first, last + 1)]


def test_attempts_and_what_they_did_again():
    attempts = [steps(1, 7, 0), steps(5, 9, 4), steps(9, 12, 8, loss=0.25)]
    assert attempts_of([s for attempt in attempts for s in attempt]) == attempts
    resumptions = [Resumption("rank 1", 7, 4, "pp=2,dp=2"), Resumption("all ranks", 9, 8, "tp=2,dp=2")]
    told = Told(attempts, resumptions)
    assert repeats(told) == ([True] * 3, [0.25])
    assert told.losses() == [s["loss"] for s in steps(1, 8, 0) + steps(9, 12, 8, loss=0.25)]
    attempts[1][0]["norm"] = 1.0000001
    assert repeats(told)[0] == [False, True, True], "bit by bit"


def test_an_attempt_that_goes_on_where_the_last_one_ended_is_another_one():
    """Killed right after a checkpoint; and twice from the same one."""
    attempts = [steps(1, 4, 0), steps(5, 6, 4), steps(5, 9, 4)]
    assert attempts_of([s for attempt in attempts for s in attempt]) == attempts


def test_distance_is_the_largest_and_the_mean():
    assert distance([1.0, 2.0, 3.0], [1.0, 2.5, 1.5]) == (1.5, 2.0 / 3)


def test_the_picture_marks_what_was_done_to_the_run():
    curve = [3.0, 2.5, 2.25, 2.0]
    near = [c + 0.01 for c in curve]
    curves = Curves(near, curve, [near, curve], None, [Mark(2, "rank 1 killed")], "bf16")
    root = ET.fromstring(draw_curves(curves).encode())
    assert any(e.text == "rank 1 killed" for e in root.iter() if e.tag.endswith("text"))
    assert any(e.text == "0.0100" for e in root.iter() if e.tag.endswith("text")), "the largest distance"


def planned(mesh: dict[str, int]) -> Program:
    inputs = {name: torch.zeros(BATCH, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
    constraints = Constraints(**mesh, zero=1, microbatch_size=1)
    return partition(build("tiny"), Topology.local(4), inputs, precision="fp32", constraints=constraints).program


def train(program: Program, model: nn.Module, communicator: Any, folder: Path, num_steps: int) -> list[float]:
    """As ``examples/corpus.py`` does, ``num_steps`` from the checkpoint in ``folder``."""
    engine = Engine(program, model, communicator=communicator)
    optimizer, schedule = optimizer_of([*engine.parameters()])
    loader = Loader(Corpus(), engine, seed=0)
    extra = {"schedule": schedule, "data": loader}
    if folder.exists():
        engine.load(folder, optimizer, extra=extra)
    losses = []
    for _ in range(num_steps):
        loss = engine.step(next(loader), local=True)
        assert loss is not None
        losses.append(loss.item())
        engine.clip_grad_norm_(CLIP)
        optimizer.step()
        schedule.step()
    engine.save(folder, optimizer, extra=extra)
    return losses


def test_labels_are_split_as_any_input_is():
    """Each rank needs its own samples and no others: a rank that counted all targets would need all labels."""
    program = planned({"pp": 2, "dp": 2})
    assert [(i.path, i.batch_dim) for i in program.inputs] == [("input_ids", 0), ("labels", 0)]


def test_a_corpus_is_trained_on_over_two_meshes_as_by_one_process(tmp_path: Path):
    model, losses = build("tiny"), []
    for mesh in ({"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}):
        program = planned(mesh)
        ranks = on_every_rank(program, lambda c, p=program: train(p, model, c, tmp_path / "checkpoint", 3))
        assert all(r == ranks[0] for r in ranks)
        losses += ranks[0]
    assert losses == pytest.approx(single("tiny", "fp32", BATCH, BATCH, 6), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_repeats_its_steps_and_stays_with_one_process(tmp_path: Path):
    options = ["--steps", "12", "--kills", "2", "--every", "3", "--size", "tiny", "--json", "--folder", str(tmp_path)]
    printed = execute(str(ROOT / "benchmarks" / "long_run.py"), *options, cwd=tmp_path, timeout=1500)
    found = json.loads(printed.splitlines()[-1])
    assert found["kills"] == 2
    assert [r["mesh"] for r in found["resumed"]] == ["pp=2,dp=2", "tp=2,dp=2"]
    assert found["repeated_equal"] == found["repeated"]
    assert found["mean_distance"] < 1e-3 < found["first_loss"] - found["last_loss"]
