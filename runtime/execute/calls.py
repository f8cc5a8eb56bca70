"""Run one block call (such as a layer) on one rank, forward and backward, and store the tensors that backward needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.execute.bind import Binder, find_gradient_needs
from partitioner.runtime.program.program import CallData, RankProgram
from partitioner.runtime.state.gradients import Sink
from partitioner.runtime.state.host_offload import HostCopier, OffloadedActivations, get_storage_address


class Environment:
    """The tensors of a step in progress on one rank: values and gradients of each microbatch, and the tensors that
    forward saves for backward.

    ``values`` (tensors that pass between calls of blocks, such as layers) and ``gradients``: lists over this rank's
    microbatches of dicts: name -> tensor. The next three are dicts with keys (microbatch, position of the call on the
    stage). ``saved``: the tensors that forward saved for backward. ``parked``: saved tensors that were moved to host
    memory. ``staying``: the addresses of the memory that is not moved. ``copier``: starts the copies to and from host
    memory; ``None``: a new one.
    """

    def __init__(self, rank: RankProgram, device: torch.device, copier: HostCopier | None = None) -> None:
        self.program = program = rank.program
        self.device = device
        self.values: list[dict[str, Tensor]] = [{} for _ in rank.share]
        self.gradients: list[dict[str, Tensor]] = [{} for _ in rank.share]
        self.saved: dict[tuple[int, int], list[Any]] = {}
        self.staying: dict[tuple[int, int], set[int]] = {}  # the memory that an OFFLOAD does not move
        self.parked: dict[tuple[int, int], OffloadedActivations] = {}
        self.copier = copier or HostCopier(device)
        self.seed: Tensor | None = None
        if program.objective == "train" and program.loss is not None:
            self.seed = torch.ones((), dtype=dtype_of(program.values[program.loss].dtype), device=device)

    def begin(self) -> None:
        """Remove all tensors of the last step, and set the gradient of the loss of every microbatch to 1, or to the
        loss scale. The loss of a step is the sum of the losses of its microbatches.
        """
        self.clear()
        if self.seed is not None and self.program.loss is not None:
            for gradients in self.gradients:
                gradients[self.program.loss] = self.seed

    def clear(self) -> None:
        for held in (*self.values, *self.gradients):
            held.clear()
        for kept in (self.saved, self.staying, self.parked):
            kept.clear()

    def gradient(self, microbatch: int, value: str) -> Tensor:
        """Return the accumulated gradient of the program's tensor named ``value``, for the microbatch with the index
        ``microbatch``; zeros if nothing has been added.
        """
        gradient = self.gradients[microbatch].get(value)
        if gradient is None:
            spec = self.program.values[value]
            gradient = torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.device)
        return gradient

    def add_gradient(self, microbatch: int, value: str, gradient: Tensor) -> None:
        """Add ``gradient`` to the gradient of the program's tensor named ``value``, for the microbatch with the index
        ``microbatch``.
        """
        # Not in place: a gradient may share its memory with another value's.
        gradients = self.gradients[microbatch]
        old = gradients.get(value)
        gradients[value] = gradient if old is None else old + gradient


class StageStates(NamedTuple):
    """The parameters and buffers of a pipeline stage on one rank, by name. ``tensors``: their values. ``sinks``: the
    objects that accumulate their gradients. ``leaving``: the names of those whose memory is freed between block calls
    (such as layers), such as parameters sharded by ZeRO.
    """

    tensors: Mapping[str, Tensor]
    sinks: Mapping[str, Sink]
    leaving: Collection[str]


class BoundCall:
    """One block call (a use of a block such as a layer), with this rank's parameters and compiled functions.

    Args:
        binder: compiles the functions.
        env: holds the tensors of the step, which the call reads and stores.
        index: position of the call on the pipeline stage, from 0.
        states: the parameters and buffers of the stage.
        watched: value name -> function that is called with (microbatch, name, tensor) when the call computes this
            value.
        staying: names of values that stay on the device when activations are moved to host memory.
    """

    def __init__(
        self,
        binder: Binder,
        env: Environment,
        index: int,
        states: StageStates,
        watched: Mapping[str, Callable[[int, str, Tensor], None]],
        staying: Collection[str] = (),
    ) -> None:
        stage = binder.rank.stage
        self.call: CallData = stage.calls[index]
        self.index = index
        self.env = env
        self.moment = binder.moment
        self.states = [states.tensors[s] for s in self.call.states]
        self.leaving = [states.tensors[s] for s in self.call.states if s in states.leaving]
        self.inputs = self.call.inputs
        self.outputs = self.call.outputs
        self.watched = [(k, name, watched[name]) for k, name in enumerate(self.outputs) if name in watched]
        needs = find_gradient_needs(binder.rank.program, self.call, index in stage.selective_calls)
        self.recomputed = needs is not None and index in stage.checkpoint_calls
        self.has_backward = needs is not None
        self.grad_inputs: list[str] = []
        if needs is None:
            self.run_forward = binder.compile_plain(self.call.block).function
            return
        derived = binder.library.differentiated(self.call.block, needs)
        self.run_forward = binder.compile_piece(
            self.call.block, needs, "outputs" if self.recomputed else "forward"
        ).function
        if self.recomputed:
            self.run_saved = binder.compile_piece(self.call.block, needs, "saved").function
        self.grad_outputs = [self.outputs[i] for i in derived.grad_outputs]
        self.grad_inputs = [self.inputs[i] for i in derived.grad_inputs]
        self.sinks = [states.sinks[self.call.states[i]] for i in derived.grad_states]
        self.staying = [name in staying for name in (*self.inputs, *self.outputs)]
        ops = {i.op for i in binder.rank.instructions if i.calls and i.calls[0] <= index < i.calls[1]}
        self.leaves = "OFFLOAD" in ops
        if "B" in ops:
            self.run_backward = binder.compile_piece(self.call.block, needs, "backward").function
        if "I" in ops or "W" in ops:
            self.run_input = binder.compile_piece(self.call.block, needs, "backward_input").function
            self.run_weight = binder.compile_piece(self.call.block, needs, "backward_weight").function

    def forward(self, microbatch: int, values: dict[str, Tensor]) -> None:
        """Run the forward of this block call (such as a layer) on the microbatch with the index ``microbatch``. Inputs
        are read from, and outputs stored in, ``values``, a dict: name -> tensor. The tensors that backward needs are
        saved in :attr:`env`.
        """
        self.moment.microbatch = microbatch
        given = [values[v] for v in self.inputs]
        arguments: list[Any] = [*self.states, *given]
        if self.recomputed:
            self.env.saved[microbatch, self.index] = arguments.copy()
        results = self.run_forward(arguments, ())
        if self.leaving:
            results = (*_copy_shared_results(results[: len(self.outputs)], self.leaving), *results[len(self.outputs) :])
        values.update(zip(self.outputs, results, strict=False))
        if self.has_backward and not self.recomputed:
            self.env.saved[microbatch, self.index] = list(results[len(self.outputs) :])
        if self.has_backward and self.leaves:
            around = (*given, *results[: len(self.outputs)])
            kept = [tensor for tensor, stays in zip(around, self.staying, strict=True) if stays]
            self.env.staying[microbatch, self.index] = {get_storage_address(t) for t in (*self.states, *kept)}
        for k, name, tell in self.watched:
            tell(microbatch, name, results[k])

    def backward(self, microbatch: int) -> None:
        """Run the backward of this block call (such as a layer) on the microbatch with the index ``microbatch``: add
        the gradients of the inputs and of the parameters. Do nothing if the call has no backward.
        """
        if self.has_backward:
            self._add_input_gradients(
                microbatch, self.run_backward(self._collect_backward_arguments(microbatch), self.sinks)
            )

    def backward_input(self, microbatch: int) -> None:
        """Run the half of the backward of this block call (such as a layer) that adds the gradients of the inputs, on
        the microbatch with the index ``microbatch``. Save the tensors that the other half needs.
        """
        if self.has_backward:
            results = self.run_input(self._collect_backward_arguments(microbatch), ())
            self.env.saved[microbatch, self.index] = list(results[len(self.grad_inputs) :])
            self._add_input_gradients(microbatch, results)

    def backward_weight(self, microbatch: int) -> None:
        """Run the half of the backward of this block call (such as a layer) that adds the gradients of the parameters,
        on the microbatch with the index ``microbatch``. :meth:`backward_input` must have run before.
        """
        if self.has_backward:
            self.moment.microbatch = microbatch
            self.run_weight(self.env.saved.pop((microbatch, self.index)), self.sinks)

    def offload(self, microbatch: int) -> None:
        """Start to move the tensors that the forward of this block call (such as a layer) saved for the microbatch with
        the index ``microbatch`` to host memory.
        """
        if self.has_backward:
            place = microbatch, self.index
            saved, stay = self.env.saved.pop(place), self.env.staying.pop(place)
            self.env.parked[place] = OffloadedActivations(saved, stay, self.env.copier)

    def fetch(self, microbatch: int) -> None:
        """Start to copy the tensors that the forward of this block call (such as a layer) saved for the microbatch with
        the index ``microbatch`` from host memory back to the device.
        """
        if self.has_backward:
            self.env.parked[microbatch, self.index].fetch()

    def _collect_backward_arguments(self, microbatch: int) -> list[Any]:
        """Return the arguments for the backward of this block call (such as a layer) on the microbatch with the index
        ``microbatch``: saved tensors, recomputed if necessary, then gradients of the outputs.
        """
        self.moment.microbatch = microbatch
        place = microbatch, self.index
        saved = self.env.parked.pop(place).restore() if place in self.env.parked else self.env.saved.pop(place)
        if self.recomputed:
            saved = list(self.run_saved(saved, ()))
        saved += [self.env.gradient(microbatch, v) for v in self.grad_outputs]
        return saved

    def _add_input_gradients(self, microbatch: int, results: Sequence[Any]) -> None:
        for value, gradient in zip(self.grad_inputs, results, strict=False):
            if gradient is not None:
                self.env.add_gradient(microbatch, value, gradient)


def _copy_shared_results(results: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Return ``results``, with copies in place of tensors that share memory with one of ``states`` (parameters and
    buffers). Expanded dims stay expanded.
    """
    theirs = {get_storage_address(state) for state in states}
    return [_copy_expanded(x) if get_storage_address(x) in theirs else x for x in results]


def _copy_expanded(x: Tensor) -> Tensor:
    """Return a copy of ``x`` in which expanded dims (stride 0) stay expanded."""
    once = x
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.clone().expand(x.shape)
