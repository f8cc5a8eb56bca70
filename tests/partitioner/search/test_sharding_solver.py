"""The sharding solver: what it finds for decoders under H100-like costs, and that what it finds is the optimum."""

from __future__ import annotations

import itertools
import math
import operator
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, local_shape, make_shard_layout
from partitioner.passes.ir.model import Block, FoldedModel, TensorSpec
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.factors import Strategy, operands_of, results_of
from partitioner.passes.rules.strategies import enumerate_strategies
from partitioner.passes.shard.fold import fold
from partitioner.passes.shard.shard_block import RESHARDS, BlockSharding, shard_block
from partitioner.solve.sharding import reshard_graph
from partitioner.solve.sharding.choices import LayoutRules, ShardingError, matmul_flops
from partitioner.solve.sharding.layout_ties import values_of
from partitioner.solve.sharding.sharding import ShardingCosts, ShardingSolution, solve_sharding

VIEWS = {"view", "reshape", "transpose", "permute", "t", "unsqueeze", "expand", "split", "split_with_sizes", "slice"}


@dataclass(frozen=True)
class H100:
    """Roofline compute and alpha-beta collectives, in seconds, of about an H100 with NVLink."""

    num_ranks: int
    flops: float = 600e12
    memory: float = 2.5e12
    link: float = 350e9
    latency: float = 8e-6

    def collective(self, name: str | None, nbytes: int) -> float:
        if name is None:
            return 0.0
        moved = nbytes * (self.num_ranks - 1) / self.num_ranks
        moved *= {"all_reduce": 2, "all_reduce_max": 2, "all_to_all": 1 / self.num_ranks}.get(name, 1)
        return self.latency + moved / self.link

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        tensors = [o.meta["val"] for o in operands_of(node)] + list(results_of(node))
        layouts = [*strategy.operands, *strategy.results]
        local = [math.prod(local_shape(w, tuple(t.shape), num_ranks)) for t, w in zip(tensors, layouts, strict=True)]
        traffic = sum(numel * t.itemsize for numel, t in zip(local, tensors, strict=True))
        if node.target._schema.name.split("::")[1] in VIEWS:
            traffic = 0
        flops = matmul_flops(node) / (num_ranks if strategy.factor is not None else 1)
        seconds = max(flops / self.flops, traffic / self.memory) * (1 + node.meta["grad"] * (2 if flops else 1))
        factors = factors_of(node)
        if strategy.factor is not None and factors is not None and strategy.factor in factors.lower:
            size = local[len(strategy.operands)] * results_of(node)[0].itemsize
            seconds += sum(self.collective(c, size) for c in factors.lower[strategy.factor].collectives)
        return seconds

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        change = RESHARDS[source.kind, target.kind]
        backward = change.backward if differentiable else None
        cut = 2 * spec.nbytes / self.memory if source.sections or target.sections else 1e-9
        return self.collective(change.forward, spec.nbytes) + self.collective(backward, spec.nbytes) + cut

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        held = spec.nbytes / (num_ranks if layout.is_shard else 1)
        reduced = 2 * spec.nbytes / self.link if layout.kind == "R'" else 0.0  # in buckets: no start-up of its own
        return held * 8 / self.memory + reduced

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        return 2 * spec.nbytes / (self.num_ranks if layout.is_shard else 1) / self.memory


def folded(model: nn.Module, inputs: dict[str, Tensor] | tuple[Tensor, ...]) -> FoldedModel:
    found = fold(normalize(capture(model, inputs)))
    mark_gradients(found)
    return found


@cache
def decoder(family: str, layers: int = 4, batch: int = 1, length: int = 4096) -> FoldedModel:
    """A decoder with blocks as wide as Llama-3-8B's, on meta tensors."""
    import transformers as hf

    if family == "llama":
        config = hf.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        kind: type[nn.Module] = hf.LlamaForCausalLM
    else:
        config = hf.GPT2Config(
            n_embd=4096, n_layer=layers, n_head=32, vocab_size=50304, n_positions=length, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        kind = hf.GPT2LMHeadModel
    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16).eval()
        ids = torch.zeros(batch, length, dtype=torch.long)
    return folded(model, {"input_ids": ids, "labels": ids})


