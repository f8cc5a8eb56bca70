"""Track the gradients of one rank through its instructions: which calls have added to each gradient, and when it is
used.

:func:`find_gradient_returns` finds the stages that send a gradient back to a stage that sent them the value: those
where a call, there or on a later stage that received the value from them, adds to its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.sharded_buckets import Turn, list_reduction_collectives, zero_axes
from partitioner.runtime.prove.errors import FaultLocation, Refusal

Returns = dict[tuple[str, int], frozenset[int]]  # (value, microbatch) -> stages that send back a gradient


def find_gradient_returns(facts: ProgramFacts, lists: Sequence[Sequence[Instruction]]) -> tuple[Returns, ...]:
    """Return, for each pipeline stage, the gradients that it must receive from other stages, as a dict: (value,
    microbatch) -> the indices of the stages that send a summand of the gradient. A value is the name of a tensor that
    passes between block calls (such as layers). ``lists``: the instructions of each stage. ``facts``: the program of
    all ranks, with the gradients, collectives and memory of its block calls.
    """
    sent: dict[tuple[str, int], dict[int, list[int]]] = {}
    for s, instructions in enumerate(lists):
        forms = facts.forms(s, instructions)
        sends = [i.op == "SEND_F" and i.peer is not None and i.microbatch is not None for i in forms.firsts]
        for i in compress(instructions, map(sends.__getitem__, forms.numbers)):
            assert i.peer is not None
            assert i.microbatch is not None
            for value in i.values:
                if value in facts.flow.values:
                    sent.setdefault((value, i.microbatch), {}).setdefault(s, []).append(i.peer)
    adds = [{v for call in calls for v in call.gives} for calls in facts.stages]
    result: tuple[Returns, ...] = tuple({} for _ in lists)
    known: dict[tuple[object, ...], list[tuple[int, frozenset[int]]]] = {}  # most microbatches take the same edges
    for key, edges in sent.items():
        alike = key[0], *((s, *peers) for s, peers in edges.items())
        if alike not in known:
            back = (
                (s, frozenset(p for p in peers if _has_reachable_addition(key[0], p, edges, adds)))
                for s, peers in edges.items()
            )
            known[alike] = [(s, peers) for s, peers in back if peers]
        for s, peers in known[alike]:
            result[s][key] = peers
    return result


def _has_reachable_addition(value: str, start: int, edges: dict[int, list[int]], adds: list[set[str]]) -> bool:
    """Return whether stage ``start``, or a stage to which it passes ``value`` on, adds to the gradient of ``value``.
    ``edges``: stage -> stages to which it sends the value. ``adds``: for each stage, the names of the values to whose
    gradients it adds.
    """
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


Key = tuple[str, int]  # (value, microbatch)

Adder = int | tuple[str, int]  # source of a summand of a gradient: position of a call, or ("stage", other stage)


class ValueGradients:
    """Tracks the gradients of values (the tensors that pass between block calls, such as layers) on one rank. A
    gradient is complete once all block calls that read the value have added to it. These calls are on this pipeline
    stage, or on later stages, which send their summands of the gradient.
    """

    def __init__(self, facts: ProgramFacts, stage: int, returns: Returns) -> None:
        """Start before the first instruction of a rank of the pipeline stage ``stage`` (an index). ``returns``: (value,
        microbatch) -> the stages that send back a summand of the gradient of the value. ``facts``: the program of all
        ranks, with the gradients, collectives and memory of its block calls (such as layers).
        """
        self.calls = facts.stages[stage]
        self.returns = returns
        self.readers: dict[str, list[int]] = {}
        for position, call in enumerate(self.calls):
            for value in call.gives:
                self.readers.setdefault(value, []).append(position)
        self._needed = {value: frozenset(positions) for value, positions in self.readers.items()}
        self.added: dict[Key, set[Adder]] = {}
        self.taken: dict[Key, int] = {}  # -> instruction: the backward of the call that made the value, or SEND_B
        self.freed: dict[Key, int] = {}

    def add(self, key: Key, adder: Adder, index: int) -> None:
        """Record that a block call (such as a layer) or another stage adds to the gradient of a tensor that passes
        between calls. Raise :class:`Refusal` if the gradient was used or freed before, or if ``adder`` has already
        added to it. ``key``: (name of the tensor, microbatch). ``adder``: the source of the summand: the position of a
        call on this stage, or ``("stage", index)`` for another stage. ``index``: position of the instruction.
        """
        gone = self.freed.get(key, self.taken.get(key))
        if gone is not None:
            raise Refusal(
                "gradient",
                f"adds to the gradient of {_format_key(key)} after instruction {gone} has used it: move it before",
            )
        added = self.added.setdefault(key, set())
        if adder in added:
            raise Refusal(
                "twice", f"adds to the gradient of {_format_key(key)} a second time: remove one of the additions"
            )
        added.add(adder)

    def receive(self, key: Key, peer: int, index: int) -> None:
        if peer not in self.returns.get(key, ()):
            raise Refusal(
                "gradient", f"receives a gradient of {_format_key(key)} from stage {peer}, which sends none: remove it"
            )
        self.add(key, ("stage", peer), index)

    def take(self, key: Key, index: int) -> None:
        """Record that the gradient of a tensor that passes between block calls (such as layers) is used, by a backward
        or a send. ``key``: (name of the tensor, microbatch). ``index``: position of the instruction. Raise
        :class:`Refusal` if the gradient is incomplete, freed, or already used.
        """
        if key in self.freed:
            raise Refusal(
                "order",
                f"uses the gradient of {_format_key(key)}, freed at instruction {self.freed[key]}: free it later",
            )
        if key in self.taken:
            raise Refusal(
                "twice",
                f"uses the gradient of {_format_key(key)} after instruction {self.taken[key]} has used it: remove one",
            )
        added = self.added.get(key, set())
        needed = self._needed.get(key[0], frozenset())
        for position in () if needed <= added else self.readers[key[0]]:
            if position not in added:
                late = self.calls[position].data.path
                raise Refusal(
                    "gradient",
                    f"uses the gradient of {_format_key(key)} before the backward of {late!r} has added to it: move "
                    "it behind",
                )
        for peer in self.returns.get(key, ()):
            if ("stage", peer) not in added:
                raise Refusal(
                    "gradient",
                    f"uses the gradient of {_format_key(key)} before the part of stage {peer} is received: move it "
                    "behind",
                )
        self.taken[key] = index

    def free(self, key: Key, index: int) -> None:
        """Record that the gradient of a tensor that passes between block calls (such as layers) is freed. Raise
        :class:`Refusal` if the gradient does not exist, or was not used before. ``key``: (name of the tensor,
        microbatch). ``index``: position of the instruction.
        """
        if key in self.freed:
            raise Refusal(
                "twice", f"frees the gradient of {_format_key(key)}, freed at instruction {self.freed[key]}: remove one"
            )
        if key not in self.added:
            raise Refusal(
                "order",
                f"frees the gradient of {_format_key(key)}, to which nothing was added: there is nothing to free",
            )
        if key not in self.taken:
            raise Refusal(
                "gradient", f"frees the gradient of {_format_key(key)} before it is used: move FREE behind its last use"
            )
        self.freed[key] = index

    def finish(self) -> None:
        for key in self.added:
            if key not in self.freed:
                raise Refusal("leak", f"never frees the gradient of {_format_key(key)}: add a FREE behind its last use")


def _format_key(key: Key) -> str:
    return f"{key[0]!r} of microbatch {key[1]}"


class StateGradients:
    """Checks the reductions of the gradients of a pipeline stage's parameters. Each gradient must be summed exactly
    once over the stages that share the parameter, and exactly once over the required mesh axes. Both sums must follow
    the last backward that adds to the gradient.
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        """Start before the first instruction of a rank of the pipeline stage ``stage`` (an index), when no gradient is
        reduced. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls
        (such as layers).
        """
        self.program = facts.program
        self.passes_over = facts.passes_over
        self.here = facts.program.stages[stage]
        # parameter -> (call, microbatch) pairs whose backward is still to come
        self.missing: dict[str, set[tuple[int, int]]] = {}
        for position, call in enumerate(facts.stages[stage]):
            for state in call.adds:
                runs = ((position, m) for m in range(facts.program.num_microbatches))
                self.missing.setdefault(state, set()).update(runs)
        held = (n for n in facts.states_by_stage[stage] if n in facts.with_gradient)
        self.tied = {n for n in held if len(facts.program.states[n].stages) > 1}
        self.shared = {n: b for n, b in enumerate(self.here.buckets) if zero_axes(self.program, b.states)}
        self.home = {state: number for number, bucket in self.shared.items() for state in bucket.states}
        # gradients to which only other stages add are zero here and come from SYNC: no SCATTER or REDUCE is needed
        self.idle = {n for n, b in self.shared.items() if self.missing.keys().isdisjoint(b.states)}
        self.unscattered: set[str] = set()  # parameters to whose gradients something was added since the last SCATTER
        self.scattered: dict[int, int] = {}  # bucket -> index of its last SCATTER
        self.synced: dict[str, int] = {}
        self.due = [
            () if n in self.idle else list_reduction_collectives(self.program, b)
            for n, b in enumerate(self.here.buckets)
        ]
        self.turned: dict[int, list[int]] = {}  # bucket -> index of each collective of its reduction
        self.sealed: dict[str, int] = {}  # parameter -> index of the instruction that took its gradient
        self.stepped: int | None = None

    def add_all(self, states: Sequence[str], position: int, microbatch: int) -> None:
        """Record that the backward of a block call adds to the gradients of the parameters ``states`` (names).
        ``position``: the call's position on the stage. ``microbatch``: index of the microbatch. Raise :class:`Refusal`
        if a gradient was already reduced or copied to the host.
        """
        run = position, microbatch
        for state in states:
            if state in self.sealed:
                raise Refusal(
                    "gradient",
                    f"adds to the gradient of {state!r} after instruction {self.sealed[state]} has reduced it: move it "
                    "before",
                )
            self.missing[state].discard(run)
            if state in self.home:
                self.unscattered.add(state)

    def scatter(self, number: int, index: int) -> None:
        """Record that the instruction at position ``index`` reduce-scatters the gradients of bucket ``number`` (index
        of a set of parameters whose gradients are reduced together) over the ranks among which ZeRO divides them. Raise
        :class:`Refusal` if nothing was added to the gradients since the last reduce-scatter, if they were already
        reduced further, or, under ZeRO 1, if they are incomplete.
        """
        if number not in self.shared or not self.shared[number].axes:
            raise Refusal(
                "fields",
                f"reduce-scatters bucket {number}, which ZeRO does not shard or which has no gradients: remove the "
                "SCATTER",
            )
        self.before_step()
        states = self.shared[number].states
        for state in states:
            if state in self.sealed:
                raise Refusal(
                    "order",
                    f"comes after instruction {self.sealed[state]} has reduced the gradient of {state!r}: move it "
                    "before",
                )
        if self.unscattered.isdisjoint(states) and not self.passes_over:
            raise Refusal(
                "twice",
                f"reduce-scatters bucket {number}, to which nothing was added since instruction "
                f"{self.scattered.get(number)}: remove the SCATTER",
            )
        if self.program.zero < 2:  # the whole gradient stays, and would be counted again
            for state in states:
                self.check_whole(state)
                self.sealed[state] = index
        self.unscattered.difference_update(states)
        self.scattered[number] = index

    def check_pieces(self, number: int) -> None:
        """Raise :class:`Refusal` unless all gradients of bucket ``number`` (index of a set of parameters that are
        reduced together), which ZeRO shards, are complete and reduce-scattered.
        """
        for state in self.shared[number].states:
            self.check_whole(state)
            if state in self.unscattered:
                raise Refusal(
                    "order",
                    f"needs bucket {number} before the last addition to {state!r} was reduce-scattered: add a "
                    "SCATTER before",
                )

    def check_whole(self, state: str) -> None:
        """Raise :class:`Refusal` unless all backwards that add to the gradient of the parameter ``state`` have run."""
        if self.missing.get(state):
            position, microbatch = min(self.missing[state])
            late = self.here.calls[position].path
            message = (
                f"the gradient of {state!r} lacks the backward of {late!r} on microbatch {microbatch}: move it behind"
            )
            raise Refusal("gradient", message, FaultLocation(state=state))

    def record_reduction(self, number: int, op: str, axes: tuple[str, ...], index: int) -> Turn:
        """Record the next collective that reduces the gradients of bucket ``number`` (index of a set of parameters that
        are reduced together), and return its kind and mesh axes. ``op``: REDUCE (all-reduce), SCATTER (reduce-scatter)
        or GATHER (all-gather). ``axes``: the mesh axes that the instruction names. ``index``: position of the
        instruction in the list. Raise :class:`Refusal` if another collective of the bucket's reduction must come first,
        or if a gradient is incomplete.
        """
        due, done = self.due[number], self.turned.setdefault(number, [])
        self.before_step()
        if not due or (op, axes) not in [(kind, () if kind == "REDUCE" else over) for kind, over in due]:
            why = "its reduction has other levels"
            if op == "REDUCE" or not due:
                why = (
                    "no backward of this stage adds to it"
                    if number in self.idle
                    else "ZeRO shards it over all axes of its reduction"
                )
            raise Refusal(
                "fields", f"bucket {number}: {why}, so that there is nothing to {op.lower()}: remove the {op}"
            )
        if len(done) == len(due):
            raise Refusal("twice", f"bucket {number} was already reduced at instruction {done[-1]}: remove the {op}")
        kind, over = due[len(done)]
        if (op, axes) != (kind, () if kind == "REDUCE" else over):
            raise Refusal(
                "order", f"the next collective of bucket {number} must be {kind} over {', '.join(over)}: got {op}"
            )
        if number in self.shared:
            self.check_pieces(number)
        for state in self.here.buckets[number].states:
            self.check_whole(state)
            if number not in self.shared and state in self.tied and state not in self.synced:
                raise Refusal(
                    "order",
                    f"reduces bucket {number} before SYNC has summed its tied state {state!r} over stages: put SYNC "
                    "before",
                )
            self.sealed[state] = index
        done.append(index)
        return due[len(done) - 1]

    def is_reduced(self, number: int) -> bool:
        """Return whether all collectives that reduce the gradients of bucket ``number`` (index of a set of parameters
        that are reduced together) have started.
        """
        return len(self.turned.get(number, ())) == len(self.due[number])

    def sync(self, states: Collection[str], index: int) -> tuple[int, ...]:
        """Record that the gradients of tied parameters are summed over the stages that share them, and return the
        indices of these stages. ``states``: names of the parameters. ``index``: position of the instruction. Raise
        :class:`Refusal` if a parameter is not tied, was summed before, or has an incomplete gradient, or if the
        parameters are on different stages.
        """
        self.before_step()
        among: set[tuple[int, ...]] = set()
        for state in states:
            if state not in self.tied:
                raise Refusal(
                    "fields",
                    f"the state {state!r} is not tied on this stage, or has no gradient: do not name it in SYNC",
                )
            if state in self.synced:
                raise Refusal(
                    "twice",
                    f"the gradient of {state!r} was summed over stages at instruction {self.synced[state]}: remove "
                    "one SYNC",
                )
            self.check_whole(state)
            if state in self.home:
                self.check_pieces(self.home[state])
                if not self.is_reduced(self.home[state]):
                    raise Refusal(
                        "order",
                        f"sums the tied state {state!r} over stages before its bucket {self.home[state]} is reduced: "
                        "REDUCE first",
                    )
            self.synced[state] = self.sealed[state] = index
            among.add(self.program.states[state].stages)
        if len(among) != 1:
            raise Refusal(
                "fields",
                f"the states {', '.join(states)} are on different stages, {among}: give each set of stages its own "
                "SYNC",
            )
        return among.pop()

    def offload(self, state: str, index: int) -> None:
        """Record that the instruction at position ``index`` copies the gradient of the parameter named ``state`` to
        host memory. Raise :class:`Refusal` unless the gradient is complete and reduced.
        """
        self.check_whole(state)
        if state in self.tied and state not in self.synced:
            raise Refusal(
                "order",
                f"copies the gradient of the tied state {state!r} before SYNC has summed it over stages: SYNC first",
            )
        if state in self.home:
            self.check_pieces(self.home[state])
        for number, bucket in enumerate(self.here.buckets):
            if state in bucket.states and not self.is_reduced(number):
                raise Refusal(
                    "order",
                    f"copies the gradient of {state!r} before its bucket {number} is reduced: put REDUCE before",
                )
        self.sealed[state] = index

    def before_step(self) -> None:
        if self.stepped is not None:
            raise Refusal(
                "order",
                f"comes after STEP at instruction {self.stepped}, when gradients must be complete: move it before",
            )

    def step(self, index: int) -> None:
        """Record the STEP instruction at position ``index``, after which the optimizer reads the gradients. Raise
        :class:`Refusal` unless all gradients are complete and reduced.
        """
        if self.stepped is not None:
            raise Refusal("twice", f"is a second STEP, after that at instruction {self.stepped}: remove one")
        for state in self.missing:
            self.check_whole(state)
        for state in sorted(self.tied - self.synced.keys()):
            raise Refusal(
                "missing", f"the gradient of the tied state {state!r} is never summed over its stages: add a SYNC"
            )
        for number in self.shared:
            if self.shared[number].axes:
                self.check_pieces(number)
        for number in range(len(self.here.buckets)):
            if not self.is_reduced(number):
                raise Refusal("missing", f"bucket {number} is never reduced: add a REDUCE")
        self.stepped = index
