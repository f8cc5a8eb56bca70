"""Keep rows sorted by expert from one product to the next.

``partition::expert_mm`` sorts the rows that it reads and puts back those that it makes. Between two of them with the
same experts, rows need not be put back: what is done there is done to each row by itself. Requires: a local graph.
Provides: the same function, where rows are sorted once before and put back once behind, in backward as well.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from passes.blocks import Block
from passes.grouped import ops
from passes.infer import call
from passes.regions import ExpertRegion, find_regions
from passes.rules.algebra import operands_of, with_operands
from passes.unused import drop_unused

MADE_BY = "made_by"  # in a node's meta: the node of the block that it is kept, or made once more, with
_PRODUCT = ops.expert_mm.default


def kept_sorted(block: Block) -> Block:
    """``block`` itself where no two products have the same experts."""
    products = Counter(n.args[2] for n in block.graph.nodes if n.target is _PRODUCT)
    if max(products.values(), default=0) < 2:
        return block
    block = block.copy()
    for region in find_regions(block):
        if sum(n.target is _PRODUCT for n in region.products) > 1 and len(region.products) == sum(
            n.target is _PRODUCT for n in region.nodes
        ):
            _Sorter(block.graph, region).run()
    drop_unused(block.graph)
    return block


class _Sorter:
    def __init__(self, graph: fx.Graph, region: ExpertRegion) -> None:
        assert region.keys is not None
        self.graph, self.region, self.keys = graph, region, region.keys
        self.moved: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        nodes = [n for n in self.graph.nodes if n in self.region.nodes]
        with self.graph.inserting_after(self.keys):
            found = self._call(ops.sort_experts.default, self.keys, self.keys, self.region.num_experts)
        with self.graph.inserting_after(found):
            self.order = call(self.graph, operator.getitem, (found, 0), like=found)
        with self.graph.inserting_after(self.order):
            self.ends = call(self.graph, operator.getitem, (found, 1), like=found)
        for node in nodes:
            with self.graph.inserting_before(node):
                self._rewrite(node)
        for node in self.region.exits:
            outside = [u for u in node.users if u not in self.region.nodes]
            with self.graph.inserting_after(node):
                back = self._call(ops.unsort_rows.default, node, node, self.order)
            for user in outside:
                user.replace_input_with(node, back)

    def _rewrite(self, node: fx.Node) -> None:
        if node.target is _PRODUCT:
            rows, weight, _ = node.args
            node.target, node.args = ops.grouped_mm.default, (self._sorted(rows), weight, self.ends)  # type: ignore[arg-type]
        else:
            node.args, node.kwargs = with_operands(node, [self._sorted(o) for o in operands_of(node)])

    def _sorted(self, node: fx.Node) -> fx.Node:
        """What a node of the region reads in place of ``node``."""
        if node is not self.keys and node not in self.region.entries:
            return node
        if node not in self.moved:
            self.moved[node] = self._call(ops.sort_rows.default, node, node, self.order)
        return self.moved[node]

    def _call(self, target: object, like: fx.Node, *args: object) -> fx.Node:
        made = call(self.graph, target, args, like=like)  # type: ignore[arg-type]
        made.meta[MADE_BY] = like.name
        return made