@dataclass(frozen=True)
class Layer:
    """The block that reads the weights named so, and what was chosen for it."""

    block: Block
    sharding: BlockSharding

    @staticmethod
    def of(model: FoldedModel, solution: ShardingSolution, weight: str) -> Layer:
        (name,) = {c.block for c in model.calls for s in c.states if s.endswith(weight)}
        return Layer(model.blocks[name], solution.blocks[name])

    def reading(self, weight: str) -> fx.Node:
        (placeholder,) = [n for n in self.block.placeholders if n.name.endswith(weight)]
        (node,) = placeholder.users
        while "aten.t." in str(node.target) or "aten.transpose." in str(node.target):
            (node,) = node.users
        return node

    def strategy(self, weight: str) -> str:
        """Of the operator that reads a weight: ``activation, weight -> result``, without the factor's name."""
        return str(self.sharding.strategies[self.reading(weight).name]).split(": ")[-1]

    def of_operator(self, name: str) -> list[str]:
        nodes = [n for n in self.block.graph.nodes if f".{name}." in str(n.target)]
        return [str(self.sharding.strategies[n.name]).split(": ")[-1] for n in nodes]


def ancestors(node: fx.Node) -> set[str]:
    """The names of the nodes that ``node`` is computed from."""
    return {node.name}.union(*(ancestors(n) for n in node.all_input_nodes))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_llama_block_is_column_then_row_parallel_with_a_sharded_sequence(num_ranks: int) -> None:
    model = decoder("llama")
    solution = solve_sharding(model, "tp", num_ranks, H100(num_ranks))
    layer = Layer.of(model, solution, "q_proj.weight")
    for column in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "gate_proj_weight", "up_proj_weight"):
        assert layer.strategy(column) == "R', S0 -> S2"
    for row in ("o_proj_weight", "down_proj_weight"):
        assert layer.strategy(row) == "S2, S1 -> P"
    assert layer.of_operator("scaled_dot_product_attention") == ["S1, S1, S1 -> S1"]  # heads
    assert layer.of_operator("rsqrt") == ["S1 -> S1"] * 2  # the norms' sequence
    assert {str(layout) for layout in layer.sharding.outputs} == {"S1"}
    assert solution.states["model.layers.0.input_layernorm.weight"].is_whole
    assert solution.matmul_sharded == 1.0
    assert solution.objective - solution.bound <= 1e-9 * solution.objective


def test_one_all_gather_serves_query_key_and_value() -> None:
    model = decoder("llama")
    solution = solve_sharding(model, "tp", 4, H100(4))
    layer = Layer.of(model, solution, "q_proj.weight")
    (norm,) = {layer.reading(f"{w}_proj_weight").args[0] for w in "qkv"}
    assert solution.blocks[layer.block.name].strategies[norm.name].results == (make_shard_layout(1),)
    local = shard_block(layer.block, layer.sharding, "tp", 4)
    names = [n.target._schema.name for n in local.graph.nodes if "partition" in str(n.target)]
    assert sorted(names) == ["partition::all_gather"] * 2 + ["partition::reduce_scatter"] * 2


def test_llama_vocabulary_is_sharded_through_head_and_loss() -> None:
    model = decoder("llama")
    solution = solve_sharding(model, "tp", 4, H100(4))
    head = Layer.of(model, solution, "lm_head.weight")
    assert head.of_operator("linear") == ["R', S0 -> S2"]
    assert head.of_operator("cross_entropy") == ["S1, R -> R"]
    assert solution.values[model.loss] == REPLICATED
    # Untied, the table is cut along its width: an all-to-all then does what takes a reduce-scatter n times its size.
    assert solution.states["model.embed_tokens.weight"] == make_shard_layout(1)
    pinned = solve_sharding(
        model, "tp", 4, H100(4), LayoutRules(pins={"model.embed_tokens.weight": make_shard_layout(0)})
    )
    assert pinned.objective > solution.objective


