"""Check the use of host memory and the updates of buffers, in the order of a rank's instructions.

Activations and parameters in host memory must be on the device again when they are used, and gradients must be complete
when they are copied to the host. A buffer that forward changes must be written once, by all ranks that hold it, after
the last read of its old value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from partitioner.passes.ir.verify import Sameness
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import CollectiveEvent, Instruction
from partitioner.runtime.program.program import Program, StateData
from partitioner.runtime.program.sharded_buckets import zero_axes
from partitioner.runtime.program.state_bytes import list_host_states
from partitioner.runtime.prove.errors import FaultLocation, Refusal
from partitioner.runtime.prove.gradient_ledger import StateGradients

Run = tuple[int, int]  # (position of a call, microbatch)


class ActivationOffloads:
    """Checks that the tensors that block calls (such as layers) save for backward are moved to host memory at most
    once, after forward, and back before backward. The class follows the instructions of one rank of the pipeline stage
    ``stage`` (an index).
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.calls = facts.stages[stage]
        self.offloads = "activations" in facts.program.offload
        self.away: dict[Run, int] = {}  # -> the instruction that moved the activations to the host
        self.back: dict[Run, int] = {}

    def runs(self, i: Instruction, forward: Collection[Run], *backward: Collection[Run]) -> list[Run]:
        """Return the pairs (position of a block call on the pipeline stage, microbatch) whose activations the
        instruction ``i`` moves to or from host memory. ``forward``: the pairs whose forward has run. ``backward``:
        collections of the pairs whose backward, or a half of it, has run. Raise :class:`Refusal` if a call has not run
        forward, or has already run backward.
        """
        if i.calls is None or i.microbatch is None:
            return []
        runs = [(p, i.microbatch) for p in range(*i.calls) if self.calls[p].has_backward]
        for run in runs:
            if run not in forward:
                raise Refusal(
                    "order",
                    f"moves the saved activations of {self._format_run(run)} before its forward: move it behind the "
                    "forward",
                )
            if any(run in gone for gone in backward):
                raise Refusal(
                    "order",
                    f"moves the saved activations of {self._format_run(run)} after its backward has freed them: move "
                    "it before",
                )
        return runs

    def offload(self, run: Run, index: int) -> None:
        """Record that the instruction at position ``index`` moves saved activations to host memory. ``run``: the pair
        (position of a block call, microbatch) whose forward saved them. Raise :class:`Refusal` if the program does not
        declare that it offloads activations, or if these activations were moved before.
        """
        if not self.offloads:
            raise Refusal(
                "fields", "moves activations to host memory, but the program offloads none: remove it, or set `offload`"
            )
        at = self.away.get(run, self.back.get(run))
        if at is not None:
            raise Refusal(
                "twice",
                f"the saved activations of {self._format_run(run)} were moved at instruction {at}: remove one OFFLOAD",
            )
        self.away[run] = index

    def fetch(self, run: Run, index: int) -> None:
        """Record that the instruction at position ``index`` moves saved activations from host memory back to the
        device. ``run``: the pair (position of a block call, microbatch) whose forward saved them. Raise
        :class:`Refusal` if they are not in host memory.
        """
        if run in self.back:
            raise Refusal(
                "twice",
                f"the saved activations of {self._format_run(run)} came back at instruction {self.back[run]}: remove "
                "one",
            )
        if run not in self.away:
            raise Refusal(
                "order", f"the saved activations of {self._format_run(run)} are not in host memory: OFFLOAD them first"
            )
        del self.away[run]
        self.back[run] = index

    def read(self, run: Run) -> None:
        """Raise :class:`Refusal` if the activations that a backward is about to read are in host memory. ``run``: the
        pair (position of a block call, microbatch) whose forward saved them.
        """
        if run in self.away:
            message = (
                f"reads the saved activations of {self._format_run(run)}, which went to host memory at instruction "
                f"{self.away[run]}"
            )
            raise Refusal("order", f"{message} and were not fetched: add a FETCH before")

    def _format_run(self, run: Run) -> str:
        return f"{self.calls[run[0]].data.path!r} of microbatch {run[1]}"


