"""``torchrun -m partitioner.runtime``: trains, says what is wrong, and ends."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partitioner import Constraints, Engine, LaunchError, Topology, partition
from partitioner.runtime.comm.rendezvous import report_to_torchrun
from partitioner.runtime.errors import Failure, InstructionError
from partitioner.runtime.launch.cli import _build_parser, make_random_batch
from partitioner.runtime.program.load import load_program
from tests.helpers.net_runs import broken, infer_only
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net
from tests.helpers.torchrun import SCRIPT, plan_file, supervised, torchrun


def test_it_trains_and_saves(tmp_path: Path):
    model = Net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(net_inputs(), tmp_path / "batch.safetensors")
    plan = plan_file(tmp_path, program_of_net(pp=2, num_microbatches=2))
    options = ["--weights", str(tmp_path), "--batch", str(tmp_path / "batch.safetensors"), "--lr", "0.01"]
    done = torchrun(2, str(plan), *options, "--steps", "2", "--save", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**net_inputs())["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    printed = [float(x) for x in re.findall(r"^step \d+  loss (\S+)  .* ms$", done.stdout, re.MULTILINE)]
    assert printed == pytest.approx(losses, rel=1e-5)
    saved: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        saved |= load_file(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach())


def test_a_failing_rank_ends_all_and_its_cause_is_the_logs_last_word(tmp_path: Path):
    plan = plan_file(tmp_path, broken(infer_only(program_of_net(pp=2, num_microbatches=4)), 1))
    start = time.monotonic()
    done = torchrun(2, str(plan))
    assert done.returncode == 1
    assert time.monotonic() - start < 120
    last = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "rank 1, instruction" in last
    assert "net.py:" in last


def test_another_number_of_ranks_is_refused(tmp_path: Path):
    command = [sys.executable, "-m", "partitioner.runtime", str(plan_file(tmp_path, program_of_net(tp=2)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 1
    assert "the plan is for 2 ranks (tp=2), 1 were started: use torchrun --nproc-per-node 2" in done.stderr


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"^cannot read the plan"):
        load_program(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(LaunchError, match="not complete JSON"):
        load_program(tmp_path / "text.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(LaunchError, match="has no 'program'"):
        load_program(tmp_path / "other.json")
    with pytest.raises(LaunchError, match="got int"):
        load_program(3)


def test_it_goes_on_from_the_last_step(tmp_path: Path):
    """Not from the last that is a multiple of ``--every``."""
    plan = plan_file(tmp_path, program_of_net())
    command = [
        sys.executable,
        "-m",
        "partitioner.runtime",
        str(plan),
        "--checkpoints",
        str(tmp_path / "out"),
        "--every",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    seen = []
    for steps in ("3", "4"):
        done = subprocess.run(
            [*command, "--steps", steps], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        seen += re.findall(r"^step (\d+) ", done.stdout, re.MULTILINE)
        said = (
            "no checkpoint found, training starts from the beginning"
            if steps == "3"
            else "training continues from step 3"
        )
        assert f"{tmp_path / 'out'}: {said}\n" in done.stderr, "another folder than was meant is seen"
    assert seen == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_a_stage_without_trained_parameters_clips_and_saves_with_the_others(tmp_path: Path):
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    plan = partition(model, Topology.local(2), net_inputs(), constraints=Constraints(pp=2))
    assert [any(plan.program.states[s].requires_grad for s in plan.rank(r).states) for r in (0, 1)] == [False, True]
    plan.save(tmp_path / "plan.json")
    options = ["--checkpoints", str(tmp_path / "out"), "--clip", "1.0", "--patience", "20", "--timeout", "60"]
    for steps in ("1", "2"):
        done = torchrun(2, str(tmp_path / "plan.json"), *options, "--steps", steps)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^step (\d+) .* norm \d", done.stdout, re.MULTILINE) == [steps]


ENDS = """
import os, time
from datetime import timedelta
import partitioner
first = os.environ["RANK"] == "0"
if {early!r} and not first:
    os.environ.pop("MASTER_PORT")
