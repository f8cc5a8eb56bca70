"""Cross entropy as one operator: its numbers, where it takes whose place, and what it saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.cost.call.saved_activations import kept_by
from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ops import cross_entropy
from partitioner.solve.evaluate.prepared_model import prepare
from tests.helpers.normal_forms import assert_same, normal_form, numbers, operators

pytestmark = pytest.mark.usefixtures("without_baselines")

NAME = "partition.cross_entropy.default"
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=60)
@given(st.data())
def test_numbers_and_gradients_are_those_of_its_parts(data):
    """However many rows go through at a time, and wherever the classes lie in memory."""
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    dtype = data.draw(st.sampled_from(TYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(range(len(sizes))))
    logits = (torch.randn(sizes, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits = logits.permute(order).contiguous().permute([order.index(d) for d in range(len(sizes))]).requires_grad_()
    index = torch.randint(sizes[dim], [1 if d == dim % len(sizes) else s for d, s in enumerate(sizes)])
    result = torch.float32 if dtype in cross_entropy.NARROW else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_PIECE_CPU", data.draw(st.sampled_from([1, 7, 1 << 17])))
        terms = cross_entropy.CROSS_ENTROPY(logits, index, dim, result)
        grad = torch.randn(terms.shape, generator=generator, dtype=torch.float64)
        terms.backward(grad.to(terms.dtype))
    exact = logits.detach().double().requires_grad_()
    expected = torch.logsumexp(exact, dim, True) - exact.gather(dim, index)
    expected.backward(grad)
    assert terms.dtype == result or terms.dtype == dtype
    eps = torch.finfo(accumulated_in(dtype)).eps
    torch.testing.assert_close(terms.double(), expected, rtol=0, atol=40 * eps)
    assert logits.grad is not None and exact.grad is not None
    atol = 4 * torch.finfo(dtype).eps * max(1.0, float(grad.abs().max())) + 40 * eps
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=atol)


def test_rows_of_minus_infinity_alone_have_no_gradient():
    logits = torch.full((2, 3), -torch.inf).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.5))
    logits.requires_grad_()
    target, logsumexp = cross_entropy.ops.target_and_logsumexp(logits, torch.tensor([[0], [2]]), 1)
    assert logsumexp.flatten().tolist() == [-torch.inf, 0.5]
    (target[1] - logsumexp.exp().sum()).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0].eq(0).all()


def test_what_is_no_number_is_told():
    logits = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0]])
    assert cross_entropy.cross_entropy(logits, torch.tensor([[0], [1]]), 1).isfinite().sum() == 0


def test_a_target_that_is_no_class_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy.cross_entropy(torch.zeros(2, 3), torch.tensor([[0], [3]]), 1)


def test_the_operator_keeps_torchs_rules():
    inputs = torch.randn(4, 6, requires_grad=True), torch.zeros(4, 1, dtype=torch.long), 1
    torch.library.opcheck(cross_entropy.ops.target_and_logsumexp.default, inputs)


TOKENS = torch.tensor([[0, 3, 4], [1, 1, 2]])
PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "log softmax": lambda x: x.log_softmax(-1).gather(-1, TOKENS.unsqueeze(-1)),
    "in rows": lambda x: F.log_softmax(x, -1).view(-1, 5).gather(1, TOKENS.view(-1, 1)).squeeze(1).sum(),
    "next tokens": lambda x: x.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:].unsqueeze(-1)).exp(),
    "nll": lambda x: F.nll_loss(x.view(-1, 5).log_softmax(-1), TOKENS.view(-1)),
    "weighted nll": lambda x: F.nll_loss(x.log_softmax(-1).transpose(1, 2), TOKENS, x.detach()[0, 0].exp()),
}


@pytest.mark.parametrize("name", PICKED)
def test_a_tokens_probability_is_picked_before_the_softmax(name: str):
    names = assert_same(PICKED[name], numbers(2, 3, 5))
    fused = name != "weighted nll"  # classes that lie across
    assert (NAME in names) == fused
    assert ("log_softmax.int" in names) != fused


KEPT: dict[str, Callable[[Tensor], object]] = {
    "all are read": lambda x: (logs := x.log_softmax(-1), logs.gather(-1, TOKENS.unsqueeze(-1))),
    "of another dim": lambda x: x.log_softmax(1).gather(-1, TOKENS.unsqueeze(-1)),
    "several of a row": lambda x: x.log_softmax(-1).gather(-1, TOKENS.unsqueeze(-1).expand(-1, -1, 2)),
    "of some rows": lambda x: x.log_softmax(-1).gather(-1, TOKENS[:1].unsqueeze(-1)),
    "a part of the classes": lambda x: x.log_softmax(-1)[..., 1:].gather(-1, TOKENS.unsqueeze(-1).clamp(max=3)),
    "in other rows": lambda x: x.log_softmax(-1).view(2, 15).gather(-1, TOKENS[:, :1]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_picks_stay_as_they_are(name: str):
    assert NAME not in assert_same(KEPT[name], numbers(2, 3, 5))


@pytest.mark.parametrize("dtype", TYPES)
def test_logits_are_read_in_the_type_that_they_have(dtype: torch.dtype):
    """A cast to float32 for the loss alone is not made."""
    form = normal_form(lambda x: F.cross_entropy(x.float().view(-1, 5), TOKENS.view(-1)), numbers(2, 3, 5).to(dtype))
    casts = [n for n in form.graph.nodes if n.target is torch.ops.aten.to.dtype and n.meta["val"].numel() > 1]
    assert len(casts) == (dtype == torch.float64)
    (node,) = (n for n in form.graph.nodes if n.target is cross_entropy.CROSS_ENTROPY)
    assert node.meta["val"].dtype == torch.float32


class Head(nn.Module):
    """A language model of one layer whose last classes, of a padded vocabulary, have no probability."""

    def __init__(self, classes: int = 12, of_those: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, classes, bias=False)
        padding = torch.zeros(classes).masked_fill(torch.arange(classes) >= of_those, -torch.inf)
        self.register_buffer("padding", padding)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens) + self.layer(self.embedding(tokens)).tanh()) + self.padding
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_classes_over_ranks(ranks: int):
    """One of them has nothing but padding; two numbers a row are sent once."""
    tokens = torch.randint(8, (4, 6), generator=torch.Generator().manual_seed(0))
    model = Head()
    plan = partition(
        model, Topology.local(ranks), (tokens, tokens.roll(1, 1)), constraints=Constraints(tp=ranks, dp=1, pp=1)
    )
    assert plan.verify(model, (tokens, tokens.roll(1, 1)))
    targets = [node.get("target") for block in plan.program.blocks.values() for node in block.nodes]
    assert targets.count("partition.target_and_logsumexp.default") == 1
    assert targets.count("partition.all_reduce_max.default") == 0


def test_nothing_of_the_logits_size_is_kept_besides_them():
    model = Head(4096, 4096).bfloat16()
    tokens = torch.randint(8, (4, 64))
    folded = prepare(model, (tokens, tokens)).at(4)[0]
    (block,) = (
        b for b in folded.blocks.values() if any(n.target is cross_entropy.CROSS_ENTROPY for n in b.graph.nodes)
    )
    logits = 4 * 64 * 4096 * 2
    assert logits < kept_by(block).inside < 1.1 * logits
    assert kept_by(block).working < 2.3 * logits
    assert "logsumexp" not in operators(normal_form(lambda x: F.cross_entropy(x, TOKENS.view(-1)), numbers(6, 5)))
