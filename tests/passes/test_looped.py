"""Loops over experts that pick each expert's rows: products of each row with its own expert's matrices."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.normalize.pipeline import normalize
from tests.helpers.looped_experts import E, H, K, Loop, Mixture, N, built, check_equal, targets

pytestmark = pytest.mark.usefixtures("without_baselines")


def one_hot(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y, masks = torch.zeros_like(x), F.one_hot(chosen, E).permute(2, 1, 0)
    for i, expert in enumerate(self.experts):
        place, row = torch.where(masks[i])
        y.index_add_(0, row, expert(x[None, row].reshape(-1, H)) * shares[row, place, None])
    return y


def in_place(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        row, place = torch.where(chosen == i)
        y[row] += shares[row, place, None] * expert(x[row])
    return y


def compared(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y, masks = torch.zeros_like(x), (chosen.unsqueeze(-1) == torch.arange(E)).permute(2, 0, 1)
    for mask, expert in zip(masks, self.experts, strict=True):
        row, place = torch.where(mask)
        y[row] += shares[row, place, None] * expert(x[row])
    return y


def repeated(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    rows, flat = x.repeat_interleave(K, 0), chosen.view(-1)
    y = torch.empty_like(rows)
    for i, expert in enumerate(self.experts):
        y[flat == i] = expert(rows[flat == i])
    return (y.view(-1, K, H) * shares.unsqueeze(-1)).sum(1)


def best(self: Mixture, x: Tensor) -> Tensor:
    share, chosen = self.router(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows = (chosen == i).nonzero().squeeze(-1)
        y[rows] = expert(x[rows])
    return y * share[:, None]


def apart(self: Mixture, x: Tensor) -> Tensor:
    """Rows in two dims."""
    x = x.reshape(2, -1, H)
    share, chosen = self.router(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        y[mask] = expert(x[mask]) * share[mask][:, None]
    return y


def some(self: Mixture, x: Tensor) -> Tensor:
    """Two of six classes have no expert; an expert that all rows share is added."""
    shares, chosen = self.choose(x)
    y = self.experts[0](x) if len(self.experts) > E else x
    for i, expert in enumerate(self.experts):
        row, place = torch.where(chosen == i + 1)
        y = y.index_add(0, row, shares[row, place, None] * expert(x[row]))
    return y


def some_chosen(self: Mixture, x: Tensor) -> Tensor:
    """Rows of no expert stay as they are."""
    chosen, y = self.router(x).argmax(-1), x.clone()
    for i, expert in enumerate(self.experts):
        y[chosen == i + 2] = expert(x[chosen == i + 2])
    return y


def tokens(self: Mixture, x: Tensor) -> Tensor:
    """Masks of tokens, of which each expert has its share."""
    logits = self.router(x)
    best, chosen = logits.topk(K)
    shares = torch.full_like(logits, -torch.inf).scatter(-1, chosen, best).softmax(-1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(dim=-1)
        y[mask] += expert(x[mask]) * shares[mask, i].unsqueeze(1)
    return y


def flat_tokens(self: Mixture, x: Tensor) -> Tensor:
    """The same masks in two shapes."""
    x = x.reshape(2, -1, H)
    shares, chosen = self.router(x).softmax(-1).topk(K)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(dim=-1)
        share = (shares * (chosen == i)).sum(-1)
        rows = expert(x.view(-1, H)[mask.view(-1)])
        y[mask] = y[mask] + rows * share[mask][:, None]
    return y


def weighted_tokens(self: Mixture, x: Tensor) -> Tensor:
    """What each place of a token weighs is picked by the mask of places."""
    shares, chosen = self.choose(x)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        (row,) = torch.where((chosen == i).sum(-1) > 0)
        y.index_add_(0, row, expert(x[row]) * shares[chosen == i].unsqueeze(-1))
    return y


def counted(self: Mixture, x: Tensor) -> Tensor:
    """Two of six classes have no expert; masks of tokens out of one table."""
    shares, chosen = self.choose(x)
    table, spread = F.one_hot(chosen, 6).sum(1), torch.zeros(len(x), 6, dtype=x.dtype).scatter(1, chosen, shares)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts, 1):
        rows = table[:, i].nonzero().squeeze(-1)
        y[rows] += expert(x[rows]) * spread[rows, i, None]
    return y


def first_choice(self: Mixture, x: Tensor) -> Tensor:
    """What is added to rows of one choice."""
    shares, chosen = self.choose(x)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = chosen[:, 0] == i
        y[mask] += expert(x[mask]) * shares[mask, 0, None]
    return y


def second_choice(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y = x.clone()
    for i, expert in enumerate(self.experts):
        (row,) = torch.where(chosen[:, 1] == i)
        y[row] = expert(x[row]) * shares[row, 1, None] + y[row]
    return y


def some_spread(self: Mixture, x: Tensor) -> Tensor:
    """What chooses between the experts' parts has as many truth values as they have numbers."""
    chosen, y = self.router(x).argmax(-1), x
    for i, expert in enumerate(self.experts):
        (row,) = torch.where(chosen == i)
        part = torch.zeros_like(x).index_add(0, row, expert(x[row]))
        y = torch.where((chosen == i)[:, None].expand(-1, H), part, y)
    return y


