"""Run a program: on the ranks of a cluster (:class:`Engine`), or all of them on one machine (:func:`run_local`).

It needs a plan's program and weights, and nothing of the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime import debug
    from runtime.checkpoint.series import Checkpoints
    from runtime.comm.rendezvous import init_process_group
    from runtime.engine.data_loader import Loader
    from runtime.engine.engine import Engine
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
    from runtime.launch.local import run_local, run_threads
    from runtime.launch.process_pool import LocalRanks, Run
    from runtime.observe.measured_bubble import timed
    from runtime.observe.metrics import LossSpikes, StepLog
    from runtime.program.program import Program, RankProgram
    from runtime.watch.stragglers import Monitor
    from runtime.watch.watchdog import Watch

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
    "runtime.observe.measured_bubble": ("timed",),
    "runtime.checkpoint.series": ("Checkpoints",),
    "runtime.launch.process_pool": ("LocalRanks", "Run"),
    "runtime.engine.data_loader": ("Loader",),
    "runtime.engine.engine": ("Engine",),
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
    "runtime.launch.local": ("run_local", "run_threads"),
    "runtime.observe.metrics": ("LossSpikes", "StepLog"),
    "runtime.program.program": ("Program", "RankProgram"),
    "runtime.comm.rendezvous": ("init_process_group",),
    "runtime.watch.stragglers": ("Monitor",),
    "runtime.watch.watchdog": ("Watch",),
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
