"""Kernels, collectives and states (parameters and buffers) of one call of a block, extracted from its local graph.

A block is a repeated piece of the model, such as a layer. The local graph is the one that a rank runs after sharding.
The kernels are stored as a table of arrays, so that all of them are priced at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from partitioner.cost.call.expert_parallel import ExpertProducts, expert_region
from partitioner.cost.call.fp8 import (
    CastRules,
    first_readers,
    in_fp8,
    is_expert_product_in_fp8,
    products_in_fp8,
    scaling_of,
    skip_views,
)
from partitioner.cost.call.fused_regions import FusedRegions
from partitioner.cost.call.operators import (
    Kernel,
    Operand,
    add_kernel,
    backward_kernels,
    forward_kernels,
    is_attention,
    is_product,
    is_view,
    repeats_of,
)
from partitioner.cost.call.saved_activations import find_gathered_activations
from partitioner.cost.call.states import gradient_bytes
from partitioner.emit.zero import small_states
from partitioner.passes.ir.collectives import COMMUNICATING, CONTEXT, ROUTED, collective_name
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.model import Block, TensorSpec
from partitioner.passes.ops.scaled_products import Scaling
from partitioner.passes.rules.factors import operands_of, results_of
from partitioner.passes.rules.strategies import needs_gradient
from partitioner.passes.shard.overlap_products import (
    AXIS,
    match_gathered_products,
    match_scattered_products,
    reads_products_only,
)

Column = NDArray[np.float64]

Marks = NDArray[np.bool_]
Places = NDArray[np.int64]

# The collective that the gradient of a collective needs; see the table in passes/ir/collectives.py.
_TRANSPOSED = {
    ("all_gather", "reduce"): "reduce_scatter",
    ("shard_slice", ""): "all_gather",
    ("copy", ""): "all_reduce",
    ("reduce_scatter", ""): "all_gather",
    ("all_reduce", "reduce"): "all_reduce",
    ("all_to_all", ""): "all_to_all",
    ("dispatch", ""): "all_to_all",
    ("combine", ""): "all_to_all",
}
# Collectives whose operand is one rank's part, so that the whole is ``size`` times as large.
_FROM_PART = frozenset(("all_gather", "all_to_all")) | ROUTED
_OF_A_MODULE = 2.7  # host time of one linear layer of Transformer Engine, in operators
_IN_PIECES = frozenset(("all_gather", "reduce_scatter"))  # collectives that can overlap with the products next to them


@dataclass(frozen=True)
class KernelRow:
    """One GPU kernel of a block (such as a layer), and its role in the block.

    - ``kernel``: its traffic, FLOPs and launches. ``way``: 0 forward, 1 backward. ``product``: whether its operator is
      a matrix product or an attention. ``again``: whether selective recomputation runs it a second time in backward.
      ``ring``: if its operator is an attention over a sharded sequence, the index of that attention among those of the
      block; otherwise -1.
    - ``expert``: whether its operator is a matrix product of a mixture of experts. The other fields are used only if
      so. ``widest``: the smaller side of an expert's weight matrix, an upper bound on the smallest of M, N and K of the
      product. ``rows``: the number of rows (tokens) of all experts in the graph; 0: every expert processes all rows.
      ``held``: the number of experts in the graph. ``each``: whether a rank launches the kernel separately for each of
      its experts.
    """

    kernel: Kernel
    way: int
    product: bool = False
    again: bool = False
    ring: int = -1
    expert: bool = False
    widest: float = math.inf
    rows: int = 0
    held: int = 0
    each: bool = False


@dataclass(frozen=True)
class KernelTable:
    """Table of the GPU kernels of a block (such as a layer), with one array of shape ``[kernels]`` for each property.

    - ``kinds``, ``precisions``: the distinct names of kinds (such as ``"norm"``) and number formats. ``kind``,
      ``precision``: for each kernel, its index in ``kinds`` and in ``precisions``.
    - ``num_bytes``: bytes read and written. ``state_bytes``: the part of ``num_bytes`` that belongs to weights.
      ``flops``: FLOPs. ``smallest``: the smallest of M, N and K of a product. ``width``: head width of an attention.
      ``launches``: number of launches.
    - ``aligned``: whether the sizes suit matrix units. ``learned``: whether the kernel computes a gradient of weights.
      ``way``: 0 forward, 1 backward. ``product``: whether it is a matrix product or an attention. ``again``: whether
      selective recomputation runs it a second time. ``ring``: index of its attention over a sharded sequence, or -1.
    - ``expert``: whether it is a product of experts. The other fields are used only if so. ``widest``: the smaller side
      of an expert's weight. ``rows``: number of rows (tokens) of all experts; 0: every expert processes all rows.
      ``held``: number of experts. ``each``: whether it is launched for each expert separately.
    """

    kinds: tuple[str, ...]
    precisions: tuple[str, ...]
    kind: Places
    precision: Places
    num_bytes: Column
    state_bytes: Column
    flops: Column
    smallest: Column
    width: Column
    launches: Column
    aligned: Marks
    learned: Marks
    way: Places
    product: Marks
    again: Marks
    ring: Places
    expert: Marks
    widest: Column
    rows: Column
    held: Column
    each: Marks

    def cut_rows(self, places: Sequence[int], rows: int, pieces: int) -> KernelTable:
        """Return a table of the kernels at ``places``, each with one of ``pieces`` equal parts of its rows. Every part
        reads the whole weight. ``places``: indices of matrix products in this table, all with ``rows`` rows."""
        here = np.array(places)
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        found = replace(self, **{name: c[here] for name, c in columns.items() if isinstance(c, np.ndarray)})
        return replace(
            found,
            num_bytes=(found.num_bytes - found.state_bytes) / pieces + found.state_bytes,
            flops=found.flops / pieces,
            smallest=np.minimum(found.smallest, rows / pieces),
        )

    @staticmethod
    def of(rows: Sequence[KernelRow]) -> KernelTable:
        """Return the table of the kernels ``rows`` of a block (such as a layer): arrays with one entry for each kernel,
        in the order of ``rows``."""
        kernels = [row.kernel for row in rows]
        kinds = list(dict.fromkeys(k.kind for k in kernels))
        precisions = list(dict.fromkeys(k.precision for k in kernels))
        return KernelTable(
            kinds=tuple(kinds),
            precisions=tuple(precisions),
            kind=np.array([kinds.index(k.kind) for k in kernels], np.int64),
            precision=np.array([precisions.index(k.precision) for k in kernels], np.int64),
            num_bytes=np.array([k.num_bytes for k in kernels], np.float64),
            state_bytes=np.array([k.state_bytes for k in kernels], np.float64),
            flops=np.array([k.flops for k in kernels], np.float64),
            smallest=np.array([k.smallest for k in kernels], np.float64),
            width=np.array([k.width for k in kernels], np.float64),
            launches=np.array([k.launches for k in kernels], np.float64),
            aligned=np.array([k.aligned for k in kernels], np.bool_),
            learned=np.array([k.learned for k in kernels], np.bool_),
            way=np.array([row.way for row in rows], np.int64),
            product=np.array([row.product for row in rows], np.bool_),
            again=np.array([row.again for row in rows], np.bool_),
            ring=np.array([row.ring for row in rows], np.int64),
            expert=np.array([row.expert for row in rows], np.bool_),
            widest=np.array([row.widest for row in rows], np.float64),
            rows=np.array([row.rows for row in rows], np.float64),
            held=np.array([row.held for row in rows], np.float64),
            each=np.array([row.each for row in rows], np.bool_),
        )


@dataclass(frozen=True)
class Exchange:
    """A collective of the block (such as a layer) over a mesh axis.

    - ``way``: 0 forward, 1 backward. ``op``: name of the collective. ``axis``: name of the mesh axis.
    - ``nbytes``: bytes of its operand. ``from_part``: whether the operand is one rank's part of the tensor, as in an
      all-gather, instead of the whole tensor.
    - ``strided``: whether the dim that it joins or splits is not outermost in memory, so that the data are copied.
      ``in_pieces``: whether it can be split into pieces that overlap with matrix products. ``anew``: whether it is an
      all-gather that backward repeats unless its result is kept.
    """

    way: int
    op: str
    axis: str
    nbytes: int
    from_part: bool
    strided: bool
    in_pieces: bool
    anew: bool = False


@dataclass(frozen=True)
class ProductExchange:
    """A collective over ``tp`` that can run in pieces, each at the same time as the matrix product of another piece: an
    all-gather whose result is multiplied, or a reduce-scatter of the result of products.

    ``place``: its index among the collectives of the block (such as a layer). ``products``: indices of the kernels of
    the products. ``rows``: rows of each product. ``length``: size of the sharded dim on one rank. ``copied_bytes``:
    bytes of products or of their operands that are copied if the sharded dim is not outermost in memory.
    """

    place: int
    products: tuple[int, ...]
    rows: int
    length: int
    copied_bytes: float


@dataclass(frozen=True)
class StateRead:
    """A parameter or buffer that a block (such as a layer) reads.

    ``name``: its name in the block. ``nbytes``: its bytes in the block's graph, which has one rank's shapes before
    ZeRO. ``gradient_bytes``: the bytes of its accumulated gradient; 0 if it has none. ``expert``: whether it belongs to
    experts. ``small``: whether it is so small that ZeRO-3 does not shard it.
    """

    name: str
    nbytes: int
    gradient_bytes: int
    expert: bool
    small: bool = False

    def sizes(self, short_gradients: bool, share: float = 1.0) -> tuple[float, float]:
        """Return two numbers for a rank that holds the fraction ``share`` (0 to 1) of this parameter, such as a part of
        the experts: the bytes of the parameter and the bytes of its gradient. ``short_gradients``: whether the gradient
        has the parameter's dtype, even if gradients are otherwise accumulated in float32."""
        gradient = min(self.nbytes, self.gradient_bytes) if short_gradients else self.gradient_bytes
        return self.nbytes * share, gradient * share


