"""Shardings that are found ahead in a second process: the same plans, whatever becomes of that process."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from partitioner import Constraints, Topology, background, partition, prepare
from partitioner.background import (
    BackgroundWorker,
    ForkedWorker,
    Future,
    SharedTasks,
    allocate_shared_array,
    can_help,
    check_threads,
)
from partitioner.candidate import MeshCandidate
from partitioner.errors import CapacityError
from partitioner.solve.evaluate import prefetch
from partitioner.solve.evaluate.evaluator import CandidateEvaluator
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.sharded_bounds import ShardedBounds
from partitioner.solve.search import attempts
from partitioner.validate import precision_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a second process is a fork, which is not there")


@pytest.fixture(autouse=True)
def _second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests need the second process, which parallel workers of the other tests do without (conftest.py)."""
    for module in (prefetch, background):
        monkeypatch.setattr(module, "can_help", can_help)


def test_each_is_done_once_and_everything_arrives() -> None:
    times = allocate_shared_array(40, np.int64)

    def work(key: int) -> str:
        times[key] += 1
        time.sleep(0.002)
        return f"{key} " * 3000

    ahead = BackgroundWorker(range(40), work)
    got, own = {}, 0
    for key in range(40):
        while ahead.works_on(key) and (other := ahead.claim(range(40))) is not None:
            got[other] = work(other)
            own += 1
        if key not in got:
            found = ahead.take(key)
            own += found is None
            got[key] = work(key) if found is None else found
    ahead.end()
    assert got == {key: f"{key} " * 3000 for key in range(40)}
    assert 0 < own < 40
    assert times.min() == 1 and times.max() <= 2, "done twice only where both began at once"


def test_what_is_wished_for_comes_first() -> None:
    done, goes = allocate_shared_array(8, np.int64), allocate_shared_array(1, np.int8)

    def work(key: int) -> int:
        while not goes[0]:
            time.sleep(0.001)
        done[key] = done.max() + 1
        return key

    ahead = BackgroundWorker(range(8), work)
    while not ahead.works_on(0):
        time.sleep(0.001)
    ahead.wish(6)
    ahead.wish(3)
    ahead.wish(6)
    ahead.wish(9)
    assert ahead.claim({3, 4}) == 3
    goes[0] = 1
    while done.max() < 7:
        time.sleep(0.001)
    ahead.end()
    assert sorted(range(8), key=lambda key: done[key]) == [3, 0, 6, 1, 2, 4, 5, 7], "3 is left to the first process"


def test_a_paused_process_begins_nothing() -> None:
    done = allocate_shared_array(3, np.int64)

    def work(key: int) -> int:
        while key == 0 and not done[1]:
            time.sleep(0.001)
        done[key] += 1
        return key

    ahead = BackgroundWorker(range(3), work)
    while not ahead.works_on(0):
        time.sleep(0.001)
    ahead.pause(True)
    assert ahead.claim({1}) == 1
    done[1] = 1
    assert ahead.take(0) == 0, "what it had begun is done"
    time.sleep(0.05)
    assert not done[2] and not ahead.works_on(2)
    ahead.pause(False)
    while not done[2]:
        time.sleep(0.001)
    assert ahead.take(2) == 2
    ahead.end()


def test_what_was_not_said_before_is_for_the_caller() -> None:
    ahead = BackgroundWorker([1, 2], lambda key: key)
    assert ahead.take(3) is None
    ahead.end()
    assert ahead.take(1) is None and not ahead.works_on(2)


@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
def test_a_process_that_fails_leaves_the_work_to_the_first(how: str) -> None:
    began = allocate_shared_array(1, np.int8)

    def work(key: int) -> int:
        if key == 1:
            return 10
        began[0] = 1
        if how == "raises":
            raise ValueError(key)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600.0)
        return 20

    ahead = BackgroundWorker([1, 2, 3], work, patience_s=0.3)
    while not began[0]:
        time.sleep(0.001)
    start = time.perf_counter()
    assert ahead.take(2) is None
    assert time.perf_counter() - start < 60.0
    assert ahead.take(1) == 10, "what it had done stays"
    ahead.end()


