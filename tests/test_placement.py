"""Which rank runs on which device: by the links, the speed and the memory of every device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import runtime
from runtime import Engine, LaunchError, LocalRanks
from runtime.engine import placement_of
from runtime.groups import TorchCommunicator, processes_of
from tests.runtime_programs import Net, net_inputs, program_of_net
from tests.test_runtime_execute import check, reference

SCRAMBLED = (2, 0, 3, 1)


def ranks_of_processes(placement: tuple[int, ...]) -> tuple[int, int, int]:
    """What a process runs: its own number, its rank, and the sum of the processes of ranks 0 and 1."""
    communicator = TorchCommunicator(len(placement), torch.device("cpu"), placement=placement)
    total = torch.tensor([float(dist.get_rank())])
    if communicator.rank < 2:
        communicator.prepare([(0, 1)], [])
        communicator.group((0, 1)).all_reduce(total).wait()
    return dist.get_rank(), communicator.rank, int(total)


def whole_weights(program: runtime.Program, placement: tuple[int, ...]) -> int:
    """How many tensors a process gets of the whole state."""
    communicator = TorchCommunicator(len(placement), torch.device("cpu"), placement=placement)
    return len(Engine(program, None, communicator=communicator).state_dict(full=True))


def test_a_process_runs_the_rank_that_is_placed_on_its_device():
    with LocalRanks(4) as pool:
        assert pool.call(ranks_of_processes, SCRAMBLED) == [(0, 1, 2), (1, 3, 1), (2, 0, 2), (3, 2, 3)]
        # groups are between processes, so that a pool may run one placement after another
        assert pool.call(ranks_of_processes, (0, 1, 2, 3)) == [(0, 0, 1), (1, 1, 1), (2, 2, 2), (3, 3, 3)]
        # what the first process gathers is there, whatever its rank
        counts = pool.call(whole_weights, program_of_net(dp=2, tp=2), (3, 2, 0, 1))
        assert counts[0] > 0
        assert counts[1:] == [0, 0, 0]


@pytest.mark.parametrize("shape", [{"pp": 2, "tp": 2, "num_microbatches": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_scrambled_ranks_compute_what_the_module_does(shape: dict[str, int]):
    model, output = reference()
    plan = SimpleNamespace(program=program_of_net(**shape), devices=SCRAMBLED)
    check(runtime.run_local(plan, model, net_inputs(), timeout=120), model, output)


def test_the_plan_file_says_where_ranks_run(tmp_path: Path):
    program = json.loads(program_of_net(tp=2).model_dump_json(exclude_defaults=True))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"program": program, "devices": [1, 0]}))
    assert placement_of(path) == (1, 0)
    with LocalRanks(2) as pool:
        assert pool.call(engine_rank, str(path)) == [1, 0]


def engine_rank(path: str) -> int:
    return Engine(path, Net()).rank_program.rank


def test_processes_follow_the_devices_that_are_used():
    assert processes_of((), 3) == (0, 1, 2)
    assert processes_of((9, 4, 6), 3) == (2, 0, 1)
    with pytest.raises(LaunchError, match="places 2 ranks on the devices"):
        processes_of((1, 1), 2)
