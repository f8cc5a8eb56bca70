"""What one token of many sequences takes: the bytes of weights and of keys and values, each read once."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from partitioner import Constraints, ExecutionProfile, Topology, partition
from partitioner.cost.call.block_profile import node_operands
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.operators import Kernel, forward_kernels
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.solve.bounds.block_work import block_work

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
BF16 = torch.bfloat16
H100 = Topology.preset("dgx-h100", nodes=1)
DEVICE = H100.device_type(0)
BATCH, LENGTH, WIDTH = 64, 8192, 128
HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 8192, 64, 8, 28672, 1024, 2


def attention_block(kv_heads: int, heads: int) -> Block:
    """One query for each sequence over keys that a view repeats for the heads of a group."""
    graph = fx.Graph()
    shapes = {"q": (BATCH, heads, 1, WIDTH), "kv": (BATCH, kv_heads, LENGTH, WIDTH)}
    nodes = {name: graph.placeholder(name) for name in shapes}
    for name, node in nodes.items():
        node.meta["val"] = torch.empty(shapes[name], dtype=BF16, device="meta")
    one = insert_operator_node(graph, aten.unsqueeze.default, (nodes["kv"], 2), {})
    each = insert_operator_node(graph, aten.expand.default, (one, [-1, -1, heads // kv_heads, -1, -1]), {})
    keys = insert_operator_node(graph, aten.reshape.default, (each, [BATCH, heads, LENGTH, WIDTH]), {})
    graph.output(
        (insert_operator_node(graph, aten.scaled_dot_product_attention.default, (nodes["q"], keys, keys), {}),)
    )
    return Block("block", graph, (), ("q", "kv"))


def kernels(block: Block) -> list[Kernel]:
    found = [n for n in block.graph.nodes if n.op == "call_function"]
    return [k for n in found for k in forward_kernels(n, *node_operands(n, set(), ()))]


def test_what_a_view_repeats_is_read_once():
    """One head of keys for a group of 8: 64 x 8,192 x 128 numbers of two bytes are 134 MB, keys and values 268 MB; the
    view has them eight times."""
    [attention] = kernels(attention_block(1, 8))
    small = 2 * BATCH * 8 * WIDTH * 2  # queries and results
    assert attention.num_bytes == 2 * BATCH * LENGTH * WIDTH * 2 + small


def test_what_a_reshape_copies_is_written_and_read_whole():
    """Eight heads of keys have no view for 64: 1.07 GB are read, and 8.6 GB written, which attention reads twice."""
    copy, attention = kernels(attention_block(8, 64))
    keys = BATCH * 8 * LENGTH * WIDTH * 2
    assert copy.num_bytes == keys + 8 * keys
    assert attention.num_bytes == 2 * 8 * keys + 2 * BATCH * 64 * WIDTH * 2


@pytest.mark.parametrize(("kv_heads", "ranks"), [(1, 8), (8, 1)])
def test_a_block_costs_no_less_than_its_bound(kv_heads: int, ranks: int):
    """Of the whole graph, whose reshape copies, and of a shard of it over 8 ranks, whose does not."""
    whole = block_work(attention_block(8, 64), DEVICE, train=False).at(1.0, ranks)
    part = call_costs(attention_block(kv_heads, 64 // ranks), DEVICE, {}, train=False)
    assert whole.forward_s <= part.forward_s * (1 + 1e-9)


def test_rows_are_written_over_a_copy_of_the_table():
    """2 x 134 MB as memory is copied, and besides them two rows for each sequence at the rate of look-ups."""
    graph = fx.Graph()
    shapes = {"table": (BATCH, 1, LENGTH, WIDTH), "row": (BATCH, 1, 1, WIDTH)}
    table, row = (graph.placeholder(name) for name in shapes)
    for node in (table, row):
        node.meta["val"] = torch.empty(shapes[node.name], dtype=BF16, device="meta")
    place = graph.placeholder("place")
    place.meta["val"] = torch.empty(1, dtype=torch.int64, device="meta")
    graph.output((insert_operator_node(graph, aten.index_copy.default, (table, 2, place, row), {}),))
    copied, written = kernels(Block("block", graph, (), ("table", "row", "place")))
    assert (copied.kind, copied.num_bytes) == ("pointwise", 2 * BATCH * LENGTH * WIDTH * 2)
    assert (written.kind, written.num_bytes) == ("lookup", 2 * BATCH * WIDTH * 2 + 8)


class Layer(nn.Module):
    """A layer of Llama-70B's dimensions whose keys and values come as inputs and repeat for their group."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = HEADS * WIDTH, KV_HEADS * WIDTH
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n, bias=False) for n in (wide, narrow, narrow))
        self.out, self.down = nn.Linear(wide, HIDDEN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).view(-1, 1, HEADS, WIDTH).transpose(1, 2)
        k, v = (p(x).view(-1, 1, KV_HEADS, WIDTH).transpose(1, 2) for p in (self.k, self.v))
        repeated = (t[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2) for t in (keys, values))
        x = x + self.out(F.scaled_dot_product_attention(q, *repeated).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x)), k, v


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, made = self.tokens(ids), []
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            x, k, v = layer(x, keys, values)
            made.append((k, v))
        return self.head(x), made


def test_a_token_takes_as_long_as_its_bytes():
    """64 sequences of 8,192 tokens, 8 H100, each a head of keys and an eighth of a layer's weights:

    weights  (8,192 x (8,192 + 2 x 1,024 + 8,192) + 3 x 8,192 x 28,672) x 2 B / 8      = 214 MB
    cache    2 x 64 x 8,192 x 128 x 2 B                                                 = 268 MB
    cuts     a rank is given all heads and copies its own: the cache read and written    = 537 MB
    at 3.35 TB/s                                                                        = 304 us a layer

    Kernels reach 0.82 to 0.87 of that and start twelve times for 5 us; two all-reduces of 1 MB take 34 us each.
    """
    with torch.device("meta"):
        model = Decode().to(BF16)
        cache = [tuple(torch.empty(2, KV_HEADS, LENGTH, WIDTH, dtype=BF16) for _ in range(2)) for _ in range(LAYERS)]
        inputs = {"ids": torch.zeros(2, 1, dtype=torch.int64), "cache": cache}
    fixed, profile = Constraints(tp=8, microbatch_size=BATCH), ExecutionProfile(graphs="all")
    asked = {"objective": "infer", "global_batch": BATCH, "constraints": fixed, "profile": profile}
    plan = partition(model, H100, inputs, estimate_only=True, **asked)
    layer = (HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * WIDTH) + 3 * HIDDEN * FFN) * 2 / 8
    least = LAYERS * (layer + 3 * 2 * BATCH * LENGTH * WIDTH * 2) / 3.35e12
    assert layer == pytest.approx(214e6, rel=0.01) and least == pytest.approx(LAYERS * 304e-6, rel=0.01)
    taken = least / 0.85 + LAYERS * (12 * 5e-6 + 2 * 34e-6)
    assert least < plan.estimate.step_time == pytest.approx(taken, rel=0.15)
    assert "graphs=all" in plan.planned_only
