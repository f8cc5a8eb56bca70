"""Where in a value the samples of the batch stand, by following their dim from operator to operator.

Requires: a graph with values, and the dim of samples of its placeholders. What the factor rules do not carry through is
not followed: an operator without a rule, and results that mix samples, have none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from torch import fx

from passes.blocks import Block, FoldedModel
from passes.layouts import Layout
from passes.rules import factors_of
from passes.rules.algebra import operands_of

Samples = dict[int, int]  # dim -> how many samples it has, outermost in it
Results = tuple[Samples, ...]  # of each result of an operator


def sample_dims(model: FoldedModel, dims: Mapping[str, int | None], count: int) -> dict[fx.Node, Results]:
    """For each node of each block where ``count`` samples stand in its results. ``dims``: values -> their dim."""
    found: dict[fx.Node, Results] = {}
    seen: set[str] = set()
    for placed in model.calls:
        if placed.block in seen:
            continue
        seen.add(placed.block)
        block = model.blocks[placed.block]
        given = {
            name: {dim: count}
            for name, value in zip(block.inputs, placed.inputs, strict=True)
            if (dim := dims.get(value)) is not None
        }
        found |= _of_block(block, given)
    return found


def splits_samples(samples: Samples, layout: Layout) -> bool:
    """Whether a shard of a value has some of its samples only."""
    count = samples.get(layout.dim, 1) if layout.is_shard else 1
    return count > 1 and max(1, len(layout.sections)) % count != 0


def _of_block(block: Block, given: Mapping[str, Samples]) -> dict[fx.Node, Results]:
    found: dict[fx.Node, Results] = {}
    for node in block.graph.nodes:
        if node.op == "placeholder":
            found[node] = (dict(given.get(node.name, {})),)
        elif node.target is operator.getitem:
            source, index = node.args
            found[node] = (found[source][index],) if index < len(found[source]) else ({},)
        elif node.op == "call_function":
            found[node] = _of_operator(node, [found[o][0] if found[o] else {} for o in operands_of(node)])
    return found


def _of_operator(node: fx.Node, operands: Sequence[Samples]) -> Results:
    rule = factors_of(node)
    if rule is None or not any(operands):
        return ({},)
    carried: set[str] = set()
    for samples, dims in zip(operands, rule.operands, strict=True):
        for dim, count in samples.items():
            carried |= set(_outermost(dims[dim], count, rule.sizes))
    results = []
    for dims in rule.results:
        of_dims = {d: math.prod(rule.sizes[f] for f in names if f in carried) for d, names in enumerate(dims)}
        results.append({d: n for d, n in of_dims.items() if n > 1})
    return tuple(results)


def _outermost(factors: Sequence[str], count: int, sizes: Mapping[str, int]) -> Sequence[str]:
    """The outer factors of a dim that are ``count`` together; none where no prefix is."""
    product = 1
    for place, name in enumerate(factors):
        if product == count:
            return factors[:place]
        product *= sizes[name]
    return factors if product == count else ()
