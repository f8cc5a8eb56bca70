"""Run a program: on the ranks of a cluster (:class:`Engine`), or all of them on one machine (:func:`run_local`).

It needs a plan's program and weights, and nothing of the planner.
"""

from runtime.bubble import timed
from runtime.collect import Run
from runtime.engine import Engine
from runtime.errors import BatchError, InstructionError, LaunchError, RankError, RankTimeout, WeightsError
from runtime.local import run_local, run_threads
from runtime.pool import LocalRanks
from runtime.program import Program, RankProgram

__all__ = [
    "BatchError",
    "Engine",
    "InstructionError",
    "LaunchError",
    "LocalRanks",
    "Program",
    "RankError",
    "RankProgram",
    "RankTimeout",
    "Run",
    "WeightsError",
    "run_local",
    "run_threads",
    "timed",
]
