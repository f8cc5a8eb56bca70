"""Which ranks do the same for the same reasons, so that one of them can stand for all.

Ranks of a stage with the same events are alike as long as those they meet are alike in turn: the classes are the
coarsest partition in which every rank of a class sees the same classes in each of its groups and along its pipeline.
One representative per class then shows how all ranks run, since what a rank does next depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from runtime.events import Collective, Event, Trace
from runtime.program import Program


def representatives(program: Program, traces: Mapping[int, Trace]) -> tuple[int, ...]:
    """For each rank the first rank of its class."""
    colors = _by_events(program, traces)
    if len(set(colors)) == len(program.stages):  # ranks of a stage are alike, and so are their groups
        return tuple(colors)
    axes = {e.axes for t in _distinct(traces).values() for _, e in t if isinstance(e, Collective) and e.axes}
    groups = [_groups(program, a) for a in sorted(axes)]
    stride, world = program.strides["pp"], program.world_size
    pipelines = [tuple(range(first, world, stride)) for first in range(stride)]
    number = len(set(colors))
    while True:
        seen: list[list[Hashable]] = [[c] for c in colors]
        for partition in groups:
            for group in partition:
                among = frozenset(colors[r] for r in group)
                for r in group:
                    seen[r].append(among)
        for pipeline in pipelines:
            along = tuple(colors[r] for r in pipeline)
            for r in pipeline:
                seen[r].append(along)
        colors = _first_of_each([tuple(s) for s in seen])
        if len(set(colors)) == number:
            return tuple(colors)
        number = len(set(colors))


def _groups(program: Program, axes: tuple[str, ...]) -> list[list[int]]:
    """All groups over ``axes``."""
    grid = program.grid(axes)
    ranks = np.arange(program.world_size).reshape([*grid.values()])
    inner = [place for place, axis in enumerate(grid) if axis in axes]
    outer = [place for place in range(len(grid)) if place not in inner]
    size = math.prod(program.size(axis) for axis in axes)
    found: list[list[int]] = ranks.transpose(*outer, *inner).reshape(-1, size).tolist()
    return found


def _by_events(program: Program, traces: Mapping[int, Trace]) -> list[int]:
    """The first rank of the same stage that has the same events."""
    events: dict[int, tuple[Event, ...]] = {k: tuple(e for _, e in t) for k, t in _distinct(traces).items()}
    alike: dict[int, int] = {}  # id of a trace -> id of the first that has the same events
    known: dict[int, list[int]] = {}
    stride = program.strides["pp"]
    for rank, trace in sorted(traces.items()):
        if id(trace) not in alike:
            others = known.setdefault(rank // stride, [])
            first = next((o for o in others if events[o] == events[id(trace)]), None)
            alike[id(trace)] = id(trace) if first is None else first
            if first is None:
                others.append(id(trace))
    return _first_of_each([(r // stride, alike[id(traces[r])]) for r in range(program.world_size)])


def _distinct(traces: Mapping[int, Trace]) -> dict[int, Trace]:
    return {id(t): t for t in traces.values()}


def _first_of_each(keys: Sequence[Hashable]) -> list[int]:
    """For each position the first position with the same key."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, k) for k, key in enumerate(keys)]
