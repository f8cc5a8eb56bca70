"""Products that sum over a shared factor: linear, matrix products, einsum."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.rules.algebra import NAMES, OpFactors, each, named, operands_of, shape
from passes.rules.registry import family, rule

_PRODUCT = each(0, 1)

rule("aten.mm", "m k, k n -> m n", linear=_PRODUCT)
rule("aten.bmm", "b m k, b k n -> b m n", linear=_PRODUCT)
rule("aten.mv", "m k, k -> m", linear=_PRODUCT)
rule("aten.dot", "k, k -> ", linear=_PRODUCT)
rule("aten.outer", "m, n -> m n", linear=_PRODUCT)
rule("aten.vdot", "k, k -> ")
rule("aten.cdist", "... p m!, ... r m! -> ... p r")
rule("aten.bilinear", "... i, ... j, o i j -> ... o", "... i!, ... j!, o i! j!, o -> ... o")

_ADDED = {"addmm": ("mk", "kn", "mn"), "addmv": ("mk", "k", "m"), "baddbmm": ("bmk", "bkn", "bmn"),
          "addbmm": ("bmk", "bkn", "mn")}  # fmt: skip


@family(*_ADDED)
def added(node: fx.Node) -> OpFactors:
    """A product plus an addend, which would be added once per rank if what is summed over were sharded."""
    left, right, made = _ADDED[node.target.__name__.split(".")[0]]  # type: ignore[union-attr]
    rank = len(shape(operands_of(node)[0]))
    summed = frozenset(left) - frozenset(made)
    return named(node, [made[len(made) - rank :], left, right], [made], whole=summed)


@family("linear")
def linear(node: fx.Node) -> OpFactors:
    x, weight, *bias = operands_of(node)
    front = NAMES[: len(shape(x)) - 1]
    out = ("o",) if len(shape(weight)) == 2 else ()
    operands = [(*front, "i"), (*out, "i"), *(out for _ in bias)]
    if bias:
        return named(node, operands, [(*front, *out)], whole=frozenset("i"))
    return named(node, operands, [(*front, *out)], linear=_PRODUCT)


@family("matmul")
def matmul(node: fx.Node) -> OpFactors:
    x, y = (len(shape(o)) for o in operands_of(node))
    batch = max(x, y) - 2
    front = NAMES[: max(batch, 0)]
    rows = ("m",) if x > 1 else ()
    columns = ("n",) if y > 1 else ()
    left = front[batch - (x - 2) :] if x > 2 else ()
    right = front[batch - (y - 2) :] if y > 2 else ()
    operands = [(*left, *rows, "k"), (*right, "k", *columns)]
    return named(node, operands, [(*front, *rows, *columns)], linear=_PRODUCT)


@family("einsum")
def einsum(node: fx.Node) -> OpFactors | None:
    equation: Any = node.args[0]
    terms, _, result = equation.replace(" ", "").partition("->")
    count = len(operands_of(node))
    patterns = [_labels(t, len(shape(o))) for t, o in zip(terms.split(","), operands_of(node), strict=True)]
    if "->" not in equation:
        return None
    made = _labels(result, len(node.meta["val"].shape))
    return named(node, patterns, [made], linear=each(*range(count)))


def _labels(term: str, rank: int) -> list[str]:
    front, dots, back = term.partition("...")
    hidden = rank - len(front) - len(back)
    return [*front, *(NAMES[hidden - 1 - i] for i in range(hidden) if dots), *back]
