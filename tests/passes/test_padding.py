"""Exact padding: what the graph says may be padded is padded without any change, and the rest is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import BatchError, Shapes, Topology, prepare
from partitioner.passes.ir.model import Captured
from partitioner.passes.rules.factors import results_of
from partitioner.programs.shapes import ShapeFamily
from partitioner.runtime.engine.padding import fit_batch
from partitioner.runtime.family.data import BatchPadding, InputPadding
from partitioner.runtime.program.program import ArgumentData, InputData, Program, SignatureData
from tests.helpers.context_models import MASKS
from tests.helpers.models import CASES, float64

VOCAB, WIDTH, HEADS, IGNORED = 24, 16, 8, -100
SAMPLES, POSITIONS = 6, 24  # twice a window and more

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tokens_and_labels(samples: int, positions: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples * 100 + positions)
    tokens = torch.randint(1, VOCAB, (samples, positions), generator=generator)
    return {"tokens": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, IGNORED)}


def with_mask(samples: int, positions: int) -> dict[str, Tensor]:
    shorter = positions - torch.arange(samples)[:, None] % 3
    return {**tokens_and_labels(samples, positions), "mask": (torch.arange(positions) < shorter).long()}


class Reader(nn.Module):
    """A decoder of one layer with the attention ``attend``, and what ``change`` does to its numbers and losses."""

    def __init__(self, attend: Attention, mixed: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attend, self.mixed = attend, mixed

    def hidden(self, tokens: Tensor, *mask: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.attend(q, k, v, *mask).transpose(1, 2).flatten(-2)
        return x if self.mixed is None else self.mixed(x)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(tokens))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


class Masked(Reader):
    """Attention of both sides, under a mask of the batch."""

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.hidden(tokens, mask))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED), "logits": logits}


PAD = 3  # the token of padding


def is_no_padding(tokens: Tensor) -> Tensor:
    return ~(tokens == PAD)


class OwnMask(Reader):
    """Attention of both sides, under a mask that the model makes: ``shown`` of the tokens or of their places."""

    def __init__(self, attend: Attention, shown: Callable[[Tensor], Tensor]) -> None:
        super().__init__(attend)
        self.shown = shown

    def forward(self, tokens: Tensor, labels: Tensor, places: Tensor | None = None) -> dict[str, Tensor]:
        shown = self.shown(tokens if places is None else places)
        logits = self.head(self.hidden(tokens, shown))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED), "logits": logits}


class LastToken(Reader):
    """A number for each text, from the last token before padding, as of a reward model."""

    def __init__(self, attend: Attention, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(attend)
        self.read = read

    def forward(self, tokens: Tensor, wanted: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        kept = (tokens != PAD).int()
        last = (torch.arange(tokens.shape[1], dtype=torch.int32) * kept).argmax(-1)
        found = self.head(self.read(self.hidden(tokens), last))
        return {"loss": F.cross_entropy(found, wanted, ignore_index=IGNORED), "found": found}


def index_last(x: Tensor, last: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]), last]


def gather_last(x: Tensor, last: Tensor) -> Tensor:
    return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1])).squeeze(1)


def gather_next(x: Tensor, last: Tensor) -> Tensor:
    """Reads the token after it, which may be padding."""
    return gather_last(x, last + 1)


def with_wanted(samples: int, positions: int) -> dict[str, Tensor]:
    """Tokens that end with those of padding in most samples, and a target for each sample."""
    batch = with_mask(samples, positions)
    tokens = batch["tokens"].masked_fill(batch["tokens"] == PAD, PAD + 1).masked_fill(batch["mask"] == 0, PAD)
    return {"tokens": tokens, "wanted": torch.arange(samples) % VOCAB}


def with_places(samples: int, positions: int) -> dict[str, Tensor]:
    """Places of tokens in a text; -1 marks the last ones of some samples."""
    batch = with_mask(samples, positions)
    return {**tokens_and_labels(samples, positions), "places": batch["mask"] * (torch.arange(positions) + 1) - 1}


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def eager_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    hidden = torch.where(place[:, None] >= place, 0.0, -1e38)
    return (scores(q, k) + hidden).softmax(-1) @ v


def eager_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    return scores(q, k).masked_fill(place > place[:, None], -math.inf).softmax(-1) @ v


def boolean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None, :])


def additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = (1.0 - mask.to(q.dtype))[:, None, None, :] * torch.finfo(q.dtype).min
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


def eager_additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = (1.0 - mask.to(q.dtype))[:, None, None, :] * torch.finfo(q.dtype).min
    return (scores(q, k) + hidden).softmax(-1) @ v


def so_far(x: Tensor) -> Tensor:
    return x + x.cumsum(1)


def shifted(x: Tensor) -> Tensor:
    """Each position has the one before it; the first has zeros."""
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def find_padding(model: nn.Module, inputs: dict[str, Tensor]) -> BatchPadding:
    family = ShapeFamily.of(prepare(model, inputs), Shapes(), None, Topology.local(1))
    return family.padding_at(family.shapes[0])


def pad(padding: BatchPadding, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``batch`` as the engine pads it."""
    program = Program.model_construct(
        inputs=tuple(InputData(value=n, path=n, shape=tuple(x.shape), dtype="int64") for n, x in batch.items()),
        signature=SignatureData(arguments=tuple(ArgumentData(name=n) for n in batch)),
    )
    padded, real = fit_batch(program, padding, batch)
    assert real is not None
    return padded  # type: ignore[no-any-return]


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    model.zero_grad()
    found = model(**batch)
    loss = found["loss"] if isinstance(found, dict) else found.loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, found


