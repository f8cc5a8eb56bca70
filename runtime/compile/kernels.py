"""Compile the C++ kernels of many functions by one call of the compiler.

Inductor compiles each kernel by a separate call. Nearly all the time of such a call goes into reading Inductor's header
and starting the compiler, not into the kernel. Here the kernels of all functions that a process compiles are parts of
one file, which becomes one shared object: a Python module with a function for each kernel.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from threading import Thread, get_ident
from types import ModuleType
from typing import Any, NamedTuple

import torch

Kernel = Callable[..., None]

_log = logging.getLogger(__name__)
_MODULE = "kernels"  # name of the Python module that a shared object defines
_LINKAGE = re.compile(r'extern\s+"C"\s+')
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?!include\b|pragma\b)", re.MULTILINE)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_guards: Any = torch._C._dynamo.guards
_loaded: dict[str, ModuleType] = {}  # modules of this process, by a hash of their shared objects

# How Python calls the kernels. A pointer argument is the data pointer of a tensor. Torch's function that returns it is
# passed by address, so that torch's headers are not needed here.
_SUPPORT = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <exception>
#include <stdexcept>
#include <type_traits>

static void* (*find_data)(PyObject*) = nullptr;

template <typename T> static inline T read_argument(PyObject* given) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(find_data(given));
  } else if constexpr (std::is_integral_v<T>) {
    const auto found = PyLong_AsLongLong(given);
    if (found == -1 && PyErr_Occurred()) throw std::runtime_error("expected an int");
    return static_cast<T>(found);
  } else {
    const auto found = PyFloat_AsDouble(given);
    if (found == -1 && PyErr_Occurred()) throw std::runtime_error("expected a float");
    return static_cast<T>(found);
  }
}

static PyObject* set_find_data(PyObject*, PyObject* address) {
  find_data = reinterpret_cast<decltype(find_data)>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}
"""

_CALL = """
static PyObject* call_{name}(PyObject*, PyObject* const* given, Py_ssize_t count) {{
  if (count != {count}) {{
    PyErr_SetString(PyExc_TypeError, "{name} has {count} arguments");
    return nullptr;
  }}
  try {{
    {name}::kernel({arguments});
  }} catch (std::exception const& error) {{
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }} catch (...) {{
    PyErr_SetString(PyExc_RuntimeError, "unknown error in a kernel");
    return nullptr;
  }}
  Py_RETURN_NONE;
}}
"""

_DEFINITION = """
static PyMethodDef methods[] = {{
  {{"set_find_data", set_find_data, METH_O, nullptr}},
{methods}
  {{nullptr, nullptr, 0, nullptr}}
}};

static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, -1, methods}};

PyMODINIT_FUNC PyInit_{module}(void) {{
  return PyModule_Create(&definition);
}}
"""


class KernelSource(NamedTuple):
    """A C++ kernel that Inductor has generated, and that is not compiled yet. ``types``: the C++ types of its
    arguments, such as ``const float*``. ``source``: source file, which defines the function ``kernel``.
    """

    types: tuple[str, ...]
    source: str

    @property
    def name(self) -> str:
        """Return the name of the kernel in a module that :func:`build_library` compiles: a hash of its source."""
        return f"kernel_{hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:24]}"

    def can_be_joined(self) -> bool:
        """Return whether the source can be combined with other kernels in one file: it has one public function, and no
        preprocessor directive (such as ``#define``) that would change the code after it.
        """
        return len(_LINKAGE.findall(self.source)) == 1 and not _DIRECTIVE.search(self.source)


