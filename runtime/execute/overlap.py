"""Order the operators of a graph so that communication overlaps with computation.

Requires a functional graph. Provides an order of its operators in which every collective starts as early as possible,
is waited for where its result is first read, and has independent operators in between. The order of the collectives
themselves is not changed, so that all ranks that run the graph start them in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import fx

from partitioner.passes.ir.rewrite import collect_ancestors


def order_for_overlap(nodes: Sequence[fx.Node], started: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, bool]]:
    """Return the steps of a graph with ``nodes`` in execution order, as pairs ``(node, wait)``. If ``wait`` is false,
    the step runs or starts ``node``; otherwise it waits for the collective ``node``.

    Among the operators whose operands are computed, those on which a collective depends come first, then the others,
    both in the order of the graph. Operators that read the result of a collective in progress come last, so that the
    collective overlaps with the others. ``started``: returns whether a node is a collective that is started and waited
    for.
    """
    collectives = [n for n in nodes if started(n)]
    if not collectives:
        return [(n, False) for n in nodes]
    known = set(nodes)
    leads = collect_ancestors(collectives) & known
    rank = {n: (n not in leads, i) for i, n in enumerate(nodes)}
    before = dict(zip(collectives[1:], collectives, strict=False))  # a collective follows the one before it
    missing = {n: len(known & set(n.all_input_nodes)) + (n in before) for n in nodes}
    after = {earlier: later for later, earlier in before.items()}
    ready: list[tuple[tuple[bool, int], int, fx.Node]] = []
    blocked: list[tuple[int, fx.Node]] = []
    place = {n: i for i, n in enumerate(nodes)}
    under_way: set[fx.Node] = set()
    steps: list[tuple[fx.Node, bool]] = []

    def enable(node: fx.Node) -> None:
        if under_way & set(node.all_input_nodes):
            heapq.heappush(blocked, (place[node], node))
        else:
            heapq.heappush(ready, (rank[node], place[node], node))

    def release(node: fx.Node) -> None:
        missing[node] -= 1
        if missing[node] == 0:
            enable(node)

    for node in nodes:
        if missing[node] == 0:
            enable(node)
    while ready or blocked:
        node = heapq.heappop(ready)[-1] if ready else heapq.heappop(blocked)[-1]
        for operand in node.all_input_nodes:
            if operand in under_way:
                under_way.discard(operand)
                steps.append((operand, True))
        steps.append((node, False))
        if started(node):
            under_way.add(node)
        for user in (*node.users, *((after[node],) if node in after else ())):
            if user in known:
                release(user)
        if not ready:  # unblock the operators whose collective has been waited for meanwhile
            freed = [entry for entry in blocked if not under_way & set(entry[-1].all_input_nodes)]
            for entry in freed:
                blocked.remove(entry)
                enable(entry[-1])
            heapq.heapify(blocked)
    steps += [(n, True) for n in collectives if n in under_way]
    assert sum(not wait for _, wait in steps) == len(nodes)
    return steps


# Composite operators that always return a new tensor; some other composite operators return their operand (type_as).
_ALLOCATING_OPERATORS = {torch.ops.aten.linear.default, torch.ops.aten.matmul.default}
# Operators that return a view although their schema says that they do not.
_UNSAFE = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten.lift.default,
}


def can_alias_operand(node: fx.Node) -> bool:
    """Return whether the result of ``node`` may share memory with its first operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target in _UNSAFE or any(r.alias_info is not None for r in target._schema.returns):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return bool(composite) and target not in _ALLOCATING_OPERATORS


def find_memory_owners(graph: fx.Graph, shares: Callable[[fx.Node], bool]) -> dict[fx.Node, fx.Node]:
    """Return a dict: node of ``graph`` -> the node that owns the memory of its value. Nodes with the same owner may
    share memory. ``shares``: returns whether the result of a node may share memory with its first operand.
    """
    head: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and shares(node):
            head[node] = head[node.all_input_nodes[0]]
        else:
            head[node] = node
    return head
