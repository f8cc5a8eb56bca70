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
    """What the executors of an engine share. ``execution``: the mode. ``compile``: whether parts of blocks are compiled
    by Inductor, or the name of another backend of ``torch.compile``. ``tape``: records steps; ``None``: steps are not
    recorded.
    """

    execution: Execution
    compile: bool | str
    tape: Tape | None

    def record(self, communicator: Communicator) -> Communicator:
        """Return ``communicator``, or one that records its collectives if steps are recorded."""
        return communicator if self.tape is None else RecordedCommunicator(self.tape, communicator)


def choose_execution(
    execution: Execution | None, compile: bool | str, device: torch.device, planned: str | None = None
) -> ExecutionSetup:
    """Return how an engine on ``device`` executes instructions.

    ``execution``: what the user asks for; ``None``: compiled if ``compile`` is set, otherwise ``planned``, what the
    plan says. ``compile``: the user's option, or the name of a backend. Raise :class:`LaunchError` for an unknown mode,
    or if the two contradict each other.
    """
    asked = execution or ("compiled" if compile else planned or "eager")
    if asked not in get_args(Execution):
        raise LaunchError(f"execution must be one of {', '.join(get_args(Execution))}; got {asked!r}")
    execution = cast(Execution, asked)
    if execution == "eager" and compile:
        raise LaunchError(
            f"execution is 'eager' and compile is {compile!r}; leave one of them out, or pass execution='compiled'"
        )
    if execution != "graph":
        return ExecutionSetup(execution, compile or execution == "compiled", None)
    if device.type != "cuda":
        _log.warning(
            "execution='graph' on %s: operators are recorded and repeated one by one, which is a check and not faster",
            device.type,
        )
        if compile:
            raise LaunchError(
                f"execution is 'graph' and compile is {compile!r} on {device.type}: compiled parts are recorded on "
                "GPUs alone; leave compile out"
            )
        return ExecutionSetup(execution, False, Tape(capture_for(device)))
    return ExecutionSetup(execution, compile or True, Tape(capture_for(device)))
