"""Optimizer states on disk: the same numbers as with them in host memory, and little of them in memory at a time."""

from __future__ import annotations

import copy
import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Plan, Topology, partition, run_local
from partitioner.runtime.checkpoint import dcp_files
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.engine import consistency
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import CheckpointError, OffloadError
from partitioner.runtime.launch.process_pool import LocalRanks
from partitioner.runtime.program.load import load_disk_bytes
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from partitioner.runtime.state import disk_offload
from partitioner.runtime.state.disk_offload import Disk, is_mapped
from tests.helpers.every_rank import on_every_rank
from tests.helpers.offload_plans import ALL, Wide, planned
from tests.helpers.zero_training import MESHES, MODELS, STEPS, errors, tied_inputs, tied_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:offload_folder"),  # tests may run on a tmpfs
    pytest.mark.usefixtures("without_baselines"),
]

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_offload, "WINDOW", 512)  # bytes: of a few parameters of the tests' models
    return


def with_disk(program: Program) -> Program:
    """What is planned with the states on disk: the same instructions."""
    return program.model_copy(update={"offload": (*program.offload, "disk")})


def trained(program: Program, name: str, folder: Path, make: Make, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Of each rank all that an optimizer has, after some steps on threads."""
    model, inputs = MODELS[name]
    weights = model()

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program, weights, communicator=communicator, offload_folder=folder)
        optimizer = engine.on_disk(make(engine.parameters()))
        if isinstance(optimizer, torch.optim.Adafactor):
            engine.trust_optimizer(optimizer)  # steps its parts alike, wherever their states are
        for step in range(steps):
            batch = {i.path: inputs(step)[i.path] for i in program.inputs}
            floats = {i.path: getattr(torch, i.dtype) for i in program.inputs if i.path in batch}
            engine.step({n: x.to(floats[n]) for n, x in batch.items()})
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        held = {n: p.detach().clone() for n, p in engine.named_parameters()}
        for n, p in engine.named_parameters():
            held |= {f"{n}::{k}": torch.as_tensor(v).clone() for k, v in optimizer.state.get(p, {}).items()}
        return held

    return on_every_rank(program, work)


CASES = [
    pytest.param(*("dp4", "zero0", "fp32", "optimizer", "adamw"), marks=pytest.mark.slow),
    ("dp4", "zero1", "bf16", "optimizer", "adamw"),
    ("dp4", "zero2", "fp64", "optimizer", "adamw"),
    ("dp2 pp2", "zero3", "bf16", "optimizer", "adamw foreach"),
    pytest.param(*("dp2 tp2", "zero0", "bf16", "optimizer", "sgd"), marks=pytest.mark.slow),
    pytest.param(*("dp2 tp2", "zero3", "fp32", ALL, "adam fused"), marks=pytest.mark.slow),
    ("dp2 tp2", "zero0", "fp32", "optimizer", "adafactor"),
    pytest.param(*("dp4 ep2", "hybrid3", "bf16", ALL, "rmsprop"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "sharding", "precision", "offload", "kind"), CASES)
def test_the_same_bits_as_in_host_memory(
    mesh: str, sharding: str, precision: str, offload: str, kind: str, tmp_path: Path
):
    program = convert_precision(planned(mesh, offload, sharding).program, precision)
    name, make = MESHES[mesh][0], OPTIMIZERS[kind]
    in_memory, on_disk = (trained(p, name, tmp_path, make) for p in (program, with_disk(program)))
    assert [held.keys() for held in on_disk] == [held.keys() for held in in_memory]
    assert len(set().union(*on_disk)) > len(program.states)  # states there are
    for a, b in zip(in_memory, on_disk, strict=True):
        assert [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []
    assert list(tmp_path.iterdir()) == []


# --- one rank ---------------------------------------------------------------------------------------------------------


def wide(precision: str | None = None) -> Program:
    made = partition(
        Wide(32, 4),
        Topology.local(1),
        (torch.zeros(4, 32),),
        precision=precision,
        constraints=Constraints(offload="optimizer"),
    )
    return with_disk(made.program)


def alone(folder: Path, precision: str | None = None, program: Program | None = None) -> Engine:
    torch.manual_seed(0)
    communicator = ThreadWorld(1, "cpu").communicator(0)
    return Engine(program or wide(precision), Wide(32, 4), communicator=communicator, offload_folder=folder)


def batch(engine: Engine, seed: int = 0) -> tuple[Tensor]:
    dtype = getattr(torch, engine.program.inputs[0].dtype)
    return (torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).to(dtype),)


def adam(engine: Engine) -> torch.optim.Optimizer:
    return engine.on_disk(torch.optim.AdamW(engine.parameters(), lr=0.01))


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def step(engine: Engine, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    engine.step(batch(engine, seed))
    optimizer.step()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_states_are_on_disk_and_so_are_copies_in_float32(precision: str | None, tmp_path: Path):
    engine = alone(tmp_path, precision)
    optimizer = adam(engine)
    step(engine, optimizer)
    states = states_of(optimizer)
    assert len(states) == 16 and all(map(is_mapped, states))
    assert {is_mapped(p) for p in engine.parameters()} == {precision == "bf16"}
    assert not any(is_mapped(p.grad) for p in engine.parameters() if p.grad is not None)
    where = [state.data_ptr() for state in states]
    step(engine, optimizer)
    assert [state.data_ptr() for state in states_of(optimizer)] == where  # they stay where they are
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"


def test_it_steps_some_parameters_at_a_time(tmp_path: Path):
    seen: list[list[int]] = []

    class Told(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append([len(group["params"]) for group in self.param_groups])
            return super().step(closure)

    engine = alone(tmp_path)
    first, *rest = engine.parameters()
    optimizer = engine.on_disk(Told([{"params": [first]}, {"params": rest, "lr": 0.1}]))
    step(engine, optimizer)
    assert [sum(counts) for counts in seen] == [1, 1, 1, 1, 1, 1, 1, 1]  # a matrix is more than a window
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 7]


def test_hooks_closures_schedulers_and_groups_that_come_later(tmp_path: Path):
    engine = alone(tmp_path)
    parameters = list(engine.parameters())
    optimizer = engine.on_disk(torch.optim.SGD(parameters[:4], lr=1.0, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss = optimizer.step(lambda: engine.step(batch(engine)))
    assert loss is engine.loss and calls == ["before", "after"]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": parameters[4:]})
    step(engine, optimizer)
    assert len(states_of(optimizer)) == 8 and all(map(is_mapped, states_of(optimizer)))


def test_what_is_put_among_the_states_goes_to_disk_with_the_next_step(tmp_path: Path):
    engine = alone(tmp_path)
    optimizer = adam(engine)
    step(engine, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        state["average"] = torch.ones_like(state["exp_avg"])
    assert not any(map(is_mapped, states_of(optimizer)))
    before = engine._disk.nbytes if engine._disk is not None else 0
    step(engine, optimizer)
    assert all(map(is_mapped, states_of(optimizer)))
    assert all(bool((state["average"] == 1).all()) for state in optimizer.state.values())
    assert engine._disk is not None and engine._disk.nbytes == before


def test_states_in_lists_and_dicts_go_to_disk(tmp_path: Path):
    class Several(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    held = self.state[parameter].setdefault("past", [{"x": torch.zeros_like(parameter)}, None, 3])
                    held[0]["x"] += parameter

    engine = alone(tmp_path)
    optimizer = engine.on_disk(Several(engine.parameters(), lr=0.1))
    expected = [torch.zeros_like(p) for p in engine.parameters()]
    for seed in range(2):
        step(engine, optimizer, seed)
        expected = [e + p.detach() for e, p in zip(expected, engine.parameters(), strict=True)]
    found = [optimizer.state[p]["past"][0]["x"] for p in engine.parameters()]
    assert all(is_mapped(f) and torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_no_gradient_no_step(tmp_path: Path):
    engine = alone(tmp_path)
    optimizer = adam(engine)
    engine.step(batch(engine))
    first, *rest = engine.parameters()
    first.grad = None
    optimizer.step()
    assert len(optimizer.state) == len(rest)


def test_a_plan_without_disk_leaves_optimizers_alone(tmp_path: Path):
    program = wide().model_copy(update={"offload": ("optimizer",)})
    engine = alone(tmp_path, program=program)
    made = torch.optim.LBFGS(engine.parameters())
    assert engine.on_disk(made) is made and type(made) is torch.optim.LBFGS


class Counting(torch.optim.SGD):
    """Counts its steps where all of its parameters see it."""

    where: Callable[[Any], None]

    def step(self, closure: Any = None) -> Any:
        type(self).where(self)
        return super().step(closure)


def _in_groups(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["k"] = group.get("k", 0) + 1


def _in_itself(optimizer: Any) -> None:
    optimizer.count = getattr(optimizer, "count", 0) + 1


def _in_no_parameter(optimizer: Any) -> None:
    optimizer.state["global"]["k"] = 1


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (_in_groups, "changes 'k' of its groups"),
        (_in_itself, "changes its 'count'"),
        (_in_no_parameter, "a state that belongs to no parameter"),
    ],
)
def test_an_optimizer_of_more_than_each_parameter_is_refused(where: Any, words: str, tmp_path: Path):
    engine = alone(tmp_path)
    optimizer = engine.on_disk(type("Counting", (Counting,), {"where": where})(engine.parameters(), lr=0.1))
    with pytest.raises(OffloadError, match=words):
        step(engine, optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 8


def test_what_cannot_be_put_on_disk_is_refused_at_once(tmp_path: Path):
    engine = alone(tmp_path)
    with pytest.raises(OffloadError, match="LBFGS reads all parameters at once"):
        engine.on_disk(torch.optim.LBFGS(engine.parameters()))
    scheduled = torch.optim.SGD(engine.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    with pytest.raises(OffloadError, match=r"engine.on_disk\(optimizer\) first, then create the scheduler"):
        engine.on_disk(scheduled)


def test_states_never_come_into_memory_unasked(tmp_path: Path):
    engine = alone(tmp_path)
    forgotten = torch.optim.AdamW(engine.parameters())
    engine.step(batch(engine))
    with pytest.raises(OffloadError, match=r"those of this AdamW would be in memory: call engine.on_disk\(optimizer\)"):
        forgotten.step()
    assert not forgotten.state
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=1.0).step()  # which is no engine's
    assert other.tolist() == [0, 0, 0]


# --- where it is ------------------------------------------------------------------------------------------------------


def test_a_folder_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(**more: Any) -> Engine:
        return Engine(wide(), Wide(32, 4), communicator=ThreadWorld(1, "cpu").communicator(0), **more)

    with pytest.raises(OffloadError, match=r"no folder is given: expected offload_folder="):
        make()
    with pytest.raises(OffloadError, match=r"expected a folder on this node's disk, got .*none, which does not exist"):
        make(offload_folder=tmp_path / "none")
    monkeypatch.setenv("PARTITION_OFFLOAD_FOLDER", str(tmp_path))
    engine = make()
    assert engine._disk is not None and engine._disk.folder == tmp_path


def test_room_is_taken_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OffloadError, match=r"this rank needs 1024.00 GiB more in .*, which has .* GiB free"):
        Disk(tmp_path, 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1 << 50))  # type: ignore[attr-defined]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match="No space left on device"):
        alone(tmp_path, "bf16")  # of which copies in float32 are there from the start
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_how_much(tmp_path: Path):
    plan = partition(
        Wide(32, 4), disk_topology(1), (torch.zeros(4, 32),), constraints=Constraints(offload="optimizer+disk")
    )
    numbers = 4 * (32 * 32 + 32)
    assert plan.estimate.stages[0].disk == 8 * numbers
    assert load_disk_bytes(plan, 0) == load_disk_bytes(plan.save(tmp_path / "plan.json"), 0) == 8 * numbers
    assert load_disk_bytes(plan.program, 0) == 0
    engine = Engine(plan, communicator=ThreadWorld(1, "cpu").communicator(0), offload_folder=tmp_path)
    assert engine._disk is not None
    at_first = engine._disk.nbytes
    assert 8 * numbers <= at_first < 8 * numbers + 2**14
    optimizer = adam(engine)
    step(engine, optimizer)
    assert engine._disk.nbytes == at_first


def cached(disk: Disk) -> int:
    """Pages of the files that are in memory, mapped or not."""
    pages = 0
    for file in disk._files:
        found = (ctypes.c_ubyte * (file.size // mmap.PAGESIZE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(file.start), ctypes.c_size_t(file.size), found)
        pages += sum(page & 1 for page in found)
    return pages


def disk_topology(ranks: int) -> Topology:
    local = Topology.local(ranks)
    (nodes,) = local.model_dump(include={"nodes"})["nodes"]
    host = nodes["host"] | {"disk": "1 TB", "disk_bandwidth": "1 GB/s"}
    return Topology(**(local.model_dump(exclude_unset=True) | {"nodes": ({**nodes, "host": host},)}))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder in memory")
def test_a_folder_in_memory_is_no_disk():
    with pytest.warns(UserWarning, match="/dev/shm is in memory, so offload saves no memory"):
        adam(alone(Path("/dev/shm")))


def test_two_runs_share_a_folder_and_leave_nothing(tmp_path: Path):
    alike = [alone(tmp_path, "bf16"), alone(tmp_path, "bf16")]
    optimizers = [adam(engine) for engine in alike]
    for seed in range(2):
        for engine, optimizer in zip(alike, optimizers, strict=True):
            step(engine, optimizer, seed)
            assert list(tmp_path.iterdir()) == []  # a file that has no name ends with its process
    pairs = zip(*(engine.parameters() for engine in alike), strict=True)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_what_the_disk_cannot_write_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path)
    tensor = disk.empty((1000,), torch.float32)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("partitioner.runtime.state.disk_offload._call_libc", fails)
    disk.write_back([tensor])
    with pytest.raises(OSError, match="Input/output error"):
        disk.wait()
    disk.wait()  # it is told once


def test_tensors_keep_apart_and_keep_their_numbers(tmp_path: Path):
    disk = Disk(tmp_path)
    kinds = [((3, 5), torch.float32), ((), torch.float64), ((0, 4), torch.float32), ((70_000,), torch.bfloat16)]
    tensors = [disk.empty(shape, dtype).fill_(k) for k, (shape, dtype) in enumerate(kinds * 3)]
    for _ in range(2):
        disk.write_back(tensors)
        disk.wait()
        disk.prefetch(tensors)
    disk.evict()
    assert all(bool((tensor == k).all()) for k, tensor in enumerate(tensors))
    assert [(tuple(t.shape), t.dtype) for t in tensors] == kinds * 3
    large = disk.empty((5_000_000,), torch.float64)  # more than there was
    assert large.fill_(1).sum() == 5_000_000


_HELD_PAGES = 64  # of thousands: the kernel may hold some that it is just working on, and drops them later


def test_what_is_written_behind_leaves_the_page_cache(tmp_path: Path):
    disk = Disk(tmp_path)
    one, *others = [disk.empty((5 << 20,), torch.float32) for _ in range(4)]  # of a file each, neighbours in memory
    disk.write_back([one.fill_(1)])
    disk.wait()
    if cached(disk):
        pytest.skip("a file system in memory")
    for tensors in (others, [*others, one]):
        for tensor in tensors:
            tensor.add_(1)
        disk.write_back(tensors)
        disk.wait()
        assert cached(disk) <= _HELD_PAGES
    assert one[-1] == 2


# --- checkpoints ------------------------------------------------------------------------------------------------------


def train(program: Program, folder: Path, disk: Path, first: int = 0, last: int = STEPS, load: bool = False) -> None:
    program = convert_precision(program, "fp64")
    weights = tied_model().double()

    def work(communicator: Any) -> None:
        engine = Engine(program, None if load else weights, communicator=communicator, offload_folder=disk)
        optimizer = engine.on_disk(torch.optim.AdamW(engine.parameters(), lr=0.01))
        if load:
            engine.load(folder, optimizer)
            assert {is_mapped(state) for state in states_of(optimizer)} <= {"disk" in program.offload}
        for step in range(first, last):
            engine.step(tied_inputs(step))
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        engine.save(folder, optimizer, wait=False)
        engine.wait_for_save()

    on_every_rank(program, work)


@pytest.mark.parametrize(
    ("saved", "loaded", "disks"),
    [
        (("dp4", "optimizer", "zero3"), ("dp2 pp2", "optimizer", "zero1"), (True, True)),
        (("dp2 tp2",), ("dp4", "optimizer", "zero2"), (False, True)),
        pytest.param(("dp2 pp2", ALL, "zero3"), ("dp2 tp2",), (True, False), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_do_not_say_where_states_were(saved: Any, loaded: Any, disks: tuple[bool, bool], tmp_path: Path):
    programs = [planned(*case).program for case in (saved, loaded)]
    programs = [with_disk(p) if disk else p for p, disk in zip(programs, disks, strict=True)]
    train(programs[0], tmp_path / "out", tmp_path, last=2)
    train(programs[1], tmp_path / "out", tmp_path, first=2, load=True)
    found = errors(tmp_path / "out", "tied")
    assert max(found.values()) < 1e-9, {n: e for n, e in found.items() if e > 1e-9}


def test_a_step_waits_until_what_is_on_disk_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = alone(tmp_path, "bf16")
    optimizer = adam(engine)
    step(engine, optimizer)
    expected = {n: p.detach().clone() for n, p in engine.named_parameters()}
    may_write, write = threading.Event(), dcp_files.write_shards

    def slow(*arguments: Any) -> Any:
        assert may_write.wait(20)
        return write(*arguments)

    monkeypatch.setattr(dcp_files, "write_shards", slow)
    under_way = engine.save(tmp_path / "out", optimizer, wait=False)
    assert not any(key.startswith("optimizer") for key, _ in engine._saver._staging._buffers if "step" not in key)
    engine.step(batch(engine, 1))  # which does not wait
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(0.2)
    assert stepped.is_alive() and not under_way.done
    may_write.set()
    under_way.wait()
    stepped.join(20)
    assert not all(torch.equal(p, expected[n]) for n, p in engine.named_parameters())
    again = alone(tmp_path, "bf16")
    again.load(tmp_path / "out")
    assert all(torch.equal(p, expected[n]) for n, p in again.named_parameters())


def test_a_save_that_fails_lets_the_step_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = alone(tmp_path)
    optimizer = adam(engine)
    step(engine, optimizer)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dcp_files, "write_shards", fails)
    under_way = engine.save(tmp_path / "out", optimizer, wait=False)
    step(engine, optimizer)
    with pytest.raises(CheckpointError, match="No space left"):
        under_way.wait()


def test_a_change_while_it_is_saved_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = alone(tmp_path)
    optimizer = adam(engine)
    step(engine, optimizer)
    write = dcp_files.write_shards

    def meddling(*arguments: Any) -> Any:
        states_of(optimizer)[0].add_(1)
        return write(*arguments)

    monkeypatch.setattr(dcp_files, "write_shards", meddling)
    with pytest.raises(CheckpointError, match=r"exp_avg was changed while it was copied"):
        engine.save(tmp_path / "out", optimizer, wait=False).wait()


def test_copies_in_memory_are_refused(tmp_path: Path):
    engine = alone(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer states do not fit in memory"):
        partitioner.Checkpoints(tmp_path / "out", engine, adam(engine), copies_every=1)


# --- programs and processes -------------------------------------------------------------------------------------------


def test_a_program_with_states_on_disk_steps_in_host_memory():
    with pytest.raises(ProofError, match="optimizer states are on disk and the optimizer is not in host memory"):
        prove(planned("dp4").program.model_copy(update={"offload": ("disk",)}))


def train_rank(program: str, folder: str, out: str) -> list[float]:
    """Two steps and a checkpoint, on a process of its own."""
    parsed = Program.model_validate_json(Path(program).read_text())
    disk_offload.WINDOW = 512
    engine = Engine(parsed, tied_model(), offload_folder=folder)
    optimizer = engine.on_disk(torch.optim.AdamW(engine.parameters(), lr=0.01))
    for number in range(2):
        engine.step(tied_inputs(number))
        optimizer.step()
    engine.save(out, optimizer)
    return [float(p.detach().double().sum()) for p in engine.parameters()]


def test_processes_over_gloo(tmp_path: Path):
    program = planned("dp2 pp2", "optimizer", "zero2").program
    found = []
    with LocalRanks(4) as ranks:
        for which in (program, with_disk(program)):
            (tmp_path / "program.json").write_text(which.model_dump_json(exclude_defaults=True))
            (tmp_path / "disk").mkdir(exist_ok=True)
            arguments = str(tmp_path / "program.json"), str(tmp_path / "disk"), str(tmp_path / "out")
            found.append(ranks.call(train_rank, *arguments, timeout=60))
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_it_computes_what_the_model_does(precision: str | None):
    plan = partition(
        Wide(32, 4),
        disk_topology(2),
        (torch.ones(4, 32),),
        precision=precision,
        constraints=Constraints(offload="optimizer+disk", dp=2, tp=1, pp=1),
    )
    assert plan.program.offload == ("optimizer", "disk")
    assert plan.verify(Wide(32, 4), (torch.ones(4, 32),)).ok
    run = run_local(plan, Wide(32, 4), (torch.ones(4, 32, dtype=getattr(torch, plan.program.inputs[0].dtype)),))
    assert run.grads.keys() == dict(Wide(32, 4).named_parameters()).keys()


def test_the_command_line_trains_such_plans(tmp_path: Path):
    plan = partition(
        Wide(32, 4), disk_topology(1), (torch.zeros(4, 32),), constraints=Constraints(offload="optimizer+disk")
    )
    command = [sys.executable, "-m", "partitioner.runtime", str(plan.save(tmp_path / "plan.json")), "--steps", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "no folder is given" in refused.stderr
    command += ["--offload-folder", str(tmp_path), "--checkpoints", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/step-0000000002/manifest.json").read_text())["optimizer"]


# --- what is in memory ------------------------------------------------------------------------------------------------

MEASURED = """
import pathlib, sys, threading, torch
from partitioner.runtime import windows
from partitioner.runtime.state.disk_offload import trim_allocator
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.program.program import Program
from partitioner.runtime.comm.thread_backend import ThreadWorld

windows.WINDOW = 2 << 20

def resident():
    lines = (line.split() for line in open("/proc/self/status") if line.startswith("Rss"))
    return sum(int(line[1]) for line in lines) / 1024

class Measured(torch.optim.AdamW):
    most = 0.0

    def step(self, closure=None):
        super().step(closure)
        Measured.most = max(Measured.most, resident())

folder = sys.argv[2]
program = Program.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
engine = Engine(program, communicator=ThreadWorld(1, "cpu").communicator(0), offload_folder=folder)
batch = (torch.ones(4, 512).to(getattr(torch, program.inputs[0].dtype)),)
engine.step(batch)
trim_allocator()
before = resident()
optimizer = engine.on_disk(Measured(engine.parameters()))
for _ in range(3):
    engine.step(batch)
    optimizer.step()

seen, done = [0.0], threading.Event()

def look():
    while not done.wait(0.002):
        seen.append(resident())

threading.Thread(target=look).start()
engine.save(folder + "/out", optimizer)
saved = max(seen)
seen.clear()
engine.load(folder + "/out", optimizer)
done.set()
print(before, Measured.most, saved, max([*seen, resident()]), sum(p.nbytes for p in engine.parameters()) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_is_resident_does_not_grow_with_the_states(precision: str, tmp_path: Path):
    """Parameters are of 48 MiB, states of 96; windows of 2 MiB take 6 with what is read ahead and written behind."""
    with torch.device("meta"):
        model = Wide(512, 48)
    program = partition(
        model,
        Topology.local(1),
        (torch.zeros(4, 512),),
        precision=precision,
        constraints=Constraints(offload="optimizer"),
    ).program
    found = {}
    for where, which in (("memory", program), ("disk", with_disk(program))):
        (tmp_path / "program.json").write_text(which.model_dump_json(exclude_defaults=True))
        command = [sys.executable, "-c", MEASURED, str(tmp_path / "program.json"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        before, most, saving, loading, parameters = map(float, done.stdout.split())
        assert 47 < parameters < 50
        found[where] = most - before, saving - before, loading - before
    assert min(found["memory"]) > 90, found
    assert max(found["disk"]) < 30, found


def mapped() -> float:
    """MiB of files that this process has mapped and in memory."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) for line in lines if line and line[0] in ("RssFile:", "RssShmem:")) / 1024


def test_who_reads_all_of_it_lets_go_of_it(tmp_path: Path):
    disk = Disk(tmp_path)
    parameters = [nn.Parameter(disk.empty((1 << 20,), torch.float32).fill_(1)) for _ in range(16)]
    disk.evict()
    before = mapped()
    consistency._hash_tensors([*parameters])
    assert mapped() - before < 16  # MiB, of 64
    assert sum(float(p.detach().sum()) for p in parameters) == 16 << 20
    assert mapped() - before > 60


def test_weights_are_what_was_stepped(tmp_path: Path):
    engine = alone(tmp_path, "bf16")
    step(engine, adam(engine))
    short = engine.state_dict()
    assert all(torch.equal(short[n], p.detach().bfloat16()) for n, p in engine.named_parameters())


def test_inference_has_nothing_there():
    made: Plan = partition(
        nn.Linear(8, 8).eval(),
        disk_topology(1),
        (torch.zeros(4, 8),),
        objective="infer",
        constraints=Constraints(offload="parameters+disk"),
    )
    assert made.program.offload == ("parameters",)
