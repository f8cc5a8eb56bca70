"""The whole loss, on every rank: added up over microbatches and ``dp``, and passed on from stage to stage.

It travels behind the rest of the step: reduced while backward runs, sent to the neighbouring stages, each of which has
posted its receive at the start, and passes it on as soon as gradients have come the same way: what a rank has left to
do then, no other waits for, which may begin the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.serialize import dtype_of
from runtime.errors import BackwardError
from runtime.groups import Communicator, Pending, Work
from runtime.program import Instruction, Program, RankProgram
from runtime.waiting import wait_for

CHANNEL = "L"
_BACKWARD = frozenset({"B", "I"})
_NARROW = frozenset({torch.float16, torch.bfloat16})  # added up in float32


class LossSum:
    """The loss of the step under way; ``value`` is whole after :meth:`finish`."""

    def __init__(self, rank: RankProgram, communicator: Communicator) -> None:
        program = rank.program
        assert program.loss is not None
        self.communicator = communicator
        self.count = len(rank.share)
        self.late = communicator.device.type == "cuda"
        self.at_end = bool(program.data_shares)  # ranks end at different microbatches, with collectives in between
        dtype = dtype_of(program.values[program.loss].dtype)
        self.dtype = torch.float32 if dtype in _NARROW else dtype
        self.group = communicator.group(rank.group("dp"))
        source, targets = neighbours(rank.stage_index, loss_stage(program), len(program.stages))
        self.source = None if source is None else rank.peer(source)
        self.targets = [rank.peer(t) for t in targets]
        self.passed_at = None if self.at_end else _passed_at(rank.instructions, source)
        self.begin()

    def begin(self) -> None:
        self.value: Tensor | None = None
        self._left = self.count
        self._pending: Pending | None = None
        self._receive: Work | None = None
        self._sends: list[Work] = []

    def start(self) -> None:
        """Post the receive, on a stage that does not compute the loss.

        Not on a GPU before it is passed on: there a receive is a kernel that waits, for what needs kernels of this rank
        that come before.
        """
        if self.source is not None and not self.late:
            self._post()

    def _post(self) -> None:
        if self.source is not None:
            self.value = torch.empty((), dtype=self.dtype, device=self.communicator.device)
            self._receive = self.communicator.recv(self.value, self.source, CHANNEL)

    def add(self, value: Tensor) -> None:
        """The loss of one microbatch; the last one starts the sum over ``dp``."""
        value = value.to(self.dtype)
        self.value = value.clone() if self.value is None else self.value + value
        self._left -= 1
        if self._left == 0 and not self.at_end:
            self._sum()

    def pass_on(self) -> None:
        """Take the whole loss, which is there or about to be, and send it to the stages that learn it from here."""
        if self.value is None and self.late:
            self._post()
        if self._pending is not None:
            self.value, self._pending = self._pending.wait(), None
        if self._receive is not None:
            wait_for(self._receive)
            self._receive = None
        if not self._sends:
            self._send()

    def finish(self) -> None:
        if self.at_end and self.source is None:
            self._sum()
        self.pass_on()
        for work in self._sends:
            wait_for(work)

    def _sum(self) -> None:
        assert self.value is not None
        self._pending = self.group.all_reduce(self.value)
        if self.group.size == 1 and not self.late:
            self._send()

    def _send(self) -> None:
        assert self.value is not None, "the program's loss is computed on no stage"
        self._sends = [self.communicator.send(self.value, target, CHANNEL) for target in self.targets]


def _passed_at(instructions: Sequence[Instruction], source: int | None) -> int | None:
    """The place of the backward behind which the loss is passed on: of the last gradient that comes from the stage
    ``source``, as the loss does, or (``None``) the first one behind all forwards; ``None`` where there is no such."""
    wanted = ("F", None) if source is None else ("RECV_B", source)
    last: Instruction | None = None
    found: int | None = None
    for place, i in enumerate(instructions):
        if (i.op, i.peer) == wanted:
            last, found = i, None
        elif found is None and last is not None and i.op in _BACKWARD:
            found = place if source is None or i.microbatch == last.microbatch else None
    return found


def loss_stage(program: Program) -> int:
    """The stage that computes the loss."""
    return next(i for i, stage in enumerate(program.stages) if any(program.loss in c.outputs for c in stage.calls))


def neighbours(stage: int, source: int, num_stages: int) -> tuple[int | None, list[int]]:
    """From which stage ``stage`` learns what ``source`` knows, and to which ones it passes it on."""
    below = [stage - 1] if 0 < stage <= source else []
    above = [stage + 1] if source <= stage < num_stages - 1 else []
    if stage == source:
        return None, below + above
    return (stage + 1, below) if stage < source else (stage - 1, above)


def loss_edges(program: Program) -> set[tuple[int, int, str]]:
    """(from stage, to stage, channel) of all that the loss travels on."""
    if program.loss is None or len(program.stages) == 1:
        return set()
    source, count = loss_stage(program), len(program.stages)
    return {(stage, target, CHANNEL) for stage in range(count) for target in neighbours(stage, source, count)[1]}


class StepLoss(Tensor):
    """The loss of a step, as a script gets it: a tensor without a graph, of which backward says why.

    What is computed from it is one as well. Where something else that takes a gradient is added, backward goes there.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD_FUNCTIONS and args and not any(_has_graph(t) for t in pytree.tree_leaves(args[0])):
            raise BackwardError(
                "backward is called on a loss that engine.step(batch) has returned, or on a number made of it, which "
                "has no graph: step() has run forward and backward, and parameters have their gradients; leave "
                "backward out. Weigh the loss in the model's forward, or the gradients before optimizer.step(); losses "
                "in float16 are scaled by the engine itself (loss_scale)"
            )
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return str(self.as_subclass(Tensor).__repr__(**kwargs))

    def __format__(self, spec: str) -> str:
        return str(self.as_subclass(Tensor).__format__(spec))  # torch formats numbers of its own class alone

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, and sent to other processes, as a tensor of torch's own."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepLoss:
        return self.as_subclass(Tensor).detach().clone().as_subclass(StepLoss)


def _has_graph(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.requires_grad


_BACKWARD_FUNCTIONS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
