"""The exceptions that users of this project can see.

Each message says what was expected, what was found and how to correct it.
"""

from __future__ import annotations


class PartitionError(ValueError):
    """The base class of all errors of this project.

    The user can correct the cause of each error, except for an :class:`InternalError`.
    """

    @property
    def brief(self) -> str:
        """Return the error message without tracebacks, as the command line prints it."""
        return str(self)


class CaptureError(PartitionError):
    """Raised if the model cannot be traced into a graph.

    The message has the source line in the model and the reason from ``torch.export``.
    """


class InputsError(PartitionError):
    """Raised if the example inputs do not match the signature of the model's ``forward``, or contradict each other, for
    example in their batch sizes.
    """


class RuleError(PartitionError):
    """Raised if an operator's sharding rule is malformed, or does not match the operator."""


class UnsupportedError(PartitionError):
    """Raised if a model or an option cannot be planned with exactly the results of the original model. The message has
    the reason."""


class UntrustedOperatorError(PartitionError):
    """Raised if a plan file names an operator that is not allowed in plan files, such as one that reads files.

    :func:`allow_operators` allows the operators of a library.
    """


class UserCodeError(PartitionError):
    """Raised if code of the user (for example a loss, a hook or a ``state_dict``) raised an exception when it was
    called.

    The exception of the user's code is the ``__cause__``.
    """


class ResourceError(PartitionError, OSError):
    """Raised if the computer lacks memory, disk space, processes or access rights."""


class InternalError(PartitionError):
    """Raised for a bug of the partitioner. The unexpected exception is the ``__cause__``.

    ``phase``: the step that was running, such as ``sharding a block``; empty if unknown.
    """

    def __init__(self, message: str, *, phase: str = "") -> None:
        super().__init__(message)
        self.phase = phase


class UnrolledLoopWarning(UserWarning):
    """Issued if a Python loop in a model's forward is traced as a thousand operators or more, which makes planning
    slow. The message has the loop's source line."""