@pytest.mark.parametrize(("module", "name"), [(os, "fork"), (tempfile, "TemporaryFile")])
def test_without_room_for_it_the_first_process_does_it_all(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Any:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(module, name, none)
    ahead = BackgroundWorker([1, 2], lambda key: key)
    assert ahead.take(1) is None and ahead.claim({2}) == 2 and ahead.claim({1, 2}) is None
    ahead.end()


def test_one_thing_is_done_later() -> None:
    with Future(os.getpid) as later:
        while later._aside is not None and later._aside._marks[0] == 0:
            time.sleep(0.001)
        assert (later.result() == os.getpid()) is not can_help()
    with Future(os.getpid, worth_it=False) as later:
        assert later.result() == os.getpid()
    with pytest.raises(ZeroDivisionError), Future(lambda: 1 // 0) as later:
        later.result()


@pytest.mark.parametrize("how", ["works", "raises", "dies"])
def test_tasks_of_two_processes_have_the_results_of_one(how: str) -> None:
    """The first process computes the first task, and what the second has not begun; only the second packs."""
    began, first = allocate_shared_array(1, np.int8), os.getpid()

    def work(key: int) -> tuple[int, bool]:
        began[0] |= os.getpid() != first
        if os.getpid() != first and how != "works" and key == 3:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(key)
        time.sleep(0.01)
        return 2 * key, os.getpid() == first

    tasks = SharedTasks(range(8), work, lambda found: [*found], lambda packed: (packed[0], packed[1]), most_s=60.0)
    while can_help() and not began[0]:
        time.sleep(0.001)
    found = [tasks.result(key) for key in range(8)]
    tasks.end()
    assert [value for value, _ in found] == [0, 2, 4, 6, 8, 10, 12, 14]
    own = [is_own for _, is_own in found]
    assert own[0] and (how != "works" or not can_help() or own.count(False) >= 1)
    assert how == "works" or own[3]
    assert tasks.result(5) == (10, True), "after the end the first process computes it"


@pytest.mark.parametrize("error", [CapacityError("3 GiB too much", stage=2, missing_bytes=3, at_least=True)])
def test_errors_arrive_whole(error: CapacityError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error) and str(arrived) == str(error) and vars(arrived) == vars(error)


def test_a_helper_has_no_exact_solver() -> None:
    told = allocate_shared_array(1, np.int8)

    def work() -> None:
        try:
            check_threads()
        except RuntimeError:
            told[0] = 1

    check_threads()
    helper = ForkedWorker(work)
    helper.end(time.perf_counter() + 60.0)
    assert told[0] == 1


@pytest.mark.skipif(not can_help(), reason="needs a second processor")
def test_bounds_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a problem that the second process solves; of one that the first solves, they are for the first."""
    model, inputs = _llama()
    prepared = prepare(model, inputs).at(None)
    work = Job(*prepared, Topology.preset("dgx-h100"), Constraints(), True, "adamw", precision_of(prepared[0], None))
    candidates = [MeshCandidate(pp=2, dp=4 // tp, tp=tp, microbatch_size=2) for tp in (2, 4)]
    alone = ShardedBounds(CandidateEvaluator(work))
    expected = [alone.bound_blocks(candidate, 2) for candidate in candidates]
    assert None not in expected and expected[0] != expected[1]

    monkeypatch.setattr(prefetch, "_WORTH_S", -1.0)
    helped = ShardedBounds(CandidateEvaluator(work))
    helped.prefetch([(candidate, 2) for candidate in candidates], [(candidate, 2) for candidate in candidates])
    first = replace(candidates[0], dp=4, tp=1)
    helped.bound_blocks(first, 2)  # which was not expected: the second process starts
    ahead = helped.locals.ahead._worker
    assert ahead is not None and len(ahead._keys) == 4
    while ahead._helper is not None and ahead._helper.runs:
        time.sleep(0.001)
    own: list[MeshCandidate] = []

    def counted(bounds: ShardedBounds, candidate: MeshCandidate, *args: Any) -> Any:
        own.append(candidate)
        return floor(bounds, candidate, *args)

    floor = ShardedBounds._compute_block_bound
    monkeypatch.setattr(ShardedBounds, "_compute_block_bound", counted)
    assert [helped.bound_blocks(candidate, 2) for candidate in candidates] == expected
    assert not own
    helped.bound_blocks(replace(candidates[1], microbatch_size=1), 1)
    assert [candidate.microbatch_size for candidate in own] == [1]
    helped.locals.ahead.end()


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128
    )
    return LlamaForCausalLM(config), _ids(64)


def _mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        vocab_size=128,
    )
    return MixtralForCausalLM(config), _ids(16)


def _ids(length: int) -> dict[str, Tensor]:
    ids = torch.arange(16 * length).reshape(16, length) % 128
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("made", "constraints"),
    [
        pytest.param(_llama, {}, id="dense"),
        pytest.param(_llama, {"cp": 2}, id="sequence", marks=pytest.mark.slow),
        pytest.param(_mixtral, {}, id="experts", marks=pytest.mark.slow),
    ],
)
def test_plans_are_the_same(
    made: Any, constraints: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shardings are found ahead, and candidates are planned by two processes."""
    model, inputs = made()
    prepared = prepare(model, inputs)
    topology = Topology.preset("dgx-a100", nodes=1)
    plans, taken, unpacked = [], [], []

    def counted(ahead: BackgroundWorker[Any, Any], key: Any) -> Any:
        found = take(ahead, key)
        taken.append(found)
        return found

    take = BackgroundWorker.take
    monkeypatch.setattr(BackgroundWorker, "take", counted)

    def unpack(evaluator: CandidateEvaluator, packed: Any) -> Any:
        unpacked.append(packed.values["candidate"])
        return unpack_plan(evaluator, packed)

    unpack_plan = CandidateEvaluator.unpack
    monkeypatch.setattr(CandidateEvaluator, "unpack", unpack)
    for helped in (False, True):
        monkeypatch.setattr(prefetch, "_WORTH_S", -1.0)
        monkeypatch.setattr(attempts, "_WORTH_S", -1.0)
        for module in (prefetch, background):
            monkeypatch.setattr(module, "can_help", lambda helped=helped: helped)
        plans.append(partition(prepared, topology, constraints=Constraints(**constraints)))
        assert helped or not (taken or unpacked)
    assert any(taken), "nothing was found ahead"
    assert unpacked, "the second process planned no candidate"
    first, second = plans
    assert first.certificate == second.certificate
    saved = [plan.save(tmp_path / f"{place}.json").read_bytes() for place, plan in enumerate(plans)]
    assert saved[0] == saved[1]
