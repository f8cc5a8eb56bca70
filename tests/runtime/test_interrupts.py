"""A run that is asked to end stops behind the same step on all ranks, saves it, and goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from partitioner import CheckpointError, Checkpoints, Engine, LocalRanks
from partitioner.runtime.checkpoint import series
from partitioner.runtime.launch import cli
from partitioner.runtime.program.program import Program
from tests.helpers import killed
from tests.helpers.models import CASES
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net
from tests.helpers.torchrun import plan_file


def train(program: str, folder: str, struck: int, at: int) -> tuple[int | None, int, bool, bool]:
    """Steps until the run is asked to end, which it is on rank ``struck`` in step ``at``."""
    engine = Engine(Program.model_validate_json(program), Net())
    optimizer = torch.optim.AdamW(engine.parameters())
    before = signal.getsignal(signal.SIGTERM)
    checkpoints = Checkpoints(folder, engine, optimizer, every=100, signals=(signal.SIGTERM,))
    first = checkpoints.restore()
    actions = engine._executor.actions
    index, action = actions[len(actions) // 2]

    def strike() -> None:
        if engine.communicator.rank == struck and engine.steps == at:
            for _ in range(2):  # one request may arrive on two ways
                os.kill(os.getpid(), signal.SIGTERM)
        action()

    actions[len(actions) // 2] = index, strike
    while engine.steps < 20:
        engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()
        if checkpoints.interrupted:
            break
    checkpoints.close()
    return first, engine.steps, checkpoints.interrupted, signal.getsignal(signal.SIGTERM) == before


def test_all_ranks_stop_behind_the_step_in_which_one_was_asked_to(tmp_path: Path):
    program = program_of_net(pp=2, dp=2, num_microbatches=2)
    text, folder = program.model_dump_json(), str(tmp_path / "run")
    with LocalRanks(4) as ranks:
        assert ranks.call(train, text, folder, 2, 4, timeout=120) == [(None, 5, True, True)] * 4
        assert ranks.call(train, text, folder, 0, 9, timeout=120) == [(5, 10, True, True)] * 4
        assert ranks.call(train, text, folder, -1, 0, timeout=120) == [(10, 20, False, True)] * 4


def evaluate(folder: str, way: str, every: int) -> tuple[int, str, int, bool]:
    """Two steps, then batches of an evaluation or a generation, before the third of which rank 1 is asked to end: the
    batches until ``interrupted``, what was saved by then, the steps at the end, and whether the engine is as before.
    With ``unfinished``, the evaluation is between a step and that of the optimizer.
    """
    case = CASES["llama"]
    engine = Engine(f"{folder}/plan.json", case.build())
    optimizer = torch.optim.AdamW(engine.parameters())
    checkpoints = Checkpoints(f"{folder}/run", engine, optimizer, every=every, signals=(signal.SIGTERM,))
    for _ in range(2):
        engine.step(case.inputs(4))
        optimizer.step()
        checkpoints.after_step()
    if way == "unfinished":
        engine.step(case.inputs(4))
    done = 0
    while done < 6 and not checkpoints.interrupted:
        if engine.communicator.rank == 1 and done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if way == "generate":
            engine.generate(torch.full((2, 4), 5), max_new_tokens=4)
        else:
            engine.run("eval", case.inputs(4))
        done += 1
    engine.barrier()
    latest = Path(folder) / "run" / "latest"
    saved = latest.read_text() if latest.exists() else ""
    if way == "unfinished":
        optimizer.step()
        checkpoints.after_step()
    assert checkpoints.interrupted
    checkpoints.close()
    return done, saved, engine.steps, engine.before_runs == []


@pytest.mark.parametrize(
    ("way", "every", "expected"),
    [
        ("evaluate", 100, (3, "step-0000000002", 2, True)),
        ("evaluate", 1, (3, "step-0000000002", 2, True)),  # saved already
        ("generate", 100, (3, "step-0000000002", 2, True)),
        ("unfinished", 100, (6, "", 3, True)),  # the state is that of no step
    ],
)
def test_a_signal_in_an_evaluation_saves_the_state_between_its_batches(
    way: str, every: int, expected: tuple[int, str, int, bool], tmp_path: Path
):
    killed.make_plan().save(tmp_path / "plan.json")
    with LocalRanks(2) as ranks:
        assert ranks.call(evaluate, str(tmp_path), way, every, timeout=120) == [expected] * 2
    assert (tmp_path / "run" / "latest").read_text() == f"step-{expected[2]:010}"


def test_a_later_signal_has_its_usual_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series, "_SAME_REQUEST_S", 0.0)
    received: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        checkpoints = Checkpoints(tmp_path, Engine(program_of_net(), Net()), signals=(signal.SIGINT,))
        os.kill(os.getpid(), signal.SIGINT)
        assert received == []
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
        checkpoints.after_step()
        assert checkpoints.interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def test_outside_of_the_main_thread_signals_are_refused(tmp_path: Path):
    engine, errors = Engine(program_of_net(), Net()), []

    def make() -> None:
        with pytest.raises(CheckpointError, match="in the main thread") as caught:
            Checkpoints(tmp_path, engine, signals=(signal.SIGTERM,))
        errors.append(caught.value)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_torchrun_that_is_ended_leaves_a_checkpoint_of_the_last_step(how: signal.Signals, tmp_path: Path):
    plan = plan_file(tmp_path, program_of_net(pp=2, num_microbatches=2))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "partitioner.runtime",
    ]
    run = subprocess.Popen(
        [*command, str(plan), "--checkpoints", str(tmp_path / "run"), "--every", "100000", "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert run.stdout is not None
    lines = [run.stdout.readline() for _ in range(4)]
    run.send_signal(how)
    out, told = run.communicate(timeout=200)  # until the ranks have ended, too
    steps = re.findall(r"^step (\d+) ", "".join(lines) + out, re.MULTILINE)
    assert (tmp_path / "run" / "latest").read_text() == f"step-{int(steps[-1]):010}"
    assert f"stopped by a signal: step {steps[-1]} is saved in" in told
    assert "first cause" not in told
    assert (f"torchrun (process {run.pid}) was killed" in told) == (how == signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGKILL"])
@pytest.mark.parametrize("phase", ["write", "evaluate", "generate"])
def test_a_rank_that_is_struck_beside_a_step_loses_no_complete_checkpoint(phase: str, how: str, tmp_path: Path):
    killed.make_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def run(phase: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [*command, "-m", "tests.helpers.killed", str(tmp_path), phase, how],
            capture_output=True,
            text=True,
            timeout=200,  # no rank hangs
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        return done.returncode, done.stdout.split()

    status, told = run(phase)
    last = int(told[-1])
    assert killed.AT - 1 <= last < killed.STEPS, "the run ended early"
    assert (status == 0) == (how != "SIGKILL")
    saved = int((tmp_path / "run" / "latest").read_text().removeprefix("step-"))
    assert saved in (last, last + 1)  # it may end between the save of a step and its line
    status, told = run("none")
    assert (status, told[:2], told[-1]) == (0, ["from", str(saved)], str(killed.STEPS))


@pytest.mark.slow
def test_an_evaluation_that_outlasts_the_patience_of_torchrun_loses_no_step(tmp_path: Path):
    killed.make_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [*command, "-m", "tests.helpers.killed", str(tmp_path)]
    with subprocess.Popen(
        [*script, "outlast", "none"], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as run:
        assert run.stdout is not None
        while "evaluating" not in (line := run.stdout.readline()):
            assert line, "the run ended early"
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=120)
    assert run.returncode != 0  # killed after 30 s
    assert (tmp_path / "run" / "latest").read_text() == f"step-{killed.AT:010}"


def test_a_run_without_checkpoints_ends_in_one_line_after_an_interrupt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    statuses: list[int] = []
    monkeypatch.setattr(cli, "_train_patiently", interrupt)
    monkeypatch.setattr(os, "_exit", statuses.append)
    cli.main([str(tmp_path / "plan.json")])
    assert statuses == [130]
    assert capfd.readouterr().err == "rank 0: interrupted\n"
