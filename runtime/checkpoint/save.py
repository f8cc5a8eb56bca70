"""Write a checkpoint, either immediately or in a thread, from copies in host memory, while training continues.

:class:`Staging` makes the copies. Parameters and optimizer state change only in the optimizer's step. They are copied
during the next forward and backward, and an optimizer step that would start before the copies are complete waits. All
other state is copied immediately. States on disk are not copied, because that would load all of them into memory. They
are written from their files, and the optimizer step waits until they are written.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partitioner.runtime.checkpoint import hyperparameters
from partitioner.runtime.checkpoint.atomic_folder import (
    MANIFEST,
    OWN,
    CheckpointTarget,
    remove_path_atomically,
    wait_for_writers,
)
from partitioner.runtime.checkpoint.file_sums import METADATA, FileSum, compute_file_sum
from partitioner.runtime.checkpoint.shards import ShardPiece, find_rank_shard, list_shard_pieces, list_written_states
from partitioner.runtime.checkpoint.training_state import (
    Optimizers,
    OptimizerState,
    is_equal_data,
    list_optimizers,
    pack_plain_data,
    unpack_plain_data,
)
from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.files import write_bytes, write_text
from partitioner.runtime.program.program import Program, RankProgram, list_updated_states
from partitioner.runtime.state.disk_offload import is_mapped


class Staging:
    """Copies a rank's training state to host memory, from which a checkpoint is written while training continues.
    ``device``: the device of the rank. There is one save at a time; the host buffers of the previous save are reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied = threading.Event()
        self.copied.set()
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._later: list[tuple[ShardPiece, Tensor, int]] = []
        self._as_it_is: list[tuple[ShardPiece, int]] = []
        self._ready: torch.cuda.Event | None = None
        self._hooks: list[Any] = []

    def start_copies(
        self,
        changing: Sequence[ShardPiece],
        unchanging: Sequence[ShardPiece],
        optimizers: Sequence[torch.optim.Optimizer | None],
    ) -> list[ShardPiece]:
        """Start to copy the state for a save, and return pieces (rectangular parts of tensors) that refer to the
        copies. Pieces on disk are not copied and are returned unchanged. Call this only after the previous save has
        ended.

        Args:
            changing: pieces that may change at any time; they are copied now.
            unchanging: pieces that change only in an optimizer step; :meth:`finish_copies` copies them later.
            optimizers: the optimizers whose next step waits until the copies are complete.
        """
        self._remove_hooks()
        everything = [*changing, *unchanging]
        self._as_it_is = [(p, p.tensor._version) for p in everything if is_mapped(p.tensor)]
        changing, unchanging = ([p for p in given if not is_mapped(p.tensor)] for given in (changing, unchanging))
        used: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for piece in (*changing, *unchanging):
            key = piece.key, piece.offsets
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
            used[key] = buffer
        self._buffers = used
        for piece in changing:
            used[piece.key, piece.offsets].copy_(piece.tensor)
        self._later = [(p, used[p.key, p.offsets], p.tensor._version) for p in unchanging]
        self.copied.clear()
        if self.device.type == "cuda":
            self._ready = torch.cuda.current_stream(self.device).record_event()
        self._hooks = [o.register_step_pre_hook(self._wait_for_copies) for o in optimizers if o is not None]
        return [
            p if is_mapped(p.tensor) else ShardPiece(p.key, p.shape, p.offsets, used[p.key, p.offsets])
            for p in everything
        ]

    def finish_copies(self) -> None:
        """Copy the tensors that change only in an optimizer step. The thread that writes the checkpoint calls this.
        Raise :class:`CheckpointError` if one of them was changed before it was copied.
        """
        try:
            with torch.no_grad():
                self._copy()
            changed = [p.key for p, _, version in self._later if p.tensor._version != version]
        finally:
            self._later = []
            if not self._as_it_is:
                self.copied.set()
        self._require_unchanged(changed)

    def release(self) -> None:
        """Let the optimizer step again, after the state was written or writing has failed. Raise
        :class:`CheckpointError` if a tensor on disk, which is written without a copy, was changed before it was
        written.
        """
        changed = [p.key for p, version in self._as_it_is if p.tensor._version != version]
        self._as_it_is = []
        self.copied.set()
        self._require_unchanged(changed)

    def _require_unchanged(self, changed: Sequence[str]) -> None:
        """Raise :class:`CheckpointError` if ``changed``, the names of tensors that were changed while they were copied,
        is not empty.
        """
        if changed:
            raise CheckpointError(
                f"{changed[0]} was changed while it was copied: change parameters only by the step of the optimizer "
                "that was passed to save(), or first call wait_until_copied() on the result of save()"
            )

    def _copy(self) -> None:
        """Copy the tensors that change only in an optimizer step to host buffers, and wait for the copies. On a GPU the
        copies run on a separate CUDA stream, after the kernels that were queued when the save began.
        """
        if self._ready is None:
            for piece, buffer, _ in self._later:
                buffer.copy_(piece.tensor)
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            for piece, buffer, _ in self._later:
                buffer.copy_(piece.tensor, non_blocking=True)
        stream.synchronize()

    def _wait_for_copies(self, *_: Any) -> None:
        self.copied.wait()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


