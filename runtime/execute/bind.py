"""Compile a block's graphs to functions of one rank, with collectives on the rank's groups and tensors on its device.

The graphs of a program are the same for all ranks of a stage. :class:`BlockLibrary` reads and differentiates each graph
once for all ranks of a process. :class:`Binder` compiles graphs to functions of one rank.

:class:`SharedDerivatives` shares the derivatives among the processes of a machine: one rank traces a block, and the
others read the result. The ranks of a stage run the same functions, and so do stages of equal layers. On a machine with
fewer cores than ranks, tracing in each rank would take most of the time of a short run.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from partitioner import passes
from partitioner.passes.ir.collectives import CONTEXT, IN_PIECES, ROUTED, collective_name
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.ir.serialize import block_from_data, target_of
from partitioner.passes.ops.attention import Band, make_band
from partitioner.passes.ops.scored_attention import get_prefix_band
from partitioner.passes.shard.differentiate import BlockDerivatives, JointSubgraph, differentiate
from partitioner.passes.shard.overlap_products import overlap_block, overlap_derivatives
from partitioner.runtime.comm.group import Communicator, Pending, RankGroup
from partitioner.runtime.comm.storage import free_storage, share_memory
from partitioner.runtime.compile.inductor import get_code_cache, import_compiler
from partitioner.runtime.compile.segments import (
    META,
    FixedSegment,
    Segment,
    choose_backend,
    compile_in_turns,
    fuse_segments,
    make_segment,
    one_thread,
)
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.execute import collective_ops
from partitioner.runtime.execute.codegen import (
    AliasBinding,
    AsyncBinding,
    Binding,
    CompiledGraph,
    ConstantBinding,
    DirectBinding,
    compile_graph,
)
from partitioner.runtime.execute.collective_ops import (
    ContextAttention,
    ContextDocumentAttention,
    ContextScoredAttention,
)
from partitioner.runtime.execute.product_pieces import GatheredProducts, ScatteredProducts
from partitioner.runtime.file_cache import FileCache
from partitioner.runtime.files import find_foreign_access
from partitioner.runtime.program.analysis import differentiate_for_cpu
from partitioner.runtime.program.program import BlockGraph, CallData, Program, RankProgram

_KEPT = ("path", "source")
_FORMAT = 1  # format version of stored graphs


class SharedDerivatives:
    """A folder through which the processes on one machine share the forward and backward graphs of the model's blocks.
    The graphs are pickled. ``compiles``: whether the graphs will be compiled by Inductor. Raise :class:`LaunchError` if
    another user could write to the folder.
    """

    def __init__(self, folder: Path, compiles: bool = False) -> None:
        self.files = FileCache(folder)
        self.compiles = compiles
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if foreign := find_foreign_access(folder):
            raise LaunchError(
                f"{folder} cannot be used for graphs: {foreign}; name a folder to which only you can write"
            )

    def get(self, key: tuple[Any, ...], make: Callable[[], BlockDerivatives]) -> BlockDerivatives:
        """Return the forward and backward graphs of a block. The first process that calls this with ``key`` calls
        ``make`` and stores the result in the folder; the others wait for the result, and import the compiler meanwhile.
        If the first process fails or is killed, the next one calls ``make``. ``key``: a tuple that identifies the block
        and the gradients that it needs.
        """
        name = f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.graphs"
        found = self._read(name)
        if found is not None:
            return found
        with self.files.hold_lock(name, wait=False) as held:
            if held:
                return self._read_or_make(name, make)
        if self.compiles:
            import_compiler()
        with self.files.hold_lock(name):
            return self._read_or_make(name, make)

    def _read_or_make(self, name: str, make: Callable[[], BlockDerivatives]) -> BlockDerivatives:
        """Return the forward and backward graphs of a block (such as a layer) that are stored under ``name``. If there
        are none, call ``make``, and store and return its result. The caller holds the lock.
        """
        found = self._read(name)
        if found is None:
            found = make()
            self.files.write(name, pickle.dumps(_to_data(found)))
        return found

    def _read(self, name: str) -> BlockDerivatives | None:
        """Return the graphs that are stored under ``name``; ``None`` if there are none, or if they are damaged."""
        content = self.files.read(name)
        try:
            return None if content is None else _parse_derivatives(pickle.loads(content))
        except Exception as error:
            self.files.discard(name, str(error))
            return None


def _to_data(made: BlockDerivatives) -> dict[str, Any]:
    """Return ``made``, the forward and backward graphs of a block, as a dict of plain data that can be pickled: field
    name -> value, with each graph as a list of tuples, one for each node. :func:`_parse_derivatives` is the inverse.
    """
    values = {f.name: getattr(made, f.name) for f in fields(made)}
    pieces = {
        n: (list(_serialize_nodes(v.graph)), v.inputs, v.outputs)
        for n, v in values.items()
        if isinstance(v, JointSubgraph)
    }
    return {"pieces": pieces, "values": {n: v for n, v in values.items() if n not in pieces}}


def _parse_derivatives(data: dict[str, Any]) -> BlockDerivatives:
    pieces: dict[str, Any] = {
        name: JointSubgraph(_nodes_to_graph(nodes), *named) for name, (nodes, *named) in data["pieces"].items()
    }
    return BlockDerivatives(**pieces, **data["values"])


class _Node(str):
    """The name of a graph node, as a subclass of ``str``, so that serialised arguments distinguish a reference to the
    node from a string.
    """


def _serialize_nodes(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple of plain data for each node of ``graph``: kind (``node.op``), name, operator, arguments, keyword
    arguments, (shape, strides, dtype) of its tensor or ``None`` if its value is not a tensor, and a dict with the
    entries of ``node.meta`` that are named in ``_KEPT`` (module path, source line). In the arguments a :class:`_Node`
    refers to an earlier node.
    """
    for node in graph.nodes:
        target = node.target
        operator = str(target) if isinstance(target, torch._ops.OpOverload) else target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Node(n.name))
        value = node.meta.get("val")
        spec = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else None
        yield node.op, node.name, operator, args, kwargs, spec, {k: node.meta[k] for k in _KEPT if k in node.meta}


