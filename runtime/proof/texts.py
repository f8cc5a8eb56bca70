"""What the prover calls the things that it follows."""

from __future__ import annotations

from passes.differentiate import CollectiveUse
from runtime.program import Instruction

Place = tuple[str, int | None]  # value, microbatch; a total has none


def place_text(place: Place) -> str:
    return f"{place[0]!r} of microbatch {place[1]}" if place[1] is not None else f"the total {place[0]!r}"


def moved_text(i: Instruction) -> str:
    gradients = "gradients of " if i.op.endswith("_B") else ""
    return f"{gradients}{', '.join(i.values)} of microbatch {i.microbatch}"


def use_text(use: CollectiveUse) -> str:
    source = f" ({use.source})" if use.source else ""
    return f"{use.op} {use.dtype}{list(use.shape)} over {use.axis}{source}"
