"""Replay the steps of one executor: run one step as usual, record the next one, and replay it afterwards.

The tensors of a recorded step keep their addresses. Parameters and gradients have fixed addresses for the whole run.
The inputs of all microbatches are copied to fixed buffers before a replay, and the loss and the model's results are
copied out of their buffers afterwards. Activations are allocated by the recorded step in the order of its instructions,
so a GPU's memory pool lets them share memory as far as their lifetimes in the program allow
(``runtime/program/memory.py``).

Calls whose sizes depend on values that the host must read, such as experts without a fixed capacity over several ranks,
run as usual between the recorded segments. Their inputs and outputs have fixed sizes and keep their addresses; the
tensors that they save for their backward are new in every step.

A program that cannot be replayed runs as usual. :class:`ReplayReport` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from partitioner.passes.ir.collectives import ROUTED
from partitioner.runtime.execute.calls import BoundCall
from partitioner.runtime.program.program import BlockGraph, RankProgram
from partitioner.runtime.replay.capture import copy_values
from partitioner.runtime.replay.tape import Tape

_log = logging.getLogger(__name__)

Action = Callable[[], None]

# Operators for which the host reads values of the device, with the kinds of devices on which it does. On "cpu" it is a
# loop over groups of rows, whose boundaries are values.
_READING = {f"partition.{name}.default": ("cpu", "cuda") for name in ROUTED} | {
    "partition.context_document_attention.default": ("cpu", "cuda"),
    "partition.document_attention.default": ("cuda",),
    "partition.context_scored_attention.default": ("cpu", "cuda"),
    "partition.scored_attention.default": ("cuda",),
    "partition.grouped_mm.default": ("cpu",),
    "partition.expert_mm.default": (),
}


@dataclass
class ReplayReport:
    """How the steps of one program run on this rank, if the engine was asked to record one step and replay it.

    ``state``: ``"eager"`` (steps cannot be replayed and run operator by operator), ``"warm-up"`` (no step was recorded
    yet) or ``"replayed"``. ``reason``: why steps cannot be replayed; empty otherwise. ``kind``: how a step is recorded,
    such as ``"CUDA graphs"``. ``segments``: number of recorded pieces of a step, between which the host runs functions.
    ``host``: kind of such a function, such as a collective -> number of these functions. ``eager_calls``: module path
    of each block call (such as a layer) that runs as usual between the pieces -> the reason. ``replays``: number of
    steps that were replayed.
    """

    state: str = "warm-up"
    reason: str = ""
    kind: str = ""
    segments: int = 0
    host: Mapping[str, int] = field(default_factory=dict)
    eager_calls: dict[str, str] = field(default_factory=dict)
    replays: int = 0

    def __str__(self) -> str:
        if self.state == "eager":
            return f"eager: {self.reason}"
        if self.state == "warm-up":
            return f"{self.kind}: the first step is not recorded"
        between = ", ".join(f"{n} {kind}" for kind, n in self.host.items()) or "nothing"
        eager = "".join(f"; {path} runs as usual: {why}" for path, why in self.eager_calls.items())
        return f"{self.kind}: {self.segments} segments, between them {between}; {self.replays} steps replayed{eager}"


class Step(Protocol):
    """Interface of the executor whose steps :class:`StepReplay` records. ``rank``: the program of the rank.
    ``actions``: the functions that run the instructions of a step, as pairs (index of the instruction, function).
    ``outputs``: the model's results, as name of a value -> microbatch -> tensor.
    """

    rank: RankProgram
    actions: list[tuple[int, Action]]
    outputs: dict[str, dict[int, Tensor]]

    @property
    def loss(self) -> Tensor | None: ...

    def begin_step(self) -> None: ...

    def set_loss(self, value: Tensor) -> None: ...

    def load_input(self, name: str, microbatch: int) -> Tensor: ...


def find_obstacle(rank: RankProgram, device: torch.device, local_inputs: frozenset[str]) -> str:
    """Return the reason why the steps of ``rank`` cannot be recorded and replayed, as text: something that the host
    must do in each step, such as waiting for offloaded parameters. Empty if the steps can be replayed. ``rank``: the
    program of this rank. ``device``: the device on which it runs. ``local_inputs``: names of inputs that the caller
    holds, such as key/value caches.
    """
    program = rank.program
    if program.offload:
        return f"the plan keeps {', '.join(program.offload)} in host memory, and the host waits for the copies"
    if local_inputs:
        return "its inputs are key/value caches, which the caller holds and which are too large to be copied"
    prologue = [c for c in rank.stage.calls if c.prologue]
    reads = [why for c in prologue if (why := find_replay_obstacle(program.blocks[c.block], device.type))]
    return f"the totals of a batch need the host: {reads[0]}" if reads else ""


def find_replay_obstacle(block: BlockGraph, device: str) -> str:
    """Return the reason why the graph ``block`` (of a piece of the model) cannot be recorded for replay, as text: the
    name of an operator whose sizes depend on values that the host must read. Empty if there is no such operator.
    ``device``: "cpu" or "cuda".
    """
    for node in block.nodes:
        target = str(node.get("target", ""))
        if device in _READING.get(target, ()):
            return f"sizes of {target.removesuffix('.default')} depend on the data"
    return ""


class ReplayableCall:
    """Wrapper of ``bound``, one block call (such as a layer), with the same methods, for steps that are recorded and
    replayed. A call in which the host reads values from the device cannot be part of a recording. Such a call runs as
    usual between the recorded segments, in the recorded step and in each replay. ``reason``: why the call cannot be
    recorded, as text; empty if it can. ``replay``: decides which steps are recorded.
    """

    def __init__(self, bound: BoundCall, replay: StepReplay, reason: str) -> None:
        self.bound, self.replay, self.reason = bound, replay, reason
        self.call, self.has_backward, self.index = bound.call, bound.has_backward, bound.index

    @property
    def path(self) -> str:
        return self.call.path or self.call.block

    def forward(self, microbatch: int, values: dict[str, Tensor]) -> None:
        """Run the forward of this block call (such as a layer) on the microbatch with the index ``microbatch``. Inputs
        are read from, and outputs stored in, ``values``, a dict: name -> tensor.
        """
        self._run(lambda: self.bound.forward(microbatch, values), values, self.bound.inputs, self.bound.outputs)

    def backward(self, microbatch: int) -> None:
        """Run the backward of this block call (such as a layer) on the microbatch with the index ``microbatch``:
        compute the gradients of inputs and of parameters.
        """
        self._run_backward(lambda: self.bound.backward(microbatch), microbatch)

    def backward_input(self, microbatch: int) -> None:
        """Run the half of the backward of this block call (such as a layer) that computes gradients of inputs, on the
        microbatch with the index ``microbatch``.
        """
        self._run_backward(lambda: self.bound.backward_input(microbatch), microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """Run the half of the backward of this block call (such as a layer) that computes gradients of parameters, on
        the microbatch with the index ``microbatch``.
        """
        self._run_backward(lambda: self.bound.backward_weight(microbatch), microbatch)

    def _run_backward(self, run: Action, microbatch: int) -> None:
        bound = self.bound
        self._run(run, bound.env.gradients[microbatch], (*bound.grad_outputs, *bound.grad_inputs), bound.grad_inputs)

    def _run(self, run: Action, table: dict[str, Tensor], read: Sequence[str], written: Sequence[str]) -> None:
        """Run the forward or backward of this block call (such as a layer) by calling ``run``. If the call cannot be
        part of the recording of a step, suspend the recording meanwhile, and store a function that repeats ``run`` in
        each replay. ``table``: the dict that ``run`` reads and changes: name -> tensor. ``read``, ``written``: the
        names in ``table`` that ``run`` reads and writes.
        """
        tape = self.replay.tape
        if not tape.recording:
            with self.replay.watch_call(self):
                run()
            return
        if not self.reason:
            run()
            return
        before = {name: table[name] for name in read if name in table}
        sinks = [(sink, sink.fresh) for sink in getattr(self.bound, "sinks", ())]
        after: dict[str, Tensor] = {}

        def first() -> None:
            run()
            after.update((name, table[name]) for name in written if name in table)

        def again() -> None:
            for name in read:
                table.pop(name, None)
            table.update(before)
            for sink, fresh in sinks:
                sink.fresh = fresh
            run()
            for name, static in after.items():
                copy_values(static, table[name])

        tape.run_on_host(first, again, "eager call")


class StepReplay:
    """Decides how each step of one executor runs. The first step runs as usual, to find block calls (such as layers)
    that cannot be recorded. The second step is recorded. Later steps are replays. ``tape``: the recording, on which the
    executor's communicator records its collectives, too. ``report``: the decisions and their reasons.
    """

    def __init__(self, tape: Tape, rank: RankProgram, device: torch.device, local_inputs: frozenset[str]) -> None:
        self.tape = tape
        self.rank = rank
        self.device = device
        self.report = ReplayReport(kind=tape.capture.kind)
        self._inputs: dict[tuple[int, str], Tensor] = {}
        self._replays: list[tuple[int, Action]] = []
        self._loss: Tensor | None = None
        self._outputs: dict[str, dict[int, Tensor]] = {}
        self._mode = ""
        if reason := find_obstacle(rank, device, local_inputs):
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        self.report.state, self.report.reason = "eager", reason
        _log.warning("rank %d runs without replay: %s", self.rank.rank, reason)

    def wrap_call(self, call: BoundCall) -> ReplayableCall:
        """Return a wrapper of ``call``, one block call (such as a layer). The wrapper runs the call inside the
        recording of a step; if the host reads values from the device in the call, outside of the recording.
        """
        why = find_replay_obstacle(self.rank.program.blocks[call.call.block], self.device.type)
        wrapped = ReplayableCall(call, self, why)
        if why:
            self._exclude_call(wrapped)
        return wrapped

    def _exclude_call(self, call: ReplayableCall) -> None:
        if call.bound.watched:
            self._fall_back(f"{call.path} computes the loss or another result, and {call.reason}")
        self.report.eager_calls[call.path] = call.reason

    def watch_call(self, call: ReplayableCall) -> AbstractContextManager[None]:
        """Return a context manager in which ``call``, a block call (such as a layer), runs in a step before the
        recorded one. If the host reads values from the device inside, the call is marked to be kept out of the
        recording.
        """
        return _CallWatch(self, call)

    def begin_step(self, step: Step, usual: bool) -> list[tuple[int, Action]]:
        """Prepare a step of the executor ``step``, and return its actions as pairs (index of the instruction,
        function): the usual ones, those that record the step, or those that replay a recorded one. ``usual``: whether
        the step must run without recording and replay, for example because a tool follows or repeats it.
        """
        if self.report.state == "eager" or usual:
            self._mode = "usual"
        elif self._replays:
            self._mode = "replay"
            for (microbatch, name), static in self._inputs.items():
                copy_values(static, step.load_input(name, microbatch))
            return self._replays
        elif self._mode == "watch":
            return self._begin_recording(step)
        else:
            self._mode = "watch"
        step.begin_step()
        return step.actions

    def _begin_recording(self, step: Step) -> list[tuple[int, Action]]:
        """Start to record a step of the executor ``step``, and return its actions as pairs (index of the instruction,
        function). Each function first sets the index of its action on the recording, so that recorded entries are
        assigned to the action.
        """
        self._mode = "record"
        loads = [i for i in self.rank.instructions if i.op == "LOAD" and i.microbatch is not None]
        for load in loads:
            for name in load.values:
                assert load.microbatch is not None
                self._inputs[load.microbatch, name] = step.load_input(name, load.microbatch).clone()
        self.tape.start()
        step.begin_step()
        return [(index, self._wrap_at_place(place, action)) for place, (index, action) in enumerate(step.actions)]

    def _wrap_at_place(self, place: int, action: Action) -> Action:
        def run() -> None:
            self.tape.place = place
            action()

        return run

    def recorded_input(self, name: str, microbatch: int) -> Tensor | None:
        """While a step is being recorded, return the buffer from which the step reads its input ``name`` for
        ``microbatch``, and to which each replay copies its own input. Return ``None`` if no step is being recorded.
        """
        return self._inputs[microbatch, name] if self._mode == "record" else None

    def end_step(self, step: Step) -> None:
        """End a step that has run without an error. After a recorded or replayed step, copy the loss and the results
        from the recorded step's buffers to the executor ``step``; after a recorded one, also prepare the replays.
        """
        if self._mode == "record":
            self.tape.finish()
            self._loss = step.loss
            self._outputs = step.outputs
            self._replays = _group_entries(self.tape, step.actions)
            self.report.state, self.report.segments = "replayed", self.tape.num_segments
            self.report.host = dict(self.tape.host)
            _log.info("rank %d: %s", self.rank.rank, self.report)
        elif self._mode == "replay":
            self.report.replays += 1
        else:
            return
        if self._loss is not None:
            step.set_loss(self._loss.clone())
        step.outputs = {name: {m: x.clone() for m, x in parts.items()} for name, parts in self._outputs.items()}

    def abort_step(self) -> None:
        """Drop the recording of a step that has failed."""
        if self._mode == "record":
            self.tape.abort()
            self._inputs = {}
            self._mode = "watch"

    def note_reads(self, call: ReplayableCall, found: Sequence[str]) -> None:
        """If the host read values from the device in ``call``, a block call (such as a layer), mark the call to be kept
        out of the recording. ``found``: a text for each place of such a read; empty if there was none.
        """
        if found and not call.reason:
            call.reason = f"the host reads values in {found[0]}"
            self._exclude_call(call)

    @property
    def watching(self) -> bool:
        return self._mode == "watch"


class _CallWatch(AbstractContextManager[None]):
    """Context manager in which one block call (such as a layer) runs in a step before the recorded one. It detects
    whether the host reads values from the device in the call, and reports the result to ``replay``.
    """

    def __init__(self, replay: StepReplay, call: ReplayableCall) -> None:
        self.replay, self.call = replay, call
        self._watch: AbstractContextManager[list[str]] | None = None
        self._found: list[str] = []

    def __enter__(self) -> None:
        if self.replay.watching and not self.call.reason:
            self._watch = self.replay.tape.capture.watch()
            self._found = self._watch.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)
            self.replay.note_reads(self.call, self._found)


def _group_entries(tape: Tape, actions: Sequence[tuple[int, Action]]) -> list[tuple[int, Action]]:
    """Return the actions of a replayed step, as pairs (index of the instruction, function). Action ``k`` of the result
    replays the entries that were recorded while ``actions[k]`` ran, so that the times of actions can be compared with
    and without replay. ``actions``: the actions of a step that is not replayed, as such pairs. ``tape``: the recording
    of a step.
    """
    found: list[list[Action]] = [[] for _ in actions]
    for place, entry in tape.entries:
        found[place].append(entry)  # type: ignore[arg-type]  # what a replay returns is not used
    return [(index, _run_all(entries)) for (index, _), entries in zip(actions, found, strict=True)]


def _run_all(entries: Sequence[Action]) -> Action:
    if len(entries) == 1:
        return entries[0]

    def run() -> None:
        for entry in entries:
            entry()

    return run
