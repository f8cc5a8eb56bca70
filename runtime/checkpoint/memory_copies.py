"""Copies of the training state in host memory, which survive failed processes (Wang et al. 2023, Gemini).

Every rank writes its whole state into a file in its node's memory; this costs one memory copy. While training
continues, it sends the state to a rank of another node, which keeps a second copy there. Each copy has two files, so
that one step is complete on all nodes at any moment: a file is overwritten only after all ranks have confirmed that the
copy in the other one is complete.

A restarted run finds the newest step for which every rank's state is in some node's memory. Each rank reads its state
on its own node or receives it from another one. Copies belong to one line of a run: an uninterrupted sequence of steps
under one plan, identified by a token in a file next to the checkpoints. A run that continues from disk, or under
another plan, begins a new line and never reads the copies of an abandoned one.

A file (``CheckpointSlot``) is mapped into memory and overwritten in place. A file named ``IDENTITY.RANK.STEP`` is
complete; ``.IDENTITY.RANK.NUMBER.partial`` is being written, or its writer ended too early. Memory pages are allocated
once and reused, so a copy costs only the transfer of its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import re
import secrets
import shutil
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.checkpoint import hyperparameters
from partitioner.runtime.checkpoint.atomic_folder import MANIFEST
from partitioner.runtime.checkpoint.load import list_resumable_checkpoints
from partitioner.runtime.checkpoint.ranks import Peers, assign_backup_ranks, identify_node
from partitioner.runtime.checkpoint.run_state import (
    CheckpointedEngine,
    collect_common_state,
    collect_rank_state,
    list_rank_tensors,
    restore_run,
    take_tensors,
)
from partitioner.runtime.checkpoint.training_state import (
    Optimizers,
    Stateful,
    collect_random_state,
    pack_plain_data,
    unpack_plain_data,
)
from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.files import find_foreign_access, write_text

_NAME = re.compile(r"([0-9a-f]{16})\.(\d+)\.(\d+)")

_PARTIAL = re.compile(r"\.([0-9a-f]{16})\.(\d+)\.\d+\.partial")
_ALIGN = 64  # alignment of tensors in bytes
_PAGES = 1 << 16  # the head is padded to a multiple of this, so that the file's length seldom changes
_LENGTH = 8  # bytes at the start of the file, which store the length of the head


class SlotName(NamedTuple):
    """The parsed name of a file with the in-memory copy of one rank's training state (parameters, optimizer states and
    so on). ``rank``: the rank whose state the file has. ``step``: number of the training step; ``None`` if the file is
    incomplete. ``identity``: hash of the plan and of a token that changes when training resumes from a checkpoint on
    disk.
    """

    identity: str
    rank: int
    step: int | None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """Return the rank, the step and the identity in the name of the file ``path``; ``None`` if the file is not an
        in-memory copy of a training state.
        """
        if found := _NAME.fullmatch(path.name):
            return cls(found[1], int(found[2]), int(found[3]))
        found = _PARTIAL.fullmatch(path.name)
        return cls(found[1], int(found[2]), None) if found else None


def iterate_slots(folder: Path) -> Iterator[tuple[SlotName, Path]]:
    """Yield (parsed name, path) of each file in ``folder`` with an in-memory copy of one rank's training state, sorted
    by file name.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if name := SlotName.parse(path):
            yield name, path


