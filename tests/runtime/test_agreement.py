"""Ranks that part: gradients that a script scaled by another factor on each, replicas that are not the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import AgreementError, BatchError, Engine, LocalRanks
from partitioner.runtime.engine.consistency import _hash_in_order
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.runtime_programs import BATCH, Net, net_inputs, program_of_net
from tests.helpers.zero_training import planned, tied_inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

MESHES: list[dict[str, Any]] = [
    {"pp": 2, "num_microbatches": 2},
    {"tp": 2},
    {"pp": 2, "tp": 2, "halves": True},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
]
PLANS = [*MESHES, {"dp": 2}, {"pp": 2, "tied": True}]


def trained(
    program: Program, clip: Callable[[Engine], Any], steps: int = 3, change: Callable[[Engine], Any] | None = None
) -> list[Any]:
    """What ends the training on each rank: an error, or nothing."""

    def work(communicator: Any) -> AgreementError | None:
        engine = Engine(program, Net(tied="head.weight" not in program.states), communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        try:
            for step in range(steps):
                optimizer.zero_grad()
                engine.step(net_inputs())
                clip(engine)
                optimizer.step()
                if step == 1 and change is not None:
                    change(engine)
        except AgreementError as error:
            return error
        return None

    return on_every_rank(program, work)


def torchs(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(engine.parameters(), 0.01)


@pytest.mark.parametrize("plan", MESHES, ids=str)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_that_each_rank_clipped_by_itself_are_refused(plan: dict[str, Any], precision: str | None):
    errors = trained(convert_precision(program_of_net(**plan), precision), torchs)
    assert all("call engine.clip_grad_norm_(max_norm)" in str(error) for error in errors)
    assert all("to a norm of at most 0.01" in str(error) for error in errors)


def test_one_rank_that_alone_was_clipped_is_told():
    norms = [0.0, 0.0]

    def clip(engine: Engine) -> None:
        grads = [p.grad for p in engine.parameters() if p.grad is not None]
        rank = engine.communicator.rank
        norms[rank] = float(nn.utils.get_total_norm(grads))
        engine.barrier()
        if norms[rank] == max(norms):
            nn.utils.clip_grads_with_norm_(engine.parameters(), sum(norms) / 2, torch.tensor(norms[rank]))

    with pytest.warns(UserWarning, match="sees the gradients of one rank only. Ignore this warning"):
        assert trained(program_of_net(pp=2), clip) == [None, None]


@pytest.mark.parametrize("clip", [lambda engine: engine.clip_grad_norm_(0.01), lambda engine: None, "value"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_other_training_agrees(plan: dict[str, Any], clip: Any):
    def by_value(engine: Engine) -> None:
        nn.utils.clip_grad_value_(engine.parameters(), 1e-3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = program_of_net(**plan)
        assert trained(program, by_value if clip == "value" else clip, 6) == [None] * program.world_size


def test_where_every_rank_has_all_gradients_torchs_own_clipping_is_right():
    assert trained(program_of_net(dp=2), torchs) == [None, None]


def elsewhere(engine: Engine, factor: float, name: str = "head.weight") -> None:
    if engine.communicator.rank == engine.program.world_size - 1:
        with torch.no_grad():
            dict(engine.named_parameters())[name].mul_(factor)


@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_replica_that_is_another_is_named(plan: dict[str, Any]):
    program = program_of_net(**plan)
    errors = trained(program, lambda engine: None, change=lambda engine: elsewhere(engine, 1.5))
    last = program.world_size - 1
    for error in errors:
        assert f"ranks {last - 1}, {last} should have equal values of head.weight, but they differ" in str(error)


def test_tied_parameters_are_replicas_too():
    program = program_of_net(pp=2, tied=True)
    errors = trained(program, lambda e: None, change=lambda e: elsewhere(e, 1.5, "first.weight"))
    assert all("ranks 0, 1 should have equal values of first.weight, but they differ" in str(error) for error in errors)


def test_a_difference_of_rounding_is_a_warning():
    with pytest.warns(UserWarning, match=r"but they differ: those of rank [01] deviate by about .*e-0[67] of the norm"):
        assert trained(program_of_net(dp=2), lambda e: None, change=lambda e: elsewhere(e, 1 + 1e-6)) == [None, None]


def over_gloo(program: str, clip: bool) -> str:
    engine = Engine(Program.model_validate_json(program))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    try:
        for step in range(3):
            engine.step(tied_inputs(step))
            torchs(engine) if clip else engine.clip_grad_norm_(0.01)
            optimizer.step()
    except AgreementError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_pieces_over_gloo(sharding: str):
    program = planned("dp4", sharding).program
    with LocalRanks(program.world_size) as ranks:
        told = ranks.call(over_gloo, program.model_dump_json(), True, timeout=240)
        assert all("torch.nn.utils.clip_grad_norm_ sees the gradients of one rank only" in text for text in told)
        assert ranks.call(over_gloo, program.model_dump_json(), False, timeout=240) == [""] * program.world_size


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("plan", [{"pp": 2, "num_microbatches": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_that_are_given_other_samples_are_refused(plan: dict[str, Any], local: bool):
    """Those of a generator of each rank's own, and the same ones in another order."""
    program = program_of_net(**plan)
    last = program.world_size - 1
    others = last - 1 if local else ", ".join(map(str, range(last)))  # with local=True those of one place on dp

    def work(communicator: Any) -> str:
        engine = Engine(program, Net(), communicator=communicator)

        def batch(step: int) -> dict[str, torch.Tensor]:
            given = net_inputs()
            if local:
                rows = engine.share.rows(BATCH)
                given = {n: x[rows.start : rows.stop] for n, x in given.items()}
            if step and communicator.rank == last:
                given = {n: x.flip(0) for n, x in given.items()}
            return given

        engine.step(batch(0), local=local)
        engine.step(batch(0), local=local)
        try:
            engine.step(batch(1), local=local)
        except BatchError as error:
            return str(error)
        return ""

    told = on_every_rank(program, work)
    if local and "pp" in plan:  # what only one rank reads is compared with nothing
        assert told == ["", ""]
    else:
        assert all(f"ranks {others} got other samples than ranks {last}" in text for text in told)


