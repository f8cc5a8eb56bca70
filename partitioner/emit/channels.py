"""Plan the receives of each rank before each of its actions, in the order in which the transfers are sent.

The transfers between two ranks in one direction form a first-in, first-out channel. The receiver may need them in
another order than the sender sends them. Before the transfer that it needs, it then also receives all earlier transfers
of the channel. A receiver never waits for a transfer that has not been sent by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from partitioner.emit.routes import Routes
from partitioner.schedules.actions import Action, Order, group_stages_by_rank

Direction = Literal["F", "B"]

Channel = tuple[int, int, Direction]  # source, target


class Fetch(NamedTuple):
    """One transfer between two consecutive virtual stages (parts of the model on different pipeline ranks), from the
    receiver's point of view.

    ``direction``: ``F`` for values, sent from virtual stage ``hop - 1`` to ``hop``; ``B`` for their gradients, sent
    back from ``hop`` to ``hop - 1``. ``microbatch``: index of the microbatch. ``hop``: index of the later virtual
    stage. ``peer``: the pipeline rank that sends.
    """

    direction: Direction
    microbatch: int
    hop: int
    peer: int


def plan_fetches(orders: Sequence[Order], routes: Routes, train: bool) -> list[list[list[Fetch]]]:
    """Return, for each pipeline rank and each position in its order, the list of transfers that the rank receives
    before the action at this position. ``orders``: the actions (forwards and backwards of one microbatch) of each rank
    in order. ``routes``: the values that are sent between virtual stages. ``train``: whether gradients are also sent.
    """
    own = group_stages_by_rank(routes.ranks, len(orders))
    sent: dict[Channel, list[Fetch]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            found = _find_sent_fetch(routes, rank, own[rank][action.chunk], action, train)
            if found is not None:
                target, fetch = found
                sent.setdefault((rank, target, fetch.direction), []).append(fetch)
    place = {channel: {fetch: i for i, fetch in enumerate(row)} for channel, row in sent.items()}
    taken = dict.fromkeys(sent, 0)
    result: list[list[list[Fetch]]] = []
    for rank, order in enumerate(orders):
        before: list[list[Fetch]] = []
        for action in order:
            wanted = _find_wanted_fetch(routes, own[rank][action.chunk], action, train)
            before.append([])
            if wanted is not None:
                channel: Channel = wanted.peer, rank, wanted.direction
                stop = place[channel][wanted] + 1
                before[-1] = sent[channel][taken[channel] : stop]  # empty if it was received with an earlier transfer
                taken[channel] = max(taken[channel], stop)
        result.append(before)
    return result


def _find_sent_fetch(routes: Routes, rank: int, virtual: int, action: Action, train: bool) -> tuple[int, Fetch] | None:
    """Return the transfer that an action (a forward or backward of one microbatch) of the pipeline rank ``rank`` sends,
    as (pipeline rank that receives it, transfer); ``None`` if the action sends nothing.

    ``virtual``: the virtual stage of the action, counted over all ranks. ``routes``: the values that are sent between
    virtual stages. ``train``: whether gradients are sent.
    """
    if action.kind == "F":
        hop = virtual + 1
        if hop < len(routes.arriving) and routes.arriving[hop]:
            return routes.ranks[hop], Fetch("F", action.microbatch, hop, rank)
    elif train and action.kind != "W" and routes.returning[virtual]:
        return routes.ranks[virtual - 1], Fetch("B", action.microbatch, virtual, rank)
    return None


def _find_wanted_fetch(routes: Routes, virtual: int, action: Action, train: bool) -> Fetch | None:
    """Return the transfer from another rank that a pipeline rank must receive before an action (a forward or backward
    of one microbatch); ``None`` if the action needs none.

    ``virtual``: the virtual stage of the action, counted over all ranks. ``routes``: the values that are sent between
    virtual stages. ``train``: whether gradients are sent.
    """
    if action.kind == "F":
        if routes.arriving[virtual]:
            return Fetch("F", action.microbatch, virtual, routes.ranks[virtual - 1])
    elif train and action.kind != "W":
        hop = virtual + 1
        if hop < len(routes.returning) and routes.returning[hop]:
            return Fetch("B", action.microbatch, hop, routes.ranks[hop])
    return None
