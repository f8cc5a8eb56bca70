"""Compile a graph of ATen operators by Inductor, without Dynamo and without autograd around it.

The graphs of blocks are already traced and differentiated. Passing them directly to Inductor avoids the overhead of
``torch.compile``: a second trace by Dynamo, the guards that it checks at every call, and the wrappers of AOTAutograd.

On a CPU this has two steps. :func:`generate_code` lets Inductor generate Python functions and C++ kernels for each
graph. :func:`build_functions` compiles the kernels of several graphs at once (``kernels.py``). The result is stored on
disk, by a hash of the graph, in a folder inside that of ``TORCHINDUCTOR_CACHE_DIR``. Other processes and later runs
load the result without importing Inductor (``kept_code.py``). Inductor's own files there are not read again, because
Inductor does not notice if they are damaged. On a GPU, Inductor stores its kernels itself.

Shapes and strides are fixed. The compiled function checks the shapes and strides of its arguments.
"""

from __future__ import annotations

import getpass
import hashlib
import operator
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner.passes.ops import cpu_products, cross_entropy
from partitioner.runtime.compile.kept_code import BoxedFunction, GeneratedCode, make_function, select_code
from partitioner.runtime.compile.kernels import build_library, collect_kernels, load_library, start_header_search
from partitioner.runtime.file_cache import FileCache, open_cache

_FORMAT = 3  # raise it when the code that is generated for a graph changes
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_multiply = torch.ops.partition.multiply.default


class NamedCode(NamedTuple):
    """Generated code of a graph whose kernels are not compiled yet. ``name``: the hash under which the compiled code
    will be stored on disk. ``code``: the source of its functions and kernels.
    """

    name: str
    code: GeneratedCode


def generate_code(
    module: fx.GraphModule, arguments: Sequence[Tensor], device: torch.device
) -> NamedCode | BoxedFunction:
    """Generate code for ``module``, a graph without side effects, for tensors with the shapes, strides and dtypes of
    ``arguments``. Return it as :class:`NamedCode`, which :func:`build_functions` compiles. Return a compiled function
    instead if the graph was compiled before (its code is then loaded from disk), or if Inductor must compile it at
    once: on a GPU, or if the code cannot be stored on disk.

    A compiled function takes a list of arguments, which it empties, and returns a sequence of results with the strides
    of the graph's operators. It raises ``AssertionError`` for arguments of other shapes or strides. ``device``: device
    of the function's arguments; the tensors ``arguments`` may be elsewhere, such as on the meta device.
    """
    function: BoxedFunction | None
    if device.type != "cpu":
        function = _compile_by_inductor(module, arguments, device).current_callable
        return function
    name = describe_module(module, arguments, device)
    function = _load_function(name)
    if function is not None:
        return function
    from torch._inductor import config

    with _use_empty_folder():
        with config.patch(_choose_options(device)), collect_kernels():
            start_header_search()
            generated = _compile_by_inductor(module, arguments, device)
        function = generated.current_callable
        values = getattr(getattr(function, "__func__", function), "__globals__", {})
        code = None if generated.constants else select_code(generated.source_code, values)
        if code is not None:
            return NamedCode(name, code)
        function = _compile_by_inductor(module, arguments, device).current_callable
        return function


def build_functions(codes: Sequence[NamedCode]) -> list[BoxedFunction]:
    """Compile the kernels of ``codes`` together, by one call of the C++ compiler, store them on disk for other
    processes and later runs, and return the compiled function of each. If the compiler fails, raise the error of torch
    or of the operating system.
    """
    from torch._inductor import config

    kept, library, module = get_code_cache(), None, None
    kernels = [kernel for _, code in codes for kernel in code.kernels.values()]
    if kernels:
        with config.patch(_choose_options(torch.device("cpu"))):
            content = build_library(kernels)
        module = load_library(content)
        library = f"{hashlib.sha256(repr(sorted(name for name, _ in codes)).encode()).hexdigest()[:32]}.kernels"
        kept.write(library, content)
    functions = []
    for name, code in codes:
        entries = {read: kernel.name for read, kernel in code.kernels.items()}
        kept.write(f"{name}.code", pickle.dumps((code.functions, entries, library if entries else None)))
        functions.append(make_function(code.functions, {r: getattr(module, e) for r, e in entries.items()}))
    return functions


def _load_function(name: str) -> BoxedFunction | None:
    """Return the compiled function that is stored on disk under ``name``; ``None`` if there is none, or if it cannot be
    loaded.
    """
    kept = get_code_cache()
    content = kept.read(f"{name}.code")
    if content is None:
        return None
    functions, entries, library = pickle.loads(content)
    if library is None:
        return make_function(functions, {})
    found = kept.read(library)
    try:
        if found is None:
            raise ImportError(f"its kernels in {library} are missing")
        module = load_library(found)
        return make_function(functions, {read: getattr(module, entry) for read, entry in entries.items()})
    except (AttributeError, ImportError, OSError) as error:
        kept.discard(f"{name}.code", str(error))
        return None


@contextmanager
def _use_empty_folder() -> Iterator[None]:
    """Return a context manager in which Inductor stores its files in a temporary folder, which is empty at first, so
    that it cannot read damaged files of earlier runs. The folder is removed on exit; functions that Inductor has loaded
    from the folder stay usable.
    """
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(prefix="partitioner-", ignore_cleanup_errors=True) as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


