"""Check that the ranks' communication events match: simulate all ranks together until all have ended or none can
proceed.

Events are collectives, sends and receives. Assumptions about communication: transfers from one rank to another in one
direction (forward, backward) arrive in the order in which they were sent, and advance by themselves; so do the
operations of one group; nothing else is ordered.

:func:`find_representatives` finds ranks that are equivalent, so that only one of them needs to be simulated. Ranks of a
stage with the same events are equivalent if the ranks with which they communicate are equivalent, too: the classes are
the coarsest partition in which every rank of a class sees the same classes in each of its groups and along its
pipeline. One representative per class suffices, because the next event of a rank depends on nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from partitioner.runtime.program.instructions import CollectiveEvent, Event, FinishEvent, ReceiveEvent, SendEvent, Trace
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import Fault


def find_representatives(program: Program, traces: Mapping[int, Trace]) -> tuple[int, ...]:
    """Return, for each rank, the lowest equivalent rank. The prover simulates only the ranks in the result. Equivalent
    ranks have the same communication events (collectives, sends, receives), and communicate with equivalent ranks.
    ``traces``: the events of each rank, as pairs (instruction index, event). ``program``: the program of all ranks.
    """
    colors = _match_ranks_by_events(program, traces)
    if len(set(colors)) == len(program.stages):  # equal ranks of a stage have equal groups, too
        return tuple(colors)
    axes = {
        e.axes for t in _deduplicate_traces(traces).values() for _, e in t if isinstance(e, CollectiveEvent) and e.axes
    }
    groups = [_list_groups(program, a) for a in sorted(axes)]
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
        colors = _index_first_occurrence_of_keys([tuple(s) for s in seen])
        if len(set(colors)) == number:
            return tuple(colors)
        number = len(set(colors))


def _list_groups(program: Program, axes: tuple[str, ...]) -> list[list[int]]:
    """Return all groups of ranks whose coordinates differ only on the mesh axes ``axes``, as lists of ranks.

    ``program``: the program of all ranks.
    """
    grid = program.grid(axes)
    ranks = np.arange(program.world_size).reshape([*grid.values()])
    inner = [place for place, axis in enumerate(grid) if axis in axes]
    outer = [place for place in range(len(grid)) if place not in inner]
    size = math.prod(program.size(axis) for axis in axes)
    found: list[list[int]] = ranks.transpose(*outer, *inner).reshape(-1, size).tolist()
    return found


def _match_ranks_by_events(program: Program, traces: Mapping[int, Trace]) -> list[int]:
    """Return, for each rank, the lowest rank of the same pipeline stage that has equal communication events
    (collectives, sends and receives). ``traces``: the events of each rank, as pairs (instruction index, event).
    ``program``: the program of all ranks.
    """
    distinct = _deduplicate_traces(traces)

    @cache
    def events(number: int) -> tuple[Event, ...]:
        return tuple(event for _, event in distinct[number])

    alike: dict[int, int] = {}  # id of a trace -> id of the first that has the same events
    known: dict[int, list[int]] = {}
    stride = program.strides["pp"]
    for rank, trace in sorted(traces.items()):
        if id(trace) not in alike:
            others = known.setdefault(rank // stride, [])
            first = next((o for o in others if events(o) == events(id(trace))), None)
            alike[id(trace)] = id(trace) if first is None else first
            if first is None:
                others.append(id(trace))
    return _index_first_occurrence_of_keys([(r // stride, alike[id(traces[r])]) for r in range(program.world_size)])


def _deduplicate_traces(traces: Mapping[int, Trace]) -> dict[int, Trace]:
    return {id(t): t for t in traces.values()}


def _index_first_occurrence_of_keys(keys: Sequence[Hashable]) -> list[int]:
    """Return, for each key in ``keys``, the index of its first occurrence in ``keys``."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, k) for k, key in enumerate(keys)]


class Mismatch(Exception):
    """Raised if two ranks disagree on a communication, or if ranks deadlock.

    ``fault``: kind of fault: ``"match"`` (two ranks disagree on what they exchange) or ``"deadlock"`` (ranks wait for
    each other forever). ``rank`` and ``index``: the instruction at fault, as rank and position in its list. ``node``:
    name of the graph node at fault; empty if no graph runs.
    """

    def __init__(self, fault: Fault, message: str, rank: int, index: int, node: str = "") -> None:
        """Create the error. ``message``: what is wrong, without rank and instruction. The other arguments: see the
        class.
        """
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.rank = rank
        self.index = index
        self.node = node


@dataclass
class _GroupOperation:
    """One collective of a process group in the simulated run of all ranks. ``rank``: the first rank that has entered it
    (representing all equivalent ranks). ``index``: position of the instruction with which this rank has entered.
    ``event``: the collective as this rank describes it. ``arrived``: number of ranks that have entered.
    """

    rank: int
    index: int
    event: CollectiveEvent
    arrived: int = 0


@dataclass
class _GroupProgress:
    """The progress of one process group. ``ranks``: the members of the group. ``operations``: the collectives that it
    has started so far. ``entered``: rank -> number of collectives that the rank has entered. ``waiting``: the ranks
    that wait until all members have entered a collective.
    """

    ranks: frozenset[int]
    operations: list[_GroupOperation] = field(default_factory=list)
    entered: dict[int, int] = field(default_factory=dict)  # rank -> how many operations it has entered
    waiting: list[int] = field(default_factory=list)

    def is_complete(self, number: int) -> bool:
        return self.operations[number].arrived == len(self.ranks)

    def find_missing_ranks(self, number: int) -> set[int]:
        """Return the set of ranks of this process group that have not entered its collective ``number``, counted from
        0.
        """
        return {r for r in self.ranks if self.entered.get(r, 0) <= number}


@dataclass
class _Channel:
    sent: deque[tuple[SendEvent, int]] = field(default_factory=deque)  # (event, index)
    waiting: bool = False


class TraceRunner:
    """Runs the communication events (collectives, sends, receives) of all ranks against each other, to find deadlocks
    and mismatches. Only one of several equivalent ranks is run.
    """

    def __init__(self, program: Program, traces: Mapping[int, Trace], suspects: Collection[int] = ()) -> None:
        """Start before the first event of every rank. ``traces``: the events of each rank, as pairs (instruction index,
        event). ``suspects``: ranks whose own instruction list replaces that of their pipeline stage; errors blame these
        ranks first. ``program``: the program of all ranks.
        """
        self.program = program
        self.classes = find_representatives(program, traces)
        self.traces = traces = {rank: traces[rank] for rank in sorted(set(self.classes))}
        self.suspects = {self.classes[rank] for rank in suspects}
        self.position = dict.fromkeys(traces, 0)
        # rank that waits for a collective that it has entered -> its group, and the collective's number
        self.inside: dict[int, tuple[_GroupProgress, int]] = {}
        self.started: dict[int, list[tuple[_GroupProgress, int]]] = {rank: [] for rank in traces}
        self.groups: dict[Hashable, _GroupProgress] = {}
        self.memberships: dict[tuple[int, Hashable], _GroupProgress] = {}
        # axes along which all members of a rank's group are represented by the rank itself: they agree with each other
        self.alone = {rank: self.find_lone_axes(rank, trace) for rank, trace in traces.items()}
        self.channels: dict[tuple[int, int, str], _Channel] = {}
        self.runnable = deque(traces)
        self.stages = {rank: program.coordinates(rank)["pp"] for rank in traces}

    def run_traces(self) -> None:
        """Run the communication events of all ranks to their end.

        Raise :class:`Mismatch` if ranks disagree, deadlock, or do not receive a message.
        """
        while self.runnable:
            self.advance_rank(self.runnable.popleft())
        waiting_ranks = [r for r, trace in self.traces.items() if r in self.inside or self.position[r] < len(trace)]
        if waiting_ranks:
            raise self.describe_deadlock(waiting_ranks)
        for (source, target, _), channel in self.channels.items():
            if channel.sent:
                event, index = channel.sent[0]
                raise Mismatch("match", f"sends {event.text} to rank {target}, which never receives it", source, index)

    def advance_rank(self, rank: int) -> None:
        """Run the communication events of ``rank`` until the rank ends or has to wait for another rank."""
        trace, position, alone = self.traces[rank], self.position[rank], self.alone[rank]
        stop = len(trace)
        while position < stop:
            index, event = trace[position]
            if isinstance(event, CollectiveEvent):
                if not event.stages and event.axes in alone:
                    position += 1
                    continue
                group, number = self.enter_collective(rank, index, event)
                position += 1
                if event.waits and not group.is_complete(number):
                    self.inside[rank] = group, number
                    group.waiting.append(rank)
                    break
                if not event.waits:
                    self.started[rank].append((group, number))
                continue
            if isinstance(event, SendEvent):
                self.send_values(rank, index, event)
            elif isinstance(event, ReceiveEvent):
                if not self.receive_values(rank, index, event):
                    break
            elif not self.check_finished(rank, event):
                break
            position += 1
        self.position[rank] = position

    # --- groups -----------------------------------------------------------------------------------------------------

    def find_lone_axes(self, rank: int, trace: Trace) -> frozenset[tuple[str, ...]]:
        """Return the tuples of mesh axes of those collectives of ``rank`` in which all members are equivalent to
        ``rank``. These members start the same collectives in the same order, so the collectives always match and need
        not be simulated. ``trace``: the communication events of the rank, as pairs (instruction index, event).
        """
        every = {event.axes for _, event in trace if isinstance(event, CollectiveEvent) and not event.stages}
        return frozenset(axes for axes in every if all(self.classes[r] == rank for r in self.program.group(rank, axes)))

    def get_group_progress(self, rank: int, event: CollectiveEvent) -> _GroupProgress:
        """Return the record of the collectives of the process group in which ``rank`` runs the collective ``event``.
        The record is created at the group's first use.
        """
        key = event.stages or event.axes
        group = self.memberships.get((rank, key))
        if group is None:
            ranks = frozenset(self.classes[r] for r in self.list_members(rank, event))
            group = self.groups.setdefault((key, ranks), _GroupProgress(ranks))
            self.memberships[rank, key] = group
        return group

    def list_members(self, rank: int, event: CollectiveEvent) -> tuple[int, ...]:
        """Return the ranks that take part in the collective ``event``, which ``rank`` starts."""
        if event.stages:
            return tuple(self.find_peer_rank(rank, s) for s in event.stages)
        return self.program.group(rank, event.axes)

    def enter_collective(self, rank: int, index: int, event: CollectiveEvent) -> tuple[_GroupProgress, int]:
        """Record that ``rank`` enters the collective ``event`` of its instruction ``index``. If all members have
        entered, resume the ranks that wait for the collective. Return the record of the process group, and the index of
        the collective in the group. Raise :class:`Mismatch` if other ranks entered a different collective.
        """
        group = self.get_group_progress(rank, event)
        number = group.entered.get(rank, 0)
        group.entered[rank] = number + 1
        if number == len(group.operations):
            group.operations.append(_GroupOperation(rank, index, event))
        operation = group.operations[number]
        if operation.event is not event and not event.matches(operation.event):
            raise self.create_mismatch(rank, index, event, operation)
        operation.arrived += 1
        if group.is_complete(number) and group.waiting:
            for waiting in group.waiting:
                self.inside.pop(waiting, None)
            self.runnable.extend(group.waiting)
            group.waiting.clear()
        return group, number

    def create_mismatch(self, rank: int, index: int, event: CollectiveEvent, first: _GroupOperation) -> Mismatch:
        """Return the error for a rank that enters a different collective than the first rank of its group. ``rank``,
        ``index``, ``event``: the later rank, the position of its instruction, and its collective. ``first``: the
        collective that the first rank entered.
        """
        mine, theirs = (rank, index, event), (first.rank, first.index, first.event)
        if first.rank in self.suspects and rank not in self.suspects:
            mine, theirs = theirs, mine
        members = self.list_members(mine[0], mine[2])
        other = next(r for r in members if self.classes[r] == theirs[0])
        return Mismatch(
            "match",
            f"enters {mine[2].text} with the ranks {_format_ranks(members)}, where rank {other} at its instruction "
            f"{theirs[1]} enters {theirs[2].text}",
            mine[0],
            mine[1],
            mine[2].node,
        )

    def check_finished(self, rank: int, event: FinishEvent) -> bool:
        """Return whether all collectives for which ``rank`` waits at ``event`` have ended. If they have not ended,
        ``rank`` is checked again when the first of them ends.
        """
        self.started[rank] = [(group, number) for group, number in self.started[rank] if not group.is_complete(number)]
        open_ = self.list_awaited(rank, event)
        if open_:
            open_[0][0].waiting.append(rank)
        return not open_

    def list_awaited(self, rank: int, event: FinishEvent) -> list[tuple[_GroupProgress, int]]:
        """Return the collectives for which ``event`` waits: ``rank`` has started them, and they have not ended. Each is
        a pair (record of the process group, index of the collective in the group).
        """
        return [
            (group, number)
            for group, number in self.started[rank]
            if not group.is_complete(number) and event.key in (None, group.operations[number].event.key)
        ]

    # --- transfers --------------------------------------------------------------------------------------------------

    def find_peer_rank(self, rank: int, stage: int) -> int:
        return rank + (stage - self.stages[rank]) * self.program.strides["pp"]

    def find_channel(self, source: int, target: int, direction: str) -> _Channel:
        key = source, target, direction
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = _Channel()
        return channel

    def send_values(self, rank: int, index: int, event: SendEvent) -> None:
        """Put the message of ``event``, which the instruction ``index`` of ``rank`` sends, into its channel, and resume
        a waiting receiver.
        """
        target = self.classes[self.find_peer_rank(rank, event.peer)]
        channel = self.find_channel(rank, target, event.direction)
        channel.sent.append((event, index))
        if channel.waiting:
            channel.waiting = False
            self.runnable.append(target)

    def receive_values(self, rank: int, index: int, event: ReceiveEvent) -> bool:
        """Take the next message from the channel of ``event`` for the instruction ``index`` of ``rank``, and return
        ``True``. Return ``False`` if no message was sent yet. Raise :class:`Mismatch` if the message is not the
        expected one.
        """
        source = self.classes[self.find_peer_rank(rank, event.peer)]
        channel = self.find_channel(source, rank, event.direction)
        if not channel.sent:
            channel.waiting = True
            return False
        sent, sent_at = channel.sent.popleft()
        if not event.matches(sent):
            if source in self.suspects and rank not in self.suspects:
                message = f"sends {sent.text} to rank {rank}, which receives {event.text} at its instruction {index}"
                raise Mismatch("match", message, source, sent_at)
            message = f"receives {event.text} from rank {source}, which sends {sent.text} at its instruction {sent_at}"
            raise Mismatch("match", message, rank, index)
        return True

    # --- deadlocks --------------------------------------------------------------------------------------------------

    def describe_deadlock(self, waiting_ranks: list[int]) -> Mismatch:
        """Return the error for a deadlock. The message lists the ranks that wait for each other in a cycle. If there is
        no cycle, it lists the chain of waiting ranks, up to one that waits for a rank that has ended.
        ``waiting_ranks``: the ranks that cannot proceed.
        """
        rank = next((r for r in waiting_ranks if r in self.suspects), waiting_ranks[0])
        chain: list[int] = []
        while rank not in chain:
            chain.append(rank)
            still = [self.classes[r] for r in self.describe_wait(rank)[1] if self.classes[r] in waiting_ranks]
            if not still:
                break
            rank = still[0]
        circle = chain[chain.index(rank) :] if rank in chain else chain
        first = next((r for r in circle if r in self.suspects), circle[0])
        start = circle.index(first)
        lines = []
        for r in (circle[start:] + circle[:start])[:8]:
            what, others, index, _ = self.describe_wait(r)
            ended = [o for o in others if self.classes[o] not in waiting_ranks]
            end = f", of which {_format_ranks(ended)} will not come" if ended else ""
            lines.append(f"rank {r} at instruction {index} {what}, waiting for rank {_format_ranks(others)}{end}")
        index, node = self.describe_wait(first)[2:]
        number = sum(c in waiting_ranks for c in self.classes)
        message = f"waits for ever ({number} of {len(self.classes)} ranks are stuck): " + "; ".join(lines)
        return Mismatch("deadlock", message, first, index, node)

    def describe_wait(self, rank: int) -> tuple[str, list[int], int, str]:
        """Return four values for ``rank``, which cannot proceed: its current operation as text, the ranks for which it
        waits, the position of its instruction, and the name of the graph node (empty if the instruction does not run a
        graph).
        """
        if rank in self.inside:
            group, number = self.inside[rank]
            index, event = self.traces[rank][self.position[rank] - 1]
            assert isinstance(event, CollectiveEvent)
            return f"is in {event.text}", self.list_absent_ranks(rank, event, group, number), index, event.node
        index, event = self.traces[rank][self.position[rank]]
        if isinstance(event, ReceiveEvent):
            return f"receives {event.text}", [self.find_peer_rank(rank, event.peer)], index, ""
        assert isinstance(event, FinishEvent)
        group, number = self.list_awaited(rank, event)[0]
        started = group.operations[number].event
        return f"waits for {started.text}", self.list_absent_ranks(rank, started, group, number), index, ""

    def list_absent_ranks(self, rank: int, event: CollectiveEvent, group: _GroupProgress, number: int) -> list[int]:
        """Return the ranks that have not yet entered the collective with the index ``number`` of the process group
        ``group``. ``event``: this collective as described by ``rank``, which has entered it.
        """
        return [r for r in self.list_members(rank, event) if self.classes[r] in group.find_missing_ranks(number)]


def _format_ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, list(ranks)[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"
