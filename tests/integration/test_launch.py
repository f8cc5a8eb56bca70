"""How a plan is started: commands and batch scripts that bash reads, and that start the ranks they should."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan, PlanError, Topology
from partitioner.plans.launch import LaunchJob, job_of, slurm_script, torchrun_commands
from tests.helpers.command_line import invoke
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import program_of_net
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.slurm import SCONTROL
from tests.helpers.torchrun import plan_file

WEIRD = "it's $HOME"  # an argument that a careless script would expand or break at

SRUN = """#!/bin/bash
# As srun does: the command once on every node, with its number.
echo "$0 $*" >> "$CALLS/srun"
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node "$@" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
PYTHON = """#!/bin/bash
{ for word in "$@"; do printf '%s\\n' "$word"; done; } > "$CALLS/node$SLURM_NODEID"
if [ -n "$SLEEP" ]; then kill -USR1 $PPID_OF_SCRIPT; sleep "$SLEEP"; fi
exit "${STATUS:-0}"
"""


def sample(topology: Topology | None = None) -> Plan:
    """A plan of 16 ranks, on two nodes of eight unless told otherwise."""
    where = Topology.preset("dgx-h100", nodes=2) if topology is None else topology
    plan = plan_of(llama(pp=4, dp=2, tp=2, layers=8))
    return plan.model_copy(update={"topology": where, "devices": tuple(range(16))})


def changed(topology: Topology, **parts: Any) -> Topology:
    return Topology(**topology.model_dump() | parts)


def uneven() -> Topology:
    """A node of eight devices and two of four."""
    two = Topology.preset("dgx-h100", nodes=2)
    large = two.nodes[0].model_dump() | {"count": 1}
    return changed(two, nodes=(large, large | {"devices": 4, "count": 2}))


