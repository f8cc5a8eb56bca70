"""Trainers of other libraries that train by a plan. Each is imported when it is first used, with the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partitioner.trainers.arguments import TrainerError

if TYPE_CHECKING:
    from partitioner.trainers.transformers_trainer import PartitionedTrainer

__all__ = ["PartitionedTrainer", "TrainerError"]


def __getattr__(name: str) -> object:
    """Import and return ``PartitionedTrainer`` when it is first used, so that importing this package does not import
    transformers. ``name``: the requested attribute of the package.

    Raise :class:`TrainerError` if transformers or accelerate cannot be imported, and :class:`AttributeError` for any
    other name.
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