def check_exact(model: nn.Module, padding: BatchPadding, batch: dict[str, Tensor]) -> None:
    """Loss, every gradient and the outputs' real places are those of the batch that is not padded."""
    loss, grads, found = gradients(model, batch)
    padded_loss, padded_grads, padded = gradients(model, pad(padding, batch))
    assert torch.allclose(loss, padded_loss, rtol=1e-12, atol=0)
    for name, gradient in grads.items():
        assert (gradient - padded_grads[name]).abs().max() < 1e-12, name
    for path, dims in padding.outputs.items():
        whole, real = padded[path], found[path]
        for dim in dims:
            whole = whole if dim is None else whole.narrow(dim, 0, real.shape[dim])
        assert (whole - real).abs().max() < 1e-12, path


EXACT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "causal": (lambda: Reader(MASKS["causal"]), tokens_and_labels),
    "window": (lambda: Reader(MASKS["window"]), tokens_and_labels),
    "alibi": (lambda: Reader(MASKS["alibi"]), tokens_and_labels),
    "soft cap": (lambda: Reader(MASKS["soft_cap"]), tokens_and_labels),
    "eager causal": (lambda: Reader(eager_causal), tokens_and_labels),
    "eager triangle": (lambda: Reader(eager_triangle), tokens_and_labels),
    "boolean mask": (lambda: Masked(boolean), with_mask),
    "additive mask": (lambda: Masked(additive), with_mask),
    "eager additive mask": (lambda: Masked(eager_additive), with_mask),
    "the last token": (lambda: LastToken(MASKS["causal"], index_last), with_wanted),
    "the last token, gathered": (lambda: LastToken(MASKS["causal"], gather_last), with_wanted),
    "a token of padding": (lambda: OwnMask(boolean, is_no_padding), tokens_and_labels),
    "a token of padding, eager": (lambda: OwnMask(eager_additive, is_no_padding), tokens_and_labels),
    "places from 0 on": (lambda: OwnMask(boolean, lambda places: places >= 0), with_places),
    "places above -1": (lambda: OwnMask(boolean, lambda places: places > -1), with_places),
    "places that are not below 0": (lambda: OwnMask(boolean, lambda places: ~(places < 0)), with_places),
    "running sums": (lambda: Reader(MASKS["causal"], so_far), tokens_and_labels),
    "the position before": (lambda: Reader(MASKS["causal"], shifted), tokens_and_labels),
}


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


