"""A pool of local processes that run programs as ranks, and the combination of their results.

:class:`LocalRanks` keeps the processes alive from one run to the next; each runs one program after another on request.
After a step, :func:`join_rank_results` combines the results of the ranks into the results of the whole model: outputs,
loss and gradients.

A message between processes is ``(kind, content)``, pickled to plain bytes. ``Connection.send`` would pass tensors as
shared memory, which disappears with the process that sent them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from partitioner.passes.ir.layouts import Layout, join_shards
from partitioner.runtime.comm.failure_origin import is_secondary
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.engine.defaults import choose_default_device, make_one_step_folder
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.engine.outputs import join_outputs, select_outputs
from partitioner.runtime.errors import (
    DIED,
    LEFT,
    LOST,
    Failure,
    InstructionError,
    LaunchError,
    RankError,
    RankTimeout,
    find_first_cause,
)
from partitioner.runtime.execute.bind import BlockLibrary
from partitioner.runtime.execute.executor import Executor
from partitioner.runtime.execute.failures import format_instruction_at
from partitioner.runtime.launch.forkserver import Child, ForkServer, fork_server
from partitioner.runtime.program.program import Program, list_updated_states, shard_shape
from partitioner.runtime.state.parameters import join_pieces, list_model_names, map_model_names
from partitioner.runtime.watch.stragglers import Monitor
from partitioner.runtime.watch.watchdog import Watch


@dataclass(frozen=True)
class RankResults:
    """The results of a step that one rank contributes. If several ranks have the same result, only one of them
    contributes it.

    Args:
        loss: the loss of the global batch; ``None`` if the program has none.
        outputs: name of an output tensor in the program -> microbatch -> this rank's shard.
        grads: parameter name -> gradient of this rank's shard.
        buffers: name of a buffer that the step has changed -> this rank's shard.
    """

    rank: int
    loss: Tensor | None
    outputs: dict[str, dict[int, Tensor]]  # value -> microbatch -> tensor
    grads: dict[str, Tensor]  # state -> this rank's shard
    buffers: dict[str, Tensor] = field(default_factory=dict)  # changed buffer -> this rank's shard


@dataclass(frozen=True)
class Run:
    """The results of one step of a plan's program on all ranks.

    Attributes:
        outputs: the model's result in its own structure; a dict by path if the structure cannot be rebuilt.
        loss: the loss of the global batch; ``None`` if the program has none.
        grads: parameter -> whole gradient, for parameters that have one, under each of their names.
        leaves: path -> leaf of the model's result.
        buffers: whole buffers that the step changed, under each of their names.
    """

    outputs: Any
    loss: Tensor | None
    grads: dict[str, Tensor] = field(repr=False)
    leaves: dict[str, Any] = field(repr=False)  # the outputs by path
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)


def collect_rank_results(engine: Engine, outputs: bool = True, grads: bool = True) -> RankResults:
    """Return the results of the last step that the rank of ``engine`` contributes. If several ranks have the same
    result, only one of them contributes it. ``outputs`` and ``grads``: whether to include the model's results and the
    gradients.
    """
    rank = engine.rank_program
    program = rank.program
    made = select_outputs(rank, engine.outputs) if outputs else {}
    mine = {
        name
        for name, state in program.states.items()
        if rank.stage_index == min(state.stages, default=None) and rank.is_first_holder(name)
    }
    shards = {
        name: parameter.grad
        for name, parameter in engine.named_parameters()
        if grads and parameter.grad is not None and name in mine
    }
    held = engine.state_dict()
    buffers = {name: held[name].clone() for name in list_updated_states(program) if name in mine}
    return RankResults(rank.rank, engine.loss, made, shards, buffers)


def join_rank_results(program: Program, parts: Sequence[RankResults], extra: Mapping[str, Tensor] | None = None) -> Run:
    """Return the results of the whole model, joined from the results ``parts`` of all ranks of ``program``. ``extra``:
    name -> gradient, for parameters for which the program does not compute a gradient.
    """
    by_rank = {p.rank: p for p in parts}
    leaves = join_outputs(program, {rank: part.outputs for rank, part in by_rank.items()})
    grads: dict[str, Tensor] = dict(extra or {})
    buffers: dict[str, Tensor] = {}
    for name, state in program.states.items():
        for whole, kind in ((grads, "grads"), (buffers, "buffers")):
            found = {r: getattr(p, kind)[name] for r, p in sorted(by_rank.items()) if name in getattr(p, kind)}
            if found:
                whole.update(map_model_names(name, state, _join_state(program, name, found)))
    return Run(_rebuild_tree(program, leaves), parts[0].loss, grads, leaves, buffers)


def _join_state(program: Program, state: str, shards: Mapping[int, Tensor]) -> Tensor:
    """Return the whole tensor of the parameter or buffer ``state`` of ``program``, or its gradient, joined from the
    parts of the ranks. ``shards``: rank -> its part, in ascending order of ranks, without replicas. The whole tensor is
    sharded over ``ep``, each shard over ``tp``, and each of these shards is flattened and divided over the ranks of
    ZeRO.
    """
    data = program.states[state]
    shared: dict[tuple[int, ...], list[Tensor]] = {}  # ranks that divide a shard -> their pieces, in order of rank
    for rank, tensor in shards.items():
        shared.setdefault(program.group(rank, data.zero_axes), []).append(tensor)
    shape = shard_shape(program, state)
    parts = [join_pieces(p, shape) if data.zero_axes else p[0] for p in shared.values()]
    by_expert, by_tensor = Layout.parse(data.expert_layout), Layout.parse(data.layout)
    count = program.size("ep") if by_expert.is_shard else 1
    each = len(parts) // count
    of_experts = [parts[i * each : (i + 1) * each] for i in range(count)]
    return join_shards([join_shards([*h], by_tensor) if each > 1 else h[0] for h in of_experts], by_expert)


def _rebuild_tree(program: Program, leaves: dict[str, Any]) -> Any:
    """Return the model's result in its own structure of tuples, lists and dicts; ``leaves`` if the structure cannot be
    rebuilt. ``program``: the plan's program, which has the structure. ``leaves``: path in the structure -> value.
    """
    if program.tree is not None:
        # If this process does not know a class in the structure, the result stays a dict by path.
        with contextlib.suppress(Exception):
            return pytree.tree_unflatten(list(leaves.values()), pytree.treespec_loads(program.tree))
    return leaves


def make_unread_gradients(program: Program, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zero gradients, by name, for the parameters that require a gradient but are not used by ``program``.
    ``parameters``: name in the model -> tensor.
    """
    known = {n for name, s in program.states.items() if s.requires_grad for n in list_model_names(name, s)}
    unread = {n: p for n, p in parameters.items() if n not in known and p.requires_grad}
    return {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in unread.items()}