@contextmanager
def collect_kernels() -> Iterator[None]:
    """Return a context manager in which Inductor does not compile the C++ kernels of the graphs that this thread
    compiles, so that they can be compiled together later. In the modules that Inductor generates inside, each kernel is
    a :class:`KernelSource`.
    """
    from torch._inductor.async_compile import AsyncCompile

    compile_kernel, here = AsyncCompile.cpp_pybinding, get_ident()

    def collect(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if get_ident() != here:
            return compile_kernel(self, argtypes, source_code)
        return KernelSource(tuple(argtypes), source_code)

    AsyncCompile.cpp_pybinding = collect  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = compile_kernel  # type: ignore[method-assign]


@cache
def start_header_search() -> Future[str | None]:
    """Start to look for Inductor's precompiled header in another thread, once per process. Return a future of its path,
    which is ``None`` if no header is to be used. Call this under the settings with which Inductor compiles.

    The header makes the compiler faster by seconds. If Inductor has not precompiled a header for this user yet, none is
    precompiled or used here, because precompiling would take longer than it saves.
    """
    future: Future[str | None] = Future()
    context = copy_context()  # it has the settings
    Thread(target=lambda: future.set_result(context.run(_find_header)), daemon=True).start()
    return future


def _find_header() -> str | None:
    """Return the path of Inductor's precompiled header, without its suffix; ``None`` if Inductor has not precompiled
    one on this machine, or it cannot be found.
    """
    try:
        from torch._inductor import codecache
        from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

        if not any(Path(codecache._HEADER_DIR).glob("*.gch")):
            return None
        options: dict[str, Any] = {**_describe_options(), "extra_flags": (), "use_relative_path": False}
        command = CppBuilder(name="o", sources="i", BuildOption=CppTorchDeviceOptions(**options)).get_command_line()
        header = codecache._get_cpp_prefix_header("cpu")
        return None if header is None else codecache._precompile_header(header, command, min_optimize=False, **options)
    except Exception as error:  # private functions of torch
        _log.debug("no precompiled header is used: %s", error)
        return None


def _describe_options() -> dict[str, Any]:
    """Return Inductor's options for kernels on a CPU."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return dict(vec_isa=pick_vec_isa(), include_pytorch=False, shared=True, device_type="cpu")


def build_library(kernels: Collection[KernelSource]) -> bytes:
    """Compile ``kernels`` with Inductor's compiler and options, and return the bytes of one shared object for
    :func:`load_library`. If the compiler fails, raise the error of torch or of the operating system.
    """
    header = start_header_search().result()
    if header is not None:
        try:
            return _compile_kernels(kernels, header)
        except Exception as error:  # the header may be damaged
            _log.debug("kernels are compiled without %s: %s", header, error)
    return _compile_kernels(kernels, None)


def _compile_kernels(kernels: Collection[KernelSource], header: str | None) -> bytes:
    """Compile ``kernels``, and return the bytes of one shared object. ``header``: path of a precompiled header;
    ``None``: none is used.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    with tempfile.TemporaryDirectory(prefix="partitioner-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"{_MODULE}.cpp"
        path.write_text(_join_sources(kernels))
        # Inductor's header causes thousands of warnings, which take time.
        options = CppTorchDeviceOptions(**_describe_options(), extra_flags=("-w",))
        options.precompiled_header = header
        builder = CppBuilder(name=_MODULE, sources=str(path), BuildOption=options, output_dir=folder)
        builder.build()
        return Path(builder.get_target_file_path()).read_bytes()


def _join_sources(kernels: Iterable[KernelSource]) -> str:
    """Return one C++ file with ``kernels``, each in its own namespace, as a Python module."""
    by_name = {kernel.name: kernel for kernel in kernels}
    includes = dict.fromkeys(line.strip() for k in by_name.values() for line in _INCLUDE.findall(k.source))
    bodies, calls, methods = [], [], []
    for name, kernel in by_name.items():
        body = _LINKAGE.sub("static ", _INCLUDE.sub("", kernel.source))
        bodies.append(f"namespace {name} {{\n{body}\n}}\n")
        arguments = ", ".join(f"read_argument<{t}>(given[{i}])" for i, t in enumerate(kernel.types))
        calls.append(_CALL.format(name=name, count=len(kernel.types), arguments=arguments))
        methods.append(f'  {{"{name}", reinterpret_cast<PyCFunction>(call_{name}), METH_FASTCALL, nullptr}},')
    definition = _DEFINITION.format(methods="\n".join(methods), module=_MODULE)
    return "\n".join([*includes, _SUPPORT, *bodies, *calls, definition])


def load_library(content: bytes) -> ModuleType:
    """Return the Python module in the shared object ``content``, with its kernels by name; it is loaded once per
    process. Raise ``ImportError`` or ``OSError`` if it cannot be loaded.
    """
    key = hashlib.sha256(content).hexdigest()
    if key not in _loaded:
        with tempfile.TemporaryDirectory(prefix="partitioner-") as folder:
            path = Path(folder) / f"{key}.so"
            path.write_bytes(content)
            loader = ExtensionFileLoader(f"partitioner_{key}.{_MODULE}", str(path))
            spec = spec_from_loader(loader.name, loader)
            assert spec is not None
            module = module_from_spec(spec)
            loader.exec_module(module)
        module.set_find_data(_guards._torchinductor_pyobject_tensor_data_ptr)
        _loaded[key] = module
    return _loaded[key]
