"""Call a function for every operator that a step runs, and compare two runs bit by bit.

:func:`probe_operators` reports each operator with its instruction, graph node, operands and results. The program is not
changed: a dispatch mode intercepts the operators, and the Python stack gives their position. Collectives run below the
dispatcher, so their results are seen only in the operators that read them. Operators on communication buffers, which
start with uninitialised memory, are left out.

:func:`record_hashes` writes hashes of the operands and results of every operator to a file. :func:`compare_runs` finds
the first operator whose results differ between two such files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.runtime.comm import thread_backend, torch_backend
from partitioner.runtime.compile.segments import run_uncompiled
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.execute import transfers
from partitioner.runtime.execute.executor import Executor
from partitioner.runtime.execute.failures import format_instruction_at
from partitioner.runtime.execute.stack_location import RankLocation, locate_rank, walk_stack_frames


@dataclass(frozen=True)
class ProbedOperation:
    """One operator that has run. ``step``: number of the training step, from 1. ``index``, ``instruction``: position
    and printed form of the instruction. ``inputs``, ``outputs``: its tensors. ``scalars``: its other arguments.
    ``place()`` returns its position in the model; call it only while the operator is being reported.
    """

    rank: int
    step: int
    index: int  # of the instruction
    instruction: str
    operator: str
    place: Callable[[], RankLocation]  # must be called while the operator is being reported
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    scalars: Sequence[Any]


_BUFFERS = tuple(module.__file__ for module in (torch_backend, thread_backend, transfers))

_PYTORCH = os.path.dirname(torch.__file__)


class _OperatorProbe(TorchDispatchMode):
    """A torch dispatch mode that calls ``see`` with every operator that runs in a step of ``engine``. ``index``:
    position of the current instruction.
    """

    def __init__(self, engine: Engine, see: Callable[[ProbedOperation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executor: Executor = engine._executor
        self.engine = engine
        self.see = see
        self.index = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator ``func`` with ``args`` and ``kwargs``, report it, and return its result. Operators on
        communication buffers are not reported. ``types`` is not used.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        frame = sys._getframe(1)
        if _is_buffer(frame, func):
            return result
        given = pytree.tree_leaves((args, kwargs))
        operation = ProbedOperation(
            rank=self.engine.communicator.rank,
            step=self.engine.steps + 1,
            index=self.index,
            instruction=format_instruction_at(self.executor.rank, self.index),
            operator=str(func),
            place=lambda: locate_rank(walk_stack_frames(frame), self.executor),
            inputs=[x for x in given if isinstance(x, Tensor)],
            outputs=[x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)],
            scalars=[x for x in given if not isinstance(x, Tensor)],
        )
        self.see(operation)
        return result


def _is_buffer(frame: FrameType | None, func: Any) -> bool:
    """Return whether the operator ``func`` accesses memory that is not filled yet, such as a communication buffer, so
    that it is not reported. ``frame``: the stack frame that called it.
    """
    if "empty" in str(func):
        return True
    while frame is not None and frame.f_code.co_filename.startswith(_PYTORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _BUFFERS


@contextmanager
def probe_operators(engine: Engine, see: Callable[[ProbedOperation], None]) -> Iterator[None]:
    """Return a context manager in which ``see`` is called for every operator that runs in a step of ``engine``, after
    it has run, with a description of the operator and its tensors. Compiled operators run one by one inside.
    """
    executor = engine._executor
    plain = list(executor.actions)
    probe = _OperatorProbe(engine, see)

    def within(index: int, action: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs ``action``, a part of the instruction at ``index``, and reports every operator in
        it to the function ``see`` of :func:`probe_operators`.
        """

        def run() -> None:
            probe.index = index
            with run_uncompiled(), probe:
                action()

        return run

    executor.actions[:] = [(index, within(index, action)) for index, action in plain]
    try:
        yield
    finally:
        executor.actions[:] = plain


_SIZE = 8  # bytes of a hash


