"""Cost of matrix products with weights in fp8 or NVFP4, and the selection of the products that run in these formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from torch import fx

from partitioner.cost.call.expert_parallel import ExpertProducts, expert_region
from partitioner.cost.call.operators import Kernel, Operand, is_attention, is_product, is_view, operator_name
from partitioner.cost.call.roofline import memory_rate, product_rate
from partitioner.execution_profile import ExecutionProfile
from partitioner.passes.ir.model import Block, FoldedModel
from partitioner.passes.ops.fp8 import (
    alignment,
    find_deciding_products,
    find_expert_products,
    find_weight_products,
    match_weight_product,
    ops,
)
from partitioner.passes.ops.scaled_products import BITS, NUMBERS, Scaling
from partitioner.topology.hardware import DeviceType

_SHOWN = 3  # products that a note names
_BYTES = {"fp8": 1.0, "nvfp4": BITS / 8}  # of a number of an operand
_SCALE_PASSES, _SCALE_LAUNCHES = 8, 4  # of NVFP4's scales of blocks: bytes moved for each, to order them


def find_scaling(precision: str, profile: ExecutionProfile) -> Scaling | None:
    """Return the scaling granularity of the products with weights under ``precision``: for fp8 ``"tensor"``, ``"row"``
    or ``"block"`` (what shares a scale), as ``profile`` says; for NVFP4 ``"nvfp4"``; for any other precision ``None``.
    """
    if precision == "nvfp4":
        return "nvfp4"
    return profile.fp8_scaling if precision == "fp8" else None


def format_of(scaling: Scaling | None) -> str:
    """Return the number format that the scaling granularity ``scaling`` belongs to: ``"nvfp4"`` for ``"nvfp4"``,
    otherwise ``"fp8"``."""
    return "nvfp4" if scaling == "nvfp4" else "fp8"


def scaling_of(node: fx.Node, asked: Scaling | None) -> Scaling:
    """Return the scaling granularity of ``node``, a product in fp8 or NVFP4: ``"tensor"``, ``"row"``, ``"block"`` (what
    shares a scale) or ``"nvfp4"``. If the node is already an fp8 operator, its own argument counts; otherwise
    ``asked``, the granularity that the user requested (``None``: ``"tensor"``)."""
    if node.target is ops.linear_fp8.default:
        found: Any = node.args[4] if len(node.args) > 4 else "tensor"
        return cast(Scaling, found)
    return asked or "tensor"


def products_in_fp8(
    block: Block, asked: Scaling | None, region: ExpertProducts, with_experts: bool = False
) -> frozenset[fx.Node]:
    """Return the matrix products of ``block`` (such as a layer) that run in fp8 or NVFP4: the nodes that already are
    fp8 operators and, if ``asked`` is given, the products that will be converted. ``asked``: the scaling granularity
    that the user requested (``"tensor"``, ``"row"``, ``"block"`` or ``"nvfp4"``); ``None``: none is requested, or the
    model is converted already.

    ``region``: the products of experts. With the granularity ``"tensor"`` they count as fp8 products if the planner can
    distribute them, although the runtime does not execute them in fp8. ``with_experts``: whether the same holds for
    ``"nvfp4"``, because another framework executes the plan.
    """
    found = {n for n in block.graph.nodes if n.target is ops.linear_fp8.default or is_expert_product_in_fp8(n)}
    if asked:
        found |= find_weight_products(block, asked).keys()
        whole = asked == "tensor" or (asked == "nvfp4" and with_experts)
        found |= (region.products if region.known else set()) if whole else find_expert_products(block, asked)
    return frozenset(found)


def is_expert_product_in_fp8(node: fx.Node) -> bool:
    """Return whether ``node`` is a product of experts that the runtime computes in fp8; the gradient of their weights
    is then in 16 bits."""
    return node.target is ops.expert_mm.default and len(node.args) > 3


def first_readers(block: Block, products: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the products in ``products`` for which a cast of the operand to fp8 is counted: for each operand, the
    first product of ``block`` (such as a layer) that reads it. Software such as Transformer Engine casts an operand
    once. For example, the projections to queries, keys and values read one operand, so the last two reuse the cast of
    the first."""
    states, known, found = set(block.states), set[frozenset[fx.Node]](), set[fx.Node]()
    for node in block.graph.nodes if products else ():
        if node not in products:
            continue
        sources = (skip_views(o) for o in node.all_input_nodes if o.meta["val"].dim() > 1)
        read = frozenset(s for s in sources if s.op != "placeholder" or s.name not in states)
        if read not in known:
            found.add(node)
            known.add(read)
    return frozenset(found)