@dataclass(frozen=True)
class BlockProfile:
    """Kernels, collectives, parameters and buffers of one call of a block (such as a layer).

    - ``kernels``: the table of GPU kernels. ``exchanges``: the collectives. ``states``: the parameters and buffers that
      the call reads. ``rings``: the attentions over a sharded sequence, as pairs (node, whether it has a backward).
    - ``issued``: number of operators that the host launches in forward, in backward for gradients of inputs, and in
      backward for gradients of weights, without those launched once per expert. ``issued_each``: for the same three
      parts, the number of operators that the host launches once per expert.
    - ``held``: number of experts in the graph. ``region``: the matrix products of experts. ``routing``: number of
      forward operators between the attention and the experts, which route tokens to experts.
    - ``beside``: the collectives that can run in pieces, each at the same time as the matrix product of another piece.
    """

    kernels: KernelTable
    issued: tuple[float, float, float]
    issued_each: tuple[float, float, float]
    held: int
    exchanges: tuple[Exchange, ...]
    rings: tuple[tuple[fx.Node, bool], ...]
    states: tuple[StateRead, ...]
    region: ExpertProducts
    routing: int = 0
    beside: tuple[ProductExchange, ...] = ()


def asked_by(
    block: Block,
    train: bool,
    fp8: Scaling | None = None,
    again: Container[fx.Node] = (),
    fused_casts: bool = False,
    expert_kernels: str = "grouped",
    current_scaling: bool = False,
    fused_kernels: bool = False,
) -> BlockProfile:
    """Return the kernels and collectives of one call of ``block``, and the parameters and buffers that it reads.
    ``block``: a piece of the model, such as a layer, as the graph that one rank runs, with its collectives.

    ``train``: whether to include the backward. ``fp8``: the scaling granularity of matrix products with weights in fp8
    (``"tensor"``, ``"row"`` or ``"block"``); ``"nvfp4"``: these products run in NVFP4; ``None``: they run in neither
    format. ``fused_casts``: whether the kernels in front of these products write the operands in fp8. ``again``: the
    nodes that selective recomputation runs a second time. ``expert_kernels``: how the matrix products of experts run:
    ``"grouped"`` (one kernel for all experts), ``"each"`` (one kernel per expert) or ``"fused"`` (kernels that also do
    the work of the operators between the products). ``current_scaling``: whether the fp8 scale of a tensor comes from
    its own maximum. ``fused_kernels``: whether a compiler merges operators between products and collectives.
    """
    profiler = _BlockProfiler(block, train, fp8, again, fused_casts, expert_kernels, current_scaling)
    return profiler.read(FusedRegions(block, train) if fused_kernels else None)


