"""Erase the operators of a graph whose results nobody reads."""

from __future__ import annotations

from torch import fx


def drop_unused(graph: fx.Graph) -> None:
    """Erase, last first, every operator without a reader that does nothing besides.

    As ``fx.Graph.eliminate_dead_code``, which asks of every node what it does and checks the graph first.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