@pytest.mark.parametrize("name", EXACT)
def test_what_is_said_to_be_exact_is(name: str):
    build, inputs = EXACT[name]
    model = make(build)
    padding = find_padding(model, inputs(SAMPLES, POSITIONS))
    assert (padding.fewer, padding.shorter) == ("", "")
    for samples, positions in ((SAMPLES, 7), (4, POSITIONS), (1, 3), (5, 11)):
        check_exact(model, padding, inputs(samples, positions))


WINDOW = 8


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    after = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(after >= 0) & (after < WINDOW))


def windowed_and_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    after = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = torch.where((after >= 0) & (after < WINDOW), 0.0, -math.inf)
    return (5.0 * (scores(q, k) / 5.0).tanh() + hidden.to(q.dtype)).softmax(-1) @ v


@pytest.mark.parametrize("attend", [windowed, windowed_and_capped])
@pytest.mark.parametrize("positions", [WINDOW + 1, 3 * WINDOW // 2, 2 * WINDOW])
def test_a_window_may_be_as_long_as_a_shorter_batch(attend: Attention, positions: int):
    """The graph of a batch that is no longer than the window has no limit; that of a longer one has."""
    model = make(lambda: Reader(attend))
    padding = find_padding(model, tokens_and_labels(SAMPLES, positions))
    assert (padding.fewer, padding.shorter) == ("", "")
    for samples, shorter in ((SAMPLES, WINDOW), (4, WINDOW - 2), (1, positions - 1)):
        check_exact(model, padding, tokens_and_labels(samples, shorter))


@pytest.mark.parametrize("attend", [windowed, windowed_and_capped])
def test_a_window_that_follows_from_the_size_is_refused(attend: Attention, monkeypatch: pytest.MonkeyPatch):
    def grow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        monkeypatch.setitem(globals(), "WINDOW", q.shape[2] // 2)
        return attend(q, k, v)

    padding = find_padding(make(lambda: Reader(grow)), tokens_and_labels(SAMPLES, POSITIONS))
    assert "follows from the batch size" in padding.shorter


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("skip-mlp", "transformer-encoder", "vit")])
def test_the_zoo(name: str):
    case = CASES[name]
    inputs = dict(case.inputs(8))
    with float64():
        model = case.build().double()
        padding = find_padding(model, inputs)
        assert padding.fewer == ""
        for samples, positions in ((8, 9), (3, 16), (5, 11)):
            if positions < 16 and padding.shorter:
                continue
            check_exact(model, padding, {n: x[:samples, :positions].contiguous() for n, x in inputs.items()})


# --- what is refused --------------------------------------------------------------------------------------------------


class Scored(nn.Module):
    """A regression over positions: ``reduce`` makes the loss."""

    def __init__(self, reduce: Callable[[Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.head, self.reduce = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 1), reduce
        self.first = first or nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.reduce(self.head(self.first(self.tokens(tokens)))[..., 0])


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def whole_mean(x: Tensor) -> Tensor:
    return x.square().mean()


def over_a_root(x: Tensor) -> Tensor:
    """A sum over the root of its elements, which is neither a line nor inverse to them."""
    return x.square().sum() / x.numel() ** 0.5


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str, str]] = {
    "a mean": (lambda: Scored(whole_mean), lambda b, s: {"tokens": tokens_and_labels(b, s)["tokens"]}, "adds", "adds"),
    "the last place": (
        lambda: Reader(MASKS["causal"], lambda x: x + x[:, -1:]),
        tokens_and_labels,
        "",
        "",
    ),
    "the token after the last one": (lambda: LastToken(MASKS["causal"], gather_next), with_wanted, "", "reads places"),
    "reversed": (lambda: Reader(MASKS["causal"], lambda x: x + x.flip(1)), tokens_and_labels, "", "flip"),
    "a number of the size": (
        lambda: Reader(MASKS["causal"], lambda x: x / x.shape[1]),
        tokens_and_labels,
        "",
        "follows from the batch size",
    ),
    "places over the size": (
        lambda: Reader(MASKS["causal"], lambda x: x + (torch.arange(x.shape[1]) / x.shape[1])[:, None]),
        tokens_and_labels,
        "",
        "follows from the batch size",
    ),
    "attention of both sides": (
        lambda: Reader(MASKS["full"]),
        tokens_and_labels,
        "",
        "gives weight to padded positions",
    ),
    "a softmax over positions": (
        lambda: Reader(MASKS["causal"], lambda x: x * x.softmax(1)),
        tokens_and_labels,
        "",
        "gives weight to padded places",
    ),
    "a softmax over samples": (
        lambda: Reader(MASKS["causal"], lambda x: x * x.softmax(0)),
        tokens_and_labels,
        "gives weight to padded places",
        "",
    ),
    "a maximum": (
        lambda: Reader(MASKS["causal"], lambda x: x + x.amax(1, keepdim=True)),
        tokens_and_labels,
        "",
        "combines real places",
    ),
}


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "the last place"])
def test_what_padding_would_change_is_refused(name: str):
    build, inputs, fewer, shorter = REFUSED[name]
    padding = find_padding(make(build), inputs(SAMPLES, POSITIONS))
    for told, expected in ((padding.fewer, fewer), (padding.shorter, shorter)):
        assert (expected in told) if expected else told == "", told


