"""What products with weights take in fp8, and which of them are: those that the program multiplies so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from partitioner.cost.compute import memory_rate, product_rate
from partitioner.cost.operators import Kernel, Operand
from partitioner.cost.spread import ExpertRegion
from partitioner.topology.parts import DeviceType
from passes.blocks import Block
from passes.eight_bits import found_in, ops


def products_in_fp8(block: Block, asked: bool, region: ExpertRegion) -> frozenset[fx.Node]:
    """The products of ``block`` in fp8: what the program has so already, and where it is ``asked`` for what it will,
    and those of experts, with which models are planned only."""
    found = {node for node in block.graph.nodes if node.target is ops.linear_fp8.default}
    if asked:
        found |= found_in(block).keys() | (region.products if region.known else set())
    return frozenset(found)


def in_fp8(kernels: list[Kernel], operands: list[Operand], results: list[Operand], backward: bool) -> list[Kernel]:
    """Products with a weight as fp8 kernels, and what their operands' casts move.

    Forward, the kernel before writes the operand as it is and transposed, a byte each; backward, the gradient is read,
    and written twice (NVIDIA's Transformer Engine).
    """
    if not any(o.state for o in operands) or not any(k.flops for k in kernels):
        return kernels
    made = [replace(k, precision="fp8") if k.flops and k.precision in ("bf16", "fp16") else k for k in kernels]
    if made == kernels:
        return kernels
    if backward:
        return [*made, Kernel("pointwise", 2.0 * sum(r.nbytes for r in results))]
    return [*made, Kernel("pointwise", float(max((o.nbytes for o in operands if not o.state), default=0)), launches=0)]


def least_in_fp8(
    kernels: list[Kernel], operands: list[Operand], results: list[Operand], backward: bool, device: DeviceType
) -> list[Kernel]:
    """No more than a product takes in fp8 or as it is: a shard of it may have sizes that are not multiples of 16."""
    made = [
        k if k.flops or k in kernels else replace(k, launches=0) for k in in_fp8(kernels, operands, results, backward)
    ]
    return made if _seconds(made, device) < _seconds(kernels, device) else kernels


def _seconds(kernels: Sequence[Kernel], device: DeviceType) -> float:
    return sum(
        k.num_bytes / memory_rate(k.kind, device) + (k.flops / product_rate(k, device) if k.flops else 0.0)
        for k in kernels
    )
