"""Data types of a folded model: blocks, calls of blocks, states, inputs and outputs.

A block is a piece of the model, such as a decoder layer, with one graph. A call runs a block with its own parameters
and inputs, so that equal layers are one block with many calls. Every pass keeps these invariants
(``passes/ir/verify.py`` checks them):

* The graph of a block is functional. It has placeholders (states, that is, parameters, buffers and constants, then
  inputs, in the order of ``states`` and ``inputs``), ``call_function`` nodes on ``OpOverload``s, ``operator.getitem``
  for operators with several results, and one output node whose argument is a tuple of nodes.
* Every node that carries a tensor has ``node.meta["val"]``: a tensor on ``meta`` (a tuple of them for several results).
* Calls are in execution order: a call reads only inputs of the model and outputs of earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partitioner.passes.ir.hashing import hashed_once
from partitioner.passes.ir.lifted_numbers import Guard

StateKind = Literal["parameter", "buffer", "constant"]


@hashed_once
@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """Return a meta tensor with this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class ModelState:
    """A parameter, buffer or constant that the model owns.

    ``name``: the qualified name, the first if there are several. ``spec``: shape and dtype. ``kind``: parameter, buffer
    or constant. ``aliases``: the other names of the same tensor (tied weights). ``parts``: the names of the model's own
    parameters that this state stacks along dim 0; empty if the state is not a stack. ``requires_grad``: whether the
    state is trained.
    """

    name: str
    spec: TensorSpec
    kind: StateKind
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelInput:
    """One input tensor of the model, for the global batch.

    ``value``: its name in the graph. ``path``: its position in the arguments of the model, such as ``input_ids``, ``0``
    or ``past.0.key``. ``spec``: shape and dtype. ``number``: if the input is a Python number, its type, and the graph
    reads the number as a 0-dimensional tensor; ``None`` if the input is a tensor.
    """

    value: str
    path: str
    spec: TensorSpec
    number: Literal["int", "float"] | None = None


Plain = bool | int | float | str | None  # values of arguments that are not tensors


@dataclass(frozen=True)
class Argument:
    """An argument of the model's ``forward``.

    ``name``: its name. ``required``: whether it has no default. ``plain``: whether its default is a value that a plan
    file can store, such as a number or a text. ``default``: the default if it is ``plain``.
    """

    name: str
    default: Plain = None
    required: bool = False
    plain: bool = True


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a model's ``forward``, and the values and conditions that a plan assumes.

    ``arguments``: the arguments of ``forward``, in order; ``None`` if unknown (an exported program). ``fixed``: the
    value of every leaf of the planned batch that is not a tensor, by path such as ``options.scale``; the plan is valid
    for these values only. ``guards``: conditions on numbers of the batch that the traced forward branched on; the plan
    is valid only if they hold.
    """

    arguments: tuple[Argument, ...] | None = None
    fixed: Mapping[str, Plain] = field(default_factory=dict[str, Plain])
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class ModelOutput:
    """One leaf of the model's result, which is a pytree: the name of a value, or a constant.

    ``path``: the position of the leaf in the result, such as ``logits`` or ``past.0.key``. ``value``: the name of the
    value in the graph; ``None`` if the leaf is a constant. ``constant``: the constant, such as ``None`` or a number.
    """

    path: str
    value: str | None
    constant: Any = None


@dataclass
class Block:
    """A piece of the model, such as a decoder layer, with one functional graph that one or more calls execute.

    ``name``: the name by which calls refer to the block. ``graph``: the graph. ``states``: the names of the
    placeholders of parameters, buffers and constants, in order. ``inputs``: the names of the placeholders of other
    values, which follow.
    """

    name: str
    graph: fx.Graph
    states: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        output: Any = self.graph.output_node()
        return tuple(output.args[0])

    def copy(self) -> Block:
        """Return a copy of this block with a copy of its graph."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        return replace(self, graph=graph)

    def node(self, name: str) -> fx.Node:
        """Return the node of this block's graph that has the name ``name``."""
        found: fx.Node = next(n for n in self.graph.nodes if n.name == name)
        return found


@dataclass(frozen=True)
class Call:
    """One execution of a block, the graph of a piece of the model such as a layer.

    ``block``: the block's name. ``path``: the path of the module that the call runs. ``states``: the names of the
    parameters and buffers that the call reads. ``inputs``: the names of the other values that it reads. ``outputs``:
    the names of the values that it produces. ``shared``: if true, the call is a cheap function of the model's inputs
    and constants and needs no gradient; each pipeline stage that reads its outputs computes them itself. ``prologue``:
    if true, the call is executed on every microbatch before the pipeline starts; its outputs are summed over all
    microbatches and data-parallel ranks, and every later call reads the sums.
    """

    block: str
    path: str
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared: bool = False
    prologue: bool = False


