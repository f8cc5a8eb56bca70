"""Check a sharding rule: run every sharding strategy of an operator on simulated ranks and compare with one device.

>>> check_strategies(torch.ops.aten.mm.default, (torch.randn(4, 6), torch.randn(6, 8)))
[]

Results and gradients are compared. :func:`run_ranks` runs one rank's graph for all ranks in one process. All ranks have
the same graph, so each node is executed once for all ranks, on lists with one tensor per rank. A collective is a
function of such a list, and its backward is the transposed collective in ``passes/ir/collectives.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partitioner.passes.ir.collectives import collective_name
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.interpret import META, insert_operator_node
from partitioner.passes.ir.layouts import Layout, can_shard_evenly, join_shards, local_shape, take_shard
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import OpFactors, Strategy, operands_of, replace_operands, results_of
from partitioner.passes.rules.strategies import append_local_call, enumerate_strategies

Ranks = list[Tensor]  # one tensor per rank


def run_ranks(graph: fx.Graph, inputs: Sequence[Ranks], axes: Mapping[str, int]) -> list[Any]:
    """Run ``graph`` on all simulated ranks of a mesh in one process. Return a list with the graph's output on each
    rank.

    ``inputs``: for each placeholder, a list with the tensor of each rank. ``axes``: name of each mesh axis -> its size;
    consecutive ranks differ along the last axis.
    """
    num_ranks = math.prod(axes.values())
    env: dict[fx.Node, list[Any]] = {}
    values = iter(inputs)

    def on(rank: int, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda n: env[n][rank])

    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = list(next(values))
        elif node.op == "output":
            return [on(r, node.args[0]) for r in range(num_ranks)]
        elif name := collective_name(node.target):
            env[node] = _run_collective(name, node, env, axes)
        else:
            kwargs = {k: torch.device("cpu") if v == META else v for k, v in node.kwargs.items()}
            env[node] = [node.target(*on(r, node.args), **on(r, kwargs)) for r in range(num_ranks)]
    raise AssertionError("a graph ends with its output")


def list_axis_groups(axes: Mapping[str, int], axis: str) -> list[list[int]]:
    """Return the groups of ranks of a mesh that differ only in their position along ``axis``; a group is a list of rank
    numbers, ordered by this position.

    ``axes``: name of each mesh axis -> its size; consecutive ranks differ along the last axis.
    """
    grid = torch.arange(math.prod(axes.values())).view(*axes.values())
    lines: list[list[int]] = grid.movedim(list(axes).index(axis), -1).reshape(-1, axes[axis]).tolist()
    return lines


def _run_collective(name: str, node: fx.Node, env: dict[fx.Node, list[Any]], axes: Mapping[str, int]) -> list[Any]:
    """Run the collective operator ``node`` on all simulated ranks of a mesh. Return a list with the result of each
    rank.

    ``name``: the name of the collective, such as ``all_gather``. ``env``: earlier node -> list of its values on all
    ranks. ``axes``: name of each mesh axis -> its size.
    """
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    options = dict(zip(names, node.args, strict=True))
    assert options["size"] == axes[options["axis"]], f"{node}: the axes are {axes}"
    made: dict[int, Tensor] = {}
    for group in list_axis_groups(axes, options["axis"]):
        if name == "axis_index":
            made |= {rank: torch.tensor(place) for place, rank in enumerate(group)}
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        operands = [env[source][r] for r in group]
        results: tuple[Tensor, ...] = _CollectiveFunction.apply(name, options, *operands)  # type: ignore[no-untyped-call]
        made |= dict(zip(group, results, strict=True))
    return [made[r] for r in range(len(made))]


class _CollectiveFunction(torch.autograd.Function):
    """Autograd function that runs a collective, such as an all-gather, on the tensors of a group of simulated ranks in
    one process. Backward runs the transposed collective on the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str, options: dict[str, Any], *ranks: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.options = name, options
        made = _FORWARD[name](list(ranks), options)
        return tuple(made if name == "copy" else (t.clone(memory_format=torch.contiguous_format) for t in made))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        transposed = _TRANSPOSED[ctx.name](ctx.options)
        return None, None, *(list(grads) if transposed is None else _FORWARD[transposed](list(grads), ctx.options))


