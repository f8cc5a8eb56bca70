"""A run that fails or stands still is told with the rank, the instruction and the node that are the cause."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from partitioner import Engine, LaunchError, LocalRanks, Monitor, RankError, Watch
from partitioner.runtime.comm.failure_origin import find_user_line, is_secondary
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.comm.wait_clock import wait_for
from partitioner.runtime.errors import Failure
from partitioner.runtime.execute.flight_recorder import InstructionSpot, RecordedMoment, Recorder, Recording
from partitioner.runtime.execute.stack_location import RankLocation, locate_rank
from partitioner.runtime.program.program import Program
from partitioner.runtime.watch.host_mirror import Mirror, find_named_ranks
from partitioner.runtime.watch.root_cause import describe_failure_at, find_failure_cause
from partitioner.runtime.watch.status_board import RankState, StatusBoard
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

PATIENCE_S = 5.0


def state(
    rank: int,
    action: int = 3,
    waits: tuple[int, ...] = (),
    meeting: tuple[int, ...] = (),
    idle_s: float = 60.0,
    silent_s: float = 0.1,
    **more: Any,
) -> RankState:
    moment = RecordedMoment(step=4, phase="step", action=action, moved=0, beat=0)
    spot = InstructionSpot(text=f"{rank}F0", op="F", calls="layers.0", source="net.py:3")
    place = RankLocation(waits=waits, meeting=meeting, node="mm (aten.mm.default)", source="net.py:5")
    return RankState(rank, rank, moment, spot, action, idle_s, silent_s, place=place, **more)


def cause(*states: RankState, patience_s: float = 30.0, now: float = 100.0) -> Failure | None:
    return find_failure_cause(states, patience_s, now)


def test_while_any_rank_moves_there_is_no_cause():
    assert cause(state(0, idle_s=90), state(1, idle_s=1.0)) is None


def test_the_cause_is_the_rank_that_others_wait_for_and_that_waits_for_nobody():
    found = cause(state(0, waits=(1,)), state(1, waits=(2,)), state(2), state(3, waits=(0,)))
    assert found is not None
    assert (found.rank, found.kind, found.index, found.step) == (2, "Stalled", 3, 5)
    assert found.node == "mm (aten.mm.default)"
    assert "rank 1 waits for it at step 5, instruction 3: 1F0" in found.error


def test_a_rank_outside_of_its_program_is_told_by_the_line_of_the_script():
    """A rank that waits inside this package, such as in ``Checkpoints.close()``, is told by the script's own line."""
    here = sys._getframe()
    inner = [(wait_for.__code__, 32), (here.f_code, 5)]
    frames = [(SimpleNamespace(f_code=code, f_locals={}), line) for code, line in inner]
    executor = SimpleNamespace(binder=SimpleNamespace(compiled=[]))
    place = locate_rank(iter(frames), executor)  # type: ignore[arg-type]
    assert place.script == f"{__file__}:5"
    outside = RecordedMoment(step=4, phase="between steps", action=3, moved=0, beat=0)
    found = describe_failure_at(replace(state(1), place=place, moment=outside), "Stalled", "has not moved")
    assert found.error.startswith(f"has not moved; it was last seen in {__file__}:5, in wait_for (")


class Work:
    """A transfer that ends in an error."""

    def __init__(self, error: str) -> None:
        self.error = error

    def wait(self) -> None:
        raise RuntimeError(self.error)


@pytest.mark.parametrize("text", ["the data server timed out", "aborted: connection reset by the tokenizer"])
def test_an_error_of_the_script_is_no_lost_connection_whatever_it_says(text: str):
    with pytest.raises(RuntimeError) as own:
        raise RuntimeError(text)
    assert not is_secondary(own.value)


def test_a_data_loader_whose_workers_are_late_is_a_cause():
    class Late:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            time.sleep(1.0)
            return index

    with pytest.raises(RuntimeError, match="timed out") as late:
        next(iter(torch.utils.data.DataLoader(Late(), num_workers=1, timeout=0.1)))
    assert not is_secondary(late.value)


def test_what_communication_says_is_of_another_rank():
    with pytest.raises(RuntimeError) as lost:
        wait_for(Work("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"))
    assert is_secondary(lost.value)


def test_who_is_in_the_same_collective_is_not_waited_for():
    both = {"meeting": (0, 1, 2), "action": 7}
    found = cause(state(0, waits=(1, 2), **both), state(1, waits=(0, 2), **both), state(2, action=5))
    assert found is not None
    assert found.rank == 2


