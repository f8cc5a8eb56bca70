"""Copies of the training state in the memory of the nodes, which outlives the ranks (Wang et al. 2023, Gemini).

Every rank writes all that it holds into a file in its node's memory, which takes what moving the bytes takes. While
training goes on it sends them to a rank of another node, which keeps them there. Of both kinds there are two, so that
one step is complete everywhere at any moment: a file is overwritten once all ranks have said that a later one is.

A run that is started anew finds the newest step of which every rank's state is in some node's memory, and each rank
reads it there, or has it sent. Copies are of one line of a run, named by a token beside the checkpoints: a run that
goes on from the disk, or under another plan, begins a new line, and never takes what an abandoned one has left.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint import hyperparameters
from runtime.checkpoint.folders import MANIFEST
from runtime.checkpoint.loading import to_go_on_from
from runtime.checkpoint.peers import Peers, keepers, node_of
from runtime.checkpoint.run import CheckpointedEngine, common_state, go_on, own_state, own_tensors, take_tensors
from runtime.checkpoint.slots import Name, Slot, State, content_of, read, remove, slots_in
from runtime.checkpoint.training import Optimizers, Stateful, random_state
from runtime.errors import CheckpointError
from runtime.files import write_text

LINE = "copies"  # beside the checkpoints: the token of the line whose copies may be taken
SHARED_MEMORY = Path("/dev/shm")
_Extra = Mapping[str, Stateful]


class Copies:
    """The copies of one run, for one rank; all ranks make one and call the same methods.

    Args:
        checkpoints: the run's folder of checkpoints, which all ranks see.
        memory: a folder in the memory of this rank's node.

    Raises :class:`CheckpointError` on all ranks where one has no such folder, and of a plan that keeps states on disk.
    """

    def __init__(self, checkpoints: Path, engine: CheckpointedEngine, memory: Path | None = None) -> None:
        if "disk" in engine.program.offload:
            raise CheckpointError(
                "copies in memory of a plan with 'disk' in offload, whose optimizer states are to be in no memory: "
                "leave copies_every out, and save checkpoints"
            )
        self.checkpoints = checkpoints
        self.engine = engine
        self.rank = engine.rank_program.rank
        self.folder = folder_of(checkpoints, memory or SHARED_MEMORY)
        self._way = hashlib.sha256(engine.program.model_dump_json().encode()).hexdigest()
        self._peers = Peers(self.rank, engine.program.world_size)
        self._peers.together(f"copies cannot be kept in {memory or SHARED_MEMORY}", self._make_folder)
        self._nodes = self._peers.each(node_of(self.folder))
        self._keepers = keepers(self._nodes)
        self._sending: threading.Thread | None = None
        self._error: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        """As before the first copy, whatever is on the nodes."""
        self.step: int | None = None  # of the copy that is complete on all ranks
        self._written: int | None = None  # of the copy that is being sent
        self._identity = ""
        self._slots: dict[int, list[Slot]] = {}  # this rank's own, and those that it keeps
        self._room: list[list[int]] = [[], []]  # of which sizes the ranks' two files are, the same on all ranks
        self._restored = False

    @property
    def nbytes(self) -> int:
        """The memory that copies take on this rank's node; 0 before the first one."""
        return 2 * sum(self._room[1][r] for r in self._ranks_here()) if self._room[1] else 0

    def save(self, optimizer: Optimizers, extra: _Extra) -> None:
        """Copy the state as it is. Raises :class:`CheckpointError` on all ranks where this copy, or sending the one
        before, has failed on one."""
        state = self._peers.together("the copy in memory was not made", lambda: self._state(optimizer, extra))
        self._complete()
        sizes = self._peers.each(state.nbytes)
        if self.step is not None and self.engine.steps <= self.step:
            self._begin()  # the run was gone back in: what is there is of steps that are done again
        if not self._identity:
            self._begin_line()
        if not self._slots:
            self._peers.together("copies cannot be kept", self._open)
        if self._room != [sizes, sizes]:
            self._make_room(sizes)
        slot, self._written = self._free(self.rank), self.engine.steps
        self._peers.together("the copy in memory was not made", lambda: self._write(slot, state))
        self._sending = threading.Thread(target=self._send, args=(slot, self._written), name="copies", daemon=True)
        self._sending.start()
        self.engine._saver.saved_at = self.engine.steps

    def wait(self) -> None:
        """Until the last copy is complete on all ranks. Raises :class:`CheckpointError` where it failed."""
        self._peers.together("the copy in memory was not made", self._join)
        self._complete()

    def restore(self, optimizer: Optimizers, extra: _Extra) -> int | None:
        """Go on from the newest step that is in memory for every rank; ``None``, and nothing is changed, where there is
        none, or a newer checkpoint. Returns the step."""
        self._peers.together("the copy in memory was not made", self._join)
        self._begin()
        token, disk = self._peers.total(_line(self.checkpoints) if self.rank == 0 else [0, 0])
        if not token:
            return None
        identity = self._identity_of(token)
        here = [n for n, _ in slots_in(self.folder) if n.identity == identity and n.step is not None]
        sizes = {n: (self.folder / f"{identity}.{n.rank}.{n.step}").stat().st_size for n in here}
        told = self._peers.lists([number for n in here for number in (n.rank, n.step or 0, sizes[n])])
        holders: dict[int, dict[int, dict[int, int]]] = {}  # step -> rank -> process that has it -> bytes
        for process, numbers in enumerate(told):
            for rank, step, size in zip(*(iter(numbers),) * 3, strict=True):
                holders.setdefault(step, {}).setdefault(rank, {})[process] = size
        whole = [s for s, ranks in holders.items() if len(ranks) == self._peers.world_size and s >= disk]
        if not whole:
            return None
        step = max(whole)
        try:
            content = self._content(identity, step, holders[step])
            tensors, run = self._peers.together(
                f"the copies in memory of step {step} cannot be taken", lambda: self._checked(content, optimizer)
            )
        except CheckpointError as error:
            warnings.warn(f"{error}; going on from the disk", stacklevel=3)
            return None
        take_tensors(self.engine, tensors, optimizer)
        if optimizer is not None:
            groups = [each and [group["values"] for group in each["groups"]] for each in run["optimizer"]]
            hyperparameters.take(optimizer, hyperparameters.by_place(optimizer, groups))
        go_on(self.engine, run, run["random"], extra, f"the copy in memory of step {step}")
        if self._leads():
            for name, path in slots_in(self.folder):
                if name.identity != identity or name.step != step:  # of steps that are done again now
                    remove(path)
        self._identity, self.step, self._restored = identity, step, True
        self._peers.total([0])  # nobody opens what another one removes
        return step

    def remove(self) -> None:
        """Give the memory back: where the run has ended, and its last step is on the disk."""
        self.wait()
        self._slots.clear()
        if self._leads():
            shutil.rmtree(self.folder, ignore_errors=True)
        forget(self.checkpoints, self.rank)

    def _leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self._nodes.index(self._nodes[self.rank]) == self.rank

    def _make_folder(self) -> None:
        parent = self.folder.parent
        if not parent.is_dir():
            raise CheckpointError(
                f"copies in memory: expected a folder in this node's memory, got {parent}, which is none; name one "
                "with copies_in=, a tmpfs"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _identity_of(self, token: int) -> str:
        return hashlib.sha256(f"{token} {self._way}".encode()).hexdigest()[:16]

    def _begin_line(self) -> None:
        token = secrets.randbits(60) if self.rank == 0 else 0
        [token] = self._peers.total([token])
        if self.rank == 0:
            write_text(self.checkpoints / LINE, f"{token:x}")
        self._identity = self._identity_of(token)

    def _open(self) -> None:
        """The files that this rank writes; what an earlier line has left goes."""
        if self._leads():
            for name, path in slots_in(self.folder):
                if name.identity != self._identity:
                    remove(path)
        kept = [rank for rank, keeper in enumerate(self._keepers) if keeper == self.rank]
        for rank in (self.rank, *kept):
            found = [(n, p) for n, p in slots_in(self.folder) if n == (self._identity, rank, self.step)]
            slots = [Slot(p, n) for n, p in found if self.step is not None]
            while len(slots) < 2:
                name = Name(self._identity, rank, None)
                slots.append(Slot(self.folder / f".{name.identity}.{rank}.{len(slots)}.partial", name))
            self._slots[rank] = slots

    def _make_room(self, sizes: list[int]) -> None:
        """Files of these ``sizes``, where they hold nothing that is needed. Raises :class:`CheckpointError`."""
        wanted = {
            slot: sizes[r]
            for r, slots in self._slots.items()
            for slot in (slots if self.step is None else [self._free(r)])
        }
        missing = sum(max(0, size - slot.size) for slot, size in wanted.items())
        each = self._peers.each(missing)
        here = sum(n for n, node in zip(each, self._nodes, strict=True) if node == self._nodes[self.rank])
        self._peers.together("the node has no room for copies", lambda: self._check_room(here))
        self._peers.together("the node has no room for copies", lambda: _resize(wanted))
        self._room = [sizes if self.step is None else self._room[1], sizes]

    def _check_room(self, missing: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < missing:
            raise CheckpointError(
                f"copies in memory: {self.folder} needs {missing / 2**30:.2f} GiB more for the ranks of this node, and "
                f"has {free / 2**30:.2f} GiB free; make the tmpfs larger, name another with copies_in=, or leave "
                "copies_every out"
            )

    def _free(self, rank: int) -> Slot:
        """The one of a rank's two files that may be overwritten."""
        return next(slot for slot in self._slots[rank] if self.step is None or slot.name.step != self.step)

    def _write(self, slot: Slot, state: State) -> None:
        slot.begin(self._slots[self.rank].index(slot))
        state.write(slot.bytes)
        slot.commit(self.engine.steps)

    def _state(self, optimizer: Optimizers, extra: _Extra) -> State:
        self._join()
        run = common_state(self.engine) | own_state(self.engine, optimizer, extra)
        return State.of(own_tensors(self.engine, optimizer), run | {"random": random_state(self.engine.device)})

    def _join(self) -> None:
        """Until what was sent has come. Raises what that raised."""
        if self._sending is not None:
            self._sending.join()
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        """All ranks have said that the last copy is complete."""
        if self._written is None or self._written == self.step:
            return
        self.step = self._written
        if self._restored and self._leads():
            for name, path in slots_in(self.folder):
                if name.rank not in self._ranks_here():  # it was, before the restart
                    remove(path)
        self._restored = False

    def _ranks_here(self) -> list[int]:
        """The ranks whose copies are on this node: its own, and those that it keeps; some twice perhaps."""
        here = [r for r, node in enumerate(self._nodes) if node == self._nodes[self.rank]]
        return here + [r for r, keeper in enumerate(self._keepers) if keeper in here]

    def _send(self, slot: Slot, step: int) -> None:
        """Send this rank's bytes to its keeper, and keep what comes; in a thread."""
        try:
            keeper = self._keepers[self.rank]
            works = [] if keeper is None else self._peers.send(slot.bytes, keeper)
            for rank, slots in self._slots.items():
                if rank != self.rank:
                    kept = self._free(rank)
                    kept.begin(slots.index(kept))
                    self._peers.receive(kept.bytes, rank)
                    kept.commit(step)
            for work in works:
                work.wait()
        except Exception as error:
            self._error = error

    def _content(self, identity: str, step: int, holders: Mapping[int, Mapping[int, int]]) -> Tensor:
        """This rank's state, from this node or from another; what others lack is sent."""
        sources = {}  # of the ranks whose node has nothing, each from another process
        for rank, sizes in holders.items():
            if rank not in sizes:
                sources[rank] = sorted(sizes)[rank % len(sizes)]
        give = [rank for rank, source in sources.items() if source == self.rank]
        names = [*give, *([] if self.rank in sources else [self.rank])]
        what = f"the copies in memory of step {step} cannot be read"
        contents = self._peers.together(
            what, lambda: {r: content_of(self.folder / f"{identity}.{r}.{step}") for r in names}
        )
        works = [work for rank in give for work in self._peers.send(contents[rank], rank)]
        if self.rank in sources:
            contents[self.rank] = torch.empty(holders[self.rank][sources[self.rank]], dtype=torch.uint8)
            self._peers.receive(contents[self.rank], sources[self.rank])
        for work in works:
            work.wait()
        return contents[self.rank]

    def _checked(self, content: Tensor, optimizer: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What ``content`` holds. Raises :class:`CheckpointError` unless all is there that is to be filled."""
        tensors, run = read(content)
        for name, held in own_tensors(self.engine, None).items():
            got = list(tensors[name].shape) if name in tensors else "nothing"
            if got != list(held.shape):
                raise CheckpointError(f"the copy in memory has of {name} {got}, expected {list(held.shape)}")
        if optimizer is not None and run["optimizer"] is None:
            raise CheckpointError("the copy in memory has no optimizer state; give Checkpoints the optimizer always")
        return tensors, run


def folder_of(checkpoints: Path, memory: Path) -> Path:
    """Where the copies of a run are on each node."""
    told = f"{os.getuid()} {os.path.realpath(checkpoints)}"
    return memory / f"copies-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def forget(checkpoints: Path, rank: int) -> None:
    """No copies of this run may be taken any more."""
    if rank == 0:
        (checkpoints / LINE).unlink(missing_ok=True)


def _resize(wanted: Mapping[Slot, int]) -> None:
    for slot, size in wanted.items():
        slot.resize(size)


def _line(checkpoints: Path) -> list[int]:
    """The token of the line, 0 where there is none, and the newest step on the disk that was written in it: one that
    was there before is of steps that are done again."""
    try:
        token = int((checkpoints / LINE).read_text(), 16)
        begun = (checkpoints / LINE).stat().st_mtime_ns
    except (OSError, ValueError):
        return [0, 0]
    written = (f.steps for f in to_go_on_from(checkpoints) if (f.folder / MANIFEST).stat().st_mtime_ns > begun)
    return [token, max(written, default=0)]
