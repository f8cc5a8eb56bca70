"""Derive facts about the calls of a program from their graphs: gradients, collectives and bytes saved for backward.

A call is one execution of a block (a repeated piece of the model, such as a layer) on a pipeline stage. The prover and
the simulator share these facts. A block is parsed and differentiated once for all calls that run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from partitioner.passes.experts.sorted_rows import keep_rows_sorted
from partitioner.passes.ir.gradient_flow import GradientFlow, accumulated_in, compute_gradient_flow, find_gradient_paths
from partitioner.passes.ir.hashing import SameObject
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ir.serialize import GraphFormatError, block_from_data, dtype_of
from partitioner.passes.ir.verify import GraphError, check_block
from partitioner.passes.padding.resize import JointShapes
from partitioner.passes.shard.differentiate import (
    BlockDerivatives,
    CollectiveUse,
    JointGraph,
    build_joint_graph,
    list_collectives,
)
from partitioner.passes.shard.overlap_products import overlap_block, overlap_derivatives
from partitioner.passes.shard.piece_counts import PieceCounts
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.codecs import wire_share
from partitioner.runtime.program.instructions import Forms, Instruction, Listing
from partitioner.runtime.program.program import CallData, Program, Value, keep_first_microbatches
from partitioner.runtime.program.state_bytes import StateSizes, list_staying_values, state_sizes

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class CallFacts:
    """Gradients, collectives and memory of one call of a block (a piece of the model) on one pipeline stage. ``data``:
    the call, with the names of the tensors that it reads and computes.

    ``takes``: names of the outputs whose gradients the call's backward reads. ``gives`` and ``adds``: names of the
    inputs and of the parameters to whose gradients its backward adds. ``forward``, ``backward``, ``input_backward``,
    ``weight_backward``: the collectives, in execution order, in the graphs of the call's forward, its backward, and the
    two halves of its backward.

    ``keeps``: names of the inputs and outputs that are saved for backward. ``kept_bytes``: bytes of all other saved
    tensors. ``moves``: the part of ``keeps`` that offloading moves to host memory, because no other call of the stage
    reads it.

    ``recomputed``: whether backward recomputes the whole call. ``selective``: whether backward recomputes only cheap
    nodes. ``recomputed_bytes``: bytes of the recomputed tensors, held while backward runs. ``carries`` and
    ``carried_bytes``: names of the inputs and outputs, and bytes of other tensors, held between the input half of the
    backward (I) and the weight half (W).
    """

    data: CallData
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    adds: tuple[str, ...]
    forward: tuple[CollectiveUse, ...]
    backward: tuple[CollectiveUse, ...] = ()
    input_backward: tuple[CollectiveUse, ...] = ()
    weight_backward: tuple[CollectiveUse, ...] = ()
    keeps: tuple[str, ...] = ()
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed: bool = False
    selective: bool = False
    carries: tuple[str, ...] = ()
    carried_bytes: int = 0
    moves: tuple[str, ...] = ()

    @property
    def has_backward(self) -> bool:
        return bool(self.gives or self.adds)

    def collectives(self, op: str) -> tuple[CollectiveUse, ...]:
        """Return the collectives, in execution order, that this call runs in an instruction of kind ``op``. B and I
        include the forward collectives if backward recomputes the call. ``op``: "F" forward, "B" backward, "I" the half
        of the backward for inputs, "W" its half for weights.
        """
        again = self.forward if self.recomputed else ()
        parts = {
            "F": self.forward,
            "B": (*again, *self.backward),
            "I": (*again, *self.input_backward),
            "W": self.weight_backward,
        }
        return parts[op]


class ProgramFacts:
    """Gradients, collectives and memory of each block call of a program, derived from its graphs on first access. A
    call is one execution of a block (a piece of the model, such as a layer) on a pipeline stage.

    The names and shapes of the program must already be consistent (``runtime/prove/structure.py`` checks this).
    ``passes_over``: whether the facts are for ranks that have fewer microbatches than others, and so skip instructions.
    """

    def __init__(self, program: Program, passes_over: bool = False) -> None:
        self.program = program
        self.passes_over = passes_over  # the rank has fewer microbatches than others, whose collectives it joins
        self._sizes: dict[str, StateSizes] = {}
        self._extended: dict[int, ProgramFacts] = {}  # by the number of steps
        self._derivatives: dict[object, BlockDerivatives] = {}  # of equal calls
        self._collectives: dict[SameObject[Graph], tuple[CollectiveUse, ...]] = {}
        self._forms: dict[int, Forms] = {}  # of the instructions of each stage, by its index

    def forms(self, stage: int, instructions: Iterable[Instruction] | None = None) -> Forms:
        """Return the distinct instructions, up to the microbatch number, of a list of the pipeline stage ``stage`` (an
        index). If ``instructions`` is ``None``, the list is that of the whole stage, and the result is cached;
        otherwise the list is ``instructions``.
        """
        own = self.program.stages[stage].instructions
        if instructions is not None and instructions is not own:
            return Forms.of(instructions)
        if stage not in self._forms:
            self._forms[stage] = Forms.of(own)
        return self._forms[stage]

    def extend(self, steps: int) -> ProgramFacts:
        """Return the facts (gradients, collectives and memory of all block calls, such as layers) of the same program
        for another number of microbatches; cached. The instruction list of each pipeline stage must be a
        :class:`Listing`, a compact list.

        ``steps``: how often the shortest form of each list is extended. Each extension adds ``Listing.unit``
        microbatches. The result's ``program.num_microbatches`` is the new number.
        """
        if steps not in self._extended:
            self._extended[steps] = self._extend(steps)
        return self._extended[steps]

    def _extend(self, steps: int) -> ProgramFacts:
        stages, microbatches = [], self.program.num_microbatches
        for stage in self.program.stages:
            instructions = stage.instructions
            assert isinstance(instructions, Listing), "a list that does not grow"
            microbatches = self.program.num_microbatches - (instructions.steps - steps) * instructions.unit
            stages.append(stage.model_copy(update={"instructions": instructions.extend(steps)}))
        return self._copy_with_changes(stages=tuple(stages), num_microbatches=microbatches)

    def restrict_to_share(self, num_microbatches: int) -> ProgramFacts:
        """Return the facts (gradients, collectives and memory of all block calls, such as layers) for ranks that run
        only the first ``num_microbatches`` microbatches.
        """
        if num_microbatches == self.program.num_microbatches:
            return self
        return self._copy_with_changes(
            passes_over=True,
            stages=tuple(
                stage.model_copy(
                    update={"instructions": keep_first_microbatches(stage.instructions, self.program, num_microbatches)}
                )
                for stage in self.program.stages
            ),
            num_microbatches=num_microbatches,
            data_shares=(),
        )

    def _copy_with_changes(self, passes_over: bool = False, **changed: Any) -> ProgramFacts:
        facts = ProgramFacts(self.program.model_copy(update=changed), passes_over)
        names = "blocks", "order", "trainable", "flow", "stages", "with_gradient", "states_by_stage", "value_sizes"
        known = {name: getattr(self, name) for name in (*names, "_sizes")}
        facts.__dict__.update(known)  # calls do the same in every microbatch
        return facts

    @cached_property
    def blocks(self) -> dict[str, Block]:
        return {name: load_block(self.program, name) for name in self.program.blocks}

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """Return all block calls (executions of blocks, such as layers) as pairs (stage index, position on the stage),
        sorted so that each follows the calls whose outputs it reads. A call is left out if one of its inputs is neither
        a batch input nor the output of a call in the result.
        """
        made = {i.value for i in self.program.inputs}
        pending = [(s, p) for s, stage in enumerate(self.program.stages) for p in range(len(stage.calls))]
        order: list[tuple[int, int]] = []
        while pending:
            later = []
            for place in pending:
                call = self.call(place)
                if made.issuperset(call.inputs):
                    order.append(place)
                    made.update(call.outputs)
                else:
                    later.append(place)
            if len(later) == len(pending):
                break
            pending = later
        return order

    def call(self, place: tuple[int, int]) -> CallData:
        return self.program.stages[place[0]].calls[place[1]]

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that require a gradient; empty if the program is for inference."""
        if self.program.objective != "train":
            return frozenset()
        states = self.program.states.items()
        return frozenset(n for n, s in states if s.kind == "parameter" and s.requires_grad)

    @cached_property
    def flow(self) -> GradientFlow:
        """Return which tensors and parameters of the program get a gradient. Per-call results are in the order of
        :attr:`order`: for each call of a block, its inputs and parameters that get a gradient.
        """
        paths = {name: find_gradient_paths(block) for name, block in self.blocks.items()}
        return compute_gradient_flow([self.call(p) for p in self.order], paths, self.trainable, self.program.loss)

    @cached_property
    def stages(self) -> tuple[tuple[CallFacts, ...], ...]:
        facts = {place: self._derive_call_facts(place, i) for i, place in enumerate(self.order)}
        return tuple(tuple(facts[s, p] for p in range(len(stage.calls))) for s, stage in enumerate(self.program.stages))

    @cached_property
    def states_by_stage(self) -> tuple[tuple[str, ...], ...]:
        """Return, for each pipeline stage, the names of the parameters, buffers and constants that are on it."""
        found: tuple[list[str], ...] = tuple([] for _ in self.program.stages)
        for name, state in self.program.states.items():
            for stage in set(state.stages).intersection(range(len(found))):
                found[stage].append(name)
        return tuple(map(tuple, found))

    @cached_property
    def reading_stages(self) -> dict[str, set[int]]:
        """Return the indices of the pipeline stages whose block calls (such as layers) read each parameter, buffer or
        constant, as a dict by name. Those that no call reads are left out.
        """
        found: dict[str, set[int]] = {}
        for s, stage in enumerate(self.program.stages):
            for name in {name for call in stage.calls for name in call.states}:
                found.setdefault(name, set()).add(s)
        return found

    @cached_property
    def grows(self) -> bool:
        """Return whether :meth:`extend` can be called: the instruction list of each pipeline stage is a
        :class:`Listing`.
        """
        return all(isinstance(stage.instructions, Listing) for stage in self.program.stages)

    @cached_property
    def value_sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor that passes between block calls (such as layers), as a dict by name."""
        return {name: value_bytes(value) for name, value in self.program.values.items()}

    @cached_property
    def _staying_values(self) -> tuple[frozenset[str], ...]:
        """Return, for each pipeline stage, the names of the tensors that stay on the device when activations are
        offloaded to host memory.
        """
        return tuple(map(list_staying_values, self.program.stages))

    @cached_property
    def with_gradient(self) -> frozenset[str]:
        """Return the names of the parameters to whose gradient the backward of at least one block call (such as a
        layer) adds.
        """
        return frozenset(s for added in self.flow.states for s in added)

    def state_bytes(self, name: str) -> int:
        """Return the bytes of one rank's shard (over ``ep`` and ``tp``) of the parameter or buffer ``name``, before
        ZeRO divides the shard.
        """
        return self._get_sizes(name).part

    def gradient_bytes(self, name: str) -> int:
        """Return the bytes of the gradient of one rank's shard (over ``ep`` and ``tp``) of the parameter ``name``,
        before ZeRO divides the gradient.
        """
        return self._get_sizes(name).gradient

    def piece_bytes(self, name: str) -> int:
        """Return the bytes, with padding, of the piece of the parameter or buffer ``name`` that ZeRO leaves on one
        rank. Without ZeRO this is the rank's whole shard.
        """
        return self._get_sizes(name).piece

    def gradient_piece_bytes(self, name: str) -> int:
        """Return the bytes, with padding, of the gradient of the piece of the parameter ``name`` that ZeRO leaves on
        one rank. Without ZeRO this is the gradient of the rank's whole shard.
        """
        return self._get_sizes(name).gradient_piece

    def bucket_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the gradients of ``bucket`` (parameters whose gradients are reduced together) on one
        rank. With ZeRO, these are the rank's pieces of the flattened gradients; otherwise its shards over ``ep`` and
        ``tp``.
        """
        return sum(map(self.gradient_piece_bytes, bucket.states))

    def wire_share(self, bucket: Bucket) -> float:
        """Return the bytes sent per byte of the gradients of ``bucket`` (parameters whose gradients are reduced
        together): below 1 if the gradients are compressed, otherwise 1.
        """
        if bucket.compression is None:
            return 1.0
        dtype = accumulated_in(dtype_of(self.program.states[bucket.states[0]].dtype))
        return wire_share(bucket.compression, dtype.itemsize)

    def _get_sizes(self, name: str) -> StateSizes:
        if name not in self._sizes:
            self._sizes[name] = state_sizes(self.program, name)
        return self._sizes[name]

    def moved_bytes(self, call: CallFacts) -> int:
        """Return the bytes that offloading of activations moves to host memory for ``call``, one execution of a block
        on one microbatch: the tensors saved for backward, except those that other calls of the stage read too. 0 if the
        call has no backward.
        """
        values = self.program.values
        return call.kept_bytes + sum(value_bytes(values[v]) for v in call.moves) if call.has_backward else 0

    def needs(self, call: CallData) -> tuple[Flags, Flags, Flags]:
        """Return three tuples of flags for ``call``, an execution of a block: whether each input gets a gradient,
        whether each parameter or buffer requires one, and whether each output gets one.
        """
        return (
            tuple(v in self.flow.values for v in call.inputs),
            tuple(s in self.trainable for s in call.states),
            tuple(v in self.flow.values for v in call.outputs),
        )

    def differentiated(self, call: CallData, selective: bool = False) -> BlockDerivatives:
        """Return the forward and backward graphs of ``call``, an execution of a block (a piece of the model), for
        analysis. ``selective``: whether backward recomputes the nodes that the block lists as cheap."""
        needs, fused = self.needs(call), self.program.fused_attention
        key = call.block, needs, selective
        if key not in self._derivatives:
            self._derivatives[key] = differentiate_for_cpu(
                self.program, call.block, *needs, selective=selective, fused=fused, for_analysis=True
            )
        return self._derivatives[key]

    def _list_collectives(self, graph: Graph) -> tuple[CollectiveUse, ...]:
        """Return the collectives of ``graph`` in execution order; cached by the identity of the graph."""
        key = SameObject(graph)
        if key not in self._collectives:
            self._collectives[key] = tuple(list_collectives(graph))
        return self._collectives[key]

    def _derive_call_facts(self, place: tuple[int, int], index: int) -> CallFacts:
        """Return gradients, collectives and memory of one call of a block (a piece of the model, such as a layer).
        ``place``: a pair (index of its pipeline stage, position of the call on the stage).

        ``index``: position of the call in :attr:`order`, which indexes the tuples of :attr:`flow`.
        """
        call = self.call(place)
        gives, adds = self.flow.inputs[index], self.flow.states[index]
        if not (gives or adds):
            block = overlap_block(self.blocks[call.block], self.program.blocks[call.block].pieces)
            forward = tuple(list_collectives(block.graph))
            return CallFacts(call, (), (), (), forward)
        stage = self.program.stages[place[0]]
        recomputed, selective = place[1] in stage.checkpoint_calls, place[1] in stage.selective_calls
        pieces = self.differentiated(call, selective)
        keeps, kept_bytes = _list_saved_tensors(self.blocks[call.block], call, pieces)
        keeps = call.inputs if recomputed else keeps
        staying = self._staying_values[place[0]]
        made = (
            _list_saved_tensors(self.blocks[call.block], call, self.differentiated(call))[1] - kept_bytes
            if selective
            else 0
        )
        carries, carried_bytes = _list_carried_tensors(self.blocks[call.block], call, pieces)
        return CallFacts(
            data=call,
            takes=tuple(v for v in call.outputs if v in self.flow.values),
            gives=gives,
            adds=adds,
            forward=self._list_collectives(pieces.forward.graph),
            backward=self._list_collectives(pieces.backward.graph),
            input_backward=self._list_collectives(pieces.backward_input.graph),
            weight_backward=self._list_collectives(pieces.backward_weight.graph),
            keeps=keeps,
            moves=tuple(v for v in keeps if v not in staying),
            kept_bytes=0 if recomputed else kept_bytes,
            recomputed_bytes=kept_bytes if recomputed else max(0, made),
            recomputed=recomputed,
            selective=selective,
            carries=carries,
            carried_bytes=carried_bytes,
        )


