"""Status files of a run's ranks, in a folder that all ranks and their observers can read.

The flight recorder (:mod:`partitioner.runtime.execute.flight_recorder`) writes ``rank-3.times`` and ``rank-3.json``.
While a rank does not make progress, it writes its position to ``rank-3.place``. ``rank-3.failure`` has the reason of
its failure, and ``rank-3.addresses`` the local addresses of its connections.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import Failure
from partitioner.runtime.execute.flight_recorder import InstructionSpot, RecordedMoment, RecorderHeader, Recording
from partitioner.runtime.execute.stack_location import RankLocation
from partitioner.runtime.files import parse_json, write_text
from partitioner.runtime.watch.host_mirror import find_named_ranks


@dataclass(frozen=True)
class RankState:
    """The known state of a rank at one time, from the status files that it writes.

    Args:
        stage: index of the rank's pipeline stage.
        moment: the phase, the step and the current action (a function of the compiled step) that the rank reported.
        spot: description of its current instruction: its text, the modules that it runs and their source line; ``None``
            if it does not run one.
        index: index of its current instruction; ``None`` if it does not run one.
        idle_s: seconds since its last progress.
        silent_s: seconds since its last heartbeat.
        on_this_host: whether it runs on this host.
        alive: whether its process runs; true if it is on another host.
        stopped: whether a signal has stopped its process.
        place: the position in the model that it has reported; ``None`` if it has not reported one, or has moved on
            since.
        failure: the failure that it has reported; ``None`` if there is none.
        failed_at: the time of this failure, in seconds of the time of day.
        lost: the ranks to which it lost the connection when it failed.
        stage_index: index of its current instruction in the list of its pipeline stage, if ranks of the stage skip
            parts of this list; otherwise ``None``.
    """

    rank: int
    stage: int
    moment: RecordedMoment
    spot: InstructionSpot | None
    index: int | None  # index of the instruction
    idle_s: float
    silent_s: float
    on_this_host: bool = True
    alive: bool = True
    stopped: bool = False
    place: RankLocation | None = None
    failure: Failure | None = None
    failed_at: float = 0.0
    lost: tuple[int, ...] = ()  # ranks to which it lost the connection when it failed
    stage_index: int | None = None  # index in the stage's list, if ranks skip instructions

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return the progress of a rank: step, whether the step has ended (0 or 1), and position in the step. The
        result is comparable between ranks of a pipeline stage.
        """
        inside = self.moment.phase == "step"
        return self.moment.step, int(not inside), self.moment.action if self.stage_index is None else self.stage_index

    @property
    def doing(self) -> str:
        """Return the activity of the rank at the time of this report, as text, such as ``step 3,
        instruction 7: 1F0``.
        """
        if self.moment.phase != "step":
            return f"{self.moment.phase} (after step {self.moment.step + 1})"
        return f"step {self.moment.step + 1}, {format_instruction_words(self.index, self.spot)}"


def format_instruction_words(index: int | None, spot: InstructionSpot | None) -> str:
    return f"instruction {index}: {spot.text}" if spot is not None else "end of the step"


