"""Checkpoints: any plan loads what any other saved, bit by bit; complete or not at all; damage is found and named."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import CheckpointError, Checkpoints, Constraints, DamagedCheckpointError, Engine, Topology, partition
from partitioner.passes.ir.layouts import Layout, Shard, local_shape, take_shards
from partitioner.runtime.checkpoint import atomic_folder, dcp_files, save
from partitioner.runtime.checkpoint import save as staging
from partitioner.runtime.checkpoint import shards as boxes
from partitioner.runtime.checkpoint.atomic_folder import CheckpointTarget, has_ended
from partitioner.runtime.checkpoint.shards import ShardPiece, list_written_states
from partitioner.runtime.comm.failure_origin import is_secondary
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.net_training import Loader, one_rank, run, train
from tests.helpers.runtime_programs import Net, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")

PLANS: list[dict[str, Any]] = [
    {},
    {"pp": 2},
    {"dp": 2},
    {"tp": 2},
    {"pp": 2, "dp": 2},
    {"tp": 4, "num_microbatches": 2},
    {"pp": 2, "tp": 2, "halves": True},
    {"pp": 4, "dp": 2, "num_microbatches": 4},
]
FAST = [(0, 7), (7, 5), (3, 6), (6, 1), (5, 3), (2, 4)]
PAIRS = [(a, b) for a in range(len(PLANS)) for b in range(len(PLANS))]


def whole(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's parts of weights and moments, by name and offsets in the whole."""
    found = {}
    held = save.OptimizerState(optimizer, dict(engine.named_parameters()))
    rank = engine.rank_program
    for name, tensor in engine.state_dict().items():
        state, parts_of = engine.program.states[name], boxes.find_rank_shard(rank.program, name, rank.rank)
        parts = boxes.list_shard_pieces("model.", name, state, parts_of, tensor)
        parts += held.pieces(rank, name) if name in held.parameters else []
        found.update({f"{p.key} {p.shape} {p.offsets}": (p.offsets, p.tensor.detach().clone()) for p in parts})
    return found  # type: ignore[return-value]


def joined(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' parts; replicas must agree."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for entry, (offsets, tensor) in part.items():
            key, rest = entry.split(" ", 1)
            shape = tuple(int(n) for n in rest.split(")")[0].strip("( ").split(",") if n.strip())
            full = tensors.setdefault(key, torch.full(shape, math.nan, dtype=tensor.dtype))
            view = full
            for dim, (at, size) in enumerate(zip(offsets, tensor.shape, strict=True)):
                view = view.narrow(dim, at, size)
            assert bool(view.isnan().all()) or torch.equal(view, tensor), f"replicas of {entry} differ"
            view.copy_(tensor)
    return tensors


def saved_under(plan: dict[str, Any], folder: Path, **options: Any) -> dict[str, Tensor]:
    model = Net()

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program_of_net(**plan), model, communicator=communicator)
        optimizer = train(engine)
        engine.save(folder, optimizer, **options).wait()
        return whole(engine, optimizer)

    return joined(on_every_rank(program_of_net(**plan), work))