class Cluster:
    """Commands that stand for Slurm's, first on the path; what they were called with."""

    def __init__(self, folder: Path, num_nodes: int, *, python: str | None = PYTHON) -> None:
        self.calls = folder / "calls"
        self.calls.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
            path = self.bin / name
            if text is None:
                continue
            path.write_text(text)
            path.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NODELIST": "node[0-9]",
            "SLURM_JOB_NUM_NODES": str(num_nodes),
        }

    def batch(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = self.calls / "job.sh"
        path.write_text(script)
        return subprocess.run(
            ["bash", str(path)], env=self.environment | environment, capture_output=True, text=True, timeout=240
        )

    def said(self, name: str) -> list[str]:
        path = self.calls / name
        return path.read_text().splitlines() if path.exists() else []


def bash_reads(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


JOBS = {
    "one": LaunchJob("net", (4,), True, False, ("train.py", WEIRD), 2),
    "alike": LaunchJob("net", (8, 8), True, True, ("train.py", WEIRD), 2),
    "apart": LaunchJob("net", (8, 4, 4), False, True, ("train.py", WEIRD), 2),
}


@pytest.mark.parametrize("name", JOBS)
def test_bash_reads_what_is_printed(name: str):
    bash_reads(torchrun_commands(JOBS[name]))
    bash_reads(slurm_script(JOBS[name], time="1:00:00", partition="gpu"))


def test_nodes_and_devices_are_the_topologys():
    job = job_of(sample(), "plan.json", "train.py")
    assert (job.processes, job.alike, job.gpus) == ((8, 8), True, True)
    assert job_of(sample(Topology.local(16)), "plan.json").processes == (16,)
    assert not job_of(sample(Topology.local(16)), "plan.json").gpus
    job = job_of(sample(uneven()), "plan.json")
    assert (job.processes, job.alike) == ((8, 4, 4), False)


def test_nodes_that_differ_keep_their_numbers():
    two = Topology.preset("dgx-h100", nodes=2)
    slow = changed(two, node_overrides={1: {"network": 0.5}})
    assert "c10d" in slurm_script(job_of(sample(two), "plan.json"))
    script = slurm_script(job_of(sample(slow), "plan.json"))
    assert '--node-rank="$SLURM_NODEID"' in script
    assert "c10d" not in script


def test_an_estimate_is_not_started():
    plan = sample().model_copy(update={"written": None, "planned_only": ("recompute=selective",)})
    with pytest.raises(PlanError, match="this plan is an estimate"):
        job_of(plan, "plan.json")
    with pytest.raises(PlanError, match="max_restarts: expected at least 0, got -1"):
        job_of(sample(), "plan.json", max_restarts=-1)


def test_a_job_starts_torchrun_once_on_each_node(tmp_path: Path):
    cluster = Cluster(tmp_path, 2)
    done = cluster.batch(slurm_script(JOBS["alike"]))
    assert done.returncode == 0, done.stderr
    first = cluster.said("node0")
    assert first == cluster.said("node1")
    assert first[:2] == ["-m", "partitioner.runtime.launch.torchrun"]
    assert "--rdzv-endpoint=node0:29734" in first
    assert "--rdzv-id=1234.0" in first
    assert {"--nnodes=2", "--nproc-per-node=8", "--max-restarts=2"} <= set(first)
    assert first[-2:] == ["train.py", WEIRD]
    assert cluster.said("scontrol") == ["show hostnames node[0-9]"]


def test_each_node_has_its_own_number_and_processes(tmp_path: Path):
    cluster = Cluster(tmp_path, 3)
    done = cluster.batch(slurm_script(JOBS["apart"]))
    assert done.returncode == 0, done.stderr
    for node, count in enumerate((8, 4, 4)):
        words = cluster.said(f"node{node}")
        assert {f"--node-rank={node}", f"--nproc-per-node={count}", "--master-addr=node0"} <= set(words)
        assert words[-2:] == ["train.py", WEIRD]


@pytest.mark.parametrize("time", ["90", "90:30", "24:00:00", "2-12", "2-12:30", "2-12:00:00", "UNLIMITED", "0"])
def test_a_time_limit_is_as_slurm_reads_it(time: str):
    assert f"#SBATCH --time={time}\n" in slurm_script(JOBS["one"], time=time)


@pytest.mark.parametrize(
    "time", ["24h", "", "1:2:3:4", "1:00:99", "a day", "1:00:00\n#SBATCH --exclusive=no", "-5", "1.5"]
)
def test_another_time_limit_is_refused(time: str):
    with pytest.raises(PlanError, match=r"expected a limit as Slurm reads it.*24:00:00.*got"):
        slurm_script(JOBS["one"], time=time)


@pytest.mark.parametrize("time", ["1", "3:59", "0:04:00", "0-0:3"])
def test_a_time_in_which_the_job_only_goes_back_is_refused(time: str):
    with pytest.raises(PlanError, match="more than 4 minutes"):
        slurm_script(JOBS["one"], time=time)


@pytest.mark.parametrize(("restarts", "requeued"), [("", True), ("1", True), ("2", False)])
def test_what_fails_goes_back_into_the_queue_a_few_times(tmp_path: Path, restarts: str, requeued: bool):
    cluster = Cluster(tmp_path, 1)
    done = cluster.batch(
        slurm_script(JOBS["one"]), STATUS="7", **({"SLURM_RESTART_COUNT": restarts} if restarts else {})
    )
    assert done.returncode == 7
    assert ("requeue 1234" in cluster.said("scontrol")) == requeued


def test_what_fails_after_a_long_time_always_goes_back(tmp_path: Path):
    cluster = Cluster(tmp_path, 1)
    script = slurm_script(JOBS["one"]).replace("srun=$!", "srun=$!; SECONDS=900")
    assert cluster.batch(script, STATUS="7", SLURM_RESTART_COUNT="50").returncode == 7
    assert cluster.said("scontrol") == ["requeue 1234"]


def test_a_job_whose_time_is_over_goes_back_into_the_queue(tmp_path: Path):
    """The signal comes to the script alone, while its ranks run; it waits for their end all the same."""
    cluster = Cluster(tmp_path, 1)
    script = slurm_script(JOBS["one"], time="24:00:00").replace("srun --cpu", "export PPID_OF_SCRIPT=$$; srun --cpu")
    done = cluster.batch(script, SLEEP="0.5", STATUS="0")
    assert done.returncode == 0, done.stderr
    assert cluster.said("scontrol") == ["requeue 1234"]
    assert "#SBATCH --signal=B:USR1@120" in script


def test_the_command_prints_or_writes_it(tmp_path: Path):
    plan = sample().save(tmp_path / "plan.json")
    result = invoke("launch", plan, "train.py", "--", "--steps", 5)
    assert result.exit_code == 0, result.output
    assert "--nnodes=2 --nproc-per-node=8" in result.stdout
    assert result.stdout.endswith("train.py --steps 5\n")
    result = invoke("launch", plan, "--", "--steps", 5)
    assert result.stdout.endswith(f"-m partitioner.runtime {plan} --steps 5\n")
    result = invoke("launch", plan, "train.py", "--slurm", "--time", "1:00:00", "-o", tmp_path / "job.sh")
    assert result.exit_code == 0, result.output
    script = (tmp_path / "job.sh").read_text()
    bash_reads(script)
    assert "#SBATCH --time=1:00:00\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script


@pytest.mark.slow  # tests of hosts do it sooner, over addresses that are apart
@pytest.mark.parametrize("alike", [True, False])
def test_two_nodes_meet_and_train(tmp_path: Path, alike: bool):
    """Real ranks: two torchruns of one process each, both on this machine, as two hosts would be."""
    plan = plan_file(tmp_path, program_of_net(dp=2))
    job = LaunchJob("net", (1, 1), alike, False, ("-m", "partitioner.runtime", str(plan), "--steps", "2"), 0)
    cluster = Cluster(tmp_path, 2, python=None)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = re.sub(r"HEAD_PORT=\S+\)\)", f"HEAD_PORT={port}", slurm_script(job))
    virtual = Path(sys.executable).parent
    done = cluster.batch(
        script,
        HOST_NAME="127.0.0.1",
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        PATH=f"{cluster.bin}:{virtual}:/bin:/usr/bin",
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1", "2"]
