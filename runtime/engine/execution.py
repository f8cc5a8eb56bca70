"""How an engine executes instructions: operator by operator, compiled, or recorded and replayed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.replay.capture import capture_for
from partitioner.runtime.replay.tape import RecordedCommunicator, Tape

Execution = Literal["eager", "compiled", "graph"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutionSetup:
    """How the executors of one engine run their programs. ``execution``: the mode: ``"eager"`` (operator by operator),
    ``"compiled"``, or ``"graph"`` (one step is recorded and then replayed). ``compile``: whether parts of blocks are
    compiled by Inductor, or the name of another backend of ``torch.compile``. ``tape``: the recording of steps;
    ``None``: steps are not recorded.
    """

    execution: Execution
    compile: bool | str
    tape: Tape | None

    def record(self, communicator: Communicator) -> Communicator:
        """Return the communicator that an executor must use: ``communicator`` itself or, if steps are recorded and
        replayed, a wrapper of it that also records its collectives.
        """
        return communicator if self.tape is None else RecordedCommunicator(self.tape, communicator)


def choose_execution(
    execution: Execution | None, compile: bool | str | None, device: torch.device, planned: str | None = None
) -> ExecutionSetup:
    """Return how an engine on ``device`` executes instructions. Raise :class:`LaunchError` for an unknown mode, or if
    ``execution`` and ``compile`` contradict each other.

    Args:
        execution: the user's mode: ``"eager"``, ``"compiled"`` or ``"graph"``; ``None``: as ``compile`` says.
        compile: whether to compile, or the name of a backend of ``torch.compile``. If ``execution`` and ``compile`` are
            ``None``, the mode is ``planned``.
        planned: the mode in the plan's constraints; ``None``: compiled on a GPU and eager on a CPU.
    """
    asked: str | None = execution
    if asked is None and compile is not None:
        asked = "compiled" if compile else "eager"
    asked = asked or planned or ("compiled" if device.type == "cuda" else "eager")
    if asked not in get_args(Execution):
        raise LaunchError(f"execution must be one of {', '.join(get_args(Execution))}; got {asked!r}")
    execution = cast(Execution, asked)
    if compile is not None and execution == ("eager" if compile else "compiled"):
        raise LaunchError(
            f"execution is {execution!r} and compile is {compile!r}, which contradict each other; leave one of them out"
        )
    if execution != "graph":
        return ExecutionSetup(execution, compile or execution == "compiled", None)
    if device.type != "cuda":
        _log.warning(
            "execution='graph' on %s: operators are recorded and replayed one by one, which checks the "
            "recording but is not faster",
            device.type,
        )
        if compile:
            raise LaunchError(
                f"execution is 'graph' and compile is {compile!r} on {device.type}: compiled parts are recorded on "
                "GPUs alone; leave compile out"
            )
        return ExecutionSetup(execution, False, Tape(capture_for(device)))
    return ExecutionSetup(execution, True if compile is None else compile, Tape(capture_for(device)))
