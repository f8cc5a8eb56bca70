"""What the parts of all experts in a loop become, walked together. See ``passes/looped.py``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.columns import Column


@dataclass(frozen=True)
class Mask:
    """Truth values that say which rows are the expert's own, or the opposite; ``dim`` has the rows, ``None``: they are
    not in one dim yet. ``plain``: they have the dims of the numbers that were chosen."""

    dim: int | None
    negated: bool
    plain: bool = False


@dataclass(frozen=True)
class Rows:
    """``node`` has in ``dim`` for every row what its own expert's has there; the others have zero, if ``zeroed``."""

    node: fx.Node
    dim: int
    zeroed: bool


@dataclass(frozen=True)
class Several:
    """The same of an operator that has several results; ``dims``: of each, the one of the rows."""

    node: fx.Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Added:
    """What the experts' parts add up to, each zero where another is not."""

    node: fx.Node


@dataclass(frozen=True)
class Placed:
    """Every row of its own expert, in their order, and their dim taken apart; ``where``: its shape, with 1 in the dims
    that are not of the rows."""

    node: fx.Node
    where: tuple[int, ...]


@dataclass(frozen=True)
class Stack:
    """A parameter of each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Packed:
    """The same of all experts, which the first dim of ``node`` counts."""

    node: fx.Node


Merged = Mask | Rows | Several | Added | Placed | Stack | Packed | Column
