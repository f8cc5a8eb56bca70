"""Numbers for the nodes of a graph, the same for those that are computed alike."""

from __future__ import annotations

import torch
from torch import fx


class Numbers:
    """A number for every node, the same for those on which the same operators work on the same inputs; one of its own
    for each that is random.

    ``alike``: what graphs share that are compared. Their inputs go by name, and what is random by its turn.
    """

    def __init__(self, alike: dict[tuple[str, str, str], int] | None = None) -> None:
        self._alike = {} if alike is None else alike
        self._known: dict[fx.Node, int] = {}
        self._draws = 0

    def __call__(self, node: fx.Node) -> int:
        waiting = [node]
        while waiting:  # not by recursion: there may be hundreds of layers before
            last = waiting[-1]
            missing = [n for n in last.all_input_nodes if n not in self._known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if last not in self._known:
                args = fx.node.map_arg((last.args, last.kwargs), lambda n: ("node", self._known[n]))
                key = self._own(last), str(last.target), str(args)
                self._known[last] = self._alike.setdefault(key, len(self._alike))
        return self._known[node]

    def _own(self, node: fx.Node) -> str:
        """What tells ``node`` from others of its kind."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            self._draws += 1
            return str(self._draws)
        return node.name if node.op == "placeholder" else ""
