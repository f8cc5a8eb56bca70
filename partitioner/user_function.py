"""Import the Python file or module that a user names on the command line, and find a function in it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from partitioner.passes.errors import PartitionError


class TargetError(PartitionError):
    """Error: the model function that a command names does not exist, fails, or returns something other than a model; or
    an option has an invalid value.
    """


def import_user_module(where: str) -> ModuleType:
    """Return the imported Python module ``where``: the path of a ``.py`` file, or a module name. Raise
    :class:`TargetError` if it does not exist or fails.
    """
    path = Path(where)
    if not where.endswith(".py"):
        if path.is_file():
            raise TargetError(f"{where} is no Python file; expected FILE.py:FUNCTION")
        if path.is_dir() and not (path / "__init__.py").is_file():
            raise TargetError(
                f"{where} is a folder; expected FILE.py:FUNCTION, or {where} alone if it has a config.json"
            )
        sys.path.insert(0, str(Path.cwd()))
        with blame_user_code(where):
            return importlib.import_module(where)
    if not path.is_file():
        raise TargetError(f"there is no file {where}; expected FILE.py:FUNCTION")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that pickles and dataclasses in the file find it
    with blame_user_code(where):
        spec.loader.exec_module(module)
    return module


def find_user_function(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    """Return the function ``name`` of ``module``. ``where``: the module's path, for messages. Raise
    :class:`TargetError` if there is no such function, or if it has required parameters.
    """
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        have = f"it has {', '.join(own)}" if own else "it has no functions"
        raise TargetError(f"{where} has no function {name!r}; {have}")
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(f"{where}:{name} needs arguments ({', '.join(needed)}); expected a function without any")
    made: Callable[[], Any] = found
    return made


@contextlib.contextmanager
def blame_user_code(where: str) -> Iterator[None]:
    """Return a context manager for a block that runs the user's code. It converts exceptions of the block into
    :class:`TargetError` with the line that failed. ``where``: the name of the code in the message."""
    try:
        yield
    except PartitionError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(frames) if f.filename.endswith(where.rpartition(":")[0] or where)), None)
        at = f" (line {last.lineno}: {last.line})" if last else ""
        raise TargetError(f"{where} failed with {type(error).__name__}: {error}{at}") from error