class _BlockProfiler:
    """Collects the kernels and collectives of the operators of ``block``, such as a layer.

    ``train``: whether the block has a backward. ``fp8``: the scaling granularity of products with weights in fp8
    (``"tensor"``, ``"row"`` or ``"block"``); ``"nvfp4"``: they run in NVFP4; ``None``: they run in neither format.
    ``again``: the nodes that selective recomputation runs a second time, in backward. ``fused_casts``: whether the
    kernels in front of products write operands in fp8. ``current_scaling``: whether each tensor is scaled to fp8 by its
    own maximum. ``expert_kernels``: how the experts' products run: ``"grouped"`` (one kernel for all experts),
    ``"each"`` (one kernel per expert) or ``"fused"`` (kernels that also do the work of the operators between the
    products).
    """

    def __init__(
        self,
        block: Block,
        train: bool,
        fp8: Scaling | None,
        again: Container[fx.Node],
        fused_casts: bool = False,
        expert_kernels: str = "grouped",
        current_scaling: bool = False,
    ) -> None:
        self.block, self.train, self.again, self.fused_casts = block, train, again, fused_casts
        self.expert_kernels, self.current_scaling = expert_kernels, current_scaling
        self.names = set(block.states)
        self.learned = learned_nodes(block)
        self.region = expert_region(block)
        self.fp8, elsewhere = fp8, fp8 == "nvfp4" and fused_casts  # fused casts are those of another framework
        self.short = products_in_fp8(block, fp8, self.region, with_experts=elsewhere)
        # products for gradients of experts' weights are in 16 bits
        self.has_long_gradients = fp8 is not None and fp8 != "tensor" and not elsewhere
        self.first = first_readers(block, self.short | self.region.products)
        self.gathers = find_gathered_activations(block) if train else frozenset[fx.Node]()
        self.rows: list[KernelRow] = []
        self.exchanges: list[Exchange] = []
        self.sources: list[fx.Node] = []  # for each exchange, the collective that it is, or whose gradient it is
        self.places: dict[tuple[fx.Node, int], list[int]] = {}  # (operator, 0 forward or 1 backward) -> its kernels
        self.rings: list[tuple[fx.Node, bool]] = []
        self.issued: list[float] = [0.0, 0.0, 0.0]
        self.each: list[float] = [0.0, 0.0, 0.0]
        self.modules = module_operators(block, self.region) if expert_kernels == "each" else {}
        self.fused = find_nodes_between(self.region.products) if expert_kernels == "fused" else frozenset[fx.Node]()
        self.routing, self.among_experts = 0, False
        self.merged: dict[fx.Node, int] = {}
        self.compiled = False

    def read(self, merged: FusedRegions | None = None) -> BlockProfile:
        """Collect the kernels and collectives of every operator of the block (such as a layer), and return them with
        the parameters and buffers that the block reads. ``merged``: the regions (sets of operators) that a compiler
        merges into one kernel each; ``None``: none are merged.
        """
        if merged is not None:
            self.merged = {n: number for n, number in merged.region.items() if n not in self.fused}
            self.compiled = True
        regions: list[int | None] = []  # the merged region of each kernel
        for node in self.block.graph.nodes:
            if node.op == "call_function":
                self._profile_operator(node)
                regions += [self.merged.get(node)] * (len(self.rows) - len(regions))
        if merged is not None:
            for way, launches in enumerate(merge_rows(self.rows, regions, merged)):
                self.issued[way] += launches
        placeholders = {n.name: n for n in self.block.placeholders}
        experts = self.region.states
        for node in self.block.placeholders if self.train else ():
            for kernel in _build_accumulation_kernels(node, self.names):
                self.rows.append(KernelRow(kernel, 1, expert=node.name in experts))
                self.issued[2] += 1
        small = small_states({name: placeholders[name].meta["val"].nbytes for name in self.block.states})
        states = tuple(
            StateRead(name, node.meta["val"].nbytes, gradient_bytes_of(node), name in experts, name in small)
            for name, node in ((name, placeholders[name]) for name in self.block.states)
        )
        (ahead, back, later), (each_ahead, each_back, each_later) = self.issued, self.each
        return BlockProfile(
            KernelTable.of(self.rows),
            (ahead, back, later),
            (each_ahead, each_back, each_later),
            max((row.held for row in self.rows), default=0),
            tuple(self.exchanges),
            tuple(self.rings),
            states,
            self.region,
            self.routing,
            tuple(self._list_product_exchanges()),
        )

    def _profile_operator(self, node: fx.Node) -> None:
        """Record the kernels and collectives of ``node``, forward and backward, and count the operators that the host
        launches for it.
        """
        operands, results = node_operands(node, self.names, self.learned)
        backward = self.train and needs_gradient(node)
        kernels = forward_kernels(node, operands, results)
        if node in self.fused:
            kernels = _fuse_kernels(kernels, self._count_fused_bytes(node, operands, results, way=0))
        place = -1
        if collective_name(node.target) in CONTEXT:
            place = len(self.rings)
            self.rings.append((node, backward))
        self._add_kernel_rows(0, node, self._build_fp8_kernels(0, node, kernels, operands, results), operands, place)
        self._add_exchanges(node, backward)
        name = collective_name(node.target)
        issued = self.each if self._runs_each(node) else self.issued
        issued[0] += name != "copy" and self._is_issued(node)  # a copy does nothing in forward
        if not self.among_experts:
            self.among_experts = node in self.region.products
            self.routing = 0 if is_attention(node) else self.routing + (name is None and not is_view(node))
        more = self.modules.get(node, 0.0)
        self.issued[0] += more
        self.issued[1] += more * backward
        if backward:
            kernels = [*backward_kernels(node, operands, results, operand_needs(node)), *fan_out(node)]
            if node in self.fused:
                kernels = _fuse_kernels(kernels, self._count_fused_bytes(node, operands, results, way=1))
            kernels = self._build_fp8_kernels(1, node, kernels, operands, results)
            self._add_kernel_rows(1, node, kernels, operands, place)
            later = sum(kernel.learned for kernel in kernels)
            besides = not kernels if name is None else _transpose_collective(node) is not None
            if self._is_issued(node):
                issued[1] += besides + len(kernels) - later
                issued[2] += later

    def _build_fp8_kernels(
        self, way: int, node: fx.Node, kernels: list[Kernel], operands: list[Operand], results: list[Operand]
    ) -> list[Kernel]:
        """Return the kernels that run ``node``. If ``node`` is a product in fp8, these are ``kernels`` with fp8
        operands, followed by the kernels that cast its operands, and each launch of a cast is added to the operators
        that the host launches. Otherwise they are ``kernels``, unchanged.

        ``kernels``: the kernels of ``node`` without fp8. ``way``: 0 forward, 1 backward. ``operands``, ``results``: the
        tensors that ``node`` reads and writes.
        """
        if node not in self.short:
            return kernels
        apart = node in self.region.products and self._cast_needs_own_kernel(node)
        how = self.fused_casts, node in self.first, apart, self.current_scaling, scaling_of(node, self.fp8)
        made, casts = in_fp8(kernels, operands, results, way == 1, CastRules(*how))
        if self.has_long_gradients or is_expert_product_in_fp8(node):
            made = [
                old if old.learned and node in self.region.products else new
                for old, new in zip(kernels, made, strict=True)
            ]
            casts = [c for c in casts if not (c.learned and node in self.region.products)]
        issued = self.each if self._runs_each(node) else self.issued
        for cast in casts:  # backward, a kernel is counted as one operator
            issued[2 if cast.learned else way] += max(0, cast.launches - way) * self._is_issued(node)
        return [*made, *casts]

    def _count_fused_bytes(
        self, node: fx.Node, operands: Sequence[Operand], results: Sequence[Operand], way: int
    ) -> float:
        """Return the bytes of memory traffic that ``node`` adds to the fused kernels of experts' products, which do the
        work of ``node``, too. Values between two fused operators stay inside the kernel and count nothing.

        Forward (``way`` 0) reads the operands that come from outside of the fused kernels. It writes the results if
        other operators read them. Backward (``way`` 1) reads the operands from outside and the saved results of
        products, and writes as many bytes of gradients. ``operands``, ``results``: the tensors that ``node`` reads and
        writes.
        """
        sources = [skip_views(o) for o in tensors_of(node)]
        kept = self.fused if way == 1 else self.fused | self.region.products  # in the kernel's own memory
        read = sum(o.traffic for source, o in zip(sources, operands, strict=True) if source not in kept)
        if way == 1:
            return 2.0 * read
        is_written = any(user not in self.fused for user in node.users)
        return read + is_written * sum(result.nbytes for result in results)

    def _runs_each(self, node: fx.Node) -> bool:
        """Return whether ``node`` is a matrix product of experts (mixture of experts) that the host launches separately
        for each expert.
        """
        return self.expert_kernels == "each" and node in self.region.products

    def _is_issued(self, node: fx.Node) -> bool:
        """Return whether the host launches an operator for ``node``. It launches none if a fused kernel of experts does
        the work of ``node``, if a compiler merges ``node`` with others into one kernel (whose launches are counted
        elsewhere), or if ``node`` is a view in compiled code. If each expert's products are launched separately,
        several products with the same operand are launched as one, because their weights are adjacent in memory: only
        the first counts."""
        if node in self.merged or (self.compiled and is_view(node)):
            return False
        return node not in self.fused and (not self._runs_each(node) or node in self.first)

    def _cast_needs_own_kernel(self, node: fx.Node) -> bool:
        """Return whether a separate kernel casts an operand of ``node``, a matrix product of experts, to fp8, because
        the kernel before it cannot. This holds for rows (tokens) that a collective has just delivered and, if each
        expert's product is launched separately, for every operand.
        """
        return self.expert_kernels == "each" or bool(self.region.reads_entry(node))

    def _add_kernel_rows(
        self, way: int, node: fx.Node, kernels: Sequence[Kernel], operands: Sequence[Operand], ring: int
    ) -> None:
        """Append ``kernels``, which run ``node``, to the list of kernels of the block (such as a layer). ``way``: 0
        forward, 1 backward. ``operands``: the tensors that ``node`` reads. ``ring``: if ``node`` is an attention over a
        sharded sequence, its index among these attentions of the block; otherwise -1."""
        expert, product = node in self.region.products, any(k.flops for k in kernels)
        matrices = [o.shape for o in operands if o.state and len(o.shape) == 3] if expert else []
        self.places.setdefault((node, way), []).extend(range(len(self.rows), len(self.rows) + len(kernels)))
        for kernel in kernels:
            self.rows.append(
                KernelRow(
                    kernel,
                    way,
                    product,
                    again=way == 0 and node in self.again,
                    ring=ring,
                    expert=expert,
                    widest=min((min(shape[1:]) for shape in matrices), default=math.inf),
                    rows=operands[0].shape[0] if expert and len(operands[0].shape) == 2 else 0,
                    held=matrices[0][0] if matrices else 0,
                    each=self._runs_each(node),
                )
            )

    def _add_exchanges(self, node: fx.Node, backward: bool) -> None:
        """If ``node`` is a collective, record it and, if ``backward``, also the collective that the gradient of
        ``node`` needs. Attentions over a sharded sequence are ignored here and recorded elsewhere."""
        name = collective_name(node.target)
        source = node.args[0] if node.args else None
        if name is None or name in CONTEXT or not isinstance(source, fx.Node):
            return
        operand: Tensor = source.meta["val"]
        dim = node.args[1] if isinstance(node.args[1], int) else 0
        common = partial(
            Exchange,
            axis=next(a for a in node.args if isinstance(a, str)),
            nbytes=operand.nbytes,
            from_part=name in _FROM_PART,
            strided=any(size != 1 for size in operand.shape[:dim]),
            in_pieces=name in _IN_PIECES,
        )
        op = "all_to_all" if name in ROUTED else name
        if name in COMMUNICATING:
            self.exchanges.append(common(way=0, op=op, anew=backward and node in self.gathers))
            self.sources.append(node)
        back = _transpose_collective(node)
        if backward and back:
            self.exchanges.append(common(way=1, op=back))
            self.sources.append(node)

    def _list_product_exchanges(self) -> Iterator[ProductExchange]:
        """Yield the collectives of the block (such as a layer) that can be split into pieces, so that one piece is
        communicated while another is multiplied. The rules are those by which the runtime splits collectives
        (``passes/shard/overlap_products.py``)."""
        for place, (exchange, node) in enumerate(zip(self.exchanges, self.sources, strict=True)):
            if exchange.axis != AXIS or not exchange.in_pieces:
                continue
            gathers = collective_name(node.target) == "all_gather"
            matched = match_gathered_products(node) if gathers else match_scattered_products(node)
            if exchange.way == 1 and gathers and not reads_products_only(node, matched):
                continue  # its gradient is a sum of products and of other gradients
            kernels = [
                i
                for product in matched
                for i in self.places.get((product.node, exchange.way), ())
                if self.rows[i].kernel.flops and not self.rows[i].kernel.learned
            ]
            if not kernels or any(p.node in self.short or p.node in self.region.products for p in matched):
                continue
            whole = node.meta["val"] if gathers else node.all_input_nodes[0].meta["val"]
            inside = [p.node if exchange.op == "all_gather" else p.x for p in matched]
            if exchange.way == 1:
                inside = [p.x if exchange.op == "all_gather" else p.node for p in matched]
            size = node.args[3]
            assert isinstance(size, int) and isinstance(node.args[1], int)
            yield ProductExchange(
                place,
                tuple(kernels),
                whole.numel() // whole.shape[-1],
                whole.shape[node.args[1]] // size,
                float(sum(value.meta["val"].nbytes for value in inside)) * exchange.strided,
            )


