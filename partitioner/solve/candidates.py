"""Which strategies are worth a choice: every operator's own, and those that its neighbours' sections call for.

Most layouts are a dim or nothing. Some operators shard a dim only in sections (the pieces of a fused projection, an
inner factor of a reshape). What one of them asks is offered to its neighbours, which offer it to theirs, until nothing
new comes up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from partitioner.solve.ports import BlockValue
from passes.factors import NO_SIZES, Strategy, strategies
from passes.layouts import Layout

MAX_WANTED = 6  # section layouts of one value that are passed on


def candidates(
    values: Sequence[BlockValue], operators: Sequence[fx.Node], num_ranks: int, lengths: Collection[int] = NO_SIZES
) -> dict[fx.Node, list[Strategy]]:
    """The strategies of each operator of a block whose values are ``values``; ``lengths``: of sequences, which may be
    sharded zigzag."""
    spots: dict[fx.Node, dict[int, int]] = {node: {} for node in operators}  # operand i or result ~k -> value
    for number, value in enumerate(values):
        if value.source in spots:
            spots[value.source][~value.index] = number
        for reader in value.readers:
            if reader.node is not None:
                spots[reader.node].update(dict.fromkeys(reader.positions, number))
    wanted: list[dict[Layout, None]] = [{} for _ in values]
    asked: dict[fx.Node, Mapping[int, tuple[Layout, ...]]] = {}
    found: dict[fx.Node, list[Strategy]] = {}
    queue = deque(operators)
    while queue:
        node = queue.popleft()
        wishes = {spot: tuple(wanted[number]) for spot, number in spots[node].items() if wanted[number]}
        if asked.get(node) == wishes:
            continue
        asked[node] = wishes
        found[node] = strategies(node, num_ranks, wishes, lengths)
        for number in _offer(node, found[node], spots[node], wanted):
            value = values[number]
            queue.extend(r.node for r in value.readers if r.node is not None)
            if value.source in spots:
                queue.append(value.source)
    return found


def _offer(
    node: fx.Node, found: Sequence[Strategy], spots: Mapping[int, int], wanted: Sequence[dict[Layout, None]]
) -> set[int]:
    """Adds the section layouts of a node's strategies to those wanted of its values; the values that gained one."""
    gained = set[int]()
    for strategy in found:
        layouts = [*enumerate(strategy.operands), *((~k, layout) for k, layout in enumerate(strategy.results))]
        for spot, layout in layouts:
            number = spots.get(spot)
            if number is None or not layout.sections or layout in wanted[number]:
                continue
            if len(wanted[number]) < MAX_WANTED:
                wanted[number][layout] = None
                gained.add(number)
    return gained