FORMAT = 1

TRAINING = "training.pt"
TIMEOUT_S = 1800.0
MODEL = "model."


@dataclass(frozen=True)
class CheckpointContent:
    """Everything that one rank has to save to a checkpoint.

    Args:
        rank: the program of this rank.
        changing: rectangular parts of tensors that may change before the optimizer steps.
        unchanging: rectangular parts of tensors that change only when the optimizer steps.
        training: state that is equal on all ranks, such as step counters.
        random: this rank's states of random generators.
        own: this rank's states of further objects, such as data loaders, and its optimizers' hyperparameters.
        steps: number of batches processed so far.
    """

    rank: RankProgram
    changing: Sequence[ShardPiece]
    unchanging: Sequence[ShardPiece]
    training: Mapping[str, Any]
    random: Mapping[str, Any]
    own: Mapping[str, Any]
    steps: int


class Saving:
    """The handle of a checkpoint that is being written to ``directory``. ``copied``: a ``threading.Event`` that is set
    when all saved state is copied, so that training may change it again.
    """

    def __init__(self, directory: Path, copied: threading.Event) -> None:
        self.directory = directory
        self._copied = copied
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None], in_background: bool) -> None:
        """Call ``work``, which writes the checkpoint. If ``in_background`` is true, ``work`` runs in a new thread, so
        that training continues; otherwise this method returns when it has ended. An exception of ``work`` is stored in
        :attr:`error`.
        """

        def guarded() -> None:
            """Call ``work``, and store its exception. If the main thread has ended, nobody reads the stored exception,
            so raise it, too.
            """
            try:
                work()
            except BaseException as error:
                self.error = error
                if not threading.main_thread().is_alive():
                    raise  # nobody reads the stored exception any more

        if in_background:
            thread = threading.Thread(target=guarded, name=f"checkpoint {self.directory.name}")
            thread.start()
            self._thread = thread
        else:
            guarded()

    @property
    def done(self) -> bool:
        """Return whether the writing of this checkpoint has ended, with a complete checkpoint or with an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait_until_copied(self) -> None:
        """Wait until the state is copied, so that it may be changed. The optimizer's step waits by itself; code that
        changes parameters in another way must call this first.
        """
        self._copied.wait()

    def wait(self) -> None:
        """Wait until this checkpoint is completely written. Raise :class:`CheckpointError` if any rank failed; a
        previous checkpoint in the folder is then kept.
        """
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise _choose_reported_error(error, self.directory)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


_OPEN_SAVES: weakref.WeakSet[Saving] = weakref.WeakSet()  # of all engines in this process


@dataclass
class Saver:
    """Saves checkpoints for one rank, one at a time. ``communicator``: connects this rank with the others.
    ``world_size``: number of ranks. ``timeout``: seconds to wait for the files of other ranks. ``last``: handle of the
    last save. ``saved_at``: number of steps at which the state was last saved, or copied into memory.
    """

    communicator: Communicator
    world_size: int
    timeout: float = TIMEOUT_S
    last: Saving | None = None
    saved_at: int | None = None  # number of steps at which the state was last saved or copied
    _staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging(self.communicator.device)

    def save(
        self,
        directory: Path,
        build_content: Callable[[], CheckpointContent],
        optimizer: Optimizers,
        *,
        wait: bool,
        then: Callable[[Path], None] | None = None,
    ) -> Saving:
        """Save a checkpoint to ``directory``, and return its handle. All ranks call this. Raise
        :class:`CheckpointError` on all ranks, before anything is written, if the previous save, or ``build_content``,
        failed on any rank.

        Args:
            build_content: function that returns the content to save; called after the previous save has ended.
            optimizer: the optimizers whose step waits until their state is copied.
            wait: whether to return only after the checkpoint is complete and ``then`` has returned, on all ranks.
            then: function that is called with the folder on rank 0 once the checkpoint is complete.
        """
        contents: list[CheckpointContent] = []

        def ready() -> None:
            self.wait()
            contents.append(build_content())

        target = agree_on_target(directory.resolve(), self.communicator, self.world_size, before=ready)
        [content] = contents
        self.saved_at = content.steps
        first = content.rank.rank == 0
        held = [*content.changing, *content.unchanging]
        if not wait:
            held = self._staging.start_copies(content.changing, content.unchanging, list_optimizers(optimizer))
            content = replace(content, training=dict(content.training), own=copy.deepcopy(content.own))
        self.last = Saving(target.final, self._staging.copied)

        def work() -> None:
            _write_rank_part(target, content, held, self.timeout, None if wait else self._staging)
            if first and then is not None:
                then(target.final)

        self.last.run(work, in_background=not wait)
        _OPEN_SAVES.add(self.last)
        if wait:
            self.settle()
        return self.last

    def wait(self) -> None:
        """Wait until the last checkpoint that this rank saves is complete. Raise :class:`CheckpointError` if the save
        failed.
        """
        if self.last is not None:
            self.last.wait()

    def settle(self) -> None:
        """Wait until the last save is complete on all ranks, and the function ``then`` that was passed to it has
        returned. All ranks call this. Raise :class:`CheckpointError` on all ranks if the save failed on any rank.
        """
        _run_on_all_ranks(self.wait, self.communicator, self.world_size, "the checkpoint was not written")

    def check_between(self, steps: int, gradients: Iterable[Tensor]) -> None:
        """Warn on rank 0 if the last checkpoint was saved in the middle of gradient accumulation: after ``steps``
        batches, and the next batch adds to gradients that were accumulated before. A checkpoint does not contain
        gradients, so training that resumes from it would lose the accumulated ones. ``gradients``: the accumulated
        gradients; there is no warning if all are zero.
        """
        if self.saved_at == steps and self.communicator.rank == 0 and any(bool(g.any()) for g in gradients):
            warnings.warn(
                f"step {steps} was saved while its gradients were still being accumulated; a checkpoint "
                "contains no gradients, so a run that resumes from it would lack them: call save() and "
                "after_step() only after the optimizer has stepped",
                stacklevel=3,
            )
        self.saved_at = None

    def wait_until_idle(self, directory: Path | None = None) -> None:
        """Wait until no save of this engine is in progress on any rank, whether it succeeds or fails. All ranks call
        this. ``directory``: wait also for saves by other engines and processes to this folder, or to folders in it.
        Raise :class:`CheckpointError` if the save of another process does not end in time.
        """

        def wait() -> None:
            """Wait for the saves of this engine. If ``directory`` is given, also wait for saves of other engines and
            processes to it.
            """
            if self.last is not None:
                self.last.join()
            if directory is not None:
                for saving in list(_OPEN_SAVES):
                    if directory in (saving.directory, saving.directory.parent):
                        saving.join()
                if self.communicator.rank == 0:
                    wait_for_writers(directory, self.timeout)

        _run_on_all_ranks(wait, self.communicator, self.world_size, "the checkpoint was not loaded")

    def wait_until_copied(self) -> None:
        self._staging.copied.wait()


def _run_on_all_ranks(work: Callable[[], None], communicator: Communicator, world_size: int, action: str) -> None:
    """Call ``work`` on every rank. If it fails on any rank, raise an error on all ranks: the error of ``work`` where it
    failed, a :class:`CheckpointError` elsewhere. All ranks call this. ``action``: start of the message of the
    :class:`CheckpointError`, such as "the checkpoint was not written". ``world_size``: number of ranks.
    ``communicator``: connects this rank with the others.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    failed = torch.zeros(world_size, dtype=torch.int32, device=communicator.device)
    failed[communicator.rank] = int(error is not None)
    failures = get_world_group(communicator, world_size).all_reduce(failed).wait().tolist()
    if error is not None:
        raise error
    if any(failures):
        raise CheckpointError.from_other_rank(f"{action}: rank {failures.index(1)} failed; its own error says why")