def test_ranks_that_leave_out_microbatches_are_in_the_same_collective_at_another_action():
    both = {"meeting": (0, 1, 2), "stage_index": 40}
    longer, shorter = state(0, 40, waits=(1, 2), **both), state(1, 25, waits=(0, 2), **both)
    found = cause(longer, shorter, state(2, 30, stage_index=33))
    assert found is not None
    assert found.rank == 2


def lost(rank: int, *others: int, at: float = 98.0) -> RankState:
    failure = Failure(rank, "Connection closed by peer", "RuntimeError", "0F0", 3, secondary=True, step=5)
    return state(rank, failure=failure, failed_at=at, lost=others)


def test_a_host_that_falls_silent_is_the_cause_of_what_is_lost():
    """What its ranks did last is known; before it is known to be silent, nothing is told."""
    gone = {"on_this_host": False, "silent_s": 3.5}
    found = cause(lost(0, 2, 3), lost(1, 3), state(2, **gone), state(3, **gone))
    assert found is not None
    assert (found.rank, found.kind, found.index, found.step) == (3, "ProcessDied", 3, 5)
    assert "its host has given no sign of life for 3.5 s" in found.error
    assert "rank 0 lost it at step 5, instruction 3: 0F0; rank 1 lost it at" in found.error
    heard = {"on_this_host": False, "silent_s": 1.0}
    assert cause(lost(0, 2), lost(1, 2), state(2, **heard), state(3, **heard)) is None
    later = cause(lost(0, 2), lost(1, 2), state(2, **heard), state(3, **heard), now=104.0)
    assert later is not None
    assert later.kind == "ConnectionLost"


def test_who_is_at_the_other_end_is_known_by_its_host_where_its_port_is_not():
    ends = {1: ["10.0.0.1:50"], 2: ["10.0.0.2:60"], 3: ["10.0.0.2:61", "127.0.0.1:5"]}
    own = ["10.0.0.1:40", "127.0.0.1:7"]
    assert find_named_ranks("Read error [10.0.0.2]:61: reset", ends, own) == (3,)
    assert find_named_ranks("Read error [::ffff:10.0.0.2]:99: reset", ends, own) == (2, 3)
    assert find_named_ranks("Read error [127.0.0.1]:99: reset", ends, own) == ()
    assert find_named_ranks("Read error [10.0.0.2]:99: reset", ends) == ()


def test_a_rank_that_was_stopped_while_it_waited_is_the_cause():
    found = cause(state(0, waits=(1,)), state(1, waits=(0,), silent_s=50.0, stopped=True))
    assert found is not None
    assert found.rank == 1
    assert "stopped by a signal" in found.error


def test_of_ranks_that_wait_in_a_circle_the_least_far_is_told():
    found = cause(state(0, action=9, waits=(1,)), state(1, action=4, waits=(0,)))
    assert found is not None
    assert found.rank == 1


def test_an_error_of_its_own_comes_before_what_follows_from_it():
    lost = Failure(0, "Connection closed by peer", "RuntimeError", secondary=True)
    own = Failure(1, "no memory", "RuntimeError")
    assert cause(state(0, failure=lost, failed_at=1.0), state(1, failure=own, failed_at=2.0)) is own


def test_a_process_that_ended_is_the_cause_of_connections_lost():
    lost = Failure(0, "Connection closed by peer", "RuntimeError", secondary=True)
    found = cause(state(0, failure=lost, failed_at=1.0, lost=(1,)), state(1, alive=False), state(2, alive=False))
    assert found is not None
    assert (found.rank, found.kind) == (1, "ProcessDied")


def test_a_rank_that_left_early_is_the_cause_of_connections_lost():
    lost = Failure(0, "Connection closed by peer", "RuntimeError", secondary=True)
    left = replace(state(1, alive=False), moment=RecordedMoment(step=4, phase="gone", action=0, moved=0, beat=0))
    found = cause(state(0, failure=lost, failed_at=1.0, lost=(1,)), left)
    assert found is not None
    assert (found.rank, found.kind, found.step) == (1, "LeftEarly", 5)
    assert "rank 0 needed it at step 5, instruction 3: 0F0" in found.error


