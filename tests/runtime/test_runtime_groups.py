"""Collectives: threads and Gloo give what their definition says, on any dim and type; links keep their order."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner.runtime.comm.group import Communicator, SoloGroup
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.comm.torch_backend import GlooGroup, TorchCommunicator
from partitioner.runtime.errors import CommunicationError
from partitioner.runtime.execute.bind import _start_and_release_operand
from partitioner.runtime.launch.process_pool import LocalRanks
from partitioner.runtime.program.membership import PipelineEdge

RANKS = (0, 1)


def operand(rank: int, dtype: torch.dtype) -> Tensor:
    """A tensor that is not dense, another one on each rank."""
    return (torch.arange(32).reshape(4, 2, 4) * (rank + 1)).to(dtype).transpose(0, 2)


def collectives(communicator: Communicator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every collective on every dim."""
    communicator.prepare([RANKS], [PipelineEdge(0, 1, "F"), PipelineEdge(1, 0, "B"), PipelineEdge(0, 1, "B")])
    group = communicator.group(RANKS)
    x = operand(communicator.rank, dtype)
    found = {
        "sum": group.all_reduce(x.contiguous()).wait(),
        "max": group.all_reduce(x.contiguous(), maximum=True).wait(),
    }
    for dim in range(3):
        found[f"gather {dim}"] = group.all_gather(x, dim).wait()
        found[f"scatter {dim}"] = group.reduce_scatter(x, dim).wait()
        for other in range(3):
            found[f"exchange {dim} {other}"] = group.all_to_all(x, dim, other).wait()
    return found


