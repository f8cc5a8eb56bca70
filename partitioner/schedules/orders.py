"""Orders of actions of the pipeline schedules, for any number of stages and microbatches.

Each function takes (ranks ``p``, microbatches ``m``, chunks ``v``) and gives each rank's order. Where the literature
requires a multiple or a minimum of microbatches, the order is generalised: rounds have nearly equal sizes, or the order
is that of more microbatches, without the missing ones. Removing microbatches from a valid order leaves a valid order,
since an action waits only for others of its own microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.schedules.actions import Action, ActionKind, Order


def gpipe(p: int, m: int, v: int) -> tuple[Order, ...]:
    """All forwards, then all backwards (Huang et al. 2019): every microbatch is in flight at once."""
    order = tuple(Action(kind, i) for kind in ("F", "B") for i in range(m))
    return (order,) * p


def one_forward_one_backward(p: int, m: int, v: int) -> tuple[Order, ...]:
    """1F1B (Narayanan et al. 2019, 2021): stage ``s`` has ``min(p - s, m)`` microbatches in flight at most."""
    return tuple(_alternate_forwards_backwards(p, m, 1, p - s - 1, None) for s in range(p))


def interleaved_1f1b(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2); with one chunk, 1F1B."""
    if v == 1:
        return one_forward_one_backward(p, m, v)
    return tuple(_alternate_forwards_backwards(p, m, v, 2 * (p - s - 1), None) for s in range(p))


def zero_bubble_1p(p: int, m: int, v: int) -> tuple[Order, ...]:
    """ZB-1p (Qi et al. 2023, ZB-H1): backwards for weights wait until there is nothing else to do; as much memory as
    1F1B on its first stage. With several chunks, interleaved likewise."""
    return _joined_first(_alternate_forwards_backwards(p, m, v, p - s - 1, s) for s in range(p))


def zero_bubble_2p(p: int, m: int, v: int) -> tuple[Order, ...]:
    """ZB-2p (Qi et al. 2023, ZB-H2): twice the forwards ahead, and no bubble where all phases take as long."""
    return _joined_first(_alternate_forwards_backwards(p, m, v, 2 * (p - s - 1), 2 * s) for s in range(p))


def _alternate_forwards_backwards(p: int, m: int, v: int, ahead: int, behind: int | None) -> Order:
    """Forwards in rounds, ``ahead`` of them more than a round of all chunks but one before the first backward, then in
    turns with backwards. ``behind``: backwards for weights follow those for inputs by as many; ``None``: are one."""
    sizes = split_into_rounds(p, m)
    forwards = _by_round(sizes, range(v))
    backwards = _by_round(sizes, range(v)[::-1])
    warmup = min((v - 1) * max(sizes) + ahead, len(forwards))
    order = [Action("F", i, c) for i, c in forwards[:warmup]]
    for place, (i, c) in enumerate(backwards):
        order += [Action("F", *pair) for pair in forwards[warmup + place : warmup + place + 1]]
        order.append(Action("B" if behind is None else "I", i, c))
        if behind is not None and place >= behind:
            order.append(Action("W", *backwards[place - behind]))
    if behind is not None:
        order += [Action("W", *pair) for pair in backwards[max(0, len(backwards) - behind) :]]
    return tuple(order)