def test_the_last_place_is_refused():
    padding = find_padding(make(REFUSED["the last place"][0]), tokens_and_labels(SAMPLES, POSITIONS))
    assert padding.fewer == ""
    assert "slice" in padding.shorter or "select" in padding.shorter


def test_statistics_in_training_are_refused():
    class Normed(Reader):
        def __init__(self) -> None:
            super().__init__(MASKS["causal"])
            self.statistics = Statistics()
            self.mixed = self.statistics

    model, inputs = make(Normed), tokens_and_labels(SAMPLES, POSITIONS)
    padding = find_padding(model.train(), inputs)
    assert padding.fewer
    assert padding.shorter
    padding = find_padding(model.eval(), inputs)
    assert (padding.fewer, padding.shorter) == ("", "")
    check_exact(model, padding, tokens_and_labels(4, 7))


def test_new_places_repeat_real_ones_and_targets_are_ignored():
    padding = find_padding(make(EXACT["boolean mask"][0]), with_mask(SAMPLES, POSITIONS))
    fills = {path: (how.batch_fill, how.length_fill) for path, how in padding.inputs.items()}
    assert fills == {"tokens": (None, None), "labels": (IGNORED, IGNORED), "mask": (None, 0.0)}
    padded = pad(padding, with_mask(4, 7))
    assert (padded["labels"][:, 7:] == IGNORED).all()
    assert (padded["labels"][4:] == IGNORED).all()
    assert not padded["mask"][:, 7:].any()
    assert torch.equal(padded["tokens"][4:, :7], padded["tokens"][3:4, :7].expand(2, 7))


# --- queries that see no key ------------------------------------------------------------------------------------------


def mask_scores(q: Tensor, k: Tensor, shown: Tensor, v: Tensor) -> Tensor:
    """Eager attention over finite scores."""
    return (scores(q, k) + torch.where(shown, 0.0, -1e38)).softmax(-1) @ v


def distances(q: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    return place[:, None] - place


def finite_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    return mask_scores(q, k, (place[:, None] >= place) & mask.bool()[:, None, None, :], v)


def finite_inverted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The mask has 1 where a position is hidden."""
    return finite_causal(q, k, v, ~mask.bool())


def finite_window(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    far = distances(q)
    return mask_scores(q, k, (far >= 0) & (far < 4) & mask.bool()[:, None, None, :], v)


def finite_both_sides(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return mask_scores(q, k, (distances(q).abs() < 4) & mask.bool()[:, None, None, :], v)


def finite_in_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    shown = (place[:, None] >= place) & mask.bool()[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, torch.where(shown, 0.0, -1e38).to(q.dtype))


def boolean_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, (place[:, None] >= place) & mask.bool()[:, None, None, :])


class Table(Masked):
    """Eager causal attention whose order is read from a table, of which nothing is known."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v, mask: mask_scores(q, k, self.shown[: q.shape[-2], : q.shape[-2]] & mask, v))
        self.register_buffer("shown", torch.ones(64, 64).tril().bool())

    def hidden(self, tokens: Tensor, *mask: Tensor) -> Tensor:
        return super().hidden(tokens, mask[0].bool()[:, None, None, :])


class Weighted(Reader):
    """The input ``mask`` says which losses count, and no more."""

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.hidden(tokens)).transpose(1, 2)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum()}


