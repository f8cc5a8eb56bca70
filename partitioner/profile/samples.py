"""What was measured: plain records, which the fits take and ranks send to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from partitioner.cost.operators import Kernel


@dataclass(frozen=True)
class KernelSample:
    """A kernel and the seconds that it took. ``name`` for people: ``mm 16x512x1024``."""

    name: str
    kernel: Kernel
    seconds: float


@dataclass(frozen=True)
class CollectiveSample:
    """A collective over ``num_ranks`` ranks; ``num_bytes`` is the size of the whole tensor. ``send``: one message."""

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of compute and of a collective on their own, and of both started together."""

    compute_s: float
    collective_s: float
    both_s: float


@dataclass
class Measurements:
    """All that one profile measured.

    ``issued_s``: a host's, for an operator, in turns. ``few_s`` and ``all_s``: the same work on one rank, while as
    many ranks work as there are cores, and while all do.
    """

    kernels: list[KernelSample] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    issued_s: list[float] = field(default_factory=list)
    few_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
