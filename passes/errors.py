"""The exceptions that users of this project can see. Each message says what was expected, what was found and what to
do.
"""

from __future__ import annotations


class PartitionError(ValueError):
    """The base class of all errors of this project. The user can correct the cause of each, except for an internal
    error.
    """

    @property
    def brief(self) -> str:
        """Return the message without tracebacks, as the command line prints it."""
        return str(self)


class CaptureError(PartitionError):
    """The model cannot be traced into a graph. The message has the line of the model and the reason from
    ``torch.export``.
    """


class InputsError(PartitionError):
    """The inputs do not match the model, or they contradict each other."""


class RuleError(PartitionError):
    """A sharding rule of an operator is malformed, or it does not agree with what the operator computes."""


class UnsupportedError(PartitionError):
    """The request cannot be carried out with exactly the results of the original model. The message
    gives the reason.
    """


class UserCodeError(PartitionError):
    """Code of the user (for example a loss, a hook or a ``state_dict``) raised an exception when it was called.

    The exception of the user's code is the ``__cause__``.
    """


class ResourceError(PartitionError, OSError):
    """The computer lacks memory, disk space, processes or access rights."""


class InternalError(PartitionError):
    """A bug of the partitioner. The unexpected exception is the ``__cause__``.

    ``phase``: the step that was running, such as ``sharding a block``. It is empty if the step is not known.
    """

    def __init__(self, message: str, *, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase
