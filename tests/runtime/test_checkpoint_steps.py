"""Which steps are saved where gradients are accumulated, and which one is loaded while another is being written."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partitioner import CheckpointError, Checkpoints, Engine
from partitioner.runtime.checkpoint import atomic_folder, dcp_files
from partitioner.runtime.checkpoint.atomic_folder import identify_process, wait_for_writers
from partitioner.runtime.checkpoint.load import list_complete_checkpoints
from partitioner.runtime.checkpoint.training_state import pack_plain_data, unpack_plain_data
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.program.program import Program
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


def one_rank() -> tuple[Engine, torch.optim.Optimizer]:
    engine = Engine(program_of_net(), Net())
    return engine, torch.optim.AdamW(engine.parameters())


def train(engine: Engine, optimizer: Any, checkpoints: Checkpoints, batches: list[int]) -> list[int]:
    """Optimizer steps of so many batches each; the numbers of those that were saved, counted from 1."""
    saved = []
    for number, count in enumerate(batches, 1):
        for k in range(count):
            engine.step(net_inputs(), accumulate=k > 0)
        optimizer.step()
        if checkpoints.after_step() is not None:
            saved.append(number)
    checkpoints.wait()
    return saved


@pytest.mark.parametrize(
    "batches",
    [[1] * 9, [4] * 9, [1, *[4] * 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1] * 4 + [3], [5] * 4 + [1] * 5],
    ids=str,
)
def test_every_counts_steps_of_the_optimizer(batches: list[int], tmp_path: Path):
    engine, optimizer = one_rank()
    checkpoints = Checkpoints(tmp_path, engine, optimizer, every=3, keep_last=None)
    assert train(engine, optimizer, checkpoints, batches) == [3, 6, 9]
    assert engine.optimizer_steps == 9 and engine.steps == engine.steps_run == sum(batches)
    names = [f"step-{sum(batches[:n]):010}" for n in (3, 6, 9)]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == names


@pytest.mark.parametrize("first", [1, 2, 4, 5])
def test_a_run_that_goes_on_saves_at_the_same_steps(first: int, tmp_path: Path):
    """Whatever the accumulation was before, and is then."""
    engine, optimizer = one_rank()
    checkpoints = Checkpoints(tmp_path, engine, optimizer, every=3, keep_last=None)
    train(engine, optimizer, checkpoints, [2] * first)
    checkpoints.close()
    engine, optimizer = one_rank()
    checkpoints = Checkpoints(tmp_path, engine, optimizer, every=3, keep_last=None)
    assert checkpoints.restore() == 2 * first
    assert engine.optimizer_steps == first and engine.steps_run == 0
    assert [first + n for n in train(engine, optimizer, checkpoints, [3] * 6)] == [
        n for n in range(first + 1, first + 7) if n % 3 == 0
    ]


def test_what_is_kept_goes_by_steps_of_the_optimizer_too(tmp_path: Path):
    engine, optimizer = one_rank()
    checkpoints = Checkpoints(tmp_path, engine, optimizer, every=1, keep_last=1, keep_every=4)
    train(engine, optimizer, checkpoints, [1, *[3] * 8])
    assert [found.optimizer_steps for found in list_complete_checkpoints(tmp_path)] == [4, 8, 9]
    assert [found.steps for found in list_complete_checkpoints(tmp_path)] == [10, 22, 25]


def test_a_checkpoint_that_knows_of_one_count_alone_is_loaded(tmp_path: Path):
    """As earlier versions wrote it."""
    engine, optimizer = one_rank()
    checkpoints = Checkpoints(tmp_path, engine, optimizer)
    train(engine, optimizer, checkpoints, [1] * 4)
    folder = checkpoints.save().directory
    checkpoints.wait()
    manifest = json.loads((folder / "manifest.json").read_text())
    training = unpack_plain_data((folder / "training.pt").read_bytes())
    assert manifest.pop("optimizer_steps") == training.pop("optimizer_steps") == 4
    (folder / "training.pt").write_bytes(pack_plain_data(training, "the run"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    other, _ = one_rank()
    assert other.load(folder, verify=False) == 4
    assert other.optimizer_steps == 4
    assert list_complete_checkpoints(tmp_path)[0].optimizer_steps == 4


def test_two_series_of_checkpoints_count_a_step_once(tmp_path: Path):
    engine, optimizer = one_rank()
    often = Checkpoints(tmp_path / "often", engine, optimizer, every=2, behind=False)
    seldom = Checkpoints(tmp_path / "seldom", engine, optimizer, every=4, behind=False)
    saved: list[tuple[bool, bool]] = []
    for _ in range(4):
        engine.step(net_inputs())
        engine.step(net_inputs(), accumulate=True)
        optimizer.step()
        saved.append((often.after_step() is not None, seldom.after_step() is not None))
    assert saved == [(False, False), (True, False), (False, False), (True, True)]


@pytest.fixture
def slow_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    write = dcp_files.write_shards

    def slowly(*args: Any) -> Any:
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(dcp_files, "write_shards", slowly)


def on_ranks(program: Program, work: Callable[[Any], Any]) -> list[Any]:
    world = ThreadWorld(program.world_size, timeout=20)
    results: list[Any] = [None] * program.world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(world.communicator(rank))
        except BaseException as error:
            results[rank] = error
            world.abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(program.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("slow_writing")
@pytest.mark.parametrize("plan", [{}, {"dp": 2}, {"pp": 2}], ids=str)
def test_another_engine_loads_what_is_being_saved(plan: dict[str, Any], tmp_path: Path):
    """The first time too, when there is no checkpoint yet; by the run's folder, or the checkpoint's."""
    program = program_of_net(**plan)

    def work(communicator: Any) -> list[int | None]:
        engine = Engine(program, Net(), communicator=communicator)
        evaluation = Engine(program, Net(), communicator=communicator)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        checkpoints = Checkpoints(tmp_path / "run", engine, optimizer, every=1)
        found = []
        for step in range(3):
            engine.step(net_inputs())
            optimizer.step()
            saving = checkpoints.after_step()
            assert saving is not None and not saving.done
            found.append(evaluation.load(tmp_path / "run" if step < 2 else saving.directory))
            pairs = zip(engine.parameters(), evaluation.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        return found

    assert on_ranks(program, work) == [[1, 2, 3]] * program.world_size


def saved(folder: Path) -> Path:
    engine, _ = one_rank()
    return engine.save(folder).directory


def test_a_save_of_another_process_is_waited_for(tmp_path: Path):
    """One that lives; and no other."""
    final = saved(tmp_path / "step-0000000000")
    partial = tmp_path / f".{final.name}.0123456789abcde.partial"
    os.rename(final, partial)
    (partial / ".writer-0").write_text(identify_process())
    engine, _ = one_rank()

    def complete() -> None:
        (partial / ".writer-0").unlink()
        os.rename(partial, final)

    timer = threading.Timer(0.5, complete)
    timer.start()
    assert engine.load(tmp_path) == 0
    timer.join()


@pytest.mark.parametrize("what", ["ended", "failed", "another host's", "nobody's"])
def test_what_nobody_writes_any_more_is_not_waited_for(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(atomic_folder, "_SILENCE_S", 0.2)
    saved(tmp_path / "step-0000000000")
    partial = tmp_path / ".step-0000000005.0123456789abcde.partial"
    partial.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    host, _, started = identify_process().rsplit(" ", 2)
    writer = {
        "ended": f"{host} {ended.pid} {started}",
        "failed": identify_process(),
        "another host's": "some-other-boot pid:[1] 1 1",
    }.get(what)
    if writer is not None:
        (partial / ".writer-0").write_text(writer)
    if what == "failed":
        partial.with_suffix(".failed").write_text("rank 1: OSError: no room")
    engine, _ = one_rank()
    start = time.monotonic()
    assert engine.load(tmp_path) == 0
    assert time.monotonic() - start < 10


def test_a_save_that_does_not_end_is_named(tmp_path: Path):
    partial = tmp_path / ".step-0000000005.0123456789abcde.partial"
    partial.mkdir()
    (partial / ".writer-0").write_text(identify_process())
    with pytest.raises(CheckpointError, match=r"step-0000000005.*\.partial has been written there for 0\.3 s"):
        wait_for_writers(tmp_path, 0.3)
