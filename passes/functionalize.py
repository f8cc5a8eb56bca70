"""From an exported program to one flat graph of pure operators.

Requires: an ``ExportedProgram``. Provides: a graph without sub-graphs (regions without gradients become explicit
``detach`` operators on what enters them), without assertions, without in-place operators, on ``meta``; every operator has
``val``, ``path``, ``source`` and ``stack`` (the module calls around it, outermost first, ``layers.0@1`` for the second).
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from passes.errors import UnsupportedError
from passes.export import source_of
from passes.infer import META

aten = torch.ops.aten
_CHECKS = ("_assert", "sym_constrain", "_check", "_functional_assert")
# In-place by schema, but on tensors that were made for the purpose.
_PURE = {aten.detach_.default: aten.detach.default}
_REGIONS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}


def flat_program(program: ExportedProgram) -> ExportedProgram:
    """A program of the same meaning whose graph is flat and functional; buffers that change are extra outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = copy.copy(program)
        graph, mutates = _inline(program)
        flat._graph_module = fx.GraphModule({}, graph)
        flat._graph_module.meta.update(program.graph_module.meta)
        if mutates:
            flat = flat.run_decompositions({})
    return flat


def _inline(program: ExportedProgram) -> tuple[fx.Graph, bool]:
    trainable = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and program.state_dict[str(spec.target)].requires_grad
    }
    inliner = _Inliner()
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            env[node] = inliner.graph.node_copy(node)
            if node.name in trainable:
                inliner.needs_grad.add(env[node])
    inliner.body(program.graph_module, program.graph, env, True)
    return inliner.graph, inliner.mutates


class _Inliner:
    """Copies a graph and its regions into one; knows which values so far need a gradient."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.needs_grad: set[fx.Node] = set()
        self.detached: dict[fx.Node, fx.Node] = {}
        self.mutates = False

    def body(self, owner: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], grad: bool) -> Any:
        """Copy the operators of ``graph``; ``grad``: whether gradients are on. Returns what it outputs."""
        for node in graph.nodes:
            if node.op == "output":
                result = fx.node.map_arg(node.args[0], env.__getitem__)
                if owner is not None and not hasattr(self.graph, "_done") and graph.owning_module is None:
                    pass
                return self.finish(node, result) if grad is True and _is_top(env, graph) else result
            if node.op == "call_function":
                env[node] = self.operator(owner, node, env, grad)
            elif node.op == "get_attr":
                env[node] = getattr(owner, str(node.target))
        raise AssertionError("a graph ends in an output node")
