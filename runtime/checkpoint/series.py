"""Write a checkpoint every few optimizer steps, remove old ones, and resume a run from the latest one after a crash.

Every rank writes its own shards, and any plan of the model can read them. The other modules of this folder do the work:
``shards.py`` computes which boxes of the tensors a rank holds and writes, ``dcp_files.py`` reads and writes the files,
``save.py`` saves at once or while training continues, ``atomic_folder.py`` makes a folder either complete or absent,
and ``memory_copies.py`` keeps copies in the memory of the nodes.

The file ``latest`` has the name of the last complete checkpoint. It is written after that checkpoint is complete, and
before an older one is removed.

:class:`Interrupts` handles signals that ask a run to stop, for example when the time limit of a batch job is reached, a
machine is preempted, or a user presses Ctrl+C. A signal may reach only some ranks, at any moment of a step. After each
step, and before each batch of an evaluation, all ranks exchange whether they received a signal, over Gloo and in host
memory. They then stop after the same step or batch, and save the state together.
"""

from __future__ import annotations

import importlib
import signal
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from partitioner.runtime.checkpoint.atomic_folder import MANIFEST, remove_path_atomically
from partitioner.runtime.checkpoint.load import (
    LATEST,
    STEP,
    check_equal_on_ranks,
    list_complete_checkpoints,
    list_resumable_checkpoints,
)
from partitioner.runtime.checkpoint.memory_copies import MemoryCopies, remove_line_token
from partitioner.runtime.checkpoint.ranks import Peers
from partitioner.runtime.checkpoint.run_state import CheckpointedEngine
from partitioner.runtime.checkpoint.save import Saving
from partitioner.runtime.checkpoint.training_state import Optimizers, Stateful
from partitioner.runtime.errors import CheckpointError, DamagedCheckpointError
from partitioner.runtime.files import parse_json, write_text

_SAME_REQUEST_S = 2.0  # torchrun forwards a signal within its monitor interval of 0.1 s, or later on a busy host


