"""Orders of actions of the built-in pipeline schedules, for any number of ranks and microbatches.

Each function takes the numbers of ranks ``p``, microbatches ``m`` and chunks ``v`` (virtual stages of a rank), and
returns one order of actions per rank. The literature often requires a multiple or a minimum of microbatches. Here the
orders are generalised: either rounds have nearly equal sizes, or the order for more microbatches is built and the
surplus microbatches are removed. The order stays valid, because an action only waits for actions of its own microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.schedules.actions import Action, ActionKind, Order


def gpipe(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under
    GPipe (Huang et al. 2019): all forwards, then all backwards of ``m`` microbatches. All microbatches are in flight at
    once. Each rank has one virtual stage, so ``v`` is not used."""
    order = tuple(Action(kind, i) for kind in ("F", "B") for i in range(m))
    return (order,) * p


def one_forward_one_backward(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under 1F1B
    (Narayanan et al. 2019, 2021) for ``m`` microbatches. Rank ``s`` (from 0) has at most ``min(p - s, m)`` microbatches
    in flight: their forward has run and their backward has not. Each rank has one virtual stage, so ``v`` is not
    used."""
    return tuple(_alternate_forwards_backwards(p, m, 1, p - s - 1, None) for s in range(p))


def interleaved_1f1b(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under
    interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), with ``m`` microbatches and ``v`` virtual stages (parts of
    the model) on each rank. If ``v`` is 1, this is 1F1B."""
    if v == 1:
        return one_forward_one_backward(p, m, v)
    return tuple(_alternate_forwards_backwards(p, m, v, 2 * (p - s - 1), None) for s in range(p))


def zero_bubble_1p(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under
    ZB-1p (Qi et al. 2023, ZB-H1), with ``m`` microbatches and ``v`` virtual stages on each rank. If ``v`` is greater
    than 1, the virtual stages are interleaved. Backwards for weight gradients are delayed to fill idle time. Every rank
    needs the memory of the first stage under 1F1B."""
    return _joined_first(_alternate_forwards_backwards(p, m, v, p - s - 1, s) for s in range(p))


def zero_bubble_2p(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under
    ZB-2p (Qi et al. 2023, ZB-H2), with ``m`` microbatches and ``v`` virtual stages on each rank. Each rank runs twice
    as many forwards before its first backward as in ZB-1p. There is no bubble if the forward and both halves of the
    backward take equally long."""
    return _joined_first(_alternate_forwards_backwards(p, m, v, 2 * (p - s - 1), 2 * s) for s in range(p))


def _alternate_forwards_backwards(p: int, m: int, v: int, ahead: int, behind: int | None) -> Order:
    """Return the order of actions (forwards and backwards of one microbatch) of one pipeline rank: first some warm-up
    forwards, then backwards and forwards in alternation. ``p``, ``m``, ``v``: numbers of ranks, of microbatches, and of
    the rank's virtual stages.

    The warm-up consists of ``v - 1`` times the size of a round of microbatches (about ``p``), plus ``ahead`` forwards.
    ``behind``: number of backwards for inputs by which each backward for weights is delayed; ``None``: backwards are
    not split. ``ahead`` and ``behind`` depend on the index of the rank.
    """
    sizes = split_into_rounds(p, m)
    forwards = _order_by_round(sizes, range(v))
    backwards = _order_by_round(sizes, range(v)[::-1])
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
    """Return the sizes of the rounds into which ``m`` microbatches are divided: ``p`` microbatches or slightly more per
    round, or one round of ``m`` if ``m`` is less than ``p``. With several virtual stages per rank, a round passes
    through all of them before the next round begins."""
    count = max(1, m // p)
    return [m // count + (r < m % count) for r in range(count)]


def _order_by_round(sizes: Iterable[int], chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the order in which the microbatches pass through the virtual stages of a rank, as pairs (microbatch,
    virtual stage): round by round, and within a round one virtual stage after the other. ``sizes``: number of
    microbatches of each round. ``chunks``: the rank's virtual stages (their indices on the rank) in the order in which
    a round passes them."""
    pairs, first = [], 0
    order = list(chunks)
    for size in sizes:
        pairs += [(i, c) for c in order for i in range(first, first + size)]
        first += size
    return pairs


def zero_bubble_v(p: int, m: int, v: int) -> tuple[Order, ...]:
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under ZB-V
    (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"), with ``m`` microbatches and two virtual stages
    per rank, so ``v`` is not used. Every rank needs as much memory as the first stage under 1F1B."""
    return _joined_first(_drop_missing_microbatches(_zero_bubble_v(p, s, max(m, 2 * p - 1)), m) for s in range(p))


def _zero_bubble_v(p: int, s: int, m: int) -> list[Action]:
    """Return the order of actions (forwards and backwards of one microbatch) of one rank under the pipeline schedule
    ZB-V. ``p``: number of ranks. ``s``: index of the rank, from 0. ``m``: number of microbatches, at least ``2p -
    1``."""
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
    """Return the order of actions (forwards and backwards of one microbatch) of each of ``p`` pipeline ranks under
    DualPipe-V (DeepSeek-AI 2024, github.com/deepseek-ai/DualPipe), with ``m`` microbatches and two virtual stages per
    rank, so ``v`` is not used. A forward in one virtual stage is followed by a backward in the other. DualPipe runs
    these two at the same time; here they are consecutive, and computation hides their transfers."""
    return _joined_first(_drop_missing_microbatches(_dual_pipe_v(p, s, max(m, 2 * p)), m) for s in range(p))


def _dual_pipe_v(p: int, s: int, m: int) -> list[Action]:
    """Return the order of actions (forwards and backwards of one microbatch) of one rank under the pipeline schedule
    DualPipe-V. ``p``: number of ranks. ``s``: index of the rank, from 0. ``m``: number of microbatches, at least
    ``2p``."""
    lane = _RankOrderBuilder()
    last = p - s - 1
    lane.add_actions("F0", 2 * last)
    lane.add_actions("F0 F1", s + 1)
    lane.add_actions("I1 W F1", last)
    lane.add_actions("F0 B1 F1 B0", m - 2 * p + s + 1)
    lane.add_actions("B1 F1 B0", last)
    half = (s + 1) // 2
    for pair in range(s + 1):  # from the middle on, backwards for weights are delayed
        lane.add_actions("B1" if pair < half + (s % 2 == 0) else "I1")
        lane.add_actions("B0" if pair < half else "I0")
    lane.add_actions("W I0", last)
    lane.add_actions("W", len(lane.waiting))
    return lane.order


class _RankOrderBuilder:
    """Builder of one pipeline rank's order of actions. An action is a forward, a backward or a half of a backward of
    one microbatch in one virtual stage of the rank. Each added action takes the next microbatch that has not yet had an
    action of the same kind in the same virtual stage.
    """

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.waiting: list[tuple[int, int]] = []  # (chunk, microbatch) whose backward for weights is pending
        self.counts: dict[tuple[str, int], int] = {}

    def count_actions(self, kind: str, chunk: int) -> int:
        """Return for how many microbatches an action of the given kind was added to the order so far. ``kind``: ``F``
        forward, ``I`` or ``W`` the half of the backward for input or weight gradients. ``chunk``: index of the virtual
        stage on the rank.
        """
        return self.counts.get((kind, chunk), 0)

    def add_actions(self, pattern: str, times: int = 1) -> None:
        """Append the actions of ``pattern``, repeated ``times`` times, to the rank's order. ``pattern``: words such as
        ``F0``, a kind of action (``F`` forward, ``B`` backward, ``I`` or ``W`` its half for input or weight gradients)
        and the index of a virtual stage on the rank. ``W`` without an index is the backward for weights that has been
        pending longest; it is skipped if none is pending."""
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
        """Append the backward for weight gradients of microbatch ``i`` in the virtual stage with index ``chunk`` on the
        rank. The order must already contain the backward for input gradients of this microbatch."""
        self.waiting.remove((chunk, i))
        self.counts["W", chunk] = self.count_actions("W", chunk) + 1
        self.order.append(Action("W", i, chunk))

    def _take_next_microbatch(self, kind: ActionKind, chunk: int) -> int:
        """Return the index of the next microbatch for an action of the given kind, and count it as taken. ``kind``:
        ``F`` forward, ``I`` or ``W`` the half of the backward for input or weight gradients. ``chunk``: index of the
        virtual stage on the rank."""
        i = self.count_actions(kind, chunk)
        self.counts[kind, chunk] = i + 1
        return i


def _drop_missing_microbatches(order: Iterable[Action], m: int) -> Order:
    """Return the actions (forwards and backwards of one microbatch) of ``order`` whose microbatch index is below ``m``.
    This shortens an order that was built for more than ``m`` microbatches."""
    return tuple(action for action in order if action.microbatch < m)


def _joined_first(orders: Iterable[Order]) -> tuple[Order, ...]:
    """Return ``orders`` with whole backwards on virtual stage 0: adjacent halves of a backward (for inputs, for
    weights) become one action, because no stage waits for the input gradients of the first stage. On other stages the
    halves stay separate, so that the preceding stage can continue during the second half. ``orders``: the order of
    actions of each pipeline rank."""
    first, *others = orders
    return merge_backward_halves(first, 0), *others


def merge_backward_halves(order: Iterable[Action], chunk: int) -> Order:
    """Return a rank's ``order`` of actions in which adjacent halves of a backward are merged, for one virtual stage:
    each ``I`` (backward for inputs) that the ``W`` (backward for weights) of the same microbatch follows becomes one
    ``B``. ``chunk``: index of this virtual stage on the rank."""
    result: list[Action] = []
    for action in order:
        before = result[-1] if result else None
        if action.kind == "W" and action.chunk == chunk and before == Action("I", action.microbatch, chunk):
            result[-1] = Action("B", action.microbatch, action.chunk)
        else:
            result.append(action)
    return tuple(result)
