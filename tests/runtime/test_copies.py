"""Copies of the state in memory: a run that loses a rank goes on from its last step, bit by bit, or from the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from partitioner import CheckpointError, Checkpoints, Engine
from partitioner.runtime.checkpoint import memory_copies
from partitioner.runtime.checkpoint import memory_copies as slots
from partitioner.runtime.checkpoint.memory_copies import CheckpointSlot, SlotName, SlotState
from partitioner.runtime.checkpoint.ranks import assign_backup_ranks
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net
from tests.helpers.torchrun import SCRIPT, plan_file, supervised

KILLED = -signal.SIGKILL
PAIR: dict[str, Any] = {"pp": 2, "num_microbatches": 2}
PAIRS: dict[str, Any] = {"pp": 2, "dp": 2, "num_microbatches": 2}


def nodes(tmp_path: Path, of_ranks: str) -> list[str]:
    """The memory of each rank's node: ``aabb`` are two nodes of two ranks each."""
    for node in of_ranks:
        (tmp_path / f"node-{node}").mkdir(exist_ok=True)
    return [str(tmp_path / f"node-{node}") for node in of_ranks]


def run(tmp_path: Path, attempts: list[dict[str, Any]]) -> list[list[int | None]]:
    """What the ranks of each attempt went on from."""
    whole = [{"checkpoints": str(tmp_path / "run"), "steps": 7, "plan": PAIR} | attempt for attempt in attempts]
    (tmp_path / "attempts.json").write_text(json.dumps(whole))
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.copied", str(tmp_path / "attempts.json")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for attempt, told in zip(whole, found, strict=True):
        if attempt.get("kill"):
            killed = attempt["kill"][0]
            assert told["ended"][killed] == KILLED, done.stderr
            assert all(status == 1 for rank, status in enumerate(told["ended"]) if rank != killed), done.stderr
        else:
            assert not any(told["ended"]), done.stderr
    return [told["from"] for told in found]


def as_if_nothing_had_been(tmp_path: Path, attempts: list[dict[str, Any]], goes_on_from: list[int | None]) -> None:
    """All bits of all ranks, and of what comes next, are those of a run that was not interrupted."""
    memory, alone = attempts[-1]["memory"], tmp_path / "alone"
    alone.mkdir()
    judge = {"memory": nodes(alone, "a" * len(memory)), "plan": attempts[-1].get("plan", PAIR)}
    judge |= {"checkpoints": str(alone / "run"), "out": str(alone / "out")}
    found = run(tmp_path, [*attempts[:-1], attempts[-1] | {"out": str(tmp_path / "out")}, judge])
    assert found == [[step] * len(memory) for step in (*goes_on_from, None)]
    for rank in range(len(memory)):
        got, expected = (torch.load(folder / f"out-{rank}.pt") for folder in (tmp_path, alone))
        assert got.keys() == expected.keys()
        assert {n for n in got if not torch.equal(got[n], expected[n])} == set()
    left = [path for node in {*memory} for path in Path(node).iterdir()]
    assert left == [], "a run that ends well gives the memory back"


@pytest.mark.timeout(300)
def test_a_killed_rank_costs_no_step_that_was_copied(tmp_path: Path):
    memory = nodes(tmp_path, "aa")
    kill = {"memory": memory, "kill": [1, 5, "step"], "every": 3}
    again = {"memory": memory, "kill": [0, 6, "step"], "every": 100}
    as_if_nothing_had_been(tmp_path, [kill, again, {"memory": memory}], [None, 5, 6])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_that_is_lost_gets_its_state_from_the_other(tmp_path: Path, lost: int):
    memory = nodes(tmp_path, "ab")
    kill = {"memory": memory, "kill": [lost, 5, "step"], "every": 3}
    as_if_nothing_had_been(tmp_path, [kill, {"memory": memory, "lost": [memory[lost]]}], [None, 5])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_pairs_of_ranks_on_two_nodes(tmp_path: Path):
    """A whole node is lost, and the ranks come back on the nodes the other way round."""
    memory = nodes(tmp_path, "aabb")
    kill = {"memory": memory, "kill": [2, 4, "step"], "plan": PAIRS}
    turned = {"memory": memory[2:] + memory[:2], "lost": [memory[0]], "kill": [1, 6, "step"], "plan": PAIRS}
    as_if_nothing_had_been(tmp_path, [kill, turned, {"memory": memory, "plan": PAIRS}], [None, 4, 6])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_any_copy_the_run_goes_on_from_the_disk(tmp_path: Path):
    memory = nodes(tmp_path, "ab")
    kill = {"memory": memory, "kill": [0, 5, "step"], "every": 3}
    as_if_nothing_had_been(tmp_path, [kill, {"memory": memory, "lost": memory}], [None, 3])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["write", pytest.param("receive", marks=pytest.mark.slow)])
