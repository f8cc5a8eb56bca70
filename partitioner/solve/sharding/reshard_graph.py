"""Add the costs of layout changes to the assignment problem of a sharding (one choice per node at minimum cost). Every
change of a value is paid for once, however many operators read the result.

A value with one reader is an edge of the problem. A value with several readers is a node, each choice of which is a
pair: the layout in which the value is produced, and the set of layouts to which it is converted. Layouts whose
conversion costs nothing are always in the set."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from partitioner.passes.ir.gradient_flow import can_have_gradient
from partitioner.passes.ir.layouts import Layout
from partitioner.passes.ir.model import TensorSpec
from partitioner.passes.shard.shard_block import RESHARDS
from partitioner.solve.pairwise.assignment import AssignmentProblem
from partitioner.solve.pairwise.presolve import Table, Vector

MAX_SETS = 400  # choices of one value; with more, each layout gets a node of its own, an equivalent but looser form

T = TypeVar("T")

ReshardCost = Callable[[TensorSpec, Layout, Layout, bool], float]


class ProblemBuilder:
    """Collects the nodes and edges of the assignment problem of a sharding: choose one layout or strategy (layouts of
    operands and results) for each node at minimum cost. ``costs``: for each node, the costs of its choices. ``edges``:
    tuples (node, other node, table of costs of each pair of choices). ``names``: a text for each node, used in error
    messages."""

    def __init__(self) -> None:
        self.costs: list[Vector] = []
        self.edges: list[tuple[int, int, Table]] = []
        self.names: list[str] = []

    def add(self, name: str, cost: Vector) -> int:
        """Add a node to the assignment problem (one choice per node at minimum cost), and return its index among the
        nodes. ``name``: a text for error messages. ``cost``: the cost of each of the node's choices."""
        self.costs.append(cost)
        self.names.append(name)
        return len(self.costs) - 1

    def problem(self) -> AssignmentProblem:
        return AssignmentProblem(self.costs, self.edges)


class Reshards:
    """A cache of the costs of converting tensors from one layout to another; the cost of an impossible conversion is
    infinite. ``cost``: function that computes such a cost from the tensor's shape and dtype, the two layouts, and
    whether the tensor has a gradient."""

    def __init__(self, cost: ReshardCost) -> None:
        self._cost = cost
        self._known: dict[tuple[TensorSpec, bool, Layout, Layout], float] = {}
        self._tables: dict[tuple[TensorSpec, bool, tuple[Layout, ...], tuple[Layout, ...]], Table] = {}
        self._conversions: dict[Hashable, ValueConversions] = {}

    def table(self, spec: TensorSpec, grad: bool, made: Sequence[Layout], targets: Sequence[Layout]) -> Table:
        """Return a table of the costs of every change of layout from ``made`` (rows) to ``targets`` (columns), for a
        value with the whole shape and dtype ``spec``. ``grad``: whether the backward must also change the layout of the
        gradient.
        """
        key = spec, grad, tuple(made), tuple(targets)
        if key not in self._tables:
            costs = [[self._reshard_seconds(spec, grad, source, target) for target in targets] for source in made]
            self._tables[key] = np.array(costs, dtype=np.float64).reshape(len(made), -1)
        return self._tables[key]

    def find_conversions(
        self,
        value: tuple[TensorSpec, bool],
        source: tuple[Layout, ...],
        askers: Sequence[tuple[frozenset[Layout], ...]],
    ) -> ValueConversions:
        """Return the conversions of a value from the layouts ``source``, in which it may be produced, to the layouts in
        which its readers may need it. Calls with equal arguments return the same object. ``value``: (shape and dtype of
        the value, whether it has a gradient). ``askers``: for each reader and each of its choices, the set of layouts
        that it needs."""
        key = (value, source, *askers)
        if key not in self._conversions:
            self._conversions[key] = ValueConversions.find(self, value, source, askers)
        return self._conversions[key]

    def _reshard_seconds(self, spec: TensorSpec, grad: bool, source: Layout, target: Layout) -> float:
        """Return the cost of one change of a tensor from layout ``source`` to ``target``, from the cache if it is
        there; infinite if the change is impossible. ``spec``: whole shape and dtype of the tensor. ``grad``: whether
        the backward must also change the layout of the gradient."""
        if source == target and source.kind != "P":
            return 0.0
        key = (spec, grad, source, target)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(spec, grad, source, target)
        return found

    def _look_up(self, spec: TensorSpec, grad: bool, source: Layout, target: Layout) -> float:
        """Return the cost, computed without the cache, of one change of a tensor from layout ``source`` to ``target``;
        infinite if the change is impossible. ``spec``: whole shape and dtype of the tensor. ``grad``: whether the
        backward must also change the layout of the gradient."""
        if (source.kind, target.kind) not in RESHARDS:
            return math.inf
        if target.kind == "P" and source.is_whole and not can_have_gradient(spec.dtype):
            return math.inf  # integers and booleans cannot be partial sums
        if source.kind == "P" and spec.dtype == torch.bool:
            return math.inf
        if source == target:
            return 0.0
        cost = float(self._cost(spec, source, target, grad))
        assert cost >= 0, (spec, source, target, cost)
        return cost