def merge_rows(rows: list[KernelRow], regions: Sequence[int | None], merged: FusedRegions) -> tuple[int, int]:
    """Replace the kernels of operators that a compiler merges, in place in ``rows``. A compiler merges each region (set
    of operators) to one kernel in forward and one in backward. Each old kernel becomes a share of the merged kernel;
    the shares add up to its bytes and launches. Return the number of launches of all merged kernels, as (forward,
    backward).

    ``rows``: the kernels of a block (such as a layer). ``regions``: for each of ``rows``, the number of its operator's
    region in ``merged``, or ``None`` if its operator is not merged. ``merged``: the regions.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for place, region in enumerate(regions):
        if region is not None:
            places.setdefault((region, rows[place].way), []).append(place)
    issued, traffic = [0, 0], merged.traffic()
    for (region, way), here in places.items():
        moved = traffic[region].backward if way else traffic[region].forward
        parts = _fuse_kernels([rows[place].kernel for place in here], moved)
        launches = min(1 + way * traffic[region].over_rows, sum(rows[place].kernel.launches for place in here))
        parts[0] = parts[0]._replace(launches=launches)
        issued[way] += launches
        for place, kernel in zip(here, parts, strict=True):
            rows[place] = replace(rows[place], kernel=kernel)
    return issued[0], issued[1]


def find_nodes_between(products: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the graph nodes of operators and views on all paths from one of the nodes ``products`` to another, without
    ``products`` themselves.
    """
    behind = _reach_nodes(products, lambda node: node.users)
    ahead = _reach_nodes(products, lambda node: node.all_input_nodes)
    return frozenset((behind & ahead).difference(products))