def hash_tensor(x: Tensor) -> str:
    """Return a hash of the dtype, shape and bits of ``x``, as hexadecimal digits."""
    x = x.detach()
    digest = hashlib.blake2b(f"{x.dtype}{list(x.shape)}".encode(), digest_size=_SIZE)
    if x.numel():
        digest.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def record_hashes(engine: Engine, folder: str | Path) -> Iterator[None]:
    """Write hashes of the operands and results of every operator to a file in ``folder``, for the steps of ``engine``
    inside the ``with`` block. All ranks call this. The file ``rank-<rank>.hashes`` has a line of JSON per operator. A
    step takes many times as long as usual. :func:`partitioner.debug.compare_runs` finds the first operator that differs
    between two folders.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with (
        (path / f"rank-{engine.communicator.rank}.hashes").open("w") as file,
        probe_operators(engine, _HashWriter(file).see),
    ):
        yield


class _HashWriter:
    """Writes a line of JSON to ``file`` for every operator: its position in the program, and hashes of operands and
    results.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def see(self, operation: ProbedOperation) -> None:
        """Write a line of JSON for ``operation``: its position in the program, and hashes of its operands
        and results.
        """
        place = operation.place()
        line = {
            "step": operation.step,
            "index": operation.index,
            "instruction": operation.instruction,
            "operator": operation.operator,
            "node": place.node,
            "call": place.call,
            "path": place.path,
            "source": place.source,
            "in": [hash_tensor(x) for x in operation.inputs if x.device.type != "meta"],
            "out": [hash_tensor(x) for x in operation.outputs if x.device.type != "meta"],
        }
        self.file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Difference:
    """The first operator of a rank whose recorded hashes differ between two runs of the same plan.

    ``step``: number of the training step, from 1. ``index``, ``instruction``: position and printed form of the
    instruction. ``operator``: name of the operator. ``node``, ``path``, ``source``: its graph node, the path of its
    module, and its source line. ``call``: path of the larger module (such as a layer) that ran. ``own``: if true, the
    operands are equal in both runs, so that the operator itself produced the difference. Otherwise the operands already
    differ, because of a collective, a transfer, or a tensor from outside of the step. ``instead``: the operator that
    ran at this position in the first run, if it is another one; otherwise empty.
    """

    rank: int
    step: int
    index: int
    instruction: str
    operator: str
    call: str
    node: str
    path: str
    source: str
    own: bool
    instead: str = ""  # the operator of the first run, if it is another one

    def __str__(self) -> str:
        where = [f"rank {self.rank}", f"step {self.step}", f"instruction {self.index}: {self.instruction}"]
        where += [f"call {self.call}"] * bool(self.call) + [f"node {self.node}"] * bool(self.node)
        where += [f"module {self.path}"] * bool(self.path and self.path != self.call)
        where += [self.source] * bool(self.source)
        how = "gives other bits for the same operands" if self.own else "is given other bits"
        if self.instead:
            how = f"is run instead of {self.instead}"
        return f"{', '.join(where)}: {self.operator} {how}"


def compare_runs(one: str | Path, other: str | Path) -> Difference | None:
    """Return the first difference between two runs of the same plan, whose hashes of operands and results are in the
    folders ``one`` and ``other``; ``None`` if there is none. If several ranks differ in the same step, a rank whose own
    operator produced the difference comes first, then the earliest instruction. Raise :class:`LaunchError` if a folder
    has no hashes, or if the runs are of different plans.
    """
    files = [{p.name: p for p in Path(folder).glob("rank-*.hashes")} for folder in (one, other)]
    for folder, found in zip((one, other), files, strict=True):
        if not found:
            raise LaunchError(
                f"{folder} holds no hashes; write them with partitioner.debug.record_hashes(engine, folder)"
            )
    if files[0].keys() != files[1].keys():
        raise LaunchError(f"{one} has {len(files[0])} ranks, {other} has {len(files[1])}: compare runs of one plan")
    found_ = [
        _find_first_difference(int(n.split("-")[1].split(".")[0]), p, files[1][n]) for n, p in sorted(files[0].items())
    ]
    differences = [d for d in found_ if d is not None]
    return min(differences, key=lambda d: (d.step, not d.own, d.index, d.rank), default=None)


def _find_first_difference(rank: int, one: Path, other: Path) -> Difference | None:
    """Return the first difference between ``one`` and ``other``, two files of hashes of the operators that ``rank``
    ran; ``None`` if they are equal. Raise :class:`LaunchError` if one file ends before the other.
    """
    with one.open() as first, other.open() as second:
        for a, b in zip_longest(first, second):
            if a == b:
                continue
            if a is None or b is None:
                raise LaunchError(
                    f"{one if a is None else other} ends early: compare runs with the same number of steps"
                )
            mine, yours = json.loads(a), json.loads(b)
            return _make_difference(rank, mine, yours)
    return None


def _make_difference(rank: int, first: dict[str, Any], second: dict[str, Any]) -> Difference:
    """Return the difference of ``rank`` between two parsed lines of its files of hashes: ``first`` of the first run,
    ``second`` of the second. Both are dicts with the fields of :class:`Difference` that describe the operator, and the
    hashes of its operands under ``in``.
    """
    names = ("step", "index", "instruction", "operator", "call", "node", "path", "source")
    same = all(first[n] == second[n] for n in ("step", "index", "operator"))
    own = not same or first["in"] == second["in"]
    instead = "" if same else first["operator"]
    return Difference(rank=rank, own=own, instead=instead, **{n: second[n] for n in names})