def _nodes_to_graph(nodes: list[tuple[Any, ...]]) -> fx.Graph:
    """Return the FX graph that ``nodes`` describe: the inverse of :func:`_serialize_nodes`, which describes
    the tuples.
    """
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, operator, args, kwargs, spec, place in nodes:
        target = target_of(operator) if op == "call_function" and isinstance(operator, str) else operator
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: made[a] if isinstance(a, _Node) else a)
        node = made[name] = graph.create_node(op, target, args, kwargs, name=name)
        assert node.name == name, f"{node.name} is not {name}"
        node.meta.update(place)
        if spec is not None:
            shape, strides, dtype = spec
            node.meta["val"] = torch.empty_strided(shape, strides, dtype=dtype, device=META)
    return graph


class GradientNeeds(NamedTuple):
    """The gradients that the backward of one call of a block (such as a layer) has to compute. ``inputs`` and
    ``states``: for each input, and each parameter or buffer, whether its gradient is computed. ``outputs``: for each
    output, whether its gradient is given. ``selective``: whether backward recomputes cheap operators instead of saving
    their results.
    """

    inputs: tuple[bool, ...]
    states: tuple[bool, ...]
    outputs: tuple[bool, ...]
    selective: bool = False


def find_gradient_needs(program: Program, call: CallData, selective: bool = False) -> GradientNeeds | None:
    """Return which gradients the backward of ``call`` has to compute; ``None`` if the call has no backward. ``call``:
    one use of a block, such as a layer. ``selective``: whether backward recomputes cheap operators instead of saving
    their results. ``program``: the program of all ranks.
    """
    outputs = tuple(program.values[v].requires_grad for v in call.outputs)
    if program.objective != "train" or call.prologue or not any(outputs):
        return None
    inputs = tuple(program.values[v].requires_grad for v in call.inputs)
    states = tuple(program.states[s].requires_grad for s in call.states)
    return GradientNeeds(inputs, states, outputs, selective) if any(inputs) or any(states) else None