partitioner.init_process_group("gloo", timedelta(seconds=60))
if not first:
    raise KeyError("sample 17")  # the line
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("early", "told"),
    [
        pytest.param(
            True,
            r"rank 1, \S+ends\.py:8: ValueError: Error initializing .* variable MASTER_PORT expected",
            marks=pytest.mark.slow,
        ),
        (False, r"rank 1, \S+ends\.py:10: KeyError: 'sample 17'"),
    ],
    ids=["before the ranks meet", "before the steps"],
)
def test_what_ends_a_script_that_nobody_watches_is_the_logs_last_line(tmp_path: Path, early: bool, told: str):
    script = tmp_path / "ends.py"
    script.write_text(ENDS.format(early=early))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "partitioner.runtime.launch.torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert re.fullmatch(f"first cause: {told}.*", done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "wrong", [["--steps", "-3"], ["--clip", "-1"], ["--clip", "nan"], ["--every", "-1"]], ids=" ".join
)
def test_numbers_that_cannot_be_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        _build_parser().parse_args(["plan.json", *wrong])
    assert f"argument {wrong[0]}: expected 0" in capsys.readouterr().err


def test_a_random_batch_fits_the_program():
    program = program_of_net()
    batch = make_random_batch(program, seed=0)
    assert batch.keys() == net_inputs().keys()
    assert torch.isfinite(Engine(program, Net()).step(batch))


@pytest.mark.parametrize(
    ("how", "kind"), [("SIGKILL", "ProcessDied"), pytest.param("SIGSTOP", "Stalled", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_or_stopped_is_the_logs_last_line(tmp_path: Path, how: str, kind: str):
    program = program_of_net(pp=2, num_microbatches=2)
    plan_file(tmp_path, program)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = supervised(str(tmp_path / "script.py"), str(tmp_path), "1", how)
    assert done.returncode == 1
    index = next(k for k, i in enumerate(program.rank(1).instructions) if i.op == "B")
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith(f"first cause: rank 1, instruction {index}: {program.rank(1).instructions[index]}, step 4, ")
    assert kind in last
    assert "net.py:" in last


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "partitioner.runtime.launch.torchrun"])
def test_what_torchrun_starts_anew_goes_on_and_ends_as_if_nothing_had_been(tmp_path: Path, launcher: str):
    plan_file(tmp_path, program_of_net(pp=2, num_microbatches=2))
    (tmp_path / "script.py").write_text(SCRIPT)
    script = str(tmp_path / "script.py"), str(tmp_path)
    broken_off = supervised("--max-restarts", "1", *script, "1", "SIGKILL", launcher=launcher)
    assert broken_off.returncode == 0, broken_off.stderr
    assert "resumed at 2" in broken_off.stdout
    for path in sorted((tmp_path / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    whole = supervised(*script, "0", "SIGKILL", launcher=launcher)
    losses = [re.findall(r"loss (\S+)", done.stdout)[-1] for done in (broken_off, whole)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("SIGKILL", "ProcessDied"), ("SIGSTOP", "Stalled")])
def test_a_cause_on_one_host_is_told_on_the_other(tmp_path: Path, how: str, kind: str):
    program = program_of_net(pp=2, dp=2, num_microbatches=2)
    plan_file(tmp_path, program)
    (tmp_path / "script.py").write_text(SCRIPT.replace("dist.get_rank() == 1", "dist.get_rank() == 1 and attempt == 0"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    script = [str(tmp_path / "script.py"), str(tmp_path), "1", how]
    hosts = [
        subprocess.Popen([*command, str(n), *script], stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        for n in range(2)
    ]
    try:
        logs = [host.communicate(timeout=200)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    index = next(k for k, i in enumerate(program.rank(1).instructions) if i.op == "B")
    told = [line for log in logs for line in log.splitlines() if line.startswith("first cause")]
    assert any(f"rank 1, instruction {index}: " in line for line in told)
    for line in told:
        assert line.startswith("first cause: rank 1, ")
        assert kind in line


def test_torchrun_finds_the_whole_reason_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun reads the file of a rank that it has ended, and fails where there is a part of one."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    seen: list[bool] = []
    dump = json.dump

    def looked(data: Any, file: Any) -> None:
        file.write("{")
        file.flush()
        seen.append(path.exists())
        file.seek(0)
        dump(data, file)

    monkeypatch.setattr(json, "dump", looked)
    error = InstructionError(Failure(3, "no memory", "RuntimeError", instruction="2B0"))
    report_to_torchrun(error)
    assert seen == [False]
    assert json.loads(path.read_text())["message"]["message"].startswith("InstructionError: rank 3, 2B0: RuntimeError")
    assert [*tmp_path.iterdir()] == [path]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    report_to_torchrun(error)  # not a worker of torchrun
