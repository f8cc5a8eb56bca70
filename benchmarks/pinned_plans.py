"""Pinned plans beside free ones: ``python benchmarks/pinned_plans.py [--only NAME ...] [--variants N]``.

Each job of ``benchmarks/planning.py`` is planned free, and again with some of what the free plan chose pinned to
something else: the mesh, the schedule, ZeRO, recomputation, the microbatch. One row a variant: seconds of a step of
the pinned plan and of the free one, by estimate and by the simulation of their programs, the bound of the free plan's
certificate, and a verdict. ``FASTER``: the pinned plan is faster than the free one by more than 1 %. ``BELOW``: it is
faster than the certificate's bound, though the certificate names nothing of what is pinned as beyond it. The last line
is one JSON object: ``variants``, ``planned`` and the names of those that are faster or below. The status is 1 where
there are any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import dataclass
from typing import Any

import torch
from planning import JOBS, make_job_model, make_job_topology

from partitioner import Constraints, Plan, partition
from partitioner.passes.errors import PartitionError
from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare

VARIANTS: tuple[dict[str, Any], ...] = (
    {"tp": 8, "pp": 16, "schedule": "interleaved"},
    {"tp": 8, "pp": 8, "schedule": "interleaved", "virtual_stages": 4},
    {"tp": 8, "pp": 8, "schedule": "1f1b"},
    {"tp": 4, "pp": 4, "schedule": "interleaved"},
    {"tp": 2, "pp": 4, "schedule": "zb-1p"},
    {"tp": 1, "pp": 2, "schedule": "zb-v"},
    {"tp": 1, "pp": 4, "schedule": "zb-v"},
    {"pp": 1, "zero": 3},
    {"pp": 1, "zero": 1},
    {"pp": 2, "recompute": "selective"},
    {"cp": 2},
    {"recompute": "full"},
    {"recompute": "none"},
    {"zero": 2},
    {"microbatch_size": 1},
    {"tp": 1, "schedule": "interleaved"},
)
_ROUNDING = 1e-9
_FASTER = 0.01  # of the free plan's step
_CHEAP = ("llama-8b-64", "llama-8b-8", "llama-405b-16384", "llama-8b-h100-a100")


@dataclass(frozen=True)
class Variant:
    """A pinned plan beside the free plan of its job: seconds of a step."""

    job: str
    pinned: dict[str, Any]
    step_s: float
    simulated_s: float | None
    free_s: float
    free_simulated_s: float | None
    bound_s: float
    is_beyond: bool

    @property
    def is_faster(self) -> bool:
        return self.step_s < self.free_s * (1 - _FASTER)

    @property
    def is_below(self) -> bool:
        return not self.is_beyond and self.step_s < self.bound_s * (1 - _ROUNDING)

    def __str__(self) -> str:
        verdict = " ".join(["FASTER"] * self.is_faster + ["BELOW"] * self.is_below)
        pins = ", ".join(f"{name}={value}" for name, value in self.pinned.items())
        return (
            f"{self.job:20} {pins:44} {_seconds(self.step_s)} {_seconds(self.simulated_s)} {_seconds(self.free_s)} "
            f"{_seconds(self.free_simulated_s)} {_seconds(self.bound_s)} {verdict}"
        )


def _seconds(seconds: float | None) -> str:
    return f"{seconds:9.4g}" if seconds is not None else f"{'':9}"


def _plan(name: str, prepared: PreparedModel, constraints: Constraints) -> Plan:
    return partition(
        prepared, make_job_topology(JOBS[name]), global_batch=JOBS[name].global_batch, constraints=constraints
    )


def of_job(name: str, variants: int) -> list[Variant]:
    """The variants of a job that have a plan, told of as they are planned."""
    job = JOBS[name]
    ids = torch.empty((1, job.seq), dtype=torch.int64, device="meta")
    prepared = prepare(make_job_model(job), {"input_ids": ids, "labels": ids}, precision="bf16")
    free = _plan(name, prepared, Constraints())
    found = []
    for pinned in VARIANTS[:variants]:
        try:
            plan = _plan(name, prepared, Constraints(**pinned))
        except PartitionError as error:
            print(f"{name:20} {pinned}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        beyond = any(constraint in free.certificate.beyond for constraint in pinned)
        times = plan.estimate.step_time, plan.estimate.simulated
        free_times = free.estimate.step_time, free.estimate.simulated
        found.append(Variant(name, pinned, *times, *free_times, free.certificate.bound, beyond))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=_CHEAP, help="these jobs")
    parser.add_argument("--variants", type=int, default=len(VARIANTS), help="so many of each job")
    options = parser.parse_args()
    print(f"{'job':20} {'pinned':44} {'step':>9} {'simulated':>9} {'free':>9} {'simulated':>9} {'bound':>9}")
    found: list[Variant] = []
    for name in options.only:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found += pool.apply(of_job, (name, options.variants))
    faults = [variant for variant in found if variant.is_faster or variant.is_below]
    names = [f"{variant.job} {variant.pinned}" for variant in faults]
    print(json.dumps({"variants": options.variants * len(options.only), "planned": len(found), "faults": names}))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