WORLDS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"dp": 2, "pp": 2, "tp": 2, "halves": True},
    {"tp": 2},
]


def refusals(program: Program, changed: Callable[[dict[str, torch.Tensor], int], Any], first: int = 0) -> list[str]:
    """What each rank is told of batches that are other ones on some ranks from step ``first`` on."""

    def work(communicator: Any) -> str:
        engine = Engine(program, Net(), communicator=communicator)
        try:
            for step in range(first + 2):
                engine.step(changed(net_inputs(), communicator.rank) if step >= first else net_inputs())
        except BatchError as error:
            return str(error)
        return ""

    return on_every_rank(program, work)


@pytest.mark.parametrize("plan", WORLDS, ids=str)
def test_other_global_batches_on_some_ranks_are_refused_before_the_first_step(plan: dict[str, Any]):
    """Of plain data parallelism too, where each rank reads another part, and would leave the rest unread."""
    program = program_of_net(**plan)

    def drawn(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return {**batch, "x": torch.randn(batch["x"].shape, generator=generator)}

    for text in refusals(program, drawn):
        assert "input 'x': ranks 0 got other samples than ranks 1" in text
        assert "step(batch, local=True), as partitioner.Loader does" in text and "before" not in text


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (lambda batch, rank: {n: x.roll(rank, 0) for n, x in batch.items()}, ["x", "target", "weight"]),
        (lambda batch, rank: {**batch, "target": batch["target"] * (1 + 1e-7 * rank)}, ["target"]),
        (lambda batch, rank: {**batch, "weight": batch["weight"].index_fill(0, torch.tensor([7]), rank)}, ["weight"]),
    ],
    ids=["another order", "rounding", "one number that one rank reads"],
)
def test_all_inputs_that_differ_are_named(changed: Any, names: list[str]):
    for text in refusals(program_of_net(dp=2), changed):
        assert f"input {names[0]!r}: ranks 0" in text
        assert [n for n in ("x", "target", "weight") if repr(n) in text] == names


@pytest.mark.parametrize("first", [1, 2, 4])
def test_later_steps_are_looked_at_now_and_then(first: int):
    def changed(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        return {n: x.roll(rank, 0) for n, x in batch.items()}

    assert all("The steps before may have" in text for text in refusals(program_of_net(dp=2), changed, first))


def test_what_each_rank_reads_alone_may_differ():
    """With ``local=True`` each place on dp has its own samples; and a large batch is hashed in parts."""
    program = program_of_net(dp=2)

    def work(communicator: Any) -> bool:
        engine = Engine(program, Net(), communicator=communicator)
        rows = engine.share.rows(BATCH)
        for _ in range(3):
            engine.step({n: x[rows.start : rows.stop] for n, x in net_inputs().items()}, local=True)
        return True

    assert on_every_rank(program, work) == [True, True]
    large = torch.arange(3_000_000, dtype=torch.float32)
    assert _hash_in_order(large) != _hash_in_order(large.roll(1 << 20)) != _hash_in_order(large.flip(0))
    assert _hash_in_order(large) == _hash_in_order(large.clone())