def send_message(connection: Connection, kind: str, content: Any = None) -> None:
    connection.send_bytes(pickle.dumps((kind, content)))


def receive_message(connection: Connection) -> tuple[str, Any]:
    """Return the next message from the process at the other end of ``connection``, as a pair: its kind (a text such as
    "done") and its content (any object). Raise ``EOFError`` or ``OSError`` if that process has ended.
    """
    kind, content = pickle.loads(connection.recv_bytes())
    return kind, content


_START_S = 120.0  # time for all ranks to connect to each other

_GRACE_S = 0.3  # time after the first failure in which other ranks may report an earlier one
_LATE_S = 5.0  # maximum time after a timeout in which ranks may report their positions
_SETTLE_S = 2.0  # time to find the cause if ranks report only lost connections
_POLL_S = 0.25  # time between two checks of a watched run


class LocalRanks:
    """A pool of ``num_ranks`` local processes that communicate over Gloo, for programs of up to that many ranks. It is
    a context manager. The processes start on first use, and again after a failure. ``debug``: whether to verify before
    every collective that all ranks call it with equal shapes (slow; names both sides of a mismatch).

        >>> with LocalRanks(2) as ranks:
        ...     pass  # run_local(plan, model, inputs, ranks=ranks)
    """

    def __init__(self, num_ranks: int, *, debug: bool = False) -> None:
        self.num_ranks = num_ranks
        self.debug = debug
        self._children: list[Child] = []
        self._server: ForkServer | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, watch: Monitor | None = None
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank, inside the process group, and return the results in the order of
        ranks. The function must be importable by name, and its arguments and results must be picklable. ``watch``:
        reads the status files that the ranks write; if the ranks stall, they are ended as if one had failed, and the
        error names the cause.

        Raise :class:`RankError` with the first cause if a rank fails, and :class:`RankTimeout` after ``timeout``
        seconds; all ranks are ended in both cases. Raise :class:`LaunchError` for a function that is defined in the
        main script.
        """
        if getattr(function, "__module__", None) == "__main__":
            raise LaunchError(
                f"{getattr(function, '__name__', function)} is defined in the main script, which ranks do not import; "
                "expected a function of a module: move it into its own file"
            )
        request = pickle.dumps((function, arguments))
        if not self._children:
            self._start_ranks(timeout)
        deadline = time.monotonic() + timeout
        try:
            for child in self._children:
                with contextlib.suppress(OSError):  # the process has ended, which is detected below
                    send_message(child.connection, "call", request)
            return self._collect_answers("done", deadline, timeout, watch)
        except BaseException:
            self.kill()
            raise

    def _start_ranks(self, timeout: float) -> None:
        """Fork the processes of all ranks and wait until they have formed a process group. ``timeout``: seconds that
        the ranks wait for each other.
        """
        self._server = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        arguments = {
            "world_size": self.num_ranks,
            "store": str(Path(self._folder.name, "store")),
            "threads": threads,
            "debug": self.debug,
            "timeout_s": max(timeout, _START_S),
            "path": sys.path,
        }
        try:
            for rank in range(self.num_ranks):
                self._children.append(self._server.fork({"rank": rank, **arguments}))
            self._collect_answers("ready", time.monotonic() + _START_S, _START_S)
        except BaseException:
            self.kill()
            raise

    def _collect_answers(self, kind: str, deadline: float, timeout: float, watch: Monitor | None = None) -> list[Any]:
        """Wait until every rank has answered, and return the contents of the answers in the order of ranks. Raise
        :class:`RankError` if a rank fails, and :class:`RankTimeout` after the deadline.

        ``kind``: the expected answer, "ready" or "done", for the message of a timeout. ``deadline``: time of
        ``time.monotonic()``. ``timeout``: the allowed seconds from the start of the request to ``deadline``, for the
        message. ``watch``: reads the ranks' status files; ``None``: there are none.
        """
        waiting = set(range(self.num_ranks))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        while waiting:
            left = deadline - time.monotonic()
            pause = min(left, _GRACE_S if failures else left if watch is None else _POLL_S)
            answers = self._receive_answers(waiting, pause)
            for rank, (answer, content) in answers.items():
                waiting.discard(rank)
                results[rank] = content
                if answer == "failed":
                    failures.append(Failure.from_data(content))
            if answers:
                continue
            if failures:
                break
            if watch is not None and (cause := watch.check()) is not None:
                failures.append(cause)
                break
            if left <= pause:
                raise RankTimeout(self._describe_late_ranks(waiting, kind, timeout))
        if failures:
            raise RankError(self._explain_failures(failures, watch), self.num_ranks)
        return [results[rank] for rank in range(self.num_ranks)]

    def _explain_failures(self, failures: list[Failure], watch: Monitor | None) -> tuple[Failure, ...]:
        """Return the failures of ranks, ``failures``, with the cause first, completed from the status files, such as
        with the position of a killed rank. ``watch``: reads the status files; ``None``: there are none.
        """
        first = find_first_cause(tuple(failures))
        if watch is None:
            return tuple(failures)
        cause = watch.wait_for_cause(_SETTLE_S, died=None if first.secondary else first.rank)
        if cause is None or (cause.kind in (LEFT, LOST) and not first.secondary):
            return tuple(failures)  # it ended before it could be watched
        if cause.kind == DIED and first.kind == DIED:
            cause = replace(cause, error=first.error)  # with the signal
        return (cause, *(f for f in failures if f.rank != cause.rank))

    def _receive_answers(self, ranks: set[int], timeout: float) -> dict[int, tuple[str, Any]]:
        """Return the messages that arrive from ``ranks`` within ``timeout`` seconds, as a dict: rank -> (kind,
        content). A rank whose process has ended counts as failed.
        """
        connections = {id(self._children[r].connection): r for r in ranks}
        found: dict[int, tuple[str, Any]] = {}
        for ready in wait([self._children[r].connection for r in ranks], max(timeout, 0.0)):
            rank = connections[id(ready)]
            try:
                found[rank] = receive_message(self._children[rank].connection)
            except (EOFError, OSError):
                found[rank] = "failed", self._describe_death(rank).to_data()
        return found

    def _describe_death(self, rank: int) -> Failure:
        """Return the failure of ``rank``, whose process has ended, with its exit status or signal."""
        assert self._server is not None
        for _ in range(20):
            status = self._server.status(self._children[rank].pid)
            if status is not None:
                break
            time.sleep(0.01)
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        return Failure(rank, f"the process ended {how} and said nothing", DIED)

    def _describe_late_ranks(self, ranks: set[int], kind: str, timeout: float) -> str:
        """Return the text of a timeout error, with the current activity of each of the ranks ``ranks``, which have not
        answered. ``kind``: the expected answer: "ready" or "done". ``timeout``: seconds, for the text.
        """
        for rank in ranks:
            with contextlib.suppress(OSError):
                send_message(self._children[rank].connection, "where")
        places: dict[int, str] = {}
        deadline = time.monotonic() + _LATE_S
        while len(places) < len(ranks) and time.monotonic() < deadline:
            for rank, (answer, content) in self._receive_answers(
                ranks - set(places), deadline - time.monotonic()
            ).items():
                places[rank] = str(content) if answer == "where" else answer
        told = "\n  ".join(f"rank {r}: {places.get(r, 'does not answer')}" for r in sorted(ranks))
        task = "start" if kind == "ready" else "finish"
        return f"{len(ranks)} of {self.num_ranks} ranks did not {task} within {timeout:g} s and were ended:\n  {told}"

    def kill(self) -> None:
        """Kill all processes of the pool immediately. The next call of a function on the ranks starts new ones."""
        children, self._children = self._children, []
        for child in children:
            child.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        """Ask the processes of the pool to exit, and kill those that do not exit within 5 seconds."""
        for child in self._children:
            with contextlib.suppress(OSError):
                send_message(child.connection, "leave")
        for child in self._children:
            child.connection.poll(5.0)
        self.kill()


def preload_imports() -> None:
    """Import modules that the first trace or checkpoint would import, so that processes that are forked later have
    them. Autograd must not be used here, because its engine does not survive a fork.
    """
    importlib.import_module("partitioner.runtime.checkpoint.dcp_files")
    with FakeTensorMode(), torch.no_grad():
        make_fx(torch.neg)(torch.empty(1))


def serve_rank_requests(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    threads: int,
    debug: bool,
    timeout_s: float,
    path: list[str],
) -> None:
    """Run the main loop of a rank's process: join the process group, then run requests until the connection closes.

    Args:
        connection: connection to the process that started the ranks.
        rank: number of this rank.
        world_size: number of ranks.
        store: path of the file through which the ranks find each other.
        threads: number of torch's threads.
        debug: whether to verify collectives before they run.
        timeout_s: seconds that ranks wait for each other.
        path: ``sys.path`` of the process that started the ranks.
    """
    sys.path[:] = path
    torch.set_num_threads(threads)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if debug else "OFF"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    send_lock = threading.Lock()

    def answer(kind: str, content: Any) -> None:
        with send_lock:
            send_message(connection, kind, content)

    requests: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(
        target=_forward_requests, args=(connection, requests, answer, threading.get_ident()), daemon=True
    ).start()
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
        answer("failed", _error_to_failure(error, rank).to_data())
    while (request := requests.get()) is not None:
        try:
            function, arguments = pickle.loads(request)  # inside the try block, because importing the function may fail
            answer("done", function(*arguments))
        except Exception as error:
            answer("failed", _error_to_failure(error, rank).to_data())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # shutting down Gloo sometimes aborts the process


def _forward_requests(
    connection: Connection,
    requests: queue.Queue[bytes | None],
    answer: Callable[[str, Any], None],
    main_thread: int,
) -> None:
    """Forward requests from ``connection`` to ``requests``, the queue of the main thread, until the connection closes.
    This runs in a thread. The request "where" is answered here with the position of the main thread, even if that
    thread hangs. ``answer``: sends a message (kind, content) back. ``main_thread``: identifier of the main thread.
    """
    while True:
        try:
            kind, content = receive_message(connection)
        except (EOFError, OSError):
            os._exit(0)
        if kind == "where":
            answer("where", _locate_thread(main_thread))
        elif kind == "leave":
            requests.put(None)
        else:
            requests.put(content)


def _locate_thread(thread: int) -> str:
    """Return a text with the position of a thread of this process: the instruction of its program or, outside of a
    program, the Python line. ``thread``: identifier of the thread.
    """
    frame = sys._current_frames().get(thread)
    deepest = traceback.extract_stack(frame)[-1] if frame is not None else None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Executor) and frame.f_code.co_name == "run":
            index = frame.f_locals.get("index", 0)
            return f"at instruction {index}: {format_instruction_at(owner.rank, index)}"
        frame = frame.f_back
    return f"outside of its program ({deepest.name}, {deepest.filename}:{deepest.lineno})" if deepest else "gone"


class StepFiles(NamedTuple):
    """The paths of the files for one step that local processes run. ``program``, ``weights`` and ``inputs`` are read;
    each rank writes one of ``results``. ``watch``: folder of the ranks' status files.
    """

    program: str
    weights: str
    inputs: str
    results: list[str]
    watch: str


def run_program(files: StepFiles, placement: tuple[int, ...], seed: int, outputs: bool, grads: bool) -> None:
    """Run one step on this rank, and write its results to a file. Do nothing on processes beyond the program's ranks.
    ``files``: the files to read and write. ``placement``: device number of each rank; empty: rank i runs on device i.
    ``outputs``, ``grads``: whether to store the model's results, and the gradients. ``seed``: seed of the model's
    random operators.
    """
    parsed = Program.model_validate_json(Path(files.program).read_text())
    if dist.get_rank() >= parsed.world_size:
        return
    communicator = TorchCommunicator(parsed.world_size, choose_default_device(), placement=placement)
    batch = torch.load(files.inputs, weights_only=True)
    engine = Engine(
        parsed,
        files.weights,
        seed=seed,
        keep_outputs=outputs,
        communicator=communicator,
        library=BlockLibrary(parsed, communicator.device, shared=Path(files.program).with_name("derived")),
        offload_folder=make_one_step_folder(),
    )
    with Watch(engine, files.watch, leave=False, slow_factor=None):
        engine.step(batch)
    part = collect_rank_results(engine, outputs, grads)
    found = {"loss": part.loss, "outputs": part.outputs, "grads": part.grads, "buffers": part.buffers}
    torch.save(found, files.results[communicator.rank])


def _error_to_failure(error: Exception, rank: int) -> Failure:
    if isinstance(error, InstructionError):
        return error.failure
    text = "".join(traceback.format_exception(error))
    return Failure(rank, str(error), type(error).__name__, traceback=text, secondary=is_secondary(error))
