"""Going on after a restart: a folder of checkpoints by step, and the newest of them that is whole.

    engine.checkpoint("checkpoints/", optimizer, scheduler=scheduler, data=loader)    # now and then
    engine.resume("checkpoints/", optimizer, scheduler=scheduler, data=loader)        # at the start; nothing yet: 0

``checkpoints/step-00000100`` is what ``engine.save`` writes, and beside it what only a run knows: ``state.json`` (what
the named objects' ``state_dict()`` say) and each rank's random states. It appears when all of it is there.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from runtime.checkpoint import OPTIMIZER_INDEX, TRAINING
from runtime.errors import WeightsError
from runtime.weights import INDEX

if TYPE_CHECKING:
    from runtime.engine import Engine

_NAME = re.compile(r"step-(\d+)")
_PARTIAL = ".incoming"


class Stateful(Protocol):
    """What goes on where it was: a data loader, a sampler, a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def write(
    engine: Engine, root: Path, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Stateful]
) -> Path:
    """Save the engine's state of now as ``root/step-...``; all ranks call it. A failure leaves what was there."""
    target = root / f"step-{engine.steps:08}"
    incoming = root / _PARTIAL
    engine.save(incoming, optimizer)
    states = {name: owner.state_dict() for name, owner in stateful.items()}
    rank = engine.communicator.rank
    torch.save({"random": random_states(), "states": states}, incoming / f"rank-{rank}.pt")
    engine.barrier()
    if rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        os.rename(incoming, target)
    engine.barrier()
    return target


def resume(
    engine: Engine, root: Path, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Stateful]
) -> int:
    """Load the newest whole checkpoint of ``root``. Returns the steps done, 0 where there is none.

    Under a plan for another number of ranks, those that are new take the states of the first one; their random
    generators stay as they are. Raises :class:`WeightsError` where the newest one is not of this model, or has no state
    for what is asked for.
    """
    newest = next(complete(root), None)
    if newest is None:
        return 0
    engine.load(newest, optimizer)
    own = newest / f"rank-{engine.communicator.rank}.pt"
    found = own if own.exists() else newest / "rank-0.pt"
    content = torch.load(found, weights_only=True) if found.exists() else {"states": {}}
    missing = stateful.keys() - content["states"].keys()
    if missing:
        raise WeightsError(
            f"{newest} has no state of {', '.join(sorted(missing))}: pass the same objects to checkpoint and to resume"
        )
    for name, owner in stateful.items():
        owner.load_state_dict(content["states"][name])
    if own.exists():
        set_random_states(content["random"])
    return engine.steps


def complete(root: Path) -> Iterator[Path]:
    """The checkpoints of ``root`` whose files are all there and of the length that they say, the newest first."""
    steps = {p: int(m[1]) for p in root.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    for path in sorted(steps, key=lambda p: -steps[p]):
        if is_complete(path):
            yield path


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has all the files that it names, none of them cut short."""
    if not (folder / TRAINING).exists():
        return False
    try:
        indices = [folder / INDEX, *([folder / OPTIMIZER_INDEX] if (folder / OPTIMIZER_INDEX).exists() else [])]
        files = {f for index in indices for f in json.loads(index.read_text())["weight_map"].values()}
        return all(_whole(folder / name) for name in files)
    except (OSError, ValueError, KeyError, struct.error):
        return False


def _whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says: 8 bytes of the header's length, header, data."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    expected: int = 8 + length + end
    return file.stat().st_size == expected


def random_states() -> dict[str, Any]:
    """Those of all generators that training draws from; the model's own operators draw by seed and step."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (name, [int(k) for k in keys], *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