class CastRules(NamedTuple):
    """How the operands of a product with its weight are cast.

    - ``fused``: whether neighbouring kernels cast, as in NVIDIA's Transformer Engine. In forward, the kernel in front
      of the product writes the operand in fp8, as it is and transposed. In backward, one kernel reads the gradient once
      and writes it twice. If not ``fused``, each product casts the tensors that it reads by itself.
    - ``first``: whether the product is the first that reads its operand. If ``fused``, only the first product needs a
      cast in forward.
    - ``apart``: whether a separate kernel casts the operand although ``fused`` is set, for example after a collective.
    - ``current``: whether a tensor is scaled by its own largest absolute value, which is computed before the cast
      (``Float8CurrentScalingQuantizer``). Computing it takes two more launches. These launches read the whole tensor
      only with ``apart``, since otherwise the preceding kernel computes the maximum.
    - ``scaling``: the scaling granularity (``"tensor"``, ``"row"`` or ``"block"``). ``"nvfp4"``: everything is in NVFP4
      instead of fp8.
    """

    fused: bool = False
    first: bool = True
    apart: bool = False
    current: bool = False
    scaling: Scaling | None = "tensor"


def in_fp8(
    kernels: list[Kernel],
    operands: list[Operand],
    results: list[Operand],
    backward: bool,
    rules: CastRules = CastRules(),  # noqa: B008  # immutable
) -> tuple[list[Kernel], list[Kernel]]:
    """Return two lists: ``kernels``, those of a product with its weight, converted to fp8 or NVFP4; and the kernels
    that cast its operands, as ``rules`` say. If the product has no weight or no 16-bit operands, return ``kernels``
    unchanged and no casts.

    ``operands``, ``results``: the tensors that the product reads and writes. ``backward``: whether ``kernels`` are
    those of the backward.
    """
    fused, first, apart, current, scaling = rules
    if not any(o.state for o in operands) or not any(k.flops for k in kernels):
        return kernels, []
    matrices = [o for o in operands if len(o.shape) > 1]
    name = format_of(scaling)
    made = [_convert_kernel_to_fp8(k, matrices, results[0], backward, name) for k in kernels]
    if made == kernels:
        return kernels, []
    if not fused:
        casts = [c for k in made if k.flops for c in _build_product_casts(k, matrices, results[0], backward, name)]
        return made, casts
    if name == "nvfp4":
        return made, _build_shared_casts(matrices, results, backward, first)
    if backward:
        gradients = float(sum(r.nbytes for r in results))
        found = [Kernel("reduction", gradients, launches=2)] if current else []
        return made, [*found, Kernel("quantize", 2.0 * gradients)]
    if not first:
        return made, []
    written = float(max((o.nbytes for o in matrices if not o.state), default=0))
    if current:
        return made, [Kernel("reduction", written * apart, launches=2), Kernel("quantize", 2.0 * written)]
    return made, [Kernel("quantize" if apart else "pointwise", written * (1 + apart), launches=int(apart))]


def _build_shared_casts(
    matrices: Sequence[Operand], results: Sequence[Operand], backward: bool, first: bool
) -> list[Kernel]:
    """Return the kernels that cast one operand of a product to NVFP4 for all products that read it, as NVIDIA's
    Transformer Engine does. One pass finds the largest absolute value of the tensor, as it is and rotated. A second
    pass writes the operand twice, for products that sum over either of its dims. In forward the operand is the one that
    is not a weight, and it is cast only if the product is the ``first`` that reads it. In ``backward`` it is the
    gradient. ``matrices``, ``results``: the operands and results of the product."""
    operands = list(results)
    if not backward:
        operands = sorted((o for o in matrices if not o.state), key=lambda o: o.nbytes)[-1:] if first else []
    if not operands:
        return []
    whole, numbers = float(sum(o.nbytes for o in operands)), float(sum(o.numel for o in operands))
    return [Kernel("reduction", whole, launches=2), Kernel("quantize", whole + 2 * numbers * _BYTES["nvfp4"])]


