"""Choose a layout for every value and a strategy for every operator on one mesh axis, at the least expected time.

The folded model (calls of blocks, where equal layers share one block) becomes a pairwise assignment problem: one choice
per node, at the minimum sum of node costs and edge costs (``partitioner/solve/pairwise/assignment.py``).

- A node for each operator: its choices are its strategies (layouts of operands and results); its cost is the seconds of
  computation, forward and backward, times the number of calls.
- A node for each value with several readers: its choices are pairs (layout produced, layouts to which it is converted);
  its cost is the seconds of the changes of layout, each counted once.
- A node for the values between calls: its choices are ``S(d)`` (sharded on dim d) or ``R`` (replicated); its cost is
  the seconds of keeping and sending them.
- A node for parameters and buffers (states): its choices are ``S(d)``, ``R`` or ``R'`` (replicated, with a partial sum
  as gradient); its cost stands for their memory and the reduction of their gradients.

A value with one reader is an edge whose table has the costs of the changes of layout. Values between calls, or states,
that must share a layout because they pass through the same port (input, state or output) of a repeated block are one
node. All block types are solved together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import fx

from partitioner.passes.ir.layouts import PARTIAL, REPLICATED, Layout
from partitioner.passes.ir.model import Block, FoldedModel, TensorSpec
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import Strategy, operands_of, results_of
from partitioner.passes.shard.shard_block import RESHARDS, BlockSharding
from partitioner.solve.pairwise.assignment import Assignment, solve_assignment
from partitioner.solve.pairwise.presolve import InfeasibleAssignmentError
from partitioner.solve.sharding.choices import (
    FREE_LAYOUTS,
    LayoutRules,
    ShardingError,
    StrategyCache,
    list_operator_strategies,
    matmul_flops,
    state_options,
    value_options,
)
from partitioner.solve.sharding.layout_ties import (
    BlockValue,
    LayoutTie,
    Port,
    operators_of,
    tied_states,
    tied_values,
    values_of,
)
from partitioner.solve.sharding.reshard_graph import Asker, ProblemBuilder, Reshards, Source, add_reshard_costs

DATA = "data"  # the axis of the batch: microbatches times data-parallel ranks


class ShardingCosts(Protocol):
    """Interface of the prices by which layouts of tensors and strategies of operators are compared. All prices are in
    one unit, which the implementation chooses, such as seconds per microbatch. ``math.inf`` forbids a layout or
    strategy."""

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        """Return the cost of one call of the operator ``node`` on ``num_ranks`` ranks, forward and backward, if it is
        run by ``strategy`` (layouts of its operands and results). The collectives of the strategy are included. The
        unit is the same for all methods of this class, such as seconds per microbatch."""

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        """Return the cost of one change of a tensor from layout ``source`` to ``target``, forward and, if
        ``differentiable``, backward. The unit is the same for all methods of this class, such as seconds per
        microbatch. Return ``math.inf`` if the change is impossible. ``spec``: the tensor's whole shape and its dtype.
        """

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        """Return the cost of keeping a parameter or buffer in ``layout``. Under ``R'`` (replicated with a partial-sum
        gradient) it includes the all-reduce of the gradient, which occurs once per step. The unit is the same for all
        methods of this class, such as seconds per microbatch. ``spec``: whole shape and dtype of the parameter or
        buffer. ``num_ranks``: size of the mesh axis over which the model is sharded."""

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        """Return the cost of keeping or sending a tensor between blocks (such as layers) in ``layout``. The unit is the
        same for all methods of this class, such as seconds per microbatch. ``spec``: whole shape and dtype of the
        tensor."""


@dataclass(frozen=True)
class ShardingSolution:
    """The layouts of tensors, and the strategies of operators (layouts of their operands and results), that the solver
    chose on one mesh axis.

    ``axis``, ``num_ranks``: name and size of the mesh axis. ``blocks``: name of a block (such as a layer) -> strategies
    and layouts. ``values`` (tensors that pass between blocks) and ``states`` (parameters and buffers): name -> layout.
    ``objective``: the cost of this sharding, for the axes ``tp`` and ``cp`` in seconds of a microbatch; ``bound``: a
    lower bound on the cost of any sharding. ``matmul_sharded``: the fraction of the matrix-multiply FLOPs that is
    divided over the ranks. ``without_rule``: operator name -> fraction of compute time, for operators that have no
    sharding rule and therefore cannot be sharded. ``seconds``: time that the solver took. ``num_choices``: number of
    choices of all nodes of the assignment problem (one choice per node at minimum cost)."""

    axis: str
    num_ranks: int
    blocks: dict[str, BlockSharding]
    values: dict[str, Layout]
    states: dict[str, Layout]
    objective: float
    bound: float
    matmul_sharded: float
    without_rule: dict[str, float]
    seconds: float = 0.0
    num_choices: int = 0  # of all nodes of the pairwise problem


Allowed = Callable[[fx.Node, Strategy], bool]


def solve_sharding(
    model: FoldedModel,
    axis: str,
    num_ranks: int,
    costs: ShardingCosts,
    rules: LayoutRules = FREE_LAYOUTS,
    *,
    allowed: Allowed | None = None,
    time_limit_s: float = 60.0,
) -> ShardingSolution:
    """Return the cheapest sharding of ``model`` over ``num_ranks`` ranks of ``axis``: a layout for each tensor, and a
    strategy (layouts of operands and results) for each operator. Unless ``rules`` name the loss, the loss is a partial
    sum on the axis ``data`` and replicated on other axes. On ``data``, parameters and buffers are not sharded, and
    tensors between blocks may be partial sums.

    ``model``: the model as calls of blocks; equal layers share one block. ``costs``: prices of the choices. ``rules``:
    layouts that the caller fixes. ``allowed``: function of an operator and a strategy that says whether the operator
    may be run in this way; ``None`` allows all. ``time_limit_s``: seconds for the solver. Raises :class:`ShardingError`
    if a name is unknown, or if the rules exclude every sharding, and :class:`AssignmentTimeLimitError` if no sharding
    was found in time."""
    rules = _complete_layout_rules(model, axis, rules)
    if num_ranks == 1:
        return whole_sharding(model, axis, costs)
    return ShardingProblem(model, axis, num_ranks, costs, rules, allowed).solve(time_limit_s=time_limit_s)


def sharding_problem(
    model: FoldedModel, axis: str, num_ranks: int, costs: ShardingCosts, rules: LayoutRules = FREE_LAYOUTS
) -> ShardingProblem:
    """Return the problem of finding the cheapest sharding of ``model``, for two or more ranks. ``axis``, ``num_ranks``:
    name (such as ``"tp"``) and size of the mesh axis. ``costs``: prices of the choices. ``rules``: layouts fixed by the
    caller. ``model``: the model as calls of blocks; equal layers share one block."""
    return ShardingProblem(model, axis, num_ranks, costs, _complete_layout_rules(model, axis, rules))


def _complete_layout_rules(model: FoldedModel, axis: str, rules: LayoutRules) -> LayoutRules:
    """Return ``rules``, layouts that the caller fixed, together with the layouts that the mesh axis ``axis`` requires:
    of the loss, and on the axis ``data`` also of parameters, buffers and tensors between blocks (such as layers).
    ``model``: the model to shard, as calls of blocks. Raises ``ShardingError`` if a name is not in the model."""
    outputs = dict(rules.outputs)
    if model.loss is not None:
        outputs.setdefault(model.loss, (PARTIAL,) if axis == DATA else (REPLICATED,))
    rules = replace(rules, outputs=outputs, whole_states=axis == DATA, partial_values=axis == DATA)
    rules.check(model)
    return rules


class ShardingProblem:
    """The pairwise assignment problem (one choice per node at minimum cost) of sharding a model over one mesh axis. It
    can be solved several times, each time with other strategies allowed. A strategy is a way to run an operator on the
    ranks: the layouts of its operands and results.

    Most nodes are operators, whose choices are strategies, and tensors, whose choices are layouts. ``axis``,
    ``num_ranks``: name and size of the mesh axis. ``costs``: prices of strategies and layouts. ``rules``: layouts that
    the caller fixed. ``model``: the model to shard. ``possible``: function of an operator and a strategy that says
    whether the problem contains the strategy; ``None``: it contains all."""

    def __init__(
        self,
        model: FoldedModel,
        axis: str,
        num_ranks: int,
        costs: ShardingCosts,
        rules: LayoutRules,
        possible: Allowed | None = None,
    ) -> None:
        self.possible = possible
        self.model, self.axis, self.num_ranks, self.costs, self.rules = model, axis, num_ranks, costs, rules
        self.builder = ProblemBuilder()
        self.reshards = Reshards(costs.reshard)
        self.state_reshards = Reshards(self._state_reshard)
        self.weights = {name: self.weigh_block(name) for name in model.blocks}
        self.operators: dict[str, dict[fx.Node, tuple[int, list[Strategy]]]] = {}
        self.ties: list[tuple[LayoutTie, int, list[Layout]]] = []
        self.ports: dict[Port, tuple[int, list[Layout]]] = {}
        self._best: Assignment | None = None  # of all strategies
        self._strategies = StrategyCache(num_ranks, rules.lengths)
        self._asked: dict[tuple[tuple[Strategy, ...], tuple[int, ...]], tuple[frozenset[Layout], ...]] = {}
        values = {name: values_of(block) for name, block in model.blocks.items()}
        for name, block in model.blocks.items():
            self._add_operators(name, block, values[name])
        for tie in tied_values(model):
            options = value_options(model, tie, num_ranks, rules)
            self._add_tie(tie, options, [costs.boundary(tie.spec, layout) for layout in options])
        for tie in tied_states(model):
            options = self._state_options(tie, values)
            self._add_tie(tie, options, [costs.state(tie.spec, layout, num_ranks) for layout in options])
        self._tie_updates()
        for name in model.blocks:
            for value in values[name]:
                self._connect_value_readers(name, value)

    def weigh_block(self, name: str) -> float:
        """Return how often the model calls the block (such as a layer) with this ``name``, as the factor on the costs
        of one call."""
        return float(self.model.num_calls(name))

    def list_updates(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of names: a buffer that the forward changes, and the value that it has afterwards."""
        yield from self.model.updates.items()

    def list_port_layouts(self, block: Block, value: BlockValue, port: Port) -> tuple[int, list[Layout]]:
        """Return two values about ``value``, a placeholder of ``block`` (such as a layer): the index of the node of the
        assignment problem (one choice per node at minimum cost) that chooses the layout of ``value``, and the layouts
        from which it chooses. ``port``: the input, parameter or buffer of the block that the placeholder stands for."""
        return self.ports[port]

    def solve(self, allowed: Allowed | None = None, time_limit_s: float = 60.0) -> ShardingSolution:
        """Return the cheapest sharding that uses only strategies (layouts of operands and results) for which
        ``allowed(operator, strategy)`` is true (``None``: all). Raises ``ShardingError`` if there is none, and
        ``AssignmentTimeLimitError`` if none is found in ``time_limit_s`` seconds."""
        start = time.perf_counter()
        try:
            answer = self._solve_with_allowed(allowed, time_limit_s)
        except InfeasibleAssignmentError as error:
            around = ", ".join(dict.fromkeys(self.builder.names[i] for i in error.nodes[:6]))
            raise ShardingError(
                f"no sharding over {self.num_ranks} ranks of {self.axis!r} satisfies the requested layouts; "
                f"they conflict at {around}. Allow other layouts for the inputs, outputs or fixed values "
                "nearby, or use another number of ranks"
            ) from error
        return self._assignment_to_solution(answer, time.perf_counter() - start)

    def _solve_with_allowed(self, allowed: Allowed | None, time_limit_s: float) -> Assignment:
        """Return the cheapest solution of this assignment problem (one choice per node at minimum cost) in which
        operators use only allowed strategies (layouts of operands and results). ``allowed``: function of an operator
        and a strategy that says whether the strategy is allowed; ``None`` allows all. ``time_limit_s``: seconds for the
        solver.

        The optimum without restrictions is cached. If all of its strategies are allowed, it is also the restricted
        optimum, and is returned."""
        problem = self.builder.problem()
        if self._best is None:
            self._best = solve_assignment(problem, time_limit_s=time_limit_s, settle=True)
        if allowed is None:
            return self._best
        masks = {
            variable: np.array([allowed(node, strategy) for strategy in choices], dtype=bool)
            for operators in self.operators.values()
            for node, (variable, choices) in operators.items()
        }
        if all(mask[self._best.choice[variable]] for variable, mask in masks.items()):
            return self._best
        costs = [np.where(masks[i], cost, math.inf) if i in masks else cost for i, cost in enumerate(problem.costs)]
        return solve_assignment(replace(problem, costs=costs), time_limit_s=time_limit_s, settle=True)

    def _add_operators(self, name: str, block: Block, values: list[BlockValue]) -> None:
        """Add to the assignment problem (one choice per node at minimum cost) a node for each operator of ``block`` (a
        piece of the model, such as a layer). The choices of the node are the operator's strategies (layouts of operands
        and results). ``name``: the name of the block. ``values``: the tensors in the block."""
        found = list_operator_strategies(values, operators_of(block), self._strategies)
        weight = self.weights[name]
        self.operators[name] = {}
        for node, choices in found.items():
            possible = [strategy for strategy in choices if self.possible is None or self.possible(node, strategy)]
            cost = [weight * self.costs.node(node, strategy, self.num_ranks) for strategy in possible]
            if not possible:  # the solver then names the operator in its error
                possible, cost = choices, [math.inf] * len(choices)
            self.operators[name][node] = self.builder.add(f"{name}/{node.name}", np.array(cost)), possible

    def _add_tie(self, tie: LayoutTie, options: list[Layout], cost: list[float]) -> None:
        variable = self.builder.add(tie.names[0], len(tie.names) * np.array(cost))
        self.ties.append((tie, variable, options))
        self.ports.update(dict.fromkeys(tie.ports, (variable, options)))

    def _tie_updates(self) -> None:
        """Add edges to the assignment problem (one choice per node at minimum cost) that force a buffer and its new
        value, which the forward computes, to have the same layout."""
        updates = list(self.list_updates())
        if not updates:
            return
        of = {name: (variable, options) for tie, variable, options in self.ties for name in tie.names}
        tables: dict[tuple[int, int], list[list[float]]] = {}
        for name, made_name in updates:
            (state, held), (value, made) = of[name], of[made_name]
            tables[state, value] = [[0.0 if a == b else math.inf for b in made] for a in held]
        self.builder.edges += [(state, value, np.array(table)) for (state, value), table in tables.items()]

    def _state_options(self, tie: LayoutTie, values: Mapping[str, list[BlockValue]]) -> list[Layout]:
        """Return the layouts that the parameters or buffers of ``tie`` (which must share one layout) may have.
        ``values``: name of a block (such as a layer) -> tensors in the block, with the operators that read them."""
        trained, asked = False, dict[Layout, None]()
        for name, _, place in tie.ports:
            block = self.model.blocks[name]
            for value in values[name]:
                if value.source.name == block.states[place]:
                    trained |= value.grad
                    for asker in self._operators_reading(name, value):
                        asked.update(dict.fromkeys(t for wants in asker.layouts for t in sorted(wants) if t.sections))
        return state_options(self.model, tie, self.num_ranks, self.rules, trained, asked)

    def _connect_value_readers(self, name: str, value: BlockValue) -> None:
        """Add to the assignment problem (one choice per node at minimum cost) the costs of converting ``value``, a
        tensor in a block (such as a layer), from one layout to another. Each cost connects two nodes of the problem:
        the node that decides in which layout the value is produced, and a node that decides in which layout it is read.
        ``name``: name of the block."""
        block = self.model.blocks[name]
        if value.source.op == "placeholder":
            variable, options = self.list_port_layouts(block, value, _placeholder_to_port(block, value.source))
            source = Source(variable, tuple(options))
        else:
            variable, choices = self.operators[name][value.source]
            source = Source(variable, tuple(s.results[value.index] for s in choices))
        askers = [*self._operators_reading(name, value), *self._ties_reading(name, value)]
        label = f"{name}/{value.source.name}"
        is_state = value.source.op == "placeholder" and value.source.name in block.states
        reshards = self.state_reshards if is_state else self.reshards
        add_reshard_costs(self.builder, reshards, label, (value.spec, value.grad), source, askers, self.weights[name])

    def _state_reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        """Return the cost of converting a parameter or buffer, which is stored in the layout ``source``, to the layout
        ``target`` that an operator reads. The cost is infinite if the forward would need a collective, because
        gathering weights for every microbatch is left to ZeRO over ``dp``. ``spec``: whole shape and dtype of the
        parameter or buffer. ``differentiable``: whether it receives a gradient."""
        change = RESHARDS.get((source.kind, target.kind))
        if change is None or change.forward is not None:
            return math.inf
        return self.costs.reshard(spec, source, target, differentiable)

    def _operators_reading(self, name: str, value: BlockValue) -> Iterator[Asker]:
        for reader in value.readers:
            if reader.node is not None:
                variable, choices = self.operators[name][reader.node]
                key = tuple(choices), reader.positions
                if key not in self._asked:
                    self._asked[key] = tuple(frozenset(s.operands[p] for p in reader.positions) for s in choices)
                yield Asker(variable, self._asked[key])

    def _ties_reading(self, name: str, value: BlockValue) -> Iterator[Asker]:
        """Yield one reader for each output of a block (such as a layer) that is the tensor ``value``. The reader is the
        node of the assignment problem (one choice per node at minimum cost) that chooses the layout of the output, and
        of all tensors that must have the same layout. ``name``: name of the block."""
        places = [p for reader in value.readers if reader.node is None for p in reader.positions]
        for variable, options in dict(self.ports[name, "output", p] for p in places).items():
            yield Asker(variable, tuple(frozenset((layout,)) for layout in options))

    def _assignment_to_solution(self, answer: Assignment, seconds: float) -> ShardingSolution:
        """Convert ``answer``, a solution of the assignment problem (for each node, the index of its choice), to a
        sharding: the layout of each tensor, and the strategy (layouts of operands and results) of each operator.
        ``seconds``: time that the solver took."""
        chosen = {
            name: {node: choices[answer.choice[variable]] for node, (variable, choices) in operators.items()}
            for name, operators in self.operators.items()
        }
        ports = {port: options[answer.choice[variable]] for port, (variable, options) in self.ports.items()}
        blocks = {
            name: BlockSharding(
                {node.name: strategy for node, strategy in chosen[name].items()},
                {p: ports[name, "input", i] for i, p in enumerate(block.inputs)},
                {p: ports[name, "state", i] for i, p in enumerate(block.states)},
                tuple(ports[name, "output", i] for i in range(len(block.outputs))),
            )
            for name, block in self.model.blocks.items()
        }
        layouts = {name: o[answer.choice[v]] for tie, v, o in self.ties for name in tie.names}
        sharded, without_rule = sharded_work(self.model, blocks, self.costs, self.num_ranks)
        return ShardingSolution(
            self.axis,
            self.num_ranks,
            blocks,
            {name: layouts[name] for name in self.model.values if name in layouts},
            {name: layouts[name] for name in self.model.states},
            answer.objective,
            answer.bound,
            sharded,
            without_rule,
            seconds,
            sum(map(len, self.builder.costs)),
        )