def test_keys_and_values_alone_change_layout_where_their_heads_are_too_few() -> None:
    model = decoder("llama")
    solution = solve_sharding(model, "tp", 16, H100(16))
    layer = Layer.of(model, solution, "q_proj.weight")
    assert layer.strategy("q_proj_weight") == "R', S0 -> S2"
    assert layer.of_operator("scaled_dot_product_attention") == ["S1, S1, S1 -> S1"]
    local = shard_block(layer.block, layer.sharding, "tp", 16)
    moved = [n.args[0] for n in local.graph.nodes if "all_to_all" in str(n.target)]
    sources = [{p for p in ancestors(n) if "proj" in p} for n in moved]
    assert {p for found in sources for p in found} == {"self_attn_k_proj_weight", "self_attn_v_proj_weight"}
    assert layer.strategy("o_proj_weight") == "S2, S1 -> P"


def test_gpt2_shards_its_fused_projection_in_sections_and_its_tied_vocabulary() -> None:
    model = decoder("gpt2")
    solution = solve_sharding(model, "tp", 4, H100(4))
    layer = Layer.of(model, solution, "c_attn.weight")
    sections = "[4096,4096,4096]"
    assert layer.strategy("c_attn_weight") == f"R', S0{sections} -> S2{sections}"
    assert layer.of_operator("split_with_sizes") == [f"S2{sections} -> S2, S2, S2"]
    assert layer.of_operator("scaled_dot_product_attention") == ["S1, S1, S1 -> S1"]
    assert layer.strategy("attn_c_proj_weight") == "S2, S1 -> P"
    assert layer.of_operator("layer_norm") == ["S1, R', R' -> S1"] * 2
    assert solution.states["transformer.wte.weight"] == make_shard_layout(0)
    assert Layer.of(model, solution, "wpe.weight").sharding.outputs == (make_shard_layout(1),)


def test_small_blocks_are_solved_in_a_moment() -> None:
    """The budget is 200 ms to build and 100 ms to solve on an idle machine; this one may be busy."""
    model = decoder("llama")
    seconds = min(solve_sharding(model, "tp", 4, H100(4)).seconds for _ in range(3))
    assert seconds < 1.5


# --- the batch --------------------------------------------------------------------------------------------------------


class Batch(H100):
    """Nothing may be sent over the batch's axis but totals that need no gradient."""

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        change = RESHARDS[source.kind, target.kind]
        if change.forward is None and (change.backward is None or not differentiable):
            return 1e-9
        return 1e-9 if change.forward == "all_reduce" and not differentiable else math.inf

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        return 0.0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_batch_is_split_and_the_loss_is_a_partial_sum(family: str) -> None:
    model = decoder(family, layers=2, batch=8, length=64)
    inputs = {i.value: (make_shard_layout(0), REPLICATED) for i in model.inputs}
    solution = solve_sharding(model, "data", 8, Batch(8), LayoutRules(inputs))
    assert {solution.values[i.value] for i in model.inputs} == {make_shard_layout(0)}
    assert solution.values[model.loss] == PARTIAL
    trained = {name for name, state in model.states.items() if state.kind == "parameter"}
    assert {solution.states[name] for name in trained} == {READ_SHARDED}
    assert solution.states.keys() - trained <= {k for k, w in solution.states.items() if w == REPLICATED}
    assert solution.matmul_sharded == 1.0


def test_samples_that_meet_are_seen() -> None:
    class InBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            return (y @ y.T).logsumexp(-1).sum()

    model = folded(InBatch(), (torch.zeros(8, 4),))
    inputs = {i.value: (make_shard_layout(0),) for i in model.inputs}
    with pytest.raises(ShardingError, match="no sharding over 8 ranks of 'data'"):
        solve_sharding(model, "data", 8, Batch(8), LayoutRules(inputs))


# --- exactness --------------------------------------------------------------------------------------------------------


