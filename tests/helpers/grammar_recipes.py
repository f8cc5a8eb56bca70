"""Random models as data: a recipe is a list of operators with small numbers, a loss, a mesh, and a batch to run on.

``repr`` of a recipe is an expression that makes it again, so a failure is replayed by pasting what was printed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from partitioner import Constraints


@dataclass(frozen=True, repr=False)
class _Short:
    """Prints only what is not the default."""

    def __repr__(self) -> str:
        shown = []
        for index, field in enumerate(dataclasses.fields(self)):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(repr(value) if index == 0 else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Op(_Short):
    """One operator of the grammar. ``a`` and ``b`` choose among its variants; ``body``: operators inside of it."""

    name: str
    a: int = 0
    b: int = 0
    body: tuple[Op, ...] = ()


@dataclass(frozen=True, repr=False)
class Mesh(_Short):
    """Ranks on each axis, and what else is fixed."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    microbatch_size: int | None = None
    zero: int | None = None
    recompute: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def constraints(self) -> Constraints:
        return Constraints(**{f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None})


@dataclass(frozen=True, repr=False)
class Recipe(_Short):
    """A model, how it is planned, and what it is run on.

    ``output``: what forward returns (``scalar``: the loss; ``dict``: loss and values; ``values``: values, of which
    ``loss=`` makes the loss). ``change``: how the batch of the run differs from the planned one, a name of
    ``grammar_batches.CHANGES``. ``options``: of forward's optional inputs, those that the planned batch has.
    """

    ops: tuple[Op, ...]
    loss: Op = Op("mse")
    mesh: Mesh = Mesh()
    change: str = "values"
    output: str = "scalar"
    options: tuple[str, ...] = ()
    batch: int = 4
    length: int = 4
    width: int = 4
    training: bool = True
