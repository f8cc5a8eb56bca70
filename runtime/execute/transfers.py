"""Sends and receives of one rank. A receive starts one computation early, and ends before its values are first read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.comm.group import Communicator, TransferHandle
from partitioner.runtime.comm.wait_clock import wait_for
from partitioner.runtime.execute.calls import Environment
from partitioner.runtime.program.instructions import Instruction, Instructions
from partitioner.runtime.program.program import RankProgram, Stage, keep_first_microbatches

COMPUTING = frozenset({"F", "B", "I", "W"})

RECEIVING = frozenset({"RECV_F", "RECV_B"})
SENDING = frozenset({"SEND_F", "SEND_B"})
Slot = tuple[str, int, str]  # "F" (a value) or "B" (its gradient), microbatch, name
Direction = tuple[int, str]  # pipeline stage and channel ("F" or "B")


class PendingReceive:
    """One instruction that receives values (RECV_F) or gradients (RECV_B) from another pipeline stage. ``start`` posts
    the receives, ``finish`` waits for them and calls ``place(microbatch, name, tensor)`` for each tensor.
    ``communicator``: connects this rank with the others.
    """

    def __init__(
        self,
        instruction: Instruction,
        rank: RankProgram,
        communicator: Communicator,
        place: Callable[[int, str, Tensor], None],
    ) -> None:
        assert instruction.peer is not None
        assert instruction.microbatch is not None
        self.channel = instruction.op[-1]
        self.microbatch = instruction.microbatch
        self.values = instruction.values
        self.source = rank.peer(instruction.peer)
        self.communicator = communicator
        self.place = place
        specs = [rank.program.values[v] for v in self.values]
        self.specs = [(s.shape, dtype_of(s.dtype)) for s in specs]
        self.device = communicator.device
        self.under_way: list[tuple[str, Tensor, TransferHandle]] = []

    @property
    def slots(self) -> list[Slot]:
        return [(self.channel, self.microbatch, v) for v in self.values]

    def start(self) -> None:
        for value, (shape, dtype) in zip(self.values, self.specs, strict=True):
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            work = self.communicator.recv(buffer, self.source, self.channel)
            self.under_way.append((value, buffer, work))

    def finish(self) -> None:
        under_way, self.under_way = self.under_way, []
        for value, buffer, work in under_way:
            wait_for(work)
            self.place(self.microbatch, value, buffer)


class TransferSender:
    """Starts sends of values and gradients to other pipeline stages, and keeps a reference to the tensors until they
    have arrived. ``env``: has the tensors of the step. ``communicator``: connects this rank with the others.
    """

    def __init__(self, rank: RankProgram, env: Environment, communicator: Communicator) -> None:
        self.rank = rank
        self.env = env
        self.communicator = communicator
        self._under_way: dict[Direction, deque[tuple[TransferHandle, Tensor]]] = {}
        self._released: dict[Direction, int] = {}

    def action(self, instruction: Instruction) -> Callable[[], None]:
        """Return a function without arguments that starts the sends of ``instruction``, a SEND_F (values) or SEND_B
        (gradients).
        """
        assert instruction.peer is not None
        assert instruction.microbatch is not None
        channel, microbatch, values = instruction.op[-1], instruction.microbatch, instruction.values
        target = self.rank.peer(instruction.peer)
        under_way = self._under_way.setdefault((instruction.peer, channel), deque())

        def send() -> None:
            """Start the sends of all tensors of the instruction, and keep a reference to each tensor until it has
            arrived.
            """
            held = self.env.values[microbatch]
            for value in values:
                tensor = held[value] if channel == "F" else self.env.gradient(microbatch, value)
                tensor = tensor.contiguous()
                under_way.append((self.communicator.send(tensor, target, channel), tensor))

        return send

    def release(self, direction: Direction, count: int) -> None:
        """Wait for the first ``count`` sends of the step in ``direction``, a pair (pipeline stage, "F" or "B"), and
        drop their tensors. This is called when the receiver is known to have received the tensors, so it does not block
        for long.
        """
        under_way = self._under_way[direction]
        for _ in range(count - self._released.get(direction, 0)):
            wait_for(under_way.popleft()[0])
        self._released[direction] = max(count, self._released.get(direction, 0))

    def finish(self) -> None:
        for under_way in self._under_way.values():
            while under_way:
                wait_for(under_way.popleft()[0])
        self._released.clear()


def find_proven_arrivals(rank: RankProgram) -> dict[int, list[tuple[Direction, int]]]:
    """Return, for each receive of ``rank``, the sends of this rank that are known to have arrived once the receive has
    ended, as a dict: index of the receive -> pairs ((pipeline stage, "F" or "B"), number of tensors sent in the step so
    far).

    If a peer sends a message after it has read a message of this rank, the arrival of the peer's message proves the
    arrival of this rank's message. The proof is needed because Gloo does not report whether a send has ended, and
    keeping all sent tensors until the end of the step would hold the gradients of every microbatch.
    """
    found: dict[int, list[tuple[Direction, int]]] = {}
    stages = rank.program.stages
    me = rank.stage_index
    for peer in {i.peer for i in rank.instructions if i.op in SENDING and i.peer not in (None, me)}:
        assert peer is not None
        theirs = keep_first_microbatches(stages[peer].instructions, rank.program, len(rank.share))
        reads = _list_stage_receives(stages[peer], theirs, me)
        answers = {
            c: [j for j, i in enumerate(theirs) if i.op == f"SEND_{c}" and i.peer == me for _ in i.values]
            for c in ("F", "B")
        }
        taken = {"F": 0, "B": 0}
        for index, instruction in enumerate(rank.instructions):
            if instruction.op not in RECEIVING or instruction.peer != peer:
                continue
            channel = instruction.op[-1]
            taken[channel] += len(instruction.values)
            sent_at = answers[channel][taken[channel] - 1] if 0 < taken[channel] <= len(answers[channel]) else -1
            for sent, places in reads.items():
                count = sum(size for read_at, size in places if read_at < sent_at)
                if count:
                    found.setdefault(index, []).append(((peer, sent), count))
    return found


def _list_stage_receives(stage: Stage, instructions: Instructions, source: int) -> dict[str, list[tuple[int, int]]]:
    """Return the receives of ``stage`` from the pipeline stage with the index ``source``, as a dict: channel ("F" for
    values, "B" for gradients) -> list of pairs, in the order of the receives. A pair has the index of the instruction
    that first reads the received values, and the number of tensors. ``instructions``: the list of ``stage``.
    """
    reads: dict[str, list[tuple[int, int]]] = {"F": [], "B": []}
    for index, instruction in enumerate(instructions):
        if instruction.op in RECEIVING and instruction.peer == source:
            channel = instruction.op[-1]
            slots = {(channel, instruction.microbatch, v) for v in instruction.values}
            later = enumerate(instructions[index + 1 :], index + 1)
            read_at = next((j for j, i in later if slots & set(list_slots_read(i, stage))), len(instructions))
            latest = max([read_at, *(place for place, _ in reads[channel])])  # sends of a channel are released in order
            reads[channel].append((latest, len(instruction.values)))
    return reads


def place_early_receives(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Return the positions at which the receives in a rank's list ``instructions`` are posted, as a dict: index of an
    instruction -> indices of the receives to post before it, in order.

    A receive is posted one computation early, so that the transfer overlaps with the computation. Receives from one
    stage and of one kind keep their order. A receive is not posted before a computation of its own microbatch: the
    received values may depend on it, and on a GPU a receive is a kernel that blocks.
    """
    starts: dict[int, list[int]] = {}
    last: dict[tuple[int | None, str], int] = {}
    for index, instruction in enumerate(instructions):
        if instruction.op not in RECEIVING:
            continue
        channel = instruction.peer, instruction.op
        start = index
        while start > last.get(channel, 0):
            before = instructions[start - 1]
            if before.op in COMPUTING and before.microbatch == instruction.microbatch:
                break
            start -= 1
            if before.op in COMPUTING:
                break
        last[channel] = start
        starts.setdefault(start, []).append(index)
    return starts


def list_slots_read(instruction: Instruction, stage: Stage) -> list[Slot]:
    """Return the received tensors that ``instruction`` may be the first to read, as (channel, microbatch, value name).
    The channel is "F" for a value and "B" for its gradient. ``stage``: the instruction's pipeline stage.
    """
    microbatch = instruction.microbatch
    if microbatch is None:
        return []
    calls = [] if instruction.calls is None else stage.calls[slice(*instruction.calls)]
    match instruction.op:
        case "F":
            return [("F", microbatch, v) for call in calls for v in call.inputs]
        case "TOTAL_F":
            return [("F", microbatch, v) for call in stage.calls if call.prologue for v in call.inputs]
        case "SEND_F":
            return [("F", microbatch, v) for v in instruction.values]
        case "B" | "I":
            return [("B", microbatch, v) for call in calls for v in call.outputs]
        case "SEND_B" | "RECV_B":
            return [("B", microbatch, v) for v in instruction.values]
        case "FREE":
            return [("B" if instruction.gradients else "F", microbatch, v) for v in instruction.values]
    return []
