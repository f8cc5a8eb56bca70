"""Compile the operators between two collectives of a block to one function.

If all shapes are known, Inductor compiles the operators directly (``inductor.py``). If some shapes change from call to
call, or if the user names another backend than Inductor, ``torch.compile`` compiles them.

The collectives remain lines of the rank's own function (``codegen.py``), which starts them and waits for them. Matrix
products whose results are only gradients of parameters remain, too, because they are accumulated in place. A function
that cannot be compiled runs operator by operator.
"""

from __future__ import annotations

import importlib.util
import logging
import operator
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.passes.ir.collectives import collective_name
from partitioner.runtime.compile.inductor import (
    NamedCode,
    build_functions,
    describe_module,
    generate_code,
    get_code_cache,
    is_fixed,
)
from partitioner.runtime.compile.kept_code import BoxedFunction
from partitioner.runtime.errors import LaunchError

META = torch.device("meta")

_log = logging.getLogger(__name__)
_COMPILERS = ("g++", "clang++", "c++", "cl")
# Torch traces and compiles in one thread at a time, and refuses calls of compiled functions in other threads meanwhile.
one_thread = threading.RLock()
_MIN_OPERATORS = 2  # minimum number of operators in a compiled function


class _Mode(threading.local):
    """How this thread runs groups of operators. ``uncompiled``: whether their operators run one by one, without
    compiled code.
    """

    uncompiled = False


