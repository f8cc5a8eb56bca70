"""Shard several programs over the same states at once, so that the layout of the states suits all of them.

A plan has one layout of parameters and buffers, and may have several programs that use it: training steps for other
batch shapes, evaluation, generation. A layout that is the best one for the main program (such as training) may be
impossible for another. For example, a table of positions can be sharded along the positions if the program reads the
whole table, but not if it reads only the first rows, as for a shorter batch. The joint problem has the operators of all
programs, and each state once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.passes.ir.layouts import READ_SHARDED, REPLICATED, Layout
from partitioner.passes.ir.model import Block, Call, FoldedModel, ModelInput, ModelOutput, ModelState, TensorSpec
from partitioner.solve.sharding.choices import FREE_LAYOUTS
from partitioner.solve.sharding.layout_ties import BlockValue, Port
from partitioner.solve.sharding.sharding import (
    Allowed,
    ShardingCosts,
    ShardingProblem,
    ShardingSolution,
    sharded_work,
)


@dataclass(frozen=True)
class CompanionModel:
    """The model of a further program, such as evaluation beside training, that uses parameters and buffers of the
    plan's main program in the layouts that the main program gives them.

    ``model``: calls of blocks on one microbatch. ``weight``: how often the program is executed for each execution of
    the main program. ``inputs``: name of an input -> layouts that the input may have; other inputs are replicated."""

    model: FoldedModel
    weight: float = 1.0
    inputs: Mapping[str, Collection[Layout]] = field(default_factory=dict[str, Collection[Layout]])


class JointShardingProblem(ShardingProblem):
    """The problem of sharding the models of several programs, such as training and evaluation, that use the same
    parameters and buffers. A parameter or buffer has one layout in all programs. The weighted sum of the costs of all
    programs is minimised.

    ``first``: the model of the main program. ``companions``: the models of further programs. ``axis``, ``num_ranks``:
    name and size of the mesh axis. ``costs``: prices of layouts and of strategies (layouts of operands and results)."""

    def __init__(
        self,
        first: FoldedModel,
        companions: Sequence[CompanionModel],
        axis: str,
        num_ranks: int,
        costs: ShardingCosts,
    ) -> None:
        self.first = first
        self._updates = list(first.updates.items())
        self._weight_of: dict[str, float] = {}
        joined, rules = first, FREE_LAYOUTS
        if first.loss is not None:
            rules = replace(rules, outputs={first.loss: (REPLICATED,)})
        for number, companion in enumerate(companions):
            prefix = f"program {number + 1}/"
            other = _rename(companion.model, prefix, first.states)
            self._updates += other.updates.items()
            self._weight_of |= dict.fromkeys(other.blocks, companion.weight)
            inputs = {prefix + name: layouts for name, layouts in companion.inputs.items()}
            outputs = {} if other.loss is None else {other.loss: (REPLICATED,)}
            rules = replace(rules, inputs={**rules.inputs, **inputs}, outputs={**rules.outputs, **outputs})
            joined = joined.with_(
                blocks={**joined.blocks, **other.blocks},
                calls=[*joined.calls, *other.calls],
                states={**other.states, **joined.states},
                inputs=[*joined.inputs, *other.inputs],
                outputs=[*joined.outputs, *other.outputs],
                values={**joined.values, **other.values},
            )
        rules.check(joined)
        super().__init__(joined, axis, num_ranks, costs, rules)

    def solve(self, allowed: Allowed | None = None, time_limit_s: float = 60.0) -> ShardingSolution:
        """Return the main program's part (such as training) of the cheapest sharding of all programs together. Its
        ``objective`` and ``bound`` are the cost, and a lower bound on the cost, of all programs together.

        ``allowed``: function of an operator and a strategy (layouts of its operands and results) that says whether the
        operator may be run in this way; ``None`` allows all. ``time_limit_s``: seconds for the solver. Raises
        ``ShardingError`` if no sharding exists, and ``AssignmentTimeLimitError`` if none is found in time."""
        joint, first = super().solve(allowed, time_limit_s), self.first
        blocks = {name: joint.blocks[name] for name in first.blocks}
        sharded, without_rule = sharded_work(first, blocks, self.costs, self.num_ranks)
        return replace(
            joint,
            blocks=blocks,
            values={name: joint.values[name] for name in first.values if name in joint.values},
            states={name: joint.states[name] for name in first.states},
            matmul_sharded=sharded,
            without_rule=without_rule,
        )

    def weigh_block(self, name: str) -> float:
        return super().weigh_block(name) * self._weight_of.get(name, 1.0)

    def list_updates(self) -> Iterator[tuple[str, str]]:
        yield from self._updates

    def list_port_layouts(self, block: Block, value: BlockValue, port: Port) -> tuple[int, list[Layout]]:
        """Return two values about ``value``, a placeholder of ``block`` (such as a layer): the index of the node of the
        assignment problem (one choice per node at minimum cost) that chooses the layout of ``value``, and the layouts
        from which it chooses. ``port``: the input, parameter or buffer of the block that the placeholder stands for. In
        a program without gradients, ``R'`` (replicated, with a partial sum as gradient) is replaced by ``R``
        (replicated)."""
        variable, layouts = super().list_port_layouts(block, value, port)
        if block.name in self._weight_of and not value.grad:
            layouts = [REPLICATED if layout == READ_SHARDED else layout for layout in layouts]
        return variable, layouts


def _rename(model: FoldedModel, prefix: str, states: Mapping[str, ModelState]) -> FoldedModel:
    """Return a copy of ``model``, the model of a further program, in which the names of blocks (such as layers) and
    values start with ``prefix``. A parameter or buffer keeps its name if ``states``, the parameters and buffers of the
    main program by name, has one with the same name and shape. All others, and constants, are renamed."""

    def rename_state(name: str) -> str:
        state, known = model.states[name], states.get(name)
        same = known is not None and state.kind != "constant" and known.kind != "constant" and known.spec == state.spec
        return name if same else prefix + name

    def add_prefix(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    blocks = {prefix + name: replace(block, name=prefix + name) for name, block in model.blocks.items()}
    calls: list[Call] = [
        replace(
            call,
            block=prefix + call.block,
            states=tuple(map(rename_state, call.states)),
            inputs=add_prefix(call.inputs),
            outputs=add_prefix(call.outputs),
        )
        for call in model.calls
    ]
    inputs: list[ModelInput] = [replace(each, value=prefix + each.value) for each in model.inputs]
    outputs: list[ModelOutput] = [
        each if each.value is None else replace(each, value=prefix + each.value) for each in model.outputs
    ]
    values: dict[str, TensorSpec] = {prefix + name: spec for name, spec in model.values.items()}
    return model.with_(
        blocks=blocks,
        calls=calls,
        states={rename_state(name): state for name, state in model.states.items()},
        inputs=inputs,
        outputs=outputs,
        loss=None if model.loss is None else prefix + model.loss,
        values=values,
        updates={rename_state(name): prefix + value for name, value in model.updates.items()},
    )
