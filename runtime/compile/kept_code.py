"""Keep what Inductor has compiled for a CPU, so that another process can load it without Inductor.

Inductor generates a Python module for a graph: some functions that call kernels, each a shared object. The module
imports Inductor, which takes seconds. What is kept instead are the functions' source and the bytes of the shared
objects. The functions get the few names that they read from here. Code that reads other names is not kept.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import BuiltinFunctionType, CodeType, SimpleNamespace
from typing import Any

import torch

from partitioner.passes.ops import cpu_products

BoxedFunction = Callable[[list[Any]], Sequence[Any]]  # it empties the list of its arguments

_ENTRY = "kernel"  # name of the function of each shared object
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # a variable from which shared objects read a function's address
_NOT_CALLED = ("get_args", "benchmark_compiled_module")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution")  # functions of torch with out= that Inductor may call
_guards: Any = torch._C._dynamo.guards
_NAMES: dict[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "device": torch.device,
    "empty_strided": torch.empty_strided,
    "assert_size_stride": _guards.assert_size_stride,
    "assert_alignment": _guards.assert_alignment,
    "empty_strided_cpu": _guards._empty_strided_cpu,
    "reinterpret_tensor": _guards._reinterpret_tensor,
    "inf": float("inf"),
    "nan": float("nan"),
    "extern_kernels": SimpleNamespace(
        **{name: getattr(torch, name) for name in _PRODUCTS}, partition_multiply=cpu_products.multiply
    ),
}
_compiled: dict[str, bytes] = {}  # shared objects that this process has compiled, by their former path
_loaded: dict[str, Callable[..., None]] = {}  # kernels of this process, by a hash of their shared objects


def pack_code(source: str, values: dict[str, Any]) -> bytes | None:
    """Return the module ``source``, which Inductor has generated, as bytes for :func:`load_code`; ``None`` if it needs
    more than can be kept.

    ``values``: name -> value of the names of the loaded module.
    """
    functions = _select_functions(source)
    read = set(_find_names(compile(functions, "<compiled>", "exec")))
    kernels: dict[str, bytes] = {}
    for name in sorted(read & values.keys() - _NAMES.keys()):
        path = getattr(getattr(values[name], "__self__", None), "__file__", None)
        if isinstance(values[name], BuiltinFunctionType) and values[name].__name__ == _ENTRY and path:
            if path not in _compiled:  # Inductor compiles equal kernels once for a process; the file goes
                _compiled[path] = Path(path).read_bytes()
            kernels[name] = _compiled[path]
    external = values.get("extern_kernels")
    if read - kernels.keys() - _NAMES.keys() - set(dir(builtins)) or not _has_known_products(functions, external):
        return None
    return pickle.dumps({"functions": functions, "kernels": kernels})


def load_code(content: bytes) -> BoxedFunction:
    """Return the function that ``content``, made by :func:`pack_code`, defines, with its kernels loaded.

    Raise ``ImportError`` or ``OSError`` if a shared object cannot be loaded.
    """
    data = pickle.loads(content)
    values: dict[str, Any] = {**_NAMES, **{name: _load_kernel(found) for name, found in data["kernels"].items()}}
    exec(compile(data["functions"], "<compiled>", "exec"), values)
    function: BoxedFunction = values["call"]
    return function


def _select_functions(source: str) -> str:
    """Return the part of the module ``source`` that runs when its ``call`` is called: without its imports, its other
    names for functions of torch, and the kernels.
    """
    kept: list[ast.stmt] = []
    for line in ast.parse(source).body:
        called = isinstance(line, ast.ClassDef | ast.FunctionDef) and line.name not in _NOT_CALLED
        if called or (isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") in ("runner", "call")):
            kept.append(line)
    return ast.unparse(ast.Module(kept, []))


def _find_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the module that ``code`` and the functions in it read but do not define themselves."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    for found in _list_codes(code):
        for step in dis.get_instructions(found):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in own and step.argval[:2] != "__":
                yield step.argval


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_codes(constant)


def _has_known_products(functions: str, external: Any) -> bool:
    """Return whether the source ``functions`` calls, of Inductor's ``external`` kernels, those alone that are known
    here, and no operator that Inductor itself defines.
    """
    for node in ast.walk(ast.parse(functions)):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "extern_kernels":
                known = getattr(_NAMES["extern_kernels"], node.attr, None)
                if known is None or known is not getattr(external, node.attr, None):
                    return False
            elif node.attr in ("inductor", "_inductor", "inductor_prims"):
                return False
    return True


def _load_kernel(content: bytes) -> Callable[..., None]:
    """Return the function of the shared object whose bytes are ``content``; load it once for this process."""
    key = hashlib.sha256(content).hexdigest()
    if key not in _loaded:
        os.environ[_ADDRESS] = str(_guards._torchinductor_pyobject_tensor_data_ptr)  # what a parent has set is not ours
        with tempfile.TemporaryDirectory(prefix="partitioner-") as folder:
            path = Path(folder) / f"{key}.so"
            path.write_bytes(content)
            loader = ExtensionFileLoader(f"partitioner_kernels_{key}.{_ENTRY}", str(path))
            spec = spec_from_loader(loader.name, loader)
            assert spec is not None
            module = module_from_spec(spec)
            loader.exec_module(module)
        _loaded[key] = getattr(module, _ENTRY)
    return _loaded[key]