_mode = _Mode()


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Return a context manager in which this thread runs the operators of compiled groups one by one, so that tools can
    observe each operator.
    """
    before, _mode.uncompiled = _mode.uncompiled, True
    try:
        yield
    finally:
        _mode.uncompiled = before


class SegmentInterpreter(fx.Interpreter):
    """Runs the operators of a compiled group one by one. The stack frames of ``run_node`` show which node runs."""


class Segment:
    """A group of operators of a block (a piece of the model, such as a layer), compiled by ``torch.compile`` to one
    function at its first call. Threads of a process may share it. ``name``: name in messages. ``module``: the operators
    as a graph module. ``backend``: name of the ``torch.compile`` backend.
    """

    def __init__(self, name: str, module: fx.GraphModule, backend: str) -> None:
        self.name = name
        self.__name__ = "compiled"  # torch.fx names the node after it
        self.module = module
        self._known: set[int] = set()  # threads that have called it
        self.function: Callable[..., Any] = torch.compile(module, backend=backend, fullgraph=True, dynamic=None)

    def __call__(self, *arguments: Any) -> Any:
        """Run the operators of this group on ``arguments``, as one compiled function, and return their results. Only
        one thread runs at a time. Inside :func:`run_uncompiled`, the operators run one by one.
        """
        if _mode.uncompiled:
            return SegmentInterpreter(self.module).run(*arguments)
        with one_thread:
            if threading.get_ident() in self._known:
                return self.function(*arguments)
            result = self._call_first_time(arguments)
            self._known.add(threading.get_ident())
            return result

    def _call_first_time(self, arguments: tuple[Any, ...]) -> Any:
        """Run the function of this group of operators on ``arguments`` for the first time in this thread, which
        compiles it, and return its results. If compilation fails, log a warning and run the operators one by one from
        then on.
        """
        try:
            return self.function(*arguments)
        except Exception as error:
            if self.function == self.module.forward:
                raise
            result = self.module.forward(*arguments)  # raises an error if the operators are at fault
            _warn_not_compiled(self.name, error)
            self.function = self.module.forward
            return result

    def __str__(self) -> str:
        return f"compiled {self.name}"


class FixedSegment:
    """A group of operators of a block (a piece of the model, such as a layer) on tensors of known shapes, compiled by
    Inductor to one function. Threads of a process may share it. ``name``: name in messages. ``module``: the operators
    as a graph module; its placeholders have meta tensors of the expected shapes. ``device``: the device of all tensors.
    """

    def __init__(self, name: str, module: fx.GraphModule, device: torch.device) -> None:
        self.name = name
        self.__name__ = "compiled"  # torch.fx names the node after it
        self.module = module
        self.device = device
        self.falls_back = False
        self._shapes: tuple[Any, ...] = ()  # shapes of the arguments for which it was compiled first
        self._variants: dict[tuple[Any, ...], BoxedFunction] = {}  # by strides of the arguments
        self._only: BoxedFunction | None = None  # the variant, if there is only one
        self._dynamic: Segment | None = None  # used if shapes depend on the data

    def __call__(self, *arguments: Any) -> Any:
        """Run the operators of this group on ``arguments``, as one compiled function, and return their results. Inside
        :func:`run_uncompiled`, the operators run one by one.
        """
        if _mode.uncompiled:
            return SegmentInterpreter(self.module).run(*arguments)
        if self._dynamic is not None:
            return self._dynamic(*arguments)
        if self._only is None:
            return self._call_variant(arguments)
        try:
            return self._only([*arguments])
        except AssertionError:  # other shapes or strides, which the function checks first
            return self._call_variant(arguments)

    def compile(self) -> None:
        """Compile this group of operators for arguments with the shapes and strides of the graph's placeholders."""
        compile_in_turns([self])

    @property
    def expected(self) -> list[Tensor]:
        """Return, for each placeholder of the graph, a meta tensor with the shape, strides and dtype of the expected
        argument.
        """
        return [n.meta["val"] for n in self.module.graph.nodes if n.op == "placeholder"]

    @property
    def is_compiled(self) -> bool:
        """Return whether a function has been compiled for some arguments."""
        return bool(self._variants)

    def _call_variant(self, arguments: tuple[Any, ...]) -> Any:
        """Call the compiled function for the strides of ``arguments``, and return its results. If there is none for
        these strides, compile it first. If the shapes differ from those of the first call, a function that accepts
        changing shapes is used for all calls from now on.
        """
        with one_thread:
            shapes = tuple(tuple(a.shape) for a in arguments)
            if self._shapes and shapes != self._shapes:
                return self._call_dynamic(arguments)
            strides = _list_strides(arguments)
            if strides not in self._variants:
                _compile_variants([(self, arguments)], wait=True)
            return self._variants[strides]([*arguments])

    def add_variant(self, arguments: Sequence[Tensor], function: BoxedFunction) -> None:
        """Use ``function`` for arguments with the shapes and strides of ``arguments``."""
        self._shapes = tuple(tuple(a.shape) for a in arguments)
        self._variants[_list_strides(arguments)] = function
        self._only = function if len(self._variants) == 1 else None

    def add_uncompiled(self, arguments: Sequence[Tensor], error: Exception) -> None:
        """Run the operators one by one for arguments with the shapes and strides of ``arguments``, because compilation
        failed with ``error``, and log a warning.
        """
        _warn_not_compiled(self.name, error)
        self.falls_back = True
        self.add_variant(arguments, lambda given: self.module.forward(*given))

    def _call_dynamic(self, arguments: tuple[Any, ...]) -> Any:
        """Compile this group of operators by ``torch.compile`` for shapes that change from call to call, such as
        numbers of rows that experts receive. Call the compiled function on ``arguments``, and return its results. Later
        calls use the same function.
        """
        for argument, expected in zip(arguments, self._shapes, strict=True):
            for dim, (size, other) in enumerate(zip(argument.shape, expected, strict=True)):
                if size != other:
                    torch._dynamo.maybe_mark_dynamic(argument, dim)
        self._dynamic = Segment(self.name, self.module, "inductor")
        return self._dynamic(*arguments)

    def __str__(self) -> str:
        return f"compiled {self.name}"


def compile_in_turns(segments: Sequence[Segment | FixedSegment]) -> None:
    """Compile ``segments`` (groups of operators), and divide the work among the processes of this machine, which all
    call this with the same groups. Each group is compiled by one process, the largest groups first. A process skips
    groups that other processes are compiling, and loads their code at the end.
    """
    with one_thread:
        fixed = [s for s in segments if isinstance(s, FixedSegment) and not s.is_compiled]
        fixed.sort(key=lambda s: len(s.module.graph.nodes), reverse=True)
        left = _compile_variants([(s, s.expected) for s in fixed], wait=False)
        for segment, arguments in left:  # one by one: a process that waits for a lock must not hold another one
            _compile_variants([(segment, arguments)], wait=True)


