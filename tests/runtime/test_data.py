"""Batches by rank: only the samples that it reads, in an order that no mesh changes, gone on with under any mesh."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from partitioner import BatchError, CheckpointError, Checkpoints, Engine, Loader, LocalRanks
from partitioner.runtime.engine.batches import convert_rank_batch, get_share
from partitioner.runtime.engine.data_loader import SampleOrder
from partitioner.runtime.observe.nonfinite import NonFiniteError, check_finite
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.runtime_programs import BATCH, DIM, Net, net_inputs, program_of_net

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
    stream = order.get_indices(range(6 * count))
    for epoch in range(6):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == [*range(count)]
    start %= 5 * count
    places = range(start, min(start + length, 6 * count))
    assert SampleOrder(count, seed, shuffle).get_indices(places) == stream[places.start : places.stop]


def test_epochs_and_seeds_differ():
    stream = SampleOrder(50, seed=1).get_indices(range(100))
    assert stream[:50] != stream[50:]
    assert SampleOrder(50, seed=2).get_indices(range(50)) not in (stream[:50], stream[50:])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_load_what_they_read_and_nothing_else(mesh: dict[str, Any]):
    """Together all samples of the global batch, in its order; nothing at all between the first stage and the last."""
    program = program_of_net(**mesh)
    datasets = [Rows() for _ in range(program.world_size)]

    def work(communicator: Any) -> list[Any]:
        engine = Engine(program, Net(), communicator=communicator)
        loader = Loader(datasets[communicator.rank], engine, seed=3)
        return [next(loader) for _ in range(7)]

    stream = SampleOrder(5 * BATCH, seed=3).get_indices(range(7 * BATCH))
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


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # torchdata's own
def test_the_position_of_a_stateful_data_loader_is_in_checkpoints(tmp_path: Path):
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def train_on(folder: Path, steps: int) -> list[float]:
        torch.manual_seed(0)
        engine = Engine(program_of_net(), Net())
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        loader = module.StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True)
        checkpoints = Checkpoints(folder, engine, optimizer, every=1, behind=False, extra={"data": loader})
        checkpoints.restore()
        losses = []
        for batch in itertools.islice(loader, steps):
            losses.append(float(engine.step(batch)))  # type: ignore[arg-type]
            optimizer.step()
            checkpoints.after_step()
        return losses

    whole = train_on(tmp_path / "whole", 5)
    assert len({*whole}) == 5
    assert train_on(tmp_path / "parts", 3) + train_on(tmp_path / "parts", 5) == whole


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
            "expected shape [4, 8], got [8, 8]: this is the whole global batch, but local=True expects the "
            f"rank's own part: pass samples {4 * number} to" in whole
        )
        assert "expected shape [4, 8], got [3, 8]: with local=True every rank passes its own part" in few
        assert "is missing: expected a float32 tensor of shape [4, 8]" in nothing


def test_an_input_without_samples_is_given_whole():
    program = program_of_net(dp=2)
    inputs = tuple(i.model_copy(update={"batch_dim": None} if i.path == "x" else {}) for i in program.inputs)
    program = program.model_copy(update={"inputs": inputs})
    share = get_share(program.rank(1))
    own = {n: t if n == "x" else t[4:] for n, t in net_inputs().items()}
    for local, batch in ((True, own), (False, net_inputs())):
        values = convert_rank_batch(program, share, batch, local)
        assert {n: len(t) for n, t in values.items()} == {"x": 8, "target": 4, "weight": 4}
    with pytest.raises(BatchError, match=r"\[8, 8\], got \[4, 8\]: this input is not split over ranks"):
        convert_rank_batch(program, share, own | {"x": own["x"][4:]}, True)


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
    from partitioner.runtime.comm.torch_backend import TorchCommunicator

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
    stream, losses = SampleOrder(5 * BATCH, seed=5).get_indices(range(steps * BATCH)), []
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


def test_its_length_is_the_number_of_batches():
    """Of all epochs, or of one if there is no end; wherever the loader is."""
    loader = one_rank(Rows(), epochs=3)
    assert len(loader) == len([*one_rank(Rows(), epochs=3)])
    next(loader)
    assert len(loader) == 3 * len(Rows()) // loader.batch_size
    assert len(one_rank(Rows())) == -(-len(Rows()) // loader.batch_size)


def test_another_loop_after_the_end_is_refused_and_not_empty():
    loader = one_rank(Rows(2 * BATCH), epochs=1)
    start = loader.state_dict()
    assert len([*loader]) == 2
    with pytest.raises(BatchError, match="at the end of its 1 epochs"):
        next(iter(loader))
    ended = loader.state_dict()
    loader.load_state_dict(start)
    assert len([*loader]) == 2, "a run that goes back goes on"
    finished = one_rank(Rows(2 * BATCH), epochs=1)
    finished.load_state_dict(ended)
    assert [*finished] == [], "a run that is over has nothing left to do"


def test_epochs_without_a_whole_batch_are_refused():
    with pytest.raises(BatchError, match=f"1 epochs of 3 samples are less than one batch: expected at least {BATCH}"):
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
    with pytest.raises(CheckpointError, match="a dataset of 40 samples, but this run has 41"):
        one_rank(Rows(41)).load_state_dict(state)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(BatchError, match="the dataset is empty"):
        one_rank(Rows(0))

    def work(communicator: Any) -> str:
        engine = Engine(program_of_net(dp=2), Net(), communicator=communicator)
        with pytest.raises(BatchError) as error:
            Loader(Rows(), engine, batch_size=7)
        return str(error.value)

    assert all("7 samples is not divisible by 2" in told for told in on_every_rank(program_of_net(dp=2), work))


class Stream(IterableDataset[dict[str, Tensor]]):
    """The samples of ``Rows`` one after the other, without a length; in each epoch from another one on."""

    def __init__(self, count: int = 5 * BATCH) -> None:
        self.count = count
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch

    def __iter__(self) -> Any:
        return (Rows()[(i + self.first) % self.count] for i in range(self.count))


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Plain:
    """No dataset of torch's: anything that can be iterated over again."""

    def __iter__(self) -> Any:
        return iter(Stream())