def loaded_under(plan: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program_of_net(**plan), None, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1.0)
        engine.load(folder, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01
        return whole(engine, optimizer)

    return joined(on_every_rank(program_of_net(**plan), work))


def bitwise_equal(folder: Path, saved: int, loaded: int) -> None:
    expected = saved_under(PLANS[saved], folder, wait=bool(saved % 2))
    got = loaded_under(PLANS[loaded], folder)
    assert got.keys() == expected.keys()
    assert {k for k in got if not torch.equal(got[k], expected[k])} == set()
    assert sum(k.endswith(".exp_avg_sq") for k in got) == len(Net().state_dict())


@pytest.mark.parametrize(("saved", "loaded"), FAST)
def test_state_is_bitwise_the_same_under_another_plan(tmp_path: Path, saved: int, loaded: int):
    bitwise_equal(tmp_path / "checkpoint", saved, loaded)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_state_is_bitwise_the_same_under_every_other_plan(tmp_path: Path, saved: int, loaded: int):
    bitwise_equal(tmp_path / "checkpoint", saved, loaded)


LAYOUTS = st.sampled_from(["R", "S0", "S1", "S0[8,16]", "S1z", "S0z"])


@given(LAYOUTS, LAYOUTS, st.integers(0, 1), st.integers(0, 1))
def test_boxes_are_what_the_cuts_leave(first: str, second: str, i: int, j: int):
    tensor = torch.arange(24 * 16).reshape(24, 16)
    shards = [Shard(Layout.parse(first), 2, i)]
    if "[" not in second or first in ("R", "S1", "S1z"):
        shards.append(Shard(Layout.parse(second), 2, j))
    part = take_shards(tensor, shards)
    rebuilt = torch.full_like(part, -1)
    for box in boxes.compute_shard_boxes(tensor.shape, shards):
        here = tuple(slice(a, a + n) for a, n in zip(box.local, box.sizes, strict=True))
        there = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        rebuilt[here] = tensor[there]
    assert torch.equal(rebuilt, part)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_element_is_written_by_one_rank(plan: dict[str, Any]):
    program = program_of_net(**plan, tied=True)
    written: dict[str, int] = {}
    for number in range(program.world_size):
        for name in list_written_states(program.rank(number), program.states):
            written[name] = written.get(name, 0) + math.prod(_local(program, name))
    assert written == {name: math.prod(s.shape) for name, s in program.states.items()}


def test_replicas_share_the_writing():
    program = program_of_net(dp=2)
    sizes = {name: math.prod(state.shape) for name, state in program.states.items()}
    loads = [sum(sizes[n] for n in list_written_states(program.rank(r), program.states)) for r in range(2)]
    assert abs(loads[0] - loads[1]) <= max(sizes.values())


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_runs_are_boxes(shape: list[int], data: st.DataObject):
    """Elements from one place to another of a tensor that is taken flat, whatever its shape."""
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    size = data.draw(st.integers(0, tensor.numel() - start))
    found = torch.full((size,), -1)
    for box in boxes.split_range_into_boxes(shape, start, size):
        part = tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        found[box.local[0] : box.local[0] + part.numel()] = part.reshape(-1)
    assert torch.equal(found, tensor.reshape(-1)[start : start + size])


def _local(program: Program, name: str) -> tuple[int, ...]:
    state = program.states[name]
    return local_shape(Layout.parse(state.layout), state.shape, program.size("tp"))


def test_torch_reads_a_checkpoint_as_its_own(tmp_path: Path):
    expected = saved_under({"pp": 2, "tp": 2}, tmp_path / "out")
    content = {k: torch.empty_like(t) for k, t in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it runs on one process
        dcp.load(content, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(content[k], expected[k]) for k in expected)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is written is the state when it was asked for, whatever training does meanwhile."""
    trained, write = threading.Event(), dcp_files.write_shards

    def late(*arguments: Any) -> dcp_files.Written:
        assert trained.wait(20)
        return write(*arguments)

    monkeypatch.setattr(dcp_files, "write_shards", late)
    engine, optimizer, checkpoints = one_rank(tmp_path)
    run(engine, optimizer, checkpoints, 2)
    expected = whole(engine, optimizer)
    saving_ = engine.save(tmp_path / "out", optimizer, wait=False)
    run(engine, optimizer, checkpoints, 2)
    assert not saving_.done
    trained.set()
    saving_.wait()
    engine.load(tmp_path / "out", optimizer)
    assert engine.steps == 2
    got = whole(engine, optimizer)
    assert all(torch.equal(got[k][1], expected[k][1]) for k in expected)


def test_a_step_waits_until_what_it_changes_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, order, copy = threading.Event(), [], staging.Staging._copy

    def late(self: Any) -> None:
        assert begun.wait(20)
        copy(self)
        order.append("copied")

    monkeypatch.setattr(staging.Staging, "_copy", late)
    engine, optimizer, checkpoints = one_rank(tmp_path)
    run(engine, optimizer, checkpoints, 1)
    expected = whole(engine, optimizer)
    optimizer.register_step_pre_hook(lambda *_: begun.set())
    optimizer.register_step_post_hook(lambda *_: order.append("stepped"))
    under_way = engine.save(tmp_path / "out", optimizer, wait=False)
    run(engine, optimizer, checkpoints, 1)
    assert order == ["copied", "stepped"]
    under_way.wait()
    engine.load(tmp_path / "out", optimizer)
    got = whole(engine, optimizer)
    assert all(torch.equal(got[k][1], expected[k][1]) for k in expected)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shared_parameters_are_gathered_while_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int
):
    """The next step begins with a gather into the parameters whose pieces are being saved."""
    begun, copy = [threading.Event(), threading.Event()], staging.Staging._copy

    def late(self: Any) -> None:
        assert all(event.wait(20) for event in begun)
        copy(self)

    monkeypatch.setattr(staging.Staging, "_copy", late)
    model, batch = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3)), torch.randn(4, 6)
    pins = Constraints(dp=2, zero=zero)
    plan = partition(model, Topology.local(2), (batch,), loss=lambda out: out.square().mean(), constraints=pins)
    assert plan.program is not None

    def work(communicator: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        engine = Engine(plan.program, model, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)

        def step() -> None:
            engine.step((batch,))
            begun[communicator.rank].set()
            optimizer.step()

        step()
        expected = whole(engine, optimizer)
        begun[communicator.rank].clear()
        under_way = engine.save(tmp_path / "out", optimizer, wait=False)
        step()
        under_way.wait()
        assert not all(
            torch.equal(a[1], b[1]) for a, b in zip(expected.values(), whole(engine, optimizer).values(), strict=True)
        )
        engine.load(tmp_path / "out", optimizer)
        return expected, whole(engine, optimizer)

    for expected, got in on_every_rank(plan.program, work):
        assert all(torch.equal(got[k][1], expected[k][1]) for k in expected)


def test_what_changes_while_it_is_copied_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changed, copy = threading.Event(), staging.Staging._copy

    def late(self: Any) -> None:
        assert changed.wait(20)
        copy(self)

    monkeypatch.setattr(staging.Staging, "_copy", late)
    engine, optimizer, _ = one_rank(tmp_path)
    under_way = engine.save(tmp_path / "out", optimizer, wait=False)
    with torch.no_grad():
        dict(engine.named_parameters())["head.weight"].add_(1.0)
    changed.set()
    with pytest.raises(CheckpointError, match=r"model\.head\.weight was changed while it was copied"):
        under_way.wait()
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_where_it_was(tmp_path: Path):
    """Data position, random numbers, schedule and hyperparameters, not weights alone."""
    loader = Loader()
    engine, optimizer, _ = one_rank(tmp_path)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    extra = {"data": loader, "schedule": schedule}
    run(engine, optimizer, Checkpoints(tmp_path, engine, optimizer), 3)
    schedule.step()
    loader.position = 7
    torch.manual_seed(11)
    random.seed(12)
    Checkpoints(tmp_path, engine, optimizer, extra=extra).save().wait()
    drawn = torch.rand(3), random.random()

    engine, optimizer, _ = one_rank(tmp_path)
    loader = Loader()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    extra = {"data": loader, "schedule": schedule}
    assert Checkpoints(tmp_path, engine, optimizer, extra=extra).restore() == 3
    assert (engine.steps, loader.position, schedule.last_epoch) == (3, 7, 1)
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]


def test_old_checkpoints_go_by_the_rule(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, every=2, keep_last=2, keep_every=8)
    assert checkpoints.restore() is None
    run(engine, optimizer, checkpoints, 15)
    checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step-0000000008",
        "step-0000000012",
        "step-0000000014",
    ]
    assert (tmp_path / "latest").read_text() == "step-0000000014"


def test_rules_that_keep_nothing_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="keep_last must be at least 1, got 0"):
        one_rank(tmp_path, keep_last=0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose(path: Path) -> None:
    path.unlink()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "is damaged: its SHA-256"),
    (cut, "is damaged: it has"),
    (lose, "is missing"),
]


@pytest.mark.parametrize(("harm", "told"), DAMAGES)
@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata", "training.pt"])
def test_damage_is_told_with_the_file_and_the_checkpoint_before(
    tmp_path: Path, harm: Callable[[Path], None], told: str, file: str
):
    plan = {"tp": 2}
    saved_under(plan, tmp_path / "step-0000000001")
    saved_under(plan, tmp_path / "step-0000000002")
    harm(tmp_path / "step-0000000002" / file)
    with pytest.raises(DamagedCheckpointError) as caught:
        loaded_under(plan, tmp_path / "step-0000000002")
    message = str(caught.value)
    if "could not read it; its own error says why" not in message:  # of the rank that found it
        assert told in message
        assert str(tmp_path / "step-0000000002" / file) in message
        assert f"load {tmp_path / 'step-0000000001'}" in message


def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, every=1)
    run(engine, optimizer, checkpoints, 3)
    checkpoints.wait()
    flip(tmp_path / "step-0000000003" / "__0_0.distcp")
    (tmp_path / "step-0000000004").mkdir()  # no manifest: never a checkpoint
    with pytest.warns(UserWarning, match="step-0000000003/__0_0.distcp is damaged"):
        assert checkpoints.restore() == 2


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path):
    saved_under({}, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads 1"):
        loaded_under({}, tmp_path / "out")


def full_disk(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    real = dcp_files._HashingStream.write

    def write(self: Any, data: Any) -> int:
        if self.file.name.endswith(f"__{rank}_0.distcp") and self.nbytes > 2000:
            error = OSError(errno.ENOSPC, "No space left on device")
            self.owner.error = error
            raise error
        return real(self, data)

    monkeypatch.setattr(dcp_files._HashingStream, "write", write)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int):
    folder, plan = tmp_path / "out", {"tp": 2}
    expected = saved_under(plan, folder)
    with monkeypatch.context() as patch:
        full_disk(patch, rank)
        with pytest.raises(CheckpointError, match="No space left on device"):
            saved_under({"tp": 2, "num_microbatches": 2}, folder, wait=False)
    got = loaded_under(plan, folder)
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    saved_under(plan, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "nothing is left of the attempt"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_could_not_write_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int):
    program = program_of_net(tp=2)

    def work(communicator: Any) -> CheckpointError:
        engine = Engine(program, Net(), communicator=communicator)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            engine.save(tmp_path / "out", train(engine)).wait()
        return caught.value

    full_disk(monkeypatch, rank)
    errors = on_every_rank(program, work)
    assert [is_secondary(error) for error in errors] == [r != rank for r in range(2)]
    assert f"rank {rank}: OSError" in str(errors[1 - rank]), "the others repeat it"


def test_a_rank_whose_folder_the_failed_first_one_removed_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = program_of_net(tp=2)
    real = os.replace

    def late(source: Any, path: Path) -> None:
        if path.name == ".record-1":
            end = time.monotonic() + 10
            while path.parent.exists() and time.monotonic() < end:  # the first rank removes what it could not write
                time.sleep(0.002)
        real(source, path)

    def work(communicator: Any) -> CheckpointError:
        engine = Engine(program, Net(), communicator=communicator)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            engine.save(tmp_path / "out", train(engine)).wait()
        return caught.value

    full_disk(monkeypatch, 0)
    monkeypatch.setattr(os, "replace", late)
    errors = on_every_rank(program, work)
    assert [is_secondary(error) for error in errors] == [False, True]


def test_a_rank_that_ended_while_it_wrote_is_not_waited_for(tmp_path: Path):
    target = CheckpointTarget(tmp_path / "c", "0" * 15)
    for rank in range(2):
        target.begin(rank)
    target.get_record_path(0).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank 1 did not write its part within 0\.1 s"):
        target.wait_for_records(2, timeout=0.1)
    other = "from partitioner.runtime.checkpoint.atomic_folder import identify_process; print(identify_process())"
    ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout.strip()
    target.get_writer_path(1).write_text(ended)
    with pytest.raises(CheckpointError, match="the process of rank 1 ended while it wrote its part"):
        target.wait_for_records(2, timeout=600)
    target.get_record_path(1).write_bytes(b"")
    assert len(target.wait_for_records(2, timeout=0.1)) == 2, "it wrote all of it before"
    boot, *rest = ended.split()
    for unknown in ("", "half", " ".join(["elsewhere", *rest]), " ".join([boot, "pid:[1]", *rest[1:]])):
        assert not has_ended(unknown), "what another host runs is not known"


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    *_, checkpoints = one_rank(tmp_path)
    with monkeypatch.context() as patch:
        full_disk(patch, 0)
        checkpoints.save()
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save()
    checkpoints.save().wait()
    assert checkpoints.restore() == 0


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed between the two renames: what was there comes back."""
    folder = tmp_path / "out"
    expected = saved_under({}, folder)
    target = atomic_folder.CheckpointTarget(folder, "")
    folder.rename(target.old)
    got = loaded_under({}, folder)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_an_export_that_was_cut_short_is_undone_and_another_folder_is_left_alone(tmp_path: Path):
    engine, *_ = one_rank(tmp_path)
    engine.export_weights(tmp_path / "out.v2")
    (tmp_path / "out.v2").rename(
        atomic_folder.CheckpointTarget(tmp_path / "out.v2", "").old
    )  # killed between the two renames
    for _ in range(2):
        engine.export_weights(tmp_path / "out")
    engine.load(tmp_path / "out")
    engine.load(tmp_path / "out.v2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.v2"]


def test_chunks_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path):
    written = dcp_files.write_shards(tmp_path, 0, [ShardPiece("w", (4, 4), (0, 0), torch.zeros(2, 4))])
    with pytest.raises(ValueError, match="w: 16 elements, 8 were written"):
        dcp_files.write_metadata(tmp_path, [written])


def test_a_folder_copied_elsewhere_loads(tmp_path: Path):
    expected = saved_under({"dp": 2}, tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    got = loaded_under({}, tmp_path / "moved")
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_a_run_that_was_gone_back_in_goes_on_from_what_was_written_last(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, every=1, keep_last=2)
    run(engine, optimizer, checkpoints, 5)
    checkpoints.wait()
    kept = "step-0000000004"
    engine.load(tmp_path / kept, optimizer)
    checkpoints = Checkpoints(tmp_path, engine, optimizer, every=1, keep_last=2)
    shutil.move(tmp_path / "step-0000000005", tmp_path / "step-0000000009")  # as if it had gone on for longer
    manifest = tmp_path / "step-0000000009" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"steps": 5', '"steps": 9'))
    run(engine, optimizer, checkpoints, 3)
    checkpoints.wait()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [
        "step-0000000006",
        "step-0000000007",
        "step-0000000009",
    ]
    engine, optimizer, checkpoints = one_rank(tmp_path)
    assert checkpoints.restore() == 7


def test_a_checkpoint_that_was_complete_before_it_was_named_is_gone_on_from(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, every=1)
    run(engine, optimizer, checkpoints, 1)
    checkpoints.wait()
    named = (tmp_path / "latest").read_text()
    before = (tmp_path / "latest").stat()
    run(engine, optimizer, checkpoints, 1)
    checkpoints.wait()
    (tmp_path / "latest").write_text(named)
    os.utime(tmp_path / "latest", ns=(before.st_atime_ns, before.st_mtime_ns))
    engine, optimizer, checkpoints = one_rank(tmp_path)
    assert checkpoints.restore() == 2


def test_ranks_that_see_different_folders_are_told(tmp_path: Path):
    """A folder on each host's own disk, say; one that has none waits for nobody, nor do the others for it."""
    engine, optimizer, checkpoints = one_rank(tmp_path / "0", every=1)
    run(engine, optimizer, checkpoints, 1)
    checkpoints.wait()
    told: list[str] = []

    def restore(communicator: Any, load: bool) -> None:
        engine = Engine(program_of_net(dp=2), Net(), communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters())
        folder = tmp_path / str(communicator.rank)
        try:
            if load:
                engine.load(folder, optimizer)
            else:
                Checkpoints(folder, engine, optimizer).restore()
        except CheckpointError as error:
            told.append(str(error))

    on_every_rank(program_of_net(dp=2), lambda c: restore(c, load=False))
    assert sorted(t.split("this rank ")[1].split(":")[0] for t in told) == ["none", "step-0000000001"]
    told.clear()
    on_every_rank(program_of_net(dp=2), lambda c: restore(c, load=True))
    assert sorted(t.startswith("the checkpoint was not loaded: rank 1") for t in told) == [False, True]


def test_two_runs_that_write_to_one_folder_are_found(tmp_path: Path):
    """The run whose newest checkpoint was followed by one of another run says so; its own later ones stay out."""
    ours, others = one_rank(tmp_path, every=1), one_rank(tmp_path, every=1)
    for engine, optimizer, checkpoints in (ours, others):
        run(engine, optimizer, checkpoints, 1)
        checkpoints.wait()
    run(*ours, 1)
    with pytest.raises(
        CheckpointError, match=r"another run writes to .*: it wrote step-0000000001, while this run wrote"
    ):
        ours[2].wait()
    assert (tmp_path / "latest").read_text().strip() == "step-0000000001"


def test_a_step_that_is_saved_twice_is_of_one_run(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path, every=1)
    run(engine, optimizer, checkpoints, 2)
    checkpoints.save().wait()
    checkpoints.save().wait()
    run(engine, optimizer, checkpoints, 1)
    checkpoints.wait()
    assert (tmp_path / "latest").read_text().strip() == "step-0000000003"


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path):
    (tmp_path / "file").touch()
    engine, optimizer, _ = one_rank(tmp_path)
    with pytest.raises(CheckpointError, match="file is no folder; expected the folder of the checkpoints"):
        Checkpoints(tmp_path / "file", engine, optimizer)