class HostStates:
    """Checks that parameters whose values are in host memory are copied to the device before they are read, and that
    the gradient of each of them is copied to host memory once.
    """

    def __init__(self, facts: ProgramFacts, stage: int, gradients: StateGradients) -> None:
        """Start before the first instruction of a rank, when no parameter has been copied to the device. ``stage``:
        index of the pipeline stage. ``gradients``: tracks which gradients are complete. ``facts``: the program of all
        ranks, with the gradients, collectives and memory of its block calls (such as layers).
        """
        self.program = facts.program
        self.here = facts.program.stages[stage]
        self.hosted = list_host_states(facts.program, stage)
        self.gradients = gradients
        self.passing = "parameters" in facts.program.offload
        self.sharded = {s for b in self.here.buckets for s in b.states if zero_axes(self.program, b.states)}
        self.wanted = self.hosted & facts.with_gradient
        self.there: dict[str, int] = {}  # parameter -> the instruction that fetched it
        self.freed: dict[str, int] = {}
        self.taken: dict[str, int] = {}  # parameter -> the OFFLOAD of its gradient

    def fetch(self, states: Sequence[str], index: int) -> None:
        """Record that the instruction at position ``index`` copies the parameters ``states`` (names) from host memory
        to the device. Raise :class:`Refusal` if one is not in host memory, or is already on the device.
        """
        for state in states:
            if state not in self.hosted:
                raise Refusal("fields", f"fetches {state!r}, whose values are not in host memory: remove it")
            if state in self.there:
                raise Refusal("twice", f"{state!r} was fetched at instruction {self.there[state]}: remove one FETCH")
            self.there[state] = index

    def read(self, states: Sequence[str], gather: bool = False) -> None:
        """Record a read of the parameters ``states`` (names). If ``gather`` is true, the reader is an all-gather, which
        reads this rank's ZeRO pieces of them; otherwise it is a block call (such as a layer). Raise :class:`Refusal` if
        a parameter is in host memory and was not copied to the device.
        """
        for state in states:
            if state not in self.hosted or (state in self.sharded and not gather):
                continue  # a call reads the gathered parameter
            if state not in self.there:
                gone = f"freed at instruction {self.freed[state]}" if state in self.freed else "never fetched"
                raise Refusal("order", f"reads {state!r}, which is in host memory and was {gone}: add a FETCH before")
            if gather and self.passing:  # the GATHER frees the fetched pieces
                self.freed[state] = self.there.pop(state)

    def free(self, states: Sequence[str], index: int) -> None:
        """Record that the instruction at position ``index`` frees the device copies of the parameters ``states``
        (names). Raise :class:`Refusal` if a parameter does not have a device copy, or must stay on the device.
        """
        for state in states:
            if state not in self.hosted or state in self.sharded or not self.passing:
                raise Refusal("fields", f"frees the state {state!r}, which must stay on the device: remove it")
            if state not in self.there:
                again = f"was freed at instruction {self.freed[state]}" if state in self.freed else "was never fetched"
                raise Refusal(
                    "twice" if state in self.freed else "order",
                    f"frees the state {state!r}, which {again}: remove the FREE",
                )
            del self.there[state]
            self.freed[state] = index

    def offload(self, states: Sequence[str], index: int) -> None:
        """Record that the instruction at position ``index`` copies the gradients of the parameters ``states`` (names)
        to the host. Raise :class:`Refusal` if one of the gradients is not needed on the host, is incomplete, or was
        copied before.
        """
        self.gradients.before_step()
        for state in states:
            if state not in self.wanted:
                raise Refusal(
                    "fields",
                    f"copies the gradient of {state!r} to host memory, where the optimizer does not read it: remove it",
                )
            if state in self.taken:
                raise Refusal(
                    "twice",
                    f"the gradient of {state!r} was copied to host memory at instruction {self.taken[state]}: remove "
                    "one",
                )
            self.gradients.offload(state, index)
            self.taken[state] = index

    def step(self) -> None:
        for state in sorted(self.wanted - self.taken.keys()):
            raise Refusal(
                "missing",
                f"the gradient of {state!r} never reaches host memory, where the optimizer reads it: add an OFFLOAD",
            )

    def finish(self) -> None:
        """Raise :class:`Refusal` if parameters that must not stay on the device were not freed by the end of the rank's
        instruction list.
        """
        for state, index in self.there.items():
            if self.passing:
                raise Refusal(
                    "leak",
                    f"the state {state!r} is fetched here and never freed: add a FREE",
                    FaultLocation(index=index),
                )


def check_updates(program: Program) -> None:
    """Raise :class:`Refusal` if the value that a buffer takes at the end of a step has another dtype or layout than the
    buffer, or is not computed on exactly one of the pipeline stages that have the buffer. ``program``: the program of
    all ranks.
    """
    producers = _find_producing_stages(program)
    for name, state in program.states.items():
        problem = "" if state.update is None else _find_update_problem(program, state, state.update, producers)
        if problem:
            stage = min((s for s in state.stages if 0 <= s < len(program.stages)), default=0)
            raise Refusal("structure", f"the state {name!r} {problem}", FaultLocation(stage=stage, state=name))


def _find_producing_stages(program: Program) -> dict[str, set[int]]:
    """Return a dict: name of each value that block calls (such as layers) compute -> indices of the pipeline stages
    whose calls compute it. Prologue calls, which run before the pipeline starts, are left out. ``program``: the program
    of all ranks.
    """
    producers: dict[str, set[int]] = {}
    for s, stage in enumerate(program.stages):
        for call in stage.calls:
            for value in () if call.prologue else call.outputs:
                producers.setdefault(value, set()).add(s)
    return producers