class BlockLibrary:
    """The graphs of a program's blocks (pieces of the model, such as layers) and their backward graphs, computed on
    first use. Threads may share one library. ``compile``: whether to use ``torch.compile``, or the name of its backend.
    ``shared``: a folder through which the ranks on this machine share backward graphs. ``None``: if Inductor compiles,
    the folder of compiled code; otherwise graphs are not shared.
    """

    def __init__(
        self, program: Program, device: torch.device, compile: bool | str = False, shared: Path | None = None
    ) -> None:
        self.program = program
        self.device = device
        self.backend = choose_backend(compile, device)
        shared = get_code_cache().folder if shared is None and self.backend == "inductor" else shared
        self._shared = None if shared is None else SharedDerivatives(shared, self.backend == "inductor")
        self._segments: dict[tuple[str, GradientNeeds | None, str, int], Segment | FixedSegment] = {}
        self._blocks: dict[str, Block] = {}
        self._derivatives: dict[tuple[str, GradientNeeds], BlockDerivatives] = {}

    def block(self, name: str) -> Block:
        """Return the block (piece of the model, such as a layer) called ``name``, with its FX graph."""
        with one_thread:
            if name not in self._blocks:
                data = self.program.blocks[name]
                self._blocks[name] = block_from_data(name, data.nodes, data.states, data.inputs)
            return self._blocks[name]

    def differentiated(self, name: str, needs: GradientNeeds) -> BlockDerivatives:
        """Return the forward and backward graphs of the block (a piece of the model, such as a layer) called ``name``;
        they are traced only once. ``needs``: the gradients that backward computes.
        """
        with one_thread:
            key = name, needs
            if key not in self._derivatives:
                make, shared = partial(self._differentiate, name, needs), self._shared
                self._derivatives[key] = make() if shared is None else shared.get(self._describe(name, needs), make)
            return self._derivatives[key]

    def _describe(self, name: str, needs: GradientNeeds) -> tuple[Any, ...]:
        """Return the key under which the forward and backward graphs of the block (such as a layer) called ``name`` are
        stored: a tuple of everything on which they depend. ``needs``: the gradients that backward computes.
        """
        block = self.program.blocks[name]
        again = tuple(block.again) if needs.selective else ()
        graph = json.dumps(block.nodes), tuple(block.states), tuple(block.inputs), again, tuple(block.pieces)
        version = _FORMAT, torch.__version__, torch.version.git_version, _hash_passes()
        return name, needs, graph, str(self.device), *version

    def _differentiate(self, name: str, needs: GradientNeeds) -> BlockDerivatives:
        """Trace the forward and backward graphs of the block (such as a layer) called ``name``, and return them.
        ``needs``: the gradients that backward computes.
        """
        wanted = needs.inputs, needs.states, needs.outputs
        if self.device.type == "cpu":  # the prover may have traced it
            return differentiate_for_cpu(self.program, name, *wanted, selective=needs.selective)
        graph = self.program.blocks[name]
        again = graph.again if needs.selective else ()
        return overlap_derivatives(differentiate(self.block(name), self.device, *wanted, again), graph.pieces)

    def fused(self, graph: fx.Graph, num_sinks: int, name: str, needs: GradientNeeds | None, kind: str) -> fx.Graph:
        """Return ``graph`` with each group of operators between its collectives replaced by one compiled function;
        ``graph`` itself if compilation is switched off. Each function is compiled once for all calls of a block.
        ``num_sinks``: number of outputs, at the end, that are gradients of parameters. ``name``: name of the block.
        ``needs``: the gradients that its backward computes. ``kind``: which function of the block ``graph`` is, such as
        "forward".
        """
        if self.backend is None:
            return graph
        backend = self.backend

        def made(number: int, module: fx.GraphModule) -> Segment | FixedSegment:
            key = name, needs, kind, number
            if key not in self._segments:
                self._segments[key] = make_segment(f"{name}.{kind}.{number}", module, backend, self.device)
            return self._segments[key]

        with one_thread:
            return fuse_segments(graph, num_sinks, self.device, made)

    def compile_segments(self) -> None:
        """Compile the functions that have been created so far, together with the other processes of this machine.
        Functions of blocks with experts, whose shapes depend on the number of tokens of each expert, are left out; they
        are compiled at their first call.
        """
        if not self._segments:
            return
        routed = {name for name, block in self.program.blocks.items() if _has_routing(block)}
        compile_in_turns([s for key, s in self._segments.items() if key[0] not in routed])