def test_where_all_processes_live_the_rank_that_most_have_lost_is_told():
    def lost(rank: int, *others: int) -> RankState:
        failure = Failure(rank, "Connection closed by peer", "RuntimeError", secondary=True, index=rank)
        return state(rank, failure=failure, failed_at=rank, lost=others)

    found = cause(lost(0, 2), lost(1, 2), lost(2, 0))
    assert found is not None
    assert (found.rank, found.kind, found.index) == (2, "ConnectionLost", 2)


def test_a_recorder_says_where_it_is_and_how_long_everything_took(tmp_path: Path):
    rank = program_of_net(num_microbatches=2).rank(0)
    engine = Engine(rank.program, Net())
    actions = [index for index, _ in engine._executor.actions]
    engine._executor.recorder = Recorder(tmp_path, rank, actions)
    recording = Recording(tmp_path, 0)
    assert recording.last_step() is None
    seen: list[RecordedMoment] = []
    place = next(k for k, index in enumerate(actions) if rank.instructions[index].op == "B")
    index, action = engine._executor.actions[place]

    def look() -> None:
        seen.append(recording.moment())
        action()

    engine._executor.actions[place] = index, look
    for _ in range(2):
        engine.step(net_inputs())
    assert [(m.step, m.phase, m.action) for m in seen] == [(0, "step", place), (1, "step", place)]
    step = recording.last_step()
    assert step is not None
    assert step.step == 1
    assert list(step.starts) == sorted(step.starts)
    assert step.busy().keys() == set(actions)
    assert recording.moment().phase == "between steps"


def work(program: str, folder: str, how: str, rank: int) -> float | None:
    """Three steps; in the second one ``rank`` meets with ``how`` at its first backward."""
    parsed = Program.model_validate_json(program)
    communicator = TorchCommunicator(parsed.world_size, torch.device("cpu"))
    engine = Engine(parsed, Net().state_dict(), communicator=communicator)
    with Watch(engine, folder, beat_s=0.05, leave=False):
        if communicator.rank == rank:
            instructions = engine.rank_program.instructions
            actions = engine._executor.actions
            place = next(k for k, (i, _) in enumerate(actions) if instructions[i].op == "B")
            index, action = actions[place]

            def strike() -> None:
                if engine.steps == 1:
                    {"kill": kill, "stop": stop, "sleep": sleep, "raise": fail, "busy": compiles}[how]()
                action()

            actions[place] = index, strike
        for _ in range(3):
            loss = engine.step(net_inputs())
    return None if loss is None else loss.item()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def compiles() -> None:
    """Takes longer than there is patience, and is at another line now and then, as a compiler is."""
    end = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < end:
        time.sleep(0.2)
        time.sleep(0.3)


def fail() -> None:
    raise ValueError("of its own")


SHAPES: tuple[dict[str, int], ...] = ({"pp": 2, "num_microbatches": 2}, {"dp": 2}, {"tp": 2})
CAUSES = {"kill": "ProcessDied", "stop": "Stalled", "sleep": "Stalled", "raise": "ValueError"}
# Each takes as long as there is patience: one that waits in a receive, and one in a collective.
STALLED = [("sleep", SHAPES[0]), ("sleep", SHAPES[1])]


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        pytest.param(how, shape, marks=[pytest.mark.slow] * (kind == "Stalled" and (how, shape) not in STALLED))
        for how, kind in CAUSES.items()
        for shape in SHAPES
    ],
    ids=str,
)
def test_the_rank_and_instruction_that_are_the_cause_are_told(tmp_path: Path, how: str, shape: dict[str, int]):
    program = program_of_net(**shape)
    index = next(k for k, i in enumerate(program.rank(1).instructions) if i.op == "B")
    monitor = Monitor(tmp_path, PATIENCE_S)
    with LocalRanks(2) as ranks, pytest.raises(RankError) as caught:
        ranks.call(work, program.model_dump_json(), str(tmp_path), how, 1, timeout=120, watch=monitor)
    failure = caught.value.failure
    assert (failure.rank, failure.index, failure.step, failure.kind) == (1, index, 2, CAUSES[how])
    assert str(caught.value).endswith(f"first cause: {failure}")


def test_a_rank_that_is_busy_for_longer_than_there_is_patience_is_waited_for(tmp_path: Path):
    program = program_of_net(pp=2, num_microbatches=2)
    with LocalRanks(2) as ranks:
        monitor = Monitor(tmp_path, PATIENCE_S)
        losses = ranks.call(work, program.model_dump_json(), str(tmp_path), "busy", 1, timeout=120, watch=monitor)
    assert losses[0] == losses[1] is not None


