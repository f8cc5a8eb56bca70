"""Find a checkpoint, verify its files, and reshard it: read the shards that this rank needs under any plan."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from partitioner.passes.capture.wrappers import match_state_names
from partitioner.passes.errors import PartitionError
from partitioner.runtime.checkpoint import hyperparameters
from partitioner.runtime.checkpoint.atomic_folder import MANIFEST, read_manifest
from partitioner.runtime.checkpoint.file_sums import FileSum, compute_file_sum
from partitioner.runtime.checkpoint.save import FORMAT, MODEL, TRAINING, list_saved_states
from partitioner.runtime.checkpoint.shards import (
    ShardPiece,
    find_rank_shard,
    list_shard_pieces,
    make_scalar_piece,
    make_whole_piece,
)
from partitioner.runtime.checkpoint.training_state import (
    STATE,
    OptimizerState,
    check_whole,
    find_wrong_state,
    unpack_plain_data,
)
from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.errors import CheckpointError, DamagedCheckpointError
from partitioner.runtime.files import is_file_name
from partitioner.runtime.program.program import RankProgram
from partitioner.runtime.state.parameters import list_names_read

if TYPE_CHECKING:
    from partitioner.runtime.checkpoint.dcp_files import ShardReader

LATEST = "latest"

STEP = "step-"
_MAX_LISTED = 5
_LONGEST = 60  # maximum number of characters of a value in a message
_TOKEN = re.compile("[0-9a-f]{1,15}", re.ASCII)
# Errors by the number with which a rank reports its result to the others, from 1 on; 0 means success.
_FAILURES = (CheckpointError, DamagedCheckpointError)
_T = TypeVar("_T")


class CheckpointMatch(NamedTuple):
    """A complete checkpoint that was found. ``folder``: its folder. ``manifest``: the parsed content of its
    ``manifest.json``, a dict with step counters and the files' checksums.
    """

    folder: Path
    manifest: dict[str, Any]

    @property
    def steps(self) -> int:
        return int(self.manifest["steps"])

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps before the checkpoint was saved. Checkpoints of older versions did not
        store it; for them, return the number of batches.
        """
        return int(self.manifest.get("optimizer_steps", self.steps))

    @property
    def files(self) -> dict[str, FileSum]:
        try:
            files = {name: FileSum(**content) for name, content in self.manifest["files"].items()}
        except (KeyError, TypeError, AttributeError):
            files = {"": FileSum(0, "")}
        if not all(map(is_file_name, files)):
            raise DamagedCheckpointError(
                f"{self.folder / MANIFEST} is damaged: expected in 'files' names of files in its folder, with length "
                "and SHA-256; load another checkpoint"
            )
        return files


def is_checkpoint(directory: Path) -> bool:
    """Return whether ``directory`` is a complete checkpoint or contains one; ``False`` for a folder of safetensors
    files.
    """
    return any((p / MANIFEST).exists() for p in _list_candidate_folders(directory))


def find_checkpoint(directory: Path) -> CheckpointMatch:
    """Return the checkpoint at ``directory``; if ``directory`` is a folder of several checkpoints, the latest of them.
    Raise :class:`CheckpointError` if there is none, if it is incomplete or damaged, or if its format version differs.
    """
    for folder in _list_candidate_folders(directory):
        manifest = read_manifest(folder)
        if manifest:
            if manifest.get("format") != FORMAT:
                raise CheckpointError(f"{folder} has format {manifest.get('format')}; this version reads {FORMAT}")
            if wrong := _find_wrong_field(manifest):
                raise DamagedCheckpointError(
                    f"{folder / MANIFEST} is damaged: {wrong}{_suggest_other_checkpoint(folder)}"
                )
            return CheckpointMatch(folder, manifest)
        if (folder / MANIFEST).exists():
            raise DamagedCheckpointError(
                f"{folder / MANIFEST} is damaged: it is not JSON{_suggest_other_checkpoint(folder)}"
            )
    what = "is incomplete" if directory.exists() else "does not exist"
    raise CheckpointError(f"{directory} {what}: it has no {MANIFEST}{_suggest_other_checkpoint(directory)}")


