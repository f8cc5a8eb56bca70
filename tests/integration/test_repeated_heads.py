"""Key heads that a model repeats are exchanged once: the bytes by hand arithmetic, and what runs equals the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import partitioner
from partitioner import Constraints, Plan, Topology, partition, run_reference
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.collectives import context_exchanges
from partitioner.cost.step.placed_mesh import PlacedMesh
from partitioner.passes.ir.serialize import block_from_data
from partitioner.passes.shard.repeated_heads import count_exchanged_copies, match_repeated_heads
from partitioner.plans.verify import TOLERANCE, compare
from partitioner.solve.bounds.block_work import block_work
from tests.helpers.context_models import SEQ, Decoder, inputs, repeat_kv

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH, HEADS, KV_HEADS, BYTES = 4, 8, 2, 8  # of a head; heads of queries and of keys; a number in float64


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def plan_of(model: Decoder, batch: int = 4, **fixed: Any) -> Plan:
    fixed = {"pp": 1, "dp": 1, "tp": 1, **fixed}
    size = math.prod(fixed[axis] for axis in ("pp", "dp", "tp", "cp"))
    return partition(model, Topology.local(size), inputs(batch), constraints=Constraints(**fixed))


def operators(plan: Plan, name: str) -> list[tuple[list[str], list[Any]]]:
    """Names of the operands, and arguments, of each operator ``name`` over ``cp``, in the layers."""
    return [
        ([arg["node"] for arg in node["args"] if isinstance(arg, dict)], node["args"])
        for block in plan.program.blocks.values()
        for node in block.nodes
        if str(node.get("target")) == f"partition.{name}.default" and "cp" in node["args"]
    ]


def sizes(plan: Plan) -> dict[str, int]:
    """The bytes of each tensor of the layers' block, by name."""
    (block,) = (b for b in plan.program.blocks.values() if any("attention" in str(n.get("target")) for n in b.nodes))
    return {n["name"]: BYTES * math.prod(n["val"][0]) for n in block.nodes if isinstance(n.get("val"), list)}


MESHES: list[dict[str, Any]] = [
    dict(cp=2, context="ring"),
    dict(cp=2, context="all_gather"),
    dict(cp=2, context="ulysses"),
    dict(cp=4, context="ring"),
    dict(cp=2, tp=2, context="ring"),
    dict(cp=4, context="ulysses"),
]
CASES = [("expanded", mesh) for mesh in MESHES[:4]]
CASES += [pytest.param("expanded", mesh, marks=pytest.mark.slow) for mesh in MESHES[4:]]  # type: ignore[misc]
CASES += [pytest.param("interleaved", mesh, marks=pytest.mark.slow) for mesh in MESHES]  # type: ignore[misc]


