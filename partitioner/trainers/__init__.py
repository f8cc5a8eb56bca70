"""Trainers of other libraries that train by a plan. Each trainer is imported, together with its library, when it is
first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from partitioner.trainers.arguments import TrainerError

if TYPE_CHECKING:
    from partitioner.trainers.lightning_strategy import PartitionedStrategy
    from partitioner.trainers.ray_loop import PartitionedLoop
    from partitioner.trainers.transformers_trainer import PartitionedTrainer

__all__ = ["PartitionedLoop", "PartitionedStrategy", "PartitionedTrainer", "TrainerError"]

# name -> (module, the libraries that it needs, the extra that installs them)
_HOMES = {
    "PartitionedTrainer": ("transformers_trainer", "transformers and accelerate", "trainer"),
    "PartitionedLoop": ("ray_loop", "ray", "ray"),
    "PartitionedStrategy": ("lightning_strategy", "lightning", "lightning"),
}


def __getattr__(name: str) -> object:
    """Import and return ``PartitionedTrainer`` when it is first used, so that importing this package does not import
    transformers. ``name``: the requested attribute of the package.

    Raise :class:`TrainerError` if transformers or accelerate cannot be imported, and :class:`AttributeError` for any
    other name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, libraries, extra = _HOMES[name]
    try:
        return getattr(import_module(f"partitioner.trainers.{module}"), name)
    except ImportError as error:
        raise TrainerError(
            f"{name} needs {libraries}, which cannot be imported ({error}): in the folder of this repository, run "
            f"pip install -e '.[{extra}]'"
        ) from error