def some_narrow(self: Mixture, x: Tensor) -> Tensor:
    """Numbers of a type in which nothing is looked up."""
    chosen, y = self.router(x).argmax(-1).to(torch.uint8), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        y[chosen == i] += expert(x[chosen == i])
    return y


ROUTED = {
    "one_hot": (one_hot, {}),
    "in_place": (in_place, {}),
    "biased": (in_place, {"bias": True}),
    "compared": (compared, {}),
    "repeated": (repeated, {"bias": True}),
    "best": (best, {}),
    "apart": (apart, {}),
    "tokens": (tokens, {}),
    "flat tokens": (flat_tokens, {"bias": True}),
    "weighted tokens": (weighted_tokens, {}),
    "some": (some, {"classes": 6}),
    "some, counted": (counted, {"classes": 6}),
    "some, biased": (some, {"classes": 6, "bias": True}),
    "some chosen": (some_chosen, {"classes": 7, "bias": True}),
    "some, first": (first_choice, {}),
    "some, second": (second_choice, {}),
    "some, spread": (some_spread, {"classes": 6}),
    "some, narrow": (some_narrow, {}),
}


@pytest.mark.parametrize("name", ROUTED)
def test_each_row_meets_its_own_expert_alone(name: str):
    loop, options = ROUTED[name]
    model, x = built(loop, **options)
    captured = normalize(capture(model, (x,)))
    found = targets(captured.graph)
    assert found.count("partition.expert_mm.default") == 3
    assert found.count("aten.linear.default") == 1, "the router's"
    assert captured.states["experts.*.up.weight"].parts == tuple(f"experts.{i}.up.weight" for i in range(E))
    assert any("loops over experts" in note for note in captured.notes)
    everyone = not name.startswith("some")
    assert everyone == ("aten.masked_fill.Scalar" not in found and "aten.where.self" not in found)
    assert everyone != any("a mask selects" in note for note in captured.notes)
    check_equal(captured, model, x)


class Packed(Mixture):
    """Weights of all experts in one parameter each."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.experts = nn.ModuleList()
        self.gate_up, self.bias = nn.Parameter(torch.randn(E, 2 * N, H)), nn.Parameter(torch.randn(E, 2 * N))
        self.down = nn.Parameter(torch.randn(E, N, H))


def split(self: Packed, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y, masks = torch.zeros_like(x), F.one_hot(chosen, E).permute(2, 1, 0)
    for i in range(E):
        place, row = torch.where(masks[i])
        gate, up = F.linear(x[row], self.gate_up[i]).chunk(2, dim=-1)
        y.index_add_(0, row, (F.silu(gate) * up) @ self.down[i] * shares[row, place, None])
    return y


def turned(self: Packed, x: Tensor) -> Tensor:
    """Every other column, biases, and a matrix turned over; two experts of four, from the second on."""
    shares, chosen = self.choose(x)
    y = torch.zeros_like(x)
    for i in (1, 2):
        row, place = torch.where(chosen == i)
        both = x[row] @ self.gate_up[i].t() + self.bias[i]
        y[row] += (both[:, ::2].sigmoid() * both[:, 1::2]) @ self.down[i] * shares[row, place, None]
    return y


@pytest.mark.parametrize("loop", [split, turned])
def test_weights_of_all_experts_stay_as_they_are(loop: Loop):
    torch.manual_seed(0)
    model, x = Packed(loop).double(), torch.randn(2, 5, H, dtype=torch.float64)
    captured = normalize(capture(model, (x,)))
    found = targets(captured.graph)
    assert found.count("partition.expert_mm.default") == 2
    assert not any(state.parts for state in captured.states.values())
    check_equal(captured, model, x)


def overlapping(self: Mixture, x: Tensor) -> Tensor:
    """A row may be two experts'."""
    chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        (row,) = torch.where((chosen == i) | (chosen == (i + 1) % E))
        y = y.index_add(0, row, expert(x[row]))
    return y