@dataclass(frozen=True)
class ValueConversions:
    """The conversions of a value from the layouts in which it may be produced to the layouts in which its readers may
    need it, for one call of its block (such as a layer). Equal values of different blocks share this object.

    ``cost``: cost of each conversion, indexed (layout in which the value is produced, layout in which it is read).
    ``made_of``: for each choice of the node that produces the value, the index of the layout that it produces.
    ``wants``: for each reader, a boolean array ``[sets, layouts]``: for each distinct set of layouts that the reader
    may need, which layouts are in it. ``asked_of``: for each reader, the index of its set for each of its choices.

    The last three fields are about the ways to provide the value to several readers. They are ``None`` and empty if
    there is one reader or if there are too many ways. ``ways``: for each way, the index of the layout in which the
    value is produced, and a mask of the layouts in which it can be read. ``from_source``, ``to_askers``: tables of
    infinite costs, which forbid a way if the value is produced in another layout, or if a layout is missing that the
    reader needs."""

    cost: Table
    made_of: NDArray[np.intp]
    wants: tuple[NDArray[np.bool_], ...]
    asked_of: tuple[NDArray[np.intp], ...]
    ways: tuple[NDArray[np.intp], NDArray[np.bool_]] | None = None
    from_source: Table | None = None
    to_askers: tuple[Table, ...] = ()

    @staticmethod
    def find(
        reshards: Reshards,
        value: tuple[TensorSpec, bool],
        source: tuple[Layout, ...],
        askers: Sequence[tuple[frozenset[Layout], ...]],
    ) -> ValueConversions:
        """Return the conversions of ``value``, a pair (shape and dtype, whether it has a gradient). ``reshards``: the
        costs of changes of layout. ``source``: the layouts in which the value may be produced. ``askers``: for each
        reader and each of its choices, the set of layouts that it needs."""
        reading = _read_layouts(source, tuple(askers))
        cost = reshards.table(*value, reading.made, reading.targets)
        if len(askers) == 1:
            return ValueConversions(cost, reading.made_of, reading.wants, reading.asked_of)
        priced = (cost > 0) + 2 * np.isinf(cost).astype(np.int8)  # all that the ways depend on
        ways = _find_ways(source, tuple(askers), priced.tobytes())
        return ValueConversions(cost, reading.made_of, reading.wants, reading.asked_of, *ways)


@dataclass(frozen=True)
class _Reading:
    """The layouts in which a value is produced and read; they do not depend on the value's shape.

    ``made``, ``targets``: the distinct layouts in which the value may be produced, and in which it may be read.
    ``made_of``, ``wants``, ``asked_of``: as in :class:`ValueConversions`."""

    made: tuple[Layout, ...]
    made_of: NDArray[np.intp]
    targets: tuple[Layout, ...]
    wants: tuple[NDArray[np.bool_], ...]
    asked_of: tuple[NDArray[np.intp], ...]


