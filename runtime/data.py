"""Batches for an engine: every rank loads only the samples that it reads, and where the run is can be resumed.

    loader = runtime.Loader(dataset, engine, seed=0, num_workers=4)
    checkpoints = runtime.Checkpoints("checkpoints/", engine, optimizer, every=500, extra={"data": loader})
    checkpoints.restore()
    for batch in loader:
        loss = engine.step(batch, local=True)

The order of samples depends on the seed alone, not on the ranks: a run that goes on under another plan, of another
number of data-parallel ranks or another global batch even, goes on at the next sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from runtime.engine import Engine
from runtime.errors import BatchError, CheckpointError
from runtime.metrics import batch_size


class Samples(Protocol):
    """A map-style dataset, as of ``torch.utils.data``: each sample a mapping of input names to tensors, say."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleOrder:
    """In which order samples are read, without an end: epoch after epoch, each in an order of its own if shuffled.

    Held in memory are the orders of one epoch or, where a run of samples crosses over, two: 8 bytes per sample.

    >>> SampleOrder(5, seed=0, shuffle=False).at(range(3, 8))
    [3, 4, 0, 1, 2]
    """

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def at(self, places: range) -> list[int]:
        """The samples at ``places`` of the stream, counted from its start; one run of places."""
        epochs = range(places.start // self.num_samples, -(-places.stop // self.num_samples)) if places else range(0)
        self._epochs = {e: self._epoch(e) for e in epochs} or self._epochs
        return [int(self._epochs[p // self.num_samples][p % self.num_samples]) for p in places]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch in self._epochs:
            return self._epochs[epoch]
        if not self.shuffle:
            return np.arange(self.num_samples)
        # of both numbers: torch's generator takes 32 bits, and seed + epoch would be another seed's next epoch
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)


class Loader:
    """An iterator of this rank's parts of global batches, for ``engine.step(batch, local=True)``.

    Args:
        dataset: all samples, the same on all ranks. Only those that this rank reads are asked for: none on a pipeline
            stage that reads no inputs, which gets empty batches.
        engine: says which samples these are, and how many a global batch has.
        seed: of the order of samples; not negative.
        shuffle: every epoch in an order of its own; else in the dataset's.
        epochs: after which it ends for good, without a last batch that is not whole; ``None``: never.
        collate: makes a batch of a list of samples; torch's ``default_collate`` by default.
        num_workers: processes that load ahead; 0: this one, when a batch is asked for.
        batch_size: samples in a global batch, where the planned inputs do not tell.

    Its state (``state_dict``, for ``Checkpoints(extra={"data": loader})``) is the number of samples that batches which
    were given out hold, whatever workers have loaded ahead. What samples are made of by chance (augmentations) should
    be drawn by their index, not by a generator whose state is lost.

    Raises :class:`BatchError` where the dataset has no sample, or no whole batch, the batch's size is not known or does
    not split over dp; and where a loop is begun after one has come to the end.
    """

    def __init__(
        self,
        dataset: Samples,
        engine: Engine,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        batch_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.share = engine.share
        self.epochs = epochs
        self.batch_size = _global_batch(engine) if batch_size is None else batch_size
        self.samples = 0
        if not len(dataset):
            raise BatchError("the dataset is empty: expected at least one sample")
        if self.batch_size % self.share.count:
            raise BatchError(
                f"a global batch of {self.batch_size} samples does not split over {self.share.count} data-parallel "
                f"ranks; pass batch_size= a multiple of {self.share.count}"
            )
        self.order = SampleOrder(len(dataset), seed, shuffle)
        if self._ended(0):
            raise BatchError(
                f"{epochs} epochs of {len(dataset)} samples hold no whole batch: expected at least "
                f"{self.batch_size}; pass more epochs, or None to run on over their ends"
            )
        self._over = False  # a loop has come to the end
        self._ahead: Iterator[Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # torch's class, whose two methods it has
            batch_sampler=_Own(self),
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=engine.device.type == "cuda",
            generator=torch.Generator().manual_seed(seed),  # else it would draw from the training script's
        )

    def __iter__(self) -> Self:
        if self._over:
            raise BatchError(
                f"the loader has come to the end of its {self.epochs} epochs, and another loop would have no batch: "
                "pass epochs= the epochs of the whole run, in one loop (loader.epoch tells which it is in), or make "
                "another loader with another seed"
            )
        return self

    def __next__(self) -> Any:
        if self._ended(self.samples):
            self._over = True
            raise StopIteration
        if not self.share.paths:
            batch: Any = {}
        else:
            if self._ahead is None:
                self._ahead = iter(self._loader)
            batch = next(self._ahead)
        self.samples += self.batch_size
        return batch

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.samples // self.order.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: the same on all ranks, and of no number of ranks."""
        order = self.order
        return {
            "samples": self.samples,
            "of": order.num_samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; raises :class:`CheckpointError` for the state of a dataset of another length."""
        if state["of"] != self.order.num_samples:
            raise CheckpointError(
                f"the run has read a dataset of {state['of']} samples, this one has {self.order.num_samples}, in which "
                "the same order cannot be gone on with; give the same dataset, or leave the loader out of extra="
            )
        self.samples = state["samples"]
        self.order = SampleOrder(state["of"], state["seed"], state["shuffle"])
        self._ahead = None
        self._over = False

    def own(self) -> Iterator[list[int]]:
        """For each batch to come the indices of the samples of this rank."""
        rows, at = self.share.rows(self.batch_size), self.samples
        while not self._ended(at):
            yield self.order.at(range(at + rows.start, at + rows.stop))
            at += self.batch_size

    def _ended(self, at: int) -> bool:
        return self.epochs is not None and at + self.batch_size > self.epochs * self.order.num_samples


class _Own:
    """The loader's own samples as a batch sampler of torch's, from where it is when iteration starts."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self.loader.own()


def _global_batch(engine: Engine) -> int:
    """Samples of a global batch: rows of the first input that is split."""
    _, samples = batch_size(engine.program)
    if not samples:
        raise BatchError("no input of the plan is split over samples: pass batch_size=")
    return samples
