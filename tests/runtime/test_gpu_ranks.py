"""What ranks on GPUs do otherwise, as far as a machine without one can tell."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from partitioner import Constraints, Topology, partition
from partitioner.runtime.comm import rendezvous
from partitioner.runtime.engine import defaults
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.execute.transfers import place_early_receives
from partitioner.runtime.launch import cli
from partitioner.runtime.launch.local import run_threads
from partitioner.runtime.state import loss
from tests.helpers.instruction_words import line
from tests.helpers.models import CASES

pytestmark = pytest.mark.usefixtures("without_baselines")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As many GPUs as are set; which one is current."""
    seen = SimpleNamespace(count=8, current=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen.count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(seen, "current", index))
    return seen


def test_a_rank_has_the_gpu_of_its_place_or_the_only_one_that_it_sees(gpus: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert defaults.select_local_gpu() == torch.device("cuda", 3) and gpus.current == 3
    gpus.count = 1
    assert defaults.select_local_gpu() == torch.device("cuda", 0)
    gpus.count = 2
    with pytest.raises(LaunchError, match="local rank 3 has no GPU: torch sees 2 here"):
        defaults.select_local_gpu()


@pytest.mark.parametrize(
    ("served", "expected"), [(("cpu", "cuda"), "cuda:2"), (("cuda",), "cuda:2"), (("cpu",), "cpu")], ids=str
)
def test_the_device_is_what_the_process_group_serves(
    served: tuple[str, ...], expected: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
):
    """Also where the group was made without a name of a backend, and has one for each kind of device."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    group = SimpleNamespace(_device_types=[torch.device(kind) for kind in served])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    assert str(defaults.choose_default_device()) == expected
    gpus.count = 0
    assert str(defaults.choose_default_device()) == "cpu"


def test_a_device_without_a_number_is_the_current_one(gpus: Any):
    gpus.current = 5
    assert defaults.resolve_device("cuda") == torch.device("cuda", 5)
    assert defaults.resolve_device("cuda:1") == torch.device("cuda", 1) and gpus.current == 1
    assert defaults.resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "count", "visible", "expected"),
    [(8, 8, None, True), (4, 8, None, True), (8, 1, "3", True), (9, 8, None, False), (2, 1, None, False)],
)
def test_ranks_without_a_gpu_each_are_told_that_they_run_on_the_cpu(
    ranks: int,
    count: int,
    visible: str | None,
    expected: bool,
    gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    gpus.count = count
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cli._has_gpu() is expected
    assert ("the ranks run on the CPU" in capsys.readouterr().err) is not expected


def test_a_group_of_gpus_alone_says_how_long_ranks_on_the_cpu_wait(monkeypatch: pytest.MonkeyPatch):
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))

    def backend_of(device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError("No backend type associated with device type cpu")
        return backend

    group = SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=backend_of)
    monkeypatch.setattr(rendezvous.c10d, "_get_default_group", lambda: group)
    assert rendezvous.get_default_timeout(torch.device("cpu")) == timedelta(seconds=7)


def test_nothing_is_received_before_what_it_comes_of_is_computed():
    """On a GPU a receive is a kernel that waits: before the forward whose gradient it is, it may wait for ever."""
    assert place_early_receives(line("F0", "SEND_F0<1", "RECV_B0<1", "B0")) == {1: [2]}
    assert place_early_receives(line("F0", "F1", "RECV_B0<1", "B0")) == {1: [2]}


def test_the_loss_may_come_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch):
    """As on GPUs, where its receive would be a kernel that waits for the whole step."""
    case = CASES["llama"]
    model, inputs = case.build(), case.inputs(4)
    for dp in (1, 2):
        pins = Constraints(pp=2, dp=dp, tp=1, microbatch_size=1)
        plan = partition(model, Topology.local(2 * dp), inputs, loss=case.loss, constraints=pins)
        soon = run_threads(plan, model, inputs).loss
        made = loss.LossSum.__init__

        def late(self: loss.LossSum, *args: Any, made: Any = made) -> None:
            made(self, *args)
            self.late = True

        with monkeypatch.context() as patch:
            patch.setattr(loss.LossSum, "__init__", late)
            assert torch.equal(run_threads(plan, model, inputs).loss, soon)