def agree_on_target(
    final: Path,
    communicator: Communicator,
    world_size: int,
    before: Callable[[], None] | None = None,
    own: str = OWN,
) -> CheckpointTarget:
    """Prepare to write a checkpoint or an export to the folder ``final``, and return the paths to use, which are the
    same on all ranks. All ranks call this. Rank 0 removes incomplete files that earlier, failed writes have left.

    ``before``: function called first on each rank. ``own``: regular expression of the names of the files in ``final``
    that the new files replace. ``world_size``: number of ranks. ``communicator``: connects this rank with the others.
    Raise the exception of ``before``, or :class:`CheckpointError` if ``before`` or the removal failed on another rank.
    """
    error: Exception | None = None
    token = 0
    try:
        if before is not None:
            before()
        if communicator.rank == 0:
            token = secrets.randbits(60)
            CheckpointTarget(final, f"{token:015x}", own).clean()
    except OSError as caught:
        error = CheckpointError(f"{final} cannot be written: {caught}")
        error.__cause__ = caught
    except Exception as caught:
        error = caught
    numbers = torch.tensor([token, int(error is not None)], dtype=torch.int64, device=communicator.device)
    token, failed = get_world_group(communicator, world_size).all_reduce(numbers).wait().tolist()
    if error is not None:
        raise error
    if failed:
        raise CheckpointError.from_other_rank(
            f"saving {final} was not started: on {failed} other ranks the previous save or the start of this "
            "one failed; their own errors say why"
        )
    return CheckpointTarget(final, f"{token:015x}", own)