def _find_wrong_field(manifest: Mapping[str, Any]) -> str:
    """Return an empty string if ``manifest``, the content of a ``manifest.json``, has all fields with the right types;
    otherwise a text that says what was expected and what was found in the first wrong field.
    """
    for name, kind in {"steps": int, "token": str, "world_size": int, "mesh": dict, "files": dict}.items():
        if type(manifest.get(name)) is not kind:
            return f"expected {kind.__name__} under {name!r}, got {str(manifest.get(name))[:_LONGEST]!r}"
    if not _TOKEN.fullmatch(manifest["token"]):
        return f"expected up to 15 hexadecimal digits under 'token', got {manifest['token'][:_LONGEST]!r}"
    if type(manifest.get("optimizer_steps", 0)) is not int or not 0 <= manifest["steps"] < 2**60:
        return "expected numbers of steps"
    return ""


def list_complete_checkpoints(root: Path) -> list[CheckpointMatch]:
    """Return the complete checkpoints in the folder ``root``, in ascending order of training steps."""
    found = [CheckpointMatch(p, m) for p in root.glob(f"{STEP}*") if not _find_wrong_field(m := read_manifest(p))]
    return sorted(found, key=lambda f: (f.steps, f.folder.name))


def list_resumable_checkpoints(root: Path) -> list[CheckpointMatch]:
    """Return the complete checkpoints in the folder ``root``, in the order in which they should be tried for resuming:
    checkpoints with more steps come first.

    There is one exception: if the user resumed from an earlier checkpoint, the checkpoints with more steps from before
    that restart come last. These are recognised as follows: they have more steps than the checkpoint that the file
    ``latest`` names, and are older than the file ``latest``.
    """
    found = list_complete_checkpoints(root)[::-1]
    named = root / LATEST
    try:
        latest = next(f for f in found if f.folder.name == named.read_text().strip())
        written = named.stat().st_mtime_ns
    except (OSError, ValueError, StopIteration):
        return found
    left = [f for f in found if f.steps > latest.steps and (f.folder / MANIFEST).stat().st_mtime_ns < written]
    return [f for f in found if f not in left] + left


def find_on_all_ranks(directory: Path, rank: RankProgram, communicator: Communicator) -> CheckpointMatch:
    """Return the checkpoint at ``directory``, or the latest checkpoint in it. All ranks call this. Raise
    :class:`CheckpointError` on all ranks if any rank does not find a checkpoint. ``rank``: the program of this rank.
    ``communicator``: connects this rank with the others.
    """
    return _run_on_all_ranks(communicator, rank, lambda: find_checkpoint(directory))


def check_equal_on_ranks(
    root: Path, found: Sequence[CheckpointMatch], rank: RankProgram, communicator: Communicator
) -> None:
    """Raise :class:`CheckpointError` on all ranks if ranks see different checkpoints in the folder ``root``. All ranks
    call this. ``found``: the checkpoints that this rank sees there. ``rank``: the program of this rank.
    ``communicator``: connects this rank with the others.
    """
    told = json.dumps([(f.folder.name, f.manifest["token"]) for f in found])
    if not _is_equal_across_ranks(int(hashlib.sha256(told.encode()).hexdigest()[:15], 16), rank, communicator):
        here = ", ".join(f.folder.name for f in found) or "none"
        raise CheckpointError(
            f"ranks find different checkpoints in {root.absolute()}, this rank {here}: use a file system that all "
            "ranks share"
        )


