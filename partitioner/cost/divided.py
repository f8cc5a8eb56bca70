"""What a sharding over ``tp`` or ``cp`` is charged for leaving whole what the axis is there to divide.

Without that the best use of any axis is to split the batch, which ``dp`` does already.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from partitioner.cost.axes import TensorCosts, made_bytes
from partitioner.cost.collectives import moved_share
from partitioner.solve.share import matmul_flops
from partitioner.topology.groups import Group
from partitioner.topology.parts import DeviceType
from passes.blocks import FoldedModel

# What tp leaves whole of the matrix products and of the weights costs, if that is all of them, this many times the time
# of all products and the start of this many all-reduces, or of this many for each product; and this many all-reduces of
# the results of all products, so that how much is divided does not depend on how fast the links are.
_UNDIVIDED = 10.0
_UNDIVIDED_EXCHANGES = 1000.0
_UNDIVIDED_OF_EACH = 3.0
_UNDIVIDED_RESULTS = 4.0


def divided_costs(model: FoldedModel, axis: str, device: DeviceType, group: Group, precision: str) -> TensorCosts:
    """Costs on ``axis`` over ``group``: products and weights are dear where they are left whole; over ``cp`` all values
    are, whose memory is what that axis is there to divide."""
    products = [(often, node) for often, node in _operators(model) if matmul_flops(node)]
    flops = sum(often * matmul_flops(node) for often, node in products)
    results = sum(often * made_bytes(node) for often, node in products)
    made = sum(often * made_bytes(node) for often, node in _operators(model)) if axis == "cp" else 0
    trained = sum(s.spec.nbytes for s in model.states.values() if s.requires_grad)
    starts = max(_UNDIVIDED_EXCHANGES, _UNDIVIDED_OF_EACH * sum(often for often, _ in products))
    moved_s = moved_share("all_reduce", group.size) * results / group.all_reduce_bandwidth
    exchanges = starts * max(group.all_reduce_start, device.launch) + _UNDIVIDED_RESULTS * moved_s
    dear = _UNDIVIDED * 3 * flops / device.peak_of(precision) + exchanges
    return TensorCosts(
        device,
        group,
        undivided=dear / flops if flops else 0.0,
        repeated=exchanges / made if made else 0.0,
        state_price=dear / trained if trained else 0.0,
    )


def _operators(model: FoldedModel) -> Iterator[tuple[int, fx.Node]]:
    """Every operator, with how often its block is called."""
    for name, block in model.blocks.items():
        often = model.num_calls(name)
        yield from ((often, node) for node in block.graph.nodes if node.op == "call_function")