def test_killed_while_a_copy_is_made_the_one_before_it_is_taken(tmp_path: Path, where: str):
    """Of the one under way, half of a file is written; on the other node too, whose own is then lost."""
    memory = nodes(tmp_path, "ab")
    kill = {"memory": memory, "kill": [0, 5, where], "every": 3}
    as_if_nothing_had_been(tmp_path, [kill, {"memory": memory, "lost": [memory[1]]}], [None, 4])


@pytest.mark.timeout(300)
def test_a_copy_that_all_nodes_have_kept_is_taken_though_its_sending_was_cut_short(tmp_path: Path):
    memory = nodes(tmp_path, "ab")
    kill = {"memory": memory, "kill": [0, 5, "receive"], "every": 3}
    as_if_nothing_had_been(tmp_path, [kill, {"memory": memory}], [None, 5])


@pytest.mark.timeout(300)
def test_another_plan_and_another_run_take_the_disk(tmp_path: Path):
    """And what an abandoned line has left is not taken by those that come later, however new it is."""
    memory = nodes(tmp_path, "aa")
    kill = {"memory": memory, "kill": [1, 5, "step"], "every": 3}
    other = {"memory": memory, "kill": [1, 4, "step"], "plan": {"tp": 2}, "copies_every": 0}
    back = {"memory": memory, "kill": [1, 5, "step"]}
    stranger = {"memory": memory, "checkpoints": str(tmp_path / "other"), "steps": 2}
    assert run(tmp_path, [kill, other, back, stranger, {"memory": memory}]) == [
        [None] * 2,
        [3] * 2,
        [3] * 2,
        [None] * 2,
        [5] * 2,
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_torchrun_starts_anew_goes_on_from_the_step_before(tmp_path: Path):
    plan_file(tmp_path, program_of_net(**PAIR))
    options = f"every=2, behind=False, copies_every=1, copies_in={str(tmp_path)!r}"
    (tmp_path / "script.py").write_text(SCRIPT.replace("every=2, behind=False", options))
    done = supervised("--max-restarts", "1", str(tmp_path / "script.py"), str(tmp_path), "1", "SIGKILL")
    assert done.returncode == 0, done.stderr
    assert "resumed at 3" in done.stdout


def test_the_command_line_tells_what_copies_take_and_what_they_need(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "partitioner.runtime",
        str(plan_file(tmp_path, program_of_net())),
        "--copies-every",
        "1",
    ]
    told = []
    for options in ([], ["--checkpoints", str(tmp_path / "run")]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, cwd=ROOT)
        told.append((done.returncode, done.stderr))
    assert told[0][0] == 1
    assert "--copies-every needs --checkpoints" in told[0][1]
    assert told[1][0] == 0, told[1][1]
    assert "copies of the state: 0.00 GiB of this node's memory, in /dev/shm/copies-" in told[1][1]
    assert not memory_copies.get_copies_folder(tmp_path / "run", Path("/dev/shm")).exists()


def one_rank(tmp_path: Path, **options: Any) -> tuple[Engine, torch.optim.Optimizer, Checkpoints]:
    engine = Engine(program_of_net(), Net())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    return engine, optimizer, Checkpoints(tmp_path / "run", engine, optimizer, copies_in=tmp_path, **options)


def train(engine: Engine, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints, steps: int) -> None:
    for _ in range(steps):
        engine.step(net_inputs())
        optimizer.step()
        checkpoints.after_step()


def test_a_newer_checkpoint_is_preferred_and_a_damaged_copy_is_told(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=2, every=3, behind=False)
    train(engine, optimizer, checkpoints, 4)
    assert one_rank(tmp_path, copies_every=2)[2].restore() == 4
    [newest] = [
        p for p in memory_copies.get_copies_folder(tmp_path / "run", tmp_path).iterdir() if p.name.endswith(".4")
    ]
    newest.write_bytes(bytes(newest.stat().st_size))
    with pytest.warns(UserWarning, match="step 4 cannot be taken.*the checkpoint on disk is used instead"):
        assert one_rank(tmp_path, copies_every=2)[2].restore() == 3
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=2, every=3, behind=False)
    assert checkpoints.restore() == 3
    train(engine, optimizer, checkpoints, 6)
    assert one_rank(tmp_path, copies_every=2)[2].restore() == 9


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(memory_copies.shutil, "disk_usage", lambda _: usage(2**30, 2**30, 100))
    with pytest.raises(CheckpointError, match=r"needs 0\.00 GiB more for the ranks of this node, and has .* copies_in"):
        train(engine, optimizer, checkpoints, 1)
    monkeypatch.undo()
    train(engine, optimizer, checkpoints, 1)
    assert checkpoints.copies is not None
    files = [*memory_copies.get_copies_folder(tmp_path / "run", tmp_path).iterdir()]
    assert checkpoints.copies.nbytes == sum(p.stat().st_size for p in files) > 0
    with pytest.raises(CheckpointError, match="expected a folder in this node's memory"):
        Checkpoints(tmp_path / "run", engine, copies_every=1, copies_in=tmp_path / "nothing")


