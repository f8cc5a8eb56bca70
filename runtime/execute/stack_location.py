"""Derive the position of a rank's main thread from its stack: the graph node, and the ranks for which it waits.

The rank does not record anything for this while it runs. A thread of the same process reads the frames when asked. For
an exception, the frames of its traceback are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

from torch import fx

from partitioner.runtime.comm.failure_origin import is_user_file
from partitioner.runtime.comm.torch_backend import TorchCommunicator, TorchGroup, Transfer
from partitioner.runtime.compile.segments import SegmentInterpreter
from partitioner.runtime.execute.calls import BoundCall
from partitioner.runtime.execute.executor import Executor
from partitioner.runtime.execute.transfers import PendingReceive, TransferSender
from partitioner.runtime.state.loss import LossSum

_COMPILED = "<partition "  # prefix of the file names of code that runtime/execute/codegen.py compiles


@dataclass(frozen=True)
class RankLocation:
    """The position of the main thread of a rank in its program.

    ``call``, ``node``, ``path`` and ``source``: the part of the model that runs, the graph node, its module's path and
    its source line. ``waits``: the ranks for which the rank waits. ``meeting``: all ranks that take part in the
    collective in which it waits. Both are empty if it does not wait. ``line``: the innermost line of Python.
    ``script``: the innermost line of the user's script, as ``file:line``; empty if there is none.
    """

    call: str = ""
    node: str = ""
    path: str = ""
    source: str = ""
    waits: tuple[int, ...] = ()
    meeting: tuple[int, ...] = ()
    line: str = ""  # the innermost line of Python, for a rank outside of its program
    script: str = ""

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RankLocation:
        return cls(**{**data, "waits": tuple(data["waits"]), "meeting": tuple(data["meeting"])})


def locate_rank(frames: Iterator[tuple[FrameType, int]], executor: Executor) -> RankLocation:
    """Return the position of a rank in its program, from its stack. ``frames``: pairs (frame, line number), the
    innermost first. ``executor``: the object that runs the rank's instructions.
    """
    found: dict[str, Any] = {}
    files = {c.filename: c.nodes for c in executor.binder.compiled}
    for frame, line in frames:
        code = frame.f_code
        found.setdefault("line", f"{code.co_name} ({code.co_filename}:{line})")
        if "script" not in found and is_user_file(code.co_filename):
            found["script"] = f"{code.co_filename}:{line}"
        if code.co_filename.startswith(_COMPILED):  # reading its locals would keep freed tensors alive
            node = files.get(code.co_filename, {}).get(line)
            if node is not None and "node" not in found:
                found.update(_describe_node(node))
            continue
        owner = frame.f_locals.get("self")
        if isinstance(owner, SegmentInterpreter) and code.co_name == "run_node" and "node" not in found:
            found.update(_describe_node(frame.f_locals["n"]))
        if "waits" not in found:
            waiting = _WAITING.get((type(owner), code.co_name))
            if waiting is not None:
                found.update(waiting(owner, frame.f_locals, executor))
            elif isinstance(owner, TorchGroup):  # starting a collective failed
                found.update(_find_group_peers(owner, executor))
        if isinstance(owner, BoundCall):
            found.setdefault("call", owner.call.path or owner.call.block)
        if isinstance(owner, Executor):
            break
    return RankLocation(**found)


def walk_stack_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a running thread with their line numbers, from ``frame``, the innermost, outwards."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def walk_traceback_frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Return an iterator over the frames of ``traceback`` with their line numbers, the innermost first."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return iter(found[::-1])


def _describe_node(node: fx.Node) -> dict[str, str]:
    """Return the name and operator, the module path and the source line of a graph node, as fields of a
    :class:`RankLocation`.
    """
    meta = node.meta
    return {
        "node": f"{node.name} ({node.target})",
        "path": meta.get("path", ""),
        "source": meta.get("source", ""),
    }


# For each method that waits, a function that returns the ranks for which the method waits.
_Locals = Mapping[str, Any]


def _find_collective_peers(transfer: Transfer, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return _find_group_peers(transfer.group, executor)


def _find_group_peers(group: TorchGroup, executor: Executor) -> dict[str, tuple[int, ...]]:
    communicator = executor.communicator
    assert isinstance(communicator, TorchCommunicator)
    members = communicator.list_ranks_on(group.processes)
    return {"waits": tuple(r for r in members if r != communicator.rank), "meeting": members}


def _find_receive_peer(receive: PendingReceive, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return {"waits": (receive.source,)}


def _find_direct_peer(
    communicator: TorchCommunicator, names: _Locals, executor: Executor
) -> dict[str, tuple[int, ...]]:
    return {"waits": (names["peer"],)}


def _find_send_peer(sender: TransferSender, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have not yet received a message of this rank, and for which it therefore waits, as
    ``{"waits": ranks}``. A Gloo send ends only when the receiver has read the message. ``sender``: the object that
    starts this rank's sends. ``names``: the local variables of its method that waits. ``executor`` is not used.
    """
    queue = names.get("under_way")
    stages = [stage for (stage, _), waiting in sender._under_way.items() if waiting is queue]
    return {"waits": tuple(sender.rank.peer(stage) for stage in stages)}


def _find_loss_peers(loss: LossSum, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return {"waits": tuple(loss.targets) if "work" in names else () if loss.source is None else (loss.source,)}


_WAITING: dict[tuple[type, str], Callable[[Any, _Locals, Executor], dict[str, tuple[int, ...]]]] = {
    (Transfer, "wait"): _find_collective_peers,
    (PendingReceive, "finish"): _find_receive_peer,
    (TorchCommunicator, "send"): _find_direct_peer,
    (TorchCommunicator, "recv"): _find_direct_peer,
    (TransferSender, "release"): _find_send_peer,
    (TransferSender, "finish"): _find_send_peer,
    (LossSum, "finish"): _find_loss_peers,
}