@cache
def _hash_passes() -> str:
    """Return a hash of the source files of the package that differentiates graphs. The hash is part of the key of
    stored graphs, so that graphs of another version of the package are not used.
    """
    files = sorted(Path(passes.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _has_routing(block: BlockGraph) -> bool:
    """Return whether the graph ``block`` sends tokens to experts, so that the number of tokens for each expert depends
    on the data.
    """
    return any(f".{name}." in str(node.get("target")) for node in block.nodes for name in ROUTED)


class CurrentMicrobatch:
    """Holds the index (on this rank, from 0) of the microbatch that runs now, in ``microbatch``. ``data_index()``
    returns the microbatch's index in the global batch, as a tensor; graphs read it by the operator
    ``axis_index("data")``. ``share``: the indices, over the global batch, of this rank's microbatches. ``device``: the
    device of this tensor.
    """

    def __init__(self, share: range, device: torch.device) -> None:
        self.microbatch = 0
        self._indices = [torch.tensor(i, device=device) for i in share]

    def data_index(self) -> Tensor:
        return self._indices[self.microbatch]


class Binder:
    """Compiles the graphs of blocks (pieces of the model, such as layers) to Python functions of one rank, each only
    once. Collectives in the graphs run on the process groups of ``communicator``. ``library``: has the graphs.
    """

    def __init__(self, rank: RankProgram, library: BlockLibrary, communicator: Communicator) -> None:
        self.rank = rank
        self.library = library
        self.communicator = communicator
        self.moment = CurrentMicrobatch(rank.share, library.device)
        self._compiled: dict[tuple[str, GradientNeeds | None, str], CompiledGraph] = {}

    @property
    def compiled(self) -> list[CompiledGraph]:
        return list(self._compiled.values())

    def compile_plain(self, name: str) -> CompiledGraph:
        """Compile the block (a piece of the model, such as a layer) called ``name`` for calls without backward, and
        return the function. The function takes the block's parameters, buffers and inputs, and returns the block's
        outputs.
        """
        block, pieces = self.library.block(name), self.library.program.blocks[name].pieces
        return self._compile_once(
            name, None, "forward", lambda: (_make_results_contiguous(overlap_block(block, pieces).graph), 0)
        )

    def compile_piece(self, name: str, needs: GradientNeeds, kind: str) -> CompiledGraph:
        """Compile one of the functions of the forward and backward of the block (a piece of the model, such as a layer)
        called ``name``. The function does not return gradients of parameters, but adds them to accumulators that it
        gets as arguments. ``needs``: the gradients to compute. ``kind``: ``forward``, ``backward``, ``backward_input``,
        ``backward_weight``, or one half of ``forward``: ``outputs`` or ``saved`` (the tensors that backward needs).
        """
        derived = self.library.differentiated(name, needs)
        return self._compile_once(name, needs, kind, lambda: _PIECES[kind](derived))

    def _compile_once(
        self, name: str, needs: GradientNeeds | None, kind: str, make: Callable[[], tuple[fx.Graph, int]]
    ) -> CompiledGraph:
        """Return the compiled function of a block's graph; compile the graph at the first request. ``name``: the block.
        ``needs``: the gradients that its backward computes. ``kind``: which function of the block it is, such as
        "forward". ``make``: function that returns the graph and the number of its outputs, at the end, that are
        accumulated gradients.
        """
        key = name, needs, kind
        if key not in self._compiled:
            graph, num_sinks = make()
            graph = self.library.fused(graph, num_sinks, name, needs, kind)
            self._compiled[key] = compile_graph(
                graph, f"{name}.{kind}", self._bind_collectives(graph), self.library.device, num_sinks
            )
        return self._compiled[key]

    def _bind_collectives(self, graph: fx.Graph) -> dict[fx.Node, Binding]:
        names = {n: collective_name(n.target) for n in graph.nodes if n.op == "call_function"}
        return {node: self._bind_collective(node, name) for node, name in names.items() if name is not None}

    def _bind_collective(self, node: fx.Node, name: str) -> Binding:
        """Return how a compiled graph runs ``node``, a collective, on this rank: a :class:`Binding`, such as a function
        that starts the collective. ``name``: the collective, such as ``all_gather``.
        """
        if name == "axis_index":
            axis = node.args[0]
            if axis == "data":
                return DirectBinding(self.moment.data_index)
            assert isinstance(axis, str)
            return ConstantBinding(torch.tensor(self.rank.coordinates[axis], device=self.library.device))
        arguments = _ARGUMENTS[name](*node.args[1:])
        group = self.communicator.group(self.rank.group(arguments.pop("axis")))
        if group.size == 1 and name not in ROUTED | CONTEXT:
            return AliasBinding()
        if name in IN_PIECES:
            return _bind_pieces(node, group, **arguments)
        binding = _BINDINGS[name](group, **arguments)
        return _bind_inplace(node, binding) if name in CONTEXT else binding


def _name_arguments(*names: str) -> Callable[..., dict[str, Any]]:
    return lambda *values: dict(zip(names, values, strict=True))


def _name_scored_arguments(*names: str) -> Callable[..., dict[str, Any]]:
    """Return a function that returns its positional arguments as a dict with the keys ``names``, ``reach`` and
    ``trained``. The last two arguments may be left out; their defaults are ``()`` and ``False``.
    """
    every, preset = (*names, "reach", "trained"), ((), False)
    return lambda *values: dict(zip(every, (*values, *preset[len(values) - len(names) :]), strict=True))


_BAND = ("before", "after", "scale", "axis", "size", "zigzag", "algorithm")
_MARKS = ("ids", "prefix", "slopes")
_SCORED = (*_BAND[:3], "cap", *_BAND[3:])

# The arguments after the operand, as passes/ir/collectives.py declares them.
_ARGUMENTS = {
    "all_gather": _name_arguments("dim", "axis", "size", "grad"),
    "shard_slice": _name_arguments("dim", "axis", "size"),
    "shard_narrow": _name_arguments("dim", "axis", "size"),
    "shard_pad": _name_arguments("dim", "axis", "size"),
    "copy": _name_arguments("axis", "size"),
    "reduce_scatter": _name_arguments("dim", "axis", "size"),
    "all_reduce": _name_arguments("axis", "size", "grad"),
    "all_reduce_max": _name_arguments("axis", "size"),
    "all_to_all": _name_arguments("split_dim", "concat_dim", "axis", "size"),
    "gather_products": _name_arguments("weights", "biases", "dim", "axis", "size", "pieces"),
    "products_scatter": _name_arguments("more", "weights", "shape", "dim", "axis", "size", "pieces"),
    "route": _name_arguments("num_experts", "axis", "size"),
    "dispatch": _name_arguments("order", "counts", "experts", "axis", "size"),
    "combine": _name_arguments("order", "counts", "experts", "axis", "size"),
    "context_attention": _name_arguments("k", "v", *_BAND),
    "context_attention_backward": _name_arguments("q", "k", "v", "out", "lse", *_BAND),
    "context_document_attention": _name_arguments("k", "v", "ids", "lengths", *_BAND),
    "context_document_attention_backward": _name_arguments("q", "k", "v", "ids", "out", "lse", *_BAND),
    "context_scored_attention": _name_scored_arguments("k", "v", *_MARKS, "lengths", "ahead", *_SCORED),
    "context_scored_attention_backward": _name_scored_arguments("q", "k", "v", *_MARKS, "out", "lse", *_SCORED),
}


def _bind_all_gather(group: RankGroup, dim: int, **_: Any) -> Binding:
    start = partial(_start_gather, group, dim)
    return AsyncBinding(start, start)


def _start_gather(group: RankGroup, dim: int, x: Tensor) -> Pending:
    return group.all_gather(x, dim % x.dim())


def _bind_reduce_scatter(group: RankGroup, dim: int, **_: Any) -> Binding:
    def start(x: Tensor) -> Pending:
        return group.reduce_scatter(x, dim % x.dim())

    return AsyncBinding(start, partial(_start_and_release_operand, start))


class _OperandReleasingPending:
    """A collective in progress whose operand has no other reader. The operand's memory is freed when the collective has
    ended.
    """

    __slots__ = ("operand", "pending")

    def __init__(self, pending: Pending, operand: Tensor) -> None:
        self.pending, self.operand = pending, operand

    def wait(self) -> Tensor:
        found = self.pending.wait()
        if not share_memory(found, self.operand):
            free_storage(self.operand)
        return found

    def release(self) -> None:
        self.pending.release()


def _start_and_release_operand(start: Callable[[Tensor], Pending], x: Tensor) -> Pending:
    return _OperandReleasingPending(start(x), x)


def _bind_all_reduce(group: RankGroup, **_: Any) -> Binding:
    return _bind_reduction(group, False)


def _reduce_max(group: RankGroup, **_: Any) -> Binding:
    return _bind_reduction(group, True)


def _bind_reduction(group: RankGroup, maximum: bool) -> Binding:
    """Return two functions with which a compiled graph starts an all-reduce over ``group``: one copies its operand
    first, the other overwrites it. If ``maximum`` is true, the all-reduce computes the maximum, otherwise the sum.
    """

    def start(x: Tensor) -> Pending:
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format), maximum)

    def start_in_place(x: Tensor) -> Pending:
        return group.all_reduce(x.contiguous(), maximum)

    return AsyncBinding(start, start_in_place)