class SlotState(NamedTuple):
    """The contents of the in-memory copy of one rank's training state. ``tensors``: the tensors by name (parameters,
    optimizer states and so on). ``head``: bytes with the names, dtypes and shapes of the tensors, and the other state,
    such as step counters.
    """

    head: bytes
    tensors: Mapping[str, Tensor]

    @classmethod
    def build(cls, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> Self:
        """Return the contents of an in-memory copy. ``tensors``: this rank's tensors by name. ``run``: other state,
        such as counters, by name. Raise :class:`CheckpointError` if ``run`` is not plain data.
        """
        table = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
        return cls(pack_plain_data({"tensors": table, "run": dict(run)}, "the run"), tensors)

    @property
    def nbytes(self) -> int:
        return _compute_data_offset(self.head) + sum(_align_size(t.nbytes) for t in self.tensors.values())

    def write(self, to: Tensor) -> None:
        """Write the contents of this in-memory copy (its head, then its tensors) into ``to``, a uint8 tensor of
        :attr:`nbytes` elements.
        """
        with torch.no_grad():
            front = len(self.head).to_bytes(_LENGTH, "little") + self.head
            to[: len(front)].copy_(torch.frombuffer(bytearray(front), dtype=torch.uint8))
            table = ((n, t.dtype, t.shape) for n, t in self.tensors.items())
            for name, view in _view_tensors(to, _compute_data_offset(self.head), table):
                view.copy_(self.tensors[name])


def parse_slot_content(content: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return two parts of the in-memory copy of a training state: the tensors by name, as views of ``content``, and a
    dict of the other state, such as step counters. ``content``: the bytes that :meth:`SlotState.write` wrote, as a
    uint8 tensor. If they are damaged, unpickling raises its usual exceptions.
    """
    length = int.from_bytes(bytes(content[:_LENGTH].tolist()), "little")
    head = content[_LENGTH : _LENGTH + length].numpy().tobytes()
    found = unpack_plain_data(head)
    table = ((name, dtype_of(dtype), torch.Size(shape)) for name, dtype, shape in found["tensors"])
    return dict(_view_tensors(content, _compute_data_offset(head), table)), found["run"]


class CheckpointSlot:
    """A file, mapped into memory, for the in-memory copy of one rank's training state (parameters, optimizer states and
    so on). Only this process writes to the file. ``path``: the file. ``name``: the parsed file name: rank, step and
    identity of the copy. ``bytes``: the mapped file as a uint8 tensor. Methods raise ``OSError`` if the file system
    reports an error.
    """

    def __init__(self, path: Path, name: SlotName) -> None:
        self.path = path
        self.name = name
        self.bytes = torch.empty(0, dtype=torch.uint8)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._map_file(handle)
        finally:
            os.close(handle)

    @property
    def size(self) -> int:
        return self.bytes.numel()

    def resize(self, size: int) -> None:
        """Change the file of this in-memory copy to ``size`` bytes, and allocate its memory now, because writing to a
        page when memory has run out would kill the process.
        """
        handle = os.open(self.path, os.O_RDWR)
        try:
            os.ftruncate(handle, size)
            os.posix_fallocate(handle, 0, size)
            self._map_file(handle)
        finally:
            os.close(handle)

    def begin(self, number: int) -> None:
        """Mark this in-memory copy as incomplete, before it is written: rename its file to
        ``.IDENTITY.RANK.NUMBER.partial``, where ``NUMBER`` is ``number``, which distinguishes the two files of a rank.
        """
        self._rename_file(self.name._replace(step=None), f".{self.name.identity}.{self.name.rank}.{number}.partial")

    def commit(self, step: int) -> None:
        self._rename_file(self.name._replace(step=step), f"{self.name.identity}.{self.name.rank}.{step}")

    def _rename_file(self, name: SlotName, to: str) -> None:
        path = self.path.with_name(to)
        os.rename(self.path, path)
        self.path, self.name = path, name

    def _map_file(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        if size:
            self.bytes = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def map_slot_file(path: Path) -> Tensor:
    """Map the file ``path``, an in-memory copy of a training state, into memory, and return its bytes as a uint8
    tensor.
    """
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def remove_slot_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _compute_data_offset(head: bytes) -> int:
    return math.ceil((_LENGTH + len(head)) / _PAGES) * _PAGES


def _align_size(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN


def _view_tensors(
    content: Tensor, at: int, table: Iterable[tuple[str, torch.dtype, torch.Size]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield, for each tensor in ``table`` (name, dtype, shape), its name and a view of ``content`` as this tensor.
    ``content``: uint8 tensor in which the tensors follow each other from byte ``at`` on.
    """
    for name, dtype, shape in table:
        size = shape.numel() * dtype.itemsize
        yield name, content[at : at + size].view(dtype).view(shape)
        at += _align_size(size)


LINE = "copies"  # file next to the checkpoints with the token of the line whose copies may be restored

SHARED_MEMORY = Path("/dev/shm")
_Extra = Mapping[str, Stateful]


class MemoryCopies:
    """Copies of the training state in the memory of the nodes, as one rank sees them. All ranks create one instance and
    call the same methods.

    Args:
        checkpoints: the folder of checkpoints of this training, which all ranks see.
        engine: the engine whose state is copied.
        memory: a folder in the memory of this rank's node; by default ``/dev/shm``.

    Raise :class:`CheckpointError` on all ranks if ``memory`` is not a folder on the node of a rank, or if the plan
    keeps optimizer states on disk.
    """

    def __init__(self, checkpoints: Path, engine: CheckpointedEngine, memory: Path | None = None) -> None:
        if "disk" in engine.program.offload:
            raise CheckpointError(
                "copies in memory are not possible for a plan with 'disk' in offload, whose optimizer states do not "
                "fit in memory: leave copies_every out, and save checkpoints"
            )
        self.checkpoints = checkpoints
        self.engine = engine
        self.rank = engine.rank_program.rank
        self.folder = get_copies_folder(checkpoints, memory or SHARED_MEMORY)
        self._way = hashlib.sha256(engine.program.model_dump_json().encode()).hexdigest()
        self._peers = Peers(self.rank, engine.program.world_size)
        self._peers.run_on_all_ranks(f"copies cannot be kept in {memory or SHARED_MEMORY}", self._make_folder)
        self._nodes = self._peers.gather_number(identify_node(self.folder))
        self._keepers = assign_backup_ranks(self._nodes)
        self._sending: threading.Thread | None = None
        self._error: Exception | None = None
        self._reset_copies()

    def _reset_copies(self) -> None:
        """Forget the in-memory copies of the training state that were made so far, so that the next copy is treated as
        the first. The files with the copies stay on the nodes.
        """
        self.step: int | None = None  # step of the copy that is complete on all ranks
        self._written: int | None = None  # step of the copy that is being sent
        self._identity = ""
        self._slots: dict[
            int, list[CheckpointSlot]
        ] = {}  # rank -> its two files: for this rank, and for the ranks whose second copy it keeps
        self._room: list[list[int]] = [[], []]  # for both files, their size in bytes for each rank; equal on all ranks
        self._restored = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the copies of training states take on this rank's node; 0 before the first
        copy.
        """
        return 2 * sum(self._room[1][r] for r in self._list_stored_ranks()) if self._room[1] else 0

    def save(self, optimizer: Optimizers, extra: _Extra) -> None:
        """Copy the current training state into memory, and start to send the copy to a rank on another node, which
        keeps it as the second copy. All ranks call this. ``optimizer``: the optimizer of the engine's parameters, a
        list of several, or ``None``. ``extra``: name -> another object whose state is copied, such as a data loader.
        Raise :class:`CheckpointError` on all ranks if this copy, or sending the previous one, has failed on a rank.
        """
        state = self._peers.run_on_all_ranks(
            "the copy in memory was not made", lambda: self._collect_slot_state(optimizer, extra)
        )
        self._mark_copy_complete()
        sizes = self._peers.gather_number(state.nbytes)
        if self.step is not None and self.engine.steps <= self.step:
            self._reset_copies()  # the run was rewound: the existing copies are of steps that are repeated
        if not self._identity:
            self._begin_line()
        if not self._slots:
            self._peers.run_on_all_ranks("copies cannot be kept", self._open_slots)
        if self._room != [sizes, sizes]:
            self._make_room(sizes)
        slot, self._written = self._find_free_slot(self.rank), self.engine.steps
        self._peers.run_on_all_ranks("the copy in memory was not made", lambda: self._write_slot(slot, state))
        self._sending = threading.Thread(
            target=self._send_copies, args=(slot, self._written), name="copies", daemon=True
        )
        self._sending.start()
        self.engine._saver.saved_at = self.engine.steps

    def wait(self) -> None:
        """Wait until the last in-memory copy of the training state is complete on all ranks. All ranks call this. Raise
        :class:`CheckpointError` on all ranks if the copy failed on any rank.
        """
        self._peers.run_on_all_ranks("the copy in memory was not made", self._join_sending_thread)
        self._mark_copy_complete()

    def restore(self, optimizer: Optimizers, extra: _Extra) -> int | None:
        """Restore the newest training step for which every rank's state is in some node's memory, and return its
        number. All ranks call this. Return ``None`` and change nothing if there is no such step, if a checkpoint on
        disk is newer, or (with a warning) if the copies cannot be read. ``optimizer``: the optimizer of the engine's
        parameters, a list of several, or ``None``. ``extra``: name -> another object whose state is restored, such as a
        data loader.
        """
        self._peers.run_on_all_ranks("the copy in memory was not made", self._join_sending_thread)
        self._reset_copies()
        token, disk = self._peers.sum_numbers(_read_current_line(self.checkpoints) if self.rank == 0 else [0, 0])
        if not token:
            return None
        identity = self._get_identity(token)
        here = [n for n, _ in iterate_slots(self.folder) if n.identity == identity and n.step is not None]
        sizes = {n: (self.folder / f"{identity}.{n.rank}.{n.step}").stat().st_size for n in here}
        told = self._peers.gather_lists([number for n in here for number in (n.rank, n.step or 0, sizes[n])])
        holders: dict[int, dict[int, dict[int, int]]] = {}  # step -> rank -> process that has it -> bytes
        for process, numbers in enumerate(told):
            for rank, step, size in zip(*(iter(numbers),) * 3, strict=True):
                holders.setdefault(step, {}).setdefault(rank, {})[process] = size
        whole = [s for s, ranks in holders.items() if len(ranks) == self._peers.world_size and s >= disk]
        if not whole:
            return None
        step = max(whole)
        try:
            content = self._fetch_own_content(identity, step, holders[step])
            tensors, run = self._peers.run_on_all_ranks(
                f"the copies in memory of step {step} cannot be taken",
                lambda: self._parse_checked_content(content, optimizer),
            )
        except CheckpointError as error:
            warnings.warn(f"{error}; the checkpoint on disk is used instead", stacklevel=3)
            return None
        take_tensors(self.engine, tensors, optimizer)
        if optimizer is not None:
            groups = [each and [group["values"] for group in each["groups"]] for each in run["optimizer"]]
            hyperparameters.set_hyperparameters(optimizer, hyperparameters.match_by_position(optimizer, groups))
        restore_run(self.engine, run, run["random"], extra, f"the copy in memory of step {step}")
        if self._is_node_leader():
            for name, path in iterate_slots(self.folder):
                if name.identity != identity or name.step != step:  # copies of steps that are repeated now
                    remove_slot_file(path)
        self._identity, self.step, self._restored = identity, step, True
        self._peers.sum_numbers([0])  # a barrier: nobody opens a file that another rank removes
        return step

    def remove(self) -> None:
        """Wait for the last copy, and delete all copies of this training from the nodes' memory. Call this on all ranks
        at the end of training, when the last step is on disk.
        """
        self.wait()
        self._slots.clear()
        if self._is_node_leader():
            shutil.rmtree(self.folder, ignore_errors=True)
        remove_line_token(self.checkpoints, self.rank)

    def _is_node_leader(self) -> bool:
        """Return whether this rank is the lowest rank on its node."""
        return self._nodes.index(self._nodes[self.rank]) == self.rank

    def _make_folder(self) -> None:
        """Create the folder for the copies of this training in the node's memory (such as in ``/dev/shm``). Raise
        :class:`CheckpointError` if the parent of this folder does not exist, or if other users may write to this
        folder.
        """
        parent = self.folder.parent
        if not parent.is_dir():
            raise CheckpointError(
                f"copies in memory: expected a folder in this node's memory, got {parent}, which does not exist; name "
                "a tmpfs with copies_in="
            )
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            foreign = find_foreign_access(self.folder)
        except FileExistsError:
            foreign = "it is no folder"
        if foreign:
            raise CheckpointError(
                f"copies in memory: {self.folder} exists, and {foreign}; remove it, or name another with copies_in="
            )

    def _get_identity(self, token: int) -> str:
        return hashlib.sha256(f"{token} {self._way}".encode()).hexdigest()[:16]

    def _begin_line(self) -> None:
        """Choose a new random token (a number), the same on all ranks, for the in-memory copies from now on, and write
        it to a file beside the checkpoints. Earlier copies have another token, and are no longer restored. All ranks
        call this.
        """
        token = secrets.randbits(60) if self.rank == 0 else 0
        [token] = self._peers.sum_numbers([token])
        if self.rank == 0:
            write_text(self.checkpoints / LINE, f"{token:x}")
        self._identity = self._get_identity(token)

    def _open_slots(self) -> None:
        """Open the files for in-memory copies that this rank writes: two for its own training state (parameters,
        optimizer states and so on), and two for each other rank whose second copy it keeps. Files with copies of the
        current step are opened unchanged.

        On the first rank of a node, also remove files that are left from an earlier run of this training. They are
        recognised by the identity in their names: a hash of the plan and of a token that changes when training resumes
        from a checkpoint on disk.
        """
        if self._is_node_leader():
            for name, path in iterate_slots(self.folder):
                if name.identity != self._identity:
                    remove_slot_file(path)
        kept = [rank for rank, keeper in enumerate(self._keepers) if keeper == self.rank]
        for rank in (self.rank, *kept):
            found = [(n, p) for n, p in iterate_slots(self.folder) if n == (self._identity, rank, self.step)]
            slots = [CheckpointSlot(p, n) for n, p in found if self.step is not None]
            while len(slots) < 2:
                name = SlotName(self._identity, rank, None)
                slots.append(CheckpointSlot(self.folder / f".{name.identity}.{rank}.{len(slots)}.partial", name))
            self._slots[rank] = slots

    def _make_room(self, sizes: list[int]) -> None:
        """Change the size of the files on this node for the next in-memory copies to ``sizes[rank]`` bytes for the
        training state of each rank. All ranks call this. Raise :class:`CheckpointError` on all ranks if a node has too
        little free memory.
        """
        wanted = {
            slot: sizes[r]
            for r, slots in self._slots.items()
            for slot in (slots if self.step is None else [self._find_free_slot(r)])
        }
        missing = sum(max(0, size - slot.size) for slot, size in wanted.items())
        each = self._peers.gather_number(missing)
        here = sum(n for n, node in zip(each, self._nodes, strict=True) if node == self._nodes[self.rank])
        self._peers.run_on_all_ranks("the node has no room for copies", lambda: self._check_room(here))
        self._peers.run_on_all_ranks("the node has no room for copies", lambda: _resize_slots(wanted))
        self._room = [sizes if self.step is None else self._room[1], sizes]

    def _check_room(self, missing: int) -> None:
        """Raise :class:`CheckpointError` if the folder in this node's memory for the copies has less than ``missing``
        bytes free.
        """
        free = shutil.disk_usage(self.folder).free
        if free < missing:
            raise CheckpointError(
                f"copies in memory: {self.folder} needs {missing / 2**30:.2f} GiB more for the ranks of this node, and "
                f"has {free / 2**30:.2f} GiB free; make the tmpfs larger, name another with copies_in=, or leave "
                "copies_every out"
            )

    def _find_free_slot(self, rank: int) -> CheckpointSlot:
        """Return the file, one of the two for in-memory copies of the state of ``rank``, that may be overwritten
        because the other one has the newest complete copy.
        """
        return next(slot for slot in self._slots[rank] if self.step is None or slot.name.step != self.step)

    def _write_slot(self, slot: CheckpointSlot, state: SlotState) -> None:
        slot.begin(self._slots[self.rank].index(slot))
        state.write(slot.bytes)
        slot.commit(self.engine.steps)

    def _collect_slot_state(self, optimizer: Optimizers, extra: _Extra) -> SlotState:
        self._join_sending_thread()
        run = collect_common_state(self.engine) | collect_rank_state(self.engine, optimizer, extra)
        return SlotState.build(
            list_rank_tensors(self.engine, optimizer), run | {"random": collect_random_state(self.engine.device)}
        )

    def _join_sending_thread(self) -> None:
        """Wait until the thread that sends the last in-memory copy to the rank on another node has ended. If the thread
        stored an exception, raise it.
        """
        if self._sending is not None:
            self._sending.join()
        if self._error is not None:
            raise self._error

    def _mark_copy_complete(self) -> None:
        """Record the last in-memory copy of this rank's training state as complete. This is called once all ranks have
        confirmed that their copies are complete.
        """
        if self._written is None or self._written == self.step:
            return
        self.step = self._written
        if self._restored and self._is_node_leader():
            for name, path in iterate_slots(self.folder):
                if (
                    name.rank not in self._list_stored_ranks()
                ):  # a copy that was kept on this node only before the restart
                    remove_slot_file(path)
        self._restored = False

    def _list_stored_ranks(self) -> list[int]:
        """Return the ranks whose training state has a copy in the memory of this node: the ranks of this node, and the
        ranks of other nodes whose second copy is kept by a rank of this node.
        """
        here = [r for r, node in enumerate(self._nodes) if node == self._nodes[self.rank]]
        return here + [r for r, keeper in enumerate(self._keepers) if keeper in here]

    def _send_copies(self, slot: CheckpointSlot, step: int) -> None:
        """Send this rank's in-memory copy of training step ``step`` to the rank on another node that keeps its second
        copy, and receive the copies that this rank keeps for others. ``slot``: the file with this rank's copy. This
        runs in a thread: an exception is stored, and is raised later by :meth:`_join_sending_thread`.
        """
        try:
            keeper = self._keepers[self.rank]
            works = [] if keeper is None else self._peers.send(slot.bytes, keeper)
            for rank, slots in self._slots.items():
                if rank != self.rank:
                    kept = self._find_free_slot(rank)
                    kept.begin(slots.index(kept))
                    self._peers.receive(kept.bytes, rank)
                    kept.commit(step)
            for work in works:
                work.wait()
        except Exception as error:
            self._error = error

    def _fetch_own_content(self, identity: str, step: int, holders: Mapping[int, Mapping[int, int]]) -> Tensor:
        """Return the bytes, as a uint8 tensor, of the in-memory copy of this rank's training state (parameters,
        optimizer states and so on) after step ``step``. They are read from a file on this node, or received from
        another process. All ranks call this, because each also sends copies to ranks that have none on their node.

        ``identity``: start of the names of the files with valid copies. ``holders``: rank -> process that can read a
        copy of this rank's state -> size of the copy in bytes.
        """
        sources = {}  # rank without a copy on its node -> process that sends it
        for rank, sizes in holders.items():
            if rank not in sizes:
                sources[rank] = sorted(sizes)[rank % len(sizes)]
        give = [rank for rank, source in sources.items() if source == self.rank]
        names = [*give, *([] if self.rank in sources else [self.rank])]
        what = f"the copies in memory of step {step} cannot be read"
        contents = self._peers.run_on_all_ranks(
            what, lambda: {r: map_slot_file(self.folder / f"{identity}.{r}.{step}") for r in names}
        )
        works = [work for rank in give for work in self._peers.send(contents[rank], rank)]
        if self.rank in sources:
            contents[self.rank] = torch.empty(holders[self.rank][sources[self.rank]], dtype=torch.uint8)
            self._peers.receive(contents[self.rank], sources[self.rank])
        for work in works:
            work.wait()
        return contents[self.rank]

    def _parse_checked_content(
        self, content: Tensor, optimizer: Optimizers
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Check the in-memory copy of this rank's training state, and return its tensors by name, and a dict of its
        other state, such as counters. ``content``: the bytes of the copy. ``optimizer``: the optimizer or list of
        optimizers whose state will be restored; ``None``: no optimizer state is needed. Raise :class:`CheckpointError`
        if a tensor of the engine is missing or has another shape, or if optimizer state is needed and missing.
        """
        tensors, run = parse_slot_content(content)
        for name, held in list_rank_tensors(self.engine, None).items():
            got = list(tensors[name].shape) if name in tensors else "nothing"
            if got != list(held.shape):
                raise CheckpointError(f"the copy in memory has {got} for {name}; expected {list(held.shape)}")
        if optimizer is not None and run["optimizer"] is None:
            raise CheckpointError(
                "the copy in memory has no optimizer state; pass the optimizer to Checkpoints in every run"
            )
        return tensors, run


