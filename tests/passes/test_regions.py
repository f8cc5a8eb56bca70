"""Where a graph works by expert: found from the graph alone, and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, PlanError, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.experts.dispatch import distribute_experts
from partitioner.passes.experts.regions import ExpertRegion, find_expert_regions
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.verify import check_block
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.rules import by_expert, by_group, rule
from partitioner.passes.shard.fold import fold
from tests.helpers.experts_zoo import HIDDEN, PlainExperts, build, inputs, plain, plain_inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

E, K, T, F = 4, 2, 12, 16


def blocks_with_regions(model: nn.Module, batch: Any) -> list[tuple[Block, list[ExpertRegion]]]:
    folded = fold(normalize(capture(model, batch)))
    mark_gradients(folded)
    found = [(block, find_expert_regions(block)) for block in folded.blocks.values()]
    return [(block, regions) for block, regions in found if regions]


def targets(block: Block) -> list[str]:
    return [str(n.target) for n in block.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("form", ["gathered", "dense"])
def test_weights_and_biases_of_experts_are_found(form: str):
    ((_, (region,)),) = blocks_with_regions(plain(form=form), plain_inputs())
    assert region.states == {"up": 0, "up_bias": 0, "down": 0, "down_bias": 0}
    assert (region.num_experts, len(region.products), len(region.entries), len(region.exits)) == (4, 2, 1, 1)
    assert (region.keys is None) == (form == "dense")


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_librarys_ways_to_compute_experts_are_one_form(implementation: str):
    """The library's operators are another for each implementation; the region is the same."""
    pytest.importorskip("transformers")
    ((block, (region,)),) = blocks_with_regions(build("qwen3_moe", implementation), inputs())
    assert region.states == {"mlp_experts_gate_up_proj": 0, "mlp_experts_down_proj": 0}
    assert targets(block).count("partition.expert_mm.default") == 2
    assert not {"aten.bmm.default", "aten.sort.default", "aten._grouped_mm.default"} & set(targets(block))


def test_rows_are_sent_once_and_brought_back_once():
    ((block, regions),) = blocks_with_regions(plain(), plain_inputs())
    spread, layouts = distribute_experts(block, regions, "ep", 2)
    check_block(spread, {"ep": 2})
    sent = [t for t in targets(spread) if t.startswith("partition.") and "expert" not in t]
    assert sent == ["partition.route.default", "partition.dispatch.default", "partition.combine.default"]
    assert {name: str(layout) for name, layout in layouts.items()} == dict.fromkeys(regions[0].states, "S0")
    assert tuple(spread.node("up").meta["val"].shape) == (2, HIDDEN, 48)


class Heads(nn.Module):
    """A matrix of its own for each head: a batched product like that of experts, but nothing chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.view(T, E, 8).transpose(0, 1), self.weight).transpose(0, 1).reshape(T, E * 8)


def test_heads_are_no_experts():
    assert blocks_with_regions(Heads(), (torch.randn(T, E * 8),)) == []


class Read(PlainExperts):
    """Whose experts' weights something else reads, too."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target) + 0.1 * (self.up**2).sum()


def test_weights_that_are_read_elsewhere_are_not_spread():
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="up is used as a weight of experts in one call, but not in another"):
        partition(Read(), Topology.local(2), plain_inputs(), constraints=Constraints(ep=2))
    plan = partition(Read(), Topology.local(2), plain_inputs(), constraints=Constraints(dp=2))
    assert plan.mesh["ep"] == 1


def test_experts_that_do_not_divide_are_refused():
    ((block, regions),) = blocks_with_regions(plain(num_experts=6), plain_inputs())
    with pytest.raises(UnsupportedError, match=r"6 experts cannot be distributed over ep=4; expected a divisor of 6"):
        distribute_experts(block, regions, "ep", 4)


# --- products with gathered weights -----------------------------------------------------------------------------------


class Gathered(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(8, E)
        self.weight = nn.Parameter(torch.randn(E, 8, F))
        self.product, self.choose = product, choose

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight[self.choose(self.router(x))])


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row": lambda x, w: torch.bmm(x.unsqueeze(1), w).squeeze(1),
    "column": lambda x, w: torch.bmm(w.transpose(1, 2), x.unsqueeze(2)).squeeze(2),
    "matmul": lambda x, w: (x[:, None] @ w)[:, 0],
}


