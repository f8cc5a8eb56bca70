"""Store the code that Inductor generates for a CPU, so that another process can load it without importing Inductor.

Inductor generates a Python module for a graph: functions that call C++ kernels. The module imports Inductor, which
takes seconds. Instead of the module, the source of its functions and, in a file that several graphs share, the compiled
kernels (``kernels.py``) are stored. When the functions are loaded, this module provides the few global names that they
read. Code that reads other global names is not stored.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from partitioner.passes.ops import cpu_products
from partitioner.runtime.compile.kernels import Kernel, KernelSource

BoxedFunction = Callable[[list[Any]], Sequence[Any]]  # it empties the list of its arguments

_UNUSED_FUNCTIONS = ("get_args", "benchmark_compiled_module")
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


class GeneratedCode(NamedTuple):
    """What Inductor has generated for a graph. ``functions``: Python source of functions, of which ``call`` computes
    the graph. ``kernels``: name that the functions read -> kernel that it stands for.
    """

    functions: str
    kernels: dict[str, KernelSource]


def select_code(source: str, values: dict[str, Any]) -> GeneratedCode | None:
    """Return the functions and kernels of the Python module ``source``, in a form that can be stored on disk and used
    by other processes; ``None`` if the module needs anything that cannot be stored. Inductor has generated the module
    under :func:`~partitioner.runtime.compile.kernels.collect_kernels`.

    ``values``: the global names of the loaded module, as name -> value.
    """
    functions = _select_functions(source)
    read = set(_find_names(compile(functions, "<compiled>", "exec")))
    kernels = {n: values[n] for n in sorted(read & values.keys()) if isinstance(values[n], KernelSource)}
    external = values.get("extern_kernels")
    if read - kernels.keys() - _NAMES.keys() - set(dir(builtins)) or not _has_known_products(functions, external):
        return None
    return GeneratedCode(functions, kernels) if all(k.can_be_joined() for k in kernels.values()) else None


def make_function(functions: str, kernels: Mapping[str, Kernel]) -> BoxedFunction:
    """Return the function ``call`` that the Python source ``functions`` defines. ``kernels``: name that the functions
    read -> compiled kernel.
    """
    values: dict[str, Any] = {**_NAMES, **kernels}
    exec(compile(functions, "<compiled>", "exec"), values)
    function: BoxedFunction = values["call"]
    return function


def _select_functions(source: str) -> str:
    """Return the source of the part of the Python module ``source`` that runs when its function ``call`` is called. Its
    imports, the kernels, and the assignments that give short names to functions of torch are left out.
    """
    kept: list[ast.stmt] = []
    for line in ast.parse(source).body:
        called = isinstance(line, ast.ClassDef | ast.FunctionDef) and line.name not in _UNUSED_FUNCTIONS
        if called or (isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") in ("runner", "call")):
            kept.append(line)
    return ast.unparse(ast.Module(kept, []))


def _find_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that ``code``, the compiled code of a module, and the functions in it read. Names that the
    module itself defines are left out."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    for found in _iterate_code_objects(code):
        for step in dis.get_instructions(found):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in own and step.argval[:2] != "__":
                yield step.argval


def _iterate_code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_code_objects(constant)


def _has_known_products(functions: str, external: Any) -> bool:
    """Return whether the source ``functions`` can run in another process. It can if it calls no operator that Inductor
    itself defines, and if this module has the same function for each external kernel of Inductor that it calls (such as
    torch's matrix products). ``external``: the namespace of the external kernels that the generated module uses.
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
