"""Sources of weights: a module, a dict of tensors, or safetensors files. Tensors are read by name, one
slice at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Hashable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from partitioner.passes.capture.wrappers import check_tensor, match_state_names, unwrap_model
from partitioner.passes.ir.layouts import Layout, shard_slices, take_shard
from partitioner.runtime.errors import WeightsError
from partitioner.runtime.files import is_file_name, parse_json

INDEX = "model.safetensors.index.json"

SINGLE = "model.safetensors"

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
# Complex dtypes that safetensors lacks: our own files store real and imaginary parts, and the names in the metadata.
_PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}
_PAIRED = "partitioner.complex"
_EXTRA_STATE = "_extra_state"  # suffix of entries of a state dict that are neither tensors nor weights


@runtime_checkable
class Weights(Protocol):
    """Interface of a source of named tensors of which parts can be read. ``origin``: name of the source in error
    messages.
    """

    origin: str

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the pair (shape, dtype) of the tensor called ``name``; ``None`` if there is no such tensor."""

    def names(self) -> list[str]: ...

    def read(self, name: str, layout: Layout, num_ranks: int, index: int) -> Tensor:
        """Return the shard of the tensor called ``name`` that the rank ``index`` of ``num_ranks`` ranks has.
        ``layout``: how the tensor is cut among these ranks, such as along which dim. The caller must not write to the
        result.
        """

    def identity(self, name: str) -> Hashable:
        """Return a key for the tensor called ``name`` that is equal for two names of the same tensor (tied weights);
        ``None`` if this is unknown.
        """


class TensorWeights:
    """Weights in memory, from a dict of tensors by name. Tied names may share a tensor. ``origin``: name of the source
    in error messages. Raise :class:`WeightsError` for values that are not tensors, or are on the meta device.
    """

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        other = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
        if other is not None and not other.endswith(_EXTRA_STATE):
            raise WeightsError(
                f"{origin} holds {other!r}, a {type(tensors[other]).__name__}; expected a dict of tensors by name: "
                "from a checkpoint, pass only the state of the model"
            )
        self.tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        self.origin = origin
        for name, tensor in self.tensors.items():
            check_tensor(tensor, f"{origin}: {name}", WeightsError)
        meta = next((name for name, t in tensors.items() if t.is_meta), None)
        if meta is not None:
            raise WeightsError(
                f"{origin}: {meta} is on the meta device and has no values; pass a safetensors folder as weights, "
                "or a module with real parameters"
            )

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else (tuple(tensor.shape), tensor.dtype)

    def names(self) -> list[str]:
        return list(self.tensors)

    def read(self, name: str, layout: Layout, num_ranks: int, index: int) -> Tensor:
        return take_shard(self.tensors[name].detach(), layout, num_ranks, index)

    def for_names(self, names: Collection[str]) -> TensorWeights:
        """Return these weights renamed to ``names``, for names that differ only in parts that wrapper modules add (such
        as ``module.``).
        """
        renamed = match_state_names(self.tensors, names)
        return TensorWeights({renamed.get(n, n): t for n, t in self.tensors.items()}, self.origin) if renamed else self

    def identity(self, name: str) -> Hashable:
        tensor = self.tensors[name]
        return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else None


