"""Errors of the prover: the kinds of faults and where they are in the program, and texts for error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partitioner.passes.errors import PartitionError
from partitioner.passes.shard.differentiate import CollectiveUse

Fault = Literal[
    "structure",  # the program contradicts itself: names, shapes, layouts, buckets
    "fields",  # an instruction lacks a field, has one too many, or one out of range
    "order",  # something is used before it exists, or after it was freed
    "twice",  # something is created, run, reduced or freed a second time
    "missing",  # something is never created, run, reduced or sent
    "leak",  # a value or gradient is never freed
    "gradient",  # a gradient is used before it is complete, or changed after it was used
    "match",  # two ranks disagree on what they exchange
    "deadlock",  # ranks wait for each other forever
    "memory",  # a rank exceeds its memory limit
]


@dataclass(frozen=True)
class FaultLocation:
    """The location of a fault in a program.

    ``stage``: index of the pipeline stage. ``index``: position of the instruction. If ``index`` is ``None``, the fault
    is reported at the first instruction that uses ``call`` (position, on the stage, of an execution of a block, such as
    a layer), ``bucket`` (index of a set of parameters that are reduced together) or ``state`` (name of a parameter or
    buffer). ``node``: name of the node in the call's graph.
    """

    stage: int = 0
    index: int | None = None
    call: int | None = None
    bucket: int | None = None
    state: str = ""
    node: str = ""


class Refusal(Exception):
    """Raised inside the prover for a fault in the instructions of a pipeline stage, before the rank that runs them is
    known.

    ``fault``: kind of fault, such as ``"order"`` (something is used before it exists, or after it was freed) or
    ``"leak"`` (a tensor is never freed). ``message``: what is wrong. ``location``: where the fault is.
    """

    def __init__(self, fault: Fault, message: str, location: FaultLocation | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.location = location or FaultLocation()


class ProofError(PartitionError):
    """Raised if a program would hang, compute a wrong result, or use more memory than allowed.

    ``rank``: the (first) rank concerned. ``index`` and ``instruction``: position and printed form of the instruction at
    fault. ``node``: name of the graph node at fault; empty if there is none. ``fault``: the kind of fault, such as
    ``"deadlock"``, ``"memory"`` (a rank exceeds its memory limit) or ``"order"`` (something is used before it exists,
    or after it was freed).
    """

    def __init__(
        self, message: str, *, rank: int, index: int, instruction: str, node: str = "", fault: Fault = "structure"
    ) -> None:
        """Create the error; its text is ``message``, preceded by rank, instruction and graph node. ``fault``: by
        default ``"structure"``: the data of the program contradict each other. The other arguments: see the class.
        """
        where = f"rank {rank}, instruction {index} ({instruction})"
        if node:
            where += f", node {node}"
        super().__init__(f"{where}: {message}")
        self.rank = rank
        self.index = index
        self.instruction = instruction
        self.node = node
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (str(self), self.rank, self.index, self.instruction, self.node, self.fault)


def _rebuild_error(text: str, rank: int, index: int, instruction: str, node: str, fault: Fault) -> ProofError:
    error = ProofError("", rank=rank, index=index, instruction=instruction, node=node, fault=fault)
    error.args = (text,)
    return error


Place = tuple[str, int | None]  # (value, microbatch); ``None`` for a total, a sum over the batch


def format_value_place(place: Place) -> str:
    return f"{place[0]!r} of microbatch {place[1]}" if place[1] is not None else f"the total {place[0]!r}"


def format_collective_use(use: CollectiveUse) -> str:
    source = f" ({use.source})" if use.source else ""
    return f"{use.op} {use.dtype}{list(use.shape)} over {use.axis}{source}"
