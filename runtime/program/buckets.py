"""Buckets: sets of gradients that are reduced by one collective, with the levels and the compression of the
reduction."""

from __future__ import annotations

from typing import Literal

from partitioner.runtime.program.instructions import Data

Compression = Literal["bf16", "int8"]


class Bucket(Data):
    """Parameters whose gradients are reduced together. They share the reduction axes, the type and the ZeRO axes.

    Sharded parameters of a bucket are also all-gathered together. Sharded parameters without a gradient have buckets
    whose ``axes`` are empty. ``states``: names of the parameters. ``axes``: mesh axes over which the gradients are
    summed.

    ``levels``: steps of a hierarchical reduction. The gradients are reduce-scattered over the axes of each level in
    order, all-reduced over the remaining axes, and all-gathered over the levels in reverse order. Empty: one collective
    over all axes. ``compression``: format in which the last level's transfers are sent; without levels, the transfers
    over the axes that shard the states. ``None``: uncompressed.
    """

    states: tuple[str, ...]
    axes: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...] = ()
    compression: Compression | None = None