class FileWeights:
    """Weights in the safetensors file, or the folder of such files, ``path``. Only the requested slices are read.
    ``index``: file name of the folder's index, which says which file has which tensor.
    """

    def __init__(self, path: Path, index: str = INDEX) -> None:
        self.origin = str(path)
        self._files = _find_tensor_files(path, index)
        self._saved_as: dict[str, str] = {}  # name -> name in the file, if they differ
        self._open: dict[Path, Any] = {}
        self._paired: dict[Path, frozenset[str]] = {}
        self._stack = ExitStack()
        self._lock = threading.Lock()  # a handle serves one thread at a time

    def names(self) -> list[str]:
        return list(self._files)

    def for_names(self, names: Collection[str]) -> FileWeights:
        """Rename these weights in place to ``names``, for names that differ only in parts that wrapper modules add
        (such as ``module.``), and return them.
        """
        for saved_as, name in match_state_names(self._files, names).items():
            self._files[name] = self._files.pop(saved_as)
            self._saved_as[name] = self._saved_as.pop(saved_as, saved_as)
        return self

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the pair (shape, dtype) of the tensor called ``name``; ``None`` if there is no such tensor. Raise
        :class:`WeightsError` for a dtype that torch does not have.
        """
        if name not in self._files:
            return None
        with self._lock:
            part, paired = self._open_slice(name), self._is_paired(name)
            shape, stored = tuple(part.get_shape()), part.get_dtype()
        if stored not in _TYPES:
            raise WeightsError(
                f"{self._files[name]}: {name} is stored as {stored}, which torch cannot load as an ordinary tensor; "
                "convert it to a floating-point or integer dtype"
            )
        if paired:
            return shape[:-1], next(dtype for dtype, real in _PAIRS.items() if real == _TYPES[stored])
        return shape, _TYPES[stored]

    def read(self, name: str, layout: Layout, num_ranks: int, index: int) -> Tensor:
        """Return the shard of the tensor called ``name`` that the rank ``index`` of ``num_ranks`` ranks has.
        ``layout``: how the tensor is cut among these ranks, such as along which dim. Only the shard is read from the
        file.
        """
        with self._lock:
            paired = self._is_paired(name)
            if not layout.is_shard or num_ranks == 1:
                pieces = [self._open_file(name).get_tensor(self._saved_as.get(name, name))]
            else:
                part = self._open_slice(name)
                before = (slice(None),) * layout.dim
                pieces = [
                    part[(*before, slice(start, start + length))]
                    for start, length in shard_slices(layout, part.get_shape()[layout.dim], num_ranks, index)
                ]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)
        return torch.view_as_complex(whole) if paired else whole

    def identity(self, name: str) -> Hashable:
        return None

    def close(self) -> None:
        """Close the safetensors files; reading opens them again."""
        with self._lock:
            self._stack.close()
            self._open.clear()

    def _is_paired(self, name: str) -> bool:
        """Return whether the tensor called ``name`` is complex and stored as real numbers, with real and imaginary
        parts in its last dim.
        """
        path, handle = self._files[name], self._open_file(name)
        if path not in self._paired:
            try:
                self._paired[path] = frozenset(parse_json((handle.metadata() or {}).get(_PAIRED, "[]")))
            except (ValueError, TypeError) as error:
                raise WeightsError(
                    f"{path} has invalid metadata under {_PAIRED!r}: {error}; save the weights again"
                ) from None
        return name in self._paired[path]

    def _open_slice(self, name: str) -> Any:
        saved_as = self._saved_as.get(name, name)
        try:
            return self._open_file(name).get_slice(saved_as)
        except SafetensorError as error:  # an index may name a tensor that does not exist
            raise WeightsError(
                f"{self._files[name]} does not contain {saved_as}: {error}; save the model again"
            ) from error

    def _open_file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(_open_safetensors(path))
        return self._open[path]


class ModuleWeights(TensorWeights):
    """The parameters and buffers of a module. A module attribute that is a Python number, such as a counter, is also
    available, as a 0-dimensional tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(list_module_tensors(module), type(module).__name__)
        self.tensors: dict[str, Tensor]
        self._module, _ = unwrap_model(module)

    def for_names(self, names: Collection[str]) -> ModuleWeights:
        """Rename these weights in place to ``names``, for names that differ only in parts that wrapper modules add
        (such as ``module.``), and return them.
        """
        for name, meant in match_state_names(self.tensors, names).items():
            self.tensors[meant] = self.tensors.pop(name)
        return self

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the pair (shape, dtype) of the tensor called ``name``, or of the module attribute ``name`` if it is a
        number; ``None`` if there is neither.
        """
        if name not in self.tensors:
            number = get_number_attribute(self._module, name)
            if number is not None:
                self.tensors[name] = number
        return super().spec(name)


def get_number_attribute(module: nn.Module, name: str) -> Tensor | None:
    """Return the attribute ``name`` of a module, such as ``layers.0.step``, as a 0-dimensional tensor; ``None`` if it
    is not an int or float.
    """
    path, _, attribute = name.rpartition(".")
    try:
        value = vars(module.get_submodule(path)).get(attribute)
    except AttributeError:
        return None
    if type(value) not in (int, float):
        return None
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """Write ``tensors`` (name -> tensor) to the safetensors file ``path`` and return the path. :class:`FileWeights`
    reads such files. Complex dtypes that safetensors lacks are stored as real tensors with one more dim, which is what
    other software sees. Raise :class:`WeightsError` for a dtype that cannot be stored.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _PAIRS:
            check_storable(name, tensor.dtype)
    paired = [name for name, tensor in tensors.items() if tensor.dtype in _PAIRS]
    plain = {name: torch.view_as_real(x.resolve_conj()) if name in paired else x for name, x in tensors.items()}
    content = {name: x.detach().cpu().contiguous().clone() for name, x in plain.items()}
    save_file(content, path, metadata={_PAIRED: json.dumps(paired)} if paired else None)
    return path