@dataclass
class FoldedModel:
    """A whole model as a sequence of calls of blocks; a block is the graph of a piece of the model, such as a layer.

    ``blocks``: the blocks by name. ``calls``: the calls in execution order. ``inputs`` and ``outputs``: inputs and
    outputs of the whole model. ``signature``: the arguments of ``forward``. ``values``: name of a model input or call
    output -> its shape and dtype. ``loss``: the name of the loss value, or ``None``. A state is a parameter, buffer or
    constant; ``states`` and ``constants`` (values of constants) are keyed by state name. ``tree``: the pytree structure
    of the model's result as text; ``None`` if it cannot be written as text. ``notes``: messages for the user.
    ``updates``: buffer -> name of the value that it has after a step. ``keeps``: buffer -> ``f``, for buffers whose new
    value is ``f`` times the old one plus terms that are summed over microbatches. ``initial``: buffer -> its value
    before the first step, as a number if all elements are equal, otherwise as nested lists.
    """

    blocks: dict[str, Block]
    calls: list[Call]
    states: dict[str, ModelState]
    inputs: list[ModelInput]
    outputs: list[ModelOutput]
    loss: str | None
    values: dict[str, TensorSpec]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    tree: str | None = None  # the result's pytree, as torch.utils._pytree.treespec_dumps writes it
    notes: tuple[str, ...] = ()  # messages for the user, such as that caches were dropped
    updates: dict[str, str] = field(default_factory=dict)  # buffer -> name of the value that it has after a step
    # buffer -> the factor of its old value, for updates that are summed over microbatches and data-parallel ranks
    keeps: dict[str, float] = field(default_factory=dict)
    initial: dict[str, Any] = field(default_factory=dict)  # buffer -> its initial value: a number, or nested lists
    signature: CallSignature = field(default_factory=CallSignature)

    def with_(self, **changes: Any) -> FoldedModel:
        return replace(self, **changes)

    def num_calls(self, block: str) -> int:
        return sum(call.block == block for call in self.calls)


@dataclass
class Captured:
    """A whole model as one graph, before equal layers are folded into blocks.

    ``graph``: the graph. A state is a parameter, buffer or constant. ``states``: the states by name. ``inputs``: the
    inputs of forward. ``outputs``, ``loss`` and ``updates`` (new values of buffers that forward changes) refer to nodes
    of the graph by name; ``loss`` is ``None`` if there is no loss. ``placeholders``: name of a placeholder -> name of
    its state or input. ``constants``: values of the constants, by state name. ``tree``: the pytree structure of the
    model's result as text; ``None`` if it cannot be written as text. ``notes``: messages for the user. ``classes``:
    module path -> class name. ``keeps``: buffer -> ``f``, for buffers whose new value is ``f`` times the old one plus
    terms that are summed over microbatches. ``signature``: the arguments of forward. ``turns``: further captures of the
    same model, in pairs. In the first of a pair, the row masks of every second expert are zeros, as if no row (token)
    had chosen it. In the second, the loop iterations of these experts are left out. If both captures of a pair compute
    the same, a loop over the chosen experts may run over all experts.
    """

    graph: fx.Graph
    states: dict[str, ModelState]
    placeholders: dict[str, str]  # placeholder -> state or input value
    inputs: list[ModelInput]
    outputs: list[ModelOutput]
    loss: str | None
    constants: dict[str, Tensor] = field(default_factory=dict)
    tree: str | None = None
    notes: tuple[str, ...] = ()
    classes: dict[str, str] = field(default_factory=dict)  # module path -> class name
    updates: dict[str, str] = field(default_factory=dict)  # state -> name of the node with its value after forward
    keeps: dict[str, float] = field(default_factory=dict)  # see FoldedModel.keeps
    signature: CallSignature = field(default_factory=CallSignature)
    turns: tuple[Captured, ...] = ()  # pairs of further captures, which passes/experts/traced_loops.py compares

    def with_(self, **changes: Any) -> Captured:
        return replace(self, **changes)


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return a list of (path, leaf) for the leaves of the pytree ``tree``, in the order of ``pytree.tree_leaves``. A
    path is a text such as ``logits``, ``0`` or ``past.0.key``: the keys and indices that lead to the leaf, joined by
    dots.

    If a container's class is registered with pytree without names for its entries, the entries of a mapping are named
    by their keys, and those of any other container by their indices.
    """
    return list(_walk_leaves((), tree))


def _walk_leaves(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf of the pytree ``tree``. A yielded path is a text such as ``past.0.key``.
    ``path``: the keys and indices that lead to ``tree`` in the pytree that contains it, with which yielded paths begin.
    """
    if pytree.tree_is_leaf(tree):
        yield ".".join(map(str, path)), tree
        return
    node = pytree.SUPPORTED_NODES[pytree._get_node_type(tree)]
    if node.flatten_with_keys_fn is not None:
        named = [(_get_path_key(key), child) for key, child in node.flatten_with_keys_fn(tree)[0]]
    else:
        children = list(node.flatten_fn(tree)[0])
        keys = list(tree) if isinstance(tree, Mapping) and len(tree) == len(children) else range(len(children))
        named = list(zip(keys, children, strict=True))
    for key, child in named:
        yield from _walk_leaves((*path, key), child)


def _get_path_key(key: Any) -> Any:
    """Return the key, index or attribute name of an entry of a pytree container. ``key``: torch's key object for the
    entry, such as a ``SequenceKey``.
    """
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key
