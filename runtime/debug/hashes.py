"""Write hashes of the operands and results of every operator to a file, to compare two runs bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from runtime.debug.probe import Operation, probed
from runtime.engine import Engine

_SIZE = 8  # bytes of a hash


def hash_of(x: Tensor) -> str:
    """Hash the type, shape and bits of ``x`` into a hexadecimal string."""
    x = x.detach()
    digest = hashlib.blake2b(f"{x.dtype}{list(x.shape)}".encode(), digest_size=_SIZE)
    if x.numel():
        digest.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def record_hashes(engine: Engine, folder: str | Path) -> Iterator[None]:
    """Write ``rank-<rank>.hashes`` to ``folder``: a line of JSON per operator of the steps in the ``with`` block.

    All ranks call it. A step takes many times as long. :func:`runtime.debug.compare_runs` names the first operator that
    differs between two folders.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with (path / f"rank-{engine.communicator.rank}.hashes").open("w") as file, probed(engine, _Writer(file).see):
        yield


class _Writer:
    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def see(self, operation: Operation) -> None:
        place = operation.place()
        line = {
            "step": operation.step,
            "index": operation.index,
            "instruction": operation.instruction,
            "operator": operation.operator,
            "node": place.node,
            "call": place.call,
            "path": place.path,
            "source": place.source,
            "in": [hash_of(x) for x in operation.inputs if x.device.type != "meta"],
            "out": [hash_of(x) for x in operation.outputs if x.device.type != "meta"],
        }
        self.file.write(json.dumps(line) + "\n")