UNSEEN: dict[str, tuple[Callable[[], nn.Module], tuple[float | None, str]]] = {
    "causal": (lambda: Masked(finite_causal), (0.0, "first")),
    "inverted": (lambda: Masked(finite_inverted), (1.0, "first")),
    "window": (lambda: Masked(finite_window), (0.0, "gap")),
    "in sdpa": (lambda: Masked(finite_in_sdpa), (0.0, "first")),
    "a table": (Table, (0.0, "gap")),
    "both sides": (lambda: Masked(eager_additive), (0.0, "all")),
    "window of both sides": (lambda: Masked(finite_both_sides), (0.0, "all")),
    "boolean": (lambda: Masked(boolean_causal), (None, "all")),
    "weights of losses": (lambda: Weighted(eager_causal), (None, "all")),
}


def hide(name: str, *hidden: slice, samples: int = 4, positions: int = 9) -> dict[str, Tensor]:
    """A batch in which the mask hides the positions ``hidden`` of the last sample. Their labels are ignored."""
    batch = tokens_and_labels(samples, positions)
    mask = torch.ones(samples, positions, dtype=torch.long)
    for places in hidden:
        mask[-1, places] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
    return {**batch, "mask": 1 - mask if name == "inverted" else mask}


@pytest.mark.parametrize("name", UNSEEN)
def test_queries_that_see_no_key_are_refused_more_positions(name: str):
    build, (number, unseen) = UNSEEN[name]
    model = make(build)
    padding = find_padding(model, hide(name, samples=SAMPLES, positions=POSITIONS))
    assert (padding.fewer, padding.shorter) == ("", "")
    assert {path: how.hides for path, how in padding.inputs.items() if how.hides is not None} == (
        {} if number is None else {"mask": number}
    )
    assert padding.inputs["mask"].unseen == unseen
    left, gap, whole = (slice(0, 3),), (slice(1, 6),), (slice(0, 9),)
    refused = {"all": [whole], "first": [left, whole], "gap": [left, gap, whole]}[unseen] if number is not None else []
    exact = [(), (slice(5, 9),), (slice(2, 4), slice(7, 9)), left, gap]
    for hidden in refused:
        with pytest.raises(BatchError, match=r"mask hides .* of sample 3, .*; pad on the right"):
            pad(padding, hide(name, *hidden))
        pad(padding, hide(name, *hidden, samples=3, positions=POSITIONS))  # new samples are no keys
    if "window" in name:  # outputs at hidden positions may change, which no loss reads
        padding = padding.model_copy(update={"outputs": {}})
    for hidden in exact:
        if hidden not in refused and not (unseen == "gap" and len(hidden) > 1):
            check_exact(model, padding, hide(name, *hidden))


def test_a_sample_of_padding_tokens_is_refused_more_positions():
    """The engine recognises it by the token with which the model compares."""
    model = make(lambda: OwnMask(eager_additive, is_no_padding))
    padding = find_padding(model, tokens_and_labels(SAMPLES, POSITIONS))
    assert (padding.inputs["tokens"].hides, padding.inputs["tokens"].unseen) == (PAD, "all")
    batch = tokens_and_labels(4, 9)
    batch["tokens"][1] = PAD
    with pytest.raises(BatchError, match="tokens hides all positions of sample 1"):
        pad(padding, batch)


def test_keys_that_several_numbers_hide_are_refused_where_a_query_may_see_none():
    """A query that sees no key would read added ones, and the engine looks for one number only."""
    padding = find_padding(make(lambda: OwnMask(eager_additive, lambda places: places >= 0)), with_places(4, 12))
    assert "places may hide keys by several numbers" in padding.shorter