def _sum_over_ranks(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    """Return a list with the sum of the tensors ``ranks`` (one per simulated rank), repeated for each rank.
    ``options``: unused."""
    return [torch.stack(ranks).sum(0) for _ in ranks]


def _take_own_chunks(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    """Return a list with, for each simulated rank, its own chunk of its tensor: tensors are cut into as many equal
    chunks as there are ranks, and rank ``i`` keeps chunk ``i``. ``ranks``: the tensors of the ranks, in order.
    ``options``: the arguments of the collective by name; ``dim`` is the dim that is cut."""
    return [x.chunk(len(ranks), options["dim"])[r] for r, x in enumerate(ranks)]


def _pad_with_zeros(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    """Return a list with, for each simulated rank, the concatenation of all ranks' tensors along a dim in which the
    other ranks' tensors are replaced by zeros. ``ranks``: the tensors of the ranks, in order. ``options``: the
    arguments of the collective by name; ``dim`` is the dim of the concatenation."""
    zeros = [[torch.zeros_like(x)] * len(ranks) for x in ranks]
    return [torch.cat([*zeros[r][:r], x, *zeros[r][r + 1 :]], options["dim"]) for r, x in enumerate(ranks)]


def _exchange_chunks(ranks: Ranks, split: int, concat: int) -> Ranks:
    """Return a list with each simulated rank's result of an all-to-all. ``ranks``: the tensors of the ranks, in order.
    ``split``: the dim along which each tensor is cut. ``concat``: the dim along which received chunks are concatenated.
    """
    pieces = [x.chunk(len(ranks), split) for x in ranks]
    return [torch.cat([p[r] for p in pieces], concat) for r in range(len(ranks))]


_FORWARD: dict[str, Callable[[Ranks, dict[str, Any]], Ranks]] = {
    "all_gather": lambda x, o: [torch.cat(x, o["dim"]) for _ in x],
    "shard_slice": _take_own_chunks,
    "shard_narrow": _take_own_chunks,
    "shard_pad": _pad_with_zeros,
    "copy": lambda x, o: [t.clone() for t in x],
    "reduce_scatter": lambda x, o: _take_own_chunks(_sum_over_ranks(x, o), o),
    "all_reduce": _sum_over_ranks,
    "all_reduce_max": lambda x, o: [torch.stack(x).amax(0) for _ in x],
    "all_to_all": lambda x, o: _exchange_chunks(x, o["split_dim"], o["concat_dim"]),
    "all_to_all_back": lambda x, o: _exchange_chunks(x, o["concat_dim"], o["split_dim"]),
}
_TRANSPOSED: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "all_gather": lambda o: "reduce_scatter" if o["grad"] == "reduce" else "shard_slice",
    "shard_slice": lambda o: "all_gather",
    "shard_narrow": lambda o: "shard_pad",
    "shard_pad": lambda o: "shard_narrow",
    "copy": lambda o: "all_reduce",
    "reduce_scatter": lambda o: "all_gather",
    "all_reduce": lambda o: "all_reduce" if o["grad"] == "reduce" else None,
    "all_to_all": lambda o: "all_to_all_back",
}

AXIS = "ranks"


def check_strategies(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    num_ranks: int = 2,
    wanted: Mapping[int, Collection[Layout]] | None = None,
    grad: bool | Collection[int] = True,
) -> list[str]:
    """Run a call of an operator with each of its sharding strategies on simulated ranks, and compare results and
    gradients with those on one device. Return a message for each difference; an empty list means that all agree.

    Partial sums and gradients of results are drawn from torch's global random generator.

    Args:
        target: the operator.
        args: arguments of the call, with real tensors; use float64 so that numbers agree closely.
        kwargs: keyword arguments of the call; ``None`` for none.
        num_ranks: number of ranks to simulate.
        wanted: further layouts to test, as a dict: ``i`` (operand ``i``) or ``~k`` (result ``k``) -> layouts; ``None``
            for none.
        grad: true or false: whether all floating-point tensors get gradients; or the positions (from 0), among the
            tensor arguments, of those that do.
    """
    node, tensors = make_call_node(target, args, kwargs or {}, grad)
    factors = factors_of(node)
    violations = [] if factors is None else find_shape_mismatches(factors, tensors, results_of(node))
    if violations:
        return violations
    judge = OperatorReference(node, tensors)
    return [f"{s}: {what}" for s in enumerate_strategies(node, num_ranks, wanted) for what in judge.check(s, num_ranks)]


def make_call_node(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], grad: bool | Collection[int] = True
) -> tuple[fx.Node, list[Tensor]]:
    """Return two values: a graph node for a call of the operator ``target`` with ``args`` and ``kwargs``; and a list of
    the real tensors among the arguments, in the order of the node's operands. ``grad``: true or false: whether all
    floating-point tensors get gradients; or the positions (from 0), among the tensors, of those that do."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placeholder(leaf: Any) -> Any:
        """If ``leaf``, a value in the arguments of a call, is a tensor, append it to the list of tensors and return a
        placeholder node for it. Return any other value unchanged."""
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = leaf.detach().to("meta")
        needs = grad if isinstance(grad, bool) else len(tensors) in grad
        node.meta["grad"] = needs and is_differentiable(leaf)
        tensors.append(leaf.detach())
        return node

    node = insert_operator_node(graph, target, *pytree.tree_map(placeholder, (tuple(args), dict(kwargs))))
    node.meta["grad"] = bool(grad) and is_differentiable(node.meta["val"])
    return node, tensors


def find_shape_mismatches(factors: OpFactors, operands: Sequence[Tensor], results: Sequence[Tensor]) -> list[str]:
    """Return a message for each tensor dim whose size is not the product of its factors (named loop dimensions) in the
    sharding rule ``factors``. An empty list means that the rule fits. A different number of tensors or dims also gives
    a message.

    ``operands``, ``results``: the tensors that the operator reads and returns.
    """
    found: list[str] = []
    if not factors.sizes:
        return found  # nothing is sharded
    sides = ("operand", factors.operands, operands), ("result", factors.results, results)
    for kind, patterns, tensors in sides:
        if len(patterns) != len(tensors):
            found.append(f"{factors}: the rule has {len(patterns)} {kind}s, the call {len(tensors)}")
            continue
        for i, (dims, tensor) in enumerate(zip(patterns, tensors, strict=True)):
            spans = factors.spans and getattr(factors.spans, kind + "s")[i]
            for d, (names, size) in enumerate(zip(dims, tensor.shape, strict=False)):
                product = 1
                for name in names:
                    product *= spans[1] if spans and name == factors.spans.factor else factors.sizes[name]  # type: ignore[union-attr]
                if names and product != size:
                    found.append(f"{factors}: dim {d} of {kind} {i} has size {size}, its factors {product}")
            if len(dims) != tensor.dim():
                found.append(f"{factors}: {kind} {i} has {tensor.dim()} dims, the rule {len(dims)}")
    return found


_TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.03}


class OperatorReference:
    """Results and gradients of an operator on one device, with which its sharded runs are compared. The gradients of
    the results, from which backward starts, are random numbers.

    ``node``: the operator call. ``operands``: its tensor operands. ``results``: its results. ``grads``: the gradients
    of its operands.
    """

    def __init__(self, node: fx.Node, tensors: list[Tensor]) -> None:
        """Run the operator call ``node`` once on ``tensors``, its operands, with random gradients of its results,
        and store the results and the gradients of the operands."""
        self.node = node
        self.operands = tensors
        self.needs = [bool(o.meta["grad"]) for o in operands_of(node)]
        leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, self.needs, strict=True)]
        graph = build_operator_graph(
            node, lambda graph, local: insert_operator_node(graph, _get_callable_target(node), *local)
        )
        self.results: list[Tensor] = list(run_ranks(graph, [[t] for t in leaves], {AXIS: 1})[0])
        node.meta["grad"] = any(r.requires_grad for r in self.results)
        self.grads_out = [torch.randn_like(r) if r.requires_grad else None for r in self.results]
        self.grads = compute_gradients(self.results, leaves, self.grads_out)
        self.tolerance = max(_TOLERANCE.get(t.dtype, 1e-9) for t in (*tensors, *self.results))

    def check(self, strategy: Strategy, num_ranks: int) -> list[str]:
        """Run the operator with ``strategy`` on ``num_ranks`` simulated ranks. Return a message for each result or
        gradient that differs from the one on one device; an empty list means that all agree. ``strategy``: the layouts
        of its operands and results."""
        layouts = (*strategy.operands, *strategy.results)
        for layout, tensor in zip(layouts, (*self.operands, *self.results), strict=True):
            if not can_shard_evenly(layout, tuple(tensor.shape), num_ranks):
                return [f"{layout} does not divide {list(tensor.shape)} by {num_ranks}"]
        try:
            return self._check_results(strategy, num_ranks)
        except Exception as error:
            return [f"fails: {type(error).__name__}: {error}"]

    def _check_results(self, strategy: Strategy, num_ranks: int) -> list[str]:
        """Run the operator with ``strategy`` on ``num_ranks`` simulated ranks. Return a message for each result that
        differs from the one on one device; if all results agree, a message for each gradient that differs.
        ``strategy``: the layouts of its operands and results."""
        pairs = list(zip(self.operands, strategy.operands, strict=True))
        shapes = [local_shape(layout, tuple(t.shape), num_ranks) for t, layout in pairs]
        graph = build_operator_graph(
            self.node, lambda g, local: append_local_call(self.node, strategy, AXIS, num_ranks, local, g), shapes
        )
        leaves = [[t.detach().clone() for t in split_among_ranks(t, layout, num_ranks)] for t, layout in pairs]
        for ranks, need in zip(leaves, self.needs, strict=True):
            for t in ranks:
                t.requires_grad_(need)
        outputs = run_ranks(graph, leaves, {AXIS: num_ranks})
        values = [n.meta["val"] for n in graph.output_node().args[0]]  # type: ignore[union-attr]
        found: list[str] = []
        for i, (layout, expected) in enumerate(zip(strategy.results, self.results, strict=True)):
            ranks = [o[i].detach() for o in outputs]
            if values[i].shape != ranks[0].shape or values[i].dtype != ranks[0].dtype:
                found.append(f"result {i} is {list(ranks[0].shape)} {ranks[0].dtype}, its meta value {values[i]}")
            found += [
                f"result {i} {what}" for what in describe_differences(ranks, expected.detach(), layout, self.tolerance)
            ]
        return found or self._check_gradients(strategy, leaves, outputs, num_ranks)

    def _check_gradients(
        self, strategy: Strategy, leaves: list[Ranks], outputs: list[Any], num_ranks: int
    ) -> list[str]:
        """Return a message for each operand whose gradient on the simulated ranks differs from the one on one device.
        ``strategy``: the layouts with which the operator was run. ``leaves``: for each operand, the tensor of each
        rank. ``outputs``: for each rank, the results of the operator. ``num_ranks``: the number of simulated ranks."""
        if not self.node.meta["grad"]:
            return []
        results: list[Tensor] = []
        grads: list[Tensor | None] = []
        for i, (layout, grad) in enumerate(zip(strategy.results, self.grads_out, strict=True)):
            results += [outputs[r][i] for r in range(num_ranks)]
            grads += (
                [None] * num_ranks if grad is None else split_among_ranks(grad, _get_gradient_layout(layout), num_ranks)
            )
        found = compute_gradients(results, [t for ranks in leaves for t in ranks], grads)
        violations: list[str] = []
        for i, (layout, expected) in enumerate(zip(strategy.operands, self.grads, strict=True)):
            ranks = found[i * num_ranks : (i + 1) * num_ranks]
            wrong = (
                describe_differences(ranks, expected, _get_gradient_layout(layout), self.tolerance)
                if self.needs[i]
                else []
            )
            violations += [f"gradient of operand {i} {what}" for what in wrong]
        return violations


def _get_callable_target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def build_operator_graph(
    node: fx.Node, write: Callable[..., fx.Node], shapes: Sequence[tuple[int, ...]] | None = None
) -> fx.Graph:
    """Return a graph that has placeholders for the operands of the operator call ``node``, the nodes that ``write``
    appends, and an output of all tensors that the last node returns.

    ``write``: appends operators and returns the last node. ``shapes``: the shapes of the operands on one rank;
    ``write`` is then called with (graph, list of placeholders). If ``shapes`` is ``None``, the shapes stay as they are,
    and ``write`` is called with the graph and (args, kwargs) of ``node`` in which placeholders replace tensors.
    """
    graph = fx.Graph()
    operands = []
    for i, operand in enumerate(operands_of(node)):
        placeholder = graph.placeholder(f"x{i}")
        val = operand.meta["val"]
        placeholder.meta["val"] = val if shapes is None else val.new_empty(shapes[i])
        placeholder.meta["grad"] = operand.meta["grad"]
        operands.append(placeholder)
    made = write(graph, replace_operands(node, operands) if shapes is None else operands)
    many = isinstance(made.meta["val"], tuple | list)
    outputs = (
        [insert_operator_node(graph, operator.getitem, (made, i)) for i in range(len(made.meta["val"]))]
        if many
        else [made]
    )
    graph.output(tuple(o for o in outputs if isinstance(o.meta["val"], Tensor)))
    return graph


def compute_gradients(
    results: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradient of each tensor in ``leaves``; zeros for one that no gradient reaches. ``results``: tensors
    that were computed from ``leaves``. ``grads``: the gradient of each result; ``None`` for a result without a
    gradient."""
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    every = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(every, leaves, strict=True)]


