"""Start commands for a plan: a torchrun command for each host, or a batch script for Slurm.

torchrun numbers processes host by host. Process ``i`` drives the ``i``-th of the plan's devices, in the order of the
topology. If all nodes are equal, hosts may be numbered in any order: the command uses the ``c10d`` rendezvous, which
sorts hosts by name and can restart all ranks after a failure. If nodes differ (in devices, links or pods), each host
needs the number that its node has in the topology: the command uses the ``static`` rendezvous, which cannot restart
ranks.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.errors import PlanError
from partitioner.plan import Plan
from partitioner.topology import Topology

PORT = 29500  # torchrun's default

TORCHRUN = "python -m partitioner.runtime.launch.torchrun"
_WARNING_S = 120  # seconds before the time limit at which a job goes back into the queue
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>[0-5]?\d))?(?::(?P<third>[0-5]?\d))?")
_NO_LIMIT = ("UNLIMITED", "INFINITE")
_LONG_S = 900  # seconds: a job that ran at least this long does not fail at once each time


@dataclass(frozen=True)
class LaunchJob:
    """What a launcher has to start on the nodes of a cluster.

    ``name``: name of the job. ``processes``: number of processes on each node, in the topology's order. ``alike``:
    whether all nodes are equal, so that they may be numbered in any order. ``gpus``: whether the devices are GPUs.
    ``program``: script or module with its arguments, as torchrun takes them. ``max_restarts``: how many times torchrun
    restarts the processes after a failure (only if nodes are alike), and Slurm the whole job.
    """

    name: str
    processes: tuple[int, ...]
    alike: bool
    gpus: bool
    program: tuple[str, ...]
    max_restarts: int

    @property
    def num_nodes(self) -> int:
        return len(self.processes)


def job_of(
    plan: Plan, plan_file: str, script: str | None = None, arguments: Sequence[str] = (), max_restarts: int = 3
) -> LaunchJob:
    """Return the job (what torchrun or Slurm has to start) that runs a training script on the devices of ``plan``.

    ``script``: the script. ``None``: the job runs ``-m partitioner.runtime`` on the plan's file ``plan_file``, with the
    weights that ``plan.weights`` names unless ``arguments`` contain ``--weights``. ``arguments``: command-line
    arguments of the script or module. ``max_restarts``: how often a failed job is started again. Raise
    :class:`PlanError` if the plan has no program, or if ``max_restarts`` is negative.
    """
    plan.program  # noqa: B018 - a plan that is an estimate says so
    if max_restarts < 0:
        raise PlanError(f"max_restarts: expected at least 0, got {max_restarts}")
    own = ("--weights", plan.weights) if script is None and plan.weights and "--weights" not in arguments else ()
    counts = Counter(int(plan.topology.node_of[device]) for device in plan.devices)
    processes = tuple(counts[node] for node in sorted(counts))
    return LaunchJob(
        name=plan.model.lower(),
        processes=processes,
        alike=_has_interchangeable_nodes(plan.topology) and len(set(processes)) == 1,
        gpus=not all(plan.topology.devices[d].kind.startswith("cpu") for d in plan.devices),
        program=(*(("-m", "partitioner.runtime", plan_file) if script is None else (script,)), *own, *arguments),
        max_restarts=max_restarts,
    )


def torchrun_commands(job: LaunchJob) -> str:
    """Return the torchrun command of ``job`` for each host, as text with comments that name the hosts. ``FIRST_HOST``
    stands for the name of the first host.
    """
    program = shlex.join(job.program)
    if job.num_nodes == 1:
        options = f"--standalone --nproc-per-node={job.processes[0]} --max-restarts={job.max_restarts}"
        return f"{TORCHRUN} {options} {program}\n"
    if job.alike:
        options = f"--nnodes={job.num_nodes} --nproc-per-node={job.processes[0]} --max-restarts={job.max_restarts}"
        meeting = f"--rdzv-backend=c10d --rdzv-id={job.name} --rdzv-endpoint=FIRST_HOST:{PORT}"
        return f"# on each of {job.num_nodes} hosts\n{TORCHRUN} {options} {meeting} {program}\n"
    text = ""
    for node, count in enumerate(job.processes):
        options = f"--nnodes={job.num_nodes} --nproc-per-node={count} --node-rank={node}"
        text += f"# on host {node} of the topology\n"
        text += f"{TORCHRUN} {options} --master-addr=FIRST_HOST --master-port={PORT} {program}\n"
    return text


def slurm_script(job: LaunchJob, *, time: str | None = None, partition: str | None = None) -> str:
    """Return a batch script for ``sbatch`` that starts torchrun once on each node for ``job``. If the job fails, or
    shortly before its time limit, the script puts the job back into Slurm's queue.

    ``time``: the time limit as Slurm writes it, such as ``24:00:00``. ``partition``: the Slurm partition. If one of
    them is ``None``, Slurm's default applies. Raise :class:`PlanError` if ``time`` is malformed or so short that the
    job would go back into the queue at once.
    """
    if time is not None:
        _check_time(time)
    even = len(set(job.processes)) == 1
    options = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.processes[0]) if job.gpus and even else None,
        "partition": partition,
        "time": time,
        "mem": "0",
        "signal": f"B:USR1@{_WARNING_S}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue", ""]
    if not even:
        lines.append(f"# Nodes of {', '.join(map(str, job.processes))} devices: ask for them by --nodelist.")
    lines += _SETTINGS
    if job.num_nodes > 1:
        lines += _HEAD
    lines += ["", *_AGAIN, "", *_build_srun_lines(job), *_WAIT]
    lines += [
        f'if [ "$status" -ne 0 ] && {{ [ "$SECONDS" -ge {_LONG_S} ] || '
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; }}; then again; fi',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _check_time(time: str) -> None:
    """Raise :class:`PlanError` if Slurm does not accept ``time`` as a time limit, or if the limit is at most four
    minutes (0 means no limit). A job goes back into the queue two minutes before its limit, so a job with a short limit
    would hardly run."""
    found = _TIME.fullmatch(time)
    if found is None and time.upper() not in _NO_LIMIT:
        raise PlanError(
            "time: expected a limit as Slurm reads it, minutes, hours:minutes:seconds or days-hours:minutes:seconds "
            f"(90, 24:00:00, 2-12:00:00), got {time!r}"
        )
    if found is None:
        return
    days, *parts = (None if part is None else int(part) for part in found.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None or parts[2] is not None:
        seconds = ((days or 0) * 24 + first) * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    if 0 < seconds <= 2 * _WARNING_S:  # 0 is none
        raise PlanError(
            f"time: expected more than {2 * _WARNING_S // 60} minutes, because the job is requeued "
            f"{_WARNING_S // 60} minutes before its time is over; got {time!r}"
        )


_SETTINGS = [
    "# Set here what your cluster needs: modules, the Python environment, NCCL_SOCKET_IFNAME, NCCL_IB_HCA.",
    "# All nodes must see the plan, the weights and the checkpoints.",
    "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
]

_HEAD = [
    'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    f"HEAD_PORT=$(({PORT} + SLURM_JOB_ID % 1000))  # jobs that share a host do not meet",
    "export HEAD_NODE HEAD_PORT",
]

_AGAIN = [
    "# Back into the queue before the time is over; the run goes on from its last checkpoint.",
    'again() { scontrol requeue "$SLURM_JOB_ID"; }',
    "trap again USR1",
]

_WAIT = [
    "srun=$!",
    "while true; do",
    '  wait "$srun"',
    "  status=$?",
    '  kill -0 "$srun" 2>/dev/null || break  # a signal ends the wait, not what is waited for',
    "done",
    "",
    "# What has failed is tried again: always where it had got somewhere, else not for ever.",
]


def _build_srun_lines(job: LaunchJob) -> list[str]:
    """Return the lines of a batch script that start torchrun for ``job`` on all nodes with ``srun``. The started
    command runs in the background of the script, so that the script itself can handle signals."""
    srun = "srun --cpu-bind=none --kill-on-bad-exit=1"
    program = shlex.join(job.program)
    restarts = f"--max-restarts={job.max_restarts}"
    if job.num_nodes == 1:
        return [f"{srun} {TORCHRUN} --standalone --nproc-per-node={job.processes[0]} {restarts} \\", f"  {program} &"]
    if job.alike:
        return [
            "# Nodes are alike and numbered in any order; ranks that fail are started again, all together.",
            f"{srun} {TORCHRUN} --nnodes={job.num_nodes} --nproc-per-node={job.processes[0]} {restarts} \\",
            '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\',
            '  --rdzv-endpoint="$HEAD_NODE:$HEAD_PORT" \\',
            f"  {program} &",
        ]
    return [
        "# The plan tells nodes apart: Slurm's list of nodes has to be in the topology's order.",
        "# This way to meet keeps it, and starts no ranks again; the queue does.",
        f"{srun} bash -c '",
        f"  processes=({' '.join(map(str, job.processes))})",
        f'  exec {TORCHRUN} --nnodes={job.num_nodes} --nproc-per-node="${{processes[$SLURM_NODEID]}}" \\',
        '    --node-rank="$SLURM_NODEID" --master-addr="$HEAD_NODE" --master-port="$HEAD_PORT" "$@"\' torchrun \\',
        f"  {program} &",
    ]


def _has_interchangeable_nodes(topology: Topology) -> bool:
    """Return whether all nodes of ``topology`` have the same devices and links, so that they can be numbered in any
    order.
    """
    apart = topology.overrides or topology.node_overrides or topology.links or len(topology.nodes) > 1
    return not apart and all(level.nodes in (None, 1) for level in topology.levels)