@pytest.mark.parametrize("name", ["causal", "inverted", "window", "in sdpa", "a table"])
def test_what_is_refused_changes_the_outputs(name: str):
    """Without the refusal, a query at a hidden position would read those that are added."""
    model = make(UNSEEN[name][0])
    padding = find_padding(model, hide(name, samples=SAMPLES, positions=POSITIONS))
    free = padding.model_copy(update={"inputs": {p: _seen(how) for p, how in padding.inputs.items()}})
    for hidden in (slice(0, 3), slice(1, 6)) if name == "window" else (slice(0, 3),):
        with pytest.raises(AssertionError):
            check_exact(model, free, hide(name, hidden))


def _seen(how: InputPadding) -> InputPadding:
    return how.model_copy(update={"hides": None})


class Translator(Reader):
    """Attends to the positions of a source, and has targets of another length."""

    def forward(self, source: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        place, queries = torch.arange(source.shape[1]), torch.arange(labels.shape[1])
        x = self.tokens(source) + self.head.weight[place].sum(-1, keepdim=True)
        q = self.head.weight[queries].expand(len(source), 1, -1, -1)
        hidden = x[:, None] + F.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None], attn_mask=mask.bool()[:, None, None, :]
        )
        read = F.scaled_dot_product_attention(q, hidden, hidden, attn_mask=mask.bool()[:, None, None, :])
        logits = self.head(read[:, 0])
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED), "logits": logits}


def test_a_length_may_be_that_of_targets_by_chance():
    """Tables of 6 positions of the source and of 6 targets are one operator, those of 12 and 6 are two."""

    def batch(samples: int, positions: int) -> dict[str, Tensor]:
        source = with_mask(samples, positions)
        return {"source": source["tokens"], "mask": source["mask"], "labels": tokens_and_labels(samples, 6)["labels"]}

    model = make(lambda: Translator(boolean))
    family = ShapeFamily.of(prepare(model, batch(6, 12)), Shapes(length=(6, 12)), None, Topology.local(1))
    padding = family.padding_at((6, 12))
    assert (padding.fewer, padding.shorter) == ("", "")
    for samples, positions in ((6, 6), (4, 9)):
        check_exact(model, padding, batch(samples, positions))


# --- graphs for sizes in between --------------------------------------------------------------------------------------


def list_nodes(captured: Captured) -> list[tuple[Any, ...]]:
    """Every operator with its arguments and shapes."""
    return [
        (n.name, n.op, str(n.target), str(n.args), str(n.kwargs), [tuple(v.shape) for v in results_of(n)])
        for n in captured.graph.nodes
        if n.op != "output"
    ]


@pytest.mark.parametrize("name", ["causal", "alibi", "eager additive mask", "running sums"])
def test_graphs_in_between_are_those_that_are_captured(name: str):
    build, inputs = EXACT[name]
    family = ShapeFamily.of(
        prepare(make(build), inputs(SAMPLES, POSITIONS)),
        Shapes(batch=(2, 4, 6), length=(10, 15, 24)),
        None,
        Topology.local(1),
    )
    for shape in ((6, 15), (4, 24), (4, 15)):
        found, captured = family._derive(shape), family._capture(shape)
        assert found is not None
        assert list_nodes(found) == list_nodes(captured)
        assert [i.spec for i in found.inputs] == [i.spec for i in captured.inputs]
        assert {n: s.spec for n, s in found.states.items()} == {n: s.spec for n, s in captured.states.items()}
        for constant, value in captured.constants.items():
            assert torch.equal(found.constants[constant], value)


def test_graphs_that_do_not_grow_evenly_are_captured():
    """A factor that is no line, and a forward with other operators for short inputs."""

    def decides(x: Tensor) -> Tensor:
        return x + x.cumsum(1) if x.shape[1] > 12 else x

    for model, inputs in (
        (make(lambda: Scored(over_a_root)), {"tokens": tokens_and_labels(6, 24)["tokens"]}),
        (make(lambda: Reader(MASKS["causal"], decides)), tokens_and_labels(6, 24)),
    ):
        family = ShapeFamily.of(prepare(model, inputs), Shapes(length=(10, 15, 24)), None, Topology.local(1))
        assert family._derive((6, 15)) is None
        assert family._normal_at((6, 15)).inputs[0].spec.shape == (6, 15)
        assert family.padding_at((6, 24)).shorter