@pytest.mark.parametrize("product", ["row", "matmul"])
def test_a_matrix_for_each_row_is_a_product_by_expert(product: str):
    torch.manual_seed(0)
    model = Gathered(PRODUCTS[product], lambda scores: scores.argmax(-1))
    x = torch.randn(T, 8)
    captured = normalize(capture(model, (x,)))
    assert "partition.expert_mm.default" in {str(n.target) for n in captured.graph.nodes}
    known = dict(model.named_parameters())
    leaves = [known.get(captured.placeholders[n.name], x) for n in captured.graph.nodes if n.op == "placeholder"]
    (made,) = run_graph(captured.graph, leaves)
    torch.testing.assert_close(made, model(x))


def test_numbers_that_may_be_out_of_range_are_left_alone():
    """``weight[-1]`` is the last matrix, to a product by expert it is none."""
    model = Gathered(PRODUCTS["row"], lambda scores: scores.argmax(-1) - 1)
    graph = normalize(capture(model, (torch.randn(T, 8),))).graph
    assert "partition.expert_mm.default" not in {str(n.target) for n in graph.nodes}


# --- operators of other libraries -------------------------------------------------------------------------------------


@torch.library.custom_op("tests::grouped", mutates_args=())
def grouped(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """Rows sorted by expert, weights ``[e, n, k]``, and how many rows each has."""
    parts = x.split(sizes.tolist())
    return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])


@grouped.register_fake
def _(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, sizes = ctx.saved_tensors
    parts = list(zip(x.split(sizes.tolist()), grad.split(sizes.tolist()), weight, strict=True))
    return torch.cat([g @ w for _, g, w in parts]), torch.stack([g.T @ p for p, g, _ in parts]), None


grouped.register_autograd(_grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("tests::scaled", mutates_args=())
def scaled(x: Tensor, scale: Tensor, expert: Tensor) -> Tensor:
    """Every row times its expert's own ``[k]``."""
    return x * scale[expert]


@scaled.register_fake
def _(x: Tensor, scale: Tensor, expert: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, scale, expert = ctx.saved_tensors
    return scaled(grad, scale, expert), _added(grad * x, expert, scale.shape[0]), None


scaled.register_autograd(_scaled_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _added(rows: Tensor, expert: Tensor, num: int) -> Tensor:
    return rows.new_zeros(num, rows.shape[1]).index_add(0, expert, rows)


class Library(PlainExperts):
    """Experts by the operators above."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E, HIDDEN) + 0.5)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        expert, order = chosen.reshape(-1).sort(stable=True)
        sizes = nn.functional.one_hot(expert, self.num_experts).sum(0)
        rows = torch.ops.tests.scaled(x[order // K], self.scale, expert)
        inner = nn.functional.gelu(torch.ops.tests.grouped(rows, self.up.transpose(1, 2), sizes))
        made = torch.ops.tests.grouped(inner, self.down.transpose(1, 2), sizes) * weights.reshape(-1, 1)[order]
        return torch.zeros_like(x).index_add(0, order // K, made)


@pytest.mark.parametrize(
    ("ranks", "pinned"), [(2, dict(ep=2, dp=2)), (4, dict(ep=2, dp=2, tp=2)), (4, dict(ep=4, etp=1, dp=2, tp=2))]
)
def test_operators_of_another_library_are_spread_by_rules(ranks: int, pinned: dict[str, int]):
    by_group("tests::grouped", "sizes", transposed=True)
    by_expert(torch.ops.tests.scaled.default)
    rule("tests::scaled", "t k, e! k, t -> t k")
    torch.manual_seed(0)
    model = Library()
    plan = partition(model, Topology.local(ranks), plain_inputs(), constraints=Constraints(pp=1, **pinned))
    spread = {n for n, s in plan.program.states.items() if s.expert_layout == "S0"}
    assert spread == {"up", "down", "scale"}
    assert plan.verify(model, plain_inputs()).ok
