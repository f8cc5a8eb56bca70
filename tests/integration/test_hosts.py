"""Runs on several hosts, as users start them: hosts that die, cables that are pulled, hosts and links that are slow."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.plans.launch import job_of, slurm_script, torchrun_commands
from tests.helpers.gloo_devices import GLOO
from tests.helpers.hosts import Command, Host, Hosts, has_throttle, why_not
from tests.helpers.hosts_model import RATE, STEPS, Net, batch
from tests.helpers.paths import ROOT
from tests.helpers.slurm import SCONTROL

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

START_S = 90.0  # a busy machine imports torch six times
PATIENCE_S = 5.0
LEAVE_S = 15.0  # to agree on the cause, and to leave


def cluster(hosts: int = 2, ranks: int = 2) -> Topology:
    levels = [
        {"name": "inside", "nodes": 1, "bandwidth": 1e10, "latency": 5e-6},
        {"name": "between", "bandwidth": 1e9, "latency": 5e-5},
    ]
    held = {"type": "cpu", "devices": ranks, "count": hosts}
    return Topology(name="hosts", types={"cpu": GLOO | {"memory": 2**30}}, nodes=(held,), levels=levels)


def planned(folder: Path, topology: Topology | None = None, **mesh: Any) -> tuple[Plan, Path]:
    plan = partition(Net(), topology or cluster(), batch(), constraints=Constraints(**mesh))
    save_file(Net().state_dict(), folder / "model.safetensors")
    return plan, plan.save(folder / "plan.json")


def alone(steps: int, fresh: bool) -> tuple[list[float], nn.Module]:
    """What one process makes of the same steps; ``fresh``: of another batch in each."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step if fresh else 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def same_weights(folder: Path, model: nn.Module) -> None:
    saved: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved |= load_file(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def options(folder: Path) -> list[str]:
    save_file(batch(), folder / "batch.safetensors")
    files = ["--weights", str(folder / "model.safetensors"), "--batch", str(folder / "batch.safetensors")]
    return [*files, "--lr", str(RATE), "--steps", "3", "--save", str(folder / "out"), "--timeout", "60"]


def as_in_one_process(folder: Path, text: str) -> None:
    losses, model = alone(3, fresh=False)
    printed = [float(x) for x in re.findall(r"^step \d+  loss (\S+)  .* ms$", text, re.MULTILINE)]
    assert printed == pytest.approx(losses, rel=1e-5)
    same_weights(folder / "out", model)


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages and replicas": {"pp": 2, "dp": 2, "tp": 1},
    "tensors": {"tp": 4},
    "states": {"dp": 4, "tp": 1, "pp": 1, "zero": 3},
    "replicas of tensors": {"dp": 2, "tp": 2, "pp": 1},
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if number else []) for number, name in enumerate(LAYOUTS)]
)
def test_what_launch_prints_trains_over_two_hosts(tmp_path: Path, layout: str):
    plan, file = planned(tmp_path, **LAYOUTS[layout])
    told = torchrun_commands(job_of(plan, str(file), None, options(tmp_path)))
    assert "# on each of 2 hosts" in told
    command = told.splitlines()[1].replace("FIRST_HOST", "host0")
    with Hosts(tmp_path, 2) as hosts:
        started = [host.start("bash", "-c", command) for host in hosts.hosts]
        for each in started:
            assert each.wait(START_S) == 0, each.text
    as_in_one_process(tmp_path, "".join(each.text for each in started))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_launch_prints_for_hosts_that_differ(tmp_path: Path):
    """Two ranks on one host and one on each of two others: each host has a command of its own."""
    two = cluster(1)
    topology = Topology(
        name="uneven", types=two.types, levels=two.levels,
        nodes=({"type": "cpu", "devices": 2, "count": 1}, {"type": "cpu", "devices": 1, "count": 2}),
    )  # fmt: skip
    plan, file = planned(tmp_path, topology, pp=2, dp=2, tp=1)
    told = torchrun_commands(job_of(plan, str(file), None, options(tmp_path)))
    commands = [line.replace("FIRST_HOST", "host0") for line in told.splitlines() if not line.startswith("#")]
    with Hosts(tmp_path, 3) as hosts:
        started = [host.start("bash", "-c", command) for host, command in zip(hosts.hosts, commands, strict=True)]
        for each in started:
            assert each.wait(START_S) == 0, each.text
    as_in_one_process(tmp_path, started[0].text)