def _convert_kernel_to_fp8(
    kernel: Kernel, matrices: Sequence[Operand], result: Operand, backward: bool, name: str
) -> Kernel:
    """Return ``kernel`` as a kernel in the format ``name``, ``"fp8"`` or ``"nvfp4"``. It reads one byte (fp8) or 4.5
    bits (NVFP4) for each element of its operands; the dtype of its results stays. A kernel that is not a product in 16
    bits is returned unchanged. ``matrices``: the two operands of the forward product. ``result``: its result.
    ``backward``: whether ``kernel`` is one of the backward."""
    if not kernel.flops or kernel.precision not in ("bf16", "fp16"):
        return kernel
    read = [result, *(o for o in matrices if o.learned != kernel.learned)] if backward else list(matrices)
    share = 1 - _BYTES[name] / 2
    spared = sum(o.traffic * share for o in read)
    of_states = sum(o.traffic * share for o in read if o.state)
    return kernel._replace(
        precision=name,
        num_bytes=max(0.0, kernel.num_bytes - spared),
        state_bytes=max(0.0, kernel.state_bytes - of_states),
    )


def _build_product_casts(
    product: Kernel, operands: list[Operand], result: Operand, backward: bool, name: str
) -> Iterator[Kernel]:
    """Yield the kernels that cast the tensors that ``product`` reads to the format ``name``, ``"fp8"`` or ``"nvfp4"``.
    In forward, both operands are cast. In backward, the gradient of the result and the transposed other operand are
    cast. ``operands``, ``result``: the tensors that the forward product reads and writes. ``backward``: whether
    ``product`` is one of the backward."""
    build = _build_cast_kernels if name == "fp8" else partial(_build_nvfp4_casts, rotated=backward and product.learned)
    if not backward:
        yield from (cast for o in operands for cast in build(o, product, False))
        return
    gradient = result._replace(state=False)
    if name == "nvfp4":  # its random numbers follow from all its bits
        yield Kernel("reduction", float(gradient.numel * (4 if product.learned else 2)), learned=product.learned)
    yield from build(gradient, product, product.learned)
    yield from (cast for o in operands if o.learned != product.learned for cast in build(o, product, True))


def _build_nvfp4_casts(operand: Operand, product: Kernel, transposed: bool, rotated: bool) -> Iterator[Kernel]:
    """Yield the kernels that cast ``operand`` to NVFP4 for ``product``, as the runtime does on GPUs. One pass finds the
    largest absolute value of each block and of the tensor. A second pass rounds and packs the elements, and puts the
    blocks' scales in the order that the product's kernel reads. ``transposed``: whether a transposed copy is made
    first. ``rotated``: whether, in addition, the elements are multiplied by a Hadamard matrix in float32."""
    read, numbers = float(operand.nbytes), float(operand.numel)
    moved: list[tuple[str, float, int]] = []
    if transposed:
        moved.append(("pointwise", 2 * read, 1))
    if rotated:  # widened to float32, and multiplied
        moved.append(("pointwise", read + 4 * numbers, 1))
        moved.append(("pointwise", 8 * numbers, 1))
        read = 4 * numbers
    moved.append(("reduction", read, 2))
    moved.append(("quantize", read + numbers * (_BYTES["nvfp4"] + _SCALE_PASSES / NUMBERS), 1 + _SCALE_LAUNCHES))
    for kind, num_bytes, launches in moved:
        yield Kernel(kind, num_bytes, num_bytes * operand.state, launches=launches, learned=product.learned)


def _build_cast_kernels(operand: Operand, product: Kernel, transposed: bool) -> Iterator[Kernel]:
    """Yield two kernels that cast ``operand`` to fp8 for ``product``. The first finds the largest absolute value and
    computes the scale, with four launches. The second scales every element and rounds it to a byte, with two launches.
    ``transposed``: whether the bytes are also copied to a transposed tensor, with one more launch."""
    whole = float(operand.nbytes)
    bytes_out = operand.numel * (1.0 + 2.0 * transposed)
    for kind, moved, launches in (("reduction", whole, 4), ("pointwise", 3 * whole + bytes_out, 2 + transposed)):
        yield Kernel(kind, moved, moved * operand.state, launches=launches, learned=product.learned)


def least_in_fp8(
    kernels: list[Kernel],
    operands: list[Operand],
    results: list[Operand],
    backward: bool,
    device: DeviceType,
    fused: bool = False,
    first: bool = True,
    scaling: Scaling | None = "tensor",
) -> list[Kernel]:
    """Return the faster of two lists of kernels for a matrix product on ``device``, for lower bounds: ``kernels``,
    which compute in 16 bits, or the fp8 kernels with the casts of the operands. The launches of the casts are not
    counted.

    The time of the result is a lower bound for any shard of the product, because a shard whose sizes are not multiples
    of 16 runs in 16 bits even if fp8 was requested. ``operands``, ``results``: the tensors that the product reads and
    writes. ``backward``: whether the kernels are those of the backward. ``fused``: whether neighbouring kernels do the
    casts. ``first``: whether no earlier product reads the same operands. ``scaling``: the scaling granularity
    (``"tensor"``, ``"row"``, ``"block"`` or ``"nvfp4"``).
    """
    made, casts = in_fp8(kernels, operands, results, backward, CastRules(fused, first, scaling=scaling))
    made = [*made, *(cast._replace(launches=0) for cast in casts)]
    return made if _sum_kernel_seconds(made, device) < _sum_kernel_seconds(kernels, device) else kernels