@lru_cache(maxsize=1 << 12)
def _read_layouts(source: tuple[Layout, ...], askers: tuple[tuple[frozenset[Layout], ...], ...]) -> _Reading:
    """Return the layouts in which a value is produced and read, as index arrays. ``source``: the layouts in which the
    value may be produced. ``askers``: for each reader and each of its choices, the set of layouts that it needs."""
    made, made_of = _index_distinct_items(source)
    asked = [_index_distinct_items(layouts) for layouts in askers]
    targets = list(dict.fromkeys(t for sets, _ in asked for s in sets for t in sorted(s)))
    # which targets each reader needs
    wants = tuple(np.array([[t in s for t in targets] for s in sets], dtype=bool) for sets, _ in asked)
    return _Reading(tuple(made), made_of, tuple(targets), wants, tuple(of for _, of in asked))


_Ways = tuple[tuple[NDArray[np.intp], NDArray[np.bool_]] | None, Table | None, tuple[Table, ...]]


@lru_cache(maxsize=1 << 12)
def _find_ways(source: tuple[Layout, ...], askers: tuple[tuple[frozenset[Layout], ...], ...], priced: bytes) -> _Ways:
    """Return the ways to provide a value to several readers, and the tables that forbid some of them: the last three
    fields of a :class:`ValueConversions`. ``source``: the layouts in which the value may be produced. ``askers``: for
    each reader and each of its choices, the set of layouts that it needs. ``priced``: for each conversion, 0 if it
    costs nothing, 1 if it has a finite cost, 3 if it is impossible."""
    reading = _read_layouts(source, askers)
    kinds = np.frombuffer(priced, dtype=np.int8).reshape(len(reading.made), -1)
    cost = np.where(kinds == 3, np.inf, kinds)
    most = sum(int(w.sum(axis=1).max(initial=0)) for w in reading.wants)
    ways = _list_available_layout_sets(cost, most)
    if ways is None:
        return None, None, ()
    origin, has = ways
    several = len(reading.made) > 1
    from_source = _mask_to_infinite_cost(reading.made_of[:, None] != origin[None, :]) if several else None
    missing = ((want[None, :, :] & ~has[:, None, :]).any(axis=2) for want in reading.wants)
    to_askers = (_mask_to_infinite_cost(m)[:, of] for m, of in zip(missing, reading.asked_of, strict=True))
    return ways, from_source, tuple(to_askers)


@dataclass(frozen=True)
class Source:
    """The node of the assignment problem (one choice per node at minimum cost) that decides in which layout a value is
    produced. ``variable``: the index of this node in the problem. ``layouts``: the layout of the value under each
    choice of the node."""

    variable: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Asker:
    """A node of the assignment problem (one choice per node at minimum cost) that decides in which layouts a value is
    read. ``variable``: the index of this node in the problem. ``layouts``: for each choice of the node, the set of
    layouts in which it needs the value."""

    variable: int
    layouts: tuple[frozenset[Layout], ...]


def add_reshard_costs(
    builder: ProblemBuilder,
    reshards: Reshards,
    name: str,
    value: tuple[TensorSpec, bool],
    source: Source,
    askers: Sequence[Asker],
    weight: float,
) -> None:
    """Add to ``builder`` the nodes and edges that price the changes of layout of one value between ``source``, the node
    that produces it, and ``askers``, the nodes that read it.

    ``reshards``: the costs of changes of layout. ``name``: a text for error messages. ``value``: (shape and dtype of
    the value, whether it has a gradient). ``weight``: the factor on all costs: the number of calls that execute the
    block (such as a layer) of the value."""
    conversions = reshards.find_conversions(value, source.layouts, [asker.layouts for asker in askers])
    cost, wants = weight * conversions.cost, conversions.wants
    if len(askers) == 1:
        bare = np.where(wants[0][None, :, :], cost[:, None, :], 0.0).sum(axis=2)
        builder.edges.append(
            (source.variable, askers[0].variable, bare[np.ix_(conversions.made_of, conversions.asked_of[0])])
        )
        return
    if conversions.ways is None:
        _connect_by_target(builder, name, source, askers, cost, conversions.made_of, wants, conversions.asked_of)
        return
    origin, has = conversions.ways
    price = np.where(has & np.isfinite(cost[origin]), cost[origin], 0.0).sum(axis=1)
    node = builder.add(name, price)
    if conversions.from_source is not None:
        builder.edges.append((source.variable, node, conversions.from_source))
    builder.edges += [(node, asker.variable, table) for asker, table in zip(askers, conversions.to_askers, strict=True)]


