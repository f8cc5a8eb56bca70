"""From which stages a gradient comes back: those to which the value was sent, if anything beyond adds to it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.facts import ProgramFacts
from runtime.program import Instruction

Returns = dict[tuple[str, int], frozenset[int]]  # (value, microbatch) -> stages


def gradient_returns(facts: ProgramFacts, lists: Sequence[Sequence[Instruction]]) -> tuple[Returns, ...]:
    """For each stage, the gradients that it must receive, and from where, if the stages run ``lists``."""
    sent: dict[tuple[str, int], dict[int, list[int]]] = {}
    for s, instructions in enumerate(lists):
        for i in instructions:
            if i.op == "SEND_F" and i.peer is not None and i.microbatch is not None:
                for value in i.values:
                    if value in facts.flow.values:
                        sent.setdefault((value, i.microbatch), {}).setdefault(s, []).append(i.peer)
    adds = [{v for call in calls for v in call.gives} for calls in facts.stages]
    result: tuple[Returns, ...] = tuple({} for _ in lists)
    for key, edges in sent.items():
        for s, peers in edges.items():
            back = frozenset(p for p in peers if _reaches(key[0], p, edges, adds))
            if back:
                result[s][key] = back
    return result


def _reaches(value: str, start: int, edges: dict[int, list[int]], adds: list[set[str]]) -> bool:
    """Whether some stage that the value gets to from ``start`` adds to its gradient."""
    stack, seen = [start], set()
    while stack:
        s = stack.pop()
        if s in seen or not 0 <= s < len(adds):
            continue
        if value in adds[s]:
            return True
        seen.add(s)
        stack.extend(edges.get(s, ()))
    return False