def _bind_all_to_all(group: RankGroup, split_dim: int, concat_dim: int, **_: Any) -> Binding:
    def start(x: Tensor) -> Pending:
        return group.all_to_all(x, split_dim % x.dim(), concat_dim % x.dim())

    return AsyncBinding(start, partial(_start_and_release_operand, start))


def _bind_route(group: RankGroup, num_experts: int, **_: Any) -> Binding:
    return DirectBinding(partial(collective_ops.route_rows, group, num_experts))


def _bind_dispatch(group: RankGroup, **_: Any) -> Binding:
    start = partial(collective_ops.dispatch_rows, group)
    return AsyncBinding(start, start)


def _bind_combine(group: RankGroup, **_: Any) -> Binding:
    start = partial(collective_ops.combine_rows, group)
    return AsyncBinding(start, start)


def _bind_attention(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_context_attention(group, before, after, **how).forward)


def _attend_back(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_context_attention(group, before, after, **how).backward)


def _bind_documents(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_document_attention(group, before, after, **how).forward)


def _bind_documents_backward(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_document_attention(group, before, after, **how).backward)


def _make_document_attention(
    group: RankGroup, before: int, after: int, scale: float | None, zigzag: bool, algorithm: str, **_: Any
) -> ContextDocumentAttention:
    return ContextDocumentAttention(group, make_band(before, after), scale, zigzag, algorithm)


