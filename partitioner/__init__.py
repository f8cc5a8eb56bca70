"""From an unmodified model and a description of the hardware to proven programs for every rank."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.api import partition
    from partitioner.cluster_size import Largest, Size, SizeError, Sizing, largest_that_fits, size_cluster
    from partitioner.constraints import Constraints
    from partitioner.errors import CapacityError, ConstraintError, PlanError, TopologyError
    from partitioner.plan import Candidate, Certificate, Estimate, Plan
    from partitioner.plans.files import PlanFileError
    from partitioner.plans.reference import Reference, run_reference
    from partitioner.plans.verify import Verification
    from partitioner.schedules.actions import ScheduleError
    from partitioner.schedules.csv_table import ScheduleTable
    from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare
    from partitioner.topology import Topology
    from passes.errors import (
        CaptureError,
        InputsError,
        InternalError,
        PartitionError,
        ResourceError,
        RuleError,
        UnsupportedError,
        UserCodeError,
    )

__all__ = [
    "Candidate",
    "CapacityError",
    "CaptureError",
    "Certificate",
    "ConstraintError",
    "Constraints",
    "Estimate",
    "InputsError",
    "InternalError",
    "Largest",
    "PartitionError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PreparedModel",
    "Reference",
    "ResourceError",
    "RuleError",
    "ScheduleError",
    "ScheduleTable",
    "Size",
    "SizeError",
    "Sizing",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "UserCodeError",
    "Verification",
    "largest_that_fits",
    "partition",
    "prepare",
    "run_reference",
    "size_cluster",
]

# A name is imported when it is first used: the solver alone then starts without PyTorch, which takes seconds.
_HOMES: dict[str, tuple[str, ...]] = {
    "partitioner.api": ("partition",),
    "partitioner.constraints": ("Constraints",),
    "partitioner.errors": ("CapacityError", "ConstraintError", "PlanError", "TopologyError"),
    "partitioner.cluster_size": ("Largest", "Size", "SizeError", "Sizing", "largest_that_fits", "size_cluster"),
    "partitioner.plan": ("Candidate", "Certificate", "Estimate", "Plan"),
    "partitioner.plans.files": ("PlanFileError",),
    "partitioner.solve.evaluate.prepared_model": ("PreparedModel", "prepare"),
    "partitioner.plans.reference": ("Reference", "run_reference"),
    "partitioner.schedules.actions": ("ScheduleError",),
    "partitioner.schedules.csv_table": ("ScheduleTable",),
    "partitioner.topology": ("Topology",),
    "partitioner.plans.verify": ("Verification",),
    "passes.errors": (
        "CaptureError",
        "InputsError",
        "InternalError",
        "PartitionError",
        "ResourceError",
        "RuleError",
        "UnsupportedError",
        "UserCodeError",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