def split_into_rounds(p: int, m: int) -> list[int]:
    """``m`` microbatches in rounds of ``p`` or a few more, which pass a rank's chunks one after the other."""
    count = max(1, m // p)
    return [m // count + (r < m % count) for r in range(count)]


def _by_round(sizes: Iterable[int], chunks: Iterable[int]) -> list[tuple[int, int]]:
    """(microbatch, chunk), round by round and in each chunk by chunk."""
    pairs, first = [], 0
    order = list(chunks)
    for size in sizes:
        pairs += [(i, c) for c in order for i in range(first, first + size)]
        first += size
    return pairs


def zero_bubble_v(p: int, m: int, v: int) -> tuple[Order, ...]:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): as much memory as 1F1B, on every rank."""
    return _joined_first(_drop_missing_microbatches(_zero_bubble_v(p, s, max(m, 2 * p - 1)), m) for s in range(p))


def _zero_bubble_v(p: int, s: int, m: int) -> list[Action]:
    lane = _RankOrderBuilder()
    lane.add_actions("F0", 2 * (p - s) - 1)
    lane.add_actions("F1 F0", s)
    lane.add_actions("F1 I1 W1", p - s)
    while lane.count_actions("F", 0) < m or lane.count_actions("F", 1) < m:
        if lane.count_actions("F", 0) < m:
            lane.add_actions("F0")
        lane.add_actions("I0 W0 F1 I1 W1")
    lane.add_actions("I0 I1", s)
    lane.add_actions("I0 W0", p - s)
    lane.add_actions("W1", lane.count_actions("I", 1) - lane.count_actions("W", 1))
    lane.add_actions("W0", lane.count_actions("I", 0) - lane.count_actions("W", 0))
    return lane.order


def dual_pipe_v(p: int, m: int, v: int) -> tuple[Order, ...]:
    """DualPipe-V (DeepSeek-AI 2024, and github.com/deepseek-ai/DualPipe): forwards of one chunk next to backwards of
    the other. What it overlaps there follows one another here, with the transfers behind it."""
    return _joined_first(_drop_missing_microbatches(_dual_pipe_v(p, s, max(m, 2 * p)), m) for s in range(p))


def _dual_pipe_v(p: int, s: int, m: int) -> list[Action]:
    lane = _RankOrderBuilder()
    last = p - s - 1
    lane.add_actions("F0", 2 * last)
    lane.add_actions("F0 F1", s + 1)
    lane.add_actions("I1 W F1", last)
    lane.add_actions("F0 B1 F1 B0", m - 2 * p + s + 1)
    lane.add_actions("B1 F1 B0", last)
    half = (s + 1) // 2
    for pair in range(s + 1):  # from the middle one on, backwards for weights wait
        lane.add_actions("B1" if pair < half + (s % 2 == 0) else "I1")
        lane.add_actions("B0" if pair < half else "I0")
    lane.add_actions("W I0", last)
    lane.add_actions("W", len(lane.waiting))
    return lane.order


class _RankOrderBuilder:
    """One rank's order under construction: microbatches pass each chunk in their order."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.waiting: list[tuple[int, int]] = []  # (chunk, microbatch) whose backward for weights is to come
        self.counts: dict[tuple[str, int], int] = {}

    def count_actions(self, kind: str, chunk: int) -> int:
        return self.counts.get((kind, chunk), 0)

    def add_actions(self, pattern: str, times: int = 1) -> None:
        """``F0 I1 W``: the next forward of chunk 0, ... ``W``: of the chunk that waits longest, if any does."""
        for word in pattern.split() * times:
            if word == "W":
                if self.waiting:
                    chunk, i = self.waiting[0]
                    self._append_weight_backward(chunk, i)
                continue
            kind, chunk = word[0], int(word[1:])
            if kind == "W":
                self._append_weight_backward(chunk, self.count_actions("W", chunk))
                continue
            i = self._take_next_microbatch("F" if kind == "F" else "I", chunk)
            self.order.append(Action("F" if kind == "F" else "B" if kind == "B" else "I", i, chunk))
            if kind == "I":
                self.waiting.append((chunk, i))
            if kind == "B":
                self._take_next_microbatch("W", chunk)

    def _append_weight_backward(self, chunk: int, i: int) -> None:
        self.waiting.remove((chunk, i))
        self.counts["W", chunk] = self.count_actions("W", chunk) + 1
        self.order.append(Action("W", i, chunk))

    def _take_next_microbatch(self, kind: ActionKind, chunk: int) -> int:
        i = self.count_actions(kind, chunk)
        self.counts[kind, chunk] = i + 1
        return i


def _drop_missing_microbatches(order: Iterable[Action], m: int) -> Order:
    """Without the microbatches that are not there."""
    return tuple(action for action in order if action.microbatch < m)


def _joined_first(orders: Iterable[Order]) -> tuple[Order, ...]:
    """Both halves of a backward of the first virtual stage as one, where they follow each other: nobody waits for its
    gradients. Elsewhere the stage before goes on while the second half runs."""
    first, *others = orders
    return merge_backward_halves(first, 0), *others


def merge_backward_halves(order: Iterable[Action], chunk: int) -> Order:
    """Both halves of a backward through ``chunk`` as one where they follow each other."""
    result: list[Action] = []
    for action in order:
        before = result[-1] if result else None
        if action.kind == "W" and action.chunk == chunk and before == Action("I", action.microbatch, chunk):
            result[-1] = Action("B", action.microbatch, action.chunk)
        else:
            result.append(action)
    return tuple(result)