def _placeholder_to_port(block: Block, placeholder: fx.Node) -> Port:
    if placeholder.name in block.states:
        return block.name, "state", block.states.index(placeholder.name)
    return block.name, "input", block.inputs.index(placeholder.name)


def sharded_work(
    model: FoldedModel, shardings: Mapping[str, BlockSharding], costs: ShardingCosts, num_ranks: int
) -> tuple[float, dict[str, float]]:
    """Return two values: the fraction of matrix-multiply FLOPs that is sharded; and, for operators without a sharding
    rule, operator name -> fraction of compute time. ``model``: the sharded model. ``shardings``: name of a block (such
    as a layer) -> layouts of tensors and strategies of operators. ``costs``: prices of the strategies. ``num_ranks``:
    the number of ranks."""
    flops = sharded = total = 0.0
    unruled: dict[str, float] = {}
    for name, sharding in shardings.items():
        weight = model.num_calls(name)
        for node in operators_of(model.blocks[name]):
            strategy = sharding.strategies[node.name]
            work = weight * matmul_flops(node)
            flops += work
            sharded += work if strategy.factor is not None else 0.0
            seconds = weight * costs.node(node, strategy, num_ranks)
            total += seconds
            if strategy.factor is None and factors_of(node) is None:
                unruled[str(node.target)] = unruled.get(str(node.target), 0.0) + seconds
    return sharded / flops if flops else 0.0, {k: v / total if total else 0.0 for k, v in unruled.items()}


