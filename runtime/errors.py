"""Errors of a running program, with their cause and a remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from partitioner.passes.errors import PartitionError

DIED = "ProcessDied"  # this and the following are kinds of failures without an exception on a rank

STALLED = "Stalled"
LOST = "ConnectionLost"
LEFT = "LeftEarly"


class BatchError(PartitionError):
    """Raised if a batch does not match the plan: a tensor is missing, or has another shape or dtype."""


class WeightsError(PartitionError):
    """Raised if the model's weights do not match the plan. The message names the first differences."""


class CheckpointError(WeightsError):
    """Raised if a checkpoint cannot be written, or if it is damaged, incomplete or of another model. The message names
    the file and a remedy. ``elsewhere``: whether the failure was on another rank, so that this rank only reports it.
    """

    elsewhere = False

    @classmethod
    def from_other_rank(cls, message: str) -> Self:
        """Return an error with the text ``message`` and ``elsewhere`` set, for a rank that fails because another rank
        failed.
        """
        error = cls(message)
        error.elsewhere = True
        return error


class DamagedCheckpointError(CheckpointError):
    """Raised if a file of a checkpoint is missing, or if its contents are not the written ones."""


class LaunchError(PartitionError):
    """Raised if a program cannot be started, for example because of a wrong number of ranks or a file without a
    plan.
    """


class ReplayError(PartitionError):
    """Raised if a step that is recorded for replay executes an operation that a replay cannot repeat."""


class OffloadError(LaunchError):
    """Raised if optimizer states cannot be kept on disk: for example, there is no folder or no space in it, or the
    optimizer cannot update one parameter after another.
    """


class BackwardError(PartitionError):
    """Raised if the user calls ``backward()`` on the loss that :meth:`Engine.step` returned: the step has already
    computed all gradients.
    """


class OptimizerError(PartitionError):
    """Raised if an optimizer would update the shards of a parameter differently from the whole parameter, which gives
    wrong weights.
    """


class AgreementError(PartitionError):
    """Raised if ranks have diverged: gradients were changed differently on each rank, or replicas of a parameter
    differ.
    """


class DTensorError(PartitionError):
    """Raised if the layout of a parameter cannot be expressed as a ``torch.distributed.tensor.DTensor``. The message
    names the first such parameter and the reason.
    """


class CommunicationError(RuntimeError):
    """Raised in a communication operation if another rank, which is the cause, has failed or has not entered the
    operation in time.
    """


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, and where. ``str()`` formats it as one line.

    Args:
        rank: global rank that failed.
        error: text of the error.
        kind: class name of the error. Without an exception: ``"ProcessDied"`` (the process or host ended),
            ``"Stalled"`` (it made no progress), ``"ConnectionLost"`` (connections broke, but no process is known to
            have ended) or ``"LeftEarly"`` (the rank's script ended before the others').
        instruction: the failed instruction of the program as text, such as ``0F3`` for stage 0, forward, microbatch 3;
            if the rank did not run its program, its activity instead.
        index: position of the instruction in the rank's list, from 0; ``None`` outside of the program.
        call: module path of the part of the model that ran.
        node: name of the graph node that ran.
        path: module path of the node.
        source: source line, as ``file:line``.
        traceback: formatted Python traceback, or empty.
        secondary: whether the failure is a consequence of another rank's failure.
        step: training step, counted from 1; ``None`` if unknown.
    """

    rank: int
    error: str
    kind: str
    instruction: str = ""
    index: int | None = None
    call: str = ""
    node: str = ""
    path: str = ""
    source: str = ""
    traceback: str = ""
    secondary: bool = False
    step: int | None = None  # counted from 1; outside of a step, the last step

    def __str__(self) -> str:
        """Return one line: rank, instruction, step, module, graph node and source line, as far as known, then kind and
        error.
        """
        where = [f"rank {self.rank}"]
        if self.index is not None:
            where.append(f"instruction {self.index}: {self.instruction}")
        elif self.instruction:
            where.append(self.instruction)
        if self.step is not None:
            where.append(f"step {self.step}")
        if self.call:
            where.append(f"call {self.call}")
        if self.node:
            where.append(f"node {self.node}")
        if self.path and self.path != self.call:
            where.append(f"module {self.path}")
        if self.source:
            where.append(self.source)
        return f"{', '.join(where)}: {self.kind}: {' '.join(self.error.split())}"

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


class InstructionError(RuntimeError):
    """Raised if an instruction of this rank's program failed. ``__cause__`` is the original error, ``failure`` the
    description of the error and of its position.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type[Self], tuple[Failure]]:
        return type(self), (self.failure,)


class RankError(PartitionError):
    """Raised in the launching process if a rank failed, after the other ranks were ended. The message ends with the
    first cause. ``failures``: all failures. ``failure``: the first one that is not a consequence of another rank's
    failure. ``world_size``: number of ranks.
    """

    def __init__(self, failures: tuple[Failure, ...], world_size: int) -> None:
        self.failures = failures
        self.failure = find_first_cause(failures)
        self.world_size = world_size
        tail = f"\n{self.failure.traceback.rstrip()}\n" if self.failure.traceback else " "
        super().__init__(self._format_failures(tail))

    @property
    def brief(self) -> str:
        return self._format_failures(" ")

    def _format_failures(self, tail: str) -> str:
        others = len(self.failures) - 1
        also = f" ({others} more failed after it)" if others else ""
        return f"one of {self.world_size} ranks failed{also};{tail}first cause: {self.failure}"


class RankTimeout(PartitionError):
    """Raised in the launching process if the ranks did not finish in time and were ended. The message says what each
    rank was doing, as far as known.
    """


def find_first_cause(failures: tuple[Failure, ...]) -> Failure:
    """Return the first of ``failures`` that is not a consequence of another rank's failure; if there is none, the first
    of all.
    """
    return next((f for f in failures if not f.secondary), failures[0])
