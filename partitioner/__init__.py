"""From an unmodified model and a description of the hardware to proven programs for every rank."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.actions import ScheduleError
    from partitioner.api import partition
    from partitioner.constraints import Constraints
    from partitioner.errors import CapacityError, ConstraintError, PlanError, TopologyError
    from partitioner.largest import Largest, largest_that_fits
    from partitioner.plan import Candidate, Certificate, Estimate, Plan
    from partitioner.planfile import PlanFileError
    from partitioner.prepared import PreparedModel, prepare
    from partitioner.reference import Reference, run_reference
    from partitioner.schedule_table import ScheduleTable
    from partitioner.sizing import Size, SizeError, Sizing, size_cluster
    from partitioner.topology import Topology
    from partitioner.verify import Verification
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
    "partitioner.largest": ("Largest", "largest_that_fits"),
    "partitioner.plan": ("Candidate", "Certificate", "Estimate", "Plan"),
    "partitioner.planfile": ("PlanFileError",),
    "partitioner.prepared": ("PreparedModel", "prepare"),
    "partitioner.reference": ("Reference", "run_reference"),
    "partitioner.actions": ("ScheduleError",),
    "partitioner.schedule_table": ("ScheduleTable",),
    "partitioner.sizing": ("Size", "SizeError", "Sizing", "size_cluster"),
    "partitioner.topology": ("Topology",),
    "partitioner.verify": ("Verification",),
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
