"""Execute the instruction list of one rank.

The list is compiled once: every instruction becomes one or more functions without arguments. Receives start one
computation early and end before the first instruction that reads the received values. A step is then a loop over these
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ir.layouts import Layout, take_shard
from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.comm.wait_clock import waited
from partitioner.runtime.errors import InstructionError
from partitioner.runtime.execute.bind import Binder, BlockLibrary
from partitioner.runtime.execute.calls import BoundCall, Environment, StageStates
from partitioner.runtime.execute.failures import describe_failure
from partitioner.runtime.execute.flight_recorder import Recorder
from partitioner.runtime.execute.step_replay import ReplayableCall, StepReplay
from partitioner.runtime.execute.transfers import (
    RECEIVING,
    PendingReceive,
    Slot,
    TransferSender,
    find_proven_arrivals,
    list_slots_read,
    place_early_receives,
)
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import InputData, RankProgram
from partitioner.runtime.program.sharded_buckets import list_states_read
from partitioner.runtime.program.state_bytes import list_staying_values
from partitioner.runtime.replay.tape import Tape
from partitioner.runtime.state.buffer_updates import BufferUpdates
from partitioner.runtime.state.gradients import RankGradients
from partitioner.runtime.state.host_offload import HostParameters, TransientParameters
from partitioner.runtime.state.loss import LossSum

Action = Callable[[], None]


class ExecutorOptions(NamedTuple):
    """Options of an :class:`Executor`. ``keep_outputs``: whether to collect the model's results that this rank
    computes. ``local_inputs``: names of inputs, such as key/value caches, of which :meth:`Executor.run` gets this
    rank's own shard instead of the whole tensor. ``tape``: the recording of one step, which later steps replay, and on
    which the communicator records, too; ``None``: steps are not recorded.
    """

    keep_outputs: bool = False
    local_inputs: frozenset[str] = frozenset()
    tape: Tape | None = None


class Executor:
    """Runs one rank's program; ``run(inputs)`` runs one step.

    Args:
        rank: the program of the rank.
        states: parameter or buffer -> this rank's shard. For parameters that ZeRO shards or that are in host memory:
            the whole tensor, whose memory exists only while it is needed.
        gradients: accumulates and reduces the gradients of parameters.
        communicator: connects this rank with the others.
        library: has the graphs of the program's blocks.
        transient: manages the memory of parameters that ZeRO shards or that are in host memory; ``None``: there are no
            such parameters.
        options: options such as whether to collect the model's results; ``None``: the defaults.

    ``outputs`` has the collected results: value -> microbatch -> tensor. ``loss`` is the loss of the whole global
    batch, on every rank; ``None`` if the model has no loss. ``actions`` is the compiled step: pairs (index of the
    instruction, function) in the order of execution. A debugger or a test can replace or wrap a function in it.
    ``recorder`` records when each action begins.
    """

    def __init__(
        self,
        rank: RankProgram,
        states: Mapping[str, Tensor],
        gradients: RankGradients,
        communicator: Communicator,
        library: BlockLibrary,
        transient: TransientParameters | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        options = options or ExecutorOptions()
        self.rank = rank
        self._local_inputs = options.local_inputs
        self.program = rank.program
        self.communicator = communicator
        self.gradients = gradients
        self.gathered = {} if transient is None else transient.sharded.buckets
        self.binder = Binder(rank, library, communicator)
        self.hosted = None if transient is None else transient.host_parameters
        self.updates = BufferUpdates(rank, states, communicator)
        self.env = Environment(rank, library.device, gradients.copier)
        self.sender = TransferSender(rank, self.env, communicator)
        self.outputs: dict[str, dict[int, Tensor]] = {}
        self.totals: dict[str, Tensor] = {}
        self._inputs: Mapping[str, Tensor] = {}
        self._input_data = {i.value: i for i in self.program.inputs}
        self._loss = None if self.program.loss is None else LossSum(rank, communicator)
        kept = self.program.outputs if options.keep_outputs else ()
        self._produced = {o.value for o in kept if o.stage == rank.stage_index}
        watched: dict[str, Callable[[int, str, Tensor], None]] = {v: self._collect_output for v in self._produced if v}
        if self.program.loss is not None:
            watched[self.program.loss] = self._add_loss
        watched |= dict.fromkeys(self.updates.added, self.updates.add)
        staying = list_staying_values(rank.stage)
        held = StageStates(states, gradients.sinks, frozenset() if transient is None else transient.transient_names)
        self.replay: StepReplay | None = None
        if options.tape is not None:
            self.replay = StepReplay(options.tape, rank, library.device, options.local_inputs)
            gradients.fix_addresses()
        bound = [BoundCall(self.binder, self.env, i, held, watched, staying) for i in range(len(rank.stage.calls))]
        self.calls: list[BoundCall | ReplayableCall] = [*bound]
        if self.replay is not None and self.replay.report.state != "eager":
            self.calls = [self.replay.wrap_call(call) for call in bound]
        self.actions = self._compile_actions()
        self._own_actions = list(self.actions)
        library.compile_segments()
        self.recorder: Recorder | None = None

    @property
    def loss(self) -> Tensor | None:
        return None if self._loss is None else self._loss.value

    def scale_loss(self, factor: float) -> None:
        """Multiply the loss by ``factor`` in the backward of later steps, which multiplies their gradients by
        ``factor``, too.
        """
        if self.env.seed is not None:
            self.env.seed.fill_(factor)  # in place: a recorded step reads it here

    def run(self, inputs: Mapping[str, Tensor], step: int = 0) -> None:
        """Run one step. ``inputs``: name of an input tensor in the program -> this rank's part of the global batch,
        along the batch dim. ``step``: number of the step from 0, for records and errors. Raise
        :class:`InstructionError` if an instruction fails.
        """
        self._inputs = inputs
        index = 0
        try:
            with torch.no_grad():
                actions = self._begin_actions()
                if self.recorder is None:
                    for index, action in actions:  # noqa: B007 - read by the error handler
                        action()
                else:
                    times, place = self.recorder.times, self.recorder.begin(step)
                    for index, action in actions:  # noqa: B007
                        times[place + 1] = waited.ns
                        times[place] = monotonic_ns()
                        place += 2
                        action()
                    self.recorder.end()
                if self.replay is not None:
                    self.replay.end_step(self)
        except Exception as error:
            if self.replay is not None:
                self.replay.abort_step()
            raise InstructionError(describe_failure(error, self.rank, index, self.binder.compiled, step + 1)) from error
        finally:
            self._inputs = {}
            self.env.clear()

    def _begin_actions(self) -> list[tuple[int, Action]]:
        """Prepare a step, and return its actions as pairs (index of the instruction, function). The functions run the
        instructions or, if steps are recorded and replayed, record them or replay the recorded step.
        """
        if self.replay is not None:
            watched = self.updates.keep or self.actions != self._own_actions  # tools follow or repeat the step
            return self.replay.begin_step(self, usual=watched)
        self.begin_step()
        return self.actions

    def begin_step(self) -> None:
        """Drop the tensors of the last step, and reset the sums over microbatches (gradients, buffer updates, loss) for
        a new step.
        """
        self.outputs, self.totals = {}, {}
        self.env.begin()
        self.gradients.begin()
        self.updates.begin()
        if self.hosted is not None:
            self.hosted.begin()
        if self._loss is not None:
            self._loss.begin()

    def set_loss(self, value: Tensor) -> None:
        """Set :attr:`loss` to ``value``, a copy of the loss of a recorded or replayed step."""
        assert self._loss is not None
        self._loss.value = value

    def load_input(self, name: str, microbatch: int) -> Tensor:
        """Return this rank's part of one input of the batch, for one microbatch, on this rank's device. ``name``: the
        name of the input in the program. ``microbatch``: index of the microbatch on this rank.
        """
        return self._slice_input(self._input_data[name], microbatch)

    def _compile_actions(self) -> list[tuple[int, Action]]:
        """Return the functions that run the rank's instructions in a step, as pairs (index of the instruction, function
        without arguments), in the order of execution. An instruction may have several functions.
        """
        instructions = self.rank.instructions
        receives = {i: self._compile_receive(ins) for i, ins in enumerate(instructions) if self._is_remote_receive(ins)}
        starts = place_early_receives(instructions)
        arrived = find_proven_arrivals(self.rank)
        open_: dict[Slot, int] = {}
        actions: list[tuple[int, Action]] = []
        if self._loss is not None:
            actions.append((0, self._loss.start))

        def finish(index: int) -> None:
            actions.append((index, receives[index].finish))
            actions.extend((index, partial(self.sender.release, *sent)) for sent in arrived.get(index, ()))
            for slot in receives[index].slots:
                open_.pop(slot, None)

        for index, instruction in enumerate(instructions):
            actions += [(i, receives[i].start) for i in starts.get(index, ()) if i in receives]
            for slot in list_slots_read(instruction, self.rank.stage):
                if slot in open_:
                    finish(open_[slot])
            if self.hosted is not None and (names := self._list_host_parameter_reads(instruction, self.hosted)):
                actions.append((index, partial(self.hosted.wait, names)))
            actions += [(index, self.gathered[b].wait) for b in self._list_awaited_buckets(instruction)]
            if index in receives:
                open_.update(dict.fromkeys(receives[index].slots, index))
            elif instruction.op not in RECEIVING:
                actions.append((index, _ACTIONS[instruction.op](self, instruction)))
            if self._loss is not None and index == self._loss.passed_at:
                actions.append((index, self._loss.forward_loss))
        for index in sorted(set(open_.values())):
            finish(index)
        actions.append((len(instructions), self._finish_step))
        return actions

    def _list_awaited_buckets(self, instruction: Instruction) -> list[int]:
        """Return the indices of the stage's buckets (sets of ZeRO-sharded parameters that one collective gathers) whose
        parameters must be gathered before ``instruction`` runs.
        """
        if not self.gathered:
            return []
        if instruction.op == "FREE" and instruction.bucket is not None:
            return [instruction.bucket]
        read = set(list_states_read(instruction, self.rank.stage))
        return [b for b, bucket in self.gathered.items() if not read.isdisjoint(bucket.whole)]

    def _list_host_parameter_reads(self, instruction: Instruction, host_parameters: HostParameters) -> list[str]:
        """Return the names of the parameters whose copy from host memory to the device must end before ``instruction``
        runs. ``host_parameters``: manages the parameters in host memory.
        """
        if instruction.op == "GATHER" and not instruction.gradients:
            assert instruction.bucket is not None
            read: Sequence[str] = self.rank.stage.buckets[instruction.bucket].states
        else:
            read = list_states_read(instruction, self.rank.stage)
        return [name for name in read if name in host_parameters.masters]

    def _is_remote_receive(self, instruction: Instruction) -> bool:
        return instruction.op in RECEIVING and instruction.peer != self.rank.stage_index

    def _compile_receive(self, instruction: Instruction) -> PendingReceive:
        place = self._store_value if instruction.op == "RECV_F" else self.env.add_gradient
        return PendingReceive(instruction, self.rank, self.communicator, place)

    # Processing of values when they are computed or received.

    def _store_value(self, microbatch: int, name: str, value: Tensor) -> None:
        self.env.values[microbatch][name] = value
        if name in self._produced:
            self._collect_output(microbatch, name, value)

    def _collect_output(self, microbatch: int, name: str, value: Tensor) -> None:
        self.outputs.setdefault(name, {})[microbatch] = value

    def _add_loss(self, microbatch: int, name: str, value: Tensor) -> None:
        if name in self._produced:
            self._collect_output(microbatch, name, value)
        assert self._loss is not None
        self._loss.add(value)

    # One method for each kind of instruction, which returns a function without arguments that runs the instruction.

    def _compile_load(self, instruction: Instruction) -> Action:
        """Return a function without arguments that runs the LOAD ``instruction``: it slices this rank's part of one
        microbatch from the batch inputs.
        """
        microbatch = _require_microbatch(instruction)
        recorded = None if self.replay is None else self.replay.recorded_input

        def load() -> None:
            for name in instruction.values:
                value = None if recorded is None else recorded(name, microbatch)
                self._store_value(microbatch, name, self.load_input(name, microbatch) if value is None else value)

        return load

    def _slice_input(self, data: InputData, microbatch: int) -> Tensor:
        """Return this rank's part of one input of the batch, for one microbatch, on this rank's device. ``data``:
        describes the input. ``microbatch``: index of the microbatch on this rank.
        """
        whole = self._inputs[data.value]
        if data.batch_dim is not None:
            length = whole.shape[data.batch_dim] // len(self.rank.share)
            whole = whole.narrow(data.batch_dim, microbatch * length, length)
        if data.value in self._local_inputs:
            return whole
        value, mesh, at = self.program.values[data.value], self.program.mesh, self.rank.coordinates
        part = take_shard(whole, Layout.parse(value.context), mesh.get("cp", 1), at["cp"])
        part = take_shard(part, Layout.parse(value.layout), mesh.get("tp", 1), at["tp"])
        return part.contiguous().to(self.env.device, non_blocking=True)

    def _compile_total_forward(self, instruction: Instruction) -> Action:
        """Return a function without arguments that adds the summands of the microbatch of ``instruction`` to this
        rank's totals. Totals are sums over the global batch that forward needs, such as the number of targets.
        """
        microbatch = _require_microbatch(instruction)
        calls = [c for c in self.calls if c.call.prologue]

        def total_forward() -> None:
            """Run the block calls (such as layers) that compute the microbatch's summands of the totals (sums over the
            global batch), and add the results to the totals of this rank.
            """
            values = self.env.values[microbatch].copy()
            for call in calls:
                call.forward(microbatch, values)
            for name in instruction.values:
                total = self.totals.get(name)
                self.totals[name] = values[name].clone() if total is None else total + values[name]

        return total_forward

    def _compile_total(self, instruction: Instruction) -> Action:
        """Return a function without arguments that all-reduces the totals of ``instruction`` (sums over the global
        batch that forward needs, such as the number of targets), and makes them values of every microbatch.
        """
        group = self.communicator.group(self.rank.group(*instruction.axes))

        def total() -> None:
            """All-reduce each rank's partial totals (sums over the batch that forward needs), and store the results as
            values of every microbatch.
            """
            started = [(name, group.all_reduce(self.totals[name])) for name in instruction.values]
            for name, pending in started:
                value = pending.wait()
                for microbatch in range(len(self.rank.share)):
                    self._store_value(microbatch, name, value)

        return total

    def _compile_forward(self, instruction: Instruction) -> Action:
        """Return a function without arguments that runs the forward of the block calls (such as layers) of
        ``instruction`` on the instruction's microbatch.
        """
        microbatch = _require_microbatch(instruction)
        values = self.env.values[microbatch]
        calls = [c.forward for c in self._select_calls(instruction)]

        def forward() -> None:
            for call in calls:
                call(microbatch, values)

        return forward

    def _compile_backward(self, instruction: Instruction) -> Action:
        """Return a function without arguments that runs the backward, or one half of it, of the block calls (such as
        layers) of ``instruction`` on the instruction's microbatch, last call first.
        """
        microbatch = _require_microbatch(instruction)
        method = _BACKWARD[instruction.op]
        calls: list[Callable[[int], None]] = [
            getattr(c, method) for c in reversed(self._select_calls(instruction)) if c.has_backward
        ]

        def backward() -> None:
            for call in calls:
                call(microbatch)
            self.gradients.computed()

        return backward

    def _select_calls(self, instruction: Instruction) -> list[BoundCall | ReplayableCall]:
        assert instruction.calls is not None
        return [c for c in self.calls[slice(*instruction.calls)] if not c.call.prologue]

    def _compile_send(self, instruction: Instruction) -> Action:
        if instruction.peer == self.rank.stage_index:
            return _do_nothing
        return self.sender.action(instruction)

    def _compile_gather(self, instruction: Instruction) -> Action:
        """Return a function without arguments that starts the all-gather of the GATHER ``instruction``: of parameters
        that ZeRO shards or, in a hierarchical reduction, of summed gradients.
        """
        bucket = instruction.bucket
        assert bucket is not None
        if instruction.gradients:
            last = self.rank.stage.buckets[bucket].levels[0] == instruction.axes
            return lambda: self.gradients.gather(bucket, last)
        return self.gathered[bucket].start

    def _compile_scatter(self, instruction: Instruction) -> Action:
        bucket, level = instruction.bucket, bool(instruction.axes)
        assert bucket is not None
        return lambda: self.gradients.scatter(bucket, level)

    def _compile_reduce(self, instruction: Instruction) -> Action:
        bucket = instruction.bucket
        assert bucket is not None
        return lambda: self.gradients.reduce(bucket)

    def _compile_sync(self, instruction: Instruction) -> Action:
        return lambda: self.gradients.sync(instruction.states)

    def _compile_update(self, instruction: Instruction) -> Action:
        values = self.env.values[_require_microbatch(instruction)]
        return partial(self.updates.write, instruction.states, values)

    def _compile_offload(self, instruction: Instruction) -> Action:
        if instruction.states:
            return partial(self.gradients.offload, instruction.states)
        return self._compile_each_call(instruction, BoundCall.offload)

    def _compile_fetch(self, instruction: Instruction) -> Action:
        if instruction.states:
            assert self.hosted is not None, instruction
            return partial(self.hosted.fetch, instruction.states)
        return self._compile_each_call(instruction, BoundCall.fetch)

    def _compile_each_call(self, instruction: Instruction, method: Callable[[BoundCall, int], None]) -> Action:
        """Return a function without arguments that runs ``method(call, microbatch)`` for each block call (such as a
        layer) of ``instruction``, with the instruction's microbatch.
        """
        microbatch, calls = _require_microbatch(instruction), self._select_calls(instruction)
        bound = [c for c in calls if isinstance(c, BoundCall)]
        assert len(bound) == len(calls), "activations that are moved to host memory are not recorded"

        def run() -> None:
            for call in bound:
                method(call, microbatch)

        return run

    def _compile_free(self, instruction: Instruction) -> Action:
        """Return a function without arguments that releases the values, gradients or parameters of the FREE
        ``instruction``.
        """
        if instruction.states:
            assert self.hosted is not None, instruction
            return partial(self.hosted.free, instruction.states)
        if instruction.bucket is not None:
            return self.gathered[instruction.bucket].free
        held = self.env.gradients if instruction.gradients else self.env.values
        places = held if instruction.microbatch is None else [held[instruction.microbatch]]

        def free() -> None:
            for place in places:
                for name in instruction.values:
                    place.pop(name, None)

        return free

    def _compile_step(self, instruction: Instruction) -> Action:
        return self.gradients.finish

    def _finish_step(self) -> None:
        self.gradients.finish()
        self.sender.finish()
        if self._loss is not None:
            self._loss.finish()


def _require_microbatch(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch


def _do_nothing() -> None:
    """Do nothing. This is the action of a send to this rank itself: the value is already in place."""


_BACKWARD = {"B": "backward", "I": "backward_input", "W": "backward_weight"}

_ACTIONS: dict[str, Callable[[Executor, Instruction], Action]] = {
    "LOAD": Executor._compile_load,
    "TOTAL_F": Executor._compile_total_forward,
    "TOTAL": Executor._compile_total,
    "F": Executor._compile_forward,
    "SEND_F": Executor._compile_send,
    "B": Executor._compile_backward,
    "I": Executor._compile_backward,
    "W": Executor._compile_backward,
    "SEND_B": Executor._compile_send,
    "GATHER": Executor._compile_gather,
    "SCATTER": Executor._compile_scatter,
    "REDUCE": Executor._compile_reduce,
    "SYNC": Executor._compile_sync,
    "UPDATE": Executor._compile_update,
    "OFFLOAD": Executor._compile_offload,
    "FETCH": Executor._compile_fetch,
    "FREE": Executor._compile_free,
    "STEP": Executor._compile_step,
}
