"""An oracle for the prover: runs the programs of all ranks on symbols instead of numbers.

A tensor is a term that says how it was computed, from which inputs on which rank; a gradient is a multiset of terms.
Nothing is checked beforehand: ranks run until they have all ended, or crash, or hang. Two programs compute the same if
they leave the same terms behind. It shares no code with the prover.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Hashable, Mapping
from functools import cache
from typing import Any

import torch

from partitioner.passes.ir.serialize import block_from_data
from partitioner.passes.shard.differentiate import differentiate, list_collectives
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import Program

Term = int
Sum = Counter[Term]
_terms: dict[Hashable, Term] = {}


class Crash(Exception):
    """A rank cannot go on, or ranks that meet do not fit."""


class Hang(Exception):
    """Some ranks wait for ever."""


def term(*parts: Hashable) -> Term:
    return _terms.setdefault(parts, len(_terms))


def total(parts: Sum) -> Term:
    return term("sum", frozenset((t, n) for t, n in parts.items() if n))


@cache
def graph_collectives(
    nodes: str, states: tuple[str, ...], inputs: tuple[str, ...], needs: tuple[tuple[bool, ...], ...]
) -> dict[str, list[tuple[str, tuple[Hashable, ...]]]]:
    """(axis, what has to agree) of each collective, of the forward and of each part of the backward."""
    import json

    block = block_from_data("block", tuple(json.loads(nodes)), states, inputs)
    pieces = differentiate(block, torch.device("cpu"), *needs)
    parts = {"F": pieces.forward, "B": pieces.backward, "I": pieces.backward_input, "W": pieces.backward_weight}
    return {
        part: [(u.axis, (u.op, u.shape, u.dtype)) for u in list_collectives(piece.graph)]
        for part, piece in parts.items()
    }


class Rank:
    """One rank: yields ``(kind, ...)`` where it has to meet others, and is sent what it gets."""

    def __init__(self, program: Program, rank: int, instructions: tuple[Instruction, ...]) -> None:
        self.program = program
        self.rank = rank
        self.at = program.coordinates(rank)
        self.stage = program.stages[self.at["pp"]]
        self.instructions = instructions
        self.values: dict[tuple[str, int | None], Term] = {}
        self.gradients: dict[tuple[str, int], Sum] = {}
        self.saved: dict[tuple[int, int], Term] = {}
        self.carried: dict[tuple[int, int], Term] = {}
        self.totals: dict[str, Sum] = {}
        self.states: dict[str, Sum] = {n: Counter() for n, s in program.states.items() if self.at["pp"] in s.stages}
        self.started: dict[int, tuple[int, Any]] = {}  # bucket -> what is under way, and what comes of it
        self.parts: dict[int, list[tuple[tuple[str, ...], int]]] = {}  # bucket -> the part that this rank has of it
        self.outputs: dict[tuple[str, int | None], Term] = {}
        self.final: dict[str, Term] | None = None

    def run(self) -> Generator[tuple[Any, ...], Any, None]:
        for instruction in self.instructions:
            if instruction.stage != self.at["pp"]:
                raise Crash("another stage's instruction")
            try:
                yield from getattr(self, instruction.op.lower())(instruction)
            except (KeyError, IndexError, TypeError) as error:
                raise Crash(repr(error)) from error

    # --- values

    def make(self, value: str, microbatch: int | None, made: Term) -> None:
        self.values[value, microbatch] = made
        for output in self.program.outputs:
            if output.value == value and output.stage == self.at["pp"]:
                self.outputs[value, microbatch] = made

    def read(self, value: str, microbatch: int | None) -> Term:
        return self.values[value, None] if (value, None) in self.values else self.values[value, microbatch]

    def load(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        for value in i.values:
            given = next(d for d in self.program.inputs if d.value == value) if value in self.inputs else self.crash()
            split = given.batch_dim is not None
            if i.microbatch is None or not 0 <= i.microbatch < self.program.num_microbatches:
                raise Crash("no such microbatch")
            self.make(value, i.microbatch, term("input", value, self.at["dp"] * 1000 + i.microbatch if split else 0))
        return
        yield

    @property
    def inputs(self) -> set[str]:
        return {d.value for d in self.program.inputs}

    def crash(self) -> Any:
        raise Crash("no such input")

    def free(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        for value in i.values:
            if i.gradients:
                self.gradients.pop((value, i.microbatch), None)  # type: ignore[arg-type]
            else:
                self.values.pop((value, i.microbatch), None)
        return
        yield

    # --- calls

    def flags(self, position: int) -> tuple[tuple[bool, ...], ...]:
        call, program = self.stage.calls[position], self.program
        states = [program.states[s] for s in call.states]
        return (
            tuple(program.values[v].requires_grad for v in call.inputs),
            tuple(program.objective == "train" and s.kind == "parameter" and s.requires_grad for s in states),
            tuple(program.values[v].requires_grad for v in call.outputs),
        )

    def collect(self, position: int, part: str, start: Term) -> Generator[tuple[Any, ...], Any, Term]:
        """Pass through the collectives of a part of a call; what comes of it depends on all who took part."""
        import json

        graph = self.program.blocks[self.stage.calls[position].block]
        found = graph_collectives(json.dumps(graph.nodes), graph.states, graph.inputs, self.flags(position))
        result = start
        for axis, what in found[part]:
            group = self.program.group(self.rank, (axis,))
            if len(group) > 1:
                parts = yield "meet", group, what, (result,)
                result = term("together", tuple(p[0] for p in parts))
        return result

    def apply(self, position: int, inputs: list[Term]) -> Generator[tuple[Any, ...], Any, Term]:
        call = self.stage.calls[position]
        shards = tuple((s, self.at["tp"] if self.program.states[s].layout.startswith("S") else 0) for s in call.states)
        return (yield from self.collect(position, "F", term("call", call.block, shards, tuple(inputs))))

    def total_f(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        local: dict[str, Term] = {}
        for position, call in enumerate(self.stage.calls):
            if call.prologue:
                inputs = [local[v] if v in local else self.read(v, i.microbatch) for v in call.inputs]
                made = yield from self.apply(position, inputs)
                local.update({v: term("output", made, k) for k, v in enumerate(call.outputs)})
        for value in i.values:
            self.totals.setdefault(value, Counter())[local[value]] += 1

    def total(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        mine = tuple(total(self.totals[v]) for v in i.values)
        group = self.program.group(self.rank, i.axes)
        what = tuple(self.program.values[v].shape for v in i.values)
        parts = (yield "meet", group, what, mine) if len(group) > 1 else [mine]
        for k, value in enumerate(i.values):
            self.make(value, None, total(Counter(p[k] for p in parts)))

    def f(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        for position in self.span(i):
            call = self.stage.calls[position]
            if call.prologue:
                raise Crash("a prologue call")
            made = yield from self.apply(position, [self.read(v, i.microbatch) for v in call.inputs])
            self.saved[position, i.microbatch] = made
            for k, value in enumerate(call.outputs):
                self.make(value, i.microbatch, term("output", made, k))

    def span(self, i: Instruction) -> range:
        if i.calls is None or not 0 <= i.calls[0] <= i.calls[1] <= len(self.stage.calls) or i.microbatch is None:
            raise Crash("no such calls")
        return range(*i.calls)

    def backward(self, i: Instruction, part: str) -> Generator[tuple[Any, ...], Any, None]:
        for position in reversed(self.span(i)):
            call, key = self.stage.calls[position], (position, i.microbatch)
            needs_inputs, needs_states, has = self.flags(position)
            if not any(has):
                continue
            if part == "W":
                made = self.carried.pop(key)
            else:
                grads = [self.gradient(v, i.microbatch) for v, h in zip(call.outputs, has, strict=True) if h]
                made = term("backward", self.saved.pop(key), tuple(grads))
            made = yield from self.collect(position, part, made)
            if part == "I":
                self.carried[key] = made
            if part != "W":
                for k, (value, need) in enumerate(zip(call.inputs, needs_inputs, strict=True)):
                    if need:
                        self.gradients.setdefault((value, i.microbatch), Counter())[term("for input", made, k)] += 1
            if part != "I":
                for k, (state, need) in enumerate(zip(call.states, needs_states, strict=True)):
                    if need:
                        self.states[state][term("for state", made, k)] += 1

    def gradient(self, value: str, microbatch: int) -> Term:
        parts = Counter(self.gradients.get((value, microbatch), Counter()))
        if value == self.program.loss:
            parts[term("one")] += 1
        return total(parts)

    def b(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        yield from self.backward(i, "B")

    def i(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        yield from self.backward(i, "I")

    def w(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        yield from self.backward(i, "W")

    # --- others

    def peer(self, i: Instruction) -> int:
        if i.peer is None or not 0 <= i.peer < self.program.mesh["pp"] or i.peer == self.at["pp"]:
            raise Crash("no such peer")
        return self.rank + (i.peer - self.at["pp"]) * self.program.strides["pp"]

    def shapes(self, i: Instruction) -> tuple[Hashable, ...]:
        return tuple((self.program.values[v].shape, self.program.values[v].dtype) for v in i.values)

    def send_f(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        yield "send", self.peer(i), "F", self.shapes(i), [self.values[v, i.microbatch] for v in i.values]

    def recv_f(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        got = yield "receive", self.peer(i), "F", self.shapes(i)
        for value, sent in zip(i.values, got, strict=True):
            self.make(value, i.microbatch, sent)

    def send_b(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        grads = [Counter(self.gradients.get((v, i.microbatch), Counter())) for v in i.values]
        yield "send", self.peer(i), "B", self.shapes(i), grads

    def recv_b(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        got = yield "receive", self.peer(i), "B", self.shapes(i)
        for value, sent in zip(i.values, got, strict=True):
            self.gradients.setdefault((value, i.microbatch), Counter()).update(sent)

    def sums(self, states: tuple[str, ...]) -> tuple[tuple[Hashable, ...], list[Sum]]:
        what = tuple((self.program.states[s].shape, self.program.states[s].layout) for s in states)
        return what, [Counter(self.states[s]) for s in states]

    def alike(self, bucket: int) -> tuple[int, ...]:
        """The ranks of a bucket's group that have the same part of it."""
        found, program = self.stage.buckets[bucket], self.program
        levels = [axis for level in found.levels for axis in level]
        group = program.group(self.rank, found.axes)
        return tuple(r for r in group if all(program.place(r, a) == program.place(self.rank, a) for a in levels))

    def turn(self, number: int, group: tuple[int, ...], end: Any) -> Generator[tuple[Any, ...], Any, None]:
        """Start what reduces a bucket further; the turn before ends first. ``end``: what then becomes of the parts."""
        bucket = self.stage.buckets[number]
        yield from self.end(number)
        if len(group) > 1:
            what, sums = self.sums(bucket.states)
            started = yield "start", group, (what, bucket.compression), (sums, tuple(self.parts.get(number, ())))
            self.started[number] = started, end
        elif bucket.levels:
            raise Crash("a level of one rank")

    def end(self, number: int) -> Generator[tuple[Any, ...], Any, None]:
        if number in self.started:
            started, end = self.started.pop(number)
            end((yield "finish", started))

    def added(self, number: int) -> Any:
        def end(came: list[Any]) -> None:
            if len({parts for _, parts in came}) > 1:
                raise Crash("sums of different parts")
            for k, state in enumerate(self.stage.buckets[number].states):
                self.states[state] = sum((sums[k] for sums, _ in came), Counter())

        return end

    def reduce(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        yield from self.turn(i.bucket, self.alike(i.bucket), self.added(i.bucket))

    def scatter(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        group, number = self.over_level(i), i.bucket

        def end(came: list[Any]) -> None:
            self.added(number)(came)
            self.parts.setdefault(number, []).append((i.axes, group.index(self.rank)))

        yield from self.turn(number, group, end)

    def gather(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        group, number = self.over_level(i), i.bucket
        if not i.gradients:
            raise Crash("there are no shards of parameters")

        def end(came: list[Any]) -> None:
            whole = [(*parts[:-1], (i.axes, place)) for place, (_, parts) in enumerate(came)]
            if [parts for _, parts in came] != whole or any(sums != came[0][0] for sums, _ in came):
                raise Crash("what is gathered does not make the whole")
            self.parts[number].pop()

        yield from self.turn(number, group, end)

    def over_level(self, i: Instruction) -> tuple[int, ...]:
        if i.axes not in self.stage.buckets[i.bucket].levels:
            raise Crash("no such level")
        return self.program.group(self.rank, i.axes)

    def sync(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        (stages,) = {self.program.states[s].stages for s in i.states} if i.states else self.crash()
        group = tuple(self.rank + (s - self.at["pp"]) * self.program.strides["pp"] for s in stages)
        what, sums = self.sums(i.states)
        if self.rank not in group:
            raise Crash("not a member")
        parts = (yield "meet", group, what, sums) if len(group) > 1 else [sums]
        for k, state in enumerate(i.states):
            self.states[state] = sum((p[k] for p in parts), Counter())

    def step(self, i: Instruction) -> Generator[tuple[Any, ...], Any, None]:
        for number in list(self.started):
            yield from self.end(number)
        if any(self.parts.values()):
            raise Crash("a part of a gradient is not the gradient")
        self.final = {name: total(parts) for name, parts in self.states.items()}


def run_symbolic(program: Program, lists: Mapping[int, tuple[Instruction, ...]]) -> dict[Hashable, Any]:
    """What all ranks compute: outputs and gradients by rank. Raises :class:`Crash` or :class:`Hang`."""
    ranks = {r: Rank(program, r, lists[r]) for r in range(program.world_size)}
    running = {r: rank.run() for r, rank in ranks.items()}
    answer: dict[int, Any] = dict.fromkeys(running)  # what each rank is to be told when it goes on
    ready = deque(running)
    operations: list[dict[str, Any]] = []
    by_group: dict[tuple[int, ...], list[int]] = {}
    entered: Counter[tuple[tuple[int, ...], int]] = Counter()
    channels: dict[tuple[int, int, str], deque[Any]] = {}
    waits: dict[int, tuple[Any, ...]] = {}

    def enter(r: int, group: tuple[int, ...], what: Hashable, payload: Any) -> int:
        k = entered[group, r]
        entered[group, r] += 1
        numbers = by_group.setdefault(group, [])
        if k == len(numbers):
            numbers.append(len(operations))
            operations.append({"what": what, "parts": {}, "group": group})
        operation = operations[numbers[k]]
        if operation["what"] != what:
            raise Crash("members disagree")
        operation["parts"][r] = payload
        return numbers[k]

    def parts_of(number: int) -> list[Any] | None:
        operation = operations[number]
        if len(operation["parts"]) < len(operation["group"]):
            return None
        return [operation["parts"][m] for m in operation["group"]]

    def wanted(r: int) -> Any:
        """What a waiting rank waits for, or None."""
        kind, *rest = waits[r]
        if kind == "operation":
            return parts_of(rest[0])
        source, direction, shapes = rest
        queue = channels.get((source, r, direction))
        if not queue:
            return None
        sent_shapes, payload = queue.popleft()
        if sent_shapes != shapes:
            raise Crash("sent and received shapes differ")
        return payload

    while ready or waits:
        if not ready:
            woken = {r: got for r in list(waits) if (got := wanted(r)) is not None}
            if not woken:
                raise Hang(str(waits))
            for r, got in woken.items():
                del waits[r]
                answer[r] = got
                ready.append(r)
        r = ready.popleft()
        try:
            kind, *rest = running[r].send(answer[r])
        except StopIteration:
            continue
        answer[r] = None
        if kind == "send":
            target, direction, shapes, payload = rest
            channels.setdefault((r, target, direction), deque()).append((shapes, payload))
            ready.append(r)
        elif kind == "start":
            answer[r] = enter(r, *rest)
            ready.append(r)
        elif kind == "meet":
            waits[r] = "operation", enter(r, *rest)
        elif kind == "finish":
            waits[r] = "operation", rest[0]
        else:
            waits[r] = kind, *rest
    if any(channels.values()):
        raise Hang("a transfer is never received")
    return {
        "outputs": {r: rank.outputs for r, rank in ranks.items()},
        "gradients": {r: rank.final for r, rank in ranks.items()},
    }
