"""A rank of :class:`runtime.pool.LocalRanks`: a process that runs one program after another when told to."""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from runtime.bind import Library
from runtime.collect import part_of
from runtime.communicator import TorchCommunicator
from runtime.defaults import default_device, one_step_folder
from runtime.engine import Engine
from runtime.errors import Failure, InstructionError
from runtime.execute import Executor
from runtime.failures import instruction_text, is_secondary
from runtime.messages import get, put
from runtime.program import Program
from runtime.watch.watchdog import Watch


def preload() -> None:
    """Import what is left to the first trace or checkpoint; touch no autograd, whose engine does not survive a fork."""
    importlib.import_module("runtime.checkpoint.storage")
    with FakeTensorMode(), torch.no_grad():
        make_fx(torch.neg)(torch.empty(1))


def main(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    threads: int,
    debug: bool,
    timeout_s: float,
    path: list[str],
) -> None:
    """Join the others, then serve requests until the other side closes the connection.

    ``path``: the owner's ``sys.path``, so that what it names is found.
    """
    sys.path[:] = path
    torch.set_num_threads(threads)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if debug else "OFF"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    send_lock = threading.Lock()

    def answer(kind: str, content: Any) -> None:
        with send_lock:
            put(connection, kind, content)

    requests: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, requests, answer, threading.get_ident()), daemon=True).start()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        answer("ready", None)
    except Exception as error:
        answer("failed", _failure(error, rank).to_data())
    while (request := requests.get()) is not None:
        try:
            function, arguments = pickle.loads(request)  # here: what it imports may fail
            answer("done", function(*arguments))
        except Exception as error:
            answer("failed", _failure(error, rank).to_data())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's tear-down sometimes aborts the process


def _listen(
    connection: Connection,
    requests: queue.Queue[bytes | None],
    answer: Callable[[str, Any], None],
    main_thread: int,
) -> None:
    """Pass requests on; say where the main thread is, when asked, even while it hangs."""
    while True:
        try:
            kind, content = get(connection)
        except (EOFError, OSError):
            os._exit(0)
        if kind == "where":
            answer("where", _where(main_thread))
        elif kind == "leave":
            requests.put(None)
        else:
            requests.put(content)


def _where(thread: int) -> str:
    """The instruction at which the main thread is."""
    frame = sys._current_frames().get(thread)
    deepest = traceback.extract_stack(frame)[-1] if frame is not None else None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Executor) and frame.f_code.co_name == "run":
            index = frame.f_locals.get("index", 0)
            return f"at instruction {index}: {instruction_text(owner.rank, index)}"
        frame = frame.f_back
    return f"outside of its program ({deepest.name}, {deepest.filename}:{deepest.lineno})" if deepest else "gone"


def run_program(
    program: str,
    weights: str,
    inputs: str,
    results: list[str],
    placement: tuple[int, ...],
    seed: int,
    outputs: bool,
    grads: bool,
    watch: str,
) -> None:
    """One step, watched. ``program``, ``weights``, ``inputs`` and ``results`` are files; this rank writes its own."""
    parsed = Program.model_validate_json(Path(program).read_text())
    if dist.get_rank() >= parsed.world_size:
        return
    communicator = TorchCommunicator(parsed.world_size, default_device(), placement=placement)
    batch = torch.load(inputs, weights_only=True)
    engine = Engine(
        parsed,
        weights,
        seed=seed,
        keep_outputs=outputs,
        communicator=communicator,
        library=Library(parsed, communicator.device, shared=Path(program).with_name("derived")),
        offload_folder=one_step_folder(),
    )
    with Watch(engine, watch, leave=False, slow_factor=None):
        engine.step(batch)
    part = part_of(engine, outputs, grads)
    found = {"loss": part.loss, "outputs": part.outputs, "grads": part.grads, "buffers": part.buffers}
    torch.save(found, results[communicator.rank])


def _failure(error: Exception, rank: int) -> Failure:
    if isinstance(error, InstructionError):
        return error.failure
    text = "".join(traceback.format_exception(error))
    return Failure(rank, str(error), type(error).__name__, traceback=text, secondary=is_secondary(error))
