"""The collectives of a call, those in a row over the same axes together: who enters one enters them all."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import groupby
from operator import itemgetter

from runtime.facts import CallFacts
from runtime.program import Program
from runtime.proof.states import split_axes
from runtime.proof.texts import use_text

Bundle = tuple[tuple[str, ...], Hashable, str, str, int]  # axes, what has to agree, text, node, how many


def bundles_of(program: Program, call: CallFacts, op: str, position: int) -> list[Bundle]:
    """What the call at ``position`` enters in its F, B, I or W."""
    uses = [(split_axes(program, (u.axis,)), u) for u in call.collectives(op)]
    found: list[Bundle] = []
    for axes, group in groupby((pair for pair in uses if pair[0]), key=itemgetter(0)):
        row = [use for _, use in group]
        what = op, position, tuple((u.op, u.shape, u.dtype) for u in row)
        found.append((axes, what, f"{use_text(row[0])} in {op} of {call.data.path!r}", row[0].node, len(row)))
    return found
