"""A mixture of experts that sorts its rows, rewritten to keep them in order: the same numbers, and rows to shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops import experts
from partitioner.passes.rules import factors_of
from partitioner.passes.rules.strategies import enumerate_strategies

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


def computed(model: nn.Module, *inputs: Tensor) -> tuple[fx.Graph, Tensor]:
    """The normal form of a model of one output, and what it makes of ``inputs``."""
    captured = normalize(capture(model, inputs))
    known = {**dict(model.named_parameters()), **captured.constants, **{str(i): x for i, x in enumerate(inputs)}}
    leaves = [known[captured.placeholders[n.name]] for n in captured.graph.nodes if n.op == "placeholder"]
    (made,) = run_graph(captured.graph, leaves)
    return captured.graph, made


class Grouped(nn.Module):
    """torch's own grouped products, with rows read, written and added up in the various ways of users."""

    def __init__(self, read: str, back: str) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.up = nn.Parameter(torch.randn(E, F, H) * 0.3)
        self.down = nn.Parameter(torch.randn(E, H, F) * 0.3)
        self.read, self.back = read, back

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K)
        order = chosen.reshape(-1).argsort(stable=True)
        places = order // K
        wide = places.reshape(-1, 1)
        rows = x[places] if self.read == "index" else x.gather(0, wide.expand(-1, H))
        counts = torch.histc(chosen.reshape(-1).float(), bins=E, min=0, max=E - 1)
        ends = counts.cumsum(0).to(torch.int32)
        inner = nn.functional.silu(nn.functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends))
        made = torch._grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)
        shares = weights.reshape(-1)[order].reshape(-1, 1)
        if self.back == "scatter_add":
            return torch.zeros_like(x).scatter_add(0, wide.expand(-1, H), made * shares)
        if self.back == "repeat":
            return torch.zeros_like(x).scatter_add(0, wide.repeat(1, H), made * shares)
        empty = torch.zeros(T * K, H, dtype=x.dtype)
        if self.back == "index_copy":
            back = empty.index_copy(0, order, made)
        elif self.back == "scatter":
            back = empty.scatter(0, order.reshape(-1, 1).expand(-1, H), made)
        else:
            back = empty
            back[order] = made
        return torch.bmm(weights.reshape(-1, 1, K), back.reshape(T, K, H)).squeeze(1)


@pytest.mark.parametrize("back", ["scatter_add", "repeat", "index_copy", "scatter", "index_put"])
@pytest.mark.parametrize("read", ["index", "gather"])
def test_grouped_products_of_torch(read: str, back: str):
    """Traced in types that torch does not trace them in, and in the form that can be sharded."""
    torch.manual_seed(0)
    model, x = Grouped(read, back), torch.randn(T, H)
    graph, made = computed(model, x)
    found = targets(graph)
    assert found.count("partition.expert_mm.default") == 2
    gone = {"argsort", "sort", "histc", "searchsorted", "scatter_add", "index_copy", "index_put", "_grouped_mm"}
    assert not gone & {name.split(".")[1] for name in found if "." in name}
    torch.testing.assert_close(made, model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_products_that_are_not_by_expert(dtype: torch.dtype):
    """Groups that nothing sorts: cut at ends that are given, with rows behind the last; and one for each matrix."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16, dtype=dtype))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            first = nn.functional.grouped_mm(x, self.weight, offs=ends)[:6].sum()
            return first + nn.functional.grouped_mm(x.reshape(3, 4, 8), self.weight).sum()

    torch.manual_seed(0)
    model, x, ends = Cut(), torch.randn(12, 8, dtype=dtype), torch.tensor([2, 2, 6], dtype=torch.int32)
    _, made = computed(model, x, ends)
    rows = x.float()
    expected = rows[:2] @ model.weight[0].float(), rows[2:6] @ model.weight[2].float()
    every = torch.bmm(rows.reshape(3, 4, 8), model.weight.float())
    torch.testing.assert_close(made.float(), sum(p.sum() for p in (*expected, every)), rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("change", ["ends", "places", "descending", "back"])
def test_groups_of_other_sorts_stay(change: str):
    """Ends of other keys or in another order, and rows written or put back in an order of their own."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, H, F))

        def forward(self, x: Tensor, keys: Tensor, others: Tensor) -> Tensor:
            order = keys.argsort(stable=True, descending=change == "descending")
            counts = torch.histc((others if change == "ends" else keys).float(), bins=E, min=0, max=E - 1)
            made = nn.functional.grouped_mm(x[order], self.weight, offs=counts.cumsum(0).to(torch.int32))
            if change == "back":
                return made[order.argsort(descending=True)]
            places = order.flip(0) if change == "places" else order
            return torch.zeros_like(made).index_copy(0, places, made)

    torch.manual_seed(0)
    keys, others = torch.tensor([3, 1, 0, 0, 2, 1, 1, 3]), torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    model, x = Other(), torch.randn(8, H)
    torch.testing.assert_close(computed(model, x, keys, others)[1], model(x, keys, others))


def test_rows_of_experts_can_be_sharded():
    pytest.importorskip("transformers.integrations.moe")
    graph = normalize(capture(Experts("index_put", "histc"), (torch.randn(T, H),))).graph
    for node in graph.nodes:
        if str(node.target) == "partition.expert_mm.default":
            assert str(factors_of(node)) == "t k, e k n, t -> t n"
            assert {s.factor for s in enumerate_strategies(node, 2)} == {None, "t", "k", "n", "e"}
        elif node.op == "call_function":
            assert any(s.factor is not None for s in enumerate_strategies(node, 2)), node


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