def _make_context_attention(
    group: RankGroup, before: int, after: int, scale: float | None, zigzag: bool, algorithm: str, **_: Any
) -> ContextAttention:
    return ContextAttention(group, make_band(before, after), scale, zigzag, algorithm)


def _bind_scored(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_scored_attention(group, make_band(before, after), **how).forward)


def _bind_scored_backward(group: RankGroup, before: int, after: int, **how: Any) -> Binding:
    return DirectBinding(_make_scored_attention(group, make_band(before, after), **how).backward)


def _make_scored_attention(
    group: RankGroup, band: Band, scale: float | None, cap: float | None, reach: Sequence[int], **data: Any
) -> ContextScoredAttention:
    """Return an attention over a sequence that is sharded over ``group``, whose scores are capped or depend on the
    distance, or in which queries of a document see keys of its prefix.

    ``band``: the range of positions, relative to its own, that a query sees. ``scale``, ``cap``: factor and cap of the
    scores. ``reach``: numbers of positions before and after its own within which a query sees keys of the prefix;
    empty: no limits. ``data``: the operator's other arguments by name: ``zigzag``, ``algorithm``, ``trained`` (whether
    the gradient of slopes is computed), and the operands ``ids`` (document of each position), ``prefix`` (flags of keys
    in a prefix) and ``slopes`` (change of a score with the distance). Only whether an operand is ``None`` (absent) is
    used here.
    """
    ids, prefix, slopes = (data[name] is not None for name in _MARKS)
    zigzag, algorithm, trained = data["zigzag"], data["algorithm"], data["trained"]
    given = ids, prefix, slopes
    return ContextScoredAttention(group, band, scale, zigzag, algorithm, cap, given, get_prefix_band(reach), trained)


