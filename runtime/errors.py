"""Errors of a running program, with their cause and a remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from partitioner.passes.errors import PartitionError

DIED = "ProcessDied"  # the kinds of failure that no exception of a rank tells

STALLED = "Stalled"
LOST = "ConnectionLost"
LEFT = "LeftEarly"


class BatchError(PartitionError):
    """The batch is not the one that the plan was made for: a tensor is missing, or has another shape or type."""


class WeightsError(PartitionError):
    """The weights are not those that the plan was made for; names the first differences."""


class CheckpointError(WeightsError):
    """A checkpoint cannot be written, or is damaged, incomplete or another one's; names the file and what to do.

    ``elsewhere``: another rank has failed, and this one repeats it.
    """

    elsewhere = False

    @classmethod
    def of_another(cls, message: str) -> Self:
        """What a rank raises where another one has failed."""
        error = cls(message)
        error.elsewhere = True
        return error


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written."""


class LaunchError(PartitionError):
    """The program cannot be started as asked: another number of ranks, no plan in the file."""


class OffloadError(LaunchError):
    """Optimizer states cannot be kept on disk as asked: no folder, no room in it, an optimizer that is not stepped one
    parameter after another."""


class BackwardError(PartitionError):
    """``backward`` is called on a loss of :meth:`Engine.step`, which has run it."""


class OptimizerError(PartitionError):
    """An optimizer would step the parts of parameters that ranks have otherwise than the whole parameters."""


class AgreementError(PartitionError):
    """Ranks do not agree any more: gradients were changed otherwise on each, or replicas of a parameter differ."""


class DTensorError(PartitionError):
    """Parameters are laid out as no DTensor can be; names the first and why."""


class CommunicationError(RuntimeError):
    """Another rank has failed, or did not come. The cause is there, not here."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, and where. ``instruction`` is as the program prints it (``0F3``), ``index`` its place; without
    one, what the rank did outside of its program. Prints as one line."""

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
    step: int | None = None  # counted from 1; outside of a step, the last one

    def __str__(self) -> str:
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
    """An instruction of this rank's program failed; raised from the error itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type[Self], tuple[Failure]]:
        return type(self), (self.failure,)


class RankError(PartitionError):
    """A rank failed, and the others were taken down. The message ends with the first cause."""

    def __init__(self, failures: tuple[Failure, ...], world_size: int) -> None:
        self.failures = failures
        self.failure = first_cause(failures)
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
    """The ranks did not finish in time and were ended. Says what each was doing, as far as it is known."""


def first_cause(failures: tuple[Failure, ...]) -> Failure:
    """The failure that came first, and not in consequence of another rank's."""
    return next((f for f in failures if not f.secondary), failures[0])
