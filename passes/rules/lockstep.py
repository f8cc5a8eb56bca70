"""Run one rank's graph for all ranks at once, in one process, gradients included.

The graph is the same on every rank, so it is walked once with a list of tensors, one per rank, at every node; a
collective is a function of that list, and its gradient is its transpose, as ``passes/collectives.py`` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.collectives import collective_name
from passes.infer import META

Ranks = list[Tensor]  # one tensor per rank


def run_ranks(graph: fx.Graph, inputs: Sequence[Ranks], axes: Mapping[str, int]) -> list[Any]:
    """What the output node of ``graph`` returns on each rank.

    ``axes`` has the mesh's sizes; ranks are counted with its last axis running fastest. ``inputs`` has, for each
    placeholder, the tensors of all ranks.
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
            env[node] = _collective(name, node, env, axes)
        else:
            kwargs = {k: torch.device("cpu") if v == META else v for k, v in node.kwargs.items()}
            env[node] = [node.target(*on(r, node.args), **on(r, kwargs)) for r in range(num_ranks)]
    raise AssertionError("a graph ends with its output")


def groups(axes: Mapping[str, int], axis: str) -> list[list[int]]:
    """The ranks that differ along ``axis`` alone, in its order."""
    grid = torch.arange(math.prod(axes.values())).view(*axes.values())
    lines: list[list[int]] = grid.movedim(list(axes).index(axis), -1).reshape(-1, axes[axis]).tolist()
    return lines


def _collective(name: str, node: fx.Node, env: dict[fx.Node, list[Any]], axes: Mapping[str, int]) -> list[Any]:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    options = dict(zip(names, node.args, strict=True))
    assert options["size"] == axes[options["axis"]], f"{node}: the axes are {axes}"
    made: dict[int, Tensor] = {}
    for group in groups(axes, options["axis"]):
        if name == "axis_index":
            made |= {rank: torch.tensor(place) for place, rank in enumerate(group)}
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        operands = [env[source][r] for r in group]
        results: tuple[Tensor, ...] = _Collective.apply(name, options, *operands)  # type: ignore[no-untyped-call]
        made |= dict(zip(group, results, strict=True))
    return [made[r] for r in range(len(made))]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, options: dict[str, Any], *ranks: Tensor) -> tuple[Tensor, ...]:
        ctx.name, ctx.options = name, options
        made = _FORWARD[name](list(ranks), options)
        return tuple(made if name == "copy" else (t.clone(memory_format=torch.contiguous_format) for t in made))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        transposed = _TRANSPOSED[ctx.name](ctx.options)
        return None, None, *(list(grads) if transposed is None else _FORWARD[transposed](list(grads), ctx.options))


def _sum(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    return [torch.stack(ranks).sum(0) for _ in ranks]


def _own(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    return [x.chunk(len(ranks), options["dim"])[r] for r, x in enumerate(ranks)]


def _pad(ranks: Ranks, options: dict[str, Any]) -> Ranks:
    zeros = [[torch.zeros_like(x)] * len(ranks) for x in ranks]
    return [torch.cat([*zeros[r][:r], x, *zeros[r][r + 1 :]], options["dim"]) for r, x in enumerate(ranks)]


def _exchange(ranks: Ranks, split: int, concat: int) -> Ranks:
    pieces = [x.chunk(len(ranks), split) for x in ranks]
    return [torch.cat([p[r] for p in pieces], concat) for r in range(len(ranks))]


_FORWARD: dict[str, Callable[[Ranks, dict[str, Any]], Ranks]] = {
    "all_gather": lambda x, o: [torch.cat(x, o["dim"]) for _ in x],
    "shard_slice": _own,
    "shard_narrow": _own,
    "shard_pad": _pad,
    "copy": lambda x, o: [t.clone() for t in x],
    "reduce_scatter": lambda x, o: _own(_sum(x, o), o),
    "all_reduce": _sum,
    "all_reduce_max": lambda x, o: [torch.stack(x).amax(0) for _ in x],
    "all_to_all": lambda x, o: _exchange(x, o["split_dim"], o["concat_dim"]),
    "all_to_all_back": lambda x, o: _exchange(x, o["concat_dim"], o["split_dim"]),
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