def _bind_inplace(node: fx.Node, binding: Binding) -> Binding:
    """Return a copy of ``binding``, which has the function that a compiled graph calls for ``node``. The copy passes to
    this function one operand for each tensor argument of ``node``, in order. Without this, a node that occurs twice
    among the arguments would be passed only once.
    """
    assert isinstance(binding, DirectBinding)
    given, function = node.all_input_nodes, binding.function
    places = [given.index(a) for a in node.args if isinstance(a, fx.Node)]
    return DirectBinding(lambda *operands: function(*(operands[i] for i in places)))


def _bind_pieces(node: fx.Node, group: RankGroup, weights: list[fx.Node], dim: int, pieces: int, **how: Any) -> Binding:
    """Return the function with which a compiled graph starts ``node``, an all-gather or reduce-scatter that
    communicates in pieces while it multiplies. The function takes the node's distinct operands. ``group``: the ranks.
    ``weights``: the matrices. ``dim``: the dim along which shards are joined, or along which the sum is cut.
    ``pieces``: the number of pieces. ``how``: the other arguments of the operator by name.
    """
    given = node.all_input_nodes
    place = {operand: i for i, operand in enumerate(given)}
    matrices = [place[w] for w in weights]
    if "biases" in how:
        added = [None if b is None else place[b] for b in how["biases"]]

        def start(*operands: Tensor) -> Any:
            biases = [None if i is None else operands[i] for i in added]
            return GatheredProducts(group, operands[0], [operands[i] for i in matrices], biases, dim, pieces)

    else:
        rows = [place[x] for x in (node.args[0], *how["more"])]
        shape = tuple(how["shape"])

        def start(*operands: Tensor) -> Any:
            factors = [operands[i] for i in rows], [operands[i] for i in matrices]
            return ScatteredProducts(group, *factors, shape, dim, pieces)

    return AsyncBinding(start, start)


def _bind_copy(group: RankGroup, **_: Any) -> Binding:
    return AliasBinding()