def _index_distinct_items(items: Sequence[T]) -> tuple[list[T], NDArray[np.intp]]:
    """Return a list of the distinct ``items`` in order of first appearance, and an array with, for each item, its index
    in this list."""
    places: dict[T, int] = {}
    which = [places.setdefault(item, len(places)) for item in items]
    return list(places), np.array(which, dtype=np.intp)


def _mask_to_infinite_cost(mask: NDArray[Any] | np.bool_) -> Table:
    """Return a table of costs of pairs of choices, with the shape of ``mask``: infinity, which forbids the pair, where
    ``mask`` is true, and 0 elsewhere."""
    return np.where(mask, np.inf, 0.0)


def _list_available_layout_sets(cost: Table, most: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]] | None:
    """List the ways to provide a value to several readers: the value is produced in one layout and converted to a set
    of others. Return two arrays with one entry for each way: the index of the layout in which the value is produced,
    and a mask of the layouts in which the value can then be read (the set, and all layouts to which a conversion costs
    nothing). Return ``None`` if there are more than 400 ways.

    ``cost``: cost of each conversion, indexed (layout in which the value is produced, layout in which it is read).
    ``most``: the largest number of layouts that all readers together may need at once."""
    count = 0
    for row in cost:
        costly = int(((row > 0) & np.isfinite(row)).sum())
        count += sum(math.comb(costly, size) for size in range(min(most, costly) + 1))
    if count > MAX_SETS:
        return None
    origin, has = [], []
    for made, row in enumerate(cost):
        costly = ((row > 0) & np.isfinite(row)).nonzero()[0].tolist()
        for size in range(min(most, len(costly)) + 1):
            for chosen in combinations(costly, size):
                available = row == 0
                available[list(chosen)] = True
                origin.append(made)
                has.append(available)
    return np.array(origin, dtype=np.intp), np.array(has, dtype=bool)


def _connect_by_target(
    builder: ProblemBuilder,
    name: str,
    source: Source,
    askers: Sequence[Asker],
    cost: Table,
    made_of: NDArray[np.intp],
    wants: Sequence[NDArray[np.bool_]],
    asked_of: Sequence[NDArray[np.intp]],
) -> None:
    """Add nodes to the problem ``builder`` that price the conversions of a value: one node for each layout in which the
    value is read, with the choices (not available, available). This is used if there are too many sets of layouts for
    one node with a choice for each set. ``source``: the node that produces the value. ``askers``: the nodes that read
    it.

    ``cost``: cost of each conversion, indexed (layout in which the value is produced, layout in which it is read).
    ``made_of``: for each choice of ``source``, the index of the layout that it produces. ``wants``: for each of
    ``askers``, a boolean array ``[sets, layouts]``: for each distinct set of layouts that it may need, which layouts
    are in it. ``asked_of``: for each of ``askers``, the index of its set for each of its choices. ``name``: a text for
    error messages."""
    for target in range(cost.shape[1]):
        node = builder.add(f"{name}, layout {target}", np.zeros(2))
        table = np.stack([np.zeros(len(cost)), cost[:, target]], axis=1)
        builder.edges.append((source.variable, node, table[made_of]))
        for asker, want, of in zip(askers, wants, asked_of, strict=True):
            absent = np.stack([want[:, target], np.zeros(len(want), dtype=bool)])
            builder.edges.append((node, asker.variable, _mask_to_infinite_cost(absent)[:, of]))