def test_the_users_line_is_no_librarys():
    with pytest.raises(ValueError, match="property name") as caught:
        json.loads("{")
    assert find_user_line(caught.value).startswith(f"{__file__}:")


def test_hosts_learn_of_each_others_ranks(tmp_path: Path):
    store = dist.HashStore()
    folders = [tmp_path / "one", tmp_path / "two"]
    program = program_of_net(pp=2)
    for rank, folder in enumerate(folders):
        Recorder(folder, program.rank(rank), [0, 1]).begin(6)
    mirrors = [Mirror(folder, store, host, 2, frozenset({host})) for host, folder in enumerate(folders)]
    StatusBoard(folders[1]).post_failure(1, Failure(1, "of its own", "ValueError"))
    for _ in range(2):
        for mirror in mirrors:
            mirror.exchange()
    for folder in folders:
        assert [(s.rank, s.moment.step) for s in StatusBoard(folder).states()] == [(0, 6), (1, 6)]
        found = Monitor(folder).check()
        assert found is not None
        assert (found.rank, found.error) == (1, "of its own")
    assert StatusBoard(folders[0]).tell(Failure(0, "said", "ValueError"))
    assert not StatusBoard(folders[0]).tell(Failure(1, "said again", "ValueError"))
    for mirror in mirrors:
        mirror.exchange()
    told = Monitor(folders[1]).check()
    assert told is not None
    assert told.error == "said"
    for mirror in mirrors:
        mirror.close()


def test_a_store_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path):
    """Its host is cut off, and so nobody says so: the connection stays."""
    cut_off = threading.Event()

    class Silent:
        def set(self, key: str, value: str, /) -> None:
            pass

        def get(self, key: str, /) -> bytes:
            return b"{}"

        def check(self, keys: list[str], /) -> bool:
            cut_off.wait(60)
            return False

    mirror = Mirror(tmp_path, Silent(), 0, 2, frozenset({0}))
    began = time.monotonic()
    mirror.exchange(0.1)
    mirror.exchange(0.1)
    assert time.monotonic() - began < 5
    cut_off.set()
    mirror.close()


def test_what_fails_between_steps_is_told_with_the_scripts_line(tmp_path: Path):
    engine = Engine(program_of_net(), Net())

    def run() -> None:
        with Watch(engine, tmp_path, leave=False):
            engine.step(net_inputs())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    found = Monitor(tmp_path).check()
    assert found is not None
    assert (found.kind, found.instruction, found.step) == ("ZeroDivisionError", "between steps", 1)
    assert found.source.startswith(__file__)


@pytest.mark.parametrize("error", [None, SystemExit, KeyboardInterrupt])
def test_who_leaves_of_its_own_accord_is_no_cause(tmp_path: Path, error: type[BaseException] | None):
    engine = Engine(program_of_net(), Net())

    def run() -> None:
        with Watch(engine, tmp_path, leave=False):
            engine.step(net_inputs())
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    (left,) = StatusBoard(tmp_path).states()
    assert left.moment.phase == "gone"
    assert Monitor(tmp_path, patience_s=0.0).check() is None


def test_a_watch_within_a_watch_is_refused_and_the_outer_one_goes_on(tmp_path: Path):
    engine, other = (Engine(program_of_net(), Net()) for _ in range(2))
    with Watch(engine, tmp_path, leave=False):
        with pytest.raises(LaunchError, match="this engine is watched already"):
            Watch(engine, tmp_path / "inner", leave=False).__enter__()
        with pytest.raises(LaunchError, match="this rank is watched already"):
            Watch(other, tmp_path, leave=False).__enter__()
        with Watch(other, tmp_path / "other", leave=False):
            other.step(net_inputs())
        engine.step(net_inputs())
        (state,) = StatusBoard(tmp_path).states()
        assert state.moment.step == 0
    with Watch(engine, tmp_path, leave=False):
        engine.step(net_inputs())


def test_a_folder_that_nobody_asked_for_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PARTITION_WATCH", raising=False)
    engine = Engine(program_of_net(), Net())
    with Watch(engine) as watch:
        engine.step(net_inputs())
        assert watch.folder.is_dir()
    assert not watch.folder.parent.exists()