def get_copies_folder(checkpoints: Path, memory: Path) -> Path:
    """Return the folder inside ``memory`` for the copies of the training whose checkpoints are in ``checkpoints``. The
    path is the same on every node.
    """
    told = f"{os.getuid()} {os.path.realpath(checkpoints)}"
    return memory / f"copies-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def remove_line_token(checkpoints: Path, rank: int) -> None:
    """Remove the file with the token (a random number) of valid in-memory copies from the folder ``checkpoints``, so
    that none are restored any more. Do nothing if ``rank``, the number of this rank, is not 0.
    """
    if rank == 0:
        (checkpoints / LINE).unlink(missing_ok=True)


def _resize_slots(wanted: Mapping[CheckpointSlot, int]) -> None:
    for slot, size in wanted.items():
        slot.resize(size)


def _read_current_line(checkpoints: Path) -> list[int]:
    """Return two numbers: the token (a random number) of valid in-memory copies, and the step of the newest checkpoint
    on disk that was written after the token. A number is 0 if there is no such token or checkpoint. ``checkpoints``:
    the folder of checkpoints.
    """
    try:
        token = int((checkpoints / LINE).read_text(), 16)
        begun = (checkpoints / LINE).stat().st_mtime_ns
    except (OSError, ValueError):
        return [0, 0]
    written = (
        f.steps for f in list_resumable_checkpoints(checkpoints) if (f.folder / MANIFEST).stat().st_mtime_ns > begun
    )
    return [token, max(written, default=0)]
