"""An order of elimination of bounded width for a graph that is too wide: some nodes, the cutset, stay as they are.

What is left when the cutset is fixed is solved exactly by dynamic programming (cutset conditioning: Pearl, 1988;
w-cutsets: Bidyuk and Dechter, 2007). A random cutset per step of a search makes a large neighbourhood of which the
best member is found.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence


def conditioned_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, set[int]], most_entries: float, weights: Sequence[float]
) -> list[int]:
    """The nodes outside the cutset, in an order in which no table of their elimination exceeds ``most_entries``.

    The node of the smallest table goes next. Where even that is too large, the node of it with most neighbours goes
    into the cutset, neighbours being weighed with ``weights[node]``. ``sizes`` are numbers of choices.
    """
    near = {node: set(others) for node, others in neighbours.items()}
    log = {node: math.log(size) for node, size in sizes.items()}
    score = {node: log[node] + sum(log[j] for j in others) for node, others in near.items()}
    heap = [(s, node) for node, s in score.items()]
    heapq.heapify(heap)
    most, order = math.log(most_entries) + 1e-9, list[int]()
    while heap:
        known, node = heapq.heappop(heap)
        if node not in near:
            continue
        now = score[node]
        if now > known + 1e-9:  # it has grown since
            heapq.heappush(heap, (now, node))
            continue
        if now > most:
            cut = max((*near[node], node), key=lambda j: len(near[j]) * log[j] * weights[j])
            for j in near.pop(cut):
                near[j].discard(cut)
                score[j] -= log[cut]
                heapq.heappush(heap, (score[j], j))
            if cut != node:
                heapq.heappush(heap, (score[node], node))
            continue
        around = near.pop(node)
        order.append(node)
        for j in around:
            mine = near[j]
            mine.discard(node)
            new = around - mine
            new.discard(j)
            mine |= new
            score[j] += sum([log[k] for k in new]) - log[node]
            if len(new) <= 1:
                heapq.heappush(heap, (score[j], j))
    return order
