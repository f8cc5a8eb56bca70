"""Soft-capped scores, ALiBi and prefixes: recognised in any notation, computed block by block, priced by pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.model import Captured
from partitioner.passes.normalize.document_masks import list_prefix_attentions, set_document_lengths
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops import attention
from partitioner.passes.ops.attention import (
    Band,
    PositionRange,
    cut_tile,
    get_band_limits,
    list_tiles,
    list_tiles_after,
    list_tiles_between,
    split_positions,
)
from partitioner.passes.ops.score_changes import choose_block_size
from partitioner.passes.shard.fold import fold
from tests.helpers.attention.packed_models import compare_documents
from tests.helpers.attention.score_models import HEADS, KV_HEADS, NOTATIONS, Attend, Marks, make_batch
from tests.helpers.models import CASES
from tests.helpers.normal_forms import operators

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

LENGTH, WIDTH = 24, 8
SCORED = ["partition.scored_attention.default"]

# --- the operator -----------------------------------------------------------------------------------------------------


def _is_within(distance: Tensor, band: Band) -> Tensor:
    """Where a query sees a key that is ``distance`` positions before it."""
    before = torch.ones_like(distance, dtype=torch.bool) if band.before is None else distance <= band.before
    return before if band.after is None else before & (distance >= -band.after)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, data: dict[str, Any], bands: tuple[Band, Band], cap: float | None
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if data["slopes"] is not None:
        scores = scores - data["slopes"][:, None, None] * distance
    shown, reached = (_is_within(distance, band)[None, None] for band in bands)
    if data["prefix"] is not None:
        shown = shown | (reached & data["prefix"][:, None, None, :])
    if data["ids"] is not None:
        shown = shown & (data["ids"][:, None, :, None] == data["ids"][:, None, None, :])
    return scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v


BANDS = [Band(None, 0), Band(), Band(3, 0), Band(2, 2), Band(0, 5)]


@settings(max_examples=80, derandomize=True)
@given(
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2)]),
    length=st.integers(1, 40),
    given_marks=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    band=st.sampled_from(BANDS),
    more=st.tuples(st.sampled_from([None, 0, 1, 7]), st.sampled_from([None, 0, 4])),
    cap=st.sampled_from([None, 0.3, 5.0]),
    block=st.sampled_from([3, 16, 256]),
    seed=st.integers(0, 99),
)
def test_the_operator_gives_what_a_matrix_of_scores_gives(
    rows: int, heads: tuple[int, int], length: int, given_marks: tuple[bool, ...], band: Band,
    more: tuple[int | None, int | None], cap: Any, block: int, seed: int,
):  # fmt: skip
    """Results and all gradients, in blocks that divide the tiles in any way."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    data: dict[str, Any] = {
        "ids": torch.randint(0, 3, (rows, length), generator=generator),
        "prefix": torch.rand(rows, length, generator=generator) < 0.3,
        "slopes": draw(heads[0]),
    }
    data = {name: x if present else None for (name, x), present in zip(data.items(), given_marks, strict=True)}
    reach = Band(*(None if a is None or b is None else a + b for a, b in zip(band, more, strict=True)))
    q, k, v = (draw(rows, n, length, 4).requires_grad_() for n in (heads[0], heads[1], heads[1]))
    trained = [q, k, v, *([data["slopes"].requires_grad_()] if data["slopes"] is not None and seed % 2 else [])]
    expected = _dense(q, k, v, data, (band, reach), cap)
    limits, reached = (list(get_band_limits(each)) for each in (band, reach))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "choose_block_size", lambda heads, on_cpu: block)
        patch.setattr(attention, "_ROWS", 2 * block)
        found, lse = torch.ops.partition.scored_attention(q, k, v, *data.values(), [], -1, *limits, None, cap, reached)
        weight = draw(*found.shape)
        gradients = torch.autograd.grad((found * weight).sum(), trained)
    assert lse.isfinite().all()
    for ours, theirs in zip(
        (found, *gradients), (expected, *torch.autograd.grad((expected * weight).sum(), trained)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def _cover(tiles: Any, places: Sequence[Tensor], band: Band, size: int) -> Tensor:
    """How often each pair of a query and a key, at ``places`` of the sequence, is in ``tiles``, which are cut into
    blocks of ``size``. The offset of each block is that of all of its pairs."""
    seen = torch.zeros(len(places[0]), len(places[1]), dtype=torch.int64)
    for tile in tiles:
        for part in cut_tile(tile, band, size):
            block = seen[slice(*part.rows), slice(*part.keys)]
            distance = torch.arange(block.shape[0])[:, None] - torch.arange(block.shape[1])
            real = places[0][slice(*part.rows), None] - places[1][slice(*part.keys)]
            assert torch.equal(real, distance + part.offset)
            limits = {"all": Band(), "diagonal": Band(None, 0), "band": part.limits or band}[part.kind]
            distance = distance + (0 if part.kind == "diagonal" else part.offset)
            shown = torch.ones_like(distance, dtype=torch.bool)
            if limits.before is not None:
                shown &= distance <= limits.before
            if limits.after is not None:
                shown &= distance >= -limits.after
            block += shown
    return seen


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(2, 5), st.integers(0, 9), st.integers(0, 9))
def test_keys_after_and_up_to_a_query_are_all_keys(
    num_ranks: int, size: int, zigzag: bool, block: int, rank: int, other: int
):
    """Each pair once, whichever parts of the sequence two ranks have."""
    rank, other, length = rank % num_ranks, other % num_ranks, 2 * size
    own, keys = (split_positions(length, num_ranks, r, zigzag) for r in (rank, other))
    places = tuple(torch.cat([torch.arange(p.place, p.place + p.length) for p in parts]) for parts in (own, keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_ROWS", block + 1)
        behind = _cover(list_tiles_after(own, keys), places, Band(), block)
        before = _cover(list_tiles(own, keys, Band(None, 0), in_order=True), places, Band(None, 0), block)
    assert torch.equal(behind, (places[1] > places[0][:, None]).long())
    assert torch.equal(before, (places[1] <= places[0][:, None]).long())


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(-50, 50), st.tuples(*[st.sampled_from([None, 0, 2, 9])] * 4),
)  # fmt: skip
def test_tiles_between_two_bands_have_the_pairs_of_the_wider_one(
    queries: int, keys: int, offset: int, limits: tuple[int | None, ...]
):
    """Each pair once, and no query of a tile sees none of its keys."""
    inner = Band(*limits[:2])
    outer = Band(*(None if a is None or b is None else a + b for a, b in zip(inner, limits[2:], strict=True)))
    own, others = (PositionRange(0, queries, 60 + offset),), (PositionRange(0, keys, 60),)
    places = tuple(torch.arange(p[0].place, p[0].place + p[0].length) for p in (own, others))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_ROWS", 7)
        list_tiles_between.cache_clear()
        list_tiles.cache_clear()
        tiles = list_tiles_between(own, others, inner, outer)
        seen = _cover(tiles, places, Band(), 64)
        list_tiles_between.cache_clear()
        list_tiles.cache_clear()
    distance = places[0][:, None] - places[1]
    assert torch.equal(seen, (_is_within(distance, outer) & ~_is_within(distance, inner)).long())
    for tile in tiles:
        assert (_cover([tile], places, Band(), 64)[slice(*tile.rows)].sum(1) > 0).all()


def test_no_block_has_more_scores_than_its_size():
    tiles = list_tiles((PositionRange(0, 2000, 0),), (PositionRange(0, 2000, 0),), Band(None, 0))
    parts = [part for tile in tiles for part in cut_tile(tile, Band(None, 0), 256)]
    assert max(max(p.rows[1] - p.rows[0], p.keys[1] - p.keys[0]) for p in parts) <= 256


@pytest.mark.parametrize(
    ("heads", "on_cpu", "size"), [(16, False, 1024), (64, False, 512), (2000, False, 256), (1, True, 256)]
)
def test_blocks_are_as_large_as_their_scores_allow(heads: int, on_cpu: bool, size: int):
    assert choose_block_size(heads, on_cpu) == size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_short_types_are_near_those_of_float32(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 40, 8, generator=generator).to(dtype).requires_grad_() for n in (4, 2, 2))
    weight, slopes = torch.randn(2, 4, 40, 8, generator=generator), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    results = []
    for operands in ((q, k, v), tuple(x.detach().float().requires_grad_() for x in (q, k, v))):
        out, _ = torch.ops.partition.scored_attention(*operands, None, None, slopes, [], -1, -1, 0, None, 2.0)
        results.append((out, *torch.autograd.grad((out.float() * weight).sum(), operands)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)


# --- recognition ------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """One attention in a notation. Its slopes are a buffer or, if they are trained, a parameter."""

    def __init__(self, attend: Attend, slopes: Tensor, trained: bool = False) -> None:
        super().__init__()
        self.attend = attend
        if trained:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, starts: Tensor, flags: Tensor) -> Tensor:
        return 2 * self.attend(q, k, v, Marks(ids, starts, flags, self.slopes))


def _operands(rows: int = 2, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, n, length, WIDTH, generator=generator, dtype=torch.float64)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    _, _, ids, starts, flags = make_batch(rows, length, seed)
    return {"q": q, "k": k, "v": v, "ids": ids, "starts": starts, "flags": flags}


def _slopes() -> Tensor:
    return 0.7 ** torch.arange(1, HEADS + 1, dtype=torch.float64)


def _squares(captured: Captured, length: int) -> list[str]:
    """The operators whose results have an element for each pair of positions."""
    values = [(n.name, n.meta.get("val")) for n in captured.graph.nodes]
    return [name for name, x in values if isinstance(x, Tensor) and tuple(x.shape[-2:]) == (length, length)]


def _check(model: Attending, operands: dict[str, Tensor]) -> list[str]:
    """The attentions and softmaxes of the normal form of ``model``, whose result is that of the model."""
    captured = normalize(capture(model, tuple(operands.values())))
    named = {"slopes": model.slopes.detach(), **captured.constants}
    given = [
        named[name] if (name := captured.placeholders[n.name]) in named else operands[n.name]
        for n in captured.graph.nodes
        if n.op == "placeholder"
    ]
    (found,) = run_graph(captured.graph, given)
    torch.testing.assert_close(found, model(**operands).detach(), rtol=1e-12, atol=1e-12)
    attentions = [name for name in operators(captured) if "attention" in name or "softmax" in name]
    length = operands["q"].shape[2]
    assert attentions != SCORED or length <= WIDTH or not _squares(captured, length)
    return attentions


@pytest.mark.parametrize("name", NOTATIONS)
def test_notations_of_changed_scores_and_prefixes(name: str):
    assert _check(Attending(NOTATIONS[name], _slopes()), _operands()) == SCORED


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(st.sampled_from(sorted(NOTATIONS)), st.integers(1, 3), st.integers(2, 20), st.integers(0, 99))
def test_notations_keep_their_meaning_in_all_sizes(name: str, rows: int, length: int, seed: int):
    _check(Attending(NOTATIONS[name], _slopes()), _operands(rows, length, seed))


@pytest.mark.parametrize("name", [n for n in NOTATIONS if n != "sloped_by_distance"])
def test_long_rows_make_no_square(name: str):
    """Constants of 16,384 positions squared would be too large to look at."""
    length = 1 << 14
    with torch.device("meta"):
        model = Attending(NOTATIONS[name], torch.zeros(HEADS))
        q, k, v = (torch.zeros(1, n, length, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
        data = torch.zeros(1, length).long(), torch.zeros(1).long(), torch.zeros(1, length).bool()
    captured = normalize(capture(model, (q, k, v, *data)))
    assert [name for name in operators(captured) if "attention" in name] == SCORED
    assert not _squares(captured, length)


def _causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def _by_mask(mask: Callable[[Marks], Tensor]) -> Attend:
    return lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, mask(m), enable_gqa=True)


def _by_scores(change: Callable[[Tensor, Marks], Tensor]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Marks) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return change(q @ k.transpose(-1, -2), m).softmax(-1) @ v

    return attend


PLACE = torch.arange(LENGTH)
DISTANCE = (PLACE - PLACE[:, None]).double()
HIDDEN = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~_causal(), -torch.inf)


def _rows(flags: Tensor) -> Tensor:
    return flags[:, None, None, :]


# Near misses: a softmax would not be the same.


def _chunks() -> Tensor:
    return torch.arange(LENGTH)[:, None] // 5 == torch.arange(LENGTH) // 5


OTHERS: dict[str, Attend] = {
    "prefix of queries": _by_mask(lambda m: m.flags[:, None, :, None] | _causal()),
    "prefix of the row, not of the document": _by_mask(
        lambda m: _rows(m.flags) | (compare_documents(m.ids) & _causal())
    ),
    "prefix of the document, not of the chunk": _by_mask(
        lambda m: compare_documents(m.ids) & (_rows(m.flags) | (_chunks() & _causal()))
    ),
    "prefix of the row, not of the chunk": _by_mask(lambda m: _rows(m.flags) | (_chunks() & _causal())),
    "two prefixes": _by_mask(lambda m: (_rows(m.flags) | _causal()) & (_rows(~m.flags) | _causal())),
    "and of flags": _by_mask(lambda m: (_rows(m.flags) & _causal()) | torch.eye(LENGTH).bool()),
    "squared distance": _by_mask(lambda m: m.slopes[:, None, None] * DISTANCE**2 + HIDDEN),
    "distance both ways": _by_mask(lambda m: -m.slopes[:, None, None] * DISTANCE.abs()),
    "slopes of positions": _by_mask(lambda m: m.slopes.repeat(6)[:, None] * DISTANCE + HIDDEN),
    "mask before a negative factor": _by_scores(lambda s, m: (s - HIDDEN + m.slopes[:, None, None] * DISTANCE) * -0.5),
    "mask before the cap": _by_scores(lambda s, m: torch.tanh(s + HIDDEN)),
    "cap after the bias": _by_scores(lambda s, m: torch.tanh(s + m.slopes[:, None, None] * DISTANCE) + HIDDEN),
    "two caps": _by_scores(lambda s, m: torch.tanh(torch.tanh(s)) + HIDDEN),
    "another function": _by_scores(lambda s, m: torch.sin(s) + HIDDEN),
    "unmasked product": _by_scores(lambda s, m: s + HIDDEN),
}  # fmt: skip


def _sloped(slopes: Tensor) -> Tensor:
    return slopes[:, None, None] * (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None])