def _sum_kernel_seconds(kernels: Sequence[Kernel], device: DeviceType) -> float:
    """Return the seconds of memory traffic and FLOPs of ``kernels`` on ``device``, without the time of launches."""
    return sum(
        k.num_bytes / memory_rate(k.kind, device) + (k.flops / product_rate(k, device) if k.flops else 0.0)
        for k in kernels
    )


def notes_on_fp8(
    model: FoldedModel, scaling: Scaling = "tensor", converted: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return a note for the user as a tuple with one sentence: how many products with weights run in fp8 or NVFP4, and
    why some of the others do not. The tuple is empty if all do. ``model``: the graphs of one rank. ``scaling``: the
    scaling granularity (``"tensor"``, ``"row"``, ``"block"`` or ``"nvfp4"``). ``converted``: names of the blocks (such
    as layers) that run in this format; ``None``: all."""
    short_type = format_of(scaling)
    left = {name: list(_left_out(block, scaling)) for name, block in model.blocks.items()}
    short = {name: len(products_in_fp8(b, scaling, expert_region(b))) for name, b in model.blocks.items()}
    slower = [call for call in model.calls if converted is not None and call.block not in converted]
    kept = sum(short[call.block] for call in slower)
    if kept:
        paths = list(dict.fromkeys(call.path for call in slower if short[call.block]))
        blocks = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
        every = sum(short[call.block] for call in model.calls)
        return (
            f"{kept} of {every} products that could be in {short_type} stay in 16 bits, in which {blocks} are "
            "estimated to be faster",
        )
    others = [(call.states[place], why) for call in model.calls for place, why in left[call.block]]
    if not others:
        return ()
    count = sum(short[call.block] for call in model.calls)
    first: dict[str, str] = {}  # reason -> name of the first product
    for name, why in others:
        first.setdefault(why, name)
    shown = [f"{name} ({why})" for why, name in first.items()][:_SHOWN]
    more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    return (
        f"{count} of {count + len(others)} products with weights are in {short_type}, the others in 16 bits: "
        f"{', '.join(shown)}{more}",
    )


def _left_out(block: Block, scaling: Scaling) -> Iterator[tuple[int, str]]:
    """Yield the matrix products with weights of ``block`` (such as a layer) that run in neither fp8 nor NVFP4, as pairs
    (index of the weight among the block's parameters and buffers, reason). ``scaling``: the scaling granularity: all of
    a tensor (``"tensor"``), a row (``"row"``) or 32 elements of a row (``"block"``) share a scale; or ``"nvfp4"``."""
    states, short = list(block.states), products_in_fp8(block, scaling, expert_region(block))
    deciding = find_deciding_products(block) if scaling == "nvfp4" else frozenset[fx.Node]()
    for node in block.graph.nodes:
        if node.op != "call_function" or node in short or not is_product(node) or is_attention(node):
            continue
        sources = [skip_views(o) for o in node.all_input_nodes if o.meta["val"].dim() > 1]
        weight = next((s.name for s in sources if s.op == "placeholder" and s.name in states), None)
        if weight is not None:
            why = _describe_fp8_obstacle(node, frozenset(states), scaling)
            yield states.index(weight), "a loss or a choice is made of it" if node in deciding else why


def _describe_fp8_obstacle(node: fx.Node, states: frozenset[str], scaling: Scaling) -> str:
    """Return the reason why the product ``node`` does not run in fp8 or NVFP4, for a note to the user. ``states``: the
    names of the parameters and buffers of its block (such as a layer). ``scaling``: the scaling granularity: all of a
    tensor (``"tensor"``), a row (``"row"``) or 32 elements of a row (``"block"``) share a scale; or ``"nvfp4"``."""
    product = match_weight_product(node, states)
    if product is None:
        return f"no kernel in {format_of(scaling)} for {operator_name(node)}"
    rows, inner, out = product.sizes
    aligned = alignment(scaling)
    if any(size % aligned for size in product.sizes):
        return f"{aligned} does not divide all of {rows} x {inner} by {inner} x {out}"
    return f"in {str(product.x.meta['val'].dtype).removeprefix('torch.')}"


def skip_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and is_view(node):
        node = node.all_input_nodes[0]
    return node