def _list_saved_tensors(block: Block, call: CallData, pieces: BlockDerivatives) -> tuple[tuple[str, ...], int]:
    """Return two values for one execution of a block: the names of its inputs and outputs that are saved for backward,
    and the bytes of all other saved tensors except parameters and buffers. ``call``: the execution, with the names of
    its inputs and outputs. ``pieces``: the forward and backward graphs of ``block``.
    """
    return _measure_saved_memory(block, call, pieces, _list_forward_results(pieces)[pieces.num_outputs :])


def _list_carried_tensors(block: Block, call: CallData, pieces: BlockDerivatives) -> tuple[tuple[str, ...], int]:
    """Return what the weight half of the backward of one execution of a block reads: the names of inputs and outputs of
    the execution, and the bytes of other tensors except parameters and buffers. ``call``: the execution, with the names
    of its inputs and outputs. ``pieces``: the forward and backward graphs of ``block``.
    """
    return _measure_saved_memory(block, call, pieces, pieces.backward_weight.graph.find_nodes(op="placeholder"))


def _measure_saved_memory(
    block: Block, call: CallData, pieces: BlockDerivatives, nodes: Iterable[Node]
) -> tuple[tuple[str, ...], int]:
    """Return two values for one execution of a block: the names of its inputs and outputs that are among ``nodes``, and
    the bytes of the storages of the other nodes except parameters and buffers. A view counts as the tensor whose
    storage it shares. ``call``: the execution, with the names of its inputs and outputs. ``pieces``: the forward and
    backward graphs of ``block``, to which the nodes belong.
    """
    placeholders = pieces.forward.graph.find_nodes(op="placeholder")
    given = [*placeholders[len(block.states) :], *_list_forward_results(pieces)[: pieces.num_outputs]]
    named = {_identify_storage(node): value for node, value in zip(given, (*call.inputs, *call.outputs), strict=True)}
    held = {_identify_storage(node) for node in placeholders[: len(block.states)]}
    found = {_identify_storage(node): node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor)}
    values = tuple(dict.fromkeys(named[s] for s in found if s in named))
    return values, sum(v.untyped_storage().nbytes() for s, v in found.items() if s not in named and s not in held)