def chosen_twice(self: Mixture, x: Tensor) -> Tensor:
    """A token may choose an expert twice, and is computed once."""
    chosen = torch.stack([self.router(x).argmax(-1), self.router(x.flip(-1)).argmax(-1)], -1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        y[mask] += expert(x[mask])
    return y


def numbered(self: Mixture, x: Tensor) -> Tensor:
    """Experts do different things."""
    chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        (row,) = torch.where(chosen == i)
        y = y.index_add(0, row, expert(x[row]) * (i + 1))
    return y


def looked_at(self: Mixture, x: Tensor) -> Tensor:
    """What an expert makes is read besides."""
    shares, chosen = self.choose(x)
    y, besides = torch.zeros_like(x), x.new_zeros(())
    for i, expert in enumerate(self.experts):
        row, place = torch.where(chosen == i)
        made = expert(x[row])
        besides = besides + made.square().sum()
        y = y.index_add(0, row, shares[row, place, None] * made)
    return y + besides


def tied(self: Mixture, x: Tensor) -> Tensor:
    """Two experts are one."""
    experts = [self.experts[0], self.experts[0], *list(self.experts)[2:]]
    chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
    for i, expert in enumerate(experts):
        y[chosen == i] = expert(x[chosen == i])
    return y


def mixing(self: Mixture, x: Tensor) -> Tensor:
    """Rows of an expert meet: all have the sum of them."""
    chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows = expert(x[chosen == i])
        y[chosen == i] = rows + rows.sum(0)
    return y


def crossed(self: Mixture, x: Tensor) -> Tensor:
    """As many rows as columns: what one row chose tells a column of all experts' parts."""
    rows = x[:H]
    chosen, y = self.router(rows).argmax(-1), torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        (row,) = torch.where(chosen == i)
        part = torch.zeros_like(rows).index_add(0, row, expert(rows[row]))
        y = torch.where((chosen == i)[None, :], part, y)
    return torch.cat([y, x[H:]])


def promoted(self: Mixture, x: Tensor) -> Tensor:
    """The parts are of another type than what they are put into."""
    chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        (row,) = torch.where(chosen == i)
        part = torch.zeros_like(x, dtype=torch.float32).index_add(0, row, expert(x[row]).float())
        y = torch.where((chosen == i)[:, None], part, y)
    return y


def told_apart(self: Mixture, x: Tensor) -> Tensor:
    """Whether each choice is that of the first expert: of different choices, several are not."""
    chosen, y = self.choose(x)[1].bool(), torch.zeros_like(x)
    for i, expert in enumerate(list(self.experts)[:2]):
        mask = (chosen == i).any(-1)
        y[mask] += expert(x[mask])
    return y


def against_others(self: Mixture, x: Tensor) -> Tensor:
    """Compared with 0, 1, 1, 1."""
    chosen, y = self.choose(x)[1], torch.zeros_like(x)
    table = chosen[..., None] == torch.arange(E).bool()
    for i, expert in enumerate(self.experts):
        mask = table[..., i].any(-1)
        y[mask] += expert(x[mask])
    return y


def one_more_dim(self: Mixture, x: Tensor) -> Tensor:
    """The table has a dim more than the numbers."""
    chosen, y = self.choose(x)[1], torch.zeros_like(x)
    table = chosen[..., None] == torch.arange(E).view(1, 1, 1, E)
    for i, expert in enumerate(self.experts):
        _, row, _ = torch.where(table[..., i])
        y = y.index_add(0, row, expert(x[row]))
    return y


def weighted_by_all(self: Mixture, x: Tensor) -> Tensor:
    """An expert's rows are told how many there are, and what they weigh together."""
    shares, chosen = self.choose(x)
    y = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        mine = chosen == i
        mask = mine.any(-1)
        weight = torch.sum(shares * mine, dim=[]) / (1 + mine.sum(dim=(0, 1)))
        y[mask] += expert(x[mask]) * weight * torch.sum(shares * mine, dim=None)
    return y


OTHERS = [overlapping, chosen_twice, numbered, looked_at, tied, mixing, crossed, promoted, told_apart, against_others,
          one_more_dim, weighted_by_all]  # fmt: skip


@pytest.mark.parametrize("loop", OTHERS)
def test_other_loops_stay_what_they_are(loop: Loop):
    model, x = built(loop)
    captured = normalize(capture(model, (x,)))
    assert "partition.expert_mm.default" not in targets(captured.graph)
    assert not any(state.parts for state in captured.states.values())
    assert any("a mask selects" in note for note in captured.notes)
    check_equal(captured, model, x)


def test_rows_that_are_chosen_twice_are_not_added_up():
    """``y[rows] += more`` writes a row that occurs twice once: only different places may be added up."""

    class Twice(nn.Module):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            row, place = torch.where(chosen == 1)
            y[row] += x[row] * (place[:, None] + 1)
            return y

    x, chosen = torch.randn(3, 2), torch.tensor([[1, 1], [0, 1], [0, 0]])
    with pytest.raises(ValueError, match="reads rows that a mask selects"):
        capture(Twice(), (x, chosen))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("one_hot", dict(dp=2, ep=2)),
        ("in_place", dict(pp=1, dp=2, tp=2, ep=4, etp=1)),
        pytest.param("some", dict(dp=2, ep=2, tp=2), marks=pytest.mark.slow),
        pytest.param("tokens", dict(dp=4, ep=4), marks=pytest.mark.slow),
        ("split", dict(dp=2, ep=2, tp=2)),
        ("flat tokens", dict(pp=2, dp=2, ep=2)),
    ],
)
def test_experts_of_loops_are_spread_over_ranks(name: str, axes: dict[str, int]):
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            loop, options = ROUTED.get(name, (split, {}))
            kind = Mixture if name in ROUTED else Packed
            self.layers = nn.ModuleList(kind(loop, **options) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 5, H)
    plan = partition(model, Topology.local(4), (x,), constraints=Constraints(**axes))
    assert plan.mesh["ep"] == axes["ep"]
    assert plan.verify(model, (x,)).ok


