"""The collectives of one mesh axis, seen from another: they move whole slabs and add them up.

Where n ranks cut or join a dim, it is (n d) on the one side and d on the other.
"""

from __future__ import annotations

from torch import fx

from passes.collectives import ops as collective
from passes.rules.algebra import FIRST, NAMES, OpFactors, argument, operands_of, shape
from passes.rules.pointwise import elementwise
from passes.rules.registry import family

_JOINS = (collective.all_gather.default, collective.shard_pad.default)


@family("partition::copy", "partition::all_reduce")
def summed(node: fx.Node) -> OpFactors:
    return elementwise(node, FIRST)


family("partition::all_reduce_max", "partition::axis_index")(elementwise)


@family(
    "partition::all_gather", "partition::shard_pad", "partition::shard_slice", "partition::shard_narrow",
    "partition::reduce_scatter",
)  # fmt: skip
def cut_or_joined(node: fx.Node) -> OpFactors:
    return _moved(node, *(None, argument(node, "dim")) if node.target in _JOINS else (argument(node, "dim"), None))


@family("partition::all_to_all")
def exchanged(node: fx.Node) -> OpFactors:
    return _moved(node, argument(node, "split_dim"), argument(node, "concat_dim"))


def _moved(node: fx.Node, cut: int | None, joined: int | None) -> OpFactors:
    before, after = shape(operands_of(node)[0]), tuple(node.meta["val"].shape)
    names = NAMES[: len(before)]
    sizes = {"n": argument(node, "size"), **{n: min(a, b) for n, a, b in zip(names, before, after, strict=True)}}
    operand = tuple(("n", n) if d == cut else (n,) for d, n in enumerate(names))
    result = tuple(("n", n) if d == joined else (n,) for d, n in enumerate(names))
    return OpFactors(sizes, (operand,), (result,), frozenset("n"), FIRST)