SRUN = """#!/bin/bash
# As srun does: the command once on every host, with its number.
while [[ "$1" == --* ]]; do shift; done
node=0; pids=()
while read -r inside; do
  SLURM_NODEID=$node $inside bash -c 'cd "$0" && exec "$@"' "$PWD" "$@" & pids+=($!); node=$((node + 1))
done < "$HOSTS_INSIDE"
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_batch_script_starts_the_ranks_of_two_hosts(tmp_path: Path):
    plan, file = planned(tmp_path, pp=2, dp=2, tp=1)
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(job_of(plan, str(file), None, options(tmp_path))))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL.replace("node$n", "host$n")}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    with Hosts(tmp_path, 2) as hosts:
        (tmp_path / "inside").write_text("".join(shlex.join(host.inside()) + "\n" for host in hosts.hosts))
        environment = {
            "PATH": f"{commands}:{Path(sys.executable).parent}:/usr/sbin:/sbin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "CALLS": str(tmp_path),
            "HOSTS_INSIDE": str(tmp_path / "inside"),
        }
        job = subprocess.run(
            ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_S
        )
        assert job.returncode == 0, job.stderr
    as_in_one_process(tmp_path, job.stdout)


SCRIPT = """
import os, sys, time
import torch
import partitioner
from tests.helpers.hosts_model import RATE, STEPS, batch

folder, patience, pause, copies = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
partitioner.init_process_group("gloo")
engine = partitioner.Engine(folder + "/plan.json", folder + "/model.safetensors")
optimizer = torch.optim.AdamW(engine.parameters(), lr=RATE)
first = os.environ["RANK"] == "0"
if "SLOW" in os.environ:
    actions = engine._executor.actions
    place = next(k for k, (i, _) in enumerate(actions) if engine.rank_program.instructions[i].op == "F")
    index, action = actions[place]
    actions[place] = index, lambda: (time.sleep(0.2), action())
with partitioner.Watch(engine, patience_s=patience):
    checkpoints = partitioner.Checkpoints(
        folder + "/run", engine, optimizer, every=0 if copies else 5, behind=False, copies_every=copies
    )
    done = checkpoints.restore()
    if first:
        print("went on from", done, flush=True)
    while engine.steps < STEPS:
        loss = engine.step(batch(engine.steps))
        optimizer.step()
        checkpoints.after_step()
        time.sleep(pause)  # as data does
        if first:
            print("step", engine.steps, "loss", loss.item(), flush=True)
    checkpoints.close()
    engine.export_weights(folder + "/out")
    engine.barrier()