def _bind_slice(group: RankGroup, dim: int, **_: Any) -> Binding:
    """Return how a compiled graph runs an operator that takes this rank's equal part of a whole tensor along ``dim``:
    as a function of the operand. ``group``: the ranks among which the tensor is divided. Other arguments of the
    operator are ignored.
    """

    def take(x: Tensor) -> Tensor:
        length = x.shape[dim] // group.size
        return x.narrow(dim, group.index * length, length).contiguous()  # like the node's meta value

    return DirectBinding(take)


def _bind_pad(group: RankGroup, dim: int, **_: Any) -> Binding:
    """Return how a compiled graph runs an operator that puts this rank's part into a tensor of zeros, at the rank's
    position along ``dim``: as a function of the operand. ``group``: the ranks among which the tensor is divided. Other
    arguments of the operator are ignored.
    """

    def pad(x: Tensor) -> Tensor:
        """Return a tensor of zeros in which ``x`` is at this rank's position along ``dim``."""
        shape = list(x.shape)
        shape[dim] *= group.size
        whole = x.new_zeros(shape)
        whole.narrow(dim, group.index * x.shape[dim], x.shape[dim]).copy_(x)
        return whole

    return DirectBinding(pad)


_BINDINGS: dict[str, Callable[..., Binding]] = {
    "all_gather": _bind_all_gather,
    "shard_slice": _bind_slice,
    "shard_narrow": _bind_slice,
    "shard_pad": _bind_pad,
    "copy": _bind_copy,
    "reduce_scatter": _bind_reduce_scatter,
    "all_reduce": _bind_all_reduce,
    "all_reduce_max": _reduce_max,
    "all_to_all": _bind_all_to_all,
    "route": _bind_route,
    "dispatch": _bind_dispatch,
    "combine": _bind_combine,
    "context_attention": _bind_attention,
    "context_attention_backward": _attend_back,
    "context_document_attention": _bind_documents,
    "context_document_attention_backward": _bind_documents_backward,
    "context_scored_attention": _bind_scored,
    "context_scored_attention_backward": _bind_scored_backward,
}
assert _BINDINGS.keys() | IN_PIECES == _ARGUMENTS.keys()


def _make_results_contiguous(graph: fx.Graph) -> fx.Graph:
    """Return a copy of ``graph`` whose results are contiguous tensors; ``graph`` itself if they already are."""
    results: Any = graph.output_node().args[0]
    strided: list[fx.Node] = [n for n in results if not n.meta["val"].is_contiguous()]
    if not strided:
        return graph
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph, env)
    dense = {env[n]: copied.call_function(torch.ops.aten.contiguous.default, (env[n],)) for n in strided}
    for node, made in dense.items():
        made.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    copied.output(tuple(dense.get(env[n], env[n]) for n in results))
    return copied


def _select_whole_piece(piece: JointSubgraph, num_sinks: int = 0) -> tuple[fx.Graph, int]:
    return piece.graph, num_sinks


def _select_outputs(piece: JointSubgraph, start: int, stop: int | None) -> tuple[fx.Graph, int]:
    """Return a graph that computes only the outputs ``[start:stop]`` of ``piece``, a graph of a block's forward or
    backward, and 0, the number of these outputs that are accumulated gradients.
    """
    graph = fx.Graph()
    outputs = graph.graph_copy(piece.graph, {})
    assert isinstance(outputs, tuple)
    graph.output(outputs[start:stop])
    drop_unused(graph)
    return graph, 0


_PIECES: dict[str, Callable[[BlockDerivatives], tuple[fx.Graph, int]]] = {
    "forward": lambda d: _select_whole_piece(d.forward),
    "outputs": lambda d: _select_outputs(d.forward, 0, d.num_outputs),
    "saved": lambda d: _select_outputs(d.forward, d.num_outputs, None),
    "backward": lambda d: _select_whole_piece(d.backward, len(d.grad_states)),
    "backward_input": lambda d: _select_whole_piece(d.backward_input),
    "backward_weight": lambda d: _select_whole_piece(d.backward_weight, len(d.grad_states)),
}