def places_first(self: Mixture, x: Tensor) -> Tensor:
    """As Hugging Face has them: ``[experts, places, tokens]``."""
    shares, chosen = self.choose(x)
    y, masks = torch.zeros_like(x), F.one_hot(chosen, E).permute(2, 1, 0)
    for i, expert in enumerate(self.experts):
        place, row = torch.where(masks[i])
        y.index_add_(0, row, expert(x[row]) * shares[row, place, None])
    return y


def by_mask(self: Mixture, x: Tensor) -> Tensor:
    """Rows read and written by a mask that is turned over."""
    shares, chosen = self.choose(x)
    wide, masks = x[None].expand(K, -1, -1), F.one_hot(chosen, E).permute(2, 1, 0).bool()
    y = torch.zeros_like(wide)
    for i, expert in enumerate(self.experts):
        y[masks[i]] = expert(wide[masks[i]]) * shares.t()[masks[i]][:, None]
    return y.sum(0)


def added_by_mask(self: Mixture, x: Tensor) -> Tensor:
    shares, chosen = self.choose(x)
    y, masks = torch.zeros(K, *x.shape, dtype=x.dtype), F.one_hot(chosen, E).permute(2, 1, 0).bool()
    for i, expert in enumerate(self.experts):
        place, row = torch.where(masks[i])
        y[place, row] += expert(x[row]) * shares[row, place, None]
    return y.sum(0)


@pytest.mark.parametrize("loop", [places_first, by_mask, added_by_mask])
def test_rows_lie_by_token_however_the_masks_are_turned(loop: Loop):
    """A token's rows stay together, so that what is cut by tokens has rows that are cut by tokens."""
    model, x = built(loop)
    captured = normalize(capture(model, (x,)))
    found = targets(captured.graph)
    assert found.count("partition.expert_mm.default") == 3
    (keys,) = {n.args[2] for n in captured.graph.nodes if n.target is torch.ops.partition.expert_mm.default}
    while keys.target is torch.ops.aten.reshape.default:
        (keys,) = keys.all_input_nodes
    assert keys.target is operator.getitem, "the places of topk as they are"
    check_equal(captured, model, x)


def test_rows_that_are_cut_in_order_stay_in_it():
    """Where rows are told apart by their number, they are in the order of the mask, which the model has chosen."""

    def cut(self: Mixture, x: Tensor) -> Tensor:
        shares, chosen = self.choose(x)
        y, masks = torch.zeros_like(x), F.one_hot(chosen, E).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, row = torch.where(masks[i])
            y.index_add_(0, row, expert(x[row]) * shares[row, place, None])
        mask = masks[0].bool()
        taken = torch.zeros(K, *x.shape, dtype=x.dtype).masked_scatter(mask[..., None], (2 * x)[torch.where(mask)[1]])
        return y + taken[0] - 3 * taken[1]

    model, x = built(cut)
    check_equal(normalize(capture(model, (x,))), model, x)


def test_rows_that_lie_by_token_need_not_be_gathered():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Mixture(places_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixture(x).square().mean()

    torch.manual_seed(0)
    model, x = Layer(), torch.randn(4, 5, H)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(dp=2, ep=2))
    assert plan.verify(model, (x,)).ok
    made = {node["target"] for block in plan.program.blocks.values() for node in block.nodes if "target" in node}
    assert "partition.dispatch.default" in made and "partition.all_gather.default" not in made
