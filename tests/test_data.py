"""Batches by rank: only the samples that it reads, in an order that no mesh changes, gone on with under any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime import BatchError, CheckpointError, Engine, Loader, LocalRanks
from runtime.batch import own_values, share_of
from runtime.data import SampleOrder
from runtime.debug.nonfinite import NonFiniteError, check_finite
from runtime.program import Program
from tests.runtime_programs import BATCH, DIM, Net, net_inputs, program_of_net
from tests.test_runtime_state import on_every_rank

MESHES: list[dict[str, Any]] = [
    {},
    {"dp": 2, "num_microbatches": 2},
    {"pp": 2, "dp": 2, "num_microbatches": 2},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 4, "num_microbatches": 4},
]


class Rows:
    """Samples of ``Net``, each made of its index; remembers which were asked for."""

    def __init__(self, count: int = 5 * BATCH) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        x, target = torch.randn(2, DIM, generator=generator)
        return {"x": x, "target": target, "weight": torch.tensor(float(index % 3 != 0))}


def batch_of(indices: list[int]) -> dict[str, Tensor]:
    samples = [Rows()[i] for i in indices]
    return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


@given(st.integers(1, 30), st.integers(0, 2**40), st.booleans(), st.integers(0, 200), st.integers(0, 40))
def test_every_epoch_has_every_sample_once(count: int, seed: int, shuffle: bool, start: int, length: int):
    order = SampleOrder(count, seed, shuffle)
    stream = order.at(range(6 * count))
    for epoch in range(6):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == [*range(count)]
    start %= 5 * count
    places = range(start, min(start + length, 6 * count))
    assert SampleOrder(count, seed, shuffle).at(places) == stream[places.start : places.stop]


def test_epochs_and_seeds_differ():
    stream = SampleOrder(50, seed=1).at(range(100))
    assert stream[:50] != stream[50:]
    assert SampleOrder(50, seed=2).at(range(50)) not in (stream[:50], stream[50:])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_load_what_they_read_and_nothing_else(mesh: dict[str, Any]):
    """Together all samples of the global batch, in its order; nothing at all between the first stage and the last."""
    program = program_of_net(**mesh)
    datasets = [Rows() for _ in range(program.world_size)]

    def work(communicator: Any) -> list[Any]:
        engine = Engine(program, Net(), communicator=communicator)
        loader = Loader(datasets[communicator.rank], engine, seed=3)
        return [next(loader) for _ in range(7)]

    stream = SampleOrder(5 * BATCH, seed=3).at(range(7 * BATCH))
    batches = on_every_rank(program, work)
    for number in range(program.world_size):
        at, last = program.coordinates(number), len(program.stages) - 1
        each = BATCH // program.mesh.get("dp", 1)
        own = [i for b in range(7) for i in stream[b * BATCH + at["dp"] * each :][:each]]
        reads = at["pp"] in (0, last)
        assert datasets[number].asked == (own if reads else [])
        for k, batch in enumerate(batches[number]):
            expected = batch_of(own[k * each : (k + 1) * each]) if reads else {}
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[name], expected[name]) for name in batch)


def losses_and_gradients(engine: Engine, batch: Any, local: bool) -> list[Tensor]:
    loss = engine.step(batch, local=local)
    assert loss is not None
    return [loss.clone(), *(p.grad.clone() for p in engine.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_on_own_samples_is_the_step_on_the_whole_batch(mesh: dict[str, Any]):
    program, inputs = program_of_net(**mesh), net_inputs()

    def work(communicator: Any) -> bool:
        engine = Engine(program, Net(), communicator=communicator)
        own = {}
        for name, tensor in inputs.items():
            if name in engine.share.paths:
                rows = engine.share.rows(len(tensor))
                own[name] = tensor[rows.start : rows.stop]
        whole = losses_and_gradients(engine, inputs, False)
        local = losses_and_gradients(engine, own, True)
        return len(whole) > 1 and all(torch.equal(a, b) for a, b in zip(whole, local, strict=True))

    assert all(on_every_rank(program, work))


def test_another_number_of_samples_is_refused():
    program = program_of_net(dp=2)

    def work(communicator: Any) -> list[str]:
        engine = Engine(program, Net(), communicator=communicator)
        told = []
        for batch in (net_inputs(), {n: t[:3] for n, t in net_inputs().items()}, {}):
            with pytest.raises(BatchError) as error:
                engine.step(batch, local=True)
            told.append(str(error.value))
        return told

    for number, (whole, few, nothing) in enumerate(on_every_rank(program, work)):
        assert (
            f"expected shape [4, 8], got [8, 8]: this is the whole global batch; pass samples {4 * number} to" in whole
        )
        assert "expected shape [4, 8], got [3, 8]: with local=True every rank passes its own part" in few
        assert "is missing: expected a float32 tensor of shape [4, 8]" in nothing


def test_an_input_without_samples_is_given_whole():
    program = program_of_net(dp=2)
    inputs = tuple(i.model_copy(update={"batch_dim": None} if i.path == "x" else {}) for i in program.inputs)
    program = program.model_copy(update={"inputs": inputs})
    share = share_of(program.rank(1))
    own = {n: t if n == "x" else t[4:] for n, t in net_inputs().items()}
    for local, batch in ((True, own), (False, net_inputs())):
        values = own_values(program, share, batch, local)
        assert {n: len(t) for n, t in values.items()} == {"x": 8, "target": 4, "weight": 4}
    with pytest.raises(BatchError, match=r"\[8, 8\], got \[4, 8\]: the program reads this input whole"):
        own_values(program, share, own | {"x": own["x"][4:]}, True)


def test_a_nan_is_found_in_own_samples():
    program = program_of_net(dp=2)

    def work(communicator: Any) -> str:
        engine = Engine(program, Net(), communicator=communicator)
        rows = engine.share.rows(BATCH)
        own = {n: t[rows.start : rows.stop].clone() for n, t in net_inputs().items()}
        if communicator.rank == 1:
            own["x"][2, 3] = torch.nan
        engine.step(own, local=True)
        with pytest.raises(NonFiniteError) as error:
            check_finite(engine, own, local=True)
        return str(error.value)

    for told in on_every_rank(program, work):
        assert "rank 1" in told
        assert "input x holds a NaN" in told


def train(
    program: Program, folder: str | None, steps: int, workers: int = 0, batch_size: int | None = None
) -> tuple[list[float], dict[str, Any], list[int]]:
    """Losses of ``steps`` steps from the checkpoint in ``folder``, if there is one, and one is left there."""
    from runtime.communicator import TorchCommunicator

    communicator = TorchCommunicator(program.world_size, torch.device("cpu"))
    engine = Engine(program, Net(), communicator=communicator)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    loader = Loader(Rows(), engine, seed=5, num_workers=workers, batch_size=batch_size)
    if folder is not None and Path(folder).exists():
        engine.load(folder, optimizer, extra={"data": loader})
    losses = []
    before = torch.get_rng_state()
    for _ in range(steps):
        loss = engine.step(next(loader), local=True)
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state()), "loading draws nothing from the script's generator"
    if folder is not None:
        engine.save(folder, optimizer, extra={"data": loader})
    return losses, loader.state_dict(), list(getattr(loader.dataset, "asked", ()))


def judge(steps: int) -> list[float]:
    """The unmodified module on whole batches."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream, losses = SampleOrder(5 * BATCH, seed=5).at(range(steps * BATCH)), []
    for k in range(steps):
        loss = model(**batch_of(stream[k * BATCH : (k + 1) * BATCH]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_goes_on_at_the_next_sample_under_another_mesh(tmp_path: Path):
    """On real ranks, over the end of an epoch, in processes that load ahead."""
    folder, losses = str(tmp_path / "checkpoint"), []
    with LocalRanks(4) as ranks:
        for mesh, steps, workers in (
            ({"dp": 2, "pp": 2, "num_microbatches": 2}, 3, 0),
            ({"dp": 4}, 2, 1),
            ({"tp": 2, "dp": 2}, 2, 0),
        ):
            program = program_of_net(**mesh)
            done = ranks.call(train, program, folder, steps, workers, timeout=240)
            losses += done[0][0]
            assert all(part[:2] == done[0][:2] for part in done if part[0]), "all ranks agree"
            assert done[0][1]["samples"] == BATCH * len(losses), "what was loaded ahead does not count"
    assert losses == pytest.approx(judge(7), rel=1e-4)


def one_rank(dataset: Any, **options: Any) -> Loader:
    return Loader(dataset, Engine(program_of_net(), Net()), **options)


def test_it_ends_after_its_epochs_without_a_part_of_a_batch():
    loader = one_rank(Rows(2 * BATCH + 3), epochs=3)
    assert [next(iter(loader))["x"].shape[0] for _ in range(1)] == [BATCH]
    assert len([*loader]) == 3 * (2 * BATCH + 3) // BATCH - 1
    assert loader.epoch == 2
    state = loader.state_dict()
    with pytest.raises(StopIteration):
        next(loader)
    assert loader.state_dict() == state


def test_another_loop_after_the_end_is_refused_and_not_empty():
    loader = one_rank(Rows(2 * BATCH), epochs=1)
    start = loader.state_dict()
    assert len([*loader]) == 2
    with pytest.raises(BatchError, match="come to the end of its 1 epochs"):
        next(iter(loader))
    ended = loader.state_dict()
    loader.load_state_dict(start)
    assert len([*loader]) == 2, "a run that goes back goes on"
    finished = one_rank(Rows(2 * BATCH), epochs=1)
    finished.load_state_dict(ended)
    assert [*finished] == [], "a run that is over has nothing left to do"


def test_epochs_without_a_whole_batch_are_refused():
    with pytest.raises(BatchError, match=f"1 epochs of 3 samples hold no whole batch: expected at least {BATCH}"):
        one_rank(Rows(3), epochs=1)
    assert len([*one_rank(Rows(3), epochs=3)]) == 1


def test_its_state_is_of_one_dataset():
    loader = one_rank(Rows(), seed=9)
    first = [next(loader)["x"] for _ in range(3)]
    state = loader.state_dict()
    after = next(loader)["x"]
    other = one_rank(Rows(), seed=0)
    next(other)
    other.load_state_dict(state)
    assert torch.equal(next(other)["x"], after), "the seed is the state's, and what was loaded before is dropped"
    assert not torch.equal(first[0], after)
    with pytest.raises(CheckpointError, match="a dataset of 40 samples, this one has 41"):
        one_rank(Rows(41)).load_state_dict(state)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(BatchError, match="the dataset is empty"):
        one_rank(Rows(0))

    def work(communicator: Any) -> str:
        engine = Engine(program_of_net(dp=2), Net(), communicator=communicator)
        with pytest.raises(BatchError) as error:
            Loader(Rows(), engine, batch_size=7)
        return str(error.value)

    assert all("7 samples does not split over 2" in told for told in on_every_rank(program_of_net(dp=2), work))
