"""The step time that the search minimises beside the simulation of the program: ``python benchmarks/step_times.py``.

Plans the jobs of ``benchmarks/planning.py``, and the same with some constraints, each in a process of its own, and
prints a table: estimate, simulation, and by how much they differ. ``--only``: these jobs, with their variants.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch

try:
    from benchmarks.planning import JOBS, make_job_model, make_job_topology
except ImportError:  # run as a script
    from planning import JOBS, make_job_model, make_job_topology  # type: ignore[no-redef]

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama-405b-16384": [
        {"pp": 8, "schedule": "interleaved"},
        {"tp": 8, "pp": 16, "schedule": "interleaved", "virtual_stages": 8},
        {"context": "ring"},
        {"context": "all_gather"},
        {"context": "ulysses"},
    ],
    "llama-8b-64": [
        {"tp": 8, "pp": 1},
        {"pp": 4, "tp": 2, "schedule": "1f1b"},
        {"pp": 4, "tp": 2, "schedule": "interleaved"},
        {"pp": 8, "tp": 8, "schedule": "interleaved", "virtual_stages": 4},
        {"pp": 8, "tp": 1, "schedule": "zb-1p"},
        {"pp": 4, "tp": 1, "schedule": "gpipe"},
        {"zero": 0, "pp": 2},
        {"zero": 1, "pp": 1},
        {"zero": 3, "pp": 1},
        {"zero": 3, "pp": 1, "dp_shard": 8},
        {"cp": 2, "pp": 1, "context": "ring"},
        {"cp": 2, "pp": 1, "context": "all_gather"},
        {"recompute": "full", "pp": 2},
        {"recompute": "none", "pp": 2, "tp": 4},
    ],
    "llama-8b-8": [
        {"tp": 8},
        {"pp": 8},
        {"zero": 3, "pp": 1},
        {"pp": 2, "offload": ("optimizer",)},
        {"pp": 1, "offload": ("optimizer", "activations")},
    ],
    "mixtral-8x22b-128": [{"ep": 8, "tp": 1, "pp": 8, "schedule": "1f1b"}],
}


def _jobs(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        for constraints in ({}, *VARIANTS.get(name, [])):
            yield name, constraints


def measure(name: str, fixed: dict[str, Any]) -> dict[str, Any]:
    """Plan one job in this process."""
    from partitioner import Constraints, partition
    from partitioner.passes.errors import PartitionError
    from partitioner.simulate.program_time import plan_timeline

    job = JOBS[name]
    ids = torch.empty((1, job.seq), dtype=torch.int64, device="meta")
    said = {"job": name, "constraints": fixed}
    try:
        plan = partition(
            make_job_model(job),
            make_job_topology(job),
            {"input_ids": ids, "labels": ids},
            global_batch=job.global_batch,
            precision="bf16",
            constraints=Constraints(**fixed),
        )
    except PartitionError as error:
        return said | {"reason": str(error).partition("\n")[0]}
    simulated = plan_timeline(plan).step_time
    return said | {
        "mesh": {axis: size for axis, size in plan.mesh.items() if size > 1},
        "schedule": f"{plan.chosen.schedule}, {plan.chosen.virtual_stages} a rank",
        "zero": plan.chosen.zero,
        "estimate_s": plan.estimate.step_time,
        "simulated_s": simulated,
        "difference": simulated / plan.estimate.step_time - 1,
    }


def _line(row: dict[str, Any]) -> str:
    fixed = " ".join(f"{key}={value}" for key, value in row["constraints"].items())
    if "reason" in row:
        return f"| {row['job']} | {fixed} | {row['reason'][:70]} | | | |"
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    layout = f"{mesh}, {row['schedule']}, ZeRO {row['zero']}"
    times = f"{row['estimate_s']:.4g} s | {row['simulated_s']:.4g} s | {row['difference']:+.2%}"
    return f"| {row['job']} | {fixed} | {layout} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a job instead of the table")
    parser.add_argument("--only", nargs="+", choices=JOBS, help="these jobs")
    options = parser.parse_args()
    if not options.json:
        print("| job | fixed | layout | estimate | simulation | difference |\n|---|---|---|---|---|---|")
    for name, fixed in _jobs(options.only or list(JOBS)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (name, fixed))
        print(json.dumps(row) if options.json else _line(row), flush=True)


if __name__ == "__main__":
    main()
