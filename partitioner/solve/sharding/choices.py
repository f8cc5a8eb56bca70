"""List the layouts and strategies that the sharding solver may choose from.

``value_options`` and ``state_options`` list the layouts of values between calls and of states (parameters and buffers).
``list_operator_strategies`` lists the strategies of each operator. Most layouts shard a whole dim or nothing. Some
operators shard a dim only in sections, which are parts that are each sharded separately (the pieces of a fused
projection, an inner factor of a reshape). The section layouts of an operator are offered to the operators that produce
or read its values. These may offer further ones, until no new layout appears.

``matmul_flops`` counts the FLOPs of matrix products, which measure how much work a sharding divides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, can_shard_evenly, make_shard_layout
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.rules import build_call_key, factors_of
from partitioner.passes.rules.factors import Strategy, operands_of, results_of
from partitioner.passes.rules.strategies import NO_SIZES, enumerate_strategies
from partitioner.solve.sharding.layout_ties import BlockValue, LayoutTie


class ShardingError(PartitionError):
    """Error that is raised if no sharding satisfies the request: a fixed layout is impossible, or the required layouts
    contradict each other.
    """


@dataclass(frozen=True)
class LayoutRules:
    """Layouts that the caller of the solver fixes, by the name of a value or of a state (parameter or buffer).

    ``inputs``: the layouts that a model input may have; an input without an entry is replicated. ``outputs``: the
    layouts that a model output may have; an output without an entry is sharded or replicated. ``pins``: the one layout
    of a value, input or state; for a replicated parameter the solver chooses whether its gradient is a partial sum.
    ``states``: the one layout of a state, where ``R`` and ``R'`` (partial-sum gradient) are distinguished.
    ``whole_states``: whether no state may be sharded, so that the gradient of a trained state is a partial sum.
    ``partial_values``: whether values between calls of blocks (such as layers) may be partial sums. ``lengths``:
    sequence lengths; dims of these sizes may be sharded zigzag (each rank has a piece from the start and one from the
    end), and operators may also shard several dims at once."""

    inputs: Mapping[str, Collection[Layout]] = field(default_factory=dict)
    outputs: Mapping[str, Collection[Layout]] = field(default_factory=dict)
    pins: Mapping[str, Layout] = field(default_factory=dict)
    states: Mapping[str, Layout] = field(default_factory=dict)
    whole_states: bool = False
    partial_values: bool = False
    lengths: frozenset[int] = frozenset()

    def check(self, model: FoldedModel) -> None:
        """Raise :class:`ShardingError` if a name in ``pins`` (fixed layouts), ``inputs`` or ``outputs`` is not a value,
        parameter or buffer of ``model``. ``model``: the model as calls of blocks; equal layers share one block.
        """
        aliases = {a for state in model.states.values() for a in state.aliases}
        for what, names in (("pins", self.pins), ("inputs", self.inputs), ("outputs", self.outputs)):
            for name in names:
                if name not in model.values and name not in model.states and name not in aliases:
                    raise ShardingError(
                        f"{what}: no value or state is called {name!r}; expected one of the model's "
                        f"{len(model.states)} states or {len(model.values)} values between calls"
                    )


FREE_LAYOUTS = LayoutRules()  # nothing is fixed


def _list_dim_shards(tie: LayoutTie, num_ranks: int) -> list[Layout]:
    """Return the layouts that shard one dim of the tensors of ``tie`` (tensors that must share one layout) over
    ``num_ranks`` ranks, one for each dim whose size ``num_ranks`` divides."""
    layouts = [make_shard_layout(d) for d, size in enumerate(tie.spec.shape) if size > 0]
    return [layout for layout in layouts if can_shard_evenly(layout, tie.spec.shape, num_ranks)]


def _list_zigzag_shards(tie: LayoutTie, num_ranks: int, rules: LayoutRules) -> list[Layout]:
    layouts = [make_shard_layout(d, (), True) for d, size in enumerate(tie.spec.shape) if size in rules.lengths]
    return [layout for layout in layouts if can_shard_evenly(layout, tie.spec.shape, num_ranks)]


def value_options(model: FoldedModel, tie: LayoutTie, num_ranks: int, rules: LayoutRules) -> list[Layout]:
    """Return the layouts that the values of ``tie`` (values that must share one layout) may have. ``model``: the model
    as calls of blocks; equal layers share one block. ``rules``: layouts that the caller fixes. ``num_ranks``: size of
    the mesh axis over which the model is sharded. Raises :class:`ShardingError` if ``rules`` leave no layout."""
    read = {v for call in model.calls for v in call.inputs}
    inputs = {i.value for i in model.inputs}
    outputs = {o.value for o in model.outputs if o.value is not None}
    options = [REPLICATED, *_list_dim_shards(tie, num_ranks), *_list_zigzag_shards(tie, num_ranks, rules), READ_SHARDED]
    ends = all(name in outputs and name not in read for name in tie.names)
    if ends or rules.partial_values:
        options.append(PARTIAL)
    limits: list[tuple[str, str, Collection[Layout]]] = []
    for name in tie.names:
        if name in inputs:
            limits.append((name, "an input", rules.inputs.get(name, (REPLICATED,))))
        if name in rules.outputs:
            limits.append((name, "an output", rules.outputs[name]))
        elif name in outputs and name not in rules.pins:
            limits.append((name, "an output", [o for o in options if o != PARTIAL]))
        if name in rules.pins:
            limits.append((name, "pinned", (rules.pins[name],)))
    return _restrict_layouts(options, limits, tie, num_ranks)


def state_options(
    model: FoldedModel, tie: LayoutTie, num_ranks: int, rules: LayoutRules, trained: bool, asked: Iterable[Layout]
) -> list[Layout]:
    """Return the layouts that the states of ``tie`` (parameters or buffers that must share one layout) may have.

    ``model``: the model as calls of blocks (such as layers). ``num_ranks``: size of the mesh axis. ``rules``: layouts
    that the caller fixes. ``trained``: whether the states receive gradients. ``asked``: layouts that shard a dim in
    several sections (such as the query, key and value parts of one weight), for which some operator has a use. Raise
    :class:`ShardingError` if ``rules`` leave no layout.
    """
    options = [REPLICATED, *_list_dim_shards(tie, num_ranks)]
    options += [layout for layout in dict.fromkeys(asked) if layout.is_shard and layout not in options]
    if trained:
        options.append(READ_SHARDED)
    limits: list[tuple[str, str, Collection[Layout]]] = []
    if rules.whole_states:
        limits.append((tie.names[0], "a state", (READ_SHARDED if trained else REPLICATED,)))
    for name in tie.names:
        if name in rules.states:
            limits.append((name, "in the layout of the plan's first program", (rules.states[name],)))
        for alias in (name, *model.states[name].aliases):
            if alias in rules.pins:
                limits.append((alias, "pinned", _pinned_state(rules.pins[alias], trained)))
    for _, _, allowed in limits:  # a pin may cut a state in sections that no operator asked for
        options += [
            a for a in allowed if a not in options and can_shard_evenly(a, tie.spec.shape, num_ranks) and a != PARTIAL
        ]
    return _restrict_layouts(options, limits, tie, num_ranks)


def _pinned_state(layout: Layout, trained: bool) -> Collection[Layout]:
    """Return the layouts that a parameter or buffer may have if the user fixed ``layout`` for it. The result is
    ``layout`` alone, except for a trained parameter that is fixed as replicated: its gradient may be complete on every
    rank (``R``) or a partial sum (``R'``). ``trained``: whether it receives a gradient."""
    return (REPLICATED, READ_SHARDED) if layout == REPLICATED and trained else (layout,)


def _restrict_layouts(
    options: list[Layout], limits: list[tuple[str, str, Collection[Layout]]], tie: LayoutTie, num_ranks: int
) -> list[Layout]:
    """Return the layouts in ``options`` that all ``limits`` allow. ``limits``: triples of a tensor's name, the reason
    of the limit in words, and the allowed layouts. Raises :class:`ShardingError` if no layout is left. Its message
    contains ``tie`` (the tensors) and ``num_ranks`` (size of the mesh axis)."""
    left = [o for o in options if all(o in allowed for _, _, allowed in limits)]
    if not left:
        said = "; ".join(f"{name!r} is {why} {' or '.join(map(str, allowed))}" for name, why, allowed in limits)
        raise ShardingError(
            f"no layout is possible for {_format_tie_names(tie)} of shape {list(tie.spec.shape)} over "
            f"{num_ranks} ranks: its shape allows {', '.join(map(str, options))}, but {said}. Change one of "
            "these requirements, or the number of ranks"
        )
    return left


def _format_tie_names(tie: LayoutTie) -> str:
    return repr(tie.names[0]) + (f" (tied to {len(tie.names) - 1} more)" if len(tie.names) > 1 else "")


MAX_WANTED = 6  # section layouts of one value that are passed on


Wishes = Mapping[int, tuple[Layout, ...]]  # operand i or result ~k -> section layouts that neighbours use


class StrategyCache:
    """A cache of the strategies (layouts of operands and results) of operators on ``num_ranks`` ranks. Equal operators,
    such as those of equal parts of different layers, share one entry. ``lengths``: sequence lengths; dims of these
    sizes may be sharded zigzag (each rank has a piece from the start and one from the end)."""

    def __init__(self, num_ranks: int, lengths: Collection[int] = NO_SIZES) -> None:
        self._num_ranks, self._lengths = num_ranks, lengths
        self._kinds: dict[Hashable, dict[Hashable, list[Strategy]]] = {}

    def of_kind(self, node: fx.Node) -> dict[Hashable, list[Strategy]]:
        """Return the cache entry of all operators that are equal to ``node``: a dict from layouts that neighbouring
        operators use to lists of strategies (layouts of operands and results). The caller passes it to
        :meth:`find_strategies` as ``kind``."""
        return self._kinds.setdefault(build_call_key(node), {})

    def find_strategies(self, node: fx.Node, kind: dict[Hashable, list[Strategy]], wishes: Wishes) -> list[Strategy]:
        """Return the strategies of the operator ``node``: the layouts of its operands and results. Equal operators get
        the same list, which must not be changed. ``kind``: the cache entry that :meth:`of_kind` returned for ``node``.
        ``wishes``: index i of an operand, or ``~k`` for result k -> the layouts with sections that neighbouring
        operators use for it."""
        key = tuple(wishes.items())
        if key not in kind:
            kind[key] = enumerate_strategies(node, self._num_ranks, wishes, self._lengths)
        return kind[key]


def list_operator_strategies(
    values: Sequence[BlockValue], operators: Sequence[fx.Node], known: StrategyCache
) -> dict[fx.Node, list[Strategy]]:
    """Return operator -> its strategies, for each operator of a block (such as a layer). A strategy is a way to run the
    operator on the ranks: the layouts of its operands and results. ``operators``: the operators of the block.
    ``values``: the tensors of the block. ``known``: a cache of strategies, which knows the number of ranks."""
    spots: dict[fx.Node, dict[int, int]] = {node: {} for node in operators}  # operand i or result ~k -> value
    for number, value in enumerate(values):
        if value.source in spots:
            spots[value.source][~value.index] = number
        for reader in value.readers:
            if reader.node is not None:
                spots[reader.node].update(dict.fromkeys(reader.positions, number))
    wanted: list[dict[Layout, None]] = [{} for _ in values]
    kinds = {node: known.of_kind(node) for node in operators}
    asked: dict[fx.Node, Wishes] = {}
    found: dict[fx.Node, list[Strategy]] = {}
    queue = deque(operators)
    while queue:
        node = queue.popleft()
        wishes = {spot: tuple(wanted[number]) for spot, number in spots[node].items() if wanted[number]}
        if asked.get(node) == wishes:
            continue
        asked[node] = wishes
        found[node] = known.find_strategies(node, kinds[node], wishes)
        for number in _offer_section_layouts(node, found[node], spots[node], wanted):
            value = values[number]
            queue.extend(r.node for r in value.readers if r.node is not None)
            if value.source in spots:
                queue.append(value.source)
    return found


def _offer_section_layouts(
    node: fx.Node, found: Sequence[Strategy], spots: Mapping[int, int], wanted: Sequence[dict[Layout, None]]
) -> set[int]:
    """Record the layouts with sections (separately sharded parts of a dim) that the strategies of the operator ``node``
    use, so that the values that the operator reads and computes may have these layouts. Return the indices of the
    values that gained a layout; the caller then looks at the other operators of these values.

    ``found``: the strategies of ``node`` (layouts of its operands and results). ``wanted``: for each value, the layouts
    with sections that operators could use, to which this function adds. ``spots``: index i of an operand, or ``~k`` for
    result k -> index of the value in ``wanted``."""
    gained = set[int]()
    for strategy in found:
        layouts = [*enumerate(strategy.operands), *((~k, layout) for k, layout in enumerate(strategy.results))]
        for spot, layout in layouts:
            number = spots.get(spot)
            if number is None or not layout.sections or layout in wanted[number]:
                continue
            if len(wanted[number]) < MAX_WANTED:
                wanted[number][layout] = None
                gained.add(number)
    return gained


Shape = tuple[int, ...]


def _count_contraction_flops(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[0][-1]


def _with_addend(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[1][-1]


def _batches_added(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * operands[1][0] * operands[1][-1]


def _count_attention_flops(operands: list[Shape], result: Shape) -> float:
    query, key = operands[0], operands[1]
    return 2.0 * key[-2] * (math.prod(query) + math.prod(result))


def _count_convolution_flops(operands: list[Shape], result: Shape) -> float:
    return 2.0 * math.prod(result) * math.prod(operands[1][1:])


# Floating-point operations of one call, from the shapes of its operands and of its first result.
FLOPS: dict[str, Callable[[list[Shape], Shape], float]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "matmul"), _count_contraction_flops),
    **dict.fromkeys(("_grouped_mm", "partition::expert_mm"), _count_contraction_flops),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _with_addend),
    "addbmm": _batches_added,
    "scaled_dot_product_attention": _count_attention_flops,
    **dict.fromkeys(
        (
            "partition::band_attention",
            "partition::context_attention",
            "partition::document_attention",
            "partition::context_document_attention",
            "partition::scored_attention",
            "partition::context_scored_attention",
        ),
        _count_attention_flops,
    ),
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), _count_convolution_flops),
}


def matmul_flops(node: fx.Node) -> float:
    """Return the FLOPs (multiplications plus additions) of one call of ``node``, a matrix product, convolution or
    attention; 0 for any other operator.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    name = node.target._schema.name.removeprefix("aten::")
    if name == "einsum":
        factors = factors_of(node)
        return 0.0 if factors is None else 2.0 * math.prod(factors.sizes.values())
    if name not in FLOPS:
        return 0.0
    operands = [_tensor_to_shape(o.meta["val"]) for o in operands_of(node)]
    return FLOPS[name](operands, _tensor_to_shape(results_of(node)[0]))


def _tensor_to_shape(value: Tensor) -> Shape:
    return tuple(value.shape)
