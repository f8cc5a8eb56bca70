"""Read and write the files of a checkpoint, in the format of ``torch.distributed.checkpoint`` (DCP).

Every rank writes one file; ``.metadata`` lists the chunks of each tensor. The planners in this module tell DCP which
boxes (offsets and sizes) of the tensors to write and read; DCP writes, reads and reshards. The SHA-256 of a file is
computed while it is written.
"""

from __future__ import annotations

import hashlib
import io
import math
import pathlib
import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from partitioner.runtime.checkpoint.file_sums import METADATA, FileSum
from partitioner.runtime.checkpoint.shards import ShardPiece
from partitioner.runtime.checkpoint.training_state import pack_plain_data, unpack_plain_data
from partitioner.runtime.errors import DamagedCheckpointError
from partitioner.runtime.files import is_file_name
from partitioner.runtime.state.disk_offload import is_mapped, release_pages, view_own_storage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class Written:
    """A record of what one rank wrote to a checkpoint.

    Args:
        items: the chunks (rectangular parts of tensors), with tensor name, offsets and sizes.
        results: the file and position of each chunk, as ``torch.distributed.checkpoint`` returns them.
        files: file name -> length and checksum.
    """

    items: list[WriteItem] = field(default_factory=list)
    results: list[WriteResult] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)


def write_shards(folder: Path, rank: int, pieces: Sequence[ShardPiece]) -> Written:
    """Write ``pieces`` (parts of tensors, with their names and offsets) to one file in ``folder``, and flush it to
    disk. Return a record of the written parts, with their positions in the file and the file's checksum. If ``pieces``
    is empty, no file is written. ``rank``: global rank, which is part of the file's name. Raise ``OSError`` if the file
    system reports an error.
    """
    if not pieces:
        return Written()
    content = {MetadataIndex(p.key, p.offsets): p for p in pieces}
    items = [_make_write_item(index, piece) for index, piece in content.items()]
    writer, disk = FileSystemWriter(folder), _HashingFileSystem()
    if any(is_mapped(piece.tensor) for piece in pieces):
        writer.per_thread_copy_ahead = 0  # load tensors on disk one at a time
    writer.fs = disk
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan(items))
    try:
        results = writer.write_data(plan, _SavePlanner(content)).wait()
    except RuntimeError as error:  # torch.save hides the error of the file system
        raise disk.error or error from None
    return Written(items, results, disk.sums)


def write_metadata(folder: Path, written: Sequence[Written]) -> None:
    """Write the file ``.metadata`` of ``torch.distributed.checkpoint`` to ``folder``. It says in which file each part
    of a tensor is. ``written``: a record of the parts that each rank wrote. Raise ``ValueError`` if the parts of a
    tensor do not have as many elements as the tensor.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    for item in (i for w in written for i in w.items):
        data = item.tensor_data
        assert data is not None
        tensor = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
        tensor.chunks.append(data.chunk)
    for name, tensor in tensors.items():
        count = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if count != tensor.size.numel():
            raise ValueError(f"{name}: {tensor.size.numel()} elements, {count} were written")
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(dict(tensors)), [w.results for w in written])


class ShardReader:
    """Reads rectangular parts of tensors from the checkpoint in ``folder``. ``tensors``: name -> shape, dtype and
    stored parts of each saved tensor. Raise ``OSError`` if files are missing, and :class:`DamagedCheckpointError` if
    the file ``.metadata`` is damaged, describes anything but parts of tensors, or names files outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        metadata = _read_metadata(folder / METADATA)
        self._reader.set_up_storage_reader(metadata, False)
        found = metadata.state_dict_metadata
        self.tensors = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}

    def read(self, pieces: Iterable[ShardPiece]) -> None:
        """Fill the tensor of each of ``pieces`` with the part of a saved tensor that the piece describes, converted to
        the tensor's dtype.
        """
        targets: dict[MetadataIndex, Tensor] = {}
        items: list[ReadItem] = []
        for piece in pieces:
            index = MetadataIndex(piece.key, piece.offsets)
            targets[index] = piece.tensor
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
            items += create_read_items_for_chunk_list(piece.key, self.tensors[piece.key], [chunk])
        self._reader.read_data(LoadPlan(items), _LoadPlanner(targets)).wait()


def pack_record(written: Written, random: Mapping[str, Any], own: bytes) -> bytes:
    """Return, as bytes, the report that a rank writes to a file for rank 0 after it has written its part of a
    checkpoint. ``written``: a record of the written parts of tensors. ``random``: the rank's states of random
    generators, by the generator's name (``python``, ``torch`` and so on). ``own``: the rank's other state, such as
    hyperparameters of optimizers, already serialised by :func:`pack_plain_data`.
    """
    return pickle.dumps((written, pack_plain_data({"random": random}, "the random generators"), own))