_GRADIENT = {"R": Layout("R"), "P": Layout("R"), "R'": Layout("P")}


def _get_gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor with the layout ``layout``. The gradient of a sharded tensor is
    sharded in the same way. The gradient of a whole tensor (kind ``R``) or a partial sum (``P``) is whole. The gradient
    of the kind ``R'`` is a partial sum."""
    return _GRADIENT.get(layout.kind, layout)


def split_among_ranks(tensor: Tensor, layout: Layout, num_ranks: int) -> Ranks:
    """Return a list with each rank's part of ``tensor`` in the layout ``layout`` on ``num_ranks`` ranks: its shard, or
    the whole tensor. If the layout is a partial sum, the parts are random tensors whose sum is ``tensor``."""
    if layout.kind != "P":
        return [take_shard(tensor, layout, num_ranks, r) for r in range(num_ranks)]
    if is_differentiable(tensor):
        parts = [torch.randn_like(tensor) for _ in range(num_ranks - 1)]
    else:
        parts = [torch.randint_like(tensor, 0, 5) for _ in range(num_ranks - 1)]
    rest = tensor.clone()
    for part in parts:
        rest -= part
    return [*parts, rest]


def describe_differences(ranks: Ranks, expected: Tensor, layout: Layout, tolerance: float) -> list[str]:
    """Join the tensors of all ranks according to ``layout`` and compare the result with the whole tensor ``expected``.
    Return a list with one message if they differ; an empty list if they agree.

    ``ranks``: the tensor of each rank. ``tolerance``: the allowed error, relative to the larger of 1 and the largest
    magnitude in ``expected``.
    """
    found = [join_shards(ranks, layout)] if layout.kind in ("S", "P") else ranks
    for r, tensor in enumerate(found):
        if tensor.shape != expected.shape:
            return [f"has shape {list(tensor.shape)}, expected {list(expected.shape)}"]
        if tensor.dtype != expected.dtype and layout.kind != "P":
            return [f"is {tensor.dtype}, expected {expected.dtype}"]
        atol = tolerance * max(1.0, _find_largest_magnitude(expected))
        if not torch.allclose(tensor.to(expected.dtype), expected, rtol=tolerance, atol=atol, equal_nan=True):
            error = (tensor.double() - expected.double()).abs().max().item()
            return [f"is off by {error:.3g}" + (f" on rank {r}" if len(found) > 1 else "")]
    return []


def _find_largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a finite element of ``tensor``; 0 if there is none."""
    sizes = (tensor if tensor.is_complex() else tensor.double()).abs()
    sizes = sizes[torch.isfinite(sizes)]
    return float(sizes.max()) if sizes.numel() else 0.0
