"""Normal form: each rewrite gives what the operator gave, and constant masks are recognised for what they are."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.rules import has_rule
from tests.helpers.normal_forms import assert_same, normal_form, numbers, operators

REDUCTIONS = st.sampled_from(["none", "mean", "sum"])


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_bags_of_one_size(mode: str, weighted: bool, padding: int | None):
    ids = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))
    ids[0], ids[1, 1:], ids[2, :2] = 3, 3, 5  # nothing but padding, padding, an id twice

    def bags(ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
        given = weights if weighted else None
        return F.embedding_bag(ids, table, mode=mode, padding_idx=padding, per_sample_weights=given)

    assert not any("bag" in name for name in assert_same(bags, ids, numbers(9, 5), numbers(6, 4)))


def test_bags_of_any_size_are_refused():
    with pytest.raises(UnsupportedError, match=r"give ids as \[bags, size\]"):
        normal_form(F.embedding_bag, torch.arange(9), numbers(9, 5), torch.tensor([0, 4, 5]))


@settings(max_examples=25)
@given(st.data())
def test_cross_entropy(data):
    sizes = data.draw(st.sampled_from([(5,), (6, 5), (3, 5, 2), (2, 5, 3, 2)]))
    dim = min(1, len(sizes) - 1)
    places = [s for d, s in enumerate(sizes) if d != dim]
    options = dict(
        reduction=data.draw(REDUCTIONS),
        label_smoothing=data.draw(st.sampled_from([0.0, 0.1])),
        weight=data.draw(st.sampled_from([None, torch.rand(5, dtype=torch.float64) + 0.5])),
    )
    logits = numbers(*sizes)
    if data.draw(st.booleans()):
        target = numbers(*sizes, seed=1).softmax(dim)
    else:
        options["ignore_index"] = data.draw(st.sampled_from([-100, 2]))
        target = torch.randint(5, places, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    names = assert_same(lambda x, t: F.cross_entropy(x, t, **options).nan_to_num(-1.0), logits, target)
    assert "cross_entropy_loss.default" not in names


def test_cross_entropy_is_a_sum_over_a_count_of_targets():
    names = assert_same(lambda x, t: F.cross_entropy(x, t), numbers(6, 5), torch.tensor([0, -100, 3, -100, 4, 1]))
    assert names == [
        "unsqueeze.default",
        "ne.Scalar",
        "where.ScalarOther",
        "partition.cross_entropy.default",
        "where.ScalarOther",
        "sum.default",
        "sum.default",
        "to.dtype",
        "div.Tensor",
    ]


LOSSES = {
    "nll": lambda x, y, **k: F.nll_loss(x.log_softmax(-1), y.argmax(-1), ignore_index=1, **k),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.5, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, delta=0.5, **k),
    "soft margin": F.soft_margin_loss,
    "bce": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **k),
    "bce logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].exp(), **k),
    "kl": lambda x, y, **k: F.kl_div(x.log_softmax(-1), y.softmax(-1), **k),
    "poisson": F.poisson_nll_loss,
    "triplet": lambda x, y, **k: F.triplet_margin_loss(x, y, x * y, **k),
    "cosine": lambda x, y, **k: F.cosine_embedding_loss(x, y, x[:, 0].sign(), **k),
    "margin": lambda x, y, **k: F.margin_ranking_loss(x, y, x.sign(), **k),
    "multi margin": lambda x, y, **k: F.multi_margin_loss(x, y.argmax(-1), margin=0.5, weight=y[0].exp(), **k),
    "multilabel margin": lambda x, y, **k: F.multilabel_margin_loss(x, y.argsort(-1), **k),
    "hinge": lambda x, y, **k: F.hinge_embedding_loss(x, y.sign(), **k),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str):
    x, y = numbers(6, 5), numbers(6, 5, seed=1)
    loss = LOSSES[name]
    assert_same(lambda x, y: tuple(loss(x, y, reduction=r) for r in ("none", "mean", "sum")), x, y)


def complex_pieces(x: Tensor) -> Tensor:
    out = x * 2
    out[:, -3:-1] = x[:, :2] * 1j
    out[1] = x[0]
    out.select(-1, 3)[:] = x[:, 1]
    return out


REWRITES: dict[str, tuple[Callable[..., object], list[str]]] = {
    "mean": (lambda x: x.mean(), ["sum.default", "mul.Tensor"]),
    "mean of dims": (lambda x: x.mean((0, -1), keepdim=True), ["sum.dim_IntList", "mul.Tensor"]),
    "variance": (lambda x: (*torch.var_mean(x, 1), x.std(), x.var(0, unbiased=False)), []),
    "affine": (lambda x: F.linear(x, x, x[:, 0]), ["select.int", "linear.default", "add.Tensor"]),
    "addmm": (
        lambda x: torch.addmm(x, x, x, beta=0.5, alpha=2.0),
        ["mm.default", "mul.Tensor", "mul.Tensor", "add.Tensor"],
    ),
    "batch norm": (lambda x: F.batch_norm(x, x[0], x[1].exp(), x[2], x[3], eps=0.1), []),
    "instance norm": (lambda x: F.instance_norm(x[None]), []),
    "mean of a number": (lambda x: (x[0, 0].mean(0, keepdim=True), x[0, 0].var(0, unbiased=False)), []),
    "batch norm's statistics": (
        lambda x: torch.ops.aten._native_batch_norm_legit.no_stats(x, x[0], x[1], True, 0.1, 0.1),
        ["select.int", "select.int", "_native_batch_norm_legit.no_stats", "getitem", "getitem", "getitem"],
    ),
    "filled places": (
        lambda x: x.index_fill(-1, torch.tensor([0, 2, 0]), x[0, 0] * 2),
        [
            "select.int",
            "select.int",
            "mul.Tensor",
            "full.default",
            "index_fill.int_Scalar",
            "reshape.default",
            "where.self",
        ],
    ),
    "filled rows": (
        lambda x: x.index_put([torch.tensor([True, False, True, False])], x[1:2] * 2),
        ["slice.Tensor", "mul.Tensor", "reshape.default", "reshape.default", "where.self"],
    ),
    "added rows": (
        lambda x: x.index_put([torch.tensor([True, False, True, False])], x[1] * 2, accumulate=True),
        ["select.int", "mul.Tensor", "reshape.default", "where.ScalarOther", "add.Tensor"],
    ),
    "casts": (lambda x: x.to(torch.float64).double().to("cpu"), []),
    "copies": (lambda x: x.clone().contiguous().view(4, 4), []),
    "views": (lambda x: x.view(2, -1).flatten().unflatten(0, (1, 16)), ["reshape.default"]),
    "slices": (lambda x: (x[0:], x[:, -3:-1], x.narrow(1, 1, 2)), ["slice.Tensor", "slice.Tensor"]),
    "pieces": (lambda x: (x.split(3)[1], x.chunk(2, 1)[0]), ["split_with_sizes.default", "getitem"] * 2),
    "creation": (lambda x: torch.zeros_like(x) + x.new_ones(4), ["full.default", "full.default", "add.Tensor"]),
    "padding": (lambda x: F.pad(x, (1, 2)), ["constant_pad_nd.default"]),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False) * 2, ["mul.Tensor"]),
    "strides": (lambda x: (x.as_strided((3, 2, 2), (4, 1, 2)), x.t().as_strided((5, 4), (2, 1), 3)), []),
    "written strides": (lambda x: torch.as_strided_scatter(x.t(), x[:2, :3], (2, 3), (8, 1), 1), []),
    "complex pieces": (lambda x: torch.view_as_real(complex_pieces(torch.complex(x, x.t()))), []),
    "diagonal": (lambda x: torch.stack([torch.diagonal_scatter(x, x[0, :3], o) for o in (1, -1)]), []),
    "diagonals": (lambda x: torch.diagonal_scatter(x.view(2, 4, 2), x[:, :2], 0, 2, 0), []),
    "filled diagonal": (lambda x: (x.clone().fill_diagonal_(7), x[:, :2].clone().fill_diagonal_(7)), []),
    "tensordot": (lambda x: torch.tensordot(x, x, 2), []),
    "kron": (lambda x: torch.kron(x, x[:2]), []),
    "trapezoid": (lambda x: torch.trapezoid(x), []),
    "own places": (lambda x: x[torch.arange(4), torch.tensor([1, -1, 0, -4])] + x[torch.arange(4), x.argmax(1)], []),
    "other places": (lambda x: x[torch.arange(1, 4), x.argmax(1)[1:]] + x[x.argmax(0)[:3], torch.arange(3)], []),
    "repeated rows": (
        lambda x: (x.repeat(3, 1) * x[:3].reshape(12, 1)).view(3, 4, 4).sum(0),
        ["slice.Tensor", "reshape.default", "expand.default", "reshape.default", "mul.Tensor", "sum.dim_IntList"],
    ),
    "repeated rows and columns": (
        lambda x: (x.repeat(3, 2).reshape(2, 6, 8) - x[0].repeat(2)).view(2, 3, 2, 2, 4),
        [],
    ),
    "repeated for one of two": (lambda x: ((y := x.repeat(3, 1) * 2).view(3, 4, 4), y), []),
    "repeated across parts": (lambda x: (x.repeat(3, 1) * 2).view(2, 6, 4), []),
    "meshgrid": (lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")), []),
}


@pytest.mark.parametrize("name", ["tensordot", "kron", "trapezoid", "meshgrid"])
def test_composites_without_a_rule_are_taken_apart(name: str):
    function, _ = REWRITES[name]
    assert all(has_rule(n.target) for n in normal_form(function, numbers(4, 4)).graph.nodes if n.op == "call_function")


def test_a_recurrent_net_is_taken_apart():
    torch.manual_seed(0)
    net, x = nn.LSTM(4, 6, batch_first=True, bidirectional=True).double(), numbers(3, 5, 4)
    captured = normalize(capture(net, (x,)))
    calls = [n for n in captured.graph.nodes if n.op == "call_function"]
    assert all(has_rule(n.target) and not n.target._schema.is_mutable for n in calls if n.target is not getitem)
    states = dict(net.state_dict()) | captured.constants
    values = [states.get(captured.placeholders[n.name], x) for n in captured.graph.nodes if n.op == "placeholder"]
    output, (hidden, cell) = net(x)
    for result, want in zip(run_graph(captured.graph, values), (output, hidden, cell), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-12, atol=1e-12)


def test_memory_beside_the_operand_is_refused():
    with pytest.raises(UnsupportedError, match="reads memory outside of its operand"):
        normal_form(lambda x: x[:2].as_strided((4, 4), (4, 1)), numbers(4, 4))


def test_what_torch_cannot_make_functional_is_refused():
    with pytest.raises(UnsupportedError, match=r"in place by aten::polygamma_"):
        normal_form(lambda x: x.clone().polygamma_(1), numbers(4))


def test_sparse_tensors_are_refused():
    places = torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(UnsupportedError, match=r"layout torch\.sparse_coo; expected dense ones: write a product"):
        normal_form(lambda x: torch.sparse.mm(torch.sparse_coo_tensor(places, x[0, :2], (4, 4)), x), numbers(4, 4))


def test_places_that_are_written_twice_are_refused():
    with pytest.raises(UnsupportedError, match="several values to one element"):
        normal_form(lambda x: torch.as_strided_scatter(x, x[:2, :2], (2, 2), (1, 1)), numbers(4, 4))


WRITTEN = ["written strides", "filled diagonal", "filled places", "filled rows", "added rows"]


@pytest.mark.parametrize("name", [*WRITTEN, "diagonal", "complex pieces"])
def test_what_is_kept_beside_what_is_written_has_a_gradient(name: str):
    captured = normal_form(REWRITES[name][0], numbers(4, 4))
    assert all(has_rule(n.target) for n in captured.graph.nodes if n.op == "call_function" and n.target is not getitem)
    names = [captured.placeholders[n.name] for n in captured.graph.nodes if n.op == "placeholder"]
    states = [captured.constants[n] for n in names if n in captured.constants]
    assert torch.autograd.gradcheck(
        lambda x: tuple(run_graph(captured.graph, [*states, x])), numbers(4, 4).requires_grad_()
    )


def test_a_result_that_is_rewritten_stays_the_result():
    """Flat around a product, as torch's attention ends."""
    captured = normal_form(lambda x, w: torch.mm(x.reshape(4, 4), w).reshape(2, 2, 4), numbers(2, 2, 4), numbers(4, 4))
    assert operators(captured) == ["t.default", "linear.default"]
    assert [o.value for o in captured.outputs] == [n.name for n in captured.graph.output_node().args[0]]


