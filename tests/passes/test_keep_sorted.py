"""Rows of experts that stay sorted from product to product: the same numbers and gradients, one sort."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.experts.sorted_rows import keep_rows_sorted
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.model import Block
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops import experts
from partitioner.passes.ops.experts import ops
from partitioner.passes.shard.differentiate import differentiate
from partitioner.passes.shard.fold import fold

E, K, N = 4, 8, 12


class Experts(nn.Module):
    """Two products by expert with a bias, an activation and a share of each row between them."""

    def __init__(self, others: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, K, N, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(E, N, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(E, N, K, dtype=torch.float64))
        self.others = others

    def forward(self, x: Tensor, expert: Tensor, share: Tensor, other: Tensor) -> Tensor:
        inner = nn.functional.silu(ops.expert_mm(x, self.up, expert) + self.bias[expert]) * share
        made = ops.expert_mm(inner, self.down, other if self.others else expert)
        return made + inner.sum(1, keepdim=True)


def block_of(model: nn.Module, *inputs: Tensor) -> Block:
    (block,) = fold(normalize(capture(model, inputs))).blocks.values()
    return block


def targets(graph: fx.Graph) -> Counter[str]:
    return Counter(str(n.target).removesuffix(".default") for n in graph.nodes if n.op == "call_function")


def inputs(rows: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, share = (torch.randn(rows, k, generator=generator, dtype=torch.float64) for k in (K, 1))
    expert, other = (torch.randint(E, (rows,), generator=generator) for _ in range(2))
    return x, expert, share, other


def test_rows_are_sorted_once():
    block = block_of(Experts(), *inputs())
    found = targets(keep_rows_sorted(block).graph)
    assert found["partition.grouped_mm"] == 2 and found["partition.expert_mm"] == 0
    assert found["partition.sort_experts"] == 1
    assert found["partition.unsort_rows"] == 1
    assert found["partition.sort_rows"] == 3  # x, its share, and the expert of the bias
    assert targets(block.graph)["partition.expert_mm"] == 2, "the block itself is as it was"
    needs = [n.meta["val"].is_floating_point() for n in block.placeholders]
    made = differentiate(block, torch.device("cpu"), needs[len(block.states) :], needs[: len(block.states)], [True])
    backward = targets(made.backward.graph)
    assert backward["partition.sort_experts"] == 0
    assert backward["partition.unsort_rows"] == 2 and backward["partition.grouped_mm_weight"] == 2


def test_products_of_different_experts_sort_on_their_own():
    block = block_of(Experts(others=True), *inputs())
    assert keep_rows_sorted(block) is block


@pytest.mark.parametrize("rows", [1, 7])
def test_sorted_rows_give_the_same_numbers_and_gradients(rows: int):
    torch.manual_seed(0)
    model, given_ = Experts(), inputs(rows)
    block = block_of(model, *given_)
    wanted = [p.detach().clone().requires_grad_() for p in model.parameters()]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given_]
    results = []
    for graph in (block.graph, keep_rows_sorted(block).graph):
        operands = dict(zip(block.states, wanted, strict=True))
        operands |= dict(zip(block.inputs, [leaves[i] for i in _order_of(block, given_)], strict=True))
        (made,) = run_graph(graph, [operands[n.name] for n in graph.nodes if n.op == "placeholder"])
        grads = torch.autograd.grad((made * made.detach().cos()).sum(), [*wanted, leaves[0], leaves[2]])
        results.append([made, *grads])
    for plain, kept in zip(*results, strict=True):
        torch.testing.assert_close(kept, plain, rtol=1e-12, atol=1e-12)


def _order_of(block: Block, given_: tuple[Tensor, ...]) -> list[int]:
    """Which of the model's inputs each of the block's is, by shape and type."""
    kinds = [(tuple(t.shape[1:]), t.dtype) for t in given_]
    values = [n.meta["val"] for n in block.placeholders[len(block.states) :]]
    return [kinds.index((tuple(v.shape[1:]), v.dtype)) for v in values]


@settings(max_examples=60)
@given(
    st.lists(st.integers(-1, 5), max_size=12),
    st.sampled_from([(4, 8), (3, 5)]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_grouped_products_are_those_of_each_row(expert: list[int], sizes: tuple[int, int], dtype: torch.dtype):
    """With experts of no rows, rows of no expert, no rows at all; with kernels of torch's and without."""
    torch.manual_seed(0)
    keys = torch.tensor(expert, dtype=torch.int64)
    x, weight = torch.randn(len(expert), sizes[0]).to(dtype), torch.randn(5, *sizes).to(dtype)
    order, ends = experts.sort_experts(keys, 5)
    made = experts.unsort_rows(experts.grouped_mm(experts.sort_rows(x, order), weight, ends), order)
    grad = torch.randn_like(made)
    of_weight = experts.grouped_mm_weight(*(experts.sort_rows(t, order) for t in (x, grad)), ends)
    close = dict(rtol=2e-2, atol=2e-1) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for i, e in enumerate(expert):
        plain = x[i] @ weight[e] if 0 <= e < 5 else torch.zeros(sizes[1], dtype=dtype)
        torch.testing.assert_close(made[i], plain, **close)
    for e in range(5):
        torch.testing.assert_close(of_weight[e], x[keys == e].t() @ grad[keys == e], **close)
