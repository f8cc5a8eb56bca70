"""Marks that a trace leaves in a graph: on masks, and on numbers that were chosen, by which it is decided what forward
does, and on results of functions with a gradient of their own.

They change nothing, and are gone from what :func:`passes.capture.capture` gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.collectives import _library

_library.define("hits(Tensor mask, int dim) -> Tensor")
_library.define("hit(Tensor x, int number, int listing, bool numbers) -> Tensor")
_library.define("own(Tensor x, Tensor[] terms, Tensor[] inputs) -> Tensor")
for _name in ("hits", "hit", "own"):
    torch.library.impl(f"partition::{_name}", "CompositeExplicitAutograd", lambda x, *_: x.clone(), lib=_library)
    torch.library.register_fake(f"partition::{_name}", lambda x, *_: torch.empty_like(x), lib=_library)
HITS = torch.ops.partition.hits.default  # a table of masks, of which ``dim`` counts the experts
# The mask of the expert ``number``, or the ``numbers`` that were chosen, its own among them; ``listing``: the count of
# its rows by which it may be decided whether it has any.
HIT = torch.ops.partition.hit.default
MARKS = (HITS, HIT)


def _keep_counts(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: Tensor) -> None:
    ctx.counts = len(inputs[1]), len(inputs[2])


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], list[None]]:
    terms, inputs = ctx.counts
    return grad, [None] * terms, [None] * inputs


torch.library.register_autograd("partition::own", _pass_gradient, setup_context=_keep_counts, lib=_library)
# A result of a function that was applied to ``inputs``: where it takes part in the loss, ``terms`` belong to the loss.
OWN = torch.ops.partition.own.default