def unpack_record(content: bytes) -> tuple[Written, dict[str, Any], bytes]:
    """Return the three arguments from which :func:`pack_record` made the bytes ``content``: a record of the parts that
    a rank wrote, its states of random generators, and its other state, as bytes. Raise :class:`DamagedCheckpointError`
    if ``content`` is not a result of :func:`pack_record`. Unpickling does not run code from ``content``.
    """
    found = load_plain_pickle(content, "the record of a rank")
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], Written)):
        raise DamagedCheckpointError("the record of a rank has another form than this version writes")
    written, random, own = found
    return written, unpack_plain_data(random)["random"], own


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors. Raises an error for all other content, because a pickle from an untrusted file
    could call any function.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, dtype or function ``name`` of the module ``module``, for the unpickler. Raise
        ``UnpicklingError`` if it does not occur in descriptions of tensors.
        """
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors has")


_PLAIN_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
    "torch.distributed.checkpoint.planner": ("TensorWriteData", "WriteItem", "WriteItemType"),
    "partitioner.runtime.checkpoint.dcp_files": ("Written",),
    "partitioner.runtime.checkpoint.file_sums": ("FileSum",),
}


def load_plain_pickle(content: bytes, label: str) -> Any:
    """Return the descriptions of tensors that are pickled in ``content``. ``label``: a name of ``content`` for the
    error message. Raise :class:`DamagedCheckpointError` if ``content`` is damaged, or has a class or function that does
    not belong to descriptions of tensors; such a function is not called.
    """
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # damaged pickles raise exceptions of all types
        raise DamagedCheckpointError(
            f"{label} cannot be read: {type(error).__name__}: {error}; load another checkpoint"
        ) from None


def _read_metadata(path: Path) -> Metadata:
    """Return the content of the file ``path``, the ``.metadata`` of a checkpoint, after checking its types, sizes and
    file names. Raise :class:`DamagedCheckpointError` if the content is not a valid description of tensors in files of
    the folder.
    """
    found = load_plain_pickle(path.read_bytes(), str(path))
    problem = "it does not hold the metadata of a checkpoint"
    if isinstance(found, Metadata):
        with suppress(
            AttributeError, TypeError, ValueError, LookupError, RuntimeError
        ):  # raised if fields have wrong types
            problem = _find_metadata_problem(found)
    if problem:
        raise DamagedCheckpointError(f"{path} cannot be used: {problem}; load another checkpoint")
    return found  # type: ignore[no-any-return]


def _find_metadata_problem(metadata: Metadata) -> str:
    """Return a text that describes the first error in ``metadata``, the content of the file ``.metadata`` of a
    checkpoint; empty if there is none. Every part of a tensor must lie in a file in the checkpoint's folder, with
    enough bytes stored for its elements, and the parts must cover the tensor.
    """
    stored = metadata.storage_data
    for info in stored.values():
        if not is_file_name(info.relative_path):
            return f"it names the file {info.relative_path!r}, expected one in the checkpoint's folder"
        if not (type(info.offset) is type(info.length) is int and info.offset >= 0 <= info.length):
            return f"a part in {info.relative_path} has the offset {info.offset!r} and the length {info.length!r}"
    held = {(index.fqn, tuple(index.offset or ())): info for index, info in stored.items()}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            info = held[name, tuple(chunk.offsets)]
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if needed > info.length and not info.transform_descriptors:
                return f"{name} has {needed} bytes at {list(chunk.offsets)}, and {info.length} are stored"
        if math.prod(tensor.size) > sum(math.prod(chunk.sizes) for chunk in tensor.chunks):
            return f"{name} has more elements than its parts"
    return ""


def _make_write_item(index: MetadataIndex, piece: ShardPiece) -> WriteItem:
    """Return the write request of ``torch.distributed.checkpoint`` for ``piece``, a rectangular part of a tensor.
    ``index``: the tensor's name in the checkpoint and the offsets of the part.
    """
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape),
        properties=TensorProperties(dtype=piece.tensor.dtype),
        size=torch.Size(piece.shape),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _SavePlanner(DefaultSavePlanner):
    """Gives ``torch.distributed.checkpoint`` the tensors to write. ``content``: (name and offsets of a part of a
    tensor) -> the part with its data.
    """

    def __init__(self, content: Mapping[MetadataIndex, ShardPiece]) -> None:
        super().__init__()
        self.content = content
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor to write for ``write_item``. If the tensor of the previous call is a file that is mapped
        into memory, release its memory pages, so that only one such tensor at a time is in memory.
        """
        if self._last is not None:
            release_pages(self._last)
        self._last = self.content[write_item.index].tensor
        tensor = self._last.detach().contiguous()
        # torch copies a tensor that is only a part of its storage, and keeps the copy until everything is written
        return view_own_storage(tensor) if is_mapped(tensor) and tensor.numel() else tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Gives ``torch.distributed.checkpoint`` the tensors to fill. ``targets``: (name and offsets of a part of a tensor)
    -> the tensor to fill with the part.
    """

    def __init__(self, targets: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self.targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.targets[read_item.dest_index]
        for dim, (at, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, at, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """If ``tensor``, which was filled in place, is a file that is mapped into memory, release its memory pages.
        ``read_item`` is not used.
        """
        release_pages(tensor)


class _HashingFileSystem(FileSystem):
    """Opens files for ``torch.distributed.checkpoint``, and records their length and SHA-256 while they are written.
    ``sums``: file name -> length and checksum. ``error``: the first ``OSError`` of a write, or ``None``.
    """

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open the file ``path`` in the mode ``mode`` for the ``with`` block, and record length and SHA-256 of the
        written bytes.
        """
        with Path(path).open(mode) as file:
            stream = _HashingStream(file, self)
            yield stream
            self.sums[Path(path).name] = FileSum(stream.nbytes, stream.digest.hexdigest())


class _HashingStream(io.IOBase):
    """A file opened for writing that computes the SHA-256 and the length of the written bytes. ``owner``: the object
    that records the sums and the first error.
    """

    def __init__(self, file: Any, owner: _HashingFileSystem) -> None:
        self.file = file
        self.owner = owner
        self.digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        """Write ``data``, and return the number of bytes. Raise ``OSError`` if the file system reports an error."""
        try:
            count: int = self.file.write(data)
        except OSError as error:
            self.owner.error = self.owner.error or error
            raise
        self.digest.update(data)
        self.nbytes += count
        return count

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        self.file.flush()
        return int(self.file.fileno())

    def close(self) -> None:
        self.flush()