def whole_sharding(model: FoldedModel, axis: str, costs: ShardingCosts) -> ShardingSolution:
    """Return the sharding of ``model`` over one rank, in which everything is replicated, with its cost by ``costs``.
    ``axis``: name of the mesh axis, such as ``"tp"``. ``model``: the model as calls of blocks; equal layers share one
    block.
    """
    blocks: dict[str, BlockSharding] = {}
    objective = 0.0
    for name, block in model.blocks.items():
        chosen = {
            node: Strategy(None, (), (REPLICATED,) * len(operands_of(node)), (REPLICATED,) * len(results_of(node)))
            for node in operators_of(block)
        }
        objective += model.num_calls(name) * sum(costs.node(node, strategy, 1) for node, strategy in chosen.items())
        blocks[name] = BlockSharding(
            {node.name: strategy for node, strategy in chosen.items()},
            dict.fromkeys(block.inputs, REPLICATED),
            dict.fromkeys(block.states, REPLICATED),
            (REPLICATED,) * len(block.outputs),
        )
    objective += sum(costs.state(state.spec, REPLICATED, 1) for state in model.states.values())
    objective += sum(costs.boundary(spec, REPLICATED) for spec in model.values.values())
    _, without_rule = sharded_work(model, blocks, costs, 1)
    values, states = dict.fromkeys(model.values, REPLICATED), dict.fromkeys(model.states, REPLICATED)
    return ShardingSolution(axis, 1, blocks, values, states, objective, objective, 0.0, without_rule)


__all__ = [
    "ShardingCosts",
    "ShardingError",
    "ShardingProblem",
    "ShardingSolution",
    "sharded_work",
    "sharding_problem",
    "solve_sharding",
    "whole_sharding",
]