def test_state_that_grows_gets_room(tmp_path: Path):
    """An optimizer that begins to hold moments after the first copy."""
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=1)
    first, *_ = engine.parameters()
    engine.step(net_inputs())
    checkpoints.after_step()  # before the optimizer has any state
    train(engine, optimizer, checkpoints, 3)
    again, moved, checkpoints = one_rank(tmp_path, copies_every=1)
    assert checkpoints.restore() == 4
    assert torch.equal(moved.state[next(again.parameters())]["exp_avg"], optimizer.state[first]["exp_avg"])
    train(again, moved, checkpoints, 2)
    train(engine, optimizer, one_rank(tmp_path / "run", copies_every=0)[2], 2)
    for one, other in zip(again.parameters(), engine.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_may_go_back_and_go_on(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=2)
    train(engine, optimizer, checkpoints, 5)
    assert checkpoints.restore() == 4
    train(engine, optimizer, checkpoints, 3)
    assert one_rank(tmp_path, copies_every=2)[2].restore() == 6
    (tmp_path / "run" / "copies").unlink()
    engine.save(tmp_path / "run" / "step-0000000007", optimizer)
    assert checkpoints.restore() == 7
    train(engine, optimizer, checkpoints, 1)
    assert one_rank(tmp_path, copies_every=2)[2].restore() == 8


def test_copies_of_steps_that_are_done_again_are_not_taken(tmp_path: Path):
    """The run goes back to an earlier checkpoint: neither later copies nor later checkpoints are gone on from."""
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=1, every=2, behind=False)
    train(engine, optimizer, checkpoints, 8)
    engine.load(tmp_path / "run" / "step-0000000004", optimizer)
    checkpoints.every = 0
    train(engine, optimizer, checkpoints, 1)
    engine, optimizer, checkpoints = one_rank(tmp_path, copies_every=1, every=2, behind=False)
    assert checkpoints.restore() == 5
    train(engine, optimizer, checkpoints, 1)
    assert one_rank(tmp_path, copies_every=0)[2].restore() == 6  # the checkpoint
    assert one_rank(tmp_path, copies_every=1)[2].restore() == 6


def test_a_slot_holds_any_tensor(tmp_path: Path):
    tensors = {
        "a": torch.arange(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "number": torch.tensor(3, dtype=torch.int64),
        "turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
        "flags": torch.tensor([True, False, True]),
    }
    state = SlotState.build(tensors, {"steps": 3})
    slot = CheckpointSlot(tmp_path / ".0123456789abcdef.2.0.partial", SlotName("0123456789abcdef", 2, None))
    slot.resize(state.nbytes)
    state.write(slot.bytes)
    slot.commit(3)
    [(name, path)] = slots.iterate_slots(tmp_path)
    assert name == ("0123456789abcdef", 2, 3)
    got, run_ = slots.parse_slot_content(slots.map_slot_file(path))
    assert run_ == {"steps": 3}
    assert got.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor)


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [([1], [None]), ([1, 1], [None, None]), ([1, 2], [1, 0]), ([1, 2, 1, 2], [1, 0, 3, 2]), ([1, 1, 2], [2, 2, 0])],
)
def test_keepers_are_on_another_node(of_ranks: list[int], expected: list[int | None]):
    assert assign_backup_ranks(of_ranks) == expected
