"""What users may see from the passes: each says what was expected, what came and what to do."""

from __future__ import annotations


class PartitionError(ValueError):
    """The root of every error that is the user's to mend."""

    @property
    def brief(self) -> str:
        """The message without tracebacks, for the command line."""
        return str(self)


class CaptureError(PartitionError):
    """The model cannot be traced; carries the model's line and torch.export's reason."""


class InputsError(PartitionError):
    """The inputs do not fit the model or each other."""


class RuleError(PartitionError):
    """A factor rule is malformed or contradicts its operator."""


class UnsupportedError(PartitionError):
    """What was asked cannot be kept exact; says why."""


class UserCodeError(PartitionError):
    """Code of the user's that was called (a loss, a hook, a state_dict) has raised; from what it raised."""


class ResourceError(PartitionError, OSError):
    """The machine lacks memory, disk, processes or rights."""


class InternalError(PartitionError):
    """A fault of the partitioner; raised from the exception that nobody expected.

    ``phase``: what was being done, as ``sharding a block``; empty where that is not known.
    """

    def __init__(self, message: str, *, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase
