"""Find the rank that caused a run to fail, from the known states of all ranks.

The cause is the first rank that reports a failure of its own, which is not a consequence of another rank's failure. If
there is none, it is a rank whose process has ended. If ranks report only lost connections, it is a lost rank on another
host that sends no heartbeats, a lost rank that has left the run, or the rank to which most others have lost their
connection. If no rank has made progress for the patience that the user has set, the cause is the rank for which others
wait, directly or indirectly, and which itself does not wait for any rank or sends no heartbeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from partitioner.runtime.errors import DIED, LEFT, LOST, STALLED, Failure
from partitioner.runtime.watch.status_board import RankState

_SETTLE_S = 1.0  # time in which a lost rank may report its failure, before the rank that lost it may be the cause

SILENT_S = 3.0  # seconds without a heartbeat after which a process, or its host, counts as stopped
HOST_SETTLE_S = SILENT_S + 2.0  # seconds until a lost host is known to be silent


def find_failure_cause(
    states: Sequence[RankState], patience_s: float, now: float, died: int | None = None, world_size: int = 0
) -> Failure | None:
    """Return the failure because of which training cannot continue; ``None`` if it can continue.

    Args:
        states: the last report of each rank.
        patience_s: if no rank makes progress for this number of seconds, the ranks count as stalled.
        now: current time of day in seconds.
        died: the rank whose process was seen to end first, if known.
        world_size: the number of ranks.
    """
    reporting = sorted((s for s in states if s.failure is not None), key=lambda s: s.failed_at)
    primary = [s.failure for s in reporting if s.failure is not None and not s.failure.secondary]
    if primary:
        return primary[0]
    dead_ranks = [s for s in states if not s.alive and s.failure is None and s.moment.phase != "gone"]
    if dead_ranks:
        first = next((s for s in dead_ranks if s.rank == died), None) or _find_most_blamed(dead_ranks, states)
        return describe_failure_at(first, DIED, "the process ended and said nothing (killed, or out of memory)")
    if reporting and now - reporting[0].failed_at > _SETTLE_S and len(states) >= world_size:
        away = [
            s
            for s in _find_lost_ranks(reporting, states)
            if not s.on_this_host and s.failure is None and s.moment.phase != "gone"
        ]
        silent = [s for s in away if s.silent_s > SILENT_S]
        if silent:
            return _report_lost_host(_find_most_blamed(silent, states), reporting)
        if away and now - reporting[0].failed_at < HOST_SETTLE_S:
            return None  # its host may have ended, or it may still report why
        return _blame_left_rank(reporting, states) or _blame_lost_rank(reporting)
    running = [s for s in states if s.failure is None and s.moment.phase != "gone"]
    if running and min(s.idle_s for s in running) >= patience_s:
        return _blame_stalled_rank(running, patience_s)
    return None


def describe_failure_at(state: RankState, kind: str, error: str) -> Failure:
    """Return a description of the failure of a rank at its current position: the graph node if it is known, otherwise
    the instruction. ``state``: the last report of the rank. ``kind``: kind of failure, such as "ProcessDied".
    ``error``: its text.
    """
    place, spot = state.place, state.spot
    source = f"from {spot.source}" if spot is not None and spot.source else ""
    inside = state.moment.phase == "step"
    if not inside and place is not None:
        called_from = f"{place.script}, in " if place.script and place.script not in place.line else ""
        error = f"{error}; it was last seen in {called_from}{place.line}"
    return Failure(
        rank=state.rank,
        error=error,
        kind=kind,
        instruction=(spot.text if spot is not None else "end of the step") if inside else state.moment.phase,
        index=state.index,
        step=state.moment.step + 1,
        call=(place.call if place is not None else "") or (spot.calls if spot is not None else ""),
        node=place.node if place is not None else "",
        path=place.path if place is not None else "",
        source=(place.source if place is not None else "") or source,
    )


def find_waits(states: Sequence[RankState]) -> dict[int, set[int]]:
    """Return a dict: rank -> the ranks for which it waits. ``states``: the last report of each rank. A rank does not
    wait for ranks that have entered the same collective and send heartbeats. A rank without heartbeats counts as not
    waiting, because its last report may be outdated.
    """
    found: dict[int, set[int]] = {}
    for s in states:
        place = s.place
        if place is None or not place.waits or _is_report_outdated(s):
            found[s.rank] = set()
            continue
        here = {
            other.rank
            for other in states
            if place.meeting and other.place is not None and not _is_report_outdated(other)
            and other.place.meeting == place.meeting and other.progress == s.progress
            and other.place.node == place.node
        }  # fmt: skip
        found[s.rank] = set(place.waits) - here
    return found


def _is_report_outdated(state: RankState) -> bool:
    """Return whether ``state``, the last report of a rank, may be outdated, because its process is stopped, dead or
    sends no heartbeats.
    """
    return state.stopped or not state.alive or state.silent_s > SILENT_S


def _blame_stalled_rank(states: Sequence[RankState], patience_s: float) -> Failure:
    """Return the failure of the rank that keeps the others waiting, if no rank makes progress. ``states``: the last
    reports of the running ranks. ``patience_s``: seconds without progress after which the ranks count as stalled.
    """
    edges = find_waits(states)
    free = [s for s in states if not edges[s.rank]] or list(states)  # in a cycle, any rank may be the cause
    waited_for = _count_waiting_ranks(edges)
    cause = min(free, key=lambda s: (not _is_report_outdated(s), -waited_for[s.rank], s.progress, s.rank))
    others = [s for s in states if cause.rank in edges[s.rank]]
    how = f"has not moved for {cause.idle_s:.1f} s"
    if cause.stopped:
        how += ", it was stopped by a signal"
    elif _is_report_outdated(cause):
        how += f", nor given a sign of life for {cause.silent_s:.1f} s"
    waiting = "; ".join(f"rank {s.rank} waits for it at {s.doing}" for s in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return describe_failure_at(cause, STALLED, how + (f"; {waiting}{more}" if waiting else ""))


def _count_waiting_ranks(edges: Mapping[int, set[int]]) -> Counter[int]:
    """Return, for each rank, the number of ranks that wait for it, directly or indirectly. ``edges``: rank -> the ranks
    for which it waits.
    """
    found: Counter[int] = Counter()
    for start in edges:
        seen, todo = {start}, [start]
        while todo:
            for rank in edges.get(todo.pop(), ()):
                if rank not in seen:
                    seen.add(rank)
                    todo.append(rank)
        found.update(seen - {start})
    return found


def _find_most_blamed(dead_ranks: Sequence[RankState], states: Sequence[RankState]) -> RankState:
    """Return the last report of the dead rank to which most other ranks have lost their connection; among equals, the
    one that was idle for the longest time. ``dead_ranks``: the last reports of the dead ranks. ``states``: the last
    report of each rank.
    """
    blamed = Counter(rank for s in states for rank in s.lost)
    return max(dead_ranks, key=lambda s: (blamed[s.rank], s.idle_s))


def _find_lost_ranks(reporting: Sequence[RankState], states: Sequence[RankState]) -> list[RankState]:
    """Return the last reports of the ranks to which some rank in ``reporting`` has lost its connection. ``reporting``:
    last reports of the ranks that reported a failure. ``states``: the last report of each rank.
    """
    lost = {rank for s in reporting for rank in s.lost}
    return [s for s in states if s.rank in lost]


def _report_lost_host(state: RankState, reporting: Sequence[RankState]) -> Failure:
    """Return the failure of a rank on another host that no longer sends heartbeats, and to which ranks have lost their
    connection. ``state``: the last report of that rank. ``reporting``: last reports of the ranks that reported a
    failure; the text names those of them that lost the connection.
    """
    losers = [s for s in reporting if state.rank in s.lost]
    who = "; ".join(f"rank {s.rank} lost it at {s.doing}" for s in losers[:4])
    text = f"its host has given no sign of life for {state.silent_s:.1f} s (it has ended, or its network); {who}"
    return describe_failure_at(state, DIED, text)


def _blame_left_rank(reporting: Sequence[RankState], states: Sequence[RankState]) -> Failure | None:
    """Return the failure of a rank whose script ended early or was interrupted, and to which another rank has therefore
    lost its connection; ``None`` if there is no such rank. ``reporting``: last reports of the ranks that reported a
    failure. ``states``: the last report of each rank.
    """
    gone = [s for s in states if s.moment.phase == "gone" and s.failure is None]
    for state in gone:
        losers = [s for s in reporting if state.rank in s.lost]
        if losers:
            who = "; ".join(f"rank {s.rank} needed it at {s.doing}" for s in losers[:4])
            text = f"has left, of its own accord or interrupted (sys.exit, Ctrl-C), before the others did: {who}"
            return Failure(state.rank, text, LEFT, "after the steps", step=state.moment.step + 1)
    return None


def _blame_lost_rank(reporting: Sequence[RankState]) -> Failure:
    """Return the failure to report if connections broke but no process is known to have ended. If more ranks (at least
    two) have lost their connection to one rank than to any other, and that rank reported a failure, it is that failure.
    Otherwise it is the failure that was reported first. ``reporting``: last reports of the ranks that reported a
    failure, the earliest first.
    """
    blamed = Counter(rank for s in reporting for rank in set(s.lost))
    order = {s.rank: place for place, s in enumerate(reporting)}
    ranks = {s.rank: s for s in reporting}
    most = max(blamed.values(), default=0)
    suspects = sorted((r for r, n in blamed.items() if n == most), key=lambda r: order.get(r, len(order)))
    first = reporting[0]
    assert first.failure is not None
    if len(suspects) == 1 and suspects[0] in ranks and most > 1:
        state = ranks[suspects[0]]
        assert state.failure is not None
        who = ", ".join(str(s.rank) for s in reporting if suspects[0] in s.lost)
        text = f"lost its connections to rank {who}, and no process is known to have ended: {state.failure.error}"
        return replace(state.failure, kind=LOST, error=text, secondary=False)
    peers = f"rank {', '.join(map(str, sorted(first.lost)))}" if first.lost else "another rank"
    text = f"lost its connection to {peers}, and no process is known to have ended: {first.failure.error}"
    return replace(first.failure, kind=LOST, error=text, secondary=False)
