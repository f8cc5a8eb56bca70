"""Follow one rank's instructions without tensors, and check that every value and gradient exists when it is used.

The result is the rank's ordered list of communication events (collectives, sends, receives). Ranks with equal
instructions share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import (
    CollectiveEvent,
    Event,
    FinishEvent,
    Instruction,
    ReceiveEvent,
    SendEvent,
)
from partitioner.runtime.program.sharded_buckets import split_axes
from partitioner.runtime.prove.errors import FaultLocation, Place, Refusal, format_value_place
from partitioner.runtime.prove.gradient_ledger import Returns, StateGradients, ValueGradients
from partitioner.runtime.prove.host_memory import ActivationOffloads, BufferUpdateChecks, HostStates
from partitioner.runtime.prove.states import Bundle, Parameters, PendingReductions, list_collective_bundles
from partitioner.runtime.prove.structure import DATA_AXES

TURNS = {"SCATTER": "reduce_scatter", "REDUCE": "all_reduce", "GATHER": "all_gather"}


class StageInterpreter:
    """Checks the instructions of one rank one after the other, without tensors, and raises :class:`Refusal` at the
    first invalid one.

    Each kind of instruction has a method with its name in lower case. ``trace``: the communication events so far, as
    pairs (instruction index, event).
    """

    def __init__(self, facts: ProgramFacts, stage: int, returns: Returns) -> None:
        """Start before the first instruction of a rank of the pipeline stage ``stage`` (an index).

        ``returns``: (value, microbatch) -> the stages that send back a gradient of the value to this stage. ``facts``:
        the program of all ranks, with the gradients, collectives and memory of its block calls (such as layers).
        """
        self.facts = facts
        self.program = facts.program
        self.stage = stage
        self.calls = facts.stages[stage]
        self.gradients = ValueGradients(facts, stage, returns)
        self.states = StateGradients(facts, stage)
        self.index = 0
        self.trace: list[tuple[int, Event]] = []
        self.alive: dict[Place, int] = {}  # value that exists -> instruction that made it
        self.freed: dict[Place, int] = {}
        self.origin: dict[Place, int] = {}  # received value -> stage that sent it
        self.forward: set[tuple[int, int]] = set()  # (call, microbatch) pairs whose forward has run
        self.halfway: set[tuple[int, int]] = set()  # pairs whose I has run and W has not
        self.backward: set[tuple[int, int]] = set()
        self.is_input = {i.value for i in self.program.inputs}
        self.of_prologue = {v for c in self.calls if c.data.prologue for v in c.data.outputs}
        self.totals: tuple[str, ...] | None = None
        self.added_up: set[int] = set()
        self.total_at: int | None = None
        self.bundled: dict[tuple[str, int], list[Bundle]] = {}
        self.parameters = Parameters(facts, stage)
        self.parked = ActivationOffloads(facts, stage)
        self.hosted = HostStates(facts, stage, self.states)
        self.updates = BufferUpdateChecks(facts, stage)
        self.reductions, self.buckets = PendingReductions(), self.states.here.buckets

    def run_instruction(self, index: int, instruction: Instruction) -> None:
        """Check ``instruction``, which is at position ``index`` of the list. Raise :class:`Refusal` if it is
        invalid."""
        self.index = index
        try:
            getattr(self, instruction.op.lower())(instruction)
        except Refusal as refusal:
            refusal.location = replace(refusal.location, index=index)
            raise

    # --- values -----------------------------------------------------------------------------------------------------

    def make_value(self, value: str, microbatch: int | None, again: bool = False) -> None:
        """Record that a value (a tensor that passes between block calls, such as layers) exists from now on. ``value``:
        its name. ``microbatch``: its index; ``None`` for a total (a sum over the global batch), which has no
        microbatch. Raise :class:`Refusal` if the value exists already or was freed before; if ``again`` is true, a
        freed value may be created again.
        """
        place = value, microbatch
        if place in self.alive or (place in self.freed and not again):
            at = self.alive.get(place, self.freed.get(place))
            raise Refusal(
                "twice",
                f"computes or receives {format_value_place(place)} a second time, after instruction {at}: remove one "
                "of them",
            )
        self.alive[place] = self.index

    def find_place(self, value: str, microbatch: int | None) -> Place:
        """Return the key under which the prover tracks the tensor called ``value``: (``value``, ``microbatch``), or
        (``value``, ``None``) for a total (a sum over the global batch), which is the same for all microbatches.
        """
        return (value, None) if value in self.of_prologue else (value, microbatch)

    def read_value(self, value: str, microbatch: int | None) -> None:
        """Raise :class:`Refusal` unless the value named ``value`` (a tensor that passes between block calls, such as
        layers) of ``microbatch`` exists now. ``microbatch``: its index; ignored for a total (a sum over the global
        batch), which has no microbatch.
        """
        place = self.find_place(value, microbatch)
        if place not in self.alive:
            if place in self.freed:
                raise Refusal(
                    "order", f"reads {format_value_place(place)}, which was freed at instruction {self.freed[place]}"
                )
            raise Refusal(
                "order",
                f"reads {format_value_place(place)} before an instruction has computed or received it: move it behind",
            )

    def load(self, i: Instruction) -> None:
        """Check the LOAD instruction ``i``, which slices inputs of the batch for a microbatch, and record that the
        slices exist from now on. Raise :class:`Refusal` if one of its values is not an input of the batch.
        """
        for value in i.values:
            if value not in self.is_input:
                raise Refusal(
                    "fields", f"loads {value!r}, which is no input of the batch: name an input of the program"
                )
            self.make_value(value, i.microbatch, again=True)

    def free(self, i: Instruction) -> None:
        """Check a FREE instruction ``i`` of values, gradients or parameters, and record that they no longer exist.
        Raise :class:`Refusal` if one of them does not exist, or if a gradient was not used.
        """
        if i.bucket is not None:
            self.await_result(self.parameters.free(i.bucket, self.index))
            return
        if i.states:
            self.hosted.free(i.states, self.index)
            return
        for value in i.values:
            if i.gradients:
                if i.microbatch is None:
                    raise Refusal("fields", "frees gradients without naming the microbatch: give the microbatch")
                self.gradients.free((value, i.microbatch), self.index)
                continue
            place = value, i.microbatch
            if place in self.freed and place not in self.alive:
                raise Refusal(
                    "twice",
                    f"frees {format_value_place(place)}, which was freed at instruction {self.freed[place]}: remove "
                    "one FREE",
                )
            if place not in self.alive:
                raise Refusal(
                    "order",
                    f"frees {format_value_place(place)}, which no instruction has computed or received: there is "
                    "nothing to free",
                )
            del self.alive[place]
            self.freed[place] = self.index

    # --- forward ----------------------------------------------------------------------------------------------------

    def total_f(self, i: Instruction) -> None:
        """Check the TOTAL_F instruction ``i``, and record that its microbatch is added to the totals (sums over the
        batch that forward needs). Raise :class:`Refusal` if the microbatch was added before, if the totals are already
        complete, or if a tensor that the instruction reads does not exist.
        """
        assert i.microbatch is not None
        if not self.of_prologue:
            raise Refusal("fields", "runs prologue calls, of which the stage has none: remove the instruction")
        if self.total_at is not None:
            raise Refusal(
                "order",
                f"adds to the totals after TOTAL at instruction {self.total_at} has summed them: move it before TOTAL",
            )
        if i.microbatch in self.added_up:
            raise Refusal("twice", f"adds microbatch {i.microbatch} to the totals a second time: remove one TOTAL_F")
        self.agree_on_totals(i)
        temporary: set[str] = set()
        for position, call in enumerate(self.calls):
            if call.data.prologue:
                for value in call.data.inputs:
                    if value not in temporary:
                        self.read_value(value, i.microbatch)
                temporary.update(call.data.outputs)
                self.read_states(position)
                self.trace_collectives("F", position, i.microbatch)
        self.added_up.add(i.microbatch)

    def agree_on_totals(self, i: Instruction) -> None:
        """Raise :class:`Refusal` unless ``i`` names the same totals (sums over the batch) as earlier instructions, and
        prologue calls (block calls, such as layers, that run before the pipeline starts) compute all of these totals.
        """
        if self.totals is None:
            self.totals = i.values
        if i.values != self.totals or set(i.values) - self.of_prologue:
            raise Refusal(
                "fields", f"names the totals {i.values}; expected {', '.join(self.totals)}, computed by prologue calls"
            )

    def total(self, i: Instruction) -> None:
        """Check the TOTAL instruction ``i``, which all-reduces the totals (sums over the batch). Record the collective,
        and that the totals exist from now on. Raise :class:`Refusal` if a microbatch was not added to the totals, or if
        the axes of the all-reduce are wrong.
        """
        if self.total_at is not None:
            raise Refusal(
                "twice", f"sums the totals a second time, after instruction {self.total_at}: remove one TOTAL"
            )
        missing = set(range(self.program.num_microbatches)) - self.added_up
        if missing:
            raise Refusal(
                "order",
                f"sums the totals before microbatch {min(missing)} was added to them: move TOTAL behind its TOTAL_F",
            )
        self.agree_on_totals(i)
        axes = split_axes(self.program, DATA_AXES)
        if split_axes(self.program, i.axes) != axes or set(i.axes) - set(self.program.mesh):
            raise Refusal(
                "fields", f"sums the totals over the axes {i.axes}; expected {axes}, over which the batch is split"
            )
        for value in i.values:
            self.make_value(value, None)
        self.trace_collective(axes, ("TOTAL", i.values), f"all_reduce of {', '.join(i.values)}")
        self.total_at = self.index

    def f(self, i: Instruction) -> None:
        """Check a forward instruction ``i``. Record that the tensors which it computes exist from now on, and the
        collectives in its graphs. Raise :class:`Refusal` if one of its block calls (executions of blocks, such as
        layers) has already run on the microbatch, or if a tensor that the instruction reads does not exist.
        """
        assert i.calls is not None
        assert i.microbatch is not None
        for position in range(*i.calls):
            run = position, i.microbatch
            if run in self.forward:
                raise Refusal(
                    "twice",
                    f"runs {self.format_path(position)} forward on microbatch {i.microbatch} a second time: remove "
                    "one F",
                )
            for value in self.calls[position].data.inputs:
                self.read_value(value, i.microbatch)
            self.read_states(position)
            self.trace_collectives("F", position, i.microbatch)
            for value in self.calls[position].data.outputs:
                self.make_value(value, i.microbatch)
            self.forward.add(run)

    # --- backward ---------------------------------------------------------------------------------------------------

    def b(self, i: Instruction) -> None:
        """Check a backward instruction ``i``. Record which gradients of values it uses, to which gradients of values
        and parameters it adds, and the collectives in its graphs. Raise :class:`Refusal` if forward has not run, if the
        backward has already run, or if a gradient that it uses is incomplete.
        """
        for position, microbatch in self.backward_runs(i):
            self.take_gradients(position, microbatch)
            self.give_gradients(position, microbatch)
            self.add_state_gradients(position, microbatch)
            self.trace_collectives("B", position, microbatch)
            self.backward.add((position, microbatch))

    def i(self, i: Instruction) -> None:
        """Check the instruction ``i``, which runs the half of a backward for gradients of inputs. Record which
        gradients of values it uses, to which gradients it adds, and the collectives in its graphs. Raise
        :class:`Refusal` if forward has not run, if the backward has already run, or if a gradient that it uses is
        incomplete.
        """
        for position, microbatch in self.backward_runs(i):
            self.take_gradients(position, microbatch)
            self.give_gradients(position, microbatch)
            self.trace_collectives("I", position, microbatch)
            self.halfway.add((position, microbatch))

    def w(self, i: Instruction) -> None:
        """Check the instruction ``i``, which runs the half of a backward for gradients of parameters. Record to which
        gradients it adds, and the collectives in its graphs. Raise :class:`Refusal` if the half for gradients of inputs
        has not run, or if a parameter that the instruction reads is not on the device.
        """
        for position, microbatch in self.backward_runs(i, after_inputs=True):
            self.add_state_gradients(position, microbatch)
            self.trace_collectives("W", position, microbatch)
            self.halfway.discard((position, microbatch))
            self.backward.add((position, microbatch))

    def backward_runs(self, i: Instruction, after_inputs: bool = False) -> list[tuple[int, int]]:
        """Return the pairs (position of a block call on the pipeline stage, microbatch) whose backward the instruction
        ``i`` runs, last call first. ``after_inputs``: whether the instruction runs the half of the backward for
        parameters, which must follow the half for inputs. Raise :class:`Refusal` if forward has not run, or the
        backward has run before.
        """
        assert i.calls is not None
        assert i.microbatch is not None
        self.reductions.computed()
        runs = [(p, i.microbatch) for p in reversed(range(*i.calls)) if self.calls[p].has_backward]
        for run in runs:
            key = f"{self.format_path(run[0])} backward on microbatch {run[1]}"
            if run not in self.forward:
                raise Refusal("order", f"runs {key} before its forward: move it behind the forward")
            if run in self.backward or (run in self.halfway and not after_inputs):
                raise Refusal("twice", f"runs {key} a second time: remove one of them")
            if after_inputs and run not in self.halfway:
                raise Refusal(
                    "order", f"runs {key}: the half for weights comes before the half for inputs; exchange them"
                )
            self.read_states(run[0])
            self.parked.read(run)
        self.states.before_step()
        return runs

    def take_gradients(self, position: int, microbatch: int) -> None:
        for value in self.calls[position].takes:
            self.gradients.take((value, microbatch), self.index)

    def give_gradients(self, position: int, microbatch: int) -> None:
        for value in self.calls[position].gives:
            self.gradients.add((value, microbatch), position, self.index)

    def add_state_gradients(self, position: int, microbatch: int) -> None:
        self.states.add_all(self.calls[position].adds, position, microbatch)

    # --- communication ----------------------------------------------------------------------------------------------

    def recv_f(self, i: Instruction) -> None:
        """Check the RECV_F instruction ``i``, which receives values (tensors that pass between block calls, such as
        layers) from another pipeline stage. Record the receive, and that the values exist from now on. Raise
        :class:`Refusal` if one of them existed before.
        """
        assert i.peer is not None
        for value in i.values:
            self.make_value(value, i.microbatch)
            self.origin[value, i.microbatch] = i.peer
        self.trace.append((self.index, ReceiveEvent("F", i.peer, i.values, i.microbatch)))

    def send_f(self, i: Instruction) -> None:
        """Check the SEND_F instruction ``i``, which sends values to another pipeline stage, and record the send. Raise
        :class:`Refusal` if one of the values does not exist.
        """
        assert i.peer is not None
        for value in i.values:
            self.read_value(value, i.microbatch)
        self.trace.append((self.index, SendEvent("F", i.peer, i.values, i.microbatch)))

    def recv_b(self, i: Instruction) -> None:
        """Check the RECV_B instruction ``i``, which receives gradients of values from another pipeline stage. Record
        the receive, and that the received summands are added to the gradients. Raise :class:`Refusal` if that stage
        does not send a gradient of one of the values.
        """
        assert i.peer is not None
        assert i.microbatch is not None
        for value in i.values:
            self.gradients.receive((value, i.microbatch), i.peer, self.index)
        self.trace.append((self.index, ReceiveEvent("B", i.peer, i.values, i.microbatch)))

    def send_b(self, i: Instruction) -> None:
        """Check the SEND_B instruction ``i``, which sends the gradients of values to the pipeline stage from which the
        values came, and record the send. Raise :class:`Refusal` if the values did not come from that stage, or if the
        gradients are incomplete.
        """
        assert i.peer is not None
        assert i.microbatch is not None
        for value in i.values:
            place = value, i.microbatch
            if self.origin.get(place) != i.peer:
                raise Refusal(
                    "match",
                    f"sends the gradient of {format_value_place(place)} to a stage that did not send the value: send "
                    "it to the stage that did",
                )
            self.gradients.take((value, i.microbatch), self.index)
        self.trace.append((self.index, SendEvent("B", i.peer, i.values, i.microbatch)))

    def gather(self, i: Instruction) -> None:
        """Check the GATHER instruction ``i``, and record its collective: an all-gather of parameters, or of gradients
        as a step of a hierarchical reduction. Raise :class:`Refusal` if ZeRO does not shard the parameters, if they are
        gathered already, if their values were not copied from host memory, or if another step of the reduction must
        come first.
        """
        assert i.bucket is not None
        if i.gradients:
            self.run_reduction_turn(i)
            return
        key = self.parameters.gather(i.bucket, self.index)
        self.hosted.read(self.parameters.states(i.bucket), gather=True)
        self.trace_collective(self.parameters.axes(i.bucket), key, f"all_gather of bucket {i.bucket}", waits=False)

    def read_states(self, position: int) -> None:
        """Raise :class:`Refusal` if a parameter or buffer that a block call (an execution of a block, such as a layer)
        reads is not on the device. If ZeRO shards a parameter, record that the call waits for its all-gather.
        ``position``: the call's position on the stage.
        """
        if self.parameters.needs[position]:
            for key in self.parameters.read(position):
                self.await_result(key)
        if self.hosted.hosted:
            self.hosted.read(self.calls[position].data.states)
        self.updates.read(self.calls[position].data.states)

    def offload(self, i: Instruction) -> None:
        if i.states:
            self.hosted.offload(i.states, self.index)
        for run in self.parked.runs(i, self.forward, self.backward, self.halfway):
            self.parked.offload(run, self.index)

    def fetch(self, i: Instruction) -> None:
        if i.states:
            self.hosted.fetch(i.states, self.index)
        for run in self.parked.runs(i, self.forward, self.backward, self.halfway):
            self.parked.fetch(run, self.index)

    def await_result(self, key: Hashable) -> None:
        if key is not None:
            self.trace.append((self.index, FinishEvent(key)))

    def scatter(self, i: Instruction) -> None:
        """Check the SCATTER instruction ``i``, which reduce-scatters a set of gradients, and record the collective.
        Raise :class:`Refusal` if there is nothing to scatter, or if the gradients were already reduced.
        """
        assert i.bucket is not None
        if i.axes:
            self.run_reduction_turn(i)
            return
        self.states.scatter(i.bucket, self.index)
        waits, key = self.reductions.scatter(i.bucket, self.buckets[i.bucket])
        axes = self.parameters.axes(i.bucket)
        self.start_collective(waits, axes, key, f"reduce_scatter of bucket {i.bucket}")

    def reduce(self, i: Instruction) -> None:
        self.run_reduction_turn(i)

    def run_reduction_turn(self, i: Instruction) -> None:
        """Check the instruction ``i`` (SCATTER, REDUCE or GATHER), one step of the reduction of a gradient bucket.
        Record its collective, which starts when the bucket's previous step has ended. Raise :class:`Refusal` if another
        step must come next, or if a gradient is incomplete.
        """
        assert i.bucket is not None
        op, axes = self.states.record_reduction(i.bucket, i.op, i.axes, self.index)
        waits, key = self.reductions.add_collective(i.bucket, self.buckets[i.bucket], (op, axes))
        of = "the gradients of bucket" if op == "GATHER" else "bucket"
        self.start_collective(waits, axes, key, f"{TURNS[op]} of {of} {i.bucket}")

    def start_collective(self, waits: Iterable[Hashable], axes: tuple[str, ...], key: Hashable, text: str) -> None:
        """Record a collective over the mesh axes ``axes`` that starts when the collectives with the keys ``waits`` have
        ended. ``key``: key of the new collective, on which all participants must agree. ``text``: description for
        messages.
        """
        for other in waits:
            self.await_result(other)
        self.trace_collective(axes, key, text, waits=False)

    def sync(self, i: Instruction) -> None:
        """Check the SYNC instruction ``i``, which sums gradients of tied parameters over the pipeline stages that share
        them, and record this sum as a collective. Raise :class:`Refusal` if a parameter is not tied, was summed before,
        or has an incomplete gradient.
        """
        stages = self.states.sync(i.states, self.index)
        for number in sorted({self.states.home[s] for s in i.states if s in self.states.home}):
            for key in self.reductions.ended(number):
                self.await_result(key)
        event = CollectiveEvent(
            (), ("SYNC", i.states), f"sum of {', '.join(i.states)} over stages {stages}", "", stages
        )
        self.trace.append((self.index, event))

    def update(self, i: Instruction) -> None:
        """Check the UPDATE instruction ``i``, which gives buffers their new values, and record the collectives that it
        starts. Raise :class:`Refusal` if it comes too early, or if a buffer is updated twice.
        """
        values, meetings = self.updates.update(i.states, self.index, self.forward)
        for value in values:
            self.read_value(value, i.microbatch)
        self.trace += [(self.index, meeting) for meeting in meetings]

    def step(self, i: Instruction) -> None:
        """Check the STEP instruction ``i``, after which every gradient is complete. Raise :class:`Refusal` unless all
        backwards have run and all gradients are reduced.
        """
        for position, microbatch in self.list_runs():
            if self.calls[position].has_backward and (position, microbatch) not in self.backward:
                raise Refusal(
                    "missing", f"{self.format_path(position)} has not run backward on microbatch {microbatch}"
                )
        self.states.step(self.index)
        self.hosted.step()
        self.trace.append((self.index, FinishEvent()))

    def trace_collectives(self, op: str, position: int, microbatch: int) -> None:
        """Record the collectives that the graph of a block call runs on the microbatch with the index ``microbatch``.
        ``op``: which part of the call runs: "F" forward, "B" backward, "I" the half of the backward for inputs, "W" its
        half for weights. ``position``: the call's position on the stage.
        """
        for axes, key, text, node, count in self.find_bundles(op, position):
            event = CollectiveEvent(axes, key, text, node, (), True, count, microbatch)
            self.trace.append((self.index, event))

    def find_bundles(self, op: str, position: int) -> list[Bundle]:
        if (op, position) not in self.bundled:
            self.bundled[op, position] = list_collective_bundles(self.program, self.calls[position], op, position)
        return self.bundled[op, position]

    def trace_collective(
        self, axes: tuple[str, ...], key: object, text: str, node: str = "", waits: bool = True
    ) -> None:
        """Record a collective over the mesh axes ``axes``; if ``axes`` is empty, record nothing. ``key``: key on which
        all participants must agree. ``text``: description for messages. ``node``: name of the graph node, if a graph
        runs the collective. ``waits``: whether the rank blocks until all members have entered the collective.
        """
        if axes:
            self.trace.append((self.index, CollectiveEvent(axes, key, text, node, (), waits)))

    # --- at the end -------------------------------------------------------------------------------------------------

    def list_runs(self) -> list[tuple[int, int]]:
        positions = [p for p, c in enumerate(self.calls) if not c.data.prologue]
        return [(p, m) for m in range(self.program.num_microbatches) for p in positions]

    def check_end(self) -> None:
        """Raise :class:`Refusal` if, after the last instruction of the rank, a block call (an execution of a block,
        such as a layer) has not run, a gradient was not reduced, or a tensor was not freed.
        """
        for position, microbatch in self.list_runs():
            if (position, microbatch) not in self.forward:
                raise Refusal("missing", f"{self.format_path(position)} never runs forward on microbatch {microbatch}")
        if self.of_prologue and self.total_at is None:
            raise Refusal("missing", "never sums the totals of the prologue over the ranks: add a TOTAL")
        if self.program.objective == "train" and self.states.stepped is None:
            raise Refusal("missing", "never reaches STEP; expected one, when all gradients are complete: add it")
        for output in self.program.outputs:
            if output.stage == self.stage and output.value is not None:
                self.check_taken(output.value, f"the output {output.path!r}")
        for place, index in self.alive.items():
            raise Refusal(
                "leak",
                f"{format_value_place(place)} is computed or received here and never freed: add a FREE",
                FaultLocation(index=index),
            )
        self.parameters.finish()
        self.hosted.finish()
        self.updates.finish()
        self.gradients.finish()

    def check_taken(self, value: str, label: str) -> None:
        """Raise :class:`Refusal` unless the tensor that is named ``value`` in the program was created on this rank in
        every microbatch; it may have been freed since. ``label``: description of the tensor for the message, such as
        "the output 'logits'".
        """
        for microbatch in range(self.program.num_microbatches):
            place = self.find_place(value, microbatch)
            if place not in self.alive and place not in self.freed:
                raise Refusal(
                    "missing",
                    f"{label} is {format_value_place(place)}, which this stage never computes or receives: add the "
                    "instruction",
                )

    def format_path(self, position: int) -> str:
        return repr(self.calls[position].data.path)
