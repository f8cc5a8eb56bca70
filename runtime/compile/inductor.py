"""Compile a graph of ATen operators by Inductor, without Dynamo and without autograd around it.

The graphs of blocks are traced and differentiated already. Handing them to Inductor saves what ``torch.compile`` adds:
a second trace by Dynamo, the guards that it checks at every call, and the wrappers of AOTAutograd. Inductor keeps
compiled kernels on disk, in the folder of ``TORCHINDUCTOR_CACHE_DIR``. On a CPU the code that calls them is kept there,
too, by a hash of the graph, so that other processes and later runs neither trace nor generate code.

Shapes and strides are fixed. The compiled function checks those of its arguments.
"""

from __future__ import annotations

import fcntl
import hashlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ops import cpu_products, cross_entropy
from partitioner.runtime.files import find_foreign_access, write_bytes

BoxedFunction = Callable[[list[Any]], Sequence[Any]]  # it empties the list of its arguments

_FORMAT = 1  # raise it when the code that is generated for a graph changes
_multiply = torch.ops.partition.multiply.default


def compile_graph_module(module: fx.GraphModule, arguments: Sequence[Tensor], device: torch.device) -> BoxedFunction:
    """Return a compiled function that computes ``module``, a graph without side effects, for tensors with the shapes,
    strides and types of ``arguments``. If another process has compiled this graph already, its code is loaded from
    disk.

    ``device``: where the function gets its arguments; the tensors ``arguments`` may be elsewhere, such as on the meta
    device. The function takes a list of arguments, which it empties, and returns a sequence of results with the strides
    that the operators of the graph give them. It raises ``AssertionError`` for arguments of other shapes or strides.
    """
    from torch._inductor import config

    with config.patch(_settings(device)):
        code = _find_folder() if device.type == "cpu" else None
        if code is not None:
            code /= f"{describe_module(module, arguments, device)}.py"
            if code.exists():
                return _load_code(code.read_text())
        compiled = _compile_by_inductor(module, arguments, device)
        if code is not None and not compiled.constants:
            write_bytes(code, compiled.source_code.encode(), durable=False)
    function: BoxedFunction = compiled.current_callable
    return function


def _load_code(source: str) -> BoxedFunction:
    """Load ``source``, Python code that Inductor has generated for a graph, with its kernels. Return the function that
    it defines, which takes a list of arguments.
    """
    from torch._inductor.codecache import PyCodeCache

    _make_product_kernel()  # the code may call it
    function: BoxedFunction = PyCodeCache.load(source).call
    return function


def _settings(device: torch.device) -> dict[str, Any]:
    """Return Inductor's options for ``device`` as a dict of option name -> value; empty if its defaults are used. On a
    CPU whose AVX2 or AVX512 instructions torch itself uses, the options switch off Inductor's test of them, which takes
    seconds.
    """
    known = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"cpp.vec_isa_ok": True} if known and not torch.cpu._is_amx_tile_supported() else {}


def _compile_by_inductor(module: fx.GraphModule, arguments: Sequence[Tensor], device: torch.device) -> Any:
    """Compile ``module`` by Inductor, and return Inductor's object of the compiled graph, which has the callable
    function and its source code.

    ``arguments``: tensors with the shapes, strides and types for which it is compiled. ``device``: where the function
    runs.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    _register_lowerings()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), V.set_fake_mode(mode):
        with mode:
            given = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device) for a in arguments]
            traced = make_fx(module, decomposition_table=_decompositions())(*given)
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
    and types of ``arguments``, on ``device``, on the processor, and on the versions of torch and Python.
    """
    specs = [(tuple(a.shape), a.stride(), str(a.dtype)) for a in arguments]
    machine = torch.backends.cpu.get_cpu_capability(), cpu_products.is_onednn_faster(), torch.get_num_threads()
    parts = _FORMAT, module.code, specs, str(device), machine, torch.__version__, torch.version.git_version
    return hashlib.sha256(repr((*parts, sys.version_info[:2])).encode()).hexdigest()[:32]


def _find_folder() -> Path | None:
    """Return the folder for compiled code: the folder ``partitioner`` inside Inductor's cache folder, which is created
    if it does not exist. Return ``None`` if this process cannot write to it, or if another user can.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "partitioner"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return None if find_foreign_access(folder) or not os.access(folder, os.W_OK) else folder


@contextmanager
def hold_compile_lock(key: str, wait: bool = True) -> Iterator[bool]:
    """Yield whether this process holds the lock for compiling one graph, so that only one process of the machine
    compiles it.

    ``key``: the hash of the graph. ``wait``: if another process holds the lock, wait until it is free; otherwise
    ``False`` is yielded at once. The lock is a file in the folder for compiled code. If there is no such folder, there
    is no lock, and ``True`` is yielded.
    """
    folder = _find_folder()
    if folder is None:
        yield True
        return
    with (folder / f"{key}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _use_faster_products(graph: fx.Graph) -> None:
    """Replace matrix products of ``graph`` on a CPU by ``partition::multiply`` where that is faster."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.mm.default and not node.kwargs:
            operands = tuple(o.meta["val"] for o in node.all_input_nodes)
            if len(operands) == 2 and cpu_products.choose_product(node.target, operands):
                node.target = _multiply


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a dict: operator -> function that computes it with simpler operators, which Inductor can fuse. It has
    Inductor's own decompositions, and those of the project's cross-entropy operators.
    """
    from torch._inductor.decomposition import select_decomp_table

    ours: dict[Any, Callable[..., Any]] = {
        cross_entropy.ops.target_and_logsumexp.default: cross_entropy.decompose_target_and_logsumexp,
        cross_entropy.ops.target_and_logsumexp_backward.default: cross_entropy.decompose_backward,
    }
    return {**select_decomp_table(), **ours}


@cache
def _make_product_kernel() -> Any:
    """Register :func:`~partitioner.passes.ops.cpu_products.multiply`, a matrix product by oneDNN, as a kernel that code
    of Inductor calls directly. Return Inductor's object for this kernel.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice

    return ExternKernelChoice(cpu_products.multiply, name="partition_multiply", has_out_variant=False)


@cache
def _register_lowerings() -> None:
    """Register with Inductor how to generate code for the operator ``partition::multiply``, a matrix product by oneDNN:
    as a call of the project's kernel.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    kernel = _make_product_kernel()

    @register_lowering(_multiply, type_promotion_kind=None)
    def multiply(a: Any, b: Any) -> Any:
        layout = ir.FixedLayout(a.get_device(), a.get_dtype(), [a.get_size()[0], b.get_size()[1]])
        return kernel.bind([ir.ExternKernel.realize_input(x) for x in (a, b)], layout).output_node()


def is_fixed(module: fx.GraphModule) -> bool:
    """Return whether all inputs of ``module`` are tensors of fixed shapes, and it calls only ATen and custom operators
    (no Python functions), so that Inductor can compile it directly.
    """
    values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    return all(isinstance(v, Tensor) and all(isinstance(s, int) for s in v.shape) for v in values) and not any(
        n.op == "call_function" and n.target is not operator.getitem and not isinstance(n.target, torch._ops.OpOverload)
        for n in module.graph.nodes
    )