_Wanted = tuple[FixedSegment, Sequence[Tensor]]  # a group of operators, and tensors like its arguments


def _compile_variants(wanted: Sequence[_Wanted], wait: bool) -> list[_Wanted]:
    """Compile each group of operators in ``wanted`` for its arguments, or load its code. Return the groups that were
    skipped, because other processes of the machine are compiling them. If a group cannot be compiled, log a warning and
    let it run operator by operator.

    ``wanted``: pairs (group of operators, tensors with the shapes and strides of its arguments). ``wait``: whether to
    wait for the other processes and load their results, so that no group is skipped.
    """
    left: list[_Wanted] = []
    generated: list[tuple[_Wanted, NamedCode]] = []
    with ExitStack() as locks:
        for segment, arguments in wanted:
            name = describe_module(segment.module, arguments, segment.device)
            if not locks.enter_context(get_code_cache().hold_lock(name, wait)):
                left.append((segment, arguments))
                continue
            try:
                found = generate_code(segment.module, arguments, segment.device)
            except Exception as error:
                segment.add_uncompiled(arguments, error)
            else:
                if isinstance(found, NamedCode):
                    generated.append(((segment, arguments), found))
                else:
                    segment.add_variant(arguments, found)
        _build_variants(generated)
    return left


def _build_variants(generated: Sequence[tuple[_Wanted, NamedCode]]) -> None:
    """Compile the kernels of groups of operators, and let the groups use them. If the compiler fails, the groups are
    compiled one by one, so that only the faulty ones remain uncompiled. ``generated``: pairs ((group, tensors with the
    shapes and strides of its arguments), generated code).
    """
    if not generated:
        return
    try:
        functions = build_functions([code for _, code in generated])
    except Exception as error:
        if len(generated) > 1:
            for one in generated:
                _build_variants([one])
        else:
            segment, arguments = generated[0][0]
            segment.add_uncompiled(arguments, error)
    else:
        for ((segment, arguments), _), function in zip(generated, functions, strict=True):
            segment.add_variant(arguments, function)


def _list_strides(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.stride() for tensor in tensors)


def _warn_not_compiled(name: str, error: Exception) -> None:
    """Log a warning that the operators called ``name`` are not compiled, because of ``error``."""
    _log.warning("%s is not compiled, and runs operator by operator: %s", name, " ".join(str(error).split()[:40]))


def make_segment(name: str, module: fx.GraphModule, backend: str, device: torch.device) -> Segment | FixedSegment:
    """Return an object that runs ``module``, a group of operators of a block (a piece of the model), as one compiled
    function: by Inductor directly if its shapes are fixed, otherwise by ``torch.compile``. ``name``: name in messages.
    ``backend``: name of the ``torch.compile`` backend, such as ``inductor``. ``device``: the device of all tensors.
    """
    if backend == "inductor" and is_fixed(module):
        return FixedSegment(name, module, device)
    return Segment(name, module, backend)


