"""Where a rank's main thread is, read off its stack: the graph's node, and the ranks that it waits for.

Nothing is noted while the rank runs: a thread of the same process looks at the frames when somebody wants to know, and
an error brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

from torch import fx

from runtime.backends import TorchGroup, Transfer
from runtime.calls import BoundCall
from runtime.communicator import TorchCommunicator
from runtime.execute import Executor
from runtime.losses import LossSum
from runtime.transfers import Receive, Sender

_COMPILED = "<partition "  # how runtime/codegen.py calls its files


@dataclass(frozen=True)
class Place:
    """Where a rank is. ``waits``: the ranks without which it cannot go on, and ``meeting`` those of the collective
    that it is in; both empty where it waits for nobody."""

    call: str = ""
    node: str = ""
    path: str = ""
    source: str = ""
    waits: tuple[int, ...] = ()
    meeting: tuple[int, ...] = ()
    line: str = ""  # the innermost line of Python: what it does outside of its program

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Place:
        return cls(**{**data, "waits": tuple(data["waits"]), "meeting": tuple(data["meeting"])})


def place_of(frames: Iterator[tuple[FrameType, int]], executor: Executor) -> Place:
    """The place from the stack ``frames``, the innermost first, each with its line."""
    found: dict[str, Any] = {}
    files = {c.filename: c.nodes for c in executor.binder.compiled}
    for frame, line in frames:
        code = frame.f_code
        found.setdefault("line", f"{code.co_name} ({code.co_filename}:{line})")
        if code.co_filename.startswith(_COMPILED):  # its locals would keep what it has let go of
            node = files.get(code.co_filename, {}).get(line)
            if node is not None and "node" not in found:
                found.update(_node(node))
            continue
        owner = frame.f_locals.get("self")
        if "waits" not in found:
            waiting = _WAITING.get((type(owner), code.co_name))
            if waiting is not None:
                found.update(waiting(owner, frame.f_locals, executor))
            elif isinstance(owner, TorchGroup):  # fails to start a collective
                found.update(_members(owner, executor))
        if isinstance(owner, BoundCall):
            found.setdefault("call", owner.call.path or owner.call.block)
        if isinstance(owner, Executor):
            break
    return Place(**found)


def stack(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a running thread, the innermost first."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def raised(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames that an error passed through, the innermost first."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return iter(found[::-1])


def _node(node: fx.Node) -> dict[str, str]:
    meta = node.meta
    return {
        "node": f"{node.name} ({node.target})",
        "path": meta.get("path", ""),
        "source": meta.get("source", ""),
    }


# Whom each of the methods that wait waits for.

_Locals = Mapping[str, Any]


def _collective(transfer: Transfer, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return _members(transfer.group, executor)


def _members(group: TorchGroup, executor: Executor) -> dict[str, tuple[int, ...]]:
    communicator = executor.communicator
    assert isinstance(communicator, TorchCommunicator)
    members = communicator.ranks_of(group.processes)
    return {"waits": tuple(r for r in members if r != communicator.rank), "meeting": members}


def _receive(receive: Receive, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return {"waits": (receive.source,)}


def _peer(communicator: TorchCommunicator, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return {"waits": (names["peer"],)}


def _send(sender: Sender, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    """Of all that is under way, the queue at hand; Gloo's sends end when they have been read."""
    queue = names.get("under_way")
    stages = [stage for (stage, _), waiting in sender._under_way.items() if waiting is queue]
    return {"waits": tuple(sender.rank.peer(stage) for stage in stages)}


def _loss(loss: LossSum, names: _Locals, executor: Executor) -> dict[str, tuple[int, ...]]:
    return {"waits": tuple(loss.targets) if "work" in names else () if loss.source is None else (loss.source,)}


_WAITING: dict[tuple[type, str], Callable[[Any, _Locals, Executor], dict[str, tuple[int, ...]]]] = {
    (Transfer, "wait"): _collective,
    (Receive, "finish"): _receive,
    (TorchCommunicator, "send"): _peer,
    (TorchCommunicator, "recv"): _peer,
    (Sender, "release"): _send,
    (Sender, "finish"): _send,
    (LossSum, "finish"): _loss,
}
