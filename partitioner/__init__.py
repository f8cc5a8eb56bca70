"""From an unmodified model and a description of the hardware to proven programs for every rank."""

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.errors import CapacityError, ConstraintError, PlanError, TopologyError
from partitioner.plan import Candidate, Certificate, Estimate, Plan
from partitioner.planfile import PlanFileError
from partitioner.prepared import PreparedModel, prepare
from partitioner.reference import Reference, run_reference
from partitioner.sizing import Size, Sizing, size_cluster
from partitioner.topology import Topology
from partitioner.verify import Verification
from passes.errors import CaptureError, InputsError, PartitionError, RuleError, UnsupportedError

__all__ = [
    "Candidate",
    "CapacityError",
    "CaptureError",
    "Certificate",
    "ConstraintError",
    "Constraints",
    "Estimate",
    "InputsError",
    "PartitionError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PreparedModel",
    "Reference",
    "RuleError",
    "Size",
    "Sizing",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "Verification",
    "partition",
    "prepare",
    "run_reference",
    "size_cluster",
]
