"""Which layouts the values between calls and the states may have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from partitioner.solve.ports import Tie
from passes.blocks import FoldedModel
from passes.errors import PartitionError
from passes.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, divides, shard


class ShardingError(PartitionError):
    """No sharding does what is asked: a pin that cannot be kept, or layouts that exclude each other."""


@dataclass(frozen=True)
class LayoutRules:
    """What is fixed from outside, by the name of a value or a state.

    ``inputs``: the layouts that a model input may have (``R`` where it is not named). ``outputs``: those that a model
    output may have (``S`` or ``R`` where it is not named). ``pins``: the one layout of a value, input or state.
    ``whole_states``: no state is sharded, and one that is trained has a partial-sum gradient. ``partial_values``:
    values between calls may be partial sums. ``lengths``: dims of these sizes may be sharded zigzag.
    """

    inputs: Mapping[str, Collection[Layout]] = field(default_factory=dict)
    outputs: Mapping[str, Collection[Layout]] = field(default_factory=dict)
    pins: Mapping[str, Layout] = field(default_factory=dict)
    whole_states: bool = False
    partial_values: bool = False
    lengths: frozenset[int] = frozenset()

    def check(self, model: FoldedModel) -> None:
        """Raises :class:`ShardingError` where a name is unknown."""
        aliases = {a for state in model.states.values() for a in state.aliases}
        for what, names in (("pins", self.pins), ("input_layouts", self.inputs), ("output_layouts", self.outputs)):
            for name in names:
                if name not in model.values and name not in model.states and name not in aliases:
                    raise ShardingError(
                        f"{what}: no value or state is called {name!r}; expected one of the model's "
                        f"{len(model.states)} states or {len(model.values)} values between calls"
                    )


def _dims(tie: Tie, num_ranks: int) -> list[Layout]:
    """One shard per dim that divides."""
    layouts = [shard(d) for d, size in enumerate(tie.spec.shape) if size > 0]
    return [layout for layout in layouts if divides(layout, tie.spec.shape, num_ranks)]


def _zigzags(tie: Tie, num_ranks: int, rules: LayoutRules) -> list[Layout]:
    layouts = [shard(d, (), True) for d, size in enumerate(tie.spec.shape) if size in rules.lengths]
    return [layout for layout in layouts if divides(layout, tie.spec.shape, num_ranks)]


def value_options(model: FoldedModel, tie: Tie, num_ranks: int, rules: LayoutRules) -> list[Layout]:
    """The layouts that these values may have. Raises :class:`ShardingError` where none is left."""
    read = {v for call in model.calls for v in call.inputs}
    inputs = {i.value for i in model.inputs}
    outputs = {o.value for o in model.outputs if o.value is not None}
    options = [REPLICATED, *_dims(tie, num_ranks), *_zigzags(tie, num_ranks, rules), READ_SHARDED]
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
    return _within(options, limits, tie, num_ranks)


def state_options(
    model: FoldedModel, tie: Tie, num_ranks: int, rules: LayoutRules, trained: bool, asked: Iterable[Layout]
) -> list[Layout]:
    """The layouts that these states may have; ``asked`` are those in sections that operators would like.

    Raises :class:`ShardingError` where none is left.
    """
    options = [REPLICATED, *_dims(tie, num_ranks)]
    options += [layout for layout in dict.fromkeys(asked) if layout.is_shard and layout not in options]
    if trained:
        options.append(READ_SHARDED)
    limits: list[tuple[str, str, Collection[Layout]]] = []
    if rules.whole_states:
        limits.append((tie.names[0], "a state", (READ_SHARDED if trained else REPLICATED,)))
    for name in tie.names:
        for alias in (name, *model.states[name].aliases):
            if alias in rules.pins:
                limits.append((alias, "pinned", _pinned_state(rules.pins[alias], trained)))
    for _, _, allowed in limits:  # a pin may cut a state in sections that no operator asked for
        options += [a for a in allowed if a not in options and divides(a, tie.spec.shape, num_ranks) and a != PARTIAL]
    return _within(options, limits, tie, num_ranks)


def _pinned_state(layout: Layout, trained: bool) -> Collection[Layout]:
    """A state that is pinned whole may have either kind of gradient."""
    return (REPLICATED, READ_SHARDED) if layout == REPLICATED and trained else (layout,)


def _within(
    options: list[Layout], limits: list[tuple[str, str, Collection[Layout]]], tie: Tie, num_ranks: int
) -> list[Layout]:
    left = [o for o in options if all(o in allowed for _, _, allowed in limits)]
    if not left:
        said = "; ".join(f"{name!r} is {why} {' or '.join(map(str, allowed))}" for name, why, allowed in limits)
        raise ShardingError(
            f"no layout is left for {_names(tie)} of shape {list(tie.spec.shape)} over {num_ranks} ranks: it may be "
            f"{', '.join(map(str, options))}, but {said}. Loosen one of these, or change the number of ranks"
        )
    return left


def _names(tie: Tie) -> str:
    return repr(tie.names[0]) + (f" (tied to {len(tie.names) - 1} more)" if len(tie.names) > 1 else "")
