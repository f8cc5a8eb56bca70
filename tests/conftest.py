"""One thread per process: the tests start several processes on few cores, and results stay the same everywhere.

And few passes of the cycle collector, each of which looks at all that torch, transformers and 5,000 tests are made of.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import networkx  # noqa: F401  # the package imports these two when it first needs them, which takes longer than the
import pytest
import sympy  # noqa: F401  # deadline of an example in tests by hypothesis
import torch

from partitioner import background
from partitioner.solve.evaluate import local_model_cache
from partitioner.solve.search import search

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 20)


def pytest_configure() -> None:
    """Where each processor has a worker, plans are made by one process: a second one would take another's time."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")) >= processors:
        for module in (local_model_cache, background):
            module.can_help = lambda: False


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_baselines() -> Iterator[None]:
    """For tests of what plans compute: the search is complete, but a report has nothing to compare the plan with."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compare_standard_layouts", "without_laggards", "faster_batches"):
            patch.setattr(search, name, lambda *_, **__: ())
        yield