def check_storable(name: str, dtype: torch.dtype) -> None:
    """Raise :class:`WeightsError` if safetensors cannot store the dtype ``dtype`` of the tensor called ``name``."""
    if dtype not in _TYPES.values():
        raise WeightsError(
            f"{name} has dtype {str(dtype).removeprefix('torch.')}, which safetensors cannot store: convert it to "
            "another "
            "dtype, or use engine.save() or torch.save(engine.state_dict(full=True))"
        )


Source = nn.Module | Mapping[str, Tensor] | str | Path | Weights


def open_weights(source: Source, names: Collection[str] = ()) -> Weights:
    """Return ``source``, the weights that the user passed (a module, a dict of tensors, a path of safetensors files, or
    :class:`Weights`), as an object from which shards of tensors can be read. ``names``: the names that a plan reads;
    weights saved from a compiled or wrapped model, such as ``_orig_mod.layers.0.weight``, are renamed to these. Raise
    :class:`WeightsError` for another source, or if a file has no weights.
    """
    if isinstance(source, nn.Module):
        return ModuleWeights(source).for_names(names)
    if isinstance(source, Mapping):
        return TensorWeights(source, "the state dict").for_names(names)
    if isinstance(source, str | Path):
        return FileWeights(Path(source)).for_names(names)
    if isinstance(source, Weights):
        return source
    raise WeightsError(
        f"weights is a {type(source).__name__}; expected a module, a dict of tensors, or the path of a safetensors "
        "file or folder"
    )


def list_module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of ``module`` as a dict: name -> tensor, under all of their names, also those
    that ``state_dict`` leaves out. Wrappers, such as the one of ``torch.compile``, are removed first.
    """
    module, _ = unwrap_model(module)
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def is_weights_path(path: Path) -> bool:
    """Return whether ``path`` can be read as weights: it is a file, or a folder with safetensors files."""
    return path.is_file() or (path / INDEX).exists() or any(path.glob("*.safetensors"))


def _find_tensor_files(path: Path, index: str) -> dict[str, Path]:
    """Return a dict: name of each tensor -> path of the file that contains it. ``path``: a file or folder. ``index``:
    file name of the folder's index. Raise :class:`WeightsError` if there are no safetensors files.
    """
    if path.is_dir():
        if (path / index).exists():
            return {name: path / file for name, file in _read_weight_map(path / index).items()}
        files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
        if not files and (path / "manifest.json").exists():
            raise WeightsError(
                f"{path} is a training checkpoint, not a folder of weights: create the engine without weights and call "
                "engine.load(path), or write weights with engine.export_weights(path)"
            )
        if not files:
            raise WeightsError(f"{path} has neither {index} nor a .safetensors file; save the model's weights there")
    elif path.exists():
        files = [path]
    else:
        raise WeightsError(f"{path} does not exist; expected a safetensors file, or a folder of them")
    found: dict[str, Path] = {}
    for file in files:
        with _open_safetensors(file) as handle:
            found.update(dict.fromkeys(handle.keys(), file))
    return found


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return a dict: name of each tensor -> name of the file that contains it, from ``index``, the index file of a
    folder of safetensors files. Raise :class:`WeightsError` if the index cannot be read, or names files outside of its
    folder.
    """
    try:
        found = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} cannot be read as an index of safetensors files: {error}") from None
    odd = [f for f in found.values() if not is_file_name(f)] if isinstance(found, dict) else [found]
    if odd:
        raise WeightsError(
            f"{index} names {str(odd[0])[:100]!r}; expected the name of a file in the same folder for each tensor"
        )
    return found  # type: ignore[no-any-return]


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error