CHUNKED: dict[str, Attend] = {
    "cap": _by_scores(lambda s, m: torch.tanh(s).masked_fill(~(_chunks() & _causal()), -torch.inf)),
    "cap and documents": _by_scores(
        lambda s, m: torch.tanh(s).masked_fill(~(_chunks() & compare_documents(m.ids)), -torch.inf)
    ),
    "slopes": _by_mask(
        lambda m: _sloped(m.slopes) + torch.where(_chunks() & _causal(), 0.0, -torch.inf).double()
    ),
    "prefix": _by_mask(lambda m: _chunks() & (_rows(m.flags) | _causal())),
    "prefix and documents": _by_mask(lambda m: compare_documents(m.ids) & _chunks() & (_rows(m.flags) | _causal())),
}  # fmt: skip


@pytest.mark.parametrize("name", CHUNKED)
def test_changed_scores_and_prefixes_within_chunks(name: str):
    assert _check(Attending(CHUNKED[name], _slopes()), _operands()) == SCORED


@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_stay(name: str):
    assert _check(Attending(OTHERS[name], _slopes()), _operands()) != SCORED


@pytest.mark.parametrize("name", [n for n in NOTATIONS if "sloped" in n])
def test_slopes_may_be_trained(name: str):
    assert _check(Attending(NOTATIONS[name], _slopes(), trained=True), _operands()) == SCORED


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("prefix_of_documents", lambda distance: distance < 0),
        ("prefix_beside_window", lambda distance: (distance < 0) | (distance >= 3)),
    ],
)
def test_pairs_that_a_prefix_shows_are_counted(name: str, shown: Callable[[Tensor], Tensor]):
    operands = _operands()
    captured = normalize(capture(Attending(NOTATIONS[name], _slopes()), tuple(operands.values())))
    paths = [i.path for i in captured.inputs]
    set_document_lengths(captured, (), dict(zip(paths, operands.values(), strict=True)))
    (node,) = list_prefix_attentions(captured.graph)
    ids, flags = operands["ids"], operands["flags"]
    pairs = (ids[:, :, None] == ids[:, None, :]) & flags[:, None, :] & shown(-DISTANCE)
    assert node.args[7] == round(int(pairs.sum()) / len(ids))
    set_document_lengths(captured, (), {})
    assert node.args[7] == -1


@pytest.mark.parametrize("family", ["gemma2", "gemma2-untied"])
def test_an_attention_stays_in_the_layer_that_computes_its_operands(family: str):
    """Its node has the module path of the operators that it replaces, so that layers are folded as wholes."""
    case = CASES[family]
    blocks = fold(normalize(capture(case.build(), case.inputs(2)))).blocks.values()
    found = 0
    for block in blocks:
        names = [str(node.target) for node in block.graph.nodes if node.op == "call_function"]
        attentions = sum("partition.scored_attention" in name for name in names)
        found += attentions
        assert sum("aten.linear" in name for name in names) >= attentions
    assert found
