"""Marks that a trace leaves in a graph: on masks, and on numbers that were chosen, by which it is decided what forward
does.

They change nothing, and are gone from what :func:`passes.capture.capture` gives.
"""

from __future__ import annotations

import torch

from passes.collectives import _library

_library.define("hits(Tensor mask, int dim) -> Tensor")
_library.define("hit(Tensor x, int number, int listing, bool numbers) -> Tensor")
for _name in ("hits", "hit"):
    torch.library.impl(f"partition::{_name}", "CompositeExplicitAutograd", lambda x, *_: x.clone(), lib=_library)
    torch.library.register_fake(f"partition::{_name}", lambda x, *_: torch.empty_like(x), lib=_library)
HITS = torch.ops.partition.hits.default  # a table of masks, of which ``dim`` counts the experts
# The mask of the expert ``number``, or the ``numbers`` that were chosen, its own among them; ``listing``: the count of
# its rows by which it may be decided whether it has any.
HIT = torch.ops.partition.hit.default
MARKS = (HITS, HIT)
