"""In how many pieces collectives run next to matrix products. Plans store this, and are read without PyTorch."""

from __future__ import annotations

from typing import NamedTuple


class PieceCounts(NamedTuple):
    """In how many pieces a block (such as a layer) communicates next to products, for four kinds of places: all-gathers
    before products and reduce-scatters after products, in forward and in backward. 0: not in pieces.
    """

    forward_gather: int = 0
    forward_scatter: int = 0
    backward_gather: int = 0
    backward_scatter: int = 0


WHOLE = PieceCounts()
