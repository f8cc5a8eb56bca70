"""One thread per process: the tests start several processes on few cores, and results stay the same everywhere.

And few passes of the cycle collector, each of which looks at all that torch, transformers and 5,000 tests are made of.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import networkx  # noqa: F401  # the package imports these two when it first needs them, which takes longer than the
import sympy  # noqa: F401  # deadline of an example in tests by hypothesis
import torch

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