def _choose_options(device: torch.device) -> dict[str, Any]:
    """Return Inductor's options for ``device``, as a dict: option name -> value; empty for its defaults. On a CPU,
    Inductor's own cache of graphs is switched off, because this project stores compiled graphs itself. If torch itself
    uses the CPU's AVX2 or AVX512 instructions, Inductor's test of these, which takes seconds, is switched off.
    """
    if device.type != "cpu":
        return {}
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not torch.cpu._is_amx_tile_supported()
    return {"fx_graph_cache": False, **({"cpp.vec_isa_ok": True} if known else {})}


def _compile_by_inductor(module: fx.GraphModule, arguments: Sequence[Tensor], device: torch.device) -> Any:
    """Compile ``module`` by Inductor, and return Inductor's object of the compiled graph, which has the callable
    function and its source code. ``arguments``: tensors with the shapes, strides and dtypes for which it is compiled.
    ``device``: device on which the function runs.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    _register_lowerings()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with config.patch(_choose_options(device)), torch.no_grad(), V.set_fake_mode(mode):
        with mode:
            given = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device) for a in arguments]
            traced = make_fx(module, decomposition_table=_list_decompositions())(*given)
        joint_graph_passes(traced)
        output = traced.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
        if device.type == "cpu":
            _use_faster_products(traced.graph)
            traced.recompile()
        return compile_fx_inner(traced, given, cudagraphs=BoxedBool(False))


def describe_module(module: fx.GraphModule, arguments: Sequence[Tensor], device: torch.device) -> str:
    """Return a hash that identifies the compiled code of ``module``. It depends on the graph, on the shapes, strides
    and dtypes of ``arguments``, on ``device``, on the processor, and on the versions of torch and Python.
    """
    specs = [(tuple(a.shape), a.stride(), str(a.dtype)) for a in arguments]
    machine = torch.backends.cpu.get_cpu_capability(), cpu_products.is_onednn_faster(), torch.get_num_threads()
    parts = _FORMAT, module.code, specs, str(device), machine, torch.__version__, torch.version.git_version
    return hashlib.sha256(repr((*parts, sys.version_info[:2])).encode()).hexdigest()[:32]


def get_code_cache() -> FileCache:
    """Return the cache in which the processes of this machine and later runs share compiled code: files in a subfolder
    of Inductor's folder.
    """
    return _open_cache(os.environ.get(_FOLDER) or _find_default_folder())


@cache
def _open_cache(folder: str) -> FileCache:
    return open_cache(Path(folder).absolute() / "partitioner")


def _find_default_folder() -> str:
    """Return the folder in which Inductor keeps its files by default, if the user names none. Inductor is not imported,
    because that takes seconds."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(r'[^A-Za-z0-9._-]', '_', user)}")


def _use_faster_products(graph: fx.Graph) -> None:
    """Replace matrix products of ``graph`` on a CPU by ``partition::multiply``, this project's operator for the same
    product, if the latter is faster.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.mm.default and not node.kwargs:
            operands = tuple(o.meta["val"] for o in node.all_input_nodes)
            if len(operands) == 2 and cpu_products.choose_product(node.target, operands):
                node.target = _multiply


@cache
def _list_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a dict: operator -> function that computes it with simpler operators, which Inductor can fuse. It has
    Inductor's own decompositions, and those of the project's cross-entropy operators.
    """
    from torch._inductor.decomposition import select_decomp_table

    ours: dict[Any, Callable[..., Any]] = {
        cross_entropy.ops.target_and_logsumexp.default: cross_entropy.decompose_target_and_logsumexp,
        cross_entropy.ops.target_and_logsumexp_backward.default: cross_entropy.decompose_backward,
    }
    return {**select_decomp_table(), **ours}


def import_compiler() -> None:
    """Import Inductor, which takes seconds. Call this while this process waits for another one, so that the import
    costs no time later.
    """
    from torch._inductor import compile_fx  # noqa: F401

    _register_lowerings()


@cache
def _register_lowerings() -> None:
    """Let generated code of Inductor call ``partition::multiply`` (this project's operator for matrix products on a
    CPU) as a Python function, without torch's dispatcher.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    kernel = ExternKernelChoice(cpu_products.multiply, name="partition_multiply", has_out_variant=False)

    @register_lowering(_multiply, type_promotion_kind=None)
    def multiply(a: Any, b: Any) -> Any:
        layout = ir.FixedLayout(a.get_device(), a.get_dtype(), [a.get_size()[0], b.get_size()[1]])
        return kernel.bind([ir.ExternKernel.realize_input(x) for x in (a, b)], layout).output_node()


def is_fixed(module: fx.GraphModule) -> bool:
    """Return whether Inductor can compile ``module`` directly: all inputs are tensors of fixed shapes, and the graph
    calls only ATen and custom operators (no Python functions).
    """
    values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    return all(isinstance(v, Tensor) and all(isinstance(s, int) for s in v.shape) for v in values) and not any(
        n.op == "call_function" and n.target is not operator.getitem and not isinstance(n.target, torch._ops.OpOverload)
        for n in module.graph.nodes
    )