class StatusBoard:
    """Reads and writes the status files of ranks (progress and failures) in ``folder``. Each rank writes its own files;
    any process may read all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recordings: dict[int, Recording] = {}

    def post_place(self, rank: int, moment: RecordedMoment, place: RankLocation) -> None:
        self._post_file(rank, "place", {"step": moment.step, "action": moment.action, **place.to_data()})

    def post_failure(self, rank: int, failure: Failure, waits: tuple[int, ...] = ()) -> None:
        content = {"at": time.time(), "failure": failure.to_data(), "waits": waits}
        self._post_file(rank, "failure", content)

    def post_addresses(self, rank: int, addresses: list[str]) -> None:
        """Write ``addresses``, the local network addresses of the connections of ``rank``, such as ``127.0.0.1:4000``,
        to a status file of the rank, so that other processes can find the rank by an address.
        """
        self._post_file(rank, "addresses", {"own": addresses})

    def _post_file(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        write_text(self.folder / f"rank-{rank}.{kind}", json.dumps(content), durable=False)

    def tell(self, cause: Failure) -> bool:
        """Write ``cause``, the reason why training has ended, to the folder of status files, unless another rank has
        written a cause. Return whether this rank has to report the cause to the user: ``False`` if another rank has
        written one.
        """
        try:
            with (self.folder / "cause").open("x") as file:
                json.dump(cause.to_data(), file)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def told(self) -> Failure | None:
        """Return the cause why training has ended that some rank has written; ``None`` if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return Failure.from_data(parse_json((self.folder / "cause").read_text()))
        return None

    def states(self) -> list[RankState]:
        """Return the states (activity and failure) of all ranks that have started to write status files, in ascending
        order of ranks.
        """
        for path in self.folder.glob("rank-*.times"):
            rank = int(path.stem.split("-")[1])
            if rank not in self._recordings:
                with contextlib.suppress(FileNotFoundError):  # see below
                    self._recordings[rank] = Recording(self.folder, rank)
        found = []
        for rank in sorted(self._recordings):
            with contextlib.suppress(FileNotFoundError):  # the rank has ended and removed its files
                found.append(self._read_rank_state(rank))
        return found

    @property
    def world_size(self) -> int:
        return next((r.about.world_size for r in self._recordings.values()), 0)

    def recordings(self) -> dict[int, Recording]:
        return self._recordings

    def _read_rank_state(self, rank: int) -> RankState:
        """Return the state (activity and failure) of ``rank`` according to its status files. Raise
        ``FileNotFoundError`` if the rank has removed them.
        """
        recording = self._recordings[rank]
        headers, moment = recording.about, recording.moment()
        on_this_host = headers.host == socket.gethostname()
        now = time.monotonic_ns() if on_this_host else int((time.time() - headers.clock_s) * 1e9)
        index = headers.actions[moment.action] if moment.phase == "step" else None
        spot = headers.spots[index] if index is not None and index < len(headers.spots) else None
        alive, stopped = _read_process_state(headers.pid) if on_this_host else (True, False)
        placed, failed = self._read_file(rank, "place"), self._read_file(rank, "failure")
        place = None
        if placed is not None and (placed.pop("step"), placed.pop("action")) == (moment.step, moment.action):
            place = RankLocation.from_data(placed)
        return RankState(
            rank=rank,
            stage=headers.stage,
            moment=moment,
            spot=spot,
            index=index,
            idle_s=(now - moment.moved) * 1e-9,
            silent_s=(now - moment.beat) * 1e-9,
            on_this_host=on_this_host,
            alive=alive,
            stopped=stopped,
            place=place,
            failure=None if failed is None else Failure.from_data(failed["failure"]),
            failed_at=0.0 if failed is None else failed["at"],
            lost=() if failed is None else self._find_lost_ranks(rank, failed),
            stage_index=_stage_index(headers, index),
        )

    def _find_lost_ranks(self, rank: int, failed: dict[str, Any]) -> tuple[int, ...]:
        """Return the ranks to which the failed rank ``rank`` has lost its connection: those whose network address
        occurs in the error text of its report or, if there are none, all ranks for which the failed rank waited.
        ``failed``: the report, a dict with the error text under ``failure`` and ``error``, and the ranks for which the
        rank waited under ``waits``.
        """
        ends = {r: (self._read_file(r, "addresses") or {"own": []})["own"] for r in self._recordings}
        own = ends.pop(rank)
        return find_named_ranks(failed["failure"]["error"], ends, own) or tuple(failed["waits"])

    def _read_file(self, rank: int, kind: str) -> dict[str, Any] | None:
        """Return the contents of the status file of ``rank`` of the kind ``kind``, such as "failure", as JSON data;
        ``None`` if it does not exist or cannot be read.
        """
        with contextlib.suppress(OSError, ValueError):
            content: dict[str, Any] = parse_json((self.folder / f"rank-{rank}.{kind}").read_text())
            return content
        return None


def _stage_index(headers: RecorderHeader, index: int | None) -> int | None:
    if not headers.places or index is None:
        return None
    return headers.places[index] if index < len(headers.places) else headers.places[-1] + 1  # the end of the step


def _read_process_state(pid: int) -> tuple[bool, bool]:
    """Return whether the process ``pid`` of this host runs, and whether a signal has stopped it; (``True``, ``False``)
    if this is unknown.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self").exists(), False
    except OSError:
        return True, False
    return state not in "ZX", state in "Tt"
