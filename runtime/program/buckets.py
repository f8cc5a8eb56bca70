"""Which gradients are reduced together, and how: at once, level by level, in fewer bytes."""

from __future__ import annotations

from typing import Literal

from partitioner.runtime.program.instructions import Data

Compression = Literal["bf16", "int8"]


class Bucket(Data):
    """Gradients that are reduced together: the same axes, the same type; sharded over the same ranks, or not at all.

    Parameters that are sharded are gathered together, too; those that take no gradient have buckets without ``axes``.

    ``levels``: axes over which the gradients, or the shards that are left of them, are scattered, one level after the
    other, and gathered again in reverse; over what axes are left they are added up in between. None: at once.
    ``compression``: of what is sent over the last level, or without levels over the axes that shard the states.
    """

    states: tuple[str, ...]
    axes: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...] = ()
    compression: Compression | None = None
