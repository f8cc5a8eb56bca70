"""Puts one fault into a rank, from outside: around the functions of its step, which are a plain list.

The executor's loop knows nothing of it. A fault strikes at one instruction of one step; some of them at one node of the
graph that the instruction runs, where the node's function is exchanged for one that checks whether its time has come.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partitioner import Engine
from partitioner.passes.ir.collectives import collective_name
from partitioner.runtime.execute.calls import BoundCall
from partitioner.runtime.execute.codegen import CompiledGraph

AT_AN_INSTRUCTION = ("kill", "stop", "close", "slow")
AT_A_NODE = ("raise_forward", "raise_backward", "raise_collective", "nan")
AT_A_SAVE = ("disk",)
KINDS = (*AT_AN_INSTRUCTION, *AT_A_NODE, *AT_A_SAVE)
SLOW_S = 0.2


class Injected(Exception):
    """What an injected fault raises."""


@dataclass(frozen=True)
class Fault:
    """``step`` counts from 0. ``draw``: a number in [0, 1) that chooses among instructions, or nodes."""

    kind: str
    rank: int
    step: int
    draw: float


@dataclass(frozen=True)
class Struck:
    """Where the fault will strike, as the program calls it: what has to be named."""

    rank: int
    index: int | None
    node: str = ""


def inject(engine: Engine, fault: Fault) -> Struck:
    """Arm ``fault`` in this rank."""
    if fault.kind in AT_A_SAVE:
        return Struck(fault.rank, None)
    if fault.kind in AT_A_NODE:
        return _at_node(engine, fault)
    actions = engine._executor.actions
    computing = [k for k, (i, _) in enumerate(actions) if i < len(engine.rank_program.instructions)]
    place = computing[int(fault.draw * len(computing))]
    index, action = actions[place]
    strike = _STRIKES[fault.kind]

    def struck() -> None:
        if engine.steps == fault.step or (fault.kind == "slow" and engine.steps > fault.step):
            strike()
        action()

    actions[place] = index, struck
    return Struck(fault.rank, index)


def disk_full(bytes_left: int) -> None:
    """From now on no file of this process may grow beyond ``bytes_left``: writing fails with EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, resource.RLIM_INFINITY))


def _close() -> None:
    """Cut this rank's TCP connections to the others, as a broken cable does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            other = socket.socket(fileno=os.dup(number))
            with other:
                if other.family in (socket.AF_INET, socket.AF_INET6) and other.type == socket.SOCK_STREAM:
                    other.getpeername()
                    other.shutdown(socket.SHUT_RDWR)


_STRIKES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close": _close,
    "slow": lambda: time.sleep(SLOW_S),
}


def _at_node(engine: Engine, fault: Fault) -> Struck:
    """Exchange the function of one node, armed while one instruction runs."""
    executor = engine._executor
    computing = {index: place for place, (index, _) in enumerate(executor.actions)}  # behind what it waits for
    spots = [
        (place, index, compiled, line)
        for index, place in computing.items()
        for compiled in _pieces(engine, index, fault.kind)
        for line in _lines(compiled, fault.kind)
    ]
    if not spots:
        raise LookupError(f"rank {fault.rank} has no place for {fault.kind}")
    place, index, compiled, line = spots[int(fault.draw * len(spots))]
    node = compiled.nodes[line]
    name = _function_name(compiled, line)
    assert name is not None
    scope: dict[str, Any] = compiled.function.__globals__
    function, (_, action) = scope[name], executor.actions[place]
    armed = [False]

    def at_node(*operands: Any, **named: Any) -> Any:
        strikes = armed[0] and engine.steps == fault.step
        if strikes and fault.kind != "nan":
            raise Injected(f"injected into {node.name}")
        result = function(*operands, **named)
        if strikes:
            armed[0] = False
            assert isinstance(result, Tensor)
            result = torch.full_like(result, torch.nan)
        return result

    def at_instruction() -> None:
        armed[0] = True
        try:
            action()
        finally:
            armed[0] = False

    scope[name] = at_node
    executor.actions[place] = index, at_instruction
    return Struck(fault.rank, index, node.name)


# What an instruction runs of a call; a backward may be in two halves, for inputs and for weights.
_RUN: dict[str, Callable[[BoundCall], Any]] = {
    "F": lambda call: call.run_forward,
    "B": lambda call: call.run_backward,
    "I": lambda call: call.run_input,
    "W": lambda call: call.run_weight,
}
_WANTED = {"raise_forward": "F", "raise_backward": "BIW", "raise_collective": "FBIW", "nan": "FBIW"}


def _pieces(engine: Engine, index: int, kind: str) -> list[CompiledGraph]:
    """What the instruction runs, of the direction that the fault is for."""
    executor = engine._executor
    if index >= len(engine.rank_program.instructions):
        return []
    instruction = engine.rank_program.instructions[index]
    if instruction.op not in _WANTED[kind] or instruction.calls is None:
        return []
    by_function = {c.function: c for c in executor.binder.compiled}
    calls: list[BoundCall] = [c for c in executor._select_calls(instruction) if c.has_backward or instruction.op == "F"]
    functions = [_RUN[instruction.op](call) for call in calls]
    return list({id(f): by_function[f] for f in functions}.values())


def _lines(compiled: CompiledGraph, kind: str) -> list[int]:
    """The lines whose function a fault of ``kind`` may exchange."""
    found = []
    for line, node in compiled.nodes.items():
        if _function_name(compiled, line) is None:
            continue
        is_collective = collective_name(node.target) is not None
        if is_collective != (kind == "raise_collective"):
            continue
        # a comparison knows no NaN: what only such operators read would be changed, and no NaN come of it
        spreads = any(_is_floating(user) or user.op == "output" for user in node.users)
        if kind != "nan" or (_is_floating(node) and spreads):
            found.append(line)
    return found


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.dim() > 0


def _function_name(compiled: CompiledGraph, line: int) -> str | None:
    """What the generated line calls: ``mm_4`` of ``v3 = mm_4(v1, v2)``."""
    text = compiled.code.split("\n")[line - 1]
    match = re.fullmatch(r"    v\d+ = ([A-Za-z_]\w*)\(.*\)", text)
    return match[1] if match and match[1] in compiled.function.__globals__ else None


def wipe(folder: Path) -> None:
    """What lies in a folder of the watch, before the next attempt writes there."""
    for path in folder.glob("*"):
        path.unlink()
