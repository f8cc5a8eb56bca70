"""A mixture of experts that sorts its rows, rewritten to keep them in order: the same numbers, and rows to shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from passes import experts
from passes.capture import capture
from passes.factors import factors_of, strategies
from passes.interpret import run_graph
from passes.normalize import normalize

T, K, E, H, F = 6, 2, 4, 8, 12  # tokens, choices of each, experts, hidden, feed-forward


class Experts(nn.Module):
    """The usual way: sort the choices, gather, multiply group by group, put back, add up."""

    def __init__(self, put_back: str, ends: str) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, dtype=torch.float32)
        self.up = nn.Parameter(torch.randn(E, H, F) * 0.3)
        self.bias = nn.Parameter(torch.randn(E, F))
        self.down = nn.Parameter(torch.randn(E, F, H) * 0.3)
        self.put_back, self.ends = put_back, ends

    def group_ends(self, experts_of: Tensor) -> Tensor:
        if self.ends == "one_hot":
            counts = nn.functional.one_hot(experts_of, E).sum(0)
        else:
            counts = torch.histc(experts_of.float(), bins=E, min=0, max=E - 1)
        return counts.cumsum(0).to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K)
        sorted_experts, order = chosen.reshape(-1).sort()
        token = order // K
        rows = x[token]
        ends = self.group_ends(chosen.reshape(-1) if self.ends == "one_hot" else sorted_experts)
        grouped = torch.ops.transformers.grouped_mm_fallback
        inner = nn.functional.silu(grouped(rows, self.up, ends) + self.bias[sorted_experts])
        made = grouped(inner, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        if self.put_back == "index_add":
            return torch.zeros_like(x).index_add(0, token, made)
        if self.put_back == "argsort":
            inverse = order.argsort()
        else:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
        return made[inverse].view(-1, K, H).sum(1)


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("put_back", ["index_add", "argsort", "index_put"])
@pytest.mark.parametrize("ends", ["histc", "one_hot"])
def test_rows_keep_their_order(put_back: str, ends: str):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts(put_back, ends)
    x = torch.randn(T, H)
    captured = normalize(capture(model, (x,)))
    found = targets(captured.graph)
    assert found.count("partition.expert_mm.default") == 2
    assert not {"aten.sort.default", "aten.argsort.default", "aten.histc.default"} & set(found)

    known = dict(model.named_parameters())
    leaves: list[Tensor] = [
        known.get(captured.placeholders[n.name], x) for n in captured.graph.nodes if n.op == "placeholder"
    ]
    (made,) = run_graph(captured.graph, leaves)
    expected = model(x)
    torch.testing.assert_close(made, expected)
    grad = torch.randn_like(expected)
    parameters = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(made, parameters, grad), torch.autograd.grad(expected, parameters, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_rows_of_experts_can_be_sharded():
    pytest.importorskip("transformers.integrations.moe")
    graph = normalize(capture(Experts("index_put", "histc"), (torch.randn(T, H),))).graph
    for node in graph.nodes:
        if str(node.target) == "partition.expert_mm.default":
            assert str(factors_of(node)) == "t k, e k n, t -> t n"
            assert {s.factor for s in strategies(node, 2)} == {None, "t", "k", "n", "e"}
        elif node.op == "call_function":
            assert any(s.factor is not None for s in strategies(node, 2)), node


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, order: rows.flip(0)[order.argsort()],  # looks at the order
        lambda rows, order: (rows + torch.arange(12.0)[:, None])[order.argsort()],  # adds rows that are not sorted
        lambda rows, order: rows[order],  # sorts once more
        lambda rows, order: rows.cumsum(0),
    ],
)
def test_what_looks_at_the_order_stays(change: Any):
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return change(x[order], order)

    x = torch.randn(12, 3)
    graph = normalize(capture(Sorted(), (x,))).graph
    (made,) = run_graph(graph, [x])
    assert "aten.argsort.default" in targets(graph) or "aten.sort.default" in targets(graph)
    torch.testing.assert_close(made, Sorted()(x))


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 0, 1], [3, 3, 3, 3, 3, 3], [-1, 0, 4, 2, 2, 9]])
def test_products_by_expert(chosen: list[int]):
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    made = experts.ops.expert_mm(x, weight, torch.tensor(chosen))
    plain = torch.stack([x[i] @ weight[e] if 0 <= e < 4 else 0 * (x[i] @ weight[0]) for i, e in enumerate(chosen)])
    torch.testing.assert_close(made, plain)
    grad = torch.randn_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(made, (x, weight), grad), torch.autograd.grad(plain, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
