"""The watchdog of a rank: send heartbeats, report the rank's position while it waits, and end a run that has failed or
stalled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore

from partitioner.runtime.comm.failure_origin import find_user_line, is_secondary
from partitioner.runtime.comm.rendezvous import report_to_torchrun
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.comm.wait_clock import waited
from partitioner.runtime.errors import STALLED, Failure, InstructionError, LaunchError
from partitioner.runtime.execute.flight_recorder import Recorder, Recording
from partitioner.runtime.execute.stack_location import locate_rank, walk_stack_frames, walk_traceback_frames
from partitioner.runtime.files import find_foreign_access
from partitioner.runtime.watch.host_mirror import Mirror, list_own_addresses
from partitioner.runtime.watch.root_cause import HOST_SETTLE_S
from partitioner.runtime.watch.status_board import RankState, StatusBoard
from partitioner.runtime.watch.stragglers import Monitor, SlowRank, SlowRanks

if TYPE_CHECKING:
    from partitioner.runtime.engine.engine import Engine

FOLDER = "PARTITION_WATCH"  # environment variable: the folder in which the ranks of a run write their states

_ATTEMPT = "attempt-"
_SETTLE_S = 2.0
_SLOW_LOOK_S = 1.0
_MIRROR_S = 1.0
_LEAVE_S = 3.0  # time for the launcher to end a rank that only lost the connection to another one
_GRACE_S = 30.0  # time between two requests to end, as in torchrun


class Watch:
    """Watches the rank of ``engine`` inside a ``with`` block, which all ranks enter together::

        with partitioner.Watch(engine, patience_s=120):
            for batch in batches:
                engine.step(batch)

    If a rank fails, is killed or stalls, one of the ranks prints one line to the standard error with the rank's
    instruction, graph node, module and source line. Then all ranks exit with status 1, so that a ``torchrun`` with
    restarts left restarts them. If ``torchrun`` itself is killed, its ranks get SIGTERM, as if it had been asked to
    end.

    Args:
        folder: the folder for the status files of all ranks (progress and failures), in memory if possible. By default
            each host has its own folder, and the files are copied between hosts once a second through the store of the
            process group.
        patience_s: if no rank makes progress for this number of seconds, the ranks count as stalled.
        beat_s: seconds between heartbeats.
        slow_factor: a rank whose computation in a step takes more than this factor times that of ranks with the same
            work is reported by the first rank on the standard error and in :attr:`slow`; ``None``: never.
        leave: whether to end the process if a rank has failed; otherwise only write the cause to ``folder``, and let
            the exception propagate.

    Entering the block raises :class:`LaunchError` inside another watch of the same engine, or of the same folder.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | Path | None = None,
        *,
        patience_s: float = 300.0,
        beat_s: float = 0.25,
        slow_factor: float | None = 2.0,
        leave: bool = True,
    ) -> None:
        self.engine = engine
        self.rank = engine.communicator.rank
        self.executor = engine._executor
        self.beat_s = beat_s
        self.leave = leave
        self._own_folder = folder is None and FOLDER not in os.environ
        self.folder = default_folder() if folder is None else Path(folder)
        self.monitor = Monitor(self.folder, patience_s)
        self._several = folder is None and num_mirrored() > 1
        self._mirror = _create_mirror(engine, self.folder) if self._several else None
        if self._mirror is not None:
            self.monitor.refresh = self._mirror.exchange
        self.board: StatusBoard = self.monitor.board
        self.slow: list[SlowRank] = []
        self._slow = SlowRanks(self.board, slow_factor) if slow_factor and self._is_first() else None
        self._launcher = Launcher() if leave and "TORCHELASTIC_RUN_ID" in os.environ else None
        self._end = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._run_watch_loop, name="watch", daemon=True)

    def __enter__(self) -> Self:
        """Start to watch the rank, and return the watch. All ranks call this. Raise :class:`LaunchError` if the engine
        is already watched, or if another watch writes to the same files.
        """
        self._check_single_watch()
        _open.add(self._key)
        try:
            return self._begin_watching()
        except BaseException:
            _open.discard(self._key)
            raise

    def _check_single_watch(self) -> None:
        """Raise :class:`LaunchError` if this engine is already watched, or if another watch writes the status of this
        rank to the same files.
        """
        self._key = self.folder.absolute(), self.rank
        if self.executor.recorder is not None or self._key in _open:
            what = "this engine is" if self.executor.recorder is not None else f"in {self.folder} this rank is"
            raise LaunchError(
                f"{what} watched already, by an outer Watch: leave the inner one out, since the outer one also watches "
                "the steps of other engines on its ranks; or give each engine's Watch its own folder="
            )

    def _begin_watching(self) -> Self:
        """Create the status files of this rank (progress and failures), start the thread that sends heartbeats, and
        return this watch. All ranks call this.
        """
        if self.leave:
            if self._mirror is not None or self._is_first():
                shutil.rmtree(self.folder, ignore_errors=True)  # files of an earlier run
            self.engine.barrier()
        actions = [index for index, _ in self.executor.actions]
        self.recorder = self.executor.recorder = Recorder(self.folder, self.engine.rank_program, actions)
        self.board.post_addresses(self.rank, list_own_addresses())
        self._recording = Recording(self.folder, self.rank)
        self._main = threading.get_ident()
        if self._mirror is not None:
            self._mirror.exchange()  # from now on every second
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching. After an exception, report the failure of this rank and, unless the watch was created with
        ``leave=False``, end the process. ``kind``, ``error``, ``trace``: type, value and traceback of the exception;
        ``None`` without one.
        """
        self._end.set()
        _open.discard(self._key)
        if isinstance(error, Exception):
            failure = self.failed(error)
            if self.leave:
                self._report_and_exit(failure, error)
        else:  # the block has ended, or was left by sys.exit or Ctrl-C
            self.recorder.enter("gone")
            if self._mirror is not None:
                self._mirror.exchange()  # inform the other hosts that this rank has left
                self._mirror.close()
            if self._own_folder and error is None:
                self._thread.join()
                self._remove_own_files()
        self.executor.recorder = None

    def _remove_own_files(self) -> None:
        """Remove the status files of this rank (progress and failures) from the default folder; the last rank removes
        the folder.
        """
        for path in self.folder.glob(f"rank-{self.rank}.*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def failed(self, error: Exception) -> Failure:
        """Write the failure of this rank to the folder of status files, and return its description. ``error``: the
        exception with which the rank has failed.
        """
        origin = error.__cause__ if isinstance(error, InstructionError) and error.__cause__ else error
        place = locate_rank(walk_traceback_frames(origin.__traceback__), self.executor)
        moment = self._recording.moment()
        if isinstance(error, InstructionError):
            failure = error.failure
        else:
            failure = Failure(
                rank=self.rank,
                error=str(error),
                kind=type(error).__name__,
                instruction=moment.phase,
                step=moment.step + 1,
                source=find_user_line(error),
                traceback="".join(traceback.format_exception(error)),
                secondary=is_secondary(error),
            )
        with contextlib.suppress(OSError):  # the failure may be a full disk
            self.board.post_failure(self.rank, failure, place.waits)
        return failure

    def _run_watch_loop(self) -> None:
        """Send heartbeats, write the rank's position while it does not make progress, and look for stalls. This runs in
        a thread.
        """
        looked = 0.0
        slow_looked = 0.0
        seen = (0, "")
        pause = max(self.beat_s, self.monitor.patience_s / 10)
        while not self._end.wait(self.beat_s):
            self.recorder.record_heartbeat()
            if self._launcher is not None:
                self._launcher.end_with_it()
            if self._slow is not None and time.monotonic() - slow_looked > _SLOW_LOOK_S:
                slow_looked = time.monotonic()
                self._report_slow(self._slow)
            moment = self._recording.moment()
            idle_s = (time.monotonic_ns() - moment.moved) * 1e-9
            if idle_s < self.beat_s:
                continue
            frame = sys._current_frames().get(self._main)
            place = locate_rank(walk_stack_frames(frame), self.executor)
            seen, last = (waited.ns, place.line), seen
            # a checkpoint or a compilation is in progress: its stack changes, which counts as progress
            if seen != last and (moment.phase != "step" or not place.waits):
                self.recorder.record_progress()
            if self._recording.moment().action == moment.action:  # otherwise the rank has made progress meanwhile
                with contextlib.suppress(OSError):
                    self.board.post_place(self.rank, moment, place)
            if self.leave and time.monotonic() - looked > pause:
                looked = time.monotonic()
                self._check_for_cause()

    def _send_cause(self) -> None:
        """Send the status files, which have the cause of the failure, to other hosts before this process ends, so that
        ranks there do not take their lost connections for the cause.
        """
        if self._mirror is not None:
            self._mirror.exchange()
        elif self._several:
            time.sleep(1.5 * _MIRROR_S)  # the rank with the mirror of this host sends it meanwhile

    def _is_first(self) -> bool:
        return self.rank == self.engine.communicator.home

    def _report_slow(self, ranks: SlowRanks) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank is just starting
            for found in ranks.look():
                self.slow.append(found)
                print(found, file=sys.stderr, flush=True)

    def _check_for_cause(self) -> None:
        """Check whether a rank has failed or the ranks have stalled. If so, report the cause and end this process,
        unless the found failure is only a consequence of another one.
        """
        cause = self.monitor.check()
        if cause is None or self._end.is_set():
            return
        if not cause.secondary:
            self._report_and_exit(cause, None)

    def _report_and_exit(self, failure: Failure, error: BaseException | None) -> None:
        """Print the first cause why training has failed, unless another rank has printed it, and exit the process with
        status 1. ``failure``: the failure that this rank knows; if it is a consequence of another one, wait some
        seconds for the cause. ``error``: the exception that this rank has raised, or ``None``.
        """
        with self._leaving:
            settle_s = HOST_SETTLE_S + _MIRROR_S if self._several else _SETTLE_S
            cause = failure if not failure.secondary else self.monitor.wait_for_cause(settle_s) or failure
            if self.board.tell(cause):
                if error is not None and cause is failure:
                    traceback.print_exception(error)
                print(f"first cause: {cause}", file=sys.stderr, flush=True)
            self._send_cause()
            report_to_torchrun(InstructionError(cause))
            for state in self.monitor.states():
                if cause.kind == STALLED and state.rank == cause.rank != self.rank:
                    _kill_stalled(state, self._recording.about.host, self.board)
            sys.stdout.flush()
            if failure.secondary:
                time.sleep(_LEAVE_S)
            os._exit(1)


class Launcher:
    """Watches the torchrun that started this process, and ends this process when torchrun has ended. If torchrun is
    killed, for example for lack of memory, it cannot end its ranks, which would continue to train at the same time as
    the ranks of the next start.
    """

    def __init__(self) -> None:
        self.pid = os.getppid()
        self._asked_at: float | None = None

    def end_with_it(self) -> None:
        """Send SIGTERM to this process if torchrun has ended, as torchrun does if it is asked to end. Send it again
        after 30 seconds, because a process that handles the first signal, to save its last step, does not handle the
        second.
        """
        now = time.monotonic()
        if os.getppid() == self.pid or (self._asked_at is not None and now - self._asked_at < _GRACE_S):
            return
        if self._asked_at is None and os.environ.get("LOCAL_RANK") == "0":
            print(f"torchrun (process {self.pid}) was killed: its ranks end, too", file=sys.stderr, flush=True)
        self._asked_at = now
        os.kill(os.getpid(), signal.SIGTERM)


def _kill_stalled(state: RankState, host: str, board: StatusBoard) -> None:
    """Kill the process of a stalled rank if it runs on this host, because a stopped process does not react when its
    launcher ends it, and the launcher would wait half a minute for it. ``state``: the last report of the rank.
    ``host``: name of the host of the calling rank. ``board``: reads the status files, which have the process ID.
    """
    headers = board.recordings()[state.rank].about
    if headers.host == host == socket.gethostname() and state.alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(headers.pid, signal.SIGKILL)


def default_folder() -> Path:
    """Return the folder for the status files (progress and failures) of the ranks that torchrun has started; each
    restart by torchrun has its own folder. It is inside the folder that the environment variable ``PARTITION_WATCH``
    names or, if this is not set, inside a temporary folder on each host, which is created. Raise :class:`LaunchError`
    if other users can write to the temporary folder.
    """
    env = os.environ
    attempt = f"{_ATTEMPT}{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if FOLDER in env:
        return Path(env[FOLDER], attempt)
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    run = f"{env.get('TORCHELASTIC_RUN_ID', 'run')}-{env.get('MASTER_PORT', os.getpid())}-{env.get('GROUP_RANK', '0')}"
    folder = base / f"partition-watch-{os.getuid()}-{run.replace('/', '-')}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if foreign := find_foreign_access(folder):
        raise LaunchError(
            f"{folder} cannot be used for the status files of ranks: {foreign}; remove it, or name another folder "
            f"by {FOLDER}"
        )
    return folder / attempt


def newest_attempt(folder: Path) -> Path:
    """Return the subfolder of ``folder`` with the status files (progress and failures) that ranks have written since
    torchrun's last restart; ``folder`` itself if ranks wrote into it directly, or if it has no such subfolders.
    """
    attempts = [path for path in folder.glob(f"{_ATTEMPT}*") if path.name.removeprefix(_ATTEMPT).isdecimal()]
    if any(folder.glob("rank-*")) or not attempts:
        return folder
    return max(attempts, key=lambda path: int(path.name.removeprefix(_ATTEMPT)))


def num_mirrored() -> int:
    """Return the number of hosts between which status files are copied: all hosts of torchrun; 1 if the environment
    variable ``PARTITION_WATCH`` names a folder that all hosts share.
    """
    return 1 if FOLDER in os.environ else int(os.environ.get("GROUP_WORLD_SIZE", "1"))


_open: set[tuple[Path, int]] = set()  # (folder, rank) of every open watch of this process

_watches = itertools.count()  # equal on all ranks, because they enter each watch together


def _create_mirror(engine: Engine, folder: Path) -> Mirror | None:
    """Return the object that exchanges status files (progress and failures) of ranks between hosts: it sends the files
    of this host's ranks in ``folder`` to other hosts, and writes the files of other hosts' ranks to ``folder``. Return
    ``None`` unless this rank has ``LOCAL_RANK`` 0. ``engine``: the engine of this rank, which knows the ranks on this
    host.
    """
    env, number = os.environ, next(_watches)
    if env.get("LOCAL_RANK") != "0":
        return None
    communicator = engine.communicator
    assert isinstance(communicator, TorchCommunicator)
    first = int(env["RANK"])
    ranks = communicator.list_ranks_on(range(first, first + int(env["LOCAL_WORLD_SIZE"])))
    everyones: Any = c10d._get_default_store()
    store = PrefixStore(f"watch {number}", everyones.clone())
    return Mirror(folder, store, int(env["GROUP_RANK"]), num_mirrored(), frozenset(ranks))
