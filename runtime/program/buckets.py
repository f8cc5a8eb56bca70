"""Buckets: sets of gradients that are reduced by one collective, with the levels and the compression of the
reduction."""

from __future__ import annotations

from typing import Literal

from partitioner.runtime.program.instructions import Data

Compression = Literal["bf16", "int8"]


class Bucket(Data):
    """Parameters whose gradients are reduced together. They have the same reduction axes, dtype and ZeRO axes. If ZeRO
    shards them, they are also all-gathered together.

    ``states``: names of the parameters. ``axes``: mesh axes over which the gradients are summed; empty for sharded
    parameters without a gradient. ``levels``: steps of a hierarchical reduction. The gradients are reduce-scattered
    over the axes of each level in order, all-reduced over the remaining axes, and all-gathered over the levels in
    reverse order. If ``levels`` is empty, one collective runs over all axes. ``compression``: format in which gradients
    are sent; ``None``: uncompressed. With levels, only the transfers of the last level are compressed; without levels,
    those over the ZeRO axes.
    """

    states: tuple[str, ...]
    axes: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...] = ()
    compression: Compression | None = None