def _reach_nodes(starts: Collection[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return all graph nodes that repeated application of ``step`` (function from a node to the next nodes) reaches
    from ``starts``. A start is included only if it is reached from a start.
    """
    found: set[fx.Node] = set()
    left = list(starts)
    while left:
        for node in step(left.pop()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def _fuse_kernels(kernels: Sequence[Kernel], num_bytes: float) -> list[Kernel]:
    """Return ``kernels`` as shares of one fused kernel that moves ``num_bytes`` bytes of memory traffic. Each share has
    0 launches. The bytes of ``kernels`` are scaled down in proportion so that they add up to ``num_bytes``; if they add
    up to less, they stay as they are."""
    total = sum(kernel.num_bytes for kernel in kernels)
    share = min(1.0, num_bytes / total) if total else 0.0
    return [kernel._replace(num_bytes=kernel.num_bytes * share, launches=0) for kernel in kernels]


def _transpose_collective(node: fx.Node) -> str | None:
    """Return the name of the collective that the gradient of ``node``, a collective, needs; ``None`` if the gradient
    passes unchanged.
    """
    name = collective_name(node.target) or ""
    return _TRANSPOSED.get((name, str(node.args[-1]) if name in ("all_gather", "all_reduce") else ""))


def module_operators(block: Block, region: ExpertProducts) -> dict[fx.Node, float]:
    """Return the additional host time of each linear layer of ``block`` if Transformer Engine runs it instead of torch:
    first matrix product of the layer -> time in multiples of one operator launch. Products that read the same value are
    one linear layer. ``block``: a piece of the model, such as a decoder layer. ``region``: the products of experts,
    which are left out.

    A linear layer of Transformer Engine takes 2.7 times the host time of torch's in forward (100 us over 37 on GB200,
    91 over 33 on GH200: NVIDIA/TransformerEngine issue 2053).
    """
    states, layers = set(block.states), dict[frozenset[fx.Node], list[fx.Node]]()
    for node in block.graph.nodes:
        if not is_product(node) or is_attention(node) or node in region.products:
            continue
        read = tensors_of(node)
        if any(is_state(o, states) for o in read):
            layers.setdefault(frozenset(o for o in read if not is_state(o, states)), []).append(node)
    return {nodes[0]: max(0.0, _OF_A_MODULE - len(nodes)) for nodes in layers.values()}


def learned_nodes(block: Block) -> set[fx.Node]:
    """Return the parameters and buffers of ``block`` (such as a layer), and all nodes that are computed from parameters
    and buffers alone."""
    states = set(block.states)
    found = {node for node in block.placeholders if node.name in states}
    for node in block.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def node_operands(
    node: fx.Node, states: set[str], learned: Container[fx.Node], copied: bool = False
) -> tuple[list[Operand], list[Operand]]:
    """Return two lists: the tensors that ``node`` reads and the tensors that it computes.

    ``states``: names of the parameters and buffers of the block (such as a layer). ``learned``: nodes computed from
    parameters and buffers alone. ``copied``: whether elements that ``expand`` repeated count as repeated
    (``Operand.repeats``) even after a reshape that copied them.
    """
    read = [(o.meta["val"], is_state(o, states), o in learned, repeats_of(o, copied)) for o in tensors_of(node)]
    operands = [Operand(tuple(v.shape), v.dtype, state, made, repeats) for v, state, made, repeats in read]
    results = [Operand(tuple(r.shape), r.dtype) for r in results_of(node) if isinstance(r, Tensor)]
    return operands, results


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands of ``node`` that are single tensors, in order."""
    return [o for o in operands_of(node) if isinstance(o.meta["val"], Tensor)]


def operand_needs(node: fx.Node) -> list[bool]:
    """Return, for each tensor operand of ``node`` in order, whether the operand needs a gradient."""
    return [needs_gradient(o) for o in tensors_of(node)]


def fan_out(node: fx.Node) -> list[Kernel]:
    """Return the kernels that add up the gradients of the value of ``node`` if several nodes read it. If ``n`` of the
    reading nodes need a gradient, there are ``n - 1`` kernels."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not is_differentiable(value):
        return []
    readers = sum(needs_gradient(user) for user in node.users if user.op == "call_function")
    return [add_kernel(Operand(tuple(value.shape), value.dtype))] * max(0, readers - 1)


def is_state(node: fx.Node, states: set[str]) -> bool:
    """Return whether ``node`` is a parameter or buffer (one of ``states``), or a view of one."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.name in states


def gradient_bytes_of(placeholder: fx.Node) -> int:
    """Return the bytes of the accumulated gradient of a parameter; 0 if it has no gradient. ``placeholder``: the graph
    node by which a block (such as a layer) reads the parameter.
    """
    return gradient_bytes(TensorSpec.from_tensor(placeholder.meta["val"]), False) if needs_gradient(placeholder) else 0


def _build_accumulation_kernels(placeholder: fx.Node, states: set[str]) -> list[Kernel]:
    """Return a list with the kernel that adds a parameter's gradient to the sum over earlier microbatches. The list is
    empty if ``placeholder``, an input of a graph, is not a parameter or has no gradient. ``states``: names of the
    parameters and buffers that the graph reads."""
    if placeholder.name not in states or not needs_gradient(placeholder):
        return []
    value = placeholder.meta["val"]
    return [add_kernel(Operand(tuple(value.shape), value.dtype, state=True, learned=True))]
