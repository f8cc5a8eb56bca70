"""Sums over every run ``[i, j)`` of a sequence of calls at once, as tables of shape ``[calls + 1, calls + 1]``.

An item that several calls of a run share (a tied weight, a rotary table that every layer keeps) counts once in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from partitioner.solve.stages.problem import StageCall

Table = NDArray[np.float64]

Item = tuple[str, float]  # a name, and bytes
_MOST_REMEMBERED = 256  # calls of problems whose tables are kept
_MOST_KNOWN = 1 << 21  # entries of tables of states


class Holding(NamedTuple):
    """The values that a call reads, makes and keeps, see :class:`partitioner.solve.stages.problem.StageCall` and its
    cost."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[str, ...]
    saved_bytes: float
    carried_bytes: float
    working_bytes: float
    saved_inputs: tuple[bool, ...]
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    output_grads: tuple[bool, ...]
    at_ends: tuple[float, float, float] = (0.0, 0.0, 0.0)


def segments_of(calls: Sequence[StageCall], local: Collection[str] = frozenset()) -> Segments:
    """The runs of ``calls``; see :class:`StageProblem` for ``local``. Results are cached: problems that differ only in
    stages, states and seconds share them."""
    holdings = tuple(
        Holding(
            call.inputs,
            call.outputs,
            call.states,
            call.cost.saved_bytes,
            call.cost.carried_bytes,
            call.working_bytes,
            call.cost.saved_inputs,
            call.cost.input_bytes,
            call.cost.output_bytes,
            call.cost.output_grads,
            call.at_ends,
        )
        for call in calls
    )
    return (_build_cached_segments if len(calls) <= _MOST_REMEMBERED else Segments)(holdings, frozenset(local))


class Segments:
    """Bytes and transfers of every run of ``calls``."""

    def __init__(self, calls: Sequence[Holding], local: Collection[str] = frozenset()) -> None:
        self.calls = calls
        self.local = local

    @cached_property
    def saved(self) -> Table:
        """Bytes kept per microbatch, besides inputs."""
        return self.sums([c.saved_bytes for c in self.calls])

    @cached_property
    def carried(self) -> Table:
        """Bytes held per microbatch between the halves of its backward, besides inputs."""
        return self.sums([c.carried_bytes for c in self.calls])

    @cached_property
    def largest_again(self) -> Table:
        """Greatest bytes that one recomputed call keeps and works with."""
        return self._tabulate_run_maxima([c.saved_bytes + c.working_bytes for c in self.calls])

    @cached_property
    def largest_working(self) -> Table:
        """Greatest temporary bytes. A peak may be the start of a microbatch's backward in the last call, while
        gradients of the first call are still in flight from the previous microbatch."""
        table = self._tabulate_run_maxima([c.working_bytes for c in self.calls])
        last, lingering, _ = zip(*(c.at_ends for c in self.calls), strict=True)
        if not any(lingering):
            return table
        both = np.array([0.0, *last])[None, :] + np.array([*lingering, 0.0])[:, None]
        return np.where(self.sums([1.0] * len(self.calls)) > 0, np.maximum(table, both), 0.0)

    @cached_property
    def closing(self) -> Table:
        """By start: bytes of gradients that are sent when everything else of a microbatch is freed."""
        return np.array([*(c.at_ends[2] for c in self.calls), 0.0])

    def states_of(self, sizes: Mapping[str, float]) -> Table:
        """Bytes of the distinct states. ``sizes``: bytes by state, not to be changed later."""
        names = tuple(call.states for call in self.calls)
        return (_states_of if len(names) <= _MOST_REMEMBERED else _StateReads)(names).table(sizes)

    @cached_property
    def saved_inputs(self) -> Table:
        """Bytes of the distinct inputs that are kept per microbatch."""
        return self._tabulate_distinct_bytes(
            [
                [item for item, kept in zip(self._list_input_items(c), c.saved_inputs, strict=True) if kept]
                for c in self.calls
            ]
        )

    @cached_property
    def all_inputs(self) -> Table:
        """Bytes of the distinct inputs, which recomputation keeps."""
        return self._tabulate_distinct_bytes([self._list_input_items(c) for c in self.calls])

    @cached_property
    def forward(self) -> Table:
        """Bytes that pass each cut forward, shape ``[calls + 1]``: made before it and read at it or later."""
        return self._passing(gradients=False)

    @cached_property
    def backward(self) -> Table:
        """Bytes of gradients that pass each cut backward."""
        return self._passing(gradients=True)

    @cached_property
    def boundary(self) -> Table:
        """Bytes of the send and receive buffers at both ends of a run."""
        both: Table = self.forward + self.backward
        return both[:, None] + both[None, :]

    def _list_input_items(self, call: Holding) -> list[Item]:
        return list(zip(call.inputs, call.input_bytes, strict=True))

    def sums(self, per_call: Sequence[float]) -> Table:
        """Sum over every run of ``per_call``."""
        prefix: Table = np.concatenate([[0.0], np.cumsum(np.asarray(per_call, dtype=np.float64))])
        return np.maximum(0.0, prefix[None, :] - prefix[:, None])

    def _tabulate_run_maxima(self, per_call: Sequence[float]) -> Table:
        n = len(per_call)
        table = np.zeros((n + 1, n + 1))
        grid = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], np.asarray(per_call)[None, :], 0.0)
        table[:n, 1:] = np.maximum.accumulate(grid, axis=1)
        return table

    def _tabulate_distinct_bytes(self, items: Sequence[Sequence[Item]]) -> Table:
        """Bytes of the distinct items of every run, each counted once."""
        places, counted = _index_first_occurrences([[name for name, _ in own] for own in items])
        sizes = np.array([size for own in items for _, size in own], dtype=np.float64)
        return _sum_first_occurrences(places, sizes[counted], len(items))

    def _passing(self, gradients: bool) -> Table:
        last = {name: k for k, call in enumerate(self.calls) for name in call.inputs}
        passing = np.zeros(len(self.calls) + 1)
        for k, call in enumerate(self.calls):
            outputs = zip(call.outputs, call.output_bytes, call.output_grads, strict=True)
            for name, size, grad in outputs:
                if name not in self.local and (grad or not gradients):
                    passing[k + 1 : last.get(name, k) + 1] += size
        return passing