def expected(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    parts = [operand(r, dtype) for r in RANKS]
    found = {"sum": parts[0] + parts[1], "max": torch.maximum(*parts)}
    for dim in range(3):
        found[f"gather {dim}"] = torch.cat(parts, dim)
        found[f"scatter {dim}"] = (parts[0] + parts[1]).chunk(2, dim)[rank]
        for other in range(3):
            found[f"exchange {dim} {other}"] = torch.cat([p.chunk(2, dim)[rank] for p in parts], other)
    return found


class Backend:
    """A backend of two ranks that hold the same; it remembers what it was given, as a thread of Gloo's may."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def wait(self) -> None:
        pass

    def alltoall_base(self, out: Tensor, parts: Tensor, *_: object) -> Backend:
        self.seen += [out, parts]
        out.copy_(parts[:1].expand_as(parts))
        return self

    def broadcast(self, parts: list[Tensor], how: Any) -> Backend:
        self.seen += parts
        parts[0].copy_(parts[0] if how.rootRank == 0 else self.seen[-2])
        return self


def held(tensors: list[Tensor]) -> list[bool]:
    return [t.untyped_storage().nbytes() > 0 for t in tensors]


@pytest.mark.parametrize("dim", [0, 1])
def test_what_a_collective_copied_is_gone_when_it_ends(dim: int):
    """Whoever refers to it; an operand that was sent as it is stays, and so does what the caller got."""
    backend, x = Backend(), torch.arange(16.0).reshape(4, 4)
    group = GlooGroup(backend)
    part = group.reduce_scatter(x, dim).wait()
    assert torch.equal(part, 2 * x.chunk(2, dim)[0])
    assert held(backend.seen) == [False, dim == 0]
    backend.seen.clear()
    exchanged = group.all_to_all(x, dim, dim).wait()
    assert torch.equal(exchanged, torch.cat([x.chunk(2, dim)[0]] * 2, dim))
    assert held(backend.seen) == [dim == 0, dim == 0]
    backend.seen.clear()
    gathered = group.all_gather(x, dim).wait()
    assert torch.equal(gathered, torch.cat([x, x], dim))
    assert held(backend.seen) == [dim == 0] * 2
    assert held([x, part, exchanged, gathered]) == [True] * 4


def test_an_operand_that_nobody_else_reads_goes_with_the_collective():
    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(
        _start_and_release_operand(lambda x: GlooGroup(Backend()).reduce_scatter(x, 0), x).wait(),
        2 * torch.arange(8.0).reshape(2, 4),
    )
    assert held([x]) == [False]
    x = torch.arange(4.0)
    assert torch.equal(
        _start_and_release_operand(lambda x: SoloGroup().reduce_scatter(x, 0), x).wait(), torch.arange(4.0)
    )


def in_order(communicator: Communicator) -> list[float]:
    """Rank 0 sends 0, 1, 2 on one channel and 10 on another; rank 1 receives the other channel's first."""
    communicator.prepare([RANKS], [PipelineEdge(0, 1, "F"), PipelineEdge(1, 0, "B"), PipelineEdge(0, 1, "B")])
    if communicator.rank == 0:
        works = [communicator.send(torch.tensor([float(i)]), 1, "F") for i in range(3)]
        works.append(communicator.send(torch.tensor([10.0]), 1, "B"))
        for work in works:
            work.wait()
        return []
    buffers = [torch.zeros(1) for _ in range(4)]
    works = [communicator.recv(b, 0, "F") for b in buffers[:3]]
    communicator.recv(buffers[3], 0, "B").wait()
    for work in reversed(works):
        work.wait()
    return [b.item() for b in buffers]


def on_threads(work: Callable[[Communicator], Any]) -> list[Any]:
    world = ThreadWorld(2, timeout=20)
    results: list[Any] = [None, None]
    threads = [threading.Thread(target=lambda r=r: results.__setitem__(r, work(world.communicator(r)))) for r in RANKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def collectives_on_gloo(dtype: torch.dtype) -> dict[str, Tensor]:
    return collectives(TorchCommunicator(2, torch.device("cpu")), dtype)


def in_order_on_gloo() -> list[float]:
    return in_order(TorchCommunicator(2, torch.device("cpu")))


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2, debug=True) as pool:
        yield pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_threads(dtype: torch.dtype):
    for rank, found in enumerate(on_threads(lambda c: collectives(c, dtype))):
        same(found, expected(rank, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_gloo(ranks: LocalRanks, dtype: torch.dtype):
    for rank, found in enumerate(ranks.call(collectives_on_gloo, dtype)):
        same(found, expected(rank, dtype))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_a_channel_keeps_its_order_and_waits_for_no_other(ranks: LocalRanks):
    assert on_threads(in_order)[1] == [0.0, 1.0, 2.0, 10.0]
    assert ranks.call(in_order_on_gloo)[1] == [0.0, 1.0, 2.0, 10.0]


def test_results_of_threads_share_no_memory():
    """A rank frees a result that it alone reads: the others must still have theirs."""
    found = on_threads(lambda c: collectives(c, torch.float32))
    for name in found[0]:
        first, second = (each[name].untyped_storage().data_ptr() for each in found)
        assert first != second, name


def test_threads_that_do_not_agree_are_told_both_sides():
    world = ThreadWorld(2, timeout=20)
    groups = [world.communicator(rank).group(RANKS) for rank in RANKS]
    groups[0].all_reduce(torch.zeros(2))
    with pytest.raises(CommunicationError, match=r"enters all_gather.*the others are in all_reduce.* of \[2\]"):
        groups[1].all_gather(torch.zeros(2), 0)


def test_a_failure_releases_those_that_wait():
    world = ThreadWorld(2, timeout=60)
    pending = world.communicator(0).group(RANKS).all_reduce(torch.zeros(2))
    threading.Timer(0.1, world.abort, ["rank 1 has failed"]).start()
    with pytest.raises(CommunicationError, match="rank 1 has failed"):
        pending.wait()


ALONE = """
import os, sys, torch, partitioner
from datetime import timedelta
from partitioner.runtime.comm.torch_backend import TorchCommunicator
partitioner.init_process_group("gloo", timedelta(seconds=3))
communicator = TorchCommunicator(2, torch.device("cpu"))
communicator.prepare([(0, 1)], [])
if os.environ["RANK"] == "1":
    sys.stdin.read()  # until the other one has given up
    os._exit(0)
try:
    communicator.barrier()
except RuntimeError as error:
    print("gave up:", error, flush=True)
os._exit(0)
"""


def test_groups_wait_as_long_as_the_process_group_does():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    settings = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE],
            env={**settings, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        told, _ = started[0].communicate(timeout=120)
        assert told.startswith("gave up:"), told
    finally:
        for process in started:
            process.kill()
            process.communicate()
