"""Batches for an engine: every rank loads only the samples that it reads, and the position in the data can be resumed.

    loader = partitioner.Loader(dataset, engine, seed=0, num_workers=4)
    checkpoints = partitioner.Checkpoints("checkpoints/", engine, optimizer, every=500, extra={"data": loader})
    checkpoints.restore()
    for batch in loader:
        loss = engine.step(batch, local=True)

The order of samples depends only on the seed and not on the ranks. A run that resumes under another plan, even with
another number of data-parallel ranks or another global batch, continues with the next sample. This also holds for a
stream, which defines its own order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate

from partitioner.runtime.engine.batches import count_tokens_and_samples
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import BatchError, CheckpointError


class Samples(Protocol):
    """Interface of a map-style dataset of ``torch.utils.data``. A sample is, for example, a dict of input name ->
    tensor.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleOrder:
    """The endless order in which samples are read, epoch after epoch. If ``shuffle`` is true, each epoch has its own
    permutation, of which one is stored in memory, or two if a range of samples crosses an epoch's end: 8 bytes per
    sample.

        >>> SampleOrder(5, seed=0, shuffle=False).get_indices(range(3, 8))
        [3, 4, 0, 1, 2]
    """

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def get_indices(self, places: range) -> list[int]:
        """Return the dataset indices of the samples at the consecutive positions ``places``, counted from 0 at the
        start of the first epoch.
        """
        epochs = range(places.start // self.num_samples, -(-places.stop // self.num_samples)) if places else range(0)
        self._epochs = {e: self._order_epoch(e) for e in epochs} or self._epochs
        return [int(self._epochs[p // self.num_samples][p % self.num_samples]) for p in places]

    def _order_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the dataset indices of all samples in the order of epoch number ``epoch`` (from 0)."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        if not self.shuffle:
            return np.arange(self.num_samples)
        # seeded with both numbers: torch's generator takes 32 bits, and seed + epoch would equal another seed's epoch
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)


class Loader:
    """An iterator of this rank's parts of global batches, for ``engine.step(batch, local=True)``.

    Args:
        dataset: all samples, the same on all ranks. If it has ``__len__`` and ``__getitem__``, only the samples that
            this rank reads are requested, and a pipeline stage that does not read inputs gets empty batches. Otherwise
            it is a stream (an ``IterableDataset``), each iteration of which returns the same samples in the same order;
            this rank reads all of it and keeps its own samples, and a resumed run reads the earlier samples again.
        engine: the engine, which determines the samples that this rank reads, and the size of a global batch.
        seed: seed of the order of samples; not negative.
        shuffle: whether every epoch has its own random order, instead of the dataset's; on by default. Streams keep
            their own order.
        epochs: number of epochs, after which the loader ends, without an incomplete last batch; ``None``: it never
            ends. At the start of an epoch, ``set_epoch`` of a stream is called with the epoch's number, if the stream
            has this method.
        collate: function that makes a batch of a list of samples; torch's ``default_collate`` by default.
        num_workers: number of processes that load ahead; 0: this process loads when a batch is requested. At most one
            process reads a stream.
        batch_size: number of samples in a global batch, if it cannot be derived from the planned inputs.

    The state (``state_dict``, for ``Checkpoints(extra={"data": loader})``) is the number of samples in the batches that
    the loader has returned. Samples that workers have loaded ahead do not count. Random augmentations should be seeded
    by the sample's index, because the state of a worker's generator is lost.

    Raise :class:`BatchError` if the dataset has no sample or no whole batch, or can neither be indexed nor iterated
    over; if the size of the batch is not known, or is not divisible over ``dp``; and if a loop is started after the
    loader has ended.
    """

    def __init__(
        self,
        dataset: Samples | Iterable[Any],
        engine: Engine,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        batch_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.share = engine.share
        self.epochs = epochs
        self.batch_size = _get_global_batch(engine) if batch_size is None else batch_size
        self.samples = 0
        self.num_samples, self.is_stream = _count_samples(dataset), _is_stream(dataset)
        if self.is_stream:
            _check_stream(shuffle, num_workers)
        if self.num_samples == 0:
            raise BatchError("the dataset is empty: expected at least one sample")
        if self.batch_size % self.share.count:
            raise BatchError(
                f"a global batch of {self.batch_size} samples is not divisible by {self.share.count} data-parallel "
                "ranks"
                f"; pass batch_size= a multiple of {self.share.count}"
            )
        # a stream has its own order, and perhaps an unknown length
        self.order = SampleOrder(self.num_samples or 0, seed, not self.is_stream and shuffle is not False)
        if self._has_ended(0):
            raise _make_too_short_error(self)
        self._over = False  # a loop has come to the end
        self._ahead: Iterator[Any] | None = None
        self._collate = collate
        self._num_workers = num_workers
        self._pin_memory = engine.device.type == "cuda"

    def __iter__(self) -> Self:
        """Return the loader itself. Raise :class:`BatchError` if all epochs have ended."""
        if self._over:
            raise BatchError(
                f"the loader is at the end of its {self.epochs} epochs, so another loop has no batches: pass the "
                "epochs of the whole run as epochs= and use one loop (loader.epoch is the current epoch), or create "
                "another loader with another seed"
            )
        return self

    def __len__(self) -> int:
        """Return the number of global batches: of all epochs if ``epochs`` was given, otherwise of one epoch, rounded
        up. The number does not depend on the position. Raise :class:`TypeError` for a stream of unknown length.
        """
        if self.num_samples is None:
            raise TypeError("len() of a loader of a stream whose length is not known: give its dataset a __len__")
        if self.epochs is None:
            return -(-self.num_samples // self.batch_size)
        return self.epochs * self.num_samples // self.batch_size

    def __next__(self) -> Any:
        """Return this rank's part of the next global batch; an empty dict if the rank does not read inputs."""
        ends_by_itself = self.epochs is not None and self.num_samples is None
        if self._has_ended(self.samples):
            self._over = True
            raise StopIteration
        batch: Any = {}
        if self.share.paths or ends_by_itself:  # all ranks must read a stream of unknown length, to find its end
            if self._ahead is None:
                self._ahead = iter(self._make_data_loader())
            try:
                batch = next(self._ahead)
            except StopIteration:
                self._over = True
                if not self.samples:
                    raise _make_too_short_error(self) from None
                raise
        self.samples += self.batch_size
        return batch

    @property
    def epoch(self) -> int:
        """Return the number of the epoch of the next sample, from 0. Raise :class:`BatchError` for a stream of unknown
        length.
        """
        if self.num_samples is None:
            raise BatchError("loader.epoch of a stream whose length is not known: give its dataset a __len__")
        return self.samples // self.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and its settings of the order, as a dict of numbers, which is equal on all ranks
        and does not depend on the number of ranks.
        """
        return {
            "samples": self.samples,
            "of": self.num_samples,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position ``state``, a result of :meth:`state_dict`. Raise :class:`CheckpointError` if the dataset
        has another length, or if ``state`` is of a shuffled dataset and the dataset is a stream.
        """
        if state["of"] != self.num_samples:
            before, here = (
                "a stream of unknown length" if n is None else f"a dataset of {n} samples"
                for n in (state["of"], self.num_samples)
            )
            raise CheckpointError(
                f"the saved run has read {before}, but this run has "
                f"{here.removeprefix('a dataset of ')}, "
                "so the order of samples cannot be continued; use the same dataset, or leave the loader out "
                "of extra="
            )
        if self.is_stream and state["shuffle"]:
            raise CheckpointError(
                "the saved run has read a shuffled dataset, but the dataset of this run is a stream, which "
                "has its own order: use the same dataset, or leave the loader out of extra="
            )
        self.samples = state["samples"]
        self.order = SampleOrder(state["of"] or 0, state["seed"], state["shuffle"])
        self._ahead = None
        self._over = False

    def iterate_rank_indices(self) -> Iterator[list[int]]:
        """Yield, for each further global batch, the list of the dataset indices of the samples that this rank reads."""
        rows, at = self.share.rows(self.batch_size), self.samples
        while not self._has_ended(at):
            yield self.order.get_indices(range(at + rows.start, at + rows.stop))
            at += self.batch_size

    def _has_ended(self, at: int) -> bool:
        if self.epochs is None or self.num_samples is None:
            return False
        return at + self.batch_size > self.epochs * self.num_samples

    def _make_data_loader(self) -> DataLoader[Any]:
        """Return a torch ``DataLoader`` that yields this rank's part of each global batch, from the current position
        on.
        """
        options: dict[str, Any] = {
            "num_workers": self._num_workers,
            "pin_memory": self._pin_memory,
            "generator": torch.Generator().manual_seed(self.order.seed),  # else it would draw from the script's
        }
        if self.is_stream:
            rows = self.share.rows(self.batch_size)
            collate = self._collate or default_collate
            return DataLoader(
                StreamBatches(
                    self.dataset, self.num_samples, self.batch_size, rows, self.epochs, self.samples, collate
                ),
                batch_size=None,
                collate_fn=_return_unchanged,
                **options,
            )
        return DataLoader(self.dataset, batch_sampler=_OwnBatchSampler(self), collate_fn=self._collate, **options)  # type: ignore[arg-type]


class StreamBatches(IterableDataset[Any]):
    """This rank's part of each global batch of a stream, which is read from its start. ``length``: samples of one
    epoch; ``None``: unknown. ``batch_size``: samples of a global batch. ``rows``: positions in a global batch of the
    samples that this rank reads. ``epochs``: number of epochs; ``None``: no end. ``start``: number of samples to skip
    first. ``collate``: function that makes a batch of a list of samples. Raise :class:`BatchError` if the stream
    returns no samples, or another number of samples than ``length``.
    """

    def __init__(
        self,
        stream: Any,
        length: int | None,
        batch_size: int,
        rows: range,
        epochs: int | None,
        start: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.stream = stream
        self.length = length
        self.batch_size = batch_size
        self.rows = rows
        self.epochs = epochs
        self.start = start
        self.collate = collate

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each global batch; an empty dict if the rank does not read samples. An incomplete
        last batch is dropped.
        """
        samples = self._iterate_samples()
        while True:
            count, kept = 0, []
            for place, sample in enumerate(itertools.islice(samples, self.batch_size)):
                if place in self.rows:
                    kept.append(sample)
                count += 1
            if count < self.batch_size:
                return
            yield self.collate(kept) if kept else {}

    def _iterate_samples(self) -> Iterator[Any]:
        """Yield the samples of all epochs, except the first ``start`` ones. Raise :class:`BatchError` if an epoch has
        no samples, or another number than the stream's length.
        """
        first, skipped = divmod(self.start, self.length) if self.length else (0, self.start)
        for epoch in itertools.count(first) if self.epochs is None else range(first, self.epochs):
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            count = 0
            for sample in self.stream:
                count += 1
                if self.length is not None and count > self.length:
                    break
                if skipped:
                    skipped -= 1
                else:
                    yield sample
            if not count:
                raise BatchError(
                    f"the stream gave no samples in epoch {epoch} (from 0): expected all samples each time that it is "
                    "iterated over; create its iterator in __iter__, or pass epochs=1"
                )
            if self.length is not None and count != self.length:
                more = "more" if count > self.length else f"{count}"
                raise BatchError(
                    f"the stream says that it has {self.length} samples, but gave {more} in epoch {epoch}; "
                    "expected the same number: correct its __len__, or remove it"
                )


class _OwnBatchSampler:
    """A torch batch sampler that yields the dataset indices of this rank's samples of each batch, from the loader's
    position on.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self.loader.iterate_rank_indices()


def _return_unchanged(batch: Any) -> Any:
    return batch


def _count_samples(dataset: Any) -> int | None:
    """Return the number of samples of ``dataset``; ``None`` if its length is unknown."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_stream(dataset: Any) -> bool:
    """Return ``True`` if ``dataset`` is iterated over, and ``False`` if it is indexed. Raise :class:`BatchError` if
    neither is possible.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise BatchError(
            "the dataset is a DataLoader, which itself creates batches: pass DataLoader.dataset, and collate= and "
            "num_workers= to the Loader"
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__"):
        if _count_samples(dataset) is None:
            raise BatchError(
                f"the dataset, a {kind}, has __getitem__ and no __len__, so that the number of samples is not "
                "known: add __len__"
                ", or make it an IterableDataset"
            )
        return False
    if not hasattr(dataset, "__iter__"):
        raise BatchError(
            f"the dataset, a {kind}, has neither __getitem__ nor __iter__: pass a dataset as of torch.utils.data"
        )
    if isinstance(dataset, Iterator):
        raise BatchError(
            f"the dataset is an iterator ({kind}), which can be read only once, but a resumed run and a second epoch "
            "read it from the start; pass an IterableDataset that creates the iterator in __iter__"
        )
    return True


def _check_stream(shuffle: bool | None, num_workers: int) -> None:
    """Raise :class:`BatchError` for options that a stream does not support: ``shuffle``, or more than one of
    ``num_workers`` (processes that load data).
    """
    if shuffle:
        raise BatchError(
            "shuffle=True is not possible for a stream, which has its own order: shuffle in the dataset, in the "
            "same way on all ranks (for example in its set_epoch), and leave shuffle out"
        )
    if num_workers > 1:
        raise BatchError(
            f"num_workers={num_workers} of a stream: several processes would each read it from its start, or share it "
            "in an order that depends on how many they are; pass num_workers=1, which prefetches, or a dataset with "
            "__getitem__ and __len__"
        )


def _make_too_short_error(loader: Loader) -> BatchError:
    """Return the error to raise for the dataset of ``loader`` if it has less than one global batch in all epochs."""
    samples = "the stream" if loader.num_samples is None else f"{loader.num_samples} samples"
    return BatchError(
        f"{loader.epochs} epochs of {samples} are less than one batch: expected at least {loader.batch_size} "
        "samples; pass a larger epochs=, or epochs=None for no limit"
    )


def _get_global_batch(engine: Engine) -> int:
    """Return the number of samples in a global batch, from the first input of the engine's program that is split over
    samples. Raise :class:`BatchError` if there is no such input.
    """
    _, samples = count_tokens_and_samples(engine.program)
    if not samples:
        raise BatchError("no input of the plan is split over samples: pass batch_size=")
    return samples