def choose_backend(requested: bool | str, device: torch.device) -> str | None:
    """Return the name of the ``torch.compile`` backend for the user's argument ``requested``; ``None`` for no
    compilation. ``requested``: ``False``, the name of a backend, or ``True`` for Inductor. If it is ``True`` and the
    compiler that Inductor needs for ``device`` is not installed, return ``None`` with a warning. Raise
    :class:`LaunchError` for a name that torch does not know.
    """
    if requested is False:
        return None
    if isinstance(requested, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if requested not in known:
            raise LaunchError(f"compile must be a bool or one of {', '.join(sorted(known))}; got {requested!r}")
        return requested
    missing = _find_missing_compiler(device)
    if missing:
        _log.warning("blocks run operator by operator: torch.compile needs %s on this machine", missing)
        return None
    return "inductor"


def _find_missing_compiler(device: torch.device) -> str:
    """Return the name of the compiler that ``torch.compile`` needs for ``device`` and that is not installed, such as "a
    C++ compiler"; empty if nothing is missing.
    """
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "triton"
    named = os.environ.get("CXX"), *_COMPILERS  # Inductor reads the same variable; importing it takes seconds
    found = any(shutil.which(c) for c in named if c)
    return "" if found else "a C++ compiler"


def fuse_segments(
    graph: fx.Graph,
    num_sinks: int,
    device: torch.device,
    compile_group: Callable[[int, fx.GraphModule], Callable[..., Any]],
) -> fx.Graph:
    """Return a copy of ``graph`` in which each group of operators between its collectives is replaced by one call of a
    compiled function.

    ``compile_group(number, module)``: returns the compiled function for the operators ``module`` of one group;
    ``number`` is the index of the group. ``device``: device on which the functions create tensors. ``num_sinks``:
    number of outputs, at the end, that are gradients of parameters. Matrix products that compute only these are not
    replaced, because they are accumulated in place.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    results: tuple[Any, ...] = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    sunk = set(results[len(results) - num_sinks :])
    apart: set[fx.Node] = set()
    levels: dict[fx.Node, int] = {}
    for node in nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        part_of_one = node.target is operator.getitem and source in apart
        product = node.target is torch.ops.aten.mm.default and node in sunk and set(node.users) == {graph.output_node()}
        if collective_name(node.target) is not None or part_of_one or product:
            apart.add(node)
        # A collective's result belongs to the next level: its readers run after all operators on which the collective
        # depends.
        levels[node] = max((levels.get(i, 0) + (i in apart) for i in node.all_input_nodes), default=0)
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {n: new.node_copy(n) for n in graph.nodes if n.op == "placeholder"}
    for level in range(max(levels.values(), default=0) + 1):
        here = [n for n in nodes if levels[n] == level]
        inside = [n for n in here if n not in apart]
        if len(inside) < _MIN_OPERATORS:
            for node in inside:
                values[node] = new.node_copy(node, values.__getitem__)
        else:
            _add_segment(new, inside, values, device, partial(compile_group, level))
        for node in here:
            if node in apart:
                values[node] = new.node_copy(node, values.__getitem__)
    new.output(fx.node.map_arg(results, values.__getitem__))
    return new


def _add_segment(
    new: fx.Graph,
    inside: Sequence[fx.Node],
    values: dict[fx.Node, fx.Node],
    device: torch.device,
    compile_group: Callable[[fx.GraphModule], Callable[..., Any]],
) -> None:
    """Add to the graph ``new`` one call of a compiled function that computes the nodes ``inside`` of another graph, and
    nodes for its results. ``values``: node of the other graph -> node of ``new`` with its value; the results are added
    to this dict. ``device``: device on which the function creates tensors. ``compile_group``: compiles a graph module
    to a function.
    """
    members = set(inside)
    read = list(dict.fromkeys(o for n in inside for o in n.all_input_nodes if o not in members))
    given = [n for n in inside if any(u not in members for u in n.users)]
    graph = fx.Graph()
    local = {n: graph.placeholder(n.name) for n in read}
    for node, place in local.items():
        place.meta = {k: v for k, v in node.meta.items() if k == "val"}
    for node in inside:
        copy = local[node] = graph.node_copy(node, local.__getitem__)
        copy.args = fx.node.map_aggregate(copy.args, lambda a: device if a == META else a)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, lambda a: device if a == META else a)
    graph.output(tuple(local[n] for n in given))
    call = new.call_function(compile_group(fx.GraphModule({}, graph)), tuple(values[n] for n in read))
    call.meta = {k: v for k, v in inside[0].meta.items() if k in ("path", "source")}
    for index, node in enumerate(given):
        values[node] = new.call_function(operator.getitem, (call, index))
        values[node].meta = dict(node.meta)
