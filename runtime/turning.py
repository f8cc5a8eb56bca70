"""What a rank holds for reductions level by level, in bytes: parts of sums, what is on its way, what was lost."""

from __future__ import annotations

import math

from runtime.compression import CODECS
from runtime.facts import ProgramFacts
from runtime.levels import parts
from runtime.program import Bucket, Instruction

# Copies of what is compressed while that is done: rounded numbers, and those made again to see what is lost.
WORKING = {"bf16": 0.0, "int8": 2.0}


def residual_bytes(facts: ProgramFacts, bucket: Bucket) -> int:
    """What is kept of what was lost in sending a bucket's gradients: of what was sent, and of this rank's sums."""
    if bucket.compression is None or not CODECS[bucket.compression].feedback:
        return 0
    if not bucket.levels:
        return sum(map(facts.gradient_bytes, bucket.states))
    sent = facts.bucket_bytes(bucket) // parts(facts.program, bucket, len(bucket.levels) - 1)
    return sent + facts.bucket_bytes(bucket) // parts(facts.program, bucket, len(bucket.levels))


class Turning:
    """The buckets of a stage that are between their first turn and the last. ``held``: bytes beside their gradients."""

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.facts, self.buckets = facts, facts.program.stages[stage].buckets
        self.held = 0
        self._of: dict[int, int] = {}
        self._gathering: int | None = None  # the bucket whose sums are on their way to all that need them

    def turn(self, i: Instruction) -> int:
        """Take a turn; the most bytes meanwhile beside those that are held after it."""
        number = i.bucket
        if number is None or not self.buckets[number].levels or i.op == "REDUCE":
            return 0
        bucket, program = self.buckets[number], self.facts.program
        level = bucket.levels.index(i.axes)
        whole = self.facts.bucket_bytes(bucket) // parts(program, bucket, level)
        part = whole // math.prod(map(program.size, i.axes))
        compressed = bucket.compression if level == len(bucket.levels) - 1 else None
        wire = int(whole * self.facts.wire_share(bucket)) if compressed else 0
        if i.op == "SCATTER":
            before = part if not compressed else 0  # of the level before, which goes when this has begun
            comes = 2 * wire if compressed else part + (whole if program.whole_scatter else 0)
            self._set(number, comes)
            return before + int(WORKING[compressed] * whole if compressed else 0)
        if level == 0 and self._gathering not in (None, number):
            self._set(self._gathering, 0)
        self._gathering = number if level == 0 else self._gathering
        self._set(number, part + (wire if compressed else whole))
        return whole if compressed else 0

    def finish(self) -> None:
        """All sums are where they belong."""
        self._of.clear()
        self.held, self._gathering = 0, None

    def _set(self, number: int | None, nbytes: int) -> None:
        assert number is not None
        self.held += nbytes - self._of.get(number, 0)
        self._of[number] = nbytes
