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