class Interrupts:
    """Records whether this rank has received one of ``signals``, such as SIGTERM. ``rank``: number of this rank.
    ``world_size``: number of ranks.

    Further signals within :data:`_SAME_REQUEST_S` seconds of the first one are ignored, because the same request may
    arrive twice: Slurm, for example, signals both torchrun and its workers, and torchrun forwards the signal to the
    workers. A later signal has its usual effect. Raise :class:`CheckpointError` if Python cannot install the handlers,
    for example outside of the main thread.
    """

    def __init__(self, rank: int, world_size: int, signals: Iterable[int]) -> None:
        self._peers = Peers(rank, world_size)
        self._asked_at: float | None = None  # time.monotonic() of the first signal
        self._before: dict[int, Any] = {}
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._handle_signal)
        except ValueError as error:
            self.close()
            raise CheckpointError(
                f"signals={list(signals)} cannot be handled ({error}): create Checkpoints in the main thread, with "
                "signals that a process may catch"
                ", or leave signals= out"
            ) from None

    def is_requested(self) -> bool:
        """Return whether any rank has received one of the signals that ask to end training. All ranks call this."""
        return bool(self._peers.sum_numbers([int(self._asked_at is not None)])[0])

    def close(self) -> None:
        """Restore the signal handlers that were installed before."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _SAME_REQUEST_S:
            self.close()
            signal.raise_signal(number)


class Checkpoints:
    """The checkpoints of one training in ``folder``. All ranks create one instance and call the same methods.

    Args:
        optimizer: the optimizer of the engine's parameters, or a list of several. An item is ``None`` if this rank has
            none of the parameters of that optimizer.
        every: number of optimizer steps between two saves by :meth:`after_step`; 0: only :meth:`save` saves.
        keep_last: number of latest checkpoints that are kept (at least 1); ``None``: all.
        keep_every: checkpoints whose number of optimizer steps is a multiple of this number are never removed.
        behind: if true, copy the state to host memory and write it while training continues; otherwise wait until it is
            written.
        extra: further objects to save and restore, by name, such as data loaders and schedulers.
        copies_every: number of optimizer steps between two copies of the state into the memory of the nodes; 0: no
            copies. Ranks that were restarted resume from these copies; see :class:`MemoryCopies`.
        copies_in: folder in each node's memory for the copies; by default ``/dev/shm``.
        signals: signals that ask to end training, such as ``(signal.SIGTERM,)``. When any rank has received one,
            :attr:`interrupted` becomes true on all ranks in the same :meth:`after_step`, or in the same batch of an
            evaluation (:meth:`Engine.run`) or call of :meth:`Engine.generate`: leave the loop then, and call
            :meth:`close`. In an evaluation or generation between two optimizer steps, the state is saved before the
            batch runs, since the process may be killed before the evaluation ends.

    If writing fails, the next save or :meth:`wait` raises the error; complete checkpoints are kept. A folder may be
    used for only one training at a time: if another training has written a checkpoint to the folder since the last one
    of this training, saving raises :class:`CheckpointError`.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: CheckpointedEngine,
        optimizer: Optimizers = None,
        *,
        every: int = 0,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        behind: bool = True,
        extra: Mapping[str, Stateful] | None = None,
        copies_every: int = 0,
        copies_in: str | Path | None = None,
        signals: Sequence[int] = (),
    ) -> None:
        for name, value, least in (
            ("every", every, 0),
            ("keep_last", keep_last, 1),
            ("keep_every", keep_every, 1),
            ("copies_every", copies_every, 0),
        ):
            if value is not None and value < least:
                raise CheckpointError(f"{name} must be at least {least}, got {value}")
        importlib.import_module(
            "partitioner.runtime.checkpoint.dcp_files"
        )  # takes a second, which would otherwise delay training during the first save
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is no folder; expected the folder of the checkpoints: give another path"
            )
        self.engine = engine
        self.optimizer = optimizer
        self.every = every
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.behind = behind
        self.extra = dict(extra or {})
        self.copies_every = copies_every
        memory = None if copies_in is None else Path(copies_in)
        self.copies = MemoryCopies(self.folder, engine, memory) if copies_every else None
        self.interrupted = False
        rank = engine.rank_program
        self._interrupts = Interrupts(rank.rank, rank.program.world_size, signals) if signals else None
        self._published: tuple[str, str] | None = None  # name and token of the checkpoint that was published last
        self._last: int | None = None  # the step that was saved last, or restored from the disk
        self._between_steps_at = engine.steps  # value of ``engine.steps`` after the last step of the optimizer
        if self._interrupts is not None:
            engine.before_runs.append(self._before_run)

    def after_step(self) -> Saving | None:
        """Count an optimizer step, copy and save the state if due, and update :attr:`interrupted`. All ranks call this
        after each step of the optimizer; with ``engine.step(batch, accumulate=True)``, only after the optimizer has
        stepped, not after each batch. Return the handle of the checkpoint that is being written, or ``None`` if none
        was due. Raise :class:`CheckpointError` if a copy, or the previous save, failed.
        """
        self.engine.count_optimizer_step()
        steps = self.engine.optimizer_steps
        self._between_steps_at = self.engine.steps
        if self._interrupts is not None and not self.interrupted:
            self.interrupted = self._interrupts.is_requested()
        if self.copies is not None and steps % self.copies_every == 0:
            with self.engine.doing("saving"):
                self.copies.save(self.optimizer, self.extra)
        return self.save() if self.every and steps % self.every == 0 else None

    def save(self) -> Saving:
        """Start to save a checkpoint now, and return its handle. If checkpoints are not written in the background, the
        checkpoint is complete on return. Raise :class:`CheckpointError` if the previous save failed.
        """
        directory = self.folder / f"{STEP}{self.engine.steps:010}"
        saving = self.engine.save(
            directory, self.optimizer, extra=self.extra, wait=not self.behind, then=self._publish_checkpoint
        )
        self._last = self.engine.steps
        return saving

    def wait(self) -> None:
        """Wait until the last started checkpoint is complete. Raise :class:`CheckpointError` if the save failed."""
        self.engine.wait_for_save()

    def close(self) -> None:
        """Save the last step unless it is already saved, wait for the save, and remove the copies in memory. Call this
        before the process ends. Raise :class:`CheckpointError` if the save failed.
        """
        self.engine.settle_saves()
        if self._last != self.engine.steps:
            self.save()
            self.engine.settle_saves()
        if self.copies is not None:
            self.copies.remove()
        if self._interrupts is not None:
            self._interrupts.close()
            if self._before_run in self.engine.before_runs:
                self.engine.before_runs.remove(self._before_run)

    def _before_run(self) -> None:
        """Update :attr:`interrupted` before a batch of an evaluation or a generation runs. If it has become true, save
        the state, unless it is already saved, and wait until it is written. The engine calls this on all ranks.

        Do nothing if the optimizer has not stepped since the last call of :meth:`Engine.step`: a checkpoint would count
        a step whose update it does not contain.
        """
        assert self._interrupts is not None
        if self.interrupted or self.engine.steps != self._between_steps_at:
            return
        self.interrupted = self._interrupts.is_requested()
        if self.interrupted:
            if self._last != self.engine.steps:
                self.save()
            self.engine.settle_saves()

    def restore(self) -> int | None:
        """Load the last complete checkpoint, and return its step. Return ``None`` if the folder has no checkpoint.

        Copies in memory are used if they are of this plan and no checkpoint is newer. The last checkpoint is the one
        that was written last: after a return to an earlier one by :meth:`Engine.load`, checkpoints of later steps stay
        in the folder and are not used. If a checkpoint is damaged, a warning names it, and the one before it is loaded.
        Raise :class:`CheckpointError` if all are damaged, or if ranks see different checkpoints.
        """
        self.engine._saver.wait_until_idle()
        if self.copies is not None:
            with self.engine.doing("loading"):
                step = self.copies.restore(self.optimizer, self.extra)
            if step is not None:
                self._between_steps_at = self.engine.steps
                return step
        remove_line_token(self.folder, self.engine.rank_program.rank)
        found = list_resumable_checkpoints(self.folder)
        check_equal_on_ranks(self.folder, found, self.engine.rank_program, self.engine.communicator)
        for number, checkpoint in enumerate(found, 1):
            try:
                self.engine.load(checkpoint.folder, self.optimizer, extra=self.extra)
            except DamagedCheckpointError as error:
                if number == len(found):
                    raise
                warnings.warn(f"{error}; the previous checkpoint is used instead", stacklevel=2)
            else:
                self._last = self._between_steps_at = self.engine.steps
                return self._last
        return None

    def _publish_checkpoint(self, directory: Path) -> None:
        """Write the file ``latest``, which names the complete checkpoint ``directory``, and remove old checkpoints.
        Only rank 0 calls this. Raise :class:`CheckpointError` if another training has written to the folder since the
        last call of this method.
        """
        found = _read_published(self.folder)
        # a checkpoint with the name of ``directory`` is this run's own, written again
        if found and self._published and found != self._published and found[0] != directory.name:
            raise CheckpointError(
                f"another run writes to {self.folder}: it wrote {found[0]}, while this run wrote "
                f"{directory.name}; expected one training for each folder: end one of the runs, or give each "
                "its own folder"
            )
        write_text(self.folder / LATEST, directory.name)
        self._published = _read_published(self.folder)
        if self.keep_last is None:
            return
        # checkpoints of later steps, from before a return to an earlier one, stay until their step is reached again
        here = [c for c in list_complete_checkpoints(self.folder) if c.folder.name <= directory.name]
        for checkpoint in here[: -self.keep_last]:
            kept = self.keep_every is not None and checkpoint.optimizer_steps % self.keep_every == 0
            if not kept and checkpoint.folder != directory:
                remove_path_atomically(checkpoint.folder)


def _read_published(folder: Path) -> tuple[str, str] | None:
    """Return the name and the token (a random text that identifies one save) of the checkpoint that the file ``latest``
    in ``folder`` names; ``None`` if there is none, or if it cannot be read.
    """
    try:
        name = (folder / LATEST).read_text().strip()
        return name, str(parse_json((folder / name / MANIFEST).read_text())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