@pytest.mark.parametrize(("mask", "fixed"), CASES, ids=str)
def test_it_equals_the_model_that_repeats(mask: str, fixed: dict[str, Any], ranks: partitioner.LocalRanks):
    """Eight query heads and two key heads, in float64: outputs, loss and every gradient."""
    model = Decoder((mask, mask), KV_HEADS)
    plan = plan_of(model, **fixed)
    run = partitioner.run_local(plan, model, inputs(), ranks=ranks, timeout=120)
    errors = compare(run, run_reference(model, inputs()), plan.program)
    assert len(errors) > 10
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("mask", "algorithm", "cp"),
    [("causal", "ring", 2), ("expanded", "ring", 4), ("expanded", "all_gather", 2), ("interleaved", "ring", 2)],
)
def test_keys_and_values_travel_before_they_are_repeated(mask: str, algorithm: str, cp: int):
    """Four samples of 48 positions, of which each of ``cp`` ranks has 48 / cp; two key heads of width 4 in float64:
    4 x 2 x 24 x 4 x 8 = 6,144 bytes of keys and as many of values at cp=2, where eight heads were 24,576."""
    plan = plan_of(Decoder((mask, mask), KV_HEADS), cp=cp, context=algorithm, microbatch_size=4)
    ((names, args),) = operators(plan, "context_attention")
    assert args[-1] == algorithm
    each = 4 * KV_HEADS * (SEQ // cp) * WIDTH * BYTES
    assert [sizes(plan)[name] for name in names] == [4 * each, each, each]
    assert each == {2: 6144, 4: 3072}[cp]


@pytest.mark.parametrize(("cp", "heads"), [(2, KV_HEADS), (4, HEADS)])
def test_ulysses_exchanges_as_few_heads_as_its_ranks_can_share(cp: int, heads: int):
    """Two key heads go to two ranks, one to each; four ranks share the eight that the model makes of them."""
    plan = plan_of(Decoder(("expanded", "expanded"), KV_HEADS), cp=cp, context="ulysses", microbatch_size=4)
    sent = [sizes(plan)[names[0]] for names, _ in operators(plan, "all_to_all")]
    query = 4 * HEADS * (SEQ // cp) * WIDTH * BYTES
    key = query * heads // HEADS
    assert sorted(sent) == sorted([query, key, key, query])  # queries, keys, values, and back


def test_what_is_priced_is_what_travels():
    """Forward at cp=2 over a link of 1 GB/s and 100 us: keys and values of 6,144 bytes each in one hop of 112.3 us."""
    plan = plan_of(Decoder(("expanded", "expanded"), KV_HEADS), cp=2, context="ring", microbatch_size=4)
    (data,) = (b for b in plan.program.blocks.values() if any("context" in str(n.get("target")) for n in b.nodes))
    block = block_from_data("layer", data.nodes, data.states, data.inputs)
    (node,) = (n for n in block.graph.nodes if "context_attention" in str(n.target))
    group = PlacedMesh(plan.topology, plan.mesh).group("cp")
    (forward, _), beside = context_exchanges(node, {"cp": group})
    assert beside
    assert forward == pytest.approx(100e-6 + 2 * 6144 / 1e9)


@pytest.mark.parametrize(
    ("mask", "algorithm"), [("expanded", "ring"), ("expanded", "ulysses"), ("interleaved", "ring")]
)
def test_bounds_stay_below_what_ranks_take(mask: str, algorithm: str):
    """A layer of one of two ranks that share a sequence does no less, and keeps no less, than half of the whole."""
    model = Decoder((mask, mask), KV_HEADS)
    plan, whole = plan_of(model, cp=2, context=algorithm, microbatch_size=4), plan_of(model, cp=1, microbatch_size=4)
    blocks = []
    for program in (plan.program, whole.program):
        (data,) = (b for b in program.blocks.values() if any("attention" in str(n.get("target")) for n in b.nodes))
        blocks.append(block_from_data("layer", data.nodes, data.states, data.inputs))
        for node in blocks[-1].graph.nodes:
            node.meta.setdefault("grad", True)
    device = plan.topology.device_type(0)
    bound, cost = block_work(blocks[1], device).at(0.5, 1, cp=2), call_costs(blocks[0], device, {})
    rounded = 1 + 1e-9
    assert bound.forward_s <= cost.forward_s * rounded and bound.backward_s <= cost.backward_s * rounded
    assert bound.saved_bytes <= cost.saved_bytes


# --- what is recognised -----------------------------------------------------------------------------------------------

Repeat = Callable[[Tensor, int], Tensor]


def by_positions(x: Tensor, n: int) -> Tensor:
    """Positions first, as Meta's Llama has it: ``[b, s, kv, d]``."""
    y = x.transpose(1, 2)
    b, s, kv, d = y.shape
    return y[:, :, :, None, :].expand(b, s, kv, n, d).reshape(b, s, kv * n, d).transpose(1, 2)


SPELLINGS: dict[str, Repeat] = {
    "repeat_kv": repeat_kv,
    "by_positions": by_positions,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, dim=1),
    "repeat": lambda x, n: x[:, :, None].repeat(1, 1, n, 1, 1).flatten(1, 2),
    "contiguous": lambda x, n: repeat_kv(x, n).contiguous(),
    "converted": lambda x, n: repeat_kv(x, n).to(torch.float32),
    "in_parts": lambda x, n: torch.unflatten(repeat_kv(x, n), 1, (-1, n)).flatten(1, 2),
}
OTHERS: dict[str, Repeat] = {
    "tiled": lambda x, n: x.repeat(1, n, 1, 1),  # heads in turns
    "in_positions": lambda x, n: x.repeat_interleave(n, dim=2),
    "changed": lambda x, n: repeat_kv(x, n) + 1,
    "cut": lambda x, n: torch.unflatten(repeat_kv(x, n), 1, (-1, n, 1)).transpose(1, 2).flatten(1, 3),
    "plain": lambda x, n: x.clone(),
    "merged": lambda x, n: (
        x[:, :, None].expand(-1, -1, n, -1, -1).transpose(2, 3).reshape(x.shape[0], x.shape[1], -1, x.shape[3])
    ),
}


def traced(repeat: Repeat, x: Tensor, times: int) -> tuple[fx.GraphModule, fx.Node]:
    """The graph of ``repeat``, and what it returns."""
    module = make_fx(lambda given: repeat(given, times), tracing_mode="fake")(x)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    (result,) = output.all_input_nodes
    return module, result


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("times", [2, 3])
def test_every_spelling_is_undone(spelling: str, times: int):
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    module, result = traced(SPELLINGS[spelling], x, times)
    found = match_repeated_heads(result)
    assert found is not None and found.times == times
    repeated = module(x)
    with module.graph.inserting_before(result.next):
        once = found.build(module.graph)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    output.args = (once,)
    module.recompile()
    assert torch.equal(module(x).repeat_interleave(times, 1), repeated)


@pytest.mark.parametrize("spelling", OTHERS)
def test_what_is_no_repetition_of_heads_is_left_alone(spelling: str):
    _, result = traced(OTHERS[spelling], torch.randn(2, 4, 5, 3), 2)
    assert match_repeated_heads(result) is None


@pytest.mark.parametrize(
    ("heads", "times", "tp", "left"),
    [(8, 4, 1, 1), (8, 4, 2, 1), (8, 4, 4, 2), (8, 4, 8, 4), (64, 8, 16, 2), (6, 3, 5, 3)],
)
def test_ranks_that_share_heads_keep_as_many_as_they_share(heads: int, times: int, tp: int, left: int):
    """Of 64 heads that are 8 in eightfold, 16 ranks share 16, each key head twice."""
    assert count_exchanged_copies(heads, times, tp) == left