class Random:
    """Costs drawn once for each thing that has one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _draw(self, *what: object) -> float:
        return random.Random(f"{self.seed} {what}").choice([0.0, 1.0, 2.0, 5.0])

    def node(self, node: fx.Node, strategy: Strategy, num_ranks: int) -> float:
        return self._draw(node.name, strategy)

    def reshard(self, spec: TensorSpec, source: Layout, target: Layout, differentiable: bool) -> float:
        return self._draw(spec, source, target, differentiable)

    def state(self, spec: TensorSpec, layout: Layout, num_ranks: int) -> float:
        return self._draw(spec, layout)

    def boundary(self, spec: TensorSpec, layout: Layout) -> float:
        return self._draw(spec, layout, "boundary")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh()


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.total = Total()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.total(x)


@cache
def tower() -> FoldedModel:
    return folded(Tower(), (torch.zeros(4, 4),))


def block_price(block: Block, chosen: BlockSharding, costs: ShardingCosts, num_ranks: int) -> float:
    """What one call of a block costs, added up along its graph; infinite where it cannot be run."""
    total = 0.0
    made: dict[tuple[fx.Node, int], Layout] = {}
    asked: dict[tuple[fx.Node, int], set[Layout]] = {}
    origin: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in block.graph.nodes:
        origin[node] = (node, 0)
        if node.op == "placeholder":
            made[node, 0] = {**chosen.inputs, **chosen.states}[node.name]
        elif node.target is operator.getitem:
            origin[node] = node.args
        elif node.op == "call_function":
            strategy = chosen.strategies[node.name]
            total += costs.node(node, strategy, num_ranks)
            made.update({(node, k): layout for k, layout in enumerate(strategy.results)})
            for operand, layout in zip(operands_of(node), strategy.operands, strict=True):
                asked.setdefault(origin[operand], set()).add(layout)
    for node, layout in zip(block.outputs, chosen.outputs, strict=True):
        asked.setdefault(origin[node], set()).add(layout)
    for value in values_of(block):
        source = made[value.source, value.index]
        for target in asked[value.source, value.index] - {source}:
            if (source.kind, target.kind) not in RESHARDS:
                return math.inf
            total += costs.reshard(value.spec, source, target, value.grad)
    return total


def tie_price(
    model: FoldedModel, costs: ShardingCosts, values: dict[str, Layout], states: dict[str, Layout], num_ranks: int
) -> float:
    """What the values between calls and the states cost."""
    total = sum(costs.boundary(model.values[v], layout) for v, layout in values.items())
    return total + sum(costs.state(s.spec, states[n], num_ranks) for n, s in model.states.items())


def price(model: FoldedModel, costs: ShardingCosts, solution: ShardingSolution) -> float:
    calls = sum(
        block_price(model.blocks[c.block], solution.blocks[c.block], costs, solution.num_ranks) for c in model.calls
    )
    return calls + tie_price(model, costs, solution.values, solution.states, solution.num_ranks)


def cheapest(block: Block, costs: ShardingCosts, hidden: Layout, states: tuple[Layout, ...], result: Layout) -> float:
    """The price of a block of a tower over two ranks, by trying every strategy of every operator."""
    nodes = [n for n in block.graph.nodes if n.op == "call_function"]
    inputs, bound = dict.fromkeys(block.inputs, hidden), dict(zip(block.states, states, strict=True))
    return min(
        block_price(
            block, BlockSharding(dict(zip([n.name for n in nodes], c, strict=True)), inputs, bound, (result,)), costs, 2
        )
        for c in itertools.product(*(enumerate_strategies(n, 2) for n in nodes))
    )


def cheapest_tower(model: FoldedModel, costs: ShardingCosts, hidden_layouts: list[Layout]) -> float:
    """Layers share the layout of their input, output and weight."""
    layers, head = (model.blocks[name] for name in dict.fromkeys(c.block for c in model.calls))
    best = math.inf
    for hidden, weight in itertools.product(
        hidden_layouts, (REPLICATED, READ_SHARDED, make_shard_layout(0), make_shard_layout(1))
    ):
        inner = 2 * cheapest(layers, costs, hidden, (weight,), hidden)
        for scale in (REPLICATED, READ_SHARDED, make_shard_layout(0)):
            values = {v: REPLICATED if v == model.loss else hidden for v in model.values}
            states = {s: scale if "scale" in s else weight for s in model.states}
            outer = cheapest(head, costs, hidden, (scale,), REPLICATED)
            best = min(best, inner + outer + tie_price(model, costs, values, states, 2))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_other_sharding_is_cheaper(seed: int) -> None:
    model, costs = tower(), Random(seed)
    hidden = [REPLICATED, READ_SHARDED, make_shard_layout(0), make_shard_layout(1)]
    inputs = {i.value: hidden for i in model.inputs}
    solution = solve_sharding(model, "tp", 2, costs, LayoutRules(inputs))
    best = cheapest_tower(model, costs, hidden)
    assert price(model, costs, solution) == pytest.approx(best)
    assert solution.objective == pytest.approx(best)
    assert solution.bound == pytest.approx(best)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_objective_is_what_the_sharding_costs(family: str) -> None:
    model = decoder(family)
    solution = solve_sharding(model, "tp", 4, H100(4))
    assert price(model, H100(4), solution) == pytest.approx(solution.objective)


def test_both_forms_of_a_value_with_many_readers_have_one_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tower(), {i.value: (REPLICATED, make_shard_layout(0), make_shard_layout(1)) for i in tower().inputs}
    by_set = [solve_sharding(model, "tp", 2, Random(seed), LayoutRules(inputs)).objective for seed in range(8)]
    monkeypatch.setattr(reshard_graph, "MAX_SETS", 0)
    by_target = [solve_sharding(model, "tp", 2, Random(seed), LayoutRules(inputs)).objective for seed in range(8)]
    assert by_target == pytest.approx(by_set)


# --- what the caller fixes --------------------------------------------------------------------------------------------


def test_pins_are_kept() -> None:
    model = decoder("llama")
    hidden = next(c.outputs[0] for c in model.calls if c.path == "model.layers.1")
    pins = {"model.layers.2.self_attn.q_proj.weight": make_shard_layout(1), hidden: REPLICATED}
    solution = solve_sharding(model, "tp", 4, H100(4), LayoutRules(pins=pins))
    assert {name: (solution.values | solution.states)[name] for name in pins} == pins
    # the other layers run the same block
    assert solution.states["model.layers.0.self_attn.q_proj.weight"] == make_shard_layout(1)


def test_an_unknown_pin_is_refused() -> None:
    with pytest.raises(ShardingError, match="pins: no value or state is called 'q_proj'"):
        solve_sharding(tower(), "tp", 2, Random(0), LayoutRules(pins={"q_proj": make_shard_layout(0)}))


def test_a_pin_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"of shape \[4, 4\] over 3 ranks.*pinned S0"):
        solve_sharding(tower(), "tp", 3, Random(0), LayoutRules(pins={"layers.0.weight": make_shard_layout(0)}))


def test_one_rank_holds_everything_whole() -> None:
    model = decoder("llama")
    solution = solve_sharding(model, "tp", 1, H100(1))
    assert {*solution.values.values(), *solution.states.values()} == {REPLICATED}
    for block in model.blocks.values():
        assert shard_block(block, solution.blocks[block.name], "tp", 1) is block
    assert solution.objective == solution.bound == pytest.approx(price(model, H100(1), solution))
    assert solution.matmul_sharded == 0.0


def test_operators_without_a_rule_are_named_with_their_share() -> None:
    @torch.library.custom_op("sharding_solver_test::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        return x / 2

    halve.register_fake(torch.empty_like)
    halve.register_autograd(lambda ctx, grad: grad / 2)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halve(x).tanh().sum()

    model = folded(Model(), (torch.zeros(64, 64),))
    solution = solve_sharding(model, "tp", 2, H100(2))
    ((name, share),) = solution.without_rule.items()
    assert "halve" in name
    assert 0 < share < 1