def test_factors_of_whole_numbers_are_rounded():
    x = torch.arange(16).reshape(4, 4)
    assert assert_same(lambda x: torch.addmv(x[0], x, x[1], beta=0.5, alpha=1.7), x)[-1] == "addmv.default"
    assert "addmv.default" not in assert_same(lambda x: torch.addmv(x[0], x, x[1], beta=3, alpha=2), x)


def test_a_norm_of_nothing_stays():
    assert "batch_norm.default" in assert_same(lambda x: F.batch_norm(x, x, x), numbers(0))


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites(name: str):
    function, expected = REWRITES[name]
    names = [n if "getitem" not in n else "getitem" for n in assert_same(function, numbers(4, 4))]
    assert not expected or names == expected
    assert not {"batch_norm.default", "mean.default", "mean.dim", "var.correction"} & set(names)


def attention(mask: Callable[[int], Tensor | None], queries: int, keys: int, batch: int = 2) -> list[object]:
    """The mask and ``is_causal`` of attention under ``mask(keys)`` in normal form, without making any tensor."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, y, y, attn_mask=mask(keys), scale=0.5, enable_gqa=True)

    q = torch.empty(batch, 2, queries, 8, device="meta")
    captured = normal_form(function, q, torch.empty(batch, 1, keys, 8, device="meta"))
    (node,) = [n for n in captured.graph.nodes if "attention" in str(n.target)]
    assert node.kwargs == {"scale": 0.5, "enable_gqa": True}
    if node.args[3:] and node.args[3] is None:
        assert len(operators(captured)) == 1  # nothing is left of the mask
    return [node.args[3] is None, *node.args[5:]] if len(node.args) > 3 else []


def window(size: int) -> Callable[[int], Tensor]:
    def mask(n: int) -> Tensor:
        q, k = torch.arange(n)[:, None], torch.arange(n)[None]
        return (k <= q) & (k > q - size)

    return mask


def additive(n: int) -> Tensor:
    return torch.full((n, n), float("-inf")).triu(1)


def filled(n: int) -> Tensor:
    return torch.zeros(n, n).masked_fill(~(torch.arange(n)[None] <= torch.arange(n)[:, None]), -1e9)


def smallest(n: int) -> Tensor:
    return torch.where(torch.ones(n, n, dtype=torch.bool).tril(), 0.0, torch.finfo(torch.float32).min)


def packed(n: int) -> Tensor:
    """Causal within documents, of which there is one: as it is written for batches of packed sequences."""
    return packed_by(torch.arange(n)[None].expand(2, -1))


def repeated(n: int) -> Tensor:
    return packed_by(torch.arange(n)[None].repeat(2, 1))


def stacked(n: int) -> Tensor:
    return packed_by(torch.stack([torch.arange(n)] * 2))


def packed_by(places: Tensor) -> Tensor:
    batch, n = places.shape
    document = torch.cumsum(torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1, -1)
    rows = torch.arange(batch)[:, None, None, None]
    q, k = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    return ((document[rows, q] == document[rows, k]) & (places[rows, k] <= places[rows, q])).expand(batch, 1, n, n)


CAUSAL, DROPPED, KEPT = [True, True], [True, False], [False]
MASKS = {
    "triangle": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), CAUSAL),
    "comparison": (lambda n: torch.arange(n)[None] <= torch.arange(n)[:, None], CAUSAL),
    "reversed comparison": (lambda n: torch.arange(n)[:, None] >= torch.arange(n)[None], CAUSAL),
    "packed": (packed, CAUSAL),
    "packed, repeated": (repeated, CAUSAL),
    "packed, stacked": (stacked, CAUSAL),
    "wide window": (window(1 << 20), CAUSAL),
    "narrow window": (window(3), KEPT),
    "all": (lambda n: torch.ones(2, 1, n, n, dtype=torch.bool), DROPPED),
    "by place": (lambda n: (torch.arange(n) >= 0)[None, None, None].expand(2, 1, n, n), DROPPED),
    "zeros": (lambda n: torch.zeros(n, n), DROPPED),
    "strict": (lambda n: torch.arange(n)[None] < torch.arange(n)[:, None], KEPT),
    "shifted": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(1), KEPT),
    "minus one": (lambda n: additive(n).clamp(min=-1.0), KEPT),
    "one hidden": (lambda n: (torch.arange(n) > 0)[None].expand(n, n), KEPT),
}


@pytest.mark.parametrize("length", [16, 1 << 15])
@pytest.mark.parametrize("name", MASKS)
def test_constant_masks(name: str, length: int):
    mask, expected = MASKS[name]
    assert attention(mask, length, length) == expected


@pytest.mark.parametrize("mask", [additive, filled, smallest])
def test_additive_causal_masks(mask: Callable[[int], Tensor]):
    assert attention(mask, 16, 16) == CAUSAL
    assert attention(mask, 1 << 15, 1 << 15) == CAUSAL


def by_numbers(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Tensor]:
    return lambda n: compare(torch.arange(n)[:, None], torch.arange(n)[None])


BETWEEN = {
    "both sides of 5": (by_numbers(lambda q, k: (k > q - 5 / 2) & (k < q + 5 / 2)), (2, 2)),
    "up to 5 halves away": (by_numbers(lambda q, k: (k >= q - 5 / 2) & (k <= q + 5 / 2)), (2, 2)),
    "half a place before": (by_numbers(lambda q, k: (k > q - 2) & (k < q - 0.5 + 1)), (1, 0)),
    "places in bytes": (by_numbers(lambda q, k: (q % 128).to(torch.uint8) <= (k % 128).to(torch.uint8)), (0, -1)),
    "none before a place": (by_numbers(lambda q, k: (q >= 9) <= (k >= 9)), None),
}


@pytest.mark.parametrize("look", [1 << 22, 64], ids=["by number", "by rows and columns"])
@pytest.mark.parametrize("name", BETWEEN)
def test_windows_that_end_between_places(name: str, look: int, monkeypatch: pytest.MonkeyPatch):
    """Of long sequences, whose masks are not looked at number by number, as of short ones."""
    monkeypatch.setattr("partitioner.passes.normalize.constant_folding.LIMIT", look)
    mask, expected = BETWEEN[name]

    def function(x: Tensor) -> Tensor:
        return 2 * F.scaled_dot_product_attention(x, x, x, attn_mask=mask(16))

    captured = normal_form(function, torch.empty(2, 2, 16, 8, device="meta"))
    (node,) = [n for n in captured.graph.nodes if "attention" in str(n.target)]
    assert ("band" in str(node.target)) == (expected is not None)
    assert expected is None or node.args[3:5] == expected


def test_packed_masks_of_large_batches():
    """Rows and places together are more than is looked at number by number."""

    def mask(n: int) -> Tensor:
        return packed_by(torch.arange(n)[None].expand(2048, -1))

    assert attention(mask, 1 << 13, 1 << 13, batch=2048) == CAUSAL


def test_no_causal_mask_where_lengths_differ():
    assert attention(lambda n: torch.ones(8, n, dtype=torch.bool).tril(), 8, 16) == KEPT
    assert attention(lambda n: torch.ones(8, n, dtype=torch.bool), 8, 16) == DROPPED


def test_a_mask_that_depends_on_the_batch_stays():
    def function(x: Tensor, keep: Tensor) -> Tensor:
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal & keep[:, None, None])

    assert_same(function, numbers(2, 1, 4, 8), torch.tensor([[True, True, True, False], [True, True, False, False]]))


def test_random_numbers_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"randint.* \(.*test_normalize.py:\d+\)"):
        normal_form(lambda x: x + torch.randint(0, (1 << 41) + 1, (2,)), numbers(2))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "random_": lambda x: x * torch.empty_like(x).random_(),  # not marked by torch, but it takes a generator
    "randint": lambda x: x * torch.randint(-(1 << 41), 3, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 0, (1 << 40) + 1),
    "random_ of bounds": lambda x: x * torch.empty_like(x).random_(5, (1 << 50) + 6),
}


@pytest.mark.parametrize("name", DRAWS)
def test_whatever_draws_random_numbers_is_refused(name: str):
    with pytest.raises(UnsupportedError, match=r"draws random numbers.* pass them as an input"):
        normal_form(DRAWS[name], numbers(2, 4))


def test_what_is_switched_off_draws_nothing():
    assert_same(lambda x: F.rrelu(x, training=False), numbers(2, 4))


def test_dropout_that_torch_took_apart_has_all_rows():
    def function(x: Tensor) -> Tensor:
        dropped = F.dropout(x, 0.5)
        whole = dropped.view(-1)
        dropped[2:4].mul_(2)  # seen through the view: torch traces the graph anew, and takes dropout apart
        return dropped + whole.view(8, 8)

    made = normal_form(function, numbers(8, 8))
    assert [tuple(n.meta["val"].shape) for n in made.graph.nodes if n.target is torch.ops.aten.where.self] == [(8, 8)]
    assert not any(n.target is getitem for n in made.graph.nodes)


ITEMS = {
    "factor": lambda x: x * x.detach().sum().item(),
    "divisor": lambda x: x / (x.detach().sum().item() + 0.5),
    "power": lambda x: x.abs() ** (x > 0).sum().item(),
    "full": lambda x: x + torch.full((4,), x.detach().sum().item(), dtype=x.dtype),
    "bound": lambda x: x.clamp(max=x.detach().mean().item()),
    "no gradient": lambda x: x * x.sum().item(),
}


@pytest.mark.parametrize("name", ITEMS)
def test_numbers_taken_out_of_tensors_are_computed_with(name: str):
    assert_same(ITEMS[name], numbers(4, 4))


NUMBERS = {
    "alpha": lambda x: torch.addmm(x, x, x, alpha=x.detach().sum().item()),
    "factor of what is added": lambda x: x.add(x, alpha=x.detach().sum().item()),
    "slope": lambda x: F.leaky_relu(x, x.detach().sum().item()),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_taken_out_of_tensors_are_refused(name: str):
    with pytest.raises(
        UnsupportedError, match=r"item.* \(.*test_normalize.py:\d+\) converts a tensor to a Python number"
    ):
        normal_form(NUMBERS[name], numbers(4, 4))


@pytest.mark.parametrize("factor", ["inv", "cholesky", "solve"])
def test_factorisations_are_not_looked_at(factor: str):
    def function(x: Tensor) -> Tensor:
        square = x.T @ x + torch.eye(4, dtype=x.dtype)
        return torch.linalg.solve(square, x) if factor == "solve" else getattr(torch.linalg, factor)(square)

    found = assert_same(function, numbers(4, 4))
    assert "_linalg_check_errors.default" not in found


def test_vmap_is_taken_apart():
    found = assert_same(lambda x: torch.vmap(lambda row: row * row.sum())(x), numbers(3, 4))
    assert found == ["sum.dim_IntList", "reshape.default", "mul.Tensor"]


def test_nested_vmap_is_taken_apart():
    nested = torch.vmap(torch.vmap(lambda element: element * 2))
    assert_same(lambda x: nested(x), numbers(3, 4))


def test_a_transform_that_torch_cannot_take_apart_is_refused_by_its_line():
    gradients = torch.vmap(torch.func.grad(lambda x: x.square().sum()))
    with pytest.raises(UnsupportedError, match=r"test_normalize.py:\d+"):
        normal_form(lambda x: gradients(x), numbers(3, 4))


@pytest.mark.parametrize(
    "function",
    [lambda x: x + 2, lambda x: torch.sub(x, 2, alpha=3), lambda x: 1 - x, lambda x: torch.rsub(x, 0.5, alpha=3)],
)
def test_a_number_beside_a_sum_is_a_tensor(function: Callable[[Tensor], Tensor]):
    found = assert_same(lambda x: function(x.sum()), numbers(3))
    assert {"full.default", "add.Tensor"} <= set(found) <= {"sum.default", "mul.Tensor", "full.default", "add.Tensor"}
