"""Which choices a step of the search looks at: few per node, so that much of the graph can be solved at once.

Besides the present choice these are, for each node: its best choice beside the others; its best answer to a change of
one neighbour; what another node that looks like it has chosen (a model repeats its layers, and what is good in one is
good in all); and one at random. Solving exactly over proposed choices is a fusion move (Lempitsky, Rother, Roth and
Blake, 2010).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partitioner.solve.flat import Flat
from partitioner.solve.presolve import Choices, Vector

_TURNS = 8  # draws per node, of which many give a choice that is already allowed


class Proposals:
    """Draws choices for the nodes of ``flat``."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self._flat, self._rng = flat, rng
        colour = flat.alike()
        self._members = np.argsort(colour, kind="stable")  # nodes, those that look alike side by side
        numbers = np.bincount(colour)
        begins = np.cumsum(numbers) - numbers
        self._begin, self._number, self._colour = begins[colour], numbers[colour], colour

    def draw(self, choice: Choices, priced: Vector, most: int, known: Choices) -> NDArray[np.bool_]:
        """At most ``most`` choices per node, beside all choices of nodes that have no more.

        Args:
            choice: the present assignment, always among them.
            priced: what the memory of each choice costs.
            most: at least 2.
            known: another assignment, which may be drawn from.
        """
        flat, rng = self._flat, self._rng
        allowed = flat.sizes[flat.owner] <= most
        allowed[flat.start + choice] = True
        conditional = flat.conditional(choice) + priced
        best = flat.best(conditional)
        number = np.add.reduceat(allowed, flat.start, dtype=np.intp)
        for turn in range(_TURNS):
            drawn = self._answer(choice, conditional) if turn else best
            kind = rng.random(len(choice))
            drawn = np.where(kind < 0.1, choice[self._alike()], drawn)
            drawn = np.where((kind > 0.1) & (kind < 0.2), known, drawn)
            drawn = np.where(kind > 0.95, self.together(), drawn)
            new = (number < most) & ~allowed[flat.start + drawn]
            allowed[(flat.start + drawn)[new]] = True
            number += new
        return allowed

    def _alike(self) -> NDArray[np.intp]:
        """For each node another that looks like it, or itself."""
        which = (self._rng.random(len(self._begin)) * self._number).astype(np.intp)
        alike: NDArray[np.intp] = self._members[self._begin + which]
        return alike

    def together(self) -> Choices:
        """Random choices, the same for nodes that look alike."""
        draw = self._rng.random(len(self._colour))[self._members[self._begin]]
        drawn: Choices = (draw * self._flat.sizes).astype(np.intp)
        return drawn

    def _answer(self, choice: Choices, conditional: Vector) -> Choices:
        """Every node's best choice if one of its neighbours, at random, changed to a random choice."""
        flat = self._flat
        nodes = flat.num_sides.nonzero()[0]
        if not len(nodes):
            return flat.best(conditional)
        which = (self._rng.random(len(nodes)) * flat.num_sides[nodes]).astype(np.intp)
        side = flat.sides[flat.first_side[nodes] + which]
        other = flat.side_other[side]
        to = self.together()[other] if self._rng.random() < 0.5 else choice[self._alike()][other]
        changed = conditional.copy()
        target, after = flat.side_costs(side, to)  # one side per node: no target comes twice
        changed[target] += after - flat.side_costs(side, choice[other])[1]
        return flat.best(changed)
