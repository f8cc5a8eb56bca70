"""Numbers of pieces into which collectives next to matrix products are cut. Plans store them, and code that only reads
a plan must not import PyTorch."""

from __future__ import annotations

from typing import NamedTuple


class PieceCounts(NamedTuple):
    """Into how many pieces the collectives of a block (such as a layer) are cut to overlap with matrix products; 0: not
    cut.

    ``forward_gather``, ``backward_gather``: the number for all-gathers before products, in forward and in backward.
    ``forward_scatter``, ``backward_scatter``: the number for reduce-scatters after products.
    """

    forward_gather: int = 0
    forward_scatter: int = 0
    backward_gather: int = 0
    backward_scatter: int = 0


WHOLE = PieceCounts()