def _list_forward_results(pieces: BlockDerivatives) -> tuple[Node, ...]:
    """Return the result nodes of the forward graph in ``pieces``, the forward and backward graphs of a block: first the
    block's outputs, then the tensors saved for backward.
    """
    return cast(tuple[Node, ...], pieces.forward.graph.output_node().args[0])


def _identify_storage(node: Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else -id(node)


def load_block(program: Program, name: str) -> Block:
    """Parse the graph of the block (a piece of the model) called ``name`` in ``program``, and return the block with its
    FX graph; cached. Raise ``GraphFormatError`` if the graph data are malformed.
    """
    graph = program.blocks[name]
    return _parse_block(_nodes_to_key(graph.nodes), name, graph.states, graph.inputs)


def differentiate_for_cpu(
    program: Program, name: str, *needs: Flags, selective: bool = False, fused: bool = False, for_analysis: bool = False
) -> BlockDerivatives:
    """Return the forward and backward graphs of a block (a piece of the model), traced with the operators of a CPU. The
    result is cached for the process and must not be modified.

    Args:
        program: the program of all ranks.
        name: the block's name.
        needs: three tuples of flags: which inputs need a gradient, which parameters and buffers need one, and which
            outputs have one.
        selective: whether backward recomputes the nodes that the block lists as cheap.
        fused: whether attention is traced as a fused kernel, as accelerators run it.
        for_analysis: whether the graphs are only analysed, never executed. They may then be derived from graphs of two
            blocks that differ from this one only in sizes, which is faster than tracing.
    """
    graph = program.blocks[name]
    again = graph.again if selective else ()
    return _differentiate_block(
        _nodes_to_key(graph.nodes),
        name,
        graph.states,
        graph.inputs,
        again,
        graph.pieces,
        (fused, for_analysis),
        *needs,
    )


def find_graph_fault(program: Program, name: str, axes: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the first error in the graph of the block ``name`` (a piece of the model) of ``program`` as a pair
    (message, node name), or ``None`` if the graph is valid. ``axes``: mesh axis -> number of ranks.
    """
    graph = program.blocks[name]
    return _find_block_fault(_nodes_to_key(graph.nodes), name, graph.states, graph.inputs, tuple(axes.items()))


def value_bytes(value: Value) -> int:
    return TensorSpec(value.shape, dtype_of(value.dtype)).nbytes


def _nodes_to_key(nodes: Sequence[object]) -> str:
    return json.dumps(nodes)


@lru_cache(maxsize=256)
def _parse_block(nodes: str, name: str, states: tuple[str, ...], inputs: tuple[str, ...]) -> Block:
    return block_from_data(name, tuple(json.loads(nodes)), states, inputs)


@lru_cache(maxsize=256)
def _find_block_fault(
    nodes: str, name: str, states: tuple[str, ...], inputs: tuple[str, ...], axes: tuple[tuple[str, int], ...]
) -> tuple[str, str] | None:
    """Return the first error in the graph of a block (a piece of the model) as a pair (message, node name), or ``None``
    if it has none; cached for equal arguments. ``nodes``: the graph's nodes as JSON text. ``name``: the block's name,
    for the message. ``states``, ``inputs``: names of the placeholders for parameters and buffers, and for inputs.
    ``axes``: pairs (mesh axis, number of ranks).
    """
    try:
        check_block(_parse_block(nodes, name, states, inputs), dict(axes))
    except (GraphError, GraphFormatError) as error:
        return str(error), getattr(error, "node", "")
    return None


@lru_cache(maxsize=256)
def _differentiate_block(
    nodes: str,
    name: str,
    states: tuple[str, ...],
    inputs: tuple[str, ...],
    again: tuple[str, ...],
    pieces: PieceCounts,
    how: tuple[bool, bool],
    *needs: Flags,
) -> BlockDerivatives:
    """Return the forward and backward graphs of a block (a piece of the model); cached for equal arguments. ``nodes``:
    the graph's nodes as JSON text. ``name``: the block's name. ``states``, ``inputs``: names of the placeholders for
    parameters and buffers, and for inputs. ``again``: names of the nodes that backward recomputes. ``pieces``: numbers
    of pieces into which collectives are cut, to overlap with matrix products. ``how``: a pair of flags: whether
    attention is traced as a fused kernel, and whether the graphs are only analysed, never executed. ``needs``: three
    tuples of flags: which inputs need a gradient, which states need one, and which outputs have one.
    """
    fused, for_analysis = how
    find = _derive_joint_graph if for_analysis else _trace_joint_graph
    return overlap_derivatives(find(nodes, name, states, inputs, fused, *needs).cut(again), pieces)


_JOINT_SHAPES = JointShapes()


@lru_cache(maxsize=256)
def _derive_joint_graph(
    nodes: str, name: str, states: tuple[str, ...], inputs: tuple[str, ...], fused: bool, *needs: Flags
) -> JointGraph:
    """Return the joint graph of the forward and backward of a block (a piece of the model) for analysis; it must not be
    executed. If the same block was traced before with smaller and with larger sizes, the graph is derived from those
    two, which is faster; otherwise it is traced. ``nodes``: the graph's nodes as JSON text. ``name``: the block's name.
    ``states``, ``inputs``: names of the placeholders for parameters and buffers, and for inputs. ``fused``: whether
    attention is traced as a fused kernel. ``needs``: three tuples of flags: which inputs need a gradient, which states
    need one, and which outputs have one.
    """
    given = nodes, name, states, inputs
    return _JOINT_SHAPES.find(
        nodes,
        (name, states, inputs, fused, *needs),
        partial(_trace_joint_graph, *given, fused, *needs),
        lambda: keep_rows_sorted(_parse_block(*given)),
    )


@lru_cache(maxsize=256)
def _trace_joint_graph(
    nodes: str, name: str, states: tuple[str, ...], inputs: tuple[str, ...], fused: bool, *needs: Flags
) -> JointGraph:
    """Trace the joint graph of the forward and backward of a block (a piece of the model), which can be split with or
    without recomputation, and return it; cached for equal arguments. ``nodes``: the graph's nodes as JSON text.
    ``name``: the block's name. ``states``, ``inputs``: names of the placeholders for parameters and buffers, and for
    inputs. ``fused``: whether attention is traced as a fused kernel. ``needs``: three tuples of flags: which inputs
    need a gradient, which states need one, and which outputs have one.
    """
    return build_joint_graph(_parse_block(nodes, name, states, inputs), torch.device("cpu"), *needs, fused=fused)