def list_pieces(
    rank: RankProgram, states: Mapping[str, Tensor], optimizer: OptimizerState | None
) -> tuple[list[ShardPiece], list[ShardPiece]]:
    """Return the rectangular parts of weights and optimizer state that this rank writes to a checkpoint, in two lists:
    those that may change at any time, and those that change only in an optimizer step. ``rank``: the program of this
    rank. ``states``: name -> this rank's shard. ``optimizer``: the states of the optimizers; ``None``: optimizer state
    is not written.
    """
    saved = list_saved_states(rank.program)
    mine = list_written_states(rank, saved)
    changing: list[ShardPiece] = []
    unchanging: list[ShardPiece] = []
    for name in saved:
        if name in mine:
            to = unchanging if optimizer is not None and optimizer.updates_parameter(name) else changing
            own = find_rank_shard(rank.program, name, rank.rank)
            to += list_shard_pieces(MODEL, name, rank.program.states[name], own, states[name].detach())
            if optimizer is not None and name in optimizer.parameters:
                to += optimizer.pieces(rank, name)
    return changing, unchanging


def list_saved_states(program: Program) -> list[str]:
    """Return the names of the parameters and buffers of ``program`` that a checkpoint contains: weights, and buffers
    that a step updates.
    """
    kept = set(list_weight_states(program)) | set(list_updated_states(program))
    return [n for n in program.states if n in kept]


def list_weight_states(program: Program) -> list[str]:
    """Return the names of the parameters and buffers of ``program`` that some pipeline stage reads, except those whose
    values are stored in the plan itself.
    """
    return [n for n, s in program.states.items() if s.kind != "constant" and n not in program.constants and s.stages]


