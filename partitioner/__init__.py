"""Plan an unmodified PyTorch model for a cluster, and run the plan: every rank gets a proven program.

Plan with :func:`partition`, run with :func:`run_local` or :class:`Engine`. Users need only the names in this module;
the packages below it are for contributors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from partitioner.api import partition
    from partitioner.check.check import LayoutCheck, LayoutDifference, check_layout
    from partitioner.check.setup import CheckSetupError, Setup, StepResult
    from partitioner.cluster_size import (
        Fit,
        Largest,
        Size,
        SizeError,
        Sizing,
        check_fit,
        largest_that_fits,
        size_cluster,
    )
    from partitioner.constraints import Constraints
    from partitioner.errors import CapacityError, ConstraintError, PlanError, TopologyError
    from partitioner.execution_profile import ExecutionProfile
    from partitioner.interop.formats import read_layout, write_layout
    from partitioner.interop.layout import (
        ContradictionError,
        LayoutError,
        OptionValueError,
        TrainingLayout,
        UnknownOptionError,
        UnusedOption,
    )
    from partitioner.interop.predict import Prediction, predict_layout
    from partitioner.passes.allowed_operators import allow_operators
    from partitioner.passes.errors import (
        CaptureError,
        InputsError,
        InternalError,
        PartitionError,
        ResourceError,
        RuleError,
        UnrolledLoopWarning,
        UnsupportedError,
        UntrustedOperatorError,
        UserCodeError,
    )
    from partitioner.passes.rules import by_expert, by_group, rule
    from partitioner.passes.rules.verify import check_strategies
    from partitioner.plan import Candidate, Certificate, Estimate, Plan
    from partitioner.plans.files import PlanFileError
    from partitioner.plans.reference import Reference, run_reference
    from partitioner.plans.verify import Verification
    from partitioner.pretrained.adapters import Lora, save_adapters
    from partitioner.pretrained.configuration import HubError, PretrainedError, RemoteCodeError
    from partitioner.pretrained.generation import GenerationError
    from partitioner.pretrained.load import PretrainedModel, load_pretrained, partition_pretrained
    from partitioner.programs.requests import Evaluate, Generate, ShapeError, Shapes
    from partitioner.runtime import debug
    from partitioner.runtime.checkpoint.series import Checkpoints
    from partitioner.runtime.comm.rendezvous import init_process_group
    from partitioner.runtime.engine.data_loader import Loader
    from partitioner.runtime.engine.engine import Engine
    from partitioner.runtime.errors import (
        AgreementError,
        BackwardError,
        BatchError,
        CheckpointError,
        DamagedCheckpointError,
        DTensorError,
        InstructionError,
        LaunchError,
        OffloadError,
        OptimizerError,
        RankError,
        RankTimeout,
        ReplayError,
        WeightsError,
    )
    from partitioner.runtime.launch.local import run_local, run_threads
    from partitioner.runtime.launch.process_pool import LocalRanks, Run
    from partitioner.runtime.observe.measured_bubble import timed
    from partitioner.runtime.observe.metrics import LossSpikes, StepLog
    from partitioner.runtime.program.program import Program, RankProgram
    from partitioner.runtime.watch.stragglers import Monitor
    from partitioner.runtime.watch.watchdog import Watch
    from partitioner.schedules.actions import ScheduleError
    from partitioner.schedules.csv_table import ScheduleTable
    from partitioner.solve.evaluate.prepared_model import PreparedModel, prepare
    from partitioner.topology import Topology
    from partitioner.trainers import PartitionedLoop as PartitionedLoop
    from partitioner.trainers import PartitionedStrategy as PartitionedStrategy
    from partitioner.trainers import PartitionedTrainer as PartitionedTrainer
    from partitioner.trainers import TrainerError

__all__ = [
    "AgreementError",
    "BackwardError",
    "BatchError",
    "Candidate",
    "CapacityError",
    "CaptureError",
    "Certificate",
    "CheckSetupError",
    "CheckpointError",
    "Checkpoints",
    "ConstraintError",
    "Constraints",
    "ContradictionError",
    "DTensorError",
    "DamagedCheckpointError",
    "Engine",
    "Estimate",
    "Evaluate",
    "ExecutionProfile",
    "Fit",
    "Generate",
    "GenerationError",
    "HubError",
    "InputsError",
    "InstructionError",
    "InternalError",
    "Largest",
    "LaunchError",
    "LayoutCheck",
    "LayoutDifference",
    "LayoutError",
    "Loader",
    "LocalRanks",
    "Lora",
    "LossSpikes",
    "Monitor",
    "OffloadError",
    "OptimizerError",
    "OptionValueError",
    "PartitionError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "Prediction",
    "PreparedModel",
    "PretrainedError",
    "PretrainedModel",
    "Program",
    "RankError",
    "RankProgram",
    "RankTimeout",
    "Reference",
    "RemoteCodeError",
    "ReplayError",
    "ResourceError",
    "RuleError",
    "Run",
    "ScheduleError",
    "ScheduleTable",
    "Setup",
    "ShapeError",
    "Shapes",
    "Size",
    "SizeError",
    "Sizing",
    "StepLog",
    "StepResult",
    "Topology",
    "TopologyError",
    "TrainerError",
    "TrainingLayout",
    "UnknownOptionError",
    "UnrolledLoopWarning",
    "UnsupportedError",
    "UntrustedOperatorError",
    "UnusedOption",
    "UserCodeError",
    "Verification",
    "Watch",
    "WeightsError",
    "allow_operators",
    "by_expert",
    "by_group",
    "check_fit",
    "check_layout",
    "check_strategies",
    "debug",
    "init_process_group",
    "largest_that_fits",
    "load_pretrained",
    "partition",
    "partition_pretrained",
    "predict_layout",
    "prepare",
    "read_layout",
    "rule",
    "run_local",
    "run_reference",
    "run_threads",
    "save_adapters",
    "size_cluster",
    "timed",
    "write_layout",
]

# Names that need an optional package, so that `from partitioner import *` works without it.
OPTIONAL = ("PartitionedLoop", "PartitionedStrategy", "PartitionedTrainer")

# A name is imported when it is first used: a command that needs no PyTorch then starts without it.
_HOMES: dict[str, tuple[str, ...]] = {
    "partitioner.api": ("partition",),
    "partitioner.check.check": ("LayoutDifference", "LayoutCheck", "check_layout"),
    "partitioner.check.setup": ("CheckSetupError", "Setup", "StepResult"),
    "partitioner.cluster_size": (
        "Fit",
        "Largest",
        "Size",
        "SizeError",
        "Sizing",
        "check_fit",
        "largest_that_fits",
        "size_cluster",
    ),
    "partitioner.constraints": ("Constraints",),
    "partitioner.errors": ("CapacityError", "ConstraintError", "PlanError", "TopologyError"),
    "partitioner.execution_profile": ("ExecutionProfile",),
    "partitioner.interop.formats": ("read_layout", "write_layout"),
    "partitioner.interop.layout": (
        "ContradictionError",
        "LayoutError",
        "OptionValueError",
        "TrainingLayout",
        "UnknownOptionError",
        "UnusedOption",
    ),
    "partitioner.interop.predict": ("Prediction", "predict_layout"),
    "partitioner.passes.allowed_operators": ("allow_operators",),
    "partitioner.passes.errors": (
        "CaptureError",
        "InputsError",
        "InternalError",
        "PartitionError",
        "ResourceError",
        "RuleError",
        "UnrolledLoopWarning",
        "UnsupportedError",
        "UntrustedOperatorError",
        "UserCodeError",
    ),
    "partitioner.passes.rules": ("by_expert", "by_group", "rule"),
    "partitioner.passes.rules.verify": ("check_strategies",),
    "partitioner.plan": ("Candidate", "Certificate", "Estimate", "Plan"),
    "partitioner.plans.files": ("PlanFileError",),
    "partitioner.plans.reference": ("Reference", "run_reference"),
    "partitioner.plans.verify": ("Verification",),
    "partitioner.pretrained.adapters": ("Lora", "save_adapters"),
    "partitioner.pretrained.configuration": ("HubError", "PretrainedError", "RemoteCodeError"),
    "partitioner.pretrained.generation": ("GenerationError",),
    "partitioner.pretrained.load": ("PretrainedModel", "load_pretrained", "partition_pretrained"),
    "partitioner.programs.requests": ("Evaluate", "Generate", "ShapeError", "Shapes"),
    "partitioner.runtime.debug": ("debug",),  # the module itself
    "partitioner.runtime.checkpoint.series": ("Checkpoints",),
    "partitioner.runtime.comm.rendezvous": ("init_process_group",),
    "partitioner.runtime.engine.data_loader": ("Loader",),
    "partitioner.runtime.engine.engine": ("Engine",),
    "partitioner.runtime.errors": (
        "AgreementError",
        "BackwardError",
        "BatchError",
        "CheckpointError",
        "DTensorError",
        "DamagedCheckpointError",
        "InstructionError",
        "LaunchError",
        "OffloadError",
        "OptimizerError",
        "RankError",
        "RankTimeout",
        "ReplayError",
        "WeightsError",
    ),
    "partitioner.runtime.launch.local": ("run_local", "run_threads"),
    "partitioner.runtime.launch.process_pool": ("LocalRanks", "Run"),
    "partitioner.runtime.observe.measured_bubble": ("timed",),
    "partitioner.runtime.observe.metrics": ("LossSpikes", "StepLog"),
    "partitioner.runtime.program.program": ("Program", "RankProgram"),
    "partitioner.runtime.watch.stragglers": ("Monitor",),
    "partitioner.runtime.watch.watchdog": ("Watch",),
    "partitioner.schedules.actions": ("ScheduleError",),
    "partitioner.schedules.csv_table": ("ScheduleTable",),
    "partitioner.solve.evaluate.prepared_model": ("PreparedModel", "prepare"),
    "partitioner.topology": ("Topology",),
    "partitioner.trainers": ("PartitionedLoop", "PartitionedStrategy", "PartitionedTrainer", "TrainerError"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import and return the public object ``name`` when it is first used. Raise :class:`AttributeError` for an unknown
    name."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOME[name])
    value = globals()[name] = module if name == "debug" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *OPTIONAL, "__version__"]
