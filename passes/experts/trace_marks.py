"""Define marker operators for the masks and expert numbers on which a data-dependent loop or branch of forward depends.

A trace inserts these operators, which return a copy of their operand.
:func:`partitioner.passes.capture.capture.capture` removes them from its result.
"""

from __future__ import annotations

import torch

from partitioner.passes.ir.collectives import _library

_library.define("hits(Tensor mask, int dim) -> Tensor")

_library.define("hit(Tensor x, int number, int listing, bool numbers) -> Tensor")
for _name in ("hits", "hit"):
    torch.library.impl(f"partition::{_name}", "CompositeExplicitAutograd", lambda x, *_: x.clone(), lib=_library)
    torch.library.register_fake(f"partition::{_name}", lambda x, *_: torch.empty_like(x), lib=_library)
HITS = torch.ops.partition.hits.default  # marks a stack of masks, one per expert along ``dim``
# Marks the mask of the expert ``number`` or, with ``numbers``, the chosen numbers that contain it. ``listing``: the
# number of the operator call that lists the expert's rows, on which a branch may depend.
HIT = torch.ops.partition.hit.default
MARKS = (HITS, HIT)