def _find_update_problem(program: Program, state: StateData, name: str, producers: dict[str, set[int]]) -> str:
    """Return why the buffer that ``state`` describes cannot take the value of the program's tensor ``name`` at the end
    of a step, as the end of an error message; empty if it can. ``producers``: name of a tensor -> indices of the
    pipeline stages that compute it.
    """
    if state.kind != "buffer":
        return f"is a {state.kind} and takes the value {name!r}: only buffers do"
    if name not in program.values:
        return f"takes the value {name!r}, which does not exist"
    value, made_by = program.values[name], producers.get(name, set())
    if len(made_by) != 1 or not made_by <= set(state.stages):
        return f"is on the stages {state.stages} and takes {name!r}, which is made on {tuple(sorted(made_by))}"
    if (value.dtype, value.layout, value.context, state.expert_layout) != (state.dtype, state.layout, "R", "R"):
        return f"is {state.dtype} and {state.layout} over tp, but takes {value.dtype} that is {value.layout}"
    return ""


def check_equal_updates(program: Program, known: dict[str, Sameness]) -> None:
    """Raise :class:`Refusal` if the new value of a buffer depends on the microbatch or on the ``dp`` rank, so that
    ranks would have different buffers. Buffers whose new value is a sum over microbatches and ``dp`` ranks are not
    checked. ``known``: name of a tensor of the program -> ``"alike"`` if it is equal in all microbatches and on all
    ``dp`` ranks, ``"different"`` if it may not be.
    """
    for name, state in program.states.items():
        if state.update is not None and state.keeps is None and known.get(state.update) == "different":
            message = (
                f"the new value of the state {name!r} is {state.update!r}, which differs between parts of the batch; "
                "expected a value that is equal on all ranks"
            )
            raise Refusal("structure", message, FaultLocation(stage=min(state.stages), state=name))


class BufferUpdateChecks:
    """Checks that each buffer (such as running statistics) that a step changes is updated once, by tracking the updates
    of one rank of the pipeline stage ``stage`` (an index).
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        self.program, self.stage = facts.program, stage
        self.due = {n for n, s in facts.program.states.items() if s.update is not None and stage in s.stages}
        self.done: dict[str, int] = {}  # state -> index of its UPDATE
        self.made = {v: k for k, call in enumerate(facts.stages[stage]) for v in call.data.outputs}

    def update(
        self, states: Sequence[str], index: int, forward: Collection[tuple[int, int]]
    ) -> tuple[list[str], list[CollectiveEvent]]:
        """Record that the instruction at position ``index`` gives the buffers ``states`` their new values. Return two
        lists: the names of the tensors of the program that the instruction reads on this stage, and the collectives
        that it starts. The collectives sum over ``dp``, or copy new values between stages that share a buffer.

        ``forward``: the pairs (position of a block call on the stage, microbatch) that have run forward. Raise
        :class:`Refusal` if forward does not change one of the buffers, if the buffers are not all on the same stages,
        if one of them is updated twice, or if its new value is a sum to which a microbatch has not added yet.
        """
        together = {self.program.states[s].stages for s in states}
        if len(together) > 1:
            raise Refusal(
                "fields",
                f"updates states of different stages, {', '.join(states)}: use an UPDATE for each set of stages",
            )
        values: list[str] = []
        added: list[str] = []
        for name in states:
            if name not in self.due:
                raise Refusal(
                    "fields", f"updates {name!r}, which is no buffer of the stage that forward changes: remove it"
                )
            if name in self.done:
                raise Refusal("twice", f"{name!r} was updated at instruction {self.done[name]}: remove one UPDATE")
            self.done[name] = index
            value = self.program.states[name].update
            assert value is not None
            if value in self.made:
                self._check_sum(name, self.made[value], forward)
                (values if self.program.states[name].keeps is None else added).append(value)
        (stages,) = together
        meetings = []
        if added and self.program.mesh.get("dp", 1) > 1:
            text = f"sums of {', '.join(added)} over dp"
            meetings.append(CollectiveEvent(("dp",), ("UPDATE", tuple(added)), text))
        text = f"new values of {', '.join(states)} over stages {stages}"
        if len(stages) > 1:
            meetings.append(CollectiveEvent((), ("UPDATE", tuple(states)), text, "", stages))
        return values, meetings

    def _check_sum(self, name: str, position: int, forward: Collection[tuple[int, int]]) -> None:
        """Raise :class:`Refusal` if the buffer ``name`` is updated from a sum to which a microbatch has not added yet.
        ``position``: position, on the pipeline stage, of the block call (such as a layer) that computes the summand of
        each microbatch. ``forward``: the pairs (position of a call, microbatch) that have run.
        """
        missing = [m for m in range(self.program.num_microbatches) if (position, m) not in forward]
        if missing and self.program.states[name].keeps is not None:
            raise Refusal(
                "order",
                f"updates {name!r} with a sum to which microbatch {missing[0]} has not added yet: move it behind",
            )

    def read(self, states: Sequence[str]) -> None:
        """Raise :class:`Refusal` if one of the buffers ``states`` (names), which a block call (such as a layer) reads,
        was already updated in this step.
        """
        for name in states if self.done else ():
            if name in self.done:
                raise Refusal(
                    "order",
                    f"reads {name!r}, which was updated at instruction {self.done[name]}: move it before the UPDATE",
                )

    def finish(self) -> None:
        missing = sorted(self.due - self.done.keys())
        if missing:
            raise Refusal("missing", f"{missing[0]!r} is never updated: add an UPDATE")
