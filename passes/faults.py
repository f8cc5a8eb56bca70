"""Convert unexpected exceptions that leave a public function into typed errors of this project.

A :class:`PartitionError` is passed on unchanged. Every other exception becomes the cause of a new
:class:`PartitionError`: :class:`UserCodeError` if the user's code raised it, :class:`ResourceError` if memory, disk
space or access rights are missing, :class:`InputsError` if the public function itself cannot use an argument, and
:class:`InternalError` otherwise. The phase (the step that was running), the operator and the line of the model are read
from the traceback, so no other code has to record them.
"""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import metadata, util
from pathlib import Path
from types import FrameType
from typing import Any

from partitioner.passes.errors import InputsError, InternalError, PartitionError, ResourceError, UserCodeError

_ROOT = Path(__file__).parent.parent  # folder of the package `partitioner`
_PROJECT_FOLDER = f"{_ROOT}/"
FRAME = re.compile(r'File "(.+?)", line (\d+)')  # a frame in the text of a traceback
_PYTHON = str(Path(traceback.__file__).parent)
# Packages that this project calls. A traceback frame in them does not show whose fault the error is.
_LIBRARIES = ("torch", "ortools", "networkx", "pydantic", "safetensors", "numpy", "sympy", "yaml", "rich", "typer")
# (file, function) in which a phase begins -> name of the phase. Messages name the innermost phase of a traceback.
PHASES = {
    ("passes/capture/inputs.py", "bind_inputs"): "reading the inputs",
    ("passes/capture/export.py", "make_fake_copy"): "copying the model without its numbers",
    ("passes/capture/capture.py", "capture"): "capturing the model",
    ("passes/capture/functionalize.py", "flatten_program"): "making the graph functional",
    ("passes/normalize/pipeline.py", "normalize"): "normalizing the graph",
    ("passes/shard/fold.py", "fold"): "folding layers into blocks",
    ("passes/ir/gradient_flow.py", "mark_gradients"): "marking gradients",
    ("passes/shard/shard_block.py", "shard_block"): "sharding a block",
    ("passes/shard/differentiate.py", "build_joint_graph"): "differentiating a block",
    ("partitioner/solve/sharding/batch.py", "shard_batch"): "splitting the batch",
    ("partitioner/solve/search/search.py", "search_for_plan"): "searching for a layout",
    ("partitioner/emit/program.py", "emit"): "emitting the programs",
    ("partitioner/plans/reference.py", "run_reference"): "running the unmodified model",
    ("runtime/prove/prove.py", "prove"): "proving the programs",
    ("runtime/engine/batches.py", "convert_batch"): "reading the batch",
    ("runtime/state/parameters.py", "check_weights"): "checking the weights",
    ("runtime/state/parameters.py", "load_states"): "loading the weights",
}
_REPORTS_PROGRESS = ("partitioner/solve/search/best_first.py", "_report_progress")
_OF_ARGUMENTS = (
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
)  # an argument is wrong if a public function itself raises one of these
_BEFORE_GRAPHS = ("reading the inputs", "copying the model without its numbers", "capturing the model")
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


@contextmanager
def typed_errors(entry: str, passing: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    """Return a context manager, which is also a decorator, that converts unexpected exceptions into a
    :class:`PartitionError`. Two kinds of exceptions are always raised unchanged: those from the user's progress
    callback, because they are a way to stop the search, and Python's :class:`TypeError` for a call with a missing or
    unknown argument.

    ``entry``: the name of the public function, for the message. ``passing``: takes an exception and returns whether to
    raise it unchanged, too.
    """
    try:
        yield
    except PartitionError:
        raise
    except Exception as error:
        if passing(error) or _is_progress_error(error) or _is_signature_mismatch(error):
            raise
        raise build_typed_error(error, entry) from error


def _is_signature_mismatch(error: Exception) -> bool:
    """Return whether ``error`` was raised because the arguments of a call do not match the signature of a function that
    :func:`typed_errors` decorates, before any line of the function was executed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TypeError) and frames[-1].f_code.co_filename == contextlib.__file__


def build_typed_error(error: Exception, entry: str) -> PartitionError:
    """Return the :class:`PartitionError` that replaces ``error``, an unexpected exception that left a public function.
    The class depends on the cause: user code, missing resources, a wrong argument, or a bug.

    ``entry``: the name of the public function.
    """
    said = f"{type(error).__name__}: {_get_first_line(error)}"
    if isinstance(error, OSError):
        file = error.filename2 or error.filename
        about = f"{file}: {error.strerror}" if file else said
        return ResourceError(f"{entry} failed: {about}; give another file or folder, or make room")
    if _is_out_of_memory(error):
        return ResourceError(f"{entry} failed for want of memory: {said}; free some, or plan for more devices")
    frames = list(traceback.walk_tb(error.__traceback__))
    codes = [(frame.f_code, line) for frame, line in frames if not _is_library_file(frame.f_code.co_filename)]
    if codes and is_user_file(codes[-1][0].co_filename):
        code, line = codes[-1]
        return UserCodeError(
            f"{entry} called {code.co_name} ({shorten_file_path(code.co_filename)}:{line}), which raised "
            f"{said}; mend it "
            "there, or do not pass it"
        )
    if [is_project_file(code.co_filename) for code, _ in codes] == [True, True] and isinstance(error, _OF_ARGUMENTS):
        return InputsError(f"an argument of {entry} is of the wrong kind: {said}; expected what its docstring names")
    phase = find_phase(frames)
    return InternalError(
        "internal error of the partitioner in "
        f"{entry}{f', {phase}' if phase else ''}{_format_failed_operator(error)}: {said}\n"
        f"It is raised at {_format_error_location(error)}. This is a fault of the partitioner and not of "
        f"the model. {_choose_phase_advice(phase)} "
        f"Please report it with the traceback (its cause) and the model: {format_versions()}.",
        phase=phase,
    )


def find_phase(frames: list[tuple[FrameType, int]]) -> str:
    """Return the name of the innermost phase in a traceback; an empty string if there is none. A phase is a step of
    planning or execution, such as ``sharding a block``. ``frames``: (frame, line number), outermost first."""
    for frame, _ in reversed(frames):
        file = frame.f_code.co_filename
        if is_project_file(file):
            phase = PHASES.get((_format_project_path(file), frame.f_code.co_name))
            if phase is not None:
                return phase
    return ""


def find_failed_node(error: BaseException) -> Any:
    """Return the FX node whose operator was being processed when ``error`` was raised; ``None`` if there was none.

    The node is the local variable ``node`` of the innermost stack frame that has such a variable, in the traceback of
    ``error`` or of the exceptions that caused it.
    """
    fx = sys.modules.get("torch.fx")
    seen: set[int] = set()
    while fx is not None and error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            found = frame.f_locals.get("node")
            if isinstance(found, fx.Node) and found.op == "call_function":
                return found
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return None


def _format_failed_operator(error: Exception) -> str:
    """Return a phrase for error messages that names the graph operator that was being processed when ``error`` was
    raised, such as `` at the operator mul (aten.mul.Tensor) of model.py:12 in layers.0``; an empty string if there was
    none."""
    node = find_failed_node(error)
    if node is None:
        return ""
    source, path = node.meta.get("source") or find_user_line(node.meta.get("stack_trace")), node.meta.get("path")
    of = f" of {source}" if source else ""
    return f" at the operator {node.name} ({node.target}){of}" + (f" in {path}" if path else "")


def _format_error_location(error: Exception) -> str:
    """Return the innermost line of this project in the traceback of ``error``, followed by the name of the function,
    such as ``passes/shard/shard_block.py:112 (operator)``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_project_file(f.filename)]
    if not frames:
        return "no line of the partitioner"
    return f"{_format_project_path(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].name})"


