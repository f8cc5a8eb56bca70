"""Run a program: on the ranks of a cluster (:class:`Engine`), or all of them on one machine (:func:`run_local`).

It needs a plan's program and weights, and nothing of the planner.
"""

from runtime import debug
from runtime.bubble import timed
from runtime.checkpoint.series import Checkpoints
from runtime.collect import Run
from runtime.data import Loader
from runtime.engine import Engine
from runtime.errors import (
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
    WeightsError,
)
from runtime.local import run_local, run_threads
from runtime.metrics import StepLog
from runtime.pool import LocalRanks
from runtime.program import Program, RankProgram
from runtime.restarts import init_process_group
from runtime.spikes import LossSpikes
from runtime.watch import Monitor, Watch

__all__ = [
    "AgreementError",
    "BackwardError",
    "BatchError",
    "CheckpointError",
    "Checkpoints",
    "DTensorError",
    "DamagedCheckpointError",
    "Engine",
    "InstructionError",
    "LaunchError",
    "Loader",
    "LocalRanks",
    "LossSpikes",
    "Monitor",
    "OffloadError",
    "OptimizerError",
    "Program",
    "RankError",
    "RankProgram",
    "RankTimeout",
    "Run",
    "StepLog",
    "Watch",
    "WeightsError",
    "debug",
    "init_process_group",
    "run_local",
    "run_threads",
    "timed",
]