class _StateReads:
    """The states that calls read, by call."""

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self._places, counted = _index_first_occurrences(names)
        each = list(chain.from_iterable(names))
        self._names, self._calls = [each[number] for number in counted.tolist()], len(names)
        self._known: dict[int, tuple[Mapping[str, float], Table]] = {}

    def table(self, sizes: Mapping[str, float]) -> Table:
        """Bytes of the distinct states of every run. ``sizes``: bytes by state."""
        if id(sizes) not in self._known:
            if len(self._known) * (self._calls + 1) ** 2 > _MOST_KNOWN:
                self._known.clear()
            of_names = np.array([sizes.get(name, 0.0) for name in self._names], dtype=np.float64)
            table = _sum_first_occurrences(self._places, of_names, self._calls)
            self._known[id(sizes)] = sizes, table  # keeps the id valid
        return self._known[id(sizes)][1]


@lru_cache(maxsize=4)
def _states_of(names: tuple[tuple[str, ...], ...]) -> _StateReads:
    return _StateReads(names)


@lru_cache(maxsize=32)
def _build_cached_segments(calls: tuple[Holding, ...], local: frozenset[str]) -> Segments:
    return Segments(calls, local)


def _sum_first_occurrences(places: NDArray[np.int64], sizes: NDArray[np.float64], n: int) -> Table:
    """Table of runs of ``n`` calls: the entry ``[i, k + 1]`` sums the bytes that calls ``i`` to ``k`` add, each item
    once."""
    added = np.bincount(places, sizes, minlength=n * n).reshape(n, n)
    first = np.triu(np.cumsum(added, axis=0))  # [i, k]: bytes that call k adds to a run that starts at i
    table = np.zeros((n + 1, n + 1))
    table[:n, 1:] = np.cumsum(first, axis=1)
    return table


def _index_first_occurrences(names: Sequence[Sequence[str]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For the items of calls, by name: the first start from which a call adds each item (the call after the last that
    has the item), as a flat index into ``[start, call]``; and the numbers of the counted items, since an item that a
    call has twice counts once."""
    n, previous = len(names), dict[str, int]()
    places: list[int] = []
    counted: list[int] = []
    number = 0
    for k, own in enumerate(names):
        for name in own:
            if previous.get(name, -1) != k:
                places.append((previous.get(name, -1) + 1) * n + k)
                counted.append(number)
                previous[name] = k
            number += 1
    return np.array(places, dtype=np.int64), np.array(counted, dtype=np.int64)
