"""What the corresponding nodes of all experts of a loop are merged into. See ``passes/looped.py``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.columns import Column


@dataclass(frozen=True)
class Mask:
    """Each expert's mask of its own rows, or of all other rows if ``negated``.

    ``dim`` is the dim of the rows; ``None`` if they are not in one dim yet. ``plain``: the mask has the dims of the
    chosen numbers.
    """

    dim: int | None
    negated: bool
    plain: bool = False


@dataclass(frozen=True)
class Rows:
    """A merged value whose rows, along ``dim`` of ``node``, each have the value that the row's own expert computes.

    ``zeroed``: in each expert's separate value, the rows of other experts are zero.
    """

    node: fx.Node
    dim: int
    zeroed: bool


@dataclass(frozen=True)
class Several:
    """Merged rows of an operator with several results. ``dims[k]`` is the dim of the rows in result ``k``."""

    node: fx.Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Added:
    """The sum of all experts' parts, of which at most one is non-zero in each row."""

    node: fx.Node


@dataclass(frozen=True)
class Placed:
    """Merged rows in their order, with the dim of the rows unflattened.

    ``where``: shape of the row dims within the value, with 1 for every other dim.
    """

    node: fx.Node
    where: tuple[int, ...]


@dataclass(frozen=True)
class Stack:
    """The corresponding parameters of all experts, one node each."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Packed:
    """One parameter that stacks those of all experts along dim 0 of ``node``."""

    node: fx.Node


Merged = Mask | Rows | Several | Added | Placed | Stack | Packed | Column
