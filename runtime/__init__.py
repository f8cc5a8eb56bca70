"""Run a program: on the ranks of a cluster (:class:`Engine`), or all of them on one machine (:func:`run_local`).

It needs a plan's program and weights, and nothing of the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# A name is imported when it is first used: the planner reads what a program is without loading what executes it.
_HOMES: dict[str, tuple[str, ...]] = {
    "runtime.bubble": ("timed",),
    "runtime.checkpoint.series": ("Checkpoints",),
    "runtime.collect": ("Run",),
    "runtime.data": ("Loader",),
    "runtime.engine": ("Engine",),
    "runtime.errors": (
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
        "WeightsError",
    ),
    "runtime.local": ("run_local", "run_threads"),
    "runtime.metrics": ("StepLog",),
    "runtime.pool": ("LocalRanks",),
    "runtime.program": ("Program", "RankProgram"),
    "runtime.restarts": ("init_process_group",),
    "runtime.spikes": ("LossSpikes",),
    "runtime.watch": ("Monitor", "Watch"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "debug":
        return import_module("runtime.debug")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