def in_stream(places: range, count: int) -> list[int]:
    """The samples of ``Stream`` at ``places``."""
    return [(p % count + p // count) % count for p in places]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("made", [Stream, Sized])
def test_ranks_have_their_rows_of_a_stream(mesh: dict[str, Any], made: type[Stream]):
    """Over the ends of epochs, and after a restart."""
    program, count = program_of_net(**mesh), 3 * BATCH - 2
    state: dict[str, Any] = {}

    def work(communicator: Any, start: int) -> list[Any]:
        loader = Loader(made(count), Engine(program, Net(), communicator=communicator))
        if start:
            loader.load_state_dict(dict(state))
        batches = [next(loader) for _ in range(4)]
        state.update(loader.state_dict() if not start else {})
        return batches

    for start in (0, 4):
        batches = on_every_rank(program, lambda c, start=start: work(c, start))
        for number in range(program.world_size):
            at, each = program.coordinates(number), BATCH // program.mesh.get("dp", 1)
            for k, batch in enumerate(batches[number]):
                begin = (start + k) * BATCH + at["dp"] * each
                own = in_stream(range(begin, begin + each), count)
                expected = batch_of(own) if at["pp"] in (0, len(program.stages) - 1) else {}
                assert batch.keys() == expected.keys()
                assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert state["samples"] == 4 * BATCH


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 4, "num_microbatches": 4}], ids=str)
@pytest.mark.parametrize("made", [Stream, Sized])
def test_all_ranks_find_the_end_of_a_stream_of_any_length(mesh: dict[str, Any], made: type[Stream]):
    """Those that read no inputs too."""
    program = program_of_net(**mesh)

    def work(communicator: Any) -> int:
        loader = Loader(made(2 * BATCH + 3), Engine(program, Net(), communicator=communicator), epochs=3)
        number = len([*loader])
        with pytest.raises(BatchError, match="at the end of its 3 epochs"):
            iter(loader)
        return number

    assert on_every_rank(program, work) == [3 * (2 * BATCH + 3) // BATCH] * program.world_size


@pytest.mark.parametrize(
    "made", [Stream, Sized, Plain, lambda: ChainDataset([Stream()])], ids=["iterable", "sized", "plain", "chained"]
)
def test_one_worker_may_read_ahead(made: Any):
    loaders = [one_rank(made(), num_workers=number, collate=list) for number in (0, 1)]
    for _ in range(7):
        here, there = (next(loader) for loader in loaders)
        assert len(here) == BATCH
        assert all(torch.equal(a[n], b[n]) for a, b in zip(here, there, strict=True) for n in a)
    assert loaders[0].state_dict() == loaders[1].state_dict()


def test_training_on_a_stream_goes_on_where_it_was():
    def losses(loader: Loader, number: int) -> list[float]:
        return [float(engine.step(next(loader), local=True)) for _ in range(number)]  # type: ignore[arg-type]

    engine = Engine(program_of_net(), Net())
    expected = losses(one_rank(Stream()), 7)
    first, second = one_rank(Stream()), one_rank(Stream(), num_workers=1)
    found = losses(first, 4)
    second.load_state_dict(first.state_dict())
    assert found + losses(second, 3) == expected


class Short(Sized):
    def __len__(self) -> int:
        return self.count + 1


class Long(Sized):
    def __len__(self) -> int:
        return self.count - 1


class Once(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def __iter__(self) -> Any:
        self.left -= 1
        return iter([Rows()[i] for i in range(BATCH)] if self.left >= 0 else [])


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "told"),
    [
        (Stream(), {"shuffle": True}, "shuffle=True is not possible for a stream, which has its own order"),
        (Stream(), {"num_workers": 2}, "num_workers=2 of a stream.*pass num_workers=1"),
        (Sized(3), {"epochs": 1}, f"1 epochs of 3 samples are less than one batch: expected at least {BATCH}"),
        ((i for i in range(9)), {}, r"is an iterator \(generator\), which can be read only once"),
        (DataLoader(Rows()), {}, "is a DataLoader, which itself creates batches"),  # type: ignore[arg-type]
        (NoLength(), {}, "a NoLength, has __getitem__ and no __len__"),
        (3, {}, "a int, has neither __getitem__ nor __iter__"),
    ],
)
def test_what_cannot_be_read_is_refused_when_the_loader_is_made(dataset: Any, options: dict[str, Any], told: str):
    with pytest.raises(BatchError, match=told):
        one_rank(dataset, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("made", "options", "told"),
    [
        (lambda: Stream(3), {"epochs": 1}, "1 epochs of the stream are less than one batch"),
        (lambda: Stream(0), {}, r"gave no samples in epoch 0 \(from 0\)"),
        (Once, {}, r"gave no samples in epoch 1 \(from 0\).*create its iterator in __iter__"),
        (lambda: Short(BATCH), {}, "says that it has 9 samples, but gave 8 in epoch 0"),
        (lambda: Long(BATCH), {}, "says that it has 7 samples, but gave more in epoch 0"),
    ],
)
def test_streams_that_are_not_what_they_say_are_refused(
    made: Any, options: dict[str, Any], told: str, num_workers: int
):
    loader = one_rank(made(), num_workers=num_workers, **options)
    with pytest.raises(BatchError, match=told):
        list(itertools.islice(loader, 3))


def test_the_state_of_a_dataset_is_none_of_a_stream():
    with pytest.raises(
        CheckpointError, match="read a dataset of 40 samples, but this run has a stream of unknown length"
    ):
        one_rank(Stream()).load_state_dict(one_rank(Rows()).state_dict())
    with pytest.raises(CheckpointError, match="has read a shuffled dataset, but the dataset of this run is a stream"):
        one_rank(Sized()).load_state_dict(one_rank(Rows()).state_dict())
    with pytest.raises(BatchError, match="a stream whose length is not known"):
        assert one_rank(Stream()).epoch == 0
    assert one_rank(Sized()).epoch == 0
