"""Compute tables of sums and maxima over every sequence of consecutive block calls (such as layers), each of shape
``[calls + 1, calls + 1]``.

The entry ``[start, stop]`` of a table is for the calls ``start:stop``. If several calls of a sequence use the same
tensor (for example a tied weight), its bytes count once in that sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.passes.ir.hashing import SameObject

if TYPE_CHECKING:
    from partitioner.solve.stages.problem import StageCall

Table = NDArray[np.float64]

Item = tuple[str, float]  # a name, and bytes
_MOST_REMEMBERED = 256  # calls of problems whose tables are kept
_MOST_KNOWN = 1 << 21  # entries of tables of states


class Holding(NamedTuple):
    """The values that one block call (such as a layer) reads, writes and keeps, with their bytes. The tuple is
    hashable, so that tables can be cached by it.

    ``inputs``, ``outputs`` and ``states`` (parameters and buffers) are names. Four tuples have one entry for each input
    or output: ``input_bytes`` and ``output_bytes``; ``saved_inputs`` (whether the input is kept for backward);
    ``output_grads`` (whether the output receives a gradient). ``saved_bytes``: bytes kept from forward to backward
    besides inputs. ``carried_bytes``: bytes held between backward for inputs and backward for weights.
    ``working_bytes``: temporary bytes.

    ``at_ends``: three numbers of bytes for a call at an end of a pipeline stage. (1) For the last call of a stage: all
    temporary bytes during its backward. (2) For the first call: the bytes of its gradients that are still being sent
    while the last call runs the backward of the next microbatch; they add to number (1) of the last call. (3) For the
    first call: all temporary bytes after its backward, while its gradients are sent.
    """

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
    """Return tables of the bytes of all sequences of consecutive ``calls``, which are calls of blocks (such as layers).
    The tables are cached, and used again for calls that read and write equal values with equal bytes. The tables
    contain neither seconds nor the bytes of parameters, and do not depend on the stages.

    ``local``: names of values that are never sent between stages.
    """
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
    """Tables of the bytes that every sequence of consecutive block calls (such as layers) keeps, uses and transfers,
    computed when they are first used. The entry ``[i, j]`` of a table is for the calls ``i:j``. ``local``: names of
    values that are never sent between stages.
    """

    def __init__(self, calls: Sequence[Holding], local: Collection[str] = frozenset()) -> None:
        self.calls = calls
        self.local = local

    @cached_property
    def saved(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of activations that the block calls ``start:stop``
        (such as layers) save for backward, per microbatch, without their inputs.
        """
        return self.sums([c.saved_bytes for c in self.calls])

    @cached_property
    def carried(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes that the block calls ``start:stop`` (such as
        layers) hold between their backward for inputs and their backward for weights, per microbatch, without their
        inputs.
        """
        return self.sums([c.carried_bytes for c in self.calls])

    @cached_property
    def largest_again(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the largest sum of saved and temporary bytes of a single call
        among the block calls ``start:stop`` (such as layers). This is the peak while calls are recomputed one at a
        time."""
        return self._tabulate_run_maxima([c.saved_bytes + c.working_bytes for c in self.calls])

    @cached_property
    def largest_working(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the largest number of temporary bytes of the block calls
        ``start:stop`` (such as layers) at any time. This is the larger of two numbers: the maximum over the calls; and
        the bytes during the backward of the last call, plus the gradients of the first call that are still being sent
        for the previous microbatch."""
        table = self._tabulate_run_maxima([c.working_bytes for c in self.calls])
        last, lingering, _ = zip(*(c.at_ends for c in self.calls), strict=True)
        if not any(lingering):
            return table
        both = np.array([0.0, *last])[None, :] + np.array([*lingering, 0.0])[:, None]
        return np.where(self.sums([1.0] * len(self.calls)) > 0, np.maximum(table, both), 0.0)

    @cached_property
    def closing(self) -> Table:
        """Return the temporary bytes of a stage at the end of a microbatch's backward, when its activations are freed
        and the gradients of its first block call (such as a layer) are sent. The shape is ``[calls + 1]``, indexed by
        the first call of the stage.
        """
        return np.array([*(c.at_ends[2] for c in self.calls), 0.0])

    def states_of(self, sizes: Mapping[str, float]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of the distinct parameters and buffers that the
        block calls ``start:stop`` (such as layers) read. The result is cached by the identity of ``sizes``, so the
        mapping must not be modified later. ``sizes``: name of a parameter or buffer -> bytes.
        """
        names = tuple(call.states for call in self.calls)
        return (_states_of if len(names) <= _MOST_REMEMBERED else _StateReads)(names).table(sizes)

    @cached_property
    def saved_inputs(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of the distinct inputs that the block calls
        ``start:stop`` (such as layers) keep for backward, per microbatch.
        """
        return self._tabulate_distinct_bytes(
            [
                [item for item, kept in zip(self._list_input_items(c), c.saved_inputs, strict=True) if kept]
                for c in self.calls
            ]
        )

    @cached_property
    def all_inputs(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of all distinct inputs of the block calls
        ``start:stop`` (such as layers). Full recomputation must keep these inputs."""
        return self._tabulate_distinct_bytes([self._list_input_items(c) for c in self.calls])

    @cached_property
    def forward(self) -> Table:
        """Return the bytes of the values that are sent in forward across each possible cut between stages, shape
        ``[calls + 1]``. A value crosses a cut if a block call (such as a layer) before the cut computes it and a call
        after the cut reads it. The index is the number of calls before the cut.
        """
        return self._passing(gradients=False)

    @cached_property
    def backward(self) -> Table:
        """Return the bytes of the gradients that are sent in backward across each possible cut between stages, shape
        ``[calls + 1]``. The index is the number of block calls (such as layers) before the cut."""
        return self._passing(gradients=True)

    @cached_property
    def boundary(self) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of the buffers in which a stage of the block calls
        ``start:stop`` (such as layers) sends and receives values and gradients, at its start and at its end."""
        both: Table = self.forward + self.backward
        return both[:, None] + both[None, :]

    def _list_input_items(self, call: Holding) -> list[Item]:
        return list(zip(call.inputs, call.input_bytes, strict=True))

    def sums(self, per_call: Sequence[float]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the sum of ``per_call[start:stop]``. ``per_call``: one number
        for each call of a block (such as a layer)."""
        prefix: Table = np.concatenate([[0.0], np.cumsum(np.asarray(per_call, dtype=np.float64))])
        return np.maximum(0.0, prefix[None, :] - prefix[:, None])

    def _tabulate_run_maxima(self, per_call: Sequence[float]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the maximum of ``per_call[start:stop]``, or 0 if this slice
        is empty. ``per_call``: one number for each call of a block (such as a layer)."""
        n = len(per_call)
        table = np.zeros((n + 1, n + 1))
        grid = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], np.asarray(per_call)[None, :], 0.0)
        table[:n, 1:] = np.maximum.accumulate(grid, axis=1)
        return table

    def _tabulate_distinct_bytes(self, items: Sequence[Sequence[Item]]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of the distinct items (such as values or
        parameters) of the block calls (such as layers) ``start:stop``. ``items``: for each call, its items as pairs of
        name and bytes.
        """
        places, counted = _index_first_occurrences([[name for name, _ in own] for own in items])
        sizes = np.array([size for own in items for _, size in own], dtype=np.float64)
        return _sum_first_occurrences(places, sizes[counted], len(items))

    def _passing(self, gradients: bool) -> Table:
        """Return the bytes that are sent across each possible cut between stages, shape ``[calls + 1]``: bytes of
        values or, if ``gradients``, of gradients. The index is the number of block calls (such as layers) before the
        cut."""
        last = {name: k for k, call in enumerate(self.calls) for name in call.inputs}
        passing = np.zeros(len(self.calls) + 1)
        for k, call in enumerate(self.calls):
            outputs = zip(call.outputs, call.output_bytes, call.output_grads, strict=True)
            for name, size, grad in outputs:
                if name not in self.local and (grad or not gradients):
                    passing[k + 1 : last.get(name, k) + 1] += size
        return passing


class _StateReads:
    """The names of the parameters and buffers that each block call (such as a layer) reads. ``names``: for each call,
    these names. From a mapping of names to bytes, :meth:`table` computes the bytes of every sequence of consecutive
    calls."""

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self._places, counted = _index_first_occurrences(names)
        each = list(chain.from_iterable(names))
        self._names, self._calls = [each[number] for number in counted.tolist()], len(names)
        self._known: dict[SameObject[Mapping[str, float]], Table] = {}

    def table(self, sizes: Mapping[str, float]) -> Table:
        """Return a table whose entry ``[start, stop]`` is the bytes of the distinct parameters and buffers that the
        block calls ``start:stop`` (such as layers) read. ``sizes``: name -> bytes. The result is cached by the identity
        of ``sizes``."""
        key = SameObject(sizes)
        if key not in self._known:
            if len(self._known) * (self._calls + 1) ** 2 > _MOST_KNOWN:
                self._known.clear()
            of_names = np.array([sizes.get(name, 0.0) for name in self._names], dtype=np.float64)
            self._known[key] = _sum_first_occurrences(self._places, of_names, self._calls)
        return self._known[key]


@lru_cache(maxsize=4)
def _states_of(names: tuple[tuple[str, ...], ...]) -> _StateReads:
    return _StateReads(names)


@lru_cache(maxsize=32)
def _build_cached_segments(calls: tuple[Holding, ...], local: frozenset[str]) -> Segments:
    return Segments(calls, local)


def _sum_first_occurrences(places: NDArray[np.int64], sizes: NDArray[np.float64], n: int) -> Table:
    """Return a table whose entry ``[start, stop]`` is the bytes of the distinct items (such as parameters) that the
    block calls (such as layers) ``start:stop`` read, for a model of ``n`` calls.

    ``places``, ``sizes``: two parallel arrays with one entry for each item that a call reads. ``sizes`` has the bytes
    of the item. ``places`` has the flat index ``start * n + call``. It means that ``call`` is the first to read the
    item in every sequence of calls that begins at ``start`` or between ``start`` and ``call``; ``start`` is the
    smallest index with this property.
    """
    added = np.bincount(places, sizes, minlength=n * n).reshape(n, n)
    first = np.triu(np.cumsum(added, axis=0))  # [i, k]: bytes that call k adds to a run that starts at i
    table = np.zeros((n + 1, n + 1))
    table[:n, 1:] = np.cumsum(first, axis=1)
    return table


def _index_first_occurrences(names: Sequence[Sequence[str]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find, for each item (such as a parameter) that a block call (such as a layer) reads, the sequences of calls in
    which this call is the first reader of the item. Sums over a sequence can then count shared items once. Such a
    sequence starts after the previous call that reads the item; only this earliest start is returned. ``names``: for
    each call, the names of its items.

    Return two parallel arrays: flat indices ``start * calls + call``, and the position of the item in the concatenated
    ``names``. An item that one call names twice is listed once.
    """
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