def _write_rank_part(
    target: CheckpointTarget,
    content: CheckpointContent,
    pieces: Sequence[ShardPiece],
    timeout: float,
    staging: Staging | None,
) -> None:
    """Write this rank's part of a checkpoint. On rank 0, also complete the checkpoint; other ranks wait until it is
    complete. On an error, report it to the other ranks and raise it.

    ``target``: the paths of the checkpoint. ``content``: everything that this rank saves. ``pieces``: the rectangular
    parts of tensors to write. ``timeout``: seconds to wait for other ranks. ``staging``: object that copies the tensors
    to host memory; ``pieces`` then refers to the copies, which are finished first. ``None``: ``pieces`` refers to the
    tensors themselves.
    """
    from partitioner.runtime.checkpoint.dcp_files import pack_record, write_shards

    rank = content.rank.rank
    try:
        try:
            target.begin(rank)
            if staging is not None:
                staging.finish_copies()
            written = write_shards(target.partial, rank, pieces)
        finally:
            if staging is not None:
                staging.release()
        own = pack_plain_data(content.own, "the run")
        write_bytes(target.get_record_path(rank), pack_record(written, content.random, own))
        if rank == 0:
            _complete_checkpoint(target, content, timeout)
    except BaseException as error:
        if isinstance(error, FileNotFoundError):
            target.check()  # rank 0 has failed and removed the folder, so the missing file is not the cause
        for path in target.partial.glob(f"__{rank}_*"):
            path.unlink(missing_ok=True)  # frees space for the report to the other ranks
        target.fail(rank, error)
        if rank == 0:
            with contextlib.suppress(OSError):
                remove_path_atomically(target.partial)
        raise
    if rank != 0:
        target.wait_until_complete(timeout)


def _complete_checkpoint(target: CheckpointTarget, content: CheckpointContent, timeout: float) -> None:
    """Wait for the parts of all ranks, write the metadata and the manifest with checksums, and rename the folder to its
    final name. ``timeout``: seconds to wait for other ranks. ``target``: the paths of the checkpoint. ``content``:
    everything that this rank saves. Raise :class:`CheckpointError` if a rank failed or is late.
    """
    from partitioner.runtime.checkpoint.dcp_files import unpack_record, write_metadata

    program = content.rank.program
    records = target.wait_for_records(program.world_size, timeout)
    loaded = [unpack_record(r.read_bytes()) for r in records]
    written = [w for w, _, _ in loaded]
    write_metadata(target.partial, written)
    owns = [unpack_plain_data(own) for _, _, own in loaded]
    training = {
        **content.training,
        "random": _deduplicate_random_states([random for _, random, _ in loaded]),
        "optimizer": hyperparameters.merge_rank_descriptions([own["optimizer"] for own in owns]),
        "extra": owns[0]["extra"],
        "extra_of_ranks": _collect_differing_states([own["extra"] for own in owns]),
    }
    write_bytes(target.partial / TRAINING, pack_plain_data(training, "the run"))
    for rank, record in enumerate(records):
        record.unlink()
        target.get_writer_path(rank).unlink()
    files: dict[str, FileSum] = {name: total for w in written for name, total in w.files.items()}
    files |= {name: compute_file_sum(target.partial / name) for name in (METADATA, TRAINING)}
    manifest = {
        "format": FORMAT,
        "token": target.token,
        "steps": content.steps,
        "optimizer_steps": content.training["optimizer_steps"],
        "world_size": program.world_size,
        "mesh": program.mesh,
        "fingerprint": program.fingerprint,
        "optimizer": training["optimizer"] is not None,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    write_text(target.partial / MANIFEST, json.dumps(manifest, indent=1))
    target.commit()


def _deduplicate_random_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of the random generators of all ranks, with equal states stored once, as a dict: ``"states"``
    has the distinct states, and ``"of"`` has for each rank the index of its state. ``states``: for each rank, a dict:
    name of a generator (``python``, ``torch`` and so on) -> its state.
    """
    places: dict[bytes, int] = {}
    of = [places.setdefault(pickle.dumps(state), len(places)) for state in states]
    return {"of": of, "states": [states[of.index(i)] for i in range(len(places))]}


def _collect_differing_states(extras: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the states of further objects, such as data loaders, that differ between ranks, as a dict: object name ->
    list of the state of each rank. States that are equal on all ranks are left out. ``extras``: for each rank, object
    name -> state.
    """
    first, *others = extras
    differ = [n for n, state in first.items() if not all(is_equal_data(state, other.get(n)) for other in others)]
    return {name: [extra.get(name) for extra in extras] for name in differ}


def _choose_reported_error(error: BaseException, directory: Path) -> BaseException:
    """Return the error to report for a failed save. If ``error`` is a :class:`CheckpointError`, or not an ordinary
    ``Exception`` (such as ``KeyboardInterrupt``), it is ``error`` itself; otherwise a :class:`CheckpointError` that
    names the checkpoint ``directory`` and quotes ``error``.
    """
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    told = CheckpointError(
        f"the checkpoint {directory} was not written: {type(error).__name__}: {error}; earlier ones are as they were"
    )
    told.__cause__ = error
    return told
