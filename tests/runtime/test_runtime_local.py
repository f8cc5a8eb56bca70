"""Real processes over Gloo: the same numbers as one process, and a clean end whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from partitioner import BatchError, LaunchError, LocalRanks, RankError, RankTimeout, WeightsError, run_local
from partitioner.runtime.launch import forkserver
from partitioner.runtime.launch.forkserver import ForkServer
from partitioner.runtime.program.program import Program
from tests.helpers.net_runs import broken, check, infer_only, reference
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4, debug=True) as pool:
        yield pool


SHAPES: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"dp": 2},
    {"pp": 2, "num_microbatches": 2, "tied": True},
    {"pp": 2, "tp": 2, "num_microbatches": 2},
    {"dp": 2, "tp": 2, "checkpoint": True},
    {"pp": 4, "num_microbatches": 4, "halves": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_processes_compute_what_the_module_does(ranks: LocalRanks, shape: dict[str, Any]):
    model, output = reference(shape.get("tied", False))
    check(run_local(program_of_net(**shape), model, net_inputs(), ranks=ranks, timeout=120), model, output)


def test_ranks_of_their_own_come_and_go():
    model, output = reference()
    check(run_local(program_of_net(tp=2), model, net_inputs(), timeout=120), model, output)


def test_weights_may_be_a_file(ranks: LocalRanks, tmp_path: Path):
    model, output = reference()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    run = run_local(program_of_net(tp=2), tmp_path, net_inputs(), ranks=ranks)
    torch.testing.assert_close(run.loss, output["loss"])


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether the processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_rank_that_raises_takes_the_others_down_and_is_told():
    program = broken(infer_only(program_of_net(pp=2, num_microbatches=2)), 1)
    with LocalRanks(2) as pool:
        run_local(program_of_net(pp=2), Net(), net_inputs(), ranks=pool)
        pids = [child.pid for child in pool._children]
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            run_local(program, Net(), net_inputs(), ranks=pool, timeout=120)
        assert time.monotonic() - start < 60
        assert gone(pids)
        failure = caught.value.failure
        assert (failure.rank, failure.instruction, failure.call) == (1, "1F0", "layers.1")
        assert str(caught.value).splitlines()[-1].startswith("first cause: rank 1, instruction")
        model, output = reference()  # and the pool is usable again
        check(run_local(program_of_net(pp=2), model, net_inputs(), ranks=pool), model, output)


def without(program: Program, stage: int, op: str) -> Program:
    stages = list(program.stages)
    kept = tuple(i for i in stages[stage].instructions if i.op != op)
    stages[stage] = stages[stage].model_copy(update={"instructions": kept})
    return program.model_copy(update={"stages": tuple(stages)})


def test_ranks_that_wait_for_ever_are_ended_and_say_where_they_were():
    program = without(infer_only(program_of_net(pp=2)), 0, "SEND_F")
    with LocalRanks(2) as pool:
        run_local(program_of_net(pp=2), Net(), net_inputs(), ranks=pool)
        pids = [child.pid for child in pool._children]
        with pytest.raises(RankTimeout, match=r"(?s)did not finish within 6 s.*rank 1: at instruction \d+: 1RECV_F0"):
            run_local(program, Net(), net_inputs(), ranks=pool, timeout=6)
        assert gone(pids)


def test_a_rank_that_dies_is_told():
    with LocalRanks(2) as pool:
        run_local(program_of_net(pp=2), Net(), net_inputs(), ranks=pool)
        os.kill(pool._children[1].pid, 9)
        with pytest.raises(RankError, match="rank 1: ProcessDied: the process ended by signal 9"):
            run_local(program_of_net(pp=2), Net(), net_inputs(), ranks=pool, timeout=60)


def test_functions_of_the_script_itself_are_refused(ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "__module__", "__main__")
    with pytest.raises(LaunchError, match=r"check is defined in the main script.* move it"):
        ranks.call(check)


def test_a_server_that_still_imports_ends_at_once(capfd: pytest.CaptureFixture[str]):
    server = ForkServer()
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 2.0
    assert capfd.readouterr().err == ""


def is_imported(name: str) -> bool:
    return name in sys.modules


def test_the_modules_that_a_variable_names_are_imported_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forkserver, "_server", None)
    monkeypatch.setenv("PARTITIONER_PRELOAD", "wave,no_such_module")
    with LocalRanks(2) as pool:
        server = forkserver.fork_server()
        assert pool.call(is_imported, "wave") == [True, True]
        assert pool.call(is_imported, "sndhdr") == [False, False]
    server.close()


def test_a_pool_that_is_too_small_is_refused(ranks: LocalRanks):
    with pytest.raises(LaunchError, match="for 8 ranks, but the pool has 4"):
        run_local(program_of_net(pp=2, tp=2, dp=2), Net(), net_inputs(), ranks=ranks)


def test_what_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(WeightsError, match=r"layers.2.up.weight: expected parameter \[16, 8\], got nothing"):
        run_local(program_of_net(num_layers=3), Net(num_layers=2), net_inputs())
    with pytest.raises(BatchError, match="another batch size than planned"):
        run_local(program_of_net(), Net(), {k: v[:2] for k, v in net_inputs().items()})
