"""Trainers of other libraries that train by a plan. Each is imported when it is first used, with the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partitioner.trainers.arguments import TrainerError

if TYPE_CHECKING:
    from partitioner.trainers.transformers_trainer import PartitionedTrainer

__all__ = ["PartitionedTrainer", "TrainerError"]


def __getattr__(name: str) -> object:
    """Import and return the trainer ``name`` when it is first used.

    Raise :class:`TrainerError` if its library is not installed, and :class:`AttributeError` for an unknown name.
    """
    if name != "PartitionedTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from partitioner.trainers.transformers_trainer import PartitionedTrainer
    except ImportError as error:
        raise TrainerError(
            f"PartitionedTrainer needs transformers and accelerate, and one of them cannot be imported ({error}): "
            "pip install 'partitioner[trainer]'"
        ) from error
    return PartitionedTrainer