os._exit(0)
"""


class Run:
    """A script on two hosts of some ranks, started by torchrun, in steps that take long enough to meddle with them."""

    def __init__(
        self, folder: Path, *, ranks: int = 2, pp: int = 2, patience: float = 60.0, pause: float = 0.1, copies: int = 0
    ) -> None:
        self.plan, _ = planned(folder, cluster(2, ranks), pp=pp, dp=2 * ranks // pp, tp=1)
        self.folder = folder
        self.ranks = ranks
        (folder / "script.py").write_text(SCRIPT)
        self.arguments = [str(folder), str(patience), str(pause), str(copies)]

    def start(self, host: Host, meeting: str = "host0", **environment: str) -> Command:
        options = [
            "--nnodes=2",
            f"--nproc-per-node={self.ranks}",
            "--max-restarts=2",
            "--rdzv-backend=c10d",
            "--rdzv-id=run",
        ]
        options += [f"--rdzv-endpoint={meeting}:29500", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"]
        launcher = [sys.executable, "-m", "partitioner.runtime.launch.torchrun", *options]
        return host.start(*launcher, str(self.folder / "script.py"), *self.arguments, **environment)

    def ranks_on(self, host: int) -> list[int]:
        """The plan's ranks; torchrun's are numbered host by host, host0 first."""
        return [rank for rank, device in enumerate(self.plan.devices) if device // self.ranks == host]

    def ended_well(self, *texts: str) -> list[int]:
        """All that is left of the run is as in one process. Returns the steps from which it went on."""
        text = "".join(texts)
        losses, model = alone(STEPS, fresh=True)
        seen = [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)]
        assert {step for step, _ in seen} == set(range(1, STEPS + 1))
        for step, loss in seen:
            assert loss == pytest.approx(losses[step - 1], rel=1e-9)
        same_weights(self.folder / "out", model)
        return [0 if step == "None" else int(step) for step in re.findall(r"^went on from (\w+)$", text, re.MULTILINE)]


def causes(*commands: Command) -> list[str]:
    return [line for each in commands for line in each.text.splitlines() if line.startswith("first cause: ")]


def told(command: Command, ranks: list[int], kind: str) -> str:
    """The first cause that a host tells, which is one of these ``ranks``."""
    cause = causes(command)[0]
    found = re.match(r"first cause: rank (\d+), .*step \d+.*: (\w+): ", cause)
    assert found is not None, cause
    assert int(found[1]) in ranks and found[2] == kind, cause
    return cause


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        pytest.param("killed", 1, marks=pytest.mark.slow),
        pytest.param("killed", 2, marks=pytest.mark.slow),
        pytest.param("without power", 2, marks=pytest.mark.slow),
    ],
)
def test_a_host_that_is_lost_is_replaced_and_costs_a_step(tmp_path: Path, how: str, ranks: int):
    """Its memory is lost with it: what its ranks held comes from the other host's."""
    run = Run(tmp_path, ranks=ranks, patience=PATIENCE_S, copies=1)
    with Hosts(tmp_path, 2) as hosts:
        here, lost = hosts.hosts
        first, _ = run.start(here), run.start(lost)
        first.until(r"^step 8 ", START_S)
        if how == "without power":
            lost.cable("down")  # so that its kernel cannot say that connections are closed
        lost.die()
        first.until("^first cause: ", LEAVE_S + (PATIENCE_S if how == "without power" else 0))
        cause = told(first, run.ranks_on(1), "ProcessDied" if how == "killed" else "Stalled")
        assert re.search("given (a|no) sign of life", cause)
        spare = run.start(hosts.add())
        assert first.wait(START_S) == 0, first.text
        assert spare.wait(START_S) == 0, spare.text
        began_at, resumed = run.ended_well(first.text, spare.text)
        assert began_at == 0
        last = max(int(step) for step in re.findall(r"^step (\d+) ", first.text.split("first cause")[0], re.MULTILINE))
        assert last - 1 <= resumed <= last + 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_ranks_met_is_lost_and_the_run_is_started_again(tmp_path: Path):
    """With the host that has the store nobody can meet again; what its ranks held is in the other's memory."""
    run = Run(tmp_path, copies=1)
    with Hosts(tmp_path, 2) as hosts:
        lost, here = hosts.hosts
        first, left = run.start(lost), run.start(here)
        first.until(r"^step 8 ", START_S)
        lost.die()
        assert left.wait(LEAVE_S + 10) == 1
        [cause] = causes(left)
        assert cause.startswith(
            "first cause: the rendezvous host host0:29500 cannot be reached: it has ended, its network has failed, or"
        )
        again = [run.start(host, meeting="host1") for host in (here, hosts.add())]
        for each in again:
            assert each.wait(START_S) == 0, each.text
    began_at, resumed = run.ended_well(*(each.text for each in (first, *again)))
    last = max(int(step) for step in re.findall(r"^step (\d+) ", first.text, re.MULTILINE))
    assert began_at == 0 and last - 1 <= resumed <= last + 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cable_that_is_pulled_ends_both_hosts_and_the_run_goes_on(tmp_path: Path):
    run = Run(tmp_path, patience=PATIENCE_S)
    with Hosts(tmp_path, 2) as hosts:
        started = [run.start(host) for host in hosts.hosts]
        started[0].until(r"^step 8 ", START_S)
        hosts.hosts[1].cable("down")
        for number, each in enumerate(started):
            each.until("^first cause: ", PATIENCE_S + LEAVE_S)
            assert "nor given a sign of life" in told(each, run.ranks_on(1 - number), "Stalled")
        hosts.hosts[1].cable("up")
        for each in started:
            assert each.wait(START_S) == 0, each.text
        assert run.ended_well(*(each.text for each in started))[-1] >= 5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not has_throttle(), reason="links cannot be made slow: the kernel has no such queue")
def test_a_slow_link_is_nobodys_fault(tmp_path: Path):
    run = Run(tmp_path, patience=20.0, pause=0.0)
    with Hosts(tmp_path, 2) as hosts:
        for host in hosts.hosts:
            host.throttle("1mbit")
        started = [run.start(host) for host in hosts.hosts]
        for each in started:
            assert each.wait(START_S) == 0, each.text
    text = "".join(each.text for each in started)
    assert run.ended_well(text) == [0]
    assert not causes(*started)
    assert " is slow: " not in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slow_host_is_told(tmp_path: Path):
    run = Run(tmp_path, pp=1, pause=0.2)  # long enough for ten looks, a second apart
    with Hosts(tmp_path, 2) as hosts:
        quick, slow = hosts.hosts
        started = [run.start(quick), run.start(slow, SLOW="1")]
        for each in started:
            assert each.wait(START_S) == 0, each.text
    text = "".join(each.text for each in started)
    assert run.ended_well(text) == [0]
    assert {int(n) for n in re.findall(r"^rank (\d) is slow: .*F0", text, re.MULTILINE)} == {*run.ranks_on(1)}