def load_checkpoint(
    found: CheckpointMatch,
    rank: RankProgram,
    states: Mapping[str, Tensor],
    optimizer: OptimizerState | None,
    communicator: Communicator,
    verify: bool = True,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Load the checkpoint ``found`` into the tensors ``states`` and into ``optimizer``. All ranks call this.

    Args:
        rank: the program of this rank.
        states: parameter or buffer -> this rank's shard, which is filled in place.
        optimizer: the optimizers whose states are restored; ``None``: optimizer states are not restored.
        communicator: connects this rank with the others.
        verify: whether to read every file first (each file on one rank), and compare its SHA-256 with the manifest.
        extra: names of further objects, such as data loaders, whose states are returned.

    Return a dict of the saved data other than tensors, such as step counters; its entry ``"extra"`` is a dict: name of
    an object -> its state for this rank. Raise :class:`CheckpointError` on all ranks, before anything is changed, if a
    rank finds a file damaged or missing, or if the checkpoint does not match the model, the optimizer or ``extra``.
    """
    _require_same_checkpoint(found, rank, communicator)
    if verify:
        _run_on_all_ranks(communicator, rank, lambda: _check_files(found, rank))
    reader = _run_on_all_ranks(communicator, rank, lambda: _open_shard_reader(found.folder), found)
    if rank.rank == 0:
        _warn_of_other_tensors(found.folder, reader, rank)
    training = _run_on_all_ranks(communicator, rank, lambda: _read_training(found), found)
    extras = _run_on_all_ranks(communicator, rank, lambda: _select_extra_states(found, training, rank, extra), found)
    groups = _run_on_all_ranks(
        communicator, rank, lambda: _read_group_hyperparameters(training, rank, optimizer), found
    )
    names, moments = _run_on_all_ranks(
        communicator, rank, lambda: _match_saved_states(found, reader, rank, states, optimizer), found
    )
    held = [p for n, name in names.items() for p in _list_state_pieces(MODEL, rank, n, name, states[n])]
    for n, name in names.items():
        for key, tensor in moments.get(n, {}).items():
            if optimizer is not None and optimizer.has_other_shape(n, tensor):
                held.append(make_whole_piece(STATE, name, tensor, f".{key}"))
            else:
                held += _list_state_pieces(STATE, rank, n, name, tensor, f".{key}")
    with torch.no_grad():
        _run_on_all_ranks(communicator, rank, lambda: reader.read(held), found)
    if optimizer is not None:
        for n in optimizer.parameters:
            optimizer.replace(n, moments.get(n, {}))
        hyperparameters.set_hyperparameters(optimizer.optimizers, groups)
    return {**training, "extra": extras}


def _read_training(found: CheckpointMatch) -> dict[str, Any]:
    """Return the saved data of the checkpoint ``found`` other than tensors, as a dict with the keys ``steps``,
    ``seed``, ``scale``, ``extra``, and ``random`` (the states of random generators). Raise
    :class:`DamagedCheckpointError` if an entry is missing or has another type.
    """
    training = unpack_plain_data((found.folder / TRAINING).read_bytes())
    if wrong := find_wrong_state(training):
        raise DamagedCheckpointError(
            f"{found.folder / TRAINING} is damaged: {wrong}{_suggest_other_checkpoint(found.folder)}"
        )
    return training


def _open_shard_reader(folder: Path) -> ShardReader:
    from partitioner.runtime.checkpoint.dcp_files import ShardReader

    return ShardReader(folder)


def _warn_of_other_tensors(folder: Path, reader: ShardReader, rank: RankProgram) -> None:
    """Warn if the checkpoint in ``folder`` has tensors that the model does not have: the checkpoint may then be of
    another model. ``rank``: this rank's program. ``reader``: reads tensors of the checkpoint.
    """
    known = list_names_read(rank.program)
    saved = sorted(key.removeprefix(MODEL) for key in reader.tensors if key.startswith(MODEL))
    known |= match_state_names(saved, known).keys()
    if others := [name for name in saved if name not in known]:
        more = ", ..." if len(others) > _MAX_LISTED else ""
        warnings.warn(
            f"{folder} has {len(others)} tensors that the plan's model does not have "
            f"({', '.join(others[:_MAX_LISTED])}{more}); they are ignored. If the model should have them, "
            "load a checkpoint "
            "of the same model",
            stacklevel=2,
        )


def _select_extra_states(
    found: CheckpointMatch, training: Mapping[str, Any], rank: RankProgram, requested: Sequence[str]
) -> dict[str, Any]:
    """Return the saved state of each object named in ``requested``, such as a data loader, for this rank. If the ranks
    had different states, this rank gets its own. Raise :class:`CheckpointError` if a state is missing, or if states
    differ between ranks and the mesh differs from the checkpoint's.

    ``training``: the saved data other than tensors. Its entry ``extra`` is a dict: name -> state. Its entry
    ``extra_of_ranks`` has the states that differ between ranks: name -> list over ranks. ``found``: the checkpoint.
    ``rank``: the program of this rank, with its mesh.
    """
    held, of_ranks = training["extra"], training.get("extra_of_ranks", {})
    for name in requested:
        if name not in held:
            have = ", ".join(held) or "nothing"
            raise CheckpointError(f"{found.folder} holds no state of {name!r}; beside the weights it has {have}")
        if name in of_ranks and found.manifest["mesh"] != rank.program.mesh:
            raise CheckpointError(
                f"the state of {name!r} in {found.folder} differed between ranks, so it cannot be restored under "
                f"another mesh; resume under {found.manifest['mesh']}, or leave it out of extra="
            )
    return {name: of_ranks[name][rank.rank] if name in of_ranks else held[name] for name in requested}


def _read_group_hyperparameters(
    training: Mapping[str, Any], rank: RankProgram, optimizer: OptimizerState | None
) -> list[list[Mapping[str, Any]]]:
    """Return the saved hyperparameters of each parameter group of each optimizer, as a list over optimizers of lists
    over groups of dicts: name -> value. Empty if ``optimizer`` is ``None``.

    ``training``: the saved data of the checkpoint other than tensors, with the descriptions of the optimizers under
    ``optimizer`` (in files of earlier versions: parameter groups under ``groups``). ``rank``: the program of this rank.
    ``optimizer``: the optimizers whose parameter groups are matched with the saved groups.
    """
    if optimizer is None:
        return []
    saved = training.get("optimizer")
    if saved is None:  # no optimizer was saved, or an earlier version saved the groups of the first rank, in order
        groups = training.get("groups")
        return hyperparameters.match_by_position(optimizer.optimizers, None if groups is None else [groups])
    return hyperparameters.match_by_names(optimizer.optimizers, optimizer.parameters, rank.program, saved)


def _match_saved_states(
    found: CheckpointMatch,
    reader: ShardReader,
    rank: RankProgram,
    states: Mapping[str, Tensor],
    optimizer: OptimizerState | None,
) -> tuple[dict[str, str], dict[str, dict[str, Tensor]]]:
    """Return two dicts: name of each parameter or buffer of this rank -> name under which it was saved; and parameter
    name -> key (such as ``exp_avg``) -> empty tensor for this optimizer state.

    ``states``: name -> this rank's shard. ``rank``: the program of this rank. ``optimizer``: the optimizers for whose
    states tensors are returned; ``None``: the second dict is empty. ``found``: the checkpoint. ``reader``: reads
    tensors of the checkpoint. Raise :class:`CheckpointError` if parameters or buffers are missing in the checkpoint or
    have other shapes.
    """
    names: dict[str, str] = {}
    wrong: list[str] = []
    spelt = _find_other_spellings(reader, rank)
    for n in list_saved_states(rank.program):
        if n not in states:
            continue
        data = rank.program.states[n]
        shape = data.shape[1:] if data.parts else data.shape
        held = [
            c
            for c in (n, *data.aliases, *spelt.get(n, ()))
            if all(f"{MODEL}{p}" in reader.tensors for p in data.parts or (c,))
        ]
        if not held and n in rank.program.constants:  # the plan itself has the value
            continue
        if not held:
            wrong.append(f"{n}: expected {data.kind} {list(data.shape)}, got nothing")
            continue
        names[n] = held[0]
        got = {tuple(reader.tensors[f"{MODEL}{p}"].size) for p in data.parts or (held[0],)}
        if got != {shape}:
            wrong.append(f"{n}: expected shape {list(shape)}, got {list(got.pop())}")
    if wrong:
        more = f"\n  and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{found.folder} does not have the weights for which the plan was made:\n  "
            + "\n  ".join(wrong[:_MAX_LISTED])
            + f"{more}\nLoad a checkpoint of the same model, or plan again for this one."
        )
    return names, {} if optimizer is None else _allocate_optimizer_state(found, reader, rank, names, optimizer)


def _find_other_spellings(reader: ShardReader, rank: RankProgram) -> dict[str, list[str]]:
    """Return the other names, such as with a wrapper's prefix, under which the checkpoint has parameters or buffers of
    the plan, as a dict: name in the plan -> names in the checkpoint. ``reader``: reads tensors of the checkpoint.
    ``rank``: the program of this rank, which has the names of the plan.
    """
    saved = [key.removeprefix(MODEL) for key in reader.tensors if key.startswith(MODEL)]
    found: dict[str, list[str]] = {}
    for other, name in match_state_names(saved, list_names_read(rank.program)).items():
        found.setdefault(name, []).append(other)
    return found


def _allocate_optimizer_state(
    found: CheckpointMatch, reader: ShardReader, rank: RankProgram, names: Mapping[str, str], optimizer: OptimizerState
) -> dict[str, dict[str, Tensor]]:
    """Return empty tensors for the optimizer's saved state on this rank, as a nested dict: parameter name -> key (such
    as ``exp_avg``) -> tensor.

    ``names``: name of the parameter in the plan -> name under which it was saved. ``rank``: the program of this rank.
    ``optimizer``: the optimizers that will get the state. ``found``: the checkpoint. ``reader``: reads tensors of the
    checkpoint. Raise :class:`CheckpointError` if the checkpoint has no optimizer state.
    """
    saved: dict[str, list[str]] = {}
    for entry in reader.tensors:
        if entry.startswith(STATE):
            owner, _, key = entry.removeprefix(STATE).rpartition(".")
            saved.setdefault(owner, []).append(key)
    if not saved and not found.manifest.get("optimizer"):
        raise CheckpointError(f"{found.folder} holds no optimizer state; save it with save(directory, optimizer)")
    room: dict[str, dict[str, Tensor]] = {}
    for n, parameter in optimizer.parameters.items():
        owner = (rank.program.states[n].parts or (names[n],))[0]
        for key in saved.get(owner, ()):
            spec = reader.tensors[f"{STATE}{owner}.{key}"]
            shape, device = (parameter.shape, parameter.device) if spec.size else ((), "cpu")
            if spec.size and spec.size != reader.tensors[f"{MODEL}{owner}"].size:
                shape = spec.size
            tensor = optimizer.allocate(n, key, shape, spec.properties.dtype, device)
            if optimizer.has_other_shape(n, tensor):
                check_whole(rank, n, key, tensor)
            room.setdefault(n, {})[key] = tensor
    return room


def _list_state_pieces(
    prefix: str, rank: RankProgram, state: str, saved_as: str, tensor: Tensor, suffix: str = ""
) -> list[ShardPiece]:
    """Return the rectangular parts of saved tensors that must be read to fill ``tensor``. The key of a saved tensor
    consists of ``prefix``, the name ``saved_as`` under which the parameter or buffer was saved, and ``suffix``.
    ``tensor``: this rank's part of the parameter or buffer named ``state``, or of an optimizer state for it. ``rank``:
    the program of this rank.
    """
    data = rank.program.states[state]
    if data.shape and not tensor.dim():
        return [make_scalar_piece(prefix, saved_as, data, tensor, suffix)]
    return list_shard_pieces(prefix, saved_as, data, find_rank_shard(rank.program, state, rank.rank), tensor, suffix)


def _check_files(found: CheckpointMatch, rank: RankProgram) -> None:
    """Compare this rank's share of the files of the checkpoint ``found`` with the manifest, by length and SHA-256. Each
    of ``n`` ranks checks every n-th file. ``rank``: the program of this rank. Raise :class:`DamagedCheckpointError` if
    a file is missing or differs.
    """
    for name, expected in list(found.files.items())[rank.rank :: rank.program.world_size]:
        path = found.folder / name
        if not path.exists():
            raise DamagedCheckpointError(
                f"{path} is missing: the checkpoint is incomplete{_suggest_other_checkpoint(found.folder)}"
            )
        got = compute_file_sum(path)
        if got != expected:
            told = "its SHA-256 is not the one in the manifest"
            if got.nbytes != expected.nbytes:
                told = f"it has {got.nbytes} bytes, {expected.nbytes} were written"
            raise DamagedCheckpointError(f"{path} is damaged: {told}{_suggest_other_checkpoint(found.folder)}")


def _run_on_all_ranks(
    communicator: Communicator, rank: RankProgram, work: Callable[[], _T], reading: CheckpointMatch | None = None
) -> _T:
    """Call ``work`` on every rank, and return this rank's result once ``work`` has succeeded on all ranks. All ranks
    call this. If ``work`` fails on any rank, raise :class:`CheckpointError` on all ranks.

    ``reading``: the checkpoint that ``work`` reads; exceptions of other types are then raised as a
    :class:`DamagedCheckpointError` that names the checkpoint. If ``reading`` is ``None``, such exceptions are raised
    unchanged. ``rank``: the program of this rank. ``communicator``: connects this rank with the others.
    """
    result: _T | None = None
    error: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        if reading is None or isinstance(caught, PartitionError):
            raise
        told = f"{type(caught).__name__}: {caught}"
        error = DamagedCheckpointError(
            f"{reading.folder} cannot be read: {told}{_suggest_other_checkpoint(reading.folder)}"
        )
        error.__cause__ = caught
    failed = torch.zeros(rank.program.world_size, dtype=torch.int32, device=communicator.device)
    failed[rank.rank] = 0 if error is None else 1 + _FAILURES.index(type(error))
    failures = get_world_group(communicator, rank.program.world_size).all_reduce(failed).wait().tolist()
    if error is not None:
        raise error
    if worst := max(failures):
        raise _FAILURES[worst - 1].from_other_rank(
            f"the checkpoint was not loaded: rank {failures.index(worst)} could not read it; its own error says why"
        )
    return result  # type: ignore[return-value]


def _require_same_checkpoint(found: CheckpointMatch, rank: RankProgram, communicator: Communicator) -> None:
    """Raise :class:`CheckpointError` on all ranks if the ranks have found different checkpoints. All ranks call this.
    ``found``: the checkpoint that this rank has found. ``rank``: the program of this rank. ``communicator``: connects
    this rank with the others.
    """
    if not _is_equal_across_ranks(int(found.manifest["token"], 16), rank, communicator):
        raise CheckpointError(
            f"ranks find different checkpoints, this rank {found.folder} of step {found.steps}: name one of them, and "
            "use a file system that all ranks share"
        )


def _is_equal_across_ranks(number: int, rank: RankProgram, communicator: Communicator) -> bool:
    """Return whether all ranks pass the same ``number``, a non-negative integer of at most 60 bits. All ranks call
    this. ``rank``: the program of this rank, which has the number of ranks. ``communicator``: connects this rank with
    the others.
    """
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=communicator.device)
    high, low = get_world_group(communicator, rank.program.world_size).all_reduce(bounds, maximum=True).wait().tolist()
    return bool(high == -low)


def _list_candidate_folders(directory: Path) -> Sequence[Path]:
    """Return the checkpoint folder to load, as a list of one path; an empty list if there is none. It is ``directory``
    itself if it has a manifest. Otherwise ``directory`` may be a folder of several checkpoints. The one that the file
    ``latest`` names is then chosen; without such a file, the complete checkpoint with the most steps.
    """
    if (directory / MANIFEST).exists():
        return [directory]
    named = directory / LATEST
    latest = named.read_text(errors="replace").strip() if named.is_file() else ""
    if is_file_name(latest) and (directory / latest / MANIFEST).exists():
        return [directory / latest]
    return [found.folder for found in list_complete_checkpoints(directory)[-1:]]


def _suggest_other_checkpoint(folder: Path) -> str:
    """Return the end of an error message about the damaged checkpoint ``folder``, which says which other checkpoint in
    the same parent folder can be loaded instead, or that there is none.
    """
    folder = folder.absolute()
    others = [f for f in list_complete_checkpoints(folder.parent) if f.folder.absolute() != folder]
    before = [f for f in others if f.folder.name < folder.name] or others
    if not before:
        return "; there is no other checkpoint beside it"
    return f"; the one before it is of step {before[-1].steps}: load {before[-1].folder}"
