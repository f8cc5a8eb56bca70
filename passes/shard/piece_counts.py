"""Numbers of pieces into which collectives next to matrix products are cut. Plans store these numbers, so this module
does not import PyTorch: code that only reads plans must not."""

from __future__ import annotations

from typing import NamedTuple


class PieceCounts(NamedTuple):
    """The numbers of pieces into which the collectives of a block (such as a layer) are cut to overlap with matrix
    products; 0 leaves the collectives whole.

    ``forward_gather``, ``backward_gather``: for all-gathers before products, in forward and in backward.
    ``forward_scatter``, ``backward_scatter``: for reduce-scatters after products.
    """

    forward_gather: int = 0
    forward_scatter: int = 0
    backward_gather: int = 0
    backward_scatter: int = 0


WHOLE = PieceCounts()