def _choose_phase_advice(phase: str) -> str:
    """Return a sentence, for the message of an internal error, with what the user can try. ``phase``: the step that
    failed, such as ``capturing the model``; empty if unknown."""
    if phase in _BEFORE_GRAPHS:
        return "Try to pass an ExportedProgram (torch.export.export) instead of the module."
    if phase:
        return "Try other constraints (tp=1, pp=1, zero=0), or write the operator another way."
    return "Try it with fewer options and smaller inputs."


def format_versions() -> str:
    """Return the versions of this project, its main libraries and Python as one line for a bug report."""
    names = ("partitioner", "torch", "ortools")
    return ", ".join(
        [f"{name} {_find_package_version(name)}" for name in names] + [f"Python {platform.python_version()}"]
    )


def _find_package_version(name: str) -> str:
    """Return the version of the installed package ``name`` as text, or ``from source`` if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from source"


def _get_first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` is a failed allocation of host or device memory."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


def _is_progress_error(error: Exception) -> bool:
    """Return whether ``error`` was raised by the progress callback that the user passed to the search for a plan. Such
    an error is raised unchanged, because it is a way to stop the search."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if is_project_file(f.filename)]
    return bool(ours) and (_format_project_path(ours[-1].filename), ours[-1].name) == _REPORTS_PROGRESS


def _format_project_path(file: str) -> str:
    """Return the path within the repository, such as ``passes/shard/shard_block.py``, of ``file``, a source file of
    this project."""
    path = Path(file).relative_to(_ROOT)
    return path.as_posix() if path.parts[0] in ("passes", "runtime") else f"{_ROOT.name}/{path.as_posix()}"


# --- whose a source file is -------------------------------------------------------------------------------------------
def is_project_file(file: str) -> bool:
    """Return whether the source file ``file`` belongs to the packages of this project."""
    return file.startswith(_PROJECT_FOLDER)


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether the source file ``file`` is the user's: it does not belong to Python, to this project or to a
    library that this project calls."""
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return not in_python and not is_project_file(file) and not file.startswith(("<", *_find_library_folders()))


def _is_library_file(file: str) -> bool:
    return not is_project_file(file) and not is_user_file(file)


@cache
def _find_library_folders() -> tuple[str, ...]:
    specs = (util.find_spec(name) for name in _LIBRARIES)
    return tuple(f"{folder}/" for spec in specs if spec is not None for folder in spec.submodule_search_locations or ())


@lru_cache(maxsize=4096)
def shorten_file_path(file: str) -> str:
    """Return the path ``file`` relative to ``site-packages`` or to the working directory; unchanged if it is outside of
    both."""
    if "site-packages/" in file:
        return file.rsplit("site-packages/", 1)[1]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


@lru_cache(maxsize=65536)
def find_user_line(stack_trace: str | None) -> str:
    """Return ``file:line`` of the innermost frame of the user's code in ``stack_trace``, the text of a traceback; an
    empty string if there is none."""
    frames = [f for f in FRAME.findall(stack_trace or "") if is_user_file(f[0])]
    return f"{shorten_file_path(frames[-1][0])}:{frames[-1][1]}" if frames else ""
